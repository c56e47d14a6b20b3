"""prune: search, sample, cut, retrain, and compare with what was there before."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp import training
from dmcp.batches import Loader, check_tested, device_of, input_of, labels_of, length_of, on_device, size_of
from dmcp.budget import LATENCY, Budget, check_reachable, cost, known_limits, limits_latency, ratios, show_cost
from dmcp.checkpoint import Checkpointer, plain_settings
from dmcp.cutting import verify, with_frozen
from dmcp.errors import BudgetError, DataError, TrainingError, WidthsError
from dmcp.latency.measure import Measure, attach_latency, choose_once, measure_latency
from dmcp.latency.table import Latency, Outcome
from dmcp.losses import Loss, Metric, MetricWarning, check_metric, warn_of_distillation
from dmcp.markov import process_of
from dmcp.modules import check_functions, check_kinds, tensors_in, unwrap
from dmcp.preflight import (
    check_distillable,
    check_finite,
    check_input,
    check_labels,
    check_numbers,
    check_teacher,
    classes_of,
    fit_numbers,
    try_batch,
    try_test,
)
from dmcp.results import (
    DMCP,
    ORIGINAL,
    TEACHER,
    UNIFORM,
    UNPRUNED,
    Event,
    Report,
    Row,
    compare,
    count_params,
    results_table,
    silent,
    unknown,
)
from dmcp.retraining import (
    MakeCheckpointer,
    check_taught,
    copied,
    default_recipe,
    is_model,
    origin,
    train_all,
    trained_before,
    weigh_teacher,
    who_teaches,
)
from dmcp.runtime.distributed import current
from dmcp.runtime.engine import MakeOptimizer, check_graphs, make_optimizer
from dmcp.sampling import expected, filled, uniform
from dmcp.searching import search as searching
from dmcp.searching.config import SearchRecord, SearchResult, extremes
from dmcp.searching.subnets import chains, sort_channels
from dmcp.settings import Engine, LatencyConfig, Retrain, SearchConfig, TrainConfig
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.widths import Widths, fingerprint

SEARCH = "search"  # the first stage; the others are named after the network that they train


class DivergenceWarning(UserWarning):
    """A training whose loss ended higher than it began."""


@dataclass(frozen=True, eq=False)
class PruneResult:
    """The smaller network, and how it was found."""

    model: nn.Module  # a plain module of the user's own class
    widths: Widths
    graph: ChannelGraph
    search: SearchResult
    rows: tuple[Row, ...]
    origin: str = ""  # where the weights come from, in words
    latency: Outcome | None = None  # where the budget has a limit of latency: what it asks for, and what was measured

    @property
    def table(self) -> str:
        """The rows as text, and what they mean."""
        text = results_table(self.rows, self.graph, self.origin)
        return text if self.latency is None else f"{text}\n{self.latency.text}"


def prune(
    model: nn.Module,
    loader: Loader,
    val_loader: Loader,
    budget: int | float | str | Budget | None = None,
    *,
    search: SearchConfig | None = None,
    train: TrainConfig | None = None,
    retrain: Retrain = Retrain.SCRATCH,
    baselines: bool = False,
    test_given: bool = True,
    graph: ChannelGraph | None = None,
    fresh: nn.Module | None = None,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    optimizer: MakeOptimizer | None = None,
    arch_loader: Loader | None = None,
    train_loader: Loader | None = None,
    seed: int | None = None,
    on_event: Report | None = None,
    engine: Engine | None = None,
    keep: MakeCheckpointer | None = None,
    latency: Latency | None = None,
    measure: Measure | None = None,
) -> PruneResult:
    """Search the widths of the model inside the budget, cut it, train it, and test it. The model is not changed.

    budget: 0.5, "50%", "211M", "params:2M", "8ms", "50%,params:2M"; "50%" unless the search's settings have one.
    search, train: all settings; the default ones are for ImageNet, most of them the paper's.
    retrain: how the pruned network gets its weights. "scratch", the paper's way, draws them anew: what a trained model
        has learnt is lost. For a trained model take "inherit", which fine-tunes and also tests the model as given.
        "teacher" also draws them anew, and learns from a teacher besides the labels: the unpruned network, trained
        first, unless `teacher` is another one.
    controls: also train the unpruned network and uniform widths at the same budget, by the same recipe.
    test_given: whether "inherit" tests the model as given; pointless where its last layer is new and untrained.
    graph: what trace gave, if its own settings are not enough.
    fresh: a newly built model, where the given one is trained and has tensors that `reinitialize` has no rule for.
        What is frozen (requires_grad=False) is neither drawn anew nor taken from it.
    teacher: a trained network with the same classes, of any architecture, that all networks learn from with
        retrain="teacher" or "inherit"; the trained model itself, for example. It is not changed.
    val_loader, metric: of the final test; one batch is tried before the first step, and forgotten. A metric is a
        function (output, batch) -> (sum, count), or an object with reset(), update(output, batch) and compute().
    optimizer: makes the one that trains weights, in search and trainings, of parameter groups; SGD unless given.
    arch_loader: batches for the alphas.
    train_loader: batches for the retraining, if other ones than for the search.
    engine: precision, compiling and the like; what is best for the device, unless it says otherwise.
    keep: gives each stage a keeper, so that the run can be interrupted; other settings are then refused.
    seed: of the search and of all trainings, instead of the one in their settings.
    latency: a table for budgets like "8ms", see `measure_latency`; without one prune measures first, with a batch of 1
        where the model is.
    measure: a function that gets a network and returns its milliseconds, in the place of this machine. What is chosen
        is measured by it, too, or as the table was, if its device is here; the result's `latency` has the figures.
    """
    if retrain not in list(Retrain):
        raise TrainingError(f"retrain must be one of {', '.join(Retrain)}, not {retrain!r}.")
    kind = Retrain(retrain)
    imitates = kind in (Retrain.SLIMMABLE, Retrain.TEACHER) or teacher is not None
    unwrap(model)  # refuses what is no network
    check_kinds({"search": (search, SearchConfig), "train": (train, TrainConfig), "engine": (engine, Engine)})
    check_kinds({"latency": (latency, Latency), "graph": (graph, ChannelGraph)})
    _check_flags({"baselines": baselines, "test_given": test_given})
    if fresh is not None and not isinstance(fresh, nn.Module):
        raise TrainingError(f"fresh must be a torch.nn.Module, not a {type(fresh).__name__}.")
    check_functions({"loss": loss, "on_event": on_event, "keep": keep, "measure": measure})
    check_metric(metric, current())
    settings = _settled(search, budget, seed)
    if measure is not None and not limits_latency(settings.budget):
        raise BudgetError(
            f"measure is for budgets of latency, like '8ms', and this one is {str(settings.budget)!r}: leave it out."
        )
    recipe = train or default_recipe(retrain)
    recipe = recipe if seed is None else replace(recipe, seed=seed)
    check_taught(kind, recipe, teacher)
    if loss is not None and imitates and current().first:
        _warn_of_imitation(kind, teacher is not None)
    _check_loaders({"loader": loader, "arch_loader": arch_loader, "train_loader": train_loader})
    guide = None if teacher is None else copied(teacher, device_of(model))
    before = trained_before(model, kind, test_given, guide, teacher)
    also = int(kind is Retrain.TEACHER and teacher is None and not baselines)  # one more network
    also += guide is not None and (ORIGINAL if is_model(teacher, model) else TEACHER) not in before  # tested once more
    check_tested(val_loader, networks=1 + 2 * baselines + also + len(before))
    for trained in (model,) if kind is Retrain.FINETUNE or fresh is None else (model, fresh):
        training.check_trainable(trained)
    check_graphs(engine, optimizer)
    if optimizer is not None:
        make_optimizer(
            optimizer, training.parameter_groups(model, recipe.weight_decay)
        )  # a trial, before hours of work
    example, labels = _example(loader, model, labelled=loss is None)
    sample = tree_map_only(Tensor, lambda x: x[:2], example)
    check_numbers(model, sample)
    check_finite(model, sample)
    check_input(model, sample)
    if labels is not None:
        check_labels(model, sample, size_of((example,)), labels)
    graph = graph or trace(model, sample)
    if graph.exact:
        verify(model, graph, sample)  # before hours of work: what is cut will be what was searched
    if fresh is not None and fingerprint(unwrap(fresh)) != graph.fingerprint:
        raise WidthsError("fresh is a network of another architecture than the model: build it as that was built.")
    if imitates:
        check_distillable(model, sample)
    if guide is not None:
        fit_numbers(guide, model, sample)
        check_finite(guide, sample, "teacher")
        check_teacher(model, guide, sample)
    elif kind is Retrain.TEACHER:
        check_teacher(model, model, sample, "The unpruned network as a teacher")
    for other in (arch_loader, train_loader):
        try_batch(model, other)
    try_test(model, val_loader, metric)
    rival = None if is_model(teacher, model) else before.get(ORIGINAL)
    worth = None if guide is None else weigh_teacher(guide, rival, classes_of(guide, sample), val_loader, metric)
    checkpointer = keep(SEARCH) if keep else None
    folder = checkpointer.folder if isinstance(checkpointer, Checkpointer) else None
    traced = graph

    def time_first() -> Latency:
        found = time_networks(model, sample, traced, settings, measure=measure)
        (on_event or silent)(Event(LATENCY, len(found.networks), found))
        return found

    graph = attach_latency(graph, settings.budget, time_first, latency, folder)
    if keep:
        given = {"search": settings, "train": recipe, "engine": engine or Engine(), "retrain": kind}
        given |= {"baselines": baselines, "arch_loader": arch_loader is not None, "optimizer": optimizer is not None}
        given |= {"graph": graph.fingerprint}
        table = Latency.of(graph)
        given |= {} if table is None else {"latency": table.digest}
        taught_by = None if guide is None else guide.state_dict()
        keep = _noting(keep, plain_settings(given, unwrap(model).state_dict(), current(), taught_by))
    net = Supernet(model, graph, settings.groups, settings.align)
    found = find(net, loader, settings, loss, arch_loader, on_event, engine, keep and keep(SEARCH), optimizer)
    chosen, outcome = found, None
    if limits_latency(found.budget):
        chosen, widths, outcome = choose_once(found, net.model, sample, measure, folder)
    else:
        widths = expected(found)
    wanted = {DMCP: widths}
    if baselines:
        floor, ceiling = extremes(graph, found.sizes)
        same = uniform(graph, chosen.budget, floor, settings.align, filled(found), ceiling)
        wanted = {UNPRUNED: graph.full, UNIFORM: same, DMCP: widths}
    weights = net.model if kind is Retrain.FINETUNE else _undrawn(model, fresh, graph, settings.sort)
    batches = loader if train_loader is None else train_loader
    way = (loss, on_event, engine, keep)
    troubles: list[str] = []
    nets = train_all(weights, graph, wanted, batches, recipe, kind, *way, troubles.append, optimizer, guide)
    check_budget(nets[DMCP], widths, found)
    rows = compare(before | nets, graph, wanted, val_loader, example, metric, on_event)
    for trouble in troubles:
        warnings.warn(trouble, DivergenceWarning, stacklevel=2)
    for trouble in unknown(rows):
        warnings.warn(f"{trouble}.", MetricWarning, stacklevel=2)
    taught = origin(kind, who_teaches(kind, teacher, model, worth), recipe.kd_weight, recipe.kd_temperature)
    return PruneResult(nets[DMCP], widths, graph, found, rows, taught, outcome)


def time_networks(
    model: nn.Module,
    sample: Any,
    graph: ChannelGraph,
    settings: SearchConfig,
    config: LatencyConfig | None = None,
    measure: Measure | None = None,
) -> Latency:
    """A latency table between the smallest and the largest widths of a search.


    What else the search would refuse is refused first.
    """
    net = Supernet(model, graph, settings.groups, settings.align)
    path = chains(net, process_of(settings.independent), settings.min_channels, settings.max_channels, settings.align)
    floor, ceiling = extremes(graph, path.sizes)
    if limits := known_limits(settings.budget, graph):
        check_reachable(Budget(limits, str(getattr(settings.budget, "text", settings.budget))), graph, floor, ceiling)
    searching.check_choice(path)
    config = replace(config or LatencyConfig(), min_channels=floor, max_channels=ceiling, align=settings.align)
    return measure_latency(model, sample, graph, config, measure=measure)


def _warn_of_imitation(kind: Retrain, named: bool) -> None:
    """Say what is imitated, and how not to; `named`: a teacher was given."""
    if named:
        warn_of_distillation("With a teacher the pruned network imitates its", "leave the teacher out")
    else:
        who = f'With retrain="{kind}" the pruned network imitates the whole one\'s'
        warn_of_distillation(who, 'take retrain="scratch" or "inherit"')


def _noting(keep: MakeCheckpointer, settings: dict[str, Any]) -> MakeCheckpointer:
    """The same checkpointers; those without an identity compare what prune was given."""

    def noted(stage: str) -> Checkpointer:
        checkpointer = keep(stage)
        if not isinstance(checkpointer, Checkpointer):
            raise TrainingError(f"keep must give a dmcp.Keeper for each stage, not a {type(checkpointer).__name__}.")
        checkpointer.identity = checkpointer.identity or settings
        return checkpointer

    return noted


def _undrawn(model: nn.Module, fresh: nn.Module | None, graph: ChannelGraph, ordered: bool) -> nn.Module:
    """What networks are cut out of before their weights are drawn, which what is frozen in the model must outlive.

    ordered: whether the search has ordered the channels, of which the first ones are kept.
    """
    if ordered and not all(parameter.requires_grad for parameter in model.parameters()):
        net = Supernet(model, graph)
        sort_channels(net)
        model = net.model
    return with_frozen(fresh or model, model)


def find(
    net: Supernet,
    loader: Loader,
    config: SearchConfig,
    loss: Loss | None = None,
    arch_loader: Loader | None = None,
    on_event: Report | None = None,
    engine: Engine | None = None,
    checkpointer: Checkpointer | None = None,
    optimizer: MakeOptimizer | None = None,
) -> SearchResult:
    """`search`, with its steps and its result reported."""
    report = on_event or silent
    steps = -(-length_of(loader) // config.accumulate) * config.epochs

    def step(record: SearchRecord) -> None:
        report(Event(SEARCH, steps, record))

    found = searching.search(net, loader, config, loss, arch_loader, step, engine, checkpointer, optimizer)
    report(Event(SEARCH, steps, found))
    return found


def check_budget(small: nn.Module, widths: Widths, found: SearchResult) -> None:
    """Count the cut network once more against every limit."""
    for limit in found.budget.limits:
        spent = count_params(small) if limit.kind == "params" else cost(found.graph, limit.kind, widths)
        if spent > limit.target:
            has, most = (show_cost(limit.kind, it) for it in (spent, limit.target))
            raise BudgetError(
                f"The cut network has {has}, more than the {most} allowed: "
                "please report this, it should not be possible."
            )


# what came out


def expected_shares(found: SearchResult) -> tuple[float, ...]:
    """Expected cost / target of each limit at the end of a search, before any rounding and repair."""
    chances = found.process.marginals(found.alphas.double()) * (found.sizes > 0)
    return tuple(ratios(found.budget, found.graph, chances, found.sizes, found.process).tolist())


# small things


def _settled(search: SearchConfig | None, budget: int | float | str | Budget | None, seed: int | None) -> SearchConfig:
    """One set of settings from what was given, which must not say two things."""
    if search is not None and budget is not None and search.budget != budget:
        raise BudgetError(f"Two budgets were given, {budget!r} and {search.budget!r} in the settings: give one.")
    settings = search or SearchConfig(budget="50%" if budget is None else budget)
    return settings if seed is None else replace(settings, seed=seed)


def _check_flags(given: dict[str, Any]) -> None:
    """Refuse words for yes and no: "no" would be taken for a yes."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TrainingError(f"{name} must be True or False, not {value!r}.")


def _check_loaders(loaders: dict[str, Loader | None]) -> None:
    """Refuse training batches that no epoch can be made of."""
    for name, loader in loaders.items():
        if (loader is not None or name == "loader") and not length_of(loader, name):
            raise DataError(f"The {name} has no batches: is the batch larger than the data?")


def _example(loader: Loader, model: nn.Module, labelled: bool) -> tuple[Any, Tensor | None]:
    """The input of the first batch, where the model is, and its labels where our own loss reads them."""
    for batch in loader:
        found = on_device(input_of(batch), device_of(model))
        if not tensors_in(found):
            raise DataError(
                f"The input of a batch holds no tensor, but is a {type(found).__name__}: let the loader give tensors, "
                "a tuple or a dict of them."
            )
        return found, labels_of(batch) if labelled else None
    raise DataError("The loader has no batches: is the batch larger than the data?")
