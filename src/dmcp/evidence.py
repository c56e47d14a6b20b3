"""What the data of experiments say about single cells: accuracies by arm, budget and seed, and where alphas ended."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dmcp.comparing import cell_name
from dmcp.findings import Protocol
from dmcp.tables import counted

_NAME = re.compile(r"(?P<arm>.+?)(?:-(?P<budget>[^-]*\d[^-]*))??-seed(?P<seed>-?\d+)")  # of a cell: see cell_name
PEERS = ("amc", "metapruning", "autoslim", "slimming")  # methods of `dmcp compare` that choose widths of their own


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A cell that is done, or is not yet."""

    name: str
    arm: str  # its name without budget, seed and number of the draw
    budget: str  # empty: none
    seed: int
    accuracy: float | None = None  # of the network trained from scratch, 0 to 1
    own_accuracy: float | None = None  # of the one trained the method's own way


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Where the alphas of one arm have ended, seed by seed."""

    accuracies: tuple[float, ...]  # of the training images, 0 to 1
    ungated: tuple[float, ...]  # the same of the network without gates
    macs_shares: tuple[float, ...]  # of the network without gates


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the data of one experiment on one network say about claims."""

    experiment: str
    network: str  # as it is told
    protocol: str  # cells of one name are the same cells if this is the same
    recipe: str  # the same for people, in short
    tested: tuple[Tested, ...]  # each cell once
    recovered: Mapping[str, Recovered] = field(default_factory=dict)  # by arm


def read_evidence(data: Mapping[str, Any], network: str) -> Evidence:
    """From the data of an experiment; KeyError, TypeError or ValueError if they are not as `dmcp paper` writes them."""
    cells = [*_cells_of_rows(data["rows"]), *({"name": name} for name in data["missing"]), *data["cells"]]
    known = {it.name: it for cell in cells if (it := _read_cell(cell))}
    labels = {it.arm: cell["label"] for cell in data["cells"] if (it := _read_cell(cell))}
    ended = {row["label"]: row for row in data["rows"] if "recovered" in row}
    epochs = counted(data["train"]["epochs"], "epoch")
    search = f" after a search of {data['search_epochs']}" if data.get("search_epochs") is not None else ""
    return Evidence(
        experiment=data["experiment"],
        network=network,
        protocol=json.dumps([data.get(it.name) for it in fields(Protocol)], sort_keys=True),
        recipe=f"{' '.join((data['model'], *data.get('model_args', ())))}, {epochs}{search}",
        tested=tuple(known.values()),
        recovered={arm: _read_recovered(ended[label]) for arm, label in labels.items() if label in ended},
    )


def _cells_of_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What main has of `dmcp compare`: its rows have the seeds; those with uniform's networks are left out."""
    own = [
        row for row in rows if "method" in row and row.get("seeds") and not row.get("own") and not row.get("same_as")
    ]
    return [
        {"name": cell_name(row["method"], seed, row["budget"]), "accuracy": value}
        for row in own
        for seed, value in zip(row["seeds"], row["accuracies"], strict=True)
    ]


def _read_cell(cell: Mapping[str, Any]) -> Tested | None:
    """None for a name that is not of ours."""
    parts = _NAME.fullmatch(cell["name"])
    if not parts:
        return None
    values = {key: None if cell.get(key) is None else float(cell[key]) for key in ("accuracy", "own_accuracy")}
    arm = parts["arm"].rstrip("0123456789")
    return Tested(name=cell["name"], arm=arm, budget=parts["budget"] or "", seed=int(parts["seed"]), **values)


def _read_recovered(row: Mapping[str, Any]) -> Recovered:
    ends, ungated, shares = (tuple(map(float, row[key])) for key in ("recovered", "trained", "last_macs"))
    if not len(ends) == len(ungated) == len(shares):
        raise ValueError(f"{row['label']}: not as many values as seeds")
    return Recovered(accuracies=ends, ungated=ungated, macs_shares=shares)
