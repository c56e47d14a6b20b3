"""What a run was asked to do, as it is kept in its folder: with it the run can be done again, or go on."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from dmcp.engine import Engine
from dmcp.errors import FileError, TrainingError
from dmcp.files import quote
from dmcp.keeping import digest
from dmcp.plain_data import from_plain
from dmcp.ranks import ALONE
from dmcp.retraining import Retrain
from dmcp.running.jobs import Job, Opened, data_identity
from dmcp.running.operations import OPERATIONS
from dmcp.searching.searches import SearchConfig
from dmcp.training import TrainConfig

FACTS = ("fingerprint", "macs", "data", "teacher")  # of those of a run, what must stay as it is


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a comparison: what `dmcp cell` does besides what the rest of its plan says."""

    method: str  # see methods; "" for the unpruned network
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method, where they are not its defaults
    prepares: bool = False  # whether it only trains a network that other cells start from
    uses: str = ""  # name of the cell whose network it starts from, in the same folder
    holdout: float = 0.1  # share of the training images that methods choose by
    scratch: bool = True  # whether the chosen network is trained from scratch
    fine_tune_epochs: int = 0  # epochs of the method's own way of training, where it fine-tunes; 0: not that way


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings of one command."""

    command: str  # prune, search or train
    job: Job
    engine: Engine
    search: SearchConfig | None = None
    train: TrainConfig | None = None
    retrain: Retrain = Retrain.SCRATCH
    controls: bool = False
    widths: str = ""  # file of widths that are trained
    cell: Cell | None = None  # of dmcp compare
    every_steps: int = 1000  # steps between two checkpoints
    every_minutes: float = 5.0  # minutes between two, if that is sooner
    options: Mapping[str, Any] = field(default_factory=dict)  # as they were typed

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"options": dict(self.options)}


def plan_from_json(data: Mapping[str, Any], path: object) -> Plan:
    """The plan of a run; FileError where it is not one of this version."""
    try:
        return from_plain(Plan, {it.name: data[it.name] for it in fields(Plan)})
    except (KeyError, TypeError, ValueError, OverflowError, TrainingError) as error:
        raise FileError(
            f"{path}: not the settings of a run of this version ({quote(error)}): another version of dmcp began it, "
            "or somebody has changed it: go on with that version, or start anew in another folder (--out)."
        ) from None


@functools.cache
def code_digest() -> str:
    """Twelve letters that change with our code: which version made a result, also where none is installed."""
    here = Path(__file__).parents[1]
    parts = [path.relative_to(here).as_posix().encode() + path.read_bytes() for path in sorted(here.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def facts_of(opened: Opened) -> dict[str, Any]:
    """What a run is about, besides its settings: data, the unpruned network, versions."""
    graph = opened.graph
    unpruned = {"macs": graph.macs(), "params": graph.params(), "widths": dict(graph.full)}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "code": code_digest()}
    teacher = {} if opened.teacher is None else {"teacher": digest(opened.teacher.state_dict(), ALONE)}
    known = {"classes": opened.data.classes, "shape": list(opened.data.shape), "data": data_identity(opened.data)}
    return (
        known
        | teacher
        | {
            "unpruned": unpruned,
            "macs": graph.macs(),
            "fingerprint": graph.fingerprint,
            OPERATIONS: opened.operations,
            "versions": versions,
        }
    )
