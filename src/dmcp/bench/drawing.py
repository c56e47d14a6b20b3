"""Structures drawn from the chains, as direct sampling draws them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dmcp.bench.results import Sampled
from dmcp.bench.steps import halfway
from dmcp.bench.stopwatch import now
from dmcp.budget import constant_alpha, parse, spent_shares
from dmcp.errors import DmcpError
from dmcp.markov import CHAIN, group_sizes
from dmcp.tracing.graph import ChannelGraph

_AT_ONCE = 1 << 16  # structures drawn in one expression, as direct sampling does


def measure_sampling(
    graph: ChannelGraph, n: int = 10**6, groups: int = 10, name: str = "", model_args: tuple[str, ...] = ()
) -> Sampled:
    """Seconds of drawing n structures and counting their MACs, as direct sampling does it, on one core."""
    if n < 1:
        raise DmcpError(f"Sampling needs at least one structure, not {n}.")
    rows = [group_sizes(space.size, groups) for space in graph.spaces]
    most = max(map(len, rows))
    sizes = torch.tensor([row + (0,) * (most - len(row)) for row in rows])  # (S, G), zeros behind short chains
    budget = parse(halfway(graph, graph.widths(sizes[:, 0].tolist())), graph)
    alphas = torch.full((len(rows), most - 1), constant_alpha(budget, graph, sizes))
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return spent_shares(budget, graph, CHAIN.sample(alphas, sizes, count, generator))

    with _one_core():
        draw(1000)  # the first call is slower
        start = now()
        for done in range(0, n, _AT_ONCE):
            draw(min(_AT_ONCE, n - done))
        seconds = now() - start
    return Sampled(model=name, model_args=model_args, spaces=len(rows), structures=n, seconds=seconds)


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
