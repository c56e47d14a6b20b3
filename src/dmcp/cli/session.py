"""One command at work: ranks, run folder, signals, progress."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import nn

from dmcp.batches import device_of, generator
from dmcp.budget import LATENCY, MEMORY, costs, parse, show_cost
from dmcp.checkpoint import Checkpointer
from dmcp.cli.config import FACTS, Plan, facts_of
from dmcp.cli.job import Corrupt, Job, Opened, Replaced, open_job
from dmcp.data.check import no_images
from dmcp.data.datasets import FolderSet, finds_all, preprocessing
from dmcp.errors import DataError, DmcpError, FileError, StoppedError, TrainingError
from dmcp.latency.table import LATENCY_FILE, Latency
from dmcp.preflight import check_classifier, check_finite, check_input
from dmcp.pruning import PruneResult
from dmcp.report.trackers import Tracker, open_tracker
from dmcp.results import DMCP, ORIGINAL, UNPRUNED, milliseconds, mostly_odd, not_faster
from dmcp.retraining import DivergenceWarning
from dmcp.runs import REPLACED, SETTINGS, Run, open_run, read_json, refuse_taken
from dmcp.runtime.distributed import World, join, leave, share_tensors, sum_values
from dmcp.runtime.io import Lock
from dmcp.searching.config import SearchRecord
from dmcp.settings import Engine
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Event, Runtime, StepRecord
from dmcp.units import FS_PER_MS, counted
from dmcp.widths import Widths

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


INPUT = "input.json"  # how images become inputs: see docs/data.md
_LONGEST = 4096  # bytes of a path


@dataclass(frozen=True, eq=False)
class Session:
    """What a command works with."""

    plan: Plan
    world: World
    opened: Opened
    run: Run
    progress: Progress
    tracker: Tracker
    asked_to_stop: Callable[[], bool]
    noted: dict[str, set[str]] = field(default_factory=dict)  # replaced image files that are in the run folder

    @property
    def runtime(self) -> Runtime:
        """Engine, checkpoints and log of the run."""
        return Runtime(engine=self.plan.engine, checkpointer=self.checkpointer, on_event=self.on_event)

    @property
    def checkpointer(self) -> Checkpointer:
        """What saves the state of the stages."""
        plan = self.plan.to_json() | {"options": {}}
        plan["job"].pop("workers")  # how many processes decode images changes nothing
        # nor do broken ones that are skipped from now on: up to here there were none
        plan["job"]["corrupt"] = self.plan.options.get("corrupt", self.plan.job.corrupt)
        identity = {"plan": plan} | {name: fact for name, fact in facts_of(self.opened).items() if name in FACTS}
        return self.run.checkpointer(
            identity,
            every_steps=self.plan.every_steps,
            every_seconds=60 * self.plan.every_minutes,
            stop_requested=self.asked_to_stop,
            warn=say,
        )

    def on_event(self, event: Event) -> None:
        """Log and show what happens; only the first rank does, but each has image files of its own."""
        self._note_replaced()
        if self.world.first:
            self.run.on_event(event)
            self.progress.on_event(event)
            self.tracker.on_event(event)

    def replaced(self) -> Replaced:
        """Image files that were replaced, on all ranks and in all sittings; all ranks must ask, the first one knows."""
        self._note_replaced()
        own, world = self.opened.loaders.replaced, self.world
        if not isinstance(self.opened.data.train, FolderSet) or not isinstance(self.opened.data.test, FolderSet):
            return own
        parts = {"train": self.opened.data.train.paths, "test": self.opened.data.test.paths}
        found: list[frozenset[str]] = []
        for (part, paths), mine in zip(parts.items(), own, strict=True):
            times = sum_values(torch.tensor([path in mine for path in paths], dtype=torch.int64), world)
            of_all = {path for path, count in zip(paths, times.tolist(), strict=True) if count}
            found.append(frozenset(of_all | self.run.replaced(part)))
        every = Replaced(*found)
        if world.first and any(every):  # each once: several ranks may have noted the same one
            facts = ({"part": part, "file": file} for part, files in every._asdict().items() for file in sorted(files))
            self.run.write(REPLACED, "".join(f"{json.dumps(fact)}\n" for fact in facts))
        return every

    def describe_replaced(self, replaced: Replaced) -> list[str]:
        """What the report says about them, if there are any."""
        told = replaced.describe(len(self.opened.data.train), len(self.opened.data.test))
        return [f"{told} Their names are in {REPLACED}."] if told else []

    def _note_replaced(self) -> None:
        """Keep what a kill would make forgotten; another rank may be where the folder is not."""
        for part, files in self.opened.loaders.replaced._asdict().items():
            known = self.noted.setdefault(part, set())
            if (new := files - known) and self.run.folder.is_dir():
                self.run.note_replaced(part, new - self.run.replaced(part))
                known |= new


def say(text: str) -> None:
    """Tell the person at the terminal; results go to stdout, this does not."""
    print(text, file=sys.stderr, flush=True)


def tell_notices(*opened: Opened) -> None:
    """Say what a person may not know about data and networks, each sentence once."""
    for text in dict.fromkeys(text for one in opened for text in one.notices):
        say(text)


def tell_ignored(engine: Engine, place: torch.device) -> None:
    """Say what was asked for that the device cannot do; that it chooses itself without being asked is no news."""
    asked = {
        "CUDA graphs run on": ("--graphs", engine.graphs),
        "Own kernels run on": ("--kernels", engine.kernels),
        "Rounder widths are for": ("--pad", engine.pad),
    }
    for what, (option, wanted) in asked.items():
        if wanted and place.type != "cuda":
            say(f"{what} GPUs only: {option} changes nothing on {place.type}.")


@contextlib.contextmanager
def session(
    plan: Plan,
    folder: Path,
    resume: bool,
    quiet: bool,
    check: Callable[[Opened], Opened] | None = None,
    told: bool = False,
) -> Iterator[Session]:
    """Meet the other ranks, open model and data, take the run folder.

    `check` may still refuse before it is written, and gives back what it was given, or that with a table of latency.
    told: whether the command that has started this one has said what a person may not know.
    """
    world = join(plan.job.device)
    begun = False
    try:
        with contextlib.ExitStack() as undo:
            asked = undo.enter_context(_signals())
            if world.size > 1 and plan.job.place.type == "cuda":
                torch.cuda.set_device(plan.job.place)
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DivergenceWarning)  # the command says it at its end
            opened = open_job(plan.job)
            check_given(opened)
            if not plan.cell:  # the command that starts the cells has looked
                check_test_files(opened, plan.job, resume)
            if world.first and not resume:
                refuse_taken(folder)  # before anything is measured
            if check:
                opened = check(opened)
            folder = Path(_share_text(str(folder), world))
            run = Run(folder)
            if world.first:
                run = _take(plan, opened, folder, resume, undo)
            tracker = undo.enter_context(_track(plan, opened, folder) if world.first else Tracker())
            progress = undo.enter_context(Progress(quiet or not world.first))
            here = Session(plan, world, opened, run, progress, tracker, asked)
            _describe(here, quiet, told)
            begun = True
            yield here
    except torch.OutOfMemoryError as error:
        batch = max(plan.job.batch, plan.job.train_batch)
        saved = (
            f" The run goes on with dmcp {plan.command} --resume {shlex.quote(str(folder))} on a larger one."
            if resume
            else ""
        )
        raise TrainingError(
            f"The device ran out of memory with a batch of {batch}: try --batch {max(1, batch // 2)}.{saved}"
        ) from error
    except StoppedError as error:
        if not begun:
            raise
        raise StoppedError(f"{error} Go on with: dmcp {plan.command} --resume {shlex.quote(str(folder))}") from None
    except DataError as error:
        if not begun or not folder.is_dir():  # a new run that failed before its first step is gone
            raise
        raise DataError(
            f"{error} What is done so far is kept: remove no files now, and go on with: dmcp {plan.command} --resume "
            f"{shlex.quote(str(folder))}"
        ) from error
    finally:
        leave()


def check_given(opened: Opened) -> None:
    """Refuse a network that is no classifier of these images, or whose numbers are none."""
    model, data = opened.model, opened.data
    noise = torch.randn(2, *data.shape, generator=generator(0)).to(device_of(model))
    check_classifier(model, noise, data.classes)
    check_finite(model, noise)
    check_input(model, noise)
    if opened.teacher is not None:
        check_finite(opened.teacher, noise, "teacher")


def check_test_files(opened: Opened, job: Job, resume: bool = False, skips: bool = True) -> None:
    """Refuse test images that are none now: they are read when all is trained. Their first bytes tell, at little cost.

    skips: whether the command has --corrupt.
    """
    test = opened.data.test
    found = no_images(test) if isinstance(test, FolderSet) else []
    broken = [it for it in found if it.refused or job.corrupt is not Corrupt.SKIP]
    if not broken or not isinstance(test, FolderSet):
        return
    several = len(broken) > 1
    count = f" and {len(broken) - 1} more of the {len(test):,} test images" if several else ", a test image,"
    way = "put sound files in their place" if several else "put a sound file in its place"
    if not resume:
        way = f"repair or remove {'them' if several else 'it'}"
    skip = f", or {'go on' if resume else 'skip such files'} with --corrupt skip" if skips else ""
    skip = "" if any(it.refused for it in broken) else skip  # which would end there when all is trained
    raise DataError(f"{broken[0].file} ({broken[0].reason}){count} cannot be read: {way}{skip}.{finds_all(test.root)}")


def _take(plan: Plan, opened: Opened, folder: Path, resume: bool, undo: contextlib.ExitStack) -> Run:
    """The run folder: a new one with its settings, or an old one, back at its last checkpoint."""
    facts = facts_of(opened)
    if not resume:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        run = open_run(folder)
        undo.push(lambda kind, error, trace: _give_up(folder, made) if error else None)
        undo.enter_context(Lock(folder))
        run.write(SETTINGS, plan.to_json() | facts | {"argv": sys.argv})
        run.write(INPUT, preprocessing(opened.data))
        if (table := Latency.of(opened.graph)) is not None:
            run.write(LATENCY_FILE, table.to_json())
        return run
    run = Run(folder)
    _refuse_done(run)  # also where nothing can be written, not even a lock
    undo.enter_context(Lock(folder))
    stored = read_json(folder / SETTINGS)
    for name in FACTS:
        if stored.get(name) != facts.get(name):
            what = name if name in ("data", "teacher") else "network"
            files = what == "data" and isinstance(opened.data.train, FolderSet)
            way = " Put files back that were removed; --corrupt skip passes over broken ones." if files else ""
            raise FileError(
                f"{folder}: the {what} is not what it was: {name} was {stored.get(name)}, is {facts.get(name)}.{way}"
            )
    _refuse_done(run)  # by the process that has held the lock until now
    run.rewind()
    if stored["job"].get("corrupt", Corrupt.STOP) != plan.job.corrupt:
        # for the next time; `options` has what it was begun with
        run.write(SETTINGS, stored | {"job": stored["job"] | {"corrupt": plan.job.corrupt}})
    return run


def _refuse_done(run: Run) -> None:
    if run.done:
        raise FileError(f"{run.folder}: this run is done; dmcp report {shlex.quote(str(run.folder))} shows it.")


def _give_up(folder: Path, made: Sequence[Path]) -> None:
    """Remove a new run that failed before its first step: the folder is then free for the corrected command."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {SETTINGS, INPUT, LATENCY_FILE}:
            for name in (SETTINGS, INPUT, LATENCY_FILE):
                (folder / name).unlink(missing_ok=True)
            for path in made:
                path.rmdir()


def _track(plan: Plan, opened: Opened, folder: Path) -> Tracker:
    """What also sends the curves elsewhere, if it was asked for."""
    limits = parse(plan.search.budget, opened.graph).limits if plan.search else ()
    return open_tracker(plan.options.get("track") or (), folder, plan.to_json(), [limit.kind for limit in limits])


def _describe(here: Session, quiet: bool, told: bool) -> None:
    """State what a person may not know, then the batch and the learning rates, of all ranks together."""
    plan, world = here.plan, here.world
    if world.first and not told:
        tell_notices(here.opened)
        tell_ignored(plan.engine, plan.job.place)
    if quiet or not world.first:
        return
    shares = f" on {world.size} ranks" if world.size > 1 else ""
    if plan.search:
        scale = plan.job.batch * plan.search.accumulate / plan.search.reference_batch
        rates = f"{scale * plan.search.lr:.4g} to {scale * plan.search.min_lr:.4g}"
        say(f"search: batch {plan.job.batch}{shares}, learning rate {rates}, of the alphas {plan.search.alpha_lr:.4g}")
    if plan.train:
        batch = plan.job.train_batch or plan.job.batch
        scale = batch / plan.train.reference_batch if plan.train.reference_batch else 1.0
        say(f"training: batch {batch}{shares}, highest learning rate {scale * plan.train.lr:.4g}")


def _share_text(text: str, world: World) -> str:
    """The text of rank 0."""
    raw = text.encode().ljust(_LONGEST, b"\0")
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    share_tensors([buffer], world)
    return bytes(buffer.tolist()).rstrip(b"\0").decode()


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C are remembered, not obeyed; the second Ctrl-C is obeyed."""
    asked: list[int] = []
    owner = os.getpid()

    def note(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # one that reads images, and has this by fork
            return
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not asked:
            say("asked to stop: the step is finished and saved first")
        asked.append(number)

    with _handled_by(note):
        yield lambda: bool(asked)


@contextlib.contextmanager
def obeying(text: str) -> Iterator[None]:
    """SIGTERM and Ctrl-C are obeyed at once, with this text: there is nothing to save meanwhile."""

    def stop(number: int, frame: Any) -> None:
        raise StoppedError(text)

    with _handled_by(stop):
        yield


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Mapping[int, Any] = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


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
    before = times.get(UNPRUNED, times.get(ORIGINAL))
    now = times[DMCP]
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
