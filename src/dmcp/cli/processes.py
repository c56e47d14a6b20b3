"""Several dmcp commands side by side, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dmcp.cli.job import CHILD
from dmcp.cli.output import log
from dmcp.cli.session import handled_by
from dmcp.runtime.batches import core_count
from dmcp.runtime.io import make_printable

COMMAND = (sys.executable, "-P", "-m", "dmcp")  # -P: Python does not look into the current folder
_ON_A_GPU = 8  # processes at once, by default


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
    """Run commands in order, each once those in `after` are done; return why commands failed, by name.

    A signal is passed on to all children, and ends this process when they have ended. at_once: on a CPU never more than
    it has cores. The children's stderr is shown line by line, and all output is kept in the folder. total: how many
    commands there are with those that were done before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cores = core_count()
    is_cpu = device.type == "cpu"
    at_once = at_once or (cores if is_cpu else _ON_A_GPU)
    if is_cpu:
        at_once = min(at_once, cores)
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // at_once)), CHILD: "1"}
    total = total or len(commands)
    running: dict[str, subprocess.Popen[str]] = {}
    signals: list[int] = []

    def show(text: str) -> None:
        if not quiet:
            log(text)

    def stop(number: int, _: Any) -> None:
        log(f"dmcp: stopping {len(running)} of {len(commands)} runs; the same command continues them.")
        signals.append(number)
        for process in list(running.values()):
            process.send_signal(number)  # not to its workers: the process ends them

    def run(command: Command) -> str:
        """How the command failed; empty if it did not."""
        if signals:
            return "not started"
        last_line = ""
        output = (folder / f"{command.name}.out").open("a")
        errors = (folder / f"{command.name}.err").open("a")
        with (
            output,
            errors,
            subprocess.Popen(
                [*COMMAND, *command.words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,  # a Ctrl-C reaches it through `stop`, and only once
            ) as process,
        ):
            running[command.name] = process
            for line in process.stderr or ():
                errors.write(line)
                if line.strip():
                    last_line = make_printable(line.strip())
                    show(f"{command.name}: {last_line}")
        del running[command.name]
        return _failure(process.returncode, last_line)

    failed: dict[str, str] = {}
    done: set[str] = set()
    waiting = list(commands)
    started: dict[futures.Future[str], str] = {}
    with futures.ThreadPoolExecutor(at_once) as pool, handled_by(stop):
        while waiting or started:
            # Start what has nothing left to wait for.
            ready = [command for command in waiting if done.union(failed).issuperset(command.after)]
            for command in ready:
                waiting.remove(command)
                missing = [name for name in command.after if name in failed]
                if missing:
                    failed[command.name] = f"not started: it needs {', '.join(missing)}, and that failed"
                    show(f"{command.name}: {failed[command.name]}")
                else:
                    started[pool.submit(run, command)] = command.name
            # Wait until something ends, which others may wait for.
            for future in futures.wait(started, return_when=futures.FIRST_COMPLETED).done:
                name = started.pop(future)
                failure = future.result()
                if failure:
                    failed[name] = failure
                    continue
                done.add(name)
                done_before = total - len(commands)
                show(f"{name}: done ({done_before + len(done)} of {total})")
    if signals:
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(128 + signals[0])
    return failed


def _failure(code: int, last_line: str) -> str:
    """How a process ended, if not well."""
    if code == 0:
        return ""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}: {last_line}"
    return f"exit code {code}: {last_line}"
