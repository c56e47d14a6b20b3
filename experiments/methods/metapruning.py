"""MetaPruning (Liu et al., 2019): weights computed from the widths, then evolution.

    dmcp compare --model cifar:resnet20 --data cifar10 --methods uniform,experiments.methods.metapruning:metapruning

Blocks start at zero around the model's weights; channels are gated, not cropped; all held-out images judge a network;
BatchNorms are shared by all widths.
"""

from __future__ import annotations

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

from dmcp.compare.methods import Method
from dmcp.compare.problem import CHOOSING, Choice, MethodConfig, Prepared, Problem, samples_of
from dmcp.errors import TrainingError
from dmcp.fields import setting
from dmcp.runtime.batches import Loader, batches_from, device_of, generator, input_of, labels_of, start_epoch
from dmcp.runtime.distributed import current
from dmcp.searching.rounding import TOLERANCE, round_to_budget
from dmcp.searching.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import unwrap
from dmcp.training.loop import train
from dmcp.training.losses import MetricWarning
from experiments.methods.amc import judging

_INIT, _WIDTHS, _EVOLUTION = 1, 2, 3  # what random numbers are for
_WORST = -math.inf  # score of widths whose metric is no number
_TRIES = 64  # candidates for each network that is wanted

Genes = tuple[int, ...]  # a width per space
Judge = Callable[[Sequence[Genes]], list[float]]


class PruningNet(nn.Module):
    """A copy of the model, and what computes the weights of each sub-network of it."""

    shares_of: Tensor
    sizes: Tensor

    def __init__(self, model: nn.Module, graph: ChannelGraph, hidden: int, max_params: int, seed: int) -> None:
        super().__init__()
        model = unwrap(model)
        spaces = spaces_of(model, graph)
        count = sum(model.get_parameter(name).numel() for name in spaces)
        if hidden * count > max_params:
            raise TrainingError(
                f"The PruningNet of this network would have {hidden * count:,} numbers, more than max_params: raise "
                f"it, or set hidden to at most {max_params // count}."
            )
        self.net = Supernet(model, graph)
        self.net.alpha.requires_grad_(False)  # no Markov chain here
        self.names = list(spaces)
        random, device = generator(seed, _INIT), device_of(self.net)
        mask = torch.zeros(len(spaces), 1, len(graph.spaces))
        for row, numbers in zip(mask, spaces.values(), strict=True):
            row[:, numbers] = 1
        # The first layers of all blocks are one tensor, masked: one kernel. (L, hidden, S), (L, hidden)
        shape = (len(spaces), hidden, len(graph.spaces))
        first = torch.randn(shape, generator=random) / mask.sum(dim=2, keepdim=True).clamp(min=1).sqrt()
        self.first = nn.Parameter((first * mask).to(device))
        self.shift = nn.Parameter(torch.randn(shape[:2], generator=random).to(device))
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
    """Widths to sample from: so many for each space, evenly from the smallest to the largest."""

    def __init__(self, problem: Problem, groups: int) -> None:
        self.problem, self.options = problem, problem.options  # all that are allowed
        self.counts = (self.options.last + 1).clamp(max=groups)  # (S,)
        steps = torch.arange(groups)[:, None].minimum(self.counts - 1) / (self.counts - 1).clamp(min=1)
        self.table = self.options.widths((steps * self.options.last).round().long()).T.contiguous()  # (S, groups)
        self.uniform: Genes = tuple(problem.uniform().values())
        # Where no widths use the budget to the tolerance, those count that use as much of it as these.
        self.least = min(TOLERANCE, problem.shares(torch.tensor([self.uniform])).item())

    def sample(self, count: int, random: torch.Generator) -> Tensor:
        """Random widths, each one of each space equally likely. -> (count, S) int64"""
        chances = torch.rand(count, len(self.counts), generator=random, dtype=torch.float64)
        return self.table[torch.arange(len(self.counts)), (chances * self.counts).long()]

    def inside(self, candidates: Tensor, count: int, known: Collection[Genes]) -> list[Genes]:
        """Up to `count` new ones: candidates inside the budget, then some that are moved there. (N, S)"""
        problem, shares = self.problem, self.problem.shares(candidates)
        ready = candidates[(shares >= self.least) & (shares <= 1)].tolist()
        found = [genes for genes in dict.fromkeys(map(tuple, ready)) if genes not in known][:count]
        for wish in candidates[: 4 * count]:
            if len(found) >= count:
                break
            widths = round_to_budget(problem.graph, problem.budget, wish.double(), self.options, TOLERANCE)
            genes = tuple(widths.values())
            reached = problem.shares(torch.tensor([genes])).item() >= self.least
            if reached and genes not in known and genes not in found:
                found.append(genes)
        return found


class WidthsLoader:
    """A loader whose batches are ((input, widths), labels), with random widths each, given by seed, epoch and place.

    For a loss of the user's own, the whole batch is in the place of the labels.
    """

    def __init__(self, loader: Loader, grid: Grid, seed: int, device: torch.device, whole: bool) -> None:
        self.loader, self.grid, self.seed, self.device, self.whole = loader, grid, seed, device, whole
        self.epoch = 0
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
        """The batches of the epoch from number `skip` on; those before are read now, not at the first step."""
        widths = self.grid.sample(len(self), generator(self.seed, _WIDTHS, self.epoch)).to(self.device)
        batches = batches_from(self.loader, self.epoch, skip)
        # never more than len(self), whatever the loader has
        return map(self._joined, batches, widths[skip:].unbind())

    def _joined(self, batch: Any, widths: Tensor) -> Any:
        return (input_of(batch), widths), batch if self.whole else labels_of(batch)


@dataclass(frozen=True, kw_only=True)
class MetaPruningConfig(MethodConfig):
    """How the PruningNet is built and trained, and how widths are bred with it."""

    hidden: int = setting(
        32, "Units between the two layers of a block; each unit costs as many parameters as the network.", 1
    )
    max_params: int = setting(400_000_000, "Largest number of parameters that the PruningNet may have.", 1)
    groups: int = setting(31, "Number of widths per space to sample from, including the smallest and the largest.", 2)
    epochs: int | None = setting(None, "Number of epochs to train the PruningNet. None: as many as the recipe.", 1)
    population: int = setting(50, "Number of networks judged in each generation.", 1)
    generations: int = setting(20, "Number of generations, including the first, random one.", 1)
    parents: int = setting(10, "Number of best networks so far from which the next generation is bred.", 1)
    mutation: float = setting(0.1, "Probability that a width of a mutated network is resampled.", high=1, above=0)
    crossed: float = setting(
        0.5, "Share of a generation that combines the widths of two parents; the others are mutated.", 0, 1
    )
    batches: int | None = setting(None, "Number of held-out batches used to judge widths. None: all of them.", 1)


def prepare(problem: Problem, config: MetaPruningConfig) -> Prepared:
    """Train a PruningNet on random widths: the same for all budgets."""
    net, loss = _pruning_net(problem, config), problem.task.loss
    grid = Grid(problem, config.groups)
    loader = WidthsLoader(problem.loader, grid, problem.seed, device_of(net), whole=loss is not None)
    epochs = config.epochs or problem.recipe.epochs
    recipe = replace(problem.recipe, epochs=epochs, warmup_epochs=min(problem.recipe.warmup_epochs, epochs))
    inner = loss and (lambda output, batch: loss(output, batch[1]))  # the user's loss on the user's batch
    train(net, loader, recipe, task=replace(problem.task, loss=inner), runtime=problem.runtime.stage(CHOOSING))
    state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    return Prepared(state=state, sample_passes=epochs * samples_of(problem.loader))


def find_metapruning(problem: Problem, config: MetaPruningConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Breed widths inside the budget; without the state of a PruningNet, one is trained first."""
    prepared = prepare(problem, config) if state is None else Prepared(state=state)
    net = _pruning_net(problem, config)
    net.load_state_dict(dict(prepared.state))
    with judging(problem, net, net, config.batches) as (judge, samples):

        def scores_of(several: Sequence[Genes]) -> list[float]:
            return judge(torch.tensor(several).to(device_of(net)).unbind())

        scores = evolve(problem, config, scores_of)
    widths = problem.round_to_budget(torch.tensor(max(scores, key=lambda genes: scores[genes])))
    return Choice(widths=widths, kept=widths, sample_passes=prepared.sample_passes + len(scores) * samples)


def _pruning_net(problem: Problem, config: MetaPruningConfig) -> PruningNet:
    return PruningNet(problem.model, problem.graph, config.hidden, config.max_params, problem.seed)


def evolve(problem: Problem, config: MetaPruningConfig, judge: Judge) -> dict[Genes, float]:
    """All widths that were judged, with their scores, in the order in which they were bred."""
    grid, random, scores = Grid(problem, config.groups), generator(problem.seed, _EVOLUTION), dict[Genes, float]()
    crossed = round(config.crossed * config.population)
    fresh = grid.inside(grid.sample(_TRIES * config.population, random), config.population, scores) or [grid.uniform]
    for number in range(config.generations):
        if not fresh:  # there are no others
            break
        judged = judge(fresh)
        good = [value for value in judged if math.isfinite(value)]
        scores |= {genes: value if math.isfinite(value) else _WORST for genes, value in zip(fresh, judged, strict=True)}
        ranked = [genes for genes in sorted(scores, key=lambda genes: -scores[genes]) if scores[genes] > _WORST]
        if not ranked:
            raise TrainingError(f"The metric of all networks is {judged[0]}: look at the metric and at the outputs.")
        record: dict[str, Any] = {"generation": number, "best": scores[ranked[0]]}
        record |= {"mean": sum(good) / len(good)} if good else {}
        record["judged"] = len(scores)
        problem.log(record | ({"failed": len(judged) - len(good)} if len(good) < len(judged) else {}))
        parents = torch.tensor(ranked[: config.parents])  # (K, S)
        fresh = grid.inside(cross(parents, _TRIES * crossed, random), crossed, scores)
        missing = config.population - len(fresh)
        candidates = mutate(parents, _TRIES * missing, grid, config.mutation, random)
        fresh += grid.inside(candidates, missing, {*scores, *fresh})
    lost = list(scores.values()).count(_WORST)
    if lost and current().first:
        sentence = f"The metric of {lost} of {len(scores)} networks is not finite: they count as the worst."
        warnings.warn(sentence, MetricWarning, stacklevel=3)
    return scores


def mutate(parents: Tensor, count: int, grid: Grid, chance: float, random: torch.Generator) -> Tensor:
    """Each width is a parent's, or with this chance a random one. (K, S) -> (count, S)"""
    chosen = parents[torch.randint(len(parents), (count,), generator=random)]
    anew = torch.rand(chosen.shape, generator=random) < chance
    return torch.where(anew, grid.sample(count, random), chosen)


def cross(parents: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Each width is that of one of two parents. (K, S) -> (count, S)"""
    one, other = parents[torch.randint(len(parents), (2, count), generator=random)]
    return torch.where(torch.rand(one.shape, generator=random) < 0.5, one, other)


metapruning = Method(find_metapruning, MetaPruningConfig, prepare, holds_out=True)
