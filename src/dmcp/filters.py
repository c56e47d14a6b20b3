"""Where the channels of a space lie in weights and norms: for what ranks channels, and what silences them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dmcp.graph import ChannelGraph
from dmcp.spaces import ChannelSpace


@dataclass(frozen=True, eq=False)
class Place:
    """The rows of a tensor that belong to the channels of a space."""

    name: str  # of the parameter
    dim: int
    rows: Tensor  # of each channel, on the CPU. (size, r)

    def vectors(self, model: nn.Module) -> Tensor:
        """What the tensor holds of each channel, all of its numbers in one row. -> (size, n)"""
        tensor = model.get_parameter(self.name).detach().transpose(0, self.dim)
        return tensor[self.rows.to(tensor.device)].flatten(1)

    @torch.no_grad()
    def silence(self, model: nn.Module, channels: Tensor) -> None:
        """Set what the tensor holds of these channels to zero, in place."""
        tensor = model.get_parameter(self.name)
        tensor.transpose(0, self.dim)[self.rows[channels.cpu()].flatten().to(tensor.device)] = 0


def written(model: nn.Module, graph: ChannelGraph, space: ChannelSpace) -> list[Place]:
    """The filters of convs and linears that write the channels; all of them, where several layers are tied."""
    found: list[Place] = []
    for place in _places(graph, space):
        owner, _, leaf = place.name.rpartition(".")
        part = model.get_submodule(owner)
        out = int(isinstance(part, _ConvTransposeNd))
        if owner in space.writers and isinstance(part, _ConvNd | nn.Linear) and leaf == "weight" and place.dim == out:
            found.append(place)
    return found


def scaled(model: nn.Module, graph: ChannelGraph, space: ChannelSpace, leaf: str = "weight") -> list[Place]:
    """The scales (or shifts: "bias") of batch norms over the channels."""
    parts = ((place, place.name.rpartition(".")) for place in _places(graph, space))
    return [
        place for place, (owner, _, own) in parts if own == leaf and isinstance(model.get_submodule(owner), _NormBase)
    ]


def magnitude(model: nn.Module, graph: ChannelGraph, space: ChannelSpace, power: int = 1) -> Tensor | None:
    """L1 norm (or squared L2 norm) of all filters that write each channel; None where there is none. -> (size,)"""
    places = written(model, graph, space)
    parts = [place.vectors(model).cpu().double().abs().pow(power).sum(dim=1) for place in places]
    return torch.stack(parts).sum(dim=0) if parts else None


def _places(graph: ChannelGraph, space: ChannelSpace) -> Iterator[Place]:
    """Every dim of every parameter that has the channels."""
    # Where the channels lie in a tensor is known of cuts only: channel 0 alone, and all of them moved on by one.
    alone = graph.cuts({space.name: [0]})
    moved = graph.cuts({space.name: [*range(1, space.size), 0]})
    for name, cut in moved.items() if space.size > 1 else ():
        for dim, (follow, first) in enumerate(zip(cut, alone.get(name, ()), strict=False)):
            if follow is None or first is None:
                continue
            rows = [first[follow[first] != first]]  # those of channel 0; others did not move
            if not len(rows[0]):
                continue
            for _ in range(space.size - 1):
                rows.append(follow[rows[-1]])
            yield Place(name, dim, torch.stack(rows))
