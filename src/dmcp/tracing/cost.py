"""What widths cost: multiply-adds and parameters as polynomials in the widths of the spaces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmcp.tracing.layouts import Layout, monomials

_CHUNK = 1 << 16  # numbers in one intermediate tensor: few enough for a CPU's cache
_EXACT = 1 << 53  # float64 holds every integer up to here

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

    def __init__(self, terms: Terms, spaces: int) -> None:
        self.terms = terms
        self.spaces = spaces
        factors = [[(space, key.count(space)) for space in dict.fromkeys(key)] for key in terms]
        self._powers = max((power for row in factors for _, power in row), default=1)
        self._degree = max(map(len, factors), default=0)
        ones = self._powers * spaces  # the row behind the widths, their squares, ...
        self._rows = [
            [space + (power - 1) * spaces for space, power in row] + [ones] * (self._degree - len(row))
            for row in factors
        ]
        self._weights: dict[int, int] = {}  # degree -> sum of the coefficients' sizes
        for key, factor in terms.items():
            self._weights[len(key)] = self._weights.get(len(key), 0) + abs(factor)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def __call__(self, widths: Tensor) -> Tensor:
        """Exact for integers, differentiable for floats. (N, S) -> (N,)"""
        floats, widths = widths.is_floating_point(), widths.T
        dtype = widths.dtype if floats else self._counting(widths)
        found: list[Tensor] = []
        for chunk in torch.split(widths, max(1, _CHUNK // max(1, len(self.terms))), dim=1):
            part = chunk.to(dtype)
            # products, not pow: that is exact for few numbers only
            found.append(self._sum(list(itertools.accumulate([part] * self._powers, torch.mul))))
        return torch.cat(found) if floats else torch.cat(found).to(torch.int64)

    def evaluate(self, widths: Sequence[int]) -> int:
        """The exact value at some widths."""
        return evaluate(self.terms, widths)

    def expected(self, moment: Callable[[int], Tensor]) -> Tensor:
        """Expectation if the widths of spaces are independent (eqs. 9 to 12); moment(p) gives E[w ** p]. -> ()"""
        return self._sum([moment(power)[:, None] for power in range(1, self._powers + 1)]).reshape(())

    def _counting(self, widths: Tensor) -> torch.dtype:
        """The dtype in which integer widths are counted exactly: on a CPU float64 is faster, where it is exact."""
        if widths.device.type != "cpu" or not widths.numel():
            return torch.int64
        most = max(widths.max().item(), -widths.min().item())
        bound = sum(weight * most**degree for degree, weight in self._weights.items())
        return torch.float64 if bound <= _EXACT else torch.int64

    def _sum(self, powers: Sequence[Tensor]) -> Tensor:
        """The value from the widths, their squares, ... (S, N) each -> (N,)"""
        return self._products(powers).sum(dim=0)

    def _products(self, powers: Sequence[Tensor]) -> Tensor:
        """The value of each term. (S, N) each -> (T, N)"""
        first = powers[0]
        values = torch.cat([*powers, first.new_ones(1, first.shape[1])])
        products, *columns = self._table(values.device, values.dtype)
        for column in columns:
            products = products * values[column]  # not index_select: its gradient adds in any order on a GPU
        return products.expand(-1, first.shape[1])

    def _table(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Coefficients and, for each factor of the terms, the rows to take. -> (T, 1), D times (T,)"""
        table = self._tables.get((device, dtype))
        if table is None:
            with torch.inference_mode(False):  # what is made in inference mode could not be used in training later
                coefficients = torch.tensor(list(self.terms.values()), dtype=torch.int64, device=device).to(dtype)
                index = torch.tensor(self._rows, dtype=torch.int64, device=device)
                columns = index.reshape(len(self._rows), self._degree).T.contiguous()
                table = (coefficients[:, None], *columns.unbind(0))
            self._tables[device, dtype] = table
        return table
