"""Bad input of the functions gets its own kind of error, in one line; the user's model is untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Chain, Residual, mystery, sample
from torch import Tensor, nn

import dmcp
from dmcp.errors import DataError, DmcpError, TraceError, WidthsError

X = sample(Chain.SHAPE, batch=2).float()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Chain(**Chain.FULL)


@pytest.fixture(scope="module")
def graph(model: nn.Module) -> Any:
    return dmcp.trace(model, X)


def refuse(kind: type[DmcpError], call: Callable[[], object], *words: str, lines: int = 1) -> None:
    """Expect this very kind of error, in so many lines at most, with these words in it."""
    with pytest.raises(DmcpError) as caught:
        call()
    text = str(caught.value)
    assert caught.type is kind and len(text.splitlines()) <= lines, text
    assert [word for word in words if word not in text] == [], text


def spaces(graph: Any) -> dict[str, int]:
    return {space.name: space.size for space in graph.spaces}


# the model and its example


class Failing(nn.Module):
    """Fails in its forward, or gives no tensor."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.conv, self.error = nn.Conv2d(3, 8, 3), error

    def forward(self, x: Tensor) -> str:
        if self.error:
            raise self.error
        return "nothing"


class Secret(nn.Module):
    """An op without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return mystery(x)


CHAIN = Chain(**Chain.FULL)
UNTRACEABLE: list[tuple[Any, Any, tuple[str, ...]]] = [
    (CHAIN, torch.randn(2, 4, 11, 11), ("forward", "channels")),
    (CHAIN, torch.randn(2, 3, 17, 17), ("forward",)),  # the linear after the flatten does not fit
    (CHAIN, (X, X), ("forward",)),
    (CHAIN, torch.zeros(2, 32, 32), ("forward",)),
    (CHAIN, torch.zeros(2, 3, 4, 9, 9), ("forward",)),
    *((CHAIN, wrong, ("example",)) for wrong in (None, "3x11x11", [1, 2], {}, ())),
    (nn.Linear(4, 2), torch.randn(2, 4), ("prun",)),
    (nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 4), ("prun",)),
    (nn.Identity(), torch.randn(2, 4), ("prun",)),
    (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)), torch.zeros(3, 32, 32), ("batch dim",)),
    (Failing(None), X, ()),
    (lambda x: x, X, ("nn.Module",)),
]


@pytest.mark.parametrize(("net", "example", "words"), UNTRACEABLE, ids=range(len(UNTRACEABLE)))
def test_networks_and_examples_that_cannot_be_traced(net: Any, example: Any, words: tuple[str, ...]) -> None:
    refuse(TraceError, lambda: dmcp.trace(net, example), *words)


@pytest.mark.filterwarnings("ignore")
def test_a_script_module_and_names_in_ignore(model: nn.Module) -> None:
    script = torch.jit.trace(copy.deepcopy(model).eval(), X)
    refuse(TraceError, lambda: dmcp.trace(script, X), "TorchScript")
    refuse(TraceError, lambda: dmcp.trace(model, X, ignore=["head", "cnv1"]), "ignore", "cnv1", "conv1")
    refuse(TraceError, lambda: dmcp.trace(model, X, ignore=["conv1", "conv2", "conv3"]), "prun")
    net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.Conv2d(8, 2, 1))  # makes images itself
    assert spaces(dmcp.trace(net, torch.zeros(2, 64))) == {"1": 8}


def test_strict_names_the_op_and_two_ways_out_that_work() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Secret(), nn.Conv2d(8, 5, 1))
    net = nn.Sequential(inner, nn.Conv2d(5, 7, 1), nn.ReLU(), nn.Conv2d(7, 4, 1))
    words = ("0.2", "mystery", "rules=RULES |", "ignore=")
    refuse(TraceError, lambda: dmcp.trace(net, X, strict=True), *words, lines=2)
    rules = dmcp.RULES | {torch.ops.dmcp_tests.mystery.default: lambda call: [call.x.dims]}
    assert "0.0" in spaces(dmcp.trace(net, X, rules=rules, strict=True))
    assert set(spaces(dmcp.trace(net, X, ignore=["0"], strict=True))) == {"1"}


# widths


def test_widths_and_channels_that_do_not_fit(model: nn.Module, graph: Any) -> None:
    before = copy.deepcopy(model.state_dict())
    wrong: list[Any] = [{"conv1": it} for it in (0, -3, 8, 3.0, "3", True, None)]
    wrong += [{"conv11": 3}, {"head": 3}, [1, 1], [1, 1, 1, 1], [1, 1, 0], [1, 1, 7], [1.0, 1.0, 1.0]]
    for widths in (*wrong, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([[1, 1, 1]])):
        refuse(WidthsError, lambda widths=widths: graph.widths(widths))  # type: ignore[misc]
    channels: list[Any] = [[], [0, 7], [-1], [2, 2], [0.5], [[0, 1]], 0, 8, 2.5]
    for it in channels:
        refuse(WidthsError, lambda it=it: dmcp.cut(model, graph, {"conv1": it}), "conv1")  # type: ignore[misc]
    for table in (torch.ones(4, 2), torch.ones(4, 4, dtype=torch.int64), torch.ones(1, 1, 3)):
        refuse(WidthsError, lambda table=table: graph.macs(table), "3")  # type: ignore[misc]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("other", [Residual(**Residual.FULL), Chain(8, 9, 6)], ids=["other class", "other sizes"])
def test_widths_of_another_architecture(model: nn.Module, graph: Any, other: nn.Module) -> None:
    widths = dmcp.trace(other, X if isinstance(other, Chain) else sample(Residual.SHAPE, batch=2).float()).full
    calls: list[Callable[[Any], object]] = [graph.macs, graph.params, graph.layers, dmcp.Supernet(model, graph).hard]
    for call in (*calls, lambda it: dmcp.cut(model, graph, it)):
        refuse(WidthsError, lambda call=call: call(widths), "another architecture")  # type: ignore[misc]
    refuse(WidthsError, lambda: dmcp.cut(other, graph, {"conv1": 2}), "another architecture")
    refuse(WidthsError, lambda: dmcp.Supernet(other, graph), "another architecture")
    again = Chain(**Chain.FULL)  # with other weights
    small: Any = dmcp.cut(again, graph, dmcp.trace(again, X).widths({"conv1": 2}))
    assert torch.equal(small.conv1.weight, again.conv1.weight[:2])


# dtypes


class Looking(nn.Sequential):
    """Its way depends on its input, so that it cannot be traced without values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def small(dtype: torch.dtype, base: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    return base(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).to(dtype)


FLOATS = [torch.float32, torch.float64]


@pytest.mark.parametrize(("own", "given"), [(FLOATS[0], torch.uint8), (FLOATS[1], FLOATS[0]), (FLOATS[0], FLOATS[1])])
def test_another_dtype_than_that_of_the_weights_is_named(own: torch.dtype, given: torch.dtype) -> None:
    names = [str(it).removeprefix("torch.") for it in (given, own)]
    refuse(TraceError, lambda: dmcp.trace(small(own, Looking), torch.ones(2, 1, 8, 8).to(given)), *names)
    batches = [(torch.ones(2, 1, 8, 8).to(given), torch.zeros(2, dtype=torch.int64))]
    refuse(DataError, lambda: dmcp.prune(small(own), batches, batches), *names)
    refuse(TraceError, lambda: dmcp.trace(small(own), torch.ones(2, 3, 8, 8).to(own)), "its own forward")
