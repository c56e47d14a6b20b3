"""What a pruning method gets and gives back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dmcp.budgets import Budget
from dmcp.errors import BudgetError, DataError, TrainingError
from dmcp.runtime.batches import Loader, device_of, on_device, size_of
from dmcp.runtime.distributed import current
from dmcp.runtime.engine import ResolvedEngine, resolve
from dmcp.searching.budget import check_reachable, spent_shares
from dmcp.searching.sampling import FILLED, TOLERANCE, Options, fit, uniform
from dmcp.settings import Engine, TrainConfig, check
from dmcp.tracing.graph import ChannelGraph, Kept
from dmcp.tracing.modules import kept_modes, modules_of, narrow, unwrap
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime, Task

CHOOSING = "choosing"  # the stage of what a method trains and tries; that of DMCP is called search


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a method, by themselves none; their ranges are checked when they are made."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A network to be narrowed into a budget, with data to do it by."""

    model: nn.Module  # unpruned, on its device, with fresh weights; methods work on copies
    graph: ChannelGraph
    loader: Loader  # batches to train with
    held_out: Loader  # batches of other samples to choose by, in a random order that is always the same
    budget: Budget
    recipe: TrainConfig  # how networks are trained here; a method that trains takes its settings from it
    min_widths: Widths
    max_widths: Widths | None = None  # None: the full widths
    align: int | None = None  # widths are multiples of this
    seed: int = 0  # of everything random in a method
    task: Task = Task()
    runtime: Runtime = Runtime()  # runtime.stage(CHOOSING) is for the training of a method

    def __post_init__(self) -> None:
        check_reachable(self.budget, self.graph, self.min_widths, self.max_widths)

    @property
    def widest(self) -> Widths:
        """The widest network that a method may choose."""
        return self.max_widths or self.graph.full

    @property
    def options(self) -> Options:
        """The widths that a method may choose."""
        return Options(self.graph, self.min_widths.tensor(), self.widest.tensor(), self.align)

    @property
    def bounds(self) -> dict[str, Any]:
        """The same as settings of a search."""
        return {"align": self.align, "min_channels": dict(self.min_widths), "max_channels": dict(self.max_widths or {})}

    def uniform(self) -> Widths:
        """One ratio for all spaces, as far as their bounds allow it."""
        return uniform(self.graph, self.budget, self.min_widths, self.align, max_channels=self.max_widths)

    def fit(self, wish: Tensor) -> Widths:
        """The allowed widths nearest to the wished ones that use the budget. (S,)"""
        return fit(self.graph, self.budget, wish.double(), self.options, FILLED)

    def shares(self, widths: Tensor) -> Tensor:
        """Cost / target of the limit that is used most. (N, S) -> (N,)"""
        return spent_shares(self.budget, self.graph, widths).amax(dim=1)

    def log(self, record: Mapping[str, Any]) -> None:
        """Report how the choice goes on; a method calls it often, since StoppedError comes from here."""
        self.runtime.emit(CHOOSING, 0, record)
        if self.runtime.checkpointer is not None:
            self.runtime.checkpointer.stop_if_requested(current())


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A network that a method has trained before it knows any budget: one for all budgets."""

    state: Mapping[str, Tensor]
    sample_passes: int = 0  # samples run through a network for it, each sub-network counted


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What a method has chosen."""

    widths: Widths
    kept: Mapping[str, Kept]  # what is cut out of `model`: the widths themselves, or which channels
    model: nn.Module | None = None  # unpruned network that the channels were chosen in; None: any weights will do
    sample_passes: int = 0  # samples run through a network for this choice, each sub-network counted, without `prepare`

    def check(self, problem: Problem) -> None:
        """BudgetError for widths outside the budget or their bounds, or that leave more of it unused than they must."""
        share, reached = problem.shares(torch.stack([self.widths.tensor(), problem.uniform().tensor()])).tolist()
        if not min(TOLERANCE, reached) <= share <= 1:
            raise BudgetError(f"The widths cost {share:.1%} of the budget {problem.budget.text!r}.")
        for name, width in self.widths.items():
            low, high = problem.min_widths[name], problem.widest[name]
            kept = self.kept.get(name, problem.graph.full[name])
            if not low <= width <= high:
                raise BudgetError(f"The widths have {width} channels in {name}, where {low} to {high} are allowed.")
            if (kept if isinstance(kept, int) else len(kept)) != width:
                raise TrainingError(f"The width of {name} is {width}, but other than so many channels are kept.")


def samples_of(loader: Loader) -> int:
    """Samples in a pass over a loader, a smaller last batch counted as a full one."""
    with torch.random.fork_rng([]):  # a loader that shuffles draws from it
        return size_of(next(iter(loader))) * len(loader)


def loaded(problem: Problem, state: Mapping[str, Tensor] | None) -> nn.Module:
    """A copy of the problem's model with these weights; None: with its own."""
    model = narrow(unwrap(problem.model), {}, {})
    if state is not None:
        model.load_state_dict(dict(state))
    return model


@contextlib.contextmanager
def held_out_batches(
    problem: Problem, model: nn.Module, most: int | None, plain: bool
) -> Iterator[tuple[list[Any], ResolvedEngine]]:
    """Held-out batches, up to so many, on the device; while entered, the model is ready to be tried on them.

    It is in eval mode, but BatchNorms use the statistics of the batch: the learned ones fit other widths.
    """
    resolved = resolve(problem.runtime.engine or Engine(), device_of(model), capturable=plain)
    with resolved.running(model), kept_modes(model), contextlib.ExitStack() as undo:
        model.eval()
        for norm in (part for part in modules_of(model) if isinstance(part, _BatchNorm)):
            undo.callback(setattr, norm, "track_running_stats", norm.track_running_stats)
            norm.training, norm.track_running_stats = True, False
        several = (batch for batch in itertools.islice(problem.held_out, most) if size_of(batch) > 1)
        batches = [resolved.laid_out(on_device(batch, resolved.device)) for batch in several]
        if not batches:  # one sample alone has no batch statistics
            raise DataError("There is nothing to judge networks by: give held-out batches of two samples or more.")
        yield batches, resolved
