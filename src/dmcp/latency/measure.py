"""Measure networks of several widths, fit a latency table, and choose widths by it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmcp.batches import device_of, generator
from dmcp.budget import LATENCY, Budget, Limit, known_limits, limits_latency
from dmcp.calibration import kept_modes
from dmcp.cutting import cut
from dmcp.errors import BudgetError, DmcpError, FileError, WidthsError
from dmcp.exporting import (
    TOLERANCE,
    largest_gap,
    missing_packages,
    named,
    onnxruntime_version,
    open_session,
    reason,
    record,
    silence,
    write_onnx,
)
from dmcp.latency.table import FS_PER_MS, LATENCY_FILE, Latency, Outcome, RuntimeKind, Timed, show_ms
from dmcp.modules import (
    batch_of,
    call_model,
    check_function,
    check_kind,
    map_leaves,
    narrow,
    rebatch,
    tensors_in,
    unwrap,
)
from dmcp.runtime.distributed import current, share_tensors
from dmcp.runtime.io import MOST_JSON, parse_json, quote, read_bytes, write_files
from dmcp.sampling import Options, between, expected
from dmcp.searching.config import SearchResult, extremes
from dmcp.settings import Bound
from dmcp.tracing.cost import VIEWS, Terms, evaluate, product, total
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.layout import in_spaces
from dmcp.tracing.ops import Dims
from dmcp.tracing.record import Op
from dmcp.tracing.trace import trace
from dmcp.widths import Widths

Key = tuple[str, str, int]  # macs or numbers, the kind of layer, its resolution
MACS, NUMBERS = "macs", "numbers"


def work(graph: ChannelGraph) -> dict[Key, Terms]:
    """Of the pass in eval mode: multiply-adds and numbers written, summed over layers of one kind and resolution.

    For the whole example. Ops that only look at memory in another way have nothing to do.
    """
    coupling = graph.coupling
    recording, facts, layouts = coupling.recordings[0], coupling.facts[0], coupling.layouts[0]
    numbers = graph.space_numbers
    owners = {out: op for op in recording.ops for out in op.outs if out is not None}

    def polynomial(coefficient: int, dims: Dims) -> Terms:
        resolve = coupling.channels.resolve
        return product(coefficient, [in_spaces(resolve(layout), numbers) for layout in dims])

    found: dict[Key, list[Terms]] = {}
    for cost in facts.costs:
        op = owners[cost.out]
        key = (MACS, _kind(op, cost.kind), _resolution(recording.shapes[cost.out]))
        found.setdefault(key, []).append(polynomial(cost.coefficient, cost.dims))
    layers = {cost.out for cost in facts.costs}
    for op in recording.ops:
        if op.func.is_view or op.name in VIEWS:
            continue
        for out in op.outs[:1]:  # what else norms and pools give back is small, or not wanted
            if out is not None and out not in recording.tensors:
                kind = "layers" if out in layers else "rest"
                key = (NUMBERS, kind, _resolution(recording.shapes[out]))
                found.setdefault(key, []).append(polynomial(1, layouts[out]))
    return {key: total(parts) for key, parts in found.items()}


def _kind(op: Op, kind: str) -> str:
    """Convolutions with groups move as many numbers for far fewer products."""
    groups = op.arguments().get("groups")
    return f"grouped {kind}" if isinstance(groups, int) and groups > 1 else kind


def _resolution(shape: tuple[int, ...]) -> int:
    """Pixels of an image; 1 of what is none."""
    return math.prod(shape[2:]) if len(shape) > 3 else 1


Array = NDArray[np.float64]
_FOLDS = 5
_ROUNDS = 10  # per unknown, after which the solver has gone round in circles
_TINY = 1e-10
_ANCHOR = 5.0  # how much more the first network counts
_FAR, _SPREADS = 1.5, 5.0  # a hiccup takes so many times its forecast, and is so many usual errors away from it
_SPREAD = 1.4826  # of normal errors, the deviation over the median
_RARE = 5  # at most one network of so many has a hiccup: what happens more often is how the machine is
_CLOSE, _TURNS = 1e-3, 8  # errors that count alike, and rounds, in the search for least absolute errors

# ways to put kinds of work together; the one that forecasts best is taken
_WAYS: tuple[Callable[[Key], object], ...] = (
    lambda key: key,
    lambda key: (key[0], key[1] if key[0] == "macs" else "", key[2]),
    lambda key: key[:2],
    lambda key: key[0],
)


def fit(
    work: Mapping[Key, Terms], widths: Sequence[Sequence[int]], ms: Sequence[float], left_out: Sequence[bool] = ()
) -> Terms:
    """Femtoseconds as a polynomial in the widths: a constant, and so much for each unit of each kind of work.

    Errors count relative to the time, and more for the first network, the unpruned one, of which budgets are shares.
    Few networks cannot tell many kinds apart: they are divided as finely as forecasts best those networks that were
    left out in turn. left_out: networks that do not count; the first does.
    """
    groupings = _groupings(work)
    kept = [number for number in range(len(ms)) if not any(left_out[number : number + 1])]
    times = np.array([ms[number] for number in kept], dtype=np.float64)
    tables = [_table(parts, [widths[number] for number in kept]) for parts in groupings]
    errors = [_cross_error(table, times) for table in tables]
    best = min(range(len(tables)), key=lambda number: (errors[number], len(groupings[number])))
    prices = _prices(tables[best], times, _weights(times))
    return _priced(groupings[best], prices)


def hiccups(work: Mapping[Key, Terms], widths: Sequence[Sequence[int]], ms: Sequence[float]) -> list[bool]:
    """Which networks took far longer than the others say of them: something else had the machine meanwhile.

    Nothing makes a network faster than it is, so one that is far below its forecast really was so fast. Forecasts are
    those of least absolute errors, which few far ones do not bend, by the way of putting work together that does best.
    """
    times = np.array(ms, dtype=np.float64)
    errors = [_left_out_errors(_table(parts, widths), times) for parts in _groupings(work)]
    best = min(errors, key=lambda it: float(np.median(np.abs(it))))
    bound = max(np.log(_FAR), _SPREADS * _SPREAD * float(np.median(np.abs(best))))
    found: list[bool] = (best > bound).tolist()
    return found if _RARE * sum(found) <= len(found) else [False] * len(found)


def forecast_ms(terms: Terms, widths: Sequence[int]) -> float:
    """What the polynomial says."""
    return evaluate(terms, widths) / FS_PER_MS


def _groupings(work: Mapping[Key, Terms]) -> list[list[Terms]]:
    """The constant 1 and the sums of each group, once for each way that differs from those before it."""
    found: list[list[Terms]] = []
    for way in _WAYS:
        groups: dict[object, list[Terms]] = {}
        for key, terms in work.items():
            groups.setdefault(way(key), []).append(terms)
        parts: list[Terms] = [{(): 1}, *(total(some) for some in groups.values())]
        if parts not in found:
            found.append(parts)
    return found


def _table(parts: Sequence[Terms], widths: Sequence[Sequence[int]]) -> Array:
    """How much of each there is in each network. -> (N, P)"""
    return np.array([[float(evaluate(part, row)) for part in parts] for row in widths])


def _weights(times: Array) -> Array:
    """How much an error of a millisecond counts. (N,) -> (N,)"""
    weights: Array = 1 / times
    weights[0] *= _ANCHOR
    return weights


def _prices(table: Array, times: Array, weights: Array) -> Array:
    """Milliseconds for a unit of each. (N, P), (N,), (N,) -> (P,)"""
    return solve(table * weights[:, None], times * weights)


def _cross_error(table: Array, times: Array) -> float:
    """Median of the relative errors of networks that a fit has not seen, each left out once."""
    found: list[float] = []
    for fold in range(min(_FOLDS, len(times))):
        out = np.arange(len(times)) % _FOLDS == fold
        prices = _prices(table[~out], times[~out], _weights(times)[~out])
        found += (np.abs(table[out] @ prices - times[out]) / times[out]).tolist()
    return median(found)


def _left_out_errors(table: Array, times: Array) -> Array:
    """Logarithm of time / forecast of networks that a fit has not seen, each left out once. (N, P), (N,) -> (N,)"""
    found = np.zeros(len(times))
    for fold in range(min(_FOLDS, len(times))):
        out = np.arange(len(times)) % _FOLDS == fold
        forecasts = table[out] @ _least_absolute(table[~out], times[~out])
        found[out] = np.log(times[out] / np.maximum(forecasts, _TINY * times[out]))
    return found


def _least_absolute(table: Array, times: Array) -> Array:
    """Prices with the least sum of relative errors, not of their squares, by weights that shrink with the error."""
    weights = 1 / times
    for _ in range(_TURNS):
        prices = _prices(table, times, weights)
        errors = np.abs(table @ prices / times - 1)
        weights = 1 / (times * np.sqrt(np.maximum(errors, _CLOSE)))
    return prices


def _priced(parts: Sequence[Terms], prices: Array) -> Terms:
    """Rounded where it is summed up: a single product may take less than a femtosecond."""
    summed: dict[tuple[int, ...], Fraction] = {}
    for part, price in zip(parts, prices.tolist(), strict=True):
        for spaces, factor in part.items():
            summed[spaces] = summed.get(spaces, Fraction(0)) + factor * Fraction(price) * FS_PER_MS
    return {spaces: round(value) for spaces, value in summed.items() if round(value)} or {(): 0}


def solve(table: Array, wanted: Array) -> Array:
    """Non-negative least squares by active sets (Lawson and Hanson, 1974). (N, P), (N,) -> (P,)"""
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    columns = table / scale
    count = columns.shape[1]
    found, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(_ROUNDS * count):
        slope = columns.T @ (wanted - columns @ found)
        slope[free] = -np.inf
        if free.all() or slope.max() <= _TINY:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
            below = free & (trial <= _TINY)
            if not below.any():
                break
            steps = found[below] / np.maximum(found[below] - trial[below], _TINY)
            found = found + min(1.0, float(steps.min())) * (trial - found)
            free &= ~(below & (found <= _TINY))
            free &= found > _TINY
            found[~free] = 0.0
        found = trial
    result: Array = found / scale
    return result


Call = Callable[[], object]  # one forward pass
Write = Callable[[nn.Module, Any, Path], None]
# Workers of a session that has nothing to do would go on looking for work, on the cores that the next session needs.
OPTIONS = {"session.intra_op.allow_spinning": "0"}


def check_here(device: str, dtype: torch.dtype) -> None:
    """Refuse what is not measured in onnxruntime, or not on this machine."""
    if torch.device(device).type != "cpu" or dtype is not torch.float32:
        raise DmcpError(
            f"In onnxruntime latency is measured on the CPU in float32 only, not on {device} in "
            f"{str(dtype).removeprefix('torch.')}: measure it in torch, or with a function of your own."
        )
    if missing := missing_packages():
        raise DmcpError(f"{missing}, or measure in torch.")


@torch.no_grad()
def open_all(nets: Iterator[nn.Module], example: Any, threads: int) -> list[Call]:
    """A call for each network, in eval mode and all of one architecture, that is one forward pass in onnxruntime.

    The first network is tried: torch.export must take it, as `export` asks, and its session must give its outputs.
    torch has two exporters. The older one needs far less time, for 40 networks minutes less; where it fails, all
    files are those of the newer one, which `export` writes.
    """
    first = next(nets)
    record(first, example)
    try:
        write: Write = _write_quickly
        call = _open(first, example, threads, write, try_it=True)
    except DmcpError:
        write = _write
        call = _open(first, example, threads, write, try_it=True)
    return [call, *(_open(net, example, threads, write) for net in nets)]


def _open(net: nn.Module, example: Any, threads: int, write: Write, try_it: bool = False) -> Call:
    """A network as a call; its file is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dmcp-") as folder:
        path = Path(folder) / "net.onnx"
        try:
            write(net, example, path)
            session = open_session(path, OPTIONS, threads)
            names = [it.name for it in session.get_inputs()]
            call = functools.partial(session.run, None, named(names, example))
            call()
        except DmcpError:
            raise
        except Exception as error:  # of torch's exporters, of onnxruntime, of a full disk
            raise DmcpError(f"This network cannot be run in onnxruntime: {reason(error)}") from error
    if try_it:
        _check_same(net, lambda it: session.run(None, named(names, it)), example)
    return call


def _check_same(net: nn.Module, run: Callable[[Any], list[Any]], example: Any) -> None:
    """Refuse a session that does not give the outputs of its network, for random inputs like the example."""
    random = generator(0)
    drawn = map_leaves(
        lambda it: torch.randn(it.shape, generator=random) if torch.is_tensor(it) and it.is_floating_point() else it,
        example,
    )
    gap = largest_gap(net, lambda it: [torch.from_numpy(output) for output in run(it)], [drawn])
    if not gap <= TOLERANCE:
        raise DmcpError(
            f"In onnxruntime this is not the same network: its outputs differ by {gap:.1e} of the largest one, more "
            f"than {TOLERANCE:.0e}."
        )


def _write(net: nn.Module, example: Any, path: Path) -> None:
    """The file that `export` writes."""
    write_onnx(*record(net, example), path)


def _write_quickly(net: nn.Module, example: Any, path: Path) -> None:
    """The file of torch's older exporter, for batches of this size.

    With a free batch it would compute shapes in each pass.
    """
    with silence():
        torch.onnx.export(_Plain(net, example).eval(), tuple(tensors_in(example)), path, dynamo=False)


class _Plain(nn.Module):
    """A network that takes tensors and returns tensors, in order, whatever it is given and returns otherwise."""

    def __init__(self, net: nn.Module, example: Any) -> None:
        super().__init__()
        self.net, self.example = net, example

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        given = map_leaves(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, self.example)
        return tuple(tensors_in(call_model(self.net, given)))


Measure = Callable[[nn.Module], float]  # a network in eval mode -> milliseconds of a forward pass
NETWORKS = 40  # that are measured for a table
_LEAST = 12  # networks of which a table can be made
_HELD_OUT = 5  # one network of so many is
_TIMED_ROUNDS, _FEWEST, _PASSES = (
    30,
    5,
    3,
)  # turns of all networks, at most and at least; passes of a turn that are timed
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
    nets: Sequence[nn.Module], example: Any, rounds: int = _TIMED_ROUNDS, seconds: float = _SECONDS
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
    rounds: int = _TIMED_ROUNDS,
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


CHOICE = "choice.json"  # which widths were taken, beside the checkpoints of a search
TRIES = 3  # further choices, where a chosen network takes another time than its forecast
ENOUGH = 0.95  # of the limit: a network that takes less is widened


class LatencyWarning(UserWarning):
    """A latency that is not known well, or that is above what was asked for."""


def choose(
    found: SearchResult,
    model: nn.Module,
    clock: Clock | None,
    pick: Callable[[SearchResult], Widths] = expected,
    tries: int = TRIES,
) -> tuple[SearchResult, Widths, Outcome]:
    """Widths whose network, cut and measured, is inside the limit of latency; the search with the limit they are of.

    Where the network takes longer than it may, or far less, the limit is changed by as much and widths are picked
    again, from the same alphas. The slowest that is fast enough is taken; where none is, the fastest, whose Outcome
    says that the limit does not hold.
    """
    graph, table = found.graph, found.graph.latency
    assert table is not None
    asked = _limit_of(found.budget)
    now, best = found, list[tuple[SearchResult, Widths, Outcome]]()
    for number in range(tries + 1):
        widths = pick(now)
        spent = graph.latency_fs(widths)
        ms = None if clock is None else _measured(clock, model, graph, widths)
        outcome = Outcome(
            asked_ms=asked / FS_PER_MS,
            predicted_ms=spent / FS_PER_MS,
            unpruned_ms=table.unpruned_ms,
            how=table.how,
            measured_ms=ms,
            again=number,
        )
        same = any(widths == other for _, other, _ in best)
        best = sorted([*best, (now, widths, outcome)], key=lambda it: _rank(it[2]))[-1:]
        wider = ms is not None and ms < ENOUGH * outcome.asked_ms
        if ms is None or same or (outcome.held and not wider) or (wider and spent < ENOUGH * _limit_of(now.budget)):
            break  # the last: another limit keeps it so small
        target = math.floor(spent * outcome.asked_ms / ms)
        least, most = (graph.latency_fs(it) for it in extremes(graph, found.sizes))
        if target < least or min(target, most) == _limit_of(now.budget):
            break
        now = replace(found, budget=_limited(found.budget, min(target, most)))
    ((result, widths, taken),) = best
    return result, widths, replace(taken, again=outcome.again)


def _rank(it: Outcome) -> tuple[bool, float]:
    """Of two networks that are fast enough the slower one is better, otherwise the faster one."""
    ms = it.measured_ms or 0.0
    return it.held, ms if it.held else -ms


def _measured(clock: Clock, model: nn.Module, graph: ChannelGraph, widths: Widths) -> float:
    """Time of the cut network, as it would be had the machine the speed that it had when the table was made.

    It is timed beside the unpruned one, which is in the table: on a machine that is busy now both are slow.
    """
    table = graph.latency
    assert table is not None
    whole, small = clock.times(iter([narrow(unwrap(model), {}, {}), cut(model, graph, widths)]))
    return small * table.unpruned_ms / whole


def _limit_of(budget: Budget) -> int:
    return next(limit.target for limit in budget.limits if limit.kind == LATENCY)


def _limited(budget: Budget, target: int) -> Budget:
    limits = tuple(Limit(it.kind, target) if it.kind == LATENCY else it for it in budget.limits)
    return replace(budget, limits=limits)


# one table and one choice for all processes, also after an interruption


def price(
    graph: ChannelGraph,
    spec: object,
    measure: Callable[[], Latency],
    table: Latency | None = None,
    folder: Path | None = None,
) -> ChannelGraph:
    """The graph with a table of latency, if the budget needs one: a given one, the folder's, or a new one kept there.

    The first of several processes measures, the others get its numbers.
    """
    if table is not None:
        return graph.with_latency(table)
    if graph.latency is not None or not limits_latency(spec):
        return graph
    known_limits(spec, graph)  # what cannot be read is refused now

    def find() -> dict[str, Any]:
        if folder is not None and (folder / LATENCY_FILE).exists():
            return Latency.load(folder / LATENCY_FILE).to_json()
        found = measure()
        if folder is not None:
            found.save(folder / LATENCY_FILE)
        return found.to_json()

    found = Latency.from_json(_of_first(find))
    if found.trouble and current().first:
        warnings.warn(found.trouble, LatencyWarning, stacklevel=3)
    return graph.with_latency(found)


def settle(
    found: SearchResult,
    model: nn.Module,
    example: Any,
    measure: Measure | None = None,
    folder: Path | None = None,
) -> tuple[SearchResult, Widths, Outcome]:
    """What `choose` gives; the first of several processes chooses. A choice that is in the folder stays as it is."""
    table = found.graph.latency
    assert table is not None

    def find() -> dict[str, Any]:
        if folder is not None and (folder / CHOICE).exists():
            kept = parse_json(read_bytes(folder / CHOICE, MOST_JSON), folder / CHOICE)
            if isinstance(kept, dict):
                return kept
        result, widths, outcome = choose(found, model, clock_of(table, example, measure))
        kept = {"target": _limit_of(result.budget), "widths": list(widths.values()), "outcome": asdict(outcome)}
        if folder is not None:
            write_files(folder, {CHOICE: json.dumps(kept).encode()})
        return kept

    kept = _of_first(find)
    try:
        budget, widths = _limited(found.budget, kept["target"]), found.graph.widths(kept["widths"])
        outcome = Outcome(**kept["outcome"])
    except (KeyError, TypeError) as error:
        raise FileError(f"{folder}: {CHOICE} is not one of this version ({quote(error)}): remove it.") from None
    if outcome.trouble and current().first:
        warnings.warn(outcome.trouble, LatencyWarning, stacklevel=3)
    return replace(found, budget=budget), widths, outcome


def _of_first(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Plain data that the first process finds, for all of them."""
    world = current()
    data = json.dumps(find()).encode() if world.first else b""
    length = torch.tensor([len(data)])
    share_tensors([length], world)
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if world.first:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    share_tensors([buffer], world)
    plain: dict[str, Any] = json.loads(bytes(buffer.tolist()))
    return plain
