"""Which runs a comparison has: methods x budgets x seeds under one protocol.

`plan` lists the runs of a Comparison and `begin` those that are left. What a run does is in runner.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dmcp.compare.methods import METHODS, Own, find_method, title
from dmcp.compare.problem import Problem
from dmcp.data.datasets import DataSet, split
from dmcp.data.loaders import make_loader
from dmcp.defaults import resolve_training
from dmcp.errors import DmcpError, FileError
from dmcp.exporting.export import blaming
from dmcp.runs.config import RunConfig
from dmcp.runs.files import CHECKPOINTS, SETTINGS, read_json
from dmcp.runs.records import DMCP, UNIFORM, UNPRUNED
from dmcp.runs.writing import Run
from dmcp.runtime.batches import Loader
from dmcp.runtime.io import from_plain
from dmcp.searching.bounds import extreme_widths
from dmcp.searching.budget import parse_budget
from dmcp.searching.subnets import make_chains
from dmcp.searching.supernet import Supernet
from dmcp.settings import ResolvedTrainConfig, Retrain, SearchConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime

PLANS = "plans"  # folder with the plan of each run
RESULT = "result.json"  # the last file of a run
BOUNDS = ("groups", "align", "min_channels", "max_channels")  # settings of a search that hold for all methods
SAME = "same recipe"  # the training that is the same for all
_RETRAIN = {
    Own.FINETUNED: Retrain.FINETUNE,
    Own.SLIMMABLE: Retrain.SLIMMABLE,
    Own.AS_TRAINED: Retrain.NONE,
    None: Retrain.NONE,
}


# what is asked for


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """The network that is pruned and the data that it is trained and tested on: the same for all runs."""

    model: nn.Module  # unpruned, with fresh weights, on its device
    graph: ChannelGraph
    images: DataSet  # all training images
    loader: Loader  # batches of all training images
    test: Loader


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is the same for all runs of a table."""

    config: RunConfig  # network, data, recipe of all trainings, share of the images that are only for choosing
    facts: Mapping[str, Any]  # what tells network and data from others of the same names
    bounds: Mapping[str, Any] = field(default_factory=dict)  # of the widths: settings of a search, those of BOUNDS
    finetune_epochs: int = 0  # of methods that fine-tune gently; 0: no method is fine-tuned
    scratch: bool = True  # train what methods choose from scratch


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods, budgets and seeds under one protocol."""

    protocol: Protocol
    budgets: tuple[str, ...]
    methods: tuple[str, ...]  # names, as find_method knows them
    seeds: tuple[int, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of some methods, by title
    unpruned: bool = True  # have the unpruned network in the table, too

    def __post_init__(self) -> None:
        titles = [title(method) for method in self.methods]
        listed = ", ".join(titles) or "none"
        if not titles or UNPRUNED in titles or len(set(titles)) < len(titles):
            raise DmcpError(f"List each method once, and none named {UNPRUNED}, not {listed}.")
        for name in self.settings:
            if name not in titles:
                raise DmcpError(f"--set: {name!r} is not among the methods that are compared: {listed}.")
        for method in self.methods:
            config_of(method, self.settings.get(title(method), {}))


def config_of(method: str, settings: Mapping[str, Any]) -> Any:
    """Make the settings of a method; DmcpError for a setting that it does not have."""
    config = find_method(method).config
    hint = f"--set: {method} (a mapping is written as \"{{'warmup': 0.2}}\")"
    if not is_dataclass(config):
        with blaming(hint, DmcpError):
            return config(**settings)
    names = [parameter.name for parameter in fields(config)]
    for name in settings:
        if name not in names:
            raise DmcpError(f"--set: {method} has no setting {name!r}; it has {', '.join(names) or 'none'}.")
    with blaming(hint, DmcpError):
        return from_plain(config, dict(settings))


def problem_of(
    protocol: Protocol,
    subject: Subject,
    budget: str,
    *,
    recipe: ResolvedTrainConfig | None = None,
    loader: Loader | None = None,
    held_out: Loader | None = None,
    seed: int = 0,
    runtime: Runtime = Runtime(),
) -> Problem:
    """What methods get; an empty budget allows the widest network."""
    graph = subject.graph
    search = SearchConfig(budget="50%", **protocol.bounds)  # for its bounds only
    net = Supernet(subject.model, graph, search.groups, search.align)
    min_widths = net.min_widths
    max_widths: Widths | None = None
    if search.min_channels or search.max_channels:
        limits = make_chains(
            net, min_channels=search.min_channels, max_channels=search.max_channels, align=search.align
        )
        min_widths, widest = extreme_widths(graph, limits.sizes)
        max_widths = None
        if search.max_channels:
            max_widths = widest
    return Problem(
        model=subject.model,
        graph=graph,
        loader=loader or subject.loader,
        held_out=held_out or subject.test,
        budget=parse_budget(budget or graph.macs(max_widths or graph.full), graph),
        recipe=recipe or resolve_training(protocol.config.train),
        min_widths=min_widths,
        max_widths=max_widths,
        align=search.align,
        seed=seed,
        runtime=runtime,
    )


# the runs


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """All that one run is to do."""

    protocol: Protocol
    method: str  # or UNPRUNED
    seed: int
    budget: str = ""  # empty: makes a network that others start from
    settings: Mapping[str, Any] = field(default_factory=dict)  # all those of the method
    uses: str = ""  # name of the run whose network this one starts from

    @property
    def name(self) -> str:
        """The name of its folder, like dmcp-50%-seed0."""
        budget = self.budget.replace(":", "=").replace(",", "+").replace("/", "-")
        parts = [title(self.method), budget, f"seed{self.seed}"]
        return "-".join(part for part in parts if part)

    @property
    def scratch(self) -> bool:
        """Whether it trains what it chooses from scratch; widths of uniform are trained by uniform."""
        return self.protocol.scratch and not find_method(self.method).one_ratio

    @property
    def own_training(self) -> Own | None:
        """How it trains what it chooses in its authors' way; None if it does not."""
        training = find_method(self.method).own
        if training is Own.FINETUNED and self.protocol.finetune_epochs == 0:
            return None
        return training

    @property
    def recipe(self) -> ResolvedTrainConfig:
        """How it trains from scratch."""
        return replace(resolve_training(self.protocol.config.train), seed=self.seed)

    @property
    def tuning(self) -> ResolvedTrainConfig:
        """How it fine-tunes: gently, unless the method takes the whole recipe."""
        recipe = self.recipe
        if find_method(self.method).full:
            return recipe
        lr = recipe.lr / 10
        return replace(recipe, epochs=self.protocol.finetune_epochs, lr=lr, warmup_lr=lr, warmup_epochs=0)

    @property
    def config(self) -> RunConfig:
        """All settings as they are used for the network that is saved; those of the method are in `settings`."""
        retrain = Retrain.SCRATCH
        if self.budget and not self.scratch:
            retrain = _RETRAIN[self.own_training]
        return replace(
            self.protocol.config,
            budgets=(self.budget,) if self.budget else (),
            train=self.tuning if retrain is Retrain.FINETUNE else self.recipe,
            method=self.method,
            seed=self.seed,
            retrain=retrain,
        )

    def config_with_search(self, subject: Subject) -> RunConfig:
        """Like `config`, with the settings of DMCP's search, whose bounds are those of the network."""
        if self.method != DMCP:
            return self.config
        bounds = problem_of(self.protocol, subject, self.budget).bounds
        method_config = config_of(DMCP, self.settings)
        search = method_config.search_config(
            self.recipe, self.protocol.config.batch, **bounds, budget=self.budget, seed=self.seed
        )
        return replace(self.config, search=search)


def plan(comparison: Comparison, subject: Subject) -> list[PlannedRun]:
    """List all runs, each after the one that it starts from; DmcpError for what cannot be."""
    protocol = comparison.protocol

    # What cannot work in any run is refused here: too large a batch, a budget that is out of reach or given twice.
    trained_on, _ = split(subject.images, protocol.config.holdout)
    make_loader(trained_on, protocol.config.batch, train=True)
    limits = [problem_of(protocol, subject, budget).budget.limits for budget in comparison.budgets]
    if len({frozenset(kinds) for kinds in limits}) < len(limits):
        raise DmcpError(f"--budget: two of {', '.join(comparison.budgets)} are the same: leave one of them out.")

    # Methods with uniform's widths leave the training from scratch to the runs of uniform.
    methods = comparison.methods
    need_uniform = protocol.scratch and any(find_method(name).one_ratio for name in methods)
    if need_uniform and UNIFORM not in methods:
        methods = (UNIFORM, *methods)

    runs: dict[str, PlannedRun] = {}

    def add(method: str, seed: int, budget: str = "", uses: str = "") -> str:
        """Add a run unless it is there already; returns its name."""
        settings = comparison.settings.get(title(method), {})
        if method in METHODS:  # the settings of the user's own method need not be plain data
            settings = asdict(config_of(method, settings))
        run = PlannedRun(protocol=protocol, method=method, seed=seed, budget=budget, settings=settings, uses=uses)
        if run.budget and not run.scratch and run.own_training is None:
            raise DmcpError(
                f"With --no-scratch, {method} would not be trained: it is never fine-tuned, or --finetune-epochs is 0."
            )
        runs.setdefault(run.name, run)
        return run.name

    for seed in comparison.seeds:
        if comparison.unpruned:
            add(UNPRUNED, seed)
        for name in methods:
            uses = ""
            if find_method(name).prepare:
                uses = add(name, seed)
            elif find_method(name).trained:
                uses = add(UNPRUNED, seed)
            for budget in comparison.budgets:
                add(name, seed, budget, uses)
    return list(runs.values())


def begin(runs: Sequence[PlannedRun], folder: Path) -> list[PlannedRun]:
    """Write the plans; returns the runs that are left, first those that take longest or that others wait for."""
    check_begun(runs, folder)
    for run in runs:
        Run(folder / PLANS).write(f"{run.name}.json", asdict(run))
    left = [run for run in runs if not is_done(folder / run.name)]
    return sorted(left, key=lambda run: run.method != DMCP and run.budget != "")


def is_done(folder: Path) -> bool:
    """Whether nothing is left to do in the folder of a run."""
    return (folder / RESULT).is_file() and not (folder / CHECKPOINTS).exists()


def is_begun(folder: Path) -> bool:
    """Whether a run has been started in a folder."""
    return (folder / SETTINGS).is_file()


def read_plan(path: Path) -> PlannedRun:
    """Read what a run is to do."""
    with blaming(f"{path}: not the plan of a run of this version"):
        return from_plain(PlannedRun, read_json(path))


# one protocol in a folder


def check_begun(runs: Sequence[PlannedRun], folder: Path) -> None:
    """FileError for runs that are not like those that were begun in a folder."""
    begun = [path for path in sorted((folder / PLANS).glob("*.json")) if is_begun(folder / path.stem)]
    check_alike([*map(read_plan, begun), *runs], folder)


def check_alike(runs: Iterable[PlannedRun], folder: Path) -> None:
    """FileError unless all runs have one protocol, and each method the same settings."""
    first: dict[str, tuple[str, Any]] = {}  # option -> the first run that has it, and its value there
    for run in runs:
        for option, value in _shared_options(run).items():
            name, expected = first.setdefault(option, (run.name, value))
            if value != expected:
                text = f"{option} is {expected} in {name}, but {value} in {run.name}"
                raise FileError(f"{folder}: {text}: give another --out.")


def _shared_options(run: PlannedRun) -> dict[str, Any]:
    """What must be the same in all runs of a table, by the option that sets it."""
    method = title(run.method)
    facts = to_plain(run)
    protocol = facts["protocol"]
    config = protocol.pop("config")
    network_and_data = protocol.pop("facts")
    settings = config.pop("train") | config.pop("engine") | protocol.pop("bounds") | config | protocol

    options = {f"--methods ({method})": run.method}
    for name, value in facts["settings"].items():
        options[f"--set {method}.{name}"] = value
    for name, value in settings.items():
        options[f"--{name.replace('_', '-')}"] = value
    for name, value in network_and_data.items():
        options[f"network or data ({name})"] = value
    return options


def to_plain(record: Any) -> dict[str, Any]:
    """A dataclass as it is after a round trip through JSON."""
    return dict(json.loads(json.dumps(asdict(record))))
