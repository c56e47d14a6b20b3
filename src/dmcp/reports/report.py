"""One HTML page about some runs: it needs nothing but itself, and trusts nothing that it read."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmcp.budget import LATENCY, MEMORY, limits_latency, show_cost
from dmcp.files import plain
from dmcp.latency import show_ms
from dmcp.reports.charts import STYLE, Bar, Cell, Point, draw_bars, draw_heat, draw_lines, draw_scatter, percent
from dmcp.reports.listing import PastRun, command_line, date, progress, text_at, value_at
from dmcp.retraining import AS_IT_WAS, TRAINED_FIRST, Retrain, origin
from dmcp.rows import OURS, UNPRUNED, Row, against, score, score_name, unknown

_STYLE = STYLE + Path(__file__).with_name("report.css").read_text()
_SCRIPT = Path(__file__).with_name("report.js").read_text()
_WORDS = {"macs": "MACs", "params": "parameters"}  # what networks of the table have
_CAPTIONS = {  # what each chart shows, and how to read it
    "widths": (
        "Width of each space",
        "Channels kept, of those that the unpruned network has where the run knows them.",
    ),
    "cost": ("Expected cost over the search", "After the warm-up; the budget loss pulls it into the band."),
    "chances": ("Chance that each group is kept", "At the end of the search; the first group is always kept."),
    "search": (
        "Losses of the search",
        "The other sub-networks imitate the largest one, or learn the labels as it does.",
    ),
    "training": ("Loss of the training", "On the training batches, by the network that is trained."),
}


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


def make_page(runs: Sequence[PastRun]) -> str:
    """The whole page."""
    title = f"{runs[0].name}: report" if len(runs) == 1 else f"Report of {len(runs)} runs"
    ours = f"style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}"
    policy = f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_safe(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<header><h1>{_safe(title)}</h1></header>\n<main>",
        _overview(runs),
        *(_section(number, run) for number, run in enumerate(runs, start=1)),
        "</main>\n<footer>Made by torch-dmcp. MACs are multiply-adds of one sample.</footer>",
        f'<div id="hint" role="tooltip" hidden></div>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n',
    ]
    return "\n".join(parts)


# charts


def chart_runs(runs: Sequence[PastRun]) -> str:
    """Accuracy over MACs of every network that was tested; empty if none was."""
    shapes = {OURS: "circle", UNPRUNED: "square"}
    start = _shared([run.name for run in runs])  # labels need not repeat what all names begin with
    points = []
    for number, run in enumerate(runs):
        for row in run.rows:
            if row.own_metric:  # no share, as the axis has them
                continue
            name = run.name[start:] or run.name
            whose = row.name if len(runs) == 1 else name if row.name == OURS else f"{name}, {row.name}"
            hint = f"{run.name}, {row.name}: {row.macs:,} MACs, accuracy {_accuracy(row)}"
            points.append(Point(row.macs, row.accuracy, whose, hint, number, shapes.get(row.name, "diamond")))
    return draw_scatter(points, ("MACs", "accuracy"), "Accuracy over MACs of each network") if points else ""


def _shared(names: Sequence[str]) -> int:
    """Letters that all names begin with, up to the end of a word."""
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    words = re.match(r"(.*[\W_])?", "".join(letters[0] for letters in same))
    return words.end() if words else 0


def chart_run(run: PastRun) -> dict[str, str]:
    """Every chart that there is data for, by name."""
    drawn = {
        "widths": _chart_widths(run),
        "cost": _chart_cost(run),
        "chances": _chart_chances(run),
        "search": _chart_search(run),
        "training": _chart_training(run),
    }
    return {name: svg for name, svg in drawn.items() if svg}


def _chart_widths(run: PastRun) -> str:
    if not run.widths:
        return ""
    before, expected = _before(run), _expected(run)
    bars = [Bar(plain(name), kept, before.get(name), expected.get(name)) for name, kept in run.widths.items()]
    return draw_bars(bars, "Channels of each space before and after")


def _before(run: PastRun) -> dict[str, int]:
    """Channels of each space of the unpruned network, as far as the run knows them."""
    stored = value_at(run.settings, "unpruned", "widths")
    if isinstance(stored, Mapping):
        return {name: size for name, size in stored.items() if type(size) is int and size > 0}
    if run.chances is None or value_at(run.settings, "search", "largest"):  # then the chains do not reach the end
        return {}
    return dict(zip(run.chances.spaces, run.chances.sizes.sum(dim=1).tolist(), strict=True))


def _expected(run: PastRun) -> dict[str, float]:
    """Expected width of each space at the end of the search."""
    if run.chances is None:
        return {}
    process = run.chances.process
    widths = process.moment(process.marginals(run.chances.alphas), run.chances.sizes, 1)
    return dict(zip(run.chances.spaces, widths.tolist(), strict=True))


def _chart_cost(run: PastRun) -> str:
    moved = [(record.step, record.ratios) for record in run.search if record.ratios]
    if not moved:
        return ""
    count = min(len(ratios) for _, ratios in moved)
    lines = {
        f"{_WORDS.get(kind, plain(kind))} / budget": [ratios[number] for _, ratios in moved]
        for number, kind in enumerate(_kinds(run.budget, count))
    }
    low = value_at(run.settings, "search", "tolerance")
    band = (low, 1.0) if isinstance(low, float) and 0 < low < 1 else None
    title = "Expected cost over the search, as a share of the budget"
    return draw_lines([step for step, _ in moved], lines, "of the budget", title, as_share=True, band=band)


def _kinds(budget: str, count: int) -> Sequence[str]:
    """The kinds of a budget's limits in their order: "50%,params:2M" -> macs, params."""
    kinds = [part.split(":")[0].strip() if ":" in part else _unnamed(part) for part in budget.split(",")]
    return kinds if len(kinds) == count else [f"limit {number + 1}" for number in range(count)]


def _unnamed(part: str) -> str:
    return LATENCY if limits_latency(part) else "macs"


def _cost(kind: str, target: int) -> str:
    return show_cost(kind, target) if kind in (LATENCY, MEMORY) else f"{target:,} {_WORDS.get(kind, kind)}"


def _chart_chances(run: PastRun) -> str:
    found = run.chances
    if found is None or not len(found.spaces):
        return ""
    marginals = found.process.marginals(found.alphas).tolist()
    rows = {}
    for name, chances, sizes in zip(found.spaces, marginals, found.sizes.tolist(), strict=True):
        cells, first = [], 1
        for number, (chance, size) in enumerate(zip(chances, sizes, strict=True), start=1):
            if size:
                group = f"{plain(name)}, group {number}, channels {first} to {first + size - 1}"
                cells.append(Cell(chance, f"{group}: kept with {percent(chance)}"))
            first += size
        rows[plain(name)] = cells
    return draw_heat(rows, "Chance that each group of each space is kept")


def _chart_search(run: PastRun) -> str:
    if not run.search:
        return ""
    losses = [record.weight_losses or () for record in run.search]
    lines = {
        "largest sub-network": [some[0] if some else None for some in losses],
        "mean of the others": [sum(some[1:]) / len(some[1:]) if some[1:] else None for some in losses],
        "soft network, for the alphas": [record.task_loss for record in run.search],
    }
    kept = {name: values for name, values in lines.items() if any(value is not None for value in values)}
    steps = [record.step for record in run.search]
    return draw_lines(steps, kept, "loss", "Losses over the steps of the search") if kept else ""


def _chart_training(run: PastRun) -> str:
    if not run.training:
        return ""
    losses = {name: {record.step: record.loss for record in records} for name, records in run.training.items()}
    steps = sorted({step for known in losses.values() for step in known})
    lines = {name: [known.get(step) for step in steps] for name, known in losses.items()}
    return draw_lines(steps, lines, "loss", "Loss over the steps of the training")


# parts of the page


def _overview(runs: Sequence[PastRun]) -> str:
    """All runs in one table, and in one plot."""
    kinds = sorted({score_name([run.result]) for run in runs if run.result}) or ["accuracy"]
    column = f"#{' or '.join(kinds)}"
    head = ["run", "command", "model", "data", "budget", "state", column, "#MACs", "#of unpruned", "started"]
    rows = []
    for number, run in enumerate(runs, start=1):
        words = [text_at(run.settings, "command"), *(text_at(run.settings, "job", key) for key in ("model", "data"))]
        row, share = run.result, run.share("macs")
        figures = [_accuracy(row), f"{row.macs:,}"] if row else ["", ""]
        link = Html(f'<a href="#run-{number}">{_safe(run.name)}</a>')
        rows.append([link, *words, run.budget, _badge(run), *figures, percent(share) if share else "", date(run)])
    parts = ['<section aria-label="All runs">', _table(head, rows, "All runs")]
    svg = chart_runs(runs)
    if svg:
        note = "Circle: the pruned network; square: the unpruned one; diamond: others, like uniform widths."
        if len({text_at(run.settings, "job", "data") for run in runs}) > 1:
            note += " The runs are on different data: their accuracies do not compare."
        parts.append(_figure("Accuracy and MACs of each network", note, svg))
    return "\n".join([*parts, "</section>"])


def _section(number: int, run: PastRun) -> str:
    """Everything about one run."""
    what = [text_at(run.settings, "command"), text_at(run.settings, "job", "model")]
    on = [f"on {data}" for data in [text_at(run.settings, "job", "data")] if data]
    facts = " ".join(word for word in [*what, *on] if word)
    parts = [
        f'<section id="run-{number}" aria-labelledby="name-{number}">',
        f'<h2 id="name-{number}">{_safe(run.name)} {_badge(run)}</h2>',
        f'<p class="soft">{_safe(f"{facts}, started {date(run)}, in {run.folder}".lstrip(", "))}</p>',
    ]
    if run.problems:
        parts.append(f"<p>Not all of it can be read: {_safe(' '.join(run.problems))}</p>")
    if not run.done:
        parts.append(f"<p>Not finished: {_safe(progress(run))}.</p>")
    parts.append(_tiles(run))
    parts += [f"<p>{_safe(text)}.</p>" for text in [*_origin(run), *unknown(run.rows)]]
    if run.latency:
        parts += [f"<p>{_safe(text)}</p>" for text in (f"{run.latency.text}.", run.latency.trouble) if text]
    if run.rows:
        parts.append(_networks(run))
    figures = [_figure(*_CAPTIONS[name], svg) for name, svg in chart_run(run).items()]
    if figures:
        parts.append('<div class="charts">' + "\n".join(figures) + "</div>")
    return "\n".join([*parts, _command(run), _width_table(run), *_settings(run), "</section>"])


def _origin(run: PastRun) -> list[str]:
    """Where the weights of the pruned network come from, where the settings say it."""
    kind, teacher = text_at(run.settings, "retrain"), text_at(run.settings, "job", "teacher")
    if text_at(run.settings, "command") != "prune" or not run.rows or kind not in list(Retrain):
        return []
    if teacher:
        teacher = AS_IT_WAS if teacher == "given" else f"the teacher, {teacher}"
    elif kind == Retrain.TEACHER:
        teacher = TRAINED_FIRST
    told = [value_at(run.settings, "train", f"teacher_{name}") for name in ("share", "temperature")]
    share, temperature = (float(it) if isinstance(it, int | float) else 1.0 for it in told)  # 1 is left out
    return [origin(Retrain(kind), teacher, share, temperature)]


def _tiles(run: PastRun) -> str:
    """The figures that matter most."""
    tiles: list[tuple[str, str, str]] = []
    if run.budget:
        targets = run.chances.targets if run.chances else {}
        notes = [f"at most {_cost(kind, target)}" for kind, target in targets.items()]
        tiles.append(("Budget", run.budget.replace(",", ", "), ", ".join(notes)))
    row = run.result
    for kind, word in _WORDS.items():
        share, title = run.share(kind), word[:1].upper() + word[1:]
        if row and share is not None:
            tiles.append((f"{title} kept", percent(share), f"{getattr(row, kind):,} of {run.unpruned(kind):,}"))
        elif row:
            tiles.append((title, f"{getattr(row, kind):,}", "the unpruned network was not counted"))
    if run.latency:
        told = run.latency
        took = "not measured" if told.measured_ms is None else show_ms(told.measured_ms)
        parts = {"asked": told.asked_ms, "predicted": told.predicted_ms, "unpruned": told.unpruned_ms}
        tiles.append(("Latency", took, ", ".join(f"{word} {show_ms(ms)}" for word, ms in parts.items())))
    if row:
        others = [other for other in run.rows if other is not row]
        gaps = [against(row, other) for other in others]
        tiles.append(
            (
                f"{score_name([row]).capitalize()}, {row.name}",
                _accuracy(row),
                ", ".join(gaps).replace("-", "\N{MINUS SIGN}"),
            )
        )
    last = next((record.ratios for record in reversed(run.search) if record.ratios), ())
    if last:
        tiles.append(
            ("Expected cost, last step", ", ".join(map(percent, last)), "of the budget, as that step found it")
        )
    cells = (
        f'<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd><dd class="note">{_safe(note)}</dd></div>'
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>' if tiles else ""


def _networks(run: PastRun) -> str:
    timed = all(row.batch for row in run.rows)
    head = ["network", "#MACs", "#parameters", f"#{score_name(run.rows)}"]
    head += [f"#ms per {run.rows[0].batch} samples"] if timed else []
    rows = [
        [row.name, f"{row.macs:,}", f"{row.params:,}", _accuracy(row), *([f"{row.ms:.2f}"] if timed else [])]
        for row in run.rows
    ]
    return _card("Networks", _table(head, rows, "Networks"))


def _command(run: PastRun) -> str:
    line = command_line(run)
    text = f"<pre><code>{_safe(line)}</code></pre>" if line else "<p>This run did not keep its command line.</p>"
    return _card("Command", text)


def _width_table(run: PastRun) -> str:
    before, expected = _before(run), _expected(run)
    rows = [
        [name, str(before.get(name, "")), f"{expected[name]:.1f}" if name in expected else "", str(kept)]
        for name, kept in run.widths.items()
    ]
    table = _table(["space", "#channels before", "#expected by the chain", "#kept"], rows, "Widths")
    return _folded("Widths as a table", table) if rows else ""


def _settings(run: PastRun) -> list[str]:
    """All settings by their place in the file, and the versions."""
    rows: list[list[str]] = []
    for key, value in run.settings.items():
        if key in ("argv", "versions", "unpruned"):
            continue
        inner = value.items() if isinstance(value, dict) else [("", value)]
        rows += [[f"{key}.{name}".rstrip("."), _value(item)] for name, item in inner]
    versions = value_at(run.settings, "versions")
    known = [[name, _value(version)] for name, version in versions.items()] if isinstance(versions, dict) else []
    tables = {"Settings": (["setting", "value"], rows), "Versions": (["part", "version"], known)}
    return [_folded(name, _table(head, lines, name), "card wrap") for name, (head, lines) in tables.items() if lines]


# pieces of HTML


def _safe(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(plain(text)))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _accuracy(row: Row) -> str:
    return score(row, " %")


def _badge(run: PastRun) -> Html:
    return Html(f'<span class="state {run.state}">{run.state}</span>')


def _value(value: Any) -> str:
    """A setting as text."""
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        return "nested too deeply to be shown"


def _figure(name: str, note: str, svg: str) -> str:
    return f"<figure><figcaption>{_safe(name)}<span>{_safe(note)}</span></figcaption>\n{svg}</figure>"


def _card(name: str, body: str) -> str:
    return f'<div class="card"><h3>{_safe(name)}</h3>{body}</div>'


def _folded(name: str, body: str, kind: str = "card") -> str:
    return f'<details class="{kind}"><summary>{_safe(name)}</summary>{body}</details>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """A table that scrolls in its own box; names that start with # are of columns of numbers."""
    kinds = [' class="number"' if column.startswith("#") else "" for column in head]
    tops = "".join(
        f'<th scope="col"{kind}>{_safe(column.lstrip("#"))}</th>' for column, kind in zip(head, kinds, strict=True)
    )
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td{kind}>{_safe(cell)}</td>" for cell, kind in zip(rest, kinds[1:], strict=True))
        lines.append(f'<tr><th scope="row">{_safe(first)}</th>{cells}</tr>')
    body = f"<thead><tr>{tops}</tr></thead>\n<tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_safe(name)}"><table>{body}</table></div>'
