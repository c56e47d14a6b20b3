"""What a pruning method gets and gives back."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dmcp.batches import Loader, check_parts, on_device, size_of
from dmcp.budget import Budget, check_reachable, spent_shares
from dmcp.calibration import kept_modes
from dmcp.checkpoint import Checkpointer
from dmcp.errors import BudgetError, DataError, TrainingError
from dmcp.losses import Loss, Metric, check_metric, whole_of
from dmcp.runtime.distributed import current
from dmcp.runtime.engine import ResolvedEngine
from dmcp.sampling import TOLERANCE, Options, uniform
from dmcp.searching.config import SearchRecord, SearchResult, extremes
from dmcp.searching.search import SEARCH
from dmcp.searching.subnets import chains
from dmcp.settings import Bound, Engine, TrainConfig
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph, Kept
from dmcp.training import Event, Runtime, StepRecord
from dmcp.widths import Widths

Told = StepRecord | SearchRecord | SearchResult | Mapping[str, Any]
Tell = Callable[[str, Told], None]  # (stage, what happened)


def silent(stage: str, record: Told) -> None:
    """Tell nobody."""


def samples_of(loader: Loader) -> int:
    """Samples in a pass over a loader, a smaller last batch counted as a whole one."""
    with torch.random.fork_rng([]):  # a loader that shuffles draws from it
        for batch in loader:
            return size_of(batch) * len(loader)
    raise DataError("The loader has no batches: is the batch larger than the data?")


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A network to be narrowed into a budget, with data to do it by."""

    model: nn.Module  # unpruned, on its device, with fresh weights; methods work on copies
    graph: ChannelGraph
    loader: Loader  # batches to train with
    held: Loader  # batches of other samples to choose by, always in the same order
    budget: Budget
    recipe: TrainConfig  # how networks are trained here; a method that trains takes its settings from it
    floor: Widths  # the least that a method may choose
    ceiling: Widths | None = None  # the most; None: whole spaces
    align: int = 1  # widths are multiples of this
    seed: int = 0  # of everything random in a method
    loss: Loss | None = None  # classification, unless given
    metric: Metric | None = None  # accuracy, unless given; more is better, unless it is a LowerIsBetter
    engine: Engine | None = None
    keep: Callable[[str], Checkpointer] | None = None  # of a stage
    tell: Tell = silent

    def runtime(self, stage: str) -> Runtime:
        """Engine, checkpoints and log of a stage; what a search has found is told for the stage "search" only."""

        def hear(event: Event) -> None:
            if not isinstance(event.record, SearchResult) or stage == SEARCH:
                self.tell(stage, event.record)

        return Runtime(engine=self.engine, checkpointer=self.keep and self.keep(stage), on_event=hear)

    def __post_init__(self) -> None:
        check_reachable(self.budget, self.graph, self.floor, self.ceiling)
        check_metric(self.metric, current())
        if self.metric is not None and whole_of(self.metric) is not None:
            check_parts(self.held, current())

    @property
    def most(self) -> Widths:
        """The widest structure that a method may choose."""
        return self.ceiling or self.graph.full

    @property
    def options(self) -> Options:
        """The widths that a method may choose."""
        return Options(self.graph, self.floor.tensor(), self.most.tensor(), self.align)

    def uniform(self) -> Widths:
        """One ratio for all spaces, as far as their least and most widths allow it."""
        return uniform(self.graph, self.budget, self.floor, self.align, max_channels=self.ceiling)


def ends_of(
    model: nn.Module, graph: ChannelGraph, groups: int, align: int, min_channels: Bound, max_channels: Bound
) -> tuple[Widths, Widths | None]:
    """The floor and the ceiling of a Problem, by what people have asked for; WidthsError where that cannot be."""
    net = Supernet(model, graph, groups, align)
    if not min_channels and not max_channels:
        return net.min_widths, None
    floor, ceiling = extremes(
        graph, chains(net, min_channels=min_channels, max_channels=max_channels, align=align).sizes
    )
    return floor, ceiling if max_channels else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A network that a method has trained before it knows any budget: one for all budgets."""

    state: Mapping[str, Tensor]  # by the names of its state dict
    sample_passes: int = 0  # samples run through a network for it, each sub-network counted


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What a method has chosen."""

    widths: Widths
    kept: Mapping[str, Kept]  # what is cut out of `model`: the widths themselves, or which channels
    model: nn.Module | None = None  # unpruned network that the channels were chosen in; None: any weights will do
    sample_passes: int = 0  # samples run through a network for this choice, each sub-network counted, without `prepare`

    def check(self, problem: Problem, tolerance: float = TOLERANCE) -> None:
        """BudgetError if the widths are outside the budget or their bounds, or leave too much of the budget unused.

        Too much is more than the tolerance allows, unless the network is too coarse to use more.
        """
        graph, widths = problem.graph, self.widths.tensor()
        share = spent_shares(problem.budget, graph, widths[None]).max().item()
        full = problem.uniform().tensor()
        reached = spent_shares(problem.budget, graph, full[None]).max().item()
        if not min(tolerance, reached) <= share <= 1:
            raise BudgetError(f"The method chose widths that cost {share:.1%} of the budget {problem.budget.text!r}.")
        for name, width in self.widths.items():
            if not problem.floor[name] <= width <= problem.most[name]:
                raise BudgetError(
                    f"The method chose widths that keep {width} channels of {name}, of which {problem.floor[name]} to "
                    f"{problem.most[name]} are allowed."
                )


def loaded(problem: Problem, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the problem's model with these weights."""
    model = copy.deepcopy(problem.model)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise TrainingError(
            f"The state is not one of this network: give that of the same architecture. {reason}"
        ) from None
    return model


def held_batches(problem: Problem, most: int | None, resolved: ResolvedEngine) -> list[Any]:
    """Held-out batches on the device, up to so many; one sample alone has no batch statistics."""
    found: list[Any] = []
    for batch in itertools.islice(problem.held, most):
        if size_of(batch) > 1:
            found.append(resolved.laid_out(on_device(batch, resolved.device)))
    if not found:
        raise DataError("There is nothing to judge structures by: give held-out batches of two samples or more.")
    return found


@contextlib.contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Eval mode, but for batch norms, which use the statistics of the batch and leave the learned ones alone.

    The learned ones fit the unpruned network, or mix all widths.
    """
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    before = [norm.track_running_stats for norm in norms]
    with kept_modes(model):
        model.eval()
        for norm in norms:
            norm.training, norm.track_running_stats = True, False
        try:
            yield
        finally:
            for norm, tracked in zip(norms, before, strict=True):
                norm.track_running_stats = tracked
