"""One step of everything: plain training, the two stages of a search, both together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dmcp.bench.results import Measured
from dmcp.bench.stopwatch import clean, device_name, median_ms, now, peak_gib, seconds
from dmcp.budget import parse
from dmcp.engine import Engine, Settled, is_depthwise, is_narrow, sgd
from dmcp.errors import DmcpError
from dmcp.losses import classification_loss
from dmcp.searching.sandwich import Draw, chains
from dmcp.searching.search import LARGE, Steps, uncounted
from dmcp.searching.searches import SearchConfig
from dmcp.spaces import Widths
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.training import TrainConfig, make_step, parameter_groups


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
    model_args: tuple[str, ...] = (),
) -> Measured:
    """Time and memory of one step of everything, on random images; plain and search steps in one run.

    The model is moved to the device and trained on the way.
    """
    if batch < 1 or rounds < 1 or groups < 2:
        raise DmcpError(f"Give a batch and rounds of at least 1 and 2 groups, not {batch}, {rounds} and {groups}.")
    say = on_part or (lambda part, number: None)
    start = now()
    graph = trace(model, torch.zeros(2, *shape))
    times = {"trace_s": now() - start}
    say("trace_s", times["trace_s"])
    settled = settle(engine, device, model, graph)
    before = clean(device, settled.compile)  # what others left there is not the network's
    x = torch.randn(batch, *shape, device=device)
    data = settled.laid_out((x, torch.randint(classes, (batch,), device=device)))
    model = model.to(device).train()
    plain, plain_refused = time_plain(model, data, settled, rounds)
    say("plain_ms", plain["plain_ms"])
    plain_gib = peak_gib(device, before)
    net = Supernet(model, graph, groups)
    clean(device)
    found, refused = _time_search(net, data, settled, rounds, say)
    first_s = plain.pop("first_s") + found.pop("first_s")
    return Measured(
        model=name,
        model_args=model_args,
        batch=batch,
        shape=shape,
        device=device_name(device),
        torch=torch.__version__,
        groups=groups,
        macs=graph.macs(),
        params=graph.params(),
        plain_gib=plain_gib,
        search_gib=peak_gib(device, before),
        first_s=first_s,
        engine=choices(settled),
        refused=plain_refused or refused,
        **times,
        **plain,
        **found,
    )


def time_plain(model: nn.Module, data: Any, settled: Settled, rounds: int) -> tuple[dict[str, float], str]:
    """Seconds of the first training step and milliseconds of later ones, and why there is no CUDA graph."""
    with settled.running(model):
        optimizer = sgd(parameter_groups(model, 1e-4), 0.01, 0.9, True, settled.device)
        step = settled.repeated(make_step(model, optimizer, classification_loss(0.1), None, TrainConfig(), settled))
        first = seconds(lambda: step(data), settled.device)
        ms = median_ms(lambda: step(data), rounds, settled.device)
        return {"first_s": first, "plain_ms": ms}, _refused(step)


def _time_search(
    net: Supernet, data: Any, settled: Settled, rounds: int, say: Callable[[str, float], None]
) -> tuple[dict[str, float], str]:
    """The same of the two stages, as a search runs them after its warm-up."""
    config = SearchConfig(budget=halfway(net.graph, net.floor), groups=int(net.alpha.shape[1] + 1))
    device = settled.device
    with settled.running(net.model), uncounted(net.model):
        net.train()
        steps = Steps(net, chains(net), config, parse(config.budget, net.graph), None, settled)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            net.alpha.fill_(1.8)

        def stage1() -> None:
            steps.train_weights([data], Draw.MARKOV, generator, 0.01)

        def stage2() -> None:
            steps.move_alphas([data], 1e-6)

        def both() -> None:
            stage1()
            stage2()

        times = {"first_s": seconds(both, device)}
        say("first_s", times["first_s"])
        for name, step in (("stage1_ms", stage1), ("stage2_ms", stage2), ("search_ms", both)):
            times[name] = median_ms(step, rounds, device)
            say(name, times[name])
        return times, _refused(steps.stage1) or _refused(steps.stage2)


def _refused(step: Any) -> str:
    return str(getattr(step, "refused", ""))


# how they are computed, and at what budget


def settle(engine: Engine, device: torch.device, model: nn.Module, graph: ChannelGraph) -> Settled:
    """The engine's choices, as for a long run."""
    kinds = {"large": graph.macs() >= LARGE, "narrow": is_narrow(model), "depthwise": is_depthwise(model)}
    return engine.settled(device, steps=10**6, **kinds)


def choices(settled: Settled) -> dict[str, str]:
    """They in words."""
    names = ("precision", "channels_last", "compile", "graphs", "kernels", "depthwise", "tf32")
    return {name: str(getattr(settled, name)) for name in names}


def halfway(graph: ChannelGraph, floor: Widths) -> int:
    """MACs in the middle of what can be reached."""
    return (graph.macs(floor) + graph.macs()) // 2
