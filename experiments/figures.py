"""Figures 6 and 7 of the paper: what structures drawn from a search cost, and how likely each width of a layer is.

    python experiments/figures.py cifar10 --out figures.jsonl                                   # on a GPU
    python experiments/figures.py cifar10 --side 8 --batch 64 --steps 2500 --out figures.jsonl  # a proxy, on a CPU
    python experiments/figures.py --draw figures.jsonl                                          # tables and pictures

Two searches of ResNet-20. `paper`: random alphas and the settings of --recipe paper. `release`: alphas of zero,
distillation, and samples as uniform as settings allow, as in the authors' code. Both have the smallest widths of the
authors' code (7, 5 and 10 of 16, 32 and 64 channels), so that alphas of zero cost 13.5% of the MACs instead of 3%; and
the alphas have the authors' rates, from 0.5 to 0.1, but fewer steps than 25,000: the rates are higher by that factor.

The paper describes its figures so. Figure 6: the mean of what 3,000 drawn structures cost is the target. Figure 7: "the
number of channel in most layers follows an uni-modal distribution, and some layers choose to retain all the channels".
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from alphas import DIP, chances_of_widths, count_peaks
from enlarge import open_images, open_loader

import dmcp
from dmcp import models
from dmcp.defaults import PAPER
from dmcp.markov import marginals, sample_groups
from dmcp.runtime.batches import FewBatches
from dmcp.settings import Init, Sampling
from dmcp.units import table

MODEL = "cifar:resnet20"
FLOORS = {"conv1": 7, "layer1": 7, "layer2": 5, "layer3": 10}  # of the authors' code: size // 10 and the remainder
RATES = (0.5, 0.1)  # of the alphas in the authors' code, at first and at the end
STEPS = 25_000  # of the alphas in the authors' code
EPOCH = 100  # steps after which images are shuffled again, so that any number of steps can be asked for
DRAWN = 1000
POINTS = 100  # of the curve of expected costs
SETTINGS: dict[str, dict[str, Any]] = {
    "release": {"init": Init.ZERO, "sampling": Sampling.MIXED, "label_smoothing": 0.0, "align": 1},
    "paper": PAPER["search"] | {"init": Init.RANDOM},
}


def settings_of(name: str, budget: str, epochs: int, warmup: float, factor: float, seed: int) -> dmcp.SearchConfig:
    """The settings of one search; the rates of the alphas are those of the authors' code times a factor."""
    high, low = (rate * factor for rate in RATES)
    more: dict[str, Any] = {"lr": 0.4, "weight_decay": 5e-4, "min_channels": FLOORS}  # rates of small data
    more |= {"alpha_lr": high, "alpha_min_lr": low, "warmup": warmup, "epochs": epochs, "seed": seed}
    return dmcp.SearchConfig(budget=budget, **{**SETTINGS[name], **more})


def run_search(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One search; what its chains say at the end, and what they cost on the way."""
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, _, classes = open_images(given.data, given.root)
    whole = open_loader(train, given.batch, True, given.seed, device, given.side)
    steps = min(EPOCH, len(whole), given.steps)
    loader = FewBatches(whole, steps)
    warmup_epochs = max(1, round(given.warmup_steps / steps))
    alpha_epochs = max(1, round(given.steps / steps))
    epochs = warmup_epochs + alpha_epochs
    factor = STEPS / (alpha_epochs * steps)

    torch.manual_seed(given.seed)
    model = models.build(MODEL, num_classes=classes).to(device)
    side = given.side or train.shape[-1]
    graph = dmcp.trace(model, torch.zeros(2, train.shape[0], side, side, device=device))
    config = settings_of(name, given.budget, epochs, warmup_epochs / epochs, factor, given.seed)
    net = dmcp.Supernet(model, graph, config.groups, config.align)
    found = dmcp.search(net, loader, config)
    return {
        "name": name,
        "model": MODEL,
        "data": given.data,
        "side": side,
        "budget": given.budget,
        "batch": given.batch,
        "seed": given.seed,
        "warmup_steps": warmup_epochs * steps,
        "steps": alpha_epochs * steps,
        "factor": factor,
        **describe(found),
        "seconds": round(time.perf_counter() - start, 1),
    }


def describe(found: dmcp.SearchResult) -> dict[str, Any]:
    """The figures of a search in numbers."""
    target = found.budget.limits[0].target
    full = found.graph.macs()
    random = torch.Generator().manual_seed(0)
    drawn = found.graph.macs(sample_groups(found.alphas, found.sizes, DRAWN, random).cpu()).double()
    shares = (drawn / full).tolist()
    curve = [record.ratios[0] * target / full for record in found.log if record.ratios]
    every = max(1, len(curve) // POINTS)
    widths = [[size for size in row if size] for row in found.sizes.tolist()]
    chances = chances_of_widths(marginals(found.alphas.double()), found.sizes)
    return {
        "target": target / full,
        "curve": [round(share, 4) for share in [*curve[::every], *curve[-1:]]],
        "every": every,
        "drawn": [round(share, 4) for share in shares],
        "near": fmean(abs(share * full / target - 1) <= 0.1 for share in shares),
        "spaces": [space.name for space in found.graph.spaces],
        "widths": [torch.tensor(row).cumsum(0).tolist() for row in widths],
        "chances": [[round(chance, 5) for chance in row] for row in chances],
        "alphas": [[round(alpha, 3) for alpha in row] for row in found.alphas.tolist()],
        "expected": list(dmcp.expected(found).values()),
    }


# tables and pictures


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The searches of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_undecided(chances: list[float]) -> bool:
    """Whether two widths that are no neighbours are likely: the floor and everything, for example."""
    return count_peaks(chances, DIP) > 1


def summarize(rows: list[dict[str, Any]]) -> str:
    """The figures beside what the paper says of its own."""
    head = ["search", "images", "steps of the alphas", "rates", "target", "expected", "mean drawn", "deviation"]
    head += ["within 10%", "one peak", "one peak, dips of 5 points filled", "most likely: floor", "most likely: all"]
    lines = [head]
    for row in rows:
        single = sum(count_peaks(chances) == 1 for chances in row["chances"])
        filled = sum(not is_undecided(chances) for chances in row["chances"])
        floor = sum(chances[0] == max(chances) for chances in row["chances"])
        whole = sum(chances[-1] == max(chances) for chances in row["chances"])
        count = len(row["chances"])
        shares = [f"{row['target']:.1%}", f"{row['curve'][-1]:.1%}", f"{fmean(row['drawn']):.1%}"]
        cells = [row["name"], f"{row['side']} px", str(row["steps"]), f"× {row['factor']:.1f}", *shares]
        cells += [f"{100 * stdev(row['drawn']):.1f} points", f"{row['near']:.0%}"]
        lines.append([*cells, *(f"{number} of {count}" for number in (single, filled, floor, whole))])
    return table(lines)


def bars(heights: list[float], box: tuple[float, float, float, float], color: str) -> list[str]:
    """A chart of bars in a box (left, top, width, height); the highest one fills it."""
    left, top, width, height = box
    step = width / len(heights)
    most = max(heights)
    parts = [f'<path d="M{left:.1f} {top + height:.1f}h{width:.1f}" stroke="#59636e"/>']
    for number, value in enumerate(heights):
        tall = height * value / most
        place = f'x="{left + number * step:.1f}" y="{top + height - tall:.1f}"'
        parts.append(f'<rect {place} width="{0.85 * step:.1f}" height="{tall:.1f}" fill="{color}"/>')
    return parts


def picture(row: dict[str, Any]) -> str:
    """Costs over steps, figure 6 and figure 7 of one search, as an SVG."""
    parts = [text(20, 26, f"{row['name']}: {row['model']} at {row['budget']}, {row['side']} px", "bold")]

    # What the chains cost on the way, from the end of the warm-up on.
    left, top, width, height = 40.0, 60.0, 300.0, 130.0
    curve = row["curve"]
    most = 1.15 * max(*curve, row["target"])
    points = [
        (left + width * number / (len(curve) - 1), top + height * (1 - share / most))
        for number, share in enumerate(curve)
    ]
    level = top + height * (1 - row["target"] / most)
    parts += [text(left, 48, "expected share of the MACs over the steps of the alphas")]
    parts.append(f'<path d="M{left} {top}v{height}h{width}" fill="none" stroke="#59636e"/>')
    parts.append(f'<path d="M{left} {level:.1f}h{width}" stroke="#D55E00" stroke-dasharray="4 4"/>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#0072B2" stroke-width="2"/>')
    parts.append(text(left + 4, level - 4, f"target, {row['target']:.0%}"))

    # Figure 6: what drawn structures cost.
    left = 400.0
    low, high = min(row["drawn"]), max(row["drawn"])
    counts = [0.0] * 25
    for share in row["drawn"]:
        counts[min(24, int(25 * (share - low) / (high - low or 1)))] += 1
    parts += [text(left, 48, f"figure 6: MACs of {len(row['drawn'])} structures")]
    parts += bars(counts, (left, top, width, height), "#0072B2")
    mean = left + width * (fmean(row["drawn"]) - low) / (high - low or 1)
    parts.append(f'<path d="M{mean:.1f} {top}v{height}" stroke="#D55E00" stroke-dasharray="4 4"/>')
    parts += [text(left, top + height + 16, f"{low:.0%}"), text(left + width - 28, top + height + 16, f"{high:.0%}")]

    # Figure 7: how likely each width of each space is.
    parts.append(text(20, 246, "figure 7: probability of each width"))
    for number, (name, widths, chances) in enumerate(zip(row["spaces"], row["widths"], row["chances"], strict=True)):
        left, top = 20.0 + 178 * (number % 4), 284.0 + 110 * (number // 4)
        parts.append(text(left, top - 6, name))
        parts += bars(chances, (left, top, 150, 60), "#00805d")
        parts += [text(left, top + 76, str(widths[0])), text(left + 134, top + 76, str(widths[-1]))]
    size = 'viewBox="0 0 730 600"'
    style = "text{font:12px system-ui,sans-serif;fill:#1f2328}.bold{font-weight:650;font-size:15px}"
    inside = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>'
    return f'{head}\n<rect width="100%" height="100%" fill="#ffffff"/>\n{inside}\n</svg>\n'


def text(across: float, down: float, words: str, kind: str = "") -> str:
    """Words of a picture."""
    return f'<text x="{across:.1f}" y="{down:.1f}" class="{kind}">{words}</text>'


def show(path: Path) -> None:
    """Print the table of a file, and write a picture of each search beside it."""
    rows = rows_of(path)
    print(summarize(rows), flush=True)
    for row in rows:
        target = path.with_name(f"{path.stem}-{row['name']}-{row['budget'].rstrip('%')}-{row['side']}px.svg")
        target.write_text(picture(row))
        print(target)


def main() -> None:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="cifar10 or a folder of shards")
    parser.add_argument("--draw", type=Path, help="print and draw the searches of this file, and search nothing")
    parser.add_argument("--out", type=Path, default=Path("figures.jsonl"))
    parser.add_argument("--root", default="data", help="folder of cifar10")
    parser.add_argument("--name", choices=SETTINGS, action="append", help="default: both")
    parser.add_argument("--budget", default="30%", help="the paper's figures are of 31 percent")
    parser.add_argument("--side", type=int, default=0, help="pixels that images are scaled to")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--warmup-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=4000, help="steps of the alphas")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.draw:
        show(given.draw)
        return
    if not given.data:
        parser.error("name the data, or a file to --draw")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.name or SETTINGS:
        row = run_search(name, given)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    show(given.out)


if __name__ == "__main__":
    main()
