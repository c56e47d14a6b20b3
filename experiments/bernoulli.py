"""Appendix C of the paper: independent Bernoulli gates, which keep each group of channels by itself, without a chain.

The search is a loop of its own, made of the steps of `dmcp.search`. It has no CUDA graphs and does not share the stem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import hessian

import dmcp
from dmcp.budgets import Budget
from dmcp.defaults import resolve_search
from dmcp.markov import rand
from dmcp.runtime.batches import device_of, size_of
from dmcp.runtime.checkpoint import ResumableIterator, seeded
from dmcp.runtime.distributed import SINGLE_PROCESS
from dmcp.runtime.engine import resolve
from dmcp.searching.bounds import AllowedWidths
from dmcp.searching.budget import ratios
from dmcp.searching.rounding import FILLED, round_to_budget
from dmcp.searching.search import prepare_chains, uncounted
from dmcp.searching.steps import StepContext, arch_step, weight_step
from dmcp.searching.subnets import Chains, sample_gates
from dmcp.settings import Init, Sampling
from dmcp.training.losses import classification_loss
from dmcp.training.optimizer import cosine, parameter_groups, set_lr, sgd


@dataclass(frozen=True)
class BernoulliGates(Chains):
    """The groups of each space, kept independently of each other; the first one always is."""

    def marginals(self, alpha: Tensor) -> Tensor:
        """Probability that each group is kept. (S, G-1) -> (S, G)"""
        kept = torch.cat([alpha.new_ones(len(alpha), 1), torch.sigmoid(alpha)], dim=1)
        return kept * (self.sizes > 0)

    def sample(self, alpha: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
        """Gates of random sub-networks. They keep any groups, not the first ones: no widths describe them."""
        chances = self.marginals(alpha.detach())
        kept = rand((count, *self.sizes.shape), self.sizes.device, generator) < chances
        return list(self.gates(kept))

    def expected_widths(self, alpha: Tensor) -> Tensor:
        """Expected number of kept channels of each space. -> (S,)"""
        return (self.marginals(alpha) * self.sizes).sum(dim=1)


def search(
    net: dmcp.Supernet, loader: Any, config: dmcp.SearchConfig, arch_loader: Any = None
) -> tuple[BernoulliGates, dmcp.Widths]:
    """Search as `dmcp.search` does, with independent gates: the gates, and the expected widths inside the budget."""
    device = device_of(net)
    config = resolve_search(config)
    budget, chains = prepare_chains(net, config)
    if config.init is not Init.TARGET or config.sampling is not Sampling.MARKOV:
        raise ValueError("Bernoulli gates start where the budget is met, and are sampled from the alphas.")
    if config.min_channels or config.max_channels or config.sort or config.sharpen > 1:
        raise ValueError("Bernoulli gates have no min_channels, max_channels, sort or sharpen.")
    check_linear(net.graph, budget)
    gates = BernoulliGates(chains.sizes, chains.index)
    with torch.no_grad():
        net.alpha.fill_(_constant_alpha(gates, net, budget))

    engine = resolve(dmcp.Engine(compile=False, graphs=False, kernels=False), device)
    context = StepContext(
        net=net,
        chains=gates,
        budget=budget,
        config=config,
        loss=classification_loss(config.label_smoothing),
        precision=engine.precision,
    )
    optimizer = partial(sgd, momentum=config.momentum, nesterov=config.momentum > 0, device=device)
    weight_optimizer = optimizer(parameter_groups(net.model, config.weight_decay), lr=config.lr)
    momentum = config.alpha_momentum
    alpha_optimizer = sgd(net.alphas(), config.alpha_lr, momentum, momentum > 0, device)

    generator = torch.Generator(device).manual_seed(config.seed)
    largest, smallest = net.hard(gates.sizes.sum(dim=1)), net.hard(gates.sizes[:, 0])
    net.train()
    with seeded(config.seed, device, SINGLE_PROCESS), engine.running(net.model), uncounted(net.model):
        data = ResumableIterator(loader, engine, SINGLE_PROCESS, config.accumulate)
        next_arch_batches: Callable[[], list[Any]] | None = None
        if arch_loader is not None:
            next_arch_batches = ResumableIterator(arch_loader, engine, SINGLE_PROCESS, config.accumulate).next
        total = data.per_epoch * config.epochs
        warmup = data.per_epoch * config.warmup_epochs
        scale = 0.0  # of the learning rates of the weights, by the size of the first batch

        for step in range(total):
            batches = data.next()
            moves_alphas = step >= warmup

            # Stage 1: the sandwich rule.
            if not moves_alphas or config.train_weights:
                scale = scale or sum(map(size_of, batches)) / config.reference_batch
                set_lr(weight_optimizer, scale * cosine(step, total, config.lr, config.min_lr))
                if moves_alphas:
                    sampled = gates.sample(net.alpha, config.subnets, generator)
                else:
                    sampled = sample_gates(net, gates, config.warmup_sampling, config.subnets, generator)
                weight_step(context, batches, weight_optimizer, [largest, smallest, *sampled])

            # Stage 2: the alphas.
            if moves_alphas:
                set_lr(alpha_optimizer, cosine(step - warmup, total - warmup, config.alpha_lr, config.alpha_min_lr))
                arch_step(context, next_arch_batches() if next_arch_batches else batches, alpha_optimizer)

    allowed = AllowedWidths(net.graph, gates.sizes[:, 0].cpu(), gates.sizes.sum(dim=1).cpu(), config.align)
    wish = gates.expected_widths(net.alpha.detach().double()).cpu()
    return gates, round_to_budget(net.graph, budget, wish, allowed, max(config.tolerance, FILLED))


def check_linear(graph: dmcp.ChannelGraph, budget: Budget) -> None:
    """Refuse a network with a squared width in its cost: its expectation is that of a chain, not of these gates."""
    widths = graph.full.tensor().double()
    for limit in budget.limits:
        curvature = hessian(lambda w, kind=limit.kind: graph.cost(kind, w[None]).sum(), widths).diagonal()
        if curvature.count_nonzero():
            raise ValueError(
                f"The {limit.kind} of this network have a width squared: Bernoulli gates cannot count them."
            )


def _constant_alpha(gates: BernoulliGates, net: dmcp.Supernet, budget: Budget) -> float:
    """The largest constant for all alphas whose expected cost is inside the budget."""
    low, high = -10.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        marginals = gates.marginals(torch.full_like(net.alpha, middle, dtype=torch.float64))
        if ratios(budget, net.graph, marginals, gates.sizes).max() > 1:
            high = middle
        else:
            low = middle
    return low
