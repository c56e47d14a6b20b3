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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmcp import Engine, SearchConfig, Supernet, TrainConfig, cut, search, trace, train, uniform
from dmcp.data import store
from dmcp.data.datasets import DataSets, load
from dmcp.data.loaders import make_loader
from dmcp.markov import sample_groups
from dmcp.models import argument, build, sample_shape
from dmcp.runtime.engine import ResolvedEngine, best_device, resolve, suits_kernels
from dmcp.searching.records import SearchRecord
from dmcp.searching.search import LARGE, prepare_chains, uncounted
from dmcp.searching.steps import StepContext, Steps
from dmcp.settings import Sampling
from dmcp.training.loop import Event, Runtime, StepRecord, make_step
from dmcp.training.losses import classification_loss
from dmcp.training.optimizer import parameter_groups, sgd

Row = dict[str, Any]
KINDS = ("steps", "pruned", "epochs", "sampling")  # of rows, each a list in the JSON file
SAMPLES_AT_ONCE = 1 << 16  # as in direct sampling
ENGINE = ("precision", "channels_last", "compile", "graphs", "kernels", "tf32")


# the clock


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """How long a call takes, the device's work included."""
    wait = (lambda _: None) if device.type == "cpu" else torch.accelerator.synchronize
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def median_ms(step: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Milliseconds of a step, the median over rounds."""
    warm, in_a_row = (5, 5) if device.type == "cuda" else (1, 1)
    for _ in range(warm):  # captures CUDA graphs, too
        step()
    times = [seconds(lambda: [step() for _ in range(in_a_row)], device) / in_a_row for _ in range(rounds)]
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
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30 if device.type == "cuda" else None


# one network


class Network:
    """A model with fresh weights, the shape of its input, its graph, and how its steps are run."""

    def __init__(self, words: str, batch: int, asked: argparse.Namespace) -> None:
        name, *args = words.split()
        self.name, self.args = name, [*args, *asked.model_args]
        self.batch, self.asked, self.device = batch, asked, torch.zeros(0, device=asked.device).device
        self.data = load(asked.data, size=asked.input[1:] or 224) if asked.data else None
        classes = {"num_classes": self.data.classes} if self.data else {}
        torch.manual_seed(0)
        self.model = build(name, **classes | dict(map(argument, self.args)))
        self.shape = self.data.shape if self.data else asked.input or sample_shape(self.model)
        example = torch.zeros(2, *self.shape)
        with torch.no_grad():
            self.classes = self.model.eval()(example).shape[1]
        self.model.train()
        start = time.perf_counter()
        self.graph = trace(self.model, example)
        self.trace_s = time.perf_counter() - start
        self.engine = Engine(**{name: getattr(asked, name) for name in ENGINE if hasattr(asked, name)})

    def fresh(self) -> nn.Module:
        """A copy of the model on the device."""
        return copy.deepcopy(self.model).to(self.device)

    def row(self, **figures: Any) -> Row:
        """Figures, and what they are of."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return {"model": self.name, "model_args": self.args, "batch": self.batch, "device": device} | figures

    def resolve(self, model: nn.Module) -> ResolvedEngine:
        """The engine's choices for a long run."""
        large = self.graph.macs() >= LARGE
        return resolve(self.engine, self.device, steps=10**6, large=large, few_channels=suits_kernels(model))

    def images(self, resolved: ResolvedEngine) -> Any:
        """A random batch."""
        x = torch.randn(self.batch, *self.shape, device=self.device)
        return resolved.laid_out((x, torch.randint(self.classes, (self.batch,), device=self.device)))

    def search_config(self, net: Supernet, **settings: Any) -> SearchConfig:
        """A budget in the middle of what can be reached."""
        middle = (self.graph.macs(net.min_widths) + self.graph.macs()) // 2
        return SearchConfig(budget=middle, groups=self.asked.groups, **settings)


def time_training(model: nn.Module, data: Any, resolved: ResolvedEngine, rounds: int) -> tuple[float, float, str]:
    """Seconds of the first training step, milliseconds of later ones, and why they are no CUDA graph."""
    with resolved.running(model):
        optimizer = sgd(parameter_groups(model, 1e-4), 0.01, 0.9, True, resolved.device)
        step = resolved.repeated(make_step(model, optimizer, classification_loss(0.1), None, TrainConfig(), resolved))
        first = seconds(lambda: step(data), resolved.device)
        return first, median_ms(lambda: step(data), rounds, resolved.device), getattr(step, "refused", "")


def time_search(network: Network, net: Supernet, data: Any, resolved: ResolvedEngine) -> tuple[float, Row, str]:
    """Seconds of the first search step, milliseconds of each stage and of both, and why they are no CUDA graphs."""
    device, config = network.device, network.search_config(net)
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
        steps = Steps(context, resolved)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            net.alpha.fill_(1.8)
        stages: dict[str, Callable[[], Any]] = {
            "stage1_ms": partial(steps.train_weights, [data], Sampling.MARKOV, generator, 0.01),
            "stage2_ms": partial(steps.move_alphas, [data], 1e-6),
        }
        parts = stages | {"search_ms": lambda: [stage() for stage in stages.values()]}
        first = seconds(parts["search_ms"], device)
        times = {name: median_ms(step, network.asked.rounds, device) for name, step in parts.items()}
        return first, times, getattr(steps.run_stage1, "refused", "") or getattr(steps.run_stage2, "refused", "")


def measure_steps(network: Network) -> Row:
    """A training step of the unpruned network and the steps of a search."""
    device, resolved = network.device, network.resolve(network.model)
    before = free_memory(device, resolved.compile)
    data, model = network.images(resolved), network.fresh()
    first, plain_ms, refused = time_training(model, data, resolved, network.asked.rounds)
    plain_gib = peak_gib(device, before)
    net = Supernet(model, network.graph, network.asked.groups)
    free_memory(device)
    search_first, times, search_refused = time_search(network, net, data, resolved)
    return network.row(
        shape=network.shape,
        groups=network.asked.groups,
        macs=network.graph.macs(),
        params=network.graph.params(),
        trace_s=network.trace_s,
        plain_ms=plain_ms,
        **times,
        **{name.replace("_ms", "_ratio"): ms / plain_ms for name, ms in times.items()},
        plain_gib=plain_gib,
        search_gib=peak_gib(device, before),
        first_s=first + search_first,
        engine={name: str(getattr(resolved, name)) for name in ENGINE},
        refused=refused or search_refused,
    )


def measure_pruned(network: Network, budget: str) -> Row:
    """A training step of the network, and of its cut to uniform widths."""
    model, widths = network.fresh(), uniform(network.graph, budget)
    small = cut(model, network.graph, widths)
    times: Row = {}
    for name, net in {"whole_ms": model, "pruned_ms": small}.items():
        resolved = network.resolve(net)
        free_memory(network.device, resolved.compile)
        times[name] = time_training(net, network.images(resolved), resolved, network.asked.rounds)[1]
    return network.row(budget=budget, macs=network.graph.macs(widths), **times)


def measure_epochs(network: Network, data: DataSets, epochs: int, alone: Row) -> Row:
    """Seconds of a whole epoch on data: the loader alone, training, the search's warm-up, and the search after it.

    The median without the first epoch of each, in which kernels are tuned and graphs captured. alone: the steps, of
    which those with the loader take longer by what they wait for it.
    """
    device, asked = network.device, network.asked
    loader = make_loader(data.train, network.batch, True, 0, device, workers=asked.workers)
    steps, ends = len(loader), list[float]()
    first_batch_s = seconds(lambda: next(iter(loader)), device)  # image files are decoded before it
    loader_s = statistics.median(seconds(lambda: collections.deque(loader, 0), device) for _ in range(epochs))
    per_s = {"first_batch_s": first_batch_s, "loader_s": loader_s, "loader_per_s": steps * network.batch / loader_s}
    if asked.loader_only:
        return network.row(data=asked.data, steps=steps, **per_s)

    def note_end(event: Event) -> None:
        """The records of an epoch come at its end, when the device is done."""
        if isinstance(event.record, StepRecord | SearchRecord) and (event.record.step + 1) % steps == 0:
            ends.append(time.perf_counter())

    rates = TrainConfig(epochs=epochs, lr=0.1, warmup_epochs=0, warmup_lr=0.0)
    free_memory(device)
    runtime = Runtime(engine=network.engine, on_event=note_end)
    train(network.fresh(), loader, rates, runtime=runtime)
    net = Supernet(network.fresh(), network.graph, network.asked.groups)
    config = network.search_config(net, epochs=2 * epochs, lr=0.05, min_lr=0.0, log_every=steps, warmup=0.5)
    free_memory(device)
    search(net, loader, config, runtime=runtime)
    parts = (ends[start : start + epochs] for start in range(0, 3 * epochs, epochs))
    names = ("train_s", "warmup_s", "search_s")
    medians = [statistics.median(end - start for start, end in itertools.pairwise(part)) for part in parts]
    waits = {f"{name}_waits_ms": 1000 * took / steps - alone[own] for name, took, own in (
        ("train", medians[0], "plain_ms"), ("search", medians[2], "search_ms"),
    )}  # fmt: skip
    slower = [own for own in ("plain_ms", "search_ms") if alone[own] < 1000 * loader_s / steps]
    held = f"held back by the loader: {', '.join(slower) or 'nothing'}"
    return network.row(
        data=asked.data, steps=steps, **per_s, **dict(zip(names, medians, strict=True)), **waits, held=held
    )


def measure_sampling(network: Network, count: int) -> Row:
    """Seconds of sampling widths from the chains and counting their MACs, on one core."""
    sizes = Supernet(network.model, network.graph, network.asked.groups).sizes.cpu()
    alphas = torch.full((len(sizes), sizes.shape[1] - 1), 1.8)
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()

    def sample(count: int) -> None:
        network.graph.macs(sample_groups(alphas, sizes, count, generator))

    torch.set_num_threads(1)
    sample(1000)  # the first call is slower
    start = time.perf_counter()
    for done in range(0, count, SAMPLES_AT_ONCE):
        sample(min(SAMPLES_AT_ONCE, count - done))
    took = time.perf_counter() - start
    torch.set_num_threads(threads)
    return network.row(spaces=len(sizes), structures=count, seconds=took, per_s=count / took)


# the script


def measure(asked: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Rows of all networks with their kinds, as they come."""
    for words in asked.model:
        for batch in asked.batch:
            network = Network(words, batch, asked)
            if asked.budget:
                yield "pruned", measure_pruned(network, asked.budget)
            alone: Row = {}
            if not asked.loader_only:
                yield "steps", (alone := measure_steps(network))
            if network.data:
                yield "epochs", measure_epochs(network, network.data, asked.epochs, alone)
        if asked.sampling:
            yield "sampling", measure_sampling(network, asked.sampling)


def print_table(rows: Sequence[Row]) -> None:
    """The numbers of rows of one kind; the JSON file has the rest."""
    hidden = ("model", "model_args", "device", "shape", "groups", "engine", "refused", "held")
    columns = [name for name in rows[0] if name not in hidden]
    lines = [["model", *columns]]
    lines += [[" ".join([row["model"], *row["model_args"]]), *(cell(row[name]) for name in columns)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        print(name.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), sep="  ")
    for row in rows:
        if row.get("refused"):
            print(f"{row['model']}, batch {row['batch']}: not replayed as a CUDA graph: {row['refused']}")
        if row.get("held"):
            print(f"{row['model']}, batch {row['batch']}: {row['held']}")


def cell(value: Any) -> str:
    """Three significant digits; a dash where nothing was measured."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The options, with their defaults for the device."""
    about, examples = (__doc__ or "").split("\n\n", 1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, epilog=examples, formatter_class=raw)
    numbers = lambda text: tuple(map(int, text.split("x")))  # noqa: E731
    several: Any = {"action": "extend", "nargs": "+"}
    parser.add_argument("--model", required=True, **several, help="names; 'mobilenet_v2 width_mult=0.5' has arguments")
    parser.add_argument("--model-args", default=[], **several, help="name=value for the builder of every model")
    parser.add_argument("--batch", type=int, **several, help="images in a batch; default: 256, on a CPU 16")
    parser.add_argument("--input", type=numbers, default=(), help="of one image, like 3x224x224; default: the model's")
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--budget", help="also a training step at uniform widths of this budget, like 50%%")
    parser.add_argument("--data", help="also epochs on digits, cifar10, cifar100 or a folder")
    parser.add_argument("--workers", type=int, help="threads that read image files; default: the cores")
    parser.add_argument("--stream", action="store_true", help="read image files in each epoch, though memory has room")
    parser.add_argument("--loader-only", action="store_true", help="only the loader of the data")
    parser.add_argument("--epochs", type=int, default=3, help="of each kind on the data; the first does not count")
    parser.add_argument("--sampling", nargs="?", type=int, const=10**6, help="also sample so many structures")
    parser.add_argument("--rounds", type=int, help="default: 15, on a CPU 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--device", default=best_device().type)
    parser.add_argument("--precision", choices=("float32", "bfloat16"))
    for switch in ("compile", "graphs", "kernels", "channels-last"):
        parser.add_argument(f"--{switch}", action=argparse.BooleanOptionalAction)
    parser.add_argument("--tf32", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args(words)
    if asked.stream:
        store.SHARE = 0.0
    batch, rounds = (256, 15) if asked.device.startswith("cuda") else (16, 3)
    asked.batch, asked.rounds = asked.batch or [batch], asked.rounds or rounds
    return asked


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print a table of each kind; the JSON file is written anew after each row."""
    asked = parse_arguments(words)
    found: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
    }
    found |= {kind: [] for kind in KINDS}
    for kind, row in measure(asked):
        found[kind].append(row)
        print(f"{kind}: {json.dumps(row)}", file=sys.stderr, flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n")
    for kind in KINDS:
        if found[kind]:
            print(f"\n{kind}")
            print_table(found[kind])


if __name__ == "__main__":
    main()
