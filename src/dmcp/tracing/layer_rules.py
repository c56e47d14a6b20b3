"""Rules for layers: convs, matrix products, attention, norms."""

from __future__ import annotations

import math

from dmcp.tracing.facts import Call, Dims, Flow, Operand, unknown
from dmcp.tracing.layouts import Layout, fixed


def convolution(call: Call) -> list[Dims]:
    """Input channels join the weight's; output channels are the weight's."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    groups: int = call["groups"]
    transposed = bool(call["transposed"]) or call.op.name.startswith("conv_transpose")
    if len(x.dims) != len(weight.dims):  # no batch dim
        return unknown(call)
    channels, (w_out, w_in) = call.channels, weight.dims[:2][::-1] if transposed else weight.dims[:2]
    for layout in (*weight.dims[2:], *x.dims[2:]):
        call.freeze(layout, "convolved along it")
    count = fixed(1)
    out = w_out
    if groups == 1:
        channels.join(x.dims[1], w_in)
    else:
        # weight: (groups x out per group, in per group); transposed: (groups x in per group, out per group)
        count, x_inner = channels.factor(x.dims[1], groups)
        split, per_group = channels.factor(weight.dims[0], groups)
        channels.join(count, split)
        channels.join(x_inner, per_group if transposed else w_in)
        out_inner = w_out if transposed else per_group
        out = channels.multiply(count, w_out) if transposed else w_out
        if groups >= max(channels.size(x_inner), channels.size(out_inner)):
            call.freeze(x_inner, "whole groups are pruned instead")
            call.freeze(out_inner, "whole groups are pruned instead")
        else:
            call.freeze(count, "pruned inside each group instead")
    call.join_all(out, bias)
    spatial = math.prod(x.shape[2:] if transposed else call.out_shapes[0][2:])
    call.costs("conv", spatial * math.prod(weight.shape[2:]), x.dims[0], *weight.dims[:2])
    call.describes(in_channels=(x.dims[1],), out_channels=(out,), groups=(count,))
    call.follows("groups", [count])
    call.writes(out)
    in_dim = 0 if transposed else 1
    over = w_in if not transposed or groups == 1 else channels.factor(weight.dims[0], groups)[1]
    call.contracts(x, weight, in_dim, over, bias, 1 - in_dim)
    return [(x.dims[0], out, *(fixed(size) for size in call.out_shapes[0][2:]))]


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
    equation, tensors = call["equation"].replace(" ", ""), call["tensors"]
    if "." in equation or "->" not in equation or len(tensors) > 2:
        return unknown(call)
    terms, result = equation.split("->")
    found: dict[str, Layout] = {}
    for term, operand in zip(terms.split(","), tensors, strict=True):
        for letter, layout in zip(term, operand.dims, strict=True):
            if letter in found and call.channels.size(layout) != 1 and call.channels.size(found[letter]) != 1:
                call.channels.join(found[letter], layout)
            elif call.channels.size(found.get(letter, fixed(1))) == 1:
                found[letter] = layout
    summed = [letter for letter in found if letter not in result]
    call.flow = Flow.CONTRACTS
    last = tensors[-1]
    for letter in summed:
        dim = terms.split(",")[-1].find(letter)
        in_both = len(tensors) == 2 and dim >= 0 and letter in terms.split(",")[0]
        holder = last if dim >= 0 else tensors[0]
        call.contracts(tensors[0] if in_both else holder, last if in_both else None, max(dim, 0), found[letter])
    if len(tensors) == 2:
        both = [letter for letter in summed if all(letter in term for term in terms.split(","))]
        if both:  # letters of one factor alone are summed before
            call.costs("einsum", 1, *(layout for letter, layout in found.items() if letter in result or letter in both))
        call.writes(*found.values())
    return [tuple(found[letter] for letter in result)]


def attention(call: Call) -> list[Dims]:
    """Scaled dot product: the head size is summed away, unless the default scale hides it in a square root."""
    query, key, value = call["query"], call["key"], call["value"]
    channels = call.channels
    channels.join(query.dims[-1], key.dims[-1])
    channels.join(key.dims[-2], value.dims[-2])
    if call["scale"] is None:
        call.freeze(query.dims[-1], "attention scales by the square root of its size")
    call.freeze(key.dims[-2], "attention normalises over it")
    batch = call.broadcast([operand.dims[:-2] for operand in (query, key, value)])
    if isinstance(call["attn_mask"], Operand):
        call.broadcast([(*batch, query.dims[-2], key.dims[-2]), call["attn_mask"].dims])
    for inner in (query.dims[-1], value.dims[-1]):
        call.costs("attention", 1, *batch, query.dims[-2], key.dims[-2], inner)
    call.contracts(query, key, len(key.dims) - 1, query.dims[-1])
    call.contracts(value, None, 0, key.dims[-2])
    return [(*batch, query.dims[-2], value.dims[-1]), *call.fixed_outputs()[1:]]


def batch_norm(call: Call) -> list[Dims]:
    """Per-channel statistics over everything else."""
    x = call["input"]
    call.join_all(x.dims[1], *(call[name] for name in ("weight", "bias", "running_mean", "running_var")))
    for layout in (x.dims[0], *x.dims[2:]):
        call.mixes(layout, "statistics are taken over it, as weight standardisation does")
    call.describes(num_features=(x.dims[1],))
    call.normalises(x.dims[1])
    return _first(call, x.dims)


def layer_norm(call: Call) -> list[Dims]:
    """Statistics over the last dims, so that channels depend on each other."""
    x, rank = call["input"], len(call["normalized_shape"])
    last = x.dims[-rank:]
    for operand in (call["weight"], call["bias"]):
        for mine, its in zip(last, operand.dims if isinstance(operand, Operand) else (), strict=False):
            call.channels.join(mine, its)
    for layout in last:
        call.mixes(layout, "LayerNorm mixes its channels")
    call.describes(normalized_shape=last)
    call.follows("normalized_shape", last)
    call.normalises(last[-1])
    return _first(call, x.dims)


def group_norm(call: Call) -> list[Dims]:
    """Whole groups may go; inside a group channels depend on each other."""
    x, groups = call["input"], call["num_groups"]
    count, inner = call.channels.factor(x.dims[1], groups)
    if groups == 1:
        call.mixes(x.dims[1], "GroupNorm with one group mixes its channels")
    else:
        call.freeze(inner, "whole groups of a GroupNorm are pruned instead")
    for layout in x.dims[2:]:
        call.mixes(layout, "statistics are taken over it")
    call.join_all(x.dims[1], call["weight"], call["bias"])
    call.describes(num_channels=(x.dims[1],), num_groups=(count,))
    call.follows("num_groups", [count])
    call.normalises(x.dims[1])
    return _first(call, x.dims)


def _first(call: Call, dims: Dims) -> list[Dims]:
    """The first output has these dims; statistics that come along are not looked at."""
    return [dims, *call.fixed_outputs()[1:]]


def prelu(call: Call) -> list[Dims]:
    """A slope per channel, or one for all."""
    x, weight = call.operands[:2]
    if weight.shape and weight.shape[0] != 1:
        call.channels.join(x.dims[1], weight.dims[0])
        call.describes(num_parameters=(x.dims[1],))
    call.flow = Flow.KEEPS
    return [x.dims]
