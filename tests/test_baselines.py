"""The package torch-pruning as a peer: what it removes is what we cut out."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import Batches, heard, planted_problem, tiny_problem
from torch import nn
from torchvision.models import mobilenet_v2, resnet18

import dmcp
from dmcp.compare import baselines
from dmcp.compare.baselines import TorchPruningConfig
from dmcp.compare.baselines import find_torch_pruning as find
from dmcp.errors import DataError, DmcpError, TrainingError
from dmcp.training import train

needs_it = pytest.mark.skipif(
    importlib.util.find_spec("torch_pruning") is None,
    reason="THE PEER torch-pruning IS NOT TESTED: pip install torch-pruning",
)


def varied(model: nn.Module) -> nn.Module:
    """The network with channels of different strength, so that no two are the same to a ranking."""
    draw = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data = 0.5 + torch.rand(module.num_features, generator=draw)
    return model


@needs_it
@pytest.mark.parametrize("global_pruning", [True, False])
@pytest.mark.parametrize("build", [resnet18, mobilenet_v2])
def test_what_we_cut_out_is_what_the_package_leaves(build: Any, global_pruning: bool) -> None:
    torch.manual_seed(0)
    model = varied(build(num_classes=10)).eval()
    graph, x = dmcp.trace(model, torch.zeros(2, 3, 32, 32)), torch.randn(3, 3, 32, 32)
    config = TorchPruningConfig(steps=10, global_pruning=global_pruning)
    pruned = copy.deepcopy(model)
    ledger = baselines._Ledger(model, graph, config.steps)
    pruner = baselines._pruner(importlib.import_module("torch_pruning"), config, pruned, graph, x)
    for step in range(4):
        ledger.follow(pruner, step)
    widths = graph.widths(ledger.widths())
    assert 0.1 < graph.macs(widths) / graph.macs() < 0.9
    ours = dmcp.cut(model, graph, {name: ledger.strongest(name, width) for name, width in widths.items()})
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in pruned.named_parameters()
    }
    assert torch.allclose(ours(x), pruned(x), atol=1e-5)


@needs_it
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_needed_channels_stay(seed: int) -> None:
    problem = planted_problem(seed=seed)
    model = copy.deepcopy(problem.model)
    train(model, problem.loader, problem.recipe)
    for normalize in (True, False):
        choice = find(problem, TorchPruningConfig(normalize=normalize), model.state_dict())
        choice.check(problem)
        assert choice.widths["needed"] > choice.widths["useless"]
        assert torch.equal(choice.model.needed.weight, model.needed.weight)  # chosen in the trained network
    assert choice.widths == {"needed": 8, "useless": 1}
    again = find(problem, TorchPruningConfig(normalize=False), model.state_dict())
    assert again.kept == choice.kept
    apart = find(problem, TorchPruningConfig(global_pruning=False), model.state_dict())
    assert abs(apart.widths["needed"] - apart.widths["useless"]) <= 1


@needs_it
def test_limits_bounds_and_multiples_are_kept() -> None:
    torch.manual_seed(0)
    problem, told = heard(tiny_problem(varied(resnet18(num_classes=10)), "50%,params:30%", align=8))
    low = problem.graph.widths([space.size // 4 for space in problem.graph.spaces])
    choice = find(replace(problem, min_widths=low), TorchPruningConfig(steps=20))
    choice.check(problem)
    assert all(width % 8 == 0 and width >= low[name] for name, width in choice.widths.items())
    assert [record["step"] for record in told] == list(range(len(told)))
    assert told[-1]["share"] <= 1 < told[-2]["share"]  # it stops at the budget


@needs_it
def test_what_cannot_be_pruned_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, config = tiny_problem(resnet18(num_classes=10)), TorchPruningConfig(steps=2)
    with pytest.raises(DataError, match="no held-out batches"):
        find(replace(problem, held_out=Batches([])), config)
    with monkeypatch.context() as patch:
        patch.setattr(baselines._Ledger, "follow", lambda *_: None)
        with pytest.raises(TrainingError, match="finds no channels that it can prune"):
            find(problem, config)
    monkeypatch.setattr("torch_pruning.pruner.BasePruner.step", lambda *_, **__: 1 / 0)
    with pytest.raises(TrainingError, match="cannot prune this network, use another method: ZeroDivisionError"):
        find(problem, config)


def test_without_the_package_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(DmcpError, match="pip install torch-pruning"):
        find(planted_problem(), TorchPruningConfig())
