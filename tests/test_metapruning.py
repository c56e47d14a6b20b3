"""MetaPruning: weights computed for a structure, structures that come with the batches, and evolution in the budget."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import randomise
from planted import heard, planted_problem, tiny_problem
from torch import Tensor
from torchvision.models import mobilenet_v2, resnet18

import dmcp
from dmcp.batches import generator
from dmcp.budget import parse
from dmcp.compare.metapruning import (
    Grid,
    MetaPruningConfig,
    PruningNet,
    evolve,
    prepare,
)
from dmcp.compare.metapruning import find_metapruning as find
from dmcp.compare.problem import Problem
from dmcp.errors import TrainingError
from dmcp.losses import MetricWarning

SHORT = MetaPruningConfig(hidden=2, population=4, generations=2, parents=2, batches=1)


@functools.cache
def real(build: Any) -> Problem:
    torch.manual_seed(0)
    return tiny_problem(build(num_classes=10))


def random_blocks(problem: Problem, hidden: int = 3) -> PruningNet:
    """A PruningNet whose blocks do something."""
    net = PruningNet(problem.model, problem.graph, hidden, 10**9, 0)
    randomise(net.net.model)
    with torch.no_grad():
        net.first.normal_(generator=generator(1))  # what is masked must not count
        for second in net.second:
            second.normal_(0, 0.05, generator=generator(0))
    return net.double()


# the network


@pytest.mark.parametrize("build", [resnet18, pytest.param(mobilenet_v2, marks=pytest.mark.slow)])
def test_sub_networks_are_the_cut_model_with_the_computed_weights(build: Any) -> None:
    problem = real(build)
    net = random_blocks(problem).eval()
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    outputs = []
    for widths in Grid(problem, 31).sample(2, generator(1)):
        whole = copy.deepcopy(net.net.model)
        with torch.no_grad():
            for name, weight in net.weights(widths).items():
                whole.get_parameter(name.removeprefix("model.")).copy_(weight)
            small = dmcp.cut(whole, problem.graph, problem.graph.widths(widths.tolist()))
            outputs.append(net(image, widths))
            torch.testing.assert_close(outputs[-1], small(image))
    assert not torch.allclose(*outputs)


def test_a_weight_is_computed_from_its_own_spaces_only() -> None:
    net = random_blocks(planted_problem())
    before, after = net.weights(torch.tensor([8, 8])), net.weights(torch.tensor([8, 3]))
    differ = [name for name in before if not torch.equal(before[name], after[name])]
    assert differ == ["model.useless.weight", "model.readout.weight"] and len(before) == 3


def test_a_fresh_net_is_the_model_and_learns_in_every_part() -> None:
    problem = planted_problem()
    net = PruningNet(problem.model, problem.graph, 4, 10**9, 0)
    batch = problem.loader.batches[0]  # type: ignore[attr-defined]
    assert torch.equal(net(batch[0], problem.graph.full.tensor()), problem.model(batch[0]))
    state = prepare(problem, replace(SHORT, epochs=1)).state
    still = [name for name, tensor in net.state_dict().items() if torch.equal(tensor, state[name])]
    assert still == ["net.alpha"]
    with pytest.raises(TrainingError, match="at most 2"):  # 384 weights in blocks
        find(problem, replace(SHORT, hidden=3, max_params=768))


# structures


def test_structures_are_drawn_evenly_from_floor_to_full() -> None:
    problem, groups = real(resnet18), 5
    drawn = Grid(replace(problem, align=8), groups).sample(5000, generator(0))  # (N, S)
    for column, space in zip(drawn.T, problem.graph.spaces, strict=True):
        values, counts = column.unique(return_counts=True)
        assert values[-1] == space.size and values[0] == -(-problem.min_widths[space.name] // 8) * 8
        assert not (values % 8).any() and 2 <= len(values) <= groups
        assert (counts / 5000 - 1 / len(values)).abs().max() < 4 * 0.5 / 5000**0.5


# evolution


@pytest.mark.parametrize("budget", ["50%", "60%,params:40%"])
def test_evolution_stays_inside_and_climbs(budget: str) -> None:
    problem = real(resnet18)
    problem, seen = heard(replace(problem, budget=parse(budget, problem.graph), align=4))
    full = problem.graph.full.tensor()

    def judge(structures: Any) -> list[float]:  # the first half of the spaces is what matters
        share = torch.tensor(structures) / full
        return (share[:, : len(full) // 2].mean(dim=1) - share[:, len(full) // 2 :].mean(dim=1)).tolist()

    config = MetaPruningConfig(population=20, generations=8, parents=5)
    scores = evolve(problem, config, judge)
    rows = torch.tensor(list(scores))
    shares = problem.shares(rows)
    assert len(scores) == 160 and shares.min() >= 0.95 and shares.max() <= 1
    assert ((rows % 4 == 0) | (rows == full)).all() and (rows >= problem.min_widths.tensor()).all()
    assert seen[-1]["generation"] == 7 and seen[-1]["judged"] == 160
    # one who only guesses, as often
    guessed = Grid(problem, 31).inside(Grid(problem, 31).sample(64 * 160, generator(1)), 160, {})
    assert len(guessed) == 160
    assert max(scores.values()) > max(judge(guessed)) + 0.05
    assert seen[-1]["best"] == max(scores.values()) and seen[-1]["mean"] > seen[0]["mean"]


# the whole method


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_what_is_needed_is_kept(seed: int) -> None:
    problem = planted_problem(seed=seed, epochs=15)
    choice = find(problem, replace(SHORT, hidden=8, population=8, batches=4))
    assert dict(choice.widths) == {"needed": 8, "useless": 1}
    assert choice.model is None and choice.kept == choice.widths
    assert choice.sample_passes == 15 * 20 * 64 + 8 * 4 * 64  # no more than eight structures cost so much


def test_a_structure_whose_metric_is_no_number_is_never_the_best() -> None:
    """Nor a parent: every comparison with NaN is false, so that the first one would stay in front."""
    problem, log = heard(planted_problem(epochs=1))
    state = prepare(problem, SHORT).state

    def widths(good: int, bad: float) -> dict[str, int]:
        """With one batch a call is a structure: one of them is good."""
        calls = itertools.count()

        def metric(output: Tensor, batch: Any) -> tuple[Tensor, int]:
            return torch.tensor((1.0 if next(calls) == good else bad) * len(output)), len(output)

        log.clear()
        return dict(find(replace(problem, task=dmcp.Task(metric=metric)), SHORT, state).widths)

    for good in range(SHORT.population):
        with pytest.warns(MetricWarning):
            found = widths(good, math.nan)
        assert [record["best"] for record in log] == [1, 1] and log[0]["failed"] == 3 and log[0]["mean"] == 1
        assert found == widths(good, -1.0) and "failed" not in log[0]
    with pytest.raises(TrainingError):
        widths(-1, math.nan)
