"""The commands that compare methods: compare fills a table, cell by cell; cell fills one of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dmcp.budget import Budget, check_reachable, parse
from dmcp.commands import options as o
from dmcp.commands.printing import print_json
from dmcp.comparison.asked_methods import fitting_budgets, read_given, read_names, read_peers, read_settings
from dmcp.comparison.cell_files import is_done
from dmcp.comparison.cell_runs import check_begun, check_facts, check_failed, run_comparison, state_of
from dmcp.comparison.cells import run_cell
from dmcp.comparison.comparing import Comparison, epochs_of, tasks
from dmcp.comparison.stored_cells import stored
from dmcp.comparison.table_files import PAGE, write_table
from dmcp.data import make_loader, split
from dmcp.engine import Engine
from dmcp.errors import DmcpError, FileError, StoppedError
from dmcp.methods import METHODS, Own, find_method
from dmcp.methods.problem import ends_of
from dmcp.reports.listing import is_run
from dmcp.running.children import following_parent
from dmcp.running.jobs import Job, Opened, open_job
from dmcp.running.plans import Plan, plan_from_json
from dmcp.running.sessions import check_given, check_test_files, session, tell_ignored, tell_notices
from dmcp.runs import SETTINGS, read_json, slug
from dmcp.searching.bounds import BOUNDS
from dmcp.tables import table
from dmcp.training import TrainConfig

Budgets = Annotated[list[str] | None, typer.Option("--budget", help="50%, 211M, params:2M; repeatable. Default: 50%.")]
Methods = Annotated[str, typer.Option(help=f"all, or some of {', '.join(METHODS)}, package.module:NAME, with commas.")]
Given = Annotated[list[str] | None, typer.Option("--widths", help="A row of given widths, NAME=FILE; repeatable.")]
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
Gather = Annotated[str, typer.Option(metavar="FOLDER", help="Run nothing: make the table of this folder again.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Run nothing: list the cells, their state and their epochs.")]
Measure = Annotated[bool, typer.Option("--measure", help="Measure all speeds again, not those of new cells only.")]


def compare(
    model: o.Model = "",
    data: o.Data = "",
    budget: Budgets = None,
    methods: Methods = "all",
    peer: Peers = None,
    widths: Given = None,
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
    label_smoothing: o.LabelSmoothing = 0.1,
    holdout: Held = 0.1,
    groups: o.Groups = 10,
    align: o.Align = 1,
    smallest: o.Smallest = None,
    largest: o.Largest = None,
    model_args: o.ModelArgs = None,
    frozen: o.Frozen = None,
    input: o.Input = "",
    out: o.Out = "",
    gather: Gather = "",
    dry_run: DryRun = False,
    measure: Measure = False,
    at_once: AtOnce = None,
    device: o.Device = "",
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    kernels: o.Kernels = None,
    pad: o.Pad = None,
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
      dmcp compare --model digits:resnet --data digits --methods uniform,mymodule:mine --widths hand=widths.json
      dmcp compare --gather runs/table
    """
    if not o.is_first():
        return
    if gather:
        if model or data or dry_run or measure:
            raise DmcpError("--gather makes the table of a folder and nothing else: leave the other options out.")
        _gather(Path(gather), as_json)
        return
    for name, word in (("model", model), ("data", data)):
        if not word:
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
    names, given = (*read_names(methods), *read_peers(peer or ())), read_given(widths or ())
    it = Comparison(
        job=job,
        engine=Engine(
            precision=precision, compile=compile, graphs=graphs, kernels=kernels, pad=pad, deterministic=deterministic
        ),
        train=recipe(epochs, lr, weight_decay, label_smoothing),
        budgets=tuple(budget or ["50%"]),
        methods=(*names, *given),
        seeds=tuple(range(seed, seed + seeds)),
        settings=read_settings(setting or (), names) | {name: {"widths": dict(kept)} for name, kept in given.items()},
        groups=groups,
        align=align,
        smallest=o.read_bound("smallest", smallest or ()),
        largest=o.read_bound("largest", largest or ()),
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
    it = replace(it, only=fitting_budgets(it, given, opened))
    check_facts(it.job, folder, opened)
    tell_notices(opened)
    if dry_run:
        _list(it, folder, as_json)
        return
    tell_ignored(it.engine, job.place)
    failed = run_comparison(it, folder, at_once, quiet)
    if found := stored(folder, it):
        _print(write_table(found, folder, opened, measure), folder, as_json)
    check_failed(failed)


def _gather(folder: Path, as_json: bool) -> None:
    """The table alone, of what is there."""
    found = stored(folder)
    if found is None:
        raise FileError(f"{folder}: no cells of a comparison are done here: give the folder that dmcp compare filled.")
    _print(write_table(found, folder), folder, as_json)


def _list(it: Comparison, folder: Path, as_json: bool) -> None:
    """The cells, how far they are, and how long each trains; what would be refused is refused."""
    wanted, rows = tasks(it), list[dict[str, str]]()
    for task in wanted:
        search, training = epochs_of(task.plan)
        rows.append({"cell": task.name, "state": state_of(task, folder), "search": search, "training": training})
    if as_json:
        print_json({"folder": str(folder), "cells": rows})
    else:
        print(table([("cell", "state", "search epochs", "training epochs"), *(tuple(row.values()) for row in rows)]))
        print(f"{sum(row['state'] == 'done' for row in rows)} of {len(rows)} cells are done in {folder}.")
    check_begun(wanted, folder)


def cell(
    plan: Annotated[Path, typer.Argument(help="What the cell is to do.")],
    folder: Annotated[Path, typer.Argument(help="Its run folder.")],
    debug: o.Debug = False,
) -> None:
    """Fill one cell of a table; dmcp compare starts these."""
    wanted = plan_from_json(read_json(plan), plan)
    _check_begun(wanted, plan, folder)
    try:
        with following_parent(), session(wanted, folder, is_run(folder), quiet=True, told=True) as here:
            run_cell(here)
    except StoppedError as error:
        reason = str(error).partition(" Go on with: ")[0]  # which names a command that people do not type
        raise StoppedError(f"{reason} The command that started it goes on with it.") from None


def _check_begun(wanted: Plan, plan: Path, folder: Path) -> None:
    """Refuse a folder in which nothing is left to do, or in which something else was begun."""
    if is_done(folder):
        raise FileError(f"{folder}: this run is done; dmcp report {shlex.quote(str(folder))} shows it.")
    if (folder / SETTINGS).is_file() and plan_from_json(read_json(folder / SETTINGS), folder / SETTINGS) != wanted:
        raise FileError(f"{folder} was begun with another plan than {plan}: go on with that one, or remove the folder.")


def _check_settings(it: Comparison) -> None:
    """Refuse settings that would change nothing."""
    used = {*it.methods} | ({"dmcp"} if "dmcp-direct" in it.methods else set())
    for name in it.settings:
        if name not in used:
            raise DmcpError(f"--set: {name} is not among the methods that are compared: add it, or leave this out.")
    for name in BOUNDS:  # of two for one method one would be ignored
        if getattr(it, name) and name in it.settings.get("dmcp", {}).get("more", {}):
            raise DmcpError(f"--{name} is for all methods: leave {name!r} out of --set dmcp.more.")


def _check_trained(it: Comparison) -> None:
    """Refuse methods whose networks nobody would train."""
    ways = [Own.AS_IT_IS, Own.SLIMMABLE] + ([Own.FINE_TUNED] if it.fine_tune_epochs else [])
    left = [name for name in it.methods if find_method(name).own not in ways]
    if left and not it.scratch:
        raise DmcpError(f"--no-scratch: {', '.join(left)} would not be trained at all: leave out one or the other.")


def recipe(epochs: int, lr: float, weight_decay: float, label_smoothing: float) -> TrainConfig:
    """The final training: the paper's, as long and as fast as is said."""
    return TrainConfig(
        epochs=epochs,
        lr=lr,
        warmup_lr=lr / 4,
        warmup_epochs=min(1, epochs / 2),
        weight_decay=weight_decay,
        label_smoothing=label_smoothing,
    )


def check_job(it: Comparison, opened: Opened) -> None:
    """One sentence now, not one of each cell."""
    _ = it.job.place  # whether there is such a device
    check_given(opened)
    check_test_files(opened, it.job, skips=False)
    rest, _ = split(opened.data.train, it.holdout)
    make_loader(rest, it.job.batch, train=True)  # refuses a batch that is larger
    ends = ends_of(opened.model, opened.graph, it.groups, it.align, it.smallest, it.largest)
    known: list[Budget] = []
    for text in it.budgets:
        budget = parse(text, opened.graph)
        check_reachable(budget, opened.graph, *ends)
        if same := [other.text for other in known if {*other.limits} == {*budget.limits}]:
            raise DmcpError(f"--budget: {text} is the same as {same[0]}: leave one of them out.")
        known.append(budget)


def _print(data: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(folder), **data})
    else:
        print(f"{(folder / PAGE).read_text()}\n{folder}")
