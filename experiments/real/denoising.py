"""Prune DnCNN-S-25, a denoiser that somebody else trained, and measure what it costs: PSNR on Set12 and BSD68.

    git clone https://github.com/SaoYan/DnCNN-PyTorch       # network, weights and images (GPL-3)
    python -m experiments.real.denoising DnCNN-PyTorch --budget 70% --budget 50% --epochs 20

A line of JSON is printed and recorded for each row of docs/results.md: before, right after the cut, after fine-tuning.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import dmcp
from experiments.real import methods
from experiments.real.rows import RESULTS, is_recorded, write_rows

NOISE = 25 / 255
PATCH = 50
Batch = tuple[Tensor, Tensor]  # noisy images, and the noise in them, which the network predicts


def read_images(folder: Path, device: str) -> list[Tensor]:
    """Grey images in [0, 1], each (1, H, W)."""
    images = []
    for path in sorted(folder.glob("*.png")):
        pixels = np.asarray(Image.open(path).convert("L"), dtype=np.float32) / 255
        images.append(torch.from_numpy(pixels)[None].to(device))
    return images


class Patches:
    """Batches of random patches, turned and mirrored, with new noise: functions of seed and epoch."""

    def __init__(self, images: list[Tensor], batch: int, steps: int, seed: int) -> None:
        self.images, self.batch, self.steps, self.seed, self.epoch = torch.stack(images), batch, steps, seed, 0

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        device = self.images.device
        random = torch.Generator(device).manual_seed(1000 * self.seed + self.epoch)
        room = self.images.shape[-1] - PATCH + 1
        inside = torch.arange(PATCH, device=device)
        for _ in range(self.steps):
            number = torch.randint(len(self.images), (self.batch, 1, 1), generator=random, device=device)
            corner = torch.randint(room, (2, self.batch, 1), generator=random, device=device)
            rows, columns = corner[0] + inside, corner[1] + inside
            clean = self.images[number, 0, rows[:, :, None], columns[:, None, :]][:, None]
            turns, mirror = torch.randint(4, (2,), generator=random, device=device).tolist()
            clean = clean.rot90(turns, (2, 3))
            clean = clean.flip(3) if mirror % 2 else clean
            noise = NOISE * torch.randn(clean.shape, generator=random, device=device)
            yield clean + noise, noise


def add_noise(images: list[Tensor]) -> list[Batch]:
    """One batch for each image, always with the same noise."""
    batches = []
    for number, image in enumerate(images):
        random = torch.Generator().manual_seed(number)
        noise = NOISE * torch.randn(image.shape, generator=random).to(image.device)
        batches.append(((image + noise)[None], noise[None]))
    return batches


def squared_error(output: Tensor, batch: Batch) -> Tensor:
    """Half the squared error of an image, summed over its pixels: the loss that the network was trained with."""
    return F.mse_loss(output, batch[1], reduction="sum") / (2 * len(output))


def psnr(output: Tensor, batch: Batch) -> tuple[float, int]:
    """PSNR of one denoised image, in dB."""
    noisy, noise = batch
    denoised = (noisy - output.float()).clamp(0, 1)
    return float(-10 * (denoised - (noisy - noise)).square().mean().log10()), 1


def load_network(folder: Path) -> torch.nn.Module:
    """The network with its weights."""
    sys.path.insert(0, str(folder))
    from models import DnCNN  # type: ignore[import-not-found]

    model = torch.nn.DataParallel(DnCNN(channels=1))  # as the weights were saved
    weights = torch.load(folder / "logs/DnCNN-S-25/net.pth", map_location="cpu", weights_only=True)
    model.load_state_dict(weights)
    return model.module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="a clone of DnCNN-PyTorch")
    parser.add_argument("--budget", action="append", required=True)
    parser.add_argument("--method", default="dmcp", help="of dmcp.prune or methods.py")
    parser.add_argument("--epochs", type=int, default=20, help="of --steps batches with 128 patches")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--images", type=int, default=400, help="for a rehearsal: so many of each set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher", action="store_true", help="learn from the unpruned network, too")
    parser.add_argument("--lr", type=float, help="of AdamW; default: what prune chooses")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--save", type=Path, help="folder that the pruned networks are saved in")
    options = parser.parse_args()

    methods.check_installed(options.method)
    searches = {"network": "DnCNN-S-25", "test": "Set12", "seed": options.seed}  # what searched widths depend on
    facts = searches | {"method": options.method, "epochs": options.epochs, "taught": options.teacher}
    facts |= {} if options.lr is None else {"lr": options.lr}
    budgets = [budget for budget in options.budget if not is_recorded(options.results, budget=budget, **facts)]
    if not budgets:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_network(options.folder).to(device)
    data = options.folder / "data"
    images = read_images(data / "train", device)[: options.images]
    loader = Patches(images, options.batch, options.steps, options.seed)
    set12 = add_noise(read_images(data / "Set12", device)[: options.images])
    bsd68 = add_noise(read_images(data / "Set68", device)[: options.images])

    optimizer = None if options.lr is None else "adamw"
    train = dmcp.TrainConfig(epochs=options.epochs, optimizer=optimizer, lr=options.lr, seed=options.seed)
    result = methods.prune(
        model,
        loader,
        set12,
        budgets,
        method=options.method,
        search=dmcp.SearchConfig(budget="50%", seed=options.seed),
        searched=methods.recorded_widths(budgets, [RESULTS, options.results], **searches),
        train=train,
        teacher=model if options.teacher else None,
        task=dmcp.Task(loss=squared_error, metric=psnr),
    )
    networks = {"original": model} | {budget: each.model for budget, each in result.by_budget.items()}
    scores = {name: {"bsd68": dmcp.evaluate(network, bsd68, psnr)} for name, network in networks.items()}
    write_rows(options.results, result, scores, budget=budgets[0], save=options.save, **facts)


if __name__ == "__main__":
    main()
