"""The rows of a comparison's table, from the folders of its cells, and how fast their networks are."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dmcp.comparison.cell_files import COST, is_done
from dmcp.comparison.cells import own_name
from dmcp.comparison.comparing import UNIFORM, Comparison, Task, cell_name, is_one_ratio, tasks
from dmcp.comparison.stored_cells import Stored
from dmcp.errors import DmcpError
from dmcp.measuring import milliseconds
from dmcp.methods import Own, find_method, title
from dmcp.pruning import UNPRUNED, Row
from dmcp.reports.listing import PastRun, read_run
from dmcp.running.jobs import Opened
from dmcp.runs import read_json
from dmcp.saving import load

PASSES = 10  # through a network, the fastest of which is its time
_WAYS = {Own.FINE_TUNED: "fine-tuned", Own.AS_IT_IS: "as trained", Own.SLIMMABLE: "slimmable"}


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a row has of one seed."""

    seed: int
    accuracy: float
    macs: int
    params: int
    search_seconds: float | None  # until its widths were known, with what had to be trained before; None: not known
    sample_passes: float | None  # the same


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table: a method at a budget, over all seeds."""

    method: str  # its title
    budget: str
    own: bool  # whether its networks were trained the method's own way
    accuracies: tuple[float, ...]  # of the seeds, in order, 0 to 1
    mean: float
    deviation: float | None  # standard deviation (ddof = 1); None for one seed
    macs: tuple[int, int]  # the least and the most
    params: tuple[int, int]
    macs_share: tuple[float, float]  # of the unpruned network
    mean_share: float = 0.0  # the same, mean over the seeds
    search_seconds: float | None = 0.0  # mean over the seeds, with what had to be trained before; None: not known
    sample_passes: float = 0.0  # the same
    ms: float | None = None  # fastest pass of a batch through the first seed's network
    seeds: tuple[int, ...] = ()  # of the accuracies
    same_as: str = ""  # the method whose networks these are, if they are not its own
    way: str = ""  # of its own training
    networks: tuple[Network, ...] = ()  # one for each seed


# what came out


def gather(it: Comparison | Stored, folder: Path) -> list[Line]:
    """The table of all cells that are done."""
    lines: list[Line] = []
    known = it.cells if isinstance(it, Stored) else {task.name: task for task in tasks(it)}
    for method, budget in ([(UNPRUNED, "")] if it.unpruned else []) + [*it.rows]:
        trained = _rows(it.seeds, method, title(method), budget, folder, known)
        own = _rows(it.seeds, method, own_name(method), budget, folder, known)
        copied = is_one_ratio(method) and it.scratch
        if copied:
            trained = _rows(it.seeds, UNIFORM, UNIFORM, budget, folder, known)
        searched = (own or trained) if method != UNPRUNED else []
        costs = {task.plan.job.seed: _cost(task.name, folder, known) for task, _, _ in searched}
        if trained:
            line = _line(method, budget, trained, costs)
            lines.append(replace(line, same_as=UNIFORM if copied else ""))
        if own:
            lines.append(replace(_line(method, budget, own, costs), own=True, way=_way(method)))
    return lines


_Rows = list[tuple[Task, PastRun, Row]]


def _rows(seeds: Sequence[int], method: str, name: str, budget: str, folder: Path, known: Mapping[str, Task]) -> _Rows:
    """The networks of this name in the cells of a method that are done."""
    cells = [task for seed in seeds if (task := known.get(cell_name(method, seed, budget)))]
    done = [(task, read_run(folder / task.name)) for task in cells if is_done(folder / task.name)]
    return [(task, run, row) for task, run in done if (row := run.row(name))]


def _way(method: str) -> str:
    """How its own training is called; a table can be made where somebody's own method cannot be imported."""
    with contextlib.suppress(DmcpError):
        own = find_method(method).own
        return _WAYS[own] if own else ""
    return ""


def _line(method: str, budget: str, rows: _Rows, costs: Mapping[int, tuple[float, float]]) -> Line:
    accuracies = tuple(row.accuracy for _, _, row in rows)
    full = next(run.unpruned("macs") or 0 for _, run, _ in rows)
    macs = [row.macs for _, _, row in rows]
    params = [row.params for _, _, row in rows]
    known = [seconds for seconds, _ in costs.values() if not math.isnan(seconds)]
    return Line(
        method=title(method),
        budget=budget,
        own=False,
        accuracies=accuracies,
        mean=statistics.fmean(accuracies),
        deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        macs=(min(macs), max(macs)),
        params=(min(params), max(params)),
        macs_share=(min(macs) / full, max(macs) / full),
        mean_share=statistics.fmean(macs) / full,
        search_seconds=statistics.fmean(known) if known else None if costs else 0.0,
        sample_passes=statistics.fmean(passes for _, passes in costs.values()) if costs else 0.0,
        seeds=tuple(task.plan.job.seed for task, _, _ in rows),
        networks=tuple(_network(task.plan.job.seed, row, costs) for task, _, row in rows),
    )


def _network(seed: int, row: Row, costs: Mapping[int, tuple[float, float]]) -> Network:
    seconds, passes = costs.get(seed, (math.nan, None)) if costs else (0.0, 0.0)
    return Network(
        seed=seed,
        accuracy=row.accuracy,
        macs=row.macs,
        params=row.params,
        search_seconds=None if math.isnan(seconds) else seconds,
        sample_passes=passes,
    )


def _cost(name: str, folder: Path, known: Mapping[str, Task]) -> tuple[float, float]:
    """Seconds and sample-passes until the widths were known, with the cells before it; NaN for what is not known."""
    own = read_json(folder / name / COST)
    before = [_cost(earlier, folder, known) for earlier in (known[name].after if name in known else ())]
    seconds = math.nan if own["seconds"] is None else own["seconds"]
    return seconds + sum(it for it, _ in before), own["sample_passes"] + sum(it for _, it in before)


# how fast


def timed_cells(lines: Sequence[Line], folder: Path) -> dict[str, tuple[str, str]]:
    """Cells of each row's first seed, whose networks are timed, with method and budget."""
    names = {cell_name(line.method, line.seeds[0], line.budget): (line.method, line.budget) for line in lines}
    return {name: row for name, row in names.items() if is_done(folder / name)}


def measure(names: Sequence[str], folder: Path, opened: Opened) -> dict[str, float]:
    """Milliseconds of a batch through the networks of these cells, alone on the machine and in turn."""
    nets = [load(folder / name, opened.fresh) for name in names]
    example = next(iter(opened.loaders.test))[0]
    return dict(zip(names, milliseconds(nets, example, PASSES), strict=True))
