"""One HTML page about some runs; it needs no network, no script and no other file."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dmcp.report import figures
from dmcp.results import (
    ACCURACY,
    DMCP,
    ORIGINAL,
    UNPRUNED,
    Row,
    difference,
    error_of,
    score,
    score_name,
    unknown_scores,
)
from dmcp.runs.files import WEIGHTS
from dmcp.runs.reading import PastRun, value_at
from dmcp.runtime.io import plain
from dmcp.units import show_bytes

if TYPE_CHECKING:  # imported where they are needed: most commands make no page
    from jinja2 import Template
    from matplotlib.figure import Figure


def make_page(runs: Sequence[PastRun]) -> str:
    """The whole page."""
    several, points = len(runs) > 1, list[tuple[str, str, int, float, float]]()
    for number, run in enumerate(runs, start=1):
        for row in (it for it in run.rows if it.score == ACCURACY):  # no share, as the axis has them
            text = str(number) if row.name == DMCP and several else ""
            points.append((row.name, text, row.macs, row.accuracy, error_of(row) or 0.0))
    points.sort(key=lambda point: point[0] != DMCP)
    return _template().render(
        title=f"{len(runs)} runs" if several else runs[0].name,
        score_name=" or ".join(sorted({score_name([run.result]) for run in runs if run.result}) or [ACCURACY]),
        overview=figures.to_svg(figures.accuracy_over_cost(points), "overview") if points else "",
        several_sets=len({run.setting("data") for run in runs}) > 1,
        runs=[_describe(number, run) for number, run in enumerate(runs, start=1)],
    )


@functools.cache
def _template() -> Template:
    """Every text that it is given is escaped, and has no control characters."""
    import jinja2

    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    env.finalize = lambda value: plain(value) if type(value) is str else value
    return env.from_string(Path(__file__).with_name("page.html").read_text())


def _charts(run: PastRun) -> Iterator[Figure]:
    """Every chart of a run that there is data for."""
    full = run.before
    rows = [(plain(it), full[it], kept, run.expected.get(it)) for it, kept in run.widths.items() if it in full]
    if rows:
        yield figures.widths_per_space(rows, "Width of each space")
    if count := min((len(record.ratios) for record in run.search if record.ratios), default=0):
        low = value_at(run.settings, "search", "tolerance")
        tolerance = low if isinstance(low, float) and 0 < low < 1 else None
        kinds = [figures.KINDS.get(kind, plain(kind)) for kind in run.targets]
        names = kinds if len(kinds) == count else [f"limit {number + 1}" for number in range(count)]
        yield figures.cost_over_time(run.search, names, tolerance)
    largest = {record.step: record.weight_losses[0] for record in run.search if record.weight_losses}
    others = {it.step: fmean(it.weight_losses[1:]) for it in run.search if it.weight_losses and it.weight_losses[1:]}
    soft = {record.step: record.task_loss for record in run.search if record.task_loss is not None}
    curves = {"largest sub-network": largest, "mean of the others": others, "soft network": soft}
    if curves := {name: curve for name, curve in curves.items() if curve}:
        yield figures.losses(curves, "Losses of the search")
    if run.training:
        curves = {name: {record.step: record.loss for record in records} for name, records in run.training.items()}
        yield figures.losses(curves, "Loss of the training")


def _describe(number: int, run: PastRun) -> dict[str, Any]:
    """What the page says about one run."""
    row, share, full, words = run.result, run.share("macs"), run.before, run.settings.get("argv")
    wide = 5 if run.rows and all(it.batch for it in run.rows) else 4  # columns
    return run.describe() | {
        "number": number,
        "summary": summary(run),
        "done": run.done,
        "score": _score(row) if row else "",
        "macs": f"{row.macs:,}" if row else "",
        "share": percent(share) if share else "",
        "problems": run.problems,
        "tiles": list(_tiles(run)),
        "notes": [*unknown_scores(run.rows), *([run.latency.text, run.latency.warning] if run.latency else [])],
        "head": ["network", "MACs", "parameters", score_name(run.rows), f"ms per {row.batch if row else 0}"][:wide],
        "networks": [(it.name, f"{it.macs:,}", f"{it.params:,}", _score(it), f"{it.ms:.2f}")[:wide] for it in run.rows],
        "charts": [figures.to_svg(chart, f"{number}-{place}") for place, chart in enumerate(_charts(run))],
        "widths": [(it, full.get(it, ""), run.expected.get(it, ""), kept) for it, kept in run.widths.items()],
        "settings": list(_settings(run)),
        "typed": shlex.join(["dmcp", *map(str, words[1:])]) if isinstance(words, list) else "",
        "path": shlex.quote(plain(str(run.folder))),
    }


def _score(row: Row) -> str:
    """95.81 ± 1.03 %"""
    error = error_of(row)
    return score(row, " %") if error is None else f"{score(row, '')} ± {100 * error:.2f} %"


def summary(run: PastRun) -> str:
    """Half the MACs, 1.86 × as fast, −0.26 ± 0.94 points against unpruned; empty if nothing was tested."""
    tiles, share = [*_tiles(run)] if run.result else [], run.share("macs") or 0.0
    parts = ["Half the MACs" if 0.475 <= share < 0.505 else f"{percent(share)} of the MACs"] if share else []
    parts += [f"{value} as fast" for title, value, _ in tiles if title == "Speed"]
    return ", ".join(parts + [note.partition(", ")[0] or f"{title} {value}" for title, value, note in tiles[:1]])


def _tiles(run: PastRun) -> Iterator[tuple[str, str, str]]:
    """The figures that matter most: title, value, note."""
    if row := run.result:
        gaps = ", ".join(difference(row, other) for other in run.rows if other is not row)
        yield f"{score_name([row])}, {row.name}", _score(row), gaps.replace("-", "\N{MINUS SIGN}")
        times = {it.name: it.ms for it in run.rows if it.batch and it is not row}
        in_torch = times.get(UNPRUNED) or times.get(ORIGINAL), row.ms, f"for {row.batch} samples in torch"
        before, ms, what = in_torch
        if run.exported:
            before, ms = run.exported.unpruned_ms, run.exported.pruned_ms
            what = f"a sample in {run.exported.runtime}"
        if before and ms:
            yield "Speed", f"{before / ms:.2f} ×", f"{ms:.3g} ms {what}, before {before:.3g} ms"
        weights = run.folder / WEIGHTS
        size = f", {show_bytes(weights.stat().st_size)} on disk" if weights.is_file() else ""
        for kind, title, more in (("macs", "MACs kept", ""), ("params", "Parameters kept", size)):
            full, count = run.unpruned(kind), f"{getattr(row, kind):,}"
            note = f"{count} of {full:,}{more}" if full else f"the unpruned network was not counted{more}"
            yield title, percent(getattr(row, kind) / full) if full else count, note
    if budget := run.setting("search", "budget"):
        limits = [(figures.KINDS.get(it, it), figures.amount(it, most)) for it, most in run.targets.items()]
        yield "Budget", budget.replace(",", ", "), ", ".join(f"{name}: at most {most}" for name, most in limits)


def _settings(run: PastRun) -> Iterator[tuple[str, str]]:
    for key, value in run.settings.items():
        if key not in ("argv", "unpruned"):
            for name, item in value.items() if isinstance(value, dict) else [("", value)]:
                yield f"{key}.{name}".rstrip("."), item if isinstance(item, str) else json.dumps(item)


def percent(share: float) -> str:
    """49.9 %"""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"
