"""The command compare, and the hidden one that does a single run of it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmcp.cli import prune, session
from dmcp.cli.config import Request, needs_typing
from dmcp.cli.session import Job, place_of
from dmcp.compare import runner
from dmcp.compare.methods import METHODS, title
from dmcp.compare.table import COMMANDS, PAGE, write_table
from dmcp.errors import DmcpError, FileError, StoppedError
from dmcp.exporting.export import blaming
from dmcp.models import argument
from dmcp.runs.config import RunConfig
from dmcp.runs.writing import Run, slug
from dmcp.runtime.io import Lock, is_locked
from dmcp.settings import Retrain
from dmcp.units import table

_OUTPUT = "output"  # folder of what runs print


def gather(folder: Path, as_json: bool) -> None:
    """dmcp compare --gather."""
    data = write_table(folder)
    if as_json:
        session.print_json({"folder": str(folder), **data})
    else:
        print(f"{(folder / PAGE).read_text()}\n{folder}")


def compare(config: RunConfig, request: Request) -> None:
    """dmcp compare."""
    place, typed = place_of(config), {**request.typed, "epochs": request.more["epochs"]}
    start = replace(config, device="cpu", holdout=request.more["holdout"], method="", retrain=Retrain.SCRATCH)
    job = session.open_checked(start, typed)
    runs = runner.plan(_comparison(replace(job.config, device=config.device), request, job), job)
    usual = f"runs/{slug(f'compare {config.model} {Path(config.data).name}')}"  # the same each time
    folder = Path(request.out or usual)
    if request.dry_run:
        _list_planned(runs, folder, job, request.as_json)
        return
    with blaming(f"{folder}: no runs can be kept here"):
        (folder / _OUTPUT).mkdir(parents=True, exist_ok=True)
    with Lock(folder):
        left = runner.begin(runs, folder)
        Run(folder).add(COMMANDS, {"command": shlex.join(["dmcp", *sys.argv[1:]]), "time": time.strftime("%F %T")})
        names, debug = {it.name for it in left}, ("--debug",) if "--debug" in sys.argv else ()
        commands = []
        for it in left:
            words = ("compare-run", str(folder / runner.PLANS / f"{it.name}.json"), str(folder / it.name), *debug)
            needs = (it.uses,) if it.uses in names else ()
            commands.append(prune.Command(it.name, words, needs))
        how: dict[str, Any] = {"at_once": request.more["at_once"], "quiet": request.quiet, "total": len(runs)}
        ended = prune.run_side_by_side(commands, folder / _OUTPUT, place, **how)
    if any(runner.is_done(folder / it.name) for it in runs):
        gather(folder, request.as_json)
    if ended:
        failed = {reason: [name for name in ended if ended[name] == reason] for reason in ended.values()}
        listed = "; ".join(f"{', '.join(some)}: {reason}" for reason, some in failed.items())
        raise DmcpError(f"{len(ended)} runs failed, the same command starts only them again: {listed}")


def compare_run(settings: Path, folder: Path) -> None:
    """dmcp compare-run: one run of a comparison."""
    it = runner.read_plan(settings)
    planned = replace(it.protocol.config, method=it.method)
    if session.CHILD not in os.environ and needs_typing(planned):
        raise FileError(f"{settings}: this run needs code that is not a library's: start it with dmcp compare.")
    if is_locked(folder):
        session.log("a process whose dmcp compare was killed still does this run: waiting for it")
    while is_locked(folder):
        time.sleep(1)
    if runner.is_done(folder):
        return
    config = replace(it.config, holdout=0.0)  # the final training sees all images
    place = {"resume": str(folder)} if runner.is_begun(folder) else {"out": str(folder)}
    request = Request(command="compare", typed={}, quiet=True, **place)  # type: ignore[arg-type]
    try:
        with session.session(config, request, lambda job: replace(job, config=it.with_search(job))) as here:
            runner.OneRun(it, here.job, Run(folder), here.runtime).do()
    except StoppedError:
        raise StoppedError("Stopped; everything up to here is saved. dmcp compare goes on with it.") from None


def _comparison(config: RunConfig, request: Request, job: Job) -> runner.Comparison:
    more, settings = request.more, _read_settings(request.more["set"] or ())
    epochs, tuned = config.train.epochs, more["finetune_epochs"]
    train = replace(config.train, warmup_epochs=min(1, epochs / 2), seed=0)
    names = [word.strip() for word in more["methods"].split(",") if word.strip()]
    methods = [name for word in names for name in (METHODS if word == "all" else [word])]
    return runner.Comparison(
        protocol=runner.Protocol(
            config=replace(config, seed=0, search=None, train=train),
            facts=job.identity,
            bounds={name: getattr(config.search, name) for name in runner.BOUNDS},
            finetune_epochs=max(1, 2 * epochs // 3) if tuned is None else tuned,
            scratch=more["scratch"] is not False,
        ),
        budgets=tuple(more["budget"] or ["50%"]),
        methods=tuple(methods),
        seeds=tuple(range(config.seed, config.seed + request.seeds)),
        settings=settings,
        unpruned=more["unpruned"] is not False,
    )


def _read_settings(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """l1.power=2 as a mapping of mappings."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        method, _, _ = text.partition("=")[0].rpartition(".")
        name, value = argument(text.removeprefix(f"{method}."))
        found.setdefault(title(method), {})[name] = value
    return found


def _list_planned(runs: Sequence[runner.PlannedRun], folder: Path, job: Job, as_json: bool) -> None:
    """The runs, and how far they are, and the chosen settings; what would be refused is refused."""
    done, begun = ({it.name for it in runs if is_so(folder / it.name)} for is_so in (runner.is_done, runner.is_begun))
    states = ["done" if it.name in done else "begun" if it.name in begun else "missing" for it in runs]
    rows = [{"run": it.name, "state": state, "uses": it.uses} for it, state in zip(runs, states, strict=True)]
    if as_json:
        session.print_json({"folder": str(folder), "chosen": job.reasons, "runs": rows})
    else:
        print(table([["run", "state", "starts from"], *([*row.values()] for row in rows)]))
        print(f"{len(done)} of {len(rows)} runs are done in {folder}.")
        prune.print_chosen(job)
    runner.check_begun(runs, folder)
