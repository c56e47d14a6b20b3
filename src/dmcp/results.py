"""The rows of a result table: accuracy, cost and speed of each network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn

from dmcp.batches import Loader, device_of, size_of
from dmcp.calibration import kept_modes
from dmcp.checkpoint import untouched
from dmcp.latency.measure import waiting
from dmcp.losses import Metric, whole_of
from dmcp.modules import call_model, narrow, unwrap
from dmcp.preflight import _kind, _test
from dmcp.settings import UNPRUNED as UNPRUNED
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Runtime, Task
from dmcp.widths import Widths

DMCP, UNIFORM = "dmcp", "uniform"  # networks of the final table
ORIGINAL = "original"  # the network before anything was done to it, where its weights are inherited or it teaches
TEACHER = "teacher"  # a given one, of the same architecture
ROUNDS = 10  # passes that are timed
_LONG = 10  # steps of a training of which a tenth says something
_SLOW = 0.9  # of the unpruned network's time, from where on nothing was gained
_WANTED = 8  # what runtimes compute channels in
_GUESSED = 0.1  # of the way from guessing to all right, up to which nothing was learnt
_RISE = 0.1  # what the loss of one batch may differ by without a meaning


@dataclass(frozen=True)
class Row:
    """One network of the final table."""

    name: str
    macs: int  # of one sample
    params: int
    accuracy: float  # the metric of the test set, most often a mean over its samples
    ms: float = 0.0  # fastest pass over one batch on this machine
    batch: int = 0  # samples in that batch
    samples: int = 0  # it was tested on; 0: not known
    own_metric: bool = False  # whether the metric is the user's: a plain number, not a share of right answers
    lower_is_better: bool = False  # whether it is one of which little is good


def score(row: Row, unit: str = "%") -> str:
    """The accuracy in percent, or the metric with four digits."""
    return f"{row.accuracy:.4g}" if row.own_metric else f"{100 * row.accuracy:.2f}{unit}"


def against(row: Row, other: Row) -> str:
    """How much better or worse a network is than another one: in points, or in the metric's own unit.

    In words where little is good: with a sign an error that grew would look like a gain.
    """
    if math.isnan(row.accuracy) or math.isnan(other.accuracy):
        return f"not comparable with {other.name}"
    difference = 0.0 if row.accuracy == other.accuracy else row.accuracy - other.accuracy  # also of two infinite ones
    if row.lower_is_better:
        word = "better" if difference < 0 else "worse"
        return f"{abs(difference):.4g} {word} than {other.name}" if difference else f"as good as {other.name}"
    gap = f"{difference:+.4g}" if row.own_metric else f"{100 * difference:+.2f} points"
    return f"{gap} against {other.name}"


def score_name(rows: Sequence[Row]) -> str:
    """What the column is called."""
    if any(row.lower_is_better for row in rows):
        return "metric (lower is better)"
    return "metric" if any(row.own_metric for row in rows) else "accuracy"


def results_table(rows: Sequence[Row], graph: ChannelGraph, origin: str = "") -> str:
    """Rows as aligned text, and below it what they mean; `graph` is of the unpruned network.

    origin: where the weights of the pruned one come from, in words.
    """
    lines = _cells(rows, graph, "%")
    widths = [max(map(len, column)) + 3 for column in zip(*lines, strict=True)]
    text = [
        "".join(f"{cell:>{width}}" if place else f"{cell:<{width}}" for place, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join([*text, "", *notes(rows, graph, origin)])


def markdown(rows: Sequence[Row], graph: ChannelGraph, origin: str = "") -> list[str]:
    """The same as the lines of a Markdown file."""
    head, *rest = _cells(rows, graph, " %")
    lines = [["network", *head[1:]], ["---", *["---:"] * (len(head) - 1)], *rest]
    told = notes(rows, graph, origin)
    return [*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {note}" for note in told)]


def _cells(rows: Sequence[Row], graph: ChannelGraph, unit: str) -> list[list[str]]:
    """The table as texts, its first line the names of the columns."""
    macs, params = graph.macs(), graph.params()
    head = ["", "MACs", "share", "params", "share", score_name(rows), f"ms per {rows[0].batch}"]
    shares = [[f"{100 * part / whole:.1f}{unit}" for part, whole in _of(row, macs, params)] for row in rows]
    return [head] + [
        [row.name, f"{row.macs:,}", one, f"{row.params:,}", other, score(row, unit), f"{row.ms:.2f}"]
        for row, (one, other) in zip(rows, shares, strict=True)
    ]


def _of(row: Row, macs: int, params: int) -> list[tuple[int, int]]:
    return [(row.macs, macs or 1), (row.params, params or 1)]


def notes(rows: Sequence[Row], graph: ChannelGraph, origin: str = "") -> list[str]:
    """What a reader of the table should know: what the shares are of, what was gained, and how sure that is."""
    found = [f"shares are of the unpruned network: {graph.macs():,} MACs, {graph.params():,} params"]
    found += [origin] if origin else []
    ours = next((row for row in rows if row.name == DMCP), None)
    others = [row for row in rows if row is not ours]
    if ours and others:
        found.append(f"{DMCP}: {', '.join(against(ours, other) for other in others)}")
    found += unknown(rows)
    if rows[0].samples and not rows[0].own_metric:
        points = 100 * max(standard_error(row.accuracy, row.samples) for row in rows)
        sure = f"an accuracy is known to \N{PLUS-MINUS SIGN} {points:.1f} points (standard error)"
        found.append(f"{rows[0].samples:,} test samples: {sure}")
    elif rows[0].samples:
        found.append(f"{rows[0].samples:,} test samples")
    if rows[0].batch:
        found.append(f"ms: the fastest of {ROUNDS} passes over a batch of {rows[0].batch} on this machine")
    return found


def unknown(rows: Sequence[Row]) -> list[str]:
    """A sentence about each network whose metric is no number."""
    what = "so nobody knows how good it is; look at the metric and at the outputs"
    return [f"{row.name}: its metric is {row.accuracy}, {what}" for row in rows if math.isnan(row.accuracy)]


def poor_teacher(teacher: Row, given: Row | None, classes: int) -> str:
    """A sentence about a teacher that guesses, or that is worse than the network as given; empty otherwise.

    given: the network that goes on from the weights it has; None where it does not, or is the teacher itself.
    classes: that one could guess from.
    """
    chance = 1 / max(classes, 1)
    if not teacher.own_metric and teacher.accuracy <= chance + _GUESSED * (1 - chance):
        guess = f"{classes} classes: guessing gives {100 * chance:.3g}%"
        right = f"The teacher is right on {score(teacher)} of the test data ({guess})"
        return f"{right}: was it trained, and are its classes in the same order?"
    gain = 0.0 if given is None else teacher.accuracy - given.accuracy
    if given is None or not (gain > 0 if teacher.lower_is_better else gain < 0):
        return ""
    if not teacher.own_metric and teacher.samples:  # else nobody knows what chance alone may do
        gap = math.hypot(*(standard_error(row.accuracy, row.samples) for row in (teacher, given)))
        if -gain <= 2 * gap:
            return ""
    what = "a metric" if teacher.own_metric else "an accuracy"
    return (
        f"The teacher has {what} of {score(teacher)}, the network as given of {score(given)}: learning from it may "
        "harm more than it helps."
    )


def standard_error(share: float, count: int) -> float:
    """Of a share of right answers among so many: sqrt(p (1 - p) / n).

    Where none or all are right the formula says 0, though nobody can be that sure: there it is about one sample.
    """
    edge = 1 / (count + 2)
    share = min(max(share, edge), 1 - edge)
    return math.sqrt(share * (1 - share) / count)


def not_faster(ms: float, unpruned_ms: float, graph: ChannelGraph, widths: Mapping[str, int]) -> str:
    """A sentence about a pruned network that gains no time and has widths that may be why; empty otherwise."""
    if ms < _SLOW * unpruned_ms or not mostly_odd(graph, widths):
        return ""
    wanted = f"most widths are no multiples of {_WANTED}, which many runtimes need"
    return f"Not faster here: {wanted}; dmcp prune --align {_WANTED} gives such."


def mostly_odd(graph: ChannelGraph, widths: Mapping[str, int]) -> bool:
    """Whether more than half of the spaces that were narrowed have a width that runtimes do not like."""
    narrowed = [widths[it.name] * it.unit for it in graph.spaces if widths[it.name] < it.size]
    return sum(width % _WANTED > 0 for width in narrowed) > len(narrowed) / 2


def divergence(name: str, losses: Sequence[float]) -> str:
    """A sentence about a training whose loss ended higher than it began; empty if it did not.

    The end is the mean of the last tenth. Inherited weights may be as good at the beginning as at the end, and the
    loss of one batch is not that of another: a little higher is no sign.
    """
    if len(losses) < _LONG:
        return ""
    tenth = len(losses) // 10
    first, last = min(losses[0], fmean(losses[:tenth])), fmean(losses[-tenth:])
    if not last > first + _RISE * abs(first):
        return ""
    return (
        f"The training of {name!r} went wrong: its loss was {first:.4g} at the first step and {last:.4g} at the end; a "
        "smaller learning rate (--lr, in Python lr of the TrainConfig) often helps."
    )


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
    times = milliseconds(list(nets.values()), example)
    rows: list[Row] = []
    for (name, net), ms in zip(nets.items(), times, strict=True):
        macs = graph.macs(widths.get(name, graph.full))
        accuracy, samples = _test(net, val_loader, task.metric)
        rows.append(
            Row(name, macs, count_params(net), accuracy, ms, size_of((example,)), samples, **_kind(task.metric))
        )
        runtime.emit("test", len(nets), rows[-1])
    return tuple(rows)


def test_copy(name: str, net: nn.Module, loader: Loader, metric: Metric | None) -> Row:
    """Test a copy of a network before anything is done, and leave no trace; its costs and times are not known."""
    with untouched(loader, device_of(net)):
        accuracy, samples = _test(narrow(unwrap(net), {}, {}), loader, metric)
    if metric is not None and (whole := whole_of(metric)) is not None:
        whole.reset()
    return Row(name, 0, 0, accuracy, samples=samples, **_kind(metric))


@torch.no_grad()
def milliseconds(nets: Sequence[nn.Module], example: Any, rounds: int = ROUNDS) -> list[float]:
    """Time of one batch: the fastest of some passes, taken in turn so that other load hits all networks alike."""
    times: list[list[float]] = [[] for _ in nets]
    waits = [_waiting(net) for net in nets]  # found now: looking for it takes as long as a small network
    for number in range(rounds + 1):
        for net, wait, own in zip(nets, waits, times, strict=True):
            with kept_modes(net):
                net.eval()
                wait()
                start = time.perf_counter()
                call_model(net, example)
                wait()
                took = time.perf_counter() - start
            if number:  # the first pass also loads kernels
                own.append(1000 * took)
    return [min(own) for own in times]


def _waiting(net: nn.Module) -> Callable[[], None]:
    """What waits for the network's device; nothing where torch cannot: a table of hours is not lost for its times."""
    try:
        return waiting(device_of(net))
    except AttributeError:
        return lambda: None


def count_params(net: nn.Module) -> int:
    """Parameters of a network, tied ones once."""
    return sum(parameter.numel() for parameter in net.parameters())
