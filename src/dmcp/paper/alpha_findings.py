"""Experiments about alphas alone, without a network in the end: how they win channels back, what is drawn from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmcp import figures
from dmcp.batches import generator
from dmcp.budget import spent_shares
from dmcp.comparison.cell_files import RECOVERY
from dmcp.comparison.cell_runs import state_of
from dmcp.markov import border_chances, count_peaks
from dmcp.paper.arms import Study
from dmcp.paper.experiments import EXPERIMENTS
from dmcp.paper.figures import recoveries, title
from dmcp.paper.outcomes import PERCENT, Outcome, Shown, by_label, plain_row
from dmcp.paper.tasks import cells_of, study_tasks
from dmcp.runs import load_search, read_json
from dmcp.searching.searches import SearchResult
from dmcp.tables import spread, table

_DIP = 0.05  # of the structures: smaller dips between two peaks of a width may be noise


def show_recover(it: Study, name: str, found: Sequence[Outcome], folder: Path) -> Shown:
    """Expected MACs and training accuracy over the steps, at both ends and as curves."""
    cells = [["", "steps", "MACs at first, %", "at the end", f"training {PERCENT} at first", "at the end", "ungated"]]
    rows: list[dict[str, Any]] = []
    groups = by_label(it, name, found)
    known = {label: [read_json(folder / one.name / RECOVERY) for one in group] for label, group in groups.items()}
    for label, stored in known.items():
        shares, seen = (_mean_curve([one[kind] for one in stored]) for kind in ("macs_shares", "accuracies"))
        facts = {"first_macs": [one["macs_shares"][0] for one in stored]}
        facts |= {"last_macs": [one["macs_shares"][-1] for one in stored]}
        facts |= {"first_accuracy": [one["accuracies"][0] for one in stored]}
        facts |= {kind: [one[kind] for one in stored] for kind in ("recovered", "trained")}
        cells.append([label, f"{len(shares):,}", *map(spread, facts.values())])
        rows.append({"label": label, **facts, "frozen": all(one["frozen"] for one in stored)})
        rows[-1] |= {"macs_shares": shares, "accuracies": seen}
    return Shown(table(cells), rows, {"": recoveries(known, title(it, name, "mean of "))})


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def show_distribution(it: Study, name: str, found: Sequence[Outcome], folder: Path) -> Shown:
    """Structures drawn from each search, and from those with other starts (extra); the figures are the first seed's."""
    searches = [(f"seed {one.seed}", "", one.seed, one.name) for one in found]
    same = {task.name for task in study_tasks(it, ["extra"]) if state_of(task, folder) == "done"}  # by our settings
    for arm, seed, cell in cells_of(it, EXPERIMENTS["extra"](it)):
        start = arm.settings.get("more", {}).get("init", "")
        if start and cell in same:
            searches.append((f"seed {seed}, {arm.label}", start, seed, cell))
    cells = [["search", "MACs of 1.0x unpruned, %", "inside the budget, %", "structures"]]
    cells[0] += ["spaces with one peak, %", f"with dips of {100 * _DIP:.0f} points filled, %"]
    rows = []
    for label, start, seed, cell in searches:
        row = _row_of_draws(label, load_search(folder / cell, it.graph), seed)
        rows.append({**row, "start": start} if start else row)
        cells.append([label, f"{100 * row['mean']:.2f} ± {100 * row['deviation']:.2f}", f"{100 * row['inside']:.1f}"])
        cells[-1] += [f"{figures.STRUCTURES:,}", f"{100 * row['one_peak']:.0f}", f"{100 * row['one_peak_filled']:.0f}"]
    seed, first = found[0].seed, load_search(folder / found[0].name, it.graph)
    told = f"{it.common.job.model}, {Path(it.common.job.data).name}, the search of seed {seed}"
    drawn = {
        "-macs": figures.cost_distribution(first, seed, told),
        "-widths": figures.width_distribution(first, seed, told),
    }
    return Shown(table(cells), rows, drawn)


def _row_of_draws(label: str, result: SearchResult, seed: int) -> dict[str, Any]:
    """MACs of structures drawn from a search, and shares of its spaces whose width has one peak.

    The peaks are exact, by the chains: of all structures, not only those inside the budget.
    """
    widths = result.process.sample(result.alphas, result.sizes, figures.STRUCTURES, generator(seed)).cpu()
    shares = (result.graph.macs(widths).double() / result.graph.macs()).tolist()
    inside = (spent_shares(result.budget, result.graph, widths).amax(dim=1) <= 1).double().mean().item()
    row = {key: value for key, value in plain_row(label, shares).items() if key != "accuracies"}
    chances = border_chances(result.process.marginals(result.alphas.double()), result.sizes)
    peaks = {"one_peak": 0.0, "one_peak_filled": _DIP}
    return row | {
        "inside": inside,
        **{key: statistics.fmean(count_peaks(own, dip) == 1 for own in chances) for key, dip in peaks.items()},
    }
