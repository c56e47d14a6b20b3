"""How fast onnxruntime runs networks of equal MACs but other shapes, on one thread: REPORT.md, "aligned" and "gone".

python experiments/shapes.py aligned   # widths that are multiples of 1, 4, 8 or 16
python experiments/shapes.py gone      # residual blocks with few inner channels, or none
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp import models
from dmcp.exporting.timing import Timer
from dmcp.settings import LatencyConfig, RuntimeKind
from dmcp.units import table


def aligned(name: str, side: int, batches: Sequence[int]) -> None:
    """Uniform widths at half of the MACs, rounded to multiples of different numbers."""
    model = models.build(name)
    example = torch.zeros(1, 3, side, side)
    graph = dmcp.trace(model, example)
    networks = {"unpruned": model}
    for align in (1, None, 4, 8, 16):
        networks[f"align {align or 'default'}"] = dmcp.cut(model, graph, dmcp.uniform(graph, "50%", align=align))
    show(name, networks, example, batches)


def gone(name: str, side: int, batches: Sequence[int]) -> None:
    """Blocks with an identity shortcut: few channels inside, or nn.Identity in place of the block."""
    model = models.build(name)
    example = torch.zeros(1, 3, side, side)
    graph = dmcp.trace(model, example)
    spaces = {space.name for space in graph.spaces}
    blocks = [path for path, module in model.named_modules() if f"{path}.conv1" in spaces and keeps_shape(module)]

    networks = {"unpruned": model}
    for inside in (16, 8, 1):
        widths = {space.name: space.size for space in graph.spaces}
        for path in blocks:
            widths[f"{path}.conv1"] = min(inside, widths[f"{path}.conv1"])
        networks[f"{inside} inside"] = dmcp.cut(model, graph, graph.widths(widths))
    networks[f"{len(blocks)} blocks gone"] = copy.deepcopy(model)
    for path in blocks:
        networks[f"{len(blocks)} blocks gone"].set_submodule(path, nn.Identity())
    show(name, networks, example, batches)


def keeps_shape(block: nn.Module) -> bool:
    """Whether a residual block has an identity shortcut."""
    first, last = block.get_submodule("conv1"), block.get_submodule("conv2")
    return bool(first.stride in (1, (1, 1)) and first.in_channels == last.out_channels)


def show(name: str, networks: Mapping[str, nn.Module], example: torch.Tensor, batches: Sequence[int]) -> None:
    """Print MACs, and how many times as fast as the first network each one is."""
    columns = [[f"{count_macs(network, example):,}" for network in networks.values()]]
    for batch in batches:
        config = LatencyConfig(runtime=RuntimeKind.ONNX, device="cpu", batch=batch)
        timer = Timer(config=config, threads=1, example=example)
        times = timer.times(copy.deepcopy(network) for network in networks.values())
        columns.append([f"{ms:.3f}" for ms in times])
        columns.append([f"{times[0] / ms:.2f}" for ms in times])
    head = [name, "MACs"]
    for batch in batches:
        head += [f"ms, batch {batch}", "times as fast"]
    rows = [list(row) for row in zip(networks, *columns, strict=True)]
    print(table([head, *rows]), flush=True)


def count_macs(network: nn.Module, example: torch.Tensor) -> int:
    """Multiply-adds of one sample."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()(example)
    return int(counter.get_total_flops()) // 2


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "aligned":
        aligned("cifar:resnet20", 32, batches=(1, 32))
        aligned("mobilenet_v2", 96, batches=(1, 32))
    else:
        gone("cifar:resnet20", 32, batches=(1, 32))
        gone("resnet18", 224, batches=(1,))
