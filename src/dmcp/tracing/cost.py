"""MACs, parameters, memory and traffic as polynomials in the widths."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from dmcp.tracing.coupling import Coupling, Flow
from dmcp.tracing.layout import Layout, monomials
from dmcp.tracing.record import Op, Recording

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
    """The polynomial coefficient x size of dim x size of dim ..."""
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


class Step(NamedTuple):
    """A function of a width that jumps at multiples of a block, as the time of kernels does that take whole blocks."""

    block: int
    padded: bool  # the width rounded up to whole blocks; else the width if it is no multiple of the block, and 0 if so

    @overload
    def __call__(self, width: int) -> int: ...
    @overload
    def __call__(self, width: Tensor) -> Tensor: ...
    def __call__(self, width: Any) -> Any:
        """Exact for integers; for floats the gradient is that of the width, wherever it counts."""
        if self == WIDTH:
            return width
        if not self.padded:
            return width * (width % self.block != 0)
        missing = -width % self.block
        if isinstance(missing, Tensor):
            missing = missing.detach()
        return width + missing


WIDTH = Step(1, padded=True)  # the width itself
Product = tuple[Step, ...]  # a function of one width: the product of its steps


def variables(widths: Sequence[int], steps: Sequence[Step]) -> list[int]:
    """The widths, and then what each step makes of them."""
    return [step(width) for step in (WIDTH, *steps) for width in widths]


class Polynomial:
    """A polynomial as tensors: many widths in one expression.

    Each term is a coefficient times powers of different spaces. Tensors are made at the first call for a device and a
    dtype; `expected` then neither copies from the host nor waits for the device, and a CUDA graph can capture it.

    steps: functions of the widths that terms may have as well: `spaces` * k + s is function k of the width of space s,
        where function 0 is the width itself.
    """

    def __init__(
        self,
        terms: Terms,
        spaces: int,
        factors: Sequence[Sequence[int]] = (),
        steps: Sequence[Step] = (),
    ) -> None:
        self.terms = terms
        self.spaces = spaces
        self.steps = tuple(steps)
        self._factors = factors  # of a peak: of each term, in each of its polynomials

        # What a term has of one space is one function of its width: the product of some steps, such as w * w.
        functions_by_term: list[dict[int, Product]] = []
        for key in terms:
            functions: dict[int, Product] = {}
            for variable in sorted(key):
                number, space = divmod(variable, spaces)
                functions[space] = (*functions.get(space, ()), (WIDTH, *steps)[number])
            functions_by_term.append(functions)
        used = {function: None for functions in functions_by_term for function in functions.values()}
        self._functions = list(used) or [(WIDTH,)]
        self._most_spaces = max(map(len, functions_by_term), default=0)

        # A term is the product of some rows of a table: each function of all widths, and a row of ones that fills up
        # terms of fewer spaces.
        row_of_ones = len(self._functions) * spaces
        self._rows: list[list[int]] = []
        for functions in functions_by_term:
            rows = [space + self._functions.index(function) * spaces for space, function in functions.items()]
            rows += [row_of_ones] * (self._most_spaces - len(rows))
            self._rows.append(rows)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, widths: Tensor) -> Tensor:
        """Exact for integers, differentiable for floats. (N, S) -> (N,)"""
        widths = widths.T if widths.is_floating_point() else widths.T.long()
        chunk_size = max(1, _CHUNK // max(1, len(self.terms)))
        values: list[Tensor] = []
        for chunk in torch.split(widths, chunk_size, dim=1):
            values.append(self._sum([_multiply(function, chunk) for function in self._functions]))
        return torch.cat(values)

    def evaluate(self, widths: Sequence[int]) -> int:
        """The exact value at some widths."""
        return evaluate(self.terms, variables(widths, self.steps))

    def expected(self, mean_of: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
        """Expectation if the widths of spaces are independent (eqs. 9 to 12); mean_of(f) gives E[f(w)]. -> ()"""
        means = [mean_of(functools.partial(_multiply, function))[:, None] for function in self._functions]
        return self._sum(means).reshape(())

    def _sum(self, functions: Sequence[Tensor]) -> Tensor:
        """The value from the functions of the widths, such as their squares. (S, N) each -> (N,)"""
        return self._products(functions).sum(dim=0)

    def _products(self, functions: Sequence[Tensor]) -> Tensor:
        """The value of each term. (S, N) each -> (T, N)"""
        first = functions[0]
        values = torch.cat([*functions, first.new_ones(1, first.shape[1])])
        products, columns, _ = self._table(values)
        for column in columns:
            products = products * values[column]  # not index_select: its gradient adds in any order on a GPU
        return products.expand(-1, first.shape[1])

    def _table(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients, the rows to take for each factor of the terms, factors of a peak. -> (T, 1), (D, T), (M, T)"""
        key = like.device, like.dtype
        if key not in self._tables:
            with torch.inference_mode(False):  # what is made in inference mode could not be used in training later

                def on_device(numbers: Sequence[Any]) -> Tensor:
                    return torch.tensor(numbers, dtype=torch.int64, device=like.device)

                coefficients = on_device(list(self.terms.values())).to(like.dtype)[:, None]
                columns = on_device(self._rows).reshape(len(self._rows), self._most_spaces).T.contiguous()
                factors = on_device(self._factors).to(like.dtype)
                self._tables[key] = coefficients, columns, factors
        return self._tables[key]


def _multiply(function: Product, widths: Tensor) -> Tensor:
    """Products, not pow, which is exact for few numbers only. (S, N) -> (S, N)"""
    return functools.reduce(torch.mul, [step(widths) for step in function])


_ELEMENTWISE = {"batch_norm", "prelu", "_prelu_kernel", "where", "masked_fill"}  # besides those with a pointwise rule


# memory


@dataclass(frozen=True)
class Moment:
    """A moment at which one op runs, and the bytes of all activations that are held then."""

    name: str  # of the layer
    terms: Terms


class Peak(Polynomial):
    """The maximum of several polynomials over the same products of widths. Like each of them, it grows with each width.

    As its expectation we take the maximum of their expectations, which is a lower bound of the expected maximum.
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

    def _sum(self, functions: Sequence[Tensor]) -> Tensor:
        products = self._products(functions)  # (T, N)
        factors = self._table(products)[2]
        if products.device.type == "cpu":
            return (factors @ products).amax(dim=0)
        return (factors[:, :, None] * products).sum(dim=1).amax(dim=0)  # no matmul: a GPU's would round, or has no ints


def moments(coupling: Coupling, numbers: Mapping[int, int], batch: int | None) -> tuple[Moment, ...]:
    """The moments of the pass in eval mode that can be the worst ones at some widths, for one sample.

    Memory is held by the inputs, by what an op is writing, and by what is still to be read. An elementwise op
    overwrites an input that nobody reads after it, as runtimes do, so norms and activation functions take no memory of
    their own. Not counted is what is computed from weights alone, and the scratch memory of an op.
    """
    evaluated = coupling.passes[0]
    recording = evaluated.recording
    samples = batch or 1

    def bytes_of(value: int) -> Terms:
        terms = product(recording.dtypes[value].itemsize, coupling.in_spaces(evaluated.layouts[value], numbers))
        return {spaces: -(-factor // samples) for spaces, factor in terms.items()}

    holders = _holders(recording, evaluated.flows)
    held = [(born, dies, bytes_of(value)) for value, (born, dies) in holders.items()]
    candidates: list[Moment] = []
    for number, op in enumerate(recording.ops):
        moment = Moment(op.path, total(terms for born, dies, terms in held if born <= number <= dies))
        if moment.terms:
            candidates.append(moment)
    return tuple(_worst(candidates))


def _holders(recording: Recording, flows: Sequence[Flow]) -> dict[int, tuple[int, int]]:
    """First and last op during which memory is held, by the value that it was allocated for."""
    owners, complete = _owners(recording)
    last_use = _last_uses(recording, owners)

    # Inputs are held from the start, constants from where they are first seen.
    memory: dict[int, int] = {}  # value -> the value whose memory it lies in
    held: dict[int, tuple[int, int]] = {}
    for value in recording.inputs:
        if value in owners:
            memory[value] = value
            held[value] = (0, last_use.get(value, 0))
    for value, since in recording.constants.items():
        if value in last_use:  # what is computed from weights alone has no use here
            memory[value] = value
            held[value] = (since.ops, last_use[value])

    def can_hold(old: int, new: int) -> bool:
        same = (recording.shapes[old], recording.dtypes[old]) == (recording.shapes[new], recording.dtypes[new])
        return old in complete and same and owners[old] not in recording.inputs  # inputs belong to the caller

    for number, op in enumerate(recording.ops):
        is_elementwise = op.name in _ELEMENTWISE or flows[number] is Flow.POINTWISE
        for out in op.outs:
            is_new = out is not None and out not in memory and owners.get(out) == out
            if not is_new or out not in last_use:
                continue
            memory[out] = out
            if is_elementwise:
                for value in op.inputs():
                    if can_hold(value, out) and last_use[owners[value]] == number:
                        memory[out] = memory.get(owners[value], out)
                        break
            born, _ = held.get(memory[out], (number, number))
            held[memory[out]] = (born, last_use[out])
    return held


def _last_uses(recording: Recording, owners: Mapping[int, int]) -> dict[int, int]:
    """The last op that reads or writes the memory of each owner; outputs are used after the last op."""
    last_use: dict[int, int] = {}
    for number, op in enumerate(recording.ops):
        for value in (*op.inputs(), *op.outs[:1]):
            if value is not None and value in owners:
                last_use[owners[value]] = number
    for value in recording.outputs:
        if value in owners:
            last_use[owners[value]] = len(recording.ops)
    return last_use


def _owners(recording: Recording) -> tuple[dict[int, int], set[int]]:
    """The value in whose memory each activation lies (often itself), and the activations that fill that memory."""
    from_weights = recording.from_weights
    owners: dict[int, int] = {}
    for value in (*recording.inputs, *recording.constants):
        if value not in from_weights:
            owners[value] = value
    complete = set(owners)
    for op in recording.ops:
        inputs = [value for value in op.inputs() if value in owners]
        has_memory_of_input = is_free(op, recording) or op.name.endswith("_")
        for out in op.outs:
            if out is None or out in owners or out in from_weights:
                continue
            if not inputs or not has_memory_of_input:
                owners[out] = out
                complete.add(out)
                continue
            source = inputs[0]
            owners[out] = owners[source]
            if source in complete and math.prod(recording.shapes[out]) == math.prod(recording.shapes[source]):
                complete.add(out)
    return owners, complete


def _worst(candidates: Sequence[Moment]) -> list[Moment]:
    """The moments that no other one exceeds at all widths, each once, in order."""

    def covers(larger: Moment, smaller: Moment) -> bool:
        return all(larger.terms.get(spaces, 0) >= factor for spaces, factor in smaller.terms.items())

    kept: list[Moment] = []
    for moment in candidates:
        if any(covers(rival, moment) for rival in kept):
            continue
        kept = [rival for rival in kept if not covers(moment, rival)]
        kept.append(moment)
    return kept


# traffic


def traffic(coupling: Coupling, numbers: Mapping[int, int], shares: Mapping[int, Fraction]) -> Terms:
    """The bytes that all ops of the pass in eval mode read and write, for one sample.

    Every op reads each tensor that it takes once, and writes each tensor that it gives once; an op in place does both.
    Weights, biases and the vectors of a BatchNorm are tensors like any other: they are read once for one sample, as at
    batch 1. A tensor has the bytes of its shape and dtype: 4 for a number in float32. Views are free, and so are
    reshape, contiguous, clone, and dropout, which gives back its input in eval mode. Ops are those that PyTorch
    records. Fusion by a compiler is not modelled: a compiled network reads and writes less.

    shares: the part of each value's numbers that one sample has; see `trace`.
    """
    evaluated = coupling.passes[0]
    recording = evaluated.recording
    numbers_to_fill = _numbers_to_fill(recording)
    uses: Counter[int] = Counter()  # value -> how often it is read or written
    for op in recording.ops:
        if is_free(op, recording) or numbers_to_fill.intersection(op.outs):
            continue
        uses.update(set(op.inputs()) - numbers_to_fill)
        uses.update(out for out in op.outs if out is not None)

    parts: list[Terms] = []
    for value, count in uses.items():
        dims = coupling.in_spaces(evaluated.layouts[value], numbers)
        terms = product(count * recording.dtypes[value].itemsize, dims)
        parts.append({spaces: math.ceil(factor * shares[value]) for spaces, factor in terms.items()})
    return total(parts)


def _numbers_to_fill(recording: Recording) -> set[int]:
    """The numbers of `x[...] = number`. On meta tensors, PyTorch makes a tensor of the number and copies it."""
    written_out = {op.outs[0] for op in recording.ops if op.name == "new_full"}
    for op in recording.ops:
        if op.name != "copy_":
            written_out.difference_update(op.inputs())
    return {value for value in written_out if value is not None}


def is_free(op: Op, recording: Recording) -> bool:
    """Whether an op moves no numbers: it is a view, or gives back its input as it was, as dropout does in eval mode."""
    if torch.Tag.inplace_view in op.func.tags:  # squeeze_
        return True
    inputs = op.inputs()
    if not inputs or None in op.outs or not op.outs:
        return False
    if op.func._schema.is_mutable:
        return op.arguments().get("train") is False  # dropout_
    if all(out in inputs for out in op.outs):
        return True
    dtypes = {recording.dtypes[out] for out in op.outs if out is not None}
    return op.func.is_view and dtypes == {recording.dtypes[inputs[0]]}  # not `to` with another dtype
