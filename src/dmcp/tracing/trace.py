"""trace: record, apply the rules, replay, count."""

from __future__ import annotations

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
from dmcp.tracing.record import Func, Op, Read, Recording, Ref, record, record_anywhere
from dmcp.tracing.replay import IN_CODE, ReplayContext, Settler, meta_example
from dmcp.tracing.rules import RULES
from dmcp.widths import ChannelSpace, fingerprint

BOXES = "Trace the part of a detector that ends before its boxes are chosen: docs/api.md, Detectors."


def cost_entries(
    model: nn.Module, coupling: Coupling, numbers: Mapping[int, int], example: Any, rehearsal: ReplayContext
) -> tuple[CostEntry, ...]:
    """Costs per layer, in the order in which they run; parameters that no op of cost uses come last."""
    recording, facts, resolve = coupling.recordings[0], coupling.facts[0], coupling.channels.resolve
    batch = batch_of(rehearsal.batches[0])
    shares = _per_sample(model, example, coupling, batch)
    costs = [*facts.costs, *(_measured(op, recording) for op in facts.unknown)]
    shares += [Fraction(1, batch or 1)] * len(facts.unknown)
    owners = {name: _owner(name) for name, _ in model.named_parameters()}
    kinds: dict[str, str] = {}
    macs: dict[str, list[Terms]] = {}
    for cost, share in zip(costs, shares, strict=True):
        kinds.setdefault(cost.path, cost.kind)
        terms = product(cost.coefficient, [in_spaces(resolve(layout), numbers) for layout in cost.dims])
        macs.setdefault(cost.path, []).append(_scaled(terms, share))
    params: dict[str, list[Terms]] = {}
    for name, _ in model.named_parameters():
        dims = coupling.tensors[name]
        terms = product(1, [in_spaces(resolve(layout), numbers) for layout in dims])
        params.setdefault(owners[name], []).append(terms)
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
    return [
        Fraction(_full_cost(single, one), max(1, _full_cost(coupling, many)))
        for one, many in zip(ones, costs, strict=True)
    ]


def _full_cost(coupling: Coupling, cost: OpCost) -> int:
    return cost.coefficient * math.prod(coupling.channels.size(layout) for layout in cost.dims)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _scaled(terms: Terms, share: Fraction) -> Terms:
    scaled = {key: factor * share for key, factor in terms.items()}
    if any(factor.denominator != 1 for factor in scaled.values()):
        raise TraceError(
            f"The cost of one sample cannot be told from that of a batch: dim 0 of the inputs must be it. {BOXES}"
        )
    return {key: int(factor) for key, factor in scaled.items()}


def _measured(op: Op, recording: Recording) -> OpCost:
    """Multiply-adds of an op without a rule, counted by torch on tensors without data."""
    from torch.utils.flop_counter import FlopCounterMode  # here: it imports Triton, and is seldom needed

    def empty(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        return torch.empty(recording.shapes[leaf.value], dtype=recording.dtypes[leaf.value], device="meta")

    counter = FlopCounterMode(display=False)
    try:
        with counter:
            op.func(*map_leaves(empty, op.args), **map_leaves(empty, dict(op.kwargs)))
    except Exception:  # no meta kernel: torch itself counts nothing for it either
        pass
    out = next((value for value in op.outs if value is not None), -1)
    return OpCost(op.path, op.name, counter.get_total_flops() // 2, (), out)


_SOME = 3  # places or layers that are named; the rest is counted
_OLD_NORMS = {"WeightNorm": "remove_weight_norm", "SpectralNorm": "remove_spectral_norm"}  # hooks of torch.nn.utils
_USUAL = (224, 224)
_UNCOUNTED = "; what is computed between leaving torch and coming back is not counted in macs and memory"


# values that forward reads


def note_reads(model: nn.Module, recordings: Sequence[Recording]) -> str:
    """That another input may take another way, which nobody has seen; empty if forward reads nothing of its input."""
    places = _places((it, it.reads) for it in recordings)
    if not places:
        return ""
    return (
        f"forward turns values that depend on its input into Python values ({places}): another input may take "
        "another way, which was not seen, and a cut network is only right for inputs that take this one"
        f"{_UNCOUNTED if any(map(_comes_back, recordings)) else ''}{_asleep(model, recordings)}"
    )


def note_sizes(model: nn.Module, recordings: Sequence[Recording]) -> str:
    """That shapes and macs are those of the example; empty if no size follows from values of the input."""
    places = _places((it, it.sizes) for it in recordings)
    if not places:
        return ""
    return (
        f"forward makes tensors whose size depends on values of its input ({places}): macs are those of this example, "
        "and code that asks for such a size may take another way with another input, which was not seen"
        f"{_asleep(model, recordings)}"
    )


def _places(reads: Iterable[tuple[Recording, Sequence[Read]]]) -> str:
    """Where values of the input are read."""
    return _listed(dict.fromkeys(read.where for recording, all_ in reads for read in _of_input(recording, all_)))


def _comes_back(recording: Recording) -> bool:
    """Whether tensors were made of values of the input that had left torch, as far as anybody can tell."""
    own, constants = recording.own(), set(recording.constants)
    return any(value in constants and value not in own for op in recording.ops for value in op.inputs())


def _asleep(model: nn.Module, recordings: Sequence[Recording]) -> str:
    layers = _not_run(model, recordings)
    return f"; layers that were not run: {_listed(layers)}" if layers else ""


def _of_input(recording: Recording, reads: Sequence[Read]) -> list[Read]:
    """Those that another input would have given other values."""
    depends, found, done = set(recording.inputs), [], 0
    for read in reads:
        for op in recording.ops[done : read.number]:
            if not depends.isdisjoint(_sources(op)):
                depends.update(value for value in op.outs if value is not None)
        done = read.number
        if not depends.isdisjoint(read.values):
            found.append(read)
    return found


def _sources(op: Op) -> list[int]:
    """The values whose numbers, not only their shape or dtype, an op takes."""
    if op.name.endswith("_like") or op.name.startswith("new_"):
        return []
    return op.inputs()[:1] if op.name.endswith("_as") else op.inputs()


def _not_run(model: nn.Module, recordings: Sequence[Recording]) -> list[str]:
    """Layers with parameters, none of which any op took."""
    used = {recording.tensors.get(value) for recording in recordings for op in recording.ops for value in op.inputs()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}  # a tied one has one name
    return [
        path
        for path, module in model.named_modules()
        if (own := list(module.parameters(recurse=False))) and not any(first[id(item)] in used for item in own)
    ]


def keep_read_whole(coupling: Coupling) -> None:
    """Channels of tensors that leave torch without an op stay whole."""
    for recording, layouts in zip(coupling.recordings, coupling.layouts, strict=True):
        for read in recording.reads:
            for value in read.values:
                for layout in layouts[value]:
                    coupling.channels.freeze(layout, f"its values are read by {read.way} ({read.where})")


# weights that are computed


def ways_to_plain_weights(model: nn.Module) -> dict[str, str]:
    """Layers whose weights torch computes by a parametrization or a hook, and the call that undoes it."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            first = next(iter(module.parametrizations))
            found[path] = f"torch.nn.utils.parametrize.remove_parametrizations(layer, {first!r})"
        for hook in module._forward_pre_hooks.values():
            kind = type(hook)
            if kind.__name__ in _OLD_NORMS and kind.__module__.startswith("torch.nn.utils."):
                found[path] = f"torch.nn.utils.{_OLD_NORMS[kind.__name__]}(layer)"
    return found


def with_way_out(reason: str, plain: dict[str, str]) -> str:
    """A reason, and what to do where a computed weight is behind it."""
    for path, undo in plain.items():
        if f" at {path})" in reason or f" at {path}.parametrizations." in reason:
            return f"{reason}, as the weight of {path} is computed: undo that before pruning with {undo}"
    return reason


# samples


def misfit(model: nn.Module, example: Any, recording: Recording | None = None) -> str:
    """What a sample should be, where forward failed or took a batch of lines for an image; empty if it is one."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    first = next((module for module in model.modules() if isinstance(module, convolutions)), None)
    if not isinstance(example, Tensor) or not isinstance(first, nn.Conv2d) or example.ndim == 4:
        return ""
    if recording is not None and not _is_one_image(recording):
        return ""
    given = tuple(example.shape[1:])
    height, width = given[-2:] if len(given) > 1 else _USUAL
    return (
        f"one sample for the convolutions of this model is channels x height x width, as in "
        f"{first.in_channels}x{height}x{width}, not {'x'.join(map(str, given)) or 'a number'}"
    )


def _is_one_image(recording: Recording) -> bool:
    """Whether a convolution took the whole input as one image without a batch, which torch allows."""
    return any(op.name == "conv2d" and op.inputs()[0] in recording.inputs for op in recording.ops)


def other_numbers(model: nn.Module, example: Any, run: Callable[[Any], Any]) -> str:
    """What an example on which a model failed holds instead of the model's kind of numbers, and what to do.

    Empty if that is not what was wrong: with its own kind of numbers the model runs.
    """
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
    kinds = (str(it).removeprefix("torch.") for it in (held, wanted))
    return "{}, the weights of the model {}: {}".format(*kinds, way)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SOME} more" if len(every) > _SOME else ""
    return ", ".join(every[:_SOME]) + more


_TWO_WAYS = (
    "Compute both ways, or with all values, and choose with torch.where, or accept it: trace(..., strict=False)."
)
_BATCH = 3  # more than one for BatchNorm in train mode; odd, so that it is rarely mistaken for channels


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
    ignore = [ignore] if isinstance(ignore, str) or not isinstance(ignore, Iterable | None) else list(ignore or ())
    if not all(isinstance(name, str) for name in ignore):
        raise TraceError(f"frozen takes names of modules or spaces, not {ignore!r}.")
    for note in filter(None, (note_reads(model, recordings), note_sizes(model, recordings))):
        if strict:
            raise TraceError(f"{note[0].upper()}{note[1:]}. {_TWO_WAYS}")
        notes.append(note)
    coupling = couple(recordings, RULES if rules is None else rules, strict, ignore)
    keep_read_whole(coupling)
    parameters = [name for name, _ in model.named_parameters()]
    mixed = [pair for facts in coupling.facts for pair in facts.mixed] if exact else []
    mixed = [(layout, reason) for layout, reason in mixed if coupling.channels.freeze(layout, reason)]
    _freeze_unwritten(coupling, parameters)
    _freeze_named(coupling, model, parameters, ignore)
    rehearsal = ReplayContext(skeleton(model), example_input, [meta_example(batch) for batch in batches], coupling)
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


def _freeze_named(coupling: Coupling, model: nn.Module, parameters: list[str], ignore: Iterable[str]) -> None:
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
    for wanted in ignore:
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


def _whole(coupling: Coupling, model: nn.Module) -> tuple[Unprunable, ...]:
    plain = ways_to_plain_weights(model)
    found = dict.fromkeys(
        Unprunable(layer, size, with_way_out(reason, plain))
        for layer, _, parts in _writers(coupling)
        for size, reason in parts
    )
    return tuple(found)


# -- the graph


def _graph(
    model: nn.Module,
    coupling: Coupling,
    rehearsal: ReplayContext,
    atoms: list[Atom],
    folds: tuple[list[Fold], list[Fold]],
    whole: tuple[Unprunable, ...],
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
        unprunable=whole,
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
