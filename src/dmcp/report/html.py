"""One HTML page about some runs; it needs no network, no script and no other file."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from dmcp.budgets import NAMES
from dmcp.models import of_library
from dmcp.report import figures
from dmcp.results import difference, error_of, score_name, show_loss, unknown_scores
from dmcp.runs.files import WEIGHTS
from dmcp.runs.reading import PastRun, value_at
from dmcp.runs.records import ACCURACY, DMCP, ORIGINAL, UNPRUNED, Row, score
from dmcp.runtime.io import make_printable
from dmcp.units import show_bytes, show_share

if TYPE_CHECKING:  # imported where they are needed: most commands make no page
    from jinja2 import Template
    from matplotlib.figure import Figure

_HALF = (0.475, 0.505)  # shares that are called half


def make_page(runs: Sequence[PastRun]) -> str:
    """The whole page."""
    points = _points(runs)
    overview = ""
    if points:
        overview = figures.to_svg(figures.accuracy_over_cost(points), "overview")
    title = runs[0].name
    if len(runs) > 1:
        title = f"{len(runs)} runs"
    score_names = {score_name([run.result]) for run in runs if run.result}
    data_sets = {run.setting("data") for run in runs}
    return _template().render(
        title=title,
        score_name=" or ".join(sorted(score_names)) or ACCURACY,
        overview=overview,
        several_sets=len(data_sets) > 1,
        runs=[_describe(number, run) for number, run in enumerate(runs, start=1)],
    )


@functools.cache
def _template() -> Template:
    """The template of the page. Every text that it is given is escaped, and loses its control characters."""
    import jinja2

    def printable(value: Any) -> Any:
        return make_printable(value) if type(value) is str else value

    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    env.finalize = printable
    return env.from_string(Path(__file__).with_name("page.html").read_text())


def _points(runs: Sequence[PastRun]) -> list[figures.Point]:
    """All networks with an accuracy, for the chart; if there are several runs, their results have numbers."""
    points = []
    for number, run in enumerate(runs, start=1):
        for row in run.rows:
            if row.score == ACCURACY:  # the axis has shares
                text = ""
                if row.name == DMCP and len(runs) > 1:
                    text = str(number)
                points.append(figures.Point(row.name, text, row.macs, row.accuracy, error_of(row) or 0.0))
    return sorted(points, key=lambda point: point.kind != DMCP)


# one run


def summary(run: PastRun) -> str:
    """Half the MACs, 1.86× as fast, −0.26 ± 0.94 points against unpruned; empty if nothing was tested."""
    row = run.result
    if row is None:
        return ""
    parts = []
    share = run.share("macs")
    if share:
        size = f"{show_share(share)} of"
        if _HALF[0] <= share < _HALF[1]:
            size = "Half"
        parts.append(f"{size} the MACs")
    speed = _speed(run, row)
    if speed:
        parts.append(f"{speed.factor:.2f}× as fast")
    gaps = _gaps(run, row) or [f"{score_name([row])}, {row.name} {_score(row)}"]
    parts.append(gaps[0])
    return ", ".join(parts)


def _describe(number: int, run: PastRun) -> dict[str, Any]:
    """What the page says about one run, by the names that the template uses."""
    facts: dict[str, Any] = run.describe()
    facts["number"] = number
    facts["path"] = shlex.quote(make_printable(str(run.folder)))
    facts["done"] = run.done
    facts["problems"] = run.problems

    facts |= {"score": "", "macs": "", "share": ""}
    if run.result:
        facts["score"] = _score(run.result)
        facts["macs"] = f"{run.result.macs:,}"
    share = run.share("macs")
    if share:
        facts["share"] = show_share(share)
    facts["summary"] = summary(run)
    facts["tiles"] = _tiles(run)

    facts["notes"] = unknown_scores(run.rows)
    if run.within:
        facts["notes"] += [run.within.text]
    if run.latency:
        facts["notes"] += [run.latency.text, run.latency.warning]
    facts["head"], facts["networks"] = _networks(run)
    facts["charts"] = [figures.to_svg(chart, f"{number}-{index}") for index, chart in enumerate(_charts(run))]
    facts["widths"] = _widths(run)
    facts["settings"] = _settings(run)

    facts["typed_again"] = ""  # commands that open a run build a network of the user's own only if it is typed
    if not of_library(facts["model"]):
        facts["typed_again"] = f" --model {shlex.quote(make_printable(facts['model']))}"
    facts["typed"] = ""
    words = run.settings.get("argv")
    if isinstance(words, list):
        facts["typed"] = shlex.join(["dmcp", *map(str, words[1:])])
    return facts


def _score(row: Row) -> str:
    """95.81 ± 1.03%"""
    error = error_of(row)
    if error is None:
        return score(row)
    return f"{score(row, '')} ± {100 * error:.2f}%"


# the tiles


class Tile(NamedTuple):
    """One of the figures that matter most."""

    title: str
    value: str
    note: str


def _tiles(run: PastRun) -> list[Tile]:
    """Accuracy, speed, costs and budget of a run, as far as they are known."""
    tiles = []
    row = run.result
    if row:
        tiles.append(Tile(f"{score_name([row])}, {row.name}", _score(row), ", ".join(_gaps(run, row))))
        speed = _speed(run, row)
        if speed:
            times = f"{speed.after_ms:.3g} ms {speed.timed}, before {speed.before_ms:.3g} ms"
            tiles.append(Tile("Speed", f"{speed.factor:.2f}×", times))
        tiles.append(_cost_tile(run, row, "macs", "MACs kept"))
        weights = run.folder / WEIGHTS
        size = ""
        if weights.is_file():
            size = f", {show_bytes(weights.stat().st_size)} on disk"
        tiles.append(_cost_tile(run, row, "params", "Parameters kept", size))
    budget = run.budget
    if budget:
        limits = []
        for kind, target in run.targets.items():
            limits.append(f"{NAMES.get(kind, kind)}: at most {figures.amount(kind, target)}")
        tiles.append(Tile("Budget", budget.replace(",", ", "), ", ".join(limits)))
    return tiles


def _gaps(run: PastRun, row: Row) -> list[str]:
    """How much better or worse the network is than each other one."""
    gaps = []
    for baseline in run.rows:
        if baseline is not row:
            gaps.append(difference(row, baseline).replace("-", "\N{MINUS SIGN}"))
    return gaps


class Speed(NamedTuple):
    """Times of the unpruned network and of the result."""

    before_ms: float
    after_ms: float
    timed: str  # what takes this long, and where

    @property
    def factor(self) -> float:
        """How many times as fast the result is."""
        return self.before_ms / self.after_ms


def _speed(run: PastRun, row: Row) -> Speed | None:
    """The times as an exported file if there is one, else in torch; None if they are not known, or nothing was cut."""
    if row.macs == run.unpruned("macs"):
        return None
    if run.exported:
        speed = Speed(run.exported.unpruned_ms, run.exported.pruned_ms, f"a sample in {run.exported.runtime}")
    else:
        times = {baseline.name: baseline.ms for baseline in run.rows if baseline.batch and baseline is not row}
        before = times.get(UNPRUNED) or times.get(ORIGINAL) or 0.0
        speed = Speed(before, row.ms, f"for {row.batch} samples in torch")
    if not (speed.before_ms and speed.after_ms):
        return None
    return speed


def _cost_tile(run: PastRun, row: Row, kind: str, title: str, more: str = "") -> Tile:
    """The share of the cost that is kept, or the cost itself if that of the unpruned network is not known."""
    cost = getattr(row, kind)
    full = run.unpruned(kind)
    if full is None:
        return Tile(title, f"{cost:,}", f"the unpruned network was not counted{more}")
    return Tile(title, show_share(cost / full), f"{cost:,} of {full:,}{more}")


# the tables


def _networks(run: PastRun) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the tested networks. They have times if all were timed."""
    head = ["network", "MACs", "parameters", "train loss", score_name(run.rows)]
    rows = []
    for row in run.rows:
        rows.append([row.name, f"{row.macs:,}", f"{row.params:,}", show_loss(row.train_loss), _score(row)])
    if run.result and all(row.batch for row in run.rows):
        head.append(f"ms per {run.result.batch}")
        for cells, row in zip(rows, run.rows, strict=True):
            cells.append(f"{row.ms:.2f}")
    return head, rows


def _widths(run: PastRun) -> list[tuple[Any, ...]]:
    """Name, channels before, channels that the chain expects and channels kept of each space."""
    before = run.before
    return [(name, before.get(name, ""), run.expected.get(name, ""), kept) for name, kept in run.widths.items()]


def _settings(run: PastRun) -> list[tuple[str, str]]:
    """Settings by their names, like search.epochs; those that the page shows elsewhere are left out."""
    by_name: dict[str, Any] = {}
    for key, value in run.settings.items():
        if key in ("argv", "unpruned"):
            continue
        if isinstance(value, dict):
            by_name |= {f"{key}.{name}": entry for name, entry in value.items()}
        else:
            by_name[key] = value

    settings = []
    for name, value in by_name.items():
        text = value
        if not isinstance(value, str):
            text = json.dumps(value)
        settings.append((name, text))
    return settings


# the charts


def _charts(run: PastRun) -> list[Figure]:
    """Every chart of a run that there is data for; the last one may be taller than the others."""
    charts = []
    limits = min((len(step.ratios) for step in run.search if step.ratios), default=0)
    if limits:
        names = [NAMES.get(kind, make_printable(kind)) for kind in run.searched_kinds]
        if len(names) != limits:
            names = [f"limit {number}" for number in range(1, limits + 1)]
        charts.append(figures.cost_over_time(run.search, names, _tolerance(run), run.searched))

    curves = _search_losses(run)
    if curves:
        charts.append(figures.losses(curves, "Losses of the search"))
    if run.training:
        curves = {name: {step.step: step.loss for step in steps} for name, steps in run.training.items()}
        charts.append(figures.losses(curves, "Loss of the training"))

    spaces = []
    for name, kept in run.widths.items():
        if name in run.before:
            spaces.append(figures.SpaceWidth(make_printable(name), run.before[name], kept, run.expected.get(name)))
    if spaces:
        charts.append(figures.widths_per_space(spaces, "Width of each space"))
    return charts


def _tolerance(run: PastRun) -> float | None:
    """The tolerance of the search, if its settings have one that can be."""
    tolerance = value_at(run.settings, "search", "tolerance")
    if isinstance(tolerance, float) and 0 < tolerance < 1:
        return tolerance
    return None


def _search_losses(run: PastRun) -> dict[str, dict[int, float]]:
    """The losses of the search by step: of weights and of alphas. Curves without a step are left out."""
    largest: dict[int, float] = {}
    smaller: dict[int, float] = {}
    soft: dict[int, float] = {}
    for step in run.search:
        if step.weight_losses:
            largest[step.step] = step.weight_losses[0]
            if len(step.weight_losses) > 1:
                smaller[step.step] = fmean(step.weight_losses[1:])
        if step.task_loss is not None:
            soft[step.step] = step.task_loss
    curves = {"largest sub-network": largest, "mean of the others": smaller, "soft network": soft}
    return {name: curve for name, curve in curves.items() if curve}
