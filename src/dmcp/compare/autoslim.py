"""AutoSlim: a slimmable network, narrowed where it hurts least."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import device_of, input_of, size_of
from dmcp.budget import check_reachable, spent_shares
from dmcp.compare.problem import Choice, Prepared, Problem, batch_statistics, held_batches, samples_of
from dmcp.errors import TrainingError
from dmcp.losses import classification_loss
from dmcp.runtime.distributed import current, mean_values
from dmcp.runtime.engine import ResolvedEngine
from dmcp.sampling import FILLED, fit
from dmcp.searching.search import search
from dmcp.searching.subnets import chains
from dmcp.settings import Engine, Sampling, SearchConfig
from dmcp.supernet import Supernet
from dmcp.training import Task

STAGE = "autoslim"  # what the progress of the training is told as
GREEDY = "autoslim greedy"  # the same of the choice


@dataclass(frozen=True, kw_only=True)
class AutoSlimConfig:
    """Settings of AutoSlim."""

    epochs: int = 40  # passes over the data that train the slimmable network; the paper: 10 to 20 % of a full training
    groups: int = 10  # groups that each space is divided into; one is dropped at a time
    subnets: int = 2  # random sub-networks in each training step, besides the largest and the smallest
    distill: bool = True  # whether sub-networks imitate the largest one instead of learning the labels
    lr_share: float = 0.5  # of the recipe's learning rate: a step sums the gradients of several sub-networks
    batches: int = 4  # held-out batches that each trial is run on
    at_once: int = 1  # spaces narrowed in one step, those that hurt least; more are faster where there are very many
    per_saved: bool = False  # whether trials are compared by the loss they add per cost that they save

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("groups", 2), ("subnets", 0), ("batches", 1), ("at_once", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise TrainingError(f"{name} must be an int of at least {least}, not {value!r}.")
        for name in ("distill", "per_saved"):
            if not isinstance(getattr(self, name), bool):
                raise TrainingError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if not isinstance(self.lr_share, int | float) or not 0 < self.lr_share < math.inf:  # also refuses NaN
            raise TrainingError(f"lr_share must be a number above 0, like 0.5, not {self.lr_share!r}.")


def prepare(problem: Problem, config: AutoSlimConfig) -> Prepared:
    """Train the slimmable network: one for all budgets."""
    samples = samples_of(problem.loader)
    net = Supernet(problem.model, problem.graph, config.groups, problem.align)

    settings = _settings(problem, config, samples // len(problem.loader))
    search(net, problem.loader, settings, task=Task(loss=problem.loss), runtime=problem.runtime(STAGE))
    state = {name: tensor.detach().clone() for name, tensor in net.model.state_dict().items()}
    return Prepared(state=state, sample_passes=samples * config.epochs * (2 + config.subnets))


def find_autoslim(problem: Problem, config: AutoSlimConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Narrow the slimmable network, group by group, until it is inside the budget."""
    if state is None:
        raise TrainingError("AutoSlim narrows a network that was trained for it: give state=prepare(...).state.")
    graph = problem.graph
    net = Supernet(problem.model, graph, config.groups, problem.align)
    path = chains(net, min_channels=problem.floor, max_channels=problem.most, align=problem.align)
    borders = path.sizes.cumsum(dim=1).cpu()  # (S, G)
    check_reachable(problem.budget, graph, graph.widths(borders[:, 0]), problem.ceiling)
    _load(net.model, state)
    slimmed, passes = _slim(net, borders, problem, config)
    widths = fit(graph, problem.budget, slimmed.double(), problem.options, FILLED)
    return Choice(widths=widths, kept=widths, model=net.model, sample_passes=passes)


# the greedy steps


@torch.no_grad()
def _slim(net: Supernet, borders: Tensor, problem: Problem, config: AutoSlimConfig) -> tuple[Tensor, int]:
    """The first widths on the greedy way that are inside the budget, and the samples that were run. -> (S,)"""
    resolved = (problem.engine or Engine()).resolve(device_of(net), plain=problem.loss is None)
    with batch_statistics(net), resolved.running(net.model):
        losses, samples = _judge(net, problem, config, resolved)
        widths, runs = problem.most.tensor(), 0
        shares = spent_shares(problem.budget, problem.graph, widths[None])  # (1, L)
        while shares.max() > 1:
            trials = _narrower(widths, borders)  # (C, S)
            found = losses(torch.cat([widths[None], trials]))
            harm = found[1:] - found[0]
            if config.per_saved:
                saved = (shares - spent_shares(problem.budget, problem.graph, trials)) * (shares > 1)
                saved = saved.sum(dim=1).clamp(min=1e-12)
                harm = torch.where(harm > 0, harm / saved, harm * saved)  # of those that do no harm, the largest step
            if not harm.isfinite().any():
                raise TrainingError("No trial has a finite loss: prepare the network with a smaller lr_share.")
            chosen = trials[harm.nan_to_num(nan=math.inf).argsort(stable=True)[: config.at_once]]
            widths, shares = _first_inside(problem, chosen.cummin(dim=0).values)
            runs += len(found)
            problem.tell(GREEDY, {"trials": runs, "loss": found[0].item(), "spent": shares.max().item()})
    return widths, runs * samples


def _first_inside(problem: Problem, ways: Tensor) -> tuple[Tensor, Tensor]:
    """Of widths that become narrower, the first inside the budget, or the last, and their shares. -> (S,), (1, L)"""
    shares = spent_shares(problem.budget, problem.graph, ways)
    place = min(int((shares > 1).any(dim=1).sum()), len(ways) - 1)
    return ways[place], shares[place, None]


def _narrower(widths: Tensor, borders: Tensor) -> Tensor:
    """Every way to make one space one group narrower. (S,), (S, G) -> (C, S)"""
    below = borders.masked_fill(borders >= widths[:, None], 0).amax(dim=1)  # zero for a space at its floor
    spaces = below.nonzero().squeeze(1)
    trials = widths.repeat(len(spaces), 1)
    trials[torch.arange(len(spaces)), spaces] = below[spaces]
    return trials


def _judge(
    net: Supernet, problem: Problem, config: AutoSlimConfig, resolved: ResolvedEngine
) -> tuple[Callable[[Tensor], Tensor], int]:
    """What gives the held-out losses of sub-networks, (C, S) -> (C,) on the CPU, and the samples that each sees."""
    device = resolved.device
    batches = held_batches(problem, config.batches, resolved)
    sizes = torch.tensor([float(size_of(batch)) for batch in batches])
    samples, weights = int(sizes.sum()), (sizes / sizes.sum()).to(device)
    task = problem.loss or classification_loss()

    def loss(batch: Any, gates: Tensor) -> Tensor:
        with resolved.autocast():
            return task(net(input_of(batch), gates), batch).float()

    run = resolved.repeated(loss)

    def losses(widths: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for row in widths.to(device):  # nothing waits for the device until all trials are queued
            gates = net.hard(row)
            rows.append(torch.stack([run(batch, gates) for batch in batches]) @ weights)
        return mean_values(torch.stack(rows), samples, current()).cpu().double()

    return losses, samples


# small things


def _settings(problem: Problem, config: AutoSlimConfig, batch: int) -> SearchConfig:
    """A search that trains weights only, by the recipe as far as it says how."""
    recipe = problem.recipe
    return SearchConfig(
        # any would do that can be reached: the alphas stay where they are
        budget=problem.graph.macs(problem.ceiling) if problem.ceiling else 1.0,
        groups=config.groups,
        align=problem.align,
        min_channels=dict(problem.floor),
        max_channels=dict(problem.ceiling or {}),
        epochs=config.epochs,
        warmup=1 - 1 / config.epochs,  # weights only; the search wants one epoch for its alphas, which does nothing
        warmup_sampling=Sampling.UNIFORM,
        sampling=Sampling.UNIFORM,
        subnets=config.subnets,
        distill=config.distill,
        task_loss=False,
        alpha_lr=0.0,
        alpha_min_lr=0.0,
        lr=config.lr_share * recipe.lr,
        min_lr=config.lr_share * recipe.min_lr,
        reference_batch=recipe.reference_batch or batch,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        label_smoothing=recipe.label_smoothing,
        seed=problem.seed,
    )


def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise TrainingError(f"The state is not one of this network: give that of prepare(...). {reason}") from None
