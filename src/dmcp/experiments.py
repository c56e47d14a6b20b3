"""The paper's experiments: each is a function that returns arms, which are compared with all else the same.

The arm of the usual settings at half of the MACs is the same cells in all of them, and they are run only once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dmcp.budget import parse
from dmcp.cells import COPY, RECOVER, TIME, is_done
from dmcp.comparing import Comparison, Task, cell_name, plan_cell, state_of
from dmcp.errors import DmcpError
from dmcp.graph import ChannelGraph
from dmcp.methods.dmcp import DmcpConfig
from dmcp.plans import Cell
from dmcp.pruning import UNPRUNED
from dmcp.runs import read_json
from dmcp.sandwich import Draw
from dmcp.searches import Init, SearchConfig

HALF = "50%"  # the budget of all experiments but main
BUDGETS = (HALF, "30%", "70%", "15%")  # of main, the most wanted first
DRAWS = 5  # networks that are drawn from one search
_FAST, _USUAL = 5.0, 0.5  # learning rates of the alphas in recover: see docs/paper_map.md; and that of a search


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of an experiment: a cell for each seed."""

    label: str  # its row in the table; arms of one label share a row
    name: str  # of its cells' folders, before budget and seed
    method: str  # see methods and cells; "" for the unpruned network
    budget: str = ""  # empty: all of the network
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method, where they are not the study's
    model_args: tuple[str, ...] = ()  # besides those of the study
    uses: Arm | None = None  # whose cell it starts from
    uses_seed: int | None = None  # the seed of that cell; None: its own
    seeds: tuple[int, ...] | None = None  # of the study's; None: all
    own: bool = True  # whether its network is also trained the method's own way, where it has one


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is the same in all experiments on one network."""

    common: Comparison  # the protocol and the seeds; its methods and budgets are those of main
    graph: ChannelGraph
    wider: tuple[str, ...] = ("width=24",)  # arguments that make the unpruned network 1.5 times as wide

    @property
    def search(self) -> SearchConfig:
        """The usual search."""
        return DmcpConfig(**self.common.settings.get("dmcp", {})).search_config(HALF)


Experiment = Callable[[Study], list[Arm]]


def _dmcp(label: str, budget: str = HALF, seeds: tuple[int, ...] | None = None) -> Arm:
    """The reference of every ablation."""
    return Arm(label=label, name="dmcp", method="dmcp", budget=budget, seeds=seeds)


def _variant(label: str, name: str, uses: Arm | None = None, **settings: Any) -> Arm:
    """The reference with some settings changed; trained from scratch only."""
    return Arm(label=label, name=f"dmcp-{name}", method="dmcp", budget=HALF, settings=settings, uses=uses, own=False)


_TRAINED = Arm(label=UNPRUNED, name=UNPRUNED, method="")


def main(it: Study) -> list[Arm]:
    """Table 6 and figure 1: DMCP, its slimmable training, uniform and random widths at several budgets."""
    arms = [_TRAINED]
    for budget in it.common.budgets:
        arms += [
            Arm(label=f"{name} at {budget}", name=name, method=name, budget=budget)
            for name in ("dmcp", "uniform", "random")
        ]
    return arms


def sampling(it: Study) -> list[Arm]:
    """Table 1: expected sampling against networks drawn from the same search."""
    searched = _dmcp("expected sampling")
    drawn = Arm(label="direct sampling", name="dmcp-direct", method="dmcp-direct", budget=HALF, uses=searched)
    more = [replace(drawn, name=f"dmcp-direct{n}", settings={"number": n}) for n in range(1, DRAWS)]
    return [searched, drawn, *more]


def scale(it: Study) -> list[Arm]:
    """Table 2 and figure 5: an unpruned network 1.5 times as wide, pruned to the same MACs."""
    target = parse(HALF, it.graph).limits[0].target
    wide = replace(_variant("unpruned network 1.5x", "wide"), model_args=it.wider, budget=str(target))
    return [_dmcp("unpruned network 1.0x"), wide]


def warmup(it: Study) -> list[Arm]:
    """Table 3: as many epochs with and without a warm-up."""
    return [_dmcp("with warm-up"), _variant("without warm-up", "cold", more={"warmup": 0.0})]


def sandwich(it: Study) -> list[Arm]:
    """Table 4: the original rule has one ratio for all layers, the variant draws each layer's from the alphas."""
    original = {"draw": Draw.SANDWICH.value, "warmup_draw": Draw.SANDWICH.value}
    return [_dmcp("variant sandwich rule"), _variant("original sandwich rule", "sandwich", more=original)]


def scheme(it: Study) -> list[Arm]:
    """Table 5: what moves after the same warm-up.

    Alphas that see the budget alone see no weights, so they need no warm-up. Where they start is then all that they
    know: at the budget they stay, which are uniform widths, so they also start at random as in the paper.
    """
    frozen = {"train_weights": False}
    rest = it.search.epochs - it.search.warmup_epochs
    blind = frozen | {"task_loss": False, "warmup": 0.0}
    scattered = blind | {"init": Init.RANDOM.value}
    return [
        _variant("alphas by the budget, from random ones", "budget-random", epochs=rest, more=scattered),
        _variant("alphas by the budget", "budget-only", epochs=rest, more=blind),
        _variant("alphas by budget and task", "frozen", more=frozen),
        _dmcp("alphas by budget and task, and weights"),
    ]


def recover(it: Study) -> list[Arm]:
    """Figure 4: a trained and frozen network, random alphas, the task loss alone.

    Around 0 they keep 2 to 4 % of the MACs at first, too little to find back from in most seeds.
    """
    epochs = max(1, it.search.epochs // 3)
    ways = {
        "alphas around 1, ten times the rate of a search": ("recover", {"mean": 1.0, "alpha_lr": _FAST}),
        "alphas around 1, the rate of a search": ("recover-slowly", {"mean": 1.0, "alpha_lr": _USUAL}),
        "alphas around 0, ten times the rate": ("recover-low", {"mean": 0.0, "alpha_lr": _FAST}),
        "wrong labels, alphas around 1, ten times the rate": (
            "recover-wrong",
            {"mean": 1.0, "alpha_lr": _FAST, "wrong_labels": True},
        ),
    }
    return [
        Arm(label=label, name=name, method=RECOVER, settings={"epochs": epochs} | more, uses=_TRAINED)
        for label, (name, more) in ways.items()
    ]


def pretrained(it: Study) -> list[Arm]:
    """Appendix B: the trained unpruned network in place of the warm-up, then as many epochs as after one."""
    rest: dict[str, Any] = {"uses": _TRAINED, "epochs": it.search.epochs - it.search.warmup_epochs}
    return [
        _dmcp("warm-up"),
        _variant("pre-trained", "pretrained", **rest, more={"warmup": 0.0}),
        _variant("pre-trained, channels sorted", "sorted", **rest, more={"warmup": 0.0, "sort": True}),
    ]


def bernoulli(it: Study) -> list[Arm]:
    """Appendix C: each group kept or dropped by itself."""
    return [_dmcp("Markov chain"), _variant("independent Bernoulli", "bernoulli", more={"independent": True})]


def distribution(it: Study) -> list[Arm]:
    """Figures 6 and 7: structures drawn from the usual searches."""
    return [_dmcp("usual search")]


def extra(it: Study) -> list[Arm]:
    """What the paper does not have: starts of the alphas, images of their own, and which seed matters more."""
    first, *rest = it.common.seeds
    usual = _dmcp("alphas start at the budget, see the same images")
    starts = [(Init.ZERO, "alphas start at zero"), (Init.RANDOM, "alphas start at random")]
    arms = [usual, *(_variant(label, f"init-{way}", more={"init": way.value}) for way, label in starts)]
    arms.append(_variant("alphas see held-out images", "held-out", hold_out=True))
    trainings, searches = f"one search (seed {first}), all training seeds", f"all searches, one training seed ({first})"
    again = Arm(label=trainings, name=f"dmcp-search{first}", method=COPY, budget=HALF, uses=usual, uses_seed=first)
    arms += [_dmcp(trainings, seeds=(first,)), replace(again, seeds=tuple(rest))]
    others = [replace(again, label=searches, name=f"dmcp-search{n}", uses_seed=n, seeds=(first,)) for n in rest]
    return [*arms, _dmcp(searches, seeds=(first,)), *others]


EXPERIMENTS: dict[str, Experiment] = {  # as people type them, the most wanted first
    "main": main,
    "sampling": sampling,
    "warmup": warmup,
    "sandwich": sandwich,
    "scheme": scheme,
    "bernoulli": bernoulli,
    "pretrained": pretrained,
    "scale": scale,
    "recover": recover,
    "distribution": distribution,
    "extra": extra,
}


def check_experiment(name: str) -> None:
    """Refuse a name that no experiment has."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(EXPERIMENTS)}, or all."
        raise DmcpError(f"There is no experiment {name!r}: {hint}")


# how to do them again


def command(it: Study, name: str) -> list[str]:
    """What makes an experiment again, the data by the last part of their path; folders are left to the reader."""
    common, job, train, engine = it.common, it.common.job, it.common.train, it.common.engine
    told: list[tuple[str, Any]] = [("model", job.model), *(("model-args", text) for text in job.model_args)]
    told += [("data", Path(job.data).name), ("epochs", train.epochs), ("search-epochs", it.search.epochs)]
    told += [("batch", job.batch), ("lr", train.lr), ("weight-decay", train.weight_decay)]
    told += [("seeds", len(common.seeds)), *([("seed", common.seeds[0])] if common.seeds[0] else [])]
    told += [("budget", text) for text in common.budgets if name == "main"]
    told += [("wider", text) for text in it.wider if name == "scale"]
    told += [(key, text) for key, text in (("device", job.device), ("precision", engine.precision)) if text]
    words = [word for key, value in told for word in (f"--{key}", str(value))]
    switches = {"compile": engine.compile, "graphs": engine.graphs, "kernels": engine.kernels}
    words += [f"--{'' if on else 'no-'}{key}" for key, on in switches.items() if on is not None]
    return ["dmcp", "paper", name, *words, *(["--deterministic"] if engine.deterministic else [])]


# from arms to cells


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
        for arm, seed, _ in cells_of(it, EXPERIMENTS[name](it)):
            _add(it, arm, seed, found)
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
    job = replace(it.common.job, model_args=(*it.common.job.model_args, *arm.model_args))
    cell = Cell(method=arm.method, settings=dict(arm.settings), uses=uses, own=arm.own)
    plan = plan_cell(replace(it.common, job=job), seed, cell, arm.budget or "100%")
    task = Task(cell_name(arm.name, seed, arm.budget), plan, (uses,) if uses else ())
    assert found.setdefault(task.name, task) == task, task.name
    return task.name


# how far they are


@dataclass(frozen=True)
class Progress:
    """How far a cell is."""

    name: str
    state: str  # done, begun, missing, or begun with other settings
    seconds: float | None  # that it took, or that it may take; None: nothing like it is done


def progress(tasks: Sequence[Task], folder: Path) -> list[Progress]:
    """How far the cells are; those that are not done may take as long as others of their kind did."""
    took: dict[str, list[float]] = {}
    for task in tasks:
        if is_done(folder / task.name) and (folder / task.name / TIME).exists():
            took.setdefault(_kind(task), []).append(float(read_json(folder / task.name / TIME)["seconds"]))
    found: list[Progress] = []
    for task in tasks:
        state, alike = state_of(task, folder), took.get(_kind(task))
        seconds = sum(alike) / len(alike) if alike else None
        if state == "done":
            path = folder / task.name / TIME
            seconds = float(read_json(path)["seconds"]) if path.exists() else None
        found.append(Progress(task.name, state, seconds))
    return found


def _kind(task: Task) -> str:
    """What cells that take about as long have in common."""
    cell = task.plan.cell
    assert cell is not None
    more = cell.settings.get("epochs"), dict(cell.settings.get("more", {})).get("train_weights", True)
    return repr((cell.method, cell.prepares, cell.own, task.plan.job.model_args, *more))
