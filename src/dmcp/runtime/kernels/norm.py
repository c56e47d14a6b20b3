"""BatchNorm in train mode as Triton kernels: bfloat16 images in NHWC order, everything else float32.

A row is a pixel. Each program computes mean and squared deviations of some rows (Welford's method, every element of a
tile on its own); they are merged by Chan's formula. All sums have a fixed order.
"""

# ruff: noqa: N803, N806 (arguments of kernels are written in capitals)
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmcp.runtime.kernels.convolution import empty_images, nhwc, small_divider, vector

MOST_CHANNELS = 2048
WHOLE = 64  # channels up to which a program takes all of them; beyond, a block
BLOCKS = (128, 64, 32)  # of channels: the widest that pads them to no more than WASTE times, or the last
WASTE = 1.15
TILE = 4096  # elements
GRADIENT_TILE = 2048
MOST_PROGRAMS = 512  # of a kernel that sums over rows
REGISTERS = 128  # of a thread: four programs of four warps on a multiprocessor, so that all run at once
MERGED = 8  # channels of a program that merges partial results
INTS = ["R", "SPAN", "PROGRAMS", "CV", "MAGIC", "SHIFT", "momentum", "eps"]  # no value compiles another program


# kernels


@triton.jit(do_not_specialize=INTS)
def _statistics_kernel(x, part, R, SPAN, CV, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Mean and sum of squared deviations of SPAN rows, of a block of channels. (R, C) -> (2, programs, C)"""
    C = CV * V  # tells Triton what divides it
    program = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    first = program * SPAN
    rows = tl.arange(0, BR)
    mean = tl.zeros((BR, BC), tl.float32)
    m2 = tl.zeros((BR, BC), tl.float32)
    seen = 0.0
    for start in range(0, SPAN, BR):
        row = first + start + rows
        live = (row < R)[:, None]
        v = tl.load(x + (row[:, None] * C + c[None, :]), mask=live & (c < C)[None, :], other=0.0).to(tl.float32)
        seen += 1.0
        delta = tl.where(live, v - mean, 0.0)
        mean += delta * (1.0 / seen)
        m2 += delta * (v - mean)
    end = tl.minimum(first + SPAN, R)
    count = ((end - first - rows + BR - 1) // BR).to(tl.float32)  # rows that this element of the tile has seen
    count = tl.maximum(count, 0.0)[:, None]
    total = (end - first).to(tl.float32)
    middle = tl.sum(mean * count, axis=0) / total
    apart = mean - middle[None, :]
    spread = tl.sum(m2 + count * apart * apart, axis=0)
    to = part + program * C + c
    tl.store(to, middle, mask=c < C)
    tl.store(to + tl.num_programs(1) * C, spread, mask=c < C)


@triton.jit
def _both(part, c, C, PROGRAMS, BP: tl.constexpr):
    """Partial results of all programs for some channels, zero beyond. (2, programs, C) -> two of (BP, channels)"""
    p = tl.arange(0, BP)
    where = (p < PROGRAMS)[:, None] & (c < C)[None, :]
    at = part + (p[:, None] * C + c[None, :])
    return tl.load(at, mask=where, other=0.0), tl.load(at + PROGRAMS * C, mask=where, other=0.0)


@triton.jit(do_not_specialize=INTS)
def _merge_kernel(
    part, weight, bias, running_mean, running_var, coef, R, SPAN, PROGRAMS, momentum, eps, CV,
    V: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Statistics of all rows: updates the running ones; mean, scale, shift and 1 / std. -> (4, C)"""
    C = CV * V
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    means, m2 = _both(part, c, C, PROGRAMS, BP)
    counts = tl.maximum(tl.minimum(R - tl.arange(0, BP) * SPAN, SPAN), 0).to(tl.float32)[:, None]
    rows = R.to(tl.float32)
    mean = tl.sum(means * counts, axis=0) / rows
    apart = means - mean[None, :]
    spread = tl.sum(m2 + counts * apart * apart, axis=0)
    rate = 1.0 / tl.sqrt(spread / rows + eps)
    scale = rate
    shift = tl.zeros((BC,), tl.float32)
    if WEIGHT:
        scale = rate * tl.load(weight + c, mask=inside, other=0.0)
    if BIAS:
        shift = tl.load(bias + c, mask=inside, other=0.0)
    tl.store(coef + c, mean, mask=inside)
    tl.store(coef + C + c, scale, mask=inside)
    tl.store(coef + 2 * C + c, shift, mask=inside)
    tl.store(coef + 3 * C + c, rate, mask=inside)
    if RUNNING:
        old_mean = tl.load(running_mean + c, mask=inside, other=0.0)
        old_var = tl.load(running_var + c, mask=inside, other=0.0)
        tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=inside)
        tl.store(running_var + c, old_var + momentum * (spread / (rows - 1.0) - old_var), mask=inside)


@triton.jit
def _tile(TOTAL, CV, MAGIC, SHIFT, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr):
    """Offsets of a tile, their channels and a mask: rows of all channels, or (FLAT) a run of elements."""
    if FLAT:
        start = tl.program_id(0) * (BR * BC)
        element = tl.arange(0, BR * BC)
        e = start + element
        vectors = (start // V) % CV + element // V  # from the start of a row, so that they are small
        c = (vectors - ((vectors * MAGIC) >> SHIFT) * CV) * V + element % V
    else:
        e = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None] * BC + tl.arange(0, BC)[None, :]
        c = tl.arange(0, BC)[None, :]
    return e, c, e < TOTAL


@triton.jit(do_not_specialize=INTS)
def _normalize_kernel(
    x, coef, y, TOTAL, CV, MAGIC, SHIFT, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr
):
    """y = (x - mean) scale + shift"""
    C = CV * V
    e, c, inside = _tile(TOTAL, CV, MAGIC, SHIFT, V, BR, BC, FLAT)
    v = tl.load(x + e, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(coef + c)
    scale = tl.load(coef + C + c)
    shift = tl.load(coef + 2 * C + c)
    tl.store(y + e, ((v - mean) * scale + shift).to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=INTS)
def _sums_kernel(x, dy, coef, part, R, SPAN, CV, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Sums of dy and of dy (x - mean) over SPAN rows, of a block of channels. (R, C) -> (2, programs, C)"""
    C = CV * V
    program = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    mean = tl.load(coef + c, mask=c < C, other=0.0)[None, :]
    total = tl.zeros((BR, BC), tl.float32)
    product = tl.zeros((BR, BC), tl.float32)
    for start in range(0, SPAN, BR):
        row = program * SPAN + start + tl.arange(0, BR)
        where = (row < R)[:, None] & (c < C)[None, :]
        e = row[:, None] * C + c[None, :]
        g = tl.load(dy + e, mask=where, other=0.0).to(tl.float32)
        v = tl.load(x + e, mask=where, other=0.0).to(tl.float32)
        total += g
        product += g * (v - mean)
    to = part + program * C + c
    tl.store(to, tl.sum(total, axis=0), mask=c < C)
    tl.store(to + tl.num_programs(1) * C, tl.sum(product, axis=0), mask=c < C)


@triton.jit(do_not_specialize=INTS)
def _finish_kernel(part, coef, grads, R, PROGRAMS, CV, V: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Gradients of weight and bias, and the factors a, b and d of _gradient_kernel. -> (5, C)"""
    C = CV * V
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    sums, products = _both(part, c, C, PROGRAMS, BP)
    total = tl.sum(sums, axis=0)
    product = tl.sum(products, axis=0)
    scale = tl.load(coef + C + c, mask=inside, other=0.0)
    rate = tl.load(coef + 3 * C + c, mask=inside, other=0.0)
    rows = R.to(tl.float32)
    tl.store(grads + c, product * rate, mask=inside)
    tl.store(grads + C + c, total, mask=inside)
    tl.store(grads + 2 * C + c, scale, mask=inside)
    tl.store(grads + 3 * C + c, -scale * rate * rate * product / rows, mask=inside)
    tl.store(grads + 4 * C + c, -scale * total / rows, mask=inside)


@triton.jit(do_not_specialize=INTS)
def _gradient_kernel(
    x, dy, coef, grads, dx, TOTAL, CV, MAGIC, SHIFT,
    V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """dx = a dy + b (x - mean) + d"""
    C = CV * V
    e, c, inside = _tile(TOTAL, CV, MAGIC, SHIFT, V, BR, BC, FLAT)
    v = tl.load(x + e, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + e, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(coef + c)
    a = tl.load(grads + 2 * C + c)
    b = tl.load(grads + 3 * C + c)
    d = tl.load(grads + 4 * C + c)
    tl.store(dx + e, (a * g + b * (v - mean) + d).to(tl.bfloat16), mask=inside)


# launches


def _wide(c: int) -> int:
    """Channels of a block: all where they are few; else blocks that waste little, so that partial results are few."""
    if c <= WHOLE:
        return max(8, 1 << (c - 1).bit_length())
    for block in BLOCKS:
        padded = -(-c // block) * block
        if padded <= WASTE * c:
            return block
    return BLOCKS[-1]


def _sums(kernel: Any, *images: Tensor) -> tuple[Tensor, int, int]:
    """Launch a kernel that sums over rows; its partial results (2, programs, c), rows, and rows of a program."""
    c = images[0].shape[3]
    rows = images[0].numel() // c
    v = vector(c, 2)
    wide = _wide(c)
    tile = TILE
    if c % 2:
        tile = TILE // 2  # odd widths need more registers
    high = max(1, tile // wide)
    blocks = -(-c // wide)
    span = -(-rows // max(1, MOST_PROGRAMS // blocks) // high) * high
    part = torch.empty((2, -(-rows // span), c), dtype=torch.float32, device=images[0].device)
    kernel[(blocks, part.shape[1])](*images, part, rows, span, c // v, v, high, wide, maxnreg=REGISTERS)
    return part, rows, span


def _each(kernel: Any, tile: int, x: Tensor, *others: Tensor) -> Tensor:
    """Launch a kernel over all elements; widths that leave vectors open are taken as a run of elements."""
    n, h, w, c = x.shape
    y = empty_images(n, c, h, w, x.device)
    flat = c < 8 or c & (c - 1) != 0
    v = vector(c)
    wide = c
    if flat:
        wide = 1
    high = max(1, tile // wide)
    kernel[(triton.cdiv(x.numel(), high * wide),)](
        x, *others, y, x.numel(), c // v, *small_divider(c // v), v, high, wide, flat
    )
    return y


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, running, w, b, momentum, eps):
        with torch.cuda.device_of(x):
            images = nhwc(x)
            c = x.shape[1]
            part, rows, span = _sums(_statistics_kernel, images)
            programs = part.shape[1]
            v = math.gcd(c, 4)
            coef = torch.empty((4, c), dtype=torch.float32, device=x.device)
            # Where there are no running statistics, no weight or no bias, the kernel is given any tensor instead.
            mean = var = weight = bias = part
            if running is not None:
                mean, var = running
            if w is not None:
                weight = w
            if b is not None:
                bias = b
            _merge_kernel[(triton.cdiv(c, MERGED),)](
                part, weight, bias, mean, var, coef, rows, span, programs,
                float(momentum), float(eps), c // v, v, w is not None, b is not None, running is not None,
                triton.next_power_of_2(programs), MERGED,
            )  # fmt: skip
            ctx.save_for_backward(images, coef)
            return _each(_normalize_kernel, TILE, images, coef)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        images, coef = ctx.saved_tensors
        with torch.cuda.device_of(images):
            dy = nhwc(dy.bfloat16())
            c = images.shape[3]
            part, rows, _ = _sums(_sums_kernel, images, dy, coef)
            programs = part.shape[1]
            v = math.gcd(c, 4)
            grads = torch.empty((5, c), dtype=torch.float32, device=images.device)
            _finish_kernel[(triton.cdiv(c, MERGED),)](
                part, coef, grads, rows, programs, c // v, v, triton.next_power_of_2(programs), MERGED
            )
            dx = dw = db = None
            if ctx.needs_input_grad[0]:
                dx = _each(_gradient_kernel, GRADIENT_TILE, images, dy, coef, grads)
            if ctx.needs_input_grad[2]:
                dw = grads[0]
            if ctx.needs_input_grad[3]:
                db = grads[1]
        return dx, None, dw, db, None, None


def batch_norm(x, running_mean, running_var, weight, bias, momentum, eps) -> Tensor:
    """BatchNorm of bfloat16 images by their own statistics; updates the running ones in place."""
    running = None if running_mean is None else (running_mean, running_var)
    out: Tensor = _BatchNorm.apply(x, running, weight, bias, momentum, eps)
    return out
