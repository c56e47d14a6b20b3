"""Signs of life: bars in a terminal or notebook, elsewhere a plain line now and then, and the time that is left."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from operator import length_hint
from typing import Any, ParamSpec, TypeVar

import torch
from rich import progress as bars
from rich.console import Console
from rich.table import Column

from dmcp.runtime.distributed import current
from dmcp.units import clock

P = ParamSpec("P")
T = TypeVar("T")
Update = Callable[..., None]  # (steps done, text)
_SECONDS, _MOMENT = 10.0, 0.2  # between two plain lines, and between two states of the bars


@dataclass(eq=False)
class Row:
    """A phase."""

    name: str
    steps: int
    work: float = 0.0  # of a step, in training steps of the unpruned network; 0: not comparable with other phases
    done: int = 0
    text: str = ""
    start: int = 0  # steps that were done before the current call
    timed: int = 0  # steps that took these seconds, in this process
    seconds: float = 0.0
    time: float = 0.0  # of the last step


class Progress:
    """The phases of a job on stderr."""

    def __init__(self, console: Console | None, lines: bool = False) -> None:
        self.rows: dict[str, Row] = {}
        self.lines, self.shown = lines, time.monotonic()
        self.bars: bars.Progress | None = None
        if console is not None:
            # no thread draws them: workers are forked meanwhile
            self.bars = bars.Progress(
                bars.TextColumn("{task.description}", markup=False),
                bars.BarColumn(20, table_column=Column(min_width=12)),
                bars.TextColumn("{task.fields[count]}"),
                bars.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
                console=console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
            )

    def begin(self, row: Row) -> Row:
        """A row for some more steps; `done` of them were done by an earlier process."""
        old = self.rows.setdefault(row.name, row)
        old.start = 0 if old is row else old.done
        old.steps, old.done, old.time = max(old.steps, old.start + row.steps), old.start + row.done, time.monotonic()
        if self.bars:
            self.draw(old)
        return old

    def update(self, row: Row, done: int, text: str = "") -> None:
        """So many of the steps of this call are done."""
        now, done = time.monotonic(), row.start + done
        if done > row.done:
            row.timed, row.seconds = row.timed + done - row.done, row.seconds + now - row.time
            row.done, row.time, row.text, row.steps = done, now, text, max(row.steps, done)
            if now - self.shown >= (_MOMENT if self.bars else _SECONDS):
                self.draw(row)

    def seconds_left(self) -> float | None:
        """Of all rows, by the pace of each or else of all; None if nobody knows."""
        known = [row for row in self.rows.values() if row.work and row.timed]
        pace = sum(row.seconds for row in known) / sum(row.work * row.timed for row in known) if known else 0.0
        total = 0.0
        for row in self.rows.values():
            step = row.seconds / row.timed if row.timed else row.work * pace
            if row.done < row.steps and not step:
                return None
            total += (row.steps - row.done) * step
        return total

    def draw(self, row: Row, last: bool = False) -> None:
        """Show the bars, or the row as a line, if somebody is there to see them."""
        left, rows, self.shown = self.seconds_left(), [*self.rows.values()], time.monotonic()
        whole, ends = [it for it in rows if it.work], f"{clock(left)} left" if left and left >= 0.5 else ""
        text = ", ".join(filter(None, [row.text, "" if whole and self.bars else ends]))
        with contextlib.suppress(OSError):  # a run goes on without its terminal
            if self.lines and row.done and (row.text or not last):
                words = filter(None, [f"{row.done} of {row.steps}", text])
                print(f"{row.name}: {', '.join(words)}", file=sys.stderr, flush=True)
            for number, it in enumerate(rows):
                self._bar(number, it.name, it.done, it.steps, f"{it.done}/{it.steps}", text if it is row else it.text)
            if whole:
                done, total = sum(it.work * it.done for it in whole), sum(it.work * it.steps for it in whole)
                self._bar(len(rows), "in all", done, total, f"{done / total:.0%}", ends)
            if self.bars:
                self.bars.refresh()

    def _bar(self, number: int, name: str, done: float, steps: float, count: str, text: str) -> None:
        if self.bars is not None:
            self.bars.start()
            if number == len(self.bars.task_ids):
                self.bars.add_task("", count="", text="")
            how: dict[str, Any] = {"description": name, "completed": done, "total": steps, "count": count, "text": text}
            self.bars.update(self.bars.task_ids[number], **how)


_CURRENT: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def showing(wanted: bool | None = None, lines: bool = False) -> Iterator[None]:
    """While entered, phases are rows of one job.

    wanted: None: in a terminal or notebook. lines: elsewhere as plain lines.
    """
    if _CURRENT.get() is not None and wanted is not False:  # part of a larger job
        yield
        return
    silent, console = wanted is False or not current().first, Console(stderr=True)
    fit = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    fit |= console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    progress = Progress(console if fit and not silent else None, not fit and not silent and bool(wanted or lines))
    before = _CURRENT.set(progress)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if progress.bars:
                progress.bars.stop()
        _CURRENT.reset(before)


def shown(call: Callable[P, T]) -> Callable[P, T]:
    """A function whose phases are shown, as `progress` of its runtime says."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with showing(getattr(kwargs.get("runtime"), "progress", None)):
            return call(*args, **kwargs)

    return wrapped


def plan(rows: Iterable[Row]) -> None:
    """Add phases that are to come, so that the time left is that of the whole job."""
    if progress := _CURRENT.get():
        for row in rows:
            progress.rows.pop(row.name, None)  # a test of the given model, which came before
            progress.rows[row.name] = row


@contextlib.contextmanager
def phase(name: str, steps: int, done: int = 0) -> Iterator[Update]:
    """A phase of the job; what is yielded is told how many of its steps are done, `done` of them before."""
    progress = _CURRENT.get()
    if progress is None:
        yield lambda done, text="": None
        return
    row = progress.begin(Row(name, steps, done=done))
    yield functools.partial(progress.update, row)
    if row.done > row.start + done:
        progress.draw(row, last=True)


def each(name: str, items: Iterable[T]) -> Iterator[T]:
    """The items, as the steps of a phase."""
    with phase(name, length_hint(items)) as update:
        for number, item in enumerate(items, start=1):
            yield item
            update(number)


def overdue(read: float, device: torch.device) -> bool:
    """True a second after records were last read, where that needs no other device or rank to wait."""
    return device.type == "cpu" and current().size == 1 and time.monotonic() - read >= 1.0
