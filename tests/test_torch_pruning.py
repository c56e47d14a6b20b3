"""The package torch-pruning as a peer: what it removes is what we cut out, and the budget holds."""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import Batches, planted_problem, tiny_problem
from torch import nn
from torchvision.models import densenet121, mobilenet_v2, resnet18

import dmcp
from dmcp.compare import baselines
from dmcp.compare.baselines import TorchPruningConfig
from dmcp.compare.baselines import find_torch_pruning as find
from dmcp.errors import BudgetError, DataError, DmcpError, TrainingError
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


def small(problem: Any, choice: Any) -> nn.Module:
    return dmcp.cut(choice.model, problem.graph, choice.kept)


@needs_it
@pytest.mark.parametrize(
    "build", [resnet18, *(pytest.param(it, marks=pytest.mark.slow) for it in (mobilenet_v2, densenet121))]
)
def test_real_networks_end_inside_the_budget(build: Any) -> None:
    torch.manual_seed(0)
    model = varied(build(num_classes=10))
    problem = tiny_problem(model)
    before = copy.deepcopy(model.state_dict())
    choice = find(problem, TorchPruningConfig(steps=4 if build is densenet121 else 20))
    choice.check(problem)
    assert {name: len(kept) for name, kept in choice.kept.items()} == choice.widths
    assert (
        len({width / space.size for width, space in zip(choice.widths.values(), problem.graph.spaces, strict=True)}) > 3
    )
    assert small(problem, choice)(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


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
    pruner = baselines._pruner(baselines._package(), config, pruned, graph, x)
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
    for normalise in (True, False):
        choice = find(problem, TorchPruningConfig(normalise=normalise), model.state_dict())
        choice.check(problem)
        assert choice.widths["needed"] > choice.widths["useless"]
        assert torch.equal(choice.model.needed.weight, model.needed.weight)  # chosen in the trained network
    assert choice.widths == {"needed": 8, "useless": 1}
    again = find(problem, TorchPruningConfig(normalise=False), model.state_dict())
    assert again.kept == choice.kept
    apart = find(problem, TorchPruningConfig(global_pruning=False), model.state_dict())
    assert abs(apart.widths["needed"] - apart.widths["useless"]) <= 1


@needs_it
def test_limits_floor_and_multiples_are_kept() -> None:
    torch.manual_seed(0)
    told: list[Any] = []
    problem = tiny_problem(
        varied(resnet18(num_classes=10)), "50%,params:30%", align=8, tell=lambda stage, record: told.append(record)
    )
    floor = problem.graph.widths([space.size // 4 for space in problem.graph.spaces])
    choice = find(replace(problem, floor=floor), TorchPruningConfig(steps=20))
    choice.check(problem)
    assert all(width % 8 == 0 and width >= floor[name] for name, width in choice.widths.items())
    assert [record["step"] for record in told] == list(range(len(told)))
    assert told[-1]["share"] <= 1 < told[-2]["share"]  # it stops at the budget


@needs_it
def test_what_cannot_be_pruned_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, config = tiny_problem(resnet18(num_classes=10)), TorchPruningConfig(steps=2)
    with pytest.raises(TrainingError, match="give the state dict of the same model"):
        find(problem, config, {"conv1.weight": torch.zeros(1)})
    with pytest.raises(BudgetError, match="less than the floor costs"):
        find(replace(problem, floor=problem.graph.full), config)
    with pytest.raises(DataError, match="no held-out batches"):
        find(replace(problem, held=Batches([])), config)
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


@pytest.mark.parametrize(
    "wrong", [{"norm": 3}, {"max_pruning_ratio": 0.0}, {"max_pruning_ratio": 1.5}, {"steps": 0}, {"steps": 2.0}]
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=f"{next(iter(wrong))} must be"):
        TorchPruningConfig(**wrong)
