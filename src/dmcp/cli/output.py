"""What the commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmcp.budgets import BYTES, TIME, UNITS, show_cost
from dmcp.searching.budget import costs
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.units import FS_PER_MS, counted, show_shape

Replaced = Mapping[str, list[str]]  # train and test: image files that could not be read, and were replaced by others
_NAMED = 5  # files that a message names


def log(*lines: str) -> None:
    """Print lines to stderr: stdout is for results."""
    with contextlib.suppress(OSError, RuntimeError):  # nobody reads it any more, or a signal came amid another line
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """Print plain data, and nothing else, to stdout."""
    print(json.dumps(data, indent=1))


def describe_network(name: str, sample: Sequence[int], graph: ChannelGraph) -> str:
    """A network, what it costs, and what of it can be pruned: in dmcp inspect and in dry runs."""
    return f"{name}, one sample of {show_shape(sample)}\n{graph.summary()}"


def describe_replaced(replaced: Replaced) -> list[str]:
    """2 training images and 1 test image could not be read and were replaced: a.png, b.png, c.png; or nothing."""
    files = [*replaced["train"], *replaced["test"]]
    if not files:
        return []
    names = ", ".join(files[:_NAMED])
    if len(files) > _NAMED:
        names += ", ..."
    training = counted(len(replaced["train"]), "training image")
    test = counted(len(replaced["test"]), "test image")
    return [f"{training} and {test} could not be read and were replaced by other images: {names}"]


def result_facts(folder: Path, graph: ChannelGraph, widths: Widths, replaced: Replaced | None = None) -> dict[str, Any]:
    """The run, what its network costs, and how many image files were replaced, as plain data."""
    facts = {"folder": str(folder)} | cost_facts(graph, widths)
    if replaced:
        facts["replaced"] = {part: len(files) for part, files in replaced.items()}
    return facts


def cost_facts(graph: ChannelGraph, widths: Widths) -> dict[str, Any]:
    """What widths cost, also as a share of the unpruned network, and the widths, as plain data."""
    spent = costs(graph, widths)
    full = costs(graph, graph.full)
    shares = {f"{kind}_share": spent[kind] / full[kind] for kind in spent}
    return plain_costs(spent) | shares | {"widths": dict(widths)}


def plain_costs(spent: Mapping[str, int]) -> dict[str, float]:
    """Costs as plain data; units are in the names."""
    facts: dict[str, float] = {}
    for kind, amount in spent.items():
        if UNITS[kind] is TIME:
            facts[f"{kind}_ms"] = amount / FS_PER_MS
        elif UNITS[kind] is BYTES:
            facts[f"{kind}_bytes"] = amount
        else:
            facts[kind] = amount
    return facts


def describe_costs(graph: ChannelGraph, widths: Widths) -> str:
    """121,000 MACs (49.9%), 41,000 parameters (53.8%), 32.77 kB of memory (75.0%), 1.2 MB of traffic (60.1%)"""
    full = costs(graph, graph.full)
    spent = costs(graph, widths)
    return ", ".join(f"{show_cost(kind, amount)} ({amount / full[kind]:.1%})" for kind, amount in spent.items())
