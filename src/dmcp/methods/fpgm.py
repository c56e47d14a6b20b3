"""Filters near the geometric median go, since the others can stand in for them (He, Liu, Wang, Hu, Yang, 2019).

As in soft filter pruning (see sfp), but the channels that are set to zero after each epoch are those with the smallest
sum of Euclidean distances to all other filters of their space: not the small ones, but the ones that are most alike.

It differs from the paper in this: only the distances decide, where the authors also try a mixture in which part of the
channels goes by its norm; tied layers are compared by all of their filters as if they were one long filter; and what is
said of sfp holds here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dmcp.methods.problem import Choice, Problem
from dmcp.methods.sfp import check_soft, prune_softly

STAGE = "fpgm"  # what the progress of the training is told as


@dataclass(frozen=True, kw_only=True)
class FpgmConfig:
    """Settings of pruning by the geometric median."""

    every: int = 1  # epochs between two times that filters are set to zero; the last epoch always does it
    regrowth: float = 0.01  # share of their gradient that zeroed filters under BatchNorms get; the paper: 1

    def __post_init__(self) -> None:
        check_soft(self.every, self.regrowth)


def find(problem: Problem, config: FpgmConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Train the network while the channels that others can stand in for are set to zero again and again."""
    return prune_softly(problem, STAGE, distances, config.every, config.regrowth, state)


def distances(filters: Tensor) -> Tensor:
    """Summed distance of each filter to all others; least near the geometric median. (size, n) -> (size,)"""
    return torch.cdist(filters, filters).sum(dim=1)
