"""Structures from alphas: always inside the budget, near the expectation, and never an endless loop."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import NETS, Chain, Depthwise, Residual, SqueezeExcite, randomise, sample
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import mobilenet_v2

import dmcp
from dmcp.budget import holds, parse, spent_shares
from dmcp.errors import BudgetError
from dmcp.markov import CHAIN, INDEPENDENT, Process, bounded, sample_groups
from dmcp.models import build, sample_shape
from dmcp.sampling import FILLED, Options, direct, expected, expected_widths, filled, fit, random_widths, uniform
from dmcp.searching.config import SearchResult

GAMMA = 0.95


@functools.cache
def traced(net: Any, groups: int = 10, align: int = 1, **wider: int) -> tuple[Any, dmcp.Supernet]:
    model = randomise(net(**(net.FULL | wider)))
    graph = dmcp.trace(model, sample(net.SHAPE))
    return graph, dmcp.Supernet(model, graph, groups, align)


def wide(groups: int = 10, align: int = 1) -> tuple[Any, dmcp.Supernet]:
    """Inverted residuals with enough channels that one of them does not matter."""
    return traced(Depthwise, groups, align, s=24, e=96, f=88, t=48)


def result(
    spec: Any, alpha: float | Tensor, net: tuple[Any, dmcp.Supernet], align: int = 1, process: Process = CHAIN
) -> SearchResult:
    graph, supernet = net
    alphas = alpha if isinstance(alpha, Tensor) else torch.full(supernet.alpha.shape, alpha)
    return SearchResult(alphas, supernet.sizes, graph, parse(spec, graph), GAMMA, align, process=process)


def share(found: SearchResult, widths: dmcp.Widths) -> float:
    return spent_shares(found.budget, found.graph, widths.tensor()[None]).max().item()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# expected sampling


@pytest.mark.parametrize("spec", ["50%", "30%,params:50%", "90%,params:35%"])
@pytest.mark.parametrize("alpha", [-8.0, 0.0, 2.0, 8.0])
@pytest.mark.parametrize("align", [1, 4])
def test_the_expected_network_keeps_the_budget(spec: str, alpha: float, align: int) -> None:
    """Counted again on the cut network: far from the budget or near it, on either side."""
    graph, net = wide(align=align)
    found = result(spec, alpha + torch.randn(net.alpha.shape, generator=seeded()), (graph, net), align)
    widths = expected(found)
    assert all(w % align == 0 or w == space.size for w, space in zip(widths.values(), graph.spaces, strict=True))
    assert all(w >= floor for w, floor in zip(widths.values(), net.min_widths.values(), strict=True))
    small = dmcp.cut(net.model, graph, widths)
    with FlopCounterMode(display=False) as counter:
        small(sample(Depthwise.SHAPE, batch=1))
    counted = {"macs": counter.get_total_flops() / 2, "params": sum(p.numel() for p in small.parameters())}
    used = [counted[limit.kind] / limit.target for limit in found.budget.limits]
    assert GAMMA <= max(used) <= 1


@pytest.mark.parametrize("name", ["cifar:resnet20", "digits:resnet"])
def test_final_widths_leave_little_of_the_budget(name: str) -> None:
    """A search may end anywhere in its band; at its tolerance alone, most of these would leave more than 2 %."""
    graph = dmcp.trace(model := build(name), torch.zeros(1, *sample_shape(model)))
    net = (graph, dmcp.Supernet(model, graph))
    left = 0
    for seed in range(10):
        found = result("50%", 2 + torch.randn(net[1].alpha.shape, generator=seeded(seed)), net)
        widths = expected(found)
        assert FILLED <= share(found, widths) <= 1
        assert widths == expected(replace(found, tolerance=FILLED))  # as comparisons have always had them
        least, most = found.sizes[:, 0], found.sizes.sum(dim=1)
        loose = fit(graph, found.budget, expected_widths(found), Options(graph, least, most, 1), GAMMA)
        left += share(found, loose) < FILLED
    assert left > 5
    assert share(found, expected(replace(found, tolerance=0.995))) >= 0.995  # a search that is to use more


def test_rounding_alone_would_exceed_the_budget() -> None:
    """Peers round the expected widths and never count again."""
    graph, net = wide()
    cases = wrong = 0
    for seed in range(20):
        alphas = 2 + torch.randn(net.alpha.shape, generator=seeded(seed))
        found = result(1.0, alphas, (graph, net))
        rounded = graph.widths(expected_widths(found).round().long())
        exact = graph.macs(expected_widths(found)[None]).item()
        found = result(int(exact) + 1, alphas, (graph, net))  # the expectation is inside, just
        widths = expected(found)
        assert holds(found.budget, graph, widths)
        assert (widths.tensor() - expected_widths(found)).abs().max() < 2
        if FILLED <= share(found, rounded) <= 1:
            assert widths == rounded  # nothing to repair
        cases, wrong = cases + 1, wrong + (not holds(found.budget, graph, rounded))
    assert 0 < wrong < cases


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
def test_the_expected_widths_are_the_means_of_samples(process: Process) -> None:
    net = wide()
    alphas = torch.randn(net[1].alpha.shape)
    found = result("50%", alphas, net, process=process)
    widths = process.sample(found.alphas, found.sizes, 100_000, seeded()).double()
    error = widths.std(dim=0) / len(widths) ** 0.5
    assert ((widths.mean(dim=0) - expected_widths(found)).abs() < 4.5 * error).all()
    assert holds(found.budget, found.graph, expected(found))


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_the_tolerance_is_reached_where_any_widths_reach_it(net: Any) -> None:
    """Against all structures of a small net; where none is in the band, at least the budget holds."""
    graph, supernet = traced(net, groups=3, align=2)
    rows = [
        [k for k in range(floor, space.size + 1) if k % 2 == 0 or k == space.size]
        for space, floor in zip(graph.spaces, supernet.min_widths.values(), strict=True)
    ]
    every = torch.tensor(list(itertools.product(*rows)))
    for seed, spec in enumerate(["50%", "40%", "70%,params:60%", "60%,params:90%", "85%"] * 2):
        alphas = 2 * torch.randn(supernet.alpha.shape, generator=seeded(seed))
        found = result(spec, alphas, (graph, supernet), align=2)
        shares = spent_shares(found.budget, graph, every).amax(dim=1)
        if shares.min() > 1:
            with pytest.raises(BudgetError, match="choose from"):
                expected(found)
            continue
        used = share(found, expected(found))
        reachable = ((shares >= GAMMA) & (shares <= 1)).any().item()
        assert used <= 1 and (used >= GAMMA or not reachable)


def test_the_expected_network_stays_inside_the_bounds_of_its_spaces() -> None:
    graph, net = wide()
    lower, upper = torch.tensor([20, 1, 50, 1]), torch.tensor([24, 40, 88, 30])
    for alpha in (-8.0, 8.0):
        found = result("40%", alpha, (graph, net))
        found = SearchResult(found.alphas, bounded(net.sizes, lower, upper), graph, found.budget, GAMMA)
        for widths in (expected(found), *direct(SearchResult(**vars(found) | {"alphas": found.alphas * 0}), n=3)):
            assert holds(found.budget, graph, widths)
            assert (widths.tensor() >= lower).all() and (widths.tensor() <= upper).all()


def test_another_alignment_than_the_search_had() -> None:
    graph, net = wide()
    found = result("50%", 1.0, (graph, net))
    widths = expected(found, align=8)
    assert all(w % 8 == 0 for w in widths.values()) and GAMMA <= share(found, widths) <= 1
    with pytest.raises(BudgetError, match="align"):
        expected(found, align=0)


# direct sampling


def test_direct_samples_are_different_and_inside_the_band() -> None:
    net = wide()
    found = result("50%,params:70%", 1.2, net)
    structures = direct(found, n=20, generator=seeded())
    assert len(set(structures)) == 20
    assert all(GAMMA <= share(found, widths) <= 1 for widths in structures)
    borders = found.sizes.cumsum(dim=1).tolist()
    assert all(w in row for widths in structures for w, row in zip(widths.values(), borders, strict=True))
    assert structures == direct(found, n=20, generator=seeded())
    assert structures != direct(found, n=20, generator=seeded(1))


def test_direct_sampling_ends_and_says_what_it_saw() -> None:
    """Peers reject samples in a loop without an end."""
    graph, net = wide()
    kept = torch.full(net.alpha.shape, 20.0)
    kept[:, 6:] = 0  # seven of ten groups always stay
    found = result("40%", kept, (graph, net))
    draws = sample_groups(found.alphas, found.sizes, 20_000, seeded())
    assert (graph.macs(draws) > found.budget.limits[0].target).all()  # `while True: sample, keep if inside` finds none
    with pytest.raises(BudgetError, match=r"None of 20,000 sampled structures") as caught:
        direct(found, n=3, generator=seeded(), tries=20_000)
    macs = graph.macs(draws)
    assert macs.min() < macs.median() < macs.max()
    for number in (macs.min(), macs.median(), macs.max(), found.budget.limits[0].target):
        assert f"{int(number):,}" in str(caught.value)


def test_direct_sampling_below_the_band_returns_what_is_inside() -> None:
    found = result("90%", -1.0, wide())
    structures = direct(found, n=4, generator=seeded(), tries=5_000)
    assert len(set(structures)) == 4 and all(holds(found.budget, found.graph, widths) for widths in structures)
    shares = [share(found, widths) for widths in structures]
    assert shares == sorted(shares, reverse=True) and shares[0] < GAMMA


def test_a_chain_that_knows_one_structure_gives_one() -> None:
    found = result("90%", -60.0, wide())
    assert direct(found, n=5, generator=seeded(), tries=1_000) == [wide()[1].min_widths]
    for n, tries in ((0, 10), (1, 0)):
        with pytest.raises(BudgetError, match="at least one"):
            direct(found, n=n, tries=tries)


def test_direct_samples_are_the_first_of_the_draws() -> None:
    """Against a plain loop over the same draws: those in the band, then those below it, best first."""
    graph, net = wide()
    found = result("50%", 1.2, (graph, net))
    draws = [tuple(row) for row in sample_groups(found.alphas, found.sizes, 5_000, seeded()).tolist()]
    target = found.budget.limits[0].target
    inside = {row: graph.macs(graph.widths(row)) / target for row in draws}
    near = [row for row, used in inside.items() if FILLED <= used <= 1]
    below = [row for row, used in inside.items() if used < FILLED]
    assert 10 < len(near) < 500 < len(below)
    for n in (1, len(near), len(near) + 7, len(near) + len(below), 5_000):
        rest = sorted(below[:n], key=lambda row: -inside[row])
        structures = direct(found, n=n, generator=seeded(), tries=5_000)
        assert [tuple(widths.values()) for widths in structures] == [*near, *rest][:n]


def test_chains_that_know_two_structures_give_two_and_every_try() -> None:
    graph, net = wide()
    alphas = torch.full(net.alpha.shape, -60.0)
    alphas[0, 0] = 0.0
    drawn: list[int] = []

    def count(alpha: Tensor, sizes: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        drawn.append(n)
        return sample_groups(alpha, sizes, n, generator)

    found = result("90%", alphas, (graph, net), process=Process(CHAIN.marginals, CHAIN.moment, count))
    structures = direct(found, n=5, generator=seeded(), tries=500)
    assert sum(drawn) == 500
    assert {widths.tensor()[0].item() for widths in structures} == set(net.sizes[0].cumsum(dim=0)[:2].tolist())
    assert len(structures) == 2 and len(direct(found, n=1, generator=seeded(), tries=500)) == 1


# controls


@pytest.mark.parametrize("spec", ["20%", "50%", "90%", "80%,params:40%"])
def test_controls_use_the_same_budget(spec: str) -> None:
    graph, net = wide()
    budget = parse(spec, graph)
    drawn = [random_widths(graph, budget, seeded(seed)) for seed in range(5)]
    for widths in (uniform(graph, budget), uniform(graph, budget, net.min_widths, align=4), *drawn):
        assert FILLED <= spent_shares(budget, graph, widths.tensor()[None]).max().item() <= 1
    assert drawn[0] == random_widths(graph, budget, seeded(0))
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("tolerance", [0.95, 0.99])
def test_uniform_fills_coarse_widths_as_ours_do(tolerance: float) -> None:
    """Steps of 8 channels in a small network: a budget that only ours filled would be a gain of its own."""
    net = build("digits:resnet")
    graph = dmcp.trace(net, torch.zeros(2, 1, 8, 8))
    supernet = dmcp.Supernet(net, graph, align=8)
    found = SearchResult(supernet.alpha.detach(), supernet.sizes, graph, parse("30%", graph), tolerance, align=8)
    even = uniform(graph, found.budget, supernet.min_widths, 8, filled(found))
    assert min(share(found, even), share(found, expected(found))) >= max(tolerance, FILLED)
    assert uniform(graph, found.budget, supernet.min_widths, 8) == uniform(graph, found.budget, supernet.min_widths, 8, FILLED)


def test_uniform_is_one_ratio_for_all() -> None:
    graph, _ = wide()
    full = graph.full.tensor()
    for spec in (0.1, 0.3, 0.5, 0.8):
        widths = uniform(graph, parse(spec, graph)).tensor()
        ratio = (widths / full).mean()
        assert ((widths - ratio * full).abs() <= 1.5).all()  # rounding, and one step to fill what is left
    assert uniform(graph, parse(1.0, graph)) == graph.full
    ceiling = graph.widths({graph.spaces[0].name: 3})
    draw = torch.Generator().manual_seed(0)
    for below in (uniform(graph, "40%", ceiling=ceiling), random_widths(graph, "40%", draw, ceiling=ceiling)):
        assert below[graph.spaces[0].name] <= 3 and graph.macs(below) <= 0.4 * graph.macs()


@pytest.mark.parametrize("align", [1, 4])
def test_uniform_does_not_widen_what_costs_little(align: int) -> None:
    """The squeezed channels cost next to nothing: what is left of the budget would buy all of them."""
    graph, _ = traced(SqueezeExcite, s=32, c=96, r=48)
    full = graph.full.tensor()
    for spec in ("30%", "50%", "70%"):
        widths = uniform(graph, spec, align=align).tensor()
        ratio = (widths / full)[full > full.min()].min()
        assert (widths <= ratio * full + 1.5 * align).all() and (widths >= ratio * full - align).all()


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
    assert list(uniform(graph, spec).values()) == widths


@pytest.mark.parametrize("spec", [0.5, "50%", 100_000, "params:50%"])
def test_controls_take_what_prune_takes(spec: Any) -> None:
    graph, _ = wide()
    budget = dmcp.parse_budget(spec, graph)
    assert uniform(graph, spec) == uniform(graph, budget)
    assert random_widths(graph, spec, seeded()) == random_widths(graph, budget, seeded())


def test_budgets_that_the_floor_exceeds_are_refused() -> None:
    for graph, net in (traced(Chain), traced(Residual)):
        budget = parse(graph.macs(net.min_widths) - 1, graph)
        with pytest.raises(BudgetError, match="choose from"):
            uniform(graph, budget, net.min_widths)
        with pytest.raises(BudgetError, match="choose from"):
            expected(SearchResult(net.alpha, net.sizes, graph, budget, GAMMA))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "alpha"), [("40%", 9.0), ("4%", 1.5)], ids=["sure", "unsure"])
def test_a_million_structures_of_mobilenet_in_seconds(spec: str, alpha: float) -> None:
    """Nothing is inside, so that every try is needed; the less sure the chains, the longer the draws take."""
    model = mobilenet_v2()
    graph = dmcp.trace(model, torch.zeros(2, 3, 224, 224))
    found = result(spec, alpha, (graph, dmcp.Supernet(model, graph)))
    spent: list[float] = []
    for _ in range(2):  # the better one: other programs share the caches
        start = time.process_time()
        with pytest.raises(BudgetError, match="None of 1,000,000"):
            direct(found, generator=seeded())
        spent.append(time.process_time() - start)
    print(f"1,000,000 structures and their macs: {min(spent):.1f} s of one core")
    assert min(spent) < 2


def test_align_counts_real_channels_where_whole_groups_are_kept() -> None:
    net = nn.Sequential(
        nn.Conv1d(2, 32, 3),
        nn.Conv1d(32, 64, 3),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.Conv1d(64, 24, 3),
        nn.Conv1d(24, 4, 1),
    )
    graph = dmcp.trace(net, torch.zeros(2, 2, 20))
    units = {space.name: (space.size, space.unit) for space in graph.spaces}
    assert units == {"0": (32, 1), "1": (8, 8), "4": (24, 1)}
    steps = {align: [space.step(align) for space in graph.spaces] for align in (1, 4, 8, 16)}
    assert steps == {1: [1, 1, 1], 4: [4, 1, 4], 8: [8, 1, 8], 16: [16, 2, 16]}
    supernet = dmcp.Supernet(net, graph, 10, align=8)
    assert supernet.sizes[1].count_nonzero() == 8 and supernet.sizes[0].count_nonzero() == 4
    narrow = dmcp.cut(net, graph, uniform(graph, "30%", supernet.min_widths, align=8))
    widths = [it.out_channels for it in narrow if isinstance(it, nn.Conv1d)][:-1]
    assert all(width % 8 == 0 for width in widths) and widths[1] in (24, 32, 40)
    assert "8 x 8   97.1%  1" in graph.summary()


def test_align_holds_for_what_reads_a_space_of_several_channels() -> None:
    net = nn.Sequential(nn.Conv2d(3, 128, 1), nn.PixelShuffle(2), nn.Conv2d(32, 16, 1), nn.Conv2d(16, 2, 1))
    graph = dmcp.trace(net, torch.zeros(2, 3, 4, 4))
    assert [(space.size, space.unit, space.step(8)) for space in graph.spaces] == [(32, 1, 8), (16, 1, 8)]
    grouped = nn.Sequential(nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 3, groups=16), nn.Conv2d(64, 2, 1))
    (space,) = dmcp.trace(grouped, torch.zeros(2, 3, 4, 4)).spaces
    assert (space.size, space.unit, space.step(8)) == (16, 4, 2)
