"""The supernet: the model's own copy, with gates folded into its parameters, and the alphas beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dmcp.errors import WidthsError
from dmcp.graph import ChannelGraph, GateFold
from dmcp.layouts import atoms_of
from dmcp.markov import group_sizes, marginals
from dmcp.recording import call_model
from dmcp.slicing import narrow, unwrap
from dmcp.spaces import Widths, fingerprint


class Supernet(nn.Module):
    """A copy of the model whose channels can be gated, and the alphas of the Markov chains."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, groups: int = 10, align: int = 1) -> None:
        super().__init__()
        model = unwrap(model)
        if fingerprint(model) != graph.fingerprint:
            raise WidthsError(
                "This graph was traced from another architecture: trace this model, then make its supernet."
            )
        if type(groups) is not int or groups < 1 or type(align) is not int or align < 1:
            raise WidthsError(f"groups and align must be ints of at least 1, not {groups!r} and {align!r}.")
        self.model = narrow(model, {}, {})
        self.graph = graph
        sizes = [group_sizes(space.size, groups, align) for space in graph.spaces]
        most = max(len(row) for row in sizes)
        padded = torch.tensor([row + (0,) * (most - len(row)) for row in sizes])  # (S, G), zeros behind short chains
        device = next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))
        self.alpha = nn.Parameter(torch.zeros(len(sizes), most - 1, device=device))
        self.sizes: Tensor
        self.group_of: Tensor
        self.space_of: Tensor
        self.position: Tensor
        spaces = [space.size for space in graph.spaces]
        group = torch.cat(
            [
                torch.arange(len(row)).repeat_interleave(torch.tensor(row)) + number * most
                for number, row in enumerate(sizes)
            ]
        )
        space = torch.arange(len(spaces)).repeat_interleave(torch.tensor(spaces))
        for name, table in (
            ("sizes", padded),
            ("group_of", group),  # of each channel: its place in the flattened (S, G) table
            ("space_of", space),  # of each channel: its space
            ("position", torch.cat([torch.arange(size) for size in spaces])),  # of each channel: its place in the space
        ):
            self.register_buffer(name, table.to(device), persistent=False)
        self._hard = _FoldTable(graph.hard_folds, graph)
        self._soft = _FoldTable(graph.soft_folds, graph)

    def weights(self) -> list[nn.Parameter]:
        """Parameters of the network."""
        return list(self.model.parameters())

    def alphas(self) -> list[nn.Parameter]:
        """Architecture parameters."""
        return [self.alpha]

    @property
    def floor(self) -> Widths:
        """The first group of every space."""
        return self.graph.widths(self.sizes[:, 0].tolist())

    def marginals(self) -> Tensor:
        """Chance that each group survives; zero behind the end of a short chain. -> (S, G)"""
        return marginals(self.alpha) * (self.sizes > 0)

    def hard(self, widths: Mapping[str, int] | Tensor) -> Tensor:
        """Gates of the sub-network with these widths. -> (channels,) bool"""
        kept = widths if isinstance(widths, Tensor) else self.graph.widths(widths).tensor()
        if kept.shape != self.sizes.shape[:1] or kept.dtype.is_floating_point:
            raise WidthsError(
                f"Widths must be {len(self.sizes)} ints, one per space, not {kept.dtype} {tuple(kept.shape)}."
            )
        return self.position < kept.to(self.position.device)[self.space_of]

    def soft(self) -> Tensor:
        """Gates of the soft network: the chance that each channel survives. -> (channels,)"""
        return self.marginals().flatten()[self.group_of]

    def forward(self, x: Any, gates: Tensor) -> Any:
        """Run with gates: bool ones fold into readers, others into norms."""
        if gates.shape != self.position.shape:
            raise WidthsError(
                f"Gates must be one number per channel, {len(self.position)} in all, not {tuple(gates.shape)}."
            )
        table = self._hard if gates.dtype == torch.bool else self._soft
        folded = table.fold(self.model, gates)
        return call_model(lambda *args, **kwargs: functional_call(self.model, folded, args, kwargs), x)


class _FoldTable:
    """Index tables that spread the gate vector over the dims of tensors."""

    def __init__(self, folds: tuple[GateFold, ...], graph: ChannelGraph) -> None:
        offsets = [0]
        for space in graph.spaces:
            offsets.append(offsets[-1] + space.size)
        self.entries = [(fold.tensor, fold.dim, _gate_index(fold, offsets)) for fold in folds]

    def fold(self, model: nn.Module, gates: Tensor) -> dict[str, Tensor]:
        """Tensors of the model multiplied by their gates, by name."""
        extended = torch.cat([gates, gates.new_ones(1)])
        folded: dict[str, Tensor] = {}
        for position, (name, dim, index) in enumerate(self.entries):
            if index.device != gates.device:
                index = index.to(gates.device)
                self.entries[position] = (name, dim, index)
            tensor = folded[name] if name in folded else _tensor(model, name)
            factor = extended[index[0]]
            for column in index[1:]:
                factor = factor * extended[column]
            shape = [1] * tensor.ndim
            shape[dim] = -1
            folded[name] = tensor * factor.to(tensor.dtype).reshape(shape)
        return folded


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), leaf)
    assert isinstance(tensor, Tensor)
    return tensor


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
