"""Steps that are captured once as CUDA graphs and replayed."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

_WARM = 3  # times that a step is run before it is captured: kernels are loaded and tuned in them
_MOST_GRAPHS = 2  # per step: the usual batch, and the last one of an epoch


class Repeated:
    """A step that is called again and again with tensors of the same shapes: captured once, then replayed.

    The first calls run as they are, on a stream of their own as capturing wants it. A call with other shapes, or a
    step that cannot be captured (it asks the GPU for a number), runs as it is, too. What the step returns is copied,
    since the next replay writes to the same place.
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
            return self._aside(inputs)
        try:
            self.graphs[key] = self._capture(leaves, spec)
        except Exception as error:  # whatever stops a capture: the step still works without
            self.refused = (str(error).splitlines() or [type(error).__name__])[0]
        else:
            return self.graphs[key].replay(leaves)
        return self.step(*inputs)  # here, where the error no longer holds what the capture has made

    def _aside(self, inputs: Sequence[Any]) -> Any:
        stream, main = _side_stream(), torch.cuda.current_stream()
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
            with torch.cuda.graph(graph, pool=_pool, stream=_side_stream()):
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
_failed: list[Any] = []  # graphs that torch's allocator for pinned memory may still ask which capture is theirs
_streams: dict[int, torch.cuda.Stream] = {}


def _tidy(graph: Any, main: torch.cuda.Stream) -> None:
    """Undo what torch 2.11 leaves behind when a capture fails; newer ones do some of it themselves.

    Its stream would stay the current one. Its pool would stay open and taken, and what other streams have read would
    never be free again. The generator of the GPU would stay inside the capture, and the next dropout raise, as would
    the next replay: a capture that ends well takes it out.
    """
    global _pool
    torch.cuda.set_stream(main)
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # torch has closed the pool: it is newer, or the step itself has raised
        torch._C._cuda_endAllocateToPool(device, _pool)
        _failed.append(graph)
        torch._C._cuda_releasePool(device, _pool)
    _pool = torch.cuda.graph_pool_handle()
    number, whole = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(whole, stream=_side_stream(), capture_error_mode="thread_local"):
            number.add_(1)
    finally:
        torch.cuda.set_stream(main)


def _side_stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def _host_random() -> tuple[Any, ...]:
    """Where the generators of the host are."""
    _, numbers, *rest = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(numbers).tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def _key(leaves: Sequence[Any], spec: Any) -> Hashable | None:
    """What must be the same for a graph to be replayed; None where a leaf cannot be compared or is not on the GPU."""
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
