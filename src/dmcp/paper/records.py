"""Cells that the data of experiments have: where their folders are gone, tables are made from these."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dmcp.comparison.cell_files import is_done
from dmcp.comparison.cells import COPY
from dmcp.comparison.comparing import Task, cell_name
from dmcp.errors import DmcpError, FileError
from dmcp.files import quote
from dmcp.paper.arms import Arm, Study
from dmcp.paper.experiments import EXPERIMENTS, WIDER, study_of
from dmcp.paper.findings import difference, protocol
from dmcp.paper.outcomes import Measured, Recorded, Shown, outcomes
from dmcp.paper.tasks import cells_of, command, study_tasks
from dmcp.plain_data import from_plain
from dmcp.runs import read_json
from dmcp.spaces import Widths

_OF_FOLDERS = ("main", "recover", "distribution")  # what these show is in the folders of their cells alone


def is_recordable(name: str) -> bool:
    """Whether what is recorded of its cells is all that an experiment shows."""
    return name not in _OF_FOLDERS


def check_recordable(names: Sequence[str]) -> None:
    """Refuse experiments that need more of their cells than what is recorded of them."""
    if refused := ", ".join(name for name in names if not is_recordable(name)):
        raise DmcpError(
            f"--recorded: {refused} cannot be made without the folders of all cells: leave out one or the other."
        )


def lost_from(path: Path, it: Study, name: str, shown: Shown, folder: Path, recorded: Recorded | None) -> list[str]:
    """Cells that a table has which is already there, and that one in its place would not have."""
    stored = read_json(path) if path.exists() else {}
    own = study_of(it, name)
    done = {outcome.name for outcome in outcomes(own, EXPERIMENTS[name](own), folder, recorded)}
    cells, rows = (it if isinstance(it, list) else [] for it in (stored.get("cells"), stored.get("rows")))
    names = [cell["name"] for cell in cells if isinstance(cell, dict) and isinstance(cell.get("name"), str)]
    known = set(_compared(shown.rows))
    lost = [cell for cell in names if cell not in done]
    return [*dict.fromkeys([*lost, *(cell for cell, own in _compared(rows) if (cell, own) not in known)])]


def _compared(rows: Sequence[Any]) -> Iterator[tuple[str, bool]]:
    """Cells in the rows of main, also those of dmcp compare, each with whether it was trained its method's own way."""
    for row in rows:
        if isinstance(row, dict) and isinstance(method := row.get("method"), str):
            seeds = row.get("seeds")
            for seed in seeds if isinstance(seeds, list | tuple) else ():
                yield cell_name(method, seed, row.get("budget") or ""), row.get("own") is True


# what is recorded


def read_recorded(it: Study, name: str, place: Path) -> dict[str, Measured]:
    """Cells of an experiment's table that are in data with its protocol, by name.

    If these have several figures of a cell, the experiment's own data count, then the first in the order of the page.
    """
    return _read_alike(it, name, place, {cell: arm for arm, _, cell in _table(it, name)})


def read_copied(it: Study, names: Sequence[str], place: Path) -> dict[str, Measured]:
    """Cells in such data whose widths experiments copy, by name: they need nothing else of them.

    One that is recorded with other widths for one experiment than for another is left out: only one can be copied.
    """
    found = [_read_copied(it, name, place) for name in names]
    every = {cell: own for one in found for cell, own in one.items()}
    return {cell: own for cell, own in every.items() if all(one.get(cell, own).widths == own.widths for one in found)}


def _read_copied(it: Study, name: str, place: Path) -> dict[str, Measured]:
    copied = {
        cell_name(start.name, seed if arm.uses_seed is None else arm.uses_seed, start.budget): start
        for arm, seed, _ in _table(it, name)
        if arm.method == COPY and (start := arm.uses) and not start.model_args
    }
    return _read_alike(it, name, place, copied)


def _read_alike(it: Study, name: str, place: Path, arms: Mapping[str, Arm]) -> dict[str, Measured]:
    found = dict[str, Measured]()
    every = [(path, data) for path in sorted(place.glob("*.json")) if _is_alike(it, name, data := read_json(path))]
    order = [*EXPERIMENTS]
    every.sort(key=lambda pair: (pair[1]["experiment"] != name, order.index(pair[1]["experiment"])))
    for path, data in every:
        try:
            for cell in _read_cells(data.get("cells")):
                if cell.name in arms and cell.accuracy is not None:
                    _check_widths(it, arms[cell.name], cell)
                    found.setdefault(cell.name, cell)
        except (TypeError, ValueError) as error:
            raise FileError(
                f"{path}: not as dmcp paper writes it ({quote(error)}): remove it, or make it again."
            ) from None
    return found


def _table(it: Study, name: str) -> list[tuple[Arm, int, str]]:
    own = study_of(it, name)
    return cells_of(own, EXPERIMENTS[name](own))


def _is_alike(it: Study, name: str, data: Mapping[str, Any]) -> bool:
    """Whether data are of an experiment whose cells are the same cells as those of this one, if their names are."""
    if data.get("experiment") not in [*EXPERIMENTS] or data.get("macs", it.graph.macs()) != it.graph.macs():
        return False
    both = [command(it, name), data.get("command")]
    wider = ["--wider"] if name in WIDER and data["experiment"] in WIDER else []  # which the names do not say
    asked = [[_values(words, option) for option in ("--precision", *wider)] for words in both]
    same = protocol(it, name)
    return asked[0] == asked[1] and not any(difference(part, data.get(part), same[part]) for part in same)


def _values(words: Any, option: str) -> list[Any]:
    """What follows an option in a command; nothing where none was kept."""
    pairs = itertools.pairwise(words) if isinstance(words, list) else ()
    return [value for key, value in pairs if key == option]


def _read_cells(cells: Any) -> list[Measured]:
    """TypeError or ValueError for what is not as `Outcome.to_json` writes it."""
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise TypeError("its cells are not a list of tables")
    known, found = {"label", *(part.name for part in fields(Measured))}, []
    for cell in cells:
        if changed := sorted(known ^ cell.keys()):
            raise ValueError(f"{', '.join(changed)} of a cell: missing, or not known")
        found.append(from_plain(Measured, {key: value for key, value in cell.items() if key != "label"}))
        if not found[-1].name.endswith(f"-seed{found[-1].seed}"):
            raise ValueError(f"{found[-1].name} has another seed, {found[-1].seed}")
        if not all(0 <= share <= 1 for share in (found[-1].accuracy, found[-1].own_accuracy) if share is not None):
            raise ValueError(f"an accuracy of {found[-1].name} is not between 0 and 1")
    return found


def _check_widths(it: Study, arm: Arm, cell: Measured) -> None:
    """ValueError for widths of another network; one that is wider may have other spaces."""
    sizes = {space.name: space.size for space in it.graph.spaces}
    fits = cell.widths.keys() == sizes.keys() and all(1 <= cell.widths[name] <= size for name, size in sizes.items())
    if arm.method and not arm.model_args and not fits:
        raise ValueError(f"{cell.name} has the widths of another network")


# what is left to do


def unrecorded(
    it: Study, names: Sequence[str], known: Mapping[str, Recorded], folder: Path, copied: Collection[str] = ()
) -> list[Task]:
    """Cells that are in the folder or have to get there: those of the tables that are not recorded, and their starts.

    A recorded cell has started from one that is gone. It is run again if its start is in the same table and is not the
    recorded one: draws, say, are compared with the search that they are of. copied: recorded cells that are no starts
    of those which only take their widths.
    """
    tasks = study_tasks(it, names)
    tables = [{cell for _, _, cell in _table(it, name)} for name in names]
    done = {task.name for task in tasks if is_done(folder / task.name)}
    same = {cell for name in names for cell in _unchanged(it, name, known[name], folder)}
    here = done | {cell for name, table in zip(names, tables, strict=True) for cell in table - known[name].keys()}
    while more := (_starts(tasks, here - done, copied) | _started(tasks, tables, here - same)) - here:
        here |= more
    return [task for task in tasks if task.name in here]


def _unchanged(it: Study, name: str, known: Recorded, folder: Path) -> list[str]:
    """Cells in the folder that are the recorded ones, as far as their figures tell."""
    own = study_of(it, name)
    found = {one.name: one for one in outcomes(own, EXPERIMENTS[name](own), folder)}
    parts = ("accuracy", "own_accuracy", "widths")
    return [
        cell
        for cell in found.keys() & known.keys()
        if all(getattr(found[cell], part) == getattr(known[cell], part) for part in parts)
    ]


def _starts(tasks: Sequence[Task], names: Collection[str], copied: Collection[str]) -> set[str]:
    """What these cells start from, but for recorded widths that they copy."""
    own = [task for task in tasks if task.name in names]
    return {start for task in own for start in task.after if not (start in copied and _copies(task, start))}


def _copies(task: Task, start: str) -> bool:
    cell = task.plan.cell
    return cell is not None and cell.method == COPY and cell.uses == start


def lent(it: Study, tasks: Sequence[Task], copied: Recorded) -> dict[str, Widths]:
    """The recorded widths that these cells copy, by the names of cells which are not among them."""
    own = {task.name for task in tasks}
    names = {start for task in tasks for start in task.after if start in copied.keys() - own and _copies(task, start)}
    return {name: it.graph.widths(copied[name].widths) for name in sorted(names)}


def _started(tasks: Sequence[Task], tables: Sequence[Collection[str]], names: Collection[str]) -> set[str]:
    """Cells of a table that start from one of these in the same table."""
    return {
        task.name
        for task in tasks
        for table in tables
        if task.name in table and any(start in table and start in names for start in task.after)
    }
