"""cli/launch: commands side by side, their order, failures and signals; seeds and their summary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmcp.cli import launch
from dmcp.cli.launch import Command, Ended, markdown, run_seeds, run_side_by_side, summarize, words_of_each
from dmcp.errors import DmcpError, FileError
from dmcp.results import DMCP, UNIFORM, UNPRUNED, Row
from dmcp.runs import LOG, SETTINGS, Run
from dmcp.runtime.io import Lock, alive

CPU, GPU = torch.device("cpu"), torch.device("cuda")

# Stands for a command: notes how it was called, does what the file `acts` says of it, and leaves a finished run.
CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
here, start, words = Path(__file__).parent, time.monotonic(), sys.argv[1:]
run = Path(words[-1])
name = run.name
acts = dict(line.split() for line in (here / "acts").read_text().splitlines())
act = acts.get(name, acts.get("all", ""))

def note(**facts):
    facts |= {"name": name, "argv": words, "threads": os.environ["OMP_NUM_THREADS"], "start": start}
    with (here / "calls").open("a") as file:
        file.write(json.dumps(facts) + "\\n")

def stop(number, _):
    print("stopped by", signal.Signals(number).name, file=sys.stderr)
    raise SystemExit(1)

print("10 %\\r20 %\\rready", file=sys.stderr)
print(f"table of {name}")
if act == "fail":
    sys.stderr.write("dmcp: no such\\x1b model.")
    raise SystemExit(3)
if act == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if act in ("hang", "deaf"):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if act == "deaf" else stop)
    worker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    note(pids=[os.getpid(), worker.pid])
    time.sleep(60)
(here / f"begun-{name}").touch()
while act.startswith("meet") and len(list(here.glob("begun-*"))) < int(act[4:]) and time.monotonic() < start + 20:
    time.sleep(0.01)
time.sleep(0.3 if act == "slow" or act.startswith("meet") else 0)
note(end=time.monotonic())
if act != "nothing" and name.startswith("seed-"):
    run.mkdir(exist_ok=True)
    row = {"stage": "test", "name": "dmcp", "macs": 50, "params": 7, "accuracy": 0.9 + int(name[5:]) / 100, "ms": 1.0}
    (run / "settings.json").write_text(json.dumps({"command": "prune", "unpruned": {"macs": 100}}))
    (run / "log.jsonl").write_text(json.dumps(row | {"batch": 8}) + "\\n")
    (run / "widths.json").write_text(json.dumps({"widths": {"conv": 4}, "input_shape": [1, 3], "fingerprint": "f"}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the files of commands, which are run by the program above."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "acts").write_text("")
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-S", str(tmp_path / "child.py")))
    monkeypatch.setattr(launch, "_PAUSE", 0.02)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def act(folder: Path, **acts: str) -> None:
    """Tell the children what to do, and forget how they were called."""
    lines = (f"{name.replace('_', '-')} {word}\n" for name, word in acts.items())
    (folder.parent / "acts").write_text("".join(lines))
    (folder.parent / "calls").unlink(missing_ok=True)


def calls(folder: Path) -> list[dict[str, Any]]:
    """How the children were called, by name."""
    path = folder.parent / "calls"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(found, key=lambda call: call["name"])


def command(name: str, after: tuple[str, ...] = ()) -> Command:
    return Command(name, (*launch.COMMAND, name), after)


def run(folder: Path, *commands: Command, device: torch.device = CPU, **options: Any) -> dict[str, Ended]:
    return {end.command.name: end for end in run_side_by_side(commands, folder, device, **options)}


def wait_for(true: Callable[[], object]) -> None:
    end = time.monotonic() + 180  # of a busy machine
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


# commands


def test_lines_are_shown_and_kept(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    titled = Command("b", command("b").argv, title="run b")
    run(folder, command("a"), titled, at_once=1, total=3)  # one was done before
    out, err = capfd.readouterr()
    assert out == "" and err.splitlines() == ["a: ready", "a: done (2 of 3)", "run b: ready", "run b: done (3 of 3)"]
    run(folder, command("a"), quiet=True)
    assert capfd.readouterr() == ("", "") and (folder / "a.out").read_text() == 2 * "table of a\n"


def test_a_command_waits_for_what_it_needs(folder: Path) -> None:
    act(folder, base="slow", free="slow")
    late, last = command("late", after=("base",)), command("last", after=("late", "free"))
    ended = run(folder, command("base"), late, command("free"), last, device=GPU, at_once=2)
    assert [end.code for end in ended.values()] == [0, 0, 0, 0]
    found = {call["name"]: call for call in calls(folder)}
    assert found["free"]["start"] < found["base"]["end"] <= found["late"]["start"]
    assert max(found["late"]["end"], found["free"]["end"]) <= found["last"]["start"]


@pytest.mark.parametrize(
    ("device", "cores", "at_once", "most", "threads"),
    [(CPU, 2, None, 2, 1), (CPU, 2, 4, 2, 1), (CPU, 8, 3, 3, 2), (GPU, 2, 4, 4, 1), (GPU, 16, None, 4, 2)],
)
def test_cores_are_divided(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: Any, cores: int, at_once: Any, most: int, threads: int
) -> None:
    monkeypatch.setattr(launch, "_cores", lambda: cores)
    act(folder, all=f"meet{most}")
    run(folder, *(command(str(number)) for number in range(4)), device=device, at_once=at_once)
    found = calls(folder)
    assert len(found) == 4 and {call["threads"] for call in found} == {str(threads)}
    assert max(sum(it["start"] <= call["start"] < it["end"] for it in found) for call in found) == most


def test_a_failure_stops_only_what_needs_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    act(folder, base="fail", crash="crash")
    names = {"base": (), "good": (), "crash": (), "cell": ("good", "base"), "late": ("cell",), "fine": ("good",)}
    ended = run(folder, *(command(name, after) for name, after in names.items()))
    assert [call["name"] for call in calls(folder)] == ["fine", "good"]
    told = {name: end.describe() for name, end in ended.items() if end.code != 0}
    assert ended.keys() == names.keys() and told == {
        "base": "base: exit code 3: dmcp: no such\N{REPLACEMENT CHARACTER} model.",
        "crash": "crash: killed by SIGKILL: ready",
        "cell": "cell: not started: it needs base, and that failed",
        "late": "late: not started: it needs cell, and that failed",
    }
    assert told["late"] in capfd.readouterr().err.splitlines()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_all_children_once(folder: Path, number: signal.Signals, code: int) -> None:
    act(folder, all="hang")
    source = "import sys, torch; from pathlib import Path; from dmcp.cli import launch\n"
    source += "launch.COMMAND = (sys.executable, '-S', sys.argv[1])\n"
    source += "launch.run_seeds(['prune'], [0, 1], Path(sys.argv[2]), torch.device('cuda'))"
    started = [sys.executable, "-c", source, folder.parent / "child.py", folder]
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(calls(folder)) == 2)
        pids = [pid for call in calls(folder) for pid in call["pids"]]
        assert all(alive(pid) for pid in pids)
        process.send_signal(number)
        lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == code
    assert [lines.count(f"seed {seed}: stopped by {number.name}") for seed in (0, 1)] == [1, 1]
    wait_for(lambda: not any(alive(pid) for pid in pids))  # the workers too
    assert not list(folder.glob("summary*")) and not list(folder.glob("*lock*"))


def test_a_child_that_heeds_no_signal_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE", 0.3)
    act(folder, a="deaf")

    def interrupt() -> None:
        wait_for(lambda: calls(folder))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(folder, command("a"), command("b"), at_once=1)
    thread.join()
    (call,) = calls(folder)  # the second has not been started any more
    wait_for(lambda: not any(alive(pid) for pid in call["pids"]))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


ORPHAN = """
import os, signal, sys, time
from dmcp.cli import session
session._LOOK, session.PATIENCE = 0.05, 0.5
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with session.following_parent():
    print(os.getpid(), flush=True)
    while not asked or sys.argv[1] == "deaf":
        time.sleep(0.02)
    print("stopped as asked", flush=True)
"""


def test_children_whose_parent_was_killed_stop(folder: Path) -> None:
    kinds = ("heeds", "deaf")
    source = "import sys; from pathlib import Path; import torch; from dmcp.cli import launch\n"
    source += "both = [launch.Command(kind, (sys.executable, '-c', sys.argv[2], kind)) for kind in sys.argv[3:]]\n"
    source += "launch.run_side_by_side(both, Path(sys.argv[1]), torch.device('cuda'))\n"
    printed = [folder / f"{kind}.out" for kind in kinds]
    with subprocess.Popen([sys.executable, "-c", source, folder, ORPHAN, *kinds]) as process:
        wait_for(lambda: all(it.exists() and it.read_text() for it in printed))
        pids = [int(it.read_text()) for it in printed]
        process.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert ["stopped as asked" in it.read_text() for it in printed] == [True, False]


# seeds


def test_each_seed_is_a_run_of_its_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["prune", "--model", "a net"]
    assert run_seeds(argv, [0, 7], folder, CPU) == [folder / "seed-0", folder / "seed-7"]
    wanted = [[*argv, "--seed", str(seed), "--out", str(folder / f"seed-{seed}")] for seed in (0, 7)]
    assert [call["argv"] for call in calls(folder)] == wanted
    assert sorted(capfd.readouterr().err.splitlines()) == ["seed 0: ready", "seed 7: ready"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["runs"] == ["seed-0", "seed-7"]
    assert summary["networks"][0]["accuracies"] == pytest.approx([0.9, 0.97])
    assert "93.50 ± 4.95 (2)" in (folder / "summary.md").read_text() and not list(folder.glob("*lock*"))


def test_started_again_finished_seeds_are_left_and_others_go_on(folder: Path) -> None:
    argv = ["prune", "--batch", "8"]
    act(folder, seed_3="fail", seed_4="nothing")
    with pytest.raises(DmcpError, match=r"2 of 5 seeds failed.* seed 3: exit code 3.*; seed 4: exit code 0: ready"):
        run_seeds(argv, [0, 1, 2, 3, 4], folder, CPU)
    assert not list(folder.glob("summary*")) and not list(folder.glob("*lock*"))
    (folder / "seed-1" / "widths.json").unlink()
    (folder / "seed-2" / LOG).unlink()
    act(folder)
    run_seeds(argv, [0, 1, 2, 3], folder, CPU)
    resumed = [["prune", "--resume", str(folder / f"seed-{seed}")] for seed in (1, 2)]
    new = [*argv, "--seed", "3", "--out", str(folder / "seed-3")]
    assert [call["argv"] for call in calls(folder)] == [*resumed, new]
    act(folder)
    with pytest.raises(FileError, match="already holds runs of `dmcp prune --batch 8`"):
        run_seeds(["prune", "--model", "b"], [0], folder, CPU)
    (folder / "seeds.json").unlink()
    with pytest.raises(FileError, match="already holds runs of something else"):
        run_seeds(argv, [1], folder, CPU)
    with Lock(folder), pytest.raises(FileError, match="in use"):
        run_seeds(argv, [0], folder, CPU)
    assert calls(folder) == []


def test_each_seed_gets_the_words_that_are_not_for_all() -> None:
    words = ["prune", "--seeds", "3", "--seed=4", "--out", "x", "--json", "--quiet", "--debug", "--batch", "8"]
    assert words_of_each(words) == ["prune", "--batch", "8"]


def test_the_summary_is_that_of_the_tables(tmp_path: Path) -> None:
    ours, uniform, folders = [0.9041, 0.9043, 0.9057], [0.899, 0.9], list[Path]()
    for seed, accuracy in enumerate(ours):
        rows = [Row(UNPRUNED, 1000, 90, 0.915, 1.0, 8), Row(DMCP, 490 + 5 * seed, 40 - seed, accuracy, 1.0, 8)]
        rows += [Row(UNIFORM, 495, 41, uniform[seed], 1.0, 8)] if seed < 2 else []
        folders.append(tmp_path / f"seed-{seed}")
        Run(folders[-1]).write(SETTINGS, {"command": "prune", "unpruned": {"macs": 1000}})
        for row in rows:
            Run(folders[-1]).add(LOG, {"stage": "test"} | asdict(row))
    summary = summarize(folders)
    found = {it["name"]: it for it in summary["networks"]}
    assert summary["runs"] == ["seed-0", "seed-1", "seed-2"] and list(found) == [UNPRUNED, DMCP, UNIFORM]
    assert found[DMCP]["mean"] == pytest.approx(np.mean(ours))
    assert found[DMCP]["deviation"] == pytest.approx(np.std(ours, ddof=1))
    ends = [found[DMCP][name] for name in ("macs", "params", "macs_share")]
    assert ends == [(490, 500), (38, 40), (0.49, 0.5)] and found[UNIFORM]["accuracies"] == pytest.approx(uniform)
    assert "90.47 ± 0.09 (3)" in markdown(summary)
    assert all(it["deviation"] is None for it in summarize(folders[:1])["networks"])
