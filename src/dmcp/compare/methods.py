"""The methods that `dmcp compare` knows, by name; uniform, random, dmcp and autoslim themselves.

A method is a function find(problem, config) that returns a Choice; problem.py says what it gets. One that starts from
trained weights is called with their state dict, too: find(problem, config, state). To add a method, write it (rankings
are in ranking.py) and give it a line in METHODS; to try one, leave it where it is and call it package.module:NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmcp.budgets import Budget
from dmcp.compare.problem import CHOOSING, Choice, MethodConfig, Prepared, Problem, held_out_batches, loaded, samples_of
from dmcp.compare.ranking import L1Config, SlimmingConfig, find_l1, find_sensitivity, find_slimming, prepare_slimming
from dmcp.defaults import resolve_search, resolve_training
from dmcp.errors import DmcpError, TrainingError
from dmcp.exporting.export import blaming
from dmcp.fields import setting
from dmcp.installation import project_address
from dmcp.models import imported
from dmcp.runs.records import DMCP, UNIFORM
from dmcp.runtime.batches import generator, input_of, size_of
from dmcp.runtime.distributed import current, mean_values
from dmcp.runtime.engine import ResolvedEngine
from dmcp.searching import sampling
from dmcp.searching.budget import check_reachable
from dmcp.searching.rounding import FILLED
from dmcp.searching.sampling import random_widths
from dmcp.searching.search import SEARCH, search
from dmcp.searching.subnets import make_chains
from dmcp.searching.supernet import Supernet
from dmcp.settings import ResolvedSearchConfig, ResolvedTrainConfig, Sampling, SearchConfig, TrainConfig
from dmcp.training.losses import classification_loss

_RANDOM = 7  # tells these random numbers from others of the same seed


def find_uniform(problem: Problem, config: MethodConfig) -> Choice:
    """Uniform widths. Uses no data."""
    widths = problem.uniform()
    return Choice(widths=widths, kept=widths)


def find_random(problem: Problem, config: MethodConfig) -> Choice:
    """The first random widths that use up the budget. Uses no data."""
    random = generator(problem.seed, _RANDOM)
    widths = random_widths(
        problem.graph, problem.budget, random, problem.min_widths, problem.align, FILLED, problem.max_widths
    )
    return Choice(widths=widths, kept=widths)


# DMCP


@dataclass(frozen=True, kw_only=True)
class DmcpConfig(MethodConfig):
    """Settings of a search inside a comparison."""

    epochs: int = setting(30, "Number of epochs of the search, including the warm-up.", 1)
    groups: int = setting(10, "Number of channel groups in each space.", 1)
    lr_share: float = setting(
        0.5, "Learning rate as a share of that of the recipe, because a step sums several gradients.", above=0
    )
    more: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "Further settings of SearchConfig, by name."}
    )
    hold_out: bool = setting(False, "Train the alphas on the held-out images, and the weights on the others.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.search_config(resolve_training(TrainConfig()), 1, budget="50%")

    def search_config(self, recipe: ResolvedTrainConfig, batch: int, **settings: Any) -> ResolvedSearchConfig:
        """The settings of the search. Its learning rates follow from those of a training; `more` has the last word."""
        reference_batch = 1024 if recipe.reference_batch else batch  # else rates are never scaled
        recipe_batch = recipe.reference_batch or reference_batch
        settings |= {
            "lr": self.lr_share * recipe.lr * reference_batch / recipe_batch,
            "reference_batch": reference_batch,
            "weight_decay": recipe.weight_decay,
            "label_smoothing": recipe.label_smoothing,
            "epochs": self.epochs,
            "groups": self.groups,
        }
        settings |= self.more
        return resolve_search(SearchConfig(**settings))


def find_dmcp(problem: Problem, config: DmcpConfig) -> Choice:
    """Search the alphas, then take the expected widths."""
    loader = problem.loader
    batch = samples_of(loader) // len(loader)
    settings = config.search_config(problem.recipe, batch, **problem.bounds, budget=problem.budget, seed=problem.seed)
    net = Supernet(problem.model, problem.graph, settings.groups, settings.align)
    result = search(
        net,
        loader,
        settings,
        arch_loader=problem.held_out if config.hold_out else None,
        task=problem.task,
        runtime=problem.runtime.stage(SEARCH),
    )
    widths = sampling.expected(replace(result, tolerance=FILLED))

    # Stage 1 runs each sample through several sub-networks, stage 2 through the soft network.
    weight_epochs = settings.epochs
    if not settings.train_weights:
        weight_epochs = settings.warmup_epochs
    alpha_epochs = 0
    if settings.task_loss:
        alpha_epochs = settings.epochs - settings.warmup_epochs
    passes = samples_of(loader) * (weight_epochs * (2 + settings.subnets) + alpha_epochs)
    return Choice(widths=widths, kept=widths, model=net.model, sample_passes=passes)


# AutoSlim: a slimmable network, narrowed where it hurts least


@dataclass(frozen=True, kw_only=True)
class AutoSlimConfig(MethodConfig):
    """Settings of AutoSlim."""

    epochs: int = setting(
        40, "Number of epochs to train the slimmable network; in the paper, 10 to 20% of the training.", 1
    )
    groups: int = setting(10, "Number of channel groups in each space; one is dropped at a time.", 2)
    subnets: int = setting(2, "Random sub-networks in each step, besides the largest and the smallest.", 0)
    distill: bool = setting(True, "Distill the sub-networks from the largest one instead of using the labels.")
    lr_share: float = setting(
        0.5, "Learning rate as a share of that of the recipe, because a step sums several gradients.", above=0
    )
    batches: int = setting(4, "Number of held-out batches on which each trial is run.", 1)
    at_once: int = setting(1, "Number of spaces narrowed in one step; more is faster for networks with many spaces.", 1)


def prepare_autoslim(problem: Problem, config: AutoSlimConfig) -> Prepared:
    """Train the slimmable network: one for all budgets."""
    samples = samples_of(problem.loader)
    recipe = problem.recipe
    net = Supernet(problem.model, problem.graph, config.groups, problem.align)
    settings = SearchConfig(  # a search that trains weights only, by the recipe
        budget=problem.graph.macs(problem.max_widths) if problem.max_widths else 1.0,  # the alphas stay anyway
        **problem.bounds,
        groups=config.groups,
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
    """Narrow the slimmable network group by group until it is inside the budget; `state` comes from `prepare`."""
    graph = problem.graph
    net = Supernet(loaded(problem, state), graph, config.groups, problem.align)
    chains = make_chains(net, min_channels=problem.min_widths, max_channels=problem.widest, align=problem.align)
    borders = chains.sizes.cumsum(dim=1).cpu()  # (S, G)
    check_reachable(problem.budget, graph, graph.widths(borders[:, 0]), problem.max_widths, problem.align)
    slimmed, passes = _slim(net, borders, problem, config)
    widths = problem.round_to_budget(slimmed)
    return Choice(widths=widths, kept=widths, model=net.model, sample_passes=passes)


@torch.no_grad()
def _slim(net: Supernet, borders: Tensor, problem: Problem, config: AutoSlimConfig) -> tuple[Tensor, int]:
    """Drop the group that hurts least, again and again; widths inside the budget, and the samples run. -> (S,)"""
    widths = problem.widest.tensor()
    share = problem.shares(widths[None])
    runs = 0
    with held_out_batches(problem, net.model, config.batches, problem.task.loss is None) as (batches, resolved):
        losses = _losses(net, problem, batches, resolved)
        while share > 1:
            trials = _narrower(widths, borders)  # (C, S)
            results = losses(torch.cat([widths[None], trials]))
            harm = results[1:] - results[0]
            if not harm.isfinite().any():
                raise TrainingError("No trial has a finite loss: prepare the network with a smaller lr_share.")

            # Narrow the spaces that suffer least, one after the other, until the first widths inside the budget.
            best = harm.nan_to_num(nan=torch.inf).argsort(stable=True)[: config.at_once]
            steps = trials[best].cummin(dim=0).values
            shares = problem.shares(steps)
            index = min(int((shares > 1).sum()), len(steps) - 1)  # the first inside, or the last
            widths = steps[index]
            share = shares[index]
            runs += len(results)
            problem.log({"trials": runs, "loss": results[0].item(), "spent": share.item()})
    return widths, runs * sum(map(size_of, batches))


def _narrower(widths: Tensor, borders: Tensor) -> Tensor:
    """Every way to make one space one group narrower. (S,), (S, G) -> (C, S)"""
    below = borders.masked_fill(borders >= widths[:, None], 0).amax(dim=1)  # zero for a space at its smallest
    spaces = below.nonzero().squeeze(1)
    trials = widths.repeat(len(spaces), 1)
    trials[torch.arange(len(spaces)), spaces] = below[spaces]
    return trials


def _losses(net: Supernet, problem: Problem, batches: list[Any], engine: ResolvedEngine) -> Callable[[Tensor], Tensor]:
    """A function that computes the held-out losses of sub-networks, (C, S) -> (C,) on the CPU."""
    sizes = torch.tensor([float(size_of(batch)) for batch in batches])
    weights = (sizes / sizes.sum()).to(engine.device)
    task = problem.task.loss or classification_loss()

    def loss(batch: Any, gates: Tensor) -> Tensor:
        with engine.autocast():
            return task(net(input_of(batch), gates), batch).float()

    run = engine.repeated(loss)

    def losses(widths: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for row in widths.to(engine.device):  # nothing waits for the device until all trials are queued
            gates = net.hard_unchecked(row)
            rows.append(torch.stack([run(batch, gates) for batch in batches]) @ weights)
        return mean_values(torch.stack(rows), int(sizes.sum()), current()).cpu().double()

    return losses


# the table


class Own(StrEnum):
    """How a method's authors get the final weights, where that is not training from scratch."""

    FINETUNED = "fine-tuned"  # the chosen channels of Choice.model, trained on
    AS_TRAINED = "as trained"  # the chosen channels of Choice.model, as they are
    SLIMMABLE = "slimmable"  # fresh weights, trained inside the unpruned network, which it learns from


@dataclass(frozen=True)
class Method:
    """A method as a comparison sees it."""

    find: Callable[..., Choice]  # of a problem, the settings and, if there is one, the state dict that it starts from
    config: Callable[..., Any] = MethodConfig  # its settings: a frozen dataclass with a default for each
    prepare: Callable[[Problem, Any], Prepared] | None = None  # trains the network it starts from, for all budgets
    trained: bool = False  # whether it starts from the unpruned network, trained on all training images
    own: Own | None = None
    holds_out: bool = False  # whether it chooses by the held-out images, so that it must not train on them
    full: bool = False  # whether fine-tuning takes the whole recipe, not --finetune-epochs at a tenth of the rate
    one_ratio: bool = False  # whether its widths are those of uniform, and it chooses only which channels stay


METHODS: dict[str, Method] = {
    UNIFORM: Method(find_uniform),
    "random": Method(find_random),
    "uniform-slimmable": Method(find_uniform, own=Own.SLIMMABLE, one_ratio=True),
    "l1": Method(find_l1, L1Config, trained=True, own=Own.FINETUNED, one_ratio=True),
    "l2": Method(find_l1, partial(L1Config, power=2), trained=True, own=Own.FINETUNED, one_ratio=True),
    "sensitivity": Method(find_sensitivity, trained=True, own=Own.FINETUNED),
    "slimming": Method(find_slimming, SlimmingConfig, prepare_slimming, own=Own.FINETUNED, full=True),
    "autoslim": Method(find_autoslim, AutoSlimConfig, prepare_autoslim, own=Own.SLIMMABLE, holds_out=True),
    DMCP: Method(find_dmcp, DmcpConfig, own=Own.SLIMMABLE),
}


_IN_EXPERIMENTS = {  # methods that are not in the package, as they are typed in a clone
    "amc": "experiments.methods.amc:amc",
    "direct": "experiments.methods.direct:direct",
    "fpgm": "experiments.methods.soft:fpgm",
    "metapruning": "experiments.methods.metapruning:metapruning",
    "sfp": "experiments.methods.soft:sfp",
    "torch-pruning": "experiments.methods.peer:torch_pruning",
    "torch_pruning": "experiments.methods.peer:torch_pruning",
}


def find_method(name: str) -> Method:
    """The method with this name: one of ours, or the user's own, which is imported."""
    if name in METHODS:
        return METHODS[name]
    if name in _IN_EXPERIMENTS:
        address = project_address()
        clone = f"a clone of {address}" if address else "a clone of torch-dmcp"
        raise DmcpError(
            f"{name!r} is not in the package, but in the folder experiments of {clone}: type "
            f"{_IN_EXPERIMENTS[name]} in the root of the clone."
        )
    if ":" not in name:
        raise DmcpError(f"{name!r} is not a method. Use one of {', '.join(METHODS)}, or package.module:NAME.")
    method = imported(*name.split(":", 1))
    if isinstance(method, Method):
        return method
    return Method(lambda problem, config: method(problem))  # a function of the problem


def title(name: str) -> str:
    """The name of a method in tables and folders; "mine" for mypackage.mymodule:mine."""
    return name.rpartition(":")[2]


def choose(name: str, problem: Problem, config: Any, state: Mapping[str, Tensor] | None = None) -> Choice:
    """What a method chooses; BudgetError if that is not what was asked for."""
    method = find_method(name)
    has_state = method.trained or method.prepare is not None
    with blaming(f"{name} failed", TrainingError):
        if has_state:
            choice = method.find(problem, config, state)
        else:
            choice = method.find(problem, config)
        if not isinstance(choice, Choice):
            raise TrainingError(f"{name} must return a Choice, not a {type(choice).__name__}.")
        choice.check(problem)
    if method.own in (Own.FINETUNED, Own.AS_TRAINED) and choice.model is None:
        raise TrainingError(f"{name}: a method with its own training must return the network, too: Choice(model=...).")
    return choice


def chooser(name: str, problem: Problem, once: bool) -> Callable[[Budget], Choice]:
    """A method with its default settings, which starts from the weights of the model.

    once: it is called for one budget only.
    """
    method = find_method(name)
    config = method.config()
    state = None
    if method.prepare:
        state = method.prepare(problem, config).state
    if not once:  # the checkpoints of several budgets would have the same name
        problem = replace(problem, runtime=replace(problem.runtime, checkpointer=None))
    return lambda budget: choose(name, replace(problem, budget=budget), config, state)
