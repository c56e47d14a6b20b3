"""The Markov chain over channel groups: transitions, marginals, expected widths, samples (eqs. 2 to 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CERTAIN = 30.0  # alpha of a step that is always taken: its sigmoid is 1 and has no gradient


def group_sizes(size: int, groups: int, align: int = 1) -> tuple[int, ...]:
    """Channels of each group: equal up to one unit of `align` channels, smaller ones first.

    A space of fewer units than groups has one group per unit; the last unit may be smaller.
    """
    units = -(-size // align)
    count = min(groups, units)
    small, larger = divmod(units, count)
    sizes = [align * small] * (count - larger) + [align * (small + 1)] * larger
    sizes[-1] -= align * units - size
    return tuple(sizes)


def transitions(alpha: Tensor) -> Tensor:
    """Probability to keep a group, given that the one before is kept (eq. 5). (S, G-1) -> (S, G-1)"""
    return torch.sigmoid(alpha)


def marginals(alpha: Tensor) -> Tensor:
    """Probability that each group is kept (eq. 6); never grows along the chain. (S, G-1) -> (S, G)"""
    kept = [alpha.new_ones(len(alpha))]
    for step in transitions(alpha).unbind(1):  # not cumprod: its gradient waits for the GPU, to look for zeros
        kept.append(kept[-1] * step)
    return torch.stack(kept, dim=1)


def moment(marginals: Tensor, sizes: Tensor, power: int) -> Tensor:
    """Expected power of the width (eq. 8 for power 1). (S, G), (S, G) -> (S,)"""
    return mean_of(marginals, sizes, lambda widths: widths**power)


def mean_of(marginals: Tensor, sizes: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Expected value of a function of the width, which is 0 at 0. (S, G), (S, G) -> (S,)

    The width is W_k, the sum of the first k group sizes, if k groups are kept. So the expectation is the sum over all
    groups of the growth of function(W_k) times the marginal.
    """
    total = function(sizes.cumsum(dim=1).to(marginals.dtype))
    growth = torch.cat([total[:, :1], total[:, 1:] - total[:, :-1]], dim=1)
    return (growth * marginals).sum(dim=1)


def sample_groups(alpha: Tensor, sizes: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Widths of n sub-networks sampled from the chains (eqs. 2 to 4). (S, G-1), (S, G) -> (n, S) int64

    By inverse CDF: one uniform number per space keeps the groups whose marginal is above it.
    """
    ends = 1 - marginals(alpha.detach())[:, 1:]  # ascending; groups behind a short chain are empty and add no width
    last = torch.searchsorted(ends, rand((len(sizes), n), ends.device, generator, ends.dtype), right=True)
    return sizes.cumsum(dim=1).gather(1, last).T


def rand(
    shape: Sequence[int], device: torch.device, generator: torch.Generator | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Uniform numbers, made where the generator lives (the CPU by default): the same on every device."""
    home = torch.device("cpu") if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=home, dtype=dtype).to(device)


# chains inside bounds


def bounded(sizes: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Group sizes of chains whose widths are clamped to [lower, upper]. (S, G), (S,), (S,) -> (S, G)

    Groups that must stay are merged into the first one, those that must go become empty.
    """
    ends = torch.maximum(sizes.cumsum(dim=1), lower[:, None].to(sizes))
    ends = torch.minimum(ends, upper[:, None].to(sizes))
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))


def merged(sizes: Tensor, inside: Tensor) -> Tensor:
    """Steps to groups that `bounded` (inside) has merged into the first one. (S, G), (S, G) -> (S, G-1) bool

    They must be certain: otherwise several steps together would make the minimum width likely.
    """
    ends = sizes.cumsum(dim=1)
    return ((sizes > 0) & (ends <= inside[:, :1]))[:, 1:]
