"""What a recording holds of a forward pass, that making it changes nothing outside, and the meta fast path."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nets import Toy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dmcp.errors import TraceError
from dmcp.tracing import record as record_module
from dmcp.tracing.record import Ref, compute, record, record_anywhere

aten = torch.ops.aten
X = torch.randn(2, 3)


def names(recording: Any) -> list[str]:
    return [op.name for op in recording.ops]


COMPOSITE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, x: m.fc(x),
    "batch_norm": lambda m, x: m.bn(x),
    "reshape": lambda m, x: x.transpose(2, 3).reshape(2, -1),
    "scaled_dot_product_attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "conv2d": lambda m, x: m.conv(x),
    "layer_norm": lambda m, x: F.layer_norm(x, (4,)),
    "einsum": lambda m, x: torch.einsum("nchw,nchv->nwv", x, x),
    "max_pool2d": lambda m, x: F.max_pool2d(x, 2),
    "dropout": lambda m, x: F.dropout(x, 0.5, True),
    "flatten": lambda m, x: x.transpose(1, 2).flatten(1),
    "chunk": lambda m, x: x.chunk(2, 1)[0],
}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_composite_ops_arrive_whole(device: str) -> None:
    """Guards torch._C._AutoDispatchBelowAutograd, a private symbol: without it linear comes as t and addmm."""
    layers = {"fc": nn.Linear(4, 5), "bn": nn.BatchNorm2d(4), "conv": nn.Conv2d(4, 6, 1)}
    for name, run in COMPOSITE.items():
        found = names(record(Toy(run, **layers), torch.randn(2, 4, 4, 4), training=False, device=device))
        assert found[-1] == name and set(found) <= {name, "transpose"}  # nothing of what they are made of


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("the cupboard is bare")


def test_ops_know_their_module_and_their_arguments() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with pytest.raises(LookupError):  # must not shift the paths
            m.failing(x)
        return m.inner(x) + 1

    inner = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.ReLU())
    recording = record(Toy(run, inner=inner, failing=Failing()), torch.randn(2, 3, 5, 5), training=True)
    assert recording.training
    assert [(op.path, op.name) for op in recording.ops] == [("inner.0", "conv2d"), ("inner.1", "relu"), ("", "add")]
    conv, relu, add = recording.ops
    arguments = conv.arguments()
    assert (arguments["bias"], arguments["stride"], arguments["groups"]) == (None, [1, 1], 1)
    assert arguments["input"] == Ref(recording.inputs[0])
    assert recording.tensors[arguments["weight"].value] == "inner.0.weight"
    assert relu.inputs() == list(conv.outs) and recording.outputs == list(add.outs)
    assert (add.args[1], add.arguments()["alpha"]) == (1, 1)
    assert [recording.shapes[op.outs[0]] for op in recording.ops] == [(2, 6, 3, 3)] * 3


# -- the world outside


def world() -> tuple[Any, ...]:
    numbers = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    keys = torch._C._dispatch_tls_local_exclude_set(), torch._C._dispatch_tls_local_include_set()
    return *numbers, torch.is_autocast_enabled("cpu"), *(it.raw_repr() for it in keys)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_nothing_outside_changes(fails: bool, device: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu") and not torch.backends.mha.get_fastpath_enabled()
        _ = random.random(), np.random.rand(), torch.rand(3, device="cpu")
        return m.failing(x) if fails else m.fc(m.bn(x))

    model = Toy(run, fc=nn.Linear(3, 4), bn=nn.BatchNorm1d(3), failing=Failing())
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        outside = world()
        with pytest.raises(LookupError) if fails else contextlib.nullcontext():
            recording = record(model, X, training=True, device=device)
            assert recording.dtypes[recording.outputs[0]] == torch.float32
        assert world() == outside
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_random_numbers_are_alike_in_every_recording() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        ways = [random.random() < 0.5, np.random.rand() < 0.5, bool(torch.rand((), device="cpu") < 0.5)]
        for way in ways * 4:
            x = x.relu() if way else x.sigmoid()
        return x

    recorded = []
    for seed in range(4):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        recorded.append(names(record(Toy(run), X, training=True)))
    assert all(ops == recorded[0] for ops in recorded)


def test_a_model_that_looks_at_values_runs_on_the_cpu_and_its_own_errors_are_shown() -> None:
    model, x = Toy(lambda m, x: m.fc(x) if x.sum() > 0 else m.fc(x).relu(), fc=nn.Linear(3, 4)), torch.rand(2, 3)
    with pytest.raises(Exception, match="meta"):
        record(model, x, training=False)
    assert names(record_anywhere(model, x, training=False))[-1] == "linear"
    assert names(record_anywhere(model, -x, training=False))[-1] == "relu"
    with pytest.raises(TraceError, match="LookupError: the cupboard is bare"):
        record_anywhere(Failing(), x, training=False)


# -- the meta fast path: what is answered without asking torch is what torch answers


class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.funcs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.funcs.append(func)
        return func(*args, **(kwargs or {}))


def same(func: Any, *args: Any, fast: bool = True) -> bool:
    """Whether `compute` gives what torch gives, without asking it if `fast`."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), Asked() as asked:
        one = compute(func, args, {})
    other = func(*args)
    alike = all(getattr(one, it) == getattr(other, it) for it in ("shape", "dtype", "device"))
    return alike and one.stride() == other.stride() and (func in asked.funcs) != fast


def meta(*shape: int, **how: Any) -> Tensor:
    return torch.empty(shape, device="meta", **how)


INPUTS = [
    meta(3, 8, 5, 5),
    meta(3, 8),
    meta(0, 8, 5, 5),
    meta(3, 8, 5, 5, dtype=torch.bfloat16),
    meta(3, 8, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last),
    meta(3, 5, 7).transpose(1, 2),
]
CHECKED = (0.1, 1e-5, False)  # the last arguments of batch_norm


def test_the_fast_path_answers_as_torch_does() -> None:
    for func in record_module._ELEMENTWISE_OPS | record_module._IN_PLACE_OPS:
        limits = (0, 6) if "clamp" in str(func) else ()
        assert all(same(func, given, *limits) for given in INPUTS)
    for given in INPUTS[:2] + INPUTS[3:]:
        mean, var, weight, bias = meta(4, given.shape[1])
        for training in (False, True):
            for scale in ((weight, bias), (None, None)):
                assert same(aten.batch_norm.default, given, *scale, mean, var, training, *CHECKED)
        assert same(aten.batch_norm.default, given, None, None, None, None, True, *CHECKED)
    assert same(aten.relu.default, torch.tensor([-1.0, 2.0]), fast=False)
    assert same(aten.clamp.default, meta(3, dtype=torch.int64), 0.5, 1.5, fast=False)
