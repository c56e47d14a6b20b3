"""One step of the search: stage 1 trains the weights (eq. 14), stage 2 moves the alphas (eq. 15)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmcp.budgets import Budget
from dmcp.markov import moment
from dmcp.runtime.batches import input_of, size_of
from dmcp.runtime.distributed import SINGLE_PROCESS, World, mean_gradients, mean_values
from dmcp.runtime.engine import ResolvedEngine, autocast
from dmcp.searching.bounds import extreme_widths
from dmcp.searching.budget import budget_loss, ratios
from dmcp.searching.records import ArchRecord
from dmcp.searching.stem import find_stem
from dmcp.searching.subnets import Chains, sample_gates
from dmcp.searching.supernet import Narrow, Supernet
from dmcp.settings import Distill, Precision, ResolvedSearchConfig, Sampling
from dmcp.tracing.folds import run_folded
from dmcp.tracing.modules import modules_of
from dmcp.training.distillation import Distillation, detached, distillation_loss
from dmcp.training.losses import Loss, loss_of
from dmcp.training.optimizer import MakeOptimizer, make_optimizer, parameter_groups, rate_shares, set_lr, sgd

Forward = Callable[[Any, Tensor], Any]  # runs the supernet on an input with gates
Subnet = Tensor | Callable[[Any, Tensor | None], Any]  # its gates, or what runs it on an input and the stem's output
Head = Callable[[Any], Tensor]  # runs the stem, once for all sub-networks of a batch


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What all steps of a search share."""

    net: Supernet
    chains: Chains
    budget: Budget
    config: ResolvedSearchConfig
    loss: Loss
    distill: Distillation = Distill.CLASSES  # how sub-networks learn from the output of the largest one
    precision: Precision = Precision.FLOAT32
    world: World = SINGLE_PROCESS
    # the sizes of a user's own loss in stage 2, summed, and the number of steps; None for the default loss. (2,)
    loss_sizes: Tensor | None = None


def weight_step(
    context: StepContext,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    subnets: Sequence[Subnet],
    head: Head | None = None,
) -> Tensor:
    """Stage 1 (eq. 14): train sub-networks by the sandwich rule, in one optimizer step; returns their losses. (n,)

    Several batches count as one large batch. The alphas are not touched.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    losses, gradients = weight_gradients(context, batches, weights, subnets, head)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    mean_gradients(weights, sum(map(size_of, batches)), context.world)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses


def weight_gradients(
    context: StepContext,
    batches: Sequence[Any],
    weights: Sequence[Tensor],
    subnets: Sequence[Subnet],
    head: Head | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses of sub-networks (n,), and the gradients of their sum.

    The first sub-network learns the task; with `distill` the others learn from its output.
    """
    net = context.net
    device = net.alpha.device
    gradients: list[Tensor | None] = [None] * len(weights)
    samples = sum(map(size_of, batches))
    losses: list[Tensor] = []
    for batch in batches:
        x = input_of(batch)
        share = size_of(batch) / samples

        # The stem runs forward once and backward once: the sub-networks read a detached copy of its output, h.
        stem_output: Tensor | None = None
        h: Tensor | None = None
        h_gradient: Tensor | None = None  # of all sub-networks together
        if head is not None:
            with autocast(device, context.precision):
                stem_output = head(x)
            h = stem_output.detach().requires_grad_(stem_output.requires_grad)

        target: Any = None  # the output of the first sub-network
        for index, subnet in enumerate(subnets):
            h_part = h
            if isinstance(subnet, Narrow) and h is not None:
                h_part = subnet.part(h)
            with autocast(device, context.precision):
                if callable(subnet):
                    output = subnet(x, h_part)
                else:
                    output = net(x, subnet)
                if context.config.distill and index > 0:
                    loss = distillation_loss(output, target, kind=context.distill)
                else:
                    loss = loss_of(context.loss, output, batch)
            inputs = list(weights)
            if h_part is not None and h_part.requires_grad:
                inputs.append(h_part)
            new = torch.autograd.grad(loss * share, inputs, allow_unused=True)
            gradients = _sums(gradients, new[: len(weights)])
            if h is not None and len(new) > len(weights):
                h_gradient = _add_to_h_gradient(h_gradient, new[-1], h)
            del new  # these are large
            losses.append(loss.detach())
            if index == 0:
                target = detached(output)

        if stem_output is not None and h_gradient is not None:
            new = torch.autograd.grad(stem_output, weights, h_gradient, allow_unused=True)
            gradients = _sums(gradients, new)
    return torch.stack(losses).reshape(len(batches), len(subnets)).mean(dim=0), gradients


def arch_step(
    context: StepContext, batches: Sequence[Any], optimizer: torch.optim.Optimizer, forward: Forward | None = None
) -> ArchRecord:
    """Stage 2 (eq. 15): move the alphas by the task loss of the soft network and by the budget loss.

    A user's own loss counts relative to its mean size, so that its unit does not decide what the budget loss weighs.
    With `task_loss=False` the network is not run. Weights and buffers come out bit-identical.
    """
    optimizer.zero_grad(set_to_none=True)
    record = arch_gradient(context, batches, forward)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return record


def arch_gradient(context: StepContext, batches: Sequence[Any], forward: Forward | None = None) -> ArchRecord:
    """The losses of stage 2, in their own units; sets the gradient of the alphas, which must have none before."""
    net = context.net
    chains = context.chains
    config = context.config
    forward = forward or net
    samples = sum(map(size_of, batches))
    task_losses: list[Tensor] = []
    with only_alphas(net):
        if config.task_loss:
            for batch in batches:
                gates = chains.gates(chains.marginals(net.alpha))
                with autocast(net.alpha.device, context.precision):
                    loss = loss_of(context.loss, forward(input_of(batch), gates), batch)
                torch.autograd.backward(loss * (size_of(batch) / samples))
                task_losses.append(loss.detach())
        mean_gradients([net.alpha], samples, context.world)
        task_loss = None
        if task_losses:
            task_loss = torch.stack(task_losses).mean()

        # The unit of a user's own loss may be anything. The factor is the same on all ranks, and stays on the device.
        if task_loss is not None and context.loss_sizes is not None:
            add_size(context.loss_sizes, mean_values(task_loss, samples, context.world))
            if net.alpha.grad is not None:
                net.alpha.grad.div_(mean_size(context.loss_sizes))

        # The budget loss needs no data: it is the same on all ranks.
        marginals = chains.marginals(net.alpha)
        shares = ratios(context.budget, net.graph, marginals, chains.sizes)
        excess = budget_loss(shares, config.tolerance)
        torch.autograd.backward(config.budget_weight * excess)
    return ArchRecord(
        task_loss=task_loss,
        budget_loss=excess.detach(),
        ratios=shares.detach(),
        widths=moment(marginals.detach(), chains.sizes, 1),
    )


def add_size(loss_sizes: Tensor, loss: Tensor) -> None:
    """Add the size of a loss, which may be negative, to those of earlier steps, in place. (2,), ()

    A loss that is not finite is left out, since a loop of the user's own may skip such a step and go on.
    """
    loss_sizes[0] += loss.abs().nan_to_num(nan=0.0, posinf=0.0)
    loss_sizes[1] += loss.isfinite()


def mean_size(loss_sizes: Tensor) -> Tensor:
    """The mean size of a loss; 1 if it has always been zero. (2,) -> ()

    It is the mean over all steps so far, since dividing by the loss of one step would make a huge gradient where that
    is near zero. The first step has only its own loss to be divided by. A loss of size 1 keeps its gradient:
    cross-entropy has sizes of 0.6 to 4.6 in the searches that chose the defaults (experiments/REPORT.md, "units").
    """
    total, steps = loss_sizes.unbind()
    return torch.where(total > 0, total / steps, torch.ones_like(total))


def as_loss(value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """A scalar with this value whose backward pass gives the parameters these gradients."""
    dots = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            dots.append((parameter * gradient).sum())
    total = torch.stack(dots).sum()
    return total + (value - total).detach()


def _sums(before: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add gradients to earlier ones in one call; backward() would launch a kernel for each weight."""
    sums: list[Tensor | None] = []
    pairs: dict[torch.dtype, list[tuple[int, Tensor, Tensor]]] = {}  # of gradients that are in both lists
    for index, (old, gradient) in enumerate(zip(before, new, strict=True)):
        sums.append(old if gradient is None else gradient)
        if old is not None and gradient is not None:
            pairs.setdefault(gradient.dtype, []).append((index, old, gradient))
    for same_dtype in pairs.values():
        indices, olds, gradients = zip(*same_dtype, strict=True)
        for index, total in zip(indices, torch._foreach_add(olds, gradients), strict=True):
            sums[index] = total
    return sums


def _add_to_h_gradient(before: Tensor | None, gradient: Tensor | None, h: Tensor) -> Tensor | None:
    """Add one sub-network's gradient of the stem's output, if any; it may cover only the first channels."""
    if gradient is None:
        return before
    if gradient.shape == h.shape:
        return gradient if before is None else before + gradient
    total = before
    if total is None:
        total = torch.zeros_like(h)
    formats = (torch.contiguous_format, torch.channels_last)
    if not any(total.is_contiguous(memory_format=memory_format) for memory_format in formats):
        total = total.contiguous()  # the gradient of a sum is an expanded view
    total[:, : gradient.shape[1]] += gradient
    return total


@contextlib.contextmanager
def only_alphas(net: Supernet) -> Iterator[None]:
    """While entered, weights need no gradient; at the end, buffers (running statistics) are put back."""
    trained = [weight for weight in net.weights() if weight.requires_grad]
    owners = []
    buffers = []
    for module in modules_of(net.model):
        for name, buffer in module.named_buffers(recurse=False):
            owners.append((module, name))
            buffers.append(buffer)
    before = [torch.empty_like(buffer) for buffer in buffers]
    _copy(before, buffers)
    for weight in trained:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)
        for (module, name), buffer in zip(owners, buffers, strict=True):
            setattr(module, name, buffer)  # a forward may have put another tensor in its place
        _copy(buffers, before)


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All tensors of one dtype at once: one kernel on a GPU, not one for each."""
    for dtype in {target.dtype for target in targets}:
        targets_of_dtype = []
        sources_of_dtype = []
        for target, source in zip(targets, sources, strict=True):
            if target.dtype == dtype:
                targets_of_dtype.append(target)
                sources_of_dtype.append(source)
        torch._foreach_copy_(targets_of_dtype, sources_of_dtype)


class Steps:
    """Both stages as a search runs them, with their optimizers; an engine may compile parts and replay CUDA graphs.

    The stem (first layers that no gate reaches) runs once for all sub-networks, and the smallest sub-network runs as a
    narrow copy. Both need an exact graph.
    """

    def __init__(self, context: StepContext, engine: ResolvedEngine, optimizer: MakeOptimizer | None = None) -> None:
        net = context.net
        config = context.config
        chains = context.chains
        self.context = context
        default = partial(
            sgd, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, device=engine.device
        )
        self.weight_optimizer = make_optimizer(optimizer or default, parameter_groups(net.model, config.weight_decay))
        self.rate_shares = rate_shares(self.weight_optimizer)
        self.alpha_optimizer = sgd(
            net.alphas(), config.alpha_lr, config.alpha_momentum, config.alpha_momentum > 0, engine.device
        )

        # What runs the network. Hard and soft gates are of other dtypes, and compiled apart.
        self._run_whole = engine.compiled(partial(run_folded, net.model))
        self._fold_hard = engine.compiled(net.fold)
        self._fold_soft = engine.compiled(net.fold)
        self.stem = None
        if net.graph.exact:
            self.stem = find_stem(net)
        if self.stem is not None:
            self._run_head = engine.compiled(self.stem.head)
            self._run_tail = engine.compiled(self.stem.tail)

        # The sub-networks of every step. (The others are sampled.)
        self._largest_gates = net.hard(chains.sizes.sum(dim=1))
        self._largest_is_unpruned = bool(self._largest_gates.all())
        self._smallest_gates = net.hard(chains.sizes[:, 0])
        self.narrow: Narrow | None = None  # the smallest one
        if net.graph.exact and not any(recording.caches for recording in net.graph.recordings):
            smallest, _ = extreme_widths(net.graph, chains.sizes)
            align = 8 if engine.device.type == "cuda" else 1  # what tensor cores need
            if self.stem is None:
                self.narrow = Narrow(net, smallest, align)
            else:
                self.narrow = Narrow(net, smallest, align, self.stem.paths, self.stem.value)
            self.narrow.run = engine.compiled(self.narrow.run)

        self.run_stage1 = engine.repeated(self._stage1)
        self.run_stage2 = engine.repeated(self._stage2)

    def train_weights(self, batches: list[Any], sampling: Sampling, generator: torch.Generator, lr: float) -> Tensor:
        """Stage 1 with newly sampled sub-networks; returns the losses of all sub-networks. (n,)"""
        set_lr(self.weight_optimizer, lr, self.rate_shares)
        gates = self._sample(sampling, generator)
        return self.run_stage1(batches, gates)  # type: ignore[no-any-return]

    def move_alphas(self, batches: list[Any], lr: float, growth: float = 1.0) -> ArchRecord:
        """Stage 2; then all alphas grow by a factor, which sharpens the chains and leaves their borders in place."""
        set_lr(self.alpha_optimizer, lr)
        record: ArchRecord = self.run_stage2(batches)
        if growth > 1:
            with torch.no_grad():
                self.context.net.alpha.mul_(growth)
        return record

    def weight_gradients(
        self, batch: Any, sampling: Sampling, generator: torch.Generator, weights: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The losses and gradients of stage 1, without an optimizer."""
        gates = self._sample(sampling, generator)
        head = self._head_for([batch])
        return weight_gradients(self.context, [batch], weights, self._subnets(gates, head), head)

    def _stage1(self, batches: list[Any], gates: Tensor) -> Tensor:
        head = self._head_for(batches)
        return weight_step(self.context, batches, self.weight_optimizer, self._subnets(gates, head), head)

    def _stage2(self, batches: list[Any]) -> ArchRecord:
        return arch_step(self.context, batches, self.alpha_optimizer, self._run_soft)

    def _sample(self, sampling: Sampling, generator: torch.Generator) -> Tensor:
        """Gates of the random sub-networks of one step. (n, channels)"""
        count = self.context.config.subnets
        if count == 0:
            return self._largest_gates.new_empty(0, len(self._largest_gates))
        return torch.stack(sample_gates(self.context.net, self.context.chains, sampling, count, generator))

    def _head_for(self, batches: list[Any]) -> Head | None:
        """What runs the stem, if all batches have the shape that it was found for."""
        if self.stem is None or not all(self.stem.fits(input_of(batch)) for batch in batches):
            return None
        return self._run_head

    def _subnets(self, gates: Tensor, head: Head | None) -> list[Subnet]:
        """The sandwich rule: the largest sub-network, the smallest, and those with these gates. (n, channels)"""
        largest: Subnet
        if self._largest_is_unpruned:
            largest = partial(self._run_folded, self.context.net.unfolded)
        else:
            largest = self._gated(self._largest_gates)
        # The narrow network begins behind the stem, if there is one.
        smallest: Subnet
        if self.narrow is not None and (self.stem is None or head is not None):
            smallest = self.narrow
        else:
            smallest = self._gated(self._smallest_gates)
        return [largest, smallest, *(self._gated(row) for row in gates)]

    def _gated(self, gates: Tensor) -> Subnet:
        return partial(self._run_folded, partial(self._fold_hard, gates))

    def _run_folded(self, fold: Callable[[], dict[str, Tensor]], x: Any, h: Tensor | None) -> Any:
        """Run the network with the folded weights, which are made now, or what is behind the stem on its output."""
        if h is None or self.stem is None:
            return self._run_whole(x, fold())
        return self._run_tail(x, h, fold())

    def _run_soft(self, x: Any, gates: Tensor) -> Any:
        return self._run_whole(x, self._fold_soft(gates))
