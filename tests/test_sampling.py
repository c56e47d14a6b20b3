"""Widths from alphas, and baselines: always inside the budget, near the expectation, and never an endless loop."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import NETS, Depthwise, SqueezeExcite, counted_macs, holds, randomise, sample
from torch import Tensor, nn

import dmcp
from dmcp.errors import BudgetError, DmcpError
from dmcp.markov import bounded, sample_groups
from dmcp.models import build, sample_shape
from dmcp.runtime.batches import generator
from dmcp.searching.bounds import AllowedWidths
from dmcp.searching.budget import parse_budget, spent_shares
from dmcp.searching.records import SearchResult
from dmcp.searching.rounding import FILLED, round_to_budget
from dmcp.searching.sampling import direct, expected, expected_widths, random_widths, uniform
from dmcp.tracing.widths import ChannelSpace

GAMMA = 0.95


@functools.cache
def traced(net: Any, groups: int = 10, align: int = 1, **wider: int) -> tuple[Any, dmcp.Supernet]:
    model = randomise(net(**(net.FULL | wider)))
    graph = dmcp.trace(model, sample(net.SHAPE))
    return graph, dmcp.Supernet(model, graph, groups, align)


def wide(groups: int = 10, align: int = 1) -> tuple[Any, dmcp.Supernet]:
    """Inverted residuals with enough channels that one of them does not matter."""
    return traced(Depthwise, groups, align, s=24, e=96, f=88, t=48)


def result(spec: Any, alpha: float | Tensor, net: tuple[Any, dmcp.Supernet], align: int = 1) -> SearchResult:
    graph, supernet = net
    alphas = alpha if isinstance(alpha, Tensor) else torch.full(supernet.alpha.shape, alpha)
    return SearchResult(alphas, supernet.sizes, graph, parse_budget(spec, graph), GAMMA, align)


def share(found: SearchResult, widths: dmcp.Widths) -> float:
    return spent_shares(found.budget, found.graph, widths.tensor()[None]).max().item()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# expected sampling


@pytest.mark.parametrize("spec", ["50%", "30%,params:50%", "90%,params:35%"])
@pytest.mark.parametrize("align", [1, 4])
def test_the_expected_network_keeps_the_budget(spec: str, align: int) -> None:
    """Counted again on the cut network: far from the budget or near it, on either side."""
    graph, net = wide(align=align)
    for alpha in (-8.0, 0.0, 2.0, 8.0):
        found = result(spec, alpha + torch.randn(net.alpha.shape, generator=seeded()), (graph, net), align)
        widths = expected(found)
        assert all(w % align == 0 or w == space.size for w, space in zip(widths.values(), graph.spaces, strict=True))
        assert all(w >= low for w, low in zip(widths.values(), net.min_widths.values(), strict=True))
        small = dmcp.cut(net.model, graph, widths)
        macs = counted_macs(small, sample(Depthwise.SHAPE, batch=1))
        counted = {"macs": macs, "params": sum(p.numel() for p in small.parameters())}
        assert GAMMA <= max(counted[limit.kind] / limit.target for limit in found.budget.limits) <= 1


@pytest.mark.parametrize("name", ["cifar:resnet20", "digits:resnet"])
def test_final_widths_leave_little_of_the_budget(name: str) -> None:
    """A search may end anywhere in its band; at its tolerance alone, most of these would leave more than 2%."""
    graph = dmcp.trace(model := build(name), torch.zeros(1, *sample_shape(model)))
    net = (graph, dmcp.Supernet(model, graph))
    left = 0
    for seed in range(10):
        found = result("50%", 2 + torch.randn(net[1].alpha.shape, generator=seeded(seed)), net)
        assert FILLED <= share(found, expected(found)) <= 1
        allowed = AllowedWidths(graph, found.sizes[:, 0], found.sizes.sum(dim=1), 1)
        left += share(found, round_to_budget(graph, found.budget, expected_widths(found), allowed, GAMMA)) < FILLED
    assert left > 5
    assert share(found, expected(replace(found, tolerance=0.995))) >= 0.995  # a search that is to use more


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_the_tolerance_is_reached_where_any_widths_reach_it(net: Any) -> None:
    """Against all widths of a small net; where none is in the band, at least the budget holds."""
    graph, supernet = traced(net, groups=3, align=2)
    rows = [
        [k for k in range(low, space.size + 1) if k % 2 == 0 or k == space.size]
        for space, low in zip(graph.spaces, supernet.min_widths.values(), strict=True)
    ]
    every = torch.tensor(list(itertools.product(*rows)))
    for seed, spec in enumerate(["50%", "40%", "70%,params:60%", "60%,params:90%", "85%"]):
        alphas = 2 * torch.randn(supernet.alpha.shape, generator=seeded(seed))
        found = result(spec, alphas, (graph, supernet), align=2)
        shares = spent_shares(found.budget, graph, every).amax(dim=1)
        if shares.min() > 1:
            with pytest.raises(BudgetError):
                expected(found)
            continue
        used = share(found, expected(found))
        assert used <= 1 and (used >= GAMMA or not ((shares >= GAMMA) & (shares <= 1)).any())


def test_bounds_and_another_alignment() -> None:
    graph, net = wide()
    lower, upper = torch.tensor([20, 1, 50, 1]), torch.tensor([24, 40, 88, 30])
    for alpha in (-8.0, 8.0):
        found = replace(result("40%", alpha, (graph, net)), sizes=bounded(net.sizes, lower, upper))
        for widths in (expected(found), *direct(replace(found, alphas=found.alphas * 0), n=3)):
            assert holds(found.budget, graph, widths)
            assert (widths.tensor() >= lower).all() and (widths.tensor() <= upper).all()
    found = result("50%", 1.0, (graph, net))
    widths = expected(found, align=8)
    assert all(w % 8 == 0 for w in widths.values()) and GAMMA <= share(found, widths) <= 1


# direct sampling


def test_direct_samples_are_the_first_that_fit() -> None:
    """Against a plain loop over the same samples: those in the band, then those below it, best first."""
    graph, net = wide()
    found = result("50%", 1.2, (graph, net))
    rows = [tuple(row) for row in sample_groups(found.alphas, found.sizes, 5_000, seeded()).tolist()]
    inside = {row: graph.macs(graph.widths(row)) / found.budget.limits[0].target for row in rows}
    near = [row for row, used in inside.items() if FILLED <= used <= 1]
    below = [row for row, used in inside.items() if used < FILLED]
    assert 10 < len(near) < 500 < len(below)
    for n in (1, len(near), len(near) + 7, len(near) + len(below), 5_000):
        rest = sorted(below[:n], key=lambda row: -inside[row])
        samples = direct(found, n=n, generator=seeded(), tries=5_000)
        assert [tuple(widths.values()) for widths in samples] == [*near, *rest][:n]
    assert direct(found, 9, seeded(1)) != direct(found, 9, seeded())
    assert direct(found, 9, 0) == direct(found, 9, generator(0)) != direct(found, 9, 1)
    assert expected(found.with_budget("30%")) == expected(result("30%", 1.2, (graph, net)))
    wrong: list[Any] = [lambda: direct(found, 0), lambda: expected(found, "30%"), lambda: found.with_budget("0.1%")]  # type: ignore[arg-type]
    for call in wrong:
        with pytest.raises(DmcpError):
            call()


def test_direct_sampling_ends_and_names_what_it_saw() -> None:
    """The authors' code rejects samples in a loop without an end."""
    graph, net = wide()
    kept = torch.full(net.alpha.shape, 20.0)
    kept[:, 6:] = 0  # seven of ten groups always stay
    found = result("40%", kept, (graph, net))
    with pytest.raises(BudgetError) as caught:
        direct(found, n=3, generator=seeded(), tries=20_000)
    macs = graph.macs(sample_groups(found.alphas, found.sizes, 20_000, seeded()))
    for number in macs.aminmax():
        assert f"{int(number) / found.budget.limits[0].target:.1%}" in str(caught.value)


# baselines


@pytest.mark.parametrize("spec", ["20%", 0.5, "90%", "80%,params:40%"])
def test_baselines_use_the_same_budget(spec: Any) -> None:
    graph, net = wide()
    budget = parse_budget(spec, graph)
    sampled = [random_widths(graph, spec, seeded(seed)) for seed in range(5)]
    for widths in (uniform(graph, spec), uniform(graph, budget, net.min_widths, align=4), *sampled):
        assert FILLED <= spent_shares(budget, graph, widths.tensor()[None]).max().item() <= 1
    assert sampled[0] == random_widths(graph, budget, seeded(0)) and len(set(sampled)) > 1
    name = graph.spaces[0].name
    for below in (uniform(graph, "40%", max_channels={name: 3}), random_widths(graph, "40%", max_channels={name: 3})):
        assert below[name] <= 3 and graph.macs(below) <= 0.4 * graph.macs()


@pytest.mark.parametrize(("net", "align"), [("wide", 1), ("cheap", 1), ("cheap", 4)])
def test_uniform_is_one_ratio_for_all(net: str, align: int) -> None:
    """Also where squeezed channels cost next to nothing: what is left of the budget would buy all of them."""
    graph, _ = wide() if net == "wide" else traced(SqueezeExcite, s=32, c=96, r=48)
    full = graph.full.tensor()
    for spec in ("30%", "50%", "70%"):
        widths = uniform(graph, spec, align=align).tensor()
        ratio = (widths / full)[full > full.min()].min()
        assert (widths <= ratio * full + 1.5 * align).all() and (widths >= ratio * full - align).all()
    assert uniform(graph, 1.0) == graph.full


def test_a_small_network_is_not_far_from_one_ratio_to_use_the_last_of_the_budget() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 4, 1))
    graph = dmcp.trace(net, torch.zeros(2, 3, 16, 16))
    for spec in ("90%", "70%"):
        widths = uniform(graph, spec)
        ratios = widths.tensor() / graph.full.tensor()
        assert (
            ratios.max() - ratios.min() < 0.15
            and graph.macs(widths) > GAMMA * parse_budget(spec, graph).limits[0].target
        )


@pytest.mark.parametrize(
    ("spec", "widths"),
    [
        ("70%", [13, 13, 13, 13, 27, 28, 28, 27, 54, 54, 54, 54]),
        ("50%", [11, 11, 11, 11, 23, 23, 23, 23, 46, 46, 45, 45]),
        ("30%", [9, 9, 9, 9, 17, 18, 17, 17, 34, 35, 34, 34]),
    ],
)
def test_uniform_widths_that_results_were_made_with(spec: str, widths: list[int]) -> None:
    graph = dmcp.trace(build("cifar:resnet20"), torch.zeros(2, 3, 32, 32))
    assert list(uniform(graph, spec, align=1).values()) == widths


def test_align_counts_real_channels_where_whole_groups_are_kept() -> None:
    """GroupNorm keeps groups of 8 channels; in a pixel shuffle and a grouped conv the unit is that of the reader."""
    convs = nn.Conv1d(2, 32, 3), nn.Conv1d(32, 64, 3), nn.Conv1d(64, 24, 3), nn.Conv1d(24, 4, 1)
    net = nn.Sequential(*convs[:2], nn.GroupNorm(8, 64), nn.ReLU(), *convs[2:])
    graph = dmcp.trace(net, torch.zeros(2, 2, 20))
    assert [(space.size, space.unit, space.step(16)) for space in graph.spaces] == [(32, 1, 16), (8, 8, 2), (24, 1, 16)]
    supernet = dmcp.Supernet(net, graph, 10, align=8)
    assert supernet.sizes[1].count_nonzero() == 8 and supernet.sizes[0].count_nonzero() == 4
    narrow = dmcp.cut(net, graph, uniform(graph, "30%", supernet.min_widths, align=8))
    assert all(it.out_channels % 8 == 0 for it in list(narrow)[:-1] if isinstance(it, nn.Conv1d))
    shuffled = nn.Sequential(nn.Conv2d(3, 128, 1), nn.PixelShuffle(2), nn.Conv2d(32, 16, 1), nn.Conv2d(16, 2, 1))
    grouped = nn.Sequential(nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 3, groups=16), nn.Conv2d(64, 2, 1))
    for other, units in ((shuffled, [(32, 1), (16, 1)]), (grouped, [(16, 4)])):
        spaces = dmcp.trace(other, torch.zeros(2, 3, 4, 4)).spaces
        assert [(space.size, space.unit) for space in spaces] == units


def test_without_an_alignment_wide_spaces_have_multiples_of_16_and_narrow_ones_eight_widths() -> None:
    spaces = [ChannelSpace("a", size) for size in (7, 16, 31, 32, 64, 127, 128, 2048)]
    assert [it.step(None) for it in spaces] == [1, 2, 2, 4, 8, 8, 16, 16]
    assert ChannelSpace("b", 32, unit=4).step(None) == 4  # 32 groups of 4 channels
    assert [ChannelSpace("c", size, unit=unit).step(None) for size, unit in ((48, 3), (8, 24))] == [4, 1]
