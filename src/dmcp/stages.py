"""The two stages of a search: weight_step trains the weights of sub-networks, arch_step the alphas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmcp.batches import input_of
from dmcp.budget import Budget, budget_loss, ratios
from dmcp.errors import TrainingError
from dmcp.recording import tensors_in
from dmcp.sandwich import Chains
from dmcp.supernet import Supernet
from dmcp.training import Loss


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
    subnets: Sequence[Tensor],
    loss: Loss,
    distil: bool = True,
) -> WeightRecord:
    """Stage 1 (eq. 14): train the sub-networks with these gates, gradients accumulated, one optimizer step in all.

    The first one learns the task; with `distil` the others imitate its output instead, which is not trained by that.
    Several batches count as one large one whose parts are normalised by themselves. The alphas are not touched.
    """
    optimizer.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for batch in batches:
        target: list[Tensor] = []
        for gates in subnets:
            output = net(input_of(batch), gates)
            value = imitation(output, target) if distil and target else loss(output, batch)
            (value / len(batches)).backward()
            losses.append(value.detach())
            target = target or [tensor.detach() for tensor in tensors_in(output)]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return WeightRecord(torch.stack(losses).reshape(len(batches), len(subnets)).mean(dim=0))


def imitation(output: Any, target: Sequence[Tensor]) -> Tensor:
    """How far the classes along dim 1 are from the target's: KL divergence, summed over the tensors of the output."""
    parts: list[Tensor] = []
    for own, wanted in zip(tensors_in(output), target, strict=True):
        if own.ndim < 2 or own.shape[1] < 2 or not own.is_floating_point():
            raise TrainingError(
                f"Sub-networks imitate classes along dim 1, but an output is {tuple(own.shape)}: set distil=False."
            )
        kept = F.log_softmax(wanted, dim=1)
        parts.append((kept.exp() * (kept - F.log_softmax(own, dim=1))).sum(dim=1).mean())
    return torch.stack(parts).sum()


def arch_step(
    net: Supernet,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    chains: Chains,
    loss: Loss | None,
    budget: Budget,
    budget_weight: float = 0.1,
    tolerance: float = 0.95,
) -> ArchRecord:
    """Stage 2 (eq. 15): move the alphas by the task loss of the soft network and by the budget loss.

    Without a loss the budget alone moves them, and the network is not run. Weights and buffers come out bit-identical.
    """
    optimizer.zero_grad(set_to_none=True)
    task: list[Tensor] = []
    with _only_alphas(net):
        for batch in batches if loss else ():
            assert loss is not None
            value = loss(net(input_of(batch), chains.gates(chains.marginals(net.alpha))), batch)
            (value / len(batches)).backward()
            task.append(value.detach())
        seen = ratios(budget, net.graph, chains.marginals(net.alpha), chains.sizes, chains.process)
        excess = budget_loss(seen, tolerance)
        (budget_weight * excess).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return ArchRecord(torch.stack(task).mean() if task else None, excess.detach(), seen.detach())


@contextlib.contextmanager
def _only_alphas(net: Supernet) -> Iterator[None]:
    """Weights need no gradient meanwhile, and buffers (running statistics) are put back."""
    trained = [weight for weight in net.weights() if weight.requires_grad]
    buffers = list(net.model.buffers())
    before = [buffer.clone() for buffer in buffers]
    for weight in trained:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)
        with torch.no_grad():
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
