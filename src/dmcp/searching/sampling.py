"""Widths from alphas (section 3.3): expected and direct sampling; uniform and random widths; fitting into a budget."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dmcp.arguments import Seed, Share, checked
from dmcp.budgets import Budget
from dmcp.errors import BudgetError
from dmcp.runtime.batches import as_generator
from dmcp.searching.bounds import width_bounds
from dmcp.searching.budget import check_reachable, parse_budget, spent_shares
from dmcp.searching.records import SearchResult
from dmcp.settings import Bound, SearchConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths

TOLERANCE = 0.95  # share of the budget that a method must use, where the widths allow it
FILLED = 0.98  # share that the final widths of a search, a method or a baseline use: the same for all
_AT_ONCE = 1 << 16  # widths sampled in one expression
_WORTH = 10.0  # of one per cent of the budget unused: as bad as a width that is so many per cent off
_TRIES = 1 << 13  # widths among which the random baseline is looked for


def expected_widths(result: SearchResult) -> Tensor:
    """Expected width of each space (eq. 8), not rounded. -> (S,) float64"""
    chances = result.process.marginals(result.alphas.detach().double())
    return result.process.moment(chances, result.sizes, 1).cpu()


@checked
def expected(result: SearchResult, align: int | None = None) -> Widths:
    """Expected sampling: the expected widths, rounded to multiples of `align`, then fitted into the budget.

    `align` is the search's own by default. FILLED of the budget is used, in small networks a little less: see `fit`.
    """
    low, high = result.sizes[:, 0], result.sizes.sum(dim=1)
    options = Options(result.graph, low, high, result.align if align is None else align)
    return fit(result.graph, result.budget, expected_widths(result), options, filled(result))


def filled(settings: SearchResult | SearchConfig) -> float:
    """Share of the budget that final widths use; more only if the search was to use more."""
    return max(settings.tolerance, FILLED)


@checked
def direct(
    result: SearchResult, n: int = 1, generator: torch.Generator | Seed | None = None, tries: int = 1_000_000
) -> list[Widths]:
    """Direct sampling: up to n different widths sampled from the chains, all inside the budget.

    Those that use FILLED of the budget come first. There is at least one, or BudgetError; there are fewer than n if all
    tries together gave no more, as chains do that have become certain.
    """
    if min(n, tries) < 1:
        raise BudgetError(f"n and tries must be at least 1, not {n} and {tries}.")
    generator = as_generator(generator)
    near, below = dict[tuple[int, ...], float](), dict[tuple[int, ...], float]()  # in the order sampled
    seen: list[Tensor] = []
    for start in range(0, tries, _AT_ONCE):
        widths = result.process.sample(result.alphas, result.sizes, min(_AT_ONCE, tries - start), generator).cpu()
        shares = spent_shares(result.budget, result.graph, widths).amax(dim=1)  # (N,)
        reached = shares >= filled(result)
        for found, which in ((near, reached & (shares <= 1)), (below, ~reached)):
            rows = zip(widths[which].tolist(), shares[which].tolist(), strict=True) if len(found) < n else ()
            for row, share in rows:
                found[tuple(row)] = share
                if len(found) == n:
                    break
        if len(near) == n:
            break
        seen.append(shares)
    chosen = [*near, *sorted(below, key=lambda row: -below[row])][:n]
    if not chosen:
        least, most = (f"{end:.1%}" for end in torch.cat(seen).aminmax())
        raise BudgetError(
            f"None of {tries:,} samples is inside the budget {result.budget.text!r}: they cost from {least} to {most} "
            "of it. Take the expected widths, which are fitted into the budget, or search longer."
        )
    return [result.graph.widths(found) for found in chosen]


# baselines at the same budget


@checked
def uniform(
    graph: ChannelGraph,
    budget: int | float | str | Budget,
    min_channels: Bound | None = None,
    align: int | None = None,
    tolerance: Share = FILLED,
    max_channels: Bound | None = None,
) -> Widths:
    """One ratio for all spaces, as large as the budget allows, rounded; the rest of the budget goes to single spaces.

    Each of them gets one channel (or step of `align`) more at most, those that rounding left furthest below first. Only
    where that does not use the budget to the tolerance, as in networks of few channels, some get more. The bounds are
    widths, one number for all, or numbers by name.
    """
    wish = graph.full.tensor().double()
    options = between(graph, min_channels, max_channels, align)
    return fit(graph, parse_budget(budget, graph), wish, options, tolerance, even=True)


@checked
def random_widths(
    graph: ChannelGraph,
    budget: int | float | str | Budget,
    generator: torch.Generator | Seed | None = None,
    min_channels: Bound | None = None,
    align: int | None = None,
    tolerance: Share = FILLED,
    max_channels: Bound | None = None,
) -> Widths:
    """Widths sampled uniformly until they use the budget to the tolerance; after many tries, the last are scaled."""
    options, budget = between(graph, min_channels, max_channels, align), parse_budget(budget, graph)
    chances = torch.rand(_TRIES, len(graph.spaces), generator=as_generator(generator), dtype=torch.float64)
    sampled = options.widths((chances * (options.last + 1)).long())  # (N, S)
    shares = spent_shares(budget, graph, sampled).amax(dim=1)
    inside = sampled[(shares >= tolerance) & (shares <= 1)]
    return graph.widths(inside[0]) if len(inside) else fit(graph, budget, sampled[-1].double(), options, tolerance)


# into the budget


class Options:
    """The widths that each space may have: multiples of `align` real channels between two bounds, and its full size.

    Some widths are one place per space in its list. Where no multiple is between the bounds, the upper one is.
    """

    def __init__(self, graph: ChannelGraph, lower: Tensor, upper: Tensor, align: int | None) -> None:
        rows: list[list[int]] = []
        for space, low, high in zip(graph.spaces, lower.tolist(), upper.tolist(), strict=True):
            step = space.step(align)
            row = list(range(-(-low // step) * step, high + 1, step))
            rows.append(row if row and (row[-1] == high or high < space.size) else [*row, high])
        self.last = torch.tensor([len(row) - 1 for row in rows])  # (S,)
        longest = max(len(row) for row in rows)
        self.table = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])  # (S, O)

    def widths(self, places: Tensor) -> Tensor:
        """(..., S) -> (..., S) int64"""
        return self.table[torch.arange(len(self.table)), places]

    def nearest(self, wish: Tensor) -> Tensor:
        """Places of the options nearest to some widths. (S,) -> (S,)"""
        middles = (self.table[:, 1:] + self.table[:, :-1]) / 2
        return torch.searchsorted(middles, wish[:, None].to(middles)).squeeze(1).minimum(self.last)


def between(graph: ChannelGraph, min_channels: Bound | None, max_channels: Bound | None, align: int | None) -> Options:
    """The options between two bounds; all widths where there are none."""
    ends = width_bounds(
        graph, {} if min_channels is None else min_channels, {} if max_channels is None else max_channels
    )
    lower, upper = torch.tensor(ends).unbind(1)
    return Options(graph, lower, upper, align)


def fit(
    graph: ChannelGraph, budget: Budget, wish: Tensor, options: Options, tolerance: float, even: bool = False
) -> Widths:
    """The options nearest to the wished widths that are inside every limit and use the binding one to the tolerance.

    If the rounded wish is not, all of it is scaled by one number. Then single spaces grow, those furthest below their
    wish first: back to the wish as far as the limits allow, beyond it up to the tolerance only. With `even` they grow
    by one option, more of them up to the tolerance only, since cheap spaces would otherwise grow back to the full wish.
    What is not used then, in networks of few widths, is used as far as that keeps near to the scaled wish.
    """

    def share(places: Tensor) -> float:
        return spent_shares(budget, graph, options.widths(places).reshape(-1, len(wish))).max().item()

    wished = options.nearest(wish)
    lowest = torch.zeros_like(wished)
    if share(lowest) > 1:
        check_reachable(budget, graph, graph.widths(options.widths(lowest)))
    places, spent, aim = wished, share(wished), wish
    if not tolerance <= spent <= 1:
        aim = _scale(options, wish, share, bar=1.0 if spent > 1 else tolerance)
        places = options.nearest(aim)
        goal = (places + 1).minimum(options.last) if even else wished.maximum(places)
        places = _grow(options, wish, share, places, goal, enough=float("inf"))
        places = _grow(options, wish, share, places, goal=options.last, enough=tolerance)
    if share(places) < tolerance:
        places = _exchange(graph, budget, options, aim, places, tolerance)
    return graph.widths(options.widths(places))


def _scale(options: Options, wish: Tensor, share: Callable[[Tensor], float], bar: float) -> Tensor:
    """The wish times the largest number for which the binding limit is used to the bar at most."""
    low, high = 0.0, 1.0
    while share(options.nearest(wish * high)) <= bar and bool((options.nearest(wish * high) < options.last).any()):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share(options.nearest(wish * middle)) <= bar else (low, middle)
    return wish * low


def _grow(
    options: Options, wish: Tensor, share: Callable[[Tensor], float], places: Tensor, goal: Tensor, enough: float
) -> Tensor:
    """Raise spaces to their goals inside the limits, step by step, the one furthest below its wish first."""
    places = places.clone()
    growing = places < goal
    while growing.any() and share(places) < enough:
        gap = (wish - options.widths(places)) / wish
        space = int(gap.masked_fill(~growing, -float("inf")).argmax())
        places[space] += 1
        if share(places) > 1:
            places[space] -= 1
            growing[space] = False  # for good: what the others cost only grows
        elif places[space] == goal[space]:
            growing[space] = False
    return places


def _exchange(
    graph: ChannelGraph, budget: Budget, options: Options, aim: Tensor, places: Tensor, tolerance: float
) -> Tensor:
    """One space up for another one down while that is nearer to the tolerance or the aim; of few options all are tried.

    They use TOLERANCE of the budget if any do; to use more of it they do not go far from the aim.
    """
    counts = (options.last + 1).tolist()
    few = math.prod(counts) <= _AT_ONCE
    step = torch.eye(len(counts), dtype=torch.int64)
    moves = (step[:, None] - step).flatten(end_dim=1)  # (S * S, S), also no move at all
    best, must = float("inf"), min(TOLERANCE, tolerance) if tolerance <= FILLED else tolerance
    while True:
        trials = torch.cartesian_prod(*map(torch.arange, counts)).reshape(-1, len(counts)) if few else places + moves
        trials = trials[((trials >= 0) & (trials <= options.last)).all(dim=1)]
        shares = spent_shares(budget, graph, options.widths(trials)).amax(dim=1)
        gaps = ((options.widths(trials) - aim) / aim).abs().amax(dim=1)
        costs = gaps + _WORTH * (tolerance - shares).clamp(min=0) + 1000 * (must - shares).clamp(min=0)
        costs[shares > 1] = float("inf")
        if costs.min().item() >= best:
            return places
        best, places = costs.min().item(), trials[costs.argmin()]
