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
