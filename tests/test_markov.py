"""The chain against all of its outcomes, one by one. (Group sizes by hand are in test_gates.py.)"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dmcp.markov import (
    CERTAIN,
    CHAIN,
    INDEPENDENT,
    Process,
    bounded,
    group_sizes,
    independent_marginals,
    independent_moment,
    marginals,
    merged,
    moment,
    sample_groups,
    transitions,
)

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


def test_the_floor_of_a_thin_space_is_a_tenth() -> None:
    """A peer rounds the group size down and leaves the rest to the floor: 44 % of 16 channels, all of 8."""

    def wrong_floor(size: int, groups: int) -> int:
        return size - (groups - 1) * (size // groups)

    for size in (8, 16, 24, 32):
        sizes = group_sizes(size, 10)
        assert sum(sizes) == size and sizes[0] == max(1, size // 10)
        assert sizes[0] < 0.13 * size < wrong_floor(size, 10)
    assert (wrong_floor(16, 10), wrong_floor(8, 10)) == (7, 8)


# samples


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chances(alpha: Tensor, sizes: Tensor, process: Process) -> dict[int, float]:
    """The distribution of one space's width from all ways that its draws can fall."""
    found: dict[int, float] = {}
    for draws in itertools.product([1, 0], repeat=len(alpha)):
        p = [1 / (1 + math.exp(-a if keep else a)) for keep, a in zip(draws, alpha.tolist(), strict=True)]
        kept = list(itertools.accumulate(draws, min)) if process is CHAIN else draws
        width = sum(size * keep for size, keep in zip(sizes.tolist(), (1, *kept), strict=True))
        found[width] = found.get(width, 0.0) + math.prod(p)
    return found


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
def test_samples_follow_the_distribution_of_their_own_space(process: Process) -> None:
    """I5, and more: every width comes as often as it should, and the mean is the expected width."""
    n = 100_000
    widths = process.sample(ALPHA, SIZES, n, seeded())
    assert widths.shape == (n, 2) and widths.dtype == torch.int64
    expected = process.moment(process.marginals(ALPHA), SIZES, 1)
    assert ((widths.double().mean(dim=0) - expected).abs() < 4 * widths.double().std(dim=0) / n**0.5).all()
    for space in range(2):
        for width, chance in chances(ALPHA[space], SIZES[space], process).items():
            seen = (widths[:, space] == width).double().mean().item()
            assert seen == pytest.approx(chance, abs=4 * (chance * (1 - chance) / n) ** 0.5 + 1e-9)


def test_no_space_is_sampled_from_the_chain_of_another() -> None:
    """A peer draws the second conv of a block from the first one's alphas."""
    alpha = torch.tensor([[30.0] * 3, [-30.0] * 3])
    assert sample_groups(alpha, SIZES, 50, seeded()).unique(dim=0).tolist() == [[10, 2]]
    wrong = sample_groups(alpha[[0, 0]], SIZES, 50, seeded())
    assert wrong.unique(dim=0).tolist() == [[10, 8]]


def test_spaces_are_drawn_independently() -> None:
    """The expected cost multiplies expected widths: right only if no draw is shared."""
    same = torch.zeros(2, 3)
    widths = sample_groups(same, SIZES[[0, 0]], 100_000, seeded()).double()
    assert abs(torch.corrcoef(widths.T)[0, 1].item()) < 0.02


def test_samples_depend_on_the_generator_only() -> None:
    first = sample_groups(ALPHA, SIZES, 100, seeded(3))
    torch.rand(7)
    assert torch.equal(first, sample_groups(ALPHA, SIZES, 100, seeded(3)))
    assert not torch.equal(first, sample_groups(ALPHA, SIZES, 100, seeded(4)))


def test_short_chains_and_single_groups_can_be_sampled() -> None:
    sizes = torch.tensor([[2, 3, 4], [5, 1, 0]])
    assert sample_groups(torch.full((2, 2), 30.0), sizes, 5).unique(dim=0).tolist() == [[9, 6]]
    assert sample_groups(torch.zeros(2, 0), sizes[:, :1], 3).tolist() == [[2, 5]] * 3


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
def test_bounds_keep_the_sum_of_the_groups_inside(process: Process) -> None:
    lower, upper = torch.tensor([4, 3]), torch.tensor([7, 8])
    sizes = bounded(SIZES, lower, upper)
    assert (sizes >= 0).all() and sizes[:, 0].tolist() == [4, 3] and sizes.sum(dim=1).tolist() == [7, 8]
    widths = process.sample(ALPHA, sizes, 1000, seeded())
    assert (widths >= lower).all() and (widths <= upper).all()


def test_a_bounded_chain_is_the_clamped_chain() -> None:
    lower, upper = torch.tensor([2, 3]), torch.tensor([7, 5])
    clamped = sample_groups(ALPHA, SIZES, 1000, seeded()).clamp(lower, upper)
    assert torch.equal(sample_groups(ALPHA, bounded(SIZES, lower, upper), 1000, seeded()), clamped)
    assert torch.equal(bounded(SIZES), SIZES)


def test_a_chain_begins_at_its_lower_bound() -> None:
    """Four steps of one chance each to stay below half of the width would make the floor five times as likely."""
    sizes, lower = torch.tensor([[1] * 10, [2] * 5 + [0] * 5, [1] * 10]), torch.tensor([5, 5, 1])
    inside = bounded(sizes, lower)
    found = merged(sizes, inside)
    assert found.int().sum(dim=1).tolist() == [4, 1, 0] and found[0, :4].all() and found[1, 0]  # 6 of 10 stays a border
    alpha = torch.full((3, 9), 2.0, requires_grad=True)
    chances = marginals(alpha.masked_fill(found, CERTAIN))
    end = 1 - torch.sigmoid(torch.tensor(2.0)).item()
    assert 1 - chances[0, 5].item() == pytest.approx(end)
    assert 1 - marginals(alpha)[0, 5].item() > 3.5 * end
    assert not merged(sizes, bounded(sizes)).any() and not merged(sizes, bounded(sizes, torch.ones(3))).any()
    certain = torch.full((1, 1), CERTAIN, requires_grad=True)
    marginals(certain).sum().backward()
    assert marginals(certain).tolist() == [[1, 1]] and certain.grad is not None and certain.grad.item() == 0


@pytest.mark.parametrize("power", [1, 2, 3])
def test_moments_of_independent_groups(power: int) -> None:
    found = independent_moment(independent_marginals(ALPHA), SIZES, power)
    for row in range(2):
        every = chances(ALPHA[row], SIZES[row], INDEPENDENT).items()
        assert found[row].item() == pytest.approx(sum(chance * width**power for width, chance in every))
    if power > 1:  # the chain's formula is another one
        assert not torch.allclose(found, moment(independent_marginals(ALPHA), SIZES, power))
