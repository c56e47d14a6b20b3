"""Runs that are read back: one, several, or all in a folder. Files may be damaged, or written by somebody else.

Imports no torch, so that a list of runs is quick; `read_run` does, for the search.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmcp.errors import FileError, WidthsError
from dmcp.runs.files import (
    EXPORTED,
    FAILED,
    LOG,
    OUTCOME,
    REPORT,
    SEARCH_FILE,
    SETTINGS,
    STARTS,
    TIMES,
    WIDTHS,
    WITHIN,
    is_done,
    is_group,
    is_run,
    read_alphas,
    read_json,
    read_records,
)
from dmcp.runs.records import ACCURACY, LatencyOutcome, Row, SearchRecord, StepRecord, WithinOutcome, pruned
from dmcp.runtime.io import from_plain, is_locked, make_printable
from dmcp.tracing.widths import Widths

if TYPE_CHECKING:
    from dmcp.tracing.graph import ChannelGraph

_LIST_TAIL = 100  # lines of a log that a list of runs needs: its last step, and the tested networks
_MAX_NUMBER = 1e18  # beyond what any network costs, and what a chart can show


@dataclass(frozen=True)
class ExportTimes:
    """Milliseconds of one sample in an exported file."""

    unpruned_ms: float
    pruned_ms: float
    runtime: str


@dataclass(frozen=True, kw_only=True, eq=False)
class PastRun:
    """Everything that a run folder says about itself; empty where it says nothing."""

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    started: datetime
    search: tuple[SearchRecord, ...] = ()
    training: Mapping[str, tuple[StepRecord, ...]] = field(default_factory=dict)  # by network
    rows: tuple[Row, ...] = ()  # networks that were tested
    targets: Mapping[str, int] = field(default_factory=dict)  # of the budget, by kind
    searched: str = ""  # the budget that was searched, if it is another one
    searched_kinds: tuple[str, ...] = ()  # of its limits
    expected: Mapping[str, float] = field(default_factory=dict)  # width of each space at the end of the search
    widths: Mapping[str, int] = field(default_factory=dict)
    latency: LatencyOutcome | None = None
    within: WithinOutcome | None = None
    exported: ExportTimes | None = None
    failure: str = ""  # why it ended without a result
    running: bool = False
    problems: tuple[str, ...] = ()  # what could not be read

    @property
    def name(self) -> str:
        """The name of the folder; for one of several budgets, seeds or methods, behind that of their folder."""
        folder = self.folder.resolve()
        if is_run(folder.parent) or is_group(folder.parent):
            return make_printable(f"{folder.parent.name}/{folder.name}")
        return make_printable(folder.name)

    @property
    def done(self) -> bool:
        """Whether everything that the command makes is there."""
        return is_done(self.folder)

    @property
    def state(self) -> str:
        """One of: damaged, failed, done, running, stopped."""
        if self.problems:
            return "damaged"
        if self.failure:
            return "failed"
        if self.done:
            return "done"
        if self.running:
            return "running"
        return "stopped"

    @property
    def before(self) -> dict[str, int]:
        """Channels of each space of the unpruned network."""
        sizes = value_at(self.settings, "unpruned", "widths")
        if not isinstance(sizes, Mapping):
            return {}
        return {name: size for name, size in sizes.items() if type(size) is int and size > 0}

    @property
    def result(self) -> Row | None:
        """The tested network that the run was for."""
        return next(iter(pruned(self.rows)), None)

    @property
    def progress(self) -> str:
        """The last step that was logged."""
        if self.training:
            stage, steps = list(self.training.items())[-1]
            return f"{stage}, step {steps[-1].step + 1:,} of {steps[-1].steps:,}"
        if not self.search:
            return "before the first logged step"
        last = self.search[-1]
        epochs = self.setting("search", "epochs")
        return f"search, step {last.step + 1:,}, in epoch {last.epoch + 1} of {epochs}"

    def unpruned(self, kind: str) -> int | None:
        """Cost of the unpruned network, if the run says so."""
        cost = value_at(self.settings, "unpruned", kind)
        if type(cost) is int and cost > 0:
            return cost
        return None

    def share(self, kind: str) -> float | None:
        """Cost of the result over that of the unpruned network."""
        full = self.unpruned(kind)
        if self.result is None or full is None:
            return None
        cost: int = getattr(self.result, kind)
        return cost / full

    def setting(self, *keys: str) -> str:
        """The setting at a path of keys as text; empty if there is none."""
        value = value_at(self.settings, *keys)
        if isinstance(value, str | int | float):
            return make_printable(str(value))
        return ""

    @property
    def budget(self) -> str:
        """The budget as it was typed, or chosen by `--within`; several with commas."""
        if self.within:
            return self.within.budget
        budgets = self.settings.get("budgets")
        if isinstance(budgets, list) and budgets:
            return ", ".join(make_printable(str(budget)) for budget in budgets)
        return self.setting("search", "budget")

    def describe(self) -> dict[str, Any]:
        """The run as plain data; shares from 0 to 1, None for a metric that is no number."""
        accuracy = macs = None
        if self.result is not None:
            macs = self.result.macs
            if math.isfinite(self.result.accuracy):
                accuracy = self.result.accuracy
        return {
            "name": self.name,
            "folder": make_printable(str(self.folder)),
            "command": self.setting("command"),
            "model": self.setting("model"),
            "data": self.setting("data"),
            "budget": self.budget,
            "state": self.state,
            "progress": self.failure if self.done else self.progress,
            "accuracy": accuracy,
            "macs": macs,
            "macs_share": self.share("macs"),
            "started": f"{self.started:%Y-%m-%d %H:%M}",
        }


# one run


def read_run(folder: Path) -> PastRun:
    """Read a run as far as possible; a folder without a run is refused.

    Reading stops at the first file that is damaged, and says which one it is.
    """
    run = read_overview(folder)
    if run.problems or not (folder / SEARCH_FILE).is_file():
        return run
    from dmcp.runs.saved_search import read_summary  # imports torch

    try:
        summary = read_summary(folder)
    except Exception as error:  # a file may hold anything
        return replace(run, problems=(_describe_problem(folder, SEARCH_FILE, error),))
    return replace(
        run,
        targets=summary.targets,
        expected=summary.expected,
        searched=make_printable(summary.searched),
        searched_kinds=summary.kinds,
    )


def read_overview(folder: Path, tail: int = 0) -> PastRun:
    """Read a run without the tensors of its search, and without torch; of its log all lines, or the last `tail`."""
    if not is_run(folder):
        raise FileError(f"{folder}: not a run: give a folder that dmcp prune, search or train has made.")
    dated = folder / SETTINGS
    if not dated.is_file():
        dated = folder
    facts: dict[str, Any] = {
        "folder": folder,
        "running": is_locked(folder),
        "started": datetime.fromtimestamp(dated.stat().st_mtime).astimezone(),
    }

    file = SETTINGS
    try:
        facts["settings"] = read_json(folder / SETTINGS)
        starts = list(facts["settings"].get(STARTS, ()))
        if starts:
            facts["started"] = datetime.fromisoformat(starts[0]).astimezone()

        file = LOG
        facts |= _read_log(folder, tail)

        file = WIDTHS
        if (folder / WIDTHS).is_file():
            facts["widths"] = dict(Widths.from_json(read_json(folder / WIDTHS)))

        file = OUTCOME
        if (folder / OUTCOME).is_file():
            facts["latency"] = from_plain(LatencyOutcome, read_json(folder / OUTCOME))

        file = WITHIN
        if (folder / WITHIN).is_file():
            facts["within"] = from_plain(WithinOutcome, read_json(folder / WITHIN))

        file = FAILED
        if (folder / FAILED).is_file():
            facts["failure"] = make_printable(str(read_json(folder / FAILED)["reason"]))

        file = EXPORTED
        if (folder / EXPORTED).is_file():
            facts["exported"] = _read_export_times(folder / EXPORTED)

        file = SEARCH_FILE
        if (folder / SEARCH_FILE).is_file():
            read_alphas(folder, read_json(folder / SEARCH_FILE)["sha256"])
    except Exception as error:  # a file may hold anything
        facts["problems"] = (_describe_problem(folder, file, error),)
    return PastRun(**facts)


def _read_log(folder: Path, tail: int) -> dict[str, Any]:
    """Records by kind; of a step that was done again after a stop, the later one counts."""
    times = {str(record.get("name")): record for record in read_records(folder / TIMES)}
    search: dict[int, SearchRecord] = {}
    training: dict[str, dict[int, StepRecord]] = {}
    rows: dict[str, Row] = {}
    for data in read_records(folder / LOG, tail):
        stage = make_printable(str(data.get("stage")))
        if stage == "test":
            row = _read_record(Row, data | times.get(str(data.get("name")), {}))
            if row is not None:
                rows[row.name] = replace(row, name=make_printable(row.name))
                continue
        if stage == "search":
            record = _read_record(SearchRecord, data)
            if record is not None:
                search[record.step] = record
        else:
            record = _read_record(StepRecord, data)
            if record is not None:
                training.setdefault(stage, {})[record.step] = record
    return {
        "search": tuple(search[step] for step in sorted(search)),
        "training": {stage: tuple(steps[step] for step in sorted(steps)) for stage, steps in training.items()},
        "rows": tuple(rows.values()),
    }


def _read_record(kind: Any, data: dict[str, Any]) -> Any:
    """A record with finite numbers; None for a line of another kind.

    A metric of the user's own may be anything, and so may be the loss of a training that diverged.
    """
    names = [column.name for column in fields(kind)]
    try:
        record = from_plain(kind, {name: data[name] for name in names if name in data})
    except (TypeError, ValueError):
        return None
    for name, value in vars(record).items():
        if name == "train_loss" or (name == "accuracy" and record.score != ACCURACY):
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if isinstance(number, int | float) and not abs(number) < _MAX_NUMBER:
                return None
    return record


def _read_export_times(path: Path) -> ExportTimes:
    """The times of the file that was exported last."""
    newest = list(read_json(path).values())[-1]
    times = newest["ms"]
    return ExportTimes(float(times["unpruned"]), float(times["float32"]), str(newest["runtime"]))


def _describe_problem(folder: Path, file: str, error: Exception) -> str:
    """A sentence with the name of the file, but not its folder: the page may be shown to others."""
    reason = str(error).replace(f"{folder}{os.sep}", "").rstrip(".") or type(error).__name__
    if isinstance(error, FileError):  # says itself which file it means, perhaps one that belongs to this one
        return make_printable(f"{reason}.")
    return make_printable(f"{file}: {reason}.")


# several runs


def read_runs(folders: Sequence[Path]) -> list[PastRun]:
    """Read runs, each once; a folder of runs stands for the runs in it."""
    runs: dict[Path, Path] = {}  # by the folder without links
    for folder in folders:
        found: list[Path] = []
        if is_run(folder):
            found = budgets_of(folder)
        elif folder.is_dir():
            found = _runs_in(folder)
        for run in found or [folder]:
            runs.setdefault(run.resolve(), run)
    return [read_run(path) for path in runs.values()]


def _runs_in(folder: Path) -> list[Path]:
    """The runs in a folder of runs, sorted: of several budgets, seeds or compared methods each is one."""
    runs: list[Path] = []
    for path in sorted(folder.iterdir()):
        if is_run(path):
            runs += budgets_of(path) or [path]
        elif is_group(path):
            runs += _runs_in(path)
    return runs


def budgets_of(run: Path) -> list[Path]:
    """The folders of a finished run for several budgets, one for each."""
    if not (run / REPORT).is_file():
        return []
    return sorted(path for path in run.iterdir() if is_run(path))


def list_runs(root: Path) -> list[PastRun]:
    """The runs in a folder, oldest first, with the ends of their logs."""
    runs = [read_overview(folder, _LIST_TAIL) for folder in _runs_in(root)]
    return sorted(runs, key=lambda run: (run.started, run.name))


# pieces


def read_widths(path: Path, graph: ChannelGraph) -> Widths:
    """The widths of a file, which must be those of this network."""
    try:
        return graph.widths(Widths.from_json(read_json(path)))
    except WidthsError as error:
        raise WidthsError(f"{path}: {error}") from None


def value_at(data: Any, *keys: str) -> Any:
    """The value at a path of keys, or None."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data
