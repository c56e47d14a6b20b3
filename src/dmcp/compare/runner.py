"""Methods x budgets x seeds under one protocol.

`plan` lists the runs of a Comparison, `run` lets processes do those that are left, and `OneRun` is what each of them
does. A run is a folder; its last file is result.json, from which `write_table` makes the table.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dmcp.batches import Loader
from dmcp.budget import parse
from dmcp.checkpoint import DONE, State
from dmcp.compare.methods import GIVEN, METHODS, PEERS, Own, Start, check_installed, choose, find_method, prepare, title
from dmcp.compare.problem import Choice, Prepared, Problem, samples_of
from dmcp.cutting import cut
from dmcp.data.datasets import DataSet, split
from dmcp.data.loaders import make_loader
from dmcp.errors import DmcpError, FileError, TrainingError
from dmcp.exporting import blaming
from dmcp.report import figures
from dmcp.results import UNIFORM, UNPRUNED, compare, milliseconds
from dmcp.retraining import Retraining, train_all
from dmcp.runs import CHECKPOINTS, PREPARED, SETTINGS, Run, load_search, read_json
from dmcp.runtime.distributed import current
from dmcp.runtime.io import Lock, from_plain, parse_tensors, read_bytes
from dmcp.searching.config import BOUNDS, extremes
from dmcp.searching.subnets import chains
from dmcp.settings import Bound, Engine, Retrain, TrainConfig
from dmcp.storage import WEIGHTS, load, save
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Runtime, train
from dmcp.units import between, counted, latex, points, spread, table
from dmcp.widths import Widths

BASE = "base"  # the unpruned network, trained without the held-out images
PLANS, OUTPUT, COMMANDS = "plans", "output", "commands.jsonl"  # what runs are to do, what they print; what was typed
RESULT, CHOICE, CHOSEN_IN, SPENT = "result.json", "choice.json", "choice.safetensors", "spent.json"
SAME = "same recipe"  # the training that is the same for all
_OWN = ", own"  # ends the name of a network that is trained the way of the method's authors
_MAX_BYTES = 2**34  # of a prepared network
_SLIMMABLE = 4  # passes in a step of a slimmable network


# what is asked for


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is the same for all runs of a table."""

    model: str
    data: str
    model_args: tuple[str, ...] = ()
    input: str = ""
    ignore: tuple[str, ...] = ()
    batch: int = 128
    device: str = ""
    engine: Engine = Engine()
    train: TrainConfig = TrainConfig()  # the final training; what methods train follows it, too
    groups: int = 10  # each space keeps at least one of so many groups
    align: int | None = None  # widths are multiples of this
    min_channels: Bound = field(default_factory=dict)
    max_channels: Bound = field(default_factory=dict)
    holdout: float = 0.1  # share of the training images that methods choose by; in the final training they are back
    finetune_epochs: int = 0  # of methods that fine-tune gently; 0: no method is fine-tuned


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods, budgets and seeds under one protocol."""

    protocol: Protocol
    budgets: tuple[str, ...]
    methods: tuple[str, ...]  # names, as find_method knows them
    seeds: tuple[int, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of some methods, by name or title
    widths: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # given ones, each a row by its name
    scratch: bool = True  # train what methods choose from scratch
    unpruned: bool = True  # have the unpruned network in the table, too

    def __post_init__(self) -> None:
        names = (*self.methods, *self.widths)
        for what, given in (("budget", self.budgets), ("method", [*map(title, names)]), ("seed", self.seeds)):
            if not given or len({*given}) < len(given):
                raise DmcpError(f"Give at least one {what}, and each only once, not {list(given)}.")
        for name in names:
            ours = name in self.methods and name in METHODS | PEERS
            if name.startswith(GIVEN) or title(name) in ({UNPRUNED, BASE} | (set() if ours else {*METHODS, *PEERS})):
                raise DmcpError(f"There is another {title(name)}, and folders go by name: give yours another one.")
            own = find_method(GIVEN if name in self.widths else name).own
            if not self.scratch and (own is None or (own is Own.FINETUNED and not self.protocol.finetune_epochs)):
                raise DmcpError(f"Without training from scratch, {name} would not be trained at all.")
        used = {*names, *({"dmcp"} if "dmcp-direct" in names else ())}
        for name, values in self.settings.items():
            if name not in used and name not in map(title, used):
                find_method(name)
                raise DmcpError(f"--set: {name} is not among the methods that are compared: add it, or leave this out.")
            if both := {*values.get("more", {})} & {bound for bound in BOUNDS if getattr(self.protocol, bound)}:
                raise DmcpError(f"{both.pop()} is for all methods: leave it out of {name}.more.")
        for name in self.methods:
            config_of(name, self.settings_of(name))

    def settings_of(self, name: str) -> dict[str, Any]:
        """What a method is set to."""
        if name in self.widths:
            return {"widths": dict(self.widths[name])}
        return dict(self.settings.get(name) or self.settings.get(title(name)) or {})


def config_of(name: str, settings: Mapping[str, Any]) -> Any:
    """The settings of a method; DmcpError for what it does not have."""
    config = find_method(name).config
    with blaming(f"--set: {name} (a mapping is written as \"{{'warmup': 0.2}}\")", DmcpError):
        if isinstance(config, type) and is_dataclass(config):
            return from_plain(config, dict(settings))
        return config(**settings)


def check_peer(name: str) -> str:
    """The name of another package that is here."""
    if name not in PEERS:
        raise DmcpError(f"--peer: there is no peer {name!r}: there are {', '.join(PEERS)}.")
    check_installed(name)
    return name


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The network and the data of a comparison, opened."""

    model: nn.Module  # unpruned, with fresh weights
    graph: ChannelGraph
    images: DataSet  # all for training
    train: Loader  # batches of them
    test: Loader
    device: torch.device  # where the runs compute
    facts: Mapping[str, Any]  # what tells network and data from others of the same names


# the runs


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """All that one run is to do."""

    protocol: Protocol
    facts: Mapping[str, Any]  # of network and data
    method: str  # or UNPRUNED, or BASE
    seed: int
    budget: str = ""  # empty: what is made for all budgets
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method
    uses: str = ""  # name of the run whose network this one starts from
    prepares: bool = False  # makes a network that others start from, and nothing else
    scratch: bool = True  # trains what is chosen from scratch

    @property
    def row(self) -> str:
        """The name without the seed: dmcp-50%."""
        place = self.budget.replace(":", "=").replace(",", "+").replace("/", "-")
        return "-".join(filter(None, (title(self.method), place)))

    @property
    def name(self) -> str:
        """That of its folder: dmcp-50%-seed0."""
        return f"{self.row}-seed{self.seed}"


def plan(it: Comparison, inputs: Inputs) -> list[PlannedRun]:
    """All runs, each after the one that it starts from; DmcpError for what cannot be."""
    rest, _ = split(inputs.images, it.protocol.holdout)
    make_loader(rest, it.protocol.batch, train=True)  # refuses a batch that is larger
    if len({frozenset(_problem(it.protocol, inputs, text).budget.limits) for text in it.budgets}) < len(it.budgets):
        raise DmcpError(f"--budget: two of {', '.join(it.budgets)} are the same: leave one of them out.")
    found: dict[str, PlannedRun] = {}

    def add(method: str, seed: int, **more: Any) -> str:
        whole = method in (UNPRUNED, BASE)
        settings = {} if whole else it.settings_of(method.removeprefix(GIVEN))
        scratch = whole or (it.scratch and not is_one_ratio(method))
        run = PlannedRun(protocol=it.protocol, facts=inputs.facts, method=method, seed=seed, settings=settings, **more)
        return found.setdefault(run.name, replace(run, scratch=scratch)).name

    def needed(method: str, seed: int, budget: str) -> str:
        match find_method(method).start:
            case Start.TRAINED:
                return add(UNPRUNED, seed)
            case Start.HELD_OUT:
                return add(BASE, seed, prepares=True)
            case Start.PREPARED:
                return add(method, seed, prepares=True)
            case Start.SEARCHED:
                return add("dmcp", seed, budget=budget)
        return ""

    rows = [(method, budget) for method in it.methods for budget in it.budgets]
    rows += [row for name in it.widths for row in _given_rows(it, inputs, name)]
    for seed in it.seeds:
        if it.unpruned:
            add(UNPRUNED, seed)
        for method, budget in rows:
            copied = it.scratch and is_one_ratio(method)  # trained from scratch it is uniform's network
            if not copied or it.protocol.finetune_epochs or METHODS[method].own is not Own.FINETUNED:
                add(method, seed, budget=budget, uses=needed(method, seed, budget))
            if copied:
                add(UNIFORM, seed, budget=budget)
    return list(found.values())


def _given_rows(it: Comparison, inputs: Inputs, name: str) -> list[tuple[str, str]]:
    """Given widths have those budgets that they use, and at least one."""
    widths, reasons, rows = inputs.graph.widths(it.widths[name]), list[str](), list[tuple[str, str]]()
    for budget in it.budgets:
        try:
            Choice(widths=widths, kept=widths).check(_problem(it.protocol, inputs, budget))
            rows.append((GIVEN + name, budget))
        except DmcpError as error:
            reasons.append(str(error).rstrip("."))
    if not rows:
        raise DmcpError(f"--widths: {name} is not inside any budget: {'; '.join(reasons)}.")
    return rows


def _problem(protocol: Protocol, inputs: Inputs, budget: str, **more: Any) -> Problem:
    """What methods get; without a budget it is the widest network."""
    graph, net = inputs.graph, Supernet(inputs.model, inputs.graph, protocol.groups, protocol.align)
    low, high, limits = net.min_widths, None, {bound: getattr(protocol, bound) for bound in BOUNDS}
    if any(limits.values()):
        low, widest = extremes(graph, chains(net, **limits, align=protocol.align).sizes)
        high = widest if protocol.max_channels else None
    given: dict[str, Any] = {"loader": inputs.train, "held_out": inputs.test, "recipe": protocol.train} | more
    given |= {"min_widths": low, "max_widths": high, "align": protocol.align}
    return Problem(
        model=inputs.model, graph=graph, budget=parse(budget or graph.macs(high or graph.full), graph), **given
    )


def is_one_ratio(method: str) -> bool:
    """True if a method's widths are those of uniform."""
    return method in METHODS and METHODS[method].one_ratio


def epochs_of(run: PlannedRun) -> dict[str, int]:
    """How many epochs a run trains, by kind."""
    recipe = run.protocol.train.epochs
    if run.method in (UNPRUNED, BASE):
        return {"training": recipe}
    method, tuned = find_method(run.method), run.protocol.finetune_epochs
    own = getattr(config_of(run.method, run.settings), "epochs", None)
    searched = own if isinstance(own, int) else recipe if run.prepares or method.own is Own.AS_TRAINED else 0
    if run.prepares:
        return {"search": searched}
    found = {
        "search": 0 if method.prepare else searched,
        "training": recipe if run.scratch else 0,
        "fine-tuned": tuned and (recipe if method.full else tuned) if method.own is Own.FINETUNED else 0,
        "slimmable": recipe if method.own is Own.SLIMMABLE else 0,
    }
    return {kind: number for kind, number in found.items() if number}


def longest_first(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Runs in the order in which they should start: those first that take longest, with all that waits for them."""
    left: dict[str, float] = {}
    for it in reversed(runs):  # those that wait come after what they wait for
        epochs, slow = epochs_of(it), ("slimmable", "search") if it.method == "dmcp" else ("slimmable",)
        work = sum(number * (_SLIMMABLE if kind in slow else 1) for kind, number in epochs.items())
        left[it.name] = left.get(it.name, 0.0) + max(1, work)
        left[it.uses] = max(left.get(it.uses, 0.0), left[it.name])
    return sorted(runs, key=lambda it: -left[it.name])


# doing them

Launch = Callable[[Sequence[PlannedRun]], Mapping[str, str]]  # runs processes; of those that fail, why, by name


def run(runs: Sequence[PlannedRun], folder: Path, launch: Launch) -> Mapping[str, str]:
    """Do the runs that are not done; those that failed, with the reason. The same again goes on where it was."""
    with blaming(f"{folder}: no runs can be kept here"):
        for part in (folder, folder / PLANS, folder / OUTPUT):
            part.mkdir(parents=True, exist_ok=True)
    with Lock(folder):
        check_begun(runs, folder)
        for it in runs:
            Run(folder / PLANS).write(f"{it.name}.json", asdict(it))
        typed, log = shlex.join(["dmcp", *sys.argv[1:]]), folder / COMMANDS
        if typed not in (log.read_text(errors="replace") if log.exists() else ""):
            Run(folder).add(COMMANDS, {"command": typed, "time": time.strftime("%Y-%m-%d %H:%M:%S")})
        return launch(longest_first([it for it in runs if not is_done(folder / it.name)]))


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


def state_of(it: PlannedRun, folder: Path) -> str:
    """How far a run is."""
    return "done" if is_done(folder / it.name) else "begun" if is_begun(folder / it.name) else "missing"


def check_begun(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Refuse all runs if one of them, or another seed of its row, was begun with other settings."""
    names, rows = {it.name: plain(it) for it in runs}, {it.row: plain(it) for it in runs}
    for path in sorted((folder / PLANS).glob("*.json")):
        before, keys = dict[str, Any](), list[str]()
        with contextlib.suppress(FileError):
            before = read_json(path) if is_begun(folder / path.stem) else {}
        if path.stem in names and before:
            now = names[path.stem]
            pairs = ((before, now), (before.get("protocol", {}), now["protocol"]))
            keys = [key for one, other in pairs for key in other if one.get(key) != other[key]]
        elif other := rows.get(path.stem.removesuffix(f"-seed{before.get('seed')}")):
            keys = [key for key in ("method", "settings") if before.get(key) != other[key]]
        if keys:
            raise FileError(
                f"{folder / path.stem} was begun with other settings ({', '.join(keys)}): give --out another folder, "
                f"or the command that began it: see {folder / COMMANDS}."
            )


def plain(it: Any) -> dict[str, Any]:
    """A dataclass as it is after a round trip through JSON."""
    return dict(json.loads(json.dumps(asdict(it))))


# one run


@dataclass(frozen=True, kw_only=True)
class Network:
    """A tested network."""

    accuracy: float
    macs: int
    params: int
    training: str = SAME  # or the way of the method's authors


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run has found."""

    run: PlannedRun
    networks: tuple[Network, ...]
    full_macs: int  # of the unpruned network
    seconds: float | None  # until the widths were known, or the network that others start from
    sample_passes: int  # in that time
    device: str


class OneRun:
    """One run at work, in a folder with its checkpoints and log."""

    def __init__(self, it: PlannedRun, inputs: Inputs, files: Run, runtime: Runtime) -> None:
        self.it, self.inputs, self.files, self.runtime = it, inputs, files, runtime
        self.recipe = replace(it.protocol.train, seed=it.seed)

    def do(self) -> None:
        """Prepare or choose, train, test, and write what came out."""
        it, networks, full = self.it, tuple[Network, ...](), self.inputs.graph.full
        if it.prepares:
            with self._clock():
                prepared = self._prepared()
            self._write_tensors(PREPARED, prepared.state)
            passes = prepared.sample_passes
        elif it.method == UNPRUNED:
            with self._clock():
                nets = self._train({UNPRUNED: full})
            passes = self.recipe.epochs * samples_of(self.inputs.train)
            networks = self._tested(nets, full)
        else:
            choice = self._read_choice() or self._choose()
            passes = read_json(self.files.folder / CHOICE)["sample_passes"]
            networks = self._tested(self._nets(choice), choice.widths)
        device = self.inputs.device
        result = Result(
            run=it,
            networks=networks,
            full_macs=self.inputs.graph.macs(),
            seconds=read_json(self.files.folder / SPENT)["seconds"],
            sample_passes=passes,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
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

    def _loaders(self, learns: bool, holds_out: bool) -> dict[str, Loader]:
        """Batches to train with and held-out ones; these are shuffled and augmented where something learns by them."""
        rest, held = split(self.inputs.images, self.it.protocol.holdout)  # the same for all seeds
        batch, seed, device = self.it.protocol.batch, self.it.seed, self.inputs.device
        return {
            "loader": make_loader(rest, batch, True, seed, device) if holds_out else self.inputs.train,
            "held_out": make_loader(held, min(batch, len(held)), learns, seed, device),
        }

    def _train(self, wanted: dict[str, Widths], loader: Loader | None = None, **how: Any) -> dict[str, nn.Module]:
        loader, retraining = loader or self.inputs.train, Retraining(self.recipe, **how)
        return train_all(self.inputs.model, self.inputs.graph, wanted, loader, retraining, runtime=self.runtime)

    def _problem(self) -> Problem:
        it = self.it
        learns = bool(it.settings.get("hold_out"))  # by the held-out images, beside choosing by them
        loaders = self._loaders(learns, learns or find_method(it.method).holds_out)
        more = {"recipe": self.recipe, "seed": it.seed, "runtime": self.runtime}
        return _problem(it.protocol, self.inputs, it.budget, **loaders, **more)

    def _prepared(self) -> Prepared:
        if self.it.method != BASE:
            return prepare(self.it.method, self._problem(), config_of(self.it.method, self.it.settings))
        rest = self._loaders(learns=False, holds_out=True)["loader"]
        net = self._train({BASE: self.inputs.graph.full}, rest)[BASE]
        return Prepared(state=net.state_dict(), sample_passes=self.recipe.epochs * samples_of(rest))

    def _choose(self) -> Choice:
        """Let the method choose, and keep what it chose: an interrupted run does not choose again."""
        name, method = self.it.method, find_method(self.it.method)
        with self._clock():
            choice = choose(name, self._problem(), config_of(name, self.it.settings), self._start(method.start))
        has_model = method.own in (Own.FINETUNED, Own.AS_TRAINED)  # of others the weights are not used
        if has_model and choice.model is not None:
            self._write_tensors(CHOSEN_IN, choice.model.state_dict())
        kept = {key: own if isinstance(own, int) else torch.as_tensor(own).tolist() for key, own in choice.kept.items()}
        facts = {"widths": choice.widths.to_json(), "kept": kept, "has_model": has_model}
        self.files.write(CHOICE, facts | {"sample_passes": choice.sample_passes})
        if checkpointer := self.runtime.checkpointer:  # from here on it is done, and the log stays
            nothing = State({}, dict, [], [], [], self.inputs.device)
            checkpointer.stage("choice").save(1, nothing, {DONE: True}, current())
        return choice

    def _read_choice(self) -> Choice | None:
        """What this run has chosen before; None if it was not all written."""
        checkpointer = self.runtime.checkpointer
        if checkpointer is None or checkpointer.stage("choice").load(current()) is None:
            return None
        stored, model = read_json(self.files.folder / CHOICE), None
        if stored["has_model"]:
            model = copy.deepcopy(self.inputs.model)
            model.load_state_dict(self._read_tensors(self.files.folder / CHOSEN_IN))
        widths = self.inputs.graph.widths(Widths.from_json(stored["widths"]))
        return Choice(widths=widths, kept=dict(stored["kept"]), model=model)

    def _start(self, start: Start) -> Any:
        """What the method starts from: left by another run."""
        folder = self.files.folder.parent / self.it.uses
        if start is not Start.FRESH and not is_done(folder):
            raise FileError(f"{folder}, which this run starts from, is not done: give dmcp compare again.")
        match start:
            case Start.SEARCHED:
                return load_search(folder, self.inputs.graph)
            case Start.HELD_OUT | Start.PREPARED:
                return self._read_tensors(folder / PREPARED)
            case Start.TRAINED:
                return load(folder, self.inputs.model).state_dict()
        return None

    def _nets(self, choice: Choice) -> dict[str, nn.Module]:
        """The chosen network, trained from scratch and the way of the method's authors, as far as that is wanted."""
        it, name, nets = self.it, title(self.it.method), dict[str, nn.Module]()
        method, epochs = find_method(it.method), it.protocol.finetune_epochs
        own = method.own
        if it.scratch:
            nets |= self._train({name: choice.widths})
        if own is Own.SLIMMABLE:
            nets |= self._train({name + _OWN: choice.widths}, kind=Retrain.SLIMMABLE)
        elif own is Own.AS_TRAINED or (own is Own.FINETUNED and epochs):
            assert choice.model is not None
            small = nets[name + _OWN] = cut(choice.model, self.inputs.graph, choice.kept)
            if own is Own.FINETUNED:
                lr = self.recipe.lr / 10
                gentle = replace(self.recipe, epochs=epochs, lr=lr, warmup_lr=lr, warmup_epochs=0)
                recipe = self.recipe if method.full else gentle
                train(small, self.inputs.train, recipe, runtime=self.runtime.stage(name + _OWN))
        return nets

    def _tested(self, nets: dict[str, nn.Module], widths: Widths) -> tuple[Network, ...]:
        """Test the networks, and save the first one."""
        test, every = self.inputs.test, dict.fromkeys(nets, widths)
        rows = compare(nets, self.inputs.graph, every, test, next(iter(test))[0], runtime=self.runtime)
        save(next(iter(nets.values())), widths, self.files.folder)
        own = str(find_method(self.it.method).own) if self.it.method != UNPRUNED else ""
        return tuple(
            Network(accuracy=row.accuracy, macs=row.macs, params=row.params, training=way)
            for row in rows
            for way in [own if row.name.endswith(_OWN) else SAME]
        )

    def _write_tensors(self, name: str, state: Mapping[str, Tensor]) -> None:
        plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in state.items()}
        self.files.write(name, safetensors.torch.save(plain))

    def _read_tensors(self, path: Path) -> dict[str, Tensor]:
        return parse_tensors(read_bytes(path, _MAX_BYTES), path)


# the table

TABLE, PAGE, FIGURE, NETWORKS, LATEX = "compare.json", "compare.md", "compare.svg", "compare.csv", "compare.tex"


def write_table(
    folder: Path, asked: Sequence[PlannedRun] = (), inputs: Inputs | None = None, measure: bool = False
) -> dict[str, Any] | None:
    """Write the table of all runs in a folder that are done; what is in its JSON, or None if there are none.

    asked: take the runs of their protocol only, and give a row to each. inputs: measure the speed of new networks, or
    of all of them; without it the folder alone is needed.
    """
    results = _read(folder, asked)
    if not results:
        return None
    speeds = _speeds(results, folder, inputs, measure)
    networks = _networks(results, asked, speeds["ms"])
    lines, run, log = _lines(networks), next(iter(results.values())).run, folder / COMMANDS
    settings = plain(run.protocol) | {
        "set": {title(it.run.method): dict(it.run.settings) for it in results.values() if it.run.settings},
        "seeds": sorted({it.run.seed for it in results.values()}),
        "devices": sorted({it.device for it in results.values()}),
    }
    data: dict[str, Any] = {
        "model": run.protocol.model,
        "data": run.protocol.data,
        "commands": log.read_text(errors="replace").splitlines() if log.exists() else [],
        "settings": settings,
        "speeds": speeds,
        "lines": lines,
    }
    files, about, text = Run(folder), _describe(settings), io.StringIO()
    writer = csv.DictWriter(text, [*networks[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(networks)
    both = [cells for cells in (_cells(lines, speeds["batch"]), _differences(lines)) if cells]
    files.write(TABLE, data)
    files.write(PAGE, "\n".join([f"{about}\n", *map(table, both)]))
    files.write(LATEX, "\n".join([f"% {about}", r"% Needs \usepackage{booktabs}.", *map(latex, both)]))
    files.write(NETWORKS, text.getvalue())
    _draw(lines, about, folder / FIGURE)
    return data


def _read(folder: Path, asked: Sequence[PlannedRun]) -> dict[str, Result]:
    """Results of one protocol, by the names of their runs, in the order of the table."""
    found: dict[str, Result] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        with contextlib.suppress(FileError, TypeError, ValueError, TrainingError):  # damaged, or of another version
            result = from_plain(Result, read_json(path))
            if is_done(path.parent) and result.run.name == path.parent.name:
                found[result.run.name] = result
    kinds = {name: _kind(it.run) for name, it in found.items()}
    kinds = {name: kind for name, kind in kinds.items() if not asked or kind == _kind(asked[0])}
    for name, kind in kinds.items():
        one, other = next(iter(kinds.items()))
        if keys := [key for key in kind if kind[key] != other[key]]:
            raise FileError(f"{folder}: {one} and {name} differ in {', '.join(keys)}: move one of them elsewhere.")
    return {name: found[name] for name in kinds}


def _kind(it: PlannedRun) -> dict[str, Any]:
    """What all runs of a table have in common."""
    facts = plain(it)
    return dict(facts["protocol"]) | {"facts": facts["facts"]}


def _networks(
    results: Mapping[str, Result], asked: Sequence[PlannedRun], ms: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One entry for each network of the table, seed by seed."""
    found: list[dict[str, Any]] = []
    every = [it.run for it in results.values()] + [*asked]
    rows = {(it.method, it.budget) for it in every if it.budget or it.method == UNPRUNED}
    for method, budget in sorted(rows, key=_order):
        own = _by_seed(results, method, budget)
        copied = is_one_ratio(method) and any(it.scratch for it in every if it.budget)
        trained = _by_seed(results, UNIFORM, budget) if copied else own  # by the same recipe it is the same network
        both = [(it, net) for it in trained.values() for net in it.networks if net.training == SAME]
        both += [(it, net) for it in own.values() for net in it.networks if net.training != SAME]
        for it, net in both:
            cost = _cost(results, own.get(it.run.seed) if own else it) if method != UNPRUNED else (0.0, 0.0)
            row: dict[str, Any] = {"method": title(method), "budget": budget, "training": net.training}
            row |= {"seed": it.run.seed, "accuracy": net.accuracy}
            row |= {"same_as": UNIFORM if copied and net.training == SAME else "", "macs": net.macs}
            row |= {"macs_share": net.macs / it.full_macs, "params": net.params}
            found.append(row | {"search_seconds": cost[0], "sample_passes": cost[1], "ms": ms.get(it.run.name)})
    return found


def _by_seed(results: Mapping[str, Result], method: str, budget: str) -> dict[int, Result]:
    own = [it for it in results.values() if (it.run.method, it.run.budget) == (method, budget) and it.networks]
    return {it.run.seed: it for it in sorted(own, key=lambda it: it.run.seed)}


def _cost(results: Mapping[str, Result], it: Result | None) -> tuple[float | None, float | None]:
    """Seconds and sample-passes until the widths were known, with the runs before; None: not known."""
    if it is None:
        return None, None
    seconds, passes = _cost(results, results.get(it.run.uses)) if it.run.uses else (0.0, 0.0)
    if seconds is None or passes is None or it.seconds is None:
        return None, None
    return seconds + it.seconds, passes + it.sample_passes


def _order(row: tuple[str, str]) -> tuple[Any, ...]:
    """The unpruned network, shares of the MACs from the largest on, other budgets; our methods come first."""
    method, budget = row
    share = float(budget[:-1]) if re.fullmatch(r"[0-9.]+%", budget) else -1.0 if budget else math.inf
    known = [*METHODS, *PEERS]
    return -share, budget, known.index(method) if method in known else len(known), title(method)


def _lines(networks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table: the networks of all seeds together."""
    keys = ("method", "budget", "training", "same_as")
    lines = []
    for key in dict.fromkeys(tuple(it[name] for name in keys) for it in networks):
        own = [it for it in networks if tuple(it[name] for name in keys) == key]
        accuracies = [it["accuracy"] for it in own]
        line = dict(zip(keys, key, strict=True)) | {"own": own[0]["training"] != SAME, "way": own[0]["training"]}
        line |= {"seeds": [it["seed"] for it in own], "accuracies": accuracies, "mean": statistics.fmean(accuracies)}
        line["deviation"] = statistics.stdev(accuracies) if len(own) > 1 else None
        for name in ("macs", "params", "macs_share"):
            line[name] = [min(it[name] for it in own), max(it[name] for it in own)]
        for name in ("search_seconds", "sample_passes"):
            known = [it[name] for it in own if it[name] is not None]
            line[name] = statistics.fmean(known) if known else None
        lines.append(line | {"ms": own[0]["ms"]})
    return lines


def _speeds(results: Mapping[str, Result], folder: Path, inputs: Inputs | None, again: bool) -> dict[str, Any]:
    """Milliseconds of a batch through the network of each row's first seed, on one device, by names of runs."""
    before: dict[str, Any] = {"device": "", "batch": 0, "ms": {}}
    with contextlib.suppress(FileError):
        stored = read_json(folder / TABLE).get("speeds") if (folder / TABLE).exists() else None
        if isinstance(stored, dict) and stored.keys() == before.keys() and isinstance(stored["ms"], dict):
            before = stored
    if inputs is None:
        return before
    device, (example, *_) = inputs.device, next(iter(inputs.test))
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = {"device": here, "batch": len(example)}
    same = not again and all(before[key] == value for key, value in known.items())
    ms: dict[str, float] = dict(before["ms"]) if same else {}
    rows: dict[str, str] = {}
    for name, it in sorted(results.items(), key=lambda pair: pair[1].run.seed):
        if it.networks and (folder / name / WEIGHTS).exists():
            rows.setdefault(it.run.row, name)
    if left := [name for name in rows.values() if name not in ms]:
        nets = [load(folder / name, inputs.model).to(device) for name in left]
        ms |= zip(left, milliseconds(nets, example.to(device)), strict=True)
    return known | {"ms": ms}


def _describe(settings: Mapping[str, Any]) -> str:
    """Network, data, recipe and seeds in a line."""
    recipe, bounds = settings["train"], ""
    for word, name in (("at least", "min_channels"), ("at most", "max_channels")):
        bound = settings[name] if isinstance(settings[name], dict) else {"": settings[name]}
        bounds += "".join(f"{word} {n} channels{f' in {place}' if place else ''}; " for place, n in bound.items())
    rate = f" at a batch of {recipe['reference_batch']}" if recipe["reference_batch"] else ""
    return (
        f"{' '.join([settings['model'], *settings['model_args']])} on {Path(settings['data']).name}: "
        f"{counted(recipe['epochs'], 'epoch')}, batch {settings['batch']}, learning rate {recipe['lr']:g}{rate}, "
        f"weight decay {recipe['weight_decay']:g}; {settings['holdout']:.0%} of the training images held out; "
        f"fine-tuning {counted(settings['finetune_epochs'], 'epoch')}; {bounds}"
        f"seeds {', '.join(map(str, settings['seeds']))}."
    )


def _pairs(lines: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any, Any]]:
    """Of each method and budget: its line, the one trained by the same recipe, and the one trained its own way."""
    found: dict[tuple[str, str], list[Any]] = {}
    for line in lines:
        found.setdefault((line["method"], line["budget"]), [None, None])[line["own"]] = line
    return [(same or own, same, own) for same, own in found.values()]


def _cells(lines: Sequence[Mapping[str, Any]], batch: int) -> list[list[str]]:
    """The table: mean ± standard deviation (seeds); search cost until the widths are known; times if there are any."""
    timed = any(line["ms"] is not None for line in lines)
    shown = {line["budget"] for line in lines if line["method"] == UNIFORM}
    rows = [["method", "budget", "accuracy in %, same recipe", "its own training", "MACs", "params"]]
    rows[0] += ["search, s", "sample-passes, M", *([f"ms per {batch}"] if timed else [])]
    for line, same, own in _pairs(lines):
        passes = (line["sample_passes"] or 0) / 1e6
        cells = [line["method"], line["budget"] or "100%", spread(same["accuracies"]) if same else ""]
        if same and same["same_as"] and line["budget"] in shown:
            cells[2] = f"= {UNIFORM}"
        cells += [
            f"{spread(own['accuracies'])}, {own['way']}" if own else "",
            between(*(f"{share:.1%}" for share in line["macs_share"])),
            between(*(f"{number:,}" for number in line["params"])),
            "" if line["search_seconds"] is None else f"{line['search_seconds']:,.0f}",
            f"{passes:,.1f}" if passes >= 1 else f"{passes:.3g}",
        ]
        rows.append(cells + (["" if line["ms"] is None else f"{line['ms']:.2f}"] if timed else []))
    return rows


def _differences(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """By how many points methods are better than uniform with the same seed; empty where there is no uniform."""
    rows = [["method", "budget", f"points above {UNIFORM}, {SAME}", "its own training"]]
    bases = {it["budget"]: it for it in lines if it["method"] == UNIFORM and not it["own"]}
    for line, same, own in _pairs(lines):
        base = bases.get(line["budget"])
        if base is None or line is base:
            continue
        known = dict(zip(base["seeds"], base["accuracies"], strict=True))
        values = [dict(zip(it["seeds"], it["accuracies"], strict=True)) if it else {} for it in (same, own)]
        above = [points([own[seed] - known[seed] for seed in own if seed in known]) for own in values]
        if same and same["same_as"]:
            above[0] = f"= {UNIFORM}"
        rows.append([line["method"], line["budget"], *above])
    return rows if len(rows) > 1 else []


def _draw(lines: Sequence[Mapping[str, Any]], about: str, path: Path) -> None:
    panels: dict[str, dict[str, tuple[figures.Spread, figures.Spread]]] = {}
    for line, same, own in _pairs(lines):
        if line["budget"]:  # the unpruned network would make all others look alike
            both = (same and same["accuracies"], own and own["accuracies"])
            panels.setdefault(line["budget"], {})[line["method"]] = both
    if panels:
        figures.save(figures.accuracy_by_method(panels, about.partition(", batch")[0]), path)
