"""Files: the lock of a folder, reading what others wrote, writing whole files or none, and dataclasses from JSON."""

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
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from dmcp.errors import FileError

if TYPE_CHECKING:  # torch takes seconds to import, and a list of runs reads no tensors
    from torch import Tensor

LOCK = "lock"
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MOST_JSON = 2**24  # bytes of a JSON file: many times as many as the largest network needs
_T = TypeVar("_T")


class Lock:
    """Holds a folder for this process during a `with` block; the lock of a killed process is free at once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._lock = FileLock(self._path, timeout=0)

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
        except OSError as error:
            if isinstance(error, Timeout):
                reason = "is in use by another process"
            else:
                reason = f"cannot be locked ({error})"
            raise FileError(f"{self._path.parent} {reason}: wait for it, or use another folder.") from error

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder."""
    path = folder / LOCK
    if not path.is_file():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except OSError as error:
        return isinstance(error, Timeout)


# reading


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a plain file, at most so many; a link that leads out of the file's folder is not followed."""
    refuse_link(path)
    size = plain_file_size(path)
    if size > most:
        raise FileError(f"{path}: cannot be read: it has {size:,} bytes, and at most {most:,} are read of such a file.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error


def plain_file_size(path: str | os.PathLike[str]) -> int:
    """Size of a plain file in bytes; links are followed. FileError for a pipe or device: reading it may never end."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path}: cannot be read: it is not a plain file.")
    return status.st_size


_MOST_INFLATED = 200  # times that data may grow when they are read: images and weights compress less
_ALWAYS_READ = 2**28  # bytes up to which they may grow more


def check_inflated(name: object, stored: int, inflated: int) -> None:
    """Refuse data that do not fit into the free memory once they are read, or that grow absurdly when they are."""
    free = free_memory()
    if inflated > free:
        raise FileError(f"{name}: its {inflated:,} bytes do not fit into the {free:,} bytes of memory that are free.")
    if inflated > max(_ALWAYS_READ, _MOST_INFLATED * stored):
        raise FileError(
            f"{name}: {stored:,} bytes inflate to {inflated:,}, which real data never do: if the file is right, save "
            "it without compression."
        )


def zip_sizes(path: Path, members: Container[str] | None = None) -> tuple[int, int]:
    """Bytes that the members of a zip file (or only the named ones) take in the file, and once they are read.

    Both are in the directory of the zip file, so that nothing is inflated; of a member never more is read than its
    directory says. A file that is not a zip file counts with all its bytes.
    """
    size = plain_file_size(path)
    if not zipfile.is_zipfile(path):
        return size, size
    stored = 0
    inflated = 0
    with zipfile.ZipFile(path) as file:
        for member in file.infolist():
            if members is None or member.filename in members:
                stored += member.compress_size
                inflated += member.file_size
    return stored, inflated


def free_memory() -> int:
    """Bytes of memory that are free, or that the container has if that is less; a huge number where nobody knows."""
    limits = [sys.maxsize]
    with contextlib.suppress(OSError, ValueError, IndexError):
        available = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
        kilobytes = int(available.split()[0])
        limits.append(1024 * kilobytes)
    for path in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits)


def refuse_link(path: Path) -> None:
    """Refuse a file or folder that is a link to something outside the folder that it is in."""
    if not os.path.islink(path):
        return
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(os.path.realpath(path.parent)):
        raise FileError(f"{path} is a link that leads out of its folder: replace it by its target, if you trust it.")


def parse_json(data: bytes | str, name: object) -> Any:
    """The data of a JSON file."""
    try:
        return json.loads(data, parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name}: truncated or not JSON: {quote(error)}.") from None


def _parse_int(digits: str) -> int | float:
    """An int; one of more digits than any of ours becomes a float, perhaps infinite."""
    if len(digits) < 20:
        return int(digits)
    return float(digits)


def parse_tensors(data: bytes, name: object) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    import safetensors.torch

    try:
        return safetensors.torch.load(data)
    except Exception as error:  # safetensors and torch raise many classes for a header that makes no sense
        raise FileError(f"{name}: not a safetensors file: {quote(error)}.") from error


def record_hash(record: Mapping[str, Any]) -> str:
    """A hash of plain data, without the entry "digest" where files keep this hash."""
    text = json.dumps({key: value for key, value in record.items() if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def quote(text: object) -> str:
    """Text that somebody else wrote, for an error: shortened, on one line."""
    return str(text)[:200].encode("unicode_escape").decode()


def make_printable(text: str) -> str:
    """The text with its control characters replaced, so that it cannot act on a terminal."""
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
        first_staged = next(iter(staged))
        if first_staged.exists():  # no file was renamed yet; between two renames the rest stays, for `load` to find
            for path in staged:
                path.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems cannot
        os.fsync(descriptor)
    os.close(descriptor)


def _open_unnamed(folder: Path) -> BinaryIO | None:
    """A new file that vanishes if this process is killed before it has a name; None where the system has none."""
    try:
        return os.fdopen(os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o666), "wb")
    except (AttributeError, OSError):
        return None


def _give_name(file: BinaryIO, path: Path) -> None:
    """Let a file that has no name appear under this path."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:  # with a descriptor of the folder, os.link follows the link in /proc
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def staging_name(name: str) -> str:
    """The name of a file until it is complete."""
    return f".{name}.new"


# JSON to dataclasses


def from_plain(kind: type[_T], data: Any) -> _T:
    """A dataclass from what `asdict` and JSON made of it; TypeError or ValueError if the fields do not fit."""
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} is not a table")
    hints = _hints(typing.cast(Any, kind))
    values = {}
    for name, value in data.items():
        try:
            values[name] = _convert(hints[name], value)
        except (KeyError, TypeError) as error:
            raise TypeError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of the fields. A name that only type checkers import stands for a type that no value has."""
    names = collections.defaultdict(lambda: types.EllipsisType, vars(builtins) | vars(sys.modules[kind.__module__]))
    return typing.get_type_hints(kind, localns=names)


def _convert(hint: Any, value: Any) -> Any:
    """A JSON value as the annotation of a field says; TypeError or ValueError if it does not fit."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for member in inner:
            with contextlib.suppress(TypeError, ValueError):
                return _convert(member, value)
        return _convert(inner[0], value)  # its error is the one to raise
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(inner[0], item) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _convert(inner[1], item) for key, item in value.items()}
    if is_dataclass(hint):
        return from_plain(typing.cast(type[Any], hint), value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if hint is Any:
        return value
    if type(value) is int:
        if hint in (int, float) and abs(value) < 2**63:  # torch holds no larger ints
            return value
    elif type(value) is hint:
        return value
    raise TypeError(f"{quote(repr(value))} does not fit")
