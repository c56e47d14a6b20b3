"""Curves for TensorBoard, W&B and MLflow."""

from __future__ import annotations

import difflib
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
from dmcp.latency.table import Latency
from dmcp.results import Row
from dmcp.runs import Run, read_json
from dmcp.searching.config import SearchRecord, SearchResult
from dmcp.training import Event, StepRecord

KINDS = TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"  # also the names of their packages
IDS = "trackers.json"  # the ids of the run in W&B and MLflow, with which it is resumed there
_PROJECT = "dmcp"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise
_FLUSH_SECONDS = 10  # of TensorBoard's files
_PARAMS = 100  # that MLflow takes at once


class Tracker:
    """Sends events to services; one that fails is dropped with a warning, and the run goes on.

    Steps that a resumed run does again are sent again: TensorBoard hides the earlier ones, W&B and MLflow show both.
    """

    def __init__(self, limits: Sequence[str] = ()) -> None:
        self.limits = limits  # the kind of each limit of the budget
        self.services: dict[str, TensorBoard | WandB | MLflow] = {}

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, service in list(self.services.items()):
            self._try(name, service.close, kind is not None)
        self.services.clear()

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
            print(f"{name} fails, the run goes on without it: {_first_line(error)}", file=sys.stderr, flush=True)


def open_tracker(
    kinds: Sequence[str], folder: Path, settings: Mapping[str, Any], limits: Sequence[str] = ()
) -> Tracker:
    """Start these services for the run in a folder; called on rank 0.

    settings: plain data that the services keep with the run.
    limits: the kind of each limit of the budget, for the names of the expected costs.
    """
    names, tracker = read_kinds(kinds), Tracker(limits)
    ids = read_json(folder / IDS) if names and (folder / IDS).exists() else {}
    for name in names:
        try:
            tracker.services[name] = _SERVICES[name](folder, settings, ids.get(name, ""))
        except Exception as error:
            tracker.__exit__(type(error))
            text = f"--track: {name} does not start: set it up, or leave it out ({_first_line(error)})."
            raise DmcpError(text) from error
    new = {name: service.run_id for name, service in tracker.services.items() if service.run_id}
    if new:
        Run(folder).write(IDS, ids | new)
    return tracker


def read_kinds(texts: Sequence[str]) -> tuple[str, ...]:
    """Names of services, one by one or with commas; DmcpError for an unknown or missing one."""
    texts = [texts] if isinstance(texts, str) else texts
    names = dict.fromkeys(name.strip().lower() for text in texts for name in text.split(",") if name.strip())
    for name in names:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.0)[0]
            raise DmcpError(f"--track: {name!r} is none of {', '.join(KINDS)}; did you mean {near}?")
        if importlib.util.find_spec(name) is None:
            raise DmcpError(f"--track: {name} is not installed: pip install {name}")
    return tuple(names)


def scalars(event: Event, limits: Sequence[str] = ()) -> dict[str, float]:
    """The numbers of an event by their names in the charts."""
    record, stage = event.record, clean(event.stage)
    if isinstance(record, SearchResult | Latency):
        return {}
    if isinstance(record, Row):
        name = f"{stage}/{clean(record.name)}"
        return {f"{name}/accuracy": record.accuracy, f"{name}/macs": record.macs, f"{name}/params": record.params}
    found: dict[str, float | None] = {"lr": record.lr}
    if isinstance(record, StepRecord):
        found["loss"] = record.loss
    else:
        for number, loss in enumerate(record.weight_losses or ()):
            found["loss_" + ("largest", "smallest", f"random_{number - 1}")[min(number, 2)]] = loss
        found |= {"alpha_lr": record.alpha_lr, "task_loss": record.task_loss, "budget_loss": record.budget_loss}
        for number, ratio in enumerate(record.ratios or ()):
            found[f"expected_cost_{limits[number] if number < len(limits) else number + 1}"] = ratio
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
        self.folder = folder / TENSORBOARD
        self.writers: dict[str, Any] = {}
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
            path = str(self.folder / stage)
            self.writers[stage] = SummaryWriter(path, purge_step=step, flush_secs=_FLUSH_SECONDS)
        return self.writers[stage]


class WandB:
    """A run of Weights & Biases; its local files are in FOLDER/wandb."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], earlier: str) -> None:
        project = os.environ.get("WANDB_PROJECT") or _PROJECT
        place = {"dir": str(folder), "name": folder.name, "id": earlier or None, "resume": "allow"}
        self.run = importlib.import_module(WANDB).init(project=project, config=dict(settings), **place)
        self.run_id = str(self.run.id)
        self.stages: set[str] = set()

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers and the step: W&B's own step must never fall, and every stage begins at 0."""
        if stage not in self.stages:
            self.run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self.stages.add(stage)
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
            flat = list(_flat(settings).items())
            for start in range(0, len(flat), _PARAMS):
                self.package.log_params(dict(flat[start : start + _PARAMS]))
        self.package.config.enable_async_logging(True)  # a step must not wait for a database

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers."""
        self.package.log_metrics(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Wait until all is sent, and end the run there."""
        self.package.flush_async_logging()
        self.package.config.enable_async_logging(False)
        self.package.end_run("FAILED" if failed else "FINISHED")


_SERVICES: dict[str, Callable[[Path, Mapping[str, Any], str], TensorBoard | WandB | MLflow]]
_SERVICES = {TENSORBOARD: TensorBoard, WANDB: WandB, MLFLOW: MLflow}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings as one list: search.lr."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = prefix + clean(name)
        found |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(" .")
