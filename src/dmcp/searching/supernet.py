"""The supernet: a copy of the model whose gates make any sub-network of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.arguments import PositiveInt, checked
from dmcp.errors import WidthsError
from dmcp.markov import group_sizes, marginals
from dmcp.tracing.folds import FoldTable, run_folded, shared_names, under_all_names
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import Cut, narrow, unwrap
from dmcp.tracing.widths import Widths


class Supernet(nn.Module):
    """A copy of the model whose channels can be gated, and the alphas of the Markov chains."""

    sizes: Tensor  # channels of each group, zeros behind short chains. (S, G)
    group_of: Tensor  # of each channel: its group in the flattened (S, G) table
    space_of: Tensor  # of each channel: its space
    position: Tensor  # of each channel: its index in the space

    @checked
    def __init__(
        self, model: nn.Module, graph: ChannelGraph, groups: PositiveInt = 10, align: int | None = None
    ) -> None:
        super().__init__()
        model = unwrap(model)
        graph.check_architecture(model)
        if graph.loses_gates:
            raise WidthsError(
                "This model recomputes layers in the backward pass (activation checkpointing), or keeps weights for "
                "later runs, so gates would be lost. Turn that off for the search."
            )
        self.model = narrow(model, {}, {})  # a copy
        self.graph = graph
        device = next(self.model.parameters()).device

        # The groups of each space; rows of spaces with fewer groups end in zeros.
        groups_of_spaces = [group_sizes(space.size, groups, space.step(align)) for space in graph.spaces]
        longest = max(len(row) for row in groups_of_spaces)
        sizes = torch.tensor([row + (0,) * (longest - len(row)) for row in groups_of_spaces])
        self.alpha = nn.Parameter(torch.zeros(len(sizes), longest - 1, device=device))

        # What is looked up for each channel of the network, space after space.
        space_sizes = [space.size for space in graph.spaces]
        group_of = torch.arange(sizes.numel()).repeat_interleave(sizes.flatten())
        space_of = torch.arange(len(space_sizes)).repeat_interleave(torch.tensor(space_sizes))
        position = torch.cat([torch.arange(size) for size in space_sizes])
        self.register_buffer("sizes", sizes.to(device), persistent=False)
        self.register_buffer("group_of", group_of.to(device), persistent=False)
        self.register_buffer("space_of", space_of.to(device), persistent=False)
        self.register_buffer("position", position.to(device), persistent=False)

        self._hard = FoldTable(graph.hard_folds, space_sizes).to(device)
        self._soft = FoldTable(graph.soft_folds, space_sizes).to(device)
        self._ties = shared_names(self.model)

    def weights(self) -> list[nn.Parameter]:
        """Parameters of the network."""
        return list(self.model.parameters())

    def alphas(self) -> list[nn.Parameter]:
        """Architecture parameters."""
        return [self.alpha]

    @property
    def min_widths(self) -> Widths:
        """The first group of every space."""
        return self.graph.widths(self.sizes[:, 0].tolist())

    def marginals(self) -> Tensor:
        """Probability that each group is kept; zero behind the end of a short chain. -> (S, G)"""
        return marginals(self.alpha) * (self.sizes > 0)

    def hard(self, widths: Mapping[str, int] | Sequence[int] | Tensor) -> Tensor:
        """Gates of the sub-network with these widths: its first channels. -> (channels,) bool"""
        return self.hard_unchecked(self.graph.widths(widths).tensor().to(self.position.device))

    def hard_unchecked(self, widths: Tensor) -> Tensor:
        """Like `hard`, but without a check of the widths, for which the host would wait. (S,) -> (channels,) bool"""
        return self.position < widths[self.space_of]

    def soft(self) -> Tensor:
        """Gates of the soft network: each channel's marginal (eq. 7). -> (channels,)"""
        return self.marginals().flatten()[self.group_of]

    def forward(self, x: Any, gates: Tensor) -> Any:
        """Run with gates: bool ones are folded into readers, others into norms."""
        return run_folded(self.model, x, self.fold(gates))

    def unfolded(self) -> dict[str, Tensor]:
        """What `fold` gives for gates that are all open, without any computation."""
        tensors = {name: attrgetter(name)(self.model) for name in self._hard.names}
        return under_all_names({name: tensor.view_as(tensor) for name, tensor in tensors.items()}, self._ties)

    def run_scaled(self, x: Any, factors: Tensor) -> Any:
        """Run with each channel multiplied by a factor wherever it is read: a channel times 0 is one that is cut.

        (channels,)
        """
        return run_folded(self.model, x, self._fold(self._hard, factors))

    def fold(self, gates: Tensor) -> dict[str, Tensor]:
        """The weights that differ with these gates, by name."""
        table = self._soft
        if gates.dtype == torch.bool:
            table = self._hard
        return self._fold(table, gates)

    def _fold(self, table: FoldTable, gates: Tensor) -> dict[str, Tensor]:
        return under_all_names(table.fold(lambda name: attrgetter(name)(self.model), gates), self._ties)


# one sub-network that is really narrow

Slice = tuple[int, int | Tensor]  # a dim, and how many first channels of it are kept, or which


class Narrow:
    """One sub-network as a really narrow network, whose weights are slices of the shared ones.

    It computes what the gated one does, at the cost of its own width; its running statistics and modes are its own. On
    GPUs convolutions of odd widths are slow: with `align` the network is as wide as the next multiple, and the rest of
    its channels are gated. With a `stem` its first layers are skipped, and their output `h` at full width is an input.
    """

    def __init__(
        self,
        net: Supernet,
        widths: Mapping[str, int],
        align: int = 1,
        stem: Sequence[str] = (),
        stem_value: int | None = None,  # number of its output in the last recording
    ) -> None:
        graph = net.graph
        device = net.position.device
        exact = graph.widths(widths)
        aligned = graph.widths([min(space.size, -(-exact[space.name] // align) * align) for space in graph.spaces])
        cuts = graph.cuts(aligned)
        self.model = net.model
        self.skeleton = narrow(net.model, cuts, graph.attributes(aligned))
        self.run: Callable[[Any, Tensor | None], Any] = self._run
        self.stem = stem
        skip(self.skeleton, stem)
        self.ties = shared_names(self.skeleton)
        self.slices = {name: _slices(cut, device) for name, cut in cuts.items()}

        # The part of the stem's output that is read.
        self.h_slices: list[Slice] = []
        self.first_channels: int | None = None  # how many, if these are all that is read
        if stem_value is not None:
            self.h_slices = _slices(graph.cut_value(stem_value, aligned), device)
            if len(self.h_slices) == 1:
                dim, kept = self.h_slices[0]
                if dim == 1 and isinstance(kept, int):
                    self.first_channels = kept

        # Channels that are there because of `align` only are gated.
        self.gates: Tensor | None = None
        if aligned != exact:
            pairs = zip(aligned.values(), exact.values(), strict=True)
            self.gates = torch.cat([torch.arange(wide) < kept for wide, kept in pairs]).to(device)
            self.folds = FoldTable(graph.hard_folds, list(aligned.values())).to(device)

    def __call__(self, x: Any, h: Tensor | None = None) -> Any:
        """Run it; gradients go to the shared weights, and to what `part` gave of the stem's output."""
        return self.run(x, h)

    def _run(self, x: Any, h: Tensor | None) -> Any:
        names = dict(self.skeleton.named_parameters())  # without those of the stem
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if name in names:
                tensors[name] = _sliced(parameter, self.slices.get(name, ()))
        if self.gates is not None:
            sliced = dict(self.skeleton.named_buffers()) | tensors
            tensors |= self.folds.fold(sliced.__getitem__, self.gates)
        if h is not None:
            if self.first_channels != h.shape[1]:
                h = _laid_out(_sliced(h, self.h_slices), h)
            tensors[skipped_name(self.stem)] = h
        return run_folded(self.skeleton, x, under_all_names(tensors, self.ties))

    def part(self, h: Tensor) -> Tensor:
        """The channels of the stem's output that it uses as a tensor of their own, if they are the first ones."""
        if self.first_channels is None:
            return h
        return _laid_out(h.detach()[:, : self.first_channels], h).requires_grad_(h.requires_grad)


def _laid_out(part: Tensor, whole: Tensor) -> Tensor:
    """A part of a tensor with the memory format of the whole."""
    if whole.ndim == 4 and whole.is_contiguous(memory_format=torch.channels_last):
        return part.contiguous(memory_format=torch.channels_last)
    return part.contiguous()


class _Skipped(nn.Module):
    """Stands for layers whose output is known: it goes in by the name of its buffer."""

    given: Tensor  # checkpoints have this name

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("given", torch.zeros(0), persistent=False)

    def forward(self, x: Any) -> Tensor:
        return self.given


def skip(model: nn.Module, paths: Sequence[str]) -> None:
    """Let a chain of modules give out what `run_folded` puts in as `skipped_name(paths)`, in place."""
    for path in paths:
        owner, _, name = path.rpartition(".")
        is_last = path == paths[-1]
        setattr(model.get_submodule(owner), name, _Skipped() if is_last else nn.Identity())


def skipped_name(paths: Sequence[str]) -> str:
    """The name of the output of skipped modules."""
    return f"{paths[-1]}.given"


def _slices(cut: Cut, device: torch.device) -> list[Slice]:
    slices: list[Slice] = []
    for dim, kept in enumerate(cut):
        if kept is None:
            continue
        if torch.equal(kept, torch.arange(len(kept))):
            slices.append((dim, len(kept)))
        else:
            slices.append((dim, kept.to(device)))
    return slices


def _sliced(tensor: Tensor, slices: Sequence[Slice]) -> Tensor:
    for dim, kept in slices:
        if isinstance(kept, int):
            tensor = tensor.narrow(dim, 0, kept)
        else:
            tensor = tensor.index_select(dim, kept)
    return tensor
