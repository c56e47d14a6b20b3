"""What a run reports while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dmcp.rows import Row
from dmcp.searching.searches import SearchRecord, SearchResult
from dmcp.training import StepRecord


@dataclass(frozen=True)
class Event:
    """What a run reports while it goes on: each step, the result of the search, each row of the table."""

    stage: str  # "search", or the name of the network that is trained
    steps: int  # of this stage, in all
    record: SearchRecord | StepRecord | SearchResult | Row


Report = Callable[[Event], None]


def silent(event: Event) -> None:
    """Where nobody listens."""
