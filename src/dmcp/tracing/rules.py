"""How each ATen op passes channels: one small rule per kind of op, in one table that users can extend.

A rule takes a Call and returns the dims of each output. It joins dims that must be narrowed together, keeps whole what
it cannot follow, and says which dims are summed away, written, normalised or mixed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dmcp.tracing.facts import Call, Dims, Flow, Operand, Rule, unknown
from dmcp.tracing.layer_rules import (
    attention,
    batch_norm,
    convolution,
    einsum,
    group_norm,
    layer_norm,
    linear,
    matmul,
    prelu,
)
from dmcp.tracing.layouts import fixed
from dmcp.tracing.recording import Func
from dmcp.tracing.shape_rules import (
    channel_shuffle,
    col2im,
    concatenate,
    embedding,
    expand,
    glu,
    im2col,
    index,
    index_select,
    movedim,
    pad,
    permute,
    pixel_shuffle,
    pixel_unshuffle,
    reorder,
    repeat,
    repeat_interleave,
    reshape,
    reverse_dims,
    same,
    select,
    slice_,
    split,
    stack,
    swap_last,
    transpose,
    unbind,
    unfold,
    view_as_complex,
    view_as_real,
)


def pointwise(call: Call) -> list[Dims]:
    """Element by element, with broadcasting."""
    call.flow = Flow.POINTWISE
    return [call.broadcast([operand.dims for operand in call.operands])] * len(call.out_shapes)


def noise(call: Call) -> list[Dims]:
    """The dims of the first tensor, other values."""
    return [call.x.dims] * len(call.out_shapes)


def where(call: Call) -> list[Dims]:
    """Element by element; with one argument it lists positions instead."""
    return unknown(call, "its positions are listed") if len(call.operands) == 1 else pointwise(call)


def spatial(call: Call) -> list[Dims]:
    """Pools, resizes and borders: batch and channels pass."""
    call.flow = Flow.KEEPS
    x = call.x
    lead = len(x.dims) - _SPATIAL_RANK[call.op.name.rstrip("_")]
    for layout in x.dims[lead:]:
        call.freeze(layout, "pooled or resized along it")
    return [(*x.dims[:lead], *(fixed(size) for size in shape[lead:])) for shape in call.out_shapes]


def grid_sample(call: Call) -> list[Dims]:
    """Pixels are picked by position; batch and channels pass."""
    call.flow = Flow.KEEPS
    x, grid = call.operands
    for layout in (*x.dims[2:], *grid.dims[1:]):
        call.freeze(layout, "pixels are picked along it")
    call.channels.join(x.dims[0], grid.dims[0])
    return [(*x.dims[:2], *(fixed(size) for size in call.out_shapes[0][2:]))]


def transform(call: Call) -> list[Dims]:
    """Fourier transforms of some dims; the others pass."""
    call.flow = Flow.KEEPS
    rank = len(call.x.dims)
    given = call["dim"]
    chosen = range(rank) if given is None else [given] if isinstance(given, int) else given
    dims = list(call.x.dims)
    for dim in chosen:
        call.freeze(dims[dim], "it is Fourier transformed")
        dims[dim] = fixed(call.out_shapes[0][dim])
    return [tuple(dims)]


def reduce(call: Call) -> list[Dims]:
    """Some dims vanish. Zeros may be summed over; other reductions see them, so the dim stays whole."""
    if isinstance(call["other"], Operand):
        return pointwise(call)
    x, rank = call.x, len(call.x.dims)
    given = call["dim"]
    gone = list(range(rank)) if given is None or given == [] else [given] if isinstance(given, int) else given
    gone = [dim % rank for dim in gone] if rank else []
    call.flow = Flow.KEEPS if call.op.name in _ZERO_OF_ZEROS else Flow.LOSES
    for dim in gone:
        if call.op.name == "sum":
            call.contracts(x, None, 0, x.dims[dim])
        else:
            call.freeze(x.dims[dim], f"{call.op.name} is taken over it")
    keep = bool(call["keepdim"])
    dims = tuple(fixed(1) if dim in gone else x.dims[dim] for dim in range(rank) if keep or dim not in gone)
    return [dims] * len(call.out_shapes)


def along(call: Call) -> list[Dims]:
    """Softmax, sort and the like: entries of one dim depend on each other."""
    dims = list(call.x.dims)
    dim = -1 if call["dim"] is None else call["dim"]
    call.freeze(dims[dim], f"{call.op.name} is taken along it")
    dims[dim] = fixed(call.out_shapes[0][dim])
    return [tuple(dims)] * len(call.out_shapes)


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
    """Numbers that have nothing to do with channels; what goes in stays whole."""
    for operand in call.operands:
        for layout in operand.dims:
            call.freeze(layout, "its values are looked at")
    return call.fixed_outputs()


_ZERO_OF_ZEROS = {
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "var",
    "std",
    "norm",
    "linalg_vector_norm",
    "nansum",
    "prod",
}
_SPATIAL_RANK = {
    **{
        f"{name}1d": 1 for name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "upsample_linear")
    },
    **{
        f"{name}2d": 2
        for name in ("max_pool", "avg_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool")
    },
    **{
        f"{name}3d": 3
        for name in ("max_pool", "avg_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool")
    },
    **{f"upsample_{kind}": 2 for kind in ("nearest2d", "bilinear2d", "bicubic2d")},
    **{f"_upsample_{kind}": 2 for kind in ("nearest_exact2d", "bilinear2d_aa", "bicubic2d_aa")},
    "upsample_nearest1d": 1,
    "upsample_nearest3d": 3,
    "upsample_trilinear3d": 3,
    "max_pool2d_with_indices": 2,
    **{f"{kind}_pad{rank}d": rank for kind in ("reflection", "replication") for rank in (1, 2, 3)},
}

_BY_NAME: dict[Rule, str] = {
    convolution: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution",
    linear: "linear",
    matmul: "matmul mm addmm bmm baddbmm",
    einsum: "einsum",
    attention: "scaled_dot_product_attention",
    batch_norm: "batch_norm instance_norm",
    layer_norm: "layer_norm rms_norm",
    group_norm: "group_norm",
    prelu: "prelu _prelu_kernel",
    reshape: "view reshape flatten unflatten view_as reshape_as squeeze unsqueeze",
    permute: "permute",
    transpose: "transpose swapaxes swapdims",
    reverse_dims: "t numpy_T",
    swap_last: "mT mH adjoint",
    movedim: "movedim moveaxis",
    expand: "expand expand_as broadcast_to",
    repeat: "repeat tile",
    repeat_interleave: "repeat_interleave.self_int",
    concatenate: "cat concat concatenate",
    stack: "stack",
    split: "split chunk split_with_sizes tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes",
    unbind: "unbind",
    slice_: "slice",
    select: "select",
    index: "index _unsafe_index",
    index_select: "index_select",
    embedding: "embedding",
    pad: "constant_pad_nd pad",
    reorder: "roll flip",
    im2col: "im2col",
    unfold: "unfold",
    pixel_shuffle: "pixel_shuffle",
    pixel_unshuffle: "pixel_unshuffle",
    channel_shuffle: "channel_shuffle native_channel_shuffle",
    same: "alias clone contiguous _to_copy to detach dropout feature_dropout native_dropout lift_fresh "
    "lift_fresh_copy type_as bernoulli zero nan_to_num",
    pointwise: "hardswish relu6 celu selu rrelu square floor_divide masked_fill copy lerp",
    noise: "alpha_dropout feature_alpha_dropout",
    where: "where",
    spatial: " ".join(_SPATIAL_RANK),
    reduce: "mean sum amax amin max min var std logsumexp prod norm linalg_vector_norm any all argmax argmin nansum "
    "var_mean std_mean count_nonzero",
    grid_sample: "grid_sampler grid_sampler_2d grid_sampler_3d",
    transform: " ".join(
        f"fft_{half}{kind}{rank}" for half in ("", "i") for kind in ("fft", "rfft") for rank in ("", "2", "n")
    ),
    col2im: "col2im",
    view_as_complex: "view_as_complex",
    view_as_real: "view_as_real",
    along: "softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod sort argsort topk",
    glu: "glu",
    create: "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like "
    "rand randn rand_like randn_like scalar_tensor",
    opaque: "arange linspace item _local_scalar_dense is_nonzero eye tril triu meshgrid nonzero _assert_async "
    "_assert_tensor_metadata equal bincount",
}


def _overloads(names: str) -> Iterable[Func]:
    """Every overload of these ops; "name.overload" is one of them, names unknown to this torch are passed over."""
    for name in names.split():
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        for found in [overload] if overload else packet.overloads() if packet is not None else []:
            yield getattr(packet, found)


RULES: dict[Func, Rule] = {func: rule for rule, names in _BY_NAME.items() for func in _overloads(names)}
