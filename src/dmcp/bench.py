"""How fast and how large: one training step and one search step of a network, measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dmcp.budget import parse
from dmcp.engine import Engine, Settled, sgd
from dmcp.sandwich import Draw, chains
from dmcp.searching import SearchConfig, Steps
from dmcp.supernet import Supernet
from dmcp.tracing import trace
from dmcp.training import classification_loss, make_step, parameter_groups


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of one network at one batch size, on one device."""

    model: str
    batch: int
    shape: tuple[int, ...]  # of one sample
    device: str
    macs: int
    trace_s: float
    plain_ms: float  # forward, backward and optimizer of the unpruned network
    stage1_ms: float  # all sub-networks of the sandwich, one optimizer step
    stage2_ms: float  # the alphas
    search_ms: float  # stage 1 and stage 2, one after the other
    plain_gib: float  # the most memory that tensors took
    search_gib: float
    first_s: float  # the first plain step and the first search step: compiling and tuning
    engine: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """A search step in plain steps."""
        return self.search_ms / self.plain_ms


def measure(
    name: str,
    model: nn.Module,
    batch: int,
    shape: tuple[int, ...],
    classes: int,
    device: torch.device,
    engine: Engine,
    groups: int = 10,
    rounds: int = 15,
    on_part: Callable[[str, float], None] | None = None,
) -> Measured:
    """Time and memory of one step of everything, on random images; plain and search steps in one run."""
    say = on_part or (lambda part, number: None)
    start = time.perf_counter()
    graph = trace(model, torch.zeros(2, *shape))
    trace_s = time.perf_counter() - start
    say("trace_s", trace_s)
    settled = engine.settled(device, steps=10**6, large=True)
    x = torch.randn(batch, *shape, device=device)
    data = settled.laid_out((x, torch.randint(classes, (batch,), device=device)))
    model = model.to(device).train()
    plain_first, plain_ms, plain_gib = _measure_plain(model, data, settled, rounds)
    say("plain_ms", plain_ms)
    net = Supernet(model, graph, groups)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with settled.running(net.model):
        stage1, stage2 = _search(net, settled)
        search_first = _seconds(lambda: (stage1(data), stage2(data)), device)
        say("first_s", plain_first + search_first)
        stage1_ms, _ = _median(lambda: stage1(data), rounds, device)
        say("stage1_ms", stage1_ms)
        stage2_ms, _ = _median(lambda: stage2(data), rounds, device)
        say("stage2_ms", stage2_ms)
        search_ms, search_gib = _median(lambda: (stage1(data), stage2(data)), rounds, device)
        say("search_ms", search_ms)
    choices = {key: str(getattr(settled, key)) for key in ("precision", "channels_last", "compile", "graphs", "tf32")}
    return Measured(
        model=name,
        batch=batch,
        shape=shape,
        device=_device_name(device),
        macs=graph.macs(),
        trace_s=trace_s,
        plain_ms=plain_ms,
        stage1_ms=stage1_ms,
        stage2_ms=stage2_ms,
        search_ms=search_ms,
        plain_gib=plain_gib,
        search_gib=search_gib,
        first_s=plain_first + search_first,
        engine=choices,
    )


def _measure_plain(model: nn.Module, data: Any, settled: Settled, rounds: int) -> tuple[float, float, float]:
    """Seconds of the first step, milliseconds of later ones, and GiB."""
    with settled.running(model):
        optimizer = sgd(parameter_groups(model, 1e-4), 0.01, 0.9, True, settled.device)
        step = settled.repeated(make_step(model, optimizer, classification_loss(0.1), None, 0.0, settled))
        first = _seconds(lambda: step(data), settled.device)
        return first, *_median(lambda: step(data), rounds, settled.device)


def _search(net: Supernet, settled: Settled) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Stage 1 and stage 2 as a search runs them after its warm-up."""
    config = SearchConfig(budget="50%", groups=int(net.alpha.shape[1] + 1))
    net.train()
    path = chains(net)
    steps = Steps(net, path, config, parse(config.budget, net.graph), None, settled)
    generator = torch.Generator(settled.device).manual_seed(0)
    with torch.no_grad():
        net.alpha.fill_(1.8)
    return (
        lambda data: steps.train_weights([data], Draw.MARKOV, generator, 0.01),
        lambda data: steps.move_alphas([data], 1e-6),
    )


def _median(step: Callable[[], Any], rounds: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step, the median over rounds, and GiB of tensors at the peak since they were last reset.

    A round is a few steps in a row, as in training, where the host goes ahead of the device.
    """
    for _ in range(5):  # also captures graphs
        step()
    few = 5 if device.type == "cuda" else 1
    times = [_seconds(lambda: [step() for _ in range(few)], device) / few for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return 1000 * statistics.median(times), peak


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
