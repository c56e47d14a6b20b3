"""A cell that is killed at any moment goes on to the same bits; one that is done or of another plan is left alone.

The cells are the real command in forked children of test_resume, each of which interrupts itself at an exact moment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_resume
from test_resume import ADD, NET, REPLACE, STEP, Commands, Moment, checkpoints, contents, save_of, step_of

from dmcp.cli.job import Job
from dmcp.compare.runner import CHOICE, CHOSEN, COST, Comparison, Task, is_done, tasks
from dmcp.runs import PREPARED
from dmcp.settings import Engine, TrainConfig

METHODS = ("slimming", "amc", "sfp", "dmcp")
TABLE = Comparison(
    job=Job(model="killed_net:build", data="digits", batch=80, device="cpu"),
    engine=Engine(),
    train=TrainConfig(epochs=1, lr=0.8, warmup_lr=0.2, warmup_epochs=0.5),
    budgets=("50%",),
    methods=METHODS,
    seeds=(0,),
    settings={"amc": {"warmup": 3, "episodes": 4}, "dmcp": {"epochs": 2, "groups": 3}},
    fine_tune_epochs=1,
)
DMCP, SFP, SLIMMING, AMC = "dmcp-50%-seed0", "sfp-50%-seed0", "slimming-50%-seed0", "amc-50%-seed0"
KEPT = ("log.jsonl", "model.safetensors", "widths.json", "search.safetensors", "search.json", CHOICE, CHOSEN, PREPARED)
WRITE = "dmcp.runs:Run.write"
AGAIN = "start the dmcp compare that this cell is of again."


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    """The cells by name, each with a file of its plan and checkpoints after every tenth step."""
    return {task.name: replace(task, plan=replace(task.plan, every_steps=10)) for task in tasks(TABLE)}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("net")
    (folder / "killed_net.py").write_text(NET)
    alone = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # children by fork: none can use a GPU
    command, pipe = [sys.executable, "-W", "error", test_resume.__file__], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=alone) as server:
        yield Commands(server, folder)
        assert server.stdin is not None
        server.stdin.close()


def write_plan(task: Task, folder: Path, **changes: Any) -> Path:
    path = folder / f"{task.name}.json"
    path.write_text(json.dumps(replace(task.plan, **changes).to_json()))
    return path


@pytest.fixture(scope="module")
def whole(commands: Commands, plans: dict[str, Task], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cells, which nothing interrupted."""
    folder = tmp_path_factory.mktemp("unprunable")
    for task in plans.values():
        end = commands.run(["cell", write_plan(task, folder), folder / task.name])
        assert (end.code, end.out, end.err) == (0, "", "")
        assert is_done(folder / task.name)
    return folder


@pytest.fixture
def begin(commands: Commands, plans: dict[str, Task], whole: Path, tmp_path: Path) -> Any:
    """Starts a cell in a folder of the test, beside those that it needs."""

    def run(name: str, *moments: Moment, **how: Any) -> test_resume.End:
        for needed in plans[name].after:
            if not (tmp_path / needed).exists():
                shutil.copytree(whole / needed, tmp_path / needed)
        return commands.run(["cell", write_plan(plans[name], tmp_path), tmp_path / name], *moments, **how)

    return run


def assert_same(run: Path, whole: Path) -> None:
    """All that a cell leaves is the same, bit for bit; but for its times and settings."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (run, whole)]
    assert names[0] == names[1]
    for name in {*KEPT} & {*names[0]}:
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    passes = [json.loads((folder / COST).read_text())["sample_passes"] for folder in (run, whole)]
    assert passes[0] == passes[1]


# killed


KILLS: dict[tuple[str, str], tuple[Moment, ...]] = {
    (DMCP, "choosing, in its search"): (step_of("search", 25),),
    (DMCP, "chosen, before that is written"): ((WRITE, CHOICE, 1),),
    (DMCP, "chosen and written, but not noted"): (save_of("choice", 1),),
    (DMCP, "noted, before the checkpoint is renamed"): (save_of("choice", 1), (REPLACE, "", 1)),
    (DMCP, "final training, before its first checkpoint"): (step_of("dmcp", 4),),
    (DMCP, "final training, inside a step"): (step_of("dmcp", 12), (STEP, "", 1)),
    (DMCP, "own training, before its first checkpoint"): (step_of("dmcp,-own", 3),),
    (DMCP, "own training, after it"): (step_of("dmcp,-own", 14),),
    (DMCP, "test, between two networks"): (("dmcp.training:evaluate", "", 2),),
    (DMCP, "before the network is saved"): (("dmcp.compare.runner:save", "", 1),),
    (DMCP, "weights renamed, widths not"): (("dmcp.compare.runner:save", "", 1), (REPLACE, "", 2)),
    (DMCP, "before it is closed"): (("dmcp.runs:Run.close", "", 1),),
    (SFP, "choosing, which trains"): (step_of("sfp,-choosing", 12),),
    (SLIMMING, "own training, before its first checkpoint"): (step_of("slimming,-own", 6),),
    (SLIMMING, "own training, after it"): (step_of("slimming,-own", 13),),
    (AMC, "choosing, among the lines of its log"): ((ADD, "log.jsonl", 5),),
    (AMC, "final training"): (step_of("amc", 15),),
    (AMC, "own training"): (step_of("amc,-own", 15),),
    ("slimming-seed0", "a network that is prepared"): (step_of("slimming,-choosing", 12),),
    ("base-seed0", "before its cost is written"): ((WRITE, COST, 1),),
    ("unpruned-seed0", "training"): (step_of("unpruned", 12),),
}


QUICK = {  # one of each kind; the others take a minute together
    (DMCP, "choosing, in its search"),
    (DMCP, "chosen and written, but not noted"),
    (DMCP, "own training, after it"),
    (SLIMMING, "own training, before its first checkpoint"),
    (AMC, "choosing, among the lines of its log"),
    (AMC, "final training"),
    ("slimming-seed0", "a network that is prepared"),
}


@pytest.mark.parametrize(
    ("name", "moment"), [pytest.param(*it, marks=() if it in QUICK else pytest.mark.slow) for it in KILLS]
)
def test_a_killed_cell_ends_in_the_same_bits(begin: Any, whole: Path, tmp_path: Path, name: str, moment: str) -> None:
    assert begin(name, *KILLS[name, moment]).code == -signal.SIGKILL
    assert not is_done(tmp_path / name)
    end = begin(name)
    assert (end.code, end.err) == (0, "")
    assert_same(tmp_path / name, whole / name)


@pytest.mark.slow
def test_a_cell_that_is_killed_again_and_again(begin: Any, whole: Path, tmp_path: Path) -> None:
    for moment in (step_of("search", 13), save_of("choice", 1), step_of("dmcp", 11), step_of("dmcp,-own", 11)):
        assert begin(DMCP, moment).code == -signal.SIGKILL
    assert checkpoints(tmp_path / DMCP, "choice") == [1]
    assert begin(DMCP).code == 0
    assert_same(tmp_path / DMCP, whole / DMCP)


def test_a_choice_is_not_made_again(begin: Any, whole: Path, tmp_path: Path) -> None:
    assert begin(AMC, step_of("amc", 5)).code == -signal.SIGKILL
    before = (tmp_path / AMC / COST).read_bytes()
    shutil.rmtree(tmp_path / "base-seed0")
    shutil.copytree(whole / "unpruned-seed0", tmp_path / "base-seed0")  # no network to choose in
    assert begin(AMC).code == 0
    assert_same(tmp_path / AMC, whole / AMC)
    assert (tmp_path / AMC / COST).read_bytes() == before


def test_a_cell_that_is_asked_to_stop(begin: Any, whole: Path, tmp_path: Path) -> None:
    end = begin(DMCP, step_of("dmcp", 5), (STEP, "", 1), act="term")
    assert end.code == 3 and checkpoints(tmp_path / DMCP, "dmcp") == [6]
    assert end.err.endswith("everything up to here is saved. The command that started it goes on with it.\n")
    assert begin(DMCP).code == 0
    assert_same(tmp_path / DMCP, whole / DMCP)


# refused


@pytest.mark.parametrize("name", [DMCP, "slimming-seed0", "unpruned-seed0"])
def test_a_cell_that_is_done_is_not_run_again(begin: Any, whole: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole / name, tmp_path / name)
    before = contents(tmp_path / name)
    end = begin(name)
    assert (end.code, end.out) == (2, "") and "this run is done" in end.err and end.err.count("\n") == 1
    assert contents(tmp_path / name) == before


@pytest.mark.parametrize("moment", [("dmcp.searching.search:Steps.train_weights", "", 1), step_of("search", 25)])
def test_a_cell_of_another_plan_is_refused(
    begin: Any, commands: Commands, plans: dict[str, Task], whole: Path, tmp_path: Path, moment: Moment
) -> None:
    """Before its first checkpoint and after it."""
    assert begin(DMCP, moment).code == -signal.SIGKILL
    before = contents(tmp_path / DMCP)
    other = write_plan(plans[DMCP], tmp_path, train=replace(TABLE.train, epochs=2))
    end = commands.run(["cell", other, tmp_path / DMCP])
    assert (end.code, end.out) == (2, "")
    assert end.err == (
        f"dmcp: {tmp_path / DMCP} was begun with another plan than {other}: "
        "go on with that one, or remove the folder.\n"
    )
    assert contents(tmp_path / DMCP) == before
    assert begin(DMCP).code == 0
    assert_same(tmp_path / DMCP, whole / DMCP)


def test_a_cell_without_what_it_needs_says_so(commands: Commands, plans: dict[str, Task], tmp_path: Path) -> None:
    for name in (AMC, SLIMMING):
        end = commands.run(["cell", write_plan(plans[name], tmp_path), tmp_path / name])
        assert (end.code, end.out) == (2, "")
        assert end.err.endswith(f"the network that this cell starts from is not there: {AGAIN}\n")


def test_a_cell_whose_network_nobody_would_train_says_so(
    commands: Commands, plans: dict[str, Task], tmp_path: Path
) -> None:
    cell = plans[DMCP].plan.cell
    assert cell is not None
    path = write_plan(plans[DMCP], tmp_path, cell=replace(cell, method="uniform", settings={}, scratch=False))
    end = commands.run(["cell", path, tmp_path / "cell"])
    assert end.code == 2 and "uniform has no training of its own" in end.err


def test_a_cell_of_an_unknown_method_says_so(commands: Commands, plans: dict[str, Task], tmp_path: Path) -> None:
    for name, words in (
        ("dmpc", "There is no method 'dmpc': did you mean dmcp?"),
        ("nowhere_at_all:mine", "nowhere_at_all:mine: nowhere_at_all cannot be imported: ModuleNotFoundError"),
    ):
        cell = plans[DMCP].plan.cell
        assert cell is not None
        path = write_plan(plans[DMCP], tmp_path, cell=replace(cell, method=name, settings={}))
        end = commands.run(["cell", path, tmp_path / name.partition(":")[0]])
        assert end.code == 2 and words in end.err and "this is a bug" not in end.err


# what others see of it


def test_cells_are_runs_like_others(commands: Commands, whole: Path, tmp_path: Path) -> None:
    end = commands.run(["runs", whole, "--json"])
    assert (end.code, end.err) == (0, "")
    found = {run["name"]: run for run in json.loads(end.out)}
    assert sorted(found) == sorted(path.name for path in whole.iterdir() if path.is_dir())
    filled = [found[name] for name in (DMCP, SFP, SLIMMING, AMC)]
    assert all(run["state"] == "done" and 0.4 < run["macs_share"] <= 0.5 for run in filled)
    assert {run["budget"] for run in filled} == {"50%"} and {run["command"] for run in found.values()} == {"cell"}
    end = commands.run(
        ["report", *sorted(path for path in whole.iterdir() if path.is_dir()), "--out", tmp_path / "all"]
    )
    assert (end.code, end.err) == (0, "")
    page = (tmp_path / "all").read_text()
    assert all(name in page for name in found) and 'class="state damaged"' not in page


def test_prepared_cells_are_listed_as_done(commands: Commands, whole: Path) -> None:
    states = {run["name"]: run["state"] for run in json.loads(commands.run(["runs", whole, "--json"]).out)}
    assert states["base-seed0"] == states["slimming-seed0"] == "done"


def test_the_network_of_a_cell_can_be_tested_and_its_search_sampled(commands: Commands, whole: Path) -> None:
    end = commands.run(["evaluate", whole / DMCP, "--json"])
    assert (end.code, end.err) == (0, "")
    lines = map(json.loads, (whole / DMCP / "log.jsonl").read_text().splitlines())
    (line,) = [line for line in lines if line.get("name") == "dmcp"]
    assert json.loads(end.out)["networks"][0]["accuracy"] == pytest.approx(line["accuracy"])
    end = commands.run(["sample", whole / DMCP, "--json"])
    assert (end.code, end.err) == (0, "")
