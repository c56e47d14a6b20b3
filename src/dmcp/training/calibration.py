"""Exact BatchNorm statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dmcp.arguments import checked
from dmcp.errors import DataError
from dmcp.runtime.batches import device_of, input_of, on_device, size_of, widest
from dmcp.runtime.distributed import World, current, sum_values
from dmcp.tracing.modules import call_model, kept_modes, modules_of, without_autocast

Forward = Callable[[Any], Any]  # runs the network on one input


@checked
@without_autocast
def recalibrate(model: nn.Module, loader: Iterable[Any], forward: Forward | None = None) -> None:
    """Set the running statistics of every BatchNorm to those of all batches together.

    Mean and variance are those of all samples together, however they were batched. Only the BatchNorms run in train
    mode, so dropout stays off; frozen BatchNorms are recalibrated, too. To calibrate a sub-network of a supernet, pass
    net.model as the model and `lambda x: net(x, gates)` as `forward`. Norms that do not run keep their statistics;
    after an error, all norms do. BatchNorm classes of your own must use `self.momentum`.

    Shuffle the samples: during calibration each BatchNorm normalizes by the statistics of its batch, so if every batch
    held a single class, the later norms would see other inputs than they will in use.
    """
    run = forward or partial(call_model, model)
    device = device_of(model)
    norms = []
    for module in modules_of(model):
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            norms.append(module)
    pooled = {norm: _Pooled(norm) for norm in norms}

    with kept_modes(model), contextlib.ExitStack() as undo, torch.no_grad():
        model.eval()
        for norm, statistics in pooled.items():
            undo.callback(statistics.write)
            undo.callback(setattr, norm, "momentum", norm.momentum)
            undo.callback(norm.register_forward_hook(statistics.add).remove)
            norm.training = True  # not by train(), which people override in norms that are to stay in eval mode
            norm.momentum = 1.0  # the running statistics are then those of the current call
            statistics.begin()

        batch = None
        for batch in loader:
            if size_of(batch):  # some ranks have no part of a small last batch
                run(on_device(input_of(batch), device))
        if batch is None:
            raise DataError("Calibration needs at least one batch, but the loader gave none.")

        for statistics in pooled.values():
            statistics.accept(current())


class _Pooled:
    """Mean and variance of one BatchNorm's input over all calls, merged pairwise (Chan, Golub and LeVeque, 1979)."""

    def __init__(self, norm: _BatchNorm) -> None:
        self.norm = norm
        self.result = [tensor.clone() for tensor in self._running()]  # what `write` puts back; at first the old values
        self.count = 0  # numbers per channel
        self.calls = 0
        self.mean = torch.zeros_like(self.result[0], dtype=widest(self.result[0].device))
        self.squares = torch.zeros_like(self.mean)  # summed squared distances from the mean

    def _running(self) -> list[Tensor]:
        tensors = (self.norm.running_mean, self.norm.running_var, self.norm.num_batches_tracked)
        return [tensor for tensor in tensors if tensor is not None]

    def begin(self) -> None:
        """Prepare the module's statistics for the first call.

        The old values stay for a forward pass that reads them, except for NaN, since 0 x NaN is NaN; the calls count
        from 0.
        """
        mean, var, *counter = self._running()
        self._put([mean.nan_to_num(), var.nan_to_num(), *map(torch.zeros_like, counter)])

    def add(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        """Forward hook: the running statistics are now those of this call's input."""
        mean, var = (tensor.to(self.mean) for tensor in self._running()[:2])
        count = inputs[0].numel() // inputs[0].shape[1]
        total = self.count + count
        gap = mean - self.mean
        self.mean += gap * (count / total)
        self.squares += var * (count - 1) + gap.square() * (self.count * count / total)
        self.count = total
        self.calls += 1

    def accept(self, world: World) -> None:
        """Make the pooled statistics of all ranks the result, if the norm ran."""
        if world.size > 1:
            count = self.mean.new_tensor(float(self.count))
            total = sum_values(count, world)
            mean = sum_values(self.mean * count, world) / total
            self.squares = sum_values(self.squares + count * (self.mean - mean).square(), world)
            self.mean = mean
            self.count = int(total)
        if self.count:
            values = [self.mean, self.squares / max(self.count - 1, 1), torch.tensor(self.calls)]
            self.result = [value.to(old) for value, old in zip(values, self.result, strict=False)]

    def write(self) -> None:
        """Put the result into the module."""
        self._put(self.result)

    def _put(self, values: Iterable[Tensor]) -> None:
        for tensor, value in zip(self._running(), values, strict=True):
            tensor.copy_(value)
