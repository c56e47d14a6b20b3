"""One HTML page about some runs; it needs no network, no script and no other file."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dmcp.budget import LATENCY, MEMORY, show_cost
from dmcp.errors import FileError
from dmcp.report import figures
from dmcp.results import DMCP, ORIGINAL, UNPRUNED, Row, against, score, score_name, standard_error, unknown
from dmcp.runs import PastRun, value_at
from dmcp.runtime.io import plain, read_bytes
from dmcp.storage import WEIGHTS
from dmcp.tracing.cost import show_bytes
from dmcp.units import show_ms

if TYPE_CHECKING:  # imported where they are needed: most commands make no page
    from jinja2 import Template
    from matplotlib.figure import Figure

_MAX_FIGURE = 2**24  # bytes
_OVERVIEW = "accuracy-macs"
_COUNTED = {"macs": "MACs", "params": "parameters"}
_SAVED = {  # figures that a run has drawn, since they need its network
    "macs.svg": "Cost of samples of the chains (the paper's figure 6)",
    "distribution.svg": "Widths of samples inside the budget (the paper's figure 7)",
}


def make_page(runs: Sequence[PastRun]) -> str:
    """The whole page."""
    charts = {name: figures.to_svg(figure, name) for name, figure in draw_runs(runs).items()}
    return _template().render(
        title=f"{runs[0].name}: report" if len(runs) == 1 else f"Report of {len(runs)} runs",
        score_name=" or ".join(sorted({score_name([run.result]) for run in runs if run.result}) or ["accuracy"]),
        overview=charts.get(_OVERVIEW, ""),
        several_sets=len({run.setting("data") for run in runs}) > 1,
        runs=[_describe(number, run, charts) for number, run in enumerate(runs, start=1)],
    )


@functools.cache
def _template() -> Template:
    """Every text that it is given is escaped, and has no control characters."""
    import jinja2

    def clean(value: Any) -> Any:
        return plain(value) if type(value) is str else value

    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=clean, trim_blocks=True)
    return env.from_string(Path(__file__).with_name("page.html").read_text())


# charts


def draw_runs(runs: Sequence[PastRun]) -> dict[str, Figure]:
    """Every chart that there is data for, by a name that can be a file's."""
    points = [
        (
            row.name,
            str(number) if row.name == DMCP and len(runs) > 1 else "",
            row.macs,
            row.accuracy,
            _error(row) or 0.0,
        )
        for number, run in enumerate(runs, start=1)
        for row in run.rows
        if not row.own_metric  # no share, as the axis has them
    ]
    points.sort(key=lambda point: point[0] != DMCP)
    charts = {_OVERVIEW: figures.accuracy_over_cost(points)} if points else {}
    for number, run in enumerate(runs, start=1):
        charts |= {f"{_slug(number, run)}-{name}": figure for name, figure in _draw_run(run)}
    return charts


def _slug(number: int, run: PastRun) -> str:
    return re.sub(r"\W+", "-", f"{number} {run.name}", flags=re.ASCII).strip("-")


def _draw_run(run: PastRun) -> Iterator[tuple[str, Figure]]:
    full = run.before
    rows = [(plain(it), full[it], kept, run.expected.get(it)) for it, kept in run.widths.items() if it in full]
    if rows:
        yield "widths", figures.widths_per_space(rows, "Width of each space")
    if count := min((len(record.ratios) for record in run.search if record.ratios), default=0):
        low = value_at(run.settings, "search", "tolerance")
        tolerance = low if isinstance(low, float) and 0 < low < 1 else None
        kinds = [figures.KINDS.get(kind, plain(kind)) for kind in run.targets]
        names = kinds if len(kinds) == count else [f"limit {number + 1}" for number in range(count)]
        yield "cost", figures.cost_over_time(run.search, names, tolerance)
    largest = {record.step: record.weight_losses[0] for record in run.search if record.weight_losses}
    others = {it.step: fmean(it.weight_losses[1:]) for it in run.search if it.weight_losses and it.weight_losses[1:]}
    soft = {record.step: record.task_loss for record in run.search if record.task_loss is not None}
    curves = {"largest sub-network": largest, "mean of the others": others, "soft network": soft}
    if curves := {name: curve for name, curve in curves.items() if curve}:
        yield "search", figures.losses(curves, "Losses of the search")
    if run.training:
        curves = {name: {record.step: record.loss for record in records} for name, records in run.training.items()}
        yield "training", figures.losses(curves, "Loss of the training")


# texts


def _describe(number: int, run: PastRun, charts: dict[str, str]) -> dict[str, Any]:
    """What the page says about one run."""
    row, share = run.result, run.share("macs")
    own, full = f"{_slug(number, run)}-", run.before
    return run.describe() | {
        "number": number,
        "done": run.done,
        "score": _score(row) if row else "",
        "summary": _summary(run),
        "macs": f"{row.macs:,}" if row else "",
        "share": percent(share) if share else "",
        "problems": run.problems,
        "tiles": list(_tiles(run)),
        "notes": [*unknown(run.rows), *([run.latency.text, run.latency.warning] if run.latency else [])],
        "networks": _networks(run),
        "charts": [svg for name, svg in charts.items() if name.startswith(own)],
        "saved": dict(_saved(run)),
        "widths": [
            (name, full.get(name, ""), f"{run.expected[name]:.1f}" if name in run.expected else "", kept)
            for name, kept in run.widths.items()
        ],
        "settings": list(_settings(run)),
        "typed": _typed(run),
        "path": shlex.quote(plain(str(run.folder))),
    }


def _error(row: Row) -> float | None:
    """Standard error of an accuracy; None if the samples were not counted, or the metric is the user's own."""
    return None if row.own_metric or not row.samples else standard_error(row.accuracy, row.samples)


def _score(row: Row) -> str:
    """95.81 ± 1.03 %"""
    error = _error(row)
    return score(row, " %") if error is None else f"{score(row, '')} ± {100 * error:.2f} %"


def _gaps(run: PastRun, row: Row) -> str:
    """How a network compares with each of the others, as if they had been tested independently."""
    gaps = []
    for other in (it for it in run.rows if it is not row):
        errors = [error for it in (row, other) if (error := _error(it)) is not None]
        sure = f" ± {100 * math.hypot(*errors):.2f} points" if len(errors) == 2 else " points"
        gaps.append(against(row, other).replace(" points", sure))
    return ", ".join(gaps).replace("-", "\N{MINUS SIGN}")


def _faster(run: PastRun) -> tuple[float, Row, Row] | None:
    """How many times as fast as before the result is, and both rows; None if that was not measured."""
    rows = {row.name: row for row in run.rows if row.batch and row.ms}
    before, row = rows.get(UNPRUNED, rows.get(ORIGINAL)), run.result
    if row is None or before is None or row.name not in rows or before is row or before.batch != row.batch:
        return None
    return before.ms / row.ms, row, before


def _summary(run: PastRun) -> str:
    """What came out, in a sentence or two."""
    if (row := run.result) is None:
        return ""
    kept = [f"{percent(share)} of the {word}" for kind, word in _COUNTED.items() if (share := run.share(kind))]
    words = [f"keeps {' and '.join(kept)}"] if kept else []
    words += [f"is {speed[0]:.2f} times as fast"] if (speed := _faster(run)) else []
    tested = f" on {row.samples:,} test samples" if row.samples else ""
    words.append(f"has {'a ' if row.own_metric else 'an '}{score_name([row])} of {_score(row)}{tested}")
    text = f"The network {row.name} {', '.join(words[:-1])}{' and ' if words[:-1] else ''}{words[-1]}"
    return f"{text}: {gaps}." if (gaps := _gaps(run, row)) else f"{text}."


def _tiles(run: PastRun) -> Iterator[tuple[str, str, str]]:
    """The figures that matter most: title, value, note."""
    row = run.result
    if row:
        yield f"{score_name([row])}, {row.name}", _score(row), _gaps(run, row)
    if speed := _faster(run):
        times, now, before = speed
        yield "Speed", f"{times:.2f} ×", f"{now.ms:.2f} ms for {now.batch} samples, {before.name} {before.ms:.2f} ms"
    for kind, word in _COUNTED.items() if row else ():
        share, count = run.share(kind), f"{getattr(row, kind):,}"
        size = f", {show_bytes(size)} on disk" if kind == "params" and (size := _bytes(run)) else ""
        if share is None:
            yield word, count, f"the unpruned network was not counted{size}"
        else:
            title = "Size, parameters kept" if kind == "params" else f"{word} kept"
            yield title, percent(share), f"{count} of {run.unpruned(kind):,}{size}"
    if budget := run.setting("search", "budget"):
        notes = [f"at most {_cost(kind, target)}" for kind, target in run.targets.items()]
        yield "Budget", budget.replace(",", ", "), ", ".join(notes)
    if it := run.latency:
        measured = "not measured" if it.measured_ms is None else show_ms(it.measured_ms)
        asked, predicted, unpruned = map(show_ms, (it.asked_ms, it.predicted_ms, it.unpruned_ms))
        yield "Latency", measured, f"asked {asked}, predicted {predicted}, unpruned {unpruned}"
    if row and (retrain := run.setting("retrain")):
        teacher = run.setting("teacher")
        yield "Final training", retrain, f"teacher: {teacher}" if teacher else ""


def _bytes(run: PastRun) -> int:
    path = run.folder / WEIGHTS
    return path.stat().st_size if path.is_file() else 0


def _cost(kind: str, target: int) -> str:
    return show_cost(kind, target) if kind in (LATENCY, MEMORY) else f"{target:,} {figures.KINDS.get(kind, kind)}"


def _networks(run: PastRun) -> dict[str, Any]:
    head = ["network", "MACs", "parameters", score_name(run.rows)]
    rows = [[row.name, f"{row.macs:,}", f"{row.params:,}", _score(row)] for row in run.rows]
    if rows and all(row.batch for row in run.rows):
        head.append(f"ms per {run.rows[0].batch} samples")
        rows = [[*cells, f"{row.ms:.2f}"] for cells, row in zip(rows, run.rows, strict=True)]
    return {"head": head, "rows": rows}


def _saved(run: PastRun) -> Iterator[tuple[str, str]]:
    """Figures of the run's folder as data URLs: in an image nothing can run."""
    for name, title in _SAVED.items():
        with contextlib.suppress(FileError):  # there is none
            data = base64.b64encode(read_bytes(run.folder / name, _MAX_FIGURE)).decode()
            yield title, f"data:image/svg+xml;base64,{data}"


def _settings(run: PastRun) -> Iterator[tuple[str, str]]:
    for key, value in run.settings.items():
        if key not in ("argv", "unpruned"):
            for name, item in value.items() if isinstance(value, dict) else [("", value)]:
                yield f"{key}.{name}".rstrip("."), item if isinstance(item, str) else json.dumps(item)


def _typed(run: PastRun) -> str:
    """The command that made the run, for a shell; empty if the run did not keep it."""
    words = run.settings.get("argv")
    if not isinstance(words, list) or not words:
        return ""
    program = "dmcp" if Path(str(words[0])).name in ("dmcp", "__main__.py") else words[0]
    return shlex.join(map(str, [program, *words[1:]]))


def percent(share: float) -> str:
    """49.9 %"""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"
