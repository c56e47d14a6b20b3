"""A run that is interrupted at any moment, or out of disk, goes on to the same bits; one that cannot go on says why."""

from __future__ import annotations

import errno
import functools
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from commands import Capture, Killed, command
from folders import saved_step, write_photos

import dmcp
from dmcp.cli.session import _start
from dmcp.models import rebuild
from dmcp.runs.reading import read_run
from dmcp.runs.writing import Run
from dmcp.runtime.io import LOCK, Lock

pytestmark = pytest.mark.usefixtures("quick_commands")

NET = """
from torch import nn

def build(num_classes, width=6, channels=1):
    first = [nn.Conv2d(channels, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    second = [nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * width, num_classes)]
    return nn.Sequential(*first, *second, *head)
"""
COMMON = ("--model", "killed_net:build", "--data", "digits", "--batch", "80", "--save-steps", "10", "--quiet")
AGAIN = ("--model", "killed_net:build")  # what runs code is typed again
PRUNE = ("prune", *COMMON, "--search-epochs", "2", "--epochs", "1", "--baselines")
KEPT = ("log.jsonl", "model.safetensors", "widths.json", "search.safetensors", "search.json")

Moment = tuple[str, str, int]  # before the n-th call of this function, of those that have this text in what they get
REPLACE, OPEN, STEP = "pathlib:Path.replace", "pathlib:Path.open", "torch.optim:SGD.step"
WRITE, LOSS = "dmcp.runtime.checkpoint:write_files", "torch.nn.functional:cross_entropy"


def step_of(stage: str, step: int) -> Moment:
    """After so many steps of a stage, not its last one."""
    return "dmcp.runtime.checkpoint:Checkpointer.due", f"checkpoints/{stage}'", step


def send(*signals: signal.Signals) -> Callable[[Any], None]:
    def act(_: Any) -> None:
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0)  # it is heard here

    return act


ACTS: dict[str, Callable[[Any], Any]] = {
    "kill": Mock(side_effect=Killed()),
    "term": send(signal.SIGTERM),
    "int": send(signal.SIGINT),
    "twice": send(signal.SIGINT, signal.SIGINT),  # by a person who does not want to wait for the end of a step
    "full": Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")),
    "nan": lambda real: lambda *args, **kwargs: real(*args, **kwargs) * float("nan"),
}


def typed(*argv: Any, moment: Moment | None = None, act: str = "kill") -> int:
    """The exit code of a command that is interrupted at a moment; -1 if it was killed."""
    with pytest.MonkeyPatch.context() as patch:
        if moment:
            where, text, left = moment
            real = pkgutil.resolve_name(where)

            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= text in str(args[:2])
                function = ACTS[act](real) if left == 0 and text in str(args[:2]) else None
                return (function or real)(*args, **kwargs)

            owner, _, name = where.replace(":", ".").rpartition(".")
            patch.setattr(pkgutil.resolve_name(owner), name, counted)
        try:
            return command(*map(str, argv))
        except Killed:
            return -1


def resume(run: Path, *words: str, **how: Any) -> int:
    return typed("prune", "--resume", run, *AGAIN, "--quiet", *words, **how)


@pytest.fixture(autouse=True)
def _here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("net")
    (folder / "killed_net.py").write_text(NET)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "killed_net", raising=False)


Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of a run that was killed at a moment, or that nothing interrupts; tests copy it."""

    @functools.cache
    def made(moment: Moment | None = None, argv: tuple[str, ...] = PRUNE) -> Path:
        folder = tmp_path_factory.mktemp("made") / "run"
        assert typed(*argv, "--out", folder, moment=moment) == (-1 if moment else 0)
        return folder

    return made


STARTS = {  # where the run of a test has been killed once already
    "searching": step_of("search", 25),
    "searched": step_of("unpruned", 1),
    "trained": step_of("dmcp", 1),
}


def assert_same(run: Path, whole: Path) -> None:
    """All that a run leaves is the same, bit for bit; but for its times, its report (which has them) and settings."""
    names = [sorted(path.name for path in folder.iterdir() if path.suffix != ".svg") for folder in (run, whole)]
    assert names[0] == names[1]
    for name in {*KEPT} & {*names[0]}:
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


# interrupted

# where it starts, the moment, what happens, the exit code, and the step of a stage that is saved
CASES: dict[str, tuple[str, Moment, str, int, tuple[str, int] | None]] = {
    "warm-up, inside a step": ("", (STEP, "", 14), "kill", -1, ("search", 10)),
    "search, among the lines of its log": ("", (OPEN, "log.jsonl'", 30), "kill", -1, None),
    "checkpoint, before it is renamed": ("", (REPLACE, ".checkpoint.", 3), "kill", -1, ("search", 20)),
    "test, between two networks": ("trained", (OPEN, "times.jsonl'", 2), "kill", -1, None),
    "weights renamed, widths not": ("trained", (REPLACE, ".widths.json.new", 1), "kill", -1, None),
    "SIGTERM in the search": ("", (STEP, "", 15), "term", 3, ("search", 15)),
    "Ctrl-C in a training": ("searched", (STEP, "", 10), "int", 3, ("unpruned", 10)),
    "Ctrl-C twice": ("searching", (STEP, "", 5), "twice", 128 + signal.SIGINT, ("search", 20)),
    "full disk at a checkpoint": ("trained", (WRITE, "checkpoints/dmcp'", 2), "full", 2, ("dmcp", 10)),
    "loss is NaN in the search": ("searching", (LOSS, "", 23), "nan", 2, ("search", 30)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_run_ends_in_the_same_bits(case: str, runs: Runs, tmp_path: Path, capfd: Capture) -> None:
    start, moment, act, code, left = CASES[case]
    run = tmp_path / "run"
    whole = runs()
    argv = ["prune", "--resume", run, *AGAIN, "--quiet"] if start else [*PRUNE, "--out", run]
    if start:
        shutil.copytree(runs(STARTS[start]), run)
    capfd.readouterr()
    assert typed(*argv, moment=moment, act=act) == code
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err and not (run / LOCK).exists()
    assert left is None or saved_step(run / "checkpoints" / left[0]) == left[1]
    assert code != 3 or f"dmcp prune --resume {run}" in err
    assert code != 2 or len(err.splitlines()) == 1
    assert resume(run) == 0 and capfd.readouterr().err == ""
    assert_same(run, whole)


def test_a_run_that_is_really_killed(runs: Runs, tmp_path: Path) -> None:
    whole, run = runs(), tmp_path / "run"
    words = [sys.executable, "-m", "dmcp", *PRUNE, "--out", str(run)]
    with subprocess.Popen(words, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        while not saved_step(run / "checkpoints" / "search"):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert (run / LOCK).exists() and not (run / "report.md").exists()
    assert resume(run) == 0
    assert_same(run, whole)


RETRAIN = ("prune", *COMMON, "--search-epochs", "2", "--epochs", "2", "--retrain")


@pytest.mark.parametrize(
    ("argv", "moment"),
    [
        (("search", *COMMON, "--search-epochs", "2", "--holdout", "0.2"), step_of("search", 23)),
        (("train", *COMMON, "--epochs", "2"), step_of("unpruned", 25)),
        ((*RETRAIN, "finetune"), step_of("dmcp", 12)),
        ((*RETRAIN, "slimmable"), step_of("dmcp", 12)),
    ],
    ids=["search", "train", "finetune", "slimmable"],
)
def test_other_commands_and_ways_go_on_too(runs: Runs, tmp_path: Path, argv: tuple[str, ...], moment: Moment) -> None:
    whole, run = runs(argv=argv), tmp_path / "run"
    assert typed(*argv, "--out", run, moment=moment) == -1
    assert typed(argv[0], "--resume", run, *AGAIN, "--quiet") == 0
    assert_same(run, whole)
    assert typed(argv[0], "--resume", run, *AGAIN) == 2  # it is done


@pytest.mark.parametrize("share", [0.25, 0.0], ids=["in memory", "streamed"])
def test_a_run_on_image_files_goes_on_in_the_middle_of_an_epoch(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmcp.data.store.SHARE", share)
    photos = str(write_photos(tmp_path / "pets", count=8))
    words = ("--model", "killed_net:build", "--model-args", "channels=3", "--data", photos, "--input", "3x16x16")
    argv = ("train", *words, "--batch", "4", "--save-steps", "3", "--epochs", "2", "--quiet")
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert typed(*argv, "--out", whole) == 0
    assert typed(*argv, "--out", run, moment=step_of("unpruned", 7)) == -1
    assert saved_step(run / "checkpoints" / "unpruned") == 6
    assert typed("train", "--resume", run, *AGAIN, "--quiet", "--workers", "1") == 0
    assert_same(run, whole)


@pytest.mark.parametrize("renames", range(5))
def test_a_run_killed_as_it_began(renames: int, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = tmp_path / "run", Path.replace

    def replace(self: Path, target: Path) -> Path:
        if len(list(run.glob("[!.]*.json*"))) == renames:
            raise Killed
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # nothing is put in order
        assert typed(*PRUNE, "--out", run) == -1
    begun = (run / "settings.json").exists()
    assert resume(run) == (0 if begun else 2)
    assert begun or typed(*PRUNE, "--out", run) == 0
    assert_same(run, runs())


@pytest.mark.parametrize("name", ["settings.json", "log.jsonl"])
def test_a_file_that_is_removed_in_the_middle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTS, "remove", lambda _: (tmp_path / "run" / name).unlink())
    assert typed(*PRUNE, "--out", tmp_path / "run", moment=step_of("search", 25), act="remove") == 2


# what stands in the way


def test_a_run_goes_on_as_it_was_begun(runs: Runs, tmp_path: Path, capfd: Capture) -> None:
    whole, run = runs(), shutil.copytree(runs(STARTS["searching"]), tmp_path / "run")
    settings = (run / "settings.json").read_text()
    with Lock(run):
        assert resume(run) == 2 and f"{run} is in use" in capfd.readouterr().err
    Path("killed_net.py").write_text(f"{NET.replace('width=6', 'width=8')}# so no compiled file is taken for this one")
    del sys.modules["killed_net"]
    assert resume(run) == 2 and "fingerprint was" in capfd.readouterr().err
    Path("killed_net.py").write_text(NET)
    del sys.modules["killed_net"]
    for part in ("train", "test"):
        images = np.random.default_rng(0).integers(0, 255, (200, 8, 8, 1), np.uint8)
        np.savez(tmp_path / f"{part}-0.npz", images=images, labels=np.arange(200) % 10)
    stored = json.loads(settings)
    for sentence, change in (
        ("not of this version", {"train": stored["train"] | {"slimmable": False}}),
        ("data.train was 1415, is 200", {"data": str(tmp_path)}),
        ("search.budget_weight was 0.1, is 0.2", {"search": stored["search"] | {"budget_weight": 0.2}}),
    ):
        (run / "settings.json").write_text(json.dumps(stored | change))
        assert resume(run) == 2 and sentence in capfd.readouterr().err
        assert json.loads((run / "settings.json").read_text()) == stored | change  # no start is noted
        (run / "settings.json").write_text(settings)
    assert typed(*PRUNE, "--resume", run) == 0  # the same once more is no contradiction
    assert_same(run, whole)
    (began, first), (went_on, second) = json.loads((run / "settings.json").read_text())["starts"].items()
    here = {"dmcp": dmcp.__version__, "torch": torch.__version__, "threads": torch.get_num_threads(), "processes": 1}
    assert first.items() >= here.items() and first | {"log_lines": 20} == second
    times = [datetime.fromisoformat(it) for it in (began, went_on)]
    assert times[0] < times[1] <= datetime.now(UTC) and read_run(run).started == times[0]


def test_a_library_may_lack_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.Distribution.discover", lambda **_: iter(()))  # as if built by hand
    (facts,) = _start(Run(tmp_path), Mock(model=torch.nn.Linear(1, 1))).values()
    assert "torch" in facts and "torchvision" not in facts


def test_other_weights_are_refused(capfd: Capture) -> None:
    given, other = (rebuild("killed_net:build", (), 10, seed).state_dict() for seed in (1, 2))
    torch.save({"ema": other, "model": given}, "given.pth")
    argv = ("train", *COMMON, "--epochs", "1", "--weights", "given.pth", "--out", "run")
    assert typed(*argv, moment=step_of("unpruned", 12)) == -1 and "model is used" in capfd.readouterr().err
    torch.save(other, "given.pth")
    assert typed("train", "--resume", "run", *AGAIN) == 2 and "weights was" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_a_run_whose_images_were_replaced_does_not_go_on(kind: str, tmp_path: Path, capfd: Capture) -> None:
    """Same names, labels and, of the files, sizes, but other pixels; a copy with other times is the same data."""
    data, run = tmp_path / "pets", tmp_path / "run"
    if kind == "files":
        write_photos(data, count=8)
    else:
        data.mkdir()
        for part in ("train", "test"):
            images = np.random.default_rng(0).integers(0, 255, (16, 16, 16, 3), np.uint8)
            np.savez(data / f"{part}-0.npz", images=images, labels=np.arange(16) % 2)
    words = ("--model", "killed_net:build", "--model-args", "channels=3", "--data", data, "--epochs", "2", "--quiet")
    more = ("--input", "3x16x16") if kind == "files" else ()
    argv = ("train", *words, *more, "--batch", "4", "--save-steps", "3", "--out", run)
    assert typed(*argv, moment=step_of("unpruned", 7)) == -1
    copied = shutil.copytree(run, tmp_path / "copied")
    path = next(iter(sorted(data.rglob("*.png")))) if kind == "files" else data / "train-0.npz"
    before = path.read_bytes()
    if kind == "files":
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    else:
        np.savez(path, images=255 - images, labels=np.arange(16) % 2)
    assert typed("train", "--resume", run, *AGAIN, "--quiet") == 2
    assert "images for training was" in capfd.readouterr().err
    path.write_bytes(before)
    os.utime(path, (1, 1))
    assert typed("train", "--resume", copied, *AGAIN, "--quiet") == 0
