"""How ops that move, split, join or pick entries pass channels on; zeros stay zeros, unless a rule says otherwise."""

from __future__ import annotations

import math

import torch

from dmcp.tracing.layout import Layout, fixed
from dmcp.tracing.ops import Call, Dims, Flow, Literal, regroup, unknown


def reshape(call: Call) -> list[Dims]:
    """Dims multiplied and factored."""
    if call.op.func._overloadname == "dtype":
        return same(call)
    out = regroup(call.channels, call.x.dims, call.out_shapes[0])
    for argument in {"size", "shape"} & call.arguments.keys():
        call.follows(argument, out)
    if call.op.name == "unflatten":
        dim = call["dim"] % len(call.x.dims)
        call.follows("sizes", out[dim : dim + len(call["sizes"])])
    return [out]


def permute(call: Call) -> list[Dims]:
    """Dims in another order: torch's own, of a tensor whose sizes are the numbers of its dims."""
    numbered = torch.empty(tuple(range(len(call.x.dims))), device="meta")
    order = call.op.func(numbered, *call.op.args[1:], **call.op.kwargs).shape
    return [tuple(call.x.dims[dim] for dim in order)]


def repeat(call: Call) -> list[Dims]:
    """Copies of a dim one after another; one grown from size one is new, and takes the meaning of what it meets."""
    shape = call.out_shapes[0]
    out = [fixed(1)] * (len(shape) - len(call.x.dims)) + list(call.x.dims)
    for dim, size in enumerate(shape):
        have = call.channels.size(out[dim])
        if have == 1 and size != 1:
            out[dim] = call.channels.fresh(size)
        elif have != size:
            out[dim] = call.channels.multiply(fixed(size // have), out[dim])
    if call["size"] is not None:
        call.follows("size", out)
    return [tuple(out)]


def repeat_interleave(call: Call) -> list[Dims]:
    """Copies of each entry of a dim."""
    if call["dim"] is None:
        return unknown(call)
    return [_replaced(call, call["dim"], call.channels.multiply(call.x.dims[call["dim"]], fixed(call["repeats"])))]


def _replaced(call: Call, dim: int, layout: Layout) -> Dims:
    """The first operand's dims with one of them changed."""
    dims = list(call.x.dims)
    dims[dim] = layout
    return tuple(dims)


def concatenate(call: Call) -> list[Dims]:
    """One dim is the concatenation, the others are joined."""
    parts = [operand for operand in call["tensors"] if operand.shape != (0,)] or call["tensors"][:1]
    dim = call["dim"] % len(parts[0].dims)
    out = list(parts[0].dims)
    for position in range(len(out)):
        for part in parts[1:]:
            if position == dim:
                out[dim] += part.dims[dim]
            else:
                call.channels.join(out[position], part.dims[position])
    return [tuple(out)]


def stack(call: Call) -> list[Dims]:
    """A new dim of fixed size, the others are joined."""
    out = call.broadcast([operand.dims for operand in call["tensors"]])
    dim = call["dim"] % (len(out) + 1)
    return [(*out[:dim], fixed(len(call["tensors"])), *out[dim:])]


def split(call: Call) -> list[Dims]:
    """Pieces of a dim. Python computes equal pieces as total / n, or names one number twice, so those are joined."""
    dim = call["dim"] % len(call.x.dims)
    sizes = [shape[dim] for shape in call.out_shapes]
    pieces = call.channels.divide(call.x.dims[dim], sizes)
    listed = [name for name in ("split_size", "split_sizes") if isinstance(call[name], (list, tuple))]
    if listed:
        call.follows(listed[0], pieces)
    if len(set(sizes)) == 1:
        for piece in pieces[1:]:
            call.channels.join(pieces[0], piece)
    elif not listed:
        call.fix(call.x.dims[dim], "it is split into unequal pieces by their number")
    if isinstance(call["split_size"], int):
        call.follows("split_size", pieces[:1])
    return [_replaced(call, dim, piece) for piece in pieces]


def unbind(call: Call) -> list[Dims]:
    """Entries of a dim one by one, so the dim is unprunable."""
    dim = call["dim"] % len(call.x.dims)
    call.fix(call.x.dims[dim], "its entries are picked one by one")
    return [(*call.x.dims[:dim], *call.x.dims[dim + 1 :])] * len(call.out_shapes)


def slice_(call: Call) -> list[Dims]:
    """A range of a dim."""
    dim, out_size = call["dim"] % len(call.x.dims), call.out_shapes[0][call["dim"]]
    size = call.x.shape[dim]
    start = call["start"] or 0
    start = min(size, max(0, start + size if start < 0 else start))
    if out_size == size:
        return [call.x.dims]
    if (call["step"] or 1) != 1:
        return [call.fixing([dim], "every n-th entry is taken")]
    pieces = call.channels.divide(call.x.dims[dim], [start, out_size, size - start - out_size])
    if start and call["start"] > 0:
        call.follows("start", pieces[:1])
    elif not start and isinstance(call["end"], int) and 0 < call["end"] < size:
        call.follows("end", pieces[1:2])
    return [_replaced(call, dim, pieces[1])]


def index(call: Call) -> list[Dims]:
    """Entries by a table of indices: those dims are unprunable, the others pass."""
    x, tables = call.x, call["indices"]
    where = [dim for dim, table in enumerate(tables) if table is not None]
    if not where or any(tables[dim].dtype in (torch.bool, torch.uint8) for dim in where):
        return unknown(call)
    for dim in where:
        call.fix(x.dims[dim], "its entries are picked by index")
    shape = call.out_shapes[0]
    rank = len(shape) - (len(x.dims) - len(where))
    together = where == list(range(where[0], where[-1] + 1))
    at = where[0] if together else 0
    rest = [layout for dim, layout in enumerate(x.dims) if dim not in where]
    return [(*rest[:at], *(fixed(size) for size in shape[at : at + rank]), *rest[at:])]


def index_select(call: Call) -> list[Dims]:
    """Entries by a list of indices."""
    return [call.fixing([call["dim"]], "its entries are picked by index")]


def embedding(call: Call) -> list[Dims]:
    """Rows of a table."""
    call.fix(call["weight"].dims[0], "its rows are picked by index")
    return [(*call["indices"].dims, call["weight"].dims[1])]


def pad(call: Call) -> list[Dims]:
    """Zeros around a dim are new channels; with other values the dim is unprunable."""
    plain = call.op.name == "constant_pad_nd" or call["mode"] in (None, "constant")
    zeros = plain and not call["value"]
    call.flow = Flow.PADS if zeros or not plain else Flow.LOSES
    dims, added = list(call.x.dims), list[Literal]()
    for back in range(len(call["pad"]) // 2):
        before, after = call["pad"][2 * back : 2 * back + 2]
        dim = len(dims) - 1 - back
        if not before and not after:
            continue
        if zeros and min(before, after) >= 0 and call.channels.atoms(dims[dim]):
            sides = [call.channels.fresh(size) if size else () for size in (before, after)]
            dims[dim] = sides[0] + dims[dim] + sides[1]
            added += [Literal("pad", 2 * back + at, side) for at, side in enumerate(sides) if side]
        else:
            call.fix(dims[dim], "padded or cropped")
            dims[dim] = fixed(call.out_shapes[0][dim])
    call.facts.literals[call.number] = added
    return [tuple(dims)]


def reorder(call: Call) -> list[Dims]:
    """Entries of some dims change places, so these are unprunable."""
    for dim in call["dims"] or range(len(call.x.dims)):  # without dims the whole tensor is rolled as one
        call.fix(call.x.dims[dim], "its entries change places")
    return [call.x.dims]


def im2col(call: Call) -> list[Dims]:
    """Patches: channels times kernel positions."""
    patch = call.channels.multiply(call.x.dims[1], fixed(math.prod(call["kernel_size"])))
    return [(call.x.dims[0], patch, fixed(call.out_shapes[0][-1]))]


def col2im(call: Call) -> list[Dims]:
    """Overlapping patches are added up: the opposite of im2col."""
    channels, patch = call.channels.factor(call.x.dims[1], call.out_shapes[0][1])
    call.fix(patch, "positions in a patch")
    return [(call.x.dims[0], channels, *(fixed(size) for size in call.out_shapes[0][2:]))]


def view_as_complex(call: Call) -> list[Dims]:
    """The last dim becomes the two parts of a number."""
    call.fix(call.x.dims[-1], "the parts of a complex number")
    return [call.x.dims[:-1]]


def view_as_real(call: Call) -> list[Dims]:
    """A number becomes its two parts in a new last dim."""
    return [(*call.x.dims, fixed(2))]


def unfold(call: Call) -> list[Dims]:
    """Sliding windows along a dim."""
    dim = call["dimension"] % len(call.x.dims)
    return [(*call.fixing([dim], "windows slide along it"), fixed(call["size"]))]


def pixel_shuffle(call: Call) -> list[Dims]:
    """Channels become pixels in blocks, which are pruned as one."""
    block = call["upscale_factor"] ** 2
    outer, inner = call.channels.factor(call.x.dims[-3], call.x.shape[-3] // block)
    call.fix(inner, "it becomes pixels")
    return [(*call.x.dims[:-3], outer, *(fixed(size) for size in call.out_shapes[0][-2:]))]


def pixel_unshuffle(call: Call) -> list[Dims]:
    """Pixels become channels in blocks."""
    block = fixed(call["downscale_factor"] ** 2)
    outer = call.channels.multiply(call.x.dims[-3], block)
    return [(*call.x.dims[:-3], outer, *(fixed(size) for size in call.out_shapes[0][-2:]))]


def channel_shuffle(call: Call) -> list[Dims]:
    """Groups x channels becomes channels x groups."""
    outer, inner = call.channels.factor(call.x.dims[1], call["groups"])
    call.fix(outer, "the groups of a shuffle")
    return [_replaced(call, 1, call.channels.multiply(inner, outer))]


def same(call: Call) -> list[Dims]:
    """Every output has the dims of the first tensor."""
    return [call.x.dims] * len(call.out_shapes)


def glu(call: Call) -> list[Dims]:
    """One half gates the other."""
    dim = call["dim"] % len(call.x.dims)
    first, second = call.channels.divide(call.x.dims[dim], [call.out_shapes[0][dim]] * 2)
    call.channels.join(first, second)
    return [_replaced(call, dim, first)]
