"""The two stages of a search: weight_step trains the weights of sub-networks, arch_step the alphas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmcp.batches import input_of, size_of
from dmcp.budget import Budget, budget_loss, ratios
from dmcp.engine import Precision, autocast
from dmcp.losses import Loss, imitation, loss_of
from dmcp.ranks import ALONE, Ranks, mean_gradients
from dmcp.searching.sandwich import Chains
from dmcp.supernet import Supernet
from dmcp.tracing.recording import tensors_in

Run = Callable[[Any, Tensor | None], Any]  # a network on an input and the head's output


@dataclass(frozen=True)
class Sliced:
    """A sub-network that takes only the first channels of the head's output, as a tensor of their own."""

    run: Run
    channels: int

    def part(self, h: Tensor) -> Tensor:
        """What it takes."""
        last = h.ndim == 4 and h.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        return h.detach()[:, : self.channels].contiguous(memory_format=layout).requires_grad_(h.requires_grad)


Subnet = Tensor | Run | Sliced  # its gates, or what runs it


@dataclass(frozen=True)
class Passes:
    """How a supernet is run with gates: they are folded into weights, then the network runs with these.

    A head runs once for all sub-networks; then `run` takes its output, too.
    """

    fold: Callable[[Tensor], dict[str, Tensor]]
    run: Callable[..., Any]  # (input, folded weights), or (input, the head's output, folded weights)
    head: Callable[[Any], Tensor] | None = None

    def __call__(self, x: Any, gates: Tensor, h: Tensor | None = None) -> Any:
        folded = self.fold(gates)
        return self.run(x, folded) if h is None else self.run(x, h, folded)


@dataclass(frozen=True)
class WeightRecord:
    """What one weight step saw; still on the device, so that no step waits for the host."""

    losses: Tensor  # of each sub-network, the largest first. (n,)


@dataclass(frozen=True)
class ArchRecord:
    """What one architecture step saw; still on the device."""

    task_loss: Tensor | None  # () or None where the task loss does not move the alphas
    budget_loss: Tensor  # ()
    ratios: Tensor  # expected cost over target, per limit. (L,)


def weight_step(
    net: Supernet,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    subnets: Sequence[Subnet],
    loss: Loss,
    distil: bool = True,
    precision: Precision = Precision.FLOAT32,
    passes: Passes | None = None,
    ranks: Ranks = ALONE,
) -> WeightRecord:
    """Stage 1 (eq. 14): train these sub-networks, gradients accumulated, one optimizer step in all.

    The first one learns the task; with `distil` the others imitate its output instead, which is not trained by that.
    Several batches count as one large one whose parts are normalised by themselves. The alphas are not touched.
    """
    weights = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
    slopes: list[Tensor | None] = [None] * len(weights)
    samples = sum(map(size_of, batches))
    losses: list[Tensor] = []
    for batch in batches:
        x = input_of(batch)
        with autocast(net.alpha.device, precision):
            shared = passes.head(x) if passes and passes.head else None
        h = None if shared is None else shared.detach().requires_grad_(shared.requires_grad)
        back: Tensor | None = None  # the slope that goes into the head, of all sub-networks at once
        target: list[Tensor] = []
        for subnet in subnets:
            given = subnet.part(h) if isinstance(subnet, Sliced) and h is not None else h
            with autocast(net.alpha.device, precision):
                output = _run(net, passes, subnet, x, given)
                value = imitation(output, target) if distil and target else loss_of(loss, output, batch)
            slopes, back = _add_slopes(slopes, back, value * (size_of(batch) / samples), weights, given, h)
            losses.append(value.detach())
            target = target or [tensor.detach() for tensor in tensors_in(output)]
        if shared is not None and back is not None:
            slopes = _sums(slopes, torch.autograd.grad(shared, weights, back, allow_unused=True))
    for weight, slope in zip(weights, slopes, strict=True):
        weight.grad = slope
    mean_gradients(weights, samples, ranks)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return WeightRecord(torch.stack(losses).reshape(len(batches), len(subnets)).mean(dim=0))


def arch_step(
    net: Supernet,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    chains: Chains,
    loss: Loss | None,
    budget: Budget,
    budget_weight: float = 0.1,
    tolerance: float = 0.95,
    precision: Precision = Precision.FLOAT32,
    passes: Passes | None = None,
    ranks: Ranks = ALONE,
) -> ArchRecord:
    """Stage 2 (eq. 15): move the alphas by the task loss of the soft network and by the budget loss.

    Without a loss the budget alone moves them, and the network is not run. Weights and buffers come out bit-identical.
    """
    optimizer.zero_grad(set_to_none=True)
    task: list[Tensor] = []
    samples = sum(map(size_of, batches))
    with _only_alphas(net):
        for batch in batches if loss else ():
            assert loss is not None
            gates = chains.gates(chains.marginals(net.alpha))
            with autocast(net.alpha.device, precision):
                value = loss_of(loss, (passes or net)(input_of(batch), gates), batch)
            torch.autograd.backward(value * (size_of(batch) / samples))
            task.append(value.detach())
        mean_gradients(_parameters(optimizer), samples, ranks)
        seen = ratios(budget, net.graph, chains.marginals(net.alpha), chains.sizes, chains.process)
        excess = budget_loss(seen, tolerance)
        torch.autograd.backward(budget_weight * excess)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return ArchRecord(torch.stack(task).mean() if task else None, excess.detach(), seen.detach())


def _run(net: Supernet, passes: Passes | None, subnet: Subnet, x: Any, h: Tensor | None) -> Any:
    if isinstance(subnet, Sliced):
        return subnet.run(x, h)
    if not isinstance(subnet, Tensor):
        return subnet(x, h)
    return passes(x, subnet, h) if passes else net(x, subnet)


def _add_slopes(
    slopes: Sequence[Tensor | None],
    back: Tensor | None,
    value: Tensor,
    weights: Sequence[Tensor],
    given: Tensor | None,  # what came from the head
    h: Tensor | None,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Earlier gradients and those of one more loss; nothing of the latter alone outlives this, they are large."""
    if given is None or not given.requires_grad:
        return _sums(slopes, torch.autograd.grad(value, weights, allow_unused=True)), back
    *found, slope = torch.autograd.grad(value, [*weights, given], allow_unused=True)
    return _sums(slopes, found), _add_back(back, slope, h)


def _sums(before: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients added to earlier ones all at once: backward() would add those of each weight by itself."""
    total: list[Tensor | None] = [old if new is None else new for old, new in zip(before, found, strict=True)]
    pairs = [(place, old, new) for place, (old, new) in enumerate(zip(before, found, strict=True))]
    both = [(place, old, new) for place, old, new in pairs if old is not None and new is not None]
    for dtype in {new.dtype for _, _, new in both}:
        places, olds, news = zip(*(it for it in both if it[2].dtype == dtype), strict=True)
        for place, added in zip(places, torch._foreach_add(olds, news), strict=True):
            total[place] = added
    return total


def _add_back(before: Tensor | None, found: Tensor | None, h: Tensor | None) -> Tensor | None:
    """The gradient into the head's output, of one more sub-network, which may have had only its first channels."""
    if found is None or h is None:
        return before
    if found.shape == h.shape:
        return found if before is None else before + found
    total = torch.zeros_like(h) if before is None else before
    if not any(total.is_contiguous(memory_format=it) for it in (torch.contiguous_format, torch.channels_last)):
        total = total.contiguous()  # of a sum, autograd gives one number for many places
    total[:, : found.shape[1]] += found
    return total


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@contextlib.contextmanager
def _only_alphas(net: Supernet) -> Iterator[None]:
    """Weights need no gradient meanwhile, and buffers (running statistics) are put back."""
    trained = [weight for weight in net.weights() if weight.requires_grad]
    owners = [(part, name) for part in net.model.modules() for name, _ in part.named_buffers(recurse=False)]
    buffers = [part.get_buffer(name) for part, name in owners]
    before = [torch.empty_like(buffer) for buffer in buffers]
    _copy(before, buffers)
    for weight in trained:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)
        for (part, name), buffer in zip(owners, buffers, strict=True):
            setattr(part, name, buffer)  # a forward may have put another tensor in its place
        _copy(buffers, before)


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All tensors of one kind at once: one kernel on a GPU, not one for each."""
    for dtype in {target.dtype for target in targets}:
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
