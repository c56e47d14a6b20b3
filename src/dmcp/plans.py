"""What a run was asked to do, as it is kept in its folder: with it the run can be done again, or go on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from dmcp.cutting import quote
from dmcp.engine import Engine
from dmcp.errors import FileError, TrainingError
from dmcp.jobs import Job, Opened, data_identity
from dmcp.pruning import Retrain
from dmcp.runs import from_plain
from dmcp.searching import SearchConfig
from dmcp.training import TrainConfig


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
        raise FileError(f"{path}: not the settings of a run of this version ({quote(error)}).") from None


def facts_of(opened: Opened) -> dict[str, Any]:
    """What a run is about, besides its settings: data, the unpruned network, versions."""
    graph = opened.graph
    unpruned = {"macs": graph.macs(), "params": graph.params(), "widths": dict(graph.full)}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    known = {"classes": opened.data.classes, "shape": list(opened.data.shape), "data": data_identity(opened.data)}
    return known | {
        "unpruned": unpruned,
        "macs": graph.macs(),
        "fingerprint": graph.fingerprint,
        "versions": versions,
    }
