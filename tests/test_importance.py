"""Where the channels of a space are, against indices written by hand and against what a cut leaves."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from nets import Chain, Concat, Depthwise, Grouped, Residual, SharedWeight, SqueezeExcite
from torch import nn

import dmcp
from dmcp.searching.importance import ChannelRows, find_filters, find_rows, find_scales, magnitude, strongest
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import ChannelSpace


class Transposed(nn.Sequential):
    """Transposed convs: plain, depthwise, with whole groups that go, and with channels that go inside each group."""

    def __init__(self) -> None:
        layers = {"up": nn.ConvTranspose2d(3, 6, 2), "depth": nn.ConvTranspose2d(6, 6, 3, padding=1, groups=6)}
        layers |= {"relu": nn.ReLU(), "mix": nn.Conv2d(6, 10, 1), "again": nn.ReLU()}
        layers |= {"wide": nn.ConvTranspose2d(10, 4, 2, groups=2), "head": nn.Conv2d(4, 3, 1)}
        super().__init__(OrderedDict(layers))


def traced(kind: type[nn.Module]) -> tuple[nn.Module, ChannelGraph, dict[str, ChannelSpace]]:
    model = kind(**kind.FULL) if hasattr(kind, "FULL") else kind()
    graph = dmcp.trace(model, torch.zeros(2, *getattr(kind, "SHAPE", (3, 5, 5))))
    return model, graph, {space.name: space for space in graph.spaces}


def names(places: list[ChannelRows]) -> list[tuple[str, int]]:
    return [(place.name, place.dim) for place in places]


def test_tied_layers_are_all_found() -> None:
    model, graph, spaces = traced(Residual)
    stream = spaces["stem"]
    assert names(find_filters(model, graph, stream)) == [("stem.weight", 0), ("conv2.weight", 0)]
    assert names(find_scales(model, graph, stream)) == [("bn0.weight", 0), ("bn2.weight", 0)]
    readers = {("conv1.weight", 1), ("conv3.weight", 1), ("project.weight", 1)}
    assert readers < set(names(find_rows(model, graph, stream)))
    by_hand = model.stem.weight.abs().sum((1, 2, 3)) + model.conv2.weight.abs().sum((1, 2, 3))
    torch.testing.assert_close(magnitude(model, graph, stream), by_hand.detach().double())
    squares = model.conv3.weight.square().sum((1, 2, 3))
    torch.testing.assert_close(magnitude(model, graph, spaces["conv3"], 2), squares.detach().double())


@pytest.mark.parametrize("kind", [Chain, Residual, Depthwise, Concat, Grouped, SqueezeExcite, SharedWeight, Transposed])
def test_rows_are_those_that_a_cut_drops(kind: type[nn.Module]) -> None:
    """Each channel of each space alone, against the indices that stay when the graph cuts all others."""
    model, graph, spaces = traced(kind)
    parameters = dict(model.named_parameters())
    for space in spaces.values():
        found = {(place.name, place.dim): place for place in find_rows(model, graph, space)}
        for channel in range(space.size):
            cuts = graph.cuts({space.name: [i for i in range(space.size) if i != channel]})
            for (name, dim), place in found.items():
                gone = set(range(parameters[name].shape[dim])) - set(cuts[name][dim].tolist())
                assert set(place.rows[channel].tolist()) == gone, (name, dim)
            narrowed = {
                (name, dim)
                for name, cut in cuts.items()
                for dim, stay in enumerate(cut)
                if name in parameters and stay is not None and len(stay) < parameters[name].shape[dim]
            }
            assert narrowed == set(found)


def test_the_strongest_stay_in_their_order_and_ties_go_to_the_first() -> None:
    assert strongest(torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0]), 3) == [0, 2, 4]
    assert strongest(torch.ones(5), 2) == [0, 1]
    assert strongest(None, 3) == [0, 1, 2]
