"""The table of results: what it says of accuracies, metrics and times."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from short_runs import TRAIN, Noise, prune, traced_residual
from torch import nn

import dmcp
from dmcp.results import divergence, milliseconds, notes, standard_error
from dmcp.results import results_table as text_of
from dmcp.runs.records import DMCP, ORIGINAL, UNIFORM, UNPRUNED, Row, StepRecord
from dmcp.runtime.io import from_plain


def rows(*values: float, **settings: Any) -> list[Row]:
    names = (UNPRUNED, UNIFORM, DMCP)
    return [Row(name, 5, 5, value, **settings) for name, value in zip(names, values, strict=True)]


def test_an_accuracy_has_points_and_a_standard_error() -> None:
    _, graph = traced_residual()
    assert standard_error(0.6, 60) == pytest.approx(0.0632, abs=1e-4) and 0 < standard_error(1.0, 60) < 0.02
    text = text_of(rows(0.5, 0.7, 0.6, samples=60, batch=8), graph, "dmcp: trained from fresh weights")
    assert "60 test samples" in text and "± 6.3 points" in text and f"{100 * 5 / graph.macs():.1f}%" in text
    assert (
        "dmcp: +10.00 ± 9.04 points against unpruned, -10.00 ± 8.66 points against uniform" in text
        and "fresh weights" in text
    )
    assert not [note for note in notes(rows(0.5, 0.7, 0.6), graph) if "test samples" in note]  # an old log


@pytest.mark.parametrize("lower", [False, True])
def test_a_metric_is_compared_in_its_own_unit(lower: bool) -> None:
    """Where little is good, in words: a plain + or - would be read as a gain or a loss of quality."""
    _, graph = traced_residual()
    kind = {"score": "metric", "lower_is_better": lower}
    text = text_of(rows(0.25, 0.75, 0.5, **kind), graph)
    gaps = ("0.25 worse than unpruned", "0.25 better than uniform") if lower else ("+0.25 against", "-0.25 against")
    assert all(gap in text for gap in gaps) and ("metric (lower is better)" in text.splitlines()[0]) == lower
    text = text_of(rows(math.nan, 0.25, 0.5, **kind), graph)
    assert "dmcp: not comparable with unpruned, " in text and "unpruned: its metric is nan" in text
    assert "nan" not in text_of(rows(math.inf, math.inf, math.inf, **kind), graph)  # of a perfect picture


@pytest.mark.parametrize(
    ("losses", "bad"),
    [
        ([1.0] * 9, False),  # too few steps
        ([1.0] + [2.5] * 19, True),
        ([0.5] + [0.8, 0.7, 0.6, 0.9] * 10, False),  # the first batch was easy
        ([0.5, 0.6, 3.0, 2.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5], False),
        ([-2.0] * 100 + [-1.0] * 100, True),
    ],
)
def test_a_training_that_ends_higher_than_it_began_went_wrong(losses: list[float], bad: bool) -> None:
    assert bool(divergence(DMCP, losses)) == bad


def test_networks_are_timed_in_eval_mode_and_left_as_they_were() -> None:
    wide, narrow = (nn.Sequential(nn.Linear(512, size), nn.BatchNorm1d(size)) for size in (4096, 2))
    before = {name: it.clone() for name, it in wide.state_dict().items()}
    slow, fast = milliseconds([wide, narrow], torch.zeros(64, 512))
    assert slow > fast > 0 and wide.training
    assert all(torch.equal(it, before[name]) for name, it in wide.state_dict().items())


# the training loss


def last_epoch(seen: list[dmcp.Event], name: str) -> float:
    """The oracle: what the listener of a run saw of the last epoch of a training."""
    records = [event.record for event in seen if event.stage == name and isinstance(event.record, StepRecord)]
    return fmean(record.loss for record in records if record.epoch == records[-1].epoch)


@pytest.mark.parametrize("method", [DMCP, "l1"])
def test_the_training_loss_of_a_row_is_the_mean_of_its_last_epoch(method: str) -> None:
    seen: list[dmcp.Event] = []
    train, hear = replace(TRAIN, epochs=3), dmcp.Runtime(on_event=seen.append)
    given: dict[str, Any] = {
        "method": method,
        "train": train,
        "runtime": hear,
        "baselines": [UNPRUNED, UNIFORM, ORIGINAL],
    }
    result = prune(loader=Noise(3), retrain="finetune", teacher="unpruned", **given)
    losses = {row.name: row.train_loss for row in result.rows}
    assert losses.pop(ORIGINAL) is None
    assert losses == {name: pytest.approx(last_epoch(seen, name)) for name in (UNPRUNED, UNIFORM, method)}
    assert losses[UNPRUNED] != losses[method]
    heads, _, first, *_, last = [line.split("|") for line in result.table.splitlines() if line.startswith("|")]
    column = [head.strip() for head in heads].index("train loss")
    assert float(last[column]) == pytest.approx(losses[method], rel=1e-3) and first[column].strip() == "-"
    slimmable = prune(retrain="slimmable", train=train, runtime=hear)
    assert slimmable.rows[0].train_loss == pytest.approx(last_epoch(seen[-10:], DMCP))
    assert prune(retrain="none").rows[0].train_loss is None


def test_a_resumed_training_needs_its_records_for_a_loss(tmp_path: Path) -> None:
    """It began in the middle of its last epoch: with the records of a run's log they are all there, else unknown."""
    options = {"train": replace(TRAIN, epochs=2), "loader": Noise(4)}
    seen: list[dmcp.Event] = []
    whole = prune(**options).rows[0]

    def stopped() -> bool:
        return sum(event.stage == DMCP for event in seen) >= 6

    def records(stage: str) -> list[dict[str, Any]]:
        return [asdict(event.record) for event in seen if event.stage == stage and isinstance(event.record, StepRecord)]

    keeper = dmcp.Checkpointer(tmp_path, every_steps=1, stop_requested=stopped)
    with pytest.raises(dmcp.StoppedError):
        prune(**options, runtime=dmcp.Runtime(checkpointer=keeper, on_event=seen.append))
    resumed = shutil.copytree(tmp_path, tmp_path / "copy")
    logged = prune(**options, runtime=dmcp.Runtime(checkpointer=dmcp.Checkpointer(tmp_path, earlier=records)))
    assert logged.rows[0].train_loss == whole.train_loss
    alone = prune(**options, runtime=dmcp.Runtime(checkpointer=dmcp.Checkpointer(resumed)))
    assert alone.rows[0].train_loss is None


def test_rows_of_older_logs_have_no_training_loss() -> None:
    row = Row(DMCP, 5, 5, 0.5, train_loss=0.25)
    logged = json.loads(json.dumps(asdict(row)))
    assert from_plain(Row, logged) == row
    del logged["train_loss"]
    assert from_plain(Row, logged) == replace(row, train_loss=None)
