"""Methods that rank channels: norms, network slimming, the package torch-pruning."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import device_of, input_of, on_device, size_of
from dmcp.compare.problem import CHOOSING, Choice, Prepared, Problem, Settings, loaded, samples_of
from dmcp.errors import TrainingError
from dmcp.exporting import blaming
from dmcp.importance import Place, magnitude, scaled, strongest, vectors, written
from dmcp.losses import Loss, classification_loss
from dmcp.runtime.distributed import current
from dmcp.settings import Engine, setting
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import train

# L1


@dataclass(frozen=True, kw_only=True)
class L1Config(Settings):
    """Settings of the ranking by norms."""

    power: int = setting(1, "Of the weights that are summed: 1 is the paper's L1 norm, 2 the L2 norm.", 1, 2)


def find_l1(problem: Problem, config: L1Config, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Keep the channels with the largest filters, the same share of every space; without a state the model's own."""
    model, graph, widths = loaded(problem, state), problem.graph, problem.uniform()
    kept = {it.name: strongest(magnitude(model, graph, it, config.power), widths[it.name]) for it in graph.spaces}
    return Choice(widths=widths, kept=kept, model=model)


# network slimming


@dataclass(frozen=True, kw_only=True)
class SlimmingConfig(Settings):
    """Settings of network slimming."""

    sparsity: float = setting(1e-4, "Weight of the summed absolute scales in the loss; the paper: 1e-4 or 1e-5.", 0)


def prepare_slimming(problem: Problem, config: SlimmingConfig) -> Prepared:
    """Train the network with scales that are pulled to zero: one for all budgets."""
    model, task, engine = copy.deepcopy(problem.model), problem.task, problem.runtime.engine or Engine()
    if task.loss is None and current().size == 1 and engine.graphs is None:
        engine = replace(engine, graphs=True)  # the loss below never asks the device for a number
    usual = task.loss or classification_loss(problem.recipe.label_smoothing)
    loss = _pulled(usual, model, _scales(model, problem), config.sparsity)
    runtime = replace(problem.runtime.stage(CHOOSING), engine=engine)
    train(model, problem.loader, problem.recipe, task=replace(task, loss=loss), runtime=runtime)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Prepared(state=state, sample_passes=problem.recipe.epochs * samples_of(problem.loader))


def find_slimming(problem: Problem, config: SlimmingConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Drop the channels whose scales are below one threshold, as low as the budget allows.

    Where several layers write a space, their scales are summed, as in the loss: else residual streams would go first.
    """
    graph, model = problem.graph, loaded(problem, state)
    scores = [vectors(model, places).abs().sum(dim=1) for places in _scales(model, problem)]
    widths = problem.fit(_above_threshold(problem, scores))
    kept = {space.name: strongest(score, widths[space.name]) for space, score in zip(graph.spaces, scores, strict=True)}
    return Choice(widths=widths, kept=kept, model=model)


def _above_threshold(problem: Problem, scores: list[Tensor]) -> Tensor:
    """Channels of each space above the smallest threshold that is inside the budget, bounds kept. -> (S,)"""
    bars = torch.cat([torch.tensor([-1.0]), *scores]).sort().values  # the first keeps all, the last none
    below = [torch.searchsorted(score.sort().values, bars, right=True) for score in scores]
    widths = problem.graph.full.tensor() - torch.stack(below, dim=1)  # (N, S)
    widths = widths.maximum(problem.min_widths.tensor()).minimum(problem.widest.tensor())
    return widths[(problem.shares(widths) <= 1).int().argmax()]


def _pulled(task: Loss, model: nn.Module, scales: list[list[Place]], sparsity: float) -> Loss:
    """The task's loss and the absolute scales; a function of tensors only, so that CUDA graphs can hold it."""
    rows: dict[str, list[Tensor]] = {}
    for place in (place for places in scales for place in places):
        rows.setdefault(place.name, []).append(place.rows.flatten())
    parameters: list[Tensor] = [model.get_parameter(name) for name in rows]
    masks = [torch.zeros(len(parameter)) for parameter in parameters]  # a norm may also have channels that always stay
    for mask, own in zip(masks, rows.values(), strict=True):
        mask[torch.cat(own)] = 1
    pull = sparsity * torch.cat(masks).to(device_of(model))

    def loss(output: Any, batch: Any) -> Tensor:
        return task(output, batch) + (torch.cat(parameters).abs() * pull).sum()

    return loss


def _scales(model: nn.Module, problem: Problem) -> list[list[Place]]:
    """Of each space, the scales over its channels."""
    found = [scaled(model, problem.graph, space) for space in problem.graph.spaces]
    if missing := [space.name for space, places in zip(problem.graph.spaces, found, strict=True) if not places]:
        raise TrainingError(
            f"Slimming needs BatchNorms over all channels: give ignore={missing}, or use another method, such as l1."
        )
    return found


# torch-pruning

_PARTS = 100  # of the last step
_CANNOT = "torch-pruning cannot prune this network, use another method"


@dataclass(frozen=True, kw_only=True)
class TorchPruningConfig(Settings):
    """How torch-pruning chooses channels, by L2 norm."""

    global_pruning: bool = setting(True, "Channels of all layers compete; else each layer loses the same share.")
    normalize: bool = setting(True, "Divide the norms of tied layers by the mean of all their channels.")
    steps: int = setting(50, "In which all channels would be gone.", 1)


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
    widths = problem.fit(between[inside.int().argmax() if inside.any() else -1])
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
