"""Triton kernels that a GPU runs where channels are few or depthwise."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dmcp.runtime.kernels.convolution import INTERPRET, conv2d
from dmcp.runtime.kernels.convolution import MOST_CHANNELS as MOST_IN_CONV
from dmcp.runtime.kernels.depthwise import SIZES as DEPTHWISE_SIZES
from dmcp.runtime.kernels.depthwise import depthwise_conv2d
from dmcp.runtime.kernels.norm import MOST_CHANNELS as MOST_IN_NORM
from dmcp.runtime.kernels.norm import batch_norm

__all__ = ["OwnKernels", "batch_norm", "conv2d", "depthwise_conv2d", "try_out"]

_MOST_NUMBERS = 2**30  # of a tensor: places are 32-bit numbers
Conv = tuple[Tensor, Tensor, Tensor | None, int, int]  # what conv2d takes; the last is the padding
Norm = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, float, float]  # what batch_norm takes


class OwnKernels(TorchFunctionMode):
    """While entered, convolutions and BatchNorms that fit run in our kernels; everything else runs as it is."""

    def __init__(self, depthwise: bool = True) -> None:
        """depthwise: whether convolutions of each channel for itself do so, too."""
        super().__init__()
        self._depthwise = depthwise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions."""
        kwargs = kwargs or {}
        if torch._C._are_functorch_transforms_active():  # vmap and its like do not go through our functions
            return func(*args, **kwargs)
        if func is torch.conv2d:
            conv = _conv_arguments(*args, **kwargs)
            if conv is not None and not _is_depthwise(*conv[:2]):
                return conv2d(*conv)
            if conv is not None and self._depthwise:
                return depthwise_conv2d(*conv[:4])
        elif func is F.batch_norm or func is torch.batch_norm:
            norm = (_norm_arguments if func is F.batch_norm else _raw_norm_arguments)(*args, **kwargs)
            if norm is not None:
                return batch_norm(*norm)
        return func(*args, **kwargs)


_PLAIN = ((8, MOST_IN_CONV, 1), (8, MOST_IN_CONV, 2), (8, 3, 1))  # channels out, in, and stride that are tried out
_ALONE = ((32, 1, 1), (32, 1, 2))
_WIDE = (200,)  # channels of norms that take them in blocks


def try_out(device: torch.device, depthwise: bool = False) -> None:
    """Run the largest kernels, or those for depthwise layers, on a few numbers; an error: they cannot be used there."""
    with torch.inference_mode(False), torch.enable_grad():
        for outputs, c, stride in _ALONE if depthwise else _PLAIN:
            groups = outputs if c == 1 else 1
            x = _waves(2, c * groups, 5, 5, device=device)
            weight = torch.linspace(1, -1, outputs * c * 9, device=device).reshape(outputs, c, 3, 3).bfloat16().float()
            _check_alike(*(_with_slopes(x, weight, *ways, stride, groups) for ways in _WAYS))
        for c in () if depthwise else _WIDE:
            x = _waves(2, c, 5, 5, device=device)
            outs = [norm(x) for _, norm in _WAYS]
            _check_alike(*((out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), x)) for out in outs))


def _waves(*shape: int, device: torch.device) -> Tensor:
    """Images to try kernels out with; gradients of a line would cancel out."""
    return torch.linspace(-20, 20, math.prod(shape), device=device).sin().reshape(shape).bfloat16().requires_grad_()


def _check_alike(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        if not torch.allclose(one.float(), other.float(), rtol=0.05, atol=0.05 * float(other.abs().max())):
            raise RuntimeError("own kernels do not compute here what torch's do")


def _with_slopes(x: Tensor, weight: Tensor, conv: Any, norm: Any, stride: int, groups: int) -> tuple[Tensor, ...]:
    """Output of a convolution and a BatchNorm, and the gradients of both their inputs."""
    weight = weight.clone().requires_grad_()
    out = norm(conv(x, weight, stride, groups))
    loss = (out * torch.linspace(-1, 1, out.shape[3], device=x.device)).sum()
    return out.detach(), *torch.autograd.grad(loss, (x, weight))


def _own(x: Tensor, weight: Tensor, stride: int, groups: int) -> Tensor:
    return conv2d(x, weight, None, stride, 1) if groups == 1 else depthwise_conv2d(x, weight, None, stride)


_WAYS: tuple[tuple[Any, Any], ...] = (
    (_own, lambda x: batch_norm(x, None, None, None, None, 0.1, 1e-5)),
    (
        lambda x, weight, stride, groups: F.conv2d(x, weight.bfloat16(), None, stride, 1, 1, groups),
        lambda x: F.batch_norm(x.float(), None, None, training=True),
    ),
)  # ours and torch's


def _within_reach(x: Any) -> bool:
    """Whether these are images where the kernels run."""
    plain = type(x) in (Tensor, nn.Parameter) and x.ndim == 4
    return plain and 0 < x.numel() < _MOST_NUMBERS and (x.is_cuda or INTERPRET)


def _in_bfloat16(x: Tensor) -> bool:
    """Whether a convolution of x computes in bfloat16, with weights of float32."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
    return cast and x.dtype in (torch.bfloat16, torch.float32)


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
    """What conv2d and depthwise_conv2d take, or None where neither can."""
    if not _within_reach(input) or not _in_bfloat16(input) or weight.dtype is not torch.float32 or weight.ndim != 4:
        return None
    step, edge, shape = _single(stride), _single(padding), weight.shape
    if step not in (1, 2) or _single(dilation) != 1 or edge != shape[2] // 2 or shape[2] != shape[3]:
        return None
    alone = _is_depthwise(input, weight) and groups == shape[0]
    if shape[2] not in (DEPTHWISE_SIZES if alone else (1, 3)):
        return None
    if not alone and (groups != 1 or shape[1] != input.shape[1] or max(shape[:2]) > MOST_IN_CONV):
        return None
    if bias is not None and bias.dtype is not torch.float32:
        return None
    if input.numel() // input.shape[1] * shape[0] >= _MOST_NUMBERS or weight.device != input.device:
        return None
    if bias is not None and (bias.shape != shape[:1] or bias.device != input.device):
        return None
    return input.to(torch.bfloat16), weight, bias, step, edge


def _is_depthwise(x: Tensor, weight: Tensor) -> bool:
    """Whether these weights are for each channel of x alone, and there are several."""
    return 1 < weight.shape[0] == x.shape[1] > weight.shape[1] == 1


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
    if c > MOST_IN_NORM or input.numel() <= c:  # one row has no variance: torch says so
        return None
    tensors = (running_mean, running_var, weight, bias)
    if not all(it is None or _fits(it, c, input.device) for it in tensors):  # torch says what is wrong
        return None
    if (running_mean is None) != (running_var is None):
        return None
    return input, running_mean, running_var, weight, bias, momentum, eps


def _fits(vector: Tensor, c: int, device: torch.device) -> bool:
    """Whether this is a number for each channel, as the kernels read it."""
    return vector.shape == (c,) and vector.dtype is torch.float32 and vector.device == device and vector.is_contiguous()


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
