"""A dim of a tensor in terms of channel spaces, and the algebra of such layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Atom:
    """A set of channels that may be narrowed, by number."""

    index: int


Axis = int | Atom
Segment = tuple[Axis, ...]
Layout = tuple[Segment, ...]

_MAX_SEGMENTS = 512  # of a concatenation inside a product that is written out; beyond this it is unprunable
_MAX_PIECES = 64  # equal pieces that a concatenation is split into and that are then joined


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
        tidied.append(tuple(axes) or (1,))
        if len(tidied) > 1:
            last, new = map(_fixed_size, tidied[-2:])
            if last is not None and new is not None:
                tidied[-2:] = [(last + new,)]
    return tuple(tidied)


def _fixed_size(segment: Segment) -> int | None:
    """The size of a segment that is a single number; None of any other."""
    axis = segment[0]
    return axis if len(segment) == 1 and isinstance(axis, int) else None


# -- reading resolved layouts


def atoms_of(layout: Layout) -> list[Atom]:
    """The atoms of a resolved layout, in order."""
    return [axis for segment in layout for axis in segment if isinstance(axis, Atom)]


def monomials(layout: Layout) -> list[tuple[int, tuple[int, ...]]]:
    """The dim's size as a polynomial: a coefficient and the atoms it multiplies, per segment."""
    terms: list[tuple[int, tuple[int, ...]]] = []
    for segment in layout:
        coefficient = math.prod(axis for axis in segment if isinstance(axis, int))
        atoms = tuple(atom.index for atom in atoms_of((segment,)))
        terms.append((coefficient, atoms))
    return terms


def in_spaces(layout: Layout, numbers: Mapping[int, int]) -> Layout:
    """A resolved layout with atoms renamed to space numbers."""

    def renamed(axis: Axis) -> Axis:
        return axis if isinstance(axis, int) else Atom(numbers[axis.index])

    return tuple(tuple(map(renamed, segment)) for segment in layout)


@dataclass
class _Node:
    """What is known of an atom: its parent in the union-find, what it was split into, why it is unprunable."""

    size: int
    parent: int
    product: tuple[Axis, Axis] | None = None
    concat: tuple[Axis, Axis] | None = None
    reason: str | None = None


@dataclass
class Channels:
    """All atoms of one model, in a union-find whose members can be split into finer atoms."""

    because: str = ""  # what is being looked at, for the reasons
    _nodes: list[_Node] = field(default_factory=list)

    # -- atoms

    def fresh(self, size: int) -> Layout:
        """A dim of channels that nothing is known about yet."""
        return ((self._atom(size),),)

    def _atom(self, size: int) -> Axis:
        if size <= 1:
            return size
        self._nodes.append(_Node(size, len(self._nodes)))
        return Atom(len(self._nodes) - 1)

    def _find(self, atom: Atom) -> int:
        index = atom.index
        while self._nodes[index].parent != index:
            self._nodes[index].parent = self._nodes[self._nodes[index].parent].parent
            index = self._nodes[index].parent
        return index

    def axis_size(self, axis: Axis) -> int:
        """Channels of one axis."""
        return axis if isinstance(axis, int) else self._nodes[axis.index].size

    def segment_size(self, segment: Segment) -> int:
        """Channels of one segment."""
        return math.prod(self.axis_size(axis) for axis in segment)

    def size(self, layout: Layout) -> int:
        """Channels of the whole dim."""
        return sum(self.segment_size(segment) for segment in layout)

    def fix(self, layout: Layout, reason: str) -> int:
        """Make every atom of the dim unprunable; returns how many were not so before."""
        atoms = self.atoms(layout)
        for atom in atoms:
            self._nodes[atom.index].reason = reason
        return len(atoms)

    # -- reading a layout

    def resolve(self, layout: Layout) -> Layout:
        """The layout in terms of what is known now: atoms replaced by their parts, unprunable ones by their size."""
        return tidy([part for segment in layout for part in self._resolve_segment(segment)])

    def _resolve_segment(self, segment: Segment) -> list[Segment]:
        return functools.reduce(self._times, map(self._resolve_axis, segment), [()])

    def _resolve_axis(self, axis: Axis) -> list[Segment]:
        if isinstance(axis, int):
            return [(axis,)]
        index = self._find(axis)
        node = self._nodes[index]
        if node.product:
            return self._resolve_segment(node.product)
        if node.concat:
            return [part for side in node.concat for part in self._resolve_axis(side)]
        return [(node.size,)] if node.reason else [(Atom(index),)]

    def _times(self, outer: list[Segment], inner: list[Segment]) -> list[Segment]:
        """Product of two concatenations. An outer axis around an inner concatenation cannot be narrowed."""
        if len(inner) == 1:
            return [segment + inner[0] for segment in outer]
        product: list[Segment] = []
        for segment in outer:
            copies = self.segment_size(segment)
            if copies > 1:
                self.fix((segment,), f"a concatenation lies inside it ({self.because})")
            if copies * len(inner) > _MAX_SEGMENTS:
                self.fix(tuple(inner), f"too many concatenated pieces ({self.because})")
                product.append((copies * sum(self.segment_size(part) for part in inner),))
            else:
                product.extend(list(inner) * copies)
        return product

    def width(self, layout: Layout, widths: Mapping[int, int]) -> int:
        """Size of the dim when each atom has its width."""
        terms = monomials(self.resolve(layout))
        return sum(factor * math.prod(widths[atom] for atom in atoms) for factor, atoms in terms)

    def indices(self, layout: Layout, kept: Mapping[int, Tensor]) -> Tensor:
        """Indices of the dim that remain when each atom keeps its own. -> (n,) int64"""
        pieces: list[Tensor] = []
        offset = 0
        for segment in self.resolve(layout):
            index = torch.zeros(1, dtype=torch.int64)
            for axis in segment:
                kept_here = torch.arange(axis) if isinstance(axis, int) else kept[axis.index]
                index = (index[:, None] * self.axis_size(axis) + kept_here[None, :]).flatten()
            pieces.append(index + offset)
            offset += self.segment_size(segment)
        return torch.cat(pieces)

    def atoms(self, layout: Layout) -> list[Atom]:
        """The atoms of the dim that can be narrowed, in order, each once."""
        return list(dict.fromkeys(atoms_of(self.resolve(layout))))

    def unprunable(self, layout: Layout) -> list[tuple[int, str]]:
        """Size and reason of every part of the dim that has no atoms left."""
        parts: list[tuple[int, str]] = []
        for segment in layout:
            if self.atoms((segment,)):
                for side in self._concatenated_in(segment):
                    parts += self.unprunable(((side,),))
                continue
            reasons: dict[str, None] = {}  # each once, in order
            for axis in segment:
                reasons.update(dict.fromkeys(self._reasons(axis)))
            if reasons:
                parts.append((self.segment_size(segment), "; ".join(reasons)))
        return parts

    def _concatenated_in(self, segment: Segment) -> list[Axis]:
        """The two sides of every axis that was split into a concatenation."""
        sides: list[Axis] = []
        for axis in segment:
            if isinstance(axis, Atom):
                sides += self._nodes[self._find(axis)].concat or ()
        return sides

    def _reasons(self, axis: Axis) -> list[str]:
        if isinstance(axis, int):
            return []
        node = self._nodes[self._find(axis)]
        inner: list[str] = []
        for part in node.product or node.concat or ():
            inner += self._reasons(part)
        return inner or [node.reason or "its channels are used one by one"]

    # -- building layouts

    def multiply(self, outer: Layout, inner: Layout) -> Layout:
        """The dim that flattening two dims gives."""
        return tidy(self._times(list(self.resolve(outer)), list(self.resolve(inner))))

    def regroup(self, dims: Sequence[Layout], shape: Sequence[int]) -> tuple[Layout, ...]:
        """Dims after a reshape: the shortest runs of old and new dims with equal products match each other."""
        sizes = [self.size(layout) for layout in dims]
        out: list[Layout] = []
        old = new = 0  # dims that have been matched
        while old < len(sizes) or new < len(shape):
            old_stop = min(old + 1, len(sizes))
            new_stop = min(new + 1, len(shape))
            while True:
                old_product = math.prod(sizes[old:old_stop])
                new_product = math.prod(shape[new:new_stop])
                if old_product == new_product:
                    break
                if old_product < new_product:
                    old_stop += 1
                else:
                    new_stop += 1
            out.extend(self._refactor(dims[old:old_stop], shape[new:new_stop]))
            old = old_stop
            new = new_stop
        return tuple(out)

    def _refactor(self, dims: Sequence[Layout], shape: Sequence[int]) -> list[Layout]:
        """Multiply the dims into one, then factor it into the new sizes."""
        if len(dims) == len(shape) == 1:
            return [dims[0]]
        wide = [layout for layout in dims if self.size(layout) != 1]
        rest = functools.reduce(self.multiply, wide) if wide else fixed(1)
        out: list[Layout] = []
        for position, size in enumerate(shape):
            if size == 1 or not wide:
                out.append(fixed(size))
            elif math.prod(shape[position + 1 :]) == 1:  # the last one takes all that is left
                out.append(rest)
                rest = fixed(1)
            else:
                outer, rest = self.factor(rest, size)
                out.append(outer)
        return out

    def _split(self, axis: Axis, kind: Literal["product", "concat"], first: int) -> tuple[Axis, Axis]:
        """Cut an axis in two, of which the first has so many channels."""
        if kind == "product":
            second = self.axis_size(axis) // first
        else:
            second = self.axis_size(axis) - first
        if isinstance(axis, int):
            return first, second
        parts = self._atom(first), self._atom(second)
        setattr(self._nodes[self._find(axis)], kind, parts)
        return parts

    def _split_segment(self, segment: Segment, front: int) -> tuple[Layout, Layout]:
        """Cut a resolved segment after its first `front` channels."""
        inner = self.segment_size(segment[1:])
        if front % inner == 0:
            head, tail = self._split(segment[0], "concat", front // inner)
            return ((head, *segment[1:]),), ((tail, *segment[1:]),)
        self.fix((segment,), f"it is split in the middle of a group ({self.because})")
        return fixed(front), fixed(self.segment_size(segment) - front)

    def _pop_first(self, segments: list[Segment]) -> Segment:
        """Take the first segment from a list, resolved again: a cut or a join since then may have split it."""
        segments[:1] = self.resolve((segments[0],))
        return segments.pop(0)

    def divide(self, layout: Layout, sizes: Sequence[int]) -> list[Layout]:
        """Cut the dim into pieces of these sizes."""
        rest = list(self.resolve(layout))
        pieces: list[Layout] = []
        for size in sizes:
            piece: list[Segment] = []
            missing = size
            while missing > 0:
                segment = self._pop_first(rest)
                segment_size = self.segment_size(segment)
                if segment_size <= missing:
                    piece.append(segment)
                    missing -= segment_size
                else:
                    front, back = self._split_segment(segment, missing)
                    piece.extend(front)
                    rest[:0] = back
                    missing = 0
            pieces.append(tuple(piece) or fixed(0))
        return pieces

    def factor(self, layout: Layout, outer: int) -> tuple[Layout, Layout]:
        """Write the dim as a product whose outer part has `outer` channels."""
        inner = self.size(layout) // outer
        if outer == 1:
            return fixed(1), layout
        if inner == 1:
            return layout, fixed(1)
        segments = self.resolve(layout)
        split = self._factor_segments(segments, inner)
        if split is not None:
            return split
        if len(segments) > 1 and outer <= _MAX_PIECES:
            pieces = self.divide(layout, [inner] * outer)
            for piece in pieces[1:]:
                self.join(pieces[0], piece)
            return fixed(outer), pieces[0]
        self.fix(layout, f"it is regrouped across its borders ({self.because})")
        return fixed(outer), fixed(inner)

    def _factor_segments(self, segments: Layout, inner: int) -> tuple[Layout, Layout] | None:
        """Factor every segment by the same inner size, and join the inner parts."""
        if any(self.segment_size(segment) % inner for segment in segments):
            return None
        splits: list[tuple[Segment, Segment]] = []
        for segment in segments:
            split = self._factor_segment(segment, self.segment_size(segment) // inner)
            if split is None:
                return None
            splits.append(split)
        outers = tuple(outer for outer, _ in splits)
        common = splits[0][1]
        for _, inner_part in splits[1:]:
            self.join((common,), (inner_part,))
        return outers, (common,)

    def _factor_segment(self, segment: Segment, outer: int) -> tuple[Segment, Segment] | None:
        """Write a segment as a product whose outer part has `outer` channels; None if no axes make that number."""
        head: list[Axis] = []
        rest = list(self.resolve((segment,))[0])
        while outer > 1:
            axis = rest.pop(0)
            size = self.axis_size(axis)
            if outer % size == 0:
                head.append(axis)
                outer //= size
            elif size % outer == 0:
                first, second = self._split(axis, "product", outer)
                head.append(first)
                rest.insert(0, second)
                outer = 1
            else:
                return None
        return tuple(head) or (1,), tuple(rest) or (1,)

    # -- joining

    def join(self, one: Layout, other: Layout) -> None:
        """Make two dims the same channels; where they cannot be, both are unprunable."""
        left = list(self.resolve(one))
        right = list(self.resolve(other))
        while left and right:
            a = self._pop_first(left)
            b = self._pop_first(right)
            size_a = self.segment_size(a)
            size_b = self.segment_size(b)
            if size_a == size_b:
                self._join_segments(a, b)
            elif size_a < size_b:
                front, back = self._split_segment(b, size_a)
                left.insert(0, a)
                right[:0] = front + back
            else:
                front, back = self._split_segment(a, size_b)
                left[:0] = front + back
                right.insert(0, b)

    def _join_segments(self, one: Segment, other: Segment) -> None:
        """Make two segments of one size the same channels, axis by axis."""
        left: list[Axis] = list(one)
        right: list[Axis] = list(other)
        while left and right:
            # Splitting one side may have split an atom that the other side holds too.
            left = list(self._resolve_segment(tuple(left))[0])
            right = list(self._resolve_segment(tuple(right))[0])
            a = left.pop(0)
            b = right.pop(0)
            size_a = self.axis_size(a)
            size_b = self.axis_size(b)
            if size_a == size_b and (isinstance(a, int) or isinstance(b, int)):
                self.fix(((a, b),), f"meets a fixed size ({self.because})")
            elif isinstance(a, Atom) and isinstance(b, Atom) and size_a == size_b:
                self._nodes[b.index].parent = a.index
            elif size_a < size_b and size_b % size_a == 0:
                right[:0] = self._split(b, "product", size_a)
                left.insert(0, a)
            elif size_b < size_a and size_a % size_b == 0:
                left[:0] = self._split(a, "product", size_b)
                right.insert(0, b)
            else:
                self.fix(((a, *left), (b, *right)), f"two groupings do not align ({self.because})")
                return
        self.fix((tuple(left), tuple(right)), f"two groupings do not align ({self.because})")
