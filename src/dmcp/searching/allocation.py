"""Widths by the scores of channels: spaces keep more channels if the outputs depend more on them."""

from __future__ import annotations

import torch
from torch import Tensor

from dmcp.budgets import Budget
from dmcp.searching.bounds import AllowedWidths
from dmcp.searching.budget import spent_shares
from dmcp.searching.importance import Scores
from dmcp.searching.rounding import round_to_budget
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths

_STEP = 4  # the price of a channel is that of a change by this fraction of its space, since some costs have steps


def widths_by_scores(
    graph: ChannelGraph, budget: Budget, scores: Scores, even: Widths, allowed: AllowedWidths, tolerance: float
) -> Widths:
    """Widths half-way between uniform ones and those that keep most of the scores at the same cost.

    Scores say what is lost if one channel goes alone. Where nearly all channels of a space go, they say too little, so
    widths stay between both: the geometric mean, rounded to the budget.

    even: the uniform widths.
    """
    prices = _prices(graph, budget, even)
    values = [scores[space.name].double().cpu() / price for space, price in zip(graph.spaces, prices, strict=True)]
    needed = _most_valuable(graph, budget, values)
    wish = (even.tensor() * needed).double().sqrt()
    return round_to_budget(graph, budget, wish, allowed, tolerance)


def _prices(graph: ChannelGraph, budget: Budget, even: Widths) -> list[float]:
    """What one more channel of each space costs, as a share of the binding limit, near uniform widths."""
    prices: list[float] = []
    for number, space in enumerate(graph.spaces):
        step = max(1, space.size // _STEP)
        width = even[space.name]
        fewer = max(1, width - step)
        more = min(space.size, width + step)
        pair = even.tensor().repeat(2, 1)
        pair[:, number] = torch.tensor([fewer, more])
        less_cost, more_cost = spent_shares(budget, graph, pair).amax(dim=1).tolist()
        prices.append((more_cost - less_cost) / max(more - fewer, 1))
    smallest = max(1e-9 * max(prices), 1e-30)  # a channel that costs nothing is kept
    return [max(price, smallest) for price in prices]


def _most_valuable(graph: ChannelGraph, budget: Budget, values: list[Tensor]) -> Tensor:
    """How many channels of each space are above the lowest threshold that the budget allows, at least one. -> (S,)"""

    def above(threshold: float) -> Tensor:
        return torch.tensor([max(1, int((of_space >= threshold).sum())) for of_space in values])

    thresholds = sorted(set(torch.cat(values).tolist()))
    too_low, high = -1, len(thresholds) - 1
    while high - too_low > 1:
        middle = (too_low + high) // 2
        if spent_shares(budget, graph, above(thresholds[middle])[None]).max() <= 1:
            high = middle
        else:
            too_low = middle
    return above(thresholds[high])
