"""Prune a segmentation network with your own loss and metric.

A small encoder and decoder finds the shapes in pictures that this script draws: class 0 is the background, 1 a disc and
2 a square. The loss gives the rare classes more weight, and the metric is the intersection over union of the shapes.
These two functions are all that a search needs to know about the task.

    python examples/segmentation.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.searching.budget import parse_budget
from dmcp.searching.sampling import expected, uniform
from dmcp.searching.search import search
from dmcp.settings import SearchConfig, TrainConfig
from dmcp.training.calibration import recalibrate
from dmcp.training.loop import Task, evaluate, train

Batch = tuple[Tensor, Tensor]
PIXELS = 16


class TinySegmenter(nn.Module):
    """Two steps down and two up, with a concatenated skip connection. Gives class scores for each pixel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = layer(1, width)
        self.down1 = layer(width, 2 * width, stride=2)
        self.down2 = layer(2 * width, 4 * width, stride=2)
        self.up1 = layer(4 * width, 2 * width)
        self.up2 = layer(4 * width, width)  # reads up1 and the skip from down1
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(self.stem(x))
        x = F.interpolate(self.up1(self.down2(skip)), scale_factor=2)
        x = F.interpolate(self.up2(torch.cat([x, skip], dim=1)), scale_factor=2)
        scores: Tensor = self.head(x)
        return scores


def layer(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def paint(count: int, generator: torch.Generator) -> Batch:
    """Noisy pictures (N, 1, H, W) with a disc and a square each, and the class of every pixel (N, H, W)."""
    rows, columns = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="ij")
    places = torch.randint(4, PIXELS - 4, (4, count, 1, 1), generator=generator)
    sizes = torch.randint(3, 6, (2, count, 1, 1), generator=generator)
    disc = (rows - places[0]) ** 2 + (columns - places[1]) ** 2 <= sizes[0] ** 2
    square = torch.maximum((rows - places[2]).abs(), (columns - places[3]).abs()) < sizes[1]
    classes = torch.where(square, 2, disc.long())
    noise = torch.randn(count, PIXELS, PIXELS, generator=generator)
    return ((classes > 0) + 0.2 * noise)[:, None], classes


def pixel_loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of all pixels. Pixels of shapes have four times the weight of the background."""
    return F.cross_entropy(output, batch[1], weight=output.new_tensor([1.0, 4.0, 4.0]))


def shape_iou(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Intersection over union of the two shapes, summed over the pictures."""
    predicted, true = output.argmax(dim=1), batch[1]
    overlaps = []
    for shape in (1, 2):
        intersection = ((predicted == shape) & (true == shape)).sum(dim=(1, 2))
        union = ((predicted == shape) | (true == shape)).sum(dim=(1, 2))
        overlaps.append(intersection / union.clamp(min=1))
    return torch.stack(overlaps).mean(dim=0).sum(), len(true)


@dataclass(frozen=True)
class Row:
    """One network of the table."""

    name: str
    macs: int
    params: int
    iou: float


def run(pictures: int = 512, search_epochs: int = 12, train_epochs: int = 10, budget: str = "30%") -> list[Row]:
    """Search, then train the unpruned network, uniform widths and the searched widths from scratch, in the same way."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    images, classes = paint(pictures, draw)
    loader = list(zip(torch.split(images, 16), torch.split(classes, 16), strict=True))
    test = [paint(128, draw)]
    model = TinySegmenter()
    graph = dmcp.trace(model, images[:2])
    net = dmcp.Supernet(model, graph)
    config = SearchConfig(budget=budget, epochs=search_epochs, lr=0.1, min_lr=0.01, reference_batch=16, alpha_lr=5.0)
    task = Task(loss=pixel_loss)
    result = search(net, loader, config, task=task)
    control = uniform(graph, parse_budget(budget, graph))
    rows = []
    for name, widths in {"unpruned": graph.full, "uniform": control, "dmcp": expected(result)}.items():
        small = dmcp.cut(model, graph, widths)
        dmcp.reinitialize(small, generator=torch.Generator().manual_seed(0))
        train(small, loader, TrainConfig(epochs=train_epochs, lr=0.2, warmup_lr=0.02, reference_batch=16), task=task)
        recalibrate(small, loader)
        rows.append(Row(name, graph.macs(widths), graph.params(widths), evaluate(small, test, shape_iou)))
    return rows


def main() -> None:
    print(f"{'':10}{'MACs':>12}{'params':>10}{'IoU of the shapes':>20}")
    rows = run()
    for row in rows:
        print(f"{row.name:10}{row.macs:>12,}{row.params:>10,}{row.iou:>20.3f}")
    full, control, ours = rows
    print(f"{1 - ours.macs / full.macs:.0%} fewer MACs; {ours.iou - control.iou:+.3f} IoU against uniform widths")
    print("(one seed and a short training: run several seeds before you trust a small difference)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
