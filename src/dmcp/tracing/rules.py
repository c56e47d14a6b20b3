"""The channel rules: how the dims of an op's outputs follow from those of its inputs; RULES is the table.

To add one, write rule(call), which returns the layouts of the outputs (`Call` is in coupling.py), and list its op in
_OTHERS. docs/how-it-works.md has an example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from dmcp.tracing.coupling import Call, Dims, Flow, Literal, Operand, Rule
from dmcp.tracing.layout import Layout, fixed
from dmcp.tracing.record import Func

# what any op may be


def unknown(call: Call) -> list[Dims]:
    """An op without a rule: its inputs and outputs are unprunable, and it is reported."""
    call.facts.unknown.append(call.op)
    call.flow = Flow.LOSES
    inputs = [operand.dims for operand in call.operands]
    outs = [tuple(map(call.channels.fresh, shape)) for shape in call.out_shapes]
    for dims in inputs + outs:  # what meets an output has the reason too
        for layout in dims:
            call.fix(layout, "there is no channel rule for it")
    return outs


def pointwise(call: Call) -> list[Dims]:
    """Element by element, with broadcasting."""
    call.flow = Flow.POINTWISE
    return [call.broadcast([operand.dims for operand in call.operands])] * len(call.out_shapes)


# layers, norms, pools and reductions


def convolution(call: Call) -> list[Dims]:
    """Input channels join the weight's; output channels are the weight's."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    groups: int = call["groups"]
    transposed = bool(call["transposed"]) or call.op.name.startswith("conv_transpose")
    if len(x.dims) != len(weight.dims):  # no batch dim
        return unknown(call)
    for layout in (*weight.dims[2:], *x.dims[2:]):
        call.fix(layout, "convolved along it")

    # weight: (groups x out per group, in per group); transposed: (groups x in per group, out per group)
    channels = call.channels
    in_dim, out_dim = (0, 1) if transposed else (1, 0)
    count = fixed(1)
    out = weight.dims[out_dim]
    over = weight.dims[in_dim]
    if groups == 1:
        channels.join(x.dims[1], over)
    else:
        count, x_inner = channels.factor(x.dims[1], groups)
        weight_count, weight_inner = channels.factor(weight.dims[0], groups)
        channels.join(count, weight_count)
        channels.join(x_inner, weight_inner if transposed else over)
        out_inner = out if transposed else weight_inner
        if transposed:
            out = channels.multiply(count, out)
        if groups >= max(channels.size(x_inner), channels.size(out_inner)):
            call.fix(x_inner, "whole groups are pruned instead")
            call.fix(out_inner, "whole groups are pruned instead")
        else:
            call.fix(count, "pruned inside each group instead")
    call.join_all(out, bias)

    positions = math.prod(x.shape[2:] if transposed else call.out_shapes[0][2:])
    call.costs("conv", positions * math.prod(weight.shape[2:]), x.dims[0], *weight.dims[:2])
    call.describes(in_channels=(x.dims[1],), out_channels=(out,), groups=(count,))
    call.follows("groups", [count])
    call.writes(out)
    if transposed and groups > 1:
        over = channels.factor(weight.dims[0], groups)[1]
    call.contracts(x, weight, in_dim, over, bias, out_dim)
    return [(x.dims[0], out, *map(fixed, call.out_shapes[0][2:]))]


def linear(call: Call) -> list[Dims]:
    """The last dim joins the weight's input and becomes its output."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    call.channels.join(x.dims[-1], weight.dims[1])
    call.join_all(weight.dims[0], bias)
    call.describes(in_features=(weight.dims[1],), out_features=(weight.dims[0],))
    call.costs("linear", 1, *x.dims[:-1], *weight.dims)
    call.writes(weight.dims[0])
    call.contracts(x, weight, 1, weight.dims[1], bias, 0)
    return [(*x.dims[:-1], weight.dims[0])]


def matmul(call: Call) -> list[Dims]:
    """Matrix products of all ranks above one, with or without something added."""
    added = call["self"] if call.op.name in ("addmm", "baddbmm") else None
    left, right = call.operands[-2:]
    if len(left.dims) < 2 or len(right.dims) < 2:
        return unknown(call)
    call.channels.join(left.dims[-1], right.dims[-2])
    batch = call.broadcast([left.dims[:-2], right.dims[:-2]])
    out: Dims = (*batch, left.dims[-2], right.dims[-1])
    if added is not None:
        out = call.broadcast([out, added.dims])
    call.costs("matmul", 1, *out, left.dims[-1])
    call.writes(left.dims[-2], right.dims[-1])
    call.contracts(left, right, len(right.dims) - 2, left.dims[-1], added, len(right.dims) - 1)
    return [out]


def einsum(call: Call) -> list[Dims]:
    """Letters are dims; equal letters are joined; letters that vanish are summed away."""
    equation = call["equation"].replace(" ", "")
    tensors = call["tensors"]
    if "." in equation or "->" not in equation or len(tensors) > 2:
        return unknown(call)
    left, result = equation.split("->")
    terms = left.split(",")

    # The layout of each letter. A dim of size one says nothing about the others of its letter.
    size = call.channels.size
    layouts: dict[str, Layout] = {}
    for term, operand in zip(terms, tensors, strict=True):
        for letter, layout in zip(term, operand.dims, strict=True):
            if letter not in layouts or size(layouts[letter]) == 1:
                layouts[letter] = layout
            elif size(layout) != 1:
                call.channels.join(layouts[letter], layout)

    # The letters that are summed away: as a product where both tensors have them, else one tensor alone.
    call.flow = Flow.CONTRACTS
    summed = [letter for letter in layouts if letter not in result]
    summed_products = [letter for letter in summed if len(tensors) == 2 and all(letter in term for term in terms)]
    first, last = tensors[0], tensors[-1]
    for letter in summed:
        dim = terms[-1].find(letter)
        if letter in summed_products:
            call.contracts(first, last, dim, layouts[letter])
        elif dim >= 0:
            call.contracts(last, None, dim, layouts[letter])
        else:
            call.contracts(first, None, 0, layouts[letter])

    if summed_products:  # letters of one factor alone are summed before
        multiplied = [layout for letter, layout in layouts.items() if letter in result or letter in summed_products]
        call.costs("einsum", 1, *multiplied)
    if len(tensors) == 2:
        call.writes(*layouts.values())
    return [tuple(layouts[letter] for letter in result)]


def attention(call: Call) -> list[Dims]:
    """Scaled dot product: the head size is summed away, unless the default scale hides it in a square root."""
    query, key, value = call["query"], call["key"], call["value"]
    channels = call.channels
    channels.join(query.dims[-1], key.dims[-1])
    channels.join(key.dims[-2], value.dims[-2])
    if call["scale"] is None:
        call.fix(query.dims[-1], "attention scales by the square root of its size")
    call.fix(key.dims[-2], "attention normalizes over it")
    batch = call.broadcast([operand.dims[:-2] for operand in (query, key, value)])
    if isinstance(call["attn_mask"], Operand):
        call.broadcast([(*batch, query.dims[-2], key.dims[-2]), call["attn_mask"].dims])
    for inner in (query.dims[-1], value.dims[-1]):
        call.costs("attention", 1, *batch, query.dims[-2], key.dims[-2], inner)
    call.contracts(query, key, len(key.dims) - 1, query.dims[-1])
    call.contracts(value, None, 0, key.dims[-2])
    return [(*batch, query.dims[-2], value.dims[-1]), *call.fixed_outputs()[1:]]


def cosine_similarity(call: Call) -> list[Dims]:
    """One dim is summed away. Where both are zero, neither the product nor the lengths change."""
    dims = call.broadcast([operand.dims for operand in call.operands])
    dim = call["dim"] % len(dims)
    for operand in call.operands:
        call.contracts(operand, None, 0, dims[dim])
    return [(*dims[:dim], *dims[dim + 1 :])]


def batch_norm(call: Call) -> list[Dims]:
    """Per-channel statistics over everything else."""
    x = call["input"]
    call.join_all(x.dims[1], call["weight"], call["bias"], call["running_mean"], call["running_var"])
    for layout in (x.dims[0], *x.dims[2:]):
        call.mixes(layout, "statistics are taken over it, as weight standardization does")
    call.describes(num_features=(x.dims[1],))
    call.normalizes(x.dims[1])
    return [x.dims, *call.fixed_outputs()[1:]]  # statistics that come along are not looked at


def layer_norm(call: Call) -> list[Dims]:
    """Statistics over the last dims, so that channels depend on each other."""
    x = call["input"]
    rank = len(call["normalized_shape"])
    last = x.dims[-rank:]
    for operand in (call["weight"], call["bias"]):
        if isinstance(operand, Operand):
            for layout, of_parameter in zip(last, operand.dims, strict=False):
                call.channels.join(layout, of_parameter)
    for layout in last:
        call.mixes(layout, "LayerNorm mixes its channels")
    call.describes(normalized_shape=last)
    call.follows("normalized_shape", last)
    call.normalizes(last[-1])
    return [x.dims, *call.fixed_outputs()[1:]]  # statistics that come along are not looked at


def group_norm(call: Call) -> list[Dims]:
    """Groups are pruned as one: inside a group channels depend on each other."""
    x, groups = call["input"], call["num_groups"]
    count, inner = call.channels.factor(x.dims[1], groups)
    if groups == 1:
        call.mixes(x.dims[1], "GroupNorm with one group mixes its channels")
    else:
        call.fix(inner, "whole groups of a GroupNorm are pruned instead")
    for layout in x.dims[2:]:
        call.mixes(layout, "statistics are taken over it")
    call.join_all(x.dims[1], call["weight"], call["bias"])
    call.describes(num_channels=(x.dims[1],), num_groups=(count,))
    call.follows("num_groups", [count])
    call.normalizes(x.dims[1])
    return [x.dims, *call.fixed_outputs()[1:]]  # statistics that come along are not looked at


def prelu(call: Call) -> list[Dims]:
    """A slope per channel, or one for all."""
    x, weight = call.operands[:2]
    if weight.shape and weight.shape[0] != 1:
        call.channels.join(x.dims[1], weight.dims[0])
        call.describes(num_parameters=(x.dims[1],))
    return [x.dims]


def spatial(call: Call) -> list[Dims]:
    """Pools, resizes and borders: batch and channels pass."""
    x = call.x
    pooled_dims = next(int(letter) for letter in call.op.name if letter.isdigit())  # max_pool2d
    lead = len(x.dims) - pooled_dims
    for layout in x.dims[lead:]:
        call.fix(layout, "pooled or resized along it")
    return [(*x.dims[:lead], *map(fixed, shape[lead:])) for shape in call.out_shapes]


def grid_sample(call: Call) -> list[Dims]:
    """Pixels are picked by position; batch and channels pass."""
    x, grid = call.operands
    for layout in (*x.dims[2:], *grid.dims[1:]):
        call.fix(layout, "pixels are picked along it")
    call.channels.join(x.dims[0], grid.dims[0])
    return [(*x.dims[:2], *map(fixed, call.out_shapes[0][2:]))]


def reduce(call: Call) -> list[Dims]:
    """Some dims vanish. Zeros may be summed over; other reductions see them, so the dim is unprunable."""
    if isinstance(call["other"], Operand):
        return pointwise(call)
    x = call.x
    rank = len(x.dims)
    reduced = [dim % rank for dim in _chosen_dims(call["dim"], rank)]
    call.flow = Flow.KEEPS if call.op.name in _ZERO_OF_ZEROS else Flow.LOSES
    for dim in reduced:
        if call.op.name == "sum":
            call.contracts(x, None, 0, x.dims[dim])
        else:
            call.fix(x.dims[dim], f"{call.op.name} is taken over it")
    dims: list[Layout] = []
    for dim, layout in enumerate(x.dims):
        if dim not in reduced:
            dims.append(layout)
        elif call["keepdim"]:
            dims.append(fixed(1))
    return [tuple(dims)] * len(call.out_shapes)


def _chosen_dims(argument: int | Sequence[int] | None, rank: int) -> Sequence[int]:
    """The dims that an argument names: one, several, or all if there is none."""
    if rank == 0:
        return []
    if isinstance(argument, int):
        return [argument]
    return argument or range(rank)


def along(call: Call) -> list[Dims]:
    """Entries of some dims, or of all, see each other, change places or are picked: these dims are unprunable."""
    argument = call["dim"] if call["dims"] is None else call["dims"]
    chosen = _chosen_dims(argument, len(call.x.dims))
    return [call.fixing(chosen, f"{call.op.name} is taken along it")] * len(call.out_shapes)


def create(call: Call) -> list[Dims]:
    """A new tensor takes the meaning of what it meets; one made like another has its dims."""
    call.flow = Flow.PADS if "zeros" in call.op.name else Flow.LOSES
    if call.op.name.endswith("_like"):
        return [call.x.dims]
    dims = tuple(call.channels.fresh(size) for size in call.out_shapes[0])
    if call["size"] is not None:
        call.follows("size", dims)
    return [dims]


def opaque(call: Call) -> list[Dims]:
    """Numbers that have nothing to do with channels; what goes in is unprunable."""
    for operand in call.operands:
        for layout in operand.dims:
            call.fix(layout, "its values are looked at")
    return call.fixed_outputs()


# ops that move, split, join or pick entries: zeros stay zeros, unless a rule says otherwise


def reshape(call: Call) -> list[Dims]:
    """Dims multiplied and factored."""
    if call.op.func._overloadname == "dtype":
        return same(call)
    out = call.channels.regroup(call.x.dims, call.out_shapes[0])
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
        old_size = call.channels.size(out[dim])
        if old_size == 1 and size != 1:
            out[dim] = call.channels.fresh(size)
        elif old_size != size:
            out[dim] = call.channels.multiply(fixed(size // old_size), out[dim])
    if call["size"] is not None:
        call.follows("size", out)
    return [tuple(out)]


def repeat_interleave(call: Call) -> list[Dims]:
    """Copies of each entry of a dim."""
    if call["dim"] is None:
        return unknown(call)
    dim = call["dim"]
    repeated = call.channels.multiply(call.x.dims[dim], fixed(call["repeats"]))
    return [_replaced(call, dim, repeated)]


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
    lists = [name for name in ("split_size", "split_sizes") if isinstance(call[name], (list, tuple))]
    if lists:
        call.follows(lists[0], pieces)
    if len(set(sizes)) == 1:
        for piece in pieces[1:]:
            call.channels.join(pieces[0], piece)
    elif not lists:
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
    dim = call["dim"] % len(call.x.dims)
    size = call.x.shape[dim]
    out_size = call.out_shapes[0][call["dim"]]
    if out_size == size:
        return [call.x.dims]
    if (call["step"] or 1) != 1:
        return [call.fixing([dim], "every n-th entry is taken")]

    start = call["start"] or 0
    if start < 0:
        start += size
    start = min(size, max(0, start))
    before, taken, after = call.channels.divide(call.x.dims[dim], [start, out_size, size - start - out_size])
    if start and call["start"] > 0:
        call.follows("start", [before])
    elif start:  # y[:, -8:-4] begins where it should only if no channel behind it is dropped
        call.follows("start", [(*taken, *after)], from_end=True)
    elif isinstance(call["end"], int) and 0 < call["end"] < size:
        call.follows("end", [taken])
    return [_replaced(call, dim, taken)]


def narrow(call: Call) -> list[Dims]:
    """A range of a dim, by its start and its length."""
    outs = slice_(call)
    call.follows("length", [outs[0][call["dim"]]])
    return outs


def index(call: Call) -> list[Dims]:
    """Entries by a table of indices: those dims are unprunable, the others pass."""
    x, tables = call.x, call["indices"]
    chosen = [dim for dim, table in enumerate(tables) if table is not None]
    if not chosen or any(tables[dim].dtype in (torch.bool, torch.uint8) for dim in chosen):
        return unknown(call)
    for dim in chosen:
        call.fix(x.dims[dim], "its entries are picked by index")

    # The dims of the tables stand where the chosen ones were, or in front if those were not side by side.
    shape = call.out_shapes[0]
    passing = [layout for dim, layout in enumerate(x.dims) if dim not in chosen]
    table_rank = len(shape) - len(passing)
    are_neighbors = chosen == list(range(chosen[0], chosen[-1] + 1))
    at = chosen[0] if are_neighbors else 0
    picked = map(fixed, shape[at : at + table_rank])
    return [(*passing[:at], *picked, *passing[at:])]


def embedding(call: Call) -> list[Dims]:
    """Rows of a table."""
    call.fix(call["weight"].dims[0], "its rows are picked by index")
    return [(*call["indices"].dims, call["weight"].dims[1])]


def pad(call: Call) -> list[Dims]:
    """Zeros around a dim are new channels; with other values the dim is unprunable."""
    is_constant = call.op.name == "constant_pad_nd" or call["mode"] in (None, "constant")
    adds_zeros = is_constant and not call["value"]
    call.flow = Flow.PADS if adds_zeros or not is_constant else Flow.LOSES
    dims = list(call.x.dims)
    literals: list[Literal] = []
    for back in range(len(call["pad"]) // 2):
        sizes = call["pad"][2 * back : 2 * back + 2]  # before and after the dim; the last dim has the first pair
        dim = len(dims) - 1 - back
        if not any(sizes):
            continue
        if adds_zeros and min(sizes) >= 0 and call.channels.atoms(dims[dim]):
            before, after = (call.channels.fresh(size) if size else () for size in sizes)
            dims[dim] = before + dims[dim] + after
            for position, side in enumerate((before, after)):
                if side:
                    literals.append(Literal("pad", 2 * back + position, side))
        else:
            call.fix(dims[dim], "padded or cropped")
            dims[dim] = fixed(call.out_shapes[0][dim])
    call.facts.literals[call.number] = literals
    return [tuple(dims)]


def im2col(call: Call) -> list[Dims]:
    """Patches: channels times kernel positions."""
    patch = call.channels.multiply(call.x.dims[1], fixed(math.prod(call["kernel_size"])))
    return [(call.x.dims[0], patch, fixed(call.out_shapes[0][-1]))]


def col2im(call: Call) -> list[Dims]:
    """Overlapping patches are added up: the opposite of im2col."""
    channels, patch = call.channels.factor(call.x.dims[1], call.out_shapes[0][1])
    call.fix(patch, "positions in a patch")
    return [(call.x.dims[0], channels, *map(fixed, call.out_shapes[0][2:]))]


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
    return [(*call.x.dims[:-3], outer, *map(fixed, call.out_shapes[0][-2:]))]


def pixel_unshuffle(call: Call) -> list[Dims]:
    """Pixels become channels in blocks."""
    block = fixed(call["downscale_factor"] ** 2)
    outer = call.channels.multiply(call.x.dims[-3], block)
    return [(*call.x.dims[:-3], outer, *map(fixed, call.out_shapes[0][-2:]))]


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


# the table

_ZERO_OF_ZEROS = {"sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "nansum", "prod"}
_ZERO_OF_ZEROS |= {"linalg_vector_norm"}
_POOLS = "max_pool avg_pool adaptive_avg_pool _adaptive_avg_pool adaptive_max_pool reflection_pad replication_pad"
_RESIZES = "upsample_nearest upsample_linear upsample_bilinear upsample_bicubic upsample_trilinear"
_SPATIAL = " ".join(f"{name}{rank}d" for name in f"{_POOLS} {_RESIZES}".split() for rank in (1, 2, 3))
_SPATIAL += " max_pool2d_with_indices _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"

_FOURIER = " ".join(f"fft_{i}{kind}{rank}" for i in ("", "i") for kind in ("fft", "rfft") for rank in ("", "2", "n"))

_KEEPING: dict[Rule, str] = {  # zeros stay zeros
    prelu: "prelu _prelu_kernel",
    spatial: _SPATIAL,
    grid_sample: "grid_sampler grid_sampler_2d grid_sampler_3d",
    along: f"{_FOURIER} index_select roll flip",
    reshape: "view reshape flatten unflatten view_as reshape_as squeeze unsqueeze",
    permute: "permute transpose swapaxes swapdims t numpy_T mT mH adjoint movedim moveaxis",
    repeat: "repeat tile expand expand_as broadcast_to",
    repeat_interleave: "repeat_interleave.self_int",
    concatenate: "cat concat concatenate",
    stack: "stack",
    split: "split chunk split_with_sizes tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes",
    unbind: "unbind select",
    slice_: "slice",
    narrow: "narrow.default narrow_copy.default",
    index: "index _unsafe_index",
    pad: "constant_pad_nd pad",
    im2col: "im2col",
    col2im: "col2im",
    unfold: "unfold",
    pixel_shuffle: "pixel_shuffle",
    pixel_unshuffle: "pixel_unshuffle",
    channel_shuffle: "channel_shuffle native_channel_shuffle",
    view_as_complex: "view_as_complex",
    view_as_real: "view_as_real",
    glu: "glu",
    same: "real imag alias clone contiguous _to_copy to detach dropout feature_dropout native_dropout lift_fresh "
    "lift_fresh_copy type_as bernoulli.default bernoulli.out zero nan_to_num",
}
_OTHERS: dict[Rule, str] = {
    convolution: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution",
    linear: "linear",
    matmul: "matmul mm addmm bmm baddbmm",
    einsum: "einsum",
    cosine_similarity: "cosine_similarity",
    attention: "scaled_dot_product_attention",
    batch_norm: "batch_norm instance_norm",
    layer_norm: "layer_norm rms_norm",
    group_norm: "group_norm",
    pointwise: "leaky_relu hardswish relu6 celu selu rrelu square floor_divide masked_fill copy lerp where",
    unknown: "where.default",  # it lists positions
    same: "alpha_dropout feature_alpha_dropout bernoulli.p bernoulli_.float",
    embedding: "embedding",
    reduce: "mean sum amax amin max min var std logsumexp prod norm linalg_vector_norm any all argmax argmin nansum "
    "var_mean std_mean count_nonzero",
    along: "softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod sort argsort topk",
    create: "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like "
    "rand randn rand_like randn_like scalar_tensor",
    opaque: "arange linspace item _local_scalar_dense is_nonzero eye tril triu meshgrid nonzero _assert_async "
    "_assert_tensor_metadata equal bincount",
}


def _keeping(rule: Rule) -> Rule:
    def keeping(call: Call) -> list[Dims]:
        call.flow = Flow.KEEPS
        return rule(call)

    return keeping


def _overloads(names: str) -> Iterable[Func]:
    """Every overload of these ops; "name.overload" is one of them, names unknown to this torch are passed over."""
    for name in names.split():
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        if packet is None:
            overloads = []
        elif overload:
            overloads = [overload]
        else:
            overloads = packet.overloads()
        for each in overloads:
            yield getattr(packet, each)


RULES: dict[Func, Rule] = {func: _keeping(rule) for rule, names in _KEEPING.items() for func in _overloads(names)}
RULES |= {func: rule for rule, names in _OTHERS.items() for func in _overloads(names)}


def find_rule(func: Func, rules: Mapping[Func, Rule]) -> Rule | None:
    """The rule of an op or of its out-of-place twin, else `pointwise` if torch tags the op so."""
    candidates: list[Func] = [func]
    name = func._schema.name.split("::")[1]
    if name.endswith("_"):
        packet = getattr(torch.ops.aten, name[:-1], None)
        twin = getattr(packet, func._overloadname, None)
        if twin is not None:
            candidates.append(twin)
    for candidate in candidates:
        if candidate in rules:
            return rules[candidate]
    if any(torch.Tag.pointwise in candidate.tags for candidate in candidates):
        return pointwise
    return None
