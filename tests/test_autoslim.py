"""AutoSlim: finds what is needed, stays inside the budget on real networks, and compares the trials that it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import heard, planted_problem
from torch.nn import functional as F

import dmcp
from dmcp.budget import parse
from dmcp.compare.autoslim import AutoSlimConfig, prepare
from dmcp.compare.autoslim import find_autoslim as find
from dmcp.compare.problem import Choice, Problem
from dmcp.errors import TrainingError
from dmcp.searching.config import SearchRecord

SHORT = AutoSlimConfig(epochs=1, groups=3, subnets=1, batches=1)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run(problem: Problem, config: AutoSlimConfig) -> Choice:
    return find(problem, config, prepare(problem, config).state)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_needed_channels_stay(seed: int) -> None:
    problem = planted_problem("57%", seed)
    config = AutoSlimConfig(epochs=8)
    state = prepare(problem, config).state
    for per_saved, at_once in ((False, 1), (True, 1), (False, 2)):
        choice = find(problem, replace(config, per_saved=per_saved, at_once=at_once), state)
        choice.check(problem)
        if at_once == 1:
            assert dict(choice.widths) == {"needed": 8, "useless": 1}
    # here no widths use the budget to the tolerance: those that were found stay
    assert dict(find(planted_problem("60%", seed), config, state).widths) == {"needed": 8, "useless": 1}


def test_same_seed_same_result_and_one_preparation_for_all_budgets() -> None:
    problem = planted_problem(epochs=2)
    first, second = (prepare(planted_problem(budget, epochs=2), SHORT) for budget in ("60%", "40%"))
    assert same(first.state, second.state)
    assert not same(first.state, prepare(replace(problem, seed=1), SHORT).state)
    one, other = (find(problem, SHORT, prepared.state) for prepared in (first, second))
    assert one.widths == other.widths
    assert one.model is not None and same(one.model.state_dict(), first.state)  # and the trials have left no trace


def test_two_limits_hold() -> None:
    problem = planted_problem()
    problem = replace(problem, budget=parse("70%,params:60%", problem.graph))
    choice = run(problem, replace(SHORT, groups=8))
    choice.check(problem)
    assert problem.graph.params(choice.widths) <= 0.6 * problem.graph.params()


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


def test_progress_and_passes() -> None:
    problem, log = heard(planted_problem())
    prepared = prepare(problem, replace(SHORT, epochs=2))
    assert prepared.sample_passes == 20 * 64 * 2 * 3
    steps = [record for record in log if isinstance(record, SearchRecord)]
    assert [record.step for record in steps] == list(range(40)) and {len(it.weight_losses) for it in steps} == {3}
    log.clear()
    find(problem, SHORT, prepared.state)
    assert log and all(isinstance(value, int | float) for record in log for value in record.values())


def test_losses_that_are_not_finite_are_refused() -> None:
    problem = planted_problem()
    state = {name: tensor * float("nan") for name, tensor in problem.model.state_dict().items()}
    with pytest.raises(TrainingError, match="smaller lr_share"):
        find(problem, SHORT, state)
