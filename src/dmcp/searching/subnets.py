"""The chains of one search, and the sub-networks that are sampled from them for the sandwich rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmcp.fields import Bound
from dmcp.markov import bounded, marginals, rand, sample_groups
from dmcp.runtime.batches import device_of
from dmcp.searching.bounds import width_bounds
from dmcp.searching.importance import Scores, first_samples, has_samples, importance_in, norms
from dmcp.searching.supernet import Supernet
from dmcp.settings import Sampling
from dmcp.tracing.modules import narrow


@dataclass(frozen=True)
class Chains:
    """What the alphas of a supernet mean in one search: the groups inside the widths that they may reach."""

    sizes: Tensor  # groups inside the bounds: the first one and the sum are the smallest and largest widths. (S, G)
    index: Tensor  # of each channel: its group in a flattened (S, G + 1) table, whose last column is never kept

    def marginals(self, alpha: Tensor) -> Tensor:
        """Probability that each group is kept; zero where it is empty. (S, G-1) -> (S, G)"""
        return marginals(alpha) * (self.sizes > 0)

    def gates(self, groups: Tensor) -> Tensor:
        """A number per group, spread over its channels (eq. 7). (..., S, G) -> (..., channels)"""
        return F.pad(groups, (0, 1)).flatten(-2)[..., self.index]


def make_chains(
    net: Supernet,
    min_channels: Bound | None = None,
    max_channels: Bound | None = None,
    align: int | None = None,
) -> Chains:
    """The chains of a supernet with bounded widths, in multiples of `align`."""
    ranges = width_bounds(net.graph, min_channels or {}, max_channels or {}, align)
    lower, upper = torch.tensor(ranges, device=net.sizes.device).unbind(1)
    sizes = bounded(net.sizes, lower, upper)

    # A channel is in the group behind all groups that end before it.
    ends_before = sizes.cumsum(dim=1)[net.space_of] <= net.position[:, None]  # (channels, G)
    first_groups = net.space_of * (sizes.shape[1] + 1)  # in the flattened table
    return Chains(sizes, ends_before.sum(dim=1) + first_groups)


def sample_gates(
    net: Supernet, chains: Chains, sampling: Sampling, count: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Gates of random sub-networks; a generator on the device of the alphas keeps the host from waiting for it."""
    if sampling is Sampling.MIXED:
        likely = sample_gates(net, chains, Sampling.MARKOV, (count + 1) // 2, generator)
        return likely + sample_gates(net, chains, Sampling.UNIFORM, count // 2, generator)
    if sampling is Sampling.MARKOV:
        widths = sample_groups(net.alpha, chains.sizes, count, generator)
    else:
        widths = _sample_uniform(chains.sizes, count, generator, one_ratio=sampling is Sampling.SANDWICH)
    return [net.hard_unchecked(row) for row in widths]


def _sample_uniform(sizes: Tensor, count: int, generator: torch.Generator | None, one_ratio: bool) -> Tensor:
    """Widths for which every number of groups is equally likely; one_ratio: the same share of groups in all spaces.

    (S, G) -> (count, S)
    """
    ranks = (sizes > 0).cumsum(dim=1)  # the number of different widths up to each group
    chances = rand((1 if one_ratio else len(sizes), count), sizes.device, generator)
    rank = (chances * ranks[:, -1:]).long() + 1  # (S, count)
    rank = rank.clamp(max=ranks[:, -1:])  # the product may have been rounded up
    group = torch.searchsorted(ranks, rank)
    return sizes.cumsum(dim=1).gather(1, group).T


def sort_by_importance(net: Supernet, batches: Iterable[Any] | None) -> None:
    """Order the channels of every space by their importance on these batches, in place; without any, by their norms."""
    samples = first_samples(batches, device_of(net))
    scores = None
    if has_samples(samples):
        scores = importance_in(net, samples)
    sort_channels(net, scores)


@torch.no_grad()
def sort_channels(net: Supernet, scores: Scores | None = None) -> None:
    """Order the channels of every space by their scores, in place; without scores, by the L2 norm of their filters.

    Sub-networks keep the first channels; the full network computes the same as before.
    """
    if scores is None:
        scores = norms(net.model, net.graph)
    order = {name: score.argsort(descending=True, stable=True).tolist() for name, score in scores.items()}
    ordered = narrow(net.model, net.graph.cuts(order), {})
    tensors = [*net.model.parameters(), *net.model.buffers()]
    ordered_tensors = [*ordered.parameters(), *ordered.buffers()]
    for tensor, ordered_tensor in zip(tensors, ordered_tensors, strict=True):
        tensor.copy_(ordered_tensor)
