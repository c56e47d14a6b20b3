"""Comparisons: which cells there are and what they wait for, which are run, what becomes of failures, and the table."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dmcp.cli import launch, main
from dmcp.cli.config import facts_of, plan_from_json
from dmcp.cli.job import Job, open_job
from dmcp.cli.show import recipe
from dmcp.compare import runner
from dmcp.compare import runner as runner_module
from dmcp.compare.methods import METHODS
from dmcp.compare.runner import (
    COMMANDS,
    PLANS,
    Comparison,
    Task,
    against_uniform,
    cell_name,
    epochs_of,
    gather,
    is_done,
    longest_first,
    markdown,
    networks_of,
    run_comparison,
    stored,
    tasks,
    to_json,
)
from dmcp.errors import DmcpError, FileError, TrainingError
from dmcp.runtime.io import Lock
from dmcp.settings import Engine, TrainConfig
from dmcp.units import latex

TWO = Comparison(
    job=Job(model="digits:resnet", data="digits", device="cpu"),
    engine=Engine(),
    train=TrainConfig(epochs=1, warmup_epochs=0),
    budgets=("50%", "params:40%"),
    methods=("uniform", "l1", "amc", "slimming", "dmcp-direct"),
    seeds=(3, 4),
    settings={"amc": {"episodes": 5}, "dmcp": {"epochs": 2}},
    fine_tune_epochs=1,
)
SMALL = replace(TWO, budgets=("50%",), methods=("uniform", "amc"), seeds=(0,))
ALL = ["unpruned-seed0", "base-seed0", "uniform-50%-seed0", "amc-50%-seed0"]

# Stands for `python -m dmcp`: notes how it was called, fails if it is told so, and leaves a finished cell.
CHILD = """
import json, sys
from pathlib import Path

plan, folder = map(Path, sys.argv[2:])
here = folder.parent.parent
with (here / "calls").open("a") as file:
    file.write(folder.name + "\\n")
assert sys.argv[1] == "cell" and plan == folder.parent / "plans" / f"{folder.name}.json"
if folder.name in (here / "failing").read_text().split():
    sys.exit(f"{folder.name} has no luck")
cell = json.loads(plan.read_text())["cell"]
assert not cell["uses"] or (folder.parent / cell["uses"] / "cost.json").exists()
folder.mkdir(exist_ok=True)
(folder / "settings.json").write_text(json.dumps({"command": "cell", "unpruned": {"macs": 100}}))
row = {"stage": "test", "name": cell["method"] or "unpruned", "macs": 50, "params": 7, "accuracy": 0.5}
(folder / "log.jsonl").write_text(json.dumps(row) + "\\n")
(folder / "cost.json").write_text(json.dumps({"seconds": 1.0, "sample_passes": 10}))
for name in ["prepared.safetensors"] if cell["prepares"] else ["widths.json", "model.safetensors"]:
    (folder / name).write_text("{}")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for cells, which are filled by the program above."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(runner, "COMMAND", (sys.executable, "-S", str(tmp_path / "child.py")))
    monkeypatch.setattr(launch, "_PAUSE", 0.02)
    let_fail(tmp_path / "cells")
    return tmp_path / "cells"


def let_fail(folder: Path, *names: str) -> None:
    """Tell the children which of them fail, and forget which were called."""
    (folder.parent / "failing").write_text(" ".join(names))
    (folder.parent / "calls").write_text("")


def calls(folder: Path) -> list[str]:
    return (folder.parent / "calls").read_text().split()


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


# which cells there are


def test_cells_go_seed_by_seed_and_come_after_what_they_need() -> None:
    names = [task.name for task in tasks(TWO)]
    assert names[: len(names) // 2] == [name.replace("seed4", "seed3") for name in names[len(names) // 2 :]]
    first = [name.removesuffix("-seed3") for name in names if name.endswith("seed3")]
    shared, chosen = first[:3], first[3:]
    assert shared == ["unpruned", "base", "slimming"]
    methods = [*TWO.methods, "dmcp"]  # which is there for dmcp-direct
    both = itertools.product(methods, ("50%", "params=40%"))
    assert sorted(chosen) == sorted(f"{method}-{budget}" for method, budget in both)
    seen = set[str]()
    for task in tasks(TWO):
        assert seen.issuperset(task.after)
        seen.add(task.name)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("uniform-50%-seed3", ()),
        ("dmcp-50%-seed3", ()),
        ("l1-50%-seed3", ("unpruned-seed3",)),
        ("amc-params=40%-seed4", ("base-seed4",)),
        ("slimming-50%-seed4", ("slimming-seed4",)),
        ("dmcp-direct-params=40%-seed3", ("dmcp-params=40%-seed3",)),
    ],
)
def test_what_a_cell_waits_for(name: str, after: tuple[str, ...]) -> None:
    task = by_name(TWO)[name]
    assert task.after == after
    assert task.plan.cell is not None and task.plan.cell.uses == "".join(after)


def by_name(it: Comparison) -> dict[str, Task]:
    return {task.name: task for task in tasks(it)}


def test_what_takes_longest_comes_first() -> None:
    it = replace(TWO, methods=tuple(METHODS), budgets=("50%", "30%"), settings={}, seeds=(0, 1), unpruned=False)
    every = tasks(it)
    order = longest_first(every)
    names = [task.name for task in order]
    assert {*names} == {task.name for task in every}
    dmcp = [name for name in names if name.startswith("dmcp-") and "direct" not in name]
    assert {*names[:4]} == {*dmcp} and len(dmcp) == 4  # also those of the last seed
    assert names.index("uniform-slimmable-30%-seed1") < names.index("uniform-50%-seed0")  # four passes a step, not one
    for task in order:
        assert all(names.index(before) < names.index(task.name) for before in task.after)


def test_what_much_waits_for_comes_before_what_takes_as_long() -> None:
    plan = by_name(TWO)["uniform-50%-seed3"].plan
    alone, first, last = Task("alone", plan), Task("first", plan), Task("last", plan, after=("first",))
    assert [task.name for task in longest_first([alone, first, last])] == ["first", "alone", "last"]


def test_settings_of_an_own_method_may_call_anything_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(METHODS["uniform"], config=lambda **settings: SimpleNamespace(epochs="until it is good"))
    monkeypatch.setitem(METHODS, "uniform", other)
    plan = by_name(TWO)["uniform-50%-seed3"].plan
    assert [task.name for task in longest_first([Task("one", plan)])] == ["one"]


def test_plans_have_the_seed_the_budget_and_the_settings() -> None:
    plan = by_name(TWO)["amc-params=40%-seed4"].plan
    assert plan.search is not None and plan.train is not None and plan.cell is not None
    assert (plan.job.seed, plan.train.seed, plan.search.seed, plan.search.budget) == (4, 4, 4, "params:40%")
    assert (plan.cell.method, plan.cell.settings, plan.cell.holdout) == ("amc", {"episodes": 5}, 0.1)
    assert plan.cell.scratch and plan.cell.fine_tune_epochs == 1
    assert plan_from_json(json.loads(json.dumps(plan.to_json())), "plan") == plan


def test_the_unpruned_network_is_trained_where_it_is_wanted_or_needed() -> None:
    alone = replace(TWO, unpruned=False, methods=("uniform",))
    assert not any("unpruned" in task.name for task in tasks(alone))
    assert "unpruned-seed4" in by_name(replace(alone, methods=("uniform", "l1")))


def test_one_ratio_is_not_trained_from_scratch_beside_uniform() -> None:
    def scratch(it: Comparison, name: str) -> bool:
        cell = by_name(it)[name].plan.cell
        return cell is not None and cell.scratch

    assert not scratch(TWO, "l1-50%-seed3") and scratch(TWO, "slimming-50%-seed3")
    alone = replace(TWO, methods=("l1", "amc"))  # uniform comes with it, so that it may be asked for later
    assert not scratch(alone, "l1-50%-seed3") and scratch(alone, "uniform-50%-seed3")


def test_one_ratio_without_fine_tuning_is_uniform() -> None:
    found = by_name(replace(TWO, fine_tune_epochs=0))
    assert "l1-50%-seed3" not in found and "uniform-50%-seed3" in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budgets": ()}, "at least one budget"),
        ({"budgets": ("50%", "50%")}, "at least one budget, and each only once"),
        ({"methods": ()}, "at least one method"),
        ({"methods": ("l1", "l1")}, "at least one method, and each only once"),
        ({"seeds": (1, 1)}, "at least one seed"),
        ({"methods": ("amk",)}, "'amk': did you mean amc"),
        ({"settings": {"dmpc": {}}}, "'dmpc': did you mean dmcp"),
    ],
)
def test_comparisons_that_make_no_sense(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DmcpError, match=words):
        replace(TWO, **changes)
    with pytest.raises(TrainingError, match="episodes must be"):
        replace(TWO, settings={"amc": {"episodes": 0}})


# running them


def test_cells_are_run_once(folder: Path) -> None:
    assert run_comparison(SMALL, folder, quiet=True) == []
    assert sorted(calls(folder)) == sorted(ALL)
    assert all(is_done(folder / name) for name in ALL)
    let_fail(folder)
    assert run_comparison(SMALL, folder, quiet=True) == [] and calls(folder) == []
    (folder / "uniform-50%-seed0" / "widths.json").unlink()
    (folder / "base-seed0" / "checkpoints").mkdir()  # not at its end
    assert run_comparison(SMALL, folder, quiet=True) == []
    assert sorted(calls(folder)) == ["base-seed0", "uniform-50%-seed0"]


def test_more_seeds_and_methods_can_be_added(folder: Path) -> None:
    run_comparison(SMALL, folder, quiet=True)
    let_fail(folder)
    run_comparison(replace(SMALL, methods=("uniform", "amc", "random"), seeds=(0, 1)), folder, quiet=True)
    assert sorted(calls(folder)) == sorted(
        ["random-50%-seed0", "random-50%-seed1", *[name.replace("seed0", "seed1") for name in ALL]]
    )


def test_a_cell_that_fails_lets_the_others_go_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    let_fail(folder, "base-seed0")
    failed = run_comparison(SMALL, folder)
    assert [end.describe() for end in failed] == [
        "base-seed0: exit code 1: base-seed0 has no luck",
        "amc-50%-seed0: not started: it needs base-seed0, and that failed",
    ]
    assert sorted(calls(folder)) == sorted(ALL[:3])
    assert "base-seed0: base-seed0 has no luck" in capfd.readouterr().err
    assert [line.method for line in gather(SMALL, folder)] == ["unpruned", "uniform"]
    let_fail(folder)
    assert run_comparison(SMALL, folder, quiet=True) == []
    assert calls(folder) == ["base-seed0", "amc-50%-seed0"]


def test_a_folder_of_other_settings_is_refused(folder: Path) -> None:
    run_comparison(SMALL, folder, quiet=True)
    let_fail(folder)
    before = contents(folder)
    with pytest.raises(FileError, match=r"unpruned-seed0 was begun with other settings.*train.*--out another folder"):
        run_comparison(replace(SMALL, train=replace(SMALL.train, epochs=2)), folder)
    assert contents(folder) == before and calls(folder) == []


def test_nothing_is_written_before_a_refusal(folder: Path) -> None:
    run_comparison(SMALL, folder, quiet=True)
    before = contents(folder)
    with pytest.raises(FileError, match="amc-50%-seed0 was begun with other settings"):
        run_comparison(replace(SMALL, settings={"amc": {"episodes": 6}}, seeds=(1, 0)), folder)
    assert contents(folder) == before


def test_a_plan_that_nobody_has_begun_may_change(folder: Path) -> None:
    let_fail(folder, *ALL)
    run_comparison(SMALL, folder, quiet=True)
    let_fail(folder)
    longer = replace(SMALL, train=replace(SMALL.train, epochs=2))
    assert run_comparison(longer, folder, quiet=True) == []
    assert json.loads((folder / PLANS / f"{ALL[0]}.json").read_text())["train"]["epochs"] == 2


def test_a_folder_is_used_by_one_command_at_a_time(folder: Path) -> None:
    folder.mkdir()
    with Lock(folder), pytest.raises(FileError, match="in use by process"):
        run_comparison(SMALL, folder)
    (folder.parent / "file").write_text("")
    with pytest.raises(FileError, match="no cells can be kept here"):
        run_comparison(SMALL, folder.parent / "file")


# the table, from cells written by hand


def write_cell(folder: Path, name: str, cost: tuple[float, int], *rows: tuple[str, float, int, int]) -> None:
    """A finished cell: (seconds, sample-passes), and (network, accuracy, MACs, params); without any it has prepared."""
    cell = folder / name
    cell.mkdir(parents=True)
    (cell / "settings.json").write_text(json.dumps({"command": "cell", "unpruned": {"macs": 1000}}))
    keys = ("name", "accuracy", "macs", "params")
    lines = [json.dumps({"stage": "test"} | dict(zip(keys, row, strict=True))) for row in rows]
    (cell / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (cell / "cost.json").write_text(json.dumps({"seconds": cost[0], "sample_passes": cost[1]}))
    (cell / ("widths.json" if rows else "prepared.safetensors")).write_text("{}")


def write_table(folder: Path) -> Comparison:
    """Two seeds; of the last method only one is there."""
    for seed, up in ((0, 0.0), (1, 0.02)):
        write_cell(folder, f"unpruned-seed{seed}", (100, 5_000_000), ("unpruned", 0.9 + up, 1000, 77))
        write_cell(folder, f"base-seed{seed}", (90, 4_000_000))
        write_cell(folder, f"uniform-50%-seed{seed}", (0.1, 0), ("uniform", 0.8 + up, 490, 40))
        own = ("l1, own", 0.7 + 2 * up, 490, 40)
        write_cell(folder, f"l1-50%-seed{seed}", (2, 0), own)
        rows = [("amc", 0.85 + up, 500 - 10 * seed, 30 + seed), ("amc, own", 0.8, 500 - 10 * seed, 30 + seed)]
        write_cell(folder, f"amc-50%-seed{seed}", (30 + 20 * seed, 1_000_000), *rows)
    write_cell(folder, "dmcp-50%-seed1", (300, 9_000_000), ("dmcp", 0.91, 480, 35))
    write_cell(folder, "dmcp-direct-50%-seed1", (1, 0), ("dmcp-direct", 0.92, 495, 36))
    methods = ("uniform", "l1", "amc", "dmcp-direct")
    return replace(TWO, budgets=("50%",), methods=methods, seeds=(0, 1))


def test_the_table_has_the_figures_of_the_cells(tmp_path: Path) -> None:
    lines = {(line.method, line.own): line for line in gather(write_table(tmp_path), tmp_path)}
    assert [*lines] == [
        ("unpruned", False),
        ("uniform", False),
        ("l1", False),
        ("l1", True),
        ("amc", False),
        ("amc", True),
        ("dmcp-direct", False),
    ]
    amc = lines["amc", False]
    assert amc.accuracies == (0.85, 0.87) and amc.mean == pytest.approx(0.86)
    assert amc.deviation == pytest.approx(statistics.stdev([0.85, 0.87])) == pytest.approx(0.02 / 2**0.5)
    assert (amc.macs, amc.params, amc.macs_share) == ((490, 500), (30, 31), (0.49, 0.5))
    assert lines["amc", True].deviation == pytest.approx(0)
    assert lines["dmcp-direct", False].deviation is None and lines["dmcp-direct", False].accuracies == (0.92,)


def test_search_cost_is_summed_over_the_cells_before(tmp_path: Path) -> None:
    lines = {(line.method, line.own): line for line in gather(write_table(tmp_path), tmp_path)}
    costs = {key: (line.search_seconds, line.sample_passes) for key, line in lines.items()}
    assert costs["unpruned", False] == (0, 0)
    assert costs["amc", False] == costs["amc", True] == (90 + (30 + 50) / 2, 5_000_000)
    assert costs["l1", True] == (102, 5_000_000)
    assert costs["dmcp-direct", False] == (301, 9_000_000)


def test_one_ratio_has_the_row_of_uniform(tmp_path: Path) -> None:
    it = write_table(tmp_path)
    lines = {(line.method, line.own): line for line in gather(it, tmp_path)}
    cost = {"search_seconds": lines["l1", True].search_seconds, "sample_passes": lines["l1", True].sample_passes}
    assert cost["search_seconds"] == 102
    networks = lines["l1", False].networks
    same = replace(lines["uniform", False], method="l1", same_as="uniform", networks=networks, **cost)
    assert lines["l1", False] == same
    assert lines["l1", True].mean == pytest.approx(0.72)
    unscratched = gather(replace(it, scratch=False), tmp_path)
    assert ("l1", False) not in {(line.method, line.own) for line in unscratched}


def test_one_ratio_has_the_row_of_uniform_whatever_the_order(tmp_path: Path) -> None:
    it = replace(write_table(tmp_path), methods=("l1", "uniform"))
    assert ("l1", False) in {(line.method, line.own) for line in gather(it, tmp_path)}


def test_the_page_shows_them(tmp_path: Path) -> None:
    lines = [replace(line, ms=1.5) for line in gather(write_table(tmp_path), tmp_path)]
    text = markdown(lines, batch=64)
    heads, rule, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert heads[-1] == "ms per 64, fastest of 10" and all(set(cell) == {"-"} for cell in rule)
    assert len({len(line) for line in text.splitlines()}) == 1
    assert rows == [
        ["unpruned", "100%", "91.00 ± 1.41 (2)", "", "100.0%", "77", "0", "0", "1.50"],
        ["uniform", "50%", "81.00 ± 1.41 (2)", "", "49.0%", "40", "0", "0", "1.50"],
        ["l1", "50%", "= uniform", "72.00 ± 2.83 (2), fine-tuned", "49.0%", "40", "102", "5.0", "1.50"],
        [
            "amc",
            "50%",
            "86.00 ± 1.41 (2)",
            "80.00 ± 0.00 (2), fine-tuned",
            "49.0%–50.0%",
            "30–31",
            "130",
            "5.0",
            "1.50",
        ],
        ["dmcp-direct", "50%", "92.00 (1)", "", "49.5%", "36", "301", "9.0", "1.50"],
    ]


def test_few_samples_are_not_shown_as_none(tmp_path: Path) -> None:
    lines = [replace(line, sample_passes=12_740.0) for line in gather(write_table(tmp_path), tmp_path)]
    assert markdown(lines).count("| 0.0127 ") == 5


def test_figures_of_uniform_are_shown_where_it_has_no_row(tmp_path: Path) -> None:
    it = replace(write_table(tmp_path), methods=("l1",))
    assert "| 81.00 ± 1.41 (2) " in markdown(gather(it, tmp_path))


def test_differences_to_uniform_are_paired_by_seed(tmp_path: Path) -> None:
    text = against_uniform(gather(write_table(tmp_path), tmp_path))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert rows == [
        ["l1", "50%", "= uniform", "-9.00 ± 1.41 (2)"],
        ["amc", "50%", "+5.00 ± 0.00 (2)", "-1.00 ± 1.41 (2)"],
        ["dmcp-direct", "50%", "+10.00 (1)", ""],  # the seed that it has, not the first
    ]
    alone = [line for line in gather(write_table(tmp_path / "alone"), tmp_path / "alone") if line.method != "uniform"]
    assert against_uniform(alone) == ""


def test_the_table_is_plain_data(tmp_path: Path) -> None:
    lines = gather(write_table(tmp_path), tmp_path)
    plain = json.loads(json.dumps(to_json(lines)))
    assert [line["method"] for line in plain] == [line.method for line in lines]
    assert plain[0]["accuracies"] == [0.9, 0.92] and plain[0]["macs"] == [1000, 1000]


def test_each_network_has_its_own_costs(tmp_path: Path) -> None:
    lines = gather(write_table(tmp_path), tmp_path)
    keys = ("macs", "params", "search_seconds", "sample_passes")
    found = {(it["method"], it["training"], it["seed"]): tuple(it[key] for key in keys) for it in networks_of(lines)}
    assert found["amc", "same recipe", 0] == found["amc", "fine-tuned", 0] == (500, 30, 120, 5_000_000)
    assert found["amc", "same recipe", 1] == found["amc", "fine-tuned", 1] == (490, 31, 140, 5_000_000)
    assert found["l1", "same recipe", 1] == found["l1", "fine-tuned", 1] == (490, 40, 102, 5_000_000)
    assert found["dmcp-direct", "same recipe", 1] == (495, 36, 301, 9_000_000)
    assert found["unpruned", "same recipe", 0] == (1000, 77, 0, 0) and len(found) == 13
    amc = next(line for line in to_json(lines) if line["method"] == "amc")
    assert [(it["seed"], it["accuracy"], it["macs"]) for it in amc["networks"]] == [(0, 0.85, 500), (1, 0.87, 490)]


def test_what_a_search_cost_that_is_not_done_is_not_known(tmp_path: Path) -> None:
    it = write_table(tmp_path)
    shutil.rmtree(tmp_path / "l1-50%-seed1")
    found = {(one["method"], one["training"], one["seed"]): one for one in networks_of(gather(it, tmp_path))}
    missing = found["l1", "same recipe", 1]  # uniform has this seed, of which it is a copy
    assert (missing["search_seconds"], missing["sample_passes"]) == (None, None)
    assert found["l1", "same recipe", 0]["sample_passes"] == 5_000_000


def test_there_is_no_table_without_cells(tmp_path: Path) -> None:
    assert gather(TWO, tmp_path) == []
    (tmp_path / "uniform-50%-seed3").mkdir()
    assert gather(TWO, tmp_path) == []


@pytest.mark.parametrize(
    ("budget", "name"), [("", "dmcp-seed7"), ("50%,params:2M", "dmcp-50%+params=2M-seed7"), ("1/2", "dmcp-1-2-seed7")]
)
def test_names_of_cells_are_names_of_folders(budget: str, name: str) -> None:
    assert cell_name("dmcp", 7, budget) == name == Path(name).name


# the table of a folder, whatever was asked for last


def test_fewer_methods_or_seeds_take_nothing_out_of_the_table(folder: Path) -> None:
    run_comparison(replace(SMALL, seeds=(0, 1)), folder, quiet=True)
    run_comparison(replace(SMALL, methods=("uniform",), seeds=(1,)), folder, quiet=True)
    found = stored(folder, replace(SMALL, methods=("uniform",), seeds=(1,)))
    assert found and found.seeds == (0, 1) and [*found.rows] == [("uniform", "50%"), ("amc", "50%")]
    lines = {line.method: line for line in gather(found, folder)}
    assert [*lines] == ["unpruned", "uniform", "amc"] and {line.seeds for line in lines.values()} == {(0, 1)}
    assert lines["amc"].search_seconds == 2  # its own and that of the base
    assert gather(stored(folder) or SMALL, folder) == gather(found, folder)


def test_cells_of_another_protocol_are_no_part_of_the_table(folder: Path) -> None:
    run_comparison(SMALL, folder, quiet=True)
    other = replace(SMALL, train=replace(SMALL.train, epochs=7), seeds=(5,))
    run_comparison(other, folder, quiet=True)
    found = stored(folder, SMALL)
    assert found and found.seeds == (0,)
    with pytest.raises(FileError, match=r"has cells of several protocols \(train.epochs\): move some of them"):
        stored(folder)
    assert stored(folder / "nowhere") is None


def test_seeds_of_one_row_have_the_same_settings(folder: Path) -> None:
    few, many = (
        replace(SMALL, methods=("uniform", "slimming"), settings={"slimming": {"sparsity": n}}) for n in (0.1, 0.2)
    )
    run_comparison(few, folder, quiet=True)
    with pytest.raises(FileError, match=r"slimming-seed5: another seed of this row, slimming-seed0, was begun with"):
        run_comparison(replace(many, seeds=(5,)), folder, quiet=True)
    path = folder / runner.PLANS / "slimming-50%-seed0.json"
    plan = json.loads(path.read_text())
    place = folder / "slimming-50%-seed5"
    shutil.copytree(folder / "slimming-50%-seed0", place)
    plan["job"]["seed"], plan["cell"]["settings"] = 5, {"sparsity": 0.2}
    path.with_name("slimming-50%-seed5.json").write_text(json.dumps(plan))
    with pytest.raises(FileError, match="slimming-50%-seed0 and slimming-50%-seed5 are not the same method"):
        stored(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uniform-50%-seed0/settings.json", None),
        ("uniform-50%-seed0/cost.json", "{}"),
        ("plans/uniform-50%-seed0.json", '{"train": null}'),
        ("commands.jsonl", "5\n\xff"),
        ("compare.json", '{"speeds": {"device": "", "batch": 0, "ms": {"a": "b"}}}'),
    ],
)
def test_damage_does_not_stop_the_table(folder: Path, name: str, text: str | None) -> None:
    run_comparison(SMALL, folder, quiet=True)
    (folder / name).unlink(missing_ok=True)
    if text is not None:
        (folder / name).write_bytes(text.encode("latin-1"))
    found = stored(folder)
    assert found
    runner_module.write_table(found, folder)
    assert ("uniform" in (folder / "compare.md").read_text()) is not name.startswith(("uniform", "plans"))


def test_a_method_of_one_ratio_has_rows_where_it_was_run_only(folder: Path) -> None:
    run_comparison(replace(SMALL, methods=("uniform", "l1")), folder, quiet=True)
    run_comparison(replace(SMALL, methods=("uniform",), budgets=("30%",)), folder, quiet=True)
    found = stored(folder)
    assert found and [*found.rows] == [("uniform", "50%"), ("l1", "50%"), ("uniform", "30%")]


@pytest.mark.parametrize(
    ("name", "epochs"),
    [
        ("unpruned-seed0", ("", "9")),
        ("base-seed0", ("", "9")),
        ("slimming-seed0", ("9", "")),
        ("autoslim-seed0", ("40", "")),
        ("metapruning-seed0", ("4", "")),
        ("uniform-50%-seed0", ("", "9")),
        ("l1-50%-seed0", ("", "3 fine-tuned")),
        ("sfp-50%-seed0", ("9", "")),
        ("autoslim-50%-seed0", ("", "9 + 3 fine-tuned")),
        ("amc-50%-seed0", ("", "9 + 3 fine-tuned")),
        ("dmcp-50%-seed0", ("30", "9 + 9 slimmable")),
        ("dmcp-direct-50%-seed0", ("", "9")),
    ],
)
def test_epochs_of_cells(name: str, epochs: tuple[str, str]) -> None:
    settings = {"metapruning": {"epochs": 4}}
    it = replace(SMALL, methods=tuple(METHODS), train=replace(SMALL.train, epochs=9), settings=settings)
    assert epochs_of(by_name(replace(it, fine_tune_epochs=3))[name].plan) == epochs


# the command


def command(*words: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dmcp", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main.main()
    return int(stop.value.code or 0)


def options(*more: str) -> Sequence[str]:
    words = "compare --model digits:resnet --data digits --methods uniform,l1 --seeds 1 --batch 708 --device cpu"
    return [*words.split(), "--epochs", "1", "--quiet", *more]


def test_a_table_for_latex() -> None:
    text = latex([["a_b", "50%"], ["90.25 ± 0.20 (3)", "49.3%–49.7%"], ["x & {y}", ""], ["dmcp-direct", "-0.01 (1)"]])
    assert text.splitlines() == [
        r"\begin{tabular}{ll}",
        r"\toprule",
        r"a\_b & 50\% \\",
        r"\midrule",
        r"90.25 $\pm$ 0.20 (3) & 49.3\%--49.7\% \\",
        r"x \& \{y\} &  \\",
        r"dmcp-direct & $-$0.01 (1) \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def run_here(commands: Sequence[launch.Command], *_: Any, **__: Any) -> list[launch.Ended]:
    """The same commands in this process, one after the other: new ones would import torch for most of the time."""
    return [launch.Ended(it, command(*it.argv[len(launch.COMMAND) :]), "") for it in commands]


@pytest.mark.parametrize("where", ["here", pytest.param("children", marks=pytest.mark.slow)])
def test_the_command_fills_a_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if where == "here":
        monkeypatch.setattr(runner, "run_side_by_side", run_here)
    out = tmp_path / "table"
    words = options("--set", "l1.power=2")
    assert command(*words, "--json", "--out", out) == 0
    told = json.loads(capfd.readouterr().out)
    table = json.loads((out / "compare.json").read_text())
    assert told["folder"] == str(out) and told["lines"] == table["lines"]
    found = [(line["method"], line["own"]) for line in table["lines"]]
    assert found == [("unpruned", False), ("uniform", False), ("l1", False), ("l1", True)]
    assert all(line["ms"] > 0 and 0 < line["mean"] < 1 for line in table["lines"])
    settings, (typed,) = table["settings"], table["commands"]
    assert settings["train"]["epochs"] == 1 and settings["seeds"] == [0] and settings["fine_tune_epochs"] == 1
    assert settings["holdout"] == 0.1 and settings["set"] == {"l1": {"power": 2}} and settings["devices"] == ["cpu"]
    assert typed["command"].startswith(
        "dmcp compare --model digits:resnet --data digits --methods uniform,l1 --seeds 1"
    )
    assert {"torch-dmcp", "torch", "torchvision", "python", "code"} <= typed["versions"].keys() and typed["device"]
    assert (out / "compare.svg").read_text().startswith("<?xml")
    networks = [*csv.DictReader((out / "compare.csv").read_text().splitlines())]
    assert [(it["method"], it["training"], it["seed"]) for it in networks] == [
        ("unpruned", "same recipe", "0"),
        ("uniform", "same recipe", "0"),
        ("l1", "same recipe", "0"),
        ("l1", "fine-tuned", "0"),
    ]
    assert [float(it["accuracy"]) for it in networks] == [line["mean"] for line in table["lines"]]
    assert [it["budget"] for it in networks] == ["", "50%", "50%", "50%"] and networks[2]["same_as"] == "uniform"
    tex = (out / "compare.tex").read_text()
    assert tex.startswith("% digits:resnet on digits: 1 epoch") and r"\usepackage{booktabs}" in tex
    assert r"uniform & 50\% & " in tex and r"l1 & 50\% & = uniform & " in tex.partition("points above uniform")[2]
    names = ["l1-50%-seed0", "uniform-50%-seed0", "unpruned-seed0"]
    before = {name: contents(out / name) for name in names}

    (out / "compare.md").unlink()
    assert command(*words, "--methods", "uniform", "--no-unpruned", "--out", out) == 2  # l1 is set, but not compared
    assert command(*options("--methods", "uniform", "--no-unpruned"), "--out", out) == 0  # nothing is left to do
    printed = capfd.readouterr().out
    assert printed == (out / "compare.md").read_text() + f"\n{out}\n"
    assert printed.startswith("digits:resnet on digits: 1 epoch, batch 708, ") and "seeds 0.\n\n| method " in printed
    assert "| l1 " in printed and "points above uniform" in printed
    assert {name: contents(out / name) for name in names} == before
    again = json.loads((out / "compare.json").read_text())
    assert again["lines"] == table["lines"] and len(again["commands"]) == 2  # no speed was measured again

    shutil.move(out, tmp_path / "elsewhere")
    plan = tmp_path / "elsewhere" / PLANS / "l1-50%-seed0.json"
    assert command("compare", "--gather", tmp_path / "elsewhere", "--json") == 0
    assert json.loads(capfd.readouterr().out)["lines"] == table["lines"] and plan.exists()
    shutil.move(tmp_path / "elsewhere", out)

    for more in (["--dry-run"], []):
        assert command(*words, "--lr", "0.5", *more, "--out", out) == 2
        printed, told = capfd.readouterr()
        assert ("unpruned-seed0 " in printed) is bool(more)
        assert told.splitlines() == [
            f"dmcp: {out}/unpruned-seed0 was begun with other settings (train.lr, train.warmup_lr): "
            f"give --out another folder, or the command that began it, which is in {out / COMMANDS}."
        ]


def test_a_table_is_of_one_network_and_one_data_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    net = """
from torch import nn

def build(num_classes):
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, WIDTH, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(WIDTH, num_classes))
"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within a second, and not in size
    words = ["compare", "--model", "growing_net:build", "--data", "digits", "--device", "cpu", "--seeds", "1"]
    words += ["--methods", "uniform", "--out", str(folder)]
    try:
        (tmp_path / "growing_net.py").write_text(net.replace("WIDTH", "24"))
        assert command(*words, "--dry-run") == 0
        it = Comparison(
            job=Job(model="growing_net:build", data="digits", device="cpu", batch=128),
            engine=Engine(),
            train=recipe(60, 0.8, 1e-4, 0.1),
            budgets=("50%",),
            methods=("uniform",),
            seeds=(0,),
            fine_tune_epochs=40,
        )
        run_comparison(it, folder, quiet=True)
        for place in folder.glob("*-seed0"):
            facts = facts_of(open_job(it.job)) | {"command": "cell"}
            (place / "settings.json").write_text(json.dumps(facts))
        capfd.readouterr()
        assert command(*words, "--dry-run") == 0 and stored(folder)
        del sys.modules["growing_net"]
        (tmp_path / "growing_net.py").write_text(net.replace("WIDTH", "32"))
        assert command(*words, "--dry-run") == 2
        assert capfd.readouterr().err == (
            f"dmcp: {folder}/uniform-50%-seed0 was made when growing_net:build was another network than now: give "
            "--out another folder, or remove the cells in this one.\n"
        )
    finally:
        sys.modules.pop("growing_net", None)
    other = folder / "uniform-50%-seed0" / "settings.json"
    facts = json.loads(other.read_text())
    other.write_text(json.dumps(facts | {"data": facts["data"] | {"train": 7}}))
    with pytest.raises(FileError, match="uniform-50%-seed0 and unpruned-seed0 do not have the same data: move one"):
        stored(folder)


def test_a_dry_run_lists_cells_and_runs_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(*options("--dry-run"), "--out", folder) == 0
    printed = capfd.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if "|" in line]
    assert rows[0] == ["cell", "state", "search epochs", "training epochs"]
    assert ["l1-50%-seed0", "missing", "", "1 fine-tuned"] in rows
    assert f"0 of 3 cells are done in {folder}." in printed and not folder.exists()
    assert command("compare", "--gather", folder) == 2
    assert "no cells of a comparison are done here" in capfd.readouterr().err


def test_speeds_are_measured_again_if_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def spy(names: Sequence[str], *_: object) -> dict[str, float]:
        asked.append([*names])
        return dict.fromkeys(names, 1.0)

    monkeypatch.setattr(runner_module, "measure", spy)
    every = ["unpruned-seed0", "uniform-50%-seed0", "l1-50%-seed0"]
    for more, names in ((["--methods", "uniform"], every[:2]), ([], every[2:]), (["--measure"], every)):
        asked.clear()
        assert command(*options(*more), "--out", folder) == 0
        assert asked == [names]
    (folder / "uniform-50%-seed0" / "model.safetensors").unlink()  # as in a folder that was brought from elsewhere
    asked.clear()
    assert command(*options("--measure"), "--out", folder) == 0
    assert asked == [[every[0], every[2]]]


def test_a_mapping_can_be_set(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [*options("--methods", "dmcp", "--no-unpruned"), "--out", folder]
    let_fail(folder, "dmcp-50%-seed0")
    assert command(*words, "--set", "dmcp.more={'warmup': 0.2}") == 2
    assert json.loads((folder / PLANS / "dmcp-50%-seed0.json").read_text())["cell"]["settings"] == {
        "more": {"warmup": 0.2}
    }
    capfd.readouterr()
    assert command(*words, "--set", "dmcp.more=warmup:0.2") == 2
    assert capfd.readouterr().err == (
        "dmcp: --set: dmcp.more cannot be 'warmup:0.2': write it like \"dmcp.more={'warmup': 0.2}\".\n"
    )


def test_the_command_names_cells_that_failed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    let_fail(folder, "unpruned-seed0", "uniform-50%-seed0")
    assert command(*options(), "--out", folder) == 2
    assert capfd.readouterr().err.splitlines() == [
        "dmcp: 3 cells failed, the same command starts only them again: "
        "unpruned-seed0: exit code 1: unpruned-seed0 has no luck; "
        "uniform-50%-seed0: exit code 1: uniform-50%-seed0 has no luck; "
        "l1-50%-seed0: not started: it needs unpruned-seed0, and that failed"
    ]


def test_true_and_false_are_not_words(folder: Path) -> None:
    words = [*options(), "--methods", "autoslim", "--set", "autoslim.distil=false", "--set", "autoslim.lr_share=1"]
    let_fail(folder, "autoslim-seed0", "unpruned-seed0")
    assert command(*words, "--out", folder) == 2
    plan = json.loads((folder / PLANS / "autoslim-seed0.json").read_text())
    assert plan["cell"]["settings"] == {"distill": False, "lr_share": 1}


# -- bounds on widths


def test_bounds_are_in_the_plans_of_all_cells_and_on_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner_module, "measure", lambda names, *_: dict.fromkeys(names, 1.0))
    words = [*options("--min-channels", "8", "--min-channels", "layer1=12", "--max-channels", "48"), "--out", folder]
    assert command(*words) == 0
    for path in (folder / PLANS).iterdir():
        search = json.loads(path.read_text())["search"]
        assert (search["min_channels"], search["max_channels"]) == ({"": 8, "layer1": 12}, 48)
    page = (folder / "compare.md").read_text()
    assert "; at least 8 channels, at least 12 channels in layer1, at most 48 channels; seeds 0." in page
    settings = json.loads((folder / "compare.json").read_text())["settings"]
    assert (settings["min_channels"], settings["max_channels"]) == ({"": 8, "layer1": 12}, 48)
    capfd.readouterr()
    assert command(*options(), "--out", folder) == 2
    assert "was begun with other settings (search.largest, search.smallest)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--min-channels", "conv11=8"],
            "smallest: there is no space named 'conv11', and no module of that name writes",
        ),
        (["--min-channels", "few"], "--min-channels few: that is no number of channels: write --min-channels 8"),
        (
            ["--max-channels", "layer3=32", "--budget", "90%"],
            "The budget '90%' asks for 687,168 macs, more than the largest widths allow",
        ),
        (["--min-channels", "16"], "The budget '50%' asks for 381,760 macs, less than the floor costs"),
        (
            ["--max-channels", "48", "--methods", "dmcp", "--set", "dmcp.more={'largest': 40}"],
            "--max-channels is for all methods: leave 'largest' out of --set dmcp.more.",
        ),
        (
            ["--max-channels", "48", "--budget", "75%", "--widths", "hand=hand.json"],
            "--widths: hand is not inside any budget: they keep 64 channels of layer3.0.downsample.0, of which 6 to 48",
        ),
    ],
)
def test_bounds_that_cannot_be_are_refused_before_anything_is_written(
    words: list[str],
    told: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hand.json").write_text(json.dumps({"layer2.0.conv1": 16, "layer3.0.conv1": 40}))
    assert command(*options(*words), "--out", folder) == 2
    assert told in capfd.readouterr().err.splitlines()[-1] and not folder.exists()


@pytest.mark.slow
def test_cells_keep_bounds_also_those_that_start_from_others(tmp_path: Path) -> None:
    methods = ["uniform", "slimming", "autoslim", "dmcp", "dmcp-direct"]
    words = options("--methods", ",".join(methods), "--no-unpruned", "--fine-tune-epochs", "0")
    words = [*words, "--set", "autoslim.epochs=1", "--set", "dmcp.epochs=2", "--out", tmp_path]
    assert command(*words, "--min-channels", "8", "--max-channels", "layer3=32") == 0
    for name in methods:
        widths = json.loads((tmp_path / f"{name}-50%-seed0" / "choice.json").read_text())["widths"]["widths"]
        assert min(widths.values()) >= 8
        assert all(width <= 32 for space, width in widths.items() if space.startswith("layer3"))
