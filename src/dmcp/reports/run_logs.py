"""The log of a run, and the times of its networks, read with care."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from dmcp.checkpoints import refuse_link
from dmcp.files import plain, read_bytes
from dmcp.rows import Row
from dmcp.runs import MOST_LOG
from dmcp.searching.searches import SearchRecord
from dmcp.training import StepRecord

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
