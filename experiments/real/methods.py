"""dmcp.prune for the rows of docs/results.md, with two methods that only these have.

`torch-pruning` is the package Torch-Pruning, as `dmcp compare` calls it: norms of groups, all layers at once, the same
MACs. `dmcp-original-weights` has the widths of the search, but not its weights: the channels are cut out of the
original, those that the outputs depend on most. Both are fine-tuned and tested as the others are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import dmcp
from experiments.real.page import read_rows
from experiments.real.rows import RESULTS

ORIGINAL_WEIGHTS = "dmcp-original-weights"
TORCH_PRUNING = "torch-pruning"
PEER = "experiments.methods.peer:torch_pruning"
Widths = Mapping[str, int]


def prune(
    model: nn.Module,
    loader: Any,
    tests: Any,
    budgets: Sequence[str],
    *,
    method: str,
    search: dmcp.SearchConfig,
    searched: Mapping[str, Widths] | None = None,
    **settings: Any,
) -> dmcp.PruneResult:
    """The result of `dmcp.prune` with the rows that the page needs; its `by_budget` has every budget.

    searched: widths of earlier searches, by budget, so that they are not searched again.
    """
    if method == ORIGINAL_WEIGHTS:
        searched = search_missing(model, loader, tests, budgets, search, searched or {}, settings)
        by_budget = {}
        for budget in budgets:
            by_budget[budget] = cut_original(model, loader, tests, searched[budget], search, settings)
    else:
        check_installed(method)
        baselines = ["original", "uniform"] if method == "dmcp" else ["original"]
        name = PEER if method == TORCH_PRUNING else method
        result = dmcp.prune(model, loader, tests, budgets, method=name, search=search, baselines=baselines, **settings)
        by_budget = dict(zip(budgets, result.by_budget.values() or [result], strict=True))
    by_budget = {budget: renamed(result, method) for budget, result in by_budget.items()}
    return replace(by_budget[budgets[0]], by_budget=by_budget)


def search_missing(
    model: nn.Module,
    loader: Any,
    tests: Any,
    budgets: Sequence[str],
    search: dmcp.SearchConfig,
    searched: Mapping[str, Widths],
    settings: Mapping[str, Any],
) -> dict[str, Widths]:
    """Widths for every budget. Those that are not known are searched as `dmcp` does, and nothing is trained."""
    widths = dict(searched)
    missing = [budget for budget in budgets if budget not in widths]
    if missing:
        settings = {**settings, "retrain": "none", "teacher": None, "baselines": []}
        result = dmcp.prune(model, loader, tests, missing, search=search, **settings)
        found = result.by_budget.values() or [result]
        widths |= {budget: dict(each.widths) for budget, each in zip(missing, found, strict=True)}
    return widths


def cut_original(
    model: nn.Module,
    loader: Any,
    tests: Any,
    widths: Widths,
    search: dmcp.SearchConfig,
    settings: Mapping[str, Any],
) -> dmcp.PruneResult:
    """The original with these widths: `sensitivity` may choose channels, but no other widths."""
    macs = widths_macs(model, loader, widths)
    fixed = replace(search, budget=macs, min_channels=dict(widths), max_channels=dict(widths))
    return dmcp.prune(
        model, loader, tests, macs, method="sensitivity", search=fixed, baselines=["original"], **settings
    )


def widths_macs(model: nn.Module, loader: Any, widths: Widths) -> int:
    """What a network of these widths costs."""
    example = next(iter(loader))[0][:2]
    graph = dmcp.trace(model, example)
    return int(graph.macs(graph.widths(widths)))


def renamed(result: dmcp.PruneResult, method: str) -> dmcp.PruneResult:
    """The result with the pruned network in the row of this method."""
    shared = ("original", "right after the cut", "uniform")
    rows = tuple(row if row.name in shared else replace(row, name=method) for row in result.rows)
    return replace(result, rows=rows, by_budget={})


def check_installed(method: str) -> None:
    """Stop at once if the package of the method is missing."""
    if method == TORCH_PRUNING and importlib.util.find_spec("torch_pruning") is None:
        raise SystemExit(
            "Torch-Pruning is not installed: pip install torch-pruning, or add the folder of its unpacked wheel to "
            "PYTHONPATH."
        )


def recorded_widths(budgets: Iterable[str], files: Iterable[Path] = (RESULTS,), **facts: Any) -> dict[str, Widths]:
    """The widths of `dmcp` that rows with these facts (network, test, seed) have, by budget."""
    widths: dict[str, Widths] = {}
    for file in files:
        for row in read_rows(file):
            if row["row"] == row["method"] == "dmcp" and row["budget"] in budgets and facts.items() <= row.items():
                widths[row["budget"]] = row["widths"]
    return widths
