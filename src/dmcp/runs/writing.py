"""The folder of a run that is being written."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmcp.errors import FileError
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.results import divergence
from dmcp.runs.files import CHECKPOINTS, FAILED, INPUT, LOG, SETTINGS, TIMES, is_done, is_run, read_lines, read_stage
from dmcp.runs.records import Row
from dmcp.runs.saved_search import save_search
from dmcp.runtime.checkpoint import Checkpointer, load_checkpoint
from dmcp.runtime.distributed import current
from dmcp.runtime.io import LOCK, refuse_link, staging_name, write_files
from dmcp.searching.records import SearchResult
from dmcp.training.loop import Event

START = (LATENCY_FILE, INPUT, SETTINGS, LOG)  # files that a run begins with; without settings it has not begun


@dataclass(frozen=True)
class Run:
    """The folder of a run that is being written."""

    folder: Path

    # files

    def write(self, name: str, data: Any) -> None:
        """Write a file: text and bytes as they are, anything else as JSON."""
        self.write_all({name: data})

    def write_all(self, files: Mapping[str, Any]) -> None:
        """Write several files; none has its name before all are on the disk."""
        write_files(self.folder, {name: _encode(data) for name, data in files.items()})

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to a .jsonl file."""
        refuse_link(self.folder / name)
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def on_event(self, event: Event) -> None:
        """Log the record of an event, or save what it brings.

        Equal runs have equal logs: milliseconds are written to another file.
        """
        record = event.record
        if isinstance(record, SearchResult):
            if event.stage == "search":  # not the search inside another method
                save_search(record, self.folder)
        elif isinstance(record, Latency):
            self.write(LATENCY_FILE, record.to_json())
        elif isinstance(record, Row):
            facts = asdict(record)
            self.add(TIMES, {"ms": facts.pop("ms"), "batch": facts.pop("batch"), "name": record.name})
            self.add(LOG, {"stage": event.stage} | facts)
        else:
            if isinstance(record, Mapping):
                facts = dict(record)
            else:
                facts = asdict(record)
            self.add(LOG, {"stage": event.stage} | facts)

    # the log

    def records(self, stage: str) -> list[dict[str, Any]]:
        """The log of one stage."""
        return read_stage(self.folder, stage)

    def lines(self) -> int:
        """The number of lines of the log, all of them safe on the disk."""
        path = self.folder / LOG
        lines = read_lines(path)  # first, since it refuses what is not a plain file
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return len(lines)

    def divergences(self, names: Iterable[str]) -> list[str]:
        """A warning for each of these networks whose loss ended higher than it began."""
        warnings = [divergence(name, [step["loss"] for step in self.records(name)]) for name in names]
        return [warning for warning in warnings if warning]

    # checkpoints

    def checkpointer(self, identity: Mapping[str, Any], **when: Any) -> Checkpointer:
        """The checkpointer of this run's stages."""
        refuse_link(self.folder / CHECKPOINTS)
        return Checkpointer(self.folder / CHECKPOINTS, identity, lines=self.lines, earlier=self.records, **when)

    def rewind(self, checkpointer: Checkpointer) -> None:
        """Cut the log back to the last checkpoint, once all are checked; stages after an unfinished one begin anew."""
        for path in self.folder.iterdir():  # figures, too, are written again
            refuse_link(path)

        # The checkpoint of each stage, in the order in which the stages were logged.
        path = self.folder / CHECKPOINTS
        stages = []
        if path.is_dir():
            stages = sorted(path.iterdir())
        checkpoints: list[tuple[Mapping[str, Any], Path]] = []
        for stage in stages:
            checkpoint = load_checkpoint(stage)
            if checkpoint is not None:
                checkpoints.append((checkpoint.facts, stage))
        if not all(type(facts.get("lines")) is int for facts, _ in checkpoints):
            raise FileError(f"{path}: these are not the checkpoints of a run: remove them to start from the beginning.")
        for facts, stage in checkpoints:
            checkpointer.stage(stage.name).check(facts, current())
        checkpoints.sort(key=lambda checkpoint: int(checkpoint[0]["lines"]))

        # Stages count up to the first one that is not finished.
        kept_lines = 0
        all_done = True
        for facts, stage in checkpoints:
            if all_done:
                kept_lines = facts["lines"]
                all_done = facts.get("done") is True
            else:
                shutil.rmtree(stage)

        lines = read_lines(self.folder / LOG)
        if len(lines) < kept_lines:
            text = f"the checkpoint was written after {kept_lines} lines, and only {len(lines)} are left"
            raise FileError(f"{self.folder / LOG}: {text}, so the run cannot be resumed.")
        self.write(LOG, b"".join(line + b"\n" for line in lines[:kept_lines]))
        (self.folder / TIMES).unlink(missing_ok=True)

    # the end

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return is_done(self.folder)

    def fail(self, reason: str) -> None:
        """End a run that can have no result, and say why."""
        self.write(FAILED, {"reason": reason})
        self.close()

    def close(self) -> None:
        """Remove the checkpoints."""
        path = self.folder / CHECKPOINTS
        removed = self.folder / f".{CHECKPOINTS}"
        if path.exists():
            path.rename(removed)  # at once, so that nobody ever sees half of them
        shutil.rmtree(removed, ignore_errors=True)


def _encode(data: Any) -> bytes:
    """The content of a file: bytes and text as they are, anything else as JSON."""
    if isinstance(data, bytes):
        return data
    text = data if isinstance(data, str) else json.dumps(data, indent=1)
    return text.encode(errors="backslashreplace")  # names of files in a text need not be UTF-8


# folders for new runs


def refuse_taken(path: Path) -> None:
    """Refuse a folder that already holds files; a lock, and what is left of a run killed as it began, do not count."""
    if not path.exists():
        return
    names = {file.name for file in path.iterdir()}
    staged = {staging_name(name) for name in START}
    harmless = {LOCK, *staged}
    if staging_name(SETTINGS) in names:  # killed before its settings had their name
        harmless |= {*START}
    if names <= harmless:
        return
    advice = "choose another folder, or remove this one"
    if is_run(path) and not is_done(path):
        advice = f"resume that run (--resume {path}), {advice}"
    raise FileError(f"{path} already holds files: {advice}.")


def slug(text: str) -> str:
    """Turn a text into the name of a folder."""
    return re.sub(r"\W+", "-", text).strip("-")[:100]


def free_folder(name: str, root: Path = Path("runs")) -> Path:
    """A folder that does not exist yet: runs/NAME, runs/NAME-2, ..."""
    folder = root / name
    for number in itertools.count(2):
        if not folder.exists():
            break
        folder = root / f"{name}-{number}"
    return folder
