"""Many cells, one table: methods, budgets and seeds under one protocol, side by side and each only once."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dmcp.cell_files import is_done
from dmcp.cells import BASE, COPY, RECOVER
from dmcp.children import COMMAND, Command, Ended, kept_signals, run_side_by_side
from dmcp.engine import Engine
from dmcp.errors import DmcpError, FileError
from dmcp.jobs import Job
from dmcp.listing import is_run
from dmcp.locks import Lock
from dmcp.methods import METHODS, PEERS, Own, Start, find_method, title
from dmcp.plans import Cell, Plan, code_digest
from dmcp.pruning import UNPRUNED
from dmcp.runs import Run, read_json
from dmcp.searches import SearchConfig
from dmcp.training import TrainConfig

PLANS = "plans"  # what each cell is to do
OUTPUT = "output"  # what each cell has said
COMMANDS = "commands.jsonl"  # what was typed to fill the folder, with what and on what
_PACKAGES = ("torch-dmcp", "torch", "torchvision", "timm", "torch-pruning")
_LAST = 3  # failed cells whose last words are shown
_PASSES = 4  # of a step of a slimmable network
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
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # budgets of some methods; others have all

    def __post_init__(self) -> None:
        for name, given in (("budget", self.budgets), ("method", self.methods), ("seed", self.seeds)):
            if not given or len({*given}) < len(given):
                raise DmcpError(f"Give at least one {name}, and each only once, not {list(given)}.")
        for name in (*self.methods, *self.settings):
            check_method(name)
        for name in self.methods:
            try:
                find_method(name).config(**self.settings.get(name, {}))
            except TypeError as error:
                raise DmcpError(f"{name}: its settings cannot be made: {error}.") from None
        _check_titles(self.methods)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Method and budget of each row but that of the unpruned network."""
        every = itertools.product(self.budgets, self.methods)
        return [(name, budget) for budget, name in every if budget in self.only.get(name, (budget,))]


def check_method(name: str) -> None:
    """Refuse a name that no method has."""
    find_method(name)


def _check_titles(methods: Sequence[str]) -> None:
    """Refuse methods whose cells would have the same folders."""
    known = {*METHODS, *PEERS, UNPRUNED, BASE, COPY, RECOVER}
    names = Counter(map(title, methods))
    for name in methods:
        if names[title(name)] > 1 or (name not in known and title(name) in known):
            raise DmcpError(f"There is another {title(name)}, and rows and folders go by name: give yours another one.")


# the cells


@dataclass(frozen=True)
class Task:
    """One cell: its name is that of its folder."""

    name: str
    plan: Plan
    after: tuple[str, ...] = ()  # cells that must be done before


def cell_name(what: str, seed: int, budget: str = "") -> str:
    """dmcp-50%-seed0; a method by its title."""
    place = budget.replace(":", "=").replace(",", "+").replace("/", "-")
    return "-".join([*filter(None, (title(what), place)), f"seed{seed}"])


def tasks(it: Comparison) -> list[Task]:
    """All cells, seed by seed, each after those that it needs."""
    found: dict[str, Task] = {}

    def add(name: str, plan: Plan, after: tuple[str, ...] = ()) -> str:
        found.setdefault(name, Task(name, plan, after))
        return name

    starts = {find_method(name).start for name in it.methods}
    for seed in it.seeds:
        if it.unpruned or Start.TRAINED in starts:
            add(cell_name(UNPRUNED, seed), plan_cell(it, seed, Cell(method="")))
        if Start.HELD in starts:
            add(cell_name(BASE, seed), plan_cell(it, seed, Cell(method=BASE, prepares=True)))
        for name in it.methods:
            if find_method(name).start is Start.PREPARED:
                add(cell_name(name, seed), plan_cell(it, seed, Cell(method=name, prepares=True)))
        for name, budget in itertools.product(it.methods, it.budgets):
            if (name, budget) in it.rows and not _has_nothing_to_train(it, name):
                uses = _needed(it, name, seed, budget, add)
                plan = plan_cell(it, seed, Cell(method=name, uses=uses), budget)
                add(cell_name(name, seed, budget), plan, (uses,) if uses else ())
        if it.scratch and any(map(is_one_ratio, it.methods)):  # trained from scratch they are uniform's networks
            for budget in it.budgets:
                add(cell_name(UNIFORM, seed, budget), plan_cell(it, seed, Cell(method=UNIFORM), budget))
    return list(found.values())


def _has_nothing_to_train(it: Comparison, name: str) -> bool:
    """Whether all that there is of a method is what uniform has."""
    method = find_method(name)
    return it.scratch and method.one_ratio and method.own is Own.FINE_TUNED and not it.fine_tune_epochs


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
    usual, own = (dict(settings) for settings in (it.settings.get(cell.method, {}), cell.settings))
    more = {"more": usual["more"] | own["more"]} if "more" in usual and "more" in own else {}
    whole = replace(
        cell,
        settings=usual | own | more,
        holdout=it.holdout,
        scratch=not cell.method or (it.scratch and not is_one_ratio(cell.method)),
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


def is_one_ratio(name: str) -> bool:
    """Whether a method's widths are those of uniform."""
    return name in METHODS and METHODS[name].one_ratio


def epochs_of(plan: Plan) -> tuple[str, str]:
    """Epochs of a cell: until the widths are known, and of what is trained then, with the method's own way."""
    cell, recipe = plan.cell, plan.train
    assert cell is not None and recipe is not None
    if cell.method in ("", BASE):
        return "", str(recipe.epochs)
    method = find_method(cell.method)
    config = method.config(**cell.settings)
    if cell.prepares:
        return str(getattr(config, "epochs", None) or recipe.epochs), ""
    searched = recipe.epochs if method.own is Own.AS_IT_IS else getattr(config, "epochs", "")
    final = [str(recipe.epochs)] if cell.scratch else []
    if method.own is Own.FINE_TUNED and cell.fine_tune_epochs:
        final.append(f"{cell.fine_tune_epochs} fine-tuned")
    elif method.own is Own.SLIMMABLE:
        final.append(f"{recipe.epochs} slimmable")
    return "" if method.prepare else str(searched), " + ".join(final)


# running them


def longest_first(wanted: Sequence[Task]) -> list[Task]:
    """Cells in the order in which they should start: those first that take longest, with all that waits for them.

    What others wait for comes before them, if it did so before.
    """
    left: dict[str, float] = {}
    for task in reversed(wanted):  # those that wait come after what they wait for
        left[task.name] = left.get(task.name, 0.0) + _work(task.plan)
        for name in task.after:
            left[name] = max(left.get(name, 0.0), left[task.name])
    return sorted(wanted, key=lambda task: -left[task.name])


def _work(plan: Plan) -> float:
    """How long a cell takes, roughly, in epochs of the unpruned network; never nothing."""
    cell, recipe = plan.cell, plan.train
    assert cell is not None and recipe is not None
    if cell.method == RECOVER:
        return float(cell.settings.get("epochs", 1))
    if cell.method in ("", BASE, COPY):
        return float(recipe.epochs)
    method = find_method(cell.method)
    inside = _PASSES if method.own is Own.SLIMMABLE else 1
    searched = getattr(method.config(**cell.settings), "epochs", None)
    searched = searched if isinstance(searched, int | float) else None  # of somebody's own method it may be anything
    if cell.prepares:
        return float(searched or recipe.epochs)
    work = float(recipe.epochs if cell.scratch else 0)
    work += recipe.epochs if method.own is Own.AS_IT_IS else inside * (searched or 0) if method.prepare is None else 0
    own = {Own.FINE_TUNED: cell.fine_tune_epochs, Own.SLIMMABLE: inside * recipe.epochs}
    return work + (own.get(method.own, 0) if method.own and cell.own else 0) or 1.0


def run_comparison(it: Comparison, folder: Path, at_once: int | None = None, quiet: bool = False) -> list[Ended]:
    """Run the cells that are not done yet; those that failed, if any. Started again, it goes on where it was."""
    return run_tasks(tasks(it), folder, it.job.place, at_once, quiet)


def run_tasks(
    wanted: Sequence[Task], folder: Path, device: torch.device, at_once: int | None = None, quiet: bool = False
) -> list[Ended]:
    """Run those of these cells that are not done yet; those that failed, if any."""
    _make(folder)
    with kept_signals() as signals, Lock(folder):
        check_begun(wanted, folder)
        for task in wanted:
            Run(folder / PLANS).write(f"{task.name}.json", task.plan.to_json())
        _note_command(folder, device)
        left = longest_first([task for task in wanted if not is_done(folder / task.name)])
        names = {task.name for task in left}
        commands = [
            Command(
                task.name,
                (*COMMAND, "cell", str(folder / PLANS / f"{task.name}.json"), str(folder / task.name)),
                tuple(name for name in task.after if name in names),
            )
            for task in left
        ]
        ended = run_side_by_side(
            commands, folder / OUTPUT, device, signals, at_once=at_once, quiet=quiet, noun="cells", total=len(wanted)
        )
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


def check_begun(wanted: Sequence[Task], folder: Path) -> None:
    """Refuse all cells if one of them was begun by another plan."""
    for task in wanted:
        if fields := changed_fields(task, folder):
            known = f", which is in {folder / COMMANDS}" if (folder / COMMANDS).exists() else ""
            if foreign := task.plan.foreign_fields(read_json(_plan_path(task, folder))):
                raise FileError(
                    f"{folder / task.name} was begun by another version of dmcp ({', '.join(foreign)} is not in both): "
                    f"give --out another folder, or go on with the version that began it{known}."
                )
            raise FileError(
                f"{folder / task.name} was begun with other settings ({', '.join(fields)}): give --out another folder, "
                f"or the command that began it{known}."
            )
    before = {row: (name, kind) for row, name, kind in _begun(folder)}
    for task in wanted:
        name, kind = before.get(row_of(task.name, task.plan.job.seed), ("", None))
        if kind not in (None, kind_of(json.loads(json.dumps(task.plan.to_json())))):
            raise FileError(
                f"{folder / task.name}: another seed of this row, {name}, was begun with another method or other "
                "settings: give --out another folder, or the same settings."
            )


def row_of(name: str, seed: int) -> str:
    """What the cells of all seeds of a row have in common."""
    return name.removesuffix(f"-seed{seed}")


def kind_of(plan: Mapping[str, Any]) -> Any:
    """What must be the same in all seeds of a row."""
    cell = plan.get("cell") or {}
    return cell.get("method"), cell.get("settings")


def _begun(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Row, name and kind of all cells that somebody has begun."""
    for path in sorted((folder / PLANS).glob("*.json")):
        with contextlib.suppress(FileError):
            plan = read_json(path)
            if isinstance(plan.get("job"), dict) and is_run(folder / path.stem):
                yield row_of(path.stem, plan["job"].get("seed")), path.stem, kind_of(plan)


def changed_fields(task: Task, folder: Path) -> list[str]:
    """What of its plan is not as it was when a cell was begun; nothing of one that nobody has begun."""
    path, plan = _plan_path(task, folder), json.loads(json.dumps(task.plan.to_json()))
    if not is_run(folder / task.name) or not path.is_file():
        return []
    before = read_json(path)
    places = [place for place in plan if before.get(place) != plan[place]]
    return [name for place in places for name in changes(place, before.get(place), plan[place])]


def _plan_path(task: Task, folder: Path) -> Path:
    return folder / PLANS / f"{task.name}.json"


def state_of(task: Task, folder: Path) -> str:
    """How far a cell is."""
    if fields := changed_fields(task, folder):
        return f"other settings ({', '.join(fields)})"
    return "done" if is_done(folder / task.name) else "begun" if is_run(folder / task.name) else "missing"


def _note_command(folder: Path, device: torch.device) -> None:
    """Keep what was typed, with versions and device; once, as long as they are the same."""
    found = {name: _version(name) for name in _PACKAGES}
    found |= {"python": platform.python_version(), "code": code_digest()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    facts = {
        "command": shlex.join(["dmcp", *sys.argv[1:]]),
        "versions": {package: version for package, version in found.items() if version},
        "device": name,
    }
    known = [{key: record.get(key) for key in facts} for record in commands_of(folder)]
    if facts not in known:
        Run(folder).add(COMMANDS, {"time": time.strftime("%Y-%m-%d %H:%M:%S")} | facts)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commands_of(folder: Path) -> list[dict[str, Any]]:
    """The commands that have filled a folder, the first one first."""
    path, found = folder / COMMANDS, list[dict[str, Any]]()
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):  # a kill may have cut it
            record = json.loads(line)
            found += [record] if isinstance(record, dict) else []
    return found


def changes(place: str, before: Any, now: Any) -> list[str]:
    """Names of the fields of a part that are not the same."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return [place]
    return sorted(f"{place}.{name}" for name in before.keys() | now.keys() if before.get(name) != now.get(name))
