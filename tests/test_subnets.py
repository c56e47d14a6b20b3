"""Sub-networks of a weight step: bounds, how often each is sampled, sorted channels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from nets import NETS, Residual, distance, sample, sandwich, traced
from torch import Tensor

import dmcp
import dmcp.searching.steps
from dmcp.errors import WidthsError
from dmcp.searching.bounds import width_bounds
from dmcp.searching.subnets import Chains, make_chains, sample_gates, sort_channels
from dmcp.settings import Sampling

MANY = 4000
SPREAD = 4 * 0.5 / MANY**0.5  # four standard deviations of a frequency


def made(groups: int = 4, align: int = 1) -> Any:
    """A supernet of the residual net (spaces of 8, 6, 9 and 11 channels) with random alphas."""
    net = dmcp.Supernet(*traced(Residual), groups, align)
    with torch.no_grad():
        net.alpha.copy_(torch.randn(net.alpha.shape, generator=torch.Generator().manual_seed(0)))
    return net


def ends_of(chain: Chains) -> list[tuple[int, int]]:
    return list(zip(chain.sizes[:, 0].tolist(), chain.sizes.sum(dim=1).tolist(), strict=True))


def widths_of(net: Any, gates: list[Tensor]) -> Tensor:
    """Channels kept in each space, counted. -> (N, S)"""
    sizes = [space.size for space in net.graph.spaces]
    return torch.stack([piece.sum(dim=1) for piece in torch.stack(gates).split(sizes, dim=1)], dim=1)


def sampled(net: Any, chain: Chains, sampling: Sampling) -> list[Tensor]:
    return sample_gates(net, chain, sampling, MANY, torch.Generator().manual_seed(0))


# bounds


@pytest.mark.parametrize("sampling", Sampling)
def test_bounds_hold_for_every_gate(sampling: Sampling) -> None:
    net = made()
    chain = make_chains(net, {"stem": 3, "conv4": 11}, {"stem": 5, "conv3": 1, "conv1": 5})
    assert ends_of(chain) == [(3, 5), (1, 5), (1, 1), (11, 11)]  # stem, conv1, conv3, conv4
    ends = widths_of(net, sandwich(net, chain, sampling, 0))
    assert ends.tolist() == [[5, 5, 1, 11], [3, 1, 1, 11]]
    seen = widths_of(net, sampled(net, chain, sampling))
    assert (seen >= ends[1]).all() and (seen <= ends[0]).all() and len(seen[:, 0].unique()) > 1
    soft = chain.gates(chain.marginals(net.alpha))
    stem, _, third, fourth = (it.tolist() for it in soft.split([8, 6, 9, 11]))
    assert stem[:3] == [1.0] * 3 and max(stem[3:5]) < 1 and stem[5:] == [0.0] * 3
    assert third == [1.0] + [0.0] * 8 and fourth == [1.0] * 11
    gradient = torch.autograd.grad(soft.sum(), net.alpha)[0]
    assert gradient[2:].count_nonzero() == 0 and gradient[:2].count_nonzero() > 0


@pytest.mark.parametrize(
    ("low", "high", "align", "ends"),
    [
        (7, {}, 1, [(7, 8), (6, 6), (7, 9), (7, 11)]),
        ({}, 7, 1, [(2, 7), (1, 6), (2, 7), (2, 7)]),
        (7, 7, 1, [(7, 7), (6, 6), (7, 7), (7, 7)]),
        ({"": 5, "conv1": 2}, {}, 1, [(5, 8), (2, 6), (5, 9), (5, 11)]),  # what is said of one space counts there
        ({"": 5, "conv2": 3}, {}, 1, [(3, 8), (5, 6), (5, 9), (5, 11)]),  # conv2 writes the space named stem
        ({"conv2": 9}, {}, 1, [(8, 8), (1, 6), (2, 9), (2, 11)]),  # a layer, not the space: all of it
        ({"stem": 3}, {"conv4": 9}, 4, [(4, 8), (4, 6), (4, 9), (4, 8)]),
        (5, 9, 4, [(8, 8), (6, 6), (8, 9), (8, 8)]),
    ],
)
def test_bounds_of_the_network_and_of_modules(low: Any, high: Any, align: int, ends: list[tuple[int, int]]) -> None:
    assert ends_of(make_chains(made(align=align), low, high, align)) == ends


def test_bounds_by_module_of_torchvision() -> None:
    """Of two modules the inner one counts, of two that say as much the stricter; channels, where groups are kept."""
    graph = dmcp.trace(torchvision.models.resnet18(), torch.zeros(2, 3, 32, 32))
    ends = width_bounds(graph, {"layer2": 20, "layer2.1": 30, "conv1": 7}, {"layer1": 60})
    found = dict(zip(graph.full, ends, strict=True))
    assert found["layer2.0.conv1"] == (20, 128) and found["layer2.1.conv1"] == (30, 128)
    assert found["layer2.0.conv2"] == (30, 128)  # written by layer2.0 and layer2.1
    assert found["conv1"] == (7, 60) and found["layer1.0.conv1"] == (1, 60) and found["layer3.0.conv1"] == (1, 256)
    both = dict(zip(graph.full, width_bounds(graph, {"layer2.0": 9, "layer2.1": 30}, {}), strict=True))
    assert both["layer2.0.conv2"] == (30, 128)
    graph = dmcp.trace(torchvision.models.resnext50_32x4d(), torch.zeros(2, 3, 32, 32))  # 32 groups of 4 channels
    first = list(graph.full).index("layer1.0.conv1")  # a space's own name counts groups, as its size does
    lows = [width_bounds(graph, it, {})[first][0] for it in (10, {"layer1": 10}, {"layer1.0.conv1": 10})]
    assert lows == [3, 3, 10] and width_bounds(graph, {}, {"layer1": 10})[first] == (1, 2)
    with pytest.raises(WidthsError, match="groups of 16 channels"):
        width_bounds(graph, {}, 10)


# samples


def test_uniform_and_sandwich_sampling() -> None:
    net = made()
    widths = widths_of(net, sampled(net, make_chains(net), Sampling.UNIFORM))
    for column, borders in zip(widths.T, ([2, 4, 6, 8], [1, 2, 4, 6], [2, 4, 6, 9], [2, 5, 8, 11]), strict=True):
        values, counts = column.unique(return_counts=True)
        assert values.tolist() == borders and (counts / MANY - 1 / 4).abs().max() < SPREAD
    ranks = torch.stack([column.unique(return_inverse=True)[1] for column in widths.T]).double()
    assert (torch.corrcoef(ranks) - torch.eye(4)).abs().max() < 2 * SPREAD  # each space by itself
    column = widths_of(net, sampled(net, make_chains(net, {"stem": 6}), Sampling.UNIFORM))[:, 0]
    values, counts = column.unique(return_counts=True)  # a bound merges groups
    assert values.tolist() == [6, 8] and (counts / MANY - 1 / 2).abs().max() < SPREAD
    widths = widths_of(net, sampled(net, make_chains(net), Sampling.SANDWICH))  # one ratio for all spaces
    assert {tuple(row) for row in widths.tolist()} == {(2, 1, 2, 2), (4, 2, 4, 5), (6, 4, 6, 8), (8, 6, 9, 11)}


def test_markov_samples_each_channel_as_often_as_its_soft_gate_says() -> None:
    net = made()
    chain = make_chains(net)
    gates = torch.stack(sampled(net, chain, Sampling.MARKOV)).float()
    soft = chain.gates(chain.marginals(net.alpha)).detach()
    assert (gates.mean(dim=0) - soft).abs().max() < SPREAD
    assert torch.equal(soft, net.soft())
    # A space that is sampled from its neighbour's chain, as in the authors' code, would be seen.
    net.alpha.data = net.alpha.data.roll(1, dims=0)
    assert (gates.mean(dim=0) - chain.gates(chain.marginals(net.alpha)).detach()).abs().max() > 3 * SPREAD
    gaps = (gates.split([8, 6, 9, 11], dim=1)[3].diff(dim=1) > 0).any()
    assert not gaps  # the first channels are kept


# channels in order


@pytest.mark.parametrize("toy", NETS, ids=lambda net: net.__name__)
def test_sorting_does_not_change_what_the_network_computes(toy: Any) -> None:
    (model, graph), x = traced(toy), sample(toy.SHAPE)
    net = dmcp.Supernet(model, graph)
    before = copy.deepcopy(net.model)
    sort_channels(net)
    moved = sum(not torch.equal(a, b) for a, b in zip(net.weights(), before.parameters(), strict=True))
    assert moved > len(graph.spaces)
    for training in (False, True):
        assert distance(net.train(training)(x, net.hard(graph.full)), before.train(training)(x)) < 1e-10
