"""Runs that leave no trace: random states, global switches and the model itself are as they were before."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dmcp.errors import TraceError
from dmcp.tracing.modules import leaves, modules_of, no_autocast

ELSEWHERE = (
    "A lambda or hook of the model holds the model itself, so a copy would use the original. Make it a method instead."
)
SEED = 2**40 + 1  # of every recording and replay; with another one forward has seeded its random numbers itself


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses ops on tensors of a model, so that a run of its copy cannot change the model itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guarded = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._guarded.isdisjoint(map(id, leaves((args, kwargs)))):
            raise TraceError(ELSEWHERE)
        return func(*args, **kwargs)


_WORLD = threading.RLock()  # threads that trace wait for each other: random states and switches are everybody's


@contextlib.contextmanager
def untouched_world(device: str, original: nn.Module | None = None) -> Iterator[None]:
    """Restore random states and global switches at the end, and refuse a copy that changes attributes of the model."""
    attributes: list[dict[str, Any]] = []
    for module in modules_of(original) if original else ():
        attributes.append(vars(module))
        attributes += [item for item in vars(module).values() if type(item) is dict]
    attributes_before = [items.copy() for items in attributes]
    with _WORLD, contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # the fused kernel hides the layers inside it
        gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng(gpus))
        random.seed(0)  # every recording and replay has the same random numbers
        np.random.seed(0)
        torch.default_generator.manual_seed(SEED)
        stack.enter_context(no_autocast())
        if device == "meta":
            stack.enter_context(torch.device("meta"))
        try:
            yield
        finally:
            any_changed = False
            for now, before in zip(attributes, attributes_before, strict=True):
                if [id(item) for item in now.values()] != [id(item) for item in before.values()]:
                    any_changed = True
                    now.clear()
                    now.update(before)
            if any_changed:
                raise TraceError(ELSEWHERE)


@contextlib.contextmanager
def inert_autocast() -> Iterator[None]:
    """While entered, autocast in forward is off on every device, so that all recordings have the same ops.

    The meta device has none: there, torch refuses even to turn it off.
    """
    original = torch.autocast.__init__

    def turn_off(self: torch.autocast, *_: Any, **__: Any) -> None:
        original(self, "cpu", torch.bfloat16, enabled=False)

    torch.autocast.__init__ = turn_off  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
