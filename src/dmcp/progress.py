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
from typing import Any, ParamSpec, TextIO, TypeVar

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
    """A phase. Work is counted in training steps of the unpruned network."""

    name: str
    steps: int
    work: float = 0.0  # of a step; 0: not comparable with that of other phases
    light: int = 0  # first steps that have less work by half a training step: the warm-up of a search
    done: int = 0
    text: str = ""
    start: int = 0  # steps that were done before the current call
    measured: float = 0.0  # work that took these seconds, in this process
    seconds: float = 0.0
    time: float = 0.0  # of the last step

    def work_until(self, step: int) -> float:
        """Of the first steps."""
        return (self.work or 1.0) * step - min(step, self.light) / 2

    @property
    def left(self) -> float:
        """Work that is left."""
        return self.work_until(self.steps) - self.work_until(self.done)


class Progress:
    """The phases of a job on stderr."""

    def __init__(self, console: Console | None, lines: bool = False) -> None:
        self.rows: dict[str, Row] = {}
        self.lines, self.shown = lines, time.monotonic()
        self.bars: bars.Progress | None = None
        if console is not None:
            text = bars.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True))
            name = bars.TextColumn("{task.description}", markup=False)
            columns = (
                name,
                bars.BarColumn(20, table_column=Column(min_width=12)),
                bars.TextColumn("{task.fields[count]}"),
                text,
            )
            # no thread draws them: workers are forked meanwhile
            self.bars = bars.Progress(
                *columns, console=console, auto_refresh=False, redirect_stdout=_is_terminal(sys.stdout)
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
            row.measured += row.work_until(done) - row.work_until(row.done)
            row.seconds += now - row.time
            row.done, row.time, row.text, row.steps = done, now, text, max(row.steps, done)
            if now - self.shown >= (_MOMENT if self.bars else _SECONDS):
                self.draw(row)

    def seconds_left(self) -> float | None:
        """Of all rows, by the pace of each or else of all; None if nobody knows."""
        known = [row for row in self.rows.values() if row.work and row.measured]
        pace = sum(row.seconds for row in known) / sum(row.measured for row in known) if known else None
        total = 0.0
        for row in self.rows.values():
            own = row.seconds / row.measured if row.measured else pace if row.work else None
            if row.left > 0 and own is None:
                return None
            total += row.left * (own or 0.0)
        return total

    def draw(self, row: Row, last: bool = False) -> None:
        """Show the bars, or the row as a line, if somebody is there to see them."""
        with contextlib.suppress(OSError):
            self._draw(row, last)

    def _draw(self, row: Row, last: bool) -> None:
        left, rows, self.shown = self.seconds_left(), [*self.rows.values()], time.monotonic()
        whole, ends = [it for it in rows if it.work], f"{clock(left)} left" if left and left >= 0.5 else ""
        text = ", ".join(filter(None, [row.text, "" if whole and self.bars else ends]))
        if self.lines and row.done and (row.text or not last):
            words = filter(None, [f"{row.done} of {row.steps}", text])
            print(f"{row.name}: {', '.join(words)}", file=sys.stderr, flush=True)
        if self.bars is None:
            return
        shown: list[tuple[str, float, float, str, str]] = [
            (it.name, it.done, it.steps, f"{it.done}/{it.steps}", text if it is row else it.text) for it in rows
        ]
        if whole:
            total, rest = sum(it.work_until(it.steps) for it in whole), sum(it.left for it in whole)
            shown.append(("in all", total - rest, total, f"{1 - rest / total:.0%}", ends))
        for number, (name, done, steps, count, text) in enumerate(shown):
            if number == len(self.bars.task_ids):
                self.bars.add_task("", count="", text="", visible=False)
            how: dict[str, Any] = {"description": name, "completed": done, "total": steps, "visible": True}
            self.bars.update(self.bars.task_ids[number], count=count, text=text, **how)
        self.bars.refresh()


def _is_terminal(file: TextIO | None) -> bool:
    return file is not None and file.isatty()


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
    fit = _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
    fit |= console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    progress = Progress(console if fit and not silent else None, not fit and not silent and bool(wanted or lines))
    before, gone = _CURRENT.set(progress), contextlib.suppress(OSError)  # a run goes on without its terminal
    try:
        with gone:
            if progress.bars:
                progress.bars.start()
        yield
    finally:
        with gone:
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
            old = progress.rows.pop(row.name, row)
            progress.rows[row.name] = row
            if old is not row:  # a test of the given model comes before all else
                row.steps, row.done, row.seconds = row.steps + old.done, old.done, old.seconds
                row.measured = row.work_until(row.done)


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
