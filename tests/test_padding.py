"""A cut network that is trained inside one of rounder widths learns what it would learn alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmcp
from dmcp import retraining
from dmcp.cutting import Padded, cut, padded, reinitialize
from dmcp.models import build
from dmcp.retraining import Retraining, padding, train_all
from dmcp.runtime.engine import pads
from dmcp.settings import Engine, Retrain, TrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import train
from dmcp.widths import Widths

SHORT = TrainConfig(epochs=2, lr=0.1, warmup_lr=0.1, warmup_epochs=0, reference_batch=None, weight_decay=1e-2)


class Gated(nn.Module):
    """Squeeze and excitation, activations that are not zero at zero, a concatenation and a grouped layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 20, 3), nn.Conv2d(1, 12, 3)
        self.norm = nn.BatchNorm2d(20)
        self.squeeze, self.excite = nn.Conv2d(20, 10, 1), nn.Conv2d(10, 20, 1)
        self.alone = nn.Conv2d(32, 32, 3, groups=32)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        left = torch.sigmoid(self.norm(self.left(x)))
        gate = torch.sigmoid(self.excite(torch.cos(self.squeeze(left.mean((2, 3), keepdim=True)))))
        both = torch.cat([left * gate, nn.functional.softplus(self.right(x))], dim=1)
        return self.last(torch.sigmoid(self.alone(both)).mean((2, 3)))


def traced(make: Callable[[], nn.Module]) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    net = make().double()
    return net, dmcp.trace(net, torch.randn(2, 1, 8, 8, dtype=torch.float64))


def odd(graph: ChannelGraph) -> Widths:
    """Widths that are no multiples of anything."""
    return graph.widths([max(1, space.size // 2 - 1 + number % 3) for number, space in enumerate(graph.spaces)])


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.randint(10, (6,))) for _ in range(count)]


def fresh(net: nn.Module, graph: ChannelGraph, widths: Widths) -> nn.Module:
    small = cut(net, graph, widths)
    reinitialize(small, generator=torch.Generator().manual_seed(1))
    return small


@pytest.mark.parametrize("make", [lambda: build("digits:resnet"), Gated])
def test_a_padded_network_learns_the_same(make: Callable[[], nn.Module]) -> None:
    net, graph = traced(make)
    widths, data = odd(graph), batches()
    alone, inside = fresh(net, graph, widths).train(), fresh(net, graph, widths).train()
    for model in (alone, inside):  # modes and frozen parameters are those of the cut network
        next(model.parameters()).requires_grad_(False)
        next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).eval()
    before = copy.deepcopy(alone.state_dict())
    twin = padded(inside, net, graph, widths, to=8)
    assert twin and sum(p.numel() for p in twin.wide.parameters()) > sum(p.numel() for p in inside.parameters())
    assert [it.training for it in twin.wide.modules()] == [it.training for it in inside.modules()]
    flags = [[it.requires_grad for it in model.parameters()] for model in (twin.wide, inside)]
    assert flags[0] == flags[1] and not flags[0][0]
    one, other = train(alone, data, SHORT), train(twin.wide, data, SHORT)
    assert [step.loss for step in other] == pytest.approx([step.loss for step in one], rel=1e-9)
    assert all(torch.equal(value, before[name]) for name, value in inside.state_dict().items())
    twin.give_back()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(inside.state_dict()[name], value, rtol=1e-8, atol=1e-10)
    assert any(not torch.equal(value, before[name]) for name, value in inside.state_dict().items())


def test_without_the_hooks_what_is_added_would_be_read() -> None:
    net, graph = traced(Gated)
    widths = odd(graph)
    twin = padded(fresh(net, graph, widths), net, graph, widths)
    assert twin
    free = copy.deepcopy(twin.wide)  # hooks are not copied
    for model in (twin.wide, free):
        train(model, batches(), SHORT)
    weights = [model.get_parameter("last.weight") for model in (twin.wide, free)]
    kept = twin.places["last.weight"][1]
    assert kept is not None
    rest = [index for index in range(weights[0].shape[1]) if index not in kept.tolist()]
    assert rest and not weights[0][:, rest].any() and weights[1][:, rest].any()


def test_nothing_is_added_to_round_widths_and_full_ones_stay() -> None:
    net, graph = traced(lambda: build("digits:resnet"))
    sizes = [space.size for space in graph.spaces]
    assert padded(net, net, graph, graph.full) is None
    even = graph.widths([max(4, size // 2 // 4 * 4) for size in sizes])
    assert padded(fresh(net, graph, even), net, graph, even, to=4) is None
    widths = graph.widths([size - 1 for size in sizes])
    twin = padded(fresh(net, graph, widths), net, graph, widths, to=1024)
    assert twin and all(a.shape == b.shape for a, b in zip(twin.wide.parameters(), net.parameters(), strict=True))


def trained(net: nn.Module, graph: ChannelGraph, data: Any, engine: Engine, *how: Any) -> dict[str, nn.Module]:
    wanted = {"unpruned": graph.full, "dmcp": odd(graph)}
    return train_all(net, graph, wanted, data, Retraining(SHORT, *how), runtime=dmcp.Runtime(engine=engine))


@pytest.mark.parametrize(("kind", "teacher"), [("scratch", None), ("scratch", "unpruned"), ("finetune", None)])
def test_all_trainings_pad_where_the_engine_does(kind: str, teacher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, graph = traced(lambda: build("digits:resnet"))
    data, made = batches(2), list[Padded]()
    usual = trained(net, graph, data, Engine(pad=True), Retrain(kind), teacher)  # on a CPU it changes nothing
    monkeypatch.setattr(Engine, "pads", lambda engine, device: bool(engine.pad))
    monkeypatch.setattr(retraining, "padded", lambda *args: made.append(padded(*args)) or made[-1])
    found = trained(net, graph, data, Engine(pad=True), Retrain(kind), teacher)
    assert [twin is not None for twin in made] == [False, True]
    for name, model in found.items():
        for tensor, other in zip(model.state_dict().values(), usual[name].state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-7, atol=1e-9)
    made.clear()
    trained(net, graph, data, Engine(), Retrain(kind), teacher)
    assert not made


def test_an_optimizer_of_ones_own_sees_the_network_as_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    net, graph = traced(lambda: build("digits:resnet"))
    monkeypatch.setattr(Engine, "pads", lambda engine, device: True)
    monkeypatch.setattr(retraining, "padded", lambda *args: pytest.fail("it is padded"))
    with padding(net, net, graph, odd(graph), None, torch.optim.SGD) as same:
        assert same is net


def test_padding_is_for_gpus_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not pads(Engine(pad=True), cpu) and not pads(Engine(), cpu)
    for capability, half in (((9, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert pads(Engine(), gpu) is half and pads(Engine(pad=True), gpu) and not pads(Engine(pad=False), gpu)
        assert not pads(Engine(precision="float32"), gpu)  # type: ignore[arg-type]
