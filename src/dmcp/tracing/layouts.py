"""A dim of a tensor written as a layout, in terms of channels that may be narrowed; and what such a layout says.

A layout is a concatenation of segments; a segment is a product of axes, outer to inner; an axis is a fixed size or an
atom, a set of channels that may be narrowed. A conv's output is [C], a concatenation [C][D], a flattened map [C x 49],
the result of a channel shuffle [C x 2].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Atom:
    """A set of channels that may be narrowed, by number."""

    index: int


Axis = int | Atom
Segment = tuple[Axis, ...]
Layout = tuple[Segment, ...]


def fixed(size: int) -> Layout:
    """A dim that nothing can narrow."""
    return ((size,),)


def tidy(segments: Sequence[Segment]) -> Layout:
    """Drop axes of size one, multiply and add neighbouring fixed sizes."""
    tidied: list[Segment] = []
    for segment in segments:
        axes: list[Axis] = []
        for axis in segment:
            if isinstance(axis, int) and axes and isinstance(axes[-1], int):
                axes[-1] *= axis
            elif axis != 1:
                axes.append(axis)
        new, last = tuple(axes) or (1,), tidied[-1] if tidied else ()
        if len(new) == len(last) == 1 and isinstance(new[0], int) and isinstance(last[0], int):
            tidied[-1] = (last[0] + new[0],)
        else:
            tidied.append(new)
    return tuple(tidied)


# -- reading resolved layouts; `kept` says which channels of each atom remain


def atoms_of(layout: Layout) -> list[Atom]:
    """The atoms of a resolved layout, in order."""
    return [axis for segment in layout for axis in segment if isinstance(axis, Atom)]


def width(layout: Layout, widths: Mapping[int, int]) -> int:
    """Size of the dim when each atom has its width."""
    return sum(
        math.prod(axis if isinstance(axis, int) else widths[axis.index] for axis in segment) for segment in layout
    )


def kept_indices(layout: Layout, kept: Mapping[int, Tensor], sizes: Mapping[int, int]) -> Tensor:
    """Indices of the dim that remain when each atom keeps its own. -> (n,) int64"""
    pieces: list[Tensor] = []
    offset = 0
    for segment in layout:
        index = torch.zeros(1, dtype=torch.int64)
        total = 1
        for axis in segment:
            size = axis if isinstance(axis, int) else sizes[axis.index]
            own = torch.arange(size) if isinstance(axis, int) else kept[axis.index]
            index = (index[:, None] * size + own[None, :]).flatten()
            total *= size
        pieces.append(index + offset)
        offset += total
    return torch.cat(pieces)


def monomials(layout: Layout) -> list[tuple[int, tuple[int, ...]]]:
    """The dim's size as a polynomial: a coefficient and the atoms it multiplies, per segment."""
    return [
        (
            math.prod(axis for axis in segment if isinstance(axis, int)),
            tuple(atom.index for atom in atoms_of((segment,))),
        )
        for segment in layout
    ]


def in_spaces(layout: Layout, numbers: Mapping[int, int]) -> Layout:
    """A resolved layout with atoms renamed to space numbers."""
    return tuple(
        tuple(axis if isinstance(axis, int) else Atom(numbers[axis.index]) for axis in segment) for segment in layout
    )
