"""The table of a comparison, made from the folders of its cells: who is how good, against uniform, and at what cost."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dmcp.comparison.cell_files import COST, TIME, code_that_made, is_done
from dmcp.comparison.cell_runs import PLANS, changes, kind_of, other_fact, row_of
from dmcp.comparison.cells import own_name
from dmcp.comparison.comparing import UNIFORM, Comparison, Task, cell_name, is_one_ratio, plan_cell, tasks
from dmcp.errors import DmcpError, FileError
from dmcp.measuring import milliseconds
from dmcp.methods import METHODS, PEERS, Own, find_method, title
from dmcp.pruning import UNPRUNED, Row
from dmcp.reports.listing import PastRun, read_run
from dmcp.running.jobs import Opened
from dmcp.running.plans import Cell, Plan, plan_from_json
from dmcp.runs import SETTINGS, read_json
from dmcp.saving import load
from dmcp.searching.bounds import BOUNDS
from dmcp.tables import between, points, spread, table

TABLE, PAGE, FIGURE = "compare.json", "compare.md", "compare.svg"
NETWORKS, LATEX = "compare.csv", "compare.tex"
PASSES = 10  # through a network, the fastest of which is its time
_WAYS = {Own.FINE_TUNED: "fine-tuned", Own.AS_IT_IS: "as trained", Own.SLIMMABLE: "slimmable"}
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


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


# which cells


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The cells of a folder that are done, under one protocol."""

    cells: Mapping[str, Task]  # by name
    rows: Sequence[tuple[str, str]]  # method and budget, in the order of the table
    seeds: tuple[int, ...]
    scratch: bool  # whether networks were trained from scratch

    @property
    def unpruned(self) -> bool:
        """Whether the unpruned network is among them."""
        return any(task.plan.cell is not None and not task.plan.cell.method for task in self.cells.values())

    @property
    def plan(self) -> Plan:
        """One of them, which has the protocol of all."""
        return next(iter(self.cells.values())).plan


def stored(folder: Path, it: Comparison | None = None) -> Stored | None:
    """All cells in a folder that are done; under the protocol of the comparison, or the only one that there is."""
    found = _done(folder)
    kinds = {name: _protocol(task.plan) for name, task in found.items()}
    if it is not None:
        wanted = _protocol(plan_cell(it, it.seeds[0], Cell(method="")))
        found = {name: task for name, task in found.items() if kinds[name] == wanted}
    elif any(kind != next(iter(kinds.values())) for kind in kinds.values()):
        raise FileError(f"{folder} has cells of several protocols ({_differing(kinds)}): move some of them elsewhere.")
    if not found:
        return None
    _check_alike(found, folder)
    rows = {(task.plan.cell.method, budget) for task in found.values() if task.plan.cell and (budget := _budget(task))}
    rows |= {*it.rows} if it is not None else set()
    scratch = any(task.plan.cell.scratch for task in found.values() if task.plan.cell and _budget(task))
    return Stored(
        cells=found,
        rows=sorted(rows, key=lambda row: (_place(row[1]), *_rank(row[0]))),
        seeds=tuple(sorted({task.plan.job.seed for task in found.values()})),
        scratch=scratch,
    )


def _done(folder: Path) -> dict[str, Task]:
    """Cells that are done and are those of a comparison: `dmcp paper` has others, too, by other names."""
    found: dict[str, Task] = {}
    for path in sorted((folder / PLANS).glob("*.json")):
        name = path.name.removesuffix(".json")
        with contextlib.suppress(FileError):  # of another version: no cell of this protocol
            plan = plan_from_json(read_json(path), path)
            whole = plan.cell is not None and plan.train is not None and plan.search is not None
            if plan.cell is not None and whole and is_done(folder / name) and _is_told(folder / name):
                task = Task(name, plan, (plan.cell.uses,) if plan.cell.uses else ())
                if name == cell_name(plan.cell.method or UNPRUNED, plan.job.seed, _budget(task)):
                    found[name] = task
    return found


def _is_told(place: Path) -> bool:
    """Whether a folder says what its network was pruned from, and what that cost; a part of one does not."""
    with contextlib.suppress(FileError):
        unpruned, cost = read_json(place / SETTINGS).get("unpruned"), read_json(place / COST)
        return isinstance(unpruned, dict) and bool(unpruned.get("macs")) and {"seconds", "sample_passes"} <= cost.keys()
    return False


def _check_alike(found: Mapping[str, Task], folder: Path) -> None:
    """Refuse to average what is not the same method with the same settings, and a table of several networks or data."""
    first: dict[str, Task] = {}
    one = next(iter(found))
    for name, task in found.items():
        if what := other_fact(*(read_json(folder / it / SETTINGS) for it in (one, name))):
            raise FileError(f"{folder}: {one} and {name} do not have the same {what}: move one elsewhere.")
        other = first.setdefault(row_of(name, task.plan.job.seed), task)
        if kind_of(task.plan.to_json()) != kind_of(other.plan.to_json()):
            raise FileError(
                f"{folder}: {other.name} and {name} are not the same method with the same settings: move one elsewhere."
            )
        if len({*filter(None, (code_that_made(folder / it) for it in (other.name, name)))}) > 1:
            raise FileError(
                f"{folder}: {other.name} and {name} were made by different code of one method: remove one of them, and "
                "the command that made it makes it again."
            )


def _budget(task: Task) -> str:
    """Nothing for the cells of no budget."""
    plan = task.plan
    is_row = plan.cell is not None and plan.cell.method and not plan.cell.prepares and plan.search is not None
    return str(plan.search.budget) if is_row and plan.search else ""


def _protocol(plan: Plan) -> dict[str, Any]:
    """What is the same in all cells of a table."""
    plain: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    for part in ("job", "train", "search"):
        plain[part].pop("seed")
    plain["search"].pop("budget")
    return plain | {"cell": {name: plain["cell"][name] for name in ("holdout", "fine_tune_epochs")}}


def _differing(kinds: Mapping[str, dict[str, Any]]) -> str:
    first, *rest = kinds.values()
    pairs = [(place, first[place], kind[place]) for kind in rest for place in kind if kind[place] != first[place]]
    return ", ".join(sorted({name for pair in pairs for name in changes(*pair)}))


def _place(budget: str) -> tuple[float, str]:
    """Shares of the MACs from the largest on, then all others."""
    match = _PERCENT.fullmatch(budget)
    return (-float(match[1]), "") if match else (1.0, budget)


def _rank(method: str) -> tuple[int, str]:
    """Ours as they are listed, then those of others."""
    known = [*METHODS, *PEERS]
    return (known.index(method), "") if method in known else (len(known), title(method))


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


# for people


def markdown(lines: Sequence[Line], batch: int = 0) -> str:
    """The table for people who read text."""
    return table(cells_of(lines, batch))


def cells_of(lines: Sequence[Line], batch: int = 0) -> list[list[str]]:
    """The table: mean ± standard deviation (seeds); search cost until the widths are known; times if there are any."""
    rows = [["method", "budget", "accuracy in %, same recipe", "its own training", "MACs", "params"]]
    timed = any(line.ms is not None for line in lines)
    rows[0] += ["search, s", "sample-passes, M", *([f"ms per {batch}, fastest of {PASSES}"] if timed else [])]
    for line in lines:
        if line.own and _other(line, lines, own=False):
            continue
        own = _other(line, lines, own=True)
        cells = [line.method, line.budget or "100%", "" if line.own else _same_recipe(line, lines)]
        cells += [", ".join(filter(None, (spread(own.accuracies), own.way))) if own else ""]
        cells += [between(*(f"{share:.1%}" for share in line.macs_share)), between(*(f"{n:,}" for n in line.params))]
        cells += ["" if line.search_seconds is None else f"{line.search_seconds:,.0f}", _millions(line.sample_passes)]
        rows.append(cells + (["" if line.ms is None else f"{line.ms:.2f}"] if timed else []))
    return rows


def against_uniform(lines: Sequence[Line]) -> str:
    """The table of differences for people who read text; nothing where there are none."""
    rows = differences_of(lines)
    return table(rows) if rows else ""


def differences_of(lines: Sequence[Line]) -> list[list[str]]:
    """By how many points methods are better than uniform with the same seed; nothing where there is no uniform."""
    rows = [["method", "budget", "points above uniform, same recipe", "its own training"]]
    for line in lines:
        base = next((it for it in lines if (it.method, it.budget, it.own) == (UNIFORM, line.budget, False)), None)
        if base is None or line is base or (line.own and _other(line, lines, own=False)):
            continue
        own = _other(line, lines, own=True)
        same = f"= {line.same_as}" if line.same_as else "" if line.own else points(differences(line, base))
        rows.append([line.method, line.budget, same, points(differences(own, base)) if own else ""])
    return rows if len(rows) > 1 else []


def differences(line: Line, base: Line) -> list[float]:
    """How much better each network is than the other line's of the same seed."""
    known = dict(zip(base.seeds, base.accuracies, strict=True))
    return [value - known[seed] for seed, value in zip(line.seeds, line.accuracies, strict=True) if seed in known]


def describe(it: Stored) -> str:
    """Network, data, recipe and seeds in a line."""
    plan, train, cell = it.plan, it.plan.train, it.plan.cell
    assert train is not None and cell is not None
    name = " ".join([plan.job.model, *plan.job.model_args])
    rate = f" at a batch of {train.reference_batch}" if train.reference_batch else ""
    return (
        f"{name} on {Path(plan.job.data).name}: {_epochs(train.epochs)}, batch {plan.job.batch}, learning rate "
        f"{train.lr:g}{rate}, weight decay {train.weight_decay:g}; {cell.holdout:.0%} of the training images held out; "
        f"fine-tuning {_epochs(cell.fine_tune_epochs)}; {_bounds(plan)}seeds {', '.join(map(str, it.seeds))}."
    )


def _bounds(plan: Plan) -> str:
    """The least and the most channels that were asked for, in words; empty if none were."""
    parts = []
    for word, name in zip(("at least", "at most"), BOUNDS, strict=True):
        bound = getattr(plan.search, name)
        numbers = bound if isinstance(bound, Mapping) else {"": bound}
        parts += [f"{word} {number} channels{f' in {place}' if place else ''}" for place, number in numbers.items()]
    return f"{', '.join(parts)}; " if parts else ""


def settings_of(it: Stored, folder: Path) -> dict[str, Any]:
    """All that makes the table again, as plain data: the protocol, what methods were set to, where cells ran."""
    kind = _protocol(it.plan)
    own = {title(task.plan.cell.method): dict(task.plan.cell.settings) for task in it.cells.values() if task.plan.cell}
    times = [read_json(folder / name / TIME) for name in it.cells if (folder / name / TIME).exists()]
    return {
        "job": kind["job"],
        "engine": kind["engine"],
        "train": kind["train"],
        "groups": kind["search"]["groups"],
        "align": kind["search"]["align"],
        **{name: bound for name in BOUNDS if (bound := kind["search"].get(name))},
        **kind["cell"],
        "set": {name: values for name, values in sorted(own.items()) if values},
        "budgets": [*dict.fromkeys(budget for _, budget in it.rows)],
        "seeds": [*it.seeds],
        "devices": sorted({str(time["device"]) for time in times}),
    }


def networks_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The table network by network, for other programs; the time of a pass is that of the line's first seed."""
    return [
        {
            "method": line.method,
            "budget": line.budget,
            "training": line.way if line.own else "same recipe",
            "seed": it.seed,
            "accuracy": it.accuracy,
            "same_as": line.same_as,
            "macs": it.macs,
            "params": it.params,
            "search_seconds": it.search_seconds,
            "sample_passes": it.sample_passes,
            "ms": line.ms if it.seed == line.seeds[0] else None,
        }
        for line in lines
        for it in line.networks
    ]


def to_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [asdict(line) for line in lines]


def _other(line: Line, lines: Sequence[Line], own: bool) -> Line | None:
    """The line of the same method and budget that was trained this way."""
    return next((it for it in lines if (it.method, it.budget, it.own) == (line.method, line.budget, own)), None)


def _same_recipe(line: Line, lines: Sequence[Line]) -> str:
    """Figures that stand in another line are not shown twice."""
    there = any((it.method, it.budget, it.own) == (line.same_as, line.budget, False) for it in lines)
    return f"= {line.same_as}" if there else spread(line.accuracies)


def _epochs(number: int) -> str:
    return f"{number} epoch{'' if number == 1 else 's'}"


def _millions(count: float) -> str:
    """Samples in millions; few of them with three digits."""
    return f"{count / 1e6:,.1f}" if count >= 1e6 else f"{count / 1e6:.3g}"
