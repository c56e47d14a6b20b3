"""What a person sees of a run while it goes on: a line that moves on a terminal, now and then a plain one elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dmcp.events import Event
from dmcp.searching.searches import SearchRecord
from dmcp.training import StepRecord

_SECONDS = 10.0  # between two plain lines
_MOMENT = 0.1  # between two counts


class Progress:
    """Shows events; everything goes to stderr, so that stdout holds the results only."""

    def __init__(self, quiet: bool = False) -> None:
        console = Console(stderr=True, highlight=False)
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal and not quiet else None
        self.quiet = quiet
        self.stage = ""
        self.start = self.shown = self.time = time.monotonic()
        self.done = 0

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def on_event(self, event: Event) -> None:
        """Show a step; results are shown by the command at its end."""
        if self.quiet or not isinstance(event.record, SearchRecord | StepRecord):
            return
        self._show(event.stage, "step ", event.record.step + 1, event.steps, f", {facts(event.record)}")

    def count(self, stage: str, done: int, total: int, noun: str) -> None:
        """Show how many of some things are done; they may be fast, and a terminal is not."""
        if stage != self.stage:  # whatever was before it says nothing about its time
            self.stage, self.start, self.done = stage, time.monotonic(), 0
            self.time = self.start
        if not self.quiet and (done == total or time.monotonic() - self.time >= _MOMENT):
            self._show(stage, "", done, total, f" {noun}")

    def _show(self, stage: str, word: str, done: int, total: int, more: str) -> None:
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.start, self.done = stage, self.time, 0
        line = f"{stage}: {word}{done} of {total}{more}{self._left(total, now) if word or done < total else ''}"
        self.time, self.done = now, done
        if self.live:
            self.live.update(Text(line), refresh=True)
        elif done == total or now - self.shown >= _SECONDS:
            print(line, file=sys.stderr, flush=True)
            self.shown = now

    def _left(self, steps: int, now: float) -> str:
        """By the step before: records come in bundles, and the first of one says little about the time of its step."""
        if not self.done:
            return ""
        left = (self.time - self.start) / self.done * (steps - self.done) - (now - self.time)
        return f", {clock(max(left, 0.0))} left"


def facts(record: SearchRecord | StepRecord) -> str:
    """The losses, and in a search the expected cost against the budget."""
    if isinstance(record, StepRecord):
        return f"loss {record.loss:.3f}"
    parts = []
    if record.weight_losses:
        parts.append(f"loss {record.weight_losses[0]:.3f}")
    if record.task_loss is not None:
        parts.append(f"soft loss {record.task_loss:.3f}")
    if record.ratios:
        parts.append(f"expected cost {' and '.join(f'{ratio:.1%}' for ratio in record.ratios)} of the budget")
    else:
        parts.append("warm-up")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """5 s, 3 min 20 s, 2 h 05 min"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
