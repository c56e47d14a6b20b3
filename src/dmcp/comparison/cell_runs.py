"""The cells of a table at work: which are left, in what order and side by side; what was begun otherwise is refused."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dmcp.comparison.cell_files import code_that_made, is_done
from dmcp.comparison.cells import BASE
from dmcp.comparison.comparing import Comparison, Task, tasks
from dmcp.errors import DmcpError, FileError
from dmcp.locks import Lock
from dmcp.methods import Own, find_method, own_code
from dmcp.reports.listing import is_run
from dmcp.running.children import COMMAND, Command, Ended, kept_signals, run_side_by_side
from dmcp.running.jobs import Job, Opened
from dmcp.running.operations import are_others
from dmcp.running.plans import FACTS, Plan, code_digest, facts_of, plan_from_json
from dmcp.runs import SETTINGS, Run, read_json

PLANS = "plans"  # what each cell is to do
OUTPUT = "output"  # what each cell has said
COMMANDS = "commands.jsonl"  # what was typed to fill the folder, with what and on what
_PACKAGES = ("torch-dmcp", "torch", "torchvision", "timm", "torch-pruning")
_LAST = 3  # failed cells whose last words are shown
_PASSES = 4  # of a step of a slimmable network


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
    if cell.method in ("", BASE):
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
    return work + (own.get(method.own, 0) if method.own else 0) or 1.0


def run_comparison(it: Comparison, folder: Path, at_once: int | None = None, quiet: bool = False) -> list[Ended]:
    """Run the cells that are not done yet; those that failed, if any. Started again, it goes on where it was."""
    wanted, device = tasks(it), it.job.place
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
            raise FileError(
                f"{folder / task.name} was begun with other settings ({', '.join(fields)}): give --out another folder, "
                f"or the command that began it{known}."
            )
    _check_code(wanted, folder)
    before = {row: (name, kind) for row, name, kind in _begun(folder)}
    for task in wanted:
        name, kind = before.get(row_of(task.name, task.plan.job.seed), ("", None))
        if kind not in (None, kind_of(json.loads(json.dumps(task.plan.to_json())))):
            raise FileError(
                f"{folder / task.name}: another seed of this row, {name}, was begun with another method or other "
                "settings: give --out another folder, or the same settings."
            )


def _check_code(wanted: Sequence[Task], folder: Path) -> None:
    """Refuse to add to the cells of somebody's own method what its code of today would make, if it was another then."""
    now = {name: own_code(name) for name in {task.plan.cell.method for task in wanted if task.plan.cell}}
    begun = [(name, method) for _, name, (method, _) in _begun(folder)]
    for name, method in begun:
        before = code_that_made(folder / name)
        if before and now.get(method, before) != before:
            word = "made" if is_done(folder / name) else "begun"
            cells = shlex.join(str(folder / one) for one, other in begun if other == method)
            raise FileError(
                f"{folder / name} was {word} by {method} before its file was changed: remove the cells of this method "
                f"(rm -r {cells}) and they are made again, or give --out another folder."
            )


def check_facts(job: Job, folder: Path, opened: Opened) -> None:
    """Refuse a folder with cells of this job whose network, or data, were others by the same name."""
    now = json.loads(json.dumps(facts_of(opened)))
    for path in sorted((folder / PLANS).glob("*.json")):
        place, what = folder / path.stem, ""
        if is_run(place):
            with contextlib.suppress(FileError):  # of another version: refused elsewhere, if it is wanted
                theirs = plan_from_json(read_json(path), path).job
                what = other_fact(read_json(place / SETTINGS), now) if replace(theirs, seed=job.seed) == job else ""
        if what:
            name = f"{job.data} was another data set" if what == "data" else f"{job.model} was another network"
            raise FileError(
                f"{place} was made when {name} than now: give --out another folder, or remove the cells in this one."
            )


def other_fact(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What two runs do not have in common, the network or the data; empty if they have both, as far as is known."""
    differing = [name for name in FACTS if name in one and name in other and one[name] != other[name]]
    if not differing:
        return "network" if are_others(one, other) else ""
    return "data" if differing == ["data"] else "network"


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
