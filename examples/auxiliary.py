"""Prune a network with auxiliary outputs, like GoogLeNet: a tuple in train mode, plain scores in eval mode.

The loss adds a share for the auxiliary head; the metric uses the main head. In-place distillation works on both, output
by output. The auxiliary head is cut with the rest, so the small network can be trained like the large one.

    python examples/auxiliary.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.searching.budget import parse_budget
from dmcp.searching.sampling import expected, uniform
from dmcp.searching.search import search
from dmcp.settings import SearchConfig, TrainConfig
from dmcp.training.loop import Task, evaluate, train
from dmcp.training.losses import top1

Batch = tuple[Tensor, Tensor]
Scores = Tensor | tuple[Tensor, Tensor]  # of the main head; in train mode also of the auxiliary head


class Inception(nn.Module):
    """Three branches side by side, concatenated."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = layer(inputs, width, 1)
        self.three = nn.Sequential(layer(inputs, width, 1), layer(width, 2 * width, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), layer(inputs, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.pool(x)], dim=1)


class TinyGoogLeNet(nn.Module):
    """Two inception blocks for 8x8 images, with an auxiliary head after the first block."""

    def __init__(self, width: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.stem = layer(1, 2 * width, 3)
        self.first = Inception(2 * width, width)
        self.auxiliary = nn.Linear(4 * width, classes)
        self.second = Inception(4 * width, 2 * width)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Scores:
        x = self.first(self.stem(x))
        early = self.auxiliary(x.mean(dim=(2, 3))) if self.training else None
        x = self.second(F.max_pool2d(x, 2))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores if early is None else (scores, early)


def layer(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def both_heads(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    """Cross-entropy of the main head, plus 0.3 times that of the auxiliary head."""
    main, early = (F.cross_entropy(scores, batch[1]) for scores in output)
    return main + 0.3 * early


@dataclass(frozen=True)
class Row:
    """One network of the table."""

    name: str
    macs: int
    params: int
    accuracy: float


def run(images: int = 1024, search_epochs: int = 12, train_epochs: int = 10, budget: str = "30%") -> list[Row]:
    """Search, then train the unpruned network, uniform widths and the searched widths from scratch, in the same way."""
    torch.manual_seed(0)
    digits = load("digits")
    loader = make_loader(digits.train.subset(torch.arange(images)), 64, train=True)
    test = make_loader(digits.test, 128, train=False)
    model = TinyGoogLeNet()
    graph = dmcp.trace(model, torch.zeros(2, *digits.shape))
    net = dmcp.Supernet(model, graph)
    config = SearchConfig(budget=budget, epochs=search_epochs, lr=0.1, min_lr=0.01, reference_batch=64, alpha_lr=5.0)
    task = Task(loss=both_heads)
    result = search(net, loader, config, task=task)
    control = uniform(graph, parse_budget(budget, graph))
    rows = []
    for name, widths in {"unpruned": graph.full, "uniform": control, "dmcp": expected(result)}.items():
        small = dmcp.cut(model, graph, widths)
        dmcp.reinitialize(small, generator=torch.Generator().manual_seed(0))
        train(small, loader, TrainConfig(epochs=train_epochs, lr=0.1, warmup_lr=0.02, reference_batch=64), task=task)
        rows.append(Row(name, graph.macs(widths), graph.params(widths), evaluate(small, test, top1)))
    return rows


def main() -> None:
    print(f"{'':10}{'MACs':>10}{'params':>10}{'test accuracy':>16}")
    rows = run()
    for row in rows:
        print(f"{row.name:10}{row.macs:>10,}{row.params:>10,}{row.accuracy:>16.1%}")
    full, control, ours = rows
    points = 100 * (ours.accuracy - control.accuracy)
    print(f"{1 - ours.macs / full.macs:.0%} fewer MACs; {points:+.1f} points against uniform widths")
    print("(one seed and a short training: run several seeds before you trust a small difference)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
