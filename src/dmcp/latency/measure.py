"""Measure networks of many widths, fit a latency table to them, and choose widths by it."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import platform
import re
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
from torch.utils import _pytree as pytree

from dmcp import exporting
from dmcp.batches import device_of, generator
from dmcp.budget import Budget, Limit, known_limits, limits_latency
from dmcp.cutting import cut
from dmcp.errors import BudgetError, DmcpError, FileError, WidthsError
from dmcp.exporting import blaming, turn_times
from dmcp.latency.table import LATENCY, LATENCY_FILE, Latency, Outcome, Timed
from dmcp.modules import batch_of, call_model, check_function, map_leaves, narrow, rebatch, tensors_in, unwrap
from dmcp.progress import each, shown
from dmcp.runtime.distributed import current, gather
from dmcp.runtime.io import MOST_JSON, parse_json, quote, read_bytes, write_files
from dmcp.sampling import between, expected
from dmcp.searching.config import SearchResult, extremes
from dmcp.settings import LatencyConfig, RuntimeKind
from dmcp.tracing.cost import VIEWS, Terms, evaluate, product, total
from dmcp.tracing.coupling import Dims
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.units import FS_PER_MS
from dmcp.widths import Widths

Measure = Callable[[nn.Module], float]  # a network in eval mode -> milliseconds of a forward pass
Call = Callable[[], object]  # one forward pass
Array = NDArray[np.float64]
Key = tuple[str, str, int]  # macs or writes, the kind of layer, its resolution
MACS, WRITES = "macs", "writes"


class LatencyWarning(UserWarning):
    """A latency that is not known well, or that is above what was asked for."""


# the table


@shown
def measure_latency(
    model: nn.Module,
    example: Any,
    graph: ChannelGraph | None = None,
    config: LatencyConfig | None = None,
    *,
    measure: Measure | None = None,
) -> Latency:
    """Measure cut networks of many widths, and fit a table that forecasts the time of any widths.

    measure: your own function, which gets a network in eval mode and returns the milliseconds of a forward pass: it
        may export the network and time it on a phone. It is called once per network. Without it, this machine is
        measured, with as many threads as torch has.
    """
    config, start = config or LatencyConfig(), time.perf_counter()
    check_function("measure", measure, "it gets a network, and returns milliseconds")
    in_onnx = config.runtime == RuntimeKind.ONNX
    if in_onnx:
        _check_onnx(config, measure)
    graph, model = graph or trace(model, example), unwrap(model)
    config = replace(config, device=config.device or ("cpu" if in_onnx else str(device_of(model))))
    clock, rows = Clock(config, torch.get_num_threads(), example, measure), sample_widths(graph, config)
    times = clock.times(_narrow(model, graph, row) for row in each("networks", rows))
    kinds = work(graph)
    terms = fit(kinds, rows, times)
    if times[0] > _FAR * evaluate(terms, rows[0]) / FS_PER_MS:  # the unpruned network, which shares refer to
        times[0] = min(times[0], *clock.times(_narrow(model, graph, row) for row in rows[:1]))
        terms = fit(kinds, rows, times)
    held = [number >= 2 and number % _HELD_OUT == 0 for number in range(len(rows))]
    seen = [number for number, out in enumerate(held) if not out]
    blind = fit(kinds, [rows[number] for number in seen], [times[number] for number in seen])
    networks = tuple(
        Timed(tuple(row), ms, evaluate(blind if out else terms, row) / FS_PER_MS, out)
        for row, ms, out in zip(rows, times, held, strict=True)
    )
    errors = [abs(it.forecast_ms / it.ms - 1) for it in networks if it.held_out]
    return Latency(
        terms=terms,
        fingerprint=graph.fingerprint,
        spaces=tuple(space.name for space in graph.spaces),
        input_shape=graph.input_shape,
        networks=networks,
        median_error=median(errors),
        largest_error=max(errors),
        device=device_name(config.device) if measure is None else _name(measure),
        place=torch.device(config.device).type if measure is None else "",
        batch=config.batch,
        threads=clock.threads,
        dtype=config.dtype,
        torch=torch.__version__,
        seconds=time.perf_counter() - start,
        runtime=config.runtime,
        onnxruntime=exporting.onnxruntime_version() if in_onnx else "",
    )


def sample_widths(graph: ChannelGraph, config: LatencyConfig) -> list[list[int]]:
    """Widths to measure: unpruned, the smallest, then random ones, every other time with all spaces near one ratio."""
    options = between(graph, config.min_channels, config.max_channels, config.align)
    if not options.last.any():
        limits = f"between min_channels and max_channels in multiples of {config.align or 16}"
        raise WidthsError(f"There is nothing to measure: no space can be narrowed {limits}.")
    random = generator(config.seed)
    rows = [graph.full.tensor(), options.widths(torch.zeros_like(options.last))]
    for number in range(config.networks - 2):
        shares = torch.rand(len(options.last), generator=random, dtype=torch.float64)
        if number % 2:  # as those of networks that were chosen for a budget
            middle = torch.rand(1, generator=random, dtype=torch.float64)
            shares = (middle + 0.2 * (shares - 0.5)).clamp(0, 1)
        rows.append(options.widths((shares * options.last).round().long()))
    return [row.tolist() for row in rows]


def _narrow(model: nn.Module, graph: ChannelGraph, row: Sequence[int]) -> nn.Module:
    """As `cut`, without its check by replay: the network is run anyway."""
    widths = graph.widths(row)
    return narrow(model, graph.cuts(widths), graph.attributes(widths))


def work(graph: ChannelGraph) -> dict[Key, Terms]:
    """MACs and numbers written of the eval pass, summed over layers of one kind and resolution.

    Views write nothing.
    """
    first = graph.coupling.passes[0]
    recording, costs, layouts = first.recording, first.costs, first.layouts
    ops = {out: op for op in recording.ops for out in op.outs if out is not None}

    def polynomial(coefficient: int, dims: Dims) -> Terms:
        return product(coefficient, graph.coupling.in_spaces(dims, graph.space_numbers))

    def resolution(value: int) -> int:
        shape = recording.shapes[value]
        return math.prod(shape[2:]) if len(shape) > 3 else 1

    found: dict[Key, list[Terms]] = {}
    for cost in costs:
        groups = ops[cost.out].arguments().get("groups")  # these write as much for far fewer products
        kind = f"grouped {cost.kind}" if isinstance(groups, int) and groups > 1 else cost.kind
        found.setdefault((MACS, kind, resolution(cost.out)), []).append(polynomial(cost.coefficient, cost.dims))
    layers = {cost.out for cost in costs}
    for op in recording.ops:
        out = op.outs[0] if op.outs else None  # what else norms and pools return is small, or not needed
        if out is not None and out not in recording.tensors and not op.func.is_view and op.name not in VIEWS:
            key = (WRITES, "layers" if out in layers else "rest", resolution(out))
            found.setdefault(key, []).append(polynomial(1, layouts[out]))
    return {key: total(parts) for key, parts in found.items()}


# fitting

_HELD_OUT = 5  # every fifth network
_FOLDS = 5
_ANCHOR = 5.0  # weight of the first network, the unpruned one, which shares refer to
_FAR = 1.5  # times its forecast: something else had the machine
_CLOSE, _TURNS = 1e-4, 12  # of iteratively reweighted least squares
_TINY = 1e-10

# ways to group kinds of work; the one with the best forecasts is taken: few networks cannot tell many kinds apart
_GROUPINGS: tuple[Callable[[Key], object], ...] = (
    lambda key: key,
    lambda key: (key[0], key[1] if key[0] == MACS else "", key[2]),
    lambda key: key[:2],
    lambda key: key[0],
)


def fit(kinds: Mapping[Key, Terms], rows: Sequence[Sequence[int]], ms: Sequence[float]) -> Terms:
    """Femtoseconds as a polynomial in the widths: a constant, and a price per unit of each kind of work."""
    times, tries = np.array(ms, dtype=np.float64), list[tuple[float, int, list[Terms], Array]]()
    folds = np.arange(len(times)) % _FOLDS
    for grouping in _GROUPINGS:
        groups: dict[object, list[Terms]] = {}
        for key, terms in kinds.items():
            groups.setdefault(grouping(key), []).append(terms)
        parts: list[Terms] = [{(): 1}, *map(total, groups.values())]
        table = np.array([[float(evaluate(part, row)) for part in parts] for row in rows])  # (N, P)
        unseen = np.zeros(len(times))
        for out in (folds == fold for fold in range(_FOLDS)):
            unseen[out] = table[out] @ least_errors(table[~out], times[~out])
        errors = np.abs(np.log(times / np.maximum(unseen, _TINY * times)))
        tries.append((float(np.median(errors)), len(parts), parts, table))
    _, _, parts, table = min(tries, key=lambda it: it[:2])
    weights = np.ones(len(times))
    weights[0] = _ANCHOR
    summed: dict[tuple[int, ...], Fraction] = collections.defaultdict(Fraction)
    for part, price in zip(parts, least_errors(table, times, weights).tolist(), strict=True):
        for spaces, factor in part.items():
            summed[spaces] += factor * Fraction(price) * FS_PER_MS
    found = {spaces: round(value) for spaces, value in summed.items() if round(value)}
    return found or {(): 0}


def least_errors(table: Array, times: Array, weights: Array | float = 1.0) -> Array:
    """Prices with the least sum of relative errors, which outliers do not bend. (N, P), (N,) -> (P,)

    By iteratively reweighted least squares.
    """
    scale = weights / times
    for _ in range(_TURNS):
        prices = nonnegative(table * scale[:, None], times * scale)
        scale = weights / (times * np.sqrt(np.maximum(np.abs(table @ prices / times - 1), _CLOSE)))
    return prices


def nonnegative(table: Array, wanted: Array) -> Array:
    """Non-negative least squares by active sets (Lawson and Hanson, 1974). (N, P), (N,) -> (P,)"""
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    columns, count = table / scale, table.shape[1]
    found, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = columns.T @ (wanted - columns @ found)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= _TINY:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
            below = free & (trial <= _TINY)
            if not below.any():
                break
            steps = found[below] / np.maximum(found[below] - trial[below], _TINY)
            found = found + min(1.0, float(steps.min())) * (trial - found)
            free &= found > _TINY
            found[~free] = 0.0
        found = trial
    result: Array = found / scale
    return result


# timing


@dataclass(frozen=True)
class Clock:
    """What times networks: a user's function, or this machine."""

    config: LatencyConfig  # with a device
    threads: int
    example: Any
    measure: Measure | None = None

    def times(self, nets: Iterator[nn.Module]) -> list[float]:
        """Milliseconds of a forward pass of each network; they must be copies, which are moved."""
        if self.measure is not None:
            return [_checked(self.measure(net.eval()), self.measure) for net in nets]
        device, dtype = torch.device(self.config.device), getattr(torch, self.config.dtype)
        example = self.example if batch_of(self.example) is None else rebatch(self.example, self.config.batch)
        place = f"{device} with a batch of {self.config.batch} in {self.config.dtype}"
        in_onnx = self.config.runtime == RuntimeKind.ONNX
        with blaming(f"The latency cannot be measured on {place}", DmcpError), torch.inference_mode(not in_onnx):
            example = pytree.tree_map_only(
                Tensor, lambda it: it.to(device, dtype if it.is_floating_point() else it.dtype), example
            )
            moved = (net.to(device=device, dtype=dtype).eval() for net in nets)
            calls = open_sessions(moved, example, self.threads) if in_onnx else None
            calls = calls or [functools.partial(call_model, net, example) for net in moved]
            return turn_times(calls, device, self.threads)


def _name(measure: Measure) -> str:
    return getattr(measure, "__name__", type(measure).__name__)


def _checked(ms: Any, measure: Measure) -> float:
    """Milliseconds that a user's function returned."""
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(ms, bool | str) and 0 < float(ms) < math.inf:
            return float(ms)
    raise BudgetError(f"{_name(measure)} must return milliseconds, a number above 0, not {ms!r}.")


def device_name(device: str) -> str:
    """The name of a GPU, the model of a CPU."""
    kind, facts = torch.device(device).type, Path("/proc/cpuinfo")
    if kind != "cpu":
        return torch.cuda.get_device_name(torch.device(device)) if kind == "cuda" else kind
    text = facts.read_text(errors="replace") if facts.exists() else ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "a CPU"


def clock_of(table: Latency, example: Any, measure: Measure | None = None) -> Clock | None:
    """What measures as the table was measured; None if this machine cannot."""
    here, in_onnx = "", table.runtime == RuntimeKind.ONNX
    with contextlib.suppress(RuntimeError, AssertionError):  # no such device
        here = device_name(table.place) if table.place else ""
    if measure is None and (here != table.device or (in_onnx and exporting.missing_packages())):
        return None
    config = LatencyConfig(batch=table.batch, device=table.place, dtype=table.dtype, runtime=table.runtime)  # type: ignore[arg-type]
    return Clock(config, table.threads, example, measure)


# onnxruntime


def _check_onnx(config: LatencyConfig, measure: Measure | None) -> None:
    if measure is not None:
        raise BudgetError("Networks are timed by your own function, or in onnxruntime: leave one of the two out.")
    if torch.device(config.device or "cpu").type != "cpu" or config.dtype != "float32":
        raise DmcpError("In onnxruntime latency is measured on the CPU in float32 only: measure it in torch.")
    if missing := exporting.missing_packages():
        raise DmcpError(f"{missing}, or measure in torch.")


@torch.no_grad()
def open_sessions(nets: Iterator[nn.Module], example: Any, threads: int) -> list[Call]:
    """A forward pass in onnxruntime for each network, in eval mode and all of one architecture.

    The first one is compared with its network. torch's older exporter is tried first: for 40 networks it takes minutes
    less than the one that `export` uses.
    """
    first = next(nets)
    exporting.record(first, example)  # refuses what `export` could not write

    def write_new(net: nn.Module, example: Any, path: Path) -> None:
        exporting.write_onnx(*exporting.record(net, example), path)

    try:
        write = write_legacy
        call = _open_session(first, example, threads, write, compare=True)
    except DmcpError:
        write = write_new
        call = _open_session(first, example, threads, write, compare=True)
    return [call, *(_open_session(net, example, threads, write) for net in nets)]


def _open_session(
    net: nn.Module, example: Any, threads: int, write: Callable[[nn.Module, Any, Path], None], compare: bool = False
) -> Call:
    with (
        blaming("This network cannot be run in onnxruntime", DmcpError),
        tempfile.TemporaryDirectory(prefix="dmcp-") as folder,
    ):
        write(net, example, Path(folder) / "net.onnx")
        run = exporting.open_file(Path(folder) / "net.onnx", threads).run
        if compare:
            gap = exporting.largest_gap(net, run, [exporting.random_like(example, len(tensors_in(example)[0]))])
            if not gap <= exporting.TOLERANCE:
                raise DmcpError(f"In onnxruntime this is not the same network: its outputs differ by {gap:.1e}.")
    return functools.partial(run, example)


def write_legacy(net: nn.Module, example: Any, path: Path) -> None:
    """The file of torch's older exporter, for this batch size: with a free one it would compute shapes in each pass."""
    with exporting.silence():
        torch.onnx.export(_Flat(net, example).eval(), tuple(tensors_in(example)), path, dynamo=False)


class _Flat(nn.Module):
    """A network that takes and returns a flat list of tensors."""

    def __init__(self, net: nn.Module, example: Any) -> None:
        super().__init__()
        self.net, self.example = net, example

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        example = map_leaves(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, self.example)
        return tuple(tensors_in(call_model(self.net, example)))


# choosing widths by it

CHOICE_FILE = "choice.json"  # beside the checkpoints of a search
_TRIES = 3  # further choices, where a network takes another time than its forecast
ENOUGH = 0.95  # of the limit: a network that takes less is widened


def choose(
    found: SearchResult, model: nn.Module, clock: Clock | None, tries: int = _TRIES
) -> tuple[SearchResult, Widths, Outcome]:
    """Expected widths whose network, cut and measured, is inside the latency limit; the search with the limit used.

    Where the network is too slow, or far faster than allowed, the limit is scaled by as much and widths are chosen
    again from the same alphas. The slowest that is fast enough is taken; if there is none, the fastest.
    """
    graph, table = found.graph, Latency.of(found.graph)
    assert table is not None
    asked = now = _target(found.budget)
    low, high = (graph.cost(LATENCY, it) for it in extremes(graph, found.sizes))
    best: tuple[tuple[bool, float], SearchResult, Widths, Outcome] | None = None
    for number in range(tries + 1):
        result = found if now == asked else replace(found, budget=_limited(found.budget, now))
        widths = expected(result)
        spent = graph.cost(LATENCY, widths)
        ms = None
        if clock is not None:  # beside the unpruned network: a machine that is busy slows both
            whole, small = clock.times(iter([narrow(unwrap(model), {}, {}), cut(model, graph, widths)]))
            ms = small * table.unpruned_ms / whole
        forecast: dict[str, Any] = {
            "predicted_ms": spent / FS_PER_MS,
            "unpruned_ms": table.unpruned_ms,
            "how": table.how,
        }
        outcome = Outcome(asked_ms=asked / FS_PER_MS, measured_ms=ms, again=number, **forecast)
        rank = outcome.held, (ms or 0.0) * (1 if outcome.held else -1)
        same = best is not None and best[2] == widths
        best = (rank, result, widths, outcome) if best is None or rank >= best[0] else best
        wider = ms is not None and ms < ENOUGH * outcome.asked_ms
        if ms is None or same or (outcome.held and not wider) or (wider and spent < ENOUGH * now):
            break  # the last: another limit keeps it so small
        target = math.floor(spent * outcome.asked_ms / ms)
        if target < low or min(target, high) == now:
            break
        now = min(target, high)
    assert best is not None
    _, result, widths, taken = best
    return result, widths, replace(taken, again=number)


def _target(budget: Budget) -> int:
    return next(limit.target for limit in budget.limits if limit.kind == LATENCY)


def _limited(budget: Budget, target: int) -> Budget:
    limits = tuple(Limit(it.kind, target) if it.kind == LATENCY else it for it in budget.limits)
    return replace(budget, limits=limits)


# one table and one choice for all ranks, also after an interruption


def attach_latency(
    graph: ChannelGraph,
    budget: object,
    measure: Callable[[], Latency],
    table: Latency | None = None,
    folder: Path | None = None,
) -> ChannelGraph:
    """The graph with a latency table if the budget needs one: the given one, the folder's, or a new one saved there."""
    if table is not None:
        return table.attach(graph)
    if LATENCY in graph.extra or not limits_latency(budget):
        return graph
    known_limits(budget, graph)  # what cannot be read is refused before anything is measured
    found = Latency.from_json(_once(folder and folder / LATENCY_FILE, lambda: measure().to_json()), folder)
    if found.warning and current().first:
        warnings.warn(found.warning, LatencyWarning, stacklevel=3)
    return found.attach(graph)


def choose_once(
    found: SearchResult, model: nn.Module, example: Any, measure: Measure | None = None, folder: Path | None = None
) -> tuple[SearchResult, Widths, Outcome]:
    """What `choose` gives, on rank 0 for all; a choice that is in the folder is kept."""
    table = Latency.of(found.graph)
    assert table is not None

    def find() -> dict[str, Any]:
        result, widths, outcome = choose(found, model, clock_of(table, example, measure))
        return {"target": _target(result.budget), "widths": list(widths.values()), "outcome": asdict(outcome)}

    saved = _once(folder and folder / CHOICE_FILE, find)
    try:
        budget, widths = _limited(found.budget, saved["target"]), found.graph.widths(saved["widths"])
        outcome = Outcome(**saved["outcome"])
    except (KeyError, TypeError) as error:
        raise FileError(f"{folder}: {CHOICE_FILE} is not one of this version ({quote(error)}): remove it.") from None
    if outcome.warning and current().first:
        warnings.warn(outcome.warning, LatencyWarning, stacklevel=3)
    return replace(found, budget=budget), widths, outcome


def _once(path: Path | None, find: Callable[[], dict[str, Any]]) -> Any:
    """Plain data for all ranks: what is in the file, or what rank 0 finds and writes there."""
    text = b""
    if current().first and path is not None and path.exists():
        text = read_bytes(path, MOST_JSON)
    elif current().first:
        text = json.dumps(find(), indent=1).encode()
        if path is not None:
            write_files(path.parent, {path.name: text})
    return parse_json(gather(text, current())[0], path)
