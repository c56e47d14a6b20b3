"""The figures of the paper, drawn with matplotlib."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dmcp.batches import generator
from dmcp.budget import LATENCY, MEMORY, cost, count_many, ratios, show_cost, spent_shares
from dmcp.sampling import expected_widths
from dmcp.searching.config import SearchResult
from dmcp.widths import Widths

if TYPE_CHECKING:  # functions import matplotlib: it takes half a second, and most commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

STRUCTURES = 3000  # that the distributions show, as in the paper
_ROUNDS = 100  # of so many structures, to find as many inside the budget
_ROWS = 40  # spaces below each other before the next column starts
_PANELS = 60  # spaces whose distribution is drawn
_NAME = 34  # characters of a space's name; the end of a longer one says more than its start
_WORDS = {"macs": "MACs", "params": "parameters", MEMORY: "memory", LATENCY: "time"}
# colours that differ for colour-blind readers too (Okabe and Ito)
_BLUE, _ORANGE, _RED, _GREEN, _GREY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#BBBBBB"


def draw_all(result: SearchResult, widths: Widths, folder: str | os.PathLike[str], seed: int = 0) -> list[Path]:
    """Write every figure of a search and its chosen widths into the folder, as SVG; the files, in order."""
    figures = {
        "cost": cost_over_time(result),
        "widths": widths_per_space(result, widths),
        "macs": cost_distribution(result, seed),
        "distribution": width_distribution(result, seed),
    }
    return [save(figure, Path(folder) / f"{name}.svg") for name, figure in figures.items()]


def save(figure: Figure, path: Path) -> Path:
    """Write the figure; the same figure gives the same bytes, and the format is the suffix."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "dmcp"}):  # else ids are random; put back at once
        figure.savefig(path, metadata=metadata, dpi=150)
    return path


def _blank(width: float, height: float) -> Figure:
    """A figure with nothing on it, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _in_percent(axis: Axis, decimals: int | None = None) -> None:
    """Show the shares of an axis as percentages."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals))


def cost_over_time(result: SearchResult) -> Figure:
    """Expected cost after each step, against the band that the budget loss pulls it into."""
    figure, axes = _panel(7.0, 3.6)
    moved = [record for record in result.log if record.ratios is not None]
    first, end = (moved[0].step if moved else 0), (result.log[-1].step + 1 if result.log else 0)
    # a record holds what its step saw, before it moved the alphas; the last point is the result
    steps = [record.step for record in moved] + [end]
    chances = result.process.marginals(result.alphas.detach())
    last = ratios(result.budget, result.graph, chances, result.sizes, result.process).tolist()
    axes.axhspan(result.tolerance, 1, color=_GREEN, alpha=0.25, lw=0, label=f"allowed, {result.tolerance:.0%} to 100%")
    if first:
        axes.axvspan(0, first, color=_GREY, alpha=0.3, lw=0, label="warm-up: weights only")
    for number, (limit, colour) in enumerate(zip(result.budget.limits, (_BLUE, _RED, _GREEN, _ORANGE), strict=False)):
        seen = [record.ratios[number] for record in moved if record.ratios is not None] + [last[number]]
        label = f"{_WORDS[limit.kind]}, budget {_amount(limit.kind, limit.target)}"
        axes.plot(steps, seen, color=colour, lw=1.5, marker="o" if len(seen) == 1 else None, label=label)
    axes.set(title="Expected cost over the search", xlabel="step", ylabel="expected cost / budget")
    low, high = axes.get_ylim()
    axes.set(xlim=(0, max(end, 1)), ylim=(min(low, 0.9), max(high, 1.05)))  # some room around the band
    _in_percent(axes.yaxis)
    _set_ticks(axes.xaxis, 10, integer=True)
    _legend_below(axes)
    return figure


def widths_per_space(result: SearchResult, widths: Widths) -> Figure:
    """Channels of each space before and after, and what the chain expected before any repair."""
    spaces, kept, wished = result.graph.spaces, list(widths.values()), expected_widths(result).tolist()
    columns = -(-len(spaces) // _ROWS)
    rows = -(-len(spaces) // columns)
    figure = _blank(max(5.5 * columns, 6.5), 1.5 + 0.24 * rows)
    for column, axes in enumerate(figure.subplots(1, columns, squeeze=False)[0]):
        part = range(column * rows, min((column + 1) * rows, len(spaces)))
        places = [number - part[0] for number in part]
        shares = [kept[number] / spaces[number].size for number in part]
        axes.barh(places, [1.0] * len(part), color=_GREY, alpha=0.5, height=0.75, label="before")
        axes.barh(places, shares, color=_BLUE, height=0.75, label="after")
        marks = [wished[number] / spaces[number].size for number in part]
        axes.plot(marks, places, "|", color="black", ms=9, mew=1.5, label="expected, before rounding and repair")
        for place, number in zip(places, part, strict=True):
            text = f"{kept[number]} of {spaces[number].size}"
            axes.text(1.02, place, text, va="center", fontsize=8, clip_on=False)
        axes.set_yticks(places, [_name(spaces[number].name) for number in part], fontsize=8)
        axes.set(xlim=(0, 1), ylim=(rows - 0.5, -0.5), xlabel="channels kept")
        _in_percent(axes.xaxis)
        axes.spines[["top", "right"]].set_visible(False)
    before, after = (_count(cost) for cost in (result.graph.macs(), result.graph.macs(widths)))
    figure.suptitle(f"Width of each space: {before} MACs before, {after} after")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def cost_distribution(result: SearchResult, seed: int = 0) -> Figure:
    """Costs of 3,000 structures drawn from the chains, with their mean and the target (the paper's figure 6)."""
    targets = {limit.kind: limit.target for limit in result.budget.limits}
    kinds = ["macs", *(kind for kind in targets if kind != "macs")]
    widths = result.process.sample(result.alphas, result.sizes, STRUCTURES, generator(seed)).cpu()
    figure = _blank(7.0, 3.6 * len(kinds))
    for kind, axes in zip(kinds, figure.subplots(len(kinds), 1, squeeze=False)[:, 0], strict=True):
        counted, full = count_many(result.graph, kind, widths), cost(result.graph, kind, result.graph.full)
        mean = counted.double().mean().item()
        axes.hist(counted.tolist(), bins=50, color=_BLUE, alpha=0.8)
        if kind in targets:
            axes.axvline(targets[kind], color="black", lw=1.5, label=f"budget {_amount(kind, targets[kind])}")
        axes.axvline(mean, color=_RED, ls="--", lw=1.5, label=f"mean {_amount(kind, mean)}")
        which = f"all of {STRUCTURES:,} structures drawn with seed {seed}, inside the budget or not"
        axes.set_title(f"{which}\nthe unpruned network has {_amount(kind, full)} {_WORDS[kind]}", fontsize=10)
        axes.set(xlabel=_WORDS[kind], ylabel="structures")
        axes.xaxis.set_major_formatter(lambda value, _, kind=kind: _amount(kind, value))
        _set_ticks(axes.xaxis, 7)
        _plain(axes)
        _legend_below(axes)
    return figure


def width_distribution(result: SearchResult, seed: int = 0) -> Figure:
    """How often each width of each space is drawn, in structures inside the budget (the paper's figure 7)."""
    spaces = result.graph.spaces
    drawn, inside = _inside(result, seed)
    shown = sorted({round(place) for place in torch.linspace(0, len(spaces) - 1, min(len(spaces), _PANELS)).tolist()})
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = _blank(max(2.6 * columns, 6.5), 0.9 + 1.5 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(shown) :]:
        axes.remove()
    for axes, number in zip(panels, shown, strict=False):
        found, counts = np.unique(drawn[:, number].numpy(), return_counts=True)
        gap = int(np.diff(found).min(initial=spaces[number].size))
        axes.bar(found, counts / len(drawn), width=0.8 * gap, color=_BLUE)
        axes.axvline(drawn[:, number].double().mean().item(), color=_RED, ls="--", lw=1.2)
        axes.set_title(_name(spaces[number].name), fontsize=8)
        axes.set_xlim(0, spaces[number].size + gap)
        _set_ticks(axes.xaxis, 5, integer=True)
        _set_ticks(axes.yaxis, 3)
        _in_percent(axes.yaxis, decimals=0)
        axes.tick_params(labelsize=7)
        _plain(axes)
    which = "inside the budget" if inside else "of which none is inside the budget"
    some = "" if len(shown) == len(spaces) else f", {len(shown)} of {len(spaces)} spaces"
    told = f"Width of each space in {len(drawn):,} structures {which}, drawn with seed {seed} (dashed: mean){some}"
    figure.suptitle(told, fontsize=10)
    figure.supxlabel("channels kept", fontsize=9)
    figure.supylabel("share of the structures", fontsize=9)
    return figure


Spread = Sequence[float] | None  # accuracies of several seeds


def accuracy_by_method(panels: Mapping[str, Mapping[str, tuple[Spread, Spread]]], title: str) -> Figure:
    """A panel for each budget, two in a line: methods from best to worst, trained by one recipe and in their own way.

    Marks are means, bars one standard deviation up and down.
    """
    sizes, columns = [len(rows) for rows in panels.values()], min(2, len(panels))
    most = [max(sizes[start : start + columns]) for start in range(0, len(sizes), columns)]  # methods of each line
    figure = _blank(3.8 * columns + 1.2, 0.8 + len(most) + 0.3 * sum(most))
    figure.suptitle(title, fontsize=11)
    heights = [1 + 0.3 * count for count in most]
    places = [*figure.subplots(len(most), columns, squeeze=False, height_ratios=heights).flat]
    for axes in places[len(panels) :]:
        axes.remove()
    known: dict[str, Any] = {}  # marks by their words
    for axes, (budget, rows) in zip(places, panels.items(), strict=False):
        order = _draw_methods(axes, rows)
        _plain(axes)
        axes.grid(axis="x", alpha=0.3, lw=0.6)
        axes.set_yticks(range(len(order)), order, fontsize=8)
        axes.set(title=f"budget {budget}", xlabel="test accuracy", ylim=(-0.6, len(order) - 0.4))
        _set_ticks(axes.xaxis, 5)
        _in_percent(axes.xaxis)
        marks, words = axes.get_legend_handles_labels()
        known |= dict(zip(words, marks, strict=True))
    figure.legend([*known.values()], [*known], loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _draw_methods(axes: Axes, rows: Mapping[str, tuple[Spread, Spread]]) -> list[str]:
    """Marks and bars of one panel; the methods from the lowest place up."""
    order = sorted(rows, key=lambda name: max(statistics.fmean(it) for it in rows[name] if it))
    for number, (colour, shape, label) in enumerate(((_BLUE, "o", "same recipe"), (_RED, "s", "its own training"))):
        found = [(place, it) for place, name in enumerate(order) if (it := rows[name][number])]
        if found:
            axes.errorbar(
                [statistics.fmean(it) for _, it in found],
                [place + 0.12 - 0.24 * number for place, _ in found],
                xerr=[statistics.stdev(it) if len(it) > 1 else 0.0 for _, it in found],
                fmt=shape,
                color=colour,
                ms=5,
                capsize=2,
                lw=1,
                label=label,
            )
    return order


def _inside(result: SearchResult, seed: int) -> tuple[Tensor, bool]:
    """Structures inside the budget, or, if none of many is, any. -> (n, S), whether they are inside"""
    draw, found = generator(seed), result.sizes.new_zeros(0, len(result.sizes))
    for _ in range(_ROUNDS):
        widths = result.process.sample(result.alphas, result.sizes, STRUCTURES, draw).cpu()
        found = torch.cat([found, widths[spent_shares(result.budget, result.graph, widths).amax(dim=1) <= 1]])
        if len(found) >= STRUCTURES:
            break
    return (found[:STRUCTURES], True) if len(found) else (widths, False)


def _panel(width: float, height: float) -> tuple[Figure, Axes]:
    figure = _blank(width, height)
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _set_ticks(axis: Axis, most: int, integer: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=integer))


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3, lw=0.6)
    axes.set_axisbelow(True)


def _legend_below(axes: Axes) -> None:
    """Where no line can be under it."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False, fontsize=8)


def _name(name: str) -> str:
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"


def _amount(kind: str, number: float) -> str:
    """A cost of one kind, times and bytes with their unit."""
    return show_cost(kind, number) if kind in (LATENCY, MEMORY) else _count(number)


def _count(number: float) -> str:
    """A cost as people read it: 20.4M."""
    if not number:
        return "0"
    power = min(max(int(math.log10(abs(number))) // 3, 0), 3)
    return f"{number / 1000**power:.4g}{('', 'k', 'M', 'G')[power]}"
