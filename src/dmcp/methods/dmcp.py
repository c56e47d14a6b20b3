"""Our own: Differentiable Markov Channel Pruning (Guo, Wang, Li, Yan, 2020), by expected or by direct sampling.

It differs from the authors' code in what DESIGN.md and docs/paper_map.md say; the learning rate of the search follows
the recipe of the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dmcp import sampling
from dmcp.batches import generator
from dmcp.errors import BudgetError, TrainingError
from dmcp.methods.problem import FILLED, Choice, Problem, samples_of
from dmcp.pruning import SEARCH
from dmcp.searching.search import search
from dmcp.searching.searches import SearchConfig, SearchResult
from dmcp.supernet import Supernet

_DRAW = 11  # what the random numbers are for


@dataclass(frozen=True, kw_only=True)
class DmcpConfig:
    """Settings of a search inside a comparison."""

    epochs: int = 30  # passes over the data, the warm-up among them
    groups: int = 10  # groups that each space is divided into
    lr_share: float = 0.5  # of the recipe's learning rate: a step sums the gradients of several sub-networks
    more: Mapping[str, Any] = field(default_factory=dict)  # other settings of SearchConfig, by name
    hold_out: bool = False  # whether the alphas learn by the problem's held-out images, and the weights by the others

    def __post_init__(self) -> None:
        if not self.lr_share > 0:
            raise TrainingError(f"lr_share must be above 0, not {self.lr_share}.")
        self.search_config("50%")

    def search_config(self, budget: Any, recipe: Any = None, **known: Any) -> SearchConfig:
        """The whole settings of the search."""
        if recipe is not None:
            reference = known.setdefault("reference_batch", 1024)
            lr = self.lr_share * recipe.lr * reference / (recipe.reference_batch or reference)
            known |= {"lr": lr, "min_lr": lr / 10, "weight_decay": recipe.weight_decay}
            known |= {"label_smoothing": recipe.label_smoothing}
        try:
            return SearchConfig(**known | {"budget": budget, "epochs": self.epochs, "groups": self.groups, **self.more})
        except TypeError as error:
            raise TrainingError(f"more: there is no such setting of a search: {error}.") from None


def find(problem: Problem, config: DmcpConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Search the alphas, then take the expected widths."""
    known: dict[str, Any] = {"seed": problem.seed, "align": problem.align}
    if problem.recipe.reference_batch is None:  # learning rates that are never scaled
        known["reference_batch"] = samples_of(problem.loader) // len(problem.loader)
    settings = config.search_config(problem.budget, problem.recipe, **known)
    net = Supernet(problem.model, problem.graph, settings.groups, settings.align)
    if net.floor != problem.floor and not settings.smallest:  # other groups than those of the comparison
        settings = replace(settings, smallest=dict(problem.floor))
    if problem.ceiling and not settings.largest:
        settings = replace(settings, largest=dict(problem.ceiling))
    if state is not None:
        net.model.load_state_dict(dict(state))
    found = search(
        net,
        problem.loader,
        settings,
        problem.loss,
        problem.held if config.hold_out else None,
        on_record=lambda record: problem.tell(SEARCH, record),
        engine=problem.engine,
        keeper=problem.keep and problem.keep(SEARCH),
    )
    problem.tell(SEARCH, found)
    widths = sampling.expected(replace(found, tolerance=FILLED))
    passes = samples_of(problem.loader) * _passes(settings)
    return Choice(widths=widths, kept=widths, model=net.model, sample_passes=passes)


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """Settings of direct sampling from a search that is done."""

    number: int = 0  # which of the structures, in the order in which they are drawn

    def __post_init__(self) -> None:
        if type(self.number) is not int or self.number < 0:
            raise TrainingError(f"number must be an int of at least 0, not {self.number!r}.")


def draw(problem: Problem, config: DrawConfig, found: SearchResult | None = None) -> Choice:
    """Direct sampling from a search that is done: one structure inside the budget, another one for each seed."""
    if not isinstance(found, SearchResult):
        raise TrainingError(
            "dmcp-direct draws from a search that is done: give its SearchResult (of dmcp.search) as found=..."
        )
    number = config.number
    drawn = sampling.direct(replace(found, tolerance=FILLED), number + 1, generator(problem.seed, _DRAW))
    if len(drawn) <= number:
        raise BudgetError(
            f"The chains hold no more than {len(drawn)} different structures inside the budget: there is none with "
            f"the number {number}; draw fewer."
        )
    return Choice(widths=drawn[number], kept=drawn[number])


def _passes(settings: SearchConfig) -> int:
    """Networks that each sample is run through."""
    trained = settings.epochs if settings.train_weights else settings.warmup_epochs
    moved = settings.epochs - settings.warmup_epochs if settings.task_loss else 0
    return trained * (2 + settings.subnets) + moved
