"""Experiments about alphas alone: what they win back (figure 4), and what is drawn from them (figures 6 and 7)."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp import markov

STRUCTURES = 3000  # drawn from each search, as in the paper
DIP = 0.05  # smaller dips between two peaks of a width may be noise


def recover(
    model: nn.Module, graph: dmcp.ChannelGraph, loader: Any, images: Any, seed: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Freeze a trained net and let random alphas follow the task loss alone.

    images: all training images without augmentation, by which accuracy is measured. settings: epochs, alpha_lr, mean
    (of the random alphas; their deviation is 1), wrong_labels (every label is the next class instead).
    BatchNorm stays in train mode: running statistics are those of the net without gates.
    """
    net = dmcp.Supernet(model, graph, align=1)
    with torch.no_grad():
        net.alpha.copy_(torch.randn(net.alpha.shape, generator=torch.Generator().manual_seed(seed)) + settings["mean"])
    before = copy.deepcopy(net.model.state_dict())
    correct: list[Tensor] = []

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        correct.append((output.argmax(dim=1) == batch[1]).double().mean())
        return F.cross_entropy(output, (batch[1] + settings.get("wrong_labels", False)) % output.shape[1])

    config = dmcp.SearchConfig(
        budget=1.0,  # all MACs: expected cost over budget is the share that is kept
        budget_weight=0.0,
        train_weights=False,
        warmup=0.0,
        align=1,
        init="given",
        alpha_lr=settings["alpha_lr"],
        alpha_min_lr=settings["alpha_lr"],
        epochs=settings["epochs"],
        seed=seed,
    )
    engine = dmcp.Engine(graphs=False)  # in a replayed step nothing would be appended
    found = dmcp.search(net, loader, config, task=dmcp.Task(loss=loss), runtime=dmcp.Runtime(engine=engine))
    shares = [share for record in found.log for share in record.ratios or ()]
    seen = torch.stack(correct).tolist()
    return {
        "first_macs": shares[0],
        "last_macs": shares[-1],
        "first_accuracy": seen[0],
        "recovered": _accuracy(net, net.soft(), images),
        "trained": _accuracy(net, net.hard(graph.full), images),
        "ignore": all(torch.equal(tensor, before[name]) for name, tensor in net.model.state_dict().items()),
        "macs_shares": shares,
        "accuracies": seen,
    }


@torch.no_grad()
def _accuracy(net: dmcp.Supernet, gates: Tensor, loader: Any) -> float:
    twin = copy.deepcopy(net).train()
    right = [twin(images, gates).argmax(dim=1) == labels for images, labels in loader]
    return torch.cat(right).double().mean().item()


def drawn(found: dmcp.SearchResult, seed: int) -> dict[str, float]:
    """MACs of structures drawn from a search, and the share of spaces whose width has one peak, by the chain."""
    random = torch.Generator().manual_seed(seed)
    widths = markov.sample_groups(found.alphas, found.sizes, STRUCTURES, random).cpu()
    macs = found.graph.macs(widths).double()
    chances = chances_of_widths(markov.marginals(found.alphas.double()), found.sizes)
    return {
        "mean": (macs / found.graph.macs()).mean().item(),
        "deviation": (macs / found.graph.macs()).std().item(),
        "inside": (macs <= found.budget.limits[0].target).double().mean().item(),
        "one_peak": statistics.fmean(count_peaks(own) == 1 for own in chances),
        "one_peak_filled": statistics.fmean(count_peaks(own, DIP) == 1 for own in chances),
    }


def chances_of_widths(marginals: Tensor, sizes: Tensor) -> list[list[float]]:
    """Chance of each width that a space can have, the smallest first. (S, G), (S, G)"""
    found = []
    for row, own in zip(marginals.tolist(), sizes.tolist(), strict=True):
        at_least = [chance for chance, size in zip(row, own, strict=True) if size]
        found.append([one - more for one, more in zip(at_least, [*at_least[1:], 0.0], strict=True)])
    return found


def count_peaks(chances: Sequence[float], dip: float = 0.0) -> int:
    """Local maxima, a plateau counted once; dips of at most `dip` between two of them are filled."""
    peaks, rising, last = 0, True, 0.0  # last: the highest since the last dip, or the lowest since the last peak
    for chance in [*chances, -1.0]:
        if rising and chance < last - dip:
            peaks, rising, last = peaks + 1, False, chance
        elif not rising and chance > last + dip:
            rising, last = True, chance
        else:
            last = max(last, chance) if rising else min(last, chance)
    return peaks
