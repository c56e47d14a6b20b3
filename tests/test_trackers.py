"""What a run reports arrives at the services: TensorBoard's own reader and stand-ins for W&B and MLflow say so."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dmcp.errors import DmcpError
from dmcp.report.trackers import Tracker, open_tracker, scalars
from dmcp.results import Row
from dmcp.searching.config import SearchRecord, SearchResult
from dmcp.training import Event, StepRecord

SETTINGS = {"job": {"model": "resnet18", "ignore": ["fc"]}, "search": {"lr": 0.2}, "train": None}


def search(step: int, loss: float = 1.0) -> Event:
    return Event("search", 10, SearchRecord(step, 0, 0.2, (loss, 2.0, 3.0, 4.0), 0.5, 1.5, 0.1, (0.9, 0.8)))


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
    assert scalars(search(3), ["macs", "params"]) == {
        "search/lr": 0.2,
        "search/loss_largest": 1.0,
        "search/loss_smallest": 2.0,
        "search/loss_random_1": 3.0,
        "search/loss_random_2": 4.0,
        "search/alpha_lr": 0.5,
        "search/task_loss": 1.5,
        "search/budget_loss": 0.1,
        "search/expected_cost_macs": 0.9,
        "search/expected_cost_params": 0.8,
    }
    assert {"search/expected_cost_1", "search/expected_cost_2"} < scalars(search(3)).keys()
    assert scalars(train(3)) == {"my-net/loss": 1.0, "my-net/lr": 0.1}
    assert scalars(ROW) == {"test/my-net/accuracy": 0.75, "test/my-net/macs": 1000, "test/my-net/params": 200}
    warmup = scalars(Event("search", 9, SearchRecord(0, 0, 0.0, (1.0, 2.0))))
    assert warmup == {"search/lr": 0.0, "search/loss_largest": 1.0, "search/loss_smallest": 2.0}
    result: Any = SearchResult(torch.zeros(1, 1), torch.ones(1, 2), None, None, 0.95)  # type: ignore[arg-type]
    assert scalars(Event("search", 9, result)) == {}


@pytest.mark.parametrize(("typed", "near"), [("tensorbord", "tensorboard"), ("wnb", "wandb"), ("ml-flow", "mlflow")])
def test_an_unknown_name_is_answered_with_the_nearest(typed: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(DmcpError, match=f"did you mean {near}?"):
        open_tracker([typed], tmp_path, SETTINGS)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DmcpError, match=f"pip install {name}$"):
        open_tracker([name], tmp_path, SETTINGS)
    assert not list(tmp_path.iterdir())


def test_nothing_is_imported_or_written_unless_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dmcp.report.trackers import open_tracker\n"
        "for none in ([], [''], ''):\n"
        "    with open_tracker(none, Path.cwd(), {}) as tracker: assert not tracker.services\n"
        "print({'tensorboard', 'wandb', 'mlflow', 'accelerate', 'torch.utils.tensorboard'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "set()" and not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="NOT TESTED: pip install tensorboard")
def test_tensorboard_shows_every_stage_and_hides_steps_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(stage: str) -> dict[str, list[tuple[int, float]]]:
        reader = EventAccumulator(str(tmp_path / "tensorboard" / stage), size_guidance={"scalars": 0}).Reload()
        return {tag: [(it.step, it.value) for it in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}

    events = [*map(search, range(9)), *map(train, range(6)), ROW]
    send(open_tracker("tensorboard", tmp_path, SETTINGS, ["macs"]), events, interrupt=True)
    send(open_tracker("tensorboard", tmp_path, SETTINGS, ["macs"]), [train(3, loss=7.0), train(4, loss=7.0)])
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
    """Remembers calls; like W&B it drops what is logged at a step below the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.ended: list[int] = []
        self.last = -1
        self.broken = False
        stand_in(monkeypatch, "wandb", init=self.init)

    def init(self, **how: Any) -> FakeWandB:
        if self.broken:
            raise ValueError("api_key not configured\nlong story")
        self.begun.append(how)
        self.id = how["id"] or "abc123"
        return self

    def log(self, row: dict[str, float], step: int | None = None) -> None:
        if self.broken:
            raise ConnectionError("the server is gone")
        if step is None or step >= self.last:
            self.last = self.last + 1 if step is None else step
            self.rows.append(row)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


class FakeMLflow:
    """Remembers calls; like MLflow it lets nobody write the parameters of a run twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.params: dict[str, Any] = {}
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.runs: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.waits = True
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
        assert not params.keys() & self.params.keys() and len(params) <= 100
        self.params |= params


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return FakeWandB(monkeypatch)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return FakeMLflow(monkeypatch)


def test_wandb_gets_every_stage_with_its_own_steps(wandb: FakeWandB, tmp_path: Path) -> None:
    send(open_tracker(["wandb"], tmp_path, SETTINGS))
    (begun,) = wandb.begun
    assert begun["project"] == "dmcp" and begun["config"] == SETTINGS and begun["dir"] == str(tmp_path)
    assert len(wandb.rows) == 5  # none dropped
    assert [row["search/step"] for row in wandb.rows[:2]] == [0, 1]
    assert wandb.rows[3] == {"my-net/loss": 0.5, "my-net/lr": 0.1, "my-net/step": 1}
    assert wandb.rows[4]["test/my-net/accuracy"] == 0.75
    assert wandb.axes == {f"{stage}/*": f"{stage}/step" for stage in ("search", "my-net", "test")}
    assert wandb.ended == [0]


def test_mlflow_gets_flat_settings_and_the_steps(mlflow: FakeMLflow, tmp_path: Path) -> None:
    many = SETTINGS | {"more": {str(number): number for number in range(150)}}
    tracker = open_tracker(["mlflow"], tmp_path, many)
    assert not mlflow.waits
    send(tracker)
    wanted = {"job.model": "resnet18", "job.ignore": ["fc"], "search.lr": 0.2, "train": None, "more.149": 149}
    assert wanted.items() <= mlflow.params.items() and len(mlflow.params) == 154
    assert [step for step, _ in mlflow.metrics] == [0, 1, 0, 1, 0]
    assert mlflow.metrics[3][1] == {"my-net/loss": 0.5, "my-net/lr": 0.1}
    assert mlflow.runs == [{"experiment": "dmcp", "run_id": None, "run_name": tmp_path.name}]
    assert mlflow.ended == ["flushed", "FINISHED"] and mlflow.waits


def test_a_resumed_run_goes_on_in_the_same_runs_there(wandb: FakeWandB, mlflow: FakeMLflow, tmp_path: Path) -> None:
    send(open_tracker(["wandb,mlflow", "wandb"], tmp_path, SETTINGS), interrupt=True)
    assert wandb.ended == [1] and mlflow.ended == ["flushed", "FAILED"]
    send(open_tracker(["wandb", "mlflow"], tmp_path, SETTINGS))
    assert [begun["id"] for begun in wandb.begun] == [None, "abc123"] and wandb.begun[1]["resume"] == "allow"
    assert [run["run_id"] for run in mlflow.runs] == [None, "f00"]


def test_a_service_that_fails_does_not_end_the_run(
    wandb: FakeWandB, mlflow: FakeMLflow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_tracker(["wandb", "mlflow"], tmp_path, SETTINGS) as tracker:
        tracker.on_event(search(0))
        wandb.broken = True
        tracker.on_event(search(1))
        tracker.on_event(search(2))
    assert capsys.readouterr().err.count("wandb") == 1  # one line
    assert [step for step, _ in mlflow.metrics] == [0, 1, 2] and mlflow.ended[-1] == "FINISHED"


def test_a_service_that_does_not_start_is_an_error_and_leaves_nothing_open(
    wandb: FakeWandB, mlflow: FakeMLflow, tmp_path: Path
) -> None:
    wandb.broken = True
    with pytest.raises(DmcpError, match="wandb does not start"):
        open_tracker(["mlflow", "wandb"], tmp_path, SETTINGS)
    assert mlflow.ended[-1] == "FAILED"
