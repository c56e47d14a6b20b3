"""Judging sub-networks by the same batches: the batches, BatchNorms that fit any width, and the losses."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dmcp.batches import input_of, on_device, size_of
from dmcp.calibration import kept_modes
from dmcp.engine import Settled
from dmcp.errors import DataError
from dmcp.losses import Loss
from dmcp.ranks import current, mean_values
from dmcp.supernet import Supernet

Judge = Callable[[Tensor, Sequence[Any]], Tensor]  # losses of structures on some batches. (C, S) -> (C,)


def judging_batches(batches: Iterable[Any], most: int | None, settled: Settled) -> list[Any]:
    """Batches on the device, up to so many; one sample alone has no batch statistics."""
    found: list[Any] = []
    for batch in itertools.islice(batches, most):
        if size_of(batch) > 1:
            found.append(settled.laid_out(on_device(batch, settled.device)))
    if not found:
        raise DataError("There is nothing to judge structures by: give batches of two samples or more.")
    return found


@contextlib.contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Eval mode, but for batch norms, which use the statistics of the batch and leave the learned ones alone.

    The learned ones fit the unpruned network, or mix all widths.
    """
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    before = [norm.track_running_stats for norm in norms]
    with kept_modes(model):
        model.eval()
        for norm in norms:
            norm.training, norm.track_running_stats = True, False
        try:
            yield
        finally:
            for norm, tracked in zip(norms, before, strict=True):
                norm.track_running_stats = tracked


def make_judge(net: Supernet, task: Loss, settled: Settled) -> Judge:
    """What gives the losses of sub-networks, the means over the samples of all ranks; it waits for the device once.

    The gates are an input of the step, so one CUDA graph serves all structures.
    """

    def loss(batch: Any, gates: Tensor) -> Tensor:
        with settled.autocast():
            return task(net(input_of(batch), gates), batch).float()

    run = settled.repeated(loss)

    @torch.no_grad()
    def judge(widths: Tensor, batches: Sequence[Any]) -> Tensor:
        sizes = torch.tensor([float(size_of(batch)) for batch in batches])
        weights = (sizes / sizes.sum()).to(settled.device)
        rows: list[Tensor] = []
        for row in widths.to(settled.device):  # nothing waits for the device until all structures are queued
            gates = net.hard(row)
            rows.append(torch.stack([run(batch, gates) for batch in batches]) @ weights)
        return mean_values(torch.stack(rows), int(sizes.sum()), current()).cpu().double()

    return judge
