"""The cells of a folder that are done: which belong into one table, and what all of them have in common."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmcp.comparison.cell_files import COST, TIME, code_that_made, is_done
from dmcp.comparison.cell_runs import PLANS, changes, kind_of, other_fact, row_of
from dmcp.comparison.comparing import Comparison, Task, cell_name, plan_cell
from dmcp.errors import FileError
from dmcp.methods import METHODS, PEERS, title
from dmcp.pruning import UNPRUNED
from dmcp.running.plans import Cell, Plan, plan_from_json
from dmcp.runs import SETTINGS, read_json
from dmcp.searching.bounds import BOUNDS

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


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
    """Cells that are done, each by the name that its plan gives it."""
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


def _epochs(number: int) -> str:
    return f"{number} epoch{'' if number == 1 else 's'}"
