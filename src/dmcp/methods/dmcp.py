"""Our own: Differentiable Markov Channel Pruning (Guo, Wang, Li, Yan, 2020), by expected or by direct sampling.

It differs from the authors' code in what DESIGN.md and docs/paper_map.md say; the learning rate of the search follows
the recipe of the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dmcp import sampling
from dmcp.batches import generator
from dmcp.errors import TrainingError
from dmcp.methods.problem import Choice, Problem, samples_of
from dmcp.pruning import SEARCH
from dmcp.searching import SearchConfig, SearchResult, search
from dmcp.supernet import Supernet

_DRAW = 11  # what the random numbers are for


@dataclass(frozen=True, kw_only=True)
class DmcpConfig:
    """Settings of a search inside a comparison."""

    epochs: int = 30  # passes over the data, the warm-up among them
    groups: int = 10  # groups that each space is divided into
    lr_share: float = 0.5  # of the recipe's learning rate: a step sums the gradients of several sub-networks
    more: Mapping[str, Any] = field(default_factory=dict)  # other settings of SearchConfig, by name

    def __post_init__(self) -> None:
        if not self.lr_share > 0:
            raise TrainingError(f"lr_share must be above 0, not {self.lr_share}.")
        self.search_config("50%")

    def search_config(self, budget: Any, recipe: Any = None, **known: Any) -> SearchConfig:
        """The whole settings of the search."""
        if recipe is not None:
            lr = self.lr_share * recipe.lr * 1024 / (recipe.reference_batch or 1024)
            known |= {"lr": lr, "min_lr": lr / 10, "weight_decay": recipe.weight_decay}
            known |= {"label_smoothing": recipe.label_smoothing}
        try:
            return SearchConfig(**known | {"budget": budget, "epochs": self.epochs, "groups": self.groups, **self.more})
        except TypeError as error:
            raise TrainingError(f"more: there is no such setting of a search: {error}.") from None


def find(problem: Problem, config: DmcpConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Search the alphas, then take the expected widths."""
    settings = config.search_config(problem.budget, problem.recipe, seed=problem.seed, align=problem.align)
    net = Supernet(problem.model, problem.graph, settings.groups, settings.align)
    if state is not None:
        net.model.load_state_dict(dict(state))
    found = search(
        net,
        problem.loader,
        settings,
        problem.loss,
        on_record=lambda record: problem.tell(SEARCH, record),
        engine=problem.engine,
        keeper=problem.keep and problem.keep(SEARCH),
    )
    problem.tell(SEARCH, found)
    widths = sampling.expected(found)
    passes = samples_of(problem.loader) * _passes(settings)
    return Choice(widths=widths, kept=widths, model=net.model, sample_passes=passes)


def draw(problem: Problem, found: SearchResult) -> Choice:
    """Direct sampling from a search that is done: one structure inside the budget, another one for each seed."""
    widths = sampling.direct(found, 1, generator(problem.seed, _DRAW))[0]
    return Choice(widths=widths, kept=widths)


def _passes(settings: SearchConfig) -> int:
    """Networks that each sample is run through."""
    trained = settings.epochs if settings.train_weights else settings.warmup_epochs
    moved = settings.epochs - settings.warmup_epochs if settings.task_loss else 0
    return trained * (2 + settings.subnets) + moved
