"""The Triton kernels of convolution: products with a matrix of patches that is never stored.

Row m is an output pixel, column k is one number under the kernel, in the order (kernel row, kernel column, channel);
k runs over K * K * channels. With NHWC storage a kernel row of a patch is one contiguous piece, and blocks of k need
not end where a tap ends, so odd widths waste little. Widths and sizes are numbers that a kernel is given, so few
programs serve all of them: it is compiled for V only, the numbers of a vector that divides the width, and is given
C // V, so that Triton knows what divides C. Divisions are multiplications by numbers that the caller computes.
"""

# ruff: noqa: N803, N806 (numbers that a kernel is given are written in capitals)
from __future__ import annotations

import triton
import triton.language as tl

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
