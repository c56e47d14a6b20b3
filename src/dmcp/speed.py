"""How much faster a pruned network is than the unpruned one; if it is not, why, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import nn

from dmcp.budgets import LATENCY, TRAFFIC, Budget
from dmcp.errors import DmcpError
from dmcp.exporting.export import missing_packages
from dmcp.exporting.latency import Latency
from dmcp.exporting.timing import Timer
from dmcp.runs.records import LatencyOutcome
from dmcp.runtime.batches import size_of
from dmcp.settings import LatencyConfig, LatencyMode, RuntimeKind
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import narrow, unwrap
from dmcp.tracing.widths import Widths
from dmcp.units import counted, show_ms, show_share

FASTER = 1.05  # times as fast as the unpruned network; below, a reason is looked for
_BLOCK = 16  # channels that many processors compute at once
_EAGER_US = 50.0  # microseconds per layer that Python and the launches of its kernels take, at most
_COMPILED_US = 10.0  # the same without Python
_CLEARLY = 0.1  # of the unpruned cost: by how much more traffic than MACs must be left


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The time of the unpruned and of the pruned network, measured side by side."""

    where: str  # the runtime in words
    unpruned_ms: float
    pruned_ms: float
    launch_us: float  # up to which a layer's time is mostly that of its launch, there; 0 if this is unknown

    @property
    def factor(self) -> float:
        """How many times as fast the pruned network is."""
        return self.unpruned_ms / self.pruned_ms

    @property
    def text(self) -> str:
        """The speed for a sentence."""
        return f"{self.factor:.2f}\N{MULTIPLICATION SIGN} {self.where}"


class Cause(StrEnum):
    """Why fewer MACs save no time."""

    NARROW = "narrow"
    LAUNCHES = "launches"
    MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What can be counted in a pruned network that its speed depends on."""

    macs_share: float  # of the unpruned network
    traffic_share: float
    layers: int  # that have MACs
    spaces: int
    odd_spaces: int  # whose channels filled whole blocks before the cut, and do not any more
    narrow_spaces: int  # those of them that had a single block before


# measuring


def measure_speeds(
    model: nn.Module,
    small: nn.Module,
    graph: ChannelGraph,
    example: Any,
    *,
    torch_ms: tuple[float, float],
    latency: LatencyOutcome | None,
) -> tuple[Speed, ...]:
    """How fast a network is where its latency was limited; or else in torch, and in onnxruntime if it is installed.

    torch_ms: times of the unpruned and of the pruned network for a batch in torch, as the table of results has them.
    """
    table = Latency.of(graph)
    if latency is not None and table is not None:
        if latency.measured_ms is None:
            return ()
        launch_us = _COMPILED_US
        if table.runtime == RuntimeKind.TORCH and table.mode is LatencyMode.EAGER:
            launch_us = _EAGER_US
        if not table.place:  # a user's function measured
            launch_us = 0.0
        of_budget = Speed(
            where=latency.how,
            unpruned_ms=latency.unpruned_ms,
            pruned_ms=latency.measured_ms,
            launch_us=launch_us,
        )
        return (of_budget,)

    unpruned_ms, pruned_ms = torch_ms
    where = f"in torch with a batch of {size_of((example,))}"
    speeds = [Speed(where=where, unpruned_ms=unpruned_ms, pruned_ms=pruned_ms, launch_us=_EAGER_US)]
    times = _onnx_times([model, small], example)
    if times:
        where = "in onnxruntime on one thread of the CPU with a batch of 1"
        speeds.append(Speed(where=where, unpruned_ms=times[0], pruned_ms=times[1], launch_us=_COMPILED_US))
    return tuple(speeds)


def _onnx_times(networks: Sequence[nn.Module], example: Any) -> list[float]:
    """Milliseconds of copies of the networks in onnxruntime; empty where that cannot be measured."""
    if missing_packages():
        return []
    timer = Timer(config=LatencyConfig(runtime=RuntimeKind.ONNX, device="cpu"), threads=1, example=example)
    try:
        return timer.times(narrow(unwrap(network), {}, {}) for network in networks)
    except DmcpError:  # not every network can be exported
        return []


# what to say


def speed_notes(speeds: Sequence[Speed], facts: Facts, budget: Budget) -> list[str]:
    """A sentence about the speed; where the network is not faster, one about each cause, and what to do."""
    if not speeds:
        return []
    notes = [f"speed, compared with the unpruned network: {', '.join(speed.text for speed in speeds)}"]
    slow = [speed for speed in speeds if speed.factor < FASTER]
    if not slow:
        return notes
    causes: dict[Cause, str] = {}
    for speed in slow:
        causes = find_causes(speed, facts) | causes
    notes += [f"limits the speed-up: {text}" for text in causes.values()]
    if not causes:
        notes.append("the layers show no cause of the small speed-up; measure again on an idle machine")
    if LATENCY not in budget.kinds:
        notes.append("a latency budget, such as latency:60%, chooses widths by measured time")
    return notes


def find_causes(speed: Speed, facts: Facts) -> dict[Cause, str]:
    """What keeps a network from being faster, as far as it can be computed, with a sentence each."""
    causes: dict[Cause, str] = {}
    layer_us = 1000 * speed.unpruned_ms / max(1, facts.layers)
    if layer_us <= speed.launch_us:
        causes[Cause.LAUNCHES] = (
            f"{speed.where}, each of the {counted(facts.layers, 'layer')} of the unpruned network takes "
            f"{show_ms(layer_us / 1000)} on average, mostly overhead that does not depend on widths; use larger batches"
        )
    if facts.odd_spaces:
        causes[Cause.NARROW] = (
            f"{facts.odd_spaces} of {counted(facts.spaces, 'space')} had a multiple of {_BLOCK} channels before the "
            "cut and do not have one now, and processors compute in such blocks"
        )
        if facts.odd_spaces > facts.narrow_spaces:  # the others could not be cut at all then
            causes[Cause.NARROW] += f"; use align={_BLOCK} (--align {_BLOCK})"
    if facts.traffic_share - facts.macs_share > _CLEARLY:
        causes[Cause.MEMORY] = (
            f"{show_share(facts.macs_share)} of the MACs are left, but {show_share(facts.traffic_share)} of the bytes "
            f"that are read and written; use a traffic budget, such as {TRAFFIC}:50%"
        )
    return causes


def facts_of(graph: ChannelGraph, widths: Widths) -> Facts:
    """Count what the speed of a network depends on."""
    odd_spaces = 0
    narrow_spaces = 0
    for space in graph.spaces:
        was_whole = space.size * space.unit % _BLOCK == 0
        is_whole = widths[space.name] * space.unit % _BLOCK == 0
        if was_whole and not is_whole:
            odd_spaces += 1
            if space.size * space.unit == _BLOCK:
                narrow_spaces += 1
    return Facts(
        macs_share=graph.macs(widths) / max(1, graph.macs()),
        traffic_share=graph.traffic(widths) / max(1, graph.traffic()),
        layers=sum(layer.macs > 0 for layer in graph.layers()),
        spaces=len(graph.spaces),
        odd_spaces=odd_spaces,
        narrow_spaces=narrow_spaces,
    )
