"""Depthwise convolutions in Triton."""
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806, RUF005 (numbers that a kernel is given are written in capitals; it adds tuples by + alone)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmcp.runtime.kernels.convolution import empty_images, nhwc, on, summed, vector

SIZES = (3, 5)
CHANNELS = 32  # of a block; half of it where there are no more


@dataclass(frozen=True, kw_only=True)
class Walks:
    """How a kernel is divided."""

    ahead: dict[int, int]  # rows that are loaded at a time, by size of the kernel; fewer where widths are odd
    rows: int = 32  # of a strip, at most
    numbers: int = 512  # of a tile: lanes times channels
    programs: int = 1056  # eight for each multiprocessor of an H200: images are cut into strips until there are so many
    warps: int = 4


FORWARD = Walks(ahead={3: 4, 5: 2})  # also the input gradient of stride 1
STRIDED = Walks(ahead={3: 2, 5: 1}, rows=16)  # the input gradient of stride 2
WEIGHT = Walks(ahead={3: 4, 5: 1})
LEAST_ROWS = 4  # of a strip: with fewer, its edges are most of what is read

LANES = ["LANES", "STRIPS", "ROWS", "BLOCKS", "CV", "H", "W", "OH", "OW"]
WEIGHTS = ["s_channel", "s_row", "s_column", "FIRST"]


@triton.jit
def _lanes(block, LANES, STRIPS, ROWS, WIDTH, BP: tl.constexpr):
    """Image, first row and column of some lanes, and which of them exist. -> four of (BP, 1)"""
    lane = block * BP + tl.arange(0, BP)
    strip, image = (lane // WIDTH) % STRIPS, lane // (WIDTH * STRIPS)
    return image[:, None], (strip * ROWS)[:, None], (lane % WIDTH)[:, None], (lane < LANES)[:, None]


@triton.jit
def _weights(w, c, C, s_channel, s_row, s_column, FIRST, K: tl.constexpr):
    """The taps as bfloat16 has them, row by row. -> K * K of (1, channels)"""
    found = ()
    for tap in tl.static_range(K * K):
        at = w + (FIRST + c * s_channel + (tap // K) * s_row + (tap % K) * s_column)
        found = found + (tl.load(at, mask=c < C, other=0.0).to(tl.bfloat16).to(tl.float32),)
    return found


@triton.jit
def _zeros(COUNT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """As many tiles of zeros."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros((BP, BC), tl.float32),)
    return found


@triton.jit
def _row(x, image, row, left, c, live, H, W, C, K: tl.constexpr):
    """What lies under the kernel columns in one row of each lane, zero outside of the image. -> K tiles"""
    live = live & (row >= 0) & (row < H)
    base = ((image * H + row) * W + left) * C + c
    found = ()
    for k in tl.static_range(K):
        inside = live & (left + k >= 0) & (left + k < W)
        found = found + (tl.load(x + (base + k * C), mask=inside, other=0.0),)
    return found


@triton.jit(do_not_specialize=[*LANES, *WEIGHTS])
def _forward_kernel(
    x, w, bias, y, LANES, STRIPS, ROWS, BLOCKS, CV, H, W, OH, OW, s_channel, s_row, s_column, FIRST,
    V: tl.constexpr, K: tl.constexpr, S: tl.constexpr, U: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Output of some lanes; with the weights turned round (FIRST: the last tap) the input gradient of stride 1."""
    P: tl.constexpr = K // 2
    C = CV * V  # so that Triton knows what divides it
    c = ((tl.program_id(0) % BLOCKS) * BC + tl.arange(0, BC))[None, :]
    image, first, column, live = _lanes(tl.program_id(0) // BLOCKS, LANES, STRIPS, ROWS, OW, BP)
    live = live & (c < C)
    taps = _weights(w, c, C, s_channel, s_row, s_column, FIRST, K)
    shift = tl.zeros((1, BC), tl.float32)
    if BIAS:
        shift = tl.load(bias + c, mask=c < C, other=0.0)
    to = y + ((image * OH * OW + column) * C + c)
    left = column * S - P
    if S == 1:
        sums = _zeros(K, BP, BC)  # of the output rows that the next input row is under, from above
        for start in range(0, ROWS + K - 1, U):
            rows = ()
            for u in tl.static_range(U):  # all loads first: they wait together
                rows = rows + (_row(x, image, first - P + start + u, left, c, live, H, W, C, K),)
            for u in tl.static_range(U):
                sums = _below(sums, rows[u], taps, K)
                row = first + start + u - 2 * P
                done = live & (row >= first) & (row < first + ROWS) & (row < OH)
                tl.store(to + row * (OW * C), (sums[0] + shift).to(tl.bfloat16), mask=done)
                sums = _moved(sums, K)
    else:
        for start in range(ROWS):
            row = first + start
            total = tl.zeros((BP, BC), tl.float32) + shift
            patch = ()
            for k in tl.static_range(K):
                patch = patch + (_row(x, image, row * S - P + k, left, c, live, H, W, C, K),)
            for tap in tl.static_range(K * K):
                total += patch[tap // K][tap % K].to(tl.float32) * taps[tap]
            tl.store(to + row * (OW * C), total.to(tl.bfloat16), mask=live & (row < OH))


@triton.jit
def _below(sums, row, taps, K: tl.constexpr):
    """Sums of output rows, from above, after an input row that all of them see: the first one with its last taps."""
    found = ()
    for i in tl.static_range(K):
        total = sums[i]
        for k in tl.static_range(K):
            total += row[k].to(tl.float32) * taps[(K - 1 - i) * K + k]
        found = found + (total,)
    return found


@triton.jit
def _moved(tiles, COUNT: tl.constexpr):
    """Without the first, with zeros in the end."""
    return _rest(tiles, COUNT) + (tl.zeros_like(tiles[0]),)


@triton.jit
def _at(tiles, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """One of some rows of tiles."""
    return tiles[ROW][COLUMN]


@triton.jit(do_not_specialize=[*LANES, *WEIGHTS])
def _strided_kernel(
    dy, w, dx, LANES, STRIPS, ROWS, BLOCKS, CV, H, W, OH, OW, s_channel, s_row, s_column, FIRST,
    V: tl.constexpr, K: tl.constexpr, U: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Input gradient of stride 2; a lane walks down squares of four pixels, each of which has taps of its own.

    Output row i + d has read row 2 i + odd at the tap odd + K // 2 - 2 d, where there is one; columns likewise.
    """
    P: tl.constexpr = K // 2
    LEAST: tl.constexpr = -(P // 2)  # the first d, and as many ds as there are up to 1
    N: tl.constexpr = 2 - LEAST
    C = CV * V
    c = ((tl.program_id(0) % BLOCKS) * BC + tl.arange(0, BC))[None, :]
    image, first, column, live = _lanes(tl.program_id(0) // BLOCKS, LANES, STRIPS, ROWS, (W + 1) // 2, BP)
    live = live & (c < C)
    taps = _weights(w, c, C, s_channel, s_row, s_column, FIRST, K)
    for start in range(0, ROWS, U):
        rows = ()
        for u in tl.static_range(U + N - 1):
            rows = rows + (_row(dy, image, first + start + u + LEAST, column + LEAST, c, live, OH, OW, C, N),)
        for u in tl.static_range(U):
            half = first + start + u
            inside = live & (half < first + ROWS)
            for odd in tl.static_range(4):
                total = tl.zeros((BP, BC), tl.float32)
                for tap in tl.static_range(K * K):
                    if ((odd // 2 + P - tap // K) % 2 == 0) & ((odd % 2 + P - tap % K) % 2 == 0):
                        slope = _at(
                            rows, u + (odd // 2 + P - tap // K) // 2 - LEAST, (odd % 2 + P - tap % K) // 2 - LEAST
                        )
                        total += slope.to(tl.float32) * taps[tap]
                row, at = 2 * half + odd // 2, 2 * column + odd % 2
                to = dx + (((image * H + row) * W + at) * C + c)
                tl.store(to, total.to(tl.bfloat16), mask=inside & (row < H) & (at < W))


@triton.jit(do_not_specialize=[*LANES, "SPAN"])
def _weight_kernel(
    x, dy, part, LANES, STRIPS, ROWS, BLOCKS, CV, H, W, OH, OW, SPAN,
    V: tl.constexpr, K: tl.constexpr, S: tl.constexpr, U: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial weight gradient of SPAN blocks of lanes. -> (slabs, K * K, C)"""
    P: tl.constexpr = K // 2
    C = CV * V
    c = ((tl.program_id(0) % BLOCKS) * BC + tl.arange(0, BC))[None, :]
    slab = tl.program_id(0) // BLOCKS
    sums = _zeros(K * K, BP, BC)
    for block in range(slab * SPAN, slab * SPAN + SPAN):
        image, first, column, live = _lanes(block, LANES, STRIPS, ROWS, OW, BP)
        live = live & (c < C)
        left = column * S - P
        if S == 1:
            slopes = _zeros(K - 1, BP, BC)  # of the output rows above, which the next input row is under, too
            for start in range(0, ROWS + K - 1, U):
                rows, others = (), ()
                for u in tl.static_range(U):
                    row = first + start + u
                    here = live & (row < first + ROWS)
                    others = others + (_row(dy, image, row, column, c, here, OH, OW, C, 1),)
                    rows = rows + (_row(x, image, row - P, left, c, live, H, W, C, K),)
                for u in tl.static_range(U):
                    seen = slopes + (others[u][0].to(tl.float32),)
                    sums = _products(sums, rows[u], seen, K)
                    slopes = _rest(seen, K)
        else:
            for start in range(ROWS):
                slope = _row(dy, image, first + start, column, c, live, OH, OW, C, 1)[0].to(tl.float32)
                patch = ()
                for k in tl.static_range(K):
                    patch = patch + (_row(x, image, (first + start) * S - P + k, left, c, live, H, W, C, K),)
                found = ()
                for tap in tl.static_range(K * K):
                    found = found + (sums[tap] + slope * patch[tap // K][tap % K].to(tl.float32),)
                sums = found
    for tap in tl.static_range(K * K):
        to = part + ((slab * (K * K) + tap) * C + c)
        tl.store(to, tl.sum(sums[tap], axis=0)[None, :], mask=c < C)


@triton.jit
def _products(sums, row, slopes, K: tl.constexpr):
    """Sums of all taps, after an input row and the output rows that it is under, from above."""
    found = ()
    for tap in tl.static_range(K * K):
        found = found + (sums[tap] + row[tap % K].to(tl.float32) * slopes[K - 1 - tap // K],)
    return found


@triton.jit
def _rest(tiles, COUNT: tl.constexpr):
    """Without the first."""
    found = ()
    for i in tl.static_range(1, COUNT):
        found = found + (tiles[i],)
    return found


def _blocks(c: int, walks: Walks) -> tuple[int, int, int]:
    """Numbers of a vector, channels of a block and lanes of a tile."""
    v, wide = min(4, vector(c)), CHANNELS if c > CHANNELS // 2 else CHANNELS // 2
    return v, wide, walks.numbers // wide


def _ahead(c: int, k: int, stride: int, walks: Walks) -> int:
    """Rows that are loaded at a time: fewer where each number is a load of its own, which needs more registers."""
    return 1 if stride == 2 else max(1, walks.ahead[k] // 2) if c % 2 else walks.ahead[k]


def strips(n: int, c: int, rows: int, columns: int, walks: Walks) -> tuple[int, ...]:
    """Lanes, strips of an image, rows of a strip, blocks of channels: as the kernels take them."""
    _, wide, lanes = _blocks(c, walks)
    blocks = -(-c // wide)
    whole = -(-n * columns // lanes) * blocks  # programs, if a strip were an image
    wanted = max(-(-rows // walks.rows), -(-walks.programs // whole))
    high = max(min(LEAST_ROWS, rows), -(-rows // wanted))
    found = -(-rows // high)
    return n * found * columns, found, high, blocks


def _turned(w: Tensor) -> tuple[int, ...]:
    """Where the taps of weights are: strides, and the place of the first one, from the last to the first."""
    channel, _, row, column = w.stride()
    return channel, -row, -column, (w.shape[2] - 1) * (row + column)


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, turned: bool = False) -> Tensor:
    """Convolution of images (n, h, w, c) with the weights, or with the weights turned round."""
    n, h, wide, c = x.shape
    k, oh, ow = w.shape[2], (h - 1) // stride + 1, (wide - 1) // stride + 1
    y = empty_images(n, c, oh, ow, x.device)
    v, block, lanes = _blocks(c, FORWARD)
    plan = strips(n, c, oh, ow, FORWARD)
    places = _turned(w) if turned else (w.stride(0), w.stride(2), w.stride(3), 0)
    _forward_kernel[(triton.cdiv(plan[0], lanes) * plan[3],)](
        x, w, w if bias is None else bias, y, *plan, c // v, h, wide, oh, ow, *places,
        v, k, stride, _ahead(c, k, stride, FORWARD), lanes, block, bias is not None, num_warps=FORWARD.warps,
    )  # fmt: skip
    return y


def _input_gradient(dy: Tensor, w: Tensor, shape: torch.Size, stride: int) -> Tensor:
    """Gradient of images of the shape (n, c, h, w), from dy (n, h, w, c)."""
    if stride == 1:
        return _convolve(dy, w, None, 1, turned=True)
    n, c, h, wide = shape
    _, oh, ow, _ = dy.shape
    k = w.shape[2]
    dx = empty_images(n, c, h, wide, dy.device)
    v, block, lanes = _blocks(c, STRIDED)
    plan = strips(n, c, (h + 1) // 2, (wide + 1) // 2, STRIDED)
    _strided_kernel[(triton.cdiv(plan[0], lanes) * plan[3],)](
        dy, w, dx, *plan, c // v, h, wide, oh, ow, w.stride(0), w.stride(2), w.stride(3), 0,
        v, k, _ahead(c, k, 1, STRIDED), lanes, block, num_warps=STRIDED.warps,
    )  # fmt: skip
    return dx


def _weight_gradient(x: Tensor, dy: Tensor, w: Tensor, stride: int) -> Tensor:
    """Gradient of the weights, laid out as they are, of images x and dy (n, h, w, c)."""
    n, h, wide, c = x.shape
    _, oh, ow, _ = dy.shape
    k = w.shape[2]
    v, block, lanes = _blocks(c, WEIGHT)
    plan = strips(n, c, oh, ow, WEIGHT)
    tiles = -(-plan[0] // lanes)
    span = -(-tiles // max(1, WEIGHT.programs // plan[3]))
    slabs = -(-tiles // span)
    part = torch.empty((slabs, k * k * c), dtype=torch.float32, device=x.device)
    _weight_kernel[(slabs * plan[3],)](
        x, dy, part, *plan, c // v, h, wide, oh, ow, span,
        v, k, stride, _ahead(c, k, stride, WEIGHT), lanes, block, num_warps=WEIGHT.warps,
    )  # fmt: skip
    return summed(part, w, 1, c)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        with on(x):
            images = nhwc(x)
            ctx.save_for_backward(images, w)
            ctx.rest = (x.shape, stride)
            return _convolve(images, w, bias, stride)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        images, w = ctx.saved_tensors
        shape, stride = ctx.rest
        with on(dy):
            rows = nhwc(dy.bfloat16())
            dx = _input_gradient(rows, w, shape, stride) if ctx.needs_input_grad[0] else None
            dw = _weight_gradient(images, rows, w, stride) if ctx.needs_input_grad[1] else None
            db = rows.sum(dim=(0, 1, 2), dtype=torch.float32) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """3x3 or 5x5 convolution of each channel for itself, padded by half, of stride 1 or 2; see conv2d."""
    out: Tensor = _Depthwise.apply(x, weight, bias, stride)
    return out
