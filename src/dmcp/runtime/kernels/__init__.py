"""Triton kernels for convolutions of few channels and for BatchNorm; `OwnKernels` uses them.

Torch's kernels are made for wide layers: at 16 channels they compute mostly padding, and its BatchNorm reads the images
more often than necessary. These need a GPU that computes in bfloat16.
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
    """While entered, convolutions and BatchNorms run in these kernels, where these can compute them."""

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
            read_arguments = _norm_arguments if func is F.batch_norm else _raw_norm_arguments
            norm = read_arguments(*args, **kwargs)
            if norm is not None:
                return batch_norm(*norm)
        return func(*args, **kwargs)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        ctx.shape = x.shape
        ctx.stride = stride
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


# which arguments the kernels can compute; all others go to torch, which also reports what is wrong with them


def _are_images(x: Any) -> bool:
    """Whether this is a plain tensor of images, of a size and on a device that the kernels can handle."""
    if type(x) not in (Tensor, nn.Parameter) or x.ndim != 4:
        return False
    return 0 < x.numel() < _MOST_ELEMENTS and (x.is_cuda or INTERPRET)


def _in_bfloat16(x: Tensor) -> bool:
    """Whether autocast computes a convolution of x in bfloat16."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) is not torch.bfloat16:
        return False
    return x.dtype in (torch.bfloat16, torch.float32)


def _is_per_channel(vector: Tensor | None, channels: int, device: torch.device) -> bool:
    """Whether this is None or has one float32 per channel."""
    if vector is None:
        return True
    if vector.shape != (channels,) or vector.dtype is not torch.float32:
        return False
    return vector.device == device and vector.is_contiguous()


def _single(value: Any) -> int:
    """n of n or (n, n); -1 for others, and for padding="same"."""
    values = {value} if isinstance(value, int) else set(value)
    if len(values) != 1:
        return -1
    return int(values.pop())


def _conv_arguments(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> tuple[Any, ...] | None:
    """The arguments of `conv2d`; None where torch must compute it."""
    if not _are_images(input) or not _in_bfloat16(input):
        return None
    if weight.dtype is not torch.float32 or weight.ndim != 4 or weight.device != input.device:
        return None

    # A dense filter of 1x1 or 3x3 for few channels.
    channels = input.shape[1]
    c_out, c_in, height, width = weight.shape
    if groups != 1 or c_in != channels or max(c_in, c_out) > convolution.MOST_CHANNELS:
        return None
    if height != width or height not in (1, 3):
        return None

    # Padded by half the filter, without dilation, of stride 1 or 2.
    step = _single(stride)
    if step not in (1, 2) or _single(padding) != height // 2 or _single(dilation) != 1:
        return None
    output_elements = input.numel() // channels * c_out
    if output_elements >= _MOST_ELEMENTS or not _is_per_channel(bias, c_out, input.device):
        return None
    return input.to(torch.bfloat16), weight, bias, step


def _norm_arguments(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
) -> tuple[Any, ...] | None:
    """The arguments of `batch_norm`; None where torch must compute it."""
    if not training or not _are_images(input) or input.dtype is not torch.bfloat16:
        return None
    if not isinstance(momentum, float) or (running_mean is None) != (running_var is None):
        return None
    channels = input.shape[1]
    if channels > MOST_IN_NORM or input.numel() <= channels:
        return None
    for vector in (running_mean, running_var, weight, bias):
        if not _is_per_channel(vector, channels, input.device):
            return None
    return input, running_mean, running_var, weight, bias, momentum, eps


def _raw_norm_arguments(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    """The same from the arguments of torch.batch_norm, which have another order."""
    return _norm_arguments(input, running_mean, running_var, weight, bias, training, momentum, eps)


# whether they work on this machine


def try_out(device: torch.device) -> None:
    """Compare the largest kernels with torch's; RuntimeError where they differ."""
    shapes = ((8, 64, 1), (8, 64, 2), (8, 3, 1), (200, 0, 1))  # channels out and in, stride; none in: only a BatchNorm
    with torch.inference_mode(False), torch.enable_grad():
        for c_out, c_in, stride in shapes:
            channels = c_in or c_out
            wave = torch.linspace(-20, 20, 50 * channels, device=device).sin()
            images = wave.reshape(2, channels, 5, 5).bfloat16().requires_grad_()
            inputs = [images]
            ours = images
            expected = images
            if c_in:
                line = torch.linspace(1, -1, 9 * c_out * c_in, device=device)
                weight = line.reshape(c_out, c_in, 3, 3).bfloat16().float().requires_grad_()
                inputs.append(weight)
                ours = conv2d(images, weight, None, stride)
                expected = F.conv2d(images, weight.bfloat16(), None, stride, 1)
            ours = batch_norm(ours, None, None, None, None, 0.1, 1e-5)
            expected = F.batch_norm(expected.float(), None, None, training=True)
            pairs = zip(_with_gradients(ours, inputs), _with_gradients(expected, inputs), strict=True)
            for tensor, reference in pairs:
                tolerance = 0.05 * float(reference.abs().max())
                if not torch.allclose(tensor, reference, rtol=0.05, atol=tolerance):
                    raise RuntimeError("on this machine they do not compute what torch computes")


def _with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a loss of it."""
    loss = (out * torch.linspace(-1, 1, out.shape[3], device=out.device)).sum()
    gradients = torch.autograd.grad(loss, inputs)
    return [tensor.detach().float() for tensor in (out, *gradients)]
