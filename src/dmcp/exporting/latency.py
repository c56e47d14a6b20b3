"""Latency: networks of many widths are measured, a table forecasts the time of any, and widths are chosen by it."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp.arguments import checked
from dmcp.budgets import LATENCY, Budget, Limit, limits_latency
from dmcp.errors import BudgetError, DmcpError, FileError, WidthsError
from dmcp.exporting import export as exporting
from dmcp.exporting.export import blaming, turn_times
from dmcp.runtime.batches import device_of, generator
from dmcp.runtime.distributed import current, gather
from dmcp.runtime.io import MOST_JSON, from_plain, parse_json, quote, read_bytes, record_hash, write_files
from dmcp.runtime.progress import each, shown
from dmcp.searching.sampling import between
from dmcp.settings import FloatType, LatencyConfig, RuntimeKind
from dmcp.tracing.cost import VIEWS, Terms, evaluate, product, total
from dmcp.tracing.coupling import Dims
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import batch_of, call_model, map_leaves, narrow, rebatch, tensors_in, unwrap
from dmcp.tracing.trace import trace
from dmcp.tracing.widths import Widths, tuples
from dmcp.units import FS_PER_MS, show_ms

Measure = Callable[[nn.Module], float]  # a network in eval mode -> milliseconds of a forward pass
Array = NDArray[np.float64]
Picked = TypeVar("Picked")
LATENCY_FILE = "latency.json"  # the table's name in a run
_FORMAT = "torch-dmcp latency 4"  # 3: the unpruned network is forecast as measured; 4: with a checksum
_CHECKSUM = "digest"  # of all else in the file
_POOR = 0.15  # median error above which a warning is given


# the table


@dataclass(frozen=True)
class Timed:
    """One network that was measured."""

    widths: tuple[int, ...]  # in the order of the graph's spaces
    ms: float
    forecast_ms: float  # by the table; of a held-out network, by a fit to the others
    held_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Time of a forward pass as a polynomial in the widths, and the measurements it was fitted to."""

    terms: Mapping[tuple[int, ...], int]  # spaces that are multiplied -> femtoseconds
    fingerprint: str  # of the unpruned network
    spaces: tuple[str, ...]  # names, in order
    input_shape: Any  # of one sample
    networks: tuple[Timed, ...]  # the unpruned one first, then the smallest
    median_error: float  # of the forecasts of held-out networks, relative
    largest_error: float
    device: str  # its name; the name of the function, where a user's function measured
    place: str  # cpu, cuda: as torch names it; empty where a user's function measured
    batch: int
    threads: int
    dtype: FloatType
    seconds: float  # that measuring took
    runtime: RuntimeKind

    @checked
    def attach(self, graph: ChannelGraph) -> ChannelGraph:
        """The graph with this latency among its costs, so that budgets can limit it: "8ms", "latency:50%"."""
        names = tuple(space.name for space in graph.spaces)
        if (self.fingerprint, self.spaces, self.input_shape) != (graph.fingerprint, names, graph.input_shape):
            inputs = f"it was measured at {self.input_shape}, this input is {graph.input_shape}"
            raise WidthsError(f"This latency table is for another network, input or ignored layers ({inputs}).")
        return replace(graph, extra={**graph.extra, LATENCY: self})

    @staticmethod
    def of(graph: ChannelGraph) -> Latency | None:
        """The table that is attached to a graph."""
        found = graph.extra.get(LATENCY)
        return found if isinstance(found, Latency) else None

    def latency_ms(self, widths: Mapping[str, int]) -> float:
        """Forecast for some widths."""
        return evaluate(dict(self.terms), [widths[name] for name in self.spaces]) / FS_PER_MS

    @property
    def unpruned_ms(self) -> float:
        """Measured time of the unpruned network, which is the table's forecast of it, too: see `least_errors`."""
        return self.networks[0].ms

    @property
    def digest(self) -> str:
        """A hash of all forecasts."""
        return hashlib.sha256(json.dumps(sorted(self.terms.items())).encode()).hexdigest()[:16]

    @property
    def how(self) -> str:
        """What was measured, in words."""
        if not self.place:
            return f"by {self.device}"
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}, " if self.place == "cpu" else ""
        runtime = "in onnxruntime " if self.runtime == RuntimeKind.ONNX else ""
        return f"{runtime}on {self.device} (batch {self.batch}, {threads}{self.dtype})"

    @property
    def summary(self) -> str:
        """Device, range and error in a sentence."""
        held = sum(it.held_out for it in self.networks)
        return (
            f"Latency {self.how}: the unpruned network takes {show_ms(self.unpruned_ms)}, the smallest "
            f"{show_ms(self.networks[1].ms)}; forecasts of {held} held-out networks are off by "
            f"{self.median_error:.1%} (median), {self.largest_error:.1%} at most."
        )

    @property
    def warning(self) -> str:
        """A sentence about forecasts that cannot be relied on; empty if they can."""
        off = f"Forecasts of latency are off by {self.median_error:.0%} (median of held-out networks)"
        return f"{off}: the machine was busy; measure on an idle one." if self.median_error > _POOR else ""

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into the same value."""
        terms = [[list(spaces), factor] for spaces, factor in self.terms.items()]
        record = {"format": _FORMAT} | asdict(self) | {"terms": terms}
        return record | {_CHECKSUM: record_hash(record)}

    @staticmethod
    def from_json(data: Any, name: object = "this table") -> Latency:
        """Read what `to_json` wrote; anything else is refused."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            needs = f"dmcp latency --out {LATENCY_FILE} writes one"
            raise FileError(f"{name}: not a latency table in the format {_FORMAT!r}: {needs}.")
        if data.get(_CHECKSUM) != record_hash(data):
            raise FileError(f"{name}: damaged, or changed since it was measured: measure the latency again.")
        try:
            plain = {key: value for key, value in data.items() if key not in ("format", _CHECKSUM)}
            plain["terms"] = {tuple(spaces): factor for spaces, factor in data["terms"]}
            plain["input_shape"] = tuples(data["input_shape"])
            return from_plain(Latency, plain)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{name}: not a latency table of this version: {quote(error)}.") from None

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file."""
        write_files(Path(path).parent, {Path(path).name: json.dumps(self.to_json(), indent=1).encode()})

    @staticmethod
    @checked
    def load(path: str | os.PathLike[str]) -> Latency:
        """Read such a file."""
        return Latency.from_json(parse_json(read_bytes(Path(path), MOST_JSON), path), path)


@checked
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
    in_onnx = config.runtime == RuntimeKind.ONNX and measure is None
    if in_onnx and (torch.device(config.device or "cpu").type != "cpu" or config.dtype != FloatType.FLOAT32):
        raise DmcpError("In onnxruntime latency is measured on the CPU in float32 only: measure it in torch.")
    if in_onnx and (missing := exporting.missing_packages()):
        raise DmcpError(f"{missing}, or measure in torch.")
    graph, model = graph or trace(model, example), unwrap(model)
    graph.check_architecture(model)
    config = replace(config, device=config.device or ("cpu" if in_onnx else str(device_of(model))))
    clock, rows = Clock(config, torch.get_num_threads(), example, measure), sample_widths(graph, config)
    times = clock.times(_narrow(model, graph, row) for row in each("networks", rows))
    kinds = work(graph)
    held = [number >= 2 and number % _HELD_OUT == 0 for number in range(len(rows))]
    seen = [number for number, out in enumerate(held) if not out]
    terms, blind = fit(kinds, rows, times), fit(kinds, [rows[it] for it in seen], [times[it] for it in seen])
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
        device=device_name(config.device) if measure is None else getattr(measure, "__name__", type(measure).__name__),
        place=torch.device(config.device).type if measure is None else "",
        batch=config.batch,
        threads=clock.threads,
        dtype=config.dtype,
        seconds=time.perf_counter() - start,
        runtime=config.runtime,
    )


def sample_widths(graph: ChannelGraph, config: LatencyConfig) -> list[list[int]]:
    """Widths to measure: unpruned, the smallest, then random ones, every other time with all spaces near one ratio."""
    options = between(graph, config.min_channels, config.max_channels, config.align)
    if not options.last.any():
        raise WidthsError("There is nothing to measure: no space can be narrowed within min_channels and max_channels.")
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


# fitting

LAYERS, OTHERS = "written by layers", "written by other ops"
_HELD_OUT = 5  # every fifth network
_CLOSE, _TURNS = 1e-4, 12  # of iteratively reweighted least squares
_FIRM = 1e4  # weight of the unpruned network there


def work(graph: ChannelGraph) -> dict[tuple[str, int], Terms]:
    """MACs of the eval pass, and numbers written, by kind and resolution of the layer; views write nothing."""
    first = graph.coupling.passes[0]
    recording, costs, layouts = first.recording, first.costs, first.layouts
    ops = {out: op for op in recording.ops for out in op.outs if out is not None}
    found: dict[tuple[str, int], list[Terms]] = {}

    def add(kind: str, value: int, coefficient: int, dims: Dims) -> None:
        shape = recording.shapes[value]
        terms = product(coefficient, graph.coupling.in_spaces(dims, graph.space_numbers))
        found.setdefault((kind, math.prod(shape[2:]) if len(shape) > 3 else 1), []).append(terms)

    for cost in costs:
        groups = ops[cost.out].arguments().get("groups")  # these write as much for far fewer products
        kind = f"grouped {cost.kind}" if isinstance(groups, int) and groups > 1 else cost.kind
        add(kind, cost.out, cost.coefficient, cost.dims)
    layers = {cost.out for cost in costs}
    for op in recording.ops:
        out = op.outs[0] if op.outs else None  # what else norms and pools return is small, or not needed
        if out is not None and out not in recording.tensors and not op.func.is_view and op.name not in VIEWS:
            add(LAYERS if out in layers else OTHERS, out, 1, layouts[out])
    return {key: total(parts) for key, parts in found.items()}


def fit(kinds: Mapping[tuple[str, int], Terms], rows: Sequence[Sequence[int]], ms: Sequence[float]) -> Terms:
    """Femtoseconds as a polynomial in the widths: a constant, and a price per unit of each kind of work."""
    parts: list[Terms] = [{(): 1}, *kinds.values()]
    table = np.array([[float(evaluate(part, row)) for part in parts] for row in rows])  # (N, P)
    summed: dict[tuple[int, ...], float] = collections.defaultdict(float)
    for part, price in zip(parts, least_errors(table, np.array(ms)).tolist(), strict=True):
        for spaces, factor in part.items():
            summed[spaces] += factor * price * FS_PER_MS
    return {spaces: round(value) for spaces, value in summed.items()}


def least_errors(table: Array, times: Array) -> Array:
    """Prices with the least sum of relative errors, which outliers do not bend. (N, P), (N,) -> (P,)

    The first network, the unpruned one, has no error: shares of its time are then the same measured and forecast. One
    factor for all forecasts would do that too, but spoil those of narrow networks.
    """
    scale = 1 / times
    for _ in range(_TURNS):
        scale[0] = _FIRM / times[0]
        prices = nonnegative(table * scale[:, None], times * scale)
        scale = 1 / (times * np.sqrt(np.maximum(np.abs(table @ prices / times - 1), _CLOSE)))
    return prices


def nonnegative(table: Array, wanted: Array) -> Array:
    """Least squares without the columns that would have a negative price. (N, P), (N,) -> (P,)"""
    scale = np.linalg.norm(table, axis=0)
    free = scale > 0
    while True:
        found = np.zeros(len(scale))
        found[free] = np.linalg.lstsq(table[:, free] / scale[free], wanted, rcond=None)[0] / scale[free]
        if (found >= 0).all():
            return found
        free[np.argmin(found * scale)] = False


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
            measured = [self.measure(net.eval()) for net in nets]
            try:
                times = [float(ms) for ms in measured]
            except (TypeError, ValueError, RuntimeError):
                times = []
            if not times or not all(0 < ms < math.inf for ms in times):
                kinds = times or type(measured[0]).__name__
                raise BudgetError(f"The function that measures must return milliseconds above 0, not {kinds}.")
            return times
        device, dtype = torch.device(self.config.device), getattr(torch, self.config.dtype)
        example = self.example if batch_of(self.example) is None else rebatch(self.example, self.config.batch)
        place = f"{device} with a batch of {self.config.batch} in {self.config.dtype}"
        in_onnx = self.config.runtime == RuntimeKind.ONNX
        with blaming(f"The latency cannot be measured on {place}", DmcpError), torch.inference_mode(not in_onnx):
            example = tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), example)
            moved = (net.to(device=device, dtype=dtype).eval() for net in nets)
            calls = open_sessions(moved, example, self.threads) if in_onnx else None
            calls = calls or [functools.partial(call_model, net, example) for net in moved]
            return turn_times(calls, device, self.threads)


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
    here = ""
    with contextlib.suppress(RuntimeError, AssertionError):  # no such device
        here = device_name(table.place) if table.place else ""
    missing = table.runtime == RuntimeKind.ONNX and exporting.missing_packages()
    if measure is None and (here != table.device or missing):
        return None
    config = LatencyConfig(batch=table.batch, device=table.place, dtype=table.dtype, runtime=table.runtime)
    return Clock(config, table.threads, example, measure)


@torch.no_grad()
def open_sessions(nets: Iterator[nn.Module], example: Any, threads: int) -> list[Callable[[], object]]:
    """A forward pass in onnxruntime for each network, in eval mode.

    By torch's older exporter: for 40 networks it takes minutes less than the one that `export` uses.
    """
    calls = list[Callable[[], object]]()
    for net in nets:
        with tempfile.TemporaryDirectory(prefix="dmcp-") as folder:
            path = Path(folder) / "net.onnx"
            with exporting.silence():  # the batch size is fixed: a free one costs time
                torch.onnx.export(_Flat(net, example).eval(), tuple(tensors_in(example)), path, dynamo=False)
            calls.append(functools.partial(exporting.open_file(path, threads).run, example))
    return calls


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

CHOICE_FILE = "choice-{}.json"  # times of what was picked, beside the checkpoints of a search
_TRIES = 3  # further choices, where a network is slower than its forecast


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a latency limit ended: milliseconds of a forward pass."""

    asked_ms: float
    predicted_ms: float
    unpruned_ms: float
    how: str  # device and batch, in words
    measured_ms: float | None = None  # None: not on this machine
    again: int = 0  # how often widths were chosen again, because the network was too slow

    @property
    def held(self) -> bool:
        """Whether the network is fast enough, as measured, or else as predicted."""
        return (self.predicted_ms if self.measured_ms is None else self.measured_ms) <= self.asked_ms

    @property
    def text(self) -> str:
        """In a sentence."""
        measured = "not measured" if self.measured_ms is None else f"measured {show_ms(self.measured_ms)}"
        again = f", chosen again {self.again}x" if self.again else ""
        asked, predicted, unpruned = map(show_ms, (self.asked_ms, self.predicted_ms, self.unpruned_ms))
        times = f"asked {asked}, predicted {predicted}, {measured}{again}; the unpruned network takes {unpruned}"
        return f"latency {self.how}: {times}"

    @property
    def warning(self) -> str:
        """A sentence about a limit that is exceeded, or was not measured; empty otherwise."""
        if self.measured_ms is None:
            forecast = f"{show_ms(self.predicted_ms)} is a forecast"
            return f"The latency was not measured, {forecast}: the table is {self.how}, which is not here."
        takes = f"The network takes {show_ms(self.measured_ms)}, more than the {show_ms(self.asked_ms)} asked for"
        return "" if self.held else f"{takes}: ask for less, or measure on an idle machine."


def choose(
    pick: Callable[[Budget], tuple[Picked, Widths, nn.Module]],
    budget: Budget,
    graph: ChannelGraph,
    lowest: int,
    model: nn.Module,
    clock: Clock | None,
    folder: Path | None = None,
) -> tuple[Picked, Outcome]:
    """What is picked for the budget, where its cut network, once measured, is inside the latency limit.

    Where that is too slow, the limit is lowered by as much, down to `lowest`, and it is picked again. Rank 0 measures
    for all, once: times that are in the folder are kept.
    """
    table = Latency.of(graph)
    assert table is not None
    asked = target = next(limit.target for limit in budget.limits if limit.kind == LATENCY)
    for again in range(_TRIES + 1):
        limits = tuple(Limit(it.kind, target) if it.kind == LATENCY else it for it in budget.limits)
        picked, widths, small = pick(replace(budget, limits=limits))
        beside, predicted = functools.partial(_time_beside, clock, small, model), graph.cost(LATENCY, widths)
        share = _once(folder and folder / CHOICE_FILE.format(again), beside)["share"]
        outcome = Outcome(
            asked_ms=asked / FS_PER_MS,
            predicted_ms=predicted / FS_PER_MS,
            unpruned_ms=table.unpruned_ms,
            how=table.how,
            measured_ms=None if share is None else share * table.unpruned_ms,
            again=again,
        )
        if outcome.measured_ms is None or outcome.held or target == lowest:
            break
        target = max(math.floor(min(target, predicted) * outcome.asked_ms / outcome.measured_ms), lowest)
    if outcome.warning and current().first:
        warnings.warn(outcome.warning, stacklevel=3)
    return picked, outcome


def _time_beside(clock: Clock | None, small: nn.Module, model: nn.Module) -> dict[str, float | None]:
    """A network's share of the time of the unpruned one, measured beside it: a machine that is busy slows both."""
    if clock is None:
        return {"share": None}
    whole, ms = clock.times(iter([narrow(unwrap(model), {}, {}), small]))
    return {"share": ms / whole}


# one table and the same times for all ranks, also after an interruption


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
    found = Latency.from_json(_once(folder and folder / LATENCY_FILE, lambda: measure().to_json()), folder)
    if found.warning and current().first:
        warnings.warn(found.warning, stacklevel=3)
    return found.attach(graph)


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
