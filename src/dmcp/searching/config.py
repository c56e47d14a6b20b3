"""Settings, records and result of a search."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dmcp.budget import Budget
from dmcp.errors import DmcpError, TrainingError, WidthsError
from dmcp.markov import CHAIN, Process
from dmcp.settings import Bound
from dmcp.tracing.graph import ChannelGraph
from dmcp.widths import ChannelSpace, Widths

BOUNDS = ("min_channels", "max_channels")  # what people call them

_EXACT = 1 << 30  # a space's own name goes before all others


def check_bound(word: str, bound: Bound, error: type[DmcpError] = TrainingError) -> None:
    """Refuse what can be no bound of any network; `word` is what people call it."""
    numbers = list(bound.values()) if isinstance(bound, Mapping) else [bound]
    if any(type(number) is not int or number < 1 for number in numbers):
        raise error(f"{word} must be an int of at least 1, or such ints by name, not {bound!r}.")


def bounds(
    graph: ChannelGraph, min_channels: Bound, max_channels: Bound, align: int = 1, words: tuple[str, str] = BOUNDS
) -> list[tuple[int, int]]:
    """From which width to which each space may go, both in whole multiples of `align` or the whole space."""
    least = _by_space(graph, words[0], min_channels, max, lambda number, unit: -(-number // unit))
    most = _by_space(graph, words[1], max_channels, min, lambda number, unit: number // unit)
    ends: list[tuple[int, int]] = []
    for space in graph.spaces:
        step, lower, upper = space.step(align), least.get(space.name, 1), most.get(space.name, space.size)
        low = min(space.size, -(-lower // step) * step)
        high = upper if upper == space.size else upper // step * step
        if low > high:
            some = "" if step == 1 else f" that is a multiple of {step}"
            counted = "" if space.unit == 1 else f", in whole groups of {space.unit} channels"
            raise WidthsError(
                f"No width of {space.name}{some} lies from {lower} ({words[0]}) to {upper} ({words[1]}{counted}): move "
                "one of them."
            )
        ends.append((low, high))
    return ends


def _by_space(
    graph: ChannelGraph,
    word: str,
    bound: Bound,
    strictest: Callable[[Iterable[int]], int],
    in_units: Callable[[int, int], int],
) -> dict[str, int]:
    """The bound of each space that has one, as a width of it.

    Of several names that fit a space the most exact one counts; of equally exact ones the strictest number.
    """
    numbers = {"": bound} if isinstance(bound, int) else dict(bound)
    own = {name: number for name, number in numbers.items() if name in {space.name for space in graph.spaces}}
    graph.widths(bound if isinstance(bound, Widths) else own)  # refuses numbers that do not fit
    found: dict[str, int] = {}
    used = {""} | own.keys()
    for space in graph.spaces:
        fitting = [(_exactness(name, space), name) for name in numbers if name == space.name or name not in own]
        best = max((rank for rank, _ in fitting), default=-1)
        used |= {name for rank, name in fitting if rank >= 0}
        if best >= 0:
            number = strictest(numbers[name] for rank, name in fitting if rank == best)
            found[space.name] = number if best == _EXACT else min(space.size, in_units(number, space.unit))
    for name in numbers:
        if name not in used:
            raise WidthsError(_unused(graph, word, name))
    return found


def _exactness(name: str, space: ChannelSpace) -> int:
    """How much a name says about a space: more for inner modules, -1 if it is no module that writes the space."""
    if name == space.name:
        return _EXACT
    if not name:
        return 0
    writes = any(writer == name or writer.startswith(f"{name}.") for writer in space.writers)
    return name.count(".") + 1 if writes else -1


def _unused(graph: ChannelGraph, word: str, name: str) -> str:
    """Why a name bounds nothing, and what to do."""
    for kept in graph.unprunable:
        if kept.name == name or kept.name.startswith(f"{name}."):
            return f"{word} names {name!r}, which stays whole ({kept.reason}): leave it out."
    known = sorted({other for space in graph.spaces for other in (space.name, *space.writers)})
    near = difflib.get_close_matches(str(name), known, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "graph.spaces (dmcp inspect) lists them."
    return f"{word}: there is no space named {name!r}, and no module of that name writes one: {hint}"


def extremes(graph: ChannelGraph, sizes: Tensor) -> tuple[Widths, Widths]:
    """The smallest and the largest widths of chains with these groups. (S, G)"""
    return graph.widths(sizes[:, 0].tolist()), graph.widths(sizes.sum(dim=1).tolist())


@dataclass(frozen=True)
class SearchRecord:
    """What one step of a search saw, as plain numbers; None for what it did not do."""

    step: int
    epoch: int
    lr: float | None = None  # of the weights
    weight_losses: tuple[float, ...] | None = None  # of each sub-network, the largest first
    alpha_lr: float | None = None
    task_loss: float | None = None
    budget_loss: float | None = None
    ratios: tuple[float, ...] | None = None  # expected cost over target, per limit


def as_record(plain: Mapping[str, Any]) -> SearchRecord:
    """A record that was written as JSON."""
    lists = {key: tuple(value) for key, value in plain.items() if isinstance(value, list)}
    return SearchRecord(**{**plain, **lists})


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search found: the distribution of widths, and what it was searched for."""

    alphas: Tensor  # (S, G-1)
    sizes: Tensor  # (S, G), inside the smallest and largest widths that were asked for
    graph: ChannelGraph
    budget: Budget
    tolerance: float
    align: int = 1
    log: tuple[SearchRecord, ...] = ()
    process: Process = CHAIN
