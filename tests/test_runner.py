"""Comparisons: which runs there are, what is run again, runs that are killed, the table, and the command."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typed import command

import dmcp
from dmcp.cli import prune
from dmcp.compare import runner
from dmcp.compare.methods import METHODS
from dmcp.compare.runner import Comparison, Inputs, Network, PlannedRun, Protocol, plan, run, write_table
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.errors import DmcpError, FileError
from dmcp.runs import Run
from dmcp.runtime.io import Lock
from dmcp.settings import TrainConfig
from dmcp.training import Runtime

TWO = Comparison(
    protocol=Protocol(
        model="tiny",
        data="digits",
        batch=80,
        train=TrainConfig(epochs=1, lr=0.8, warmup_epochs=0),
        finetune_epochs=1,
    ),
    budgets=("50%", "params:40%"),
    methods=("uniform", "l1", "amc", "slimming", "dmcp-direct"),
    seeds=(3, 4),
    settings={"amc": {"episodes": 5}, "dmcp": {"epochs": 2}},
)
SMALL = replace(TWO, budgets=("50%",), methods=("uniform", "amc"), seeds=(0,), settings={})
ALL = ["amc-50%-seed0", "base-seed0", "uniform-50%-seed0", "unpruned-seed0"]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    second = [nn.Conv2d(6, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    model = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 10))
    data = load("digits")
    return Inputs(
        model=model,
        graph=dmcp.trace(model, torch.zeros(2, *data.shape)),
        images=data.train,
        train=make_loader(data.train, 80, True, 0),
        test=make_loader(data.test, 80, False, 0),
        device=torch.device("cpu"),
        facts={"fingerprint": "a"},
    )


def planned(it: Comparison, inputs: Inputs) -> dict[str, PlannedRun]:
    return {one.name: one for one in plan(it, inputs)}


# which runs there are


def test_runs_come_after_what_they_start_from(inputs: Inputs) -> None:
    found = planned(TWO, inputs)
    seen = {""}
    for it in [*found.values(), *runner.longest_first([*found.values()])]:
        assert it.uses in seen
        seen.add(it.name)
    uses = {it.name: it.uses for it in found.values()}
    assert uses["uniform-50%-seed3"] == uses["dmcp-50%-seed3"] == uses["unpruned-seed4"] == ""
    assert uses["l1-50%-seed3"] == "unpruned-seed3" and uses["amc-params=40%-seed4"] == "base-seed4"
    assert uses["slimming-50%-seed4"] == "slimming-seed4"
    assert uses["dmcp-direct-params=40%-seed3"] == "dmcp-params=40%-seed3" and len(found) == 2 * (3 + 2 * 6)
    amc, search = found["amc-params=40%-seed4"], found["dmcp-50%-seed3"]
    assert (amc.method, amc.seed, amc.budget, amc.settings) == ("amc", 4, "params:40%", {"episodes": 5})
    assert search.settings == {"epochs": 2} and not found["l1-50%-seed3"].scratch
    alone = replace(TWO, methods=("l1",), budgets=("50%",), unpruned=False, settings={})  # what is the same is run once
    assert {it.row for it in planned(alone, inputs).values()} == {"unpruned", "l1-50%", "uniform-50%"}
    untuned = replace(alone, protocol=replace(TWO.protocol, finetune_epochs=0))
    assert {it.method for it in planned(untuned, inputs).values()} == {"uniform"}
    widths = dmcp.uniform(inputs.graph, "50%")  # given ones are rows at the budgets that they use
    found = planned(replace(SMALL, methods=("uniform",), budgets=("50%", "90%"), widths={"hand": widths}), inputs)
    assert [it.budget for it in found.values() if it.method == "=hand"] == ["50%"]
    assert found["hand-50%-seed0"].settings == {"widths": dict(widths)}


def test_epochs_and_order(inputs: Inputs) -> None:
    recipe = replace(TWO.protocol, train=replace(TWO.protocol.train, epochs=9), finetune_epochs=3)
    it = replace(SMALL, methods=tuple(METHODS), protocol=recipe, settings={"metapruning": {"epochs": 4}})
    found = planned(it, inputs)
    epochs = {name.removesuffix("-seed0"): runner.epochs_of(one) for name, one in found.items()}
    assert epochs["unpruned"] == epochs["base"] == epochs["uniform-50%"] == {"training": 9}
    assert [epochs[name]["search"] for name in ("slimming", "autoslim", "metapruning")] == [9, 40, 4]
    assert epochs["sfp-50%"] == {"search": 9} and epochs["l1-50%"] == {"fine-tuned": 3}
    assert epochs["slimming-50%"] == {"training": 9, "fine-tuned": 9} and epochs["amc-50%"]["fine-tuned"] == 3
    assert epochs["autoslim-50%"] == {"training": 9, "slimmable": 9}
    assert epochs["dmcp-50%"] == {"search": 30, "training": 9, "slimmable": 9}
    names = [one.row for one in runner.longest_first([*found.values()])]
    assert names[0] == "dmcp-50%" and names.index("uniform-slimmable-50%") < names.index("uniform-50%")


@pytest.mark.parametrize(
    "changes",
    [
        {"budgets": ()},
        {"methods": ("=../evil",)},
        {"widths": {"random": {}}},
        {"settings": {"amc": {"episods": 1}}},
        {"settings": {"dmcp": {"more": {"max_channels": 3}}}, "protocol": replace(TWO.protocol, max_channels={"0": 5})},
        {"scratch": False},
        {"budgets": ("50%", "0.5")},
        {"widths": {"hand": {"x": 3}}},
        {"widths": {"hand": {"0": 6}}},
        {"protocol": replace(TWO.protocol, batch=5000)},
        {"protocol": replace(TWO.protocol, max_channels={"0": 2}), "budgets": ("95%",)},
    ],
    ids=lambda it: str(it)[:40],
)
def test_comparisons_that_make_no_sense(inputs: Inputs, changes: dict[str, Any]) -> None:
    with pytest.raises(DmcpError):
        plan(replace(TWO, **changes), inputs)


# running them


class Fake:
    """Stands for the processes: notes which runs are asked for, and leaves finished ones; some fail."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.failing = folder, list[str](), set[str]()

    def __call__(self, runs: Sequence[PlannedRun]) -> dict[str, str]:
        self.calls = [it.name for it in runs if it.name not in self.failing]
        for it in runs:
            if it.name in self.calls:
                stored = runner.read_plan(self.folder / runner.PLANS / f"{it.name}.json")
                assert stored == it
                finish(self.folder, it, [] if it.prepares else [Network(accuracy=0.5, macs=50, params=7)])
        return dict.fromkeys(self.failing, "no luck")


def finish(folder: Path, it: PlannedRun, networks: Sequence[Network], seconds: float = 1, passes: int = 10) -> None:
    place = folder / it.name
    place.mkdir(parents=True, exist_ok=True)
    (place / "settings.json").write_text("{}")
    facts = {"full_macs": 100, "seconds": seconds, "sample_passes": passes, "device": "cpu"}
    (place / "result.json").write_text(json.dumps({"run": asdict(it), "networks": [*map(asdict, networks)], **facts}))


def test_runs_are_done_once_and_go_on(inputs: Inputs, tmp_path: Path) -> None:
    fake, runs = Fake(tmp_path / "runs"), plan(SMALL, inputs)
    fake.failing = {"base-seed0", "amc-50%-seed0"}
    assert run(runs, fake.folder, fake).keys() == fake.failing
    table = write_table(fake.folder, runs)
    assert table and [line["method"] for line in table["lines"]] == ["unpruned", "uniform"]
    fake.failing = set()
    assert run(runs, fake.folder, fake) == {} and sorted(fake.calls) == ALL[:2]
    assert run(runs, fake.folder, fake) == {} and fake.calls == []
    (fake.folder / "base-seed0" / "checkpoints").mkdir()  # not at its end
    run(runs, fake.folder, fake)
    assert fake.calls == ["base-seed0"]
    (fake.folder / "base-seed0" / "checkpoints").rmdir()
    more = plan(replace(SMALL, methods=("uniform", "amc", "random"), seeds=(0, 1)), inputs)
    run(more, fake.folder, fake)
    added = ["random-50%-seed0", "random-50%-seed1", *(name.replace("seed0", "seed1") for name in ALL)]
    assert sorted(fake.calls) == sorted(added)
    assert {runner.state_of(it, fake.folder) for it in more} == {"done"}


@pytest.mark.parametrize(
    ("changes", "facts", "words"),
    [
        ({"protocol": replace(SMALL.protocol, train=TrainConfig(epochs=2))}, "a", "train"),
        ({"settings": {"amc": {"episodes": 6}}, "seeds": (5,)}, "a", "amc-50%-seed0 .*settings"),  # of another seed
        ({}, "b", "facts"),  # the network is another one by the same name
    ],
)
def test_other_settings_are_refused_and_nothing_is_written(
    inputs: Inputs, tmp_path: Path, changes: dict[str, Any], facts: str, words: str
) -> None:
    fake = Fake(tmp_path)
    run(plan(SMALL, inputs), tmp_path, fake)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    with pytest.raises(FileError, match=words):
        run(plan(replace(SMALL, **changes), replace(inputs, facts={"fingerprint": facts})), tmp_path, fake)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before
    with Lock(tmp_path), pytest.raises(FileError):
        run(plan(SMALL, inputs), tmp_path, fake)


# one run, killed at any moment


class Killed(BaseException):
    """Stands for a kill."""


class Files(Run):
    """A run folder in which the write of one file kills."""

    def write(self, name: str, data: Any) -> None:
        super().write(name, data)
        if name == FATAL.get("file"):
            raise Killed


FATAL: dict[str, str] = {}
METHODS_RUN = {"amc": {"warmup": 3, "episodes": 4}, "dmcp": {"epochs": 2, "groups": 3}}
TABLE = replace(SMALL, methods=("l1", "slimming", "amc", "sfp", "dmcp", "dmcp-direct"), settings=METHODS_RUN)
KEPT = ("log.jsonl", "model.safetensors", "widths.json", "search.safetensors", "choice.json", "choice.safetensors")


def do(it: PlannedRun, inputs: Inputs, folder: Path, stage: str = "", steps: int = 0) -> None:
    """Do a run, as a session does; it is killed after so many events of a stage."""
    left, files = iter(range(steps)), Files(folder)
    folder.mkdir(exist_ok=True)

    def hear(event: Any) -> None:
        files.on_event(event)
        if stage == event.stage and next(left, None) is None:
            raise Killed

    files.rewind()
    runtime = Runtime(checkpointer=files.checkpointer({}, every_steps=10), on_event=hear)
    runner.OneRun(it, inputs, files, runtime).do()


@pytest.fixture(scope="module")
def whole(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, which nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    for it in plan(TABLE, inputs):
        do(it, inputs, folder / it.name)
        assert runner.is_done(folder / it.name)
    return folder


@pytest.mark.parametrize(
    ("name", "stage", "steps"),
    [
        ("dmcp-50%", "search", 24),
        ("dmcp-50%", "choice.json", 0),
        ("dmcp-50%", "dmcp", 4),
        ("dmcp-50%", "dmcp, own", 14),
        ("dmcp-50%", "test", 1),
        ("sfp-50%", "choosing", 12),
        ("slimming", "choosing", 12),
        ("slimming-50%", "slimming, own", 6),
        ("amc-50%", "amc", 15),
        ("base", "base", 12),
        ("unpruned", "spent.json", 0),
    ],
)
def test_a_killed_run_ends_in_the_same_bits(
    inputs: Inputs, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stage: str, steps: int
) -> None:
    it = planned(TABLE, inputs)[f"{name}-seed0"]
    if it.uses:
        shutil.copytree(whole / it.uses, tmp_path / it.uses)
    monkeypatch.setitem(FATAL, "file", stage)
    with pytest.raises(Killed):
        do(it, inputs, tmp_path / it.name, stage, steps)
    assert not runner.is_done(tmp_path / it.name)
    monkeypatch.delitem(FATAL, "file")
    if stage == "amc":  # a choice is not made again
        shutil.rmtree(tmp_path / it.uses)
        with pytest.raises(FileError, match="base-seed0"):  # but the first time it is needed
            do(it, inputs, tmp_path / "again")
    do(it, inputs, tmp_path / it.name)
    folders = tmp_path / it.name, whole / it.name
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    for file in {*KEPT, "prepared.safetensors"} & {*names[0]}:
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file
    one, other = (json.loads((folder / "result.json").read_text()) | {"seconds": 0} for folder in folders)
    assert one == other


# the table

DAMAGED = "uniform-50%-seed0/result.json"


def write_results(folder: Path, inputs: Inputs) -> list[PlannedRun]:
    """Two seeds; of the last method only one is there."""
    it = replace(TWO, budgets=("50%",), methods=("uniform", "l1", "amc", "dmcp-direct"), seeds=(0, 1), settings={})
    runs = planned(it, inputs)

    def done(name: str, seconds: float, passes: int, *networks: tuple[float, int, int, str]) -> None:
        tested = [Network(accuracy=a, macs=macs, params=params, training=way) for a, macs, params, way in networks]
        finish(folder, runs[name], tested, seconds, passes)

    same, tuned = "same recipe", "fine-tuned"
    for seed, up in ((0, 0.0), (1, 0.02)):
        done(f"unpruned-seed{seed}", 100, 5_000_000, (0.9 + up, 100, 77, same))
        done(f"base-seed{seed}", 90, 4_000_000)
        done(f"uniform-50%-seed{seed}", 0.1, 0, (0.8 + up, 49, 40, same))
        done(f"l1-50%-seed{seed}", 2, 0, (0.7 + 2 * up, 49, 40, tuned))
        both = [(0.85 + up, 50 - seed, 30 + seed, same), (0.8, 50 - seed, 30 + seed, tuned)]
        done(f"amc-50%-seed{seed}", 30 + 20 * seed, 1_000_000, *both)
    done("dmcp-50%-seed1", 300, 9_000_000, (0.91, 48, 35, same))
    done("dmcp-direct-50%-seed1", 1, 12_740, (0.92, 49, 36, same))
    return [*runs.values()]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def test_the_table_has_the_figures_of_the_runs(inputs: Inputs, tmp_path: Path) -> None:
    data = write_table(tmp_path, write_results(tmp_path, inputs))
    assert data is not None
    page = cells((tmp_path / "compare.md").read_text())
    head = page.index(["method", "budget", "points above uniform, same recipe", "its own training"])
    assert page[1:head] == [
        ["unpruned", "100%", "91.00 ± 1.41 (2)", "", "100.0%", "77", "0", "0"],
        ["uniform", "50%", "81.00 ± 1.41 (2)", "", "49.0%", "40", "0", "0"],
        ["l1", "50%", "= uniform", "72.00 ± 2.83 (2), fine-tuned", "49.0%", "40", "102", "5.0"],
        ["amc", "50%", "86.00 ± 1.41 (2)", "80.00 ± 0.00 (2), fine-tuned", "49.0%–50.0%", "30–31", "130", "5.0"],
        ["dmcp", "50%", "91.00 (1)", "", "48.0%", "35", "300", "9.0"],
        ["dmcp-direct", "50%", "92.00 (1)", "", "49.0%", "36", "301", "9.0"],
    ]
    assert page[head + 1 :] == [  # paired by seed
        ["l1", "50%", "= uniform", "-9.00 ± 1.41 (2)"],
        ["amc", "50%", "+5.00 ± 0.00 (2)", "-1.00 ± 1.41 (2)"],
        ["dmcp", "50%", "+9.00 (1)", ""],
        ["dmcp-direct", "50%", "+10.00 (1)", ""],
    ]
    line = {(it["method"], it["own"]): it for it in json.loads((tmp_path / "compare.json").read_text())["lines"]}
    assert line["amc", True]["way"] == "fine-tuned" and line["l1", False]["same_as"] == "uniform"
    assert (line["amc", False]["seeds"], line["amc", False]["macs"]) == ([0, 1], [49, 50])
    networks = [*csv.DictReader((tmp_path / "compare.csv").read_text().splitlines())]
    costs = {(it["method"], it["training"], it["seed"]): (it["search_seconds"], it["sample_passes"]) for it in networks}
    assert costs["amc", "same recipe", "1"] == costs["amc", "fine-tuned", "1"] == ("140.0", "5000000.0")
    tex = (tmp_path / "compare.tex").read_text()
    assert r"l1 & 50\% & = uniform & 72.00 $\pm$ 2.83 (2), fine-tuned" in tex and r"$-$9.00" in tex
    assert (tmp_path / "compare.svg").read_text().startswith("<?xml")
    assert write_table(tmp_path) == data  # by the folder alone
    shutil.rmtree(tmp_path / "l1-50%-seed1")
    again = write_table(tmp_path)
    assert again and "| = uniform " in (tmp_path / "compare.md").read_text()


def test_a_table_is_of_one_protocol_and_damage_does_not_stop_it(inputs: Inputs, tmp_path: Path) -> None:
    assert write_table(tmp_path) is None
    run(plan(SMALL, inputs), tmp_path, Fake(tmp_path))
    for name, text in (("commands.jsonl", "5\n\xff"), ("compare.json", '{"speeds": 3}'), (DAMAGED, '{"run": 3}')):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        assert write_table(tmp_path)
        assert ("uniform" in (tmp_path / "compare.md").read_text()) is (name != DAMAGED)
    other = replace(SMALL, protocol=replace(SMALL.protocol, batch=100), seeds=(5,))
    run(plan(other, inputs), tmp_path, Fake(tmp_path))
    data = write_table(tmp_path, plan(SMALL, inputs))
    assert data and data["settings"]["seeds"] == [0]
    with pytest.raises(FileError, match="batch"):
        write_table(tmp_path)


# the command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs are done in this process: new ones would import torch for most of the time."""

    def run_here(commands: Sequence[prune.Command], *_: Any, **__: Any) -> dict[str, str]:
        return {it.name: f"exit code {code}" for it in commands if (code := command(*it.words))}

    monkeypatch.setattr(prune, "run_side_by_side", run_here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


WORDS = "compare --model digits:resnet --data digits --seeds 1 --batch 708 --device cpu --epochs 1 --quiet --out table"


def typed(*more: str) -> int:
    return command(*WORDS.split(), "--methods", "uniform,l1", *more)


def test_the_command_fills_a_folder(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("--dry-run") == 0 and ["l1-50%-seed0", "missing", "1 fine-tuned"] in cells(capfd.readouterr().out)
    assert command("compare", "--gather", "table") == 2
    capfd.readouterr()
    assert typed("--set", "l1.power=2", "--json") == 0
    table = json.loads((here / "table" / "compare.json").read_text())
    assert json.loads(capfd.readouterr().out) == {"folder": "table", **table}
    assert [it["method"] for it in table["lines"]] == ["unpruned", "uniform", "l1", "l1"]
    assert all(it["ms"] > 0 and 0 < it["mean"] < 1 for it in table["lines"])
    assert table["settings"]["set"] == {"l1": {"power": 2}} and table["settings"]["devices"] == ["cpu"]
    assert "dmcp compare --model digits:resnet" in table["commands"][0]
    before = {path: path.read_bytes() for path in (here / "table").glob("*-seed0/*")}

    assert typed("--set", "l1.power=2") == 0  # nothing is left to do, and no speed is measured again
    printed = capfd.readouterr().out
    assert printed == (here / "table" / "compare.md").read_text() + "\ntable\n"
    assert "digits:resnet on digits: 1 epoch, batch 708, " in printed and "points above uniform" in printed
    assert {path: path.read_bytes() for path in (here / "table").glob("*-seed0/*")} == before
    assert json.loads((here / "table" / "compare.json").read_text())["lines"] == table["lines"]
    (here / "table").rename(here / "elsewhere")
    assert command("compare", "--gather", "elsewhere", "--json") == 0
    assert json.loads(capfd.readouterr().out)["lines"] == table["lines"]
    (here / "elsewhere").rename(here / "table")
    assert typed("--set", "l1.power=2", "--lr", "0.5") == 2 and "other settings (" in capfd.readouterr().err
    assert command("evaluate", "table/l1-50%-seed0", "--json") == 0
    assert json.loads(capfd.readouterr().out)["networks"][0]["accuracy"] == pytest.approx(table["lines"][3]["mean"])
    assert command("runs", "table", "--json") == 0
    runs = json.loads(capfd.readouterr().out)
    assert {it["state"] for it in runs} == {"done"} and {it["command"] for it in runs} == {"compare"}


def test_runs_that_fail_are_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "failing.py").write_text("def mine(problem):\n    return 1 / 0\n")
    assert typed("--methods", "uniform,failing:mine", "--no-unpruned") == 2
    printed, told = capfd.readouterr()
    assert "uniform" in printed and "1 runs failed" in told and "mine-50%-seed0" in told
    assert "ZeroDivisionError" in told


@pytest.mark.parametrize(
    "more",
    [
        "--set l1.power=1 --set l1.power=2",
        "--widths hand=none.json",
        "--widths hand=wrong.json",
        "--widths hand=good.json --widths hand=good.json",
        "--widths hand=good.json",
        "--min-channels 16",
    ],
)
def test_mistakes(here: Path, capfd: pytest.CaptureFixture[str], more: str) -> None:
    (here / "wrong.json").write_text("[1]")
    (here / "good.json").write_text('{"layer1.0.conv1": 7}')
    assert typed(*more.split()) == 2
    assert capfd.readouterr().err and not (here / "table").exists()
