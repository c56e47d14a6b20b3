"""MetaPruning: a network that computes the weights of every structure, then evolution among the structures.

After Liu, Mu, Zhang, Guo, Yang, Cheng and Sun, *MetaPruning: Meta Learning for Automatic Neural Network Channel
Pruning*, ICCV 2019. `prepare` trains a PruningNet on random structures, a new one in each step. `find` breeds
structures inside the budget: the best ones so far are mutated and crossed, and each is judged on held-out data with the
weights that the PruningNet computes for it. The winner is trained from scratch by the caller.

What differs from the paper:
- A block belongs to a weight and sees the kept shares of the spaces that the weight has, as many as these are. Widths
  that a residual stream ties are one gene, since they are one space.
- The bias of a block's second layer starts as the model's own weights and the rest of it as zeros; hidden values are
  scaled down, so that the learning rates of plain training fit. BatchNorms' scales and all biases are plain parameters.
- Channels are not cropped but gated, which gives the same outputs with the same shapes in each step.
- BatchNorms use the statistics of each held-out batch when structures are judged.
- Structures use at least 0.95 of the budget. Those that mutation or crossing put outside are dropped, as in the paper;
  where too few are left, some are moved to the nearest structure inside. None is judged twice.
- Population and generations have defaults of our own.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dmcp.batches import device_of, generator, input_of, size_of, widest
from dmcp.budget import spent_shares
from dmcp.engine import Engine, Settled
from dmcp.errors import TrainingError
from dmcp.losses import Loss, MetricWarning, growing, measure, top1, whole_of
from dmcp.methods.judging import batch_statistics, held_batches
from dmcp.methods.problem import FILLED, Choice, Prepared, Problem
from dmcp.methods.pruning_net import Grid, PruningNet, Structured
from dmcp.ranks import current, sum_values
from dmcp.sampling import TOLERANCE, fit
from dmcp.training import Distillation, train

STAGE = "metapruning"
_WORST = -math.inf  # score of a structure whose metric is no number
_EVOLUTION = 3  # what random numbers are for
_TRIES = 64  # candidates for each structure that is wanted

Genes = tuple[int, ...]  # a width per space
Judge = Callable[[Sequence[Genes]], list[float]]


@dataclass(frozen=True, kw_only=True)
class MetaPruningConfig:
    """How the PruningNet is built and trained, and how structures are bred with it."""

    hidden: int = 32  # numbers between the two layers of a block; each costs as many numbers as the network has
    most_params: int = 400_000_000  # a larger PruningNet is refused
    groups: int = 31  # widths per space that structures are drawn from, from the floor to the full size
    epochs: int | None = None  # of training the PruningNet; None: those of the problem's recipe
    population: int = 50  # structures judged in each generation
    generations: int = 20  # the first, random one among them
    parents: int = 10  # the best structures so far, from which the next generation is bred
    mutation: float = 0.1  # chance of each width to be drawn anew in a mutated structure
    crossed: float = 0.5  # share of a generation with the widths of two parents; the others are mutated
    batches: int = 20  # held-out batches that a structure is judged on, at most

    def __post_init__(self) -> None:
        least = {"hidden": 1, "most_params": 1, "groups": 2, "population": 1, "generations": 1, "parents": 1}
        for name, low in (least | {"batches": 1} | ({} if self.epochs is None else {"epochs": 1})).items():
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise TrainingError(f"{name} must be an int of at least {low}, not {value!r}.")
        if not 0 < self.mutation <= 1:
            raise TrainingError(f"mutation must be above 0 and at most 1, not {self.mutation}.")
        if not 0 <= self.crossed <= 1:
            raise TrainingError(f"crossed must lie between 0 and 1, not {self.crossed}.")


def prepare(problem: Problem, config: MetaPruningConfig) -> Prepared:
    """Train a PruningNet on random structures: the same for all budgets."""
    net = _pruning_net(problem, config)
    grid = Grid(problem.options, config.groups)
    loader = Structured(problem.loader, grid, problem.seed, device_of(net), whole=problem.loss is not None)
    epochs = config.epochs or problem.recipe.epochs
    warmup = min(problem.recipe.warmup_epochs, epochs)
    recipe = replace(problem.recipe, epochs=epochs, warmup_epochs=warmup, distillation=Distillation.NONE)
    train(
        net,
        loader,
        recipe,
        problem.loss and _inner(problem.loss),
        on_step=lambda record: problem.tell(STAGE, record),
        engine=problem.engine,
        keeper=problem.keep and problem.keep(STAGE),
    )
    state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    return Prepared(state=state, sample_passes=epochs * loader.samples() * current().world)


def find(problem: Problem, config: MetaPruningConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Breed structures inside the budget; without the state of a PruningNet, one is trained first."""
    prepared = prepare(problem, config) if state is None else Prepared(state=state)
    net = _pruning_net(problem, config)
    try:
        net.load_state_dict(prepared.state)
    except RuntimeError:
        raise TrainingError(
            "This is not the state of this network's PruningNet: give `find` the state and the settings of `prepare`."
        ) from None
    with _judging(problem, config, net) as (judge, samples):
        scores = _evolve(problem, config, judge)
    passes = len(scores) * samples * current().world
    best = torch.tensor(max(scores, key=lambda genes: scores[genes]))
    widths = fit(problem.graph, problem.budget, best.double(), problem.options, FILLED)
    return Choice(widths=widths, kept=widths, sample_passes=prepared.sample_passes + passes)


def _pruning_net(problem: Problem, config: MetaPruningConfig) -> PruningNet:
    return PruningNet(problem.model, problem.graph, config.hidden, config.most_params, problem.seed)


def _inner(loss: Loss) -> Loss:
    """The user's loss on the user's batch."""
    return lambda output, batch: loss(output, batch[1])


@contextlib.contextmanager
def _judging(problem: Problem, config: MetaPruningConfig, net: PruningNet) -> Iterator[tuple[Judge, int]]:
    """While entered: what gives the metrics of structures, and how many samples it runs for each.

    It waits for the device once for all structures, unless the metric is an object.
    """
    device, metric = device_of(net), growing(top1 if problem.metric is None else problem.metric)
    whole = whole_of(metric)
    settled: Settled = (problem.engine or Engine()).settled(device, plain=problem.metric is None)
    batches = held_batches(problem, config.batches, settled)

    def forward(batch: Any, widths: Tensor) -> Any:
        with settled.autocast():
            return net(input_of(batch), widths)

    def step(batch: Any, widths: Tensor) -> tuple[Tensor, int]:
        assert callable(metric)
        value, samples = metric(forward(batch, widths), batch)
        return value.to(widest(device)), samples

    run = settled.repeated(step)

    def judge(structures: Sequence[Genes]) -> list[float]:
        chosen = torch.tensor(structures).to(device)
        if whole is not None:
            pairs = (((forward(batch, widths), batch) for batch in batches) for widths in chosen)
            return [measure(whole, each, current()) for each in pairs]
        found = [[run(batch, widths) for batch in batches] for widths in chosen]
        sums = torch.stack([torch.stack([value for value, _ in row]).sum() for row in found])
        count = sums.new_tensor([float(sum(samples for _, samples in found[0]))])
        *totals, seen = sum_values(torch.cat([sums, count]), current()).tolist()
        return [total / seen for total in totals]

    with settled.running(net), batch_statistics(net), torch.no_grad():
        yield judge, sum(map(size_of, batches))


def _evolve(problem: Problem, config: MetaPruningConfig, judge: Judge) -> dict[Genes, float]:
    """All structures that were judged, in the order in which they were bred."""
    nursery = _Nursery(problem, config.groups)
    grid, draw, scores = nursery.grid, generator(problem.seed, _EVOLUTION), dict[Genes, float]()
    crossed = round(config.crossed * config.population)
    fresh = nursery.inside(grid.draw(_TRIES * config.population, draw), config.population, scores)
    fresh = fresh or [nursery.uniform]
    for number in range(config.generations):
        if not fresh:  # there are no other structures
            break
        judged = judge(fresh)
        good = [value for value in judged if math.isfinite(value)]
        scores |= {genes: value if math.isfinite(value) else _WORST for genes, value in zip(fresh, judged, strict=True)}
        ranked = [genes for genes in sorted(scores, key=lambda genes: -scores[genes]) if scores[genes] > _WORST]
        if not ranked:
            raise TrainingError(f"The metric of all structures is {judged[0]}: look at the metric and at the outputs.")
        mean = {"mean": sum(good) / len(good)} if good else {}
        failed = {"failed": len(judged) - len(good)} if len(good) < len(judged) else {}
        facts = {"generation": number, "best": scores[ranked[0]]} | mean | {"judged": len(scores)} | failed
        problem.tell(STAGE, facts)
        parents = torch.tensor(ranked[: config.parents])  # (K, S)
        fresh = nursery.inside(cross(parents, _TRIES * crossed, draw), crossed, scores)
        missing = config.population - len(fresh)
        candidates = mutate(parents, _TRIES * missing, grid, config.mutation, draw)
        fresh += nursery.inside(candidates, missing, {*scores, *fresh})
    lost = list(scores.values()).count(_WORST)
    if lost and current().first:
        told = f"The metric of {lost} of {len(scores)} structures is not finite: they count as the worst."
        warnings.warn(told, MetricWarning, stacklevel=3)
    return scores


def mutate(parents: Tensor, count: int, grid: Grid, chance: float, draw: torch.Generator) -> Tensor:
    """Structures in which each width is a parent's, or with this chance a random one. (K, S) -> (count, S)"""
    chosen = parents[torch.randint(len(parents), (count,), generator=draw)]
    anew = torch.rand(chosen.shape, generator=draw) < chance
    return torch.where(anew, grid.draw(count, draw), chosen)


def cross(parents: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Structures in which each width is that of one of two parents. (K, S) -> (count, S)"""
    one, other = parents[torch.randint(len(parents), (2, count), generator=draw)]
    return torch.where(torch.rand(one.shape, generator=draw) < 0.5, one, other)


class _Nursery:
    """Where candidates become structures inside the budget."""

    def __init__(self, problem: Problem, groups: int) -> None:
        self.graph, self.budget = problem.graph, problem.budget
        self.grid = Grid(problem.options, groups)
        self.uniform: Genes = tuple(problem.uniform().values())
        # Where no structure uses the budget to the tolerance, those count that use as much of it as this one.
        self.least = min(TOLERANCE, self._shares(torch.tensor([self.uniform])).item())

    def _shares(self, widths: Tensor) -> Tensor:
        """What structures use of the binding limit. (N, S) -> (N,)"""
        return spent_shares(self.budget, self.graph, widths).amax(dim=1)

    def inside(self, candidates: Tensor, count: int, known: Collection[Genes]) -> list[Genes]:
        """Up to `count` new structures: candidates inside the budget, then some that are moved there. (N, S)"""
        shares = self._shares(candidates)
        ready = candidates[(shares >= self.least) & (shares <= 1)].tolist()
        found = [genes for genes in dict.fromkeys(map(tuple, ready)) if genes not in known][:count]
        for wish in candidates[: 4 * count]:
            if len(found) >= count:
                break
            genes = tuple(fit(self.graph, self.budget, wish.double(), self.grid.options, TOLERANCE).values())
            reached = self._shares(torch.tensor([genes])).item() >= self.least
            if reached and genes not in known and genes not in found:
                found.append(genes)
        return found
