"""Independent gates (experiments/bernoulli.py) against all of their outcomes and samples, and in a small search."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from nets import Residual, SharedWeight, randomise, sample

import dmcp
from dmcp.defaults import resolve_search
from dmcp.searching.budget import spent_shares
from dmcp.searching.search import prepare_chains

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
import bernoulli

MANY = 4000
SPREAD = 4 * 0.5 / MANY**0.5  # four standard deviations of a frequency
CONFIG = dmcp.SearchConfig(budget="50%", groups=4, align=1, epochs=4, warmup=0.5, lr=0.1, alpha_lr=1.0)


def supernet() -> dmcp.Supernet:
    """The residual net: spaces of 8, 6, 9 and 11 channels."""
    torch.manual_seed(0)
    model = randomise(Residual(**Residual.FULL)).float()
    graph = dmcp.trace(model, sample(Residual.SHAPE).float())
    return dmcp.Supernet(model, graph, CONFIG.groups, CONFIG.align)


def gates_of(net: dmcp.Supernet) -> bernoulli.BernoulliGates:
    _, chains = prepare_chains(net, resolve_search(CONFIG))
    return bernoulli.BernoulliGates(chains.sizes, chains.index)


def test_gates_are_independent() -> None:
    net = supernet()
    gates = gates_of(net)
    alpha = torch.randn(net.alpha.shape, generator=torch.Generator().manual_seed(0))

    # Marginals and expected widths are averages over all outcomes.
    for row, sizes in enumerate(gates.sizes.tolist()):
        average = 0.0
        for kept in itertools.product([1, 0], repeat=len(sizes) - 1):
            chances = [1 / (1 + math.exp(-a if k else a)) for k, a in zip(kept, alpha[row].tolist(), strict=True)]
            average += math.prod(chances) * sum(k * size for k, size in zip((1, *kept), sizes, strict=True))
        assert gates.expected_widths(alpha)[row].item() == pytest.approx(average, rel=1e-5)

    # Each channel is sampled as often as its marginal says, with gaps between the kept groups.
    samples = torch.stack(gates.sample(alpha, MANY, torch.Generator().manual_seed(0)))
    assert samples.dtype == torch.bool
    assert (samples.float().mean(dim=0) - gates.gates(gates.marginals(alpha))).abs().max() < SPREAD
    last_space = samples.int().split([8, 6, 9, 11], dim=1)[3]
    assert (last_space.diff(dim=1) > 0).any()


def test_a_search_starts_at_the_budget_and_ends_inside() -> None:
    net, seen = supernet(), list[torch.Tensor]()
    images = torch.randn(16, *Residual.SHAPE, generator=torch.Generator().manual_seed(0))
    loader = [(images[:8], torch.arange(8) % 5), (images[8:], torch.arange(8) % 5)]
    before = [weight.clone() for weight in net.weights()]
    net.alpha.register_hook(lambda gradient: seen.append(net.alpha.detach().clone()))
    gates, widths = bernoulli.search(net, loader, CONFIG)
    assert any(not torch.equal(old, new) for old, new in zip(before, net.weights(), strict=True))

    wide = net.graph.macs(gates.expected_widths(seen[0].double())[None])
    assert wide.item() / net.graph.macs() == pytest.approx(0.5, abs=1e-3)
    assert not torch.equal(seen[0], net.alpha)
    share = spent_shares(dmcp.parse_budget("50%", net.graph), net.graph, widths.tensor()[None]).item()
    assert 0.9 < share <= 1


def test_squared_widths_are_refused() -> None:
    model = randomise(SharedWeight(**SharedWeight.FULL))
    graph = dmcp.trace(model, sample(SharedWeight.SHAPE))
    with pytest.raises(ValueError, match="squared"):
        bernoulli.check_linear(graph, dmcp.parse_budget("50%", graph))
