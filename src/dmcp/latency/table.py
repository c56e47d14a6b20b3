"""A latency table: the time of any widths of one network on one device."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dmcp.errors import FileError
from dmcp.modules import path_of
from dmcp.runtime.io import MOST_JSON, parse_json, quote, read_bytes, write_files
from dmcp.settings import RuntimeKind
from dmcp.tracing.cost import Terms
from dmcp.widths import tuples

FS_PER_MS = 10**12  # femtoseconds: ints, of which a second is few enough for 64 bits
LATENCY_FILE = "latency.json"  # its name in a run
POOR = 0.15  # median error of a forecast from which on it is not to be trusted
_FORMAT = "torch-dmcp latency 1"
_MOST_FACTORS, _MOST_THREADS = 16, 4096  # of a term; of a machine


@dataclass(frozen=True)
class Timed:
    """One network that was measured."""

    widths: tuple[int, ...]  # of the graph's spaces, in order
    ms: float
    forecast_ms: float  # of a fit that has seen all networks, or, where this one was held out, all that were not
    held_out: bool = False
    left_out: bool = False  # of all fits, since it took far longer than the other networks say


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Time of a forward pass as a polynomial in the widths, and what was measured to find it."""

    terms: Mapping[tuple[int, ...], int]  # spaces that are multiplied -> femtoseconds
    fingerprint: str  # of the unpruned network
    spaces: tuple[str, ...]  # their names, in order
    input_shape: Any  # of one sample
    networks: tuple[Timed, ...]  # the unpruned one first, then the smallest
    median_error: float  # of the held-out networks' forecasts, as a share of their times
    largest_error: float
    device: str  # its name; for an own function what that is called
    place: str = ""  # cpu, cuda: as torch names it; empty: an own function measured
    batch: int = 1
    threads: int = 1
    dtype: str = "float32"
    torch: str = ""
    seconds: float = 0.0  # that measuring took
    runtime: str = RuntimeKind.TORCH.value
    onnxruntime: str = ""  # its version, where that is the runtime

    @property
    def unpruned_ms(self) -> float:
        """Measured time of the unpruned network."""
        return self.networks[0].ms

    @property
    def smallest_ms(self) -> float:
        """Measured time of the smallest network."""
        return self.networks[1].ms

    @property
    def digest(self) -> str:
        """Sixteen letters that change with any of its forecasts."""
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
        """What is known, in a sentence."""
        return (
            f"Latency {self.how}: the unpruned network takes {show_ms(self.unpruned_ms)}, the smallest "
            f"{show_ms(self.smallest_ms)}; forecasts of {sum(it.held_out for it in self.networks)} held-out networks "
            f"are off by {self.median_error:.1%} (median), {self.largest_error:.1%} at most.{self._left_out}"
        )

    @property
    def _left_out(self) -> str:
        count = sum(it.left_out for it in self.networks)
        several = f"{count} networks took far longer than the others say, and were" if count > 1 else ""
        one = "1 network took far longer than the others say, and was" if count == 1 else ""
        return f" {one or several} left out of the table." if count else ""

    @property
    def trouble(self) -> str:
        """A sentence about forecasts that are too bad to be relied on; empty if they are not."""
        if self.median_error <= POOR:
            return ""
        return (
            f"Forecasts of latency are off by {self.median_error:.0%} (median of held-out networks): the machine was "
            "busy, or its times do not follow the widths. Measure on an idle machine, with larger batches, or with "
            "align 8."
        )

    # -- files

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into the same value."""
        terms = [[list(spaces), factor] for spaces, factor in self.terms.items()]
        return {"format": _FORMAT} | asdict(self) | {"terms": terms}

    @staticmethod
    def from_json(data: Any, name: object = "this table") -> Latency:
        """Read what `to_json` wrote; anything else is refused."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise FileError(f"{name}: not a table of latency: dmcp latency --out {LATENCY_FILE} writes one.")
        try:
            plain = {key: value for key, value in data.items() if key != "format"}
            plain["terms"] = {_spaces(spaces): _number(int, factor) for spaces, factor in data["terms"]}
            plain["networks"] = tuple(_timed(it) for it in data["networks"])
            plain["spaces"] = tuple(_number(str, it) for it in data["spaces"])
            plain["input_shape"] = tuples(data["input_shape"])
            for key in ("median_error", "largest_error", "seconds"):
                plain[key] = _number(float, data[key])
            for key in ("batch", "threads"):
                plain[key] = _number(int, data[key])
            for key in ("device", "place", "dtype", "torch", "fingerprint"):
                plain[key] = _number(str, data[key])
            plain["runtime"] = RuntimeKind(data["runtime"]).value
            plain["onnxruntime"] = _number(str, data["onnxruntime"])
            found = Latency(**plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"{name}: not a table of latency of this version: {quote(error)}.") from None
        inside = all(number < len(found.spaces) for spaces in found.terms for number in spaces)
        inside &= all(len(spaces) <= _MOST_FACTORS for spaces in found.terms)
        inside &= 1 <= found.threads <= _MOST_THREADS and found.batch >= 1 and all(it.ms > 0 for it in found.networks)
        if len(found.networks) < 2 or not inside:
            raise FileError(f"{name}: not a table of latency of this version: its numbers make no sense.")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a file."""
        path = path_of("A table of latency", path)
        try:
            write_files(path.parent, {path.name: json.dumps(self.to_json(), indent=1).encode()})
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror or error}.") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Latency:
        """Read such a file."""
        return Latency.from_json(parse_json(read_bytes(path_of("A table of latency", path), MOST_JSON), path), path)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a limit of latency ended: all in milliseconds of one forward pass."""

    asked_ms: float
    predicted_ms: float
    unpruned_ms: float
    how: str  # the device, in words
    measured_ms: float | None = None  # None: not on this machine
    again: int = 0  # how often widths were chosen again, since those before took too long, or far less than they may

    def __post_init__(self) -> None:
        known = (self.asked_ms, self.predicted_ms, self.unpruned_ms, self.measured_ms or 0.0)
        if not all(math.isfinite(ms) and ms >= 0 for ms in known):
            raise ValueError("times must be finite, and not negative")

    @property
    def held(self) -> bool:
        """Whether it was kept, as far as anybody knows."""
        return (self.predicted_ms if self.measured_ms is None else self.measured_ms) <= self.asked_ms

    @property
    def text(self) -> str:
        """In a sentence."""
        measured = "not measured" if self.measured_ms is None else f"measured {show_ms(self.measured_ms)}"
        again = f", chosen again {_times(self.again)}" if self.again else ""
        return (
            f"latency {self.how}: asked {show_ms(self.asked_ms)}, predicted {show_ms(self.predicted_ms)}, {measured}"
            f"{again}; the unpruned network takes {show_ms(self.unpruned_ms)}"
        )

    @property
    def trouble(self) -> str:
        """A sentence about a limit that was not kept, or that nobody has seen kept; empty otherwise."""
        if self.measured_ms is None:
            return (
                f"The latency was not measured: the table is {self.how}, which is not here. "
                f"{show_ms(self.predicted_ms)} is a forecast."
            )
        if self.held:
            return ""
        return (
            f"The network takes {show_ms(self.measured_ms)}, more than the {show_ms(self.asked_ms)} asked for, though "
            f"widths were chosen again {_times(self.again)}: ask for less, or measure on an idle machine."
        )


def show_ms(ms: float) -> str:
    """Three digits with the unit that fits: 8.12 ms, 812 us, 1.2 s."""
    for unit, size in (("s", 1000.0), ("ms", 1.0)):
        if ms >= size:
            return f"{_short(ms / size)} {unit}"
    return f"{_short(1000 * ms)} us"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _number(kind: type, value: Any) -> Any:
    """A value of a file that is what it should be; numbers are not negative."""
    if kind is float and type(value) is int:
        value = float(value)
    fits = type(value) is kind
    if isinstance(value, float):
        fits &= math.isfinite(value) and value >= 0
    elif isinstance(value, int):
        fits &= 0 <= value < 2**63
    if not fits:
        raise ValueError(f"{value!r} is not of its kind")
    return value


def _spaces(numbers: Any) -> tuple[int, ...]:
    return tuple(_number(int, number) for number in numbers)


def _timed(plain: Any) -> Timed:
    ms, forecast = (_number(float, plain[key]) for key in ("ms", "forecast_ms"))
    held, left = _number(bool, plain["held_out"]), _number(bool, plain["left_out"])
    return Timed(_spaces(plain["widths"]), ms, forecast, held, left)


def as_terms(latency: Latency) -> Terms:
    """The polynomial, as others have theirs."""
    return dict(latency.terms)
