"""Sub-networks of a weight step: where they may lie, how often each is drawn, and channels put in order."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from nets import NETS, Residual, distance, randomise, sample
from torch import Tensor, nn
from torchvision.models import resnet18, resnext50_32x4d

import dmcp
from dmcp.errors import WidthsError
from dmcp.markov import CHAIN, INDEPENDENT
from dmcp.searching.config import bounds
from dmcp.searching.subnets import Chains, chains, sample_gates, sandwich, sort_channels
from dmcp.settings import Sampling

MANY = 4000
SPREAD = 4 * 0.5 / MANY**0.5  # four standard deviations of a frequency


@functools.cache
def traced(toy: Any) -> tuple[nn.Module, Any]:
    """A model that no test changes, and its graph."""
    model = randomise(toy(**toy.FULL))
    return model, dmcp.trace(model, sample(toy.SHAPE))


def made(groups: int = 4, align: int = 1) -> Any:
    """A supernet of the residual net (spaces of 8, 6, 9 and 11 channels) with random alphas."""
    net = dmcp.Supernet(*traced(Residual), groups, align)
    with torch.no_grad():
        net.alpha.copy_(torch.randn_like(net.alpha))
    return net


def widths_of(net: Any, gates: list[Tensor]) -> Tensor:
    """Channels kept in each space, counted. -> (N, S)"""
    sizes = [space.size for space in net.graph.spaces]
    return torch.stack([piece.sum(dim=1) for piece in torch.stack(gates).split(sizes, dim=1)], dim=1)


def drawn(net: Any, path: Chains, sampling: Sampling, seed: int = 0) -> list[Tensor]:
    return sample_gates(net, path, sampling, MANY, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
def test_soft_gates_without_bounds(process: Any) -> None:
    net = made()
    path = chains(net, process)
    gates = path.gates(path.marginals(net.alpha))
    if process is CHAIN:
        assert torch.equal(gates, net.soft())
    stem = gates[:8]  # two channels in each of its groups
    chances = torch.sigmoid(net.alpha[0])
    expected = chances.cumprod(0) if process is CHAIN else chances
    torch.testing.assert_close(stem, torch.cat([torch.ones(1), expected]).repeat_interleave(2))


@pytest.mark.parametrize("sampling", Sampling)
@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
def test_bounds_hold_for_every_gate(sampling: Sampling, process: Any) -> None:
    net = made()
    least, most = {"stem": 3, "conv4": 11}, {"stem": 5, "conv3": 1, "conv1": 5}
    path = chains(net, process, least, most)
    assert path.sizes.sum(dim=1).tolist() == [5, 5, 1, 11]  # stem, conv1, conv3, conv4
    assert path.sizes[:, 0].tolist() == [3, 1, 1, 11]
    ends = widths_of(net, sandwich(net, path, sampling, 0))
    assert ends.tolist() == [[5, 5, 1, 11], [3, 1, 1, 11]]
    seen = widths_of(net, drawn(net, path, sampling))
    assert (seen >= ends[1]).all() and (seen <= ends[0]).all()
    assert len(seen[:, 0].unique()) > 1
    soft = path.gates(path.marginals(net.alpha)).split([8, 6, 9, 11])
    assert soft[0][:3].tolist() == [1.0] * 3 and (soft[0][3:5] < 1).all() and soft[0][5:].tolist() == [0.0] * 3
    assert soft[2].tolist() == [1.0] + [0.0] * 8
    assert soft[3].tolist() == [1.0] * 11
    slope = torch.autograd.grad(path.gates(path.marginals(net.alpha)).sum(), net.alpha)[0]
    assert slope[2:].count_nonzero() == 0 and slope[:2].count_nonzero() > 0


def test_bounds_are_multiples_of_align() -> None:
    net = made(align=4)
    path = chains(net, CHAIN, {"stem": 3}, {"conv4": 9}, align=4)
    assert path.sizes[:, 0].tolist() == [4, 4, 4, 4]
    assert path.sizes.sum(dim=1).tolist() == [8, 6, 9, 8]


@pytest.mark.parametrize(
    ("least", "most", "align", "message"),
    [
        ({"stem": 6}, {"stem": 5}, 1, "No width of stem lies from 6 .* to 5"),
        ({"stem": 5}, {"stem": 7}, 4, "multiple of 4 lies from 5 .* to 7"),
        ({"stem": 9}, {}, 1, "stem must be an int from 1 to 8"),
        ({}, {"stemm": 4}, 1, "largest: there is no space named 'stemm', .*: did you mean stem"),
        (8, {"stem": 5}, 1, "No width of stem lies from 8 .* to 5"),
        ({}, 3, 4, "No width of stem that is a multiple of 4 lies from 1 .* to 3"),
        ({"head": 3}, {}, 1, "smallest names 'head', which stays whole"),
    ],
)
def test_bounds_that_leave_nothing(least: Any, most: Any, align: int, message: str) -> None:
    with pytest.raises(WidthsError, match=message):
        chains(made(align=align), CHAIN, least, most, align)


@pytest.mark.parametrize(
    ("least", "most", "ends"),
    [
        (7, {}, [(7, 8), (6, 6), (7, 9), (7, 11)]),
        ({}, 7, [(2, 7), (1, 6), (2, 7), (2, 7)]),
        (7, 7, [(7, 7), (6, 6), (7, 7), (7, 7)]),
        ({"": 5, "conv1": 2}, {}, [(5, 8), (2, 6), (5, 9), (5, 11)]),  # what is said of one space counts there
        ({"": 5, "conv2": 3}, {}, [(3, 8), (5, 6), (5, 9), (5, 11)]),  # conv2 writes the space named stem
        ({"conv2": 9}, {}, [(8, 8), (1, 6), (2, 9), (2, 11)]),  # a layer, not the space: it stays whole
    ],
)
def test_bounds_of_the_whole_network_and_of_modules(least: Any, most: Any, ends: list[tuple[int, int]]) -> None:
    path = chains(made(), CHAIN, least, most)
    assert list(zip(path.sizes[:, 0].tolist(), path.sizes.sum(dim=1).tolist(), strict=True)) == ends


def test_one_bound_is_rounded_to_multiples() -> None:
    path = chains(made(align=4), CHAIN, 5, 9, align=4)
    assert path.sizes[:, 0].tolist() == [8, 6, 8, 8]
    assert path.sizes.sum(dim=1).tolist() == [8, 6, 9, 8]


def test_a_module_bounds_all_that_it_writes() -> None:
    """Of two modules the inner one counts, of two that say as much the stricter; as torchvision names them."""
    graph = dmcp.trace(resnet18(), torch.zeros(2, 3, 32, 32))
    found = dict(
        zip(graph.full, bounds(graph, {"layer2": 20, "layer2.1": 30, "conv1": 7}, {"layer1": 60}), strict=True)
    )
    assert found["layer2.0.conv1"] == (20, 128) and found["layer2.1.conv1"] == (30, 128)
    assert found["layer2.0.conv2"] == (30, 128)  # written by layer2.0 and layer2.1
    assert found["conv1"] == (7, 60) and found["layer1.0.conv1"] == (1, 60) and found["layer3.0.conv1"] == (1, 256)
    both = dict(zip(graph.full, bounds(graph, {"layer2.0": 9, "layer2.1": 30}, {}), strict=True))
    assert both["layer2.0.conv2"] == (30, 128)


def test_bounds_count_channels_where_whole_groups_are_kept() -> None:
    """ResNeXt: 32 groups of 4 channels. A space's own name counts groups, as its size does."""
    graph = dmcp.trace(resnext50_32x4d(), torch.zeros(2, 3, 32, 32))
    name = "layer1.0.conv1"
    assert graph.full[name] == 32
    found = [
        dict(zip(graph.full, bounds(graph, it, {}), strict=True))[name][0] for it in (10, {"layer1": 10}, {name: 10})
    ]
    assert found == [3, 3, 10]
    assert dict(zip(graph.full, bounds(graph, {}, {"layer1": 10}), strict=True))[name] == (1, 2)
    with pytest.raises(WidthsError, match=r"layer3\.0\.conv1 lies from 1 .* to 0 .*whole groups of 16 channels"):
        bounds(graph, {}, 10)


def test_uniform_draws_every_border_alike_and_each_space_by_itself() -> None:
    net = made()
    widths = widths_of(net, drawn(net, chains(net), Sampling.UNIFORM))
    for column, borders in zip(widths.T, ([2, 4, 6, 8], [1, 2, 4, 6], [2, 4, 6, 9], [2, 5, 8, 11]), strict=True):
        values, counts = column.unique(return_counts=True)
        assert values.tolist() == borders
        assert (counts / MANY - 1 / 4).abs().max() < SPREAD
    world = torch.stack([column.unique(return_inverse=True)[1] for column in widths.T]).double()
    assert (torch.corrcoef(world) - torch.eye(4)).abs().max() < 2 * SPREAD


def test_uniform_draws_different_widths_alike_where_a_bound_swallows_groups() -> None:
    net = made()
    column = widths_of(net, drawn(net, chains(net, CHAIN, {"stem": 6}), Sampling.UNIFORM))[:, 0]
    values, counts = column.unique(return_counts=True)
    assert values.tolist() == [6, 8]
    assert (counts / MANY - 1 / 2).abs().max() < SPREAD


def test_the_original_rule_has_one_ratio_for_all_spaces() -> None:
    net = made()
    widths = widths_of(net, drawn(net, chains(net), Sampling.SANDWICH))
    assert {tuple(row) for row in widths.tolist()} == {(2, 1, 2, 2), (4, 2, 4, 5), (6, 4, 6, 8), (8, 6, 9, 11)}


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
def test_markov_draws_each_channel_as_often_as_its_soft_gate_says(process: Any) -> None:
    net = made()
    path = chains(net, process)
    gates = torch.stack(drawn(net, path, Sampling.MARKOV)).float()
    soft = path.gates(path.marginals(net.alpha)).detach()
    assert (gates.mean(dim=0) - soft).abs().max() < SPREAD
    # A space that is drawn from its neighbour's chain, as in Zx55/dmcp, would be seen.
    net.alpha.data = net.alpha.data.roll(1, dims=0)
    assert (gates.mean(dim=0) - path.gates(path.marginals(net.alpha)).detach()).abs().max() > 3 * SPREAD
    falls = (gates.split([8, 6, 9, 11], dim=1)[3].diff(dim=1) > 0).any()
    assert falls == (process is INDEPENDENT)  # the chain keeps the first channels, independent gates any


# -- channels in order


@pytest.mark.parametrize("toy", NETS, ids=lambda net: net.__name__)
def test_sorting_does_not_change_what_the_network_computes(toy: Any) -> None:
    (model, graph), x = traced(toy), sample(toy.SHAPE)
    net = dmcp.Supernet(model, graph)
    before = copy.deepcopy(net.model)
    sort_channels(net)
    moved = sum(not torch.equal(a, b) for a, b in zip(net.weights(), before.parameters(), strict=True))
    assert moved > len(graph.spaces)
    for training in (False, True):
        full = net.train(training)(x, net.hard(graph.full))
        assert distance(full, before.train(training)(x)) < 1e-10


def test_sorting_puts_the_largest_norms_first() -> None:
    net = made()
    sort_channels(net)
    model = net.model
    for writers in ((model.stem, model.conv2), (model.conv1,), (model.conv3,), (model.conv4, model.project)):
        norms = sum(conv.weight.detach().square().sum((1, 2, 3)) for conv in writers)
        assert (norms.diff() <= 0).all()
    before = copy.deepcopy(model.state_dict())
    sort_channels(net)  # sorted twice is sorted once
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
