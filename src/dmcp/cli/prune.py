"""The commands prune, search and train; several runs side by side."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dmcp import pruning
from dmcp.budgets import Budget, limits_latency, show_cost
from dmcp.cli import session
from dmcp.cli.config import Request, make_config
from dmcp.cli.session import Job, Replaced, describe_costs, describe_replaced, log, print_json, result_facts
from dmcp.cutting import cut
from dmcp.data.loaders import CHUNK, with_batch_size
from dmcp.errors import DmcpError
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.exporting.latency_limit import attach_latency
from dmcp.exporting.timing import synchronize
from dmcp.feasibility import parse_budgets, reachable, time_networks
from dmcp.pruning import PruneJob, phases
from dmcp.report.finish import finish
from dmcp.request import check_method
from dmcp.results import DMCP, ORIGINAL, UNIFORM, PruneResult, measure_networks, results_table
from dmcp.retraining import (
    Retraining,
    describe_origin,
    describe_teacher,
    given_networks,
    is_model,
    train_all,
    warn_of_poor_teacher,
)
from dmcp.runs.config import RunConfig
from dmcp.runs.files import REPORT, is_run
from dmcp.runs.reading import read_run, read_widths
from dmcp.runs.storage import save
from dmcp.runs.writing import Run
from dmcp.runtime import progress
from dmcp.runtime.batches import core_count, device_of, generator
from dmcp.runtime.io import make_printable
from dmcp.searching.budget import costs
from dmcp.searching.records import expected_shares
from dmcp.searching.search import SEARCH
from dmcp.searching.search import search as run_search
from dmcp.searching.supernet import Supernet
from dmcp.settings import AUTO, UNPRUNED, LatencyConfig, Retrain, RuntimeKind
from dmcp.training.loop import Runtime, Task
from dmcp.training.loop import train as run_training
from dmcp.units import between, clock, spread, table

COMMAND = (sys.executable, "-P", "-m", "dmcp")  # -P: Python does not look into the current folder
_ON_A_GPU = 8  # processes at once, unless told
SUMMARY = "summary.json"  # of several seeds
_SLOW = 5.0  # seconds of a step that need not be measured again
_STEPS = 4  # of each kind that a forecast measures
_MEASURED = 2**21  # numbers in a batch that a forecast measures on a CPU: 13 images of 224 px


def prune(config: RunConfig, request: Request) -> None:
    """dmcp prune, and dmcp search, which stops after the cut."""
    check_method(config.method)
    with session.session(config, request, lambda job: _checked(job, request.resume)) as here:
        job, config = here.job, here.job.config
        assert config.search is not None
        rows = {UNPRUNED, UNIFORM} if config.baselines else set()
        if config.weights and not job.new_head:
            rows |= {ORIGINAL}
        result = pruning.prune(
            job.model,
            job.loaders,
            job.test,
            config.budgets or None,
            method=config.method,
            search=config.search,
            train=config.train,
            retrain=config.retrain,
            teacher=_teacher(config, job),
            baselines=rows,
            graph=job.graph,
            task=Task(fresh=job.fresh),
            runtime=here.runtime,
        )
        replaced = here.replaced()
        if not here.world.first:
            return
        log(*finish(here.run, result, describe_replaced(replaced)))
    results = result.by_budget or {"": result}
    if request.as_json:
        plain = {name: _facts(here.run.folder / name, own, replaced) for name, own in results.items()}
        networks = {"networks": [asdict(row) for row in result.rows]}
        print_json(networks | ({"folder": str(here.run.folder), "budgets": plain} if result.by_budget else plain[""]))
        return
    if found := result.search:
        shares = " and ".join(f"{share:.1%}" for share in expected_shares(found))
        print(f"{len(found.log)} search steps; expected cost at their end: {shares} of {found.budget.text}")
    for name, own in results.items():
        print(f"{name} cut to {describe_costs(own.graph, own.widths)}".strip())
    print(f"\n{result.table}\n\n{here.run.folder}")


def _facts(folder: Path, result: PruneResult, replaced: Replaced) -> dict[str, Any]:
    """A result as plain data."""
    facts = result_facts(folder, result.graph, result.widths, replaced)
    if found := result.search:
        facts |= {"search_steps": len(found.log), "expected_shares": expected_shares(found)}
    return facts | ({} if result.latency is None else {"latency": asdict(result.latency)})


def train(config: RunConfig, request: Request) -> None:
    name = DMCP if config.widths else UNPRUNED
    with session.session(config, request) as here:
        job, graph, config = here.job, here.job.graph, here.job.config
        kept, loader = read_widths(Path(config.widths), graph) if config.widths else graph.full, job.loaders.final
        own = config.retrain is Retrain.FINETUNE or is_model(job.teacher, job.model)
        other = None if job.teacher is job.model else job.teacher
        before = given_networks(job.model, own and not job.new_head, other)
        if other is not None:
            warn_of_poor_teacher(other, job.data.classes, job.test)
        how = Retraining(config=config.train, kind=config.retrain, teacher=_teacher(config, job))
        keeps = config.retrain in (Retrain.FINETUNE, Retrain.NONE)
        start, cuts = job.model if keeps else job.fresh, {name: cut(job.model, graph, kept, by="l2")} if keeps else {}
        trained = train_all(start, graph, {name: kept}, loader, how, cuts=cuts, runtime=here.runtime)
        example = next(iter(loader))[0]
        rows = measure_networks(
            before | trained.networks,
            graph,
            {name: kept},
            job.test,
            example,
            train_losses=trained.losses,
            runtime=here.runtime,
        )
        replaced = here.replaced()
        if not here.world.first:
            return
        save(trained.networks[name], kept, here.run.folder)
        warnings = here.run.divergences([name])
        listed = (f"- **{text}**" for text in (*warnings, *describe_replaced(replaced)))
        who = describe_teacher(how.teacher, job.model)
        text = describe_origin(how, who, name, "the given weights") if who else ""
        here.run.write(REPORT, "\n".join([f"# {config.model}", "", results_table(rows, graph, text), *listed, ""]))
        here.run.close()
    log(*warnings)
    if request.as_json:
        print_json(result_facts(here.run.folder, graph, kept, replaced) | {"networks": [asdict(row) for row in rows]})
    else:
        print(f"{results_table(rows, graph, text)}\n\n{here.run.folder}")


def _teacher(config: RunConfig, job: Job) -> nn.Module | str | None:
    return config.teacher if config.teacher in (AUTO, UNPRUNED) else job.teacher


# processes side by side


@dataclass(frozen=True)
class Command:
    """A dmcp command to be run in a process of its own."""

    name: str  # shown before its lines, and that of its files NAME.out and NAME.err
    words: tuple[str, ...]
    after: tuple[str, ...] = ()  # names of commands that must have succeeded


def run_side_by_side(
    commands: Sequence[Command],
    folder: Path,
    device: torch.device,
    *,
    at_once: int | None = None,
    quiet: bool = False,
    total: int = 0,
) -> dict[str, str]:
    """Run commands in order, each once those in `after` are done; why commands failed, by name.

    A signal is passed on to all children, and ends us when they have ended. at_once: on a CPU never more than it has
    cores. Their stderr is shown line by line; all output is kept in the folder. total: commands in all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cores = core_count()
    at_once = min(at_once or cores, cores) if device.type == "cpu" else at_once or _ON_A_GPU
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // at_once)), session.CHILD: "1"}
    failed, done, signals = dict[str, str](), set[str](), list[int]()
    waiting, running = list(commands), dict[str, subprocess.Popen[str]]()
    show = (lambda text: None) if quiet else log

    def stop(number: int, _: Any) -> None:
        log(f"dmcp: stopping {len(running)} of {len(commands)} runs; the same command goes on.")
        signals.append(number)
        for process in [*running.values()]:
            process.send_signal(number)  # not to its workers: it ends them

    def run(command: Command) -> str:
        """How it failed; empty if it did not. In a group of its own: a Ctrl-C reaches it through us, and only once."""
        out, err = ((folder / f"{command.name}.{kind}").open("a") for kind in ("out", "err"))
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.PIPE, "text": True}
        last, words = "", [*COMMAND, *command.words]
        with out, err:
            if signals:
                return "not started"
            with subprocess.Popen(words, env=environment, errors="replace", process_group=0, **how) as process:
                running[command.name] = process
                for line in process.stderr or ():
                    err.write(line)
                    if line.strip():
                        last = make_printable(line.strip())
                        show(f"{command.name}: {last}")
            del running[command.name]
        code = process.returncode
        how_it_ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how_it_ended}: {last}" if code else ""

    with futures.ThreadPoolExecutor(at_once) as pool, session.handled_by(stop):
        started: dict[futures.Future[str], str] = {}
        while waiting or started:
            for command in [it for it in waiting if {*it.after} <= {*done, *failed}]:
                waiting.remove(command)
                if lost := [name for name in command.after if name in failed]:
                    failed[command.name] = f"not started: it needs {', '.join(lost)}, and that failed"
                    show(f"{command.name}: {failed[command.name]}")
                else:
                    started[pool.submit(run, command)] = command.name
            for future in futures.wait(started, return_when=futures.FIRST_COMPLETED).done:
                name = started.pop(future)
                if reason := future.result():
                    failed[name] = reason
                else:
                    done.add(name)
                    left = len(commands) - len(done)
                    show(f"{name}: done ({(total or len(commands)) - left} of {total or len(commands)})")
    if signals:
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(128 + signals[0])
    return failed


# several seeds


def prune_seeds(config: RunConfig, request: Request) -> None:
    """dmcp prune --seeds: the same command for each seed, side by side, in FOLDER/seed-K; their mean and spread.

    Started again, it leaves finished seeds as they are and goes on with the others.
    """
    check_method(config.method)
    folder, words = session.run_folder(config, request), tuple(sys.argv[1:])
    runs = {seed: folder / f"seed-{seed}" for seed in range(config.seed, config.seed + request.seeds)}
    for seed, run in runs.items():
        if is_run(run):  # refuses one that was begun with other settings
            make_config(replace(request, resume=str(run), typed={**request.typed, "seed": seed}))
    job = session.open_checked(replace(config, device="cpu"), request.typed)  # one sentence now, not one of each seed
    job = _checked(replace(job, config=replace(job.config, device=config.device)), str(folder))
    latency = folder / LATENCY_FILE
    if any(map(limits_latency, _specs(config))) and not config.latency:  # measured once: side by side they are slow
        found = Latency.of(job.graph)
        assert found is not None
        found.save(latency)
        words += ("--latency", str(latency))
    commands = []
    for seed, run in runs.items():
        place = ("--resume", str(run)) if is_run(run) else ("--out", str(run))
        if not Run(run).done:
            commands.append(Command(run.name, (*words, "--seeds", "1", "--seed", str(seed), *place)))
    how: dict[str, Any] = {"at_once": request.seeds, "quiet": request.quiet, "total": request.seeds}
    if failed := run_side_by_side(commands, folder, session.place_of(config), **how):
        listed = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        raise DmcpError(f"{len(failed)} of {len(runs)} seeds failed, the same command starts only them again: {listed}")
    summary = summarize([*runs.values()])
    Run(folder).write(SUMMARY, summary)
    if request.as_json:
        print_json({"folder": str(folder)} | summary)
    else:
        print(f"{summary_table(summary)}\n\n{folder}")


def summarize(folders: Sequence[Path]) -> dict[str, Any]:
    """What the runs in these folders have found, network by network; deviation: ddof = 1, None for one run."""
    runs, networks = [read_run(folder) for folder in folders], []
    for name in dict.fromkeys(row.name for run in runs for row in run.rows):
        rows = [row for run in runs for row in run.rows if row.name == name]
        found: dict[str, Any] = {kind: [getattr(row, kind) for row in rows] for kind in ("accuracy", "macs", "params")}
        deviation = statistics.stdev(found["accuracy"]) if len(rows) > 1 else None
        networks.append({"name": name, **found, "mean": statistics.fmean(found["accuracy"]), "deviation": deviation})
    return {"runs": [run.name for run in runs], "networks": networks}


def summary_table(summary: Mapping[str, Any]) -> str:
    """The summary as text: mean accuracy ± standard deviation (runs)."""
    rows = [["network", "MACs", "params", "accuracy in %"]]
    for it in summary["networks"]:
        ends = [between(f"{min(it[kind]):,}", f"{max(it[kind]):,}") for kind in ("macs", "params")]
        rows.append([it["name"], *ends, spread(it["accuracy"])])
    return table(rows)


# the budget


def _specs(config: RunConfig) -> tuple[Any, ...]:
    """The budgets as they were typed."""
    assert config.search is not None
    return config.budgets or (config.search.budget,)


def _checked(job: Job, folder: str = "") -> Job:
    """The job with a table of latency if a budget needs one; BudgetError for a budget out of reach.

    folder: of a run that goes on, which may have the table.
    """
    config, specs, kept = job.config, _specs(job.config), Path(folder) / LATENCY_FILE
    assert config.search is not None
    file = kept if folder and kept.exists() else Path(config.latency) if config.latency else None
    given = Latency.load(file) if file else None
    timed = [spec for spec in specs if limits_latency(spec)] or [config.search.budget]
    search = replace(config.search, budget=timed[0])

    def measure() -> Latency:
        runtime = config.latency_runtime
        log(f"Measuring the latency of {LatencyConfig.networks} networks first, in {runtime}.")
        device = config.latency_device or ("" if runtime is RuntimeKind.ONNX else str(session.place_of(config)))
        how = LatencyConfig(batch=config.latency_batch, device=device, runtime=runtime)
        example = torch.randn(1, *job.data.shape, generator=generator(0))
        found = time_networks(job.model, example, job.graph, search, how)
        log(f"{found.summary} Measured {len(found.networks)} networks in {found.seconds:.0f} s.")
        return found

    graph = attach_latency(job.graph, search.budget, measure, given)
    parse_budgets(specs, graph, *reachable(graph, search))
    return replace(job, graph=graph)


# how long it will take


class Stage(NamedTuple):
    """One part of a run."""

    name: str
    steps: int
    seconds: float


def dry_run(config: RunConfig, request: Request) -> None:
    """dmcp prune --dry-run: what a run would be like, from a few steps on copies."""
    check_method(config.method)
    job = _checked(session.open_checked(config, request.typed))
    config, graph, place = job.config, job.graph, device_of(job.model)
    assert config.search is not None
    low, high = reachable(graph, config.search)
    budgets = parse_budgets(_specs(config), graph, low, high)
    images = measured_batch(config.batch, job.data.shape, place)
    with progress.showing(False if request.quiet or request.as_json else None, lines=True):
        read_at_once = min(config.batch, max(images, CHUNK * core_count()))  # no core that reads files is idle
        pace, held_back = loader_pace(with_batch_size(job.loaders.search, read_at_once), place)
        pace *= config.batch / read_at_once
        stages = forecast(job, budgets, images)
    slow = [stage.name for stage in stages if stage.seconds < pace * stage.steps]
    if slow and held_back:
        log(f"The loader takes {1000 * pace:.0f} ms for a batch and holds back {', '.join(slow)}: {held_back}.")
    stages = [stage._replace(seconds=max(stage.seconds, pace * stage.steps)) for stage in stages]
    steps, seconds = sum(stage.steps for stage in stages), sum(stage.seconds for stage in stages)
    memory = torch.cuda.max_memory_allocated(place) if place.type == "cuda" else None
    if request.as_json:
        ends = {"min": session.plain_costs(costs(graph, low)), "max": session.plain_costs(costs(graph, high))}
        asked = [session.plain_costs({limit.kind: limit.target for limit in it.limits}) for it in budgets.values()]
        facts: dict[str, Any] = {"reachable": ends, "asked": asked, "chosen": job.reasons, "device": place.type}
        facts |= {"stages": [stage._asdict() for stage in stages], "steps": steps, "seconds": seconds}
        print_json(facts | {"measured_batch": images, "peak_bytes": memory})
        return
    print(f"{graph.summary()}\n")
    print(f"reachable: from {describe_costs(graph, low)}\n           to   {describe_costs(graph, high)}")
    for it in budgets.values():
        print(f"asked for: at most {', '.join(show_cost(limit.kind, limit.target) for limit in it.limits)}")
    print_chosen(job)
    print()
    for stage in (*stages, Stage("in all", steps, seconds)):
        print(f"{stage.name:<16}{stage.steps:>8} steps  {clock(stage.seconds):>12}")
    if images < config.batch:
        print(f"\nMeasured with batches of {images:,} images, and scaled to {config.batch:,} by their number.")
    print(f"\n{memory / 2**30:.1f} GiB on the GPU" if memory else "", end="")
    print("\nNothing was trained, and no run was written.")


def print_chosen(job: Job) -> None:
    """The settings that nobody typed, and why."""
    if job.reasons:
        print("\nchosen, since not given:")
    for name, reason in job.reasons.items():
        print(f"  --{name.replace('_', '-'):<14}{reason}")


def loader_pace(loader: Any, place: torch.device) -> tuple[float, str]:
    """Seconds for a batch of image files, once the loader is under way, and what makes it faster; 0 for arrays."""
    if not hasattr(loader, "workers"):
        return 0.0, ""
    times, cores = list[float](), core_count()
    for _ in itertools.islice(loader, 2 * _STEPS):
        synchronize(place)
        times.append(time.perf_counter())
    times = times[(len(times) - 1) // 2 :]  # the first ones were made ahead
    more = "it needs more cores" if loader.store else "scale the files down until a quarter of the memory holds them"
    return (times[-1] - times[0]) / max(1, len(times) - 1), f"--workers {cores}" if loader.workers < cores else more


def measured_batch(batch: int, sample: Sequence[int], device: torch.device) -> int:
    """Images in the batches that a forecast measures: on a CPU few, whose memory a whole batch may exhaust.

    There the time of a step is in proportion to its images; on a GPU it is not, and the memory is measured, too.
    """
    return min(batch, max(2, _MEASURED // math.prod(sample))) if device.type == "cpu" else batch


def forecast(job: Job, budgets: Mapping[str, Budget], images: int) -> list[Stage]:
    """The stages of a run, by a few steps of copies of the network and of its supernet.

    images: in the batches of these steps, whose time is scaled to the batches of the run.
    """
    config, graph, loader = job.config, job.graph, with_batch_size(job.loaders.search, images)
    search, train = config.search, config.train
    assert search is not None
    batches, silent = [*itertools.islice(loader, _STEPS)], Runtime(progress=False)
    scale = config.batch / images

    def seconds_of(run: Callable[[list[Any]], object]) -> float:
        """Time of a step of the run: that of several less that of one; the first time of all is slow."""
        times = list[float]()
        for some in (batches[:1], batches[:1], 2 * batches):
            if len(times) == 2 and times[1] > _SLOW:
                return scale * times[1]
            begin = time.perf_counter()
            run(some)
            synchronize(device_of(job.model))
            times.append(time.perf_counter() - begin)
        return scale * max(0.0, times[2] - times[1]) / (2 * len(batches) - 1)

    few, short = replace(train, epochs=1, warmup_epochs=0), replace(search, epochs=1, warmup=0, accumulate=1)
    net = Supernet(job.model, graph, search.groups, search.align)
    full = seconds_of(lambda some: run_training(cut(job.model, graph, graph.full), some, few, runtime=silent))
    teacher, stages = _teacher(config, job), list[Stage]()
    if teacher == AUTO:
        teaches = config.retrain in (Retrain.FINETUNE, Retrain.SCRATCH)
        teacher = (job.model if config.weights else UNPRUNED) if teaches else None
    planned = PruneJob(
        model=job.model,
        graph=graph,
        budgets=budgets,
        baselines=frozenset([UNPRUNED, UNIFORM] if config.baselines else []) - {config.method},
        method=config.method,
        search=search,
        retraining=Retraining(config=train, kind=config.retrain, teacher=teacher),
        loaders=job.loaders,
    )
    for row in phases(planned, job.test)[:-1]:  # without the tests
        seconds = row.steps * row.work * full
        if row.name == SEARCH:  # how long other methods choose is not measured
            both = seconds_of(lambda some: run_search(copy.deepcopy(net), some, short, runtime=silent))
            without_alphas = row.steps * search.warmup_epochs / search.epochs * min(both, full / 2)
            seconds = search.accumulate * (row.steps * both - without_alphas)
        stages.append(Stage(row.name, row.steps, seconds))
    return stages
