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
class Place:
    """The rows of a tensor that belong to the channels of a space."""

    name: str  # of the parameter or buffer
    dim: int
    rows: Tensor  # of each channel, on the CPU. (size, r)

    def vectors(self, model: nn.Module) -> Tensor:
        """What the parameter holds of each channel, all of its numbers in one row. -> (size, n)"""
        tensor = model.get_parameter(self.name).detach().transpose(0, self.dim)
        return tensor[self.rows.to(tensor.device)].flatten(1)


# which places there are


def placed(model: nn.Module, graph: ChannelGraph, space: ChannelSpace) -> list[Place]:
    """Every parameter that has the channels, once for each dim that has them: filters, biases, norms, readers."""
    parameters = dict(model.named_parameters())  # a tied one has one name
    return [place for place in _places(graph)[graph.spaces.index(space)] if place.name in parameters]


def written(model: nn.Module, graph: ChannelGraph, space: ChannelSpace) -> list[Place]:
    """The filters of convs and linears that write the channels; all of them, where several layers are tied."""
    return [place for place, part in _weights(model, graph, space) if _writes(part, place)]


def scaled(model: nn.Module, graph: ChannelGraph, space: ChannelSpace) -> list[Place]:
    """The scales of batch norms over the channels."""
    return [place for place, part in _weights(model, graph, space) if isinstance(part, _NormBase)]


def _weights(model: nn.Module, graph: ChannelGraph, space: ChannelSpace) -> Iterator[tuple[Place, nn.Module]]:
    for place in placed(model, graph, space):
        owner, _, own = place.name.rpartition(".")
        if own == "weight":
            yield place, model.get_submodule(owner)


def _writes(part: nn.Module, place: Place) -> bool:
    """Whether the dim is that of the layer's outputs."""
    if not isinstance(part, _ConvTransposeNd):
        return isinstance(part, _ConvNd | nn.Linear) and place.dim == 0
    if place.dim == 1 or part.groups == 1:
        return place.dim == 1
    # Inputs lie along dim 0, group after group; where whole groups go, as in a depthwise one, their outputs go, too.
    each = part.in_channels // part.groups
    return place.dim == 0 and len(set((place.rows[0] // each).tolist())) * each == place.rows.shape[1]


@functools.lru_cache(8)  # a graph never changes
def _places(graph: ChannelGraph) -> list[list[Place]]:
    """Of each space, every dim of every tensor that has its channels."""
    found: list[list[Place]] = [[] for _ in graph.spaces]
    sizes, channels = tuple(space.size for space in graph.spaces), graph.coupling.channels
    for name, dims in graph.coupling.tensors.items():
        for dim, layout in enumerate(dims):
            for number, own in _rows(in_spaces(channels.resolve(layout), graph.space_numbers), sizes).items():
                found[number].append(Place(name, dim, own))
    return found


@functools.lru_cache(64)  # many dims are alike, as those of a norm's tensors
def _rows(layout: Layout, sizes: tuple[int, ...]) -> dict[int, Tensor]:
    """Which rows of a dim belong to each channel of each space that it has. -> {number: (size, r)}"""
    found: dict[int, list[Tensor]] = {}
    offset = 0
    for segment in layout:
        lengths = [axis if isinstance(axis, int) else sizes[axis.index] for axis in segment]
        rows = torch.arange(offset, offset + math.prod(lengths)).reshape(lengths)
        for dim, axis in enumerate(segment):
            if isinstance(axis, Atom):
                found.setdefault(axis.index, []).append(rows.movedim(dim, 0).reshape(lengths[dim], -1))
        offset += math.prod(lengths)
    return {number: torch.cat(parts, dim=1) for number, parts in found.items()}


# what is known of each channel


def vectors(model: nn.Module, places: Sequence[Place]) -> Tensor:
    """What all places hold of each channel, in double precision on the CPU. -> (size, n)"""
    return torch.cat([place.vectors(model).cpu().double() for place in places], dim=1)


def magnitude(model: nn.Module, graph: ChannelGraph, space: ChannelSpace, power: int = 1) -> Tensor | None:
    """L1 norm (or squared L2 norm) of all filters that write each channel; None where there is none. -> (size,)"""
    places = written(model, graph, space)
    return vectors(model, places).abs().pow(power).sum(dim=1) if places else None


def strongest(scores: Tensor | None, width: int) -> list[int]:
    """The channels with the largest scores, in their order; the first ones where there are no scores. (size,)"""
    if scores is None:
        return list(range(width))
    return sorted(scores.argsort(descending=True, stable=True)[:width].tolist())
