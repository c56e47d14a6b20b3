"""Widths within a latency limit: chosen by the forecast of a table, measured, and chosen again if that was wrong."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from dmcp.budgets import LATENCY, Budget, Limit, limits_latency
from dmcp.errors import warn
from dmcp.exporting.export import missing_packages
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.exporting.timing import Measure, Timer, device_name
from dmcp.runs.records import LatencyOutcome
from dmcp.runtime.distributed import current, gather
from dmcp.runtime.io import MOST_JSON, parse_json, read_bytes, write_files
from dmcp.settings import LatencyConfig, RuntimeKind
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import narrow, unwrap
from dmcp.tracing.widths import Widths
from dmcp.units import FS_PER_MS

Picked = TypeVar("Picked")
CHOICE_FILE = "choice-{}.json"  # times of what was picked, beside the checkpoints of a search
_TRIES = 3  # further choices, if a network is slower or faster than its forecast
_USED = 0.97  # share of the limit that a network must take, as measured, or wider ones are tried


def choose_within_latency(
    pick: Callable[[Budget], tuple[Picked, Widths, nn.Module]],
    budget: Budget,
    graph: ChannelGraph,
    *,
    lowest: int,
    highest: int,
    model: nn.Module,
    timer: Timer | None,
    folder: Path | None = None,
) -> tuple[Picked, LatencyOutcome]:
    """Pick for the budget, and again if the cut network, once measured, is slower or much faster than asked.

    The limit of the forecast is then moved by as much, between `lowest` and `highest` femtoseconds. The slowest network
    inside the limit is returned, as measured, or the last one if none is. Rank 0 measures for all, once: times that
    are in the folder are kept.
    """
    table = Latency.of(graph)
    assert table is not None
    asked = next(limit.target for limit in budget.limits if limit.kind == LATENCY)
    target = asked
    slowest_inside: tuple[Picked, LatencyOutcome] | None = None
    inside = lowest - 1  # the largest forecast so far whose network is inside the limit
    outside = highest + 1  # the smallest one whose network is not
    measured: set[Widths] = set()
    for again in range(_TRIES + 1):
        limits = [Limit(LATENCY, target) if limit.kind == LATENCY else limit for limit in budget.limits]
        picked, widths, small = pick(replace(budget, limits=tuple(limits)))
        if widths in measured:
            break
        measured.add(widths)
        predicted = graph.cost(LATENCY, widths)

        share = _once(folder, CHOICE_FILE.format(again), functools.partial(_time_beside, timer, small, model))["share"]
        measured_ms = None if share is None else share * table.unpruned_ms
        outcome = LatencyOutcome(
            asked_ms=asked / FS_PER_MS,
            predicted_ms=predicted / FS_PER_MS,
            unpruned_ms=table.unpruned_ms,
            how=table.how,
            measured_ms=measured_ms,
            again=again,
        )
        chosen = picked, outcome
        if measured_ms is None:
            break

        if outcome.held:
            inside = max(inside, predicted)
            is_slowest = slowest_inside is None or measured_ms > (slowest_inside[1].measured_ms or 0.0)
            if is_slowest:
                slowest_inside = chosen
            if measured_ms >= _USED * outcome.asked_ms:
                break
        else:
            outside = min(outside, predicted)
            if target == lowest:
                break

        # Which forecast takes as long as asked? Where both sides were tried, it is between them.
        if lowest <= inside < outside <= highest:
            target = (inside + outside) // 2
        else:
            target = min(max(math.floor(predicted * outcome.asked_ms / measured_ms), lowest), highest)

    return slowest_inside or chosen


def _time_beside(timer: Timer | None, small: nn.Module, model: nn.Module) -> dict[str, float | None]:
    """Measure a network's share of the time of the unpruned one, beside it: a machine that is busy slows both."""
    if timer is None:
        return {"share": None}
    copy_of_model = narrow(unwrap(model), {}, {})
    unpruned_ms, small_ms = timer.times([copy_of_model, small])
    return {"share": small_ms / unpruned_ms}


def timer_like(table: Latency, example: Any, measure: Measure | None = None) -> Timer | None:
    """Return what measures as the table was measured; None if this machine cannot."""
    if measure is None:
        if not _is_device_of(table):
            return None
        if table.runtime == RuntimeKind.ONNX and missing_packages():
            return None
    config = LatencyConfig(
        batch=table.batch,
        device=table.place,
        dtype=table.dtype,
        runtime=table.runtime,
        mode=table.mode,
        channels_last=table.channels_last,
    )
    return Timer(config=config, threads=table.threads, example=example, measure=measure)


def _is_device_of(table: Latency) -> bool:
    """Return True if this machine has the device that a table was measured on."""
    name = ""
    if table.place:
        with contextlib.suppress(RuntimeError, AssertionError):  # there is no such device
            name = device_name(table.place)
    return name == table.device


# one table and the same times for all ranks, also after an interruption


def attach_latency(
    graph: ChannelGraph,
    budget: object,
    measure: Callable[[], Latency],
    table: Latency | None = None,
    folder: Path | None = None,
) -> ChannelGraph:
    """Attach a latency table if the budget needs one: the given one, that of the folder, or a new one, saved there."""
    if table is not None:
        return table.attach(graph)
    if LATENCY in graph.extra or not limits_latency(budget):
        return graph
    table = Latency.from_json(_once(folder, LATENCY_FILE, lambda: measure().to_json()), folder)
    if table.warning and current().first:
        warn(table.warning)
    return table.attach(graph)


def _once(folder: Path | None, name: str, find: Callable[[], dict[str, Any]]) -> Any:
    """Return plain data for all ranks: what is in a file of the folder, or what rank 0 finds and writes there."""
    path = None
    if folder is not None:
        path = folder / name
    text = b""
    if current().first:
        if path is not None and path.exists():
            text = read_bytes(path, MOST_JSON)
        else:
            text = json.dumps(find(), indent=1).encode()
            if path is not None:
                write_files(path.parent, {path.name: text})
    return parse_json(gather(text, current())[0], path)
