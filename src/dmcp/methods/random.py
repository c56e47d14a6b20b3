"""Widths drawn at random inside the band of the budget, anew for each seed: what chance alone gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dmcp.batches import generator
from dmcp.methods.problem import FILLED, Choice, Problem
from dmcp.sampling import random_widths

_DRAW = 7  # what the random numbers are for


@dataclass(frozen=True, kw_only=True)
class RandomConfig:
    """There is nothing to set."""


def find(problem: Problem, config: RandomConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """The first of many drawn structures that uses the budget; no data is seen."""
    draw = generator(problem.seed, _DRAW)
    bounds = (problem.floor, problem.align, FILLED, problem.ceiling)
    widths = random_widths(problem.graph, problem.budget, draw, *bounds)
    return Choice(widths=widths, kept=widths)
