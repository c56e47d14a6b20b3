"""Many cells, one table: methods, budgets and seeds under one protocol, side by side and each only once."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dmcp import pruning
from dmcp.cells import BASE, COST, find_method, is_done, own_name
from dmcp.children import COMMAND, Command, Ended, kept_signals, run_side_by_side
from dmcp.cutting import load
from dmcp.engine import Engine
from dmcp.errors import DmcpError, FileError
from dmcp.jobs import Job, Opened
from dmcp.listing import PastRun, is_run, read_run
from dmcp.locks import Lock
from dmcp.methods import METHODS, PEERS, Own, Start
from dmcp.plans import Cell, Plan
from dmcp.pruning import UNPRUNED, Row
from dmcp.runs import Run, read_json
from dmcp.searches import SearchConfig
from dmcp.tables import between, spread, table
from dmcp.training import TrainConfig

PLANS = "plans"  # what each cell is to do
OUTPUT = "output"  # what each cell has said
TABLE, PAGE = "compare.json", "compare.md"
_LAST = 3  # failed cells whose last words are shown
UNIFORM = "uniform"  # what methods of one ratio have the widths of


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods, budgets and seeds, and what is the same for all of them."""

    job: Job
    engine: Engine
    train: TrainConfig  # the final recipe, the same for every network
    budgets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of some methods, by name
    groups: int = 10  # each space keeps at least a group
    align: int = 1  # widths are multiples of this
    holdout: float = 0.1  # share of the training images that methods choose by; in the final training they are back
    scratch: bool = True  # whether the chosen networks are trained from scratch
    fine_tune_epochs: int = 0  # of methods that fine-tune; 0: not done
    unpruned: bool = True  # whether the unpruned network is in the table, too

    def __post_init__(self) -> None:
        for name, given in (("budget", self.budgets), ("method", self.methods), ("seed", self.seeds)):
            if not given or len({*given}) < len(given):
                raise DmcpError(f"Give at least one {name}, and each only once, not {list(given)}.")
        for name in (*self.methods, *self.settings):
            check_method(name)
        for name in self.methods:
            find_method(name).config(**self.settings.get(name, {}))


def check_method(name: str) -> None:
    """Refuse a name that no method has."""
    known = [*METHODS, *PEERS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
        raise DmcpError(f"There is no method {name!r}: {hint}")


# the cells


@dataclass(frozen=True)
class Task:
    """One cell: its name is that of its folder."""

    name: str
    plan: Plan
    after: tuple[str, ...] = ()  # cells that must be done before


def cell_name(what: str, seed: int, budget: str = "") -> str:
    """dmcp-50%-seed0"""
    place = budget.replace(":", "=").replace(",", "+").replace("/", "-")
    return "-".join([*filter(None, (what, place)), f"seed{seed}"])


def tasks(it: Comparison) -> list[Task]:
    """All cells, seed by seed, each after those that it needs; those that take longest first."""
    found: dict[str, Task] = {}

    def add(name: str, plan: Plan, after: tuple[str, ...] = ()) -> str:
        found.setdefault(name, Task(name, plan, after))
        return name

    starts = {find_method(name).start for name in it.methods}
    order = sorted(it.methods, key=lambda name: (-_weight(name), it.methods.index(name)))
    for seed in it.seeds:
        if it.unpruned or Start.TRAINED in starts:
            add(cell_name(UNPRUNED, seed), plan_cell(it, seed, Cell(method="")))
        if Start.HELD in starts:
            add(cell_name(BASE, seed), plan_cell(it, seed, Cell(method=BASE, prepares=True)))
        for name in it.methods:
            if find_method(name).start is Start.PREPARED:
                add(cell_name(name, seed), plan_cell(it, seed, Cell(method=name, prepares=True)))
        for name, budget in itertools.product(order, it.budgets):
            if not _has_nothing_to_train(it, name):
                uses = _needed(it, name, seed, budget, add)
                plan = plan_cell(it, seed, Cell(method=name, uses=uses), budget)
                add(cell_name(name, seed, budget), plan, (uses,) if uses else ())
        if it.scratch and any(map(_is_one_ratio, it.methods)):  # trained from scratch they are uniform's networks
            for budget in it.budgets:
                add(cell_name(UNIFORM, seed, budget), plan_cell(it, seed, Cell(method=UNIFORM), budget))
    return list(found.values())


def _has_nothing_to_train(it: Comparison, name: str) -> bool:
    """Whether all that there is of a method is what uniform has."""
    method = find_method(name)
    return it.scratch and method.one_ratio and method.own is Own.FINE_TUNED and not it.fine_tune_epochs


def _weight(name: str) -> int:
    """How long its cells take, roughly: dmcp's first, of those that wait for others those that wait least."""
    method = find_method(name)
    slow = method.own in (Own.SLIMMABLE, Own.AS_IT_IS)
    return 2 if slow else 1 if method.own or method.start is Start.FRESH else 0


def _needed(it: Comparison, name: str, seed: int, budget: str, add: Any) -> str:
    """The name of the cell that a method starts from, added if need be; empty if it needs none."""
    match find_method(name).start:
        case Start.TRAINED:
            return cell_name(UNPRUNED, seed)
        case Start.HELD:
            return cell_name(BASE, seed)
        case Start.PREPARED:
            return cell_name(name, seed)
        case Start.SEARCHED:
            plan = plan_cell(it, seed, Cell(method="dmcp"), budget)
            return str(add(cell_name("dmcp", seed, budget), plan))
    return ""


def plan_cell(it: Comparison, seed: int, cell: Cell, budget: str = "100%") -> Plan:
    """What a cell is to do, under the protocol of the comparison."""
    whole = replace(
        cell,
        settings=dict(it.settings.get(cell.method, {})) | dict(cell.settings),
        holdout=it.holdout,
        scratch=not cell.method or (it.scratch and not _is_one_ratio(cell.method)),
        fine_tune_epochs=it.fine_tune_epochs,
    )
    return Plan(
        command="cell",
        job=replace(it.job, seed=seed),
        engine=it.engine,
        search=SearchConfig(budget=budget, groups=it.groups, align=it.align, seed=seed),
        train=replace(it.train, seed=seed),
        cell=whole,
    )


def _is_one_ratio(name: str) -> bool:
    return (name in METHODS or name in PEERS) and find_method(name).one_ratio


# running them


def run_comparison(it: Comparison, folder: Path, at_once: int | None = None, quiet: bool = False) -> list[Ended]:
    """Run the cells that are not done yet; those that failed, if any. Started again, it goes on where it was."""
    return run_tasks(tasks(it), folder, it.job.place, at_once, quiet)


def run_tasks(
    wanted: Sequence[Task], folder: Path, device: torch.device, at_once: int | None = None, quiet: bool = False
) -> list[Ended]:
    """Run those of these cells that are not done yet; those that failed, if any."""
    _make(folder)
    with kept_signals() as signals, Lock(folder):
        _claim(wanted, folder)
        left = [task for task in wanted if not is_done(folder / task.name)]
        names = {task.name for task in left}
        commands = [
            Command(
                task.name,
                (*COMMAND, "cell", str(folder / PLANS / f"{task.name}.json"), str(folder / task.name)),
                tuple(name for name in task.after if name in names),
            )
            for task in left
        ]
        ended = run_side_by_side(commands, folder / OUTPUT, device, signals, at_once=at_once, quiet=quiet, noun="cells")
    return [end for end in ended if end.code != 0]


def check_failed(failed: Sequence[Ended]) -> None:
    """Stop with the last words of cells that failed, if there are any."""
    if failed:
        listed = "; ".join(end.describe() for end in failed[:_LAST]) + ("; ..." if failed[_LAST:] else "")
        raise DmcpError(f"{len(failed)} cells failed, the same command starts only them again: {listed}")


def _make(folder: Path) -> None:
    try:
        for part in (folder, folder / PLANS, folder / OUTPUT):
            part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: no cells can be kept here: {error.strerror or error}.") from error


def _claim(wanted: Sequence[Task], folder: Path) -> None:
    """Write the plans of the cells; if one was begun by another plan all are refused."""
    plans = {task.name: json.loads(json.dumps(task.plan.to_json())) for task in wanted}
    for name, plan in plans.items():
        path = folder / PLANS / f"{name}.json"
        if is_run(folder / name) and path.is_file() and (stored := read_json(path)) != plan:
            changed = [place for place in plan if stored.get(place) != plan[place]]
            fields = [name for place in changed for name in _changed(place, stored.get(place), plan[place])]
            raise FileError(
                f"{folder / name} was begun with other settings ({', '.join(fields)}): give --out another folder, "
                "or the command that began it."
            )
    for name, plan in plans.items():
        Run(folder / PLANS).write(f"{name}.json", plan)


def _changed(place: str, before: Any, now: Any) -> list[str]:
    """Names of the fields of a part that are not the same."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return [place]
    return sorted(f"{place}.{name}" for name in before.keys() | now.keys() if before.get(name) != now.get(name))


# what came out


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table: a method at a budget, over all seeds."""

    method: str
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


def gather(it: Comparison, folder: Path) -> list[Line]:
    """The table of all cells that are done."""
    lines: list[Line] = []
    by_name = {task.name: task for task in tasks(it)}
    names = ([(UNPRUNED, "")] if it.unpruned else []) + [(name, budget) for budget in it.budgets for name in it.methods]
    for method, budget in names:
        trained = _rows(it, method, method, budget, folder, by_name)
        own = _rows(it, method, own_name(method), budget, folder, by_name)
        if _is_one_ratio(method) and it.scratch:
            trained = _rows(it, UNIFORM, UNIFORM, budget, folder, by_name)
        costs = [_cost(task, folder, by_name) for task, _, _ in own or trained] if method != UNPRUNED else []
        lines += [_line(method, budget, rows is own, rows, costs) for rows in (trained, own) if rows]
    return lines


_Rows = list[tuple[Task, PastRun, Row]]


def _rows(it: Comparison, method: str, name: str, budget: str, folder: Path, known: Mapping[str, Task]) -> _Rows:
    """The networks of this name in the cells of a method that are done."""
    cells = [task for seed in it.seeds if (task := known.get(cell_name(method, seed, budget)))]
    done = [(task, read_run(folder / task.name)) for task in cells if is_done(folder / task.name)]
    return [(task, run, row) for task, run in done if (row := run.row(name))]


def _line(method: str, budget: str, own: bool, rows: _Rows, costs: Sequence[tuple[float, float]]) -> Line:
    accuracies = tuple(row.accuracy for _, _, row in rows)
    full = next(run.unpruned("macs") or 0 for _, run, _ in rows)
    macs = [row.macs for _, _, row in rows]
    params = [row.params for _, _, row in rows]
    known = [seconds for seconds, _ in costs if not math.isnan(seconds)]
    return Line(
        method=method,
        budget=budget,
        own=own,
        accuracies=accuracies,
        mean=statistics.fmean(accuracies),
        deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        macs=(min(macs), max(macs)),
        params=(min(params), max(params)),
        macs_share=(min(macs) / full, max(macs) / full),
        mean_share=statistics.fmean(macs) / full,
        search_seconds=statistics.fmean(known) if known else None if costs else 0.0,
        sample_passes=statistics.fmean(passes for _, passes in costs) if costs else 0.0,
    )


def _cost(task: Task, folder: Path, known: Mapping[str, Task]) -> tuple[float, float]:
    """Seconds and sample-passes until the widths were known, with the cells before it; NaN for what is not known."""
    own = read_json(folder / task.name / COST)
    before = [_cost(known[name], folder, known) for name in task.after]
    seconds = math.nan if own["seconds"] is None else own["seconds"]
    return seconds + sum(it for it, _ in before), own["sample_passes"] + sum(it for _, it in before)


def timed(lines: Sequence[Line], it: Comparison, folder: Path, opened: Opened) -> list[Line]:
    """The table with the time of a batch, of the first seed's networks, alone on the machine and in turn."""
    folders = {}
    for line in lines:
        name = cell_name(line.method, it.seeds[0], line.budget)
        if is_done(folder / name):
            folders[line.method, line.budget] = folder / name
    nets = [load(path, opened.fresh) for path in folders.values()]
    example = next(iter(opened.loaders.test))[0]
    speeds = dict(zip(folders, pruning.milliseconds(nets, example), strict=True))
    return [replace(line, ms=speeds.get((line.method, line.budget))) for line in lines]


def markdown(lines: Sequence[Line], batch: int = 0) -> str:
    """The table: mean ± standard deviation (seeds); search cost until the widths are known; times if there are any."""
    rows = [["method", "budget", "accuracy in %, same recipe", "its own training", "MACs", "params"]]
    timed = any(line.ms is not None for line in lines)
    rows[0] += ["search, s", "sample-passes, M", *([f"ms per {batch}"] if timed else [])]
    for line in lines:
        if line.own and any(_same(line, other) and not other.own for other in lines):
            continue
        own = next((other for other in lines if _same(line, other) and other.own), None)
        cells = [line.method, line.budget or "100%", "" if line.own else spread(line.accuracies)]
        cells += [spread(own.accuracies) if own else ""]
        cells += [between(*(f"{share:.1%}" for share in line.macs_share)), between(*(f"{n:,}" for n in line.params))]
        cells += ["" if line.search_seconds is None else f"{line.search_seconds:,.0f}"]
        cells += [f"{line.sample_passes / 1e6:,.1f}"]
        rows.append(cells + (["" if line.ms is None else f"{line.ms:.2f}"] if timed else []))
    return table(rows)


def to_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [asdict(line) for line in lines]


def _same(one: Line, other: Line) -> bool:
    return (one.method, one.budget) == (other.method, other.budget)
