"""What a pruning method gets, and what it returns."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dmcp.budgets import Budget
from dmcp.errors import BudgetError, DataError, TrainingError
from dmcp.fields import check
from dmcp.runtime.batches import Loader, device_of, on_device, size_of
from dmcp.runtime.distributed import current
from dmcp.runtime.engine import ResolvedEngine, resolve
from dmcp.searching.allocation import widths_by_scores
from dmcp.searching.bounds import AllowedWidths
from dmcp.searching.budget import check_reachable, spent_shares
from dmcp.searching.importance import Scores
from dmcp.searching.rounding import FILLED, TOLERANCE, round_to_budget
from dmcp.searching.sampling import uniform
from dmcp.settings import Engine, ResolvedTrainConfig
from dmcp.tracing.graph import ChannelGraph, Kept
from dmcp.tracing.modules import kept_modes, modules_of, narrow, unwrap
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime, Task

CHOOSING = "choosing"  # the stage in which a method trains and tries out networks; that of DMCP is "search"


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Base class for the settings of a method; the ranges of the fields are checked."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A network to be narrowed until it is inside a budget, and the data for it."""

    model: nn.Module  # unpruned, on its device, with fresh weights; methods work on copies
    graph: ChannelGraph
    loader: Loader  # batches to train on
    held_out: Loader  # batches of other samples to choose by, in a random order that is always the same
    budget: Budget
    recipe: ResolvedTrainConfig  # how networks are trained; a method that trains takes its settings from it
    min_widths: Widths
    max_widths: Widths | None = None  # None: the full widths
    align: int | None = None  # widths are multiples of this
    score: Callable[[], Scores] | None = None  # of the channels of the model, computed once for all budgets
    samples: Sequence[Any] = ()  # inputs of the first samples, if a loader has been asked for them already
    seed: int = 0  # for all random numbers of a method
    task: Task = Task()
    runtime: Runtime = Runtime()  # a method that trains takes runtime.stage(CHOOSING)

    def __post_init__(self) -> None:
        check_reachable(self.budget, self.graph, self.min_widths, self.max_widths, self.align)

    @property
    def widest(self) -> Widths:
        """The largest widths that a method may choose."""
        return self.max_widths or self.graph.full

    @property
    def options(self) -> AllowedWidths:
        """All widths that a method may choose."""
        return AllowedWidths(self.graph, self.min_widths.tensor(), self.widest.tensor(), self.align)

    @property
    def bounds(self) -> dict[str, Any]:
        """The bounds of the widths as settings of a search."""
        return {"align": self.align, "min_channels": dict(self.min_widths), "max_channels": dict(self.max_widths or {})}

    def uniform(self) -> Widths:
        """The same ratio for all spaces, as far as their bounds allow it."""
        return uniform(self.graph, self.budget, self.min_widths, self.align, max_channels=self.max_widths)

    def by_scores(self, scores: Scores, uniform_widths: Widths) -> Widths:
        """Widths that are larger where channels have larger scores."""
        return widths_by_scores(self.graph, self.budget, scores, uniform_widths, self.options, FILLED)

    def round_to_budget(self, wish: Tensor) -> Widths:
        """The allowed widths nearest to these that use up the budget. (S,)"""
        return round_to_budget(self.graph, self.budget, wish.double(), self.options, FILLED)

    def shares(self, widths: Tensor) -> Tensor:
        """The cost of widths as a share of the budget, by the limit that is closest. (N, S) -> (N,)"""
        return spent_shares(self.budget, self.graph, widths).amax(dim=1)

    def log(self, record: Mapping[str, Any]) -> None:
        """Report progress. A method calls this often: it raises StoppedError once the run is to stop."""
        self.runtime.emit(CHOOSING, 0, record)
        if self.runtime.checkpointer is not None:
            self.runtime.checkpointer.stop_if_requested(current())


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A network that a method has trained before it knows the budget: one for all budgets."""

    state: Mapping[str, Tensor]
    sample_passes: int = 0  # samples that were run through a network, each sub-network counted


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """The widths and channels that a method has chosen."""

    widths: Widths
    kept: Mapping[str, Kept]  # what is cut out of `model`: a width (the first channels), or a list of channels
    model: nn.Module | None = None  # the unpruned network whose channels were chosen; None if only widths were
    sample_passes: int = 0  # samples run through a network for this choice, each sub-network counted, without `prepare`

    def check(self, problem: Problem) -> None:
        """BudgetError for widths that are out of bounds or over the budget, or leave too much of it unused."""
        candidates = torch.stack([self.widths.tensor(), problem.uniform().tensor()])
        share, uniform_share = problem.shares(candidates).tolist()
        least = min(TOLERANCE, uniform_share)  # where widths come in large steps, nothing may be nearer than uniform
        if not least <= share <= 1:
            raise BudgetError(f"The widths cost {share:.1%} of the budget {problem.budget.text!r}.")
        for name, width in self.widths.items():
            low = problem.min_widths[name]
            high = problem.widest[name]
            if not low <= width <= high:
                raise BudgetError(f"The widths have {width} channels in {name}, where {low} to {high} are allowed.")
            kept = self.kept.get(name, problem.graph.full[name])
            if isinstance(kept, int):
                count = kept
            else:
                count = len(kept)
            if count != width:
                raise TrainingError(f"The width of {name} is {width}, but {count} channels are kept.")


def samples_of(loader: Loader) -> int:
    """The number of samples in a pass over a loader; a smaller last batch counts as a full one."""
    with torch.random.fork_rng([]):  # a loader that shuffles takes random numbers
        return size_of(next(iter(loader))) * len(loader)


def loaded(problem: Problem, state: Mapping[str, Tensor] | None) -> nn.Module:
    """A copy of the problem's model with these weights, or with its own if there are none."""
    model = narrow(unwrap(problem.model), {}, {})
    if state is not None:
        model.load_state_dict(dict(state))
    return model


@contextlib.contextmanager
def held_out_batches(
    problem: Problem, model: nn.Module, most: int | None, plain: bool
) -> Iterator[tuple[list[Any], ResolvedEngine]]:
    """At most `most` held-out batches, on the device; while entered, the model is ready to be tried on them.

    It is in eval mode, but its BatchNorms use the statistics of each batch, since the learned ones are for other
    widths. plain: whether the loss is the default one, so that trials may become CUDA graphs.
    """
    engine = resolve(problem.runtime.engine or Engine(), device_of(model), capturable=plain)
    with engine.running(model), kept_modes(model), contextlib.ExitStack() as tracking:
        model.eval()
        for norm in modules_of(model):
            if isinstance(norm, _BatchNorm):
                tracking.callback(setattr, norm, "track_running_stats", norm.track_running_stats)
                norm.training = True
                norm.track_running_stats = False
        batches: list[Any] = []
        for batch in itertools.islice(problem.held_out, most):
            if size_of(batch) > 1:  # a single sample has no batch statistics
                batches.append(engine.laid_out(on_device(batch, engine.device)))
        if not batches:
            raise DataError(
                "There are no held-out images to compare networks on: hold out batches of at least two samples."
            )
        yield batches, engine
