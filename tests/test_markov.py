"""The chain against all of its outcomes, one by one. (Group sizes by hand are in test_gates.py.)"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dmcp.markov import group_sizes, marginals, moment, transitions

ALPHA = torch.tensor([[0.3, -1.2, 2.0], [-0.7, 0.1, 0.4]], dtype=torch.float64)  # (S, G-1)
SIZES = torch.tensor([[1, 3, 2, 4], [2, 2, 3, 1]])  # (S, G)


def outcomes(alpha: Tensor) -> list[tuple[int, float]]:
    """Every way that the draws of one chain can fall: groups kept, and the chance of it."""
    found = []
    for draws in itertools.product([True, False], repeat=len(alpha)):
        chance = 1.0
        for keep, a in zip(draws, alpha.tolist(), strict=True):
            p = 1 / (1 + math.exp(-a))
            chance *= p if keep else 1 - p
        kept = 1 + len(list(itertools.takewhile(bool, draws)))  # the first group stays; a gap ends the chain
        found.append((kept, chance))
    assert sum(chance for _, chance in found) == pytest.approx(1)
    return found


def test_marginals_are_the_chances_of_survival() -> None:
    found = marginals(ALPHA)
    for row, alpha in enumerate(ALPHA):
        for group in range(4):
            expected = sum(chance for kept, chance in outcomes(alpha) if kept > group)
            assert found[row, group].item() == pytest.approx(expected)
    assert (found[:, 0] == 1).all()
    assert (found.diff(dim=1) < 0).all()


def test_transitions_are_conditional_chances() -> None:
    found, survive = transitions(ALPHA), marginals(ALPHA)
    torch.testing.assert_close(found, survive[:, 1:] / survive[:, :-1])


@pytest.mark.parametrize("power", [1, 2, 3])
def test_moments_are_averages_over_all_outcomes(power: int) -> None:
    found = moment(marginals(ALPHA), SIZES, power)
    for row, alpha in enumerate(ALPHA):
        expected = sum(chance * sum(SIZES[row, :kept].tolist()) ** power for kept, chance in outcomes(alpha))
        assert found[row].item() == pytest.approx(expected)


def test_moments_of_chains_of_different_length() -> None:
    """A shorter chain is padded with groups of size zero that never survive."""
    sizes = torch.tensor([[2, 3, 4], [5, 1, 0]])
    survive = marginals(ALPHA[:, :2]) * (sizes > 0)
    short = moment(marginals(ALPHA[1:, :1]), sizes[1:, :2], 2)
    torch.testing.assert_close(moment(survive, sizes, 2)[1:], short)


def test_a_sampled_mean_is_the_expected_width() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(100_000, *ALPHA.shape, generator=generator) < transitions(ALPHA)
    groups = torch.cat([torch.ones(100_000, 2, 1), draws.cumprod(dim=2)], dim=2)
    widths = (groups * SIZES).sum(dim=2)
    expected = moment(marginals(ALPHA), SIZES, 1)
    error = widths.std(dim=0) / 100_000**0.5
    assert ((widths.mean(dim=0) - expected).abs() < 4 * error).all()


def test_the_ends_of_the_chain() -> None:
    for alpha, expected in ((1e4, SIZES.sum(dim=1)), (-1e4, SIZES[:, 0])):
        width = moment(marginals(torch.full_like(ALPHA, alpha)), SIZES, 1)
        assert width.tolist() == expected.tolist()
    one = marginals(torch.zeros(3, 0))
    assert one.tolist() == [[1.0]] * 3
    assert moment(one, torch.tensor([[4], [5], [6]]), 2).tolist() == [16, 25, 36]


def test_gradients_of_moments() -> None:
    def width(alpha: Tensor) -> Tensor:
        return torch.cat([moment(marginals(alpha), SIZES, power) for power in (1, 2)])

    assert torch.autograd.gradcheck(width, ALPHA.clone().requires_grad_())


def test_group_sizes_are_as_many_as_asked_and_no_more() -> None:
    assert len(group_sizes(100, 10)) == 10
    assert group_sizes(100, 1000) == (1,) * 100
    assert group_sizes(20, 4, align=8) == (8, 8, 4)
    assert all(sum(group_sizes(size, 10, 8)) == size for size in range(1, 300))
