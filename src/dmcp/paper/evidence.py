"""What the data of experiments say about single cells, by arm, budget and seed, and what the paper has beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dmcp.comparison.comparing import cell_name
from dmcp.paper.findings import written_protocol
from dmcp.paper.own_experiments import SEEDS
from dmcp.tables import counted

_NAME = re.compile(r"(?P<arm>.+?)(?:-(?P<budget>[^-]*\d[^-]*))??-seed(?P<seed>-?\d+)")  # of a cell: see cell_name
_LATER = re.compile(rf"(?<=.)-{SEEDS}(?=-|$)")  # in the name of an arm: its other seeds are those of one without it
PEERS = ("amc", "metapruning", "autoslim", "slimming")  # methods of `dmcp compare` that choose widths of their own


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A cell that is done, or is not yet."""

    name: str
    arm: str  # its name without budget, seed and number of the draw; the same for later seeds of an arm
    budget: str  # empty: none
    seed: int
    accuracy: float | None = None  # of the network trained from scratch, 0 to 1
    own_accuracy: float | None = None  # of the one trained the method's own way

    @property
    def is_done(self) -> bool:
        return self.accuracy is not None or self.own_accuracy is not None

    @property
    def setting(self) -> str:
        """The same for cells that differ by their seeds alone."""
        return _LATER.sub("", self.name.rpartition("-seed")[0])


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Where the alphas of one arm have ended, seed by seed."""

    accuracies: tuple[float, ...]  # of the training images, 0 to 1
    ungated: tuple[float, ...]  # the same of the network without gates
    macs_shares: tuple[float, ...]  # of the network without gates


@dataclass(frozen=True)
class Peaks:
    """Shares of the spaces whose width has one peak, seed by seed."""

    strict: tuple[float, ...]
    filled: tuple[float, ...]  # with small dips filled


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the data of one experiment on one network say about claims."""

    experiment: str
    network: str  # as it is told
    protocol: str  # cells of one name are the same cells if this is the same
    recipe: str  # the same for people, in short
    tested: tuple[Tested, ...]  # each cell once
    recovered: Mapping[str, Recovered] = field(default_factory=dict)  # by arm
    peaks: Mapping[str, Peaks] = field(default_factory=dict)  # by where the alphas started; "": where they usually do


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
        protocol=json.dumps(written_protocol(data), sort_keys=True),
        recipe=f"{' '.join((data['model'], *data.get('model_args', ())))}, {epochs}{search}",
        tested=tuple(known.values()),
        recovered={arm: _read_recovered(ended[label]) for arm, label in labels.items() if label in ended},
        peaks=_read_peaks(data["rows"]),
    )


def _read_peaks(rows: Sequence[Mapping[str, Any]]) -> dict[str, Peaks]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "one_peak" in row:
            found.setdefault(row.get("start", ""), []).append(row)
    kinds = ("one_peak", "one_peak_filled")
    return {start: Peaks(*(tuple(float(row[kind]) for row in own) for kind in kinds)) for start, own in found.items()}


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
    arm = _LATER.sub("", parts["arm"]).rstrip("0123456789")
    return Tested(name=cell["name"], arm=arm, budget=parts["budget"] or "", seed=int(parts["seed"]), **values)


def tell_repeated(every: Sequence[Evidence]) -> list[str]:
    """Cells that have been run more than once and have other figures in other experiments, a line for each."""
    seen: dict[tuple[str, str], dict[tuple[float | None, float | None], list[str]]] = {}
    for it in every:
        for cell in it.tested:
            if cell.is_done:
                figures = seen.setdefault((it.protocol, cell.name), {})
                figures.setdefault((cell.accuracy, cell.own_accuracy), []).append(it.experiment)
    lines = []
    for (_, name), figures in seen.items():
        told = [f"{_tell_figures(*pair)} in {', '.join(users)}" for pair, users in figures.items()]
        lines += [f"- `{name}`: {'; '.join(told)}."] if len(told) > 1 else []
    return lines


def _tell_figures(accuracy: float | None, own: float | None) -> str:
    """In %; what was trained the method's own way in brackets."""
    told = "none" if accuracy is None else f"{100 * accuracy:.2f}"
    return told if own is None else f"{told} ({100 * own:.2f} its own way)"


def _read_recovered(row: Mapping[str, Any]) -> Recovered:
    ends, ungated, shares = (tuple(map(float, row[key])) for key in ("recovered", "trained", "last_macs"))
    if not len(ends) == len(ungated) == len(shares):
        raise ValueError(f"{row['label']}: not as many values as seeds")
    return Recovered(accuracies=ends, ungated=ungated, macs_shares=shares)


# what the paper has, on ImageNet

_PRUNED = {"MobileNetV2": 672, "ResNet-50": 4100}  # millions of MACs before pruning: 1.5x (figure 6) and 1.0x (table 6)
_TABLE_6 = {  # top-1 in % by millions of MACs; with a star: trained slimmably
    "MobileNetV2": {
        "dmcp": {300: 73.5, 211: 72.2, 97: 67.0, 87: 66.1, 59: 62.7, 43: 59.1},
        "dmcp*": {300: 74.6, 211: 73.5},
        "uniform": {300: 72.3, 210: 70.1, 97: 64.8, 59: 60.1},
        "amc": {211: 70.8},
        "metapruning": {217: 71.2, 87: 63.8, 43: 58.3},
        "autoslim*": {300: 74.2, 211: 73.0},
    },
    "ResNet-50": {
        "dmcp": {2800: 76.7, 2200: 76.2, 1100: 74.4, 278: 66.4},
        "uniform": {3000: 75.3, 2300: 74.6, 1100: 71.9, 278: 63.5},
        "metapruning": {3000: 76.2, 2300: 75.4, 1100: 73.4},
    },
}
_SLIMMABLE = {("dmcp", "autoslim"): ("dmcp*", "autoslim*")}  # which table 6 compares in this way only
_ALIKE = 1.08  # times the MACs of one network, that another may have to be compared with it
_NEAR = 1.25  # times a share of the MACs, or less: near to it
PAPER = {  # differences of two arms in points that are not of table 6, and at which share of the MACs
    ("dmcp", "dmcp-direct"): (
        "above best and worst of five: -0.2, +1.6 (MobileNetV2 at 31 %), +0.1, +1.8 (ResNet-50 at 27 %)"
    ),
    ("dmcp-wide", "dmcp"): "+0.1 at 9 %, +0.4 at 31 % of the wider one (MobileNetV2)",
    ("dmcp", "dmcp-cold"): "+0.8 (MobileNetV2 at 31 %)",
    ("dmcp", "dmcp-sandwich"): "+0.7 (MobileNetV2 at 31 %)",
    ("dmcp-frozen", "dmcp-budget-random"): "+9.4 (MobileNetV2 at 9 %)",
    ("dmcp", "dmcp-frozen"): "+1.2 (MobileNetV2 at 9 %)",
    ("dmcp", "dmcp-pretrained"): "+0.6 (MobileNetV2 at 31 %)",
    ("dmcp", "dmcp-bernoulli"): "+2.3 (MobileNetV2 at 31 %; +2.1 by table 6)",
}


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much better one network of table 6 is than another of about its MACs."""

    network: str
    points: float
    share: float  # of the MACs of the network that was pruned, 0 to 1
    other: float  # the same of the worse network

    def __str__(self) -> str:
        apart = f", the other at {100 * self.other:.0f} %" if round(100 * (self.other - self.share)) else ""
        return f"{self.network}: {self.points:+.1f} at {100 * self.share:.0f} %{apart}"


def gains(better: str, worse: str) -> list[Gain]:
    """What table 6 has of two methods, network by network, from many MACs to few."""
    better, worse = _SLIMMABLE.get((better, worse), (better, worse))
    found = []
    for network, rows in _TABLE_6.items():
        others = rows.get(worse, {})
        for macs, top in rows.get(better, {}).items():
            near = min(others, key=lambda other: _apart(other, macs), default=0)
            if near and _apart(near, macs) < _ALIKE:
                share, other = macs / _PRUNED[network], near / _PRUNED[network]
                found.append(Gain(network=network, points=top - others[near], share=share, other=other))
    return found


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


def paper_says(better: str, worse: str, budget: str | None = None) -> str:
    """The paper's own difference of two arms: of table 6 the ones nearest to a share of the MACs, or all."""
    every = gains(better, worse)
    share = float(budget[:-1]) / 100 if budget and re.fullmatch(r"\d+(\.\d+)?%", budget) else 0.0
    if not every or not share:
        return PAPER.get((better, worse), "; ".join(map(str, every)))
    by_network = {it.network: [own for own in every if own.network == it.network] for it in every}
    nearest = [min(own, key=lambda it: _apart(it.share, share)) for own in by_network.values()]
    near = [it for it in nearest if _apart(it.share, share) <= _NEAR]
    if near:
        return "; ".join(map(str, near))
    return f"none near; nearest {min(nearest, key=lambda it: _apart(it.share, share))}"
