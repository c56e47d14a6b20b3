"""Widths that are really fast enough: the chosen network is measured, and chosen again where its forecast was wrong."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmcp.budget import LATENCY, Budget, Limit, known_limits, limits_latency
from dmcp.cutting import cut
from dmcp.errors import FileError
from dmcp.files import MOST_JSON, parse_json, quote, read_bytes, write_files
from dmcp.latency import FILE, FS_PER_MS, Latency, Outcome
from dmcp.ranks import current, share_tensors
from dmcp.sampling import expected
from dmcp.searching.searches import SearchResult, extremes
from dmcp.slicing import narrow, unwrap
from dmcp.spaces import Widths
from dmcp.timing.stopwatch import Clock, Measure, clock_of
from dmcp.tracing.graph import ChannelGraph

CHOICE = "choice.json"  # which widths were taken, beside the checkpoints of a search
TRIES = 3  # further choices, where a chosen network takes another time than its forecast
ENOUGH = 0.95  # of the limit: a network that takes less is widened


class LatencyWarning(UserWarning):
    """A latency that is not known well, or that is above what was asked for."""


def choose(
    found: SearchResult,
    model: nn.Module,
    clock: Clock | None,
    pick: Callable[[SearchResult], Widths] = expected,
    tries: int = TRIES,
) -> tuple[SearchResult, Widths, Outcome]:
    """Widths whose network, cut and measured, is inside the limit of latency; the search with the limit they are of.

    Where the network takes longer than it may, or far less, the limit is changed by as much and widths are picked
    again, from the same alphas. The slowest that is fast enough is taken; where none is, the fastest, whose Outcome
    says that the limit does not hold.
    """
    graph, table = found.graph, found.graph.latency
    assert table is not None
    asked = _limit_of(found.budget)
    now, best = found, list[tuple[SearchResult, Widths, Outcome]]()
    for number in range(tries + 1):
        widths = pick(now)
        spent = graph.latency_fs(widths)
        ms = None if clock is None else _measured(clock, model, graph, widths)
        outcome = Outcome(
            asked_ms=asked / FS_PER_MS,
            predicted_ms=spent / FS_PER_MS,
            unpruned_ms=table.unpruned_ms,
            how=table.how,
            measured_ms=ms,
            again=number,
        )
        same = any(widths == other for _, other, _ in best)
        best = sorted([*best, (now, widths, outcome)], key=lambda it: _rank(it[2]))[-1:]
        wider = ms is not None and ms < ENOUGH * outcome.asked_ms
        if ms is None or same or (outcome.held and not wider) or (wider and spent < ENOUGH * _limit_of(now.budget)):
            break  # the last: another limit keeps it so small
        target = math.floor(spent * outcome.asked_ms / ms)
        least, most = (graph.latency_fs(it) for it in extremes(graph, found.sizes))
        if target < least or min(target, most) == _limit_of(now.budget):
            break
        now = replace(found, budget=_limited(found.budget, min(target, most)))
    ((result, widths, taken),) = best
    return result, widths, replace(taken, again=outcome.again)


def _rank(it: Outcome) -> tuple[bool, float]:
    """Of two networks that are fast enough the slower one is better, otherwise the faster one."""
    ms = it.measured_ms or 0.0
    return it.held, ms if it.held else -ms


def _measured(clock: Clock, model: nn.Module, graph: ChannelGraph, widths: Widths) -> float:
    """Time of the cut network, as it would be had the machine the speed that it had when the table was made.

    It is timed beside the unpruned one, which is in the table: on a machine that is busy now both are slow.
    """
    table = graph.latency
    assert table is not None
    whole, small = clock.times(iter([narrow(unwrap(model), {}, {}), cut(model, graph, widths)]))
    return small * table.unpruned_ms / whole


def _limit_of(budget: Budget) -> int:
    return next(limit.target for limit in budget.limits if limit.kind == LATENCY)


def _limited(budget: Budget, target: int) -> Budget:
    limits = tuple(Limit(it.kind, target) if it.kind == LATENCY else it for it in budget.limits)
    return replace(budget, limits=limits)


# one table and one choice for all processes, also after an interruption


def price(
    graph: ChannelGraph,
    spec: object,
    measure: Callable[[], Latency],
    table: Latency | None = None,
    folder: Path | None = None,
) -> ChannelGraph:
    """The graph with a table of latency, if the budget needs one: a given one, the folder's, or a new one kept there.

    The first of several processes measures, the others get its numbers.
    """
    if table is not None:
        return graph.priced(table)
    if graph.latency is not None or not limits_latency(spec):
        return graph
    known_limits(spec, graph)  # what cannot be read is refused now

    def find() -> dict[str, Any]:
        if folder is not None and (folder / FILE).exists():
            return Latency.load(folder / FILE).to_json()
        found = measure()
        if folder is not None:
            found.save(folder / FILE)
        return found.to_json()

    found = Latency.from_json(_of_first(find))
    if found.trouble and current().first:
        warnings.warn(found.trouble, LatencyWarning, stacklevel=3)
    return graph.priced(found)


def settle(
    found: SearchResult,
    model: nn.Module,
    example: Any,
    measure: Measure | None = None,
    folder: Path | None = None,
) -> tuple[SearchResult, Widths, Outcome]:
    """What `choose` gives; the first of several processes chooses. A choice that is in the folder stays as it is."""
    table = found.graph.latency
    assert table is not None

    def find() -> dict[str, Any]:
        if folder is not None and (folder / CHOICE).exists():
            kept = parse_json(read_bytes(folder / CHOICE, MOST_JSON), folder / CHOICE)
            if isinstance(kept, dict):
                return kept
        result, widths, outcome = choose(found, model, clock_of(table, example, measure))
        kept = {"target": _limit_of(result.budget), "widths": list(widths.values()), "outcome": asdict(outcome)}
        if folder is not None:
            write_files(folder, {CHOICE: json.dumps(kept).encode()})
        return kept

    kept = _of_first(find)
    try:
        budget, widths = _limited(found.budget, kept["target"]), found.graph.widths(kept["widths"])
        outcome = Outcome(**kept["outcome"])
    except (KeyError, TypeError) as error:
        raise FileError(f"{folder}: {CHOICE} is not one of this version ({quote(error)}): remove it.") from None
    if outcome.trouble and current().first:
        warnings.warn(outcome.trouble, LatencyWarning, stacklevel=3)
    return replace(found, budget=budget), widths, outcome


def _of_first(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Plain data that the first process finds, for all of them."""
    ranks = current()
    data = json.dumps(find()).encode() if ranks.first else b""
    length = torch.tensor([len(data)])
    share_tensors([length], ranks)
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if ranks.first:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    share_tensors([buffer], ranks)
    plain: dict[str, Any] = json.loads(bytes(buffer.tolist()))
    return plain
