"""Decides which weights and norms the gates of each space are folded into; the supernet folds them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dmcp.tracing.coupling import Contraction, Coupling, Flow, Pass
from dmcp.tracing.layout import Atom
from dmcp.tracing.modules import map_leaves
from dmcp.tracing.record import Op, Ref

Fold = tuple[str, int]  # tensor name, dim: this dim is multiplied by its gates

_ANYTHING = (0.7, -0.3, 0.0)  # values of an operand that is not known to be zero
_MAX_OPERANDS = 4


def plan_folds(coupling: Coupling, parameters: Iterable[str]) -> tuple[list[Fold], list[Fold], dict[Atom, str]]:
    """Where the gates of every atom go: folds for hard and soft gates, and atoms for which none are exact, and why."""
    flows = [_Zeros(coupling, within) for within in coupling.passes]
    readers: dict[Fold, None] = {}
    unread: set[Atom] = set()  # summed without a weight of the model's own
    sure = True
    for flow in flows:
        for contraction, atom in flow.sums():
            folds = flow.reader(contraction, atom)
            readers.update(dict.fromkeys(folds))
            sure &= bool(folds) and contraction.weight in flow.recording.tensors
            if not folds:
                unread.add(atom)
    everywhere = [
        (name, dim)
        for name in parameters
        for dim, layout in enumerate(coupling.tensors.get(name, ()))
        if unread and not unread.isdisjoint(coupling.channels.atoms(layout)) and name not in flows[0].written
    ]
    hard = dict.fromkeys([*readers, *everywhere])
    stuck: dict[Atom, str] = {}
    if not sure:  # the zeros must survive what lies between a parameter and the sum
        for flow in flows:
            for contraction, atom in flow.follow(set(hard)):
                stuck[atom] = f"no weight reads it that could be gated (at {contraction.path or 'the top'})"
    soft = dict.fromkeys([fold for flow in flows for fold in flow.norms()])
    soft |= dict.fromkeys(fold for fold in everywhere if fold not in readers)
    for flow in flows:
        for contraction, atom in flow.follow(set(soft)):
            soft.update(dict.fromkeys(flow.reader(contraction, atom)))
    return list(hard), list(soft), stuck


def _real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _Zeros:
    """Follows exact zeros through one recording."""

    def __init__(self, coupling: Coupling, within: Pass) -> None:
        self.coupling, self.facts, self.recording = coupling, within, within.recording
        atoms = functools.cache(lambda layout: frozenset(coupling.channels.atoms(layout)))
        self.by_dim: dict[int, list[frozenset[Atom]]] = {
            value: [atoms(layout) for layout in dims] for value, dims in within.layouts.items()
        }
        self.atoms = {value: frozenset[Atom]().union(*dims) for value, dims in self.by_dim.items()}
        self.written = {name for it in coupling.passes for name in it.recording.written}
        self.folds: set[Fold] = set()
        self.zero: dict[int, frozenset[Atom]] = {}
        self.family: dict[int, set[int]] = {}  # values that share memory: views of one another
        self._tried: dict[object, bool] = {}

    def sums(self) -> Iterable[tuple[Contraction, Atom]]:
        """Every sum over an atom."""
        for contraction in itertools.chain(*self.facts.contractions.values()):
            yield from ((contraction, atom) for atom in self.coupling.channels.atoms(contraction.over))

    def norms(self) -> Iterable[Fold]:
        """Scale and shift of every norm whose both are tensors of the model."""
        for weight, bias, over in self.facts.norms.values():
            names = [self.recording.tensors.get(value) for value in (weight, bias) if value is not None]
            if weight is not None and None not in names and self.coupling.channels.atoms(over):
                yield from ((name, 0) for name in names if name is not None)

    def reader(self, contraction: Contraction, atom: Atom) -> list[Fold]:
        """Dims of the model's own tensors that are the weight of a sum, or from which the model computes it."""
        name = None if contraction.weight is None else self.recording.tensors.get(contraction.weight)
        if name is not None and name not in self.written:
            return [(name, contraction.weight_dim)]
        for value in (contraction.weight, contraction.data):
            sources = sorted(self.recording.own.get(value, ())) if value is not None else []
            if sources:
                return [
                    (name, dim)
                    for source in sources
                    if (name := self.recording.tensors[source]) not in self.written
                    for dim, atoms in enumerate(self.by_dim[source])
                    if atom in atoms
                ]
        return []

    def follow(self, folds: set[Fold]) -> list[tuple[Contraction, Atom]]:
        """With these folds, which sums over an atom have no factor that is zero where it is off?"""
        self.folds = folds
        self.zero = {}
        self.wild: dict[int, frozenset[Atom]] = {}  # NaN or infinite where these are off: 1 / 0, log 0
        for value, name in self.recording.tensors.items():  # atoms whose every dim is folded
            bare = (atoms for dim, atoms in enumerate(self.by_dim[value]) if (name, dim) not in folds)
            self.zero[value] = self.atoms[value].difference(*bare)
        open_sums: list[tuple[Contraction, Atom]] = []
        for number, op in enumerate(self.recording.ops):
            for contraction in self.facts.contractions.get(number, ()):
                atoms = self.coupling.channels.atoms(contraction.over)
                open_sums += [(contraction, atom) for atom in atoms if not self._has_zero_factor(contraction, atom)]
            for out in op.outs:
                if out is not None and self.atoms[out]:
                    self.wild[out] = frozenset(atom for atom in self.atoms[out] if self._explodes(number, op, atom))
                    self._set(op, out, frozenset(self._out(number, op, out)) - self.wild[out])
        return open_sums

    def _set(self, op: Op, value: int, zero: frozenset[Atom]) -> None:
        """In place, zeros are only ever lost, for all views of the memory: they may have been read before."""
        inputs = op.inputs()
        if value in inputs:
            for member in self.family.get(value, {value}):
                self.zero[member] = self.zero.get(member, frozenset()) & zero
            return
        # An atom in two dims of one value would need a zero for each of them.
        self.zero[value] = frozenset(it for it in zero if sum(it in atoms for atoms in self.by_dim[value]) == 1)
        if inputs and op.func._schema.arguments[0].alias_info is not None:  # a view
            family = self.family.setdefault(inputs[0], {inputs[0]})
            family.add(value)
            self.family[value] = family

    def _zero_at(self, value: int | None, atom: Atom) -> bool:
        return value is not None and atom in self.zero.get(value, frozenset())

    def _explodes(self, number: int, op: Op, atom: Atom) -> bool:
        """Whether zeros of this atom give something that is not finite, at this op or before."""
        inputs = op.inputs()
        if any(atom in self.wild.get(value, ()) for value in inputs):
            return True
        zeros = [self._zero_at(value, atom) for value in inputs]
        if self.facts.flows[number] is not Flow.POINTWISE or not any(zeros):
            return False
        usual = self._try(op, iter([0.7] * len(zeros)))
        off = self._try(op, iter([0.0 if zero else 0.7 for zero in zeros]))
        return all(it.isfinite().all() for it in usual) and not all(it.isfinite().all() for it in off)

    def _has_zero_factor(self, contraction: Contraction, atom: Atom) -> bool:
        if any(atom in self.wild.get(it, ()) for it in (contraction.data, contraction.weight) if it is not None):
            return False
        name = self.recording.tensors.get(contraction.weight) if contraction.weight is not None else None
        folded = (name, contraction.weight_dim) in self.folds
        return folded or self._zero_at(contraction.data, atom) or self._zero_at(contraction.weight, atom)

    def _out(self, number: int, op: Op, value: int) -> Iterable[Atom]:
        flow, inputs, dtypes = self.facts.flows[number], op.inputs(), self.recording.dtypes
        for atom in self.atoms[value]:
            carriers = [source for source in inputs if atom in self.atoms[source]]
            if flow is Flow.KEEPS and not _real(dtypes[value]):
                carriers = [source for source in carriers if not _real(dtypes[source])]  # the others have no zeros here
            zeros = [self._zero_at(source, atom) for source in carriers]
            if (
                (flow in (Flow.KEEPS, Flow.PADS) and all(zeros) and (carriers or flow is Flow.PADS))
                or (flow is Flow.POINTWISE and any(zeros) and self._stays_zero(op, atom))
                or (flow is Flow.CONTRACTS and self._passes(number, atom))
                or (flow is Flow.NORMALIZES and self._shifts_nothing(number, atom))
            ):
                yield atom

    def _stays_zero(self, op: Op, atom: Atom) -> bool:
        """Try f: zero where an operand is known to be zero, anything elsewhere, in all combinations."""
        zeros = tuple(self._zero_at(value, atom) for value in op.inputs())
        key = (id(op), zeros)
        if key not in self._tried:
            choices = [(0.0,) if zero else _ANYTHING for zero in zeros]
            self._tried[key] = len(zeros) <= _MAX_OPERANDS and all(
                self._is_zero(op, iter(numbers)) for numbers in itertools.product(*choices)
            )
        return self._tried[key]

    def _is_zero(self, op: Op, numbers: Iterator[float]) -> bool:
        out = self._try(op, numbers)[:1]  # an op that cannot be tried on one number is not known to keep zeros
        return bool(out) and bool((out[0] == 0).all())

    def _try(self, op: Op, numbers: Iterator[float]) -> list[Tensor]:
        """What the op makes of one number for each operand, and its gradients."""
        starts: list[Tensor] = []

        def sample(leaf: object) -> object:
            if not isinstance(leaf, Ref):
                return leaf
            dtype = self.recording.dtypes[leaf.value]
            number = next(numbers)
            starts.append(torch.tensor([number if _real(dtype) else round(4 * number)]).to(dtype))
            return starts[-1].requires_grad_(_real(dtype)).clone()

        with contextlib.suppress(Exception), torch.enable_grad():
            out = op.func(*map_leaves(sample, op.args), **map_leaves(sample, dict(op.kwargs)))
            starts = [start for start in starts if start.requires_grad]
            slopes = torch.autograd.grad(out.abs().sum(), starts, allow_unused=True) if out.requires_grad else ()
            return [out.detach(), *(slope for slope in slopes if slope is not None)]
        return []

    def _passes(self, number: int, atom: Atom) -> bool:
        """Output channels are zero if a factor that hands them on is, and nothing is added."""
        contractions = self.facts.contractions.get(number, [])
        if not contractions:  # a product without a sum
            return any(self._zero_at(value, atom) for value in self.recording.ops[number].inputs())
        last = contractions[-1]  # of attention this is the sum over values; elsewhere all have the same factors
        if last.bias is not None and not self._zero_at(last.bias, atom):
            return False
        if last.weight is not None and last.out_dim is not None:
            name, written = self.recording.tensors.get(last.weight), self.by_dim[last.weight][last.out_dim]
            if (name, last.out_dim) in self.folds and atom in written:
                return True
        summed = any(atom in self.coupling.channels.atoms(item.over) for item in contractions)
        return self._zero_at(last.weight, atom) or (not summed and self._zero_at(last.data, atom))

    def _shifts_nothing(self, number: int, atom: Atom) -> bool:
        weight, bias, over = self.facts.norms[number]
        inside = atom in self.coupling.channels.atoms(over)
        return inside and self._zero_at(weight, atom) and (bias is None or self._zero_at(bias, atom))
