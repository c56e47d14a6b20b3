"""Triton kernels for convolutions of few channels and BatchNorm; used inside `OwnKernels`.

Torch's kernels are made for wide layers: at 16 channels they compute mostly padding, and its BatchNorm reads the images
more often than it must. These need a GPU that computes in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dmcp.runtime.kernels import convolution
from dmcp.runtime.kernels.convolution import INTERPRET, nhwc
from dmcp.runtime.kernels.norm import MOST_CHANNELS as MOST_IN_NORM
from dmcp.runtime.kernels.norm import batch_norm

__all__ = ["OwnKernels", "batch_norm", "conv2d", "try_out"]

_MOST_ELEMENTS = 2**30  # of a tensor: offsets are 32-bit


class OwnKernels(TorchFunctionMode):
    """While entered, convolutions and BatchNorms that fit run in these kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions."""
        kwargs = kwargs or {}
        if torch._C._are_functorch_transforms_active():  # vmap and the like cannot go through our autograd Function
            return func(*args, **kwargs)
        if func is torch.conv2d:
            conv = _conv_arguments(*args, **kwargs)
            if conv is not None:
                return conv2d(*conv)
        elif func is F.batch_norm or func is torch.batch_norm:
            norm = (_norm_arguments if func is F.batch_norm else _raw_norm_arguments)(*args, **kwargs)
            if norm is not None:
                return batch_norm(*norm)
        return func(*args, **kwargs)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        ctx.shape, ctx.stride = x.shape, stride
        with torch.cuda.device_of(x):
            images = nhwc(x)
            matrix, flipped = convolution.matrices(w)
            ctx.save_for_backward(images, w, flipped)
            return convolution.convolve(images, matrix, w.shape[0], w, bias, stride)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        images, w, flipped = ctx.saved_tensors
        dx = dw = db = None
        with torch.cuda.device_of(dy):
            rows = nhwc(dy.bfloat16())
            if ctx.needs_input_grad[0]:
                dx = convolution.input_gradient(rows, w, ctx.shape, ctx.stride, flipped)
            if ctx.needs_input_grad[1]:
                dw = convolution.weight_gradient(images, rows, w, ctx.stride)
            if ctx.needs_input_grad[2]:
                db = rows.sum(dim=(0, 1, 2), dtype=torch.float32)
        return dx, dw, db, None


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Convolution padded by half the filter, 1x1 or 3x3, of stride 1 or 2: images in bfloat16, weight in float32."""
    out: Tensor = _Conv2d.apply(x, weight, bias, stride)
    return out


# which arguments fit; all others go to torch, which also says what is wrong with them


def _within_reach(x: Any) -> bool:
    """Whether these are images where the kernels run."""
    plain = type(x) in (Tensor, nn.Parameter) and x.ndim == 4
    return plain and 0 < x.numel() < _MOST_ELEMENTS and (x.is_cuda or INTERPRET)


def _in_bfloat16(x: Tensor) -> bool:
    """Whether autocast computes a convolution of x in bfloat16."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
    return cast and x.dtype in (torch.bfloat16, torch.float32)


def _fits(vector: Tensor | None, c: int, device: torch.device) -> bool:
    """Whether this is None or one float32 per channel."""
    if vector is None:
        return True
    return vector.shape == (c,) and vector.dtype is torch.float32 and vector.device == device and vector.is_contiguous()


def _single(value: Any) -> int:
    """n of n or (n, n); -1 for others, and for padding="same"."""
    values = {value} if isinstance(value, int) else set(value)
    return int(values.pop()) if len(values) == 1 else -1


def _conv_arguments(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> tuple[Any, ...] | None:
    """Arguments of conv2d, or None."""
    if not _within_reach(input) or not _in_bfloat16(input) or weight.dtype is not torch.float32 or weight.ndim != 4:
        return None
    c, (c_out, c_in, k, width) = input.shape[1], weight.shape
    known = k in (1, 3) and groups == 1 and c_in == c and max(c_in, c_out) <= convolution.MOST_CHANNELS
    step, padded = _single(stride), k == width and _single(padding) == k // 2 and _single(dilation) == 1
    small = input.numel() // c * c_out < _MOST_ELEMENTS  # the output
    fits = weight.device == input.device and _fits(bias, c_out, input.device)
    if not (known and step in (1, 2) and padded and small and fits):
        return None
    return input.to(torch.bfloat16), weight, bias, step


def _norm_arguments(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
) -> tuple[Any, ...] | None:
    """Arguments of batch_norm, or None."""
    if not training or not _within_reach(input) or input.dtype is not torch.bfloat16 or not isinstance(momentum, float):
        return None
    c = input.shape[1]
    fits = all(_fits(it, c, input.device) for it in (running_mean, running_var, weight, bias))
    if not fits or c > MOST_IN_NORM or input.numel() <= c or (running_mean is None) != (running_var is None):
        return None
    return input, running_mean, running_var, weight, bias, momentum, eps


def _raw_norm_arguments(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    """The same from the arguments of torch.batch_norm, which have another order."""
    return _norm_arguments(input, running_mean, running_var, weight, bias, training, momentum, eps)


# whether they work here


def try_out(device: torch.device) -> None:
    """Compare the largest kernels with torch's; RuntimeError where they differ."""
    shapes = ((8, 64, 1), (8, 64, 2), (8, 3, 1), (200, 0, 1))  # channels out and in, stride; none in: only a BatchNorm
    with torch.inference_mode(False), torch.enable_grad():
        for c_out, c_in, stride in shapes:
            c = c_in or c_out
            wave = torch.linspace(-20, 20, 50 * c, device=device).sin()
            line = torch.linspace(1, -1, 9 * c_out * c_in, device=device)
            given = [wave.reshape(2, c, 5, 5).bfloat16().requires_grad_()]
            given += [line.reshape(c_out, c_in, 3, 3).bfloat16().float().requires_grad_()] if c_in else []
            ours, torchs = given[0], given[0]
            if c_in:
                ours = conv2d(given[0], given[1], None, stride)
                torchs = F.conv2d(given[0], given[1].bfloat16(), None, stride, 1)
            ours = batch_norm(ours, None, None, None, None, 0.1, 1e-5)
            torchs = F.batch_norm(torchs.float(), None, None, training=True)
            for found, wanted in zip(*(_with_gradients(it, given) for it in (ours, torchs)), strict=True):
                if not torch.allclose(found, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max())):
                    raise RuntimeError("own kernels do not compute here what torch's do")


def _with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    loss = (out * torch.linspace(-1, 1, out.shape[3], device=out.device)).sum()
    return [it.detach().float() for it in (out, *torch.autograd.grad(loss, given))]
