"""Train a cut network as one of rounder widths, whose further channels do nothing: GPUs are faster at whole eights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.cutting import cut
from dmcp.slicing import Cut
from dmcp.spaces import Widths
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.layouts import atoms_of

EIGHT = 8  # what tensor cores want

Places = tuple[Tensor | None, ...]  # per dim: where the entries of the cut network are, None for all


class Padded:
    """A cut network inside one whose widths are the next multiples, to be trained in its place.

    What is added is zero, and of the weights that read added channels the gradient is, so they stay unread: step by
    step the network inside learns what it would learn alone, up to rounding and the draws of dropout.
    """

    def __init__(self, small: nn.Module, whole: nn.Module, graph: ChannelGraph, widths: Widths, outer: Widths) -> None:
        self.small, self.wide = small, cut(whole, graph, outer)
        self.places = dict(_places(graph.cuts(widths), graph.cuts(outer)))
        with torch.no_grad():
            for (name, mine), theirs in zip(_tensors(self.wide), dict(_tensors(small)).values(), strict=True):
                mine.copy_(_spread(theirs, self.places.get(name, ()), mine.shape))
        for module, other in zip(self.wide.modules(), small.modules(), strict=True):
            module.training = other.training
        parameters = dict(self.wide.named_parameters())
        for mine, theirs in zip(parameters.values(), small.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        readers = {(fold.tensor, fold.dim) for fold in graph.hard_folds if atoms_of(fold.layout)}
        for name, dim in sorted(readers):
            reader, places = parameters.get(name), self.places.get(name, ())
            place = places[dim] if places else None
            if reader is not None and reader.requires_grad and place is not None:
                hook: Callable[[Callable[[Tensor], Tensor]], Any] = reader.register_hook
                hook(partial(torch.mul, _mask(reader, dim, place)))

    @torch.no_grad()
    def give_back(self) -> None:
        """Put what was learned into the cut network."""
        for (name, mine), theirs in zip(_tensors(self.wide), dict(_tensors(self.small)).values(), strict=True):
            theirs.copy_(_read(mine, self.places.get(name, ())))


def padded(small: nn.Module, whole: nn.Module, graph: ChannelGraph, widths: Widths, to: int = EIGHT) -> Padded | None:
    """The network that was cut to these widths inside one of the next multiples; None if it is that, or cannot be.

    whole: the network that it was cut from; its weights do not matter.
    """
    outer = graph.widths([min(it.size, -(-widths[it.name] // to) * to) for it in graph.spaces])
    return None if outer == widths or not graph.exact else Padded(small, whole, graph, widths, outer)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _places(inner: Mapping[str, Cut], outer: Mapping[str, Cut]) -> Iterator[tuple[str, Places]]:
    """Where the entries of the narrower cut of each tensor are in the wider one."""
    for name, cuts in inner.items():
        others = outer.get(name, (None,) * len(cuts))
        yield name, tuple(_place(*pair) for pair in zip(cuts, others, strict=True))


def _place(kept: Tensor | None, around: Tensor | None) -> Tensor | None:
    if kept is None or around is None:
        return kept
    if torch.equal(kept, around):
        return None
    where = {int(index): place for place, index in enumerate(around)}
    return torch.tensor([where[int(index)] for index in kept])


def _spread(values: Tensor, places: Places, shape: torch.Size) -> Tensor:
    """A tensor of zeros with values in their places."""
    for dim, place in enumerate(places):
        if place is not None:
            wider = values.new_zeros([*values.shape[:dim], shape[dim], *values.shape[dim + 1 :]])
            values = wider.index_copy_(dim, place.to(values.device), values)
    return values


def _mask(tensor: Tensor, dim: int, place: Tensor) -> Tensor:
    """One where a dim of a tensor has entries of the cut network, zero elsewhere."""
    shape = [1] * tensor.ndim
    shape[dim] = tensor.shape[dim]
    return tensor.new_zeros(tensor.shape[dim]).index_fill_(0, place.to(tensor.device), 1).reshape(shape)


def _read(tensor: Tensor, places: Places) -> Tensor:
    for dim, place in enumerate(places):
        if place is not None:
            tensor = tensor.index_select(dim, place.to(tensor.device))
    return tensor
