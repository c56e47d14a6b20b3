"""What channel rules see of an op and state about it, and the layouts of all values that follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from dmcp.tracing.layout import Atom, Channels, Layout, fixed, in_spaces
from dmcp.tracing.modules import map_leaves
from dmcp.tracing.record import Op, Recording, Ref, Shape

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
class Norm:
    """The values that scale and shift the channels of a dim; None where the norm has none."""

    weight: int | None
    bias: int | None
    over: Layout


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
    from_end: bool = False  # the number is negative: it counts from the end of a dim


@dataclass
class Pass:
    """One recording, the layouts of its values, and all that the rules stated about it."""

    recording: Recording
    layouts: dict[int, Dims] = field(default_factory=dict)
    contractions: dict[int, list[Contraction]] = field(default_factory=dict)  # by op number
    norms: dict[int, Norm] = field(default_factory=dict)  # by op number
    costs: list[OpCost] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    literals: dict[int, list[Literal]] = field(default_factory=dict)  # by op number
    attributes: dict[tuple[str, str], Dims] = field(default_factory=dict)  # (module path, attribute) -> what it counts
    written: list[Layout] = field(default_factory=list)  # output channels of layers
    mixed: list[tuple[Layout, str]] = field(default_factory=list)  # dims where gating is not cutting, and why
    unknown: list[Op] = field(default_factory=list)

    def values(self, op: Op) -> list[Layout]:
        """The dims of what an op takes."""
        return [layout for value in op.inputs() for layout in self.layouts[value]]


class Call:
    """One op with the layouts of its arguments, as a rule sees it: call["weight"] is an argument by its schema name."""

    def __init__(self, channels: Channels, within: Pass, number: int) -> None:
        self.channels = channels
        self.facts = within
        self.number = number
        self.op = within.recording.ops[number]
        self.path = self.op.path
        self.flow = Flow.LOSES
        shapes = within.recording.shapes
        self.out_shapes = [() if value is None else shapes[value] for value in self.op.outs]

        def with_layouts(leaf: Any) -> Any:
            return self._operand(leaf.value) if isinstance(leaf, Ref) else leaf

        self.arguments = {name: map_leaves(with_layouts, value) for name, value in self.op.arguments().items()}
        self.operands = [self._operand(value) for value in self.op.inputs()]

    def _operand(self, value: int) -> Operand:
        recording = self.facts.recording
        return Operand(value, self.facts.layouts[value], recording.shapes[value], recording.dtypes[value])

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
            layouts = [dims[-back] for dims in operands if len(dims) >= back]
            wide = [layout for layout in layouts if self.channels.size(layout) != 1]
            for layout in wide[1:]:
                self.channels.join(wide[0], layout)
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
        contraction = Contraction(self.path, data.value, _value_of(weight), weight_dim, over, _value_of(bias), out_dim)
        self.facts.contractions.setdefault(self.number, []).append(contraction)

    def costs(self, kind: str, coefficient: int, *dims: Layout) -> None:
        """State what the op costs: coefficient times the product of the dims."""
        out = self.op.outs[0]
        assert out is not None
        self.facts.costs.append(OpCost(self.path, kind, coefficient, dims, out))

    def follows(self, argument: str, layouts: Iterable[Layout], from_end: bool = False) -> None:
        """State that an argument's numbers are the sizes of these dims, or minus them if counted from the end."""
        is_list = isinstance(self[argument], (list, tuple))
        literals = self.facts.literals.setdefault(self.number, [])
        for position, layout in enumerate(layouts):
            literals.append(Literal(argument, position if is_list else None, layout, from_end))

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
        self.facts.norms[self.number] = Norm(_value_of(self["weight"]), _value_of(self["bias"]), over)


def _value_of(operand: Operand | None) -> int | None:
    """The value of an optional operand."""
    return operand.value if isinstance(operand, Operand) else None


Rule = Callable[[Call], list[Dims]]


@dataclass
class Coupling:
    """Layouts of every value in every recording, over one set of atoms."""

    channels: Channels = field(default_factory=Channels)
    tensors: dict[str, Dims] = field(default_factory=dict)  # parameters and buffers by name
    passes: list[Pass] = field(default_factory=list)

    def atoms(self, names: Iterable[str]) -> list[Atom]:
        """The atoms that can be narrowed in these tensors, in order, each once."""
        atoms: dict[Atom, None] = {}
        for name in names:
            for layout in self.tensors.get(name, ()):
                atoms.update(dict.fromkeys(self.channels.atoms(layout)))
        return list(atoms)

    def layouts(self) -> set[Layout]:
        """Those of all values."""
        return {layout for within in self.passes for dims in within.layouts.values() for layout in dims}

    def in_spaces(self, dims: Iterable[Layout], numbers: Mapping[int, int]) -> list[Layout]:
        """Dims in terms of spaces; `numbers` has the space of each atom."""
        return [in_spaces(self.channels.resolve(layout), numbers) for layout in dims]

    def layers(self) -> Iterator[tuple[str, Layout, Layout]]:
        """Every sum with a weight of the model's own, or computed from one: its name, what it writes and sums over."""
        for within in self.passes:
            recording = within.recording
            for contraction in itertools.chain(*within.contractions.values()):
                weight = contraction.weight
                if weight is None or not recording.from_weights.get(weight):
                    continue
                name = recording.tensors.get(weight, contraction.path or "the model").removesuffix(".weight")
                written: Layout = ()
                if contraction.out_dim is not None:
                    written = within.layouts[weight][contraction.out_dim]
                yield name, written, contraction.over
