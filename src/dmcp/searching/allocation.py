"""Widths by the scores of channels: spaces keep more channels if the outputs depend more on them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.budgets import Budget
from dmcp.runtime.batches import device_of, size_of
from dmcp.searching.bounds import AllowedWidths
from dmcp.searching.budget import spent_shares
from dmcp.searching.importance import Scores
from dmcp.searching.rounding import round_to_budget
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import call_model, kept_modes, tensors_in, without_autocast
from dmcp.tracing.widths import Widths
from dmcp.training.calibration import recalibrate
from dmcp.training.reconstruction import sample_chunks

_QUARTER = 4  # a price is measured over a change by a quarter of the space at least, since some costs rise in steps


def widths_by_scores(
    graph: ChannelGraph, budget: Budget, scores: Scores, uniform: Widths, allowed: AllowedWidths, tolerance: float
) -> Widths:
    """Widths half-way between uniform ones and those that keep most of the scores at the same cost.

    Scores say what is lost if one channel goes alone. Where nearly all channels of a space go, they say too little, so
    the result is the geometric mean of the two, rounded to the budget.
    """
    prices = _prices(graph, budget, uniform)
    values = [scores[space.name].double().cpu() / price for space, price in zip(graph.spaces, prices, strict=True)]
    needed = _most_valuable(graph, budget, values, allowed)
    wish = (uniform.tensor() * needed).double().sqrt()
    return round_to_budget(graph, budget, wish, allowed, tolerance)


def _prices(graph: ChannelGraph, budget: Budget, uniform: Widths) -> list[float]:
    """What one more channel of each space costs near uniform widths, as a share of the limit that it fills most."""
    prices: list[float] = []
    for number, space in enumerate(graph.spaces):
        width = uniform[space.name]
        step = max(1, space.size // _QUARTER)
        price = 0.0
        while price <= 0 and step < 2 * space.size:  # further, where the cost is flat
            fewer = max(1, width - step)
            more = min(space.size, width + step)
            pair = uniform.tensor().repeat(2, 1)
            pair[:, number] = torch.tensor([fewer, more])
            less_cost, more_cost = spent_shares(budget, graph, pair)
            price = (more_cost - less_cost).max().item() / max(more - fewer, 1)
            step *= 2
        prices.append(price)
    if max(prices) <= 0:
        return [1.0] * len(prices)
    return [max(price, 1e-9 * max(prices)) for price in prices]  # a channel that costs nothing is kept


def _most_valuable(graph: ChannelGraph, budget: Budget, values: list[Tensor], allowed: AllowedWidths) -> Tensor:
    """How many channels of each space are above the lowest threshold that the budget allows. -> (S,)"""
    smallest = allowed.widths(torch.zeros_like(allowed.last))
    largest = allowed.widths(allowed.last)

    def above(threshold: float) -> Tensor:
        counts = torch.tensor([int((of_space >= threshold).sum()) for of_space in values])
        return counts.maximum(smallest).minimum(largest)

    thresholds = sorted(set(torch.cat(values).tolist()))
    too_low, high = -1, len(thresholds) - 1
    while high - too_low > 1:
        middle = (too_low + high) // 2
        if spent_shares(budget, graph, above(thresholds[middle])[None]).max() <= 1:
            high = middle
        else:
            too_low = middle
    return above(thresholds[high])


# how near a cut network is to the model


@without_autocast
@torch.no_grad()
def output_error(small: nn.Module, model: nn.Module, graph: ChannelGraph, batches: Iterable[Any]) -> float:
    """How far the outputs of a cut network are from those of the model: a share of their squares, on a few samples.

    Of several outputs it is the sum. It is infinite where outputs are not finite, or have other shapes, as those of
    detectors that give only the objects that they find. The BatchNorms of the cut network are calibrated.
    """
    chunks = sample_chunks(batches, graph, device_of(model))
    several = [(chunk,) for chunk in chunks if size_of((chunk,)) > 1]  # one sample alone has no statistics
    if several:
        recalibrate(small, several)
    missing: dict[int, float] = defaultdict(float)  # by the number of the output
    total: dict[int, float] = defaultdict(float)
    with kept_modes(model), kept_modes(small):
        model.eval()
        small.eval()
        for chunk in chunks:
            outputs_before = _numbers_in(call_model(model, chunk))
            outputs_after = _numbers_in(call_model(small, chunk))
            if [output.shape for output in outputs_before] != [output.shape for output in outputs_after]:
                return math.inf
            for number, (before, after) in enumerate(zip(outputs_before, outputs_after, strict=True)):
                missing[number] += (after - before).square().sum().item()
                total[number] += before.square().sum().item()
    error = sum(missing[number] / max(total[number], 1e-30) for number in total)
    return error if math.isfinite(error) else math.inf


def _numbers_in(outputs: Any) -> list[Tensor]:
    """The outputs that are numbers and not indices, in double precision on the CPU."""
    return [output.cpu().double() for output in tensors_in(outputs) if output.is_floating_point()]
