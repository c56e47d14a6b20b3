"""How much faster a pruned network is, and the causes that are found if it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from commands import needs_onnx
from nets import counted_macs
from short_runs import prune, pruned_residual, traced_residual
from torch import nn

import dmcp
from dmcp import models
from dmcp.budgets import Budget, Limit
from dmcp.speed import Cause, Facts, Speed, facts_of, find_causes, measure_speeds, speed_notes

BY_MACS = Budget((Limit("macs", 100),), "50%")
BY_TIME = Budget((Limit("latency", 100),), "8ms")
SLOW = Speed(where="here", unpruned_ms=10.0, pruned_ms=10.0, launch_us=50.0)
FAST = replace(SLOW, where="there", pruned_ms=5.0)
FACTS = Facts(macs_share=0.5, traffic_share=0.5, layers=20, spaces=10, odd_spaces=0, narrow_spaces=0)


@pytest.mark.parametrize(
    ("speed", "facts", "causes"),
    [
        (SLOW, FACTS, []),
        (SLOW, replace(FACTS, layers=400), [Cause.LAUNCHES]),  # 25 us a layer
        (replace(SLOW, launch_us=10.0), replace(FACTS, layers=400), []),
        (SLOW, replace(FACTS, odd_spaces=1), [Cause.NARROW]),
        (SLOW, replace(FACTS, traffic_share=0.8), [Cause.MEMORY]),
        (SLOW, replace(FACTS, traffic_share=0.55), []),
        (SLOW, replace(FACTS, layers=400, odd_spaces=3, traffic_share=0.9), list(Cause)),
    ],
)
def test_causes_follow_from_facts(speed: Speed, facts: Facts, causes: list[Cause]) -> None:
    assert sorted(find_causes(speed, facts)) == sorted(causes)


def test_multiples_are_no_advice_where_they_would_leave_nothing_to_cut() -> None:
    """A space of 16 channels has only one width that is a multiple of 16."""
    some_are_wide = find_causes(SLOW, replace(FACTS, odd_spaces=3, narrow_spaces=2))
    all_are_narrow = find_causes(SLOW, replace(FACTS, odd_spaces=3, narrow_spaces=3))
    assert "--align 16" in some_are_wide[Cause.NARROW] and "--align" not in all_are_narrow[Cause.NARROW]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3))
    graph = dmcp.trace(model, torch.zeros(1, 3, 12, 12))
    facts = facts_of(graph, graph.widths([9, 9]))
    assert (facts.odd_spaces, facts.narrow_spaces) == (2, 1)


def test_a_faster_network_needs_no_reason() -> None:
    odd = replace(FACTS, odd_spaces=4)
    assert len(speed_notes([FAST], odd, BY_MACS)) == 1 and "2.00" in speed_notes([FAST], odd, BY_MACS)[0]
    slow = speed_notes([FAST, SLOW], odd, BY_MACS)
    assert len(slow) == 3 and "1.00" in slow[0] and "latency:60%" in slow[2]
    assert len(speed_notes([SLOW], odd, BY_TIME)) == 2  # a budget of time is there already
    assert len(speed_notes([SLOW], FACTS, BY_TIME)) == 2 and not speed_notes([], odd, BY_MACS)


def test_facts_are_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 12, 3), nn.ReLU(), nn.Conv2d(12, 4, 3))
    example = torch.zeros(1, 3, 12, 12)
    graph = dmcp.trace(model, example)
    first, second = (space.name for space in graph.spaces)
    assert facts_of(graph, graph.full) == Facts(
        macs_share=1, traffic_share=1, layers=3, spaces=2, odd_spaces=0, narrow_spaces=0
    )
    widths = graph.widths({first: 9, second: 5})  # 12 channels were no whole blocks before
    facts = facts_of(graph, widths)
    assert facts.odd_spaces == 1 and facts.layers == 3
    assert facts.macs_share == counted_macs(dmcp.cut(model, graph, widths), example) / counted_macs(model, example)
    assert facts_of(graph, graph.widths({first: 16, second: 5})).odd_spaces == 0


@needs_onnx
def test_a_much_smaller_network_is_measured_as_faster() -> None:
    torch.manual_seed(0)
    model = models.build("cifar:resnet20")
    example = torch.zeros(2, 3, 32, 32)
    graph = dmcp.trace(model, example)
    small = dmcp.cut(model, graph, dmcp.uniform(graph, "15%"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    in_torch, in_onnx = measure_speeds(model, small, graph, example, torch_ms=(4.0, 2.0), latency=None)
    assert in_torch.factor == 2.0 and in_onnx.factor > 1.5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_result_says_how_fast_it_is() -> None:
    result, _ = pruned_residual()
    unpruned = next(row for row in result.rows if row.name == "unpruned")
    assert result.speeds[0].unpruned_ms == unpruned.ms and result.speeds[0].pruned_ms == result.rows[-1].ms
    assert result.speeds[0].text in result.table
    without = prune()  # no row of the unpruned network
    assert without.speeds[0].unpruned_ms > 0


@pytest.mark.usefixtures("few_steps")
def test_with_a_limit_on_latency_its_own_measurement_counts() -> None:
    model, _ = traced_residual()
    count = lambda net: sum(parameter.numel() for parameter in net.parameters()) / 1000  # noqa: E731
    result = prune(model=model, budget="latency:60%", search=None, latency=count)
    assert result.latency is not None
    (speed,) = result.speeds
    assert speed.factor == pytest.approx(count(model) / count(result.model), rel=1e-6)
    assert Cause.LAUNCHES not in find_causes(speed, replace(FACTS, layers=10**6))
    outcome = replace(result.latency, measured_ms=None)
    example = torch.zeros(1, *result.graph.input_shape)
    assert not measure_speeds(model, model, result.graph, example, torch_ms=(1, 1), latency=outcome)
