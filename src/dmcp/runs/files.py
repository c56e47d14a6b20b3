"""The files of a run folder: their names, and how those that everybody reads are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dmcp.errors import FileError
from dmcp.runtime.io import MOST_JSON, parse_json, read_bytes

# The network. Any folder that `dmcp.save` wrote has these two.
WEIGHTS = "model.safetensors"
WIDTHS = "widths.json"

# The run
SETTINGS = "settings.json"  # all settings, and what the run was begun with
STARTS = "starts"  # key in SETTINGS: when the run began and went on, and on what
INPUT = "input.json"  # how images become inputs of the network
LOG = "log.jsonl"  # every logged step, and the tested networks
TIMES = "times.jsonl"  # milliseconds of the tested networks, which differ between equal runs
CHECKPOINTS = "checkpoints"  # a folder with a folder for each stage, until the run is done
REPORT = "report.md"
FAILED = "failed.json"  # why a run ended without a result
REPLACED = "replaced.json"  # image files that could not be read, and were replaced by others
OUTCOME = "outcome.json"  # how a latency limit ended
WITHIN = "within.json"  # how a budget was chosen for a loss that is allowed
EXPORTED = "export.json"  # milliseconds of each exported file, of float32 and of the unpruned network
PREPARED = "prepared.safetensors"  # a network that other runs start from

# Several runs
SUMMARY = "summary.json"  # of a run with several seeds, each in a folder beside it
COMMANDS = "commands.jsonl"  # what was typed for a comparison, whose runs are beside it

# The search
SEARCH_FILE = "search.json"
ALPHAS = "search.safetensors"

_MAX_LOG = 2**30  # bytes of a log that are read
_MAX_ALPHAS = 2**26  # bytes of a file of alphas that are read


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    return any((folder / name).is_file() for name in (SETTINGS, LOG))


def is_group(folder: Path) -> bool:
    """Whether a folder holds the runs of one command: its seeds, or a comparison."""
    return any((folder / name).is_file() for name in (SUMMARY, COMMANDS))


def is_done(folder: Path) -> bool:
    """Whether nothing is left to do in the folder of a run."""
    if any((folder / name).is_file() for name in (REPORT, FAILED)):
        return True
    has_result = any((folder / name).is_file() for name in (WIDTHS, PREPARED))
    return has_result and not (folder / CHECKPOINTS).exists()


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file of a run."""
    data = parse_json(read_bytes(path, MOST_JSON), path)
    if not isinstance(data, dict):
        raise FileError(f"{path}: not a file of a run: it holds a {type(data).__name__}.")
    return data


def read_alphas(folder: Path, checksum: object) -> bytes:
    """Read the file of the alphas of a search; `checksum` is the SHA-256 that search.json keeps of it."""
    path = folder / ALPHAS
    data = read_bytes(path, _MAX_ALPHAS)
    if hashlib.sha256(data).hexdigest() != checksum:
        raise FileError(f"{path}: truncated, or changed since it was saved.")
    return data


def read_lines(path: Path, tail: int = 0) -> list[bytes]:
    """The whole lines of a file, all or the last `tail`; empty if there is no file. A kill may have cut the last line.

    What is not a plain file is refused: reading a pipe would wait for its other end.
    """
    if not path.exists() and not path.is_symlink():
        return []
    lines = read_bytes(path, _MAX_LOG).split(b"\n")[:-1]
    return lines[-tail:]


def read_records(path: Path, tail: int = 0) -> Iterator[dict[str, Any]]:
    """The lines of a .jsonl file as plain data."""
    for line in read_lines(path, tail):
        record = parse_json(line, path)
        if not isinstance(record, dict):
            raise FileError(f"{path}: not a file of records: it holds a {type(record).__name__}.")
        yield record


def read_stage(folder: Path, stage: str) -> list[dict[str, Any]]:
    """The log of one stage of a run."""
    return [record for record in read_records(folder / LOG) if record.pop("stage", None) == stage]
