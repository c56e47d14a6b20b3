"""What a forward pass has to do, by kind of layer and resolution: products and numbers written, as polynomials."""

from __future__ import annotations

import math

from dmcp.tracing.cost import Terms, product, total
from dmcp.tracing.facts import Dims
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.layouts import in_spaces
from dmcp.tracing.memory import VIEWS
from dmcp.tracing.recording import Op

Key = tuple[str, str, int]  # macs or numbers, the kind of layer, its resolution
MACS, NUMBERS = "macs", "numbers"


def work(graph: ChannelGraph) -> dict[Key, Terms]:
    """Of the pass in eval mode: multiply-adds and numbers written, summed over layers of one kind and resolution.

    For the whole example. Ops that only look at memory in another way have nothing to do.
    """
    coupling = graph.coupling
    recording, facts, layouts = coupling.recordings[0], coupling.facts[0], coupling.layouts[0]
    numbers = graph.space_numbers
    owners = {out: op for op in recording.ops for out in op.outs if out is not None}

    def polynomial(coefficient: int, dims: Dims) -> Terms:
        resolve = coupling.channels.resolve
        return product(coefficient, [in_spaces(resolve(layout), numbers) for layout in dims])

    found: dict[Key, list[Terms]] = {}
    for cost in facts.costs:
        op = owners[cost.out]
        key = (MACS, _kind(op, cost.kind), _resolution(recording.shapes[cost.out]))
        found.setdefault(key, []).append(polynomial(cost.coefficient, cost.dims))
    layers = {cost.out for cost in facts.costs}
    for op in recording.ops:
        if op.func.is_view or op.name in VIEWS:
            continue
        for out in op.outs[:1]:  # what else norms and pools give back is small, or not wanted
            if out is not None and out not in recording.tensors:
                kind = "layers" if out in layers else "rest"
                key = (NUMBERS, kind, _resolution(recording.shapes[out]))
                found.setdefault(key, []).append(polynomial(1, layouts[out]))
    return {key: total(parts) for key, parts in found.items()}


def _kind(op: Op, kind: str) -> str:
    """Convolutions with groups move as many numbers for far fewer products."""
    groups = op.arguments().get("groups")
    return f"grouped {kind}" if isinstance(groups, int) and groups > 1 else kind


def _resolution(shape: tuple[int, ...]) -> int:
    """Pixels of an image; 1 of what is none."""
    return math.prod(shape[2:]) if len(shape) > 3 else 1
