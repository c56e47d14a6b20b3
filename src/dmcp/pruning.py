"""prune: search, sample, cut, train, and compare with what was there before."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import length_hint
from pathlib import Path
from typing import Any

from torch import nn

from dmcp import progress
from dmcp.batches import FewBatches, Loader, device_of, length_of, size_of
from dmcp.budget import LATENCY, Budget, check_reachable, known_limits, limits_latency, parse, ratios, show_cost
from dmcp.checkpoint import plain_settings
from dmcp.compare.methods import Own, choose_all, find_method
from dmcp.compare.problem import Choice, Problem
from dmcp.cutting import cut, verify, with_frozen
from dmcp.errors import BudgetError, DmcpError, TrainingError, WidthsError
from dmcp.latency.measure import Measure, attach_latency, choose_once, measure_latency
from dmcp.latency.table import Latency, Outcome
from dmcp.losses import MetricWarning, warn, warn_of_distillation
from dmcp.markov import group_sizes, process_of
from dmcp.modules import check_function, check_kinds, unwrap
from dmcp.preflight import can_teach, classes_of, first_two, preflight
from dmcp.progress import phase, plan, shown
from dmcp.results import CUT, DMCP, ORIGINAL, TEACHER, UNIFORM, UNPRUNED, Row, compare, results_table, unknown
from dmcp.retraining import (
    Retraining,
    calibrated,
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
from dmcp.searching.config import SearchResult, bounds, extremes
from dmcp.searching.search import SEARCH
from dmcp.searching.subnets import chains, sort_channels
from dmcp.settings import AUTO, Engine, LatencyConfig, Retrain, SearchConfig, TrainConfig, defaults, middle
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.training import Runtime, Task, check_trainable
from dmcp.widths import Widths, fingerprint

Spec = int | float | str | Budget  # a budget as it is written
_COMMON = (ORIGINAL, TEACHER, UNPRUNED)  # rows that all budgets share


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """Batches of each part of `prune`, where one loader is not enough."""

    search: Loader
    arch: Loader | None = None  # for the alphas, if other ones than for the weights
    train: Loader | None = None  # for the final training, if other ones than for the search


@dataclass(frozen=True, eq=False)
class PruneResult:
    """The smaller network, and how it was found."""

    model: nn.Module  # a plain module of the user's own class; of several budgets that of the first, as `widths`
    widths: Widths
    graph: ChannelGraph
    search: SearchResult | None  # None: a method that does not search
    rows: tuple[Row, ...]
    budget: Budget
    origin: str = ""  # where the weights come from, in words
    latency: Outcome | None = None  # of a budget with a limit of latency: what it asks for, and what was measured
    front: Mapping[str, PruneResult] = field(default_factory=dict)  # of several budgets: the result of each

    @property
    def table(self) -> str:
        """The rows as text, and what they mean."""
        times = [it.latency.text for it in self.front.values() or [self] if it.latency is not None]
        return "\n".join([results_table(self.rows, self.graph, self.origin), *times])


@shown
def prune(
    model: nn.Module,
    loader: Loader | Loaders,
    val_loader: Loader,
    budget: Spec | Sequence[Spec] | None = None,
    *,
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
    """Search the widths of the model inside the budget, cut it, train it, and test it. The model is not changed.

    budget: 0.5, "50%", "211M", "params:2M", "8ms", "50%,params:2M"; "50%" unless the search's settings have one. A list
        of such: one search, at the budget of its settings or the middle one, and a network for each: see `front`.
    method: "dmcp" searches. "l1", "l2", "uniform" and all others of `dmcp compare` choose widths and channels in their
        own way; what they choose is then trained and tested like the rest.
    search, train: all settings. Without them they follow the number of images, and whether the model is trained, which
        a test shows: see `dmcp.settings.defaults`.
    retrain: how the pruned network gets its weights. "finetune" goes on from those of the search. "scratch", the
        paper's way, initializes them anew; "slimmable" is the paper's DMCP*; "none" only calibrates BatchNorms.
    teacher: a trained network with the same classes, of any architecture, that all networks learn from besides the
        labels. "unpruned": the unpruned network, which is trained first. "auto": the model itself if it is trained,
        else "unpruned"; with a loss of your own, nobody.
    baselines: also train the unpruned network and uniform widths at the same budget, in the same way. Or the names of
        rows: "unpruned", "uniform", and "original", the model as it is, which is one without being named if it is
        trained and no names are given. A fine-tuned model also has a row right after the cut.
    graph: what trace gave, if its own settings are not enough.
    latency: for budgets like "8ms": a table, see `measure_latency`, or a function that gets a network and returns its
        milliseconds. Without one prune measures first, with a batch of 1 where the model is.
    task: your own loss, metric and optimizer, and a newly built model where the given one is trained and has tensors
        that `reinitialize` has no rule for. One batch of val_loader is tried before the first step.
    runtime: engine, checkpoints to resume from, and who hears of each step.
    """
    check_kinds({"search": (search, SearchConfig), "train": (train, TrainConfig), "graph": (graph, ChannelGraph)})
    kind, searches = _kind(retrain), check_method(method)
    loaders = loader if isinstance(loader, Loaders) else Loaders(search=loader)
    measure = None if isinstance(latency, Latency) else latency
    specs, fixed = _specs(search, budget), None if teacher == AUTO else teacher
    how = Retraining(train or TrainConfig(), kind, fixed, strict=teacher != AUTO)
    _check_measure(measure, specs)
    guide = copied(teacher, device_of(model)) if isinstance(teacher, nn.Module) else None
    matters = search is None or train is None or teacher == AUTO or kind is Retrain.FINETUNE or not searches
    example = preflight(
        model,
        {"loader": loaders.search, "arch_loader": loaders.arch, "train_loader": loaders.train},
        val_loader,
        networks=len(specs) + len(_baselines(baselines, original=False)) + (teacher is not None) + matters,
        task=task,
        teacher=model if teacher == UNPRUNED else guide,
        slimmable=kind is Retrain.SLIMMABLE,
    )
    sample = first_two(example)
    with phase("trace", 1) as traced:
        graph = graph or trace(model, sample)
        if graph.exact and searches:
            verify(model, graph, sample)  # what is cut will be what was searched
        traced(1)
    if task.fresh is not None:
        check_trainable(task.fresh)
        if fingerprint(unwrap(task.fresh)) != graph.fingerprint:
            raise WidthsError("fresh has another architecture than the model: build it as that was built.")
    trained = matters and is_trained(model, classes_of(model, sample), val_loader, task.metric)
    if teacher == AUTO:
        able = task.loss is None and kind in (Retrain.FINETUNE, Retrain.SCRATCH) and can_teach(model, sample)
        teacher = (model if trained else UNPRUNED) if able else None
        guide = copied(model, device_of(model)) if teacher is model else None
    batch, plain = size_of((example,)) * current().size, loaders.search
    sizes = {"images": length_of(plain) * batch, "batch": batch}
    usual = defaults(middle(specs), kind, trained=trained, own_loss=task.loss is not None, **sizes)
    if search is None and searches and usual.search_images:
        few = FewBatches(plain, -(-usual.search_images // batch))
        loaders = replace(loaders, search=few, train=loaders.train or plain)
    config, how = search or usual.search, replace(how, config=train or usual.train, teacher=teacher)
    _warn_of_scores(task, how)
    own = is_model(teacher, model)
    others = _baselines(baselines, original=trained or own) - {method}
    others -= {UNIFORM} if method == "l2" else set()  # which is the same network
    before = trained_before(model, ORIGINAL in others, guide, teacher)
    worth = None
    if guide is not None:
        rival = None if own else before.get(ORIGINAL)
        worth = weigh_teacher(guide, rival, classes_of(guide, sample), val_loader, task.metric)
        how = replace(how, teacher=guide)
    if isinstance(latency, Latency):
        graph = latency.attach(graph)
    elif timed := [spec for spec in specs if limits_latency(spec)]:
        graph = _with_latency(model, graph, sample, replace(config, budget=timed[0]), measure, runtime)
    low, high = reachable(graph, config)
    budgets = read_budgets(specs, graph, low, high)
    known = {"search": config, "train": how.config, "engine": runtime.engine or Engine(), "retrain": kind}
    known |= {"baselines": sorted(others), "arch_loader": loaders.arch is not None, "method": method}
    known |= {"budgets": [*budgets], "optimizer": task.optimizer is not None}
    runtime = _identified(runtime, known, model, graph, how.teacher)

    def named(row: str, name: str) -> str:
        """The row of one of several budgets."""
        return f"{row} {name}" if len(budgets) > 1 else row

    both = (UNIFORM, method) if UNIFORM in others else (method,)
    shares = {UNPRUNED: 1.0} if UNPRUNED in others or teacher == UNPRUNED else {}
    shares |= {named(row, name): _share_of(it, graph) for name, it in budgets.items() for row in both}
    plan(_phases(config if searches else None, how, loaders, shares, val_loader))

    training: dict[str, Any] = {"loader": loaders.train or loaders.search, "task": task, "runtime": runtime}
    work = _Work(graph, loaders, config, how.config, budgets, (low, high), task, runtime)
    nets, source, found = dict[str, nn.Module](), unwrap(model), None
    if searches:
        found, chosen = work.search(model, sample, measure)
        source = chosen[next(iter(budgets))].choice.model or source
    else:
        ranks = find_method(method).trained
        if ranks and not trained and kind is Retrain.NONE:
            warn(f"The network is not trained, so {method} ranks random weights.", UserWarning)
        elif ranks and not trained:
            nets = train_all(source, graph, {UNPRUNED: graph.full}, how=how, **training)
            source = nets[UNPRUNED]
            how = replace(how, teacher=source) if teacher == UNPRUNED else how
        chosen = work.choose(method, source)

    wanted = {UNPRUNED: graph.full} if UNPRUNED in others and not nets else {}
    cuts, anew = dict[str, nn.Module](), kind in (Retrain.SCRATCH, Retrain.SLIMMABLE)
    for name, it in chosen.items():
        if UNIFORM in others:
            limit = it.search.budget if it.search else budgets[name]
            same = wanted[named(UNIFORM, name)] = uniform(graph, limit, low, config.align, filled(config), high)
            cuts[named(UNIFORM, name)] = cut(source, graph, same, by="first" if searches else "l2")
        wanted[named(method, name)] = it.choice.widths
        cuts[named(method, name)] = it.cut(source, graph)
        if trained and kind is Retrain.FINETUNE:
            before[named(CUT, name)] = calibrated(it.cut(source, graph), plain)
    weights = _untrained(model, task.fresh, graph, config.sort or not searches) if anew else source
    nets |= train_all(weights, graph, wanted, how=how, cuts={} if anew else cuts, **training)
    for name, it in chosen.items():
        check_budget(nets[named(method, name)], it.choice.widths, graph, budgets[name])
        wanted[named(CUT, name)] = it.choice.widths
    rows = compare(before | nets, graph, wanted, val_loader, example, task=task, runtime=runtime)
    for text in unknown(rows):
        warn(f"{text}.", MetricWarning)
    kd = (how.config.kd_weight, how.config.kd_temperature)
    earlier = "the weights of the search" if searches else "the weights that it kept"
    text = origin(kind, who_teaches(teacher, model, worth), *kd, method, earlier)
    results: dict[str, PruneResult] = {}
    for name, it in chosen.items():
        names = {named(row, name): row for row in (CUT, UNIFORM, method)} | {row: row for row in _COMMON}
        mine = tuple(replace(row, name=names[row.name]) for row in rows if row.name in names)
        small, searched = nets[named(method, name)], it.search and replace(it.search, budget=budgets[name])
        results[name] = PruneResult(small, it.choice.widths, graph, searched, mine, budgets[name], text, it.latency)
    first = next(iter(results.values()))
    return replace(first, rows=rows, front=results, search=found) if len(results) > 1 else first


def _phases(
    config: SearchConfig | None, how: Retraining, loaders: Loaders, sizes: Mapping[str, float], val_loader: Loader
) -> Iterator[progress.Row]:
    """Search, trainings and tests with the work of their steps; sizes: shares of the MACs that networks have."""
    if config is not None:
        per_epoch, work = -(-length_of(loaders.search) // config.accumulate), 0.75 * (2 + config.subnets) + 0.5
        warmup = per_epoch * config.warmup_epochs
        yield progress.Row(SEARCH, per_epoch * config.epochs, config.accumulate * work, warmup)
    steps = how.config.epochs * length_of(loaders.train or loaders.search)
    more = 1.0 if how.kind is Retrain.SLIMMABLE else 1 / 3 if how.teacher is not None else 0.0
    for name, share in sizes.items() if how.kind is not Retrain.NONE else ():
        learns = name != UNPRUNED or isinstance(how.teacher, nn.Module)
        yield progress.Row(name, steps, share + more * learns)
    yield progress.Row("test", length_hint(val_loader) * len(sizes), 1 / 3)


def _share_of(budget: Budget, graph: ChannelGraph) -> float:
    """The share of the MACs that a budget allows, or a guess."""
    return next((it.target / graph.macs() for it in budget.limits if it.kind == "macs"), 0.5)


# what was asked for


def _specs(search: SearchConfig | None, budget: Spec | Sequence[Spec] | None) -> list[Spec]:
    """The budgets, at least one; with settings of the search and a list, these say what is searched for."""
    if not isinstance(budget, str | int | float | Budget | None):
        if not budget:
            raise BudgetError("The list of budgets is empty: give at least one.")
        return [*budget]
    if search is not None and budget is not None and search.budget != budget:
        raise BudgetError(f"Two budgets were given, {budget!r} and {search.budget!r} in the settings: give one.")
    return [search.budget if search else "50%" if budget is None else budget]


def read_budgets(specs: Sequence[Spec], graph: ChannelGraph, low: Widths, high: Widths) -> dict[str, Budget]:
    """Budgets by the names of their rows and folders; BudgetError for one that is there twice or out of reach."""
    found: dict[str, Budget] = {}
    for spec in specs:
        budget = parse(spec, graph)
        check_reachable(budget, graph, low, high)
        if any(set(budget.limits) == set(other.limits) for other in found.values()):
            raise BudgetError(f"The budget {budget.text!r} is given twice: give each once.")
        found[re.sub(r"[^\w%.]+", "-", budget.text)] = budget
    return found


def reachable(graph: ChannelGraph, config: SearchConfig) -> tuple[Widths, Widths]:
    """The smallest and the largest widths by these settings: a space keeps at least its first group."""
    ends = bounds(graph, config.min_channels, config.max_channels, config.align)
    groups = [group_sizes(it.size, config.groups, it.step(config.align))[0] for it in graph.spaces]
    low = [min(max(first, least), most) for first, (least, most) in zip(groups, ends, strict=True)]
    return graph.widths(low), graph.widths([most for _, most in ends])


def check_method(name: str) -> bool:
    """True for our own search; DmcpError for a method that is not there, or not for one run."""
    if name == DMCP:
        return True
    method = find_method(name)
    if method.one_ratio and method.own is Own.SLIMMABLE:
        raise DmcpError(f'{name} is method="uniform" with retrain="slimmable": give these.')
    return False


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


def _check_measure(measure: Measure | None, specs: Sequence[Spec]) -> None:
    check_function("latency", measure)
    if measure is not None and not any(map(limits_latency, specs)):
        raise BudgetError(f"latency is for budgets like '8ms', and this one is {str(specs[0])!r}: leave it out.")


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


# widths for one budget


@dataclass(frozen=True, eq=False)
class _Chosen:
    """What is cut for one budget, and the search that it comes from."""

    choice: Choice
    search: SearchResult | None = None  # with the limit of latency that was used
    latency: Outcome | None = None

    def cut(self, source: nn.Module, graph: ChannelGraph) -> nn.Module:
        """The cut network with the weights that it keeps; those of the source where the method has no own."""
        if self.choice.model is None:
            return cut(source, graph, self.choice.widths, by="l2")
        return cut(self.choice.model, graph, self.choice.kept)


@dataclass(frozen=True, eq=False)
class _Work:
    """What widths are chosen with."""

    graph: ChannelGraph
    loaders: Loaders
    config: SearchConfig
    recipe: TrainConfig
    budgets: Mapping[str, Budget]
    bounds: tuple[Widths, Widths]
    task: Task
    runtime: Runtime

    def search(self, model: nn.Module, sample: Any, measure: Measure | None) -> tuple[SearchResult, dict[str, _Chosen]]:
        """One search, and the expected widths for each budget, which may be another one than that of the search."""
        net, stage = Supernet(model, self.graph, self.config.groups, self.config.align), self.runtime.stage(SEARCH)
        arch, chosen = self.loaders.arch, dict[str, _Chosen]()
        found = searching.search(net, self.loaders.search, self.config, arch_loader=arch, task=self.task, runtime=stage)
        for name, budget in self.budgets.items():
            own, outcome = for_budget(found, budget), None
            if limits_latency(budget):
                folder = _folder(self.runtime, name if len(self.budgets) > 1 else "")
                own, widths, outcome = choose_once(own, net.model, sample, measure, folder)
            else:
                widths = expected(own)
            chosen[name] = _Chosen(Choice(widths=widths, kept=widths, model=net.model), own, outcome)
        return found, chosen

    def choose(self, method: str, source: nn.Module) -> dict[str, _Chosen]:
        """What a method that does not search chooses in this network."""
        problem = Problem(
            model=source,
            graph=self.graph,
            loader=self.loaders.search,
            held_out=self.loaders.arch or self.loaders.search,
            budget=next(iter(self.budgets.values())),
            recipe=self.recipe,
            min_widths=self.bounds[0],
            max_widths=self.bounds[1],
            align=self.config.align,
            seed=self.config.seed,
            task=self.task,
            runtime=self.runtime,
        )
        return {name: _Chosen(it) for name, it in choose_all(method, problem, self.budgets).items()}


def for_budget(found: SearchResult, budget: Budget) -> SearchResult:
    """A search as if it had been for another budget: its steps are the same, their costs shares of this one."""
    if budget.limits == found.budget.limits:
        return found
    old, new = ({it.kind: it.target for it in own.limits} for own in (found.budget, budget))
    log = found.log if [*old] == [*new] else ()
    scales = [old[kind] / new[kind] for kind in old] if log else []
    log = tuple(
        replace(it, ratios=it.ratios and tuple(ratio * scale for ratio, scale in zip(it.ratios, scales, strict=True)))
        for it in log
    )
    return replace(found, budget=budget, log=log)


# latency


def _folder(runtime: Runtime, name: str = "") -> Path | None:
    """Where a table and a choice of latency are kept; name: of one of several budgets."""
    return runtime.checkpointer.stage(f"{SEARCH} {name}".strip()).folder if runtime.checkpointer else None


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


def check_budget(small: nn.Module, widths: Widths, graph: ChannelGraph, budget: Budget) -> None:
    """Count the cut network once more against every limit."""
    for limit in budget.limits:
        params = sum(parameter.numel() for parameter in small.parameters())
        spent = params if limit.kind == "params" else graph.cost(limit.kind, widths)
        if spent > limit.target:
            has, allowed = (show_cost(limit.kind, it) for it in (spent, limit.target))
            raise BudgetError(f"The cut network has {has}, more than the {allowed} allowed: please report this.")


def expected_shares(found: SearchResult) -> tuple[float, ...]:
    """Expected cost / target of each limit at the end of a search, before any rounding and repair."""
    chances = found.process.marginals(found.alphas.double()) * (found.sizes > 0)
    return tuple(ratios(found.budget, found.graph, chances, found.sizes, found.process).tolist())
