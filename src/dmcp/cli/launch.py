"""Several commands side by side: the runs of a comparison, the seeds of one command."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dmcp.errors import DmcpError, FileError
from dmcp.latency.table import Outcome
from dmcp.runs import PastRun, Run, is_run, read_json, read_run
from dmcp.runtime.io import Lock, alive, plain
from dmcp.units import between, spread, table

COMMAND = (sys.executable, "-m", "dmcp")
PARENT = "DMCP_PARENT"  # environment variable: the process that has started a child
SEEDS, SUMMARY, SUMMARY_TABLE = "seeds.json", "summary.json", "summary.md"
_ON_A_GPU = 8  # children at once, unless told
_PAUSE = 0.1  # seconds between two looks at the children
_LOOK = 1.0  # seconds between two looks of a child at its parent
_PATIENCE = 60.0  # seconds that a child has to obey a signal
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True)
class Command:
    """One process to be run."""

    name: str  # of its files NAME.out and NAME.err
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()  # names of commands, given before, that must have succeeded
    title: str = ""  # shown before its lines; the name, if empty


@dataclass(frozen=True)
class Ended:
    """How a command has ended."""

    command: Command
    code: int | None  # negative: the signal that killed it; None: never started, since what it needs has failed
    last: str  # its last line on stderr, or why it was not started

    def describe(self) -> str:
        """seed 1: exit code 2: dmcp: no such model."""
        if self.code is None:
            how = "not started"
        else:
            how = f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        return ": ".join(filter(None, [self.command.title or self.command.name, how, self.last]))


def run_side_by_side(
    commands: Sequence[Command],
    folder: Path,
    device: torch.device,
    signals: Sequence[int],
    *,
    at_once: int | None = None,
    quiet: bool = False,
    noun: str = "runs",
    total: int | None = None,
) -> list[Ended]:
    """Run commands, in the order given as far as each may start; how they ended, in that order too.

    signals: of `kept_signals`; one stops all children, and nothing else is started. at_once: on a CPU never more than
    it has cores. Their stderr is shown line by line; all output is kept in the folder. total: with those that were done
    before; each that ends well is then counted.
    """
    at_once, threads = _divide(at_once, device)
    pool = _Pool(commands, folder, {**os.environ, "OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())}, quiet)
    heard, end = 0, float("inf")
    try:
        while (pool.running or (pool.waiting and not signals)) and time.monotonic() < end:
            if not signals:
                pool.start(at_once)
            if len(signals) > heard == 0:
                end = time.monotonic() + _PATIENCE
                _log(f"dmcp: stopping {len(pool.running)} of {len(commands)} {noun}; the same command goes on.")
            for number in signals[heard:]:
                for child in pool.running:
                    child.process.send_signal(number)  # not to its workers: it ends them
            heard = len(signals)
            time.sleep(_PAUSE)
            pool.collect(None if total is None else total - len(commands), stopping=bool(signals))
    finally:
        for child in pool.running:
            child.kill()
    order = [command.name for command in commands]
    return sorted(pool.ended, key=lambda end: order.index(end.command.name))


def _divide(at_once: int | None, device: torch.device) -> tuple[int, int]:
    """How many children run at once, and the threads of each."""
    cores = _cores()
    if device.type == "cpu":
        at_once = min(at_once or cores, cores)
    at_once = at_once or _ON_A_GPU
    return at_once, max(1, cores // at_once)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # the children go on when nobody listens any more
        print(text, file=sys.stderr, flush=True)


class _Child:
    """A running command in a process group of its own: a Ctrl-C reaches it through us, and so only once."""

    def __init__(self, command: Command, folder: Path, environment: Mapping[str, str]) -> None:
        self.command, self.running, self.last = command, True, ""
        self._rest = b""
        out, err = (folder / f"{command.name}.{kind}" for kind in ("out", "err"))
        with out.open("ab") as stdout, err.open("ab") as stderr:  # files: a child never waits for a reader
            self._lines = err.open("rb")
            self._lines.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, process_group=0
            )

    def look(self, quiet: bool) -> None:
        """Show what it has written since the last look, and see whether it still runs."""
        self.running = self.process.poll() is None  # before reading: of one that has ended all is then read
        *lines, self._rest = (self._rest + self._lines.read()).split(b"\n")
        if not self.running:
            lines.append(self._rest)
            self._close(signal.SIGTERM)
        for line in lines:
            text = plain(line.decode(errors="replace").rstrip().rpartition("\r")[2])  # the end of a line that moves
            if text:
                self.last = text.strip()
                if not quiet:
                    _log(f"{self.command.title or self.command.name}: {text}")

    def kill(self) -> None:
        """End it now, and its workers."""
        self._close(signal.SIGKILL)
        self.process.wait()

    def _close(self, number: int) -> None:
        self._lines.close()
        with contextlib.suppress(ProcessLookupError):  # it has left no worker behind
            os.killpg(self.process.pid, number)


class _Pool:
    """Commands that wait, run and have ended."""

    def __init__(self, commands: Sequence[Command], folder: Path, environment: Mapping[str, str], quiet: bool) -> None:
        self.waiting, self.running, self.ended = list(commands), list[_Child](), list[Ended]()
        self.folder, self.environment, self.quiet = folder, environment, quiet

    def start(self, at_once: int) -> None:
        """Start commands whose turn it is, up to so many at once."""
        done = {end.command.name for end in self.ended}  # with success: those after a failed one are taken out
        for command in [it for it in self.waiting if done.issuperset(it.after)][: at_once - len(self.running)]:
            self.waiting.remove(command)
            self.running.append(_Child(command, self.folder, self.environment))

    def collect(self, done_before: int | None, stopping: bool) -> None:
        """Take in what the children write and how they end; drop what waits for one that has failed."""
        for child in self.running:
            child.look(self.quiet)
        for child in [child for child in self.running if not child.running]:
            self.running.remove(child)
            self.ended.append(Ended(child.command, child.process.returncode, child.last))
            if done_before is not None and child.process.returncode == 0 and not self.quiet:
                done = done_before + sum(end.code == 0 for end in self.ended)
                total = done_before + len(self.waiting) + len(self.running) + len(self.ended)
                _log(f"{child.command.title or child.command.name}: done ({done} of {total})")
        failed = {end.command.name for end in self.ended if end.code != 0}
        for command in [*self.waiting] if not stopping else ():  # each comes after what it waits for
            if lost := [name for name in command.after if name in failed]:
                self.waiting.remove(command)
                failed.add(command.name)
                self.ended.append(Ended(command, None, f"it needs {', '.join(lost)}, and that failed"))
                if not self.quiet:
                    _log(self.ended[-1].describe())


@contextlib.contextmanager
def kept_signals() -> Iterator[list[int]]:
    """The signals that ask us to stop, noted during the block and raised after it; ignored ones stay ignored."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # others can set no handler
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        before = {number: old for number, old in handlers.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
    if received:
        signal.raise_signal(received[0])
        raise SystemExit(128 + received[0])  # the handler from before us has returned


def has_parent() -> bool:
    """Whether a command of ours has started this process."""
    return os.environ.get(PARENT, "").isdigit()


@contextlib.contextmanager
def following_parent() -> Iterator[None]:
    """Stop as if asked to when the process that has started us is gone; end for good if that takes too long."""
    over = threading.Event()
    if has_parent():
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
    if not over.wait(_PATIENCE):
        if os.getpgrp() == os.getpid():  # our workers are in it, and nobody else
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


# seeds


def run_seeds(
    argv: Sequence[str], seeds: Sequence[int], folder: Path, device: torch.device, quiet: bool = False
) -> list[Path]:
    """Run a dmcp command once per seed into FOLDER/seed-K, side by side, and write a summary; their run folders.

    argv: the command and its options, without --seed, --out and --quiet. Started again with the same ones, it leaves
    finished seeds as they are and goes on with others. Their output is kept: FOLDER/seed-K.out, FOLDER/seed-K.err.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: no runs can be kept here: {error.strerror or error}.") from error
    runs = {seed: folder / f"seed-{seed}" for seed in seeds}
    with kept_signals() as signals, Lock(folder):
        refuse_others(folder, argv)
        Run(folder).write(SEEDS, {"argv": list(argv)})
        commands = [_command(argv, seed, run) for seed, run in runs.items() if not _is_done(run)]
        ended = run_side_by_side(commands, folder, device, signals, at_once=len(seeds), quiet=quiet, noun="seeds")
        if not signals:
            if failed := [end for end in ended if end.code or not _is_done(folder / end.command.name)]:
                listed = "; ".join(end.describe() for end in failed)
                raise DmcpError(
                    f"{len(failed)} of {len(runs)} seeds failed, the same command starts only them again: {listed}"
                )
            summary = summarize(list(runs.values()))
            Run(folder).write(SUMMARY, asdict(summary))
            Run(folder).write(SUMMARY_TABLE, markdown(summary))
    return list(runs.values())


def words_of_each(argv: Sequence[str]) -> list[str]:
    """The words of a command line that each seed gets; those that are for all of them go, with their values."""
    words, kept = iter(argv), list[str]()
    for word in words:
        name, equals, _ = word.partition("=")
        if name in ("--seeds", "--seed", "--out"):
            if not equals:
                next(words, None)
        elif name not in ("--quiet", "--json", "--debug"):
            kept.append(word)
    return kept


def refuse_others(folder: Path, argv: Sequence[str]) -> None:
    """Refuse a folder with runs of another command: they must not be taken for seeds of this one."""
    stored = read_json(folder / SEEDS).get("argv") if (folder / SEEDS).is_file() else None
    taken = is_run(folder) or any(path.is_dir() and any(path.iterdir()) for path in folder.glob("seed-*"))
    if taken and stored != list(argv):
        known = isinstance(stored, list) and bool(stored)
        what = plain(f"`dmcp {shlex.join(map(str, stored or ()))}`") if known else "something else"
        raise FileError(f"{folder} already holds runs of {what}: give another folder, or just that command.")


def _is_done(run: Path) -> bool:
    return is_run(run) and read_run(run).done


def _command(argv: Sequence[str], seed: int, run: Path) -> Command:
    """What starts a seed, or goes on with it."""
    resume = (argv[0], "--resume", str(run))
    words = resume if is_run(run) else (*argv, "--seed", str(seed), "--out", str(run))
    return Command(run.name, (*COMMAND, *words), title=f"seed {seed}")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One network in the final tables of several runs; accuracies and shares from 0 to 1."""

    name: str
    accuracies: tuple[float, ...]  # in the order of the runs that tested it
    mean: float
    deviation: float | None  # standard deviation of the accuracy (ddof = 1); None for one run
    macs: tuple[int, int]  # lowest and highest
    macs_share: tuple[float, float] | None  # of the unpruned network; None if a run does not know it
    params: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What several runs of one command have found."""

    runs: tuple[str, ...]
    networks: tuple[Spread, ...]
    latency: tuple[Outcome, ...] = ()  # of each run, where the budget has a limit of it


def summarize(folders: Sequence[Path]) -> Summary:
    """What the runs in these folders have found, network by network."""
    runs = [read_run(folder) for folder in folders]
    names = dict.fromkeys(row.name for run in runs for row in run.rows)
    return Summary(
        runs=tuple(run.name for run in runs),
        networks=tuple(_spread(name, runs) for name in names),
        latency=tuple(run.latency for run in runs if run.latency),
    )


def _spread(name: str, runs: Sequence[PastRun]) -> Spread:
    tested = [(row, run.unpruned("macs")) for run in runs if (row := run.row(name))]
    accuracies, macs, params = zip(*((row.accuracy, row.macs, row.params) for row, _ in tested), strict=True)
    shares = [row.macs / full for row, full in tested if full]
    return Spread(
        name=name,
        accuracies=accuracies,
        mean=statistics.fmean(accuracies),
        deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        macs=(min(macs), max(macs)),
        macs_share=(min(shares), max(shares)) if len(shares) == len(tested) else None,
        params=(min(params), max(params)),
    )


def markdown(summary: Summary) -> str:
    """The summary as a table that also a terminal shows well: mean accuracy ± standard deviation (runs)."""
    rows = [["network", "MACs", "params", "accuracy in %"]]
    for it in summary.networks:
        share = "" if it.macs_share is None else f" ({between(*(f'{share:.1%}' for share in it.macs_share))})"
        macs, params = (between(f"{low:,}", f"{high:,}") for low, high in (it.macs, it.params))
        rows.append([it.name, f"{macs}{share}", params, spread(it.accuracies)])
    latency = [f"- {run}: {it.text}\n" for run, it in zip(summary.runs, summary.latency, strict=False)]
    return table(rows) + (f"\n{''.join(latency)}" if latency else "")
