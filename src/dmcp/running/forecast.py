"""How long a run will take and what memory it needs, from a few real steps on copies."""

from __future__ import annotations

import copy
import itertools
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dmcp.batches import Loader, device_of
from dmcp.cutting import cut
from dmcp.pruning import OURS, UNIFORM, UNPRUNED
from dmcp.retraining import Retrain
from dmcp.sampling import filled, uniform
from dmcp.searching.search import reach, search
from dmcp.searching.searches import SearchConfig, extremes
from dmcp.supernet import Supernet
from dmcp.training import TrainConfig, train

_STEPS = 4  # measured of each kind: the first one is slow, of the others the median counts


@dataclass(frozen=True)
class Stage:
    """One part of a run."""

    name: str
    steps: int
    seconds: float


def forecast(
    net: Supernet,
    loader: Loader,
    config: SearchConfig,
    recipe: TrainConfig,
    kind: Retrain,
    controls: bool,
    taught: bool = False,
) -> list[Stage]:
    """The stages of a run. A copy of the supernet is trained for a few steps, and so are two cut networks.

    taught: whether all networks learn from a given one of the same architecture.
    """
    graph = net.graph
    budget, path = reach(net, config)
    floor, ceiling = extremes(graph, path.sizes)
    same = uniform(graph, budget, floor, config.align, filled(config), ceiling)
    first_ones = list(itertools.islice(loader, _STEPS))
    batches = [first_ones[number % len(first_ones)] for number in range(_STEPS)]  # also where an epoch has only one
    per_epoch = -(-len(loader) // config.accumulate)
    warm, both = _search_steps(copy.deepcopy(net), batches, config)
    whole, pruned = (_train_step(cut(net.model, graph, widths), batches, recipe) for widths in (graph.full, same))
    asked = whole / 3  # what a teacher takes: a forward is a third of a step
    ours = pruned + {Retrain.SLIMMABLE: whole, Retrain.TEACHER: asked}.get(kind, asked if taught else 0.0)
    first, rest = per_epoch * config.warmup_epochs, per_epoch * (config.epochs - config.warmup_epochs)
    steps = len(loader) * recipe.epochs
    stages = [Stage("warm-up", first, first * warm), Stage("search", rest, rest * both)]
    if controls or (kind is Retrain.TEACHER and not taught):
        stages.append(Stage(UNPRUNED, steps, steps * (whole + asked if taught else whole)))
    if controls:
        stages.append(Stage(UNIFORM, steps, steps * ours))
    return [*stages, Stage(OURS, steps, steps * ours)]


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has used: on the GPU, or in all; 0 where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _search_steps(net: Supernet, batches: list[Any], config: SearchConfig) -> tuple[float, float]:
    """Seconds of a step in the warm-up and after it."""
    times: list[float] = []
    few = _Few(batches * config.accumulate)
    few_steps = replace(config, epochs=2, warmup=0.5, log_every=1)
    search(net, few, few_steps, on_record=lambda record: times.append(_now(net)))
    return _step(times[: len(times) // 2]), _step(times[len(times) // 2 :])


def _train_step(model: nn.Module, batches: list[Any], recipe: TrainConfig) -> float:
    times: list[float] = []
    few = replace(recipe, epochs=len(batches), warmup_epochs=0)  # records come at the end of an epoch
    train(model, _Few(batches[:1]), few, on_step=lambda record: times.append(_now(model)))
    return _step(times)


def _step(ends: list[float]) -> float:
    """Seconds of a step, the median of those between these moments: none is from before the first, which is slow."""
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _now(model: nn.Module) -> float:
    if device_of(model).type == "cuda":
        torch.cuda.synchronize(device_of(model))
    return time.perf_counter()


class _Few(list[Any]):
    """A loader of some batches."""
