"""The Markov chain over the groups of a space: keep the next group, given that this one is kept."""

from __future__ import annotations

import torch
from torch import Tensor


def group_sizes(size: int, groups: int, align: int = 1) -> tuple[int, ...]:
    """Channels of each group: equal up to one unit of `align` channels, smaller ones first.

    A space of fewer units than groups has one group per unit; what is left over of the last unit makes it smaller.
    """
    units = -(-size // align)
    count = min(groups, units)
    small, larger = divmod(units, count)
    sizes = [align * small] * (count - larger) + [align * (small + 1)] * larger
    sizes[-1] -= align * units - size
    return tuple(sizes)


def transitions(alpha: Tensor) -> Tensor:
    """Chance to keep a group, given that the one before is kept (eq. 5). (S, G-1) -> (S, G-1)"""
    return torch.sigmoid(alpha)


def marginals(alpha: Tensor) -> Tensor:
    """Chance that each group survives (eq. 6); never grows along the chain. (S, G-1) -> (S, G)"""
    keep = transitions(alpha).cumprod(dim=1)
    return torch.cat([torch.ones_like(keep[:, :1]), keep], dim=1)


def moment(probabilities: Tensor, sizes: Tensor, power: int) -> Tensor:
    """Expected power of the width (eqs. 7 and 8 for power 1). (S, G), (S, G) -> (S,)

    The width is W_k, the first k group sizes summed, for the last group k that survives; so the expectation
    telescopes into the growth of W_k ** power at each group times the chance that the group survives.
    """
    total = sizes.cumsum(dim=1).to(probabilities.dtype) ** power
    growth = torch.cat([total[:, :1], total[:, 1:] - total[:, :-1]], dim=1)
    return (growth * probabilities).sum(dim=1)
