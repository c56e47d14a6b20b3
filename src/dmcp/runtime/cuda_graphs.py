"""Training steps as CUDA graphs: captured once, then replayed with one launch."""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dmcp.errors import DmcpError

_WARM_CALLS = 3  # before the capture: kernels are loaded and tuned
_MOST_GRAPHS = 2  # per step: the usual batch, and the last one of an epoch


class Repeated:
    """A step that is captured as a CUDA graph once for each shape of its inputs, then replayed.

    The first calls run eagerly, on a side stream as capturing requires. So do further shapes, and steps that cannot be
    captured because they wait for the GPU. Outputs are copied, since the next replay overwrites them.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.seen: dict[Hashable, int] = {}
        self.graphs: dict[Hashable, _Graph] = {}
        self.refused = ""  # the reason why no graph is used

    def __call__(self, *inputs: Any) -> Any:
        leaves, spec = tree_flatten(inputs)
        key = _key(leaves, spec)
        if self.refused or key is None:
            return self.step(*inputs)
        if key in self.graphs:
            return self.graphs[key].replay(leaves)
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] <= _WARM_CALLS or len(self.graphs) == _MOST_GRAPHS:
            return self._run_aside(inputs)
        try:
            self.graphs[key] = self._capture(leaves, spec)
        except Exception as error:  # whatever it is: the step still works without a graph
            self.refused = f"{type(error).__name__}: {error}".splitlines()[0]
        return self(*inputs)  # here, where an error no longer keeps the tensors of the capture alive

    def _run_aside(self, inputs: Sequence[Any]) -> Any:
        """Run the step on the side stream, and note whether it draws random numbers on the host."""
        main = torch.cuda.current_stream()
        stream = _side_stream(torch.cuda.current_device())
        stream.wait_stream(main)
        random_before = _host_random()
        with torch.cuda.stream(stream):
            out = self.step(*inputs)
        main.wait_stream(stream)
        if random_before != _host_random():
            self.refused = "the step draws random numbers on the host, which a graph would not repeat"
        return out

    def _capture(self, leaves: Sequence[Any], spec: Any) -> _Graph:
        global _pool
        if not _alive:  # the memory of a pool goes with the last graph in it
            _pool = torch.cuda.graph_pool_handle()
        inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        main = torch.cuda.current_stream()
        stream = _side_stream(torch.cuda.current_device())
        torch.cuda.synchronize()
        try:
            # thread_local: other threads make batches meanwhile
            with torch.cuda.graph(graph, pool=_pool, stream=stream, capture_error_mode="thread_local"):
                out = self.step(*tree_unflatten(inputs, spec))
        except Exception:
            _tidy(graph, main)
            raise
        captured = _Graph(graph, inputs, out)
        _alive.add(captured)
        return captured


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured step, with the tensors that it reads and writes."""

    graph: Any
    inputs: list[Any]
    out: Any

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Run the graph on these inputs; a copy of its outputs."""
        for static, leaf in zip(self.inputs, leaves, strict=True):
            if isinstance(static, Tensor):
                static.copy_(leaf, non_blocking=True)
        self.graph.replay()
        return tree_map_only(Tensor, torch.clone, self.out)


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A step without inputs as a CUDA graph: a call is one launch, and the outputs are those of the graph itself."""

    step: Callable[[], Any]  # keeps the tensors alive that the graph reads
    graph: _Graph

    def __call__(self) -> Any:
        self.graph.graph.replay()
        return self.graph.out


def capture(step: Callable[[], Any]) -> CapturedStep:
    """Capture a step on the current device, after its warm-up; DmcpError if it cannot be captured."""
    repeated = Repeated(step)
    while not repeated.graphs and not repeated.refused:
        repeated()
    if repeated.refused:
        raise DmcpError(f"The network cannot be captured as a CUDA graph ({repeated.refused}).")
    (graph,) = repeated.graphs.values()
    return CapturedStep(step, graph)


_pool: Any = None  # memory that all graphs share: only one of them runs at a time
_alive: weakref.WeakSet[_Graph] = weakref.WeakSet()
_failed: list[Any] = []  # kept alive: torch's allocator of pinned memory may still ask for their capture


def _tidy(graph: Any, main: torch.cuda.Stream) -> None:
    """Undo what torch 2.11 leaves behind when a capture fails; newer versions do some of it themselves.

    The stream of the capture would stay current. Its memory pool would stay open, and memory that other streams have
    read would never be freed. The GPU's generator would stay in the capture, and the next dropout or replay would
    raise: a capture that succeeds releases it.
    """
    global _pool
    torch.cuda.set_stream(main)
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the pool is closed: a newer torch, or an error of the step itself
        torch._C._cuda_endAllocateToPool(device, _pool)
        _failed.append(graph)
        torch._C._cuda_releasePool(device, _pool)
    _pool = torch.cuda.graph_pool_handle()
    number = torch.zeros((), device="cuda")
    graph_that_succeeds = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph_that_succeeds, stream=_side_stream(device), capture_error_mode="thread_local"):
            number.add_(1)
    finally:
        torch.cuda.set_stream(main)


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _host_random() -> tuple[Any, ...]:
    """The states of the host's random generators."""
    _, numbers, *rest = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(numbers).tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def _key(leaves: Sequence[Any], spec: Any) -> Hashable | None:
    """What must be equal for a graph to be replayed; None where a leaf cannot be compared or is not on the GPU."""
    parts: list[Hashable] = [str(spec)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not leaf.is_cuda:
                return None
            parts.append((leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad))
        elif isinstance(leaf, Hashable):
            parts.append(leaf)
        else:
            return None
    return tuple(parts)
