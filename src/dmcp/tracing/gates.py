"""Decides which weights and norms the gates of each space are folded into; the supernet folds them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dmcp.tracing.coupling import Contraction, Coupling, Flow, Pass
from dmcp.tracing.layout import Atom, Layout
from dmcp.tracing.modules import map_leaves
from dmcp.tracing.record import Op, Ref

Fold = tuple[str, int]  # tensor name, dim: this dim is multiplied by its gates

_ANYTHING = (0.7, -0.3, 0.0)  # values of an operand that is not known to be zero
_MAX_OPERANDS = 4


def plan_folds(coupling: Coupling, parameters: Iterable[str]) -> tuple[list[Fold], list[Fold], dict[Atom, str]]:
    """Where the gates of every atom go: folds for hard and soft gates, and atoms for which none are exact, and why."""
    flows = [_Zeros(coupling, within) for within in coupling.passes]

    # The weights that read an atom take its gates.
    readers: dict[Fold, None] = {}
    unread: set[Atom] = set()  # summed without a weight of the model's own
    sure = True
    for flow in flows:
        for contraction, atom in flow.sums():
            folds = flow.reader(contraction, atom)
            readers.update(dict.fromkeys(folds))
            if not folds:
                unread.add(atom)
            if not folds or contraction.weight not in flow.recording.tensors:
                sure = False

    # What no weight reads is gated in every parameter.
    everywhere: list[Fold] = []
    if unread:
        for name in parameters:
            if name in flows[0].written:
                continue
            for dim, layout in enumerate(coupling.tensors.get(name, ())):
                if not unread.isdisjoint(coupling.channels.atoms(layout)):
                    everywhere.append((name, dim))
    hard = dict.fromkeys([*readers, *everywhere])

    stuck: dict[Atom, str] = {}
    if not sure:  # the zeros must survive what lies between a parameter and the sum
        for flow in flows:
            for contraction, atom in flow.follow(set(hard)):
                stuck[atom] = f"no weight reads it that could be gated (at {contraction.path or 'the top'})"

    # Soft gates go into norms, and into readers only where the norms do not reach.
    soft = dict.fromkeys([fold for flow in flows for fold in flow.norms()])
    soft |= dict.fromkeys(fold for fold in everywhere if fold not in readers)
    for flow in flows:
        for contraction, atom in flow.follow(set(soft)):
            soft.update(dict.fromkeys(flow.reader(contraction, atom)))
    return list(hard), list(soft), stuck


def _real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(tensor.isfinite().all() for tensor in tensors)


class _Zeros:
    """Follows exact zeros through one recording."""

    def __init__(self, coupling: Coupling, within: Pass) -> None:
        self.coupling = coupling
        self.facts = within
        self.recording = within.recording

        @functools.cache
        def atoms_of(layout: Layout) -> frozenset[Atom]:
            return frozenset(coupling.channels.atoms(layout))

        self.by_dim: dict[int, list[frozenset[Atom]]] = {}  # the atoms in each dim of a value
        self.atoms: dict[int, frozenset[Atom]] = {}  # those in all its dims
        for value, dims in within.layouts.items():
            self.by_dim[value] = [atoms_of(layout) for layout in dims]
            self.atoms[value] = frozenset[Atom]().union(*self.by_dim[value])
        self.written = set[str]().union(*(each.recording.written for each in coupling.passes))
        self.folds: set[Fold] = set()
        self.zero: dict[int, frozenset[Atom]] = {}  # the atoms where a value is zero while they are off
        self.wild: dict[int, frozenset[Atom]] = {}  # those where it is NaN or infinite: 1 / 0, log 0
        self.family: dict[int, set[int]] = {}  # values that share memory: views of one another
        self._tried: dict[object, bool] = {}

    def sums(self) -> Iterable[tuple[Contraction, Atom]]:
        """Every sum over an atom."""
        for contraction in itertools.chain(*self.facts.contractions.values()):
            for atom in self.coupling.channels.atoms(contraction.over):
                yield contraction, atom

    def norms(self) -> Iterable[Fold]:
        """The scale of every norm, and its shift if it has one, where these are tensors of the model."""
        tensors = self.recording.tensors
        for norm in self.facts.norms.values():
            parameters = [value for value in (norm.weight, norm.bias) if value is not None]
            are_tensors = norm.weight is not None and all(value in tensors for value in parameters)
            if are_tensors and self.coupling.channels.atoms(norm.over):
                for value in parameters:
                    yield tensors[value], 0

    def reader(self, contraction: Contraction, atom: Atom) -> list[Fold]:
        """Dims of the model's own tensors that are the weight of a sum, or from which the model computes it."""
        name = self._name_of(contraction.weight)
        if name is not None and name not in self.written:
            return [(name, contraction.weight_dim)]
        for value in (contraction.weight, contraction.data):
            if value is None:
                continue
            sources = sorted(self.recording.from_weights.get(value, ()))
            if sources:
                return self._dims_with(atom, sources)
        return []

    def _dims_with(self, atom: Atom, values: Iterable[int]) -> list[Fold]:
        """The dims of these tensors that have the atom; a tensor that the model writes into cannot be folded."""
        folds: list[Fold] = []
        for value in values:
            name = self.recording.tensors[value]
            if name not in self.written:
                folds += [(name, dim) for dim, atoms in enumerate(self.by_dim[value]) if atom in atoms]
        return folds

    def _name_of(self, value: int | None) -> str | None:
        """The name of a value that is a tensor of the model."""
        return None if value is None else self.recording.tensors.get(value)

    def follow(self, folds: set[Fold]) -> list[tuple[Contraction, Atom]]:
        """With these folds, which sums over an atom have no factor that is zero where it is off?"""
        self.folds = folds
        self.zero = {}
        self.wild = {}
        for value, name in self.recording.tensors.items():  # zero are atoms whose every dim is folded
            not_folded = [atoms for dim, atoms in enumerate(self.by_dim[value]) if (name, dim) not in folds]
            self.zero[value] = self.atoms[value].difference(*not_folded)
        open_sums: list[tuple[Contraction, Atom]] = []
        for number, op in enumerate(self.recording.ops):
            for contraction in self.facts.contractions.get(number, ()):
                atoms = self.coupling.channels.atoms(contraction.over)
                open_sums += [(contraction, atom) for atom in atoms if not self._has_zero_factor(contraction, atom)]
            for out in op.outs:
                if out is not None and self.atoms[out]:
                    self.wild[out] = frozenset(atom for atom in self.atoms[out] if self._explodes(number, op, atom))
                    zero = frozenset(atom for atom in self.atoms[out] if self._comes_out_zero(number, out, atom))
                    self._note_zero(op, out, zero - self.wild[out])
        return open_sums

    def _note_zero(self, op: Op, value: int, zero: frozenset[Atom]) -> None:
        """In place, zeros are only ever lost, for all views of the memory: they may have been read before."""
        inputs = op.inputs()
        if value in inputs:
            for member in self.family.get(value, {value}):
                self.zero[member] = self.zero.get(member, frozenset()) & zero
            return
        # An atom in two dims of one value would need a zero for each of them.
        dims = self.by_dim[value]
        self.zero[value] = frozenset(atom for atom in zero if sum(atom in atoms for atoms in dims) == 1)
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
        with_channel = self._try(op, iter([0.7] * len(zeros)))
        without_channel = self._try(op, iter([0.0 if zero else 0.7 for zero in zeros]))
        return _are_finite(with_channel) and not _are_finite(without_channel)

    def _has_zero_factor(self, contraction: Contraction, atom: Atom) -> bool:
        factors = [value for value in (contraction.data, contraction.weight) if value is not None]
        if any(atom in self.wild.get(value, ()) for value in factors):
            return False
        is_folded = (self._name_of(contraction.weight), contraction.weight_dim) in self.folds
        return is_folded or any(self._zero_at(value, atom) for value in factors)

    def _comes_out_zero(self, number: int, out: int, atom: Atom) -> bool:
        """Whether an output of an op is zero where this atom is off."""
        op = self.recording.ops[number]
        flow = self.facts.flows[number]
        if flow is Flow.CONTRACTS:
            return self._passes(number, atom)
        if flow is Flow.NORMALIZES:
            return self._shifts_nothing(number, atom)

        dtypes = self.recording.dtypes
        carriers = [value for value in op.inputs() if atom in self.atoms[value]]
        if flow is Flow.KEEPS and not _real(dtypes[out]):
            carriers = [value for value in carriers if not _real(dtypes[value])]  # the others have no zeros here
        zeros = [self._zero_at(value, atom) for value in carriers]
        if flow is Flow.KEEPS:
            return bool(carriers) and all(zeros)
        if flow is Flow.PADS:
            return all(zeros)
        if flow is Flow.POINTWISE:
            return any(zeros) and self._stays_zero(op, atom)
        return False

    def _stays_zero(self, op: Op, atom: Atom) -> bool:
        """Try f: zero where an operand is known to be zero, anything elsewhere, in all combinations."""
        zeros = tuple(self._zero_at(value, atom) for value in op.inputs())
        if len(zeros) > _MAX_OPERANDS:
            return False
        key = (id(op), zeros)
        if key not in self._tried:
            choices = [(0.0,) if zero else _ANYTHING for zero in zeros]
            combinations = itertools.product(*choices)
            self._tried[key] = all(self._is_zero(op, iter(numbers)) for numbers in combinations)
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
            is_real = _real(dtype)
            number = next(numbers)
            start = torch.tensor([number if is_real else round(4 * number)]).to(dtype).requires_grad_(is_real)
            starts.append(start)
            return start.clone()

        with contextlib.suppress(Exception), torch.enable_grad():
            out = op.func(*map_leaves(sample, op.args), **map_leaves(sample, dict(op.kwargs)))
            results = [out.detach()]
            if out.requires_grad:
                real_starts = [start for start in starts if start.requires_grad]
                slopes = torch.autograd.grad(out.abs().sum(), real_starts, allow_unused=True)
                results += [slope for slope in slopes if slope is not None]
            return results
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
            is_folded = (self._name_of(last.weight), last.out_dim) in self.folds
            if is_folded and atom in self.by_dim[last.weight][last.out_dim]:
                return True
        summed = any(atom in self.coupling.channels.atoms(item.over) for item in contractions)
        return self._zero_at(last.weight, atom) or (not summed and self._zero_at(last.data, atom))

    def _shifts_nothing(self, number: int, atom: Atom) -> bool:
        norm = self.facts.norms[number]
        inside = atom in self.coupling.channels.atoms(norm.over)
        has_no_shift = norm.bias is None or self._zero_at(norm.bias, atom)
        return inside and self._zero_at(norm.weight, atom) and has_no_shift
