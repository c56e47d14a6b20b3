"""Uniform and random widths, DMCP, and the package torch-pruning."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dmcp import sampling
from dmcp.batches import generator, input_of, on_device, size_of
from dmcp.compare.problem import Choice, Problem, Settings, load, loaded, samples_of
from dmcp.errors import BudgetError, DataError, DmcpError, TrainingError
from dmcp.exporting import blaming
from dmcp.importance import magnitude, written
from dmcp.sampling import FILLED, random_widths
from dmcp.searching.config import SearchResult
from dmcp.searching.search import SEARCH, search
from dmcp.settings import SearchConfig, setting
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph

_RANDOM, _DIRECT = 7, 11  # what random numbers are for


@dataclass(frozen=True, kw_only=True)
class NoConfig(Settings):
    """There is nothing to set."""


def find_uniform(problem: Problem, config: NoConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """The uniform widths; no data is seen."""
    widths = problem.uniform()
    return Choice(widths=widths, kept=widths)


def find_random(problem: Problem, config: NoConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """The first of many random widths that use the budget; no data is seen."""
    random = generator(problem.seed, _RANDOM)
    bounds = (problem.min_widths, problem.align, FILLED, problem.max_widths)
    widths = random_widths(problem.graph, problem.budget, random, *bounds)
    return Choice(widths=widths, kept=widths)


# DMCP


@dataclass(frozen=True, kw_only=True)
class DmcpConfig(Settings):
    """Settings of a search inside a comparison."""

    epochs: int = setting(30, "Passes over the data, the warm-up among them.", 1)
    groups: int = setting(10, "Groups that each space is divided into.", 1)
    lr_share: float = setting(0.5, "Of the recipe's learning rate: a step sums several gradients.", 1e-300)
    more: Mapping[str, Any] = field(default_factory=dict, metadata={"help": "Other settings of SearchConfig, by name."})
    hold_out: bool = setting(False, "The alphas learn from the held-out images, the weights from the others.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.search_config(budget="50%")

    def search_config(self, **known: Any) -> SearchConfig:
        """The whole settings of the search."""
        try:
            return SearchConfig(**known | {"epochs": self.epochs, "groups": self.groups, **self.more})
        except TypeError as error:
            raise TrainingError(f"more: there is no such setting of a search: {error}.") from None


def find_dmcp(problem: Problem, config: DmcpConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Search the alphas, then take the expected widths."""
    recipe, loader = problem.recipe, problem.loader
    reference = 1024 if recipe.reference_batch else samples_of(loader) // len(loader)  # else rates are never scaled
    lr = config.lr_share * recipe.lr * reference / (recipe.reference_batch or reference)
    settings = config.search_config(
        budget=problem.budget,
        align=problem.align,
        lr=lr,
        min_lr=lr / 10,
        reference_batch=reference,
        weight_decay=recipe.weight_decay,
        label_smoothing=recipe.label_smoothing,
        seed=problem.seed,
    )
    net = Supernet(problem.model, problem.graph, settings.groups, settings.align)
    if net.min_widths != problem.min_widths and not settings.min_channels:  # other groups than those of the comparison
        settings = replace(settings, min_channels=dict(problem.min_widths))
    if problem.max_widths and not settings.max_channels:
        settings = replace(settings, max_channels=dict(problem.max_widths))
    if state is not None:
        load(net.model, state)
    arch_loader = problem.held_out if config.hold_out else None
    runtime = problem.runtime.stage(SEARCH)
    found = search(net, loader, settings, arch_loader=arch_loader, task=problem.task, runtime=runtime)
    widths = sampling.expected(replace(found, tolerance=FILLED))
    trained = settings.epochs if settings.train_weights else settings.warmup_epochs
    moved = settings.epochs - settings.warmup_epochs if settings.task_loss else 0
    passes = samples_of(loader) * (trained * (2 + settings.subnets) + moved)
    return Choice(widths=widths, kept=widths, model=net.model, sample_passes=passes)


@dataclass(frozen=True, kw_only=True)
class DirectConfig(Settings):
    """Settings of direct sampling."""

    number: int = setting(0, "Which of the widths, in the order in which they are sampled.", 0)


def find_direct(problem: Problem, config: DirectConfig, found: SearchResult | None = None) -> Choice:
    """Sample from a search that is done: widths inside the budget, others for each seed."""
    if not isinstance(found, SearchResult):
        raise TrainingError("dmcp-direct samples from a search: give its SearchResult (of dmcp.search) as found=...")
    random = generator(problem.seed, _DIRECT)
    sampled = sampling.direct(replace(found, tolerance=FILLED), config.number + 1, random)
    if len(sampled) <= config.number:
        raise BudgetError(f"The chains hold {len(sampled)} different widths inside the budget: lower `number`.")
    return Choice(widths=sampled[config.number], kept=sampled[config.number])


# torch-pruning

_PARTS = 100  # of the last step
_CANNOT = "torch-pruning cannot prune this network, use another method"


@dataclass(frozen=True, kw_only=True)
class TorchPruningConfig(Settings):
    """How torch-pruning chooses channels; its own defaults, but for the first and the last."""

    global_pruning: bool = setting(True, "Channels of all layers compete; else each layer loses the same share.")
    norm: int = setting(2, "1 or 2: the norm that channels are ranked by.", 1, 2)
    normalize: bool = setting(True, "Divide the norms of tied layers by the mean of all their channels.")
    max_pruning_ratio: float = setting(1.0, "Share of a layer that may go at most.", 1e-300, 1)
    steps: int = setting(50, "In which all channels would be gone.", 1)


def find_torch_pruning(
    problem: Problem, config: TorchPruningConfig, state: Mapping[str, Tensor] | None = None
) -> Choice:
    """Prune a trained network: `state` is its state dict (None: the model is trained already)."""
    try:
        package: Any = importlib.import_module("torch_pruning")
    except ImportError:
        raise DmcpError("torch-pruning is not installed: pip install torch-pruning, or leave this peer out.") from None
    graph, full = problem.graph, problem.graph.full.tensor()
    model, example = loaded(problem, state), _example(problem)
    pruned = copy.deepcopy(model).cpu().float().eval().requires_grad_(True)  # its tracing follows gradients
    ledger = _Ledger(model, graph, config.steps)
    pruner = _pruner(package, config, pruned, graph, example)
    before, after = full, full
    for step in range(config.steps):
        ledger.follow(pruner, step)
        before, after = after, ledger.widths()
        share = problem.shares(after[None]).item()
        problem.log({"step": step, "share": share})
        if share <= 1:
            break
    if torch.equal(after, full):
        raise TrainingError("torch-pruning finds no channels that it can prune in this network: use another method.")
    # the part of the last step that just holds the budget
    parts = torch.linspace(0, 1, _PARTS + 1, dtype=torch.float64)[:, None]
    between = before + parts * (after - before)  # (P, S)
    inside = problem.shares(between.round().long()) <= 1
    widths = problem.fit(between[inside.int().argmax() if inside.any() else -1])
    kept = {name: ledger.strongest(name, width) for name, width in widths.items()}
    return Choice(widths=widths, kept=kept, model=model, sample_passes=size_of((example,)))


def _example(problem: Problem) -> Any:
    """An input to trace with; a short one, where that is simple."""
    with torch.random.fork_rng([]):  # a DataLoader draws from it
        for batch in problem.held_out:
            found = on_device(input_of(batch), torch.device("cpu"))
            return found[:2].float() if isinstance(found, Tensor) else found
    raise DataError("There are no held-out batches: is the batch larger than the data?")


def _pruner(package: Any, config: TorchPruningConfig, pruned: nn.Module, graph: ChannelGraph, example: Any) -> Any:
    """Its pruner for this network; what is unprunable here it leaves alone, too."""
    normalizer = "mean" if config.normalize else None
    importance = package.importance.GroupMagnitudeImportance(p=config.norm, normalizer=normalizer)
    with blaming(_CANNOT, TrainingError), torch.enable_grad():
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
        self.rows: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in self.spaces}
        self.gone: dict[str, Tensor] = {}  # per filter of a layer
        self.norms: dict[str, list[float]] = {}
        for name, space in self.spaces.items():
            for place in written(model, graph, space):
                layer = place.name.rpartition(".")[0]
                self.rows[name].append((layer, place.rows))
                self.gone[layer] = torch.full((model.get_parameter(place.name).shape[place.dim],), steps)
            norms = magnitude(model, graph, space, power=2)
            self.norms[name] = norms.tolist() if norms is not None else [0.0] * space.size

    def follow(self, pruner: Any, step: int) -> None:
        """Let the package do one step, and note what it removes."""
        names = {module: name for name, module in pruner.model.named_modules()}
        with blaming(_CANNOT, TrainingError):
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
