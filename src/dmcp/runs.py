"""A run is a folder: files are written whole or not at all, only logs grow, and reading trusts nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dmcp.budget import LATENCY, Budget, costs, show_limit
from dmcp.checkpoint import Checkpointer, load_checkpoint
from dmcp.errors import DmcpError, FileError, WidthsError
from dmcp.latency.table import LATENCY_FILE, Latency, Outcome
from dmcp.markov import INDEPENDENT, process_of
from dmcp.pruning import PruneResult, expected_shares
from dmcp.report.figures import draw_all
from dmcp.results import DMCP, ORIGINAL, TEACHER, Row, divergence, markdown
from dmcp.runtime.io import (
    LOCK,
    MOST_JSON,
    from_plain,
    is_locked,
    parse_json,
    parse_tensors,
    plain,
    quote,
    read_bytes,
    refuse_link,
    write_files,
)
from dmcp.searching.config import SearchRecord, SearchResult
from dmcp.storage import WIDTHS, save
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Event, StepRecord
from dmcp.widths import Widths

SETTINGS, LOG, TIMES, REPORT = "settings.json", "log.jsonl", "times.jsonl", "report.md"
CHECKPOINTS = "checkpoints"  # a folder in it for each stage, until the run is done
SEARCH, ALPHAS = "search.json", "search.safetensors"
REPLACED = "replaced.jsonl"  # unreadable image files that others were taken for
OUTCOME = "outcome.json"  # how a limit of latency ended
PREPARED = "prepared.safetensors"  # a network that other runs start from
_MAX_LOG, _MAX_ALPHAS, _LIST_TAIL = 2**30, 2**26, 2**20  # bytes that are read; of a log, for a list of runs
_MAX_NUMBER = 1e18  # beyond what any network costs, and what a chart can show
_FORMAT = "torch-dmcp search 1"
_READ_ERRORS = (DmcpError, OSError, KeyError, TypeError, ValueError, ArithmeticError, RuntimeError)


# writing


@dataclass(frozen=True)
class Run:
    """The folder of a run that is being written."""

    folder: Path

    def write(self, name: str, data: Any) -> None:
        """Write a file: text and bytes as they are, anything else as JSON."""
        text = data if isinstance(data, str | bytes) else json.dumps(data, indent=1)
        with _file_errors(self.folder):
            write_files(self.folder, {name: text.encode() if isinstance(text, str) else text})

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to a file of records."""
        with _file_errors(self.folder / name):
            refuse_link(self.folder / name)
            with (self.folder / name).open("a") as file:
                file.write(json.dumps(record) + "\n")

    def on_event(self, event: Event) -> None:
        """Log a record, or save the result of the search.

        Times go to a file of their own, so that equal runs have equal logs.
        """
        record = event.record
        if isinstance(record, SearchResult):
            save_search(record, self.folder)
        elif isinstance(record, Latency):
            self.write(LATENCY_FILE, record.to_json())
        else:
            facts = {"stage": event.stage} | asdict(record)
            if isinstance(record, Row):
                self.add(TIMES, {"ms": facts.pop("ms"), "batch": facts.pop("batch"), "name": record.name})
            self.add(LOG, facts)

    def records(self, stage: str | None = None) -> list[dict[str, Any]]:
        """The log of one stage, or all of it with the stages."""
        found = []
        for number, line in enumerate(_lines(self.folder / LOG), start=1):
            record = parse_json(line, f"{self.folder / LOG}, line {number}")
            if not isinstance(record, dict) or not isinstance(record.get("stage"), str):
                raise FileError(f"{self.folder / LOG}, line {number}: not a record of a run.")
            if stage is None or record["stage"] == stage:
                found.append({key: value for key, value in record.items() if stage is None or key != "stage"})
        return found

    def lines(self) -> int:
        """Lines of the log, all of them safe on the disk."""
        path = self.folder / LOG
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return len(_lines(path))

    def checkpointer(self, identity: Mapping[str, Any], **when: Any) -> Checkpointer:
        """The checkpointer of this run's stages."""
        refuse_link(self.folder / CHECKPOINTS)
        return Checkpointer(self.folder / CHECKPOINTS, identity, lines=self.lines, earlier=self.records, **when)

    def note_replaced(self, part: str, files: Iterable[str]) -> None:
        """Log image files that were replaced."""
        for file in sorted(files):
            self.add(REPLACED, {"part": part, "file": file})

    def replaced(self, part: str) -> set[str]:
        """Image files of `train` or `test` that were replaced since the run began."""
        found: list[Any] = []
        for line in _lines(self.folder / REPLACED):
            with contextlib.suppress(FileError):  # a kill may have cut it
                found.append(parse_json(line, self.folder / REPLACED))
        files = (it.get("file") for it in found if isinstance(it, dict) and it.get("part") == part)
        return {file for file in files if isinstance(file, str)}

    def rewind(self) -> None:
        """Cut the log back to the last checkpoint, from where the run goes on.

        Stages follow each other: those after the first unfinished one begin anew.
        """
        for path in self.folder.iterdir():  # figures, too, are written again
            refuse_link(path)
        path = self.folder / CHECKPOINTS
        stages = sorted(path.iterdir()) if path.is_dir() else []
        loaded = [(checkpoint.facts, stage) for stage in stages if (checkpoint := load_checkpoint(stage)) is not None]
        if not all(type(facts.get("lines")) is int and type(facts.get("done")) is bool for facts, _ in loaded):
            raise FileError(f"{path}: these are not the checkpoints of a run: remove them to start from the beginning.")
        loaded.sort(key=lambda it: int(it[0]["lines"]))
        kept = 0
        while loaded:
            facts, _ = loaded.pop(0)
            kept = facts["lines"]
            if not facts["done"]:
                break
        for _, stage in loaded:
            shutil.rmtree(stage)
        lines = _lines(self.folder / LOG)
        if len(lines) < kept:
            raise FileError(f"{self.folder / LOG}: {kept} lines were there, {len(lines)} are left: it cannot go on.")
        self.write(LOG, b"".join(line + b"\n" for line in lines[:kept]))
        (self.folder / TIMES).unlink(missing_ok=True)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        has_widths, has_checkpoints = (self.folder / WIDTHS).exists(), (self.folder / CHECKPOINTS).exists()
        return (self.folder / REPORT).exists() or (has_widths and not has_checkpoints)

    def finish(self, result: PruneResult, seed: int = 0, notes: Sequence[str] = ()) -> list[str]:
        """Write the network, the figures and the report with these notes; return warnings of diverged trainings."""
        save(result.model, result.widths, self.folder)
        self.write_outcome(result.latency)
        figures = draw_all(result.search, result.widths, self.folder, seed=seed)
        warnings = self.divergences(row.name for row in result.rows)
        self.write(REPORT, report(result, [path.name for path in figures], [*warnings, *notes]))
        self.close()
        return warnings

    def write_outcome(self, outcome: Outcome | None) -> None:
        """Write how a limit of latency ended, if there is one."""
        if outcome is not None:
            self.write(OUTCOME, asdict(outcome))

    def divergences(self, names: Iterable[str]) -> list[str]:
        """A warning for each of these networks whose loss ended higher than it began."""
        losses: dict[str, list[float]] = {name: [] for name in names}
        for record in self.records():
            if record["stage"] in losses:
                losses[record["stage"]].append(record["loss"])
        return [warning for name, seen in losses.items() if (warning := divergence(name, seen))]

    def close(self) -> None:
        """Remove the checkpoints."""
        path = self.folder / CHECKPOINTS
        if path.exists():
            old = path.rename(path.with_name(f".{CHECKPOINTS}"))  # at once, so that half of them is never seen
            shutil.rmtree(old, ignore_errors=True)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """A new run folder; one that already holds something is refused."""
    path = Path(folder)
    refuse_taken(path)
    with _file_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return Run(path)


def refuse_taken(path: Path) -> None:
    """Refuse a folder that holds something else than a lock."""
    with _file_errors(path):
        if path.exists() and any(it.name != LOCK for it in path.iterdir()):
            raise FileError(f"{path} already holds files: give the run another folder, or remove this one.")


def slug(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"\W+", "-", text).strip("-")[:100]


def free_folder(name: str, root: str | os.PathLike[str] = "runs") -> Path:
    """A folder that does not exist yet: runs/NAME, runs/NAME-2, ..."""
    path, number = Path(root) / name, 2
    while path.exists():
        path, number = Path(root) / f"{name}-{number}", number + 1
    return path


def report(result: PruneResult, figures: Iterable[str], warnings: Iterable[str] = ()) -> str:
    """What a run found, as Markdown."""
    budget, spent = result.search.budget, costs(result.graph, result.widths)
    lines = [f"# {type(result.model).__name__}, budget {budget.text}", ""]
    for limit in budget.limits:
        if limit.kind != LATENCY:
            share = spent[limit.kind] / limit.target
            lines.append(f"- {limit.kind}: {show_limit(limit, spent[limit.kind])} allowed ({share:.1%})")
    if result.latency is not None:
        lines.append(f"- {result.latency.text}")
        warnings = [*filter(None, [result.latency.warning]), *warnings]
    listed = " and ".join(f"{share:.1%}" for share in expected_shares(result.search))
    lines.append(f"- expected cost at the end of the search, before sampling: {listed} of the budget")
    lines += [f"- **{warning}**" for warning in warnings]
    lines += ["", *markdown(result.rows, result.graph, result.origin), ""]
    lines += ["| space | channels | kept |", "|---|---:|---:|"]
    lines += [f"| {space.name} | {space.size} | {result.widths[space.name]} |" for space in result.graph.spaces]
    lines += ["", *(line for name in figures for line in (f"![{Path(name).stem}]({name})", ""))]
    return "\n".join([*lines, f"The settings are in {SETTINGS}, every step in {LOG}.", ""])


# the search


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What search.json says."""

    format: str
    fingerprint: str
    spaces: tuple[str, ...]
    budget: Budget
    tolerance: float
    align: int
    independent: bool

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1 or self.align < 1:
            raise ValueError(f"a tolerance of {self.tolerance} or an align of {self.align} cannot be")


def save_search(result: SearchResult, folder: Path) -> None:
    """Write what sampling needs; the steps of the search are in the log."""
    alphas = safetensors.torch.save({"alphas": result.alphas.contiguous(), "sizes": result.sizes.contiguous()})
    facts = _Facts(
        format=_FORMAT,
        fingerprint=result.graph.fingerprint,
        spaces=tuple(space.name for space in result.graph.spaces),
        budget=result.budget,
        tolerance=result.tolerance,
        align=result.align,
        independent=result.process is INDEPENDENT,
    )
    with _file_errors(folder):
        write_files(folder, {ALPHAS: alphas, SEARCH: json.dumps(asdict(facts), indent=1).encode()})


def load_search(folder: str | os.PathLike[str], graph: ChannelGraph) -> SearchResult:
    """The search of a run; `graph` is traced from the unpruned model, freshly built."""
    folder = Path(folder)
    facts = read_json(folder / SEARCH)
    if facts.get("format") != _FORMAT:
        raise FileError(f"{folder / SEARCH}: its format is {quote(facts.get('format'))!r}, not {_FORMAT!r}.")
    path = folder / SEARCH
    try:
        known = from_plain(_Facts, facts)
        path = folder / LOG
        records = tuple(from_plain(SearchRecord, record) for record in Run(folder).records("search"))
    except (TypeError, ValueError) as error:
        raise FileError(f"{path}: not that of a search of this version: {quote(error)}.") from None
    if (known.fingerprint, known.spaces) != (graph.fingerprint, tuple(space.name for space in graph.spaces)):
        raise WidthsError(f"{folder}: this search was of another architecture than the model: build it as it was.")
    if (folder / LATENCY_FILE).exists():
        graph = Latency.load(folder / LATENCY_FILE).attach(graph)
    alphas, sizes = _chains(folder / ALPHAS, len(graph.spaces))
    if (sizes.sum(dim=1) > torch.tensor([space.size for space in graph.spaces])).any():
        raise FileError(f"{folder / ALPHAS}: its chains have more channels than this network.")
    process = process_of(known.independent)
    return SearchResult(alphas, sizes, graph, known.budget, known.tolerance, known.align, records, process)


def _chains(path: Path, spaces: int) -> tuple[Tensor, Tensor]:
    """Alphas (S, G-1) and group sizes (S, G) of a file, checked."""
    tensors = parse_tensors(read_bytes(path, _MAX_ALPHAS), path)
    alphas, sizes = tensors.get("alphas", torch.empty(0)), tensors.get("sizes", torch.empty(0))
    fits = alphas.is_floating_point() and sizes.dtype == torch.int64 and alphas.ndim == sizes.ndim == 2
    fits = fits and len(sizes) == spaces and alphas.shape == (spaces, sizes.shape[1] - 1)
    fits = fits and bool(alphas.isfinite().all() and (sizes[:, 0] > 0).all() and (sizes >= 0).all())
    if not fits or (sizes >= 2**31).any():
        raise FileError(f"{path}: its tensors are not chains of {spaces} spaces.")
    return alphas, sizes


# reading


@dataclass(frozen=True, kw_only=True, eq=False)
class PastRun:
    """Everything that a run folder says about itself; empty where it says nothing."""

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    started: float = 0.0  # seconds since 1970
    search: tuple[SearchRecord, ...] = ()
    training: Mapping[str, tuple[StepRecord, ...]] = field(default_factory=dict)  # by network
    rows: tuple[Row, ...] = ()  # networks that were tested
    targets: Mapping[str, int] = field(default_factory=dict)  # of the budget, by kind
    expected: Mapping[str, float] = field(default_factory=dict)  # width of each space at the end of the search
    widths: Mapping[str, int] = field(default_factory=dict)
    latency: Outcome | None = None
    prepared: bool = False  # whether the network for other runs is there
    running: bool = False
    problems: tuple[str, ...] = ()  # what could not be read

    @property
    def name(self) -> str:
        """The folder's name."""
        return plain(self.folder.resolve().name)

    @property
    def budget(self) -> str:
        """The budget as it was given."""
        return text_at(self.settings, "search", "budget")

    @property
    def before(self) -> dict[str, int]:
        """Channels of each space of the unpruned network."""
        stored = value_at(self.settings, "unpruned", "widths")
        sizes = stored.items() if isinstance(stored, Mapping) else ()
        return {name: size for name, size in sizes if type(size) is int and size > 0}

    @property
    def date(self) -> str:
        """When it was started; empty if the file's time is none."""
        try:
            return datetime.fromtimestamp(self.started).isoformat(" ", "minutes")
        except (OverflowError, ValueError, OSError):
            return ""

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

    @property
    def progress(self) -> str:
        """The last step that was logged."""
        if self.training:
            stage, records = list(self.training.items())[-1]
            return f"{stage}, step {records[-1].step + 1:,} of {records[-1].steps:,}"
        if not self.search:
            return "before the first logged step"
        last, epochs = self.search[-1], value_at(self.settings, "search", "epochs")
        if type(epochs) is not int:
            return f"search, step {last.step + 1:,}"
        pairs = itertools.pairwise(self.search)  # the first step of an epoch gives the steps per epoch
        first = next((new for old, new in pairs if old.epoch < new.epoch and new.epoch > 0), None)
        if first is None:
            return f"search, step {last.step + 1:,}, in epoch {last.epoch + 1} of {epochs}"
        return f"search, step {last.step + 1:,} of {round(first.step / first.epoch * epochs):,}"

    def row(self, name: str) -> Row | None:
        """The tested network of this name."""
        return next((row for row in self.rows if row.name == name), None)

    def unpruned(self, kind: str) -> int | None:
        """What the unpruned network costs, if the run says so."""
        stored = value_at(self.settings, "unpruned", kind)
        return stored if type(stored) is int and stored > 0 else None

    def share(self, kind: str) -> float | None:
        """Cost of the result over that of the unpruned network."""
        full = self.unpruned(kind)
        return getattr(self.result, kind) / full if self.result and full else None

    def setting(self, name: str) -> str:
        """One of the settings that are not of the search, the training or the engine, as text."""
        return text_at(self.settings, name)

    def describe(self) -> dict[str, Any]:
        """The run as plain data; shares from 0 to 1, None for a metric that is no number."""
        result = self.result
        return {
            "name": self.name,
            "folder": plain(str(self.folder)),
            "command": text_at(self.settings, "command"),
            "model": self.setting("model"),
            "data": self.setting("data"),
            "budget": self.budget,
            "state": self.state,
            "progress": "" if self.done else self.progress,
            "accuracy": result.accuracy if result and math.isfinite(result.accuracy) else None,
            "macs": result.macs if result else None,
            "macs_share": self.share("macs"),
            "started": self.date,
        }


def read_run(folder: str | os.PathLike[str], tail: int | None = None) -> PastRun:
    """A run as far as it can be read; only a folder that holds no run is refused.

    tail: bytes at the end of the log to read; default: all.
    """
    path = Path(folder)
    if not is_run(path):
        raise FileError(f"{path}: not a run: give a folder that dmcp prune, search or train has made.")
    found: dict[str, Any] = {"prepared": (path / PREPARED).is_file() and not (path / CHECKPOINTS).exists()}
    problems: list[str] = []
    with _noting(path / SETTINGS, problems):
        found["settings"] = read_json(path / SETTINGS)
    found |= _read_log(path, tail, problems)
    if (path / SEARCH).is_file():
        with _noting(path / ALPHAS, problems):
            found |= _read_chains(path)
    if (path / WIDTHS).is_file():
        with _noting(path / WIDTHS, problems):
            found["widths"] = dict(Widths.from_json(read_json(path / WIDTHS)))
    if (path / OUTCOME).is_file():
        with _noting(path / OUTCOME, problems):
            found["latency"] = from_plain(Outcome, read_json(path / OUTCOME))
    started = (path / SETTINGS if (path / SETTINGS).is_file() else path).stat().st_mtime
    return PastRun(folder=path, started=started, running=is_locked(path), problems=tuple(problems), **found)


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[PastRun]:
    """Runs, each once; a folder of runs stands for the runs in it."""
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        inside = [] if is_run(folder) or not folder.is_dir() else sorted(filter(is_run, folder.iterdir()))
        for path in inside or [folder]:
            found.setdefault(path.resolve(), path)
    return [read_run(path) for path in found.values()]


def list_runs(root: str | os.PathLike[str]) -> list[PastRun]:
    """The runs in a folder, oldest first, with the ends of their logs."""
    with _file_errors(Path(root), "read"):
        runs = [read_run(folder, _LIST_TAIL) for folder in Path(root).iterdir() if is_run(folder)]
    return sorted(runs, key=lambda run: (run.started, run.name))


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    return any((folder / name).is_file() for name in (SETTINGS, LOG))


def read_json(path: Path) -> dict[str, Any]:
    """A small file of a run."""
    data = parse_json(read_bytes(path, MOST_JSON), path)
    if not isinstance(data, dict):
        raise FileError(f"{path}: not a file of a run: it holds a {type(data).__name__}.")
    return data


def value_at(data: Any, *keys: str) -> Any:
    """The value at a path of keys, or None."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def text_at(data: Any, *keys: str) -> str:
    """The text or number at a path of keys, or empty."""
    value = value_at(data, *keys)
    return plain(str(value)) if isinstance(value, str | int | float) else ""


@contextlib.contextmanager
def _noting(path: Path, problems: list[str]) -> Iterator[None]:
    """Note why a file cannot be read, by its name only: the page may be shown to others."""
    try:
        yield
    except _READ_ERRORS as error:
        reason = str(error).removeprefix(f"{path}").removeprefix(": ").rstrip(".") or type(error).__name__
        problems.append(plain(f"{path.name}: {reason}."))


def _read_log(folder: Path, tail: int | None, problems: list[str]) -> dict[str, Any]:
    """Records by kind; of a step that was done again after a stop, the later one counts."""
    search: dict[int, SearchRecord] = {}
    training: dict[str, dict[int, StepRecord]] = {}
    rows: dict[str, Row] = {}
    with _noting(folder / LOG, problems):
        for line in _lines(folder / LOG, tail):
            data = json.loads(line)
            stage = data["stage"]
            record = _record({"search": SearchRecord, "test": Row}.get(stage, StepRecord), data)
            if isinstance(record, SearchRecord):
                search[record.step] = record
            elif isinstance(record, Row):
                rows[record.name] = record
            elif record is not None:
                training.setdefault(plain(stage), {})[record.step] = record
    with _noting(folder / TIMES, problems):
        for line in _lines(folder / TIMES):
            time = json.loads(line)
            if time["name"] in rows:
                times = {"ms": time["ms"], "batch": time["batch"]}
                rows[time["name"]] = _record(Row, asdict(rows[time["name"]]) | times)
    return {
        "search": tuple(search[step] for step in sorted(search)),
        "training": {name: tuple(steps[step] for step in sorted(steps)) for name, steps in training.items()},
        "rows": tuple(replace(row, name=plain(row.name)) for row in rows.values()),
    }


def _record(kind: Any, data: dict[str, Any]) -> Any:
    """A record with finite numbers, None for a line of another kind; a metric of the user's own may be anything."""
    if not {it.name for it in fields(kind) if it.default is MISSING} <= data.keys():
        return None
    record = from_plain(kind, {it.name: data[it.name] for it in fields(kind) if it.name in data})
    for name, value in vars(record).items():
        numbers = value if isinstance(value, tuple) else (value,)
        free = name == "accuracy" and record.own_metric
        if not free and any(isinstance(it, int | float) and not abs(it) < _MAX_NUMBER for it in numbers):
            raise ValueError(f"{name} is {value}")
    return record


def _read_chains(folder: Path) -> dict[str, Any]:
    facts = read_json(folder / SEARCH)
    spaces = tuple(map(str, facts["spaces"]))
    alphas, sizes = _chains(folder / ALPHAS, len(spaces))
    process = process_of(bool(facts["independent"]))
    expected = process.moment(process.marginals(alphas.double()), sizes, 1).tolist()
    return {
        "targets": {str(limit["kind"]): int(limit["target"]) for limit in facts["budget"]["limits"]},
        "expected": dict(zip(spaces, expected, strict=True)),
    }


def _lines(path: Path, tail: int | None = None) -> list[bytes]:
    """Whole lines of a file, if it is there: the last one may have been cut by a kill."""
    if not path.exists() and not path.is_symlink():
        return []
    if tail is None:
        return read_bytes(path, _MAX_LOG).split(b"\n")[:-1]
    refuse_link(path)
    with path.open("rb") as file:
        start = max(path.stat().st_size - tail, 0)
        file.seek(start)
        return file.read(tail).split(b"\n")[bool(start) : -1]


@contextlib.contextmanager
def _file_errors(path: Path, what: str = "written") -> Iterator[None]:
    """What the system refuses, as an error of ours."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be {what}: {error.strerror or error}.") from error
