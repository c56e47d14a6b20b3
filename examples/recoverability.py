"""The paper's recoverability experiment in small: a trained, frozen net must win its channels back.

A net is trained on the digits and frozen; the alphas start at random numbers and see the task loss alone, no budget. A
sound search then keeps nearly everything. BatchNorm runs in train mode throughout: statistics of the batch, both where
the alphas learn and where accuracy is measured, since running statistics are those of the ungated net. The alphas move
ten times faster than in a search: the digits are so easy that with half of the MACs there is little loss left to learn
from. With labels that are all wrong, at the same rate, the MACs do not come back: it is the task that wants them.

    python examples/recoverability.py docs/figures/recoverability.svg
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import dmcp
from dmcp import figures
from dmcp.data import load, make_loader
from dmcp.nets import build
from dmcp.searching import Init, SearchConfig, search
from dmcp.training import TrainConfig, top1, train


@dataclass(frozen=True)
class Recovery:
    """What happened to a frozen net whose alphas followed the task loss."""

    macs_shares: list[float]  # expected MACs over the unpruned ones, before each step
    accuracies: list[float]  # of the soft network on each step's batch
    trained: float  # accuracy of the ungated net on all training images
    recovered: float  # the same of the soft network at the end
    frozen: bool  # whether every weight and buffer is bit for bit what it was


def recover(
    train_epochs: int = 20, epochs: int = 45, alpha_lr: float = 5.0, wrong_labels: bool = False, seed: int = 0
) -> Recovery:
    """Train a small net on the digits, freeze it, and let random alphas follow the loss of the true or wrong labels."""
    torch.manual_seed(seed)
    images = load("digits").train
    loader = make_loader(images, 128, train=True, seed=seed)
    model = build("digits:resnet")
    recipe = TrainConfig(epochs=train_epochs, lr=0.1, warmup_lr=0.02, reference_batch=None, label_smoothing=0.0)
    train(model, loader, recipe)

    graph = dmcp.trace(model, torch.zeros(2, *images.shape))
    net = dmcp.Supernet(model, graph)
    before = copy.deepcopy(net.model.state_dict())
    shares: list[float] = []
    correct: list[Tensor] = []

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        right, count = top1(output, batch)
        correct.append(right / count)
        return F.cross_entropy(output, (batch[1] + wrong_labels) % images.classes)

    config = SearchConfig(
        budget=1.0,  # all MACs: expected cost over budget is the share that is kept
        budget_weight=0.0,
        train_weights=False,
        warmup=0.0,
        init=Init.RANDOM,
        alpha_lr=alpha_lr,
        alpha_min_lr=alpha_lr,
        epochs=epochs,
        seed=seed,
    )
    search(net, loader, config, loss, on_record=lambda record: shares.extend(record.ratios or ()))
    return Recovery(
        shares,
        torch.stack(correct).tolist(),
        accuracy(net, net.hard(graph.full), make_loader(images, 128, train=False)),
        accuracy(net, net.soft(), make_loader(images, 128, train=False)),
        all(torch.equal(tensor, before[name]) for name, tensor in net.model.state_dict().items()),
    )


@torch.no_grad()
def accuracy(net: dmcp.Supernet, gates: Tensor, loader: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Share of right answers with these gates, BatchNorm in train mode; the net keeps its running statistics."""
    twin = copy.deepcopy(net).train()
    counted = [top1(twin(batch[0], gates), batch) for batch in loader]
    return sum(int(right) for right, _ in counted) / sum(count for _, count in counted)


def main(path: Path) -> None:
    found, control, slow = recover(), recover(wrong_labels=True), recover(alpha_lr=0.5)
    first, last = found.macs_shares[0], found.macs_shares[-1]
    print(
        f"expected MACs, share of the unpruned: {first:.1%} at first, {last:.1%} after {len(found.macs_shares)} steps"
    )
    print(
        f"the same with wrong labels: {control.macs_shares[0]:.1%} at first, {control.macs_shares[-1]:.1%} at the end"
    )
    print(f"the same at the rate of a search: {slow.macs_shares[-1]:.1%} at the end, accuracy {slow.recovered:.1%}")
    print(f"training accuracy: {found.accuracies[0]:.1%} at first, {found.recovered:.1%} at the end")
    print(f"of the trained net, ungated: {found.trained:.1%}; weights and buffers unchanged: {found.frozen}")
    drawn = figures.recoverability(found.macs_shares, found.accuracies, found.trained, control.macs_shares)
    figures.save(drawn, path)
    print(f"figure: {path}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "recoverability.svg"))
