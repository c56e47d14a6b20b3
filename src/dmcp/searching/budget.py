"""The budget: its text, reachability, and the budget loss (eqs. 12 and 13)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from dmcp.arguments import checked
from dmcp.errors import BudgetError
from dmcp.markov import CERTAIN, CHAIN, Process
from dmcp.tracing.cost import show_bytes
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.units import FS_PER_MS, show_ms

KINDS = ("macs", "params", "memory", "latency")
MEMORY, LATENCY = "memory", "latency"
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIMES = {"us": FS_PER_MS // 1000, "ms": FS_PER_MS, "s": 1000 * FS_PER_MS}  # in femtoseconds
_UNITS = {"macs": _SCALES, "params": _SCALES, MEMORY: _SCALES | _BYTES, LATENCY: _TIMES}
_PART = re.compile(r"(?a)(?:(?P<kind>[a-z]+):)?(?P<number>\d+(?:_\d+)*(?:\.\d+)?(?:e[+-]?\d{1,2})?)(?P<unit>%|[a-z]*)")
_MAX_TARGET = 10**18  # more than any network costs
_STEEP = 10.0  # alphas beyond have a gradient near zero
_MOST = 0.9  # share of the MACs that can be narrowed, below which the rest is a reason
_HELP = 'write "50%", "211M", "params:2M", "memory:256kB", "8ms", "latency:50%", or several: "50%,params:2M"'


@dataclass(frozen=True)
class Limit:
    """The most that a network may cost of one kind."""

    kind: str  # one of KINDS
    target: int  # of memory: bytes; of latency: femtoseconds

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.target < 1:
            raise BudgetError(f"A limit is at least 1 of {', '.join(KINDS)}, not {self.target} of {self.kind}.")


@dataclass(frozen=True)
class Budget:
    """Limits that must all hold, and the text that they were read from."""

    limits: tuple[Limit, ...]
    text: str

    def __post_init__(self) -> None:
        if not self.limits:
            raise BudgetError("A budget has at least one limit.")


@checked
def parse(spec: int | float | str | Budget, graph: ChannelGraph) -> Budget:
    """Read a budget: an int (MACs), a float up to 1 (share of the full MACs), or a text.

    Texts: "211M", "1.1G", "50%", "params:2M", "params:50%", "memory:256kB" (of activations that are held at once),
    "8ms", "latency:50%" (of the unpruned network's time), and several with commas, which must all hold. Times need a
    graph with a table of latency: see `Latency.attach`.
    """
    if isinstance(spec, Budget):
        return spec
    text, parts = _parts(spec)
    return Budget(tuple(_limit(graph, text, *part) for part in parts), text)


def limits_latency(spec: object) -> bool:
    """True if a budget limits latency."""
    if isinstance(spec, Budget):
        return any(limit.kind == LATENCY for limit in spec.limits)
    return bool(re.search(r"latency|\d *[mu]?s *(,|$)", str(spec).lower()))


def known_limits(spec: object, graph: ChannelGraph) -> tuple[Limit, ...]:
    """The limits of a budget other than latency, which may not have been measured yet."""
    if isinstance(spec, Budget):
        return tuple(limit for limit in spec.limits if limit.kind != LATENCY)
    text, parts = _parts(spec)
    return tuple(_limit(graph, text, *part) for part in parts if part[0] != LATENCY)


def _limit(graph: ChannelGraph, text: str, kind: str, number: Fraction, share: bool) -> Limit:
    """One part of a text; share: of the unpruned network's cost."""
    if kind == LATENCY and LATENCY not in graph.extra:
        raise BudgetError(
            f"The budget {text!r} is a latency, and nothing was measured: dmcp.measure_latency(model, example)"
            ".attach(graph) has it; dmcp prune and dmcp search measure by themselves."
        )
    if share:
        number *= graph.cost(kind)
    return Limit(kind, math.floor(number))


def _parts(spec: object) -> tuple[str, list[tuple[str, Fraction, bool]]]:
    """The text of a budget that may be a number, and of each limit in it: kind, number, whether that is a share."""
    text = str(spec).strip()
    parts = [_part(part, text) for part in text.lower().replace(" ", "").split(",")]
    if len({kind for kind, *_ in parts}) < len(parts):
        raise BudgetError(f"The budget {text!r} limits one kind twice; decimals have a point: 1.5G.")
    return text, parts


def _part(part: str, text: str) -> tuple[str, Fraction, bool]:
    if match := _PART.fullmatch(part):
        unit, number = match["unit"], Fraction(match["number"])  # exact: 1.1G is 1,100,000,000
        kind = match["kind"] or (LATENCY if unit in _TIMES else "macs")
        share = unit == "%" or (not unit and number <= 1 and bool(re.search(r"\.|e-", match["number"])))
        units = {"%": Fraction(1, 100)} | ({"": 1} if share else {}) | _UNITS.get(kind, {})
        number *= units.get(unit, 0)
        counts = share or unit or number.denominator == 1  # neither half a MAC, nor 1.5 for 150%
        if kind in KINDS and 0 < number < _MAX_TARGET and counts and not (kind == LATENCY and share and number > 1):
            return kind, number, share
    raise BudgetError(f"The budget {text!r} cannot be read: {_HELP}.")


def show_cost(kind: str, amount: float) -> str:
    """121,000 macs; 8.12 ms; 65.5 kB."""
    if kind == MEMORY:
        return show_bytes(amount)
    return show_ms(amount / FS_PER_MS) if kind == LATENCY else f"{amount:,.0f} {kind}"


def check_reachable(budget: Budget, graph: ChannelGraph, low: Widths, high: Widths | None = None) -> None:
    """Refuse a target below the cost of the smallest widths, or above that of the largest (default: unpruned)."""
    least, most, full = costs(graph, low), costs(graph, high or graph.full), costs(graph, graph.full)
    for limit in budget.limits:
        kind, target = limit.kind, limit.target
        if not least[kind] <= target <= most[kind]:
            small = target < least[kind]
            side = "less than the smallest" if small else "more than the largest"
            ends = (f"{show_cost(kind, it[kind])} ({it[kind] / full[kind]:.1%})" for it in (least, most))
            guess = f" (a share has a percent sign: {target}%)" if small and target <= 100 else ""
            part, reasons = graph.prunable_share, "graph.summary() (dmcp inspect) has the reasons"
            why = f" Only {part:.1%} of the macs can be narrowed: {reasons}." if small and part < _MOST else ""
            raise BudgetError(
                f"The budget {budget.text!r} asks for {show_cost(kind, target)}{guess}, {side} widths cost: choose "
                f"from {' to '.join(ends)}, or other groups, align, min_channels or max_channels.{why}"
            )


# widths against the budget


def costs(graph: ChannelGraph, widths: Mapping[str, int]) -> dict[str, int]:
    """What widths cost of each kind that is known of the network."""
    return {kind: graph.cost(kind, widths) for kind in KINDS if kind != LATENCY or LATENCY in graph.extra}


def spent_shares(budget: Budget, graph: ChannelGraph, widths: Tensor) -> Tensor:
    """Cost / target of many widths, exactly on the right side of 1. (N, S) int64 -> (N, L) float64"""
    return torch.stack([graph.cost(it.kind, widths).double() / it.target for it in budget.limits], dim=1)


# alphas against the budget


def ratios(budget: Budget, graph: ChannelGraph, marginals: Tensor, sizes: Tensor, process: Process = CHAIN) -> Tensor:
    """Expected cost / target of each limit (eqs. 9 to 12), differentiable. (S, G), (S, G) -> (L,)"""
    expected = (graph.expected_cost(it.kind, marginals, sizes, process) / it.target for it in budget.limits)
    return torch.stack(list(expected))


def budget_loss(ratios: Tensor, tolerance: float) -> Tensor:
    """Pull the expected cost into the band from tolerance (gamma) to 1 times the target (eq. 13). (L,) -> ()

    Ratios, not counts: no unit can be mixed up. Every limit that is exceeded pushes down, with log(r - tolerance)
    since log|r - 1| has a pole at the target. If all are below the band, the one nearest to it pushes up.
    """
    one = torch.ones_like(ratios)  # log(1) is 0 and has no gradient
    down = torch.where(ratios > 1, ratios - tolerance, one).log().sum()
    binding = ratios.max()
    up = torch.where(binding < tolerance, 1 - binding, one[0]).log()
    return down + up


def constant_alpha(
    budget: Budget, graph: ChannelGraph, sizes: Tensor, process: Process = CHAIN, certain: Tensor | None = None
) -> float:
    """The largest constant for all alphas whose expected cost is inside the budget, from -10 to 10.

    certain: steps that are CERTAIN instead. (S, G-1) bool
    """
    ones = torch.ones_like(sizes[:, 1:], dtype=torch.float64, device="cpu")
    return _largest(budget, graph, sizes, process, certain, lambda number: number * ones, (-_STEEP, _STEEP))


def front_alphas(budget: Budget, graph: ChannelGraph, sizes: Tensor, process: Process, certain: Tensor) -> Tensor:
    """Alphas that fall by 1 from group to group, through zero at the same share of every space. (S, G-1)

    That share is the largest one whose expected cost is inside the budget, with steps that are CERTAIN instead.
    """
    middle = (sizes.cumsum(dim=1) - sizes / 2)[:, 1:] / sizes.sum(dim=1, keepdim=True)  # of each group, as a share
    place, fall = middle.cpu().double(), (sizes > 0).sum(dim=1, keepdim=True).cpu()
    border = _largest(budget, graph, sizes, process, certain, lambda border: fall * (border - place), (-1.0, 2.0))
    return fall * (border - place)


def _largest(
    budget: Budget,
    graph: ChannelGraph,
    sizes: Tensor,
    process: Process,
    certain: Tensor | None,
    alphas: Callable[[float], Tensor],
    ends: tuple[float, float],
) -> float:
    """The largest number between two ends whose alphas cost no more than the budget; on the CPU, in float64."""
    low, high = ends
    fixed = torch.tensor(False) if certain is None else certain.cpu()

    def too_much(number: float) -> bool:
        chances = process.marginals(alphas(number).masked_fill(fixed, CERTAIN))
        return ratios(budget, graph, chances, sizes.cpu(), process).max().item() > 1

    if too_much(low) or not too_much(high):
        return low if too_much(low) else high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if too_much(middle) else (middle, high)
    return low
