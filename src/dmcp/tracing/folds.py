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
from dmcp.tracing.modules import call_model


def run_folded(model: nn.Module, x: Any, folded: dict[str, Tensor]) -> Any:
    """Run a network with some of its tensors replaced.

    A tensor that several modules share is named for each of them, a module with several names only once: torch's own
    `tie_weights` replaces the tensors of such a module twice and never gives them back.
    """
    return call_model(lambda *args, **kwargs: functional_call(model, folded, args, kwargs, tie_weights=False), x)


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
    """Spreads the gate vector over the dims of tensors: one gather for all of them."""

    index: Tensor  # places in the gate vector. (depth, all dims)

    def __init__(self, folds: tuple[GateFold, ...], sizes: list[int]) -> None:
        super().__init__()
        offsets = [0, *itertools.accumulate(sizes)]
        tables = [_gate_index(fold, offsets) for fold in folds]
        depth = max((len(table) for table in tables), default=1)
        ones = [torch.full((depth - len(table), table.shape[1]), offsets[-1]) for table in tables]
        rows = [torch.cat(pair) for pair in zip(tables, ones, strict=True)]
        index = torch.cat(rows, dim=1) if rows else torch.zeros(1, 0, dtype=torch.int64)
        self.register_buffer("index", index, persistent=False)
        self.folds = [(fold.tensor, fold.dim) for fold in folds]
        self.sizes = [table.shape[1] for table in tables]
        self.names = list(dict.fromkeys(fold.tensor for fold in folds))

    def fold(self, find: Callable[[str], Tensor], gates: Tensor) -> dict[str, Tensor]:
        """Tensors multiplied by their gates, by name."""
        extended = torch.cat([gates, gates.new_ones(1)])
        factors = extended[self.index[0]]
        for row in self.index[1:]:
            factors = factors * extended[row]
        folded: dict[str, Tensor] = {}
        cast: dict[torch.dtype, tuple[Tensor, ...]] = {}
        for place, (name, dim) in enumerate(self.folds):
            tensor = folded[name] if name in folded else find(name)
            if tensor.dtype not in cast:
                cast[tensor.dtype] = torch.split(factors.to(tensor.dtype), self.sizes)
            shape = [1] * tensor.ndim
            shape[dim] = -1
            folded[name] = tensor * cast[tensor.dtype][place].reshape(shape)
        return folded


def _gate_index(fold: GateFold, offsets: list[int]) -> Tensor:
    """For each channel of a dim, the gates that multiply it; the last gate is always one. -> (D, n)"""
    depth = max(len(atoms_of((segment,))) for segment in fold.layout)
    columns: list[Tensor] = []
    for segment in fold.layout:
        rows = torch.zeros(0, 1, dtype=torch.int64)
        count = 1
        for axis in segment:
            size = axis if isinstance(axis, int) else offsets[axis.index + 1] - offsets[axis.index]
            rows = rows.repeat_interleave(size, dim=1)
            if not isinstance(axis, int):
                own = torch.arange(offsets[axis.index], offsets[axis.index + 1]).repeat(count)
                rows = torch.cat([rows, own[None]])
            count *= size
        ones = torch.full((depth - len(rows), count), offsets[-1])
        columns.append(torch.cat([rows.reshape(-1, count), ones]))
    return torch.cat(columns, dim=1)
