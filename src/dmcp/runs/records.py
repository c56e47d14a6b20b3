"""What a run records: the steps of search and training, the tested networks, and how a latency limit ended.

Imports no torch, so that a list of runs is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dmcp.settings import UNPRUNED as UNPRUNED
from dmcp.units import show_duration, show_ms

# Rows of the table
DMCP = "dmcp"
UNIFORM = "uniform"
ORIGINAL = "original"  # the model as it was given
CUT = "right after the cut"  # a trained model that was cut and calibrated, but not trained again
TEACHER = "teacher"  # a teacher of its own, with the architecture of the model
BASELINES = (ORIGINAL, CUT, TEACHER, UNPRUNED, UNIFORM)

# What a score is
ACCURACY = "accuracy"
LOSS = "loss"
METRIC = "metric"


# steps


@dataclass(frozen=True)
class StepRecord:
    """What one training step reports."""

    epoch: int  # from 0
    step: int  # from 0, over all epochs
    steps: int  # in all
    lr: float
    loss: float

    @property
    def text(self) -> str:
        """The loss, for the progress line."""
        return f"loss {self.loss:.3f}"

    @property
    def losses(self) -> dict[str, tuple[float, ...]]:
        """The numbers that must be finite, by the text that says where they come from."""
        return {"": (self.loss,)}


@dataclass(frozen=True)
class SearchRecord:
    """Losses and learning rates of one search step; None for what it did not do."""

    step: int
    epoch: int
    lr: float | None = None  # of the weights
    weight_losses: tuple[float, ...] | None = None  # of each sub-network, the largest first
    alpha_lr: float | None = None
    task_loss: float | None = None
    budget_loss: float | None = None
    ratios: tuple[float, ...] | None = None  # expected cost over target, per limit
    widths: tuple[float, ...] | None = None  # expected ones in every tenth step, to 0.01, in the order of graph.spaces

    @property
    def losses(self) -> dict[str, tuple[float, ...]]:
        """What must be finite, by stages."""
        return {
            " in stage 1, the weights": self.weight_losses or (),
            " in stage 2, the alphas": (self.task_loss or 0.0, self.budget_loss or 0.0),
        }

    @property
    def text(self) -> str:
        """The losses and the expected cost, for people who watch."""
        parts = []
        if self.weight_losses:
            parts.append(f"loss {self.weight_losses[0]:.3f}")
        if self.task_loss is not None:
            parts.append(f"soft loss {self.task_loss:.3f}")
        if self.ratios:
            shares = " and ".join(f"{ratio:.1%}" for ratio in self.ratios)
            parts.append(f"cost {shares} of budget")
        else:
            parts.append("warm-up")
        return ", ".join(parts)


# latency


@dataclass(frozen=True, kw_only=True)
class LatencyOutcome:
    """How a latency limit ended: milliseconds of a forward pass."""

    asked_ms: float
    predicted_ms: float
    unpruned_ms: float
    how: str  # device and batch, in words
    measured_ms: float | None = None  # None: not on this machine
    again: int = 0  # how often widths were chosen again, because the network was slower or faster than asked

    @property
    def held(self) -> bool:
        """Whether the network is fast enough, as measured, or else as predicted."""
        ms = self.predicted_ms if self.measured_ms is None else self.measured_ms
        return ms <= self.asked_ms

    @property
    def text(self) -> str:
        """The outcome in a sentence."""
        measured = "not measured"
        if self.measured_ms is not None:
            measured = f"measured {show_ms(self.measured_ms)}"
        if self.again:
            measured += f", chosen again {self.again}x"
        return (
            f"latency {self.how}: asked {show_ms(self.asked_ms)}, predicted {show_ms(self.predicted_ms)}, {measured}; "
            f"the unpruned network takes {show_ms(self.unpruned_ms)}"
        )

    @property
    def warning(self) -> str:
        """A sentence about a limit that is exceeded, or was not measured; empty otherwise."""
        if self.measured_ms is None:
            return (
                f"The latency was not measured, {show_ms(self.predicted_ms)} is only a prediction: "
                f"the table was measured {self.how}, which is not available here."
            )
        if self.held:
            return ""
        return (
            f"The network takes {show_ms(self.measured_ms)}, more than the {show_ms(self.asked_ms)} asked for. "
            "Choose a smaller budget, or measure on an idle machine."
        )


# how much accuracy may be lost


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network that was trained for a short time, or only calibrated, and tested on held-out images."""

    budget: str
    score: float
    loss: float  # against the unpruned network after the same training: points of accuracy, or the metric's own unit


@dataclass(frozen=True, kw_only=True)
class WithinOutcome:
    """Which budget was chosen for a loss that is allowed, and what the choice rests on."""

    asked: float  # the largest loss: points of accuracy, or the metric's own unit
    budget: str  # the one that was chosen
    unpruned: float  # score of the unpruned network, trained for as short a time
    candidates: tuple[Candidate, ...]  # in the order of their trainings
    samples: int  # held-out ones; 0 if their number is unknown
    unit: str  # "points" or ""
    error: float | None = None  # standard error of an accuracy on these samples, in points
    trains: bool = True  # whether the networks were trained, and not only calibrated
    seconds: float = field(default=0.0, compare=False)  # of all these trainings; those before an interruption not

    @property
    def text(self) -> str:
        """The choice and its evidence in a sentence."""
        return f"within {self.show(self.asked)}: {self.budget} was chosen {self.evidence}"

    @property
    def evidence(self) -> str:
        """What the choice rests on."""
        images = "held-out images"
        if self.samples:
            images = f"{self.samples:,} {images}"
        if self.error is not None:
            images += f" (standard error of an accuracy: \N{PLUS-MINUS SIGN} {self.error:.1f} points)"
        losses = [f"{candidate.budget} lost {self.show(candidate.loss)}" for candidate in self.candidates]
        training = "without any training"
        if self.trains:
            training = f"after short trainings of {show_duration(self.seconds)}"
        return f"on {images} {training}: compared with the unpruned network, {', '.join(losses)}"

    def show(self, loss: float) -> str:
        """A loss with its unit."""
        if not self.unit:
            return f"{loss:.4g}"
        return f"{loss:.2f} {self.unit}"


# tested networks


@dataclass(frozen=True)
class Row:
    """One network of the table of results."""

    name: str
    macs: int  # of one sample
    params: int
    accuracy: float  # the metric on the test set, in most cases a mean over its samples
    ms: float = 0.0  # time of a pass over one batch on this machine
    batch: int = 0  # samples in that batch
    samples: int = 0  # samples in the test set; 0 if their number is unknown
    score: str = ACCURACY  # "metric" (the user's own) and "loss" are plain numbers, not shares of correct answers
    lower_is_better: bool = False
    train_loss: float | None = None  # mean over the last epoch of its training; None if it was not trained here


def pruned(rows: Sequence[Row]) -> list[Row]:
    """The rows of the pruned networks: one for each budget."""
    results = [row for row in rows if not _is_baseline(row)]
    if results or not rows:
        return results
    method = rows[-1].name.partition(" ")[0]  # "uniform", which is a baseline unless it was the method itself
    return [row for row in rows if row.name.partition(" ")[0] == method]


def _is_baseline(row: Row) -> bool:
    """Whether the name is that of a baseline, or of a baseline for one of several budgets."""
    return any(row.name == name or row.name.startswith(f"{name} ") for name in BASELINES)


def score(row: Row, unit: str = "%") -> str:
    """The accuracy in percent; any other metric with four digits."""
    if row.score == ACCURACY:
        return f"{100 * row.accuracy:.2f}{unit}"
    return f"{row.accuracy:.4g}"
