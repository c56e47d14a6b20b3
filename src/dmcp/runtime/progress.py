"""Progress of a job: bars in a terminal or notebook, elsewhere a line of text now and then, and the time left."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from operator import length_hint
from typing import ParamSpec, TypeVar

import torch
from rich import progress as bars
from rich.console import Console
from rich.table import Column

from dmcp.runtime.distributed import current
from dmcp.units import show_duration

P = ParamSpec("P")
T = TypeVar("T")
Update = Callable[..., None]  # (steps done, text)
_SECONDS_BETWEEN_DRAWINGS = 0.2  # of the bars
_SECONDS_BETWEEN_READS = 1.0  # of records on the CPU
_LONG = 300.0  # seconds of a phase that it is worth to know how to do without


@dataclass(frozen=True)
class Lines:
    """How often a job prints a line of text, where there are no bars."""

    seconds: float
    at_ends: bool  # also when a phase ends


_BY_DEFAULT = Lines(seconds=30.0, at_ends=False)  # a job of a few seconds prints nothing
_IF_ASKED = Lines(seconds=10.0, at_ends=True)  # by progress=True, and in all commands


def show_nothing(done: int, text: str = "") -> None:
    """The update of a phase that nobody watches."""


@dataclass(eq=False)
class Phase:
    """A phase of a job."""

    name: str
    steps: int
    work: float = 0.0  # of a step, in training steps of the unpruned network; 0: not comparable with other phases
    done: int = 0
    text: str = ""
    start: int = 0  # steps that were done before the current call
    timed: int = 0  # steps that this process has timed, and the seconds that they took
    seconds: float = 0.0
    time: float = 0.0  # when the last step ended


@dataclass(frozen=True)
class Avoidable:
    """A phase that a job can do without."""

    phase: str
    remedy: str  # what does without it


class Progress:
    """The phases of a job, shown on stderr."""

    def __init__(self, console: Console | None, lines: Lines | None = None) -> None:
        self.phases: dict[str, Phase] = {}
        self.lines = lines
        self.avoidable: Avoidable | None = None  # until it was said
        self.last_shown = time.monotonic()
        self.bars: bars.Progress | None = None
        if console is not None:
            # not drawn by a thread, since worker processes are forked meanwhile
            self.bars = bars.Progress(
                bars.TextColumn("{task.description}", markup=False),
                bars.BarColumn(20, table_column=Column(min_width=12)),
                bars.TextColumn("{task.fields[count]}"),
                bars.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
                console=console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
            )

    def begin(self, new_phase: Phase) -> Phase:
        """Add a phase, or more steps to the phase of this name. Its `done` steps were done by an earlier process."""
        phase = self.phases.setdefault(new_phase.name, new_phase)
        phase.start = 0 if phase is new_phase else phase.done
        phase.steps = max(phase.steps, phase.start + new_phase.steps)
        phase.done = phase.start + new_phase.done
        phase.time = time.monotonic()
        if self.bars:
            self.draw(phase)
        return phase

    def update(self, phase: Phase, done: int, text: str = "") -> None:
        """Note that so many steps of the current call are done."""
        now = time.monotonic()
        done += phase.start
        if done <= phase.done:
            return
        phase.timed += done - phase.done
        phase.seconds += now - phase.time
        phase.done = done
        phase.time = now
        phase.text = text
        phase.steps = max(phase.steps, done)
        if self.avoidable is not None and self.avoidable.phase == phase.name:
            self._announce(phase, self.avoidable.remedy)
            self.avoidable = None
        seconds = math.inf
        if self.bars:
            seconds = _SECONDS_BETWEEN_DRAWINGS
        elif self.lines:
            seconds = self.lines.seconds
        if now - self.last_shown >= seconds:
            self.draw(phase)

    def seconds_left(self) -> float | None:
        """Seconds that all phases still need; None if that cannot be known.

        A phase that has not begun is expected to be as fast for its work as the phases that have.
        """
        timed = [phase for phase in self.phases.values() if phase.work and phase.timed]
        seconds_per_work = 0.0
        if timed:
            seconds_per_work = sum(phase.seconds for phase in timed) / sum(phase.work * phase.timed for phase in timed)
        total = 0.0
        for phase in self.phases.values():
            if phase.timed:
                seconds_per_step = phase.seconds / phase.timed
            else:
                seconds_per_step = phase.work * seconds_per_work
            if phase.done < phase.steps and not seconds_per_step:
                return None
            total += (phase.steps - phase.done) * seconds_per_step
        return total

    def _announce(self, phase: Phase, remedy: str) -> None:
        """Say how long the job takes if this phase is a long one, and how long it takes without it."""
        total = self.seconds_left()
        of_phase = (phase.steps - phase.done) * phase.seconds / phase.timed
        if total is None or of_phase < _LONG:
            return
        text = (
            f"This takes about {show_duration(total)}, {show_duration(of_phase)} of it for the {phase.name}. "
            f"Without it, {remedy} takes about {show_duration(total - of_phase)}."
        )
        with contextlib.suppress(OSError):
            if self.lines:
                print(text, file=sys.stderr, flush=True)
            if self.bars:
                self.bars.console.print(text, markup=False, highlight=False)

    def draw(self, phase: Phase, last: bool = False) -> None:
        """Show this phase as a line, or all phases as bars, whichever there is."""
        if last and self.lines and not self.lines.at_ends:
            return
        self.last_shown = time.monotonic()
        left = self.seconds_left()
        time_left = ""
        if left and left >= 0.5:
            time_left = f"{show_duration(left)} left"
        comparable = [listed for listed in self.phases.values() if listed.work]
        parts = [phase.text]
        if not (comparable and self.bars):  # otherwise the bar of the whole job shows it
            parts.append(time_left)
        text = ", ".join(filter(None, parts))
        with contextlib.suppress(OSError):  # a run goes on without its terminal
            if self.lines and phase.done and (phase.text or not last):
                words = ", ".join(filter(None, [f"{phase.done} of {phase.steps}", text]))
                print(f"{phase.name}: {words}", file=sys.stderr, flush=True)
            if self.bars:
                self._draw_bars(self.bars, phase, text, comparable, time_left)

    def _draw_bars(
        self, shown_bars: bars.Progress, phase: Phase, text: str, comparable: list[Phase], time_left: str
    ) -> None:
        """Draw a bar for each phase, and one for the work of all phases whose work is comparable."""
        for number, listed in enumerate(self.phases.values()):
            count = f"{listed.done}/{listed.steps}"
            listed_text = listed.text
            if listed is phase:
                listed_text = text
            _set_bar(shown_bars, number, listed.name, listed.done, listed.steps, count, listed_text)
        if comparable:
            done = sum(listed.work * listed.done for listed in comparable)
            total = sum(listed.work * listed.steps for listed in comparable)
            _set_bar(shown_bars, len(self.phases), "total", done, total, f"{done / total:.0%}", time_left)
        shown_bars.refresh()


def _set_bar(
    shown_bars: bars.Progress, number: int, name: str, done: float, steps: float, count: str, text: str
) -> None:
    """Set the bar of this number; a new one is added below the others."""
    shown_bars.start()
    if number == len(shown_bars.task_ids):
        shown_bars.add_task("", count="", text="")
    task = shown_bars.task_ids[number]
    shown_bars.update(task, description=name, completed=done, total=steps, count=count, text=text)


_CURRENT: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def showing(progress: bool | None = None) -> Iterator[None]:
    """While entered, all phases belong to one job.

    progress: False shows nothing. Otherwise they are bars in a terminal or notebook, and lines of text elsewhere: for
    None a line every 30 seconds, for True a line every 10 seconds and one at the end of each phase.
    """
    if _CURRENT.get() is not None and progress is not False:  # part of a larger job
        yield
        return
    silent = progress is False or not current().first
    console = Console(stderr=True)
    has_bars = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None:
        has_bars = True
    if silent:
        job = Progress(None)
    elif has_bars:
        job = Progress(console)
    elif progress:
        job = Progress(None, _IF_ASKED)
    else:
        job = Progress(None, _BY_DEFAULT)
    token = _CURRENT.set(job)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if job.bars:
                job.bars.stop()
        _CURRENT.reset(token)


def shown(call: Callable[P, T]) -> Callable[P, T]:
    """Show the phases of a function, as `progress` of its argument `runtime` says."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with showing(getattr(kwargs.get("runtime"), "progress", None)):
            return call(*args, **kwargs)

    return wrapped


def plan(phases: Iterable[Phase], avoidable: Avoidable | None = None) -> None:
    """Add phases that are to come, so that the time left is that of the whole job.

    avoidable: if this phase is a long one, the first line says so, and what does without it.
    """
    job = _CURRENT.get()
    if job is None:
        return
    job.avoidable = avoidable
    for phase_to_come in phases:
        job.phases.pop(phase_to_come.name, None)  # such as the test of the model before the search
        job.phases[phase_to_come.name] = phase_to_come


@contextlib.contextmanager
def phase(name: str, steps: int, done: int = 0) -> Iterator[Update]:
    """A phase of the job, `done` of whose steps were done before; call what is yielded with the steps that are done."""
    job = _CURRENT.get()
    if job is None:
        yield show_nothing
        return
    begun = job.begin(Phase(name, steps, done=done))
    yield functools.partial(job.update, begun)
    if begun.done > begun.start + done:
        job.draw(begun, last=True)


def each(name: str, items: Iterable[T]) -> Iterator[T]:
    """The items, as the steps of a phase."""
    with phase(name, length_hint(items)) as update:
        for number, item in enumerate(items, start=1):
            yield item
            update(number)


def overdue(last_read: float, device: torch.device) -> bool:
    """True a second after records were read, or half a minute on a GPU; several ranks read in the same steps."""
    if current().size > 1:
        return False
    seconds = _BY_DEFAULT.seconds  # each read makes a GPU wait
    if device.type == "cpu":
        seconds = _SECONDS_BETWEEN_READS
    return time.monotonic() - last_read >= seconds
