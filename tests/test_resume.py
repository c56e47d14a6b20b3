"""A run that is killed at any moment, stopped, or out of disk goes on to the same bits; one that cannot go on says why.

The runs are the real command in forked children, each of which interrupts itself at an exact moment.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main

from dmcp.cli import main
from dmcp.runtime.io import LOCK

NET = """
from torch import nn

def build(num_classes, width=6):
    first = [nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    second = [nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * width, num_classes)]
    return nn.Sequential(*first, *second, *head)
"""
COMMON = ("--model", "killed_net:build", "--data", "digits", "--batch", "80", "--save-steps", "10", "--quiet")
PRUNE = ("prune", *COMMON, "--search-epochs", "2", "--epochs", "1", "--baselines")
EPOCH = 17  # steps; the search has two epochs, the first of them warm-up, and each training has one
KEPT = ("log.jsonl", "model.safetensors", "widths.json", "search.safetensors", "search.json")

Moment = tuple[str, str, int]  # before the n-th call of this function, of those that have this text in what they get
REPLACE, OPEN, STEP = "pathlib:Path.replace", "pathlib:Path.open", "torch.optim:SGD.step"


def step_of(stage: str, step: int) -> Moment:
    """After so many steps of a stage, not its last one."""
    return "dmcp.checkpoint:Checkpointer.due", f"checkpoints/{stage}'", step


def save_of(stage: str, number: int) -> Moment:
    """As the checkpoint of this number of a stage is written."""
    return "dmcp.checkpoint:save_checkpoint", f"checkpoints/{stage}'", number


# the children


def arm(moments: Sequence[Moment], act: str) -> None:
    """Act when the last of the moments has come, each one counted from when the one before it came."""
    (where, text, left), *rest = moments
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    real = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        function = real
        left -= text in str(args[:2])
        if left == 0:
            setattr(owner, name, real)
            if rest:
                arm(rest, act)
            else:
                function = ACTS[act](real) or real
        return function(*args, **kwargs)

    setattr(owner, name, counted)


def send(*signals: signal.Signals) -> Callable[[Any], None]:
    def act(_: Any) -> None:
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0)  # it is heard here

    return act


def fill_disk(_: Any) -> None:
    """From now on no file of this process can be longer than a few bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def kill_in_write(open_file: Callable[..., Any]) -> Callable[..., Any]:
    """Half of the file is written when the kill comes."""

    def opened(*args: Any) -> Any:
        file = open_file(*args, buffering=0)
        write = file.write
        file = contextlib.nullcontext(type("Half", (), {})())
        file.enter_result.write = lambda data: (write(data[: len(data) // 2]), send(signal.SIGKILL)(None))
        return file

    return opened


ACTS: dict[str, Callable[[Any], Any]] = {
    "kill": send(signal.SIGKILL),
    "half": kill_in_write,
    "stop": send(signal.SIGSTOP),
    "term": send(signal.SIGTERM),
    "int": send(signal.SIGINT),
    "twice": send(signal.SIGINT, signal.SIGINT),  # by a person who does not want to wait for the end of a step
    "full": fill_disk,
    "nan": lambda real: lambda *args, **kwargs: real(*args, **kwargs) * float("nan"),
}


def put_everywhere(name: str, value: Any) -> None:
    """Replace a function or number in all modules that have it."""
    for module in [module for key, module in sys.modules.items() if key.startswith("dmcp.")]:
        if hasattr(module, name):
            setattr(module, name, value)


def act_as_child(job: dict[str, Any], streams: Sequence[int]) -> int:
    """Run the command, and be interrupted as the job says."""
    signal.alarm(100)  # whatever hangs ends
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    os.chdir(job["folder"])
    put_everywhere("_SLOW", math.inf)  # how fast the networks are here must not decide what is printed
    if not job["figures"]:  # most of the time of such a small run
        put_everywhere("draw_all", lambda *_, **__: [])
    if job["moments"]:
        arm([tuple(moment) for moment in job["moments"]], job["act"])
    sys.argv = ["dmcp", *job["argv"]]
    try:
        main.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def warm_up() -> None:
    """Run the command once, so that no child has to import and build what only the first use does."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        job = {"folder": folder, "figures": True, "moments": (), "argv": [*PRUNE, "--out", "run"]}
        (Path(folder) / "killed_net.py").write_text(NET)
        assert act_as_child(job, ()) == 0
        os.chdir("/")
    signal.alarm(0)
    del sys.modules["killed_net"]
    sys.path_importer_cache.clear()


def serve() -> None:
    """Fork a child for each line of stdin, and say how it ended: this process has imported everything, and no threads.

    A line with a pid instead is about a child that stopped itself: it is killed.
    """
    torch.set_num_threads(1)
    typer.main.get_command = functools.cache(typer.main.get_command)  # as in conftest.py
    warm_up()
    for line in sys.stdin:
        job = json.loads(line)
        if "pid" in job:
            os.kill(job["pid"], signal.SIGKILL)
            os.waitpid(job["pid"], 0)
            continue
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            pid = os.fork()
            if pid == 0:
                code = 99
                with contextlib.suppress(BaseException):
                    code = act_as_child(job, [out.fileno(), err.fileno()])
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            _, status = os.waitpid(pid, os.WUNTRACED)
            code = -os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
            texts = [(stream.seek(0), stream.read())[1] for stream in (out, err)]
        print(json.dumps([pid, code, *texts]), flush=True)


# the tests' end of it


@dataclass(frozen=True)
class End:
    """How a child ended."""

    pid: int
    code: int  # less than 0: the signal that ended or stopped it
    out: str
    err: str


@dataclass(frozen=True)
class Commands:
    """Runs commands in children."""

    server: subprocess.Popen[str]
    folder: Path  # of the network's source

    def run(self, argv: Sequence[str | Path], *moments: Moment, act: str = "kill", figures: bool = False) -> End:
        job = {"argv": [*map(str, argv)], "moments": moments, "act": act, "figures": figures}
        self.send(job | {"folder": str(self.folder)})
        assert self.server.stdout is not None
        return End(*json.loads(self.server.stdout.readline()))

    def resume(self, run: Path, *moments: Moment, **how: Any) -> End:
        return self.run(["prune", "--resume", run, "--quiet"], *moments, **how)

    def send(self, job: dict[str, Any]) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("net")
    (folder / "killed_net.py").write_text(NET)
    alone = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # children by fork: none can use a GPU
    command, pipe = [sys.executable, "-W", "error", __file__], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=alone) as server:
        yield Commands(server, folder)
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="module")
def runs(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run that was killed at some moments, or that nothing interrupts; tests copy it."""

    @functools.cache
    def made(*moments: Moment, argv: tuple[str, ...] = PRUNE) -> Path:
        folder = tmp_path_factory.mktemp("made") / "run"
        end = commands.run([*argv, "--out", folder], *moments, figures=not moments and argv == PRUNE)
        assert end.code == (-signal.SIGKILL if moments else 0), end.err
        return folder

    return made


STARTS = {  # where the run of a test has been killed once already
    "searching": step_of("search", 25),
    "searched": step_of("unpruned", 1),
    "trained": step_of("dmcp", 1),
}


@pytest.fixture
def begun(runs: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda start: shutil.copytree(runs(STARTS[start]), tmp_path / "run")


def assert_same(run: Path, whole: Path, figures: bool = False) -> None:
    """All that a run leaves is the same, bit for bit; but for its times, its report (which has them) and settings."""
    ignored = () if figures else (".svg",)
    names = [sorted(path.name for path in folder.iterdir() if path.suffix not in ignored) for folder in (run, whole)]
    assert names[0] == names[1]
    for name in names[0]:
        if name in KEPT or name.endswith(".svg"):
            assert (run / name).read_bytes() == (whole / name).read_bytes(), name


def checkpoints(run: Path, stage: str) -> list[int]:
    """Steps of the checkpoints of a stage."""
    return sorted(int(path.name.split("-")[1]) for path in (run / "checkpoints" / stage).glob("step-*"))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# interrupted


# where it starts, the moment, what happens, and the exit code
Case = tuple[str, tuple[Moment, ...], str, int]
KILLED = -signal.SIGKILL
CASES: dict[str, Case] = {
    "warm-up, before the first checkpoint": ("", (step_of("search", 7),), "kill", KILLED),
    "warm-up, inside a step": ("", (step_of("search", 13), (STEP, "", 1)), "kill", KILLED),
    "search, inside a step of the alphas": ("", (step_of("search", 27), (STEP, "", 2)), "kill", KILLED),
    "search, among the lines of its log": ("", (step_of("search", 25), (OPEN, "log.jsonl'", 5)), "kill", KILLED),
    "search done, half of its result renamed": ("", ((REPLACE, ".search.json.new", 1),), "kill", KILLED),
    "checkpoint, before it is renamed": ("", (save_of("search", 3), (REPLACE, "step-", 1)), "kill", KILLED),
    "checkpoint, half of it written": ("searching", (save_of("search", 2), (OPEN, ".step-", 1)), "half", KILLED),
    "dmcp, inside its last step": ("trained", (step_of("dmcp", 16), (STEP, "", 1)), "kill", KILLED),
    "test, between two networks": ("trained", ((OPEN, "times.jsonl'", 2),), "kill", KILLED),
    "weights renamed, widths not": ("trained", ((REPLACE, ".widths.json.new", 1),), "kill", KILLED),
    "before the report is renamed": ("trained", ((REPLACE, ".report.md.new", 1),), "kill", KILLED),
    "SIGTERM in the search": ("", (step_of("search", 14), (STEP, "", 1)), "term", 3),
    "Ctrl-C in a training": ("searched", (step_of("unpruned", 9), (STEP, "", 1)), "int", 3),
    "SIGTERM at the end of a stage": ("searched", (("dmcp.checkpoint:Checkpointer.load", "unpruned'", 1),), "term", 3),
    "Ctrl-C twice": ("searching", (step_of("search", 5), (STEP, "", 1)), "twice", 128 + signal.SIGINT),
    "full disk at a checkpoint": ("trained", (save_of("dmcp", 2),), "full", 2),
    "full disk at the log": ("searching", ((OPEN, "log.jsonl'", 4),), "full", 2),
    "loss is NaN in the search": (
        "searching", (step_of("search", 13), ("torch.nn.functional:cross_entropy", "", 1)), "nan", 2),
}  # fmt: skip
SAVED = {"SIGTERM in the search": ("search", [10, 15]), "Ctrl-C in a training": ("unpruned", [10])}
SAVED |= {"SIGTERM at the end of a stage": ("unpruned", [1]), "Ctrl-C twice": ("search", [10, 20])}
SAVED |= {"full disk at a checkpoint": ("dmcp", [10]), "checkpoint, half of it written": ("search", [20, 30])}
SAVED |= {"loss is NaN in the search": ("search", [20, 30])}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_run_ends_in_the_same_bits(
    case: str, commands: Commands, runs: Callable[..., Path], begun: Callable[[str], Path], tmp_path: Path
) -> None:
    start, moments, act, code = CASES[case]
    run = begun(start) if start else tmp_path / "run"
    argv = ["prune", "--resume", run, "--quiet"] if start else [*PRUNE, "--out", run]
    end = commands.run(argv, *moments, act=act)
    assert end.code == code and end.out == "" and "Traceback" not in end.err
    if case in SAVED:
        assert checkpoints(run, SAVED[case][0]) == SAVED[case][1]
    if code == 3:
        assert f"Go on with: dmcp prune --resume {run}" in end.err
    if code > 0:
        assert not (run / LOCK).exists()
    if code == 2:
        assert len(end.err.splitlines()) == 1
    end = commands.resume(run)
    assert (end.code, end.err) == (0, "")
    assert_same(run, runs())
    if case == "test, between two networks":
        names = [json.loads(line)["name"] for line in (run / "times.jsonl").read_text().splitlines()]
        assert names == ["unpruned", "uniform", "dmcp"]  # times are of one test


def test_a_run_killed_among_its_figures_and_when_only_checkpoints_are_left_to_remove(
    commands: Commands, runs: Callable[..., Path], begun: Callable[[str], Path], tmp_path: Path
) -> None:
    run = begun("trained")
    assert commands.resume(run, ("matplotlib.figure:Figure.savefig", "", 3), figures=True).code == KILLED
    other = shutil.copytree(run, tmp_path / "other")
    assert commands.resume(run, figures=True).code == 0
    assert_same(run, runs(), figures=True)
    assert commands.resume(other, ("pathlib:Path.rename", "checkpoints", 1)).code == KILLED
    end = commands.resume(other)
    assert end.code == 2 and "this run is done" in end.err
    assert all((other / name).read_bytes() == (run / name).read_bytes() for name in KEPT)


def test_only_what_was_left_is_done(commands: Commands, begun: Callable[[str], Path]) -> None:
    run, left = begun("searching"), 2 * EPOCH - 20 + 3 * EPOCH
    assert checkpoints(run, "search") == [10, 20]
    assert commands.resume(run, ("dmcp.checkpoint:ResumableIterator.next", "", left + 1)).code == 0


SEARCH = ("search", *COMMON, "--search-epochs", "2", "--holdout", "0.2")
TRAIN = ("train", *COMMON, "--epochs", "2")
RETRAIN = ("prune", *COMMON, "--search-epochs", "2", "--epochs", "2", "--retrain")


@pytest.mark.parametrize(
    ("argv", "moment"),
    [
        pytest.param(SEARCH, step_of("search", 23), id="search"),
        pytest.param(TRAIN, step_of("unpruned", 25), id="train"),
        pytest.param((*RETRAIN, "finetune"), step_of("dmcp", 12), id="finetune"),
        pytest.param((*RETRAIN, "slimmable"), step_of("dmcp", 12), id="slimmable"),
    ],
)
def test_other_commands_and_ways_go_on_as_well(
    commands: Commands, runs: Callable[..., Path], tmp_path: Path, argv: tuple[str, ...], moment: Moment
) -> None:
    run = tmp_path / "run"
    assert commands.run([*argv, "--out", run], moment).code == KILLED
    resumed = commands.run([argv[0], "--resume", run, "--quiet"])
    assert (resumed.code, resumed.err) == (0, "")
    assert_same(run, runs(argv=argv))
    assert commands.run([argv[0], "--resume", run]).code == 2  # it is done


# what stands in the way


def refused(commands: Commands, run: Path, *argv: str) -> str:
    """The one sentence with which a run is refused; nothing in it changes."""
    before = contents(run)
    end = commands.run([*(argv or ["prune"]), "--resume", run])
    assert end.code == 2 and end.out == ""
    (line,) = end.err.splitlines()
    assert line.startswith("dmcp: ") and contents(run) == before
    return line


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_run_goes_on_as_it_was_begun(
    commands: Commands, runs: Callable[..., Path], begun: Callable[[str], Path], tmp_path: Path
) -> None:
    run = begun("searching")
    assert "--epochs was 1, is 3" in refused(commands, run, "prune", "--epochs", "3")
    settings, source = (run / "settings.json").read_text(), commands.folder / "killed_net.py"
    try:
        source.write_text(f"{NET.replace('width=6', 'width=8')}# so no compiled file is taken for this one")
        assert "the network is not what it was" in refused(commands, run)
    finally:
        source.write_text(NET)
    for part in ("train", "test"):
        images = np.random.default_rng(0).integers(0, 255, (200, 8, 8, 1), np.uint8)
        np.savez(tmp_path / f"{part}-0.npz", images=images, labels=np.arange(200) % 10)
    edit(run / "settings.json", lambda it: it.update(data=str(tmp_path)))
    assert "the data is not what it was" in refused(commands, run)
    (run / "settings.json").write_text(settings)
    edit(run / "settings.json", lambda it: it["search"].update(budget_weight=0.2))
    end = commands.resume(run)
    assert end.code == 2 and "search.budget_weight was 0.1, is 0.2" in end.err
    (run / "settings.json").write_text(settings)
    end = commands.run([*PRUNE, "--resume", run])  # the same once more is no contradiction
    assert end.code == 0, end.err
    assert_same(run, runs())


def test_what_is_no_run_or_is_done_is_refused(commands: Commands, runs: Callable[..., Path], tmp_path: Path) -> None:
    stored = json.loads((runs() / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(json.dumps(stored | {"train": stored["train"] | {"slimmable": False}}))
    assert "settings" in refused(commands, tmp_path)
    run = shutil.copytree(runs(), tmp_path / "run")
    assert "this run is done" in refused(commands, run)
    (run / LOCK).mkdir()  # stands for a folder that is read-only, which it is not for root
    assert "this run is done" in refused(commands, run)


def test_one_process_at_a_time(commands: Commands, runs: Callable[..., Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = commands.run([*PRUNE, "--out", run], step_of("search", 15), act="stop")
    try:
        assert first.code == -signal.SIGSTOP
        assert f"{run} is in use by process {first.pid} on " in refused(commands, run)
        assert commands.run([*PRUNE, "--out", run]).code == 2  # it holds files
    finally:
        commands.send({"pid": first.pid})
    assert commands.resume(run).code == 0
    assert_same(run, runs())


@pytest.mark.parametrize(("start", "stage"), [("searching", "search"), ("trained", "unpruned")])
def test_damaged_checkpoints(
    commands: Commands, runs: Callable[..., Path], begun: Callable[[str], Path], start: str, stage: str
) -> None:
    """The newest is passed over, also that of a stage that was done; if all are damaged, a person decides."""
    run = begun(start)
    older, newest = sorted((run / "checkpoints" / stage).glob("step-*"))
    whole, log = older.read_bytes(), (run / "log.jsonl").read_text()
    (run / "log.jsonl").write_text("".join(log.splitlines(keepends=True)[:12]))  # shorter than the checkpoint says
    assert "log.jsonl" in refused(commands, run)
    (run / "log.jsonl").write_text(log)
    for path in (older, newest):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "all checkpoints are damaged" in refused(commands, run)
    older.write_bytes(whole)
    end = commands.resume(run)
    assert end.code == 0 and f"{newest} is damaged and was passed over" in end.err
    assert_same(run, runs())


if __name__ == "__main__":
    serve()
