"""A latency table: the time of any widths of one network on one device."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dmcp.errors import FileError, WidthsError
from dmcp.modules import path_of
from dmcp.runtime.io import MOST_JSON, from_plain, parse_json, quote, read_bytes, write_files
from dmcp.settings import RuntimeKind
from dmcp.tracing.cost import evaluate
from dmcp.tracing.graph import ChannelGraph
from dmcp.units import FS_PER_MS, show_ms
from dmcp.widths import tuples

LATENCY = "latency"  # its name among the costs of a graph
LATENCY_FILE = "latency.json"  # its name in a run
_POOR = 0.15  # median error above which a warning is given
_FORMAT = "torch-dmcp latency 1"
_MAX_THREADS = 4096  # in a file


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
    dtype: str
    torch: str
    seconds: float  # that measuring took
    runtime: RuntimeKind
    onnxruntime: str  # its version, where that is the runtime

    def __post_init__(self) -> None:
        numbers = [self.median_error, self.largest_error, self.seconds, *self.terms.values()]
        numbers += [number for it in self.networks for number in (*it.widths, it.forecast_ms)]
        fits = len(self.networks) >= 2 and all(0 < it.ms < math.inf for it in self.networks)
        fits &= all(math.isfinite(number) and 0 <= number < 2**63 for number in numbers)
        fits &= all(type(it) is int and 0 <= it < len(self.spaces) for key in self.terms for it in key)
        if not fits or not 1 <= self.threads <= _MAX_THREADS or self.batch < 1:
            raise ValueError("its numbers make no sense")

    def attach(self, graph: ChannelGraph) -> ChannelGraph:
        """The graph with this latency among its costs, so that budgets can limit it: "8ms", "latency:50%"."""
        for what, own, other in (
            ("another architecture", self.fingerprint, graph.fingerprint),
            ("other ignored layers", self.spaces, tuple(space.name for space in graph.spaces)),
            (f"samples of {self.input_shape}", self.input_shape, graph.input_shape),
        ):
            if own != other:
                raise WidthsError(f"This latency table is for {what}: measure this network.")
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
    def full(self) -> int:
        """Measured femtoseconds of the unpruned network."""
        return round(self.unpruned_ms * FS_PER_MS)

    @property
    def unpruned_ms(self) -> float:
        """Measured time of the unpruned network."""
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
        runtime = f"in onnxruntime {self.onnxruntime} " if self.runtime == RuntimeKind.ONNX else ""
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

    @property
    def table(self) -> str:
        """All networks as text, and how good the forecasts are."""
        lines = [f"{'network':<12}{'measured':>12}{'forecast':>12}{'error':>9}"]
        for number, it in enumerate(self.networks):
            name = ("unpruned", "smallest")[number] if number < 2 else "held out" if it.held_out else f"{number + 1}"
            error = f"{it.forecast_ms / it.ms - 1:+.1%}"
            lines.append(f"{name:<12}{show_ms(it.ms):>12}{show_ms(it.forecast_ms):>12}{error:>9}")
        took = f"Measured in {self.seconds:.0f} s."
        return "\n".join([*lines, "", self.summary, took, *filter(None, [self.warning])])

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into the same value."""
        terms = [[list(spaces), factor] for spaces, factor in self.terms.items()]
        return {"format": _FORMAT} | asdict(self) | {"terms": terms}

    @staticmethod
    def from_json(data: Any, name: object = "this table") -> Latency:
        """Read what `to_json` wrote; anything else is refused."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise FileError(f"{name}: not a latency table: dmcp latency --out {LATENCY_FILE} writes one.")
        try:
            plain = {key: value for key, value in data.items() if key != "format"}
            plain["terms"] = {tuple(spaces): factor for spaces, factor in data["terms"]}
            plain["input_shape"] = tuples(data["input_shape"])
            return from_plain(Latency, plain)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{name}: not a latency table of this version: {quote(error)}.") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file."""
        path = path_of("A latency table", path)
        try:
            write_files(path.parent, {path.name: json.dumps(self.to_json(), indent=1).encode()})
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror or error}.") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Latency:
        """Read such a file."""
        return Latency.from_json(parse_json(read_bytes(path_of("A latency table", path), MOST_JSON), path), path)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a latency limit ended: milliseconds of a forward pass."""

    asked_ms: float
    predicted_ms: float
    unpruned_ms: float
    how: str  # device and batch, in words
    measured_ms: float | None = None  # None: not on this machine
    again: int = 0  # how often widths were chosen again, because the network was too slow, or far faster than allowed

    def __post_init__(self) -> None:
        known = (self.asked_ms, self.predicted_ms, self.unpruned_ms, self.measured_ms or 0.0)
        if not all(math.isfinite(ms) and ms >= 0 for ms in known):
            raise ValueError("times must be finite, and not negative")

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
        asked, predicted = show_ms(self.asked_ms), show_ms(self.predicted_ms)
        if self.measured_ms is None:
            return (
                f"The latency was not measured, {predicted} is a forecast: the table is {self.how}, which is not here."
            )
        takes = f"The network takes {show_ms(self.measured_ms)}, more than the {asked} asked for"
        return "" if self.held else f"{takes}: ask for less, or measure on an idle machine."
