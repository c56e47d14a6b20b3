"""trace: record, apply the rules, replay, count."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_map_only

from dmcp.arguments import checked
from dmcp.errors import TraceError
from dmcp.tracing.cost import Terms, moments, product, total, traffic
from dmcp.tracing.coupling import Call, Coupling, OpCost, Pass, Rule
from dmcp.tracing.gates import Fold, plan_folds
from dmcp.tracing.graph import Binding, ChannelGraph, CostEntry, GateFold, Unprunable
from dmcp.tracing.layout import Atom, fixed
from dmcp.tracing.modules import (
    batch_of,
    call_model,
    map_leaves,
    narrow,
    rebatch,
    skeleton,
    tensors_in,
    unwrap,
    without_autocast,
)
from dmcp.tracing.record import (
    Func,
    Op,
    Recording,
    Ref,
    Shape,
    check_example,
    meta_example,
    record,
    record_anywhere,
)
from dmcp.tracing.replay import ReplayContext, Resolver
from dmcp.tracing.rules import RULES, find_rule, unknown
from dmcp.tracing.verification import ForwardError, find_unequal
from dmcp.tracing.widths import ChannelSpace, fingerprint, tuples
from dmcp.tracing.world import Guard, untouched_world

_BATCH = 3  # more than one for BatchNorm in train mode; odd, so that it is rarely mistaken for channels
_IGNORED = "ignored, as you asked"
_NAMED = 3  # layers that a note names


@checked
@without_autocast
def trace(
    model: nn.Module,
    example_input: Any,
    ignore: str | Iterable[str] = (),
    rules: Mapping[Func, Rule] | None = None,
    exact: bool = True,
    strict: bool = False,
    verify: bool = True,
) -> ChannelGraph:
    """Find the channels of a model that must be kept or dropped together. The model is not changed.

    example_input: a tensor, a tuple of positional or a dict of keyword arguments; dim 0 of each tensor is the batch.
    ignore: names of modules or spaces whose channels are not pruned.
    rules: a dict from ops to channel rules, by default `dmcp.RULES`; extend it with `RULES | {op: rule}`.
    exact: leave channels unpruned where a gated network does not compute what a cut one does (under LayerNorm).
    strict: raise an error for an op without a rule, and if forward branches on values; never infer from the value of
        an attribute that it follows a width.
    verify: run the model, cut and gated, on real numbers, and leave unpruned whatever makes a difference, because code
        can behave differently while it is traced. This takes about three forward and backward passes of two samples.
    """
    model = unwrap(model)
    names_to_ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    parameters = [name for name, _ in model.named_parameters()]

    # Record what the model computes, and derive from it which channels belong together.
    recordings, batch, notes = _record_modes(model, example_input)
    branches = _describe_branches(recordings)
    if branches and strict:
        raise TraceError(f"strict=True refuses this model: {branches}. Use torch.where instead of a branch in Python.")
    if branches:
        notes.append(branches)
    coupling = couple(recordings, RULES if rules is None else rules, strict, names_to_ignore)
    computed_weights = _describe_computed_weights(model, coupling)
    if computed_weights:
        notes.append(computed_weights)

    # Some channels cannot be pruned, or should not be.
    _fix_values_in_python(coupling)
    mixes_channels = exact and _fix_mixed(coupling)
    _fix_unwritten(coupling, parameters)
    _fix_ignored(coupling, model, parameters, names_to_ignore)

    context = ReplayContext(skeleton(model), example_input, meta_example(batch), coupling)
    resolver = Resolver(context, parameters, bind=not strict)
    while True:
        # Repeat until narrow models agree with the prediction, and the gates of every atom have a place, ...
        resolver.run()
        with untouched_world("cpu"):
            hard, soft, atoms_without_gates = plan_folds(coupling, parameters)
        for atom, reason in atoms_without_gates.items():
            coupling.channels.fix(((atom,),), reason)
        if atoms_without_gates:
            continue
        if not coupling.atoms(parameters):
            raise TraceError(f"{_nothing_to_prune(coupling, mixes_channels)} {computed_weights}".strip())
        graph = _graph(model, context, hard, soft, notes, exact)

        # ... and until a cut network computes what the gated one does.
        if not verify or not _can_be_verified(model, graph, example_input):
            return graph
        try:
            unequal, difference = find_unequal(model, graph, example_input)
        except ForwardError as error:
            raise TraceError(f"{error} Use another example input, or verify=False.") from error
        if not unequal:
            return replace(graph, verified=True)
        for space in unequal:
            reason = f"a network without some of its channels computes something else: {difference}"
            coupling.channels.fix(((Atom(graph.atom_of(space)),),), reason)


def _nothing_to_prune(coupling: Coupling, mixes_channels: bool) -> str:
    """The message for a model without any space."""
    reasons = [f"{item.name}: {item.reason}" for item in _unprunable(coupling)[:3]]
    if not reasons:
        reasons = ["The trace has seen no convolution and no linear layer"]
    text = f"Nothing in this model can be pruned. {'; '.join(reasons)}."
    if mixes_channels:
        text += " With exact=False, channels under LayerNorm or weight standardization could be pruned."
    return text


def _can_be_verified(model: nn.Module, graph: ChannelGraph, example: Any) -> bool:
    """Whether there is data to run on, and the gated network should compute what the cut one does."""
    tensors = (*model.parameters(), *model.buffers(), *tensors_in(example))
    return graph.exact and not any(tensor.is_meta for tensor in tensors)


# -- recordings


def _record_modes(model: nn.Module, example: Any) -> tuple[list[Recording], Any, list[str]]:
    """Record eval mode and train mode, as some layers run in one of them only.

    Returns the recordings, the example that was recorded (with several samples where that works), and notes.
    """
    check_example(example, *model.parameters(), *model.buffers())
    _run_one_sample(model, example)

    notes: list[str] = []
    batch = example
    if batch_of(example) is None:
        notes.append("the inputs do not share their first dim, so macs are of the whole example, not of one sample")
    else:
        batch = rebatch(example, _BATCH)
    try:
        evaluated = record_anywhere(model, batch, training=False)
    except TraceError:  # the batch size may be written into the model
        batch = example
        evaluated = _record_as_given(model, example)
    _check_batched(evaluated)

    recordings = [evaluated]
    try:
        recordings.append(record_anywhere(model, batch, training=True, grad=True))
    except TraceError as error:
        notes.append(f"train mode could not be recorded, so layers that run only there are unknown: {error}")

    # Some models ask whether gradients are on, so both modes are recorded with the other answer, too.
    for recording in list(recordings):
        with contextlib.suppress(TraceError):
            switched = record_anywhere(model, batch, recording.training, not recording.grad)
            if switched.ops != recording.ops:
                recordings.insert(1, switched)
    return recordings, batch, notes


def _run_one_sample(model: nn.Module, example: Any) -> None:
    """Run a copy on real data once: what the model keeps outside of itself for later runs has data then."""
    twin = narrow(model, {}, {}).eval()
    with contextlib.suppress(Exception), untouched_world("cpu", model), torch.no_grad(), Guard(model):
        sample = tree_map_only(Tensor, torch.clone, rebatch(example, 1))
        call_model(twin, sample)


def _record_as_given(model: nn.Module, example: Any) -> Recording:
    """Record eval mode on the user's own example; if that fails, the error says whether its dtype may be the cause."""
    try:
        return record_anywhere(model, example, training=False)
    except TraceError as error:
        hint = wrong_dtype(model, example)
        raise TraceError(f"{error}. It holds {hint}." if hint else str(error)) from error


def _check_batched(recording: Recording) -> None:
    """Refuse an example without a batch dim, which a convolution takes for a single image."""
    for op in recording.ops:
        if op.name != "conv2d":
            continue
        image = op.inputs()[0]
        if image in recording.inputs and len(recording.shapes[image]) == 3:
            raise TraceError("The example input has no batch dim: a convolution takes it for one image. Use 2x3x64x64.")


def wrong_dtype(model: nn.Module, example: Any) -> str:
    """Why forward may have failed: the example has another dtype than the weights. Empty if it has not."""
    weight_dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    example_dtypes = {tensor.dtype for tensor in tensors_in(example)}
    if not weight_dtypes or not example_dtypes.isdisjoint(weight_dtypes):
        return ""
    needed = _dtype_names(weight_dtypes)
    actual = _dtype_names(example_dtypes)
    return f"{actual}, the weights of the model {needed}: convert it, and scale bytes of images as the model expects"


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _describe_branches(recordings: Sequence[Recording]) -> str:
    """A note that names the modules where values that depend on the input become Python values; empty if none do."""
    modules: list[str] = []
    for recording in recordings:
        for read in recording.reads:
            depends_on_input = not recording.from_weights.keys() >= set(read.values)
            if depends_on_input and read.where not in modules:
                modules.append(read.where)
    if not modules:
        return ""
    return (
        f"forward turns values of its input into Python values ({', '.join(modules[:3])}): another input may take "
        "another branch, and a cut network is only right for inputs that take this one"
    )


# -- the rules applied


def couple(
    recordings: Sequence[Recording], rules: Mapping[Func, Rule], strict: bool = False, ignore: Sequence[str] = ()
) -> Coupling:
    """Apply the rules to every op of every recording; strict: an op without a rule must be in an ignored module."""
    coupling = Coupling()
    for recording in recordings:
        coupling.passes.append(Pass(recording))
        _follow(coupling, coupling.passes[-1], rules, strict, ignore)
    for within in coupling.passes:
        for value in within.recording.outputs:
            for layout in within.layouts[value]:
                coupling.channels.fix(layout, "it is an output of the model")
    return coupling


def _follow(coupling: Coupling, within: Pass, rules: Mapping[Func, Rule], strict: bool, ignore: Sequence[str]) -> None:
    """Derive the layouts of all values in one recording, op by op."""
    channels = coupling.channels
    recording = within.recording
    layouts = within.layouts

    # Every dim of a weight starts as channels of its own, shared by all recordings; those of inputs are fixed.
    for value, name in recording.tensors.items():
        layouts[value] = coupling.tensors.setdefault(name, tuple(map(channels.fresh, recording.shapes[value])))
    for value in (*recording.inputs, *recording.constants):
        layouts.setdefault(value, tuple(map(fixed, recording.shapes[value])))

    for number, op in enumerate(recording.ops):
        call = Call(channels, within, number)
        channels.because = call.where()
        rule = find_rule(op.func, rules)
        if rule is None:
            if strict:
                _check_ignored(op, ignore)
            rule = unknown
        outs = rule(call)
        within.flows.append(call.flow)
        _check_outputs(call, [tuple(map(channels.size, dims)) for dims in outs])
        for out, dims in zip(op.outs, outs, strict=True):
            if out is not None:
                layouts[out] = dims


def _describe_computed_weights(model: nn.Module, coupling: Coupling) -> str:
    """A note on layers whose weights come from ops without a rule, as by weight_norm; empty if there are none."""
    paths: set[str] = set()
    for within in coupling.passes:
        for op in within.unknown:
            layer, _, _ = op.path.partition(".parametrizations.")
            paths.add(layer)
    layers = [path for path, module in model.named_modules() if path in paths and _computes_weights(module)]
    if not layers:
        return ""
    names = ", ".join(layers[:_NAMED])
    if len(layers) > _NAMED:
        names += " and others"
    return (
        f"The weights of {names} are computed by ops without a channel rule "
        "(weight_norm and spectral_norm do so), so the channels of these layers are not pruned. Make the weights plain "
        "before you prune: by torch.nn.utils.parametrize.remove_parametrizations, or, for the old functions, by "
        "torch.nn.utils.remove_weight_norm or remove_spectral_norm."
    )


def _computes_weights(module: nn.Module) -> bool:
    """Whether torch computes weights of a layer from other parameters before each forward."""
    if parametrize.is_parametrized(module):
        return True
    return any(isinstance(hook, SpectralNorm | WeightNorm) for hook in module._forward_pre_hooks.values())


def _check_ignored(op: Op, ignore: Sequence[str]) -> None:
    """Refuse an op without a rule, unless it runs in a module whose channels are not pruned anyway."""
    if any(op.path == name or op.path.startswith(name + ".") for name in ignore):
        return
    raise TraceError(
        f"{op.path or 'the model'}: no channel rule for {op.func}. Give one: trace(..., rules=RULES | "
        f"{{{op.func}: my_rule}}), or leave its channels unpruned: trace(..., ignore=[{op.path!r}])."
    )


def _check_outputs(call: Call, sizes: list[Shape]) -> None:
    """Refuse what a rule returned if its sizes are not those that the op gave."""
    matches = len(sizes) == len(call.op.outs)
    if matches:
        for value, size, shape in zip(call.op.outs, sizes, call.out_shapes, strict=True):
            if value is not None and size != shape:
                matches = False
    if not matches:
        raise TraceError(
            f"The channel rule of {call.op.func} at {call.where()} returned dims of sizes {sizes}, but the op gave "
            f"{call.out_shapes}."
        )


# -- unprunable channels


def _fix_values_in_python(coupling: Coupling) -> None:
    """Channels whose values become Python's, and whose size decides which random numbers are drawn."""
    for within in coupling.passes:
        for read in within.recording.reads:
            for value in read.values:
                for layout in within.layouts[value]:
                    coupling.channels.fix(layout, f"its values are read by {read.way} ({read.where})")
        for op in within.recording.seeded:
            reason = f"random numbers seeded in forward depend on its size ({op.name} at {op.path or 'the top'})"
            for out in op.outs:
                if out is None:
                    continue
                for layout in within.layouts[out]:
                    coupling.channels.fix(layout, reason)


def _fix_mixed(coupling: Coupling) -> bool:
    """Channels that a layer mixes, so that gating is not cutting. Returns whether that made any unprunable."""
    any_fixed = False
    for within in coupling.passes:
        for layout, reason in within.mixed:
            if coupling.channels.fix(layout, reason):
                any_fixed = True
    return any_fixed


def _fix_unwritten(coupling: Coupling, parameters: list[str]) -> None:
    """Channels that no layer writes, or no parameter has: they make no space."""
    channels = coupling.channels
    written: set[Atom] = set()
    for within in coupling.passes:
        for layout in within.written:
            written.update(channels.atoms(layout))
    spaces = written & set(coupling.atoms(parameters))
    for layout in coupling.layouts().union(*coupling.tensors.values()):
        for atom in channels.atoms(layout):
            if atom not in spaces:
                channels.fix(((atom,),), "no layer writes it")


def _fix_ignored(coupling: Coupling, model: nn.Module, parameters: list[str], ignore: Sequence[str]) -> None:
    """Channels that the user names: all that the parameters of a module write, or one space."""
    first_names = {id(tensor): name for name, tensor in model.named_parameters()}
    aliases = [(name, first_names[id(tensor)]) for name, tensor in model.named_parameters(remove_duplicate=False)]
    summed = _summed_dims(coupling)
    for name in ignore:
        spaces = _names(coupling, coupling.atoms(parameters))
        chosen = [atom for atom, space_name in spaces.items() if space_name == name]
        for atom in chosen:
            coupling.channels.fix(((atom,),), _IGNORED)

        inside = {first for alias, first in aliases if alias == name or alias.startswith(f"{name}.")}
        for parameter in inside:
            for dim, layout in enumerate(coupling.tensors[parameter]):
                if (parameter, dim) not in summed:
                    coupling.channels.fix(layout, _IGNORED)

        if not chosen and not inside:
            layers = {path for path, module in model.named_modules() if list(module.parameters())}
            similar = difflib.get_close_matches(name, sorted(layers.union(spaces.values())), n=3)
            hint = f"Did you mean: {', '.join(similar)}?" if similar else "`dmcp inspect` lists them."
            raise TraceError(f"ignore: no layer or space of this model is named {name!r}. {hint}")


def _summed_dims(coupling: Coupling) -> set[tuple[str | None, int]]:
    """The dims of tensors, by name, over which a layer sums: it reads these channels, and does not write them."""
    dims: set[tuple[str | None, int]] = set()
    for within in coupling.passes:
        for contraction in itertools.chain(*within.contractions.values()):
            if contraction.weight is not None:
                dims.add((within.recording.tensors.get(contraction.weight), contraction.weight_dim))
    return dims


def _unprunable(coupling: Coupling) -> tuple[Unprunable, ...]:
    """Output channels of layers that no space has, each once."""
    parts: dict[Unprunable, None] = {}
    for layer, written, _ in coupling.layers():
        for size, reason in coupling.channels.unprunable(written):
            parts[Unprunable(layer, size, reason)] = None
    return tuple(parts)


# -- the graph


def _graph(
    model: nn.Module, context: ReplayContext, hard: list[Fold], soft: list[Fold], notes: list[str], exact: bool
) -> ChannelGraph:
    """What was found, in terms of spaces."""
    coupling = context.coupling
    names = _names(coupling, coupling.atoms([name for name, _ in model.named_parameters()]))
    numbers = {atom.index: number for number, atom in enumerate(names)}
    batch = batch_of(context.batch)
    sample = _record_sample(model, context.example, coupling.passes[0].recording) if batch else None
    shapes = map_leaves(lambda leaf: leaf.shape[1:] if isinstance(leaf, Tensor) else None, context.example)
    return ChannelGraph(
        spaces=_spaces(coupling, names),
        unprunable=_unprunable(coupling),
        bindings=_bindings(context, names),
        unknown=dict(Counter(str(op.func) for op in coupling.passes[0].unknown)),
        notes=tuple(notes),
        input_shape=tuples(shapes),
        fingerprint=fingerprint(model),
        exact=exact,
        hard_folds=_gate_folds(coupling, hard, numbers),
        soft_folds=_gate_folds(coupling, soft, numbers),
        entries=_cost_entries(model, coupling, numbers, batch, sample),
        moments=moments(coupling, numbers, batch),
        traffic_terms=traffic(coupling, numbers, _value_shares(coupling.passes[0].recording, batch, sample)),
        _context=context,
        _atoms=tuple(atom.index for atom in names),
    )


def _names(coupling: Coupling, atoms: list[Atom]) -> dict[Atom, str]:
    """Each space is named after the first layer that writes it; further ones of a layer get a number."""
    layers = [(layer, coupling.channels.atoms(written)) for layer, written, _ in coupling.layers()]
    layers += [(tensor.removesuffix(".weight"), coupling.atoms([tensor])) for tensor in coupling.tensors]
    names: dict[Atom, str] = {}
    for layer, written_atoms in layers:
        for atom in written_atoms:
            if atom in names or atom not in atoms:
                continue
            name = layer
            number = 0
            while name in names.values():
                number += 1
                name = f"{layer}[{number}]"
            names[atom] = name
    return names


def _spaces(coupling: Coupling, names: Mapping[Atom, str]) -> tuple[ChannelSpace, ...]:
    """A space for each atom that has a name, with the layers that write and read it."""
    channels = coupling.channels
    writers: dict[Atom, list[str]] = {atom: [] for atom in names}
    readers: dict[Atom, list[str]] = {atom: [] for atom in names}
    for layer, written, over in coupling.layers():
        for atom in channels.atoms(written):
            if atom in writers and layer not in writers[atom]:
                writers[atom].append(layer)
        for atom in channels.atoms(over):
            if atom in readers and layer not in readers[atom]:
                readers[atom].append(layer)
    units = _units(coupling)
    return tuple(
        ChannelSpace(
            name,
            channels.axis_size(atom),
            writers=tuple(writers[atom]) or (name,),
            readers=tuple(readers[atom]),
            unit=units.get(atom.index, 1),
        )
        for atom, name in names.items()
    )


def _units(coupling: Coupling) -> dict[int, int]:
    """Real channels of each channel of an atom, by its number, in the layer that writes or reads fewest."""
    units: dict[int, int] = {}
    for _, written, over in coupling.layers():
        for segment in (*coupling.channels.resolve(written), *coupling.channels.resolve(over)):
            unit = math.prod(axis for axis in segment if isinstance(axis, int))
            for axis in segment:
                if isinstance(axis, Atom):
                    units[axis.index] = min(unit, units.get(axis.index, unit))
    return units


def _bindings(context: ReplayContext, names: Mapping[Atom, str]) -> tuple[Binding, ...]:
    """Attributes of modules that follow widths, as text."""
    channels = context.coupling.channels
    bindings: list[Binding] = []
    for (module, attribute, position), (layout, multiple) in context.bindings.items():
        entry = attribute if position is None else f"{attribute}[{position}]"
        spaces = ", ".join(names[atom] for atom in channels.atoms(layout))
        bindings.append(Binding(module, entry, multiple * channels.size(layout), spaces))
    return tuple(bindings)


def _gate_folds(coupling: Coupling, folds: list[Fold], numbers: Mapping[int, int]) -> tuple[GateFold, ...]:
    """Dims of tensors that are multiplied by gates, with layouts over spaces."""
    gate_folds: list[GateFold] = []
    for name, dim in folds:
        layout = coupling.tensors[name][dim]
        if coupling.channels.atoms(layout):
            in_spaces = coupling.in_spaces([layout], numbers)[0]
            gate_folds.append(GateFold(name, dim, in_spaces))
    return tuple(gate_folds)


# -- costs


def _record_sample(model: nn.Module, example: Any, recording: Recording) -> Recording | None:
    """The eval pass for one sample, if it runs the same ops on the same values as that for the batch."""
    with contextlib.suppress(Exception):  # the batch size is written into the model, or it looks at values
        single = record(model, rebatch(example, 1), training=False)
        ops = [(op.func, op.inputs(), op.outs) for op in recording.ops]
        if [(op.func, op.inputs(), op.outs) for op in single.ops] == ops:
            return single
    return None


def _cost_entries(
    model: nn.Module, coupling: Coupling, numbers: Mapping[int, int], batch: int | None, sample: Recording | None
) -> tuple[CostEntry, ...]:
    """Costs per layer, in the order in which they run; parameters that no op of cost uses come last."""
    first = coupling.passes[0]

    # Ops without a rule are counted by torch; each sample of a batch has an equal share of that.
    costs = [*first.costs, *(_measured(op, first.recording) for op in first.unknown)]
    shares = _cost_shares(coupling, batch, sample)
    shares += [Fraction(1, batch or 1)] * len(first.unknown)

    kinds: dict[str, str] = {}
    macs: dict[str, list[Terms]] = {}
    for cost, share in zip(costs, shares, strict=True):
        kinds.setdefault(cost.path, cost.kind)
        terms = product(cost.coefficient, coupling.in_spaces(cost.dims, numbers))
        macs.setdefault(cost.path, []).append(_scaled(terms, share))

    params: dict[str, list[Terms]] = {}
    for name, _ in model.named_parameters():
        layer = name.rpartition(".")[0]
        params.setdefault(layer, []).append(product(1, coupling.in_spaces(coupling.tensors[name], numbers)))
    return tuple(
        CostEntry(path, kinds.get(path, "other"), total(macs.get(path, [])), total(params.get(path, [])))
        for path in dict.fromkeys([*macs, *params])
    )


def _scaled(terms: Terms, share: Fraction) -> Terms:
    """A polynomial times a share that gives whole numbers."""
    scaled: Terms = {}
    for spaces, factor in terms.items():
        scaled_factor = factor * share
        if scaled_factor.denominator != 1:
            raise TraceError(
                "The cost of one sample does not follow from that of a batch: dim 0 of every input must be the batch. "
                "To prune a detector, trace the part before the boxes are chosen."
            )
        scaled[spaces] = int(scaled_factor)
    return scaled


def _cost_shares(coupling: Coupling, batch: int | None, sample: Recording | None) -> list[Fraction]:
    """Of each op that costs something: the share that one sample has. Some ops run once for the whole batch."""
    costs = coupling.passes[0].costs
    if batch is None:
        return [Fraction(1)] * len(costs)
    if sample is not None:
        with contextlib.suppress(Exception):  # a rule of the user's own may count other costs than ours
            single = couple([sample], RULES)
            shares: list[Fraction] = []
            for of_sample, of_batch in zip(single.passes[0].costs, costs, strict=True):
                shares.append(Fraction(_full(single, of_sample), max(1, _full(coupling, of_batch))))
            return shares
    return [Fraction(1, batch)] * len(costs)


def _value_shares(recording: Recording, batch: int | None, sample: Recording | None) -> dict[int, Fraction]:
    """Of each value: the share of its numbers that one sample has. Weights are the same for any batch."""
    shares: dict[int, Fraction] = {}
    for value, shape in enumerate(recording.shapes):
        if sample is not None:
            shares[value] = Fraction(math.prod(sample.shapes[value]), max(1, math.prod(shape)))
        elif batch is None or value in recording.from_weights:
            shares[value] = Fraction(1)
        else:
            shares[value] = Fraction(1, batch)
    return shares


def _full(coupling: Coupling, cost: OpCost) -> int:
    """What an op costs in the unpruned model."""
    return cost.coefficient * math.prod(map(coupling.channels.size, cost.dims))


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
