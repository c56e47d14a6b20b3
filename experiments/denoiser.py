"""Does a teacher help a network whose outputs are numbers? A small denoiser at half its MACs.

python experiments/denoiser.py --seeds 4
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp

SIZE = 12
NOISE = 0.3
RATES: dict[str, Any] = {"reference_batch": None, "warmup_epochs": 0, "weight_decay": 0.0}
QUIET = dmcp.Runtime(progress=False)


class Denoiser(nn.Module):
    """Three convolutions that predict the noise."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        first = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        second = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*first, *second, nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.body(x)


class Pictures:
    """Noisy pictures of a few rectangles, each with its target: the clean picture, or one with other noise."""

    def __init__(self, count: int, seed: int, noisy_targets: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.noisy_targets = noisy_targets
        corners = torch.rand(count, 4, 4, 1, 1, generator=self.generator)
        shades = torch.rand(count, 4, 1, 1, generator=self.generator)
        line = torch.linspace(0, 1, SIZE)
        left, width, top, height = corners.unbind(dim=2)
        columns = (line > left) & (line < left + width / 2)
        rows = (line[:, None] > top) & (line[:, None] < top + height / 2)
        self.clean = ((columns & rows) * shades).amax(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.clean) // 16

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.clean), generator=self.generator)
        for clean in self.clean[order].split(16):
            target = self.with_noise(clean) if self.noisy_targets else clean
            yield self.with_noise(clean), target

    def with_noise(self, clean: Tensor) -> Tensor:
        return clean + NOISE * torch.randn(clean.shape, generator=self.generator)


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch[1])


def psnr(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    errors = (output - batch[1]).square().mean(dim=(1, 2, 3))
    return -10 * errors.log10().sum(), len(output)


def run(seed: int, noisy_targets: bool, test: list[Any]) -> dict[str, float]:
    """PSNR in dB on clean pictures; training and search are the same with and without distillation."""
    task = dmcp.Task(loss=loss, metric=psnr, optimizer=torch.optim.AdamW)
    torch.manual_seed(seed)
    original = Denoiser()
    first = dmcp.TrainConfig(epochs=20, lr=3e-3, warmup_lr=3e-3, seed=seed, **RATES)
    dmcp.train(original, Pictures(512, seed, noisy_targets), first, task=task, runtime=QUIET)
    found = {"original": dmcp.evaluate(original, test, psnr)}

    graph = dmcp.trace(original, torch.zeros(2, 1, SIZE, SIZE))
    small = dmcp.cut(original, graph, dmcp.uniform(graph, "50%"), by="l2")
    tune = dmcp.TrainConfig(epochs=6, lr=2e-3, warmup_lr=2e-3, seed=seed, **RATES)
    for images in (512, 128):
        for name, teacher in (("labels", None), ("teacher", original)):
            network = copy.deepcopy(small)
            dmcp.recalibrate(network, Pictures(images, seed, noisy_targets))
            batches = Pictures(images, seed, noisy_targets)
            dmcp.train(network, batches, tune, task=task, teacher=teacher, runtime=QUIET)
            found[f"fine-tuned with {images} pictures: {name}"] = dmcp.evaluate(network, test, psnr)

    for name, distill in (("labels", False), ("largest sub-network", True)):
        net = dmcp.Supernet(original, graph)
        start = {"warmup": 0, "sort": True, "lr": 2e-3, "reference_batch": 16, "weight_decay": 0.0}
        config = dmcp.SearchConfig(budget="50%", epochs=5, seed=seed, distill=distill, **start)
        searched = dmcp.search(net, Pictures(512, seed, noisy_targets), config, task=task, runtime=QUIET)
        network = dmcp.cut(net.model, graph, dmcp.expected(searched))
        dmcp.recalibrate(network, Pictures(512, seed, noisy_targets))
        found[f"searched, calibrated: {name}"] = dmcp.evaluate(network, test, psnr)
    return found


def show(rows: list[dict[str, float]]) -> Iterator[tuple[str, str, str]]:
    """Each network with its PSNR, and what it gains over the same network that learns from the labels."""
    for name in rows[0]:
        values = [row[name] for row in rows]
        gain = ""
        labels = f"{name.rpartition(': ')[0]}: labels"
        if labels in rows[0] and labels != name:
            gains = [row[name] - row[labels] for row in rows]
            gain = f"{statistics.mean(gains):+.2f} ± {statistics.stdev(gains):.2f}"
        yield name, f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}", gain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    seeds = range(parser.parse_args().seeds)
    test = list(Pictures(256, seed=10_000))
    clean = show([run(seed, False, test) for seed in seeds])
    noisy = show([run(seed, True, test) for seed in seeds])
    print("| | clean targets, dB | gain | noisy targets, dB | gain |\n|---|---|---|---|---|")
    for (name, *of_clean), (_, *of_noisy) in zip(clean, noisy, strict=True):
        print(f"| {' | '.join([name, *of_clean, *of_noisy])} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
