"""Time and memory of a training step and of the search steps, side by side on random images.

    python benchmarks/bench.py --model resnet50 --batch 128 256 --json bench.json
    python benchmarks/bench.py --model mobilenet_v2 --model-args width_mult=1.5 --batch 256 --budget 50%
    python benchmarks/bench.py --model cifar:resnet20 cifar:resnet56 --batch 512 --data cifar10 --sampling
    python benchmarks/bench.py --model resnet18 --batch 256 --data FOLDER --input 3x64x64 --stream

Every model is measured at every batch size. A step counts as the median over rounds of a few steps in a row, as in
training, where the host runs ahead of the GPU. Compilation and the capture of CUDA graphs come before the rounds.
"""

from __future__ import annotations

import argparse
import collections
import copy
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmcp import Engine, SearchConfig, Supernet, TrainConfig, cut, search, trace, train, uniform
from dmcp.data import store
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.defaults import resolve_search
from dmcp.exporting.timing import synchronize
from dmcp.markov import sample_groups
from dmcp.models import argument, build, sample_shape
from dmcp.runs.records import SearchRecord, StepRecord
from dmcp.runtime.batches import Loader
from dmcp.runtime.engine import ResolvedEngine, best_device, resolve, suits_kernels
from dmcp.searching import steps
from dmcp.searching.search import LARGE, prepare_chains, uncounted
from dmcp.searching.steps import StepContext, Steps
from dmcp.settings import ResolvedSearchConfig, Sampling
from dmcp.training.loop import Event, Runtime, make_step
from dmcp.training.losses import classification_loss
from dmcp.training.optimizer import parameter_groups, sgd

Row = dict[str, Any]
TABLES = ("steps", "pruned", "epochs", "sampling")  # of rows, each a list in the JSON file
SAMPLES_AT_ONCE = 1 << 16  # as in direct sampling
ENGINE = ("precision", "channels_last", "compile", "graphs", "kernels", "tf32")
HIDDEN = ("model", "model_args", "device", "shape", "groups", "engine", "refused", "held")  # not columns of a table


# the clock


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Time a call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def median_ms(step: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Milliseconds of a step, the median over rounds."""
    steps = 5 if device.type == "cuda" else 1  # in a round

    def run() -> None:
        for _ in range(steps):
            step()

    run()  # captures CUDA graphs, too
    times = [seconds(run, device) / steps for _ in range(rounds)]
    return 1000 * statistics.median(times)


def free_memory(device: torch.device, compiled: bool = False) -> int:
    """Free what earlier models took and reset the peak; returns the bytes still in use."""
    if compiled:
        torch.compiler.reset()  # it keeps few variants of a function, and runs further ones uncompiled
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # also the pools of deleted CUDA graphs
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_gib(device: torch.device, before: int) -> float | None:
    """Peak memory since `free_memory`, with warm-up and capture: replays of a graph do not count themselves."""
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


# one network


class Network:
    """A model with fresh weights, the shape of its input, its graph, and how its steps are run."""

    def __init__(self, words: str, batch: int, options: argparse.Namespace) -> None:
        name, *model_args = words.split()
        self.name = name
        self.model_args = [*model_args, *options.model_args]
        self.batch = batch
        self.groups = options.groups
        self.rounds = options.rounds
        self.device = torch.zeros(0, device=options.device).device
        self.engine = Engine(**{field: getattr(options, field) for field in ENGINE})

        self.data = None
        arguments = dict(argument(word) for word in self.model_args)
        if options.data:
            self.data = load(options.data, size=options.input[1:] or 224)
            arguments = {"num_classes": self.data.classes} | arguments
        torch.manual_seed(0)
        self.model = build(name, **arguments)
        if self.data:
            self.shape = self.data.shape
        else:
            self.shape = options.input or sample_shape(self.model)

        example = torch.zeros(2, *self.shape)
        with torch.no_grad():
            self.classes = self.model.eval()(example).shape[1]
        self.model.train()
        start = time.perf_counter()
        self.graph = trace(self.model, example)
        self.trace_s = time.perf_counter() - start

    def fresh(self) -> nn.Module:
        """Copy the model to the device."""
        return copy.deepcopy(self.model).to(self.device)

    def supernet(self, model: nn.Module) -> Supernet:
        """Make a supernet of the model."""
        return Supernet(model, self.graph, self.groups)

    def row(self, **figures: Any) -> Row:
        """Return figures, and what they are of."""
        device = self.device.type
        if device == "cuda":
            device = torch.cuda.get_device_name(self.device)
        return {"model": self.name, "model_args": self.model_args, "batch": self.batch, "device": device} | figures

    def resolve(self, model: nn.Module) -> ResolvedEngine:
        """Return the engine's choices for a long run."""
        large = self.graph.macs() >= LARGE
        return resolve(self.engine, self.device, steps=10**6, large=large, few_channels=suits_kernels(model))

    def images(self, resolved: ResolvedEngine) -> Any:
        """Draw a random batch."""
        x = torch.randn(self.batch, *self.shape, device=self.device)
        labels = torch.randint(self.classes, (self.batch,), device=self.device)
        return resolved.laid_out((x, labels))

    def search_config(self, net: Supernet, **settings: Any) -> ResolvedSearchConfig:
        """Return settings with a budget in the middle of what can be reached."""
        middle = (self.graph.macs(net.min_widths) + self.graph.macs()) // 2
        return resolve_search(SearchConfig(budget=middle, groups=self.groups, **settings))


# steps


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of some kinds of steps."""

    first_s: float  # of the very first step, in which kernels are compiled
    ms: dict[str, float]  # of later steps, by kind
    refused: str  # why they are no CUDA graphs; empty if they are


def time_training(network: Network, model: nn.Module, data: Any, resolved: ResolvedEngine) -> StepTimes:
    """Time the training steps of a model."""
    with resolved.running(model):
        optimizer = sgd(parameter_groups(model, 1e-4), 0.01, 0.9, True, resolved.device)
        train_step = make_step(model, optimizer, classification_loss(0.1), None, TrainConfig(), resolved)
        step = resolved.repeated(train_step)
        call = partial(step, data)
        first_s = seconds(call, resolved.device)
        ms = median_ms(call, network.rounds, resolved.device)
        return StepTimes(first_s=first_s, ms={"plain_ms": ms}, refused=getattr(step, "refused", ""))


def time_search(network: Network, net: Supernet, data: Any, resolved: ResolvedEngine) -> StepTimes:
    """Time the search steps: each stage, and both."""
    device = network.device
    config = network.search_config(net)
    with resolved.running(net.model), uncounted(net.model):
        net.train()
        budget, chains = prepare_chains(net, config)
        context = StepContext(
            net=net,
            chains=chains,
            budget=budget,
            config=config,
            loss=classification_loss(config.label_smoothing),
            precision=resolved.precision,
        )
        search_steps = Steps(context, resolved)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            net.alpha.fill_(1.8)

        stage1 = partial(search_steps.train_weights, [data], Sampling.MARKOV, generator, 0.01)
        stage2 = partial(search_steps.move_alphas, [data], 1e-6)

        def search_step() -> None:
            stage1()
            stage2()

        first_s = seconds(search_step, device)
        ms = {
            "stage1_ms": median_ms(stage1, network.rounds, device),
            "stage2_ms": median_ms(stage2, network.rounds, device),
            "search_ms": median_ms(search_step, network.rounds, device),
        }
        refusals = [getattr(stage, "refused", "") for stage in (search_steps.run_stage1, search_steps.run_stage2)]
        return StepTimes(first_s=first_s, ms=ms, refused=refusals[0] or refusals[1])


def measure_steps(network: Network) -> Row:
    """A training step of the unpruned network and the steps of a search."""
    device = network.device
    resolved = network.resolve(network.model)
    before = free_memory(device, resolved.compile)
    data = network.images(resolved)
    model = network.fresh()

    training = time_training(network, model, data, resolved)
    plain_ms = training.ms["plain_ms"]
    plain_gib = peak_gib(device, before)

    net = network.supernet(model)
    free_memory(device)
    searching = time_search(network, net, data, resolved)
    ratios = {name.replace("_ms", "_ratio"): ms / plain_ms for name, ms in searching.ms.items()}
    return network.row(
        shape=network.shape,
        groups=network.groups,
        macs=network.graph.macs(),
        params=network.graph.params(),
        trace_s=network.trace_s,
        plain_ms=plain_ms,
        **searching.ms,
        **ratios,
        plain_gib=plain_gib,
        search_gib=peak_gib(device, before),
        first_s=training.first_s + searching.first_s,
        engine={name: str(getattr(resolved, name)) for name in ENGINE},
        refused=training.refused or searching.refused,
    )


def measure_pruned(network: Network, budget: str) -> Row:
    """A training step of the network, and of its cut to uniform widths."""
    whole = network.fresh()
    widths = uniform(network.graph, budget)
    small = cut(whole, network.graph, widths)
    times: Row = {}
    for name, model in (("whole_ms", whole), ("pruned_ms", small)):
        resolved = network.resolve(model)
        free_memory(network.device, resolved.compile)
        times[name] = time_training(network, model, network.images(resolved), resolved).ms["plain_ms"]
    return network.row(budget=budget, macs=network.graph.macs(widths), **times)


# epochs on data


def measure_loader(network: Network, loader: Loader, options: argparse.Namespace) -> Row:
    """Seconds of an epoch of the loader alone, the median over epochs."""
    first_batch_s = seconds(lambda: next(iter(loader)), network.device)  # image files are decoded before it

    def use_up() -> None:
        collections.deque(loader, maxlen=0)

    loader_s = statistics.median(seconds(use_up, network.device) for _ in range(options.epochs))
    return {
        "data": options.data,
        "steps": len(loader),
        "first_batch_s": first_batch_s,
        "loader_s": loader_s,
        "loader_per_s": len(loader) * network.batch / loader_s,
    }


def measure_epochs(network: Network, loader: Loader, options: argparse.Namespace, step_ms: Row) -> Row:
    """Seconds of a whole epoch on data: the loader alone, training, the search's warm-up, and the search after it.

    The median without the first epoch of each, in which kernels are tuned and graphs captured. step_ms: the steps on
    one batch, compared with which those on data take longer by what they wait for the loader.
    """
    epochs = options.epochs
    loader_row = measure_loader(network, loader, options)
    steps = len(loader)
    ends: list[float] = []

    def note_end(event: Event) -> None:
        """The records of an epoch come at its end, when the device is done."""
        if isinstance(event.record, StepRecord | SearchRecord) and (event.record.step + 1) % steps == 0:
            ends.append(time.perf_counter())

    runtime = Runtime(engine=network.engine, on_event=note_end)
    free_memory(network.device)
    rates = TrainConfig(epochs=epochs, lr=0.1, warmup_epochs=0, warmup_lr=0.0)
    train(network.fresh(), loader, rates, runtime=runtime)

    net = network.supernet(network.fresh())
    config = network.search_config(net, epochs=2 * epochs, lr=0.05, min_lr=0.0, log_every=steps, warmup=0.5)
    free_memory(network.device)
    search(net, loader, config, runtime=runtime)

    train_s = median_gap(ends[:epochs])
    warmup_s = median_gap(ends[epochs : 2 * epochs])
    search_s = median_gap(ends[2 * epochs :])

    loader_ms = 1000 * loader_row["loader_s"] / steps
    slower = [name for name in ("plain_ms", "search_ms") if step_ms[name] < loader_ms]
    return network.row(
        **loader_row,
        train_s=train_s,
        warmup_s=warmup_s,
        search_s=search_s,
        train_waits_ms=1000 * train_s / steps - step_ms["plain_ms"],
        search_waits_ms=1000 * search_s / steps - step_ms["search_ms"],
        held=f"held back by the loader: {', '.join(slower) or 'nothing'}",
    )


def median_gap(ends: Sequence[float]) -> float:
    """Median time from one end to the next."""
    return statistics.median(end - start for start, end in itertools.pairwise(ends))


# sampling


def measure_sampling(network: Network, count: int) -> Row:
    """Seconds of sampling widths from the chains and counting their MACs, on one core."""
    sizes = network.supernet(network.model).sizes.cpu()
    alphas = torch.full((len(sizes), sizes.shape[1] - 1), 1.8)
    generator = torch.Generator().manual_seed(0)

    def sample(number: int) -> None:
        network.graph.macs(sample_groups(alphas, sizes, number, generator))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sample(1000)  # the first call is slower
    start = time.perf_counter()
    for done in range(0, count, SAMPLES_AT_ONCE):
        sample(min(SAMPLES_AT_ONCE, count - done))
    elapsed = time.perf_counter() - start
    torch.set_num_threads(threads)
    return network.row(spaces=len(sizes), structures=count, seconds=elapsed, per_s=count / elapsed)


# the script


def measure(options: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Yield the rows of all networks with their kinds, as they come."""
    for words in options.model:
        for batch in options.batch:
            network = Network(words, batch, options)
            if options.budget:
                yield "pruned", measure_pruned(network, options.budget)
            loader = None
            if network.data:
                train_images = network.data.train
                loader = make_loader(train_images, batch, True, 0, network.device, workers=options.workers)
            if options.loader_only:
                if loader is not None:
                    yield "epochs", network.row(**measure_loader(network, loader, options))
                continue
            steps = measure_steps(network)
            yield "steps", steps
            if loader is not None:
                yield "epochs", measure_epochs(network, loader, options, steps)
        if options.sampling:
            yield "sampling", measure_sampling(network, options.sampling)


def print_table(rows: Sequence[Row]) -> None:
    """Print the numbers of rows of one kind; the JSON file has the rest."""
    columns = [name for name in rows[0] if name not in HIDDEN]
    lines = [["model", *columns]]
    for row in rows:
        model = " ".join([row["model"], *row["model_args"]])
        lines.append([model, *(cell(row[name]) for name in columns)])

    widths = [max(len(line[number]) for line in lines) for number in range(len(lines[0]))]
    for model, *cells in lines:
        numbers = [text.rjust(width) for text, width in zip(cells, widths[1:], strict=True)]
        print(model.ljust(widths[0]), *numbers, sep="  ")

    for row in rows:
        name = f"{row['model']}, batch {row['batch']}"
        if row.get("refused"):
            print(f"{name}: not replayed as a CUDA graph: {row['refused']}")
        if row.get("held"):
            print(f"{name}: {row['held']}")


def cell(value: Any) -> str:
    """Three significant digits; a dash where nothing was measured."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def shape_of(text: str) -> tuple[int, ...]:
    """Read a shape like 3x224x224."""
    return tuple(int(side) for side in text.split("x"))


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the options, with their defaults for the device."""
    about, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: Any = {"action": "extend", "nargs": "+"}
    switch = argparse.BooleanOptionalAction

    parser.add_argument("--model", required=True, **several, help="names; 'mobilenet_v2 width_mult=0.5' has arguments")
    parser.add_argument("--model-args", default=[], **several, help="name=value for the builder of every model")
    parser.add_argument("--batch", type=int, **several, help="images in a batch; default: 256, on a CPU 16")
    parser.add_argument(
        "--input", type=shape_of, default=(), help="shape of one image, like 3x224x224; default: that of the model"
    )
    parser.add_argument("--groups", type=int, default=10, help="groups of channels in a space")
    parser.add_argument("--budget", help="time a training step at uniform widths of this budget, too, like 50%%")
    parser.add_argument("--rounds", type=int, help="rounds that are timed; default: 15, on a CPU 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument(
        "--sampling", nargs="?", type=int, const=10**6, metavar="COUNT", help="time the sampling of structures, too"
    )

    parser.add_argument("--data", help="time epochs on digits, cifar10, cifar100 or a folder, too")
    parser.add_argument("--workers", type=int, help="threads that read image files; default: number of cores")
    parser.add_argument("--no-stem", action="store_true", help="run the first layers once for each sub-network")
    parser.add_argument("--stream", action="store_true", help="read image files in each epoch, though memory has room")
    parser.add_argument("--loader-only", action="store_true", help="time only the loader of the data")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each kind; the first does not count")

    parser.add_argument("--device", default=best_device().type, help="device, as torch names it")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="precision of the steps")
    parser.add_argument("--compile", action=switch, help="compile the model")
    parser.add_argument("--graphs", action=switch, help="replay steps as CUDA graphs")
    parser.add_argument("--kernels", action=switch, help="use our Triton kernels")
    parser.add_argument("--channels-last", action=switch, help="lay images out with the channels last")
    parser.add_argument("--tf32", action=switch, default=True, help="multiply float32 matrices in TF32")

    options = parser.parse_args(words)
    if options.no_stem:
        setattr(steps, "find_stem", lambda net: None)  # noqa: B010  (the module exports it to nobody)
    if options.stream:
        store.SHARE = 0.0  # no image is kept
    on_gpu = options.device.startswith("cuda")
    if not options.batch:
        options.batch = [256 if on_gpu else 16]
    if not options.rounds:
        options.rounds = 15 if on_gpu else 3
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print a table of each kind; the JSON file is written anew after each row."""
    options = parse_arguments(words)
    rows: dict[str, list[Row]] = {kind: [] for kind in TABLES}
    facts = {
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
    }
    for kind, row in measure(options):
        rows[kind].append(row)
        print(f"{kind}: {json.dumps(row)}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(facts | rows, indent=1) + "\n")
    for kind in TABLES:
        if rows[kind]:
            print(f"\n{kind}")
            print_table(rows[kind])


if __name__ == "__main__":
    main()
