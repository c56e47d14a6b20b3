"""One HTML page about some runs."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmcp.budget import LATENCY, MEMORY, limits_latency, show_cost
from dmcp.errors import DmcpError, FileError
from dmcp.latency.table import Outcome
from dmcp.markov import Process, process_of
from dmcp.results import DMCP, ORIGINAL, TEACHER, UNPRUNED, Row, against, score, score_name, unknown
from dmcp.retraining import AS_IT_WAS, TRAINED_FIRST, origin
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
from dmcp.runtime.io import from_plain, is_locked, parse_tensors, plain, read_bytes, refuse_link
from dmcp.searching.config import SearchRecord
from dmcp.settings import Retrain
from dmcp.storage import WIDTHS
from dmcp.training import StepRecord
from dmcp.units import show_ms
from dmcp.widths import Widths

_LISTS, _NAMES = {"weight_losses", "ratios"}, {"name"}  # all other fields of records are numbers
_NULLABLE = {"lr", "weight_losses", "alpha_lr", "task_loss", "budget_loss", "ratios"}
_FLAGS = {"own_metric", "lower_is_better"}
_OPTIONAL = _NULLABLE | {it.name for it in fields(Row) if it.default is not MISSING}
_KINDS: dict[str, type[SearchRecord] | type[StepRecord] | type[Row]] = {"search": SearchRecord, "test": Row}
_FIELDS = {kind: {it.name for it in fields(kind)} for kind in (*_KINDS.values(), StepRecord)}
_HUGE = 1e18  # beyond what any network costs, and what a chart can draw
Log = tuple[dict[int, SearchRecord], dict[str, dict[int, StepRecord]], dict[str, Row]]


def read_log(path: Path, tail: int | None, problems: list[str]) -> Log:
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


def timed(path: Path, rows: Iterable[Row], problems: list[str]) -> tuple[Row, ...]:
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
        problems.append(sentence(path, error))
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


def sentence(path: Path, error: BaseException) -> str:
    """What is wrong with a file, by its name only: the page may be shown to others."""
    text = str(error).removeprefix(f"{path}: ").rstrip(".") or type(error).__name__
    return plain(f"{path.name}: {text}.")


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
        return self.row(DMCP) or next((row for row in self.rows if row.name not in (ORIGINAL, TEACHER)), None)

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
        running=is_locked(path),
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


STYLE = Path(__file__).with_name("charts.css").read_text()
COLOURS = 6  # classes c0 ... c5 in charts.css
_WIDTH, _LEFT, _RIGHT, _TOP, _LETTER = 400.0, 66.0, 20.0, 10.0, 7.7  # letter: width of a wide one, at 12 px
_HIGH, _BELOW = 190.0, 40.0  # of the plot itself, and of its axis
_ROW, _COLOR_NAMES, _SHOWN = 20.0, 132.0, 17  # height of a bar with its gap; the names beside it: width, letters
_POINTS = 150  # of a line; more steps than that are averaged

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    """One network in the scatter plot."""

    x: float
    y: float
    label: str
    hint: str
    colour: int
    shape: str  # circle, square or diamond


@dataclass(frozen=True)
class Bar:
    """Channels of one space; `before` and `expected` where they are known."""

    name: str
    after: int
    before: int | None = None
    expected: float | None = None


@dataclass(frozen=True)
class Cell:
    """One group of a space in the heat map."""

    share: float
    hint: str


def as_file(svg: str) -> str:
    """The chart with its style inside, to stand alone."""
    return svg.replace(">", f"><style>{STYLE}</style>", 1) + "\n"


# the four charts


def draw_scatter(points: Sequence[Point], names: tuple[str, str], title: str) -> str:
    """Points with labels where there is room; x as counts, y as shares."""
    xs, ys = ticks([0.0, *(p.x for p in points)]), ticks([p.y for p in points])
    high = 250.0
    parts = _axes(xs, ys, high, names, (short, percent))
    places = [(_scale(p.x, xs, _LEFT, _WIDTH - _RIGHT), _scale(p.y, ys, _TOP + high, _TOP)) for p in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    for point, place in zip(points, places, strict=True):
        near = [it.hint for it, at in zip(points, places, strict=True) if math.dist(place, at) < 6 and it is not point]
        hint = "; ".join([point.hint, *near])  # what lies below another mark is still said
        mark = f'class="mark f{point.colour % COLOURS}" d="{_shape(point.shape, *place)}"'
        parts.append(f"<path {mark}>{_title(hint)}</path>")
    for point, place in sorted(zip(points, places, strict=True), key=lambda it: it[0].shape != "circle"):
        parts.append(_label(shorten(point.label, 22), *place, high, taken))  # circles choose first
    return _svg(high + _TOP + _BELOW, title, parts)


def draw_bars(bars: Sequence[Bar], title: str) -> str:
    """Channels kept: as shares of what was there before, or, where that is not known, as counts."""
    known = all(bar.before for bar in bars)
    most = 1.0 if known else max(bar.after for bar in bars)
    room = _WIDTH - _COLOR_NAMES - 92
    words = [("before", "before"), ("kept", "f0"), ("expected by the chain", "expected")]
    legend, top = _legend(words[: (3 if any(bar.expected is not None for bar in bars) else 2)] if known else words[1:2])
    parts = [legend]
    for number, bar in enumerate(bars):
        y, full = top + number * _ROW, (bar.before or 1) if known else 1
        length = room * min(bar.after / full / most, 1.0)
        text = f"{bar.after} of {bar.before}" if known else f"{bar.after}"
        hint = f"{bar.name}: {text} channels" + (f", {percent(bar.after / full)}" if known else "")
        marks = [_text(_COLOR_NAMES - 8, y + 13, shorten(bar.name, _SHOWN), "end")]
        if known:
            marks.append(_rect(_COLOR_NAMES, y + 3, room, 13, "before"))
        marks.append(_rect(_COLOR_NAMES, y + 3, length, 13, "bar f0"))
        if known and bar.expected is not None:
            marks.append(_rect(_COLOR_NAMES + room * min(bar.expected / full, 1.0) - 1, y + 1, 2, 17, "expected"))
            hint += f"; the chain expected {bar.expected:.1f}"
        marks.append(_text(_WIDTH - 2, y + 13, text, "end"))
        marks.append(_rect(0, y, _WIDTH, _ROW, "hit", hint))
        parts.append("".join(marks))
    return _svg(top + len(bars) * _ROW + 6, title, parts)


def draw_lines(
    steps: Sequence[float],
    lines: Mapping[str, Sequence[float | None]],
    y_name: str,
    title: str,
    *,
    as_share: bool = False,
    band: tuple[float, float] | None = None,
) -> str:
    """Values over steps, None where a line has none; many steps are averaged, and the band is what is allowed."""
    size = -(-len(steps) // _POINTS)
    bundles = [slice(start, start + size) for start in range(0, len(steps), size)]
    means = {name: [_mean(values[bundle]) for bundle in bundles] for name, values in lines.items()}
    seen = [value for values in means.values() for value in values if value is not None]
    show = percent if as_share else "{:.3g}".format
    xs, ys = ticks([steps[0], steps[-1]]), ticks([*seen, *(band or ())])
    at = [_scale((steps[bundle][0] + steps[bundle][-1]) / 2, xs, _LEFT, _WIDTH - _RIGHT) for bundle in bundles]
    words = [(name, f"key k{number % COLOURS}") for number, name in enumerate(means)]
    legend, top = _legend([*words, *([(f"allowed: {show(band[0])} to {show(band[1])}", "band")] if band else [])])
    parts = [legend]
    if band:
        low, high = (_scale(edge, ys, top + _HIGH, top) for edge in band)
        parts.append(_rect(_LEFT, high, _WIDTH - _LEFT - _RIGHT, low - high, "band"))
    parts += _axes(xs, ys, _HIGH, ("step", y_name), (short, show), top)
    for number, values in enumerate(means.values()):
        drawn = [(x, _scale(y, ys, top + _HIGH, top)) for x, y in zip(at, values, strict=True) if y is not None]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in (drawn if len(drawn) > 1 else drawn * 2))
        parts.append(f'<polyline class="line k{number % COLOURS}" points="{text}"/>')
    hints = []
    for number, bundle in enumerate(bundles):
        said = [f"{name} {show(y)}" for name, values in means.items() if (y := values[number]) is not None]
        hints.append(f"{_steps(steps[bundle])}: {', '.join(said)}" if said else "")
    return _svg(top + _HIGH + _BELOW, title, [*parts, *_strips(at, hints, top)])


def _strips(at: Sequence[float], hints: Sequence[str], top: float) -> list[str]:
    """Where a pointer is over the plot, the hint of the nearest point; none where the hint is empty."""
    edges = [_LEFT, *((left + right) / 2 for left, right in itertools.pairwise(at)), _WIDTH - _RIGHT]
    return [
        _rect(left, top, right - left, _HIGH, "hit", hint)
        for (left, right), hint in zip(itertools.pairwise(edges), hints, strict=True)
        if hint
    ]


def draw_heat(rows: Mapping[str, Sequence[Cell]], title: str) -> str:
    """A row per space, a cell per group: the darker, the likelier it is kept."""
    columns = max(len(cells) for cells in rows.values())
    wide = (_WIDTH - _COLOR_NAMES - 4) / columns
    parts = [_text(_COLOR_NAMES, 12, "0 %"), _text(_COLOR_NAMES + 130, 12, "100 %")]
    parts += [_rect(_COLOR_NAMES + 28 + 9.6 * i, 3, 9.6, 11, "heat", share=(i + 0.5) / 10) for i in range(10)]
    for number, (name, cells) in enumerate(rows.items()):
        y = 22 + number * _ROW
        parts.append(_text(_COLOR_NAMES - 8, y + 14, shorten(name, _SHOWN), "end"))
        parts += [
            _rect(_COLOR_NAMES + i * wide, y + 1, wide - 1, _ROW - 2, "heat cell", cell.hint, cell.share)
            for i, cell in enumerate(cells)
        ]
    bottom = 22 + len(rows) * _ROW
    parts += [_text(_COLOR_NAMES, bottom + 14, "first group"), _text(_WIDTH - 4, bottom + 14, "last group", "end")]
    return _svg(bottom + 22, title, parts)


# numbers as people read them


def ticks(values: Sequence[float], about: int = 5) -> list[float]:
    """Round numbers, evenly apart, that span the values."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(high), 1e-9):
        low, high = low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [number * step for number in range(first, last + 1)]


def short(number: float) -> str:
    """20.4M"""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


def percent(share: float) -> str:
    """49.9 %"""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def shorten(name: str, letters: int) -> str:
    """A name that fits; the end of a longer one says more than its start."""
    return name if len(name) <= letters else f"…{name[1 - letters :]}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _steps(steps: Sequence[float]) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"mean of steps {steps[0]:,} to {steps[-1]:,}"


def _scale(value: float, marks: Sequence[float], start: float, end: float) -> float:
    return start + (end - start) * (value - marks[0]) / (marks[-1] - marks[0])


# pieces of SVG


def _svg(high: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label="{html.escape(title)}" '
        f'viewBox="0 0 {_WIDTH:g} {high:g}">' + "\n".join(parts) + "</svg>"
    )


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(text)}</text>'


def _rect(
    x: float, y: float, width: float, height: float, kind: str, hint: str = "", share: float | None = None
) -> str:
    shade = "" if share is None else f' fill-opacity="{share:.3f}"'
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}{shade}>{_title(hint) if hint else ""}</rect>'


def _shape(shape: str, x: float, y: float) -> str:
    if shape == "circle":
        return f"M{x - 6:.1f},{y:.1f}a6,6 0 1,0 12,0a6,6 0 1,0 -12,0z"
    if shape == "square":
        return f"M{x - 5:.1f},{y - 5:.1f}h10v10h-10z"
    return f"M{x:.1f},{y - 7:.1f}l7,7l-7,7l-7,-7z"


def _axes(
    xs: Sequence[float],
    ys: Sequence[float],
    high: float,
    names: tuple[str, str],
    show: tuple[Callable[[float], str], Callable[[float], str]],
    top: float = _TOP,
) -> list[str]:
    """Grid lines with their numbers, and the names of both axes."""
    bottom, right = top + high, _WIDTH - _RIGHT
    parts = []
    for value in ys:
        y = _scale(value, ys, bottom, top)
        parts.append(f'<path class="grid" d="M{_LEFT:g},{y:.1f}H{right:g}"/>')
        parts.append(_text(_LEFT - 6, y + 4, show[1](value), "end"))
    for value in xs:
        x = _scale(value, xs, _LEFT, right)
        parts.append(f'<path class="grid" d="M{x:.1f},{bottom:g}v4"/>')
        parts.append(_text(x, bottom + 17, show[0](value), "middle"))
    parts.append(_text((_LEFT + right) / 2, bottom + 33, names[0], "middle", "name"))
    middle = top + high / 2
    turned = f'transform="rotate(-90 11 {middle:g})" x="11" y="{middle:g}"'
    return [*parts, f'<text class="name" text-anchor="middle" {turned}>{html.escape(names[1])}</text>']


def _legend(items: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """What the colours mean, in as many rows as it takes; and where the plot below may start."""
    parts, x, y = [], 2.0, 4.0
    for word, kind in items:
        width = 18 + _LETTER * len(word) + 14
        if x > 2 and x + width > _WIDTH:
            x, y = 2.0, y + 17
        parts.append(_rect(x, y, 12, 11, kind) + _text(x + 18, y + 10, word))
        x += width
    return "".join(parts), y + 23


def _label(text: str, x: float, y: float, high: float, taken: list[Box]) -> str:
    """The label at the first side of a point where nothing is yet; none if all are taken, the hint is still there."""
    wide = _LETTER * len(text)
    for left, base, anchor in (
        (x + 10, y + 4, "start"),
        (x - 10 - wide, y + 4, "end"),
        *((x - wide / 2, y + shift, "middle") for shift in (-11, 19)),
    ):
        box = (left, base - 10, left + wide, base + 3)
        inside = box[0] >= _LEFT and box[2] <= _WIDTH and box[1] >= 0 and box[3] <= _TOP + high
        if inside and not any(_touch(box, other) for other in taken):
            taken.append(box)
            return _text({"start": left, "end": left + wide, "middle": x}[anchor], base, text, anchor, "label")
    return ""


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


_STYLE = STYLE + Path(__file__).with_name("report.css").read_text()
_SCRIPT = Path(__file__).with_name("report.js").read_text()
_WORDS = {"macs": "MACs", "params": "parameters"}  # what networks of the table have
_CAPTIONS = {  # what each chart shows, and how to read it
    "widths": (
        "Width of each space",
        "Channels kept, of those that the unpruned network has where the run knows them.",
    ),
    "cost": ("Expected cost over the search", "After the warm-up; the budget loss pulls it into the band."),
    "chances": ("Chance that each group is kept", "At the end of the search; the first group is always kept."),
    "search": (
        "Losses of the search",
        "The other sub-networks imitate the largest one, or learn the labels as it does.",
    ),
    "training": ("Loss of the training", "On the training batches, by the network that is trained."),
}


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


def make_page(runs: Sequence[PastRun]) -> str:
    """The whole page."""
    title = f"{runs[0].name}: report" if len(runs) == 1 else f"Report of {len(runs)} runs"
    ours = f"style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}"
    policy = f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_safe(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<header><h1>{_safe(title)}</h1></header>\n<main>",
        _overview(runs),
        *(_section(number, run) for number, run in enumerate(runs, start=1)),
        "</main>\n<footer>Made by torch-dmcp. MACs are multiply-adds of one sample.</footer>",
        f'<div id="hint" role="tooltip" hidden></div>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n',
    ]
    return "\n".join(parts)


# charts


def chart_runs(runs: Sequence[PastRun]) -> str:
    """Accuracy over MACs of every network that was tested; empty if none was."""
    shapes = {DMCP: "circle", UNPRUNED: "square"}
    start = _shared([run.name for run in runs])  # labels need not repeat what all names begin with
    points = []
    for number, run in enumerate(runs):
        for row in run.rows:
            if row.own_metric:  # no share, as the axis has them
                continue
            name = run.name[start:] or run.name
            whose = row.name if len(runs) == 1 else name if row.name == DMCP else f"{name}, {row.name}"
            hint = f"{run.name}, {row.name}: {row.macs:,} MACs, accuracy {_accuracy(row)}"
            points.append(Point(row.macs, row.accuracy, whose, hint, number, shapes.get(row.name, "diamond")))
    return draw_scatter(points, ("MACs", "accuracy"), "Accuracy over MACs of each network") if points else ""


def _shared(names: Sequence[str]) -> int:
    """Letters that all names begin with, up to the end of a word."""
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    words = re.match(r"(.*[\W_])?", "".join(letters[0] for letters in same))
    return words.end() if words else 0


def chart_run(run: PastRun) -> dict[str, str]:
    """Every chart that there is data for, by name."""
    drawn = {
        "widths": _chart_widths(run),
        "cost": _chart_cost(run),
        "chances": _chart_chances(run),
        "search": _chart_search(run),
        "training": _chart_training(run),
    }
    return {name: svg for name, svg in drawn.items() if svg}


def _chart_widths(run: PastRun) -> str:
    if not run.widths:
        return ""
    before, expected = _before(run), _expected(run)
    bars = [Bar(plain(name), kept, before.get(name), expected.get(name)) for name, kept in run.widths.items()]
    return draw_bars(bars, "Channels of each space before and after")


def _before(run: PastRun) -> dict[str, int]:
    """Channels of each space of the unpruned network, as far as the run knows them."""
    stored = value_at(run.settings, "unpruned", "widths")
    if isinstance(stored, Mapping):
        return {name: size for name, size in stored.items() if type(size) is int and size > 0}
    if run.chances is None or value_at(run.settings, "search", "max_channels"):  # then the chains do not reach the end
        return {}
    return dict(zip(run.chances.spaces, run.chances.sizes.sum(dim=1).tolist(), strict=True))


def _expected(run: PastRun) -> dict[str, float]:
    """Expected width of each space at the end of the search."""
    if run.chances is None:
        return {}
    process = run.chances.process
    widths = process.moment(process.marginals(run.chances.alphas), run.chances.sizes, 1)
    return dict(zip(run.chances.spaces, widths.tolist(), strict=True))


def _chart_cost(run: PastRun) -> str:
    moved = [(record.step, record.ratios) for record in run.search if record.ratios]
    if not moved:
        return ""
    count = min(len(ratios) for _, ratios in moved)
    lines = {
        f"{_WORDS.get(kind, plain(kind))} / budget": [ratios[number] for _, ratios in moved]
        for number, kind in enumerate(_kinds(run.budget, count))
    }
    low = value_at(run.settings, "search", "tolerance")
    band = (low, 1.0) if isinstance(low, float) and 0 < low < 1 else None
    title = "Expected cost over the search, as a share of the budget"
    return draw_lines([step for step, _ in moved], lines, "of the budget", title, as_share=True, band=band)


def _kinds(budget: str, count: int) -> Sequence[str]:
    """The kinds of a budget's limits in their order: "50%,params:2M" -> macs, params."""
    kinds = [part.split(":")[0].strip() if ":" in part else _unnamed(part) for part in budget.split(",")]
    return kinds if len(kinds) == count else [f"limit {number + 1}" for number in range(count)]


def _unnamed(part: str) -> str:
    return LATENCY if limits_latency(part) else "macs"


def _cost(kind: str, target: int) -> str:
    return show_cost(kind, target) if kind in (LATENCY, MEMORY) else f"{target:,} {_WORDS.get(kind, kind)}"


def _chart_chances(run: PastRun) -> str:
    found = run.chances
    if found is None or not len(found.spaces):
        return ""
    marginals = found.process.marginals(found.alphas).tolist()
    rows = {}
    for name, chances, sizes in zip(found.spaces, marginals, found.sizes.tolist(), strict=True):
        cells, first = [], 1
        for number, (chance, size) in enumerate(zip(chances, sizes, strict=True), start=1):
            if size:
                group = f"{plain(name)}, group {number}, channels {first} to {first + size - 1}"
                cells.append(Cell(chance, f"{group}: kept with {percent(chance)}"))
            first += size
        rows[plain(name)] = cells
    return draw_heat(rows, "Chance that each group of each space is kept")


def _chart_search(run: PastRun) -> str:
    if not run.search:
        return ""
    losses = [record.weight_losses or () for record in run.search]
    lines = {
        "largest sub-network": [some[0] if some else None for some in losses],
        "mean of the others": [sum(some[1:]) / len(some[1:]) if some[1:] else None for some in losses],
        "soft network, for the alphas": [record.task_loss for record in run.search],
    }
    kept = {name: values for name, values in lines.items() if any(value is not None for value in values)}
    steps = [record.step for record in run.search]
    return draw_lines(steps, kept, "loss", "Losses over the steps of the search") if kept else ""


def _chart_training(run: PastRun) -> str:
    if not run.training:
        return ""
    losses = {name: {record.step: record.loss for record in records} for name, records in run.training.items()}
    steps = sorted({step for known in losses.values() for step in known})
    lines = {name: [known.get(step) for step in steps] for name, known in losses.items()}
    return draw_lines(steps, lines, "loss", "Loss over the steps of the training")


# parts of the page


def _overview(runs: Sequence[PastRun]) -> str:
    """All runs in one table, and in one plot."""
    kinds = sorted({score_name([run.result]) for run in runs if run.result}) or ["accuracy"]
    column = f"#{' or '.join(kinds)}"
    head = ["run", "command", "model", "data", "budget", "state", column, "#MACs", "#of unpruned", "started"]
    rows = []
    for number, run in enumerate(runs, start=1):
        words = [text_at(run.settings, "command"), *(text_at(run.settings, "job", key) for key in ("model", "data"))]
        row, share = run.result, run.share("macs")
        figures = [_accuracy(row), f"{row.macs:,}"] if row else ["", ""]
        link = Html(f'<a href="#run-{number}">{_safe(run.name)}</a>')
        rows.append([link, *words, run.budget, _badge(run), *figures, percent(share) if share else "", date(run)])
    parts = ['<section aria-label="All runs">', _table(head, rows, "All runs")]
    svg = chart_runs(runs)
    if svg:
        note = "Circle: the pruned network; square: the unpruned one; diamond: others, like uniform widths."
        if len({text_at(run.settings, "job", "data") for run in runs}) > 1:
            note += " The runs are on different data: their accuracies do not compare."
        parts.append(_figure("Accuracy and MACs of each network", note, svg))
    return "\n".join([*parts, "</section>"])


def _section(number: int, run: PastRun) -> str:
    """Everything about one run."""
    what = [text_at(run.settings, "command"), text_at(run.settings, "job", "model")]
    on = [f"on {data}" for data in [text_at(run.settings, "job", "data")] if data]
    facts = " ".join(word for word in [*what, *on] if word)
    parts = [
        f'<section id="run-{number}" aria-labelledby="name-{number}">',
        f'<h2 id="name-{number}">{_safe(run.name)} {_badge(run)}</h2>',
        f'<p class="soft">{_safe(f"{facts}, started {date(run)}, in {run.folder}".lstrip(", "))}</p>',
    ]
    if run.problems:
        parts.append(f"<p>Not all of it can be read: {_safe(' '.join(run.problems))}</p>")
    if not run.done:
        parts.append(f"<p>Not finished: {_safe(progress(run))}.</p>")
    parts.append(_tiles(run))
    parts += [f"<p>{_safe(text)}.</p>" for text in [*_origin(run), *unknown(run.rows)]]
    if run.latency:
        parts += [f"<p>{_safe(text)}</p>" for text in (f"{run.latency.text}.", run.latency.warning) if text]
    if run.rows:
        parts.append(_networks(run))
    figures = [_figure(*_CAPTIONS[name], svg) for name, svg in chart_run(run).items()]
    if figures:
        parts.append('<div class="charts">' + "\n".join(figures) + "</div>")
    return "\n".join([*parts, _command(run), _width_table(run), *_show_settings(run), "</section>"])


def _origin(run: PastRun) -> list[str]:
    """Where the weights of the pruned network come from, where the settings say it."""
    kind, teacher = text_at(run.settings, "retrain"), text_at(run.settings, "job", "teacher")
    if text_at(run.settings, "command") != "prune" or not run.rows or kind not in list(Retrain):
        return []
    if teacher:
        teacher = {"given": AS_IT_WAS, UNPRUNED: TRAINED_FIRST}.get(teacher, f"the teacher, {teacher}")
    told = [value_at(run.settings, "train", f"kd_{name}") for name in ("weight", "temperature")]
    share, temperature = (float(it) if isinstance(it, int | float) else 1.0 for it in told)  # 1 is left out
    return [origin(Retrain(kind), teacher, share, temperature)]


def _tiles(run: PastRun) -> str:
    """The figures that matter most."""
    tiles: list[tuple[str, str, str]] = []
    if run.budget:
        targets = run.chances.targets if run.chances else {}
        notes = [f"at most {_cost(kind, target)}" for kind, target in targets.items()]
        tiles.append(("Budget", run.budget.replace(",", ", "), ", ".join(notes)))
    row = run.result
    for kind, word in _WORDS.items():
        share, title = run.share(kind), word[:1].upper() + word[1:]
        if row and share is not None:
            tiles.append((f"{title} kept", percent(share), f"{getattr(row, kind):,} of {run.unpruned(kind):,}"))
        elif row:
            tiles.append((title, f"{getattr(row, kind):,}", "the unpruned network was not counted"))
    if run.latency:
        told = run.latency
        took = "not measured" if told.measured_ms is None else show_ms(told.measured_ms)
        parts = {"asked": told.asked_ms, "predicted": told.predicted_ms, "unpruned": told.unpruned_ms}
        tiles.append(("Latency", took, ", ".join(f"{word} {show_ms(ms)}" for word, ms in parts.items())))
    if row:
        others = [other for other in run.rows if other is not row]
        gaps = [against(row, other) for other in others]
        tiles.append(
            (
                f"{score_name([row]).capitalize()}, {row.name}",
                _accuracy(row),
                ", ".join(gaps).replace("-", "\N{MINUS SIGN}"),
            )
        )
    last = next((record.ratios for record in reversed(run.search) if record.ratios), ())
    if last:
        tiles.append(
            ("Expected cost, last step", ", ".join(map(percent, last)), "of the budget, as that step found it")
        )
    cells = (
        f'<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd><dd class="note">{_safe(note)}</dd></div>'
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>' if tiles else ""


def _networks(run: PastRun) -> str:
    timed = all(row.batch for row in run.rows)
    head = ["network", "#MACs", "#parameters", f"#{score_name(run.rows)}"]
    head += [f"#ms per {run.rows[0].batch} samples"] if timed else []
    rows = [
        [row.name, f"{row.macs:,}", f"{row.params:,}", _accuracy(row), *([f"{row.ms:.2f}"] if timed else [])]
        for row in run.rows
    ]
    return _card("Networks", _table(head, rows, "Networks"))


def _command(run: PastRun) -> str:
    line = command_line(run)
    text = f"<pre><code>{_safe(line)}</code></pre>" if line else "<p>This run did not keep its command line.</p>"
    return _card("Command", text)


def _width_table(run: PastRun) -> str:
    before, expected = _before(run), _expected(run)
    rows = [
        [name, str(before.get(name, "")), f"{expected[name]:.1f}" if name in expected else "", str(kept)]
        for name, kept in run.widths.items()
    ]
    table = _table(["space", "#channels before", "#expected by the chain", "#kept"], rows, "Widths")
    return _folded("Widths as a table", table) if rows else ""


def _show_settings(run: PastRun) -> list[str]:
    """All settings by their place in the file, and the versions."""
    rows: list[list[str]] = []
    for key, value in run.settings.items():
        if key in ("argv", "versions", "unpruned"):
            continue
        inner = value.items() if isinstance(value, dict) else [("", value)]
        rows += [[f"{key}.{name}".rstrip("."), _value(item)] for name, item in inner]
    versions = value_at(run.settings, "versions")
    known = [[name, _value(version)] for name, version in versions.items()] if isinstance(versions, dict) else []
    tables = {"Settings": (["setting", "value"], rows), "Versions": (["part", "version"], known)}
    return [_folded(name, _table(head, lines, name), "card wrap") for name, (head, lines) in tables.items() if lines]


# pieces of HTML


def _safe(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(plain(text)))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _accuracy(row: Row) -> str:
    return score(row, " %")


def _badge(run: PastRun) -> Html:
    return Html(f'<span class="state {run.state}">{run.state}</span>')


def _value(value: Any) -> str:
    """A setting as text."""
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        return "nested too deeply to be shown"


def _figure(name: str, note: str, svg: str) -> str:
    return f"<figure><figcaption>{_safe(name)}<span>{_safe(note)}</span></figcaption>\n{svg}</figure>"


def _card(name: str, body: str) -> str:
    return f'<div class="card"><h3>{_safe(name)}</h3>{body}</div>'


def _folded(name: str, body: str, kind: str = "card") -> str:
    return f'<details class="{kind}"><summary>{_safe(name)}</summary>{body}</details>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """A table that scrolls in its own box; names that start with # are of columns of numbers."""
    kinds = [' class="number"' if column.startswith("#") else "" for column in head]
    tops = "".join(
        f'<th scope="col"{kind}>{_safe(column.lstrip("#"))}</th>' for column, kind in zip(head, kinds, strict=True)
    )
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td{kind}>{_safe(cell)}</td>" for cell, kind in zip(rest, kinds[1:], strict=True))
        lines.append(f'<tr><th scope="row">{_safe(first)}</th>{cells}</tr>')
    body = f"<thead><tr>{tops}</tr></thead>\n<tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_safe(name)}"><table>{body}</table></div>'
