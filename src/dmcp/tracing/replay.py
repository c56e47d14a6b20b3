"""Replay: narrow a copy of the model to random widths, run it beside its recording, and compare every shape.

A trace cannot say where a number came from. `x.view(batch, 768)` and `x.view(batch, x.shape[1])` look the same until
the model is narrow. What is done where they differ is in settling.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.slicing import Cut, narrow, on_meta
from dmcp.tracing.coupling import Coupling
from dmcp.tracing.facts import Dims, Facts, Literal
from dmcp.tracing.layouts import Atom, Layout, kept_indices, width
from dmcp.tracing.readings import READERS, UNTAGGED
from dmcp.tracing.recording import Func, Op, Recorder, Recording, Shape, leaves, map_leaves, run_recorded, tensors_in
from dmcp.tracing.shortcuts import compute

LOOSE = ("scale", "tensor")  # kinds of conflicts about numbers that tell no size
Place = tuple[str, str, int | None]  # module path, attribute, position if it is a list


@dataclass(frozen=True)
class Bound:
    """An attribute that follows a width: attribute = multiple x width."""

    layout: Layout
    multiple: int


@dataclass(frozen=True)
class Conflict:
    """An op of the narrow model that is not as predicted."""

    number: int
    path: str  # the module in which it happened
    kind: str  # "number", "shape", "error", "scale", or "tensor": one that was made of numbers before the op
    literals: tuple[tuple[Literal, int], ...] = ()  # numbers in the arguments that are wrong, and what they are
    scales: tuple[tuple[float, float], ...] = ()  # factors in the arithmetic, wide and narrow


@dataclass
class Outcome:
    """What one replay found."""

    conflicts: list[Conflict] = field(default_factory=list)
    stopped: str | None = None  # the model raised, or went another way

    @property
    def clean(self) -> bool:
        return not self.conflicts and self.stopped is None


class Replayer(Recorder):  # type: ignore[no-untyped-call]
    """Records a narrow model in lockstep with the recording of the wide one."""

    def __init__(
        self,
        model: nn.Module,
        inputs: list[Tensor],
        original: Recording,
        facts: Facts,
        shapes: Mapping[int, Shape],
        sizes: Mapping[Layout, int],
    ) -> None:
        super().__init__(model, inputs)
        self.original, self.facts, self.shapes, self.sizes = original, facts, shapes, sizes
        self.outcome = Outcome()
        self.pairs: dict[int, set[int | None]] = {}  # value -> those of the wide model that it stands for
        self.paired = 0  # ops whose outputs are among them

    def run(self, call: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_leaves(_without_data, args), map_leaves(_without_data, kwargs)  # NumPy's numbers have data
        number = len(self.recording.ops)
        if number >= len(self.original.ops) or self.original.ops[number].func is not call.func:
            raise _AstrayError(f"the narrow model goes another way at {call.name} in {call.path or 'the top'}")
        expected = self.original.ops[number]
        if not any(value is not None for value in expected.outs):
            return expected.result  # a Python number: the narrow model takes the same branches
        wanted = [None if value is None else self.shapes[value] for value in expected.outs]
        literals = self._wrong_literals(number, call)
        kind = "number" if literals else ""
        old, new = _numbers(expected), _numbers(call)
        if not kind and old == new:
            sizes = self._sizes(number, expected)
            old, new = _words(expected, sizes), _words(call, sizes)
        if old != new:
            kind = "scale"
        if not self._same_tensors(expected, call):
            raise _AstrayError(f"the narrow model takes other tensors for {call.name} in {call.path or 'the top'}")
        by_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(call.func.tags)
        made_up = bool(by_values) or call.func in UNTAGGED
        try:
            out = self._made_up(expected, wanted) if made_up else compute(call.func, args, kwargs)
            got = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves(out)]
            if got != wanted:
                kind = kind or "shape"
        except Exception:  # whatever the op says: it does not run at these widths
            kind = kind or "error"
            got = None
        if kind:
            conflict = Conflict(number, expected.path, kind, tuple(literals), _different(old, new))
            self.outcome.conflicts.append(conflict)
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
            self.outcome.conflicts.append(Conflict(len(self.recording.ops), path, "tensor"))

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the wide model read here: its dims are whole, and the narrow model has no data."""
        number = len(self.recording.reads)
        if number >= len(self.original.reads) or self.original.reads[number].way != READERS[func]:
            raise _AstrayError(
                f"the narrow model reads other values by {READERS[func]} in {self.path[-1] or 'the top'}"
            )
        self.recording.reads.append(self.original.reads[number])
        return copy.deepcopy(self.original.reads[number].result)

    def _wrong_literals(self, number: int, call: Op) -> list[tuple[Literal, int]]:
        arguments = call.arguments()
        wrong: list[tuple[Literal, int]] = []
        for literal in self.facts.literals.get(number, ()):
            value = arguments[literal.argument]
            if literal.position is not None:
                value = value[literal.position] if literal.position < len(value) else -1
            if value != -1 and value != self.sizes[literal.layout]:
                wrong.append((literal, value))
        return wrong

    def _made_up(self, expected: Op, wanted: list[Shape | None]) -> Any:
        """Tensors as predicted, so that one replay finds every conflict and not only the first."""
        made = [
            None
            if value is None or shape is None
            else torch.empty(shape, dtype=self.original.dtypes[value], device="meta")
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
    kinds = ("number", "float", "Tensor")
    types = {
        argument.name: str(argument.type).removeprefix("Optional[").rstrip("]") for argument in func._schema.arguments
    }
    return tuple(name for name, kind in types.items() if kind in kinds)


# Arguments that tell a size, which may follow a width.
_SIZES = {"size", "sizes", "shape", "normalized_shape", "output_size", "output_padding", "length", "num_classes"}
_SIZES |= {"split_size", "split_sizes", "sections", "chunks", "repeats", "start", "end", "storage_offset"}
_SIZES |= {"groups", "group", "num_groups", "N", "C", "HxW"}


def _numbers(op: Op) -> list[Any]:
    """Python numbers that the op computes with: 1 / sqrt(head size) and the like."""
    arguments = op.arguments()
    return _plain([arguments[name] for name in _number_arguments(op.func)])


def _words(op: Op, sizes: set[str]) -> list[Any]:
    """All that the op was told besides tensors and sizes: by how much to roll, what to pad with, which kind of gelu."""
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
class Rehearsal:
    """A model, its coupling, and the attributes that were found to follow widths."""

    model: nn.Module  # on the meta device
    example: Any
    batches: list[Any]  # the example of each recording, on the meta device
    coupling: Coupling
    bindings: dict[Place, Bound] = field(default_factory=dict)
    always: dict[int, set[tuple[int, str]]] = field(default_factory=dict)  # recording -> conflicts at full width, too
    stopped_at: int = 0  # ops that the last replay ran

    def cuts(self, kept: Mapping[int, Tensor], sizes: Mapping[int, int]) -> dict[str, Cut]:
        """Indices that stay of every tensor that has atoms; `kept` per atom."""
        found = {name: self._cut(dims, kept, sizes) for name, dims in self.coupling.tensors.items()}
        return {name: cut for name, cut in found.items() if any(kept is not None for kept in cut)}

    def cut_value(self, value: int, kept: Mapping[int, Tensor], sizes: Mapping[int, int]) -> Cut:
        """The same of a value of the last recording."""
        return self._cut(self.coupling.layouts[-1][value], kept, sizes)

    def _cut(self, dims: Dims, kept: Mapping[int, Tensor], sizes: Mapping[int, int]) -> Cut:
        channels = self.coupling.channels
        return tuple(
            kept_indices(channels.resolve(layout), kept, sizes) if channels.atoms(layout) else None for layout in dims
        )

    def attributes(self, widths: Mapping[int, int]) -> dict[str, dict[str, Any]]:
        """Attributes of modules at these widths: those that layers are known to have, and the bound ones."""
        modules = dict(self.model.named_modules())
        resolve = self.coupling.channels.resolve
        found: dict[str, dict[str, Any]] = {}
        for facts in self.coupling.facts:
            for (path, attribute), dims in facts.attributes.items():
                old = vars(modules[path]).get(attribute)
                new = tuple(width(resolve(layout), widths) for layout in dims)
                full = tuple(self.coupling.channels.size(layout) for layout in dims)
                if new != full and old in (full, list(full), full[0]):
                    found.setdefault(path, {})[attribute] = new[0] if isinstance(old, int) else type(old)(new)
        for recording in self.coupling.recordings:
            for (
                path,
                attribute,
            ), empty in recording.caches.items():  # what a wide model cached is wrong for a narrow one
                found.setdefault(path, {})[attribute] = copy.deepcopy(empty)
        for (path, attribute, position), bound in self.bindings.items():
            value: Any = bound.multiple * width(resolve(bound.layout), widths)
            if position is not None:
                old = found.get(path, {}).get(attribute, vars(modules[path])[attribute])
                value = type(old)([*old[:position], value, *old[position + 1 :]])
            found.setdefault(path, {})[attribute] = value
        return found

    def narrow(self, widths: Mapping[int, int], sizes: Mapping[int, int]) -> nn.Module:
        """The narrow model, on the meta device."""
        kept = {atom: torch.arange(width) for atom, width in widths.items()}
        return narrow(self.model, self.cuts(kept, sizes), self.attributes(widths), meta=True)

    def replay(self, number: int, small: nn.Module, widths: Mapping[int, int]) -> Outcome:
        """Run a throw-away narrow model in lockstep with one of the recordings.

        What differs at full width, too, follows no width: numbers that are others in every run (of a generator of the
        model's own), and ops that cannot run without data.
        """
        outcome = self._replay(number, small, widths)
        if number not in self.always and any(conflict.kind in (*LOOSE, "error") for conflict in outcome.conflicts):
            at, sizes = self.stopped_at, {atom: self.coupling.channels.axis_size(Atom(atom)) for atom in widths}
            whole = self._replay(number, self.narrow(sizes, sizes), sizes)
            self.always[number] = {(conflict.number, conflict.kind) for conflict in whole.conflicts}
            self.stopped_at = at
        always = self.always.get(number, set())
        outcome.conflicts = [it for it in outcome.conflicts if (it.number, it.kind) not in always]
        return outcome

    def _replay(self, number: int, small: nn.Module, widths: Mapping[int, int]) -> Outcome:
        recording, facts = self.coupling.recordings[number], self.coupling.facts[number]
        layouts = {literal.layout for literals in facts.literals.values() for literal in literals}
        sizes = {layout: width(self.coupling.channels.resolve(layout), widths) for layout in layouts}
        example = self.batches[number]
        small.train(recording.training)
        shapes = self.coupling.predict(number, widths)
        replayer = Replayer(small, tensors_in(example), recording, facts, shapes, sizes)
        try:
            run_recorded(replayer, small, example)
        except Exception as error:  # the model's own complaint about its widths
            kind = "" if isinstance(error, _AstrayError) else f"{type(error).__name__}: "
            replayer.outcome.stopped = f"{kind}{error}"
        for old, new in zip(recording.made, replayer.recording.made, strict=False):
            wide, narrow_ = _plain(old.numbers), _plain(new.numbers)
            if wide != narrow_:
                place = min(old.number, len(recording.ops) - 1)
                conflict = Conflict(place, old.path, "tensor", scales=_different(wide, narrow_))
                replayer.outcome.conflicts.append(conflict)
        replayer.outcome.conflicts.sort(key=lambda conflict: conflict.number)
        self.stopped_at = len(replayer.recording.ops)
        return replayer.outcome


def meta_example(example: Any) -> Any:
    """The example input without its data."""
    return map_leaves(lambda leaf: on_meta(leaf) if isinstance(leaf, Tensor) else leaf, example)
