"""cut, verify and reinitialize; that the cut network computes the right thing is in test_invariants.py."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import Odd, Residual, Toy, randomise, same, state
from torch import nn
from torch.nn import functional as F

import dmcp


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
