"""Invariants I1 to I4, I7, I10 and I12 of DESIGN.md, in float64, with oracles that know nothing of layouts.

The oracles: the narrow nets written by hand in nets.py, torch's flop counter, finite differences, and photographs of
the model's bits.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from nets import NETS, distance, keep, leaves, randomise, sample
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dmcp

TOYS = {net.__name__: net for net in NETS}
ZOO = {  # name -> arguments, pixels
    "resnet18": ({}, 64),
    "mobilenet_v2": ({}, 64),
    "mobilenet_v3_small": ({}, 64),
    "densenet121": ({}, 64),
    "shufflenet_v2_x0_5": ({}, 64),
    "efficientnet_b0": ({}, 64),
    "regnet_y_400mf": ({}, 64),
    "googlenet": ({"aux_logits": True, "init_weights": False}, 64),
}
every_toy = pytest.mark.parametrize("name", TOYS)
_SLOW = ("densenet121", "googlenet", "efficientnet_b0", "regnet_y_400mf")  # the contract of the zoo has them, too
_MARKED = [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in ZOO]
every_zoo = pytest.mark.parametrize("name", _MARKED)
everywhere = pytest.mark.parametrize("name", [*TOYS, *_MARKED])
both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


@dataclass(frozen=True)
class Case:
    """A model that was traced, and photographs of it from before and after."""

    model: nn.Module
    graph: Any
    x: Tensor
    before: dict[str, Any]
    after: dict[str, Any]
    others: tuple[nn.Module, ...]  # what was made of it: a supernet and a cut model


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model with random numbers everywhere and nothing random in its forward."""
    if name in TOYS:
        net = TOYS[name]
        return randomise(net(**net.FULL)), sample(net.SHAPE)
    arguments, pixels = ZOO[name]
    model = randomise(torchvision.models.get_model(name, weights=None, **arguments))
    for module in model.modules():
        if isinstance(module, nn.Dropout | torchvision.ops.StochasticDepth):
            module.p = 0.0
    return model, sample((3, pixels, pixels), batch=3)


@functools.cache
def case(name: str) -> Case:
    """Trace once per model; the model is dirtied first so that every trace of ours on it would show."""
    model, x = build(name)
    parts = list(model.modules())
    parameters = list(model.parameters())
    parts[1].register_forward_hook(lambda module, inputs, output: None)
    parts[-1].register_forward_pre_hook(lambda module, inputs: None)
    parameters[0].grad = torch.randn_like(parameters[0])
    parameters[1].requires_grad_(False)
    model.train()
    parts[2].eval()
    before = photograph(model)
    graph = dmcp.trace(model, x)
    net = dmcp.Supernet(model, graph)
    small = dmcp.cut(model, graph, {space.name: max(1, space.size // 2) for space in graph.spaces})
    after = photograph(model)
    parameters[0].grad = None
    parameters[1].requires_grad_(True)
    return Case(model, graph, x, before, after, (net, small))


def photograph(model: nn.Module) -> dict[str, Any]:
    """Everything of a model and of the random states that somebody could disturb, as plain data."""
    photo: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
    }
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = {key: list(value.items()) for key, value in vars(module).items() if "hooks" in key and value}
        photo[f"module {name}"] = (id(module), module.training, sorted(vars(module)), module.extra_repr(), hooks)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        gradient = None if tensor.grad is None else (id(tensor.grad), tensor.grad.numpy().tobytes())
        bits = tensor.detach().numpy().tobytes()
        photo[f"tensor {name}"] = (id(tensor), tensor._version, bits, tensor.dtype, tensor.requires_grad, gradient)
    return photo


def draws(sizes: dict[str, int], many: int = 3, seed: int = 0) -> Iterable[dict[str, int]]:
    """Widths to try: all 1, all but one channel, and random ones."""
    yield dict.fromkeys(sizes, 1)
    yield {name: max(1, size - 1) for name, size in sizes.items()}
    generator = random.Random(seed)
    for _ in range(many):
        yield {name: generator.randint(1, size) for name, size in sizes.items()}


def random_widths(graph: Any, seed: int = 0, least: float = 0.0) -> Any:
    """Random widths, none below a share of the full ones."""
    generator = random.Random(seed)
    return graph.widths(
        {space.name: generator.randint(max(1, round(least * space.size)), space.size) for space in graph.spaces}
    )


def named(name: str, widths: dict[str, Any]) -> dict[str, Any]:
    """The hand-written names of a toy's widths in the words of its graph."""
    return {TOYS[name].SPACES[key]: value for key, value in widths.items()}


def supernet(name: str, training: bool = False) -> Any:
    """A fresh supernet of the case."""
    return dmcp.Supernet(case(name).model, case(name).graph).train(training)


def counted_macs(model: nn.Module, x: Tensor) -> int:
    """Multiply-adds of one sample by torch's own counter."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(model).eval()(x[:1])
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


def counted_params(model: nn.Module) -> int:
    """Numbers that are trained, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


@every_toy
def test_spaces_are_those_of_the_hand_written_net(name: str) -> None:
    found = {space.name: space.size for space in case(name).graph.spaces}
    assert found == named(name, TOYS[name].FULL)
    assert case(name).graph.unknown == {}


@everywhere
@both_modes
def test_i1_full_supernet_is_the_model(name: str, training: bool) -> None:
    model, net = copy.deepcopy(case(name).model).train(training), supernet(name, training)
    assert distance(net(case(name).x, net.hard(case(name).graph.full)), model(case(name).x)) < 1e-12
    for (key, ours), (_, theirs) in zip(net.model.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=key)


@every_toy
@both_modes
def test_i2_supernet_and_cut_are_the_narrow_net(name: str, training: bool) -> None:
    model, graph, x = case(name).model, case(name).graph, case(name).x
    full = copy.deepcopy(model).train(training)(x)
    for widths in draws(TOYS[name].FULL):
        narrow = TOYS[name].narrow(model, **{key: keep(k) for key, k in widths.items()}).train(training)
        chosen = graph.widths(named(name, widths))
        net = supernet(name, training)
        small = dmcp.cut(net.model, graph, chosen)
        assert type(small) is TOYS[name]
        assert small.training is training
        expected = narrow(x)
        assert distance(full, expected) > 0.1
        assert distance(small(x), expected) < 1e-10
        assert distance(net(x, net.hard(chosen)), expected) < 1e-10
        assert small.state_dict().keys() == narrow.state_dict().keys()
        for key, value in narrow.state_dict().items():  # after the pass: running statistics too
            torch.testing.assert_close(small.state_dict()[key], value, rtol=1e-10, atol=1e-12, msg=key)


@every_toy
def test_i2_any_channels_not_only_the_first(name: str) -> None:
    generator = random.Random(1)
    kept = {
        key: sorted(generator.sample(range(size), generator.randint(1, size))) for key, size in TOYS[name].FULL.items()
    }
    narrow = TOYS[name].narrow(case(name).model, **kept)
    small = dmcp.cut(case(name).model, case(name).graph, named(name, kept)).train()
    assert distance(small(case(name).x), narrow(case(name).x)) < 1e-10


@every_zoo
@both_modes
def test_i2_supernet_is_the_cut_model(name: str, training: bool) -> None:
    graph, x = case(name).graph, case(name).x
    net = supernet(name, training)
    full = leaves(copy.deepcopy(net.model)(x))
    widths = random_widths(graph, seed=training, least=0.0 if training else 0.4)
    small = dmcp.cut(net.model, graph, widths)
    gated, expected = leaves(net(x, net.hard(widths))), leaves(small(x))
    assert len(expected) == (3 if name == "googlenet" and training else 1)
    assert distance(gated, expected) < 1e-9
    assert distance(full, expected) > 0.1


@everywhere
def test_i3_full_costs_are_the_counted_ones(name: str) -> None:
    model, graph = case(name).model, case(name).graph
    assert graph.macs(graph.full) == graph.macs(None) == counted_macs(model, case(name).x)
    assert graph.params(graph.full) == graph.params(None) == counted_params(model)
    assert type(graph.macs(graph.full)) is type(graph.params(graph.full)) is int


@everywhere
def test_i4_costs_of_random_widths_are_the_counted_ones(name: str) -> None:
    model, graph, x = case(name).model, case(name).graph, case(name).x
    chosen = [random_widths(graph, seed=3)]
    if name in TOYS:
        chosen += [graph.widths({space.name: 1 for space in graph.spaces}), random_widths(graph, seed=4)]
    for widths in chosen:
        small = dmcp.cut(model, graph, widths)
        assert graph.macs(widths) == counted_macs(small, x)
        assert graph.params(widths) == counted_params(small)
        assert sum(layer.macs for layer in graph.layers(widths)) == graph.macs(widths)
        assert sum(layer.params for layer in graph.layers(widths)) == graph.params(widths)


@everywhere
def test_i4_many_structures_in_one_call(name: str) -> None:
    graph = case(name).graph
    chosen = [random_widths(graph, seed) for seed in range(17)]
    table = torch.stack([widths.tensor() for widths in chosen])
    for cost in (graph.macs, graph.params, graph.memory):
        counts = cost(table)
        assert counts.shape == (17,)
        assert not counts.is_floating_point()
        assert counts.tolist() == [cost(widths) for widths in chosen]
        torch.testing.assert_close(cost(table.double()), counts.double(), rtol=1e-12, atol=0)


@everywhere
def test_i4_gradient_is_the_finite_difference(name: str) -> None:
    graph, step = case(name).graph, 1e-3
    point = random_widths(graph, seed=5).tensor().double()
    nudge = step * torch.eye(len(point), dtype=torch.float64)
    for cost in (graph.macs, graph.params):
        table = point[None].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cost(table).sum(), table)
        slope = (cost(point + nudge) - cost(point - nudge)) / (2 * step)
        torch.testing.assert_close(gradient[0], slope, rtol=1e-5, atol=1e-6 * slope.max().item())
        assert (gradient >= 0).all()
    assert (gradient > 0).all()  # every space costs parameters, though not every one multiply-adds: GoogLeNet's heads


@everywhere
def test_i7_weights_and_alphas_divide_the_parameters(name: str) -> None:
    net = supernet(name)
    weights, alphas = {id(tensor) for tensor in net.weights()}, {id(tensor) for tensor in net.alphas()}
    assert len(weights) == len(net.weights()) == len(list(case(name).model.parameters()))
    assert len(alphas) == len(net.alphas()) > 0
    assert not weights & alphas
    assert weights | alphas == {id(tensor) for tensor in net.parameters()}


@everywhere
def test_i10_the_model_is_as_it_was(name: str) -> None:
    before, after = case(name).before, case(name).after
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == []


@everywhere
def test_i10_nothing_shares_memory_with_the_model(name: str) -> None:
    def memory(model: nn.Module) -> set[int]:
        return {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}

    for other in case(name).others:
        assert not memory(case(name).model) & memory(other)
    assert not memory(case(name).others[0]) & memory(case(name).others[1])


@everywhere
def test_i10_the_cut_model_is_plain(name: str) -> None:
    model, small = case(name).model, case(name).others[1]
    assert [type(module) for module in small.modules()] == [type(module) for module in model.modules()]
    assert not any(type(module).__module__.startswith("dmcp") for module in small.modules())
    assert small.state_dict().keys() == model.state_dict().keys()
    assert [module.training for module in small.modules()] == [module.training for module in model.modules()]


@every_toy
@both_modes
def test_i12_gradients_are_those_of_the_narrow_net_and_zero_elsewhere(name: str, training: bool) -> None:
    model, graph, x = case(name).model, case(name).graph, case(name).x
    for widths in draws(TOYS[name].FULL, many=2):
        kept = {key: keep(k) for key, k in widths.items()}
        narrow = TOYS[name].narrow(model, **kept).train(training)
        narrow(x).square().sum().backward()
        net = supernet(name, training)
        net(x, net.hard(graph.widths(named(name, widths)))).square().sum().backward()
        # A full net whose numbers are the gradients; cut by hand, it has to hold the narrow net's gradients.
        carrier = copy.deepcopy(model)
        with torch.no_grad():
            for target, source in zip(carrier.parameters(), net.model.parameters(), strict=True):
                target.copy_(source.grad)
        on = dict(TOYS[name].narrow(carrier, **kept).named_parameters())
        for key, parameter in narrow.named_parameters():
            torch.testing.assert_close(on[key].detach(), parameter.grad, rtol=1e-8, atol=1e-10, msg=key)
        # Numbers that the narrow net has no place for: marked by cutting a net of ones out of a net of zeros.
        for off in _dropped(name, model, kept, net.model):
            assert off.count_nonzero() == 0
        assert any(value.count_nonzero() for value in on.values())


def _dropped(name: str, model: nn.Module, kept: dict[str, Any], full: nn.Module) -> list[Tensor]:
    """The gradients of those numbers of the full net that its narrow one lacks."""
    numbered = copy.deepcopy(model)
    count = 1
    with torch.no_grad():
        for parameter in numbered.parameters():
            parameter.copy_(torch.arange(count, count + parameter.numel()).view_as(parameter))
            count += parameter.numel()
    there = torch.cat([parameter.flatten() for parameter in TOYS[name].narrow(numbered, **kept).parameters()])
    pairs = zip(numbered.parameters(), full.parameters(), strict=True)
    return [source.grad[~torch.isin(number, there)] for number, source in pairs]


@every_zoo
def test_i12_channels_that_are_off_get_no_gradient(name: str) -> None:
    graph, x = case(name).graph, case(name).x
    widths = random_widths(graph, seed=2)
    net = supernet(name, training=True)
    sum(leaf.square().sum() for leaf in leaves(net(x, net.hard(widths)))).backward()
    checked = alive = 0
    for space in graph.spaces:
        k = widths[space.name]
        for writer in space.writers:
            weight = dict(net.model.named_parameters()).get(f"{writer}.weight")
            if weight is None or len(weight) != space.size or k == space.size:
                continue  # writes more than this space, or keeps all of it
            assert weight.grad[k:].count_nonzero() == 0, (space.name, writer)
            alive += bool(weight.grad[:k].count_nonzero() > 0)  # a saturated squeeze-and-excite has none
            checked += 1
    assert checked > 5
    assert alive > 0.9 * checked
