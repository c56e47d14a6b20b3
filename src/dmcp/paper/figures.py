"""Figures of experiments: accuracies of several settings, alphas that find back, and by how much widths differ."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmcp.comparison.gathering import Line
from dmcp.figures import blank, in_percent
from dmcp.paper.arms import Study
from dmcp.paper.experiments import about
from dmcp.tables import between, counted

if TYPE_CHECKING:  # see figures
    from matplotlib.figure import Figure

_BLUE, _RED = "#0072B2", "#D55E00"  # of Okabe and Ito, as in figures
_COLOURS = (_BLUE, "#009E73", "#CC79A7", _RED, "#E69F00", "#000000")
_LINE = 88  # characters of a title
_PLACES = 120  # of a curve that are drawn


def title(it: Study, name: str, seeds: str = "", epochs: Iterable[int] = ()) -> str:
    """What an experiment compares, then on what: the paper's numbers of tables say nothing in a figure.

    seeds: words before their number. epochs: of the final trainings, if they are not the study's.
    """
    told = re.sub(r"^(Table|Figure|Appendix)[^:]*: ", "", about(name))
    *fewer, most = sorted({*epochs}) or [it.common.train.epochs]
    long = " or ".join([*map(str, fewer), counted(most, "epoch")])
    several = f"{seeds}{counted(len(it.common.seeds), 'seed')}"
    made = ", ".join([it.common.job.model, Path(it.common.job.data).name, long, several])
    return "\n".join([*textwrap.wrap(told[:1].upper() + told[1:], _LINE), made])


def curves(lines: Iterable[Line], seeds: int) -> dict[str, list[tuple[float, float, float]]]:
    """What `accuracy_over_macs` draws of a table: for each method share of the MACs, mean and deviation.

    seeds: how many the title says; methods with others say so.
    """
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(f"{line.method}{f', {line.way}' if line.own else ''}", []).append(line)
    return {
        f"{name}{_other_seeds([len(line.seeds) for line in own], seeds)}": [
            (line.mean_share, line.mean, line.deviation or 0.0) for line in own
        ]
        for name, own in found.items()
    }


def _other_seeds(counts: Sequence[int], usual: int) -> str:
    """How many seeds there are, where it is not the usual number."""
    told = between(str(min(counts)), str(max(counts)))
    return "" if told == str(usual) else f" ({told} seed{'' if told == '1' else 's'})"


def dots(groups: Mapping[str, Sequence[float]], title: str, words: str = "test accuracy") -> Figure:
    """Each network's accuracy as a dot, a row for each setting; means, and bars of one deviation up and down."""
    figure = blank(7.0, 1.3 + 0.15 * title.count("\n") + 0.4 * len(groups))
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
    figure.suptitle(f"{title}\ndots: networks; red: mean ± one standard deviation", fontsize=9)
    axes.set_xlabel(words)
    in_percent(axes.xaxis)
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3, lw=0.6)
    axes.set_axisbelow(True)
    return figure


def recoveries(arms: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> Figure:
    """Expected MACs and accuracy of frozen networks whose alphas see the task loss alone (the paper's figure 4).

    arms: label -> what `recover` found, for each seed; a thin line is a seed, a thick one their mean.
    """
    figure = blank(9.0, 4.4)
    kinds = {"macs_shares": "expected MACs / unpruned MACs", "accuracies": "training accuracy, gated"}
    steps = max(len(one["accuracies"]) for found in arms.values() for one in found)
    window, most = max(1, steps // _PLACES), max(map(len, arms.values()))
    figure.suptitle(f"{title} (thick), each seed (thin)" if most > 1 else title, fontsize=9)
    for axes, (kind, words) in zip(figure.subplots(1, 2, sharey=True), kinds.items(), strict=True):
        for number, (label, found) in enumerate(arms.items()):
            colour, seen = _COLOURS[number % len(_COLOURS)], [_means(one[kind], window) for one in found]
            for values in seen:
                axes.plot(*_places(values, window), color=colour, lw=0.6, alpha=0.5)
            means = [statistics.fmean(values) for values in zip(*seen, strict=True)]
            axes.plot(*_places(means, window), color=colour, lw=2.0, label=f"{label}{_other_seeds([len(found)], most)}")
        if kind == "accuracies":
            whole = statistics.fmean(one["trained"] for found in arms.values() for one in found)
            axes.axhline(whole, color="black", ls="--", lw=0.8, label=f"training accuracy, ungated: {whole:.1%}")
        axes.set(xlabel=f"step (means of {window})" if window > 1 else "step", xlim=(0, steps), ylim=(0, 1.03))
        axes.set_title(words, fontsize=9)
        in_percent(axes.yaxis)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3, lw=0.6)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _means(values: Sequence[float], window: int) -> list[float]:
    """Of each so many values in turn: accuracies of batches jump."""
    return [statistics.fmean(values[start : start + window]) for start in range(0, len(values), window)]


def _places(values: Sequence[float], window: int) -> tuple[list[float], Sequence[float]]:
    """The steps in the middle of each window, and the values there."""
    return [(number + 0.5) * window for number in range(len(values))], values


def width_differences(gaps: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Widths of one network less those of another, space by space from the input on (the paper's figure 5)."""
    figure = blank(7.0, 1.5 + 0.24 * len(gaps))
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
    bars = "\nblack: one standard deviation" if several else ""
    figure.suptitle(f"{title}{bars}", fontsize=9)
    axes.set_xlabel("channels kept of 1.5x less those of 1.0x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3, lw=0.6)
    axes.set_axisbelow(True)
    return figure
