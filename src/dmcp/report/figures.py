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
from typing import TYPE_CHECKING, Any

import numpy as np

from dmcp.budgets import LATENCY, MEMORY, show_cost
from dmcp.searching.records import SearchRecord, SearchResult
from dmcp.searching.sampling import expected_widths
from dmcp.tracing.widths import Widths

if TYPE_CHECKING:  # functions import matplotlib: it takes half a second, and most commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"macs": "MACs", "params": "parameters", MEMORY: "memory", LATENCY: "time"}
INK = "#24292f"  # of text and axes; a page has its own
# differ for colour-blind readers (Okabe and Ito), and can be seen on white and on black
COLORS = BLUE, RED, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#B86B98", "#808080"
_OWN = {"dmcp": BLUE, "uniform": RED, "unpruned": GREY}  # in every chart
_ROWS = 40  # spaces below each other before the next column starts
_NAME = 34  # characters of a space's name; the end of a longer one says more than its start
_POINTS = 200  # of a curve; more steps than that are averaged
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    **dict.fromkeys(("axes.titlesize", "figure.titlesize"), 11),
    **dict.fromkeys(("axes.titleweight", "figure.titleweight"), "bold"),
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
    """The figure as an SVG element in the color of a page's text; by `salt` its ids differ from those of others."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name in another script
        figure.savefig(file, format="svg", transparent=transparent)
    text = file.getvalue().replace(INK, "currentColor")
    for number, color in enumerate(COLORS if transparent else ()):  # a page has lighter ones for the dark
        text = text.replace(color.lower(), f"var(--c{number}, {color})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # nothing refers to these


# a search


def draw_all(result: SearchResult, widths: Widths, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every figure of a search and its chosen widths as SVG; the files, in order."""
    names = [f"{KINDS[limit.kind]}, budget {amount(limit.kind, limit.target)}" for limit in result.budget.limits]
    spaces = zip(result.graph.spaces, expected_widths(result).tolist(), strict=True)
    rows = [(space.name, space.size, widths[space.name], wished) for space, wished in spaces]
    before, after = (amount("macs", result.graph.macs(it)) for it in (result.graph.full, widths))
    figures = {
        "cost": cost_over_time(result.log, names, result.tolerance),
        "widths": widths_per_space(rows, f"Width of each space: {before} MACs before, {after} after"),
    }
    return [save_figure(figure, Path(folder) / f"{name}.svg") for name, figure in figures.items()]


@_style()
def cost_over_time(log: Sequence[SearchRecord], names: Sequence[str], tolerance: float | None) -> Figure:
    """Expected cost over target of each limit, and the band that the loss wants."""
    moved = [(record.step, record.ratios) for record in log if record.ratios is not None]
    figure, (axes,) = _panels(5.6, 3.3)
    if tolerance:
        axes.axhspan(tolerance, 1, color=GREEN, alpha=0.25, lw=0, label=f"allowed, {tolerance:.0%} to 100%")
    if moved and moved[0][0]:
        axes.axvspan(0, moved[0][0], color=GREY, alpha=0.2, lw=0, label="warm-up: weights only")
    for number, name in enumerate(names):
        _curve(axes, [step for step, _ in moved], [seen[number] for _, seen in moved], name, number)
    axes.set(title="Expected cost over the search", xlabel="search step", ylabel="expected cost over the budget")
    low, high = axes.get_ylim()
    axes.set(xlim=(0, max(log[-1].step, 1) if log else 1), ylim=(min(low, 0.9), max(high, 1.05)))
    _in_percent(axes.yaxis)
    return _with_legend(figure)


@_style()
def losses(curves: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """The loss of each network over the steps."""
    figure, (axes,) = _panels(5.6, 3.3)
    for number, (name, values) in enumerate(curves.items()):
        _curve(axes, list(values), list(values.values()), name, number)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    return _with_legend(figure)


def _curve(axes: Axes, steps: Sequence[float], values: Sequence[float], name: str, number: int) -> None:
    parts = max(min(len(steps), _POINTS), 1)
    means = [[part.mean() for part in np.array_split(np.array(it, float), parts)] for it in (steps, values)]
    color = _OWN.get(name, COLORS[number % len(COLORS)])
    axes.plot(*means, color=color, lw=1.5, marker="o" if parts == 1 else None, label=name)


@_style()
def widths_per_space(rows: Sequence[tuple[str, int, int, float | None]], title: str) -> Figure:
    """Channels of each space: (name, before, kept, expected by the chain)."""
    columns = -(-len(rows) // _ROWS)
    count = -(-len(rows) // columns)
    figure, panels = _panels(5.6 * columns, 1.5 + 0.24 * count, columns)
    for column, axes in enumerate(panels):
        axes.grid(visible=False)
        part = rows[column * count : (column + 1) * count]
        places = range(len(part))
        axes.barh(places, [1.0] * len(part), color=GREY, alpha=0.4, height=0.75, label="before")
        axes.barh(places, [kept / full for _, full, kept, _ in part], color=BLUE, height=0.75, label="kept")
        marks = [math.nan if expected is None else expected / full for _, full, _, expected in part]
        axes.plot(marks, places, "|", color=INK, ms=9, mew=1.5, label="expected, before rounding")
        for place, (_, full, kept, _) in enumerate(part):
            axes.text(1.02, place, f"{kept} of {full}", va="center", fontsize=8, clip_on=False)
        names = [name if len(name) <= _NAME else f"…{name[1 - _NAME :]}" for name, *_ in part]
        axes.set_yticks(places, names, fontsize=8)
        axes.set(xlim=(0, 1), ylim=(count - 0.5, -0.5), xlabel="share of the channels that is kept")
        _in_percent(axes.xaxis)
    figure.suptitle(title)
    return _with_legend(figure)


# accuracies


@_style()
def accuracy_over_cost(points: Sequence[tuple[str, str, int, float, float]]) -> Figure:
    """Accuracy over MACs of tested networks: (kind, text beside it, MACs, accuracy, standard error)."""
    figure, (axes,) = _panels(5.6, 3.6)
    for number, kind in enumerate(dict.fromkeys(point[0] for point in points)):
        color, shape, size = _OWN.get(kind, COLORS[number % len(COLORS)]), "osD^v"[number % 5], 6 + 2 * number
        _, texts, macs, accuracies, errors = zip(*(point for point in points if point[0] == kind), strict=True)
        axes.errorbar(macs, accuracies, errors, fmt=shape, color=color, ms=size, zorder=9 - number, label=kind)
        for text, x, y in zip(texts, macs, accuracies, strict=True):
            axes.annotate(text, (x, y), (6, 4), textcoords="offset points", fontsize=8)
    axes.set(title="Accuracy over MACs", xlabel="MACs of one sample", ylabel="test accuracy (bar: standard error)")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: amount("macs", value))
    _in_percent(axes.yaxis)
    return _with_legend(figure)


# pieces


def _panels(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure, in inches, and its panels beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = [*figure.subplots(1, columns, squeeze=False).flat]
    for axes in panels:
        axes.grid(axis="y")
    return figure, panels


def _with_legend(figure: Figure) -> Figure:
    """The figure with one legend for all panels, where no line can be under it."""
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    known = {label: mark for pair in pairs for mark, label in pair}
    figure.legend([*known.values()], [*known], loc="outside lower center", ncols=3)
    return figure


def _in_percent(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")


def amount(kind: str, number: float) -> str:
    """A cost as people read it: 20.4M, 8.12 ms, 65.5 kB."""
    if kind in (LATENCY, MEMORY):
        return show_cost(kind, number)
    power = min(max(int(math.log10(abs(number))) // 3, 0), 3) if number else 0
    return f"{number / 1000**power:.4g}{('', 'k', 'M', 'G')[power]}"
