"""What a run reports while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dmcp.latency import Latency
from dmcp.rows import Row
from dmcp.searching.searches import SearchRecord, SearchResult
from dmcp.training import StepRecord


@dataclass(frozen=True)
class Event:
    """What a run reports while it goes on: each step, the result of the search, each row of the table.

    Where networks are measured for a budget of latency, also their table, before the search.
    """

    stage: str  # "latency", "search", or the name of the network that is trained
    steps: int  # of this stage, in all; of latency: networks
    record: SearchRecord | StepRecord | SearchResult | Row | Latency


Report = Callable[[Event], None]


def silent(event: Event) -> None:
    """Where nobody listens."""
