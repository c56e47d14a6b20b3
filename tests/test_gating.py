"""Numbers, masks and paddings that could let a channel that is off be read: kept whole, or exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp


class Net(nn.Module):
    """Three convs and a norm, put together by a function."""

    def __init__(self, together: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.square = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.b, self.c = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1)
        self.shift = nn.Parameter(torch.randn(1, 1, 1, 1))
        self.dim = 16
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        return self.together(self, x)


def divided_by_its_width(net: Net, x: Tensor) -> Tensor:
    y = net.a(x).relu()
    return net.b(y / y.shape[1])


def times_a_filled_tensor(net: Net, x: Tensor) -> Tensor:
    y = net.a(x).relu()
    return net.b(y * torch.full((), y.shape[1]))


def times_a_tensor_made_of_its_width(net: Net, x: Tensor) -> Tensor:
    y = net.a(x).relu()
    return net.b(y * torch.tensor(y.shape[1] ** -0.5, dtype=y.dtype))


def divided_by_an_attribute(net: Net, x: Tensor) -> Tensor:
    y = net.a(x).relu()
    return net.b(y.view(len(y), net.dim, *y.shape[2:]) / net.dim)


def chosen_by_a_mask(net: Net, x: Tensor) -> Tensor:
    return torch.where(x[:, :1] > 0, net.a(x), net.shift).sum(1)


def padded_with_ones(net: Net, x: Tensor) -> Tensor:
    return F.pad(net.a(x), (1, 1, 1, 1), value=1.0).sum(1)


def rolled_as_one(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(x).roll(1))


def written_in_place_after_a_copy(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    s = y.sigmoid()
    z = s.clone()
    z.mul_(y)
    return (s + z).sum(1)


WHOLE = [
    divided_by_its_width,
    times_a_filled_tensor,
    times_a_tensor_made_of_its_width,
    divided_by_an_attribute,
    chosen_by_a_mask,
    padded_with_ones,
    rolled_as_one,
    written_in_place_after_a_copy,
]


@pytest.mark.parametrize("together", WHOLE, ids=lambda f: f.__name__)
def test_kept_whole(together: Callable[[Net, Tensor], Tensor]) -> None:
    with pytest.raises(dmcp.TraceError, match="Nothing"):
        dmcp.trace(Net(together), torch.randn(2, 3, 8, 8))


def read_after_a_square_conv(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.a(x)).relu()
    return net.b(net.square(y)) + net.c(net.square(y) + y)


def summed_without_a_weight(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.a(x)).relu().sum(1)


@pytest.mark.parametrize("together", [read_after_a_square_conv, summed_without_a_weight], ids=lambda f: f.__name__)
def test_exact_with_hard_and_with_soft_gates(together: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(together).double().eval()
    nn.init.normal_(model.norm.bias)
    nn.init.normal_(model.norm.running_mean)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    graph = dmcp.trace(model, x)
    net = dmcp.Supernet(model, graph)
    gates = net.hard(graph.widths({"a": 5}))
    small = dmcp.cut(model, graph, {"a": 5})
    with torch.no_grad():
        assert float((small(x) - model(x)).abs().max()) > 1e-3  # cutting changes something
        assert torch.allclose(net(x, gates), small(x), atol=1e-12)
        assert torch.allclose(net(x, gates.double()), small(x), atol=1e-12)


def an_outer_product(net: Net, x: Tensor) -> Tensor:
    y = net.a(x).mean((2, 3))
    return (y[:, :, None] * y.sigmoid()[:, None, :]).sum(2).sum(1)


def a_view_taken_before_a_write(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    view = y.flatten(2)
    y.add_(1)
    return view.sum(1)


def whole_numbers_added(net: Net, x: Tensor) -> Tensor:
    return (net.a(x).relu() + torch.ones(1, 1, 1, 1, dtype=torch.int64)).sum(1)


@pytest.mark.parametrize(
    "together", [an_outer_product, a_view_taken_before_a_write, whole_numbers_added], ids=lambda f: f.__name__
)
def test_whole_or_exact(together: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Net(together).double().eval(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    try:
        graph = dmcp.trace(model, x)
    except dmcp.TraceError:
        return  # kept whole is right, too
    assert dmcp.verify(model, graph, x) < 1e-12


class Caching(nn.Module):
    """Keeps an activation with its history, and a table made of its weight, as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.seen: Tensor | None = None
        self.table: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if str(x.device) not in self.table:
            self.table[str(x.device)] = self.a.weight.sum((1, 2, 3))[:, None, None]
        self.seen = self.a(x) + self.table[str(x.device)]
        return self.b(self.seen)


def test_what_a_model_cached_is_not_cut_along() -> None:
    model, x = Caching().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model(x)  # fills both
    graph = dmcp.trace(model, x)
    small = dmcp.cut(model, graph, {space.name: 3 for space in graph.spaces})
    assert small.table == {}
    assert small(x).shape == (2, 4, 8, 8)


def test_a_tied_parameter_is_frozen_by_either_name() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1, bias=False), nn.Conv2d(6, 6, 1, bias=False), nn.Conv2d(6, 2, 1)
    )
    model[2].weight = model[1].weight
    x = torch.randn(2, 3, 4, 4)
    assert dmcp.trace(model, x).spaces
    with pytest.raises(dmcp.TraceError, match="ignored, as you asked"):
        dmcp.trace(model, x, ignore=["2"])
