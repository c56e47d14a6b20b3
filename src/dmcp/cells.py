"""One cell of a comparison at work: a method chooses widths, the network is trained and tested, in a run folder."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dmcp import pruning, training
from dmcp.batches import Loader
from dmcp.budget import parse
from dmcp.cutting import WIDTHS, cut, load, parse_tensors, read_bytes, save
from dmcp.data import make_loader, split
from dmcp.errors import FileError, TrainingError
from dmcp.graph import Kept
from dmcp.keeping import DONE, State
from dmcp.methods import METHODS, PEERS, Method, Own, Start
from dmcp.methods.problem import Choice, Problem, Told, samples_of
from dmcp.plans import Cell
from dmcp.pruning import UNPRUNED, Event, Retrain, train_all
from dmcp.runs import CHECKPOINTS, Run, load_search, read_json
from dmcp.searching import SearchRecord, SearchResult
from dmcp.sessions import Session
from dmcp.spaces import Widths
from dmcp.supernet import Supernet
from dmcp.training import StepRecord

COST, CHOICE, CHOSEN, PREPARED = "cost.json", "choice.json", "choice.safetensors", "prepared.safetensors"
BASE = "base"  # what trains the unpruned network without the held-out images
_SPLIT = 0  # one split for all seeds: methods differ, data does not
_CHOSEN = "choice"  # the stage that ends with it
_MOST = 2**34  # bytes of a prepared network


def own_name(method: str) -> str:
    """The row of a method's network that was trained its own way."""
    return f"{method}, own"


def find_method(name: str) -> Method:
    """The method of this name, ours or another package's."""
    return METHODS[name] if name in METHODS else PEERS[name]


def is_done(folder: Path) -> bool:
    """Whether nothing is left to do in the folder of a cell."""
    if (folder / CHECKPOINTS).exists() or not (folder / COST).exists():
        return False
    return any((folder / name).exists() for name in (WIDTHS, PREPARED))


@dataclass(frozen=True, eq=False)
class _Data:
    """Batches of all training images; and of all but the held-out ones, beside those in a fixed order."""

    everything: Loader
    rest: Loader
    held: Loader


def run_cell(here: Session) -> None:
    """Do what the cell of the session's plan says."""
    cell = here.plan.cell
    assert cell is not None and here.plan.train is not None
    data = _data(here, cell)
    if cell.prepares:
        _prepare(here, cell, data)
    else:
        _fill(here, cell, data)
    here.run.close()


def _data(here: Session, cell: Cell) -> _Data:
    job, opened = here.plan.job, here.opened
    place = job.place
    rest, held = split(opened.data.train, cell.holdout, _SPLIT)
    how: dict[str, Any] = {"workers": job.workers, "corrupt": job.corrupt}
    return _Data(
        opened.loaders.train,
        make_loader(rest, job.batch, True, job.seed, place, **how),
        make_loader(held, min(job.batch, len(held)), False, job.seed, place, **how),
    )


def _problem(here: Session, data: _Data, method: Method) -> Problem:
    plan, opened = here.plan, here.opened
    assert plan.search is not None and plan.train is not None
    graph = opened.graph
    groups, align = plan.search.groups, plan.search.align
    return Problem(
        model=opened.model,
        graph=graph,
        loader=data.rest if method.holds_out else data.everything,
        held=data.held,
        budget=parse(plan.search.budget, graph),
        recipe=plan.train,
        floor=Supernet(opened.model, graph, groups, align).floor,
        align=align,
        seed=plan.job.seed,
        engine=plan.engine,
        keep=lambda stage: here.keep(_stage(stage, here)),
        tell=_tell(here),
    )


def _tell(here: Session) -> Any:
    """Records become lines of the log; what a search has found becomes its files."""

    def tell(stage: str, record: Told) -> None:
        stage = _stage(stage, here)
        if isinstance(record, StepRecord):
            here.on_event(Event(stage, record.steps, record))
        elif isinstance(record, SearchRecord | SearchResult):
            here.on_event(Event(stage, 0, record))
        else:
            here.run.log({"stage": stage} | dict(record))

    return tell


def _stage(stage: str, here: Session) -> str:
    """What a method calls a stage, made different from the training of its result."""
    return f"{stage}, choosing" if here.plan.cell and stage == here.plan.cell.method else stage


# a network that others start from


def _prepare(here: Session, cell: Cell, data: _Data) -> None:
    start = time.perf_counter()
    if cell.method == BASE:
        opened, recipe = here.opened, here.plan.train
        assert recipe is not None
        wanted = {BASE: opened.graph.full}
        way = (None, here.on_event, here.plan.engine, here.keep)
        net = train_all(opened.fresh, opened.graph, wanted, data.rest, recipe, Retrain.SCRATCH, *way)[BASE]
        state: Mapping[str, Tensor] = net.state_dict()
        passes = recipe.epochs * samples_of(data.rest)
    else:
        method = find_method(cell.method)
        assert method.prepare is not None
        prepared = method.prepare(_problem(here, data, method), _config(method, cell))
        state, passes = prepared.state, prepared.sample_passes
    _write_tensors(here.run, PREPARED, state)
    _write_cost(here.run, time.perf_counter() - start, passes)


# a network of the table


def _fill(here: Session, cell: Cell, data: _Data) -> None:
    opened, recipe = here.opened, here.plan.train
    assert recipe is not None
    graph = opened.graph
    way = (None, here.on_event, here.plan.engine, here.keep)
    if not cell.method:
        start = time.perf_counter()
        wanted = {UNPRUNED: graph.full}
        nets = train_all(opened.fresh, graph, wanted, data.everything, recipe, Retrain.SCRATCH, *way)
        _write_cost(here.run, time.perf_counter() - start, recipe.epochs * samples_of(data.everything))
        _finish(here, nets, wanted)
        return
    method = find_method(cell.method)
    choice = _read_choice(here) or _choose(here, cell, method, data)
    nets = {}
    if cell.scratch:
        wanted = {cell.method: choice.widths}
        nets |= train_all(opened.fresh, graph, wanted, data.everything, recipe, Retrain.SCRATCH, *way)
    if method.own and (cell.fine_tune_epochs or method.own is not Own.FINE_TUNED):
        nets[own_name(cell.method)] = _train_own(here, cell, method.own, choice, data)
    if not nets:
        raise TrainingError(f"{cell.method} has no training of its own: train it from scratch, or leave it out.")
    _finish(here, nets, dict.fromkeys(nets, choice.widths))


def _choose(here: Session, cell: Cell, method: Method, data: _Data) -> Choice:
    """Let the method choose, and keep what it chose: an interrupted cell does not choose again."""
    start = time.perf_counter()
    problem, uses = _problem(here, data, method), here.run.folder.parent / cell.uses
    match method.start:
        case Start.SEARCHED:
            choice = method.find(problem, load_search(uses, problem.graph))
        case Start.TRAINED:
            trained = load(uses, here.opened.fresh)
            choice = method.find(problem, _config(method, cell), trained.state_dict())
        case Start.HELD | Start.PREPARED:
            state = _read_tensors(uses / PREPARED)
            choice = method.find(problem, _config(method, cell), state)
        case Start.FRESH:
            choice = method.find(problem, _config(method, cell))
    choice.check(problem)
    if choice.model is not None:
        _write_tensors(here.run, CHOSEN, choice.model.state_dict())
    kept = {name: it if isinstance(it, int) else torch.as_tensor(it).tolist() for name, it in choice.kept.items()}
    widths = choice.widths.to_json()
    here.run.write(CHOICE, {"widths": widths, "kept": kept, "has_model": choice.model is not None})
    _write_cost(here.run, time.perf_counter() - start, choice.sample_passes)
    nothing = State({}, dict, [], [], [], here.plan.job.place)
    here.keep(_CHOSEN).save(1, nothing, {DONE: True}, here.ranks)  # from here on it is done, and the log stays
    return choice


def _read_choice(here: Session) -> Choice | None:
    if here.keep(_CHOSEN).load(here.ranks) is None:
        return None
    stored = read_json(here.run.folder / CHOICE)
    kept: dict[str, Kept] = dict(stored["kept"])
    model: nn.Module | None = None
    if stored["has_model"]:
        model = copy.deepcopy(here.opened.model)
        model.load_state_dict(_read_tensors(here.run.folder / CHOSEN))
    return Choice(widths=here.opened.graph.widths(Widths.from_json(stored["widths"])), kept=kept, model=model)


def _train_own(here: Session, cell: Cell, own: Own, choice: Choice, data: _Data) -> nn.Module:
    """The chosen network with weights got the authors' way."""
    opened, recipe, name = here.opened, here.plan.train, own_name(cell.method)
    assert recipe is not None and here.plan.engine is not None
    if own is Own.SLIMMABLE:
        way = (None, here.on_event, here.plan.engine, here.keep)
        wanted = {name: choice.widths}
        return train_all(opened.fresh, opened.graph, wanted, data.everything, recipe, Retrain.SLIMMABLE, *way)[name]
    assert choice.model is not None
    small = cut(choice.model, opened.graph, choice.kept)
    if own is Own.FINE_TUNED:
        gentle = replace(
            recipe, epochs=cell.fine_tune_epochs, lr=recipe.lr / 10, warmup_lr=recipe.lr / 10, warmup_epochs=0
        )
        training.train(
            small,
            data.everything,
            gentle,
            on_step=lambda record: here.on_event(Event(name, record.steps, record)),
            engine=here.plan.engine,
            keeper=here.keep(name),
        )
    return small


def _finish(here: Session, nets: dict[str, nn.Module], widths: dict[str, Widths]) -> None:
    """Test the networks, and keep the first one."""
    example = next(iter(here.opened.loaders.test))[0]
    pruning.compare(nets, here.opened.graph, widths, here.opened.loaders.test, example, on_event=here.on_event)
    name, net = next(iter(nets.items()))
    save(net, widths[name], here.run.folder)


# files


def _config(method: Method, cell: Cell) -> Any:
    return method.config(**cell.settings)


def _write_cost(run: Run, seconds: float, passes: int) -> None:
    run.write(COST, {"seconds": seconds, "sample_passes": passes})


def _write_tensors(run: Run, name: str, state: Mapping[str, Tensor]) -> None:
    plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in state.items()}
    run.write_bytes(name, safetensors.torch.save(plain))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise FileError(f"{path}: the network that this cell starts from is not there: run dmcp compare again.")
    return parse_tensors(read_bytes(path, _MOST), path)
