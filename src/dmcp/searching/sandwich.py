"""Which sub-networks one weight step trains: the largest, the smallest, and some at random (the sandwich rule)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from dmcp.filters import magnitude
from dmcp.markov import CHAIN, INDEPENDENT, Process, bounded
from dmcp.searching.bounds import Bound, bounds
from dmcp.slicing import narrow
from dmcp.supernet import Supernet


class Draw(StrEnum):
    """How the random sub-networks of a weight step are drawn."""

    MARKOV = "markov"  # from the alphas: the paper's variant of the sandwich rule
    UNIFORM = "uniform"  # every group border of a space alike, each space by itself
    SANDWICH = "sandwich"  # one ratio for all spaces: the original sandwich rule


@dataclass(frozen=True)
class Chains:
    """What the alphas of a supernet mean in one search: their process, and the widths that they may reach."""

    process: Process
    sizes: (
        Tensor  # group sizes inside the bounds: the first group and the sum are the smallest and largest widths. (S, G)
    )
    place: Tensor  # of each channel: its group in a flattened (S, G + 1) table, whose last column is never kept

    def marginals(self, alpha: Tensor) -> Tensor:
        """Chance that each group is kept; zero where it is empty. (S, G-1) -> (S, G)"""
        return self.process.marginals(alpha) * (self.sizes > 0)

    def gates(self, groups: Tensor) -> Tensor:
        """What is known of each group, spread over its channels. (..., S, G) -> (..., channels)"""
        return F.pad(groups, (0, 1)).flatten(-2)[..., self.place]


def chains(
    net: Supernet,
    process: Process = CHAIN,
    smallest: Bound | None = None,
    largest: Bound | None = None,
    align: int = 1,
) -> Chains:
    """The chains of a supernet with bounded widths, in whole multiples of `align`."""
    ends = bounds(net.graph, smallest or {}, largest or {}, align)
    low_high = torch.tensor(ends, device=net.sizes.device)
    sizes = bounded(net.sizes, low_high[:, 0], low_high[:, 1])
    behind = sizes.cumsum(dim=1)[net.space_of] <= net.position[:, None]  # (channels, G)
    return Chains(process, sizes, behind.sum(dim=1) + net.space_of * (sizes.shape[1] + 1))


def sandwich(
    net: Supernet, chains: Chains, draw: Draw, count: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Gates of the sub-networks of one weight step: the largest, the smallest, then random ones. Each (channels,)"""
    ends = [net.hard(chains.sizes.sum(dim=1)), net.hard(chains.sizes[:, 0])]
    return ends + draw_gates(net, chains, draw, count, generator)


def draw_gates(
    net: Supernet, chains: Chains, draw: Draw, count: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Gates of random sub-networks; a generator on the device of the alphas keeps the host from waiting for it."""
    sizes = chains.sizes
    if draw is Draw.MARKOV and chains.process is INDEPENDENT:  # any groups, not the first ones: no widths
        chances = chains.marginals(net.alpha.detach())
        return list(chains.gates(_uniform((count, *sizes.shape), sizes, generator) < chances))
    if draw is Draw.MARKOV:
        widths = chains.process.sample(net.alpha, sizes, count, generator)
    else:
        rank = (sizes > 0).cumsum(dim=1)  # the number of different widths up to each group
        shape = (len(sizes) if draw is Draw.UNIFORM else 1, count)
        chosen = (_uniform(shape, sizes, generator) * rank[:, -1:]).long() + 1  # (S, count)
        group = torch.searchsorted(rank, chosen.clamp(max=rank[:, -1:]))  # a product may have been rounded up
        widths = sizes.cumsum(dim=1).gather(1, group).T
    return [net.hard(row) for row in widths]


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = torch.device("cpu") if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=device).to(like.device)


@torch.no_grad()
def sort_channels(net: Supernet) -> None:
    """Order the channels of every space by importance, in place: sub-networks keep the first ones.

    The network computes the same as before. Importance is the L2 norm of the weights that write a channel.
    """
    order: dict[str, list[int]] = {}
    for space in net.graph.spaces:
        importance = magnitude(net.model, net.graph, space, power=2)
        if importance is not None:
            order[space.name] = importance.argsort(descending=True, stable=True).tolist()
    ordered = narrow(net.model, net.graph.cuts(order), {})
    for old, new in zip(net.model.parameters(), ordered.parameters(), strict=True):
        old.copy_(new)
    for old_buffer, new_buffer in zip(net.model.buffers(), ordered.buffers(), strict=True):
        old_buffer.copy_(new_buffer)
