"""What a run reports arrives at the services: TensorBoard's own reader and stand-ins for W&B and MLflow say so."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dmcp.errors import DmcpError
from dmcp.report.trackers import Tracker, open_tracker, scalars
from dmcp.results import Row
from dmcp.searching.config import SearchRecord
from dmcp.training import Event, StepRecord

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
    warmup = scalars(Event("search", 9, SearchRecord(0, 0, 0.0, (1.0, 2.0))))
    assert warmup == {"search/lr": 0.0, "search/loss_largest": 1.0, "search/loss_smallest": 2.0}


def test_unknown_and_missing_services_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name in ("tensorbord", "wandb"):
        with pytest.raises(DmcpError, match=name):
            open_tracker([name], tmp_path, SETTINGS)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="NOT TESTED: pip install tensorboard")
def test_tensorboard_shows_every_stage_and_hides_steps_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(stage: str) -> dict[str, list[tuple[int, float]]]:
        reader = EventAccumulator(str(tmp_path / "tensorboard" / stage), size_guidance={"scalars": 0}).Reload()
        return {tag: [(it.step, it.value) for it in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}

    events = [*map(search, range(9)), *map(train, range(6)), ROW]
    send(open_tracker(["tensorboard"], tmp_path, SETTINGS, ["macs"]), events, interrupt=True)
    send(open_tracker(["tensorboard"], tmp_path, SETTINGS, ["macs"]), [train(3, loss=7.0), train(4, loss=7.0)])
    assert read("my-net")["my-net/loss"] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 7.0), (4, 7.0)]
    found = read("search")
    assert set(found) == set(scalars(search(0), ["macs"]))
    assert found["search/task_loss"] == [(step, 1.5) for step in range(9)]
    assert read("test") == {name: [(0, value)] for name, value in scalars(ROW).items()}
    reader = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert json.loads(reader.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]) == SETTINGS


# W&B and MLflow, by stand-ins


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **parts: Any) -> None:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(parts)
    monkeypatch.setitem(sys.modules, name, module)


class FakeWandB:
    """Remembers calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.rows, self.axes = list[Any](), list[Any](), dict[str, str]()
        self.ended, self.broken = list[int](), False
        stand_in(monkeypatch, "wandb", init=self.init)

    def init(self, **how: Any) -> FakeWandB:
        if self.broken:
            raise ValueError("api_key not configured")
        self.begun.append(how)
        self.id = how["id"] or "abc123"
        return self

    def log(self, row: dict[str, float]) -> None:  # W&B drops what is logged at a step below the last: give none
        if self.broken:
            raise ConnectionError("the server is gone")
        self.rows.append(row)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


class FakeMLflow:
    """Remembers calls; like MLflow it lets nobody write the parameters of a run twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.params, self.metrics = dict[str, Any](), list[tuple[int, dict[str, float]]]()
        self.runs, self.ended, self.waits = list[dict[str, Any]](), list[str](), True
        stand_in(
            monkeypatch,
            "mlflow",
            config=types.SimpleNamespace(enable_async_logging=lambda on: setattr(self, "waits", not on)),
            set_experiment=lambda name: self.runs.append({"experiment": name}),
            start_run=self.start_run,
            log_params=self.log_params,
            log_metrics=lambda metrics, step: self.metrics.append((step, metrics)),
            flush_async_logging=lambda: self.ended.append("flushed"),
            end_run=self.ended.append,
        )

    def start_run(self, run_id: str | None, run_name: str) -> Any:
        self.runs[-1] |= {"run_id": run_id, "run_name": run_name}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "f00"))

    def log_params(self, params: dict[str, Any]) -> None:
        assert not params.keys() & self.params.keys()
        self.params |= params


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return FakeWandB(monkeypatch)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return FakeMLflow(monkeypatch)


def test_every_stage_arrives_and_a_resumed_run_goes_on_there(
    wandb: FakeWandB, mlflow: FakeMLflow, tmp_path: Path
) -> None:
    tracker = open_tracker(["wandb,mlflow", "wandb"], tmp_path, SETTINGS)
    assert not mlflow.waits
    send(tracker, interrupt=True)
    assert [row.get("search/step") for row in wandb.rows] == [0, 1, None, None, None]
    assert wandb.rows[3] == {"my-net/loss": 0.5, "my-net/lr": 0.1, "my-net/step": 1}
    assert wandb.axes == {f"{stage}/*": f"{stage}/step" for stage in ("search", "my-net", "test")}
    assert mlflow.params == {"job.model": "resnet18", "job.ignore": ["fc"], "search.lr": 0.2, "train": None}
    assert [step for step, _ in mlflow.metrics] == [0, 1, 0, 1, 0]
    assert mlflow.metrics[3][1] == {"my-net/loss": 0.5, "my-net/lr": 0.1}
    assert (wandb.ended, mlflow.ended, mlflow.waits) == ([1], ["flushed", "FAILED"], True)
    send(open_tracker(["wandb", "mlflow"], tmp_path, SETTINGS))
    assert (wandb.ended, mlflow.ended[2:]) == ([1, 0], ["flushed", "FINISHED"])
    place = {"dir": str(tmp_path), "name": tmp_path.name, "resume": "allow", "project": "dmcp", "config": SETTINGS}
    assert wandb.begun == [place | {"id": None}, place | {"id": "abc123"}]
    run = {"experiment": "dmcp", "run_name": tmp_path.name}
    assert mlflow.runs == [run | {"run_id": None}, run | {"run_id": "f00"}]


def test_a_service_that_fails_is_dropped_and_one_that_does_not_start_is_an_error(
    wandb: FakeWandB, mlflow: FakeMLflow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_tracker(["wandb", "mlflow"], tmp_path, SETTINGS) as tracker:
        tracker.on_event(search(0))
        wandb.broken = True
        tracker.on_event(search(1))
        tracker.on_event(search(2))
    assert capsys.readouterr().err.count("wandb") == 1  # one line
    assert [step for step, _ in mlflow.metrics] == [0, 1, 2] and mlflow.ended[-1] == "FINISHED"
    with pytest.raises(DmcpError, match="wandb does not start"):
        open_tracker(["mlflow", "wandb"], tmp_path, SETTINGS)
    assert mlflow.ended[-1] == "FAILED"  # nothing is left open
