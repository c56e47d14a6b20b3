"""Calibration against statistics of all samples at once."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import Toy
from torch import Tensor, nn

import dmcp
from dmcp.models import build
from dmcp.training.calibration import recalibrate


def norms() -> Toy:
    """A norm that sees the data itself, one deeper behind a dropout, and one that never runs."""
    layers = {"first": nn.BatchNorm2d(3, momentum=0.3), "drop": nn.Dropout(0.5), "second": nn.BatchNorm2d(3)}
    layers |= {"unused": nn.BatchNorm1d(2), "stateless": nn.BatchNorm2d(3, track_running_stats=False)}
    return Toy(lambda m, x: m.stateless(m.second(m.drop(m.first(x)))), **layers)


def uneven() -> list[tuple[Tensor]]:
    """Batches of different sizes whose means and spreads drift."""
    return [(torch.randn(size, 3, 4, 4) * (1 + place) + 5 * place,) for place, size in enumerate((8, 8, 3))]


def truth(batches: list[tuple[Tensor]]) -> tuple[Tensor, Tensor]:
    every = torch.cat([x for (x,) in batches]).double().transpose(0, 1).flatten(1)
    return every.mean(1).float(), every.var(1).float()


def test_statistics_are_those_of_all_samples() -> None:
    net, batches = norms(), uneven()
    recalibrate(net, batches)
    torch.testing.assert_close((net.first.running_mean, net.first.running_var), truth(batches))
    assert net.first.num_batches_tracked == 3
    for momentum in (1.0, None):  # the last batch alone, as in the authors' code, or all batches alike: both wrong
        norm = nn.BatchNorm2d(3, momentum=momentum)
        for (x,) in batches:
            norm(x)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(norm.running_mean, truth(batches)[0])


class Still(nn.BatchNorm2d):
    """A norm that stays in eval mode, as people freeze those of a backbone."""

    def train(self, mode: bool = True) -> Still:
        super().train(False)
        return self


def test_frozen_norms_are_renewed_and_everything_else_is_as_before() -> None:
    """Behind a cut layer the old statistics of frozen norms are of other inputs."""
    net, batches = norms().train(), uneven()
    net.first = Still(3, momentum=0.3).requires_grad_(False).eval()
    net.second.requires_grad_(False).eval()
    net.unused.running_mean.fill_(7.0)
    net.first.running_mean.fill_(float("nan"))  # a broken start is healed
    weights = copy.deepcopy(list(net.parameters()))
    for _ in range(2):  # dropout is off, so a second time gives the same bits
        recalibrate(net, batches)
        torch.testing.assert_close((net.first.running_mean, net.first.running_var), truth(batches))
        before = copy.deepcopy(net.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [m.training for m in (net, net.first, net.drop, net.second, net.unused)] == [True, False, True, False, True]
    assert (net.first.momentum, net.second.momentum) == (0.3, 0.1) and not net.first._forward_hooks
    assert torch.equal(net.unused.running_mean, torch.full((2,), 7.0)) and net.second.num_batches_tracked == 3
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))


def test_after_an_error_the_old_statistics_are_back() -> None:
    net = norms().train()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError):
        recalibrate(net, [*uneven(), (torch.zeros(2, 4, 4, 4),)])
    with pytest.raises(dmcp.DmcpError):
        recalibrate(net, [])
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.first.momentum == 0.3 and net.first.training and not net.first._forward_hooks


def test_a_sub_network_is_calibrated_like_the_cut_one() -> None:
    model = build("digits:resnet", width=8).double()
    x = torch.randn(24, 1, 8, 8, dtype=torch.float64)
    graph = dmcp.trace(model, x[:2])
    net = dmcp.Supernet(model, graph, groups=4)
    widths = graph.widths({space.name: max(1, space.size // 3) for space in graph.spaces})
    small = dmcp.cut(net.model, graph, widths)
    batches = [{"input": part} for part in x.split(10)]
    gates = net.hard(widths)
    recalibrate(net.model, batches, forward=lambda part: net(part, gates))
    recalibrate(small, batches)
    torch.testing.assert_close(net.eval()(x, gates), small.eval()(x))
    assert float((small.bn1.running_var - 1).abs().max()) > 1e-3
