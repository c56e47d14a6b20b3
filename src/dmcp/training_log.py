"""The log of a training: records of its steps, read from the device now and then; it stops at what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import widest
from dmcp.errors import TrainingError
from dmcp.ranks import Ranks, mean_values

_WINDOW = 100  # steps between two looks at the losses: each look waits for the GPU


@dataclass(frozen=True)
class StepRecord:
    """What one training step saw."""

    epoch: int  # from 0
    step: int  # from 0, over all epochs
    steps: int  # in all
    lr: float
    loss: float


class Log:
    """Losses that wait on the device, and the last state in which everything was finite."""

    def __init__(self, model: nn.Module, on_step: Callable[[StepRecord], None] | None, ranks: Ranks) -> None:
        self.ranks = ranks
        self.model = model
        self.weights = list(model.parameters())
        self.on_step = on_step
        self.records: list[StepRecord] = []
        self.waiting: list[tuple[Tensor, int, dict[str, Any]]] = []
        self._keep()

    def begin(self, earlier: list[StepRecord]) -> None:
        """Go on after these records, from the state that the model now has."""
        self.records = earlier
        self._keep()

    def add(self, loss: Tensor, samples: int, **facts: Any) -> None:
        """Remember a step; look at the losses once in a while."""
        self.waiting.append((loss, samples, facts))
        if len(self.waiting) == _WINDOW:
            self.look()

    def look(self) -> None:
        """Read the waiting losses: the only place of the loop that waits for the device."""
        if not self.waiting:
            return
        finite = torch.stack([weight.detach().isfinite().all() for weight in self.weights]).all()
        wide = widest(self.waiting[0][0].device)
        losses = torch.stack([loss.to(wide) for loss, _, _ in self.waiting])
        samples = losses.new_tensor([samples for _, samples, _ in self.waiting])
        read = torch.cat([mean_values(losses, samples, self.ranks), finite.to(losses).reshape(1)]).tolist()
        for (_, _, facts), value in zip(self.waiting, read[:-1], strict=True):
            if not math.isfinite(value):
                self._stop(f"the loss is {value}", facts)
        if not read[-1]:
            self._stop("a weight is no longer finite", self.waiting[-1][2])
        for (_, _, facts), value in zip(self.waiting, read[:-1], strict=True):
            self.records.append(StepRecord(loss=value, **facts))
            if self.on_step:
                self.on_step(self.records[-1])
        self.waiting.clear()
        self._keep()

    @torch.no_grad()
    def _keep(self) -> None:
        self.good = [tensor.detach().clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        """Looked up each time: a forward may have put another tensor in the place of a buffer."""
        return [*self.model.parameters(), *self.model.buffers()]

    @torch.no_grad()
    def _stop(self, what: str, facts: dict[str, Any]) -> None:
        for tensor, good in zip(self._tensors(), self.good, strict=True):
            tensor.copy_(good)
        raise TrainingError(
            f"Training stopped at step {facts['step']} (epoch {facts['epoch']}, lr {facts['lr']:.4g}): {what}. The "
            f"model is back where it was before step {self.waiting[0][2]['step']}; a smaller lr often helps."
        )
