"""Own kernels for convolutions of few channels and for BatchNorm, in the place of torch's while `Narrow` is entered.

Torch's are made for wide layers: at 16 channels they compute mostly zeros, and BatchNorm reads its images more often
than it must. These need Triton and a GPU that computes in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dmcp.kernels.convolution import INTERPRET, conv2d
from dmcp.kernels.convolution import MOST_CHANNELS as MOST_IN_CONV
from dmcp.kernels.norm import MOST_CHANNELS as MOST_IN_NORM
from dmcp.kernels.norm import batch_norm

__all__ = ["Narrow", "batch_norm", "conv2d", "tried"]

Conv = tuple[Tensor, Tensor, Tensor | None, int, int]  # what conv2d takes
Norm = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, float, float]  # what batch_norm takes


class Narrow(TorchFunctionMode):
    """While entered, convolutions and BatchNorms that fit run in our kernels; everything else runs as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions."""
        kwargs = kwargs or {}
        if func is torch.conv2d:
            conv = _conv_arguments(*args, **kwargs)
            if conv is not None:
                return conv2d(*conv)
        elif func is F.batch_norm or func is torch.batch_norm:
            norm = (_norm_arguments if func is F.batch_norm else _raw_norm_arguments)(*args, **kwargs)
            if norm is not None:
                return batch_norm(*norm)
        return func(*args, **kwargs)


def tried(device: torch.device) -> None:
    """Run a few numbers through: an error says that the kernels cannot be used there."""
    x = torch.ones(1, 2, 2, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.ones(2, 2, 1, 1, device=device, requires_grad=True)
    out = batch_norm(conv2d(x, weight, None, 1, 0), None, None, None, None, 0.1, 1e-5)
    torch.autograd.grad(out.sum(), (x, weight))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _within_reach(x: Any) -> bool:
    """Whether these are images where the kernels run."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.numel() > 0 and (x.is_cuda or INTERPRET)


def _halves(x: Tensor) -> bool:
    """Whether a convolution of x computes in bfloat16."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
    return x.dtype is torch.bfloat16 or (cast and x.dtype is torch.float32)


def _single(value: Any) -> int:
    """The number of (n, n) or n; -1 where there is no such one."""
    if isinstance(value, str):
        return -1
    values = {value} if isinstance(value, int) else set(value)
    return int(values.pop()) if len(values) == 1 else -1


def _conv_arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Conv | None:
    """What conv2d takes, or None where it cannot."""
    if not _within_reach(input) or not _halves(input) or weight.dtype is not torch.float32 or weight.ndim != 4:
        return None
    step, edge, shape = _single(stride), _single(padding), weight.shape
    if step not in (1, 2) or (shape[2], shape[3], edge) not in ((3, 3, 1), (1, 1, 0)):
        return None
    if _single(dilation) != 1 or groups != 1 or shape[1] != input.shape[1]:
        return None
    if max(shape[:2]) > MOST_IN_CONV or (bias is not None and bias.dtype is not torch.float32):
        return None
    if max(input.numel(), input.numel() // shape[1] * shape[0]) >= 2**31:  # places are 32-bit numbers
        return None
    return input.to(torch.bfloat16), weight, bias, step, edge


def _norm_arguments(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Norm | None:
    """What batch_norm takes, or None where it cannot."""
    if not training or not _within_reach(input) or input.dtype is not torch.bfloat16 or not isinstance(momentum, float):
        return None
    c = input.shape[1]
    if c > MOST_IN_NORM or not c < input.numel() < 2**31:  # one row has no variance: torch says so
        return None
    tensors = (running_mean, running_var, weight, bias)
    if any(it is not None and (it.dtype is not torch.float32 or not it.is_contiguous()) for it in tensors):
        return None
    if (running_mean is None) != (running_var is None):
        return None
    return input, running_mean, running_var, weight, bias, momentum, eps


def _raw_norm_arguments(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Norm | None:
    """The same for torch.batch_norm, which has another order."""
    return _norm_arguments(input, running_mean, running_var, weight, bias, training, momentum, eps)
