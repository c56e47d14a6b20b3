"""Budgets: their texts, the loss (I6), expected costs against samples and finite differences, and peers' bugs."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from nets import Depthwise, Residual, SharedWeight, randomise, sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp.budget import (
    Budget,
    Limit,
    budget_loss,
    check_reachable,
    constant_alpha,
    costs,
    holds,
    parse,
    ratios,
    spent_shares,
)
from dmcp.errors import BudgetError
from dmcp.markov import CHAIN, INDEPENDENT, Process

GAMMA = 0.95


@functools.cache
def traced(net: Any) -> tuple[Any, dmcp.Supernet]:
    model = randomise(net(**net.FULL))
    graph = dmcp.trace(model, sample(net.SHAPE))
    return graph, dmcp.Supernet(model, graph, groups=4)


@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        (12_345, [("macs", 12_345)]),
        ("12345", [("macs", 12_345)]),
        ("211M", [("macs", 211_000_000)]),
        ("1.1G", [("macs", 1_100_000_000)]),  # 1.1 * 1e9 in floats is 1100000000.0000002
        ("90 k", [("macs", 90_000)]),
        ("2e5", [("macs", 200_000)]),
        ("1_000_000", [("macs", 1_000_000)]),
        ("macs:2m", [("macs", 2_000_000)]),
        ("params:2M", [("params", 2_000_000)]),
    ],
)
def test_counts_are_read(spec: Any, limits: list[tuple[str, int]]) -> None:
    graph, _ = traced(Residual)
    assert [(limit.kind, limit.target) for limit in parse(spec, graph).limits] == limits


def test_shares_are_read() -> None:
    graph, _ = traced(Residual)
    macs, params = graph.macs(), graph.params()
    assert parse(0.5, graph).limits == parse("50%", graph).limits == (Limit("macs", macs // 2),)
    assert parse("0.5", graph).limits == (Limit("macs", macs // 2),)
    assert parse(1.0, graph).limits == parse("100%", graph).limits == (Limit("macs", macs),)
    assert parse("params:50%", graph).limits == (Limit("params", params // 2),)
    both = parse("50%, params:2k", graph)
    assert both.limits == (Limit("macs", macs // 2), Limit("params", 2000)) and both.text == "50%, params:2k"
    assert parse(both, graph) is both


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("8ms", "latency"),
        ("50%,8 ms", "latency"),
        ("0ms", "no time"),
        ("latency:0%", "no time"),
        ("latency:200%", "up to 100%"),
        ("8 MB", "bytes.*params:2M"),
        ("params:1.5GB", "bytes.*params:375M"),
        ("4MiB", "bytes.*params:1.04858M"),
        ("600KB", "bytes.*params:150k"),
        ("4000 b", "bytes.*params:1k"),
        ("4.5 GFLOPs", "like 4.5G or 2.25G"),
        ("4.5 GMACs", "write 4.5G"),
        ("60k params", "write params:60k"),
        (0.0, "share"),
        (-0.5, "share"),
        (1.5, "share"),
        (float("nan"), "share"),
        (True, "share"),
        (0, "less than one.*choose more, like 50%"),
        ("0%", "less than one.*choose more, like 50%"),
        ("params:0%", "less than one.*choose more, like params:50%"),
        (-5, "cannot be read"),
        ("", "cannot be read"),
        ("half", "cannot be read"),
        ("50%,", "cannot be read"),
        ("watts:5", "cannot be read"),
        ("5T", "cannot be read"),
        ("1e999999999", "cannot be read"),
        ("1e-09", "less than one"),
        (1e-9, "less than one"),
        ("50%,20%", "twice"),
        ("params:1M,params:50%", "twice"),
        pytest.param("9" * 5000, "5,000 characters", id="long"),
        pytest.param(10**5000, "beyond any network", id="5,001 digits"),
        pytest.param(-(10**5000), "beyond any network", id="negative"),
        ("9e99", "more than any network costs"),
        ("٣", "cannot be read"),  # a digit, but not one that people type here
        (None, "cannot be read"),
    ],
)
def test_what_is_no_budget_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(BudgetError, match=words) as caught:
        parse(spec, traced(Residual)[0])
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("kind", "target"), [("macs", 0), ("watts", 5), ("macs", 2.0), ("macs", 10**19), (None, 1)])
def test_impossible_limits_are_refused(kind: Any, target: Any) -> None:
    with pytest.raises(BudgetError, match="A limit is one of macs, params"):
        Limit(kind, target)


@pytest.mark.parametrize("limits", [(), (Limit("macs", 1), Limit("macs", 2))], ids=["none", "twice"])
def test_a_budget_limits_each_kind_once(limits: tuple[Limit, ...]) -> None:
    with pytest.raises(BudgetError, match="at most once"):
        Budget(limits, "")


@pytest.mark.parametrize(("spec", "kind"), [("101%", "macs"), ("0.1%", "macs"), ("50%,params:9G", "params")])
def test_unreachable_budgets_name_the_range(spec: str, kind: str) -> None:
    graph, net = traced(Residual)
    with pytest.raises(BudgetError) as caught:
        check_reachable(parse(spec, graph), graph, net.min_widths)
    for widths in (net.min_widths, graph.full):
        assert f"{costs(graph, widths)[kind]:,}" in str(caught.value)


def test_floors_that_settings_made_wide_are_named() -> None:
    graph, net = traced(Residual)
    for groups, align, words in ((10, 64, "4 of 4 spaces .* there, 4 of them whole, .* align"), (2, 1, "more groups")):
        with pytest.raises(BudgetError, match=words):
            check_reachable(parse("1%", graph), graph, dmcp.Supernet(net.model, graph, groups, align).min_widths)
    with pytest.raises(BudgetError, match=r"to [\d,]+\.$"):  # nothing is narrower
        check_reachable(parse(1, graph), graph, graph.widths([1] * 4))


@pytest.mark.parametrize(
    ("spec", "meant"),
    [("40", "40%"), (40, "40%"), ("macs: 40", "macs:40%"), ("params:7", "params:7%"), ("37.5", "37.5%"), (1, "1%")],
)
def test_a_small_number_without_a_unit_may_be_a_share(spec: Any, meant: str) -> None:
    graph, net = traced(Residual)
    with pytest.raises(BudgetError, match=f"did you mean {meant}\\? If not, choose from"):
        check_reachable(parse(spec, graph), graph, net.min_widths)
    parse(meant, graph)


@pytest.mark.parametrize("spec", ["101", "1%", "0.001", "0.001%", "macs:2k"])
def test_other_numbers_are_no_forgotten_shares(spec: str) -> None:
    graph, net = traced(Residual)
    with pytest.raises(BudgetError) as caught:
        check_reachable(parse(spec, graph), graph, net.min_widths)
    assert "did you mean" not in str(caught.value)


def test_both_ends_of_the_range_can_be_reached() -> None:
    graph, net = traced(Residual)
    for target in (graph.macs(net.min_widths), graph.macs()):
        check_reachable(parse(target, graph), graph, net.min_widths)
    for target in (graph.macs(net.min_widths) - 1, graph.macs() + 1):
        with pytest.raises(BudgetError):
            check_reachable(parse(target, graph), graph, net.min_widths)


def test_costs_are_those_of_the_cut_network() -> None:
    graph, net = traced(Depthwise)
    widths = graph.widths([3, 5, 7, 2])
    small = dmcp.cut(net.model, graph, widths)
    with FlopCounterMode(display=False) as counter:
        small(sample(Depthwise.SHAPE, batch=1))
    counted = {"macs": counter.get_total_flops() // 2, "params": sum(p.numel() for p in small.parameters())}
    counted["memory"] = dmcp.trace(small, sample(Depthwise.SHAPE)).memory()
    assert costs(graph, widths) == counted
    for kind, cost in counted.items():
        for slack, inside in ((0, True), (-1, False)):
            budget = Budget((Limit(kind, cost + slack),), "")
            assert holds(budget, graph, widths) == inside
            assert (spent_shares(budget, graph, widths.tensor()[None]).item() <= 1) == inside


# the loss


def gradient(values: list[float]) -> list[float]:
    r = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    budget_loss(r, GAMMA).backward()
    assert r.grad is not None
    return r.grad.tolist()


@pytest.mark.parametrize("r", [0.01, 0.5, 0.94, 0.95, 0.97, 1.0, 1.01, 1.5, 30.0])
def test_the_loss_pulls_into_the_band_from_both_sides(r: float) -> None:
    """I6, and the values of eq. 13 with the margin of the authors' code."""
    (slope,) = gradient([r])
    if r < GAMMA:
        assert slope == pytest.approx(-1 / (1 - r))
    elif r > 1:
        assert slope == pytest.approx(1 / (r - GAMMA))
    else:
        assert slope == 0 and budget_loss(torch.tensor([r], dtype=torch.float64), GAMMA) == 0


def test_several_limits() -> None:
    assert gradient([0.5, 0.97]) == [0, 0]  # one in its band: nothing pushes up
    assert gradient([0.5, 0.2]) == pytest.approx([-2, 0])  # all below: the binding one pushes up
    assert gradient([0.5, 1.2]) == pytest.approx([0, 4])  # what is exceeded pushes down
    assert gradient([1.05, 1.2]) == pytest.approx([10, 4])


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1.0, 2.0])
def test_a_band_without_width_is_refused(tolerance: float) -> None:
    with pytest.raises(BudgetError, match="tolerance"):
        budget_loss(torch.ones(1), tolerance)


def test_units_are_not_mixed() -> None:
    """A peer compares expected MACs with a target in millions: everything is too large, and shrinks for ever."""

    def wrong_loss(expected: Tensor, target_millions: float) -> Tensor:
        error = expected - target_millions * 1e6
        lower = GAMMA * target_millions
        if lower <= expected.item() <= target_millions:
            return torch.zeros_like(expected)
        if expected.item() < lower:
            return torch.log((lower - expected).abs())
        return torch.log((error if error > 0 else expected).abs())

    for millions, sign in ((100.0, -1), (1960.0, 0), (4000.0, 1)):  # of a target of 2000 million
        expected = torch.tensor(millions * 1e6, dtype=torch.float64, requires_grad=True)
        (right,) = torch.autograd.grad(budget_loss((expected / 2e9)[None], GAMMA), expected)
        (wrong,) = torch.autograd.grad(wrong_loss(expected, 2000.0), expected)
        assert right.sign() == sign
        assert wrong.sign() == 1  # whatever the network costs


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
@pytest.mark.parametrize("start", [-1.0, 2.0])
def test_descent_on_alphas_ends_inside_the_band(start: float, process: Process) -> None:
    graph, net = traced(Residual)
    budget = parse("50%,params:60%", graph)
    alpha = torch.full(net.alpha.shape, start, dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        r = ratios(budget, graph, process.marginals(alpha), net.sizes, process)
        loss = budget_loss(r, GAMMA)
        if not loss:
            break
        (slope,) = torch.autograd.grad(loss, alpha)
        assert (slope * start >= 0).all()
        alpha = (alpha - 0.02 * slope.sign()).detach().requires_grad_()
    assert GAMMA <= r.max() <= 1


# the expected cost


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
@pytest.mark.parametrize("net", [Residual, SharedWeight], ids=lambda net: net.__name__)
def test_expected_costs_are_the_means_of_samples(net: Any, process: Process) -> None:
    """SharedWeight has a space squared: there the mean of the square is not the square of the mean."""
    graph, supernet = traced(net)
    budget = parse("50%,params:40%", graph)
    alpha = torch.randn(supernet.alpha.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    chances = process.marginals(alpha) * (supernet.sizes > 0)
    expected = ratios(budget, graph, chances, supernet.sizes, process)
    draws = process.sample(alpha, supernet.sizes, 100_000, torch.Generator().manual_seed(3))
    shares = spent_shares(budget, graph, draws)
    error = shares.std(dim=0) / len(draws) ** 0.5
    assert ((shares.mean(dim=0) - expected).abs() < 4 * error).all()
    if net is SharedWeight:
        mean = process.moment(chances, supernet.sizes, 1)
        wrong = graph.macs(mean[None]) / budget.limits[0].target
        assert (wrong - shares[:, 0].mean()).abs() > 4 * error[0]


def test_the_gradient_of_a_depthwise_conv_is_not_doubled() -> None:
    """A peer holds `groups` constant while both channel counts have a gradient: exactly twice the true slope."""
    graph, _ = traced(Depthwise)
    widths = graph.full.tensor()
    moving = widths.double()[None].requires_grad_()
    (slope,) = torch.autograd.grad(graph.macs(moving), moving)
    one = torch.eye(len(widths), dtype=torch.int64)
    differences = (graph.macs(widths + one) - graph.macs(widths - one)) / 2
    assert slope[0].tolist() == differences.tolist()

    e = torch.tensor(14.0, requires_grad=True)  # depth1: 3 x 3 taps at 9 x 9 places
    (wrong,) = torch.autograd.grad(e * e / e.item() * 9 * 81, e)
    narrow, full = ({c.name: c.macs for c in graph.layers({"expand1": k})} for k in (13, 14))
    assert full["depth1"] - narrow["depth1"] == 9 * 81 == wrong.item() / 2


def test_ratios_have_the_gradient_of_finite_differences() -> None:
    graph, net = traced(SharedWeight)
    budget = parse("50%,params:40%", graph)
    alpha = torch.randn(net.alpha.shape, dtype=torch.float64, requires_grad=True)
    for process in (CHAIN, INDEPENDENT):
        assert torch.autograd.gradcheck(lambda a, p=process: ratios(budget, graph, p.marginals(a), net.sizes, p), alpha)


class Watch(TorchDispatchMode):
    """Counts what a GPU would have to wait for: numbers from Python (lift_fresh), and numbers back to it (item)."""

    waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += func in (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default)
        return func(*args, **(kwargs or {}))


def descend(net: Any, process: Process, alpha: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What an architecture step does with the budget: ratios, loss and slope."""
    graph, _ = traced(net)
    budget = Budget((Limit("macs", 20_000), Limit("params", 400)), "")
    found = ratios(budget, graph, process.marginals(alpha), sizes, process)
    loss = budget_loss(found, GAMMA)
    return found.detach(), loss.detach(), torch.autograd.grad(loss, alpha)[0]


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
@pytest.mark.parametrize("net", [Residual, SharedWeight], ids=lambda net: net.__name__)
def test_the_second_step_neither_copies_from_the_host_nor_waits(net: Any, process: Process) -> None:
    _, supernet = traced(net)
    alpha = torch.randn(supernet.alpha.shape, requires_grad=True)
    first = descend(net, process, alpha, supernet.sizes)
    with Watch() as watch:
        second = descend(net, process, alpha, supernet.sizes)
    assert watch.waits == 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with Watch() as watch:
        torch.tensor([1.0]).new_tensor([2.0])[[0]].item()
    assert watch.waits == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
@pytest.mark.parametrize("net", [Residual, SharedWeight], ids=lambda net: net.__name__)
def test_a_step_can_be_captured(net: Any, process: Process, deterministic: bool) -> None:
    _, supernet = traced(net)
    sizes = supernet.sizes.cuda()
    alpha = torch.randn(supernet.alpha.shape, device="cuda", requires_grad=True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        descend(net, process, alpha, sizes)  # makes the tensors
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = descend(net, process, alpha, sizes)
        for start in (-1.0, 3.0):
            alpha.detach().normal_().add_(start)
            captured.replay()
            again = descend(net, process, alpha, sizes)
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
            oracle = descend(net, process, alpha.detach().cpu().double().requires_grad_(), supernet.sizes)
            for value, exact in zip(found, oracle, strict=True):
                torch.testing.assert_close(value.cpu().double(), exact, rtol=1e-4, atol=1e-6)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
@pytest.mark.parametrize("ratio", [1.0, 0.97])
def test_one_constant_starts_at_the_budget(process: Process, ratio: float) -> None:
    graph, net = traced(Residual)
    for spec in ("30%", "80%,params:50%"):
        budget = parse(spec, graph)
        alpha = torch.full(net.alpha.shape, constant_alpha(budget, graph, net.sizes, ratio, process)).double()
        found = ratios(budget, graph, process.marginals(alpha), net.sizes, process)
        assert found.max().item() == pytest.approx(ratio, abs=1e-6)


def test_a_constant_for_the_ends_still_has_a_gradient() -> None:
    graph, net = traced(Residual)
    ends = [constant_alpha(parse(target, graph), graph, net.sizes) for target in (graph.macs(net.min_widths), "100%")]
    assert ends == [-10, 10]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("0,5", "0.5"),
        ("params:0,5", "params:0.5"),
        ("0,5,params:2M", "0.5,params:2M"),
        ("1,1G", "1.1G"),
        ("12,5%", "12.5%"),
    ],
)
def test_a_comma_in_a_number_is_named(typed: str, meant: str) -> None:
    """Commas separate limits here, and decimals in half of the world."""
    with pytest.raises(BudgetError, match=re.escape(f"; a comma separates limits: did you mean {meant!r}?")):
        parse(typed, traced(Residual)[0])


@pytest.mark.parametrize("typed", ["50%,60%", "0%", "0.5,0.5"])
def test_other_mistakes_have_nothing_to_do_with_commas(typed: str) -> None:
    with pytest.raises(BudgetError) as error:
        parse(typed, traced(Residual)[0])
    assert "a comma" not in str(error.value)
