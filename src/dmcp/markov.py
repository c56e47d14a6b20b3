"""The Markov chain over channel groups: transitions, marginals, expectation, samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CERTAIN = 30.0  # alpha of a step that is never left to chance: its sigmoid is 1, without a slope


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
    found = [alpha.new_ones(len(alpha))]
    for keep in transitions(alpha).unbind(1):  # not cumprod: its gradient waits for the GPU, to look for zeros
        found.append(found[-1] * keep)
    return torch.stack(found, dim=1)


def moment(probabilities: Tensor, sizes: Tensor, power: int) -> Tensor:
    """Expected power of the width (eq. 8 for power 1). (S, G), (S, G) -> (S,)

    The width is W_k, the first k group sizes summed, for the last group k that survives; so the expectation
    telescopes into the growth of W_k ** power at each group times the chance that the group survives.
    """
    total = sizes.cumsum(dim=1).to(probabilities.dtype) ** power
    growth = torch.cat([total[:, :1], total[:, 1:] - total[:, :-1]], dim=1)
    return (growth * probabilities).sum(dim=1)


def sample_groups(alpha: Tensor, sizes: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Widths of n structures drawn from the chains, each space from its own. (S, G-1), (S, G) -> (n, S) int64

    By inverse CDF: of the groups of one space, one uniform number keeps those whose marginal it does not pass. Drawn
    where the generator lives (the CPU by default): the same structures on every device.
    """
    ends = 1 - marginals(alpha.detach())[:, 1:]  # ascending; groups behind a short chain are empty and add no width
    last = torch.searchsorted(ends, _uniform(len(sizes), n, ends, generator), right=True)
    return sizes.cumsum(dim=1).gather(1, last).T


def bounded(sizes: Tensor, lower: Tensor | None = None, upper: Tensor | None = None) -> Tensor:
    """Group sizes of chains whose widths are clamped to [lower, upper]. (S, G), (S,), (S,) -> (S, G)

    Groups that must stay go into the first one and those that must not become empty, so that moments, samples and
    costs of the clamped widths need nothing else.
    """
    ends = sizes.cumsum(dim=1)
    if lower is not None:
        ends = torch.maximum(ends, lower[:, None].to(ends))
    if upper is not None:
        ends = torch.minimum(ends, upper[:, None].to(ends))
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))


def merged(sizes: Tensor, inside: Tensor) -> Tensor:
    """Steps of the chain to groups that a lower bound has merged into the first one. (S, G), (S, G) -> (S, G-1) bool

    A chain that may still end at one of them ends at the floor: if they were left to chance, several steps together
    would make the floor likely, whatever it is worth. inside: what `bounded` has made of the sizes.
    """
    ends = sizes.cumsum(dim=1)
    return ((sizes > 0) & (ends <= inside[:, :1]))[:, 1:]


# independent gates instead of a chain, for the ablation in the paper's appendix


def independent_marginals(alpha: Tensor) -> Tensor:
    """Chance that each group is kept if no group asks another; the first always is. (S, G-1) -> (S, G)"""
    return torch.cat([alpha.new_ones(len(alpha), 1), torch.sigmoid(alpha)], dim=1)


def independent_moment(probabilities: Tensor, sizes: Tensor, power: int) -> Tensor:
    """Expected power of the number of kept channels. (S, G), (S, G) -> (S,)

    Group by group, from the moments without the group: (w + n) ** p by the binomial theorem if it is kept.
    """
    if power == 1:
        return (probabilities * sizes).sum(dim=1)
    moments = [torch.ones_like(probabilities[:, 0])] + [torch.zeros_like(probabilities[:, 0])] * power
    for chance, size in zip(probabilities.unbind(1), sizes.to(probabilities.dtype).unbind(1), strict=True):
        moments = [
            (1 - chance) * moments[p]
            + chance * torch.stack([math.comb(p, i) * size ** (p - i) * moments[i] for i in range(p + 1)]).sum(dim=0)
            for p in range(power + 1)
        ]
    return moments[power]


def sample_independent(alpha: Tensor, sizes: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Widths of n structures: how many channels are kept, each group by its own draw. (S, G-1), (S, G) -> (n, S)"""
    chances = independent_marginals(alpha.detach())
    kept = _uniform(sizes.numel(), n, chances, generator) < chances.reshape(-1, 1)
    return (kept.reshape(*sizes.shape, n) * sizes[..., None]).sum(dim=1).T


def _uniform(rows: int, n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = torch.device("cpu") if generator is None else generator.device
    return torch.rand(rows, n, generator=generator, device=device, dtype=like.dtype).to(like.device)


@dataclass(frozen=True)
class Process:
    """How the groups of a space come to be kept: what the alphas mean."""

    marginals: Callable[[Tensor], Tensor]  # (S, G-1) -> (S, G)
    moment: Callable[[Tensor, Tensor, int], Tensor]  # marginals, sizes, power -> (S,)
    sample: Callable[[Tensor, Tensor, int, torch.Generator | None], Tensor]  # alpha, sizes, n, generator -> (n, S)


CHAIN = Process(marginals, moment, sample_groups)
INDEPENDENT = Process(independent_marginals, independent_moment, sample_independent)


def process_of(independent: bool) -> Process:
    """What the alphas mean by the settings of a search."""
    return INDEPENDENT if independent else CHAIN
