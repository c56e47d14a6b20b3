"""The supernet: gates folded into parameters against nets with gate layers written out, and narrow sub-networks.

That gated, cut and narrow networks compute the same is in test_invariants.py.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from nets import (
    Chain,
    Depthwise,
    HandNet,
    NoNorms,
    PreActivation,
    Residual,
    SqueezeExcite,
    Toy,
    by_width,
    distance,
    sample,
    supernet,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dmcp
from dmcp.errors import WidthsError
from dmcp.searching.supernet import Narrow

X = sample(Chain.SHAPE)


# -- the nets of nets.py have a gate layer after each norm, and before readers that no norm comes before


class NoAffine(HandNet):
    """Norms without scale and shift of their own; the gate lies before the reader."""

    FULL: ClassVar = {"a": 7, "b": 6}
    SPACES: ClassVar = {"a": "conv1", "b": "conv2"}
    LAYERS = "conv1 3>a p1 bias; conv2 a>b p1 bias; head b>5"

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        self.bn1, self.bn2 = nn.BatchNorm2d(a, affine=False), nn.BatchNorm2d(b, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate("a", F.silu(self.bn1(self.conv1(x))))
        return self.head(self.gate("b", F.silu(self.bn2(self.conv2(x)))).mean((2, 3)))


EXPLICIT: Any = (Chain, Residual, Depthwise, SqueezeExcite, PreActivation, NoNorms, NoAffine)


# soft gates


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("toy", EXPLICIT, ids=lambda toy: toy.__name__)
def test_soft_gates_are_gate_layers(toy: Any, training: bool) -> None:
    """Outputs, the gradient of the gates, and that of the alphas (I11)."""
    net, x = supernet(toy).train(training), sample(toy.SHAPE)
    model = copy.deepcopy(net.model)
    dice = torch.Generator().manual_seed(3)
    # Some are negative, which no probability is, so that a gate before a relu is not one after it.
    noise = torch.randn(len(net.position), dtype=torch.float64, generator=dice).requires_grad_()
    for gates, source in ((noise, noise), (net.soft(), net.alpha)):
        layered: Any = copy.deepcopy(model)
        layered.gates = by_width(toy, net.graph, gates)
        expected, output = layered(x), net(x, gates)
        assert distance(output, expected) < 1e-10
        assert gates is not noise or distance(output, copy.deepcopy(model)(x)) > 0.1  # the gates do something
        weight = torch.randn(expected.shape, generator=dice, dtype=torch.float64)
        (found,) = torch.autograd.grad((output * weight).sum(), source, retain_graph=True)
        (wanted,) = torch.autograd.grad((expected * weight).sum(), source)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10 * wanted.abs().max().item())
        assert wanted.count_nonzero() > wanted.numel() // 2


# hard gates


def test_short_chains_are_padded() -> None:
    net = supernet(groups=8)
    assert net.alpha.shape == (3, 7)
    assert [row[row > 0].tolist() for row in net.sizes] == [[1] * 7, [1] * 7 + [2], [1] * 6]
    (net(X, net.soft()).square().sum() + net.graph.expected_cost("macs", net.marginals(), net.sizes)).backward()
    there = net.sizes[:, 1:] > 0
    assert (net.alpha.grad[there] != 0).all() and (net.alpha.grad[~there] == 0).all() and (~there).any()
    with torch.no_grad():
        net.alpha.fill_(1e4)
    assert net.marginals().tolist() == [[1.0] * n + [0.0] * (8 - n) for n in (7, 8, 6)]
    assert net.graph.expected_cost("macs", net.marginals(), net.sizes).item() == net.graph.macs()


class Reversible(torch.autograd.Function):
    """Computes its layer once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer, ctx.x = layer, x
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(ctx.x), gradient)
        return None, None


def kept(layer: Any) -> Tensor:
    layer.kept = layer.weight.tanh() if getattr(layer, "kept", None) is None else layer.kept
    return layer.kept


LOSING = {
    "checkpointing": lambda m, x: m.other(checkpoint(m.one, x, use_reentrant=False)),
    "old checkpointing": lambda m, x: m.other(checkpoint(m.one, x, use_reentrant=True)),
    "reversible": lambda m, x: m.other(Reversible.apply(x.requires_grad_(), m.one)),
    "kept": lambda m, x: F.conv2d(m.one(x), kept(m.other)),
}


@pytest.mark.filterwarnings("ignore:None of the inputs")  # torch's own, of the old kind under no_grad
@pytest.mark.parametrize("way", LOSING)
def test_layers_that_would_lose_gates_are_refused(way: str) -> None:
    model = Toy(LOSING[way], one=nn.Conv2d(3, 4, 1), other=nn.Conv2d(4, 5, 1))
    graph = dmcp.trace(model, torch.zeros(2, 3, 8, 8))
    assert dmcp.cut(model, graph, graph.full) is not None  # cutting needs no gates
    with pytest.raises(WidthsError):
        dmcp.Supernet(model, graph)


# narrow sub-networks


@pytest.mark.parametrize(("align", "wide"), [(1, [3, 5, 6]), (4, [4, 8, 6]), (8, [7, 8, 6])])
def test_a_narrow_network_is_as_wide_as_its_alignment(align: int, wide: list[int]) -> None:
    net = supernet()
    small: Any = Narrow(net, {"conv1": 3, "conv2": 5, "conv3": 6}, align)
    assert [small.skeleton.get_submodule(f"conv{n}").weight.shape[0] for n in (1, 2, 3)] == wide
    before, own = net.model.bn1.running_mean.clone(), small.skeleton.bn1.running_mean.clone()
    with torch.no_grad():  # it is made once and used after every step
        for weight in net.weights():
            weight.add_(torch.randn_like(weight) / 10)
    net.model.conv2.requires_grad_(False)
    output = small(X)
    assert torch.equal(net.model.bn1.running_mean, before)  # its statistics are its own
    assert not torch.equal(small.skeleton.bn1.running_mean, own)
    assert distance(output, net(X, net.hard({"conv1": 3, "conv2": 5, "conv3": 6}))) < 1e-9
    output.sum().backward()
    assert net.model.conv2.weight.grad is None and net.model.conv1.weight.grad is not None
