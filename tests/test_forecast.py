"""How long a run will take: never less than nothing, however short an epoch is."""

from __future__ import annotations

from itertools import count

import pytest
from test_pruning import TRAIN, Noise, traced

from dmcp.forecast import forecast
from dmcp.pruning import Retrain
from dmcp.searches import SearchConfig
from dmcp.supernet import Supernet


@pytest.mark.parametrize("batches", [1, 2, 7])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_step_takes_its_time(batches: int, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only counts how often it was read, a step takes 1 s, whatever the loader's length."""
    ticks = count()
    monkeypatch.setattr("dmcp.forecast._now", lambda model: float(next(ticks)))
    config = SearchConfig(budget="60%", epochs=4, groups=4, accumulate=accumulate)
    model, graph = traced()
    stages = forecast(Supernet(model, graph, 4), Noise(batches), config, TRAIN, Retrain.TEACHER, controls=True)
    per_epoch = -(-batches // accumulate)
    assert [(stage.name, stage.steps) for stage in stages[:2]] == [
        ("warm-up", 2 * per_epoch),
        ("search", 2 * per_epoch),
    ]
    assert [stage.seconds for stage in stages[:3]] == [stage.steps for stage in stages[:3]]
    assert all(stage.seconds >= stage.steps for stage in stages)
