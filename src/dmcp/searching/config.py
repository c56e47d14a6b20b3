"""Settings, records and result of a search."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

from dmcp.batches import check_seed
from dmcp.budget import Budget
from dmcp.errors import DmcpError, TrainingError, WidthsError
from dmcp.markov import CHAIN, Process, process_of
from dmcp.tracing.graph import ChannelGraph
from dmcp.widths import ChannelSpace, Widths


class Sampling(StrEnum):
    """How the random sub-networks of a weight step are drawn."""

    MARKOV = "markov"  # from the alphas: the paper's variant of the sandwich rule
    UNIFORM = "uniform"  # every group border of a space alike, each space by itself
    SANDWICH = "sandwich"  # one ratio for all spaces: the original sandwich rule


Bound = int | Mapping[str, int]  # channels: of every space, or of modules or spaces by name; "" is the whole network

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


class Init(StrEnum):
    """Where the alphas start."""

    TARGET = "target"  # one constant for which the expected cost is the budget
    ZERO = "zero"  # every transition at one half: far below any budget
    RANDOM = "random"  # standard normal
    GIVEN = "given"  # those that the supernet has


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Settings of a search, for a batch of 1024 as in the paper.

    The defaults of tolerance, groups (for ResNet; 15 for MobileNetV2), epochs, warmup, draw, budget_weight, lr and
    min_lr are the paper's. Those of warmup_draw, distil, init, label_smoothing, alpha_lr and alpha_min_lr are not, and
    it names none for subnets, the momenta and weight_decay: see the last table of docs/paper_map.md.
    """

    budget: int | float | str | Budget  # what the result may cost: 0.5, "50%", "211M", "params:2M", "50%,params:2M"
    tolerance: float = 0.95  # share of the budget below which the expected cost is pushed up (gamma of eq. 13)
    groups: int = 10  # groups that each space is divided into; the supernet must be made with as many
    align: int = 1  # real channels are multiples of this; the supernet must be made with the same
    min_channels: Bound = field(
        default_factory=dict
    )  # least channels: of all spaces, or {name of module or space: number}
    max_channels: Bound = field(
        default_factory=dict
    )  # most channels: of all spaces, or {name of module or space: number}
    epochs: int = 40  # passes over the data, the warm-up among them
    warmup: float = 0.5  # share of the epochs that train weights only; 0 for a pre-trained model
    sort: bool = False  # whether channels are first ordered by the norm of their weights, for a pre-trained model
    subnets: int = 2  # random sub-networks in each weight step, besides the largest and the smallest
    sampling: Sampling = Sampling.MARKOV  # how they are drawn after the warm-up
    warmup_sampling: Sampling = Sampling.UNIFORM  # how they are drawn in the warm-up
    distill: bool = True  # whether sub-networks imitate the largest one instead of learning the labels
    init: Init = Init.TARGET  # where the alphas start
    independent: bool = False  # whether each group is kept by itself (Bernoulli), not along the chain; an ablation
    task_loss: bool = True  # whether the task loss moves the alphas, and not the budget alone
    budget_weight: float = 0.1  # weight of the budget loss (lambda of eq. 15)
    train_weights: bool = True  # whether the weights still move after the warm-up
    lr: float = 0.2  # learning rate of the weights at the start, at `reference_batch` samples in a step
    min_lr: float = 0.02  # the same at the end of its cosine
    reference_batch: int = 1024  # other numbers of samples in a step scale lr and min_lr linearly
    momentum: float = 0.9  # Nesterov momentum of the weights
    weight_decay: float = 1e-4  # of the weights; none on norms and biases
    label_smoothing: float = 0.1  # of the default loss
    alpha_lr: float = 0.5  # learning rate of the alphas after the warm-up; not scaled
    alpha_min_lr: float = 0.1  # the same at the end of its cosine
    alpha_momentum: float = 0.9  # Nesterov momentum of the alphas; they have no weight decay
    accumulate: int = 1  # batches whose gradients make one step
    log_every: int = 50  # steps after which records are read from the device, and a loss that is not finite is noticed
    seed: int = 0  # of everything random in the search

    def __post_init__(self) -> None:
        for name, kind in (("sampling", Sampling), ("warmup_sampling", Sampling), ("init", Init)):
            value = getattr(self, name)
            if value not in list(kind):
                raise TrainingError(f"{name} must be one of {', '.join(kind)}, not {value!r}.")
            object.__setattr__(self, name, kind(value))
        for name, least in _INTS.items():
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise TrainingError(f"{name} must be an int of at least {least}, not {getattr(self, name)!r}.")
        check_seed(self.seed)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TrainingError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        check_bound("min_channels", self.min_channels)
        check_bound("max_channels", self.max_channels)
        for name, (low, high) in _FLOATS.items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or not low <= value < high:  # also refuses NaN
                raise TrainingError(f"{name} must be a number from {low} to below {high}, not {value!r}.")
        if not self.tolerance:
            raise TrainingError("tolerance must be above 0, like 0.95: at 0 nothing pushes the expected cost up.")
        if self.min_lr > self.lr or self.alpha_min_lr > self.alpha_lr:
            raise TrainingError("A learning rate falls: min_lr must not be above lr, nor alpha_min_lr above alpha_lr.")
        if self.warmup_epochs == self.epochs:
            raise TrainingError(
                f"A warm-up of {self.warmup:.0%} leaves none of {self.epochs} epochs for the alphas: lower warmup."
            )
        if not self.task_loss and self.budget_weight == 0:
            raise TrainingError("Nothing moves the alphas: set task_loss=True or a budget_weight above 0.")

    @property
    def warmup_epochs(self) -> int:
        """Epochs that train weights only."""
        return round(self.epochs * self.warmup)

    @property
    def process(self) -> Process:
        """What the alphas mean."""
        return process_of(self.independent)


_INTS = {  # the least that each may be
    "groups": 1,
    "align": 1,
    "epochs": 1,
    "subnets": 0,
    "reference_batch": 1,
    "accumulate": 1,
    "log_every": 1,
}
_FLAGS = ("sort", "distill", "independent", "task_loss", "train_weights")
_FLOATS = {  # from, to below
    "tolerance": (0, 1),
    "warmup": (0, 1),
    "budget_weight": (0, math.inf),
    "lr": (0, math.inf),
    "min_lr": (0, math.inf),
    "momentum": (0, 1),
    "weight_decay": (0, math.inf),
    "label_smoothing": (0, 1),
    "alpha_lr": (0, math.inf),
    "alpha_min_lr": (0, math.inf),
    "alpha_momentum": (0, 1),
}


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
