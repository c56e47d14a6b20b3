"""A budget for one network: its limits, whether widths can reach it, and the budget loss (eqs. 12 and 13)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dmcp.arguments import checked
from dmcp.budgets import KINDS, LATENCY, Budget, Limit, Target, read_budget, show_cost
from dmcp.errors import BudgetError
from dmcp.markov import CERTAIN, marginals
from dmcp.searching.bounds import AllowedWidths
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths

_STEEP = 10.0  # alphas beyond have a gradient near zero
_MOSTLY_PRUNABLE = 0.9  # a smaller share of MACs that can be narrowed is named in the error


@checked
def parse_budget(spec: int | float | str | Budget, graph: ChannelGraph) -> Budget:
    """Read a budget: an int (MACs), a float up to 1 (share of the full MACs), or a text.

    Texts: "211M", "1.1G", "50%", "params:2M", "params:50%", "memory:256kB" (of activations that are held at once),
    "traffic:50%" (of the bytes that all ops read and write), "8ms", "latency:50%" (of the unpruned network's time), and
    several with commas, which must all hold. Times need a graph with a table of latency: see `Latency.attach`.
    """
    if isinstance(spec, Budget):
        return spec
    written = read_budget(spec)
    if LATENCY in written.kinds and LATENCY not in graph.extra:
        raise BudgetError(
            f"The budget {written.text!r} limits latency, but none was measured for this graph. Measure it with "
            "dmcp.measure_latency(model, example).attach(graph); dmcp prune and dmcp search do this automatically."
        )
    return Budget(tuple(_limit(target, graph) for target in written.targets), written.text)


def counted_part(spec: int | float | str | Budget, graph: ChannelGraph) -> Budget | None:
    """A budget without latency, which may not have been measured yet; None if nothing is left."""
    if isinstance(spec, Budget):
        limits = [limit for limit in spec.limits if limit.kind != LATENCY]
        text = spec.text
    else:
        written = read_budget(spec)
        limits = [_limit(target, graph) for target in written.targets if target.kind != LATENCY]
        text = written.text
    if not limits:
        return None
    return Budget(tuple(limits), text)


def _limit(target: Target, graph: ChannelGraph) -> Limit:
    amount = target.amount
    if target.is_share:
        amount *= graph.cost(target.kind)
    return Limit(target.kind, math.floor(amount))


def check_reachable(
    budget: Budget, graph: ChannelGraph, low: Widths, high: Widths | None = None, align: int | None = None
) -> None:
    """Refuse a target below the cost of the cheapest widths, or above that of the largest (default: unpruned)."""
    high = high or graph.full
    full = costs(graph, graph.full)
    least = costs(graph, cheapest_between(budget, graph, low, high, align))
    most = costs(graph, high)

    def describe(kind: str, amount: int) -> str:
        return f"{show_cost(kind, amount)} ({amount / full[kind]:.1%})"

    if is_met_by(full, budget):
        kind, target = budget.limits[0].kind, budget.limits[0].target
        raise BudgetError(
            f"The network already meets the budget {budget.text!r}: it costs {show_cost(kind, full[kind])}, and "
            f"{show_cost(kind, target)} are allowed. Choose a budget below {show_cost(kind, full[kind])}."
        )
    for limit in budget.limits:
        kind = limit.kind
        is_without_effect = limit.target > full[kind]  # another limit decides
        if is_without_effect or least[kind] <= limit.target <= most[kind]:
            continue
        too_small = limit.target < least[kind]
        side = "more than the largest possible"
        if too_small:
            side = "less than the cheapest possible"
        message = (
            f"The budget {budget.text!r} allows {show_cost(kind, limit.target)}, {side} widths cost. Choose a budget "
            f"from {describe(kind, least[kind])} to {describe(kind, most[kind])}, or change groups, align, "
            "min_channels or max_channels."
        )
        if too_small and limit.target <= 100:
            message += f" A share is written with a percent sign: {limit.target}%."
        if too_small and graph.prunable_share < _MOSTLY_PRUNABLE:
            message += (
                f" Only {graph.prunable_share:.1%} of the MACs can be pruned: graph.summary() (dmcp inspect) says why."
            )
        raise BudgetError(message)


def is_met_by(amounts: Mapping[str, int], budget: Budget) -> bool:
    """Whether a network of these costs is below all limits."""
    return all(amounts[limit.kind] < limit.target for limit in budget.limits)


# widths against the budget


def cheapest_between(budget: Budget, graph: ChannelGraph, low: Widths, high: Widths, align: int | None) -> Widths:
    """The widths between these two that use least of the budget: the smallest ones, unless multiples are faster."""
    if not _slow_blocks(budget, graph):
        return low
    allowed = AllowedWidths(graph, low.tensor(), high.tensor(), align)
    return graph.widths(allowed.widths(cheapest_widths(budget, graph, allowed)))


def cheapest_widths(budget: Budget, graph: ChannelGraph, allowed: AllowedWidths) -> Tensor:
    """Indices of the widths that use least of the budget: the smallest ones, where costs grow with each width. -> (S,)

    With a latency table, a device may be slow at widths that are no multiples of a block. Then the first multiple may
    be faster than the smallest width, and all others are slower than one of the two.
    """
    indices = torch.zeros_like(allowed.last)
    moves: list[tuple[int, int]] = []  # a space, and the index of its first multiple of a block
    for block in _slow_blocks(budget, graph):
        is_multiple = allowed.table % block == 0
        for space in is_multiple.any(dim=1).nonzero().flatten().tolist():
            moves.append((space, int(is_multiple[space].int().argmax())))

    least = math.inf
    while True:
        trials = indices.repeat(1 + len(moves), 1)
        for trial, (space, index) in zip(trials[1:], moves, strict=True):
            trial[space] = index
        shares = spent_shares(budget, graph, allowed.widths(trials)).amax(dim=1)
        best = int(shares.argmin())
        if shares[best] >= least:
            return indices
        least = shares[best].item()
        indices = trials[best]


def _slow_blocks(budget: Budget, graph: ChannelGraph) -> set[int]:
    """The blocks of which widths should be multiples, since a cost that is limited jumps at all others."""
    measured = [graph.extra[kind] for kind in budget.kinds if kind in graph.extra]
    return {step.block for cost in measured for step in cost.steps if not step.padded}


def costs(graph: ChannelGraph, widths: Mapping[str, int]) -> dict[str, int]:
    """What widths cost of each kind that is known of the network."""
    return {kind: graph.cost(kind, widths) for kind in KINDS if kind != LATENCY or LATENCY in graph.extra}


def spent_shares(budget: Budget, graph: ChannelGraph, widths: Tensor) -> Tensor:
    """Cost / target of many widths, exactly on the right side of 1. (N, S) int64 -> (N, L) float64"""
    return torch.stack([graph.cost(limit.kind, widths).double() / limit.target for limit in budget.limits], dim=1)


# alphas against the budget


def ratios(budget: Budget, graph: ChannelGraph, chances: Tensor, sizes: Tensor) -> Tensor:
    """Expected cost / target of each limit (eqs. 9 to 12), differentiable. (S, G), (S, G) -> (L,)"""
    shares = []
    for limit in budget.limits:
        expected = graph.expected_cost(limit.kind, chances, sizes)
        shares.append(expected / limit.target)
    return torch.stack(shares)


def budget_loss(ratios: Tensor, tolerance: float) -> Tensor:
    """Pull the expected cost into the band from tolerance (gamma) to 1 times the target (eq. 13). (L,) -> ()

    Ratios, not counts: no unit can be mixed up. Every limit that is exceeded pushes down, with log(r - tolerance)
    since log|r - 1| has a pole at the target. If all are below the band, the one nearest to it pushes up.
    """
    ones = torch.ones_like(ratios)  # log(1) is 0 and has no gradient
    down = torch.where(ratios > 1, ratios - tolerance, ones).log().sum()
    binding = ratios.max()
    up = torch.where(binding < tolerance, 1 - binding, ones[0]).log()
    return down + up


def constant_alpha(budget: Budget, graph: ChannelGraph, sizes: Tensor, certain: Tensor | None = None) -> float:
    """The largest constant for all alphas whose expected cost is inside the budget, from -10 to 10.

    certain: steps that are CERTAIN instead. (S, G-1) bool
    """
    ones = torch.ones_like(sizes[:, 1:], dtype=torch.float64, device="cpu")

    def alphas(constant: float) -> Tensor:
        return constant * ones

    return _largest_inside(budget, graph, sizes, certain, alphas, low=-_STEEP, high=_STEEP)


def front_alphas(budget: Budget, graph: ChannelGraph, sizes: Tensor, certain: Tensor) -> Tensor:
    """Alphas that fall by 1 from group to group, through zero at the same share of every space. (S, G-1)

    That share is the largest one whose expected cost is inside the budget, with steps that are CERTAIN instead.
    """
    middles = (sizes.cumsum(dim=1) - sizes / 2)[:, 1:] / sizes.sum(dim=1, keepdim=True)  # of each group, as a share
    middles = middles.cpu().double()
    group_counts = (sizes > 0).sum(dim=1, keepdim=True).cpu()

    def alphas(border: float) -> Tensor:
        return group_counts * (border - middles)

    # Borders outside 0 to 1 make all groups likely, or all unlikely.
    border = _largest_inside(budget, graph, sizes, certain, alphas, low=-1.0, high=2.0)
    return alphas(border)


def _largest_inside(
    budget: Budget,
    graph: ChannelGraph,
    sizes: Tensor,
    certain: Tensor | None,
    alphas: Callable[[float], Tensor],
    *,
    low: float,
    high: float,
) -> float:
    """The largest number from low to high whose alphas cost no more than the budget; on the CPU, in float64."""
    if certain is None:
        certain = torch.zeros_like(sizes[:, 1:], dtype=torch.bool)
    certain = certain.cpu()

    def costs_too_much(number: float) -> bool:
        chances = marginals(alphas(number).masked_fill(certain, CERTAIN))
        return ratios(budget, graph, chances, sizes.cpu()).max().item() > 1

    if costs_too_much(low):
        return low
    if not costs_too_much(high):
        return high
    return largest_allowed(lambda number: not costs_too_much(number), low, high)


def largest_allowed(is_allowed: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number from low, which is allowed, to high, which is not; by halving the distance 50 times."""
    for _ in range(50):
        middle = (low + high) / 2
        if is_allowed(middle):
            low = middle
        else:
            high = middle
    return low
