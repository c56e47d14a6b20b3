"""trace: record, apply the rules, replay, count."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dmcp.errors import TraceError
from dmcp.modules import batch_of, map_leaves, rebatch, skeleton, tensors_in, unwrap
from dmcp.tracing.cost import Terms, moments, product, total
from dmcp.tracing.gates import Fold, plan_folds
from dmcp.tracing.graph import Binding, ChannelGraph, CostEntry, GateFold, Unprunable
from dmcp.tracing.layout import Atom, in_spaces
from dmcp.tracing.ops import Contraction, Coupling, Dims, OpCost, Rule, couple
from dmcp.tracing.record import Func, Op, Read, Recording, Ref, meta_example, record, record_anywhere
from dmcp.tracing.replay import IN_CODE, ReplayContext, Resolver
from dmcp.tracing.rules import RULES
from dmcp.units import by
from dmcp.widths import ChannelSpace, fingerprint

_BATCH = 3  # more than one for BatchNorm in train mode; odd, so that it is rarely mistaken for channels
_MAX_LISTED = 3  # places or layers that are named; the rest is counted
_IGNORED = "ignored, as you asked"
_UNDO = "torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, remove_spectral_norm or prune.remove"
_DETECTORS = "Trace the part of a detector that ends before its boxes are chosen: docs/cookbook.md, Detectors."
_WAYS_OUT = (
    "Compute both ways, or with all values, and choose with torch.where, or accept it: trace(..., strict=False)."
)


def trace(
    model: nn.Module,
    example_input: Any,
    ignore: Iterable[str] = (),
    rules: Mapping[Func, Rule] | None = None,
    exact: bool = True,
    strict: bool = False,
) -> ChannelGraph:
    """Find the channels of a model that must be kept or dropped together. The model is not changed.

    example_input: a tensor, a tuple of positional or a dict of keyword arguments; dim 0 of each tensor is the batch.
    ignore: modules or spaces, by name, whose channels are not pruned.
    rules: op -> channel rule, `dmcp.RULES` by default; extend with `RULES | {op: rule}`.
    exact: do not prune what a gated network computes differently from a cut one (channels under LayerNorm).
    strict: raise on an op without a rule and on values that decide in forward; bind no attribute by its value.
    """
    model = unwrap(model)
    if rules is not None and not isinstance(rules, Mapping):
        raise TraceError(f"rules are a mapping, RULES | {{op: rule}}, not a {type(rules).__name__}.")
    check_example(example_input)
    recordings, batches, notes = _record_modes(model, example_input)
    ignore = [ignore] if isinstance(ignore, str) or not isinstance(ignore, Iterable | None) else list(ignore or ())
    if not all(isinstance(name, str) for name in ignore):
        raise TraceError(f"ignore takes names of modules or spaces, not {ignore!r}.")
    for note in _note_reads(model, recordings):
        if strict:
            raise TraceError(f"{note[0].upper()}{note[1:]}. {_WAYS_OUT}")
        notes.append(note)
    coupling = couple(recordings, RULES if rules is None else rules, strict, ignore)
    parameters = [name for name, _ in model.named_parameters()]
    for recording, layouts in zip(recordings, coupling.layouts, strict=True):
        for read in recording.reads:
            for layout in (layout for value in read.values for layout in layouts[value]):
                coupling.channels.fix(layout, f"its values are read by {read.way} ({read.where})")
    mixed = [pair for facts in coupling.facts for pair in facts.mixed] if exact else []
    mixed = [(layout, reason) for layout, reason in mixed if coupling.channels.fix(layout, reason)]
    _fix_unwritten(coupling, parameters)
    _fix_ignored(coupling, model, parameters, ignore)
    context = ReplayContext(skeleton(model), example_input, [meta_example(batch) for batch in batches], coupling)
    resolver = Resolver(context, parameters, bind=not strict)
    while True:  # until the narrow models agree, and the gates of every atom have a place
        resolver.run()
        hard, soft, stuck = plan_folds(coupling, parameters)
        if not stuck:
            break
        for atom, reason in stuck.items():
            coupling.channels.fix(((atom,),), reason)
    if not coupling.atoms(parameters):
        unprunable = _unprunable(coupling, model)
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in unprunable[:3])
        hint = " With exact=False channels under LayerNorm or weight standardization could be." if mixed else ""
        hint += f" {_DETECTORS}" if any(item.reason.startswith(IN_CODE) for item in unprunable) else ""
        raise TraceError(f"Nothing in this model can be pruned. {reasons or 'no conv or linear layer was seen'}.{hint}")
    return _graph(model, context, (hard, soft), notes, exact)


def check_example(example: object) -> None:
    """Refuse an input without tensors."""
    if not tensors_in(example):
        raise TraceError("The example input holds no tensor: give a tensor, or a tuple or dict of them.")


def _record_modes(model: nn.Module, example: Any) -> tuple[list[Recording], list[Any], list[str]]:
    """Eval mode and train mode (some layers run in one of them only), with several samples where that works."""
    batch = batch_of(example)
    if batch == 0:
        raise TraceError("The example input has no sample in it: dim 0 is the batch.")
    several, notes = rebatch(example, _BATCH) if batch else example, list[str]()
    if batch is None:
        notes.append("the inputs do not share their first dim, so macs are of the whole example, not of one sample")
    try:
        try:
            first = record_anywhere(model, several, training=False)
        except TraceError:  # the batch size may be written into the model
            several = example
            first = record_anywhere(model, several, training=False)
    except TraceError as error:
        wanted = _misfit(model, example) if isinstance(error.__cause__, (RuntimeError, ValueError)) else ""
        if wanted:  # torch's own complaint comes after it: the cause may be another one
            raise TraceError(f"The example input does not fit: {wanted}. {error}") from error
        if wanted := wrong_dtype(model, example, lambda same: record_anywhere(model, same, training=False)):
            raise TraceError(f"The example input holds {wanted}.") from error
        raise
    if wanted := _misfit(model, example, first):
        raise TraceError(f"The example input does not fit: {wanted}.")
    try:
        return [first, record_anywhere(model, several, training=True)], [several] * 2, notes
    except TraceError as error:
        notes.append(f"train mode could not be recorded, so layers that run only there are unknown: {error}")
        return [first], [several], notes


# -- unprunable channels


def _fix_unwritten(coupling: Coupling, parameters: list[str]) -> None:
    """A space needs a layer that writes it and a parameter that has it."""
    channels = coupling.channels
    written = {atom for facts in coupling.facts for layout in facts.written for atom in channels.atoms(layout)}
    spaces = written & set(coupling.atoms(parameters))
    layouts = {layout for values in coupling.layouts for dims in values.values() for layout in dims}
    for layout in layouts | {layout for dims in coupling.tensors.values() for layout in dims}:
        for atom in channels.atoms(layout):
            if atom not in spaces:
                channels.fix(((atom,),), "no layer writes it")


def _fix_ignored(coupling: Coupling, model: nn.Module, parameters: list[str], ignore: Iterable[str]) -> None:
    """What the user named: all that the parameters of a module write, or one space."""
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
    for wanted in ignore:
        spaces = _names(coupling, coupling.atoms(parameters))
        chosen = [atom for atom, name in spaces.items() if name == wanted]
        for atom in chosen:
            coupling.channels.fix(((atom,),), _IGNORED)
        inside = {own for name, own in tied if name == wanted or name.startswith(wanted + ".")}
        for name in inside:
            for dim, layout in enumerate(coupling.tensors[name]):
                if (name, dim) not in read:
                    coupling.channels.fix(layout, _IGNORED)
        if wanted in modules and not inside:
            raise TraceError(f"ignore names {wanted!r}, which has no parameters: name the layer before it.")
        if not chosen and not inside:
            near = difflib.get_close_matches(wanted, sorted({*modules, *spaces.values()}), n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "graph.spaces and model.named_modules() list names."
            raise TraceError(f"ignore names no module and no space of this model: {wanted!r}; {hint}")


def _weighted(coupling: Coupling) -> Iterable[tuple[str, Dims, Contraction]]:
    """Every sum with a weight of the model's own, or computed from one: layer, dims of the weight, sum; in order."""
    for recording, layouts, facts in zip(coupling.recordings, coupling.layouts, coupling.facts, strict=True):
        own = recording.own()
        for contractions in facts.contractions.values():
            for item in contractions:
                if item.weight is not None and own.get(item.weight):
                    layer = recording.tensors.get(item.weight, item.path or "the model").removesuffix(".weight")
                    yield layer, layouts[item.weight], item


def _writers(coupling: Coupling) -> Iterable[tuple[str, list[Atom], list[tuple[int, str]]]]:
    """Layers with the atoms that they write and the parts that are unprunable, in order."""
    for layer, dims, item in _weighted(coupling):
        if item.out_dim is not None:
            layout = dims[item.out_dim]
            yield layer, coupling.channels.atoms(layout), coupling.channels.unprunable(layout)


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
    tensors = ((tensor.removesuffix(".weight"), coupling.atoms([tensor])) for tensor in coupling.tensors)
    for layer, written in (*((layer, written) for layer, written, _ in _writers(coupling)), *tensors):
        for atom in written:
            if atom not in names and atom in atoms:
                numbered = (f"{layer}[{number}]" for number in range(1, len(atoms) + 1))
                names[atom] = next(free for free in (layer, *numbered) if free not in names.values())
    return names


def _unprunable(coupling: Coupling, model: nn.Module) -> tuple[Unprunable, ...]:
    computed = [  # layers whose weights torch computes by a parametrization or a hook
        path
        for path, module in model.named_modules()
        if parametrize.is_parametrized(module)
        or any(type(hook).__module__.startswith("torch.nn.utils.") for hook in module._forward_pre_hooks.values())
    ]

    def explained(reason: str) -> str:
        for path in computed:
            if f" at {path})" in reason or f" at {path}.parametrizations." in reason:
                return f"{reason}, as the weight of {path} is computed: undo that before pruning with {_UNDO}"
        return reason

    found = ((layer, size, reason) for layer, _, parts in _writers(coupling) for size, reason in parts)
    return tuple(dict.fromkeys(Unprunable(layer, size, explained(reason)) for layer, size, reason in found))


# -- the graph


def _graph(
    model: nn.Module, context: ReplayContext, folds: tuple[list[Fold], list[Fold]], notes: list[str], exact: bool
) -> ChannelGraph:
    coupling = context.coupling
    channels, units = coupling.channels, _units(coupling)
    atoms = coupling.atoms([name for name, _ in model.named_parameters()])
    names = _names(coupling, atoms)
    order = sorted(atoms, key=list(names).index)
    numbers = {atom.index: number for number, atom in enumerate(order)}

    def gate_folds(folds: list[Fold]) -> tuple[GateFold, ...]:
        found = ((name, dim, channels.resolve(coupling.tensors[name][dim])) for name, dim in folds)
        return tuple(GateFold(name, dim, in_spaces(it, numbers)) for name, dim, it in found if channels.atoms(it))

    def layers(atom: Atom, pairs: Iterable[tuple[str, set[Atom]]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer for layer, atoms in pairs if atom in atoms))

    writers = [(layer, set(written)) for layer, written, _ in _writers(coupling)]
    readers = [(layer, set(channels.atoms(item.over))) for layer, _, item in _weighted(coupling)]
    bindings = tuple(
        Binding(
            module,
            attribute if position is None else f"{attribute}[{position}]",
            multiple * channels.size(layout),
            ", ".join(names[atom] for atom in channels.atoms(layout)),
        )
        for (module, attribute, position), (layout, multiple) in context.bindings.items()
    )
    return ChannelGraph(
        spaces=tuple(
            ChannelSpace(
                names[atom],
                channels.axis_size(atom),
                layers(atom, writers) or (names[atom],),
                layers(atom, readers),
                units.get(atom.index, 1),
            )
            for atom in order
        ),
        unprunable=_unprunable(coupling, model),
        bindings=bindings,
        unknown=dict(Counter(str(op.func) for op in coupling.facts[0].unknown)),
        notes=tuple(notes),
        input_shape=_sample_shape(context.example),
        fingerprint=fingerprint(model),
        exact=exact,
        hard_folds=gate_folds(folds[0]),
        soft_folds=gate_folds(folds[1]),
        entries=_cost_entries(model, context, numbers),
        moments=moments(coupling, numbers, batch_of(context.batches[0])),
        _context=context,
        _atoms=tuple(atom.index for atom in order),
    )


def _sample_shape(example: Any) -> Any:
    """Shape of one sample, nested like the example."""
    if isinstance(example, Tensor):
        return tuple(example.shape[1:])
    if isinstance(example, Mapping):
        return {str(key): _sample_shape(value) for key, value in example.items()}
    return tuple(_sample_shape(value) for value in example) if isinstance(example, (list, tuple)) else None


# -- costs


def _cost_entries(model: nn.Module, context: ReplayContext, numbers: Mapping[int, int]) -> tuple[CostEntry, ...]:
    """Costs per layer, in the order in which they run; parameters that no op of cost uses come last."""
    coupling, batch = context.coupling, batch_of(context.batches[0])
    recording, facts = coupling.recordings[0], coupling.facts[0]

    def terms(coefficient: int, dims: Dims) -> Terms:
        return product(coefficient, [in_spaces(coupling.channels.resolve(layout), numbers) for layout in dims])

    shares = _per_sample(model, context.example, coupling, batch)
    costs = [*facts.costs, *(_measured(op, recording) for op in facts.unknown)]
    shares += [Fraction(1, batch or 1)] * len(facts.unknown)
    kinds: dict[str, str] = {}
    macs: dict[str, list[Terms]] = {}
    params: dict[str, list[Terms]] = {}
    for cost, share in zip(costs, shares, strict=True):
        kinds.setdefault(cost.path, cost.kind)
        scaled = {key: factor * share for key, factor in terms(cost.coefficient, cost.dims).items()}
        if any(factor.denominator != 1 for factor in scaled.values()):
            why = "The cost of one sample does not follow from that of a batch: dim 0 of the inputs must be it."
            raise TraceError(f"{why} {_DETECTORS}")
        macs.setdefault(cost.path, []).append({key: int(factor) for key, factor in scaled.items()})
    for name, _ in model.named_parameters():
        params.setdefault(name.rpartition(".")[0], []).append(terms(1, coupling.tensors[name]))
    return tuple(
        CostEntry(path, kinds.get(path, "other"), total(macs.get(path, [])), total(params.get(path, [])))
        for path in dict.fromkeys([*macs, *params])
    )


def _per_sample(model: nn.Module, example: Any, coupling: Coupling, batch: int | None) -> list[Fraction]:
    """Of each op that costs something: the share that one sample has. Some ops run once for the whole batch."""
    recording, costs = coupling.recordings[0], coupling.facts[0].costs
    if batch is None:
        return [Fraction(1)] * len(costs)
    try:
        single = couple([record(model, rebatch(example, 1), training=False)], RULES, strict=False)
    except Exception:  # the batch size is written into the model, or it looks at values
        return [Fraction(1, batch)] * len(costs)
    ones = single.facts[0].costs
    if [op.func for op in single.recordings[0].ops] != [op.func for op in recording.ops] or len(ones) != len(costs):
        return [Fraction(1, batch)] * len(costs)

    def full(coupling: Coupling, cost: OpCost) -> int:
        return cost.coefficient * math.prod(map(coupling.channels.size, cost.dims))

    pairs = zip(ones, costs, strict=True)
    return [Fraction(full(single, one), max(1, full(coupling, many))) for one, many in pairs]


def _measured(op: Op, recording: Recording) -> OpCost:
    """Multiply-adds of an op without a rule, counted by torch on tensors without data."""
    from torch.utils.flop_counter import FlopCounterMode  # here: it imports Triton, and is seldom needed

    def empty(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        return torch.empty(recording.shapes[leaf.value], dtype=recording.dtypes[leaf.value], device="meta")

    counter = FlopCounterMode(display=False)
    with contextlib.suppress(Exception), counter:  # no meta kernel: torch itself counts nothing for it either
        op.func(*map_leaves(empty, op.args), **map_leaves(empty, dict(op.kwargs)))
    out = next((value for value in op.outs if value is not None), -1)
    return OpCost(op.path, op.name, counter.get_total_flops() // 2, (), out)


# -- diagnostics


def _note_reads(model: nn.Module, recordings: Sequence[Recording]) -> Iterable[str]:
    """Where forward reads values of its input, and where the size of a tensor depends on them."""
    used = {recording.tensors.get(value) for recording in recordings for op in recording.ops for value in op.inputs()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}  # a tied one has one name
    unused = [
        path
        for path, module in model.named_modules()
        if (own := list(module.parameters(recurse=False))) and not any(first[id(item)] in used for item in own)
    ]
    not_run = f"; layers that were not run: {_listed(unused)}" if unused else ""
    if places := _listed(read.where for it in recordings for read in _of_input(it, it.reads)):
        back = any(  # whether tensors were made of values of the input that had left torch
            not {value for op in it.ops for value in op.inputs()}.isdisjoint(it.constants.keys() - it.own().keys())
            for it in recordings
        )
        outside = "; what is computed between leaving torch and coming back is not counted in macs and memory"
        yield (
            f"forward turns values that depend on its input into Python values ({places}): another input may take "
            "another way, which was not seen, and a cut network is only right for inputs that take this one"
            f"{outside if back else ''}{not_run}"
        )
    if places := _listed(read.where for it in recordings for read in _of_input(it, it.sizes)):
        yield (
            f"forward makes tensors whose size depends on values of its input ({places}): macs are those of this "
            "example, and code that asks for such a size may take another way with another input, which was not seen"
            f"{not_run}"
        )


def _of_input(recording: Recording, reads: Sequence[Read]) -> Iterable[Read]:
    """Those that another input would have given other values."""
    depends, done = set(recording.inputs), 0
    for read in reads:
        for op in recording.ops[done : read.number]:
            shaped = op.name.endswith("_like") or op.name.startswith("new_")  # such take the shape or dtype, no numbers
            sources = [] if shaped else op.inputs()[:1] if op.name.endswith("_as") else op.inputs()
            if not depends.isdisjoint(sources):
                depends.update(value for value in op.outs if value is not None)
        done = read.number
        if not depends.isdisjoint(read.values):
            yield read


def _misfit(model: nn.Module, example: Any, recording: Recording | None = None) -> str:
    """The shape that a sample should have, where forward failed or took a batch of rows for an image; else empty."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    first = next((module for module in model.modules() if isinstance(module, convolutions)), None)
    if not isinstance(example, Tensor) or not isinstance(first, nn.Conv2d) or example.ndim == 4:
        return ""
    ops = recording.ops if recording else []
    if recording and not any(op.name == "conv2d" and op.inputs()[0] in recording.inputs for op in ops):
        return ""  # else a convolution took the batch for one image, which torch allows
    given = tuple(example.shape[1:])
    height, width = given[-2:] if len(given) > 1 else (224, 224)
    return (
        f"one sample for the convolutions of this model is channels x height x width, as in "
        f"{first.in_channels}x{height}x{width}, not {by(given)}"
    )


def wrong_dtype(model: nn.Module, example: Any, run: Callable[[Any], Any]) -> str:
    """What to do about an example of another dtype than the weights; empty if the model fails with theirs, too."""
    own = {it.dtype for it in model.parameters() if it.is_floating_point()}
    given = {it.dtype for it in tensors_in(example)} - own
    if len(own) != 1 or len(given) != 1:
        return ""
    wanted, held = own.pop(), given.pop()
    try:
        run(map_leaves(lambda leaf: leaf.to(wanted) if isinstance(leaf, Tensor) else leaf, example))
    except Exception:
        return ""
    way = f"convert it, with x.to({wanted}), and scale it as the model expects: bytes of images by 1 / 255"
    if held.is_floating_point:
        way = f"convert one of them, with x.to({wanted}) or model.to({held})"
    names = (str(it).removeprefix("torch.") for it in (held, wanted))
    return f"{', the weights of the model '.join(names)}: {way}"


def _listed(names: Iterable[str]) -> str:
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MAX_LISTED} more" if len(every) > _MAX_LISTED else ""
    return ", ".join(every[:_MAX_LISTED]) + more
