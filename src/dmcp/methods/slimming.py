"""Network slimming: BatchNorm scales are pulled to zero while training, then small ones go (Liu et al., 2017).

`prepare` trains the network with `sparsity` times the sum of the absolute scales added to the loss; only the scales
over channels that can be narrowed are pulled. `find` takes one threshold for the whole network: channels with a scale
below it go, so each space gets a width of its own. The threshold is the smallest one that the budget allows.

It differs from the paper in this: where several BatchNorms lie over one channel (residual streams, dense
concatenations), the mean of their absolute scales is the channel's, which puts spaces with many norms and with one on
the same scale; the paper instead puts a layer that selects channels before such convs, which the cut network would
need, too. Scales start where the model has them, which is 1 in torch and 0.5 in the paper. The threshold follows from
the budget, not from a share of the channels; a space never gets narrower than its floor; and the widths are repaired
where rounding to `align` leaves the budget unused. The paper repeats the whole for smaller and smaller networks; here
it is done once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import device_of
from dmcp.budget import check_reachable, spent_shares
from dmcp.engine import Engine
from dmcp.errors import TrainingError
from dmcp.filters import Place, scaled, strongest, vectors
from dmcp.losses import Loss, classification_loss
from dmcp.methods.problem import FILLED, Choice, Prepared, Problem, loaded, samples_of
from dmcp.ranks import current
from dmcp.sampling import fit
from dmcp.training import train

STAGE = "slimming"  # what the progress of the training is told as


@dataclass(frozen=True, kw_only=True)
class SlimmingConfig:
    """Settings of network slimming."""

    sparsity: float = 1e-4  # weight of the summed absolute scales in the loss; the paper: 1e-4 or 1e-5

    def __post_init__(self) -> None:
        if type(self.sparsity) not in (int, float) or not 0 <= self.sparsity < math.inf:
            raise TrainingError(f"sparsity must be a number of at least 0, like 1e-4, not {self.sparsity!r}.")


def prepare(problem: Problem, config: SlimmingConfig) -> Prepared:
    """Train the network with scales that are pulled to zero: one for all budgets."""
    model = copy.deepcopy(problem.model)
    task = problem.loss or classification_loss(problem.recipe.label_smoothing)
    train(
        model,
        problem.loader,
        problem.recipe,
        loss=_pulled(task, model, _scales(model, problem), config.sparsity),
        on_step=lambda record: problem.tell(STAGE, record),
        engine=_engine(problem),
        keeper=problem.keep and problem.keep(STAGE),
    )
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Prepared(state=state, sample_passes=problem.recipe.epochs * samples_of(problem.loader))


def find(problem: Problem, config: SlimmingConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Drop the channels whose scales are below one threshold, as low as the budget allows."""
    if state is None:
        raise TrainingError("Slimming needs a network that was trained for it: give state=prepare(...).state.")
    graph, model = problem.graph, loaded(problem, state)
    scores = [vectors(model, places).abs().mean(dim=1) for places in _scales(model, problem)]
    widths = fit(graph, problem.budget, _above_threshold(problem, scores).double(), problem.options, FILLED)
    kept = {space.name: strongest(score, widths[space.name]) for space, score in zip(graph.spaces, scores, strict=True)}
    return Choice(widths=widths, kept=kept, model=model)


def _above_threshold(problem: Problem, scores: list[Tensor]) -> Tensor:
    """Channels of each space above the smallest threshold that is inside the budget, bounds kept. -> (S,)"""
    floor, most = problem.floor.tensor(), problem.most.tensor()
    check_reachable(problem.budget, problem.graph, problem.floor, problem.ceiling)
    bars = torch.cat([torch.tensor([-1.0]), *scores]).sort().values  # the first keeps all, the last none

    def widths(bar: Tensor) -> Tensor:
        return torch.stack([(score > bar).sum() for score in scores]).maximum(floor).minimum(most)

    low, high = 0, len(bars) - 1  # the smallest bar that is inside lies between them
    while low < high:
        middle = (low + high) // 2
        inside = spent_shares(problem.budget, problem.graph, widths(bars[middle])[None]).max() <= 1
        low, high = (low, middle) if inside else (middle + 1, high)
    return widths(bars[low])


# the training


def _pulled(task: Loss, model: nn.Module, scales: list[list[Place]], sparsity: float) -> Loss:
    """The task's loss and the absolute scales; a function of tensors only, so that CUDA graphs can hold it."""
    rows: dict[str, list[Tensor]] = {}
    for place in (place for places in scales for place in places):
        rows.setdefault(place.name, []).append(place.rows.flatten())
    parameters: list[Tensor] = [model.get_parameter(name) for name in rows]
    masks = [torch.zeros(len(parameter)) for parameter in parameters]  # a norm may also have channels that always stay
    for mask, own in zip(masks, rows.values(), strict=True):
        mask[torch.cat(own)] = 1
    pull = sparsity * torch.cat(masks).to(device_of(model))

    def loss(output: Any, batch: Any) -> Tensor:
        return task(output, batch) + (torch.cat(parameters).abs() * pull).sum()

    return loss


def _scales(model: nn.Module, problem: Problem) -> list[list[Place]]:
    """Of each space, the scales over its channels."""
    found = [scaled(model, problem.graph, space) for space in problem.graph.spaces]
    missing = [space.name for space, places in zip(problem.graph.spaces, found, strict=True) if not places]
    if missing:
        raise TrainingError(
            f"Slimming ranks channels by the scales of BatchNorms, and there is none over those of {missing[0]}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}: keep these layers whole, "
            f"trace(..., frozen={missing}), or use a method that needs no BatchNorm, such as l1."
        )
    return found


def _engine(problem: Problem) -> Engine:
    """The problem's engine; a loss of ours does not keep steps from being replayed as CUDA graphs."""
    engine = problem.engine or Engine()
    ours = problem.loss is None and current().world == 1
    return replace(engine, graphs=True) if ours and engine.graphs is None else engine
