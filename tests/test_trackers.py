"""What a run reports arrives at the services: TensorBoard's own reader and stand-ins for W&B and MLflow say so."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from nets import Residual

import dmcp
from dmcp.errors import DmcpError
from dmcp.report.trackers import Tracker, open_tracker, scalars
from dmcp.results import Row
from dmcp.runs import Run
from dmcp.searching.config import SearchRecord, SearchResult
from dmcp.settings import SearchConfig, TrainConfig
from dmcp.training import Event, StepRecord

SETTINGS = {"job": {"model": "resnet18", "ignore": ["fc"]}, "search": {"lr": 0.2}, "train": None}

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="NOT TESTED: pip install tensorboard"
)


def search(step: int, loss: float = 1.0) -> Event:
    return Event("search", 10, SearchRecord(step, 0, 0.2, (loss, 2.0, 3.0, 4.0), 0.5, 1.5, 0.1, (0.9, 0.8)))


def train(step: int, loss: float = 1.0) -> Event:
    return Event("uniform", 10, StepRecord(0, step, 10, 0.1, loss))


ROW = Event("test", 2, Row("uniform", macs=1000, params=200, accuracy=0.75, ms=1.0, batch=8))
EVENTS = [search(0), search(1), train(0), train(1, loss=0.5), ROW]


def send(tracker: Tracker, events: Sequence[Event] = EVENTS) -> None:
    for event in events:
        tracker.on_event(event)


def interrupt(tracker: Tracker, events: Sequence[Event]) -> None:
    """A run that is ended by Ctrl-C after these events."""
    with contextlib.suppress(KeyboardInterrupt), tracker:
        send(tracker, events)
        raise KeyboardInterrupt


# names


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
    assert scalars(train(3)) == {"uniform-widths/loss": 1.0, "uniform-widths/lr": 0.1}
    assert scalars(ROW) == {
        "test/uniform-widths/accuracy": 0.75,
        "test/uniform-widths/macs": 1000,
        "test/uniform-widths/params": 200,
    }


def test_what_a_step_did_not_do_has_no_number() -> None:
    assert scalars(Event("search", 9, SearchRecord(0, 0, 0.0, (1.0, 2.0)))) == {
        "search/lr": 0.0,
        "search/loss_largest": 1.0,
        "search/loss_smallest": 2.0,
    }
    result: Any = SearchResult(torch.zeros(1, 1), torch.ones(1, 2), None, None, 0.95)  # type: ignore[arg-type]
    assert scalars(Event("search", 9, result)) == {}


@pytest.mark.parametrize(("asked", "near"), [("tensorbord", "tensorboard"), ("wnb", "wandb"), ("ml-flow", "mlflow")])
def test_an_unknown_name_is_answered_with_the_nearest(asked: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(DmcpError, match=f"'{asked}' is none of tensorboard, wandb, mlflow; did you mean {near}?"):
        open_tracker([asked], tmp_path, SETTINGS)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DmcpError, match=f"{name} is not installed: pip install {name}$"):
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


# TensorBoard


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Every curve of a folder of TensorBoard, by its own reader; each step must be there once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    curves = {}
    for tag in reader.Tags()["scalars"]:
        points = [(event.step, event.value) for event in reader.Scalars(tag)]
        assert len(dict(points)) == len(points), f"{tag} has a step twice"
        curves[tag] = dict(points)
    return curves


@needs_tensorboard
def test_tensorboard_shows_what_the_log_of_a_run_holds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, *Residual.SHAPE, generator=draw), torch.arange(6) % 5) for _ in range(3)]
    with open_tracker(["tensorboard"], tmp_path, SETTINGS, ["macs"]) as tracker:
        dmcp.prune(
            Residual(**Residual.FULL),
            batches,
            batches[:1],
            search=SearchConfig(budget="60%", epochs=2, groups=4),
            train=TrainConfig(epochs=2, reference_batch=None, lr=0.05, warmup_lr=0.05),
            runtime=dmcp.Runtime(on_event=lambda event: (run.on_event(event), tracker.on_event(event))[0]),
        )
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()) == [
        "dmcp",
        "search",
        "test",
    ]
    found, ours, test = (read(tmp_path / "tensorboard" / stage) for stage in ("search", "dmcp", "test"))
    steps = run.records("search")
    assert len(steps) == 6 and len(run.records("dmcp")) == 6
    wanted: dict[str, dict[int, float]] = defaultdict(dict)
    for record in steps:
        names = ("loss_largest", "loss_smallest", "loss_random_1", "loss_random_2")
        parts = dict(zip(names, record["weight_losses"], strict=True))
        parts |= {name: record[name] for name in ("lr", "alpha_lr", "task_loss", "budget_loss")}
        parts |= {"expected_cost_macs": record["ratios"] and record["ratios"][0]}
        for name, value in parts.items():
            if value is not None:
                wanted[f"search/{name}"][record["step"]] = pytest.approx(value, rel=1e-6)
    assert found == wanted
    assert ours == {
        f"ours/{name}": {record["step"]: pytest.approx(record[name], rel=1e-6) for record in run.records("dmcp")}
        for name in ("loss", "lr")
    }
    (row,) = run.records("test")
    assert test == {f"test/ours/{name}": {0: pytest.approx(row[name])} for name in ("accuracy", "macs", "params")}


@needs_tensorboard
def test_tensorboard_hides_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    interrupt(open_tracker("tensorboard", tmp_path, SETTINGS), [*map(search, range(9)), *map(train, range(6))])
    with open_tracker("tensorboard", tmp_path, SETTINGS) as tracker:
        send(tracker, [train(3, loss=7.0), train(4, loss=7.0)])
    again = read(tmp_path / "tensorboard" / "uniform-widths")
    assert again["uniform-widths/loss"] == {0: 1.0, 1: 1.0, 2: 1.0, 3: 7.0, 4: 7.0}
    assert [*read(tmp_path / "tensorboard" / "search")["search/task_loss"]] == [*range(9)]  # of another stage


@needs_tensorboard
def test_tensorboard_keeps_the_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    open_tracker(["tensorboard"], tmp_path, SETTINGS).__exit__(None, None, None)
    reader = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    ((tag,), text) = reader.Tags()["tensors"], reader.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    assert tag == "settings/text_summary" and json.loads(text) == SETTINGS


# W&B and MLflow, by stand-ins


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **parts: Any) -> Any:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(parts)
    monkeypatch.setitem(sys.modules, name, module)
    return module


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
        limits = types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=2)
        stand_in(
            monkeypatch,
            "mlflow",
            utils=types.SimpleNamespace(validation=limits),
            config=types.SimpleNamespace(enable_async_logging=self.enable),
            search_experiments=lambda filter_string: [],
            create_experiment=lambda name, artifact_location, tags: name,
            start_run=self.start_run,
            log_params=self.log_params,
            log_metrics=lambda metrics, step: self.metrics.append((step, metrics)),
            flush_async_logging=lambda: self.ended.append("flushed"),
            end_run=lambda status="FINISHED": self.ended.append(status),
        )

    def enable(self, on: bool) -> None:
        self.waits = not on

    def start_run(self, **how: Any) -> Any:
        self.runs.append(how)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=how["run_id"] or "f00"))

    def log_params(self, params: dict[str, Any]) -> None:
        assert not params.keys() & self.params.keys()
        self.params |= params


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    return FakeWandB(monkeypatch)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS", "MLFLOW_NESTED_RUN"):
        monkeypatch.delenv(name, raising=False)
    return FakeMLflow(monkeypatch)


def test_wandb_gets_every_stage_with_its_own_steps(wandb: FakeWandB, tmp_path: Path) -> None:
    with open_tracker(["wandb"], tmp_path, SETTINGS) as tracker:
        send(tracker)
    (begun,) = wandb.begun
    assert begun["project"] == "dmcp" and begun["config"] == SETTINGS and begun["dir"] == str(tmp_path)
    assert len(wandb.rows) == 5  # none dropped
    assert [row["search/step"] for row in wandb.rows[:2]] == [0, 1]
    assert wandb.rows[3] == {"uniform-widths/loss": 0.5, "uniform-widths/lr": 0.1, "uniform-widths/step": 1}
    assert wandb.rows[4]["test/uniform-widths/accuracy"] == 0.75
    assert wandb.axes["search/*"] == "search/step" and wandb.axes["uniform-widths/*"] == "uniform-widths/step"
    assert wandb.ended == [0]


def test_mlflow_gets_flat_settings_and_the_steps(mlflow: FakeMLflow, tmp_path: Path) -> None:
    with open_tracker(["mlflow"], tmp_path, SETTINGS) as tracker:
        assert not mlflow.waits
        send(tracker)
    assert mlflow.params == {"job.model": "resnet18", "job.frozen": ["fc"], "search.lr": 0.2, "train": None}
    assert [step for step, _ in mlflow.metrics] == [0, 1, 0, 1, 0]
    assert mlflow.metrics[3][1] == {"uniform-widths/loss": 0.5, "uniform-widths/lr": 0.1}
    assert mlflow.runs[0]["run_name"] == tmp_path.name and mlflow.runs[0]["experiment_id"] == "dmcp"
    assert mlflow.ended == ["flushed", "FINISHED"] and mlflow.waits


def test_a_resumed_run_goes_on_in_the_same_runs_there(wandb: FakeWandB, mlflow: FakeMLflow, tmp_path: Path) -> None:
    interrupt(open_tracker(["wandb,mlflow", "wandb"], tmp_path, SETTINGS), EVENTS)
    assert wandb.ended == [1] and mlflow.ended == ["flushed", "FAILED"]
    with open_tracker(["wandb", "mlflow"], tmp_path, SETTINGS) as tracker:
        send(tracker)
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
    assert capsys.readouterr().err == "wandb fails, the run goes on without it: the server is gone\n"
    assert [step for step, _ in mlflow.metrics] == [0, 1, 2] and mlflow.ended[-1] == "FINISHED"


def test_a_service_that_does_not_start_is_an_error_and_leaves_nothing_open(
    wandb: FakeWandB, mlflow: FakeMLflow, tmp_path: Path
) -> None:
    wandb.broken = True
    with pytest.raises(DmcpError, match=r"wandb does not start: .* leave it out \(api_key not configured\)\.$"):
        open_tracker(["mlflow", "wandb"], tmp_path, SETTINGS)
    assert mlflow.ended[-1] == "FAILED" and not accelerate.PartialState._shared_state


def test_the_first_of_many_ranks_writes_without_meeting_the_others(
    wandb: FakeWandB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "ACCELERATE_TORCH_DEVICE"):  # to meet would fail at once, not wait
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with open_tracker(["wandb"], tmp_path, SETTINGS) as tracker:
        send(tracker)
        assert not torch.distributed.is_initialized()
    assert len(wandb.rows) == 5 and dict(os.environ) == before and not accelerate.PartialState._shared_state
