"""Timing: how long networks and files take, in torch and in onnxruntime."""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp.errors import BudgetError, DmcpError
from dmcp.exporting.export import blaming, open_file, random_like, silence
from dmcp.runtime.cuda_graphs import capture
from dmcp.runtime.engine import in_channels_last
from dmcp.runtime.progress import phase
from dmcp.settings import LatencyConfig, LatencyMode, RuntimeKind
from dmcp.tracing.modules import batch_of, call_model, map_leaves, rebatch, tensors_in, without_autocast

Measure = Callable[[nn.Module], float]  # a network in eval mode -> milliseconds of a forward pass
_MAX_ROUNDS = 30  # turns that networks take
_MIN_ROUNDS = 5  # turns that they take even if it is late
_MAX_SECONDS = 30.0
_PASSES = 3  # of a turn that are timed
_FAST = 10  # one pass in ten counts as a fast one
_GPU_PASS = 5e-3  # seconds of a timed pass on a GPU: shorter calls are repeated in a row, since waiting takes time, too
_MOST_NETWORKS = 1 << 30  # that torch.compile takes before it would run further ones eagerly
_RESOLUTION = 1e-6  # seconds that a clock must tell apart
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Timer:
    """Times networks: on this machine, or by a user's function."""

    config: LatencyConfig  # with a device
    threads: int
    example: Any
    measure: Measure | None = None

    def times(self, nets: Iterable[nn.Module]) -> list[float]:
        """Return the milliseconds of a forward pass of each network. They must be copies, since they are moved."""
        if self.measure is not None:
            return _times_of_user(self.measure, nets)

        device = torch.device(self.config.device)
        dtype = getattr(torch, self.config.dtype)
        in_onnx = self.config.runtime == RuntimeKind.ONNX
        example = self.example
        if batch_of(example) is not None:
            example = rebatch(example, self.config.batch)

        setting = f"{device} with a batch of {self.config.batch} in {self.config.dtype}"
        with contextlib.ExitStack() as stack:
            stack.enter_context(blaming(f"The latency cannot be measured on {setting}", DmcpError))
            stack.enter_context(torch.inference_mode(not in_onnx))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))

            def move(tensor: Tensor) -> Tensor:
                tensor = tensor.to(device, dtype if tensor.is_floating_point() else None)
                return in_channels_last(tensor) if self.config.channels_last else tensor

            example = tree_map_only(Tensor, move, example)
            calls: list[Callable[[], object]] = []
            for net in nets:
                net = net.to(device=device, dtype=dtype).eval()
                if in_onnx:
                    calls.append(_session(net, example, self.threads))
                    continue
                if self.config.channels_last:
                    for parameter in net.parameters():
                        parameter.data = in_channels_last(parameter.data)
                calls.append(forward_pass(net, example, self.config.mode, device))
            return time_in_turns(calls, device, self.threads)


def _times_of_user(measure: Measure, nets: Iterable[nn.Module]) -> list[float]:
    """Call a user's function, and check what it returns."""
    results = [measure(net.eval()) for net in nets]
    try:
        times = [float(ms) for ms in results]
    except (TypeError, ValueError, RuntimeError):
        kind = type(results[0]).__name__
        raise BudgetError(f"The latency function must return milliseconds above 0, not a {kind}.") from None
    if not all(0 < ms < math.inf for ms in times):
        raise BudgetError(f"The latency function must return milliseconds above 0, not {times}.")
    return times


def device_name(device: str) -> str:
    """Return the name of a GPU, or the model of a CPU."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    if kind != "cpu":
        return kind

    description = Path("/proc/cpuinfo")
    if description.exists():
        text = description.read_text(errors="replace")
        line = re.search(r"^(?:model name|Model)\s*:\s*(\S.*)$", text, re.MULTILINE)
        if line:
            return line[1].strip()
    return platform.processor() or platform.machine() or "a CPU"


# networks in torch


def resolve_mode(config: LatencyConfig) -> LatencyConfig:
    """Choose what the settings leave open for their device; DmcpError if the device cannot run the mode."""
    on_gpu = torch.device(config.device).type == "cuda"
    mode = config.mode
    if mode is None:
        mode = LatencyMode.CAPTURED if on_gpu else LatencyMode.EAGER
    if mode is LatencyMode.CAPTURED and not on_gpu:
        raise DmcpError(f"CUDA graphs need a CUDA device: on {config.device} measure eager or compiled.")
    if config.runtime == RuntimeKind.ONNX and (mode is not LatencyMode.EAGER or config.channels_last):
        raise DmcpError("A mode and a memory format are torch's: leave them out for onnxruntime, or measure in torch.")
    channels_last = on_gpu if config.channels_last is None else config.channels_last
    return replace(config, mode=mode, channels_last=channels_last)


def forward_pass(net: nn.Module, example: Any, mode: LatencyMode | None, device: torch.device) -> Callable[[], object]:
    """Return a forward pass of a network, on the current device, as it will be deployed.

    A compiled network is compiled here. On a GPU it is captured as well, as mode="reduce-overhead" would do.
    """
    if mode is LatencyMode.COMPILED:
        net.compile(dynamic=False)
    call = functools.partial(call_model, net, example)
    if mode is LatencyMode.COMPILED:
        # torch counts how often a class is compiled, and would run further networks eagerly.
        limits = {"recompile_limit": _MOST_NETWORKS, "accumulated_recompile_limit": _MOST_NETWORKS}
        with torch._dynamo.config.patch(limits):
            call()
    if mode in (LatencyMode.CAPTURED, LatencyMode.COMPILED) and device.type == "cuda":
        return capture(call)
    return call


# networks in onnxruntime


def _session(net: nn.Module, example: Any, threads: int) -> Callable[[], object]:
    """Return a forward pass of a network, in eval mode, in onnxruntime."""
    with tempfile.TemporaryDirectory(prefix="dmcp-") as folder:
        path = Path(folder) / "net.onnx"
        write_quickly(net, example, path)
        return functools.partial(open_file(path, threads).run, example)


@torch.no_grad()
def write_quickly(net: nn.Module, example: Any, path: Path) -> None:
    """Write a network in eval mode to an ONNX file whose batch size is fixed: a free one would cost time.

    torch's older exporter writes it: for 40 networks it takes minutes less than the one that `export` uses.
    """
    flat = _FlatNetwork(net, example).eval()
    with silence():
        torch.onnx.export(flat, tuple(tensors_in(example)), path, dynamo=False)


class _FlatNetwork(nn.Module):
    """A network that takes and returns a flat list of tensors."""

    def __init__(self, net: nn.Module, example: Any) -> None:
        super().__init__()
        self.net = net
        self.example = example

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        upcoming = iter(tensors)
        inputs = map_leaves(lambda leaf: next(upcoming) if isinstance(leaf, Tensor) else leaf, self.example)
        return tuple(tensors_in(call_model(self.net, inputs)))


@without_autocast
@torch.no_grad()
def time_files(paths: Sequence[Path], example: Any) -> list[float]:
    """Return the milliseconds of one sample in each file, on one thread of the CPU.

    With more threads, idle ones of one file would disturb the others.
    """
    sample = random_like(example, 1)
    return time_in_turns([functools.partial(open_file(path, threads=1).run, sample) for path in paths])


# the clock


def time_in_turns(
    calls: Sequence[Callable[[], object]], device: torch.device = _CPU, threads: int = 1, rounds: int = _MAX_ROUNDS
) -> list[float]:
    """Return the typical milliseconds of each call: those of its fast passes, times one factor for all calls.

    The calls take turns, so that a machine that is slow for a while is slow for all of them. Fast passes are hardly
    disturbed by other programs. The factor is how much longer a typical pass takes than a fast one. On a GPU, a pass
    is several calls in a row.
    """
    now = _clock(device, threads)
    times: list[list[float]] = [[] for _ in calls]
    repeats = [1 for _ in calls]
    start = time.perf_counter()
    with phase("timing", rounds + 1) as update, _threads(threads):
        for turn in range(rounds + 1):
            is_late = time.perf_counter() - start > _MAX_SECONDS
            if is_late and turn > _MIN_ROUNDS:
                break
            for index, call in enumerate(calls):
                for number in range(_PASSES + 1):
                    synchronize(device)
                    before = now()
                    for _ in range(repeats[index]):
                        call()
                    synchronize(device)
                    seconds = (now() - before) / repeats[index]
                    # The first turn loads kernels, and the first pass of each turn warms caches.
                    if turn > 0 and number > 0:
                        times[index].append(1000 * seconds)
                if turn == 0 and device.type != "cpu":
                    repeats[index] = math.ceil(_GPU_PASS / seconds)
            update(turn + 1)
        update(rounds + 1)

    fast = [sorted(call_times)[len(call_times) // _FAST] for call_times in times]
    factor = median(median(call_times) / fast_ms for call_times, fast_ms in zip(times, fast, strict=True))
    return [factor * fast_ms for fast_ms in fast]


def _clock(device: torch.device, threads: int) -> Callable[[], float]:
    """Return a clock: that of this thread if it does all of the work, else a wall clock.

    The clock of a thread stops while other programs use the processor, but on some systems it is coarse.
    """
    is_fine = time.get_clock_info("thread_time").resolution <= _RESOLUTION
    if device.type == "cpu" and threads == 1 and is_fine:
        return time.thread_time
    return time.perf_counter


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use this number of threads during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was queued on it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
