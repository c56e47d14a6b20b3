"""Uniform and random widths, DMCP, and the package torch-pruning."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dmcp import sampling
from dmcp.batches import generator, input_of, on_device, size_of
from dmcp.budget import check_reachable, spent_shares
from dmcp.compare.problem import Choice, Problem, samples_of
from dmcp.errors import BudgetError, DataError, DmcpError, TrainingError
from dmcp.importance import magnitude, written
from dmcp.modules import unwrap
from dmcp.sampling import FILLED, fit, random_widths
from dmcp.searching.config import SearchResult
from dmcp.searching.search import SEARCH, search
from dmcp.settings import SearchConfig
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Task


@dataclass(frozen=True, kw_only=True)
class UniformConfig:
    """There is nothing to set."""


def find_uniform(problem: Problem, config: UniformConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """The uniform widths; no data is seen."""
    widths = problem.uniform()
    return Choice(widths=widths, kept=widths)


_DRAW = 7  # what the random numbers are for


@dataclass(frozen=True, kw_only=True)
class RandomConfig:
    """There is nothing to set."""


def find_random(problem: Problem, config: RandomConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """The first of many drawn structures that uses the budget; no data is seen."""
    draw = generator(problem.seed, _DRAW)
    bounds = (problem.floor, problem.align, FILLED, problem.ceiling)
    widths = random_widths(problem.graph, problem.budget, draw, *bounds)
    return Choice(widths=widths, kept=widths)


_DMCP_DRAW = 11  # what the random numbers are for


@dataclass(frozen=True, kw_only=True)
class DmcpConfig:
    """Settings of a search inside a comparison."""

    epochs: int = 30  # passes over the data, the warm-up among them
    groups: int = 10  # groups that each space is divided into
    lr_share: float = 0.5  # of the recipe's learning rate: a step sums the gradients of several sub-networks
    more: Mapping[str, Any] = field(default_factory=dict)  # other settings of SearchConfig, by name
    hold_out: bool = False  # whether the alphas learn by the problem's held-out images, and the weights by the others

    def __post_init__(self) -> None:
        if not self.lr_share > 0:
            raise TrainingError(f"lr_share must be above 0, not {self.lr_share}.")
        self.search_config("50%")

    def search_config(self, budget: Any, recipe: Any = None, **known: Any) -> SearchConfig:
        """The whole settings of the search."""
        if recipe is not None:
            reference = known.setdefault("reference_batch", 1024)
            lr = self.lr_share * recipe.lr * reference / (recipe.reference_batch or reference)
            known |= {"lr": lr, "min_lr": lr / 10, "weight_decay": recipe.weight_decay}
            known |= {"label_smoothing": recipe.label_smoothing}
        try:
            return SearchConfig(**known | {"budget": budget, "epochs": self.epochs, "groups": self.groups, **self.more})
        except TypeError as error:
            raise TrainingError(f"more: there is no such setting of a search: {error}.") from None


def find_dmcp(problem: Problem, config: DmcpConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Search the alphas, then take the expected widths."""
    known: dict[str, Any] = {"seed": problem.seed, "align": problem.align}
    if problem.recipe.reference_batch is None:  # learning rates that are never scaled
        known["reference_batch"] = samples_of(problem.loader) // len(problem.loader)
    settings = config.search_config(problem.budget, problem.recipe, **known)
    net = Supernet(problem.model, problem.graph, settings.groups, settings.align)
    if net.min_widths != problem.floor and not settings.min_channels:  # other groups than those of the comparison
        settings = replace(settings, min_channels=dict(problem.floor))
    if problem.ceiling and not settings.max_channels:
        settings = replace(settings, max_channels=dict(problem.ceiling))
    if state is not None:
        net.model.load_state_dict(dict(state))
    found = search(
        net,
        problem.loader,
        settings,
        arch_loader=problem.held if config.hold_out else None,
        task=Task(loss=problem.loss),
        runtime=problem.runtime(SEARCH),
    )
    widths = sampling.expected(replace(found, tolerance=FILLED))
    passes = samples_of(problem.loader) * _passes(settings)
    return Choice(widths=widths, kept=widths, model=net.model, sample_passes=passes)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Settings of direct sampling from a search that is done."""

    number: int = 0  # which of the structures, in the order in which they are drawn

    def __post_init__(self) -> None:
        if type(self.number) is not int or self.number < 0:
            raise TrainingError(f"number must be an int of at least 0, not {self.number!r}.")


def draw(problem: Problem, config: SampleConfig, found: SearchResult | None = None) -> Choice:
    """Direct sampling from a search that is done: one structure inside the budget, another one for each seed."""
    if not isinstance(found, SearchResult):
        raise TrainingError(
            "dmcp-direct draws from a search that is done: give its SearchResult (of dmcp.search) as found=..."
        )
    number = config.number
    drawn = sampling.direct(replace(found, tolerance=FILLED), number + 1, generator(problem.seed, _DMCP_DRAW))
    if len(drawn) <= number:
        raise BudgetError(
            f"The chains hold no more than {len(drawn)} different structures inside the budget: there is none with "
            f"the number {number}; draw fewer."
        )
    return Choice(widths=drawn[number], kept=drawn[number])


def _passes(settings: SearchConfig) -> int:
    """Networks that each sample is run through."""
    trained = settings.epochs if settings.train_weights else settings.warmup_epochs
    moved = settings.epochs - settings.warmup_epochs if settings.task_loss else 0
    return trained * (2 + settings.subnets) + moved


STAGE = "torch-pruning"
_PARTS = 100  # of the last step


@dataclass(frozen=True, kw_only=True)
class TorchPruningConfig:
    """How torch-pruning chooses channels; its own defaults, but for the first and the last."""

    global_pruning: bool = True  # channels of all layers compete; otherwise each layer loses the same share
    norm: int = 2  # 1 or 2: the norm that channels are ranked by
    normalise: bool = True  # divide the norms of tied layers by the mean of all their channels
    max_pruning_ratio: float = 1.0  # share of a layer that may go at most
    steps: int = 50  # in which all channels would be gone

    def __post_init__(self) -> None:
        if self.norm not in (1, 2):
            raise TrainingError(f"norm must be 1 or 2, not {self.norm!r}.")
        if not 0 < self.max_pruning_ratio <= 1:
            raise TrainingError(f"max_pruning_ratio must be above 0 and at most 1, not {self.max_pruning_ratio!r}.")
        if type(self.steps) is not int or self.steps < 1:
            raise TrainingError(f"steps must be an int of at least 1, not {self.steps!r}.")


def find_torch_pruning(
    problem: Problem, config: TorchPruningConfig, state: Mapping[str, Tensor] | None = None
) -> Choice:
    """Prune a trained network: `state` is its state dict (None: the model is trained already)."""
    package, graph, full = _package(), problem.graph, problem.graph.full.tensor()
    check_reachable(problem.budget, graph, problem.floor, problem.ceiling)
    model = _trained(problem.model, state)
    example = _example(problem)
    pruned = copy.deepcopy(model).cpu().float().eval().requires_grad_(True)  # its tracing follows gradients
    ledger = _Ledger(model, graph, config.steps)
    pruner = _pruner(package, config, pruned, graph, example)
    before, after = full, full
    for step in range(config.steps):
        ledger.follow(pruner, step)
        before, after = after, ledger.widths()
        share = spent_shares(problem.budget, graph, after[None]).max().item()
        problem.tell(STAGE, {"step": step, "share": share})
        if share <= 1:
            break
    if torch.equal(after, full):
        raise TrainingError("torch-pruning finds no channels that it can prune in this network: use another method.")
    widths = fit(graph, problem.budget, _part_of_step(problem, before, after), problem.options, FILLED)
    kept = {name: ledger.strongest(name, width) for name, width in widths.items()}
    return Choice(widths=widths, kept=kept, model=model, sample_passes=size_of((example,)))


def _trained(model: nn.Module, state: Mapping[str, Tensor] | None) -> nn.Module:
    """A copy of the network with the trained weights."""
    trained = copy.deepcopy(unwrap(model))
    if state is not None:
        try:
            trained.load_state_dict(dict(state))
        except RuntimeError:
            raise TrainingError(
                "The state is not of this network: give the state dict of the same model, trained but not pruned."
            ) from None
    return trained


def _example(problem: Problem) -> Any:
    """An input to trace with; a short one, where that is simple."""
    with torch.random.fork_rng([]):  # a DataLoader draws from it
        for batch in problem.held:
            found = on_device(input_of(batch), torch.device("cpu"))
            return found[:2].float() if isinstance(found, Tensor) else found
    raise DataError("There are no held-out batches: is the batch larger than the data?")


def _part_of_step(problem: Problem, before: Tensor, after: Tensor) -> Tensor:
    """The widths between two steps that just hold the budget; those after the last one, if none do. -> (S,)"""
    parts = torch.linspace(0, 1, _PARTS + 1, dtype=torch.float64)[:, None]
    between = before + parts * (after - before)  # (P, S)
    inside = spent_shares(problem.budget, problem.graph, between.round().long()).amax(dim=1) <= 1
    return between[inside.int().argmax() if inside.any() else -1]


# what the package does


def _package() -> Any:
    try:
        return importlib.import_module("torch_pruning")
    except ImportError:
        raise DmcpError("torch-pruning is not installed: pip install torch-pruning, or leave this peer out.") from None


@contextlib.contextmanager
def _its_errors() -> Iterator[None]:
    """What the package stumbles over, in one sentence."""
    try:
        yield
    except Exception as error:  # whatever it may be
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise TrainingError(f"torch-pruning cannot prune this network, use another method: {reason}") from error


def _pruner(package: Any, config: TorchPruningConfig, pruned: nn.Module, graph: ChannelGraph, example: Any) -> Any:
    """Its pruner for this network; what we keep whole it keeps too."""
    importance = package.importance.GroupMagnitudeImportance(
        p=config.norm, normalizer="mean" if config.normalise else None
    )
    with _its_errors(), torch.enable_grad():
        return package.pruner.BasePruner(
            pruned,
            example,
            importance=importance,
            global_pruning=config.global_pruning,
            pruning_ratio=1.0,
            max_pruning_ratio=config.max_pruning_ratio,
            iterative_steps=config.steps,
            ignored_layers=[pruned.get_submodule(item.name) for item in graph.unprunable],
            in_channel_groups={},  # its defaults are shared by all pruners of a process, which write to them
            out_channel_groups={},
        )


class _Ledger:
    """At which step each channel was removed; `steps` for those that are left."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, steps: int) -> None:
        self.steps, self.spaces = steps, {space.name: space for space in graph.spaces}
        # rows of filters per channel of a space, in each layer that writes it. (size, r)
        self.rows: dict[str, list[tuple[str, Tensor]]] = {}
        self.gone: dict[str, Tensor] = {}  # per filter of a layer
        self.norms: dict[str, list[float]] = {}
        for name, space in self.spaces.items():
            places = written(model, graph, space)
            layers = [place.name.rpartition(".")[0] for place in places]
            self.rows[name] = [(layer, place.rows) for layer, place in zip(layers, places, strict=True)]
            for layer, place in zip(layers, places, strict=True):
                filters = model.get_parameter(place.name).shape[place.dim]
                self.gone[layer] = torch.full((filters,), steps)
            norms = magnitude(model, graph, space, power=2)
            self.norms[name] = norms.tolist() if norms is not None else [0.0] * space.size

    def follow(self, pruner: Any, step: int) -> None:
        """Let the package do one step, and note what it removes."""
        names = {module: name for name, module in pruner.model.named_modules()}
        with _its_errors():
            for group in pruner.step(interactive=True):
                lost: dict[str, set[int]] = {}
                for dependency, filters in group:
                    layer = names.get(dependency.target.module, "")
                    if layer in self.gone and pruner.DG.is_out_channel_pruning_fn(dependency.handler):
                        lost.setdefault(layer, set()).update(map(int, filters))
                group.prune()
                for layer, filters in lost.items():
                    left = (self.gone[layer] == self.steps).nonzero().flatten()  # its numbers count these only
                    self.gone[layer][left[sorted(filters)]] = step

    def removed(self, name: str) -> Tensor:
        """Step at which each filter of each channel was removed; no filters where no layer writes it. -> (size, r)"""
        parts = [self.gone[layer][rows] for layer, rows in self.rows[name]]
        return torch.cat(parts, dim=1) if parts else torch.full((self.spaces[name].size, 1), self.steps)

    def widths(self) -> Tensor:
        """Channels left in each space. -> (S,)"""
        left = [(self.removed(name) == self.steps).double().mean().item() for name in self.spaces]
        sizes = [space.size for space in self.spaces.values()]
        return torch.tensor([max(1, round(part * size)) for part, size in zip(left, sizes, strict=True)])

    def strongest(self, name: str, width: int) -> list[int]:
        """The channels that stay: those removed last or not at all, of these those with the largest norm."""
        late = self.removed(name).double().mean(dim=1).tolist()
        order = sorted(range(len(late)), key=lambda channel: (late[channel], self.norms[name][channel]), reverse=True)
        return sorted(order[:width])
