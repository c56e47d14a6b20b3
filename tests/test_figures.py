"""Figures: every one is written, says true numbers, and leaves matplotlib as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from nets import Chain, Residual, randomise, sample

import dmcp
from dmcp.budget import parse
from dmcp.markov import CHAIN, INDEPENDENT
from dmcp.report import figures
from dmcp.sampling import expected
from dmcp.searching.config import SearchRecord, SearchResult


def found(budget: str = "50%", toy: Any = Residual, alpha: float = 1.0, **changes: Any) -> SearchResult:
    """What a search of four steps, two of them warm-up, could have found."""
    model = randomise(toy(**toy.FULL))
    graph = dmcp.trace(model, sample(toy.SHAPE))
    net = dmcp.Supernet(model, graph, groups=4)
    limits = parse(budget, graph)
    ratios = tuple(0.9 for _ in limits.limits)
    log = tuple(SearchRecord(step, 0, ratios=ratios if step > 1 else None) for step in range(4))
    alphas = torch.full_like(net.alpha, alpha).detach()
    return SearchResult(alphas, net.sizes, graph, limits, 0.95, **({"log": log} | changes))


@pytest.mark.parametrize(
    "budget", [*(pytest.param(it, marks=pytest.mark.slow) for it in ("50%", "params:50%")), "60%,params:60%"]
)
@pytest.mark.parametrize(
    "process", [CHAIN, pytest.param(INDEPENDENT, marks=pytest.mark.slow)], ids=["chain", "independent"]
)
def test_all_figures_are_written_and_the_same_again(budget: str, process: Any, tmp_path: Path) -> None:
    result = found(budget, process=process)
    settings = dict(matplotlib.rcParams)
    paths = figures.draw_all(result, expected(result), tmp_path / "one" / "figures")
    again = figures.draw_all(result, expected(result), tmp_path / "two")
    assert [path.name for path in paths] == ["cost.svg", "widths.svg", "macs.svg", "distribution.svg"]
    for path, copy in zip(paths, again, strict=True):
        assert path.read_text().rstrip().endswith("</svg>") and path.read_bytes() == copy.read_bytes()
    assert dict(matplotlib.rcParams) == settings


def test_the_curve_is_the_log_and_ends_at_the_result() -> None:
    result = found()
    (axes,) = figures.cost_over_time(result).axes
    (line,) = (line for line in axes.get_lines() if str(line.get_label()).startswith("MACs"))
    chances = CHAIN.marginals(result.alphas)
    last = float(result.graph.expected_cost("macs", chances, result.sizes)) / result.budget.limits[0].target
    assert line.get_xydata()[:, 0].tolist() == [2, 3, 4]  # two steps of warm-up have no cost
    assert line.get_xydata()[:, 1].tolist() == pytest.approx([0.9, 0.9, last])


def test_a_result_without_a_log_is_drawn() -> None:
    assert figures.cost_over_time(found(log=())).axes


def test_the_histogram_counts_every_structure() -> None:
    result = found()
    (axes,) = figures.cost_distribution(result, seed=1).axes
    assert sum(bar.get_height() for bar in axes.patches) == figures.STRUCTURES
    label = next(str(line.get_label()) for line in axes.get_lines() if "budget" in str(line.get_label()))
    assert label == f"budget {result.budget.limits[0].target / 1000:.4g}k"


@pytest.mark.parametrize(("alpha", "words"), [(-3.0, "3,000 structures inside"), (30.0, "none is inside")])
def test_only_structures_inside_the_budget_are_shown(alpha: float, words: str) -> None:
    figure = figures.width_distribution(found(alpha=alpha))
    assert words in figure.get_suptitle()
    for axes in figure.axes:
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(1.0)


def test_every_space_is_named_with_its_widths() -> None:
    result = found(toy=Chain)
    widths = expected(result)
    (axes,) = figures.widths_per_space(result, widths).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(widths)
    assert [text.get_text() for text in axes.texts] == [
        f"{widths[space.name]} of {space.size}" for space in result.graph.spaces
    ]


def test_distributions_say_seed_and_which_structures() -> None:
    (axes,) = figures.cost_distribution(found(), 5).axes
    assert axes.get_title().startswith("all of 3,000 structures drawn with seed 5, inside the budget or not")
    told = figures.width_distribution(found(alpha=-3.0), 5).get_suptitle()
    assert "3,000 structures inside the budget, drawn with seed 5" in told


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (381_764, "381.8k"), (40_800_000, "40.8M"), (1.1e9, "1.1G"), (5e12, "5000G")],
)
def test_counts_are_written_as_people_read_them(number: float, text: str) -> None:
    assert figures._count(number) == text
