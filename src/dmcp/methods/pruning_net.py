"""PruningNet: a network whose weights are computed from its widths, and batches that bring a random structure each.

For every conv and linear that has channels of spaces, two linear layers turn the shares that are kept of these spaces
into a change of its weight: weight + (relu(first @ shares + shift) @ second). The weight itself, the bias of the second
layer, is the network's own parameter. What is not kept is gated, which is the same as cropping.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from dmcp.batches import Loader, batches_from, device_of, generator, input_of, labels_of, size_of, start_epoch
from dmcp.errors import TrainingError
from dmcp.sampling import Options
from dmcp.slicing import unwrap
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph

_INIT, _STRUCTURES = 1, 2  # what random numbers are for


class PruningNet(nn.Module):
    """A copy of the model, and what computes the weights of each sub-network of it."""

    shares_of: Tensor
    sizes: Tensor

    def __init__(self, model: nn.Module, graph: ChannelGraph, hidden: int, most_params: int, seed: int) -> None:
        super().__init__()
        model = unwrap(model)
        spaces = spaces_of(model, graph)
        count = sum(model.get_parameter(name).numel() for name in spaces)
        if hidden * count > most_params:
            fits = most_params // count
            way = f"set hidden to at most {fits}, or raise it" if fits else "raise it"
            raise TrainingError(
                f"The PruningNet of this network would have {hidden * count:,} numbers, more than most_params "
                f"({most_params:,}): {way}."
            )
        self.net = Supernet(model, graph)
        self.net.alpha.requires_grad_(False)  # no Markov chain here
        self.names = list(spaces)
        draw, device = generator(seed, _INIT), device_of(self.net)
        mask = torch.zeros(len(spaces), 1, len(graph.spaces))
        for row, numbers in zip(mask, spaces.values(), strict=True):
            row[:, numbers] = 1
        # The first layers of all blocks are one tensor, masked: one kernel. (L, hidden, S), (L, hidden)
        shape = (len(spaces), hidden, len(graph.spaces))
        first = torch.randn(shape, generator=draw) / mask.sum(dim=2, keepdim=True).clamp(min=1).sqrt()
        self.first = nn.Parameter((first * mask).to(device))
        self.shift = nn.Parameter(torch.randn(shape[:2], generator=draw).to(device))
        # Zeros: every sub-network starts with the weights that the model was given.
        own = [self.net.model.get_parameter(name) for name in self.names]
        self.second = nn.ParameterList([nn.Parameter(it.new_zeros(hidden, it.numel())) for it in own])
        self.register_buffer("shares_of", mask.to(device), persistent=False)
        self.register_buffer("sizes", graph.full.tensor().to(device), persistent=False)

    def forward(self, x: Any, widths: Tensor) -> Any:
        """Run the sub-network with these widths, (S,) int64, on the model's input."""
        return functional_call(self.net, self.weights(widths), (x, self.net.hard(widths)))

    def weights(self, widths: Tensor) -> dict[str, Tensor]:
        """What the blocks compute for these widths, by its name in the supernet, not cropped. (S,)"""
        with torch.autocast(self.first.device.type, enabled=False):  # reads each number once: memory is what it costs
            codes = (self.first * self.shares_of) @ (widths / self.sizes).to(self.first.dtype) + self.shift
            # The root makes a step of SGD move a weight about as far as it would without the blocks.
            codes = F.relu(codes) / math.sqrt(codes.shape[1])  # (L, hidden)
            found: dict[str, Tensor] = {}
            for name, code, second in zip(self.names, codes.unbind(), self.second, strict=True):
                own = self.net.model.get_parameter(name)
                found[f"model.{name}"] = own + (code.to(own.dtype) @ second).view(own.shape)
        return found


def spaces_of(model: nn.Module, graph: ChannelGraph) -> dict[str, list[int]]:
    """The weights of convs and linears that have channels of spaces, and the numbers of these spaces."""
    own = dict(model.named_parameters())  # each once
    found: dict[str, list[int]] = {}
    for path, part in model.named_modules():
        numbers = [number for number, space in enumerate(graph.spaces) if path in (*space.writers, *space.readers)]
        name = f"{path}.weight" if path else "weight"
        if numbers and name in own and isinstance(part, _ConvNd | nn.Linear):
            found[name] = numbers
    return found


class Grid:
    """Widths to draw structures from: so many for each space, evenly from the least to the most."""

    def __init__(self, options: Options, groups: int) -> None:
        self.options = options  # all that are allowed
        self.counts = (self.options.last + 1).clamp(max=groups)  # (S,)
        steps = torch.arange(groups)[:, None].minimum(self.counts - 1) / (self.counts - 1).clamp(min=1)
        self.table = self.options.widths((steps * self.options.last).round().long()).T.contiguous()  # (S, groups)

    def draw(self, count: int, draw: torch.Generator) -> Tensor:
        """Random structures, each width of each space equally likely. -> (count, S) int64"""
        chances = torch.rand(count, len(self.counts), generator=draw, dtype=torch.float64)
        return self.table[torch.arange(len(self.counts)), (chances * self.counts).long()]


class Structured:
    """A loader whose batches are ((input, widths), labels), with a random structure each.

    The structures are given by seed, epoch and place. For a loss of the user's own, the whole batch is in the place of
    the labels.
    """

    def __init__(self, loader: Loader, grid: Grid, seed: int, device: torch.device, whole: bool) -> None:
        self.loader, self.grid, self.seed, self.device, self.whole = loader, grid, seed, device, whole
        self.epoch = 0
        self.seen: dict[int, int] = {}  # samples of each batch that was given out, by its place
        # where the training looks for generators, which it saves and brings back
        self.sampler, self.batch_sampler, self.generator = (
            getattr(loader, name, None) for name in ("sampler", "batch_sampler", "generator")
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.starting_at(0)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next."""
        self.epoch = epoch
        start_epoch(self.loader, epoch)

    def starting_at(self, skip: int) -> Iterator[Any]:
        """The batches of the epoch from number `skip` on; those before are drawn now, not at the first step."""
        structures = self.grid.draw(len(self), generator(self.seed, _STRUCTURES, self.epoch)).to(self.device)
        batches = batches_from(self.loader, self.epoch, skip)
        return map(self._joined, batches, range(skip, len(self)), structures[skip:].unbind())

    def _joined(self, batch: Any, place: int, widths: Tensor) -> Any:
        self.seen[place] = size_of(batch)
        return (input_of(batch), widths), batch if self.whole else labels_of(batch)

    def samples(self) -> int:
        """Samples in an epoch; of batches that were not given out, as after an interruption, the mean is taken."""
        sizes = self.seen or {0: size_of(next(iter(self.loader)))}
        return round(sum(sizes.values()) / len(sizes) * len(self))
