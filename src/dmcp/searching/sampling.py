"""Widths from alphas (section 3.3): expected and direct sampling; uniform and random widths at the same budget."""

from __future__ import annotations

import torch
from torch import Tensor

from dmcp.arguments import Seed, Share, checked
from dmcp.budgets import Budget
from dmcp.errors import BudgetError
from dmcp.fields import Bound
from dmcp.markov import marginals, moment, sample_groups
from dmcp.runtime.batches import as_generator
from dmcp.searching.bounds import AllowedWidths, allowed_widths
from dmcp.searching.budget import parse_budget, spent_shares
from dmcp.searching.records import SearchResult
from dmcp.searching.rounding import FILLED, round_to_budget
from dmcp.settings import SearchConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths

_AT_ONCE = 1 << 16  # widths sampled in one expression
_TRIES = 1 << 13  # widths among which the random baseline is looked for


def expected_widths(result: SearchResult) -> Tensor:
    """Expected width of each space (eq. 8), not rounded. -> (S,) float64"""
    chances = marginals(result.alphas.detach().double())
    return moment(chances, result.sizes, 1).cpu()


@checked
def expected(result: SearchResult, align: int | None = None) -> Widths:
    """Expected sampling: the expected widths, rounded to multiples of `align` that are inside the budget.

    By default, `align` is that of the search. At least FILLED of the budget is used, in small networks a little less:
    see `round_to_budget`.
    """
    smallest = result.sizes[:, 0]
    largest = result.sizes.sum(dim=1)
    if align is None:
        align = result.align
    allowed = AllowedWidths(result.graph, smallest, largest, align)
    return round_to_budget(result.graph, result.budget, expected_widths(result), allowed, filled(result))


def filled(settings: SearchResult | SearchConfig) -> float:
    """Share of the budget that final widths use; more only if the search was to use more."""
    return max(settings.tolerance, FILLED)


@checked
def direct(
    result: SearchResult, n: int = 1, generator: torch.Generator | Seed | None = None, tries: int = 1_000_000
) -> list[Widths]:
    """Direct sampling: up to n different widths sampled from the chains, all inside the budget.

    Those that use at least FILLED of the budget come first. If no sample is inside the budget, BudgetError is raised;
    there may be fewer than n if the chains have become certain and all tries gave the same few widths.
    """
    if min(n, tries) < 1:
        raise BudgetError(f"n and tries must be at least 1, not {n} and {tries}.")
    generator = as_generator(generator)
    filling: dict[tuple[int, ...], float] = {}  # widths and their share of the budget, in the order sampled
    below: dict[tuple[int, ...], float] = {}
    seen: list[Tensor] = []
    for start in range(0, tries, _AT_ONCE):
        count = min(_AT_ONCE, tries - start)
        widths = sample_groups(result.alphas, result.sizes, count, generator).cpu()
        shares = spent_shares(result.budget, result.graph, widths).amax(dim=1)  # (N,)
        fills = shares >= filled(result)
        _add_different(filling, n, widths, shares, where=fills & (shares <= 1))
        _add_different(below, n, widths, shares, where=~fills)
        if len(filling) == n:
            break
        seen.append(shares)

    largest_first = sorted(below, key=lambda row: below[row], reverse=True)
    chosen = [*filling, *largest_first][:n]
    if not chosen:
        least, most = torch.cat(seen).aminmax()
        raise BudgetError(
            f"None of {tries:,} samples is inside the budget {result.budget.text!r}: they cost from {least:.1%} to "
            f"{most:.1%} of it. Use the expected widths, which are rounded to fit the budget, or search longer."
        )
    return [result.graph.widths(row) for row in chosen]


def _add_different(
    samples: dict[tuple[int, ...], float], n: int, widths: Tensor, shares: Tensor, where: Tensor
) -> None:
    """Add widths and their shares, until there are n different ones. (N, S), (N,), (N,) bool"""
    if len(samples) == n:
        return  # many rows would be copied to lists for nothing
    for row, share in zip(widths[where].tolist(), shares[where].tolist(), strict=True):
        samples[tuple(row)] = share
        if len(samples) == n:
            return


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

    Each of these gets at most one more channel (or step of `align`), beginning with those that rounding lowered most.
    Only if that does not use the budget up to the tolerance, as in networks with few channels, do some get more. The
    bounds are widths, one number for all, or numbers by name.
    """
    unpruned = graph.full.tensor().double()
    allowed = allowed_widths(graph, min_channels, max_channels, align)
    return round_to_budget(graph, parse_budget(budget, graph), unpruned, allowed, tolerance, even=True)


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
    """Widths sampled uniformly until they use the budget up to the tolerance; after many tries, the last are scaled."""
    budget = parse_budget(budget, graph)
    allowed = allowed_widths(graph, min_channels, max_channels, align)
    chances = torch.rand(_TRIES, len(graph.spaces), generator=as_generator(generator), dtype=torch.float64)
    sampled = allowed.widths((chances * (allowed.last + 1)).long())  # (N, S)
    shares = spent_shares(budget, graph, sampled).amax(dim=1)
    inside = sampled[(shares >= tolerance) & (shares <= 1)]
    if len(inside):
        return graph.widths(inside[0])
    return round_to_budget(graph, budget, sampled[-1].double(), allowed, tolerance)
