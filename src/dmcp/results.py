"""The rows of a result table: accuracy, cost and speed of each network."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn

from dmcp.exporting.timing import time_in_turns
from dmcp.runtime.batches import Loader, device_of, size_of
from dmcp.settings import UNPRUNED as UNPRUNED
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import call_model, kept_modes
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Runtime, Task, evaluate_counted
from dmcp.training.losses import LowerIsBetter
from dmcp.units import table

DMCP, UNIFORM = "dmcp", "uniform"  # networks of the final table
ORIGINAL = "original"  # the model before anything was done to it
CUT = "right after the cut"  # of a trained model, with the weights of the search
TEACHER = "teacher"  # a given one, of the same architecture
ACCURACY = "accuracy"  # what is tested, unless the user has a metric or a loss
_BASELINES = (ORIGINAL, CUT, TEACHER, UNPRUNED, UNIFORM)
ROUNDS = 3  # of a few passes that are timed
_RISE = 0.1  # what the loss of one batch may differ by without a meaning


@dataclass(frozen=True)
class Row:
    """One network of the final table."""

    name: str
    macs: int  # of one sample
    params: int
    accuracy: float  # the metric of the test set, most often a mean over its samples
    ms: float = 0.0  # of a pass over one batch on this machine
    batch: int = 0  # samples in that batch
    samples: int = 0  # it was tested on; 0: not known
    score: str = ACCURACY  # or "metric", the user's own, or "loss": plain numbers, not shares of right answers
    lower_is_better: bool = False


def compare(
    nets: dict[str, nn.Module],
    graph: ChannelGraph,
    widths: dict[str, Widths],
    val_loader: Loader,
    example: Any,
    *,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
) -> tuple[Row, ...]:
    """Test all networks, and time them on one batch."""
    times, rows, metric = milliseconds(list(nets.values()), example), list[Row](), task.metric
    word = ACCURACY if metric is None else "loss" if getattr(metric, "is_loss", False) else "metric"
    kind: dict[str, Any] = {"score": word, "lower_is_better": isinstance(metric, LowerIsBetter)}
    for (name, net), ms in zip(nets.items(), times, strict=True):
        accuracy, samples = evaluate_counted(net, val_loader, metric)
        macs, params = graph.macs(widths.get(name, graph.full)), sum(it.numel() for it in net.parameters())
        rows.append(Row(name, macs, params, accuracy, ms, size_of((example,)), samples, **kind))
        runtime.emit("test", len(nets), rows[-1])
    return tuple(rows)


@torch.no_grad()
def milliseconds(nets: Sequence[nn.Module], example: Any, rounds: int = ROUNDS) -> list[float]:
    """Time of one batch in each network, in eval mode."""
    with contextlib.ExitStack() as undo:
        for net in nets:
            undo.enter_context(kept_modes(net))
            net.eval()
        calls = [functools.partial(call_model, net, example) for net in nets]
        return time_in_turns(calls, device_of(nets[0]), torch.get_num_threads(), rounds)


# text


def score(row: Row, unit: str = "%") -> str:
    """The accuracy in percent, or the metric with four digits."""
    return f"{100 * row.accuracy:.2f}{unit}" if row.score == ACCURACY else f"{row.accuracy:.4g}"


def against(row: Row, other: Row) -> str:
    """How much better or worse a network is than another one: in points, with the standard error as if they had been
    tested independently, or in the metric's own unit.
    """
    if math.isnan(row.accuracy) or math.isnan(other.accuracy):
        return f"not comparable with {other.name}"
    difference = 0.0 if row.accuracy == other.accuracy else row.accuracy - other.accuracy  # also of two infinite ones
    if row.lower_is_better:  # with a sign an error that grew would look like a gain
        word = "better" if difference < 0 else "worse"
        return f"{abs(difference):.4g} {word} than {other.name}" if difference else f"as good as {other.name}"
    if row.score != ACCURACY:
        return f"{difference:+.4g} against {other.name}"
    errors = [error for it in (row, other) if (error := error_of(it)) is not None]
    sure = f" \N{PLUS-MINUS SIGN} {100 * math.hypot(*errors):.2f}" if len(errors) == 2 else ""
    return f"{100 * difference:+.2f}{sure} points against {other.name}"


def score_name(rows: Sequence[Row]) -> str:
    """What the column is called."""
    word = rows[0].score if rows else ACCURACY
    return f"{word} (lower is better)" if any(row.lower_is_better for row in rows) else word


def results_table(rows: Sequence[Row], graph: ChannelGraph, origin: str = "") -> str:
    """Rows as Markdown, and notes below; `origin` says where the weights of the pruned network come from."""
    macs, params = graph.macs() or 1, graph.params() or 1
    lines = [["network", "MACs", "share", "params", "share", score_name(rows), f"ms per {rows[0].batch}"]]
    for row in rows:
        costs = [f"{row.macs:,}", f"{row.macs / macs:.1%}", f"{row.params:,}", f"{row.params / params:.1%}"]
        lines.append([row.name, *costs, score(row), f"{row.ms:.2f}"])
    return "\n".join([table(lines), *(f"- {note}" for note in notes(rows, graph, origin))])


def notes(rows: Sequence[Row], graph: ChannelGraph, origin: str = "") -> list[str]:
    """What a reader of the table should know: what the shares are of, what was gained, and how sure that is."""
    found = [f"shares are of the unpruned network: {graph.macs():,} MACs, {graph.params():,} params"]
    found += [origin] if origin else []
    results = pruned(rows)
    others = [row for row in rows if row.name in _BASELINES and row not in results]
    found += [f"{row.name}: {', '.join(against(row, other) for other in others)}" for row in results if others]
    found += unknown(rows)
    if rows[0].samples:
        points = 100 * max(error_of(row) or 0.0 for row in results)
        sure = f": its accuracy is known to \N{PLUS-MINUS SIGN} {points:.1f} points (standard error)"
        found.append(f"{rows[0].samples:,} test samples{sure if rows[0].score == ACCURACY else ''}")
    return found


def pruned(rows: Sequence[Row]) -> list[Row]:
    """The rows that a run was for: one for each budget."""
    found = [row for row in rows if not any(f"{row.name} ".startswith(f"{name} ") for name in _BASELINES)]
    kind = rows[-1].name.partition(" ")[0] if rows else ""  # "uniform", if that was asked for
    return found or [row for row in rows if row.name.partition(" ")[0] == kind]


def unknown(rows: Sequence[Row]) -> list[str]:
    """A sentence about each network whose metric is no number."""
    what = "so nobody knows how good it is; look at the metric and at the outputs"
    return [f"{row.name}: its metric is {row.accuracy}, {what}" for row in rows if math.isnan(row.accuracy)]


def standard_error(share: float, count: int) -> float:
    """Of a share of right answers among so many, sqrt(p (1 - p) / n); where none or all are right about one sample."""
    edge = 1 / (count + 2)
    share = min(max(share, edge), 1 - edge)
    return math.sqrt(share * (1 - share) / count)


def error_of(row: Row) -> float | None:
    """Standard error of an accuracy; None if the samples were not counted, or the metric is the user's own."""
    return standard_error(row.accuracy, row.samples) if row.score == ACCURACY and row.samples else None


def divergence(name: str, losses: Sequence[float]) -> str:
    """A sentence about a training whose loss, the mean of its last tenth, ended higher than it began; else empty."""
    if not (tenth := len(losses) // 10):  # too few steps to say
        return ""
    first, last = min(losses[0], fmean(losses[:tenth])), fmean(losses[-tenth:])
    was = f"its loss was {first:.4g} at the first step and {last:.4g} at the end"
    text = f"The training of {name!r} went wrong: {was}; a smaller learning rate (--lr) often helps."
    return text if last > first + _RISE * abs(first) else ""  # weights that were good at first are no better at the end
