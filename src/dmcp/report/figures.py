"""All charts, drawn with matplotlib: those of a search (the paper's figures 6 and 7) and of the page."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dmcp.budgets import COUNT, NAMES, UNITS, show_amount
from dmcp.runs.records import SearchRecord
from dmcp.searching.records import SearchResult
from dmcp.searching.sampling import expected_widths
from dmcp.tracing.widths import Widths
from dmcp.units import show_count

if TYPE_CHECKING:  # functions import matplotlib: it takes half a second, and most commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#24292f"  # color of text and axes; a page has its own
# These colors differ for colour-blind readers (Okabe and Ito), and can be seen on white and on black.
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
PURPLE = "#B86B98"
GREY = "#808080"
COLORS = (BLUE, RED, GREEN, PURPLE, GREY)
_NETWORK_COLORS = {"dmcp": BLUE, "uniform": RED, "unpruned": GREY}  # the same in every chart
_MARKERS = "osD^v"
_SIZE = (5.6, 3.4)  # inches of a chart; two of one height make a row of the page
_MAX_ROWS = 40  # spaces below each other before the next column starts
_MAX_NAME = 34  # characters of a space's name; the end of a longer one says more than its start
_MAX_POINTS = 200  # of a curve; more steps than that are averaged
_STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "axes.titlesize": 11,
    "figure.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.titleweight": "bold",
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name may have a $
    "text.usetex": False,  # a matplotlibrc in the current folder could run LaTeX with its own preamble
}


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Our style, for a function that draws; matplotlib's settings stay as they were."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure as SVG, black on white; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_svg(figure, "dmcp", transparent=False), encoding="utf-8")
    return path


def to_svg(figure: Figure, salt: str, transparent: bool = True) -> str:
    """The figure as an SVG element in the color of the page's text. `salt` makes its ids differ from other figures'."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name in another script
        figure.savefig(file, format="svg", transparent=transparent)
    text = file.getvalue().replace(INK, "currentColor")
    if transparent:  # then it is for a page, which has lighter colors for the dark mode
        for number, color in enumerate(COLORS):
            text = text.replace(color.lower(), f"var(--c{number}, {color})")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # nothing refers to these


# a search


class SpaceWidth(NamedTuple):
    """The bar of one space: its channels before and after, and the number that the chain expects, if that is known."""

    name: str
    before: int
    kept: int
    expected: float | None


def draw_all(result: SearchResult, widths: Widths, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every figure of a search and its chosen widths as SVG; returns the files, in order."""
    graph = result.graph
    searched = result.log_budget
    limits = [f"{NAMES[limit.kind]}, budget {amount(limit.kind, limit.target)}" for limit in searched.limits]
    other_budget = ""
    if searched != result.budget:
        other_budget = searched.text
    cost = cost_over_time(result.log, limits, result.tolerance, other_budget)

    spaces = []
    for space, expected in zip(graph.spaces, expected_widths(result).tolist(), strict=True):
        spaces.append(SpaceWidth(space.name, space.size, widths[space.name], expected))
    before = amount("macs", graph.macs(graph.full))
    after = amount("macs", graph.macs(widths))
    bars = widths_per_space(spaces, f"Width of each space: {before} MACs before, {after} after")

    return [save_figure(cost, Path(folder) / "cost.svg"), save_figure(bars, Path(folder) / "widths.svg")]


@_style()
def cost_over_time(
    log: Sequence[SearchRecord], names: Sequence[str], tolerance: float | None, searched: str = ""
) -> Figure:
    """Expected cost over target of each limit, and the band in which the budget loss is zero.

    searched: the budget that was searched, if the network is for another one.
    """
    title = "Expected cost over the search"
    if searched:
        title += f" for {searched}"
    steps = []
    ratios = []
    for record in log:
        if record.ratios is not None:
            steps.append(record.step)
            ratios.append(record.ratios)
    figure, (axes,) = _panels(*_SIZE)
    if tolerance:
        axes.axhspan(tolerance, 1, color=GREEN, alpha=0.25, lw=0, label=f"allowed, {tolerance:.0%} to 100%")
    if steps and steps[0] > 0:
        axes.axvspan(0, steps[0], color=GREY, alpha=0.2, lw=0, label="warm-up: weights only")
    for number, name in enumerate(names):
        _curve(axes, steps, [limits[number] for limits in ratios], name, number)
    axes.set(title=title, xlabel="search step", ylabel="expected cost over the budget")
    last_step = 0
    if log:
        last_step = log[-1].step
    low, high = axes.get_ylim()
    axes.set(xlim=(0, max(last_step, 1)), ylim=(min(low, 0.9), max(high, 1.05)))
    _in_percent(axes.yaxis)
    return _with_legend(figure)


@_style()
def losses(curves: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """The loss of each network over the steps."""
    figure, (axes,) = _panels(*_SIZE)
    for number, (name, values) in enumerate(curves.items()):
        _curve(axes, list(values), list(values.values()), name, number)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    return _with_legend(figure)


def _curve(axes: Axes, steps: Sequence[float], values: Sequence[float], name: str, number: int) -> None:
    """A line through the means of neighbouring steps, or a dot if there is one step only."""
    points = min(len(steps), _MAX_POINTS)
    marker = None
    if points == 1:
        marker = "o"
    axes.plot(
        _means(steps, points), _means(values, points), color=_color(name, number), lw=1.5, marker=marker, label=name
    )


def _means(values: Sequence[float], count: int) -> list[float]:
    """So many means of neighbouring values."""
    if count == 0:
        return []
    return [float(part.mean()) for part in np.array_split(np.array(values, float), count)]


def _color(name: str, number: int) -> str:
    """The color of a network; other curves take one after the other."""
    return _NETWORK_COLORS.get(name, COLORS[number % len(COLORS)])


@_style()
def widths_per_space(spaces: Sequence[SpaceWidth], title: str) -> Figure:
    """Channels of each space, below each other, in columns."""
    columns = -(-len(spaces) // _MAX_ROWS)
    count = -(-len(spaces) // columns)  # spaces in a column
    figure, panels = _panels(_SIZE[0] * columns, 1.5 + 0.24 * count, columns)
    for column, axes in enumerate(panels):
        axes.grid(visible=False)
        part = spaces[column * count : (column + 1) * count]
        heights = range(len(part))
        axes.barh(heights, [1.0] * len(part), color=GREY, alpha=0.4, height=0.75, label="before")
        axes.barh(heights, [space.kept / space.before for space in part], color=BLUE, height=0.75, label="kept")
        marks = []
        for space in part:
            expected = math.nan  # is not drawn
            if space.expected is not None:
                expected = space.expected
            marks.append(expected / space.before)
        axes.plot(marks, heights, "|", color=INK, ms=9, mew=1.5, label="expected, before rounding")
        for height, space in enumerate(part):
            axes.text(1.02, height, f"{space.kept} of {space.before}", va="center", fontsize=8, clip_on=False)
        axes.set_yticks(heights, [_shorten(space.name) for space in part], fontsize=8)
        axes.set(xlim=(0, 1), ylim=(count - 0.5, -0.5), xlabel="share of the channels that is kept")
        _in_percent(axes.xaxis)
    figure.suptitle(title)
    return _with_legend(figure)


def _shorten(name: str) -> str:
    """The end of a name that is too long."""
    if len(name) <= _MAX_NAME:
        return name
    return f"…{name[1 - _MAX_NAME :]}"


# accuracies


class Point(NamedTuple):
    """A tested network in a chart."""

    kind: str  # networks of one kind have one color
    text: str  # beside it
    macs: int
    accuracy: float
    error: float  # standard error of the accuracy


@_style()
def accuracy_over_cost(points: Sequence[Point]) -> Figure:
    """Accuracy over MACs of tested networks."""
    figure, (axes,) = _panels(*_SIZE)
    kinds = list(dict.fromkeys(point.kind for point in points))
    for number, kind in enumerate(kinds):
        of_kind = [point for point in points if point.kind == kind]
        axes.errorbar(
            [point.macs for point in of_kind],
            [point.accuracy for point in of_kind],
            [point.error for point in of_kind],
            fmt=_MARKERS[number % len(_MARKERS)],
            color=_color(kind, number),
            ms=6 + 5 * number / len(kinds),  # later kinds are larger and lie behind, so that none is hidden
            zorder=2 + len(kinds) - number,
            label=kind,
        )
        for point in of_kind:
            axes.annotate(point.text, (point.macs, point.accuracy), (6, 4), textcoords="offset points", fontsize=8)
    axes.set(title="Accuracy over MACs", xlabel="MACs of one sample", ylabel="test accuracy (bar: standard error)")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: amount("macs", value))
    _in_percent(axes.yaxis)
    return _with_legend(figure)


# pieces


def _panels(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with its size in inches, and its panels beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(1, columns, squeeze=False).flat)
    for axes in panels:
        axes.grid(axis="y")
    return figure, panels


def _with_legend(figure: Figure) -> Figure:
    """Add one legend for all panels, where no line can be under it."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=3)
    return figure


def _in_percent(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def amount(kind: str, number: float) -> str:
    """A cost as people read it: 20.4M, 8.12 ms, 65.5 kB."""
    if UNITS.get(kind, COUNT) is COUNT:  # a run of a later version may have a kind that is unknown here
        return show_count(number)
    return show_amount(kind, number)
