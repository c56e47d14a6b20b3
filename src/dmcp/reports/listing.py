"""What run folders hold, read with care: a run may be unfinished, damaged, or somebody else's."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmcp.checkpoints import refuse_link
from dmcp.errors import DmcpError, FileError
from dmcp.files import parse_tensors, read_bytes
from dmcp.latency import Outcome
from dmcp.locks import LOCK, alive
from dmcp.markov import CHAIN, INDEPENDENT, Process
from dmcp.plain_data import from_plain
from dmcp.rows import AS_GIVEN, OURS, TEACHER, UNPRUNED, Row
from dmcp.runs import (
    ALPHAS,
    CHECKPOINTS,
    LOG,
    MOST_ALPHAS,
    MOST_LOG,
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

_LISTS, _NAMES = {"weight_losses", "ratios"}, {"name"}  # all other fields of records are numbers
_NULLABLE = {"lr", "weight_losses", "alpha_lr", "task_loss", "budget_loss", "ratios"}
_FLAGS = {"own_metric", "lower_is_better"}
_OPTIONAL = _NULLABLE | {it.name for it in fields(Row) if it.default is not MISSING}  # old logs lack some
_KINDS: dict[str, type[SearchRecord] | type[StepRecord] | type[Row]] = {"search": SearchRecord, "test": Row}
_FIELDS = {kind: {it.name for it in fields(kind)} for kind in (*_KINDS.values(), StepRecord)}
_TAIL = 2**20  # bytes of a log that a list looks at
_HUGE = 1e18  # beyond what any network costs, and what a chart can draw


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
    search, training, rows = _read_log(path / LOG, tail, problems)
    started = (path / SETTINGS if (path / SETTINGS).is_file() else path).stat().st_mtime
    return PastRun(
        folder=path,
        settings=settings,
        started=started,
        search=tuple(search[step] for step in sorted(search)),
        training={name: tuple(steps[step] for step in sorted(steps)) for name, steps in training.items()},
        rows=_timed(path / TIMES, rows.values(), problems),
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
        problems.append(_sentence(folder / SETTINGS, error))
        return {}


def _widths(folder: Path, problems: list[str]) -> dict[str, int]:
    if not (folder / WIDTHS).is_file():
        return {}
    try:
        return dict(Widths.from_json(read_json(folder / WIDTHS)))
    except (DmcpError, RecursionError) as error:
        problems.append(_sentence(folder / WIDTHS, error))
        return {}


def _latency(folder: Path, problems: list[str]) -> Outcome | None:
    if not (folder / OUTCOME).is_file():
        return None
    try:
        return from_plain(Outcome, read_json(folder / OUTCOME))
    except (FileError, TypeError, ValueError, RecursionError) as error:
        problems.append(_sentence(folder / OUTCOME, error))
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
        return Chances(spaces, alphas.double(), sizes, targets, INDEPENDENT if facts["independent"] else CHAIN)
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        problems.append(_sentence(folder / ALPHAS, error))
        return None


Log = tuple[dict[int, SearchRecord], dict[str, dict[int, StepRecord]], dict[str, Row]]


def _read_log(path: Path, tail: int | None, problems: list[str]) -> Log:
    """The records of a log; of a step that was done again after a stop, the later one counts."""
    search: dict[int, SearchRecord] = {}
    training: dict[str, dict[int, StepRecord]] = {}
    rows: dict[str, Row] = {}
    for stage, record in _records(path, tail, problems):
        if isinstance(record, SearchRecord):
            search[record.step] = record
        elif isinstance(record, Row):
            rows[record.name] = record
        else:
            training.setdefault(stage, {})[record.step] = record
    return search, training, rows


def _timed(path: Path, rows: Iterable[Row], problems: list[str]) -> tuple[Row, ...]:
    """The rows with their times, which have a file of their own."""
    times: dict[str, dict[str, Any]] = {}
    for line in _lines(path, None, problems):
        try:
            data = json.loads(line)
            times[_checked("name", data["name"])] = {name: _checked(name, data[name]) for name in ("ms", "batch")}
        except (ValueError, TypeError, KeyError, RecursionError):
            problems.append(f"{path.name}: not a time of a run: {line[:40]!r}.")
            break
    return tuple(replace(row, **times.get(row.name, {})) for row in rows)


def _records(
    path: Path, tail: int | None, problems: list[str]
) -> Iterator[tuple[str, SearchRecord | StepRecord | Row]]:
    for line in _lines(path, tail, problems):
        try:
            data = json.loads(line)
            record = _record(data)
        except (ValueError, TypeError, KeyError, RecursionError):
            problems.append(f"{path.name}: not a record of a run: {line[:40]!r}.")
            return
        if record is not None:
            yield plain(data["stage"]), record


def _lines(path: Path, tail: int | None, problems: list[str]) -> list[bytes]:
    """Whole lines only: at the end of a log there may be one that a kill has cut."""
    if not path.is_file():
        return []
    try:
        if tail is None:
            return read_bytes(path, MOST_LOG).split(b"\n")[:-1]
        refuse_link(path)
        with path.open("rb") as file:
            start = max(path.stat().st_size - tail, 0)
            file.seek(start)
            return file.read(tail).split(b"\n")[bool(start) : -1]
    except OSError as error:
        problems.append(_sentence(path, error))
        return []


def _record(data: Any) -> SearchRecord | StepRecord | Row | None:
    """The record in one line of a log, None for a line of another kind; TypeError where values are of a wrong one."""
    if not isinstance(data["stage"], str):
        raise TypeError("stage")
    kind = _KINDS.get(data["stage"], StepRecord)
    if not _FIELDS[kind] - _OPTIONAL <= data.keys():
        return None
    own = data.get("own_metric") is True
    return kind(**{name: _checked(name, data[name], own) for name in _FIELDS[kind] & data.keys()})


def _checked(name: str, value: Any, own_metric: bool = False) -> Any:
    """The value of a field, if it is what this field must be."""
    if own_metric and name == "accuracy" and isinstance(value, float):
        return value  # it may be NaN, or without end
    if value is None and name in _NULLABLE:
        return None
    if name in _FLAGS and isinstance(value, bool):
        return value
    if name in _NAMES and isinstance(value, str):
        return plain(value)
    if name in _LISTS and isinstance(value, list) and all(map(_is_number, value)):
        return tuple(value)
    if name in _LISTS | _NAMES | _FLAGS or not _is_number(value):
        raise TypeError(name)
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _HUGE  # NaN is not below either


def _sentence(path: Path, error: BaseException) -> str:
    """What is wrong with a file, by its name only: the page may be shown to others."""
    text = str(error).removeprefix(f"{path}: ").rstrip(".") or type(error).__name__
    return plain(f"{path.name}: {text}.")


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


def plain(text: str) -> str:
    """Text that neither a terminal nor a page can take for anything else than text."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def command_line(run: PastRun) -> str:
    """The command that made the run, for a shell; empty if the run did not keep it."""
    words = run.settings.get("argv")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        return ""
    program = "dmcp" if Path(words[0]).name in ("dmcp", "__main__.py") else words[0]
    return plain(shlex.join([program, *words[1:]]))
