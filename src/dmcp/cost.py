"""What widths cost: multiply-adds and parameters as polynomials in the widths of the spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmcp.layouts import Layout, monomials

_CHUNK = 1 << 22  # numbers that one intermediate tensor may hold

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
    """A polynomial as tensors: many widths in one expression."""

    def __init__(self, terms: Terms, spaces: int) -> None:
        self.terms = terms
        self.spaces = spaces
        degree = max((len(key) for key in terms), default=0)
        ones = spaces  # the column after the widths
        rows = [list(key) + [ones] * (degree - len(key)) for key in terms]
        self.index = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), degree)  # (T, D)
        self.coefficients = torch.tensor(list(terms.values()), dtype=torch.int64)  # (T,)

    def __call__(self, widths: Tensor) -> Tensor:
        """Exact for integers, differentiable for floats. (N, S) -> (N,)"""
        widths = widths if widths.is_floating_point() else widths.to(torch.int64)
        coefficients = self.coefficients.to(widths)
        extended = torch.cat([widths, torch.ones_like(widths[:, :1])], dim=1)
        index = self.index.to(widths.device)
        rows = max(1, _CHUNK // max(1, len(coefficients)))
        return torch.cat([(_products(part, index) * coefficients).sum(1) for part in torch.split(extended, rows)])

    def expected(self, moment: Callable[[int], Tensor]) -> Tensor:
        """Expectation if the widths of spaces are independent (eqs. 9 to 12); moment(p) gives E[w ** p]. -> ()"""
        powers: dict[int, Tensor] = {1: moment(1)}
        groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for key, factor in self.terms.items():
            unique = tuple(dict.fromkeys(key))
            groups.setdefault(tuple(key.count(space) for space in unique), []).append((unique, factor))
        parts: list[Tensor] = [powers[1].new_zeros(())]
        for exponents, members in groups.items():
            value = powers[1].new_tensor([factor for _, factor in members])
            for position, power in enumerate(exponents):
                powers.setdefault(power, moment(power))
                value = value * powers[power][[unique[position] for unique, _ in members]]
            parts.append(value.sum())
        return torch.stack(parts).sum()


def _products(widths: Tensor, index: Tensor) -> Tensor:
    """Product of the columns named in each row of the index. (N, S+1), (T, D) -> (N, T)"""
    value = torch.ones_like(widths[:, :1]).expand(-1, len(index))
    for column in index.unbind(1):
        value = value * widths[:, column]
    return value
