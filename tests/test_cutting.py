"""cut, verify, reinitialize and padding; that the cut network computes the right thing is in test_invariants.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Residual, Toy, randomise, same, state
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.cutting import padded
from dmcp.models import build


class Odd(nn.Module):
    """Tensors that are neither in a conv nor in a norm, and a width hidden in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 6, 1)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))
        self.register_buffer("shift", torch.rand(6, 1, 1), persistent=False)
        self.head = nn.Linear(6 * 16, 5)
        self.channels = 6

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(F.relu(self.norm(self.stem(x)))) * self.scale + self.shift
        x = F.adaptive_avg_pool2d(x, 4).view(len(x), self.channels, 16)
        return self.head(x.flatten(1))


@pytest.mark.parametrize("by", ["l1", "l2"])
def test_a_trained_model_keeps_its_largest_filters(by: str) -> None:
    """Channels whose filters are zero are dropped, wherever they are: the cut network computes the same."""
    torch.manual_seed(0)
    model = Odd().eval()
    with torch.no_grad():
        for number in (0, 3, 5):
            for tensor in (model.stem.weight, model.stem.bias):
                tensor[number] = 0.0
    graph = dmcp.trace(model, torch.zeros(2, 3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    small = dmcp.cut(model, graph, {"stem": 5}, by=by)
    assert small.stem.out_channels == 5
    torch.testing.assert_close(small(x), model(x))
    assert not torch.allclose(dmcp.cut(model, graph, {"stem": 5})(x), model(x))


def hidden_weight() -> nn.Module:
    """Reads its registered parameter from a plain list, where gates cannot be folded in."""
    layers = {"a": nn.Conv2d(3, 8, 1), "b": (b := nn.Conv2d(8, 4, 1)), "hidden": [b.weight]}
    return Toy(lambda m, x: F.conv2d(m.a(x).relu(), m.hidden[0]), **layers)


def test_verify_compares_values() -> None:
    x = torch.randn(2, 3, 64, 64)
    model = Residual(**Residual.FULL)
    assert dmcp.verify(model, dmcp.trace(model, x), x, {"stem": [5, 1], "conv3": 4}) < 1e-6  # all that cut takes
    nn.init.constant_(model.head.weight, torch.nan)
    for bad in (hidden_weight(), model):
        with pytest.raises(dmcp.CutError):
            dmcp.verify(bad, dmcp.trace(bad, x, verify=False), x)
        with pytest.raises(dmcp.TraceError):
            dmcp.trace(bad, x)


# new weights


def test_reinitialize_follows_the_rules_at_the_cut_shape() -> None:
    net = nn.Sequential(
        nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3, groups=64), nn.GroupNorm(4, 64),
        nn.ConvTranspose2d(64, 32, 5, groups=2), nn.LayerNorm(32), nn.Linear(32, 400),
    )  # fmt: skip
    again = copy.deepcopy(randomise(net).float())
    for it in (net, again):
        dmcp.reinitialize(it, generator=torch.Generator().manual_seed(0))
    assert same(state(net), state(again))
    # variance 2 / fan: 64 * 9 outputs see one input of the first conv, 9 of the depthwise one, 16 * 25 of the last
    for index, fan in ((0, 64 * 9), (2, 9), (4, 16 * 25), (6, 32)):
        assert net[index].weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.1)
    assert all(part.bias.abs().max() == 0 for part in net)
    assert all(torch.equal(net[index].weight, torch.ones_like(net[index].weight)) for index in (1, 3, 5))
    assert not net[1].running_mean.any() and net[1].running_var.eq(1).all() and net[1].num_batches_tracked == 0


# padding


SHORT = dmcp.TrainConfig(epochs=2, lr=0.1, warmup_lr=0.1, warmup_epochs=0, reference_batch=None, weight_decay=1e-2)


class Gated(nn.Module):
    """Squeeze and excitation, activations that are not zero at zero, a concatenation and a grouped layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 20, 3), nn.Conv2d(1, 12, 3)
        self.norm = nn.BatchNorm2d(20)
        self.squeeze, self.excite = nn.Conv2d(20, 10, 1), nn.Conv2d(10, 20, 1)
        self.alone = nn.Conv2d(32, 32, 3, groups=32)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        left = torch.sigmoid(self.norm(self.left(x)))
        gate = torch.sigmoid(self.excite(torch.cos(self.squeeze(left.mean((2, 3), keepdim=True)))))
        both = torch.cat([left * gate, nn.functional.softplus(self.right(x))], dim=1)
        return self.last(torch.sigmoid(self.alone(both)).mean((2, 3)))


def odd_case(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any, Any, Any]:
    """A model in float64, its graph, widths that are multiples of nothing, and the cut network with new weights."""
    torch.manual_seed(0)
    net = make().double()
    graph = dmcp.trace(net, torch.randn(2, 1, 8, 8, dtype=torch.float64))
    widths = graph.widths([max(1, space.size // 2 - 1 + number % 3) for number, space in enumerate(graph.spaces)])
    small = dmcp.cut(net, graph, widths)
    dmcp.reinitialize(small, generator=torch.Generator().manual_seed(1))
    return net, graph, widths, small


@pytest.mark.parametrize("make", [lambda: build("digits:resnet"), Gated], ids=["resnet", "gated"])
def test_a_padded_network_learns_the_same(make: Callable[[], nn.Module]) -> None:
    net, graph, widths, inside = odd_case(make)
    next(inside.train().parameters()).requires_grad_(False)  # modes and frozen parameters are those of the cut network
    next(module for module in inside.modules() if isinstance(module, nn.BatchNorm2d)).eval()
    alone, before = copy.deepcopy(inside), state(inside)
    data = [(torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.randint(10, (6,))) for _ in range(4)]
    twin = padded(inside, net, graph, widths, to=8)
    assert twin and sum(p.numel() for p in twin.wide.parameters()) > sum(p.numel() for p in inside.parameters())
    assert padded(net, net, graph, graph.full) is None  # full widths stay
    assert [it.training for it in twin.wide.modules()] == [it.training for it in inside.modules()]
    one, other = dmcp.train(alone, data, SHORT), dmcp.train(twin.wide, data, SHORT)
    assert [step.loss for step in other] == pytest.approx([step.loss for step in one], rel=1e-9)
    assert same(state(inside), before)
    twin.give_back()
    for name, value in state(alone).items():
        torch.testing.assert_close(state(inside)[name], value, rtol=1e-8, atol=1e-10)
    assert not same(state(inside), before)
