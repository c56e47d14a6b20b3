"""A run folder is used by one process at a time: the one that its lock.json names."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

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
