"""Gates folded into tensors: how the supernet and the verification run a sub-network without cutting it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dmcp.tracing.graph import GateFold
from dmcp.tracing.layout import atoms_of
from dmcp.tracing.modules import as_arguments, call_model


def run_folded(model: nn.Module, x: Any, folded: dict[str, Tensor]) -> Any:
    """Run a network with some of its tensors replaced.

    A tensor that several modules share is named for each of them, a module with several names only once: torch's own
    `tie_weights` replaces the tensors of such a module twice and never gives them back.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(model, folded, args, kwargs, tie_weights=False)

    return call_model(run, as_arguments(model, x))


def shared_names(model: nn.Module) -> dict[str, str]:
    """Tensors that several modules share: each further name, and the first one."""
    first: dict[Tensor, str] = {}
    further: dict[str, str] = {}
    for path, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{leaf}" if path else leaf
            if tensor is not None and first.setdefault(tensor, name) != name:
                further[name] = first[tensor]
    return further


def under_all_names(tensors: dict[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    """The same tensors, also under the further names of those that modules share."""
    return tensors | {name: tensors[first] for name, first in ties.items() if first in tensors}


class FoldTable(nn.Module):
    """Multiplies tensors by gates: where each channel of their dims has its gates in one vector of all gates.

    A channel of a product of spaces has several gates, which are multiplied; where it has fewer than others, the rest
    point to a last gate that is always open. One gather spreads the vector over the dims of all tensors.
    """

    index: Tensor  # numbers of gates, for each channel of each fold. (depth, channels of all folds)

    def __init__(self, folds: tuple[GateFold, ...], space_sizes: list[int]) -> None:
        super().__init__()
        offsets = [0, *itertools.accumulate(space_sizes)]  # the first gate of each space, and the gate always open
        indices = [_gate_index(fold, offsets) for fold in folds]
        depth = max((len(index) for index in indices), default=1)
        padded = [_deepened(index, depth, open_gate=offsets[-1]) for index in indices]
        index = torch.cat([torch.zeros(depth, 0, dtype=torch.int64), *padded], dim=1)  # there may be no fold
        self.register_buffer("index", index, persistent=False)
        self.folds = [(fold.tensor, fold.dim) for fold in folds]
        self.sizes = [index.shape[1] for index in indices]
        self.names = list(dict.fromkeys(fold.tensor for fold in folds))

    def fold(self, find_tensor: Callable[[str], Tensor], gates: Tensor) -> dict[str, Tensor]:
        """Tensors multiplied by their gates, by name."""
        with_open_gate = torch.cat([gates, gates.new_ones(1)])
        factors = with_open_gate[self.index[0]]
        for row in self.index[1:]:
            factors = factors * with_open_gate[row]

        folded: dict[str, Tensor] = {}
        factors_of: dict[torch.dtype, tuple[Tensor, ...]] = {}  # of each fold, in each dtype that is needed
        for number, (name, dim) in enumerate(self.folds):
            tensor = folded[name] if name in folded else find_tensor(name)
            if tensor.dtype not in factors_of:
                factors_of[tensor.dtype] = torch.split(factors.to(tensor.dtype), self.sizes)
            shape = [1] * tensor.ndim
            shape[dim] = -1
            folded[name] = tensor * factors_of[tensor.dtype][number].reshape(shape)
        return folded


def _gate_index(fold: GateFold, offsets: list[int]) -> Tensor:
    """For each channel of a dim, the numbers of the gates that multiply it. -> (depth, channels)"""
    depth = max(len(atoms_of((segment,))) for segment in fold.layout)
    columns: list[Tensor] = []
    for segment in fold.layout:
        # A segment is a product of spaces and ints: its last factor changes fastest from channel to channel.
        rows = torch.zeros(0, 1, dtype=torch.int64)  # one for each space so far
        for axis in segment:
            count = rows.shape[1]
            if isinstance(axis, int):
                rows = rows.repeat_interleave(axis, dim=1)
            else:
                gates = torch.arange(offsets[axis.index], offsets[axis.index + 1])
                rows = torch.cat([rows.repeat_interleave(len(gates), dim=1), gates.repeat(count)[None]])
        columns.append(_deepened(rows, depth, open_gate=offsets[-1]))
    return torch.cat(columns, dim=1)


def _deepened(index: Tensor, depth: int, open_gate: int) -> Tensor:
    """An index of more rows, which point to the gate that is always open. (d, n) -> (depth, n)"""
    rest = torch.full((depth - len(index), index.shape[1]), open_gate)
    return torch.cat([index, rest])
