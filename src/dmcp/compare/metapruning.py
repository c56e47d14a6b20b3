"""MetaPruning: weights computed from the widths, then evolution."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from dmcp.batches import Loader, batches_from, device_of, generator, input_of, labels_of, size_of, start_epoch, widest
from dmcp.budget import spent_shares
from dmcp.compare.problem import Choice, Prepared, Problem, batch_statistics, held_batches
from dmcp.errors import TrainingError
from dmcp.losses import Loss, MetricWarning, growing, measure, top1, whole_of
from dmcp.modules import unwrap
from dmcp.runtime.distributed import current, sum_values
from dmcp.runtime.engine import ResolvedEngine
from dmcp.sampling import FILLED, TOLERANCE, Options, fit
from dmcp.settings import Engine
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Task, train

_INIT, _STRUCTURES = 1, 2  # what random numbers are for


class PruningNet(nn.Module):
    """A copy of the model, and what computes the weights of each sub-network of it."""

    shares_of: Tensor
    sizes: Tensor

    def __init__(self, model: nn.Module, graph: ChannelGraph, hidden: int, most_params: int, seed: int) -> None:
        super().__init__()
        model = unwrap(model)
        spaces = spaces_of(model, graph)
        count = sum(model.get_parameter(name).numel() for name in spaces)
        if hidden * count > most_params:
            fits = most_params // count
            way = f"set hidden to at most {fits}, or raise it" if fits else "raise it"
            raise TrainingError(
                f"The PruningNet of this network would have {hidden * count:,} numbers, more than most_params "
                f"({most_params:,}): {way}."
            )
        self.net = Supernet(model, graph)
        self.net.alpha.requires_grad_(False)  # no Markov chain here
        self.names = list(spaces)
        draw, device = generator(seed, _INIT), device_of(self.net)
        mask = torch.zeros(len(spaces), 1, len(graph.spaces))
        for row, numbers in zip(mask, spaces.values(), strict=True):
            row[:, numbers] = 1
        # The first layers of all blocks are one tensor, masked: one kernel. (L, hidden, S), (L, hidden)
        shape = (len(spaces), hidden, len(graph.spaces))
        first = torch.randn(shape, generator=draw) / mask.sum(dim=2, keepdim=True).clamp(min=1).sqrt()
        self.first = nn.Parameter((first * mask).to(device))
        self.shift = nn.Parameter(torch.randn(shape[:2], generator=draw).to(device))
        # Zeros: every sub-network starts with the weights that the model was given.
        own = [self.net.model.get_parameter(name) for name in self.names]
        self.second = nn.ParameterList([nn.Parameter(it.new_zeros(hidden, it.numel())) for it in own])
        self.register_buffer("shares_of", mask.to(device), persistent=False)
        self.register_buffer("sizes", graph.full.tensor().to(device), persistent=False)

    def forward(self, x: Any, widths: Tensor) -> Any:
        """Run the sub-network with these widths, (S,) int64, on the model's input."""
        return functional_call(self.net, self.weights(widths), (x, self.net.hard(widths)))

    def weights(self, widths: Tensor) -> dict[str, Tensor]:
        """What the blocks compute for these widths, by its name in the supernet, not cropped. (S,)"""
        with torch.autocast(self.first.device.type, enabled=False):  # reads each number once: memory is what it costs
            codes = (self.first * self.shares_of) @ (widths / self.sizes).to(self.first.dtype) + self.shift
            # The root makes a step of SGD move a weight about as far as it would without the blocks.
            codes = F.relu(codes) / math.sqrt(codes.shape[1])  # (L, hidden)
            found: dict[str, Tensor] = {}
            for name, code, second in zip(self.names, codes.unbind(), self.second, strict=True):
                own = self.net.model.get_parameter(name)
                found[f"model.{name}"] = own + (code.to(own.dtype) @ second).view(own.shape)
        return found


def spaces_of(model: nn.Module, graph: ChannelGraph) -> dict[str, list[int]]:
    """The weights of convs and linears that have channels of spaces, and the numbers of these spaces."""
    own = dict(model.named_parameters())  # each once
    found: dict[str, list[int]] = {}
    for path, part in model.named_modules():
        numbers = [number for number, space in enumerate(graph.spaces) if path in (*space.writers, *space.readers)]
        name = f"{path}.weight" if path else "weight"
        if numbers and name in own and isinstance(part, _ConvNd | nn.Linear):
            found[name] = numbers
    return found


class Grid:
    """Widths to draw structures from: so many for each space, evenly from the least to the most."""

    def __init__(self, options: Options, groups: int) -> None:
        self.options = options  # all that are allowed
        self.counts = (self.options.last + 1).clamp(max=groups)  # (S,)
        steps = torch.arange(groups)[:, None].minimum(self.counts - 1) / (self.counts - 1).clamp(min=1)
        self.table = self.options.widths((steps * self.options.last).round().long()).T.contiguous()  # (S, groups)

    def draw(self, count: int, draw: torch.Generator) -> Tensor:
        """Random structures, each width of each space equally likely. -> (count, S) int64"""
        chances = torch.rand(count, len(self.counts), generator=draw, dtype=torch.float64)
        return self.table[torch.arange(len(self.counts)), (chances * self.counts).long()]


class Structured:
    """A loader whose batches are ((input, widths), labels), with a random structure each.

    The structures are given by seed, epoch and place. For a loss of the user's own, the whole batch is in the place of
    the labels.
    """

    def __init__(self, loader: Loader, grid: Grid, seed: int, device: torch.device, whole: bool) -> None:
        self.loader, self.grid, self.seed, self.device, self.whole = loader, grid, seed, device, whole
        self.epoch = 0
        self.seen: dict[int, int] = {}  # samples of each batch that was given out, by its place
        # where the training looks for generators, which it saves and brings back
        self.sampler, self.batch_sampler, self.generator = (
            getattr(loader, name, None) for name in ("sampler", "batch_sampler", "generator")
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.starting_at(0)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next."""
        self.epoch = epoch
        start_epoch(self.loader, epoch)

    def starting_at(self, skip: int) -> Iterator[Any]:
        """The batches of the epoch from number `skip` on; those before are drawn now, not at the first step."""
        structures = self.grid.draw(len(self), generator(self.seed, _STRUCTURES, self.epoch)).to(self.device)
        batches = batches_from(self.loader, self.epoch, skip)
        return map(self._joined, batches, range(skip, len(self)), structures[skip:].unbind())

    def _joined(self, batch: Any, place: int, widths: Tensor) -> Any:
        self.seen[place] = size_of(batch)
        return (input_of(batch), widths), batch if self.whole else labels_of(batch)

    def samples(self) -> int:
        """Samples in an epoch; of batches that were not given out, as after an interruption, the mean is taken."""
        sizes = self.seen or {0: size_of(next(iter(self.loader)))}
        return round(sum(sizes.values()) / len(sizes) * len(self))


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
    recipe = replace(problem.recipe, epochs=epochs, warmup_epochs=warmup)
    train(
        net,
        loader,
        recipe,
        task=Task(loss=problem.loss and _inner(problem.loss)),
        runtime=problem.runtime(STAGE),
    )
    state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    return Prepared(state=state, sample_passes=epochs * loader.samples() * current().size)


def find_metapruning(problem: Problem, config: MetaPruningConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
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
    passes = len(scores) * samples * current().size
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
    resolved: ResolvedEngine = (problem.engine or Engine()).resolve(device, plain=problem.metric is None)
    batches = held_batches(problem, config.batches, resolved)

    def forward(batch: Any, widths: Tensor) -> Any:
        with resolved.autocast():
            return net(input_of(batch), widths)

    def step(batch: Any, widths: Tensor) -> tuple[Tensor, int]:
        assert callable(metric)
        value, samples = metric(forward(batch, widths), batch)
        return value.to(widest(device)), samples

    run = resolved.repeated(step)

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

    with resolved.running(net), batch_statistics(net), torch.no_grad():
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
