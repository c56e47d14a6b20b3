"""Filters near the geometric median go, since the others can stand in for them (He, Liu, Wang, Hu, Yang, 2019).

As in soft filter pruning (see sfp), but the channels that are set to zero after each epoch are those with the smallest
sum of Euclidean distances to all other filters of their space: not the small ones, but the ones that are most alike.

It differs from the paper in this: only the distances decide, where the authors also try a mixture in which part of the
channels goes by its norm; tied layers are compared by all of their filters as if they were one long filter; and what is
said of sfp holds here, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dmcp.methods.problem import Choice, Problem
from dmcp.methods.sfp import SoftConfig, prune_softly

STAGE = "fpgm"  # what the progress of the training is told as


def find(problem: Problem, config: SoftConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Train the network while the channels that others can stand in for are set to zero again and again."""
    return prune_softly(problem, STAGE, distances, config, state)


def distances(filters: Tensor) -> Tensor:
    """Summed distance of each filter to all others; least near the geometric median. (size, n) -> (size,)"""
    return torch.cdist(filters, filters).sum(dim=1)
