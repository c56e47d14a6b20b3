"""Methods, budgets and seeds in one table: run, resume, gather."""

from __future__ import annotations

import contextlib
import copy
import csv
import difflib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import platform
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dmcp import training
from dmcp.batches import Loader
from dmcp.budget import parse
from dmcp.checkpoint import DONE, State
from dmcp.cli.config import FACTS, Cell, Plan, code_digest, facts_of, plan_from_json
from dmcp.cli.job import Job, Opened, argument, open_job
from dmcp.cli.launch import COMMAND, Command, Ended, kept_signals, run_side_by_side
from dmcp.cli.session import Session
from dmcp.compare.methods import (
    GIVEN,
    METHODS,
    PEERS,
    Method,
    Own,
    Start,
    blamed,
    find_method,
    is_imported,
    prepare,
    settle,
    title,
)
from dmcp.compare.problem import Choice, Prepared, Problem, Told, ends_of, samples_of
from dmcp.cutting import cut
from dmcp.data.datasets import split
from dmcp.data.loaders import make_loader
from dmcp.errors import DmcpError, FileError, TrainingError, WidthsError
from dmcp.report import figures
from dmcp.results import UNPRUNED, Row, compare, milliseconds
from dmcp.retraining import Retraining, train_all
from dmcp.runs import CHECKPOINTS, LOG, PREPARED, SETTINGS, PastRun, Run, is_run, load_search, read_json, read_run
from dmcp.runtime.io import MOST_JSON, Lock, from_plain, parse_json, parse_tensors, read_bytes
from dmcp.searching.config import BOUNDS, SearchRecord, SearchResult
from dmcp.settings import Bound, Engine, Retrain, SearchConfig, TrainConfig
from dmcp.storage import WEIGHTS, WIDTHS, load, save
from dmcp.tracing.graph import Kept
from dmcp.training import Event, StepRecord
from dmcp.units import between, latex, points, spread, table
from dmcp.widths import Widths

# what choosing took; the widths and channels that were chosen; weights that came with them
COST, CHOICE, CHOSEN = "cost.json", "choice.json", "choice.safetensors"
# seconds at work in all; seconds of what COST will be about, where it was stopped in it
TIME, SPENT = "time.json", "spent.json"
_CHOSEN = "choice"  # the stage that ends with a choice
_MOST = 2**34  # bytes of a prepared network


def is_done(folder: Path) -> bool:
    """Whether nothing is left to do in the folder of a cell."""
    if (folder / CHECKPOINTS).exists() or not (folder / COST).exists():
        return False
    return any((folder / name).exists() for name in (WIDTHS, PREPARED))


def keep_choice(here: Session, choice: Choice, seconds: float) -> None:
    """Write what was chosen and what it took, and then that it is written."""
    if choice.model is not None:
        write_tensors(here.run, CHOSEN, choice.model.state_dict())
    kept = {name: it if isinstance(it, int) else torch.as_tensor(it).tolist() for name, it in choice.kept.items()}
    widths = choice.widths.to_json()
    here.run.write(CHOICE, {"widths": widths, "kept": kept, "has_model": choice.model is not None})
    write_cost(here.run, seconds, choice.sample_passes)
    nothing = State({}, dict, [], [], [], here.plan.job.place)
    here.checkpointer.stage(_CHOSEN).save(
        1, nothing, {DONE: True}, here.world
    )  # from here on it is done, and the log stays


def read_choice(here: Session) -> Choice | None:
    """What this cell has chosen before; None if it was not all written."""
    if here.checkpointer.stage(_CHOSEN).load(here.world) is None:
        return None
    stored = read_json(here.run.folder / CHOICE)
    kept: dict[str, Kept] = dict(stored["kept"])
    model: nn.Module | None = None
    if stored["has_model"]:
        model = copy.deepcopy(here.opened.model)
        model.load_state_dict(read_tensors(here.run.folder / CHOSEN))
    return Choice(widths=here.opened.graph.widths(Widths.from_json(stored["widths"])), kept=kept, model=model)


def write_cost(run: Run, seconds: float, passes: int) -> None:
    """Write what choosing took, or all the work of a cell that does not choose."""
    run.write(COST, {"seconds": seconds, "sample_passes": passes})


def write_tensors(run: Run, name: str, state: Mapping[str, Tensor]) -> None:
    """Write tensors from any device."""
    plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in state.items()}
    run.write(name, safetensors.torch.save(plain))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` has written, read with care."""
    return parse_tensors(read_bytes(path, _MOST), path)


# what other cells have left


def used_folder(here: Session, cell: Cell) -> Path:
    """The folder of the cell that this one starts from."""
    return here.run.folder.parent / cell.uses


def load_network(here: Session, name: str) -> nn.Module:
    """The network of another cell, which this one starts from."""
    folder = here.run.folder.parent / name
    check_there(folder / WEIGHTS)
    return load(folder, here.opened.fresh)


def check_there(path: Path) -> None:
    """FileError where a file of another cell is missing, which this one starts from."""
    if not path.exists():
        again = "start the dmcp compare that this cell is of again."
        raise FileError(f"{path}: the network that this cell starts from is not there: {again}")


BASE = "base"  # a cell that trains the unpruned network without the held-out images
_SPLIT = 0  # one split for all seeds: methods differ, data does not


def own_name(method: str) -> str:
    """The row of a method's network that was trained its own way."""
    return f"{title(method)}, own"


@dataclass(frozen=True, eq=False)
class _Data:
    """Batches of all training images; and of all but the held-out ones, beside those in a fixed order."""

    everything: Loader
    rest: Loader
    held: Loader
    mixed: Loader  # the held-out ones, too, shuffled and augmented
    test: Loader


def run_cell(here: Session) -> None:
    """Do what the cell of the session's plan says."""
    cell = here.plan.cell
    assert cell is not None and here.plan.train is not None
    data = _data(here, cell)
    with _timed(here):
        if cell.prepares:
            _prepare(here, cell, data)
        else:
            _fill(here, cell, data)
    here.run.close()


@contextlib.contextmanager
def _timed(here: Session) -> Iterator[None]:
    """Keep how long a cell was at work, in all its sittings that were not killed."""
    path, start = here.run.folder / TIME, time.perf_counter()
    before = float(read_json(path)["seconds"]) if path.exists() else 0.0
    try:
        yield
    finally:
        place = here.plan.job.place
        name = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
        here.run.write(TIME, {"seconds": before + time.perf_counter() - start, "device": name})


@contextlib.contextmanager
def _clock(here: Session) -> Iterator[Callable[[], float]]:
    """Seconds of the work inside, with those of sittings that were stopped in it."""
    path, start = here.run.folder / SPENT, time.perf_counter()
    before = float(read_json(path)["seconds"]) if path.exists() else 0.0
    try:
        yield lambda: before + time.perf_counter() - start
    except BaseException:
        here.run.write(SPENT, {"seconds": before + time.perf_counter() - start})
        raise


def _data(here: Session, cell: Cell) -> _Data:
    job, opened = here.plan.job, here.opened
    place = job.place
    rest, held = split(opened.data.train, cell.holdout, _SPLIT)
    how: dict[str, Any] = {"workers": job.workers, "corrupt": job.corrupt}
    return _Data(
        everything=opened.loaders.train,
        rest=make_loader(rest, job.batch, True, job.seed, place, **how),
        held=make_loader(held, min(job.batch, len(held)), False, job.seed, place, **how),
        mixed=make_loader(held, min(job.batch, len(held)), True, job.seed, place, **how),
        test=opened.loaders.test,
    )


def _problem(here: Session, data: _Data, method: Method) -> Problem:
    plan, opened = here.plan, here.opened
    assert plan.search is not None and plan.train is not None
    graph = opened.graph
    search = plan.search
    floor, ceiling = ends_of(opened.model, graph, search.groups, search.align, search.min_channels, search.max_channels)
    # what serves all budgets is made for none: that of its plan is the whole network, which bounds may not reach
    whole = bool(ceiling and plan.cell and plan.cell.prepares)
    learns = bool(plan.cell and plan.cell.settings.get("hold_out"))  # by held-out images, beside choosing by them
    return Problem(
        model=opened.model,
        graph=graph,
        loader=data.rest if method.holds_out or learns else data.everything,
        held=data.mixed if learns else data.held,
        budget=parse(graph.macs(ceiling) if whole else search.budget, graph),
        recipe=plan.train,
        floor=floor,
        ceiling=ceiling,
        align=search.align,
        seed=plan.job.seed,
        engine=plan.engine,
        keep=lambda stage: here.checkpointer.stage(_stage(stage, here)),
        tell=_tell(here),
    )


def _config(method: Method, cell: Cell) -> Any:
    return method.config(**cell.settings)


def _tell(here: Session) -> Any:
    """Records become lines of the log; what a search has found becomes its files."""

    def tell(stage: str, record: Told) -> None:
        stage = _stage(stage, here)
        if isinstance(record, StepRecord):
            here.on_event(Event(stage, record.steps, record))
        elif isinstance(record, SearchRecord | SearchResult):
            here.on_event(Event(stage, 0, record))
        else:
            here.run.add(LOG, {"stage": stage} | dict(record))

    return tell


def _stage(stage: str, here: Session) -> str:
    """What a method calls a stage, made different from the training of its result."""
    return f"{stage}, choosing" if here.plan.cell and stage == title(here.plan.cell.method) else stage


# a network that others start from


def _prepare(here: Session, cell: Cell, data: _Data) -> None:
    with _clock(here) as seconds:
        prepared = _trained_base(here, data) if cell.method == BASE else _prepared(here, cell, data)
        write_tensors(here.run, PREPARED, prepared.state)
        write_cost(here.run, seconds(), prepared.sample_passes)


def _trained_base(here: Session, data: _Data) -> Prepared:
    """The unpruned network, trained without the held-out images."""
    opened, recipe = here.opened, here.plan.train
    assert recipe is not None
    wanted = {BASE: opened.graph.full}
    net = train_all(opened.fresh, opened.graph, wanted, data.rest, Retraining(recipe), runtime=here.runtime)[BASE]
    return Prepared(state=net.state_dict(), sample_passes=recipe.epochs * samples_of(data.rest))


def _prepared(here: Session, cell: Cell, data: _Data) -> Prepared:
    method = find_method(cell.method)
    return prepare(cell.method, method, _problem(here, data, method), _config(method, cell))


# a network of the table


def _fill(here: Session, cell: Cell, data: _Data) -> None:
    opened, recipe = here.opened, here.plan.train
    assert recipe is not None
    graph = opened.graph
    if not cell.method:
        wanted = {UNPRUNED: graph.full}
        with _clock(here) as seconds:
            nets = train_all(opened.fresh, graph, wanted, data.everything, Retraining(recipe), runtime=here.runtime)
            if not (here.run.folder / COST).exists():  # else it was killed after this
                write_cost(here.run, seconds(), recipe.epochs * samples_of(data.everything))
        _finish(here, nets, wanted, data)
        return
    method = find_method(cell.method)
    choice = read_choice(here) or _choose(here, cell, method, data)
    nets = {}
    if cell.scratch:
        wanted = {title(cell.method): choice.widths}
        nets |= train_all(opened.fresh, graph, wanted, data.everything, Retraining(recipe), runtime=here.runtime)
    if method.own and (cell.fine_tune_epochs or method.own is not Own.FINE_TUNED):
        nets[own_name(cell.method)] = _train_own(here, cell, method.own, choice, data)
    if not nets:
        raise TrainingError(f"{title(cell.method)} has no training of its own: train it from scratch, or leave it out.")
    _finish(here, nets, dict.fromkeys(nets, choice.widths), data)


def _choose(here: Session, cell: Cell, method: Method, data: _Data) -> Choice:
    """Let the method choose, and keep what it chose: an interrupted cell does not choose again."""
    with _clock(here) as seconds:
        problem = _problem(here, data, method)
        with blamed(cell.method):
            choice = _find(here, cell, method, problem)
        if is_imported(cell.method):
            choice = settle(cell.method, method, problem, choice)
        choice.check(problem)
        if method.own not in (Own.FINE_TUNED, Own.AS_IT_IS):  # its weights are not used, and may be large
            choice = replace(choice, model=None)
        keep_choice(here, choice, seconds())
    return choice


def _find(here: Session, cell: Cell, method: Method, problem: Problem) -> Choice:
    """What the method chooses, from what it starts from."""
    uses, config = used_folder(here, cell), _config(method, cell)
    match method.start:
        case Start.SEARCHED:
            return method.find(problem, config, load_search(uses, problem.graph))
        case Start.HELD | Start.PREPARED:
            check_there(uses / PREPARED)
            return method.find(problem, config, read_tensors(uses / PREPARED))
        case Start.TRAINED:
            return method.find(problem, config, load_network(here, cell.uses).state_dict())
        case _:
            return method.find(problem, config)


def _train_own(here: Session, cell: Cell, own: Own, choice: Choice, data: _Data) -> nn.Module:
    """The chosen network with weights got the authors' way."""
    opened, recipe, name = here.opened, here.plan.train, own_name(cell.method)
    if own is Own.SLIMMABLE:
        return _train_inside(here, name, choice.widths, data)
    assert recipe is not None and choice.model is not None
    small = cut(choice.model, opened.graph, choice.kept)
    if own is Own.FINE_TUNED:
        gentle = replace(
            recipe, epochs=cell.fine_tune_epochs, lr=recipe.lr / 10, warmup_lr=recipe.lr / 10, warmup_epochs=0
        )

        training.train(small, data.everything, gentle, runtime=here.runtime.stage(name))
    return small


def _train_inside(here: Session, name: str, widths: Widths, data: _Data) -> nn.Module:
    """The chosen network with fresh weights, trained inside the unpruned network, which it imitates."""
    opened, recipe = here.opened, here.plan.train
    assert recipe is not None
    wanted = {name: widths}
    how = Retraining(recipe, Retrain.SLIMMABLE)
    return train_all(opened.fresh, opened.graph, wanted, data.everything, how, runtime=here.runtime)[name]


def _finish(here: Session, nets: dict[str, nn.Module], widths: dict[str, Widths], data: _Data) -> None:
    """Test the networks, and keep the first one."""
    example = next(iter(data.test))[0]
    compare(nets, here.opened.graph, widths, data.test, example, runtime=here.runtime)
    name, net = next(iter(nets.items()))
    save(net, widths[name], here.run.folder)


UNIFORM = "uniform"  # what methods of one ratio have the widths of


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods, budgets and seeds, and what is the same for all of them."""

    job: Job
    engine: Engine
    train: TrainConfig  # the final recipe, the same for every network
    budgets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of some methods, by name
    groups: int = 10  # each space keeps at least a group
    align: int = 1  # widths are multiples of this
    min_channels: Bound = field(default_factory=dict)  # least channels, as SearchConfig has them
    max_channels: Bound = field(default_factory=dict)  # and most
    holdout: float = 0.1  # share of the training images that methods choose by; in the final training they are back
    scratch: bool = True  # whether the chosen networks are trained from scratch
    fine_tune_epochs: int = 0  # of methods that fine-tune; 0: not done
    unpruned: bool = True  # whether the unpruned network is in the table, too
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # budgets of some methods; others have all

    def __post_init__(self) -> None:
        for name, given in (("budget", self.budgets), ("method", self.methods), ("seed", self.seeds)):
            if not given or len({*given}) < len(given):
                raise DmcpError(f"Give at least one {name}, and each only once, not {list(given)}.")
        for name in (*self.methods, *self.settings):
            check_method(name)
        for name in self.methods:
            try:
                find_method(name).config(**self.settings.get(name, {}))
            except TypeError as error:
                raise DmcpError(f"{name}: its settings cannot be made: {error}.") from None
        _check_titles(self.methods)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Method and budget of each row but that of the unpruned network."""
        every = itertools.product(self.budgets, self.methods)
        return [(name, budget) for budget, name in every if budget in self.only.get(name, (budget,))]


def check_method(name: str) -> None:
    """Refuse a name that no method has."""
    find_method(name)


def _check_titles(methods: Sequence[str]) -> None:
    """Refuse methods whose cells would have the same folders."""
    known = {*METHODS, *PEERS, UNPRUNED, BASE}
    names = Counter(map(title, methods))
    for name in methods:
        if names[title(name)] > 1 or (name not in known and title(name) in known):
            raise DmcpError(f"There is another {title(name)}, and rows and folders go by name: give yours another one.")


# the cells


@dataclass(frozen=True)
class Task:
    """One cell: its name is that of its folder."""

    name: str
    plan: Plan
    after: tuple[str, ...] = ()  # cells that must be done before


def cell_name(what: str, seed: int, budget: str = "") -> str:
    """dmcp-50%-seed0; a method by its title."""
    place = budget.replace(":", "=").replace(",", "+").replace("/", "-")
    return "-".join([*filter(None, (title(what), place)), f"seed{seed}"])


def tasks(it: Comparison) -> list[Task]:
    """All cells, seed by seed, each after those that it needs."""
    found: dict[str, Task] = {}

    def add(name: str, plan: Plan, after: tuple[str, ...] = ()) -> str:
        found.setdefault(name, Task(name, plan, after))
        return name

    starts = {find_method(name).start for name in it.methods}
    for seed in it.seeds:
        if it.unpruned or Start.TRAINED in starts:
            add(cell_name(UNPRUNED, seed), plan_cell(it, seed, Cell(method="")))
        if Start.HELD in starts:
            add(cell_name(BASE, seed), plan_cell(it, seed, Cell(method=BASE, prepares=True)))
        for name in it.methods:
            if find_method(name).start is Start.PREPARED:
                add(cell_name(name, seed), plan_cell(it, seed, Cell(method=name, prepares=True)))
        for name, budget in itertools.product(it.methods, it.budgets):
            if (name, budget) in it.rows and not _has_nothing_to_train(it, name):
                uses = _needed(it, name, seed, budget, add)
                plan = plan_cell(it, seed, Cell(method=name, uses=uses), budget)
                add(cell_name(name, seed, budget), plan, (uses,) if uses else ())
        if it.scratch and any(map(is_one_ratio, it.methods)):  # trained from scratch they are uniform's networks
            for budget in it.budgets:
                add(cell_name(UNIFORM, seed, budget), plan_cell(it, seed, Cell(method=UNIFORM), budget))
    return list(found.values())


def _has_nothing_to_train(it: Comparison, name: str) -> bool:
    """Whether all that there is of a method is what uniform has."""
    method = find_method(name)
    return it.scratch and method.one_ratio and method.own is Own.FINE_TUNED and not it.fine_tune_epochs


def _needed(it: Comparison, name: str, seed: int, budget: str, add: Any) -> str:
    """The name of the cell that a method starts from, added if need be; empty if it needs none."""
    match find_method(name).start:
        case Start.TRAINED:
            return cell_name(UNPRUNED, seed)
        case Start.HELD:
            return cell_name(BASE, seed)
        case Start.PREPARED:
            return cell_name(name, seed)
        case Start.SEARCHED:
            plan = plan_cell(it, seed, Cell(method="dmcp"), budget)
            return str(add(cell_name("dmcp", seed, budget), plan))
    return ""


def plan_cell(it: Comparison, seed: int, cell: Cell, budget: str = "100%") -> Plan:
    """What a cell is to do, under the protocol of the comparison."""
    usual, own = (dict(settings) for settings in (it.settings.get(cell.method, {}), cell.settings))
    more = {"more": usual["more"] | own["more"]} if "more" in usual and "more" in own else {}
    whole = replace(
        cell,
        settings=usual | own | more,
        holdout=it.holdout,
        scratch=not cell.method or (it.scratch and not is_one_ratio(cell.method)),
        fine_tune_epochs=it.fine_tune_epochs,
    )
    return Plan(
        command="cell",
        job=replace(it.job, seed=seed),
        engine=it.engine,
        search=SearchConfig(
            budget=budget,
            groups=it.groups,
            align=it.align,
            min_channels=it.min_channels,
            max_channels=it.max_channels,
            seed=seed,
        ),
        train=replace(it.train, seed=seed),
        cell=whole,
    )


def is_one_ratio(name: str) -> bool:
    """Whether a method's widths are those of uniform."""
    return name in METHODS and METHODS[name].one_ratio


def epochs_of(plan: Plan) -> tuple[str, str]:
    """Epochs of a cell: until the widths are known, and of what is trained then, with the method's own way."""
    cell, recipe = plan.cell, plan.train
    assert cell is not None and recipe is not None
    if cell.method in ("", BASE):
        return "", str(recipe.epochs)
    method = find_method(cell.method)
    config = method.config(**cell.settings)
    if cell.prepares:
        return str(getattr(config, "epochs", None) or recipe.epochs), ""
    searched = recipe.epochs if method.own is Own.AS_IT_IS else getattr(config, "epochs", "")
    final = [str(recipe.epochs)] if cell.scratch else []
    if method.own is Own.FINE_TUNED and cell.fine_tune_epochs:
        final.append(f"{cell.fine_tune_epochs} fine-tuned")
    elif method.own is Own.SLIMMABLE:
        final.append(f"{recipe.epochs} slimmable")
    return "" if method.prepare else str(searched), " + ".join(final)


PLANS = "plans"  # what each cell is to do
OUTPUT = "output"  # what each cell has said
COMMANDS = "commands.jsonl"  # what was typed to fill the folder, with what and on what
_PACKAGES = ("torch-dmcp", "torch", "torchvision", "timm", "torch-pruning")
_LAST = 3  # failed cells whose last words are shown
_PASSES = 4  # of a step of a slimmable network


def longest_first(wanted: Sequence[Task]) -> list[Task]:
    """Cells in the order in which they should start: those first that take longest, with all that waits for them.

    What others wait for comes before them, if it did so before.
    """
    left: dict[str, float] = {}
    for task in reversed(wanted):  # those that wait come after what they wait for
        left[task.name] = left.get(task.name, 0.0) + _work(task.plan)
        for name in task.after:
            left[name] = max(left.get(name, 0.0), left[task.name])
    return sorted(wanted, key=lambda task: -left[task.name])


def _work(plan: Plan) -> float:
    """How long a cell takes, roughly, in epochs of the unpruned network; never nothing."""
    cell, recipe = plan.cell, plan.train
    assert cell is not None and recipe is not None
    if cell.method in ("", BASE):
        return float(recipe.epochs)
    method = find_method(cell.method)
    inside = _PASSES if method.own is Own.SLIMMABLE else 1
    searched = getattr(method.config(**cell.settings), "epochs", None)
    searched = searched if isinstance(searched, int | float) else None  # of somebody's own method it may be anything
    if cell.prepares:
        return float(searched or recipe.epochs)
    work = float(recipe.epochs if cell.scratch else 0)
    work += recipe.epochs if method.own is Own.AS_IT_IS else inside * (searched or 0) if method.prepare is None else 0
    own = {Own.FINE_TUNED: cell.fine_tune_epochs, Own.SLIMMABLE: inside * recipe.epochs}
    return work + (own.get(method.own, 0) if method.own else 0) or 1.0


def run_comparison(it: Comparison, folder: Path, at_once: int | None = None, quiet: bool = False) -> list[Ended]:
    """Run the cells that are not done yet; those that failed, if any. Started again, it goes on where it was."""
    wanted, device = tasks(it), it.job.place
    _make(folder)
    with kept_signals() as signals, Lock(folder):
        check_begun(wanted, folder)
        for task in wanted:
            Run(folder / PLANS).write(f"{task.name}.json", task.plan.to_json())
        _note_command(folder, device)
        left = longest_first([task for task in wanted if not is_done(folder / task.name)])
        names = {task.name for task in left}
        commands = [
            Command(
                task.name,
                (*COMMAND, "cell", str(folder / PLANS / f"{task.name}.json"), str(folder / task.name)),
                tuple(name for name in task.after if name in names),
            )
            for task in left
        ]
        ended = run_side_by_side(
            commands, folder / OUTPUT, device, signals, at_once=at_once, quiet=quiet, noun="cells", total=len(wanted)
        )
    return [end for end in ended if end.code != 0]


def check_failed(failed: Sequence[Ended]) -> None:
    """Stop with the last words of cells that failed, if there are any."""
    if failed:
        listed = "; ".join(end.describe() for end in failed[:_LAST]) + ("; ..." if failed[_LAST:] else "")
        raise DmcpError(f"{len(failed)} cells failed, the same command starts only them again: {listed}")


def _make(folder: Path) -> None:
    try:
        for part in (folder, folder / PLANS, folder / OUTPUT):
            part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: no cells can be kept here: {error.strerror or error}.") from error


def check_begun(wanted: Sequence[Task], folder: Path) -> None:
    """Refuse all cells if one of them was begun by another plan."""
    for task in wanted:
        if fields := changed_fields(task, folder):
            known = f", which is in {folder / COMMANDS}" if (folder / COMMANDS).exists() else ""
            raise FileError(
                f"{folder / task.name} was begun with other settings ({', '.join(fields)}): give --out another folder, "
                f"or the command that began it{known}."
            )
    before = {row: (name, kind) for row, name, kind in _begun(folder)}
    for task in wanted:
        name, kind = before.get(row_of(task.name, task.plan.job.seed), ("", None))
        if kind not in (None, kind_of(json.loads(json.dumps(task.plan.to_json())))):
            raise FileError(
                f"{folder / task.name}: another seed of this row, {name}, was begun with another method or other "
                "settings: give --out another folder, or the same settings."
            )


def check_facts(job: Job, folder: Path, opened: Opened) -> None:
    """Refuse a folder with cells of this job whose network, or data, were others by the same name."""
    now = json.loads(json.dumps(facts_of(opened)))
    for path in sorted((folder / PLANS).glob("*.json")):
        place, what = folder / path.stem, ""
        if is_run(place):
            with contextlib.suppress(FileError):  # of another version: refused elsewhere, if it is wanted
                theirs = plan_from_json(read_json(path), path).job
                what = other_fact(read_json(place / SETTINGS), now) if replace(theirs, seed=job.seed) == job else ""
        if what:
            name = f"{job.data} was another data set" if what == "data" else f"{job.model} was another network"
            raise FileError(
                f"{place} was made when {name} than now: give --out another folder, or remove the cells in this one."
            )


def other_fact(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What two runs do not have in common, the network or the data; empty if they have both, as far as is known."""
    differing = [name for name in FACTS if name in one and name in other and one[name] != other[name]]
    return "" if not differing else "data" if differing == ["data"] else "network"


def row_of(name: str, seed: int) -> str:
    """What the cells of all seeds of a row have in common."""
    return name.removesuffix(f"-seed{seed}")


def kind_of(plan: Mapping[str, Any]) -> Any:
    """What must be the same in all seeds of a row."""
    cell = plan.get("cell") or {}
    return cell.get("method"), cell.get("settings")


def _begun(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Row, name and kind of all cells that somebody has begun."""
    for path in sorted((folder / PLANS).glob("*.json")):
        with contextlib.suppress(FileError):
            plan = read_json(path)
            if isinstance(plan.get("job"), dict) and is_run(folder / path.stem):
                yield row_of(path.stem, plan["job"].get("seed")), path.stem, kind_of(plan)


def changed_fields(task: Task, folder: Path) -> list[str]:
    """What of its plan is not as it was when a cell was begun; nothing of one that nobody has begun."""
    path, plan = _plan_path(task, folder), json.loads(json.dumps(task.plan.to_json()))
    if not is_run(folder / task.name) or not path.is_file():
        return []
    before = read_json(path)
    places = [place for place in plan if before.get(place) != plan[place]]
    return [name for place in places for name in changes(place, before.get(place), plan[place])]


def _plan_path(task: Task, folder: Path) -> Path:
    return folder / PLANS / f"{task.name}.json"


def state_of(task: Task, folder: Path) -> str:
    """How far a cell is."""
    if fields := changed_fields(task, folder):
        return f"other settings ({', '.join(fields)})"
    return "done" if is_done(folder / task.name) else "begun" if is_run(folder / task.name) else "missing"


def _note_command(folder: Path, device: torch.device) -> None:
    """Keep what was typed, with versions and device; once, as long as they are the same."""
    found = {name: _version(name) for name in _PACKAGES}
    found |= {"python": platform.python_version(), "code": code_digest()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    facts = {
        "command": shlex.join(["dmcp", *sys.argv[1:]]),
        "versions": {package: version for package, version in found.items() if version},
        "device": name,
    }
    known = [{key: record.get(key) for key in facts} for record in commands_of(folder)]
    if facts not in known:
        Run(folder).add(COMMANDS, {"time": time.strftime("%Y-%m-%d %H:%M:%S")} | facts)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commands_of(folder: Path) -> list[dict[str, Any]]:
    """The commands that have filled a folder, the first one first."""
    path, found = folder / COMMANDS, list[dict[str, Any]]()
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):  # a kill may have cut it
            record = json.loads(line)
            found += [record] if isinstance(record, dict) else []
    return found


def changes(place: str, before: Any, now: Any) -> list[str]:
    """Names of the fields of a part that are not the same."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return [place]
    return sorted(f"{place}.{name}" for name in before.keys() | now.keys() if before.get(name) != now.get(name))


_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The cells of a folder that are done, under one protocol."""

    cells: Mapping[str, Task]  # by name
    rows: Sequence[tuple[str, str]]  # method and budget, in the order of the table
    seeds: tuple[int, ...]
    scratch: bool  # whether networks were trained from scratch

    @property
    def unpruned(self) -> bool:
        """Whether the unpruned network is among them."""
        return any(task.plan.cell is not None and not task.plan.cell.method for task in self.cells.values())

    @property
    def plan(self) -> Plan:
        """One of them, which has the protocol of all."""
        return next(iter(self.cells.values())).plan


def stored(folder: Path, it: Comparison | None = None) -> Stored | None:
    """All cells in a folder that are done; under the protocol of the comparison, or the only one that there is."""
    found = _done(folder)
    kinds = {name: _protocol(task.plan) for name, task in found.items()}
    if it is not None:
        wanted = _protocol(plan_cell(it, it.seeds[0], Cell(method="")))
        found = {name: task for name, task in found.items() if kinds[name] == wanted}
    elif any(kind != next(iter(kinds.values())) for kind in kinds.values()):
        raise FileError(f"{folder} has cells of several protocols ({_differing(kinds)}): move some of them elsewhere.")
    if not found:
        return None
    _check_alike(found, folder)
    rows = {(task.plan.cell.method, budget) for task in found.values() if task.plan.cell and (budget := _budget(task))}
    rows |= {*it.rows} if it is not None else set()
    scratch = any(task.plan.cell.scratch for task in found.values() if task.plan.cell and _budget(task))
    return Stored(
        cells=found,
        rows=sorted(rows, key=lambda row: (_place(row[1]), *_rank(row[0]))),
        seeds=tuple(sorted({task.plan.job.seed for task in found.values()})),
        scratch=scratch,
    )


def _done(folder: Path) -> dict[str, Task]:
    """Cells that are done, each by the name that its plan gives it."""
    found: dict[str, Task] = {}
    for path in sorted((folder / PLANS).glob("*.json")):
        name = path.name.removesuffix(".json")
        with contextlib.suppress(FileError):  # of another version: no cell of this protocol
            plan = plan_from_json(read_json(path), path)
            whole = plan.cell is not None and plan.train is not None and plan.search is not None
            if plan.cell is not None and whole and is_done(folder / name) and _is_told(folder / name):
                task = Task(name, plan, (plan.cell.uses,) if plan.cell.uses else ())
                if name == cell_name(plan.cell.method or UNPRUNED, plan.job.seed, _budget(task)):
                    found[name] = task
    return found


def _is_told(place: Path) -> bool:
    """Whether a folder says what its network was pruned from, and what that cost; a part of one does not."""
    with contextlib.suppress(FileError):
        unpruned, cost = read_json(place / SETTINGS).get("unpruned"), read_json(place / COST)
        return isinstance(unpruned, dict) and bool(unpruned.get("macs")) and {"seconds", "sample_passes"} <= cost.keys()
    return False


def _check_alike(found: Mapping[str, Task], folder: Path) -> None:
    """Refuse to average what is not the same method with the same settings, and a table of several networks or data."""
    first: dict[str, Task] = {}
    one = next(iter(found))
    for name, task in found.items():
        if what := other_fact(*(read_json(folder / it / SETTINGS) for it in (one, name))):
            raise FileError(f"{folder}: {one} and {name} do not have the same {what}: move one elsewhere.")
        other = first.setdefault(row_of(name, task.plan.job.seed), task)
        if kind_of(task.plan.to_json()) != kind_of(other.plan.to_json()):
            raise FileError(
                f"{folder}: {other.name} and {name} are not the same method with the same settings: move one elsewhere."
            )


def _budget(task: Task) -> str:
    """Nothing for the cells of no budget."""
    plan = task.plan
    is_row = plan.cell is not None and plan.cell.method and not plan.cell.prepares and plan.search is not None
    return str(plan.search.budget) if is_row and plan.search else ""


def _protocol(plan: Plan) -> dict[str, Any]:
    """What is the same in all cells of a table."""
    plain: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    for part in ("job", "train", "search"):
        plain[part].pop("seed")
    plain["search"].pop("budget")
    return plain | {"cell": {name: plain["cell"][name] for name in ("holdout", "fine_tune_epochs")}}


def _differing(kinds: Mapping[str, dict[str, Any]]) -> str:
    first, *rest = kinds.values()
    pairs = [(place, first[place], kind[place]) for kind in rest for place in kind if kind[place] != first[place]]
    return ", ".join(sorted({name for pair in pairs for name in changes(*pair)}))


def _place(budget: str) -> tuple[float, str]:
    """Shares of the MACs from the largest on, then all others."""
    match = _PERCENT.fullmatch(budget)
    return (-float(match[1]), "") if match else (1.0, budget)


def _rank(method: str) -> tuple[int, str]:
    """Ours as they are listed, then those of others."""
    known = [*METHODS, *PEERS]
    return (known.index(method), "") if method in known else (len(known), title(method))


def describe(it: Stored) -> str:
    """Network, data, recipe and seeds in a line."""
    plan, train, cell = it.plan, it.plan.train, it.plan.cell
    assert train is not None and cell is not None
    name = " ".join([plan.job.model, *plan.job.model_args])
    rate = f" at a batch of {train.reference_batch}" if train.reference_batch else ""
    return (
        f"{name} on {Path(plan.job.data).name}: {_epochs(train.epochs)}, batch {plan.job.batch}, learning rate "
        f"{train.lr:g}{rate}, weight decay {train.weight_decay:g}; {cell.holdout:.0%} of the training images held out; "
        f"fine-tuning {_epochs(cell.fine_tune_epochs)}; {_bounds(plan)}seeds {', '.join(map(str, it.seeds))}."
    )


def _bounds(plan: Plan) -> str:
    """The least and the most channels that were asked for, in words; empty if none were."""
    parts = []
    for word, name in zip(("at least", "at most"), BOUNDS, strict=True):
        bound = getattr(plan.search, name)
        numbers = bound if isinstance(bound, Mapping) else {"": bound}
        parts += [f"{word} {number} channels{f' in {place}' if place else ''}" for place, number in numbers.items()]
    return f"{', '.join(parts)}; " if parts else ""


def settings_of(it: Stored, folder: Path) -> dict[str, Any]:
    """All that makes the table again, as plain data: the protocol, what methods were set to, where cells ran."""
    kind = _protocol(it.plan)
    own = {title(task.plan.cell.method): dict(task.plan.cell.settings) for task in it.cells.values() if task.plan.cell}
    times = [read_json(folder / name / TIME) for name in it.cells if (folder / name / TIME).exists()]
    return {
        "job": kind["job"],
        "engine": kind["engine"],
        "train": kind["train"],
        "groups": kind["search"]["groups"],
        "align": kind["search"]["align"],
        **{name: bound for name in BOUNDS if (bound := kind["search"].get(name))},
        **kind["cell"],
        "set": {name: values for name, values in sorted(own.items()) if values},
        "budgets": [*dict.fromkeys(budget for _, budget in it.rows)],
        "seeds": [*it.seeds],
        "devices": sorted({str(time["device"]) for time in times}),
    }


def _epochs(number: int) -> str:
    return f"{number} epoch{'' if number == 1 else 's'}"


PASSES = 10  # through a network, the fastest of which is its time
_WAYS = {Own.FINE_TUNED: "fine-tuned", Own.AS_IT_IS: "as trained", Own.SLIMMABLE: "slimmable"}


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a row has of one seed."""

    seed: int
    accuracy: float
    macs: int
    params: int
    search_seconds: float | None  # until its widths were known, with what had to be trained before; None: not known
    sample_passes: float | None  # the same


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table: a method at a budget, over all seeds."""

    method: str  # its title
    budget: str
    own: bool  # whether its networks were trained the method's own way
    accuracies: tuple[float, ...]  # of the seeds, in order, 0 to 1
    mean: float
    deviation: float | None  # standard deviation (ddof = 1); None for one seed
    macs: tuple[int, int]  # the least and the most
    params: tuple[int, int]
    macs_share: tuple[float, float]  # of the unpruned network
    mean_share: float = 0.0  # the same, mean over the seeds
    search_seconds: float | None = 0.0  # mean over the seeds, with what had to be trained before; None: not known
    sample_passes: float = 0.0  # the same
    ms: float | None = None  # fastest pass of a batch through the first seed's network
    seeds: tuple[int, ...] = ()  # of the accuracies
    same_as: str = ""  # the method whose networks these are, if they are not its own
    way: str = ""  # of its own training
    networks: tuple[Network, ...] = ()  # one for each seed


# what came out


def gather(it: Comparison | Stored, folder: Path) -> list[Line]:
    """The table of all cells that are done."""
    lines: list[Line] = []
    known = it.cells if isinstance(it, Stored) else {task.name: task for task in tasks(it)}
    for method, budget in ([(UNPRUNED, "")] if it.unpruned else []) + [*it.rows]:
        trained = _rows(it.seeds, method, title(method), budget, folder, known)
        own = _rows(it.seeds, method, own_name(method), budget, folder, known)
        copied = is_one_ratio(method) and it.scratch
        if copied:
            trained = _rows(it.seeds, UNIFORM, UNIFORM, budget, folder, known)
        searched = (own or trained) if method != UNPRUNED else []
        costs = {task.plan.job.seed: _cost(task.name, folder, known) for task, _, _ in searched}
        if trained:
            line = _line(method, budget, trained, costs)
            lines.append(replace(line, same_as=UNIFORM if copied else ""))
        if own:
            lines.append(replace(_line(method, budget, own, costs), own=True, way=_way(method)))
    return lines


_Rows = list[tuple[Task, PastRun, Row]]


def _rows(seeds: Sequence[int], method: str, name: str, budget: str, folder: Path, known: Mapping[str, Task]) -> _Rows:
    """The networks of this name in the cells of a method that are done."""
    cells = [task for seed in seeds if (task := known.get(cell_name(method, seed, budget)))]
    done = [(task, read_run(folder / task.name)) for task in cells if is_done(folder / task.name)]
    return [(task, run, row) for task, run in done if (row := run.row(name))]


def _way(method: str) -> str:
    """How its own training is called; a table can be made where somebody's own method cannot be imported."""
    with contextlib.suppress(DmcpError):
        own = find_method(method).own
        return _WAYS[own] if own else ""
    return ""


def _line(method: str, budget: str, rows: _Rows, costs: Mapping[int, tuple[float, float]]) -> Line:
    accuracies = tuple(row.accuracy for _, _, row in rows)
    full = next(run.unpruned("macs") or 0 for _, run, _ in rows)
    macs = [row.macs for _, _, row in rows]
    params = [row.params for _, _, row in rows]
    known = [seconds for seconds, _ in costs.values() if not math.isnan(seconds)]
    return Line(
        method=title(method),
        budget=budget,
        own=False,
        accuracies=accuracies,
        mean=statistics.fmean(accuracies),
        deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        macs=(min(macs), max(macs)),
        params=(min(params), max(params)),
        macs_share=(min(macs) / full, max(macs) / full),
        mean_share=statistics.fmean(macs) / full,
        search_seconds=statistics.fmean(known) if known else None if costs else 0.0,
        sample_passes=statistics.fmean(passes for _, passes in costs.values()) if costs else 0.0,
        seeds=tuple(task.plan.job.seed for task, _, _ in rows),
        networks=tuple(_network(task.plan.job.seed, row, costs) for task, _, row in rows),
    )


def _network(seed: int, row: Row, costs: Mapping[int, tuple[float, float]]) -> Network:
    seconds, passes = costs.get(seed, (math.nan, None)) if costs else (0.0, 0.0)
    return Network(
        seed=seed,
        accuracy=row.accuracy,
        macs=row.macs,
        params=row.params,
        search_seconds=None if math.isnan(seconds) else seconds,
        sample_passes=passes,
    )


def _cost(name: str, folder: Path, known: Mapping[str, Task]) -> tuple[float, float]:
    """Seconds and sample-passes until the widths were known, with the cells before it; NaN for what is not known."""
    own = read_json(folder / name / COST)
    before = [_cost(earlier, folder, known) for earlier in (known[name].after if name in known else ())]
    seconds = math.nan if own["seconds"] is None else own["seconds"]
    return seconds + sum(it for it, _ in before), own["sample_passes"] + sum(it for _, it in before)


# how fast


def timed_cells(lines: Sequence[Line], folder: Path) -> dict[str, tuple[str, str]]:
    """Cells of each row's first seed, whose networks are timed, with method and budget."""
    names = {cell_name(line.method, line.seeds[0], line.budget): (line.method, line.budget) for line in lines}
    return {name: row for name, row in names.items() if is_done(folder / name)}


def measure(names: Sequence[str], folder: Path, opened: Opened) -> dict[str, float]:
    """Milliseconds of a batch through the networks of these cells, alone on the machine and in turn."""
    nets = [load(folder / name, opened.fresh) for name in names]
    example = next(iter(opened.loaders.test))[0]
    return dict(zip(names, milliseconds(nets, example, PASSES), strict=True))


def markdown(lines: Sequence[Line], batch: int = 0) -> str:
    """The table for people who read text."""
    return table(cells_of(lines, batch))


def cells_of(lines: Sequence[Line], batch: int = 0) -> list[list[str]]:
    """The table: mean ± standard deviation (seeds); search cost until the widths are known; times if there are any."""
    rows = [["method", "budget", "accuracy in %, same recipe", "its own training", "MACs", "params"]]
    timed = any(line.ms is not None for line in lines)
    rows[0] += ["search, s", "sample-passes, M", *([f"ms per {batch}, fastest of {PASSES}"] if timed else [])]
    for line in lines:
        if line.own and _other(line, lines, own=False):
            continue
        own = _other(line, lines, own=True)
        cells = [line.method, line.budget or "100%", "" if line.own else _same_recipe(line, lines)]
        cells += [", ".join(filter(None, (spread(own.accuracies), own.way))) if own else ""]
        cells += [between(*(f"{share:.1%}" for share in line.macs_share)), between(*(f"{n:,}" for n in line.params))]
        cells += ["" if line.search_seconds is None else f"{line.search_seconds:,.0f}", _millions(line.sample_passes)]
        rows.append(cells + (["" if line.ms is None else f"{line.ms:.2f}"] if timed else []))
    return rows


def against_uniform(lines: Sequence[Line]) -> str:
    """The table of differences for people who read text; nothing where there are none."""
    rows = differences_of(lines)
    return table(rows) if rows else ""


def differences_of(lines: Sequence[Line]) -> list[list[str]]:
    """By how many points methods are better than uniform with the same seed; nothing where there is no uniform."""
    rows = [["method", "budget", "points above uniform, same recipe", "its own training"]]
    for line in lines:
        base = next((it for it in lines if (it.method, it.budget, it.own) == (UNIFORM, line.budget, False)), None)
        if base is None or line is base or (line.own and _other(line, lines, own=False)):
            continue
        own = _other(line, lines, own=True)
        same = f"= {line.same_as}" if line.same_as else "" if line.own else points(differences(line, base))
        rows.append([line.method, line.budget, same, points(differences(own, base)) if own else ""])
    return rows if len(rows) > 1 else []


def differences(line: Line, base: Line) -> list[float]:
    """How much better each network is than the other line's of the same seed."""
    known = dict(zip(base.seeds, base.accuracies, strict=True))
    return [value - known[seed] for seed, value in zip(line.seeds, line.accuracies, strict=True) if seed in known]


def networks_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The table network by network, for other programs; the time of a pass is that of the line's first seed."""
    return [
        {
            "method": line.method,
            "budget": line.budget,
            "training": line.way if line.own else "same recipe",
            "seed": it.seed,
            "accuracy": it.accuracy,
            "same_as": line.same_as,
            "macs": it.macs,
            "params": it.params,
            "search_seconds": it.search_seconds,
            "sample_passes": it.sample_passes,
            "ms": line.ms if it.seed == line.seeds[0] else None,
        }
        for line in lines
        for it in line.networks
    ]


def to_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [asdict(line) for line in lines]


def _other(line: Line, lines: Sequence[Line], own: bool) -> Line | None:
    """The line of the same method and budget that was trained this way."""
    return next((it for it in lines if (it.method, it.budget, it.own) == (line.method, line.budget, own)), None)


def _same_recipe(line: Line, lines: Sequence[Line]) -> str:
    """Figures that stand in another line are not shown twice."""
    there = any((it.method, it.budget, it.own) == (line.same_as, line.budget, False) for it in lines)
    return f"= {line.same_as}" if there else spread(line.accuracies)


def _millions(count: float) -> str:
    """Samples in millions; few of them with three digits."""
    return f"{count / 1e6:,.1f}" if count >= 1e6 else f"{count / 1e6:.3g}"


TABLE, PAGE, FIGURE = "compare.json", "compare.md", "compare.svg"
NETWORKS, LATEX = "compare.csv", "compare.tex"


def write_table(it: Stored, folder: Path, opened: Opened | None = None, again: bool = False) -> dict[str, Any]:
    """Write the table of the cells that are done; what is in its JSON.

    opened: the network and its data, with which cells are timed that have no time yet, or all of them `again`. Without
    it nothing but the folder is needed, and times are those that were measured before.
    """
    lines = gather(it, folder)
    speeds = _speeds(it, lines, folder, opened, again)
    cells = timed_cells(lines, folder)
    by_row = {row: speeds["ms"][name] for name, row in cells.items() if name in speeds["ms"]}
    lines = [replace(line, ms=by_row.get((line.method, line.budget))) for line in lines]
    job = it.plan.job
    data = {
        "model": job.model,
        "data": job.data,
        "commands": commands_of(folder),
        "settings": settings_of(it, folder),
        "batch": speeds["batch"],
        "speeds": speeds,
        "lines": to_json(lines),
    }
    run = Run(folder)
    run.write(TABLE, data)
    parts = [describe(it), markdown(lines, speeds["batch"]), against_uniform(lines)]
    run.write(PAGE, "\n".join(f"{part.rstrip()}\n" for part in parts if part))
    run.write(LATEX, _latex(it, lines, speeds["batch"]))
    run.write(NETWORKS, _csv(networks_of(lines)))
    _draw(it, lines, folder)
    return data


def _latex(it: Stored, lines: Sequence[Line], batch: int) -> str:
    """Both tables for a paper, below what they are about."""
    head = [
        f"% {describe(it)}",
        r"% Needs \usepackage{booktabs}. Mean $\pm$ standard deviation (ddof = 1) over as many seeds as in brackets.",
    ]
    tables = [latex(rows) for rows in (cells_of(lines, batch), differences_of(lines)) if rows]
    return "\n".join([*head, "\n".join(tables)])


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plain data as text with commas; nothing stands for what is not known."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _speeds(it: Stored, lines: Sequence[Line], folder: Path, opened: Opened | None, again: bool) -> dict[str, Any]:
    """Milliseconds of cells by name, with device and batch; those of another device or batch are measured again."""
    before = _stored_speeds(folder)
    if opened is None:
        return before
    place = it.plan.job.place
    device = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    known = {"device": device, "batch": len(next(iter(opened.loaders.test))[1])}
    times: dict[str, float] = {}
    if not again and all(before[name] == value for name, value in known.items()):
        times = before["ms"]
    left = [name for name in timed_cells(lines, folder) if name not in times]
    left = [name for name in left if (folder / name / WEIGHTS).exists()]  # not all, where a folder was brought here
    if left:
        times = times | measure(left, folder, open_job(it.plan.job))
    return known | {"ms": times}


def _stored_speeds(folder: Path) -> dict[str, Any]:
    """What was measured before, if anything."""
    nothing: dict[str, Any] = {"device": "", "batch": 0, "ms": {}}
    try:
        found: Any = read_json(folder / TABLE).get("speeds") if (folder / TABLE).exists() else None
    except FileError:
        return nothing
    fits = isinstance(found, dict) and found.keys() == nothing.keys() and isinstance(found["ms"], Mapping)
    return dict(found) if fits and all(isinstance(ms, int | float) for ms in found["ms"].values()) else nothing


def _draw(it: Stored, lines: Sequence[Line], folder: Path) -> None:
    panels: dict[str, dict[str, tuple[figures.Spread, figures.Spread]]] = {}
    for line in lines:
        if line.budget:  # the unpruned network would make all others look alike
            rows = panels.setdefault(line.budget, {})
            same, own = rows.get(line.method, (None, None))
            rows[line.method] = (same, line.accuracies) if line.own else (line.accuracies, own)
    if panels:
        train = it.plan.train
        assert train is not None
        counts = [len(line.accuracies) for line in lines if line.budget]
        words = f"{train.epochs} epochs, {between(str(min(counts)), str(max(counts)))} seeds"
        title = f"{it.plan.job.model}, {Path(it.plan.job.data).name}, {words}"
        figures.save(figures.accuracy_by_method(panels, title), folder / FIGURE)


def read_names(methods: str) -> list[str]:
    """Names with commas between them, or all."""
    names = [word.strip() for word in methods.split(",") if word.strip()]
    found = [*METHODS] if names == ["all"] else names
    for name in found:
        if name.startswith(GIVEN):  # what rows of --widths are called inside
            raise DmcpError(f"There is no method {name!r}: for widths of your own give --widths NAME=FILE.")
        check_method(name)
    return found


def read_peers(names: Sequence[str]) -> Sequence[str]:
    """Packages of other people, if they are here."""
    for name in names:
        if name not in PEERS:
            near = difflib.get_close_matches(name, PEERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PEERS)}."
            raise DmcpError(f"--peer: there is no peer {name!r}: {hint}")
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            raise DmcpError(f"--peer: {name} is not installed: pip install {name}, or leave this peer out.")
    return names


def read_settings(texts: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """amc.episodes=100 as a mapping of mappings; methods that are imported are named by their titles."""
    found: dict[str, dict[str, Any]] = {}
    titles = {title(name): name for name in methods}
    for text in texts:
        place, equals, _ = text.partition("=")
        told, dot, name = place.rpartition(".")
        if not equals or not dot or not name.isidentifier():
            raise DmcpError(f"--set: {text!r} is not of the form METHOD.NAME=VALUE, like amc.episodes=100.")
        method = titles.get(told, told)
        check_method(method)
        if method == "dmcp-direct":
            raise DmcpError(f"--set: dmcp-direct draws from the search of dmcp: set dmcp.{name}.")
        _, value = argument(text.removeprefix(f"{told}."))
        _check_value(method, name, value)
        if name in found.setdefault(method, {}):
            raise DmcpError(f"--set: {place} is given twice: give it once.")
        found[method][name] = value
    for method, values in found.items():
        find_method(method).config(**values)
    return found


def _check_value(method: str, name: str, value: Any) -> None:
    """Refuse a setting that the method does not have, or that cannot be this value."""
    config: Any = find_method(method).config
    if not is_dataclass(find_method(method).config):
        raise DmcpError(
            f"--set: the settings of {method} are no dataclass: give Method(config=) one, or leave this out."
        )
    known = [it.name for it in fields(config)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}."
        raise DmcpError(f"--set: {method} has no setting {name!r}: {hint}")
    try:
        fits = getattr(from_plain(config, {name: value}), name) == value
    except TrainingError:  # it may be right together with others
        return
    except (TypeError, ValueError):
        fits = False
    if not fits:  # among them dataclasses in dataclasses, for which the command line has no words
        usual = getattr(config(), name)
        hint = f": write it like \"{method}.{name}={{'warmup': 0.2}}\"" if isinstance(usual, Mapping) else ""
        raise DmcpError(f"--set: {method}.{name} cannot be {value!r}{hint}.")


def read_given(texts: Sequence[str]) -> dict[str, Widths | dict[str, int]]:
    """NAME=FILE as the name of a method and its widths."""
    found: dict[str, Widths | dict[str, int]] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or not file or not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
            raise DmcpError(f"--widths: {text!r} is not of the form NAME=FILE, like hand=widths.json.")
        if GIVEN + name in found:
            raise DmcpError(f"--widths: {name} is given twice: give each a name of its own.")
        plain = parse_json(read_bytes(Path(file), MOST_JSON), file)
        ours = isinstance(plain, dict) and {"widths", "fingerprint"} <= plain.keys()
        if not isinstance(plain, dict) or not (ours or all(type(kept) is int for kept in plain.values())):
            raise FileError(f'{file}: not a file of widths: give a widths.json, or {{"space": width, ...}}.')
        found[GIVEN + name] = Widths.from_json(plain) if ours else plain
    return found


def fitting_budgets(
    it: Comparison, given: Mapping[str, Mapping[str, int]], opened: Opened
) -> dict[str, tuple[str, ...]]:
    """Of each of the given widths the budgets that they use, as all choices must; at least one."""
    found: dict[str, tuple[str, ...]] = {}
    floor, ceiling = ends_of(opened.model, opened.graph, it.groups, it.align, it.min_channels, it.max_channels)
    for name, kept in given.items():
        try:
            widths, reasons = opened.graph.widths(kept), list[str]()
        except WidthsError as error:
            raise WidthsError(f"--widths: {title(name)}: {error}") from None
        for text in it.budgets:
            problem = Problem(
                model=opened.model,
                graph=opened.graph,
                loader=opened.loaders.train,
                held=opened.loaders.test,
                budget=parse(text, opened.graph),
                recipe=it.train,
                floor=floor,
                ceiling=ceiling,
                align=it.align,
            )
            try:
                Choice(widths=widths, kept=widths).check(problem)
                found[name] = (*found.get(name, ()), text)
            except DmcpError as error:
                reasons.append(str(error).replace("The method chose widths that", "they").rstrip("."))
        if name not in found:
            raise DmcpError(f"--widths: {title(name)} is not inside any budget: {'; '.join(reasons)}.")
    return found
