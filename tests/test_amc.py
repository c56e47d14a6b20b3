"""AMC, and the agent that it searches with."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from planted import heard, planted_problem, tiny_problem
from torch import Tensor
from torchvision.models import resnet18

import dmcp
from dmcp.batches import generator
from dmcp.compare.amc import Agent, AmcConfig, DdpgConfig, _Course, truncated_normal
from dmcp.compare.amc import find_amc as find
from dmcp.compare.problem import Problem
from dmcp.importance import magnitude

SHORT = AmcConfig(warmup=2, episodes=2, agent=DdpgConfig(hidden=8))
QUICK = DdpgConfig(hidden=32, actor_lr=1e-3, critic_lr=1e-2)


def trained(problem: Problem) -> dict[str, Tensor]:
    """The state dict of an ordinarily trained network."""
    model = copy.deepcopy(problem.model)
    dmcp.train(model, problem.loader, replace(problem.recipe, epochs=8))
    return model.state_dict()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_planted_truth_is_found_and_learned(seed: int) -> None:
    problem, log = heard(planted_problem(seed=seed))
    choice = find(problem, AmcConfig(warmup=20, episodes=100, agent=QUICK), trained(problem))
    assert dict(choice.widths) == {"needed": 8, "useless": 1}
    rewards = [record["reward"] for record in log]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:20]) / 20 + 0.1  # it is not only luck of the draw
    assert log[-1]["best"] == max(rewards) and log[-1].keys() == {"episode", "reward", "best", "macs"}
    assert 256 * len(set(rewards)) <= choice.sample_passes <= 256 * 8  # there are 8 structures, each judged once


def test_model_is_the_trained_one_with_the_strongest_channels_first() -> None:
    problem = tiny_problem(resnet18(num_classes=10))
    state = {name: tensor + 0.01 for name, tensor in problem.model.state_dict().items()}
    model = find(problem, SHORT, state).model
    assert model is not None
    for space in problem.graph.spaces:
        norm = magnitude(model, problem.graph, space)
        assert norm is not None and bool((norm.diff() <= 0).all())
    same = copy.deepcopy(problem.model)
    same.load_state_dict(state)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(x), same.eval()(x), rtol=1e-3, atol=1e-3)  # statistics too are untouched


def test_reward_is_the_metric_of_the_cut_network_with_batch_statistics() -> None:
    problem, log = heard(planted_problem())
    choice = find(problem, SHORT, trained(problem))
    assert choice.model is not None
    small = dmcp.cut(choice.model, problem.graph, choice.kept).train()
    right = sum(dmcp.losses.top1(small(x), (x, labels))[0].item() for x, labels in problem.held_out)
    assert log[-1]["best"] == pytest.approx(right / sum(labels.numel() for _, labels in problem.held_out), abs=2e-3)


@pytest.mark.parametrize("budget", ["30%", "params:40%", "60%,params:35%"])
def test_every_walk_ends_inside_the_budget(budget: str) -> None:
    problem = tiny_problem(resnet18(num_classes=10), budget, align=8)
    course = _Course(problem)
    agent = Agent(course.fixed.shape[1] + 3, DdpgConfig(hidden=8), 0)
    for _ in range(5):
        widths = course.walk(agent, 0.5)
        assert 0.95 <= problem.shares(widths[None]).item() <= 1
        assert bool((widths >= problem.min_widths.tensor()).all()) and not bool((widths % 8).any())
        states = course.states(widths, torch.arange(len(widths)))
        assert bool((states >= 0).all()) and bool((states <= 1).all())
        assert bool((states[:, -3].diff() >= 0).all())  # what has been saved only grows


def test_agent_sees_that_an_early_step_pays_later() -> None:
    agent, draw = Agent(2, QUICK, 0), generator(6)
    for _ in range(600):  # what was done at the first step is seen at the second; only both together count
        first, second = torch.rand(2, generator=draw).tolist()
        states = torch.tensor([[0.0, 0.0], [1.0, first]])
        agent.remember(states, torch.tensor([first, second]), first * second)
    agent.learn(300)
    assert agent.act(torch.tensor([0.0, 0.0])) > 0.8 and agent.act(torch.tensor([1.0, 0.9])) > 0.8


def test_truncated_normal() -> None:
    chance = torch.rand(100_000, generator=generator(0), dtype=torch.float64)
    drawn = truncated_normal(0.5, 0.1, 0.2, 1.0, chance)
    assert drawn.mean().item() == pytest.approx(0.5, abs=2e-3) and drawn.std().item() == pytest.approx(0.1, abs=2e-3)
    wide = truncated_normal(0.0, 50.0, 0.2, 1.0, chance)  # flat
    assert wide.min() >= 0.2 and wide.max() <= 1 and wide.mean().item() == pytest.approx(0.6, abs=5e-3)
    assert bool((truncated_normal(0.1, 1e-6, 0.3, 1.0, chance) - 0.3 < 1e-4).all())
