"""Call, what a channel rule sees of an op and can state about it; and the rules applied to a recording."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from dmcp.errors import TraceError
from dmcp.modules import map_leaves
from dmcp.tracing.layout import Atom, Channels, Layout, fixed, width
from dmcp.tracing.record import Func, Op, Recording, Ref, Shape

Dims = tuple[Layout, ...]


class Flow(Enum):
    """What an op makes of channels that are exactly zero."""

    KEEPS = auto()  # they come out zero
    POINTWISE = auto()  # they come out as f(0), which can be tried
    CONTRACTS = auto()  # they are summed away, or pass as a batch
    NORMALIZES = auto()  # they come out as the norm's shift
    PADS = auto()  # they come out zero, and channels that are added are zero too
    LOSES = auto()  # nothing is known


@dataclass(frozen=True)
class Operand:
    """A tensor argument of an op."""

    value: int
    dims: Dims
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Contraction:
    """A sum of products over one dim. Channels that are off must be zero in one of the two factors."""

    path: str
    data: int
    weight: int | None  # None: a plain sum
    weight_dim: int  # the dim of `weight` that is summed away
    over: Layout
    bias: int | None = None
    out_dim: int | None = None  # the dim of `weight` that becomes output channels


@dataclass(frozen=True)
class OpCost:
    """Multiply-adds of one op: a coefficient times a product of dims."""

    path: str
    kind: str
    coefficient: int
    dims: Dims
    out: int  # the op's output, whose size shows how the cost grows with the batch


@dataclass(frozen=True)
class Literal:
    """A number among an op's arguments that should follow the width of a dim."""

    argument: str
    position: int | None  # where in the list, if the argument is one
    layout: Layout


@dataclass
class Facts:
    """All that the rules stated about one recording."""

    contractions: dict[int, list[Contraction]] = field(default_factory=dict)  # by op number
    norms: dict[int, tuple[int | None, int | None, Layout]] = field(default_factory=dict)  # scale and shift of a dim
    costs: list[OpCost] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    literals: dict[int, list[Literal]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Dims] = field(default_factory=dict)  # (module path, attribute) -> what it counts
    written: list[Layout] = field(default_factory=list)  # output channels of layers
    mixed: list[tuple[Layout, str]] = field(default_factory=list)  # gated is not cut here, and why
    unknown: list[Op] = field(default_factory=list)


class Call:
    """One op with the layouts of its arguments, as a rule sees it: call["weight"] is an argument by its schema name."""

    def __init__(
        self, channels: Channels, recording: Recording, layouts: Mapping[int, Dims], number: int, facts: Facts
    ):
        self.channels, self.facts, self.number = channels, facts, number
        self.op = recording.ops[number]
        self.path = self.op.path
        self.flow = Flow.LOSES
        self.out_shapes = [() if value is None else recording.shapes[value] for value in self.op.outs]

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            return Operand(leaf.value, layouts[leaf.value], recording.shapes[leaf.value], recording.dtypes[leaf.value])

        self.arguments = {name: map_leaves(operand, leaf) for name, leaf in self.op.arguments().items()}
        self.operands: list[Operand] = [operand(Ref(value)) for value in self.op.inputs()]

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def x(self) -> Operand:
        """The first tensor argument."""
        return self.operands[0]

    def where(self) -> str:
        """The op, for reasons: "conv2d at layer1.0.conv1"."""
        return f"{self.op.name} at {self.path}" if self.path else self.op.name

    def fixed_outputs(self) -> list[Dims]:
        """Outputs that nothing can narrow."""
        return [tuple(map(fixed, shape)) for shape in self.out_shapes]

    def fix(self, layout: Layout, reason: str) -> None:
        """State that a dim is unprunable."""
        self.channels.fix(layout, f"{reason} ({self.where()})")

    def fixing(self, chosen: Iterable[int], reason: str) -> Dims:
        """The dims of the first tensor, of which some are unprunable and as long as in the first output."""
        dims = list(self.x.dims)
        for dim in chosen:
            self.fix(dims[dim], reason)
            dims[dim] = fixed(self.out_shapes[0][dim])
        return tuple(dims)

    def mixes(self, layout: Layout, reason: str) -> None:
        """State that this op mixes channels of the dim, so that gating is not cutting."""
        self.facts.mixed.append((layout, f"{reason} ({self.where()})"))

    def join_all(self, layout: Layout, *operands: Operand | None) -> None:
        """Join dim 0 of per-channel parameters with a dim."""
        for operand in operands:
            if isinstance(operand, Operand):
                self.channels.join(layout, operand.dims[0])

    def broadcast(self, operands: list[Dims]) -> Dims:
        """Dims of an element-wise op: those of equal size become one."""
        rank = max((len(dims) for dims in operands), default=0)
        out: list[Layout] = []
        for back in range(rank, 0, -1):
            wide = [dims[-back] for dims in operands if len(dims) >= back and self.channels.size(dims[-back]) != 1]
            for other in wide[1:]:
                self.channels.join(wide[0], other)
            out.append(wide[0] if wide else fixed(1))
        return tuple(out)

    def contracts(
        self,
        data: Operand,
        weight: Operand | None,
        weight_dim: int,
        over: Layout,
        bias: Operand | None = None,
        out_dim: int | None = None,
    ) -> None:
        """State that a dim is summed away."""
        self.flow = Flow.CONTRACTS
        factor, added = (it.value if isinstance(it, Operand) else None for it in (weight, bias))
        found = Contraction(self.path, data.value, factor, weight_dim, over, added, out_dim)
        self.facts.contractions.setdefault(self.number, []).append(found)

    def costs(self, kind: str, coefficient: int, *dims: Layout) -> None:
        """State what the op costs: coefficient times the product of the dims."""
        out = self.op.outs[0]
        assert out is not None
        self.facts.costs.append(OpCost(self.path, kind, coefficient, dims, out))

    def follows(self, argument: str, layouts: Iterable[Layout]) -> None:
        """State that an argument's numbers are the sizes of these dims."""
        single = not isinstance(self[argument], (list, tuple))
        self.facts.literals.setdefault(self.number, []).extend(
            Literal(argument, None if single else position, layout) for position, layout in enumerate(layouts)
        )

    def describes(self, **attributes: Dims) -> None:
        """State what attributes of the calling module count, if it has attributes of these names."""
        for name, counted in attributes.items():
            self.facts.attributes[self.path, name] = counted

    def writes(self, *layouts: Layout) -> None:
        """State that these are output channels of a layer."""
        self.facts.written.extend(layouts)

    def normalizes(self, over: Layout) -> None:
        """State that the op's weight and bias scale and shift the channels of a dim."""
        self.flow = Flow.NORMALIZES
        weight, bias = (it.value if isinstance(it, Operand) else None for it in (self["weight"], self["bias"]))
        self.facts.norms[self.number] = weight, bias, over


Rule = Callable[[Call], list[Dims]]


def regroup(channels: Channels, dims: Dims, shape: Shape) -> Dims:
    """Dims after a reshape: the shortest runs of old and new dims with equal products match each other."""
    sizes = [channels.size(layout) for layout in dims]
    out: list[Layout] = []
    old = new = 0
    while old < len(sizes) or new < len(shape):
        old_stop, new_stop = min(old + 1, len(sizes)), min(new + 1, len(shape))
        while math.prod(sizes[old:old_stop]) != math.prod(shape[new:new_stop]):
            if math.prod(sizes[old:old_stop]) < math.prod(shape[new:new_stop]):
                old_stop += 1
            else:
                new_stop += 1
        out.extend(_refactor(channels, dims[old:old_stop], shape[new:new_stop]))
        old, new = old_stop, new_stop
    return tuple(out)


def _refactor(channels: Channels, dims: Dims, shape: Shape) -> list[Layout]:
    """Multiply the dims into one, then factor it into the new sizes."""
    if len(dims) == len(shape) == 1:
        return [dims[0]]
    rest: Layout | None = None
    for layout in dims:
        if channels.size(layout) != 1:
            rest = layout if rest is None else channels.multiply(rest, layout)
    out: list[Layout] = []
    for position, size in enumerate(shape):
        if size == 1 or rest is None:
            out.append(fixed(size))
        elif math.prod(shape[position + 1 :]) == 1:
            out.append(rest)
            rest = None
        else:
            outer, rest = channels.factor(rest, size)
            out.append(outer)
    return out


def unknown(call: Call, reason: str = "there is no channel rule for it") -> list[Dims]:
    """An op without a rule: its inputs and outputs are unprunable, and it is reported."""
    call.facts.unknown.append(call.op)
    call.flow = Flow.LOSES
    outs = [tuple(map(call.channels.fresh, shape)) for shape in call.out_shapes]
    for dims in (*(operand.dims for operand in call.operands), *outs):  # what meets an output has the reason too
        for layout in dims:
            call.fix(layout, reason)
    return outs


def pointwise(call: Call) -> list[Dims]:
    """Element by element, with broadcasting."""
    call.flow = Flow.POINTWISE
    return [call.broadcast([operand.dims for operand in call.operands])] * len(call.out_shapes)


def find_rule(func: Func, rules: Mapping[Func, Rule]) -> Rule | None:
    """The rule of an op or of its out-of-place twin, else `pointwise` if torch tags the op so."""
    name, overload = func._schema.name.split("::")[1], func._overloadname
    twin = getattr(getattr(torch.ops.aten, name[:-1], None), overload, None) if name.endswith("_") else None
    candidates: list[Func] = [func] if twin is None else [func, twin]
    tagged = pointwise if any(torch.Tag.pointwise in candidate.tags for candidate in candidates) else None
    return next((rules[candidate] for candidate in candidates if candidate in rules), tagged)


@dataclass
class Coupling:
    """Layouts of every value in every recording, over one set of atoms."""

    channels: Channels
    tensors: dict[str, Dims]  # parameters and buffers by name
    recordings: list[Recording] = field(default_factory=list)
    layouts: list[dict[int, Dims]] = field(default_factory=list)  # per recording: value -> dims
    facts: list[Facts] = field(default_factory=list)

    def atoms(self, names: Sequence[str]) -> list[Atom]:
        """The atoms that can be narrowed in these tensors, in order, each once."""
        found: dict[Atom, None] = {}
        for name in names:
            for layout in self.tensors.get(name, ()):
                found.update(dict.fromkeys(self.channels.atoms(layout)))
        return list(found)

    def predict(self, number: int, widths: Mapping[int, int]) -> dict[int, Shape]:
        """Shapes of all values of a recording when each atom has its width."""
        size = functools.cache(lambda layout: width(self.channels.resolve(layout), widths))  # many share their dims
        return {value: tuple(map(size, dims)) for value, dims in self.layouts[number].items()}


def couple(
    recordings: Sequence[Recording], rules: Mapping[Func, Rule], strict: bool, ignore: Sequence[str] = ()
) -> Coupling:
    """Apply the rules to every op of every recording; strict: an op without a rule must be in an ignored module."""
    coupling = Coupling(Channels(), {}, list(recordings))
    for recording in recordings:
        _follow(coupling, recording, rules, strict, ignore)
    for recording, layouts in zip(recordings, coupling.layouts, strict=True):
        for layout in (layout for value in recording.outputs for layout in layouts[value]):
            coupling.channels.fix(layout, "it is an output of the model")
    return coupling


def _follow(
    coupling: Coupling, recording: Recording, rules: Mapping[Func, Rule], strict: bool, ignore: Sequence[str]
) -> None:
    channels, layouts, facts = coupling.channels, dict[int, Dims](), Facts()
    coupling.layouts.append(layouts)
    coupling.facts.append(facts)
    for value, name in recording.tensors.items():
        layouts[value] = coupling.tensors.setdefault(name, tuple(map(channels.fresh, recording.shapes[value])))
    for value in (*recording.inputs, *recording.constants):
        layouts.setdefault(value, tuple(map(fixed, recording.shapes[value])))
    for number, op in enumerate(recording.ops):
        call = Call(channels, recording, layouts, number, facts)
        channels.because = call.where()
        rule = find_rule(op.func, rules)
        if rule is None and strict and not any(op.path == name or op.path.startswith(name + ".") for name in ignore):
            raise TraceError(_no_rule(call))
        outs = unknown(call) if rule is None else rule(call)
        facts.flows.append(call.flow)
        if len(outs) != len(op.outs):
            raise TraceError(f"The channel rule of {op.func} gave {len(outs)} outputs, not {len(op.outs)}.")
        for out, dims in zip(op.outs, outs, strict=True):
            if out is not None:
                layouts[out] = dims
                if (sizes := tuple(map(channels.size, dims))) != (shape := recording.shapes[out]):
                    where = call.path or "the top"
                    raise TraceError(f"The channel rule of {op.func} at {where} gave {sizes}, not {shape}.")


def _no_rule(call: Call) -> str:
    shape = "x".join(map(str, call.x.shape)) if call.operands else "none"
    layer = call.path.partition(".parametrizations.")[0]  # what computes a weight has no parameters of its own
    second = f'trace(..., ignore=["{layer}"])' if layer else "trace(..., strict=False)"
    return (
        f"{call.path or 'the model'}: no channel rule for {call.op.func} (input {shape}). Give one: "
        f"trace(..., rules=RULES | {{{call.op.func}: my_rule}}), or leave its channels unpruned: {second}."
    )
