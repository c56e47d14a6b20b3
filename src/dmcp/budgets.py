"""Budgets as users write them: read once, without torch, before there is a network."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from dmcp.errors import BudgetError
from dmcp.units import FS_PER_MS, show_bytes, show_ms

MACS, PARAMS, MEMORY, TRAFFIC, LATENCY = "macs", "params", "memory", "traffic", "latency"


@dataclass(frozen=True)
class Unit:
    """What a kind of cost is counted in."""

    sizes: Mapping[str, int]  # by their suffix in a budget
    show: Callable[[float], str]  # an amount as text: 121,000; 65.54 kB; 8.12 ms


_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIMES = {"us": FS_PER_MS // 1000, "ms": FS_PER_MS, "s": 1000 * FS_PER_MS}
COUNT = Unit(_COUNTS, lambda count: f"{count:,.0f}")
BYTES = Unit(_COUNTS | _BYTES, show_bytes)
TIME = Unit(_TIMES, lambda femtoseconds: show_ms(femtoseconds / FS_PER_MS))

# A new kind of cost is an entry in each of these tables, an example in _HELP, and a polynomial in ChannelGraph.
UNITS = {MACS: COUNT, PARAMS: COUNT, MEMORY: BYTES, TRAFFIC: BYTES, LATENCY: TIME}
NAMES = {MACS: "MACs", PARAMS: "parameters", MEMORY: "memory", TRAFFIC: "traffic", LATENCY: "time"}  # in reports
KINDS = tuple(UNITS)

_NUMBER = r"\d+(?:_\d+)*(?:\.\d+)?(?:e[+-]?\d{1,2})?"
_PART = re.compile(rf"(?a)(?:(?P<kind>[a-z]+):)?(?P<number>{_NUMBER})(?P<unit>%|[a-z]*)")
_FRACTION = re.compile(r"\.|e-")  # "1.0" and "5e-1" are shares, "1" is a count
_MAX_AMOUNT = 10**18  # more than any network costs
_HELP = (
    'write "50%", "211M", "params:2M", "memory:256kB", "traffic:50%", "8ms", "latency:50%", or several: "50%,params:2M"'
)


@dataclass(frozen=True)
class Limit:
    """The most that a network may cost of one kind."""

    kind: str  # one of KINDS
    target: int  # bytes of memory and traffic, femtoseconds of latency

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.target < 1:
            raise BudgetError(
                f"A limit needs a kind, one of {', '.join(KINDS)}, and a target of at least 1, "
                f"not {self.kind!r} and {self.target}."
            )


@dataclass(frozen=True)
class Budget:
    """Limits for one network that must all hold, and the text that they were read from."""

    limits: tuple[Limit, ...]
    text: str

    def __post_init__(self) -> None:
        if not self.limits:
            raise BudgetError("A budget needs at least one limit.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each limit."""
        return tuple(limit.kind for limit in self.limits)

    @property
    def file_name(self) -> str:
        """The text as a part of a file's name: 50%-params-2M."""
        return file_name(self.text)


def file_name(text: str) -> str:
    """The text of a budget as a part of a file's name."""
    return re.sub(r"[^\w%.]+", "-", text)


@dataclass(frozen=True)
class Target:
    """One part of a budget as it was written: an amount, or a share of what the unpruned network costs."""

    kind: str  # one of KINDS
    amount: Fraction  # exact: 1.1G is 1,100,000,000; in the unit of `Limit.target`
    is_share: bool


@dataclass(frozen=True)
class WrittenBudget:
    """A budget as it was written; `dmcp.parse_budget` makes a Budget of it, for one network."""

    targets: tuple[Target, ...]
    text: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each target."""
        return tuple(target.kind for target in self.targets)


def read_budget(spec: object) -> WrittenBudget:
    """Read a number, a text or a Budget; BudgetError for anything else."""
    if isinstance(spec, Budget):
        limits = tuple(Target(limit.kind, Fraction(limit.target), is_share=False) for limit in spec.limits)
        return WrittenBudget(limits, spec.text)
    text = str(spec).strip()
    targets: list[Target] = []
    for part in text.lower().replace(" ", "").split(","):
        target = _read_target(part)
        if target is None:
            raise BudgetError(f"The budget {text!r} cannot be read: {_HELP}.")
        targets.append(target)
    budget = WrittenBudget(tuple(targets), text)
    if len(set(budget.kinds)) < len(budget.kinds):
        raise BudgetError(
            f"The budget {text!r} limits the same kind of cost twice. (Write decimals with a point: 1.5G.)"
        )
    return budget


def _read_target(part: str) -> Target | None:
    """Read one part of a text, such as "params:2m"; None if it is no target, BudgetError for an unknown kind."""
    match = _PART.fullmatch(part)
    if match is None:
        return None
    unit = match["unit"]
    number = Fraction(match["number"])
    kind = match["kind"] or (LATENCY if unit in _TIMES else MACS)
    if kind not in KINDS:
        raise BudgetError(f"A budget cannot limit {kind!r}, only {', '.join(KINDS)}: {_HELP}.")

    if unit == "%":
        target = Target(kind, number / 100, is_share=True)
    elif not unit and number <= 1 and _FRACTION.search(match["number"]):
        target = Target(kind, number, is_share=True)
    elif not unit and number.denominator > 1:
        return None  # 1.5 is neither one MAC and a half, nor 150%
    elif unit in UNITS[kind].sizes:
        target = Target(kind, number * UNITS[kind].sizes[unit], is_share=False)
    else:
        return None

    if not 0 < target.amount < _MAX_AMOUNT:
        return None
    if kind == LATENCY and target.is_share and target.amount > 1:
        return None  # no network that is measured is slower than the unpruned one
    return target


def budget_of_kind(kind: object) -> str:
    """The budget that a search begins with if only a kind of cost is named: half of it."""
    if kind not in KINDS:
        raise BudgetError(
            f"within chooses the budget: leave {kind!r} out, or name only the kind of cost to lower, "
            f"one of {', '.join(KINDS)}."
        )
    return f"{kind}:50%"


def limits_latency(spec: object) -> bool:
    """True if a budget limits latency."""
    return LATENCY in read_budget(spec).kinds


AnySpec = TypeVar("AnySpec")


def choose_middle(specs: Sequence[AnySpec]) -> AnySpec:
    """The budget, of several, that the one search is for: widths for the others are then scaled least.

    Budgets of the same kinds are ordered by their targets, others as they were given. Of an even number of budgets, it
    is the one before the middle.
    """

    def kinds_of(spec: AnySpec) -> list[tuple[str, bool]]:
        return [(target.kind, target.is_share) for target in read_budget(spec).targets]

    def amounts_of(spec: AnySpec) -> list[Fraction]:
        return [target.amount for target in read_budget(spec).targets]

    ordered = list(specs)
    if all(kinds_of(spec) == kinds_of(specs[0]) for spec in specs):
        ordered.sort(key=amounts_of)
    return ordered[(len(ordered) - 1) // 2]


def show_cost(kind: str, amount: float) -> str:
    """An amount and what it counts: 121,000 MACs; 2,000 parameters; 65.54 kB of memory; 8.12 ms."""
    text = show_amount(kind, amount)
    if UNITS[kind] is BYTES:
        return f"{text} of {NAMES[kind]}"
    if UNITS[kind] is TIME:
        return text
    return f"{text} {NAMES[kind]}"


def show_amount(kind: str, amount: float) -> str:
    """An amount with its unit, if it has one: 121,000; 65.54 kB; 8.12 ms."""
    return UNITS[kind].show(amount)
