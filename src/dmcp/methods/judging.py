"""What methods share that judge sub-networks by held-out batches: the batches, and BatchNorms that fit any width."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dmcp.batches import on_device, size_of
from dmcp.calibration import kept_modes
from dmcp.engine import Settled
from dmcp.errors import DataError
from dmcp.methods.problem import Problem


def held_batches(problem: Problem, most: int | None, settled: Settled) -> list[Any]:
    """Held-out batches on the device, up to so many; one sample alone has no batch statistics."""
    found: list[Any] = []
    for batch in itertools.islice(problem.held, most):
        if size_of(batch) > 1:
            found.append(settled.laid_out(on_device(batch, settled.device)))
    if not found:
        raise DataError("There is nothing to judge structures by: give held-out batches of two samples or more.")
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
