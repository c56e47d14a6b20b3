"""A run is a folder: files are written whole or not at all, only logs grow, and reading trusts nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url

import safetensors.torch
import torch
from torch import Tensor

from dmcp.arguments import checked
from dmcp.budgets import LATENCY, Budget, show_cost
from dmcp.errors import FileError, WidthsError
from dmcp.exporting.latency import LATENCY_FILE, Latency, Outcome
from dmcp.markov import INDEPENDENT, process_of
from dmcp.pruning import PruneResult
from dmcp.report.figures import accuracy_over_cost, draw_all
from dmcp.report.figures import save as save_figure
from dmcp.results import ACCURACY, Row, divergence, error_of, pruned, results_table
from dmcp.runs.storage import SETTINGS as SETTINGS
from dmcp.runs.storage import WIDTHS, save
from dmcp.runtime import io
from dmcp.runtime.checkpoint import Checkpointer, load_checkpoint
from dmcp.runtime.distributed import current
from dmcp.runtime.io import from_plain, parse_json, plain, quote, read_bytes, refuse_link, write_files
from dmcp.searching.budget import costs
from dmcp.searching.records import SearchRecord, SearchResult, expected_shares
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Event, StepRecord

LOG, TIMES, REPORT = "log.jsonl", "times.jsonl", "report.md"
INPUT = "input.json"  # how images become inputs
STARTS = "starts"  # of the settings: when the run began and went on, and on what
START = (LATENCY_FILE, INPUT, SETTINGS, LOG)  # what a run begins with; without settings it has not begun
CHECKPOINTS = "checkpoints"  # a folder in it for each stage, until the run is done
SEARCH, ALPHAS = "search.json", "search.safetensors"
REPLACED = "replaced.json"  # unreadable image files that others were taken for
OUTCOME = "outcome.json"  # how a limit of latency ended
EXPORTED = "export.json"  # by exported file: milliseconds, also with float32 and of the unpruned network's
PREPARED = "prepared.safetensors"  # a network that other runs start from
_MAX_LOG, _MAX_ALPHAS = 2**30, 2**26  # bytes that are read
_LIST_TAIL = 1000  # lines of a log that a list of runs needs
_MAX_NUMBER = 1e18  # beyond what any network costs, and what a chart can show
_FORMAT = "torch-dmcp search 1"


# writing


@dataclass(frozen=True)
class Run:
    """The folder of a run that is being written."""

    folder: Path

    def write(self, name: str, data: Any) -> None:
        """Write a file: text and bytes as they are, anything else as JSON."""
        self.write_all({name: data})

    def write_all(self, files: Mapping[str, Any]) -> None:
        """Write several files; none has its name before all are on the disk."""
        texts = {it: x if isinstance(x, str | bytes) else json.dumps(x, indent=1) for it, x in files.items()}
        # names of files in a text need not be UTF-8
        encoded = {it: x.encode(errors="backslashreplace") if isinstance(x, str) else x for it, x in texts.items()}
        write_files(self.folder, encoded)

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to a file of records."""
        refuse_link(self.folder / name)
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def on_event(self, event: Event) -> None:
        """Log a record, or save the result of the search; equal runs have equal logs: times are in another file."""
        record = event.record
        if isinstance(record, SearchResult):
            if event.stage == "search":  # not one inside another method
                save_search(record, self.folder)
        elif isinstance(record, Mapping):
            self.add(LOG, {"stage": event.stage} | dict(record))
        elif isinstance(record, Latency):
            self.write(LATENCY_FILE, record.to_json())
        else:
            facts = {"stage": event.stage} | asdict(record)
            if isinstance(record, Row):
                self.add(TIMES, {"ms": facts.pop("ms"), "batch": facts.pop("batch"), "name": record.name})
            self.add(LOG, facts)

    def records(self, stage: str) -> list[dict[str, Any]]:
        """The log of one stage."""
        return [record for record in _records(self.folder / LOG) if record.pop("stage", None) == stage]

    def lines(self) -> int:
        """Lines of the log, all of them safe on the disk."""
        path = self.folder / LOG
        lines = _lines(path)  # first: it refuses a pipe, which would wait for its other end
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return len(lines)

    def checkpointer(self, identity: Mapping[str, Any], **when: Any) -> Checkpointer:
        """The checkpointer of this run's stages."""
        refuse_link(self.folder / CHECKPOINTS)
        return Checkpointer(self.folder / CHECKPOINTS, identity, lines=self.lines, earlier=self.records, **when)

    def rewind(self, checkpointer: Checkpointer) -> None:
        """Cut the log back to the last checkpoint, once all are checked; stages after an unfinished one begin anew."""
        for path in self.folder.iterdir():  # figures, too, are written again
            refuse_link(path)
        path = self.folder / CHECKPOINTS
        stages = sorted(path.iterdir()) if path.is_dir() else []
        loaded = [(checkpoint.facts, stage) for stage in stages if (checkpoint := load_checkpoint(stage)) is not None]
        if not all(type(facts.get("lines")) is int for facts, _ in loaded):
            raise FileError(f"{path}: these are not the checkpoints of a run: remove them to start from the beginning.")
        for facts, stage in loaded:
            checkpointer.stage(stage.name).check(facts, current())
        loaded.sort(key=lambda it: int(it[0]["lines"]))
        kept, going_on = 0, True
        for facts, stage in loaded:
            if going_on:
                kept, going_on = facts["lines"], facts.get("done") is True
            else:
                shutil.rmtree(stage)
        lines = _lines(self.folder / LOG)
        if len(lines) < kept:
            raise FileError(f"{self.folder / LOG}: {kept} lines were there, {len(lines)} are left: it cannot go on.")
        self.write(LOG, b"".join(line + b"\n" for line in lines[:kept]))
        (self.folder / TIMES).unlink(missing_ok=True)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        made = any((self.folder / name).is_file() for name in (WIDTHS, PREPARED))
        return (made and not (self.folder / CHECKPOINTS).exists()) or (self.folder / REPORT).is_file()

    def finish(self, result: PruneResult, notes: Sequence[str] = ()) -> list[str]:
        """Write the network, the figures and the report with these notes; return warnings of diverged trainings."""
        if result.front:
            return self._finish_front(result, notes)
        save(result.model, result.widths, self.folder)
        if result.latency:
            self.write(OUTCOME, asdict(result.latency))
        drawn = [] if result.search is None else draw_all(result.search, result.widths, self.folder)
        warnings = self.divergences(row.name for row in result.rows)
        self.write(REPORT, report(result, [path.name for path in drawn], [*warnings, *notes]))
        self.close()
        return warnings

    def _finish_front(self, result: PruneResult, notes: Sequence[str]) -> list[str]:
        """The same for several budgets: a run folder for the network of each, one table and one chart."""
        stored, warnings = read_json(self.folder / SETTINGS), list[str]()
        for name, own in result.front.items():
            run = Run(self.folder / name)
            shutil.rmtree(run.folder, ignore_errors=True)  # half of one, before an interruption
            run.folder.mkdir()
            search = stored["search"] | {"budget": own.budget.text}
            run.write(SETTINGS, stored | {"budgets": [], "search": search})
            for path in (it for it in (self.folder / INPUT, self.folder / LATENCY_FILE) if it.exists()):
                run.write(path.name, read_bytes(path, io.MOST_JSON))
            records = [{"stage": "search"} | asdict(record) for record in (own.search.log if own.search else ())]
            for row in own.rows:
                steps = self.records(f"{row.name} {name}") or self.records(row.name)
                records += [{"stage": row.name} | step for step in steps]
            run.write(LOG, "".join(f"{json.dumps(record)}\n" for record in records))
            for row in own.rows:
                run.on_event(Event("test", 0, row))
            if own.search:
                save_search(own.search, run.folder)
            warnings += [f"{name}: {text}" for text in run.finish(own, notes)]
        if result.rows[0].score == ACCURACY:  # the axis has shares
            points = []
            for row in result.rows:
                name, _, budget = row.name.rpartition(" ")
                name, budget = (name, budget) if budget in result.front else (row.name, "")
                points.append((name, budget, row.macs, row.accuracy, error_of(row) or 0.0))
            save_figure(accuracy_over_cost(points), self.folder / "front.svg")
        asked = ", ".join(own.budget.text for own in result.front.values())
        links = [f"- [{name}]({quote_url(name)}/{REPORT}): its network, widths and figures" for name in result.front]
        links += ["", *(f"![{path.stem}]({path.name})" for path in self.folder.glob("front.svg")), ""]
        head = [f"# {type(result.model).__name__}, budgets {asked}", "", *(f"- **{it}**" for it in (*warnings, *notes))]
        table = results_table(result.rows, result.graph, result.origin)
        self.write(REPORT, "\n".join([*head, "", table, "", *links]))
        self.close()
        return warnings

    def divergences(self, names: Iterable[str]) -> list[str]:
        """A warning for each of these networks whose loss ended higher than it began."""
        return [it for name in names if (it := divergence(name, [step["loss"] for step in self.records(name)]))]

    def close(self) -> None:
        """Remove the checkpoints."""
        path, old = (self.folder / name for name in (CHECKPOINTS, f".{CHECKPOINTS}"))
        if path.exists():
            path.rename(old)  # at once, so that half of them is never seen
        shutil.rmtree(old, ignore_errors=True)


def refuse_taken(path: Path) -> None:
    """Refuse a folder that holds something else than a lock, and what is left of a run that was killed as it began."""
    names = {it.name for it in path.iterdir()} if path.exists() else set()
    staged = {io.staging_name(name) for name in START}
    if names - staged - {io.LOCK} - ({*START} if io.staging_name(SETTINGS) in names else set()):
        again = f"go on with that run (--resume {path}), " if is_run(path) and not Run(path).done else ""
        raise FileError(f"{path} already holds files: {again}give the run another folder, or remove this one.")


def slug(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"\W+", "-", text).strip("-")[:100]


def free_folder(name: str, root: Path = Path("runs")) -> Path:
    """A folder that does not exist yet: runs/NAME, runs/NAME-2, ..."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(root / it for it in names if not (root / it).exists())


def report(result: PruneResult, figures: Iterable[str], warnings: Iterable[str] = ()) -> str:
    """What a run found, as Markdown."""
    budget, spent = result.budget, costs(result.graph, result.widths)
    lines = [f"# {type(result.model).__name__}, budget {budget.text}", ""]
    for limit in budget.limits:
        if limit.kind != LATENCY:
            share = spent[limit.kind] / limit.target
            used, allowed = (show_cost(limit.kind, it) for it in (spent[limit.kind], limit.target))
            lines.append(f"- {limit.kind}: {used} of {allowed} allowed ({share:.1%})")
    if result.latency is not None:
        lines.append(f"- {result.latency.text}")
        warnings = [*filter(None, [result.latency.warning]), *warnings]
    if result.search is not None:
        listed = " and ".join(f"{share:.1%}" for share in expected_shares(result.search))
        lines.append(f"- expected cost at the end of the search, before sampling: {listed} of the budget")
    lines += [f"- **{warning}**" for warning in warnings]
    lines += ["", results_table(result.rows, result.graph, result.origin), ""]
    lines += ["| space | channels | kept |", "|---|---:|---:|"]
    lines += [f"| {space.name} | {space.size} | {result.widths[space.name]} |" for space in result.graph.spaces]
    lines += ["", *(f"![{Path(name).stem}]({name})\n" for name in figures)]
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
    align: int | None
    independent: bool
    sha256: str  # of the file of the alphas

    def __post_init__(self) -> None:
        if self.format != _FORMAT:
            raise ValueError(self.format)


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
        sha256=hashlib.sha256(alphas).hexdigest(),
    )
    write_files(folder, {ALPHAS: alphas, SEARCH: json.dumps(asdict(facts), indent=1).encode()})


@checked
def load_search(folder: str | os.PathLike[str], graph: ChannelGraph) -> SearchResult:
    """What the search of a run found, for `expected` and `direct`; `graph`: traced from the unpruned model as it was.

    The file has `alphas` (S, G-1) and group `sizes` (S, G), which are 0 behind the end of a short chain.
    """
    folder = Path(folder)
    try:
        known = from_plain(_Facts, read_json(folder / SEARCH))
        records = tuple(from_plain(SearchRecord, record) for record in Run(folder).records("search"))
    except (TypeError, ValueError) as error:
        raise FileError(f"{folder}: {SEARCH} or {LOG} are not of a search of this version: {quote(error)}.") from None
    if (known.fingerprint, known.spaces) != (graph.fingerprint, tuple(space.name for space in graph.spaces)):
        raise WidthsError(f"{folder}: this search was of other spaces: build and trace the model as it was.")
    if (folder / LATENCY_FILE).exists():
        graph = Latency.load(folder / LATENCY_FILE).attach(graph)
    alphas, sizes = _chains(folder / ALPHAS, len(graph.spaces), known.sha256)
    if (sizes.sum(dim=1) > torch.tensor([space.size for space in graph.spaces])).any():
        raise FileError(f"{folder / ALPHAS}: its chains have more channels than this network.")
    process = process_of(known.independent)
    return SearchResult(alphas, sizes, graph, known.budget, known.tolerance, known.align, records, process)


def _chains(path: Path, spaces: int, checksum: object) -> tuple[Tensor, Tensor]:
    """Alphas (S, G-1) and group sizes (S, G) of a file, checked."""
    data = read_bytes(path, _MAX_ALPHAS)
    if hashlib.sha256(data).hexdigest() != checksum:
        raise FileError(f"{path}: truncated, or changed since it was saved.")
    tensors = io.parse_tensors(data, path)
    alphas, sizes = (tensors.get(name, torch.empty(0)) for name in ("alphas", "sizes"))
    fits = alphas.is_floating_point() and sizes.dtype == torch.int64 and alphas.ndim == sizes.ndim == 2
    fits = fits and alphas.shape == (spaces, sizes.shape[1] - 1) and len(sizes) == spaces
    if not fits or not alphas.isfinite().all() or (sizes[:, 0] < 1).any() or ((sizes < 0) | (sizes >= 2**31)).any():
        raise FileError(f"{path}: its tensors are not chains of {spaces} spaces.")
    return alphas, sizes


# reading


@dataclass(frozen=True, kw_only=True, eq=False)
class PastRun:
    """Everything that a run folder says about itself; empty where it says nothing."""

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    started: datetime
    search: tuple[SearchRecord, ...] = ()
    training: Mapping[str, tuple[StepRecord, ...]] = field(default_factory=dict)  # by network
    rows: tuple[Row, ...] = ()  # networks that were tested
    targets: Mapping[str, int] = field(default_factory=dict)  # of the budget, by kind
    expected: Mapping[str, float] = field(default_factory=dict)  # width of each space at the end of the search
    widths: Mapping[str, int] = field(default_factory=dict)
    latency: Outcome | None = None
    exported: tuple[float, float, str] | None = None  # ms of the unpruned network, of the result, and what was timed
    running: bool = False
    problems: tuple[str, ...] = ()  # what could not be read

    @property
    def name(self) -> str:
        """The folder's name; of one of several budgets behind that of their run."""
        folder = self.folder.resolve()
        return plain(f"{folder.parent.name}/{folder.name}" if is_run(folder.parent) else folder.name)

    @property
    def done(self) -> bool:
        """Whether everything that the command makes is there."""
        return Run(self.folder).done

    @property
    def before(self) -> dict[str, int]:
        """Channels of each space of the unpruned network."""
        stored = value_at(self.settings, "unpruned", "widths")
        sizes = stored.items() if isinstance(stored, Mapping) else ()
        return {name: size for name, size in sizes if type(size) is int and size > 0}

    @property
    def result(self) -> Row | None:
        """The tested network that the run was for."""
        return next(iter(pruned(self.rows)), None)

    @property
    def progress(self) -> str:
        """The last step that was logged."""
        if self.training:
            stage, records = list(self.training.items())[-1]
            return f"{stage}, step {records[-1].step + 1:,} of {records[-1].steps:,}"
        if not self.search:
            return "before the first logged step"
        last, epochs = self.search[-1], self.setting("search", "epochs")
        return f"search, step {last.step + 1:,}, in epoch {last.epoch + 1} of {epochs}"

    def unpruned(self, kind: str) -> int | None:
        """What the unpruned network costs, if the run says so."""
        stored = value_at(self.settings, "unpruned", kind)
        return stored if type(stored) is int and stored > 0 else None

    def share(self, kind: str) -> float | None:
        """Cost of the result over that of the unpruned network."""
        full = self.unpruned(kind)
        return getattr(self.result, kind) / full if self.result and full else None

    def setting(self, *keys: str) -> str:
        """The setting at a path of keys as text; empty if there is none."""
        value = value_at(self.settings, *keys)
        return plain(str(value)) if isinstance(value, str | int | float) else ""

    def describe(self) -> dict[str, Any]:
        """The run as plain data; shares from 0 to 1, None for a metric that is no number."""
        result = self.result
        several = found if isinstance(found := self.settings.get("budgets"), list) else []
        state = "done" if self.done else "running" if self.running else "stopped"
        return {
            "name": self.name,
            "folder": plain(str(self.folder)),
            **{name: self.setting(name) for name in ("command", "model", "data")},
            "budget": ", ".join(map(plain, map(str, several))) or self.setting("search", "budget"),
            "state": "damaged" if self.problems else state,
            "progress": "" if self.done else self.progress,
            "accuracy": result.accuracy if result and math.isfinite(result.accuracy) else None,
            "macs": result.macs if result else None,
            "macs_share": self.share("macs"),
            "started": f"{self.started:%Y-%m-%d %H:%M}",
        }


def read_run(folder: Path, tail: int = 0) -> PastRun:
    """A run as far as it can be read, of its log the last `tail` lines or all; only what is no run is refused."""
    if not is_run(folder):
        raise FileError(f"{folder}: not a run: give a folder that dmcp prune, search or train has made.")
    path = folder / SETTINGS
    changed = datetime.fromtimestamp((path if path.is_file() else folder).stat().st_mtime).astimezone()
    found: dict[str, Any] = {"folder": folder, "running": io.is_locked(folder), "started": changed}
    try:
        found["settings"] = read_json(path)
        for start in [*found["settings"].get(STARTS, ())][:1]:
            found["started"] = datetime.fromisoformat(start).astimezone()
        path = folder / LOG
        found |= _read_log(folder, tail)
        if (path := folder / WIDTHS).is_file():
            found["widths"] = dict(Widths.from_json(read_json(path)))
        if (path := folder / OUTCOME).is_file():
            found["latency"] = from_plain(Outcome, read_json(path))
        if (path := folder / EXPORTED).is_file():
            it = [*read_json(path).values()][-1]
            times = it["ms"]
            found["exported"] = float(times["unpruned"]), float(times["float32"]), f"a sample in {it['runtime']}"
        if (path := folder / SEARCH).is_file():
            found |= _read_chains(folder, read_json(path))
    except Exception as error:  # a file may hold anything; its name alone, since the page may be shown to others
        reason = str(error).replace(f"{folder}{os.sep}", "").rstrip(".") or type(error).__name__
        found["problems"] = (plain(reason if reason.startswith("search.") else f"{path.name}: {reason}."),)
    return PastRun(**found)


def read_runs(folders: Sequence[Path]) -> list[PastRun]:
    """Runs, each once; a folder of runs stands for the runs in it."""
    found: dict[Path, Path] = {}
    for folder in folders:
        inside = [] if is_run(folder) or not folder.is_dir() else sorted(filter(is_run, folder.iterdir()))
        for path in inside or [folder]:
            parts = sorted(filter(is_run, path.iterdir())) if (path / REPORT).is_file() else []  # of several budgets
            found |= {part.resolve(): part for part in parts or [path] if part.resolve() not in found}
    return [read_run(path) for path in found.values()]


def list_runs(root: Path) -> list[PastRun]:
    """The runs in a folder, oldest first, with the ends of their logs."""
    runs = [read_run(folder, _LIST_TAIL) for folder in root.iterdir() if is_run(folder)]
    return sorted(runs, key=lambda run: (run.started, run.name))


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    return any((folder / name).is_file() for name in (SETTINGS, LOG))


def read_json(path: Path) -> dict[str, Any]:
    """A small file of a run."""
    data = parse_json(read_bytes(path, io.MOST_JSON), path)
    if not isinstance(data, dict):
        raise FileError(f"{path}: not a file of a run: it holds a {type(data).__name__}.")
    return data


def read_widths(path: Path, graph: ChannelGraph) -> Widths:
    """The widths of a file, which must be those of this network."""
    return graph.widths(Widths.from_json(read_json(path)))


def value_at(data: Any, *keys: str) -> Any:
    """The value at a path of keys, or None."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _read_log(folder: Path, tail: int) -> dict[str, Any]:
    """Records by kind; of a step that was done again after a stop, the later one counts."""
    steps: dict[str, dict[int, Any]] = {}  # by stage
    rows: dict[str, Row] = {}
    times = {str(time.get("name")): time for time in _records(folder / TIMES)}
    for data in _records(folder / LOG, tail):
        stage = plain(str(data.get("stage")))
        if stage == "test" and (row := _record(Row, data | times.get(str(data.get("name")), {}))):
            rows[row.name] = replace(row, name=plain(row.name))
        elif record := _record(SearchRecord if stage == "search" else StepRecord, data):
            steps.setdefault(stage, {})[record.step] = record
    ordered = {name: tuple(found[step] for step in sorted(found)) for name, found in steps.items()}
    return {"search": ordered.pop("search", ()), "training": ordered, "rows": tuple(rows.values())}


def _record(kind: Any, data: dict[str, Any]) -> Any:
    """A record with finite numbers; None for a line of another kind. A metric of the user's own may be anything."""
    try:
        record = from_plain(kind, {it.name: data[it.name] for it in fields(kind) if it.name in data})
    except (TypeError, ValueError):
        return None
    for name, value in vars(record).items():
        numbers = value if isinstance(value, tuple) else (value,)
        free = name == "accuracy" and record.score != ACCURACY
        if not free and any(isinstance(it, int | float) and not abs(it) < _MAX_NUMBER for it in numbers):
            return None
    return record


def _read_chains(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    spaces = tuple(map(str, facts["spaces"]))
    alphas, sizes = _chains(folder / ALPHAS, len(spaces), facts["sha256"])
    process = process_of(bool(facts["independent"]))
    expected = process.moment(process.marginals(alphas.double()), sizes, 1).tolist()
    targets = {str(limit["kind"]): int(limit["target"]) for limit in facts["budget"]["limits"]}
    return {"targets": targets, "expected": dict(zip(spaces, expected, strict=True))}


def _records(path: Path, tail: int = 0) -> Iterator[dict[str, Any]]:
    """The lines of a file of records."""
    for line in _lines(path, tail):
        record = parse_json(line, path)
        if not isinstance(record, dict):
            raise FileError(f"{path}: not a file of records: it holds a {type(record).__name__}.")
        yield record


def _lines(path: Path, tail: int = 0) -> list[bytes]:
    """Whole lines of a file, if it is there, all or the last ones: one may have been cut by a kill."""
    if not path.exists() and not path.is_symlink():
        return []
    return read_bytes(path, _MAX_LOG).split(b"\n")[:-1][-tail:]
