"""Searches and prunings that take a few steps: settings, batches of noise, and a traced network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from nets import Residual, sample
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.defaults import resolve_search, resolve_training
from dmcp.results import PruneResult
from dmcp.runtime.checkpoint import Checkpointer
from dmcp.searching.records import SearchResult
from dmcp.settings import SearchConfig, TrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.training.loop import Event, Task

# As for a network that is not trained, whatever the network and its data.
SEARCH = resolve_search(SearchConfig(budget="60%", epochs=2, groups=4))
TRAIN = resolve_training(TrainConfig(epochs=1, reference_batch=None, lr=0.05, warmup_lr=0.05))


class Noise:
    """Batches of noise; counts how often they were iterated over, and records the epochs passed to set_epoch."""

    def __init__(self, count: int = 2, samples: int = 6, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = []
        for _ in range(count):
            images = torch.randn(samples, *Residual.SHAPE, generator=generator)
            self.batches.append((images, torch.randint(5, (samples,), generator=generator)))
        self.passes = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.batches)


@functools.cache
def traced_residual() -> tuple[nn.Module, ChannelGraph]:
    """A network in float32 that no test changes, and its graph."""
    torch.manual_seed(0)
    model = Residual(**Residual.FULL)
    return model, dmcp.trace(model, sample(Residual.SHAPE).float())


def prune(model: nn.Module | None = None, loader: Any = None, val_loader: Any = None, **options: Any) -> Any:
    """dmcp.prune with short settings, of `traced_residual` unless another network is given."""
    settings: dict[str, Any] = {"search": SEARCH, "train": TRAIN, "retrain": "scratch", "teacher": None}
    if model is None:
        model, settings["graph"] = traced_residual()
    if loader is None:
        loader = Noise()
    if val_loader is None:
        val_loader = Noise(1)
    return dmcp.prune(model, loader, val_loader, **settings | options)


@functools.cache
def pruned_residual() -> tuple[PruneResult, list[Event]]:
    """What dmcp.prune gives for `traced_residual` with baselines, and its events."""
    model, graph = traced_residual()
    events: list[Event] = []
    runtime = dmcp.Runtime(on_event=events.append)
    settings: dict[str, Any] = {"search": SEARCH, "train": TRAIN, "baselines": True, "graph": graph}
    return dmcp.prune(model, Noise(), Noise(1), runtime=runtime, **settings), events


# twenty steps of a search, the same on every engine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EAGER = dmcp.Engine(precision="float32", compile=False, graphs=False, tf32=False, channels_last=False)  # type: ignore[arg-type]


class Smooth(nn.Module):
    """Without kinks: where ReLUs flip, float32 itself is chaotic over twenty steps, whatever the engine."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        shapes = [(3, width), (width, width), (width, width), (width, 2 * width)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in shapes)
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norms[0](self.convs[0](x)))
        x = x + self.norms[2](self.convs[2](F.silu(self.norms[1](self.convs[1](x)))))
        return self.fc(F.silu(self.norms[3](self.convs[3](x))).mean((2, 3)))


def pictures(batch: int = 128, count: int = 10) -> list[tuple[Tensor, Tensor]]:
    """Images whose class can be seen, so that losses fall."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (count, batch), generator=generator)
    images = patterns[labels] + torch.randn(count, batch, 3, 32, 32, generator=generator)
    return [(x.to(DEVICE), y.to(DEVICE)) for x, y in zip(images, labels, strict=True)]


def search_pictures(
    engine: dmcp.Engine,
    build: Callable[[], nn.Module] = Smooth,
    checkpointer: Checkpointer | None = None,
    task: Task = Task(),
    **settings: Any,
) -> tuple[Any, SearchResult]:
    """The supernet and the result after twenty steps."""
    torch.manual_seed(0)
    model = build().to(DEVICE)
    net = dmcp.Supernet(model, dmcp.trace(model, torch.zeros(2, 3, 32, 32, device=DEVICE)))
    config = SearchConfig(budget="50%", epochs=2, reference_batch=128, log_every=1, **settings)
    runtime = dmcp.Runtime(engine=engine, checkpointer=checkpointer)
    return net, dmcp.search(net, pictures(), config, task=task, runtime=runtime)


def losses(result: SearchResult) -> Tensor:
    """All losses and ratios of each step. (steps, values)"""
    return torch.tensor([[*(r.weight_losses or ()), r.task_loss or 0.0, *(r.ratios or (0.0,))] for r in result.log])
