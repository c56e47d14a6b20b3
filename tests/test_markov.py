"""The chain, against all of its outcomes one by one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dmcp.markov import CERTAIN, bounded, group_sizes, marginals, merged, moment, sample_groups, transitions

ALPHA = torch.tensor([[0.3, -1.2, 2.0], [-0.7, 0.1, 0.4]], dtype=torch.float64)  # (S, G-1)
SIZES = torch.tensor([[1, 3, 2, 4], [2, 2, 3, 1]])  # (S, G)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outcomes(alpha: Tensor) -> list[tuple[tuple[int, ...], float]]:
    """Every way that the gates of one space can fall, and its probability."""
    found = []
    for gates in itertools.product([1, 0], repeat=len(alpha)):
        p = [1 / (1 + math.exp(-a if gate else a)) for gate, a in zip(gates, alpha.tolist(), strict=True)]
        kept = tuple(itertools.accumulate(gates, min))  # a gap ends the chain
        found.append(((1, *kept), math.prod(p)))
    return found


def test_marginals_and_moments_are_averages_over_all_outcomes() -> None:
    kept = marginals(ALPHA)
    assert (kept[:, 0] == 1).all()
    torch.testing.assert_close(transitions(ALPHA), marginals(ALPHA)[:, 1:] / marginals(ALPHA)[:, :-1])
    for row, alpha in enumerate(ALPHA):
        every = outcomes(alpha)
        for group in range(4):
            assert kept[row, group].item() == pytest.approx(sum(p for gates, p in every if gates[group]))
        for power in (1, 2, 3):
            average = sum(p * (SIZES[row] * torch.tensor(gates)).sum().item() ** power for gates, p in every)
            assert moment(kept, SIZES, power)[row].item() == pytest.approx(average)
    assert torch.autograd.gradcheck(lambda a: moment(marginals(a), SIZES, 2), ALPHA.requires_grad_())


def test_samples_follow_the_distribution_of_their_own_space() -> None:
    """I5, and more: every width comes as often as it should, and the mean is the expected width."""
    n = 100_000
    widths = sample_groups(ALPHA, SIZES, n, seeded())
    assert widths.shape == (n, 2) and widths.dtype == torch.int64
    expected = moment(marginals(ALPHA), SIZES, 1)
    assert ((widths.double().mean(dim=0) - expected).abs() < 4 * widths.double().std(dim=0) / n**0.5).all()
    for space in range(2):
        chances: dict[int, float] = {}
        for gates, p in outcomes(ALPHA[space]):
            width = int((SIZES[space] * torch.tensor(gates)).sum())
            chances[width] = chances.get(width, 0.0) + p
        for width, p in chances.items():
            seen = (widths[:, space] == width).double().mean().item()
            assert seen == pytest.approx(p, abs=4 * (p * (1 - p) / n) ** 0.5 + 1e-9)
    # The expected cost multiplies expected widths, which is right only if spaces are sampled independently.
    assert abs(torch.corrcoef(widths.double().T)[0, 1].item()) < 0.02
    torch.rand(7)
    assert torch.equal(widths, sample_groups(ALPHA, SIZES, n, seeded()))
    assert not torch.equal(widths, sample_groups(ALPHA, SIZES, n, seeded(1)))


@pytest.mark.parametrize(
    ("size", "groups", "align", "sizes"),
    [
        (10, 3, 1, (3, 3, 4)),
        (16, 10, 1, (1, 1, 1, 1, 2, 2, 2, 2, 2, 2)),  # the authors' code leaves 7 of 16 to the first group
        (5, 10, 1, (1, 1, 1, 1, 1)),
        (7, 1, 1, (7,)),
        (64, 10, 8, (8,) * 8),
        (40, 2, 8, (16, 24)),
        (20, 4, 8, (8, 8, 4)),
        (4, 10, 8, (4,)),
    ],
)
def test_group_sizes_by_hand(size: int, groups: int, align: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(size, groups, align) == sizes


def test_a_bounded_chain_is_the_clamped_chain() -> None:
    lower, upper = torch.tensor([4, 3]), torch.tensor([7, 5])
    sizes = bounded(SIZES, lower, upper)
    assert (sizes >= 0).all() and sizes[:, 0].tolist() == [4, 3] and sizes.sum(dim=1).tolist() == [7, 5]
    widths = sample_groups(ALPHA, sizes, 1000, seeded())
    assert (widths >= lower).all() and (widths <= upper).all()
    assert torch.equal(widths, sample_groups(ALPHA, SIZES, 1000, seeded()).clamp(lower, upper))


def test_a_chain_begins_at_its_lower_bound() -> None:
    """Four steps that may each end below half of the width would make the minimum five times as likely."""
    sizes, full = torch.tensor([[1] * 10, [2] * 5 + [0] * 5, [1] * 10]), torch.tensor([10, 10, 10])
    found = merged(sizes, bounded(sizes, torch.tensor([5, 5, 1]), full))
    assert found.int().sum(dim=1).tolist() == [4, 1, 0] and found[0, :4].all() and found[1, 0]
    alpha = torch.full((3, 9), 2.0)
    end = 1 - torch.sigmoid(torch.tensor(2.0)).item()
    assert 1 - marginals(alpha.masked_fill(found, CERTAIN))[0, 5].item() == pytest.approx(end)
    assert 1 - marginals(alpha)[0, 5].item() > 3.5 * end
    certain = torch.full((1, 1), CERTAIN, requires_grad=True)
    marginals(certain).sum().backward()
    assert marginals(certain).tolist() == [[1, 1]] and certain.grad is not None and certain.grad.item() == 0
