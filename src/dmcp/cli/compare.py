"""The command compare, and the hidden one that does a single run of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dmcp.cli import prune, session
from dmcp.cli.config import Request, RunConfig, argument
from dmcp.cli.session import Job, place_of
from dmcp.compare import runner
from dmcp.compare.methods import METHODS
from dmcp.compare.runner import PAGE, PlannedRun, write_table
from dmcp.errors import DmcpError, FileError, StoppedError
from dmcp.runs import Run, slug
from dmcp.runtime.io import MOST_JSON, parse_json, read_bytes
from dmcp.settings import SearchConfig
from dmcp.units import table
from dmcp.widths import Widths

_SHARED = ("model", "model_args", "data", "input", "ignore", "batch", "device", "engine")  # of config and protocol
_CHAINS = ("groups", "align", "min_channels", "max_channels")  # of search and protocol


def gather(folder: Path, as_json: bool) -> None:
    """dmcp compare --gather."""
    _print(write_table(folder), folder, as_json)


def compare(config: RunConfig, request: Request) -> None:
    """dmcp compare."""
    more, train = request.more, config.train
    epochs, tuned = more["epochs"], more["finetune_epochs"]
    comparison = runner.Comparison(
        protocol=runner.Protocol(
            **{name: getattr(config, name) for name in _SHARED},
            **{name: getattr(config.search, name) for name in _CHAINS},
            train=replace(train, epochs=epochs, warmup_epochs=min(1, epochs / 2), seed=0),
            holdout=more["holdout"],
            finetune_epochs=max(1, 2 * epochs // 3) if tuned is None else tuned,
        ),
        budgets=tuple(more["budget"] or ["50%"]),
        methods=(*_read_methods(more["methods"]), *map(runner.check_peer, more["peer"] or ())),
        seeds=tuple(range(config.seed, config.seed + request.seeds)),
        settings=_read_settings(more["set"] or ()),
        widths=_read_widths(more["widths"] or ()),
        scratch=more["scratch"] is not False,
        unpruned=more["unpruned"] is not False,
    )
    job, place = session.open_checked(replace(config, device="cpu")), place_of(config)
    inputs = _inputs(job, place)
    runs = runner.plan(comparison, inputs)
    folder = Path(
        request.out or f"runs/{slug(f'compare {config.model} {Path(config.data).name}')}"
    )  # the same each time
    if request.dry_run:
        _list_planned(runs, folder, request.as_json)
        return

    def start(left: Sequence[PlannedRun]) -> dict[str, str]:
        """Each run as a process of its own; how those ended that failed."""
        names, commands = {it.name for it in left}, []
        for it in left:
            words = ("compare-run", str(folder / runner.PLANS / f"{it.name}.json"), str(folder / it.name))
            needs = (it.uses,) if it.uses in names else ()
            commands.append(prune.Command(it.name, words, needs))
        how: dict[str, Any] = {"at_once": more["at_once"], "quiet": request.quiet, "total": len(runs)}
        return prune.run_side_by_side(commands, folder / runner.OUTPUT, place, **how)

    failed = runner.run(runs, folder, start)
    if found := write_table(folder, runs, inputs, more["measure"]):
        _print(found, folder, request.as_json)
    if failed:
        listed = "; ".join([f"{name}: {reason}" for name, reason in failed.items()][:3])
        listed += "; ..." if len(failed) > 3 else ""
        raise DmcpError(f"{len(failed)} runs failed, the same command starts only them again: {listed}")


def compare_run(settings: Path, folder: Path) -> None:
    """dmcp compare-run: one run of a comparison."""
    it = runner.read_plan(settings)
    protocol = it.protocol
    chains = {name: getattr(protocol, name) for name in _CHAINS}
    config = RunConfig(
        command="compare",
        seed=it.seed,
        search=SearchConfig(budget=it.budget or "100%", seed=it.seed, **chains),
        train=replace(protocol.train, seed=it.seed),
        comparison=asdict(it),
        **{name: getattr(protocol, name) for name in _SHARED},
    )
    place = {"resume": str(folder)} if runner.is_begun(folder) else {"out": str(folder)}
    request = Request(command="compare", typed={}, quiet=True, **place)  # type: ignore[arg-type]
    try:
        with session.session(config, request) as here:
            runner.OneRun(it, _inputs(here.job, place_of(config)), Run(folder), here.runtime).do()
    except StoppedError:
        raise StoppedError("Stopped; everything up to here is saved. dmcp compare goes on with it.") from None


def _inputs(job: Job, place: torch.device) -> runner.Inputs:
    """What the runs of a comparison work with."""
    return runner.Inputs(
        model=job.model,
        graph=job.graph,
        images=job.data.train,
        train=job.loaders.search,
        test=job.test,
        device=place,
        facts=job.identity,
    )


def _read_methods(text: str) -> list[str]:
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
    """NAME=FILE as a name and its widths; the file is a widths.json, or has widths by name."""
    found: dict[str, dict[str, int]] = {}
    for text in texts:
        name, _, file = text.partition("=")
        if not file or not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
            raise DmcpError(f"--widths: {text!r} is not of the form NAME=FILE, like hand=widths.json.")
        if name in found:
            raise DmcpError(f"--widths: {name} is given twice: give each a name of its own.")
        stored: Any = parse_json(read_bytes(Path(file), MOST_JSON), file)
        ours = isinstance(stored, dict) and {"widths", "fingerprint"} <= stored.keys()
        if not isinstance(stored, dict) or not (ours or all(type(kept) is int for kept in stored.values())):
            raise FileError(f'{file}: not a file of widths: give a widths.json, or {{"space": width, ...}}.')
        found[name] = dict(Widths.from_json(stored)) if ours else stored
    return found


def _list_planned(runs: Sequence[PlannedRun], folder: Path, as_json: bool) -> None:
    """The runs, how far they are, and how long each trains; what would be refused is refused."""
    rows = [{"run": it.name, "state": runner.state_of(it, folder), "epochs": runner.epochs_of(it)} for it in runs]
    if as_json:
        session.print_json({"folder": str(folder), "runs": rows})
    else:
        words = [", ".join(f"{number} {kind}" for kind, number in runner.epochs_of(it).items()) for it in runs]
        cells = [[it.name, runner.state_of(it, folder), epochs] for it, epochs in zip(runs, words, strict=True)]
        print(table([["run", "state", "epochs"], *cells]))
        print(f"{sum(row['state'] == 'done' for row in rows)} of {len(rows)} runs are done in {folder}.")
    runner.check_begun(runs, folder)


def _print(data: Mapping[str, Any] | None, folder: Path, as_json: bool) -> None:
    if data is None:
        raise FileError(f"{folder}: no runs of a comparison are done here: give the folder that dmcp compare filled.")
    if as_json:
        session.print_json({"folder": str(folder), **data})
    else:
        print(f"{(folder / PAGE).read_text()}\n{folder}")
