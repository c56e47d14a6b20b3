"""The command that lists runs: dmcp runs. Imports no torch, so that it answers at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from dmcp.runs.reading import list_runs
from dmcp.runs.records import score
from dmcp.units import show_share


def runs(folder: Path, as_json: bool) -> None:
    """Run `dmcp runs`: list the runs in a folder."""
    past_runs = list_runs(folder)
    if as_json:
        print(json.dumps([run.describe() for run in past_runs], indent=1))
        return
    if not past_runs:
        print(f"{folder}: no runs.")
        return
    columns = ("name", "command", "model", "data", "budget", "state", "accuracy", "MACs", "started")
    rows = []
    for run in past_runs:
        cells = run.describe()
        if cells["progress"]:
            cells["state"] += f": {cells['progress']}"
        cells["accuracy"] = ""
        if run.result:
            cells["accuracy"] = score(run.result)
        cells["MACs"] = ""
        if cells["macs_share"] is not None:
            cells["MACs"] = show_share(cells["macs_share"])
        rows.append([cells[column] for column in columns])
    _print_table(columns, rows)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as the terminal; in a pipe, it is as wide as it must be, so that no name is broken."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 100_000
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        if column in ("size", "MACs", "accuracy"):
            grid.add_column(column, justify="right", overflow="fold")
        else:
            grid.add_column(column, justify="left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
