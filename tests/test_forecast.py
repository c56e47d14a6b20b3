"""How long a run will take: never less than nothing, however short an epoch is."""

from __future__ import annotations

from itertools import count

import pytest
from test_pruning import TRAIN, Noise, prune, traced
from torch import nn

from dmcp.cli.prune import forecast
from dmcp.cutting import cut
from dmcp.results import UNIFORM
from dmcp.settings import Retrain, SearchConfig
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.widths import Widths


@pytest.mark.parametrize("batches", [1, 2, 7])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_step_takes_its_time(batches: int, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only counts how often it was read, a step takes 1 s, whatever the loader's length."""
    ticks = count()
    monkeypatch.setattr("dmcp.cli.prune._now", lambda model: float(next(ticks)))
    config = SearchConfig(budget="60%", epochs=4, groups=4, accumulate=accumulate)
    model, graph = traced()
    stages = forecast(Supernet(model, graph, 4), Noise(batches), config, TRAIN, Retrain.TEACHER, baselines=True)
    per_epoch = -(-batches // accumulate)
    assert [(stage.name, stage.steps) for stage in stages[:2]] == [
        ("warm-up", 2 * per_epoch),
        ("search", 2 * per_epoch),
    ]
    assert [stage.seconds for stage in stages[:3]] == [stage.steps for stage in stages[:3]]
    assert all(stage.seconds >= stage.steps for stage in stages)


@pytest.mark.parametrize("tolerance", [0.5, 0.95, 0.99])
def test_it_times_the_uniform_network_of_the_run(tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """That uses more of the budget than usual where the search is told to."""
    seen: list[int] = []

    def noted(model: nn.Module, graph: ChannelGraph, widths: Widths) -> nn.Module:
        seen.append(graph.macs(widths))
        return cut(model, graph, widths)

    monkeypatch.setattr("dmcp.cli.prune.cut", noted)
    config = SearchConfig(budget="65%", epochs=2, groups=4, tolerance=tolerance)
    model, graph = traced()
    forecast(Supernet(model, graph, 4), Noise(), config, TRAIN, Retrain.SCRATCH, baselines=True)
    (row,) = [row for row in prune(search=config, baselines=True).rows if row.name == UNIFORM]
    assert seen == [graph.macs(), row.macs] and row.macs >= tolerance * 0.65 * graph.macs()
