"""What a network computes, in a few letters: two that have the same tensors may still be different ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dmcp.errors import TraceError
from dmcp.modules import map_leaves
from dmcp.tracing.record import Recording, Ref, record_anywhere

OPERATIONS = "operations"  # the fact of a run that has them
_WAY = "2"  # how operations are written down: other ways give other letters for the same network
_PLAIN = (Ref, bool, int, float, str, torch.dtype, type(None))  # what looks the same in all processes


def operations_of(model: nn.Module, shape: Sequence[int]) -> str:
    """A few letters that change with the operations of a network for samples of this shape, in eval and train mode.

    ReLU or Tanh, the share of a dropout, the order of the layers: all that is no tensor. How tensors start is not in
    it. Empty where the network cannot be recorded, and where it makes plain numbers of tensors: then its operations
    depend on the weights that it starts with.
    """
    try:
        found = [record_anywhere(model, torch.zeros(2, *shape), training) for training in (False, True)]
    except TraceError:
        return ""
    if any(recording.reads or recording.sizes for recording in found):
        return ""
    text = "\n".join(repr(line) for recording in found for line in _lines(recording))
    return f"{_WAY}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _lines(recording: Recording) -> list[Any]:
    """All that was called, with its arguments; tensors by the numbers that they have in the recording."""
    calls = [(str(op.func), map_leaves(_plain, op.arguments()), op.outs) for op in recording.ops]
    made = [(it.number, it.numbers) for it in recording.made]
    return [*calls, made, recording.inputs, recording.outputs, sorted(recording.tensors.items())]


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__


def are_others(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs, by their facts, are of networks with different operations.

    Not known of runs that have none, of those of a dmcp that wrote them down otherwise, and of different versions of
    torch, which may record one network in two ways.
    """
    versions = [facts.get("versions") for facts in (one, other)]
    first, second = (it.get("torch") if isinstance(it, Mapping) else None for it in versions)
    mine, theirs = (str(facts.get(OPERATIONS) or "") for facts in (one, other))
    known = bool(first and first == second and mine and theirs) and _way(mine) == _way(theirs)
    return known and mine != theirs


def _way(letters: str) -> str:
    return letters.rpartition(".")[0]  # the first way had no name
