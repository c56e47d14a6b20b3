"""The paper's recoverability experiment in small: a trained, frozen net must win its channels back.

A net is trained on the digits and frozen; `dmcp.comparison.recovery` says what is then done. The alphas move ten times
faster than in a search: the digits are so easy that with half of the MACs there is little loss left to learn from. With
labels that are all wrong, at the same rate, the MACs do not come back: it is the task that wants them.

    python examples/recoverability.py docs/figures/recoverability.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import dmcp
from dmcp import figures
from dmcp.comparison import recovery
from dmcp.comparison.recovery import Recovery, RecoveryConfig
from dmcp.data import load, make_loader
from dmcp.nets import build
from dmcp.paper.figures import recoveries
from dmcp.training import TrainConfig, train


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
    config = RecoveryConfig(epochs=epochs, alpha_lr=alpha_lr, wrong_labels=wrong_labels, seed=seed)
    return recovery.recover(model, graph, loader, make_loader(images, 128, train=False), config)


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
    arms = {
        "alphas at ten times the rate of a search": found,
        "the same, wrong labels": control,
        "alphas at the rate of a search": slow,
    }
    told = "digits:resnet, digits: weights frozen, random alphas, task loss only, one seed"
    figures.save(recoveries({label: [vars(one)] for label, one in arms.items()}, told), path)
    print(f"figure: {path}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "recoverability.svg"))
