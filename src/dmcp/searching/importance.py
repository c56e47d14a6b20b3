"""Which channels matter: how much the outputs change without them, and how large their weights are."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dmcp.arguments import checked
from dmcp.errors import DataError
from dmcp.runtime.batches import FewBatches, device_of, input_of, is_used_up, on_device, size_of, widest
from dmcp.runtime.checkpoint import untouched
from dmcp.runtime.distributed import current, gather, sum_values
from dmcp.searching.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.layout import Atom, Layout, in_spaces
from dmcp.tracing.modules import kept_modes, split_batch, tensors_in, without_autocast
from dmcp.tracing.widths import ChannelSpace

_DIRECTIONS = 64  # random directions of the outputs, each for other samples
_SAMPLES = 2  # of each direction
SCORED_ON = _DIRECTIONS * _SAMPLES  # samples

Scores = Mapping[str, Tensor]  # by space: one number for each channel, the larger the better. (size,)


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


# how much the outputs change


@checked
@without_autocast
def importance(model: nn.Module, graph: ChannelGraph, batches: Iterable[Any]) -> dict[str, Tensor]:
    """Score each channel by how much the outputs change, to first order, when it is removed. -> {space: (size,)}

    The score is the squared norm of the derivative of the outputs with respect to a factor of the channel wherever it
    is read, estimated with random directions on the first 128 samples (fewer, if there are not as many). Outputs count
    relative to their size. Channels of a space that the outputs do not depend on are scored by their filters.

    No labels and no loss are used, only the inputs of the batches. The model, its BatchNorm statistics and all random
    states stay as they are, and the same batches give the same scores. With several ranks, all get the mean over the
    samples of all.
    """
    return importance_in(Supernet(model, graph), batches)


def importance_in(net: Supernet, batches: Iterable[Any]) -> dict[str, Tensor]:
    """The importance of the channels of a supernet, which stays as it is."""
    device = device_of(net.model)
    random = torch.Generator().manual_seed(0)
    scores = torch.zeros(len(net.position), dtype=widest(device), device=device)
    sizes: list[Tensor] = []  # of the outputs

    with untouched(batches, device):
        samples = list(itertools.islice(_samples(batches), _DIRECTIONS))
    world = current()
    count = int(sum_values(torch.tensor(len(samples)), world))  # a rank may have none
    if not count:
        raise DataError("The importance of channels needs at least one batch, but the loader gave none.")
    with kept_modes(net), torch.enable_grad():
        net.eval()
        for x in samples:
            factors = torch.ones(len(net.position), device=device, requires_grad=True)
            output = net.run_scaled(on_device(x, device), factors)
            parts = [part for part in tensors_in(output) if part.requires_grad]
            if not sizes:
                sizes = [part.detach().abs().mean().clamp(min=1e-12) for part in parts]
            scores += _slope(parts, sizes, factors, random).square()

    means = sum_values(scores, world).cpu().nan_to_num() / count
    by_space = torch.split(means, [space.size for space in net.graph.spaces])
    result = norms(net.model, net.graph)
    for space, score in zip(net.graph.spaces, by_space, strict=True):
        if score.any():
            result[space.name] = score
    return result


def scores_of(model: nn.Module, graph: ChannelGraph, samples: Sequence[Any]) -> dict[str, Tensor]:
    """The importance of channels; the norms of their filters where there are no samples, or gates would be lost."""
    if graph.loses_gates or not has_samples(samples):
        return norms(model, graph)
    return importance(model, graph, samples)


def first_samples(batches: Iterable[Any] | None, device: torch.device, count: int = SCORED_ON) -> list[Any]:
    """The first samples, in batches of a few each; none of a loader that does not repeat them."""
    if batches is None or is_used_up(batches):
        return []
    if isinstance(batches, FewBatches):
        batches = batches.loader  # whose workers are to stay as they are
    with untouched(batches, device):
        return [(x,) for x in itertools.islice(_samples(batches), count // _SAMPLES)]


def has_samples(samples: Sequence[Any]) -> bool:
    """Whether any rank has samples: if one has, all ranks compute scores together, also those without samples."""
    return any(gather(bool(samples), current()))


def _samples(batches: Iterable[Any]) -> Iterator[Any]:
    """Inputs of a few samples each."""
    for batch in batches:
        if size_of(batch):
            yield from split_batch(input_of(batch), _SAMPLES)


def _slope(outputs: Sequence[Tensor], sizes: Sequence[Tensor], factors: Tensor, random: torch.Generator) -> Tensor:
    """The derivative of the outputs in a random direction with respect to the factors. (channels,) -> (channels,)

    The mean of its square over directions is the squared norm of the derivative of all outputs.
    """
    along = factors.new_zeros(())
    for output, size in zip(outputs, sizes, strict=False):
        direction = torch.randn(output.shape, generator=random).to(output)  # the same numbers on every device
        along = along + (output * direction / size).sum()
    if not along.requires_grad:
        return torch.zeros_like(factors)
    return torch.autograd.grad(along, factors)[0]


def norms(model: nn.Module, graph: ChannelGraph, power: int = 2) -> dict[str, Tensor]:
    """Score each channel by the norm of its filters; zeros where a space has none. -> {space: (size,)}"""
    scores = {}
    for space in graph.spaces:
        score = magnitude(model, graph, space, power)
        scores[space.name] = torch.zeros(space.size) if score is None else score
    return scores


def strongest(scores: Tensor | None, width: int) -> list[int]:
    """The channels with the largest scores, in their order; the first ones where there are no scores. (size,)"""
    if scores is None:
        return list(range(width))
    return sorted(scores.argsort(descending=True, stable=True)[:width].tolist())
