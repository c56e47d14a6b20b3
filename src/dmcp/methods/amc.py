"""AMC: an agent learns how much of each space to keep, by the accuracy of the cut network before any fine-tuning.

After Y. He, J. Lin, Z. Liu, H. Wang, L. Li and S. Han, "AMC: AutoML for Model Compression and Acceleration on Mobile
Devices" (2018), its search with limited resources. The agent (see `dmcp.methods.ddpg`) walks over the spaces, sees at
each what the layers are like, what has been saved so far and what can be saved later, and says which share to keep.
A share is lowered to what leaves the budget in reach with all later spaces at their floors, so every walk ends inside.
The reward is the accuracy on held-out samples; the best structure of all walks is the result.

Where this differs from the paper:
- The agent walks over spaces, not over layers: tied layers are one step. Its features are those of all layers of a
  space together. Kernel, stride and input channels are not told one by one: parameters and multiply-adds per parameter
  (the positions that a filter is used at) stand for them.
- The channels that stay are those with the largest L1 norm of all filters that write them; what the next layer does
  is not fitted to the loss of the others by least squares.
- Batch norms use the statistics of each held-out batch: those that were learned are of the unpruned network, and
  without its other channels they are wrong, which would punish narrow layers for what fine-tuning mends at once. The
  network is run once, not twice as with recalibration. Held-out batches should be large.
- A walk that leaves much of the budget unused is widened in proportion before it is judged, and what the agent
  remembers is the structure that was judged. The paper trusts the agent to find that more is better.
- Noise falls from `noise` to `last_noise` over the episodes; the paper gives no rate.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import device_of, input_of, size_of, widest
from dmcp.budget import Budget, check_reachable, spent_shares
from dmcp.engine import Engine
from dmcp.errors import TrainingError
from dmcp.filters import magnitude
from dmcp.losses import growing, measure, top1, whole_of
from dmcp.methods.ddpg import Agent, DdpgConfig
from dmcp.methods.judging import batch_statistics, held_batches
from dmcp.methods.problem import FILLED, Choice, Problem
from dmcp.ranks import current, sum_values
from dmcp.sampling import Options, fit
from dmcp.slicing import narrow, unwrap
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph

STAGE = "amc"
_CHANGING = 3  # features that depend on the walk, behind those of the space itself


@dataclass(frozen=True, kw_only=True)
class AmcConfig:
    """How the agent searches; the defaults are the paper's."""

    warmup: int = 100  # first episodes, with constant noise; nothing is learned in them
    episodes: int = 300  # episodes after them, with less and less noise
    noise: float = 0.5  # standard deviation of the actions in the warm-up
    last_noise: float = 0.01  # and in the last episode
    batches: int | None = None  # held-out batches that a structure is judged by, kept on the device; None: all of them
    agent: DdpgConfig = field(default_factory=DdpgConfig)  # how it learns

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("episodes", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise TrainingError(f"{name} must be an int of at least {least}, not {value!r}.")
        if not 0 < self.last_noise <= self.noise < math.inf:
            raise TrainingError(
                f"noise must be at least last_noise, and both above 0, not {self.noise} and {self.last_noise}."
            )
        if self.batches is not None and (type(self.batches) is not int or self.batches < 1):
            raise TrainingError(f"batches must be an int of at least 1, or None for all, not {self.batches!r}.")


def find(problem: Problem, config: AmcConfig | None = None, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Search a structure for a trained network: `state` is its state dict (None: the model is trained already).

    The metric must grow with quality, or be a LowerIsBetter, whose negative is the reward. There is one wait for the
    device per episode, and a structure that comes again is not judged again.
    """
    config = config or AmcConfig()
    net = Supernet(_sorted(problem, state), problem.graph)
    course = _Course.of(problem)
    agent = Agent(course.fixed.shape[1] + _CHANGING, config.agent, problem.seed)
    rewards: dict[tuple[int, ...], float] = {}  # by the widths
    best: tuple[int, ...] = ()
    with _judging(problem, config, net) as (judge, samples):
        for episode in range(config.warmup + config.episodes):
            widths = course.walk(agent, _noise(episode, config))
            key = tuple(widths.tolist())
            if key not in rewards:
                rewards[key] = judge(widths)
            best = key if not best or rewards[key] > rewards[best] else best
            agent.remember(course.states(widths, torch.arange(len(key))), widths / course.full, rewards[key])
            if episode >= config.warmup:
                agent.learn(len(key))  # as many updates as steps were taken
            told = {"episode": episode, "reward": rewards[key], "best": rewards[best]}
            problem.tell(STAGE, told | {"macs": int(problem.graph.macs(widths[None]))})
    found = problem.graph.widths(best)
    return Choice(widths=found, kept=found, model=net.model, sample_passes=len(rewards) * samples)


def _noise(episode: int, config: AmcConfig) -> float:
    """Standard deviation of the actions: constant, then falling exponentially."""
    share = max(0, episode - config.warmup + 1) / config.episodes
    return float(config.noise * (config.last_noise / config.noise) ** share)


def _sorted(problem: Problem, state: Mapping[str, Tensor] | None) -> nn.Module:
    """A copy of the network with the trained weights, the channels of every space with the largest L1 norm first."""
    model, graph = narrow(unwrap(problem.model), {}, {}), problem.graph
    if state is not None:
        try:
            model.load_state_dict(dict(state))
        except RuntimeError:
            raise TrainingError(
                "The state is not of this network: give the state dict of the same model, trained but not pruned."
            ) from None
    norms = {space.name: magnitude(model, graph, space) for space in graph.spaces}
    order = {name: norm.argsort(descending=True, stable=True) for name, norm in norms.items() if norm is not None}
    return narrow(model, graph.cuts(order), {})


# the walk


@dataclass(frozen=True, eq=False)
class _Course:
    """The spaces in order, and what an agent sees of them."""

    graph: ChannelGraph
    budget: Budget
    options: Options
    tolerance: float  # share of the budget that every walk uses at least
    full: Tensor  # (S,)
    most: Tensor  # that may be chosen. (S,)
    least: Tensor  # (S,)
    fixed: Tensor  # features that no choice changes. (S, F)

    @staticmethod
    def of(problem: Problem) -> _Course:
        """BudgetError if the budget cannot be reached."""
        graph, full = problem.graph, problem.graph.full.tensor()
        options = problem.options
        least = options.widths(torch.zeros_like(full))
        check_reachable(problem.budget, graph, graph.widths(least), problem.ceiling)
        # where widths are so coarse that none uses the budget to the tolerance, asking for it leaves one structure only
        near = fit(graph, problem.budget, full.double(), options, FILLED).tensor()
        reached = spent_shares(problem.budget, graph, near[None]).max().item()
        bounds = (problem.most.tensor(), least)
        return _Course(graph, problem.budget, options, min(FILLED, reached), full, *bounds, _features(graph))

    def walk(self, agent: Agent, noise: float) -> Tensor:
        """Widths inside the budget, of which they use the binding limit to the tolerance. -> (S,)"""
        widths = self.least.clone()
        for step in range(len(widths)):
            (state,) = self.states(widths, torch.tensor([step]))
            share = agent.act(state, float(self.least[step] / self.full[step]), noise)
            wished = self.options.nearest(share * self.full)[step]
            # every width that this space may have, with all later ones at the floor
            trials = widths.repeat(self.options.table.shape[1], 1)
            trials[:, step] = self.options.table[step]
            highest = (self._spent(trials) <= 1).sum() - 1
            widths[step] = self.options.table[step, torch.minimum(wished, highest)]
        return self._filled(widths)

    def _filled(self, widths: Tensor) -> Tensor:
        """Widths that leave too much unused, made wider in proportion until nothing more fits. (S,) -> (S,)"""
        if self._spent(widths[None]) >= self.tolerance:
            return widths
        beyond = widths * (self.full / widths).max()  # `fit` narrows up to the border, but widens to the tolerance only
        return fit(self.graph, self.budget, beyond.double(), self.options, self.tolerance).tensor()

    def states(self, widths: Tensor, steps: Tensor) -> Tensor:
        """What the agent sees at some steps of the walk to these widths. (S,), (T,) -> (T, F)"""
        known = torch.arange(len(widths)) < steps[:, None]  # (T, S)
        wide, narrow = torch.where(known, widths, self.most), torch.where(known, widths, self.least)
        most, least, unpruned = self._spent(wide), self._spent(narrow), self._spent(self.full[None])
        before = torch.cat([torch.ones(1), widths / self.full])[steps]  # the last action
        changing = torch.stack([1 - most / unpruned, (most - least) / unpruned, before], dim=1)  # reduced, rest, last
        return torch.cat([self.fixed[steps], changing], dim=1).float()

    def _spent(self, widths: Tensor) -> Tensor:
        """Cost / target of the binding limit. (N, S) -> (N,)"""
        return spent_shares(self.budget, self.graph, widths).amax(dim=1)


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


# the reward


@contextlib.contextmanager
def _judging(problem: Problem, config: AmcConfig, net: Supernet) -> Iterator[tuple[Callable[[Tensor], float], int]]:
    """While entered: what gives the reward of widths, and how many samples it runs each time."""
    device, ranks = device_of(net.model), current()
    settled = (problem.engine or Engine()).settled(device, plain=problem.metric is None and ranks.world == 1)
    with settled.running(net.model), batch_statistics(net.model):
        batches = held_batches(problem, config.batches, settled)
        metric = growing(top1 if problem.metric is None else problem.metric)
        whole = whole_of(metric)

        def score(batch: Any, gates: Tensor) -> tuple[Tensor, int]:
            assert callable(metric)
            with torch.no_grad(), settled.autocast():
                value, count = metric(net(input_of(batch), gates), batch)
            return value.to(widest(device)), count

        run = settled.repeated(score)  # the gates are its input: one CUDA graph for all structures

        def mean(gates: Tensor) -> float:
            sums, counts = zip(*(run(batch, gates) for batch in batches), strict=True)
            total = torch.stack(sums).sum()
            pair = sum_values(torch.stack([total, total.new_tensor(float(sum(counts)))]), ranks)
            return float(pair[0] / pair[1])

        def judge(widths: Tensor) -> float:
            gates = net.hard(widths)
            if whole is None:
                reward = mean(gates)
            else:
                with torch.no_grad(), settled.autocast():
                    reward = measure(whole, ((net(input_of(batch), gates), batch) for batch in batches), ranks)
            if not math.isfinite(reward):
                raise TrainingError(f"The metric of a narrowed network is {reward}: look at the trained weights.")
            return reward

        yield judge, sum(map(size_of, batches))
