"""BatchNorm in Triton."""
# ruff: noqa: N803, N806 (numbers that a kernel is given are written in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmcp.runtime.kernels.convolution import empty_images, nhwc, on, small_divider, vector

MOST_CHANNELS = 2048
WHOLE = 64  # channels up to which a program takes all of them; beyond, a block
BLOCKS, WASTE = (128, 64, 32), 1.15  # the widest block that pads channels to no more than so many times, or the last


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a kernel that reads each number once is divided."""

    numbers: int  # of a tile
    programs: int = 0  # most, each with a run of tiles; 0: one for each tile
    warps: int = 4


STATISTICS = Tiles(numbers=4096, programs=512)
NORMALISE = Tiles(numbers=4096)
SUMS = Tiles(numbers=4096, programs=512)  # of the backward pass
GRADIENT = Tiles(numbers=2048)
REGISTERS = 128  # of a thread: four programs of four warps on a multiprocessor, so that all run at once
MERGED = 8  # channels of a program that merges partial results


@triton.jit(do_not_specialize=["R", "SPAN", "CV"])
def _statistics_kernel(x, part, R, SPAN, CV, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Mean and sum of squared deviations of SPAN rows, of a block of channels. (R, C) -> (2, programs, C)"""
    C = CV * V  # so that Triton knows what divides it
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
    count = ((end - first - rows + BR - 1) // BR).to(tl.float32)  # rows that this place of the tile has seen
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
    """What all programs have found for some channels, zero beyond. (2, programs, C) -> two of (BP, channels)"""
    p = tl.arange(0, BP)
    where = (p < PROGRAMS)[:, None] & (c < C)[None, :]
    at = part + (p[:, None] * C + c[None, :])
    return tl.load(at, mask=where, other=0.0), tl.load(at + PROGRAMS * C, mask=where, other=0.0)


@triton.jit(do_not_specialize=["R", "SPAN", "PROGRAMS", "momentum", "eps", "CV"])
def _merge_kernel(
    part, weight, bias, running_mean, running_var, coef, R, SPAN, PROGRAMS, momentum, eps, CV,
    V: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Statistics of all rows, into the running ones and into mean, scale, shift and 1 / std. -> (4, C)"""
    C = CV * V
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
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
        scale = rate * tl.load(weight + c, mask=known, other=0.0)
    if BIAS:
        shift = tl.load(bias + c, mask=known, other=0.0)
    tl.store(coef + c, mean, mask=known)
    tl.store(coef + C + c, scale, mask=known)
    tl.store(coef + 2 * C + c, shift, mask=known)
    tl.store(coef + 3 * C + c, rate, mask=known)
    if RUNNING:
        old_mean = tl.load(running_mean + c, mask=known, other=0.0)
        old_var = tl.load(running_var + c, mask=known, other=0.0)
        tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=known)
        tl.store(running_var + c, old_var + momentum * (spread / (rows - 1.0) - old_var), mask=known)


@triton.jit
def _tile(TOTAL, CV, MAGIC, SHIFT, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr):
    """Places of a tile, their channels and which of them exist: rows of all channels, or just a run of numbers."""
    if FLAT:
        start = tl.program_id(0) * (BR * BC)
        place = tl.arange(0, BR * BC)
        e = start + place
        vectors = (start // V) % CV + place // V  # counted from a row's first one, so that the numbers are small
        c = (vectors - ((vectors * MAGIC) >> SHIFT) * CV) * V + place % V
    else:
        e = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None] * BC + tl.arange(0, BC)[None, :]
        c = tl.arange(0, BC)[None, :]
    return e, c, e < TOTAL


@triton.jit(do_not_specialize=["CV", "MAGIC", "SHIFT"])
def _normalise_kernel(
    x, coef, y, TOTAL, CV, MAGIC, SHIFT, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr
):
    """y = (x - mean) scale + shift"""
    C = CV * V
    e, c, known = _tile(TOTAL, CV, MAGIC, SHIFT, V, BR, BC, FLAT)
    v = tl.load(x + e, mask=known, other=0.0).to(tl.float32)
    mean, scale, shift = tl.load(coef + c), tl.load(coef + C + c), tl.load(coef + 2 * C + c)
    tl.store(y + e, ((v - mean) * scale + shift).to(tl.bfloat16), mask=known)


@triton.jit(do_not_specialize=["R", "SPAN", "CV"])
def _sums_kernel(x, dy, coef, part, R, SPAN, CV, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Sums of dy and of dy (x - mean) over SPAN rows, of a block of channels. (R, C) -> (2, programs, C)"""
    C = CV * V
    program = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    mean = tl.load(coef + c, mask=c < C, other=0.0)[None, :]
    plain = tl.zeros((BR, BC), tl.float32)
    product = tl.zeros((BR, BC), tl.float32)
    for start in range(0, SPAN, BR):
        row = program * SPAN + start + tl.arange(0, BR)
        where = (row < R)[:, None] & (c < C)[None, :]
        e = row[:, None] * C + c[None, :]
        g = tl.load(dy + e, mask=where, other=0.0).to(tl.float32)
        v = tl.load(x + e, mask=where, other=0.0).to(tl.float32)
        plain += g
        product += g * (v - mean)
    to = part + program * C + c
    tl.store(to, tl.sum(plain, axis=0), mask=c < C)
    tl.store(to + tl.num_programs(1) * C, tl.sum(product, axis=0), mask=c < C)


@triton.jit(do_not_specialize=["R", "PROGRAMS", "CV"])
def _finish_kernel(part, coef, slopes, R, PROGRAMS, CV, V: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Gradients of weight and bias, and the factors of dy, of x - mean and of 1 in that of x. -> (5, C)"""
    C = CV * V
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    plains, products = _both(part, c, C, PROGRAMS, BP)
    plain, product = tl.sum(plains, axis=0), tl.sum(products, axis=0)
    scale = tl.load(coef + C + c, mask=known, other=0.0)
    rate = tl.load(coef + 3 * C + c, mask=known, other=0.0)
    rows = R.to(tl.float32)
    tl.store(slopes + c, product * rate, mask=known)
    tl.store(slopes + C + c, plain, mask=known)
    tl.store(slopes + 2 * C + c, scale, mask=known)
    tl.store(slopes + 3 * C + c, -scale * rate * rate * product / rows, mask=known)
    tl.store(slopes + 4 * C + c, -scale * plain / rows, mask=known)


@triton.jit(do_not_specialize=["CV", "MAGIC", "SHIFT"])
def _gradient_kernel(
    x, dy, coef, slopes, dx, TOTAL, CV, MAGIC, SHIFT,
    V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """dx = a dy + b (x - mean) + d"""
    C = CV * V
    e, c, known = _tile(TOTAL, CV, MAGIC, SHIFT, V, BR, BC, FLAT)
    v = tl.load(x + e, mask=known, other=0.0).to(tl.float32)
    g = tl.load(dy + e, mask=known, other=0.0).to(tl.float32)
    mean = tl.load(coef + c)
    a, b, d = tl.load(slopes + 2 * C + c), tl.load(slopes + 3 * C + c), tl.load(slopes + 4 * C + c)
    tl.store(dx + e, (a * g + b * (v - mean) + d).to(tl.bfloat16), mask=known)


def _wide(c: int) -> int:
    """Channels of a block: all where they are few; else blocks that waste little, so that partial results are few."""
    if c <= WHOLE:
        return max(8, 1 << (c - 1).bit_length())
    return next((it for it in BLOCKS if -(-c // it) * it <= WASTE * c), BLOCKS[-1])


def _divided(rows: int, c: int, tiles: Tiles) -> tuple[tuple[int, int], int, tuple[int, ...]]:
    """Grid (blocks of channels, programs for each), rows of a program, and width and tile as the kernel takes them."""
    v, wide = vector(c, 2), _wide(c)
    numbers = tiles.numbers // 2 if c % 2 else tiles.numbers  # odd widths need more registers for each
    high, blocks = max(1, numbers // wide), -(-c // wide)
    span = -(-rows // max(1, tiles.programs // blocks) // high) * high
    return (blocks, -(-rows // span)), span, (c // v, v, high, wide)


def _each(rows: int, c: int, tiles: Tiles) -> tuple[tuple[int], tuple[Any, ...]]:
    """Grid and blocks of a kernel over all numbers; widths that leave vectors open are taken as a run of numbers."""
    flat = c < 8 or c & (c - 1) != 0
    v, wide = vector(c), 1 if flat else c
    high = max(1, tiles.numbers // wide)
    return (triton.cdiv(rows * c, high * wide),), (c // v, *small_divider(c // v), v, high, wide, flat)


def _normalised(
    x: Tensor, running: tuple[Tensor, Tensor] | None, w: Tensor | None, b: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalised rows, and mean, scale, shift and 1 / std of each channel. (n, h, w, c) -> (n, c, h, w), (4, c)"""
    c = x.shape[3]
    rows = x.numel() // c
    grid, span, tile = _divided(rows, c, STATISTICS)
    programs = grid[1]
    part = torch.empty((2, programs, c), dtype=torch.float32, device=x.device)
    coef = torch.empty((4, c), dtype=torch.float32, device=x.device)
    _statistics_kernel[grid](x, part, rows, span, *tile, num_warps=STATISTICS.warps, maxnreg=REGISTERS)
    v = min(4, vector(c))
    mean, var = (part, part) if running is None else running
    _merge_kernel[(triton.cdiv(c, MERGED),)](
        part, part if w is None else w, part if b is None else b, mean, var, coef, rows, span, programs,
        float(momentum), float(eps), c // v, v, w is not None, b is not None, running is not None,
        triton.next_power_of_2(programs), MERGED,
    )  # fmt: skip
    y = _empty_like(x)
    tiles, blocks = _each(rows, c, NORMALISE)
    _normalise_kernel[tiles](x, coef, y, x.numel(), *blocks, num_warps=NORMALISE.warps)
    return y, coef


def _empty_like(rows: Tensor) -> Tensor:
    """Images stored as those of (n, h, w, c) are. -> (n, c, h, w)"""
    n, h, w, c = rows.shape
    return empty_images(n, c, h, w, rows.device)


def _slopes(x: Tensor, dy: Tensor, coef: Tensor) -> Tensor:
    """Gradients of weight and bias, and three factors of that of x, per channel. -> (5, c)"""
    c = x.shape[3]
    rows = x.numel() // c
    grid, span, tile = _divided(rows, c, SUMS)
    programs = grid[1]
    part = torch.empty((2, programs, c), dtype=torch.float32, device=x.device)
    slopes = torch.empty((5, c), dtype=torch.float32, device=x.device)
    _sums_kernel[grid](x, dy, coef, part, rows, span, *tile, num_warps=SUMS.warps, maxnreg=REGISTERS)
    v, block = min(4, vector(c)), triton.next_power_of_2(programs)
    _finish_kernel[(triton.cdiv(c, MERGED),)](part, coef, slopes, rows, programs, c // v, v, block, MERGED)
    return slopes


def _gradient(x: Tensor, dy: Tensor, coef: Tensor, slopes: Tensor) -> Tensor:
    """Gradient of x. -> (n, c, h, w)"""
    dx = _empty_like(x)
    grid, blocks = _each(x.numel() // x.shape[3], x.shape[3], GRADIENT)
    _gradient_kernel[grid](x, dy, coef, slopes, dx, x.numel(), *blocks, num_warps=GRADIENT.warps)
    return dx


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running: tuple[Tensor, Tensor] | None,
        w: Tensor | None,
        b: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        with on(x):
            rows = nhwc(x)
            y, coef = _normalised(rows, running, w, b, momentum, eps)
        ctx.save_for_backward(rows, coef)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, coef = ctx.saved_tensors
        with on(x):
            dy = nhwc(grad.bfloat16())
            slopes = _slopes(x, dy, coef)
            dx = _gradient(x, dy, coef, slopes) if ctx.needs_input_grad[0] else None
        dw = slopes[0] if ctx.needs_input_grad[2] else None
        db = slopes[1] if ctx.needs_input_grad[3] else None
        return dx, None, dw, db, None, None


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """BatchNorm of bfloat16 images by their own statistics; the running ones are moved in place."""
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    out: Tensor = _BatchNorm.apply(x, running, weight, bias, momentum, eps)
    return out
