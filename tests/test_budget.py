"""A budget for one network: its limits, the loss (I6), and expected costs against samples and finite differences."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from nets import Residual, SharedWeight, randomise, sample

import dmcp
from dmcp.budgets import Limit
from dmcp.errors import BudgetError
from dmcp.markov import marginals, moment, sample_groups
from dmcp.searching.budget import budget_loss, check_reachable, costs, counted_part, parse_budget, ratios, spent_shares

GAMMA = 0.95
nets = pytest.mark.parametrize("net", [Residual, SharedWeight], ids=lambda net: net.__name__)


@functools.cache
def traced(net: Any = Residual) -> tuple[Any, dmcp.Supernet]:
    model = randomise(net(**net.FULL))
    graph = dmcp.trace(model, sample(net.SHAPE))
    return graph, dmcp.Supernet(model, graph, groups=4)


def test_shares_are_resolved_by_the_cost_of_the_unpruned_network() -> None:
    graph, _ = traced()
    macs, params, memory, traffic = graph.macs(), graph.params(), graph.memory(), graph.traffic()
    table: dict[Any, tuple[str, int]] = {
        12_345: ("macs", 12_345),
        "1.1G": ("macs", 1_100_000_000),
        0.5: ("macs", macs // 2),
        "0.5": ("macs", macs // 2),
        "50%": ("macs", macs // 2),
        1.0: ("macs", macs),
        "params:50%": ("params", params // 2),
        "memory:50%": ("memory", memory // 2),
        "traffic:50%": ("traffic", traffic // 2),
        "traffic:1MB": ("traffic", 1_000_000),
    }
    for spec, limit in table.items():
        assert parse_budget(spec, graph).limits == (Limit(*limit),), spec
    two = parse_budget("50%, params:2k", graph)
    assert two.limits == (Limit("macs", macs // 2), Limit("params", 2000)) and two.text == "50%, params:2k"
    assert parse_budget(two, graph) is two


def test_latency_needs_a_measured_table() -> None:
    graph, _ = traced()
    for spec in ("8ms", "50%,8 ms", "latency:50%"):
        with pytest.raises(BudgetError, match="latency"):
            parse_budget(spec, graph)
    assert counted_part("8ms", graph) is None
    part = counted_part("50%,traffic:55%,8 ms", graph)
    assert part is not None and part.limits == parse_budget("50%,traffic:55%", graph).limits


# reachability


def test_a_limit_that_the_network_meets_leaves_the_others() -> None:
    graph, net = traced()
    check_reachable(parse_budget("50%,params:9G", graph), graph, net.min_widths)
    assert dmcp.uniform(graph, "50%,params:9G") == dmcp.uniform(graph, "50%")


def test_the_json_of_a_graph_has_every_kind_that_is_counted() -> None:
    graph, _ = traced()
    facts = graph.to_json()
    counted = costs(graph, graph.full)
    assert {kind: facts[kind] for kind in counted} == counted


def test_unreachable_budgets_name_the_range() -> None:
    graph, net = traced()
    low, full = costs(graph, net.min_widths), costs(graph, graph.full)
    for spec in ("0.1%", "40"):
        with pytest.raises(BudgetError) as caught:
            check_reachable(parse_budget(spec, graph), graph, net.min_widths)
        assert f"{low['macs']:,}" in str(caught.value) and f"{full['macs']:,}" in str(caught.value)
    for spec in ("101%", "101%,params:9G"):  # what the network meets already
        with pytest.raises(BudgetError, match="already meets") as caught:
            check_reachable(parse_budget(spec, graph), graph, net.min_widths)
        assert f"{full['macs']:,}" in str(caught.value)
    with pytest.raises(BudgetError, match="less than the cheapest"):
        check_reachable(parse_budget("0.1%,params:9G", graph), graph, net.min_widths)
    for kind in ("macs", "traffic"):
        for end, beyond in ((low[kind], -1), (full[kind], 1)):
            check_reachable(parse_budget(f"{kind}:{end}", graph), graph, net.min_widths)
            with pytest.raises(BudgetError):
                check_reachable(parse_budget(f"{kind}:{end + beyond}", graph), graph, net.min_widths)
    part = dmcp.trace(net.model, sample(Residual.SHAPE), ignore=["conv3", "conv4"])
    with pytest.raises(BudgetError, match=f"{part.prunable_share:.1%}"):
        dmcp.uniform(part, "1%")


# the loss


def gradient(values: list[float]) -> list[float]:
    r = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    budget_loss(r, GAMMA).backward()
    assert r.grad is not None
    return r.grad.tolist()


def test_the_loss_pulls_into_the_band_from_both_sides() -> None:
    """I6, and the values of eq. 13 with the margin of the authors' code."""
    for r in (0.01, 0.5, 0.94):
        assert gradient([r]) == pytest.approx([-1 / (1 - r)])
    for r in (0.95, 0.97, 1.0):
        assert gradient([r]) == [0] and budget_loss(torch.tensor([r], dtype=torch.float64), GAMMA) == 0
    for r in (1.01, 1.5, 30.0):
        assert gradient([r]) == pytest.approx([1 / (r - GAMMA)])
    assert gradient([0.5, 0.97]) == [0, 0]  # one in its band: nothing pushes up
    assert gradient([0.5, 0.2]) == pytest.approx([-2, 0])  # all below: the binding one pushes up
    assert gradient([0.5, 1.2]) == pytest.approx([0, 4])  # what is exceeded pushes down
    assert gradient([1.05, 1.2]) == pytest.approx([10, 4])


# the expected cost


@nets
def test_expected_costs_are_the_means_of_samples(net: Any) -> None:
    """SharedWeight has a space squared: there the mean of the square is not the square of the mean."""
    graph, supernet = traced(net)
    budget = parse_budget("50%,params:40%,traffic:50%", graph)
    alpha = torch.randn(supernet.alpha.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    chances = marginals(alpha) * (supernet.sizes > 0)
    expected = ratios(budget, graph, chances, supernet.sizes)
    shares = spent_shares(budget, graph, sample_groups(alpha, supernet.sizes, 100_000, torch.Generator()))
    error = shares.std(dim=0) / len(shares) ** 0.5
    assert ((shares.mean(dim=0) - expected).abs() < 4 * error).all()
    if net is SharedWeight:
        wrong = graph.macs(moment(chances, supernet.sizes, 1)[None]) / budget.limits[0].target
        assert (wrong - shares[:, 0].mean()).abs() > 4 * error[0]
    alpha.requires_grad_()
    assert torch.autograd.gradcheck(lambda a: ratios(budget, graph, marginals(a), supernet.sizes), alpha)
