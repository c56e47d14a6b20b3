"""What is cut for each budget: a search or another method chooses widths, and again where they turn out to be slow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from dmcp.budgets import LATENCY, Budget, limits_latency
from dmcp.compare.methods import chooser, find_method
from dmcp.compare.problem import Choice, Problem
from dmcp.cutting import cut, highest_scores
from dmcp.errors import warn
from dmcp.exporting.latency_limit import choose_within_latency
from dmcp.feasibility import latency_folder, reachable
from dmcp.job import PruneJob, race_of
from dmcp.retraining import TrainedNetworks, train_all
from dmcp.runs.records import UNIFORM, UNPRUNED, LatencyOutcome, WithinOutcome
from dmcp.runtime.batches import device_of
from dmcp.runtime.distributed import current
from dmcp.searching import search as searching
from dmcp.searching.budget import cheapest_between
from dmcp.searching.importance import Scores, first_samples, scores_of
from dmcp.searching.records import SearchResult
from dmcp.searching.sampling import expected, filled, uniform
from dmcp.searching.search import SEARCH
from dmcp.searching.supernet import Supernet
from dmcp.settings import Retrain
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import unwrap
from dmcp.tracing.widths import Widths
from dmcp.training.reconstruction import SAMPLES, refitted
from dmcp.within import choose_within

Picked = TypeVar("Picked")


# where cuts come from


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """The unpruned network that the cuts, and those of baselines, are made from."""

    model: nn.Module
    graph: ChannelGraph
    searched: bool  # whether its first channels are the important ones, as after a search
    samples: Sequence[Any] = ()  # that its channels are scored on, and the weights of its cuts refitted

    @functools.cached_property
    def scores(self) -> Scores:
        """A score for each channel."""
        return scores_of(self.model, self.graph, self.samples)

    def cut(self, widths: Widths) -> nn.Module:
        """A network of these widths with the channels that matter most."""
        if self.searched:
            return cut(self.model, self.graph, widths)
        kept = highest_scores(self.graph, widths, self.scores)
        model = refitted(self.model, self.graph, kept, self.samples)
        return cut(model, self.graph, kept)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCut:
    """What is cut for one budget."""

    choice: Choice  # the widths, and the channels that are kept
    source: Source  # the network that the choice was made for
    budget: Budget  # with the latency limit that was used in the end
    latency: LatencyOutcome | None = None

    @property
    def widths(self) -> Widths:
        """The channels of each space."""
        return self.choice.widths

    def cut(self, graph: ChannelGraph) -> nn.Module:
        """A cut network with the weights of the channels that are kept."""
        if self.choice.model is None:  # the method chose widths only
            return self.source.cut(self.widths)
        return cut(self.choice.model, graph, self.choice.kept)


@dataclass(frozen=True, kw_only=True, eq=False)
class Selector:
    """What a search or a method gives: the choice for any budget follows from it."""

    source: Source
    choose: Callable[[Budget], Choice]
    search: SearchResult | None = None
    trained: TrainedNetworks = TrainedNetworks()  # what had to be trained for it


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """What is cut for each budget, and where that comes from."""

    cuts: Mapping[str, PlannedCut]  # by the name of the budget
    selector: Selector
    within: WithinOutcome | None = None  # how the budget was chosen


# a search, or another method


def search_widths(job: PruneJob) -> Selector:
    """One search. The expected widths are scaled to each budget, which may be another one than that of the search."""
    net = Supernet(job.model, job.graph, job.search.groups, job.search.align)
    result = searching.search(
        net,
        job.loaders.search,
        job.search,
        arch_loader=job.loaders.arch,
        task=job.task,
        runtime=job.runtime.stage(SEARCH),
    )

    def choose(budget: Budget) -> Choice:
        widths = expected(replace(result, budget=budget))
        return Choice(widths=widths, kept=widths, model=net.model)

    source = Source(model=net.model, graph=job.graph, searched=True)
    return Selector(source=source, choose=choose, search=result)


def choose_widths(job: PruneJob, *, trained: bool) -> Selector:
    """What a method without a search chooses. If it ranks trained weights, an untrained model is trained first."""
    model = unwrap(job.model)
    # Before a training draws any: a resumed run has none.
    samples = first_samples(job.loaders.search, device_of(model), SAMPLES)
    pretrained = TrainedNetworks()
    if find_method(job.method).trained and not trained:
        if job.retraining.kind is Retrain.NONE:
            warn(f"The network does not count as trained: {job.method} ranks the weights that it has.")
        else:
            pretrained = train_all(
                model,
                job.graph,
                {UNPRUNED: job.graph.full},
                job.loaders.final,
                job.retraining,
                task=job.task,
                runtime=job.runtime,
            )
            model = pretrained.networks[UNPRUNED]

    source = Source(model=model, graph=job.graph, searched=False, samples=samples)
    low, high = reachable(job.graph, job.search)
    first_budget = next(iter(job.budgets.values()))
    problem = Problem(
        model=model,
        graph=job.graph,
        loader=job.loaders.search,
        held_out=job.loaders.arch or job.loaders.search,
        budget=first_budget,
        recipe=job.retraining.config,
        min_widths=low,
        max_widths=high,
        align=job.search.align,
        score=lambda: source.scores,
        samples=samples,
        seed=job.search.seed,
        task=job.task,
        runtime=job.runtime,
    )
    chooses_once = len(job.budgets) == 1 and not limits_latency(first_budget) and job.within is None
    choose = chooser(job.method, problem, chooses_once)
    return Selector(source=source, choose=choose, trained=pretrained)


# the choice for each budget


def plan_cuts(job: PruneJob, selector: Selector) -> dict[str, PlannedCut]:
    """The cut for each budget of the job."""
    cuts: dict[str, PlannedCut] = {}
    for name, budget in job.budgets.items():
        folder_name = name if len(job.budgets) > 1 else ""
        cuts[name] = _plan_cut(job, selector, budget, folder_name)
        _warn_if_slow(cuts[name])
    return cuts


def _plan_cut(job: PruneJob, selector: Selector, budget: Budget, folder_name: str) -> PlannedCut:
    """The cut for one budget. A network that is slower or faster than its latency limit is chosen again."""

    def plan_cut(budget: Budget) -> PlannedCut:
        return PlannedCut(choice=selector.choose(budget), source=selector.source, budget=budget)

    def cut_to_be_measured(budget: Budget) -> tuple[PlannedCut, Widths, nn.Module]:
        planned = plan_cut(budget)
        return planned, planned.widths, planned.cut(job.graph)

    if not limits_latency(budget):
        return plan_cut(budget)
    planned, outcome = _choose_within_latency(job, cut_to_be_measured, budget, folder_name)
    return replace(planned, latency=outcome)


def _warn_if_slow(planned: PlannedCut) -> None:
    """Warn of a network that takes more time than its budget allows."""
    outcome = planned.latency
    if outcome is not None and outcome.warning and current().first:
        warn(outcome.warning)


def uniform_widths(job: PruneJob, source: nn.Module, budget: str) -> Widths:
    """Uniform widths for one of the budgets; of a latency limit as measured, like those that are searched."""
    low, high = reachable(job.graph, job.search)

    def choose(limited: Budget) -> Widths:
        return uniform(job.graph, limited, low, job.search.align, filled(job.search), high)

    def cut_to_be_measured(limited: Budget) -> tuple[Widths, Widths, nn.Module]:
        widths = choose(limited)
        return widths, widths, cut(source, job.graph, widths)

    if not limits_latency(job.budgets[budget]):
        return choose(job.budgets[budget])
    widths, _ = _choose_within_latency(job, cut_to_be_measured, job.budgets[budget], job.row(UNIFORM, budget))
    return widths


def _choose_within_latency(
    job: PruneJob, pick: Callable[[Budget], tuple[Picked, Widths, nn.Module]], budget: Budget, folder: str
) -> tuple[Picked, LatencyOutcome]:
    """Pick for a budget, and again as long as what is measured is not inside the limit or far below it."""
    lowest, highest = reachable(job.graph, job.search)
    fastest = cheapest_between(budget, job.graph, lowest, highest, job.search.align)
    return choose_within_latency(
        pick,
        budget,
        job.graph,
        lowest=job.graph.cost(LATENCY, fastest),
        highest=job.graph.cost(LATENCY, highest),
        model=job.model,
        timer=job.timer,
        folder=latency_folder(job.runtime, folder),
    )


# the choice of the budget itself


def choose_budget(
    job: PruneJob, selector: Selector, within: float
) -> tuple[PruneJob, dict[str, PlannedCut], WithinOutcome]:
    """The job with the smallest budget whose network loses at most so much, its cut, and how that was decided."""
    (searched,) = job.budgets.values()
    (kind,) = searched.kinds
    lowest, highest = reachable(job.graph, job.search)
    cheapest = cheapest_between(searched, job.graph, lowest, highest, job.search.align)

    def plan(budget: Budget) -> PlannedCut:
        return _plan_cut(job, selector, budget, budget.file_name)

    planned, budget, outcome = choose_within(
        within,
        plan,
        race_of(job),
        model=job.model,
        graph=job.graph,
        kind=kind,
        reachable=(cheapest, highest),
        metric=job.task.metric,
        trains=job.retraining.kind is not Retrain.NONE,
    )
    _warn_if_slow(planned)
    return replace(job, budgets={budget.file_name: budget}), {budget.file_name: planned}, outcome
