"""Bugs of other pruning code that no other test has: what is right here, and the wrong way, which would be noticed."""

from __future__ import annotations

import copy

import torch
from nets import distance, randomise
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.mobilenetv2 import InvertedResidual

import dmcp
from dmcp.searching.search import search
from dmcp.searching.subnets import sort_channels
from dmcp.settings import SearchConfig
from dmcp.training import Task


class Pair(nn.Module):
    """A MobileNetV2 block that changes the width, so it has no shortcut, then one that has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.first = InvertedResidual(16, 24, stride=1, expand_ratio=2)
        self.second = InvertedResidual(24, 24, stride=1, expand_ratio=2)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.second(self.first(self.stem(x))).mean(dim=(2, 3)))
        return scores


def made() -> tuple[dmcp.Supernet, Tensor]:
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    model = randomise(Pair())
    return dmcp.Supernet(model, dmcp.trace(model, x)).double(), x


def test_equal_widths_make_no_shortcut() -> None:
    """A peer decides on the pruned widths whether a block has a shortcut; the supernet has none there."""
    net, x = made()
    names = {space.size: space.name for space in net.graph.spaces if space.size != 48}
    widths = net.graph.widths({names[16]: 12, names[32]: 24, names[24]: 12})  # stem, inside the first block, after it
    for training in (False, True):
        net.train(training)
        small = dmcp.cut(net.model, net.graph, widths)
        assert small.stem[0].out_channels == small.first.conv[-2].out_channels == 12
        assert distance(small(x), net(x, net.hard(widths))) < 1e-10

        wrong = copy.deepcopy(small)
        wrong.first = InvertedResidual(12, 12, stride=1, expand_ratio=2).double().train(training)
        wrong.first.load_state_dict(small.first.state_dict())  # every tensor fits, so nothing else would complain
        assert wrong.first.use_res_connect and not small.first.use_res_connect
        assert distance(wrong(x), net(x, net.hard(widths))) > 0.01


def test_the_alphas_learn_from_statistics_of_the_batch() -> None:
    """A peer moves its alphas in eval mode, on running statistics that mix all widths."""
    net, x = made()
    net.eval()  # the search must not depend on the mode that it finds
    batch = (x, torch.arange(6) % 5)
    config = SearchConfig(budget="50%", epochs=1, warmup=0.0, train_weights=False, init="zero")
    losses = {}
    for training in (True, False):
        twin = copy.deepcopy(net).train(training)
        losses[training] = F.cross_entropy(twin(x, twin.soft()), batch[1]).item()
    task = Task(loss=lambda output, batch: F.cross_entropy(output, batch[1]))
    found = search(net, [batch], config, task=task).log[0].task_loss
    assert found is not None
    assert abs(found - losses[True]) < 1e-10 < 0.01 < abs(found - losses[False])


def test_sorting_twice_is_sorting_once() -> None:
    """A peer's second sort of channels, by an order that was meant for the unsorted ones, undid the first."""
    net, x = made()
    net.eval()
    before = net(x, net.hard(net.graph.full))
    sort_channels(net)
    once = copy.deepcopy(net.model.state_dict())
    sort_channels(net)
    assert all(torch.equal(tensor, once[name]) for name, tensor in net.model.state_dict().items())
    assert distance(net(x, net.hard(net.graph.full)), before) < 1e-10
    assert not torch.equal(net.model.get_parameter("stem.0.weight"), made()[0].model.get_parameter("stem.0.weight"))
