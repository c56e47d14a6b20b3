"""What a recording holds of a forward pass, and that making it leaves no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.errors import TraceError
from dmcp.modules import batch_of, rebatch, skeleton, tensors_in
from dmcp.tracing.record import Ref, record, record_anywhere

aten = torch.ops.aten


class Toy(nn.Module):
    """Layers by name, and a forward that is written where it is tested."""

    def __init__(self, run: Callable[[Any, Any], Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def names(recording: Any) -> list[str]:
    return [op.name for op in recording.ops]


# -- which ops arrive

COMPOSITE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, x: m.fc(x),
    "batch_norm": lambda m, x: m.bn(x),
    "reshape": lambda m, x: x.transpose(2, 3).reshape(2, -1),
    "scaled_dot_product_attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "conv2d": lambda m, x: m.conv(x),
    "group_norm": lambda m, x: F.group_norm(x, 2),
    "layer_norm": lambda m, x: F.layer_norm(x, (4,)),
    "instance_norm": lambda m, x: F.instance_norm(x),
    "matmul": lambda m, x: x @ x,
    "einsum": lambda m, x: torch.einsum("nchw,nchv->nwv", x, x),
    "max_pool2d": lambda m, x: F.max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda m, x: F.adaptive_avg_pool2d(x, 1),
    "dropout": lambda m, x: F.dropout(x, 0.5, True),
    "flatten": lambda m, x: x.transpose(1, 2).flatten(1),
    "softmax": lambda m, x: x.softmax(1),
    "chunk": lambda m, x: x.chunk(2, 1)[0],
    "prelu": lambda m, x: m.prelu(x),
}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", COMPOSITE)
def test_composite_ops_arrive_whole(name: str, device: str) -> None:
    """Guards torch._C._AutoDispatchBelowAutograd, a private symbol: without it linear comes as t and addmm."""
    layers = {"fc": nn.Linear(4, 5), "bn": nn.BatchNorm2d(4), "conv": nn.Conv2d(4, 6, 1), "prelu": nn.PReLU(4)}
    recording = record(Toy(COMPOSITE[name], **layers), torch.randn(2, 4, 4, 4), training=False, device=device)
    assert names(recording)[-1] == name
    assert set(names(recording)) <= {name, "transpose"}  # nothing of what they are made of


def test_ops_know_their_module_and_their_arguments() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.ReLU())
    recording = record(Toy(lambda m, x: m.inner(x) + 1, inner=inner), torch.randn(2, 3, 5, 5), training=True)
    assert recording.training
    assert [(op.path, op.name) for op in recording.ops] == [("inner.0", "conv2d"), ("inner.1", "relu"), ("", "add")]
    conv, relu, add = recording.ops
    arguments = conv.arguments()
    assert (arguments["bias"], arguments["stride"], arguments["groups"]) == (None, [1, 1], 1)
    assert arguments["input"] == Ref(recording.inputs[0])
    assert recording.tensors[arguments["weight"].value] == "inner.0.weight"
    assert relu.inputs() == list(conv.outs)
    assert (add.args[1], add.arguments()["alpha"]) == (1, 1)
    assert [recording.shapes[op.outs[0]] for op in recording.ops] == [(2, 6, 3, 3)] * 3
    assert recording.outputs == list(add.outs)


def test_a_module_that_fails_inside_does_not_shift_the_paths() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError

    def run(m: Any, x: Tensor) -> Tensor:
        try:
            return m.failing(x)
        except LookupError:
            return m.other(x) + 1

    recording = record(Toy(run, failing=Failing(), other=nn.ReLU()), torch.randn(2, 3), training=False)
    assert [op.path for op in recording.ops] == ["other", ""]


# -- values


def test_in_place_reshapes_are_new_values() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = x + 1
        y.unsqueeze_(1)
        y.transpose_(1, 2)
        return y.squeeze_(2) * 2

    recording = record(Toy(run), torch.randn(2, 3), training=False)
    shapes = [recording.shapes[op.outs[0]] for op in recording.ops]
    assert shapes == [(2, 3), (2, 1, 3), (2, 3, 1), (2, 3), (2, 3)]
    assert [recording.shapes[op.inputs()[0]] for op in recording.ops] == [(2, 3), *shapes[:-1]]


def test_in_place_ops_keep_their_value() -> None:
    recording = record(Toy(lambda m, x: (x + 1).mul_(2).relu_()), torch.randn(2, 3), training=False)
    assert len({op.outs for op in recording.ops}) == 1
    assert names(recording) == ["add", "mul_", "relu_"]


def test_copies_are_the_same_value() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return x.clone().detach().contiguous().relu()

    recording = record(Toy(run), torch.randn(2, 3), training=False)
    assert names(recording) == ["relu"]
    assert recording.ops[0].inputs() == recording.inputs


@dataclass
class Answer:
    first: Tensor
    more: Any


def test_nested_outputs_are_found_in_order() -> None:
    def run(m: Any, x: Tensor) -> Any:
        a, b, c, d = (x + number for number in range(4))
        return Answer(a, {"list": [b, None, (c,)], "text": "no tensor", "last": d})

    recording = record(Toy(run), torch.randn(2, 3), training=False)
    assert recording.outputs == [op.outs[0] for op in recording.ops]
    assert len(set(recording.outputs)) == 4


def test_an_output_that_is_an_input_or_a_parameter() -> None:
    recording = record(Toy(lambda m, x: (x, m.fc.weight), fc=nn.Linear(2, 2)), torch.randn(1, 2), training=False)
    assert recording.outputs[0] == recording.inputs[0]
    assert recording.tensors[recording.outputs[1]] == "fc.weight"


def test_several_inputs_and_several_outputs_of_an_op() -> None:
    class Two(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Any:
            return torch.cat([one, other], 1).split([2, 3], 1)

    one, other = torch.randn(2, 1), torch.randn(2, 4)
    for example in ((one, other), {"other": other, "one": one}):
        recording = record(Two(), example, training=False)
        assert sorted(recording.shapes[value] for value in recording.inputs) == [(2, 1), (2, 4)]
        cat, split = recording.ops
        assert [recording.shapes[value] for value in cat.inputs()] == [(2, 1), (2, 4)]
        assert [recording.shapes[value] for value in split.outs] == [(2, 2), (2, 3)]
        assert not split.single
        assert cat.single


def test_constants_come_from_nowhere() -> None:
    outside = torch.ones(3)

    def run(m: Any, x: Tensor) -> Tensor:
        return x * m.table + outside.to(x.device) + torch.ones(3)

    model = Toy(run)
    model.table = torch.rand(3)
    for device in ("meta", "cpu"):
        recording = record(model, torch.randn(2, 3), training=False, device=device)
        assert [recording.shapes[value] for value in recording.constants] == [(3,), (3,)]
        assert not set(recording.constants) & {*recording.tensors, *recording.inputs}
        made = next(op for op in recording.ops if op.name == "ones")
        assert made.outs[0] not in recording.constants


def test_own_values_are_those_without_an_input() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        weight = m.fc.weight * m.scale + 1
        return F.linear(x + 1, weight, torch.zeros(4))

    model = Toy(run, fc=nn.Linear(3, 4))
    model.register_buffer("scale", torch.ones(1))
    recording = record(model, torch.randn(2, 3), training=False)
    own = recording.own()
    sources = {
        op.name: sorted(recording.tensors[value] for value in own[op.outs[0]])
        for op in recording.ops
        if op.outs[0] in own
    }
    assert sources["mul"] == ["fc.weight", "scale"]
    assert sources["zeros"] == []
    assert "linear" not in sources
    assert set(recording.tensors) <= set(own)
    assert not set(recording.inputs) & set(own)


# -- the world outside


@contextmanager
def unchanged() -> Iterator[None]:
    def world_size() -> tuple[Any, ...]:
        return (
            random.getstate(),
            repr(np.random.get_state()),
            torch.get_rng_state().tolist(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_device(),
            torch.utils._python_dispatch._get_current_dispatch_mode(),
            torch._C._dispatch_tls_local_exclude_set().raw_repr(),
            torch._C._dispatch_tls_local_include_set().raw_repr(),
        )

    before = world_size()
    yield
    assert world_size() == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_nothing_outside_changes(fails: bool, device: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.backends.mha.get_fastpath_enabled()
        random.random()
        np.random.rand()
        torch.rand(3, device="cpu")
        if fails:
            raise LookupError("the cupboard is bare")
        return m.fc(x)

    model, x = Toy(run, fc=nn.Linear(3, 4)), torch.randn(2, 3)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16), unchanged():
        if fails:
            with pytest.raises(LookupError):
                record(model, x, training=True, device=device)
        else:
            recording = record(model, x, training=True, device=device)
            assert recording.dtypes[recording.outputs[0]] == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_switch_that_was_off_stays_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        record(Toy(lambda m, x: x + 1), torch.randn(2, 3), training=False)
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_dice_fall_alike_in_every_recording() -> None:
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
        recorded.append(names(record(Toy(run), torch.randn(2, 3), training=True)))
    assert all(ops == recorded[0] for ops in recorded)


def test_buffers_of_the_model_are_not_updated() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).train()
    record(model, torch.randn(2, 3, 4, 4), training=True, device="cpu")
    assert model[1].num_batches_tracked == 0
    assert model[1].running_mean.eq(0).all()
    assert model.training


# -- copies without data


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.register_buffer("mean", torch.rand(4))
        self.same = self.mean  # an alias of a buffer
        self.plain = torch.rand(5, 2)
        self.nested = {"list": [torch.rand(3), (torch.rand(2), "text")], "again": self.plain}

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)) * self.plain[0, 0] + self.nested["list"][0].sum()


def test_meta_copies_share_what_was_shared_and_hold_no_data() -> None:
    model = Tied()
    before = {id(tensor) for tensor in tensors_in([*model.parameters(), model.mean, model.plain, model.nested])}
    twin: Any = skeleton(model)
    assert twin.one.weight is twin.other.weight
    assert twin.one.weight is not model.one.weight
    assert isinstance(twin.one.weight, nn.Parameter)
    assert twin.one.bias is not twin.other.bias
    assert twin.same is twin.mean
    assert twin.nested["again"] is twin.plain
    assert twin.nested["list"][1][1] == "text"
    copies = tensors_in([*twin.parameters(), twin.mean, twin.plain, twin.nested])
    originals = tensors_in([*model.parameters(), model.mean, model.plain, model.nested])
    assert [(tensor.shape, tensor.dtype) for tensor in copies] == [(tensor.shape, tensor.dtype) for tensor in originals]
    assert {tensor.device.type for tensor in copies} == {"meta"}
    assert {tensor.device.type for tensor in originals} == {"cpu"}
    assert {id(tensor) for tensor in originals} == before


def test_a_model_with_plain_tensors_is_recorded_without_data() -> None:
    recording = record(Tied(), torch.randn(2, 4), training=False)
    assert "other.weight" not in recording.tensors.values()  # tied: once, under its first name
    assert [recording.tensors[op.inputs()[1]] for op in recording.ops if op.name == "linear"] == ["one.weight"] * 2
    assert sorted(recording.shapes[value] for value in recording.constants) == [(3,), (5, 2)]


# -- models that look at values


def data_dependent() -> Toy:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(x) if x.sum() > 0 else m.fc(x).relu()

    return Toy(run, fc=nn.Linear(3, 4))


def test_a_model_that_looks_at_values_runs_on_the_cpu() -> None:
    model, x = data_dependent(), torch.rand(2, 3)
    with unchanged():
        with pytest.raises(Exception, match="meta"):
            record(model, x, training=False)
        assert names(record_anywhere(model, x, training=False))[-1] == "linear"
        assert names(record_anywhere(model, -x, training=False))[-1] == "relu"


def test_a_model_that_fails_everywhere_tells_its_own_error() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        raise LookupError("the cupboard is bare")

    x = torch.rand(2, 3)
    with unchanged(), pytest.raises(TraceError, match="LookupError: the cupboard is bare"):
        record_anywhere(Toy(run), x, training=False)


# -- examples


def test_the_batch_of_an_example() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(2)
    assert batch_of(one) == batch_of((one, {"other": other})) == 2
    assert batch_of((one, torch.zeros(3))) is None
    assert batch_of((one, torch.zeros(()))) == batch_of((one, torch.zeros(1, 3))) == 2  # shared by all samples


@pytest.mark.parametrize("size", [1, 2, 5])
def test_samples_are_repeated_or_dropped(size: int) -> None:
    one = torch.arange(6).reshape(2, 3)
    again = rebatch({"a": one, "b": [one[:, 0], 7]}, size)
    assert again["a"].tolist() == [one[at % 2].tolist() for at in range(size)]
    assert again["b"][0].tolist() == [int(one[at % 2, 0]) for at in range(size)]
    assert again["b"][1] == 7
