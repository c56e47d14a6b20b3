"""Files that appear whole or not at all, plain JSON, and the lock of a run folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import stat
import sys
import time
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from dmcp.errors import FileError

if sys.platform != "win32":
    import fcntl

LOCK = "lock.json"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # nor wait for the other end of a pipe


class Lock:
    """Holds a run folder for this process during a `with` block; a lock whose process is gone is taken over.

    Who opens the lock file holds its flock while it looks and writes, so of two processes that find a stale lock one
    wins, and an empty lock file is that of a process that was killed before it could write.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._pid = 0  # the process that holds the lock; a forked child is another one
        self._text = b""

    def __enter__(self) -> Lock:
        text = _describe_self()
        try:
            while not _take(self.path, text):
                pass
        except FileError:
            raise
        except OSError as error:
            reason = error.strerror or error
            raise FileError(f"{self.path}: cannot be locked ({reason}): give a folder that can be written.") from error
        self._pid, self._text = os.getpid(), text
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid != os.getpid():
            return
        with contextlib.suppress(OSError):  # what cannot be removed is stale from now on
            if self.path.read_bytes() == self._text:
                self.path.unlink()


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine's start; None where /proc does not tell."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def alive(pid: int, start: int | None) -> bool:
    """Whether that process of this machine still runs; with another start time its number was given to a new one."""
    if sys.platform == "win32":
        return True  # there os.kill would end it
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # it runs, as another user
    except (ProcessLookupError, OverflowError):
        return False
    fields = _stat(pid)
    if not fields:
        return True
    return fields[0] not in ("Z", "X") and start in (None, int(fields[19]))  # Z, X: ended, but its parent has not asked


def _take(path: Path, text: bytes) -> bool:
    """Write the text into the lock file unless a living process is named there; false if the file was removed since."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o644)
    with open(descriptor, "r+b", buffering=0) as file:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # without flock, two starts in the same instant are not told apart
                fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                return False
        except FileNotFoundError:
            return False
        _refuse_if_held(path, os.read(descriptor, 4096))
        file.seek(0)
        file.truncate()
        file.write(text)
    return True


def _refuse_if_held(path: Path, raw: bytes) -> None:
    """Stop if the text of a lock file names a process that may still run."""
    if not raw.strip(b"\0"):
        return
    try:
        holder: dict[str, Any] = json.loads(raw)
        pid, host, start, since = (holder[key] for key in ("pid", "host", "start", "since"))
        known = type(pid) is int and pid > 0 and (start is None or type(start) is int)
        known = known and all(isinstance(text, str) and text.isprintable() for text in (host, since))
    except (ValueError, TypeError, KeyError, RecursionError):
        known = False
    if not known:
        raise FileError(f"{path} cannot be read: remove it if no process uses this folder.")
    here = host == platform.node()
    if here and not alive(pid, start):
        return
    what = "wait for it or stop it" if here else f"wait for it, or remove {LOCK} if that machine is gone"
    moment = since.removeprefix(time.strftime("%Y-%m-%d "))  # today needs no date
    raise FileError(f"{path.parent} is in use by process {pid} on {host} since {moment}: {what}.")


def _describe_self() -> bytes:
    """What a lock file says about the process that holds it."""
    pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M")
    record = {"pid": pid, "host": platform.node(), "start": process_start(pid), "since": since}
    return json.dumps(record).encode() + b"\n"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such file."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets


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


_MOST_INT = 2**63
_T = TypeVar("_T")


def from_plain(kind: type[_T], data: Any) -> _T:
    """A dataclass that was written as JSON; TypeError or ValueError for what is not as its fields say."""
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} is not a table")
    hints, values = _hints(typing.cast(Any, kind)), {}
    for name, value in data.items():
        try:
            values[name] = _as(value, hints[name])
        except (KeyError, TypeError) as error:
            raise TypeError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _as(value: Any, hint: Any) -> Any:
    """A JSON value as the annotation of a field wants it; ints are those that torch can hold."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _as_one_of(value, inner)
    if origin is tuple and isinstance(value, list):
        return tuple(_as(item, inner[0]) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _as(item, inner[1]) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return from_plain(hint, value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if type(value) is int:
        fits = hint is Any or (hint in (int, float) and abs(value) < _MOST_INT)
    else:
        fits = hint is Any or type(value) is hint
    if not fits:
        raise TypeError(f"{value!r} is not of its kind")
    return value


def _as_one_of(value: Any, hints: Iterable[Any]) -> Any:
    errors = []
    for hint in hints:
        try:
            return _as(value, hint)
        except (TypeError, ValueError) as error:
            errors.append(error)
    raise errors[0]


# what is read


def refuse_link(path: Path) -> None:
    """Stop if a file or folder is a link to a place outside the folder that it is in."""
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
        raise FileError(f"{path} is a link that leads elsewhere: put there what it leads to, if you trust it.")


def open_file(path: str, flags: int) -> int:
    """Open what is still a file: no link is followed, and no pipe waited for."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
