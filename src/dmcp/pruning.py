"""prune: search, sample, cut, retrain, and compare with what was there before."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp import training
from dmcp.batches import Loader, check_tested, device_of, input_of, labels_of, length_of, on_device, size_of
from dmcp.budget import LATENCY, Budget, check_reachable, cost, known_limits, limits_latency, ratios, show_cost
from dmcp.checkpoint import plain_settings
from dmcp.cutting import verify, with_frozen
from dmcp.errors import BudgetError, DataError, TrainingError, WidthsError
from dmcp.latency.measure import Measure, attach_latency, choose_once, measure_latency
from dmcp.latency.table import Latency, Outcome
from dmcp.losses import MetricWarning, check_metric, warn_of_distillation
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
    Row,
    compare,
    count_params,
    results_table,
    unknown,
)
from dmcp.retraining import (
    Retraining,
    copied,
    is_model,
    origin,
    train_all,
    trained_before,
    weigh_teacher,
    who_teaches,
)
from dmcp.runtime.distributed import current
from dmcp.runtime.engine import check_graphs, make_optimizer
from dmcp.sampling import expected, filled, uniform
from dmcp.searching import search as searching
from dmcp.searching.config import SearchResult, extremes
from dmcp.searching.search import SEARCH
from dmcp.searching.subnets import chains, sort_channels
from dmcp.settings import Engine, LatencyConfig, Retrain, SearchConfig, TrainConfig, default_recipe
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.training import Runtime, Task
from dmcp.widths import Widths, fingerprint


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """Batches of each part of `prune`, where one loader is not enough."""

    search: Loader
    arch: Loader | None = None  # for the alphas, if other ones than for the weights
    train: Loader | None = None  # for the final training, if other ones than for the search


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
    loader: Loader | Loaders,
    val_loader: Loader,
    budget: int | float | str | Budget | None = None,
    *,
    search: SearchConfig | None = None,
    train: TrainConfig | None = None,
    retrain: Retrain | str = Retrain.SCRATCH,
    teacher: nn.Module | str | None = None,
    baselines: bool | Collection[str] = False,
    graph: ChannelGraph | None = None,
    fresh: nn.Module | None = None,
    latency: Latency | Measure | None = None,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
) -> PruneResult:
    """Search the widths of the model inside the budget, cut it, train it, and test it. The model is not changed.

    budget: 0.5, "50%", "211M", "params:2M", "8ms", "50%,params:2M"; "50%" unless the search's settings have one.
    search, train: all settings; the defaults are for ImageNet, most of them the paper's.
    retrain: how the pruned network gets its weights. "scratch", the paper's way, initializes them anew. For a trained
        model take "finetune", which goes on from the weights of the search. "slimmable" is the paper's DMCP*.
    teacher: a trained network with the same classes, of any architecture, that all networks learn from besides the
        labels; the model itself, for example. "unpruned": the unpruned network, which is trained first.
    baselines: also train the unpruned network and uniform widths at the same budget, in the same way. Or the names of
        the rows: "unpruned", "uniform", and "original", the model as it is, which "finetune" and a model that is its
        own teacher else have by themselves.
    graph: what trace gave, if its own settings are not enough.
    fresh: a newly built model, where the given one is trained and has tensors that `reinitialize` has no rule for.
        What has requires_grad=False is neither initialized anew nor taken from it.
    latency: for budgets like "8ms": a table, see `measure_latency`, or a function that gets a network and returns its
        milliseconds. Without one prune measures first, with a batch of 1 where the model is.
    task: your own loss, metric and optimizer. One batch of val_loader is tried before the first step.
    runtime: engine, checkpoints to resume from, and who hears of each step.
    """
    if retrain not in list(Retrain):
        raise TrainingError(f"retrain must be one of {', '.join(Retrain)}, not {retrain!r}.")
    loaders = loader if isinstance(loader, Loaders) else Loaders(search=loader)
    loss, metric, optimizer, engine = task.loss, task.metric, task.optimizer, runtime.engine
    measure, table = (None, latency) if latency is None or isinstance(latency, Latency) else (latency, None)
    kind = Retrain(retrain)
    distills = kind is Retrain.SLIMMABLE or teacher is not None
    unwrap(model)  # refuses what is no network
    check_kinds({"search": (search, SearchConfig), "train": (train, TrainConfig), "graph": (graph, ChannelGraph)})
    check_functions({"latency": measure})
    extra = _rows(baselines, kind is Retrain.FINETUNE or is_model(teacher, model))
    if fresh is not None and not isinstance(fresh, nn.Module):
        raise TrainingError(f"fresh must be a torch.nn.Module, not a {type(fresh).__name__}.")
    check_metric(metric, current())
    settings = _settled(search, budget)
    if measure is not None and not limits_latency(settings.budget):
        raise BudgetError(
            f"A function for latency is for budgets like '8ms', and this one is {str(settings.budget)!r}: leave it out."
        )
    how = Retraining(train or default_recipe(kind), kind, teacher)
    if loss is not None and distills and current().first:
        _warn_of_distillation(kind, teacher is not None)
    _check_loaders({"loader": loaders.search, "arch_loader": loaders.arch, "train_loader": loaders.train})
    guide = copied(teacher, device_of(model)) if isinstance(teacher, nn.Module) else None
    before = trained_before(model, ORIGINAL in extra, guide, teacher)
    also = int(teacher == UNPRUNED and UNPRUNED not in extra)  # one more network
    also += guide is not None and (ORIGINAL if is_model(teacher, model) else TEACHER) not in before  # tested once more
    check_tested(val_loader, networks=1 + len(extra - {ORIGINAL}) + also + len(before))
    for trained in (model,) if kind is Retrain.FINETUNE or fresh is None else (model, fresh):
        training.check_trainable(trained)
    check_graphs(engine, optimizer)
    if optimizer is not None:
        make_optimizer(
            optimizer, training.parameter_groups(model, how.config.weight_decay)
        )  # a trial, before hours of work
    example, labels = _example(loaders.search, model, labelled=loss is None)
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
    if distills:
        check_distillable(model, sample)
    if guide is not None:
        fit_numbers(guide, model, sample)
        check_finite(guide, sample, "teacher")
        check_teacher(model, guide, sample)
    elif teacher == UNPRUNED:
        check_teacher(model, model, sample, "The unpruned network as a teacher")
    for other in (loaders.arch, loaders.train):
        try_batch(model, other)
    try_test(model, val_loader, metric)
    rival = None if is_model(teacher, model) else before.get(ORIGINAL)
    worth = None if guide is None else weigh_teacher(guide, rival, classes_of(guide, sample), val_loader, metric)
    folder = runtime.checkpointer.stage(SEARCH).folder if runtime.checkpointer else None
    traced = graph

    def time_first() -> Latency:
        found = time_networks(model, sample, traced, settings, measure=measure)
        runtime.emit(LATENCY, len(found.networks), found)
        return found

    graph = attach_latency(graph, settings.budget, time_first, table, folder)
    if runtime.checkpointer and not runtime.checkpointer.identity:
        given = {"search": settings, "train": how.config, "engine": engine or Engine(), "retrain": kind}
        given |= {"baselines": sorted(extra), "arch_loader": loaders.arch is not None}
        given |= {"optimizer": optimizer is not None, "graph": graph.fingerprint}
        measured = Latency.of(graph)
        given |= {} if measured is None else {"latency": measured.digest}
        taught_by = None if guide is None else guide.state_dict()
        plain = plain_settings(given, unwrap(model).state_dict(), current(), taught_by)
        runtime = replace(runtime, checkpointer=replace(runtime.checkpointer, identity=plain))
    net = Supernet(model, graph, settings.groups, settings.align)
    found = searching.search(
        net, loaders.search, settings, arch_loader=loaders.arch, task=task, runtime=runtime.stage(SEARCH)
    )
    chosen, outcome = found, None
    if limits_latency(found.budget):
        chosen, widths, outcome = choose_once(found, net.model, sample, measure, folder)
    else:
        widths = expected(found)
    wanted = {UNPRUNED: graph.full} if UNPRUNED in extra else {}
    if UNIFORM in extra:
        floor, ceiling = extremes(graph, found.sizes)
        wanted[UNIFORM] = uniform(graph, chosen.budget, floor, settings.align, filled(found), ceiling)
    wanted[DMCP] = widths
    weights = net.model if kind is Retrain.FINETUNE else _undrawn(model, fresh, graph, settings.sort)
    batches = loaders.search if loaders.train is None else loaders.train
    how = replace(how, teacher=guide or how.teacher)
    nets = train_all(weights, graph, wanted, batches, how, task=task, runtime=runtime)
    check_budget(nets[DMCP], widths, found)
    rows = compare(before | nets, graph, wanted, val_loader, example, task=task, runtime=runtime)
    for text in unknown(rows):
        warnings.warn(f"{text}.", MetricWarning, stacklevel=2)
    taught = origin(kind, who_teaches(teacher, model, worth), how.config.kd_weight, how.config.kd_temperature)
    return PruneResult(nets[DMCP], widths, graph, found, rows, taught, outcome)


def _rows(baselines: bool | Collection[str], original: bool) -> set[str]:
    """Names of the baselines; original: whether the model as it is is one unless names are given."""
    names = {UNPRUNED, UNIFORM, ORIGINAL}
    if isinstance(baselines, bool):
        return ({UNPRUNED, UNIFORM} if baselines else set()) | ({ORIGINAL} if original else set())
    if isinstance(baselines, str) or not names.issuperset(baselines):
        raise TrainingError(f"baselines must be True, False, or names among {', '.join(names)}, not {baselines!r}.")
    return set(baselines)


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


def _warn_of_distillation(kind: Retrain, named: bool) -> None:
    """Warn that outputs are taken for class scores; `named`: a teacher was given."""
    if named:
        warn_of_distillation("With a teacher the pruned network learns from its", "leave the teacher out")
    else:
        who = f'With retrain="{kind}" the pruned network learns from the unpruned one\'s'
        warn_of_distillation(who, 'take retrain="scratch" or "finetune"')


def _undrawn(model: nn.Module, fresh: nn.Module | None, graph: ChannelGraph, ordered: bool) -> nn.Module:
    """What networks are cut out of before their weights are drawn, which what is frozen in the model must outlive.

    ordered: whether the search has ordered the channels, of which the first ones are kept.
    """
    if ordered and not all(parameter.requires_grad for parameter in model.parameters()):
        net = Supernet(model, graph)
        sort_channels(net)
        model = net.model
    return with_frozen(fresh or model, model)


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


def _settled(search: SearchConfig | None, budget: int | float | str | Budget | None) -> SearchConfig:
    """One set of settings from what was given, which must not say two things."""
    if search is not None and budget is not None and search.budget != budget:
        raise BudgetError(f"Two budgets were given, {budget!r} and {search.budget!r} in the settings: give one.")
    return search or SearchConfig(budget="50%" if budget is None else budget)


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
