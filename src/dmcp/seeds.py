"""Several seeds of one command side by side on one machine, and what their results have in common."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dmcp.errors import DmcpError, FileError
from dmcp.listing import PastRun, is_run, plain, read_run
from dmcp.locks import Lock
from dmcp.runs import Run, read_json

SEEDS, SUMMARY, SUMMARY_TABLE = "seeds.json", "summary.json", "summary.md"
COMMAND = (sys.executable, "-m", "dmcp")
MPS = "nvidia-cuda-mps-control"
_PAUSE = 0.1  # seconds between two looks at the children
_PATIENCE = 60.0  # seconds that a child has to heed a signal
_ANSWER = 20.0  # seconds that the control of MPS has to answer
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


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
    with _kept_signals() as signals, Lock(folder):
        _claim(folder, argv)
        commands = {seed: _command(argv, seed, run) for seed, run in runs.items() if not _is_done(run)}
        at_once, threads = _divide(len(seeds), device)
        with _mps(device, len(commands)) as places:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **places}
            ended = _run_all(commands, folder, environment, at_once, quiet, signals)
        if not signals:
            _check(ended, runs)
            summary = summarise(list(runs.values()))
            Run(folder).write(SUMMARY, asdict(summary))
            Run(folder).write(SUMMARY_TABLE, markdown(summary))
    return list(runs.values())


# the folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: no runs can be kept here: {error.strerror or error}.") from error


def _claim(folder: Path, argv: Sequence[str]) -> None:
    """Note the command; runs of another one must not be taken for seeds of this one."""
    stored = read_json(folder / SEEDS).get("argv") if (folder / SEEDS).is_file() else None
    taken = is_run(folder) or any(path.is_dir() and any(path.iterdir()) for path in folder.glob("seed-*"))
    if taken and stored != list(argv):
        known = isinstance(stored, list) and bool(stored)
        what = plain(f"`dmcp {shlex.join(map(str, stored or ()))}`") if known else "something else"
        raise FileError(f"{folder} already holds runs of {what}: give another folder, or just that command.")
    Run(folder).write(SEEDS, {"argv": list(argv)})


def _is_done(run: Path) -> bool:
    return is_run(run) and read_run(run).done


def _command(argv: Sequence[str], seed: int, run: Path) -> list[str]:
    """What starts a seed; what goes on with it, if it has been started before."""
    if is_run(run):
        return [*COMMAND, argv[0], "--resume", str(run)]
    return [*COMMAND, *argv, "--seed", str(seed), "--out", str(run)]


def _divide(number: int, device: torch.device) -> tuple[int, int]:
    """How many children run at once, and the threads of each: the same for few that are left as for all of them."""
    cores = _cores()
    at_once = min(number, cores) if device.type == "cpu" else number
    return at_once, max(1, cores // at_once)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# the children


class _Child:
    """One seed at work, in a process group of its own: a Ctrl-C reaches it through us, and so only once."""

    def __init__(self, seed: int, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.seed, self.running = seed, True
        self.last = ""  # line that it has said
        self._rest = b""
        out, err = (folder / f"seed-{seed}.{kind}" for kind in ("out", "err"))
        with out.open("ab") as said, err.open("ab") as told:  # files, not pipes: a child never waits for a reader
            self._words = err.open("rb")
            self._words.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=told, env=environment, process_group=0
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
                    _say(f"seed {self.seed}: {text}")

    def kill(self) -> None:
        """End it now, and its workers."""
        self._close(signal.SIGKILL)
        self.process.wait()

    def _close(self, number: int) -> None:
        self._words.close()
        with contextlib.suppress(ProcessLookupError):  # it has left no worker behind
            os.killpg(self.process.pid, number)

    def describe(self) -> str:
        """How it ended: seed 1: exit code 2: dmcp: no such model."""
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ": ".join([f"seed {self.seed}", how, *([self.last] if self.last else [])])


def _run_all(
    commands: Mapping[int, Sequence[str]],
    folder: Path,
    environment: Mapping[str, str],
    at_once: int,
    quiet: bool,
    signals: Sequence[int],
) -> list[_Child]:
    """Run the commands, so many at once, and pass on what they say to us and what signals we get to them."""
    waiting, running, ended = list(commands.items()), list[_Child](), list[_Child]()
    told, end = 0, float("inf")
    try:
        while (running or (waiting and not signals)) and time.monotonic() < end:
            while waiting and not signals and len(running) < at_once:
                running.append(_Child(*waiting.pop(0), folder, environment))
            if len(signals) > told == 0:
                end = time.monotonic() + _PATIENCE
                _say(f"dmcp: stopping {len(running)} of {len(commands)} seeds.")
            for child, number in itertools.product(running, signals[told:]):
                child.process.send_signal(number)  # not to its workers: they are its own to end
            told = len(signals)
            time.sleep(_PAUSE)
            for child in running:
                child.look(quiet)
            ended += [child for child in running if not child.running]
            running = [child for child in running if child.running]
    finally:
        for child in running:
            if child.running:
                child.kill()
    return ended


def _check(ended: Sequence[_Child], runs: Mapping[int, Path]) -> None:
    """Stop if a child has failed, once all have ended."""
    failed = [child for child in ended if child.process.returncode or not _is_done(runs[child.seed])]
    if failed:
        listed = "; ".join(child.describe() for child in sorted(failed, key=lambda child: child.seed))
        raise DmcpError(f"{len(failed)} of {len(runs)} seeds failed, the same command starts only them again: {listed}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the runs go on when nobody listens any more
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _kept_signals() -> Iterator[list[int]]:
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


# MPS, which lets several processes compute on one GPU at the same time; without it they take turns


@contextlib.contextmanager
def _mps(device: torch.device, number: int) -> Iterator[dict[str, str]]:
    """Variables that let so many children share the GPU: those of a daemon of our own, none if it is not needed."""
    if device.type != "cuda" or number < 2:
        yield {}
    elif shutil.which(MPS) is None:
        _say(f"dmcp: {MPS} is not on PATH: the seeds take turns on the GPU, which is slower.")
        yield {}
    elif _ask_mps("get_server_list", os.environ):
        yield {}  # one runs already, and the children will find it as we did
    else:
        with tempfile.TemporaryDirectory(prefix="dmcp-mps-", ignore_cleanup_errors=True) as folder:
            places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
            yield from _own_mps(places)


def _own_mps(places: dict[str, str]) -> Iterator[dict[str, str]]:
    """Start a daemon there, and end it after the yield."""
    for place in places.values():
        os.mkdir(place)
    environment = os.environ | places
    try:
        if _ask_mps("", environment, "-d") and _ask_mps("get_server_list", environment):
            yield places | _renumber(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        else:
            _say(f"dmcp: {MPS} could not be started: the seeds take turns on the GPU, which is slower.")
            yield {}
    finally:
        _ask_mps("quit", environment)


def _ask_mps(question: str, environment: Mapping[str, str], *options: str) -> bool:
    """Whether the daemon of this environment has understood; false if there is none."""
    try:
        done = subprocess.run(
            [MPS, *options],
            input=f"{question}\n".encode(),
            stdout=subprocess.DEVNULL,  # a pipe would be held open by the daemon that is started
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_ANSWER,
            start_new_session=True,  # a Ctrl-C is for us, not for the daemon
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _renumber(visible: str) -> dict[str, str]:
    """The GPUs that clients may use: a daemon counts those that it sees from 0 on, names of GPUs stay."""
    words = [word.strip() for word in visible.split(",")]
    if not all(word.isdigit() for word in words):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(words))))}


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


def summarise(folders: Sequence[Path]) -> Summary:
    """What the runs in these folders have found, network by network."""
    runs = [read_run(folder) for folder in folders]
    names = dict.fromkeys(row.name for run in runs for row in run.rows)
    return Summary(runs=tuple(run.name for run in runs), networks=tuple(_spread(name, runs) for name in names))


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
        share = "" if it.macs_share is None else f" ({_range(*(f'{share:.1%}' for share in it.macs_share))})"
        spread = "" if it.deviation is None else f" ± {100 * it.deviation:.2f}"
        macs, params = (_range(f"{least:,}", f"{most:,}") for least, most in (it.macs, it.params))
        rows.append([it.name, f"{macs}{share}", params, f"{100 * it.mean:.2f}{spread} ({len(it.accuracies)})"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([lines[0], rule, *lines[1:], ""])


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least}–{most}"
