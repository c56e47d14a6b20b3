"""How fast and how large: steps of training, search and pruned networks, whole epochs on data, drawing structures."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import Loader, device_of
from dmcp.budget import constant_alpha, parse, spent_shares
from dmcp.cutting import cut
from dmcp.engine import Engine, Settled, is_depthwise, is_narrow, sgd
from dmcp.errors import DmcpError
from dmcp.losses import classification_loss
from dmcp.markov import CHAIN, group_sizes
from dmcp.padding import padded
from dmcp.sampling import uniform
from dmcp.searching.sandwich import Draw, chains
from dmcp.searching.search import LARGE, Steps, search, uncounted
from dmcp.searching.searches import SearchConfig
from dmcp.spaces import Widths
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.training import TrainConfig, make_step, parameter_groups, train

_AT_ONCE = 1 << 16  # structures drawn in one expression, as direct sampling does


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of one network at one batch size, on one device."""

    model: str
    model_args: tuple[str, ...]  # name=value for its builder
    batch: int
    shape: tuple[int, ...]  # of one sample
    device: str
    torch: str  # its version
    groups: int
    macs: int
    params: int
    trace_s: float
    plain_ms: float  # forward, backward and optimizer of the unpruned network
    stage1_ms: float  # all sub-networks of the sandwich, one optimizer step
    stage2_ms: float  # the alphas
    search_ms: float  # stage 1 and stage 2, one after the other
    plain_gib: float | None  # the most memory that tensors took; None where torch does not count it
    search_gib: float | None
    first_s: float  # the first plain step and the first search step: compiling and tuning
    engine: dict[str, str] = field(default_factory=dict)
    refused: str = ""  # why a step that should be replayed as a CUDA graph was not

    @property
    def ratio(self) -> float:
        """A search step in plain steps."""
        return self.search_ms / self.plain_ms

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the stages in plain steps."""
        ratios = {f"{name}_ratio": getattr(self, f"{name}_ms") / self.plain_ms for name in ("stage1", "stage2")}
        return asdict(self) | ratios | {"search_ratio": self.ratio}


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Seconds of one pass over data with everything in it: loader, steps, reading the losses."""

    model: str
    model_args: tuple[str, ...]
    data: str
    batch: int
    steps: int  # in an epoch
    device: str
    train_s: float  # plain training of the unpruned network
    warmup_s: float  # the search's first part: weights only
    search_s: float  # its second part: weights and alphas


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Seconds in which structures were drawn from the chains and their cost was counted, on one core."""

    model: str
    model_args: tuple[str, ...]
    spaces: int
    structures: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Milliseconds of a training step of a network and of what uniform widths leave of it."""

    model: str
    model_args: tuple[str, ...]
    batch: int
    budget: str
    macs: int  # of the pruned network
    device: str
    whole_ms: float  # the unpruned network
    pruned_ms: float
    padded_ms: float | None  # the same inside one of rounder widths, see padding; None where widths are round
    engine: dict[str, str] = field(default_factory=dict)


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
    start = time.perf_counter()
    graph = trace(model, torch.zeros(2, *shape))
    times = {"trace_s": time.perf_counter() - start}
    say("trace_s", times["trace_s"])
    settled = _settled(engine, device, model, graph)
    before = _clean(device, settled.compile)  # what others left there is not the network's
    x = torch.randn(batch, *shape, device=device)
    data = settled.laid_out((x, torch.randint(classes, (batch,), device=device)))
    model = model.to(device).train()
    plain, plain_refused = _measure_plain(model, data, settled, rounds)
    say("plain_ms", plain["plain_ms"])
    plain_gib = _peak_gib(device, before)
    net = Supernet(model, graph, groups)
    _clean(device)
    found, refused = _measure_search(net, data, settled, rounds, say)
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
        search_gib=_peak_gib(device, before),
        first_s=first_s,
        engine=_chosen(settled),
        refused=plain_refused or refused,
        **times,
        **plain,
        **found,
    )


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
            settled = _settled(engine, device, net, graph)
            _clean(device, settled.compile)
            found, _ = _measure_plain(net, settled.laid_out(images), settled, rounds)
            times[part], used = found["plain_ms"], _chosen(settled)
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


def _settled(engine: Engine, device: torch.device, model: nn.Module, graph: ChannelGraph) -> Settled:
    """As for a long run."""
    kinds = {"large": graph.macs() >= LARGE, "narrow": is_narrow(model), "depthwise": is_depthwise(model)}
    return engine.settled(device, steps=10**6, **kinds)


def _chosen(settled: Settled) -> dict[str, str]:
    choices = ("precision", "channels_last", "compile", "graphs", "kernels", "depthwise", "tf32")
    return {key: str(getattr(settled, key)) for key in choices}


def measure_epochs(
    name: str,
    model: nn.Module,
    graph: ChannelGraph,
    loader: Loader,
    batch: int,
    engine: Engine,
    groups: int = 10,
    epochs: int = 3,
    data: str = "",
    model_args: tuple[str, ...] = (),
) -> Epochs:
    """Real training and a real search of a few epochs each: the medians, less the first epoch of every part.

    In that one kernels are tuned and graphs captured. Copies are trained; the model stays as it is.
    """
    if epochs < 2:
        raise DmcpError(f"Epochs are measured after the first one: give at least 2, not {epochs}.")
    steps, device = len(loader), device_of(model)
    ends: list[float] = []

    def look(record: Any) -> None:
        """Records of an epoch come when it is over and the device is done."""
        if (record.step + 1) % steps == 0:
            ends.append(time.perf_counter())

    rates = TrainConfig(epochs=epochs, lr=0.1, warmup_epochs=0, warmup_lr=0.0)
    _clean(device)
    train(copy.deepcopy(model), loader, rates, on_step=look, engine=engine)
    net = Supernet(model, graph, groups)
    config = SearchConfig(
        budget=_halfway(net.graph, net.floor),
        groups=groups,
        epochs=2 * epochs,
        lr=0.05,
        min_lr=0.0,
        log_every=steps,
        warmup=0.5,
    )
    _clean(device)
    search(net, loader, config, on_record=look, engine=engine)
    times = [after - before for before, after in itertools.pairwise(ends)]
    trained, warm, moved = (times[part * epochs : (part + 1) * epochs - 1] for part in range(3))
    return Epochs(
        model=name,
        model_args=model_args,
        data=data,
        batch=batch,
        steps=steps,
        device=device_name(device),
        train_s=statistics.median(trained),
        warmup_s=statistics.median(warm),
        search_s=statistics.median(moved),
    )


def measure_sampling(
    graph: ChannelGraph, n: int = 10**6, groups: int = 10, name: str = "", model_args: tuple[str, ...] = ()
) -> Sampled:
    """Seconds of drawing n structures and counting their MACs, as direct sampling does it, on one core."""
    if n < 1:
        raise DmcpError(f"Sampling needs at least one structure, not {n}.")
    rows = [group_sizes(space.size, groups) for space in graph.spaces]
    most = max(map(len, rows))
    sizes = torch.tensor([row + (0,) * (most - len(row)) for row in rows])  # (S, G), zeros behind short chains
    budget = parse(_halfway(graph, graph.widths(sizes[:, 0].tolist())), graph)
    alphas = torch.full((len(rows), most - 1), constant_alpha(budget, graph, sizes))
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return spent_shares(budget, graph, CHAIN.sample(alphas, sizes, count, generator))

    with _one_core():
        draw(1000)  # the first call is slower
        start = time.perf_counter()
        for done in range(0, n, _AT_ONCE):
            draw(min(_AT_ONCE, n - done))
        seconds = time.perf_counter() - start
    return Sampled(model=name, model_args=model_args, spaces=len(rows), structures=n, seconds=seconds)


def device_name(device: torch.device) -> str:
    """NVIDIA H200, or the kind of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# the steps


def _measure_plain(model: nn.Module, data: Any, settled: Settled, rounds: int) -> tuple[dict[str, float], str]:
    """Seconds of the first step and milliseconds of later ones, and why there is no graph."""
    with settled.running(model):
        optimizer = sgd(parameter_groups(model, 1e-4), 0.01, 0.9, True, settled.device)
        step = settled.repeated(make_step(model, optimizer, classification_loss(0.1), None, TrainConfig(), settled))
        first = _seconds(lambda: step(data), settled.device)
        ms = _median(lambda: step(data), rounds, settled.device)
        return {"first_s": first, "plain_ms": ms}, _refused(step)


def _measure_search(
    net: Supernet, data: Any, settled: Settled, rounds: int, say: Callable[[str, float], None]
) -> tuple[dict[str, float], str]:
    """The same of the two stages, as a search runs them after its warm-up."""
    config = SearchConfig(budget=_halfway(net.graph, net.floor), groups=int(net.alpha.shape[1] + 1))
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

        times = {"first_s": _seconds(both, device)}
        say("first_s", times["first_s"])
        for name, step in (("stage1_ms", stage1), ("stage2_ms", stage2), ("search_ms", both)):
            times[name] = _median(step, rounds, device)
            say(name, times[name])
        return times, _refused(steps.stage1) or _refused(steps.stage2)


def _refused(step: Any) -> str:
    return str(getattr(step, "refused", ""))


def _halfway(graph: ChannelGraph, floor: Widths) -> int:
    """MACs in the middle of what can be reached."""
    return (graph.macs(floor) + graph.macs()) // 2


# time and memory


def _median(step: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Milliseconds of a step, the median over rounds.

    A round is a few steps in a row, as in training, where the host goes ahead of the device.
    """
    warm, few = (5, 5) if device.type == "cuda" else (1, 1)
    for _ in range(warm):  # also captures graphs
        step()
    times = [_seconds(lambda: [step() for _ in range(few)], device) / few for _ in range(rounds)]
    return 1000 * statistics.median(times)


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _clean(device: torch.device, compiled: bool = False) -> int:
    """Give back what earlier networks took, and start counting the peak anew; bytes that are still in use."""
    if compiled:
        torch.compiler.reset()  # it keeps a few variants of each function only, and others would run as they are
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # also the memory of graphs that are gone, without which no new one can be captured
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_gib(device: torch.device, before: int) -> float | None:
    """Since the last cleaning, and so with warming up and capturing: replayed graphs do not count later."""
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30 if device.type == "cuda" else None


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
