"""One process per run folder: who is refused, and whose lock is taken over."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmcp.errors import FileError
from dmcp.runtime.io import LOCK, Lock, alive, process_start

HERE = Path(__file__).parent
PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is read from /proc")


def leave(folder: Path, **changes: Any) -> None:
    """A lock as a process of this machine would have left it."""
    record = {"pid": os.getpid(), "host": platform.node(), "start": process_start(os.getpid())}
    (folder / LOCK).write_text(json.dumps(record | {"since": "2020-02-03 12:03"} | changes))


def ended() -> int:
    """The number of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def in_child(act: Callable[[], object]) -> int:
    """What a forked child exits with after acting."""
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            code = int(bool(act()))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_folder_is_held_while_the_block_runs(tmp_path: Path) -> None:
    before = time.strftime("%H:%M")
    with Lock(tmp_path):
        record = json.loads((tmp_path / LOCK).read_text())
        assert record["pid"] == os.getpid() and record["host"] == platform.node()
        with pytest.raises(FileError) as caught, Lock(tmp_path):
            pass
        assert (tmp_path / LOCK).exists()  # the one that was refused took nothing away
    times = f"({before}|{time.strftime('%H:%M')})"
    said = (
        rf"{tmp_path} is in use by process {os.getpid()} on {platform.node()} since {times}: wait for it or stop it\."
    )
    assert re.fullmatch(said, str(caught.value))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), Lock(tmp_path):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    source = "import sys, time; from pathlib import Path; from dmcp.runtime.io import Lock\n"
    source += "Lock(Path(sys.argv[1])).__enter__(); print('held', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", source, tmp_path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    with pytest.raises(FileError, match=rf"in use by process {child.pid} on "), Lock(tmp_path):
        pass
    child.kill()
    while process_state(child.pid) not in ("Z", ""):  # ended, but not asked for: it holds nothing any more
        time.sleep(0.01)
    with Lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    child.communicate()


def process_state(pid: int) -> str:
    try:
        return re.findall(r"^State:\s+(\w)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0]
    except OSError:
        return ""


def test_a_lock_without_its_process_is_taken_over(tmp_path: Path) -> None:
    leave(tmp_path, pid=ended())
    with Lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()
    for left in (b"", bytes(40)):  # killed, or out of power, before it had written
        (tmp_path / LOCK).write_bytes(left)
        with Lock(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    leave(tmp_path, pid=2**70)
    with Lock(tmp_path):
        pass


@PROC
def test_a_process_number_that_was_given_anew_is_recognised(tmp_path: Path) -> None:
    start = process_start(os.getppid())
    assert start is not None
    assert alive(os.getppid(), start) and alive(os.getppid(), None) and not alive(os.getppid(), start + 1)
    leave(tmp_path, pid=os.getppid(), start=start)
    with pytest.raises(FileError, match="since 2020-02-03 12:03: wait for it or stop it"), Lock(tmp_path):
        pass
    leave(tmp_path, pid=os.getppid(), start=start + 1)
    with Lock(tmp_path):
        pass


@PROC
def test_the_start_of_a_process_is_that_of_the_clock() -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start(child.pid)
    child.communicate(b"\n")
    assert start is not None and -1 < start / os.sysconf("SC_CLK_TCK") - uptime < 5
    assert process_start(child.pid) is None


def test_a_lock_of_another_machine_is_refused(tmp_path: Path) -> None:
    leave(tmp_path, pid=ended(), host="elsewhere")
    with pytest.raises(FileError, match=r"on elsewhere since .*, or remove lock\.json if that machine is gone\."):
        Lock(tmp_path).__enter__()
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("text", ["what?", "[]", "{}", "3", "[" * 4000, '{"pid": 1, "host": "a"}'])
def test_a_lock_that_makes_no_sense_is_left_to_a_person(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(FileError, match=r"lock\.json cannot be read: remove it"), Lock(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == text
    for changes in ({"pid": "7"}, {"pid": -1}, {"pid": True}, {"start": "x"}):
        leave(tmp_path, **changes)
        with pytest.raises(FileError, match=r"lock\.json cannot be read: remove it"), Lock(tmp_path):
            pass


def test_what_cannot_be_locked_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(FileError, match=r"missing/lock\.json: cannot be locked \(No such file"),
        Lock(tmp_path / "missing"),
    ):
        pass
    (tmp_path / "victim").write_text("dear")
    (tmp_path / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(FileError, match="cannot be locked"), Lock(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "dear"
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(FileError, match="cannot be locked"), Lock(tmp_path):
        pass


def test_a_process_of_another_user_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    leave(tmp_path, pid=os.getppid(), start=None)
    with pytest.raises(FileError, match="is in use"), Lock(tmp_path):
        pass


def test_a_lock_that_somebody_else_took_is_not_removed(tmp_path: Path) -> None:
    with Lock(tmp_path):
        (tmp_path / LOCK).write_text("theirs")
    assert (tmp_path / LOCK).read_text() == "theirs"


def test_a_lock_that_its_holder_removes_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    calls: list[int] = []

    def leave_first(file: object, kind: int) -> None:
        calls.append(kind)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        if len(calls) == 2:
            (tmp_path / LOCK).unlink()
            leave(tmp_path, pid=2**70)  # a third process took it and was killed

    monkeypatch.setattr(fcntl, "flock", leave_first)
    with Lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert calls == [fcntl.LOCK_EX] * 3


def fork_inside(folder: Path) -> None:
    """A forked child leaves the block, and the lock of its parent stays."""
    with Lock(folder) as lock:
        assert in_child(lambda: lock.__exit__(None, None, None)) == 0
        assert (folder / LOCK).exists()
    assert not (folder / LOCK).exists()


def race(folder: Path, rounds: int = 30, runners: int = 4) -> None:
    """Many processes find the same stale, empty or missing lock at once; each time exactly one gets it."""
    for number in range(rounds):
        if number % 3 == 0:
            leave(folder, pid=2**22 + 1)  # beyond the largest number a process can have
        elif number % 3 == 1:
            (folder / LOCK).write_text("")
        start, finish, told = os.pipe(), os.pipe(), os.pipe()
        for _ in range(runners):
            if os.fork() == 0:
                os.close(start[1]), os.close(finish[1])
                os.read(start[0], 1)  # until the parent closes it
                try:
                    with Lock(folder):
                        os.write(told[1], b"+")
                        os.read(finish[0], 1)
                except FileError as error:
                    os.write(told[1], b"-" if "is in use by" in str(error) else b"?")
                os._exit(0)
        os.close(start[0]), os.close(start[1])
        heard = b"".join(os.read(told[0], 1) for _ in range(runners))
        os.close(finish[0]), os.close(finish[1]), os.close(told[0]), os.close(told[1])
        for _ in range(runners):
            os.wait()
        assert sorted(heard) == sorted(b"+" + b"-" * (runners - 1)), (number, heard)
        assert not (folder / LOCK).exists()


def test_forked_processes(tmp_path: Path) -> None:
    # in a process of its own: forking one that has threads is not safe, and pytest may have some
    source = "import sys, pathlib, test_locks as t; [f(pathlib.Path(sys.argv[1])) for f in (t.fork_inside, t.race)]"
    subprocess.run([sys.executable, "-c", source, tmp_path], cwd=HERE, check=True, timeout=60)
