"""A small agent that learns to choose one number per step of a walk: deep deterministic policy gradient.

After T. P. Lillicrap et al., "Continuous control with deep reinforcement learning" (2016), in the form that Y. He et
al. give it in "AMC" (2018): every step of a walk has the reward of the whole walk, less a moving average of earlier
rewards, nothing is discounted, and noise is drawn from a normal distribution truncated to the allowed actions. One
thing differs: the critic is given the action together with the state, not at its second layer. The agent lives on the
CPU, where so small networks are fastest, and draws from its own generator.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.batches import generator
from dmcp.errors import TrainingError

_SMALL = 3e-3  # weights of the last layers at the start: first actions are near the middle, first values near zero


@dataclass(frozen=True, kw_only=True)
class DdpgConfig:
    """How the agent learns; the defaults are those of the two papers."""

    hidden: int = 300  # units of each of the two hidden layers, of actor and critic
    actor_lr: float = 1e-4  # of Adam
    critic_lr: float = 1e-3  # of Adam
    soft: float = 0.01  # share of the learned networks that goes into the slow ones at each update
    discount: float = 1.0  # of the value of the next step
    memory: int = 2000  # steps of walks that are remembered
    batch: int = 64  # remembered steps in one update
    baseline: float = 0.95  # share of the old moving average of rewards in the new one

    def __post_init__(self) -> None:
        for name in ("hidden", "memory", "batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise TrainingError(f"{name} must be an int of at least 1, not {value!r}.")
        if not 0 < self.actor_lr < math.inf or not 0 < self.critic_lr < math.inf:
            raise TrainingError(
                f"actor_lr and critic_lr must be positive numbers, not {self.actor_lr} and {self.critic_lr}."
            )
        if not 0 < self.soft <= 1 or not 0 <= self.discount <= 1 or not 0 <= self.baseline < 1:
            raise TrainingError(
                f"soft must lie in (0, 1], discount in [0, 1] and baseline in [0, 1), not {self.soft}, {self.discount} "
                f"and {self.baseline}."
            )


def truncated_normal(middle: float, spread: float, low: float, high: float, chance: Tensor) -> Tensor:
    """Numbers from low to high, normal around the middle, by inverse CDF of uniform numbers; any shape."""
    middle = min(max(middle, low), high)  # far outside, the tail would have no digits left
    if not spread:
        return torch.full_like(chance, middle)
    ends = torch.special.ndtr((chance.new_tensor([low, high]) - middle) / spread)
    quantiles: Tensor = torch.special.ndtri(ends[0] + chance * (ends[1] - ends[0]))
    return (middle + spread * quantiles).clamp(low, high)


class Agent:
    """Actor and critic, their slow copies, and the steps that they learn from."""

    def __init__(self, features: int, config: DdpgConfig, seed: int) -> None:
        self.config = config
        self.draw = generator(seed, 1)
        self.actor = _network(features, config.hidden, self.draw)
        self.critic = _network(features + 1, config.hidden, self.draw)
        self.slow_actor, self.slow_critic = copy.deepcopy((self.actor, self.critic))
        self.actor_weights, self.critic_weights = list(self.actor.parameters()), list(self.critic.parameters())
        self.actor_steps = torch.optim.Adam(self.actor_weights, config.actor_lr, fused=True)
        self.critic_steps = torch.optim.Adam(self.critic_weights, config.critic_lr, fused=True)
        self.states = torch.zeros(config.memory, features)
        self.nexts = torch.zeros(config.memory, features)
        self.rest = torch.zeros(config.memory, 3)  # action, reward, whether the walk goes on
        self.seen = 0  # steps remembered so far; the newest take the places of the oldest
        self.baseline: float | None = None  # moving average of the rewards

    def act(self, state: Tensor, low: float = 0.0, spread: float = 0.0) -> float:
        """An action from low to 1: the actor's, with noise of this standard deviation. (F,)"""
        with torch.no_grad():
            middle = torch.sigmoid(self.actor(state)).item()
        chance = torch.rand((), generator=self.draw, dtype=torch.float64)
        return float(truncated_normal(middle, spread, low, 1.0, chance))

    def remember(self, states: Tensor, actions: Tensor, reward: float) -> None:
        """One walk: its steps, what was done there, and what came of it. (T, F), (T,)"""
        places = (self.seen + torch.arange(len(states))) % self.config.memory
        goes_on = torch.ones(len(states))
        goes_on[-1] = 0
        self.states[places] = states.float()
        self.nexts[places] = states.roll(-1, 0).float()  # behind the last step nothing is looked at
        self.rest[places] = torch.stack([actions.float(), torch.full_like(goes_on, reward), goes_on], dim=1)
        self.seen += len(states)
        old = reward if self.baseline is None else self.baseline
        self.baseline = self.config.baseline * old + (1 - self.config.baseline) * reward

    def learn(self, updates: int) -> None:
        """Improve critic and actor, each update by some remembered steps."""
        for _ in range(updates if self.seen else 0):
            places = torch.randint(min(self.seen, self.config.memory), (self.config.batch,), generator=self.draw)
            states, nexts = self.states[places], self.nexts[places]  # (B, F)
            action, reward, goes_on = self.rest[places, :, None].unbind(1)  # (B, 1)
            with torch.no_grad():
                later = _value(self.slow_critic, nexts, torch.sigmoid(self.slow_actor(nexts)))
                target = reward - (self.baseline or 0.0) + self.config.discount * goes_on * later
            _descend(F.mse_loss(_value(self.critic, states, action), target), self.critic_weights, self.critic_steps)
            chosen = _value(self.critic, states, torch.sigmoid(self.actor(states)))
            _descend(-chosen.mean(), self.actor_weights, self.actor_steps)
            for slow, quick in ((self.slow_actor, self.actor_weights), (self.slow_critic, self.critic_weights)):
                torch._foreach_lerp_([p.data for p in slow.parameters()], [p.data for p in quick], self.config.soft)


def _value(critic: nn.Module, states: Tensor, actions: Tensor) -> Tensor:
    """What the rest of a walk is worth. (B, F), (B, 1) -> (B, 1)"""
    return cast(Tensor, critic(torch.cat([states, actions], dim=1)))


def _descend(loss: Tensor, weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """One step of these weights alone: the actor's loss goes through the critic, which must not learn from it."""
    for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = slope
    optimizer.step()


def _network(features: int, hidden: int, draw: torch.Generator) -> nn.Sequential:
    """Two hidden layers and one output, drawn as Lillicrap et al. do, without touching torch's own random numbers."""
    sizes = [(features, hidden), (hidden, hidden), (hidden, 1)]
    linears = [nn.Linear(*size, device="meta").to_empty(device="cpu") for size in sizes]
    for (inputs, outputs), linear in zip(sizes, linears, strict=True):
        bound = _SMALL if outputs == 1 else 1 / math.sqrt(inputs)
        for parameter in linear.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=draw)
    first, second, last = linears
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
