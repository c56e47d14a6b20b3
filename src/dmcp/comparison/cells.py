"""One cell of a table at work: a method chooses widths, the network is trained and tested, in a run folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dmcp import training
from dmcp.batches import Loader
from dmcp.budget import parse
from dmcp.comparison.cell_files import (
    CODE,
    COST,
    SPENT,
    TIME,
    check_there,
    keep_choice,
    load_network,
    read_choice,
    read_tensors,
    used_folder,
    write_cost,
    write_tensors,
)
from dmcp.cutting import cut
from dmcp.data import make_loader, split
from dmcp.errors import TrainingError
from dmcp.events import Event
from dmcp.measuring import compare
from dmcp.methods import Method, Own, Start, blamed, find_method, is_imported, own_code, prepare, settle, title
from dmcp.methods.problem import Choice, Prepared, Problem, Told, ends_of, samples_of
from dmcp.pruning import UNPRUNED
from dmcp.retraining import Retrain, train_all
from dmcp.running.plans import Cell
from dmcp.running.sessions import Session
from dmcp.runs import PREPARED, load_search, read_json
from dmcp.saving import save
from dmcp.searching.searches import SearchRecord, SearchResult
from dmcp.spaces import Widths
from dmcp.training import StepRecord

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
    floor, ceiling = ends_of(opened.model, graph, search.groups, search.align, search.smallest, search.largest)
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
        keep=lambda stage: here.keep(_stage(stage, here)),
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
            here.run.log({"stage": stage} | dict(record))

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
    way = (None, here.on_event, here.plan.engine, here.keep)
    wanted = {BASE: opened.graph.full}
    net = train_all(opened.fresh, opened.graph, wanted, data.rest, recipe, Retrain.SCRATCH, *way)[BASE]
    return Prepared(state=net.state_dict(), sample_passes=recipe.epochs * samples_of(data.rest))


def _prepared(here: Session, cell: Cell, data: _Data) -> Prepared:
    method = find_method(cell.method)
    _note_code(here, cell)
    return prepare(cell.method, method, _problem(here, data, method), _config(method, cell))


# a network of the table


def _fill(here: Session, cell: Cell, data: _Data) -> None:
    opened, recipe = here.opened, here.plan.train
    assert recipe is not None
    graph = opened.graph
    way = (None, here.on_event, here.plan.engine, here.keep)
    if not cell.method:
        wanted = {UNPRUNED: graph.full}
        with _clock(here) as seconds:
            nets = train_all(opened.fresh, graph, wanted, data.everything, recipe, Retrain.SCRATCH, *way)
            if not (here.run.folder / COST).exists():  # else it was killed after this
                write_cost(here.run, seconds(), recipe.epochs * samples_of(data.everything))
        _finish(here, nets, wanted, data)
        return
    method = find_method(cell.method)
    choice = read_choice(here) or _choose(here, cell, method, data)
    nets = {}
    if cell.scratch:
        wanted = {title(cell.method): choice.widths}
        nets |= train_all(opened.fresh, graph, wanted, data.everything, recipe, Retrain.SCRATCH, *way)
    if method.own and (cell.fine_tune_epochs or method.own is not Own.FINE_TUNED):
        nets[own_name(cell.method)] = _train_own(here, cell, method.own, choice, data)
    if not nets:
        raise TrainingError(f"{title(cell.method)} has no training of its own: train it from scratch, or leave it out.")
    _finish(here, nets, dict.fromkeys(nets, choice.widths), data)


def _choose(here: Session, cell: Cell, method: Method, data: _Data) -> Choice:
    """Let the method choose, and keep what it chose: an interrupted cell does not choose again."""
    with _clock(here) as seconds:
        _note_code(here, cell)
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


def _note_code(here: Session, cell: Cell) -> None:
    """Keep which code of somebody's own method is at work: it may change before the next seed."""
    if code := own_code(cell.method):
        here.run.write(CODE, {"code": code})


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

        def tell(record: StepRecord) -> None:
            here.on_event(Event(name, record.steps, record))

        training.train(small, data.everything, gentle, None, None, tell, here.plan.engine, here.keep(name))
    return small


def _train_inside(here: Session, name: str, widths: Widths, data: _Data) -> nn.Module:
    """The chosen network with fresh weights, trained inside the unpruned network, which it imitates."""
    opened, recipe = here.opened, here.plan.train
    assert recipe is not None
    way = (None, here.on_event, here.plan.engine, here.keep)
    wanted = {name: widths}
    return train_all(opened.fresh, opened.graph, wanted, data.everything, recipe, Retrain.SLIMMABLE, *way)[name]


def _finish(here: Session, nets: dict[str, nn.Module], widths: dict[str, Widths], data: _Data) -> None:
    """Test the networks, and keep the first one."""
    example = next(iter(data.test))[0]
    compare(nets, here.opened.graph, widths, data.test, example, on_event=here.on_event)
    name, net = next(iter(nets.items()))
    save(net, widths[name], here.run.folder)
