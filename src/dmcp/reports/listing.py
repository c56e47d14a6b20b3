"""What run folders hold, read with care: a run may be unfinished, damaged, or somebody else's."""

from __future__ import annotations

import itertools
import math
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmcp.errors import DmcpError, FileError
from dmcp.files import parse_tensors, plain, read_bytes
from dmcp.latency import Outcome
from dmcp.locks import LOCK, alive
from dmcp.markov import Process, process_of
from dmcp.plain_data import from_plain
from dmcp.reports.run_logs import read_log, sentence, timed
from dmcp.rows import AS_GIVEN, OURS, TEACHER, UNPRUNED, Row
from dmcp.runs import (
    ALPHAS,
    CHECKPOINTS,
    LOG,
    MOST_ALPHAS,
    OUTCOME,
    PREPARED,
    SEARCH,
    SETTINGS,
    TIMES,
    read_json,
)
from dmcp.saving import WIDTHS
from dmcp.searching.searches import SearchRecord
from dmcp.spaces import Widths
from dmcp.training import StepRecord

_TAIL = 2**20  # bytes of a log that a list looks at


@dataclass(frozen=True, eq=False)
class Chances:
    """The chains that a search ended with."""

    spaces: tuple[str, ...]
    alphas: Tensor  # (S, G-1)
    sizes: Tensor  # (S, G)
    targets: Mapping[str, int]  # kind -> the most allowed
    process: Process


@dataclass(frozen=True, kw_only=True, eq=False)
class PastRun:
    """Everything that a run folder says about itself; empty where it says nothing."""

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    started: float = 0.0  # seconds since 1970
    search: tuple[SearchRecord, ...] = ()
    training: Mapping[str, tuple[StepRecord, ...]] = field(default_factory=dict)  # by network
    rows: tuple[Row, ...] = ()  # networks that were tested
    chances: Chances | None = None
    widths: Mapping[str, int] = field(default_factory=dict)
    latency: Outcome | None = None  # how a limit of latency ended
    prepared: bool = False  # whether it has made the network that it was to make for other runs
    running: bool = False
    problems: tuple[str, ...] = ()  # what could not be read, a sentence each

    @property
    def name(self) -> str:
        """The folder's name."""
        return plain(self.folder.resolve().name)

    @property
    def budget(self) -> str:
        """The budget as it was asked for."""
        return text_at(self.settings, "search", "budget")

    @property
    def result(self) -> Row | None:
        """The tested network that the run was for."""
        return self.row(OURS) or next((row for row in self.rows if row.name not in (AS_GIVEN, TEACHER)), None)

    @property
    def done(self) -> bool:
        """Whether everything that the command makes is there."""
        return self.prepared or (bool(self.widths) and (bool(self.rows) or self.settings.get("command") == "search"))

    @property
    def state(self) -> str:
        """One word: done, running, stopped or damaged."""
        if self.problems:
            return "damaged"
        return "done" if self.done else "running" if self.running else "stopped"

    def row(self, name: str) -> Row | None:
        """The tested network of this name."""
        return next((row for row in self.rows if row.name == name), None)

    def unpruned(self, kind: str) -> int | None:
        """What the unpruned network costs, if the run says so."""
        stored = value_at(self.settings, "unpruned", kind)
        if type(stored) is int and stored > 0:
            return stored
        row = self.row(UNPRUNED)
        return int(getattr(row, kind)) if row else None

    def share(self, kind: str) -> float | None:
        """What the result costs of one kind, as a share of the unpruned network."""
        full = self.unpruned(kind)
        return getattr(self.result, kind) / full if self.result and full else None


# reading


def read_run(folder: str | os.PathLike[str], tail: int | None = None) -> PastRun:
    """A run as far as it can be read; only a folder that holds no run at all is refused.

    tail: read so many bytes at the end of the log only, where the results are.
    """
    path = Path(folder)
    if not is_run(path):
        raise FileError(f"{path}: not a run: give a folder that dmcp prune, search or train has made.")
    problems: list[str] = []
    settings = _settings(path, problems)
    search, training, rows = read_log(path / LOG, tail, problems)
    started = (path / SETTINGS if (path / SETTINGS).is_file() else path).stat().st_mtime
    return PastRun(
        folder=path,
        settings=settings,
        started=started,
        search=tuple(search[step] for step in sorted(search)),
        training={name: tuple(steps[step] for step in sorted(steps)) for name, steps in training.items()},
        rows=timed(path / TIMES, rows.values(), problems),
        chances=_chances(path, problems),
        widths=_widths(path, problems),
        latency=_latency(path, problems),
        prepared=(path / PREPARED).is_file() and not (path / CHECKPOINTS).exists(),
        running=_is_running(path),
        problems=tuple(problems),
    )


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[PastRun]:
    """Runs, each once; a folder that is no run but holds some stands for these, by their names."""
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        inside = [] if is_run(folder) or not folder.is_dir() else sorted(filter(is_run, folder.iterdir()))
        for path in inside or [folder]:
            found.setdefault(path.resolve(), path)
    return [read_run(path) for path in found.values()]


def list_runs(root: str | os.PathLike[str]) -> list[PastRun]:
    """The runs in a folder, oldest first; other folders are passed over."""
    path = Path(root)
    try:
        folders = [folder for folder in path.iterdir() if is_run(folder)]
    except OSError as error:
        raise FileError(f"{path}: no runs can be listed here: {error.strerror or error}.") from error
    return sorted((read_run(folder, _TAIL) for folder in folders), key=lambda run: (run.started, run.name))


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    return any((folder / name).is_file() for name in (SETTINGS, LOG))


def _settings(folder: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_json(folder / SETTINGS)
    except (FileError, RecursionError) as error:
        problems.append(sentence(folder / SETTINGS, error))
        return {}


def _widths(folder: Path, problems: list[str]) -> dict[str, int]:
    if not (folder / WIDTHS).is_file():
        return {}
    try:
        return dict(Widths.from_json(read_json(folder / WIDTHS)))
    except (DmcpError, RecursionError) as error:
        problems.append(sentence(folder / WIDTHS, error))
        return {}


def _latency(folder: Path, problems: list[str]) -> Outcome | None:
    if not (folder / OUTCOME).is_file():
        return None
    try:
        return from_plain(Outcome, read_json(folder / OUTCOME))
    except (FileError, TypeError, ValueError, RecursionError) as error:
        problems.append(sentence(folder / OUTCOME, error))
        return None


def _chances(folder: Path, problems: list[str]) -> Chances | None:
    if not (folder / SEARCH).is_file():
        return None
    try:
        facts = read_json(folder / SEARCH)
        tensors = parse_tensors(read_bytes(folder / ALPHAS, MOST_ALPHAS), folder / ALPHAS)
        alphas, sizes, spaces = tensors["alphas"], tensors["sizes"], tuple(map(str, facts["spaces"]))
        fits = alphas.is_floating_point() and sizes.dtype == torch.int64
        fits = fits and alphas.ndim == sizes.ndim == 2 and alphas.shape == (len(spaces), sizes.shape[1] - 1)
        fits = fits and len(sizes) == len(spaces) and bool((sizes[:, 0] > 0).all())  # the floor is never empty
        if not fits or alphas.isnan().any() or (sizes < 0).any() or (sizes > 2**31).any():
            raise FileError("its tensors are not those of this search's spaces.")
        targets = {str(limit["kind"]): int(limit["target"]) for limit in facts["budget"]["limits"]}
        process = process_of(bool(facts["independent"]))
        return Chances(spaces, alphas.double(), sizes, targets, process)
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        problems.append(sentence(folder / ALPHAS, error))
        return None


def _is_running(folder: Path) -> bool:
    """Whether the process that holds the run's lock is alive; one on another machine is believed."""
    try:
        holder = read_json(folder / LOCK) if (folder / LOCK).is_file() else {}
    except (FileError, RecursionError):
        return False
    pid, start = holder.get("pid"), holder.get("start")
    if type(pid) is not int or pid < 1 or type(start) not in (int, type(None)):
        return False
    return holder.get("host") != platform.node() or alive(pid, start)


# what it says


def progress(run: PastRun) -> str:
    """How far a run is: the last step that its log knows."""
    if run.training:
        stage, records = list(run.training.items())[-1]
        return f"{stage}, step {records[-1].step + 1:,} of {records[-1].steps:,}"
    if not run.search:
        return "before the first logged step"
    last, epochs = run.search[-1], value_at(run.settings, "search", "epochs")
    if type(epochs) is not int:
        return f"search, step {last.step + 1:,}"
    turns = (new for old, new in itertools.pairwise(run.search) if old.epoch < new.epoch and new.epoch > 0)
    turn = next(turns, None)  # the first step of an epoch tells how many steps an epoch has
    if turn is None:
        return f"search, step {last.step + 1:,}, in epoch {last.epoch + 1} of {epochs}"
    return f"search, step {last.step + 1:,} of {round(turn.step / turn.epoch * epochs):,}"


def describe(run: PastRun) -> dict[str, Any]:
    """A run in plain data, as `dmcp runs --json` gives it; shares and accuracies from 0 to 1.

    A metric that is no number is None: JSON has no word for it.
    """
    result = run.result
    return {
        "name": run.name,
        "folder": plain(str(run.folder)),
        "command": text_at(run.settings, "command"),
        "model": text_at(run.settings, "job", "model"),
        "data": text_at(run.settings, "job", "data"),
        "budget": run.budget,
        "state": run.state,
        "progress": "" if run.done else progress(run),
        "accuracy": result.accuracy if result and math.isfinite(result.accuracy) else None,
        "macs": result.macs if result else None,
        "macs_share": run.share("macs"),
        "started": date(run),
    }


def date(run: PastRun) -> str:
    """When it was started, by this machine's clock; empty if the file's time is none."""
    try:
        return datetime.fromtimestamp(run.started).isoformat(" ", "minutes")
    except (OverflowError, ValueError, OSError):
        return ""


def value_at(data: Any, *keys: str) -> Any:
    """The value at a path of keys, or None."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def text_at(data: Any, *keys: str) -> str:
    """The text or number at a path of keys, empty if there is none."""
    value = value_at(data, *keys)
    return plain(str(value)) if isinstance(value, str | int | float) else ""


def command_line(run: PastRun) -> str:
    """The command that made the run, for a shell; empty if the run did not keep it."""
    words = run.settings.get("argv")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        return ""
    program = "dmcp" if Path(words[0]).name in ("dmcp", "__main__.py") else words[0]
    return plain(shlex.join([program, *words[1:]]))
