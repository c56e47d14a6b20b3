"""What must not be exceeded: parsing it, and the budget loss."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from dmcp.errors import BudgetError
from dmcp.markov import CERTAIN, CHAIN, Process
from dmcp.modules import check_kind
from dmcp.tracing.cost import show_bytes
from dmcp.tracing.graph import ChannelGraph
from dmcp.units import FS_PER_MS, show_ms
from dmcp.widths import Widths

KINDS = ("macs", "params", "memory", "latency")
MEMORY, LATENCY = "memory", "latency"
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_BYTES = {"b": 1} | {f"{unit}b": size for unit, size in _UNITS.items()} | {"kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIMES = {"us": FS_PER_MS // 1000, "ms": FS_PER_MS, "s": 1000 * FS_PER_MS}  # in femtoseconds
_PART = re.compile(
    r"(?:(?P<kind>[a-z]+):)?(?P<number>\d+(?:_\d+)*(?:\.\d+)?(?:e[+-]?\d{1,2})?)(?P<unit>%|[a-z]+)?", re.ASCII
)
_ELSEWHERE = re.compile(r"(?P<scale>[kmg]?)(?P<what>ib|b|macs|flops|params)")
_LIKE_TIME = re.compile(r"(?<!para)(ms|us|sec|seconds)$")
_FLOAT_BYTES = 4  # of a parameter in float32
_LONGEST, _MOST = 100, 10**18  # characters of a text; more than any network costs
_TENTHS = 10  # groups of a space, unless other settings are given
_STEEP = 10.0  # alphas beyond have a gradient near zero


@dataclass(frozen=True)
class Limit:
    """The most that a network may cost of one kind."""

    kind: str  # one of KINDS
    target: int  # of memory: bytes; of latency: femtoseconds

    def __post_init__(self) -> None:
        if self.kind not in KINDS or type(self.target) is not int or not 1 <= self.target <= _MOST:
            raise BudgetError(
                f"A limit is one of {', '.join(KINDS)} with an int from 1 to {_MOST:.0e}, not {self.kind!r} with "
                f"{self.target!r}."
            )


@dataclass(frozen=True)
class Budget:
    """Limits that must all hold, and the text that they were read from."""

    limits: tuple[Limit, ...]
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.limits, tuple) or not all(isinstance(limit, Limit) for limit in self.limits):
            raise BudgetError("The limits of a Budget are a tuple of Limits: dmcp.parse_budget(text, graph) makes it.")
        if not self.limits or len({limit.kind for limit in self.limits}) < len(self.limits):
            raise BudgetError(f"The budget {self.text!r} must limit each of {', '.join(KINDS)} at most once, and one.")


def parse(spec: int | float | str | Budget, graph: ChannelGraph) -> Budget:
    """Read a budget: an int (MACs), a float up to 1 (share of the full MACs), or a text.

    Texts: "211M", "1.1G", "50%", "params:2M", "params:50%", "memory:256kB" (of activations that are held at once),
    "8ms", "latency:50%" (of the unpruned network's time), and several with commas, which must all hold. Times need a
    graph with a table of latency: see `Latency.attach`.
    """
    if isinstance(spec, Budget):
        return spec
    check_kind("graph", graph, ChannelGraph, BudgetError)
    if isinstance(spec, int) and abs(spec) > _MOST:
        raise BudgetError(f"A budget of more than {_MOST:.0e} is beyond any network: give MACs as an int, or a share.")
    text = str(spec).strip()
    _check_short(text)
    if isinstance(spec, bool) or (isinstance(spec, float) and not 0 < spec <= 1):
        raise BudgetError(f'A budget of {spec!r} is neither a share (0 to 1) nor a count: write 0.5, "50%" or "211M".')
    limits = tuple(_limit(part.strip(), text, graph) for part in text.lower().split(","))
    _check_once([limit.kind for limit in limits], text)
    return Budget(limits, text)


def _check_short(text: str) -> None:
    if len(text) > _LONGEST:
        raise BudgetError(f'A budget of {len(text):,} characters cannot be read: write "50%" or "50%,params:2M".')


def _check_once(kinds: Sequence[str], text: str) -> None:
    if len({*kinds}) < len(kinds):
        way = f"give each of {', '.join(KINDS)} once"
        raise BudgetError(f"The budget {text!r} names one kind twice: {way}{_decimals(text) or '.'}")


def limits_latency(spec: object) -> bool:
    """Whether a budget, which may be one that cannot be read, has a limit of latency."""
    if isinstance(spec, Budget):
        return any(limit.kind == LATENCY for limit in spec.limits)
    matches = [_PART.fullmatch(part) for part in str(spec).lower().replace(" ", "").split(",")]
    return any(match and _kind(match) == LATENCY for match in matches)


def known_limits(spec: object, graph: ChannelGraph) -> tuple[Limit, ...]:
    """Those that are not of latency; what cannot be read is refused, also where no latency is known yet."""
    if not isinstance(spec, str):
        return tuple(it for it in spec.limits if it.kind != LATENCY) if isinstance(spec, Budget) else ()
    text, kinds, found = spec.strip(), list[str](), list[Limit]()
    _check_short(text)
    for part in text.lower().split(","):
        match = _PART.fullmatch(part.replace(" ", ""))
        if match and (_kind(match) == LATENCY or match["unit"] in _TIMES):
            _read_latency(match, text)
            kinds.append(LATENCY)
        else:
            found.append(_limit(part.strip(), text, graph))
            kinds.append(found[-1].kind)
    _check_once(kinds, text)
    return tuple(found)


def _kind(match: re.Match[str]) -> str:
    return match["kind"] or (LATENCY if match["unit"] in _TIMES else "macs")


def _limit(part: str, text: str, graph: ChannelGraph) -> Limit:
    match = _PART.fullmatch(part.replace(" ", ""))
    kind, unit = (_kind(match), match["unit"]) if match else ("macs", None)
    if match is not None and (kind == LATENCY or unit in _TIMES):
        return _latency_limit(match, text, graph)
    if match is None or kind not in KINDS or unit not in (None, "%", *_UNITS, *(_BYTES if kind == MEMORY else ())):
        near = _nearly(match["number"], unit) if match and unit and kind in KINDS else ""
        way = near or 'write "50%", "211M", "params:2M" or "50%,params:2M"'
        way = "a time is written like 8ms, 800us or 0.1s" if _LIKE_TIME.search(part) else way
        raise BudgetError(f"The budget {text!r} cannot be read: {way}.")
    number = Fraction(match["number"])  # exact: 1.1G is 1,100,000,000
    if unit in _UNITS or unit in _BYTES:
        number *= (_UNITS | _BYTES)[unit]
    elif unit == "%":
        number *= Fraction(_full(graph, kind), 100)
    elif number <= 1 and re.search(r"\.|e-", match["number"]):
        number *= _full(graph, kind)
    if number < 1:
        one = "byte" if kind == MEMORY else f"of {kind}"
        told = f"The budget {text!r} is less than one {one}: nothing costs so little"
        more = f"; choose more, like {'50%' if kind == 'macs' else f'{kind}:50%'}."
        raise BudgetError(f"{told}{_decimals(text) or more}")
    if number > _MOST:
        raise BudgetError(f"The budget {text!r} is more than any network costs: the limit is {_MOST:.0e}.")
    return Limit(kind, math.floor(number))


def _latency_limit(match: re.Match[str], text: str, graph: ChannelGraph) -> Limit:
    number, share = _read_latency(match, text)
    if LATENCY not in graph.extra:
        raise BudgetError(
            f"The budget {text!r} is a latency, and nothing was measured: dmcp.measure_latency(model, example)"
            ".attach(graph) has it; dmcp prune and dmcp search measure by themselves."
        )
    if share:  # all of it is what the table says
        number = min(number * graph.extra[LATENCY].full, Fraction(graph.cost(LATENCY)))
    if number < 1:
        raise BudgetError(_no_time(text))
    return Limit(LATENCY, math.floor(number))


def _read_latency(match: re.Match[str], text: str) -> tuple[Fraction, bool]:
    """Femtoseconds, or a share of the unpruned network's time, and whether it is that."""
    digits, unit = match["number"], match["unit"]
    if _kind(match) != LATENCY:
        raise BudgetError(
            f"The budget {text!r} cannot be read: {match['kind']} take no time; write {digits}{unit} for latency."
        )
    number, share = Fraction(digits), unit == "%" or (unit is None and bool(re.search(r"\.|e-", digits)))
    if unit not in _TIMES and (not share or (unit is None and number > 1)):
        raise BudgetError(
            f"The budget {text!r} cannot be read: a latency is a time or a share, like 8ms, 800us, 0.1s or latency:50%."
        )
    number *= _TIMES[unit] if unit in _TIMES else Fraction(1, 100) if unit == "%" else 1
    if share and number > 1:
        raise BudgetError(f"The budget {text!r} is more than the unpruned network takes: write a share up to 100%.")
    if not number or (not share and not 1 <= number <= _MOST):
        raise BudgetError(_no_time(text))
    return number, share


def _no_time(text: str) -> str:
    return f"The budget {text!r} is no time that a network takes: write it like 8ms{_decimals(text) or '.'}"


def _decimals(text: str) -> str:
    """What may have been meant by a text with a comma inside a number; empty if there is none."""
    meant = re.sub(r"(?<![\w.])(\d+),(?=\d+[a-z%]*(,|$))", r"\1.", text, flags=re.IGNORECASE)
    return f"; a comma separates limits: did you mean {meant!r}?" if meant != text else ""


def _nearly(number: str, unit: str) -> str:
    """What to write instead of a unit that people know from elsewhere; nothing of others."""
    match = _ELSEWHERE.fullmatch(unit)
    if not match:
        return ""
    scale, what = match["scale"].upper().replace("K", "k"), match["what"]
    if what in ("b", "ib"):
        count = float(number) * (1024 if what == "ib" else 1000) ** " kmg".index(match["scale"]) / _FLOAT_BYTES
        short = f"{count / 1e6:.6g}M" if count >= 1e6 else f"{count / 1e3:.6g}k"
        return (
            f"bytes of activations held at once are memory:{number}{scale}{'iB' if what == 'ib' else 'B'}, "
            f"those of parameters, {_FLOAT_BYTES} each in float32, params:{short}"
        )
    if what == "params":
        return f"write params:{number}{scale}"
    if what == "macs":
        return f"write {number}{scale}, which are MACs"
    half = f"{float(number) / 2:.6g}{scale}"
    return f"some count a MAC as one FLOP, others as two: write MACs, like {number}{scale} or {half}"


def _full(graph: ChannelGraph, kind: str) -> int:
    return graph.macs() if kind == "macs" else cost(graph, kind, graph.full)


def show_cost(kind: str, amount: float) -> str:
    """121,000 macs; 8.12 ms; 65.5 kB."""
    if kind == MEMORY:
        return show_bytes(amount)
    return show_ms(amount / FS_PER_MS) if kind == LATENCY else f"{amount:,.0f} {kind}"


def show_limit(limit: Limit, amount: int) -> str:
    """121,000 of 122,000; 65.54 kB of 66 kB."""
    if limit.kind in (MEMORY, LATENCY):
        return f"{show_cost(limit.kind, amount)} of {show_cost(limit.kind, limit.target)}"
    return f"{amount:,} of {limit.target:,}"


def check_reachable(budget: Budget, graph: ChannelGraph, floor: Widths, ceiling: Widths | None = None) -> None:
    """Refuse a target that the unpruned network (or the widest allowed) keeps anyway, or that the floor exceeds."""
    least, most, full = costs(graph, floor), costs(graph, ceiling or graph.full), costs(graph, graph.full)
    for kind, target in ((limit.kind, limit.target) for limit in budget.limits):
        if not least[kind] <= target <= most[kind]:
            has = "more than the unpruned network takes" if kind == LATENCY else "more than the network has"
            above = has if most == full else "more than the largest widths allow"
            side = f"less than the floor {'takes' if kind == LATENCY else 'costs'}" if target < least[kind] else above
            share = _forgotten_share(budget.text, kind) if target < least[kind] else ""
            guess = f"did you mean {share}? If not, " if share else ""
            low, high = (show_cost(kind, it[kind]).removesuffix(f" {kind}") for it in (least, most))
            raise BudgetError(
                f"The budget {budget.text!r} asks for {show_cost(kind, target)}, {side}: {guess}choose from {low} "
                f"(every space at its floor, {least[kind] / full[kind]:.1%}) to {high}"
                f"{_lower_floors(graph, floor) if target < least[kind] else ''}."
            )


def _forgotten_share(text: str, kind: str) -> str:
    """The part of a budget's text for this kind with the % that it seems to lack; empty if it lacks none."""
    for part in text.lower().replace(" ", "").split(","):
        match = _PART.fullmatch(part)
        if match and _kind(match) == kind and not match["unit"] and 1 <= Fraction(match["number"]) <= 100:
            return f"{part}%"
    return ""


def _lower_floors(graph: ChannelGraph, floor: Widths) -> str:
    """What else helps where floors are wider than those of the default settings, which are a tenth at most."""
    floors = [(floor[space.name], space.size) for space in graph.spaces]
    wide = sum(kept > 1 and size < _TENTHS * kept for kept, size in floors)
    whole = sum(kept == size > 1 for kept, size in floors)
    if not wide:
        return ""
    stay = f", {whole} of them whole" if whole else ""
    return (
        f", or lower the floors: {wide} of {len(floors)} spaces keep more than a tenth there{stay}, which a smaller "
        "align, more groups or a lower smallest width changes"
    )


# widths against the budget


def cost(graph: ChannelGraph, kind: str, widths: Mapping[str, int]) -> int:
    """What widths cost of one kind."""
    return graph.cost(kind, widths)


def costs(graph: ChannelGraph, widths: Mapping[str, int]) -> dict[str, int]:
    """What widths cost of each kind that is known of the network."""
    return {kind: cost(graph, kind, widths) for kind in KINDS if kind != LATENCY or LATENCY in graph.extra}


def holds(budget: Budget, graph: ChannelGraph, widths: Mapping[str, int]) -> bool:
    """Whether widths are inside every limit."""
    return all(cost(graph, limit.kind, widths) <= limit.target for limit in budget.limits)


def count_many(graph: ChannelGraph, kind: str, widths: Tensor) -> Tensor:
    """What many structures cost of one kind. (N, S) -> (N,)"""
    return graph.cost(kind, widths)


def spent_shares(budget: Budget, graph: ChannelGraph, widths: Tensor) -> Tensor:
    """Cost / target of many structures, exactly on the right side of 1. (N, S) int64 -> (N, L) float64"""
    counted = [count_many(graph, limit.kind, widths) for limit in budget.limits]
    return torch.stack([c.double() / limit.target for c, limit in zip(counted, budget.limits, strict=True)], dim=1)


# the alphas against the budget


def ratios(budget: Budget, graph: ChannelGraph, marginals: Tensor, sizes: Tensor, process: Process = CHAIN) -> Tensor:
    """Expected cost / target of each limit (eqs. 9 to 12), differentiable. (S, G), (S, G) -> (L,)"""
    expected = (graph.expected_cost(it.kind, marginals, sizes, process) / it.target for it in budget.limits)
    return torch.stack(list(expected))


def budget_loss(ratios: Tensor, tolerance: float) -> Tensor:
    """Pull the expected cost into the band from tolerance to 1 (eq. 13); zero inside it. (L,) -> ()

    Ratios, not counts: no unit can be mixed up. Every limit that is exceeded pushes down, with log(r - tolerance)
    since log|r - 1| has a pole at the target; only if all are below the band the one nearest to it pushes up.
    """
    if not 0 < tolerance < 1:
        raise BudgetError(f"The tolerance must be above 0 and below 1, like 0.95, not {tolerance!r}.")
    one = torch.ones_like(ratios)  # log(1) is 0 and has no gradient
    down = torch.where(ratios > 1, ratios - tolerance, one).log().sum()
    binding = ratios.max()
    up = torch.where(binding < tolerance, 1 - binding, one[0]).log()
    return down + up


def constant_alpha(
    budget: Budget,
    graph: ChannelGraph,
    sizes: Tensor,
    ratio: float = 1.0,
    process: Process = CHAIN,
    certain: Tensor | None = None,
) -> float:
    """One number for all alphas whose largest expected cost / target is the ratio, or just below it.

    Where only steep sigmoids would do, the end of the range in which alphas still have a gradient. certain: steps that
    are CERTAIN instead. (S, G-1) bool
    """
    low, high, sizes = -_STEEP, _STEEP, sizes.cpu()  # in double precision, which not every device has
    shape = (sizes.shape[0], sizes.shape[1] - 1)
    fixed = torch.zeros(shape, dtype=torch.bool) if certain is None else certain.cpu()

    def too_much(alpha: float) -> bool:
        chances = process.marginals(torch.full(shape, alpha, dtype=torch.float64).masked_fill(fixed, CERTAIN))
        return ratios(budget, graph, chances, sizes, process).max().item() > ratio

    if too_much(low) or not too_much(high):
        return low if too_much(low) else high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if too_much(middle) else (middle, high)
    return low
