"""Invariants I1 to I4, I7, I10 and I12 of DESIGN.md: one contract for every net, in float64.

The oracles know nothing of layouts: narrow nets written by hand in nets.py, torch's flop counter, finite differences,
and photographs of the model's bits. A net of torchvision has no narrow version by hand; there the cut network is it.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from nets import NETS, counted_macs, distance, keep, randomise, sample
from torch import Tensor, nn

import dmcp
from dmcp.searching.supernet import Narrow
from dmcp.tracing.modules import tensors_in

TOYS = {net.__name__: net for net in NETS}
ZOO = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5")
SLOW = ("mobilenet_v2", "densenet121", "googlenet", "efficientnet_b0", "regnet_y_400mf")  # `make zoo` has them, too
everywhere = pytest.mark.parametrize("name", [*TOYS, *ZOO, *(pytest.param(it, marks=pytest.mark.slow) for it in SLOW)])
every_toy = pytest.mark.parametrize("name", TOYS)
both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model with random numbers everywhere and nothing random in its forward."""
    if name in TOYS:
        return randomise(TOYS[name](**TOYS[name].FULL)), sample(TOYS[name].SHAPE)
    more = {"aux_logits": True, "init_weights": False} if name == "googlenet" else {}
    model = randomise(torchvision.models.get_model(name, weights=None, **more))
    for module in model.modules():
        if isinstance(module, nn.Dropout | torchvision.ops.StochasticDepth):
            module.p = 0.0
    return model, sample((3, 64, 64), batch=3)


@functools.cache
def traced(name: str) -> tuple[nn.Module, Any, Tensor]:
    """A model that no test changes, its graph and a batch."""
    model, x = build(name)
    return model, dmcp.trace(model, x), x


def supernet(name: str, training: bool = False) -> Any:
    return dmcp.Supernet(*traced(name)[:2]).double().train(training)


def some_widths(name: str) -> Iterator[dict[str, int]]:
    """All 1, all but one channel, and random widths; of a large net random ones only, not too narrow."""
    sizes, dice = {space.name: space.size for space in traced(name)[1].spaces}, random.Random(0)
    if name in TOYS:
        yield dict.fromkeys(sizes, 1)
        yield {space: max(1, size - 1) for space, size in sizes.items()}
    for _ in range(3 if name in TOYS else 1):
        low = 0.0 if name in TOYS else 0.4
        yield {space: dice.randint(max(1, round(low * size)), size) for space, size in sizes.items()}


def by_hand(name: str, model: nn.Module, widths: dict[str, int]) -> nn.Module:
    """The narrow net written by hand, with the first channels of the model's."""
    kept = {key: keep(widths[space]) for key, space in TOYS[name].SPACES.items()}
    return TOYS[name].narrow(model, **kept)


def gradients(output: Any, model: nn.Module) -> list[Tensor]:
    """Gradients of all parameters, zeros where there is none."""
    total = sum(((leaf - 0.1).square().sum() for leaf in tensors_in(output)), torch.zeros(()))
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def put_into_full(name: str, model: nn.Module, small: nn.Module, values: list[Tensor], widths: Any) -> list[Tensor]:
    """Numbers of the small network at their places in the full one, NaN elsewhere."""
    numbered, count = copy.deepcopy(model), 1
    with torch.no_grad():
        for parameter in numbered.parameters():
            parameter.copy_(torch.arange(count, count + parameter.numel()).view_as(parameter))
            count += parameter.numel()
    cut = by_hand(name, numbered, widths) if name in TOYS else dmcp.cut(numbered, traced(name)[1], widths)
    flat = torch.full((count,), torch.nan, dtype=torch.float64)
    for places, value in zip(cut.parameters(), values, strict=True):
        flat[places.detach().long()] = value
    return [flat[number.detach().long()] for number in numbered.parameters()]


@everywhere
@both_modes
def test_contract(name: str, training: bool) -> None:
    """I1, I2, I4, I12: gated, cut and really narrow are the narrow net: outputs, statistics, gradients, costs."""
    model, graph, x = traced(name)
    net, full = supernet(name, training), copy.deepcopy(model).train(training)
    whole = full(x)
    assert distance(net(x, net.hard(graph.full)), whole) < 1e-12
    for (key, ours), theirs in zip(net.model.named_buffers(), full.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=key)
    for widths in some_widths(name):
        net = supernet(name, training)
        chosen = graph.widths(widths)
        small = dmcp.cut(net.model, graph, chosen)
        oracle = by_hand(name, model, widths).train(training) if name in TOYS else small
        wanted = oracle(x)
        expected = put_into_full(name, model, oracle, gradients(wanted, oracle), widths)
        scale = max(value.nan_to_num().abs().max() for value in expected)
        assert distance(whole, wanted) > 0.1 and scale > 0
        if name in TOYS:
            assert repr(small) == repr(oracle) and small.training is training  # channels and groups of layers, too
            assert distance(small(x), wanted) < 1e-10
            for key, value in oracle.state_dict().items():  # after the pass: running statistics, too
                torch.testing.assert_close(small.state_dict()[key], value, rtol=1e-10, atol=1e-12, msg=key)
        narrow = [Narrow(net, chosen, align) for align in ((1, 4, 8) if name in TOYS else (8,))]
        for run in (partial(net, gates=net.hard(chosen)), *narrow):
            output = run(x)
            assert distance(output, wanted) < 1e-8
            for found, value in zip(gradients(output, net.model), expected, strict=True):
                assert (found - value).nan_to_num().abs().max() < 1e-8 * scale
                assert not found[value.isnan()].any()  # what is off gets exactly zero
        assert graph.macs(chosen) == counted_macs(small, x)
        assert graph.params(chosen) == sum(p.numel() for p in small.parameters())
        assert sum(layer.macs for layer in graph.layers(chosen)) == graph.macs(chosen)
        assert sum(layer.params for layer in graph.layers(chosen)) == graph.params(chosen)


@every_toy
def test_spaces_and_any_kept_channels(name: str) -> None:
    """Spaces are those of the hand-written net; I2 for any channels, not only the first."""
    (model, graph, x), toy, dice = traced(name), TOYS[name], random.Random(1)
    assert {space.name: space.size for space in graph.spaces} == {toy.SPACES[key]: n for key, n in toy.FULL.items()}
    assert graph.unknown == {}
    kept = {key: sorted(dice.sample(range(size), dice.randint(1, size))) for key, size in toy.FULL.items()}
    small = dmcp.cut(model, graph, {toy.SPACES[key]: rows for key, rows in kept.items()}).train()
    assert distance(small(x), toy.narrow(model, **kept).train()(x)) < 1e-10


@everywhere
def test_costs_of_the_full_network_and_of_many_widths(name: str) -> None:
    """I3, I4: full costs are counted; many widths at once are exact ints; the gradient is the finite difference."""
    model, graph, x = traced(name)
    assert graph.macs(graph.full) == graph.macs(None) == counted_macs(model, x)
    assert graph.params(graph.full) == graph.params(None) == sum(p.numel() for p in model.parameters())
    dice = torch.Generator().manual_seed(0)
    sizes = graph.full.tensor()
    table = (torch.rand(17, len(sizes), generator=dice) * sizes).long() + 1
    for cost in (graph.macs, graph.params, graph.memory, graph.traffic):
        counts = cost(table)
        assert counts.tolist() == [cost(graph.widths(row)) for row in table] and not counts.is_floating_point()
        torch.testing.assert_close(cost(table.double()), counts.double(), rtol=1e-12, atol=0)
    point, nudge = (table[:1].double() - 0.5).clamp(min=1.5), 1e-3 * torch.eye(len(sizes), dtype=torch.float64)
    for cost in (graph.macs, graph.traffic, graph.params):
        moving = point.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cost(moving).sum(), moving)
        difference = (cost(point + nudge) - cost(point - nudge)) / 2e-3
        torch.testing.assert_close(gradient[0], difference, rtol=1e-5, atol=1e-6 * difference.max().item())
    assert (gradient > 0).all()  # every space costs parameters, though not every one MACs: GoogLeNet's heads


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


@everywhere
def test_the_model_is_as_it_was_and_results_are_their_own(name: str) -> None:
    """I7 and I10: hooks, grads, modes and bits of the model stay; nothing shares its memory; the cut one is plain."""
    model, x = build(name)
    parts, parameters = list(model.train().modules()), list(model.parameters())
    parts[1].register_forward_hook(lambda module, inputs, output: None)
    parts[-1].register_forward_pre_hook(lambda module, inputs: None)
    parameters[0].grad = torch.randn_like(parameters[0])
    parameters[1].requires_grad_(False)
    parts[2].eval()
    before = photograph(model)
    graph = dmcp.trace(model, x)
    net = dmcp.Supernet(model, graph)
    small = dmcp.cut(model, graph, {space.name: max(1, space.size // 2) for space in graph.spaces})
    after = photograph(model)
    assert before.keys() == after.keys() and [key for key in before if before[key] != after[key]] == []

    memories = [{t.data_ptr() for t in [*it.parameters(), *it.buffers()]} for it in (model, net, small)]
    assert not (memories[0] & memories[1] or memories[0] & memories[2] or memories[1] & memories[2])
    for result in (net.model, small):
        assert [type(it) for it in result.modules()] == [type(it) for it in parts]
        assert [it.training for it in result.modules()] == [it.training for it in parts]
        assert [it.requires_grad for it in result.parameters()] == [it.requires_grad for it in parameters]
        assert result.state_dict().keys() == model.state_dict().keys()
    weights, alphas = {id(tensor) for tensor in net.weights()}, {id(tensor) for tensor in net.alphas()}
    assert len(weights) == len(parameters) and alphas and not weights & alphas
    assert weights | alphas == {id(tensor) for tensor in net.parameters()}
