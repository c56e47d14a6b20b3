"""Measure networks of many widths, and their convolutions alone, to study how a device's time follows the widths.

python benchmarks/latency_data.py --out times.jsonl --seconds 500
python benchmarks/latency_data.py --device cpu --modes eager --model digits:resnet --px 0 --batch 2 --workers 1
python benchmarks/latency_data.py --errors --device cpu --modes onnx eager --px 96 --batch 1 \
    --model cifar:resnet20:px32 mobilenet_v2 resnet18
python benchmarks/latency_data.py --errors --modes captured --aligns default --networks 24

With --errors it prints how far predictions are off for networks that the fit has not seen, without and with steps: for
widths in the default multiples, and for any (align 1). Each line of the table has up to 30 seconds of timing in it,
after the networks were cut and captured or exported.

Otherwise each measurement is one JSON line, written as it comes. Worker processes cut, compile and capture at the same
time, and take turns at the device. Settings take turns, so that a run that is stopped early has measured each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

import dmcp
from dmcp.exporting.latency import BLOCKS, fit, measure_latency, sample_widths
from dmcp.exporting.timing import forward_pass, time_in_turns
from dmcp.models import rebuild, sample_shape
from dmcp.runtime.engine import in_channels_last
from dmcp.searching.bounds import allowed_widths
from dmcp.settings import LatencyConfig, LatencyMode, RuntimeKind
from dmcp.tracing.modules import narrow

ALIGNS = (1, 8, 16, 32, 64)  # random networks have one of these each, in turn
ROUNDS = 5
FOLDS = 5  # parts of the networks, each of which is predicted by a fit to the others
ONNX = "onnx"
GRACE = 60  # seconds that workers get to finish what they began


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement: of a network with these widths, or of one convolution alone."""

    model: str
    px: int  # 0: the model's usual size
    batch: int
    mode: str
    origin: str  # unpruned, smallest, random, sweep, conv
    align: int = 0
    widths: tuple[int, ...] = ()
    layer: tuple[Any, ...] = ()  # in, out, kernel, stride, padding, dilation, groups, height, width


# what is measured


@functools.cache
def read_model(name: str, px: int) -> tuple[nn.Module, Tensor, dmcp.ChannelGraph]:
    """Build a network in eval mode, with one sample and its graph."""
    torch.manual_seed(0)
    model = rebuild(name, (), None).eval()
    shape = sample_shape(model)
    if px:
        shape = (shape[0], px, px)
    example = torch.randn(1, *shape)
    return model, example, dmcp.trace(model, example)


def network_tasks(options: argparse.Namespace, name: str, batch: int, mode: str) -> Iterator[Task]:
    """The unpruned network, the smallest one, then random ones of all alignments, and a sweep of one common share."""
    _, _, graph = read_model(name, options.px)
    common = {"model": name, "px": options.px, "batch": batch, "mode": mode}
    rows_by_align: dict[int, list[list[int]]] = {}
    for align in ALIGNS:
        config = LatencyConfig(networks=max(options.networks, 12), align=align, seed=align)
        with contextlib.suppress(dmcp.WidthsError):  # the network is too narrow for this alignment
            rows_by_align[align] = sample_widths(graph, config)
    aligns = tuple(rows_by_align)
    unpruned, smallest, *_ = rows_by_align[8]
    yield Task(**common, origin="unpruned", align=1, widths=tuple(unpruned))
    yield Task(**common, origin="smallest", align=8, widths=tuple(smallest))

    random_tasks = []
    for number in range(options.networks - 2):
        align = aligns[number % len(aligns)]
        # The rows of `sample_widths` are of two sorts in turn: both are taken of each alignment.
        row = rows_by_align[align][2 + number // len(aligns)]
        random_tasks.append(Task(**common, origin="random", align=align, widths=tuple(row)))

    sweep_tasks = []
    options_of_spaces = allowed_widths(graph, None, None, 1)
    if mode in options.sweep_modes:
        for step in range(4, 65, 2):
            wish = torch.tensor([space.size * step / 64 for space in graph.spaces], dtype=torch.float64)
            widths = options_of_spaces.widths(options_of_spaces.nearest(wish))
            sweep_tasks.append(Task(**common, origin="sweep", align=1, widths=tuple(widths.tolist())))
    for pair in itertools.zip_longest(random_tasks, sweep_tasks):
        yield from (task for task in pair if task is not None)


def layer_tasks(options: argparse.Namespace, name: str, batch: int) -> Iterator[Task]:
    """Every different convolution of a network, on a coarse grid of its channels, and a fine one along each axis."""
    model, example, _ = read_model(name, options.px)
    layers: dict[tuple[Any, ...], None] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        height, width = args[0].shape[2:]
        sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
        layers[(module.in_channels, module.out_channels, *sizes, module.groups, height, width)] = None

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        model(example)
    for hook in hooks:
        hook.remove()

    common = {"model": name, "px": options.px, "batch": batch, "mode": options.layer_mode, "origin": "conv"}
    tasks_by_layer: list[list[Task]] = []
    for inputs, outputs, *rest in layers:
        groups = rest[4]
        channels: dict[tuple[int, int, int], None] = {}
        if groups == 1:
            for pair in itertools.product(grid(inputs), grid(outputs)):
                channels[(*pair, 1)] = None
            for count in fine_steps(inputs):
                channels[(count, outputs, 1)] = None
            for count in fine_steps(outputs):
                channels[(inputs, count, 1)] = None
        elif groups == inputs == outputs:  # depthwise
            for count in sorted({*grid(inputs), *fine_steps(inputs)}):
                channels[(count, count, count)] = None
        tasks_by_layer.append([Task(**common, layer=(i, o, *rest[:4], group, *rest[5:])) for i, o, group in channels])
    for turn in itertools.zip_longest(*tasks_by_layer):
        yield from (task for task in turn if task is not None)


def grid(size: int) -> list[int]:
    """About 6 multiples of 32 up to a size, and the size itself."""
    step = 32 * max(1, round(size / (32 * 6)))
    return sorted({size, *range(step, size + 1, step)})


def fine_steps(size: int) -> list[int]:
    """Multiples of 8 near 0 and near the middle, and two widths that are no multiples of 8."""
    middle = size // 16 * 8
    counts = [4, 12, *range(8, 65, 8), *range(middle, middle + 65, 8)]
    return [count for count in counts if count <= size]


# measuring


class Repeat(nn.Module):
    """A layer that runs several times on the same input, since a graph of one kernel measures its launch."""

    def __init__(self, layer: nn.Module, repeats: int) -> None:
        super().__init__()
        self.layer = layer
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            out: Tensor = self.layer(x)
        return out


class Device:
    """One worker's view of the device, which the workers use in turns."""

    def __init__(self, options: argparse.Namespace, lock: Any) -> None:
        self.options = options
        self.lock = lock
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)

    @torch.inference_mode()
    def measure(self, task: Task) -> dict[str, Any]:
        """Return the milliseconds of a task, and the seconds that it took to prepare and to measure it."""
        start = time.perf_counter()
        torch.manual_seed(0)
        if task.layer:
            net, shape = self.layer(task)
        else:
            net, shape = self.network(task)
        with contextlib.ExitStack() as turn:
            if task.mode == LatencyMode.COMPILED:  # compiling takes long, but hardly needs the device
                call = forward_pass(net, self.input(shape), LatencyMode(task.mode), self.device)
                turn.enter_context(self.lock)
                begin = time.perf_counter()
            else:
                turn.enter_context(self.lock)
                begin = time.perf_counter()
                call = forward_pass(net, self.input(shape), LatencyMode(task.mode), self.device)
            rounds = 1 if task.layer else ROUNDS
            (ms,) = time_in_turns([call], self.device, torch.get_num_threads(), rounds)
            end = time.perf_counter()
        if isinstance(net, Repeat):
            ms /= net.repeats
        return {"ms": ms, "seconds": round(end - start, 3), "device_s": round(end - begin, 3)}

    def network(self, task: Task) -> tuple[nn.Module, tuple[int, ...]]:
        """Cut a network; with the shape of its input."""
        model, example, graph = read_model(task.model, task.px)
        widths = graph.widths(list(task.widths))
        net = narrow(model, graph.cuts(widths), graph.attributes(widths))
        return self.put(net), (task.batch, *example.shape[1:])

    def layer(self, task: Task) -> tuple[nn.Module, tuple[int, ...]]:
        """Build a convolution without a bias, which runs a few times in a row; with the shape of its input."""
        inputs, outputs, kernel, stride, padding, dilation, groups, height, width = task.layer
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)
        return self.put(Repeat(conv, 10 if task.batch < 32 else 2)), (task.batch, inputs, height, width)

    def put(self, net: nn.Module) -> nn.Module:
        net = net.to(self.device, self.dtype).eval()
        if self.options.channels_last:
            for parameter in net.parameters():
                parameter.data = in_channels_last(parameter.data)
        return net

    def input(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, device=self.device).to(self.dtype)
        return in_channels_last(x) if self.options.channels_last else x


def work(options: argparse.Namespace, queue: Any, lock: Any, deadline: float) -> None:
    """Measure what is in the queue until it is empty or the time is over."""
    torch.set_num_threads(1)
    device = Device(options, lock)
    with open(options.out, "a") as file:
        while time.time() < deadline:
            task: Task | None = queue.get()
            if task is None:
                return
            record = asdict(task) | {
                "device": options.device,
                "dtype": options.dtype,
                "channels_last": options.channels_last,
                "time": round(time.time(), 3),
            }
            try:
                record |= device.measure(task)
            except Exception:  # one network that fails must not end the others
                record["error"] = traceback.format_exc()[-1500:]
            append(file, record)
            if task.mode == LatencyMode.COMPILED:
                torch.compiler.reset()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()


def append(file: TextIO, record: dict[str, Any]) -> None:
    """Write one line that other processes do not tear."""
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(json.dumps(record) + "\n")
    file.flush()
    fcntl.flock(file, fcntl.LOCK_UN)


# errors of predictions


def print_errors(options: argparse.Namespace) -> None:
    """Print a table: median and largest error for networks that the fit has not seen, without and with steps."""
    print("| network | batch | runtime | align | networks | without steps | with steps | steps |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, batch, mode, align in itertools.product(options.model, options.batch, options.modes, options.aligns):
        name, _, px = name.partition(":px")  # cifar:resnet20:px32
        model, example, graph = read_model(name, int(px or options.px))
        in_onnx = mode == ONNX
        config = LatencyConfig(
            batch=batch,
            device=options.device,
            dtype=options.dtype,
            networks=options.networks,
            align=None if align == "default" else int(align),
            runtime=RuntimeKind.ONNX if in_onnx else RuntimeKind.TORCH,
            mode=None if in_onnx else LatencyMode(mode),
            channels_last=None if in_onnx else options.channels_last,
        )
        table = measure_latency(model, example, graph, config)
        smooth = unseen_errors(graph, table, blocks=())
        stepped = unseen_errors(graph, table, blocks=BLOCKS)
        steps = ", ".join(f"{'padded to' if step.padded else 'slow off'} {step.block}" for step in table.steps)
        row = (name, batch, mode, align, len(table.networks), show(smooth), show(stepped), steps or "none")
        print("|", " | ".join(map(str, row)), "|", flush=True)


def unseen_errors(graph: dmcp.ChannelGraph, table: dmcp.Latency, blocks: tuple[int, ...]) -> list[float]:
    """Relative errors for each fifth of the networks by a fit to the others; the first two are always fitted."""
    errors: list[float] = []
    for fold in range(FOLDS):
        unseen = [network for number, network in enumerate(table.networks) if number >= 2 and number % FOLDS == fold]
        fitted = [network for network in table.networks if network not in unseen]
        forecast = fit(graph, [network.widths for network in fitted], [network.ms for network in fitted], blocks)
        errors += [abs(forecast.ms(network.widths) / network.ms - 1) for network in unseen]
    return errors


def show(errors: list[float]) -> str:
    """Median and largest error."""
    return f"{statistics.median(errors):.1%}, {max(errors):.0%}"


# the command


def in_turns(sources: list[Iterator[Task]]) -> Iterator[Task]:
    """One task of each source after the other."""
    for turn in itertools.zip_longest(*sources):
        yield from (task for task in turn if task is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["resnet18", "resnet50", "mobilenet_v2"])
    parser.add_argument("--px", type=int, default=224, help="height and width of the images; 0: the model's own")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--modes", nargs="*", default=["captured", "compiled"], choices=[*LatencyMode, ONNX])
    parser.add_argument("--errors", action="store_true", help="print how far predictions are off instead")
    parser.add_argument("--aligns", nargs="*", default=["default", "1"], help="multiples of widths, with --errors")
    parser.add_argument("--sweep-modes", nargs="*", default=["captured"], help="modes in which the sweep is measured")
    parser.add_argument("--networks", type=int, default=42, help="networks of each model, batch and mode")
    parser.add_argument("--layers", action="store_true", help="also measure single convolutions")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="", help="default: bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--seconds", type=float, default=500, help="time limit for all of it")
    parser.add_argument("--out", type=Path, default=Path("latency.jsonl"))
    options = parser.parse_args()
    start = time.time()
    on_gpu = torch.device(options.device).type == "cuda"
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.channels_last = on_gpu
    options.layer_mode = LatencyMode.CAPTURED if on_gpu else LatencyMode.EAGER
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the workers are the parallel part
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.errors:
        torch.set_num_threads(1)
        print_errors(options)
        return

    sources = [
        network_tasks(options, *choice) for choice in itertools.product(options.model, options.batch, options.modes)
    ]
    if options.layers:
        sources += [layer_tasks(options, *choice) for choice in itertools.product(options.model, options.batch)]
    tasks = list(in_turns(sources))
    # Compiling takes longest: it begins at once, and what is quick fills the time of the device.
    workers = multiprocessing.get_context("spawn")
    slow_queue, quick_queue = workers.Queue(), workers.Queue()
    slow = [task for task in tasks if task.mode == LatencyMode.COMPILED]
    quick = [task for task in tasks if task.mode != LatencyMode.COMPILED]
    for_quick = 0
    if quick:
        for_quick = max(1, min(3, options.workers // 2)) if slow else options.workers
    counts = {"slow": options.workers - for_quick if slow else 0, "quick": for_quick}
    print(f"{len(slow)} networks to compile, {len(quick)} other tasks, {counts} workers", flush=True)

    lock = workers.Lock()
    deadline = start + options.seconds - GRACE
    processes = []
    for queue, queued, count in ((slow_queue, slow, counts["slow"]), (quick_queue, quick, counts["quick"])):
        for task in [*queued, *[None] * count]:
            queue.put(task)
        for _ in range(count):
            processes.append(workers.Process(target=work, args=(options, queue, lock, deadline)))
            processes[-1].start()
    for process in processes:
        process.join(max(0.0, start + options.seconds - time.time()))
        if process.is_alive():
            process.kill()
    for queue in (slow_queue, quick_queue):
        queue.cancel_join_thread()

    records = [json.loads(line) for line in options.out.read_text().splitlines()]
    failed = [record for record in records if "error" in record]
    print(f"{len(records)} measured in {time.time() - start:.0f} s, {len(failed)} failed")
    if failed:
        print(failed[0]["error"])


if __name__ == "__main__":
    main()
