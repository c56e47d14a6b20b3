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
import re
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
from torch import Tensor, nn

import dmcp.cli.prune
import dmcp.results
import dmcp.runs
from dmcp.cli import main
from dmcp.runtime.io import LOCK
from dmcp.tracing import trace as trace_module
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace

NET = """
from torch import nn

def build(num_classes, width=6):
    first = [nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    second = [nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * width, num_classes)]
    return nn.Sequential(*first, *second, *head)
"""
COMMON = ["--model", "killed_net:build", "--data", "digits", "--batch", "80", "--save-steps", "10", "--quiet"]
PRUNE = ["prune", *COMMON, "--search-epochs", "2", "--epochs", "1", "--baselines"]
EPOCH = 17  # steps; the search has two epochs, the first of them warm-up, and each training has one
KEPT = ("log.jsonl", "model.safetensors", "widths.json", "search.safetensors", "search.json")

Moment = tuple[str, str, int]  # before the n-th call of this function, of those that have this text in what they get
DUE, SAVE = "dmcp.checkpoint:Keeper.due", "dmcp.checkpoint:save_checkpoint"
REPLACE, UNLINK, FSYNC, ADD, STEP = (
    "pathlib:Path.replace",
    "pathlib:Path.unlink",
    "os:fsync",
    "dmcp.runs:Run.add",
    "torch.optim:SGD.step",
)


# the children


def owner_of(name: str) -> tuple[Any, str]:
    """Where a function like `os:fsync` or `dmcp.runs:Run.add` is to be patched."""
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, last


def arm(moments: Sequence[Moment], act: str) -> None:
    """Act when the last of the moments has come, each one counted from when the one before it came."""
    (where, text, left), *rest = moments
    owner, name = owner_of(where)
    real = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        function = real
        left -= text in str(args[:2]) if text else 1
        if left == 0:
            setattr(owner, name, real)
            if rest:
                arm(rest, act)
            else:
                function = ACTS[act](real) or real
        return function(*args, **kwargs)

    setattr(owner, name, counted)


def signalled(number: signal.Signals) -> Callable[[Any], None]:
    return lambda _: os.kill(os.getpid(), number)


def interrupt_twice(_: Any) -> None:
    """Ctrl-C by a person who does not want to wait for the end of a step."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)  # the first one is heard here
    os.kill(os.getpid(), signal.SIGINT)


def fill_disk(_: Any) -> None:
    """From now on no file of this process can be longer than a few bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def kill_in_write(open_file: Callable[..., Any]) -> Callable[..., Any]:
    """Half of the file is written when the kill comes."""

    class Half:
        def __init__(self, *args: Any) -> None:
            self.file = open_file(*args)

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *_: object) -> None:
            raise AssertionError("nothing was written")

        def write(self, data: bytes) -> None:
            os.write(self.file.fileno(), data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return Half


ACTS: dict[str, Callable[[Any], Any]] = {
    "kill": signalled(signal.SIGKILL),
    "half": kill_in_write,
    "stop": signalled(signal.SIGSTOP),
    "term": signalled(signal.SIGTERM),
    "int": signalled(signal.SIGINT),
    "twice": interrupt_twice,
    "full": fill_disk,
    "nan": lambda real: lambda *args, **kwargs: real(*args, **kwargs) * float("nan"),
}


def act_as_child(job: dict[str, Any], streams: Sequence[int]) -> int:
    """Run the command, and be interrupted as the job says."""
    signal.alarm(100)  # whatever hangs ends
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    os.chdir(job["folder"])
    dmcp.results._SLOW = math.inf  # how fast the networks are here must not decide what is printed
    if not job["figures"]:  # most of the time of such a small run
        dmcp.runs.draw_all = dmcp.cli.prune.draw_all = lambda *_, **__: []  # type: ignore[assignment]
    if job["moments"]:
        arm([tuple(moment) for moment in job["moments"]], job["act"])
    sys.argv = ["dmcp", *job["argv"]]
    try:
        main.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


GRAPHS: dict[str, ChannelGraph] = {}


def trace_once(model: nn.Module, example: Tensor, **how: Any) -> ChannelGraph:
    """The graph of a network of this structure, which warm_up has traced; it has no weights."""
    key = repr((model, example.shape, how))
    if key not in GRAPHS:
        GRAPHS[key] = trace(model, example, **how)
    return GRAPHS[key]


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
    trace_module.trace = trace_once  # type: ignore[assignment]
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
        job = {
            "argv": [*map(str, argv)],
            "moments": moments,
            "act": act,
            "figures": figures,
            "folder": str(self.folder),
        }
        self._send(job)
        assert self.server.stdout is not None
        return End(*json.loads(self.server.stdout.readline()))

    def resume(self, run: Path, *moments: Moment, **how: Any) -> End:
        return self.run(["prune", "--resume", run, "--quiet"], *moments, **how)

    def end(self, pid: int) -> None:
        """Kill a child that stopped itself."""
        self._send({"pid": pid})

    def _send(self, job: dict[str, Any]) -> None:
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
def whole(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("unprunable") / "run"
    end = commands.run([*PRUNE, "--out", folder], figures=True)
    assert end.code == 0, end.err
    return folder


@pytest.fixture(scope="module")
def killed(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that were killed in the search, after it, and after the trainings that are not ours; tests copy them."""
    moments = {
        "searching": step_of("search", 25),
        "searched": ("dmcp.retraining:cut", "", 1),
        "trained": step_of("dmcp", 1),
    }
    runs = {name: tmp_path_factory.mktemp(name) / "run" for name in moments}
    for name, moment in moments.items():
        assert commands.run([*PRUNE, "--out", runs[name]], moment).code == -signal.SIGKILL
    return runs


@pytest.fixture(scope="module")
def ends(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What a command comes to when nothing interrupts it."""

    @functools.cache
    def end_of(*argv: str) -> Path:
        folder = tmp_path_factory.mktemp("end") / "run"
        assert commands.run([*argv, "--out", folder]).code == 0
        return folder

    return end_of


def step_of(stage: str, step: int) -> Moment:
    """After so many steps of a stage, not its last one."""
    return DUE, f"checkpoints/{stage}'", step


def save_of(stage: str, number: int) -> Moment:
    """As the checkpoint of this number of a stage is written."""
    return SAVE, f"checkpoints/{stage}'", number


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
    found = (run / "checkpoints" / stage).glob("step-*")
    return sorted(int(path.name.split("-")[1]) for path in found)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# killed


FIRST: dict[str, tuple[Moment, ...]] = {
    "before the first step": (("dmcp.searching.search:Steps.train_weights", "", 1),),
    "warm-up, before the first checkpoint": (step_of("search", 7),),
    "warm-up, inside a step": (step_of("search", 13), (STEP, "", 1)),
    "warm-up, before its last step": (step_of("search", 16),),
    "search, its first step": (step_of("search", 18),),
    "search, between weights and alphas": (step_of("search", 20), ("dmcp.searching.search:Steps.move_alphas", "", 1)),
    "search, inside a step of the alphas": (step_of("search", 27), (STEP, "", 2)),
    "search, among the lines of its log": (step_of("search", 25), (ADD, "log.jsonl", 5)),
    "search done, its last checkpoint not yet written": (save_of("search", 4),),
    "search done, half of its result renamed": (("dmcp.runs:save_search", "", 1), (REPLACE, "", 2)),
    "checkpoint, before it is synced": (save_of("search", 1), (FSYNC, "", 1)),
    "checkpoint, before it is renamed": (save_of("search", 3), (REPLACE, "", 1)),
    "checkpoint, before the rename is synced": (save_of("search", 2), (REPLACE, "", 1), (FSYNC, "", 1)),
    "checkpoint, before the old one is removed": (save_of("search", 3), (UNLINK, "step-", 1)),
}
LATER: dict[tuple[str, str], tuple[Moment, ...]] = {  # in runs that go on from where they were killed once already
    ("searched", "unpruned, before its first checkpoint"): (step_of("unpruned", 4),),
    ("searched", "unpruned, inside a step"): (step_of("unpruned", 12), (STEP, "", 1)),
    ("searched", "unpruned, before its last step"): (step_of("unpruned", 16),),
    ("searched", "unpruned, before its last checkpoint is renamed"): (save_of("unpruned", 2), (REPLACE, "", 1)),
    ("searched", "uniform, its first step"): (step_of("uniform-widths", 1),),
    ("searched", "uniform, at a checkpoint"): (step_of("uniform-widths", 10),),
    ("searched", "uniform, among the lines of its log"): (step_of("uniform-widths", 15), (ADD, "log.jsonl", 3)),
    ("trained", "ours, before its first checkpoint"): (step_of("dmcp", 9),),
    ("trained", "ours, after it"): (step_of("dmcp", 11),),
    ("trained", "ours, inside its last step"): (step_of("dmcp", 16), (STEP, "", 1)),
    ("trained", "test, before the first network"): (("dmcp.training:evaluate", "", 1),),
    ("trained", "test, between two networks"): (("dmcp.training:evaluate", "", 3),),
    ("trained", "before the network is saved"): (("dmcp.runs:save", "", 1),),
    ("trained", "weights renamed, widths not"): (("dmcp.runs:save", "", 1), (REPLACE, "", 2)),
    ("trained", "before the report"): (("dmcp.runs:report", "", 1),),
    ("trained", "before the report is renamed"): (("dmcp.runs:report", "", 1), (REPLACE, "", 1)),
}


FURTHER = {  # examples of what others hold: a run goes on from its last checkpoint, wherever it was after that
    "warm-up, before its last step",
    "checkpoint, before it is synced",
    "unpruned, before its last step",
    "uniform, its first step",
    "ours, before its first checkpoint",
    "ours, after it",
    "test, before the first network",
    "before the report",
}


def marked(*moment: str) -> Any:
    return pytest.param(*moment, marks=pytest.mark.slow if moment[-1] in FURTHER else ())


@pytest.mark.parametrize("moment", [marked(it) for it in FIRST])
def test_a_killed_run_ends_in_the_same_bits(commands: Commands, whole: Path, tmp_path: Path, moment: str) -> None:
    run = tmp_path / "run"
    assert commands.run([*PRUNE, "--out", run], *FIRST[moment]).code == -signal.SIGKILL
    end = commands.resume(run)
    assert (end.code, end.err) == (0, "")
    assert_same(run, whole)


@pytest.mark.parametrize(("start", "moment"), [marked(*it) for it in LATER])
def test_a_run_killed_later_ends_in_the_same_bits(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path, start: str, moment: str
) -> None:
    run = shutil.copytree(killed[start], tmp_path / "run")
    assert commands.resume(run, *LATER[start, moment]).code == -signal.SIGKILL
    end = commands.resume(run)
    assert (end.code, end.err) == (0, "")
    assert_same(run, whole)


def test_a_run_killed_among_its_figures(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["trained"], tmp_path / "run")
    third = ("dmcp.runs:draw_all", "", 1), ("matplotlib.figure:Figure.savefig", "", 3)
    assert commands.resume(run, *third, figures=True).code == -signal.SIGKILL
    assert commands.resume(run, figures=True).code == 0
    assert_same(run, whole, figures=True)


@pytest.mark.parametrize(("start", "stage", "number"), [("searching", "search", 2), ("trained", "dmcp", 1)])
def test_half_a_checkpoint_costs_nothing(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path, start: str, stage: str, number: int
) -> None:
    run = shutil.copytree(killed[start], tmp_path / "run")
    moments = save_of(stage, number), ("pathlib:Path.open", "/.tmp-", 1)
    assert commands.resume(run, *moments, act="half").code == -signal.SIGKILL
    (half,) = (run / "checkpoints" / stage).glob(".tmp-*")
    assert half.stat().st_size > 1000
    assert checkpoints(run, stage) == {"search": [20, 30], "dmcp": []}[stage]
    assert commands.resume(run).code == 0
    assert_same(run, whole)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(commands: Commands, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert commands.run([*PRUNE, "--out", run], step_of("search", 3)).code == -signal.SIGKILL
    steps = [
        *[("search", 2)] * 2,
        *[("search", 12)] * 3,
        ("unpruned", 15),
        ("unpruned", 6),
        ("uniform-widths", 16),
        ("dmcp", 14),
    ]
    for stage, step in steps:  # counted from where it goes on
        assert commands.resume(run, step_of(stage, step)).code == -signal.SIGKILL
    assert commands.resume(run, ("dmcp.runs:Run.rewind", "", 1), (REPLACE, "", 1)).code == -signal.SIGKILL
    assert commands.resume(run, ("dmcp.runs:report", "", 1)).code == -signal.SIGKILL
    assert commands.resume(run).code == 0
    assert_same(run, whole)


def test_a_run_killed_when_only_its_checkpoints_are_left_to_remove_is_done(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["trained"], tmp_path / "run")
    assert commands.resume(run, ("dmcp.runs:Run.close", "", 1)).code == -signal.SIGKILL
    end = commands.resume(run)
    assert end.code == 2 and "this run is done" in end.err
    for name in KEPT:
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


def test_only_what_was_left_is_done(commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    assert checkpoints(killed["searching"], "search") == [10, 20]
    run, left = shutil.copytree(killed["searching"], tmp_path / "run"), 2 * EPOCH - 20 + 3 * EPOCH
    assert (
        commands.resume(
            shutil.copytree(killed["searching"], tmp_path / "other"), ("dmcp.checkpoint:Feed.next", "", left)
        ).code
        < 0
    )
    assert commands.resume(run, ("dmcp.checkpoint:Feed.next", "", left + 1)).code == 0
    assert_same(run, whole)


# asked to stop


@pytest.mark.parametrize(
    ("start", "act", "stage", "step"),
    [("", "term", "search", 14), ("searched", "int", "unpruned", 9), ("trained", "term", "dmcp", 5)],
)
def test_a_run_that_is_asked_to_stop(
    commands: Commands,
    killed: dict[str, Path],
    whole: Path,
    tmp_path: Path,
    start: str,
    act: str,
    stage: str,
    step: int,
) -> None:
    run, inside = tmp_path / "run", (step_of(stage, step), (STEP, "", 1))
    if start:
        end = commands.resume(shutil.copytree(killed[start], run), *inside, act=act)
    else:
        end = commands.run([*PRUNE, "--out", run], *inside, act=act)
    assert end.code == 3 and end.out == ""
    asked, sentence = end.err.splitlines()
    assert asked == "asked to stop: the step is finished and saved first"
    assert sentence == (
        f"dmcp: Stopped after step {step + 1}, as asked; everything up to here is saved. "
        f"Go on with: dmcp prune --resume {run}"
    )
    assert checkpoints(run, stage)[-1] == step + 1
    assert not (run / LOCK).exists()
    assert commands.run(sentence.partition("with: dmcp ")[2].split()).code == 0
    assert_same(run, whole)


def test_a_request_at_the_end_of_a_stage_is_kept_for_the_next_one(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["searched"], tmp_path / "run")
    end = commands.resume(run, ("dmcp.retraining:cut", "", 1), act="term")
    assert end.code == 3 and "Stopped after step 1," in end.err and checkpoints(run, "unpruned") == [1]
    assert commands.resume(run).code == 0
    assert_same(run, whole)


def test_a_second_interrupt_does_not_wait(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["searching"], tmp_path / "run")
    end = commands.resume(run, step_of("search", 5), (STEP, "", 1), act="twice")
    assert end.code == 128 + signal.SIGINT and "Traceback" not in end.err
    assert checkpoints(run, "search") == [10, 20] and not (run / LOCK).exists()
    assert commands.resume(run).code == 0
    assert_same(run, whole)


# what stands in the way


def refused(commands: Commands, run: Path, *argv: str) -> str:
    """The one sentence with which a run is refused; nothing in it changes."""
    before = contents(run)
    end = commands.run([*(argv or ["prune"]), "--resume", run])
    assert end.code == 2 and end.out == ""
    (line,) = end.err.splitlines()
    assert line.startswith("dmcp: ")
    assert contents(run) | {LOCK: b""} == before | {LOCK: b""}  # that of the killed process may be there or not
    return line


def test_a_run_goes_on_as_it_was_begun(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["searching"], tmp_path / "run")
    assert "--epochs was 1, is 3." in refused(commands, run, "prune", "--epochs", "3")
    both = refused(commands, run, "prune", "--search-lr", "0.1", "--budget", "40%")
    assert "--budget was '50%', is '40%'; --search-lr was 0.2, is 0.1." in both
    assert "--data was 'digits', is 'cifar10'." in refused(commands, run, "prune", "--data", "cifar10")
    assert f"go on with dmcp prune --resume {run}" in refused(commands, run, "search")
    assert f"go on with dmcp prune --resume {run}" in refused(commands, run, "train")
    end = commands.run([*PRUNE, "--resume", run])  # the same once more is no contradiction
    assert end.code == 0, end.err
    assert_same(run, whole)


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_another_network_data_or_setting_is_refused(
    commands: Commands, killed: dict[str, Path], tmp_path: Path
) -> None:
    run = shutil.copytree(killed["searching"], tmp_path / "run")
    settings = (run / "settings.json").read_text()
    edit(run / "settings.json", lambda it: it.update(model_args=["width=8"]))
    assert "the network is not what it was: fingerprint was" in refused(commands, run)

    (run / "settings.json").write_text(settings)
    draws = np.random.default_rng(0)
    for part in ("train", "test"):
        images, labels = draws.integers(0, 255, (200, 8, 8, 1), np.uint8), np.arange(200) % 10
        np.savez(tmp_path / f"{part}-0.npz", images=images, labels=labels)
    edit(run / "settings.json", lambda it: it.update(data=str(tmp_path)))
    found = refused(commands, run)
    assert "the data is not what it was" in found and "'train': 1415" in found and "'train': 200" in found

    (run / "settings.json").write_text(settings)
    edit(run / "settings.json", lambda it: it["search"].update(budget_weight=0.2))
    end = commands.resume(run)
    assert end.code == 2 and "plan.search.budget_weight was 0.1, is 0.2." in end.err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("width=6", "width=8"),
        pytest.param("3, 2, 1", "3, 1, 1"),
    ],
)
def test_a_network_whose_source_has_changed_is_refused(
    commands: Commands, killed: dict[str, Path], tmp_path: Path, old: str, new: str
) -> None:
    run, source = shutil.copytree(killed["searching"], tmp_path / "run"), commands.folder / "killed_net.py"
    try:
        source.write_text(NET.replace(old, new, 1) + "# longer, so that no compiled file is taken for this one")
        assert "the network is not what it was" in refused(commands, run)
    finally:
        source.write_text(NET)


def test_what_is_no_run_or_is_done_is_refused(commands: Commands, whole: Path, tmp_path: Path) -> None:
    assert f"{tmp_path / 'settings.json'}: cannot be read" in refused(commands, tmp_path)
    assert "cannot be read" in refused(commands, tmp_path / "none")
    (tmp_path / "settings.json").write_text("[]")
    assert "not a file of a run" in refused(commands, tmp_path)
    (tmp_path / "settings.json").write_text('{"command": "prune"}')
    assert "not the settings of a run of this version" in refused(commands, tmp_path)
    stored = json.loads((whole / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(json.dumps(stored | {"train": stored["train"] | {"slimmable": False}}))
    told = refused(commands, tmp_path)
    assert "(Plan.train: TrainConfig.slimmable: 'slimmable'): another version of dmcp began it, or somebody " in told
    assert "has changed it: go on with that version, or start anew in another folder (--out)" in told
    assert f"this run is done; dmcp report {whole}" in refused(commands, whole)


def test_a_run_that_is_done_is_refused_as_such_where_no_lock_can_be_written(
    commands: Commands, whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / LOCK).unlink(missing_ok=True)
    (run / LOCK).mkdir()  # stands for a folder that is read-only, which it is not for root
    end = commands.resume(run)
    assert end.code == 2 and "this run is done; dmcp report" in end.err and "locked" not in end.err


def test_several_seeds_do_not_go_on_with_one_run(commands: Commands, killed: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(killed["trained"], tmp_path / "run")
    end = commands.run(["prune", "--resume", run, "--seeds", "2"], ("dmcp.cli.launch:run_seeds", "", 1))
    assert end.code == 2 and "--seeds" in end.err


def test_one_process_at_a_time(commands: Commands, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = commands.run([*PRUNE, "--out", run], step_of("search", 15), act="stop")
    try:
        assert first.code == -signal.SIGSTOP
        before = contents(run)
        second = commands.resume(run)
        assert second.code == 2 and f"{run} is in use by process {first.pid} on " in second.err
        third = commands.run([*PRUNE, "--out", run])
        assert third.code == 2 and "already holds files" in third.err
        assert contents(run) == before
    finally:
        commands.end(first.pid)
    assert commands.resume(run).code == 0
    assert_same(run, whole)


# damage


def spoil(run: Path, stage: str, number: int) -> Path:
    """Change one byte in the middle of a checkpoint."""
    path = sorted((run / "checkpoints" / stage).glob("step-*"))[number]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def test_a_damaged_checkpoint_is_passed_over(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["searching"], tmp_path / "run")
    path = spoil(run, "search", -1)
    end = commands.resume(run)
    assert end.code == 0
    assert end.err == f"{path} is damaged and was passed over: its checksum is not the one in its name.\n"
    assert_same(run, whole)


def test_when_all_checkpoints_are_damaged_a_person_decides(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["searching"], tmp_path / "run")
    for number in (0, 1):
        spoil(run, "search", number)
    assert "all checkpoints are damaged" in refused(commands, run)
    shutil.rmtree(run / "checkpoints" / "search")  # as the sentence says
    assert commands.resume(run).code == 0
    assert_same(run, whole)


def test_a_damaged_checkpoint_of_a_stage_that_was_done(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["trained"], tmp_path / "run")
    path = spoil(run, "unpruned", -1)
    end = commands.resume(run)
    assert end.code == 0 and f"{path} is damaged and was passed over" in end.err
    assert_same(run, whole)


def test_a_log_with_less_lines_than_its_checkpoint_says_is_refused(
    commands: Commands, killed: dict[str, Path], tmp_path: Path
) -> None:
    run = shutil.copytree(killed["searching"], tmp_path / "run")
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(lines[:12]))
    assert "log.jsonl" in refused(commands, run)


@pytest.mark.parametrize(("start", "stage", "number"), [("searching", "search", 1), ("trained", "dmcp", 2)])
def test_a_full_disk_is_a_sentence_and_the_checkpoint_before_goes_on(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path, start: str, stage: str, number: int
) -> None:
    run = shutil.copytree(killed[start], tmp_path / "run")
    before = contents(run / "checkpoints")
    end = commands.resume(run, save_of(stage, number), act="full")
    assert end.code == 2 and end.out == ""
    (line,) = end.err.splitlines()
    assert re.search(r"step-\d+-\w+\.safetensors: cannot be written \(.+\): free some space", line)
    assert contents(run / "checkpoints").items() >= before.items()
    assert checkpoints(run, stage) == {"search": [10, 20], "dmcp": [10]}[stage]
    assert not list((run / "checkpoints" / stage).glob(".tmp-*"))
    assert commands.resume(run).code == 0
    assert_same(run, whole)


def test_a_disk_that_is_full_for_the_log(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed["searching"], tmp_path / "run")
    end = commands.resume(run, (ADD, "", 4), act="full")
    assert end.code == 2 and "log.jsonl: cannot be written" in end.err
    assert commands.resume(run).code == 0
    assert_same(run, whole)


@pytest.mark.parametrize(("start", "stage", "done"), [("searching", "search", 20), ("trained", "dmcp", 0)])
def test_a_loss_that_is_no_number_leaves_the_last_good_checkpoint(
    commands: Commands, killed: dict[str, Path], whole: Path, tmp_path: Path, start: str, stage: str, done: int
) -> None:
    run = shutil.copytree(killed[start], tmp_path / "run")
    end = commands.resume(run, step_of(stage, 13), ("torch.nn.functional:cross_entropy", "", 1), act="nan")
    assert end.code == 2
    (line,) = end.err.splitlines()
    assert f"step {done + 13} " in line and re.search(r"loss is nan.*(Lower lr|smaller lr)", line)
    assert checkpoints(run, stage) == {"search": [20, 30], "dmcp": [10]}[stage]
    assert commands.resume(run).code == 0
    assert_same(run, whole)


# the other commands and ways


SEARCH = ("search", *COMMON, "--search-epochs", "2", "--holdout", "0.2")
TRAIN = ("train", *COMMON, "--epochs", "2")
RETRAIN = ("prune", *COMMON, "--search-epochs", "2", "--epochs", "2", "--retrain")
CALIBRATE = "dmcp.retraining:recalibrate", "", 1


@pytest.mark.parametrize(
    ("argv", "moment"),
    [
        pytest.param(SEARCH, step_of("search", 23), id="search"),
        pytest.param(SEARCH, ("dmcp.cli.prune:recalibrate", "", 1), id="search, end"),
        pytest.param(TRAIN, step_of("unpruned", 25), id="train"),
        pytest.param(TRAIN, ("dmcp.training:evaluate", "", 1), id="train, test"),
        pytest.param((*RETRAIN, "finetune"), step_of("dmcp", 12), id="finetune"),
        pytest.param((*RETRAIN, "finetune"), CALIBRATE, id="inherit, start"),
        pytest.param((*RETRAIN, "slimmable"), step_of("dmcp", 12), id="slimmable", marks=pytest.mark.slow),
        pytest.param((*RETRAIN, "slimmable"), CALIBRATE, id="slimmable, end"),
        pytest.param((*RETRAIN, "teacher"), step_of("dmcp", 12), id="teacher", marks=pytest.mark.slow),
    ],
)
def test_other_commands_and_ways_go_on_as_well(
    commands: Commands, ends: Callable[..., Path], tmp_path: Path, argv: tuple[str, ...], moment: Moment
) -> None:
    run, end = tmp_path / "run", ends(*argv)
    assert commands.run([*argv, "--out", run], moment).code == -signal.SIGKILL
    resumed = commands.run([argv[0], "--resume", run, "--quiet"])
    assert (resumed.code, resumed.err) == (0, "")
    assert_same(run, end)


def test_a_search_that_is_done_is_refused(commands: Commands, ends: Callable[..., Path], tmp_path: Path) -> None:
    run = shutil.copytree(ends(*SEARCH), tmp_path / "run")
    assert "this run is done" in refused(commands, run, "search")


def test_times_are_of_one_test(commands: Commands, killed: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(killed["trained"], tmp_path / "run")
    assert commands.resume(run, ("dmcp.training:evaluate", "", 3)).code == -signal.SIGKILL
    assert commands.resume(run).code == 0
    names = [json.loads(line)["name"] for line in (run / "times.jsonl").read_text().splitlines()]
    assert names == ["unpruned", "uniform", "dmcp"]


if __name__ == "__main__":
    serve()
