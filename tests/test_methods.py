"""The table of methods: each one finds what is planted, from what its entry says that it starts from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import Planted, as_problem, planted_batches, planted_problem
from torch import Tensor

import dmcp
from dmcp.budget import parse
from dmcp.compare.amc import DdpgConfig
from dmcp.compare.methods import METHODS, PEERS, Method, Own, Start, find_method
from dmcp.compare.problem import Choice, Problem
from dmcp.compare.runner import check_method
from dmcp.errors import BudgetError, DmcpError, TrainingError
from dmcp.searching.config import SearchResult

QUICK: dict[str, dict[str, Any]] = {  # settings in which a second or two are enough
    "slimming": {"sparsity": 0.01},
    "autoslim": {"epochs": 4},
    "amc": {"warmup": 20, "episodes": 40, "agent": DdpgConfig(hidden=32, actor_lr=1e-3, critic_lr=1e-2)},
    "metapruning": {"epochs": 8, "hidden": 8, "population": 8, "generations": 3, "parents": 4},
    "dmcp": {"epochs": 12},
}
EPOCHS = {"slimming": 20}  # of the recipe, where few are not enough
SEARCHES = ["slimming", "autoslim", "amc", "metapruning", "dmcp", "dmcp-direct"]
ONE_RATIO = ["uniform-slimmable", "l1", "sfp", "fpgm"]


def trained(problem: Problem) -> Mapping[str, Tensor]:
    """The unpruned network, trained."""
    model = copy.deepcopy(problem.model)
    dmcp.train(model, problem.loader, problem.recipe)
    return model.state_dict()


def searched(problem: Problem) -> SearchResult:
    """The search of dmcp."""
    told: list[Any] = []
    METHODS["dmcp"].find(replace(problem, tell=lambda _, record: told.append(record)), config_of("dmcp"))
    return next(record for record in told if isinstance(record, SearchResult))


def config_of(name: str) -> Any:
    return find_method(name).config(**QUICK.get(name, {}))


def choose(name: str, problem: Problem) -> Choice:
    """What a method chooses, given what its entry says that it needs."""
    method, config = find_method(name), config_of(name)
    match method.start:
        case Start.SEARCHED:
            return method.find(problem, config, searched(problem))
        case Start.TRAINED | Start.HELD:
            return method.find(problem, config, trained(problem))
        case Start.PREPARED:
            assert method.prepare is not None
            return method.find(problem, config, method.prepare(problem, config).state)
        case Start.FRESH:
            return method.find(problem, config)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.start is Start.SEARCHED])
def test_what_draws_from_a_search_asks_for_it(name: str) -> None:
    method, problem = METHODS[name], planted_problem("57%")
    wrong: list[list[Any]] = [[], [None], [{"weight": torch.ones(1)}]]  # the last is what other methods start from
    for found in wrong:
        with pytest.raises(
            TrainingError, match=r"^dmcp-direct draws from a search that is done: give its SearchResult"
        ):
            method.find(problem, method.config(), *found)


def without_norms(budget: str = "57%") -> Problem:
    return as_problem(Planted(norm=False), planted_batches(4, 0), planted_batches(2, 1), budget, 0, 1)


# -- bounds


@pytest.mark.parametrize("name", [*METHODS, *PEERS])
def test_every_method_keeps_the_least_and_the_most_widths(name: str) -> None:
    """They ask for the contrary of what is planted: no method would choose it by itself, and one ratio is not it."""
    if name in PEERS:
        pytest.importorskip(name.replace("-", "_"))
    problem = planted_problem(epochs=1)
    floor, ceiling = (problem.graph.widths(widths) for widths in ({"needed": 1, "useless": 5}, {"needed": 3}))
    bounded = replace(problem, floor=floor, ceiling=ceiling)
    assert bounded.most == ceiling and problem.most == problem.graph.full
    choice = choose(name, bounded)
    choice.check(bounded)
    assert choice.widths["needed"] <= 3 and choice.widths["useless"] >= 5
    free = problem.graph.widths({"needed": 5, "useless": 4})
    with pytest.raises(BudgetError, match="keep 5 channels of needed, of which 1 to 3 are allowed"):
        Choice(widths=free, kept=free).check(bounded)


# -- the planted truth


def test_every_method_has_a_place_in_these_tests() -> None:
    assert sorted([*SEARCHES, *ONE_RATIO, "uniform", "random"]) == sorted(METHODS)
    assert [name for name, method in METHODS.items() if method.one_ratio] == ONE_RATIO


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_narrows_what_is_useless(name: str) -> None:
    problem = planted_problem(epochs=EPOCHS.get(name, 6))
    before = copy.deepcopy(problem.model.state_dict())
    choice = choose(name, problem)
    choice.check(problem)
    assert choice.widths["useless"] < choice.widths["needed"]
    assert all((tensor == before[key]).all() for key, tensor in problem.model.state_dict().items())


@pytest.mark.parametrize("name", ["uniform", *ONE_RATIO])
def test_one_ratio_does_not(name: str) -> None:
    problem = planted_problem(epochs=1)
    widths = choose(name, problem).widths
    assert widths == choose("uniform", problem).widths
    assert abs(widths["needed"] - widths["useless"]) <= 1  # nine channels in all cannot be halved


def test_random_widths_know_the_budget_only() -> None:
    drawn = []
    for seed in range(12):
        problem = planted_problem(seed=seed, epochs=1)
        choice = choose("random", problem)
        choice.check(problem)
        drawn.append(choice.widths["needed"] - choice.widths["useless"])
    assert min(drawn) < 0 < max(drawn)


# -- what the table says


@pytest.mark.parametrize("name", [*METHODS, *PEERS])
def test_entries_are_whole(name: str) -> None:
    method: Method = METHODS[name] if name in METHODS else PEERS[name]
    assert (method.prepare is not None) == (method.start is Start.PREPARED)
    method.config()  # there are defaults for everything


@pytest.mark.parametrize("name", [name for name, it in METHODS.items() if it.own not in (None, Own.SLIMMABLE)])
def test_methods_with_a_training_of_their_own_give_its_network(name: str) -> None:
    quick = planted_problem(epochs=1)
    choice = choose(name, quick)
    assert choice.model is not None
    small = dmcp.cut(choice.model, quick.graph, choice.kept)
    assert small(next(iter(quick.held))[0]).shape == (64, 2, 8)


# -- bad input


def test_slimming_without_batch_norms_says_what_to_do() -> None:
    with pytest.raises(TrainingError, match=r"needed and 1 more.*frozen=\['needed', 'useless'\].*l1") as error:
        choose("slimming", without_norms())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "slimming"])
def test_all_others_work_without_batch_norms(name: str) -> None:
    problem = without_norms()
    choose(name, problem).check(problem)


def refuse(name: str, budget: str) -> tuple[str, Problem]:
    """The sentence of a method about a budget that cannot be."""
    problem = planted_problem(epochs=1)
    with pytest.raises(BudgetError) as error:
        choose(name, replace(problem, budget=parse(budget, problem.graph))).check(problem)
    return str(error.value), problem


@pytest.mark.parametrize("name", METHODS)
def test_budgets_below_the_floor_name_the_range(name: str) -> None:
    sentence, problem = refuse(name, "3%")
    least, most = problem.graph.macs(problem.floor), problem.graph.macs()
    assert "less than the floor costs" in sentence and f"from {least:,} " in sentence and f"to {most:,}." in sentence


@pytest.mark.parametrize("name", METHODS)
def test_budgets_above_the_network_name_the_range(name: str) -> None:
    sentence, problem = refuse(name, "200%")
    assert "more than the network has" in sentence and f"to {problem.graph.macs():,}." in sentence


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slimmning", "'slimmning': did you mean slimming?"),
        ("torch_pruning", "'torch_pruning': did you mean torch-pruning?"),
        ("zzz", "there are uniform, random, uniform-slimmable, l1, "),
        ("", "there are uniform, random, uniform-slimmable, l1, "),
    ],
)
def test_an_unknown_method_gets_the_nearest_name(name: str, words: str) -> None:
    with pytest.raises(DmcpError) as error:
        check_method(name)
    assert words in str(error.value)
    for known in (*METHODS, *PEERS):
        check_method(known)
