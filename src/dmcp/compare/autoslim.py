"""AutoSlim: a slimmable network, narrowed where it hurts least."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmcp.batches import input_of, size_of
from dmcp.budget import check_reachable, spent_shares
from dmcp.compare.problem import CHOOSING, Choice, Prepared, Problem, Settings, held_out_batches, loaded, samples_of
from dmcp.errors import TrainingError
from dmcp.losses import classification_loss
from dmcp.runtime.distributed import current, mean_values
from dmcp.runtime.engine import ResolvedEngine
from dmcp.searching.search import search
from dmcp.searching.subnets import chains
from dmcp.settings import Sampling, SearchConfig, setting
from dmcp.supernet import Supernet


@dataclass(frozen=True, kw_only=True)
class AutoSlimConfig(Settings):
    """Settings of AutoSlim."""

    epochs: int = setting(40, "Passes over the data that train the slimmable network; the paper: 10 to 20 %.", 1)
    groups: int = setting(10, "Groups that each space is divided into; one is dropped at a time.", 2)
    subnets: int = setting(2, "Random sub-networks in each step, besides the largest and the smallest.", 0)
    distill: bool = setting(True, "Sub-networks learn from the largest one instead of the labels.")
    lr_share: float = setting(0.5, "Of the recipe's learning rate: a step sums several gradients.", 1e-300)
    batches: int = setting(4, "Held-out batches that each trial is run on.", 1)
    at_once: int = setting(1, "Spaces narrowed in one step; more are faster where there are very many.", 1)


def prepare(problem: Problem, config: AutoSlimConfig) -> Prepared:
    """Train the slimmable network: one for all budgets."""
    samples, recipe = samples_of(problem.loader), problem.recipe
    net = Supernet(problem.model, problem.graph, config.groups, problem.align)
    settings = SearchConfig(  # a search that trains weights only, by the recipe
        budget=problem.graph.macs(problem.max_widths) if problem.max_widths else 1.0,  # the alphas stay anyway
        groups=config.groups,
        align=problem.align,
        min_channels=dict(problem.min_widths),
        max_channels=dict(problem.max_widths or {}),
        epochs=config.epochs,
        warmup=1 - 1 / config.epochs,  # a search wants one epoch for its alphas, which does nothing here
        warmup_sampling=Sampling.UNIFORM,
        sampling=Sampling.UNIFORM,
        subnets=config.subnets,
        distill=config.distill,
        task_loss=False,
        alpha_lr=0.0,
        alpha_min_lr=0.0,
        lr=config.lr_share * recipe.lr,
        min_lr=config.lr_share * recipe.min_lr,
        reference_batch=recipe.reference_batch or samples // len(problem.loader),
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        label_smoothing=recipe.label_smoothing,
        seed=problem.seed,
    )
    search(net, problem.loader, settings, task=problem.task, runtime=problem.runtime.stage(CHOOSING))
    state = {name: tensor.detach().clone() for name, tensor in net.model.state_dict().items()}
    return Prepared(state=state, sample_passes=samples * config.epochs * (2 + config.subnets))


def find_autoslim(problem: Problem, config: AutoSlimConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Narrow the slimmable network, `state` of `prepare`, group by group, until it is inside the budget."""
    graph = problem.graph
    net = Supernet(loaded(problem, state), graph, config.groups, problem.align)
    path = chains(net, min_channels=problem.min_widths, max_channels=problem.widest, align=problem.align)
    borders = path.sizes.cumsum(dim=1).cpu()  # (S, G)
    check_reachable(problem.budget, graph, graph.widths(borders[:, 0]), problem.max_widths)
    slimmed, passes = _slim(net, borders, problem, config)
    widths = problem.fit(slimmed)
    return Choice(widths=widths, kept=widths, model=net.model, sample_passes=passes)


@torch.no_grad()
def _slim(net: Supernet, borders: Tensor, problem: Problem, config: AutoSlimConfig) -> tuple[Tensor, int]:
    """The first widths on the greedy way that are inside the budget, and the samples that were run. -> (S,)"""
    widths, runs = problem.widest.tensor(), 0
    shares = spent_shares(problem.budget, problem.graph, widths[None])  # (1, L)
    with held_out_batches(problem, net.model, config.batches, problem.task.loss is None) as (batches, resolved):
        losses = _losses(net, problem, batches, resolved)
        while shares.max() > 1:
            trials = _narrower(widths, borders)  # (C, S)
            found = losses(torch.cat([widths[None], trials]))
            harm = found[1:] - found[0]
            if not harm.isfinite().any():
                raise TrainingError("No trial has a finite loss: prepare the network with a smaller lr_share.")
            chosen = trials[harm.nan_to_num(nan=math.inf).argsort(stable=True)[: config.at_once]].cummin(dim=0).values
            every = spent_shares(problem.budget, problem.graph, chosen)
            place = min(int((every > 1).any(dim=1).sum()), len(chosen) - 1)  # the first inside, or the last
            widths, shares = chosen[place], every[place, None]
            runs += len(found)
            problem.log({"trials": runs, "loss": found[0].item(), "spent": shares.max().item()})
    return widths, runs * sum(map(size_of, batches))


def _narrower(widths: Tensor, borders: Tensor) -> Tensor:
    """Every way to make one space one group narrower. (S,), (S, G) -> (C, S)"""
    below = borders.masked_fill(borders >= widths[:, None], 0).amax(dim=1)  # zero for a space at its smallest
    spaces = below.nonzero().squeeze(1)
    trials = widths.repeat(len(spaces), 1)
    trials[torch.arange(len(spaces)), spaces] = below[spaces]
    return trials


def _losses(
    net: Supernet, problem: Problem, batches: list[Any], resolved: ResolvedEngine
) -> Callable[[Tensor], Tensor]:
    """What gives the held-out losses of sub-networks, (C, S) -> (C,) on the CPU."""
    sizes = torch.tensor([float(size_of(batch)) for batch in batches])
    weights = (sizes / sizes.sum()).to(resolved.device)
    task = problem.task.loss or classification_loss()

    def loss(batch: Any, gates: Tensor) -> Tensor:
        with resolved.autocast():
            return task(net(input_of(batch), gates), batch).float()

    run = resolved.repeated(loss)

    def losses(widths: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for row in widths.to(resolved.device):  # nothing waits for the device until all trials are queued
            gates = net.hard(row)
            rows.append(torch.stack([run(batch, gates) for batch in batches]) @ weights)
        return mean_values(torch.stack(rows), int(sizes.sum()), current()).cpu().double()

    return losses
