"""Widths by the scores of channels, and the choice between them and uniform ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from nets import same, state
from planted import planted_problem
from short_runs import traced_residual

import dmcp
from dmcp.compare.problem import Choice, MethodConfig, Problem
from dmcp.compare.ranking import find_sensitivity
from dmcp.searching.allocation import output_error, widths_by_scores
from dmcp.searching.bounds import allowed_widths
from dmcp.searching.rounding import FILLED
from dmcp.tracing.widths import Widths

BUDGETS = ["50%", "params:40%", "traffic:70%", "60%,params:50%"]


def by_scores(scores: dict[str, torch.Tensor], budget: str, **bounds: Any) -> tuple[Widths, Widths]:
    """Widths by these scores, and uniform ones."""
    _, graph = traced_residual()
    even = dmcp.uniform(graph, budget, align=1, **bounds)
    allowed = allowed_widths(graph, bounds.get("min_channels"), bounds.get("max_channels"), 1)
    return widths_by_scores(graph, dmcp.parse_budget(budget, graph), scores, even, allowed, FILLED), even


@functools.cache
def equal_scores() -> dict[str, torch.Tensor]:
    return {space.name: torch.ones(space.size) for space in traced_residual()[1].spaces}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_space_with_larger_scores_keeps_more(budget: str) -> None:
    _, graph = traced_residual()
    moved = 0
    for space in graph.spaces:
        scores = equal_scores() | {space.name: torch.full((space.size,), 1e4)}
        widths, _ = by_scores(scores, budget)
        scores[space.name] = torch.full((space.size,), 1e-4)
        narrow = by_scores(scores, budget)[0][space.name]
        assert narrow <= widths[space.name]
        moved += narrow < widths[space.name]
        for limit in dmcp.parse_budget(budget, graph).limits:
            assert graph.cost(limit.kind, widths) <= limit.target
    assert moved >= 3  # of four: one may be needed whole to use the budget


def test_bounds_are_kept_and_a_unit_of_the_scores_says_nothing() -> None:
    _, graph = traced_residual()
    random = torch.Generator().manual_seed(0)
    scores = {space.name: torch.rand(space.size, generator=random) for space in graph.spaces}
    widths, even = by_scores(scores, "50%")
    assert by_scores({name: 1e-12 * score for name, score in scores.items()}, "50%")[0] == widths
    fixed = {"min_channels": dict(even), "max_channels": dict(even)}
    assert by_scores(scores, "50%", **fixed)[0] == even
    zeros = {name: torch.zeros_like(score) for name, score in scores.items()}
    assert graph.macs(by_scores(zeros, "50%")[0]) <= graph.macs() // 2


def test_a_copy_has_no_error_and_a_smaller_network_a_larger_one() -> None:
    model, graph = traced_residual()
    random = torch.Generator().manual_seed(0)
    batches = [(torch.rand(20, *graph.input_shape, generator=random),) for _ in range(2)]
    model = dmcp.cut(model, graph, graph.full)
    dmcp.recalibrate(model, [(torch.cat([x for (x,) in batches]),)])
    before = state(model)

    def error(share: str) -> float:
        widths = dmcp.uniform(graph, share)
        return output_error(dmcp.cut(model, graph, widths, by="l2"), model, graph, batches)

    assert output_error(dmcp.cut(model, graph, graph.full), model, graph, batches) < 1e-2  # other batches calibrate
    assert error("90%") < error("30%")
    assert same(before, state(model))


class Found(torch.nn.Module):
    """A detector: it gives the places with large numbers only, and their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3)
        self.last = torch.nn.Conv2d(8, 1, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.last(torch.relu(self.first(x))).flatten()
        return {"scores": scores[scores > scores.mean()], "indices": (scores > scores.mean()).nonzero()}


def test_outputs_of_other_shapes_cannot_be_compared() -> None:
    torch.manual_seed(0)
    model = Found()
    batches = [(torch.randn(8, 3, 9, 9),)]
    graph = traced_residual()[1]  # says only how many samples fit
    other = Found()
    assert output_error(other, model, graph, batches) == float("inf")
    assert output_error(model, model, graph, batches) == 0


@pytest.mark.parametrize("worse", [True, False])
def test_the_nearer_outputs_decide(worse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = planted_problem(epochs=6)
    other = problem.graph.widths({"needed": 2, "useless": 6} if worse else {"needed": 6, "useless": 2})
    monkeypatch.setattr(Problem, "by_scores", lambda *_: other)
    monkeypatch.setattr(Problem, "uniform", lambda *_: problem.graph.widths({"needed": 4, "useless": 4}))
    model = dmcp.cut(problem.model, problem.graph, problem.graph.full)
    dmcp.train(model, problem.loader, problem.recipe)
    choice: Choice = find_sensitivity(problem, MethodConfig(), model.state_dict())
    assert (choice.widths == other) is not worse
