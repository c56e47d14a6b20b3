"""What each cell of an experiment has found, read from its folder, and the form in which experiments are shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmcp.comparison.cell_files import CHOICE, TIME, is_done
from dmcp.comparison.cells import own_name
from dmcp.paper.arms import Arm, Study
from dmcp.paper.experiments import EXPERIMENTS
from dmcp.paper.tasks import cells_of
from dmcp.pruning import UNPRUNED
from dmcp.reports.listing import read_run
from dmcp.runs import read_json

if TYPE_CHECKING:  # see figures
    from matplotlib.figure import Figure

PERCENT = "accuracy in %"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one cell that is done has found."""

    seed: int
    name: str  # of the cell
    accuracy: float | None = None  # of the network trained from scratch, 0 to 1
    own_accuracy: float | None = None  # of the one trained the method's own way
    macs: int = 0
    params: int = 0
    widths: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None  # at work in all
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome(Measured):
    """The same, with what the cell is an example of."""

    arm: Arm

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"label": self.arm.label} | {name: value for name, value in vars(self).items() if name != "arm"}


@dataclass(frozen=True)
class Shown:
    """An experiment as it is shown."""

    text: str  # Markdown
    rows: Sequence[Mapping[str, Any]]  # the same as plain data
    figures: Mapping[str, Figure] = field(default_factory=dict)  # by the end of the file's name


Recorded = Mapping[str, Measured]  # cells that are in the data of experiments, by name


def outcomes(it: Study, arms: Sequence[Arm], folder: Path, recorded: Recorded | None = None) -> list[Outcome]:
    """What the cells that are done have found, seed by seed; what is not in the folder may be recorded."""
    found = []
    for arm, seed, name in cells_of(it, arms):
        if is_done(folder / name):
            found.append(_read(arm, seed, name, folder / name))
        elif recorded and name in recorded:
            found.append(Outcome(arm=arm, **vars(recorded[name])))
    return found


def _read(arm: Arm, seed: int, name: str, folder: Path) -> Outcome:
    run = read_run(folder)
    row, own = run.row(arm.method or UNPRUNED), run.row(own_name(arm.method))
    time = read_json(folder / TIME) if (folder / TIME).exists() else {}
    tested = row or own
    return Outcome(
        arm=arm,
        seed=seed,
        name=name,
        accuracy=row.accuracy if row else None,
        own_accuracy=own.accuracy if own else None,
        macs=tested.macs if tested else 0,
        params=tested.params if tested else 0,
        widths=read_json(folder / CHOICE)["widths"]["widths"] if (folder / CHOICE).exists() else {},
        seconds=time.get("seconds"),
        device=time.get("device", ""),
    )


def by_label(it: Study, name: str, found: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The rows of a table, in the order of the arms; those of which something is done."""
    rows: dict[str, list[Outcome]] = {arm.label: [] for arm in EXPERIMENTS[name](it)}
    for outcome in found:
        rows[outcome.arm.label].append(outcome)
    return {label: group for label, group in rows.items() if group}


def plain_row(label: str, values: Sequence[float], **more: Any) -> dict[str, Any]:
    """A row of a table as plain data: values, their mean and their deviation."""
    mean = statistics.fmean(values) if values else None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"label": label, "accuracies": [*values], "mean": mean, "deviation": deviation, **more}
