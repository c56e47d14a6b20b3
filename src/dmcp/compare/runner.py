"""Methods x budgets x seeds under one protocol.

`plan` lists the runs of a Comparison, `begin` those that are left, and `OneRun` is what the process of each does. A run
is a folder; its last file is result.json, from which table.py makes the table.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from dmcp.cli.session import Job
from dmcp.compare.methods import METHODS, Own, choose, find_method, title
from dmcp.compare.problem import Choice, Problem, samples_of
from dmcp.cutting import cut
from dmcp.data.datasets import split
from dmcp.data.loaders import make_loader
from dmcp.errors import DmcpError, FileError, TrainingError
from dmcp.exporting.export import blaming
from dmcp.results import DMCP, UNIFORM, UNPRUNED, Row, measure_networks
from dmcp.retraining import Retraining, catch_up, train_all
from dmcp.runs.config import RunConfig
from dmcp.runs.files import CHECKPOINTS, PREPARED, SETTINGS, read_json
from dmcp.runs.storage import load, save
from dmcp.runs.writing import Run
from dmcp.runtime.batches import device_of
from dmcp.runtime.checkpoint import DONE, State
from dmcp.runtime.distributed import current
from dmcp.runtime.io import from_plain, parse_tensors, read_bytes
from dmcp.searching.bounds import extreme_widths
from dmcp.searching.budget import parse_budget
from dmcp.searching.subnets import make_chains
from dmcp.searching.supernet import Supernet
from dmcp.settings import Retrain, SearchConfig, TrainConfig
from dmcp.tracing.modules import narrow
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime, train

PLANS = "plans"  # what runs are to do
RESULT, SPENT = "result.json", "spent.json"
BOUNDS = ("groups", "align", "min_channels", "max_channels")
SAME = "same recipe"  # the training that is the same for all
_MAX_BYTES = 2**34  # of a prepared network


# what is asked for


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is the same for all runs of a table."""

    config: RunConfig  # network, data, recipe of all trainings, share of the images that only choices are made by
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
        titles = [*map(title, self.methods)]
        if not titles or len({*titles, UNPRUNED}) <= len(titles):
            raise DmcpError(f"Give methods, each once and none named {UNPRUNED}, not {', '.join(titles) or 'none'}.")
        if unused := {*self.settings} - {*titles}:
            raise DmcpError(f"--set: {unused.pop()!r} is not among the methods that are compared: {', '.join(titles)}.")
        for method in self.methods:
            config_of(method, self.settings.get(title(method), {}))


def config_of(method: str, settings: Mapping[str, Any]) -> Any:
    """The settings of a method; DmcpError for what it does not have."""
    config = find_method(method).config
    names = [it.name for it in fields(config)] if is_dataclass(config) else [*settings]
    if odd := [name for name in settings if name not in names]:
        raise DmcpError(f"--set: {method} has no setting {odd[0]!r}; it has {', '.join(names) or 'none'}.")
    with blaming(f"--set: {method} (a mapping is written as \"{{'warmup': 0.2}}\")", DmcpError):
        return from_plain(config, dict(settings)) if is_dataclass(config) else config(**settings)


def problem_of(protocol: Protocol, job: Job, budget: str, **more: Any) -> Problem:
    """What methods get; an empty budget allows the widest network."""
    graph, bounds = job.graph, SearchConfig(budget="50%", **protocol.bounds)
    net, high = Supernet(job.model, graph, bounds.groups, bounds.align), None
    given: dict[str, Any] = {
        "loader": job.loaders.search,
        "held_out": job.test,
        "recipe": protocol.config.train,
        "align": bounds.align,
    } | more
    given |= {"model": job.model, "graph": graph, "min_widths": net.min_widths}
    if bounds.min_channels or bounds.max_channels:
        ends = make_chains(net, min_channels=bounds.min_channels, max_channels=bounds.max_channels, align=bounds.align)
        given["min_widths"], widest = extreme_widths(graph, ends.sizes)
        high = widest if bounds.max_channels else None
    return Problem(budget=parse_budget(budget or graph.macs(high or graph.full), graph), max_widths=high, **given)


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
        """That of its folder: dmcp-50%-seed0."""
        place = self.budget.replace(":", "=").replace(",", "+").replace("/", "-")
        return "-".join(filter(None, (title(self.method), place, f"seed{self.seed}")))

    @property
    def scratch(self) -> bool:
        """Whether it trains what it chooses from scratch; widths of uniform are trained by uniform."""
        return self.protocol.scratch and not find_method(self.method).one_ratio

    @property
    def own(self) -> Own | None:
        """How it trains what it chooses besides."""
        own = find_method(self.method).own
        return None if own is Own.FINETUNED and not self.protocol.finetune_epochs else own

    @property
    def recipe(self) -> TrainConfig:
        """How it trains from scratch."""
        return replace(self.protocol.config.train, seed=self.seed)

    @property
    def tuning(self) -> TrainConfig:
        """How it fine-tunes."""
        lr, epochs = self.recipe.lr / 10, self.protocol.finetune_epochs
        gentle = replace(self.recipe, epochs=epochs, lr=lr, warmup_lr=lr, warmup_epochs=0)
        return self.recipe if find_method(self.method).full else gentle

    @property
    def config(self) -> RunConfig:
        """All settings as they are used, for the network that is saved; those of the method are in `settings`."""
        ways: dict[Own | None, Retrain] = {Own.FINETUNED: Retrain.FINETUNE, Own.SLIMMABLE: Retrain.SLIMMABLE}
        retrain = ways.get(self.own, Retrain.NONE) if self.budget and not self.scratch else Retrain.SCRATCH
        used: dict[str, Any] = {"method": self.method, "seed": self.seed, "retrain": retrain}
        train = self.tuning if retrain is Retrain.FINETUNE else self.recipe
        return replace(self.protocol.config, budgets=(self.budget,) if self.budget else (), train=train, **used)

    def with_search(self, job: Job) -> RunConfig:
        """The same with the settings of DMCP's search, whose bounds are those of the network."""
        if self.method != DMCP:
            return self.config
        known = problem_of(self.protocol, job, self.budget).bounds | {"budget": self.budget, "seed": self.seed}
        search = config_of(DMCP, self.settings).search_config(self.recipe, self.protocol.config.batch, **known)
        return replace(self.config, search=search)


def plan(it: Comparison, job: Job) -> list[PlannedRun]:
    """All runs, each after the one that it starts from; DmcpError for what cannot be."""
    config = it.protocol.config
    rest, _ = split(job.data.train, config.holdout)
    make_loader(rest, config.batch, train=True)  # refuses a batch that is larger
    if len({frozenset(problem_of(it.protocol, job, text).budget.limits) for text in it.budgets}) < len(it.budgets):
        raise DmcpError(f"--budget: two of {', '.join(it.budgets)} are the same: leave one of them out.")
    one_ratio = it.protocol.scratch and any(find_method(name).one_ratio for name in it.methods)
    methods = it.methods if UNIFORM in it.methods or not one_ratio else (UNIFORM, *it.methods)
    found: dict[str, PlannedRun] = {}

    def add(method: str, seed: int, **more: Any) -> str:
        settings = it.settings.get(title(method), {})
        if method in METHODS:  # those of one's own may not be plain data
            settings = asdict(config_of(method, settings))
        run = PlannedRun(protocol=it.protocol, method=method, seed=seed, settings=settings, **more)
        if run.budget and not run.scratch and run.own is None:
            raise DmcpError(f"{method} would not be trained: --finetune-epochs is 0, or it is never fine-tuned.")
        return found.setdefault(run.name, run).name

    for seed in it.seeds:
        if it.unpruned:
            add(UNPRUNED, seed)
        for name in methods:
            method = find_method(name)
            uses = add(name, seed) if method.prepare else add(UNPRUNED, seed) if method.trained else ""
            for budget in it.budgets:
                add(name, seed, budget=budget, uses=uses)
    return [*found.values()]


def begin(runs: Sequence[PlannedRun], folder: Path) -> list[PlannedRun]:
    """Write what is to be done; the runs that are left, those first that take longest or that others wait for."""
    check_begun(runs, folder)
    for it in runs:
        Run(folder / PLANS).write(f"{it.name}.json", asdict(it))
    left = [it for it in runs if not is_done(folder / it.name)]
    return sorted(left, key=lambda it: it.method != DMCP and it.budget != "")


def is_done(folder: Path) -> bool:
    """True if nothing is left to do in the folder of a run."""
    return (folder / RESULT).is_file() and not (folder / CHECKPOINTS).exists()


def is_begun(folder: Path) -> bool:
    """True if a run has been started in a folder."""
    return (folder / SETTINGS).is_file()


def read_plan(path: Path) -> PlannedRun:
    """What a run is to do."""
    with blaming(f"{path}: not the plan of a run of this version"):
        return from_plain(PlannedRun, read_json(path))


def check_begun(runs: Sequence[PlannedRun], folder: Path) -> None:
    """FileError for runs that are not like those that were begun in a folder."""
    begun = [path for path in sorted((folder / PLANS).glob("*.json")) if is_begun(folder / path.stem)]
    check_alike([*map(read_plan, begun), *runs], folder)


def check_alike(runs: Iterable[PlannedRun], folder: Path) -> None:
    """FileError unless all runs have one protocol, and each method the same settings."""
    known: dict[str, tuple[str, Any]] = {}
    for it in runs:
        own, method = plain(it), title(it.method)
        protocol, config = own["protocol"], own["protocol"].pop("config")
        facts, trees = protocol.pop("facts"), config.pop("train") | config.pop("engine") | protocol.pop("bounds")
        every = {f"--methods ({method})": it.method}
        every |= {f"--set {method}.{key}": value for key, value in own["settings"].items()}
        every |= {f"--{key.replace('_', '-')}": value for key, value in (trees | config | protocol).items()}
        for key, new in (every | {f"network or data ({key})": value for key, value in facts.items()}).items():
            name, old = known.setdefault(key, (it.name, new))
            if new != old:
                raise FileError(f"{folder}: {key} {old} there ({name}), {new} here ({it.name}): take another --out.")


def plain(it: Any) -> dict[str, Any]:
    """A dataclass as it is after a round trip through JSON."""
    return dict(json.loads(json.dumps(asdict(it))))


# one run


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run has found."""

    run: PlannedRun
    networks: tuple[Row, ...]  # named after their training: SAME, or the way of the method's authors
    widths: Mapping[str, int]  # of all of them
    full_macs: int  # of the unpruned network
    seconds: float  # until the widths were known, or the network that others start from
    sample_passes: int  # in that time
    device: str


class OneRun:
    """One run at work, in a folder with its checkpoints and log."""

    def __init__(self, it: PlannedRun, job: Job, files: Run, runtime: Runtime) -> None:
        self.it, self.job, self.files, self.runtime = it, job, files, runtime
        self.device, self.loader = device_of(job.model), job.loaders.search

    def do(self) -> None:
        """Prepare or choose, train, test, and write what came out."""
        it, networks, widths = self.it, tuple[Row, ...](), self.job.graph.full
        if it.budget:
            choice = self._choose()
            widths, passes = choice.widths, choice.sample_passes
            networks = self._tested(self._nets(choice), widths)
        elif it.method == UNPRUNED:
            with self._clock():
                nets = self._train(UNPRUNED, widths)
            passes = it.recipe.epochs * samples_of(self.loader)
            networks = self._tested(nets, widths)
        else:
            prepare = find_method(it.method).prepare
            assert prepare is not None
            with self._clock(), blaming(f"{it.method} failed", TrainingError):
                prepared = prepare(self._problem(), config_of(it.method, it.settings))
            state = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in prepared.state.items()}
            self.files.write(PREPARED, safetensors.torch.save(state))
            passes = prepared.sample_passes
        result = Result(
            run=it,
            networks=networks,
            widths=dict(widths),
            full_macs=self.job.graph.macs(),
            seconds=read_json(self.files.folder / SPENT)["seconds"],
            sample_passes=passes,
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
        )
        self.files.write(RESULT, asdict(result))
        self.files.close()

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        """Keep the seconds of the work inside; those of earlier starts are added."""
        path, start = self.files.folder / SPENT, time.perf_counter()
        before = float(read_json(path)["seconds"]) if path.exists() else 0.0
        try:
            yield
        finally:
            self.files.write(SPENT, {"seconds": before + time.perf_counter() - start})

    def _problem(self) -> Problem:
        it, seed, batch = self.it, self.it.seed, self.it.protocol.config.batch
        rest, held = split(self.job.data.train, it.protocol.config.holdout)  # the same for all seeds
        learns = bool(it.settings.get("hold_out"))  # by the held-out images, so that they are shuffled and augmented
        held_out = make_loader(held, min(batch, len(held)), learns, seed, self.device)
        more: dict[str, Any] = {"recipe": it.recipe, "seed": seed, "runtime": self.runtime, "held_out": held_out}
        if learns or find_method(it.method).holds_out:
            more["loader"] = make_loader(rest, batch, True, seed, self.device)
        return problem_of(it.protocol, self.job, it.budget, **more)

    def _choose(self) -> Choice:
        """What the method chooses; an interrupted run does not choose again."""
        name, job, folder, state = self.it.method, self.job, self.files.folder.parent / self.it.uses, None
        checkpointer = self.runtime.stage("choice").checkpointer
        assert checkpointer is not None
        if stored := checkpointer.load(current()):
            known, widths = stored.facts, job.graph.widths(Widths.from_json(stored.facts["widths"]))
            model = narrow(job.model, {}, {}) if known["has_model"] else None
            self._weights(model).restore(stored.tensors, [], current())
            return Choice(widths=widths, kept=known["kept"], model=model, sample_passes=known["sample_passes"])
        if self.it.uses:
            if find_method(name).trained:
                state = load(folder, job.model).state_dict()
            else:
                state = parse_tensors(read_bytes(folder / PREPARED, _MAX_BYTES), folder / PREPARED)
        with self._clock():
            choice = choose(name, self._problem(), config_of(name, self.it.settings), state)
        kept = {key: own if isinstance(own, int) else torch.as_tensor(own).tolist() for key, own in choice.kept.items()}
        facts = {"widths": choice.widths.to_json(), "kept": kept, "has_model": choice.model is not None}
        facts |= {"sample_passes": choice.sample_passes, DONE: True}
        checkpointer.save(1, self._weights(choice.model), facts, current())
        return choice

    def _weights(self, model: nn.Module | None) -> State:
        """The state of a checkpoint that has no more than a network."""
        return State(model.state_dict() if model else {}, dict, [], [], [], self.device)

    def _train(self, name: str, widths: Widths, kind: Retrain = Retrain.SCRATCH) -> dict[str, nn.Module]:
        how, job = Retraining(config=self.it.recipe, kind=kind), self.job
        return train_all(job.model, job.graph, {name: widths}, self.loader, how, runtime=self.runtime)

    def _nets(self, choice: Choice) -> dict[str, nn.Module]:
        """The chosen network, trained from scratch and the way of the method's authors, as far as that is wanted."""
        it, own, name, nets = self.it, self.it.own, title(self.it.method), dict[str, nn.Module]()
        if it.scratch:
            nets |= self._train(name, choice.widths)
        name += ", own"
        if own is Own.SLIMMABLE:
            nets |= self._train(name, choice.widths, Retrain.SLIMMABLE)
        elif own is not None:
            assert choice.model is not None
            nets[name] = cut(choice.model, self.job.graph, choice.kept)
        if own is Own.FINETUNED:
            train(nets[name], self.loader, it.tuning, runtime=self.runtime.stage(name))
            catch_up(nets[name], self.loader, it.tuning)
        return nets

    def _tested(self, nets: dict[str, nn.Module], widths: Widths) -> tuple[Row, ...]:
        """Test the networks, and save the first one."""
        it, test, every = self.it, self.job.test, dict.fromkeys(nets, widths)
        rows = measure_networks(nets, self.job.graph, every, test, next(iter(test))[0], runtime=self.runtime)
        save(next(iter(nets.values())), widths, self.files.folder)
        return tuple(replace(row, name=SAME if row.name == title(it.method) else str(it.own)) for row in rows)
