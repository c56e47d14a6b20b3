"""What several commands print: plain data, costs in words, and what went wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmcp.batches import device_of
from dmcp.budget import LATENCY, MEMORY, costs, show_cost
from dmcp.errors import DmcpError
from dmcp.folders import FolderSet
from dmcp.latency import FS_PER_MS
from dmcp.measuring import milliseconds
from dmcp.pruning import PruneResult
from dmcp.rows import AS_GIVEN, OURS, UNPRUNED, mostly_odd, not_faster
from dmcp.running.jobs import Opened, Replaced
from dmcp.running.sessions import say
from dmcp.runs import SETTINGS, read_json
from dmcp.spaces import Widths
from dmcp.tables import counted
from dmcp.tracing.graph import ChannelGraph

COST_WORDS = {"macs": "MACs", "params": "params"}  # kinds of cost as they are printed


def print_json(data: Any) -> None:
    """Plain data, and nothing else, on stdout."""
    print(json.dumps(data, indent=1))


def tell_replaced(replaced: Replaced) -> None:
    """Say on stderr which images were replaced."""
    if skipped := sorted(replaced.train | replaced.test):
        some = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        were = "was" if len(skipped) == 1 else "were"
        say(f"{counted(len(skipped), 'image file')} could not be read and {were} replaced: {some}")


def tell_troubles(troubles: Iterable[str]) -> None:
    """Say on stderr which of the networks were trained in vain."""
    for trouble in troubles:
        say(trouble)


def tell_slow(model: nn.Module, result: PruneResult, shape: Sequence[int]) -> None:
    """Say on stderr that nothing was gained in time, where the widths may be the reason; shape: of a sample."""
    if not mostly_odd(result.graph, result.widths):
        return
    times = {row.name: row.ms for row in result.rows}
    before = times.get(UNPRUNED, times.get(AS_GIVEN))
    now = times[OURS]
    if before is None:  # it is not in the table
        example = torch.zeros(result.rows[0].batch, *shape, device=device_of(model))
        now, before = milliseconds([result.model, model], example)
    if told := not_faster(now, before, result.graph, result.widths):
        say(told)


def tell_other_size(widths: Path, opened: Opened) -> None:
    """Say on stderr that image files are trained at another size than the run that found these widths has seen."""
    found: Any = None
    with contextlib.suppress(DmcpError):  # a file anywhere else
        found = read_json(widths.parent / SETTINGS).get("shape")
    now = list(opened.data.shape)
    if isinstance(opened.data.train, FolderSet) and isinstance(found, list) and found != now:
        before, after = ("x".join(map(str, shape)) for shape in (found, now))
        say(f"{widths} was found at {before}, and is trained at {after}: give --input {before} to train at that size.")


def result_facts(folder: Path, graph: ChannelGraph, widths: Widths, replaced: Replaced | None = None) -> dict[str, Any]:
    """The run, what its network costs, and, if given, how many image files were replaced, as plain data."""
    counts = {} if replaced is None else {"replaced": replaced.counts}
    return {"folder": str(folder)} | cost_facts(graph, widths) | counts


def cost_facts(graph: ChannelGraph, widths: Widths) -> dict[str, Any]:
    """What widths cost, as a share of the unpruned network too, and the widths, as plain data."""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    shares = {f"{kind}_share": spent[kind] / full[kind] for kind in spent}
    return plain_costs(spent) | shares | {"widths": dict(widths)}


def plain_costs(spent: Mapping[str, int]) -> dict[str, float]:
    """Costs as plain data; times in milliseconds and bytes, which the name says."""
    names = {LATENCY: f"{LATENCY}_ms", MEMORY: f"{MEMORY}_bytes"}
    return {names.get(kind, kind): amount / FS_PER_MS if kind == LATENCY else amount for kind, amount in spent.items()}


def describe_cost(kind: str, amount: int) -> str:
    """121,000 MACs; 8.12 ms; 65.54 kB of activations."""
    if kind == MEMORY:
        return f"{show_cost(kind, amount)} of activations"
    return show_cost(kind, amount) if kind == LATENCY else f"{amount:,} {COST_WORDS[kind]}"


def describe_costs(graph: ChannelGraph, widths: Widths) -> str:
    """What widths cost, like 121,000 MACs (49.9%), 41,000 params (53.8%), 32.77 kB of activations (75.0%)."""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    parts = (f"{describe_cost(kind, amount)} ({amount / full[kind]:.1%})" for kind, amount in spent.items())
    return ", ".join(parts)


def show_widths(graph: ChannelGraph, widths: Widths) -> None:
    """What widths cost, and each of them on a line."""
    print(describe_costs(graph, widths))
    longest = max(len(space.name) for space in graph.spaces)
    for space in graph.spaces:
        print(f"{space.name:<{longest}}  {widths[space.name]:>5} of {space.size}")
