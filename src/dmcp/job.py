"""The job of prune: what is pruned, to which budgets and how; its identity, and the phases to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Any

from torch import nn

from dmcp.budgets import Budget
from dmcp.defaults import resolve_training
from dmcp.exporting.latency import Latency
from dmcp.exporting.timing import Timer
from dmcp.request import Loaders
from dmcp.retraining import Retraining
from dmcp.runs.records import DMCP, TEACHER, UNIFORM, UNPRUNED
from dmcp.runtime import progress
from dmcp.runtime.batches import Loader, device_of, length_of
from dmcp.runtime.checkpoint import digest_of_loader, plain_settings
from dmcp.runtime.distributed import current
from dmcp.searching.search import SEARCH
from dmcp.settings import Distill, Engine, ResolvedSearchConfig, Retrain, TrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import unwrap
from dmcp.training.loop import Runtime, Task
from dmcp.within import RACES, Race, race_config, race_name

_FORWARD = 1 / 3  # the work of a forward pass, as a share of a training step


@dataclass(frozen=True, kw_only=True, eq=False)
class PruneJob:
    """What is pruned, to which budgets and how: everything is chosen, nothing has run."""

    model: nn.Module
    graph: ChannelGraph
    budgets: Mapping[str, Budget]  # by name
    search: ResolvedSearchConfig
    loaders: Loaders
    method: str = DMCP
    retraining: Retraining = Retraining(config=resolve_training(TrainConfig()), kind=Retrain.NONE)
    baselines: frozenset[str] = frozenset()
    task: Task = Task()
    runtime: Runtime = Runtime()
    timer: Timer | None = None  # measures as the latency table was measured; None where this is not possible
    within: float | None = None  # the loss that is allowed; the budget is then where the search begins

    @property
    def searches(self) -> bool:
        """Whether the method is our search."""
        return self.method == DMCP

    def row(self, kind: str, budget: str) -> str:
        """The name of a row of the table, which names the budget if there are several."""
        return f"{kind} {budget}" if len(self.budgets) > 1 else kind


def resumable(job: PruneJob) -> PruneJob:
    """The same job with checkpoints that refuse to go on with other settings, weights or data.

    Checkpoints that have an identity already keep it.
    """
    checkpointer = job.runtime.checkpointer
    if checkpointer is None or checkpointer.identity:
        return job
    retraining = job.retraining
    teacher = retraining.teacher_network
    table = Latency.of(job.graph)
    distill = job.task.distill
    settings: dict[str, Any] = {
        "search": job.search,
        "train": retraining.config,
        "retrain": retraining.kind,
        "engine": job.runtime.engine or Engine(),
        "method": job.method,
        "budgets": list(job.budgets),
        "within": job.within,
        "baselines": sorted(job.baselines),
        "graph": job.graph.fingerprint,
        "arch_loader": job.loaders.arch is not None,
        "optimizer": job.task.optimizer is not None,
        "distill": distill if isinstance(distill, Distill) else distill is not None,
        "latency": table and table.digest,
        "teacher": retraining.teacher if teacher is None else TEACHER,
    }
    for name, loader in job.loaders.by_name.items():
        settings[f"data of {name}"] = digest_of_loader(loader, current())
    weights = unwrap(job.model).state_dict()
    teacher_weights = None if teacher is None else teacher.state_dict()
    identity = plain_settings(settings, weights, current(), teacher_weights)
    return replace(job, runtime=replace(job.runtime, checkpointer=replace(checkpointer, identity=identity)))


def race_of(job: PruneJob) -> Race:
    """The short training and the held-out images that decide on a budget."""
    loaders = job.loaders
    assert loaders.held_out is not None
    short = race_config(job.retraining.config, loaders.final, loaders.search)
    return Race(
        graph=job.graph,
        retraining=replace(job.retraining, config=short),
        loader=loaders.search,
        held_out=loaders.held_out,
        task=job.task,
        runtime=job.runtime,
    )


# the phases to come


def phases(job: PruneJob, val_loader: Loader) -> list[progress.Phase]:
    """The phases to come, with the work of their steps, in training steps of the unpruned network."""
    return [*_search_phases(job), *_race_phases(job), *_training_phases(job, val_loader)]


def avoidable_search(job: PruneJob, *, trained: bool) -> progress.Avoidable | None:
    """The search, if it runs on a CPU and the weights of the model are good enough to choose channels by."""
    if not job.searches or not trained or device_of(job.model).type != "cpu":
        return None
    return progress.Avoidable(SEARCH, '--method sensitivity (method="sensitivity")')


def _search_phases(job: PruneJob) -> list[progress.Phase]:
    if not job.searches:
        return []
    config = job.search
    steps_per_epoch = -(-length_of(job.loaders.search) // config.accumulate)
    work = 0.75 * (2 + config.subnets) + 0.5  # narrow sub-networks cost less than the unpruned network
    return [progress.Phase(SEARCH, steps_per_epoch * config.epochs, config.accumulate * work)]


def _race_phases(job: PruneJob) -> list[progress.Phase]:
    """The short trainings that decide on a budget: of the unpruned network, and of networks half as large."""
    if job.within is None or job.retraining.kind is Retrain.NONE:
        return []
    race = race_of(job)
    steps = race.retraining.config.epochs * length_of(race.loader)
    work_of_teacher = _work_of_teacher(job.retraining, "")
    races = [progress.Phase(race_name(0), steps, 1.0 + work_of_teacher)]
    for number in range(1, RACES + 1):
        races.append(progress.Phase(race_name(number), steps, 0.5 + work_of_teacher))
    return races


def _training_phases(job: PruneJob, val_loader: Loader) -> list[progress.Phase]:
    retraining = job.retraining
    shares: dict[str, float] = {}  # of the MACs of the unpruned network, to which the work is proportional
    if UNPRUNED in job.baselines or retraining.teacher == UNPRUNED:
        shares[UNPRUNED] = 1.0
    for name, budget in job.budgets.items():
        macs = [limit.target for limit in budget.limits if limit.kind == "macs"]
        share = macs[0] / job.graph.macs() if macs else 0.5
        if UNIFORM in job.baselines:
            shares[job.row(UNIFORM, name)] = share
        shares[job.row(job.method, name)] = share

    to_come: list[progress.Phase] = []
    if retraining.kind is not Retrain.NONE:
        steps = retraining.config.epochs * length_of(job.loaders.final)
        for name, share in shares.items():
            to_come.append(progress.Phase(name, steps, share + _work_of_teacher(retraining, name)))
    to_come.append(progress.Phase("test", length_hint(val_loader) * len(shares), _FORWARD))
    return to_come


def _work_of_teacher(retraining: Retraining, name: str) -> float:
    """The work of the teacher in each training step of a network."""
    if name == UNPRUNED and retraining.teacher_network is None:
        return 0.0  # it is the teacher, or there is none
    if retraining.kind is Retrain.SLIMMABLE:
        return 1.0  # the unpruned network is trained beside the pruned one
    return 0.0 if retraining.teacher is None else _FORWARD
