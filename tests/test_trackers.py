"""What a run reports arrives at the services: TensorBoard's own reader and a stand-in for W&B say so."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

from dmcp.errors import DmcpError
from dmcp.report import trackers
from dmcp.report.trackers import Tracker, scalars
from dmcp.runs.records import Row, SearchRecord, StepRecord
from dmcp.training.loop import Event

SETTINGS = {"job": {"model": "resnet18", "ignore": ["fc"]}, "search": {"lr": 0.2}, "train": None}


def search(step: int) -> Event:
    return Event("search", 10, SearchRecord(step, 0, 0.2, (1.0, 2.0, 3.0, 4.0), 0.5, 1.5, 0.1, (0.9, 0.8)))


def train(step: int, loss: float = 1.0) -> Event:
    return Event("my net", 10, StepRecord(0, step, 10, 0.1, loss))


ROW = Event("test", 2, Row("my net", macs=1000, params=200, accuracy=0.75, ms=1.0, batch=8))
EVENTS = [search(0), search(1), train(0), train(1, loss=0.5), ROW]


def send(tracker: Tracker, events: Sequence[Event] = EVENTS, interrupt: bool = False) -> None:
    with contextlib.suppress(KeyboardInterrupt), tracker:
        for event in events:
            tracker.on_event(event)
        if interrupt:
            raise KeyboardInterrupt


def test_names_of_the_numbers() -> None:
    losses = {"loss_largest": 1.0, "loss_smallest": 2.0, "loss_random_1": 3.0, "loss_random_2": 4.0, "task_loss": 1.5}
    rates = {"lr": 0.2, "alpha_lr": 0.5, "budget_loss": 0.1, "expected_cost_macs": 0.9, "expected_cost_params": 0.8}
    assert scalars(search(3), ["macs", "params"]) == {f"search/{name}": it for name, it in (losses | rates).items()}
    assert scalars(train(3)) == {"my-net/loss": 1.0, "my-net/lr": 0.1}
    assert scalars(ROW) == {"test/my-net/accuracy": 0.75, "test/my-net/macs": 1000, "test/my-net/params": 200}


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="NOT TESTED: pip install tensorboard")
def test_tensorboard_shows_every_stage(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send(Tracker(["tensorboard"], tmp_path, SETTINGS, ["macs"]), [*map(search, range(9)), *map(train, range(6)), ROW])
    reader = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {tag: [(it.step, it.value) for it in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    assert set(found) == {*scalars(search(0), ["macs"]), *scalars(train(0)), *scalars(ROW)}
    assert found["search/task_loss"] == [(step, 1.5) for step in range(9)]
    assert found["my-net/loss"] == [(step, 1.0) for step in range(6)] and found["test/my-net/accuracy"] == [(0, 0.75)]
    assert json.loads(reader.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]) == SETTINGS


# W&B by a stand-in


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    service = MagicMock(__spec__=importlib.machinery.ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    service.init.return_value.id = "abc123"
    return service


def test_every_stage_arrives_and_a_resumed_run_goes_on_there(wandb: MagicMock, tmp_path: Path) -> None:
    run = wandb.init.return_value
    send(Tracker(["wandb", "wandb"], tmp_path, SETTINGS), interrupt=True)
    place = {"dir": str(tmp_path), "name": tmp_path.name, "resume": "allow", "project": "dmcp", "config": SETTINGS}
    wandb.init.assert_called_once_with(**place)
    assert run.log.call_args_list[3] == call({"my-net/loss": 0.5, "my-net/lr": 0.1, "step": 1})  # no step of W&B's own
    assert run.log.call_count == len(EVENTS)
    run.define_metric.assert_called_once_with("*", step_metric="step")
    run.finish.assert_called_once_with(exit_code=1)
    send(Tracker(["wandb"], tmp_path, SETTINGS))
    assert wandb.init.call_args == call(**place, id="abc123") and run.finish.call_args == call(exit_code=0)


def test_a_service_that_fails_is_dropped_and_one_that_does_not_start_is_an_error(
    wandb: MagicMock, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = trackers.Service(MagicMock(), MagicMock())
    monkeypatch.setitem(trackers._OPENERS, "json", lambda *_: other)
    with Tracker(["wandb,json"], tmp_path, SETTINGS) as tracker:
        tracker.on_event(search(0))
        wandb.init.return_value.log.side_effect = ConnectionError("the server is gone")
        tracker.on_event(search(1))
        tracker.on_event(search(2))
    assert capsys.readouterr().err.count("wandb") == 1  # one line
    assert other.log.call_count == 3 and other.close.call_args == call(False)
    wandb.init.side_effect = ValueError("api_key not configured")
    with pytest.raises(DmcpError, match="wandb"):
        Tracker(["json", "wandb"], tmp_path, SETTINGS)
    assert other.close.call_args == call(True)  # nothing is left open
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name in ("tensorbord", "wandb"):
        with pytest.raises(DmcpError, match=name):
            Tracker([name], tmp_path, SETTINGS)
