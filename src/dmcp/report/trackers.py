"""Curves for TensorBoard and W&B."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dmcp.errors import DmcpError
from dmcp.runs.files import read_json
from dmcp.runs.records import Row, SearchRecord, StepRecord
from dmcp.runs.writing import Run
from dmcp.training.loop import Event

WANDB_FILE = "wandb.json"  # the id of the run in W&B, with which it is resumed there


class Service(NamedTuple):
    """A service that was started."""

    log: Callable[[Mapping[str, float], int], None]  # sends numbers by name, and the step
    close: Callable[[bool], None]  # sends what waits; its argument says whether the run failed


class Tracker(contextlib.AbstractContextManager["Tracker"]):
    """Sends the events of a run to services, which also keep its settings; only rank 0 has one.

    A service that fails is dropped with a warning, and the run goes on. Every stage counts its steps from 0, and steps
    that a resumed run repeats are sent again.
    """

    def __init__(
        self, kinds: Sequence[str], folder: Path, settings: Mapping[str, Any], limits: Sequence[str] = ()
    ) -> None:
        self.limits = limits  # the kind of each limit of the budget
        self.services: dict[str, Service] = {}
        for name in read_kinds(kinds):
            try:
                self.services[name] = _OPENERS[name](folder, settings)
            except Exception as error:
                self.__exit__(type(error))
                raise DmcpError(f"--track: {name} does not start ({error}). Set it up, or leave it out.") from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, service in list(self.services.items()):
            self._try(name, service.close, kind is not None)

    def on_event(self, event: Event) -> None:
        """Send the numbers of a step, or of a row of the final table."""
        step = 0
        if isinstance(event.record, SearchRecord | StepRecord):
            step = event.record.step
        values = scalars(event, self.limits)
        if values:
            for name, service in list(self.services.items()):
                self._try(name, service.log, values, step)

    def _try(self, name: str, send: Callable[..., None], *values: Any) -> None:
        try:
            send(*values)
        except Exception as error:  # each package has errors of its own
            del self.services[name]
            print(f"{name} failed, and the run continues without it: {error}", file=sys.stderr, flush=True)


def read_kinds(texts: Sequence[str]) -> list[str]:
    """Read names of services, one by one or with commas; DmcpError for one that is unknown or not installed."""
    names: list[str] = []
    for text in texts:
        names += [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in _OPENERS:
            raise DmcpError(f"--track: {name!r} is not one of {', '.join(_OPENERS)}.")
        if importlib.util.find_spec(name) is None:
            raise DmcpError(f"--track: {name} is not installed: pip install {name}")
    return list(dict.fromkeys(names))


def scalars(event: Event, limits: Sequence[str] = ()) -> dict[str, float]:
    """The numbers of an event by their names in the charts."""
    record = event.record
    values: dict[str, float | None] = {}
    if isinstance(record, Row):
        network = clean(record.name)
        values[f"{network}/accuracy"] = record.accuracy
        values[f"{network}/macs"] = record.macs
        values[f"{network}/params"] = record.params
    elif isinstance(record, StepRecord):
        values["loss"] = record.loss
        values["lr"] = record.lr
    elif isinstance(record, SearchRecord):
        values = _search_scalars(record, limits)
    stage = clean(event.stage)
    return {f"{stage}/{name}": value for name, value in values.items() if value is not None}


def _search_scalars(record: SearchRecord, limits: Sequence[str]) -> dict[str, float | None]:
    """The numbers of a search step; sub-networks are the largest, the smallest, and random ones from 1 on."""
    losses = record.weight_losses or ()
    names = ["largest", "smallest", *(f"random_{number}" for number in range(1, len(losses)))]
    values: dict[str, float | None] = {f"loss_{name}": loss for name, loss in zip(names, losses, strict=False)}
    values["lr"] = record.lr
    values["alpha_lr"] = record.alpha_lr
    values["task_loss"] = record.task_loss
    values["budget_loss"] = record.budget_loss
    for kind, ratio in zip(limits, record.ratios or (), strict=False):
        values[f"expected_cost_{kind}"] = ratio
    return values


def clean(name: str) -> str:
    """Replace the characters that services or folders do not allow in names."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


# the services


def _tensorboard(folder: Path, settings: Mapping[str, Any]) -> Service:
    """Files in FOLDER/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)
    text = json.dumps(settings, indent=1, default=str)
    writer.add_text("settings", "    " + text.replace("\n", "\n    "), 0)  # a code block in Markdown

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Service(log, lambda failed: writer.close())


def _wandb(folder: Path, settings: Mapping[str, Any]) -> Service:
    """A run of Weights & Biases; its local files are in FOLDER/wandb."""
    project = os.environ.get("WANDB_PROJECT") or "dmcp"
    options = {"dir": str(folder), "name": folder.name, "resume": "allow"}
    if (folder / WANDB_FILE).exists():  # only the id is used: other settings might send curves and the key elsewhere
        options["id"] = str(read_json(folder / WANDB_FILE)["id"])
    run = importlib.import_module("wandb").init(project=project, config=dict(settings), **options)
    Run(folder).write(WANDB_FILE, {"id": str(run.id)})
    run.define_metric("*", step_metric="step")  # W&B's own step must never fall

    def log(values: Mapping[str, float], step: int) -> None:
        run.log({**values, "step": step})

    return Service(log, lambda failed: run.finish(exit_code=int(failed)))


_OPENERS = {"tensorboard": _tensorboard, "wandb": _wandb}  # by the names of their packages
