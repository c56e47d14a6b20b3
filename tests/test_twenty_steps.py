"""The same twenty steps of a search on every engine: eager, compiled, replayed as CUDA graphs, in bfloat16.

On the GPU if there is one; on a CPU without graphs, and marked slow, since compiling takes a minute or two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dmcp
from dmcp import models
from dmcp.checkpoint import Checkpointer

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning")
]  # dynamo's
if not GPU:
    pytestmark.append(pytest.mark.slow)

EAGER = dmcp.Engine(precision="float32", compile=False, graphs=False, tf32=False, channels_last=False)
ENGINES = {
    "compiled": (dataclasses.replace(EAGER, compile=True, channels_last=True), 1e-4),
    "bfloat16": (dmcp.Engine(precision="bfloat16", compile=True, graphs=True, channels_last=True), 3e-2),
}
if GPU:
    ENGINES["graphs"] = (dataclasses.replace(EAGER, graphs=True), 1e-4)
    ENGINES["kernels"] = (dmcp.Engine(compile=False, graphs=True, kernels=True), 3e-2)
    ENGINES["compiled, graphs"] = (dataclasses.replace(EAGER, compile=True, graphs=True, channels_last=True), 1e-4)


class Smooth(nn.Module):
    """Without kinks: where ReLUs flip, float32 itself is chaotic over twenty steps, whatever the engine."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        shapes = [(3, width), (width, width), (width, width), (width, 2 * width)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in shapes)
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norms[0](self.convs[0](x)))
        inner = nn.functional.silu(self.norms[1](self.convs[1](x)))
        x = x + self.norms[2](self.convs[2](inner))
        x = nn.functional.silu(self.norms[3](self.convs[3](x)))
        return self.fc(x.mean((2, 3)))


class Pictures:
    """Images whose class can be seen, so that losses fall; the same in every pass."""

    def __init__(self, batch: int = 128, count: int = 10) -> None:
        draw = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 3, 32, 32, generator=draw)
        labels = torch.randint(10, (count, batch), generator=draw)
        images = patterns[labels] + torch.randn(count, batch, 3, 32, 32, generator=draw)
        self.batches = [(x.to(DEVICE), y.to(DEVICE)) for x, y in zip(images, labels, strict=True)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.batches)


def searched(
    engine: dmcp.Engine,
    build: Callable[[], nn.Module] = Smooth,
    checkpointer: Checkpointer | None = None,
    **settings: Any,
) -> tuple[dmcp.Supernet, dmcp.SearchResult]:
    torch.manual_seed(0)
    model = build().to(DEVICE)
    net = dmcp.Supernet(model, dmcp.trace(model, torch.zeros(2, 3, 32, 32, device=DEVICE)))
    config = dmcp.SearchConfig(budget="50%", epochs=2, reference_batch=128, log_every=1, **settings)
    return net, dmcp.search(net, Pictures(), config, runtime=dmcp.Runtime(engine=engine, checkpointer=checkpointer))


def resnet20() -> nn.Module:
    return models.build("cifar:resnet20", num_classes=10)


def losses(result: dmcp.SearchResult) -> torch.Tensor:
    return torch.tensor([[*(r.weight_losses or ()), r.task_loss or 0.0, *(r.ratios or (0.0,))] for r in result.log])


@pytest.fixture(scope="module")
def eager() -> torch.Tensor:
    found = losses(searched(EAGER)[1])
    assert (found[-1] - found[0]).abs().max() > 0.1  # they move
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_twenty_steps_on_every_engine(name: str, eager: torch.Tensor) -> None:
    engine, tolerance = ENGINES[name]
    net, result = searched(engine)
    off = ((losses(result) - eager).abs() / eager.amax(dim=1, keepdim=True)).max().item()
    print(f"\n{name}: first loss {eager[0, 0]:.3f}, last {eager[-1, 0]:.3f}, largest difference {off:.1e}")
    assert off < tolerance
    resolved = engine.resolve(DEVICE, steps=10**6)
    x = Pictures(count=1).batches[0][0]
    widths = net.graph.widths({space.name: max(1, 2 * space.size // 3) for space in net.graph.spaces})
    with torch.no_grad(), resolved.running(net.model), resolved.autocast():
        net.train()
        gated = resolved.compiled(lambda x, gates: net(x, gates))(resolved.laid_out(x), net.hard(widths)).float()
        cut = dmcp.cut(net.model, net.graph, widths).train()(resolved.laid_out(x)).float()
    gap = ((gated - cut).abs().max() / cut.abs().max()).item()
    print(f"{name}: gated against cut {gap:.1e}")
    assert gap < tolerance
