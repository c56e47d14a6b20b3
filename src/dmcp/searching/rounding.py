"""Rounding any wished widths to allowed ones inside a budget."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dmcp.budgets import Budget
from dmcp.searching.bounds import AllowedWidths
from dmcp.searching.budget import cheapest_widths, check_reachable, largest_allowed, spent_shares
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths

TOLERANCE = 0.95  # share of the budget that a method must use, where the widths allow it
FILLED = 0.98  # share that the final widths of a search, a method or a baseline use: the same for all
_FEW = 1 << 16  # different widths of a network, all of which are tried


def round_to_budget(
    graph: ChannelGraph, budget: Budget, wish: Tensor, allowed: AllowedWidths, tolerance: float, even: bool = False
) -> Widths:
    """The allowed widths nearest to the wish that are inside every limit and use the binding one to the tolerance.

    The wish is scaled by one number until its nearest widths fit, the spaces furthest below their wish grow into what
    is left, and, where that does not reach the tolerance, spaces trade steps.

    Spaces grow back to the wish as far as the limits allow, and beyond it up to the tolerance only. With `even` they
    grow back by one step, since cheap spaces would otherwise return to the full wish.
    """

    def spent(indices: Tensor) -> float:
        """Share of the binding limit."""
        return spent_shares(budget, graph, allowed.widths(indices)[None]).max().item()

    cheapest = cheapest_widths(budget, graph, allowed)
    if spent(cheapest) > 1:
        check_reachable(budget, graph, graph.widths(allowed.widths(cheapest)))
    wished = allowed.nearest(wish)
    spent_by_wish = spent(wished)
    if tolerance <= spent_by_wish <= 1:
        return graph.widths(allowed.widths(wished))

    # Too large a wish is scaled down to the limit, too small a one up to the tolerance.
    if spent_by_wish > 1:
        most = 1.0
    else:
        most = tolerance
    scaled_wish = _scale(allowed, wish, spent, most)
    indices = allowed.nearest(scaled_wish)
    if spent(indices) > 1:  # no factor fits, since the smallest widths are not the cheapest ones
        scaled_wish = wish
        indices = cheapest

    goal = wished.maximum(indices)
    if even:
        goal = (indices + 1).minimum(allowed.last)
    indices = _grow(allowed, wish, spent, indices, goal, enough=float("inf"))
    indices = _grow(allowed, wish, spent, indices, goal=allowed.last, enough=tolerance)
    if spent(indices) < tolerance:
        indices = _trade(graph, budget, allowed, scaled_wish, indices, tolerance)
    return graph.widths(allowed.widths(indices))


def _scale(allowed: AllowedWidths, wish: Tensor, spent: Callable[[Tensor], float], most: float) -> Tensor:
    """The wish times the largest number for which its nearest widths spend no more than `most`."""

    def fits(factor: float) -> bool:
        return spent(allowed.nearest(wish * factor)) <= most

    low = 0.0
    high = 1.0
    while fits(high) and bool((allowed.nearest(wish * high) < allowed.last).any()):
        low = high
        high = 2 * high
    return wish * largest_allowed(fits, low, high)


def _grow(
    allowed: AllowedWidths,
    wish: Tensor,
    spent: Callable[[Tensor], float],
    indices: Tensor,
    goal: Tensor,
    enough: float,
) -> Tensor:
    """Widen spaces to their goals inside the limits, step by step, the one furthest below its wish first."""
    indices = indices.clone()
    growing = indices < goal
    while growing.any() and spent(indices) < enough:
        gaps = (wish - allowed.widths(indices)) / wish
        space = int(gaps.masked_fill(~growing, -float("inf")).argmax())
        indices[space] += 1
        if spent(indices) > 1:
            indices[space] -= 1
            growing[space] = False  # for good: what the others cost only grows
        elif indices[space] == goal[space]:
            growing[space] = False
    return indices


def _trade(
    graph: ChannelGraph,
    budget: Budget,
    allowed: AllowedWidths,
    wish: Tensor,
    indices: Tensor,
    tolerance: float,
) -> Tensor:
    """Widen one space and narrow another while that is better; where there are few widths, take the best of all.

    First comes how near widths are to the share that must be used. Then it is the largest relative distance from the
    wish plus ten times what is missing to the tolerance: one percent of the budget is worth a width that is 10% off.
    """
    must_use = min(TOLERANCE, tolerance)
    if tolerance > FILLED:  # the user asked for more than is usual
        must_use = tolerance
    counts = (allowed.last + 1).tolist()
    few = math.prod(counts) <= _FEW
    steps = torch.eye(len(counts), dtype=torch.int64)
    moves = (steps[:, None] - steps).flatten(end_dim=1)  # (S * S, S), also no move at all
    best = (float("inf"), float("inf"))
    while True:
        if few:
            trials = torch.cartesian_prod(*map(torch.arange, counts)).reshape(-1, len(counts))
        else:
            trials = indices + moves
            trials = trials[((trials >= 0) & (trials <= allowed.last)).all(dim=1)]
        widths = allowed.widths(trials)
        shares = spent_shares(budget, graph, widths).amax(dim=1)
        missing = (must_use - shares).clamp(min=0).masked_fill(shares > 1, float("inf"))
        distances = ((widths - wish) / wish).abs().amax(dim=1) + 10 * (tolerance - shares).clamp(min=0)
        distances[missing > missing.min()] = float("inf")
        new = (missing.min().item(), distances.min().item())
        if new >= best:
            return indices
        best = new
        indices = trials[distances.argmin()]
