"""trace(): record a model, apply the rules, replay, and put what was found into a ChannelGraph."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dmcp.errors import TraceError
from dmcp.slicing import skeleton, unwrap
from dmcp.spaces import ChannelSpace, fingerprint
from dmcp.tracing.coupling import Coupling, couple
from dmcp.tracing.facts import Contraction, Dims, Rule
from dmcp.tracing.gating import Fold, plan_folds
from dmcp.tracing.graph import Binding, ChannelGraph, GateFold, Whole
from dmcp.tracing.layer_costs import BOXES, cost_entries
from dmcp.tracing.layouts import Atom, in_spaces
from dmcp.tracing.memory import moments
from dmcp.tracing.recording import Func, Recording, batch_of, rebatch, record_anywhere, tensors_in
from dmcp.tracing.remarks import (
    keep_read_whole,
    misfit,
    note_reads,
    note_sizes,
    other_numbers,
    ways_to_plain_weights,
    with_way_out,
)
from dmcp.tracing.replay import Rehearsal, meta_example
from dmcp.tracing.rules import RULES
from dmcp.tracing.settling import IN_CODE, Settler

_TWO_WAYS = (
    "Compute both ways, or with all values, and choose with torch.where, or accept it: trace(..., strict=False)."
)
_BATCH = 3  # more than one for BatchNorm in train mode; odd, so that it is rarely mistaken for channels


def trace(
    model: nn.Module,
    example_input: Any,
    frozen: Iterable[str] = (),
    rules: Mapping[Func, Rule] | None = None,
    exact: bool = True,
    strict: bool = False,
) -> ChannelGraph:
    """Find the channels of a model that must be kept or dropped together. The model is not changed.

    example_input: a tensor, a tuple of positional or a dict of keyword arguments; dim 0 of each tensor is the batch.
    frozen: modules or spaces, by name, whose channels stay whole.
    rules: op -> channel rule, `dmcp.RULES` by default; extend with `RULES | {op: rule}`.
    exact: keep whole what a gated network computes differently from a cut one (channels under LayerNorm).
    strict: raise on an op without a rule and on values that decide in forward; bind no attribute by its value.
    """
    model = unwrap(model)
    if rules is not None and not isinstance(rules, Mapping):
        raise TraceError(
            f"rules are a mapping from ops to functions, RULES | {{op: rule}}, not a {type(rules).__name__}."
        )
    recordings, batches, notes = _record_modes(model, example_input)
    frozen = [frozen] if isinstance(frozen, str) or not isinstance(frozen, Iterable | None) else list(frozen or ())
    if not all(isinstance(name, str) for name in frozen):
        raise TraceError(f"frozen takes names of modules or spaces, not {frozen!r}.")
    for note in filter(None, (note_reads(model, recordings), note_sizes(model, recordings))):
        if strict:
            raise TraceError(f"{note[0].upper()}{note[1:]}. {_TWO_WAYS}")
        notes.append(note)
    coupling = couple(recordings, RULES if rules is None else rules, strict, frozen)
    keep_read_whole(coupling)
    parameters = [name for name, _ in model.named_parameters()]
    mixed = [pair for facts in coupling.facts for pair in facts.mixed] if exact else []
    mixed = [(layout, reason) for layout, reason in mixed if coupling.channels.freeze(layout, reason)]
    _freeze_unwritten(coupling, parameters)
    _freeze_named(coupling, model, parameters, frozen)
    rehearsal = Rehearsal(skeleton(model), example_input, [meta_example(batch) for batch in batches], coupling)
    settler = Settler(rehearsal, parameters, bind=not strict)
    while True:
        settler.settle()
        plan = plan_folds(coupling, parameters)
        if not plan.stuck:
            break
        for atom, reason in plan.stuck.items():
            coupling.channels.freeze(((atom,),), reason)
    atoms = coupling.atoms(parameters)
    whole = _whole(coupling, model)
    if not atoms:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in whole[:3]) or "no conv or linear layer was seen"
        hint = " With exact=False channels under LayerNorm or weight standardisation could be." if mixed else ""
        hint += f" {BOXES}" if any(item.reason.startswith(IN_CODE) for item in whole) else ""
        raise TraceError(f"Nothing in this model can be pruned. {reasons}.{hint}")
    return _graph(model, coupling, rehearsal, atoms, (plan.hard, plan.soft), whole, notes, example_input, exact)


# -- recording


def check_example(example: object) -> None:
    """Refuse an input that no network could read."""
    if not tensors_in(example):
        raise TraceError("The example input holds no tensor: give a tensor, or a tuple or dict of them.")


def _record_modes(model: nn.Module, example: Any) -> tuple[list[Recording], list[Any], list[str]]:
    """Eval mode and train mode (some layers run in one of them only), with several samples where that works."""
    check_example(example)
    batch = batch_of(example)
    if batch == 0:
        raise TraceError("The example input has no sample in it: dim 0 is the batch.")
    first, several = _record_first(model, example, batch)
    notes: list[str] = []
    if batch is None:
        notes.append("the inputs do not share their first dim, so macs are of the whole example, not of one sample")
    try:
        return [first, record_anywhere(model, several, training=True)], [several] * 2, notes
    except TraceError as error:
        notes.append(f"train mode could not be recorded, so layers that run only there are unknown: {error}")
        return [first], [several], notes


def _record_first(model: nn.Module, example: Any, batch: int | None) -> tuple[Recording, Any]:
    """Eval mode, and the example with several samples, or as it is: the batch size may be written into the model."""
    several = rebatch(example, _BATCH) if batch else example
    try:
        try:
            first = record_anywhere(model, several, training=False)
        except TraceError:
            several = example
            first = record_anywhere(model, several, training=False)
    except TraceError as error:
        wanted = misfit(model, example) if isinstance(error.__cause__, (RuntimeError, ValueError)) else ""
        if wanted:  # torch's own complaint comes after it: the cause may be another one
            raise TraceError(f"The example input does not fit: {wanted}. {error}") from error
        if wanted := other_numbers(model, example, lambda same: record_anywhere(model, same, training=False)):
            raise TraceError(f"The example input holds {wanted}.") from error
        raise
    if wanted := misfit(model, example, first):
        raise TraceError(f"The example input does not fit: {wanted}.")
    return first, several


# -- keeping whole


def _freeze_unwritten(coupling: Coupling, parameters: list[str]) -> None:
    """A space needs a layer that writes it and a parameter that has it."""
    channels = coupling.channels
    written = {atom for facts in coupling.facts for layout in facts.written for atom in channels.atoms(layout)}
    spaces = written & set(coupling.atoms(parameters))
    layouts = {layout for values in coupling.layouts for dims in values.values() for layout in dims}
    for layout in layouts | {layout for dims in coupling.tensors.values() for layout in dims}:
        for atom in channels.atoms(layout):
            if atom not in spaces:
                channels.freeze(((atom,),), "no layer writes it")


def _freeze_named(coupling: Coupling, model: nn.Module, parameters: list[str], frozen: Iterable[str]) -> None:
    """Keep whole what the user named: all that the parameters of a module write, or one space."""
    modules = {name for name, _ in model.named_modules() if name}
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    tied = [(name, first[id(tensor)]) for name, tensor in model.named_parameters(remove_duplicate=False)]
    read = {
        (recording.tensors[item.weight], item.weight_dim)
        for recording, facts in zip(coupling.recordings, coupling.facts, strict=True)
        for contractions in facts.contractions.values()
        for item in contractions
        if item.weight is not None and item.weight in recording.tensors
    }
    for wanted in frozen:
        spaces = _names(coupling, coupling.atoms(parameters))
        chosen = [atom for atom, name in spaces.items() if name == wanted]
        for atom in chosen:
            coupling.channels.freeze(((atom,),), "frozen, as you asked")
        inside = {own for name, own in tied if name == wanted or name.startswith(wanted + ".")}
        for name in inside:
            for dim, layout in enumerate(coupling.tensors[name]):
                if (name, dim) not in read:
                    coupling.channels.freeze(layout, "frozen, as you asked")
        if wanted in modules and not inside:
            raise TraceError(
                f"frozen names {wanted!r}, which has no parameters to keep whole: name the layer before it."
            )
        if not chosen and not inside:
            near = difflib.get_close_matches(wanted, sorted({*modules, *spaces.values()}), n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "graph.spaces and model.named_modules() list names."
            raise TraceError(f"frozen names no module and no space of this model: {wanted!r}; {hint}")


def _weighted(coupling: Coupling) -> Iterable[tuple[str, Dims, Contraction]]:
    """Every sum with a weight of the model's own, or computed from one: layer, dims of the weight, sum; in order."""
    for recording, layouts, facts in zip(coupling.recordings, coupling.layouts, coupling.facts, strict=True):
        own = recording.own()
        for contractions in facts.contractions.values():
            for item in contractions:
                if item.weight is not None and own.get(item.weight):
                    tensor = recording.tensors.get(item.weight)
                    yield (item.path or "the model") if tensor is None else _layer(tensor), layouts[item.weight], item


def _layer(tensor: str) -> str:
    """The layer that a tensor belongs to, for people: its module, or the parameter itself."""
    return tensor.removesuffix(".weight")


def _writers(coupling: Coupling) -> Iterable[tuple[str, list[Atom], list[tuple[int, str]]]]:
    """Layers with the atoms that they write and the parts that are whole, in order."""
    for layer, dims, item in _weighted(coupling):
        if item.out_dim is not None:
            layout = dims[item.out_dim]
            yield layer, coupling.channels.atoms(layout), coupling.channels.whole(layout)


def _units(coupling: Coupling) -> dict[int, int]:
    """Real channels of each channel of an atom, by its number, in the layer that writes or reads fewest."""
    found: dict[int, int] = {}
    for _, dims, item in _weighted(coupling):
        written = () if item.out_dim is None else dims[item.out_dim]
        for segment in (*coupling.channels.resolve(written), *coupling.channels.resolve(item.over)):
            unit = math.prod(axis for axis in segment if isinstance(axis, int))
            found |= {it.index: min(unit, found.get(it.index, unit)) for it in segment if isinstance(it, Atom)}
    return found


def _names(coupling: Coupling, atoms: list[Atom]) -> dict[Atom, str]:
    """Each space is named after the first layer that writes it; further ones of a layer get a number."""
    names: dict[Atom, str] = {}
    taken: set[str] = set()

    def name(atom: Atom, layer: str) -> None:
        numbered = (f"{layer}[{number}]" for number in range(1, len(atoms) + 1))
        names[atom] = layer if layer not in taken else next(free for free in numbered if free not in taken)
        taken.add(names[atom])

    for layer, written, _ in _writers(coupling):
        for atom in written:
            if atom not in names and atom in atoms:
                name(atom, layer)
    for tensor in coupling.tensors:
        for atom in coupling.atoms([tensor]):
            if atom not in names and atom in atoms:
                name(atom, _layer(tensor))
    return names


def _whole(coupling: Coupling, model: nn.Module) -> tuple[Whole, ...]:
    plain = ways_to_plain_weights(model)
    found = dict.fromkeys(
        Whole(layer, size, with_way_out(reason, plain))
        for layer, _, parts in _writers(coupling)
        for size, reason in parts
    )
    return tuple(found)


# -- the graph


def _graph(
    model: nn.Module,
    coupling: Coupling,
    rehearsal: Rehearsal,
    atoms: list[Atom],
    folds: tuple[list[Fold], list[Fold]],
    whole: tuple[Whole, ...],
    notes: list[str],
    example: Any,
    exact: bool,
) -> ChannelGraph:
    channels, units = coupling.channels, _units(coupling)
    names = _names(coupling, atoms)
    order = sorted(atoms, key=list(names).index)
    numbers = {atom.index: number for number, atom in enumerate(order)}

    def layouts(name: str) -> list[Any]:
        return [in_spaces(channels.resolve(layout), numbers) for layout in coupling.tensors[name]]

    def gate_folds(chosen: list[Fold]) -> tuple[GateFold, ...]:
        return tuple(
            GateFold(name, dim, layouts(name)[dim])
            for name, dim in chosen
            if channels.atoms(coupling.tensors[name][dim])
        )

    writers: dict[Atom, dict[str, None]] = {atom: {} for atom in order}
    readers: dict[Atom, dict[str, None]] = {atom: {} for atom in order}
    for layer, written, _ in _writers(coupling):
        for atom in written:
            writers[atom][layer] = None
    for layer, _, item in _weighted(coupling):
        for atom in channels.atoms(item.over):
            readers[atom][layer] = None
    bindings = tuple(
        Binding(
            module,
            attribute if position is None else f"{attribute}[{position}]",
            bound.multiple * channels.size(bound.layout),
            ", ".join(names[atom] for atom in channels.atoms(bound.layout)),
        )
        for (module, attribute, position), bound in rehearsal.bindings.items()
    )
    unknown = Counter(str(op.func) for facts in coupling.facts[:1] for op in facts.unknown)
    return ChannelGraph(
        spaces=tuple(
            ChannelSpace(
                names[atom],
                channels.axis_size(atom),
                tuple(writers[atom]) or (names[atom],),
                tuple(readers[atom]),
                units.get(atom.index, 1),
            )
            for atom in order
        ),
        whole=whole,
        bindings=bindings,
        unknown=dict(unknown),
        notes=tuple(notes),
        input_shape=_sample_shape(example),
        fingerprint=fingerprint(model),
        exact=exact,
        hard_folds=gate_folds(folds[0]),
        soft_folds=gate_folds(folds[1]),
        entries=cost_entries(model, coupling, numbers, example, rehearsal),
        moments=moments(coupling, numbers, batch_of(rehearsal.batches[0])),
        _rehearsal=rehearsal,
        _atoms=tuple(atom.index for atom in order),
    )


def _sample_shape(example: Any) -> Any:
    """Shape of one sample, nested like the example."""
    if isinstance(example, Tensor):
        return tuple(example.shape[1:])
    if isinstance(example, Mapping):
        return {str(key): _sample_shape(value) for key, value in example.items()}
    return tuple(_sample_shape(value) for value in example) if isinstance(example, (list, tuple)) else None
