"""What each layer of a recorded model costs, for one sample, as polynomials in the widths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from dmcp.errors import TraceError
from dmcp.tracing.cost import Terms, product, total
from dmcp.tracing.coupling import Coupling, couple
from dmcp.tracing.facts import OpCost
from dmcp.tracing.graph import CostEntry
from dmcp.tracing.layouts import in_spaces
from dmcp.tracing.recording import Op, Recording, Ref, batch_of, map_leaves, rebatch, record
from dmcp.tracing.replay import Rehearsal
from dmcp.tracing.rules import RULES

BOXES = "Trace the part of a detector that ends before its boxes are chosen: docs/api.md, Detectors."


def cost_entries(
    model: nn.Module, coupling: Coupling, numbers: Mapping[int, int], example: Any, rehearsal: Rehearsal
) -> tuple[CostEntry, ...]:
    """Costs per layer, in the order in which they run; parameters that no op of cost uses come last."""
    recording, facts, resolve = coupling.recordings[0], coupling.facts[0], coupling.channels.resolve
    batch = batch_of(rehearsal.batches[0])
    shares = _per_sample(model, example, coupling, batch)
    costs = [*facts.costs, *(_measured(op, recording) for op in facts.unknown)]
    shares += [Fraction(1, batch or 1)] * len(facts.unknown)
    owners = {name: _owner(name) for name, _ in model.named_parameters()}
    kinds: dict[str, str] = {}
    macs: dict[str, list[Terms]] = {}
    for cost, share in zip(costs, shares, strict=True):
        kinds.setdefault(cost.path, cost.kind)
        terms = product(cost.coefficient, [in_spaces(resolve(layout), numbers) for layout in cost.dims])
        macs.setdefault(cost.path, []).append(_scaled(terms, share))
    params: dict[str, list[Terms]] = {}
    for name, _ in model.named_parameters():
        dims = coupling.tensors[name]
        terms = product(1, [in_spaces(resolve(layout), numbers) for layout in dims])
        params.setdefault(owners[name], []).append(terms)
    return tuple(
        CostEntry(path, kinds.get(path, "other"), total(macs.get(path, [])), total(params.get(path, [])))
        for path in dict.fromkeys([*macs, *params])
    )


def _per_sample(model: nn.Module, example: Any, coupling: Coupling, batch: int | None) -> list[Fraction]:
    """Of each op that costs something: the share that one sample has. Some ops run once for the whole batch."""
    recording, costs = coupling.recordings[0], coupling.facts[0].costs
    if batch is None:
        return [Fraction(1)] * len(costs)
    try:
        single = couple([record(model, rebatch(example, 1), training=False)], RULES, strict=False)
    except Exception:  # the batch size is written into the model, or it looks at values
        return [Fraction(1, batch)] * len(costs)
    ones = single.facts[0].costs
    if [op.func for op in single.recordings[0].ops] != [op.func for op in recording.ops] or len(ones) != len(costs):
        return [Fraction(1, batch)] * len(costs)
    return [
        Fraction(_full_cost(single, one), max(1, _full_cost(coupling, many)))
        for one, many in zip(ones, costs, strict=True)
    ]


def _full_cost(coupling: Coupling, cost: OpCost) -> int:
    return cost.coefficient * math.prod(coupling.channels.size(layout) for layout in cost.dims)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _scaled(terms: Terms, share: Fraction) -> Terms:
    scaled = {key: factor * share for key, factor in terms.items()}
    if any(factor.denominator != 1 for factor in scaled.values()):
        raise TraceError(
            f"The cost of one sample cannot be told from that of a batch: dim 0 of the inputs must be it. {BOXES}"
        )
    return {key: int(factor) for key, factor in scaled.items()}


def _measured(op: Op, recording: Recording) -> OpCost:
    """Multiply-adds of an op without a rule, counted by torch on tensors without data."""
    from torch.utils.flop_counter import FlopCounterMode  # here: it imports Triton, and is seldom needed

    def empty(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        return torch.empty(recording.shapes[leaf.value], dtype=recording.dtypes[leaf.value], device="meta")

    counter = FlopCounterMode(display=False)
    try:
        with counter:
            op.func(*map_leaves(empty, op.args), **map_leaves(empty, dict(op.kwargs)))
    except Exception:  # no meta kernel: torch itself counts nothing for it either
        pass
    out = next((value for value in op.outs if value is not None), -1)
    return OpCost(op.path, op.name, counter.get_total_flops() // 2, (), out)
