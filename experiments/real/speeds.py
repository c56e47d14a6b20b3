"""Time the pruned networks of docs/results.md in onnxruntime, on one thread of the CPU, from their recorded widths.

    python -m experiments.real.speeds --sources FOLDER

FOLDER has the repositories that the other scripts name. Each network is built with its own weights, cut to the widths
of the search, or else to uniform ones, exported, and timed in turns with the unpruned one, in batches of one. Times are
those of the processor, which other programs hardly change; still, the machine should be idle.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import dmcp
from experiments.real import classes, denoising, plates
from experiments.real.page import SPEEDS, read_rows
from experiments.real.rows import RESULTS, write_line


@dataclass(frozen=True, kw_only=True)
class Network:
    """How a network is built from the folder of its repositories, and what it reads."""

    build: Callable[[Path], nn.Module]
    shape: tuple[int, ...]
    finish: Callable[[nn.Module], nn.Module] = nn.Module.eval  # what makes the network that is exported


def build_yolo(_: Path) -> nn.Module:
    """A YOLO11n with fresh weights."""
    from dmcp.ultralytics import Predictions
    from experiments.real import detection

    folder = Path("build/detection")  # whose name Ultralytics does not take for one with a scale, such as 46m
    return Predictions(detection.build(folder).model.float())


def as_ultralytics_exports(net: nn.Module) -> nn.Module:
    """A YOLO that gives the tensor of all boxes and classes."""
    from ultralytics.nn.tasks import DetectionModel

    net.__class__ = DetectionModel
    head = net.model[-1]
    head.export, head.format, head.dynamic = True, "onnx", False
    return net.eval()


NETWORKS = {
    "YOLO11n": Network(build=build_yolo, shape=(3, 320, 320), finish=as_ultralytics_exports),
    "DnCNN-S-25": Network(build=lambda folder: denoising.load_network(folder / "DnCNN-PyTorch"), shape=(1, 256, 256)),
    "LPRNet": Network(build=lambda folder: plates.load_network(folder / "LPRNet_Pytorch"), shape=(3, 24, 94)),
    "resnet20": Network(
        build=lambda folder: classes.load_network(folder / "pytorch_resnet_cifar10", "resnet20"), shape=(3, 32, 32)
    ),
    "resnet56": Network(
        build=lambda folder: classes.load_network(folder / "pytorch_resnet_cifar10", "resnet56"), shape=(3, 32, 32)
    ),
}


def session(net: nn.Module, x: Tensor, folder: Path) -> Callable[[], Any]:
    """A pass of the network in onnxruntime, on one thread."""
    file = folder / f"{len(list(folder.iterdir()))}.onnx"
    dmcp.export(net, x, file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    runtime = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return partial(runtime.run, None, {runtime.get_inputs()[0].name: x.numpy()})


def time_in_turns(passes: list[Callable[[], Any]], rounds: int) -> list[float]:
    """The median milliseconds of each pass, in processor time; the first round warms up."""
    times: list[list[float]] = [[] for _ in passes]
    for number in range(rounds + 1):
        for run, measured in zip(passes, times, strict=True):
            begin = time.thread_time()
            run()
            if number:
                measured.append(1000 * (time.thread_time() - begin))
    return [median(measured) for measured in times]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--rows", type=Path, default=RESULTS, help="where the widths are recorded")
    parser.add_argument("--results", type=Path, default=SPEEDS)
    options = parser.parse_args()

    widths: dict[tuple[str, str], dict[str, int]] = {}  # those of the first seed
    for method in ("dmcp", "sensitivity"):
        for row in read_rows(options.rows):
            if row["row"] == row["method"] == method and row["network"] in options.networks:
                widths.setdefault((row["network"], row["budget"]), row["widths"])
    for (name, budget), chosen in widths.items():
        network = NETWORKS[name]
        model, x = network.build(options.sources).eval(), torch.randn(1, *network.shape)
        graph = dmcp.trace(model, x)
        nets = [dmcp.cut(model, graph, kept) for kept in (graph.full, graph.widths(chosen))]
        with tempfile.TemporaryDirectory() as folder:
            passes = [session(network.finish(net), x, Path(folder)) for net in nets]
            before, after = time_in_turns(passes, options.rounds)
        write_line(options.results, {"network": name, "budget": budget, "before_ms": before, "ms": after})


if __name__ == "__main__":
    main()
