"""trace: record, apply the rules, replay, count."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp.arguments import checked
from dmcp.errors import TraceError
from dmcp.tracing.cost import Terms, moments, product, total
from dmcp.tracing.coupling import Call, Coupling, Dims, OpCost, Pass, Rule
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
    Guard,
    Op,
    Recording,
    Ref,
    check_example,
    meta_example,
    record,
    record_anywhere,
    untouched_world,
)
from dmcp.tracing.replay import ReplayContext, Resolver
from dmcp.tracing.rules import RULES, find_rule, unknown
from dmcp.tracing.verification import ForwardError, find_unequal
from dmcp.tracing.widths import ChannelSpace, fingerprint, tuples

_BATCH = 3  # more than one for BatchNorm in train mode; odd, so that it is rarely mistaken for channels
_IGNORED = "ignored, as you asked"


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
    ignore: modules or spaces, by name, whose channels are not pruned.
    rules: op -> channel rule, `dmcp.RULES` by default; extend with `RULES | {op: rule}`.
    exact: do not prune what a gated network computes differently from a cut one (channels under LayerNorm).
    strict: raise on an op without a rule and on values that decide in forward; bind no attribute by its value.
    verify: run the model, cut and gated, on real numbers, and leave unpruned what makes a difference: code can act
        otherwise while it is traced. It costs about three forward and backward passes of two samples.
    """
    model = unwrap(model)
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    recordings, batch, notes = _record_modes(model, example_input)
    for note in _note_reads(recordings):
        if strict:
            raise TraceError(f"With strict=True {note}: choose with torch.where instead.")
        notes.append(note)
    coupling = couple(recordings, RULES if rules is None else rules, strict, ignore)
    parameters = [name for name, _ in model.named_parameters()]
    for within in coupling.passes:
        for read in within.recording.reads:
            for layout in (layout for value in read.values for layout in within.layouts[value]):
                coupling.channels.fix(layout, f"its values are read by {read.way} ({read.where})")
        for op in within.recording.seeded:
            for layout in (layout for value in op.outs if value is not None for layout in within.layouts[value]):
                where = f"{op.name} at {op.path or 'the top'}"
                coupling.channels.fix(layout, f"random numbers seeded in forward go by its size ({where})")
    mixed = [pair for within in coupling.passes for pair in within.mixed] if exact else []
    mixed = [(layout, reason) for layout, reason in mixed if coupling.channels.fix(layout, reason)]
    _fix_unwritten(coupling, parameters)
    _fix_ignored(coupling, model, parameters, ignore)
    context = ReplayContext(skeleton(model), example_input, meta_example(batch), coupling)
    resolver = Resolver(context, parameters, bind=not strict)
    while True:
        # until the narrow models agree, and the gates of every atom have a place
        resolver.run()
        with untouched_world("cpu"):
            hard, soft, stuck = plan_folds(coupling, parameters)
        for atom, reason in stuck.items():
            coupling.channels.fix(((atom,),), reason)
        if stuck:
            continue
        if not coupling.atoms(parameters):
            reasons = "; ".join(f"{item.name}: {item.reason}" for item in _unprunable(coupling)[:3])
            hint = " With exact=False channels under LayerNorm or weight standardization could be." if mixed else ""
            nothing = reasons or "no conv or linear layer was seen"
            raise TraceError(f"Nothing in this model can be pruned. {nothing}.{hint}")
        graph = _graph(model, context, (hard, soft), notes, exact)

        # and until what is cut computes what was gated
        if not verify or not _can_be_verified(model, graph, example_input):
            return graph
        try:
            unequal, difference = find_unequal(model, graph, example_input)
        except ForwardError as error:
            raise TraceError(f"{error} Give another example, or verify=False.") from error
        if not unequal:
            return replace(graph, verified=True)
        for space in unequal:
            reason = f"a network without some of its channels computes something else: {difference}"
            coupling.channels.fix(((Atom(graph.atom_of(space)),),), reason)


def _can_be_verified(model: nn.Module, graph: ChannelGraph, example: Any) -> bool:
    """Not without data, and not where a gated network is known to compute something else."""
    tensors = (*model.parameters(), *model.buffers(), *tensors_in(example))
    return graph.exact and not any(tensor.is_meta for tensor in tensors)


def _record_modes(model: nn.Module, example: Any) -> tuple[list[Recording], Any, list[str]]:
    """Eval mode and train mode (some layers run in one of them only), with several samples where that works."""
    check_example(example, *model.parameters(), *model.buffers())
    several, notes = example, list[str]()
    twin = narrow(model, {}, {}).eval()
    with contextlib.suppress(Exception), untouched_world("cpu", model), torch.no_grad(), Guard(model):
        one = tree_map_only(Tensor, torch.clone, rebatch(example, 1))
        call_model(twin, one)  # what it keeps outside of itself for later runs has data then
    if batch_of(example) is None:
        notes.append("the inputs do not share their first dim, so macs are of the whole example, not of one sample")
    else:
        several = rebatch(example, _BATCH)
    try:
        first = record_anywhere(model, several, training=False)
    except TraceError:  # the batch size may be written into the model
        several = example
        try:
            first = record_anywhere(model, several, training=False)
        except TraceError as error:
            hint = wrong_dtype(model, example)
            raise TraceError(f"{error}. It holds {hint}." if hint else str(error)) from error
    read = (op.inputs()[0] for op in first.ops if op.name == "conv2d")
    if any(value in first.inputs and len(first.shapes[value]) == 3 for value in read):
        raise TraceError("A convolution takes the example input for one image: it needs a batch dim, as in 2x3x64x64.")
    found = [first]
    try:
        found.append(record_anywhere(model, several, training=True, grad=True))
    except TraceError as error:
        notes.append(f"train mode could not be recorded, so layers that run only there are unknown: {error}")
    for usual in list(found):  # some models ask whether gradients are on: in training they are
        with contextlib.suppress(TraceError):
            other = record_anywhere(model, several, usual.training, not usual.grad)
            found[1:1] = [other] if other.ops != usual.ops else []
    return found, several, notes


def wrong_dtype(model: nn.Module, example: Any) -> str:
    """Why forward may have failed: an example of another dtype than the weights; else empty."""
    own = {it.dtype for it in model.parameters() if it.is_floating_point()}
    given = {it.dtype for it in tensors_in(example)}
    if not own or not given.isdisjoint(own):
        return ""
    held, wanted = (", ".join(str(it).removeprefix("torch.") for it in kinds) for kinds in (given, own))
    return f"{held}, the weights of the model {wanted}: convert it, and scale bytes of images as the model expects"


def _note_reads(recordings: Sequence[Recording]) -> Iterator[str]:
    """Where values that depend on the input become Python values."""
    reads = (read for it in recordings for read in it.reads if not it.own.keys() >= {*read.values})
    if places := list(dict.fromkeys(read.where for read in reads)):
        yield (
            f"forward turns values of its input into Python values ({', '.join(places[:3])}): another input may take "
            "another way, and a cut network is only right for inputs that take this one"
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
        for layout in (layout for value in within.recording.outputs for layout in within.layouts[value]):
            coupling.channels.fix(layout, "it is an output of the model")
    return coupling


def _follow(coupling: Coupling, within: Pass, rules: Mapping[Func, Rule], strict: bool, ignore: Sequence[str]) -> None:
    channels, recording, layouts = coupling.channels, within.recording, within.layouts
    for value, name in recording.tensors.items():
        layouts[value] = coupling.tensors.setdefault(name, tuple(map(channels.fresh, recording.shapes[value])))
    for value in (*recording.inputs, *recording.constants):
        layouts.setdefault(value, tuple(map(fixed, recording.shapes[value])))
    for number, op in enumerate(recording.ops):
        call = Call(channels, within, number)
        channels.because = call.where()
        rule = find_rule(op.func, rules)
        if rule is None and strict and not any(op.path == name or op.path.startswith(name + ".") for name in ignore):
            raise TraceError(
                f"{op.path or 'the model'}: no channel rule for {op.func}. Give one: trace(..., rules=RULES | "
                f"{{{op.func}: my_rule}}), or leave its channels unpruned: trace(..., ignore=[{op.path!r}])."
            )
        outs = (rule or unknown)(call)
        within.flows.append(call.flow)
        sizes = [tuple(map(channels.size, dims)) for dims in outs]
        if len(sizes) != len(op.outs) or any(
            out is not None and size != shape for out, size, shape in zip(op.outs, sizes, call.out_shapes, strict=True)
        ):
            raise TraceError(f"The channel rule of {op.func} at {call.where()} gave {sizes}, not {call.out_shapes}.")
        layouts.update((out, dims) for out, dims in zip(op.outs, outs, strict=True) if out is not None)


# -- unprunable channels


def _fix_unwritten(coupling: Coupling, parameters: list[str]) -> None:
    """A space needs a layer that writes it and a parameter that has it."""
    channels = coupling.channels
    written = {atom for within in coupling.passes for layout in within.written for atom in channels.atoms(layout)}
    spaces = written & set(coupling.atoms(parameters))
    for layout in coupling.layouts().union(*coupling.tensors.values()):
        for atom in channels.atoms(layout):
            if atom not in spaces:
                channels.fix(((atom,),), "no layer writes it")


def _fix_ignored(coupling: Coupling, model: nn.Module, parameters: list[str], ignore: Sequence[str]) -> None:
    """What the user named: all that the parameters of a module write, or one space."""
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    tied = [(name, first[id(tensor)]) for name, tensor in model.named_parameters(remove_duplicate=False)]
    read = {
        (within.recording.tensors.get(item.weight), item.weight_dim)
        for within in coupling.passes
        for item in itertools.chain(*within.contractions.values())
        if item.weight is not None
    }
    for wanted in ignore:
        spaces = _names(coupling, coupling.atoms(parameters))
        chosen = [atom for atom, name in spaces.items() if name == wanted]
        for atom in chosen:
            coupling.channels.fix(((atom,),), _IGNORED)
        inside = {own for name, own in tied if name == wanted or name.startswith(f"{wanted}.")}
        for name in inside:
            for dim, layout in enumerate(coupling.tensors[name]):
                if (name, dim) not in read:
                    coupling.channels.fix(layout, _IGNORED)
        if not chosen and not inside:
            known = {name for name, module in model.named_modules() if [*module.parameters()]} | {*spaces.values()}
            near = ", ".join(difflib.get_close_matches(wanted, sorted(known), n=3)) or "dmcp inspect lists them"
            raise TraceError(f"ignore names no layer and no space of this model: {wanted!r}; did you mean: {near}?")


def _units(coupling: Coupling) -> dict[int, int]:
    """Real channels of each channel of an atom, by its number, in the layer that writes or reads fewest."""
    found: dict[int, int] = {}
    for _, written, over in coupling.layers():
        for segment in (*coupling.channels.resolve(written), *coupling.channels.resolve(over)):
            unit = math.prod(axis for axis in segment if isinstance(axis, int))
            found |= {it.index: min(unit, found.get(it.index, unit)) for it in segment if isinstance(it, Atom)}
    return found


def _names(coupling: Coupling, atoms: list[Atom]) -> dict[Atom, str]:
    """Each space is named after the first layer that writes it; further ones of a layer get a number."""
    names: dict[Atom, str] = {}
    layers = [(layer, coupling.channels.atoms(written)) for layer, written, _ in coupling.layers()]
    layers += [(tensor.removesuffix(".weight"), coupling.atoms([tensor])) for tensor in coupling.tensors]
    for layer, atom in ((layer, atom) for layer, written in layers for atom in written):
        if atom not in names and atom in atoms:
            numbered = (f"{layer}[{number}]" for number in range(1, len(atoms) + 1))
            names[atom] = next(free for free in (layer, *numbered) if free not in names.values())
    return names


def _unprunable(coupling: Coupling) -> tuple[Unprunable, ...]:
    parts = ((layer, part) for layer, written, _ in coupling.layers() for part in coupling.channels.unprunable(written))
    return tuple(dict.fromkeys(Unprunable(layer, size, reason) for layer, (size, reason) in parts))


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
        every = ((name, dim, coupling.tensors[name][dim]) for name, dim in folds)
        found = (fold for fold in every if channels.atoms(fold[2]))
        return tuple(GateFold(name, dim, *coupling.in_spaces([layout], numbers)) for name, dim, layout in found)

    def layers(atom: Atom, pairs: Iterable[tuple[str, set[Atom]]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer for layer, atoms in pairs if atom in atoms))

    writers = [(layer, set(channels.atoms(written))) for layer, written, _ in coupling.layers()]
    readers = [(layer, set(channels.atoms(over))) for layer, _, over in coupling.layers()]
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
        unprunable=_unprunable(coupling),
        bindings=bindings,
        unknown=dict(Counter(str(op.func) for op in coupling.passes[0].unknown)),
        notes=tuple(notes),
        input_shape=tuples(map_leaves(lambda it: it.shape[1:] if isinstance(it, Tensor) else None, context.example)),
        fingerprint=fingerprint(model),
        exact=exact,
        hard_folds=gate_folds(folds[0]),
        soft_folds=gate_folds(folds[1]),
        entries=_cost_entries(model, context, numbers),
        moments=moments(coupling, numbers, batch_of(context.batch)),
        _context=context,
        _atoms=tuple(atom.index for atom in order),
    )


# -- costs


def _cost_entries(model: nn.Module, context: ReplayContext, numbers: Mapping[int, int]) -> tuple[CostEntry, ...]:
    """Costs per layer, in the order in which they run; parameters that no op of cost uses come last."""
    coupling, batch = context.coupling, batch_of(context.batch)
    first = coupling.passes[0]

    def terms(coefficient: int, dims: Dims) -> Terms:
        return product(coefficient, coupling.in_spaces(dims, numbers))

    shares = _per_sample(model, context.example, coupling, batch)
    costs = [*first.costs, *(_measured(op, first.recording) for op in first.unknown)]
    shares += [Fraction(1, batch or 1)] * len(first.unknown)
    kinds: dict[str, str] = {}
    macs: dict[str, list[Terms]] = {}
    params: dict[str, list[Terms]] = {}
    for cost, share in zip(costs, shares, strict=True):
        kinds.setdefault(cost.path, cost.kind)
        scaled = {key: factor * share for key, factor in terms(cost.coefficient, cost.dims).items()}
        if any(factor.denominator != 1 for factor in scaled.values()):
            raise TraceError(
                "The cost of one sample does not follow from that of a batch: dim 0 of the inputs must be it. Trace "
                "the part of a detector that ends before its boxes are chosen."
            )
        macs.setdefault(cost.path, []).append({key: int(factor) for key, factor in scaled.items()})
    for name, _ in model.named_parameters():
        params.setdefault(name.rpartition(".")[0], []).append(terms(1, coupling.tensors[name]))
    return tuple(
        CostEntry(path, kinds.get(path, "other"), total(macs.get(path, [])), total(params.get(path, [])))
        for path in dict.fromkeys([*macs, *params])
    )


def _per_sample(model: nn.Module, example: Any, coupling: Coupling, batch: int | None) -> list[Fraction]:
    """Of each op that costs something: the share that one sample has. Some ops run once for the whole batch."""
    recording, costs = coupling.passes[0].recording, coupling.passes[0].costs
    if batch is None:
        return [Fraction(1)] * len(costs)
    with contextlib.suppress(Exception):  # the batch size is written into the model, or it looks at values
        single = couple([record(model, rebatch(example, 1), training=False)], RULES)
        one = single.passes[0]
        if [op.func for op in one.recording.ops] == [op.func for op in recording.ops]:
            pairs = zip(one.costs, costs, strict=True)
            return [Fraction(_full(single, it), max(1, _full(coupling, many))) for it, many in pairs]
    return [Fraction(1, batch)] * len(costs)


def _full(coupling: Coupling, cost: OpCost) -> int:
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
