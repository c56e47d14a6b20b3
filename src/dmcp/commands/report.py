"""The commands that look at runs: a list, a page, structures of a search, and the test of a network."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dmcp import sampling
from dmcp.batches import generator
from dmcp.budget import check_reachable, parse
from dmcp.commands import options as o
from dmcp.commands.earlier_runs import check_names, read_plan
from dmcp.commands.printing import cost_facts, describe_costs, print_json, result_facts, tell_replaced
from dmcp.errors import FileError
from dmcp.measuring import compare
from dmcp.reports.charts import as_file, percent
from dmcp.reports.listing import PastRun, describe, list_runs, read_runs
from dmcp.reports.report import chart_run, chart_runs, make_page
from dmcp.rows import score, table
from dmcp.running.jobs import Corrupt, build, open_job, trace_job
from dmcp.running.plans import Plan
from dmcp.running.sessions import say
from dmcp.runs import SEARCH, Run, load_search, read_json
from dmcp.saving import WIDTHS, load
from dmcp.searching.searches import SearchResult, extremes
from dmcp.spaces import Widths

_COLUMNS = ("name", "command", "model", "data", "budget", "state", "accuracy", "MACs", "started")


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds run folders.")] = Path("runs"),
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """List the runs in a folder, oldest first: state, budget, accuracy, MACs as a share of the unpruned network.

    \b
    Examples:
      dmcp runs
      dmcp runs ~/experiments --json
    """
    if not o.is_first():
        return
    found = list_runs(folder)
    facts = [describe(run) for run in found]
    if as_json:
        print_json(facts)
        return
    console = Console(highlight=False, markup=False, emoji=False)
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in _COLUMNS:
        grid.add_column(column, justify="right" if column in ("accuracy", "MACs") else "left", overflow="fold")
    for run, fact in zip(found, facts, strict=True):
        state = fact["state"] + (f": {fact['progress']}" if fact["progress"] else "")
        accuracy = score(run.result, " %") if run.result else ""
        share = "" if fact["macs_share"] is None else percent(fact["macs_share"])
        words = [fact[name] for name in _COLUMNS[:5]]
        grid.add_row(*words, state, accuracy, share, fact["started"])
    if not console.is_terminal:
        console.width = 100_000  # no name is broken in a pipe
    console.print(grid if facts else f"{folder}: no runs.")


def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("report.html"),
    svg: Annotated[Path | None, typer.Option(help="Folder for the charts, each as a file of its own.")] = None,
    debug: o.Debug = False,
) -> None:
    """Make one HTML page about some runs, which needs no network and no other file; the files' names are printed.

    \b
    Examples:
      dmcp report runs/resnet18-photos-prune
      dmcp report runs --out all.html --svg charts
    """
    if not o.is_first():
        return
    if out.is_dir():
        raise FileError(f"--out: {out} is a folder: name the file in it, like {out / 'report.html'}.")
    if svg and svg.exists() and not svg.is_dir():
        raise FileError(f"--svg: {svg} is a file: name a folder.")
    found = read_runs(run)
    Run(out.parent).write(out.name, make_page(found))
    print(out)
    if svg:
        for name, chart in _charts(found).items():
            Run(svg).write(name, as_file(chart))
            print(svg / name)


def sample(
    run: o.RunFolder,
    direct: Annotated[
        int, typer.Option(min=0, max=10_000, help="So many different structures drawn from the chains; 0: expected.")
    ] = 0,
    budget: Annotated[str, typer.Option(help="Another budget than the search's, whose widths are then scaled.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for the files; default: the run.")] = None,
    seed: o.Seed = 0,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Structures of a search, inside its budget: the expected one, or drawn ones (each as a file for dmcp train).

    \b
    Examples:
      dmcp sample runs/cifar-resnet20-cifar10-search
      dmcp sample runs/cifar-resnet20-cifar10-search --budget 30%
      dmcp sample runs/cifar-resnet20-cifar10-search --direct 5 --seed 1 --json
    """
    if not o.is_first():
        return
    if out and out.exists() and not out.is_dir():
        raise FileError(f"--out: {out} is a file: name a folder.")
    settings, plan = read_plan(run)
    _check_done(run, SEARCH, plan)
    check_names(run, plan.job, "model")
    graph = trace_job(plan.job, build(plan.job, settings["classes"]), tuple(settings["shape"]))
    found = _for_budget(load_search(run, graph), budget, direct > 0)
    graph = found.graph  # with the run's table of latency, if it has one
    drawn = sampling.direct(found, direct, generator(seed)) if direct else [sampling.expected(found)]
    kind = "-".join(filter(None, ("direct" if direct else "expected", re.sub(r"[^\w%.]+", "-", budget))))
    place = out or run
    files = {place / f"{kind}{f'-{number}' if direct else ''}.json": it for number, it in enumerate(drawn, 1)}
    for path, widths in files.items():
        Run(place).write(path.name, widths.to_json())
    if as_json:
        print_json([{"file": str(path)} | cost_facts(graph, widths) for path, widths in files.items()])
        return
    for path, widths in files.items():
        print(f"{path}: {describe_costs(graph, widths)}: {' '.join(map(str, widths.values()))}")


def _for_budget(found: SearchResult, text: str, drawn: bool) -> SearchResult:
    """The same search with another budget, if one is given; a person is told what that means."""
    if not text:
        return found
    wanted = parse(text, found.graph)
    check_reachable(wanted, found.graph, *extremes(found.graph, found.sizes))
    if wanted.limits != found.budget.limits:
        way = f"only draws that fit {text} are kept, and such are rare" if drawn else f"its widths are scaled to {text}"
        say(f"The search was for {found.budget.text}: {way}, not searched again.")
    return replace(found, budget=wanted)


def evaluate(
    run: o.RunFolder,
    data: Annotated[str, typer.Option(help="Other data than the run's.")] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Images in a batch; default: as in the run.")] = None,
    device: o.Device = "",
    workers: o.Workers = None,
    corrupt: o.OnCorrupt = Corrupt.STOP,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Test the network of a run on the test set.

    \b
    Examples:
      dmcp evaluate runs/resnet18-photos-prune
      dmcp evaluate runs/resnet18-photos-prune --data ~/other-photos --device cpu --json
    """
    if not o.is_first():
        return
    _, plan = read_plan(run)
    _check_done(run, WIDTHS, plan)
    check_names(run, plan.job, "model", *([] if data else ["data"]))
    job = replace(
        plan.job, data=data or plan.job.data, batch=batch or plan.job.batch, train_batch=0, weights="", teacher=""
    )
    opened = open_job(replace(job, device=device, workers=workers, corrupt=corrupt, holdout=0.0))
    small = load(run, opened.fresh)
    kept = {run.name: opened.graph.widths(Widths.from_json(read_json(run / WIDTHS)))}
    example = next(iter(opened.loaders.test))[0]
    rows = compare({run.name: small}, opened.graph, kept, opened.loaders.test, example)
    replaced = opened.loaders.replaced
    tell_replaced(replaced)
    if as_json:
        print_json(
            result_facts(run, opened.graph, kept[run.name], replaced) | {"networks": [asdict(row) for row in rows]}
        )
    else:
        print(table(rows, opened.graph))


def _check_done(run: Path, name: str, plan: Plan) -> None:
    """Refuse a run that has not made this file yet, or never will."""
    if not (run / name).exists():
        makes = name != SEARCH or plan.command != "train"
        way = (
            f"go on with dmcp {plan.command} --resume {shlex.quote(str(run))}"
            if makes
            else "give a run of dmcp prune or search"
        )
        raise FileError(f"{run} has no {name}: {way}")


def _charts(found: list[PastRun]) -> dict[str, str]:
    """All charts by the names of their files; a number keeps runs of one name apart."""
    charts = {"accuracy-macs.svg": chart_runs(found)}
    for number, run in enumerate(found, start=1):
        start = re.sub(r"\W+", "-", f"{number} {run.name}", flags=re.ASCII).strip("-")
        charts |= {f"{start}-{name}.svg": chart for name, chart in chart_run(run).items()}
    return {name: chart for name, chart in charts.items() if chart}
