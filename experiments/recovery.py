"""The paper's recoverability experiment: a trained, frozen net must win its channels back.

The alphas start at random numbers and see the task loss alone, no budget. A sound search then keeps nearly everything.
BatchNorm runs in train mode throughout: statistics of the batch, both where the alphas learn and where accuracy is
measured, since running statistics are those of the ungated net. With labels that are all wrong the MACs must not come
back: it is the task that wants them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.batches import Loader
from dmcp.errors import TrainingError
from dmcp.losses import top1
from dmcp.runtime.engine import Engine
from dmcp.searching.config import Init, SearchConfig
from dmcp.searching.search import search
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Settings of the experiment."""

    epochs: int = 10  # passes over the data
    alpha_lr: float = 5.0  # of the alphas; ten times that of a search: see docs/paper_map.md
    mean: float = 0.0  # of the random alphas; their deviation is 1
    wrong_labels: bool = False  # whether every label is the next class instead
    groups: int = 10  # groups that each space is divided into
    seed: int = 0  # of the random alphas

    def __post_init__(self) -> None:
        if not math.isfinite(self.mean):
            raise TrainingError(f"mean must be a number, not {self.mean}.")
        if not self.alpha_lr > 0:
            raise TrainingError(f"alpha_lr must be above 0, not {self.alpha_lr}: at 0 no alpha moves.")


@dataclass(frozen=True)
class Recovery:
    """What happened to a frozen net whose alphas followed the task loss."""

    macs_shares: list[float]  # expected MACs over the unpruned ones, before each step
    accuracies: list[float]  # of the soft network on each step's batch
    trained: float  # accuracy of the ungated net on all training images
    recovered: float  # the same of the soft network at the end
    ignore: bool  # whether every weight and buffer is bit for bit what it was


def recover(
    model: nn.Module,
    graph: ChannelGraph,
    loader: Loader,
    images: Loader,
    config: RecoveryConfig,
    engine: Engine | None = None,
    look: Callable[[], None] | None = None,
) -> Recovery:
    """Freeze a trained net, and let random alphas follow the loss of the true or wrong labels. It is not changed.

    images: all training images as they are, by which accuracy is measured. look: called in every step; it may raise.
    """
    net = Supernet(model, graph, config.groups)
    draw = torch.Generator().manual_seed(config.seed)  # on the CPU: the same on every device
    with torch.no_grad():
        net.alpha.copy_(torch.randn(net.alpha.shape, generator=draw) + config.mean)
    before = copy.deepcopy(net.model.state_dict())
    shares: list[float] = []
    correct: list[Tensor] = []

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if look:
            look()
        right, count = top1(output, batch)
        correct.append(right / count)
        return F.cross_entropy(output, (batch[1] + config.wrong_labels) % output.shape[1])

    settings = SearchConfig(
        budget=1.0,  # all MACs: expected cost over budget is the share that is kept
        budget_weight=0.0,
        train_weights=False,
        warmup=0.0,
        init=Init.GIVEN,
        alpha_lr=config.alpha_lr,
        alpha_min_lr=config.alpha_lr,
        epochs=config.epochs,
        groups=config.groups,
        seed=config.seed,
    )
    engine = replace(engine or Engine(), graphs=False)  # in a replayed step nothing would be appended
    search(net, loader, settings, loss, on_record=lambda record: shares.extend(record.ratios or ()), engine=engine)
    return Recovery(
        shares,
        torch.stack(correct).tolist(),
        accuracy(net, net.hard(graph.full), images),
        accuracy(net, net.soft(), images),
        all(torch.equal(tensor, before[name]) for name, tensor in net.model.state_dict().items()),
    )


@torch.no_grad()
def accuracy(net: Supernet, gates: Tensor, loader: Loader) -> float:
    """Share of right answers with these gates, BatchNorm in train mode; the net keeps its running statistics."""
    twin = copy.deepcopy(net).train()
    counted = [top1(twin(batch[0], gates), batch) for batch in loader]
    return sum(int(right) for right, _ in counted) / sum(count for _, count in counted)
