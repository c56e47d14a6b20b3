"""Values that forward reads: what depends on the input is told, with the place; what does not is no matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from nets import Chain, Residual, sample
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.errors import TraceError
from dmcp.tracing.record import record

X = torch.rand(2, 3, 8, 8)


class Reads(nn.Module):
    """Two convs before the head, another way around the second, and a forward that is written where it is tested."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 12, 1), nn.Conv2d(16, 12, 1)
        self.head = nn.Conv2d(12, 4, 1)
        self.register_buffer("limit", torch.ones(1))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.run(self, x))
        return out


def decides(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).relu()
    z: Tensor = m.b(y) if x.mean() > 0 else m.c(y)
    return z


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "if": lambda m, x: m.b(m.a(x)) if x.mean() > 0 else m.c(m.a(x)),
    "if later": lambda m, x: m.b(y) if (y := m.a(x)).mean() > 9 else m.c(y),
    "item": lambda m, x: m.b(m.a(x) * x.amax().item()),
    "float": lambda m, x: m.b(m.a(x) * float(x.amax())),
    "int": lambda m, x: m.b(m.a(x[..., : 4 + int(x.sum() > 0)])),
    "max of Python": lambda m, x: m.b(m.a(x) * max(x[0, 0, 0, 0], x[0, 0, 0, 1])),
    "in": lambda m, x: m.b(m.a(x)) if 7.0 in x else m.c(m.a(x)),
    "equal": lambda m, x: m.b(m.a(x)) if torch.equal(x, x + 1) else m.c(m.a(x)),
    "allclose": lambda m, x: m.b(m.a(x)) if torch.allclose(x, x + 1) else m.c(m.a(x)),
    "tolist": lambda m, x: m.b(m.a(x) * x[0, 0, 0].tolist()[0]),
    "numpy": lambda m, x: m.b(m.a(x) * float(x.detach().numpy().mean())),
    "asarray": lambda m, x: m.b(m.a(x) * float(np.asarray(x).mean())),
    "written into a buffer": lambda m, x: m.b(m.a(x)) if m.limit.mul_(x.mean()) > 9 else m.c(m.a(x)),
}


@pytest.mark.parametrize("way", READS)
def test_values_of_the_input_are_told_with_their_place(way: str) -> None:
    (note,) = dmcp.trace(Reads(READS[way]), X).notes
    assert "test_readings.py:" in note, note
    assert "another input" in note


def test_the_line_and_the_layers_that_did_not_run_are_named() -> None:
    graph = dmcp.trace(Reads(decides), X)
    (note,) = graph.notes
    line = decides.__code__.co_firstlineno + 2
    assert f"(test_readings.py:{line})" in note
    assert note.endswith("not run: c")
    assert note in graph.summary()
    assert note in graph.to_json()["notes"]
    assert dmcp.trace(Reads(decides), -X).notes[0].endswith("not run: b")


def test_strict_refuses_and_gives_two_ways_out() -> None:
    with pytest.raises(TraceError, match=r"test_readings.py:\d+.*torch.where.*strict=False"):
        dmcp.trace(Reads(decides), X, strict=True)


NO_READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda m, x: m.b(m.a(x)),
    "a buffer": lambda m, x: m.b(m.a(x)) if m.limit > 0 else m.c(m.a(x)),
    "a buffer, by numpy": lambda m, x: m.b(m.a(x) * float(m.limit.numpy()[0])),
    "a buffer of the input's type": lambda m, x: m.b(m.a(x) * m.limit.type_as(x).item()),
    "a parameter": lambda m, x: m.b(m.a(x)) if m.a.bias.sum() < 99 else m.c(m.a(x)),
    "a constant": lambda m, x: m.b(m.a(x) * torch.tensor([2.0, 3.0]).tolist()[0]),
    "dice": lambda m, x: m.b(m.a(x)) if torch.rand(1) < 2 else m.c(m.a(x)),
    "ones like the input": lambda m, x: m.b(m.a(x) * torch.ones_like(x).sum().item()),
    "a shape": lambda m, x: m.b(m.a(x)) if x.shape[-1] > 2 and x.numel() else m.c(m.a(x)),
    "read before it is written": lambda m, x: m.b(m.a(x) * m.limit.item() + m.limit.mul_(x.mean())),
}


@pytest.mark.parametrize("way", NO_READS)
def test_other_values_give_no_note(way: str) -> None:
    graph = dmcp.trace(Reads(NO_READS[way]), X, strict=True)
    assert graph.notes == ()
    assert {"a", "b"} <= {space.name for space in graph.spaces}


SIZES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a mask": lambda m, x: m.b(m.a(x) * x[x > 0.5].mean()),
    "samples by a mask": lambda m, x: m.b(m.a(x)[x[:, 0, 0, 0] > 0.5]),
    "nonzero": lambda m, x: m.b(m.a(x[x.mean((1, 2, 3)).nonzero()[:, 0]])),
    "where": lambda m, x: m.b(m.a(x[torch.where(x.mean((1, 2, 3)) > 0)[0]])),
    "repeat_interleave": lambda m, x: m.b(m.a(x.repeat_interleave(1 + (x[:, 0, 0, 0] > 0.5).long(), 0))),
    "a branch by a size": lambda m, x: m.b(m.a(x)) if len(x.nonzero()) else m.c(m.a(x)),
    "masked_select": lambda m, x: m.b(m.a(x) * x.masked_select(x > 0.5).sum()),
    "unique": lambda m, x: m.b(m.a(x) * x.unique().mean()),
    "one_hot": lambda m, x: m.b(m.a(x) * F.one_hot((9 * x).long()).float().mean()),
}


@pytest.mark.parametrize("way", SIZES)
def test_sizes_by_values_of_the_input_are_told_with_their_place(way: str) -> None:
    (note,) = dmcp.trace(Reads(SIZES[way]), X).notes
    assert note.startswith("forward makes tensors whose size depends on values of its input (test_readings.py:")
    assert "macs are those of this example" in note and note.endswith("not run: c")
    with pytest.raises(TraceError, match=r"tensors whose size.*torch.where.*strict=False"):
        dmcp.trace(Reads(SIZES[way]), X, strict=True)


NO_SIZES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a mask that is a constant": lambda m, x: m.b(m.a(x[:, :, torch.tensor([True, False] * 4)])),
    "a mask of a buffer": lambda m, x: m.b(m.a(x) * m.limit[m.limit > 0].mean()),
    "places": lambda m, x: m.b(m.a(x[:, :, (7 * x[0, 0, 0]).long()])),
    "written by a mask": lambda m, x: m.b(m.a(x.masked_fill(x > 0.5, 0.0))),
    "one_hot of so many": lambda m, x: m.b(m.a(x) * F.one_hot((9 * x).long(), 10).float().mean()),
}


@pytest.mark.parametrize("way", NO_SIZES)
def test_other_sizes_give_no_note(way: str) -> None:
    assert dmcp.trace(Reads(NO_SIZES[way]), X).notes == ()


def by_numpy(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.b(torch.from_numpy(m.a(x).detach().numpy() * 2))
    return y


def by_list(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.b(torch.tensor(m.a(x).tolist()))
    return y


def by_cpu_and_numpy(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.b(torch.from_numpy(m.a(x).detach().cpu().numpy() * 2))
    return y


def of_the_input(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.b(m.a(torch.from_numpy(x.numpy())))
    return y


WAYS_OUT = [by_numpy, by_list, by_cpu_and_numpy]


@pytest.mark.parametrize("way", [*WAYS_OUT, of_the_input])
def test_what_comes_back_into_torch_is_counted(way: Any) -> None:
    graph, plain = (dmcp.trace(Reads(it).eval(), X) for it in (way, lambda m, x: m.b(m.a(x))))
    assert (graph.macs(), graph.params(), graph.memory()) == (plain.macs(), plain.params(), plain.memory())
    assert graph.memory_at() == plain.memory_at()
    (note,) = graph.notes
    assert "what is computed between leaving torch and coming back is not counted" in note


def test_a_constant_that_was_not_read_is_a_constant() -> None:
    def reads_first(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.b(m.a(x) * (1.0 if x.sum().item() > 0 else 2.0)) * torch.tensor(m.limit.tolist()).mean()
        return y

    (note,) = dmcp.trace(Reads(reads_first).eval(), X).notes
    assert "coming back" not in note


@pytest.mark.parametrize("way", WAYS_OUT)
def test_channels_that_leave_torch_are_kept_whole_and_the_rest_is_pruned(way: Any) -> None:
    model = Reads(way).eval()
    graph = dmcp.trace(model, X)
    reason = {item.name: item.reason for item in graph.unprunable}["a"]
    assert "read" in reason and f"test_readings.py:{way.__code__.co_firstlineno + 1}" in reason
    assert graph.unknown == {}
    small: Any = dmcp.cut(model, graph, {"b": 5})
    assert small.b.weight.shape[0] == 5
    assert small(X).shape == model(X).shape


@pytest.mark.parametrize(
    ("net", "size"),
    [("resnet18", 64), ("mobilenet_v2", 64), ("shufflenet_v2_x0_5", 64), ("densenet121", 64), ("googlenet", 64)],
)
def test_networks_of_torchvision_read_nothing(net: str, size: int) -> None:
    options = {"init_weights": False} if net == "googlenet" else {}
    model = torchvision.models.get_model(net, weights=None, **options).eval()
    for training in (False, True):
        assert record(model, torch.zeros(3, 3, size, size), training).reads == []  # without data: nothing to read


@pytest.mark.parametrize("net", [Chain, Residual])
def test_own_networks_read_nothing(net: Any) -> None:
    assert dmcp.trace(net(**net.FULL), sample(net.SHAPE).float(), strict=True).notes == ()
