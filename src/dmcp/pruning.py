"""prune: search, cut, train and test, for one budget or several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from torch import nn

from dmcp.arguments import Range, checked
from dmcp.cutting import with_frozen
from dmcp.errors import TrainingError, WidthsError, warn
from dmcp.exporting.latency import Latency
from dmcp.exporting.timing import Measure
from dmcp.feasibility import check_budget, parse_budgets, reachable, with_latency
from dmcp.job import PruneJob, avoidable_search, phases, resumable
from dmcp.request import (
    SENSITIVITY,
    Loaders,
    Spec,
    choose_baselines,
    choose_teacher,
    loaders_of_rows,
    read_request,
    resolve_settings,
    warn_of_teacher,
    with_held_out,
)
from dmcp.results import PruneResult, measure_networks, milliseconds, unknown_scores
from dmcp.retraining import TrainedNetworks, calibrated, describe_origin, describe_teacher, given_networks, train_all
from dmcp.runs.records import CUT, DMCP, ORIGINAL, TEACHER, UNIFORM, UNPRUNED, Row
from dmcp.runtime.batches import Loader
from dmcp.runtime.distributed import current
from dmcp.runtime.progress import phase, plan, shown
from dmcp.searching.subnets import sort_channels
from dmcp.searching.supernet import Supernet
from dmcp.selection import Selection, Source, choose_budget, choose_widths, plan_cuts, search_widths, uniform_widths
from dmcp.settings import AUTO, Distill, Retrain, SearchConfig, TrainConfig
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
from dmcp.within import with_reachable_start

_SHARED_ROWS = (ORIGINAL, TEACHER, UNPRUNED)  # rows that all budgets share


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
    task: Task | None = None,
    runtime: Runtime | None = None,
) -> PruneResult:
    """Search for widths within the budget, cut the model, train the result and test it. The model is not changed.

    loader, val_loader: batches of (input, labels), or two Hugging Face datasets with an image column and a label
        column, whose images are then preprocessed like image files.
    budget: 0.5, "50%", "211M", "params:2M", "8ms" or "50%,params:2M". The default is that of the search settings, or
        else "50%". A list of budgets gives a network for each from a single search, at the budget of the search
        settings or else the middle one of the list; see `by_budget` of the result.
    within: the largest loss against the model, instead of a budget: 0.5 points of accuracy, or in the unit of your own
        metric. The smallest network is chosen that loses no more; with budget="latency" the fastest one, and so for
        the other kinds of cost. Short trainings decide on half of the test images, and the rows of the table are
        of the other half; pass `dmcp.Loaders` with `held_out` to decide on other images. The model must be trained.
    method: "dmcp" searches. "sensitivity", "l2" and the other methods of `dmcp compare` choose widths and channels
        in their own way; the resulting networks are trained and tested in the same way. After "sensitivity", the
        weights that are left are refitted to the outputs of each layer, as by `cut` with batches.
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
    task = task or Task()
    runtime = runtime or Runtime()
    seed = train.seed if train is not None else TrainConfig.seed
    loader, val_loader = loaders_of_rows(model, loader, val_loader, seed, holds_out=within is not None)
    if within is not None:
        loader, val_loader = with_held_out(loader, val_loader)
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
    plan(phases(job, val_loader), avoidable_search(job, trained=trained))
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
    start = "the weights that it kept"
    if job.searches:
        start = "the weights of the search"
    elif method == SENSITIVITY:
        start = "the weights that it kept, refitted to the outputs of each layer"
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
            widths[row] = uniform_widths(job, selector.source.model, name)
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
