"""The picture of the README: accuracy over MACs, from the recorded results alone.

    python experiments/picture.py     # writes docs/accuracy-light.svg and docs/accuracy-dark.svg

A line of `LINES` is a name, a color and points: (share of the MACs, accuracies of the seeds).
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

HERE = Path(__file__).parent
THEMES = {  # background, text, faint text, grid, then colors of the lines
    "light": ("#ffffff", "#1f2328", "#59636e", "#d8dee4", "#D55E00", "#0072B2", "#00805d", "#9a3d7a"),
    "dark": ("#0d1117", "#e6edf3", "#9198a1", "#30363d", "#f08b45", "#4dabe3", "#35c294", "#d391b6"),
}
WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 66, 32, 62, 64
END, MIDDLE = (f'class="faint" text-anchor="{anchor}"' for anchor in ("end", "middle"))
Points = list[tuple[float, list[float]]]


def of_method(name: str, method: str, own: bool = False) -> Points:
    """Points of a results file in which methods are compared; own: trained as the method's authors do."""
    rows = json.loads((HERE / "results" / f"{name}.json").read_text())["rows"]
    return [(it["mean_share"], it["accuracies"]) for it in rows if (it["method"], it["own"]) == (method, own)]


def of_summary(file: str, *networks: str) -> Points:
    """Points of a summary of seeds, as `dmcp prune --seeds` writes it, or `dmcp.cli.seeds.summarize` of run folders.

    file: in results/; one line of .jsonl, since every .json there is a table of REPORT.md.
    """
    found = {it["name"]: it for it in json.loads((HERE / "results" / file).read_text())["networks"]}
    whole = json.loads((HERE / "results" / "main.json").read_text())["macs"]
    return [(fmean(found[it]["macs"]) / whole, found[it]["accuracy"]) for it in networks]


UNPRUNED = of_method("main", "unpruned")
LINES = {
    "DMCP, with a teacher": (2, of_method("main", "dmcp", own=True)),
    "DMCP": (1, of_method("main", "dmcp")),
    "uniform widths": (0, of_method("main", "uniform")),
}
TITLE = "ResNet-20 on CIFAR-10"


def draw(theme: str) -> str:
    """The picture."""
    paper, ink, faint, grid, *colors = THEMES[theme]
    every = [*UNPRUNED, *(point for _, points in LINES.values() for point in points)]
    low, high = (100 * pick(fmean(values) for _, values in every) for pick in (min, max))
    low, high = int(low - 0.4), high + 0.4

    def x(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(accuracy: float) -> float:
        return TOP + (high - 100 * accuracy) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def text(across: float, down: float, words: str, more: str = "") -> str:
        return f'<text x="{across:.1f}" y="{down:.1f}" {more}>{words}</text>'

    def mark(share: float, values: list[float], color: str) -> str:
        across, middle, spread = x(share), fmean(values), stdev(values) if len(values) > 1 else 0.0
        bar = f'<path d="M{across:.1f} {y(middle - spread):.1f}V{y(middle + spread):.1f}" stroke="{color}"/>'
        return f'{bar}<circle cx="{across:.1f}" cy="{y(middle):.1f}" r="5.5" fill="{color}"/>'

    parts = [text(LEFT, 30, f'<tspan class="title">{TITLE}</tspan>')]
    parts += [text(LEFT, 50, "test accuracy in % over MACs", 'class="faint"')]
    for tick in range(low + 1, int(high) + 1):
        parts.append(f'<path d="M{LEFT} {y(tick / 100):.1f}H{WIDTH - RIGHT}" stroke="{grid}" stroke-width="1"/>')
        parts.append(text(LEFT - 10, y(tick / 100) + 6, str(tick), END))
    for tick in (0.15, 0.3, 0.5, 0.7, 1):
        parts.append(text(x(tick), HEIGHT - BOTTOM + 26, f"{tick:.0%}", MIDDLE))
    parts.append(text(x(0.5), HEIGHT - 12, "share of the unpruned network's MACs", MIDDLE))
    for share, values in UNPRUNED:
        level = y(fmean(values))
        parts.append(f'<path d="M{LEFT} {level:.1f}H{x(share):.1f}" stroke="{faint}" stroke-dasharray="3 5"/>')
        parts += [mark(share, values, faint), text(x(share) - 14, level - 9, "unpruned", END)]
    box = 28 * len(LINES) + 14
    parts.append(f'<rect x="{x(0.5)}" y="{HEIGHT - BOTTOM - box - 12}" width="290" height="{box}" fill="{paper}"/>')
    for number, (name, (place, points)) in enumerate(LINES.items()):
        path = " ".join(f"{x(share):.1f},{y(fmean(values)):.1f}" for share, values in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[place]}" stroke-width="2.5"/>')
        parts += [mark(share, values, colors[place]) for share, values in points]
        down = HEIGHT - BOTTOM - 28 - 28 * (len(LINES) - 1 - number)
        parts.append(f'<path d="M{x(0.53):.1f} {down - 6}h34" stroke="{colors[place]}" stroke-width="3"/>')
        parts.append(f'<circle cx="{x(0.53) + 17:.1f}" cy="{down - 6}" r="5.5" fill="{colors[place]}"/>')
        parts.append(text(x(0.53) + 44, down, name))
    style = f"text{{font:18px system-ui,sans-serif;fill:{ink}}}.title{{font-weight:650;font-size:21px}}"
    style += f".faint{{fill:{faint};font-size:17px}}path{{stroke-width:2}}"
    label = "Accuracy of ResNet-20 over MACs: DMCP stays closer to the unpruned network than uniform widths do"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    body = "\n".join(parts)
    return f'{head}\n<style>{style}</style>\n<rect width="100%" height="100%" rx="8" fill="{paper}"/>\n{body}\n</svg>\n'


if __name__ == "__main__":
    for name in THEMES:
        (HERE.parent / "docs" / f"accuracy-{name}.svg").write_text(draw(name))
