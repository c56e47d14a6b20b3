"""AMC (He et al., 2018): a reinforcement-learning agent chooses what to keep of each space.

    dmcp compare --model cifar:resnet20 --data cifar10 --methods uniform,dmcp,experiments.methods.amc:amc

Steps are spaces, not layers; channels go by their L1 norm, without least squares; the noise schedule is ours.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.compare.methods import Method, Own
from dmcp.compare.problem import CHOOSING, Choice, MethodConfig, Prepared, Problem, held_out_batches, loaded, samples_of
from dmcp.errors import TrainingError
from dmcp.fields import setting
from dmcp.runtime.batches import generator, input_of, size_of, widest
from dmcp.runtime.distributed import current, sum_values
from dmcp.searching.budget import check_reachable
from dmcp.searching.importance import magnitude
from dmcp.searching.rounding import FILLED, round_to_budget
from dmcp.searching.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import narrow
from dmcp.training.loop import train
from dmcp.training.losses import LowerIsBetter, measure, sum_and_count, top1, whole_of

_SMALL = 3e-3  # weights of the last layers at the start: first actions are near the middle, first values near zero


@dataclass(frozen=True, kw_only=True)
class DdpgConfig(MethodConfig):
    """How the agent learns; the defaults are those of the two papers."""

    hidden: int = setting(300, "Number of units in each of the two hidden layers of actor and critic.", 1)
    actor_lr: float = setting(1e-4, "Learning rate of Adam for the actor.", above=0)
    critic_lr: float = setting(1e-3, "Learning rate of Adam for the critic.", above=0)
    soft: float = setting(
        0.01, "Share of the learned networks that is mixed into the slow ones at each update.", high=1, above=0
    )
    discount: float = setting(1.0, "Discount factor for the value of the next step.", 0, 1)
    memory: int = setting(2000, "Number of steps kept in the replay memory.", 1)
    batch: int = setting(64, "Number of steps from the replay memory in each update.", 1)
    baseline: float = setting(0.95, "Decay of the moving average of rewards.", 0, below=1)


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
        self.actor_steps = torch.optim.Adam(self.actor.parameters(), config.actor_lr, fused=True)
        self.critic_steps = torch.optim.Adam(self.critic.parameters(), config.critic_lr, fused=True)
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
            _descend(F.mse_loss(_value(self.critic, states, action), target), self.critic_steps)
            chosen = _value(self.critic, states, torch.sigmoid(self.actor(states)))
            _descend(-chosen.mean(), self.actor_steps)
            for slow, quick in ((self.slow_actor, self.actor), (self.slow_critic, self.critic)):
                torch._foreach_lerp_(
                    [it.data for it in slow.parameters()], [it.data for it in quick.parameters()], self.config.soft
                )


def _value(critic: nn.Module, states: Tensor, actions: Tensor) -> Tensor:
    """What the rest of a walk is worth. (B, F), (B, 1) -> (B, 1)"""
    return cast(Tensor, critic(torch.cat([states, actions], dim=1)))


def _descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step of these weights alone: the actor's loss goes through the critic, which must not learn from it."""
    weights = optimizer.param_groups[0]["params"]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
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


_CHANGING = 3  # features that depend on the walk, behind those of the space itself


@dataclass(frozen=True, kw_only=True)
class AmcConfig(MethodConfig):
    """How the agent searches; the defaults are the paper's."""

    warmup: int = setting(100, "Number of episodes with constant noise at the start, in which nothing is learned.", 0)
    episodes: int = setting(300, "Number of episodes after the warm-up, with decreasing noise.", 1)
    noise: float = setting(0.5, "Standard deviation of the actions in the warm-up.", above=0)
    last_noise: float = setting(0.01, "Standard deviation of the actions in the last episode.", above=0)
    batches: int | None = setting(None, "Number of held-out batches used to judge widths. None: all of them.", 1)
    agent: DdpgConfig = field(default_factory=DdpgConfig, metadata={"help": "How it learns."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last_noise > self.noise:
            raise TrainingError(f"last_noise must be at most noise ({self.noise}), not {self.last_noise}.")


def prepare(problem: Problem, config: AmcConfig) -> Prepared:
    """Train the unpruned network without the held-out images: one for all budgets."""
    model = loaded(problem, None)
    train(model, problem.loader, problem.recipe, task=problem.task, runtime=problem.runtime.stage(CHOOSING))
    return Prepared(state=model.state_dict(), sample_passes=problem.recipe.epochs * samples_of(problem.loader))


def find_amc(problem: Problem, config: AmcConfig | None = None, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Search widths for a trained network: `state` is its state dict (None: the model is trained already).

    There is one wait for the device per episode, and widths that come again are not judged again.
    """
    config = config or AmcConfig()
    net = Supernet(_sorted(problem, state), problem.graph)
    course = _Course(problem)
    agent = Agent(course.fixed.shape[1] + _CHANGING, config.agent, problem.seed)
    rewards: dict[tuple[int, ...], float] = {}  # by the widths
    best: tuple[int, ...] = ()
    with judging(problem, net.model, net, config.batches) as (judge, samples):
        for episode in range(config.warmup + config.episodes):
            share = max(0, episode - config.warmup + 1) / config.episodes  # of the way from the first noise to the last
            widths = course.walk(agent, config.noise * (config.last_noise / config.noise) ** share)
            key = tuple(widths.tolist())
            if key not in rewards:
                (rewards[key],) = judge([net.hard(widths)])
                if not math.isfinite(rewards[key]):
                    raise TrainingError(f"The metric of a narrowed network is {rewards[key]}: look at its weights.")
            best = key if not best or rewards[key] > rewards[best] else best
            agent.remember(course.states(widths, torch.arange(len(key))), widths / course.full, rewards[key])
            if episode >= config.warmup:
                agent.learn(len(key))  # as many updates as steps were taken
            record = {"episode": episode, "reward": rewards[key], "best": rewards[best]}
            problem.log(record | {"macs": int(problem.graph.macs(widths[None]))})
    found = problem.graph.widths(best)
    return Choice(widths=found, kept=found, model=net.model, sample_passes=len(rewards) * samples)


def _sorted(problem: Problem, state: Mapping[str, Tensor] | None) -> nn.Module:
    """A copy of the network with the trained weights, the channels of every space with the largest L1 norm first."""
    model, graph = loaded(problem, state), problem.graph
    norms = {space.name: magnitude(model, graph, space) for space in graph.spaces}
    order = {name: norm.argsort(descending=True, stable=True) for name, norm in norms.items() if norm is not None}
    return narrow(model, graph.cuts(order), {})


# the walk


class _Course:
    """The spaces in order, and what an agent sees of them."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem, self.options, self.full = problem, problem.options, graph.full.tensor()  # (S,)
        self.most, self.least = problem.widest.tensor(), self.options.widths(torch.zeros_like(self.full))  # (S,)
        check_reachable(problem.budget, graph, graph.widths(self.least), problem.max_widths)
        # where widths are so coarse that none uses the budget to the tolerance, asking for it leaves one choice only
        self.tolerance = min(FILLED, problem.shares(problem.round_to_budget(self.full).tensor()[None]).item())
        self.fixed = _features(graph)  # that no choice changes. (S, F)

    def walk(self, agent: Agent, noise: float) -> Tensor:
        """Widths inside the budget, of which they use the binding limit to the tolerance. -> (S,)"""
        widths = self.least.clone()
        for step in range(len(widths)):
            (state,) = self.states(widths, torch.tensor([step]))
            share = agent.act(state, float(self.least[step] / self.full[step]), noise)
            wished = self.options.nearest(share * self.full)[step]
            # every width that this space may have, with all later ones at their smallest
            trials = widths.repeat(self.options.table.shape[1], 1)
            trials[:, step] = self.options.table[step]
            highest = (self.problem.shares(trials) <= 1).sum() - 1
            widths[step] = self.options.table[step, torch.minimum(wished, highest)]
        if self.problem.shares(widths[None]) >= self.tolerance:
            return widths
        # too much is unused: wider in proportion until nothing more fits; `round_to_budget` narrows up to the border
        beyond = widths * (self.full / widths).max()
        graph, budget = self.problem.graph, self.problem.budget
        return round_to_budget(graph, budget, beyond.double(), self.options, self.tolerance).tensor()

    def states(self, widths: Tensor, steps: Tensor) -> Tensor:
        """What the agent sees at some steps of the walk to these widths. (S,), (T,) -> (T, F)"""
        known = torch.arange(len(widths)) < steps[:, None]  # (T, S)
        wide, narrow = torch.where(known, widths, self.most), torch.where(known, widths, self.least)
        most, least, unpruned = map(self.problem.shares, (wide, narrow, self.full[None]))
        before = torch.cat([torch.ones(1), widths / self.full])[steps]  # the last action
        changing = torch.stack([1 - most / unpruned, (most - least) / unpruned, before], dim=1)  # reduced, rest, last
        return torch.cat([self.fixed[steps], changing], dim=1).float()


def _features(graph: ChannelGraph) -> Tensor:
    """What each space is like, all from 0 to 1. -> (S, 6)"""
    rows: list[list[float]] = []
    layers = list(zip(graph.entries, graph.layers(), strict=True))
    for number, space in enumerate(graph.spaces):
        own = [cost for entry, cost in layers if any(number in key for key in (*entry.macs, *entry.params))]
        macs, params = sum(cost.macs for cost in own), sum(cost.params for cost in own)
        rows.append([number, space.size, len(own), macs, params, math.log1p(macs / max(1, params))])
    table = torch.tensor(rows, dtype=torch.float64)
    return table / table.amax(dim=0).clamp(min=1e-9)


# judging sub-networks


@contextlib.contextmanager
def judging(
    problem: Problem, model: nn.Module, forward: Callable[[Any, Tensor], Any], most: int | None
) -> Iterator[tuple[Callable[[Sequence[Tensor]], list[float]], int]]:
    """What gives the held-out metrics of sub-networks, and how many samples each of them sees.

    forward: (input, gates or widths) -> output. There is one wait for the device, unless the metric is an object.
    """
    metric, world = problem.task.metric or top1, current()
    whole, sign = whole_of(metric), -1 if isinstance(metric, LowerIsBetter) else 1  # scores grow with quality
    plain = problem.task.metric is None and world.size == 1
    with held_out_batches(problem, model, most, plain) as (batches, resolved):

        def score(batch: Any, subnet: Tensor) -> tuple[Tensor, Any]:
            assert callable(metric)
            with resolved.autocast():
                value, samples = sum_and_count(metric(forward(input_of(batch), subnet), batch), batch)
            return value.to(widest(resolved.device)), samples

        run = resolved.repeated(score)  # the sub-network is an input: one CUDA graph for all

        @torch.no_grad()
        def judge(subnets: Sequence[Tensor]) -> list[float]:
            if whole is not None:
                with resolved.autocast():
                    pairs = (((forward(input_of(batch), it), batch) for batch in batches) for it in subnets)
                    return [sign * measure(whole, each, world) for each in pairs]
            found = [[run(batch, it) for batch in batches] for it in subnets]
            sums = torch.stack([torch.stack([value for value, _ in row]).sum() for row in found])
            count = sums.new_tensor([float(sum(samples for _, samples in found[0]))])
            *totals, seen = sum_values(torch.cat([sums, count]), world).tolist()
            return [sign * total / seen for total in totals]

        yield judge, sum(map(size_of, batches))


amc = Method(find_amc, AmcConfig, prepare, own=Own.FINETUNED, holds_out=True)
