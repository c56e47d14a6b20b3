"""Curves for TensorBoard, W&B and MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dmcp.errors import DmcpError
from dmcp.results import Row
from dmcp.runs import Run, read_json
from dmcp.searching.config import SearchRecord
from dmcp.training import Event, StepRecord

KINDS = TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"  # also the names of their packages
IDS = "trackers.json"  # the ids of the run in W&B and MLflow, with which it is resumed there
_PROJECT = "dmcp"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise


class Tracker:
    """Sends events to services; one that fails is dropped with a warning, and the run goes on.

    Steps that a resumed run does again are sent again: TensorBoard hides the earlier ones, W&B and MLflow show both.
    """

    def __init__(self, limits: Sequence[str]) -> None:
        self.limits = limits  # the kind of each limit of the budget
        self.services: dict[str, TensorBoard | WandB | MLflow] = {}

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, service in list(self.services.items()):
            self._try(name, service.close, kind is not None)

    def on_event(self, event: Event) -> None:
        """Send the numbers of a step, or of a row of the final table."""
        values = scalars(event, self.limits)
        step = event.record.step if isinstance(event.record, SearchRecord | StepRecord) else 0
        for name, service in list(self.services.items()) if values else ():
            self._try(name, service.log, clean(event.stage), step, values)

    def _try(self, name: str, send: Callable[..., None], *values: Any) -> None:
        try:
            send(*values)
        except Exception as error:  # each package has errors of its own
            del self.services[name]
            print(f"{name} fails, the run goes on without it: {error}", file=sys.stderr, flush=True)


def open_tracker(
    kinds: Sequence[str], folder: Path, settings: Mapping[str, Any], limits: Sequence[str] = ()
) -> Tracker:
    """Start these services, which keep the settings, for the run in a folder; called on rank 0.

    limits: the kind of each limit of the budget, for the names of the expected costs.
    """
    tracker, ids = Tracker(limits), read_json(folder / IDS) if (folder / IDS).exists() else {}
    for name in read_kinds(kinds):
        try:
            service: Any = {TENSORBOARD: TensorBoard, WANDB: WandB, MLFLOW: MLflow}[name]
            tracker.services[name] = service(folder, settings, ids.get(name, ""))
        except Exception as error:
            tracker.__exit__(type(error))
            raise DmcpError(f"--track: {name} does not start: set it up, or leave it out ({error}).") from error
    if new := {name: service.run_id for name, service in tracker.services.items() if service.run_id}:
        Run(folder).write(IDS, ids | new)
    return tracker


def read_kinds(texts: Sequence[str]) -> list[str]:
    """Names of services, one by one or with commas; DmcpError for an unknown or missing one."""
    names = {name.strip().lower(): None for text in texts for name in text.split(",") if name.strip()}
    for name in names:
        if name not in KINDS:
            raise DmcpError(f"--track: {name!r} is none of {', '.join(KINDS)}.")
        if importlib.util.find_spec(name) is None:
            raise DmcpError(f"--track: {name} is not installed: pip install {name}")
    return list(names)


def scalars(event: Event, limits: Sequence[str] = ()) -> dict[str, float]:
    """The numbers of an event by their names in the charts."""
    record, stage, found = event.record, clean(event.stage), dict[str, float | None]()
    if isinstance(record, Row):
        values = {"accuracy": record.accuracy, "macs": record.macs, "params": record.params}
        found = {f"{clean(record.name)}/{name}": value for name, value in values.items()}
    elif isinstance(record, StepRecord):
        found = {"loss": record.loss, "lr": record.lr}
    elif isinstance(record, SearchRecord):
        for number, loss in enumerate(record.weight_losses or ()):
            found["loss_" + ("largest", "smallest", f"random_{number - 1}")[min(number, 2)]] = loss
        found |= {name: getattr(record, name) for name in ("lr", "alpha_lr", "task_loss", "budget_loss")}
        found |= {f"expected_cost_{kind}": ratio for kind, ratio in zip(limits, record.ratios or (), strict=False)}
    return {f"{stage}/{name}": value for name, value in found.items() if value is not None}


def clean(name: str) -> str:
    """A name with only those characters that all services, and folders, take."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


# the services: every stage counts its steps from 0


class TensorBoard:
    """Files in FOLDER/tensorboard, with a folder for each stage.

    A writer that begins at a step hides all later ones of its folder: in a common one, those of other stages too.
    """

    run_id = ""

    def __init__(self, folder: Path, settings: Mapping[str, Any], earlier: str) -> None:
        self.folder, self.writers = folder / TENSORBOARD, dict[str, Any]()
        text = json.dumps(settings, indent=1, default=str)
        self._writer("", 0).add_text("settings", "    " + text.replace("\n", "\n    "), 0)  # a code block in Markdown

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers to the file of the stage."""
        for name, value in values.items():
            self._writer(stage, step).add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        """Write what waits."""
        for writer in self.writers.values():
            writer.close()

    def _writer(self, stage: str, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if stage not in self.writers:
            self.writers[stage] = SummaryWriter(str(self.folder / stage), purge_step=step, flush_secs=10)
        return self.writers[stage]


class WandB:
    """A run of Weights & Biases; its local files are in FOLDER/wandb."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], earlier: str) -> None:
        project = os.environ.get("WANDB_PROJECT") or _PROJECT
        place = {"dir": str(folder), "name": folder.name, "id": earlier or None, "resume": "allow"}
        self.run = importlib.import_module(WANDB).init(project=project, config=dict(settings), **place)
        self.run_id, self.stages = str(self.run.id), set[str]()

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers and the step: W&B's own step must never fall, and every stage begins at 0."""
        if stage not in self.stages:
            self.stages.add(stage)
            self.run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self.run.log({**values, f"{stage}/step": step})

    def close(self, failed: bool) -> None:
        """Wait until all is sent."""
        self.run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], earlier: str) -> None:
        self.package = importlib.import_module(MLFLOW)
        self.package.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT)
        self.run_id = str(self.package.start_run(run_id=earlier or None, run_name=folder.name).info.run_id)
        if self.run_id != earlier:  # parameters can be written once
            self.package.log_params(_flat(settings))
        self.package.config.enable_async_logging(True)  # a step must not wait for a database

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers."""
        self.package.log_metrics(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Wait until all is sent, and end the run there."""
        self.package.flush_async_logging()
        self.package.config.enable_async_logging(False)
        self.package.end_run("FAILED" if failed else "FINISHED")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings as one list: search.lr."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = prefix + clean(name)
        found |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found
