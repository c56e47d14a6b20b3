"""Narrowing a module: what is indexed, what stays as it was, and which wrappers are looked into."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmcp.errors import TraceError
from dmcp.modules import narrow, skeleton, tensors_in, unwrap


class Net(nn.Module):
    """Two layers that share a weight, a norm, a parameter without gradient, one of float16, and plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(4)
        self.still = nn.Parameter(torch.rand(4), requires_grad=False)
        self.coarse = nn.Parameter(torch.rand(4, dtype=torch.float16))
        self.register_buffer("ids", torch.arange(4), persistent=False)
        self.same = self.ids  # an alias of a buffer
        self.plain = torch.rand(5, 2)
        self.nested = {"list": [torch.rand(3), (torch.rand(2), "text")], "again": self.plain}

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.one(x) + self.other(x)) * self.still


ROWS = torch.tensor([2, 0])
INDEXED = ("one.bias", "norm.weight", "norm.running_mean", "still", "coarse", "ids")
CUTS = {"one.weight": (ROWS, torch.tensor([5, 1, 3]))} | dict.fromkeys(INDEXED, (ROWS,))
ATTRIBUTES = {"one": {"in_features": 3, "out_features": 2}, "": {"label": "small"}}


def test_tensors_are_indexed_and_attributes_set() -> None:
    model: Any = Net()
    before = copy.deepcopy(model.state_dict())
    model.one.weight._no_weight_decay = True
    small: Any = narrow(model, CUTS, ATTRIBUTES)
    assert type(small) is Net and small.one.weight._no_weight_decay and small.other.weight is small.one.weight
    assert torch.equal(small.one.weight, model.one.weight[[2, 0]][:, [5, 1, 3]])
    for name in INDEXED:
        owner, _, leaf = name.rpartition(".")
        here, there = (getattr(net.get_submodule(owner), leaf) for net in (small, model))
        assert torch.equal(here, there[[2, 0]]), name
    assert torch.equal(small.other.bias, model.other.bias)  # not named: not cut
    assert (small.one.in_features, small.one.out_features, small.label) == (3, 2, "small")
    assert (model.one.in_features, model.one.out_features, hasattr(model, "label")) == (6, 4, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert narrow(model, {"one.weight": (None, torch.tensor([4]))}, {}).one.weight.shape == (4, 1)


def test_copies_and_skeletons_share_what_was_shared_and_nothing_else() -> None:
    def tensors(net: Any) -> list[Tensor]:
        return tensors_in([*net.parameters(), *net.buffers(), net.plain, net.nested])

    model: Any = Net()
    copied, twin = narrow(model, {}, {}), skeleton(model)
    for net, device in ((copied, "cpu"), (twin, "meta")):
        assert net.one.weight is net.other.weight and net.same is net.ids and net.nested["again"] is net.plain
        assert [(it.shape, it.dtype) for it in tensors(net)] == [(it.shape, it.dtype) for it in tensors(model)]
        assert {it.device.type for it in tensors(net)} == {device} and net.nested["list"][1][1] == "text"
    pairs = list(zip(tensors(copied), tensors(model), strict=True))
    assert all(torch.equal(here, there) and here.data_ptr() != there.data_ptr() for here, there in pairs)
    assert skeleton(twin).one.weight.shape == (4, 6)  # of a skeleton, too
    last = narrow(nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), {}, {})
    assert last.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore")
def test_wrappers_are_looked_into_or_refused() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    outer = torch.compile(nn.DataParallel(model), backend="eager")
    for wrapped in (model, compiled, nn.DataParallel(compiled), outer):
        assert unwrap(wrapped) is model
    scripted = torch.jit.script(nn.Linear(2, 2))
    things: list[Any] = [None, "resnet18", torch.zeros(2), lambda x: x, nn.ReLU]
    for refused in (nn.DataParallel(scripted), *things):
        with pytest.raises(TraceError):
            unwrap(refused)
