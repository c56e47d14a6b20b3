"""Prune ResNet-20 or ResNet-56 for CIFAR-10, which somebody else trained, and fine-tune for several lengths.

    git clone https://github.com/akamaster/pytorch_resnet_cifar10      # networks and weights (BSD-2-Clause)
    python -m experiments.real.classes pytorch_resnet_cifar10 --network resnet20 --epochs 1 5 20 100

CIFAR-10 lies in data/cifar10, as `dmcp train --data cifar10` leaves it. The row "right after the cut" is length 0.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from experiments.real import methods
from experiments.real.rows import RESULTS, is_recorded, write_rows

WEIGHTS = {"resnet20": "resnet20-12fca82f.th", "resnet56": "resnet56-4bfd9763.th"}
MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 1, 3, 1, 1)  # as it was trained
Batch = tuple[Tensor, Tensor]


def load_network(folder: Path, name: str) -> nn.Module:
    """The network with its weights."""
    sys.path.insert(0, str(folder))
    net: nn.Module = getattr(importlib.import_module("resnet"), name)()
    saved = torch.load(folder / "pretrained_models" / WEIGHTS[name], map_location="cpu", weights_only=True)
    net.load_state_dict({key.removeprefix("module."): tensor for key, tensor in saved["state_dict"].items()})
    return net


def read_images(part: str, device: str) -> Batch:
    """All images of a part of CIFAR-10, normalized, and their labels."""
    images, labels = [], []
    for path in sorted(Path("data/cifar10").glob(f"{part}-*.npz")):
        arrays = np.load(path)
        images.append(torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2).to(device).float() / 255)
        labels.append(torch.from_numpy(arrays["labels"]).long().to(device))
    return (torch.cat(images) - MEAN.to(device)) / STD.to(device), torch.cat(labels)


class Augmented:
    """Batches of shifted and mirrored images: functions of seed and epoch."""

    def __init__(self, data: Batch, size: int, seed: int) -> None:
        self.images, self.labels = F.pad(data[0], (4, 4, 4, 4)), data[1]
        self.size, self.seed, self.epoch = size, seed, 0

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        device = self.labels.device
        random = torch.Generator(device).manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(len(self.labels), generator=random, device=device)
        inside = torch.arange(32, device=device)
        for index in order.split(self.size)[: len(self)]:
            corner = torch.randint(9, (2, len(index), 1), generator=random, device=device)
            mirrored = torch.randint(2, (len(index), 1), generator=random, device=device) == 1
            rows = corner[0] + inside
            columns = corner[1] + torch.where(mirrored, 31 - inside, inside)
            batch = self.images[index[:, None, None], :, rows[:, :, None], columns[:, None, :]]
            yield batch.permute(0, 3, 1, 2).contiguous(), self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="a clone of pytorch_resnet_cifar10")
    parser.add_argument("--network", choices=list(WEIGHTS), default="resnet20")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--method", default="dmcp", help="of dmcp.prune or methods.py")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 20, 100])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--images", type=int, default=50_000, help="how many images train")
    parser.add_argument("--lr", type=float, help="default: what prune chooses")
    parser.add_argument("--held-out", action="store_true", help="test on 5,000 training images, to choose settings")
    parser.add_argument("--no-teacher", action="store_true", help="learn from the labels alone")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--save", type=Path, help="folder that the pruned networks are saved in")
    options = parser.parse_args()

    methods.check_installed(options.method)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    all_images = read_images("train", device)
    train = tuple(part[: options.images] for part in all_images)
    test = tuple(part[: options.images].split(1000) for part in read_images("test", device))
    if options.held_out:
        train = tuple(part[: min(options.images, 45_000)] for part in all_images)
        test = tuple(part[45_000:].split(1000) for part in all_images)
    for seed in options.seeds:
        for epochs in options.epochs:
            searches = {"network": options.network, "images": len(train[0]), "seed": seed}  # what widths depend on
            searches |= {"test": "held-out" if options.held_out else "CIFAR-10"}
            facts = searches | {"method": options.method, "epochs": epochs, "taught": not options.no_teacher}
            if options.lr is not None:
                facts["lr"] = options.lr
            if is_recorded(options.results, budget=options.budget, **facts):
                continue
            result = methods.prune(
                load_network(options.folder, options.network).to(device),
                Augmented(train, 128, seed),
                list(zip(*test, strict=True)),
                [options.budget],
                method=options.method,
                search=dmcp.SearchConfig(budget=options.budget, seed=seed),
                searched=methods.recorded_widths([options.budget], [RESULTS, options.results], **searches),
                train=dmcp.TrainConfig(epochs=epochs, lr=options.lr, seed=seed),
                teacher=None if options.no_teacher else "auto",
            )
            write_rows(options.results, result, budget=options.budget, save=options.save, **facts)


if __name__ == "__main__":
    main()
