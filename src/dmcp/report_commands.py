"""The commands that look at runs: runs lists them, report makes a page of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dmcp.charts import as_file, percent
from dmcp.listing import PastRun, describe, list_runs, read_run
from dmcp.report import chart_run, chart_runs, make_page
from dmcp.runs import Run

_COLUMNS = ("name", "command", "model", "data", "budget", "state", "accuracy", "MACs", "started")


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds run folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")] = False,
) -> None:
    """List the runs in a folder, oldest first: state, budget, accuracy, MACs as a share of the unpruned network."""
    facts = [describe(run) for run in list_runs(folder)]
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in ("accuracy", "MACs") else "left", overflow="fold")
    for fact in facts:
        state = fact["state"] + (f": {fact['progress']}" if fact["progress"] else "")
        accuracy = "" if fact["accuracy"] is None else f"{100 * fact['accuracy']:.2f} %"
        share = "" if fact["macs_share"] is None else percent(fact["macs_share"])
        words = [fact[name] for name in _COLUMNS[:5]]
        table.add_row(*words, state, accuracy, share, fact["started"])
    if not console.is_terminal:
        console.width = 100_000  # no name is broken in a pipe
    console.print(table if facts else f"{folder}: no runs.")


def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("report.html"),
    svg: Annotated[Path | None, typer.Option(help="Folder for the charts, each as a file of its own.")] = None,
) -> None:
    """Make one HTML page about some runs, which needs no network and no other file."""
    found = [read_run(folder) for folder in run]
    Run(out.parent).write(out.name, make_page(found))
    print(out)
    if svg:
        for name, chart in _charts(found).items():
            Run(svg).write(name, as_file(chart))
            print(svg / name)


def _charts(found: list[PastRun]) -> dict[str, str]:
    """All charts by the names of their files; a number keeps runs of one name apart."""
    charts = {"accuracy-macs.svg": chart_runs(found)}
    for number, run in enumerate(found, start=1):
        start = re.sub(r"\W+", "-", f"{number} {run.name}", flags=re.ASCII).strip("-")
        charts |= {f"{start}-{name}.svg": chart for name, chart in chart_run(run).items()}
    return {name: chart for name, chart in charts.items() if chart}
