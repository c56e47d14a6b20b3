"""What was measured: a row of each table that `dmcp bench` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Whose figures they are."""

    model: str
    model_args: tuple[str, ...]  # name=value for its builder


@dataclass(frozen=True, kw_only=True)
class _Trained(_Row):
    """And where it was trained."""

    batch: int
    device: str


@dataclass(frozen=True, kw_only=True)
class _Stepped(_Trained):
    """And how its steps were computed."""

    macs: int
    engine: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured(_Stepped):
    """Medians of one network at one batch size, on one device."""

    shape: tuple[int, ...]  # of one sample
    torch: str  # its version
    groups: int
    params: int
    trace_s: float
    plain_ms: float  # forward, backward and optimizer of the unpruned network
    stage1_ms: float  # all sub-networks of the sandwich, one optimizer step
    stage2_ms: float  # the alphas
    search_ms: float  # stage 1 and stage 2, one after the other
    plain_gib: float | None  # the most memory that tensors took; None where torch does not count it
    search_gib: float | None
    first_s: float  # the first plain step and the first search step: compiling and tuning
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
class Pruned(_Stepped):
    """Milliseconds of a training step of a network and of what uniform widths leave of it; the MACs are of that."""

    budget: str
    whole_ms: float  # the unpruned network
    pruned_ms: float
    padded_ms: float | None  # the same inside one of rounder widths, see padding; None where widths are round


@dataclass(frozen=True, kw_only=True)
class Epochs(_Trained):
    """Seconds of one pass over data with everything in it: loader, steps, reading the losses."""

    data: str
    steps: int  # in an epoch
    train_s: float  # plain training of the unpruned network
    warmup_s: float  # the search's first part: weights only
    search_s: float  # its second part: weights and alphas


@dataclass(frozen=True, kw_only=True)
class Sampled(_Row):
    """Seconds in which structures were drawn from the chains and their cost was counted, on one core."""

    spaces: int
    structures: int
    seconds: float
