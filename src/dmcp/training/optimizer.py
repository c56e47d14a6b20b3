"""The optimizer of a training, its parameter groups and its learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from dmcp.errors import TrainingError
from dmcp.settings import Optimizer, ResolvedTrainConfig
from dmcp.tracing.modules import modules_of

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # parameter groups -> optimizer

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


# optimizers


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as two groups: weights decay; norms, biases and other vectors do not.

    A parameter that several modules share is listed once.
    """
    of_norms: set[Tensor] = set()
    for module in modules_of(model):
        if isinstance(module, _NORMS):
            of_norms.update(module.parameters(recurse=False))

    decayed: list[Tensor] = []
    undecayed: list[Tensor] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or parameter in of_norms:
            undecayed.append(parameter)
        else:
            decayed.append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]


def sgd(groups: Any, lr: float, momentum: float, nesterov: bool, device: torch.device) -> torch.optim.SGD:
    """SGD that a CUDA graph can hold: on a GPU it is one fused kernel that reads its learning rate there.

    Its momentum starts at zero instead of the first gradient, which gives the same steps.
    """
    on_gpu = device.type == "cuda"
    rate: Any = lr
    if on_gpu:
        rate = torch.tensor(lr, device=device)
    optimizer = torch.optim.SGD(groups, rate, momentum, nesterov=nesterov, fused=on_gpu or None)
    if momentum:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def has_batch_norms(model: nn.Module) -> bool:
    """Whether at least half of the convolutions have a BatchNorm, so that the scale of most weights does not matter."""
    layers = list(modules_of(model))
    norms = sum(isinstance(layer, _BatchNorm) for layer in layers)
    convolutions = sum(isinstance(layer, _ConvNd) for layer in layers)
    return norms > 0 and 2 * norms >= convolutions


def make_optimizer(make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Call the user's function; TrainingError unless it returns an optimizer of exactly the groups' parameters."""
    optimizer: Any = None
    if callable(make):
        optimizer = make(groups)
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    if not is_optimizer or _parameters_of(optimizer.param_groups) != _parameters_of(groups):
        raise TrainingError(
            "The optimizer function must return a torch.optim.Optimizer with all the groups that it is given, "
            "as torch.optim.AdamW does."
        )
    return optimizer  # type: ignore[no-any-return]


def _parameters_of(groups: Sequence[dict[str, Any]]) -> set[Tensor]:
    return {parameter for group in groups for parameter in group["params"]}


# learning rates


def cosine(step: int, total: int, start: float, end: float, warmup: float = 0, warmup_start: float = 0.0) -> float:
    """Learning rate of a step: a line from `warmup_start` to `start` over `warmup` steps, then a cosine to `end`."""
    if step < warmup:
        return warmup_start + (start - warmup_start) * step / warmup
    share = (step - warmup) / max(total - warmup, 1)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def learning_rate(step: int, steps: int, batch_size: int, config: ResolvedTrainConfig) -> float:
    """Learning rate of a training step: warm-up and cosine, scaled by the size of the batch."""
    scale = 1.0
    if config.reference_batch and config.optimizer is Optimizer.SGD:
        scale = batch_size / config.reference_batch
    warmup = config.warmup_epochs * steps / config.epochs
    return scale * cosine(step, steps, config.lr, config.min_lr, warmup, config.warmup_lr)


def rate_shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates of a new optimizer's groups, relative to that of the schedule.

    The optimizer's default stands for the schedule's. If no group has it, the highest rate does, so that no group is
    faster than the settings say.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    default = optimizer.defaults.get("lr")
    base = max(rates)
    if default and default in rates:
        base = float(default)
    if base == 0:
        return [1.0] * len(rates)
    return [rate / base for rate in rates]


def set_lr(optimizer: torch.optim.Optimizer, lr: float, shares: Sequence[float] = ()) -> None:
    """Set the learning rate of the next step; with `shares`, each group gets its share of it."""
    groups = optimizer.param_groups
    for group, share in zip(groups, shares or [1.0] * len(groups), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * share)  # a CUDA graph reads this tensor
        else:
            group["lr"] = lr * share
