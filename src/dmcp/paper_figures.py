"""Figures of experiments: accuracies of several settings, and by how much widths differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dmcp.gathering import Line

_BLUE, _RED = "#0072B2", "#D55E00"  # of Okabe and Ito, as in figures


def curves(lines: Iterable[Line]) -> dict[str, list[tuple[float, float, float]]]:
    """What `accuracy_over_macs` draws of a table: for each method share of the MACs, mean and deviation."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for line in lines:
        name = f"{line.method}{f', {line.way}' if line.own else ''}"
        found.setdefault(name, []).append((line.mean_share, line.mean, line.deviation or 0.0))
    return found


def dots(groups: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Each network's accuracy as a dot, a row for each setting; means, and bars of one deviation up and down."""
    figure = Figure(figsize=(7.0, 1.3 + 0.4 * len(groups)), layout="constrained")
    axes = figure.subplots()
    for place, values in enumerate(groups.values()):
        if not values:
            continue
        mean = statistics.fmean(values)
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        axes.plot(values, [place] * len(values), "o", color=_BLUE, ms=5, alpha=0.6, mew=0, zorder=3)
        axes.errorbar([mean], [place], xerr=[spread], fmt="|", color=_RED, ms=14, mew=1.8, lw=1.2, capsize=3)
    axes.set_yticks(range(len(groups)), [*groups], fontsize=8)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_title(f"{title}\ndots: networks; red: mean ± one standard deviation", fontsize=9)
    axes.set_xlabel("test accuracy")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3, lw=0.6)
    axes.set_axisbelow(True)
    return figure


def width_differences(gaps: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Widths of one network less those of another, space by space from the input on (the paper's figure 5)."""
    figure = Figure(figsize=(7.0, 1.5 + 0.24 * len(gaps)), layout="constrained")
    axes = figure.subplots()
    places = [*range(len(gaps))]
    means = [statistics.fmean(values) for values in gaps.values()]
    spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in gaps.values()]
    axes.barh(places, means, color=[_BLUE if mean >= 0 else _RED for mean in means], height=0.7)
    several = any(len(values) > 1 for values in gaps.values())
    if several:
        axes.errorbar(means, places, xerr=spreads, fmt="none", ecolor="black", lw=1.0, capsize=2)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(places, [*gaps], fontsize=8)
    axes.set_ylim(len(gaps) - 0.5, -0.5)
    bars = "\nbars: one standard deviation" if several else ""
    axes.set_title(f"{title}\nsame MACs, pruned from the 1.5x and from the 1.0x network{bars}", fontsize=9)
    axes.set_xlabel("channels kept of 1.5x less those of 1.0x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3, lw=0.6)
    axes.set_axisbelow(True)
    return figure
