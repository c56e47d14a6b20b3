"""dmcp prune --dry-run: what a run would do, and how long it would take."""

from __future__ import annotations

import copy
import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dmcp.budgets import Budget, show_cost
from dmcp.cli.config import Request
from dmcp.cli.job import Job, open_checked, with_checked_budgets
from dmcp.cli.output import describe_costs, describe_network, log, plain_costs, print_json
from dmcp.cli.session import refuse_early, run_folder
from dmcp.cutting import cut
from dmcp.data.loaders import CHUNK, with_batch_size
from dmcp.exporting.timing import synchronize
from dmcp.feasibility import parse_budgets, reachable
from dmcp.job import PruneJob, phases
from dmcp.request import check_method, other_networks
from dmcp.retraining import Retraining
from dmcp.runs.config import RunConfig
from dmcp.runs.records import UNIFORM
from dmcp.runtime import progress
from dmcp.runtime.batches import core_count, device_of
from dmcp.searching.budget import cheapest_between, costs
from dmcp.searching.search import SEARCH, SearchWarning
from dmcp.searching.search import search as run_search
from dmcp.searching.supernet import Supernet
from dmcp.settings import AUTO, UNPRUNED, Retrain
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime
from dmcp.training.loop import train as run_training
from dmcp.units import show_duration

_SLOW = 5.0  # seconds of a step that need not be measured again
_STEPS = 4  # of each kind that a forecast measures
_MEASURED = 2**21  # numbers in a batch that a forecast measures on a CPU: 13 images of 224 px


class Stage(NamedTuple):
    """One part of a run."""

    name: str
    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run would do, and how long it would take."""

    low: Widths  # the cheapest widths of the search, for the first budget
    high: Widths
    budgets: Mapping[str, Budget]
    stages: Sequence[Stage]
    images: int  # in the batches that were measured
    peak_bytes: int | None  # on the GPU; None on a CPU

    @property
    def total(self) -> Stage:
        """All stages together."""
        steps = sum(stage.steps for stage in self.stages)
        seconds = sum(stage.seconds for stage in self.stages)
        return Stage("total", steps, seconds)


def dry_run(config: RunConfig, request: Request) -> None:
    """Show what a run would do and how long it would take, from a few steps of copies."""
    check_method(config.method)
    refuse_early(config, request, run_folder(config, request))
    job = with_checked_budgets(open_checked(config, request.typed))
    low, high = reachable(job.graph, job.search)
    budgets = parse_budgets(job.budgets, job.graph, low, high, job.search.align)
    first_budget = next(iter(budgets.values()))
    cheapest = cheapest_between(first_budget, job.graph, low, high, job.search.align)

    # A few steps, and a few batches of the loader.
    device = device_of(job.model)
    batch = job.config.batch
    images = measured_batch(batch, job.data.shape, device)
    with progress.showing(not (request.quiet or request.as_json)):
        images_read = min(batch, max(images, CHUNK * core_count()))  # so many that no core is idle
        pace, remedy = loader_pace(with_batch_size(job.loaders.search, images_read), device)
        pace *= batch / images_read
        stages = forecast(job, budgets, images)
    stages = _slow_down(stages, pace, remedy)

    peak_bytes = None
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    result = Forecast(low=cheapest, high=high, budgets=budgets, stages=stages, images=images, peak_bytes=peak_bytes)
    if request.as_json:
        print_json(_plain(job, result))
    else:
        _print(job, result)


def _plain(job: Job, result: Forecast) -> dict[str, Any]:
    """The forecast as plain data."""
    asked = []
    for budget in result.budgets.values():
        asked.append(plain_costs({limit.kind: limit.target for limit in budget.limits}))
    return {
        "reachable": {
            "min": plain_costs(costs(job.graph, result.low)),
            "max": plain_costs(costs(job.graph, result.high)),
        },
        "asked": asked,
        "chosen": job.reasons,
        "device": device_of(job.model).type,
        "stages": [stage._asdict() for stage in result.stages],
        "steps": result.total.steps,
        "seconds": result.total.seconds,
        "measured_batch": result.images,
        "peak_bytes": result.peak_bytes,
    }


def _print(job: Job, result: Forecast) -> None:
    """Print the forecast for people."""
    config = job.config
    print(describe_network(config.model, job.data.shape, job.graph))
    print(f"\nReachable: from {describe_costs(job.graph, result.low)}")
    print(f"           to   {describe_costs(job.graph, result.high)}")
    for budget in result.budgets.values():
        limits = ", ".join(show_cost(limit.kind, limit.target) for limit in budget.limits)
        if config.within is None:
            print(f"Budget:    at most {limits}")
        else:
            print(f"Budget:    the smallest within {config.within:g}, to be found; {limits} is assumed here")
    print_chosen(job)

    print("\nExpected time")
    wide = max(16, *(len(stage.name) for stage in result.stages))
    for stage in (*result.stages, result.total):
        print(f"  {stage.name:<{wide}}{stage.steps:>8} steps  {show_duration(stage.seconds):>12}")
    if result.images < config.batch:
        print(f"\nThe time was measured with batches of {result.images:,} images and scaled to {config.batch:,}.")
    if result.peak_bytes:
        print(f"\nThe peak memory on the GPU is {result.peak_bytes / 2**30:.1f} GiB.")
    print("\nNothing was trained, and no run was written.")


def print_chosen(job: Job) -> None:
    """The settings that nobody typed, and why."""
    if job.reasons:
        print("\nAutomatic settings")
    for name, reason in job.reasons.items():
        print(f"  --{name.replace('_', '-'):<14}{reason}")


def _slow_down(stages: Sequence[Stage], pace: float, remedy: str) -> list[Stage]:
    """Let no stage be faster than the loader, which takes `pace` seconds for a batch; tell the user what helps."""
    slowed = [stage.name for stage in stages if stage.seconds < pace * stage.steps]
    if slowed and remedy:
        log(f"The loader takes {1000 * pace:.0f} ms for a batch, which slows down {', '.join(slowed)}: {remedy}.")
    return [stage._replace(seconds=max(stage.seconds, pace * stage.steps)) for stage in stages]


def loader_pace(loader: Any, device: torch.device) -> tuple[float, str]:
    """Measure the seconds that the loader takes for a batch of image files, and say what would help; 0 for arrays."""
    if not hasattr(loader, "workers"):
        return 0.0, ""
    times: list[float] = []
    for _ in itertools.islice(loader, 2 * _STEPS):
        synchronize(device)
        times.append(time.perf_counter())
    times = times[(len(times) - 1) // 2 :]  # the first ones were made ahead
    pace = (times[-1] - times[0]) / max(1, len(times) - 1)
    cores = core_count()
    if loader.workers < cores:
        return pace, f"use --workers {cores}"
    if loader.store:
        return pace, "it needs more cores"
    return pace, "scale the files down until they fit into a quarter of the memory"


def measured_batch(batch: int, sample: Sequence[int], device: torch.device) -> int:
    """Choose how many images the measured batches have: on a GPU as many as the run, on a CPU only a few.

    On a CPU a whole batch may not fit into the memory, and the time of a step is proportional to its images. On a GPU
    the time is not, and the peak memory is part of the forecast.
    """
    if device.type != "cpu":
        return batch
    return min(batch, max(2, _MEASURED // math.prod(sample)))


def forecast(job: Job, budgets: Mapping[str, Budget], images: int) -> list[Stage]:
    """Forecast the stages of a run by running a few steps of copies of the network and of its supernet.

    images: the size of the measured batches. Their time is scaled to the batch size of the run.
    """
    config = job.config
    graph = job.graph
    search = job.search
    loader = with_batch_size(job.loaders.search, images)
    batches = list(itertools.islice(loader, _STEPS))
    silent = Runtime(progress=False)

    def seconds_per_step(run: Callable[[list[Any]], object]) -> float:
        """Time of a step of the run: the time of several steps minus that of one; the first run is a warm-up."""
        scale = config.batch / images
        times: list[float] = []
        for part in (batches[:1], batches[:1], 2 * batches):
            if len(times) == 2 and times[1] > _SLOW:
                return scale * times[1]
            begin = time.perf_counter()
            run(part)
            synchronize(device_of(job.model))
            times.append(time.perf_counter() - begin)
        return scale * max(0.0, times[2] - times[1]) / (2 * len(batches) - 1)

    def train_unpruned(part: list[Any]) -> None:
        one_epoch = replace(job.train, epochs=1, warmup_epochs=0)
        run_training(cut(job.model, graph, graph.full), part, one_epoch, runtime=silent)

    def search_both_stages(part: list[Any]) -> None:
        one_epoch = replace(search, epochs=1, warmup=0, accumulate=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SearchWarning)  # so few steps need not reach the budget
            run_search(copy.deepcopy(net), part, one_epoch, runtime=silent)

    net = Supernet(job.model, graph, search.groups, search.align)
    full_step = seconds_per_step(train_unpruned)
    stages: list[Stage] = []
    for phase in phases(_planned(job, budgets), job.test)[:-1]:  # without the tests
        seconds = phase.steps * phase.work * full_step
        if phase.name == SEARCH:  # how long other methods choose is not measured
            search_step = seconds_per_step(search_both_stages)
            warmup_steps = phase.steps * search.warmup_epochs / search.epochs
            saved = warmup_steps * min(search_step, full_step / 2)  # the alphas do not move in the warm-up
            seconds = search.accumulate * (phase.steps * search_step - saved)
        stages.append(Stage(phase.name, phase.steps, seconds))
    return stages


def _planned(job: Job, budgets: Mapping[str, Budget]) -> PruneJob:
    """What `prune` would do, as far as it is known before anything has run."""
    config = job.config
    teacher = job.chosen_teacher
    if teacher == AUTO:
        teacher = None
        if config.retrain in (Retrain.FINETUNE, Retrain.SCRATCH):
            teacher = UNPRUNED
            if job.trained:
                teacher = job.model
    baselines = frozenset[str]()
    if config.baselines:
        baselines = other_networks(frozenset([UNPRUNED, UNIFORM]), config.method)
    return PruneJob(
        model=job.model,
        graph=job.graph,
        budgets=budgets,
        baselines=baselines,
        method=config.method,
        search=job.search,
        retraining=Retraining(config=job.train, kind=config.retrain, teacher=teacher),
        loaders=job.loaders,
        within=config.within,
    )
