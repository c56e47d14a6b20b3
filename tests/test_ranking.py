"""Methods that rank channels: the planted ones go, and what is zeroed is what is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from planted import SIGNS, WEAK, planted_problem, residual_problem, shrunk, weak_problem
from torch import Tensor, nn

from dmcp.compare import ranking
from dmcp.tracing.widths import ChannelSpace


def spread(weight: Tensor) -> Tensor:
    """One large weight has the larger L2 norm, many middling ones have the larger L1 norm."""
    weight[:] = torch.eye(SIGNS)[..., None, None]
    return torch.full_like(weight[WEAK], 1.5 / SIGNS)


@pytest.mark.parametrize(("power", "filters", "go"), [(1, shrunk, True), (2, spread, True), (1, spread, False)])
def test_planted_channels_go(power: int, filters: Any, go: bool) -> None:
    problem, state = weak_problem(filters)
    choice = ranking.find_l1(problem, ranking.L1Config(power=power), state)
    choice.check(problem)
    wanted = [i for i in range(SIGNS) if i not in WEAK]
    assert all((list(choice.kept[name]) == wanted) is go for name in choice.widths)


def test_a_ranking_of_ones_own() -> None:
    """Any scores will do; a space without scores keeps its first channels."""
    problem, state = weak_problem(shrunk)
    scores = torch.tensor([0.0, 5.0, 0.0, 0.0, 7.0, 0.0, 6.0, 0.0])

    def score(model: nn.Module, space: ChannelSpace) -> Tensor | None:
        assert torch.equal(model.get_parameter(f"{space.name}.weight"), state[f"{space.name}.weight"])
        return scores if space.name == "needed" else None

    choice = ranking.keep_strongest(problem, state, score)
    choice.check(problem)
    assert choice.widths == problem.uniform()
    assert set(choice.kept["needed"]) > set(WEAK)
    assert list(choice.kept["useless"]) == list(range(choice.widths["useless"]))


def test_slimming_drops_small_scales_wherever_they_are() -> None:
    """One threshold for all spaces: what stays are the largest scales of the network, with a sign or without."""
    problem = planted_problem(budget="65%")
    trained = copy.deepcopy(problem.model)
    scales = {"needed": [0.1, 0.9, 0.2, -0.8, 0.3, 0.7, -0.25, 0.15], "useless": [0.6, -0.5, 1, 1, 1, 0.05, 1, 1]}
    for name, values in scales.items():
        trained.get_parameter(f"{name}_norm.weight").data = torch.tensor(values)
    choice = ranking.find_slimming(problem, ranking.SlimmingConfig(), trained.state_dict())
    assert choice.kept == {"needed": [1, 3, 5], "useless": [0, 1, 2, 3, 4, 6, 7]}


def test_slimming_sums_the_scales_of_tied_norms() -> None:
    """A stream that several layers write is not the first to go because each of its scales is shrunk."""
    problem = residual_problem(budget="80%")
    trained = copy.deepcopy(problem.model)
    for norm in (trained.bn1, trained.bn3, trained.bn4, trained.bn5):
        norm.weight.data = torch.linspace(1.2, 1.8, len(norm.weight))
    trained.bn0.weight.data = torch.tensor([9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    trained.bn2.weight.data = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.1, 1.0, 1.0, 1.9])
    choice = ranking.find_slimming(problem, ranking.SlimmingConfig(), trained.state_dict())
    assert list(choice.kept["stem"]) == [0, 1, 2, 3, 5, 6, 7]  # sums: 9, then 2, 1.9 and 1.1
    assert choice.widths["conv1"] < 6 and choice.widths["conv3"] < 9 and choice.widths["conv4"] == 11


def test_slimming_pulls_the_scales_by_the_gradient_of_their_size() -> None:
    problem = planted_problem(epochs=1)
    sums = []
    for sparsity in (0.0, 0.01, 0.1):
        state = ranking.prepare_slimming(problem, ranking.SlimmingConfig(sparsity=sparsity)).state
        sums.append(sum(state[f"{name}_norm.weight"].abs().sum() for name in ("needed", "useless")).item())
    assert sums[0] > sums[1] > sums[2]
