"""What a recording holds of a forward pass, that making it changes nothing outside, and the meta fast path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Toy
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.errors import TraceError
from dmcp.tracing import record as record_module
from dmcp.tracing.record import compute, record, record_anywhere

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
    "einsum": lambda m, x: torch.einsum("nchw,nchv->nwv", x, x),
    "dropout": lambda m, x: F.dropout(x, 0.5, True),
}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_composite_ops_arrive_whole(device: str) -> None:
    """Guards torch._C._AutoDispatchBelowAutograd, a private symbol: without it linear comes as t and addmm."""
    layers = {"fc": nn.Linear(4, 5), "bn": nn.BatchNorm2d(4), "conv": nn.Conv2d(4, 6, 1)}
    for name, run in COMPOSITE.items():
        found = names(record(Toy(run, **layers), torch.randn(2, 4, 4, 4), training=False, device=device))
        assert found[-1] == name and set(found) <= {name, "transpose"}  # nothing of what they are made of


def test_a_model_that_looks_at_values_runs_on_the_cpu_and_its_own_errors_are_shown() -> None:
    model, x = Toy(lambda m, x: m.fc(x) if x.sum() > 0 else m.fc(x).relu(), fc=nn.Linear(3, 4)), torch.rand(2, 3)
    with pytest.raises(Exception, match="meta"):
        record(model, x, training=False)
    assert names(record_anywhere(model, x, training=False))[-1] == "linear"
    assert names(record_anywhere(model, -x, training=False))[-1] == "relu"
    with pytest.raises(TraceError, match="KeyError: 'the cupboard is bare'"):
        record_anywhere(Toy(lambda m, x: {}["the cupboard is bare"]), x, training=False)


# -- the meta fast path: what is answered without asking torch is what torch answers


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


def same(func: Any, *args: Any) -> bool:
    """Whether `compute` gives what torch gives."""
    one, other = compute(func, args, {}), func(*args)
    mine, theirs = ((it.shape, it.dtype, it.device, it.stride()) for it in (one, other))
    return mine == theirs


def test_the_fast_path_answers_as_torch_does() -> None:
    for func in record_module._ELEMENTWISE_OPS | record_module._IN_PLACE_OPS:
        limits = (0, 6) if "clamp" in str(func) else ()
        assert all(same(func, given, *limits) for given in INPUTS)
    for given in INPUTS[:2] + INPUTS[3:]:
        mean, var, weight, bias = meta(4, given.shape[1])
        assert same(aten.batch_norm.default, given, weight, bias, mean, var, False, *CHECKED)
        assert same(aten.batch_norm.default, given, None, None, None, None, True, *CHECKED)
