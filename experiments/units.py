"""Does the unit of a loss change what a search finds? Searches at half the MACs, their loss times a factor.

python experiments/units.py             # a small denoiser
python experiments/units.py --digits    # digits:resnet; the alphas alone see the factor
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from denoiser import QUIET, RATES, SIZE, Pictures, loss, psnr
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp import markov
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.models import build

TRAINED: dict[str, Any] = {  # what dmcp.prune chooses for a trained network
    "epochs": 4,
    "warmup": 0.0,
    "sort": True,
    "sampling": "mixed",
    "init": "front",
    "budget_weight": 1.0,
    "sharpen": 2.0,
    "optimizer": "adamw",
}
FRESH: dict[str, Any] = {"epochs": 8, "optimizer": "adamw"}


class Denoiser(nn.Module):
    """Two levels of resolution, joined by a sum: spaces whose channels cost and help differently."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
            conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

        self.first = nn.Sequential(block(1, width), block(width, width))
        self.deep = nn.Sequential(block(width, 2 * width, 2), block(2 * width, 2 * width), block(2 * width, width))
        self.last = nn.Sequential(block(width, width), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = F.interpolate(self.deep(fine), scale_factor=2)
        return x - self.last(fine + coarse)


@dataclass(frozen=True)
class Found:
    """What one search found."""

    ratio: float  # expected MACs over the target, in the last step
    spread: float  # standard deviation of the alphas
    widths: Tensor  # expected ones. (S,)
    score: float  # of the cut and calibrated network
    uniform: float  # of uniform widths in the same supernet


@functools.cache
def build_denoiser(seed: int, trained: bool) -> Denoiser:
    """A network that no search changes."""
    torch.manual_seed(seed)
    model = Denoiser()
    if trained:
        recipe = dmcp.TrainConfig(epochs=10, optimizer="adamw", lr=3e-3, seed=seed, **RATES)
        dmcp.train(model, Pictures(512, seed), recipe, task=dmcp.Task(loss=loss), runtime=QUIET)
    return model


def search_denoiser(seed: int, settings: dict[str, Any], factor: float) -> Found:
    """A search whose loss is the squared error times a factor; scores are PSNR in dB."""
    original = build_denoiser(seed, trained=settings is TRAINED)
    graph = dmcp.trace(original, torch.zeros(2, 1, SIZE, SIZE))

    def scaled(output: Tensor, batch: Any) -> Tensor:
        return factor * loss(output, batch)

    def score(widths: dmcp.Widths) -> float:
        small = dmcp.cut(net.model, graph, widths)
        dmcp.recalibrate(small, Pictures(512, seed))
        return dmcp.evaluate(small, Pictures(256, seed=10_000), psnr)

    net = dmcp.Supernet(original, graph, align=1)
    config = dmcp.SearchConfig(budget="50%", align=1, seed=seed, **settings)
    result = dmcp.search(net, Pictures(512, seed), config, task=dmcp.Task(loss=scaled), runtime=QUIET)
    return found_by(result, score(dmcp.expected(result)), score(dmcp.uniform(graph, "50%")))


def search_digits(seed: int, settings: dict[str, Any], factor: float) -> Found:
    """A search whose alphas see the cross-entropy times a factor; scores are the cut network's training loss."""
    data = load("digits").train
    torch.manual_seed(seed)
    model = build("digits:resnet")
    graph = dmcp.trace(model, torch.zeros(2, 1, 8, 8))
    net = dmcp.Supernet(model, graph)

    def cross_entropy(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.float(), batch[1], label_smoothing=0.1)

    def scaled(output: Tensor, batch: Any) -> Tensor:
        trains_weights = net.weights()[0].requires_grad
        return cross_entropy(output, batch) * (1.0 if trains_weights else factor)

    @torch.no_grad()
    def score(widths: dmcp.Widths) -> float:
        small = dmcp.cut(net.model, graph, widths)
        dmcp.recalibrate(small, batches)
        small.eval()
        return statistics.fmean(cross_entropy(small(x), (x, y)).item() for x, y in make_loader(data, 256, train=False))

    batches = make_loader(data, 64, train=True, seed=seed)
    config = dmcp.SearchConfig(budget="50%", seed=seed, **settings)
    result = dmcp.search(net, batches, config, task=dmcp.Task(loss=scaled, distill="classes"), runtime=QUIET)
    return found_by(result, score(dmcp.expected(result)), score(dmcp.uniform(graph, "50%")))


def found_by(result: dmcp.SearchResult, score: float, uniform: float) -> Found:
    widths = markov.moment(markov.marginals(result.alphas), result.sizes, 1)
    spread = result.alphas[result.alphas < markov.CERTAIN].std().item()
    return Found(max(result.log[-1].ratios or ()), spread, widths, score, uniform)


def mean_and_deviation(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--digits", action="store_true", help="a cross-entropy of ordinary size: factors of 1/4 to 4")
    options = parser.parse_args()
    searches: list[tuple[str, Any, dict[str, Any]]]
    if options.digits:
        searches = [("digits:resnet", search_digits, {"epochs": 8})]
        factors = (1.0, 0.25, 4.0)
    else:
        searches = [("trained", search_denoiser, TRAINED), ("fresh", search_denoiser, FRESH)]
        factors = (1.0, 0.001, 1000.0)

    print("| network | factor | E/T | alphas' spread | largest change of a width | cut | uniform |")
    print("|---|---|---|---|---|---|---|")
    for name, search, settings in searches:
        ordinary = [search(seed, settings, 1.0) for seed in range(options.seeds)]
        for factor in factors:
            rows = ordinary
            if factor != 1:
                rows = [search(seed, settings, factor) for seed in range(options.seeds)]
            changes = [
                (mine.widths - other.widths).abs().max().item() for mine, other in zip(rows, ordinary, strict=True)
            ]
            columns = [[row.ratio for row in rows], [row.spread for row in rows], changes]
            columns += [[row.score for row in rows], [row.uniform for row in rows]]
            print(f"| {name} | {factor:g} | {' | '.join(map(mean_and_deviation, columns))} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
