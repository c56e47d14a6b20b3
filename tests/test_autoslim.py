"""AutoSlim: finds what is needed, stays inside the budget on real networks, and compares the trials that it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import heard, planted_problem
from torch.nn import functional as F

import dmcp
from dmcp.compare.methods import AutoSlimConfig
from dmcp.compare.methods import find_autoslim as find
from dmcp.compare.methods import prepare_autoslim as prepare
from dmcp.compare.problem import Problem
from dmcp.errors import TrainingError
from dmcp.searching.config import SearchRecord

SHORT = AutoSlimConfig(epochs=1, groups=3, subnets=1, batches=1)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_needed_channels_stay(seed: int) -> None:
    problem = planted_problem("57%", seed)
    config = AutoSlimConfig(epochs=8)
    state = prepare(problem, config).state
    for at_once in (1, 2):
        choice = find(problem, replace(config, at_once=at_once), state)
        choice.check(problem)
        if at_once == 1:
            assert dict(choice.widths) == {"needed": 8, "useless": 1}
    # here no widths use the budget to the tolerance: those that were found stay
    assert dict(find(planted_problem("60%", seed), config, state).widths) == {"needed": 8, "useless": 1}


def test_one_preparation_for_all_budgets_and_its_cost() -> None:
    problem, log = heard(planted_problem(epochs=2))
    first, second = (prepare(it, SHORT) for it in (problem, planted_problem("40%", epochs=2)))
    assert same(first.state, second.state)
    assert not same(first.state, prepare(replace(problem, seed=1), SHORT).state)
    steps = [len(it.weight_losses) for it in log if isinstance(it, SearchRecord)]
    assert first.sample_passes == 20 * 64 * 3 and steps == [3] * 40  # of two preparations
    one, other = (find(problem, SHORT, prepared.state) for prepared in (first, second))
    assert one.widths == other.widths and log[-1].keys() == {"trials", "loss", "spent"}
    assert one.model is not None and same(one.model.state_dict(), first.state)  # the trials have left no trace


def by_hand(problem: Problem, state: Any) -> tuple[list[int], int]:
    """The greedy way with networks that are really cut, one channel at a time, and how many of them were run."""
    graph, (x, labels) = problem.graph, problem.held_out.batches[0]  # type: ignore[attr-defined]
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
def test_the_way_is_that_of_networks_that_are_cut(seed: int) -> None:
    problem = planted_problem("45%", seed)
    config = AutoSlimConfig(epochs=1, groups=8, batches=1)
    state = prepare(problem, config).state if seed else problem.model.state_dict()  # an untrained one chooses otherwise
    state = {name: tensor + 9 if "running" in name else tensor for name, tensor in state.items()}  # of no importance
    choice = find(problem, config, state)
    widths, runs = by_hand(problem, state)
    assert list(choice.widths.values()) == widths
    assert choice.sample_passes == runs * 64


def test_losses_that_are_not_finite_are_refused() -> None:
    problem = planted_problem()
    state = {name: tensor * float("nan") for name, tensor in problem.model.state_dict().items()}
    with pytest.raises(TrainingError):
        find(problem, SHORT, state)
