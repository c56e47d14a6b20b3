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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dmcp import __version__, progress
from dmcp.batches import device_of, generator
from dmcp.budget import LATENCY, MEMORY, costs, parse, show_cost
from dmcp.cli.config import Request, RunConfig
from dmcp.cli.job import Job, Replaced, check_names, open_job, place_of
from dmcp.data.datasets import FolderSet, no_images, preprocessing
from dmcp.errors import DataError, FileError, StoppedError, TrainingError
from dmcp.latency import LATENCY_FILE, Latency
from dmcp.preflight import check_classifier, check_forward
from dmcp.report.trackers import Tracker, read_kinds
from dmcp.retraining import DivergenceWarning
from dmcp.runs import INPUT, REPLACED, SETTINGS, Run, free_folder, read_json, refuse_taken, slug
from dmcp.runtime.distributed import World, gather, join, leave
from dmcp.runtime.io import Lock, alive
from dmcp.settings import Corrupt
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Event, Runtime
from dmcp.units import FS_PER_MS, counted
from dmcp.widths import Widths

PARENT = "DMCP_PARENT"  # environment variable: the process that has started a child
PATIENCE = 60.0  # seconds that a child has to obey a signal
_LOOK = 1.0  # seconds between two looks of a child at its parent
_STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def log(text: str) -> None:
    """One line on stderr: stdout has the results."""
    with contextlib.suppress(OSError):  # a run goes on when nobody listens any more
        print(text, file=sys.stderr, flush=True)


def showing(request: Request) -> contextlib.AbstractContextManager[None]:
    """Show the progress of a command, unless it is to be quiet."""
    return progress.showing(False if request.quiet or request.as_json else None, lines=True)


@dataclass(frozen=True, eq=False)
class Session:
    """What a command works with."""

    config: RunConfig
    world: World
    job: Job
    run: Run
    tracker: Tracker | None
    asked_to_stop: Callable[[], bool]
    noted: set[tuple[str, str]] = field(default_factory=set)  # part and name of replaced image files in the run folder

    @functools.cached_property
    def runtime(self) -> Runtime:
        """Engine, checkpoints and events of this run."""
        config = replace(self.config, workers=None, corrupt=Corrupt.STOP, track=())  # they change no result
        checkpointer = self.run.checkpointer(
            {"config": config.to_json()} | self.job.identity,
            every_steps=config.save_steps,
            every_seconds=60 * config.save_minutes,
            stop_requested=self.asked_to_stop,
        )
        return Runtime(engine=self.config.engine, checkpointer=checkpointer, on_event=self.on_event)

    def on_event(self, event: Event) -> None:
        """Log and show what happens on rank 0; each rank notes image files of its own, which a kill must not lose."""
        for part, files in self.job.replaced.items():
            for file in sorted(files):
                if (part, file) not in self.noted and self.run.folder.is_dir():
                    self.run.add(REPLACED, {"part": part, "file": file})
                    self.noted.add((part, file))
        if self.world.first:
            self.run.on_event(event)
            if self.tracker:
                self.tracker.on_event(event)

    def replaced(self) -> Replaced:
        """Image files that were replaced, on all ranks and before each interruption; all ranks must call it."""
        every = gather(self.job.replaced, self.world)
        return {part: self.run.replaced(part).union(*(own[part] for own in every)) for part in ("train", "test")}

    def describe_replaced(self, replaced: Replaced) -> list[str]:
        """What the report says about them, if there are any."""
        sizes = {"train": f"{len(self.job.data.train):,} training", "test": f"{len(self.job.data.test):,} test"}
        parts = [f"{len(files)} of {sizes[part]} images" for part, files in replaced.items() if files]
        text = f"{', '.join(parts)} could not be read. In each pass others took their place, and count twice."
        return [f"{text} Their names are in {REPLACED}."] if parts else []


@contextlib.contextmanager
def session(
    config: RunConfig, request: Request, check: Callable[[Job], Job] = lambda job: job, whole: bool = True
) -> Iterator[Session]:
    """Meet the other ranks, open model and data, take the run folder.

    check: may refuse before anything is written, and gives the job back, or that with a table of latency.
    whole: look at data and network as a person should; False where the command that has started this one did.
    """
    resume, folder = bool(request.resume), run_folder(config, request)
    if config.track:
        read_kinds(config.track)  # refuses what is not installed
    world, begun = join(config.device), False
    again = f"dmcp {config.command} --resume {shlex.quote(str(folder))}"
    try:
        with contextlib.ExitStack() as undo:
            undo.enter_context(showing(request))
            asked = undo.enter_context(_signals())
            if PARENT in os.environ:
                undo.enter_context(following_parent())
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DivergenceWarning)  # the command says it at its end
            if resume:
                check_names(folder, config, "data", "weights", "teacher")
            job = open_job(config, None if resume or config.command == "compare" else request.typed)
            config = job.config
            check_job(job, config, whole)
            if world.first and not resume:
                refuse_taken(folder)  # before anything is measured
            job = check(job)
            folder = Path(gather(str(folder), world)[0])
            run, tracker = Run(folder), None
            if world.first:
                (_go_on if resume else _begin)(run, config, job, undo)
                if config.track:
                    limits = parse(config.search.budget, job.graph).limits if config.search else ()
                    kinds = [limit.kind for limit in limits]
                    tracker = undo.enter_context(Tracker(config.track, folder, config.to_json(), kinds))
                if whole and PARENT not in os.environ:
                    log_notes(job, config)
                if not request.quiet:
                    _log_rates(config, world)
            begun = True
            yield Session(config, world, job, run, tracker, asked)
    except torch.OutOfMemoryError as error:
        batch = max(config.batch, config.train_batch)
        way = f"go on on a larger one: {again}" if resume else f"try --batch {max(1, batch // 2)}"
        raise TrainingError(f"The device ran out of memory with a batch of {batch}: {way}.") from error
    except (StoppedError, DataError) as error:
        if not begun or not folder.is_dir():  # a new run that failed before its first step is gone
            raise
        kind = StoppedError if isinstance(error, StoppedError) else DataError
        raise kind(f"{error} Go on with: {again}") from error
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


def check_job(job: Job, config: RunConfig, files: bool = True) -> None:
    """Refuse a network that is no classifier of these images or not finite, and, by `files`, broken test images."""
    noise = torch.randn(2, *job.data.shape, generator=generator(0)).to(device_of(job.model))
    check_classifier(job.model, noise, job.data.classes)
    check_forward(job.model, noise)
    if job.teacher is not None:
        check_forward(job.teacher, noise, "teacher")
    test = job.data.test
    if not files or not isinstance(test, FolderSet) or config.corrupt is Corrupt.SKIP:
        return
    if broken := no_images(test):
        several = f" and {len(broken) - 1} more of the {len(test):,} test images" if len(broken) > 1 else ""
        way = "repair them" + (", or skip them with --corrupt skip" if config.command != "compare" else "")
        raise DataError(f"{broken[0].file} ({broken[0].reason}){several} cannot be read: {way}; dmcp data finds all.")


def _begin(run: Run, config: RunConfig, job: Job, undo: contextlib.ExitStack) -> None:
    """Make a new run folder with its settings."""
    made = [path for path in (run.folder, *run.folder.parents) if not path.exists()]
    run.folder.mkdir(parents=True, exist_ok=True)
    undo.push(lambda kind, error, trace: _give_up(run.folder, made) if error else None)
    undo.enter_context(Lock(run.folder))
    graph = job.graph
    facts = {
        "classes": job.data.classes,
        "shape": list(job.data.shape),
        "identity": job.identity,
        "unpruned": {"macs": graph.macs(), "params": graph.params(), "widths": dict(graph.full)},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "dmcp": __version__},
        "argv": sys.argv,
    }
    run.write(SETTINGS, config.to_json() | facts)
    run.write(INPUT, preprocessing(job.data))
    if LATENCY in graph.extra and (table := Latency.of(graph)) is not None:
        run.write(LATENCY_FILE, table.to_json())


def _give_up(folder: Path, made: Sequence[Path]) -> None:
    """Remove a new run that failed before its first step: the folder is then free for the corrected command."""
    names = {SETTINGS, INPUT, LATENCY_FILE}
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= names:
            for name in names:
                (folder / name).unlink(missing_ok=True)
            for path in made:
                path.rmdir()


def _go_on(run: Run, config: RunConfig, job: Job, undo: contextlib.ExitStack) -> None:
    """Bring an old run back to its last checkpoint, if network and data are what they were."""
    refuse_done(run)  # also where nothing can be written, not even a lock
    undo.enter_context(Lock(run.folder))
    stored, now = read_json(run.folder / SETTINGS), json.loads(json.dumps(job.identity))
    before = stored.get("identity") or {}
    for name in ("fingerprint", "macs", "data", "teacher"):
        if before.get(name) != now.get(name):
            what = name if name in ("data", "teacher") else "network"
            way = " Put files back that were removed; --corrupt skip passes over broken ones." if name == "data" else ""
            raise FileError(f"{run.folder}: the {what} is not what it was when the run began.{way}")
    refuse_done(run)  # by the process that has held the lock until now
    run.rewind()
    if stored.get("corrupt") != config.corrupt:
        run.write(SETTINGS, stored | {"corrupt": config.corrupt})  # for the next time


def refuse_done(run: Run) -> None:
    """FileError where nothing is left to do."""
    if run.done:
        raise FileError(f"{run.folder}: this run is done; dmcp report {shlex.quote(str(run.folder))} shows it.")


@contextlib.contextmanager
def handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Signals that ask us to stop go to this handler during the block; ignored ones stay ignored."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # others can set no handler
        before = {number: signal.getsignal(number) for number in _STOPS}
        before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def following_parent() -> Iterator[None]:
    """Stop as if asked to when the process that has started us is gone; end for good if that takes too long."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(int(os.environ[PARENT]), over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(parent: int, over: threading.Event) -> None:
    first = os.getppid()  # the parent itself, unless something between has started us
    while os.getppid() == first and alive(parent):
        if over.wait(_LOOK):
            return
    os.kill(os.getpid(), signal.SIGTERM)
    if not over.wait(PATIENCE):
        if os.getpgrp() == os.getpid():  # our workers are in it, and nobody else
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


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

    with handled_by(note):
        yield lambda: bool(asked)


@contextlib.contextmanager
def stopping(text: str) -> Iterator[None]:
    """SIGTERM and Ctrl-C raise StoppedError with this text: there is nothing to save meanwhile."""

    def stop(number: int, frame: Any) -> None:
        raise StoppedError(text)

    with handled_by(stop):
        yield


# what is printed


def print_json(data: Any) -> None:
    """Plain data, and nothing else, on stdout."""
    print(json.dumps(data, indent=1))


def log_replaced(replaced: Replaced) -> None:
    """Name on stderr the images that were replaced."""
    if skipped := sorted({file for files in replaced.values() for file in files}):
        some = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        log(f"{counted(len(skipped), 'image file')} could not be read, and others took their place: {some}")


def result_facts(folder: Path, graph: ChannelGraph, widths: Widths, replaced: Replaced | None = None) -> dict[str, Any]:
    """The run, what its network costs, and how many image files were replaced, as plain data."""
    counts = {part: len(files) for part, files in (replaced or {}).items()}
    return {"folder": str(folder)} | cost_facts(graph, widths) | ({"replaced": counts} if counts else {})


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
    if kind in (LATENCY, MEMORY):
        return show_cost(kind, amount) + (" of activations" if kind == MEMORY else "")
    return f"{amount:,} {'MACs' if kind == 'macs' else kind}"


def describe_costs(graph: ChannelGraph, widths: Widths) -> str:
    """121,000 MACs (49.9%), 41,000 params (53.8%), 32.77 kB of activations (75.0%)"""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    return ", ".join(f"{describe_cost(kind, amount)} ({amount / full[kind]:.1%})" for kind, amount in spent.items())
