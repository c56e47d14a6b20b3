"""Several runs side by side."""

from __future__ import annotations

import contextlib
import itertools
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
PARENT = "DMCP_PARENT"  # variable with the process that has started a child
_ON_A_GPU = 8  # children at once, if nobody says how many
_PAUSE = 0.1  # seconds between two looks at the children
_LOOK = 1.0  # seconds between two looks of a child at its parent
_PATIENCE = 60.0  # seconds that a child has to heed a signal
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True)
class Command:
    """One process to be run."""

    name: str  # of its files NAME.out and NAME.err
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()  # names of commands that must have succeeded before
    title: str = ""  # shown before its lines; the name, if empty

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name:
            raise DmcpError(f"{self.name!r} cannot name the files of a command: give it a name without slashes.")


@dataclass(frozen=True)
class Ended:
    """How a command has ended."""

    command: Command
    code: int | None  # negative: the signal that killed it; None: never started, since what it needs has failed
    last: str  # line that it has said, or why it was not started

    def describe(self) -> str:
        """In words: seed 1: exit code 2: dmcp: no such model."""
        if self.code is None:
            how = "not started"
        else:
            how = f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        return ": ".join([_title(self.command), how, *([self.last] if self.last else [])])


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

    signals: of `kept_signals`; one stops all children, and nothing else is started. at_once: the most that run at a
    time, on a CPU never more than it has cores. What is said is shown line by line, and kept in the folder. total: so
    many are there with those that were done before; if it is given, it is told of each that ends well.
    """
    _check(commands, at_once)
    at_once, threads = _divide(at_once, device)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())}
    ended = _run_all(commands, folder, environment, at_once, quiet, signals, noun, total)
    order = [command.name for command in commands]
    return sorted(ended, key=lambda end: order.index(end.command.name))


def _check(commands: Sequence[Command], at_once: int | None) -> None:
    if at_once is not None and at_once < 1:
        raise DmcpError(f"At least one command must run at a time, not {at_once}.")
    known = set[str]()
    for command in commands:
        if command.name in known:
            raise DmcpError(f"Two commands are named {command.name}: give each a name of its own.")
        if missing := sorted({*command.after} - known):
            raise DmcpError(f"{command.name} waits for {', '.join(missing)}: give what it waits for before it.")
        known.add(command.name)


def _divide(at_once: int | None, device: torch.device) -> tuple[int, int]:
    """How many children run at once, and the threads of each: the same for few that are left as for all of them."""
    cores = _cores()
    if device.type == "cpu":
        at_once = min(at_once or cores, cores)
    at_once = at_once or _ON_A_GPU
    return at_once, max(1, cores // at_once)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _title(command: Command) -> str:
    return command.title or command.name


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the children go on when nobody listens any more
        print(text, file=sys.stderr, flush=True)


# the children


class _Child:
    """One command at work, in a process group of its own: a Ctrl-C reaches it through us, and so only once."""

    def __init__(self, command: Command, folder: Path, environment: Mapping[str, str]) -> None:
        self.command, self.running = command, True
        self.last = ""  # line that it has said
        self._rest = b""
        out, err = (folder / f"{command.name}.{kind}" for kind in ("out", "err"))
        with out.open("ab") as said, err.open("ab") as told:  # files, not pipes: a child never waits for a reader
            self._words = err.open("rb")
            self._words.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=said, stderr=told, env=environment, process_group=0
            )

    def look(self, quiet: bool) -> None:
        """Show what it has said since the last look, and see whether it still runs."""
        self.running = self.process.poll() is None  # before reading: of one that has ended all is then read
        *lines, self._rest = (self._rest + self._words.read()).split(b"\n")
        if not self.running:
            lines.append(self._rest)
            self._close(signal.SIGTERM)
        for line in lines:
            text = plain(line.decode(errors="replace").rstrip().rpartition("\r")[2])  # the end of a line that moves
            if text:
                self.last = text.strip()
                if not quiet:
                    _say(f"{_title(self.command)}: {text}")

    def end(self) -> Ended:
        """How it ended, once it does not run any more."""
        return Ended(self.command, self.process.returncode, self.last)

    def kill(self) -> None:
        """End it now, and its workers."""
        self._close(signal.SIGKILL)
        self.process.wait()

    def _close(self, number: int) -> None:
        self._words.close()
        with contextlib.suppress(ProcessLookupError):  # it has left no worker behind
            os.killpg(self.process.pid, number)


def _run_all(
    commands: Sequence[Command],
    folder: Path,
    environment: Mapping[str, str],
    at_once: int,
    quiet: bool,
    signals: Sequence[int],
    noun: str,
    total: int | None = None,
) -> list[Ended]:
    """Run the commands, so many at once, and pass on what they say to us and what signals we get to them."""
    waiting, running, ended = list(commands), list[_Child](), list[Ended]()
    told, end = 0, float("inf")
    try:
        while (running or (waiting and not signals)) and time.monotonic() < end:
            while not signals and len(running) < at_once and (ready := _next(waiting, ended)):
                waiting.remove(ready)
                running.append(_Child(ready, folder, environment))
            if len(signals) > told == 0:
                end = time.monotonic() + _PATIENCE
                _say(f"dmcp: stopping {len(running)} of {len(commands)} {noun}; the same command goes on with them.")
            for child, number in itertools.product(running, signals[told:]):
                child.process.send_signal(number)  # not to its workers: they are its own to end
            told = len(signals)
            time.sleep(_PAUSE)
            for child in running:
                child.look(quiet)
            for child in [child for child in running if not child.running]:
                ended.append(child.end())
                if total is not None and child.process.returncode == 0 and not quiet:
                    done = sum(end.code == 0 for end in ended) + total - len(commands)
                    _say(f"{_title(child.command)}: done ({done} of {total})")
            running = [child for child in running if child.running]
            ended += _skip(waiting, ended, quiet) if not signals else []
    finally:
        for child in running:
            if child.running:
                child.kill()
    return ended


def _next(waiting: Sequence[Command], ended: Sequence[Ended]) -> Command | None:
    """The first that may start now."""
    done = {end.command.name for end in ended}  # with success: those after a failed one are taken out at once
    return next((command for command in waiting if done.issuperset(command.after)), None)


def _skip(waiting: list[Command], ended: Sequence[Ended], quiet: bool) -> list[Ended]:
    """Take out what waits for a command that has failed, and in turn what waits for that."""
    failed, found = {end.command.name for end in ended if end.code != 0}, list[Ended]()
    for command in [*waiting]:  # each comes after what it waits for
        if lost := [name for name in command.after if name in failed]:
            waiting.remove(command)
            failed.add(command.name)
            found.append(Ended(command, None, f"it needs {', '.join(lost)}, and that failed"))
            if not quiet:
                _say(found[-1].describe())
    return found


@contextlib.contextmanager
def kept_signals() -> Iterator[list[int]]:
    """The signals that ask us to stop, noted during the block and acted on after it; ignored ones stay ignored."""
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
    """Ask ourselves to stop if the process that has started us is gone, as it would have done; then end for good."""
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


SEEDS, SUMMARY, SUMMARY_TABLE = "seeds.json", "summary.json", "summary.md"


def run_seeds(
    argv: Sequence[str], seeds: Sequence[int], folder: Path, device: torch.device, quiet: bool = False
) -> list[Path]:
    """Run a dmcp command once per seed into FOLDER/seed-K, side by side, and write a summary; their run folders.

    argv: the command and its options, without --seed, --out and --quiet. Started again with the same ones, it leaves
    finished seeds as they are and goes on with others. What they print is kept: FOLDER/seed-K.out, FOLDER/seed-K.err.
    """
    if not seeds or len({*seeds}) < len(seeds):
        raise DmcpError(f"Give at least one seed, and each only once, not {list(seeds)}.")
    _make(folder)
    runs = {seed: folder / f"seed-{seed}" for seed in seeds}
    with kept_signals() as signals, Lock(folder):
        _claim(folder, argv)
        commands = [_command(argv, seed, run) for seed, run in runs.items() if not _is_done(run)]
        ended = run_side_by_side(commands, folder, device, signals, at_once=len(seeds), quiet=quiet, noun="seeds")
        if not signals:
            _check_seeds(ended, runs)
            summary = summarise(list(runs.values()))
            Run(folder).write(SUMMARY, asdict(summary))
            Run(folder).write(SUMMARY_TABLE, markdown(summary))
    return list(runs.values())


def words_of_each(argv: Sequence[str]) -> list[str]:
    """The words of a command line that each seed gets, too; what is for all of them together goes with its value."""
    words = iter(argv)
    return [word for word in words if not _drops(word, words)]


def _drops(word: str, rest: Iterator[str]) -> bool:
    """Whether a word of the command line is for all seeds together, not for one; its value goes with it."""
    name, equals, _ = word.partition("=")
    if name in ("--quiet", "--json", "--debug"):
        return True
    if name not in ("--seeds", "--seed", "--out"):
        return False
    if not equals:
        next(rest, None)
    return True


# the folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: no runs can be kept here: {error.strerror or error}.") from error


def _claim(folder: Path, argv: Sequence[str]) -> None:
    """Note the command; runs of another one must not be taken for seeds of this one."""
    refuse_others(folder, argv)
    Run(folder).write(SEEDS, {"argv": list(argv)})


def refuse_others(folder: Path, argv: Sequence[str]) -> None:
    """Refuse a folder that has runs of another command."""
    stored = read_json(folder / SEEDS).get("argv") if (folder / SEEDS).is_file() else None
    taken = is_run(folder) or any(path.is_dir() and any(path.iterdir()) for path in folder.glob("seed-*"))
    if taken and stored != list(argv):
        known = isinstance(stored, list) and bool(stored)
        what = plain(f"`dmcp {shlex.join(map(str, stored or ()))}`") if known else "something else"
        raise FileError(f"{folder} already holds runs of {what}: give another folder, or just that command.")


def _is_done(run: Path) -> bool:
    return is_run(run) and read_run(run).done


def _command(argv: Sequence[str], seed: int, run: Path) -> Command:
    """What starts a seed; what goes on with it, if it has been started before."""
    resume = (argv[0], "--resume", str(run))
    words = resume if is_run(run) else (*argv, "--seed", str(seed), "--out", str(run))
    return Command(run.name, (*COMMAND, *words), title=f"seed {seed}")


def _check_seeds(ended: Sequence[Ended], runs: Mapping[int, Path]) -> None:
    """Stop if a child has failed, once all have ended."""
    seeds = {run.name: seed for seed, run in runs.items()}
    failed = [end for end in ended if end.code or not _is_done(runs[seeds[end.command.name]])]
    if failed:
        listed = "; ".join(end.describe() for end in sorted(failed, key=lambda end: seeds[end.command.name]))
        raise DmcpError(f"{len(failed)} of {len(runs)} seeds failed, the same command starts only them again: {listed}")


# the summary


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One network in the final tables of several runs; accuracies and shares from 0 to 1."""

    name: str
    accuracies: tuple[float, ...]  # in the order of the runs that tested it
    mean: float
    deviation: float | None  # standard deviation of the accuracy (ddof = 1); None for one run
    macs: tuple[int, int]  # the least and the most
    macs_share: tuple[float, float] | None  # of the unpruned network; None if a run does not know it
    params: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What several runs of one command have found."""

    runs: tuple[str, ...]
    networks: tuple[Spread, ...]
    latency: tuple[Outcome, ...] = ()  # of each run, where the budget has a limit of it


def summarise(folders: Sequence[Path]) -> Summary:
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
        macs, params = (between(f"{least:,}", f"{most:,}") for least, most in (it.macs, it.params))
        rows.append([it.name, f"{macs}{share}", params, spread(it.accuracies)])
    told = (f"- {run}: {it.text}\n" for run, it in zip(summary.runs, summary.latency, strict=False))
    return table(rows) + (f"\n{''.join(told)}" if summary.latency else "")
