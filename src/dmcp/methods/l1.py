"""Weak filters go: those with the smallest sum of absolute weights (Li, Kadav, Durdanovic, Samet, Graf, 2017).

`find` is given a trained network. All spaces get one ratio, which the budget decides, and in each of them the channels
whose filters have the largest L1 norm stay. Nothing is trained: the caller fine-tunes what is cut out.

It differs from the paper in this: there the ratio of each stage of a network is set by hand from how much that stage
suffers, and layers that suffer much are left alone; here one ratio is for all, and the budget is met exactly. Where
layers share a residual stream, the paper ranks by the filters of the shortcut alone; here by the filters of all layers
that write the stream, as if they were one long filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dmcp.errors import TrainingError
from dmcp.filters import magnitude, strongest
from dmcp.methods.problem import Choice, Problem, loaded


@dataclass(frozen=True, kw_only=True)
class L1Config:
    """Settings of the ranking by norms."""

    power: int = 1  # of the weights that are summed: 1 is the paper's L1 norm, 2 ranks by the L2 norm

    def __post_init__(self) -> None:
        if type(self.power) is not int or self.power not in (1, 2):
            raise TrainingError(f"power must be 1 (L1 norm) or 2 (L2 norm), not {self.power!r}.")


def find(problem: Problem, config: L1Config, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Keep the channels with the largest filters, the same share of every space."""
    if state is None:
        raise TrainingError("The L1 method ranks the filters of a trained network: give its state dict as state=...")
    model = loaded(problem, state)
    widths = problem.uniform()
    kept = {
        space.name: strongest(magnitude(model, problem.graph, space, config.power), widths[space.name])
        for space in problem.graph.spaces
    }
    return Choice(widths=widths, kept=kept, model=model)
