"""Where forward turns a tensor into a Python value: what is read, how, and on which line of whose code."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Ways out of torch that are no op; the others end in one that gives no tensor.
READERS: dict[Any, str] = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = {str(Path(__file__).with_name(name)) for name in ("readings.py", "recording.py", "replay.py")}
_ENTRY = "call_model"  # above it on the stack is who traces, below it the model


@dataclass(frozen=True)
class Read:
    """Values of tensors that became Python's."""

    number: int  # of ops before it
    values: tuple[int, ...]  # the tensors, by the numbers of their values
    way: str  # like "item" or "numpy"
    place: str  # file and line, like "net.py:12"; empty where nobody's code is on the stack
    path: str  # the module that did it
    result: Any  # what came of it

    @property
    def where(self) -> str:
        """The place for people: a line of code, else a module."""
        return self.place or self.path or "the model"


def looks_at_values(func: torch._ops.OpOverload, result: Any) -> bool:
    """Whether an op that gave this, and no tensor, must have looked at values; others tell of dtypes or memory."""
    if result is None:
        return False
    if torch.Tag.data_dependent_output in func.tags or func.namespace != "aten":
        return True
    return func is torch.ops.aten.is_nonzero.default


def place() -> str:
    """The line of the model's code that is running; torch's own lines and ours are passed over."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _OURS:
            if code.co_name == _ENTRY:
                return ""
        elif not code.co_filename.startswith((_TORCH, "<")):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
