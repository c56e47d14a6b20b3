"""Copying a module: what is shared stays shared, and which wrappers are looked into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmcp.errors import TraceError
from dmcp.tracing.modules import narrow, skeleton, tensors_in, unwrap


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
