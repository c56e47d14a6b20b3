"""What networks reach on the test data, what they cost, and how fast they are here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dmcp import training
from dmcp.batches import Loader, check_parts, device_of, input_of, labels_of, on_device, peek, size_of
from dmcp.calibration import kept_modes
from dmcp.events import Event, Report, silent
from dmcp.given import classes_of
from dmcp.keeping import untouched
from dmcp.losses import Accuracy, LowerIsBetter, Metric, check_range, whole_of
from dmcp.ranks import current, sum_values
from dmcp.rows import ROUNDS, Row
from dmcp.slicing import narrow, unwrap
from dmcp.spaces import Widths
from dmcp.timing.stopwatch import waiting
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.recording import call_model


def compare(
    nets: dict[str, nn.Module],
    graph: ChannelGraph,
    widths: dict[str, Widths],
    val_loader: Loader,
    example: Any,
    metric: Metric | None = None,
    on_event: Report | None = None,
) -> tuple[Row, ...]:
    """Test all networks, and time them on one batch."""
    times = milliseconds(list(nets.values()), example)
    rows: list[Row] = []
    for (name, net), ms in zip(nets.items(), times, strict=True):
        macs = graph.macs(widths.get(name, graph.full))
        accuracy, samples = _test(net, val_loader, metric)
        rows.append(Row(name, macs, count_params(net), accuracy, ms, size_of((example,)), samples, **_kind(metric)))
        (on_event or silent)(Event("test", len(nets), rows[-1]))
    return tuple(rows)


def test_copy(name: str, net: nn.Module, loader: Loader, metric: Metric | None) -> Row:
    """Test a copy of a network before anything is done, and leave no trace; its costs and times are not known."""
    with untouched(loader, device_of(net)):
        accuracy, samples = _test(narrow(unwrap(net), {}, {}), loader, metric)
    if metric is not None and (whole := whole_of(metric)) is not None:
        whole.reset()
    return Row(name, 0, 0, accuracy, samples=samples, **_kind(metric))


def _kind(metric: Metric | None) -> dict[str, bool]:
    """What a row says of its metric."""
    return {"own_metric": metric is not None, "lower_is_better": isinstance(metric, LowerIsBetter)}


def _test(net: nn.Module, loader: Loader, metric: Metric | None) -> tuple[float, int]:
    """The metric and how many samples it is of; 0 where there is more than one answer per sample."""
    seen, own = 0, Accuracy() if metric is None else None

    def run(x: Any) -> Any:
        nonlocal seen
        seen += size_of((x,))
        return call_model(net, x)

    value = training.evaluate(net, loader, own or metric, run)
    total, given = sum_values(torch.tensor([seen, own.answers if own else 0]), current()).tolist()
    return value, total if metric is not None or total == given else 0


def try_test(model: nn.Module, loader: Loader, metric: Metric | None) -> None:
    """Test a copy of the model on one batch: what is wrong with loader or metric shows before hours of work."""
    whole = None if metric is None else whole_of(metric)
    with untouched(loader, device_of(model)):
        if whole is not None:
            check_parts(loader, current())
        batches = peek(loader)
        if batches is not None:
            try:
                for batch in batches if metric is None else ():
                    _check_labels(model, batch)
                _test(narrow(unwrap(model), {}, {}), batches, metric)
            finally:
                if whole is not None:
                    whole.reset()  # of this trial nothing is left


def _check_labels(model: nn.Module, batch: Any) -> None:
    """Refuse labels that the network has no output for; later they are only told of."""
    if classes := classes_of(model, on_device(input_of(batch), device_of(model))):
        check_range(labels_of(batch), classes)


def try_batch(model: nn.Module, loader: Loader | None) -> None:
    """Look at the first batch of a loader that is used later: one without an input is refused now."""
    if loader is not None:
        with untouched(loader, device_of(model)):
            for batch in peek(loader) or []:
                input_of(batch)


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
