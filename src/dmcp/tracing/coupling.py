"""The rules applied to recordings: which dims of which tensors are the same channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dmcp.errors import TraceError
from dmcp.tracing.channels import Channels
from dmcp.tracing.facts import Call, Dims, Facts, Rule, find_rule, unknown
from dmcp.tracing.layouts import Atom, Layout, fixed, width
from dmcp.tracing.recording import Func, Recording, Shape
from dmcp.tracing.rules import pointwise


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
        sizes: dict[Layout, int] = {}  # many values share their dims

        def size(layout: Layout) -> int:
            if layout not in sizes:
                sizes[layout] = width(self.channels.resolve(layout), widths)
            return sizes[layout]

        return {value: tuple(size(layout) for layout in dims) for value, dims in self.layouts[number].items()}


def couple(
    recordings: Sequence[Recording], rules: Mapping[Func, Rule], strict: bool, frozen: Sequence[str] = ()
) -> Coupling:
    """Apply the rules to every op of every recording; strict: an op without a rule must lie in a frozen module."""
    coupling = Coupling(Channels(), {})
    for recording in recordings:
        coupling.recordings.append(recording)
        facts, layouts = _follow(coupling, recording, rules, strict, frozen)
        coupling.facts.append(facts)
        coupling.layouts.append(layouts)
    for recording, layouts in zip(coupling.recordings, coupling.layouts, strict=True):
        for value in recording.outputs:
            for layout in layouts[value]:
                coupling.channels.freeze(layout, "it is an output of the model")
    return coupling


def _follow(
    coupling: Coupling, recording: Recording, rules: Mapping[Func, Rule], strict: bool, frozen: Sequence[str]
) -> tuple[Facts, dict[int, Dims]]:
    channels, facts = coupling.channels, Facts()
    layouts: dict[int, Dims] = {}
    for value, name in recording.tensors.items():
        shape = recording.shapes[value]
        layouts[value] = coupling.tensors.setdefault(name, tuple(channels.fresh(size) for size in shape))
    for value in recording.inputs:
        layouts[value] = tuple(fixed(size) for size in recording.shapes[value])
    for value in recording.constants:
        layouts.setdefault(value, tuple(fixed(size) for size in recording.shapes[value]))
    for number, op in enumerate(recording.ops):
        call = Call(channels, recording, layouts, number, facts)
        channels.because = call.where()
        rule = find_rule(op.func, rules, pointwise)
        if rule is None and strict and not _inside(op.path, frozen):
            raise TraceError(_no_rule(call))
        outs = unknown(call) if rule is None else rule(call)
        facts.flows.append(call.flow)
        if len(outs) != len(op.outs):
            raise TraceError(f"The channel rule of {op.func} gave {len(outs)} outputs, not {len(op.outs)}.")
        for out, dims in zip(op.outs, outs, strict=True):
            if out is not None:
                _check(call, dims, recording.shapes[out])
                layouts[out] = dims
    return facts, layouts


def _check(call: Call, dims: Dims, shape: Shape) -> None:
    """A rule that gives dims of other sizes than the op did is wrong, whoever wrote it."""
    sizes = tuple(call.channels.size(layout) for layout in dims)
    if sizes != shape:
        raise TraceError(f"The channel rule of {call.op.func} at {call.path or 'the top'} gave {sizes}, not {shape}.")


def _inside(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(name + ".") for name in names)


def _no_rule(call: Call) -> str:
    shape = "x".join(str(size) for size in call.x.shape) if call.operands else "none"
    layer = call.path.partition(".parametrizations.")[0]  # what computes a weight has no parameters of its own
    second = f'trace(..., frozen=["{layer}"])' if layer else "trace(..., strict=False)"
    return (
        f"{call.path or 'the model'}: no channel rule for {call.op.func} (input {shape}). Give one: "
        f"trace(..., rules=RULES | {{{call.op.func}: my_rule}}), or keep its channels whole: {second}."
    )
