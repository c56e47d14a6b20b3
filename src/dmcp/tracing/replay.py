"""Narrow copies run beside the recording, to find numbers hidden in Python code."""

from __future__ import annotations

import collections
import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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

Item = TypeVar("Item")


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
        self.facts = coupling.passes[number]
        self.original = self.facts.recording
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
        """Run the op, compare it with that of the wide model, and go on as predicted where they differ."""
        args, kwargs = map_leaves(_without_data, args), map_leaves(_without_data, kwargs)  # NumPy's numbers have data
        number = len(self.recording.ops)
        if number >= len(self.original.ops) or self.original.ops[number].func is not call.func:
            compute(call.func, args, kwargs)  # what fails here may have failed in the wide model, which went on
            raise _AstrayError(f"the narrow model goes another way at {call.name} in {call.path or 'the top'}")
        expected = self.original.ops[number]
        if not any(value is not None for value in expected.outs):
            return expected.result  # a Python number: the narrow model takes the same branches

        # Its arguments: sizes, other numbers, tensors.
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

        # Its outputs.
        predicted = [None if value is None else self.shapes[value] for value in expected.outs]
        shapes: list[Shape | None] | None = None
        try:
            if _has_shapes_by_values(call.func):
                out = self._made_up(expected, predicted)
            else:
                out = compute(call.func, args, kwargs)
            shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves(out)]
            if shapes != predicted:
                kind = kind or "shape"
        except Exception:  # whatever the op says: it does not run at these widths
            kind = kind or "error"

        if kind:
            self.conflicts.append(Conflict(number, expected.path, kind, literals, _different(old, new)))
        if shapes == predicted:
            return out
        in_place = call.func._schema.name.endswith("_") and isinstance(args[0], Tensor)
        return args[0] if in_place else self._made_up(expected, predicted)

    def _sizes(self, number: int, expected: Op) -> set[str]:
        """Arguments that may follow a width: none where all shapes are what they were."""
        values = [value for value in (*expected.inputs(), *expected.outs) if value is not None]
        if all(self.shapes[value] == self.original.shapes[value] for value in values):
            return set()
        return _SIZES | {literal.argument for literal in self.facts.literals.get(number, ())}

    def _same_tensors(self, expected: Op, call: Op) -> bool:
        """Whether the op takes what it took in the wide model; a branch by a width may run the same ops on others."""
        not_paired = slice(self.paired, None)
        for narrow_op, wide_op in zip(self.recording.ops[not_paired], self.original.ops[not_paired], strict=False):
            for value, wide_value in zip(narrow_op.outs, wide_op.outs, strict=False):
                if value is not None:  # it may stand for several: what gives back its input here, copies it there
                    self.pairs.setdefault(value, set()).add(wide_value)
        self.paired = len(self.recording.ops)

        inputs, wide_inputs = call.inputs(), expected.inputs()
        if len(inputs) != len(wide_inputs):
            return False
        for value, wide_value in zip(inputs, wide_inputs, strict=True):
            if value in self.recording.tensors or value in self.recording.inputs:
                self.pairs.setdefault(value, set()).add(value)  # both models have the same ones, in the same order
            if value not in self.pairs:
                self.pairs[value] = {wide_value}
                self._compare_constants(value, wide_value, expected.path)
            if wide_value not in self.pairs[value]:
                return False
        return True

    def _compare_constants(self, value: int, wide_value: int, path: str) -> None:
        """Tensors from outside the model: which one it takes may depend on a width."""
        constant = self.recording.constants.get(value)
        wide_constant = self.original.constants.get(wide_value)
        if constant is None or wide_constant is None or constant.data is None or wide_constant.data is None:
            return
        if constant.data != wide_constant.data:
            self.conflicts.append(Conflict(len(self.recording.ops), path, "tensor"))

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the wide model read here: its dims are unprunable, and the narrow model has no data."""
        number = len(self.recording.reads)
        way = HOST_READS[func]
        if number >= len(self.original.reads) or self.original.reads[number].way != way:
            raise _AstrayError(f"the narrow model reads other values by {way} in {self.path[-1] or 'the top'}")
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

    def _made_up(self, expected: Op, shapes: list[Shape | None]) -> Any:
        """Tensors as predicted, so that one replay finds every conflict and not only the first."""
        tensors: list[Tensor | None] = []
        for value, shape in zip(expected.outs, shapes, strict=True):
            tensor = None
            if value is not None:
                tensor = torch.empty(shape or (), dtype=self.original.dtypes[value], device="meta")
            tensors.append(tensor)
        return tensors[0] if expected.single else tuple(tensors)


def _has_shapes_by_values(func: Func) -> bool:
    """Whether the shapes of an op's outputs follow from the values of its inputs."""
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return func in UNTAGGED or not tags.isdisjoint(func.tags)


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):  # .cpu() of what has no data
        return torch.device("meta")
    if isinstance(leaf, Tensor) and not leaf.is_meta:
        return on_meta(leaf)
    return leaf


class _AstrayError(Exception):
    """The narrow model runs other ops than the wide one did."""


@functools.cache
def _number_arguments(func: Func) -> tuple[str, ...]:
    """Arguments that take part in the arithmetic, unlike sizes and dims; `x * 2` has a number in a tensor's place."""
    names: list[str] = []
    for argument in func._schema.arguments:
        kind = str(argument.type).removeprefix("Optional[").rstrip("]")
        if kind in ("number", "float", "Tensor"):
            names.append(argument.name)
    return tuple(names)


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
    ignored = sizes
    if "stride" in op.name:
        ignored = sizes | {"stride"}
    return _plain([value for name, value in op.arguments().items() if name not in ignored])


def _plain(nested: Any) -> list[Any]:
    """What can be compared; NaN is like NaN."""
    comparable: list[Any] = []
    for leaf in leaves(nested):
        if isinstance(leaf, complex):
            comparable += (leaf.real, leaf.imag)
        elif isinstance(leaf, (int, float)):
            comparable.append(round(float(leaf), 12) if leaf == leaf else "nan")
        elif isinstance(leaf, (str, torch.dtype)):
            comparable.append(leaf)
    return comparable


def _different(old: Sequence[Any], new: Sequence[Any]) -> tuple[tuple[float, float], ...]:
    """The numbers that are not the same, in pairs."""
    pairs: list[tuple[float, float]] = []
    for before, after in zip(old, new, strict=False):
        if type(before) is float and type(after) is float and before != after:
            pairs.append((before, after))
    return tuple(pairs)


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
        cuts: dict[str, Cut] = {}
        for name, dims in self.coupling.tensors.items():
            cut = self.cut(dims, kept)
            if any(indices is not None for indices in cut):
                cuts[name] = cut
        return cuts

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
        attributes: dict[str, dict[str, Any]] = collections.defaultdict(dict)
        for within in self.coupling.passes:
            for (path, attribute), dims in within.attributes.items():
                old = vars(modules[path]).get(attribute)
                new = tuple(channels.width(layout, widths) for layout in dims)
                full = tuple(map(channels.size, dims))
                if new != full and old in (full, list(full), full[0]):
                    attributes[path][attribute] = new[0] if isinstance(old, int) else type(old)(new)
        for within in self.coupling.passes:
            for (path, attribute), empty in within.recording.caches.items():  # a cache of the wide model is wrong here
                attributes[path][attribute] = copy.deepcopy(empty)
        for (path, attribute, position), (layout, multiple) in self.bindings.items():
            value: Any = multiple * channels.width(layout, widths)
            if position is not None:
                old = attributes[path].get(attribute, vars(modules[path])[attribute])
                value = type(old)([*old[:position], value, *old[position + 1 :]])
            attributes[path][attribute] = value
        return attributes

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
        outcome.conflicts = [each for each in outcome.conflicts if (each.number, each.kind) not in always]
        return outcome

    def _replay(self, number: int, small: nn.Module, widths: Mapping[int, int]) -> Replayer:
        recording = self.coupling.passes[number].recording
        small.train(recording.training)
        replayer = Replayer(small, tensors_in(self.batch), self.coupling, number, widths)
        try:
            run_recorded(replayer, small, self.batch)
        except Exception as error:  # the model's own complaint about its widths
            replayer.stopped = str(error) if isinstance(error, _AstrayError) else reason_of(error)
        for (number_of_op, path, wide), (*_, narrowed) in zip(recording.made, replayer.recording.made, strict=False):
            old, new = _plain(wide), _plain(narrowed)
            if old != new:
                number_of_op = min(number_of_op, len(recording.ops) - 1)
                replayer.conflicts.append(Conflict(number_of_op, path, "tensor", scales=_different(old, new)))
        replayer.conflicts.sort(key=lambda conflict: conflict.number)
        return replayer


class Resolver:
    """Replays at random widths until all agree; binds attributes and makes channels unprunable as needed."""

    def __init__(self, context: ReplayContext, parameters: list[str], bind: bool) -> None:
        self.context = context
        self.coupling = context.coupling
        self.parameters = parameters
        self.bind = bind
        self.random = random.Random(0)
        # attributes not tried yet, and the one that is being tried
        self.candidates: dict[Site, list[tuple[Place, Bound]]] = {}
        self.tried: dict[Site, Place] = {}
        self.new: set[Place] = set()  # bound since the last replay
        self.banned: set[Place] = set()  # bound once, and wrong
        self.replayable: set[int] = set()  # recordings that a model of full width is known to replay
        self.widths: dict[int, int] = {}  # of the last replay
        self.modules = dict(context.model.named_modules())

    def run(self) -> None:
        """Until every kind of sample has replayed clean, in a row, in turns with every recording."""
        samples: tuple[str, ...] = _SAMPLES
        # Where a tensor has several spaces in one dim, a part of it may be cut out by its size.
        if any(len(self.coupling.channels.atoms(layout)) > 1 for layout in self.coupling.layouts()):
            samples += _UNEVEN
        clean = 0  # replays in a row that did as predicted
        for round_ in range(_ROUNDS):
            atoms = self.coupling.atoms(self.parameters)
            if not atoms or clean >= len(samples):
                return
            sizes = self.context.sizes(atom.index for atom in atoms)
            self.widths = self._sample_widths(samples[clean], sizes)
            number = clean % len(self.coupling.passes)
            outcome = self.context.replay(number, self.context.narrow(self.widths), self.widths)
            if outcome.clean:
                clean += 1
            else:
                clean = 0
                self._mend(number, outcome, may_bind=self.bind and round_ < _BINDING_ROUNDS)
        raise TraceError("The narrow model never agreed with its recording: please report this model.")

    def _sample_widths(self, kind: str, sizes: Mapping[int, int]) -> dict[int, int]:
        """A width for each atom."""
        widths: dict[int, int] = {}
        for position, (atom, size) in enumerate(sizes.items()):
            if kind in _UNEVEN:
                widths[atom] = size if _UNEVEN[position % 2] == kind else 1
            else:
                widths[atom] = self._sample(kind, size)
        return widths

    def _sample(self, kind: str, size: int) -> int:
        """A width at random: most channels, few, any number of them, or one or all."""
        if kind == "extreme":
            return self.random.choice((1, size))
        few = 0.4 * size if size >= 16 else 1  # a search may go down to one channel of a small space
        ranges = {"wide": (0.3 * size, size - 1), "narrow": (0.05 * size, few), "any": (1, size)}
        low, high = (max(1, int(border)) for border in ranges[kind])
        return self.random.randint(low, high)

    def _mend(self, number: int, outcome: Replayer, may_bind: bool) -> None:
        """Try attributes first: a wrong guess makes new conflicts, and those must make nothing unprunable."""
        scales = [conflict for conflict in outcome.conflicts if conflict.kind in _LOOSE]
        conflicts = scales or outcome.conflicts
        self.new.clear()
        if may_bind and self._bind_all(number, conflicts):
            return
        if any(self._join_read(number, conflict) for conflict in conflicts):
            return
        if any(self._join_bound(conflict) for conflict in conflicts):
            return
        fixed = [self._fix_conflict(number, conflict) for conflict in conflicts]
        if any(fixed) or self._unbind([conflict.path for conflict in conflicts]):
            return
        self._fix_guilty(number, outcome, conflicts)

    def _bind_all(self, number: int, conflicts: Iterable[Conflict]) -> bool:
        """Bind an attribute to each number that is wrong; whether anything changed."""
        ops = self.coupling.passes[number].recording.ops
        changed = False
        for conflict in conflicts:
            for literal, value in conflict.literals:
                if self._bind((number, conflict.number, literal), ops[conflict.number], value):
                    changed = True
        return changed

    def _fix_guilty(self, number: int, outcome: Replayer, conflicts: list[Conflict]) -> None:
        """Make the spaces unprunable whose widths cause these conflicts, or stop the narrow model."""
        sizes = self.context.sizes(self.widths)
        expected = {(conflict.number, conflict.kind) for conflict in conflicts}

        def fails(atoms: Sequence[int]) -> bool:
            """Whether the same happens if only these are narrow."""
            widths = sizes | {atom: self.widths[atom] for atom in atoms}
            trial = self.context.replay(number, self.context.narrow(widths), widths)
            stops_too = outcome.stopped is not None and trial.stopped is not None
            return stops_too or any((conflict.number, conflict.kind) in expected for conflict in trial.conflicts)

        if number not in self.replayable and fails([]):
            why = outcome.stopped or "sizes that it computes are others then"
            raise TraceError(f"The model does not run without data, on the meta device, as tracing needs it: {why}.")
        self.replayable.add(number)

        # Mostly it is what the op takes at which it happens.
        within = self.coupling.passes[number]
        ops = within.recording.ops
        if outcome.stopped is not None:
            op = ops[min(len(outcome.recording.ops), len(ops) - 1)]
        else:
            op = ops[conflicts[0].number]
        taken = [atom.index for layout in within.values(op) for atom in self.coupling.channels.atoms(layout)]
        nearby = [atom for atom in sizes if atom in taken]
        suspects = list(sizes)
        if nearby and fails(nearby):
            suspects = nearby
        guilty = find_guilty(suspects, fails)
        self._fix(tuple(((Atom(atom),),) for atom in guilty), self._reason(op, outcome, conflicts))

    def _reason(self, op: Op, outcome: Replayer, conflicts: list[Conflict]) -> str:
        """Why the narrow model disagrees, where the op itself does not tell."""
        location = _locate(op.name, op.path)
        if outcome.stopped is not None:
            return f"{IN_CODE} depends on its size ({location}): {outcome.stopped}"
        first = conflicts[0]
        if first.kind in _LOOSE:
            return f"{IN_CODE} depends on its size"
        if first.literals:
            return f"the code computes a number of channels from its size ({location})"
        return f"the output of an op has a size that does not follow from its inputs ({location})"

    def _unbind(self, paths: list[str]) -> bool:
        """Take back the bindings in these modules and around them, for good: one of them must be wrong."""
        wrong = [place for place in self.context.bindings if any(_is_inside(path, place[0]) for path in paths)]
        for place in wrong:
            del self.context.bindings[place]
        self.banned.update(wrong)
        return bool(wrong)

    def _fix_conflict(self, number: int, conflict: Conflict) -> bool:
        """Make unprunable what the conflict is about; False if it is so already."""
        within = self.coupling.passes[number]
        op = within.recording.ops[conflict.number]
        inputs = op.inputs()
        if conflict.kind == "tensor":
            reason = f"a factor in the code depends on its size ({_locate('a tensor', conflict.path)})"
            return self._fix(tuple(self._explaining(conflict)), reason)
        location = _locate(op.name, conflict.path)
        if conflict.kind == "scale":
            reason = f"a factor in the code depends on its size ({location})"
            last_dim = within.layouts[inputs[0]][-1:] if inputs else ()
            return self._fix(tuple(self._explaining(conflict)), reason) or self._fix(last_dim, reason)
        if conflict.literals:
            # Numbers that still are the unpruned size come first: others may be computed from the width that these fix.
            reason = f"a number in the code fixes its size ({location})"
            size = self.coupling.channels.size
            stale = [literal.layout for literal, value in conflict.literals if value == size(literal.layout)]
            every = [literal.layout for literal, _ in conflict.literals]
            return self._fix(tuple(stale), reason) or self._fix(tuple(every), reason)
        written = [layout for value in op.outs if value is not None for layout in within.layouts[value]]
        return self._fix((*written, *within.values(op)), f"the op does not run at other widths ({location})")

    def _join_read(self, number: int, conflict: Conflict) -> bool:
        """Join a dim with the one that its size was read from: x.shape[1] of what entered the module."""
        channels = self.coupling.channels
        within = self.coupling.passes[number]
        first = next(op for op in within.recording.ops if f"{op.path}.".startswith(f"{conflict.path}."))
        entering = within.layouts[first.inputs()[0]] if first.inputs() else ()
        for layout in entering:
            full_size = channels.size(layout)
            size = channels.width(layout, self.widths)
            for literal, value in conflict.literals:
                are_alike = (full_size, size) == (channels.size(literal.layout), value) and size < full_size
                if are_alike and channels.resolve(layout) != channels.resolve(literal.layout):
                    channels.because = f"its size is read at {conflict.path}"
                    channels.join(layout, literal.layout)
                    return True
        return False

    def _join_bound(self, conflict: Conflict) -> bool:
        """Join a dim with the one that the attribute behind its size follows: several splits by the same attributes."""
        channels = self.coupling.channels
        for literal, value in conflict.literals:
            full_size = channels.size(literal.layout)
            for place, (layout, multiple) in self.context.bindings.items():
                path, attribute, _ = place
                if not _is_inside(conflict.path, path) or channels.size(layout) != full_size:
                    continue
                follows = multiple == 1 and channels.width(layout, self.widths) == value != full_size
                are_apart = channels.resolve(layout) != channels.resolve(literal.layout)
                if follows and are_apart and channels.atoms(literal.layout):
                    name = f"{path}.{attribute}" if path else attribute
                    channels.because = f"{name} is the size of both"
                    channels.join(layout, literal.layout)
                    return True
        return False

    def _explaining(self, conflict: Conflict) -> Iterator[Layout]:
        """Spaces whose sizes, wide and narrow, are the two values of a factor: n, 1 / n or a square root of them."""
        for atom, narrow_size in self.widths.items():
            wide_size = self.coupling.channels.axis_size(Atom(atom))
            for wide_factor, narrow_factor in conflict.scales:
                for power in (1, -1, 0.5, -0.5):
                    gap = abs(wide_size**power - wide_factor) + abs(narrow_size**power - narrow_factor)
                    if gap < 1e-9:
                        yield ((Atom(atom),),)
                        break

    def _fix(self, dims: Dims, reason: str) -> bool:
        """Make dims unprunable, and end the bindings to them; False if they were so already."""
        channels = self.coupling.channels
        count = sum(channels.fix(layout, reason) for layout in dims)
        bindings = self.context.bindings
        self.context.bindings = {place: bound for place, bound in bindings.items() if channels.atoms(bound[0])}
        return count > 0

    def _bind(self, key: Site, op: Op, value: int) -> bool:
        """Bind the next attribute that could be where this number comes from; False if nothing changed."""
        literal = key[2]
        channels = self.coupling.channels
        if not channels.atoms(literal.layout) or value != channels.size(literal.layout):
            return False
        if key not in self.candidates:
            self.candidates[key] = list(self._candidates(op.path, literal, value))[:_CANDIDATES]
        failed = self.tried.pop(key, None)
        if failed is not None:
            self.context.bindings.pop(failed, None)
        while self.candidates[key]:
            place, bound = self.candidates[key].pop(0)
            earlier = self.context.bindings.get(place)
            if earlier and place in self.new and channels.resolve(earlier[0]) == channels.resolve(bound[0]):
                return True  # a number before this one came from the same attribute: see whether that helps
            if earlier is None and place not in self.banned:
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
                for name, attribute in vars(self.modules[owner]).items():
                    if name.startswith("_"):
                        continue
                    if type(attribute) is int and attribute == multiple * value:
                        yield (owner, name, None), multiple
                    elif multiple == 1 and position is not None and _has_int_at(attribute, position, value):
                        yield (owner, name, position), 1


def find_guilty(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Those of some items that cause a failure, which all of them together do.

    They are halved until single ones are found: if one item is guilty, this takes few trials.
    """
    half = len(items) // 2
    if half == 0:
        return list(items)
    first, second = items[:half], items[half:]
    guilty: list[Item] = []
    for part in (first, second):
        if fails(part):
            guilty += find_guilty(part, fails)
    if guilty:
        return guilty

    # Only some of both halves together fail.
    in_first = find_guilty(first, lambda part: fails([*part, *second]))
    in_second = find_guilty(second, lambda part: fails([*in_first, *part]))
    return in_first + in_second


def _is_inside(path: str, around: str) -> bool:
    """Whether a module is another one or lies inside it; "" is the whole model."""
    return not around or f"{path}.".startswith(f"{around}.")


def _locate(name: str, path: str) -> str:
    """An op, or "a tensor", with the module that it is in, for the reasons that users read."""
    return f"{name} at {path}" if path else name


def _has_int_at(attribute: object, position: int, value: int) -> bool:
    """Whether an attribute is a list or tuple with this number at this position."""
    if type(attribute) not in (list, tuple):
        return False
    assert isinstance(attribute, (list, tuple))
    return position < len(attribute) and type(attribute[position]) is int and attribute[position] == value
