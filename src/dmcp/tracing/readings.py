"""Where forward makes Python values or sizes out of values: what is read, how, and on which line of whose code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Ways out of torch that are no op; the others end in one that gives no tensor.
READERS: dict[Any, str] = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}

# Ops whose first tensor is chosen from: the others decide how much.
BY_MASK = {aten.index.Tensor, aten.masked_select.default, aten.repeat_interleave.self_Tensor}
# Made of ops that torch says have a size by values, which it does not say of them.
UNTAGGED = {aten.where.default, aten.nonzero_numpy.default, aten.repeat_interleave.self_Tensor}

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep  # the tracer: no model lives in its folder
_ENTRY = "call_model"  # above it on the stack is who traces, below it the model


@dataclass(frozen=True)
class Read:
    """Values of tensors that became Python's, or the size of another tensor."""

    number: int  # of ops before it
    values: tuple[int, ...]  # the tensors, by the numbers of their values
    way: str  # like "item" or "numpy"
    place: str  # file and line, like "net.py:12"; empty where nobody's code is on the stack
    path: str  # the module that did it
    result: Any = None  # what came of it, if it is Python's

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
    return func is aten.is_nonzero.default


def sizes_by_values(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the size of what an op gives follows from values: nonzero, unique, an index that is a mask."""
    if torch.Tag.dynamic_output_shape not in func.tags and func not in UNTAGGED:
        return False
    if func is aten.index.Tensor:
        return any(isinstance(it, Tensor) and it.dtype in (torch.bool, torch.uint8) for it in args[1])
    if func is aten.one_hot.default:  # as many classes as there are, unless their number is given
        return all(number < 0 for number in (*args[1:], *kwargs.values()))
    return True


def place() -> str:
    """The line of the model's code that is running; torch's own lines and ours are passed over."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            if code.co_name == _ENTRY:
                return ""
        elif not code.co_filename.startswith((_TORCH, "<")):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
