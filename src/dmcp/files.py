"""Small files: read with care, since somebody else may have written them, and written all or none."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from dmcp.checkpoints import open_file, refuse_link
from dmcp.errors import FileError

MOST_JSON = 2**24  # bytes of a JSON file: many times those of the largest network
_DEEPEST = 64  # levels of a JSON file
_LONGEST_QUOTE = 200  # characters


def read_bytes(path: Path, most: int) -> bytes:
    """All bytes of a plain file that has no more than `most`; no link out of its folder is followed."""
    try:
        refuse_link(path)
        with open(os.path.realpath(path), "rb", opener=open_file) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise FileError(f"{path}: cannot be read: not a plain file.")
            if facts.st_size > most:
                raise FileError(f"{path}: {facts.st_size:,} bytes are too many: {most:,} are read at most.")
            return file.read(facts.st_size)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error


def parse_json(data: bytes, name: object) -> Any:
    """Plain data, nested no deeper than what follows can handle."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name}: truncated or not JSON: {quote(error)}.") from None
    level = [parsed]
    for _ in range(_DEEPEST):
        level = [
            item
            for it in level
            if isinstance(it, dict | list)
            for item in (it.values() if isinstance(it, dict) else it)
        ]
    if level:
        raise FileError(f"{name}: nested too deeply to be a file of ours.")
    return parsed


def parse_tensors(data: bytes, name: object) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # safetensors and torch raise many kinds for a header that makes no sense
        raise FileError(f"{name}: not a safetensors file: {quote(error)}.") from error


def quote(text: object) -> str:
    """What somebody else wrote, for an error: short, and on one line."""
    return str(text)[:_LONGEST_QUOTE].encode("unicode_escape").decode()


def plain(text: str) -> str:
    """Text that neither a terminal nor a page can take for anything else than text."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


# writing


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files under other names, and only then rename them, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = {folder / staging_name(name): folder / name for name in files}
    try:
        for path, data in zip(staged, files.values(), strict=True):
            path.unlink(missing_ok=True)  # what a killed process left, or a link
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
    except BaseException:  # Ctrl-C, too
        for path in staged:
            path.unlink(missing_ok=True)
        raise
    for path, final in staged.items():
        path.replace(final)


def staging_name(name: str) -> str:
    """What a file is called until it is complete."""
    return f".{name}.new"
