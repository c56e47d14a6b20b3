"""A network and a task in which the truth about the widths is known, and small networks with their data for methods.

The task: K signs, each to be told from one of K inputs. The K channels of `needed` are the only way for them, and K' of
them with a linear readout can give at most sum(C(K, j), j <= K') of the 2^K answers, whatever was before: fewer than K
channels are not enough. The channels of `useless` see noise only, which knows nothing of the labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from nets import Residual
from short_runs import Noise
from torch import Tensor, nn

import dmcp
from dmcp.compare.problem import Problem
from dmcp.defaults import resolve_training
from dmcp.searching.budget import parse_budget
from dmcp.searching.supernet import Supernet
from dmcp.settings import TrainConfig

SIGNS = 8


class Planted(nn.Module):
    """Two layers side by side, one on the signs, one on noise, and a linear readout of both."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.needed = nn.Conv2d(SIGNS, SIGNS, 1, bias=not norm)
        self.needed_norm = nn.BatchNorm2d(SIGNS) if norm else nn.Identity()
        self.useless = nn.Conv2d(SIGNS, SIGNS, 1, bias=not norm)
        self.useless_norm = nn.BatchNorm2d(SIGNS) if norm else nn.Identity()
        self.readout = nn.Linear(2 * SIGNS, 2 * SIGNS)

    def forward(self, x: Tensor) -> Tensor:
        needed = torch.relu(self.needed_norm(self.needed(x[:, :SIGNS])))
        useless = torch.relu(self.useless_norm(self.useless(x[:, SIGNS:])))
        return self.readout(torch.cat([needed, useless], dim=1).flatten(1)).unflatten(1, (2, SIGNS))


Batches = list[tuple[Tensor, Tensor]]


def planted_batches(count: int, seed: int, size: int = 64) -> Batches:
    """Signs with some noise, beside noise, and the signs as labels. (N, 2K, 1, 1) and (N, K)"""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        labels = torch.randint(0, 2, (size, SIGNS), generator=draw)
        signs = 2.0 * labels - 1 + 0.1 * torch.randn(size, SIGNS, generator=draw)
        noise = torch.randn(size, SIGNS, generator=draw)
        found.append((torch.cat([signs, noise], dim=1)[..., None, None], labels))
    return found


def planted_problem(budget: str = "57%", seed: int = 0, epochs: int = 20, **changes: Any) -> Problem:
    """The planted task, to be solved with part of the multiply-adds."""
    torch.manual_seed(seed)
    model, loader, held_out = Planted(), planted_batches(20, seed), planted_batches(4, seed + 1000)
    return as_problem(model, loader, held_out, budget, seed, epochs, **changes)


def tiny_problem(model: nn.Module, budget: str = "50%", **changes: Any) -> Problem:
    """A few random images of two batches: enough to see that a method runs on a network."""
    some = {"generator": torch.Generator().manual_seed(0)}
    batches = [(torch.randn(4, 3, 32, 32, **some), torch.randint(0, 10, (4,), **some)) for _ in range(4)]
    return as_problem(model, batches[:2], batches[2:], budget, 0, 1, **changes)


_GRAPHS: dict[str, dmcp.ChannelGraph] = {}


def _planted_graph(model: Planted) -> dmcp.ChannelGraph:
    """Traced once, with norms and without: a graph has no weights."""
    key = repr(model)
    if key not in _GRAPHS:
        _GRAPHS[key] = dmcp.trace(model, planted_batches(1, 0)[0][0][:2])
    return _GRAPHS[key]


def as_problem(
    model: nn.Module, loader: Batches, held_out: Batches, budget: str, seed: int, epochs: int, **changes: Any
) -> Problem:
    """All that a method is given."""
    graph = _planted_graph(model) if type(model) is Planted else dmcp.trace(model, loader[0][0][:2])
    config = TrainConfig(
        epochs=epochs, lr=0.1, warmup_lr=0.1, warmup_epochs=0, reference_batch=None, label_smoothing=0.0, seed=seed
    )
    problem = Problem(
        model=model,
        graph=graph,
        loader=loader,
        held_out=held_out,
        budget=parse_budget(budget, graph),
        recipe=resolve_training(config),
        min_widths=Supernet(model, graph).min_widths,
        seed=seed,
    )
    return replace(problem, **changes)


def heard(problem: Problem) -> tuple[Problem, list[Any]]:
    """The problem, and the records that it reports from now on."""
    log: list[Any] = []
    runtime = replace(problem.runtime, on_event=lambda event: log.append(event.record))
    return replace(problem, runtime=runtime), log


# networks for methods that rank channels by their filters

WEAK = [1, 4, 6]  # channels that are planted to go


@torch.no_grad()
def weak_problem(filters: Callable[[Tensor], Tensor], **changes: Any) -> tuple[Problem, dict[str, Tensor]]:
    """The planted task; filters of WEAK channels are what the function makes of all, and no gradient reaches them."""
    problem = planted_problem(budget="65%", epochs=2, **changes)
    trained = copy.deepcopy(problem.model)
    for name in ("needed", "useless"):
        weight = trained.get_parameter(f"{name}.weight")
        weight[WEAK] = filters(weight)
        trained.get_parameter(f"{name}_norm.bias")[WEAK] = -10  # behind a relu: never anything but zero
    return problem, trained.state_dict()


def shrunk(weight: Tensor) -> Tensor:
    """Filters of the WEAK channels at a hundredth of their size."""
    return 0.01 * weight[WEAK]


def residual_problem(budget: str = "50%", **changes: Any) -> Problem:
    """The residual network and noise."""
    torch.manual_seed(7)
    batches = Noise(6, 8).batches
    return as_problem(Residual(**Residual.FULL), batches[:4], batches[4:], budget, 0, 3, **changes)
