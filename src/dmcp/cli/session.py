"""One command at work: ranks, run folder, signals, processes side by side, and what is printed at the end."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dmcp import __version__, progress
from dmcp.batches import device_of, generator
from dmcp.budget import LATENCY, MEMORY, costs, parse, show_cost
from dmcp.cli.config import Request, RunConfig
from dmcp.cli.job import Job, check_data_is_here, open_job
from dmcp.data.check import no_images
from dmcp.data.datasets import FolderSet, preprocessing
from dmcp.errors import DataError, FileError, StoppedError, TrainingError
from dmcp.latency.table import LATENCY_FILE, Latency
from dmcp.preflight import check_classifier, check_finite, check_input
from dmcp.report.trackers import Tracker, open_tracker, read_kinds
from dmcp.retraining import DivergenceWarning
from dmcp.runs import CHECKPOINTS, INPUT, LOG, REPLACED, SETTINGS, Run, free_folder, refuse_taken, slug
from dmcp.runtime.distributed import World, current, gather, join, leave
from dmcp.runtime.io import Lock, plain
from dmcp.settings import Corrupt
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Event, Runtime
from dmcp.units import FS_PER_MS, counted
from dmcp.widths import Widths

COMMAND = (sys.executable, "-m", "dmcp")
_CHILD = "DMCP_CHILD"  # environment variable of processes that a command has started: it has looked at the data
_STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_ON_A_GPU = 8  # processes at once, unless told
Replaced = Mapping[str, list[str]]  # train and test: image files that could not be read, and were replaced by others


def log(text: str) -> None:
    """One line on stderr: stdout has the results."""
    with contextlib.suppress(OSError):  # a run goes on when nobody listens any more
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, eq=False)
class Session:
    """What a command works with."""

    config: RunConfig
    world: World
    job: Job
    run: Run
    tracker: Tracker | None
    asked_to_stop: Callable[[], bool]

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
        return Runtime(engine=config.engine, checkpointer=checkpointer, on_event=self._on_event)

    def _on_event(self, event: Event) -> None:
        if self.world.first:
            self.run.on_event(event)
            if self.tracker:
                self.tracker.on_event(event)

    def replaced(self) -> Replaced:
        """Image files that others took the place of, on all ranks, which must all call it; rank 0 names them."""
        every = gather(self.job.replaced, self.world)
        found = {part: sorted({file for own in every for file in own[part]}) for part in ("train", "test")}
        if self.world.first and any(found.values()):
            self.run.write(REPLACED, found)
            log(describe_replaced(found))
        return found


@contextlib.contextmanager
def session(config: RunConfig, request: Request, check: Callable[[Job], Job] = lambda job: job) -> Iterator[Session]:
    """Meet the other ranks, open model and data, take the run folder.

    check: may refuse before anything is written, and gives the job back, or that with a table of latency.
    """
    resume, folder = bool(request.resume), run_folder(config, request)
    read_kinds(config.track)  # refuses what is not installed
    world, begun = join(config.device), False
    again = f"dmcp {config.command} --resume {shlex.quote(str(folder))}"
    try:
        with contextlib.ExitStack() as undo:
            undo.enter_context(progress.showing(False if request.quiet or request.as_json else None, lines=True))
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DivergenceWarning)  # the command says it at its end
            if resume:
                check_data_is_here(folder, config)
            job = open_checked(config, None if resume or config.command == "compare" else request.typed)
            config = job.config
            if world.first and not resume:
                refuse_taken(folder)  # before anything is measured
            job = check(job)
            asked = undo.enter_context(_signals())  # until here there is nothing to save
            folder = Path(gather(str(folder), world)[0])
            run, tracker = Run(folder), None
            if world.first:
                undo.enter_context(_taken(run, job, resume))
                if config.track:
                    limits = parse(config.search.budget, job.graph).limits if config.search else ()
                    kinds = [limit.kind for limit in limits]
                    tracker = undo.enter_context(open_tracker(config.track, folder, config.to_json(), kinds))
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


def open_checked(config: RunConfig, typed: Mapping[str, Any] | None = None) -> Job:
    """Open network and data, and say what a person may not know about them.

    Refused are a network that is no classifier of these images or not finite, and broken test images. Files and notes
    are left to the command that has started this one, if there is one.
    """
    job = open_job(config, typed)
    noise = torch.randn(2, *job.data.shape, generator=generator(0)).to(device_of(job.model))
    check_classifier(job.model, noise, job.data.classes)
    check_finite(job.model, noise)
    check_input(job.model, noise)
    if job.teacher is not None:
        check_finite(job.teacher, noise, "teacher")
    if _CHILD in os.environ:
        return job
    test = job.data.test
    broken = no_images(test) if isinstance(test, FolderSet) else []
    if broken := [it for it in broken if it.refused or config.corrupt is not Corrupt.SKIP]:
        some = f"{broken[0].file} ({broken[0].reason}), one of {counted(len(broken), 'test image')}, cannot be read"
        skips = config.command != "compare" and not any(it.refused for it in broken)
        raise DataError(f"{some}: repair them{', or skip them with --corrupt skip' if skips else ''}.")
    for text in dict.fromkeys(job.notes) if current().first else ():
        log(text)
    return job


@contextlib.contextmanager
def _taken(run: Run, job: Job, resume: bool) -> Iterator[None]:
    """Hold the folder of a run that goes on, or a new one, which is removed if the run fails before its first step."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with Lock(run.folder):
        if resume and run.done:
            raise FileError(f"{run.folder}: this run is done; dmcp report {shlex.quote(str(run.folder))} shows it.")
        if resume:
            run.rewind()
        else:
            _write_settings(run, job)
        try:
            yield
        except BaseException:
            if not any((run.folder / name).exists() for name in (LOG, CHECKPOINTS)):
                shutil.rmtree(run.folder, ignore_errors=True)
            raise


def _write_settings(run: Run, job: Job) -> None:
    graph = job.graph
    facts = {
        "classes": job.data.classes,
        "shape": list(job.data.shape),
        "unpruned": {"macs": graph.macs(), "params": graph.params(), "widths": dict(graph.full)},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "dmcp": __version__},
        "argv": sys.argv,
    }
    run.write(SETTINGS, job.config.to_json() | facts)
    run.write(INPUT, preprocessing(job.data))
    if LATENCY in graph.extra and (table := Latency.of(graph)) is not None:
        run.write(LATENCY_FILE, table.to_json())


# signals


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
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


# processes side by side


@dataclass(frozen=True)
class Command:
    """A dmcp command to be run in a process of its own."""

    name: str  # shown before its lines, and that of its files NAME.out and NAME.err
    words: tuple[str, ...]
    after: tuple[str, ...] = ()  # names of commands that must have succeeded


def run_side_by_side(
    commands: Sequence[Command],
    folder: Path,
    device: torch.device,
    *,
    at_once: int | None = None,
    quiet: bool = False,
    total: int = 0,
) -> dict[str, str]:
    """Run commands, in the order given as far as each may start; how those ended that failed, by name.

    A signal is passed on to all children, and ends us when they have ended. at_once: on a CPU never more than it has
    cores. Their stderr is shown line by line; all output is kept in the folder. total: with those done before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cores = _cores()
    at_once = min(at_once or cores, cores) if device.type == "cpu" else at_once or _ON_A_GPU
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // at_once)), _CHILD: "1"}
    failed, done, signals = dict[str, str](), set[str](), list[int]()
    waiting, running = list(commands), dict[str, subprocess.Popen[str]]()
    show = (lambda text: None) if quiet else log

    def stop(number: int, _: Any) -> None:
        log(f"dmcp: stopping {len(running)} of {len(commands)} runs; the same command goes on.")
        signals.append(number)
        for process in [*running.values()]:
            process.send_signal(number)  # not to its workers: it ends them

    def run(command: Command) -> str:
        """How it failed; empty if it did not. In a group of its own: a Ctrl-C reaches it through us, and only once."""
        out, err = ((folder / f"{command.name}.{kind}").open("a") for kind in ("out", "err"))
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.PIPE, "text": True}
        last, words = "", [*COMMAND, *command.words]
        with out, err:
            if signals:
                return "not started"
            with subprocess.Popen(words, env=environment, errors="replace", process_group=0, **how) as process:
                running[command.name] = process
                for line in process.stderr or ():
                    err.write(line)
                    if line.strip():
                        last = plain(line.strip())
                        show(f"{command.name}: {last}")
            del running[command.name]
        code = process.returncode
        how_it_ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how_it_ended}: {last}" if code else ""

    with ThreadPoolExecutor(at_once) as pool, _handled_by(stop):
        futures: dict[Future[str], str] = {}
        while waiting or futures:
            for command in [it for it in waiting if {*it.after} <= {*done, *failed}]:
                waiting.remove(command)
                if lost := [name for name in command.after if name in failed]:
                    failed[command.name] = f"not started: it needs {', '.join(lost)}, and that failed"
                    show(f"{command.name}: {failed[command.name]}")
                else:
                    futures[pool.submit(run, command)] = command.name
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                name = futures.pop(future)
                if reason := future.result():
                    failed[name] = reason
                else:
                    done.add(name)
                    left = len(commands) - len(done)
                    show(f"{name}: done ({(total or len(commands)) - left} of {total or len(commands)})")
    if signals:
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(128 + signals[0])
    return failed


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# what is printed


def print_json(data: Any) -> None:
    """Plain data, and nothing else, on stdout."""
    print(json.dumps(data, indent=1))


def describe_replaced(replaced: Replaced) -> str:
    """2 training and 1 test image could not be read: a.png, b.png, c.png; in each pass others took their place."""
    files = [*replaced["train"], *replaced["test"]]
    some = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
    counts = f"{len(replaced['train'])} training and {counted(len(replaced['test']), 'test image')}"
    return f"{counts} could not be read, and others took their place: {some}"


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


def describe_costs(graph: ChannelGraph, widths: Widths) -> str:
    """121,000 macs (49.9%), 41,000 params (53.8%), 32.77 kB (75.0%)"""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    return ", ".join(f"{show_cost(kind, amount)} ({amount / full[kind]:.1%})" for kind, amount in spent.items())
