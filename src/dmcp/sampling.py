"""Widths from alphas: expected, sampled, uniform, random, fitted into a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dmcp.budget import Budget, check_reachable, parse, show_cost, spent_shares
from dmcp.errors import BudgetError, WidthsError
from dmcp.modules import check_generator, check_kind
from dmcp.searching.config import SearchResult, bounds, check_bound
from dmcp.settings import Bound, SearchConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.widths import Widths

TOLERANCE = 0.95  # of the budget is the least that a method may use, where the widths allow it
FILLED = 0.98  # of it is used by what a search, a method or a control chooses: the same for all
_AT_ONCE = 1 << 16  # structures drawn in one expression
_CONTROLS = 1 << 13  # structures among which the random control is looked for


def expected_widths(result: SearchResult) -> Tensor:
    """Expected width of each space (eq. 8), not rounded. -> (S,) float64"""
    chances = result.process.marginals(result.alphas.detach().double())
    return result.process.moment(chances, result.sizes, 1).cpu()


def expected(result: SearchResult, align: int | None = None) -> Widths:
    """Expected sampling: the expected widths, rounded to multiples of `align`, then repaired into the budget.

    The repair stays as near to the expectation as it can: see `fit`. `align` is the search's own by default. A search
    may end anywhere above its tolerance; the widths use FILLED of the budget, so that none is left over.
    """
    check_kind("result", result, SearchResult, BudgetError)
    least, most = result.sizes[:, 0], result.sizes.sum(dim=1)
    options = Options(result.graph, least, most, result.align if align is None else align)
    return fit(result.graph, result.budget, expected_widths(result), options, filled(result))


def filled(asked: SearchResult | SearchConfig) -> float:
    """Share of the budget that final widths use; more only if the search was to use more."""
    return max(asked.tolerance, FILLED)


def direct(
    result: SearchResult, n: int = 1, generator: torch.Generator | None = None, tries: int = 1_000_000
) -> list[Widths]:
    """Direct sampling: up to n different structures drawn from the chains, all inside the budget.

    Those whose binding limit is used to FILLED come first; the others only fill up after the last try. There is
    at least one: BudgetError with the distribution of the costs if no try is inside. Fewer than n mean that all tries
    together hold no more, as chains do that have become sure: where the number matters, look at the length.
    """
    check_kind("result", result, SearchResult, BudgetError)
    check_generator(generator, BudgetError)
    if type(n) is not int or n < 1 or type(tries) is not int or tries < 1:
        raise BudgetError(f"Direct sampling needs at least one structure and one try, not {n!r} and {tries!r}.")
    near: dict[tuple[int, ...], float] = {}  # in the order drawn
    below: dict[tuple[int, ...], float] = {}
    seen: list[Tensor] = []
    for widths, shares in _draws(result, tries, generator):
        binding = shares.amax(dim=1)
        reached = binding >= filled(result)
        for found, which in ((near, reached & (binding <= 1)), (below, ~reached)):
            if len(found) < n:
                _add(found, widths[which], binding[which], n)
        if len(near) == n:
            break
        seen.append(shares)
    chosen = [*near, *sorted(below, key=lambda row: -below[row])][:n]
    if not chosen:
        raise BudgetError(_nothing_inside(result.budget, torch.cat(seen)))
    return [result.graph.widths(found) for found in chosen]


def _add(found: dict[tuple[int, ...], float], widths: Tensor, shares: Tensor, n: int) -> None:
    """Put in structures and their shares until there are n different ones. (N, S), (N,)"""
    for row, share in zip(widths.tolist(), shares.tolist(), strict=True):
        found[tuple(row)] = share
        if len(found) == n:
            return


def _draws(result: SearchResult, tries: int, generator: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Structures and their cost / target, many at once. -> (N, S), (N, L)"""
    for start in range(0, tries, _AT_ONCE):
        widths = result.process.sample(result.alphas, result.sizes, min(_AT_ONCE, tries - start), generator).cpu()
        yield widths, spent_shares(result.budget, result.graph, widths)


def _nothing_inside(budget: Budget, shares: Tensor) -> str:
    parts = []
    for limit, column in zip(budget.limits, shares.unbind(1), strict=True):
        found = (q.item() * limit.target for q in (column.min(), column.median(), column.max(), torch.ones(())))
        low, middle, high, most = (show_cost(limit.kind, it).removesuffix(f" {limit.kind}") for it in found)
        parts.append(f"{limit.kind} from {low} to {high}, median {middle}, allowed {most}")
    return (
        f"None of {len(shares):,} sampled structures is inside the budget {budget.text!r}: {'; '.join(parts)}. "
        "Take the expected structure, which is repaired into the budget, or search longer."
    )


# controls at the same budget


def uniform(
    graph: ChannelGraph,
    budget: int | float | str | Budget,
    floor: Bound | None = None,
    align: int = 1,
    tolerance: float = FILLED,
    ceiling: Bound | None = None,
) -> Widths:
    """One ratio for all spaces, as large as the budget allows, rounded; the rest of the budget goes to single spaces.

    Each of them gets one channel (or step of `align`) more at most, those that rounding left furthest below first. Only
    where that does not use the budget to the tolerance, as in networks of few channels, some get more. No space is
    narrower than in `floor` or wider than in `ceiling`: widths, one number for all, or numbers by name.
    """
    check_kind("graph", graph, ChannelGraph, BudgetError)
    _check_tolerance(tolerance)
    wish = graph.full.tensor().double()
    return fit(graph, parse(budget, graph), wish, between(graph, floor, ceiling, align), tolerance, even=True)


def random_widths(
    graph: ChannelGraph,
    budget: int | float | str | Budget,
    generator: torch.Generator | None = None,
    floor: Bound | None = None,
    align: int = 1,
    tolerance: float = FILLED,
    ceiling: Bound | None = None,
) -> Widths:
    """Widths drawn uniformly until they use the budget to the tolerance; after many tries, the last are scaled."""
    check_kind("graph", graph, ChannelGraph, BudgetError)
    check_generator(generator, BudgetError)
    _check_tolerance(tolerance)
    options, budget = between(graph, floor, ceiling, align), parse(budget, graph)
    chances = torch.rand(_CONTROLS, len(graph.spaces), generator=generator, dtype=torch.float64)
    drawn = options.widths((chances * (options.last + 1)).long())  # (N, S)
    shares = spent_shares(budget, graph, drawn).amax(dim=1)
    inside = drawn[(shares >= tolerance) & (shares <= 1)]
    return graph.widths(inside[0]) if len(inside) else fit(graph, budget, drawn[-1].double(), options, tolerance)


def _check_tolerance(tolerance: float) -> None:
    if not isinstance(tolerance, int | float):
        raise BudgetError(f"tolerance must be a number, the least share of the budget to use, not {tolerance!r}.")


# into the budget


class Options:
    """The widths that a structure may have: multiples of `align` between two bounds, and a space's full size.

    Multiples of real channels: one group of a grouped layer may be as many.

    A structure is a place in each space's list of options. Bounds that no multiple fits between keep the upper one.
    """

    def __init__(self, graph: ChannelGraph, lower: Tensor, upper: Tensor, align: int) -> None:
        if type(align) is not int or align < 1:
            raise BudgetError(f"align must be an int of at least 1, not {align!r}.")
        rows: list[list[int]] = []
        for space, low, high in zip(graph.spaces, lower.tolist(), upper.tolist(), strict=True):
            step = space.step(align)
            row = list(range(-(-low // step) * step, high + 1, step))
            rows.append(row if row and (row[-1] == high or high < space.size) else [*row, high])
        self.last = torch.tensor([len(row) - 1 for row in rows])  # (S,)
        most = max(len(row) for row in rows)
        self.table = torch.tensor([row + row[-1:] * (most - len(row)) for row in rows])  # (S, O)

    def widths(self, places: Tensor) -> Tensor:
        """(..., S) -> (..., S) int64"""
        return self.table[torch.arange(len(self.table)), places]

    def nearest(self, wish: Tensor) -> Tensor:
        """Places of the options nearest to some widths. (S,) -> (S,)"""
        middles = (self.table[:, 1:] + self.table[:, :-1]) / 2
        return torch.searchsorted(middles, wish[:, None].to(middles)).squeeze(1).minimum(self.last)


def between(graph: ChannelGraph, floor: Bound | None, ceiling: Bound | None, align: int) -> Options:
    """The options from a floor up to a ceiling; all widths where there is none."""
    least, most = {} if floor is None else floor, {} if ceiling is None else ceiling
    check_bound("floor", least, WidthsError)
    check_bound("ceiling", most, WidthsError)
    lower, upper = torch.tensor(bounds(graph, least, most, words=("floor", "ceiling"))).unbind(1)
    return Options(graph, lower, upper, align)


def fit(
    graph: ChannelGraph, budget: Budget, wish: Tensor, options: Options, tolerance: float, even: bool = False
) -> Widths:
    """The options nearest to the wished widths that are inside every limit, and use the binding one to the tolerance.

    If the rounded wish is not, all of it is scaled by one number up to the border; then single spaces grow, those
    furthest below their wish first: back to the wish as far as the limits allow, beyond it up to the tolerance only.
    With `even` they grow by one option only, more of them up to the tolerance only: spaces that cost little would
    otherwise come back to the wish whole, and the others stay where they are.
    """

    def share(places: Tensor) -> float:
        return spent_shares(budget, graph, options.widths(places).reshape(-1, len(wish))).max().item()

    wished = options.nearest(wish)
    lowest = torch.zeros_like(wished)
    if share(lowest) > 1:
        check_reachable(budget, graph, graph.widths(options.widths(lowest)))
    places, spent = wished, share(wished)
    if not tolerance <= spent <= 1:
        places = _scale(options, wish, share, bar=1.0 if spent > 1 else tolerance)
        goal = (places + 1).minimum(options.last) if even else wished.maximum(places)
        places = _grow(options, wish, share, places, goal, enough=float("inf"))
        places = _grow(options, wish, share, places, goal=options.last, enough=tolerance)
    if share(places) < tolerance:
        places = _exchange(graph, budget, options, wish, places, tolerance)
    return graph.widths(options.widths(places))


def _scale(options: Options, wish: Tensor, share: Callable[[Tensor], float], bar: float) -> Tensor:
    """The wish times the largest number for which the binding limit is used to the bar at most."""
    low, high = 0.0, 1.0
    while share(options.nearest(wish * high)) <= bar and bool((options.nearest(wish * high) < options.last).any()):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share(options.nearest(wish * middle)) <= bar else (low, middle)
    return options.nearest(wish * low)


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
    graph: ChannelGraph, budget: Budget, options: Options, wish: Tensor, places: Tensor, tolerance: float
) -> Tensor:
    """One space up for another one down while that brings the binding limit nearer to the tolerance.

    A net with few structures is tried whole.
    """
    counts = (options.last + 1).tolist()
    few = math.prod(counts) <= _AT_ONCE
    step = torch.eye(len(counts), dtype=torch.int64)
    moves = (step[:, None] - step).flatten(end_dim=1)  # (S * S, S), also no move at all
    best = 0.0
    while True:
        trials = torch.cartesian_prod(*map(torch.arange, counts)).reshape(-1, len(counts)) if few else places + moves
        trials = trials[((trials >= 0) & (trials <= options.last)).all(dim=1)]
        shares = spent_shares(budget, graph, options.widths(trials)).amax(dim=1)
        reached = (shares >= tolerance) & (shares <= 1)
        if reached.any():
            gaps = ((options.widths(trials) - wish) / wish).abs().amax(dim=1)
            return trials[gaps.masked_fill(~reached, float("inf")).argmin()]
        shares = shares.masked_fill(shares > 1, 0)
        if shares.max().item() <= best:
            return places
        best = shares.max().item()
        gaps = ((options.widths(trials) - wish) / wish).abs().amax(dim=1)
        places = trials[gaps.masked_fill(shares < best, float("inf")).argmin()]
