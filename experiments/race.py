"""A short race on held-out images decides which widths are trained: searched ones, uniform ones, or those half-way.

    python experiments/race.py cifar:resnet20 cifar10 --budget 15% --budget 50% --seeds 3 --out race.jsonl
    python experiments/race.py --table race.jsonl
    python experiments/race.py --recorded experiments/results/judge.jsonl   # what final losses would have chosen

After a search, networks of all candidate widths are trained shortly, each with a whole schedule of its own, on the
training images without a tenth. Those of the lowest loss on that tenth win. To judge the race, every candidate is then
trained for long on all training images, and tested. The race must never choose what is worse than uniform widths by
more than the noise, and take at most a fifth of the time of the search and one long training.

Half-way widths are the geometric mean of searched and uniform ones, rounded to the same budget.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

import torch
from enlarge import open_images, open_loader
from gates import hard_in_stage2
from judge import held_loss, spearman

import dmcp
from dmcp import models
from dmcp.budgets import Budget
from dmcp.runtime.batches import FewBatches, Loader
from dmcp.searching.bounds import allowed_widths
from dmcp.searching.budget import parse_budget
from dmcp.searching.rounding import FILLED, round_to_budget
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.units import table

HELD_OUT = 0.1  # share of the training images that judges the race
EPOCH = 100  # steps after which images are shuffled again, at most; so trainings are given in steps
SHARE = 0.2  # of the time of search and training that a race may take
UNIFORM, HALF_WAY, SEARCHED = "uniform", "half-way", "searched"
SOFT, EXPECTED = "soft", "expected"  # gates of stage 2
RECORDED = (  # network, budget, images that judge, jobs with searched and uniform widths, name of the latter
    ("ResNet-20", "15%", "held out", "r20-15", "r20-30", "uniform 15%"),
    ("ResNet-20", "30%", "held out", "r20-30", "r20-30", "uniform"),
    ("ResNet-20", "50%", "held out", "r20-50", "r20-30", "uniform 50%"),
    ("resnet18", "30%", "test", "resnet18-30-test", "resnet18-30-test", "uniform"),
    ("resnet18", "50%", "test", "resnet18-50-test", "resnet18-50-test", "uniform"),
    ("mobilenet_v2", "50%", "held out", "mobilenet", "mobilenet", "uniform"),
)


class Finder(Protocol):
    """Looks on while a search runs, and names more candidates: experiments/moves.py."""

    def __enter__(self) -> Finder: ...

    def __exit__(self, *error: object) -> None: ...

    def candidates(self, subject: Subject, net: dmcp.Supernet, found: dmcp.SearchResult) -> dict[str, Widths]:
        """Widths by name."""

    def report(self) -> dict[str, Any]:
        """What is recorded about the search."""


class Subject:
    """A network with fresh weights, its graph and its images."""

    def __init__(self, settings: argparse.Namespace, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rest, self.held_out, classes = open_images(settings.data, settings.root, HELD_OUT)
        self.all, self.test, _ = open_images(settings.data, settings.root)
        arguments = dict(models.argument(word) for word in settings.model_args)
        torch.manual_seed(seed)
        self.model = models.build(settings.model, num_classes=classes, **arguments).to(self.device)
        side = settings.side or self.all.shape[-1]
        self.graph = dmcp.trace(self.model, torch.zeros(2, self.all.shape[0], side, side, device=self.device))

    def batches(self, images: Any, batch: int) -> Any:
        """Batches of images that judge."""
        return open_loader(images, batch, False, self.seed, self.device, self.settings.side)

    def epochs(self, images: Any, batch: int, steps: int) -> Any:
        """Batches of images to be trained on: at most `EPOCH` before they are shuffled again."""
        loader = open_loader(images, batch, True, self.seed, self.device, self.settings.side)
        return FewBatches(loader, min(EPOCH, len(loader), max(1, steps // 2)))

    def train(self, widths: Mapping[str, int], steps: int, images: Any, judged: Any, seed: int) -> dict[str, Any]:
        """Train a network of these widths from scratch; its loss and accuracy on other images."""
        start = time.perf_counter()
        network = dmcp.cut(self.model, self.graph, self.graph.widths(dict(widths)))
        dmcp.reinitialize(network, generator=torch.Generator().manual_seed(seed))
        loader = self.epochs(images, self.settings.batch, steps)
        loader.loader.seed = seed
        epochs = epochs_of(steps, loader)
        config = dmcp.TrainConfig(epochs=epochs, lr=self.settings.lr, weight_decay=5e-4, seed=seed)
        records = dmcp.train(network, loader, config, runtime=dmcp.Runtime(progress=False))
        seconds = time.perf_counter() - start
        loss, accuracy = held_loss(network, self.batches(judged, 500))
        train_loss = fmean(record.loss for record in records[-len(loader) :])
        return {"loss": loss, "accuracy": accuracy, "train_loss": train_loss, "seconds": round(seconds, 1)}


def epochs_of(steps: int, loader: Loader) -> int:
    """As many epochs as come nearest to a number of steps."""
    return max(1, round(steps / len(loader)))


def half_way(graph: ChannelGraph, budget: Budget, first: Widths, second: Widths, align: int | None) -> Widths:
    """The geometric mean of two sets of widths, at the same cost."""
    middle = (first.tensor().double() * second.tensor()).sqrt()
    return round_to_budget(graph, budget, middle, allowed_widths(graph, None, None, align), FILLED)


def winner(race: Mapping[str, Mapping[str, float]]) -> str:
    """The candidate with the lowest held-out loss."""
    return min(race, key=lambda name: race[name]["loss"])


def measure(settings: argparse.Namespace, budget: str, seed: int, finder: Finder | None = None) -> dict[str, Any]:
    """Search, race, and long trainings of all candidates."""
    subject = Subject(settings, seed)
    graph = subject.graph

    # Widths to choose from.
    start = time.perf_counter()
    loader = subject.epochs(subject.rest, settings.search_batch or settings.batch, settings.search_steps)
    epochs = epochs_of(settings.search_steps, loader)
    more: dict[str, Any] = {} if settings.sampling is None else {"sampling": settings.sampling}
    config = dmcp.SearchConfig(
        budget=budget, seed=seed, align=settings.align, epochs=max(2, epochs), lr=0.4, weight_decay=5e-4, **more
    )
    net = dmcp.Supernet(subject.model, graph, config.groups, config.align)
    hard = hard_in_stage2() if settings.gates == EXPECTED else nullcontext()
    with finder or nullcontext(), hard:
        found = dmcp.search(net, loader, config, runtime=dmcp.Runtime(progress=False))
    search_s = time.perf_counter() - start
    searched = dmcp.expected(found)
    even = dmcp.uniform(graph, budget, align=settings.align)
    candidates = {UNIFORM: even, SEARCHED: searched}
    candidates[HALF_WAY] = half_way(graph, parse_budget(budget, graph), searched, even, settings.align)
    if finder is not None:
        candidates |= finder.candidates(subject, net, found)
    moves_s = time.perf_counter() - start - search_s

    # The race, and what it should have found. Equal widths are trained once.
    raced: dict[str, Any] = {}
    trained: dict[str, Any] = {}
    known: dict[tuple[int, ...], str] = {}
    for name, widths in candidates.items():
        row = tuple(widths.values())
        if row in known:
            raced[name], trained[name] = raced[known[row]], trained[known[row]]
            continue
        known[row] = name
        raced[name] = subject.train(widths, settings.race_steps, subject.rest, subject.held_out, seed)
        trained[name] = subject.train(widths, settings.steps, subject.all, subject.test, seed)
    return {
        **{name: getattr(settings, name) for name in ("model", "data", "side", "batch", "align", "sampling", "gates")},
        **{name: getattr(settings, name) for name in ("search_steps", "race_steps", "steps")},
        "budget": budget,
        "seed": seed,
        "search_s": round(search_s, 1),
        "moves_s": round(moves_s, 1),
        "widths": {name: list(widths.values()) for name, widths in candidates.items()},
        "params": {name: graph.params(widths) / graph.params() for name, widths in candidates.items()},
        "macs": {name: graph.macs(widths) / graph.macs() for name, widths in candidates.items()},
        "race": raced,
        "trained": trained,
        **({} if finder is None else finder.report()),
    }


# tables


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none if there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What all seeds of a setting have in common."""
    return tuple(
        str(row.get(name, SOFT))
        for name in ("model", "data", "side", "budget", "sampling", "gates", "search_steps", "steps")
    )


def kind_of(row: Mapping[str, Any]) -> str:
    """In a word or two, what was not the default in a search."""
    words = [row["sampling"] or "", "" if row.get("gates", SOFT) == SOFT else "hard gates"]
    return ", ".join(filter(None, words)) or "default"


def pooled(values: list[float], digits: int = 2) -> str:
    """Mean and its standard error, if there are several."""
    if len(values) < 2:
        return f"{values[0]:+.{digits}f} (1)"
    return f"{fmean(values):+.{digits}f} ± {stdev(values) / len(values) ** 0.5:.{digits}f} ({len(values)})"


def summarize(rows: list[dict[str, Any]]) -> str:
    """Points above uniform widths of each candidate and of what the race chose, and training losses."""
    names = list(dict.fromkeys(name for row in rows for name in row["widths"] if name != UNIFORM))
    head = ["network", "images", "budget", "search", "uniform, %", *names, "the race", "chosen", "its time"]
    lines = [head]
    losses = [["network", "images", "budget", "search", UNIFORM, *names]]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(key_of(row), []).append(row)
    for every in groups.values():
        first = every[0]
        title = [first["model"], f"{first['data']}, {first['side'] or 'own'} px", first["budget"]]
        title.append(kind_of(first))
        chosen = [winner({name: row["race"][name] for name in (UNIFORM, HALF_WAY, SEARCHED)}) for row in every]
        even = [100 * row["trained"][UNIFORM]["accuracy"] for row in every]
        cells = [f"{fmean(even):.2f}"]
        for name in names:
            cells.append(pooled(differences(every, [name] * len(every), "accuracy", 100.0)))
        cells.append(pooled(differences(every, chosen, "accuracy", 100.0)))
        lines.append([*title, *cells, ", ".join(chosen), f"{fmean(share_of(row) for row in every):.0%}"])
        parts = [f"{fmean(row['trained'][UNIFORM]['train_loss'] for row in every):.4f}"]
        for name in names:
            values = differences(every, [name] * len(every), "train_loss", 1.0)
            parts.append(pooled(values, 4))
        losses.append([*title, *parts])
    ranks = [
        spearman([row["race"][name]["loss"] for name in row["race"]], [own["loss"] for own in row["trained"].values()])
        for row in rows
        if len(row["race"]) > 3
    ]
    note = ""
    if ranks:
        note = f"\nRank correlation of losses in the race and in the test, over candidates: {pooled(ranks)}\n"
    return f"{table(lines)}\nTraining losses, less those of uniform widths:\n\n{table(losses)}{note}"


def differences(rows: list[dict[str, Any]], names: list[str], measure: str, factor: float) -> list[float]:
    """How much more than uniform widths a candidate of each row has."""
    return [
        factor * (row["trained"][name][measure] - row["trained"][UNIFORM][measure])
        for row, name in zip(rows, names, strict=True)
    ]


def share_of(row: Mapping[str, Any]) -> float:
    """Time of a race of three, as a share of that of the search and one long training."""
    race_s = sum(row["race"][name]["seconds"] for name in (UNIFORM, HALF_WAY, SEARCHED))
    return race_s / (row["search_s"] + row["trained"][SEARCHED]["seconds"])


def recorded(path: Path) -> str:
    """What a perfect race would have chosen: by the losses of recorded long trainings.

    Columns are searched less uniform widths, mean ± standard error over seeds, and what the choice less uniform wins.
    """
    trained = {
        (line["job"]["name"], line["trained"]["name"]): line["trained"] for line in rows_of(path) if "trained" in line
    }
    lines = [["network", "budget", "images", "training loss", "loss", "points", "searched is chosen", "points won"]]
    for network, budget, images, searched_job, uniform_job, even in RECORDED:
        pairs = [
            (trained.get((f"{searched_job}-{seed}", "dmcp")), trained.get((f"{uniform_job}-{seed}", even)))
            for seed in range(3)
        ]
        full = [(searched, uniform) for searched, uniform in pairs if searched and uniform]
        if not full:
            continue
        fitted, losses, points = (
            [searched[name] - uniform[name] for searched, uniform in full]
            for name in ("train_loss", "loss", "accuracy")
        )
        won = [100 * gain if loss < 0 else 0.0 for gain, loss in zip(points, losses, strict=True)]
        cells = [pooled(fitted, 3), pooled(losses, 3), pooled([100 * gain for gain in points])]
        cells.append(f"{sum(loss < 0 for loss in losses)} of {len(full)}")
        lines.append([network, budget, images, *cells, pooled(won)])
    return table(lines)


# the command line


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that races and moves have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("data", nargs="?", help="digits, cifar10, cifar100 or a folder of shards")
    parser.add_argument("--table", type=Path, help="print the tables of this file, and train nothing")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", action="append", help="as dmcp prune takes it; repeatable")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--model-args", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--root", default="data", help="folder of cifar10")
    parser.add_argument("--side", type=int, default=0, help="pixels that images are scaled to")
    parser.add_argument("--align", type=int, default=1)
    parser.add_argument("--sampling", choices=["markov", "mixed", "uniform"], help="after the warm-up of the search")
    parser.add_argument("--gates", choices=[SOFT, EXPECTED], default=SOFT, help="of stage 2: experiments/gates.py")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--search-batch", type=int, help="default: --batch")
    parser.add_argument("--search-steps", type=int, default=2600)
    parser.add_argument("--race-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=2100, help="of a long training")
    parser.add_argument("--lr", type=float, default=1.6, help="at a batch of 2048, scaled linearly")
    return parser


def measure_all(settings: argparse.Namespace, make_finder: Any = None) -> None:
    """Every budget and seed that is not recorded yet; each is a line as soon as it is done."""
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
        for budget in settings.budget:
            wanted = vars(settings) | {"budget": budget}
            done = {(key_of(row), row["seed"]) for row in rows_of(settings.out)}
            if (key_of(wanted), seed) in done:
                continue
            row = measure(settings, budget, seed, make_finder() if make_finder else None)
            with settings.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(budget, seed, {name: round(own["loss"], 4) for name, own in row["race"].items()}, flush=True)


def main() -> None:
    """What is asked for on the command line."""
    parser = options(__doc__)
    parser.add_argument("--recorded", type=Path, help="print what recorded long trainings would have chosen")
    settings = parser.parse_args()
    if settings.recorded:
        print(recorded(settings.recorded))
        return
    if settings.table:
        print(summarize(rows_of(settings.table)))
        return
    if not settings.data or not settings.budget or not settings.out:
        parser.error("name a network, its data, --out and at least one --budget")
    measure_all(settings)
    print(summarize(rows_of(settings.out)))


if __name__ == "__main__":
    main()
