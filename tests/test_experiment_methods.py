"""The methods in experiments/methods: they find what is planted, and run in one command."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from commands import compare, table_cells
from planted import SIGNS, WEAK, heard, planted_problem, residual_problem, shrunk, weak_problem
from torch import Tensor, nn
from torchvision.models import mobilenet_v2, resnet18

import dmcp
from dmcp.compare.methods import DmcpConfig, choose, find_method
from experiments.methods import peer
from experiments.methods.amc import AmcConfig, DdpgConfig
from experiments.methods.metapruning import MetaPruningConfig
from experiments.methods.peer import TorchPruningConfig
from experiments.methods.soft import SoftConfig, fpgm, prune_softly, sfp

pytestmark = pytest.mark.usefixtures("quick_commands")

AMC, META = "experiments.methods.amc:amc", "experiments.methods.metapruning:metapruning"
DIRECT, SFP = "experiments.methods.direct:direct", "experiments.methods.soft:sfp"
AGENT = DdpgConfig(hidden=32, actor_lr=1e-3, critic_lr=1e-2)
CONFIGS: dict[str, Any] = {
    AMC: AmcConfig(warmup=20, episodes=100, agent=AGENT),
    META: MetaPruningConfig(hidden=8, population=8, generations=2, parents=2, batches=4),
}


@pytest.mark.parametrize("name", [AMC, META])
def test_planted_truth_is_found(name: str) -> None:
    problem, log = heard(planted_problem(epochs=15))
    prepared = find_method(name).prepare(problem, CONFIGS[name])  # type: ignore[misc]
    choice = choose(name, problem, CONFIGS[name], prepared.state)
    assert dict(choice.widths) == {"needed": 8, "useless": 1} and prepared.sample_passes == 15 * 20 * 64
    best = [record["best"] for record in log if isinstance(record, dict)]
    assert best == sorted(best) and best[-1] > 0.9
    if name == AMC:  # the reward is the metric of the cut network with the statistics of the batch
        assert choice.model is not None
        small = dmcp.cut(choice.model, problem.graph, choice.kept).train()
        right = sum(dmcp.training.losses.top1(small(x), (x, labels))[0].item() for x, labels in problem.held_out)
        assert best[-1] == pytest.approx(right / sum(labels.numel() for _, labels in problem.held_out), abs=2e-3)


def test_direct_sampling() -> None:
    choice = choose(DIRECT, planted_problem(epochs=6), DmcpConfig(epochs=6))
    assert choice.widths["useless"] < choice.widths["needed"] and choice.sample_passes > 0


def midst(weight: Tensor) -> Tensor:
    """Filters in the midst of the others, though larger than some of them: by its norm none would go."""
    weight += 5  # norms say little now, distances are as before
    weight[0] = 3  # small, but far from all others
    return weight[[i for i in range(SIGNS) if i not in (0, *WEAK)]].mean(dim=0).expand(len(WEAK), -1, -1, -1)


@pytest.mark.parametrize(("method", "filters", "go"), [(sfp, shrunk, True), (fpgm, midst, True), (sfp, midst, False)])
def test_soft_pruning_cuts_what_it_has_zeroed(method: Any, filters: Any, go: bool) -> None:
    problem, state = weak_problem(filters)
    problem = replace(problem, recipe=replace(problem.recipe, epochs=1, lr=1e-4, warmup_lr=1e-4))
    choice = method.find(problem, SoftConfig(), state)
    wanted = [i for i in range(SIGNS) if i not in WEAK]
    assert all((list(choice.kept[name]) == wanted) is go for name in choice.widths)
    assert choice.widths == problem.uniform() and choice.sample_passes == 20 * 64 + 4 * 64

    problem = residual_problem()
    choice = method.find(problem, SoftConfig())
    model = choice.model.double().eval()
    cut, x = dmcp.cut(model, problem.graph, choice.kept), problem.held_out[0][0].double()
    torch.testing.assert_close(model(x), cut(x))
    torch.testing.assert_close(model.train()(x), cut.train()(x))


def test_zeroed_filters_are_trained_on_but_do_not_outgrow_the_others() -> None:
    """Epsilon alone is left under the root of a BatchNorm there: at the full gradient they become the largest."""
    problem, growth = planted_problem(epochs=3), list[float]()
    seen: list[Tensor] = []  # norms in two spaces after three epochs
    for regrowth in (0.01, 1.0):
        seen.clear()
        prune_softly(lambda it: seen.append(it.norm(dim=1)) or seen[-1], problem, SoftConfig(regrowth=regrowth))
        assert len(seen) == 2 * 3 and all((norms > 0).all() for norms in seen)
        growth.append((torch.stack(seen[2:]).max() / torch.stack(seen[:2]).max()).item())
    assert growth[0] < 1.5 and growth[1] > 4


@pytest.mark.usefixtures("runs_in_this_process")
def test_they_run_in_one_command(capfd: pytest.CaptureFixture[str]) -> None:
    quick = ["amc.warmup=1", "amc.episodes=2", "amc.agent={'hidden': 8}", "metapruning.hidden=1"]
    quick += ["metapruning.population=3", "metapruning.generations=1", "metapruning.epochs=1"]
    words = [word for text in quick for word in ("--set", text)]
    assert compare("--methods", f"{SFP},{AMC},{META}", *words, "--set", "sfp.regrowth=1", "--no-unpruned") == 0
    head, *lines = table_cells(capfd.readouterr().out)
    rows = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    assert sorted(rows) == ["amc", "metapruning", "sfp", "uniform"]
    assert rows["amc"]["its own training, %"].endswith("fine-tuned")
    assert rows["sfp"]["its own training, %"].endswith("as trained")
    assert rows["sfp"]["accuracy in %, same recipe"] == "= uniform"


@pytest.mark.parametrize("build", [resnet18, mobilenet_v2])
def test_what_we_cut_out_is_what_torch_pruning_leaves(build: Any) -> None:
    package = pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = build(num_classes=10).eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):  # no two channels are the same to a ranking
            part.weight.data = 0.5 + torch.rand(part.num_features)
    graph, x = dmcp.trace(model, torch.zeros(2, 3, 32, 32)), torch.randn(3, 3, 32, 32)
    for config in (TorchPruningConfig(steps=10), TorchPruningConfig(steps=10, global_pruning=False)):
        pruned, ledger = copy.deepcopy(model), peer._Ledger(model, graph, config.steps)
        pruner = peer._pruner(package, config, pruned, graph, x)
        for step in range(4):
            ledger.follow(pruner, step)
        widths = graph.widths(ledger.widths())
        assert 0.1 < graph.macs(widths) / graph.macs() < 0.9
        ours = dmcp.cut(model, graph, {name: ledger.strongest(name, width) for name, width in widths.items()})
        assert [p.shape for p in ours.parameters()] == [p.shape for p in pruned.parameters()]
        assert torch.allclose(ours(x), pruned(x), atol=1e-5)


def test_torch_pruning_keeps_the_needed_channels() -> None:
    pytest.importorskip("torch_pruning")
    problem = planted_problem()
    model = copy.deepcopy(problem.model)
    dmcp.train(model, problem.loader, problem.recipe)
    for how in ({}, {"normalize": False}, {"global_pruning": False}):
        config = TorchPruningConfig(**how)
        choice = choose("experiments.methods.peer:torch_pruning", problem, config, model.state_dict())
        gap = choice.widths["needed"] - choice.widths["useless"]
        assert abs(gap) <= 1 if "global_pruning" in how else gap == 7 if how else gap > 0
        assert torch.equal(choice.model.needed.weight, model.needed.weight)  # chosen in the trained network
