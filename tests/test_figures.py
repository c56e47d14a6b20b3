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
from dmcp.markov import INDEPENDENT
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


def test_all_figures_are_written_and_the_same_again(tmp_path: Path) -> None:
    result = found("60%,params:60%", process=INDEPENDENT)
    settings = dict(matplotlib.rcParams)
    paths = figures.draw_all(result, expected(result), tmp_path / "one" / "figures")
    again = figures.draw_all(result, expected(result), tmp_path / "two")
    assert [path.name for path in paths] == ["cost.svg", "widths.svg", "macs.svg", "distribution.svg"]
    for path, copy in zip(paths, again, strict=True):
        assert path.read_text().rstrip().endswith("</svg>") and path.read_bytes() == copy.read_bytes()
    assert dict(matplotlib.rcParams) == settings


def test_curves_are_the_log() -> None:
    (axes,) = figures.cost_over_time(found().log, ["MACs"], 0.95, [0.97]).axes
    (line,) = (line for line in axes.get_lines() if line.get_label() == "MACs")
    assert line.get_xydata().tolist() == [[2, 0.9], [3, 0.9], [4, 0.97]]  # type: ignore[union-attr]
    (axes,) = figures.losses({"x": {step: float(step % 5) for step in range(1000)}}, "losses").axes
    (line,) = axes.get_lines()
    assert set(line.get_ydata()) == {2.0} and len(line.get_xdata()) == 200  # type: ignore[arg-type]


def test_every_space_is_named_with_its_widths() -> None:
    rows = [("a", 16, 8, 8.5), ("b" * 50, 64, 16, None), ("$c", 3, 3, None)]
    (axes,) = figures.widths_per_space(rows, "widths").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "…" + "b" * 33, "$c"]
    assert [text.get_text() for text in axes.texts] == ["8 of 16", "16 of 64", "3 of 3"]
    assert [bar.get_width() for bar in axes.patches[3:]] == [0.5, 0.25, 1.0]  # type: ignore[attr-defined]


def test_the_histogram_counts_every_sample() -> None:
    result = found(toy=Chain)
    (axes,) = figures.cost_distribution(result, seed=5).axes
    assert sum(bar.get_height() for bar in axes.patches) == figures.SAMPLES  # type: ignore[attr-defined]
    label = next(str(line.get_label()) for line in axes.get_lines() if "budget" in str(line.get_label()))
    assert label == f"budget {result.budget.limits[0].target / 1000:.4g}k"


@pytest.mark.parametrize(("alpha", "words"), [(-3.0, "3,000 samples inside"), (30.0, "none is inside")])
def test_only_samples_inside_the_budget_are_shown(alpha: float, words: str) -> None:
    figure = figures.width_distribution(found(alpha=alpha), 5)
    assert words in figure.get_suptitle() and "seed 5" in figure.get_suptitle()
    for axes in figure.axes:
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(1.0)  # type: ignore[attr-defined]


def test_counts_are_written_as_people_read_them() -> None:
    for number, text in ((0, "0"), (7, "7"), (381_764, "381.8k"), (40_800_000, "40.8M"), (5e12, "5000G")):
        assert figures.amount("macs", number) == text
