"""The paper's experiments: which cells they are made of, what those do, and what is shown of them."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import planted_problem

import dmcp
from dmcp import cli, sampling
from dmcp.budget import parse
from dmcp.commands import paper as paper_commands
from dmcp.commands.compare import recipe
from dmcp.commands.paper import progress
from dmcp.comparison.cell_files import CHOICE, COST, RECOVERY, TIME, copied_widths, is_done, lend_widths
from dmcp.comparison.cell_runs import run_tasks
from dmcp.comparison.comparing import Comparison, Task, plan_cell, tasks
from dmcp.data import load, split
from dmcp.engine import Engine
from dmcp.errors import BudgetError, DmcpError, FileError, TrainingError
from dmcp.locks import Lock
from dmcp.markov import BORDER
from dmcp.methods.dmcp import DmcpConfig, DrawConfig, draw, find
from dmcp.nets import build, sample_shape
from dmcp.paper import findings
from dmcp.paper.alpha_findings import _row_of_draws
from dmcp.paper.arms import Arm, Study
from dmcp.paper.experiments import ALL, DRAWS, EXPERIMENTS, check_experiment, study_of
from dmcp.paper.findings import show, write
from dmcp.paper.outcomes import outcomes
from dmcp.paper.records import read_copied, read_recorded
from dmcp.paper.tasks import cells_of, command, epochs_of, study_tasks
from dmcp.pruning import Row
from dmcp.running.jobs import Job
from dmcp.running.plans import Cell, plan_from_json
from dmcp.runs import CHECKPOINTS, LOG, SETTINGS
from dmcp.saving import WIDTHS
from dmcp.searching.search import search
from dmcp.searching.searches import SearchResult
from dmcp.spaces import Widths
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import TrainConfig

# A plan as it was stored before there were experiments: cells that were begun with such a one must go on.
STORED: dict[str, Any] = {
    "command": "cell",
    "job": {
        "model": "cifar:resnet20",
        "model_args": [],
        "data": "/root/data/cifar10",
        "input": "",
        "weights": "",
        "frozen": [],
        "inexact": False,
        "batch": 512,
        "train_batch": 0,
        "holdout": 0.0,
        "device": "",
        "workers": None,
        "corrupt": "stop",
        "seed": 1,
    },
    "engine": {
        "precision": None,
        "channels_last": None,
        "compile": None,
        "graphs": None,
        "tf32": True,
        "deterministic": False,
        "sync_batchnorm": False,
    },
    "search": {
        "budget": "50%",
        "tolerance": 0.95,
        "groups": 10,
        "align": 1,
        "smallest": {},
        "largest": {},
        "epochs": 40,
        "warmup": 0.5,
        "sort": False,
        "subnets": 2,
        "draw": "markov",
        "warmup_draw": "uniform",
        "distil": True,
        "init": "target",
        "independent": False,
        "task_loss": True,
        "budget_weight": 0.1,
        "train_weights": True,
        "lr": 0.2,
        "min_lr": 0.02,
        "reference_batch": 1024,
        "momentum": 0.9,
        "weight_decay": 0.0001,
        "label_smoothing": 0.1,
        "alpha_lr": 0.5,
        "alpha_min_lr": 0.1,
        "alpha_momentum": 0.9,
        "accumulate": 1,
        "log_every": 50,
        "seed": 1,
    },
    "train": {
        "epochs": 60,
        "lr": 1.6,
        "reference_batch": 2048,
        "warmup_epochs": 1,
        "warmup_lr": 0.4,
        "min_lr": 0.0,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.0005,
        "label_smoothing": 0.1,
        "distillation": "none",
        "teacher_share": 0.5,
        "seed": 1,
    },
    "retrain": "scratch",
    "controls": False,
    "widths": "",
    "cell": {
        "method": "dmcp",
        "settings": {},
        "prepares": False,
        "uses": "",
        "holdout": 0.1,
        "scratch": True,
        "fine_tune_epochs": 20,
    },
    "every_steps": 1000,
    "every_minutes": 5.0,
    "options": {},
}


def plain(data: Any) -> Any:
    """As it is in a file."""
    return json.loads(json.dumps(data))


def study(seeds: int = 3, model: str = "cifar:resnet20", data: str = "/root/data/cifar10", **changes: Any) -> Study:
    """The usual study, as `dmcp paper` makes it."""
    common = Comparison(
        job=Job(model=model, data=data, batch=512),
        engine=Engine(),
        train=TrainConfig(epochs=60, lr=1.6, warmup_lr=0.4, warmup_epochs=1, weight_decay=5e-4),
        budgets=("50%", "30%"),
        methods=("uniform", "random", "dmcp"),
        seeds=tuple(range(seeds)),
        fine_tune_epochs=20,
    )
    return Study(common=replace(common, **changes), graph=graph_of(model))


@functools.cache
def graph_of(model: str) -> ChannelGraph:
    net = build(model)
    return dmcp.trace(net, torch.zeros(2, *sample_shape(net)))


def tiny(seeds: int = 2) -> Study:
    """One that takes seconds a cell."""
    job = Job(model="digits:resnet", data="digits", batch=256, device="cpu")
    train = TrainConfig(epochs=1, warmup_epochs=0.5)
    return study(seeds, "digits:resnet", "digits", job=job, train=train, settings={"dmcp": {"epochs": 2}})


# -- cells that were begun before


def test_stored_plans_and_the_identities_of_their_checkpoints_stay() -> None:
    plan = plan_from_json(STORED, "plan")
    assert plain(plan.to_json()) == STORED
    mine = {task.name: task.plan for task in study_tasks(study(), ["main"])}
    assert plain(mine["dmcp-50%-seed1"].to_json()) == STORED
    assert plan.cell and plan.cell.own


def test_plans_that_say_more_are_read_back() -> None:
    for task in study_tasks(study(), [*EXPERIMENTS]):
        again = plan_from_json(plain(task.plan.to_json()), task.name)
        assert plain(again.to_json()) == plain(task.plan.to_json()), task.name
        assert again.cell == task.plan.cell


def test_cells_of_a_comparison_are_the_same_cells() -> None:
    it = study()
    compared = {task.name: task for task in tasks(replace(it.common, methods=(*it.common.methods, "dmcp-direct")))}
    mine = {task.name: task for task in study_tasks(it, ["main", "sampling"])}
    assert len(compared.keys() & mine.keys()) == 3 * (1 + 2 * 3 + 1)
    for name in compared.keys() & mine.keys():
        assert compared[name] == mine[name]


# -- which cells


BY_NAME = (  # in the order in which they are told
    *("full", "recipe", "explain", "length", "rates", "taught"),
    *("seeds", "even", "halfway", "border", "bordered", "borderlong"),
)


def test_all_experiments_share_the_reference() -> None:
    it = study()
    for name in EXPERIMENTS:
        used = {task.name for task in study_tasks(it, [name])}
        assert ("dmcp-50%-seed2" in used) is (
            name not in ("recover", "full", "recipe", "length", "taught", "halfway", "borderlong")
        ), name
    every = [task.name for task in study_tasks(it, [*EXPERIMENTS])]
    assert len(every) == len({*every})


def test_cells_come_after_what_they_start_from() -> None:
    for name in EXPERIMENTS:
        seen: set[str] = set()
        for task in study_tasks(study(), [name]):
            assert seen.issuperset(task.after)
            assert task.plan.cell
            assert task.after == tuple(filter(None, (task.plan.cell.uses, task.plan.cell.teacher)))
            seen.add(task.name)


def arm_cells(name: str) -> dict[str, Cell]:
    """Label -> cell of the first seed."""
    it = study()
    found = {task.name: task.plan.cell for task in study_tasks(it, [name])}
    cells = {arm.label: found[cell] for arm, seed, cell in cells_of(it, EXPERIMENTS[name](it)) if seed == 0}
    return {label: cell for label, cell in cells.items() if cell}


def test_arms_change_what_the_paper_changed() -> None:
    def changed(name: str, label: str) -> Any:
        return arm_cells(name)[label].settings["more"]

    assert changed("warmup", "without warm-up") == {"warmup": 0.0}
    assert changed("sandwich", "original sandwich rule") == {"draw": "sandwich", "warmup_draw": "sandwich"}
    assert changed("scheme", "alphas by the budget") == {"train_weights": False, "task_loss": False, "warmup": 0.0}
    assert changed("scheme", "alphas by budget and task") == {"train_weights": False}
    assert changed("bernoulli", "independent Bernoulli") == {"independent": True}
    ready = arm_cells("pretrained")["pre-trained, channels sorted"]
    assert ready.uses == "unpruned-seed0"
    assert ready.settings == {"epochs": 15, "more": {"warmup": 0.0, "sort": True}}
    assert arm_cells("extra")["alphas see held-out images"].settings == {"hold_out": True}


def test_ablations_train_from_scratch_only() -> None:
    for task in study_tasks(study(), [*EXPERIMENTS]):
        assert task.plan.cell
        if task.plan.cell.method == "dmcp":
            assert task.plan.cell.own is bool(re.match(r"dmcp-\d+%", task.name)), task.name


def test_the_wider_network_has_the_same_target() -> None:
    it = study(seeds=1)
    (wide,) = (task.plan for task in study_tasks(it, ["scale"]) if task.plan.job.model_args)
    assert wide.job.model_args == ("width=24",)
    assert wide.search and int(str(wide.search.budget)) == it.graph.macs() // 2


def test_draws_are_numbered() -> None:
    found = [task.plan.cell for task in study_tasks(study(seeds=1), ["sampling"])]
    numbers = [cell.settings.get("number", 0) for cell in found if cell and cell.method == "dmcp-direct"]
    assert numbers == [*range(DRAWS)]


def test_seeds_of_searches_and_of_trainings_are_told_apart() -> None:
    copies = {task.name: task for task in study_tasks(study(), ["extra"]) if task.plan.cell.method == "copy"}  # type: ignore[union-attr]
    told = {(task.plan.cell.uses, task.plan.train.seed) for task in copies.values()}  # type: ignore[union-attr]
    assert told == {
        ("dmcp-50%-seed0", 1),
        ("dmcp-50%-seed0", 2),
        ("dmcp-50%-seed1", 0),
        ("dmcp-50%-seed2", 0),
    }
    it = study()
    rows = [(arm.label, cell) for arm, _, cell in cells_of(it, EXPERIMENTS["extra"](it))]
    for label in {label for label, _ in rows if label.startswith(("one search", "all searches"))}:
        assert [cell for other, cell in rows if other == label].count("dmcp-50%-seed0") == 1
        assert len([cell for other, cell in rows if other == label]) == 3


def test_the_full_recipe_has_cells_and_lengths_of_its_own() -> None:
    it = study(settings={"dmcp": {"epochs": 20, "groups": 5}})
    found = {task.name: task for task in study_tasks(it, ["main", "full"]) if "-full-" in task.name}
    names = ["unpruned-full", "uniform-full-50%", *(f"dmcp-{it}full-50%" for it in ("", "distilled-"))]
    names.append("uniform-distilled-full-50%")
    assert sorted(found) == sorted(f"{name}-seed{seed}" for name in names for seed in range(3))
    plans = [task.plan for task in found.values()]
    assert {(plan.train.epochs, plan.train.lr, plan.train.warmup_epochs) for plan in plans if plan.train} == {
        (240, 1.6, 1)
    }
    ours, taught = found["dmcp-full-50%-seed1"].plan.cell, found["dmcp-distilled-full-50%-seed1"]
    assert ours and ours.settings == {"epochs": 40, "groups": 5} and not ours.own
    assert taught.plan.cell and taught.plan.cell.method == "copy" and taught.plan.train and taught.plan.train.seed == 1
    assert taught.after == ("dmcp-full-50%-seed1", "unpruned-full-seed1")
    assert (taught.plan.train.teacher_share, taught.plan.train.teacher_temperature) == (0.9, 4)
    assert (taught.plan.cell.uses, taught.plan.cell.teacher) == taught.after
    same = found["uniform-distilled-full-50%-seed1"]
    assert same.plan.train == taught.plan.train and same.plan.cell and same.after == ("unpruned-full-seed1",)
    assert (same.plan.cell.method, same.plan.cell.teacher) == ("uniform", "unpruned-full-seed1")
    usual = {task.name: task.plan for task in study_tasks(it, ["main", "full"])}["dmcp-50%-seed1"]
    assert usual == {task.name: task.plan for task in study_tasks(it, ["main"])}["dmcp-50%-seed1"]


def test_the_recipe_is_chosen_without_the_test_images() -> None:
    it = study(seeds=1)
    arms = EXPERIMENTS["recipe"](study_of(it, "recipe"))
    found = {task.name: task.plan for task in study_tasks(it, ["recipe"])}
    assert {plan.cell and plan.cell.held_out for plan in found.values()} == {True} and len(found) == len(arms) == 2
    usual = found.pop("uniform-recipe-50%-seed0")
    assert usual.train == replace(it.common.train, epochs=240)
    changes = []
    for plan in found.values():
        assert replace(plan, train=usual.train) == usual and plan.train and usual.train
        changes.append({key for key, value in vars(plan.train).items() if value != vars(usual.train)[key]})
    assert changes == [{"lr"}]
    assert [arm.against for arm in arms] == ["", "uniform, the usual recipe"]


def test_rates_are_chosen_without_the_test_images() -> None:
    it = study(seeds=1)
    found = {task.name: task for task in study_tasks(it, ["rates"])}
    known = {task.name: task.plan for task in study_tasks(it, ["main", "explain"])}
    own = {name: task for name, task in found.items() if "rates" in name}
    assert len(own) == 6 and len(found) == 12
    for name, task in own.items():
        cell = task.plan.cell
        assert cell and cell.held_out and cell.method == "copy" and task.after == (name.replace("-rates", ""),)
        assert found[cell.uses].plan == known[cell.uses], name
        assert task.plan.train == known[cell.uses].train
    arms = EXPERIMENTS["rates"](it)
    assert {arm.against for arm in arms} == {"", *(f"dmcp at {budget}" for budget in ("50%", "70%", "15%"))}
    assert all(arm.against == "" or arm.label.startswith(f"{arm.against}, ") for arm in arms)


def test_held_out_images_do_not_test_widths_that_were_chosen_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    it = study(seeds=1)
    chosen = Arm(label="amc", name="amc", method="amc", budget="50%")
    again = Arm(label="again", name="again", method="copy", budget="50%", uses=chosen, held_out=True)
    monkeypatch.setitem(EXPERIMENTS, "rates", lambda it: [again])
    with pytest.raises(TrainingError, match="'amc' chooses by them"):
        study_tasks(it, ["rates"])


def test_the_longest_recipe_gives_both_widths_the_same_training() -> None:
    it = study(seeds=1, settings={"dmcp": {"epochs": 20, "groups": 5}})
    known, found = ({task.name: task.plan for task in study_tasks(it, [name])} for name in ("full", "taught"))
    same, ours = found.pop("uniform-longest-full-50%-seed0"), found.pop("dmcp-longest-full-50%-seed0")
    assert same.train == ours.train and ours.train and same.cell and ours.cell
    assert (ours.train.epochs, ours.train.teacher_share) == (360 - 40, 0.9)  # 240 of training in the full recipe
    assert same.cell.teacher == ours.cell.teacher == "unpruned-full-seed0" and ours.cell.uses == "dmcp-full-50%-seed0"
    assert {*found} == {"unpruned-full-seed0", "dmcp-full-50%-seed0"}
    assert all(plan == known[name] for name, plan in found.items())
    own = study_of(it, "taught")
    lengths = [epochs_of(own, arm) for arm in EXPERIMENTS["taught"](own)]
    assert lengths == [{"training": 320, "teacher": 240}, {"search": 40, "training": 320, "teacher": 240}]
    brief = study(seeds=1, train=recipe(5, 1.6, 5e-4, 0.1))  # 20 epochs of training, a search of 60
    with pytest.raises(DmcpError, match="taught: a search of 60 epochs leaves none of 30 for the training: raise"):
        study_tasks(brief, ["taught"])


def test_more_seeds_go_on_where_main_ends() -> None:
    it = study(seeds=5, budgets=("50%", "15%"))
    found = {task.name: task.plan for task in study_tasks(it, ["seeds"])}
    known = {task.name: task.plan for task in study_tasks(it, ["main"])}
    later = [f"dmcp-seeds-{budget}-seed{seed}" for budget in ("50%", "15%") for seed in (3, 4)]
    half = {name: task for name in found if "half" in name and (task := found[name])}
    assert {*later} == {*found} - {*known} - {*half} and len(found) == 2 * 3 * 5 and len(half) == 2 * 5
    for name, plan in half.items():
        start = found[name.replace("-half", "")]
        assert plan.cell and plan.cell.uses == name.replace("-half", "") and plan.train == start.train
        assert plan.cell.settings == {"toward_uniform": 0.5} and plan.search == start.search
    assert all(plan == known[name] for name, plan in found.items() if name in known)
    for name in later:
        usual, plan = known[name.replace("-seeds", "")], found[name]
        assert usual.cell and plan.cell and (usual.cell.own, plan.cell.own) == (True, False)
        assert replace(plan, cell=usual.cell) == usual and replace(plan.cell, own=True) == usual.cell
    assert {task.name for task in study_tasks(study(seeds=3), ["seeds"]) if "half" not in task.name} <= {*known}
    arms = EXPERIMENTS["seeds"](it)
    assert {(arm.label, arm.against) for arm in arms if arm.budget == "15%"} == {
        ("uniform at 15%", ""),
        ("dmcp at 15%", "uniform at 15%"),
        ("dmcp at 15%, half-way to uniform", "uniform at 15%"),
    }


def test_how_far_from_uniform_is_chosen_without_the_test_images() -> None:
    it = study(seeds=1, budgets=("70%", "50%", "30%", "15%"))
    found = {task.name: task for task in study_tasks(it, ["even"])}
    rates = {task.name: task.plan for task in study_tasks(it, ["rates"])}
    for budget in ("70%", "50%", "30%", "15%"):
        names = [f"{name}-{budget}-seed0" for name in ("uniform-even", "dmcp-rates", "dmcp-even")]
        plans = [found.pop(name).plan for name in names]
        assert all(plan.cell and plan.cell.held_out and plan.train == plans[0].train for plan in plans)
        assert plans[1] == rates.get(names[1], plans[1])  # run once for both
        assert plans[2].cell and plans[1].cell and plans[2].cell.uses == plans[1].cell.uses
    known = {task.name: task.plan for task in study_tasks(it, ["main"])}
    assert found and all(task.plan == known[name] for name, task in found.items())


def test_what_was_chosen_is_told_by_options() -> None:
    it, plain = study(seeds=1), study(seeds=1, train=recipe(60, 1.6, 5e-4, 0.0))
    assert "--label-smoothing 0.0" in " ".join(command(plain, "full"))
    assert "--label-smoothing" not in command(it, "full") and "--alpha-lr" not in command(it, "full")
    rates = {"alpha_lr": 5.0, "alpha_min_lr": 1.0}
    fast = study(seeds=1, settings={"dmcp": {"more": rates}})
    assert "--alpha-lr 5.0" in " ".join(command(fast, "full"))
    (cold,) = (task.plan.cell for task in study_tasks(fast, ["warmup"]) if "cold" in task.name)
    assert cold and cold.settings == {"more": rates | {"warmup": 0.0}}


def test_faster_alphas_change_nothing_else() -> None:
    it = replace(study(seeds=1, budgets=("50%",)), wider=("width=20",))
    found = {task.name: task.plan for task in study_tasks(it, ["explain"])}
    half = it.graph.macs() // 2
    pairs = {
        "dmcp-fast-70%": "dmcp-70%",
        "dmcp-fast-15%": "dmcp-15%",
        "dmcp-fast-50%": "dmcp-50%",
        f"dmcp-wide-fast-{half}": f"dmcp-wide-{half}",
    }
    settings = {"more": {"alpha_lr": 5.0, "alpha_min_lr": 1.0}}
    for name, usual in pairs.items():
        fast, slow = (replace(found[f"{text}-seed0"], cell=None) for text in (name, usual))
        assert fast == slow, name
        cell = found[f"{name}-seed0"].cell
        assert cell == Cell(method="dmcp", settings=settings, own=False, fine_tune_epochs=20)
    rest = {"uniform-70%", "uniform-15%", "unpruned", "dmcp-frozen-50%", "dmcp-frozen-trained-50%"}
    assert {*found} == {f"{name}-seed0" for name in (*rest, *pairs.keys(), *pairs.values())}
    assert found[f"dmcp-wide-fast-{half}-seed0"].job.model_args == ("width=20",)
    other = replace(it, common=study(1).common)
    known = {task.name: task.plan for task in study_tasks(other, ["main", "scale", "scheme"])}
    assert all(found[name] == known[name] for name in found.keys() & known.keys())


def test_a_longer_search_and_a_brief_training_change_nothing_else() -> None:
    it = study(seeds=1, settings={"dmcp": {"epochs": 20, "groups": 5}})
    known, found = ({task.name: task.plan for task in study_tasks(it, [name])} for name in ("full", "length"))
    assert len(found) == 5 and all(
        found[name] == known[name] for name in ("uniform-full-50%-seed0", "dmcp-full-50%-seed0")
    )
    usual, late = found["dmcp-full-50%-seed0"], found["dmcp-longer-full-50%-seed0"]
    assert late.cell and late.cell.settings == {"epochs": 120, "groups": 5}
    assert replace(late, cell=usual.cell) == usual
    for brief, of in (("uniform-brief-full", "uniform-full"), ("dmcp-brief-full", "dmcp-full")):
        mine, theirs = found[f"{brief}-50%-seed0"], found[f"{of}-50%-seed0"]
        assert mine.train and theirs.train and mine.train == replace(theirs.train, epochs=60)
    assert (again := found["dmcp-brief-full-50%-seed0"].cell) and again.uses == "dmcp-full-50%-seed0"
    arms = {arm.label: arm for arm in EXPERIMENTS["length"](study_of(it, "length"))}
    lengths = {label: sum(epochs_of(study_of(it, "length"), arm).values()) for label, arm in arms.items()}
    assert [*lengths.values()] == [240, 280, 360, 60, 100]
    assert arms["dmcp, a quarter of the training"].against == "uniform, a quarter of the training"


def test_frozen_weights_are_trained_ones_of_the_same_seed() -> None:
    cells = arm_cells("explain")
    trained, usual = cells["alphas by budget and task, trained weights"], cells["alphas by budget and task"]
    assert usual == arm_cells("scheme")["alphas by budget and task"]
    assert trained.uses == "unpruned-seed0" and not trained.own
    assert trained.settings == {"epochs": 15, "more": {"train_weights": False, "warmup": 0.0, "sort": True}}


def test_only_a_network_that_was_chosen_has_a_teacher() -> None:
    with pytest.raises(TrainingError, match="leave the teacher out"):
        Cell(method="", teacher="unpruned-seed0")
    with pytest.raises(TrainingError, match="leave the teacher out"):
        Cell(method="dmcp", teacher="unpruned-seed0", scratch=False)
    with pytest.raises(TrainingError, match="'amc' chooses by them"):
        Cell(method="amc", held_out=True)
    with pytest.raises(TrainingError, match="'dmcp' chooses by them"):
        Cell(method="dmcp", held_out=True, settings={"hold_out": True})


def test_each_arm_is_compared_with_what_it_changes() -> None:
    def references(name: str) -> dict[str, str]:
        return {arm.label: arm.against for arm in EXPERIMENTS[name](study())}

    for name in ("warmup", "sandwich", "scheme", "bernoulli", "pretrained", "scale"):
        usual = [arm.label for arm in EXPERIMENTS[name](study()) if arm.name == "dmcp"]
        assert [label for label, of in references(name).items() if not of] == usual, name
        assert {of for of in references(name).values() if of} == {*usual}, name
    found = references("extra")
    assert [of for label, of in found.items() if label.startswith(("one search", "all searches"))] == ["", ""]
    assert list(found.values()).count("alphas start at the budget, see the same images") == 3
    assert {*references("full").values()} == {"", "uniform"} and references("full")["uniform"] == ""
    found = references("explain")
    assert found["dmcp at 70%, alphas 10 times as fast"] == found["dmcp at 70%"] == "uniform at 70%"
    assert found["dmcp at 15%, alphas 10 times as fast"] == "uniform at 15%" and not found["uniform at 15%"]
    narrow, wide = (f"dmcp at 50%, unpruned network {size}x" for size in ("1.0", "1.5"))
    twice = f"{narrow}, alphas 10 times as fast"
    assert [label for label, of in found.items() if of == narrow] == [twice, wide]
    assert [label for label, of in found.items() if of == twice] == [f"{wide}, alphas 10 times as fast"]
    assert found["alphas by budget and task, trained weights"] == "alphas by budget and task"


def test_unknown_experiments_are_refused() -> None:
    with pytest.raises(DmcpError, match="did you mean warmup"):
        check_experiment("warm-up")


# -- what cells do


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cells of one seed: recover, pretrained, frozen, another start, draws, a copy of the reference with its seed."""
    it, folder = tiny(1), tmp_path_factory.mktemp("cells")
    wanted = {task.name: task for task in study_tasks(it, ["recover", "pretrained", "sampling", "extra", "explain"])}
    names = ["unpruned-seed0", "dmcp-50%-seed0", "recover-seed0", "dmcp-sorted-50%-seed0", "dmcp-direct4-50%-seed0"]
    names += ["dmcp-held-out-50%-seed0", "dmcp-frozen-trained-50%-seed0", "dmcp-init-zero-50%-seed0"]
    cells = [wanted[name] for name in names]
    plan = plan_cell(it.common, 0, Cell(method="copy", uses="dmcp-50%-seed0"), "50%")
    same = Task("dmcp-search0-50%-seed0", plan, ("dmcp-50%-seed0",))
    failed = run_tasks([*cells, same], folder, torch.device("cpu"), quiet=True)
    assert [end.describe() for end in failed] == []
    return folder


@pytest.mark.slow
def test_cells_of_experiments_are_done_and_not_run_again(done: Path) -> None:
    it = tiny(1)
    wanted = study_tasks(it, ["recover", "pretrained", "sampling", "extra"])
    states = {cell.name: cell for cell in progress(wanted, done)}
    assert states["recover-seed0"].state == "done" and states["dmcp-sorted-50%-seed0"].state == "done"
    assert states["recover-wrong-seed0"].state == "missing"
    assert states["recover-wrong-seed0"].seconds == states["recover-seed0"].seconds  # one of its kind
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*.json") if path.parent.name != "plans"}
    finished = [task for task in wanted if is_done(done / task.name)]
    assert run_tasks(finished, done, torch.device("cpu"), quiet=True) == []
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_a_copy_with_the_same_seed_is_the_same_network(done: Path) -> None:
    one, two = done / "dmcp-50%-seed0", done / "dmcp-search0-50%-seed0"
    for name in (WIDTHS, "model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.slow
def test_recover_and_variants_leave_what_is_shown(done: Path) -> None:
    stored = json.loads((done / "recover-seed0" / RECOVERY).read_text())
    assert stored["frozen"] and len(stored["macs_shares"]) == len(stored["accuracies"]) == 5  # 1,415 / 256
    log = (done / "dmcp-sorted-50%-seed0" / LOG).read_text()
    assert '"epoch": 0' in log and '"epoch": 1' not in log  # one epoch, which would have followed the warm-up
    assert ", own" not in log and "dmcp, own" in (done / "dmcp-50%-seed0" / LOG).read_text()
    log = (done / "dmcp-frozen-trained-50%-seed0" / LOG).read_text()
    moves = [line for line in map(json.loads, log.splitlines()) if line.get("stage") == "search"]
    assert moves and all(line["weight_losses"] is None and line["ratios"] for line in moves)  # only the alphas move
    for name in ("recover", "pretrained", "sampling", "extra", "distribution", "explain"):
        shown = show(tiny(1), name, done)
        assert shown and shown.text.startswith("|") and shown.figures, name
        if name == "distribution":
            assert all(0 <= row["one_peak"] <= row["one_peak_filled"] <= 1 for row in shown.rows)
            common = tiny(1).common
            other = replace(tiny(1), common=replace(common, train=replace(common.train, lr=common.train.lr / 2)))
            again = show(other, name, done)
            assert any("start" in row for row in shown.rows)
            assert again and not any("start" in row for row in again.rows)  # cells of extra by other settings


def test_peaks_are_those_of_what_the_alphas_mean() -> None:
    graph = study().graph
    net = dmcp.Supernet(build("cifar:resnet20"), graph)  # with alphas of zero
    found = SearchResult(net.alpha.detach(), net.sizes, graph, parse("50%", graph), 0.95)
    assert _row_of_draws("", found, 0)["one_peak"] == 1  # the floor: each step halves what is left
    assert _row_of_draws("", replace(found, process=BORDER), 0)["one_peak"] == 0  # the floor, or all of a space


def test_alphas_that_see_the_budget_alone_need_no_warm_up() -> None:
    problem, found = planted_problem("57%"), list[SearchResult]()
    blind = {"train_weights": False, "task_loss": False, "init": "random"}
    tell = replace(problem, tell=lambda _, told: found.append(told) if isinstance(told, SearchResult) else None)
    find(tell, DmcpConfig(epochs=4, more=blind))
    find(tell, DmcpConfig(epochs=2, more=blind | {"warmup": 0.0}))
    assert torch.equal(found[0].alphas, found[1].alphas)


def test_draws_of_one_search_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "direct", functools.partial(sampling.direct, tries=2000))
    problem = planted_problem("57%")
    told: list[Any] = []
    find(replace(problem, tell=lambda _, record: told.append(record)), DmcpConfig(epochs=2))
    (result,) = (record for record in told if isinstance(record, SearchResult))
    drawn = [draw(problem, DrawConfig(number=number), result).widths for number in range(3)]
    assert drawn[0] == draw(problem, DrawConfig(), result).widths
    assert len({tuple(widths.values()) for widths in drawn}) == 3
    sure = replace(result, alphas=torch.full_like(result.alphas, -50.0))  # only the floor is ever drawn
    with pytest.raises(BudgetError, match="no more than 1 different"):
        draw(problem, DrawConfig(number=1), sure)
    with pytest.raises(TrainingError, match="at least 0"):
        DrawConfig(number=-1)


def test_held_out_images_move_the_alphas_only(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, given = planted_problem("57%"), []

    def spy(*args: Any, **kwargs: Any) -> SearchResult:
        given.append((args[1], args[4]))
        return search(*args, **kwargs)

    monkeypatch.setattr("dmcp.methods.dmcp.search", spy)
    find(problem, DmcpConfig(epochs=2))
    find(problem, DmcpConfig(epochs=2, hold_out=True))
    assert given == [(problem.loader, None), (problem.loader, problem.held)]


# -- what is shown


def write_cell(task: Task, folder: Path, it: Study, accuracy: float, own: float | None = None) -> None:
    """The folder of a cell that is done, made by hand."""
    place = folder / task.name
    place.mkdir(parents=True)
    assert task.plan.cell
    method = task.plan.cell.method or "unpruned"
    widths = it.graph.widths({space.name: space.size - task.plan.job.seed - 1 for space in it.graph.spaces})
    rows = [Row(method, it.graph.macs() // 2, 1000, accuracy)]
    rows += [Row(f"{method}, own", it.graph.macs() // 2, 1000, own)] if own is not None else []
    (place / LOG).write_text("".join(json.dumps({"stage": "test"} | asdict(row)) + "\n" for row in rows))
    (place / COST).write_text('{"seconds": 5.0, "sample_passes": 100}')
    (place / TIME).write_text('{"seconds": 20.0, "device": "cpu"}')
    (place / CHOICE).write_text(json.dumps({"widths": widths.to_json(), "kept": {}, "has_model": False}))
    (place / WIDTHS).write_text(json.dumps(widths.to_json()))
    facts = {"unpruned": {"macs": it.graph.macs(), "params": it.graph.params()}}
    (place / SETTINGS).write_text(json.dumps(plain(task.plan.to_json()) | facts))
    (folder / "plans").mkdir(exist_ok=True)
    (folder / "plans" / f"{task.name}.json").write_text(json.dumps(task.plan.to_json()))


def test_a_table_has_mean_deviation_and_number(tmp_path: Path) -> None:
    it = study()
    for number, task in enumerate(study_tasks(it, ["warmup"])):  # seed by seed, with and without
        write_cell(task, tmp_path, it, accuracy=0.9 - 0.1 * (number % 2) + 0.01 * (number // 2))
    shown = show(it, "warmup", tmp_path)
    assert shown
    assert "| with warm-up    | 91.00 ± 1.00 (3) " in shown.text
    assert "| without warm-up | 81.00 ± 1.00 (3) " in shown.text
    assert shown.rows[0]["accuracies"] == pytest.approx([0.9, 0.91, 0.92])


def test_differences_are_of_networks_with_the_same_seed(tmp_path: Path) -> None:
    it = study()
    values = {"dmcp-50%-seed0": 0.9, "dmcp-50%-seed1": 0.8, "dmcp-cold-50%-seed1": 0.79, "dmcp-cold-50%-seed2": 0.5}
    for task in study_tasks(it, ["warmup"]):
        if task.name in values:
            write_cell(task, tmp_path, it, values[task.name])
    shown = show(it, "warmup", tmp_path)
    assert shown
    usual, cold = shown.rows
    assert "above" not in usual and cold["above"]["values"] == pytest.approx([-0.01])
    assert (cold["above"]["of"], cold["above"]["seeds"]) == ("with warm-up", [1])
    head, _, *rows = (re.split(r" *\| *", line)[1:-1] for line in shown.text.splitlines())
    assert head[2] == "points above with warm-up" and [row[2] for row in rows] == ["", "-1.00 (1)"]


def test_borders_are_searched_once_and_trained_with_and_without_the_held_out_images() -> None:
    it = study(seeds=5)
    found = {task.name: task.plan for task in study_tasks(it, ["border", "bordered"])}
    known = {task.name: task.plan for task in study_tasks(it, ["rates", "even", "seeds"])}
    new = {name: plan for name, plan in found.items() if "border" in name}
    assert {*found} - {*new} <= {*known} and all(found[name] == known[name] for name in {*found} - {*new})
    searched = [f"dmcp-border-{budget}-seed{seed}" for budget in ("50%", "30%", "70%", "15%") for seed in range(3)]
    later = [f"dmcp-border-seeds-{budget}-seed{seed}" for budget in ("50%", "15%") for seed in (3, 4)]
    copies = {name: name.replace("border", "border-rates") for name in searched}
    assert {*new} == {*searched, *later, *copies.values()}
    for name in (*searched, *later):
        cell = new[name].cell
        assert cell and cell.settings == {"more": {"border": True}} and not cell.held_out and not cell.own
    for name, copied in copies.items():
        cell = new[copied].cell
        assert cell and cell.uses == name and cell.held_out and cell.method == "copy"
    (long,) = {task.name for task in study_tasks(study(seeds=1), ["borderlong"])} - {
        task.name for task in study_tasks(study(seeds=1), ["full"])
    }
    assert long == "dmcp-border-full-50%-seed0"


def test_seeds_of_two_arms_are_one_row_and_one_line_of_dots(tmp_path: Path) -> None:
    it = study(seeds=8)
    gains = {"uniform": 0.0, "dmcp": 0.02, "half": 0.03}
    for task in study_tasks(it, ["seeds"]):
        way = "half" if "-half" in task.name else task.name.partition("-")[0]
        write_cell(task, tmp_path, it, 0.8 + 0.01 * task.plan.job.seed + gains[way])
    shown = show(it, "seeds", tmp_path)
    assert shown
    rows = [re.split(r" *\| *", line)[1:4] for line in shown.text.splitlines()[2:]]
    assert rows[:3] == [
        ["uniform at 50%", "83.50 ± 2.45 (8)", ""],
        ["dmcp at 50%", "85.50 ± 2.45 (8)", "uniform at 50%: +2.00 ± 0.00 (8)"],
        ["dmcp at 50%, half-way to uniform", "86.50 ± 2.45 (8)", "uniform at 50%: +3.00 ± 0.00 (8)"],
    ]
    assert len(rows) == 6 and all(row[1].endswith("(8)") for row in rows)
    plain_rows = {row["label"]: row for row in shown.rows}
    ours = plain_rows["dmcp at 15%"]
    assert ours["accuracies"] == pytest.approx([0.82 + 0.01 * seed for seed in range(8)])
    assert (ours["above"]["of"], ours["above"]["seeds"]) == ("uniform at 15%", [*range(8)])
    (axes,) = shown.figures[""].axes
    dotted = [line for line in axes.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dotted] == [8] * 6  # type: ignore[arg-type]
    assert "8 seeds" in shown.figures[""].get_suptitle()


def test_rows_are_in_the_order_of_the_arms(tmp_path: Path) -> None:
    """Also where the first seed of the first arm is not done yet."""
    it = study()
    for task in study_tasks(it, ["scheme"]):
        if task.name != "dmcp-budget-random-50%-seed0":
            write_cell(task, tmp_path, it, 0.9)
    shown = show(it, "scheme", tmp_path)
    assert shown
    assert [row["label"] for row in shown.rows] == [arm.label for arm in EXPERIMENTS["scheme"](it)]


def test_draws_and_methods_have_differences_too(tmp_path: Path) -> None:
    it = study(seeds=2)
    for task in study_tasks(it, ["main", "sampling"]):
        cell, seed = task.plan.cell, task.plan.job.seed
        assert cell
        drop = 0.02 + 0.01 * cell.settings.get("number", 0) + 0.001 * seed if cell.method != "dmcp" else 0.0
        write_cell(task, tmp_path, it, 0.9 + 0.03 * seed - drop, 0.97 if cell.method == "dmcp" else None)
    shown = show(it, "sampling", tmp_path)
    assert shown and "| points above expected sampling |" in shown.text.splitlines()[0].replace("  ", "")
    above = {row["label"]: row["above"]["values"] for row in shown.rows if "above" in row}
    assert above["direct sampling, highest"] == pytest.approx([-0.02, -0.021])
    assert above["direct sampling, mean"] == pytest.approx([-0.04, -0.041])
    assert above["direct sampling, lowest"] == pytest.approx([-0.06, -0.061]) and len(above) == 3
    shown = show(it, "main", tmp_path)
    assert shown
    pairs = {(row["method"], row["budget"], row["own"]): row["above"] for row in shown.rows if "above" in row}
    assert len(pairs) == 2 * 3 and {method for method, _, _ in pairs} == {"dmcp", "random"}
    assert pairs["dmcp", "30%", False]["values"] == pytest.approx([0.02, 0.021])
    assert pairs["dmcp", "30%", True]["values"] == pytest.approx([0.09, 0.061])
    assert pairs["random", "50%", False] == {"of": "uniform at 50%", "seeds": [0, 1], "values": [0.0, 0.0]}


def test_the_full_recipe_tells_its_lengths(tmp_path: Path) -> None:
    it = study(seeds=1)
    values = {"unpruned-full-seed0": 0.92, "uniform-full-50%-seed0": 0.90, "dmcp-full-50%-seed0": 0.91}
    for task in study_tasks(it, ["full"]):
        write_cell(task, tmp_path / "cells", it, values.get(task.name, 0.94))
    shown = show(it, "full", tmp_path / "cells")
    assert shown
    rows = {
        cells[1]: cells[2:-1]
        for line in shown.text.splitlines()
        if len(cells := re.split(r" *\| *", line)) > 5 and "--" not in line
    }
    assert rows[""][:2] == ["accuracy in %", "points above uniform"]
    assert {label: (row[0], row[1], row[-1]) for label, row in rows.items() if label} == {
        "unpruned": ("92.00 (1)", "+2.00 (1)", "240"),
        "uniform": ("90.00 (1)", "", "240"),
        "dmcp": ("91.00 (1)", "+1.00 (1)", "60 + 240 = 300"),
        "uniform, distilled": ("94.00 (1)", "+4.00 (1)", "240, and 240 of its teacher"),
        "dmcp, distilled": ("94.00 (1)", "+4.00 (1)", "60 + 240 = 300, and 240 of its teacher"),
    }
    path, *_ = write(it, "full", shown, tmp_path / "cells", tmp_path, "full")
    data = json.loads(path.read_text())
    assert (data["train"]["epochs"], data["search_epochs"], data["missing"]) == (240, 60, [])
    words = data["command"]
    assert (words[words.index("--epochs") + 1], words[words.index("--search-epochs") + 1]) == ("60", "30")
    cells = {(cell["label"], cell["name"]): cell["accuracy"] for cell in data["cells"]}
    assert cells["dmcp", "dmcp-full-50%-seed0"] == 0.91


def test_explanations_name_the_row_of_each_difference(tmp_path: Path) -> None:
    it = study(seeds=1)
    for task in study_tasks(it, ["explain"]):
        write_cell(task, tmp_path, it, 0.9 if "fast" in task.name else 0.8)
    shown = show(it, "explain", tmp_path)
    assert shown and "| points above  " in shown.text
    assert "| uniform at 15%: +10.00 (1) " in shown.text and "| uniform at 70%: +0.00 (1) " in shown.text
    assert "| dmcp at 50%, unpruned network 1.0x: +10.00 (1) " in shown.text
    assert "| dmcp at 50%, unpruned network 1.0x, alphas 10 times as fast: +0.00 (1) |" in shown.text
    searched = [row["epochs"]["search"] for row in shown.rows if "search" in row["epochs"]]
    assert searched == [30] * 9 + [15]
    assert "| 15 + 60 = 75, and 60 of the network that it starts from |" in shown.text


def test_the_same_cells_give_the_same_bytes(tmp_path: Path) -> None:
    it = study()
    for task in study_tasks(it, ["warmup"])[:-1]:
        write_cell(task, tmp_path / "cells", it, accuracy=0.9)
    written = []
    for place in (tmp_path / "one", tmp_path / "two"):
        shown = show(it, "warmup", tmp_path / "cells")
        assert shown
        written.append([path.read_bytes() for path in write(it, "warmup", shown, tmp_path / "cells", place, "warmup")])
    assert written[0] == written[1]
    data = json.loads(written[0][0])
    assert data["missing"] == ["dmcp-cold-50%-seed2"]
    assert [cell["name"] for cell in data["cells"]][:2] == ["dmcp-50%-seed0", "dmcp-cold-50%-seed0"]


def test_draws_are_shown_by_highest_mean_and_lowest(tmp_path: Path) -> None:
    it = study(seeds=2)
    for task in study_tasks(it, ["sampling"]):
        number = task.plan.cell.settings.get("number", 0) if task.plan.cell else 0
        write_cell(task, tmp_path, it, 0.8 + 0.01 * number + 0.1 * task.plan.job.seed)
    shown = show(it, "sampling", tmp_path)
    assert shown
    means = {row["label"]: row.get("mean") for row in shown.rows}
    assert means["direct sampling, highest"] == pytest.approx(0.89)
    assert means["direct sampling, lowest"] == pytest.approx(0.85)
    assert means["direct sampling, mean"] == pytest.approx(0.87)


def test_the_deviation_inside_a_search_is_pooled(tmp_path: Path) -> None:
    """Variances weigh by their number less one: 0 of five draws, 2e-4 of two."""
    it = study(seeds=2)
    for task in study_tasks(it, ["sampling"]):
        assert task.plan.cell
        number = task.plan.cell.settings.get("number", 0)
        if task.plan.job.seed == 0 or number < 2:
            write_cell(task, tmp_path, it, 0.8 + 0.02 * number * task.plan.job.seed)
    shown = show(it, "sampling", tmp_path)
    assert shown
    (row,) = (row for row in shown.rows if row["label"] == "deviation inside a search")
    assert row["deviation"] == pytest.approx((2e-4 / 5) ** 0.5)
    assert re.search(r"deviation inside a search +\| 0\.63 ", shown.text)


def test_differences_of_widths_are_paired_by_seed(tmp_path: Path) -> None:
    it = study(seeds=2)
    for task in study_tasks(it, ["scale"]):
        write_cell(task, tmp_path, it, 0.9)
    (changed,) = tmp_path.glob("dmcp-wide-*-seed1")
    choice = json.loads((changed / CHOICE).read_text())
    choice["widths"]["widths"]["conv1"] += 7
    (changed / CHOICE).write_text(json.dumps(choice))
    shown = show(it, "scale", tmp_path)
    assert shown
    gaps = shown.rows[-1]["differences"]
    assert gaps["conv1"] == [0, 7] and gaps["layer1.0.conv1"] == [0, 0]


def test_wider_networks_of_other_spaces_have_no_differences(tmp_path: Path) -> None:
    it = study(seeds=1)
    for task in study_tasks(it, ["scale"]):
        write_cell(task, tmp_path, it, 0.9)
    (path,) = tmp_path.glob(f"dmcp-wide-*/{CHOICE}")
    stored = json.loads(path.read_text())
    stored["widths"]["widths"].popitem()
    path.write_text(json.dumps(stored))
    shown = show(it, "scale", tmp_path)
    assert shown and len(shown.rows) == 2 and [*shown.figures] == [""]


def test_main_has_peers_of_the_same_protocol_only(tmp_path: Path) -> None:
    it = study(seeds=1)
    for task in study_tasks(it, ["main"]):
        write_cell(task, tmp_path, it, 0.9, 0.95 if task.plan.cell and task.plan.cell.method == "dmcp" else None)
    others = replace(it.common, methods=("autoslim", "amc"))
    for task in tasks(others):
        if task.name.startswith(("autoslim", "amc", "base")):
            longer = replace(task.plan, train=TrainConfig(epochs=99)) if task.name.startswith("amc") else task.plan
            write_cell(replace(task, plan=longer), tmp_path, it, 0.7)
    shown = show(it, "main", tmp_path)
    assert shown
    assert {row["method"] for row in shown.rows} == {"unpruned", "uniform", "random", "dmcp", "autoslim"}
    assert [row["budget"] for row in shown.rows if row["method"] == "dmcp" and row["own"]] == ["50%", "30%"]
    assert all(row["seeds"] == (0,) for row in shown.rows)


def test_nothing_is_shown_of_nothing(tmp_path: Path) -> None:
    for name in EXPERIMENTS:
        assert show(study(), name, tmp_path) is None
        assert outcomes(study(), EXPERIMENTS[name](study()), tmp_path) == []
    assert {cell.state for cell in progress(study_tasks(study(), ["warmup"]), tmp_path)} == {"missing"}


def test_figures_say_what_is_compared(tmp_path: Path) -> None:
    it = study(seeds=1)
    for name in ("main", "warmup", "sampling", "scale", "extra"):
        for task in study_tasks(it, [name]):
            if not (tmp_path / task.name).exists():
                write_cell(task, tmp_path, it, 0.9)
        shown = show(it, name, tmp_path)
        assert shown
        about = re.sub(r"^(Table|Figure).*?: ", "", (EXPERIMENTS[name].__doc__ or "").splitlines()[0])
        for figure in shown.figures.values():
            told = figure.get_suptitle()
            assert (
                told.replace("\n", " ")
                .lower()
                .startswith(f"{about.lower()} cifar:resnet20, cifar10, 60 epochs, 1 seed")
            )


@pytest.mark.parametrize(
    ("name", "epochs"),
    [("halfway", "240 epochs"), ("full", "240 epochs"), ("taught", "300 epochs"), ("length", "60 or 240 epochs")],
)
def test_figures_say_how_long_their_networks_were_trained(name: str, epochs: str, tmp_path: Path) -> None:
    it = study(seeds=1)
    for task in study_tasks(it, [name]):
        write_cell(task, tmp_path, it, 0.9)
    shown = show(it, name, tmp_path)
    assert shown and f"cifar10, {epochs}, 1 seed" in shown.figures[""].get_suptitle()


def test_every_way_to_recover_is_drawn_with_its_seeds(tmp_path: Path) -> None:
    it = study(seeds=2)
    curve = {"macs_shares": [0.1] * 300, "accuracies": [0.2] * 300, "recovered": 0.2, "trained": 0.9, "frozen": True}
    for task in study_tasks(it, ["recover"]):
        if task.plan.cell and task.plan.cell.method == "recover":
            (tmp_path / task.name).mkdir()
            (tmp_path / task.name / COST).write_text("{}")
            (tmp_path / task.name / LOG).write_text("")
            (tmp_path / task.name / SETTINGS).write_text(json.dumps(plain(task.plan.to_json())))
            (tmp_path / task.name / RECOVERY).write_text(json.dumps(curve))
    shown = show(it, "recover", tmp_path)
    assert shown
    figure = shown.figures[""]
    assert "cifar:resnet20" in figure.get_suptitle() and "mean of 2 seeds" in figure.get_suptitle()
    for axes in figure.axes:
        assert len([line for line in axes.get_lines() if len(line.get_xdata()) > 2]) == 4 * (1 + 2)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:4] == [arm.label for arm in EXPERIMENTS["recover"](it)]


def test_rows_without_networks_leave_no_gap() -> None:
    figure = findings.dots({"one": [0.5, 0.6], "none yet": []}, "title")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "none yet"]


# -- the command

TINY = ["--model", "digits:resnet", "--data", "digits", "--batch", "64", "--device", "cpu"]
MADE = plain(  # of a table that is there
    {"experiment": "warmup", "model": "digits:resnet", "model_args": [], "data": "digits", "batch": 64}
    | {
        "train": asdict(recipe(3, 0.8, 5e-4, 0.1)),
        "settings": {"dmcp": {"epochs": 4}},
        "search_epochs": 4,
        "holdout": 0.1,
    }
    | {"seeds": [0, 1]}
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `dmcp paper`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dmcp", "paper", *arguments])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            cli.main()
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def test_a_dry_run_lists_the_cells(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "cells")
    code, told, _ = run(capsys, "warmup", "sandwich", *TINY, "--seeds", "2", "--dry-run", "--out", out)
    assert code == 0 and "0 of 6 cells are done" in told and "dmcp-cold-50%-seed1" in told
    assert not (tmp_path / "cells").exists()


def test_all_are_those_of_the_papers_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def listed(*names: str) -> set[str]:
        told = run(capsys, *names, *TINY, "--seeds", "1", "--dry-run", "--json", "--out", str(tmp_path))[1]
        return {experiment for cell in json.loads(told)["cells"] for experiment in cell["needed_by"]}

    assert listed("all") == {*ALL} == {*EXPERIMENTS} - {*BY_NAME}
    assert listed("all", "full") == {*ALL, "full"}
    told = " ".join(re.sub(r"[│|]", " ", run(capsys, "--help")[1]).split())
    assert f"extra, all of them, or only by name {', '.join(BY_NAME)}." in told
    with pytest.raises(DmcpError, match=f"all of them, or only by name {', '.join(BY_NAME)}"):
        check_experiment("qqq")


def test_a_dry_run_finds_what_the_run_would_refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, it = str(tmp_path), tiny(1)
    for task in study_tasks(it, ["warmup"]):
        write_cell(task, tmp_path, it, 0.9)
    words = [*TINY, "--seeds", "1", "--dry-run", "--out", out]
    code, told, error = run(capsys, "warmup", *words)
    assert code == 2 and "| dmcp-50%-seed0      | other settings (" in told
    assert f"{tmp_path / 'dmcp-50%-seed0'} was begun with other settings (" in error
    words[words.index("--dry-run")] = "--gather"
    assert run(capsys, "warmup", *words)[::2] == (code, error)


def test_what_is_done_is_gathered_and_nothing_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, place = tmp_path / "cells", tmp_path / "results"
    job, train = Job(model="digits:resnet", data="digits", batch=64, device="cpu"), recipe(1, 1.6, 5e-4, 0.1)
    more: dict[str, Any] = {"settings": {"dmcp": {"epochs": 2}}, "fine_tune_epochs": 0}
    it = study(1, "digits:resnet", "digits", job=job, train=train, **more)
    words = [*TINY, "--epochs", "1", "--search-epochs", "2", "--seeds", "1"]
    words += ["--out", str(out), "--results", str(place), "--gather"]
    code, _, error = run(capsys, "warmup", *words)
    assert code == 2 and "no cells of warmup with these settings are done here" in error and not place.exists()
    first, *_ = study_tasks(it, ["warmup"])
    write_cell(first, out, it, 0.9)
    code, told, error = run(capsys, "warmup", *words)
    assert code == 0, error
    assert json.loads((place / "warmup-digits-resnet.json").read_text())["missing"] and "90.00 (1)" in told
    assert [path.name for path in out.iterdir() if (path / LOG).exists()] == [first.name]


OTHERS: list[tuple[list[str], str]] = [  # what is asked for beside a table of two seeds, and what is said
    (["--seeds", "1"], "has seed 1, which this command has not"),
    (["--seed", "1"], "has seed 0, which this command has not"),
    (["--epochs", "4"], "was made with another train.epochs (3, not 4)"),
    (["--lr", "0.4"], "was made with another train.lr (0.8, not 0.4)"),
    (["--batch", "32"], "was made with another batch (64, not 32)"),
    (["--model-args", "width=8"], "was made with another model_args ([], not ['width=8'])"),
    (["--search-epochs", "6"], "was made with another search_epochs (4, not 6)"),
]


@pytest.mark.parametrize(
    ("way", "words", "sentence"),
    [*(("--gather", *it) for it in OTHERS), ("--dry-run", *OTHERS[0]), ("--quiet", *OTHERS[0])],
)
def test_a_table_of_other_cells_is_not_replaced(
    way: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "warmup-digits-resnet.json"
    path.write_text(json.dumps(MADE))
    usual = ["--epochs", "3", "--search-epochs", "4", "--lr", "0.8", "--seeds", "2"]
    place = ["--out", str(tmp_path / "cells"), "--results", str(tmp_path)]
    code, _, error = run(capsys, "warmup", *TINY, *usual, *words, *place, way)
    assert code == 2 and sentence in error and error.endswith("give another --results.\n") and error.count("\n") == 1
    assert json.loads(path.read_text()) == MADE and not (tmp_path / "cells").exists()


def test_a_table_of_more_budgets_is_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"budget": budget} for budget in ("", "70%", "50%", "30%", "30%")]  # the first is unpruned
    path = tmp_path / "main-digits-resnet.json"
    path.write_text(json.dumps(MADE | {"experiment": "main", "rows": rows}))
    words = [*TINY, "--epochs", "3", "--search-epochs", "4", "--lr", "0.8", "--seeds", "2", "--out", str(tmp_path)]
    words += ["--results", str(tmp_path), "--gather", "--budget", "50%"]
    code, _, error = run(capsys, "main", *words)
    assert code == 2 and error == (
        f"dmcp: {path} has rows at 70%, 30%, which this command has not and would lose: "
        "add --budget 70% --budget 30%, or give another --results.\n"
    )
    more = ["--budget", "30%", "--budget", "70%", "--budget", "15%"]
    assert "no cells of main with these settings are done here" in run(capsys, "main", *words, *more)[2]


def test_a_table_of_other_data_or_fewer_seeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "warmup-digits-resnet.json"
    words = ["--epochs", "3", "--search-epochs", "4", "--lr", "0.8", "--dry-run", "--results", str(tmp_path)]
    path.write_text(json.dumps(MADE | {"data": "cifar100"}))
    assert "another data (cifar100, not digits)" in run(capsys, "warmup", *TINY, *words)[2]
    train = {key: value for key, value in MADE["train"].items() if key != "teacher_share"}  # a field of later
    path.write_text(json.dumps(MADE | {"train": train}))
    code, _, error = run(capsys, "warmup", *TINY, *words)  # three seeds, where there were two
    assert code == 0, error


def test_cells_of_another_network_by_the_same_name_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*TINY, "--seeds", "1", "--dry-run", "--epochs", "3", "--search-epochs", "4"]
    more: dict[str, Any] = {"settings": {"dmcp": {"epochs": 4}}, "fine_tune_epochs": 1, "budgets": ("50%",)}
    job, train = Job(model="digits:resnet", data="digits", batch=64, device="cpu"), recipe(3, 1.6, 5e-4, 0.1)
    it = study(1, "digits:resnet", "digits", job=job, train=train, **more)
    for task in study_tasks(it, ["warmup"]):
        write_cell(task, tmp_path, it, 0.9)
    assert run(capsys, "warmup", *words, "--out", str(tmp_path))[0] == 0
    path = tmp_path / "dmcp-cold-50%-seed0" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"macs": 7}))
    code, _, error = run(capsys, "warmup", *words, "--out", str(tmp_path))
    assert code == 2 and "dmcp-cold-50%-seed0 was made when digits:resnet was another network than now" in error


def test_a_dry_run_says_what_is_left_and_for_whom(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*TINY, "--seeds", "2", "--dry-run", "--out", str(tmp_path)]
    told = run(capsys, "warmup", "bernoulli", *words)[1]
    rows = {cells[1]: cells[4] for line in told.splitlines() if len(cells := re.split(r" *\| *", line)) > 4}
    assert rows["dmcp-50%-seed0"] == "warmup, bernoulli" and rows["dmcp-bernoulli-50%-seed1"] == "bernoulli"
    assert told.endswith("How long 6 of those left take is not known: none like them is done.\n")


@pytest.mark.parametrize("name", BY_NAME)
def test_the_command_beside_an_experiment_makes_the_same_cells(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, train = Job(model="digits:resnet", data="digits", batch=64, device="cpu"), recipe(3, 0.8, 5e-4, 0.05)
    more: dict[str, Any] = {"settings": {"dmcp": {"epochs": 4}}, "fine_tune_epochs": 1, "budgets": ("50%",)}
    it = replace(study(2, "digits:resnet", "digits", job=job, train=train, **more), wider=("width=24",))
    for task in study_tasks(it, [name]):
        write_cell(task, tmp_path, it, 0.9)
    words = [*command(it, name)[2:], "--out", str(tmp_path)]
    code, told, error = run(capsys, *words, "--dry-run", "--json")
    assert code == 0, error
    cells = json.loads(told)["cells"]
    assert {cell["state"] for cell in cells} == {"done"} and len(cells) == len(study_tasks(it, [name]))
    code, told, error = run(capsys, *words, "--gather", "--results", str(tmp_path / "results"))
    assert code == 0, error
    data = json.loads((tmp_path / "results" / f"{name}-digits-resnet.json").read_text())
    assert data["missing"] == [] and data["command"] == command(it, name)
    assert (
        data["train"]["epochs"]
        == study_of(it, name).common.train.epochs
        == (3 if name in ("explain", "rates", "seeds", "even", "border", "bordered") else 12)
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["main"], "--data is missing"),
        (["mian", *TINY], "There is no experiment 'mian': did you mean main?"),
        (["scale", *TINY, "--wider", "width=8"], "--wider: with width=8 the network is not wider than without."),
        (["explain", *TINY, "--wider", "width=8"], "--wider: with width=8 the network is not wider than without."),
        (["main", *TINY, "--budget", "0.1%"], "less than the floor costs"),
        (["main", *TINY, "--batch", "5000"], "5000"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, told = run(capsys, *arguments, "--dry-run", "--out", str(tmp_path / "cells"))
    assert code == 2 and sentence in told and len(told.splitlines()) == 1


# -- cells that are recorded, and whose folders are gone

SHORT = [*TINY, "--epochs", "1", "--search-epochs", "2"]


def short(seeds: int = 1) -> Study:
    """The study of SHORT."""
    job, train = Job(model="digits:resnet", data="digits", batch=64, device="cpu"), recipe(1, 1.6, 5e-4, 0.1)
    more: dict[str, Any] = {"settings": {"dmcp": {"epochs": 2}}, "fine_tune_epochs": 0}
    return study(seeds, "digits:resnet", "digits", job=job, train=train, **more)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the cells that commands run; they are done at once, with an accuracy of 0.5."""
    names: list[str] = []

    def run_at_once(wanted: Sequence[Task], folder: Path, *rest: Any) -> list[Any]:
        left = [task for task in wanted if not is_done(folder / task.name)]
        for name, widths in rest[-1].items():
            lend_widths(folder, name, widths)
        for task in left:
            write_cell(task, folder, short(), 0.5)
        names.extend(task.name for task in left)
        return []

    monkeypatch.setattr(paper_commands, "run_tasks", run_at_once)
    return names


def record(place: Path, *names: str, lost: Sequence[str] = (), seeds: int = 1, accuracy: float = 0.9) -> None:
    """Write the data of experiments whose folders are gone; without the cells that are lost, too."""
    it, folder = short(seeds), place.parent / "gone"
    for task in study_tasks(it, names):
        if task.name not in lost:
            write_cell(task, folder, it, accuracy + 0.01 * task.plan.job.seed)
    for name in names:
        shown = show(it, name, folder)
        assert shown
        write(it, name, shown, folder, place, f"{name}-digits-resnet")
    shutil.rmtree(folder)


def places(tmp_path: Path, seeds: int = 1) -> list[str]:
    return ["--seeds", str(seeds), "--out", str(tmp_path / "cells"), "--results", str(tmp_path / "results")]


def data_of(tmp_path: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "results" / f"{name}-digits-resnet.json").read_text()))


def test_recorded_cells_are_not_run_again(ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path / "results", "warmup", seeds=2)
    code, told, error = run(capsys, "bernoulli", *SHORT, *places(tmp_path, seeds=2), "--recorded")
    assert code == 0, error
    assert ran == ["dmcp-bernoulli-50%-seed0", "dmcp-bernoulli-50%-seed1"]
    assert (
        "| Markov chain          | 90.50 ± 0.71 (2) " in told and "| independent Bernoulli | 50.00 ± 0.00 (2) " in told
    )
    assert "2 cells taken from the data in" in error
    data = data_of(tmp_path, "bernoulli")
    assert data["recorded"] == ["dmcp-50%-seed0", "dmcp-50%-seed1"] and data["missing"] == []
    (stored, *_), (mine, *_) = (data_of(tmp_path, name)["cells"] for name in ("warmup", "bernoulli"))
    assert mine == stored | {"label": "Markov chain"}
    assert "recorded" not in data_of(tmp_path, "warmup")
    ran.clear()
    before = (tmp_path / "results" / "bernoulli-digits-resnet.json").read_bytes()
    assert run(capsys, "bernoulli", *SHORT, *places(tmp_path, seeds=2), "--recorded")[0] == 0
    assert not ran and (tmp_path / "results" / "bernoulli-digits-resnet.json").read_bytes() == before


def test_nothing_is_taken_over_unless_asked(ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path / "results", "warmup")
    code, told, error = run(capsys, "warmup", *SHORT, *places(tmp_path))
    assert code == 0, error
    assert sorted(ran) == ["dmcp-50%-seed0", "dmcp-cold-50%-seed0"] and "50.00 (1)" in told and "90.00" not in told
    assert "recorded" not in data_of(tmp_path, "warmup")


@pytest.mark.parametrize(
    "changed",
    [
        ["--epochs", "2"],
        ["--search-epochs", "4"],
        ["--batch", "32"],
        ["--lr", "0.4"],
        ["--model-args", "width=8"],
        ["--alpha-lr", "1"],
        ["--precision", "bfloat16"],
    ],
)
def test_cells_of_another_protocol_are_run(
    changed: list[str], ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path / "results", "warmup")
    code, told, error = run(capsys, "bernoulli", *SHORT, *changed, *places(tmp_path), "--recorded", "--dry-run")
    assert code == 0, error
    assert "0 of 2 cells are done" in told and "and so not listed: 0." in told and "dmcp-50%-seed0" in told


def test_cells_of_another_wider_network_are_not_taken(tmp_path: Path) -> None:
    """The names of cells do not say how wide it was."""
    it, place = short(), tmp_path / "results"
    other = replace(it, wider=("width=20",))
    record(place, "scale")
    (wide,) = (task.name for task in study_tasks(it, ["scale"]) if "wide" in task.name)
    assert {*read_recorded(it, "explain", place)} == {wide, "dmcp-50%-seed0"}
    assert not read_recorded(other, "explain", place) and not read_recorded(other, "scale", place)
    assert {*read_recorded(other, "warmup", place)} == {"dmcp-50%-seed0"}  # which has no wider network
    record(place, "warmup")
    assert {*read_recorded(other, "explain", place)} == {"dmcp-50%-seed0"}


def test_what_others_start_from_is_run_if_it_is_recorded_or_not(
    ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path / "results", "main", "scheme", "scale")
    assert run(capsys, "explain", *SHORT, *places(tmp_path), "--recorded")[0] == 0
    assert "unpruned-seed0" in {cell["name"] for cell in data_of(tmp_path, "main")["cells"]}
    assert "unpruned-seed0" in ran and "dmcp-frozen-trained-50%-seed0" in ran and "dmcp-frozen-50%-seed0" not in ran


def test_what_nothing_starts_from_any_more_is_not_run(
    ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The unpruned network is in no row of pretrained, so it is not recorded there."""
    record(tmp_path / "results", "pretrained")
    assert run(capsys, "pretrained", *SHORT, *places(tmp_path), "--recorded")[0] == 0
    assert not ran and data_of(tmp_path, "pretrained")["missing"] == []
    record(tmp_path / "results", "pretrained", lost=["dmcp-sorted-50%-seed0"])
    assert run(capsys, "pretrained", *SHORT, *places(tmp_path), "--recorded")[0] == 0
    assert ran == ["unpruned-seed0", "dmcp-sorted-50%-seed0"]


def test_draws_are_those_of_the_search_beside_them(
    ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One draw needs the search again: then the others, which were drawn from a search that is gone, are run too."""
    record(tmp_path / "results", "sampling", lost=["dmcp-direct3-50%-seed0"], seeds=2)
    words = ["sampling", *SHORT, *places(tmp_path, seeds=2), "--recorded"]
    assert run(capsys, *words)[0] == 0
    assert ran == [task.name for task in study_tasks(short(), ["sampling"])] and len(ran) == 6
    assert {name[-1] for name in data_of(tmp_path, "sampling")["recorded"]} == {"1"}
    ran.clear()
    shutil.rmtree(tmp_path / "cells" / "dmcp-direct1-50%-seed0")
    assert run(capsys, *words)[0] == 0
    assert not ran  # its search, which is there, is the recorded one


def test_a_cell_in_the_folder_counts_before_a_recorded_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path / "results", "warmup")
    first, *_ = study_tasks(short(), ["warmup"])
    write_cell(first, tmp_path / "cells", short(), 0.7)
    code, told, error = run(capsys, "warmup", *SHORT, *places(tmp_path), "--recorded", "--gather")
    assert code == 0, error
    assert "| with warm-up    | 70.00 (1) " in told and "| without warm-up | 90.00 (1) " in told
    assert data_of(tmp_path, "warmup")["recorded"] == ["dmcp-cold-50%-seed0"]


def test_a_table_with_more_cells_is_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path / "results", "warmup")
    path = tmp_path / "results" / "warmup-digits-resnet.json"
    before = path.read_bytes()
    first, second = study_tasks(short(), ["warmup"])
    write_cell(first, tmp_path / "cells", short(), 0.7)
    words = ["warmup", *SHORT, *places(tmp_path), "--gather"]
    code, told, error = run(capsys, *words)
    assert code == 2 and "| with warm-up | 70.00 (1) " in told and path.read_bytes() == before
    assert error == (
        f"dmcp: {path} has dmcp-cold-50%-seed0, which {tmp_path / 'cells'} has not: left as it is. Give another "
        "--results, or --recorded to keep its cells.\n"
    )
    write_cell(second, tmp_path / "cells", short(), 0.7)
    assert run(capsys, *words)[0] == 0 and path.read_bytes() != before


def test_a_table_with_rows_of_other_methods_is_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for task in study_tasks(short(), ["main"]):
        write_cell(task, tmp_path / "cells", short(), 0.7)
    words = ["main", *SHORT, *places(tmp_path), "--gather"]
    code, _, error = run(capsys, *words)
    assert code == 0, error
    path = tmp_path / "results" / "main-digits-resnet.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"rows": [*data["rows"], {"method": "amc", "budget": "50%", "seeds": [0]}]}))
    code, _, error = run(capsys, *words)
    assert (
        code == 2
        and f"{path} has amc-50%-seed0, which" in error
        and len(json.loads(path.read_text())["rows"]) > len(data["rows"])
    )


@pytest.mark.parametrize(("gone", "named"), [("50%-seed1", "amc-50%-seed1"), ("30%", "amc-30%-seed0 and 1 more")])
def test_a_table_with_more_cells_of_another_method_is_not_replaced(
    gone: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Some of its cells are still there: another seed, another budget."""
    it = short(seeds=2)
    others = tasks(replace(it.common, methods=("amc",), unpruned=False))
    for task in [*study_tasks(it, ["main"]), *others]:
        write_cell(task, tmp_path / "cells", it, 0.7)
    words = ["main", *SHORT, *places(tmp_path, seeds=2), "--budget", "50%", "--budget", "30%", "--gather"]
    code, told, error = run(capsys, *words)
    assert code == 0 and "| amc " in told, error
    path = tmp_path / "results" / "main-digits-resnet.json"
    before = path.read_bytes()
    for cell in (tmp_path / "cells").glob(f"amc-{gone}*"):
        shutil.rmtree(cell)
    code, told, error = run(capsys, *words)
    assert "| amc " in told and path.read_bytes() == before
    where = f"{path} has {named}, which {tmp_path / 'cells'} has not"
    assert (code, error) == (2, f"dmcp: {where}: left as it is. Give another --results.\n")  # main cannot be --recorded


def test_the_data_of_the_experiment_count_before_those_of_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, accuracy in (("warmup", 0.6), ("sandwich", 0.7), ("bernoulli", 0.8)):
        record(tmp_path / "results", name, accuracy=accuracy)
    for name, value in (("sandwich", "70.00"), ("scheme", "60.00")):  # of others that which comes first on the page
        code, told, error = run(capsys, name, *SHORT, *places(tmp_path), "--recorded", "--gather")
        assert code == 0, error
        assert re.search(rf"\| (variant sandwich rule|alphas by budget and task, and weights) +\| {value} \(1\)", told)


def test_recorded_cells_are_gathered_without_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*SHORT, *places(tmp_path), "--gather", "--recorded"]
    code, _, error = run(capsys, "bernoulli", *words)
    none = f"are done here, and none is recorded in {tmp_path / 'results'}.\n"
    assert code == 2 and error.endswith(f"no cells of bernoulli with these settings {none}") and error.count("\n") == 1
    record(tmp_path / "results", "warmup", "full")
    code, told, error = run(capsys, "bernoulli", *words, "--page", str(tmp_path / "page.md"))
    assert code == 0, error
    assert "| Markov chain | 90.00 (1) " in told and not (tmp_path / "cells").exists()
    data = data_of(tmp_path, "bernoulli")
    assert (data["recorded"], data["missing"]) == (["dmcp-50%-seed0"], ["dmcp-bernoulli-50%-seed0"])
    page = (tmp_path / "page.md").read_text()
    part = page.split("## bernoulli: digits:resnet")[1]
    assert "- Taken from the data of earlier runs (`--recorded`): 1 cell: `dmcp-50%-seed0`." in part
    assert page.count("Taken from the data") == 1 and "Independent Bernoulli gates are worse" in page
    assert "recorded" not in data_of(tmp_path, "full")
    code, _, error = run(capsys, "recipe", *words)  # with the protocol of full, but with none of its cells
    assert code == 2 and error.endswith(f"no cells of recipe with these settings {none}")


def test_recorded_widths_are_copied_without_a_search(
    ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path / "results", "full", lost=["dmcp-distilled-full-50%-seed0"])
    code, _, error = run(capsys, "full", *SHORT, *places(tmp_path), "--recorded")
    assert code == 0, error
    taught = [f"{name}-distilled-full-50%-seed0" for name in ("uniform", "dmcp")]  # both by the teacher that is there
    assert ran == ["unpruned-full-seed0", *taught]  # its weights are not recorded
    (stored,) = (cell for cell in data_of(tmp_path, "full")["cells"] if cell["name"] == "dmcp-full-50%-seed0")
    lent = json.loads((tmp_path / "cells" / "recorded" / "dmcp-full-50%-seed0.json").read_text())
    graph = graph_of("digits:resnet")
    assert dict(graph.widths(Widths.from_json(lent["widths"]))) == stored["widths"]
    assert not [*(tmp_path / "cells" / "recorded").glob("unpruned*")]


def test_cells_of_which_only_the_widths_are_taken_are_counted(
    ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path / "results", "explain")
    words = ["rates", *SHORT, *places(tmp_path), "--recorded"]
    assert "Recorded in " in (told := run(capsys, *words, "--dry-run")[1]) and told.count("not listed: 6.") == 1
    assert not (tmp_path / "cells").exists()
    assert "6 cells taken from the data in" in run(capsys, *words)[2]
    assert len(ran) == 6 and all("-rates-" in name for name in ran)
    assert len([*(tmp_path / "cells" / "recorded").iterdir()]) == 6


def test_what_is_run_again_is_not_lent(ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path / "results", "extra", lost=["dmcp-search0-50%-seed1"], seeds=2)
    words = ["extra", "sampling", *SHORT, *places(tmp_path, seeds=2), "--recorded"]
    assert run(capsys, *words)[0] == 0  # draws need the search itself
    assert {"dmcp-50%-seed0", "dmcp-search0-50%-seed1"} <= {*ran}
    assert not (tmp_path / "cells" / "recorded").exists()


def test_widths_that_two_tables_have_differently_are_searched_again(tmp_path: Path) -> None:
    it, place = short(), tmp_path / "results"
    record(place, "full", "length")
    source = "dmcp-full-50%-seed0"
    assert {*read_copied(it, ["full", "length"], place)} == {source}
    path = place / "length-digits-resnet.json"
    data = json.loads(path.read_text())
    (cell,) = (cell for cell in data["cells"] if cell["name"] == source)
    cell["widths"] = dict.fromkeys(cell["widths"], 1)
    path.write_text(json.dumps(data))
    assert not read_copied(it, ["full", "length"], place)
    assert read_copied(it, ["full"], place)[source].widths != read_copied(it, ["length"], place)[source].widths


def test_data_of_another_network_by_the_same_name_lend_nothing(tmp_path: Path) -> None:
    it, place = short(), tmp_path / "results"
    record(place, "full")
    assert read_copied(it, ["full"], place) and read_recorded(it, "full", place)
    path = place / "full-digits-resnet.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"macs": data["macs"] + 1}))
    assert not read_copied(it, ["full"], place) and not read_recorded(it, "full", place)
    for cell in data["cells"]:
        cell["widths"] = dict.fromkeys(cell["widths"], 1000)
    path.write_text(json.dumps(data))
    with pytest.raises(FileError, match=r"full-digits-resnet\.json: .* has the widths of another network"):
        read_copied(it, ["full"], place)


def test_nothing_is_lent_to_a_command_that_is_at_work(tmp_path: Path) -> None:
    graph = graph_of("digits:resnet")
    lend_widths(tmp_path, "source-seed0", graph.full)
    before = (path := tmp_path / "recorded" / "source-seed0.json").read_bytes()
    other = graph.widths([1 for _ in graph.spaces])
    with Lock(tmp_path), pytest.raises(DmcpError):
        run_tasks([], tmp_path, torch.device("cpu"), None, True, {"source-seed0": other})
    assert path.read_bytes() == before
    assert run_tasks([], tmp_path, torch.device("cpu"), None, True, {"source-seed0": other}) == []
    assert path.read_bytes() != before


@pytest.mark.parametrize("state", ["done", "begun", "gone"])
def test_a_search_that_is_not_done_does_not_count_where_widths_are_lent(state: str, tmp_path: Path) -> None:
    it = short()
    (task,) = (task for task in study_tasks(it, ["full"]) if task.name == "dmcp-full-50%-seed0")
    if state != "gone":
        write_cell(task, tmp_path, it, 0.5)
    if state == "begun":
        (tmp_path / task.name / CHECKPOINTS).mkdir()
    lend_widths(tmp_path, task.name, it.graph.full)
    here: Any = SimpleNamespace(run=SimpleNamespace(folder=tmp_path / "copy"), opened=SimpleNamespace(graph=it.graph))
    found = copied_widths(here, Cell(method="copy", uses=task.name))
    assert (found == it.graph.full) is (state != "done")


def test_a_dry_run_lists_what_is_not_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path / "results", "warmup")
    words = ["warmup", "bernoulli", *SHORT, *places(tmp_path), "--recorded", "--dry-run"]
    code, told, error = run(capsys, *words)
    assert code == 0, error
    assert "dmcp-bernoulli-50%-seed0" in told and "dmcp-cold" not in told and "0 of 1 cells are done" in told
    assert f"Recorded in {tmp_path / 'results'}, and so not listed: 2.\n" in told
    listed = json.loads(run(capsys, *words, "--json")[1])
    assert [cell["name"] for cell in listed["cells"]] == ["dmcp-bernoulli-50%-seed0"]
    assert listed["recorded"] == ["dmcp-50%-seed0", "dmcp-cold-50%-seed0"]
    assert "recorded" not in json.loads(run(capsys, *words[:-2], "--dry-run", "--json")[1])


@pytest.mark.parametrize("name", ["main", "recover", "distribution", "all"])
def test_what_needs_the_folders_cannot_be_recorded(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.json").write_text("[")  # what is said first is what cannot be helped
    code, _, error = run(capsys, "warmup", name, *SHORT, *places(tmp_path), "--recorded", "--dry-run")
    named = "main, recover, distribution" if name == "all" else name
    assert code == 2 and error.count("\n") == 1
    assert f"--recorded: {named} cannot be made without the folders of all cells: leave out" in error


def damaged(change: dict[str, Any]) -> dict[str, Any]:
    """A recorded cell, changed; ... takes a key out."""
    widths = {space.name: 1 for space in graph_of("digits:resnet").spaces}
    whole = {"label": "usual", "seed": 0, "name": "dmcp-50%-seed0", "accuracy": 0.9, "own_accuracy": None}
    whole |= {"macs": 5, "params": 5, "widths": widths, "seconds": 1.0, "device": "cpu"} | change
    return {key: value for key, value in whole.items() if value is not ...}


@pytest.mark.parametrize(
    "cells",
    [
        None,
        5,
        "text",
        {"name": "dmcp-50%-seed0"},
        [None],
        ["dmcp-50%-seed0"],
        [[]],
        [{}],
        [damaged({"name": ...})],
        [damaged({"name": 5})],
        [damaged({"name": ["x"]})],
        [damaged({"label": ...})],
        [damaged({"seed": 1})],
        [damaged({"seed": "0"})],
        [damaged({"accuracy": ...})],
        [damaged({"widths": ...})],
        [damaged({"accuracy": "good"})],
        [damaged({"accuracy": True})],
        [damaged({"accuracy": 90.0})],
        [damaged({"accuracy": float("nan")})],
        [damaged({"macs": None})],
        [damaged({"params": 0.5})],
        [damaged({"widths": {}})],
        [damaged({"widths": {"other": 3}})],
        [damaged({"widths": [3]})],
        [damaged({"seconds": "long"})],
        [damaged({"device": None})],
        [damaged({"arm": {}})],
        [damaged({"unknown": 1})],
    ],
)
def test_damaged_cells_are_told_by_their_file(cells: Any, tmp_path: Path) -> None:
    it = short()
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"experiment": "scheme", **findings.protocol(it, "warmup"), "cells": cells}))
    with pytest.raises(FileError) as caught:
        read_recorded(it, "warmup", tmp_path)
    told = str(caught.value)
    assert told.startswith(f"{path}: not as dmcp paper writes it (") and "\n" not in told
    assert told.endswith("): remove it, or make it again.")


def test_a_whole_cell_is_read(tmp_path: Path) -> None:
    """What the damaged ones above are like but for their damage; without an accuracy there is nothing to take."""
    it = short()
    data = {"experiment": "scheme", **findings.protocol(it, "warmup"), "cells": [damaged({})]}
    (tmp_path / "other.json").write_text(json.dumps(data))
    assert [*read_recorded(it, "warmup", tmp_path)] == ["dmcp-50%-seed0"]
    (tmp_path / "other.json").write_text(json.dumps(data | {"cells": [damaged({"accuracy": None})]}))
    assert read_recorded(it, "warmup", tmp_path) == {}


def test_damage_is_told_by_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path / "results", "warmup")
    path = tmp_path / "results" / "warmup-digits-resnet.json"
    path.write_text(json.dumps(data_of(tmp_path, "warmup") | {"cells": [{}]}))
    before = path.read_bytes()
    code, _, error = run(capsys, "warmup", *SHORT, *places(tmp_path), "--recorded", "--gather")
    assert code == 2 and "not as dmcp paper writes it" in error and error.count("\n") == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["[]", "5", '"cells"', "{", "", "\x00"])
def test_files_that_hold_nothing_are_told_by_name(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.json").write_text(text)
    code, _, error = run(capsys, "warmup", *SHORT, *places(tmp_path), "--recorded", "--dry-run")
    assert code == 2 and error.startswith(f"dmcp: {tmp_path / 'results' / 'x.json'}: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"experiment": "other"},
        {"experiment": ["warmup"]},
        {"experiment": None},
        {"model": "cifar:resnet20"},
        {"data": "cifar10"},
        {"train": None},
        {"train": {"epochs": "1"}},
        {"train": {"later": None}},
        {"settings": {"dmcp": {"epochs": 2}, "amc": None}},
        {"settings": []},
        {"model_args": 5},
        {"search_epochs": None},
    ],
)
def test_data_of_others_are_passed_over(change: dict[str, Any], tmp_path: Path) -> None:
    it = short()
    data = {"experiment": "warmup", **findings.protocol(it, "warmup"), "cells": [damaged({})]}
    (tmp_path / "other.json").write_text(json.dumps(data | change))
    (tmp_path / "lines.json").write_text('{"lines": []}')  # of dmcp compare
    assert read_recorded(it, "warmup", tmp_path) == {}


@pytest.mark.parametrize(
    "change",
    [{"seeds": 5}, {"seeds": None}, {"rows": 5}, {"rows": [5]}, {"rows": [{"budget": []}]}, {"train": {"x": None}}],
)
def test_a_damaged_table_is_not_replaced(
    change: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path / "results", "warmup")
    path = tmp_path / "results" / "warmup-digits-resnet.json"
    path.write_text(json.dumps(data_of(tmp_path, "warmup") | change))
    code, _, error = run(capsys, "warmup", *SHORT, *places(tmp_path), "--dry-run")
    assert code == 2 and error.startswith(f"dmcp: {path}") and error.count("\n") == 1


def test_two_figures_of_a_cell_are_told_on_the_page(
    ran: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path / "results", "warmup", "sampling", lost=["dmcp-direct2-50%-seed0"], seeds=2)
    page = ["--page", str(tmp_path / "page.md")]
    assert run(capsys, "sampling", *SHORT, *places(tmp_path, seeds=2), "--recorded", *page)[0] == 0
    draws = [f"dmcp-direct{number}-50%-seed0" for number in ("", *range(1, DRAWS))]
    assert ran == ["dmcp-50%-seed0", *draws]  # a draw needs the search itself, and the others are compared with it
    told = (tmp_path / "page.md").read_text()
    assert "- `dmcp-50%-seed0`: 50.00 in sampling; 90.00 in warmup" in told and told.count("`dmcp-50%-seed") == 2


@pytest.mark.slow
def test_an_experiment_from_the_command_to_its_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, told, _ = run(capsys, "bernoulli", *SHORT, *places(tmp_path), "--quiet")
    assert code == 0 and "| independent Bernoulli |" in told
    stems = ["json", "md", "svg"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        f"bernoulli-digits-resnet.{stem}" for stem in stems
    ]
    data = json.loads((tmp_path / "results" / "bernoulli-digits-resnet.json").read_text())
    assert data["missing"] == [] and len(data["rows"]) == 2


@pytest.mark.slow
def test_a_recipe_is_tested_by_images_that_it_was_not_trained_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, told, error = run(capsys, "recipe", *SHORT, *places(tmp_path), "--quiet")
    assert code == 0, error
    told = re.sub(r" +", " ", told)
    assert "| accuracy in % of held-out images | points above uniform, the usual recipe |" in told
    assert "| uniform, half the learning rate |" in told
    lines = [json.loads(line) for line in (tmp_path / "cells/uniform-recipe-50%-seed0" / LOG).read_text().splitlines()]
    tested = [line for line in lines if "accuracy" in line]
    held = len(split(load("digits").train, 0.1)[1])
    assert tested and all(abs(line["accuracy"] * held - round(line["accuracy"] * held)) < 1e-6 for line in tested)
    assert max(line["epoch"] for line in lines if "epoch" in line) == 3


@pytest.mark.slow
def test_the_full_recipe_from_the_command_to_its_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, told, error = run(capsys, "full", *SHORT, *places(tmp_path), "--quiet")
    assert code == 0, error
    assert "| 4 + 4 = 8, and 4 of its teacher |" in told
    ours, taught = (tmp_path / "cells" / f"dmcp-{name}-50%-seed0" for name in ("full", "distilled-full"))
    widths = [json.loads((folder / WIDTHS).read_text())["widths"] for folder in (ours, taught)]
    assert widths[0] == widths[1]
    steps = [json.loads(line) for line in (taught / LOG).read_text().splitlines()]
    assert {line["epoch"] for line in steps if line.get("stage") == "copy"} == {0, 1, 2, 3}


@pytest.mark.slow
def test_recorded_widths_are_trained_and_tested_without_their_searches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, "explain", *SHORT, *places(tmp_path), "--quiet")[0] == 0
    shutil.rmtree(tmp_path / "cells")
    code, told, error = run(capsys, "rates", *SHORT, *places(tmp_path), "--quiet", "--recorded")
    assert code == 0, error
    assert "| accuracy in % of held-out images | points above" in re.sub(r" +", " ", told)
    data = json.loads((tmp_path / "results" / "explain-digits-resnet.json").read_text())
    searched = {cell["name"]: cell["widths"] for cell in data["cells"]}
    folders = [*(tmp_path / "cells").glob("*-seed0")]
    assert len(folders) == 6 and all("-rates-" in path.name for path in folders)
    for path in folders:
        assert json.loads((path / WIDTHS).read_text())["widths"] == searched[path.name.replace("-rates", "")], path
