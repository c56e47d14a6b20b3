"""Several commands side by side: the runs of a comparison, the seeds of one command."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dmcp.cli.session import PARENT, PATIENCE, handled_by, log
from dmcp.errors import DmcpError, FileError
from dmcp.runs import Run, is_run, read_json, read_run
from dmcp.runtime.io import Lock, plain
from dmcp.units import between, spread, table

COMMAND = (sys.executable, "-m", "dmcp")
SEEDS, SUMMARY, SUMMARY_TABLE = "seeds.json", "summary.json", "summary.md"
_ON_A_GPU = 8  # children at once, unless told
_PAUSE = 0.1  # seconds between two looks at the children


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
        how = "not started" if self.code is None else f"exit code {self.code}"
        if self.code is not None and self.code < 0:
            how = f"killed by {signal.Signals(-self.code).name}"
        return ": ".join(filter(None, [self.command.title or self.command.name, how, self.last]))


def run_side_by_side(
    commands: Sequence[Command],
    folder: Path,
    device: torch.device,
    *,
    at_once: int | None = None,
    quiet: bool = False,
    total: int = 0,
) -> list[Ended]:
    """Run commands, in the order given as far as each may start; how they ended.

    A signal stops all children, and us when they have ended. at_once: on a CPU never more than it has cores. Their
    stderr is shown line by line; all output is kept in the folder. total: with those that were done before; each that
    ends well is then counted.
    """
    cores = _cores()
    at_once = min(at_once or cores, cores) if device.type == "cpu" else at_once or _ON_A_GPU
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // at_once)), PARENT: str(os.getpid())}
    show = (lambda text: None) if quiet else log
    waiting, running, ended = list(commands), list[_Child](), list[Ended]()
    signals, heard, end = list[int](), 0, float("inf")
    with handled_by(lambda number, _: signals.append(number)):
        try:
            while (running or (waiting and not signals)) and time.monotonic() < end:
                codes = {it.command.name: it.code for it in ended}
                for command in list(waiting) if not signals else ():
                    if lost := [name for name in command.after if codes.get(name, 0) != 0]:
                        waiting.remove(command)
                        ended.append(Ended(command, None, f"it needs {', '.join(lost)}, and that failed"))
                        codes[command.name] = None
                        show(ended[-1].describe())
                    elif len(running) < at_once and codes.keys() >= set(command.after):
                        waiting.remove(command)
                        running.append(_Child(command, folder, environment))
                if len(signals) > heard == 0:
                    end = time.monotonic() + PATIENCE
                    log(f"dmcp: stopping {len(running)} of {len(commands)} runs; the same command goes on.")
                for number, child in itertools.product(signals[heard:], running):
                    child.process.send_signal(number)  # not to its workers: it ends them
                heard = len(signals)
                time.sleep(_PAUSE)
                for child in list(running):
                    code = child.look(show)
                    if code is not None:
                        running.remove(child)
                        ended.append(Ended(child.command, code, child.last))
                    if code == 0 and total:
                        left = len(waiting) + len(running) + sum(it.code != 0 for it in ended)
                        show(f"{child.command.title or child.command.name}: done ({total - left} of {total})")
        finally:
            for child in running:
                child.close(signal.SIGKILL)
                child.process.wait()
    if signals:
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(128 + signals[0])
    return ended


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Child:
    """A running command in a process group of its own: a Ctrl-C reaches it through us, and so only once."""

    def __init__(self, command: Command, folder: Path, environment: Mapping[str, str]) -> None:
        self.command, self.last, self._rest = command, "", b""
        out, err = (folder / f"{command.name}.{kind}" for kind in ("out", "err"))
        with out.open("ab") as stdout, err.open("ab") as stderr:  # files: a child never waits for a reader
            self._lines = err.open("rb")
            self._lines.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, process_group=0
            )

    def look(self, show: Callable[[str], None]) -> int | None:
        """Show what it has written since the last look; its exit code once it has ended."""
        code = self.process.poll()  # before reading: of one that has ended all is then read
        *lines, self._rest = (self._rest + self._lines.read()).split(b"\n")
        if code is not None:
            lines.append(self._rest)
            self.close(signal.SIGTERM)
        for line in lines:
            text = plain(line.decode(errors="replace").rstrip().rpartition("\r")[2])  # the end of a line that moves
            if text:
                self.last = text.strip()
                show(f"{self.command.title or self.command.name}: {text}")
        return code

    def close(self, number: int) -> None:
        """End it and its workers, or those that it has left behind."""
        self._lines.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


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
    with Lock(folder):
        refuse_others(folder, argv)
        Run(folder).write(SEEDS, {"argv": list(argv)})
        commands = []
        for seed, run in runs.items():
            new = (*argv, "--seed", str(seed), "--out", str(run))
            words = (argv[0], "--resume", str(run)) if is_run(run) else new
            if not _is_done(run):
                commands.append(Command(run.name, (*COMMAND, *words), title=f"seed {seed}"))
        ended = run_side_by_side(commands, folder, device, at_once=len(seeds), quiet=quiet)
        if failed := [end.describe() for end in ended if end.code or not _is_done(folder / end.command.name)]:
            listed = "; ".join(sorted(failed))
            raise DmcpError(
                f"{len(failed)} of {len(runs)} seeds failed, the same command starts only them again: {listed}"
            )
        summary = summarize(list(runs.values()))
        Run(folder).write(SUMMARY, summary)
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
        what = plain(f"`dmcp {shlex.join(map(str, stored))}`") if isinstance(stored, list) else "something else"
        raise FileError(f"{folder} already holds runs of {what}: give another folder, or just that command.")


def _is_done(run: Path) -> bool:
    return is_run(run) and read_run(run).done


def summarize(folders: Sequence[Path]) -> dict[str, Any]:
    """What the runs in these folders have found, network by network, as plain data; shares from 0 to 1.

    deviation: standard deviation (ddof = 1), None for one run. macs, macs_share, params: the lowest and the highest.
    """
    runs = [read_run(folder) for folder in folders]
    networks = []
    for name in dict.fromkeys(row.name for run in runs for row in run.rows):
        tested = [(row, run.unpruned("macs")) for run in runs for row in run.rows if row.name == name]
        accuracies = [row.accuracy for row, _ in tested]
        shares = [row.macs / full for row, full in tested if full]
        networks.append(
            {
                "name": name,
                "accuracies": accuracies,
                "mean": statistics.fmean(accuracies),
                "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "macs": _ends([row.macs for row, _ in tested]),
                "macs_share": _ends(shares) if len(shares) == len(tested) else None,
                "params": _ends([row.params for row, _ in tested]),
            }
        )
    latency = [asdict(run.latency) | {"text": run.latency.text} for run in runs if run.latency]
    return {"runs": [run.name for run in runs], "networks": networks, "latency": latency}


def _ends(numbers: Sequence[float]) -> tuple[float, float]:
    return min(numbers), max(numbers)


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a table that also a terminal shows well: mean accuracy ± standard deviation (runs)."""
    rows = [["network", "MACs", "params", "accuracy in %"]]
    for it in summary["networks"]:
        share = "" if it["macs_share"] is None else f" ({between(*(f'{share:.1%}' for share in it['macs_share']))})"
        macs, params = (between(*(f"{number:,}" for number in it[kind])) for kind in ("macs", "params"))
        rows.append([it["name"], f"{macs}{share}", params, spread(it["accuracies"])])
    latency = [f"- {run}: {it['text']}\n" for run, it in zip(summary["runs"], summary["latency"], strict=False)]
    return table(rows) + (f"\n{''.join(latency)}" if latency else "")
