"""Curves for TensorBoard, W&B and MLflow."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from dmcp.errors import DmcpError
from dmcp.latency.table import Latency
from dmcp.results import Row
from dmcp.runs import Run, read_json
from dmcp.searching.config import SearchRecord, SearchResult
from dmcp.training import Event, StepRecord

KINDS = TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"  # also the names of their packages
IDS = "trackers.json"  # how W&B and MLflow call the run, so that it goes on there when it is resumed
_PROJECT = "dmcp"  # where they put it, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise
_SECONDS = 10  # the longest that a number waits before it is in TensorBoard's files


class Service(Protocol):
    """One of the places that numbers are sent to."""

    run_id: str  # what it calls the run; empty where the folder says it all

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of one step; every stage counts its steps from 0."""

    def close(self, failed: bool) -> None:
        """Send what still waits, and tell how the run has ended."""


class Tracker:
    """Sends what a run reports to its services; one that fails is given up, since the run is worth more.

    Steps that a resumed run does again are sent again: TensorBoard then hides the earlier ones, W&B and MLflow show
    both.
    """

    def __init__(self, limits: Sequence[str] = ()) -> None:
        self.limits = limits  # the kind of each limit of the budget
        self.services: dict[str, Service] = {}
        self.undo = contextlib.ExitStack()  # for when all services are closed

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, service in list(self.services.items()):
            self._try(name, functools.partial(service.close, kind is not None))
        self.services.clear()
        self.undo.close()

    def on_event(self, event: Event) -> None:
        """Send the numbers of a step, or of a row of the final table."""
        values = scalars(event, self.limits)
        step = event.record.step if isinstance(event.record, SearchRecord | StepRecord) else 0
        for name, service in list(self.services.items()) if values else ():
            self._try(name, functools.partial(service.log, clean(event.stage), step, values))

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the packages raise what they like: a full disk, a server that is gone
            del self.services[name]
            print(f"{name} fails, the run goes on without it: {_say(error)}", file=sys.stderr, flush=True)


def open_tracker(
    kinds: Sequence[str], folder: Path, settings: Mapping[str, Any], limits: Sequence[str] = ()
) -> Tracker:
    """Start the services for the run in this folder, on its first rank only; without kinds nothing is ever done.

    settings: plain data that the services keep with the run.
    limits: the kind of each limit of the budget, for the names of the expected costs; else they are numbered.
    """
    names, tracker = read_kinds(kinds), Tracker(limits)
    known = read_json(folder / IDS) if names and (folder / IDS).exists() else {}
    with contextlib.ExitStack() as failing:
        failing.push(tracker)
        if WANDB in names or MLFLOW in names:
            tracker.undo.enter_context(_lone_process())
        for name in names:
            tracker.services[name] = _start(name, folder, settings, known.get(name, ""))
        ids = {name: service.run_id for name, service in tracker.services.items() if service.run_id}
        if ids:
            Run(folder).write(IDS, known | ids)
        failing.pop_all()
    return tracker


def read_kinds(texts: Sequence[str]) -> tuple[str, ...]:
    """The services that were asked for, one by one or with commas; DmcpError for one that cannot be had here."""
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
    """The numbers of an event by their names in the charts; none for the search's result, or for a table of latency."""
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
    """A name with those characters only that all services, and folders, take."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


# the services


class TensorBoard:
    """Files in FOLDER/tensorboard, with a folder for each stage.

    A writer that begins at a step hides all later ones of its folder: in a common one, those of other stages too.
    """

    run_id = ""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder / TENSORBOARD
        self.writers: dict[str, Any] = {}
        text = json.dumps(settings, indent=1, default=str)
        self._writer("", 0).add_text("settings", "    " + text.replace("\n", "\n    "), 0)  # Markdown for "as it is"

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
            self.writers[stage] = SummaryWriter(str(self.folder / stage), purge_step=step, flush_secs=_SECONDS)
        return self.writers[stage]


class WandB:
    """A run of Weights & Biases; what it keeps on this machine is in FOLDER/wandb."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], earlier: str) -> None:
        project = os.environ.get("WANDB_PROJECT") or _PROJECT
        place = {"dir": str(folder), "name": folder.name, "id": earlier or None, "resume": "allow"}
        self.tracker = importlib.import_module("accelerate.tracking").WandBTracker(
            project, config=dict(settings), **place
        )
        self.tracker.start()
        self.run_id = str(self.tracker.tracker.id)
        self.stages: set[str] = set()

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers, with the step as one more: W&B's own must never fall, and every stage begins at 0."""
        if stage not in self.stages:
            self.tracker.tracker.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self.stages.add(stage)
        self.tracker.log({**values, f"{stage}/step": step})

    def close(self, failed: bool) -> None:
        """Wait until all is sent."""
        self.tracker.tracker.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], earlier: str) -> None:
        self.tracker = importlib.import_module("accelerate.tracking").MLflowTracker(
            _PROJECT, run_name=folder.name, run_id=earlier or None
        )
        self.tracker.start()
        self.run_id = str(self.tracker.tracker.info.run_id)
        self.package = importlib.import_module(MLFLOW)
        self.package.config.enable_async_logging(True)  # a step must not wait for a database
        if self.run_id != earlier:  # it has them already, and lets nobody write them twice
            self.tracker.store_init_configuration(_flat(settings))

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers."""
        self.tracker.log(values, step)

    def close(self, failed: bool) -> None:
        """Wait until all is sent, and end the run there."""
        self.package.flush_async_logging()
        self.package.config.enable_async_logging(False)
        self.package.end_run("FAILED" if failed else "FINISHED")


def _start(name: str, folder: Path, settings: Mapping[str, Any], earlier: str) -> Service:
    try:
        if name == TENSORBOARD:
            return TensorBoard(folder, settings)
        return (WandB if name == WANDB else MLflow)(folder, settings, earlier)
    except Exception as error:  # no key, no network, another version: each package has errors of its own
        raise DmcpError(f"--track: {name} does not start: set it up, or leave it out ({_say(error)}).") from error


@contextlib.contextmanager
def _lone_process() -> Iterator[None]:
    """The state that Accelerate's trackers ask whether they may write; they may, and no process group is started."""
    state = importlib.import_module("accelerate").PartialState
    if state._shared_state:  # the caller's own
        yield
        return
    told = {"LOCAL_RANK": "-1", "ACCELERATE_TORCH_DEVICE": "cpu"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        state()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    try:
        yield
    finally:
        state._reset_state()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings as one list: search.lr."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = prefix + clean(name)
        found |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found


def _say(error: Exception) -> str:
    """The first line of what a package says, or as much of it as can be read at a glance."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(" .")
