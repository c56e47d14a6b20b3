"""Cut networks are timed, and a table of latency is made of their times."""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import device_of, generator
from dmcp.calibration import kept_modes
from dmcp.errors import BudgetError, DmcpError, WidthsError
from dmcp.exporting import missing_packages, onnxruntime_version
from dmcp.kinds import check_function, check_kind
from dmcp.latency import Latency, RuntimeKind, Timed, show_ms
from dmcp.sampling import Options, between
from dmcp.searching.bounds import Bound
from dmcp.slicing import narrow, unwrap
from dmcp.spaces import Widths
from dmcp.timing.fit import fit, forecast_ms, hiccups
from dmcp.timing.onnx_sessions import Call, check_here, open_all
from dmcp.tracing.cost import Terms
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.recording import batch_of, call_model, map_leaves, rebatch
from dmcp.tracing.trace import trace
from dmcp.tracing.work import work

Measure = Callable[[nn.Module], float]  # a network in eval mode -> milliseconds of a forward pass
NETWORKS = 40  # that are measured for a table
_LEAST = 12  # networks of which a table can be made
_HELD_OUT = 5  # one network of so many is
_ROUNDS, _FEWEST, _PASSES = 30, 5, 3  # turns of all networks, at most and at least; passes of a turn that are timed
_FAST = 10  # one pass of so many is a fast one
_CALM = 0.02  # of a pass, in which other programs may have the processor without disturbing it
_FINE = 1e-6  # seconds: a clock must tell such times apart
_SECONDS = 30.0  # after which no further turn begins


# measuring


def measure_latency(
    model: nn.Module,
    example: Any,
    graph: ChannelGraph | None = None,
    *,
    measure: Measure | None = None,
    batch: int = 1,
    device: str | torch.device = "",
    dtype: torch.dtype | str = "float32",
    floor: Bound | None = None,
    ceiling: Bound | None = None,
    align: int = 1,
    networks: int = NETWORKS,
    seed: int = 0,
    runtime: str = RuntimeKind.TORCH.value,
) -> Latency:
    """Measure cut networks of all sizes, and make a table of them that knows the time of any widths.

    measure: your own function, which gets a network in eval mode and returns the milliseconds that a forward pass
        takes, somewhere: it may export the network and time it on a phone. It is called once for each network.
    batch, device, dtype: of the passes that are timed on this machine, where there is no such function; the
        default device is the model's. Threads are as many as torch has.
    floor, ceiling, align: widths between which networks are drawn, with the seed; multiples of align. Bounds are
        widths, a number for all spaces, or numbers by the names of modules or spaces.
    runtime: "torch", or "onnx": networks are exported and run in onnxruntime, on the CPU in float32 only.
    """
    if type(networks) is not int or networks < _LEAST:
        raise BudgetError(f"A table of latency needs at least {_LEAST} networks, not {networks!r}.")
    if type(batch) is not int or batch < 1:
        raise BudgetError(f"The batch of a latency must be an int of at least 1, not {batch!r}.")
    if type(seed) is not int or seed < 0:
        raise BudgetError(f"The seed of a latency must be an int of at least 0, not {seed!r}.")
    if graph is not None:
        check_kind("graph", graph, ChannelGraph, BudgetError)
    check_function("measure", measure, "it gets a network, and returns milliseconds")
    in_onnx = _in_onnx(runtime, str(device), _dtype(dtype), measure)
    graph = graph or trace(model, example)
    model, start = unwrap(model), time.perf_counter()
    drawn = draw(graph, floor, ceiling, align, networks, seed)
    place = str(device) or ("cpu" if in_onnx else str(device_of(model)))
    clock = Clock(place, batch, _dtype(dtype), torch.get_num_threads(), example, measure, in_onnx)
    times = clock.times(_narrowed(model, graph, graph.widths(row)) for row in drawn)
    if hiccups(work(graph), drawn, times)[0]:  # a second one would be odd: it is what budgets are shares of
        times[0] = min(times[0], *clock.times(iter([_narrowed(model, graph, graph.full)])))
    terms, found = _tabulate(graph, drawn, times)
    errors = [abs(it.forecast_ms - it.ms) / it.ms for it in found if it.held_out]
    own = {} if measure is None else {"place": "", "device": _called(measure)}
    here: dict[str, Any] = {"place": torch.device(clock.device).type, "device": device_name(clock.device)}
    return Latency(
        terms=terms,
        fingerprint=graph.fingerprint,
        spaces=tuple(space.name for space in graph.spaces),
        input_shape=graph.input_shape,
        networks=found,
        median_error=median(errors),
        largest_error=max(errors),
        batch=batch,
        threads=clock.threads,
        dtype=str(clock.dtype).removeprefix("torch."),
        torch=torch.__version__,
        seconds=time.perf_counter() - start,
        runtime=str(runtime),
        onnxruntime=onnxruntime_version() if in_onnx else "",
        **(here | own),
    )


def _tabulate(
    graph: ChannelGraph, drawn: Sequence[Sequence[int]], times: Sequence[float]
) -> tuple[Terms, tuple[Timed, ...]]:
    """The polynomial of all networks, and what it says of them; of those held out, what one of the others says.

    The others are all that this one sees, and no held-out network is left out of the errors, however far off it is.
    """
    kinds = work(graph)

    def fitted(numbers: Sequence[int]) -> tuple[Terms, list[bool]]:
        rows, ms = [drawn[number] for number in numbers], [times[number] for number in numbers]
        late = [False, *hiccups(kinds, rows, ms)[1:]]
        return fit(kinds, rows, ms, late), late

    out = [number >= 2 and number % _HELD_OUT == 0 for number in range(len(drawn))]
    blind, _ = fitted([number for number, held in enumerate(out) if not held])
    terms, late = fitted(range(len(drawn)))
    found = tuple(
        Timed(tuple(row), ms, forecast_ms(blind if held else terms, row), held, left)
        for row, ms, held, left in zip(drawn, times, out, late, strict=True)
    )
    return terms, found


def draw(
    graph: ChannelGraph, floor: Bound | None, ceiling: Bound | None, align: int, count: int, seed: int
) -> list[list[int]]:
    """Widths to measure: unpruned, the smallest, all spaces at one share, and each space at a share of its own."""
    options, source = between(graph, floor, ceiling, align), generator(seed)
    _check_different(graph, options, align)
    rows = [graph.full.tensor(), options.widths(torch.zeros_like(options.last))]
    for number in range(count - 2):
        shares = torch.rand(len(options.last), generator=source, dtype=torch.float64)
        if number % 2:  # near to each other, as those of networks that were chosen for a budget
            middle = torch.rand(1, generator=source, dtype=torch.float64)
            shares = (middle + 0.2 * (shares - 0.5)).clamp(0, 1)
        rows.append(options.widths((shares * options.last).round().long()))
    return [row.tolist() for row in rows]


def _check_different(graph: ChannelGraph, options: Options, align: int) -> None:
    """Refuse options that leave one network only."""
    if options.last.any():
        return
    largest = max(graph.spaces, key=lambda space: space.size * space.unit)
    where, fix = f"in multiples of {align}", "a smaller align"
    if align == 1 or between(graph, None, None, align).last.any():  # then bounds have left nothing
        where, fix = "between floor and ceiling", "another floor or ceiling" + (", or a smaller align" * (align > 1))
    raise WidthsError(
        f"There is nothing to measure: no space can be narrowed {where}; the largest, {largest.name}, has "
        f"{largest.size * largest.unit} channels. Use {fix}."
    )


def _narrowed(model: nn.Module, graph: ChannelGraph, widths: Widths) -> nn.Module:
    """What `cut` gives, but not replayed first: it is run at once."""
    return narrow(model, graph.cuts(widths), graph.attributes(widths))


@dataclass(frozen=True)
class Clock:
    """What measures networks: an own function, or this machine."""

    device: str
    batch: int
    dtype: torch.dtype
    threads: int
    example: Any
    measure: Measure | None = None
    in_onnx: bool = False  # exported, in onnxruntime

    def times(self, nets: Iterator[nn.Module]) -> list[float]:
        """Milliseconds of a forward pass of each."""
        if self.measure is not None:
            return [_checked(self.measure(net.eval()), self.measure) for net in nets]
        try:
            moved = (_moved(net, self.device, self.dtype) for net in nets)
            example = map_leaves(lambda leaf: _like(leaf, self.device, self.dtype), self._example())
            with threads(self.threads):
                if self.in_onnx:
                    alone = _works_alone(torch.device("cpu"))
                    return turn_times(open_all(moved, example, self.threads), alone=alone)
                return pass_times(list(moved), example)
        except (RuntimeError, AssertionError, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise DmcpError(
                f"The latency cannot be measured on {self.device} with a batch of {self.batch} in {self.dtype}: "
                f"{reason}"
            ) from error

    def _example(self) -> Any:
        return self.example if batch_of(self.example) is None else rebatch(self.example, self.batch)


@torch.inference_mode()
def pass_times(
    nets: Sequence[nn.Module], example: Any, rounds: int = _ROUNDS, seconds: float = _SECONDS
) -> list[float]:
    """Milliseconds of a forward pass of each network, in eval mode."""
    place = device_of(nets[0])
    wait = waiting(place)  # found now: looking for it takes as long as a small network
    with contextlib.ExitStack() as modes:
        for net in nets:
            modes.enter_context(kept_modes(net))
            net.eval()
        calls = [functools.partial(call_model, net, example) for net in nets]
        return turn_times(calls, rounds, seconds, wait, _works_alone(place))


def turn_times(
    calls: Sequence[Call],
    rounds: int = _ROUNDS,
    seconds: float = _SECONDS,
    wait: Call = lambda: None,
    alone: bool = False,
) -> list[float]:
    """Milliseconds that each call takes, a forward pass of one network.

    The networks take turns, so that a machine that is slow for a while is so for all of them. The first pass of a turn
    only warms the caches that the network before it filled. alone: whether this thread does all of the work.
    """
    walls: list[list[float]] = [[] for _ in calls]
    worked: list[list[float]] = [[] for _ in calls]
    now = time.thread_time if alone else time.perf_counter
    start = time.perf_counter()
    for number in range(rounds + 1):
        if number > _FEWEST and time.perf_counter() - start > seconds:
            break
        for call, wall, own in zip(calls, walls, worked, strict=True):
            for turn in range(_PASSES + 1):
                wait()
                begun, before = now(), time.perf_counter()
                call()
                wait()
                after, ended = time.perf_counter(), now()
                if number and turn:  # the first turn also loads kernels
                    wall.append(1000 * (after - before))
                    own.append(1000 * (ended - begun))
    return usual(walls, worked if alone else None)


def usual(walls: Sequence[Sequence[float]], worked: Sequence[Sequence[float]] | None = None) -> list[float]:
    """What passes of each network usually take: its fast ones, times what half of all passes take longer than such.

    Other programs slow many passes, and those of one network more than those of another, as it happens. The fast ones
    are hardly disturbed: they tell networks apart. By how much usual passes are slower is one number for all.

    worked: how long the thread had the processor in each pass. Such times tell networks apart better than any by the
    clock on the wall, and usual passes are those in which nobody else had it. Where there is none, the network may
    wait for something of its own, and only the wall counts.
    """
    calm = [_calm(*both) for both in zip(walls, worked or walls, strict=True)]
    times = worked if worked is not None and any(calm) else walls
    usually = calm if any(calm) else walls
    fast = [sorted(own)[len(own) // _FAST] for own in times]
    slower = median(median(own) / quick for own, quick in zip(usually, fast, strict=True) if own)
    return [slower * quick for quick in fast]


def _calm(walls: Sequence[float], worked: Sequence[float]) -> list[float]:
    """The passes, by the wall, in which no other program had the processor."""
    return [wall for wall, own in zip(walls, worked, strict=True) if wall - own <= _CALM * wall]


def _works_alone(device: torch.device) -> bool:
    """Whether this thread alone computes, and a clock says how long it does."""
    fine = time.get_clock_info("thread_time").resolution <= _FINE
    return device.type == "cpu" and torch.get_num_threads() == 1 and fine


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def waiting(device: torch.device) -> Callable[[], None]:
    """What waits until a device has done all it was told."""
    if device.type == "cpu":
        return lambda: None
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    synchronize: Callable[[], None] = getattr(torch, device.type).synchronize
    return synchronize


def _in_onnx(runtime: str, device: str, dtype: torch.dtype, measure: Measure | None) -> bool:
    """Whether networks are to run in onnxruntime; refused where they cannot."""
    if runtime not in list(RuntimeKind):
        raise BudgetError(f"The runtime of a latency must be {' or '.join(RuntimeKind)}, not {runtime!r}.")
    if runtime == RuntimeKind.TORCH:
        return False
    if measure is not None:
        raise BudgetError("Networks are timed by a function of your own, or in onnxruntime: leave one of the two out.")
    check_here(device or "cpu", dtype)
    return True


def _moved(net: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    return net.to(device=device, dtype=dtype).eval()  # a copy already


def _like(leaf: Any, device: str, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device=device, dtype=dtype) if leaf.is_floating_point() else leaf.to(device)


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BudgetError(f"The dtype of a latency must be float32, bfloat16 or float16, not {dtype!r}.")
    return found


def _called(measure: Measure) -> str:
    return getattr(measure, "__name__", type(measure).__name__)


def _checked(ms: Any, measure: Measure) -> float:
    """Milliseconds that an own function gave, if they are some."""
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(ms, bool | str) and math.isfinite(float(ms)) and float(ms) > 0:
            return float(ms)
    raise BudgetError(f"{_called(measure)} must return milliseconds, a number above 0, not {ms!r}.")


def device_name(device: str) -> str:
    """What the device is called: a GPU's name, the model of a CPU."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    if kind != "cpu":
        return kind
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "a CPU"


def is_here(table: Latency) -> bool:
    """Whether what the table is of can be measured on this machine."""
    if not table.place or (table.runtime == RuntimeKind.ONNX and missing_packages()):
        return False
    try:
        return device_name(table.place) == table.device
    except (RuntimeError, AssertionError):  # no such device
        return False


def clock_of(table: Latency, example: Any, measure: Measure | None = None) -> Clock | None:
    """What measures as the table was measured; None where that cannot be done here."""
    if measure is None and not is_here(table):
        return None
    in_onnx = table.runtime == RuntimeKind.ONNX
    return Clock(table.place or "cpu", table.batch, _dtype(table.dtype), table.threads, example, measure, in_onnx)


# words


def describe(table: Latency) -> str:
    """The networks that were measured as a text, and how good the forecasts are."""
    lines = [f"{'network':<12}{'measured':>12}{'forecast':>12}{'error':>9}"]
    for number, it in enumerate(table.networks):
        name = ("unpruned", "smallest")[number] if number < 2 else "held out" if it.held_out else f"{number + 1}"
        error, left = f"{it.forecast_ms / it.ms - 1:+.1%}", "  left out" * it.left_out
        lines.append(f"{name:<12}{show_ms(it.ms):>12}{show_ms(it.forecast_ms):>12}{error:>9}{left}")
    took = f"Measured in {table.seconds:.0f} s."
    return "\n".join([*lines, "", table.summary, took, *filter(None, [table.trouble])])
