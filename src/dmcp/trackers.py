"""Where a run is also watched while it goes on: TensorBoard, Weights & Biases and MLflow, asked for by name.

TensorBoard's files are written by torch; the other two are spoken to by Accelerate's trackers. No package of theirs is
imported unless it is asked for, and what is watched changes nothing in the run.
"""

from __future__ import annotations

import contextlib
import difflib
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
from dmcp.pruning import Event, Row
from dmcp.runs import Run, read_json
from dmcp.searching import SearchRecord, SearchResult
from dmcp.training import StepRecord

TENSORBOARD, WANDB, MLFLOW = KINDS = ("tensorboard", "wandb", "mlflow")  # names of the packages, too
IDS = "trackers.json"  # under which name each service knows the run, so that a resumed run goes on there
_PROJECT = "dmcp"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise
_FLUSH_SECONDS = 10  # the longest that a number waits in memory for TensorBoard


class Service(Protocol):
    """One place that numbers are sent to."""

    id: str  # of the run there; empty where the folder is enough

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of one step; each stage counts its steps from 0."""

    def close(self, failed: bool) -> None:
        """Send what waits, and say how the run ended."""


class Tracker:
    """Sends what a run reports to all services; one that fails is given up, the run is not.

    Steps are those of the records. Steps that a resumed run does again are sent again: TensorBoard hides the earlier
    ones, W&B and MLflow show both.
    """

    def __init__(self, services: Mapping[str, Service], limits: Sequence[str], undo: contextlib.ExitStack) -> None:
        self.services = dict(services)
        self.limits = limits
        self._undo = undo

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, service in list(self.services.items()):
            self._try(name, lambda service=service: service.close(kind is not None))
        self._undo.close()

    def on_event(self, event: Event) -> None:
        """Send the numbers of a step, or of a row of the final table."""
        values = scalars(event, self.limits)
        step = 0 if isinstance(event.record, Row | SearchResult) else event.record.step
        for name, service in list(self.services.items()) if values else []:
            self._try(name, lambda service=service: service.log(clean(event.stage), step, values))

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever it is: hours of training are worth more than a curve
            del self.services[name]
            print(f"{name} fails, and the run goes on without it: {_say(error)}", file=sys.stderr, flush=True)


def open_tracker(
    kinds: Sequence[str], folder: Path, settings: Mapping[str, Any], limits: Sequence[str] = ()
) -> Tracker:
    """Start the services; only the first rank does, in the folder of the run. Without kinds nothing is done.

    settings: plain data that describes the run. limits: the kind of each limit of the budget; without, their numbers.
    """
    names = read_kinds(kinds)
    known = read_json(folder / IDS) if names and (folder / IDS).exists() else {}
    with contextlib.ExitStack() as undo:
        services: dict[str, Service] = {}
        if {WANDB, MLFLOW} & {*names}:
            undo.enter_context(_main_process())
        for name in names:
            services[name] = _start(name, folder, settings, str(known.get(name, "")))
            undo.push(lambda kind, error, trace, service=services[name]: service.close(True))
        ids = {name: service.id for name, service in services.items() if service.id}
        if ids:
            Run(folder).write(IDS, known | ids)
        undo.pop_all()
    return Tracker(services, limits, contextlib.ExitStack())
