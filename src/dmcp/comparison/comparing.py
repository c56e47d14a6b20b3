"""Many cells, one table: methods, budgets and seeds under one protocol, each cell only once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dmcp.comparison.cells import BASE
from dmcp.engine import Engine
from dmcp.errors import DmcpError
from dmcp.methods import METHODS, PEERS, Own, Start, find_method, title
from dmcp.pruning import UNPRUNED
from dmcp.running.jobs import Job
from dmcp.running.plans import Cell, Plan
from dmcp.searching.bounds import Bound
from dmcp.searching.searches import SearchConfig
from dmcp.training import TrainConfig

UNIFORM = "uniform"  # what methods of one ratio have the widths of


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods, budgets and seeds, and what is the same for all of them."""

    job: Job
    engine: Engine
    train: TrainConfig  # the final recipe, the same for every network
    budgets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of some methods, by name
    groups: int = 10  # each space keeps at least a group
    align: int = 1  # widths are multiples of this
    smallest: Bound = field(default_factory=dict)  # least channels, as SearchConfig has them
    largest: Bound = field(default_factory=dict)  # and most
    holdout: float = 0.1  # share of the training images that methods choose by; in the final training they are back
    scratch: bool = True  # whether the chosen networks are trained from scratch
    fine_tune_epochs: int = 0  # of methods that fine-tune; 0: not done
    unpruned: bool = True  # whether the unpruned network is in the table, too
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # budgets of some methods; others have all

    def __post_init__(self) -> None:
        for name, given in (("budget", self.budgets), ("method", self.methods), ("seed", self.seeds)):
            if not given or len({*given}) < len(given):
                raise DmcpError(f"Give at least one {name}, and each only once, not {list(given)}.")
        for name in (*self.methods, *self.settings):
            check_method(name)
        for name in self.methods:
            try:
                find_method(name).config(**self.settings.get(name, {}))
            except TypeError as error:
                raise DmcpError(f"{name}: its settings cannot be made: {error}.") from None
        _check_titles(self.methods)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Method and budget of each row but that of the unpruned network."""
        every = itertools.product(self.budgets, self.methods)
        return [(name, budget) for budget, name in every if budget in self.only.get(name, (budget,))]


def check_method(name: str) -> None:
    """Refuse a name that no method has."""
    find_method(name)


def _check_titles(methods: Sequence[str]) -> None:
    """Refuse methods whose cells would have the same folders."""
    known = {*METHODS, *PEERS, UNPRUNED, BASE}
    names = Counter(map(title, methods))
    for name in methods:
        if names[title(name)] > 1 or (name not in known and title(name) in known):
            raise DmcpError(f"There is another {title(name)}, and rows and folders go by name: give yours another one.")


# the cells


@dataclass(frozen=True)
class Task:
    """One cell: its name is that of its folder."""

    name: str
    plan: Plan
    after: tuple[str, ...] = ()  # cells that must be done before


def cell_name(what: str, seed: int, budget: str = "") -> str:
    """dmcp-50%-seed0; a method by its title."""
    place = budget.replace(":", "=").replace(",", "+").replace("/", "-")
    return "-".join([*filter(None, (title(what), place)), f"seed{seed}"])


def tasks(it: Comparison) -> list[Task]:
    """All cells, seed by seed, each after those that it needs."""
    found: dict[str, Task] = {}

    def add(name: str, plan: Plan, after: tuple[str, ...] = ()) -> str:
        found.setdefault(name, Task(name, plan, after))
        return name

    starts = {find_method(name).start for name in it.methods}
    for seed in it.seeds:
        if it.unpruned or Start.TRAINED in starts:
            add(cell_name(UNPRUNED, seed), plan_cell(it, seed, Cell(method="")))
        if Start.HELD in starts:
            add(cell_name(BASE, seed), plan_cell(it, seed, Cell(method=BASE, prepares=True)))
        for name in it.methods:
            if find_method(name).start is Start.PREPARED:
                add(cell_name(name, seed), plan_cell(it, seed, Cell(method=name, prepares=True)))
        for name, budget in itertools.product(it.methods, it.budgets):
            if (name, budget) in it.rows and not _has_nothing_to_train(it, name):
                uses = _needed(it, name, seed, budget, add)
                plan = plan_cell(it, seed, Cell(method=name, uses=uses), budget)
                add(cell_name(name, seed, budget), plan, (uses,) if uses else ())
        if it.scratch and any(map(is_one_ratio, it.methods)):  # trained from scratch they are uniform's networks
            for budget in it.budgets:
                add(cell_name(UNIFORM, seed, budget), plan_cell(it, seed, Cell(method=UNIFORM), budget))
    return list(found.values())


def _has_nothing_to_train(it: Comparison, name: str) -> bool:
    """Whether all that there is of a method is what uniform has."""
    method = find_method(name)
    return it.scratch and method.one_ratio and method.own is Own.FINE_TUNED and not it.fine_tune_epochs


def _needed(it: Comparison, name: str, seed: int, budget: str, add: Any) -> str:
    """The name of the cell that a method starts from, added if need be; empty if it needs none."""
    match find_method(name).start:
        case Start.TRAINED:
            return cell_name(UNPRUNED, seed)
        case Start.HELD:
            return cell_name(BASE, seed)
        case Start.PREPARED:
            return cell_name(name, seed)
        case Start.SEARCHED:
            plan = plan_cell(it, seed, Cell(method="dmcp"), budget)
            return str(add(cell_name("dmcp", seed, budget), plan))
    return ""


def plan_cell(it: Comparison, seed: int, cell: Cell, budget: str = "100%") -> Plan:
    """What a cell is to do, under the protocol of the comparison."""
    usual, own = (dict(settings) for settings in (it.settings.get(cell.method, {}), cell.settings))
    more = {"more": usual["more"] | own["more"]} if "more" in usual and "more" in own else {}
    whole = replace(
        cell,
        settings=usual | own | more,
        holdout=it.holdout,
        scratch=not cell.method or (it.scratch and not is_one_ratio(cell.method)),
        fine_tune_epochs=it.fine_tune_epochs,
    )
    return Plan(
        command="cell",
        job=replace(it.job, seed=seed),
        engine=it.engine,
        search=SearchConfig(
            budget=budget, groups=it.groups, align=it.align, smallest=it.smallest, largest=it.largest, seed=seed
        ),
        train=replace(it.train, seed=seed),
        cell=whole,
    )


def is_one_ratio(name: str) -> bool:
    """Whether a method's widths are those of uniform."""
    return name in METHODS and METHODS[name].one_ratio


def epochs_of(plan: Plan) -> tuple[str, str]:
    """Epochs of a cell: until the widths are known, and of what is trained then, with the method's own way."""
    cell, recipe = plan.cell, plan.train
    assert cell is not None and recipe is not None
    if cell.method in ("", BASE):
        return "", str(recipe.epochs)
    method = find_method(cell.method)
    config = method.config(**cell.settings)
    if cell.prepares:
        return str(getattr(config, "epochs", None) or recipe.epochs), ""
    searched = recipe.epochs if method.own is Own.AS_IT_IS else getattr(config, "epochs", "")
    final = [str(recipe.epochs)] if cell.scratch else []
    if method.own is Own.FINE_TUNED and cell.fine_tune_epochs:
        final.append(f"{cell.fine_tune_epochs} fine-tuned")
    elif method.own is Own.SLIMMABLE:
        final.append(f"{recipe.epochs} slimmable")
    return "" if method.prepare else str(searched), " + ".join(final)
