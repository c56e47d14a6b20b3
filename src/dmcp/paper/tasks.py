"""From the arms of experiments to their cells: which there are, who needs them, and how to make them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmcp.comparison.cells import COPY
from dmcp.comparison.comparing import Task, cell_name, plan_cell
from dmcp.methods.dmcp import DmcpConfig
from dmcp.paper.arms import Arm, Study
from dmcp.paper.experiments import EXPERIMENTS, WIDER, study_of
from dmcp.running.plans import Cell
from dmcp.training import TrainConfig


def epochs_of(it: Study, arm: Arm) -> dict[str, int]:
    """Passes over the data that an arm's networks took: of search and training, of their start and of their teacher."""
    searched = arm.uses if arm.method == COPY and arm.uses else arm
    found = {"training": int(arm.train.get("epochs", it.common.train.epochs))}
    if searched.method == "dmcp":
        settings = {**it.common.settings.get("dmcp", {}), **searched.settings}
        found = {"search": DmcpConfig(**settings).epochs} | found
        found |= {"start": it.common.train.epochs} if searched.uses else {}
    return found | ({"teacher": it.common.train.epochs} if arm.teacher else {})


def command(it: Study, name: str) -> list[str]:
    """What makes an experiment again, the data by the last part of their path; folders are left to the reader."""
    common, job, train, engine = it.common, it.common.job, it.common.train, it.common.engine
    told: list[tuple[str, Any]] = [("model", job.model), *(("model-args", text) for text in job.model_args)]
    told += [("data", Path(job.data).name), ("epochs", train.epochs), ("search-epochs", it.search.epochs)]
    told += [("batch", job.batch), ("lr", train.lr), ("weight-decay", train.weight_decay)]
    told += [("label-smoothing", train.label_smoothing)] if train.label_smoothing != TrainConfig.label_smoothing else []
    rate = dict(common.settings.get("dmcp", {}).get("more", {})).get("alpha_lr")
    told += [("alpha-lr", rate)] if rate is not None else []
    told += [("seeds", len(common.seeds)), *([("seed", common.seeds[0])] if common.seeds[0] else [])]
    told += [("budget", text) for text in common.budgets if name == "main"]
    told += [("wider", text) for text in it.wider if name in WIDER]
    told += [(key, text) for key, text in (("device", job.device), ("precision", engine.precision)) if text]
    words = [word for key, value in told for word in (f"--{key}", str(value))]
    switches = {key: getattr(engine, key) for key in ("compile", "graphs", "kernels", "pad")}
    words += [f"--{'' if on else 'no-'}{key}" for key, on in switches.items() if on is not None]
    return ["dmcp", "paper", name, *words, *(["--deterministic"] if engine.deterministic else [])]


# the cells


def cells_of(it: Study, arms: Sequence[Arm]) -> list[tuple[Arm, int, str]]:
    """Arm, seed and cell's name of everything in the table, seed by seed."""
    return [
        (arm, seed, cell_name(arm.name, seed, arm.budget))
        for seed in it.common.seeds
        for arm in arms
        if arm.seeds is None or seed in arm.seeds
    ]


def study_tasks(it: Study, names: Sequence[str]) -> list[Task]:
    """All cells of these experiments, one experiment after the other, each cell once and after those that it needs."""
    found: dict[str, Task] = {}
    for name in names:
        own = study_of(it, name)
        for arm, seed, _ in cells_of(own, EXPERIMENTS[name](own)):
            _add(own, arm, seed, found)
    return list(found.values())


def needed_by(it: Study, names: Sequence[str]) -> dict[str, list[str]]:
    """Of each cell the experiments that need it."""
    found: dict[str, list[str]] = {}
    for name in names:
        for task in study_tasks(it, [name]):
            found.setdefault(task.name, []).append(name)
    return found


def _add(it: Study, arm: Arm, seed: int, found: dict[str, Task]) -> str:
    """Put the cell of an arm in, and before it what it starts from; its name."""
    uses = _add(it, arm.uses, seed if arm.uses_seed is None else arm.uses_seed, found) if arm.uses else ""
    teacher = _add(it, arm.teacher, seed, found) if arm.teacher else ""
    job = replace(it.common.job, model_args=(*it.common.job.model_args, *arm.model_args))
    train = replace(it.common.train, **arm.train)
    cell = Cell(
        method=arm.method,
        settings=dict(arm.settings),
        uses=uses,
        own=arm.own,
        teacher=teacher,
        held_out=arm.held_out,
    )
    if arm.held_out and (start := found[uses].plan.cell if uses else None):
        replace(start, held_out=True)  # refused if what it starts from was chosen by these images alone
    plan = plan_cell(replace(it.common, job=job, train=train), seed, cell, arm.budget or "100%")
    task = Task(cell_name(arm.name, seed, arm.budget), plan, tuple(filter(None, (uses, teacher))))
    assert found.setdefault(task.name, task) == task, task.name
    return task.name
