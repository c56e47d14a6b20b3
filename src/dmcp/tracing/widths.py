"""ChannelSpace and Widths: channels that are kept or dropped together, and how many of each are kept."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dmcp.errors import WidthsError

if TYPE_CHECKING:  # torch takes seconds to import, and a list of runs needs no tensors
    from torch import Tensor, nn

_MANY_WIDTHS = 8  # of a space, so that a search has a choice
_FEW_WIDTHS = 2


@dataclass(frozen=True)
class ChannelSpace:
    """Channels that are kept or dropped together."""

    name: str  # the first layer that writes it
    size: int  # channels (for whole groups of a grouped layer: groups)
    writers: tuple[str, ...] = ()  # layers whose output channels live in it
    readers: tuple[str, ...] = ()  # layers that take it as input channels
    unit: int = 1  # real channels of each one, in the layer with the fewest: more than 1 where whole groups are kept
    multiple: int = 16  # of real channels that is fast, for widths of wide layers: 16 is on most processors
    block: int = 1  # multiple that even narrow layers need, since a device is slow at others: see Latency.attach

    def step(self, align: int | None) -> int:
        """The smallest difference between two widths, if real channels are to be multiples of `align`.

        None chooses the largest of `multiple`, its half, its quarter, ... and 1 that leaves at least eight widths, or
        of `block`, its half, ... that leaves two, if that is more.
        """
        if align is None:
            return max(self._step(self.multiple, _MANY_WIDTHS), self._step(self.block, _FEW_WIDTHS))
        if not isinstance(align, int) or align < 1:
            raise WidthsError(f"align must be an int of at least 1, not {align!r}.")
        return align // math.gcd(align, self.unit)

    def _step(self, multiple: int, count: int) -> int:
        """The step for the largest of a power of two, its half, ... that leaves so many widths; else 1."""
        while multiple > 1:
            step = multiple // math.gcd(multiple, self.unit)
            if self.size >= count * step:
                return step
            multiple //= 2
        return 1


class Dim(NamedTuple):
    """A dim of a tensor whose size follows from widths: a sum of products of fixed sizes and widths, by space name."""

    tensor: str
    dim: int
    parts: tuple[tuple[int | str, ...], ...]

    def size(self, widths: Mapping[str, int]) -> int:
        """How long the dim is at these widths."""
        length = 0
        for part in self.parts:
            length += math.prod(widths[axis] if isinstance(axis, str) else axis for axis in part)
        return length


@dataclass(frozen=True, eq=False)
class Widths(Mapping[str, int]):
    """How many channels each space keeps, and for which architecture."""

    channels: tuple[tuple[str, int], ...]  # (space name, channels kept), in the graph's order
    input_shape: Any  # shape of one sample, nested like the model's input
    fingerprint: str  # of the unpruned architecture, see fingerprint()
    dims: tuple[Dim, ...] = field(default=(), repr=False)  # dims that have these widths; none if read from a file

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
        import torch

        return torch.tensor([kept for _, kept in self.channels], dtype=torch.int64)

    def to_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` turns back into the same value."""
        return {"widths": dict(self.channels), "input_shape": self.input_shape, "fingerprint": self.fingerprint}

    @staticmethod
    def from_json(data: Any) -> Widths:
        """Read what `to_json` wrote. Anything else raises a WidthsError."""
        is_ours = isinstance(data, dict) and {"widths", "input_shape", "fingerprint"} <= data.keys()
        if not is_ours or not isinstance(data["widths"], dict):
            raise WidthsError(
                "This is not a widths file: it has no widths, input shape and fingerprint of a network. "
                "dmcp.save and the runs of dmcp write such files (widths.json)."
            )
        channels = tuple(data["widths"].items())
        input_shape = data["input_shape"]
        architecture = data["fingerprint"]
        for name, kept in channels:
            if not isinstance(name, str) or type(kept) is not int or kept < 1:
                raise WidthsError(f"This is not a widths file: the width of {name!r} must be an int of at least 1.")
        if not isinstance(architecture, str):
            raise WidthsError(f"This is not a widths file: its fingerprint must be a string, not {architecture!r}.")
        return Widths(channels, tuples(input_shape), architecture)


def tuples(nested: Any) -> Any:
    """The same shapes with tuples in place of the lists that JSON has."""
    if isinstance(nested, dict):
        return {key: tuples(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return tuple(tuples(item) for item in nested)
    return nested


def fingerprint(model: nn.Module) -> str:
    """A short hash of the names and shapes of all parameters and buffers: of the architecture, not of the weights."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    text = json.dumps(sorted((name, list(tensor.shape)) for name, tensor in tensors))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
