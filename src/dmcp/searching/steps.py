"""Stage 1 (weights) and stage 2 (alphas) of one search step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dmcp.batches import input_of, size_of
from dmcp.budget import Budget, budget_loss, ratios
from dmcp.errors import TrainingError
from dmcp.losses import Loss, distillation_loss, loss_of
from dmcp.modules import tensors_in
from dmcp.runtime.distributed import SINGLE_PROCESS, World, mean_gradients, mean_values
from dmcp.runtime.engine import autocast
from dmcp.searching.config import SearchRecord, as_record
from dmcp.searching.subnets import Chains
from dmcp.settings import Precision
from dmcp.supernet import Supernet

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
    distill: bool = True,
    precision: Precision = Precision.FLOAT32,
    passes: Passes | None = None,
    world: World = SINGLE_PROCESS,
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
                value = distillation_loss(output, target) if distill and target else loss_of(loss, output, batch)
            slopes, back = _add_slopes(slopes, back, value * (size_of(batch) / samples), weights, given, h)
            losses.append(value.detach())
            target = target or [tensor.detach() for tensor in tensors_in(output)]
        if shared is not None and back is not None:
            slopes = _sums(slopes, torch.autograd.grad(shared, weights, back, allow_unused=True))
    for weight, slope in zip(weights, slopes, strict=True):
        weight.grad = slope
    mean_gradients(weights, samples, world)
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
    world: World = SINGLE_PROCESS,
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
        mean_gradients(_parameters(optimizer), samples, world)
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


_MUCH = 10  # times the first losses of the weights, from where on they diverge


@dataclass(frozen=True)
class Step:
    """What one step saw, still on the device."""

    step: int
    epoch: int
    samples: int  # of this rank
    lr: float
    trained: WeightRecord | None
    alpha_lr: float
    moved: ArchRecord | None

    def plain(self, world: World) -> SearchRecord:
        """The same as numbers, means over all ranks; waits for the device."""

        def mean(values: Tensor) -> list[float]:
            return mean_values(values.reshape(-1), self.samples, world).tolist()

        record = SearchRecord(self.step, self.epoch)
        if self.trained is not None:
            record = replace(record, lr=self.lr, weight_losses=tuple(mean(self.trained.losses)))
        if self.moved is not None:
            task = self.moved.task_loss
            record = replace(
                record,
                alpha_lr=self.alpha_lr,
                task_loss=None if task is None else mean(task)[0],
                budget_loss=self.moved.budget_loss.item(),
                ratios=tuple(self.moved.ratios.tolist()),
            )
        return record


class Log:
    """Records of the steps, read from the device now and then; where one is not finite the search stops."""

    def __init__(
        self, net: Supernet, every: int, on_record: Callable[[SearchRecord], None] | None, world: World
    ) -> None:
        self.net = net
        self.world = world
        self.every = every
        self.on_record = on_record
        self.records: list[SearchRecord] = []
        self.waiting: list[Step] = []
        self.good = self._state()

    def _state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def begin(self, earlier: list[dict[str, Any]]) -> None:
        """Go on after these records, from the state that the supernet now has."""
        self.records = [as_record(record) for record in earlier]
        self.good = self._state()

    def add(self, step: Step) -> None:
        """Keep what a step saw."""
        self.waiting.append(step)
        if len(self.waiting) == self.every:
            self.flush()

    def flush(self) -> None:
        """Read what waits; if all of it is finite, remember this state of the supernet, otherwise go back and stop."""
        steps, self.waiting = [step.plain(self.world) for step in self.waiting], []
        for record in steps:
            self._check(record, steps, "stage 1, the weights", *(record.weight_losses or ()))
            self._check(record, steps, "stage 2, the alphas", record.task_loss or 0.0, record.budget_loss or 0.0)
        if steps and not torch.stack([tensor.isfinite().all() for tensor in self.net.parameters()]).all().item():
            what = f"Weights or alphas became infinite or NaN by step {steps[-1].step} (epoch {steps[-1].epoch})"
            self._stop(what, "", steps)
        self.records += steps
        self.good = self._state()
        for record in steps if self.on_record else ():
            assert self.on_record is not None
            self.on_record(record)

    def _check(self, record: SearchRecord, steps: list[SearchRecord], stage: str, *losses: float) -> None:
        for loss in losses:
            if not math.isfinite(loss):
                what = f"The loss is {loss} in {stage}, at step {record.step} (epoch {record.epoch})"
                self._stop(what, stage, [it for it in steps if it.step <= record.step])

    @torch.no_grad()
    def _stop(self, what: str, stage: str, steps: list[SearchRecord]) -> NoReturn:
        records = [*self.records, *steps]
        for name, tensor in self.net.state_dict().items():
            tensor.copy_(self.good[name])
        last = f"after step {self.records[-1].step}" if self.records else "before the first step"
        grown = _growth(records)
        if grown:
            what = f"The weights diverged: {grown}. {what}"
        raise TrainingError(
            f"{what}; the supernet is again as it was {last}, a model that was given to dmcp.prune is as it was given. "
            f"{_advice(stage, records, bool(grown))}, or look at the data."
        )


def _growth(records: list[SearchRecord]) -> str:
    """How far the losses of the weights have grown, if that is much."""
    finite = [(it.step, max(filter(math.isfinite, it.weight_losses or ()), default=None)) for it in records]
    found = [(step, loss) for step, loss in finite if loss is not None]
    (_, first), (step, last) = (found[0], max(found, key=lambda it: it[1])) if found else ((0, 0.0), (0, 0.0))
    return f"their loss grew from {first:.3g} to {last:.3g} by step {step}" if last > _MUCH * first else ""


def _advice(stage: str, records: list[SearchRecord], grown: bool) -> str:
    """Which learning rate to lower; the one of the weights is shown as the steps have it, scaled by their samples."""
    rates = [it.lr for it in records if it.lr is not None]
    if rates and (grown or stage.startswith("stage 1")):
        return f"Lower lr, the weights' learning rate ({rates[-1]:.3g} in this step; a trained model needs a small one)"
    return "Lower lr or alpha_lr" if rates else "Lower alpha_lr"
