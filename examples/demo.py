"""Trace ResNet-18, halve its widths, prove that the cut network is the gated one, save it and load it again.

Run it with `make demo`. Everything that it prints is measured while it runs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models import resnet18

import dmcp


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # times of many threads say little on a busy machine
    model = resnet18().eval()
    images = torch.randn(2, 3, 224, 224)

    print("1. Trace: run the model once and find the channels that belong together.\n")
    graph = dmcp.trace(model, images)
    print(graph.summary())

    print("\n2. Cut: keep half of every space.\n")
    half = graph.widths({space.name: space.size // 2 for space in graph.spaces})
    small = dmcp.cut(model, graph, half).eval()
    times = seconds([model, small], images)
    print(f"{'':8}{'MACs':>16}{'params':>14}{'one image, one core':>22}")
    for name, net, widths, time_s in zip(("before", "after"), (model, small), (graph.full, half), times, strict=True):
        print(f"{name:8}{graph.macs(widths):>16,}{params(net):>14,}{1000 * time_s:>19.1f} ms")

    print("\n3. Check: the cut network is the original one with gates on the dropped channels.\n")
    supernet = dmcp.Supernet(model, graph).eval()
    with torch.no_grad():
        gated, plain, whole = supernet(images, supernet.hard(half)), small(images), model(images)
    print(f"largest difference of an output, gated to cut: {distance(gated, plain):.1e}")
    print(f"the same, uncut to cut:                        {distance(whole, plain):.1e}")
    if distance(gated, plain) > 1e-4 * distance(whole, plain):
        raise SystemExit("The cut network differs from the gated one: please report this.")

    print("\n4. Save and load: safetensors and JSON, the network itself is torchvision's own class.\n")
    with tempfile.TemporaryDirectory() as folder:
        dmcp.save(small, half, folder)
        again = dmcp.load(folder, resnet18()).eval()
    with torch.no_grad():
        print(f"{type(again).__module__}.{type(again).__name__}, difference {distance(again(images), plain):.1e}")


def params(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@torch.no_grad()
def seconds(nets: Sequence[nn.Module], images: Tensor, rounds: int = 6) -> list[float]:
    """Time per image: the fastest of a few passes, taken in turn so that other load hits all networks alike."""
    times: list[list[float]] = [[] for _ in nets]
    for _ in range(rounds):
        for net, own in zip(nets, times, strict=True):
            start = time.perf_counter()
            net(images)
            own.append((time.perf_counter() - start) / len(images))
    return [min(own) for own in times]


if __name__ == "__main__":
    main()
