"""Equal milliseconds: networks that are pruned in several ways, each as fast as the others, trained alike and tested.

    run="python experiments/milliseconds.py resnet18 SHARDS --out lines.jsonl"
    $run table                      # alone on the device: the latency table
    $run teacher; $run search latency; $run search traffic; $run search macs      # these may run at the same time
    $run choose                     # alone: widths of every row for the time that is allowed, as measured
    $run train uniform --seeds 0 1 2; $run train latency --seeds 0 1 2; ...       # these may run at the same time
    $run times                      # alone: median of five, as CUDA graphs and compiled
    $run show

What is done is a line of the file, and is not done again: the commands can be repeated, in several sittings. The table
is kept beside the file; weights of the teacher are in --weights, and are trained again where they are missing.

Rows: `latency`, `traffic` and `macs` are searches for such a budget (that of uniform widths at the time that is
allowed); `uniform` are uniform widths. Each of them is scaled to the time as measured, in steps that the device likes,
and trained from scratch. `l2` and `sensitivity` are the uniform widths again, cut out of the teacher, whose weights are
kept: its strongest filters, or the channels that its outputs depend on most, refitted. `latency-kept` are the widths of
`latency`, cut likewise. `unpruned` is trained once more, taught by itself. All are trained with one recipe and have one
teacher, and are tested once, on the test images.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from enlarge import open_images, open_loader
from judge import held_loss
from torch import nn

import dmcp
from dmcp import models
from dmcp.exporting.latency_limit import choose_within_latency, timer_like
from dmcp.exporting.timing import forward_pass, time_in_turns
from dmcp.feasibility import reachable, time_networks
from dmcp.runtime.engine import in_channels_last
from dmcp.settings import Engine, LatencyConfig, LatencyMode
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.units import table

Line = dict[str, Any]
UNPRUNED, UNIFORM, L2, SENSITIVITY = "unpruned", "uniform", "l2", "sensitivity"
LATENCY, LATENCY_KEPT = "latency", "latency-kept"
SEARCHED = (LATENCY, "traffic", "macs")
KEPT = {L2: UNIFORM, SENSITIVITY: UNIFORM, LATENCY_KEPT: LATENCY}  # rows with the teacher's weights: whose widths
ROWS = (*SEARCHED, UNIFORM, *KEPT, UNPRUNED)
REPEATS = 5  # of each final measurement
ROUNDS = 6
RUNTIME = dmcp.Runtime(engine=Engine(compile=False, kernels=False), progress=False)  # compiling takes too long


@dataclass(frozen=True)
class Lines:
    """The file of results of one network at one time."""

    path: Path
    model: str
    time: str

    def add(self, phase: str, **found: Any) -> None:
        """Write a line, and print it."""
        line = {"phase": phase, "model": self.model, "time": self.time} | found
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {key: value for key, value in line.items() if key not in ("alphas", "sizes")}
        print(json.dumps(shown), flush=True)

    def of(self, phase: str, **values: Any) -> list[Line]:
        """The lines of a phase that have these values."""
        if not self.path.exists():
            return []
        wanted = {"phase": phase, "model": self.model, "time": self.time} | values
        lines = [json.loads(text) for text in self.path.read_text().splitlines()]
        return [line for line in lines if wanted.items() <= line.items()]


class Problem:
    """The network, its data, and its latency table."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.train, self.test, self.classes = open_images(settings.data, settings.root)
        self.lines = Lines(settings.out, settings.model, settings.time)
        self.example = torch.zeros(2, 3, settings.side, settings.side, device=self.device)
        self.model = self.build(0)
        self.graph = dmcp.trace(self.model, self.example)
        if self.table_path.exists():
            self.graph = dmcp.Latency.load(self.table_path).attach(self.graph)

    @property
    def table_path(self) -> Path:
        """Where the latency table is kept."""
        settings = self.settings
        name = f"{settings.model}-{settings.side}-{settings.batch}-latency.json".replace(":", "-")
        return Path(settings.out).with_name(name)

    def build(self, seed: int) -> nn.Module:
        """The unpruned network with fresh weights."""
        arguments = dict(models.argument(word) for word in self.settings.model_args)
        torch.manual_seed(seed)
        return models.build(self.settings.model, num_classes=self.classes, **arguments).to(self.device)

    def loader(self, images: Any, train: bool, seed: int = 0) -> Any:
        """Batches of images."""
        return open_loader(images, self.settings.batch, train, seed, self.device, self.settings.side)

    def search_config(self, budget: Any) -> dmcp.SearchConfig:
        """As `dmcp prune` searches a network that is not trained on so many images."""
        return dmcp.SearchConfig(budget=budget, epochs=self.settings.search_epochs, lr=0.4, weight_decay=5e-4)

    def recipe(self, seed: int) -> dmcp.TrainConfig:
        """How all networks are trained: as `dmcp prune` does with so many images, but for the epochs."""
        return dmcp.TrainConfig(epochs=self.settings.epochs, lr=1.6, weight_decay=5e-4, seed=seed)

    def teacher_folder(self) -> Path:
        """Where the weights of the teacher are."""
        return Path(self.settings.weights) / f"{self.settings.model}-{self.settings.side}".replace(":", "-")


# phase 1: the latency table


def measure_table(problem: Problem) -> None:
    """Measure the time of networks of many widths, as they are run here: CUDA graphs and bfloat16 on a GPU."""
    if problem.table_path.exists():
        return
    config = LatencyConfig(
        batch=problem.settings.batch,
        device=problem.device.type,
        dtype="bfloat16" if problem.on_gpu else "float32",
        networks=problem.settings.networks,
    )
    search = problem.search_config(problem.settings.time)
    measured = time_networks(problem.model, problem.example, problem.graph, search, config)
    measured.save(problem.table_path)
    problem.lines.add(
        "table",
        unpruned_ms=measured.unpruned_ms,
        how=measured.how,
        median_error=measured.median_error,
        largest_error=measured.largest_error,
        multiples=measured.multiples,
        seconds=round(measured.seconds, 1),
    )


# phase 2: searches, and the teacher


def search_budget(problem: Problem, row: str) -> str:
    """What a row's search is for: the time itself, or what uniform widths cost at that time."""
    if row == "latency":
        return str(problem.settings.time)
    even = dmcp.uniform(problem.graph, problem.settings.time)
    return f"{row}:{problem.graph.cost(row, even)}"


def search(problem: Problem, row: str) -> None:
    """One search from fresh weights; its alphas are a line."""
    if problem.lines.of("search", row=row):
        return
    start = time.perf_counter()
    config = problem.search_config(search_budget(problem, row))
    net = dmcp.Supernet(problem.model, problem.graph, config.groups, config.align)
    found = dmcp.search(net, problem.loader(problem.train, True), config, runtime=RUNTIME)
    problem.lines.add(
        "search",
        row=row,
        budget=str(config.budget),
        epochs=config.epochs,
        seconds=round(time.perf_counter() - start, 1),
        alphas=found.alphas.tolist(),
        sizes=found.sizes.tolist(),
        expected=[round(width, 1) for width in dmcp.expected(found).values()],
    )


def train_teacher(problem: Problem) -> nn.Module:
    """Train the unpruned network, or load it if that has been done here."""
    folder = problem.teacher_folder()
    network = problem.build(0)
    if (folder / "widths.json").exists():
        return dmcp.load(folder, network).to(problem.device)
    problem.lines.add("train", row="teacher", seed=0, **fit(problem, network, 0, None))
    dmcp.save(network, problem.graph.full, folder)
    return network


def fit(problem: Problem, network: nn.Module, seed: int, teacher: nn.Module | None) -> Line:
    """Train a network with the recipe, and test it."""
    start = time.perf_counter()
    loader = problem.loader(problem.train, True, seed)
    config = problem.recipe(seed)
    records = dmcp.train(network, loader, config, teacher=teacher, runtime=RUNTIME)
    loss, accuracy = held_loss(network, problem.loader(problem.test, False))
    return {
        "epochs": config.epochs,
        "accuracy": accuracy,
        "loss": loss,
        "train_loss": fmean(record.loss for record in records[-len(loader) :]),
        "seconds": round(time.perf_counter() - start, 1),
    }


# phase 3: widths of all rows, for the time as measured


def choose(problem: Problem) -> None:
    """Scale the widths of every row to the time that is allowed; each choice is measured, and made again if wrong."""
    config = problem.search_config(problem.settings.time)
    low, high = reachable(problem.graph, config)
    attached = dmcp.Latency.of(problem.graph)
    if attached is None:
        raise SystemExit("There is no latency table: type the same command with `table` first.")
    budget = dmcp.parse_budget(problem.settings.time, problem.graph)
    for row in (UNIFORM, *SEARCHED):
        if problem.lines.of("choose", row=row):
            continue
        widths_for = chooser(problem, row)
        if widths_for is None:
            print(f"{row} is not searched yet.", flush=True)
            continue

        def pick(limited: dmcp.Budget, widths_for: Any = widths_for) -> tuple[Widths, Widths, nn.Module]:
            widths = widths_for(limited)
            return widths, widths, dmcp.cut(problem.model, problem.graph, widths)

        start = time.perf_counter()
        widths, outcome = choose_within_latency(
            pick,
            budget,
            problem.graph,
            lowest=problem.graph.cost("latency", low),
            highest=problem.graph.cost("latency", high),
            model=problem.model,
            timer=timer_like(attached, problem.example),
        )
        problem.lines.add(
            "choose",
            row=row,
            asked_ms=outcome.asked_ms,
            predicted_ms=outcome.predicted_ms,
            measured_ms=outcome.measured_ms,
            again=outcome.again,
            **shares(problem.graph, widths),
            seconds=round(time.perf_counter() - start, 1),
            widths=list(widths.values()),
        )


def chooser(problem: Problem, row: str) -> Callable[[dmcp.Budget], Widths] | None:
    """The widths of a row for any time; None for a search that is missing."""
    graph = problem.graph
    if row == UNIFORM:
        return lambda limited: dmcp.uniform(graph, limited)
    found = problem.lines.of("search", row=row)
    if not found:
        return None
    result = dmcp.SearchResult(
        alphas=torch.tensor(found[0]["alphas"]),
        sizes=torch.tensor(found[0]["sizes"]),
        graph=graph,
        budget=dmcp.parse_budget(found[0]["budget"], graph),
        tolerance=dmcp.SearchConfig.tolerance,
    )
    return lambda limited: dmcp.expected(result.for_budget(limited))


def shares(graph: ChannelGraph, widths: Widths) -> dict[str, float]:
    """Costs as shares of the unpruned network's."""
    return {kind: round(graph.cost(kind, widths) / graph.cost(kind), 4) for kind in ("macs", "params", "traffic")}


def chosen_widths(problem: Problem, row: str) -> Widths:
    """The widths of a row."""
    if row == UNPRUNED:
        return problem.graph.full
    found = problem.lines.of("choose", row=KEPT.get(row, row))
    if not found:
        raise SystemExit(f"The widths of {row} are not chosen: type the same command with `choose` first.")
    return problem.graph.widths(found[0]["widths"])


# phase 4: trainings


def train(problem: Problem, row: str, seeds: Iterable[int]) -> None:
    """Train and test a row, seed by seed, with the same teacher."""
    widths = chosen_widths(problem, row)
    teacher = train_teacher(problem)
    for seed in seeds:
        if problem.lines.of("train", row=row, seed=seed):
            continue
        if row in KEPT:
            network = cut_teacher(problem, teacher, widths, row)
        else:
            network = dmcp.cut(problem.model, problem.graph, widths)
            dmcp.reinitialize(network, generator=torch.Generator().manual_seed(seed))
        network.to(problem.device)
        problem.lines.add("train", row=row, seed=seed, **fit(problem, network, seed, teacher))


def cut_teacher(problem: Problem, teacher: nn.Module, widths: Widths, row: str) -> nn.Module:
    """The teacher with these widths: its strongest filters, or the channels that matter most, refitted."""
    batches = problem.loader(problem.train, True)
    if row == L2:
        network = dmcp.cut(teacher, problem.graph, widths, by="l2")
    else:
        scores = dmcp.importance(teacher, problem.graph, batches)
        network = dmcp.cut(teacher, problem.graph, widths, by=scores, batches=batches)
    dmcp.recalibrate(network, batches)
    return network


# phase 5: final times


def measure_times(problem: Problem, modes: Sequence[str], rows: Sequence[str]) -> None:
    """Time the networks of all rows side by side, several times; the median is a line."""
    settings = problem.settings
    dtype = torch.bfloat16 if problem.on_gpu else torch.float32
    example = torch.zeros(settings.batch, 3, settings.side, settings.side, device=problem.device, dtype=dtype)
    if problem.on_gpu:
        example = in_channels_last(example)
    for mode in modes:
        names = [row for row in rows if row not in KEPT]
        calls: list[Callable[[], object]] = []
        with torch.inference_mode():
            for row in names:
                network = dmcp.cut(problem.model, problem.graph, chosen_widths(problem, row)).eval()
                network.to(device=problem.device, dtype=dtype)
                if problem.on_gpu:
                    network.to(memory_format=torch.channels_last)
                calls.append(forward_pass(network, example, LatencyMode(mode), problem.device))
            measured = [time_in_turns(calls, problem.device, rounds=ROUNDS) for _ in range(REPEATS)]
        for number, row in enumerate(names):
            times = [turn[number] for turn in measured]
            problem.lines.add("times", row=row, mode=mode, ms=median(times), least=min(times), most=max(times))


# the table


def show(lines: Lines) -> None:
    """Print what is known of every row."""
    head = ["row", "MACs", "params", "traffic", "asked, ms", "measured", "captured", "compiled"]
    rows = [[*head, "accuracy, %", "less uniform's, same seeds", "training loss"]]
    even = {line["seed"]: line for line in lines.of("train", row=UNIFORM)}
    for row in (*ROWS, "teacher"):
        trained = lines.of("train", row=row)
        chosen = lines.of("choose", row=row)
        cells = ["", "", "", "", ""]
        if chosen:
            shown = [f"{chosen[-1][kind]:.0%}" for kind in ("macs", "params", "traffic")]
            cells = [*shown, f"{chosen[-1]['asked_ms']:.3f}", f"{chosen[-1]['measured_ms']:.3f}"]
        cells += [show_time(lines, row, mode) for mode in ("captured", "compiled")]
        accuracies = [100 * line["accuracy"] for line in trained]
        less = [100 * (line["accuracy"] - even[line["seed"]]["accuracy"]) for line in trained if line["seed"] in even]
        losses = [line["train_loss"] for line in trained]
        above = "" if row in (UNIFORM, "teacher") else show_spread(less, "+.2f")
        rows.append([row, *cells, show_spread(accuracies, ".2f"), above, show_spread(losses, ".3f")])
    print(f"{lines.model} at {lines.time}\n{table(rows)}", flush=True)


def show_time(lines: Lines, row: str, mode: str) -> str:
    """Milliseconds, and how many times as fast as the unpruned network."""
    measured = lines.of("times", row=row, mode=mode)
    unpruned = lines.of("times", row=UNPRUNED, mode=mode)
    if not measured or not unpruned:
        return ""
    return f"{measured[-1]['ms']:.3f} ({unpruned[-1]['ms'] / measured[-1]['ms']:.2f}x)"


def show_spread(values: Sequence[float], form: str) -> str:
    """Mean ± deviation (count)."""
    if not values:
        return ""
    spread = f" ± {stdev(values):{form.strip('+')}}" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{spread} ({len(values)})"


def main() -> None:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", help="a folder of shards, or cifar10")
    parser.add_argument("phase", choices=("table", "teacher", "search", "choose", "train", "times", "show"))
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="file of lines")
    parser.add_argument("--weights", default="runs/milliseconds", help="folder of the teachers")
    parser.add_argument("--root", default="data", help="folder of cifar10")
    parser.add_argument("--time", default="latency:62%", help="budget that all rows have")
    parser.add_argument("--model-args", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--side", type=int, default=128, help="pixels that images are enlarged to")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=12, help="of every training")
    parser.add_argument("--search-epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--networks", type=int, default=40, help="that the latency table is measured with")
    parser.add_argument("--modes", nargs="*", default=["captured", "compiled"])
    settings = parser.parse_intermixed_args()
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    if settings.phase == "show":
        show(Lines(settings.out, settings.model, settings.time))
        return

    problem = Problem(settings)
    match settings.phase:
        case "table":
            measure_table(problem)
        case "teacher":
            train_teacher(problem)
        case "search":
            for row in settings.rows or SEARCHED:
                search(problem, row)
        case "choose":
            choose(problem)
        case "train":
            for row in settings.rows or ROWS:
                train(problem, row, settings.seeds)
        case "times":
            measure_times(problem, settings.modes, settings.rows or (UNPRUNED, UNIFORM, *SEARCHED))


if __name__ == "__main__":
    main()
