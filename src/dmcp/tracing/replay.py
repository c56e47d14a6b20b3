"""Narrow copies run beside the recording, to find numbers hidden in Python code."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.errors import TraceError
from dmcp.tracing.coupling import Coupling, Dims, Literal
from dmcp.tracing.layout import Atom, Layout
from dmcp.tracing.modules import Cut, leaves, map_leaves, narrow, on_meta, reason_of, tensors_in
from dmcp.tracing.record import HOST_READS, UNTAGGED, Func, Op, Recorder, Shape, compute, run_recorded

IN_CODE = "a number in the code"  # how the reason begins
_LOOSE = ("scale", "tensor")  # kinds of conflicts about numbers that are no sizes
_ROUNDS = 80  # replays at most
_BINDING_ROUNDS = 30  # after these, whatever disagrees is unprunable
_SAMPLES = ("wide", "narrow", "any", "extreme")
_UNEVEN = ("first", "second")  # one of two neighbors has all channels, the other one: halves by shape are none then
_MULTIPLES = (1, 2, 3)  # an attribute may be this many times the width: qkv sizes
_CANDIDATES = 6

Place = tuple[str, str, int | None]  # module path, attribute, position if it is a list
Bound = tuple[Layout, int]  # an attribute is this many times the width of a dim
Site = tuple[int, int, Literal]  # recording, op and the number among its arguments


@dataclass(frozen=True)
class Conflict:
    """An op of the narrow model that is not as predicted."""

    number: int
    path: str  # the module in which it happened
    kind: str  # "number", "shape", "error", "scale", or "tensor": one that was made of numbers before the op
    literals: tuple[tuple[Literal, int], ...] = ()  # numbers in the arguments that are wrong, and what they are
    scales: tuple[tuple[float, float], ...] = ()  # factors in the arithmetic, wide and narrow


class Replayer(Recorder):  # type: ignore[no-untyped-call]
    """Records a narrow model in lockstep with the recording of the wide one."""

    def __init__(
        self, model: nn.Module, inputs: list[Tensor], coupling: Coupling, number: int, widths: Mapping[int, int]
    ) -> None:
        self.facts, self.original = coupling.passes[number], coupling.passes[number].recording
        super().__init__(model, inputs, self.original.grad)
        self.size = functools.cache(lambda layout: coupling.channels.width(layout, widths))  # many share their dims
        self.shapes = {value: tuple(map(self.size, dims)) for value, dims in self.facts.layouts.items()}  # predicted
        self.conflicts: list[Conflict] = []
        self.stopped: str | None = None  # why: the model raised, or went another way
        self.pairs: dict[int, set[int | None]] = {}  # value -> those of the wide model that it stands for
        self.paired = 0  # ops whose outputs are among them

    @property
    def clean(self) -> bool:
        """Whether the narrow model did as predicted."""
        return not self.conflicts and self.stopped is None

    def run(self, call: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_leaves(_without_data, args), map_leaves(_without_data, kwargs)  # NumPy's numbers have data
        number = len(self.recording.ops)
        if number >= len(self.original.ops) or self.original.ops[number].func is not call.func:
            compute(call.func, args, kwargs)  # what fails here may have failed in the wide model, which went on
            raise _AstrayError(f"the narrow model goes another way at {call.name} in {call.path or 'the top'}")
        expected = self.original.ops[number]
        if not any(value is not None for value in expected.outs):
            return expected.result  # a Python number: the narrow model takes the same branches
        wanted = [None if value is None else self.shapes[value] for value in expected.outs]
        literals = tuple(self._wrong_literals(number, call))
        kind = "number" if literals else ""
        old, new = _numbers(expected), _numbers(call)
        if not kind and old == new:
            sizes = self._sizes(number, expected)
            old, new = _other_arguments(expected, sizes), _other_arguments(call, sizes)
        if old != new:
            kind = "scale"
        if not self._same_tensors(expected, call):
            raise _AstrayError(f"the narrow model takes other tensors for {call.name} in {call.path or 'the top'}")
        by_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(call.func.tags)
        made_up = by_values or call.func in UNTAGGED
        try:
            out = self._made_up(expected, wanted) if made_up else compute(call.func, args, kwargs)
            got = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves(out)]
            if got != wanted:
                kind = kind or "shape"
        except Exception:  # whatever the op says: it does not run at these widths
            kind = kind or "error"
            got = None
        if kind:
            self.conflicts.append(Conflict(number, expected.path, kind, literals, _different(old, new)))
        if got == wanted:
            return out
        in_place = call.func._schema.name.endswith("_") and isinstance(args[0], Tensor)
        return args[0] if in_place else self._made_up(expected, wanted)

    def _sizes(self, number: int, expected: Op) -> set[str]:
        """Arguments that may follow a width: none where all shapes are what they were."""
        values = [value for value in (*expected.inputs(), *expected.outs) if value is not None]
        if all(self.shapes[value] == self.original.shapes[value] for value in values):
            return set()
        return _SIZES | {literal.argument for literal in self.facts.literals.get(number, ())}

    def _same_tensors(self, expected: Op, call: Op) -> bool:
        """Whether the op takes what it took in the wide model; a branch by a width may run the same ops on others."""
        done = slice(self.paired, None)
        for mine, theirs in zip(self.recording.ops[done], self.original.ops[done], strict=False):
            for value, other in zip(mine.outs, theirs.outs, strict=False):
                if value is not None:  # it may stand for several: what gives back its input here, copies it there
                    self.pairs.setdefault(value, set()).add(other)
        self.paired = len(self.recording.ops)
        mine_now, theirs_now = call.inputs(), expected.inputs()
        if len(mine_now) != len(theirs_now):
            return False
        for value, other in zip(mine_now, theirs_now, strict=True):
            if value in self.recording.tensors or value in self.recording.inputs:
                self.pairs.setdefault(value, set()).add(value)  # both models have the same ones, in the same order
            if value not in self.pairs:
                self.pairs[value] = {other}
                self._compare_constants(value, other, expected.path)
            if other not in self.pairs[value]:
                return False
        return True

    def _compare_constants(self, value: int, other: int, path: str) -> None:
        """Tensors from outside the model: which one it takes may depend on a width."""
        mine, theirs = (held.constants.get(it) for held, it in ((self.recording, value), (self.original, other)))
        if mine and theirs and None not in (mine.data, theirs.data) and mine.data != theirs.data:
            self.conflicts.append(Conflict(len(self.recording.ops), path, "tensor"))

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the wide model read here: its dims are unprunable, and the narrow model has no data."""
        number = len(self.recording.reads)
        way, where = HOST_READS[func], self.path[-1] or "the top"
        if number >= len(self.original.reads) or self.original.reads[number].way != way:
            raise _AstrayError(f"the narrow model reads other values by {way} in {where}")
        self.recording.reads.append(self.original.reads[number])
        return copy.deepcopy(self.original.reads[number].result)

    def _wrong_literals(self, number: int, call: Op) -> Iterator[tuple[Literal, int]]:
        arguments = call.arguments()
        for literal in self.facts.literals.get(number, ()):
            value = arguments[literal.argument]
            if literal.position is not None:
                value = value[literal.position] if literal.position < len(value) else -1
            if literal.from_end:
                value = -value
            elif value == -1:  # torch fills in what is left
                continue
            if value != self.size(literal.layout):
                yield literal, value

    def _made_up(self, expected: Op, wanted: list[Shape | None]) -> Any:
        """Tensors as predicted, so that one replay finds every conflict and not only the first."""
        made = [
            None if value is None else torch.empty(shape or (), dtype=self.original.dtypes[value], device="meta")
            for value, shape in zip(expected.outs, wanted, strict=True)
        ]
        return made[0] if expected.single else tuple(made)


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):  # .cpu() of what has no data
        return torch.device("meta")
    return on_meta(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


class _AstrayError(Exception):
    """The narrow model runs other ops than the wide one did."""


@functools.cache
def _number_arguments(func: Func) -> tuple[str, ...]:
    """Arguments that take part in the arithmetic, unlike sizes and dims; `x * 2` has a number in a tensor's place."""
    types = {it.name: str(it.type).removeprefix("Optional[").rstrip("]") for it in func._schema.arguments}
    return tuple(name for name, kind in types.items() if kind in ("number", "float", "Tensor"))


# Arguments that are sizes, which may follow a width.
_SIZES = {"size", "sizes", "shape", "normalized_shape", "output_size", "output_padding", "length", "num_classes"}
_SIZES |= {"split_size", "split_sizes", "sections", "chunks", "repeats", "start", "end", "storage_offset"}
_SIZES |= {"groups", "group", "num_groups", "N", "C", "HxW"}


def _numbers(op: Op) -> list[Any]:
    """Python numbers that the op computes with: 1 / sqrt(head size) and the like."""
    arguments = op.arguments()
    return _plain([arguments[name] for name in _number_arguments(op.func)])


def _other_arguments(op: Op, sizes: set[str]) -> list[Any]:
    """All arguments besides tensors and sizes: by how much to roll, what to pad with, which kind of gelu."""
    strided = {"stride"} if "stride" in op.name else set()
    return _plain([item for name, item in op.arguments().items() if name not in sizes and name not in strided])


def _plain(nested: Any) -> list[Any]:
    """What can be compared; NaN is like NaN."""
    found: list[Any] = []
    for leaf in leaves(nested):
        if isinstance(leaf, complex):
            found += (leaf.real, leaf.imag)
        elif isinstance(leaf, (int, float)):
            found.append(round(float(leaf), 12) if leaf == leaf else "nan")
        elif isinstance(leaf, (str, torch.dtype)):
            found.append(leaf)
    return found


def _different(old: Sequence[Any], new: Sequence[Any]) -> tuple[tuple[float, float], ...]:
    """The numbers that are not the same, in pairs."""
    pairs = zip(old, new, strict=False)
    return tuple((one, other) for one, other in pairs if one != other and {type(one), type(other)} == {float})


@dataclass
class ReplayContext:
    """A model, its coupling, and the attributes that were found to follow widths."""

    model: nn.Module  # on the meta device
    example: Any
    batch: Any  # the example as it was recorded, on the meta device
    coupling: Coupling
    bindings: dict[Place, Bound] = field(default_factory=dict)
    always: dict[int, set[tuple[int, str]]] = field(default_factory=dict)  # recording -> conflicts at full width, too

    def cuts(self, kept: Mapping[int, Tensor]) -> dict[str, Cut]:
        """Indices that stay of every tensor that has atoms; `kept` per atom."""
        found = {name: self.cut(dims, kept) for name, dims in self.coupling.tensors.items()}
        return {name: cut for name, cut in found.items() if any(kept is not None for kept in cut)}

    def cut(self, dims: Dims, kept: Mapping[int, Tensor]) -> Cut:
        """The same of some dims."""
        channels = self.coupling.channels
        return tuple(channels.indices(layout, kept) if channels.atoms(layout) else None for layout in dims)

    def sizes(self, atoms: Iterable[int]) -> dict[int, int]:
        """Channels of these atoms in the unpruned model."""
        return {atom: self.coupling.channels.axis_size(Atom(atom)) for atom in atoms}

    def attributes(self, widths: Mapping[int, int]) -> dict[str, dict[str, Any]]:
        """Attributes of modules at these widths: those that layers are known to have, and the bound ones."""
        modules = dict(self.model.named_modules())
        channels = self.coupling.channels
        found: dict[str, dict[str, Any]] = {}
        for within in self.coupling.passes:
            for (path, attribute), dims in within.attributes.items():
                old = vars(modules[path]).get(attribute)
                new = tuple(channels.width(layout, widths) for layout in dims)
                full = tuple(map(channels.size, dims))
                if new != full and old in (full, list(full), full[0]):
                    found.setdefault(path, {})[attribute] = new[0] if isinstance(old, int) else type(old)(new)
        for within in self.coupling.passes:
            for (path, attribute), empty in within.recording.caches.items():  # a cache of the wide model is wrong here
                found.setdefault(path, {})[attribute] = copy.deepcopy(empty)
        for (path, attribute, position), (layout, multiple) in self.bindings.items():
            value: Any = multiple * channels.width(layout, widths)
            if position is not None:
                old = found.get(path, {}).get(attribute, vars(modules[path])[attribute])
                value = type(old)([*old[:position], value, *old[position + 1 :]])
            found.setdefault(path, {})[attribute] = value
        return found

    def narrow(self, widths: Mapping[int, int]) -> nn.Module:
        """The narrow model, on the meta device."""
        cuts = self.cuts({atom: torch.arange(width) for atom, width in widths.items()})
        return narrow(self.model, cuts, self.attributes(widths), meta=True)

    def replay(self, number: int, small: nn.Module, widths: Mapping[int, int]) -> Replayer:
        """Run a throw-away narrow model in lockstep with one of the recordings.

        What differs at full width, too, follows no width: numbers that are others in every run (of a generator of the
        model's own), and ops that cannot run without data.
        """
        outcome = self._replay(number, small, widths)
        if number not in self.always and any(conflict.kind in (*_LOOSE, "error") for conflict in outcome.conflicts):
            sizes = self.sizes(widths)
            full = self._replay(number, self.narrow(sizes), sizes)
            self.always[number] = {(conflict.number, conflict.kind) for conflict in full.conflicts}
        always = self.always.get(number, set())
        outcome.conflicts = [it for it in outcome.conflicts if (it.number, it.kind) not in always]
        return outcome

    def _replay(self, number: int, small: nn.Module, widths: Mapping[int, int]) -> Replayer:
        recording = self.coupling.passes[number].recording
        small.train(recording.training)
        replayer = Replayer(small, tensors_in(self.batch), self.coupling, number, widths)
        try:
            run_recorded(replayer, small, self.batch)
        except Exception as error:  # the model's own complaint about its widths
            replayer.stopped = str(error) if isinstance(error, _AstrayError) else reason_of(error)
        pairs = zip(recording.made, replayer.recording.made, strict=False)
        for (at, path, wide), (*_, narrowed) in pairs:
            old, new = _plain(wide), _plain(narrowed)
            if old != new:
                at = min(at, len(recording.ops) - 1)
                replayer.conflicts.append(Conflict(at, path, "tensor", scales=_different(old, new)))
        replayer.conflicts.sort(key=lambda conflict: conflict.number)
        return replayer


class Resolver:
    """Replays at random widths until all agree; binds attributes and makes channels unprunable as needed."""

    def __init__(self, context: ReplayContext, parameters: list[str], bind: bool) -> None:
        self.context, self.coupling, self.parameters, self.bind = context, context.coupling, parameters, bind
        self.random = random.Random(0)
        # attributes not tried yet, and the one that is being tried
        self.candidates: dict[Site, list[tuple[Place, Bound]]] = {}
        self.tried: dict[Site, Place] = {}
        self.new: set[Place] = set()  # bound since the last replay
        self.banned: set[Place] = set()  # bound once, and wrong
        self.widths: dict[int, int] = {}  # of the last replay
        self.modules = dict(context.model.named_modules())

    def run(self) -> None:
        """Until every kind of sample has replayed clean, in a row, in turns with every recording."""
        clean, count = 0, len(self.coupling.passes)
        # where a tensor has several spaces in one dim, a part of it may be cut out by its size
        neighbors = any(len(self.coupling.channels.atoms(layout)) > 1 for layout in self.coupling.layouts())
        samples = _SAMPLES + _UNEVEN if neighbors else _SAMPLES
        for round_ in range(_ROUNDS):
            atoms = self.coupling.atoms(self.parameters)
            if not atoms or clean >= len(samples):
                return
            sizes = self.context.sizes(atom.index for atom in atoms)
            self.widths = {
                atom: self._sample(samples[clean], size, at % 2) for at, (atom, size) in enumerate(sizes.items())
            }
            number = clean % count
            outcome = self.context.replay(number, self.context.narrow(self.widths), self.widths)
            clean = clean + 1 if outcome.clean else 0
            if not clean:
                self._mend(number, outcome, may_bind=self.bind and round_ < _BINDING_ROUNDS)
        raise TraceError("The narrow model never agreed with its recording: please report this model.")

    def _sample(self, kind: str, size: int, second: int) -> int:
        """A width: most channels, few, any number of them, or one or all (at random, or of every second space)."""
        if kind in _UNEVEN:
            return size if _UNEVEN[second] == kind else 1
        few = 0.4 * size if size >= 16 else 1  # a search may go down to one channel of a small space
        ranges = {"wide": (0.3 * size, size - 1), "narrow": (0.05 * size, few), "any": (1, size)}
        if kind == "extreme":
            return self.random.choice((1, size))
        low, high = (max(1, int(border)) for border in ranges[kind])
        return self.random.randint(low, high)

    def _mend(self, number: int, outcome: Replayer, may_bind: bool) -> None:
        """Try attributes first: a wrong guess makes new conflicts, and those must make nothing unprunable."""
        scales = [conflict for conflict in outcome.conflicts if conflict.kind in _LOOSE]
        conflicts = scales or outcome.conflicts
        ops = self.coupling.passes[number].recording.ops
        self.new.clear()
        bound = [
            self._bind((number, conflict.number, literal), ops[conflict.number], value)
            for conflict in conflicts
            for literal, value in conflict.literals
            if may_bind
        ]
        if any(bound) or any(self._join_read(number, conflict) for conflict in conflicts):
            return
        if any(self._join_bound(conflict) for conflict in conflicts):
            return
        kept = [self._fix_conflict(number, conflict) for conflict in conflicts]
        if any(kept) or self._unbind([conflict.path for conflict in conflicts]):
            return
        if scales and self._fix_guilty(number, scales):
            return
        last = min(len(outcome.recording.ops), len(ops) - 1)
        at = [(conflict.number, conflict.path) for conflict in outcome.conflicts] or [(last, ops[last].path)]
        why = outcome.stopped or "perhaps a Tensor subclass hides it (use plain tensors)"
        if not any(self._fix_module(number, *place, why) for place in at):
            raise TraceError(f"The narrow model does not run, and nothing is left to make unprunable: {why}")

    def _fix_guilty(self, number: int, conflicts: list[Conflict]) -> bool:
        """Make each space unprunable that causes one of the conflicts when it alone is narrow."""
        sizes = self.context.sizes(self.widths)
        known, guilty = {(conflict.number, conflict.kind) for conflict in conflicts}, []
        for atom, size in sizes.items():
            widths = sizes | {atom: max(1, size // 2)}
            found = self.context.replay(number, self.context.narrow(widths), widths).conflicts
            if any((conflict.number, conflict.kind) in known for conflict in found):
                guilty.append(((Atom(atom),),))
        return self._fix(tuple(guilty), f"{IN_CODE} depends on its size")

    def _unbind(self, paths: list[str]) -> bool:
        """Take back the bindings in these modules and around them, for good: one of them must be wrong."""
        inside = [f"{path}." for path in paths]
        wrong = [
            place
            for place in self.context.bindings
            if paths and (not place[0] or any(path.startswith(f"{place[0]}.") for path in inside))
        ]
        for place in wrong:
            del self.context.bindings[place]
        self.banned.update(wrong)
        return bool(wrong)

    def _fix_conflict(self, number: int, conflict: Conflict) -> bool:
        within = self.coupling.passes[number]
        op, layouts = within.recording.ops[conflict.number], within.layouts
        made = conflict.kind == "tensor"
        where = " at ".join(filter(None, ("a tensor" if made else op.name, conflict.path)))
        if made or conflict.kind == "scale":
            first = layouts[op.inputs()[0]][-1:] if op.inputs() and not made else ()
            reason = f"a factor in the code depends on its size ({where})"
            return self._fix(tuple(self._explaining(conflict)), reason) or self._fix(first, reason)
        reason = f"a number in the code fixes its size ({where})"
        if conflict.literals:
            # Numbers that still are the unpruned size come first: others may be computed from the width that these fix.
            size = self.coupling.channels.size
            stale = [literal.layout for literal, value in conflict.literals if value == size(literal.layout)]
            every = tuple(literal.layout for literal, _ in conflict.literals)
            return self._fix(tuple(stale), reason) or self._fix(every, reason)
        touched = [layout for value in op.outs if value is not None for layout in layouts[value]]
        return self._fix((*touched, *within.values(op)), f"the op does not run at other widths ({where})")

    def _join_read(self, number: int, conflict: Conflict) -> bool:
        """Join a dim with the one that its size was read from: x.shape[1] of what entered the module."""
        channels, within = self.coupling.channels, self.coupling.passes[number]
        first = next(op for op in within.recording.ops if f"{op.path}.".startswith(f"{conflict.path}."))
        for layout in within.layouts[first.inputs()[0]] if first.inputs() else ():
            wide, now = channels.size(layout), channels.width(layout, self.widths)
            for literal, value in conflict.literals:
                apart = channels.resolve(layout) != channels.resolve(literal.layout)
                if (wide, now) == (channels.size(literal.layout), value) and now < wide and apart:
                    channels.because = f"its size is read at {conflict.path}"
                    channels.join(layout, literal.layout)
                    return True
        return False

    def _join_bound(self, conflict: Conflict) -> bool:
        """Join a dim with the one that the attribute behind its size follows: several splits by the same attributes."""
        channels = self.coupling.channels
        for literal, value in conflict.literals:
            full = channels.size(literal.layout)
            for place, (layout, multiple) in self.context.bindings.items():
                around = not place[0] or f"{conflict.path}.".startswith(f"{place[0]}.")
                same_full = channels.size(layout) == full
                follows = multiple == 1 and channels.width(layout, self.widths) == value != full
                apart = channels.resolve(layout) != channels.resolve(literal.layout)
                if around and same_full and follows and apart and channels.atoms(literal.layout):
                    channels.because = f"{'.'.join(filter(None, place[:2]))} is the size of both"
                    channels.join(layout, literal.layout)
                    return True
        return False

    def _explaining(self, conflict: Conflict) -> Iterator[Layout]:
        """Spaces whose sizes, wide and narrow, are the two values of a factor: n, 1 / n or a square root of them."""
        for atom, narrow_size in self.widths.items():
            wide_size = self.coupling.channels.axis_size(Atom(atom))
            for wide, narrow_value in conflict.scales:
                gaps = (abs(wide_size**p - wide) + abs(narrow_size**p - narrow_value) for p in (1, -1, 0.5, -0.5))
                if min(gaps) < 1e-9:
                    yield ((Atom(atom),),)

    def _fix(self, dims: Dims, reason: str) -> bool:
        atoms = self.coupling.channels.atoms
        count = sum(self.coupling.channels.fix(layout, reason) for layout in dims)
        bindings = self.context.bindings
        self.context.bindings = {place: bound for place, bound in bindings.items() if atoms(bound[0])}
        return count > 0

    def _bind(self, key: Site, op: Op, value: int) -> bool:
        """Bind the next attribute that could be where this number comes from; False if nothing changed."""
        literal, channels = key[2], self.coupling.channels
        if not channels.atoms(literal.layout) or value != channels.size(literal.layout):
            return False
        if key not in self.candidates:
            self.candidates[key] = list(self._candidates(op.path, literal, value))[:_CANDIDATES]
        failed = self.tried.pop(key, None)
        if failed is not None:
            self.context.bindings.pop(failed, None)
        while self.candidates[key]:
            place, bound = self.candidates[key].pop(0)
            known = self.context.bindings.get(place)
            if known and place in self.new and channels.resolve(known[0]) == channels.resolve(bound[0]):
                return True  # a number before this one came from the same attribute: see whether that helps
            if known is None and place not in self.banned:
                self.new.add(place)
                self.context.bindings[place] = bound
                self.tried[key] = place
                return True
        return failed is not None

    def _candidates(self, path: str, literal: Literal, value: int) -> Iterator[tuple[Place, Bound]]:
        """Attributes that the number could come from; of a flattened map also those that count its channels only."""
        for place, multiple in self._attributes_equal(path, literal.position, value):
            yield place, (literal.layout, multiple)
        segment, *more = self.coupling.channels.resolve(literal.layout)
        channels = tuple(axis for axis in segment if not isinstance(axis, int))
        if not more and len(channels) < len(segment):
            inner = self.coupling.channels.segment_size(channels)
            for place, multiple in self._attributes_equal(path, None, inner):
                yield place, ((channels,), multiple)

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

    def _fix_module(self, number: int, at: int, path: str, why: str) -> bool:
        """Make unprunable what enters the module in which it happened, else all in it, else the same one module up."""
        within = self.coupling.passes[number]
        while True:
            inside = [op for op in within.recording.ops[: at + 1] if not path or f"{op.path}.".startswith(f"{path}.")]
            entering = [layout for op in inside[:1] for value in op.inputs()[:1] for layout in within.layouts[value]]
            everything = [layout for op in inside for layout in within.values(op)]
            reason = f"{IN_CODE} of {path or 'the model'} depends on its size: {why}"
            if self._fix(tuple(entering), reason) or self._fix(tuple(everything), reason):
                return True
            if not path:
                return False
            path = path.rpartition(".")[0]
