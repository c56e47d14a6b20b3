"""Narrowing a module: what is indexed, what stays as it was, and which wrappers are looked into."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmcp.errors import TraceError
from dmcp.modules import narrow, skeleton, unwrap


class Net(nn.Module):
    """Two layers that share a weight, a norm, a frozen and a coarse parameter, a buffer outside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(4)
        self.ignore = nn.Parameter(torch.rand(4), requires_grad=False)
        self.coarse = nn.Parameter(torch.rand(4, dtype=torch.float16))
        self.register_buffer("ids", torch.arange(4), persistent=False)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.one(x) + self.other(x)) * self.ignore


ROWS = torch.tensor([2, 0])
CUTS = {
    "one.weight": (ROWS, torch.tensor([5, 1, 3])),
    "one.bias": (ROWS,),
    "norm.weight": (ROWS,),
    "norm.running_mean": (ROWS,),
    "ignore": (ROWS,),
    "coarse": (ROWS,),
    "ids": (ROWS,),
}
ATTRIBUTES = {"one": {"in_features": 3, "out_features": 2}, "": {"label": "small"}}


def test_tensors_are_indexed_and_attributes_set() -> None:
    model: Any = Net()
    before = copy.deepcopy(model.state_dict())
    small: Any = narrow(model, CUTS, ATTRIBUTES)
    assert type(small) is Net
    assert torch.equal(small.one.weight, model.one.weight[[2, 0]][:, [5, 1, 3]])
    for name in ("one.bias", "norm.weight", "norm.running_mean", "ignore", "coarse", "ids"):
        owner, _, leaf = name.rpartition(".")
        here, there = (getattr(net.get_submodule(owner), leaf) for net in (small, model))
        assert torch.equal(here, there[[2, 0]]), name
    assert torch.equal(small.other.bias, model.other.bias)  # not named: not cut
    assert (small.one.in_features, small.one.out_features, small.label) == (3, 2, "small")
    assert (model.one.in_features, model.one.out_features, hasattr(model, "label")) == (6, 4, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert small.state_dict().keys() == model.state_dict().keys()


def test_a_dim_without_indices_stays() -> None:
    small: Any = narrow(Net(), {"one.weight": (None, torch.tensor([4]))}, {})
    assert small.one.weight.shape == (4, 1)


@pytest.mark.parametrize("meta", [False, True])
def test_ties_types_and_requires_grad_stay(meta: bool) -> None:
    model: Any = Net()
    small: Any = narrow(model, CUTS, {}, meta=meta)
    assert small.other.weight is small.one.weight
    assert small.other.bias is not small.one.bias
    for (name, here), (_, there) in zip(small.named_parameters(), model.named_parameters(), strict=True):
        assert type(here) is nn.Parameter, name
        assert (here.dtype, here.requires_grad) == (there.dtype, there.requires_grad), name
        assert here.is_leaf and here.grad is None
        assert here.device.type == ("meta" if meta else "cpu")
    assert small.one.weight.shape == (2, 3)
    assert small.ids.dtype == torch.int64
    assert "ids" not in small.state_dict()
    assert small.norm.num_batches_tracked.shape == ()


def test_nothing_shares_memory_with_the_model() -> None:
    model: Any = Net()
    small: Any = narrow(model, {}, {})
    pairs = zip([*small.parameters(), *small.buffers()], [*model.parameters(), *model.buffers()], strict=True)
    for here, there in pairs:
        assert torch.equal(here, there)
        assert here.data_ptr() != there.data_ptr()
    small.seen.append("something")
    assert model.seen == []


def test_gradients_are_not_copied_and_none_flow_back() -> None:
    model: Any = Net()
    model(torch.rand(3, 6)).sum().backward()
    small: Any = narrow(model, CUTS, {})
    assert all(parameter.grad is None for parameter in small.parameters())
    assert model.one.weight.grad is not None


def test_modes_and_hooks_stay() -> None:
    model: Any = Net()
    calls: list[str] = []
    model.one.register_forward_hook(lambda module, inputs, output: calls.append("hook"))
    model.norm.eval()
    small: Any = narrow(model, {}, {})
    assert (small.training, small.norm.training) == (True, False)
    small(torch.rand(3, 6))
    assert calls == ["hook"]
    assert len(small.one._forward_hooks) == 1


@pytest.mark.parametrize("meta", [False, True])
def test_attributes_of_parameters_stay(meta: bool) -> None:
    model: Any = Net()
    model.one.weight._no_weight_decay = True
    model.ignore.scale = 3
    small: Any = narrow(model, CUTS, {}, meta=meta)
    assert small.one.weight._no_weight_decay is True
    assert small.ignore.scale == 3
    assert not hasattr(small.one.bias, "scale")


def test_the_layout_in_memory_of_what_is_not_cut() -> None:
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    small: Any = narrow(model, {}, {})
    assert small.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_skeleton_holds_no_data() -> None:
    model: Any = Net()
    twin: Any = skeleton(model)
    assert {tensor.device.type for tensor in [*twin.parameters(), *twin.buffers()]} == {"meta"}
    assert [tensor.shape for tensor in twin.parameters()] == [tensor.shape for tensor in model.parameters()]
    assert twin.other.weight is twin.one.weight
    assert skeleton(twin).one.weight.shape == (4, 6)  # of a skeleton, too


# -- wrappers


def test_plain_modules_are_themselves() -> None:
    model = Net()
    assert unwrap(model) is model


def test_wrappers_are_looked_into() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    assert unwrap(compiled) is model
    assert unwrap(nn.DataParallel(model)) is model
    assert unwrap(nn.DataParallel(compiled)) is model
    assert unwrap(torch.compile(nn.DataParallel(model), backend="eager")) is model


@pytest.mark.filterwarnings("ignore")
def test_script_modules_are_refused_wherever_they_are() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    for model in (scripted, nn.DataParallel(scripted)):
        with pytest.raises(TraceError, match="TorchScript"):
            unwrap(model)


def test_fully_sharded_modules_are_refused() -> None:
    for name in ("FullyShardedDataParallel", "FSDPLinear"):
        wrapper = type(name, (nn.Module,), {})
        with pytest.raises(TraceError, match="before wrapping"):
            unwrap(wrapper())


@pytest.mark.parametrize("thing", [None, "resnet18", torch.zeros(2), lambda x: x])
def test_what_is_no_module_is_refused(thing: Any) -> None:
    with pytest.raises(TraceError, match=f"not {type(thing).__name__}"):
        unwrap(thing)
