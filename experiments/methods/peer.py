"""The package Torch-Pruning (Fang et al., 2023): the weakest groups of tied filters go step by step.

    pip install torch-pruning
    dmcp compare --model cifar:resnet20 --data cifar10 --methods uniform,dmcp,experiments.methods.peer:torch_pruning

No sparse training, no fine-tuning between steps; widths are moved to what budget and alignment allow.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.compare.methods import Method, Own
from dmcp.compare.problem import Choice, MethodConfig, Problem, loaded
from dmcp.errors import TrainingError
from dmcp.exporting.export import blaming
from dmcp.fields import setting
from dmcp.runtime.batches import input_of, on_device, size_of
from dmcp.searching.importance import find_filters, magnitude
from dmcp.tracing.graph import ChannelGraph

_PARTS = 100  # of the last step
_CANNOT = "torch-pruning cannot prune this network, use another method"


@dataclass(frozen=True, kw_only=True)
class TorchPruningConfig(MethodConfig):
    """How torch-pruning chooses channels, by L2 norm."""

    global_pruning: bool = setting(
        True, "Whether channels of all layers compete; otherwise each layer loses the same share."
    )
    normalize: bool = setting(True, "Divide the norms of tied layers by the mean of all their channels.")
    steps: int = setting(50, "Number of pruning steps in which all channels would be removed.", 1)


def find_torch_pruning(
    problem: Problem, config: TorchPruningConfig, state: Mapping[str, Tensor] | None = None
) -> Choice:
    """Prune a trained network: `state` is its state dict (None: the model is trained already)."""
    package: Any = importlib.import_module("torch_pruning")
    graph, full = problem.graph, problem.graph.full.tensor()
    with torch.random.fork_rng([]):  # a DataLoader draws from it
        example = on_device(input_of(next(iter(problem.held_out))), torch.device("cpu"))
    example, model = example[:2].float() if isinstance(example, Tensor) else example, loaded(problem, state)
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
    widths = problem.round_to_budget(between[inside.int().argmax() if inside.any() else -1])
    kept = {name: ledger.strongest(name, width) for name, width in widths.items()}
    return Choice(widths=widths, kept=kept, model=model, sample_passes=size_of((example,)))


def _pruner(package: Any, config: TorchPruningConfig, pruned: nn.Module, graph: ChannelGraph, example: Any) -> Any:
    """Its pruner for this network; what is unprunable here it leaves alone, too."""
    normalizer = "mean" if config.normalize else None
    importance = package.importance.GroupMagnitudeImportance(p=2, normalizer=normalizer)
    with blaming(_CANNOT, TrainingError), torch.enable_grad():
        return package.pruner.BasePruner(
            pruned,
            example,
            importance=importance,
            global_pruning=config.global_pruning,
            pruning_ratio=1.0,
            max_pruning_ratio=1.0,
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
            for place in find_filters(model, graph, space):
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


torch_pruning = Method(find_torch_pruning, TorchPruningConfig, trained=True, own=Own.FINETUNED)
