"""One step of the search: stage 1 trains the weights (eq. 14), stage 2 moves the alphas (eq. 15)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmcp.budgets import Budget
from dmcp.runtime.batches import input_of, size_of
from dmcp.runtime.distributed import SINGLE_PROCESS, World, mean_gradients
from dmcp.runtime.engine import ResolvedEngine, autocast
from dmcp.searching.budget import budget_loss, ratios
from dmcp.searching.records import extremes
from dmcp.searching.subnets import Chains, find_stem, sample_gates
from dmcp.searching.supernet import Narrow, Supernet
from dmcp.settings import Precision, Sampling, SearchConfig
from dmcp.tracing.folds import run_folded
from dmcp.tracing.modules import modules_of, tensors_in
from dmcp.training.losses import Loss, distillation_loss, loss_of
from dmcp.training.optimizer import MakeOptimizer, make_optimizer, parameter_groups, rate_shares, set_lr, sgd

Forward = Callable[[Any, Tensor], Any]  # a supernet on an input with gates
Subnet = Tensor | Callable[[Any, Tensor | None], Any]  # its gates, or what runs it on an input and the stem's output
Head = Callable[[Any], Tensor]  # the stem, which runs once for all sub-networks of a batch


@dataclass(frozen=True)
class Setup:
    """What all steps of a search share."""

    net: Supernet
    chains: Chains
    budget: Budget
    config: SearchConfig
    loss: Loss
    precision: Precision = Precision.FLOAT32
    world: World = SINGLE_PROCESS


class ArchRecord(NamedTuple):
    """What one step of the alphas saw; still on the device, so that no step waits for the host."""

    task_loss: Tensor | None  # () or None where the task loss does not move the alphas
    budget_loss: Tensor  # ()
    ratios: Tensor  # expected cost over target, per limit. (L,)
    widths: Tensor  # expected ones. (S,)


def weight_step(
    setup: Setup,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    subnets: Sequence[Subnet],
    head: Head | None = None,
) -> Tensor:
    """Stage 1 (eq. 14): train sub-networks by the sandwich rule, in one optimizer step; returns their losses. (n,)

    Several batches count as one large batch. The alphas are not touched.
    """
    weights = [it for group in optimizer.param_groups for it in group["params"] if it.requires_grad]
    losses, gradients = weight_gradients(setup, batches, weights, subnets, head)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    mean_gradients(weights, sum(map(size_of, batches)), setup.world)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses


def weight_gradients(
    setup: Setup, batches: Sequence[Any], weights: Sequence[Tensor], subnets: Sequence[Subnet], head: Head | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses of sub-networks (n,), and the gradients of their sum.

    The first sub-network learns the task; with `distill` the others learn from its output.
    """
    gradients: list[Tensor | None] = [None] * len(weights)
    samples = sum(map(size_of, batches))
    losses: list[Tensor] = []
    for batch in batches:
        x = input_of(batch)
        with autocast(setup.net.alpha.device, setup.precision):
            shared = head(x) if head else None
        h = None if shared is None else shared.detach().requires_grad_(shared.requires_grad)
        back: Tensor | None = None  # the gradient into the stem, of all sub-networks at once
        target: list[Tensor] = []
        for subnet in subnets:
            given = subnet.part(h) if isinstance(subnet, Narrow) and h is not None else h
            with autocast(setup.net.alpha.device, setup.precision):
                output = subnet(x, given) if callable(subnet) else setup.net(x, subnet)
                learns = setup.config.distill and target
                value = distillation_loss(output, target) if learns else loss_of(setup.loss, output, batch)
            inputs = [*weights, given] if given is not None and given.requires_grad else [*weights]
            found = torch.autograd.grad(value * (size_of(batch) / samples), inputs, allow_unused=True)
            gradients = _sums(gradients, found[: len(weights)])
            back = _add_back(back, found[len(weights) :], h)
            del found  # these are large
            losses.append(value.detach())
            target = target or [tensor.detach() for tensor in tensors_in(output)]
        if shared is not None and back is not None:
            gradients = _sums(gradients, torch.autograd.grad(shared, weights, back, allow_unused=True))
    return torch.stack(losses).reshape(len(batches), len(subnets)).mean(dim=0), gradients


def arch_step(
    setup: Setup, batches: Sequence[Any], optimizer: torch.optim.Optimizer, forward: Forward | None = None
) -> ArchRecord:
    """Stage 2 (eq. 15): move the alphas by the task loss of the soft network and by the budget loss.

    With `task_loss=False` the network is not run. Weights and buffers come out bit-identical.
    """
    optimizer.zero_grad(set_to_none=True)
    seen = arch_gradient(setup, batches, forward)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return seen


def arch_gradient(setup: Setup, batches: Sequence[Any], forward: Forward | None = None) -> ArchRecord:
    """The losses of stage 2; their gradient is added to that of the alphas."""
    net, chains, config = setup.net, setup.chains, setup.config
    task: list[Tensor] = []
    samples = sum(map(size_of, batches))
    with _only_alphas(net):
        for batch in batches if config.task_loss else ():
            gates = chains.gates(chains.marginals(net.alpha))
            with autocast(net.alpha.device, setup.precision):
                value = loss_of(setup.loss, (forward or net)(input_of(batch), gates), batch)
            torch.autograd.backward(value * (size_of(batch) / samples))
            task.append(value.detach())
        mean_gradients([net.alpha], samples, setup.world)
        kept = chains.marginals(net.alpha)
        seen = ratios(setup.budget, net.graph, kept, chains.sizes, chains.process)
        excess = budget_loss(seen, config.tolerance)
        torch.autograd.backward(config.budget_weight * excess)
    widths = chains.process.moment(kept.detach(), chains.sizes, 1)
    return ArchRecord(torch.stack(task).mean() if task else None, excess.detach(), seen.detach(), widths)


def as_loss(value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """A scalar with this value whose backward pass gives the parameters these gradients."""
    dots = [(it * found).sum() for it, found in zip(parameters, gradients, strict=True) if found is not None]
    total = torch.stack(dots).sum()
    return total + (value - total).detach()


def _sums(before: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add gradients to earlier ones in one call; backward() would launch a kernel for each weight."""
    total: list[Tensor | None] = [old if new is None else new for old, new in zip(before, found, strict=True)]
    pairs = enumerate(zip(before, found, strict=True))
    both = [(place, old, new) for place, (old, new) in pairs if old is not None and new is not None]
    for dtype in {new.dtype for _, _, new in both}:
        places, olds, news = zip(*(it for it in both if it[2].dtype == dtype), strict=True)
        for place, added in zip(places, torch._foreach_add(olds, news), strict=True):
            total[place] = added
    return total


def _add_back(before: Tensor | None, found: Sequence[Tensor | None], h: Tensor | None) -> Tensor | None:
    """Add one sub-network's gradient of the stem's output, if any; it may cover only the first channels."""
    gradient = found[0] if found else None
    if gradient is None or h is None:
        return before
    if gradient.shape == h.shape:
        return gradient if before is None else before + gradient
    total = torch.zeros_like(h) if before is None else before
    if not any(total.is_contiguous(memory_format=it) for it in (torch.contiguous_format, torch.channels_last)):
        total = total.contiguous()  # the gradient of a sum is an expanded view
    total[:, : gradient.shape[1]] += gradient
    return total


@contextlib.contextmanager
def _only_alphas(net: Supernet) -> Iterator[None]:
    """Weights need no gradient meanwhile, and buffers (running statistics) are put back."""
    trained = [weight for weight in net.weights() if weight.requires_grad]
    owners = [(part, name) for part in modules_of(net.model) for name, _ in part.named_buffers(recurse=False)]
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
    """All tensors of one dtype at once: one kernel on a GPU, not one for each."""
    for dtype in {target.dtype for target in targets}:
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class Steps:
    """Both stages as they are run.

    The stem (first layers that no gate reaches) runs once for all sub-networks, and the smallest sub-network runs as a
    narrow copy. Both need an exact graph.
    """

    def __init__(self, setup: Setup, engine: ResolvedEngine, optimizer: MakeOptimizer | None = None) -> None:
        self.setup, net, config, device = setup, setup.net, setup.config, engine.device
        usual = partial(sgd, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, device=device)
        self.weights = make_optimizer(optimizer or usual, parameter_groups(net.model, config.weight_decay))
        self.shares = rate_shares(self.weights)
        self.alphas = sgd(net.alphas(), config.alpha_lr, config.alpha_momentum, config.alpha_momentum > 0, device)
        full = engine.compiled(lambda x, folded: run_folded(net.model, x, folded))
        fold, fold_soft = (engine.compiled(net.fold) for _ in range(2))
        stem = find_stem(net) if net.graph.exact else None
        head, tail = (engine.compiled(stem.head), engine.compiled(stem.tail)) if stem else (None, None)
        gated = net.hard(setup.chains.sizes[:, 0])
        self.narrow: Narrow | None = None
        if net.graph.exact and not any(recording.caches for recording in net.graph.recordings):
            align = 8 if device.type == "cuda" else 1  # what tensor cores want
            border = (stem.paths, stem.value) if stem else ()
            self.narrow = Narrow(net, extremes(net.graph, setup.chains.sizes)[0], align, *border)
            self.narrow.run = engine.compiled(self.narrow.run)
        self.largest = net.hard(setup.chains.sizes.sum(dim=1))
        whole: Callable[[], Any] = net.unfolded if self.largest.all() else partial(fold, self.largest)

        def run(weights: Callable[[], Any], x: Any, h: Tensor | None) -> Any:
            return full(x, weights()) if h is None or tail is None else tail(x, h, weights())

        def sandwich(batches: list[Any], gates: Tensor) -> tuple[list[Subnet], Head | None]:
            as_traced = stem is not None and all(stem.fits(input_of(batch)) for batch in batches)
            some: list[Subnet] = [partial(run, whole), *(partial(run, partial(fold, it)) for it in (gated, *gates))]
            if self.narrow and (as_traced or stem is None):
                some[1] = self.narrow
            return some, head if as_traced else None

        def stage1(batches: list[Any], gates: Tensor) -> Tensor:
            return weight_step(setup, batches, self.weights, *sandwich(batches, gates))

        stage2 = partial(arch_step, setup, optimizer=self.alphas, forward=lambda x, it: full(x, fold_soft(it)))

        self.sandwich = sandwich
        self.stage1, self.stage2 = engine.repeated(stage1), engine.repeated(stage2)

    def train_weights(self, batches: list[Any], sampling: Sampling, generator: torch.Generator, lr: float) -> Tensor:
        """Stage 1 with newly sampled sub-networks."""
        set_lr(self.weights, lr, self.shares)
        return self.stage1(batches, self._sample(sampling, generator))  # type: ignore[no-any-return]

    def weight_gradients(
        self, batch: Any, sampling: Sampling, generator: torch.Generator, weights: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The losses and gradients of stage 1, without an optimizer."""
        subnets, head = self.sandwich([batch], self._sample(sampling, generator))
        return weight_gradients(self.setup, [batch], weights, subnets, head)

    def _sample(self, sampling: Sampling, generator: torch.Generator) -> Tensor:
        gates = sample_gates(self.setup.net, self.setup.chains, sampling, self.setup.config.subnets, generator)
        return torch.stack(gates) if gates else self.largest[None][:0]

    def move_alphas(self, batches: list[Any], lr: float, growth: float = 1.0) -> ArchRecord:
        """Stage 2; then all alphas grow by a factor, which sharpens the chains and leaves their borders in place."""
        set_lr(self.alphas, lr)
        moved: ArchRecord = self.stage2(batches)
        if growth > 1:
            with torch.no_grad():
                self.setup.net.alpha.mul_(growth)
        return moved
