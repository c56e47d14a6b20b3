"""Time the pruned networks of docs/results.md in onnxruntime, on one thread of the CPU, from their recorded widths.

    python -m experiments.real.speeds --sources FOLDER

FOLDER has the repositories that the other scripts name. Each network is built with its own weights, cut to the widths
of the search, exported, and timed in turns with the unpruned one, in batches of one. The machine must be idle.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
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

NETWORKS: dict[str, tuple[Callable[[Path], nn.Module], tuple[int, ...]]] = {  # how it is built, and its input
    "DnCNN-S-25": (lambda folder: denoising.load_network(folder / "DnCNN-PyTorch"), (1, 256, 256)),
    "LPRNet": (lambda folder: plates.load_network(folder / "LPRNet_Pytorch"), (3, 24, 94)),
    "resnet20": (lambda folder: classes.load_network(folder / "pytorch_resnet_cifar10", "resnet20"), (3, 32, 32)),
    "resnet56": (lambda folder: classes.load_network(folder / "pytorch_resnet_cifar10", "resnet56"), (3, 32, 32)),
}


def session(net: nn.Module, x: Tensor, folder: Path) -> Callable[[], Any]:
    """A pass of the network in onnxruntime, on one thread."""
    file = folder / f"{len(list(folder.iterdir()))}.onnx"
    dmcp.export(net.eval(), x, file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    runtime = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return partial(runtime.run, None, {runtime.get_inputs()[0].name: x.numpy()})


def time_in_turns(passes: list[Callable[[], Any]], rounds: int) -> list[float]:
    """The median milliseconds of each pass; the first round warms up."""
    times: list[list[float]] = [[] for _ in passes]
    for number in range(rounds + 1):
        for run, measured in zip(passes, times, strict=True):
            begin = time.perf_counter()
            run()
            if number:
                measured.append(1000 * (time.perf_counter() - begin))
    return [median(measured) for measured in times]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--rows", type=Path, default=RESULTS, help="where the widths are recorded")
    parser.add_argument("--results", type=Path, default=SPEEDS)
    options = parser.parse_args()

    widths: dict[tuple[str, str], dict[str, int]] = {}  # those of the search with the first seed
    for row in read_rows(options.rows):
        if row["row"] == row["method"] == "dmcp" and row["network"] in NETWORKS:
            widths.setdefault((row["network"], row["budget"]), row["widths"])
    for (network, budget), chosen in widths.items():
        build, shape = NETWORKS[network]
        model, x = build(options.sources).eval(), torch.randn(1, *shape)
        graph = dmcp.trace(model, x)
        small = dmcp.cut(model, graph, graph.widths(chosen))
        with tempfile.TemporaryDirectory() as folder:
            passes = [session(net, x, Path(folder)) for net in (model, small)]
            before, after = time_in_turns(passes, options.rounds)
        write_line(options.results, {"network": network, "budget": budget, "before_ms": before, "ms": after})


if __name__ == "__main__":
    main()
