"""A run is a folder: settings, log, search, result, report and figures, as JSON, safetensors, Markdown and SVG."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from dmcp.budget import Budget, Limit
from dmcp.checkpoints import load_checkpoint
from dmcp.cutting import save, write_files
from dmcp.errors import FileError, WidthsError
from dmcp.figures import draw_all
from dmcp.graph import ChannelGraph
from dmcp.keeping import Keeper
from dmcp.markov import CHAIN, INDEPENDENT
from dmcp.pruning import Event, PruneResult, Row, expected_shares
from dmcp.searching import SearchResult, as_record
from dmcp.spaces import Widths

SETTINGS, LOG, TIMES, REPORT = "settings.json", "log.jsonl", "times.jsonl", "report.md"
CHECKPOINTS = "checkpoints"  # a folder in it for each stage, until the run is done
SEARCH, ALPHAS = "search.json", "search.safetensors"
_FORMAT = "torch-dmcp search 1"


@dataclass(frozen=True)
class Run:
    """The folder of one run; every file in it appears whole or not at all, only the log grows."""

    folder: Path

    def write(self, name: str, data: Any) -> None:
        """Write a file: text as it is, anything else as JSON."""
        text = data if isinstance(data, str) else json.dumps(data, indent=1)
        _write_files(self.folder, {name: text.encode()})

    def on_event(self, event: Event) -> None:
        """Keep what a run reports: records as lines of the log, the search as soon as it is done.

        Times have a file of their own, so that the logs of two equal runs are equal bit for bit.
        """
        if isinstance(event.record, SearchResult):
            save_search(event.record, self.folder)
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
            with (self.folder / name).open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise FileError(f"{self.folder / name}: cannot be written: {error.strerror or error}.") from error

    def lines(self) -> int:
        """Lines in the log."""
        return len(self._log())

    def records(self, stage: str) -> list[dict[str, Any]]:
        """What one stage has logged."""
        found = [json.loads(line) for line in self._log()]
        return [{k: v for k, v in record.items() if k != "stage"} for record in found if record["stage"] == stage]

    def _log(self) -> list[str]:
        path = self.folder / LOG
        return path.read_text().splitlines() if path.exists() else []

    def keeper(self, stage: str, identity: Mapping[str, Any], **when: Any) -> Keeper:
        """What saves the state of one stage of this run."""
        return Keeper(self.stage_folder(stage), identity, lines=self.lines, earlier=lambda: self.records(stage), **when)

    def stage_folder(self, stage: str) -> Path:
        """Where the checkpoints of a stage are."""
        return self.folder / CHECKPOINTS / stage.replace(" ", "-")

    def rewind(self) -> None:
        """Forget what was logged after the last checkpoint: the run will do it again, in the same way."""
        path = self.folder / CHECKPOINTS
        stages = sorted(path.iterdir()) if path.is_dir() else []
        found = [checkpoint for stage in stages if (checkpoint := load_checkpoint(stage)) is not None]
        kept = max((checkpoint.facts["lines"] for checkpoint in found), default=0)
        lines = self._log()[:kept]
        self.write(LOG, "".join(f"{line}\n" for line in lines))

    def finish(self, result: PruneResult, seed: int = 0) -> None:
        """Write the network, the figures and the report."""
        save(result.model, result.widths, self.folder)
        figures = draw_all(result.search, result.widths, self.folder, seed=seed)
        self.write(REPORT, report(result, [path.name for path in figures]))
        self.close()

    def close(self) -> None:
        """The run is done: its checkpoints are not needed any more."""
        shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """A new run folder; one that already holds something is refused."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = any(path.iterdir())
    except OSError as error:
        raise FileError(f"{path}: no run can be kept here: {error.strerror or error}.") from error
    if taken:
        raise FileError(f"{path} already holds files: give the run another folder, or remove this one.")
    return Run(path)


def free_folder(name: str, root: str | os.PathLike[str] = "runs") -> Path:
    """A folder that does not exist yet: runs/NAME, runs/NAME-2, ..."""
    path, number = Path(root) / name, 2
    while path.exists():
        path, number = Path(root) / f"{name}-{number}", number + 1
    return path


def read_json(path: Path) -> dict[str, Any]:
    """One of the small files of a run."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise FileError(f"{path}: not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise FileError(f"{path}: not a file of a run: it holds a {type(data).__name__}.")
    return data


# the search


def save_search(result: SearchResult, folder: Path) -> None:
    """Write what sampling needs; the steps of the search are in the log."""
    alphas = safetensors.torch.save({"alphas": result.alphas.contiguous(), "sizes": result.sizes.contiguous()})
    facts = {
        "format": _FORMAT,
        "fingerprint": result.graph.fingerprint,
        "spaces": [space.name for space in result.graph.spaces],
        "budget": asdict(result.budget),
        "tolerance": result.tolerance,
        "align": result.align,
        "independent": result.process is INDEPENDENT,
    }
    _write_files(folder, {ALPHAS: alphas, SEARCH: json.dumps(facts, indent=1).encode()})


def load_search(folder: str | os.PathLike[str], graph: ChannelGraph) -> SearchResult:
    """The search of a run; `graph` is traced from the unpruned model, freshly built."""
    folder = Path(folder)
    facts = read_json(folder / SEARCH)
    if facts.get("format") != _FORMAT:
        raise FileError(f"{folder / SEARCH}: its format is {facts.get('format')!r}, not {_FORMAT!r}.")
    if (facts["fingerprint"], facts["spaces"]) != (graph.fingerprint, [space.name for space in graph.spaces]):
        raise WidthsError(f"{folder}: this search was of another architecture than the model: build it as it was.")
    try:
        tensors = safetensors.torch.load((folder / ALPHAS).read_bytes())
        alphas, sizes = tensors["alphas"], tensors["sizes"]
    except (OSError, KeyError, SafetensorError) as error:
        raise FileError(f"{folder / ALPHAS}: cannot be read: {error}.") from error
    full = torch.tensor([space.size for space in graph.spaces])
    rows, groups = sizes.shape
    if alphas.shape != (rows, groups - 1) or rows != len(full) or (sizes.sum(dim=1) > full).any():
        raise FileError(f"{folder / ALPHAS}: its shapes are not those of this network's chains.")
    budget = Budget(tuple(Limit(**limit) for limit in facts["budget"]["limits"]), facts["budget"]["text"])
    process = INDEPENDENT if facts["independent"] else CHAIN
    records = tuple(as_record(record) for record in Run(folder).records("search"))
    return SearchResult(alphas, sizes, graph, budget, facts["tolerance"], facts["align"], records, process)


# the report


def report(result: PruneResult, figures: Iterable[str]) -> str:
    """What a run found, as Markdown."""
    budget = result.search.budget
    spent = {"macs": result.graph.macs(result.widths), "params": result.graph.params(result.widths)}
    lines = [f"# {type(result.model).__name__}, budget {budget.text}", ""]
    lines += [
        f"- {limit.kind}: {spent[limit.kind]:,} of {limit.target:,} allowed ({spent[limit.kind] / limit.target:.1%})"
        for limit in budget.limits
    ]
    listed = " and ".join(f"{share:.1%}" for share in expected_shares(result.search))
    lines.append(f"- expected cost at the end of the search, before sampling: {listed} of the budget")
    lines += ["", *markdown(result.rows), "", *_widths(result.widths, result.graph), ""]
    lines += [line for name in figures for line in (f"![{Path(name).stem}]({name})", "")]
    return "\n".join([*lines, f"The settings are in {SETTINGS}, every step in {LOG}.", ""])


def markdown(rows: Iterable[Row]) -> list[str]:
    """The final table; the accuracy is the metric's mean over the test set, in percent."""
    rows = list(rows)
    lines = [f"| network | MACs | params | accuracy | ms per {rows[0].batch} |", "|---|---:|---:|---:|---:|"]
    return lines + [
        f"| {row.name} | {row.macs:,} | {row.params:,} | {100 * row.accuracy:.2f} % | {row.ms:.2f} |" for row in rows
    ]


def _widths(widths: Widths, graph: ChannelGraph) -> list[str]:
    lines = ["| space | channels | kept |", "|---|---:|---:|"]
    return lines + [f"| {space.name} | {space.size} | {widths[space.name]} |" for space in graph.spaces]


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    try:
        write_files(folder, files)
    except OSError as error:
        raise FileError(f"{folder}: cannot be written: {error.strerror or error}.") from error
