"""The end of a run: writes network, figures and report of a finished `prune` into the run's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote as quote_url

from dmcp.budgets import LATENCY, NAMES, show_amount
from dmcp.exporting.latency import LATENCY_FILE
from dmcp.report.figures import Point, accuracy_over_cost, draw_all, save_figure
from dmcp.results import PruneResult, error_of, results_table
from dmcp.runs.files import INPUT, LOG, OUTCOME, REPORT, SETTINGS, WITHIN, read_json
from dmcp.runs.records import ACCURACY
from dmcp.runs.saved_search import save_search
from dmcp.runs.storage import save
from dmcp.runs.writing import Run
from dmcp.runtime.io import MOST_JSON, read_bytes
from dmcp.searching.budget import costs
from dmcp.searching.records import expected_shares
from dmcp.training.loop import Event

_FRONT = "front.svg"


def finish(run: Run, result: PruneResult, notes: Sequence[str] = ()) -> list[str]:
    """Write the network, the figures and the report with these notes; return warnings of diverged trainings."""
    if result.by_budget:
        return _finish_budgets(run, result, notes)
    save(result.model, result.widths, run.folder)
    if result.latency is not None:
        run.write(OUTCOME, asdict(result.latency))
    if result.within is not None:
        run.write(WITHIN, asdict(result.within))
        if result.search is not None:
            save_search(result.search, run.folder)  # with the budget that was chosen
    figures: list[Path] = []
    if result.search is not None:
        figures = draw_all(result.search, result.widths, run.folder)
    warnings = run.divergences(row.name for row in result.rows)
    run.write(REPORT, _report(result, [*warnings, *notes], figures))
    run.close()
    return warnings


def _finish_budgets(run: Run, result: PruneResult, notes: Sequence[str]) -> list[str]:
    """Like `finish`, for several budgets: a run folder for the network of each, one table and one chart."""
    budgets_of: dict[str, list[str]] = {}  # by warning: a network that several budgets share has one for all of them
    for name, budget_result in result.by_budget.items():
        part = _write_budget(run, name, budget_result)
        for warning in finish(part, budget_result, notes):
            budgets_of.setdefault(warning, []).append(name)
    warnings = [f"{', '.join(names)}: {warning}" for warning, names in budgets_of.items()]
    figures: list[Path] = []
    if result.rows[0].score == ACCURACY:  # the axis has shares
        figures.append(save_figure(accuracy_over_cost(_points(result)), run.folder / _FRONT))
    run.write(REPORT, _report_of_budgets(result, [*warnings, *notes], figures))
    run.close()
    return warnings


def _write_budget(run: Run, name: str, result: PruneResult) -> Run:
    """Write the run folder of one of several budgets, as if the run had been for this budget alone."""
    part = Run(run.folder / name)
    shutil.rmtree(part.folder, ignore_errors=True)  # half of one, before an interruption
    part.folder.mkdir()

    settings = read_json(run.folder / SETTINGS)
    search_settings = settings["search"] | {"budget": result.budget.text}
    part.write(SETTINGS, settings | {"budgets": [], "search": search_settings})
    for path in (run.folder / INPUT, run.folder / LATENCY_FILE):
        if path.exists():
            part.write(path.name, read_bytes(path, MOST_JSON))

    # The log of the search, of the trainings of these networks, and of their tests.
    records = []
    if result.search is not None:
        for search_step in result.search.log:
            records.append({"stage": "search"} | asdict(search_step))
    for row in result.rows:
        steps = run.records(f"{row.name} {name}") or run.records(row.name)
        for step in steps:
            records.append({"stage": row.name} | step)
    part.write(LOG, "".join(f"{json.dumps(record)}\n" for record in records))
    for row in result.rows:
        part.on_event(Event("test", 0, row))

    if result.search is not None:
        save_search(result.search, part.folder)
    return part


def _points(result: PruneResult) -> list[Point]:
    """The networks of several budgets as points of a chart; a baseline that all budgets share has no text."""
    points = []
    for row in result.rows:
        kind, _, budget = row.name.rpartition(" ")
        if budget not in result.by_budget:
            kind = row.name
            budget = ""
        points.append(Point(kind, budget, row.macs, row.accuracy, error_of(row) or 0.0))
    return points


# the text


def _report(result: PruneResult, warnings: Sequence[str], figures: Sequence[Path]) -> str:
    """The result for one budget as Markdown."""
    budget = result.budget
    lines = [f"# {type(result.model).__name__}, budget {budget.text}", ""]

    # What the network costs, and what the budget allows.
    spent = costs(result.graph, result.widths)
    for limit in budget.limits:
        if limit.kind != LATENCY:
            used = show_amount(limit.kind, spent[limit.kind])
            allowed = show_amount(limit.kind, limit.target)
            lines.append(f"- {NAMES[limit.kind]}: {used} of {allowed} allowed ({spent[limit.kind] / limit.target:.1%})")
    for note in result.notes:
        lines.append(f"- {note}")
    if result.search is not None:
        searched = result.search.log_budget
        shares = " and ".join(f"{share:.1%}" for share in expected_shares(result.search.for_budget(searched)))
        of_budget = "the budget"
        if searched != budget:
            of_budget = f"the budget {searched.text}, which was searched"
        lines.append(f"- expected cost at the end of the search, before sampling: {shares} of {of_budget}")

    if result.latency is not None and result.latency.warning:
        lines.append(f"- **{result.latency.warning}**")
    for warning in warnings:
        lines.append(f"- **{warning}**")

    lines += ["", results_table(result.rows, result.graph, result.origin), ""]
    lines += ["| space | channels | kept |", "|---|---:|---:|"]
    for space in result.graph.spaces:
        lines.append(f"| {space.name} | {space.size} | {result.widths[space.name]} |")
    lines.append("")
    for path in figures:
        lines.append(f"![{path.stem}]({path.name})\n")
    lines += [f"The settings are in {SETTINGS}, every step in {LOG}.", ""]
    return "\n".join(lines)


def _report_of_budgets(result: PruneResult, warnings: Sequence[str], figures: Sequence[Path]) -> str:
    """The results for several budgets as Markdown, with links to the report of each."""
    budgets = ", ".join(part.budget.text for part in result.by_budget.values())
    lines = [f"# {type(result.model).__name__}, budgets {budgets}", ""]
    for warning in warnings:
        lines.append(f"- **{warning}**")
    lines += ["", results_table(result.rows, result.graph, result.origin), ""]
    for name in result.by_budget:
        lines.append(f"- [{name}]({quote_url(name)}/{REPORT}): its network, widths and figures")
    lines.append("")
    for path in figures:
        lines.append(f"![{path.stem}]({path.name})")
    lines.append("")
    return "\n".join(lines)
