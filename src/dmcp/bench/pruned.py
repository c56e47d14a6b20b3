"""A training step of a pruned network beside one of the whole network, as it is and padded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dmcp.bench.results import Pruned
from dmcp.bench.steps import choices, settle, time_plain
from dmcp.bench.stopwatch import clean, device_name
from dmcp.cutting import cut
from dmcp.engine import Engine
from dmcp.padding import padded
from dmcp.sampling import uniform
from dmcp.tracing.trace import trace


def measure_pruned(
    name: str,
    model: nn.Module,
    batch: int,
    shape: tuple[int, ...],
    classes: int,
    device: torch.device,
    engine: Engine,
    budget: str = "50%",
    rounds: int = 15,
    on_part: Callable[[str, float], None] | None = None,
    model_args: tuple[str, ...] = (),
) -> Pruned:
    """Time of one training step on random images: of the network, and of it cut to a budget by uniform widths."""
    say = on_part or (lambda part, number: None)
    graph = trace(model, torch.zeros(2, *shape))
    model = model.to(device).train()
    widths = uniform(graph, budget)
    small = cut(model, graph, widths)
    twin = padded(small, model, graph, widths)
    images = torch.randn(batch, *shape, device=device), torch.randint(classes, (batch,), device=device)
    times, used = dict[str, float](), dict[str, str]()
    for part, net in (("whole_ms", model), ("pruned_ms", small), ("padded_ms", twin.wide if twin else None)):
        if net is not None:
            settled = settle(engine, device, net, graph)
            clean(device, settled.compile)
            found, _ = time_plain(net, settled.laid_out(images), settled, rounds)
            times[part], used = found["plain_ms"], choices(settled)
            say(part, times[part])
    return Pruned(
        model=name,
        model_args=model_args,
        batch=batch,
        budget=budget,
        macs=graph.macs(widths),
        device=device_name(device),
        whole_ms=times["whole_ms"],
        pruned_ms=times["pruned_ms"],
        padded_ms=times.get("padded_ms"),
        engine=used,
    )
