"""Depthwise convolutions as Triton kernels: bfloat16 images in NHWC order, weights and sums in float32.

A program has a block of channels and some lanes. A lane is one column of a strip of rows, and walks down its rows: each
row is loaded once for every filter column, and its products are added to the output rows that it is under. So an
element is read from memory about once, and from the cache by its neighbours. Several rows are loaded at a time, so that
their latencies overlap. As in convolution.py, widths and sizes are arguments of the kernels.
"""

# ruff: noqa: N803, N806, RUF005 (arguments of kernels are written in capitals; kernels add tuples by + alone, and they grow)
# mypy: disable-error-code="assignment"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmcp.runtime.kernels.convolution import empty_images, summed

SIZES = (3, 5)
CHANNELS = 32  # of a block; half of it where there are no more
FORWARD, STRIDED, WEIGHT = {3: 4, 5: 2}, {3: 2, 5: 1}, {3: 4, 5: 1}  # rows that are loaded at a time, by filter size
LEAST_ROWS, MOST_ROWS, STRIDED_ROWS = 4, 32, 16  # of a strip; its edges must not be most of what is read
ELEMENTS = 512  # of a tile: lanes times channels
PROGRAMS = 1056  # eight for each multiprocessor of an H200: images are cut into strips until there are so many
INTS = [  # no value of these arguments compiles another program
    "LANES", "STRIPS", "ROWS", "BLOCKS", "CV", "H", "W", "OH", "OW", "s_channel", "s_row", "s_column", "FIRST", "SPAN",
]  # fmt: skip


# kernels


@triton.jit
def _lanes(block, LANES, STRIPS, ROWS, WIDTH, BP: tl.constexpr):
    """Image, first row and column of some lanes, and which of them exist. -> four of (BP, 1)"""
    lane = block * BP + tl.arange(0, BP)
    strip, image = (lane // WIDTH) % STRIPS, lane // (WIDTH * STRIPS)
    return image[:, None], (strip * ROWS)[:, None], (lane % WIDTH)[:, None], (lane < LANES)[:, None]


@triton.jit
def _weights(w, c, C, s_channel, s_row, s_column, FIRST, K: tl.constexpr):
    """The taps, rounded to bfloat16. -> K * K of (1, channels)"""
    found = ()
    for tap in tl.static_range(K * K):
        at = w + (FIRST + c * s_channel + (tap // K) * s_row + (tap % K) * s_column)
        found = found + (tl.load(at, mask=c < C, other=0.0).to(tl.bfloat16).to(tl.float32),)
    return found


@triton.jit
def _zeros(COUNT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """A tuple of tiles of zeros."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros((BP, BC), tl.float32),)
    return found


@triton.jit
def _row(x, image, row, left, c, live, H, W, C, K: tl.constexpr):
    """What one row of each lane has under the filter columns, zero outside of the image. -> K tiles"""
    live = live & (row >= 0) & (row < H)
    base = ((image * H + row) * W + left) * C + c
    found = ()
    for k in tl.static_range(K):
        inside = live & (left + k >= 0) & (left + k < W)
        found = found + (tl.load(x + (base + k * C), mask=inside, other=0.0),)
    return found


@triton.jit(do_not_specialize=INTS)
def _forward_kernel(
    x, w, bias, y, LANES, STRIPS, ROWS, BLOCKS, CV, H, W, OH, OW, s_channel, s_row, s_column, FIRST,
    V: tl.constexpr, K: tl.constexpr, S: tl.constexpr, U: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Output of some lanes; with flipped weights (FIRST: the last tap) the input gradient of stride 1."""
    P: tl.constexpr = K // 2
    C = CV * V  # tells Triton what divides it
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
        sums = _zeros(K, BP, BC)  # of the output rows that the next input row is under
        for start in range(0, ROWS + K - 1, U):
            rows = ()
            for u in tl.static_range(U):  # all loads first: their latencies overlap
                rows = rows + (_row(x, image, first - P + start + u, left, c, live, H, W, C, K),)
            for u in tl.static_range(U):
                sums = _below(sums, rows[u], taps, K)
                row = first + start + u - 2 * P
                done = live & (row >= first) & (row < first + ROWS) & (row < OH)
                tl.store(to + row * (OW * C), (sums[0] + shift).to(tl.bfloat16), mask=done)
                sums = _rest(sums, K) + (tl.zeros_like(sums[0]),)
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
    """Add an input row to the sums of the output rows that see it, from above: the first one with its last taps."""
    found = ()
    for i in tl.static_range(K):
        total = sums[i]
        for k in tl.static_range(K):
            total += row[k].to(tl.float32) * taps[(K - 1 - i) * K + k]
        found = found + (total,)
    return found


@triton.jit
def _at(tiles, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """One tile of some rows of tiles."""
    return tiles[ROW][COLUMN]


@triton.jit(do_not_specialize=INTS)
def _strided_kernel(
    dy, w, dx, LANES, STRIPS, ROWS, BLOCKS, CV, H, W, OH, OW, s_channel, s_row, s_column, FIRST,
    V: tl.constexpr, K: tl.constexpr, U: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Input gradient of stride 2; a lane walks down squares of 2x2 pixels, each of which has taps of its own.

    Output row i + d has read row 2 i + odd at the tap odd + K // 2 - 2 d, where there is one; columns likewise.
    """
    P: tl.constexpr = K // 2
    LEAST: tl.constexpr = -(P // 2)  # the first d, and the number of ds up to 1
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
                        grad = _at(
                            rows, u + (odd // 2 + P - tap // K) // 2 - LEAST, (odd % 2 + P - tap % K) // 2 - LEAST
                        )
                        total += grad.to(tl.float32) * taps[tap]
                row, at = 2 * half + odd // 2, 2 * column + odd % 2
                to = dx + (((image * H + row) * W + at) * C + c)
                tl.store(to, total.to(tl.bfloat16), mask=inside & (row < H) & (at < W))


@triton.jit(do_not_specialize=INTS)
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
            grads = _zeros(K - 1, BP, BC)  # of the output rows above, which the next input row is under, too
            for start in range(0, ROWS + K - 1, U):
                rows, others = (), ()
                for u in tl.static_range(U):
                    row = first + start + u
                    here = live & (row < first + ROWS)
                    others = others + (_row(dy, image, row, column, c, here, OH, OW, C, 1),)
                    rows = rows + (_row(x, image, row - P, left, c, live, H, W, C, K),)
                for u in tl.static_range(U):
                    seen = grads + (others[u][0].to(tl.float32),)
                    sums = _products(sums, rows[u], seen, K)
                    grads = _rest(seen, K)
        else:
            for start in range(ROWS):
                grad = _row(dy, image, first + start, column, c, live, OH, OW, C, 1)[0].to(tl.float32)
                patch = ()
                for k in tl.static_range(K):
                    patch = patch + (_row(x, image, (first + start) * S - P + k, left, c, live, H, W, C, K),)
                found = ()
                for tap in tl.static_range(K * K):
                    found = found + (sums[tap] + grad * patch[tap // K][tap % K].to(tl.float32),)
                sums = found
    for tap in tl.static_range(K * K):
        to = part + ((slab * (K * K) + tap) * C + c)
        tl.store(to, tl.sum(sums[tap], axis=0)[None, :], mask=c < C)


@triton.jit
def _products(sums, row, grads, K: tl.constexpr):
    """Add an input row, times the gradients of the output rows that see it, to the sums of all taps."""
    found = ()
    for tap in tl.static_range(K * K):
        found = found + (sums[tap] + row[tap % K].to(tl.float32) * grads[K - 1 - tap // K],)
    return found


@triton.jit
def _rest(tiles, COUNT: tl.constexpr):
    """Without the first."""
    found = ()
    for i in tl.static_range(1, COUNT):
        found = found + (tiles[i],)
    return found


# launches


def _blocks(c: int) -> tuple[int, int, int]:
    """Elements of a vector, channels of a block and lanes of a tile."""
    wide = CHANNELS if c > CHANNELS // 2 else CHANNELS // 2
    return math.gcd(c, 4), wide, ELEMENTS // wide


def _ahead(c: int, k: int, stride: int, usual: dict[int, int]) -> int:
    """Rows that are loaded at a time: fewer for odd widths, whose loads need more registers."""
    return 1 if stride == 2 else max(1, usual[k] // 2) if c % 2 else usual[k]


def strips(n: int, c: int, rows: int, columns: int, most: int) -> tuple[int, ...]:
    """Lanes, strips of an image, rows of a strip (at most so many), blocks of channels: arguments of the kernels."""
    _, wide, lanes = _blocks(c)
    blocks = -(-c // wide)
    whole = -(-n * columns // lanes) * blocks  # programs, if a strip were an image
    wanted = max(-(-rows // most), -(-PROGRAMS // whole))
    high = max(min(LEAST_ROWS, rows), -(-rows // wanted))
    found = -(-rows // high)
    return n * found * columns, found, high, blocks


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, flipped: bool = False) -> Tensor:
    """Convolution of images (n, h, w, c) with the weights, or with the flipped weights."""
    n, h, wide, c = x.shape
    k, oh, ow = w.shape[2], (h - 1) // stride + 1, (wide - 1) // stride + 1
    y = empty_images(n, c, oh, ow, x.device)
    v, block, lanes = _blocks(c)
    plan = strips(n, c, oh, ow, MOST_ROWS)
    channel, _, row, column = w.stride()
    taps = (channel, -row, -column, (k - 1) * (row + column)) if flipped else (channel, row, column, 0)
    _forward_kernel[(triton.cdiv(plan[0], lanes) * plan[3],)](
        x, w, w if bias is None else bias, y, *plan, c // v, h, wide, oh, ow, *taps,
        v, k, stride, _ahead(c, k, stride, FORWARD), lanes, block, bias is not None,
    )  # fmt: skip
    return y


def input_gradient(dy: Tensor, w: Tensor, shape: torch.Size, stride: int) -> Tensor:
    """Gradient of images of the shape (n, c, h, w), from dy (n, h, w, c)."""
    if stride == 1:
        return convolve(dy, w, None, 1, flipped=True)
    n, c, h, wide = shape
    k, (_, oh, ow, _) = w.shape[2], dy.shape
    dx = empty_images(n, c, h, wide, dy.device)
    v, block, lanes = _blocks(c)
    plan = strips(n, c, (h + 1) // 2, (wide + 1) // 2, STRIDED_ROWS)
    _strided_kernel[(triton.cdiv(plan[0], lanes) * plan[3],)](
        dy, w, dx, *plan, c // v, h, wide, oh, ow, w.stride(0), w.stride(2), w.stride(3), 0,
        v, k, _ahead(c, k, 1, STRIDED), lanes, block,
    )  # fmt: skip
    return dx


def weight_gradient(x: Tensor, dy: Tensor, w: Tensor, stride: int) -> Tensor:
    """Gradient of the weights w, in their layout, from images x and dy (n, h, w, c)."""
    n, h, wide, c = x.shape
    k, (_, oh, ow, _) = w.shape[2], dy.shape
    v, block, lanes = _blocks(c)
    plan = strips(n, c, oh, ow, MOST_ROWS)
    tiles = -(-plan[0] // lanes)
    span = -(-tiles // max(1, PROGRAMS // plan[3]))
    slabs = -(-tiles // span)
    part = torch.empty((slabs, k * k * c), dtype=torch.float32, device=x.device)
    _weight_kernel[(slabs * plan[3],)](
        x, dy, part, *plan, c // v, h, wide, oh, ow, span,
        v, k, stride, _ahead(c, k, stride, WEIGHT), lanes, block,
    )  # fmt: skip
    return summed(part, w, 1, c)
