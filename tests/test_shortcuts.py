"""What is answered without asking torch is what torch answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dmcp.tracing import record as record_module
from dmcp.tracing.record import compute, record

aten = torch.ops.aten


class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.funcs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.funcs.append(func)
        return func(*args, **(kwargs or {}))


def computed(func: Any, *args: Any) -> tuple[Tensor, bool]:
    """What comes of it, and whether torch was asked."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), Asked() as asked:
        return compute(func, args, {}), func in asked.funcs


def form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


def values(*shape: int, **how: Any) -> Tensor:
    return torch.empty(shape, device="meta", **how)


INPUTS = [
    values(3, 8, 5, 5),
    values(3, 8),
    values(0, 8, 5, 5),
    values(3, 8, 5, 5, dtype=torch.bfloat16),
    values(3, 8, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last),
    values(3, 5, 7).transpose(1, 2),
]


@pytest.mark.parametrize("func", sorted(record_module._ELEMENTWISE_OPS, key=str), ids=str)
def test_elementwise_ops_give_what_torch_gives(func: Any) -> None:
    limits = (0, 6) if func is aten.clamp.default else ()
    for given in INPUTS:
        (found, asked), wanted = computed(func, given, *limits), func(given, *limits)
        assert not asked and found is not given
        assert form(found) == form(wanted)


@pytest.mark.parametrize("func", sorted(record_module._IN_PLACE_OPS, key=str), ids=str)
def test_ops_in_place_give_their_input_back(func: Any) -> None:
    limits = (0, 6) if func is aten.clamp_.default else ()
    found, asked = computed(func, INPUTS[0], *limits)
    assert found is INPUTS[0] and not asked
    assert func(INPUTS[0], *limits) is INPUTS[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("given", INPUTS[:2] + INPUTS[3:], ids=lambda given: str([*given.shape]))
def test_batch_norm_gives_what_torch_gives(given: Tensor, affine: bool, training: bool) -> None:
    mean, var, weight, bias = values(4, given.shape[1])
    args = (given, weight if affine else None, bias if affine else None, mean, var, training, 0.1, 1e-5, False)
    found, asked = computed(aten.batch_norm.default, *args)
    assert not asked
    assert form(found) == form(aten.batch_norm.default(*args))


def test_batch_norm_without_statistics() -> None:
    found, asked = computed(aten.batch_norm.default, INPUTS[0], None, None, None, None, True, 0.1, 1e-5, False)
    assert not asked and form(found) == form(INPUTS[0])


WRONG = {
    "weight of other channels": (values(7), values(8), values(8), values(8), True),
    "bias of other channels": (values(8), values(7), values(8), values(8), True),
    "mean of other channels": (values(8), values(8), values(1), values(8), False),
    "var of other channels": (values(8), values(8), values(8), values(9), True),
    "no statistics": (values(8), values(8), None, None, False),
}


@pytest.mark.parametrize("name", WRONG)
def test_torch_refuses_what_does_not_fit(name: str) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        computed(aten.batch_norm.default, INPUTS[0], *WRONG[name], 0.1, 1e-5, False)


@pytest.mark.parametrize(
    "given", [*INPUTS[1:3], INPUTS[5], values(4, 6, 5, 8).transpose(1, 2)], ids=lambda it: str([*it.shape])
)
def test_linear_gives_what_torch_gives(given: Tensor) -> None:
    args = (given, values(10, given.shape[-1]), values(10))
    found, _ = computed(aten.linear.default, *args)
    assert form(found) == form(aten.linear.default(*args))


def test_a_bias_that_does_not_fit_is_left_to_torch() -> None:
    with pytest.raises(RuntimeError):
        computed(aten.linear.default, INPUTS[1], values(10, 8), values(9))
    found, _ = computed(aten.linear.default, INPUTS[1], values(10, 8), values(10, dtype=torch.float64))
    assert found.dtype == torch.float64


def test_whole_numbers_and_data_are_left_to_torch() -> None:
    found, asked = computed(aten.relu.default, torch.tensor([-1.0, 2.0]))
    assert asked and found.tolist() == [0.0, 2.0]
    with pytest.raises((RuntimeError, NotImplementedError)):
        computed(aten.batch_norm.default, values(2, 3, dtype=torch.int64), None, None, None, None, True, 0.1, 1e-5, 0)
    found, asked = computed(aten.clamp.default, values(3, dtype=torch.int64), 0.5, 1.5)
    assert asked and found.dtype == torch.float32


def test_a_recording_asks_torch_for_no_ready_answer() -> None:
    """Where a recorder would run the ops itself, this would be most of the time of a trace."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ReLU6(), nn.GELU(), nn.Hardswish())
    with Asked() as asked:
        recording = record(layers, torch.zeros(2, 3, 8, 8), training=True)
    names = [op.name for op in recording.ops]
    assert names == ["conv2d", "add_", "batch_norm", "relu", "hardtanh", "gelu", "hardswish"]
    assert not {"batch_norm", "relu", "hardtanh", "gelu", "hardswish"} & {func._schema.name[6:] for func in asked.funcs}
