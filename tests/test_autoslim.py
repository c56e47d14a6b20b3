"""AutoSlim: finds what is needed, stays inside the budget on real networks, and compares the trials that it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Batches, planted_problem, tiny_problem
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import densenet121, mobilenet_v2, resnet18

import dmcp
import dmcp.searching.search
from dmcp.budget import parse
from dmcp.compare.autoslim import AutoSlimConfig, prepare
from dmcp.compare.autoslim import find_autoslim as find
from dmcp.compare.problem import Choice, Problem
from dmcp.errors import BudgetError, DataError, StoppedError, TrainingError
from dmcp.runs import Run
from dmcp.searching.subnets import sample_gates
from dmcp.settings import Sampling
from dmcp.training import Event

SHORT = AutoSlimConfig(epochs=1, groups=3, subnets=1, batches=1)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run(problem: Problem, config: AutoSlimConfig) -> Choice:
    return find(problem, config, prepare(problem, config).state)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_needed_channels_stay(seed: int) -> None:
    problem = planted_problem("57%", seed)
    config = AutoSlimConfig(epochs=8)
    state = prepare(problem, config).state
    for per_saved, at_once in ((False, 1), (True, 1), (False, 2)):
        choice = find(problem, replace(config, per_saved=per_saved, at_once=at_once), state)
        choice.check(problem)
        if at_once == 1:
            assert dict(choice.widths) == {"needed": 8, "useless": 1}
    # here no widths use the budget to the tolerance: those that were found stay
    assert dict(find(planted_problem("60%", seed), config, state).widths) == {"needed": 8, "useless": 1}


@pytest.mark.parametrize(
    ("build", "at_once"),
    [
        pytest.param(resnet18, 4, marks=pytest.mark.slow),
        pytest.param(mobilenet_v2, 16, marks=pytest.mark.slow),
        pytest.param(densenet121, 60, marks=pytest.mark.slow),
    ],
)
def test_real_networks(build: Any, at_once: int) -> None:
    problem = tiny_problem(build(num_classes=10), align=2)
    before = snapshot(problem.model)
    choice = run(problem, replace(SHORT, at_once=at_once))
    choice.check(problem)
    full, floor = problem.graph.full, problem.floor
    assert all(floor[name] <= w and (w % 2 == 0 or w == full[name]) for name, w in choice.widths.items())
    assert choice.model is not None
    small = dmcp.cut(choice.model, problem.graph, choice.kept)
    assert small(problem.held.batches[0][0]).shape == (4, 10)  # type: ignore[attr-defined]
    assert same(before, problem.model.state_dict())


def test_same_seed_same_result_and_one_preparation_for_all_budgets() -> None:
    problem = planted_problem(epochs=2)
    first, second = (prepare(planted_problem(budget, epochs=2), SHORT) for budget in ("60%", "40%"))
    assert same(first.state, second.state)
    assert not same(first.state, prepare(replace(problem, seed=1), SHORT).state)
    one, other = (find(problem, SHORT, prepared.state) for prepared in (first, second))
    assert one.widths == other.widths
    assert one.model is not None and same(one.model.state_dict(), first.state)  # and the trials have left no trace


def test_two_limits_hold() -> None:
    problem = planted_problem()
    problem = replace(problem, budget=parse("70%,params:60%", problem.graph))
    choice = run(problem, replace(SHORT, groups=8))
    choice.check(problem)
    assert problem.graph.params(choice.widths) <= 0.6 * problem.graph.params()


def by_hand(problem: Problem, state: Any) -> tuple[list[int], int]:
    """The greedy way with networks that are really cut, one channel at a time, and how many of them were run."""
    graph, (x, labels) = problem.graph, problem.held.batches[0]  # type: ignore[attr-defined]
    model = dmcp.cut(problem.model, graph, graph.full)
    model.load_state_dict(state)
    widths, runs = [8, 8], 0
    while graph.macs(graph.widths(widths)) > problem.budget.limits[0].target:
        losses = {}
        for trial in ((widths[0] - 1, widths[1]), (widths[0], widths[1] - 1)):
            if min(trial):
                small = dmcp.cut(model, graph, graph.widths(trial)).train()
                losses[trial] = F.cross_entropy(small(x), labels).item()
        runs += 1 + len(losses)
        widths = list(min(losses, key=losses.__getitem__))
    return widths, runs


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_way_is_that_of_networks_that_are_cut(seed: int) -> None:
    problem = planted_problem("45%", seed)
    config = AutoSlimConfig(epochs=1, groups=8, batches=1)
    state = prepare(problem, config).state if seed else problem.model.state_dict()  # an untrained one chooses otherwise
    state = {name: tensor + 9 if "running" in name else tensor for name, tensor in state.items()}  # of no importance
    choice = find(problem, config, state)
    widths, runs = by_hand(problem, state)
    assert list(choice.widths.values()) == widths
    assert choice.sample_passes == runs * 64


def test_progress_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    drawn: list[Any] = []

    def spy(net: Any, chains: Any, sampling: Sampling, count: int, *rest: Any) -> list[Tensor]:
        drawn.append((sampling, count))
        return sample_gates(net, chains, sampling, count, *rest)

    monkeypatch.setattr(dmcp.searching.search, "sample_gates", spy)
    problem = planted_problem(tell=lambda stage, record: told.append((stage, record)))
    prepared = prepare(problem, replace(SHORT, epochs=2))
    assert prepared.sample_passes == 20 * 64 * 2 * 3
    assert drawn == [(Sampling.UNIFORM, 1)] * 40
    assert [record.step for stage, record in told if stage == "autoslim"] == list(range(40))
    told.clear()
    find(problem, SHORT, prepared.state)
    assert told and all(isinstance(value, int | float) for _, record in told for value in record.values())


def test_a_stopped_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Its records are read back from the log, as a cell keeps it."""
    config = replace(SHORT, epochs=2)
    expected, run = prepare(planted_problem(), config), Run(tmp_path)

    def problem(steps: int) -> Problem:
        left = iter(range(steps))
        return planted_problem(
            tell=lambda stage, record: run.on_event(Event(stage, 0, record)),
            keep=lambda stage: run.checkpointer(
                stage, {}, every_steps=7, stop_requested=lambda: next(left, None) is None
            ),
        )

    with pytest.raises(StoppedError):
        prepare(problem(23), config)
    assert same(prepare(problem(10**6), config).state, expected.state)


@pytest.mark.parametrize(
    "wrong",
    ["epochs=0", "groups=1", "subnets=-1", "batches=0.5", "at_once=0", "lr_share=0", "lr_share=nan", "distil=1"],
)
def test_settings_that_cannot_be(wrong: str) -> None:
    name, value = wrong.split("=")
    number = float(value)
    with pytest.raises(TrainingError, match=f"^{name} must be"):
        AutoSlimConfig(**{name: int(number) if number.is_integer() else number})  # type: ignore[arg-type]


def test_bad_input_is_one_sentence() -> None:
    problem = planted_problem()
    state = problem.model.state_dict()
    with pytest.raises(TrainingError, match=r"give state=prepare"):
        find(problem, SHORT)
    with pytest.raises(TrainingError, match="not one of this network"):
        find(problem, SHORT, {"needed.weight": torch.zeros(1)})
    with pytest.raises(DataError, match="nothing to judge structures by"):
        find(replace(problem, held=Batches([])), SHORT, state)
    with pytest.raises(BudgetError, match="less than the floor"):
        find(replace(problem, budget=parse("1%", problem.graph)), SHORT, state)
    with pytest.raises(TrainingError, match="smaller lr_share"):
        find(problem, SHORT, {name: tensor * float("nan") for name, tensor in state.items()})
