"""Time and memory of a step, on any device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def now() -> float:
    """Seconds since some moment: only differences mean something."""
    return time.perf_counter()


def median_ms(step: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Milliseconds of a step, the median over rounds.

    A round is a few steps in a row, as in training, where the host goes ahead of the device.
    """
    warm, few = (5, 5) if device.type == "cuda" else (1, 1)
    for _ in range(warm):  # also captures graphs
        step()
    times = [seconds(lambda: [step() for _ in range(few)], device) / few for _ in range(rounds)]
    return 1000 * statistics.median(times)


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """How long it takes, until the device is done."""
    _wait(device)
    start = now()
    step()
    _wait(device)
    return now() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def clean(device: torch.device, compiled: bool = False) -> int:
    """Give back what earlier networks took, and start counting the peak anew; bytes that are still in use."""
    if compiled:
        torch.compiler.reset()  # it keeps a few variants of each function only, and others would run as they are
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # also the memory of graphs that are gone, without which no new one can be captured
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_gib(device: torch.device, before: int) -> float | None:
    """Since the last cleaning, and so with warming up and capturing: replayed graphs do not count later."""
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30 if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """NVIDIA H200, or the kind of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
