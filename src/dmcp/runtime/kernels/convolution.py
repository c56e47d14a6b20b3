"""Convolutions of few channels as Triton kernels: products with a matrix of patches that is never stored (im2col).

Images are bfloat16 in NHWC order; weights and sums are float32. A row m of the matrix is an output pixel, a column k is
one element under the filter, in the order (filter row, filter column, channel). In NHWC a filter row of a patch is
contiguous, and blocks of k need not end where a tap ends, so odd widths waste little.

A pruner makes new widths all the time, so widths and sizes are arguments of a kernel, not constants: it is compiled
for V alone, the vector length that divides the width C, and is given CV = C // V, which tells Triton what divides C.
Divisions by arguments are multiplications by MAGIC and a shift.
"""

# ruff: noqa: N803, N806, RUF005 (arguments of kernels are written in capitals; kernels add tuples by + alone, and they grow)
# mypy: disable-error-code="assignment"
from __future__ import annotations

import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter has no bfloat16 products: float32 there
MOST_CHANNELS = 64
PIXELS = 128  # of a program
UNROLLED = 288  # loops over patches of up to so many elements are unrolled, if the vectors are full
WEIGHT_PIXELS = 64  # in a step of the weight gradient
WEIGHT_PROGRAMS = 528  # four for each multiprocessor of an H200
WEIGHT_SUMS = 12288  # most elements that a program accumulates
WEIGHT_PARTIALS = 2**20  # most elements of all partial sums
INTS = [  # no value of these arguments compiles another program
    "M", "SPAN", "SLABS", "C", "CO", "CV", "COV", "CIV", "MAGIC", "SHIFT", "K", "S", "P", "H", "W", "OH", "OW", "HALF",
    "AREA", "AREA_MAGIC", "AREA_SHIFT", "ROW_MAGIC", "ROW_SHIFT", "TAPS", "LOG", "FLIP_LOG", "SIZE", "FLIP_SIZE",
    "s_out", "s_in", "s_row", "s_column",
]  # fmt: skip


# kernels


@triton.jit
def _quotient(n, MAGIC, SHIFT):
    """n // d for 0 <= n < 2**31, with MAGIC and SHIFT of divider(d)."""
    high = tl.umulhi(n.to(tl.uint32) * 2, MAGIC.to(tl.uint32, bitcast=True))
    return (high >> SHIFT.to(tl.uint32)).to(tl.int32)


@triton.jit
def _tap(k, MAGIC, SHIFT, V: tl.constexpr):
    """Tap of the elements k of a patch, with MAGIC and SHIFT of small_divider(C // V)."""
    return ((k // V) * MAGIC) >> SHIFT


@triton.jit
def _corner(m, S, P, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT):
    """Image, and top row and left column under the filter, of output pixels."""
    image = _quotient(m, AREA_MAGIC, AREA_SHIFT)
    rest = m - image * AREA
    row = _quotient(rest, ROW_MAGIC, ROW_SHIFT)
    return image, row * S - P, (rest - row * OW) * S - P


@triton.jit
def _taps(top, left, live, H, W, K):
    """Bit mask of the taps that are inside of the image. (pixels,) -> (pixels,)"""
    columns = tl.where(left >= 0, 7, 6) & tl.where(left + 2 < W, 7, 3)
    rows = tl.where(top >= 0, 511, 504) & tl.where(top + 2 < H, 511, 63)
    return tl.where(live, rows & (columns * 73) & tl.where(K == 1, 1, 511), 0)


@triton.jit
def _patches(x, base, bits, k, JUMP, MAGIC, SHIFT, V: tl.constexpr):
    """Elements k of the patches of some pixels, zero outside of the image. (pixels,), (depth,) -> (pixels, depth)"""
    tap = _tap(k, MAGIC, SHIFT, V)
    offset = k + ((tap * 11) >> 5) * JUMP  # tap // 3: a filter row is contiguous
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


@triton.jit(do_not_specialize=INTS)
def _matrices_kernel(
    w, to, C, CO, TAPS, s_out, s_in, s_row, s_column, LOG, FLIP_LOG, SIZE, FLIP_SIZE, BE: tl.constexpr
):
    """The weights as a bfloat16 matrix (elements of a patch, outputs), padded by zeros.

    program_id(1) == 1 writes the matrix of the input gradient: flipped, with inputs and outputs swapped.
    """
    flip = tl.program_id(1)
    log = tl.where(flip == 0, LOG, FLIP_LOG)
    size = tl.where(flip == 0, SIZE, FLIP_SIZE)
    c = tl.where(flip == 0, C, CO)
    outputs = tl.where(flip == 0, CO, C)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    k = e >> log
    out = e & ((1 << log) - 1)
    tap = k // c
    channel = k % c
    inside = (tap < TAPS) & (out < outputs)
    tap = tl.where(flip == 0, tap, TAPS - 1 - tap)
    at = (tap // 3) * s_row + (tap % 3) * s_column
    at += channel * tl.where(flip == 0, s_in, s_out) + out * tl.where(flip == 0, s_out, s_in)
    tl.store(to + flip * SIZE + e, tl.load(w + at, mask=inside, other=0.0).to(tl.bfloat16), mask=e < size)


@triton.jit(do_not_specialize=INTS)
def _forward_kernel(
    x, w, bias, y, M, CV, COV, MAGIC, SHIFT,
    K, S, P, H, W, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT,
    V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
    STEPS: tl.constexpr, BIAS: tl.constexpr, F32: tl.constexpr,
):  # fmt: skip
    """All output channels of BM output pixels; STEPS: of the unrolled loop, 0: not unrolled."""
    C = CV * V
    CO = COV * VO
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    out = tl.arange(0, BO)
    live = m < M
    image, top, left = _corner(m, S, P, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT)
    base = ((image * H + top) * W + left) * C
    bits = _taps(top, left, live, H, W, K)
    jump = (W - K) * C
    total = K * K * C
    step = tl.arange(0, BK)
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
    else:  # narrow loads cannot be asynchronous copies, so the next ones are prefetched to registers
        a = _patches(x, base, bits, step, jump, MAGIC, SHIFT, V)
        b = tl.load(matrix)
        for start in range(BK, total, BK):
            next_a = _patches(x, base, bits, start + step, jump, MAGIC, SHIFT, V)
            next_b = tl.load(matrix + start * BO)
            acc = _times(a, b, acc, F32)
            a = next_a
            b = next_b
        acc = _times(a, b, acc, F32)
    if BIAS:
        acc += tl.load(bias + out, mask=out < CO, other=0.0)[None, :]
    tl.store(y + (m[:, None] * CO + out[None, :]), acc.to(tl.bfloat16), mask=live[:, None] & (out < CO)[None, :])


@triton.jit(do_not_specialize=INTS)
def _strided_kernel(
    dy, w, dx, M, CV, CIV, MAGIC, SHIFT, K, H, W, OH, OW, HALF, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT,
    V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, F32: tl.constexpr,
):  # fmt: skip
    """Input gradient of stride 2; program_id(1) is the parity of rows and columns, which decides their taps.

    An even row 2i was read by output row i at tap 1; an odd one by i + 1 at tap 0 and by i at tap 2. A 1x1 filter
    reads even rows and columns only.
    """
    C = CV * V
    CI = CIV * VO
    kind = tl.program_id(1)
    odd_row = kind // 2
    odd_column = kind % 2
    m = tl.program_id(0) * BM + tl.arange(0, BM)  # over the even pixels: no parity has more
    image, i, j = _corner(m, 1, 0, HALF, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT)
    row = 2 * i + odd_row
    column = 2 * j + odd_column
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
        # 1: from the next output pixel
        down = odd_row - (tap >> odd_column)
        right = odd_column - (tap & odd_column)
        inside = (k < depth)[None, :] & (i[:, None] + down[None, :] < OH) & (j[:, None] + right[None, :] < OW)
        shift = (down * OW + right) * C + channel
        a = tl.load(dy + (base[:, None] + shift[None, :]), mask=live[:, None] & inside, other=0.0)
        flipped = (1 + odd_row - 2 * (odd_row - down)) * 3 + 1 + odd_column - 2 * (odd_column - right)
        flipped = tl.where(K == 1, 0, flipped)  # the matrix is flipped
        at = tl.where(k < depth, flipped * C + channel, 0) * BO
        acc = _times(a, tl.load(w + (at[:, None] + out[None, :])), acc, F32)
    to = ((image * H + row) * W + column)[:, None] * CI + out[None, :]
    tl.store(dx + to, acc.to(tl.bfloat16), mask=live[:, None] & (out < CI)[None, :])


@triton.jit(do_not_specialize=INTS)
def _weight_kernel(
    x, dy, part, M, SPAN, CV, COV, MAGIC, SHIFT,
    K, S, P, H, W, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT,
    V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
    PARTS: tl.constexpr, F32: tl.constexpr,
):  # fmt: skip
    """Partial weight gradient of SPAN output pixels: patches^T dy, for PARTS blocks of patches."""
    C = CV * V
    CO = COV * VO
    jump = (W - K) * C
    total = K * K * C
    slab = tl.program_id(0)
    out = tl.arange(0, BO)
    k = tl.program_id(1) * (PARTS * BK) + tl.arange(0, BK)
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros((BK, BO), tl.float32),)
    for start in range(0, SPAN, BM):
        m = slab * SPAN + start + tl.arange(0, BM)
        live = m < M
        image, top, left = _corner(m, S, P, OW, AREA, AREA_MAGIC, AREA_SHIFT, ROW_MAGIC, ROW_SHIFT)
        base = ((image * H + top) * W + left) * C
        bits = _taps(top, left, live, H, W, K)
        g = tl.load(dy + (m[:, None] * CO + out[None, :]), mask=live[:, None] & (out < CO)[None, :], other=0.0)
        blocks = ()
        next_sums = ()
        for i in tl.static_range(PARTS):  # all loads first: their latencies overlap
            blocks = blocks + (_patches(x, base, bits, k + i * BK, jump, MAGIC, SHIFT, V),)
        for i in tl.static_range(PARTS):
            next_sums = next_sums + (_times(tl.trans(blocks[i]), g, sums[i], F32),)
        sums = next_sums
    to = part + slab * (total * CO)
    for i in tl.static_range(PARTS):
        at = k + i * BK
        tl.store(to + (at[:, None] * CO + out[None, :]), sums[i], mask=(at < total)[:, None] & (out < CO)[None, :])


@triton.jit(do_not_specialize=INTS)
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
    tap = k // C
    channel = k % C
    to = dw + ((e % CO) * s_out + channel * s_in + (tap // K) * s_row + (tap % K) * s_column)
    tl.store(to, tl.sum(acc, axis=0), mask=e < size)


# launches


def nhwc(x: Tensor) -> Tensor:
    """NCHW images in NHWC order; no copy where they are channels_last."""
    return x.permute(0, 2, 3, 1).contiguous()


def empty_images(n: int, c: int, h: int, w: int, device: torch.device) -> Tensor:
    """Uninitialized channels_last images, also where sizes of 1 leave the strides open.

    Not a view: autograd allows in-place changes of what a layer returns.
    """
    return torch.empty_strided((n, c, h, w), (h * w * c, 1, w * c, c), dtype=torch.bfloat16, device=device)


def _wide(channels: int) -> int:
    return max(16, 1 << (channels - 1).bit_length())


def vector(channels: int, most: int = 4) -> int:
    """Elements of a load: 8 where that divides the width, else the largest of 4, 2, 1 that does, up to `most`."""
    divisor = math.gcd(channels, 8)
    if divisor == 8:
        return 8
    return min(divisor, most)


def divider(d: int) -> tuple[int, int]:
    """MAGIC (as a signed number) and SHIFT for _quotient."""
    shift = (d - 1).bit_length()
    factor = -(-(2 ** (31 + shift)) // d)
    if factor >= 2**31:
        factor -= 2**32
    return factor, shift


def small_divider(d: int) -> tuple[int, int]:
    """MAGIC and SHIFT for n * MAGIC >> SHIFT == n // d, for n < 2**15."""
    shift = 15 + d.bit_length()
    return 2**shift // d + 1, shift


def _geometry(k: int, stride: int, h: int, wide: int, oh: int, ow: int) -> tuple[int, ...]:
    """The arguments of kernels from K to ROW_SHIFT."""
    return (k, stride, k // 2, h, wide, ow, oh * ow, *divider(oh * ow), *divider(ow))


def matrices(w: Tensor) -> tuple[Tensor, Tensor]:
    """The weights as matrices for the output and for the input gradient. -> (elements of a patch, outputs), padded"""
    c_out, c, k, _ = w.shape
    widths = (_wide(c_out), _wide(c))  # outputs of both matrices, padded
    logs = [width.bit_length() - 1 for width in widths]
    sizes = []
    for channels, width in zip((c, c_out), widths, strict=True):
        rows = -(-channels * k * k // 64) * 64 + 64
        sizes.append(rows * width)
    both = torch.empty(sum(sizes), dtype=torch.bfloat16, device=w.device)
    _matrices_kernel[(triton.cdiv(max(sizes), 1024), 2)](w, both, c, c_out, k * k, *w.stride(), *logs, *sizes, 1024)
    return both[: sizes[0]], both[sizes[0] :]


def forward_plan(c: int, k: int) -> tuple[int, int, int]:
    """Elements of a patch in a step of the loop, unrolled steps (0: a loop), and stages of the pipeline."""
    total = c * k * k
    depth = 32
    if total <= 224:
        depth = 16
    if c % 8:
        return depth, 0, 1
    if total > UNROLLED:
        return 64, 0, 3
    steps = -(-total // depth)
    for count in (5, 9, 14):  # few programs for all widths
        if count >= steps:
            return depth, count, 3
    return depth, steps, 3


def convolve(x: Tensor, matrix: Tensor, c_out: int, w: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Convolution of images (n, h, w, c) with one of the matrices of the weights w."""
    n, h, wide, c = x.shape
    k = w.shape[2]
    oh = (h - 1) // stride + 1
    ow = (wide - 1) // stride + 1
    y = empty_images(n, c_out, oh, ow, x.device)
    depth, steps, stages = forward_plan(c, k)
    m = n * oh * ow
    v = vector(c)
    vo = vector(c_out, 1)
    warps = 4
    if v == 1:
        warps = 8
    any_bias = w  # a kernel without a bias is given any tensor in its place
    if bias is not None:
        any_bias = bias
    _forward_kernel[(triton.cdiv(m, PIXELS),)](
        x, matrix, any_bias, y, m, c // v, c_out // vo, *small_divider(c // v),
        *_geometry(k, stride, h, wide, oh, ow),
        v, vo, PIXELS, depth, _wide(c_out), steps, bias is not None, INTERPRET,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def input_gradient(dy: Tensor, w: Tensor, shape: torch.Size, stride: int, matrix: Tensor) -> Tensor:
    """Gradient of images of the shape (n, c, h, w), from dy (n, h, w, c) and the second matrix of the weights w."""
    n, c_in, h, wide = shape
    if stride == 1:
        return convolve(dy, matrix, c_in, w, None, 1)
    dx = empty_images(n, c_in, h, wide, dy.device)
    _, oh, ow, c = dy.shape
    up = (h + 1) // 2
    half = (wide + 1) // 2
    m = n * up * half
    v = vector(c)
    vo = vector(c_in, 1)
    _strided_kernel[(triton.cdiv(m, PIXELS), 4)](
        dy, matrix, dx, m, c // v, c_in // vo, *small_divider(c // v),
        w.shape[2], h, wide, oh, ow, half, up * half, *divider(up * half), *divider(half),
        v, vo, PIXELS, 32, _wide(c_in), INTERPRET,
    )  # fmt: skip
    return dx


def weight_plan(c: int, k: int, c_out: int, m: int) -> tuple[int, ...]:
    """Pixels of a step, elements of a block of patches, blocks of a program, groups of blocks, slabs, their pixels."""
    total = c * k * k
    depth = 64
    if c % 8:
        depth = 16
    pixels = WEIGHT_PIXELS
    if c % 2:
        pixels = WEIGHT_PIXELS // 2  # loads of odd widths need more registers
    steps = -(-total // depth)

    # Blocks of a program: few kinds of programs for all widths.
    most = WEIGHT_SUMS // (depth * _wide(c_out))
    parts = 3
    if c % 8 == 0 and most > 3 and -steps % 4 < -steps % 3:
        parts = 4
    if c == 1 or (c % 8 == 0 and steps == 1) or most < 3:
        parts = 1
    groups = -(-steps // parts)
    slabs = min(WEIGHT_PROGRAMS // groups, WEIGHT_PARTIALS // (total * c_out), -(-m // pixels))
    span = -(-m // max(1, slabs) // pixels) * pixels  # whole blocks, rounded up
    return pixels, depth, parts, groups, -(-m // span), span


def weight_gradient(x: Tensor, dy: Tensor, w: Tensor, stride: int) -> Tensor:
    """Gradient of the weights w, in their layout, from images x and dy (n, h, w, c)."""
    n, h, wide, c = x.shape
    _, oh, ow, c_out = dy.shape
    k = w.shape[2]
    m = n * oh * ow
    pixels, depth, parts, groups, slabs, span = weight_plan(c, k, c_out, m)
    part = torch.empty((slabs, k * k * c * c_out), dtype=torch.float32, device=x.device)
    v = vector(c)
    vo = vector(c_out, 2)
    _weight_kernel[(slabs, groups)](
        x, dy, part, m, span, c // v, c_out // vo, *small_divider(c // v), *_geometry(k, stride, h, wide, oh, ow),
        v, vo, pixels, depth, _wide(c_out), parts, INTERPRET, num_stages=2,
    )  # fmt: skip
    return summed(part, w, c, c_out)


def summed(part: Tensor, w: Tensor, c: int, c_out: int) -> Tensor:
    """The sum of partial sums (slabs, elements of a patch * outputs), in the layout of the weights w."""
    dw = torch.empty_like(w)
    slabs, size = part.shape
    rows = 16
    block = 128
    if slabs > 16:
        rows = 64
        block = 32
    vs = math.gcd(size, 4)
    _sum_kernel[(triton.cdiv(size, block),)](
        part, dw, slabs, *dw.stride(), w.shape[3], c, c_out, size // vs, vs, rows, block
    )
    return dw
