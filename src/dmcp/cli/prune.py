"""The commands prune, search and train."""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dmcp import pruning
from dmcp.batches import Loader, device_of, generator
from dmcp.budget import costs, limits_latency
from dmcp.calibration import recalibrate
from dmcp.cli import launch, session
from dmcp.cli.config import GIVEN, Request, RunConfig
from dmcp.cli.job import Job, Replaced, open_job, place_of
from dmcp.cli.session import describe_cost, describe_costs, log, log_replaced, print_json, result_facts
from dmcp.cutting import cut
from dmcp.data.datasets import FolderSet
from dmcp.errors import BudgetError, DmcpError, StoppedError, WidthsError
from dmcp.latency import LATENCY_FILE, Latency, attach_latency, choose_once
from dmcp.report.figures import draw_all
from dmcp.results import DMCP, ORIGINAL, UNIFORM, compare, results_table
from dmcp.retraining import Retraining, is_model, origin, train_all, trained_before, weigh_teacher, who_teaches
from dmcp.runs import OUTCOME, REPORT, Run, read_json
from dmcp.sampling import expected, filled, uniform
from dmcp.searching.config import SearchRecord, extremes
from dmcp.searching.search import SEARCH, reach
from dmcp.searching.search import search as run_search
from dmcp.settings import AUTO, UNPRUNED, LatencyConfig, Retrain, RuntimeKind
from dmcp.storage import save
from dmcp.supernet import Supernet
from dmcp.training import Event, Runtime, StepRecord, Task
from dmcp.training import train as run_training
from dmcp.units import clock
from dmcp.widths import Widths

STOPPED = "Stopped while networks were measured, as asked: nothing is kept, the same command starts again."
Clock = Callable[[nn.Module], float]  # seconds, once the device of a network has done its work
_STEPS = 4  # measured of each kind: the first one is slow, of the others the median counts


def prune(config: RunConfig, request: Request) -> None:
    """dmcp prune."""
    pruning.check_method(config.method)
    with session.session(config, request, lambda job: check_reachable(job, request.resume)) as here:
        job, config = here.job, here.config
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
        warnings = here.run.finish(result, here.describe_replaced(replaced))
    if session.PARENT not in os.environ:  # which names those of all seeds
        log_replaced(replaced)
    for text in warnings:
        log(text)
    results = result.front or {"": result}
    if request.as_json:
        plain = {name: _facts(here.run.folder / name, own, replaced) for name, own in results.items()}
        networks = {"networks": [asdict(row) for row in result.rows]}
        print_json(networks | ({"folder": str(here.run.folder), "budgets": plain} if result.front else plain[""]))
        return
    if result.search:
        print(f"{len(result.search.log)} search steps; expected cost at their end, before repair: {_shares(result)}")
    for name, own in results.items():
        print(f"{name} " * bool(name) + f"cut to {describe_costs(own.graph, own.widths)}")
    print(f"\n{result.table}\n\n{here.run.folder}")


def _shares(result: pruning.PruneResult) -> str:
    assert result.search is not None
    shares = " and ".join(f"{share:.1%}" for share in pruning.expected_shares(result.search))
    return f"{shares} of the budget{f' {result.search.budget.text}' if result.front else ''}"


def _facts(folder: Path, result: pruning.PruneResult, replaced: Replaced) -> dict[str, Any]:
    """A result as plain data."""
    facts = result_facts(folder, result.graph, result.widths, replaced)
    if found := result.search:
        facts |= {"search_steps": len(found.log), "expected_shares": pruning.expected_shares(found)}
    return facts | ({} if result.latency is None else {"latency": asdict(result.latency)})


def search(config: RunConfig, request: Request) -> None:
    """dmcp search."""
    with session.session(config, request, lambda job: check_reachable(job, request.resume)) as here:
        job, config, outcome = here.job, here.config, None
        assert config.search is not None
        net = Supernet(job.model, job.graph, config.search.groups, config.search.align)
        runtime = here.runtime.stage(SEARCH)
        found = run_search(net, job.loaders.search, config.search, arch_loader=job.loaders.arch, runtime=runtime)
        widths = expected(found)
        if limits_latency(found.budget):
            assert runtime.checkpointer is not None
            sample = torch.zeros(1, *job.data.shape, device=device_of(net.model))
            _, widths, outcome = choose_once(found, net.model, sample, folder=runtime.checkpointer.folder)
        small = cut(net.model, job.graph, widths)
        recalibrate(small, job.loaders.search)
        pruning.check_budget(small, widths, job.graph, found.budget)
        replaced = here.replaced()
        if not here.world.first:
            return
        save(small, widths, here.run.folder)
        if outcome:
            here.run.write(OUTCOME, asdict(outcome))
        draw_all(found, widths, here.run.folder)
        here.run.close()
    log_replaced(replaced)
    if request.as_json:
        latency = {} if outcome is None else {"latency": asdict(outcome)}
        print_json(result_facts(here.run.folder, job.graph, widths, replaced) | latency)
        return
    print(describe_costs(job.graph, widths))
    longest = max(len(space.name) for space in job.graph.spaces)
    for space in job.graph.spaces:
        print(f"{space.name:<{longest}}  {widths[space.name]:>5} of {space.size}")
    print(f"\n{outcome.text}\n\n{here.run.folder}" if outcome else f"\n{here.run.folder}")


def train(config: RunConfig, request: Request) -> None:
    """dmcp train."""
    name = DMCP if config.widths else UNPRUNED
    with session.session(config, request, lambda job: _check_widths(config, job)) as here:
        job, graph, config = here.job, here.job.graph, here.config
        assert config.train is not None
        kept, loader = _read_widths(config, job), job.loaders.train or job.loaders.search
        own = config.retrain is Retrain.FINETUNE or is_model(job.teacher, job.model)
        other = None if job.teacher is job.model else job.teacher
        before = trained_before(job.model, own and not job.new_head, other)
        if other is not None:
            weigh_teacher(other, job.data.classes, job.test)
        how = Retraining(config.train, config.retrain, _teacher(config, job))
        keeps = config.retrain in (Retrain.FINETUNE, Retrain.NONE)
        start, cuts = job.model if keeps else job.fresh, {name: cut(job.model, graph, kept, by="l2")} if keeps else {}
        nets = train_all(start, graph, {name: kept}, loader, how, cuts=cuts, runtime=here.runtime)
        example = next(iter(loader))[0]
        rows = compare(before | nets, graph, {name: kept}, job.test, example, runtime=here.runtime)
        replaced = here.replaced()
        if not here.world.first:
            return
        save(nets[name], kept, here.run.folder)
        warnings = here.run.divergences([name])
        listed = (f"- **{text}**" for text in (*warnings, *here.describe_replaced(replaced)))
        who = who_teaches(how.teacher, job.model)
        text = origin(how, who, name, "the given weights") if who else ""
        here.run.write(REPORT, "\n".join([f"# {config.model}", "", results_table(rows, graph, text), *listed, ""]))
        here.run.close()
    log_replaced(replaced)
    for warning in warnings:
        log(warning)
    if request.as_json:
        print_json(result_facts(here.run.folder, graph, kept, replaced) | {"networks": [asdict(row) for row in rows]})
    else:
        print(f"{results_table(rows, graph, text)}\n\n{here.run.folder}")


def prune_seeds(config: RunConfig, request: Request) -> None:
    """dmcp prune --seeds: the same command for several seeds, side by side; their mean and spread."""
    pruning.check_method(config.method)
    job = open_job(replace(config, device="cpu"), request.typed)  # one sentence now, not one of each seed
    config = replace(job.config, device=config.device)
    session.check_job(job, config)
    folder = session.run_folder(config, request)
    argv = launch.words_of_each(sys.argv[1:])
    shared = any(map(limits_latency, _specs(config))) and not config.latency  # once: side by side they are slow
    argv += ["--latency", str(folder / LATENCY_FILE)] if shared else []
    launch.refuse_others(folder, argv)
    job = check_reachable(replace(job, config=config), str(folder))
    session.log_notes(job, config)
    if shared and (table := Latency.of(job.graph)) is not None:
        table.save(folder / LATENCY_FILE)
    seeds = range(config.seed, config.seed + request.seeds)
    runs = launch.run_seeds(argv, seeds, folder, place_of(config), request.quiet)
    summary = launch.summarize(runs)
    replaced = {part: {path for run in runs for path in Run(run).replaced(part)} for part in ("train", "test")}
    log_replaced(replaced)
    if request.as_json:
        counts = {part: len(files) for part, files in replaced.items()}
        print_json({"folder": str(folder)} | summary | {"replaced": counts})
    else:
        print(f"{launch.markdown(summary)}\n\n{folder}")


def _teacher(config: RunConfig, job: Job) -> nn.Module | str | None:
    return config.teacher if config.teacher in (AUTO, UNPRUNED) else job.teacher


def _read_widths(config: RunConfig, job: Job) -> Widths:
    """The widths to train, checked against the network; all of it where no file was given."""
    if not config.widths:
        return job.graph.full
    try:
        return job.graph.widths(Widths.from_json(read_json(Path(config.widths))))
    except WidthsError as error:
        raise WidthsError(f"--widths {config.widths}: {error}") from None


def _check_widths(config: RunConfig, job: Job) -> Job:
    """Refuse widths of another network before anything is written."""
    _read_widths(config, job)
    return job


# the budget


def _specs(config: RunConfig) -> tuple[Any, ...]:
    """The budgets as they were typed."""
    assert config.search is not None
    return config.budgets or (config.search.budget,)


def check_reachable(job: Job, resume: str = "") -> Job:
    """Refuse a budget that cannot be reached before anything is written; for one of latency, measure first."""
    config, kept = job.config, Path(resume) / LATENCY_FILE
    assert config.search is not None
    if config.train is not None and config.teacher != AUTO:
        Retraining(config.train, config.retrain, _teacher(config, job))  # refuses a teacher that is of no use
    file = kept if resume and kept.exists() else Path(config.latency) if config.latency else None
    if any(map(limits_latency, _specs(config))) or file:
        job = _with_latency(job, file)
    elif config.latency_batch != 1 or config.latency_device or config.latency_runtime is RuntimeKind.ONNX:
        raise DmcpError("--latency-batch, -device and -runtime are for budgets of latency, like 8ms: leave them out.")
    pruning.read_budgets(_specs(config), job.graph, *pruning.reachable(job.graph, config.search))
    if config.method == DMCP:
        reach(Supernet(job.model, job.graph, config.search.groups, config.search.align), config.search)
    return job


def _with_latency(job: Job, file: Path | None) -> Job:
    """The job with a table of latency: of a file, or a new one."""
    config = job.config
    assert config.search is not None
    budget = next(filter(limits_latency, _specs(config)), config.search.budget)
    search, batch, runtime = replace(config.search, budget=budget), config.latency_batch, config.latency_runtime
    given = None if file is None else Latency.load(file)
    if given is not None:
        try:
            given.attach(job.graph)
        except WidthsError as error:
            raise WidthsError(f"{file}: {error}") from None
        place = torch.device(config.latency_device).type if config.latency_device else given.place
        if place != given.place or batch not in (1, given.batch) or runtime not in (RuntimeKind.TORCH, given.runtime):
            raise DmcpError(f"--latency-*: the table is of {given.how}: leave them out, or measure anew.")

    def measure() -> Latency:
        log(f"Measuring the latency of {LatencyConfig.networks} networks first, in {runtime}.")
        example = torch.randn(1, *job.data.shape, generator=generator(0))
        device = config.latency_device or ("" if runtime is RuntimeKind.ONNX else str(place_of(config)))
        try:
            with session.stopping(STOPPED):
                how = LatencyConfig(batch=batch, device=device, runtime=runtime)
                table = pruning.time_networks(job.model, example, job.graph, search, how)
        except (BudgetError, StoppedError, WidthsError):
            raise
        except DmcpError as error:
            raise DmcpError(f"--latency-device, --latency-batch, --latency-runtime: {error}") from error
        log(f"{table.summary} Measured {len(table.networks)} networks in {table.seconds:.0f} s.")
        return table

    return replace(job, graph=attach_latency(job.graph, search.budget, measure, given))


# how long it will take


class Stage(NamedTuple):
    """One part of a run."""

    name: str
    steps: int
    seconds: float


def dry_run(config: RunConfig, request: Request) -> None:
    """dmcp prune --dry-run: what a run would be like, from a few steps on copies."""
    pruning.check_method(config.method)
    job = open_job(config, request.typed)
    config = job.config
    assert config.search is not None
    session.check_job(job, config)
    job = check_reachable(job)
    session.log_notes(job, config)
    graph = job.graph
    low, high = pruning.reachable(graph, config.search)
    budgets = pruning.read_budgets(_specs(config), graph, low, high)
    stages = forecast(Supernet(job.model, graph, config.search.groups, config.search.align), job.loaders, config)
    steps, seconds = sum(stage.steps for stage in stages), sum(stage.seconds for stage in stages)
    place = device_of(job.model)
    memory = _peak_bytes(place)
    if request.as_json:
        ends = {"min": session.plain_costs(costs(graph, low)), "max": session.plain_costs(costs(graph, high))}
        asked = [session.plain_costs({limit.kind: limit.target for limit in it.limits}) for it in budgets.values()]
        facts: dict[str, Any] = {"reachable": ends, "asked": asked if config.budgets else asked[0]}
        facts |= {"chosen": job.reasons, "device": place.type, "peak_bytes": memory}
        print_json(facts | {"stages": [stage._asdict() for stage in stages], "steps": steps, "seconds": seconds})
        return
    print(f"{graph.summary()}\n")
    print(f"reachable: from {describe_costs(graph, low)}\n           to   {describe_costs(graph, high)}")
    for it in budgets.values():
        print(f"asked for: at most {', '.join(describe_cost(limit.kind, limit.target) for limit in it.limits)}")
    if config.budgets:
        print(f"one search, at {config.search.budget}; widths for the other budgets are scaled from it")
    if job.reasons:
        print("\nchosen, since not given:")
        longest = max(map(len, job.reasons))
        for name, reason in job.reasons.items():
            print(f"  --{name.replace('_', '-'):<{longest}}  {reason}")
    print()
    for stage in stages:
        print(f"{stage.name:<16}{stage.steps:>8} steps  {clock(stage.seconds):>12}")
    print(f"{'in all':<16}{steps:>8} steps  {clock(seconds):>12}, {memory / 2**30:.1f} GiB on {place.type}")
    if config.teacher:
        names = {GIVEN: "the network as given", UNPRUNED: "the unpruned network, trained first"}
        name = names.get(teacher := _forecast_teacher(config), teacher)
        print(f"\nteacher: {name}; its forward passes are in these times")
    if isinstance(job.data.train, FolderSet):
        print("\nFew files were decoded: dmcp data decodes all.")
    print("\nNothing was trained or written.")


def _forecast_teacher(config: RunConfig) -> str:
    """The teacher that auto will most likely be."""
    return (GIVEN if config.weights else UNPRUNED) if config.teacher == AUTO else config.teacher


def forecast(
    net: Supernet, loader: Loader | pruning.Loaders, config: RunConfig, now: Clock | None = None
) -> list[Stage]:
    """The stages of a run, by a few steps of a copy of the supernet and of two cut networks; now: the clock."""
    loaders = loader if isinstance(loader, pruning.Loaders) else pruning.Loaders(search=loader)
    search, train, loader, last = config.search, config.train, loaders.search, loaders.train or loaders.search
    assert search is not None and train is not None
    budget, path = reach(net, search)
    low, high = extremes(net.graph, path.sizes)
    same = uniform(net.graph, budget, low, search.align, filled(search), high)
    first = list(itertools.islice(loader, _STEPS))
    batches = [first[number % len(first)] for number in range(_STEPS)]  # also where an epoch has only one
    times: list[float] = []

    def seconds_of(model: nn.Module, run: Callable[[Runtime], object], parts: int = 1) -> list[float]:
        """Median time of a step in each part of a run; the first one, which is slow, does not count."""

        def read(event: Event) -> None:
            if isinstance(event.record, SearchRecord | StepRecord):
                times.append((now or _now)(model))

        times.clear()
        run(Runtime(on_event=read, progress=False))
        size = len(times) // parts
        ends = [times[start : start + size] for start in range(0, parts * size, size)]
        return [statistics.median(new - old for old, new in itertools.pairwise(it)) for it in ends]

    short = replace(search, epochs=2, warmup=0.5, log_every=1)
    few, one = replace(train, epochs=_STEPS, warmup_epochs=0), batches[:1]  # records come at the end of an epoch
    twin, unpruned, pruned = copy.deepcopy(net), *(cut(net.model, net.graph, it) for it in (net.graph.full, same))
    warm = both = 0.0
    if config.method == DMCP:  # how long other methods choose is not measured
        warm, both = seconds_of(
            twin, lambda runtime: run_search(twin, batches * search.accumulate, short, runtime=runtime), 2
        )
    (full,) = seconds_of(unpruned, lambda runtime: run_training(unpruned, one, few, runtime=runtime))
    (ours,) = seconds_of(pruned, lambda runtime: run_training(pruned, one, few, runtime=runtime))
    asked = full / 3  # what a teacher takes: a forward is a third of a step
    ours += full if config.retrain is Retrain.SLIMMABLE else asked if config.teacher else 0.0
    per_epoch, steps = -(-len(loader) // search.accumulate), len(last) * train.epochs
    warmup, rest = per_epoch * search.warmup_epochs, per_epoch * (search.epochs - search.warmup_epochs)
    stages = [Stage("warm-up", warmup, warmup * warm), Stage("search", rest, rest * both)] if both else []
    if config.retrain is Retrain.NONE:
        return stages
    if config.baselines or _forecast_teacher(config) == UNPRUNED:
        learns = _forecast_teacher(config) not in ("", UNPRUNED)
        stages.append(Stage(UNPRUNED, steps, steps * (full + asked if learns else full)))
    for text in config.budgets or [""]:
        names = [UNIFORM, config.method] if config.baselines and config.method != UNIFORM else [config.method]
        stages += [Stage(f"{name} {text}".strip(), steps, steps * ours) for name in names]
    return stages


def _now(model: nn.Module) -> float:
    if device_of(model).type == "cuda":
        torch.cuda.synchronize(device_of(model))
    return time.perf_counter()


def _peak_bytes(device: torch.device) -> int:
    """The most memory that this process has used: on the GPU, or in all; 0 where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
