"""One command at work: it meets the other ranks, takes the folder of its run, and can be stopped and resumed."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from dmcp import __version__
from dmcp.budgets import read_budget
from dmcp.cli.config import Request, needs_typing, option_word
from dmcp.cli.job import Job, open_checked
from dmcp.cli.output import Replaced, describe_replaced, log
from dmcp.data.datasets import BUILT_IN, preprocessing
from dmcp.errors import BudgetError, DataError, FileError, StoppedError
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.exporting.timing import device_name
from dmcp.fields import describe
from dmcp.report.trackers import Tracker, read_kinds
from dmcp.retraining import DivergenceWarning
from dmcp.runs.config import RunConfig
from dmcp.runs.files import FAILED, INPUT, LOG, REPLACED, SETTINGS, STARTS, read_json
from dmcp.runs.writing import START, Run, free_folder, refuse_taken, slug
from dmcp.runtime import progress
from dmcp.runtime.batches import device_of
from dmcp.runtime.checkpoint import Checkpointer
from dmcp.runtime.distributed import World, current, gather, join, leave
from dmcp.runtime.io import LOCK, Lock
from dmcp.training.loop import Event, Runtime

_STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True, eq=False)
class Session:
    """What a command works with."""

    world: World
    job: Job
    run: Run
    runtime: Runtime  # engine, checkpoints and events

    def replaced(self) -> Replaced:
        """Image files that were replaced by others, on all ranks, which must all call it; rank 0 names them."""
        of_ranks = gather(self.job.replaced, self.world)
        replaced = {}
        for part in ("train", "test"):
            replaced[part] = sorted({file for of_rank in of_ranks for file in of_rank[part]})
        if self.world.first and any(replaced.values()):
            self.run.write(REPLACED, replaced)
            log(*describe_replaced(replaced))
        return replaced


@contextlib.contextmanager
def session(config: RunConfig, request: Request, check: Callable[[Job], Job] = lambda job: job) -> Iterator[Session]:
    """Meet the other ranks, open model and data, take the run folder.

    check: called before anything is written; it may raise, and returns the job, perhaps with a latency table.
    """
    resumes = bool(request.resume)
    folder = run_folder(config, request)
    world = join(config.device)
    has_begun = False
    try:
        with contextlib.ExitStack() as undo:
            undo.enter_context(progress.showing(not (request.quiet or request.as_json)))
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DivergenceWarning)  # the command says it at its end

            # What is known to be wrong at once; then network and data. Until they are known to fit, nothing is written.
            if world.first:
                refuse_early(config, request, folder)
            if resumes:
                check_data_is_here(folder, config)
            settings_are_known = resumes or config.command == "compare"
            job = open_checked(config, None if settings_are_known else request.typed)
            job = check(job)

            # The folder: rank 0 takes it, and writes into it.
            stop_requested = undo.enter_context(_stop_requests())  # before, there is nothing to save
            folder = Path(gather(str(folder), world)[0])
            run = Run(folder)
            checkpointer = run.checkpointer(
                {"config": _fixed_settings(job.config)} | job.identity,
                every_steps=job.config.save_steps,
                every_seconds=60 * job.config.save_minutes,
                stop_requested=stop_requested,
            )
            listeners: list[Callable[[Event], None]] = []
            if world.first:
                undo.enter_context(_hold_folder(run, job, checkpointer if resumes else None))
                listeners.append(run.on_event)
            if world.first and job.config.track:
                listeners.append(undo.enter_context(_tracker(job.config, folder)).on_event)
            has_begun = True

            def on_event(event: Event) -> None:
                for listener in listeners:
                    listener(event)

            runtime = Runtime(engine=job.config.engine, checkpointer=checkpointer, on_event=on_event)
            yield Session(world, job, run, runtime)
    except (StoppedError, DataError) as error:
        if not has_begun or not folder.is_dir():  # a new run that failed before its first step is gone
            raise
        kind = StoppedError if isinstance(error, StoppedError) else DataError
        raise kind(f"{error} Go on with: {_resuming_command(config, folder)}") from error
    finally:
        leave()


def refuse_early(config: RunConfig, request: Request, folder: Path) -> None:
    """Refuse what a run would not begin with: a service that cannot track it, and a folder that holds files."""
    read_kinds(config.track)
    if not request.resume:
        refuse_taken(folder)


def run_folder(config: RunConfig, request: Request) -> Path:
    """The folder of the run that is resumed, as asked for, or a new one whose name says what it is."""
    command = "seeds" if request.seeds > 1 else config.command
    name = slug(f"{config.model} {Path(config.data).name} {command}")
    return Path(request.resume or request.out or free_folder(name))


def check_data_is_here(run: Path, config: RunConfig) -> None:
    """Refuse a run whose data are not where its settings say, as seen from this folder."""
    if config.data not in BUILT_IN and not Path(config.data).exists():
        raise FileError(
            f"{run}: {config.data!r} does not exist here: run the command in the folder where the run was started."
        )


def _resuming_command(config: RunConfig, folder: Path) -> str:
    """The command that resumes a run; settings that run code must be typed again."""
    words = ["dmcp", config.command, "--resume", str(folder)]
    for name, value in needs_typing(config).items():
        words += [option_word(name), value]
    return shlex.join(words)


def _fixed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that a resumed run must have again; the others do not change its result."""
    free = {described.name: described.default for described in describe(RunConfig) if not described.fixed}
    return replace(config, **free).to_json()


def _tracker(config: RunConfig, folder: Path) -> Tracker:
    """What sends the curves of a run to tensorboard or wandb."""
    kinds = read_budget(config.search.budget).kinds if config.search else ()
    return Tracker(config.track, folder, config.to_json(), kinds)


@contextlib.contextmanager
def _hold_folder(run: Run, job: Job, resume: Checkpointer | None) -> Iterator[None]:
    """Lock the folder, and begin or resume the run in it. A new run that fails before its first step is removed."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with Lock(run.folder):
        if resume is None:
            refuse_taken(run.folder)  # again, now that it is locked
            (run.folder / LATENCY_FILE).unlink(missing_ok=True)  # of a run that was killed as it began
            _begin(run, job)
        else:
            _resume(run, job, resume)
        with (run.folder / SETTINGS).open() as settings, (run.folder / LOG).open() as records:
            try:
                yield
            except BaseException as error:
                if resume is None and not run.lines() and _has_only_begun(run.folder):
                    shutil.rmtree(run.folder)
                elif isinstance(error, BudgetError):  # so would it end whenever it is resumed
                    run.fail(str(error))
                raise
            if not all(os.fstat(file.fileno()).st_nlink for file in (settings, records)):
                raise FileError(f"{run.folder}: {SETTINGS} or {LOG} was removed during the run: start a new run.")


def _has_only_begun(folder: Path) -> bool:
    """Whether a run has written nothing but what it begins with."""
    return {path.name for path in folder.iterdir()} <= {LOCK, *START}


def _resume(run: Run, job: Job, checkpointer: Checkpointer) -> None:
    """Take a run up where its checkpoints are."""
    if run.done:
        run.close()  # if it was killed just before
        if (run.folder / FAILED).is_file():
            reason = read_json(run.folder / FAILED)["reason"]
            raise FileError(f"{run.folder}: this run has ended without a result: {reason}")
        raise FileError(f"{run.folder}: this run is finished; dmcp report {shlex.quote(str(run.folder))} shows it.")
    run.rewind(checkpointer)
    stored = read_json(run.folder / SETTINGS)
    run.write(SETTINGS, stored | {STARTS: stored.get(STARTS, {}) | _start(run, job)})


def _begin(run: Run, job: Job) -> None:
    """Write what a run begins with."""
    graph = job.graph
    facts = {
        "classes": job.data.classes,
        "shape": list(job.data.shape),
        "sources": list(job.data.sources),
        "unpruned": {"macs": graph.macs(), "params": graph.params(), "widths": dict(graph.full)},
        STARTS: _start(run, job),
        "argv": sys.argv,
    }
    files: dict[str, Any] = {}
    table = Latency.of(graph)
    if table is not None:
        files[LATENCY_FILE] = table.to_json()
    files[INPUT] = preprocessing(job.data)
    files[SETTINGS] = job.config.to_json() | facts
    files[LOG] = ""
    run.write_all(files)


def _start(run: Run, job: Job) -> dict[str, Any]:
    """Facts about this start (the lines of the log so far, versions, device), with its time as the key.

    Resuming ignores them.
    """
    facts = {
        "log_lines": run.lines(),
        "dmcp": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # which also names its CUDA
    }
    for name in ("torchvision", "numpy"):
        for distribution in list(distributions(name=name))[:1]:
            facts[name] = distribution.version
    facts["device"] = device_name(str(device_of(job.model)))
    facts["threads"] = torch.get_num_threads()
    facts["processes"] = current().size
    return {datetime.now(UTC).isoformat(timespec="milliseconds"): facts}


@functools.cache
def _commit() -> str:
    """The commit of the clone that this file is in, marked if files were changed; empty outside a clone."""
    root = Path(__file__).parents[3]
    words = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    with contextlib.suppress(OSError):  # no git
        if (root / ".git").exists():
            return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return ""


# signals


@contextlib.contextmanager
def handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """During the block, send the signals that ask the command to stop to this handler; ignored ones stay ignored."""
    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) is handler:  # not if a Ctrl-C has been obeyed
                signal.signal(number, earlier)


@contextlib.contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Remember SIGTERM and Ctrl-C, so that the run saves at the end of its step; a second Ctrl-C is obeyed."""
    requests: list[int] = []
    owner = os.getpid()
    on_ctrl_c = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a worker that reads images, and has this handler by fork
            return
        requests.append(number)
        if len(requests) == 1:
            log("asked to stop: the step is finished and saved first")
        elif number == signal.SIGINT and callable(on_ctrl_c):
            on_ctrl_c(number, frame)

    with handled_by(note):
        yield lambda: bool(requests)
