"""Budgets of latency: the table forecasts networks it has not seen, and what is pruned is really as fast as asked."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import NETS, Residual, sample
from test_cli import Capture, run
from test_pruning import SEARCH, TRAIN, Noise
from torch import Tensor, nn

import dmcp
from dmcp import pruning
from dmcp.budget import Limit, check_reachable, costs, holds, parse, ratios, spent_shares
from dmcp.errors import BudgetError, FileError, WidthsError
from dmcp.latency import measure as measure_module
from dmcp.latency.measure import (
    ENOUGH,
    MACS,
    LatencyWarning,
    choose,
    clock_of,
    device_name,
    draw,
    measure_latency,
    pass_times,
    solve,
    usual,
    work,
)
from dmcp.latency.table import FS_PER_MS, Latency, show_ms
from dmcp.markov import CHAIN
from dmcp.models import build
from dmcp.modules import narrow
from dmcp.report.html import make_page
from dmcp.report.trackers import scalars
from dmcp.runs import Run, read_run
from dmcp.sampling import expected, uniform
from dmcp.searching.config import SearchResult
from dmcp.tracing.cost import evaluate, total
from dmcp.tracing.graph import ChannelGraph


class Device:
    """A make-believe device: so many milliseconds for each multiply-add and number written, and some noise."""

    def __init__(self, noise: float = 0.0, slower: float = 1.0, constant: float = 0.5, shape: Any = Residual.SHAPE):
        self.noise, self.slower, self.constant, self.shape = noise, slower, constant, shape
        self.generator = torch.Generator().manual_seed(1)
        self.calls = 0

    @torch.no_grad()
    def __call__(self, net: nn.Module) -> float:
        self.calls += 1
        assert not net.training
        ms = self.constant
        hooks = []

        def count(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            nonlocal ms
            assert isinstance(module, nn.Conv2d | nn.Linear)
            pixels = out[0, 0].numel() if out.ndim == 4 else 1
            ms += 1e-5 * module.weight.numel() * pixels * (1 + 3 / pixels) + 1e-4 * out[0].numel()

        for part in net.modules():
            if isinstance(part, nn.Conv2d | nn.Linear):
                hooks.append(part.register_forward_hook(count))
        net(torch.zeros(1, *self.shape))
        for hook in hooks:
            hook.remove()
        return ms * self.slower * (1 + self.noise * float(torch.randn((), generator=self.generator)))


@functools.cache
def traced() -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    model = Residual(**Residual.FULL)
    return model, dmcp.trace(model, sample(Residual.SHAPE).float())


@functools.cache
def table() -> Latency:
    model, graph = traced()
    return measure_latency(model, sample(Residual.SHAPE).float(), graph, measure=Device())


def with_latency() -> ChannelGraph:
    return traced()[1].with_latency(table())


# the fit


def test_least_squares_are_those_of_a_search_over_all_sets_and_never_negative() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        a, b = draw.normal(size=(12, 4)), draw.normal(size=12)
        best = np.inf
        for mask in range(16):
            chosen = [column for column in range(4) if mask >> column & 1]
            x = np.zeros(4)
            if chosen:
                x[chosen] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(a @ x - b)))
        found = solve(a, b)
        assert (found >= 0).all() and np.linalg.norm(a @ found - b) == pytest.approx(best, rel=1e-6)


def test_work_adds_up_to_the_macs() -> None:
    _, graph = traced()
    macs = total(terms for key, terms in work(graph).items() if key[0] == MACS)
    batches = set()
    for divisor in (1, 2, 3):
        numbers = [max(1, space.size // divisor) for space in graph.spaces]
        batches.add(evaluate(macs, numbers) / graph.macs(graph.widths(numbers)))
    assert len(batches) == 1 and batches.pop() >= 1


def test_a_noisefree_device_is_forecast_exactly() -> None:
    found, graph = table(), with_latency()
    assert found.largest_error < 1e-3 and all(factor >= 0 for factor in found.terms.values())
    model, _ = traced()
    other = draw(graph, None, None, 1, 30, seed=9)
    for row in other:
        widths = graph.widths(row)
        assert graph.latency_fs(widths) / FS_PER_MS == pytest.approx(
            Device()(dmcp.cut(model, graph, widths).eval()), rel=2e-3
        )


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_every_kind_of_network_has_its_table(kind: Any) -> None:
    model = kind(**kind.FULL)
    measure = lambda net: 0.1 + 1e-4 * sum(it.numel() for it in net.parameters())  # noqa: E731
    x = sample(kind.SHAPE).float()
    found = measure_latency(model, x, measure=measure, networks=20)
    assert found.largest_error < 0.01 and min(found.terms.values()) >= 0


def test_noise_is_no_larger_in_the_forecasts_than_in_the_times() -> None:
    model, graph = traced()
    found = measure_latency(model, sample(Residual.SHAPE).float(), graph, measure=Device(noise=0.05))
    assert found.median_error < 0.1 and min(found.terms.values()) >= 0
    graph = graph.with_latency(found)
    truth = Device()
    errors = [
        abs(graph.latency_fs(widths) / FS_PER_MS / truth(dmcp.cut(model, graph, widths).eval()) - 1)
        for widths in map(graph.widths, draw(graph, None, None, 1, 30, seed=9))
    ]
    assert float(np.median(errors)) < 0.05


@functools.cache
def truth(count: int, seed: int) -> tuple[tuple[list[int], ...], tuple[float, ...]]:
    """Some widths, and what their networks take on the make-believe device."""
    model, graph = traced()
    rows = draw(graph, None, None, 1, count, seed)
    nets = (narrow(model, graph.cuts(widths), graph.attributes(widths)) for widths in map(graph.widths, rows))
    return tuple(rows), tuple(Device()(net.eval()) for net in nets)


class Hiccups:
    """The make-believe device, by heart; some of its calls, counted from 0, take so much longer."""

    def __init__(self, hit: Callable[[int], bool] = lambda call: False, by: float = 3.0, noise: float = 0.0) -> None:
        self.hit, self.by, self.noise = hit, by, noise
        self.draw = np.random.default_rng(0)
        self.calls = 0

    def __call__(self, net: nn.Module) -> float:
        number, self.calls = self.calls, self.calls + 1
        ms = truth(40, 0)[1][number % 40] * (1 + self.noise * float(self.draw.normal()))
        return ms * (self.by if self.hit(number) else 1.0)


def measured(device: Hiccups) -> tuple[Latency, float]:
    """A table by this device, and the largest error of its forecasts of networks that it has not seen."""
    model, graph = traced()
    found = measure_latency(model, sample(Residual.SHAPE).float(), graph, measure=device)
    graph, errors = graph.with_latency(found), []
    for row, ms in zip(*truth(30, 9), strict=True):
        errors.append(abs(graph.latency_fs(graph.widths(row)) / FS_PER_MS / ms - 1))
    return found, max(errors)


@pytest.mark.parametrize("calls", [{1}, {7}, {10}, {39}, {7, 10, 12}], ids=str)
def test_a_hiccup_does_not_bend_the_table(calls: set[int]) -> None:
    found, error = measured(Hiccups(calls.__contains__))
    assert error < 2e-3
    assert {number for number, it in enumerate(found.networks) if it.left_out} == calls
    assert f"{len(calls)} " in found.summary and "left out" in found.summary
    assert measure_module.describe(found).count("left out") == len(calls) + 1
    for number in calls:  # what was measured stays in the table
        assert found.networks[number].ms == pytest.approx(3 * found.networks[number].forecast_ms, rel=2e-3)


def test_a_hiccup_of_a_held_out_network_is_in_the_errors() -> None:
    """They are of what was measured, whatever the table then makes of it."""
    found, _ = measured(Hiccups({10}.__contains__))
    assert found.networks[10].held_out and found.largest_error == pytest.approx(2 / 3, rel=1e-2)
    assert found.median_error < 2e-3


def test_a_hiccup_among_noise_is_found_and_nothing_else() -> None:
    for seed in range(2):
        device, clean = Hiccups({7}.__contains__, noise=0.05), Hiccups(noise=0.05)
        device.draw, clean.draw = (np.random.default_rng(seed) for _ in range(2))
        found, error = measured(device)
        assert error < 0.15 and [it.left_out for it in found.networks] == [number == 7 for number in range(40)]
        assert not any(it.left_out for it in measured(clean)[0].networks)


def test_a_hiccup_of_the_unpruned_network_is_measured_again() -> None:
    """Budgets are shares of its time, and what is chosen is compared with it."""
    device = Hiccups({0}.__contains__)
    found, error = measured(device)
    assert device.calls == 41 and error < 2e-3 and not any(it.left_out for it in found.networks)
    assert found.unpruned_ms == pytest.approx(truth(40, 0)[1][0])
    found, _ = measured(Hiccups({0, 40}.__contains__))  # it really takes so long
    assert found.unpruned_ms == pytest.approx(3 * truth(40, 0)[1][0]) and not found.networks[0].left_out


def test_what_is_fast_or_often_slow_is_no_hiccup() -> None:
    quick, _ = measured(Hiccups({7}.__contains__, by=0.3))
    assert not any(it.left_out for it in quick.networks)
    often, _ = measured(Hiccups(lambda number: number % 3 == 1))
    assert not any(it.left_out for it in often.networks) and often.largest_error > 0.4


def test_the_networks_that_are_measured_reach_from_the_floor_to_the_whole() -> None:
    _, graph = traced()
    floor = graph.widths([min(2, space.size) for space in graph.spaces])
    rows = draw(graph, floor, None, 1, 40, seed=0)
    assert rows == draw(graph, floor, None, 1, 40, seed=0) != draw(graph, floor, None, 1, 40, seed=1)
    assert rows[0] == list(graph.full.values()) and rows[1] == list(floor.values())
    macs = [graph.macs(graph.widths(row)) / graph.macs() for row in rows]
    assert min(macs[2:]) < 0.2 and max(macs[2:]) > 0.7
    assert all(low <= width for row in rows for low, width in zip(floor.values(), row, strict=True))


def test_floor_and_ceiling_are_bounds_as_those_of_a_search() -> None:
    _, graph = traced()
    name = graph.spaces[0].name
    same = graph.widths([min(2, space.size) for space in graph.spaces])
    assert draw(graph, 2, None, 1, 12, seed=0) == draw(graph, same, None, 1, 12, seed=0)
    assert draw(graph, {}, {}, 1, 12, seed=0) == draw(graph, None, None, 1, 12, seed=0)
    for row in draw(graph, {name: 3}, {name: 4}, 1, 12, seed=0)[1:]:
        assert 3 <= row[0] <= 4


@pytest.mark.parametrize("wrong", [[2], "2", 0, 1.5, {"": None}, {"conv1": True}], ids=str)
@pytest.mark.parametrize("word", ["floor", "ceiling"])
def test_what_is_no_bound_is_a_sentence(word: str, wrong: Any) -> None:
    model, graph = traced()
    x = sample(Residual.SHAPE).float()
    for call in (lambda bound: measure_latency(model, x, graph, **bound), lambda bound: uniform(graph, 0.5, **bound)):
        with pytest.raises(WidthsError, match=f"{word} must be an int of at least 1, or such ints by name, not "):
            call({word: wrong})
    with pytest.raises(WidthsError, match=f"{word}: there is no space named 'nothing'"):
        measure_latency(model, x, graph, **{word: {"nothing": 2}})  # type: ignore[arg-type]
    with pytest.raises(WidthsError, match=r"No width of .* lies from 3 .floor. to 2 .ceiling"):
        uniform(graph, 0.5, 3, ceiling=2)


# expectation and budgets


def test_the_expectation_is_the_mean_of_samples() -> None:
    graph = with_latency()
    net = dmcp.Supernet(traced()[0], graph, 4)
    alphas = torch.linspace(-1, 2, net.sizes[:, 1:].numel(), dtype=torch.float64).reshape(net.sizes[:, 1:].shape)
    expected = graph.expected_latency_fs(CHAIN.marginals(alphas), net.sizes)
    drawn = CHAIN.sample(alphas, net.sizes, 40_000, torch.Generator().manual_seed(0))
    assert graph.latency_fs(drawn).double().mean().item() == pytest.approx(expected.item(), rel=5e-3)


def test_many_widths_at_once_are_those_one_by_one() -> None:
    graph = with_latency()
    rows = draw(graph, None, None, 1, 20, seed=3)
    assert graph.latency_fs(torch.tensor(rows)).tolist() == [graph.latency_fs(graph.widths(row)) for row in rows]


def test_times_are_read() -> None:
    graph = with_latency()
    half = round(table().unpruned_ms * FS_PER_MS) // 2
    eight = (Limit("latency", 8 * FS_PER_MS),)
    for text in ("8ms", "8 MS", "8000us", "0.008s", "latency:8ms", "latency: 8000 us"):
        assert parse(text, graph).limits == eight
    assert parse("latency:50%", graph).limits == parse("latency:0.5", graph).limits == (Limit("latency", half),)
    for measured in (0.9, 1.1):  # of what the table says of the same network
        first = replace(table().networks[0], ms=measured * graph.latency_fs() / FS_PER_MS)
        other = graph.with_latency(replace(table(), networks=(first, *table().networks[1:])))
        share = parse("latency:50%", other).limits[0].target / graph.latency_fs()
        assert share == pytest.approx(measured / 2)
        check_reachable(parse("latency:100%", other), other, other.widths([1] * len(other.spaces)))
    assert parse("8ms,params:2k", graph).limits == (*eight, Limit("params", 2000))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency:8", "like 8ms"),
        ("latency:8M", "like 8ms"),
        ("params:8ms", "params take no time"),
        ("0ms", "no time"),
        ("1e12s", "no time"),
        ("8ms,latency:50%", "twice"),
        ("5 parsecs", "cannot be read"),
        ("nanms", "a time is written like 8ms"),
        ("-3ms", "a time is written like 8ms"),
        ("8msec", "a time is written like 8ms"),
        ("latency:200%", "more than the unpruned network takes"),
    ],
)
def test_what_is_no_time_is_refused(text: str, words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        parse(text, with_latency())


def test_without_a_table_a_time_is_refused_with_the_way() -> None:
    _, graph = traced()
    with pytest.raises(BudgetError, match=r"8ms' is a latency.*measure_latency"):
        parse("8ms", graph)
    with pytest.raises(BudgetError, match="measure_latency"):
        graph.latency_fs()
    assert "latency" not in costs(graph, graph.full) and "latency" in costs(with_latency(), graph.full)


def test_limits_of_latency_count_like_others() -> None:
    graph = with_latency()
    budget = parse("latency:60%,50%", graph)
    small = graph.widths([max(1, space.size // 3) for space in graph.spaces])
    assert holds(budget, graph, small) and not holds(budget, graph, graph.full)
    shares = spent_shares(budget, graph, torch.stack([small.tensor(), graph.full.tensor()]))
    assert shares[0].max() < 1 and shares[1, 0].item() == pytest.approx(1 / 0.6, rel=2e-3)
    net = dmcp.Supernet(traced()[0], graph, 4)
    certain = ratios(budget, graph, torch.ones_like(net.sizes, dtype=torch.float64), net.sizes)
    assert certain.tolist() == pytest.approx([1 / 0.6, 2.0], rel=2e-3)
    for widths in (dmcp.uniform(graph, budget), dmcp.random_widths(graph, budget, torch.Generator().manual_seed(0))):
        assert holds(budget, graph, widths)


def test_an_unreachable_time_is_refused_with_the_range() -> None:
    graph = with_latency()
    floor = graph.widths([1] * len(graph.spaces))
    whole = show_ms(graph.latency_fs() / FS_PER_MS)
    with pytest.raises(BudgetError, match=f"asks for 1 us, less than the floor takes: choose from .* to {whole}"):
        check_reachable(parse("1us", graph), graph, floor)
    with pytest.raises(BudgetError, match="asks for 9 s, more than the unpruned network takes"):
        check_reachable(parse("9s", graph), graph, floor)


# files


def test_a_table_is_the_same_after_a_file(tmp_path: Path) -> None:
    table().save(tmp_path / "a" / "table.json")
    again = Latency.load(tmp_path / "a" / "table.json")
    assert again == table()
    assert traced()[1].with_latency(again).latency_fs() == with_latency().latency_fs()


def test_a_table_of_another_network_is_refused() -> None:
    model = Residual(**Residual.FULL)
    for graph, words in (
        (dmcp.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), torch.zeros(2, 3, 9, 9)), "architecture"),
        (dmcp.trace(model, sample(Residual.SHAPE).float(), ignore=[traced()[1].spaces[0].name]), "kept whole"),
        (dmcp.trace(model, torch.zeros(2, 3, 20, 20)), "samples of"),
    ):
        with pytest.raises(WidthsError, match=words):
            graph.with_latency(table())


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    plain = json.loads(json.dumps(table().to_json()))
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda it: it.pop("terms"),
        lambda it: it.update(terms=[[[99], 5]]),
        lambda it: it.update(terms=[[[0], -5]]),
        lambda it: it.update(networks=[]),
        lambda it: it.update(terms=[[[0] * 99, 5]]),
        lambda it: it.update(threads=10**9),
        lambda it: it.update(threads=0),
        lambda it: it["networks"][0].update(ms=0.0),
        lambda it: it.update(batch="one"),
        lambda it: it.update(median_error=float("nan")),
        lambda it: it.update(more=1),
        lambda it: it.update(format="else"),
    ]
    for change in changes:
        broken = json.loads(json.dumps(plain))
        change(broken)
        (tmp_path / "table.json").write_text(json.dumps(broken))
        with pytest.raises(FileError, match="not a table of latency"):
            Latency.load(tmp_path / "table.json")


@pytest.mark.parametrize("ms", [0, -1.0, float("nan"), "8", None, True])
def test_an_own_function_must_give_milliseconds(ms: Any) -> None:
    model, graph = traced()
    with pytest.raises(BudgetError, match="must return milliseconds"):
        measure_latency(model, sample(Residual.SHAPE).float(), graph, measure=lambda net: ms)


# choosing


def searched(text: str) -> SearchResult:
    graph = with_latency()
    net = dmcp.Supernet(traced()[0], graph, 4)
    return SearchResult(torch.full((len(graph.spaces), 3), 0.5), net.sizes, graph, parse(text, graph), 0.95)


def test_what_is_chosen_is_measured_and_inside() -> None:
    device = Device()
    _, _, outcome = choose(searched("latency:60%"), traced()[0], clock_of(table(), None, device))
    assert outcome.measured_ms is not None and outcome.measured_ms <= outcome.asked_ms and outcome.held
    assert outcome.measured_ms > 0.9 * outcome.asked_ms and not outcome.again and not outcome.trouble
    assert outcome.unpruned_ms == pytest.approx(Device()(traced()[0].eval()))


class Worse(Device):
    """Cut networks take so much longer, or less, than the table's device says."""

    def __init__(self, by: float = 1.1) -> None:
        super().__init__()
        self.by = by

    def __call__(self, net: nn.Module) -> float:
        whole = sum(it.numel() for it in net.parameters()) == sum(it.numel() for it in traced()[0].parameters())
        return super().__call__(net) * (1.0 if whole else self.by)


def test_a_network_slower_than_its_forecast_is_chosen_again_and_tighter() -> None:
    found = searched("latency:60%")
    result, widths, outcome = choose(found, traced()[0], clock_of(table(), None, Worse()))
    assert 1 <= outcome.again <= 3 and outcome.held and outcome.measured_ms is not None
    assert outcome.measured_ms == pytest.approx(1.1 * outcome.predicted_ms, rel=5e-3)
    assert outcome.measured_ms > 0.85 * outcome.asked_ms  # and not far below
    assert holds(result.budget, found.graph, widths) and result.budget.limits[0].target < found.budget.limits[0].target
    assert torch.equal(result.alphas, found.alphas)


def test_a_network_faster_than_its_forecast_is_chosen_again_and_wider() -> None:
    """Its channels would be lost for nothing."""
    found = searched("latency:60%")
    _, first, alone = choose(found, traced()[0], clock_of(table(), None, Worse(by=0.85)), tries=0)
    result, widths, outcome = choose(found, traced()[0], clock_of(table(), None, Worse(by=0.85)))
    assert alone.measured_ms and outcome.measured_ms
    assert alone.measured_ms < 0.9 * alone.asked_ms <= ENOUGH * outcome.asked_ms <= outcome.measured_ms
    assert outcome.held and 1 <= outcome.again <= 3
    assert found.graph.macs(widths) > found.graph.macs(first)
    assert holds(result.budget, found.graph, widths) and result.budget.limits[0].target > found.budget.limits[0].target


def test_a_network_that_another_limit_keeps_small_is_not_widened() -> None:
    found = searched("latency:90%,params:30%")
    _, widths, outcome = choose(found, traced()[0], clock_of(table(), None, Device()))
    assert outcome.held and not outcome.again and widths == expected(found)


def test_a_wider_network_that_is_too_slow_is_not_taken() -> None:
    """A device with a step: up to some size it is fast, beyond it slow."""
    found = searched("latency:60%")
    bound = found.graph.params(expected(found))

    class Step(Device):
        def __call__(self, net: nn.Module) -> float:
            size = sum(it.numel() for it in net.parameters())
            whole = sum(it.numel() for it in traced()[0].parameters())
            return super().__call__(net) * (1.0 if size == whole else 0.8 if size <= bound else 1.3)

    _, widths, outcome = choose(found, traced()[0], clock_of(table(), None, Step()))
    assert outcome.held and outcome.again and found.graph.params(widths) <= bound


def test_a_limit_that_is_not_kept_is_said() -> None:
    class Hopeless(Worse):
        def __call__(self, net: nn.Module) -> float:
            return max(super().__call__(net), 0.9 * Device()(traced()[0].eval()))

    _, _, outcome = choose(searched("latency:60%"), traced()[0], clock_of(table(), None, Hopeless()))
    assert not outcome.held and "more than the" in outcome.trouble and outcome.again


def test_a_busy_machine_is_no_reason_for_a_tighter_choice() -> None:
    _, _, outcome = choose(searched("latency:60%"), traced()[0], clock_of(table(), None, Device(slower=2.0)))
    assert outcome.held and not outcome.again


def test_a_table_of_another_machine_is_a_forecast_only() -> None:
    assert clock_of(replace(table(), place="cpu", device="a toaster"), None) is None
    _, _, outcome = choose(searched("latency:60%"), traced()[0], None)
    assert outcome.measured_ms is None and "not measured" in outcome.text and "forecast" in outcome.trouble


# the real machine


def test_a_wide_network_takes_longer_than_its_floor_here() -> None:
    wide = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1))
    narrow = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    whole, small = pass_times([wide, narrow], torch.zeros(1, 3, 32, 32), rounds=5)
    assert whole > 2 * small > 0


def test_passes_that_others_disturb_do_not_change_the_order_of_networks() -> None:
    draw = np.random.default_rng(0)
    quiet = [[base * (1 + 0.02 * draw.random()) for _ in range(60)] for base in (1.0, 2.0, 3.0, 4.0)]
    busy = [list(own) for own in quiet]
    busy[1] = [ms * 3 if number % 10 < 8 else ms for number, ms in enumerate(busy[1])]  # four passes of five
    assert usual(busy) == pytest.approx(usual(quiet), rel=0.02)
    assert usual(quiet) == pytest.approx([1.01, 2.02, 3.03, 4.04], rel=0.01)  # their medians
    assert usual([[2 * ms for ms in own] for own in quiet]) == pytest.approx([2 * ms for ms in usual(quiet)])


class Processor:
    """A make-believe clock: each pass takes so long, and other programs have the processor for a while."""

    def __init__(self, others: Callable[[int], float], works: bool = True) -> None:
        self.others, self.works = others, works
        self.wall = self.own = 0.0
        self.passes = 0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.own

    def get_clock_info(self, name: str) -> Any:
        return time.get_clock_info(name)

    def net(self, seconds: float) -> nn.Module:
        """A network that takes so long."""

        class Pass(nn.Module):
            def forward(module, x: Tensor) -> Tensor:  # noqa: N805
                self.passes += 1
                self.own += seconds * self.works
                self.wall += seconds * (1 + self.others(self.passes))
                return x

        return nn.Sequential(nn.Linear(1, 1), Pass())

    def times(self, monkeypatch: pytest.MonkeyPatch, threads: int = 1) -> list[float]:
        monkeypatch.setattr(measure_module, "time", self)
        with measure_module.threads(threads):
            return pass_times([self.net(0.004), self.net(0.001)], torch.zeros(1, 1))


def test_time_of_other_programs_is_not_that_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nineteen passes of twenty are disturbed, and those of one network more: its fast ones are, too."""
    busy = Processor(lambda number: 0.0 if number % 20 == 0 else 1.0 + number % 3)
    assert busy.times(monkeypatch) == pytest.approx([4.0, 1.0])
    assert Processor(lambda number: 0.0).times(monkeypatch) == pytest.approx([4.0, 1.0])


def test_waiting_counts_where_the_own_thread_is_not_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several threads, and in a network whose passes all wait for something else."""
    assert Processor(lambda number: 1.0).times(monkeypatch, threads=2) == pytest.approx([8.0, 2.0])
    assert Processor(lambda number: 1.0).times(monkeypatch) == pytest.approx([8.0, 2.0])
    assert Processor(lambda number: 0.0, works=False).times(monkeypatch) == pytest.approx([4.0, 1.0])


def test_this_machine_is_measured_and_named() -> None:
    model, graph = traced()
    found = measure_latency(model, sample(Residual.SHAPE).float(), graph, networks=12, batch=3)
    assert found.place == "cpu" and found.device and found.batch == 3 and found.torch == torch.__version__
    assert found.unpruned_ms > 0 and len(found.networks) == 12 and sum(it.held_out for it in found.networks) == 2
    assert clock_of(found, sample(Residual.SHAPE).float()) is not None
    assert {it.dtype for it in model.parameters()} == {torch.float32}


def test_what_cannot_be_measured_is_a_sentence() -> None:
    model, graph = traced()
    with pytest.raises(dmcp.DmcpError, match="cannot be measured on meta"):
        measure_latency(model, sample(Residual.SHAPE).float(), graph, device="meta")
    for wrong in ({"networks": 3}, {"batch": 0}, {"dtype": "int8"}, {"seed": -1}, {"align": 0}):
        with pytest.raises(BudgetError):
            measure_latency(model, sample(Residual.SHAPE).float(), graph, **wrong)  # type: ignore[arg-type]


def test_networks_that_are_all_equal_are_not_measured() -> None:
    model, graph = traced()
    largest = max(graph.spaces, key=lambda space: space.size)
    x, device = sample(Residual.SHAPE).float(), Device()
    with pytest.raises(WidthsError, match=f"multiples of 1000.* {re.escape(largest.name)}, .* {largest.size}.* align"):
        measure_latency(model, x, graph, measure=device, align=1000)
    for fixed in ({"floor": graph.full}, {"floor": 2, "ceiling": 2}):
        with pytest.raises(WidthsError, match=r"nothing to measure.* another floor or ceiling"):
            measure_latency(model, x, graph, measure=device, **fixed)  # type: ignore[arg-type]
    bound = "between floor and ceiling.* Use another floor or ceiling, or a smaller align"
    with pytest.raises(WidthsError, match=bound):  # multiples of 2 there are, but not from 3 on up to 4
        measure_latency(model, x, graph, measure=device, floor=3, ceiling=4, align=2)
    assert not device.calls


# prune


def prune(**options: Any) -> dmcp.PruneResult:
    model, graph = traced()
    search = replace(SEARCH, budget=options.pop("budget"))
    return dmcp.prune(model, Noise(), Noise(1), search=search, train=TRAIN, **{"graph": graph} | options)


def test_prune_measures_by_itself_and_ends_within_the_time() -> None:
    device = Device(noise=0.01)
    whole = Device()(traced()[0].eval())
    result = prune(budget=f"{0.6 * whole:.6f}ms", measure=device, baselines=True)
    assert device.calls == 40 + 2 * (1 + result.latency.again)  # type: ignore[union-attr]
    assert Device()(result.model.eval()) <= 0.6 * whole * 1.02
    told = result.latency
    assert told is not None and told.held and told.asked_ms == pytest.approx(0.6 * whole, rel=1e-5)
    assert told.predicted_ms == pytest.approx(result.graph.latency_fs(result.widths) / FS_PER_MS)
    assert told.unpruned_ms == pytest.approx(whole, rel=0.05)
    for word in ("asked", "predicted", "measured", "the unpruned network takes"):
        assert word in result.table


def test_what_prune_measures_is_an_event_before_the_search(tmp_path: Path) -> None:
    events: list[dmcp.pruning.Event] = []
    result = prune(budget="latency:60%", measure=Device(), on_event=events.append)
    assert [it.stage for it in events].index("search") == 1
    assert events[0].stage == "latency" and events[0].steps == 40 and events[0].record == result.graph.latency
    Run(tmp_path).on_event(events[0])
    assert scalars(events[0]) == {} and Latency.load(tmp_path / "latency.json") == result.graph.latency
    events.clear()
    prune(budget="latency:60%", latency=table(), measure=Device(), on_event=events.append)
    assert "latency" not in {it.stage for it in events}


def test_prune_takes_a_table_or_a_graph_that_has_one() -> None:
    device = Device()
    for options in ({"latency": table()}, {"graph": with_latency()}):
        device.calls = 0
        result = prune(budget="latency:60%,params:80%", measure=device, **options)
        assert device.calls == 2 and result.latency is not None and result.latency.held
    with pytest.warns(LatencyWarning, match="is a forecast"):
        assert prune(budget="latency:60%", latency=table()).latency.measured_ms is None  # type: ignore[union-attr]


def test_prune_refuses_what_cannot_be_before_it_measures() -> None:
    device = Device()
    for budget, words in (
        ("latency:8", "like 8ms"),
        ("8ms,params:many", "cannot be read"),
        ("0ms", "no time"),
        ("latency:0%", "no time"),
        ("1e12s", "no time"),
        ("latency:101%", "more than the unpruned"),
        ("8ms,latency:50%", "twice"),
        ("8ms,params:1", "less than the floor costs"),
        ("8ms,200%", "more than the network has"),
        (f"8ms,{'9' * 100}", "characters"),
    ):
        with pytest.raises(BudgetError, match=words):
            prune(budget=budget, measure=device)
    with pytest.raises(BudgetError, match="measure is for budgets of latency"):
        prune(budget="50%", measure=device)
    assert not device.calls
    with pytest.raises(BudgetError, match="less than the floor takes"):
        prune(budget="1us", measure=device)


def test_a_limit_above_its_reach_is_warned_of() -> None:
    class Stuck(Worse):
        def __call__(self, net: nn.Module) -> float:
            return max(super().__call__(net), 0.9 * Device()(traced()[0].eval()))

    with pytest.warns(LatencyWarning, match="more than the"):
        prune(budget="latency:60%", latency=table(), measure=Stuck())


def test_an_interrupted_job_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    def keep(stage: str) -> dmcp.Checkpointer:
        return dmcp.Checkpointer(tmp_path / stage)

    first = prune(budget="latency:60%", measure=Device(noise=0.05), keep=keep)
    device = Device(noise=0.05, slower=3.0)  # another machine: what was measured counts
    again = prune(budget="latency:60%", measure=device, keep=keep)
    assert not device.calls and again.latency == first.latency and again.widths == first.widths
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(FileError, match="latency was"):
        prune(budget="latency:60%", latency=table(), measure=device, keep=keep)


# the command line

SHORT = ["--model", "digits:resnet", "--data", "digits", "--batch", "708", "--device", "cpu", "--quiet"]
FEW = ["--search-epochs", "2", "--epochs", "1"]


@functools.cache
def digits_table(folder: Path) -> Path:
    """A table of the network of digits, by a make-believe device that is said to be this one."""
    model = build("digits:resnet")
    shape = (1, 8, 8)
    found = measure_latency(model, torch.zeros(2, *shape), measure=Device(shape=shape), networks=24)
    found = replace(found, place="cpu", device=device_name("cpu"))
    found.save(folder / "table.json")
    return folder / "table.json"


@pytest.fixture(scope="module")
def table_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_table(tmp_path_factory.mktemp("table"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Device:
    """This machine is the make-believe device."""
    device = Device(shape=(1, 8, 8))
    monkeypatch.setattr(measure_module, "pass_times", lambda nets, example: [device(net) for net in nets])
    return device


def test_a_run_measures_keeps_its_table_and_reports(capsys: Capture, tmp_path: Path, fake: Device) -> None:
    folder = tmp_path / "run"
    options = [*SHORT, *FEW, "--budget", "latency:60%", "--out", str(folder), "--json"]
    code, out, err = run(capsys, "prune", *options)
    assert code == 0, err
    facts = json.loads(out)
    assert fake.calls == 42 and "Measured 40 networks in" in err and "the unpruned network takes" in err
    told = facts["latency"]
    assert told["measured_ms"] <= told["asked_ms"] and facts["latency_ms"] == pytest.approx(told["predicted_ms"])
    assert facts["latency_share"] <= 0.6
    assert Latency.load(folder / "latency.json").batch == 1
    assert "asked" in (folder / "report.md").read_text()
    page = make_page([read_run(folder)])
    assert "Latency</dt>" in page and "predicted" in page
    code, out, err = run(capsys, "sample", str(folder), "--budget", "latency:50%", "--json")
    assert code == 0 and json.loads(out)[0]["latency_share"] <= 0.5


def test_a_given_table_is_not_measured_again(capsys: Capture, tmp_path: Path, fake: Device, table_file: Path) -> None:
    given = ["--budget", "latency:60%,params:70%", "--latency", str(table_file), "--out", str(tmp_path / "run")]
    code, out, err = run(capsys, "search", *SHORT, "--search-epochs", "2", *given)
    assert code == 0 and fake.calls == 2, err
    assert "asked" in out and "measured" in out
    assert Latency.load(tmp_path / "run" / "latency.json") == Latency.load(table_file)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_its_table_and_its_choice(
    capsys: Capture, tmp_path: Path, fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ["--budget", "latency:60%", "--save-steps", "1"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert run(capsys, "prune", *SHORT, *FEW, *budget, "--out", str(straight))[0] == 0

    def stop(*_: Any, **__: Any) -> None:
        raise dmcp.StoppedError("Stopped.")

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "train_all", stop)
        assert run(capsys, "prune", *SHORT, *FEW, *budget, "--out", str(stopped))[0] == 3
    fake.calls, fake.slower = 0, 5.0
    code, _, err = run(capsys, "prune", "--resume", str(stopped), "--quiet")
    assert code == 0 and not fake.calls, err
    for name in ("model.safetensors", "widths.json", "outcome.json", "log.jsonl"):
        assert (stopped / name).read_bytes() == (straight / name).read_bytes()


def test_wrong_tables_and_times_are_a_sentence(
    capsys: Capture, tmp_path: Path, fake: Device, table_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--latency", str(table_file)]
    for options, words in (
        ([*given, "--budget", "1us"], "less than the floor takes: choose from"),
        ([*given, "--budget", "9s"], "more than the unpruned network takes: choose from"),
        ([*given, "--budget", "8ms", "--ignore", "layer1"], "other layers kept whole"),
        ([*given, "--budget", "8ms", "--model-args", "width=8"], "of another architecture"),
        (["--budget", "8ms", "--latency-device", "tpu9"], "--latency-device"),
        (["--budget", "50%", "--latency-batch", "8"], "for budgets of latency"),
        ([*given, "--budget", "8ms", "--latency-batch", "8"], "the table is of batch 1, not 8"),
        ([*given, "--budget", "8ms", "--latency-device", "cuda"], "the table is of cpu, not cuda"),
        (["--budget", "8ms", "--latency", str(tmp_path / "none.json")], "No such file"),
    ):
        code, out, err = run(capsys, "prune", *SHORT, *FEW, *options)
        assert (code, out) == (2, "") and words in err, err
    assert list(tmp_path.iterdir()) == [] and not fake.calls
    code, _, err = run(capsys, "compare", *SHORT[:4], "--budget", "8ms", "--methods", "uniform", "--out", "table")
    assert code == 2 and "is a latency" in err


@pytest.mark.slow
def test_a_dry_run_says_the_range(capsys: Capture, fake: Device, table_file: Path) -> None:
    options = [*SHORT, *FEW, "--budget", "latency:60%", "--latency", str(table_file), "--dry-run"]
    code, out, err = run(capsys, "prune", *options)
    assert code == 0 and re.search(r"asked for: at most [\d.]+ ms", out), err
    assert re.search(r"reachable: from .* params \(.*\), \d+ us \(", out)


def test_the_command_latency_prints_and_writes_a_table(capsys: Capture, tmp_path: Path, fake: Device) -> None:
    path = tmp_path / "table.json"
    options = ["latency", "--model", "digits:resnet", "--device", "cpu", "--networks", "20"]
    code, out, err = run(capsys, *options, "--out", str(path))
    assert code == 0 and "unpruned" in out and out.count("held out") == 3 and "(median)" in out, err
    assert Latency.load(path).networks[0].ms == pytest.approx(Device(shape=(1, 8, 8))(build("digits:resnet").eval()))
    code, out, _ = run(capsys, *options, "--json")
    assert Latency.from_json(json.loads(out)).spaces == Latency.load(path).spaces
    for wrong, words in (
        (["--networks", "3"], "at least 12"),
        (["--dtype", "int8"], "dtype of a latency"),
        (["--seed", "-1"], "seed of a latency"),
        (["--out", str(tmp_path)], "is a folder"),
        (["--out", str(path / "table.json")], "there is no folder"),
        (["--out", str(tmp_path / "none" / "table.json")], "there is no folder"),
        (["--out", "/proc/table.json"], "--out: /proc/table.json: cannot be written"),
    ):
        fake.calls = 0
        code, _, err = run(capsys, *options, *wrong)
        assert code == 2 and words in err and not fake.calls, err
    assert list(tmp_path.iterdir()) == [path]


def test_a_taken_folder_is_refused_before_anything_is_measured(capsys: Capture, tmp_path: Path, fake: Device) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    options = [*SHORT, *FEW, "--budget", "latency:60%", "--out", str(tmp_path)]
    code, _, err = run(capsys, "prune", *options)
    assert code == 2 and "already holds files" in err and not fake.calls, err
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "mine.txt").write_text("mine")
    code, _, err = run(capsys, "prune", *options, "--seeds", "2")
    assert code == 2 and "already holds runs" in err and not fake.calls, err
    assert sorted(it.name for it in tmp_path.iterdir()) == ["mine.txt", "seed-0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["prune", "latency"])
def test_measuring_is_stopped_at_once(
    command: str, number: int, capsys: Capture, tmp_path: Path, fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to save, and nothing to go on with."""
    monkeypatch.chdir(tmp_path)
    before = {it: signal.signal(it, signal.default_int_handler) for it in (signal.SIGINT, signal.SIGTERM)}

    def measure(nets: Sequence[nn.Module], example: Any) -> list[float]:
        os.kill(os.getpid(), number)
        return [fake(net) for net in nets]

    monkeypatch.setattr(measure_module, "pass_times", measure)
    options = [*SHORT, *FEW, "--budget", "latency:60%"] if command == "prune" else SHORT[:2]
    try:
        code, out, err = run(capsys, command, *options, "--out", str(tmp_path / "out"))
    finally:
        for it, handler in before.items():
            signal.signal(it, handler)
    assert (code, out) == (3, "") and "Stopped while networks were measured" in err, err
    assert "--resume" not in err and list(tmp_path.iterdir()) == []


def test_a_busy_machine_is_warned_of(capsys: Capture, tmp_path: Path, fake: Device) -> None:
    fake.noise = 0.8
    fake.__class__ = type("Busy", (Device,), {"__call__": lambda self, net: abs(Device.__call__(self, net)) + 0.01})
    code, out, err = run(capsys, "latency", "--model", "digits:resnet", "--device", "cpu")
    assert code == 0 and "the machine was busy" in out, err


@pytest.mark.slow
def test_several_seeds_share_one_table(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "seeds"
    options = [*SHORT, *FEW, "--budget", "latency:95%", "--seeds", "2", "--out", str(folder), "--json"]
    code, out, err = run(capsys, "prune", *options)
    assert code == 0 and err.count("Measuring the latency") == 1, err
    shared = Latency.load(folder / "latency.json")
    assert all(Latency.load(folder / f"seed-{seed}" / "latency.json") == shared for seed in (0, 1))
    told = json.loads((folder / "summary.json").read_text())["latency"]
    assert len(told) == 2 and told == json.loads(out)["latency"] and "asked" in (folder / "summary.md").read_text()
    assert run(capsys, "prune", *options)[0] == 0  # nothing is left to do, or to measure
    assert Latency.load(folder / "latency.json") == shared
