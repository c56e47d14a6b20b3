"""Convolutions of few channels by the kernels of patches: bfloat16 images stored pixel by pixel.

Weights and sums are float32.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmcp.kernels.patches import _forward_kernel, _matrices_kernel, _strided_kernel, _sum_kernel, _weight_kernel

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # products in float32 there: the interpreter has no bfloat16
MOST_CHANNELS = 64


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sizes of the blocks of a kernel."""

    pixels: int  # of a block
    depth: int = 0  # numbers of the patches that are loaded at a time; 0: by a rule of the kernel
    warps: int = 4
    stages: int = 3  # loads ahead, where the loop is left to Triton
    unrolled: int = 288  # patches of up to so many numbers are taken in steps that are written out, if vectors are full


FORWARD = Blocks(pixels=128)  # also the input gradient of stride 1
STRIDED = Blocks(pixels=128)  # the input gradient of stride 2
WEIGHT = Blocks(pixels=64, stages=2)
WEIGHT_PROGRAMS = 528  # four for each multiprocessor of an H200
WEIGHT_SUMS = 12288  # numbers that a program keeps
WEIGHT_PARTIALS = 2**20  # most numbers of all partial sums


def nhwc(x: Tensor) -> Tensor:
    """The images with channels as the last dim, without gaps; no copy where they are stored so."""
    return x.permute(0, 2, 3, 1).contiguous()


def empty_images(n: int, c: int, h: int, w: int, device: torch.device) -> Tensor:
    """Images of no content, stored pixel by pixel, also where shapes leave that open.

    Not a view: what a layer returns may be changed in place.
    """
    return torch.empty_strided((n, c, h, w), (h * w * c, 1, w * c, c), dtype=torch.bfloat16, device=device)


def on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """While entered, kernels are launched where the tensor is."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _wide(channels: int) -> int:
    return max(16, 1 << (channels - 1).bit_length())


def vector(channels: int, most: int = 8, least: int = 1) -> int:
    """Numbers of a load: the largest of 8, 4, 2, 1 that divides a width; 1 where that is more than most, but not 8."""
    found = math.gcd(channels, 8)
    return found if found == 8 else max(least, min(found, most))


def divider(d: int) -> tuple[int, int]:
    """Factor (as a signed number) and shift by which _quotient divides by d."""
    shift = (d - 1).bit_length()
    factor = -(-(2 ** (31 + shift)) // d)
    return factor - 2**32 if factor >= 2**31 else factor, shift


def small_divider(d: int) -> tuple[int, int]:
    """Factor and shift for n * factor >> shift == n // d, for n < 2**15."""
    shift = 15 + d.bit_length()
    return 2**shift // d + 1, shift


def _geometry(k: int, stride: int, h: int, wide: int, oh: int, ow: int) -> tuple[int, ...]:
    """Arguments that say which pixels a kernel sees."""
    return (k, stride, k // 2, h, wide, ow, oh * ow, *divider(oh * ow), *divider(ow))


def matrices(w: Tensor) -> tuple[Tensor, Tensor]:
    """The weights as matrices for the output and for the input gradient. -> (numbers of a patch, outputs), padded"""
    c_out, c, k, _ = w.shape
    wide = (_wide(c_out), _wide(c))
    sizes = [(-(-it * k * k // 64) * 64 + 64) * width for it, width in zip((c, c_out), wide, strict=True)]
    found = torch.empty(sum(sizes), dtype=torch.bfloat16, device=w.device)
    _matrices_kernel[(triton.cdiv(max(sizes), 1024), 2)](
        w, found, c, c_out, k * k, *w.stride(), *(it.bit_length() - 1 for it in wide), *sizes, 1024
    )
    return found[: sizes[0]], found[sizes[0] :]


def forward_plan(c: int, k: int) -> tuple[int, int, int]:
    """Numbers of a patch that are taken at a time, steps that are written out (0: a loop), and loads ahead."""
    total = c * k * k
    if c % 8 or total > FORWARD.unrolled:
        depth = FORWARD.depth or (64 if c % 8 == 0 else 16 if total <= 224 else 32)
        return depth, 0, 1 if c % 8 else FORWARD.stages
    depth = FORWARD.depth or (16 if total <= 224 else 32)
    steps = -(-total // depth)
    steps = next((it for it in (5, 9, 14) if it >= steps), steps)  # few programs for all widths
    return depth, steps, FORWARD.stages


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, c_out: int, k: int, stride: int, like: Tensor) -> Tensor:
    """Convolution of images (n, h, w, c) with one of the matrices; like: any float32 numbers in place of no bias."""
    n, h, wide, c = x.shape
    oh, ow = (h - 1) // stride + 1, (wide - 1) // stride + 1
    y = empty_images(n, c_out, oh, ow, x.device)
    depth, steps, stages = forward_plan(c, k)
    m, v, vo = n * oh * ow, vector(c), vector(c_out, 1)
    _forward_kernel[(triton.cdiv(m, FORWARD.pixels),)](
        x, w, like if bias is None else bias, y, m, c // v, c_out // vo, *small_divider(c // v),
        *_geometry(k, stride, h, wide, oh, ow),
        v, vo, FORWARD.pixels, depth, _wide(c_out), steps, bias is not None, INTERPRET,
        num_warps=8 if v == 1 else FORWARD.warps, num_stages=stages,
    )  # fmt: skip
    return y


def _input_gradient(dy: Tensor, w: Tensor, flipped: Tensor, shape: torch.Size, stride: int) -> Tensor:
    """Gradient of images of the shape (n, c, h, w), from dy (n, h, w, c) and the second matrix of the weights w."""
    k = w.shape[2]
    if stride == 1:
        return _convolve(dy, flipped, None, shape[1], k, 1, w)
    n, c_in, h, wide = shape
    dx = empty_images(n, c_in, h, wide, dy.device)
    _, oh, ow, c = dy.shape
    up, half = (h + 1) // 2, (wide + 1) // 2
    m, v, vo = n * up * half, vector(c), vector(c_in, 1)
    _strided_kernel[(triton.cdiv(m, STRIDED.pixels), 4)](
        dy, flipped, dx, m, c // v, c_in // vo, *small_divider(c // v),
        k, h, wide, oh, ow, half, up * half, *divider(up * half), *divider(half),
        v, vo, STRIDED.pixels, STRIDED.depth or 32, _wide(c_in), INTERPRET,
        num_warps=STRIDED.warps, num_stages=STRIDED.stages,
    )  # fmt: skip
    return dx


def weight_pixels(c: int) -> int:
    """Pixels of a step of the weight gradient: fewer where each number is a load, which needs more registers."""
    return WEIGHT.pixels // 2 if c % 2 and WEIGHT.pixels > 16 else WEIGHT.pixels


def weight_plan(c: int, k: int, c_out: int, m: int) -> tuple[int, int, int, int, int]:
    """Depth, blocks of patches in a program, groups of them, slabs, pixels of a slab."""
    total = c * k * k
    depth, pixels = WEIGHT.depth or (16 if c % 8 else 64), weight_pixels(c)
    steps = -(-total // depth)
    most = WEIGHT_SUMS // (depth * _wide(c_out))
    parts = 4 if c % 8 == 0 and most > 3 and -steps % 4 < -steps % 3 else 3
    parts = 1 if c == 1 or (c % 8 == 0 and steps == 1) or most < 3 else parts  # few programs for all widths
    groups = -(-steps // parts)
    wanted = min(WEIGHT_PROGRAMS // groups, WEIGHT_PARTIALS // (total * c_out), -(-m // pixels))
    span = -(-m // max(1, wanted) // pixels) * pixels  # whole blocks, rounded up
    return depth, parts, groups, -(-m // span), span


def _weight_gradient(x: Tensor, dy: Tensor, w: Tensor, stride: int) -> Tensor:
    """Gradient of the weights, laid out as they are, of images x and dy (n, h, w, c)."""
    n, h, wide, c = x.shape
    _, oh, ow, c_out = dy.shape
    k, m = w.shape[2], n * oh * ow
    depth, parts, groups, slabs, span = weight_plan(c, k, c_out, m)
    part = torch.empty((slabs, k * k * c * c_out), dtype=torch.float32, device=x.device)
    v, vo = vector(c), vector(c_out, 2)
    _weight_kernel[(slabs, groups)](
        x, dy, part, m, span, c // v, c_out // vo, *small_divider(c // v), *_geometry(k, stride, h, wide, oh, ow),
        v, vo, weight_pixels(c), depth, _wide(c_out), parts, INTERPRET,
        num_warps=WEIGHT.warps, num_stages=WEIGHT.stages,
    )  # fmt: skip
    return summed(part, w, c, c_out)


def summed(part: Tensor, w: Tensor, c: int, c_out: int) -> Tensor:
    """Partial sums (slabs, numbers of a patch * outputs) together, laid out as the weights w are."""
    dw = torch.empty_like(w)
    slabs, size = part.shape
    rows, block = (64, 32) if slabs > 16 else (16, 128)
    vs = min(4, vector(size))
    _sum_kernel[(triton.cdiv(size, block),)](
        part, dw, slabs, *dw.stride(), w.shape[3], c, c_out, size // vs, vs, rows, block
    )
    return dw


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        with on(x):
            images, both = nhwc(x), matrices(w)
            ctx.save_for_backward(images, w, both[1])
            ctx.rest = (x.shape, stride)
            return _convolve(images, both[0], bias, w.shape[0], w.shape[2], stride, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        images, w, flipped = ctx.saved_tensors
        shape, stride = ctx.rest
        with on(dy):
            rows = nhwc(dy.bfloat16())
            dx = _input_gradient(rows, w, flipped, shape, stride) if ctx.needs_input_grad[0] else None
            dw = _weight_gradient(images, rows, w, stride) if ctx.needs_input_grad[1] else None
            db = rows.sum(dim=(0, 1, 2), dtype=torch.float32) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """3x3 convolution with padding 1 or 1x1 without, stride 1 or 2, of bfloat16 images; weight and bias are float32."""
    assert padding == weight.shape[2] // 2
    out: Tensor = _Conv2d.apply(x, weight, bias, stride)
    return out
