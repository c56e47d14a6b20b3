"""All charts, drawn with matplotlib: those of a search (the paper's figures 6 and 7) and of the page."""

from __future__ import annotations

import functools
import io
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
import torch
from torch import Tensor

from dmcp.batches import generator
from dmcp.budget import LATENCY, MEMORY, ratios, show_cost, spent_shares
from dmcp.sampling import expected_widths
from dmcp.searching.config import SearchRecord, SearchResult
from dmcp.widths import Widths

if TYPE_CHECKING:  # functions import matplotlib: it takes half a second, and most commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
SAMPLES = 3000  # that the distributions show, as in the paper
KINDS = {"macs": "MACs", "params": "parameters", MEMORY: "memory", LATENCY: "time"}
INK = "#24292f"  # of text and axes; a page has its own
# differ for colour-blind readers (Okabe and Ito), and can be seen on white and on black
COLORS = BLUE, RED, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#B86B98", "#808080"
_ROUNDS = 100  # of so many samples, to find as many inside the budget
_ROWS = 40  # spaces below each other before the next column starts
_PANELS = 60  # spaces whose distribution is drawn
_NAME = 34  # characters of a space's name; the end of a longer one says more than its start
_POINTS = 200  # of a curve; more steps than that are averaged
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name may have a $
}


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in our style, and leave matplotlib's settings as they were."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return styled


def save(figure: Figure, path: Path) -> Path:
    """Write the figure, black on white; the same figure gives the same bytes, and the format is the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _savefig(figure, path, "dmcp", metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    return path


def to_svg(figure: Figure, salt: str) -> str:
    """The figure as an SVG element in the color of a page's text; by `salt` its ids differ from those of others."""
    file = io.StringIO()
    _savefig(figure, file, salt, format="svg", transparent=True)
    text = file.getvalue().replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # nothing refers to these


def _savefig(figure: Figure, file: Any, salt: str, **how: Any) -> None:
    import matplotlib

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name in another script
        figure.savefig(file, **how)


# a search


def draw_all(result: SearchResult, widths: Widths, folder: str | os.PathLike[str], seed: int = 0) -> list[Path]:
    """Write every figure of a search and its chosen widths as SVG; the files, in order."""
    marginals = result.process.marginals(result.alphas.detach())
    last = ratios(result.budget, result.graph, marginals, result.sizes, result.process).tolist()
    names = [f"{KINDS[limit.kind]}, budget {amount(limit.kind, limit.target)}" for limit in result.budget.limits]
    spaces = zip(result.graph.spaces, expected_widths(result).tolist(), strict=True)
    rows = [(space.name, space.size, widths[space.name], wished) for space, wished in spaces]
    before, after = (amount("macs", result.graph.macs(it)) for it in (result.graph.full, widths))
    figures = {
        "cost": cost_over_time(result.log, names, result.tolerance, last),
        "widths": widths_per_space(rows, f"Width of each space: {before} MACs before, {after} after"),
        "macs": cost_distribution(result, seed),
        "distribution": width_distribution(result, seed),
    }
    return [save(figure, Path(folder) / f"{name}.svg") for name, figure in figures.items()]


@_styled
def cost_over_time(
    log: Sequence[SearchRecord], names: Sequence[str], tolerance: float | None, last: Sequence[float] = ()
) -> Figure:
    """Expected cost over target of each limit, `last` after the last step, and the band that the loss wants."""
    moved = [(record.step, record.ratios) for record in log if record.ratios is not None]
    end = log[-1].step + 1 if log else 0
    points = [*moved, *([(end, last)] if last else [])]
    axes = _panel(7.0, 3.6)
    if tolerance:
        axes.axhspan(tolerance, 1, color=GREEN, alpha=0.25, lw=0, label=f"allowed, {tolerance:.0%} to 100%")
    if moved and moved[0][0]:
        axes.axvspan(0, moved[0][0], color=GREY, alpha=0.2, lw=0, label="warm-up: weights only")
    for number, name in enumerate(names):
        _curve(axes, [step for step, _ in points], [seen[number] for _, seen in points], name, number)
    axes.set(title="Expected cost over the search", xlabel="search step", ylabel="expected cost over the budget")
    low, high = axes.get_ylim()
    axes.set(xlim=(0, max(end, 1)), ylim=(min(low, 0.9), max(high, 1.05)))
    _in_percent(axes.yaxis)
    return _with_legend(axes)


@_styled
def losses(curves: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """The loss of each network over the steps."""
    axes = _panel(7.0, 3.6)
    for number, (name, values) in enumerate(curves.items()):
        _curve(axes, list(values), list(values.values()), name, number)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    return _with_legend(axes)


def _curve(axes: Axes, steps: Sequence[float], values: Sequence[float], name: str, number: int) -> None:
    parts = min(len(steps), _POINTS)
    means = [[part.mean() for part in np.array_split(np.array(it, float), parts)] for it in (steps, values)]
    axes.plot(*means, color=COLORS[number % len(COLORS)], lw=1.5, marker="o" if parts == 1 else None, label=name)


@_styled
def widths_per_space(rows: Sequence[tuple[str, int, int, float | None]], title: str) -> Figure:
    """Channels of each space: (name, before, kept, expected by the chain)."""
    columns = -(-len(rows) // _ROWS)
    count = -(-len(rows) // columns)
    figure = _blank(max(5.5 * columns, 6.5), 1.5 + 0.24 * count)
    for column, axes in enumerate(figure.subplots(1, columns, squeeze=False)[0]):
        part = rows[column * count : (column + 1) * count]
        places = range(len(part))
        axes.barh(places, [1.0] * len(part), color=GREY, alpha=0.4, height=0.75, label="before")
        axes.barh(places, [kept / full for _, full, kept, _ in part], color=BLUE, height=0.75, label="kept")
        marks = [math.nan if expected is None else expected / full for _, full, _, expected in part]
        axes.plot(marks, places, "|", color=INK, ms=9, mew=1.5, label="expected, before rounding")
        for place, (_, full, kept, _) in enumerate(part):
            axes.text(1.02, place, f"{kept} of {full}", va="center", fontsize=8, clip_on=False)
        axes.set_yticks(places, [_short(name) for name, *_ in part], fontsize=8)
        axes.set(xlim=(0, 1), ylim=(count - 0.5, -0.5), xlabel="share of the channels that is kept")
        _in_percent(axes.xaxis)
    figure.suptitle(title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@_styled
def cost_distribution(result: SearchResult, seed: int = 0) -> Figure:
    """Costs of 3,000 samples of the chains, with their mean and the target (the paper's figure 6)."""
    targets = {limit.kind: limit.target for limit in result.budget.limits}
    kinds = ["macs", *(kind for kind in targets if kind != "macs")]
    widths = result.process.sample(result.alphas, result.sizes, SAMPLES, generator(seed)).cpu()
    figure = _blank(7.0, 3.6 * len(kinds))
    for kind, axes in zip(kinds, figure.subplots(len(kinds), 1, squeeze=False)[:, 0], strict=True):
        counted, full = result.graph.cost(kind, widths), result.graph.cost(kind)
        mean = counted.double().mean().item()
        axes.hist(counted.tolist(), bins=50, color=BLUE, alpha=0.8)
        if kind in targets:
            axes.axvline(targets[kind], color=INK, lw=1.5, label=f"budget {amount(kind, targets[kind])}")
        axes.axvline(mean, color=RED, ls="--", lw=1.5, label=f"mean {amount(kind, mean)}")
        which = f"all of {SAMPLES:,} samples (seed {seed}), inside the budget or not"
        axes.set_title(f"{which}\nthe unpruned network has {amount(kind, full)} {KINDS[kind]}", fontsize=10)
        axes.set(xlabel=f"{KINDS[kind]} of a sampled network", ylabel="sampled networks")
        axes.xaxis.set_major_formatter(lambda value, _, kind=kind: amount(kind, value))
        axes.locator_params(axis="x", nbins=7)
        axes.grid(axis="y")
        _with_legend(axes)
    return figure


@_styled
def width_distribution(result: SearchResult, seed: int = 0) -> Figure:
    """How often each width of each space is sampled, inside the budget (the paper's figure 7)."""
    spaces = result.graph.spaces
    samples, inside = _sample_inside(result, seed)
    shown = sorted({round(place) for place in torch.linspace(0, len(spaces) - 1, min(len(spaces), _PANELS)).tolist()})
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = _blank(max(2.6 * columns, 6.5), 0.9 + 1.5 * rows)
    for axes, number in zip(_panels(figure, rows, columns, len(shown)), shown, strict=True):
        found, counts = np.unique(samples[:, number].numpy(), return_counts=True)
        gap = int(np.diff(found).min(initial=spaces[number].size))
        axes.bar(found, counts / len(samples), width=0.8 * gap, color=BLUE)
        axes.axvline(samples[:, number].double().mean().item(), color=RED, ls="--", lw=1.2)
        axes.set_title(_short(spaces[number].name), fontsize=8)
        axes.set_xlim(0, spaces[number].size + gap)
        axes.locator_params(axis="x", nbins=5, integer=True)
        axes.locator_params(axis="y", nbins=3)
        _in_percent(axes.yaxis, decimals=0)
        axes.tick_params(labelsize=7)
        axes.grid(axis="y")
    which = "inside the budget" if inside else "of which none is inside the budget"
    some = "" if len(shown) == len(spaces) else f", {len(shown)} of {len(spaces)} spaces"
    words = f"Width of each space in {len(samples):,} samples {which} (seed {seed}; dashed: mean){some}"
    figure.suptitle(words, fontsize=10)
    figure.supxlabel("channels kept", fontsize=9)
    figure.supylabel("share of the samples", fontsize=9)
    return figure


def _sample_inside(result: SearchResult, seed: int) -> tuple[Tensor, bool]:
    """Samples inside the budget, or, if none of many is, any. -> (n, S), whether they are inside"""
    draw, found = generator(seed), result.sizes.new_zeros(0, len(result.sizes))
    for _ in range(_ROUNDS):
        widths = result.process.sample(result.alphas, result.sizes, SAMPLES, draw).cpu()
        found = torch.cat([found, widths[spent_shares(result.budget, result.graph, widths).amax(dim=1) <= 1]])
        if len(found) >= SAMPLES:
            break
    return (found[:SAMPLES], True) if len(found) else (widths, False)


# accuracies


@_styled
def accuracy_over_cost(points: Sequence[tuple[str, str, int, float, float]]) -> Figure:
    """Accuracy over MACs of tested networks: (kind, text beside it, MACs, accuracy, standard error)."""
    axes = _panel(7.0, 4.0)
    for number, kind in enumerate(dict.fromkeys(point[0] for point in points)):
        color, shape = COLORS[number % len(COLORS)], "osD^v"[number % 5]
        _, texts, macs, accuracies, errors = zip(*(point for point in points if point[0] == kind), strict=True)
        axes.errorbar(macs, accuracies, errors, fmt=shape, color=color, ms=6, capsize=3, lw=1, alpha=0.8, label=kind)
        for text, x, y in zip(texts, macs, accuracies, strict=True):
            axes.annotate(text, (x, y), (6, 4), textcoords="offset points", fontsize=8)
    axes.set(
        title="Accuracy over MACs of each network",
        xlabel="MACs of one sample",
        ylabel="test accuracy (bar: standard error)",
    )
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: amount("macs", value))
    _in_percent(axes.yaxis)
    return _with_legend(axes)


# pieces


def _blank(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _panel(width: float, height: float) -> Axes:
    axes = _blank(width, height).subplots()
    axes.grid(axis="y")
    return axes


def _panels(figure: Figure, rows: int, columns: int, count: int) -> list[Axes]:
    """The first `count` panels of a grid; the others are removed."""
    places = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in places[count:]:
        axes.remove()
    return places[:count]


def _with_legend(axes: Axes) -> Figure:
    """The figure, with a legend where no line can be under it."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    return axes.get_figure(root=True)  # type: ignore[return-value]


def _in_percent(axis: Any, decimals: int | None = None) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals))


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"


def amount(kind: str, number: float) -> str:
    """A cost as people read it: 20.4M, 8.12 ms, 65.5 kB."""
    if kind in (LATENCY, MEMORY):
        return show_cost(kind, number)
    power = min(max(int(math.log10(abs(number))) // 3, 0), 3) if number else 0
    return f"{number / 1000**power:.4g}{('', 'k', 'M', 'G')[power]}"
