"""A run is a folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dmcp.budget import LATENCY as KIND
from dmcp.budget import Budget, costs, show_limit
from dmcp.checkpoint import Checkpointer, load_checkpoint
from dmcp.errors import FileError, WidthsError
from dmcp.latency.table import LATENCY_FILE, Latency, Outcome
from dmcp.markov import INDEPENDENT, process_of
from dmcp.pruning import PruneResult, expected_shares
from dmcp.report.figures import draw_all
from dmcp.results import Row, divergence, markdown
from dmcp.runtime.io import (
    LOCK,
    MOST_JSON,
    from_plain,
    parse_json,
    parse_tensors,
    quote,
    read_bytes,
    refuse_link,
    write_files,
)
from dmcp.searching.config import SearchRecord, SearchResult
from dmcp.storage import WIDTHS, save
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Event
from dmcp.widths import Widths

SETTINGS, LOG, TIMES, REPORT = "settings.json", "log.jsonl", "times.jsonl", "report.md"
CHECKPOINTS = "checkpoints"  # a folder in it for each stage, until the run is done
SEARCH, ALPHAS = "search.json", "search.safetensors"
REPLACED = "replaced.jsonl"  # image files that could not be read, and in whose place others were taken
OUTCOME = "outcome.json"  # how a limit of latency ended
PREPARED = "prepared.safetensors"  # a network that other runs start from
MOST_LOG, MOST_ALPHAS = 2**30, 2**26  # bytes that are read
_FORMAT = "torch-dmcp search 1"


@dataclass(frozen=True)
class Run:
    """The folder of one run; every file in it appears whole or not at all, only the log grows."""

    folder: Path

    def write(self, name: str, data: Any) -> None:
        """Write a file: text as it is, anything else as JSON."""
        text = data if isinstance(data, str) else json.dumps(data, indent=1)
        _write_files(self.folder, {name: text.encode()})

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file of bytes."""
        _write_files(self.folder, {name: data})

    def on_event(self, event: Event) -> None:
        """Keep what a run reports: records as lines of the log, the search as soon as it is done.

        Times have a file of their own, so that the logs of two equal runs are equal bit for bit.
        """
        if isinstance(event.record, SearchResult):
            save_search(event.record, self.folder)
            return
        if isinstance(event.record, Latency):
            self.write(LATENCY_FILE, event.record.to_json())
            return
        facts = {"stage": event.stage} | asdict(event.record)
        if isinstance(event.record, Row):
            self.add(TIMES, {name: facts.pop(name) for name in ("ms", "batch")} | {"name": event.record.name})
        self.log(facts)

    def log(self, record: Mapping[str, Any]) -> None:
        """Add one line to the log."""
        self.add(LOG, record)

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one line to a file of records."""
        try:
            refuse_link(self.folder / name)
            with (self.folder / name).open("a") as file:
                file.write(json.dumps(record) + "\n")
        except FileError:
            raise
        except OSError as error:
            raise FileError(f"{self.folder / name}: cannot be written: {error.strerror or error}.") from error

    def lines(self) -> int:
        """Lines in the log, once they are safe on the disk."""
        path = self.folder / LOG
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return len(self._log())

    def records(self, stage: str) -> list[dict[str, Any]]:
        """What one stage has logged."""
        found = (record for record in self._all_records() if record["stage"] == stage)
        return [{key: value for key, value in record.items() if key != "stage"} for record in found]

    def _all_records(self) -> Iterator[dict[str, Any]]:
        path = self.folder / LOG
        for number, line in enumerate(self._log(), start=1):
            record = parse_json(line, f"{path}, line {number}")
            if not isinstance(record, dict) or not isinstance(record.get("stage"), str):
                raise FileError(f"{path}, line {number}: not a record of a run.")
            yield record

    def _log(self) -> list[bytes]:
        """Whole lines only: at the end there may be one that a kill has cut."""
        path = self.folder / LOG
        return read_bytes(path, MOST_LOG).split(b"\n")[:-1] if path.exists() or path.is_symlink() else []

    def checkpointer(self, identity: Mapping[str, Any], **when: Any) -> Checkpointer:
        """What saves the state of this run's stages."""
        refuse_link(self.folder / CHECKPOINTS)
        return Checkpointer(
            self.folder / CHECKPOINTS, identity, lines=self.lines, earlier=lambda stage: self.records(stage), **when
        )

    def note_replaced(self, part: str, files: Iterable[str]) -> None:
        """Keep the names of image files that were replaced."""
        for file in sorted(files):
            self.add(REPLACED, {"part": part, "file": file})

    def replaced(self, part: str) -> set[str]:
        """Image files of `train` or `test` that were replaced, in all sittings."""
        path = self.folder / REPLACED
        found: list[Any] = []
        for line in read_bytes(path, MOST_LOG).splitlines() if path.exists() or path.is_symlink() else []:
            with contextlib.suppress(FileError):  # a kill may have cut it, and no run is to be lost for that
                found.append(parse_json(line, path))
        files = (it.get("file") for it in found if isinstance(it, dict) and it.get("part") == part)
        return {file for file in files if isinstance(file, str)}

    def rewind(self) -> None:
        """Forget what was logged after the last checkpoint: the run will do it again, in the same way.

        Stages follow each other; if the newest checkpoint of one was damaged, so that it is not done any more, those
        after it begin anew.
        """
        for path in self.folder.iterdir():  # among them are figures that this run will write again
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
        lines = self._log()
        if len(lines) < kept:
            raise FileError(f"{self.folder / LOG}: {kept} lines were there, {len(lines)} are left: it cannot go on.")
        _write_files(self.folder, {LOG: b"".join(line + b"\n" for line in lines[:kept])})
        (self.folder / TIMES).unlink(missing_ok=True)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return (self.folder / REPORT).exists() or (
            (self.folder / WIDTHS).exists() and not (self.folder / CHECKPOINTS).exists()
        )

    def finish(self, result: PruneResult, seed: int = 0, more: Sequence[str] = ()) -> list[str]:
        """Write the network, the figures and the report; a sentence about each training that went wrong.

        more: sentences that the report has, too.
        """
        save(result.model, result.widths, self.folder)
        self.write_outcome(result.latency)
        figures = draw_all(result.search, result.widths, self.folder, seed=seed)
        troubles = self.troubles(row.name for row in result.rows)
        self.write(REPORT, report(result, [path.name for path in figures], [*troubles, *more]))
        self.close()
        return troubles

    def write_outcome(self, outcome: Outcome | None) -> None:
        """How a limit of latency ended, where there is one."""
        if outcome is not None:
            self.write(OUTCOME, asdict(outcome))

    def troubles(self, names: Iterable[str]) -> list[str]:
        """A sentence about each of these networks whose training went wrong, by the log."""
        losses: dict[str, list[float]] = {name: [] for name in names}
        for record in self._all_records():
            if record["stage"] in losses:
                losses[record["stage"]].append(record["loss"])
        return [trouble for name, seen in losses.items() if (trouble := divergence(name, seen))]

    def close(self) -> None:
        """The run is done: its checkpoints are not needed any more."""
        path = self.folder / CHECKPOINTS
        if path.exists():
            old = path.rename(path.with_name(f".{CHECKPOINTS}"))  # at once, so that half of them is never seen
            shutil.rmtree(old, ignore_errors=True)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """A new run folder; one that already holds something is refused."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: no run can be kept here: {error.strerror or error}.") from error
    refuse_taken(path)
    return Run(path)


def refuse_taken(path: Path) -> None:
    """Refuse a folder that already holds something; one that is not there yet is fine."""
    try:
        taken = path.exists() and any(it.name != LOCK for it in path.iterdir())  # a kill may have left that alone
    except OSError as error:
        raise FileError(f"{path}: no run can be kept here: {error.strerror or error}.") from error
    if taken:
        raise FileError(f"{path} already holds files: give the run another folder, or remove this one.")


def slug(text: str) -> str:
    """A text as the name of a folder; a file system has its longest one."""
    return re.sub(r"\W+", "-", text).strip("-")[:100]


def free_folder(name: str, root: str | os.PathLike[str] = "runs") -> Path:
    """A folder that does not exist yet: runs/NAME, runs/NAME-2, ..."""
    path, number = Path(root) / name, 2
    while path.exists():
        path, number = Path(root) / f"{name}-{number}", number + 1
    return path


def read_json(path: Path) -> dict[str, Any]:
    """One of the small files of a run."""
    data = parse_json(read_bytes(path, MOST_JSON), path)
    if not isinstance(data, dict):
        raise FileError(f"{path}: not a file of a run: it holds a {type(data).__name__}.")
    return data


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
    _write_files(folder, {ALPHAS: alphas, SEARCH: json.dumps(asdict(facts), indent=1).encode()})


def load_search(folder: str | os.PathLike[str], graph: ChannelGraph) -> SearchResult:
    """The search of a run; `graph` is traced from the unpruned model, freshly built."""
    folder = Path(folder)
    plain = read_json(folder / SEARCH)
    if plain.get("format") != _FORMAT:
        raise FileError(f"{folder / SEARCH}: its format is {quote(plain.get('format'))!r}, not {_FORMAT!r}.")
    path = folder / SEARCH
    try:
        facts = from_plain(_Facts, plain)
        path = folder / LOG
        records = tuple(from_plain(SearchRecord, record) for record in Run(folder).records("search"))
    except (TypeError, ValueError) as error:
        raise FileError(f"{path}: not that of a search of this version: {quote(error)}.") from None
    if (facts.fingerprint, facts.spaces) != (graph.fingerprint, tuple(space.name for space in graph.spaces)):
        raise WidthsError(f"{folder}: this search was of another architecture than the model: build it as it was.")
    if (folder / LATENCY_FILE).exists():
        graph = Latency.load(folder / LATENCY_FILE).attach(graph)
    alphas, sizes = _chains(folder / ALPHAS, graph)
    process = process_of(facts.independent)
    return SearchResult(alphas, sizes, graph, facts.budget, facts.tolerance, facts.align, records, process)


def _chains(path: Path, graph: ChannelGraph) -> tuple[Tensor, Tensor]:
    """Alphas and group sizes, if they are chains of this network's spaces."""
    tensors = parse_tensors(read_bytes(path, MOST_ALPHAS), path)
    full = torch.tensor([space.size for space in graph.spaces])
    alphas, sizes = tensors.get("alphas"), tensors.get("sizes")
    fits = (
        alphas is not None
        and sizes is not None
        and alphas.is_floating_point()
        and sizes.dtype == torch.int64
        and sizes.ndim == 2
        and len(sizes) == len(full)
        and alphas.shape == (len(full), sizes.shape[1] - 1)
    )
    if not fits or alphas is None or sizes is None:
        raise FileError(f"{path}: its tensors are not the alphas and sizes of this network's chains.")
    inside = (sizes >= 0).all() and (sizes <= full[:, None]).all() and (sizes.sum(dim=1) <= full).all()
    if not inside or (sizes[:, 0] < 1).any() or not alphas.isfinite().all():
        raise FileError(f"{path}: its numbers are not those of this network's chains.")
    return alphas, sizes


# the report


def report(result: PruneResult, figures: Iterable[str], troubles: Iterable[str] = ()) -> str:
    """What a run found, as Markdown."""
    budget = result.search.budget
    spent = costs(result.graph, result.widths)
    lines = [f"# {type(result.model).__name__}, budget {budget.text}", ""]
    lines += [
        f"- {limit.kind}: {show_limit(limit, spent[limit.kind])} allowed ({spent[limit.kind] / limit.target:.1%})"
        for limit in budget.limits
        if limit.kind != KIND
    ]
    if result.latency is not None:
        lines.append(f"- {result.latency.text}")
        troubles = [*filter(None, [result.latency.warning]), *troubles]
    listed = " and ".join(f"{share:.1%}" for share in expected_shares(result.search))
    lines.append(f"- expected cost at the end of the search, before sampling: {listed} of the budget")
    lines += [f"- **{trouble}**" for trouble in troubles]
    lines += ["", *markdown(result.rows, result.graph, result.origin), "", *_widths(result.widths, result.graph), ""]
    lines += [line for name in figures for line in (f"![{Path(name).stem}]({name})", "")]
    return "\n".join([*lines, f"The settings are in {SETTINGS}, every step in {LOG}.", ""])


def _widths(widths: Widths, graph: ChannelGraph) -> list[str]:
    lines = ["| space | channels | kept |", "|---|---:|---:|"]
    return lines + [f"| {space.name} | {space.size} | {widths[space.name]} |" for space in graph.spaces]


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    try:
        write_files(folder, files)
    except OSError as error:
        raise FileError(f"{folder}: cannot be written: {error.strerror or error}.") from error
