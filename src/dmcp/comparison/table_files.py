"""The files of a comparison's table: page, plain data, LaTeX and figure, with all that makes them again."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dmcp import figures
from dmcp.comparison.cell_runs import commands_of
from dmcp.comparison.gathering import Line, gather, measure, timed_cells
from dmcp.comparison.stored_cells import Stored, describe, settings_of
from dmcp.comparison.table_text import against_uniform, cells_of, differences_of, markdown, networks_of, to_json
from dmcp.errors import FileError
from dmcp.running.jobs import Opened, open_job
from dmcp.runs import Run, read_json
from dmcp.saving import WEIGHTS
from dmcp.tables import between, latex

TABLE, PAGE, FIGURE = "compare.json", "compare.md", "compare.svg"
NETWORKS, LATEX = "compare.csv", "compare.tex"


def write_table(it: Stored, folder: Path, opened: Opened | None = None, again: bool = False) -> dict[str, Any]:
    """Write the table of the cells that are done; what is in its JSON.

    opened: the network and its data, with which cells are timed that have no time yet, or all of them `again`. Without
    it nothing but the folder is needed, and times are those that were measured before.
    """
    lines = gather(it, folder)
    speeds = _speeds(it, lines, folder, opened, again)
    cells = timed_cells(lines, folder)
    by_row = {row: speeds["ms"][name] for name, row in cells.items() if name in speeds["ms"]}
    lines = [replace(line, ms=by_row.get((line.method, line.budget))) for line in lines]
    job = it.plan.job
    data = {
        "model": job.model,
        "data": job.data,
        "commands": commands_of(folder),
        "settings": settings_of(it, folder),
        "batch": speeds["batch"],
        "speeds": speeds,
        "lines": to_json(lines),
    }
    run = Run(folder)
    run.write(TABLE, data)
    parts = [describe(it), markdown(lines, speeds["batch"]), against_uniform(lines)]
    run.write(PAGE, "\n".join(f"{part.rstrip()}\n" for part in parts if part))
    run.write(LATEX, _latex(it, lines, speeds["batch"]))
    run.write(NETWORKS, _csv(networks_of(lines)))
    _draw(it, lines, folder)
    return data


def _latex(it: Stored, lines: Sequence[Line], batch: int) -> str:
    """Both tables for a paper, below what they are about."""
    head = [
        f"% {describe(it)}",
        r"% Needs \usepackage{booktabs}. Mean $\pm$ standard deviation (ddof = 1) over as many seeds as in brackets.",
    ]
    tables = [latex(rows) for rows in (cells_of(lines, batch), differences_of(lines)) if rows]
    return "\n".join([*head, "\n".join(tables)])


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plain data as text with commas; nothing stands for what is not known."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _speeds(it: Stored, lines: Sequence[Line], folder: Path, opened: Opened | None, again: bool) -> dict[str, Any]:
    """Milliseconds of cells by name, with device and batch; those of another device or batch are measured again."""
    before = _stored_speeds(folder)
    if opened is None:
        return before
    place = it.plan.job.place
    device = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    known = {"device": device, "batch": len(next(iter(opened.loaders.test))[1])}
    times: dict[str, float] = {}
    if not again and all(before[name] == value for name, value in known.items()):
        times = before["ms"]
    left = [name for name in timed_cells(lines, folder) if name not in times]
    left = [name for name in left if (folder / name / WEIGHTS).exists()]  # not all, where a folder was brought here
    if left:
        times = times | measure(left, folder, open_job(it.plan.job))
    return known | {"ms": times}


def _stored_speeds(folder: Path) -> dict[str, Any]:
    """What was measured before, if anything."""
    nothing: dict[str, Any] = {"device": "", "batch": 0, "ms": {}}
    try:
        found: Any = read_json(folder / TABLE).get("speeds") if (folder / TABLE).exists() else None
    except FileError:
        return nothing
    fits = isinstance(found, dict) and found.keys() == nothing.keys() and isinstance(found["ms"], Mapping)
    return dict(found) if fits and all(isinstance(ms, int | float) for ms in found["ms"].values()) else nothing


def _draw(it: Stored, lines: Sequence[Line], folder: Path) -> None:
    panels: dict[str, dict[str, tuple[figures.Spread, figures.Spread]]] = {}
    for line in lines:
        if line.budget:  # the unpruned network would make all others look alike
            rows = panels.setdefault(line.budget, {})
            same, own = rows.get(line.method, (None, None))
            rows[line.method] = (same, line.accuracies) if line.own else (line.accuracies, own)
    if panels:
        train = it.plan.train
        assert train is not None
        counts = [len(line.accuracies) for line in lines if line.budget]
        words = f"{train.epochs} epochs, {between(str(min(counts)), str(max(counts)))} seeds"
        title = f"{it.plan.job.model}, {Path(it.plan.job.data).name}, {words}"
        figures.save(figures.accuracy_by_method(panels, title), folder / FIGURE)
