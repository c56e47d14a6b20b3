"""cli/prune: commands side by side, their order, failures and signals; seeds and their summary."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import command as typed

from dmcp.cli import processes, seeds
from dmcp.cli.processes import Command, run_side_by_side
from dmcp.cli.seeds import summarize, summary_table
from dmcp.runs.files import LOG, SETTINGS
from dmcp.runs.records import DMCP, UNPRUNED, Row
from dmcp.runs.writing import Run

pytestmark = pytest.mark.usefixtures("quick_commands")

CPU, GPU = torch.device("cpu"), torch.device("cuda")

# Stands for a command: notes how it was called, and does what the file `acts` says of it.
CHILD = """
import json, os, signal, sys, time
from pathlib import Path
here, start, name = Path(__file__).parent, time.monotonic(), sys.argv[-1]
acts = dict(line.split() for line in (here / "acts").read_text().splitlines())
act = acts.get(name, acts.get("all", ""))

def note(**facts):
    facts |= {"name": name, "threads": os.environ["OMP_NUM_THREADS"], "start": start, "pid": os.getpid()}
    with (here / "calls").open("a") as file:
        file.write(json.dumps(facts) + "\\n")

def stop(number, _):
    print("stopped by", signal.Signals(number).name, file=sys.stderr)
    raise SystemExit(1)

print("ready", file=sys.stderr)
print(f"table of {name}")
if act == "fail":
    sys.stderr.write("dmcp: no such\\x1b model.")
    raise SystemExit(3)
if act == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "hang":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    note()
    time.sleep(60)
time.sleep(0.3 if act == "slow" else 0)
note(end=time.monotonic())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the files of commands, which are run by the program above."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "acts").write_text("")
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-S", str(tmp_path / "child.py")))
    return tmp_path / "runs"


def act(folder: Path, **acts: str) -> None:
    """Tell the children what to do."""
    (folder.parent / "acts").write_text("".join(f"{name} {word}\n" for name, word in acts.items()))


def calls(folder: Path) -> dict[str, Any]:
    """How the children were called, by name."""
    path = folder.parent / "calls"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {call["name"]: call for call in found}


def run(folder: Path, *names: str, device: torch.device = CPU, **options: Any) -> dict[str, str]:
    """Run commands; "late<base,free" needs two others."""
    commands = []
    for name, _, needs in (it.partition("<") for it in names):
        commands.append(Command(name, (name,), tuple(filter(None, needs.split(",")))))
    return run_side_by_side(commands, folder, device, **options)


def wait_for(true: Callable[[], object]) -> None:
    end = time.monotonic() + 180  # of a busy machine
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_lines_are_shown_and_kept(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "a", "b", at_once=1, total=3) == {}  # one was done before
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == "" and sorted(lines) == ["a: done (2 of 3)", "a: ready", "b: done (3 of 3)", "b: ready"]
    assert lines[0] == "a: ready" and lines[-1] == "b: done (3 of 3)"  # b may be ready before a is shown as done
    run(folder, "a", quiet=True)
    assert capfd.readouterr() == ("", "")
    assert [(folder / f"a.{kind}").read_text() for kind in ("out", "err")] == [2 * "table of a\n", 2 * "ready\n"]


def test_a_command_waits_for_what_it_needs(folder: Path) -> None:
    act(folder, base="slow", free="slow")
    assert run(folder, "base", "late<base", "free", "last<late,free", device=GPU, at_once=2) == {}
    found = calls(folder)
    assert found["free"]["start"] < found["base"]["end"] <= found["late"]["start"]
    assert max(found["late"]["end"], found["free"]["end"]) <= found["last"]["start"]


def test_cores_are_divided(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "core_count", lambda: 4)
    act(folder, all="slow")
    for device, at_once, most, threads in ((CPU, 8, 4, "1"), (CPU, 2, 2, "2"), (GPU, 5, 5, "1")):
        run(folder, *"01234", device=device, at_once=at_once)
        found = [*calls(folder).values()]
        assert {call["threads"] for call in found} == {threads}
        assert max(sum(it["start"] <= call["start"] < it["end"] for it in found) for call in found) <= most


def test_a_failure_stops_only_what_needs_it(folder: Path) -> None:
    act(folder, base="fail", crash="crash")
    failed = run(folder, "base", "good", "crash", "cell<good,base", "late<cell", "fine<good")
    assert calls(folder).keys() == {"fine", "good"} and failed == {
        "base": "exit code 3: dmcp: no such\N{REPLACEMENT CHARACTER} model.",
        "crash": "killed by SIGKILL: ready",
        "cell": "not started: it needs base, and that failed",
        "late": "not started: it needs cell, and that failed",
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_all_children_once(folder: Path, number: signal.Signals, code: int) -> None:
    act(folder, all="hang")
    source = "import sys, torch; from pathlib import Path; from dmcp.cli import processes\n"
    source += "processes.COMMAND = (sys.executable, '-S', sys.argv[1])\n"
    source += "commands = [processes.Command(it, (it,)) for it in 'abc']\n"
    source += "processes.run_side_by_side(commands, Path(sys.argv[2]), torch.device('cuda'), at_once=2)"
    started = [sys.executable, "-c", source, folder.parent / "child.py", folder]
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(calls(folder)) == 2)
        process.send_signal(number)
        lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == code
    assert [lines.count(f"{name}: stopped by {number.name}") for name in "abc"] == [1, 1, 0]
    assert not any(Path(f"/proc/{call['pid']}").exists() for call in calls(folder).values())


# seeds


def test_each_seed_is_a_run_and_only_those_that_are_left_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: new ones would import torch for most of the time."""
    done: list[tuple[str, ...]] = []

    def run_here(commands: list[Command], *_: Any, **__: Any) -> dict[str, str]:
        done.extend(it.words for it in commands)
        return {it.name: f"exit code {code}" for it in commands if (code := typed(*it.words))}

    monkeypatch.setattr(seeds, "run_side_by_side", run_here)
    words = ("prune", "--model", "digits:resnet", "--data", "digits", "--device", "cpu", "--batch", "708", "--quiet")
    words += ("--search-epochs", "2", "--epochs", "1", "--seed", "3", "--seeds", "2", "--out", str(tmp_path), "--json")
    assert typed(*words) == 0
    facts = json.loads((tmp_path / "summary.json").read_text())
    assert [facts["runs"], len(facts["networks"][0]["accuracy"])] == [["seed-3", "seed-4"], 2]
    accuracies = [json.loads(line) for line in (tmp_path / "seed-4" / LOG).read_text().splitlines()]
    assert accuracies[-1]["accuracy"] == facts["networks"][-1]["accuracy"][1] and len(done) == 2
    (tmp_path / "seed-4" / "report.md").unlink()
    (tmp_path / "seed-4" / "widths.json").unlink()
    capsys.readouterr()
    assert typed(*words) == 0
    assert done[2:] == [(*words, "--seeds", "1", "--seed", "4", "--resume", f"{tmp_path}/seed-4")]
    assert json.loads(capsys.readouterr().out.rpartition("\n{")[2].join("{ ")) == {"folder": str(tmp_path)} | facts
    assert typed(*words, "--epochs", "2") == 2 and "--epochs" in capsys.readouterr().err


def test_the_summary_is_that_of_the_tables(tmp_path: Path) -> None:
    ours, folders = [0.9041, 0.9043, 0.9057], [tmp_path / f"seed-{seed}" for seed in range(3)]
    for seed, (accuracy, folder) in enumerate(zip(ours, folders, strict=True)):
        Run(folder).write(SETTINGS, {"command": "prune"})
        for row in (Row(UNPRUNED, 1000, 90, 0.915, 1.0, 8), Row(DMCP, 490 + 5 * seed, 40, accuracy, 1.0, 8)):
            Run(folder).add(LOG, {"stage": "test"} | asdict(row))
    summary = summarize(folders)
    unpruned, found = summary["networks"]
    assert (unpruned["name"], found["name"], found["accuracy"]) == (UNPRUNED, DMCP, ours)
    assert [found["mean"], found["deviation"]] == pytest.approx([np.mean(ours), np.std(ours, ddof=1)])
    assert "490–500" in summary_table(summary) and "90.47 ± 0.09 (3)" in summary_table(summary)
    assert summarize(folders[:1])["networks"][0]["deviation"] is None
