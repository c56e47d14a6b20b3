"""Within so many points of the unpruned network: the smallest budget, found by races on held-out images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from torch import nn

from dmcp.budgets import MACS, Budget
from dmcp.cutting import cut
from dmcp.errors import BudgetError
from dmcp.results import standard_error
from dmcp.retraining import Retraining, train_all
from dmcp.runs.records import UNPRUNED, Candidate, WithinOutcome
from dmcp.runtime.batches import Loader, device_of, length_of
from dmcp.runtime.checkpoint import seeded, untouched
from dmcp.runtime.distributed import current
from dmcp.searching.budget import cheapest_between, parse_budget
from dmcp.settings import ResolvedSearchConfig, ResolvedTrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import unwrap
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime, Task, evaluate_counted
from dmcp.training.losses import LowerIsBetter, Metric

RACES = 4  # budgets that are tried; the unpruned network runs the same race once
_PART = 5  # a race has this fraction of the steps of the final training
_ROUNDING = 1e-9  # differences of two accuracies are not exact: 0.995 - 0.99 is a little more than 0.005


class Plan(Protocol):
    """What would be cut for a budget."""

    @property
    def widths(self) -> Widths: ...

    def cut(self, graph: ChannelGraph) -> nn.Module: ...


AnyPlan = TypeVar("AnyPlan", bound=Plan)


class Score(NamedTuple):
    """The metric of a network on the held-out images."""

    value: float
    samples: int  # 0 if their number is unknown


def choose_within(
    points: float,
    plan: Callable[[Budget], AnyPlan],
    race: Callable[[str, Widths, nn.Module], Score],
    *,
    model: nn.Module,
    graph: ChannelGraph,
    kind: str,
    reachable: tuple[Widths, Widths],
    metric: Metric | None,
    trains: bool = True,
) -> tuple[AnyPlan, Budget, WithinOutcome]:
    """Find the smallest budget whose network loses at most so many points, by bisection.

    A loss is the difference between two networks after the same race: the unpruned one, with the weights of the model,
    and the one that is cut to the budget. The races train both on the same images, and the metric is that of the
    held-out ones. Bisection takes for granted that a larger network is not worse.

    trains: whether a race trains its network, and does not only calibrate it.
    """
    start = time.monotonic()
    unpruned = race(race_name(0), graph.full, cut(unwrap(model), graph, graph.full))

    # Budgets in percent of the unpruned network's cost. The smallest and the largest reachable one are not tried.
    lowest, highest = (100 * graph.cost(kind, widths) / graph.cost(kind) for widths in reachable)
    loses_too_much = math.floor(lowest)
    loses_little = math.ceil(highest)
    candidates: list[Candidate] = []
    best: tuple[AnyPlan, Budget] | None = None
    for number in range(1, RACES + 1):
        percent = (loses_too_much + loses_little) // 2
        if percent <= loses_too_much:
            break
        budget = parse_budget(budget_text(kind, percent), graph)
        planned = plan(budget)
        score = race(race_name(number), planned.widths, planned.cut(graph))
        loss = points_lost(score.value, unpruned.value, metric)
        candidates.append(Candidate(budget=budget.text, score=score.value, loss=loss))
        if loss <= points + _ROUNDING:
            loses_little = percent
            best = (planned, budget)
        else:
            loses_too_much = percent

    outcome = WithinOutcome(
        asked=points,
        budget=best[1].text if best else UNPRUNED,
        unpruned=unpruned.value,
        candidates=tuple(candidates),
        samples=unpruned.samples,
        unit=unit_of(metric),
        error=_error_of(unpruned, metric),
        trains=trains,
        seconds=time.monotonic() - start,
    )
    if best is None:
        remedy = "train the pruned network"
        if trains:
            remedy = "train longer (epochs)"
        raise BudgetError(
            f"No budget was found within {outcome.show(points)} {outcome.evidence}. Allow a larger loss, or {remedy}."
        )
    return *best, outcome


def with_reachable_start(
    search: ResolvedSearchConfig, graph: ChannelGraph, reachable: tuple[Widths, Widths]
) -> ResolvedSearchConfig:
    """The settings with a budget that the search can begin with: the middle of what is reachable, if theirs is not."""
    budget = parse_budget(search.budget, graph)
    (limit,) = budget.limits
    smallest, largest = reachable
    lowest = graph.cost(limit.kind, cheapest_between(budget, graph, smallest, largest, search.align))
    highest = graph.cost(limit.kind, largest)
    if lowest <= limit.target <= highest:
        return search
    middle = round(100 * (lowest + highest) / 2 / graph.cost(limit.kind))
    return replace(search, budget=budget_text(limit.kind, middle))


def race_name(number: int) -> str:
    """The stage of a race; that of the unpruned network has the number 0."""
    return f"short training {number or UNPRUNED}"


def budget_text(kind: str, percent: int) -> str:
    """A share of the unpruned network's cost, as a person would write it."""
    return f"{percent}%" if kind == MACS else f"{kind}:{percent}%"


# the loss


def points_lost(score: float, unpruned: float, metric: Metric | None) -> float:
    """How much worse a score is than that of the unpruned network: in points of accuracy, or in the metric's unit."""
    loss = unpruned - score
    if isinstance(metric, LowerIsBetter):
        loss = -loss
    if metric is None:
        loss *= 100
    return loss


def unit_of(metric: Metric | None) -> str:
    """The unit of a loss: that of a metric of the user's own is unknown."""
    return "points" if metric is None else ""


def _error_of(score: Score, metric: Metric | None) -> float | None:
    if metric is not None or not score.samples:
        return None
    return 100 * standard_error(score.value, score.samples)


# the race


@dataclass(frozen=True, kw_only=True, eq=False)
class Race:
    """A training that is as the final one but short, and sees no held-out image; and the test on these images."""

    graph: ChannelGraph
    retraining: Retraining
    loader: Loader
    held_out: Loader
    task: Task
    runtime: Runtime

    def __call__(self, name: str, widths: Widths, network: nn.Module) -> Score:
        """Train a network in place, and test it."""
        train_all(
            network,
            self.graph,
            {name: widths},
            self.loader,
            self.retraining,
            cuts={name: network},
            task=self.task,
            runtime=self.runtime,
        )
        device = device_of(network)
        with untouched(self.held_out, device), seeded(self.retraining.config.seed, device, current()):
            return Score(*evaluate_counted(network, self.held_out, self.task.metric))


def race_epochs(config: ResolvedTrainConfig, final: Loader, loader: Loader) -> int:
    """The epochs of a race on this loader: a fraction of the steps of the final training."""
    steps = config.epochs * length_of(final) / _PART
    return max(1, round(steps / length_of(loader)))


def race_config(config: ResolvedTrainConfig, final: Loader, loader: Loader) -> ResolvedTrainConfig:
    """The settings of the final training, with a fraction of its steps and of its warm-up."""
    epochs = race_epochs(config, final, loader)
    return replace(config, epochs=epochs, warmup_epochs=config.warmup_epochs * epochs / config.epochs)
