"""Bounds of the widths, and what a search records and returns."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dmcp.budget import Budget
from dmcp.errors import TrainingError, WidthsError
from dmcp.markov import CHAIN, Process
from dmcp.progress import Update, overdue
from dmcp.runtime.distributed import World, mean_values
from dmcp.settings import Bound
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.widths import ChannelSpace, Widths

BOUNDS = ("min_channels", "max_channels")
_EXACT = 1 << 30  # a space's own name goes before all others


def bounds(
    graph: ChannelGraph, min_channels: Bound, max_channels: Bound, align: int | None = 1
) -> list[tuple[int, int]]:
    """The smallest and the largest width of each space: multiples of `align`, or its full size."""
    lowest = _by_space(graph, BOUNDS[0], min_channels, max, lambda number, unit: -(-number // unit))
    highest = _by_space(graph, BOUNDS[1], max_channels, min, lambda number, unit: number // unit)
    ends: list[tuple[int, int]] = []
    for space in graph.spaces:
        step, lower, upper = space.step(align), lowest.get(space.name, 1), highest.get(space.name, space.size)
        low = min(space.size, -(-lower // step) * step)
        high = upper if upper == space.size else upper // step * step
        if low > high:
            multiple = "" if step == 1 else f" that is a multiple of {step}"
            unit = "" if space.unit == 1 else f", in groups of {space.unit} channels"
            between = f"{lower} (min_channels) to {upper} (max_channels)"
            raise WidthsError(f"No width of {space.name}{multiple} is from {between}{unit}.")
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
    numbers = dict(bound) if isinstance(bound, Mapping) else {"": bound}
    if any(type(number) is not int or number < 1 for number in numbers.values()):
        raise WidthsError(f"{word} must be an int of at least 1, or such ints by name, not {bound!r}.")
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
            raise WidthsError(f"{word}: {_unused(graph, name)}")
    return found


def _exactness(name: str, space: ChannelSpace) -> int:
    """How much a name says about a space: more for inner modules, -1 if it is no module that writes the space."""
    if name == space.name:
        return _EXACT
    if not name:
        return 0
    writes = any(writer == name or writer.startswith(f"{name}.") for writer in space.writers)
    return name.count(".") + 1 if writes else -1


def _unused(graph: ChannelGraph, name: str) -> str:
    """Why a name bounds nothing, and what to do."""
    for kept in graph.unprunable:
        if kept.name == name or kept.name.startswith(f"{name}."):
            return f"{name!r} is not pruned ({kept.reason}): leave it out."
    known = sorted({other for space in graph.spaces for other in (space.name, *space.writers)})
    near = difflib.get_close_matches(str(name), known, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "graph.spaces (dmcp inspect) lists them."
    return f"there is no space named {name!r}, and no module of that name writes one: {hint}"


def extremes(graph: ChannelGraph, sizes: Tensor) -> tuple[Widths, Widths]:
    """The smallest and the largest widths of chains with these groups. (S, G)"""
    return graph.widths(sizes[:, 0].tolist()), graph.widths(sizes.sum(dim=1).tolist())


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

    @property
    def text(self) -> str:
        """Its losses, for people who watch."""
        parts = [f"loss {self.weight_losses[0]:.3f}"] if self.weight_losses else []
        parts += [f"soft loss {self.task_loss:.3f}"] if self.task_loss is not None else []
        shares = " and ".join(f"{ratio:.1%}" for ratio in self.ratios or ())
        return ", ".join([*parts, f"cost {shares} of budget" if shares else "warm-up"])


def as_record(plain: Mapping[str, Any]) -> SearchRecord:
    """A record read from JSON."""
    lists = {key: tuple(value) for key, value in plain.items() if isinstance(value, list)}
    return SearchRecord(**{**plain, **lists})


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


# records of the steps


@dataclass(frozen=True)
class Step:
    """What one step saw, still on the device."""

    step: int
    epoch: int
    samples: int  # of this rank
    lr: float
    weight_losses: Tensor | None
    alpha_lr: float
    moved: tuple[Tensor | None, Tensor, Tensor] | None  # task loss, budget loss, ratios

    def read(self, world: World) -> SearchRecord:
        """The same as plain numbers, means over all ranks; waits for the device."""

        def mean(values: Tensor) -> list[float]:
            return mean_values(values.reshape(-1), self.samples, world).tolist()

        record = SearchRecord(self.step, self.epoch)
        if self.weight_losses is not None:
            record = replace(record, lr=self.lr, weight_losses=tuple(mean(self.weight_losses)))
        if self.moved is not None:
            task, budget, ratios = self.moved
            record = replace(
                record,
                alpha_lr=self.alpha_lr,
                task_loss=None if task is None else mean(task)[0],
                budget_loss=budget.item(),
                ratios=tuple(ratios.tolist()),
            )
        return record


class Log:
    """Reads the records from the device now and then; if one is not finite, the last good state comes back."""

    def __init__(self, net: Supernet, every: int, on_record: Callable[[SearchRecord], None], world: World) -> None:
        self.net, self.every, self.on_record, self.world = net, every, on_record, world
        self.show: Update = lambda done, text="": None
        self.waiting: list[Step] = []
        self.begin([])

    def begin(self, earlier: list[SearchRecord]) -> None:
        """Go on after these records, from the state that the supernet now has."""
        self.records, self.read = earlier, time.monotonic()
        self.good = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def add(self, step: Step) -> None:
        """Keep what a step saw."""
        self.waiting.append(step)
        if len(self.waiting) == self.every or overdue(self.read, self.net.alpha.device):
            self.flush()

    def flush(self) -> None:
        """Read what waits, and check that it is finite."""
        read, self.waiting = [step.read(self.world) for step in self.waiting], []
        for record in read:
            stages = {"stage 1, the weights": record.weight_losses or ()}
            stages["stage 2, the alphas"] = (record.task_loss or 0.0, record.budget_loss or 0.0)
            for stage, losses in stages.items():
                for loss in losses:
                    if not math.isfinite(loss):
                        self._stop(f"The loss is {loss} in {stage}, at step {record.step} (epoch {record.epoch})")
        if read and not torch.stack([tensor.isfinite().all() for tensor in self.net.parameters()]).all().item():
            self._stop(f"Weights or alphas are not finite after step {read[-1].step}")
        self.records += read
        self.begin(self.records)
        for record in read:
            self.on_record(record)
        if read:
            self.show(read[-1].step + 1, read[-1].text)

    @torch.no_grad()
    def _stop(self, what: str) -> NoReturn:
        for name, tensor in self.net.state_dict().items():
            tensor.copy_(self.good[name])
        last = f"after step {self.records[-1].step}" if self.records else "before the first step"
        raise TrainingError(
            f"{what}; the supernet is as it was {last}. Lower lr (a trained model needs a small one) or alpha_lr, or "
            "look at the data."
        )
