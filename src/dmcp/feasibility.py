"""Can the budgets be met? Checked before the search, measured if they limit latency, and counted after the cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dmcp.budgets import LATENCY, Budget, limits_latency, show_cost
from dmcp.errors import BudgetError
from dmcp.exporting.latency import Latency, measure_latency
from dmcp.exporting.latency_limit import attach_latency, timer_like
from dmcp.exporting.timing import Measure, Timer
from dmcp.markov import group_sizes
from dmcp.request import Spec
from dmcp.searching.bounds import width_bounds
from dmcp.searching.budget import check_reachable, costs, counted_part, is_met_by, parse_budget
from dmcp.searching.search import SEARCH
from dmcp.settings import LatencyConfig, SearchConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime

# before the search


def parse_budgets(
    specs: Sequence[Spec], graph: ChannelGraph, low: Widths, high: Widths, align: int | None
) -> dict[str, Budget]:
    """The budgets by name, as rows and folders are named; BudgetError if one is repeated or out of reach."""
    budgets: dict[str, Budget] = {}
    for spec in specs:
        budget = parse_budget(spec, graph)
        check_reachable(budget, graph, low, high, align)
        for earlier in budgets.values():
            if set(budget.limits) == set(earlier.limits):
                raise BudgetError(f"The budgets {earlier.text!r} and {budget.text!r} are the same: give each once.")
        budgets[budget.file_name] = budget
    return budgets


def reachable(graph: ChannelGraph, config: SearchConfig) -> tuple[Widths, Widths]:
    """The smallest and the largest widths of a search with these settings: each space keeps at least one group."""
    ends = width_bounds(graph, config.min_channels, config.max_channels, config.align)
    lowest: list[int] = []
    highest: list[int] = []
    for space, (least, most) in zip(graph.spaces, ends, strict=True):
        first_group = group_sizes(space.size, config.groups, space.step(config.align))[0]
        lowest.append(min(max(first_group, least), most))
        highest.append(most)
    return graph.widths(lowest), graph.widths(highest)


# latency


def with_latency(
    model: nn.Module,
    graph: ChannelGraph,
    example: Any,
    specs: Sequence[Spec],
    config: SearchConfig,
    latency: Latency | Measure | None,
    runtime: Runtime,
) -> tuple[ChannelGraph, Timer | None]:
    """Attach a latency table to the graph if a budget needs one; and make a timer that measures in the same way.

    The table is the given one, or that of an interrupted run, or a new one. There is no timer if there is no table, or
    if this machine is not the one that the table is of.
    """
    if isinstance(latency, Latency):
        table = latency
        measure = None
    else:
        table = None
        measure = latency
    limited = [spec for spec in specs if limits_latency(spec)]
    spec = specs[0]
    if limited:
        spec = limited[0]

    def measure_networks() -> Latency:
        measured = time_networks(model, example, graph, replace(config, budget=spec), measure=measure)
        runtime.emit(LATENCY, len(measured.networks), measured)
        return measured

    graph = attach_latency(graph, spec, measure_networks, table, latency_folder(runtime))
    attached = Latency.of(graph)
    timer = None
    if attached:
        timer = timer_like(attached, example, measure)
    return graph, timer


def latency_folder(runtime: Runtime, budget: str = "") -> Path | None:
    """The folder with the latency table and what was measured for one of several budgets, beside the checkpoints."""
    if runtime.checkpointer is None:
        return None
    return runtime.checkpointer.stage(f"{SEARCH} {budget}".strip()).folder


def time_networks(
    model: nn.Module,
    example: Any,
    graph: ChannelGraph,
    search: SearchConfig,
    config: LatencyConfig | None = None,
    measure: Measure | None = None,
) -> Latency:
    """Measure a latency table between the smallest and the largest widths of a search.

    BudgetError, before anything is measured, if its budget has another limit that is out of reach.
    """
    low, high = reachable(graph, search)
    counted = None
    if search.budget is not None:
        counted = counted_part(search.budget, graph)
    if counted is not None and not is_met_by(costs(graph, graph.full), counted):
        check_reachable(counted, graph, low, high)
    config = replace(config or LatencyConfig(), min_channels=low, max_channels=high, align=search.align)
    return measure_latency(model, example, graph, config, measure=measure)


# after the cut


def check_budget(small: nn.Module, widths: Widths, graph: ChannelGraph, budget: Budget) -> None:
    """Count what the cut network costs once more, for every limit."""
    for limit in budget.limits:
        if limit.kind == "params":
            cost = sum(parameter.numel() for parameter in small.parameters())
        else:
            cost = graph.cost(limit.kind, widths)
        if cost > limit.target:
            counted = show_cost(limit.kind, cost)
            allowed = show_cost(limit.kind, limit.target)
            raise BudgetError(f"The cut network costs {counted}, more than the {allowed} allowed: please report this.")
