"""Methods that rank channels: norms, sensitivity, network slimming. A new ranking is a score for `keep_strongest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.compare.problem import CHOOSING, Choice, MethodConfig, Prepared, Problem, loaded, samples_of
from dmcp.errors import TrainingError
from dmcp.fields import setting
from dmcp.runtime.batches import device_of
from dmcp.runtime.distributed import current, gather
from dmcp.searching.allocation import output_error
from dmcp.searching.importance import (
    ChannelRows,
    find_scales,
    first_samples,
    magnitude,
    numbers_of_channels,
    scores_of,
    strongest,
)
from dmcp.settings import Engine
from dmcp.tracing.modules import narrow
from dmcp.tracing.widths import ChannelSpace
from dmcp.training.loop import train
from dmcp.training.losses import Loss, classification_loss
from dmcp.training.reconstruction import SAMPLES, refitted

# one ratio, and the strongest channels


Score = Callable[[nn.Module, ChannelSpace], Tensor | None]  # of each channel of a space, (size,); None: there is none


def keep_strongest(problem: Problem, state: Mapping[str, Tensor] | None, score: Score) -> Choice:
    """Keep the channels with the largest scores, the same share of every space; without a state, the model's own."""
    model = loaded(problem, state)
    widths = problem.uniform()
    kept = {}
    for space in problem.graph.spaces:
        kept[space.name] = strongest(score(model, space), widths[space.name])
    return Choice(widths=widths, kept=kept, model=model)


# L1


@dataclass(frozen=True, kw_only=True)
class L1Config(MethodConfig):
    """Settings of the ranking by norms."""

    power: int = setting(1, "Norm of the filters: 1 is the paper's L1 norm, 2 the L2 norm.", 1, 2)


def find_l1(problem: Problem, config: L1Config, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Keep the channels with the largest filters, the same share of every space."""

    def norms(model: nn.Module, space: ChannelSpace) -> Tensor | None:
        return magnitude(model, problem.graph, space, config.power)

    return keep_strongest(problem, state, norms)


# sensitivity


def find_sensitivity(problem: Problem, config: MethodConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Keep the channels that the outputs depend on most, and refit their weights. No labels are used.

    Two sets of widths are tried, uniform ones and those that follow the scores. The one whose outputs are nearer to the
    model's is kept.
    """
    model = loaded(problem, state)
    samples = problem.samples or first_samples(problem.loader, device_of(model), SAMPLES)
    if problem.score is not None and state is None:
        scores = problem.score()
    else:
        scores = scores_of(model, problem.graph, samples)
    graph = problem.graph
    uniform_widths = problem.uniform()
    candidates = [uniform_widths]
    widths_by_scores = problem.by_scores(scores, uniform_widths)
    if widths_by_scores != uniform_widths and all(gather(bool(samples), current())):
        candidates.append(widths_by_scores)

    choices: list[Choice] = []
    errors: list[float] = []
    for widths in candidates:
        kept = {space.name: strongest(scores[space.name], widths[space.name]) for space in graph.spaces}
        refitted_model = refitted(model, graph, kept, samples)
        choices.append(Choice(widths=widths, kept=kept, model=refitted_model))
        if len(candidates) > 1:
            small = narrow(refitted_model, graph.cuts(kept), graph.attributes(kept))
            errors.append(output_error(small, model, graph, samples))
    if len(choices) == 1:
        return choices[0]
    errors = gather(errors, current())[0]  # ranks have other samples: the first one decides
    return choices[errors.index(min(errors))]


# network slimming


@dataclass(frozen=True, kw_only=True)
class SlimmingConfig(MethodConfig):
    """Settings of network slimming."""

    sparsity: float = setting(1e-4, "Weight of the sum of absolute scales in the loss; the paper: 1e-4 or 1e-5.", 0)


def prepare_slimming(problem: Problem, config: SlimmingConfig) -> Prepared:
    """Train one network for all budgets, with scales that are pulled to zero."""
    model = narrow(problem.model, {}, {})
    task = problem.task
    task_loss = task.loss or classification_loss(problem.recipe.label_smoothing)
    loss = _with_sparsity(task_loss, model, _scales(model, problem), config.sparsity)

    engine = problem.runtime.engine or Engine()
    if task.loss is None and current().size == 1 and engine.graphs is None:
        engine = replace(engine, graphs=True)  # our loss never asks the device for a number
    runtime = replace(problem.runtime.stage(CHOOSING), engine=engine)
    train(model, problem.loader, problem.recipe, task=replace(task, loss=loss), runtime=runtime)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Prepared(state=state, sample_passes=problem.recipe.epochs * samples_of(problem.loader))


def find_slimming(problem: Problem, config: SlimmingConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Drop the channels whose scales are below one threshold, as low as the budget allows.

    If several layers write a space, their scales are summed, as in the loss: otherwise residual streams would be the
    first to go.
    """
    graph = problem.graph
    model = loaded(problem, state)
    scores = [numbers_of_channels(model, scales).abs().sum(dim=1) for scales in _scales(model, problem)]
    widths = problem.round_to_budget(_above_threshold(problem, scores))
    kept = {space.name: strongest(score, widths[space.name]) for space, score in zip(graph.spaces, scores, strict=True)}
    return Choice(widths=widths, kept=kept, model=model)


def _above_threshold(problem: Problem, scores: list[Tensor]) -> Tensor:
    """Channels of each space above the smallest threshold that is inside the budget, within the bounds. -> (S,)"""
    thresholds = torch.cat([torch.tensor([-1.0]), *scores]).sort().values  # the first keeps all, the last none
    below = [torch.searchsorted(score.sort().values, thresholds, right=True) for score in scores]
    widths = problem.graph.full.tensor() - torch.stack(below, dim=1)  # (N, S)
    widths = widths.maximum(problem.min_widths.tensor()).minimum(problem.widest.tensor())
    return widths[(problem.shares(widths) <= 1).int().argmax()]


def _with_sparsity(task_loss: Loss, model: nn.Module, scales: list[list[ChannelRows]], sparsity: float) -> Loss:
    """The loss of the task plus that of the absolute scales; it uses tensors only, so CUDA graphs can hold it."""
    rows: dict[str, list[Tensor]] = {}  # of each scale parameter, those of channels that can be pruned
    for rows_of_space in scales:
        for tensor_rows in rows_of_space:
            rows.setdefault(tensor_rows.name, []).append(tensor_rows.rows.flatten())
    parameters: list[Tensor] = [model.get_parameter(name) for name in rows]
    masks = []
    for parameter, prunable in zip(parameters, rows.values(), strict=True):
        mask = torch.zeros(len(parameter))
        mask[torch.cat(prunable)] = 1
        masks.append(mask)
    penalty = sparsity * torch.cat(masks).to(device_of(model))

    def loss(output: Any, batch: Any) -> Tensor:
        return task_loss(output, batch) + (torch.cat(parameters).abs() * penalty).sum()

    return loss


def _scales(model: nn.Module, problem: Problem) -> list[list[ChannelRows]]:
    """The rows of BatchNorm scales that belong to the channels of each space."""
    scales = [find_scales(model, problem.graph, space) for space in problem.graph.spaces]
    missing = [space.name for space, rows in zip(problem.graph.spaces, scales, strict=True) if not rows]
    if missing:
        raise TrainingError(
            f"Slimming needs a BatchNorm for every space: give ignore={missing}, or use another method."
        )
    return scales
