"""MACs, parameters and memory as polynomials in the widths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmcp.tracing.coupling import Coupling, Flow
from dmcp.tracing.layout import Layout, monomials
from dmcp.tracing.record import Recording

_CHUNK = 1 << 16  # numbers in one intermediate tensor: few enough for a CPU's cache

Terms = dict[tuple[int, ...], int]  # spaces that are multiplied -> coefficient


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs at some widths."""

    name: str
    kind: str
    macs: int
    params: int


def product(coefficient: int, dims: Iterable[Layout]) -> Terms:
    """The polynomial coefficient x width of dim x width of dim ..."""
    terms: Terms = {(): coefficient}
    for layout in dims:
        grown: Terms = {}
        for spaces, factor in terms.items():
            for size, more in monomials(layout):
                key = tuple(sorted(spaces + more))
                grown[key] = grown.get(key, 0) + factor * size
        terms = grown
    return terms


def total(parts: Iterable[Terms]) -> Terms:
    """Sum of polynomials."""
    summed: Terms = {}
    for part in parts:
        for spaces, factor in part.items():
            summed[spaces] = summed.get(spaces, 0) + factor
    return summed


def evaluate(terms: Terms, widths: Sequence[int]) -> int:
    """The exact value at some widths."""
    value = 0
    for spaces, factor in terms.items():
        for space in spaces:
            factor *= widths[space]
        value += factor
    return value


class Polynomial:
    """A polynomial as tensors: many widths in one expression.

    Each term is a coefficient times powers of different spaces. Tensors are made at the first call for a device and a
    dtype; `expected` then neither copies from the host nor waits for the device, and a CUDA graph can capture it.
    """

    def __init__(self, terms: Terms, spaces: int, factors: Sequence[Sequence[int]] = ()) -> None:
        self.terms = terms
        self.spaces = spaces
        self._factors = factors  # of a peak: of each term, in each of its polynomials
        powers = [[(space, key.count(space)) for space in dict.fromkeys(key)] for key in terms]
        self._powers = max((power for row in powers for _, power in row), default=1)
        self._degree = max(map(len, powers), default=0)
        ones = self._powers * spaces  # the row behind the widths, their squares, ...
        self._rows = [
            [space + (power - 1) * spaces for space, power in row] + [ones] * (self._degree - len(row))
            for row in powers
        ]
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, widths: Tensor) -> Tensor:
        """Exact for integers, differentiable for floats. (N, S) -> (N,)"""
        widths = widths.T if widths.is_floating_point() else widths.T.long()
        chunks = torch.split(widths, max(1, _CHUNK // max(1, len(self.terms))), dim=1)
        # products, not pow: that is exact for few numbers only
        return torch.cat([self._sum(list(itertools.accumulate([it] * self._powers, torch.mul))) for it in chunks])

    def evaluate(self, widths: Sequence[int]) -> int:
        """The exact value at some widths."""
        return evaluate(self.terms, widths)

    def expected(self, moment: Callable[[int], Tensor]) -> Tensor:
        """Expectation if the widths of spaces are independent (eqs. 9 to 12); moment(p) gives E[w ** p]. -> ()"""
        return self._sum([moment(power)[:, None] for power in range(1, self._powers + 1)]).reshape(())

    def _sum(self, powers: Sequence[Tensor]) -> Tensor:
        """The value from the widths, their squares, ... (S, N) each -> (N,)"""
        return self._products(powers).sum(dim=0)

    def _products(self, powers: Sequence[Tensor]) -> Tensor:
        """The value of each term. (S, N) each -> (T, N)"""
        first = powers[0]
        values = torch.cat([*powers, first.new_ones(1, first.shape[1])])
        products, columns, _ = self._table(values)
        for column in columns:
            products = products * values[column]  # not index_select: its gradient adds in any order on a GPU
        return products.expand(-1, first.shape[1])

    def _table(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients, the rows to take for each factor of the terms, factors of a peak. -> (T, 1), (D, T), (M, T)"""
        key = like.device, like.dtype
        if key not in self._tables:
            with torch.inference_mode(False):  # what is made in inference mode could not be used in training later
                numbers = (list(self.terms.values()), self._rows, self._factors)
                made = [torch.tensor(it, dtype=torch.int64, device=like.device) for it in numbers]
                columns = made[1].reshape(len(self._rows), self._degree).T.contiguous()
                self._tables[key] = made[0].to(like.dtype)[:, None], columns, made[2].to(like.dtype)
        return self._tables[key]


# ops that give back the memory of their input, in eval mode
VIEWS = {"reshape", "flatten", "unflatten", "expand_as", "view_as", "contiguous", "dropout", "feature_dropout"}
_ELEMENTWISE = {"batch_norm", "prelu", "_prelu_kernel", "where", "masked_fill"}  # besides those with a pointwise rule


@dataclass(frozen=True)
class Moment:
    """One op as it runs, and the bytes of all activations that are held then."""

    name: str  # of the layer
    terms: Terms


class Peak(Polynomial):
    """The maximum of some polynomials over the same products of widths; like one of them, it grows with each width.

    Its expectation is the maximum of theirs, which is not above the expectation of the maximum.
    """

    def __init__(self, moments: Sequence[Moment], spaces: int) -> None:
        self.moments = tuple(moments) or (Moment("", {(): 0}),)
        keys = list(dict.fromkeys(key for moment in self.moments for key in moment.terms))
        factors = [[moment.terms.get(key, 0) for key in keys] for moment in self.moments]
        super().__init__(dict.fromkeys(keys, 1), spaces, factors)

    def evaluate(self, widths: Sequence[int]) -> int:
        """The exact value at some widths."""
        return evaluate(self.at(widths).terms, widths)

    def at(self, widths: Sequence[int]) -> Moment:
        """The moment of the peak at some widths; the first of several."""
        return max(self.moments, key=lambda moment: evaluate(moment.terms, widths))

    def _sum(self, powers: Sequence[Tensor]) -> Tensor:
        products = self._products(powers)  # (T, N)
        factors = self._table(products)[2]
        if products.device.type == "cpu":
            return (factors @ products).amax(dim=0)
        return (factors[:, :, None] * products).sum(dim=1).amax(dim=0)  # no matmul: a GPU's would round, or has no ints


def moments(coupling: Coupling, numbers: Mapping[int, int], batch: int | None) -> tuple[Moment, ...]:
    """Of the pass in eval mode, for one sample: the moments that can be the worst ones at some widths.

    Held is what is still to be read, the inputs and what an op is writing. An elementwise op overwrites what nobody
    reads after it, as runtimes do, so norms and activation functions take no memory of their own. What is computed
    from weights alone is not counted, nor what an op needs for itself.
    """
    first, recording = coupling.passes[0], coupling.passes[0].recording
    holders = _holders(recording, first.flows)
    samples = batch or 1

    def size(value: int) -> Terms:
        terms = product(recording.dtypes[value].itemsize, coupling.in_spaces(first.layouts[value], numbers))
        return {spaces: -(-factor // samples) for spaces, factor in terms.items()}

    held = [(born, dies, size(value)) for value, (born, dies) in holders.items()]
    found = [
        Moment(op.path, total(terms for born, dies, terms in held if born <= number <= dies))
        for number, op in enumerate(recording.ops)
    ]
    return tuple(_worst([moment for moment in found if moment.terms]))


def _holders(recording: Recording, flows: Sequence[Flow]) -> dict[int, tuple[int, int]]:
    """First and last op during which memory is held, by the value that it was allocated for."""

    def same(old: int, new: int) -> bool:
        return (recording.shapes[old], recording.dtypes[old]) == (recording.shapes[new], recording.dtypes[new])

    owners, complete = _owners(recording)
    last: dict[int, int] = {}
    for number, op in enumerate(recording.ops):
        last |= {owners[value]: number for value in (*op.inputs(), *op.outs[:1]) if value in owners}
    last |= {owners[value]: len(recording.ops) for value in recording.outputs if value in owners}
    places = {value: value for value in recording.inputs if value in owners}
    held = {value: (0, last.get(value, 0)) for value in places}
    back = {value: since.ops for value, since in recording.constants.items() if value in last}  # not own
    places |= {value: value for value in back}
    held |= {value: (born, last[value]) for value, born in back.items()}
    for number, op in enumerate(recording.ops):
        for out in op.outs:
            if out is None or out in places or owners.get(out) != out or out not in last:  # not new, or never read
                continue
            elementwise = op.name in _ELEMENTWISE or flows[number] is Flow.POINTWISE
            looks = [value for value in op.inputs() if value in complete and same(value, out)] * elementwise
            free = (owners[value] for value in looks if owners[value] not in recording.inputs)  # those are the caller's
            old = next((value for value in free if last[value] == number), out)
            places[out] = places.get(old, out)
            held[places[out]] = (held.get(places[out], (number, 0))[0], last[out])
    return held


def _owners(recording: Recording) -> tuple[dict[int, int], set[int]]:
    """Of each activation: the value whose memory it is a view of, which may be itself; and the views of all of it."""
    own = recording.own
    owners = {value: value for value in (*recording.inputs, *recording.constants) if value not in own}
    complete = set(owners)
    for op in recording.ops:
        inputs = [value for value in op.inputs() if value in owners]
        for out in op.outs:
            if out is None or out in owners or out in own:
                continue
            view = op.func.is_view or op.name in VIEWS or op.name.endswith("_")  # squeeze_
            looks = inputs and view and recording.dtypes[out] == recording.dtypes[inputs[0]]
            owners[out] = owners[inputs[0]] if looks else out
            sizes = [math.prod(recording.shapes[value]) for value in (out, *inputs[:1])]
            if not looks or (inputs[0] in complete and sizes[0] == sizes[1]):
                complete.add(out)
    return owners, complete


def _worst(found: Sequence[Moment]) -> list[Moment]:
    """Those that no other one exceeds at all widths, each once, in order."""

    def covers(one: Moment, other: Moment) -> bool:
        return all(one.terms.get(spaces, 0) >= factor for spaces, factor in other.terms.items())

    kept: list[Moment] = []
    for moment in found:
        if not any(covers(other, moment) for other in kept):
            kept = [other for other in kept if not covers(moment, other)] + [moment]
    return kept
