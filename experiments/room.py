"""How much better than uniform widths can structures of equal cost be? Random ones are trained, and a fit says it.

    python experiments/room.py cifar:resnet20 cifar10 --budget 50% --budget 15% --out rooms.jsonl
    python experiments/room.py resnet18 SHARDS --budget latency:62% --side 64 --out rooms.jsonl --jobs 4
    python experiments/room.py small_networks:UNet cifar10 --noise 0.4 --lr 0.002 --budget 30% --out rooms.jsonl
    python experiments/room.py --fit rooms.jsonl
    python experiments/room.py resnet18 SHARDS ... --best 3    # then train the best structure of the fit, three times

All networks are trained from scratch with one recipe; a tenth of the training images is held out and judges them. Every
network is a line of the file as soon as it is done, and a repeated command trains only those that are missing. A budget
of milliseconds is measured with batches as they are trained, in bfloat16 and CUDA graphs on a GPU: nothing else may run
there meanwhile. The table is kept beside the file. With --noise, a network learns to remove noise of this deviation
from images, with AdamW, and the table has its PSNR in dB as accuracy.

The fit is quadratic in five factors of the logarithms of widths: the balance of layers inside blocks and those between
blocks (streams), and slope and bend over the depth of each kind. The best structure that it finds is among thousands of
the same budget and no further from the trained ones than they are from each other. Its gain over uniform widths is
corrected for the luck of the best one, by a bootstrap of the residuals, which also gives the standard error. With
--best that structure is trained, too: this tests the fit. Where milliseconds were measured, all are compared at the
same time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from enlarge import open_images, open_loader
from judge import held_loss
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

import dmcp
from dmcp import models
from dmcp.budgets import LATENCY, Budget, limits_latency
from dmcp.exporting.latency_limit import timer_like
from dmcp.searching.bounds import allowed_widths
from dmcp.searching.budget import parse_budget, spent_shares
from dmcp.searching.rounding import FILLED, round_to_budget
from dmcp.settings import Engine, LatencyConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.units import FS_PER_MS, table

Array = NDArray[np.float64]
Room = tuple[str, ...]  # what its networks have in common
Row = dict[str, Any]  # one network

HELD_OUT = 0.1  # share of the training images, the same for all networks
# Deviations of the factors, and of each width around them:
BALANCE, SLOPE, BEND, NOISE = 0.5, 0.4, 0.4, 0.1
CANDIDATES = 3000
DRAWS = 400  # of the bootstrap
TABLE_NETWORKS = 30  # that a latency table is measured with
MEASURES = {"accuracy": 100.0, "loss": -1.0, "train_loss": -1.0}  # more is better; factor of what is shown
KINDS = ("best", "uniform")
KEY = ("model", "model_args", "data", "side", "budget", "epochs", "batch", "lr", "noise")


# structures


def factors(graph: ChannelGraph) -> Tensor:
    """How much each factor adds to the logarithm of each width. -> (F, S)"""
    inner = torch.tensor([is_inner(space.writers + space.readers) for space in graph.spaces]).double()
    kinds = [kind for kind in (inner, 1 - inner) if kind.any()]
    rows = [inner - 0.5] if len(kinds) == 2 else []
    for kind in kinds:
        rank = kind.cumsum(0) - 1
        depth = (2 * rank / rank[-1].clamp(min=1) - 1) * kind  # -1 to 1
        bend = (depth**2 - 1 / 3) * kind
        rows += [depth, bend]
    return torch.stack(rows)


def is_inner(layers: Sequence[str]) -> bool:
    """Whether all layers that write or read a space are in one block: layer1.0.conv1 and layer1.0.conv2."""
    block = os.path.commonpath([layer.replace(".", "/") for layer in layers])
    return "/" in block


def draw(graph: ChannelGraph, count: int, random: torch.Generator) -> Tensor:
    """Logarithms of widths' shares, up to a constant of each structure. -> (N, S)"""
    rows = factors(graph)
    scales = [BALANCE] * (len(rows) % 2) + [SLOPE, BEND] * (len(rows) // 2)
    amounts = torch.randn(count, len(rows), generator=random, dtype=torch.float64) * torch.tensor(scales)
    return amounts @ rows + NOISE * torch.randn(count, len(graph.spaces), generator=random, dtype=torch.float64)


def scale_to_budget(graph: ChannelGraph, budget: Budget, shapes: Tensor, align: int | None = None) -> Tensor:
    """The widest structures of these shapes that are inside the budget. (N, S) -> (N, S) int64"""
    full = graph.full.tensor()
    steps = torch.tensor([space.step(align) for space in graph.spaces])

    def widths(level: Tensor) -> Tensor:
        wished = full * (shapes + level[:, None]).exp()
        return ((wished / steps).round().long() * steps).maximum(steps).minimum(full)

    low = torch.full((len(shapes),), -12.0, dtype=torch.float64)
    high = torch.full((len(shapes),), 6.0, dtype=torch.float64)
    for _ in range(40):
        middle = (low + high) / 2
        fits = spent_shares(budget, graph, widths(middle)).amax(dim=1) <= 1
        low = torch.where(fits, middle, low)
        high = torch.where(fits, high, middle)
    return widths(low)


def structures(graph: ChannelGraph, budget: Budget, count: int, align: int | None) -> list[tuple[int, ...]]:
    """Random structures that use up the budget, with widths that the device likes."""
    shapes = draw(graph, count, torch.Generator().manual_seed(0))
    wishes = scale_to_budget(graph, budget, shapes, align)
    allowed = allowed_widths(graph, None, None, align)
    rows = [round_to_budget(graph, budget, wish.double(), allowed, FILLED, even=True) for wish in wishes]
    return [tuple(widths.values()) for widths in rows]


# networks and milliseconds


@dataclass(frozen=True)
class Job:
    """One network to be trained; plain data, since another process does it."""

    room: dict[str, Any]
    kind: str  # uniform, random or best
    seed: int
    widths: tuple[int, ...]
    share: float = 0.0  # of the budget
    ms: float | None = None  # as measured
    unpruned_ms: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other networks of a file."""
        return room_of(self.room), self.kind, self.seed, tuple(self.widths)


def room_of(row: Row) -> Room:
    """What the networks of a room have in common."""
    return tuple(str(row.get(name, 0.0)) for name in KEY)


def open_graph(room: dict[str, Any]) -> tuple[torch.nn.Module, ChannelGraph, Tensor]:
    """The unpruned network of a room with fresh weights, on the device that trains, its graph and an example."""
    arguments = dict(models.argument(word) for word in room["model_args"])
    torch.manual_seed(0)
    if not room.get("noise"):
        arguments["num_classes"] = room["classes"]
    model = models.build(room["model"], **arguments)
    example = torch.zeros(2, 3, room["side"], room["side"])
    return model, dmcp.trace(model, example), example


def with_table(path: Path, room: dict[str, Any]) -> ChannelGraph:
    """The graph of a room with a latency table if its budget needs one: that beside the file, or a new one."""
    model, graph, example = open_graph(room)
    if not limits_latency(room["budget"]):
        return graph
    kept = table_path(path, room)
    if not kept.exists():
        on_gpu = torch.cuda.is_available()
        config = LatencyConfig(
            batch=room["batch"],
            device="cuda" if on_gpu else "cpu",
            dtype="bfloat16" if on_gpu else "float32",
            networks=TABLE_NETWORKS,
        )
        measured = dmcp.measure_latency(model, example, graph, config)
        measured.save(kept)
        print(measured.summary, flush=True)
    return dmcp.Latency.load(kept).attach(graph)


def table_path(path: Path, room: dict[str, Any]) -> Path:
    """Where the latency table of a room is kept."""
    name = "-".join(str(room[part]) for part in ("model", "side", "batch")).replace(":", "-")
    return path.with_name(f"{path.stem}-{name}-latency.json")


def random_jobs(room: dict[str, Any], graph: ChannelGraph, count: int, seeds: int, align: int | None) -> list[Job]:
    """Random structures of a room, and uniform widths with several seeds."""
    budget = parse_budget(room["budget"], graph)
    even = tuple(dmcp.uniform(graph, budget, align=align).values())
    jobs = [Job(room, "uniform", seed, even) for seed in range(seeds)]
    rows = structures(graph, budget, count, align)
    return jobs + [Job(room, "random", number, row) for number, row in enumerate(rows)]


def best_jobs(room: dict[str, Any], graph: ChannelGraph, recorded: Sequence[Row], seeds: int) -> list[Job]:
    """The structure that the fit to the recorded networks of a room finds best, with several seeds."""
    rows = [row for row in recorded if room_of(row) == room_of(room) and row["kind"] in ("uniform", "random")]
    landscape = survey(graph, rows)
    number, _ = landscape.best(landscape.fit(np.array([row["accuracy"] for row in rows])))
    widths = tuple(landscape.widths[number].tolist())
    return [Job(room, "best", seed, widths) for seed in range(seeds)]


def measured(room: dict[str, Any], graph: ChannelGraph, jobs: list[Job]) -> list[Job]:
    """The same jobs with their shares of the budget; those of a latency budget are also measured side by side."""
    if not jobs:
        return []
    budget = parse_budget(room["budget"], graph)
    shares = spent_shares(budget, graph, torch.tensor([job.widths for job in jobs])).amax(dim=1).tolist()
    jobs = [replace(job, share=share) for job, share in zip(jobs, shares, strict=True)]
    if LATENCY not in budget.kinds:
        return jobs

    model, _, example = open_graph(room)
    attached = dmcp.Latency.of(graph)
    assert attached is not None
    timer = timer_like(attached, example)
    if timer is None:
        raise SystemExit("The latency table beside the file was measured on another device: delete it.")
    rows = list(dict.fromkeys(job.widths for job in jobs))
    networks = (dmcp.cut(model, graph, graph.widths(row)) for row in [tuple(graph.full.values()), *rows])
    unpruned_ms, *times = timer.times(networks)
    ms = dict(zip(rows, times, strict=True))
    print(f"{room['model']} {room['budget']}: unpruned {unpruned_ms:.3f} ms", flush=True)
    return [replace(job, ms=ms[job.widths], unpruned_ms=unpruned_ms) for job in jobs]


class Noisy:
    """The images of a loader with noise, and without it in place of labels; everything else is the loader's own."""

    def __init__(self, loader: Any, noise: float) -> None:
        self.loader = loader
        self.noise = noise
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of the images, how each one is augmented, and the noise."""
        self.epoch = epoch
        self.loader.set_epoch(epoch)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of this epoch from number `skip` on."""
        for number, (images, _) in enumerate(self.loader.starting_at(skip), skip):
            random = torch.Generator(images.device)
            random.manual_seed(1_000_003 * self.loader.seed + 10_007 * self.epoch + number)
            noise = torch.randn(images.shape, generator=random, device=images.device)
            yield images + self.noise * noise, images


def squared_error(output: Tensor, batch: Any) -> Tensor:
    """Mean squared error against the clean images."""
    return F.mse_loss(output.float(), batch[1])


def denoised(network: torch.nn.Module, loader: Any, full_range: float) -> tuple[float, float]:
    """Squared error, and a hundredth of the PSNR in dB."""
    network.eval()
    with torch.no_grad():
        errors = [float(squared_error(network(noisy), (noisy, clean))) for noisy, clean in loader]
    loss = fmean(errors)
    return loss, math.log10(full_range**2 / loss) / 10


class Worker:
    """One process that trains networks; data and graphs are opened once."""

    def __init__(self, room: dict[str, Any], settings: argparse.Namespace) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        train, held_out, _ = open_images(settings.data, settings.root, HELD_OUT)
        self.device = device
        self.loader = open_loader(train, settings.batch, True, 0, device, settings.side)
        self.held_out = open_loader(held_out, 500, False, 0, device, settings.side)
        self.full_range = 255 / fmean(train.std)
        self.noise = settings.noise
        self.batches = self.loader
        if self.noise:
            self.batches = Noisy(self.loader, self.noise)
            self.held_out = Noisy(self.held_out, self.noise)
        self.model, self.graph, _ = open_graph(room)

    def train(self, job: Job) -> Row:
        """Train one network from scratch; what came out of it."""
        start = time.perf_counter()
        room = job.room
        widths = self.graph.widths(job.widths)
        network = dmcp.cut(self.model, self.graph, widths)
        dmcp.reinitialize(network, generator=torch.Generator().manual_seed(job.seed))
        network.to(self.device)

        self.loader.seed = job.seed
        config = dmcp.TrainConfig(epochs=room["epochs"], lr=room["lr"], weight_decay=5e-4, seed=job.seed)
        task = dmcp.Task()
        if self.noise:
            task = dmcp.Task(loss=squared_error)
            config = replace(config, optimizer="adamw", warmup_epochs=0, weight_decay=0.0, reference_batch=None)
        runtime = dmcp.Runtime(engine=Engine(compile=False, kernels=False), progress=False)
        records = dmcp.train(network, self.batches, config, task=task, runtime=runtime)
        last = [record.loss for record in records[-len(self.loader) :]]
        if self.noise:
            loss, accuracy = denoised(network, self.held_out, self.full_range)
        else:
            loss, accuracy = held_loss(network, self.held_out)
        return room | {
            "kind": job.kind,
            "seed": job.seed,
            "accuracy": accuracy,
            "loss": loss,
            "train_loss": fmean(last),
            "share": job.share,
            "ms": job.ms,
            "unpruned_ms": job.unpruned_ms,
            "macs": self.graph.macs(widths) / self.graph.macs(),
            "params": self.graph.params(widths) / self.graph.params(),
            "seconds": round(time.perf_counter() - start, 1),
            "widths": list(job.widths),
        }


def work(jobs: Any, rows: Any, room: dict[str, Any], settings: argparse.Namespace, threads: int) -> None:
    """Train networks until none is left."""
    torch.set_num_threads(threads)
    worker = Worker(room, settings)
    while True:
        try:
            job = jobs.get(timeout=1)
        except queue.Empty:
            break
        try:
            rows.put(worker.train(job))
        except Exception:
            rows.put({"error": traceback.format_exc()[-2000:]})
    rows.put(None)


def measure(settings: argparse.Namespace) -> None:
    """Train what is missing; each network is a line as soon as it is done."""
    _, images, classes = open_images(settings.data, settings.root, HELD_OUT)
    side = settings.side or images.shape[-1]
    common = {name: getattr(settings, name) for name in ("model", "model_args", "epochs", "batch", "lr", "noise")}
    common |= {"data": Path(settings.data).name, "side": side, "classes": classes}
    recorded = read(settings.out)
    done = {(room_of(row), row["kind"], row["seed"], tuple(row["widths"])) for row in recorded}
    left: list[Job] = []
    for budget in settings.budget:
        room = common | {"budget": budget}
        graph = with_table(settings.out, room)
        if settings.best:
            jobs = best_jobs(room, graph, recorded, settings.best)
        else:
            jobs = random_jobs(room, graph, settings.structures, settings.uniform, settings.align)
        left += measured(room, graph, [job for job in jobs if job.key not in done])
    del images
    print(f"{len(left)} networks to train, {len(done)} are recorded.", flush=True)

    context = multiprocessing.get_context("spawn")
    jobs, rows = context.Queue(), context.Queue()
    for job in left:
        jobs.put(job)
    count = min(settings.jobs, len(left))
    threads = max(1, (os.cpu_count() or 2) // max(1, count))
    workers = [context.Process(target=work, args=(jobs, rows, room, settings, threads)) for _ in range(count)]
    for worker in workers:
        worker.start()
    running = count
    while running:
        row = rows.get()
        if row is None:
            running -= 1
        elif "error" in row:
            print(row["error"], flush=True)
        else:
            with settings.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = {name: row[name] for name in ("model", "budget", "kind", "seed", *MEASURES, "ms", "seconds")}
            print(json.dumps(shown), flush=True)
    for worker in workers:
        worker.join()


def read(path: Path) -> list[Row]:
    """The networks of a file; none if there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


# the fit


@dataclass(frozen=True)
class Landscape:
    """Everything about a room that does not depend on what came out of the trainings."""

    terms: Array  # of the networks: (N, T)
    candidates: Array  # (C, T)
    uniform: Array  # (T,)
    widths: Tensor  # of the candidates: (C, S)

    def best(self, prices: Array) -> tuple[int, float]:
        """The best candidate by a fit, and its gain over uniform widths."""
        gains = self.candidates @ prices - self.uniform @ prices
        number = int(gains.argmax())
        return number, float(gains[number])

    def fit(self, values: Array) -> Array:
        """Least squares. (N,) -> (T,)"""
        return np.linalg.lstsq(self.terms, values, rcond=None)[0]


def terms_of(graph: ChannelGraph, widths: Tensor) -> Array:
    """A constant, the factors of widths and their squares. (N, S) -> (N, T)"""
    shares = (widths.double() / graph.full.tensor()).log()
    design = torch.cat([torch.ones(1, len(graph.spaces), dtype=torch.float64), factors(graph)])
    amounts = torch.linalg.lstsq(design.T, shares.T).solution.T[:, 1:].numpy()
    return np.hstack([np.ones((len(amounts), 1)), amounts, amounts**2])


def survey(graph: ChannelGraph, rows: Sequence[Row]) -> Landscape:
    """What a room's fit needs. Measured milliseconds are one more term, since budgets hold by forecast only."""
    budget = parse_budget(rows[0]["budget"], graph)
    terms = terms_of(graph, torch.tensor([row["widths"] for row in rows]))
    random = torch.Generator().manual_seed(1)
    widths = scale_to_budget(graph, budget, draw(graph, CANDIDATES, random))
    candidates = terms_of(graph, widths)
    inverse = np.linalg.pinv(terms.T @ terms)
    leverages = ((terms @ inverse) * terms).sum(axis=1)
    near = ((candidates @ inverse) * candidates).sum(axis=1) <= leverages.max()
    uniform = np.mean([term for term, row in zip(terms, rows, strict=True) if row["kind"] == "uniform"], axis=0)
    candidates = candidates[near]
    if rows[0]["ms"] is not None:
        terms = np.hstack([terms, over_time(budget, rows)[:, None]])
        candidates = np.hstack([candidates, np.zeros((len(candidates), 1))])  # at the same time
        uniform = np.append(uniform, 0.0)
    return Landscape(terms, candidates, uniform, widths[torch.from_numpy(near)])


def over_time(budget: Budget, rows: Sequence[Row]) -> Array:
    """Logarithms of measured times over the time that the budget allows. -> (N,)"""
    target_ms = budget.limits[0].target / FS_PER_MS
    return np.log([row["ms"] / target_ms for row in rows])


def tested_gain(graph: ChannelGraph, rows: Sequence[Row], values: Array, price: float) -> str:
    """How much better than uniform widths the best fitted structure is, trained; at the same time if it is measured."""
    if rows[0]["ms"] is not None:
        values = values - price * over_time(parse_budget(rows[0]["budget"], graph), rows)
    best, even = ([value for value, row in zip(values, rows, strict=True) if row["kind"] == kind] for kind in KINDS)
    if len(best) < 2:
        return ""
    error = math.hypot(*(stdev(kind) / math.sqrt(len(kind)) for kind in (best, even)))
    digits = 2 if abs(values[0]) > 10 else 3
    return f"{fmean(best) - fmean(even):+.{digits}f} ± {error:.{digits}f} ({len(best)})"


def find_room(landscape: Landscape, values: Array) -> dict[str, float]:
    """How far the best fitted structure is above uniform widths, as fitted and corrected, with its error."""
    prices = landscape.fit(values)
    number, gain = landscape.best(prices)
    fitted = landscape.terms @ prices
    residuals = values - fitted
    count, terms = landscape.terms.shape
    free = max(1, count - terms)
    noise = math.sqrt(float(residuals @ residuals) / free)
    explained = 1 - noise**2 / float(np.var(values, ddof=1))

    random = np.random.default_rng(0)
    spread = residuals * math.sqrt(count / free)
    gains: list[float] = []
    optimism: list[float] = []
    for _ in range(DRAWS):
        again = landscape.fit(fitted + random.choice(spread, size=count))
        chosen, promised = landscape.best(again)
        true = float((landscape.candidates[chosen] - landscape.uniform) @ prices)
        gains.append(promised)
        optimism.append(promised - true)
    return {
        "room": gain,
        "corrected": gain - fmean(optimism),
        "error": stdev(gains),
        "noise": noise,
        "explained": explained,
        "number": number,
    }


def show(path: Path) -> None:
    """Print a table of all rooms of a file, and the best fitted structure of each."""
    rooms: dict[Room, list[Row]] = {}
    for row in read(path):
        rooms.setdefault(room_of(row), []).append(row)
    head = ["network", "budget", "measure", "uniform", "random", "best random", "room, fitted", "room, corrected"]
    lines = [[*head, "error", "noise", "explained", "best fitted, trained"]]
    notes: list[str] = []
    for every in rooms.values():
        rows = [row for row in every if row["kind"] != "best"]
        if not rows:
            continue
        first = rows[0]
        even = [row for row in rows if row["kind"] == "uniform"]
        others = [row for row in rows if row["kind"] == "random"]
        graph = with_table(path, first)
        enough = len(terms_of(graph, torch.tensor([first["widths"]]))[0]) + 2
        if len(even) < 2 or len(rows) <= enough:
            notes.append(f"{first['model']} {first['budget']}: {len(rows)} networks are too few, {enough + 1} are not.")
            continue
        landscape = survey(graph, rows)
        for measure, factor in MEASURES.items():
            values = np.array([row[measure] for row in rows]) * factor
            found = find_room(landscape, values)
            uniform, random = ([row[measure] * abs(factor) for row in kind] for kind in (even, others))
            best = max(random) if factor > 0 else min(random)
            digits = 2 if factor > 1 else 3
            cells = [f"{found[name]:+.{digits}f}" for name in ("room", "corrected")]
            cells += [f"{found['error']:.{digits}f}", f"{found['noise']:.{digits}f}", f"{found['explained']:.2f}"]
            spreads = [
                f"{fmean(kind):.{digits}f} ± {stdev(kind):.{digits}f} ({len(kind)})" for kind in (uniform, random)
            ]
            name = f"{first['model']}, {first['side']} px"
            price = landscape.fit(values)[-1]
            tested = tested_gain(graph, every, np.array([row[measure] for row in every]) * factor, price)
            lines.append([name, first["budget"], measure, *spreads, f"{best:.{digits}f}", *cells, tested])
            if measure != "loss":
                widths = landscape.widths[int(found["number"])].tolist()
                notes.append(f"{first['model']} {first['budget']}, best by {measure}: {widths}")
    print(table(lines))
    print("\n".join(notes), flush=True)


def main() -> None:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("data", nargs="?", help="cifar10, cifar100 or a folder of shards")
    parser.add_argument("--fit", type=Path, help="print the rooms of this file, and train nothing")
    parser.add_argument("--out", type=Path, default=Path("rooms.jsonl"))
    parser.add_argument("--budget", action="append", help="as dmcp prune takes it; repeatable")
    parser.add_argument("--model-args", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--root", default="data", help="folder of cifar10")
    parser.add_argument("--side", type=int, default=0, help="pixels that images are scaled to")
    parser.add_argument("--structures", type=int, default=30)
    parser.add_argument("--uniform", type=int, default=4, help="seeds of uniform widths")
    parser.add_argument("--best", type=int, default=0, help="seeds of the best structure of the fit")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1.6, help="at a batch of 2048, scaled linearly")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of the noise to be removed from images")
    parser.add_argument("--align", type=int, help="default: as dmcp prune")
    parser.add_argument("--jobs", type=int, default=1, help="networks that are trained at the same time")
    settings = parser.parse_args()
    if settings.fit:
        show(settings.fit)
        return
    if not settings.data or not settings.budget:
        parser.error("name a network, its data and at least one --budget")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    measure(settings)
    show(settings.out)


if __name__ == "__main__":
    main()
