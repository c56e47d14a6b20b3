"""One ratio for all spaces, as large as the budget allows: what every search has to beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dmcp.methods.problem import Choice, Problem


@dataclass(frozen=True, kw_only=True)
class UniformConfig:
    """There is nothing to set."""


def find(problem: Problem, config: UniformConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """The uniform widths; no data is seen."""
    widths = problem.uniform()
    return Choice(widths=widths, kept=widths)
