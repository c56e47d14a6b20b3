"""DMCP with direct sampling: a search of its own, then one sample instead of the expected widths.

dmcp compare --model cifar:resnet20 --data cifar10 --methods uniform,dmcp,experiments.methods.direct:direct
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dmcp.compare.methods import DmcpConfig, Method, find_dmcp
from dmcp.compare.problem import Choice, Problem
from dmcp.runtime.batches import generator
from dmcp.searching import sampling
from dmcp.searching.records import SearchResult
from dmcp.searching.rounding import FILLED

_DIRECT = 11  # what random numbers are for


def find_direct(problem: Problem, config: DmcpConfig) -> Choice:
    """Search, then sample widths inside the budget."""
    found, tell = list[SearchResult](), problem.runtime.on_event

    def hear(event: Any) -> None:
        if isinstance(event.record, SearchResult):
            found.append(event.record)
        if tell:
            tell(event)

    searched = find_dmcp(replace(problem, runtime=replace(problem.runtime, on_event=hear)), config)
    (widths,) = sampling.direct(replace(found[0], tolerance=FILLED), 1, generator(problem.seed, _DIRECT))
    return Choice(widths=widths, kept=widths, sample_passes=searched.sample_passes)


direct = Method(find_direct, DmcpConfig)
