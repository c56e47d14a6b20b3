"""The commands that compare methods: compare fills a table, cell by cell; cell fills one of them."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dmcp import figures
from dmcp import options as o
from dmcp.budget import Budget, check_reachable, parse
from dmcp.cells import find_method, is_done, run_cell
from dmcp.commands import print_json
from dmcp.comparing import (
    PAGE,
    TABLE,
    Comparison,
    Line,
    check_failed,
    check_method,
    gather,
    markdown,
    run_comparison,
    timed,
    to_json,
)
from dmcp.data import make_loader, split
from dmcp.engine import Engine
from dmcp.errors import DmcpError, FileError, StoppedError, TrainingError
from dmcp.jobs import Job, Opened, argument, open_job
from dmcp.listing import is_run
from dmcp.methods import METHODS, PEERS, Own
from dmcp.plans import Plan, plan_from_json
from dmcp.runs import SETTINGS, Run, from_plain, read_json, slug
from dmcp.sessions import say, session
from dmcp.supernet import Supernet
from dmcp.training import TrainConfig

Budgets = Annotated[list[str] | None, typer.Option("--budget", help="50%, 211M, params:2M; repeatable. Default: 50%.")]
Methods = Annotated[str, typer.Option(help=f"all, or some of {', '.join(METHODS)}, with commas.")]
Peers = Annotated[list[str] | None, typer.Option("--peer", help="Another package, if installed: torch-pruning.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Setting of a method, like amc.episodes=100; repeatable.")
]
SeedCount = Annotated[int, typer.Option(min=1, help="Seeds of everything, from --seed on.")]
TrainEpochs = Annotated[int, typer.Option(min=1, help="Passes over the data in the final training.")]
FineTune = Annotated[int | None, typer.Option(min=0, help="Epochs of fine-tuning; default: two thirds of --epochs.")]
TrainLr = Annotated[float, typer.Option(help="Highest learning rate of the final training at a batch of 2048.")]
Held = Annotated[float, typer.Option(help="Share of the training images that methods choose by.")]
Scratch = Annotated[bool, typer.Option(help="Train what each method chose from scratch, by the same recipe.")]
Unpruned = Annotated[bool, typer.Option(help="Also train the unpruned network.")]
AtOnce = Annotated[int | None, typer.Option(min=1, help="Cells that run side by side; default: 8 on a GPU, the cores.")]


def compare(
    model: o.Model = "",
    data: o.Data = "",
    budget: Budgets = None,
    methods: Methods = "all",
    peer: Peers = None,
    seeds: SeedCount = 3,
    seed: o.Seed = 0,
    epochs: TrainEpochs = 60,
    fine_tune_epochs: FineTune = None,
    scratch: Scratch = True,
    unpruned: Unpruned = True,
    setting: Settings = None,
    batch: o.Batch = 128,
    lr: TrainLr = 0.8,
    weight_decay: o.WeightDecay = 1e-4,
    holdout: Held = 0.1,
    groups: o.Groups = 10,
    align: o.Align = 1,
    model_args: o.ModelArgs = None,
    frozen: o.Frozen = None,
    input: o.Input = "",
    out: o.Out = "",
    at_once: AtOnce = None,
    device: o.Device = "",
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    deterministic: o.Deterministic = False,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Compare pruning methods under one protocol: the same data, split, recipe and budgets, several seeds.

    Each method at each budget with each seed is a run folder; the same command started again goes on where it was.

    \b
    Examples:
      dmcp compare --model cifar:resnet20 --data cifar10 --budget 50% --budget 30% --methods all --seeds 3
      dmcp compare --model digits:resnet --data digits --methods uniform,l1,dmcp --epochs 10 --seeds 2
    """
    if not o.is_first():
        return
    for name, given in (("model", model), ("data", data)):
        if not given:
            raise DmcpError(f"--{name} is missing: dmcp compare --help says what it can be.")
    job = Job(
        model=model,
        model_args=tuple(model_args or ()),
        data=data,
        input=input,
        frozen=tuple(frozen or ()),
        batch=batch,
        device=device,
    )
    it = Comparison(
        job=job,
        engine=Engine(precision=precision, compile=compile, graphs=graphs, deterministic=deterministic),
        train=recipe(epochs, lr, weight_decay),
        budgets=tuple(budget or ["50%"]),
        methods=(*_names(methods), *_peers(peer or ())),
        seeds=tuple(range(seed, seed + seeds)),
        settings=_settings(setting or ()),
        groups=groups,
        align=align,
        holdout=holdout,
        scratch=scratch,
        fine_tune_epochs=max(1, 2 * epochs // 3) if fine_tune_epochs is None else fine_tune_epochs,
        unpruned=unpruned,
    )
    _check_settings(it)
    _check_trained(it)
    opened = open_job(replace(job, device="cpu"))
    check_job(it, opened)
    folder = Path(out or f"runs/{slug(f'compare {job.model} {Path(job.data).name}')}")  # the same one each time
    failed = run_comparison(it, folder, at_once, quiet)
    lines = gather(it, folder)
    if lines:
        lines = _write(it, lines, folder)
        _print(lines, folder, as_json)
    check_failed(failed)


def cell(
    plan: Annotated[Path, typer.Argument(help="What the cell is to do.")],
    folder: Annotated[Path, typer.Argument(help="Its run folder.")],
    debug: o.Debug = False,
) -> None:
    """Fill one cell of a table; dmcp compare starts these."""
    wanted = plan_from_json(read_json(plan), plan)
    _check_begun(wanted, plan, folder)
    try:
        with session(wanted, folder, is_run(folder), quiet=True) as here:
            run_cell(here)
    except StoppedError as error:
        reason = str(error).partition(" Go on with: ")[0]  # which names a command that people do not type
        raise StoppedError(f"{reason} The command that started it goes on with it.") from None
    say("done")


def _check_begun(wanted: Plan, plan: Path, folder: Path) -> None:
    """Refuse a folder in which nothing is left to do, or in which something else was begun."""
    if is_done(folder):
        raise FileError(f"{folder}: this run is done; dmcp report {folder} shows it.")
    if (folder / SETTINGS).is_file() and plan_from_json(read_json(folder / SETTINGS), folder / SETTINGS) != wanted:
        raise FileError(f"{folder} was begun with another plan than {plan}: go on with that one, or remove the folder.")


def _names(methods: str) -> list[str]:
    names = [word.strip() for word in methods.split(",") if word.strip()]
    found = [*METHODS] if names == ["all"] else names
    for name in found:
        check_method(name)
    return found


def _peers(names: Sequence[str]) -> Sequence[str]:
    """Packages of other people, if they are here."""
    for name in names:
        if name not in PEERS:
            near = difflib.get_close_matches(name, PEERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PEERS)}."
            raise DmcpError(f"--peer: there is no peer {name!r}: {hint}")
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            raise DmcpError(f"--peer: {name} is not installed: pip install {name}, or leave this peer out.")
    return names


def _settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """amc.episodes=100 as a mapping of mappings."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, equals, _ = text.partition("=")
        method, dot, name = place.partition(".")
        if not equals or not dot or not name.isidentifier():
            raise DmcpError(f"--set: {text!r} is not of the form METHOD.NAME=VALUE, like amc.episodes=100.")
        check_method(method)
        if method == "dmcp-direct":
            raise DmcpError(f"--set: dmcp-direct draws from the search of dmcp: set dmcp.{name}.")
        _, value = argument(text.removeprefix(f"{method}."))
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
        raise DmcpError(f"--set: {method}.{name} cannot be {value!r}.")


def _check_settings(it: Comparison) -> None:
    """Refuse settings that would change nothing."""
    used = {*it.methods} | ({"dmcp"} if "dmcp-direct" in it.methods else set())
    for name in it.settings:
        if name not in used:
            raise DmcpError(f"--set: {name} is not among the methods that are compared: add it, or leave this out.")


def _check_trained(it: Comparison) -> None:
    """Refuse methods whose networks nobody would train."""
    ways = [Own.AS_IT_IS, Own.SLIMMABLE] + ([Own.FINE_TUNED] if it.fine_tune_epochs else [])
    left = [name for name in it.methods if find_method(name).own not in ways]
    if left and not it.scratch:
        raise DmcpError(f"--no-scratch: {', '.join(left)} would not be trained at all: leave out one or the other.")


def recipe(epochs: int, lr: float, weight_decay: float) -> TrainConfig:
    """The final training: the paper's, as long and as fast as is said."""
    return TrainConfig(
        epochs=epochs, lr=lr, warmup_lr=lr / 4, warmup_epochs=min(1, epochs / 2), weight_decay=weight_decay
    )


def check_job(it: Comparison, opened: Opened) -> None:
    """One sentence now, not one of each cell."""
    _ = it.job.place  # whether there is such a device
    rest, _ = split(opened.data.train, it.holdout)
    make_loader(rest, it.job.batch, train=True)  # refuses a batch that is larger
    floor = Supernet(opened.model, opened.graph, it.groups, it.align).floor
    known: list[Budget] = []
    for text in it.budgets:
        budget = parse(text, opened.graph)
        check_reachable(budget, opened.graph, floor)
        if same := [other.text for other in known if {*other.limits} == {*budget.limits}]:
            raise DmcpError(f"--budget: {text} is the same as {same[0]}: leave one of them out.")
        known.append(budget)


def _write(it: Comparison, lines: list[Line], folder: Path) -> list[Line]:
    """Table and figure into the folder."""
    opened = open_job(it.job)
    lines = timed(lines, it, folder, opened)
    batch = len(next(iter(opened.loaders.test))[1])
    run = Run(folder)
    run.write(TABLE, {"model": it.job.model, "data": it.job.data, "batch": batch, "lines": to_json(lines)})
    run.write(PAGE, markdown(lines, batch))
    panels: dict[str, dict[str, tuple[figures.Spread, figures.Spread]]] = {}
    for line in lines:
        if line.budget:  # the unpruned network would make all others look alike
            rows = panels.setdefault(line.budget, {})
            same, own = rows.get(line.method, (None, None))
            rows[line.method] = (same, line.accuracies) if line.own else (line.accuracies, own)
    if panels:
        title = f"{it.job.model}, {Path(it.job.data).name}, {it.train.epochs} epochs, {len(it.seeds)} seeds"
        figures.save(figures.accuracy_by_method(panels, title), folder / "compare.svg")
    return lines


def _print(lines: Sequence[Line], folder: Path, as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(folder), "lines": to_json(lines)})
    else:
        print(f"{(folder / PAGE).read_text()}\n{folder}")
