"""Many cells, one table: methods, budgets and seeds under one protocol, side by side and each only once."""

from __future__ import annotations

import difflib
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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
from dmcp.searching import SearchConfig
from dmcp.training import TrainConfig

PLANS = "plans"  # what each cell is to do
OUTPUT = "output"  # what each cell has said
TABLE, PAGE = "compare.json", "compare.md"
_LAST = 3  # lines of failed cells that are shown


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
            add(cell_name(UNPRUNED, seed), _plan(it, seed, Cell(method="")))
        if Start.HELD in starts:
            add(cell_name(BASE, seed), _plan(it, seed, Cell(method=BASE, prepares=True)))
        for name in it.methods:
            if find_method(name).start is Start.PREPARED:
                add(cell_name(name, seed), _plan(it, seed, Cell(method=name, prepares=True)))
        for name, budget in itertools.product(order, it.budgets):
            uses = _needed(it, name, seed, budget, add)
            plan = _plan(it, seed, Cell(method=name, uses=uses), budget)
            add(cell_name(name, seed, budget), plan, (uses,) if uses else ())
    return list(found.values())


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
            plan = _plan(it, seed, Cell(method="dmcp"), budget)
            return str(add(cell_name("dmcp", seed, budget), plan))
    return ""


def _plan(it: Comparison, seed: int, cell: Cell, budget: str = "100%") -> Plan:
    whole = replace(
        cell,
        settings=dict(it.settings.get(cell.method, {})),
        holdout=it.holdout,
        scratch=(it.scratch or not cell.method) and not _like_uniform(it, cell.method),
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


def _like_uniform(it: Comparison, name: str) -> bool:
    """Whether the result of a method, trained from scratch, is that of uniform, which is there already."""
    return "uniform" in it.methods and name in it.methods and find_method(name).one_ratio


# running them


def run_comparison(
    it: Comparison, folder: Path, at_once: int | None = None, quiet: bool = False, only: Sequence[Task] | None = None
) -> list[Ended]:
    """Run the cells that are not done yet; those that failed, if any. Started again, it goes on where it was."""
    wanted = tasks(it) if only is None else list(only)
    _make(folder)
    with kept_signals() as signals, Lock(folder):
        for task in wanted:
            _claim(task, folder)
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
        device = it.job.place
        ended = run_side_by_side(commands, folder / OUTPUT, device, signals, at_once=at_once, quiet=quiet, noun="cells")
    return [end for end in ended if end.code != 0]


def _make(folder: Path) -> None:
    try:
        for part in (folder, folder / PLANS, folder / OUTPUT):
            part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: no cells can be kept here: {error.strerror or error}.") from error


def _claim(task: Task, folder: Path) -> None:
    """Write the plan of a cell; one that was begun by another plan is refused."""
    plan = json.loads(json.dumps(task.plan.to_json()))
    path = folder / PLANS / f"{task.name}.json"
    if is_run(folder / task.name) and path.is_file() and (stored := read_json(path)) != plan:
        changed = sorted(name for name in plan if stored.get(name) != plan[name])
        raise FileError(
            f"{folder / task.name} was begun with other settings ({', '.join(changed)}): give --out another folder, "
            "or the command that began it."
        )
    Run(folder / PLANS).write(path.name, plan)


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
    search_seconds: float = 0.0  # mean over the seeds, with what had to be trained before
    sample_passes: float = 0.0  # the same
    ms: float | None = None  # fastest pass of a batch through the first seed's network


def gather(it: Comparison, folder: Path) -> list[Line]:
    """The table of all cells that are done."""
    lines: list[Line] = []
    by_name = {task.name: task for task in tasks(it)}
    names = ([(UNPRUNED, "")] if it.unpruned else []) + [(name, budget) for budget in it.budgets for name in it.methods]
    for method, budget in names:
        cells = [by_name[cell_name(method, seed, budget)] for seed in it.seeds]
        done = [(task, read_run(folder / task.name)) for task in cells if is_done(folder / task.name)]
        for own in (False, True):
            rows = [(task, run, row) for task, run in done if (row := run.row(own_name(method) if own else method))]
            if rows:
                lines.append(_line(method, budget, own, rows, folder, by_name))
            elif not own and it.scratch and _like_uniform(it, method):
                same = next((line for line in lines if line.method == "uniform" and line.budget == budget), None)
                lines += [replace(same, method=method)] if same else []
    return lines


def _line(
    method: str,
    budget: str,
    own: bool,
    rows: Sequence[tuple[Task, PastRun, Row]],
    folder: Path,
    tasks_: Mapping[str, Task],
) -> Line:
    accuracies = tuple(row.accuracy for _, _, row in rows)
    full = next(run.unpruned("macs") or 0 for _, run, _ in rows)
    macs = [row.macs for _, _, row in rows]
    params = [row.params for _, _, row in rows]
    costs = [_cost(task, folder, tasks_) for task, _, _ in rows] if method != UNPRUNED else [(0.0, 0.0)]
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
        search_seconds=statistics.fmean(seconds for seconds, _ in costs),
        sample_passes=statistics.fmean(passes for _, passes in costs),
    )


def _cost(task: Task, folder: Path, known: Mapping[str, Task]) -> tuple[float, float]:
    """Seconds and sample-passes until the widths were known, with the cells before it."""
    own = read_json(folder / task.name / COST)
    before = [_cost(known[name], folder, known) for name in task.after]
    return (
        own["seconds"] + sum(seconds for seconds, _ in before),
        own["sample_passes"] + sum(passes for _, passes in before),
    )


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
    """The table: mean ± standard deviation (seeds); search cost until the widths are known."""
    rows = [["method", "budget", "accuracy in %, same recipe", "its own training", "MACs", "params"]]
    rows[0] += ["search, s", "sample-passes, M", f"ms per {batch}"]
    for line in lines:
        if line.own and any(_same(line, other) and not other.own for other in lines):
            continue
        own = next((other for other in lines if _same(line, other) and other.own), None)
        cells = [line.method, line.budget or "100%", _accuracy(None if line.own else line), _accuracy(own)]
        cells += [_range(*(f"{share:.1%}" for share in line.macs_share)), _range(*(f"{n:,}" for n in line.params))]
        cells += [f"{line.search_seconds:,.0f}", f"{line.sample_passes / 1e6:,.1f}"]
        rows.append([*cells, "" if line.ms is None else f"{line.ms:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    return "\n".join([text[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *text[1:], ""])


def to_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [asdict(line) for line in lines]


def _same(one: Line, other: Line) -> bool:
    return (one.method, one.budget) == (other.method, other.budget)


def _accuracy(line: Line | None) -> str:
    if line is None:
        return ""
    spread = "" if line.deviation is None else f" ± {100 * line.deviation:.2f}"
    return f"{100 * line.mean:.2f}{spread} ({len(line.accuracies)})"


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least}–{most}"
