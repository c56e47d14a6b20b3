"""prune: search, sample, cut, train, and compare with what was there before."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Any

from torch import nn

from dmcp import progress
from dmcp.batches import Loader, device_of, length_of
from dmcp.budget import LATENCY, Budget, check_reachable, known_limits, limits_latency, ratios, show_cost
from dmcp.calibration import recalibrate
from dmcp.checkpoint import plain_settings, untouched
from dmcp.cutting import cut, verify, with_frozen
from dmcp.errors import BudgetError, TrainingError, WidthsError
from dmcp.latency.measure import Measure, attach_latency, choose_once, measure_latency
from dmcp.latency.table import Latency, Outcome
from dmcp.losses import MetricWarning, warn, warn_of_distillation
from dmcp.markov import process_of
from dmcp.modules import check_function, check_kinds, unwrap
from dmcp.preflight import can_teach, classes_of, first_two, preflight
from dmcp.progress import phase, plan, shown
from dmcp.results import CUT, DMCP, ORIGINAL, TEACHER, UNIFORM, UNPRUNED, Row, compare, results_table, unknown
from dmcp.retraining import (
    Retraining,
    copied,
    is_model,
    is_trained,
    origin,
    train_all,
    trained_before,
    weigh_teacher,
    who_teaches,
)
from dmcp.runtime.distributed import current
from dmcp.sampling import expected, filled, uniform
from dmcp.searching import search as searching
from dmcp.searching.config import SearchResult, extremes
from dmcp.searching.search import SEARCH
from dmcp.searching.subnets import chains, sort_channels
from dmcp.settings import (
    AUTO,
    Engine,
    LatencyConfig,
    Retrain,
    SearchConfig,
    TrainConfig,
    default_search,
    default_training,
)
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.training import Runtime, Task, check_trainable
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
    latency: Outcome | None = None  # of a budget with a limit of latency: what it asks for, and what was measured

    @property
    def table(self) -> str:
        """The rows as text, and what they mean."""
        text = results_table(self.rows, self.graph, self.origin)
        return text if self.latency is None else f"{text}\n{self.latency.text}"


@shown
def prune(
    model: nn.Module,
    loader: Loader | Loaders,
    val_loader: Loader,
    budget: int | float | str | Budget | None = None,
    *,
    search: SearchConfig | None = None,
    train: TrainConfig | None = None,
    retrain: Retrain | str = Retrain.FINETUNE,
    teacher: nn.Module | str | None = AUTO,
    baselines: bool | Collection[str] = False,
    graph: ChannelGraph | None = None,
    fresh: nn.Module | None = None,
    latency: Latency | Measure | None = None,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
) -> PruneResult:
    """Search the widths of the model inside the budget, cut it, train it, and test it. The model is not changed.

    budget: 0.5, "50%", "211M", "params:2M", "8ms", "50%,params:2M"; "50%" unless the search's settings have one.
    search, train: all settings. Without them small steps are taken if the model is trained, which a test shows.
    retrain: how the pruned network gets its weights. "finetune" goes on from those of the search. "scratch", the
        paper's way, initializes them anew; "slimmable" is the paper's DMCP*.
    teacher: a trained network with the same classes, of any architecture, that all networks learn from besides the
        labels. "unpruned": the unpruned network, which is trained first. "auto": the model itself if it is trained,
        else "unpruned"; with a loss of your own, nobody.
    baselines: also train the unpruned network and uniform widths at the same budget, in the same way. Or the names of
        rows: "unpruned", "uniform", and "original", the model as it is, which is one without being named if it is
        trained and no names are given. A fine-tuned model also has a row right after the cut.
    graph: what trace gave, if its own settings are not enough.
    fresh: a newly built model, where the given one is trained and has tensors that `reinitialize` has no rule for.
        What has requires_grad=False is neither initialized anew nor taken from it.
    latency: for budgets like "8ms": a table, see `measure_latency`, or a function that gets a network and returns its
        milliseconds. Without one prune measures first, with a batch of 1 where the model is.
    task: your own loss, metric and optimizer. One batch of val_loader is tried before the first step.
    runtime: engine, checkpoints to resume from, and who hears of each step.
    """
    check_kinds({"search": (search, SearchConfig), "train": (train, TrainConfig), "graph": (graph, ChannelGraph)})
    kind = _kind(retrain)
    loaders = loader if isinstance(loader, Loaders) else Loaders(search=loader)
    measure = None if isinstance(latency, Latency) else latency
    budget, fixed = _one_budget(search, budget), None if teacher == AUTO else teacher
    how = Retraining(train or TrainConfig(), kind, fixed, strict=teacher != AUTO)
    _check_measure(measure, budget)
    guide = copied(teacher, device_of(model)) if isinstance(teacher, nn.Module) else None
    matters = search is None or train is None or teacher == AUTO or kind is Retrain.FINETUNE  # if the model is trained
    example = preflight(
        model,
        {"loader": loaders.search, "arch_loader": loaders.arch, "train_loader": loaders.train},
        val_loader,
        networks=1 + len(_baselines(baselines, original=False)) + (teacher is not None) + matters,
        task=task,
        teacher=model if teacher == UNPRUNED else guide,
        slimmable=kind is Retrain.SLIMMABLE,
    )
    sample = first_two(example)
    with phase("trace", 1) as traced:
        graph = graph or trace(model, sample)
        if graph.exact:
            verify(model, graph, sample)  # what is cut will be what was searched
        traced(1)
    if fresh is not None:
        check_trainable(fresh)
        if fingerprint(unwrap(fresh)) != graph.fingerprint:
            raise WidthsError("fresh has another architecture than the model: build it as that was built.")
    trained = matters and is_trained(model, classes_of(model, sample), val_loader, task.metric)
    if teacher == AUTO:
        able = task.loss is None and kind is not Retrain.SLIMMABLE and can_teach(model, sample)
        teacher = (model if trained else UNPRUNED) if able else None
        guide = copied(model, device_of(model)) if teacher is model else None
    config = search or default_search(budget, trained)
    how = replace(how, config=train or default_training(kind, trained), teacher=teacher)
    _warn_of_scores(task, how)
    own = is_model(teacher, model)
    others = _baselines(baselines, original=trained or own)
    before = trained_before(model, ORIGINAL in others, guide, teacher)
    worth = None
    if guide is not None:
        rival = None if own else before.get(ORIGINAL)
        worth = weigh_teacher(guide, rival, classes_of(guide, sample), val_loader, task.metric)
        how = replace(how, teacher=guide)
    if isinstance(latency, Latency):
        graph = latency.attach(graph)
    elif limits_latency(config.budget):
        graph = _with_latency(model, graph, sample, config, measure, runtime)
    known = {"search": config, "train": how.config, "engine": runtime.engine or Engine(), "retrain": kind}
    known |= {"baselines": sorted(others), "arch_loader": loaders.arch is not None}
    runtime = _identified(runtime, known | {"optimizer": task.optimizer is not None}, model, graph, how.teacher)

    plan(_phases(config, how, loaders, graph, others | {DMCP}, val_loader))

    net = Supernet(model, graph, config.groups, config.align)
    stage = runtime.stage(SEARCH)
    found = searching.search(net, loaders.search, config, arch_loader=loaders.arch, task=task, runtime=stage)
    chosen, outcome, widths = found, None, None
    if limits_latency(found.budget):
        chosen, widths, outcome = choose_once(found, net.model, sample, measure, _folder(runtime))
    widths = widths or expected(found)
    wanted = {UNPRUNED: graph.full} if UNPRUNED in others else {}
    if UNIFORM in others:
        low, high = extremes(graph, found.sizes)
        wanted[UNIFORM] = uniform(graph, chosen.budget, low, config.align, filled(found), high)
    wanted[DMCP] = widths

    weights = net.model if kind is Retrain.FINETUNE else _untrained(model, fresh, graph, config.sort)
    nets = train_all(weights, graph, wanted, loaders.train or loaders.search, how, task=task, runtime=runtime)
    check_budget(nets[DMCP], widths, found)
    if trained and kind is Retrain.FINETUNE:
        before[CUT], wanted[CUT] = cut(weights, graph, widths), widths
        with untouched(loaders.search, device_of(model)):
            recalibrate(before[CUT], loaders.search)
    rows = compare(before | nets, graph, wanted, val_loader, example, task=task, runtime=runtime)
    for text in unknown(rows):
        warn(f"{text}.", MetricWarning)
    taught = origin(kind, who_teaches(teacher, model, worth), how.config.kd_weight, how.config.kd_temperature)
    return PruneResult(nets[DMCP], widths, graph, found, rows, taught, outcome)


def _phases(
    config: SearchConfig, how: Retraining, loaders: Loaders, graph: ChannelGraph, names: set[str], val_loader: Loader
) -> Iterator[progress.Row]:
    """Search, trainings and tests with the work of their steps, by what is usual."""
    per_epoch, work = -(-length_of(loaders.search) // config.accumulate), 0.75 * (2 + config.subnets) + 0.5
    yield progress.Row(SEARCH, per_epoch * config.epochs, config.accumulate * work, per_epoch * config.warmup_epochs)
    steps, macs = how.config.epochs * length_of(loaders.train or loaders.search), graph.macs()
    share = next((it.target / macs for it in known_limits(config.budget, graph) if it.kind == "macs"), 0.5)
    share += 1.0 if how.kind is Retrain.SLIMMABLE else 1 / 3 if how.teacher is not None else 0.0
    names = names | {UNPRUNED} if how.teacher == UNPRUNED else names
    if UNPRUNED in names:
        yield progress.Row(UNPRUNED, steps, 4 / 3 if isinstance(how.teacher, nn.Module) else 1.0)
    yield from (progress.Row(name, steps, share) for name in (UNIFORM, DMCP) if name in names)
    yield progress.Row("test", length_hint(val_loader) * len(names), 1 / 3)


# what was asked for


def _one_budget(search: SearchConfig | None, budget: int | float | str | Budget | None) -> int | float | str | Budget:
    """The budget, of which there must be one."""
    if search is not None and budget is not None and search.budget != budget:
        raise BudgetError(f"Two budgets were given, {budget!r} and {search.budget!r} in the settings: give one.")
    return search.budget if search else "50%" if budget is None else budget


def _kind(retrain: Retrain | str) -> Retrain:
    if retrain not in list(Retrain):
        raise TrainingError(f"retrain must be one of {', '.join(Retrain)}, not {retrain!r}.")
    return Retrain(retrain)


def _baselines(wanted: bool | Collection[str], original: bool) -> set[str]:
    """Names of the baselines. original: True if the unchanged model is one by default."""
    if isinstance(wanted, bool):
        return ({UNPRUNED, UNIFORM} if wanted else set()) | ({ORIGINAL} if original else set())
    if isinstance(wanted, str) or not {UNPRUNED, UNIFORM, ORIGINAL}.issuperset(wanted):
        raise TrainingError(f'baselines must be True, False, or names like ["uniform"], not {wanted!r}.')
    return set(wanted)


def _check_measure(measure: Measure | None, budget: int | float | str | Budget) -> None:
    check_function("latency", measure)
    if measure is not None and not limits_latency(budget):
        raise BudgetError(f"latency is for budgets like '8ms', and this one is {str(budget)!r}: leave it out.")


def _warn_of_scores(task: Task, how: Retraining) -> None:
    """Warn that outputs are taken for class scores, though the loss is the user's own."""
    if task.loss is None or not current().first:
        return
    if how.teacher is not None:
        warn_of_distillation("With a teacher the pruned network learns from its", "leave the teacher out")
    elif how.kind is Retrain.SLIMMABLE:
        who = 'With retrain="slimmable" the pruned network learns from the unpruned one\'s'
        warn_of_distillation(who, 'take retrain="scratch" or "finetune"')


def _identified(
    runtime: Runtime, settings: dict[str, Any], model: nn.Module, graph: ChannelGraph, teacher: nn.Module | str | None
) -> Runtime:
    """The same with checkpoints that refuse to go on with other settings, unless they have an identity already."""
    if not runtime.checkpointer or runtime.checkpointer.identity:
        return runtime
    table, guide = Latency.of(graph), teacher if isinstance(teacher, nn.Module) else None
    settings |= {"graph": graph.fingerprint, "latency": table and table.digest}
    settings |= {"teacher": teacher if guide is None else TEACHER}
    taught = None if guide is None else guide.state_dict()
    identity = plain_settings(settings, unwrap(model).state_dict(), current(), taught)
    return replace(runtime, checkpointer=replace(runtime.checkpointer, identity=identity))


def _untrained(model: nn.Module, fresh: nn.Module | None, graph: ChannelGraph, ordered: bool) -> nn.Module:
    """The model that networks to be trained from scratch are cut from; parameters that are frozen keep their values.

    ordered: whether the search has ordered the channels, of which the first ones are kept.
    """
    if ordered and not all(parameter.requires_grad for parameter in model.parameters()):
        net = Supernet(model, graph)
        sort_channels(net)
        model = net.model
    return with_frozen(fresh or model, model)


# latency


def _folder(runtime: Runtime) -> Any:
    return runtime.checkpointer.stage(SEARCH).folder if runtime.checkpointer else None


def _with_latency(
    model: nn.Module, graph: ChannelGraph, sample: Any, config: SearchConfig, measure: Measure | None, runtime: Runtime
) -> ChannelGraph:
    """The graph with a latency table: its own, that of an earlier run, or a new one."""

    def measure_first() -> Latency:
        found = time_networks(model, sample, graph, config, measure=measure)
        runtime.emit(LATENCY, len(found.networks), found)
        return found

    return attach_latency(graph, config.budget, measure_first, folder=_folder(runtime))


def time_networks(
    model: nn.Module,
    sample: Any,
    graph: ChannelGraph,
    settings: SearchConfig,
    config: LatencyConfig | None = None,
    measure: Measure | None = None,
) -> Latency:
    """A latency table between the smallest and the largest widths of a search that can reach its budget."""
    net = Supernet(model, graph, settings.groups, settings.align)
    path = chains(net, process_of(settings.independent), settings.min_channels, settings.max_channels, settings.align)
    low, high = extremes(graph, path.sizes)
    if limits := known_limits(settings.budget, graph):
        check_reachable(Budget(limits, str(getattr(settings.budget, "text", settings.budget))), graph, low, high)
    searching.check_choice(path)
    config = replace(config or LatencyConfig(), min_channels=low, max_channels=high, align=settings.align)
    return measure_latency(model, sample, graph, config, measure=measure)


# what came out


def check_budget(small: nn.Module, widths: Widths, found: SearchResult) -> None:
    """Count the cut network once more against every limit."""
    for limit in found.budget.limits:
        params = sum(parameter.numel() for parameter in small.parameters())
        spent = params if limit.kind == "params" else found.graph.cost(limit.kind, widths)
        if spent > limit.target:
            has, allowed = (show_cost(limit.kind, it) for it in (spent, limit.target))
            raise BudgetError(f"The cut network has {has}, more than the {allowed} allowed: please report this.")


def expected_shares(found: SearchResult) -> tuple[float, ...]:
    """Expected cost / target of each limit at the end of a search, before any rounding and repair."""
    chances = found.process.marginals(found.alphas.double()) * (found.sizes > 0)
    return tuple(ratios(found.budget, found.graph, chances, found.sizes, found.process).tolist())
