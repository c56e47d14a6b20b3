"""Rounding into a budget, against all allowed widths of small networks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from nets import Chain, Depthwise, Residual, traced
from torch import Tensor

from dmcp.errors import BudgetError
from dmcp.searching.bounds import allowed_widths
from dmcp.searching.budget import parse_budget, spent_shares
from dmcp.searching.rounding import FILLED, TOLERANCE, round_to_budget


def all_widths(table: Tensor, last: Tensor) -> Tensor:
    """(N, S)"""
    rows = [row[: count + 1] for row, count in zip(table.tolist(), last.tolist(), strict=True)]
    return torch.tensor(list(itertools.product(*rows)))


@pytest.mark.parametrize("toy", [Chain, Residual, Depthwise], ids=lambda toy: toy.__name__)
@pytest.mark.parametrize("align", [1, 4])
def test_the_share_that_must_be_used_is_used_where_any_widths_do(toy: Any, align: int) -> None:
    """Where no widths do, those that use the most are taken."""
    _, graph = traced(toy)
    allowed = allowed_widths(graph, None, None, align)
    every = all_widths(allowed.table, allowed.last)
    dice = random.Random(0)
    reached = 0
    for number in range(30):
        share = dice.uniform(0.15, 0.9)
        budget = parse_budget(f"{share:.1%}" if number % 2 else f"{share:.1%},params:{share:.1%}", graph)
        wish = torch.tensor([dice.uniform(0.1, 1) * space.size for space in graph.spaces], dtype=torch.float64)
        shares = spent_shares(budget, graph, every).amax(dim=1)
        inside = shares[shares <= 1]
        if not len(inside):
            with pytest.raises(BudgetError):
                round_to_budget(graph, budget, wish, allowed, FILLED)
            continue
        widths = round_to_budget(graph, budget, wish, allowed, FILLED, even=number % 3 == 0)
        assert (every == widths.tensor()).all(dim=1).any()
        used = spent_shares(budget, graph, widths.tensor()[None]).max().item()
        assert min(TOLERANCE, inside.max().item()) <= used <= 1
        reached += 1
    assert reached > 10


def test_a_wish_that_uses_the_budget_is_only_rounded() -> None:
    _, graph = traced(Residual)
    allowed = allowed_widths(graph, None, None, 1)
    wish = graph.full.tensor().double() * 0.7
    rounded = graph.widths(allowed.widths(allowed.nearest(wish)))
    budget = parse_budget(graph.macs(rounded), graph)
    assert round_to_budget(graph, budget, wish, allowed, FILLED) == rounded
