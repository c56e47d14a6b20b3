"""L1 norms, soft filter pruning, FPGM and network slimming."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import device_of, size_of
from dmcp.budget import check_reachable, spent_shares
from dmcp.calibration import recalibrate
from dmcp.compare.problem import Choice, Prepared, Problem, loaded, samples_of
from dmcp.errors import TrainingError
from dmcp.importance import Place, magnitude, placed, scaled, strongest, vectors, written
from dmcp.losses import Loss, classification_loss
from dmcp.runtime.distributed import current
from dmcp.sampling import FILLED, fit
from dmcp.settings import Engine
from dmcp.training import Task, train
from dmcp.widths import Widths


@dataclass(frozen=True, kw_only=True)
class L1Config:
    """Settings of the ranking by norms."""

    power: int = 1  # of the weights that are summed: 1 is the paper's L1 norm, 2 ranks by the L2 norm

    def __post_init__(self) -> None:
        if type(self.power) is not int or self.power not in (1, 2):
            raise TrainingError(f"power must be 1 (L1 norm) or 2 (L2 norm), not {self.power!r}.")


def find_l1(problem: Problem, config: L1Config, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Keep the channels with the largest filters, the same share of every space."""
    if state is None:
        raise TrainingError("The L1 method ranks the filters of a trained network: give its state dict as state=...")
    model = loaded(problem, state)
    widths = problem.uniform()
    kept = {
        space.name: strongest(magnitude(model, problem.graph, space, config.power), widths[space.name])
        for space in problem.graph.spaces
    }
    return Choice(widths=widths, kept=kept, model=model)


SFP_STAGE = "sfp"  # what the progress of the training is told as
Score = Callable[[Tensor], Tensor]  # filters of a space, (size, n) -> how much each channel is worth, (size,)


@dataclass(frozen=True, kw_only=True)
class SoftConfig:
    """Settings of soft pruning, whatever ranks the channels."""

    every: int = 1  # epochs between two times that filters are set to zero; the last epoch always does it
    regrowth: float = 0.01  # share of their gradient that zeroed filters under BatchNorms get; the paper: 1

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise TrainingError(f"every must be an int of at least 1, not {self.every!r}.")
        if type(self.regrowth) not in (int, float) or not 0 < self.regrowth <= 1:
            raise TrainingError(f"regrowth must be a number above 0 and at most 1, like 0.01, not {self.regrowth!r}.")


def find_sfp(problem: Problem, config: SoftConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Train the network while its weakest channels are set to zero again and again."""
    return prune_softly(problem, SFP_STAGE, norms, config, state)


def norms(filters: Tensor) -> Tensor:
    """L2 norm of each filter. (size, n) -> (size,)"""
    return filters.square().sum(dim=1).sqrt()


def prune_softly(
    problem: Problem,
    stage: str,
    score: Score,
    config: SoftConfig,
    state: Mapping[str, Tensor] | None = None,
) -> Choice:
    """Train a copy of the model, and every so many epochs zero the filters of the channels that are worth least."""
    model = copy.deepcopy(problem.model) if state is None else loaded(problem, state)
    graph, epochs = problem.graph, problem.recipe.epochs
    widths = problem.uniform()
    narrowed = [space for space in graph.spaces if widths[space.name] < space.size]
    filters = {space.name: places for space in narrowed if (places := written(model, graph, space))}
    normed = [place for space in narrowed if scaled(model, graph, space) for place in filters.get(space.name, ())]

    with _slowed(model, normed) as shares:

        def zero(epoch: int) -> None:
            if (epoch + 1) % config.every and epoch + 1 < epochs:
                return
            for name, places in filters.items():
                dropped = score(vectors(model, places)).argsort(descending=True, stable=True)[widths[name] :]
                for place in places:
                    place.silence(model, dropped)
                    if place in shares:
                        shares[place].fill_(1)[place.rows[dropped].flatten().to(shares[place].device)] = config.regrowth

        train(
            model,
            problem.loader,
            problem.recipe,
            task=Task(loss=problem.loss),
            runtime=problem.runtime(stage),
            after_epoch=zero,
        )
    kept = _settle(model, problem, widths)
    passes = epochs * samples_of(problem.loader) + sum(map(size_of, problem.held))
    return Choice(widths=widths, kept=kept, model=model, sample_passes=passes)


@contextlib.contextmanager
def _slowed(model: nn.Module, places: Sequence[Place]) -> Iterator[dict[Place, Tensor]]:
    """While entered, each row of these filters gets a share of its gradient, 1 until somebody changes it. (rows,)

    The shares are buffers of the model meanwhile, so that a checkpoint has them, too.
    """
    shares: dict[Place, Tensor] = {}
    with contextlib.ExitStack() as undo:
        for number, place in enumerate(places):
            weight = model.get_parameter(place.name)
            if weight.requires_grad:
                share = shares[place] = weight.new_ones(weight.shape[place.dim], requires_grad=False)
                model.register_buffer(f"_share{number}", share, persistent=False)
                undo.callback(delattr, model, f"_share{number}")
                wide = share.reshape([-1 if dim == place.dim else 1 for dim in range(weight.ndim)])
                handle = weight.register_hook(functools.partial(torch.mul, wide))  # type: ignore[no-untyped-call]
                undo.callback(handle.remove)
        yield shares


def _settle(model: nn.Module, problem: Problem, widths: Widths) -> dict[str, list[int]]:
    """Set everything of the zeroed channels to zero, so that the network computes what the cut one does; the others."""
    kept: dict[str, list[int]] = {}
    for space in problem.graph.spaces:
        # by what is zero, not by the score: after an interruption the last scores are not known
        strength = magnitude(model, problem.graph, space, power=2)
        kept[space.name] = strongest(strength, widths[space.name])
    for space in problem.graph.spaces:
        dropped = torch.tensor(sorted({*range(space.size)} - {*kept[space.name]}), dtype=torch.int64)
        for place in placed(model, problem.graph, space):
            place.silence(model, dropped)
    recalibrate(model, problem.held)
    return kept


FPGM_STAGE = "fpgm"  # what the progress of the training is told as


def find_fpgm(problem: Problem, config: SoftConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Train the network while the channels that others can stand in for are set to zero again and again."""
    return prune_softly(problem, FPGM_STAGE, distances, config, state)


def distances(filters: Tensor) -> Tensor:
    """Summed distance of each filter to all others; least near the geometric median. (size, n) -> (size,)"""
    return torch.cdist(filters, filters).sum(dim=1)


SLIMMING_STAGE = "slimming"  # what the progress of the training is told as


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
        task=Task(loss=_pulled(task, model, _scales(model, problem), config.sparsity)),
        runtime=replace(problem.runtime(SLIMMING_STAGE), engine=_engine(problem)),
    )
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Prepared(state=state, sample_passes=problem.recipe.epochs * samples_of(problem.loader))


def find_slimming(problem: Problem, config: SlimmingConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
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
            f"trace(..., ignore={missing}), or use a method that needs no BatchNorm, such as l1."
        )
    return found


def _engine(problem: Problem) -> Engine:
    """The problem's engine; a loss of ours does not keep steps from being replayed as CUDA graphs."""
    engine = problem.engine or Engine()
    ours = problem.loss is None and current().size == 1
    return replace(engine, graphs=True) if ours and engine.graphs is None else engine
