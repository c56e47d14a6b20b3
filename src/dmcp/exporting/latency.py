"""Latency tables: networks of many widths are measured, and a fit forecasts the time of any widths."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dmcp.arguments import checked
from dmcp.budgets import LATENCY
from dmcp.errors import DmcpError, FileError, WidthsError
from dmcp.exporting.export import missing_packages
from dmcp.exporting.timing import Measure, Timer, device_name, resolve_mode
from dmcp.runtime.batches import device_of, generator
from dmcp.runtime.io import MOST_JSON, from_plain, parse_json, quote, read_bytes, record_hash, write_files
from dmcp.runtime.progress import each, shown
from dmcp.searching.bounds import allowed_widths
from dmcp.settings import FloatType, LatencyConfig, LatencyMode, RuntimeKind
from dmcp.tracing.cost import WIDTH, Step, Terms, evaluate, is_free, product, total, variables
from dmcp.tracing.coupling import Dims
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.layout import Atom, Layout, Segment, atoms_of, fixed
from dmcp.tracing.modules import narrow, unwrap
from dmcp.tracing.trace import trace
from dmcp.tracing.widths import ChannelSpace, tuples
from dmcp.units import FS_PER_MS, show_ms

Array = NDArray[np.float64]
Picked = TypeVar("Picked")
LATENCY_FILE = "latency.json"  # the table's name in a run
_FORMAT = "torch-dmcp latency 6"  # 5: with the mode and the memory format; 6: with steps
_CHECKSUM = "digest"  # of all else in the file
# Of the multiples that widths get where `align` is left out:
_ON_GPUS = 32  # as in HALP (Shen et al. 2022)
_IN_STREAMS = 64  # where several layers write the same channels
_MATTERS = 0.1  # share of the time that is lost at other widths, above which all layers get the multiple
_RAISES = 0.1  # share of the time by which a multiple may raise that of the smallest widths, or half of it is taken
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
    """Time of a forward pass as a polynomial in the widths and steps, and the measurements it was fitted to."""

    terms: Mapping[tuple[int, ...], int]  # spaces that are multiplied, and steps of them -> femtoseconds
    steps: tuple[Step, ...]  # functions of the widths in the terms, as Polynomial numbers them
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
    mode: LatencyMode  # how torch ran the networks
    channels_last: bool
    seconds: float  # that measuring took
    runtime: RuntimeKind

    @checked
    def attach(self, graph: ChannelGraph) -> ChannelGraph:
        """Return the graph with this latency among its costs, so that budgets can limit it: "8ms", "latency:50%".

        Where `align` is left out, widths are then multiples that suit the device of the table.
        """
        names = tuple(space.name for space in graph.spaces)
        if (self.fingerprint, self.spaces, self.input_shape) != (graph.fingerprint, names, graph.input_shape):
            raise WidthsError(
                "This latency table is for another network, input or ignored layers "
                f"(it was measured at {self.input_shape}, this input is {graph.input_shape})."
            )
        spaces = tuple(replace(space, multiple=self.multiple_of(space), block=self.block) for space in graph.spaces)
        return replace(graph, spaces=spaces, extra={**graph.extra, LATENCY: self})

    def multiple_of(self, space: ChannelSpace) -> int:
        """Multiple of channels for a wide layer: as measured, or what is usual for the device."""
        padded = [step.block for step in self.steps if step.padded]
        default = ChannelSpace.multiple
        if self.place == "cuda":
            default = _IN_STREAMS if len(space.writers) > 1 else _ON_GPUS
        return max([default, self.block, *padded])

    @functools.cached_property
    def block(self) -> int:
        """Multiple that all widths need, since the device is slow at others; 1 if it is not, or only a little.

        It leaves room for small budgets: it is halved where its smallest widths take much longer than those measured.
        """
        block = self._fast_block()
        smallest = self.networks[1].widths
        allowed_ms = self._fit.ms(smallest) + _RAISES * self._fit.ms(self.networks[0].widths)
        while block > 1 and self._fit.ms(self._in_blocks(smallest, block)) > allowed_ms:
            block //= 2
        return block

    def _in_blocks(self, widths: Sequence[int], block: int) -> list[int]:
        """The next larger widths that are multiples of a block, as far as the spaces are wide enough for them."""
        rounded: list[int] = []
        for width, size in zip(widths, self.networks[0].widths, strict=True):
            step = ChannelSpace("", size, multiple=1, block=block).step(None)
            rounded.append(min(size, -(-width // step) * step))
        return rounded

    def _fast_block(self) -> int:
        """Multiple at which the device is clearly faster than at other widths; 1 if there is none."""
        slow = [step for step in self.steps if not step.padded]
        if not slow:
            return 1
        step = slow[0]

        # The terms of this step. Variables are numbered: all spaces for the width itself, then for each step.
        count = len(self.spaces)
        number = 1 + self.steps.index(step)
        terms = {}
        for term, factors in self.terms.items():
            if any(variable // count == number for variable in term):
                terms[term] = factors

        # The share of the time that is lost at widths that are no multiple.
        lost = Fit(terms, self.steps)
        shares = [lost.ms(network.widths) / self._fit.ms(network.widths) for network in self.networks]
        return step.block if median(shares) > _MATTERS else 1

    @property
    def multiples(self) -> str:
        """Which multiples suit the device, in words; empty if they are the usual ones."""
        multiples = sorted({self.multiple_of(ChannelSpace("", 1, writers)) for writers in (("",), ("", ""))})
        if multiples == [ChannelSpace.multiple] and self.block == 1:
            return ""
        if self.block == max(multiples):
            return f"multiples of {self.block} in all but the narrowest layers: others are slow"
        words = f"multiples of {' or '.join(map(str, multiples))} in wide layers"
        if self.block > 1:
            words += f", and of {self.block} in all but the narrowest: others are slow"
        return words

    @staticmethod
    def of(graph: ChannelGraph) -> Latency | None:
        """Return the table that is attached to a graph."""
        table = graph.extra.get(LATENCY)
        return table if isinstance(table, Latency) else None

    def latency_ms(self, widths: Mapping[str, int]) -> float:
        """Forecast the time for some widths."""
        return self._fit.ms([widths[name] for name in self.spaces])

    @property
    def _fit(self) -> Fit:
        return Fit(dict(self.terms), self.steps)

    @property
    def unpruned_ms(self) -> float:
        """Measured time of the unpruned network, which is the table's forecast of it, too: see `least_errors`."""
        return self.networks[0].ms

    @property
    def digest(self) -> str:
        """Hash of all forecasts."""
        return hashlib.sha256(json.dumps([self.steps, sorted(self.terms.items())]).encode()).hexdigest()[:16]

    @property
    def how(self) -> str:
        """What was measured, in words."""
        if not self.place:
            return f"by {self.device}"
        details = [f"batch {self.batch}", self.dtype]
        if self.place == "cpu":
            details.insert(1, "1 thread" if self.threads == 1 else f"{self.threads} threads")
        if self.channels_last:
            details.append("channels last")
        if self.mode is not LatencyMode.EAGER:
            details.append(self.mode)
        runtime = "in onnxruntime " if self.runtime == RuntimeKind.ONNX else ""
        return f"{runtime}on {self.device} ({', '.join(details)})"

    @property
    def summary(self) -> str:
        """Device, range and error in a sentence."""
        held_out = sum(network.held_out for network in self.networks)
        return (
            f"Latency {self.how}: the unpruned network takes {show_ms(self.unpruned_ms)}, the smallest "
            f"{show_ms(self.networks[1].ms)}; predictions for {held_out} held-out networks are off by "
            f"{self.median_error:.1%} (median), {self.largest_error:.1%} (largest)."
            + (f" Widths: {self.multiples}." if self.multiples else "")
        )

    @property
    def warning(self) -> str:
        """A sentence about predictions that are not reliable; empty if they are."""
        if self.median_error <= _POOR:
            return ""
        return (
            f"Predictions of latency are off by {self.median_error:.0%} (median of held-out networks): "
            "the machine was busy. Measure on an idle one."
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` turns back into the same value."""
        terms = [[list(spaces), factor] for spaces, factor in self.terms.items()]
        record = {"format": _FORMAT} | asdict(self) | {"terms": terms}
        return record | {_CHECKSUM: record_hash(record)}

    @staticmethod
    def from_json(data: Any, name: object = "this table") -> Latency:
        """Read what `to_json` wrote; anything else is refused."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            writer = f"dmcp latency --out {LATENCY_FILE} writes one"
            raise FileError(f"{name}: not a latency table in the format {_FORMAT!r}: {writer}.")
        if data.get(_CHECKSUM) != record_hash(data):
            raise FileError(f"{name}: damaged, or changed since it was measured: measure the latency again.")
        try:
            fields = {key: value for key, value in data.items() if key not in ("format", _CHECKSUM)}
            fields["terms"] = {tuple(spaces): factor for spaces, factor in data["terms"]}
            fields["steps"] = tuple(Step(*step) for step in data["steps"])
            fields["input_shape"] = tuples(data["input_shape"])
            return from_plain(Latency, fields)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{name}: not a latency table of this version: {quote(error)}.") from None

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a JSON file."""
        path = Path(path)
        write_files(path.parent, {path.name: json.dumps(self.to_json(), indent=1).encode()})

    @staticmethod
    @checked
    def load(path: str | os.PathLike[str]) -> Latency:
        """Read a file that `save` wrote."""
        return Latency.from_json(parse_json(read_bytes(Path(path), MOST_JSON), path), path)


# measuring

_HELD_OUT = 5  # every fifth network


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
    """Measure networks that are cut to many widths, and fit a table that predicts the latency of any widths.

    measure: your own function, which gets a network in eval mode and returns the milliseconds of a forward pass. It
        may export the network and time it on a phone, for example. It is called once per network. Without it, the
        networks are timed on this machine, with as many threads as torch uses.
    """
    config = config or LatencyConfig()
    in_onnx = config.runtime == RuntimeKind.ONNX and measure is None
    if in_onnx:
        _check_onnx(config)

    if graph is None:
        graph = trace(model, example)
    model = unwrap(model)
    graph.check_architecture(model)

    # Which networks are measured, and by what.
    device = config.device
    if not device:
        device = "cpu" if in_onnx else str(device_of(model))
    config = replace(config, device=device)
    if measure is None:
        config = resolve_mode(config)
    rows = sample_widths(graph, config)
    timer = Timer(config=config, threads=torch.get_num_threads(), example=example, measure=measure)
    start = time.perf_counter()
    times = timer.times(cut_quickly(model, graph, row) for row in each("networks", rows))
    seconds = time.perf_counter() - start

    if measure is not None:
        name = getattr(measure, "__name__", type(measure).__name__)
        return make_table(graph, config, rows, times, device=name, threads=timer.threads, seconds=seconds)
    table = make_table(graph, config, rows, times, device=device_name(device), threads=timer.threads, seconds=seconds)
    return replace(table, place=torch.device(device).type)


def make_table(
    graph: ChannelGraph,
    config: LatencyConfig,
    rows: Sequence[Sequence[int]],
    times: Sequence[float],
    *,
    device: str,
    threads: int = 1,
    seconds: float = 0.0,
) -> Latency:
    """Fit a table to measured networks. A fit without the held-out ones says how good its forecasts are."""
    whole_fit = fit(graph, rows, times)
    is_held_out = [number >= 2 and number % _HELD_OUT == 0 for number in range(len(rows))]
    fitted = [number for number in range(len(rows)) if not is_held_out[number]]
    blind_fit = fit(graph, [rows[number] for number in fitted], [times[number] for number in fitted])

    networks: list[Timed] = []
    errors: list[float] = []
    for row, ms, held_out in zip(rows, times, is_held_out, strict=True):
        forecast_ms = (blind_fit if held_out else whole_fit).ms(row)
        networks.append(Timed(tuple(row), ms, forecast_ms, held_out))
        if held_out:
            errors.append(abs(forecast_ms / ms - 1))

    return Latency(
        terms=whole_fit.terms,
        steps=whole_fit.steps,
        fingerprint=graph.fingerprint,
        spaces=tuple(space.name for space in graph.spaces),
        input_shape=graph.input_shape,
        networks=tuple(networks),
        median_error=median(errors),
        largest_error=max(errors),
        device=device,
        place="",
        batch=config.batch,
        threads=threads,
        dtype=config.dtype,
        mode=config.mode or LatencyMode.EAGER,
        channels_last=bool(config.channels_last),
        seconds=seconds,
        runtime=config.runtime,
    )


def _check_onnx(config: LatencyConfig) -> None:
    """Refuse what onnxruntime cannot measure here."""
    on_cpu = torch.device(config.device or "cpu").type == "cpu"
    if not on_cpu or config.dtype != FloatType.FLOAT32:
        raise DmcpError('onnxruntime measures latency only on the CPU and in float32: use runtime="torch".')
    missing = missing_packages()
    if missing:
        raise DmcpError(f"{missing}, or measure in torch.")


def sample_widths(graph: ChannelGraph, config: LatencyConfig) -> list[list[int]]:
    """Draw the widths to measure: unpruned, the smallest, then random ones.

    In every other network all spaces are near one ratio, as in networks that are chosen for a budget.
    """
    options = allowed_widths(graph, config.min_channels, config.max_channels, config.align)
    if not options.last.any():
        raise WidthsError("There is nothing to measure: no space can be narrowed within min_channels and max_channels.")
    random = generator(config.seed)
    rows = [graph.full.tensor(), options.widths(torch.zeros_like(options.last))]
    for number in range(config.networks - 2):
        shares = torch.rand(len(options.last), generator=random, dtype=torch.float64)
        if number % 2:
            common_share = torch.rand(1, generator=random, dtype=torch.float64)
            shares = (common_share + 0.2 * (shares - 0.5)).clamp(0, 1)
        rows.append(options.widths((shares * options.last).round().long()))
    return [row.tolist() for row in rows]


def cut_quickly(model: nn.Module, graph: ChannelGraph, row: Sequence[int]) -> nn.Module:
    """Cut a copy of the model, without the check by replay that `cut` makes: the network is run anyway."""
    widths = graph.widths(row)
    return narrow(model, graph.cuts(widths), graph.attributes(widths))


# fitting

# Kinds of work, beside those of multiply-adds:
LAYERS = "written by layers"
OTHERS = "written by other ops"
Work = dict[tuple[str, int], Terms]  # kind and resolution -> how much, at any widths
# Of iteratively reweighted least squares:
_TURNS = 12
_CLOSE = 1e-4  # errors below it count alike
_FIRM = 1e4  # weight of the unpruned network
# Of the choice of steps:
BLOCKS = (4, 8, 16, 32, 64)  # channels that kernels take at once
_FOLDS = 5
_BETTER = 0.9  # share of the error without a step, below which the step is taken,
_WORTH = 0.005  # if the error is lower by this, too


@dataclass(frozen=True)
class Fit:
    """Femtoseconds as a polynomial in the widths, and in steps of them."""

    terms: Terms
    steps: tuple[Step, ...]

    def ms(self, row: Sequence[int]) -> float:
        """The time for some widths."""
        return evaluate(self.terms, variables(row, self.steps)) / FS_PER_MS


def fit(graph: ChannelGraph, rows: Sequence[Sequence[int]], ms: Sequence[float], blocks: Sequence[int] = BLOCKS) -> Fit:
    """Fit a constant, and a price per unit of each kind of work; first choose which steps the device has.

    A device may be slow where a width is no multiple of a block, or take as long as for the next multiple. Each of
    these is tried with blocks of several sizes, and taken if networks that the fit has not seen are forecast better.
    """
    times = np.array(ms)
    constant: Work = {("constant", 0): {(): 1}}
    works = [constant | count_work(graph, WIDTH)]
    amounts = [_amounts(works[0], rows, ())]
    steps: tuple[Step, ...] = ()
    least_error = _unseen_error(amounts[0], times)
    for padded in (False, True):
        trials: list[tuple[float, Step, Work, Array]] = []
        for block in blocks:
            step = Step(block, padded)
            work = count_work(graph, step, offset=len(graph.spaces) * len(works))
            amount = _amounts(work, rows, (*steps, step))
            error = _unseen_error(np.hstack([*amounts, amount]), times)
            trials.append((error, step, work, amount))
        if not trials:
            break
        error, step, work, amount = min(trials, key=lambda trial: trial[0])
        if error < min(_BETTER * least_error, least_error - _WORTH):
            least_error = error
            steps = (*steps, step)
            works.append(work)
            amounts.append(amount)

    prices = iter(least_errors(np.hstack(amounts), times).tolist())
    terms: dict[tuple[int, ...], float] = collections.defaultdict(float)
    for work in works:
        for part in work.values():
            price = next(prices)
            for variables_of_term, factor in part.items():
                terms[variables_of_term] += factor * price * FS_PER_MS
    return Fit({key: round(value) for key, value in terms.items()}, steps)


def _amounts(work: Work, rows: Sequence[Sequence[int]], steps: Sequence[Step]) -> Array:
    """How much work of each kind networks have. -> (N, P)"""
    values = [variables(row, steps) for row in rows]
    amounts = [[float(evaluate(part, value)) for part in work.values()] for value in values]
    return np.array(amounts).reshape(len(rows), len(work))


def _unseen_error(amounts: Array, times: Array) -> float:
    """Mean error of forecasts of networks by a fit to others; the unpruned and the smallest one are always seen."""
    errors: list[float] = []
    numbers = np.arange(len(times))
    for fold in range(_FOLDS):
        unseen = (numbers >= 2) & (numbers % _FOLDS == fold)
        prices = least_errors(amounts[~unseen], times[~unseen])
        errors += np.abs(amounts[unseen] @ prices / times[unseen] - 1).tolist()
    return float(np.mean(errors))


def count_work(graph: ChannelGraph, step: Step = WIDTH, offset: int = 0) -> Work:
    """Count the MACs of the eval pass, and the numbers written, by kind and resolution of the layer.

    With a padded step: those of padded widths. With another one: those that read or write widths that are no multiple
    of its block, at all resolutions together. offset: of the numbers that variables of the step have in the terms.
    """
    eval_pass = graph.coupling.passes[0]
    recording = eval_pass.recording
    parts: dict[tuple[str, int], list[Terms]] = collections.defaultdict(list)

    def add(kind: str, value: int, coefficient: int, dims: Dims) -> None:
        shape = recording.shapes[value]
        resolution = math.prod(shape[2:]) if len(shape) > 3 else 1
        all_dims = graph.coupling.in_spaces(dims, graph.space_numbers)
        counted: Sequence[Layout]
        if step.padded:
            counted = [_of_step(dim, step, offset) for dim in all_dims]
        else:
            resolution = 0
            counted = _with_last(all_dims, step, offset)
        terms = {key: factor for key, factor in product(coefficient, counted).items() if factor}
        if terms:
            parts[kind, resolution].append(terms)

    # Multiply-adds. Grouped layers are a kind of their own: they write as much for far fewer products.
    writers = {out: op for op in recording.ops for out in op.outs if out is not None}
    for cost in eval_pass.costs:
        kind = cost.kind
        groups = writers[cost.out].arguments().get("groups")
        if isinstance(groups, int) and groups > 1:
            kind = f"grouped {kind}"
        add(kind, cost.out, cost.coefficient, cost.dims)

    # Numbers written. Views write nothing; what norms and pools return beside the first output is small, or not needed.
    layers = {cost.out for cost in eval_pass.costs}
    for op in recording.ops:
        if is_free(op, recording) or not op.outs:
            continue
        out = op.outs[0]
        if out is not None and out not in recording.tensors:
            kind = LAYERS if out in layers else OTHERS
            add(kind, out, 1, eval_pass.layouts[out])
    return {key: total(terms) for key, terms in parts.items()}


def _with_last(dims: Sequence[Layout], step: Step, offset: int) -> Sequence[Layout]:
    """Dims of which the last one that has spaces, such as the channels that a layer reads, counts by a step."""
    for position in range(len(dims) - 1, -1, -1):
        if atoms_of(dims[position]):
            return [*dims[:position], _of_step(dims[position], step, offset), *dims[position + 1 :]]
    return [fixed(0)]


def _of_step(dim: Layout, step: Step, offset: int) -> Layout:
    """A dim in which spaces that stand alone count by a step; what else is in it counts as it is, or not at all."""
    segments: list[Segment] = []
    for segment in dim:
        axis = segment[0]
        if len(segment) == 1 and isinstance(axis, Atom):
            segments.append((Atom(axis.index + offset),))
        elif step.padded:
            segments.append(segment)
    return tuple(segments)


def least_errors(amounts: Array, times: Array) -> Array:
    """Find prices with the least sum of relative errors, which outliers do not bend. (N, P), (N,) -> (P,)

    The first network, the unpruned one, has no error: shares of its time are then the same measured and forecast. One
    factor for all forecasts would do that too, but spoil those of narrow networks.
    """
    scale = 1 / times
    for _ in range(_TURNS):
        scale[0] = _FIRM / times[0]
        prices = solve_nonnegative(amounts * scale[:, None], times * scale)
        errors = np.abs(amounts @ prices / times - 1)
        scale = 1 / (times * np.sqrt(np.maximum(errors, _CLOSE)))
    return prices


def solve_nonnegative(amounts: Array, times: Array) -> Array:
    """Solve least squares without the columns that would have a negative price. (N, P), (N,) -> (P,)"""
    scale = np.linalg.norm(amounts, axis=0)
    is_free = scale > 0
    while True:
        prices = np.zeros(len(scale))
        solution = np.linalg.lstsq(amounts[:, is_free] / scale[is_free], times, rcond=None)[0]
        prices[is_free] = solution / scale[is_free]
        if (prices >= 0).all():
            return prices
        is_free[np.argmin(prices * scale)] = False
