"""Charts as SVG text: drawn for one page or as files of their own, themed by charts.css, hints in their titles."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STYLE = Path(__file__).with_name("charts.css").read_text()
COLOURS = 6  # classes c0 ... c5 in charts.css
_WIDTH, _LEFT, _RIGHT, _TOP, _LETTER = 400.0, 66.0, 20.0, 10.0, 7.7  # letter: width of a wide one, at 12 px
_HIGH, _BELOW = 190.0, 40.0  # of the plot itself, and of its axis
_ROW, _NAMES, _SHOWN = 20.0, 132.0, 17  # height of a bar with its gap; the names beside it: width, letters
_POINTS = 150  # of a line; more steps than that are averaged

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    """One network in the scatter plot."""

    x: float
    y: float
    label: str
    hint: str
    colour: int
    shape: str  # circle, square or diamond


@dataclass(frozen=True)
class Bar:
    """Channels of one space; `before` and `expected` where they are known."""

    name: str
    after: int
    before: int | None = None
    expected: float | None = None


@dataclass(frozen=True)
class Cell:
    """One group of a space in the heat map."""

    share: float
    hint: str


def as_file(svg: str) -> str:
    """The chart with its style inside, to stand alone."""
    return svg.replace(">", f"><style>{STYLE}</style>", 1) + "\n"


# the four charts


def draw_scatter(points: Sequence[Point], names: tuple[str, str], title: str) -> str:
    """Points with labels where there is room; x as counts, y as shares."""
    xs, ys = ticks([0.0, *(p.x for p in points)]), ticks([p.y for p in points])
    high = 250.0
    parts = _axes(xs, ys, high, names, (short, percent))
    places = [(_scale(p.x, xs, _LEFT, _WIDTH - _RIGHT), _scale(p.y, ys, _TOP + high, _TOP)) for p in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    for point, place in zip(points, places, strict=True):
        near = [it.hint for it, at in zip(points, places, strict=True) if math.dist(place, at) < 6 and it is not point]
        hint = "; ".join([point.hint, *near])  # what lies below another mark is still said
        mark = f'class="mark f{point.colour % COLOURS}" d="{_shape(point.shape, *place)}"'
        parts.append(f"<path {mark}>{_title(hint)}</path>")
    for point, place in sorted(zip(points, places, strict=True), key=lambda it: it[0].shape != "circle"):
        parts.append(_label(shorten(point.label, 22), *place, high, taken))  # circles choose first
    return _svg(high + _TOP + _BELOW, title, parts)


def draw_bars(bars: Sequence[Bar], title: str) -> str:
    """Channels kept: as shares of what was there before, or, where that is not known, as counts."""
    known = all(bar.before for bar in bars)
    most = 1.0 if known else max(bar.after for bar in bars)
    room = _WIDTH - _NAMES - 92
    words = [("before", "before"), ("kept", "f0"), ("expected by the chain", "expected")]
    legend, top = _legend(words[: (3 if any(bar.expected is not None for bar in bars) else 2)] if known else words[1:2])
    parts = [legend]
    for number, bar in enumerate(bars):
        y, full = top + number * _ROW, (bar.before or 1) if known else 1
        length = room * min(bar.after / full / most, 1.0)
        text = f"{bar.after} of {bar.before}" if known else f"{bar.after}"
        hint = f"{bar.name}: {text} channels" + (f", {percent(bar.after / full)}" if known else "")
        marks = [_text(_NAMES - 8, y + 13, shorten(bar.name, _SHOWN), "end")]
        if known:
            marks.append(_rect(_NAMES, y + 3, room, 13, "before"))
        marks.append(_rect(_NAMES, y + 3, length, 13, "bar f0"))
        if known and bar.expected is not None:
            marks.append(_rect(_NAMES + room * min(bar.expected / full, 1.0) - 1, y + 1, 2, 17, "expected"))
            hint += f"; the chain expected {bar.expected:.1f}"
        marks.append(_text(_WIDTH - 2, y + 13, text, "end"))
        marks.append(_rect(0, y, _WIDTH, _ROW, "hit", hint))
        parts.append("".join(marks))
    return _svg(top + len(bars) * _ROW + 6, title, parts)


def draw_lines(
    steps: Sequence[float],
    lines: Mapping[str, Sequence[float | None]],
    y_name: str,
    title: str,
    *,
    as_share: bool = False,
    band: tuple[float, float] | None = None,
) -> str:
    """Values over steps, None where a line has none; many steps are averaged, and the band is what is allowed."""
    size = -(-len(steps) // _POINTS)
    bundles = [slice(start, start + size) for start in range(0, len(steps), size)]
    means = {name: [_mean(values[bundle]) for bundle in bundles] for name, values in lines.items()}
    seen = [value for values in means.values() for value in values if value is not None]
    show = percent if as_share else "{:.3g}".format
    xs, ys = ticks([steps[0], steps[-1]]), ticks([*seen, *(band or ())])
    at = [_scale((steps[bundle][0] + steps[bundle][-1]) / 2, xs, _LEFT, _WIDTH - _RIGHT) for bundle in bundles]
    words = [(name, f"key k{number % COLOURS}") for number, name in enumerate(means)]
    legend, top = _legend([*words, *([(f"allowed: {show(band[0])} to {show(band[1])}", "band")] if band else [])])
    parts = [legend]
    if band:
        low, high = (_scale(edge, ys, top + _HIGH, top) for edge in band)
        parts.append(_rect(_LEFT, high, _WIDTH - _LEFT - _RIGHT, low - high, "band"))
    parts += _axes(xs, ys, _HIGH, ("step", y_name), (short, show), top)
    for number, values in enumerate(means.values()):
        drawn = [(x, _scale(y, ys, top + _HIGH, top)) for x, y in zip(at, values, strict=True) if y is not None]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in (drawn if len(drawn) > 1 else drawn * 2))
        parts.append(f'<polyline class="line k{number % COLOURS}" points="{text}"/>')
    hints = []
    for number, bundle in enumerate(bundles):
        said = [f"{name} {show(y)}" for name, values in means.items() if (y := values[number]) is not None]
        hints.append(f"{_steps(steps[bundle])}: {', '.join(said)}" if said else "")
    return _svg(top + _HIGH + _BELOW, title, [*parts, *_strips(at, hints, top)])


def _strips(at: Sequence[float], hints: Sequence[str], top: float) -> list[str]:
    """Where a pointer is over the plot, the hint of the nearest point; none where the hint is empty."""
    edges = [_LEFT, *((left + right) / 2 for left, right in itertools.pairwise(at)), _WIDTH - _RIGHT]
    return [
        _rect(left, top, right - left, _HIGH, "hit", hint)
        for (left, right), hint in zip(itertools.pairwise(edges), hints, strict=True)
        if hint
    ]


def draw_heat(rows: Mapping[str, Sequence[Cell]], title: str) -> str:
    """A row per space, a cell per group: the darker, the likelier it is kept."""
    columns = max(len(cells) for cells in rows.values())
    wide = (_WIDTH - _NAMES - 4) / columns
    parts = [_text(_NAMES, 12, "0 %"), _text(_NAMES + 130, 12, "100 %")]
    parts += [_rect(_NAMES + 28 + 9.6 * i, 3, 9.6, 11, "heat", share=(i + 0.5) / 10) for i in range(10)]
    for number, (name, cells) in enumerate(rows.items()):
        y = 22 + number * _ROW
        parts.append(_text(_NAMES - 8, y + 14, shorten(name, _SHOWN), "end"))
        parts += [
            _rect(_NAMES + i * wide, y + 1, wide - 1, _ROW - 2, "heat cell", cell.hint, cell.share)
            for i, cell in enumerate(cells)
        ]
    bottom = 22 + len(rows) * _ROW
    parts += [_text(_NAMES, bottom + 14, "first group"), _text(_WIDTH - 4, bottom + 14, "last group", "end")]
    return _svg(bottom + 22, title, parts)


# numbers as people read them


def ticks(values: Sequence[float], about: int = 5) -> list[float]:
    """Round numbers, evenly apart, that span the values."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(high), 1e-9):
        low, high = low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [number * step for number in range(first, last + 1)]


def short(number: float) -> str:
    """20.4M"""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


def percent(share: float) -> str:
    """49.9 %"""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def shorten(name: str, letters: int) -> str:
    """A name that fits; the end of a longer one says more than its start."""
    return name if len(name) <= letters else f"…{name[1 - letters :]}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _steps(steps: Sequence[float]) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"mean of steps {steps[0]:,} to {steps[-1]:,}"


def _scale(value: float, marks: Sequence[float], start: float, end: float) -> float:
    return start + (end - start) * (value - marks[0]) / (marks[-1] - marks[0])


# pieces of SVG


def _svg(high: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label="{html.escape(title)}" '
        f'viewBox="0 0 {_WIDTH:g} {high:g}">' + "\n".join(parts) + "</svg>"
    )


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(text)}</text>'


def _rect(
    x: float, y: float, width: float, height: float, kind: str, hint: str = "", share: float | None = None
) -> str:
    shade = "" if share is None else f' fill-opacity="{share:.3f}"'
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}{shade}>{_title(hint) if hint else ""}</rect>'


def _shape(shape: str, x: float, y: float) -> str:
    if shape == "circle":
        return f"M{x - 6:.1f},{y:.1f}a6,6 0 1,0 12,0a6,6 0 1,0 -12,0z"
    if shape == "square":
        return f"M{x - 5:.1f},{y - 5:.1f}h10v10h-10z"
    return f"M{x:.1f},{y - 7:.1f}l7,7l-7,7l-7,-7z"


def _axes(
    xs: Sequence[float],
    ys: Sequence[float],
    high: float,
    names: tuple[str, str],
    show: tuple[Callable[[float], str], Callable[[float], str]],
    top: float = _TOP,
) -> list[str]:
    """Grid lines with their numbers, and the names of both axes."""
    bottom, right = top + high, _WIDTH - _RIGHT
    parts = []
    for value in ys:
        y = _scale(value, ys, bottom, top)
        parts.append(f'<path class="grid" d="M{_LEFT:g},{y:.1f}H{right:g}"/>')
        parts.append(_text(_LEFT - 6, y + 4, show[1](value), "end"))
    for value in xs:
        x = _scale(value, xs, _LEFT, right)
        parts.append(f'<path class="grid" d="M{x:.1f},{bottom:g}v4"/>')
        parts.append(_text(x, bottom + 17, show[0](value), "middle"))
    parts.append(_text((_LEFT + right) / 2, bottom + 33, names[0], "middle", "name"))
    middle = top + high / 2
    turned = f'transform="rotate(-90 11 {middle:g})" x="11" y="{middle:g}"'
    return [*parts, f'<text class="name" text-anchor="middle" {turned}>{html.escape(names[1])}</text>']


def _legend(items: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """What the colours mean, in as many rows as it takes; and where the plot below may start."""
    parts, x, y = [], 2.0, 4.0
    for word, kind in items:
        width = 18 + _LETTER * len(word) + 14
        if x > 2 and x + width > _WIDTH:
            x, y = 2.0, y + 17
        parts.append(_rect(x, y, 12, 11, kind) + _text(x + 18, y + 10, word))
        x += width
    return "".join(parts), y + 23


def _label(text: str, x: float, y: float, high: float, taken: list[Box]) -> str:
    """The label at the first side of a point where nothing is yet; none if all are taken, the hint is still there."""
    wide = _LETTER * len(text)
    for left, base, anchor in (
        (x + 10, y + 4, "start"),
        (x - 10 - wide, y + 4, "end"),
        *((x - wide / 2, y + shift, "middle") for shift in (-11, 19)),
    ):
        box = (left, base - 10, left + wide, base + 3)
        inside = box[0] >= _LEFT and box[2] <= _WIDTH and box[1] >= 0 and box[3] <= _TOP + high
        if inside and not any(_touch(box, other) for other in taken):
            taken.append(box)
            return _text({"start": left, "end": left + wide, "middle": x}[anchor], base, text, anchor, "label")
    return ""


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
