"""3x3 and 1x1 convolutions with few channels, in Triton."""
# ruff: noqa: N803, N806 (numbers that a kernel is given are written in capitals)

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

GEOMETRY = ["K", "S", "P", "H", "W", "OW", "AREA", "AREA_MAGIC", "AREA_SHIFT", "ROW_MAGIC", "ROW_SHIFT"]
WIDTHS = ["M", "CV", "MAGIC", "SHIFT"]
FORWARD_INTS = [*WIDTHS, *GEOMETRY, "COV"]  # no value of these makes another program
STRIDED_INTS = [*WIDTHS, *GEOMETRY, "CIV", "OH", "HALF"]
MATRIX_INTS = ["C", "CO", "TAPS", "s_out", "s_in", "s_row", "s_column", "LOG", "FLIP_LOG", "SIZE", "FLIP_SIZE"]
WEIGHT_INTS = [*WIDTHS, *GEOMETRY, "COV", "SPAN"]


@triton.jit
def _quotient(n, MAGIC, SHIFT):
    """n // d for 0 <= n < 2**31, by the numbers that divider(d) gives."""
    high = tl.umulhi(n.to(tl.uint32) * 2, MAGIC.to(tl.uint32, bitcast=True))
    return (high >> SHIFT.to(tl.uint32)).to(tl.int32)


@triton.jit
def _tap(k, MAGIC, SHIFT, V: tl.constexpr):
    """Tap of the numbers k of a patch, by the numbers that small_divider(C // V) gives: the same for V neighbours."""
    return ((k // V) * MAGIC) >> SHIFT


@triton.jit
def _corner(m, S, P, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT):
    """Image, and first row and column under the kernel, of output pixels."""
    image = _quotient(m, AREA_MAGIC, AREA_SHIFT)
    rest = m - image * AREA
    row = _quotient(rest, ROW_MAGIC, ROW_SHIFT)
    return image, row * S - P, (rest - row * OW) * S - P


@triton.jit
def _taps(top, left, live, H, W, K):
    """Bit t says whether tap t of a pixel is inside of the image. (pixels,) -> (pixels,)"""
    columns = tl.where(left >= 0, 7, 6) & tl.where(left + 2 < W, 7, 3)
    rows = tl.where(top >= 0, 511, 504) & tl.where(top + 2 < H, 511, 63)
    return tl.where(live, rows & (columns * 73) & tl.where(K == 1, 1, 511), 0)


@triton.jit
def _patches(x, base, bits, k, JUMP, MAGIC, SHIFT, V: tl.constexpr):
    """Some numbers of the patches of some pixels, zero outside of the image. (pixels,), (depth,) -> both"""
    tap = _tap(k, MAGIC, SHIFT, V)
    offset = k + ((tap * 11) >> 5) * JUMP  # tap // 3: within a kernel row the numbers are neighbours
    inside = ((bits[:, None] >> tap[None, :]) & 1) != 0
    return tl.load(x + (base[:, None] + offset[None, :]), mask=inside, other=0.0)


@triton.jit
def _times(a, b, acc, F32: tl.constexpr):
    """acc + a b"""
    if F32:
        acc += tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit(do_not_specialize=MATRIX_INTS)
def _matrices_kernel(
    w, to, C, CO, TAPS, s_out, s_in, s_row, s_column, LOG, FLIP_LOG, SIZE, FLIP_SIZE, BE: tl.constexpr
):
    """The weights as a bfloat16 matrix (numbers of a patch, outputs), padded by zeros, and flipped for the gradient.

    program_id(1) is 0 for the first, 1 for the second, in which inputs and outputs change places.
    """
    flip = tl.program_id(1)
    log, size = tl.where(flip == 0, LOG, FLIP_LOG), tl.where(flip == 0, SIZE, FLIP_SIZE)
    c, outputs = tl.where(flip == 0, C, CO), tl.where(flip == 0, CO, C)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    k, out = e >> log, e & ((1 << log) - 1)
    tap, channel = k // c, k % c
    known = (tap < TAPS) & (out < outputs)
    tap = tl.where(flip == 0, tap, TAPS - 1 - tap)
    at = (tap // 3) * s_row + (tap % 3) * s_column
    at += channel * tl.where(flip == 0, s_in, s_out) + out * tl.where(flip == 0, s_out, s_in)
    tl.store(to + flip * SIZE + e, tl.load(w + at, mask=known, other=0.0).to(tl.bfloat16), mask=e < size)


@triton.jit(do_not_specialize=FORWARD_INTS)
def _forward_kernel(
    x, w, bias, y, M, CV, COV, MAGIC, SHIFT,
    K, S, P, H, W, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT,
    V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
    STEPS: tl.constexpr, BIAS: tl.constexpr, F32: tl.constexpr,
):  # fmt: skip
    """All output channels of BM output pixels; STEPS: written out, 0: a loop."""
    C, CO = CV * V, COV * VO
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    out = tl.arange(0, BO)
    live = m < M
    image, top, left = _corner(m, S, P, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT)
    base = ((image * H + top) * W + left) * C
    bits = _taps(top, left, live, H, W, K)
    jump, total, step = (W - K) * C, K * K * C, tl.arange(0, BK)
    matrix = w + (step[:, None] * BO + out[None, :])
    acc = tl.zeros((BM, BO), tl.float32)
    if STEPS > 0:
        for start in tl.static_range(0, STEPS * BK, BK):
            a = _patches(x, base, bits, start + step, jump, MAGIC, SHIFT, V)
            acc = _times(a, tl.load(matrix + start * BO), acc, F32)
    elif V == 8:
        for start in range(0, total, BK):
            a = _patches(x, base, bits, start + step, jump, MAGIC, SHIFT, V)
            acc = _times(a, tl.load(matrix + start * BO), acc, F32)
    else:  # loads of few bytes cannot go past the registers, so the next ones are kept there
        a = _patches(x, base, bits, step, jump, MAGIC, SHIFT, V)
        b = tl.load(matrix)
        for start in range(BK, total, BK):
            next_a = _patches(x, base, bits, start + step, jump, MAGIC, SHIFT, V)
            next_b = tl.load(matrix + start * BO)
            acc = _times(a, b, acc, F32)
            a, b = next_a, next_b
        acc = _times(a, b, acc, F32)
    if BIAS:
        acc += tl.load(bias + out, mask=out < CO, other=0.0)[None, :]
    tl.store(y + (m[:, None] * CO + out[None, :]), acc.to(tl.bfloat16), mask=live[:, None] & (out < CO)[None, :])


@triton.jit(do_not_specialize=STRIDED_INTS)
def _strided_kernel(
    dy, w, dx, M, CV, CIV, MAGIC, SHIFT, K, H, W, OH, OW, HALF, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT,
    V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, F32: tl.constexpr,
):  # fmt: skip
    """Input gradient of stride 2; program_id(1) says whether rows and columns are odd, and so which taps they have.

    An even row 2i was read by output row i at tap 1; an odd one by i + 1 at tap 0 and by i at tap 2. A 1x1 kernel
    reads even rows and columns only.
    """
    C, CI = CV * V, CIV * VO
    kind = tl.program_id(1)
    odd_row, odd_column = kind // 2, kind % 2
    m = tl.program_id(0) * BM + tl.arange(0, BM)  # over the even pixels; the odd ones are as many, or fewer
    image, i, j = _corner(m, 1, 0, HALF, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT)
    row, column = 2 * i + odd_row, 2 * j + odd_column
    live = (m < M) & (row < H) & (column < W)
    out = tl.arange(0, BO)
    depth = C * (1 + odd_row) * (1 + odd_column)
    depth = tl.where((K == 1) & (kind > 0), 0, depth)
    base = ((image * OH + i) * OW + j) * C
    acc = tl.zeros((BM, BO), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        tap = _tap(k, MAGIC, SHIFT, V)
        channel = k - tap * C
        down, right = odd_row - (tap >> odd_column), odd_column - (tap & odd_column)  # 1: from the next output pixel
        inside = (k < depth)[None, :] & (i[:, None] + down[None, :] < OH) & (j[:, None] + right[None, :] < OW)
        shift = (down * OW + right) * C + channel
        a = tl.load(dy + (base[:, None] + shift[None, :]), mask=live[:, None] & inside, other=0.0)
        flipped = (1 + odd_row - 2 * (odd_row - down)) * 3 + 1 + odd_column - 2 * (odd_column - right)
        flipped = tl.where(K == 1, 0, flipped)  # the matrix holds tap t in the place of the last but t
        at = tl.where(k < depth, flipped * C + channel, 0) * BO
        acc = _times(a, tl.load(w + (at[:, None] + out[None, :])), acc, F32)
    to = ((image * H + row) * W + column)[:, None] * CI + out[None, :]
    tl.store(dx + to, acc.to(tl.bfloat16), mask=live[:, None] & (out < CI)[None, :])


@triton.jit(do_not_specialize=WEIGHT_INTS)
def _weight_kernel(
    x, dy, part, M, SPAN, CV, COV, MAGIC, SHIFT,
    K, S, P, H, W, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT,
    V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
    PARTS: tl.constexpr, F32: tl.constexpr,
):  # fmt: skip
    """Partial weight gradient of SPAN output pixels: patches^T dy, for PARTS (at most four) blocks of patches."""
    C, CO = CV * V, COV * VO
    jump, total = (W - K) * C, K * K * C
    slab = tl.program_id(0)
    out = tl.arange(0, BO)
    k = tl.program_id(1) * (PARTS * BK) + tl.arange(0, BK)
    acc0 = tl.zeros((BK, BO), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for start in range(0, SPAN, BM):
        m = slab * SPAN + start + tl.arange(0, BM)
        live = m < M
        image, top, left = _corner(m, S, P, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT)
        base = ((image * H + top) * W + left) * C
        bits = _taps(top, left, live, H, W, K)
        g = tl.load(dy + (m[:, None] * CO + out[None, :]), mask=live[:, None] & (out < CO)[None, :], other=0.0)
        a0 = _patches(x, base, bits, k, jump, MAGIC, SHIFT, V)  # all loads first: they wait together
        a1, a2, a3 = a0, a0, a0
        if PARTS > 1:
            a1 = _patches(x, base, bits, k + BK, jump, MAGIC, SHIFT, V)
            a2 = _patches(x, base, bits, k + 2 * BK, jump, MAGIC, SHIFT, V)
        if PARTS > 3:
            a3 = _patches(x, base, bits, k + 3 * BK, jump, MAGIC, SHIFT, V)
        acc0 = _times(tl.trans(a0), g, acc0, F32)
        if PARTS > 1:
            acc1 = _times(tl.trans(a1), g, acc1, F32)
            acc2 = _times(tl.trans(a2), g, acc2, F32)
        if PARTS > 3:
            acc3 = _times(tl.trans(a3), g, acc3, F32)
    to = part + slab * (total * CO)
    _put(to, acc0, k, out, total, CO)
    if PARTS > 1:
        _put(to, acc1, k + BK, out, total, CO)
        _put(to, acc2, k + 2 * BK, out, total, CO)
    if PARTS > 3:
        _put(to, acc3, k + 3 * BK, out, total, CO)


@triton.jit
def _put(to, acc, k, out, total, CO):
    tl.store(to + (k[:, None] * CO + out[None, :]), acc, mask=(k < total)[:, None] & (out < CO)[None, :])


@triton.jit(do_not_specialize=["SLABS", "s_out", "s_in", "s_row", "s_column", "K", "C", "CO", "SIZE"])
def _sum_kernel(
    part, dw, SLABS, s_out, s_in, s_row, s_column, K, C, CO, SIZE,
    V: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of BE weights, in a fixed order."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    size = SIZE * V
    acc = tl.zeros((BS, BE), tl.float32)
    for start in range(0, SLABS, BS):
        slab = start + tl.arange(0, BS)
        where = (slab < SLABS)[:, None] & (e < size)[None, :]
        acc += tl.load(part + (slab[:, None] * size + e[None, :]), mask=where, other=0.0)
    k = e // CO
    tap, channel = k // C, k % C
    to = dw + ((e % CO) * s_out + channel * s_in + (tap // K) * s_row + (tap % K) * s_column)
    tl.store(to, tl.sum(acc, axis=0), mask=e < size)


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
