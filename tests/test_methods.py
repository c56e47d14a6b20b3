"""The table of methods: every one of them through the same contract, and methods of one's own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Planted, as_problem, heard, planted_batches, planted_problem, tiny_problem
from torch import nn
from torch.nn import functional as F
from torchvision.models import densenet121, mobilenet_v2, resnet18

import dmcp
from dmcp.compare.methods import METHODS, AutoSlimConfig, Own, choose, find_method, title
from dmcp.compare.problem import Choice, Problem
from dmcp.errors import BudgetError, DataError, DmcpError, TrainingError
from dmcp.runs.records import SearchRecord
from dmcp.searching.budget import parse_budget

QUICK: dict[str, dict[str, Any]] = {"slimming": {"sparsity": 0.01}, "dmcp": {"epochs": 6}}  # a second or two
TINY: dict[str, dict[str, Any]] = {  # in which they only run
    "autoslim": {"epochs": 2, "groups": 3, "subnets": 1, "batches": 1, "at_once": 60},
    "dmcp": {"epochs": 2},
}
MethodSettings = Mapping[str, Mapping[str, Any]]


def chosen(name: str, problem: Problem, settings: MethodSettings = QUICK) -> Choice:
    """What a method chooses, given what its entry says that it needs."""
    method, state = find_method(name), None
    config = method.config(**settings.get(name, {}))
    if method.prepare:
        state = method.prepare(problem, config).state
    elif method.trained:
        model = copy.deepcopy(problem.model)
        dmcp.train(model, problem.loader, problem.recipe)
        state = model.state_dict()
    return choose(name, problem, config, state)


# every method


@pytest.mark.parametrize("name", METHODS)
def test_the_bounds_are_kept_and_nothing_else_is_touched(name: str) -> None:
    """They ask for the contrary of what is planted: no method would choose it by itself, and one ratio is not it."""
    problem = planted_problem(epochs=1)
    low, high = (problem.graph.widths(widths) for widths in ({"needed": 1, "useless": 5}, {"needed": 3}))
    bounded = replace(problem, min_widths=low, max_widths=high)
    before, random = copy.deepcopy(problem.model.state_dict()), torch.get_rng_state()
    choice = chosen(name, bounded, TINY)
    assert choice.widths["needed"] <= 3 and choice.widths["useless"] >= 5
    assert torch.equal(random, torch.get_rng_state()) and problem.model.training
    assert all(torch.equal(tensor, before[key]) for key, tensor in problem.model.state_dict().items())
    if METHODS[name].own is Own.FINETUNED:
        assert choice.model is not None and choice.model.training
        small = dmcp.cut(choice.model, problem.graph, choice.kept)
        assert small(next(iter(problem.held_out))[0]).shape == (64, 2, 8)


@pytest.mark.parametrize(("name", "epochs"), [("sensitivity", 6), ("slimming", 8), ("dmcp", 6)])
def test_a_search_narrows_what_is_useless(name: str, epochs: int) -> None:
    choice = chosen(name, planted_problem(epochs=epochs))
    assert choice.widths["useless"] < choice.widths["needed"]


@pytest.mark.parametrize("name", ["uniform-slimmable", "l1", "l2"])
def test_one_ratio_does_not(name: str) -> None:
    problem = planted_problem(epochs=1)
    widths = chosen(name, problem).widths
    assert widths == problem.uniform() and abs(widths["needed"] - widths["useless"]) <= 1


@pytest.mark.parametrize("name", ["l1", "autoslim", "dmcp", "slimming"])
def test_networks_without_batch_norms(name: str) -> None:
    problem = as_problem(Planted(norm=False), planted_batches(4, 0), planted_batches(2, 1), "57%", 0, 1)
    if name != "slimming":
        chosen(name, problem, TINY)
        return
    with pytest.raises(TrainingError, match=r"ignore=\['needed', 'useless'\]"):
        chosen(name, problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("build", [resnet18, mobilenet_v2, densenet121])
def test_real_networks(build: Any, name: str) -> None:
    torch.manual_seed(0)
    model = build(num_classes=10)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):  # no two channels are the same to a ranking
            part.weight.data = 0.5 + torch.rand(part.num_features)
    problem = tiny_problem(model, "50%,params:60%", align=2)
    choice = chosen(name, problem, TINY)
    assert all(width % 2 == 0 or width == problem.graph.full[space] for space, width in choice.widths.items())
    small = dmcp.cut(choice.model or problem.model, problem.graph, choice.kept)
    assert small.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


# AutoSlim

AUTOSLIM: Any = METHODS["autoslim"]


def by_hand(problem: Problem, state: Any) -> tuple[list[int], int]:
    """The greedy way with networks that are really cut, one channel at a time, and how many of them were run."""
    graph, (x, labels) = problem.graph, problem.held_out[0]  # type: ignore[index]
    model = dmcp.cut(problem.model, graph, graph.full)
    model.load_state_dict(state)
    widths, runs = [8, 8], 0
    while graph.macs(graph.widths(widths)) > problem.budget.limits[0].target:
        losses = {}
        for trial in ((widths[0] - 1, widths[1]), (widths[0], widths[1] - 1)):
            if min(trial):
                small = dmcp.cut(model, graph, graph.widths(trial)).train()
                losses[trial] = F.cross_entropy(small(x), labels).item()
        runs += 1 + len(losses)
        widths = list(min(losses, key=losses.__getitem__))
    return widths, runs


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_autoslims_way_is_that_of_networks_that_are_cut(seed: int) -> None:
    problem = planted_problem("45%", seed)
    config = AutoSlimConfig(epochs=1, groups=8, batches=1)
    # an untrained one chooses otherwise
    state = AUTOSLIM.prepare(problem, config).state if seed else problem.model.state_dict()
    state = {name: tensor + 9 if "running" in name else tensor for name, tensor in state.items()}  # of no importance
    choice = AUTOSLIM.find(problem, config, state)
    widths, runs = by_hand(problem, state)
    assert list(choice.widths.values()) == widths
    assert choice.sample_passes == runs * 64
    assert all(torch.equal(it, state[name]) for name, it in choice.model.state_dict().items())  # trials leave no trace


def test_autoslim_keeps_the_needed_channels_whatever_the_budget() -> None:
    problem, log = heard(planted_problem("57%"))
    config = AutoSlimConfig(epochs=8, subnets=1)
    prepared = AUTOSLIM.prepare(problem, config)
    steps = [len(it.weight_losses) for it in log if isinstance(it, SearchRecord)]
    assert prepared.sample_passes == 8 * 20 * 64 * 3 and steps == [3] * 8 * 20
    for it in (problem, planted_problem("60%")):  # no widths use the second one: those that were found stay
        assert dict(AUTOSLIM.find(it, config, prepared.state).widths) == {"needed": 8, "useless": 1}
    AUTOSLIM.find(problem, replace(config, at_once=2), prepared.state).check(problem)
    with pytest.raises(TrainingError):  # no loss is finite
        AUTOSLIM.find(problem, config, {name: tensor * float("nan") for name, tensor in prepared.state.items()})


# what is refused


def test_budgets_settings_and_widths_that_cannot_be() -> None:
    problem = planted_problem(epochs=1)
    for budget in ("3%", "200%"):
        with pytest.raises(BudgetError):
            replace(problem, budget=parse_budget(budget, problem.graph))
    free, bounded = problem.uniform(), replace(problem, max_widths=problem.graph.widths({"needed": 3}))
    with pytest.raises(BudgetError, match="needed"):
        Choice(widths=free, kept=free).check(bounded)
    with pytest.raises(TypeError):
        find_method("dmcp").config(more={"warm": 1})
    with pytest.raises(TrainingError):
        find_method("dmcp").config(epochs=0)
    with pytest.raises(TrainingError, match="needed"):
        Choice(widths=free, kept=dict(free) | {"needed": [0]}).check(problem)


def test_states_and_batches_that_cannot_be() -> None:
    problem = planted_problem(epochs=1)
    for name in ("l1", "slimming", "autoslim"):
        with pytest.raises(TrainingError):
            choose(name, problem, find_method(name).config(), {"weight": torch.zeros(2)})
    with pytest.raises(DataError):
        chosen("autoslim", replace(problem, held_out=[(torch.zeros(1, 16, 1, 1), None)]), TINY)


# methods of one's own

MINE = """
from dmcp.compare.methods import Method, Own
from dmcp.compare.problem import Choice

def even(problem):
    widths = problem.uniform()
    return Choice(widths=widths, kept={name: [*range(width)] for name, width in widths.items()}, model=problem.model)

def narrow(problem):
    return Choice(widths=problem.min_widths, kept=problem.min_widths)

def no_choice(problem):
    return {}

tuned = Method(lambda problem, config: Choice(widths=problem.uniform(), kept={}), dict, own=Own.FINETUNED)
"""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("mine:narrow", BudgetError),
        ("mine:no_choice", TrainingError),
        ("mine:tuned", TrainingError),
        ("mine:narow", DmcpError),
        ("dmpc", DmcpError),
    ],
)
def test_own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    problem = planted_problem()
    assert choose("mine:even", problem, None).widths == problem.uniform()
    with pytest.raises(error):
        choose(name, problem, None)
    assert [*map(title, ("dmcp", "a.b:mine", "a:Outer.mine"))] == ["dmcp", "mine", "Outer.mine"]


def test_a_method_is_stopped_where_it_reports(tmp_path: Path) -> None:
    checkpointer = dmcp.Checkpointer(tmp_path, stop_requested=lambda: True)
    problem = replace(planted_problem(), runtime=dmcp.Runtime(checkpointer=checkpointer))
    with pytest.raises(dmcp.StoppedError):
        problem.log({"episode": 0})
