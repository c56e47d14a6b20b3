"""The command compare, and the hidden command that does one of its runs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmcp.cli.config import Request, needs_typing
from dmcp.cli.forecast import print_chosen
from dmcp.cli.job import CHILD, Job, choose_device, open_checked
from dmcp.cli.output import log, print_json
from dmcp.cli.processes import Command, run_side_by_side
from dmcp.cli.session import session
from dmcp.compare import protocol
from dmcp.compare.methods import METHODS, title
from dmcp.compare.protocol import BOUNDS, PLANS, Comparison, PlannedRun, Protocol, Subject
from dmcp.compare.runner import OneRun
from dmcp.compare.table import PAGE, write_table
from dmcp.defaults import resolve_training
from dmcp.errors import DmcpError, FileError, StoppedError
from dmcp.exporting.export import blaming
from dmcp.models import argument
from dmcp.runs.config import RunConfig
from dmcp.runs.files import COMMANDS
from dmcp.runs.writing import Run, slug
from dmcp.runtime.io import Lock, is_locked
from dmcp.settings import Retrain
from dmcp.units import table

_OUTPUT = "output"  # folder of what runs print


def gather(folder: Path, as_json: bool) -> None:
    """dmcp compare --gather."""
    data = write_table(folder)
    if as_json:
        print_json({"folder": str(folder), **data})
    else:
        print(f"{(folder / PAGE).read_text()}\n{folder}")


def compare(config: RunConfig, request: Request) -> None:
    """dmcp compare."""
    device = choose_device(config)

    # Network and data are opened on the CPU: only the processes of the runs use the device.
    opened = replace(
        config,
        device="cpu",
        holdout=request.more["holdout"],
        method="",
        retrain=Retrain.SCRATCH,
        train=replace(config.train, epochs=request.more["epochs"]),
    )
    job = open_checked(opened, request.typed)
    comparison = _read_comparison(replace(job.config, device=config.device), request, job)
    runs = protocol.plan(comparison, subject_of(job))

    default = f"runs/{slug(f'compare {config.model} {Path(config.data).name}')}"  # the same each time
    folder = Path(request.out or default)
    if request.dry_run:
        _list_planned(runs, folder, job, request.as_json)
        return

    with blaming(f"{folder}: no runs can be kept here"):
        (folder / _OUTPUT).mkdir(parents=True, exist_ok=True)
    with Lock(folder):
        left = protocol.begin(runs, folder)
        Run(folder).add(COMMANDS, {"command": shlex.join(["dmcp", *sys.argv[1:]]), "time": time.strftime("%F %T")})
        failures = run_side_by_side(
            _commands(left, folder),
            folder / _OUTPUT,
            device,
            at_once=request.more["at_once"],
            quiet=request.quiet,
            total=len(runs),
        )
    if any(protocol.is_done(folder / run.name) for run in runs):
        gather(folder, request.as_json)
    if failures:
        raise DmcpError(
            f"{len(failures)} runs failed; repeat the command to start only these again: {_listed(failures)}"
        )


def _commands(runs: Sequence[PlannedRun], folder: Path) -> list[Command]:
    """The command of each run, which waits for the run whose network it starts from, unless that is done already."""
    names = {run.name for run in runs}
    debug: tuple[str, ...] = ()
    if "--debug" in sys.argv:
        debug = ("--debug",)
    commands = []
    for run in runs:
        words = ("compare-run", str(folder / PLANS / f"{run.name}.json"), str(folder / run.name), *debug)
        after: tuple[str, ...] = ()
        if run.uses in names:
            after = (run.uses,)
        commands.append(Command(run.name, words, after))
    return commands


def _listed(failures: dict[str, str]) -> str:
    """The names of the runs that failed, by how they failed."""
    names: dict[str, list[str]] = {}
    for name, reason in failures.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(failed)}: {reason}" for reason, failed in names.items())


def compare_run(path: Path, folder: Path) -> None:
    """dmcp compare-run: one run of a comparison, by its plan."""
    planned = protocol.read_plan(path)
    if CHILD not in os.environ and needs_typing(replace(planned.protocol.config, method=planned.method)):
        raise FileError(f"{path}: this run needs your own code: start it with dmcp compare.")

    # When dmcp compare is killed, its processes may live on.
    if is_locked(folder):
        log("Another process, whose dmcp compare was killed, is doing this run. Waiting for it.")
    while is_locked(folder):
        time.sleep(1)
    if protocol.is_done(folder):
        return

    config = replace(planned.config, holdout=0.0)  # the final training sees all images
    if protocol.is_begun(folder):
        request = Request(command="compare", typed={}, quiet=True, resume=str(folder))
    else:
        request = Request(command="compare", typed={}, quiet=True, out=str(folder))

    def complete(job: Job) -> Job:
        return replace(job, config=planned.config_with_search(subject_of(job)))

    try:
        with session(config, request, complete) as begun:
            OneRun(planned, subject_of(begun.job), Run(folder), begun.runtime).do()
    except StoppedError:
        raise StoppedError("Stopped; everything up to here is saved. Repeat the command to continue.") from None


def subject_of(job: Job) -> Subject:
    """The network and data of a job, as all runs of a comparison share them."""
    return Subject(model=job.model, graph=job.graph, images=job.data.train, loader=job.loaders.search, test=job.test)


# from options to the comparison


def _read_comparison(config: RunConfig, request: Request, job: Job) -> Comparison:
    """What the options ask for."""
    options = request.more
    train = resolve_training(config.train)
    epochs = train.epochs
    train = replace(train, warmup_epochs=min(1, epochs / 2), seed=0)
    finetune_epochs = options["finetune_epochs"]
    if finetune_epochs is None:
        finetune_epochs = max(1, 2 * epochs // 3)

    methods: list[str] = []
    for word in options["methods"].split(","):
        name = word.strip()
        if name == "all":
            methods += METHODS
        elif name:
            methods.append(name)

    return Comparison(
        protocol=Protocol(
            config=replace(config, seed=0, search=None, train=train),
            facts=job.identity,
            bounds={name: getattr(config.search, name) for name in BOUNDS},
            finetune_epochs=finetune_epochs,
            scratch=options["scratch"] is not False,
        ),
        budgets=tuple(options["budget"] or ["50%"]),
        methods=tuple(methods),
        seeds=tuple(range(config.seed, config.seed + request.seeds)),
        settings=_read_settings(options["set"] or ()),
        unpruned=options["unpruned"] is not False,
    )


def _read_settings(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read settings of methods: l1.power=2 is {"l1": {"power": 2}}."""
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        method, _, _ = text.partition("=")[0].rpartition(".")
        name, value = argument(text.removeprefix(f"{method}."))
        settings.setdefault(title(method), {})[name] = value
    return settings


# --dry-run


def _list_planned(runs: Sequence[PlannedRun], folder: Path, job: Job, as_json: bool) -> None:
    """Print the runs and how far they are, and the chosen settings; refuse what a real start would refuse."""
    states = [_state(folder / run.name) for run in runs]
    rows = [{"run": run.name, "state": state, "uses": run.uses} for run, state in zip(runs, states, strict=True)]
    if as_json:
        print_json({"folder": str(folder), "chosen": job.reasons, "runs": rows})
    else:
        print(table([["run", "state", "starts from"], *([*row.values()] for row in rows)]))
        print(f"{states.count('done')} of {len(rows)} runs are done in {folder}.")
        print_chosen(job)
    protocol.check_begun(runs, folder)


def _state(folder: Path) -> str:
    """How far a run is: done, begun or missing."""
    if protocol.is_done(folder):
        return "done"
    if protocol.is_begun(folder):
        return "begun"
    return "missing"
