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

_WARM = 3  # calls before the capture, in which kernels are loaded and tuned
_MOST_GRAPHS = 2  # per step: the usual batch, and the last one of an epoch


class Repeated:
    """A step that is captured as a CUDA graph once for each shape of its inputs, then replayed.

    The first calls run eagerly, on a side stream as capturing requires; so do further shapes, and steps that cannot be
    captured because they wait for the GPU. Outputs are copied, since the next replay overwrites them.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.seen: dict[Hashable, int] = {}
        self.graphs: dict[Hashable, _Graph] = {}
        self.refused: str = ""  # why no graph is used

    def __call__(self, *inputs: Any) -> Any:
        leaves, spec = tree_flatten(inputs)
        key = _key(leaves, spec)
        if self.refused or key is None:
            return self.step(*inputs)
        if key in self.graphs:
            return self.graphs[key].replay(leaves)
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] <= _WARM or len(self.graphs) == _MOST_GRAPHS:
            return self._run_aside(inputs)
        try:
            self.graphs[key] = self._capture(leaves, spec)
        except Exception as error:  # whatever it is: the step still works without a graph
            self.refused = f"{type(error).__name__}: {error}".splitlines()[0]
        return self(*inputs)  # here, where an error no longer keeps the tensors of the capture alive

    def _run_aside(self, inputs: Sequence[Any]) -> Any:
        stream, main = _side_stream(torch.cuda.current_device()), torch.cuda.current_stream()
        stream.wait_stream(main)
        host = _host_random()
        with torch.cuda.stream(stream):
            out = self.step(*inputs)
        main.wait_stream(stream)
        if host != _host_random():
            self.refused = "the step draws random numbers on the host, which a graph would not repeat"
        return out

    def _capture(self, leaves: Sequence[Any], spec: Any) -> _Graph:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        global _pool
        if not _alive:  # the memory of a pool goes with the last graph in it
            _pool = torch.cuda.graph_pool_handle()
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.synchronize()
        try:
            stream, others = _side_stream(torch.cuda.current_device()), "thread_local"  # other threads make batches
            with torch.cuda.graph(graph, pool=_pool, stream=stream, capture_error_mode=others):
                out = self.step(*tree_unflatten(static, spec))
        except Exception:
            _tidy(graph, main)
            raise
        captured = _Graph(graph, static, out)
        _alive.add(captured)
        return captured


@dataclass(frozen=True, eq=False)
class _Graph:
    graph: Any
    inputs: list[Any]
    out: Any

    def replay(self, leaves: Sequence[Any]) -> Any:
        for own, given in zip(self.inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given, non_blocking=True)
        self.graph.replay()
        return tree_map_only(Tensor, torch.clone, self.out)


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
    number, whole = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(whole, stream=_side_stream(device), capture_error_mode="thread_local"):
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
    if not all(leaf.is_cuda if isinstance(leaf, Tensor) else isinstance(leaf, Hashable) for leaf in leaves):
        return None
    facts = [(it.shape, it.dtype, it.stride(), it.requires_grad) if isinstance(it, Tensor) else it for it in leaves]
    return str(spec), *facts
