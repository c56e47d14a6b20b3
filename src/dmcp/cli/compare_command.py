"""The command compare, and the hidden one that does a single run of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmcp.cli.config import RunConfig, read_bound, read_config_file
from dmcp.errors import DmcpError, FileError, StoppedError
from dmcp.settings import Engine, Precision, TrainConfig

if TYPE_CHECKING:
    from dmcp.cli.job import Job
    from dmcp.compare.runner import Comparison


def _help(name: str) -> str:
    """The help of a setting."""
    from dmcp.settings import SearchConfig

    kinds: tuple[Any, ...] = (RunConfig, TrainConfig, SearchConfig, Engine)
    found = next(kind.__dataclass_fields__[name] for kind in kinds if name in kind.__dataclass_fields__)
    return str(found.metadata["help"])


def compare(
    model: Annotated[str, typer.Option(help=_help("model"))] = "",
    data: Annotated[str, typer.Option(help=_help("data"))] = "",
    budget: Annotated[list[str] | None, typer.Option(help="50%, 211M, params:2M; repeatable. Default: 50%.")] = None,
    methods: Annotated[str, typer.Option(help="all, or names of methods, package.module:NAME, with commas.")] = "all",
    peer: Annotated[list[str] | None, typer.Option(help="Another package, if installed: torch-pruning.")] = None,
    widths: Annotated[list[str] | None, typer.Option(help="A row of given widths, NAME=FILE; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of everything, from --seed on.")] = 3,
    seed: Annotated[int, typer.Option(help=_help("seed"))] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data in the final training.")] = 60,
    fine_tune_epochs: Annotated[
        int | None, typer.Option(min=0, help="Epochs of fine-tuning; default: two thirds of --epochs.")
    ] = None,
    scratch: Annotated[
        bool, typer.Option(help="Train what each method chose from scratch, by the same recipe.")
    ] = True,
    unpruned: Annotated[bool, typer.Option(help="Also train the unpruned network.")] = True,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of a method, like amc.episodes=100; repeatable.")
    ] = None,
    batch: Annotated[int, typer.Option(help=_help("batch"))] = 128,
    lr: Annotated[float, typer.Option(help="Highest learning rate of the final training at a batch of 2048.")] = 0.8,
    weight_decay: Annotated[float, typer.Option(help=_help("weight_decay"))] = 1e-4,
    label_smoothing: Annotated[float, typer.Option(help=_help("label_smoothing"))] = 0.1,
    holdout: Annotated[float, typer.Option(help="Share of the training images that methods choose by.")] = 0.1,
    groups: Annotated[int, typer.Option(help=_help("groups"))] = 10,
    align: Annotated[int, typer.Option(help=_help("align"))] = 1,
    min_channels: Annotated[list[str] | None, typer.Option(metavar="[NAME=]N", help=_help("min_channels"))] = None,
    max_channels: Annotated[list[str] | None, typer.Option(metavar="[NAME=]N", help=_help("max_channels"))] = None,
    model_args: Annotated[list[str] | None, typer.Option(help=_help("model_args"))] = None,
    ignore: Annotated[list[str] | None, typer.Option(help=_help("ignore"))] = None,
    input: Annotated[str, typer.Option(help=_help("input"))] = "",
    out: Annotated[str, typer.Option(help="Folder of the comparison; default: one in runs/.")] = "",
    gather: Annotated[
        str, typer.Option(metavar="FOLDER", help="Run nothing: make the table of this folder again.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run nothing: list the runs and their state.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure all speeds again, not only new ones.")] = False,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; default: 8 on a GPU, else the cores.")
    ] = None,
    device: Annotated[str, typer.Option(help=_help("device"))] = "",
    precision: Annotated[Precision | None, typer.Option(help=_help("precision"))] = None,
    compile: Annotated[bool | None, typer.Option(help=_help("compile"))] = None,
    graphs: Annotated[bool | None, typer.Option(help=_help("graphs"))] = None,
    kernels: Annotated[bool | None, typer.Option(help=_help("kernels"))] = None,
    pad: Annotated[bool | None, typer.Option(help=_help("pad"))] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help=_help("deterministic"))] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where in the code a mistake was found.")] = False,
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
    from dmcp.cli.main import is_first

    if not is_first():
        return
    if gather:
        if model or data or dry_run or measure:
            raise DmcpError("--gather makes the table of a folder and nothing else: leave the other options out.")
        _gather(Path(gather), as_json)
        return
    for name, word in (("model", model), ("data", data)):
        if not word:
            raise DmcpError(f"--{name} is missing: dmcp compare --help says what it can be.")
    from dmcp.cli.job import open_job
    from dmcp.cli.session import log_notes
    from dmcp.compare import runner
    from dmcp.runs import slug

    config = RunConfig(
        command="cell",
        model=model,
        model_args=tuple(model_args or ()),
        data=data,
        input=input,
        ignore=tuple(ignore or ()),
        batch=batch,
        device=device,
        engine=Engine(
            precision=precision, compile=compile, graphs=graphs, kernels=kernels, pad=pad, deterministic=deterministic
        ),
        train=recipe(epochs, lr, weight_decay, label_smoothing),
    )
    names, given = (*runner.read_names(methods), *runner.read_peers(peer or ())), runner.read_given(widths or ())
    it = runner.Comparison(
        config=config,
        budgets=tuple(budget or ["50%"]),
        methods=(*names, *given),
        seeds=tuple(range(seed, seed + seeds)),
        settings=runner.read_settings(setting or (), names)
        | {name: {"widths": dict(kept)} for name, kept in given.items()},
        groups=groups,
        align=align,
        min_channels=read_bound("min_channels", min_channels or ()),
        max_channels=read_bound("max_channels", max_channels or ()),
        holdout=holdout,
        scratch=scratch,
        fine_tune_epochs=max(1, 2 * epochs // 3) if fine_tune_epochs is None else fine_tune_epochs,
        unpruned=unpruned,
    )
    _check_settings(it)
    _check_trained(it)
    job = open_job(replace(config, device="cpu"))
    check_comparison(it, job)
    folder = Path(out or f"runs/{slug(f'compare {model} {Path(data).name}')}")  # the same one each time
    it = replace(it, only=runner.fitting_budgets(it, given, job))
    runner.check_facts(it.config, folder, job)
    log_notes(job, config)
    if dry_run:
        _list_runs(it, folder, as_json)
        return
    failed = runner.run_comparison(it, folder, at_once, quiet)
    if found := runner.stored(folder, it):
        _print(runner.write_table(found, folder, job, measure), folder, as_json)
    runner.check_failed(failed)


def run_of_comparison(
    settings: Annotated[Path, typer.Argument(help="What the run is to do.")],
    folder: Annotated[Path, typer.Argument(help="Its folder.")],
    debug: Annotated[bool, typer.Option("--debug")] = False,
) -> None:
    """Do one run of a comparison; dmcp compare starts these."""
    from dmcp.cli.launch import following_parent
    from dmcp.cli.session import refuse_done, session
    from dmcp.compare import runner
    from dmcp.report.html import is_run
    from dmcp.runs import SETTINGS, Run

    wanted = read_config_file(settings)
    if runner.is_done(folder):
        raise FileError(f"{folder}: this run is done; dmcp report {shlex.quote(str(folder))} shows it.")
    refuse_done(Run(folder))
    if (folder / SETTINGS).is_file() and read_config_file(folder / SETTINGS) != wanted:
        raise FileError(f"{folder} was begun with other settings than {settings}: go on with those, or remove it.")
    try:
        with following_parent(), session(wanted, folder, resume=is_run(folder), quiet=True, warn=False) as here:
            runner.run_cell(here)
    except StoppedError as error:
        raise StoppedError(f"{str(error).partition(' Go on with: ')[0]} The command that started it goes on.") from None


def _gather(folder: Path, as_json: bool) -> None:
    """The table alone, of what is there."""
    from dmcp.compare import runner

    found = runner.stored(folder)
    if found is None:
        raise FileError(f"{folder}: no runs of a comparison are done here: give the folder that dmcp compare filled.")
    _print(runner.write_table(found, folder), folder, as_json)


def _list_runs(it: Comparison, folder: Path, as_json: bool) -> None:
    """The runs, how far they are, and how long each trains; what would be refused is refused."""
    from dmcp.cli.session import print_json
    from dmcp.compare import runner
    from dmcp.units import table

    wanted, rows = runner.tasks(it), list[dict[str, str]]()
    for task in wanted:
        search, training = runner.epochs_of(task.config)
        state = runner.state_of(task, folder)
        rows.append({"cell": task.name, "state": state, "search": search, "training": training})
    if as_json:
        print_json({"folder": str(folder), "cells": rows})
    else:
        print(table([("run", "state", "search epochs", "training epochs"), *(tuple(row.values()) for row in rows)]))
        print(f"{sum(row['state'] == 'done' for row in rows)} of {len(rows)} runs are done in {folder}.")
    runner.check_begun(wanted, folder)


def _check_settings(it: Comparison) -> None:
    """Refuse settings that would change nothing."""
    used = {*it.methods} | ({"dmcp"} if "dmcp-direct" in it.methods else set())
    for name in it.settings:
        if name not in used:
            raise DmcpError(f"--set: {name} is not among the methods that are compared: add it, or leave this out.")
    for name in ("min_channels", "max_channels"):  # of two for one method one would be ignored
        if getattr(it, name) and name in it.settings.get("dmcp", {}).get("more", {}):
            raise DmcpError(f"--{name.replace('_', '-')} is for all methods: leave it out of --set dmcp.more.")


def _check_trained(it: Comparison) -> None:
    """Refuse methods whose networks nobody would train."""
    from dmcp.compare.methods import Own, find_method

    ways = [Own.AS_IT_IS, Own.SLIMMABLE] + ([Own.FINE_TUNED] if it.fine_tune_epochs else [])
    left = [name for name in it.methods if find_method(name).own not in ways]
    if left and not it.scratch:
        raise DmcpError(f"--no-scratch: {', '.join(left)} would not be trained at all: leave out one or the other.")


def recipe(epochs: int, lr: float, weight_decay: float, label_smoothing: float) -> TrainConfig:
    """The final training: the paper's, with this length and learning rate."""
    return TrainConfig(
        epochs=epochs,
        lr=lr,
        warmup_lr=lr / 4,
        warmup_epochs=min(1, epochs / 2),
        weight_decay=weight_decay,
        label_smoothing=label_smoothing,
    )


def check_comparison(it: Comparison, job: Job) -> None:
    """Refuse now, in one sentence, what each run would refuse."""
    from dmcp.budget import Budget, check_reachable, parse
    from dmcp.cli.job import place_of
    from dmcp.cli.session import check_job
    from dmcp.compare.problem import ends_of
    from dmcp.data.datasets import split
    from dmcp.data.loaders import make_loader

    place_of(it.config)  # whether there is such a device
    check_job(job, it.config, skips=False)
    rest, _ = split(job.data.train, it.holdout)
    make_loader(rest, it.config.batch, train=True)  # refuses a batch that is larger
    ends = ends_of(job.model, job.graph, it.groups, it.align, it.min_channels, it.max_channels)
    known: list[Budget] = []
    for text in it.budgets:
        budget = parse(text, job.graph)
        check_reachable(budget, job.graph, *ends)
        if same := [other.text for other in known if {*other.limits} == {*budget.limits}]:
            raise DmcpError(f"--budget: {text} is the same as {same[0]}: leave one of them out.")
        known.append(budget)


def _print(data: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    from dmcp.cli.session import print_json
    from dmcp.compare.runner import PAGE

    if as_json:
        print_json({"folder": str(folder), **data})
    else:
        print(f"{(folder / PAGE).read_text()}\n{folder}")
