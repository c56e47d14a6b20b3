"""The algebra of dims against plain lists: a dim is written out as one label per channel.

The label of a channel is the set of (atom, channel of the atom) that it is made of, and nothing where it is unprunable.
What an operation should do to a dim is then a list operation on labels, and two dims are the same channels if their
lists are equal.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import torch

from dmcp.tracing.layout import Channels, Layout, atoms_of, fixed, monomials

Labels = list[frozenset[tuple[int, int]]]
LARGEST = 240  # channels of a dim in random programs


def labels(channels: Channels, layout: Layout) -> Labels:
    """A dim written out."""
    written: Labels = []
    for segment in channels.resolve(layout):
        axes: list[Labels] = [
            [frozenset()] * axis
            if isinstance(axis, int)
            else [frozenset({(axis.index, channel)}) for channel in range(channels.axis_size(axis))]
            for axis in segment
        ]
        written += [frozenset[tuple[int, int]]().union(*picked) for picked in itertools.product(*axes)]
    return written


def times(outer: Labels, inner: Labels) -> Labels:
    """Two dims flattened into one, on lists."""
    return [one | other for one in outer for other in inner]


class Program:
    """Random operations on a pool of dims, and what each of them claims about labels from then on."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.channels = Channels(because="a test")
        self.pool: list[Layout] = [self.fresh() for _ in range(3)]
        self.claims: list[tuple[str, Callable[[], tuple[Labels, Labels]]]] = []

    def fresh(self) -> Layout:
        return self.channels.fresh(self.random.choice([1, 2, 3, 4, 6, 8, 12]))

    def pick(self) -> Layout:
        return self.random.choice(self.pool)

    def labels(self, layout: Layout) -> Labels:
        return labels(self.channels, layout)

    def claim(self, text: str, left: Callable[[], Labels], right: Callable[[], Labels]) -> None:
        self.claims.append((text, lambda: (left(), right())))

    def step(self) -> None:
        steps = [self.concatenate, self.multiply, self.divide, self.factor, self.join, self.join, self.grow, self.twist]
        self.random.choice(steps)()

    def grow(self) -> None:
        self.pool.append(self.random.choice([self.fresh(), fixed(self.random.randint(1, 6))]))

    def concatenate(self) -> None:
        one, other = self.pick(), self.pick()
        if self.channels.size(one + other) <= LARGEST:
            self.claim("cat", lambda: self.labels(one + other), lambda: self.labels(one) + self.labels(other))
            self.pool.append(one + other)

    def multiply(self) -> None:
        one, other = self.pick(), self.pick()
        if self.channels.size(one) * self.channels.size(other) <= LARGEST:
            out = self.channels.multiply(one, other)
            self.claim("multiply", lambda: self.labels(out), lambda: times(self.labels(one), self.labels(other)))
            self.pool.append(out)

    def divide(self) -> None:
        whole = self.pick()
        size = self.channels.size(whole)
        places = sorted(self.random.randint(0, size) for _ in range(self.random.randint(1, 3)))
        sizes = [stop - start for start, stop in itertools.pairwise([0, *places, size])]
        pieces = self.channels.divide(whole, sizes)
        assert [self.channels.size(piece) for piece in pieces] == sizes
        self.claim(f"divide {sizes}", lambda: self.labels(whole), lambda: sum(map(self.labels, pieces), Labels()))
        self.pool += [piece for piece, size in zip(pieces, sizes, strict=True) if size]

    def factor(self) -> None:
        whole = self.pick()
        size = self.channels.size(whole)
        count = self.random.choice([n for n in range(1, size + 1) if size % n == 0])
        outer, inner = self.channels.factor(whole, count)
        assert (self.channels.size(outer), self.channels.size(inner)) == (count, size // count)
        self.claim(f"factor {count}", lambda: self.labels(whole), lambda: times(self.labels(outer), self.labels(inner)))
        self.pool += [outer, inner]

    def join(self) -> None:
        one = self.pick()
        size = self.channels.size(one)
        same = [layout for layout in self.pool if self.channels.size(layout) == size and layout != one]
        other = self.random.choice([*same, self.channels.fresh(size)])
        self.channels.join(one, other)
        self.claim("join", lambda: self.labels(one), lambda: self.labels(other))
        self.pool.append(other)

    def twist(self) -> None:
        """A channel shuffle is added to what it shuffled."""
        outer, inner = self.pick(), self.pick()
        if self.channels.size(outer) * self.channels.size(inner) <= LARGEST:
            one, other = self.channels.multiply(outer, inner), self.channels.multiply(inner, outer)
            self.channels.join(one, other)
            self.claim("twist", lambda: self.labels(one), lambda: self.labels(other))
            self.pool += [one, other]

    def check(self) -> None:
        for _ in range(2):  # reading a dim may find out that a part of it is unprunable
            for layout in self.pool:
                self.channels.resolve(layout)
        for number, (text, sides) in enumerate(self.claims):
            left, right = sides()
            assert left == right, f"claim {number}: {text}"


def test_operations_and_reading_are_those_of_lists() -> None:
    live = 0
    for seed in range(400):
        program = Program(seed)
        for _ in range(10):
            program.step()
            program.check()
        live += any(program.channels.atoms(layout) for layout in program.pool)
        if seed < 150:
            check_reading(program)
    assert live > 300  # the claims hold for unprunable dims, too: most must not be


def check_reading(program: Program) -> None:
    channels = program.channels
    for layout in program.pool:
        resolved = channels.resolve(layout)
        assert channels.resolve(resolved) == resolved
        sizes = {atom.index: channels.axis_size(atom) for atom in atoms_of(resolved)}
        assert sorted(atom.index for atom in channels.atoms(layout)) == sorted(sizes)
        written = labels(channels, layout)
        assert len(written) == channels.size(layout) == channels.size(resolved)
        kept = {it: sorted(program.random.sample(range(n), program.random.randint(1, n))) for it, n in sizes.items()}
        expected = [at for at, label in enumerate(written) if all(channel in kept[atom] for atom, channel in label)]
        found = channels.indices(layout, {atom: torch.tensor(own) for atom, own in kept.items()})
        assert found.tolist() == expected
        widths = {atom: len(own) for atom, own in kept.items()}
        assert channels.width(layout, widths) == len(expected)
        terms = monomials(resolved)
        assert sum(factor * math.prod(widths[atom] for atom in atoms) for factor, atoms in terms) == len(expected)


# -- what aligns must stay prunable: a package that prunes nothing would pass all of the above


def test_aligned_operations_keep_everything_prunable() -> None:
    for seed in range(100):
        generator = random.Random(seed)
        channels = Channels()
        parts = [channels.fresh(generator.randint(2, 9)) for _ in range(generator.randint(1, 4))]
        inner = generator.randint(1, 5)
        flat = channels.multiply(sum(parts, ()), fixed(inner))
        outer, back = channels.factor(flat, channels.size(sum(parts, ())))
        assert back == fixed(inner)
        pieces = channels.divide(outer, [channels.size(part) for part in parts])
        twins = [channels.fresh(channels.size(piece)) for piece in pieces]
        channels.join(sum(twins, ()), sum(pieces, ()))
        for part, piece, twin in zip(parts, pieces, twins, strict=True):
            assert len(channels.atoms(part)) == 1
            assert channels.atoms(part) == channels.atoms(piece) == channels.atoms(twin)
            assert [len(label) for label in labels(channels, part)] == [1] * channels.size(part)
