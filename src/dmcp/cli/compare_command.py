"""The command compare, and the hidden one that does a single run of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmcp.cli.config import Request, RunConfig, argument, read_bound
from dmcp.errors import DmcpError, FileError, StoppedError
from dmcp.settings import Engine, Precision, SearchConfig, TrainConfig

if TYPE_CHECKING:
    import torch

    from dmcp.cli.job import Job
    from dmcp.compare.runner import Inputs, PlannedRun, Protocol


def _help(name: str) -> str:
    """The help of a setting."""
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
    finetune_epochs: Annotated[
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
    if gather and (model or data or dry_run or measure):
        raise DmcpError("--gather makes the table of a folder and nothing else: leave the other options out.")
    for name, word in (("model", model), ("data", data)):
        if not word and not gather:
            raise DmcpError(f"--{name} is missing: dmcp compare --help says what it can be.")
    from dmcp.cli.job import open_job, place_of
    from dmcp.cli.session import check_job, log_notes
    from dmcp.compare import runner
    from dmcp.compare.table import write_table
    from dmcp.runs import slug

    if gather:
        _print(write_table(Path(gather)), Path(gather), as_json)
        return
    choices = {"precision": precision, "compile": compile, "graphs": graphs, "kernels": kernels, "pad": pad}
    comparison = runner.Comparison(
        protocol=runner.Protocol(
            model=model,
            model_args=tuple(model_args or ()),
            data=data,
            input=input,
            ignore=tuple(ignore or ()),
            batch=batch,
            device=device,
            engine=Engine(**choices, deterministic=deterministic),  # type: ignore[arg-type]
            train=TrainConfig(
                epochs=epochs,
                lr=lr,
                warmup_lr=lr / 4,
                warmup_epochs=min(1, epochs / 2),
                weight_decay=weight_decay,
                label_smoothing=label_smoothing,
            ),
            groups=groups,
            align=align,
            min_channels=read_bound("min_channels", min_channels or ()),
            max_channels=read_bound("max_channels", max_channels or ()),
            holdout=holdout,
            finetune_epochs=max(1, 2 * epochs // 3) if finetune_epochs is None else finetune_epochs,
        ),
        budgets=tuple(budget or ["50%"]),
        methods=(*_read_methods(methods), *map(runner.check_peer, peer or ())),
        seeds=tuple(range(seed, seed + seeds)),
        settings=_read_settings(setting or ()),
        widths=_read_widths(widths or ()),
        scratch=scratch,
        unpruned=unpruned,
    )
    config = config_of(comparison.protocol, seed)
    job, place = open_job(replace(config, device="cpu")), place_of(config)
    check_job(job, config, skips=False)
    inputs = inputs_of(job, place)
    runs = runner.plan(comparison, inputs)
    folder = Path(out or f"runs/{slug(f'compare {model} {Path(data).name}')}")  # the same one each time
    log_notes(job, config)
    if dry_run:
        _list_planned(runs, folder, as_json)
        return
    failed = runner.run(runs, folder, lambda left: _launch(left, folder, place, at_once, quiet, len(runs)))
    if table := write_table(folder, runs, inputs, measure):
        _print(table, folder, as_json)
    if failed:
        listed = "; ".join([*failed.values()][:3]) + ("; ..." if len(failed) > 3 else "")
        raise DmcpError(f"{len(failed)} runs failed, the same command starts only them again: {listed}")


def compare_run(
    plan: Annotated[Path, typer.Argument(help="What the run is to do.")],
    folder: Annotated[Path, typer.Argument(help="Its run folder.")],
    debug: Annotated[bool, typer.Option("--debug")] = False,
) -> None:
    """Do one run of a comparison; dmcp compare starts these."""
    from dmcp.cli.job import place_of
    from dmcp.cli.session import session
    from dmcp.compare.runner import check_one, is_begun, read_plan, run_one

    it = read_plan(plan)
    check_one(it, folder)
    protocol = it.protocol
    search = SearchConfig(
        budget=it.budget or "100%",
        groups=protocol.groups,
        align=protocol.align,
        min_channels=protocol.min_channels,
        max_channels=protocol.max_channels,
        seed=it.seed,
    )
    train = replace(protocol.train, seed=it.seed)
    config = replace(config_of(protocol, it.seed), search=search, train=train, comparison=asdict(it))
    place = {"resume": str(folder)} if is_begun(folder) else {"out": str(folder)}
    request = Request(command="compare", typed={}, quiet=True, **place)  # type: ignore[arg-type]
    try:
        with session(config, request, whole=False) as here:
            run_one(it, inputs_of(here.job, place_of(config)), folder, here.runtime)
    except StoppedError:
        raise StoppedError("Stopped; everything up to here is saved. dmcp compare goes on with it.") from None


def config_of(protocol: Protocol, seed: int) -> RunConfig:
    """What is opened for a comparison."""
    names = ("model", "model_args", "data", "input", "ignore", "batch", "device", "engine")
    return RunConfig(command="compare", seed=seed, **{name: getattr(protocol, name) for name in names})


def inputs_of(job: Job, place: torch.device) -> Inputs:
    """What the runs of a comparison work with."""
    from dmcp.compare.runner import Inputs

    return Inputs(
        model=job.model,
        graph=job.graph,
        images=job.data.train,
        train=job.loaders.train,
        test=job.loaders.test,
        device=place,
        facts=job.identity,
    )


def _read_methods(text: str) -> list[str]:
    from dmcp.compare.methods import METHODS

    names = [word.strip() for word in text.split(",") if word.strip()]
    return [*METHODS] if names == ["all"] else names


def _read_settings(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """amc.episodes=100 as a mapping of mappings."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, equals, _ = text.partition("=")
        method, dot, name = place.rpartition(".")
        if not equals or not dot or not name.isidentifier():
            raise DmcpError(f"--set: {text!r} is not of the form METHOD.NAME=VALUE, like amc.episodes=100.")
        if name in found.setdefault(method, {}):
            raise DmcpError(f"--set: {place} is given twice: give it once.")
        found[method][name] = argument(text.removeprefix(f"{method}."))[1]
    return found


def _read_widths(texts: Iterable[str]) -> dict[str, dict[str, int]]:
    """NAME=FILE as a name and its widths."""
    from dmcp.runtime.io import MOST_JSON, parse_json, read_bytes
    from dmcp.widths import Widths

    found: dict[str, dict[str, int]] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or not file or not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
            raise DmcpError(f"--widths: {text!r} is not of the form NAME=FILE, like hand=widths.json.")
        if name in found:
            raise DmcpError(f"--widths: {name} is given twice: give each a name of its own.")
        stored: Any = parse_json(read_bytes(Path(file), MOST_JSON), file)
        ours = isinstance(stored, dict) and {"widths", "fingerprint"} <= stored.keys()
        if not isinstance(stored, dict) or not (ours or all(type(kept) is int for kept in stored.values())):
            raise FileError(f'{file}: not a file of widths: give a widths.json, or {{"space": width, ...}}.')
        found[name] = dict(Widths.from_json(stored)) if ours else stored
    return found


def _launch(
    runs: Sequence[PlannedRun], folder: Path, device: torch.device, at_once: int | None, quiet: bool, total: int
) -> dict[str, str]:
    """Each run as a process of its own; how those ended that failed."""
    from dmcp.cli.launch import COMMAND, Command, kept_signals, run_side_by_side
    from dmcp.compare.runner import OUTPUT, PLANS

    names = {it.name for it in runs}
    commands = [
        Command(
            it.name,
            (*COMMAND, "compare-run", str(folder / PLANS / f"{it.name}.json"), str(folder / it.name)),
            (it.uses,) if it.uses in names else (),
        )
        for it in runs
    ]
    with kept_signals() as signals:
        ended = run_side_by_side(
            commands, folder / OUTPUT, device, signals, at_once=at_once, quiet=quiet, noun="runs", total=total
        )
    return {end.command.name: end.describe() for end in ended if end.code != 0}


def _list_planned(runs: Sequence[PlannedRun], folder: Path, as_json: bool) -> None:
    """The runs, how far they are, and how long each trains; what would be refused is refused."""
    from dmcp.cli.session import print_json
    from dmcp.compare.runner import check_begun, epochs_of, state_of
    from dmcp.units import table

    rows = [{"run": it.name, "state": state_of(it, folder), "epochs": epochs_of(it)} for it in runs]
    if as_json:
        print_json({"folder": str(folder), "runs": rows})
    else:
        epochs = [", ".join(f"{number} {kind}" for kind, number in epochs_of(it).items()) for it in runs]
        cells = [[it.name, state_of(it, folder), words] for it, words in zip(runs, epochs, strict=True)]
        print(table([["run", "state", "epochs"], *cells]))
        print(f"{sum(row['state'] == 'done' for row in rows)} of {len(rows)} runs are done in {folder}.")
    check_begun(runs, folder)


def _print(data: Mapping[str, Any] | None, folder: Path, as_json: bool) -> None:
    from dmcp.cli.session import print_json
    from dmcp.compare.table import PAGE

    if data is None:
        raise FileError(f"{folder}: no runs of a comparison are done here: give the folder that dmcp compare filled.")
    if as_json:
        print_json({"folder": str(folder), **data})
    else:
        print(f"{(folder / PAGE).read_text()}\n{folder}")
