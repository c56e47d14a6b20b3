"""Commands side by side: order and number, and what becomes of those that fail or are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmcp.cli import launch
from dmcp.cli.launch import Command, Ended, kept_signals, run_side_by_side
from dmcp.errors import DmcpError
from dmcp.runtime.io import alive

CPU, GPU = torch.device("cpu"), torch.device("cuda")

# A command: notes how it was called, and does what its words say.
CHILD = """
import json, os, signal, subprocess, sys, time
start = time.monotonic()
name, *words = sys.argv[1:]

def note(**facts):
    facts |= {"name": name, "threads": os.environ["OMP_NUM_THREADS"], "start": start}
    with open(__file__.replace("child.py", "calls"), "a") as file:
        file.write(json.dumps(facts) + "\\n")

def stop(number, _):
    print("stopped by", signal.Signals(number).name, file=sys.stderr)
    raise SystemExit(1)

print("10 %\\r20 %\\rready", file=sys.stderr)
print(f"table of {name}")
if "fail" in words:
    sys.stderr.write("dmcp: no such\\x1b model.")
    raise SystemExit(3)
if "crash" in words:
    os.kill(os.getpid(), signal.SIGKILL)
if "hang" in words:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if "deaf" in words else stop)
    worker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    note(pids=[os.getpid(), worker.pid])
    time.sleep(60)
here = os.path.dirname(__file__)
open(os.path.join(here, f"begun-{name}"), "w").close()
if words and words[0].startswith("meet"):  # so many are to run at once, and a busy machine starts them far apart
    while sum(it.startswith("begun-") for it in os.listdir(here)) < int(words[0][4:]) and time.monotonic() < start + 20:
        time.sleep(0.01)
time.sleep(0.3 if words else 0)
note(end=time.monotonic())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the files of commands, which are run by the program above."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(launch, "_PAUSE", 0.02)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def command(folder: Path, name: str, *words: str, after: tuple[str, ...] = ()) -> Command:
    return Command(name, (sys.executable, "-S", str(folder.parent / "child.py"), name, *words), after)


def run(folder: Path, *commands: Command, device: torch.device = CPU, **options: Any) -> dict[str, int | None]:
    with kept_signals() as signals:
        ended = run_side_by_side(commands, folder, device, signals, **options)
    return {end.command.name: end.code for end in ended}


def calls(folder: Path) -> list[dict[str, Any]]:
    """How the commands were called, by name."""
    path = folder.parent / "calls"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(found, key=lambda call: call["name"])


def most_at_once(found: list[dict[str, Any]]) -> int:
    return max(sum(it["start"] <= call["start"] < it["end"] for it in found) for call in found)


def wait_for(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


# order and number


def test_words_are_shown_and_kept(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    titled = Command("b", command(folder, "b").argv, title="cell b")
    assert run(folder, command(folder, "a"), titled) == {"a": 0, "b": 0}
    out, err = capfd.readouterr()
    assert out == "" and sorted(err.splitlines()) == ["a: ready", "cell b: ready"]
    assert (folder / "b.out").read_text() == "table of b\n"
    run(folder, command(folder, "a"), quiet=True)
    assert capfd.readouterr() == ("", "")
    assert (folder / "a.out").read_text() == 2 * "table of a\n"


def test_what_is_done_is_counted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = [command(folder, "a"), command(folder, "b", "fail"), command(folder, "c")]
    run(folder, *commands, at_once=1, total=5)  # two were done before
    told = [line for line in capfd.readouterr().err.splitlines() if "done" in line]
    assert told == ["a: done (3 of 5)", "c: done (4 of 5)"]


def test_a_command_waits_for_what_it_needs(folder: Path) -> None:
    commands = [
        command(folder, "base", "slow"),
        command(folder, "late", after=("base",)),
        command(folder, "free", "slow"),
        command(folder, "last", after=("late", "free")),
    ]
    assert list(run(folder, *commands, device=GPU, at_once=2)) == ["base", "late", "free", "last"]
    base, free, last, late = calls(folder)
    assert free["start"] < base["end"] <= late["start"]  # the one that may start does not wait for the one that may not
    assert max(late["end"], free["end"]) <= last["start"]


def test_one_at_a_time_keeps_the_order(folder: Path) -> None:
    names = ["d", "b", "c", "a"]
    run(folder, *(command(folder, name) for name in names), at_once=1)
    assert [call["name"] for call in sorted(calls(folder), key=lambda call: call["start"])] == names


@pytest.mark.parametrize(
    ("device", "cores", "at_once", "most", "threads"),
    [
        (CPU, 2, None, 2, 1),
        (CPU, 2, 4, 2, 1),
        (CPU, 8, 3, 3, 2),
        (CPU, 5, 1, 1, 5),
        (GPU, 2, 4, 4, 1),
        (GPU, 16, 3, 3, 5),
    ],
)
def test_cores_are_divided(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    cores: int,
    at_once: int | None,
    most: int,
    threads: int,
) -> None:
    monkeypatch.setattr(launch, "_cores", lambda: cores)
    commands = [command(folder, str(number), f"meet{most}") for number in range(4)]
    run(folder, *commands, device=device, at_once=at_once)
    found = calls(folder)
    assert len(found) == 4 and most_at_once(found) == most
    assert {call["threads"] for call in found} == {str(threads)}


def test_a_gpu_has_eight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_cores", lambda: 16)
    assert launch._divide(None, GPU) == (8, 2) and launch._divide(None, CPU) == (16, 1)


def test_cores_are_those_of_this_process() -> None:
    listed = subprocess.run(["nproc"], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    assert launch._cores() == int(listed.stdout)


def test_commands_that_make_no_sense(folder: Path) -> None:
    for name in ("", "a/b", "a/"):
        with pytest.raises(DmcpError, match="cannot name the files of a command: give it a name without slashes"):
            Command(name, ("true",))
    one, two = Command("one", ("true",)), Command("two", ("true",), after=("one",))
    with pytest.raises(DmcpError, match="Two commands are named one: give each a name of its own"):
        run(folder, one, two, one)
    for wrong in ([two, one], [two], [Command("two", ("true",), after=("two",))]):
        with pytest.raises(DmcpError, match=r"two waits for (one|two): give what it waits for before it"):
            run(folder, *wrong)
    with pytest.raises(DmcpError, match="At least one command must run at a time, not 0"):
        run(folder, one, at_once=0)
    assert not list(folder.iterdir())


# failures and signals


def test_a_failure_stops_only_what_needs_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = [
        command(folder, "base", "fail"),
        command(folder, "good"),
        command(folder, "crash", "crash"),
        command(folder, "cell", after=("good", "base")),
        command(folder, "late", after=("cell",)),
        command(folder, "fine", after=("good",)),
    ]
    with kept_signals() as signals:
        ended = run_side_by_side(commands, folder, CPU, signals)
    assert [end.command for end in ended] == commands
    assert [end.code for end in ended] == [3, 0, -signal.SIGKILL, None, None, 0]
    assert [call["name"] for call in calls(folder)] == ["fine", "good"]
    assert [end.describe() for end in ended if end.code != 0] == [
        "base: exit code 3: dmcp: no such\N{REPLACEMENT CHARACTER} model.",
        "crash: killed by SIGKILL: ready",
        "cell: not started: it needs base, and that failed",
        "late: not started: it needs cell, and that failed",
    ]
    assert "late: not started: it needs cell, and that failed" in capfd.readouterr().err.splitlines()


def test_the_end_of_a_child_that_said_nothing() -> None:
    assert Ended(Command("a", ("true",), title="seed 1"), 2, "").describe() == "seed 1: exit code 2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_children_once(folder: Path, number: signal.Signals) -> None:
    source = "import sys, torch; from pathlib import Path\n"
    source += "from dmcp.cli.launch import Command, kept_signals, run_side_by_side\n"
    source += "words = (sys.executable, '-S', sys.argv[1])\n"
    source += "commands = [Command(name, (*words, name, 'hang')) for name in 'ab']\n"
    source += "commands += [Command('c', words, after=('a',)), Command('d', words)]\n"
    source += "with kept_signals() as signals:\n"
    source += "    run_side_by_side(commands, Path(sys.argv[2]), torch.device('cuda'), signals, at_once=2)\n"
    started = [sys.executable, "-c", source, folder.parent / "child.py", folder]
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(calls(folder)) == 2)
        pids = [pid for call in calls(folder) for pid in call["pids"]]
        assert all(alive(pid) for pid in pids)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == -number
    assert [said.count(f"{name}: stopped by {number.name}") for name in "ab"] == [1, 1]
    assert "dmcp: stopping 2 of 4 runs; the same command goes on with them." in said
    assert not [line for line in said if line.startswith(("c", "d:"))]
    wait_for(lambda: not any(alive(pid) for pid in pids))  # the workers too


def test_a_child_that_heeds_no_signal_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_PATIENCE", 0.3)

    def interrupt() -> None:
        wait_for(lambda: calls(folder))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(folder, command(folder, "a", "hang", "deaf"), command(folder, "b"), at_once=1)
    thread.join()
    (call,) = calls(folder)  # the second has not been started any more
    wait_for(lambda: not any(alive(pid) for pid in call["pids"]))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_ours_leaves_no_child(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(child: Any, quiet: bool) -> None:
        wait_for(lambda: calls(folder))
        raise ZeroDivisionError

    monkeypatch.setattr(launch._Child, "look", fail)
    with pytest.raises(ZeroDivisionError):
        run(folder, command(folder, "a", "hang"))
    (call,) = calls(folder)
    wait_for(lambda: not any(alive(pid) for pid in call["pids"]))


ORPHAN = """
import os, signal, sys, time
from dmcp.running import children
children._LOOK, children._PATIENCE = 0.05, 0.5
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with children.following_parent():
    print(os.getpid(), flush=True)
    while not asked or sys.argv[1] == "deaf":
        time.sleep(0.02)
    print("stopped as asked", flush=True)
"""


def test_children_whose_parent_was_killed_stop(folder: Path) -> None:
    kinds = ("heeds", "deaf")
    source = "import sys; from pathlib import Path; import torch\n"
    source += "from dmcp.running import children\n"
    source += "from dmcp.cli.launch import Command, kept_signals, run_side_by_side\n"
    source += "with kept_signals() as signals:\n"
    source += "    both = [Command(kind, (sys.executable, '-c', sys.argv[2], kind)) for kind in sys.argv[3:]]\n"
    source += "    children._cores = lambda: 2\n"  # not one after the other
    source += "    run_side_by_side(both, Path(sys.argv[1]), torch.device('cpu'), signals)\n"
    said = [folder / f"{kind}.out" for kind in kinds]
    with subprocess.Popen([sys.executable, "-c", source, folder, ORPHAN, *kinds]) as process:
        wait_for(lambda: all(it.exists() and it.read_text() for it in said))
        pids = [int(it.read_text()) for it in said]
        assert all(alive(pid) for pid in pids)
        process.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert ["stopped as asked" in it.read_text() for it in said] == [True, False]


def test_nobody_is_followed_without_a_parent_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.PARENT, raising=False)
    before = threading.active_count()
    with launch.following_parent():
        assert threading.active_count() == before
