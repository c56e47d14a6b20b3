"""One command at work: ranks, run folder, signals, progress, and what is printed at the end."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dmcp import __version__
from dmcp.batches import device_of, generator
from dmcp.budget import LATENCY, MEMORY, costs, parse, show_cost
from dmcp.cli.config import Request, RunConfig
from dmcp.cli.job import Job, Replaced, check_names, open_job, place_of
from dmcp.cli.launch import following_parent, has_parent
from dmcp.data.check import no_images
from dmcp.data.datasets import FolderSet, finds_all, preprocessing
from dmcp.errors import DataError, FileError, StoppedError, TrainingError
from dmcp.latency.table import LATENCY_FILE, Latency
from dmcp.preflight import check_classifier, check_finite, check_input
from dmcp.report.trackers import Tracker, open_tracker, read_kinds
from dmcp.retraining import DivergenceWarning
from dmcp.runs import REPLACED, SETTINGS, Run, free_folder, open_run, read_json, refuse_taken, slug
from dmcp.runtime.distributed import World, join, leave, share_tensors, sum_values
from dmcp.runtime.io import Lock
from dmcp.searching.config import SearchRecord
from dmcp.settings import Corrupt
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Event, Runtime, StepRecord
from dmcp.units import FS_PER_MS, counted
from dmcp.widths import Widths

INPUT = "input.json"  # how images become inputs
_SECONDS = 10.0  # between two plain lines of progress
_MOMENT = 0.1  # between two counts
_LONGEST = 4096  # bytes of a path


def log(text: str) -> None:
    """One line on stderr: stdout has the results."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """Shows steps on stderr: a line that moves on a terminal, else a line now and then."""

    def __init__(self, quiet: bool = False) -> None:
        console = Console(stderr=True, highlight=False)
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal and not quiet else None
        self.quiet = quiet
        self.stage, self.done = "", 0
        self.start = self.shown = self.time = time.monotonic()

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def on_event(self, event: Event) -> None:
        """Show a step; results are shown by the command at its end."""
        if not self.quiet and isinstance(event.record, SearchRecord | StepRecord):
            self._show(event.stage, "step ", event.record.step + 1, event.steps, f", {_losses(event.record)}")

    def count(self, stage: str, done: int, total: int, noun: str) -> None:
        """Show how many of some things are done; they may be fast, and a terminal is not."""
        if stage != self.stage:
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
            log(line)
            self.shown = now

    def _left(self, steps: int, now: float) -> str:
        """By the step before: records come in bundles, whose first one says little about the time of a step."""
        if not self.done:
            return ""
        left = (self.time - self.start) / self.done * (steps - self.done) - (now - self.time)
        return f", {clock(max(left, 0.0))} left"


def _losses(record: SearchRecord | StepRecord) -> str:
    if isinstance(record, StepRecord):
        return f"loss {record.loss:.3f}"
    parts = [f"loss {record.weight_losses[0]:.3f}"] if record.weight_losses else []
    parts += [f"soft loss {record.task_loss:.3f}"] if record.task_loss is not None else []
    shares = " and ".join(f"{ratio:.1%}" for ratio in record.ratios or ())
    return ", ".join([*parts, f"expected cost {shares} of the budget" if shares else "warm-up"])


def clock(seconds: float) -> str:
    """5 s, 3 min 20 s, 2 h 05 min"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


@dataclass(frozen=True, eq=False)
class Session:
    """What a command works with."""

    config: RunConfig
    world: World
    job: Job
    run: Run
    progress: Progress
    tracker: Tracker
    asked_to_stop: Callable[[], bool]
    noted: dict[str, set[str]] = field(default_factory=dict)  # replaced image files that are in the run folder

    @functools.cached_property
    def runtime(self) -> Runtime:
        """Engine, checkpoints and events of this run."""
        config = replace(self.config, workers=None, corrupt=Corrupt.STOP, track=())  # they change no result
        checkpointer = self.run.checkpointer(
            {"config": config.to_json()} | self.job.identity,
            every_steps=config.save_steps,
            every_seconds=60 * config.save_minutes,
            stop_requested=self.asked_to_stop,
            warn=log,
        )
        return Runtime(engine=self.config.engine, checkpointer=checkpointer, on_event=self.on_event)

    def on_event(self, event: Event) -> None:
        """Log and show what happens on rank 0; each rank has image files of its own."""
        self._note_replaced()
        if self.world.first:
            self.run.on_event(event)
            self.progress.on_event(event)
            self.tracker.on_event(event)

    def replaced(self) -> Replaced:
        """Image files that were replaced, on all ranks and before each interruption; all ranks must call it."""
        self._note_replaced()
        own, data = self.job.loaders.replaced, self.job.data
        if not isinstance(data.train, FolderSet) or not isinstance(data.test, FolderSet):
            return own
        found: list[frozenset[str]] = []
        for part, paths, mine in (("train", data.train.paths, own.train), ("test", data.test.paths, own.test)):
            times = sum_values(torch.tensor([path in mine for path in paths], dtype=torch.int64), self.world)
            of_all = {path for path, count in zip(paths, times.tolist(), strict=True) if count}
            found.append(frozenset(of_all | self.run.replaced(part)))
        every = Replaced(*found)
        if self.world.first and any(every):  # each once: several ranks may have noted the same one
            facts = ({"part": part, "file": file} for part, files in every._asdict().items() for file in sorted(files))
            self.run.write(REPLACED, "".join(f"{json.dumps(fact)}\n" for fact in facts))
        return every

    def describe_replaced(self, replaced: Replaced) -> list[str]:
        """What the report says about them, if there are any."""
        text = replaced.describe(len(self.job.data.train), len(self.job.data.test))
        return [f"{text} Their names are in {REPLACED}."] if text else []

    def _note_replaced(self) -> None:
        """Write their names at once: a killed run does not forget them."""
        for part, files in self.job.loaders.replaced._asdict().items():
            known = self.noted.setdefault(part, set())
            if (new := files - known) and self.run.folder.is_dir():  # another rank may be where the folder is not
                self.run.note_replaced(part, new - self.run.replaced(part))
                known |= new


@contextlib.contextmanager
def session(
    config: RunConfig, request: Request, check: Callable[[Job], Job] = lambda job: job, whole: bool = True
) -> Iterator[Session]:
    """Meet the other ranks, open model and data, take the run folder.

    check: may refuse before anything is written, and gives the job back, or that with a table of latency.
    whole: look at data and network as a person should; False where the command that has started this one did.
    """
    resume, folder = bool(request.resume), run_folder(config, request)
    read_kinds(config.track)  # refuses what is not installed
    world, begun = join(config.device), False
    again = f"dmcp {config.command} --resume {shlex.quote(str(folder))}"
    try:
        with contextlib.ExitStack() as undo:
            asked = undo.enter_context(_signals())
            undo.enter_context(following_parent())
            if world.size > 1 and place_of(config).type == "cuda":
                torch.cuda.set_device(place_of(config))
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DivergenceWarning)  # the command says it at its end
            if resume:
                check_names(folder, config, "model", "data", "weights", "teacher", "teacher_model")
            job = open_job(config)
            check_job(job, config, resume=resume, files=whole)
            if world.first and not resume:
                refuse_taken(folder)  # before anything is measured
            job = check(job)
            folder = Path(_share_text(str(folder), world))
            run = _take(config, job, folder, resume, undo) if world.first else Run(folder)
            tracker = undo.enter_context(_track(config, job, folder) if world.first else Tracker())
            progress = undo.enter_context(Progress(request.quiet or not world.first))
            if world.first and whole and not has_parent():
                log_notes(job, config)
            if world.first and not request.quiet:
                _log_rates(config, world)
            begun = True
            yield Session(config, world, job, run, progress, tracker, asked)
    except torch.OutOfMemoryError as error:
        batch = max(config.batch, config.train_batch)
        raise TrainingError(
            f"The device ran out of memory with a batch of {batch}: try --batch {max(1, batch // 2)}."
            + (f" The run goes on with {again} on a larger one." if resume else "")
        ) from error
    except StoppedError as error:
        if not begun:
            raise
        raise StoppedError(f"{error} Go on with: {again}") from None
    except DataError as error:
        if not begun or not folder.is_dir():  # a new run that failed before its first step is gone
            raise
        raise DataError(f"{error} What is done so far is kept: remove no files now, and go on with: {again}") from error
    finally:
        leave()


def run_folder(config: RunConfig, request: Request) -> Path:
    """The folder of the run that goes on, as asked for, or a new one whose name says what it is."""
    command = "seeds" if request.seeds > 1 else config.command
    name = slug(f"{config.model} {Path(config.data).name} {command}")
    return Path(request.resume or request.out or free_folder(name))


def log_notes(job: Job, config: RunConfig) -> None:
    """Say what a person may not know about network and data, and which options change nothing on this device."""
    for text in dict.fromkeys(job.notes):
        log(text)
    place = place_of(config).type
    for name in ("graphs", "kernels", "pad"):
        if getattr(config.engine, name) and place != "cuda":
            log(f"--{name} changes nothing on {place}: it is for GPUs.")


def _log_rates(config: RunConfig, world: World) -> None:
    """State the batch and the learning rates, of all ranks together."""
    ranks = f" on {world.size} ranks" if world.size > 1 else ""
    if it := config.search:
        scale = config.batch * it.accumulate / it.reference_batch
        rates = f"{scale * it.lr:.4g} to {scale * it.min_lr:.4g}"
        log(f"search: batch {config.batch}{ranks}, learning rate {rates}, of the alphas {it.alpha_lr:.4g}")
    if train := config.train:
        batch = config.train_batch or config.batch
        scale = batch / train.reference_batch if train.reference_batch else 1.0
        log(f"training: batch {batch}{ranks}, highest learning rate {scale * train.lr:.4g}")


def check_job(job: Job, config: RunConfig, *, resume: bool = False, files: bool = True, skips: bool = True) -> None:
    """Refuse a network that is no classifier of these images or not finite, and test files that are no images.

    files: read the first bytes of the test images, which are decoded only when all is trained.
    skips: whether the command has --corrupt.
    """
    noise = torch.randn(2, *job.data.shape, generator=generator(0)).to(device_of(job.model))
    check_classifier(job.model, noise, job.data.classes)
    check_finite(job.model, noise)
    check_input(job.model, noise)
    if job.teacher is not None:
        check_finite(job.teacher, noise, "teacher")
    test = job.data.test
    if not files or not isinstance(test, FolderSet):
        return
    if broken := [it for it in no_images(test) if it.refused or config.corrupt is not Corrupt.SKIP]:
        several = f" and {len(broken) - 1} more of the {len(test):,} test images" if len(broken) > 1 else ""
        way = "put sound files in their place" if resume else "repair or remove them"
        skip = ", or skip them with --corrupt skip" if skips and not any(it.refused for it in broken) else ""
        raise DataError(
            f"{broken[0].file} ({broken[0].reason}){several} cannot be read: {way}{skip}.{finds_all(test.root)}"
        )


def facts_of(job: Job) -> dict[str, Any]:
    """What a run is about besides its settings, for settings.json."""
    graph = job.graph
    unpruned = {"macs": graph.macs(), "params": graph.params(), "widths": dict(graph.full)}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "dmcp": __version__}
    shape = {"classes": job.data.classes, "shape": list(job.data.shape)}
    return shape | {"identity": job.identity, "unpruned": unpruned, "versions": versions}


def _take(config: RunConfig, job: Job, folder: Path, resume: bool, undo: contextlib.ExitStack) -> Run:
    """The run folder: a new one with its settings, or an old one, back at its last checkpoint."""
    if not resume:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        run = open_run(folder)
        undo.push(lambda kind, error, trace: _give_up(folder, made) if error else None)
        undo.enter_context(Lock(folder))
        run.write(SETTINGS, config.to_json() | facts_of(job) | {"argv": sys.argv})
        run.write(INPUT, preprocessing(job.data))
        if (table := Latency.of(job.graph)) is not None:
            run.write(LATENCY_FILE, table.to_json())
        return run
    run = Run(folder)
    refuse_done(run)  # also where nothing can be written, not even a lock
    undo.enter_context(Lock(folder))
    stored = read_json(folder / SETTINGS)
    before, now = stored.get("identity"), json.loads(json.dumps(job.identity))
    for name in ("fingerprint", "macs", "data", "teacher"):
        if not isinstance(before, dict) or before.get(name) != now.get(name):
            what = name if name in ("data", "teacher") else "network"
            files = what == "data" and isinstance(job.data.train, FolderSet)
            way = " Put files back that were removed; --corrupt skip passes over broken ones." if files else ""
            raise FileError(f"{folder}: the {what} is not what it was when the run began.{way}")
    refuse_done(run)  # by the process that has held the lock until now
    run.rewind()
    if stored.get("corrupt") != config.corrupt:
        run.write(SETTINGS, stored | {"corrupt": config.corrupt})  # for the next time
    return run


def refuse_done(run: Run) -> None:
    """FileError where nothing is left to do."""
    if run.done:
        raise FileError(f"{run.folder}: this run is done; dmcp report {shlex.quote(str(run.folder))} shows it.")


def _give_up(folder: Path, made: Sequence[Path]) -> None:
    """Remove a new run that failed before its first step: the folder is then free for the corrected command."""
    names = {SETTINGS, INPUT, LATENCY_FILE}
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= names:
            for name in names:
                (folder / name).unlink(missing_ok=True)
            for path in made:
                path.rmdir()


def _track(config: RunConfig, job: Job, folder: Path) -> Tracker:
    limits = parse(config.search.budget, job.graph).limits if config.search else ()
    return open_tracker(config.track, folder, config.to_json(), [limit.kind for limit in limits])


def _share_text(text: str, world: World) -> str:
    """The text of rank 0."""
    buffer = torch.frombuffer(bytearray(text.encode().ljust(_LONGEST, b"\0")), dtype=torch.uint8)
    share_tensors([buffer], world)
    return bytes(buffer.tolist()).rstrip(b"\0").decode()


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C are remembered, and the run saves at the end of its step; a second Ctrl-C is obeyed."""
    asked, owner = list[int](), os.getpid()

    def note(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a worker that reads images, and has this handler by fork
            return
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not asked:
            log("asked to stop: the step is finished and saved first")
        asked.append(number)

    with _handled_by(note):
        yield lambda: bool(asked)


@contextlib.contextmanager
def stopping(text: str) -> Iterator[None]:
    """SIGTERM and Ctrl-C raise StoppedError with this text: there is nothing to save meanwhile."""

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


# what is printed


def print_json(data: Any) -> None:
    """Plain data, and nothing else, on stdout."""
    print(json.dumps(data, indent=1))


def log_replaced(replaced: Replaced) -> None:
    """Name on stderr the images that were replaced."""
    if skipped := sorted(replaced.train | replaced.test):
        some = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        log(f"{counted(len(skipped), 'image file')} could not be read, and others took their place: {some}")


def result_facts(folder: Path, graph: ChannelGraph, widths: Widths, replaced: Replaced | None = None) -> dict[str, Any]:
    """The run, what its network costs, and how many image files were replaced, as plain data."""
    counts = {} if replaced is None else {"replaced": replaced.counts}
    return {"folder": str(folder)} | cost_facts(graph, widths) | counts


def cost_facts(graph: ChannelGraph, widths: Widths) -> dict[str, Any]:
    """What widths cost, as a share of the unpruned network too, and the widths, as plain data."""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    shares = {f"{kind}_share": spent[kind] / full[kind] for kind in spent}
    return plain_costs(spent) | shares | {"widths": dict(widths)}


def plain_costs(spent: Mapping[str, int]) -> dict[str, float]:
    """Costs as plain data; units are in the names."""
    names = {LATENCY: f"{LATENCY}_ms", MEMORY: f"{MEMORY}_bytes"}
    return {names.get(kind, kind): amount / FS_PER_MS if kind == LATENCY else amount for kind, amount in spent.items()}


def describe_cost(kind: str, amount: int) -> str:
    """121,000 MACs; 8.12 ms; 65.54 kB of activations."""
    if kind == LATENCY:
        return show_cost(kind, amount)
    return (
        f"{show_cost(kind, amount)} of activations"
        if kind == MEMORY
        else f"{amount:,} {'MACs' if kind == 'macs' else kind}"
    )


def describe_costs(graph: ChannelGraph, widths: Widths) -> str:
    """121,000 MACs (49.9%), 41,000 params (53.8%), 32.77 kB of activations (75.0%)"""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    return ", ".join(f"{describe_cost(kind, amount)} ({amount / full[kind]:.1%})" for kind, amount in spent.items())
