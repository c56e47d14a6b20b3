"""Bounds of the widths, and what a search records and returns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from dmcp.arguments import checked
from dmcp.budgets import Budget
from dmcp.errors import WidthsError
from dmcp.markov import CHAIN, Process
from dmcp.runtime.distributed import World, mean_values
from dmcp.searching.budget import check_reachable, parse_budget, ratios
from dmcp.settings import Bound
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import ChannelSpace, Widths


def bounds(graph: ChannelGraph, lower: Bound, upper: Bound, align: int | None = 1) -> list[tuple[int, int]]:
    """The smallest and the largest width of each space: multiples of `align`, or its full size."""
    lowest = _by_space(graph, lower, max, lambda number, unit: -(-number // unit))
    highest = _by_space(graph, upper, min, lambda number, unit: number // unit)
    ends: list[tuple[int, int]] = []
    for space in graph.spaces:
        step, least, most = space.step(align), lowest.get(space.name, 1), highest.get(space.name, space.size)
        low = min(space.size, -(-least // step) * step)
        high = most if most == space.size else most // step * step
        if low > high:
            steps = f"in steps of {step} groups of {space.unit} channels"
            raise WidthsError(f"No width of {space.name} is from {least} to {most}, {steps}: change its bounds.")
        ends.append((low, high))
    return ends


def _by_space(
    graph: ChannelGraph, bound: Bound, strictest: Callable[[Iterable[int]], int], in_units: Callable[[int, int], int]
) -> dict[str, int]:
    """The bound of each space that has one, as a width of it.

    Of several names that fit a space the most exact one counts; of equally exact ones the strictest number.
    """
    numbers = dict(bound) if isinstance(bound, Mapping) else {"": bound}
    own = {space.name: numbers.pop(space.name) for space in graph.spaces if space.name in numbers}
    graph.widths(bound if isinstance(bound, Widths) else own)  # refuses numbers that do not fit
    found, used = dict[str, int](), {""}
    for space in graph.spaces:
        fitting = {name: name.count(".") + bool(name) for name in numbers if _holds(name, space)}
        used |= fitting.keys()
        if fitting:
            number = strictest(numbers[name] for name, depth in fitting.items() if depth == max(fitting.values()))
            found[space.name] = min(space.size, in_units(number, space.unit))
    for name in numbers.keys() - used:
        known = sorted({it for space in graph.spaces for it in (space.name, *space.writers)})
        near = ", ".join(difflib.get_close_matches(name, known))
        hint = f"did you mean {near}?" if near else "graph.spaces (dmcp inspect) lists them."
        raise WidthsError(f"{name!r} is no space, nor a module that writes one: {hint}")
    return found | own


def _holds(module: str, space: ChannelSpace) -> bool:
    """True for a module with a layer that writes the space; "" is the whole network."""
    return not module or any(f"{writer}.".startswith(f"{module}.") for writer in space.writers)


def extremes(graph: ChannelGraph, sizes: Tensor) -> tuple[Widths, Widths]:
    """The smallest and the largest widths of chains with these groups. (S, G)"""
    return graph.widths(sizes[:, 0].tolist()), graph.widths(sizes.sum(dim=1).tolist())


_NEAR = 0.9  # how far outside of its band, as a factor, a search may end and count as arrived
_WIDTHS_EVERY = 10  # steps: there may be many spaces, and 100,000 steps


@dataclass(frozen=True)
class SearchRecord:
    """Losses and learning rates of one search step; None for what it did not do."""

    step: int
    epoch: int
    lr: float | None = None  # of the weights
    weight_losses: tuple[float, ...] | None = None  # of each sub-network, the largest first
    alpha_lr: float | None = None
    task_loss: float | None = None
    budget_loss: float | None = None
    ratios: tuple[float, ...] | None = None  # expected cost over target, per limit
    widths: tuple[float, ...] | None = None  # expected ones in every tenth step, to 0.01, in the order of graph.spaces

    @property
    def losses(self) -> dict[str, tuple[float, ...]]:
        """What must be finite, by stages."""
        arch = (self.task_loss or 0.0, self.budget_loss or 0.0)
        return {" in stage 1, the weights": self.weight_losses or (), " in stage 2, the alphas": arch}

    @property
    def text(self) -> str:
        """Its losses, for people who watch."""
        parts = [f"loss {self.weight_losses[0]:.3f}"] if self.weight_losses else []
        parts += [f"soft loss {self.task_loss:.3f}"] if self.task_loss is not None else []
        shares = " and ".join(f"{ratio:.1%}" for ratio in self.ratios or ())
        return ", ".join([*parts, f"cost {shares} of budget" if shares else "warm-up"])


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The distribution of widths that a search found, and its budget."""

    alphas: Tensor  # (S, G-1)
    sizes: Tensor  # group sizes inside min_channels and max_channels. (S, G)
    graph: ChannelGraph
    budget: Budget
    tolerance: float
    align: int | None = None
    log: tuple[SearchRecord, ...] = ()
    process: Process = CHAIN

    @checked
    def with_budget(self, budget: int | float | str | Budget) -> SearchResult:
        """The same distribution for another budget: widths are scaled to that, not searched again."""
        wanted = parse_budget(budget, self.graph)
        check_reachable(wanted, self.graph, *extremes(self.graph, self.sizes))
        return replace(self, budget=wanted)


def expected_shares(result: SearchResult) -> tuple[float, ...]:
    """Expected cost / target of each limit, before any rounding and repair."""
    chances = result.process.marginals(result.alphas.double()) * (result.sizes > 0)
    return tuple(ratios(result.budget, result.graph, chances, result.sizes, result.process).tolist())


def missed_budget(result: SearchResult) -> str:
    """A sentence about a search whose expected cost ended far from its budget, and what helps; else empty."""
    share = max(expected_shares(result))
    if _NEAR * result.tolerance <= share <= 1 / _NEAR:
        return ""
    return (
        f"The search did not arrive at its budget {result.budget.text!r}: the expected cost at its end is {share:.1%} "
        "of it, so that expected widths are only scaled to it, and direct samples may be far from it. Take "
        'init="target" (which starts at the budget), more epochs, a larger alpha_lr or a larger budget_weight.'
    )


@dataclass(frozen=True)
class Step:
    """What one step saw, its losses still on the device."""

    record: SearchRecord  # without them
    samples: int  # of this rank
    weight_losses: Tensor | None
    moved: tuple[Tensor | None, Tensor, Tensor, Tensor] | None  # task loss, budget loss, ratios, expected widths

    def read(self, world: World) -> SearchRecord:
        """The whole record, means over all ranks; waits for the device."""

        def mean(values: Tensor) -> list[float]:
            return mean_values(values.reshape(-1), self.samples, world).tolist()

        found = self.record
        if self.weight_losses is not None:
            found = replace(found, weight_losses=tuple(mean(self.weight_losses)))
        if self.moved is not None:
            task, budget, ratios, widths = self.moved
            found = replace(found, budget_loss=budget.item(), ratios=tuple(ratios.tolist()))
            found = replace(found, task_loss=None if task is None else mean(task)[0])
            if found.step % _WIDTHS_EVERY == 0:
                found = replace(found, widths=tuple(round(it, 2) for it in widths.tolist()))
        return found
