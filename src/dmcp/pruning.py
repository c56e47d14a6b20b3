"""prune: search, cut, train and test, for one budget or several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Annotated, Any, TypeVar

from torch import nn

from dmcp.arguments import Range, checked
from dmcp.budgets import LATENCY, Budget, limits_latency
from dmcp.compare.methods import chooser, find_method
from dmcp.compare.problem import Choice, Problem
from dmcp.cutting import cut, with_frozen
from dmcp.defaults import resolve_training
from dmcp.errors import TrainingError, WidthsError, warn
from dmcp.exporting.latency import Latency
from dmcp.exporting.latency_limit import choose_within_latency
from dmcp.exporting.timing import Measure, Timer
from dmcp.feasibility import check_budget, latency_folder, parse_budgets, reachable, with_latency
from dmcp.request import (
    Loaders,
    Spec,
    choose_baselines,
    choose_teacher,
    loaders_of_rows,
    read_request,
    resolve_settings,
    warn_of_teacher,
)
from dmcp.results import PruneResult, measure_networks, milliseconds, unknown_scores
from dmcp.retraining import (
    Retraining,
    TrainedNetworks,
    calibrated,
    describe_origin,
    describe_teacher,
    given_networks,
    train_all,
)
from dmcp.runs.records import CUT, DMCP, ORIGINAL, TEACHER, UNIFORM, UNPRUNED, LatencyOutcome, Row, WithinOutcome
from dmcp.runtime import progress
from dmcp.runtime.batches import Loader, device_of, length_of
from dmcp.runtime.checkpoint import digest_of_loader, plain_settings
from dmcp.runtime.distributed import current
from dmcp.runtime.progress import phase, plan, shown
from dmcp.searching import search as searching
from dmcp.searching.bounds import AllowedWidths
from dmcp.searching.budget import cheapest_widths
from dmcp.searching.importance import Scores, first_samples, scores_of
from dmcp.searching.records import SearchResult
from dmcp.searching.sampling import expected, filled, uniform
from dmcp.searching.search import SEARCH
from dmcp.searching.subnets import sort_channels
from dmcp.searching.supernet import Supernet
from dmcp.settings import AUTO, Distill, Engine, ResolvedSearchConfig, Retrain, SearchConfig, TrainConfig
from dmcp.speed import Speed, measure_speeds
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import unwrap, without_autocast
from dmcp.tracing.trace import trace
from dmcp.tracing.verification import verify
from dmcp.tracing.widths import Widths, fingerprint
from dmcp.training.loop import Runtime, Task
from dmcp.training.losses import MetricWarning
from dmcp.training.optimizer import has_batch_norms
from dmcp.training.preflight import classes_of, first_two, preflight
from dmcp.training.trained import is_trained
from dmcp.within import RACES, Race, choose_within, race_config, race_name, with_reachable_start

Picked = TypeVar("Picked")
_SHARED_ROWS = (ORIGINAL, TEACHER, UNPRUNED)  # rows that all budgets share
_FORWARD = 1 / 3  # the work of a forward pass, as a share of a training step


@checked
@shown
@without_autocast
def prune(
    model: nn.Module,
    loader: Loader | Loaders,
    val_loader: Loader,
    budget: Spec | Sequence[Spec] | None = None,
    *,
    within: Annotated[float, Range(0)] | None = None,
    method: str = DMCP,
    search: SearchConfig | None = None,
    train: TrainConfig | None = None,
    retrain: Retrain | str = Retrain.FINETUNE,
    teacher: nn.Module | str | None = AUTO,
    baselines: bool | Collection[str] = False,
    graph: ChannelGraph | None = None,
    latency: Latency | Measure | None = None,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
) -> PruneResult:
    """Search for widths within the budget, cut the model, train the result and test it. The model is not changed.

    loader, val_loader: batches of (input, labels), or two data sets of Hugging Face with a column of images and one of
        labels, whose batches are then made as those of image files are.
    budget: 0.5, "50%", "211M", "params:2M", "8ms" or "50%,params:2M". The default is that of the search settings, or
        else "50%". A list of budgets gives a network for each from a single search, at the budget of the search
        settings or else the middle one of the list; see `by_budget` of the result.
    within: the largest loss against the model, instead of a budget: 0.5 points of accuracy, or in the unit of your own
        metric. The smallest network is chosen that loses no more; with budget="latency" the fastest one, and so for
        the other kinds of cost. Short trainings decide on a fifth of the batches, which they do not train on; pass
        `dmcp.Loaders` with `held_out` to choose these yourself. The model must be trained.
    method: "dmcp" searches. "sensitivity", "l2" and the other methods of `dmcp compare` choose widths and channels
        in their own way; the resulting networks are trained and tested in the same way.
    search, train: settings of the search and of the training. What you leave out follows the number of images, and
        whether a test shows that the model is trained; `search_config` and `train_config` of the result have all of it.
    retrain: how the pruned network gets its weights. "finetune" trains the weights of the search further. "scratch",
        as in the paper, starts from fresh weights; "slimmable" is the paper's DMCP*; "none" only calibrates BatchNorms.
    teacher: a trained network of any architecture with the same classes; all networks learn from it besides the
        labels. "unpruned" trains the unpruned network first and learns from that. "auto" uses the model itself if it
        is trained, or else "unpruned"; with your own loss, only if it shows that the outputs are class scores, or if
        you say with `distill=` of the task how to distill them.
    baselines: True also trains the unpruned network and a network of uniform widths at the same budget, in the same
        way. You can also list "unpruned", "uniform" and "original" (the model as given). Unless you give a list, the
        table of a trained model also has the model itself, and its pruned network right after the cut.
    graph: the result of `trace`, if you call it with settings of your own.
    latency: for budgets like "8ms": a table from `measure_latency`, or a function that takes a network and returns its
        milliseconds. Without either, networks are measured before the search, with a batch of 1 on the model's device.
    task: your own loss, metric and optimizer, and a newly built model if yours has tensors that `reinitialize` cannot
        initialize. One batch of `val_loader` is tested before the first step, and without a metric of your own all its
        labels are checked.
    runtime: the engine, the checkpoints to resume from, and a function that receives the record of each step.
    """
    # What is asked for. Mistakes are refused here, before anything runs.
    seed = train.seed if train is not None else TrainConfig.seed
    loader, val_loader = loaders_of_rows(model, loader, val_loader, seed, holds_out=within is not None)
    request = read_request(
        model,
        loader,
        budget=budget,
        within=within,
        method=method,
        search=search,
        train=train,
        retrain=retrain,
        teacher=teacher,
        baselines=baselines,
    )
    asked_to_distill = task.distill is not None
    example, task = preflight(
        model,
        request.loaders.by_name,
        val_loader,
        networks=request.test_count,
        task=task,
        teacher=request.preflight_teacher(model),
        slimmable=request.retrain is Retrain.SLIMMABLE,
        tested=request.follows_training,
    )
    sample = first_two(example)

    # What can be pruned. From here on, what is cut is known to equal what was searched.
    graph = _traced(model, sample, graph, task)

    # Settings that the user left open follow the data, and whether the model is trained.
    trained = request.follows_training and is_trained(model, classes_of(model, sample), val_loader, task.metric)
    if within is not None and not trained:
        raise TrainingError("within compares networks with the model, which is not trained: train it first.")
    request = choose_teacher(request, model, sample, task, trained=trained, asked=asked_to_distill)
    warn_of_teacher(request, model, sample, val_loader, task)
    normed = has_batch_norms(model)
    settings, retraining, loaders = resolve_settings(request, example, task, trained=trained, normed=normed)

    # Budgets in numbers, once a latency table is there for those in milliseconds.
    graph, timer = with_latency(model, graph, sample, request.specs, settings, latency, runtime)
    ends = reachable(graph, settings)
    specs = request.specs
    if within is not None:
        settings = with_reachable_start(settings, graph, ends)
        specs = [settings.budget]
    budgets = parse_budgets(specs, graph, *ends, settings.align)
    job = resumable(
        PruneJob(
            model=model,
            graph=graph,
            budgets=budgets,
            baselines=choose_baselines(request, model, trained=trained),
            method=method,
            search=settings,
            retraining=retraining,
            loaders=loaders,
            task=task,
            runtime=runtime,
            timer=timer,
            within=within,
        )
    )
    plan(phases(job, val_loader), _avoidable_search(job, trained=trained))
    untrained = given_networks(model, ORIGINAL in job.baselines, request.other_teacher(model))

    # One search serves all budgets; other methods choose for each budget.
    if job.searches:
        selector = search_widths(job)
    else:
        selector = choose_widths(job, trained=trained)

    # If a loss is allowed instead, short trainings decide on the budget.
    outcome = None
    if within is None:
        cuts = plan_cuts(job, selector)
    else:
        job, cuts, outcome = choose_budget(job, selector, within)
    selection = Selection(cuts=cuts, selector=selector, within=outcome)

    # A trained model is also tested right after the cut.
    if trained and job.retraining.kind is Retrain.FINETUNE:
        for name, planned in selection.cuts.items():
            untrained[job.row(CUT, name)] = calibrated(planned.cut(graph), request.loaders.search)

    # Every network of the table is trained and tested in the same way.
    trained_networks, widths = train_networks(job, selection)
    rows = measure_networks(
        untrained | trained_networks.networks,
        graph,
        widths,
        val_loader,
        example,
        train_losses=trained_networks.losses,
        task=task,
        runtime=job.runtime,
    )
    speeds = speeds_of(job, selection, trained_networks.networks, rows, example)
    for text in unknown_scores(rows):
        warn(f"{text}.", MetricWarning)
    start = "the weights of the search" if job.searches else "the weights that it kept"
    distill = task.distillation or Distill.CLASSES
    origin = describe_origin(retraining, describe_teacher(request.teacher, model), method, start, distill)
    return make_result(job, selection, trained_networks.networks, rows, speeds, origin)


def _traced(model: nn.Module, sample: Any, graph: ChannelGraph | None, task: Task) -> ChannelGraph:
    """The given graph, or a new one, verified."""
    with phase("trace", 1) as update:
        if graph is None:
            graph = trace(model, sample)
        if graph.exact and not graph.verified:
            verify(model, graph, sample)
        update(1)
    if task.fresh is not None and fingerprint(unwrap(task.fresh)) != graph.fingerprint:
        raise WidthsError("fresh has another architecture than the model: build it as the model was built.")
    return graph


# the job


@dataclass(frozen=True, kw_only=True, eq=False)
class PruneJob:
    """What is pruned, to which budgets and how: everything is chosen, nothing has run."""

    model: nn.Module
    graph: ChannelGraph
    budgets: Mapping[str, Budget]  # by name
    search: ResolvedSearchConfig
    loaders: Loaders
    method: str = DMCP
    retraining: Retraining = Retraining(config=resolve_training(TrainConfig()), kind=Retrain.NONE)
    baselines: frozenset[str] = frozenset()
    task: Task = Task()
    runtime: Runtime = Runtime()
    timer: Timer | None = None  # measures as the latency table was measured; None where this is not possible
    within: float | None = None  # the loss that is allowed; the budget is then where the search begins

    @property
    def searches(self) -> bool:
        """Whether the method is our search."""
        return self.method == DMCP

    def row(self, kind: str, budget: str) -> str:
        """The name of a row of the table, which names the budget if there are several."""
        return f"{kind} {budget}" if len(self.budgets) > 1 else kind


def resumable(job: PruneJob) -> PruneJob:
    """The same job with checkpoints that refuse to go on with other settings, weights or data.

    Checkpoints that have an identity already keep it.
    """
    checkpointer = job.runtime.checkpointer
    if checkpointer is None or checkpointer.identity:
        return job
    retraining = job.retraining
    teacher = retraining.teacher_network
    table = Latency.of(job.graph)
    distill = job.task.distill
    settings: dict[str, Any] = {
        "search": job.search,
        "train": retraining.config,
        "retrain": retraining.kind,
        "engine": job.runtime.engine or Engine(),
        "method": job.method,
        "budgets": list(job.budgets),
        "within": job.within,
        "baselines": sorted(job.baselines),
        "graph": job.graph.fingerprint,
        "arch_loader": job.loaders.arch is not None,
        "optimizer": job.task.optimizer is not None,
        "distill": distill if isinstance(distill, Distill) else distill is not None,
        "latency": table and table.digest,
        "teacher": retraining.teacher if teacher is None else TEACHER,
    }
    for name, loader in job.loaders.by_name.items():
        settings[f"data of {name}"] = digest_of_loader(loader, current())
    weights = unwrap(job.model).state_dict()
    teacher_weights = None if teacher is None else teacher.state_dict()
    identity = plain_settings(settings, weights, current(), teacher_weights)
    return replace(job, runtime=replace(job.runtime, checkpointer=replace(checkpointer, identity=identity)))


def phases(job: PruneJob, val_loader: Loader) -> list[progress.Phase]:
    """The phases to come, with the work of their steps, in training steps of the unpruned network."""
    return [*_search_phases(job), *_race_phases(job), *_training_phases(job, val_loader)]


def _avoidable_search(job: PruneJob, *, trained: bool) -> progress.Avoidable | None:
    """The search, if it runs on a CPU and the weights of the model are good enough to choose channels by."""
    if not job.searches or not trained or device_of(job.model).type != "cpu":
        return None
    return progress.Avoidable(SEARCH, '--method sensitivity (method="sensitivity")')


def _search_phases(job: PruneJob) -> list[progress.Phase]:
    if not job.searches:
        return []
    config = job.search
    steps_per_epoch = -(-length_of(job.loaders.search) // config.accumulate)
    work = 0.75 * (2 + config.subnets) + 0.5  # narrow sub-networks cost less than the unpruned network
    return [progress.Phase(SEARCH, steps_per_epoch * config.epochs, config.accumulate * work)]


def _race_phases(job: PruneJob) -> list[progress.Phase]:
    """The short trainings that decide on a budget: of the unpruned network, and of networks half as large."""
    if job.within is None or job.retraining.kind is Retrain.NONE:
        return []
    race = _race(job)
    steps = race.retraining.config.epochs * length_of(race.loader)
    work_of_teacher = _work_of_teacher(job.retraining, "")
    races = [progress.Phase(race_name(0), steps, 1.0 + work_of_teacher)]
    for number in range(1, RACES + 1):
        races.append(progress.Phase(race_name(number), steps, 0.5 + work_of_teacher))
    return races


def _training_phases(job: PruneJob, val_loader: Loader) -> list[progress.Phase]:
    retraining = job.retraining
    shares: dict[str, float] = {}  # of the MACs of the unpruned network, to which the work is proportional
    if UNPRUNED in job.baselines or retraining.teacher == UNPRUNED:
        shares[UNPRUNED] = 1.0
    for name, budget in job.budgets.items():
        macs = [limit.target for limit in budget.limits if limit.kind == "macs"]
        share = macs[0] / job.graph.macs() if macs else 0.5
        if UNIFORM in job.baselines:
            shares[job.row(UNIFORM, name)] = share
        shares[job.row(job.method, name)] = share

    to_come: list[progress.Phase] = []
    if retraining.kind is not Retrain.NONE:
        steps = retraining.config.epochs * length_of(job.loaders.final)
        for name, share in shares.items():
            to_come.append(progress.Phase(name, steps, share + _work_of_teacher(retraining, name)))
    to_come.append(progress.Phase("test", length_hint(val_loader) * len(shares), _FORWARD))
    return to_come


def _work_of_teacher(retraining: Retraining, name: str) -> float:
    """The work of the teacher in each training step of a network."""
    if name == UNPRUNED and retraining.teacher_network is None:
        return 0.0  # it is the teacher, or there is none
    if retraining.kind is Retrain.SLIMMABLE:
        return 1.0  # the unpruned network is trained beside the pruned one
    return 0.0 if retraining.teacher is None else _FORWARD


# which widths


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """The unpruned network that the cuts, and those of baselines, are made from."""

    model: nn.Module
    graph: ChannelGraph
    searched: bool  # whether its first channels are the important ones, as after a search
    samples: Sequence[Any] = ()  # that its channels are scored on

    @functools.cached_property
    def scores(self) -> Scores:
        """A score for each channel."""
        return scores_of(self.model, self.graph, self.samples)

    def cut(self, widths: Widths) -> nn.Module:
        """A network of these widths with the channels that matter most."""
        if self.searched:
            return cut(self.model, self.graph, widths)
        return cut(self.model, self.graph, widths, by=self.scores)


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
    samples = first_samples(job.loaders.search, device_of(model))  # before a training draws any: a resumed run has none
    pretrained = TrainedNetworks()
    if find_method(job.method).trained and not trained:
        if job.retraining.kind is Retrain.NONE:
            warn(f"The network is not trained, so {job.method} ranks random weights.")
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
        seed=job.search.seed,
        task=job.task,
        runtime=job.runtime,
    )
    chooses_once = len(job.budgets) == 1 and not limits_latency(first_budget) and job.within is None
    choose = chooser(job.method, problem, chooses_once)
    return Selector(source=source, choose=choose, trained=pretrained)


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


def choose_budget(
    job: PruneJob, selector: Selector, within: float
) -> tuple[PruneJob, dict[str, PlannedCut], WithinOutcome]:
    """The job with the smallest budget whose network loses at most so much, its cut, and how that was decided."""
    (searched,) = job.budgets.values()
    (kind,) = searched.kinds

    def plan(budget: Budget) -> PlannedCut:
        return _plan_cut(job, selector, budget, budget.file_name)

    planned, budget, outcome = choose_within(
        within,
        plan,
        _race(job),
        model=job.model,
        graph=job.graph,
        kind=kind,
        reachable=reachable(job.graph, job.search),
        metric=job.task.metric,
        trains=job.retraining.kind is not Retrain.NONE,
    )
    _warn_if_slow(planned)
    return replace(job, budgets={budget.file_name: budget}), {budget.file_name: planned}, outcome


def _race(job: PruneJob) -> Race:
    """The short training and the held-out images that decide on a budget."""
    loaders = job.loaders
    assert loaders.held_out is not None
    short = race_config(job.retraining.config, loaders.final, loaders.search)
    return Race(
        graph=job.graph,
        retraining=replace(job.retraining, config=short),
        loader=loaders.search,
        held_out=loaders.held_out,
        task=job.task,
        runtime=job.runtime,
    )


def _choose_within_latency(
    job: PruneJob, pick: Callable[[Budget], tuple[Picked, Widths, nn.Module]], budget: Budget, folder: str
) -> tuple[Picked, LatencyOutcome]:
    """Pick for a budget, and again as long as what is measured is not inside the limit or far below it."""
    lowest, highest = reachable(job.graph, job.search)
    allowed = AllowedWidths(job.graph, lowest.tensor(), highest.tensor(), job.search.align)
    fastest = allowed.widths(cheapest_widths(budget, job.graph, allowed))
    return choose_within_latency(
        pick,
        budget,
        job.graph,
        lowest=job.graph.cost(LATENCY, job.graph.widths(fastest)),
        highest=job.graph.cost(LATENCY, highest),
        model=job.model,
        timer=job.timer,
        folder=latency_folder(job.runtime, folder),
    )


# training


def train_networks(job: PruneJob, selection: Selection) -> tuple[TrainedNetworks, dict[str, Widths]]:
    """Train the pruned network of each budget, and the baselines: networks and widths by row.

    The widths also have the rows of networks right after the cut.
    """
    graph = job.graph
    retraining = job.retraining
    selector = selection.selector
    unpruned = selector.trained.networks.get(UNPRUNED)
    if retraining.teacher == UNPRUNED and unpruned is not None:
        retraining = replace(retraining, teacher=unpruned)

    # All networks of the table, and those among them that keep weights.
    widths: dict[str, Widths] = {}
    cuts: dict[str, nn.Module] = {}
    if UNPRUNED in job.baselines and unpruned is None:
        widths[UNPRUNED] = graph.full
    for name, planned in selection.cuts.items():
        if UNIFORM in job.baselines:
            row = job.row(UNIFORM, name)
            widths[row] = _uniform_widths(job, selector.source.model, name)
            if not retraining.anew:
                cuts[row] = selector.source.cut(widths[row])
        row = job.row(job.method, name)
        widths[row] = planned.widths
        if not retraining.anew:
            cuts[row] = planned.cut(graph)

    source = _fresh_source(job, selector.source) if retraining.anew else selector.source.model
    trained = train_all(
        source, graph, widths, job.loaders.final, retraining, cuts=cuts, task=job.task, runtime=job.runtime
    )

    # Count once more: no network over its budget is handed out. Of latency, it is the limit of the forecast.
    for name, planned in selection.cuts.items():
        check_budget(trained.networks[job.row(job.method, name)], planned.widths, graph, planned.budget)
        widths[job.row(CUT, name)] = planned.widths
    return selector.trained | trained, widths


def _uniform_widths(job: PruneJob, source: nn.Module, budget: str) -> Widths:
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


def _fresh_source(job: PruneJob, source: Source) -> nn.Module:
    """The model that networks with fresh weights are cut from: frozen parameters keep their values and channels."""
    ordered = source.model
    if not source.searched and not all(parameter.requires_grad for parameter in ordered.parameters()):
        net = Supernet(ordered, job.graph)
        sort_channels(net, source.scores)
        ordered = net.model
    return with_frozen(job.task.fresh or job.model, ordered)


# what came out


def speeds_of(
    job: PruneJob, selection: Selection, networks: Mapping[str, nn.Module], rows: Sequence[Row], example: Any
) -> dict[str, tuple[Speed, ...]]:
    """How fast the network of each budget is, beside the unpruned one; measured on rank 0 only."""
    if not current().first:
        return {}
    times = {row.name: row.ms for row in rows}
    times_unpruned = [times[name] for name in _SHARED_ROWS if name in times]
    speeds: dict[str, tuple[Speed, ...]] = {}
    for name, planned in selection.cuts.items():
        row = job.row(job.method, name)
        small = networks[row]
        if times_unpruned:
            unpruned_ms = times_unpruned[0]
            small_ms = times[row]
        else:
            unpruned_ms, small_ms = milliseconds([unwrap(job.model), small], example)
        speeds[name] = measure_speeds(
            job.model, small, job.graph, example, torch_ms=(unpruned_ms, small_ms), latency=planned.latency
        )
    return speeds


def make_result(
    job: PruneJob,
    selection: Selection,
    networks: Mapping[str, nn.Module],
    rows: tuple[Row, ...],
    speeds: Mapping[str, tuple[Speed, ...]],
    origin: str,
) -> PruneResult:
    """The result; with several budgets that of the first one, with all rows and the results of the others."""
    searched = selection.selector.search
    by_budget: dict[str, PruneResult] = {}
    for name, planned in selection.cuts.items():
        budget = job.budgets[name]
        by_budget[name] = PruneResult(
            model=networks[job.row(job.method, name)].eval(),
            widths=planned.widths,
            graph=job.graph,
            search=searched and searched.for_budget(budget),
            rows=_rows_of_budget(job, name, rows),
            budget=budget,
            origin=origin,
            latency=planned.latency,
            within=selection.within,
            speeds=speeds.get(name, ()),
            search_config=job.search if job.searches else None,
            train_config=None if job.retraining.kind is Retrain.NONE else job.retraining.config,
        )
    first = next(iter(by_budget.values()))
    if len(by_budget) == 1:
        return first
    return replace(first, rows=rows, by_budget=by_budget, search=searched)


def _rows_of_budget(job: PruneJob, budget: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of one budget, without its name, and those that all budgets share."""
    names = {row: row for row in _SHARED_ROWS}
    for kind in (CUT, UNIFORM, job.method):
        names[job.row(kind, budget)] = kind
    return tuple(replace(row, name=names[row.name]) for row in rows if row.name in names)
