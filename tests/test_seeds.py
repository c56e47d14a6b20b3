"""Seeds side by side: what they get, what becomes of those that fail or are stopped, and the summary."""

from __future__ import annotations

import json
import os
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

from dmcp.cli import launch
from dmcp.cli import launch as launch_module
from dmcp.cli.launch import markdown, run_seeds, summarise
from dmcp.errors import DmcpError, FileError
from dmcp.results import DMCP, UNIFORM, UNPRUNED, Row
from dmcp.runs import LOG, SETTINGS, Run
from dmcp.runtime.io import Lock, alive

CPU, GPU = torch.device("cpu"), torch.device("cuda")

# Stands for `python -m dmcp`: notes how it was called, does what its second word says, and leaves a finished run.
CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

def option(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""

run = Path(option("--out") or option("--resume"))
seed = run.name.removeprefix("seed-")
acts = Path(run.parent.parent / "acts").read_text().split()
start = time.monotonic()

def note(**facts):
    keys = [key for key in os.environ if key.startswith(("CUDA_", "OMP_", "PYTHONPATH"))]
    facts |= {"seed": int(seed), "argv": sys.argv[1:], "env": {key: os.environ[key] for key in keys}, "start": start}
    with (run.parent.parent / "calls").open("a") as file:
        file.write(json.dumps(facts) + "\\n")

def stop(number, _):
    print("stopped by", signal.Signals(number).name, file=sys.stderr)
    raise SystemExit(1)

print(f"hello {seed}", file=sys.stderr)
print("10 %\\r20 %\\rready", file=sys.stderr)
print(f"table of {seed}")
if f"fail-{seed}" in acts:
    sys.stderr.write("dmcp: no such\\x1b model.")
    raise SystemExit(3)
if f"crash-{seed}" in acts:
    os.kill(os.getpid(), signal.SIGKILL)
if f"nothing-{seed}" in acts:
    raise SystemExit
if "hang" in acts:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    worker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    note(pids=[os.getpid(), worker.pid])
    time.sleep(60)
run.mkdir(exist_ok=True)
time.sleep(0.3 if "slow" in acts else 0)
note(end=time.monotonic())
row = {"stage": "test", "name": "ours", "macs": 50, "params": 7, "accuracy": 0.9, "ms": 1.0, "batch": 8}
(run / "settings.json").write_text(json.dumps({"command": "prune", "unpruned": {"macs": 100}}))
(run / "log.jsonl").write_text(json.dumps(row | {"accuracy": 0.9 + int(seed) / 100}) + "\\n")
(run / "widths.json").write_text(json.dumps({"widths": {"conv": 4}, "input_shape": [1, 3], "fingerprint": "f"}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for seeds; commands are run by the program above."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "acts").write_text("")
    monkeypatch.setattr(launch_module, "COMMAND", (sys.executable, "-S", str(tmp_path / "child.py")))
    monkeypatch.setattr(launch, "_PAUSE", 0.02)
    for name in [name for name in os.environ if name.startswith("CUDA_")]:
        monkeypatch.delenv(name)
    return tmp_path / "runs"


def act(folder: Path, *words: str) -> None:
    """Tell the children what to do, and forget how they were called."""
    (folder.parent / "acts").write_text(" ".join(words))
    (folder.parent / "calls").unlink(missing_ok=True)


def calls(folder: Path) -> list[dict[str, Any]]:
    """How the children were called, by seed."""
    path = folder.parent / "calls"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(found, key=lambda call: call["seed"])


def most_at_once(found: list[dict[str, Any]]) -> int:
    return max(sum(it["start"] <= call["start"] < it["end"] for it in found) for call in found)


def wait_for(true: Callable[[], object]) -> None:
    end = time.monotonic() + 180  # of a busy machine
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


# what seeds get


def test_each_seed_is_a_run_of_its_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["prune", "--model", "a net"]
    assert run_seeds(argv, [0, 7], folder, CPU) == [folder / "seed-0", folder / "seed-7"]
    wanted = [[*argv, "--seed", str(seed), "--out", str(folder / f"seed-{seed}")] for seed in (0, 7)]
    assert [call["argv"] for call in calls(folder)] == wanted
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.splitlines()) == ["seed 0: hello 0", "seed 0: ready", "seed 7: hello 7", "seed 7: ready"]
    assert (folder / "seed-7.out").read_text() == "table of 7\n"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["runs"] == ["seed-0", "seed-7"]
    assert summary["networks"][0]["accuracies"] == pytest.approx([0.9, 0.97])
    assert "93.50 ± 4.95 (2)" in (folder / "summary.md").read_text()
    assert not list(folder.glob("*lock*"))


def test_quiet_says_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_seeds(["prune"], [0], folder, CPU, quiet=True)
    assert capfd.readouterr() == ("", "")
    assert "hello 0" in (folder / "seed-0.err").read_text()


@pytest.mark.parametrize(
    ("device", "cores", "number", "at_once", "threads"),
    [(CPU, 2, 4, 2, 1), (CPU, 8, 3, 3, 2), (CPU, 5, 1, 1, 5), (GPU, 2, 4, 4, 1)],
)
def test_cores_are_divided(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    cores: int,
    number: int,
    at_once: int,
    threads: int,
) -> None:
    monkeypatch.setattr(launch, "_cores", lambda: cores)
    monkeypatch.setenv("PYTHONPATH", "kept")
    act(folder, "slow")
    run_seeds(["prune"], range(number), folder, device)
    found = calls(folder)
    assert [call["seed"] for call in found] == list(range(number))
    assert {call["env"]["OMP_NUM_THREADS"] for call in found} == {str(threads)}
    assert {call["env"]["PYTHONPATH"] for call in found} == {"kept"}
    assert most_at_once(found) == at_once


# started again


def test_finished_seeds_are_left_and_others_go_on(folder: Path) -> None:
    run_seeds(["prune", "--batch", "8"], [0, 1, 2], folder, CPU)
    (folder / "seed-1" / "widths.json").unlink()
    (folder / "seed-2" / LOG).unlink()
    act(folder)
    run_seeds(["prune", "--batch", "8"], [0, 1, 2, 3], folder, CPU)
    resumed = [["prune", "--resume", str(folder / f"seed-{seed}")] for seed in (1, 2)]
    new = ["prune", "--batch", "8", "--seed", "3", "--out", str(folder / "seed-3")]
    assert [call["argv"] for call in calls(folder)] == [*resumed, new]
    act(folder)
    run_seeds(["prune", "--batch", "8"], [2, 3], folder, CPU)
    assert calls(folder) == []
    assert json.loads((folder / "summary.json").read_text())["runs"] == ["seed-2", "seed-3"]


def test_runs_of_another_command_are_refused(folder: Path) -> None:
    act(folder, "fail-0")
    with pytest.raises(DmcpError):
        run_seeds(["prune", "--model", "typo"], [0], folder, CPU)
    act(folder)
    run_seeds(["prune", "--model", "a net"], [0], folder, CPU)  # the first one has left no run
    act(folder)
    with pytest.raises(FileError, match=r"already holds runs of `dmcp prune --model 'a net'`: give another folder"):
        run_seeds(["prune", "--model", "b"], [0], folder, CPU)
    (folder / "seeds.json").unlink()
    with pytest.raises(FileError, match="already holds runs of something else"):
        run_seeds(["prune", "--model", "a net"], [1], folder, CPU)
    with pytest.raises(FileError, match="already holds runs of something else"):
        run_seeds(["prune"], [1], folder / "seed-0", CPU)
    assert calls(folder) == []


def test_a_folder_is_used_by_one_command_at_a_time(folder: Path) -> None:
    folder.mkdir()
    with Lock(folder), pytest.raises(FileError, match=f"in use by process {os.getpid()}"):
        run_seeds(["prune"], [0], folder, CPU)
    assert calls(folder) == []


@pytest.mark.parametrize("wrong", [[], [0, 1, 0]])
def test_seeds_that_make_no_sense(folder: Path, wrong: list[int]) -> None:
    with pytest.raises(DmcpError, match="at least one seed, and each only once"):
        run_seeds(["prune"], wrong, folder, CPU)
    assert not folder.exists()


# failures and signals


def test_a_seed_that_fails_lets_the_others_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_cores", lambda: 2)
    act(folder, "fail-0", "crash-1", "nothing-3")
    with pytest.raises(DmcpError) as caught:
        run_seeds(["prune"], [3, 2, 1, 0], folder, CPU)
    assert str(caught.value) == (
        "3 of 4 seeds failed, the same command starts only them again: "
        "seed 0: exit code 3: dmcp: no such\N{REPLACEMENT CHARACTER} model.; "
        "seed 1: killed by SIGKILL: ready; seed 3: exit code 0: ready"
    )
    assert [call["seed"] for call in calls(folder)] == [2]
    assert not list(folder.glob("summary*")) and not list(folder.glob("*lock*"))
    act(folder)
    capfd.readouterr()
    run_seeds(["prune"], [3, 2, 1, 0], folder, CPU)
    assert [call["seed"] for call in calls(folder)] == [0, 1, 3]
    said = capfd.readouterr().err.splitlines()
    assert sorted(said) == [f"seed {seed}: {word}" for seed in (0, 1, 3) for word in (f"hello {seed}", "ready")]
    assert len(json.loads((folder / "summary.json").read_text())["networks"][0]["accuracies"]) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_seeds(folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    act(folder, "hang")
    source = "import sys, torch; from pathlib import Path; from dmcp.running import seeds\n"
    source += "seeds.COMMAND = (sys.executable, '-S', sys.argv[1])\n"
    source += "seeds.run_seeds(['prune'], [0, 1], Path(sys.argv[2]), torch.device('cuda'))"
    command = [sys.executable, "-c", source, folder.parent / "child.py", folder]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(calls(folder)) == 2)
        pids = [pid for call in calls(folder) for pid in call["pids"]]
        assert all(alive(pid) for pid in pids)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == -number
    assert {f"seed {seed}: stopped by {number.name}" for seed in (0, 1)} < set(said.splitlines())
    assert "dmcp: stopping 2 of 2 seeds; the same command goes on with them." in said.splitlines()
    wait_for(lambda: not any(alive(pid) for pid in pids))  # the workers too
    assert not list(folder.glob("summary*")) and not list(folder.glob("*lock*"))


# the summary


def keep(folder: Path, *rows: Row, **settings: Any) -> Path:
    """A run that has tested these networks."""
    folder.mkdir()
    Run(folder).write(SETTINGS, {"command": "prune"} | settings)
    for row in rows:
        Run(folder).log({"stage": "test"} | asdict(row))
    return folder


def test_the_summary_is_that_of_the_tables(tmp_path: Path) -> None:
    ours, uniform = [0.9041, 0.9043, 0.9057], [0.899, 0.9]
    folders = []
    for seed, accuracy in enumerate(ours):
        rows = [Row(UNPRUNED, 1000, 90, 0.915, 1.0, 8), Row(DMCP, 490 + 5 * seed, 40 - seed, accuracy, 1.0, 8)]
        rows += [Row(UNIFORM, 495, 41, uniform[seed], 1.0, 8)] if seed < 2 else []
        folders.append(keep(tmp_path / f"seed-{seed}", *rows))
    summary = summarise(folders)
    assert summary.runs == ("seed-0", "seed-1", "seed-2")
    first, second, third = summary.networks
    assert (first.name, second.name, third.name) == (UNPRUNED, DMCP, UNIFORM)
    assert second.accuracies == tuple(ours) and third.accuracies == tuple(uniform)
    assert second.mean == pytest.approx(np.mean(ours)) and third.mean == pytest.approx(np.mean(uniform))
    assert second.deviation == pytest.approx(np.std(ours, ddof=1))
    assert third.deviation == pytest.approx(np.std(uniform, ddof=1))
    assert (second.macs, second.macs_share, second.params) == ((490, 500), (0.49, 0.5), (38, 40))
    assert first.deviation == 0 and first.macs_share == (1, 1)
    assert markdown(summary) == (
        "| network        | MACs                  | params | accuracy in %    |\n"
        "|----------------|-----------------------|--------|------------------|\n"
        "| unpruned       | 1,000 (100.0%)        | 90     | 91.50 ± 0.00 (3) |\n"
        "| ours           | 490–500 (49.0%–50.0%) | 38–40  | 90.47 ± 0.09 (3) |\n"
        "| uniform widths | 495 (49.5%)           | 41     | 89.95 ± 0.07 (2) |\n"
    )


def test_one_run_has_no_deviation(tmp_path: Path) -> None:
    summary = summarise([keep(tmp_path / "one", Row(DMCP, 10, 5, 0.5, 1.0, 8))])
    assert summary.networks[0].deviation is None and summary.networks[0].macs_share is None
    assert markdown(summary).splitlines()[2] == "| ours    | 10   | 5      | 50.00 (1)     |"


def test_the_share_is_known_or_not_said(tmp_path: Path) -> None:
    row = Row(DMCP, 10, 5, 0.5, 1.0, 8)
    known, unknown = keep(tmp_path / "known", row, unpruned={"macs": 40}), keep(tmp_path / "unknown", row)
    assert summarise([known]).networks[0].macs_share == (0.25, 0.25)
    assert summarise([known, unknown]).networks[0].macs_share is None


# the real command


@pytest.mark.slow
def test_two_real_seeds(tmp_path: Path) -> None:
    argv = ["prune", "--model", "digits:resnet", "--data", "digits", "--search-epochs", "2", "--epochs", "1"]
    folders = run_seeds([*argv, "--batch", "256"], [0, 1], tmp_path / "runs", CPU)
    stored = [json.loads((folder / SETTINGS).read_text())["search"]["seed"] for folder in folders]
    assert stored == [0, 1]
    reports = [(folder / "report.md").read_text() for folder in folders]
    network = next(it for it in summarise(folders).networks if it.name == DMCP)
    for accuracy, report in zip(network.accuracies, reports, strict=True):
        assert f"{100 * accuracy:.2f} %" in report
    written = {path: path.stat().st_mtime_ns for folder in folders for path in folder.iterdir()}
    assert run_seeds([*argv, "--batch", "256"], [0, 1], tmp_path / "runs", CPU) == folders
    assert {path: path.stat().st_mtime_ns for folder in folders for path in folder.iterdir()} == written


@pytest.mark.slow  # test_children.py has one such child
def test_seeds_stop_when_the_command_that_started_them_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "many"
    words = ["prune", "--model", "digits:resnet", "--data", "digits", "--seeds", "2", "--search-epochs", "400"]
    command = [sys.executable, "-m", "dmcp", *words, "--epochs", "1", "--batch", "256", "--device", "cpu", "--out", out]
    parent = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: all((out / f"seed-{seed}" / LOG).exists() for seed in (0, 1)))
        pids = [int(path.read_text().split()[1]) for path in out.glob("seed-*/lock")]
    finally:
        parent.kill()
        parent.wait()
    assert len(pids) == 2
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert all((out / f"seed-{seed}" / "checkpoints").exists() for seed in (0, 1))  # they saved before they went
