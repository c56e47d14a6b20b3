"""What a search records in each step, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from dmcp.arguments import checked
from dmcp.budgets import Budget
from dmcp.markov import marginals
from dmcp.runs.records import SearchRecord
from dmcp.runtime.distributed import World, mean_values
from dmcp.searching.bounds import extreme_widths
from dmcp.searching.budget import check_reachable, parse_budget, ratios
from dmcp.tracing.graph import ChannelGraph

_NEAR = 0.9  # how far outside of its band, as a factor, a search may end and count as arrived
_WIDTHS_EVERY = 10  # steps: there may be many spaces, and 100,000 steps


class ArchRecord(NamedTuple):
    """What one step of the alphas saw; still on the device, so that no step waits for the host."""

    task_loss: Tensor | None  # () or None where the task loss does not move the alphas
    budget_loss: Tensor  # ()
    ratios: Tensor  # expected cost over target, per limit. (L,)
    widths: Tensor  # expected ones. (S,)


@dataclass(frozen=True)
class UnreadStep:
    """One step of a search whose losses are still on the device."""

    record: SearchRecord  # without the losses
    samples: int  # of this rank
    weight_losses: Tensor | None
    arch: ArchRecord | None

    def read(self, world: World) -> SearchRecord:
        """The whole record, means over all ranks; waits for the device."""

        def mean(losses: Tensor) -> list[float]:
            return mean_values(losses.reshape(-1), self.samples, world).tolist()

        record = self.record
        if self.weight_losses is not None:
            record = replace(record, weight_losses=tuple(mean(self.weight_losses)))
        if self.arch is not None:
            record = replace(record, budget_loss=self.arch.budget_loss.item(), ratios=tuple(self.arch.ratios.tolist()))
            if self.arch.task_loss is not None:
                record = replace(record, task_loss=mean(self.arch.task_loss)[0])
            if record.step % _WIDTHS_EVERY == 0:
                record = replace(record, widths=tuple(round(width, 2) for width in self.arch.widths.tolist()))
        return record


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The distribution of widths that a search found, and its budget."""

    alphas: Tensor  # (S, G-1)
    sizes: Tensor  # group sizes inside min_channels and max_channels. (S, G)
    graph: ChannelGraph
    budget: Budget
    tolerance: float
    align: int | None = None
    log: tuple[SearchRecord, ...] = ()
    searched: Budget | None = None  # what the ratios of the log are relative to, if not to `budget`

    @checked
    def with_budget(self, budget: int | float | str | Budget) -> SearchResult:
        """The same distribution for another budget: widths are scaled to that, not searched again."""
        new = parse_budget(budget, self.graph)
        check_reachable(new, self.graph, *extreme_widths(self.graph, self.sizes), self.align)
        return self.for_budget(new)

    def for_budget(self, budget: Budget) -> SearchResult:
        """The same, for a budget that was read and checked. The log stays relative to the budget that was searched."""
        return replace(self, budget=budget, searched=self.log_budget)

    @property
    def log_budget(self) -> Budget:
        """The budget that was searched: the ratios of the log are relative to it."""
        return self.searched or self.budget


def expected_shares(result: SearchResult) -> tuple[float, ...]:
    """Expected cost / target of each limit, before any rounding and repair."""
    chances = marginals(result.alphas.double()) * (result.sizes > 0)
    return tuple(ratios(result.budget, result.graph, chances, result.sizes).tolist())


def missed_budget(result: SearchResult) -> str:
    """A warning about a search whose expected cost ended far from its budget, and what helps; else empty."""
    share = max(expected_shares(result))
    if _NEAR * result.tolerance <= share <= 1 / _NEAR:
        return ""
    return (
        f"The search did not reach its budget {result.budget.text!r}: at its end, the expected cost is {share:.1%} "
        "of it. So expected widths are only scaled to the budget, and direct samples may be far from it. Use "
        'init="target" (which starts at the budget), more epochs, a larger alpha_lr or a larger budget_weight.'
    )
