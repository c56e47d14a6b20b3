"""Tables of image files: a CSV with a row for each, its path and its label."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dmcp.data.folders import PARTS, FolderSet
from dmcp.data.images import ENDINGS, Size
from dmcp.errors import DataError, FileError
from dmcp.runtime.io import plain_file_size, read_bytes
from dmcp.units import counted

_IMAGE = ("image", "path", "file", "filename")  # names of columns, in any case
_LABEL = ("label", "class")
_SPLIT = ("split",)
_TRAINING = ("train", "training")
_TEST = ("val", "valid", "validation", "test")
_MOST_BYTES = 2**30  # of a table that are read
_LISTED = 5  # lines with a problem that a message lists


class _Row(NamedTuple):
    """One image file."""

    path: str
    label: str
    split: str  # "train" or the word for the test; empty if the table has no such column


def read_table(path: Path, size: Size) -> list[FolderSet]:
    """Read a CSV with columns `image`, `label` and perhaps `split`: one set of files, or those of train and val.

    Paths are relative to the folder of the table. A row that cannot be used is refused with the number of its line.
    """
    rows = _read_rows(path)
    names = _class_names({row.label for row in rows})
    number_of = {name: number for number, name in enumerate(names)}
    if len(names) < 2:
        raise DataError(f"{path}: at least two classes are needed.")

    def files(part: str, chosen: Sequence[_Row]) -> FolderSet:
        return FolderSet(
            tuple(row.path for row in chosen),
            torch.tensor([number_of[row.label] for row in chosen], dtype=torch.int64),
            len(names),
            size,
            names,
            str(path.parent),
            part=f"{path.name} {part}".strip(),  # tables in one folder differ by their name
        )

    words = {row.split for row in rows}
    if words == {""}:
        return [files("", rows)]
    test_words = sorted(words - set(_TRAINING))
    if len(test_words) != 1 or len(words) == 1:
        raise DataError(
            f"{path}: the column split must contain train and one word for the test images, such as val, "
            f"not {', '.join(sorted(words))}."
        )
    training = [row for row in rows if row.split in _TRAINING]
    test = [row for row in rows if row.split in _TEST]
    return [files(PARTS[0], training), files(PARTS[1], test)]


def _read_rows(path: Path) -> list[_Row]:
    """Read all rows; the first line names the columns."""
    try:
        text = read_bytes(path, _MOST_BYTES).decode("utf-8-sig")
    except FileError as error:
        raise DataError(str(error)) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: this is not UTF-8 text: save it as CSV UTF-8.") from error

    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    rows: list[_Row] = []
    problems: list[str] = []
    try:
        columns = _find_columns(path, reader.fieldnames or [])
        for cells in reader:
            row = _Row(*(str(cells.get(column) or "").strip() for column in columns))
            row = row._replace(path=os.path.join(path.parent, row.path), split=row.split.lower())
            problem = _describe_problem(row, cells, columns)
            if problem:
                problems.append(f"line {reader.line_num}: {problem}")
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: cannot be read as CSV ({error}).") from error
    if problems:
        more = ""
        if len(problems) > _LISTED:
            more = f"; and {counted(len(problems) - _LISTED, 'more line')}"
        raise DataError(f"{path}, {'; '.join(problems[:_LISTED])}{more}.")
    return rows


def _find_columns(path: Path, titles: Sequence[str]) -> tuple[str, str, str]:
    """The titles of the columns with path, label and split; that of the split is empty if there is none."""
    by_name = {title.strip().lower(): title for title in titles if title}
    columns: list[str] = []
    for names in (_IMAGE, _LABEL, _SPLIT):
        present = [by_name[name] for name in names if name in by_name]
        columns.append(present[0] if present else "")
    image, label, split = columns
    if not image or not label:
        advice = ""
        if len(titles) == 1:
            advice = " Columns must be separated by commas."
        raise DataError(
            f"{path}, line 1: must name the columns image and label, and perhaps split (train or val).{advice}"
        )
    return image, label, split


def _describe_problem(row: _Row, cells: Mapping[str, object], columns: Sequence[str]) -> str:
    """What is wrong with a row, in words; empty if nothing is."""
    image, label, split = columns
    if not cells.get(image) or not row.label:
        return f"has no {image} or no {label}"
    if None in cells:
        return "has more cells than the first line; put a path with commas in quotes"
    if split and row.split not in (*_TRAINING, *_TEST):
        return f"{split} must be train or val, not {row.split!r}"
    if not row.path.lower().endswith(ENDINGS):
        return f"{row.path} does not end like the name of an image file ({', '.join(ENDINGS)})"
    try:
        plain_file_size(row.path)
    except FileError as error:
        return str(error).rstrip(".")
    return ""


def _class_names(labels: set[str]) -> tuple[str, ...]:
    """The classes in the order of their numbers: numbers by size, all else by the alphabet."""
    if all(label.isdecimal() for label in labels):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))
