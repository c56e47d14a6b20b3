"""ChannelSpace and Widths: channels that are kept or dropped together, and how many of each are kept."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmcp.errors import WidthsError


@dataclass(frozen=True)
class ChannelSpace:
    """Channels that are kept or dropped together."""

    name: str  # the first layer that writes it
    size: int  # channels (for whole groups of a grouped layer: groups)
    writers: tuple[str, ...] = ()  # layers whose output channels live in it
    readers: tuple[str, ...] = ()  # layers that take it as input channels
    unit: int = 1  # real channels of each, in the layer that has fewest: more than 1 where whole groups are kept

    def step(self, align: int | None) -> int:
        """How much widths differ at least if real channels are to be multiples of `align`.

        None: of 16, which processors like, or of 8, 4, 2 or 1, so that at least eight widths are left.
        """
        if align is not None and not (isinstance(align, int) and align >= 1):
            raise WidthsError(f"align must be an int from 1 up, not {align!r}.")
        steps = [it // math.gcd(it, self.unit) for it in ((16, 8, 4, 2) if align is None else (align,))]
        return steps[0] if align else next((step for step in steps if self.size >= 8 * step), 1)


class Dim(NamedTuple):
    """A dim of a tensor whose size follows from widths: a sum of products of fixed sizes and widths, by space name."""

    tensor: str
    dim: int
    parts: tuple[tuple[int | str, ...], ...]

    def size(self, widths: Mapping[str, int]) -> int:
        """How long it is at these widths."""
        return sum(math.prod(widths[axis] if isinstance(axis, str) else axis for axis in part) for part in self.parts)


@dataclass(frozen=True, eq=False)
class Widths(Mapping[str, int]):
    """How many channels each space keeps, and for which architecture."""

    channels: tuple[tuple[str, int], ...]  # (space name, channels kept), in the graph's order
    input_shape: Any  # shape of one sample, nested like the model's input
    fingerprint: str  # of the unpruned architecture, see fingerprint()
    dims: tuple[Dim, ...] = field(default=(), repr=False)  # where a network shows them; read from a file there are none

    def __getitem__(self, name: str) -> int:
        return dict(self.channels)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.channels)

    def __len__(self) -> int:
        return len(self.channels)

    def __eq__(self, other: object) -> bool:
        """Equal channels for the same architecture; a plain mapping is compared by its items."""
        if isinstance(other, Widths):
            return (self.channels, self.fingerprint) == (other.channels, other.fingerprint)
        return Mapping.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((self.channels, self.fingerprint))

    def tensor(self) -> Tensor:
        """The widths in the graph's order. -> (S,) int64"""
        return torch.tensor([kept for _, kept in self.channels], dtype=torch.int64)

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into the same value."""
        return {"widths": dict(self.channels), "input_shape": self.input_shape, "fingerprint": self.fingerprint}

    @staticmethod
    def from_json(data: Any) -> Widths:
        """Read what `to_json` wrote; anything else is refused."""
        try:
            channels, shape, mark = data["widths"], data["input_shape"], data["fingerprint"]
            items = tuple((name, kept) for name, kept in channels.items())
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise WidthsError(f"This is not a widths file: {error} is missing or of the wrong kind.") from None
        valid = all(isinstance(name, str) and type(kept) is int and kept >= 1 for name, kept in items)
        if not isinstance(mark, str) or not valid:
            raise WidthsError("This is not a widths file: every width must be an int of at least 1.")
        return Widths(items, tuples(shape), mark)


def tuples(shape: Any) -> Any:
    """JSON has lists only; shapes are tuples."""
    if isinstance(shape, dict):
        return {key: tuples(value) for key, value in shape.items()}
    return tuple(map(tuples, shape)) if isinstance(shape, (list, tuple)) else shape


def fingerprint(model: nn.Module) -> str:
    """Short hash of the names and shapes of all parameters and buffers: the architecture, not the weights."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    text = json.dumps(sorted((name, list(tensor.shape)) for name, tensor in tensors))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
