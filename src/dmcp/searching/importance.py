"""Where the channels of a space are in weights and norms, and how large their weights are."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.layout import Atom, Layout, in_spaces
from dmcp.tracing.widths import ChannelSpace


@dataclass(frozen=True, eq=False)
class ChannelRows:
    """The rows of a tensor that belong to the channels of a space."""

    name: str  # of the parameter or buffer
    dim: int
    rows: Tensor  # of each channel, on the CPU. (size, r)

    def numbers(self, model: nn.Module) -> Tensor:
        """What the parameter holds of each channel, all of its numbers in one row. -> (size, n)"""
        tensor = model.get_parameter(self.name).detach().transpose(0, self.dim)
        return tensor[self.rows.to(tensor.device)].flatten(1)


# where the channels are


def find_rows(model: nn.Module, graph: ChannelGraph, space: ChannelSpace) -> list[ChannelRows]:
    """Every parameter that has the channels, once for each dim that has them: filters, biases, norms, readers."""
    parameters = dict(model.named_parameters())  # a tied one has one name
    number = graph.spaces.index(space)
    return [rows for rows in _rows_of_spaces(graph)[number] if rows.name in parameters]


def find_filters(model: nn.Module, graph: ChannelGraph, space: ChannelSpace) -> list[ChannelRows]:
    """The filters of convs and linears that write the channels; all of them, where several layers are tied."""
    return [rows for rows, layer in _find_weights(model, graph, space) if _writes(layer, rows)]


def find_scales(model: nn.Module, graph: ChannelGraph, space: ChannelSpace) -> list[ChannelRows]:
    """The scales of batch norms over the channels."""
    return [rows for rows, layer in _find_weights(model, graph, space) if isinstance(layer, _NormBase)]


def _find_weights(
    model: nn.Module, graph: ChannelGraph, space: ChannelSpace
) -> Iterator[tuple[ChannelRows, nn.Module]]:
    """The rows of tensors named "weight", and their layers."""
    for rows in find_rows(model, graph, space):
        path, _, name = rows.name.rpartition(".")
        if name == "weight":
            yield rows, model.get_submodule(path)


def _writes(layer: nn.Module, rows: ChannelRows) -> bool:
    """Whether the dim is that of the layer's outputs."""
    if not isinstance(layer, _ConvTransposeNd):
        return isinstance(layer, _ConvNd | nn.Linear) and rows.dim == 0
    if rows.dim == 1 or layer.groups == 1:
        return rows.dim == 1
    # Inputs lie along dim 0, group after group; where whole groups go, as in a depthwise one, their outputs go, too.
    inputs_per_group = layer.in_channels // layer.groups
    groups = set((rows.rows[0] // inputs_per_group).tolist())
    return rows.dim == 0 and len(groups) * inputs_per_group == rows.rows.shape[1]


@functools.lru_cache(8)  # a graph never changes
def _rows_of_spaces(graph: ChannelGraph) -> list[list[ChannelRows]]:
    """For each space, every dim of every tensor that has its channels."""
    by_space: list[list[ChannelRows]] = [[] for _ in graph.spaces]
    sizes = tuple(space.size for space in graph.spaces)
    for name, layouts in graph.coupling.tensors.items():
        for dim, layout in enumerate(layouts):
            layout_in_spaces = in_spaces(graph.coupling.channels.resolve(layout), graph.space_numbers)
            for number, rows in _rows_in_layout(layout_in_spaces, sizes).items():
                by_space[number].append(ChannelRows(name, dim, rows))
    return by_space


@functools.lru_cache(64)  # many dims are alike, as those of a norm's tensors
def _rows_in_layout(layout: Layout, sizes: tuple[int, ...]) -> dict[int, Tensor]:
    """Which rows of a dim belong to each channel of each space that it has. -> {number: (size, r)}"""
    parts: dict[int, list[Tensor]] = {}
    offset = 0
    for segment in layout:
        lengths = []
        for axis in segment:
            if isinstance(axis, Atom):
                lengths.append(sizes[axis.index])
            else:
                lengths.append(axis)
        rows = torch.arange(offset, offset + math.prod(lengths)).reshape(lengths)
        for dim, axis in enumerate(segment):
            if isinstance(axis, Atom):
                parts.setdefault(axis.index, []).append(rows.movedim(dim, 0).reshape(lengths[dim], -1))
        offset += math.prod(lengths)
    return {number: torch.cat(rows, dim=1) for number, rows in parts.items()}


# how large their weights are


def numbers_of_channels(model: nn.Module, rows_of_tensors: Sequence[ChannelRows]) -> Tensor:
    """What several tensors hold of each channel, in double precision on the CPU. -> (size, n)"""
    return torch.cat([rows.numbers(model).cpu().double() for rows in rows_of_tensors], dim=1)


def magnitude(model: nn.Module, graph: ChannelGraph, space: ChannelSpace, power: int = 1) -> Tensor | None:
    """L1 norm (or squared L2 norm) of all filters that write each channel; None where there is none. -> (size,)"""
    filters = find_filters(model, graph, space)
    if not filters:
        return None
    return numbers_of_channels(model, filters).abs().pow(power).sum(dim=1)


def strongest(scores: Tensor | None, width: int) -> list[int]:
    """The channels with the largest scores, in their order; the first ones where there are no scores. (size,)"""
    if scores is None:
        return list(range(width))
    return sorted(scores.argsort(descending=True, stable=True)[:width].tolist())
