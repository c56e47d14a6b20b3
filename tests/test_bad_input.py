"""Bad input of the functions gets its own kind of error, in one line; the user's model is untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Chain, Residual, Toy, mystery, sample, sizes
from torch import nn

import dmcp
from dmcp.errors import DmcpError, TraceError, WidthsError

X = sample(Chain.SHAPE, batch=2).float()
CHAIN = Chain(**Chain.FULL)


def refuse(kind: type[DmcpError], call: Callable[[], object], *words: str, lines: int = 1) -> None:
    """Expect this very kind of error, in so many lines at most, with these words in it."""
    with pytest.raises(DmcpError) as caught:
        call()
    text = str(caught.value)
    assert caught.type is kind and len(text.splitlines()) <= lines, text
    assert [word for word in words if word not in text] == [], text


UNTRACEABLE: list[tuple[Any, Any]] = [
    (CHAIN, torch.randn(2, 4, 11, 11)),
    (CHAIN, torch.randn(2, 3, 17, 17)),  # the linear after the flatten does not fit
    (CHAIN, (X, X)),
    (CHAIN, torch.zeros(2, 3, 4, 9, 9)),
    (CHAIN, X.to_sparse()),
    (CHAIN, torch.nested.nested_tensor([*X], layout=torch.jagged)),
    (nn.Sequential(CHAIN, nn.ParameterList([nn.Parameter(torch.eye(2).to_sparse())])), X),
    (Toy(lambda m, x: iter([m.a(x)]), a=nn.Conv2d(3, 8, 3)), X),  # can be read once
    *((CHAIN, wrong) for wrong in (None, "3x11x11", [1, 2], {}, ())),
    (nn.Linear(4, 2), torch.randn(2, 4)),
    (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)), torch.zeros(3, 32, 32)),
    (Toy(lambda m, x: "nothing", a=nn.Conv2d(3, 8, 3)), X),
]


@pytest.mark.parametrize(("net", "example"), UNTRACEABLE, ids=range(len(UNTRACEABLE)))
def test_networks_and_examples_that_cannot_be_traced(net: Any, example: Any) -> None:
    refuse(TraceError, lambda: dmcp.trace(net, example))


@pytest.mark.filterwarnings("ignore")
def test_a_script_module_and_names_in_ignore() -> None:
    script = torch.jit.trace(copy.deepcopy(CHAIN).eval(), X)
    for net in (script, nn.Sequential(nn.ReLU(), script)):
        refuse(TraceError, lambda net=net: dmcp.trace(net, X), "TorchScript")
    refuse(TraceError, lambda: dmcp.trace(CHAIN, X, ignore=["head", "cnv1"]), "ignore", "cnv1", "conv1")
    refuse(TraceError, lambda: dmcp.trace(CHAIN, X, ignore=["conv1", "conv2", "conv3"]), "prun")


def test_strict_names_the_op_and_two_ways_out_that_work() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Toy(lambda m, x: mystery(x)), nn.Conv2d(8, 5, 1))
    net = nn.Sequential(inner, nn.Conv2d(5, 7, 1), nn.ReLU(), nn.Conv2d(7, 4, 1))
    words = ("0.2", "mystery", "rules=RULES |", "ignore=")
    refuse(TraceError, lambda: dmcp.trace(net, X, strict=True), *words, lines=2)
    rules = dmcp.RULES | {torch.ops.dmcp_tests.mystery.default: lambda call: [call.x.dims]}
    assert "0.0" in sizes(dmcp.trace(net, X, rules=rules, strict=True))
    assert set(sizes(dmcp.trace(net, X, ignore=["0"], strict=True))) == {"1"}


def test_widths_and_channels_that_do_not_fit() -> None:
    graph, before = dmcp.trace(CHAIN, X), copy.deepcopy(CHAIN.state_dict())
    wrong: list[Any] = [{"conv1": it} for it in (0, -3, 8, 3.0, "3", True, None)]
    for widths in (*wrong, {"conv11": 3}, {"head": 3}, [1, 1], [1, 1, 0], [1, 1, 7], [1.0, 1.0, 1.0]):
        refuse(WidthsError, lambda widths=widths: graph.widths(widths))  # type: ignore[misc]
    channels: list[Any] = [[], [0, 7], [-1], [2, 2], [0.5], [[0, 1]], 0, 8, 2.5]
    for it in channels:
        refuse(WidthsError, lambda it=it: dmcp.cut(CHAIN, graph, {"conv1": it}), "conv1")  # type: ignore[misc]
    for table in (torch.ones(4, 2), torch.ones(4, 4, dtype=torch.int64), torch.ones(1, 1, 3)):
        refuse(WidthsError, lambda table=table: graph.macs(table), "3")  # type: ignore[misc]
    net = dmcp.Supernet(CHAIN, graph)
    for row in ([0, 1, 1], [1, 1, 7], [1, 1, float("nan")]):
        refuse(WidthsError, lambda row=row: graph.macs(torch.tensor([row])))  # type: ignore[misc]
        refuse(WidthsError, lambda row=row: net.hard(torch.tensor(row)))  # type: ignore[misc]
    tied = dmcp.trace(Residual(**Residual.FULL).double(), sample(Residual.SHAPE))
    refuse(WidthsError, lambda: tied.widths({"conv2": 3}), "tied to stem.")
    assert all(torch.equal(value, before[name]) for name, value in CHAIN.state_dict().items())


@pytest.mark.parametrize("other", [Residual(**Residual.FULL), Chain(8, 9, 6)], ids=["other class", "other sizes"])
def test_widths_of_another_architecture(other: nn.Module) -> None:
    graph = dmcp.trace(CHAIN, X)
    widths = dmcp.trace(other, X if isinstance(other, Chain) else sample(Residual.SHAPE, batch=2).float()).full
    calls: list[Callable[[Any], object]] = [graph.macs, graph.params, graph.layers, dmcp.Supernet(CHAIN, graph).hard]
    for call in (*calls, lambda it: dmcp.cut(CHAIN, graph, it)):
        refuse(WidthsError, lambda call=call: call(widths), "another architecture")  # type: ignore[misc]
    refuse(WidthsError, lambda: dmcp.cut(other, graph, {"conv1": 2}), "another architecture")
    refuse(WidthsError, lambda: dmcp.Supernet(other, graph), "another architecture")
