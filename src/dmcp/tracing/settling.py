"""Settle what replay finds: bind a number to the attribute that it came from, or keep the channels concerned whole."""

from __future__ import annotations

import random
from collections.abc import Iterator

from dmcp.errors import TraceError
from dmcp.tracing.facts import Dims, Literal
from dmcp.tracing.layouts import Atom, Layout
from dmcp.tracing.recording import Op
from dmcp.tracing.replay import LOOSE, Bound, Conflict, Outcome, Place, Rehearsal

_ROUNDS = 80  # replays at most
_BINDING_ROUNDS = 30  # after these, whatever disagrees is kept whole
_DRAWS = ("wide", "narrow", "any", "extreme")
_UNEVEN = ("first", "second")  # one of two neighbours has all channels, the other one: halves by shape are none then
_MULTIPLES = (1, 2, 3)  # an attribute may be this many times the width: qkv sizes
_CANDIDATES = 6

Site = tuple[int, int, Literal]  # recording, op and the number among its arguments

IN_CODE = "a number in the code"  # how the reason begins


class Settler:
    """Replays at random widths until all agree, binding attributes and keeping channels whole as needed."""

    def __init__(self, rehearsal: Rehearsal, parameters: list[str], bind: bool, seed: int = 0) -> None:
        self.rehearsal, self.coupling, self.parameters, self.bind = rehearsal, rehearsal.coupling, parameters, bind
        self.random = random.Random(seed)
        # attributes not tried yet, and the one that is being tried
        self.candidates: dict[Site, list[tuple[Place, Bound]]] = {}
        self.tried: dict[Site, Place] = {}
        self.new: set[Place] = set()  # bound since the last replay
        self.banned: set[Place] = set()  # bound once, and wrong
        self.widths: dict[int, int] = {}  # of the last replay
        self.modules = dict(rehearsal.model.named_modules())

    def settle(self) -> None:
        """Until every kind of draw has replayed clean, in a row, in turns with every recording."""
        clean, count = 0, len(self.coupling.recordings)
        draws = _DRAWS + _UNEVEN if self._has_neighbours() else _DRAWS
        for round_ in range(_ROUNDS):
            atoms = self.coupling.atoms(self.parameters)
            if not atoms or clean >= len(draws):
                return
            sizes = {atom.index: self.coupling.channels.axis_size(atom) for atom in atoms}
            widths = {
                atom: self._draw(draws[clean], size, place % 2) for place, (atom, size) in enumerate(sizes.items())
            }
            self.widths = widths
            number = clean % count
            outcome = self.rehearsal.replay(number, self.rehearsal.narrow(widths, sizes), widths)
            if outcome.clean:
                clean += 1
            else:
                clean = 0
                self._mend(number, outcome, may_bind=self.bind and round_ < _BINDING_ROUNDS)
        raise TraceError("The narrow model never agreed with its recording: please report this model.")

    def _has_neighbours(self) -> bool:
        """Whether some tensor has several spaces in one dim, so that a part of it may be cut out by its size."""
        found = {layout for values in self.coupling.layouts for dims in values.values() for layout in dims}
        return any(len(self.coupling.channels.atoms(layout)) > 1 for layout in found)

    def _draw(self, kind: str, size: int, second: int) -> int:
        """A width: most channels, few, any number of them, or one or all (at random, or of every second space)."""
        if kind in _UNEVEN:
            return size if _UNEVEN[second] == kind else 1
        ranges = {"wide": (0.3 * size, size - 1), "narrow": (0.05 * size, 0.4 * size), "any": (1, size)}
        if kind == "extreme":
            return self.random.choice((1, size))
        low, high = (max(1, int(border)) for border in ranges[kind])
        return self.random.randint(low, high)

    def _mend(self, number: int, outcome: Outcome, may_bind: bool) -> None:
        """Try attributes first: a wrong guess makes new conflicts, and nothing may be kept whole for those."""
        scales = [conflict for conflict in outcome.conflicts if conflict.kind in LOOSE]
        conflicts = scales or outcome.conflicts
        ops = self.coupling.recordings[number].ops
        self.new.clear()
        bound = [
            self._bind((number, conflict.number, literal), ops[conflict.number], value)
            for conflict in conflicts
            for literal, value in conflict.literals
            if may_bind
        ]
        if any(bound):
            return
        kept = [self._keep_whole(number, conflict) for conflict in conflicts]
        if any(kept) or self._unbind([conflict.path for conflict in conflicts]):
            return
        if scales and self._keep_guilty(number, scales):
            return
        last = min(self.rehearsal.stopped_at, len(ops) - 1)
        at = [(conflict.number, conflict.path) for conflict in outcome.conflicts] or [(last, ops[last].path)]
        why = outcome.stopped or f"{IN_CODE} depends on another width"
        if not any(self._freeze_module(number, *place, why) for place in at):
            raise TraceError(f"The narrow model does not run, and nothing is left to keep whole: {why}")

    def _keep_guilty(self, number: int, conflicts: list[Conflict]) -> bool:
        """Keep each space whole that makes one of the conflicts when it alone is narrow."""
        sizes = {atom: self.coupling.channels.axis_size(Atom(atom)) for atom in self.widths}
        known, guilty = {(conflict.number, conflict.kind) for conflict in conflicts}, []
        for atom, size in sizes.items():
            widths = sizes | {atom: max(1, size // 2)}
            found = self.rehearsal.replay(number, self.rehearsal.narrow(widths, sizes), widths).conflicts
            if any((conflict.number, conflict.kind) in known for conflict in found):
                guilty.append(((Atom(atom),),))
        return self._freeze(tuple(guilty), f"{IN_CODE} depends on its size")

    def _unbind(self, paths: list[str]) -> bool:
        """Take back the bindings in these modules and around them, for good: one of them must be wrong."""
        wrong = [
            place
            for place in self.rehearsal.bindings
            if any(not place[0] or path == place[0] or path.startswith(place[0] + ".") for path in paths)
        ]
        for place in wrong:
            del self.rehearsal.bindings[place]
        self.banned.update(wrong)
        return bool(wrong)

    def _keep_whole(self, number: int, conflict: Conflict) -> bool:
        op, layouts = self.coupling.recordings[number].ops[conflict.number], self.coupling.layouts[number]
        made = conflict.kind == "tensor"
        where = " at ".join(filter(None, ("a tensor" if made else op.name, conflict.path)))
        if made or conflict.kind == "scale":
            first = layouts[op.inputs()[0]][-1:] if op.inputs() and not made else ()
            reason = f"a factor in the code depends on its size ({where})"
            return self._freeze(tuple(self._explaining(conflict)), reason) or self._freeze(first, reason)
        reason = f"a number in the code fixes its size ({where})"
        if conflict.literals:
            # Numbers that still are the unpruned size come first: others may be computed from the width that these fix.
            size = self.coupling.channels.size
            stale = [literal.layout for literal, value in conflict.literals if value == size(literal.layout)]
            every = tuple(literal.layout for literal, _ in conflict.literals)
            return self._freeze(tuple(stale), reason) or self._freeze(every, reason)
        touched = [layout for value in op.outs if value is not None for layout in layouts[value]]
        touched += [layout for value in op.inputs() for layout in layouts[value]]
        return self._freeze(tuple(touched), f"the op does not run at other widths ({where})")

    def _explaining(self, conflict: Conflict) -> Iterator[Layout]:
        """Spaces whose sizes, wide and narrow, are the two values of a factor: n, 1 / n or a square root of them."""
        for atom, narrow_size in self.widths.items():
            wide_size = self.coupling.channels.axis_size(Atom(atom))
            for wide, narrow_value in conflict.scales:
                if any(
                    abs(wide_size**p - wide) + abs(narrow_size**p - narrow_value) < 1e-9 for p in (1, -1, 0.5, -0.5)
                ):
                    yield ((Atom(atom),),)

    def _freeze(self, dims: Dims, reason: str) -> bool:
        count = sum(self.coupling.channels.freeze(layout, reason) for layout in dims)
        for place in [place for place, bound in self.rehearsal.bindings.items() if not self._alive(bound.layout)]:
            del self.rehearsal.bindings[place]
        return count > 0

    def _alive(self, layout: Layout) -> bool:
        return bool(self.coupling.channels.atoms(layout))

    def _bind(self, key: Site, op: Op, value: int) -> bool:
        """Bind the next attribute that could be where this number comes from; False if nothing changed."""
        literal = key[2]
        if not self._alive(literal.layout) or value != self.coupling.channels.size(literal.layout):
            return False
        if key not in self.candidates:
            self.candidates[key] = list(self._candidates(op.path, literal, value))[:_CANDIDATES]
        failed = self.tried.pop(key, None)
        if failed is not None:
            self.rehearsal.bindings.pop(failed, None)
        resolve = self.coupling.channels.resolve
        while self.candidates[key]:
            place, bound = self.candidates[key].pop(0)
            known = self.rehearsal.bindings.get(place)
            if known is not None and place in self.new and resolve(known.layout) == resolve(bound.layout):
                return True  # a number before this one came from the same attribute: see whether that helps
            if known is None and place not in self.banned:
                self.new.add(place)
                self.rehearsal.bindings[place] = bound
                self.tried[key] = place
                return True
        return failed is not None

    def _candidates(self, path: str, literal: Literal, value: int) -> Iterator[tuple[Place, Bound]]:
        """Attributes that the number could come from; of a flattened map also those that count its channels only."""
        for place, multiple in self._attributes_equal(path, literal.position, value):
            yield place, Bound(literal.layout, multiple)
        segment, *more = self.coupling.channels.resolve(literal.layout)
        channels = tuple(axis for axis in segment if not isinstance(axis, int))
        if not more and len(channels) < len(segment):
            inner = self.coupling.channels.segment_size(channels)
            for place, multiple in self._attributes_equal(path, None, inner):
                yield place, Bound((channels,), multiple)

    def _attributes_equal(self, path: str, position: int | None, value: int) -> Iterator[tuple[Place, int]]:
        """Int attributes of the module and those around it that are the value or a small multiple, nearest first."""
        parts = path.split(".") if path else []
        owners = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
        for multiple in _MULTIPLES if value > 1 else ():
            for owner in owners:
                for name, held in vars(self.modules[owner]).items():
                    if name.startswith("_"):
                        continue
                    if type(held) is int and held == multiple * value:
                        yield (owner, name, None), multiple
                    elif multiple == 1 and type(held) in (list, tuple) and position is not None:
                        here = held[position : position + 1]
                        if type(here[0] if here else None) is int and here[0] == value:
                            yield (owner, name, position), 1

    def _freeze_module(self, number: int, at: int, path: str, why: str) -> bool:
        """Keep whole what enters the module in which it happened, else all in it, else the same one module up."""
        recording, layouts = self.coupling.recordings[number], self.coupling.layouts[number]
        while True:
            inside = [
                op for op in recording.ops[: at + 1] if not path or op.path == path or op.path.startswith(path + ".")
            ]
            entering = [layout for op in inside[:1] for value in op.inputs()[:1] for layout in layouts[value]]
            everything = [layout for op in inside for value in op.inputs() for layout in layouts[value]]
            reason = f"{IN_CODE} of {path or 'the model'} depends on its size: {why}"
            if self._freeze(tuple(entering), reason) or self._freeze(tuple(everything), reason):
                return True
            if not path:
                return False
            path = path.rpartition(".")[0]
