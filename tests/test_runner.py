"""Comparisons: which runs there are, what is run again, runs that are killed, the table, and the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Killed, command, compare, table_cells
from torch import nn

from dmcp.cli.compare import subject_of
from dmcp.cli.job import open_job
from dmcp.compare.methods import Own
from dmcp.compare.protocol import Comparison, PlannedRun, Protocol, Subject, begin, is_done, plan, read_plan
from dmcp.compare.runner import OneRun
from dmcp.compare.table import write_table
from dmcp.errors import DmcpError, FileError
from dmcp.runs.config import RunConfig
from dmcp.runs.records import Row
from dmcp.runs.writing import Run
from dmcp.runtime.io import Lock
from dmcp.settings import TrainConfig
from dmcp.training.loop import Runtime

pytestmark = pytest.mark.usefixtures("quick_commands")


def tiny(num_classes: int) -> nn.Module:
    """The network of the runs below."""
    first = [nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    second = [nn.Conv2d(6, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, num_classes))


CONFIG = RunConfig(
    command="compare",
    model="test_runner:tiny",
    data="digits",
    batch=80,
    device="cpu",
    holdout=0.1,
    train=TrainConfig(epochs=1, lr=0.8, warmup_epochs=0, warmup_lr=0.2, weight_decay=1e-4),
)
TWO = Comparison(
    protocol=Protocol(config=CONFIG, facts={"fingerprint": "a"}, finetune_epochs=1),
    budgets=("50%", "params:40%"),
    methods=("uniform", "l1", "slimming", "dmcp"),
    seeds=(3, 4),
    settings={"slimming": {"sparsity": 0.1}, "dmcp": {"epochs": 2}},
)
SMALL = replace(TWO, budgets=("50%",), methods=("uniform", "slimming"), seeds=(0,), settings={})
ALL = ["slimming-50%-seed0", "slimming-seed0", "uniform-50%-seed0", "unpruned-seed0"]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(open_job(replace(CONFIG, holdout=0.0)))


def planned(it: Comparison, subject: Subject) -> dict[str, PlannedRun]:
    return {one.name: one for one in plan(it, subject)}


def changed(**changes: Any) -> Protocol:
    """The protocol with other settings of the run."""
    return replace(TWO.protocol, config=replace(CONFIG, **changes))


# which runs there are


def test_runs_come_after_what_they_start_from(subject: Subject) -> None:
    found = planned(TWO, subject)
    seen = {""}
    for it in found.values():
        assert it.uses in seen
        seen.add(it.name)
    uses = {it.name: it.uses for it in found.values()}
    assert uses["uniform-50%-seed3"] == uses["dmcp-50%-seed3"] == uses["unpruned-seed4"] == ""
    assert uses["l1-50%-seed3"] == "unpruned-seed3" and uses["slimming-params=40%-seed4"] == "slimming-seed4"
    assert len(found) == 2 * (2 + 2 * 4)
    one = found["slimming-params=40%-seed4"]
    assert (one.method, one.seed, one.budget, one.settings) == ("slimming", 4, "params:40%", {"sparsity": 0.1})
    assert one.scratch and not found["l1-50%-seed3"].scratch
    used, tuned = (found[f"{name}-50%-seed3"].config_with_search(subject) for name in ("dmcp", "l1"))
    assert used.search and (used.search.epochs, used.search.lr, used.search.seed, used.method) == (2, 0.2, 3, "dmcp")
    assert used.search.min_channels == {space.name: 1 for space in subject.graph.spaces}  # as used
    assert (tuned.search, tuned.retrain, tuned.train.lr, tuned.budgets) == (None, "finetune", 0.08, ("50%",))
    assert found["dmcp-50%-seed3"].settings["groups"] == 10  # those that nobody typed, too
    alone = replace(TWO, methods=("l1",), budgets=("50%",), unpruned=False, settings={})  # trained by uniform's runs
    assert {it.method for it in planned(alone, subject).values()} == {"unpruned", "l1", "uniform"}


@pytest.mark.parametrize(
    "changes",
    [
        {"methods": ()},
        {"methods": ("uniform", "mine:uniform")},
        {"settings": {"slimming": {"sparsty": 1}}},
        {"protocol": replace(TWO.protocol, scratch=False)},
        {"budgets": ("50%", "0.5")},
        {"protocol": changed(batch=5000)},
        {"protocol": replace(TWO.protocol, bounds={"max_channels": {"0": 2}}), "budgets": ("95%",)},
    ],
    ids=lambda it: str(it)[:40],
)
def test_comparisons_that_make_no_sense(subject: Subject, changes: dict[str, Any]) -> None:
    with pytest.raises(DmcpError):
        plan(replace(TWO, **changes), subject)


def test_held_out_batches_have_a_mix_of_classes_and_the_same_images_for_all_seeds(
    subject: Subject, tmp_path: Path
) -> None:
    """Methods judge networks by the statistics of these batches."""
    images = subject.images
    by_class = replace(subject, images=images.subset(images.labels.argsort(stable=True)))
    found = []
    for it in (planned(TWO, subject)[f"uniform-50%-seed{seed}"] for seed in TWO.seeds):
        problem = OneRun(it, by_class, Run(tmp_path), Runtime())._problem()
        found.append(list(problem.held_out))
    for (images, labels), (others, _) in zip(*found, strict=True):
        assert len(labels.unique()) >= 8 and torch.equal(images, others)


# which are left


def row(
    accuracy: float = 0.5, macs: int = 50, params: int = 7, name: str = "same recipe", loss: float | None = None
) -> Row:
    return Row(name, macs, params, accuracy, train_loss=loss)


def finish(folder: Path, it: PlannedRun, networks: Sequence[Row], seconds: float = 1, passes: int = 10) -> None:
    place = folder / it.name
    place.mkdir(parents=True, exist_ok=True)
    (place / "settings.json").write_text("{}")
    facts = {"full_macs": 100, "seconds": seconds, "sample_passes": passes, "device": "cpu", "run": asdict(it)}
    widths = {"a": sum(it.params for it in networks)}
    (place / "result.json").write_text(json.dumps({"networks": [*map(asdict, networks)], "widths": widths, **facts}))


def test_runs_are_done_once_and_go_on(subject: Subject, tmp_path: Path) -> None:
    runs = plan(SMALL, subject)
    assert sorted(it.name for it in begin(runs, tmp_path)) == ALL
    for it in runs:
        assert read_plan(tmp_path / "plans" / f"{it.name}.json") == it
        finish(tmp_path, it, [row()] if it.budget else [])
    assert begin(runs, tmp_path) == []
    (tmp_path / ALL[1] / "checkpoints").mkdir()  # not at its end
    assert [it.name for it in begin(runs, tmp_path)] == [ALL[1]]
    (tmp_path / ALL[1] / "checkpoints").rmdir()
    more = plan(replace(SMALL, methods=("uniform", "slimming", "dmcp"), seeds=(0, 1)), subject)
    added = ["dmcp-50%-seed0", "dmcp-50%-seed1", *(name.replace("seed0", "seed1") for name in ALL)]
    left = [it.name for it in begin(more, tmp_path)]
    assert sorted(left) == sorted(added) and left.index("dmcp-50%-seed1") < left.index("uniform-50%-seed1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": changed(train=replace(CONFIG.train, epochs=2))}, "--epochs"),
        ({"settings": {"slimming": {"sparsity": 0.2}}, "seeds": (5,)}, "--set slimming.sparsity"),
        (
            {"protocol": replace(TWO.protocol, facts={"fingerprint": "b"})},
            "fingerprint",
        ),  # another network of this name
    ],
)
def test_a_folder_has_one_protocol(subject: Subject, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    for it in plan(SMALL, subject):
        begin([it], tmp_path)
        finish(tmp_path, it, [row()])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    other = plan(replace(SMALL, **changes), subject)
    with pytest.raises(FileError, match=words):
        begin(other, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before
    write_table(tmp_path)
    finish(tmp_path, replace(other[-1], seed=7), [row()])
    with pytest.raises(FileError, match=words):
        write_table(tmp_path)


# one run, killed at any moment


QUICK = {"dmcp": {"epochs": 2, "groups": 3}, "autoslim": {"epochs": 2, "groups": 3, "batches": 1}}
TABLE = replace(SMALL, methods=("l1", "slimming", "experiments.methods.soft:sfp", "autoslim", "dmcp"), settings=QUICK)
KEPT = {"log.jsonl", "model.safetensors", "widths.json", "search.safetensors", "prepared.safetensors"}


def do(it: PlannedRun, subject: Subject, folder: Path, stage: str = "", steps: int = 0) -> None:
    """Do a run, as a session does; it is killed after so many events of a stage."""
    left, files = iter(range(steps)), Run(folder)
    folder.mkdir(exist_ok=True)

    def hear(event: Any) -> None:
        files.on_event(event)
        if stage == event.stage and next(left, None) is None:
            raise Killed

    files.rewind(checkpointer := files.checkpointer({}, every_steps=10))
    OneRun(it, subject, files, Runtime(checkpointer=checkpointer, on_event=hear)).do()


@pytest.fixture(scope="module")
def whole(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, which nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    for it in plan(TABLE, subject):
        do(it, subject, folder / it.name)
        assert is_done(folder / it.name)
    return folder


@pytest.mark.parametrize(
    ("name", "stage", "steps"),
    [
        ("dmcp-50%", "search", 24),
        ("dmcp-50%", "dmcp", 4),
        ("dmcp-50%", "dmcp, own", 14),
        ("dmcp-50%", "test", 1),
        ("sfp-50%", "choosing", 12),
        ("slimming", "choosing", 12),
        ("slimming-50%", "slimming, own", 6),
        ("autoslim", "choosing", 14),
        ("autoslim-50%", "autoslim", 6),
        ("unpruned", "unpruned", 12),
    ],
)
def test_a_killed_run_ends_the_same(
    subject: Subject, whole: Path, tmp_path: Path, name: str, stage: str, steps: int
) -> None:
    it = planned(TABLE, subject)[f"{name}-seed0"]
    if it.uses:
        shutil.copytree(whole / it.uses, tmp_path / it.uses)
    with pytest.raises(Killed):
        do(it, subject, tmp_path / it.name, stage, steps)
    assert not is_done(tmp_path / it.name)
    if it.uses:  # a choice is not made again
        shutil.rmtree(tmp_path / it.uses)
        with pytest.raises(FileError):  # but the first time it is needed
            do(it, subject, tmp_path / "again")
    do(it, subject, tmp_path / it.name)
    folders = tmp_path / it.name, whole / it.name
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    for file in KEPT & {*names[0]}:
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file
    one, other = (json.loads((folder / "result.json").read_text()) | {"seconds": 0} for folder in folders)
    for network in one["networks"] + other["networks"]:
        network["ms"] = 0
    assert one == other
    for network in one["networks"]:  # a network as a method left it was not trained by the run
        assert (network["train_loss"] is None) == (network["name"] == Own.AS_TRAINED)


# the table


def test_the_table_has_the_figures_of_the_runs(subject: Subject, tmp_path: Path) -> None:
    """Two seeds; of the last method only one is there."""
    with pytest.raises(FileError):
        write_table(tmp_path)
    it = replace(TWO, budgets=("50%",), methods=("uniform", "random", "l1", "slimming", "dmcp"), seeds=(0, 1))
    runs, tuned = planned(it, subject), "fine-tuned"
    for seed, up in ((0, 0.0), (1, 0.02)):
        finish(tmp_path, runs[f"unpruned-seed{seed}"], [row(0.9 + up, 100, 77)], 100, 5_000_000)
        finish(tmp_path, runs[f"slimming-seed{seed}"], [], 90, 4_000_000)
        finish(tmp_path, runs[f"uniform-50%-seed{seed}"], [row(0.8 + up, 49, 40, loss=0.5 + up)], 0.1, 0)
        finish(tmp_path, runs[f"random-50%-seed{seed}"], [row(0.8 + up, 49, 40)], 0.1, 0)  # by chance uniform's widths
        finish(tmp_path, runs[f"l1-50%-seed{seed}"], [row(0.7 + 2 * up, 49, 40, tuned)], 2, 0)
        both = [row(0.85 + up, 50 - seed, 30 + seed), row(0.8, 50 - seed, 30 + seed, tuned)]
        finish(tmp_path, runs[f"slimming-50%-seed{seed}"], both, 30 + 20 * seed, 1_000_000)
    finish(tmp_path, runs["dmcp-50%-seed1"], [row(0.91, 48, 35, loss=0.25)], 300, 9_000_000)
    data = write_table(tmp_path)
    assert table_cells((tmp_path / "compare.md").read_text())[1:] == [
        ["unpruned", "100%", "91.00 ± 1.41 (2)", "", "", "", "100.0%", "77", "0", "0"],
        ["uniform", "50%", "81.00 ± 1.41 (2)", "", "0.51 ± 0.014 (2)", "", "49.0%", "40", "0", "0"],
        ["random", "50%", "= uniform", "", "", "", "49.0%", "40", "0", "0"],
        ["l1", "50%", "= uniform", "", "", "72.00 ± 2.83 (2), fine-tuned", "49.0%", "40", "102", "5.0"],
        [
            *("slimming", "50%", "86.00 ± 1.41 (2)", "+5.00 ± 0.00 (2)", "", "80.00 ± 0.00 (2), fine-tuned"),
            *("49.0%–50.0%", "30–31", "130", "5.0"),
        ],
        ["dmcp", "50%", "91.00 (1)", "+9.00 (1)", "0.25 (1)", "", "48.0%", "35", "300", "9.0"],
    ]
    assert data == json.loads((tmp_path / "compare.json").read_text())
    line = {(it["method"], it["own"]): it for it in data["lines"]}
    assert line["uniform", False]["train_losses"] == [0.5, 0.52]
    assert line["slimming", True]["way"] == tuned and line["l1", True]["widths"] == 2 * [{"a": 40}]
    assert (line["slimming", False]["seeds"], line["slimming", False]["macs"]) == ([0, 1], [49, 50])
    assert (line["slimming", True]["search_seconds"], line["slimming", True]["sample_passes"]) == (130, 5_000_000)
    shutil.rmtree(tmp_path / "unpruned-seed1")
    with pytest.raises(FileError, match="l1-50%-seed1"):
        write_table(tmp_path)


# the command


@pytest.mark.usefixtures("runs_in_this_process")
def test_the_command_fills_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert compare("--dry-run") == 0
    printed = capfd.readouterr().out
    assert ["l1-50%-seed0", "missing", "unpruned-seed0"] in table_cells(printed)
    assert "--lr            1.6 at a" in printed
    assert compare("--dry-run", "--json", "--weight-decay", "0.1") == 0
    chosen = json.loads(capfd.readouterr().out)["chosen"]
    assert chosen.keys() == {"optimizer", "lr"} and "suits 1,275 images" in chosen["lr"]  # without those held out
    assert compare("--set", "l1.powr=2") == 2 and "it has power." in capfd.readouterr().err
    assert command("compare", "--gather", "table") == 2
    capfd.readouterr()
    assert compare("--set", "l1.power=2", "--json") == 0
    table = json.loads((tmp_path / "table" / "compare.json").read_text())
    assert json.loads(capfd.readouterr().out) == {"folder": "table", **table}
    assert [it["method"] for it in table["lines"]] == ["unpruned", "uniform", "l1"]
    assert all(it["ms"] > 0 and 0 < it["mean"] < 1 for it in table["lines"])
    assert table["settings"]["set"] == {"l1": {"power": 2}} and table["settings"]["devices"] == ["cpu"]
    assert "dmcp compare --model digits:resnet" in table["commands"][0]["command"]
    before = {path: path.read_bytes() for path in (tmp_path / "table").glob("*-seed0/*")}

    assert compare("--set", "l1.power=2") == 0  # nothing is left to do
    printed = capfd.readouterr().out
    assert printed == (tmp_path / "table" / "compare.md").read_text() + "\ntable\n"
    assert all(setting in printed for setting in ("digits:resnet", "1 epoch", "batch 708", "1.6", "0.0005"))
    assert {path: path.read_bytes() for path in (tmp_path / "table").glob("*-seed0/*")} == before
    (tmp_path / "table").rename(tmp_path / "elsewhere")
    assert command("compare", "--gather", "elsewhere", "--json") == 0
    assert json.loads(capfd.readouterr().out)["lines"] == table["lines"]
    (tmp_path / "elsewhere").rename(tmp_path / "table")
    assert compare("--set", "l1.power=2", "--lr", "0.5") == 2
    assert "--lr" in (told := capfd.readouterr().err) and ".." not in told
    with Lock(tmp_path / "table"):
        assert compare("--set", "l1.power=2") == 2
    capfd.readouterr()
    assert command("evaluate", "table/l1-50%-seed0", "--json") == 0
    assert json.loads(capfd.readouterr().out)["networks"][0]["accuracy"] == pytest.approx(table["lines"][2]["mean"])
    assert command("runs", "table", "--json") == 0
    runs = json.loads(capfd.readouterr().out)
    assert {it["state"] for it in runs} == {"done"} and {it["command"] for it in runs} == {"compare"}


@pytest.mark.usefixtures("runs_in_this_process")
def test_runs_that_fail_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "failing.py").write_text("def mine(problem):\n    return 1 / 0\ndef other(problem):\n    return {}\n")
    methods = "uniform,failing:mine,failing:other"
    assert compare("--methods", methods, "--no-unpruned", "--budget", "50%", "--budget", "79%") == 2
    printed, told = capfd.readouterr()
    rows = [(method, budget) for method, budget, *_ in table_cells(printed)[1:]]
    assert rows == [("uniform", "79%"), ("uniform", "50%")]
    failed = ", ".join(f"{method}-{budget}-seed0" for method in ("mine", "other") for budget in ("50%", "79%"))
    assert f"{failed}: exit code 2" in told
    assert "ZeroDivisionError" in told and "failing:other" in told


@pytest.mark.usefixtures("runs_in_this_process")
def test_a_run_that_another_process_does_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare() == 0
    folder, kept = tmp_path / "table" / "l1-50%-seed0", tmp_path / "kept"
    orphan, result = Lock(folder), folder / "result.json"
    result.rename(kept)
    monkeypatch.setattr("time.sleep", lambda _: (kept.rename(result), orphan.__exit__()))
    orphan.__enter__()  # by a process whose parent was killed
    assert compare() == 0
