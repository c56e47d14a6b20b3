"""What pruning gives back: the networks, and a table with the accuracy, cost and speed of each."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import nn

from dmcp.budgets import Budget
from dmcp.exporting.timing import time_in_turns
from dmcp.runs.records import (
    ACCURACY,
    BASELINES,
    LOSS,
    METRIC,
    LatencyOutcome,
    Row,
    StepRecord,
    WithinOutcome,
    pruned,
    score,
)
from dmcp.runtime.batches import Loader, device_of, size_of
from dmcp.searching.records import SearchResult
from dmcp.settings import ResolvedSearchConfig, ResolvedTrainConfig
from dmcp.speed import Speed, facts_of, speed_notes
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import call_model, kept_modes
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime, Task, evaluate_counted
from dmcp.training.losses import LowerIsBetter, Metric
from dmcp.units import table

ROUNDS = 3  # of timing, a few passes each
_RISE = 0.1  # the part of the first loss by which a loss may end higher
_RISE_OF_A_BATCH = 1.0  # the same where the first loss is that of a single batch, which differs by chance


@dataclass(frozen=True, eq=False)
class PruneResult:
    """The pruned network, and where it comes from."""

    model: nn.Module  # a plain module of the user's own class; with several budgets, the network of the first
    widths: Widths  # of this model
    graph: ChannelGraph
    search: SearchResult | None  # None if the method does not search
    rows: tuple[Row, ...]
    budget: Budget
    origin: str = ""  # a sentence that says where the weights come from
    latency: LatencyOutcome | None = None  # times asked for, predicted and measured, if latency is limited
    within: WithinOutcome | None = None  # how the budget was chosen, if a loss was allowed instead
    speeds: tuple[Speed, ...] = ()  # of this model, beside the unpruned one
    by_budget: Mapping[str, PruneResult] = field(default_factory=dict)  # with several budgets, the result of each
    search_config: ResolvedSearchConfig | None = None  # all settings of the search; None if the method does not search
    train_config: ResolvedTrainConfig | None = None  # all settings of the training; None if nothing was trained

    @property
    def table(self) -> str:
        """The rows as text, with notes that explain them."""
        lines = [results_table(self.rows, self.graph, self.origin)]
        if self.by_budget:
            for name, result in self.by_budget.items():
                lines += [f"- {name}: {note}" for note in result.notes]
        else:
            lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines)

    @property
    def notes(self) -> list[str]:
        """Sentences about this network: how its budget was chosen, how fast it is, and if it is not, why."""
        notes: list[str] = []
        if self.within is not None:
            notes.append(self.within.text)
        if self.latency is not None:
            notes.append(self.latency.text)
        return notes + speed_notes(self.speeds, facts_of(self.graph, self.widths), self.budget)


# measuring


def measure_networks(
    networks: Mapping[str, nn.Module],
    graph: ChannelGraph,
    widths: Mapping[str, Widths],
    val_loader: Loader,
    example: Any,
    *,
    train_losses: Mapping[str, float | None] | None = None,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
) -> tuple[Row, ...]:
    """Test all networks, and time them on one batch. A network without widths is an unpruned one.

    train_losses: of the networks that were trained.
    """
    train_losses = train_losses or {}
    times = milliseconds(list(networks.values()), example)
    rows: list[Row] = []
    for (name, network), ms in zip(networks.items(), times, strict=True):
        accuracy, samples = evaluate_counted(network, val_loader, task.metric)
        row = Row(
            name=name,
            macs=graph.macs(widths.get(name, graph.full)),
            params=sum(parameter.numel() for parameter in network.parameters()),
            accuracy=accuracy,
            ms=ms,
            batch=size_of((example,)),
            samples=samples,
            score=_kind_of_score(task.metric),
            lower_is_better=isinstance(task.metric, LowerIsBetter),
            train_loss=train_losses.get(name),
        )
        rows.append(row)
        runtime.emit("test", len(networks), row)
    return tuple(rows)


def _kind_of_score(metric: Metric | None) -> str:
    if metric is None:
        return ACCURACY
    if getattr(metric, "is_loss", False):
        return LOSS
    return METRIC


@torch.no_grad()
def milliseconds(networks: Sequence[nn.Module], example: Any, rounds: int = ROUNDS) -> list[float]:
    """The time that each network takes for one batch, in eval mode."""
    with contextlib.ExitStack() as modes:
        for network in networks:
            modes.enter_context(kept_modes(network))
            network.eval()
        calls = [functools.partial(call_model, network, example) for network in networks]
        return time_in_turns(calls, device_of(networks[0]), torch.get_num_threads(), rounds)


# the table


def results_table(rows: Sequence[Row], graph: ChannelGraph, origin: str = "") -> str:
    """The rows as a Markdown table, with notes below it; `origin` says where the weights come from."""
    full_macs = graph.macs() or 1
    full_params = graph.params() or 1
    lines = [["network", "MACs", "share", "params", "share", "train loss", score_name(rows), f"ms per {rows[0].batch}"]]
    for row in rows:
        macs = [f"{row.macs:,}", f"{row.macs / full_macs:.1%}"]
        params = [f"{row.params:,}", f"{row.params / full_params:.1%}"]
        lines.append([row.name, *macs, *params, show_loss(row.train_loss), score(row), f"{row.ms:.2f}"])
    return "\n".join([table(lines), *(f"- {note}" for note in notes(rows, graph, origin))])


def notes(rows: Sequence[Row], graph: ChannelGraph, origin: str = "") -> list[str]:
    """Sentences for readers of the table: what shares refer to, what pruning changed, and how certain that is."""
    results = pruned(rows)
    baselines = [row for row in rows if row.name in BASELINES and row not in results]

    lines = [f"100% is the unpruned network: {graph.macs():,} MACs, {graph.params():,} parameters"]
    if origin:
        lines.append(origin)
    if baselines:
        for row in results:
            differences = [difference(row, baseline) for baseline in baselines]
            lines.append(f"{row.name}: {', '.join(differences)}")
    lines += unknown_scores(rows)
    if rows[0].samples:
        lines.append(_test_set_note(rows[0], results))
    return lines


def _test_set_note(first: Row, results: Sequence[Row]) -> str:
    note = f"{first.samples:,} test samples"
    if first.score != ACCURACY:
        return note
    points = 100 * max(error_of(row) or 0.0 for row in results)
    return f"{note}: the standard error of an accuracy is \N{PLUS-MINUS SIGN} {points:.1f} points"


def score_name(rows: Sequence[Row]) -> str:
    """The title of the column of scores."""
    name = ACCURACY
    if rows:
        name = rows[0].score
    if any(row.lower_is_better for row in rows):
        return f"{name} (lower is better)"
    return name


def show_loss(loss: float | None) -> str:
    """A training loss with four digits; a dash if there is none."""
    if loss is None:
        return "-"
    return f"{loss:.4g}"


def difference(row: Row, baseline: Row) -> str:
    """How much better or worse a network is than a baseline.

    For accuracies in points, with the standard error of two independent tests; for any other metric in its own unit.
    """
    if math.isnan(row.accuracy) or math.isnan(baseline.accuracy):
        return f"not comparable with {baseline.name}"
    gain = row.accuracy - baseline.accuracy
    if row.accuracy == baseline.accuracy:
        gain = 0.0  # also for two infinite scores
    if row.lower_is_better:  # a plus sign in front of a higher error would look like an improvement
        if gain == 0:
            return f"as good as {baseline.name}"
        verdict = "worse"
        if gain < 0:
            verdict = "better"
        return f"{abs(gain):.4g} {verdict} than {baseline.name}"
    if row.score != ACCURACY:
        return f"{gain:+.4g} against {baseline.name}"
    points = f"{100 * gain:+.2f}"
    error = error_of(row)
    baseline_error = error_of(baseline)
    if error is not None and baseline_error is not None:
        points += f" \N{PLUS-MINUS SIGN} {100 * math.hypot(error, baseline_error):.2f}"
    return f"{points} points against {baseline.name}"


def unknown_scores(rows: Sequence[Row]) -> list[str]:
    """A sentence about each network whose metric is not a number."""
    advice = "so its quality is unknown; check the metric and the outputs of the network"
    sentences = []
    for row in rows:
        if math.isnan(row.accuracy):
            sentences.append(f"{row.name}: its metric is {row.accuracy}, {advice}")
    return sentences


def standard_error(share: float, count: int) -> float:
    """Standard error of a share of correct answers, sqrt(p (1 - p) / n).

    If none or all of the answers are correct, p is taken as about one sample away from that.
    """
    edge = 1 / (count + 2)
    share = min(max(share, edge), 1 - edge)
    return math.sqrt(share * (1 - share) / count)


def error_of(row: Row) -> float | None:
    """Standard error of an accuracy; None if the samples were not counted, or if the metric is the user's own."""
    if row.score != ACCURACY or not row.samples:
        return None
    return standard_error(row.accuracy, row.samples)


def last_epoch_loss(steps: Sequence[StepRecord]) -> float | None:
    """The mean loss of the last epoch of a training; None if not all of its steps are there.

    Steps are missing if a training was resumed with a checkpointer that has no log of earlier ones.
    """
    if not steps:
        return None
    last = steps[-1]
    losses = [step.loss for step in steps if step.epoch == last.epoch]
    steps_per_epoch = last.steps // (last.epoch + 1)
    if len(losses) != steps_per_epoch:
        return None
    return fmean(losses)


def divergence(name: str, losses: Sequence[float]) -> str:
    """A sentence about a training whose loss ended clearly higher than it began; empty if it did not.

    The mean loss of the last tenth of the steps is compared with that of the first step, since a large learning rate
    can spoil a network within a few steps, and with the mean of the first tenth. The fewer batches a mean is of, the
    larger the rise that may be chance. A small rise is normal for weights that were good from the start.
    """
    tenth = len(losses) // 10
    if not tenth:  # too few steps to say
        return ""
    last = fmean(losses[-tenth:])
    for steps in (1, tenth):
        first = fmean(losses[:steps])
        allowed_rise = max(_RISE, _RISE_OF_A_BATCH / math.sqrt(steps))
        if last > first + allowed_rise * abs(first):
            change = f"its loss was {first:.4g} at first and {last:.4g} at the end"
            return f"The training of {name!r} went wrong: {change}. A smaller learning rate (--lr) often helps."
    return ""
