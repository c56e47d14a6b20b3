"""The log of a search: records of its steps, read from the device now and then; it stops a search that diverges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dmcp.errors import TrainingError
from dmcp.ranks import Ranks, mean_values
from dmcp.searching.searches import SearchRecord, as_record
from dmcp.searching.stages import ArchRecord, WeightRecord
from dmcp.supernet import Supernet

_MUCH = 10  # times the first losses of the weights, from where on they diverge


@dataclass(frozen=True)
class Step:
    """What one step saw, still on the device."""

    step: int
    epoch: int
    samples: int  # of this rank
    lr: float
    trained: WeightRecord | None
    alpha_lr: float
    moved: ArchRecord | None

    def plain(self, ranks: Ranks) -> SearchRecord:
        """The same as numbers, means over all ranks; waits for the device."""

        def mean(values: Tensor) -> list[float]:
            return mean_values(values.reshape(-1), self.samples, ranks).tolist()

        record = SearchRecord(self.step, self.epoch)
        if self.trained is not None:
            record = replace(record, lr=self.lr, weight_losses=tuple(mean(self.trained.losses)))
        if self.moved is not None:
            task = self.moved.task_loss
            record = replace(
                record,
                alpha_lr=self.alpha_lr,
                task_loss=None if task is None else mean(task)[0],
                budget_loss=self.moved.budget_loss.item(),
                ratios=tuple(self.moved.ratios.tolist()),
            )
        return record


class Log:
    """Records of the steps, read from the device now and then; where one is not finite the search stops."""

    def __init__(
        self, net: Supernet, every: int, on_record: Callable[[SearchRecord], None] | None, ranks: Ranks
    ) -> None:
        self.net = net
        self.ranks = ranks
        self.every = every
        self.on_record = on_record
        self.records: list[SearchRecord] = []
        self.waiting: list[Step] = []
        self.good = self._state()

    def _state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def begin(self, earlier: list[dict[str, Any]]) -> None:
        """Go on after these records, from the state that the supernet now has."""
        self.records = [as_record(record) for record in earlier]
        self.good = self._state()

    def add(self, step: Step) -> None:
        """Keep what a step saw."""
        self.waiting.append(step)
        if len(self.waiting) == self.every:
            self.flush()

    def flush(self) -> None:
        """Read what waits; if all of it is finite, remember this state of the supernet, otherwise go back and stop."""
        steps, self.waiting = [step.plain(self.ranks) for step in self.waiting], []
        for record in steps:
            self._check(record, steps, "stage 1, the weights", *(record.weight_losses or ()))
            self._check(record, steps, "stage 2, the alphas", record.task_loss or 0.0, record.budget_loss or 0.0)
        if steps and not torch.stack([tensor.isfinite().all() for tensor in self.net.parameters()]).all().item():
            what = f"Weights or alphas became infinite or NaN by step {steps[-1].step} (epoch {steps[-1].epoch})"
            self._stop(what, "", steps)
        self.records += steps
        self.good = self._state()
        for record in steps if self.on_record else ():
            assert self.on_record is not None
            self.on_record(record)

    def _check(self, record: SearchRecord, steps: list[SearchRecord], stage: str, *losses: float) -> None:
        for loss in losses:
            if not math.isfinite(loss):
                what = f"The loss is {loss} in {stage}, at step {record.step} (epoch {record.epoch})"
                self._stop(what, stage, [it for it in steps if it.step <= record.step])

    @torch.no_grad()
    def _stop(self, what: str, stage: str, steps: list[SearchRecord]) -> NoReturn:
        records = [*self.records, *steps]
        for name, tensor in self.net.state_dict().items():
            tensor.copy_(self.good[name])
        last = f"after step {self.records[-1].step}" if self.records else "before the first step"
        grown = _growth(records)
        if grown:
            what = f"The weights diverged: {grown}. {what}"
        raise TrainingError(
            f"{what}; the supernet is again as it was {last}, a model that was given to dmcp.prune is as it was given. "
            f"{_advice(stage, records, bool(grown))}, or look at the data."
        )


def _growth(records: list[SearchRecord]) -> str:
    """How far the losses of the weights have grown, if that is much."""
    finite = [(it.step, max(filter(math.isfinite, it.weight_losses or ()), default=None)) for it in records]
    found = [(step, loss) for step, loss in finite if loss is not None]
    (_, first), (step, last) = (found[0], max(found, key=lambda it: it[1])) if found else ((0, 0.0), (0, 0.0))
    return f"their loss grew from {first:.3g} to {last:.3g} by step {step}" if last > _MUCH * first else ""


def _advice(stage: str, records: list[SearchRecord], grown: bool) -> str:
    """Which learning rate to lower; the one of the weights is shown as the steps have it, scaled by their samples."""
    rates = [it.lr for it in records if it.lr is not None]
    if rates and (grown or stage.startswith("stage 1")):
        return f"Lower lr, the weights' learning rate ({rates[-1]:.3g} in this step; a trained model needs a small one)"
    return "Lower lr or alpha_lr" if rates else "Lower alpha_lr"
