"""Channels: where they are, against indices written by hand and what a cut leaves; importance, against differences."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from nets import Chain, Concat, Depthwise, Grouped, Residual, SharedWeight, SqueezeExcite, Toy, same, sample, state
from nets import traced as traced_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dmcp
from dmcp.errors import DataError, WidthsError
from dmcp.searching.importance import (
    ChannelRows,
    find_filters,
    find_rows,
    find_scales,
    first_samples,
    magnitude,
    norms,
    scores_of,
    strongest,
)
from dmcp.searching.subnets import sort_channels
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


# how much the outputs change


def outputs_with_gates(model: Any, x: Tensor, name: str, channel: int, gate: float) -> Tensor:
    """What the network gives whose gate layers, written by hand, multiply one channel of one space."""
    network = copy.deepcopy(model).eval()
    network.gates = {width: torch.ones(size, dtype=x.dtype) for width, size in network.FULL.items()}
    network.gates[name][channel] = gate
    with torch.no_grad():
        return network(x)


@pytest.mark.parametrize("kind", [Chain, Residual])
def test_importance_is_the_squared_derivative_of_the_outputs(kind: Any) -> None:
    """Two samples, so one random direction: against finite differences of gates. A residual stream is one space."""
    model, graph = traced_net(kind)
    x = sample(kind.SHAPE)[:2]
    scores = dmcp.importance(model, graph, [x])
    with torch.no_grad():
        size = copy.deepcopy(model).eval()(x).abs().mean()
    direction = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
    for width, space in kind.SPACES.items():
        for channel in range(kind.FULL[width]):
            above, below = (outputs_with_gates(model, x, width, channel, 1 + step) for step in (1e-5, -1e-5))
            slope = ((above - below) / 2e-5 * direction).sum() / size
            assert scores[space][channel].item() == pytest.approx(slope.item() ** 2, rel=1e-5, abs=1e-12)


def test_the_mean_over_directions_is_the_squared_norm_of_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel that adds w to the outputs has the derivative w: the score is |w|^2, relative to the outputs."""
    monkeypatch.setattr("dmcp.searching.importance._DIRECTIONS", 3000)
    model = Toy(lambda m, x: m.b(m.a(x)).mean((2, 3)), a=nn.Conv2d(1, 3, 1), b=nn.Conv2d(3, 4, 1, bias=False))
    model.a.weight.data.zero_()
    model.a.bias.data = torch.tensor([1.0, 2.0, 0.0])
    graph = dmcp.trace(model, torch.zeros(2, 1, 4, 4))
    scores = dmcp.importance(model, graph, [torch.zeros(2, 1, 4, 4)] * 3000)["a"]
    size = model(torch.zeros(2, 1, 4, 4)).abs().mean()
    exact = 2 * (model.a.bias * model.b.weight[..., 0, 0] / size).square().sum(0)  # of two samples
    torch.testing.assert_close(scores.float(), exact.detach(), rtol=0.1, atol=0)
    assert scores[2] == 0


def test_importance_changes_nothing_and_is_the_same_again() -> None:
    original, graph = traced_net(Residual)
    model = copy.deepcopy(original).train()
    data = TensorDataset(sample(Residual.SHAPE).repeat(10, 1, 1, 1))
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    before = state(model)
    random_state = torch.get_rng_state()
    loader_state = loader.generator.get_state()
    first = dmcp.importance(model, graph, loader)
    again = dmcp.importance(model, graph, loader)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert same(state(model), before)
    assert all(part.training for part in model.modules()) and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(loader.generator.get_state(), loader_state)


def test_several_outputs_count_alike_whatever_their_units() -> None:
    """One channel for each output: in other units, an output has the same score."""
    layers = {"a": nn.Conv2d(1, 2, 1), "b": nn.Conv2d(2, 1, 1), "c": nn.Conv2d(2, 1, 1)}
    for unit in (1.0, 1000.0):
        model = Toy(lambda m, x, unit=unit: {"b": m.b(m.a(x)), "c": [m.c(m.a(x)) * unit]}, **layers)
        graph = dmcp.trace(model, torch.zeros(2, 1, 3, 3))
        scores = dmcp.importance(model, graph, [torch.ones(4, 1, 3, 3)])["a"]
        if unit == 1.0:
            expected = scores
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=0)


def test_channels_that_the_outputs_do_not_depend_on_are_scored_by_their_filters() -> None:
    original, graph = traced_net(Residual)
    model = copy.deepcopy(original)
    with torch.no_grad():
        model.head.weight.zero_()
    scores = dmcp.importance(model, graph, [sample(Residual.SHAPE)])
    for name, norm in norms(model, graph).items():
        assert torch.equal(scores[name], norm)
    with pytest.raises(DataError):
        dmcp.importance(model, graph, [])


def test_batches_that_do_not_come_again_are_not_used_up() -> None:
    model, graph = traced_net(Residual)
    batches = iter([sample(Residual.SHAPE)])
    scores = scores_of(model, graph, first_samples(batches, torch.device("cpu")))
    assert len(list(batches)) == 1
    assert all(torch.equal(scores[name], norm) for name, norm in norms(model, graph).items())


# what it is for


def test_a_cut_keeps_the_channels_with_the_highest_scores() -> None:
    model, graph = traced_net(Residual)
    scores = {space.name: torch.arange(space.size) for space in graph.spaces}
    x = sample(Residual.SHAPE)
    small = dmcp.cut(model, graph, {"stem": 5, "conv1": [0, 2]}, by=scores)
    wanted = Residual.narrow(model, s=range(3, 8), a=[0, 2], b=range(9), t=range(11))
    torch.testing.assert_close(small.eval()(x), wanted.eval()(x))
    with pytest.raises(WidthsError):
        dmcp.cut(model, graph, {"stem": 5}, by={"stem": torch.ones(7)})


def test_channels_are_sorted_by_scores() -> None:
    model, graph = traced_net(Residual)
    net = dmcp.Supernet(model, graph)
    scores = {space.name: torch.arange(space.size) for space in graph.spaces}  # the last are the best
    sort_channels(net, scores)
    assert torch.equal(net.model.stem.weight, model.stem.weight.flip(0))
    assert torch.equal(net.model.conv1.weight, model.conv1.weight.flip(0, 1))


def test_a_search_of_a_trained_network_sorts_by_its_batches() -> None:
    """After the start, a supernet's channels are in the order of their importance on the first batches."""
    model, graph = traced_net(Residual)
    batches = [(sample(Residual.SHAPE), torch.zeros(4, dtype=torch.long))]
    scores = dmcp.importance(model, graph, batches)
    config = dmcp.SearchConfig(budget="50%", sort=True, groups=4, epochs=2)
    nets = [dmcp.Supernet(model, graph, groups=4) for _ in range(2)]
    dmcp.Searcher(nets[0], config, 1, batches=batches)
    dmcp.Searcher(nets[1], config, 1)
    order = scores["conv1"].argsort(descending=True, stable=True)
    by_norm = norms(model, graph)["conv1"].argsort(descending=True, stable=True)
    for net, kept in zip(nets, (order, by_norm), strict=True):
        assert torch.equal(net.model.bn1.weight, model.bn1.weight[kept])
    assert not torch.equal(order, by_norm)
