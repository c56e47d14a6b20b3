"""Files that are written whole or not at all, JSON and safetensors of others, the lock of a folder."""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import hashlib
import json
import os
import stat
import sys
import types
import typing
import zipfile
from collections.abc import Container, Iterable, Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import safetensors.torch
from filelock import FileLock, Timeout
from torch import Tensor

from dmcp.errors import FileError

LOCK = "lock"
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MOST_JSON = 2**24  # bytes of a JSON file: many times those of the largest network
_T = TypeVar("_T")


class Lock:
    """Holds a folder for this process during a `with` block; the lock of a killed process is free at once."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / LOCK, FileLock(folder / LOCK, timeout=0)

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
        except OSError as error:
            why = "is in use by another process" if isinstance(error, Timeout) else f"cannot be locked ({error})"
            raise FileError(f"{self._path.parent} {why}: wait for it, or give another folder.") from error

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder."""
    try:
        with FileLock(folder / LOCK, timeout=0) if (folder / LOCK).is_file() else contextlib.nullcontext():
            return False
    except OSError as error:
        return isinstance(error, Timeout)


# reading


def read_bytes(path: Path, most: int) -> bytes:
    """All bytes of a plain file of at most so many; no link out of its folder is followed."""
    refuse_link(path)
    size = plain_file_size(path)
    if size > most:
        raise FileError(f"{path}: cannot be read: it has {size:,} bytes, more than the {most:,} of any such file.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error


def plain_file_size(path: str | os.PathLike[str]) -> int:
    """Bytes of a plain file, which a link may lead to; FileError for a pipe or device, whose reading may never end."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(facts.st_mode):
        raise FileError(f"{path}: cannot be read: it is not a plain file.")
    return facts.st_size


_MOST_INFLATED = 200  # bytes for each stored one that are believed: images and weights compress less
_ALWAYS_READ = 2**28  # bytes that may come from fewer


def check_inflated(name: object, stored: int, inflated: int) -> None:
    """Refuse what is larger than the free memory once it is read, or absurdly larger than it is on the disk."""
    free = free_memory()
    if inflated > free:
        raise FileError(f"{name}: its {inflated:,} bytes do not fit into the {free:,} bytes of memory that are free.")
    if inflated > max(_ALWAYS_READ, _MOST_INFLATED * stored):
        sizes = f"{stored:,} bytes inflate to {inflated:,}"
        raise FileError(f"{name}: {sizes}, as no real data do: if they are right, save them without compression.")


def zip_sizes(path: Path, members: Container[str] | None = None) -> tuple[int, int]:
    """Bytes that the members of a zip file, or those of some names, take in the file and once they are read.

    Both are in its directory, so that nothing is inflated, and never more is read of a member than is said there.
    What is not a zip file counts with all its bytes.
    """
    size = plain_file_size(path)
    if not zipfile.is_zipfile(path):
        return size, size
    with zipfile.ZipFile(path) as file:
        parts = [part for part in file.infolist() if members is None or part.filename in members]
    return sum(part.compress_size for part in parts), sum(part.file_size for part in parts)


def free_memory() -> int:
    """Bytes of memory that are free, or that the container has, if that is less; very many where nobody says."""
    limits = [sys.maxsize]
    with contextlib.suppress(OSError, ValueError, IndexError):
        limits.append(1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]))
    for limit in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(limit).read_text()))
    return min(limits)


def refuse_link(path: Path) -> None:
    """Stop if a file or folder is a link to a place outside the folder that it is in."""
    if os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
        raise FileError(f"{path} is a link that leads elsewhere: put there what it leads to, if you trust it.")


def parse_json(data: bytes | str, name: object) -> Any:
    """The data of a JSON file; an int of more digits than any of ours becomes a float, perhaps infinite."""
    try:
        return json.loads(data, parse_int=lambda digits: (int if len(digits) < 20 else float)(digits))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name}: truncated or not JSON: {quote(error)}.") from None


def parse_tensors(data: bytes, name: object) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # safetensors and torch raise many classes for a header that makes no sense
        raise FileError(f"{name}: not a safetensors file: {quote(error)}.") from error


def record_hash(record: Mapping[str, Any]) -> str:
    """A hash of plain data without its "digest", where files keep this hash."""
    text = json.dumps({key: value for key, value in record.items() if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def quote(text: object) -> str:
    """What somebody else wrote, for an error: short, and on one line."""
    return str(text)[:200].encode("unicode_escape").decode()


def plain(text: str) -> str:
    """Text without control characters."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


# writing


def write_files(folder: Path, files: Mapping[str, bytes | Iterable[bytes | memoryview]]) -> None:
    """Write all files under temporary names, and rename them in their order once all are on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = {folder / staging_name(name): folder / name for name in files}
    try:
        with contextlib.ExitStack() as opened:
            unnamed: list[tuple[Path, BinaryIO]] = []
            for path, data in zip(staged, files.values(), strict=True):
                path.unlink(missing_ok=True)  # what a killed process left, or a link
                file = _open_unnamed(folder)
                if file is None:
                    file = path.open("xb")
                else:
                    unnamed.append((path, file))
                opened.enter_context(file)
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
            for path, file in unnamed:
                _give_name(file, path)
        for path, final in staged.items():
            path.replace(final)
    except BaseException:  # Ctrl-C, too
        if next(iter(staged)).exists():  # between two renames the rest stays, for `load` to find
            for path in staged:
                path.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # make the new names last through a loss of power
        descriptor = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(descriptor)
        os.close(descriptor)


def _open_unnamed(folder: Path) -> BinaryIO | None:
    """A new file that is gone if this process is killed before it has a name; None where the system has none."""
    try:
        return os.fdopen(os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o666), "wb")
    except (AttributeError, OSError):
        return None


def _give_name(file: BinaryIO, path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:  # with a descriptor of the folder, os.link follows the link in /proc
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def staging_name(name: str) -> str:
    """What a file is called until it is complete."""
    return f".{name}.new"


# JSON to dataclasses


def from_plain(kind: type[_T], data: Any) -> _T:
    """A dataclass from what `asdict` and JSON made of it; TypeError or ValueError if the fields do not fit."""
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} is not a table")
    hints, values = _hints(typing.cast(Any, kind)), {}
    for name, value in data.items():
        try:
            values[name] = _convert(hints[name], value)
        except (KeyError, TypeError) as error:
            raise TypeError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields; names that only type checkers import stand for a type that nothing has."""
    names = collections.defaultdict(lambda: types.EllipsisType, vars(builtins) | vars(sys.modules[kind.__module__]))
    return typing.get_type_hints(kind, localns=names)


def _convert(hint: Any, value: Any) -> Any:
    """A JSON value as the annotation of a field says; ints are those that torch can hold."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for one in inner:
            with contextlib.suppress(TypeError, ValueError):
                return _convert(one, value)
        return _convert(inner[0], value)  # its error is the one to raise
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(inner[0], item) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _convert(inner[1], item) for key, item in value.items()}
    if is_dataclass(hint):
        return from_plain(typing.cast(type[Any], hint), value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    fits = abs(value) < 2**63 and hint in (int, float) if type(value) is int else type(value) is hint
    if fits or hint is Any:
        return value
    raise TypeError(f"{quote(repr(value))} does not fit")
