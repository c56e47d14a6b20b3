"""prune: search, sample, cut, train, and compare with what was there before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import length_hint, mul
from pathlib import Path
from typing import Any

from torch import nn

from dmcp import retraining
from dmcp.arguments import checked
from dmcp.budgets import LATENCY, Budget, choose_middle, limits_latency, read_budget, show_cost
from dmcp.compare.methods import Own, chooser, find_method
from dmcp.compare.problem import Choice, Problem
from dmcp.cutting import cut, with_frozen
from dmcp.errors import BudgetError, DmcpError, TrainingError, WidthsError
from dmcp.exporting.latency import (
    Latency,
    LatencyOutcome,
    attach_latency,
    choose_within_latency,
    measure_latency,
    timer_like,
)
from dmcp.exporting.timing import Measure, Timer
from dmcp.markov import group_sizes
from dmcp.results import CUT, DMCP, ORIGINAL, TEACHER, UNIFORM, UNPRUNED, Row, compare, results_table, unknown
from dmcp.retraining import Retraining, calibrated, copied, is_model, is_trained, train_all, trained_before
from dmcp.runtime import progress
from dmcp.runtime.batches import FewBatches, Loader, device_of, length_of, size_of
from dmcp.runtime.checkpoint import digest_of_loader, plain_settings
from dmcp.runtime.distributed import current
from dmcp.runtime.progress import phase, plan, shown
from dmcp.searching import search as searching
from dmcp.searching.budget import check_reachable, counted_part, parse_budget
from dmcp.searching.records import SearchResult, bounds
from dmcp.searching.sampling import expected, filled, uniform
from dmcp.searching.search import SEARCH
from dmcp.searching.subnets import sort_channels
from dmcp.searching.supernet import Supernet
from dmcp.settings import AUTO, Engine, LatencyConfig, Retrain, SearchConfig, TrainConfig, defaults
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import unwrap, without_autocast
from dmcp.tracing.trace import trace
from dmcp.tracing.verification import verify
from dmcp.tracing.widths import Widths, fingerprint
from dmcp.training.loop import Runtime, Task
from dmcp.training.losses import MetricWarning, warn, warn_of_distillation
from dmcp.training.preflight import can_teach, classes_of, first_two, preflight

Spec = int | float | str | Budget  # a budget as it is written
_COMMON = (ORIGINAL, TEACHER, UNPRUNED)  # rows that all budgets share


@checked
@dataclass(frozen=True, kw_only=True)
class Loaders:
    """Batches of each part of `prune`, where one loader is not enough."""

    search: Loader
    arch: Loader | None = None  # for the alphas, if other ones than for the weights
    train: Loader | None = None  # for the final training, if other ones than for the search

    @property
    def final(self) -> Loader:
        """Those of the final training."""
        return self.train or self.search


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
    latency: LatencyOutcome | None = None  # of a budget that limits latency: what it asks for, and what was measured
    front: Mapping[str, PruneResult] = field(default_factory=dict)  # of several budgets: the result of each

    @property
    def table(self) -> str:
        """The rows as text, and what they mean."""
        times = [it.latency.text for it in self.front.values() or [self] if it.latency is not None]
        return "\n".join([results_table(self.rows, self.graph, self.origin), *times])


@checked
@shown
@without_autocast
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
    baselines: True also trains the unpruned network and uniform widths at the same budget, in the same way. Or a list
        of "unpruned", "uniform" and "original", the model as given. Without a list a trained model is a row, too, and
        so is its pruned network right after the cut.
    graph: what trace gave, if its own settings are not enough.
    latency: for budgets like "8ms": a table, see `measure_latency`, or a function that gets a network and returns its
        milliseconds. Without one prune measures first, with a batch of 1 where the model is.
    task: your own loss, metric and optimizer, and a newly built model where the given one is trained and has tensors
        that `reinitialize` has no rule for. One batch of val_loader is tried before the first step,
        and without a metric of your own all its labels are looked at.
    runtime: engine, checkpoints to resume from, and who hears of each step.
    """
    kind, searches, specs = Retrain(retrain), check_method(method), read_specs(search, budget)
    loaders = loader if isinstance(loader, Loaders) else Loaders(search=loader)
    Retraining(TrainConfig(), kind, None if teacher == AUTO else teacher)  # refuses a teacher that is of no use
    guide = copied(teacher, device_of(model)) if isinstance(teacher, nn.Module) else None
    matters = search is None or train is None or teacher == AUTO or kind is Retrain.FINETUNE or not searches
    example, metric = preflight(
        model,
        {"loader": loaders.search, "arch_loader": loaders.arch, "train_loader": loaders.train},
        val_loader,
        networks=len(specs) + len(_baselines(baselines, original=False)) + (teacher is not None) + matters,
        task=task,
        teacher=model if teacher == UNPRUNED else guide,
        slimmable=kind is Retrain.SLIMMABLE,
        tested=matters,
    )
    sample, plain, task = first_two(example), loaders.search, replace(task, metric=metric)
    with phase("trace", 1) as traced:
        graph = graph or trace(model, sample)
        if graph.exact and not graph.verified:
            verify(model, graph, sample)  # what is cut will be what was searched
        traced(1)
    if task.fresh is not None and fingerprint(unwrap(task.fresh)) != graph.fingerprint:
        raise WidthsError("fresh has another architecture than the model: build it as that was built.")
    trained = matters and is_trained(model, classes_of(model, sample), val_loader, task.metric)
    if teacher == AUTO:
        able = task.loss is None and kind in (Retrain.FINETUNE, Retrain.SCRATCH) and can_teach(model, sample)
        teacher = (model if trained else UNPRUNED) if able else None
        guide = copied(model, device_of(model)) if teacher is model else None
    own = is_model(teacher, model)
    if guide is not None and not own and task.metric is None:
        retraining.weigh_teacher(guide, classes_of(guide, sample), val_loader)
    batch = size_of((example,)) * current().size
    sizes = {"images": length_of(plain) * batch, "batch": batch}
    usual = defaults(choose_middle(specs), kind, trained=trained, own_loss=task.loss is not None, **sizes)
    if search is None and searches and usual.search_images:
        few = FewBatches(plain, -(-usual.search_images // batch))
        loaders = replace(loaders, search=few, train=loaders.train or plain)
    config, how = search or usual.search, Retraining(train or usual.train, kind, teacher if guide is None else guide)
    if teacher is not None or kind is Retrain.SLIMMABLE:
        remedy = 'leave the teacher out, and take retrain="scratch" or "finetune"'
        warn_of_distillation(task.loss, "The pruned network learns from another one's", remedy)
    graph, clock = with_latency(model, graph, sample, specs, config, latency, runtime)
    others = _baselines(baselines, original=trained or own) - {method, UNIFORM if method == "l2" else ""}
    budgets = read_budgets(specs, graph, *reachable(graph, config))
    work = Work(model, graph, budgets, others, method, config, how, loaders, task, runtime, clock).identified()
    plan(work.phases(val_loader))
    before = trained_before(model, ORIGINAL in others, None if own else guide)
    nets, found = dict[str, nn.Module](), None
    if searches:
        found, chosen = work.search()
    else:
        nets, chosen = work.choose(trained)
    if trained and kind is Retrain.FINETUNE:
        before |= {work.row(CUT, name): calibrated(it.cut(graph), plain) for name, it in chosen.items()}
    nets, widths = work.train(chosen, nets)
    rows = compare(before | nets, graph, widths, val_loader, example, task=task, runtime=work.runtime)
    for text in unknown(rows):
        warn(f"{text}.", MetricWarning)
    earlier = "the weights of the search" if searches else "the weights that it kept"
    text = retraining.origin(how, retraining.who_teaches(teacher, model), method, earlier)
    results = work.results(chosen, nets, rows, text)
    first = next(iter(results.values()))
    return replace(first, rows=rows, front=results, search=found) if len(results) > 1 else first


# what was asked for


def read_specs(search: SearchConfig | None, budget: Spec | Sequence[Spec] | None) -> list[Spec]:
    """The budgets, at least one; with settings of the search and a list, these say what is searched for."""
    if isinstance(budget, Sequence) and not isinstance(budget, str):
        if not budget:
            raise BudgetError("The list of budgets is empty: give at least one.")
        specs = [*budget]
    elif search is not None and budget is not None and search.budget != budget:
        raise BudgetError(f"Two budgets were given, {budget!r} and {search.budget!r} in the settings: give one.")
    else:
        specs = [search.budget if search else "50%" if budget is None else budget]
    for spec in specs:
        read_budget(spec)  # refuses what cannot be read before anything runs
    return specs


def read_budgets(specs: Sequence[Spec], graph: ChannelGraph, low: Widths, high: Widths) -> dict[str, Budget]:
    """Budgets by the names of their rows and folders; BudgetError for one that is there twice or out of reach."""
    found: dict[str, Budget] = {}
    for spec in specs:
        budget = parse_budget(spec, graph)
        check_reachable(budget, graph, low, high)
        if any(set(budget.limits) == set(other.limits) for other in found.values()):
            raise BudgetError(f"The budget {budget.text!r} is given twice: give each once.")
        found[budget.file_name] = budget
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


def _baselines(wanted: bool | Collection[str], original: bool) -> set[str]:
    """Names of the baselines. original: True if the unchanged model is one by default."""
    if isinstance(wanted, bool):
        return ({UNPRUNED, UNIFORM} if wanted else set()) | ({ORIGINAL} if original else set())
    if isinstance(wanted, str) or not {UNPRUNED, UNIFORM, ORIGINAL}.issuperset(wanted):
        raise TrainingError(f'baselines must be True, False, or names like ["uniform"], not {wanted!r}.')
    return set(wanted)


# search, cut, train


@dataclass(frozen=True, eq=False)
class _Chosen:
    """What is cut for one budget, and the search that it comes from."""

    choice: Choice
    source: nn.Module  # the network that was looked at
    budget: Budget  # with the limit of latency that was used
    search: SearchResult | None = None
    latency: LatencyOutcome | None = None

    def cut(self, graph: ChannelGraph) -> nn.Module:
        """The cut network with the weights that it keeps; those of the source where the method has no own."""
        if self.choice.model is None:
            return cut(self.source, graph, self.choice.widths, by="l2")
        return cut(self.choice.model, graph, self.choice.kept)


@dataclass(frozen=True, eq=False)
class Work:
    """What is pruned, for which budgets and how; its methods are the parts of `prune` that take long."""

    model: nn.Module
    graph: ChannelGraph
    budgets: Mapping[str, Budget]
    baselines: set[str]
    method: str
    config: SearchConfig
    how: Retraining
    loaders: Loaders
    task: Task
    runtime: Runtime
    clock: Timer | None  # of a limit of latency: what measures as its table was measured, if that is here

    def identified(self) -> Work:
        """The same with checkpoints that refuse to go on with other settings, unless they have an identity already."""
        if not self.runtime.checkpointer or self.runtime.checkpointer.identity:
            return self
        table, how = Latency.of(self.graph), self.how
        guide = how.teacher if isinstance(how.teacher, nn.Module) else None
        settings: dict[str, Any] = {"search": self.config, "train": how.config, "retrain": how.kind}
        settings |= {"engine": self.runtime.engine or Engine(), "method": self.method, "budgets": [*self.budgets]}
        settings |= {"baselines": sorted(self.baselines), "graph": self.graph.fingerprint}
        settings |= {"arch_loader": self.loaders.arch is not None, "optimizer": self.task.optimizer is not None}
        settings |= {"latency": table and table.digest, "teacher": how.teacher if guide is None else TEACHER}
        loaders = {"loader": self.loaders.search, "arch_loader": self.loaders.arch, "train_loader": self.loaders.train}
        settings |= {f"data of {name}": digest_of_loader(loader, current()) for name, loader in loaders.items()}
        weights, taught = unwrap(self.model).state_dict(), None if guide is None else guide.state_dict()
        identity = plain_settings(settings, weights, current(), taught)
        checkpointer = replace(self.runtime.checkpointer, identity=identity)
        return replace(self, runtime=replace(self.runtime, checkpointer=checkpointer))

    def row(self, kind: str, name: str) -> str:
        """The row of one of several budgets."""
        return f"{kind} {name}" if len(self.budgets) > 1 else kind

    def phases(self, val_loader: Loader) -> Iterator[progress.Row]:
        """Search, trainings and tests with the work of their steps, which is in proportion to MACs."""
        config, how = self.config, self.how
        if self.method == DMCP:
            per_epoch, work = -(-length_of(self.loaders.search) // config.accumulate), 0.75 * (2 + config.subnets) + 0.5
            yield progress.Row(SEARCH, per_epoch * config.epochs, config.accumulate * work)
        shares = {UNPRUNED: 1.0} if UNPRUNED in self.baselines or how.teacher == UNPRUNED else {}
        for name, budget in self.budgets.items():
            share = next((it.target / self.graph.macs() for it in budget.limits if it.kind == "macs"), 0.5)
            kinds = (UNIFORM, self.method) if UNIFORM in self.baselines else (self.method,)
            shares |= {self.row(kind, name): share for kind in kinds}
        steps = how.config.epochs * length_of(self.loaders.final)
        more = 1.0 if how.kind is Retrain.SLIMMABLE else 1 / 3 if how.teacher is not None else 0.0
        for name, share in shares.items() if how.kind is not Retrain.NONE else ():
            learns = name != UNPRUNED or isinstance(how.teacher, nn.Module)
            yield progress.Row(name, steps, share + more * learns)
        yield progress.Row("test", length_hint(val_loader) * len(shares), 1 / 3)

    def search(self) -> tuple[SearchResult, dict[str, _Chosen]]:
        """One search, and the expected widths for each budget, which may be another one than that of the search."""
        net, stage = Supernet(self.model, self.graph, self.config.groups, self.config.align), self.runtime.stage(SEARCH)
        arch = self.loaders.arch
        found = searching.search(net, self.loaders.search, self.config, arch_loader=arch, task=self.task, runtime=stage)

        def pick(budget: Budget) -> _Chosen:
            widths = expected(replace(found, budget=budget))
            return _Chosen(Choice(widths=widths, kept=widths, model=net.model), net.model, budget, found)

        return found, self.timed(pick)

    def choose(self, trained: bool) -> tuple[dict[str, nn.Module], dict[str, _Chosen]]:
        """What a method without a search chooses. If it ranks trained weights, a fresh network is trained first."""
        nets, source = dict[str, nn.Module](), unwrap(self.model)
        if find_method(self.method).trained and not trained:
            if self.how.kind is Retrain.NONE:
                warn(f"The network is not trained, so {self.method} ranks random weights.", UserWarning)
            else:
                full, loader = {UNPRUNED: self.graph.full}, self.loaders.final
                nets = train_all(source, self.graph, full, loader, self.how, task=self.task, runtime=self.runtime)
                source = nets[UNPRUNED]
        low, high = reachable(self.graph, self.config)
        problem = Problem(
            model=source,
            graph=self.graph,
            loader=self.loaders.search,
            held_out=self.loaders.arch or self.loaders.search,
            budget=next(iter(self.budgets.values())),
            recipe=self.how.config,
            min_widths=low,
            max_widths=high,
            align=self.config.align,
            seed=self.config.seed,
            task=self.task,
            runtime=self.runtime,
        )
        find = chooser(self.method, problem, len(self.budgets) == 1 and not limits_latency(problem.budget))
        return nets, self.timed(lambda budget: _Chosen(find(budget), source, budget))

    def timed(self, pick: Callable[[Budget], _Chosen]) -> dict[str, _Chosen]:
        """What is picked for each budget; with a limit of latency it is measured, and picked again if too slow."""
        found, (low, _) = dict[str, _Chosen](), reachable(self.graph, self.config)

        def cut_too(budget: Budget) -> tuple[_Chosen, Widths, nn.Module]:
            it = pick(budget)
            return it, it.choice.widths, it.cut(self.graph)

        for name, budget in self.budgets.items():
            if limits_latency(budget):
                folder, lowest = _folder(self.runtime, name * (len(self.budgets) > 1)), self.graph.cost(LATENCY, low)
                it, outcome = choose_within_latency(
                    cut_too, budget, self.graph, lowest=lowest, model=self.model, timer=self.clock, folder=folder
                )
                found[name] = replace(it, latency=outcome)
            else:
                found[name] = pick(budget)
        return found

    def train(
        self, chosen: Mapping[str, _Chosen], nets: dict[str, nn.Module]
    ) -> tuple[dict[str, nn.Module], dict[str, Widths]]:
        """Train the pruned network of each budget and the baselines not in `nets`: networks and widths, by row."""
        graph, config, how = self.graph, self.config, self.how
        source, (low, high) = next(iter(chosen.values())).source, reachable(graph, config)
        if how.teacher == UNPRUNED and nets:
            how = replace(how, teacher=nets[UNPRUNED])
        wanted = {UNPRUNED: graph.full} if UNPRUNED in self.baselines and not nets else {}
        cuts = dict[str, nn.Module]()
        for name, it in chosen.items():
            if UNIFORM in self.baselines:
                row = self.row(UNIFORM, name)
                wanted[row] = uniform(graph, it.budget, low, config.align, filled(config), high)
                cuts[row] = cut(source, graph, wanted[row], by="first" if it.search else "l2")
            wanted[self.row(self.method, name)] = it.choice.widths
            cuts[self.row(self.method, name)] = it.cut(graph)
        loader, weights = self.loaders.final, self._untrained() if how.anew else source
        cuts = {} if how.anew else cuts
        nets = nets | train_all(weights, graph, wanted, loader, how, cuts=cuts, task=self.task, runtime=self.runtime)
        for name, it in chosen.items():
            check_budget(nets[self.row(self.method, name)], it.choice.widths, graph, self.budgets[name])
        return nets, wanted | {self.row(CUT, name): it.choice.widths for name, it in chosen.items()}

    def _untrained(self) -> nn.Module:
        """The model that fresh networks are cut from: parameters that are frozen keep their values and channels."""
        model = self.model
        if (self.config.sort or self.method != DMCP) and not all(it.requires_grad for it in model.parameters()):
            net = Supernet(model, self.graph)
            sort_channels(net)
            model = net.model
        return with_frozen(self.task.fresh or model, model)

    def results(
        self, chosen: Mapping[str, _Chosen], nets: Mapping[str, nn.Module], rows: tuple[Row, ...], text: str
    ) -> dict[str, PruneResult]:
        """The result of each budget."""
        found: dict[str, PruneResult] = {}
        for name, it in chosen.items():
            names = {self.row(kind, name): kind for kind in (CUT, UNIFORM, self.method)} | {it: it for it in _COMMON}
            mine = tuple(replace(row, name=names[row.name]) for row in rows if row.name in names)
            small, budget = nets[self.row(self.method, name)].eval(), self.budgets[name]
            searched = it.search and for_budget(it.search, budget)
            found[name] = PruneResult(small, it.choice.widths, self.graph, searched, mine, budget, text, it.latency)
        return found


def for_budget(found: SearchResult, budget: Budget) -> SearchResult:
    """A search as if it had been for another budget: its steps are the same, their costs shares of this one."""
    old, new = ({it.kind: it.target for it in own.limits} for own in (found.budget, budget))
    if [*old] != [*new]:
        return replace(found, budget=budget, log=())
    scales = [old[kind] / new[kind] for kind in old]
    log = tuple(replace(it, ratios=it.ratios and tuple(map(mul, it.ratios, scales))) for it in found.log)
    return replace(found, budget=budget, log=log)


# latency


def _folder(runtime: Runtime, name: str = "") -> Path | None:
    """Where a table and a choice of latency are kept; name: of one of several budgets."""
    return runtime.checkpointer.stage(f"{SEARCH} {name}".strip()).folder if runtime.checkpointer else None


def with_latency(
    model: nn.Module,
    graph: ChannelGraph,
    sample: Any,
    specs: Sequence[Spec],
    config: SearchConfig,
    latency: Latency | Measure | None,
    runtime: Runtime,
) -> tuple[ChannelGraph, Timer | None]:
    """The graph with a latency table if a budget needs one: the given one, that of an earlier run, or a new one.

    And what measures as the table was measured, if that is here.
    """
    table, measure = (latency, None) if isinstance(latency, Latency) else (None, latency)
    spec = next(filter(limits_latency, specs), specs[0])

    def measure_first() -> Latency:
        found = time_networks(model, sample, graph, replace(config, budget=spec), measure=measure)
        runtime.emit(LATENCY, len(found.networks), found)
        return found

    graph = attach_latency(graph, spec, measure_first, table, _folder(runtime))
    table = Latency.of(graph)
    return graph, timer_like(table, sample, measure) if table else None


def time_networks(
    model: nn.Module,
    sample: Any,
    graph: ChannelGraph,
    settings: SearchConfig,
    config: LatencyConfig | None = None,
    measure: Measure | None = None,
) -> Latency:
    """A latency table between the smallest and the largest widths of a search that can reach its budget."""
    low, high = reachable(graph, settings)
    counted = counted_part(settings.budget, graph)
    if counted is not None:
        check_reachable(counted, graph, low, high)
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
