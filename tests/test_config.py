"""cli/config: one tree of settings, the options made from it, defaults that depend on each other, recipes."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dmcp
from dmcp.cli.config import Request, make_config, settle
from dmcp.cli.job import build
from dmcp.defaults import has_choices_left, paper, resolve, resolve_search, resolve_training
from dmcp.errors import DmcpError, TrainingError
from dmcp.request import read_request, resolve_settings
from dmcp.runs.config import RECIPES, RunConfig, find_recipe
from dmcp.runs.files import SETTINGS
from dmcp.runs.writing import Run
from dmcp.runtime.batches import length_of
from dmcp.searching.bounds import extreme_widths
from dmcp.searching.budget import check_reachable, parse_budget
from dmcp.searching.supernet import Supernet
from dmcp.settings import UNPRUNED, Corrupt, Retrain, SearchConfig, TrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.training.optimizer import learning_rate

# table 6 of the paper, its DMCP rows in order: network, MACs, and * for slimmable training
TABLE_6 = """
mobilenet_v2 300M   | mobilenet_v2 211M   | mobilenet_v2 97M | mobilenet_v2 87M | mobilenet_v2 59M | mobilenet_v2 43M
mobilenet_v2 300M * | mobilenet_v2 211M * | resnet18 1.04G   | resnet50 2.8G    | resnet50 2.2G    | resnet50 1.1G
resnet50 278M
"""
ROWS = [tuple(row.split()) for row in TABLE_6.strip().replace("\n", "|").split("|")]


def config(command: str = "prune", **typed: Any) -> RunConfig:
    return make_config(Request(command=command, typed={"model": "digits:resnet", "data": "digits"} | typed))


def test_defaults_depend_on_weights_and_retrain() -> None:
    for typed, epochs, lr, warmup, sort, retrain in (
        ({}, 100, 0.8, 0.5, False, Retrain.FINETUNE),
        ({"weights": "x.pth"}, 10, 0.8, 0.0, True, Retrain.FINETUNE),
        ({"weights": "x.pth", "retrain": Retrain.SCRATCH, "warmup": 0.25}, 100, 0.8, 0.25, True, Retrain.SCRATCH),
        ({"retrain": Retrain.SLIMMABLE, "epochs": 3, "lr": 0.4}, 3, 0.4, 0.5, False, Retrain.SLIMMABLE),
    ):
        it, _ = settle(config(**typed), typed, 1_281_167, 10**6, "weights" in typed)
        assert it.train and it.search
        found = (it.train.epochs, it.train.lr, it.search.warmup, it.search.sort, it.retrain)
        assert found == (epochs, lr, warmup, sort, retrain)
    it = config(lr=0.4, search_lr=0.1, seed=3, weight_decay=0.5, label_smoothing=0.0, compile=False, search_epochs=2)
    assert it.train == TrainConfig(lr=0.4, seed=3, weight_decay=0.5, label_smoothing=0)
    it, _ = settle(it, {}, 1_281_167, 10**6, False)
    assert (it.train.epochs, it.train.warmup_lr) == (100, 0.1)
    assert it.search and (it.search.lr, it.search.min_lr, it.search.seed, it.search.epochs) == (0.1, 0.01, 3, 2)
    assert (it.search.weight_decay, it.search.label_smoothing, it.seed, it.engine.compile) == (0.5, 0, 3, False)
    assert config("search").retrain is Retrain.NONE and config("train").search is None
    given = ({}, {"teacher": "none"}, {"retrain": "slimmable"}, {"recipe": "paper"})
    teachers = [config(**typed).teacher for typed in given]
    assert teachers == ["auto", "", "", ""] and config("train").teacher == ""


def test_settings_that_nobody_typed_follow_the_data() -> None:
    for images, typed, found in (
        (1_415, {"weights": "x.pth"}, (128, 35, 28, 0)),
        (400, {"weights": "x.pth"}, (32, 40, 25, 0)),
        (50_000, {"weights": "x.pth"}, (128, 1, 20, 0)),
        (50_000, {}, (128, 40, 100, 0)),
        (1_281_167, {"weights": "x.pth"}, (128, 1, 10, 49_920)),
        (1_281_167, {"weights": "x.pth", "search_epochs": 3, "epochs": 7, "batch": 256}, (256, 3, 7, 0)),
    ):
        it, reasons = settle(config(**typed), typed, images, 10**6, "weights" in typed)
        assert it.search and it.train and not reasons.keys() & typed.keys()
        assert (it.batch, it.search.epochs, it.train.epochs, it.search_images) == found
    assert settle(config(), {}, 50_000, 4 * 10**9, False)[0].batch == 64
    why_batch = settle(config(), {}, 600, 1, False)[1]["batch"]
    assert "600 images" in why_batch and "9 steps" in why_batch
    for images, found in ((200_000, [0.4, 5e-4, 1.6, 5e-4]), (200_001, [0.2, 1e-4, 0.8, 1e-4])):
        it = settle(config(), {}, images, 10**6, False)[0]
        assert it.search and [it.search.lr, it.search.weight_decay, it.train.lr, it.train.weight_decay] == found
    for images, typed, lr in (  # of 1.6, or 0.8 from 200,000 images on
        (600, {"epochs": 1}, 0.32),
        (600, {}, 0.32),
        (49_920, {"epochs": 1}, 0.32),
        (49_920, {"epochs": 7}, 0.832),  # 2,730 steps
        (49_920, {"epochs": 100}, 1.6),
        (1_281_167, {"epochs": 1}, 0.8),
        (600, {"epochs": 1, "lr": 3.0}, 3.0),
    ):
        tuned = settle(config(weights="x.pth", **typed), typed, images, 1, True)[0]
        assert tuned.train.lr == pytest.approx(lr)
        fresh = settle(config(**typed), typed, images, 1, False)[0]
        assert fresh.train.lr == typed.get("lr", 1.6 if images <= 200_000 else 0.8)
    sizes: dict[str, Any] = {"trained": False, "images": 9, "batch": 3}
    unset = (SearchConfig(budget="50%"), TrainConfig(), Retrain.FINETUNE)
    assert [resolve(*unset, **sizes, distills=known).search.distill for known in (True, False)] == [True, False]
    recipe = config(recipe="imagenet_resnet50_2200m")
    assert recipe.search
    resolved = replace(recipe, search=resolve_search(recipe.search), train=resolve_training(recipe.train))
    assert settle(recipe, {"recipe": "x"}, 1_415, 1, False) == (resolved, {})


SET = {  # options, and the same in Python
    "nothing": ({}, {}, {}),
    "epochs of the search": ({"search_epochs": 2}, {"epochs": 2}, {}),
    "rates": ({"search_lr": 0.1, "lr": 0.4}, {"lr": 0.1}, {"lr": 0.4}),
    "a short training": ({"epochs": 1, "warmup": 0.25}, {"warmup": 0.25}, {"epochs": 1}),
    "decay": ({"weight_decay": 1e-3, "seed": 3}, {"weight_decay": 1e-3, "seed": 3}, {"weight_decay": 1e-3, "seed": 3}),
}


@pytest.mark.parametrize("case", SET)
def test_python_and_the_command_line_choose_the_same(case: str) -> None:
    typed, search, train = SET[case]
    for images, trained in itertools.product((384, 1_408, 49_920, 1_281_024), (False, True)):
        weights = {"weights": "x.pth"} if trained else {}
        by_options, _ = settle(config(**typed, **weights), typed, images, 10**6, trained)
        batch = torch.zeros(by_options.batch, 1, 8, 8), torch.zeros(by_options.batch, dtype=torch.long)
        request = read_request(
            torch.nn.Conv2d(1, 1, 1),
            [batch] * (images // by_options.batch),
            budget=None,
            method="dmcp",
            search=SearchConfig(budget="50%", **search),
            train=TrainConfig(**train),
            retrain="finetune",
            teacher=None,
            baselines=False,
        )
        in_python, retraining, loaders = resolve_settings(request, batch[0], dmcp.Task(), trained=trained)
        assert vars(in_python) == vars(by_options.search) and vars(retraining.config) == vars(by_options.train)
        assert length_of(loaders.search) * by_options.batch == (by_options.search_images or images)


def test_what_is_set_is_kept_and_resolved_settings_are_checked() -> None:
    everything = replace(resolve_search(SearchConfig(budget="50%")), lr=0.5, min_lr=0.3, epochs=7, sharpen=3.0)
    training = replace(resolve_training(TrainConfig()), epochs=9, lr=0.7, warmup_lr=0.6)
    for trained in (False, True):
        same = resolve(everything, training, Retrain.FINETUNE, trained=trained, images=10**7, batch=128)
        assert (same.search, same.train, same.search_images, same.reasons) == (everything, training, 0, {})
    assert not has_choices_left(everything, training) and has_choices_left(everything, TrainConfig(epochs=3))
    for wrong in ({"epochs": 0}, {"lr": None}, {"warmup": 0.99}):
        with pytest.raises(TrainingError):
            replace(everything, **wrong)


def test_several_budgets_are_searched_at_the_middle_one() -> None:
    for budgets, found in ((["70%", "30%", "50%"], "50%"), (["80%", "40%"], "40%"), (["8ms", "30%", "1M"], "30%")):
        it = config(budget=budgets)
        assert it.search and it.search.budget == found and it.budgets == tuple(budgets)
    assert config(budget=["60%"]).budgets == ()


def test_a_recipe_is_changed_by_options() -> None:
    recipe = find_recipe("imagenet_mobilenet_v2_211m")
    assert config(recipe=recipe.recipe, model="resnet18").model_args == ()
    it = make_config(Request(command="prune", typed={"recipe": recipe.recipe, "data": "x", "epochs": 2, "seed": 1}))
    assert recipe.search and recipe.train and it.model_args == ("width_mult=1.5", "dropout=0")
    assert it.search == replace(recipe.search, seed=1) and it.train == replace(recipe.train, epochs=2, seed=1)
    typed = {"recipe": "imagenet_resnet50_2200m", "weights": "x.pth"}
    it, _ = settle(config(**typed), typed, 1_281_167, 1, True)
    assert it.search and (it.search.warmup, it.search.sort, it.retrain) == (0, True, Retrain.SCRATCH)
    with pytest.raises(DmcpError, match="imagenet_mobilenet_v2_211m"):
        find_recipe("mobilenet_v2_211m")


WRONG: list[tuple[dict[str, Any], type[DmcpError]]] = [
    ({"groups": 0}, TrainingError),
    ({"seed": 2**63}, DmcpError),
    ({"min_channels": ["0"]}, TrainingError),
    ({"max_channels": ["a=few"]}, DmcpError),
    ({"teacher": UNPRUNED, "teacher_model": "resnet18"}, DmcpError),
]


@pytest.mark.parametrize(("typed", "kind"), WRONG, ids=str)
def test_settings_that_make_no_sense(typed: dict[str, Any], kind: type[DmcpError]) -> None:
    with pytest.raises(DmcpError) as caught:
        config(**typed)
    assert caught.type is kind


def test_a_run_goes_on_with_its_settings(tmp_path: Path) -> None:
    begun = config(lr=0.4, search_lr=0.1, min_channels=["8"], ignore=["conv1"], seed=2)
    Run(tmp_path).write(SETTINGS, begun.to_json() | {"argv": []})

    def resumed(**typed: Any) -> RunConfig:
        return make_config(Request(command="prune", typed=typed, resume=str(tmp_path)))

    assert resumed() == begun  # read back from JSON
    assert resumed(lr=0.4, min_channels=["8"], ignore=["conv1"], seed=2) == begun
    assert resumed(workers=3, corrupt=Corrupt.SKIP) == replace(begun, workers=3, corrupt=Corrupt.SKIP)
    for typed in ({"lr": 0.5}, {"budget": "40%"}, {"ignore": ["fc"]}, {"min_channels": ["7"]}, {"compile": True}):
        with pytest.raises(DmcpError):
            resumed(**typed)


NEW_FIELD = """
import dataclasses, sys
from dmcp import fields, settings
field = fields.setting(3, "Epochs without progress.", 1)
kind = dataclasses.make_dataclass(
    "SearchConfig", [("patience", int, field)], bases=(settings.SearchConfig,), frozen=True, kw_only=True
)
kind.__module__ = "dmcp.settings"
settings.SearchConfig = kind
from dmcp.cli import main
if len(sys.argv) > 1:
    main.main()
from dmcp.cli.config import Request, make_config, read_config
from dmcp.runs.config import RECIPES
from dmcp.runs.files import SETTINGS
from dmcp.runs.writing import Run
from pathlib import Path
typed = {"model": "digits:resnet", "data": "digits", "patience": 7}
config = make_config(Request(command="prune", typed=typed))
Run(Path("run")).write(SETTINGS, config.to_json())
stored, again = read_config(Path("run"))
assert stored["search"]["patience"] == again.search.patience == 7 and again == config
assert make_config(Request(command="prune", typed={"patience": 7}, resume="run")) == config
assert RECIPES["paper"].search.patience == 3
try:
    make_config(Request(command="prune", typed={"patience": 8}, resume="run"))
except fields.DmcpError:
    print("refused")
"""


def test_a_new_setting_is_one_field(tmp_path: Path) -> None:
    """A field that is added to SearchConfig is an option with help and range, in settings.json, recipes and resume."""

    def start(*words: str) -> tuple[int, str, str]:
        environment = os.environ | {"PYTHONPATH": str(Path(dmcp.__file__).parents[1]), "COLUMNS": "120"}
        end = subprocess.run(
            [sys.executable, "-c", NEW_FIELD, *words], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        return end.returncode, end.stdout, end.stderr

    for command, has_it in (("prune", True), ("search", True), ("train", False), ("compare", False)):
        code, out, _ = start(command, "--help")
        assert code == 0 and ("--patience <int>" in out) is has_it
        assert ("Epochs without progress. Default: 3." in out) is has_it
    code, out, err = start("prune", "--model", "x", "--data", "y", "--patience", "0")
    assert (code, out) == (2, "") and "patience" in err
    assert start() == (0, "refused\n", "")


# recipes


IMAGENET = [name for name in RECIPES if name != "paper"]


def test_the_papers_settings_are_one_recipe_and_one_function() -> None:
    found, own = find_recipe("paper"), paper("50%")
    assert found.search
    resolved = (resolve_search(found.search), resolve_training(found.train))
    assert (*resolved, found.retrain, found.teacher or None) == tuple(own.values())
    assert (found.search.init, found.search.alpha_lr, found.search.distill) == ("random", 0.2, False)


@functools.cache
def traced(model: str) -> tuple[Supernet, ChannelGraph]:
    """The network that the recipes of this model start from, and its graph, without data."""
    recipe = next(recipe for recipe in map(find_recipe, RECIPES) if recipe.model == model)
    assert recipe.search
    net = build(recipe, 1000)
    graph = dmcp.trace(net, torch.zeros(2, 3, 224, 224), verify=False)  # the zoo verifies these networks
    return Supernet(net, graph, recipe.search.groups, recipe.search.align), graph


@pytest.mark.parametrize(("name", "row"), [*zip(IMAGENET, ROWS, strict=True)], ids=IMAGENET)
def test_a_recipe_has_the_settings_of_section_4_1(name: str, row: tuple[str, ...]) -> None:
    recipe, mobile = find_recipe(name), row[0] == "mobilenet_v2"
    search, train = recipe.search, recipe.train
    assert search and train and recipe.recipe == name
    assert (recipe.model, search.budget, recipe.data) == (row[0], row[1], "")
    assert recipe.retrain is (Retrain.SLIMMABLE if row[-1] == "*" else Retrain.SCRATCH)
    assert (recipe.batch, recipe.train_batch) == (1024, 2048)
    assert recipe.model_args == (("width_mult=1.5", "dropout=0") if mobile else ())
    decay = 4e-5 if mobile else 1e-4
    assert search == SearchConfig(budget=row[1], groups=15 if mobile else 10, align=1, weight_decay=decay, init="zero")
    assert train == TrainConfig(epochs=250 if mobile else 100, weight_decay=decay)
    search, train = resolve_search(search), resolve_training(train)
    assert (search.epochs, search.warmup_epochs, search.budget_weight, search.tolerance) == (40, 20, 0.1, 0.95)
    assert (search.lr, search.min_lr, search.reference_batch) == (0.2, 0.02, recipe.batch)  # so never scaled
    steps = train.epochs * 625
    rates = [learning_rate(step, steps, recipe.train_batch, train) for step in (0, 625, steps)]
    assert rates == pytest.approx([0.2, 0.8, 0.0])
    net, graph = traced(recipe.model)
    target = round(float(row[1][:-1]) * {"M": 10**6, "G": 10**9}[row[1][-1]])
    assert f"_{target // 10**6}m" in name
    assert [(limit.kind, limit.target) for limit in parse_budget(search.budget, graph).limits] == [("macs", target)]
    check_reachable(parse_budget(search.budget, graph), graph, extreme_widths(graph, net.sizes)[0])


@pytest.mark.parametrize(("model", "printed"), [("mobilenet_v2", 672e6), ("resnet18", 1.8e9), ("resnet50", 4.1e9)])
def test_the_unpruned_network_is_the_papers(model: str, printed: float) -> None:
    assert traced(model)[1].macs() == pytest.approx(printed, rel=0.015)  # its appendix A.1, and table 6
