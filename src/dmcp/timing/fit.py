"""From times of some networks to a polynomial for all of them: least squares without negative numbers.

A network during whose measuring the machine had a hiccup would bend it: such ones are found first, and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dmcp.latency import FS_PER_MS
from dmcp.tracing.cost import Terms, evaluate, total
from dmcp.tracing.work import Key

Array = NDArray[np.float64]
_FOLDS = 5
_ROUNDS = 10  # per unknown, after which the solver has gone round in circles
_TINY = 1e-10
_ANCHOR = 5.0  # how much more the first network counts
_FAR, _SPREADS = 1.5, 5.0  # a hiccup takes so many times its forecast, and is so many usual errors away from it
_SPREAD = 1.4826  # of normal errors, the deviation over the median
_RARE = 5  # at most one network of so many has a hiccup: what happens more often is how the machine is
_CLOSE, _TURNS = 1e-3, 8  # errors that count alike, and rounds, in the search for least absolute errors

# ways to put kinds of work together; the one that forecasts best is taken
_WAYS: tuple[Callable[[Key], object], ...] = (
    lambda key: key,
    lambda key: (key[0], key[1] if key[0] == "macs" else "", key[2]),
    lambda key: key[:2],
    lambda key: key[0],
)


def fit(
    work: Mapping[Key, Terms], widths: Sequence[Sequence[int]], ms: Sequence[float], left_out: Sequence[bool] = ()
) -> Terms:
    """Femtoseconds as a polynomial in the widths: a constant, and so much for each unit of each kind of work.

    Errors count relative to the time, and more for the first network, the unpruned one, of which budgets are shares.
    Few networks cannot tell many kinds apart: they are divided as finely as forecasts best those networks that were
    left out in turn. left_out: networks that do not count; the first does.
    """
    groupings = _groupings(work)
    kept = [number for number in range(len(ms)) if not any(left_out[number : number + 1])]
    times = np.array([ms[number] for number in kept], dtype=np.float64)
    tables = [_table(parts, [widths[number] for number in kept]) for parts in groupings]
    errors = [_cross_error(table, times) for table in tables]
    best = min(range(len(tables)), key=lambda number: (errors[number], len(groupings[number])))
    prices = _prices(tables[best], times, _weights(times))
    return _priced(groupings[best], prices)


def hiccups(work: Mapping[Key, Terms], widths: Sequence[Sequence[int]], ms: Sequence[float]) -> list[bool]:
    """Which networks took far longer than the others say of them: something else had the machine meanwhile.

    Nothing makes a network faster than it is, so one that is far below its forecast really was so fast. Forecasts are
    those of least absolute errors, which few far ones do not bend, by the way of putting work together that does best.
    """
    times = np.array(ms, dtype=np.float64)
    errors = [_left_out_errors(_table(parts, widths), times) for parts in _groupings(work)]
    best = min(errors, key=lambda it: float(np.median(np.abs(it))))
    bound = max(np.log(_FAR), _SPREADS * _SPREAD * float(np.median(np.abs(best))))
    found: list[bool] = (best > bound).tolist()
    return found if _RARE * sum(found) <= len(found) else [False] * len(found)


def forecast_ms(terms: Terms, widths: Sequence[int]) -> float:
    """What the polynomial says."""
    return evaluate(terms, widths) / FS_PER_MS


def _groupings(work: Mapping[Key, Terms]) -> list[list[Terms]]:
    """The constant 1 and the sums of each group, once for each way that differs from those before it."""
    found: list[list[Terms]] = []
    for way in _WAYS:
        groups: dict[object, list[Terms]] = {}
        for key, terms in work.items():
            groups.setdefault(way(key), []).append(terms)
        parts: list[Terms] = [{(): 1}, *(total(some) for some in groups.values())]
        if parts not in found:
            found.append(parts)
    return found


def _table(parts: Sequence[Terms], widths: Sequence[Sequence[int]]) -> Array:
    """How much of each there is in each network. -> (N, P)"""
    return np.array([[float(evaluate(part, row)) for part in parts] for row in widths])


def _weights(times: Array) -> Array:
    """How much an error of a millisecond counts. (N,) -> (N,)"""
    weights: Array = 1 / times
    weights[0] *= _ANCHOR
    return weights


def _prices(table: Array, times: Array, weights: Array) -> Array:
    """Milliseconds for a unit of each. (N, P), (N,), (N,) -> (P,)"""
    return solve(table * weights[:, None], times * weights)


def _cross_error(table: Array, times: Array) -> float:
    """Median of the relative errors of networks that a fit has not seen, each left out once."""
    found: list[float] = []
    for fold in range(min(_FOLDS, len(times))):
        out = np.arange(len(times)) % _FOLDS == fold
        prices = _prices(table[~out], times[~out], _weights(times)[~out])
        found += (np.abs(table[out] @ prices - times[out]) / times[out]).tolist()
    return median(found)


def _left_out_errors(table: Array, times: Array) -> Array:
    """Logarithm of time / forecast of networks that a fit has not seen, each left out once. (N, P), (N,) -> (N,)"""
    found = np.zeros(len(times))
    for fold in range(min(_FOLDS, len(times))):
        out = np.arange(len(times)) % _FOLDS == fold
        forecasts = table[out] @ _least_absolute(table[~out], times[~out])
        found[out] = np.log(times[out] / np.maximum(forecasts, _TINY * times[out]))
    return found


def _least_absolute(table: Array, times: Array) -> Array:
    """Prices with the least sum of relative errors, not of their squares, by weights that shrink with the error."""
    weights = 1 / times
    for _ in range(_TURNS):
        prices = _prices(table, times, weights)
        errors = np.abs(table @ prices / times - 1)
        weights = 1 / (times * np.sqrt(np.maximum(errors, _CLOSE)))
    return prices


def _priced(parts: Sequence[Terms], prices: Array) -> Terms:
    """Rounded where it is summed up: a single product may take less than a femtosecond."""
    summed: dict[tuple[int, ...], Fraction] = {}
    for part, price in zip(parts, prices.tolist(), strict=True):
        for spaces, factor in part.items():
            summed[spaces] = summed.get(spaces, Fraction(0)) + factor * Fraction(price) * FS_PER_MS
    return {spaces: round(value) for spaces, value in summed.items() if round(value)} or {(): 0}


def solve(table: Array, wanted: Array) -> Array:
    """Non-negative least squares by active sets (Lawson and Hanson, 1974). (N, P), (N,) -> (P,)"""
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    columns = table / scale
    count = columns.shape[1]
    found, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(_ROUNDS * count):
        slope = columns.T @ (wanted - columns @ found)
        slope[free] = -np.inf
        if free.all() or slope.max() <= _TINY:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
            below = free & (trial <= _TINY)
            if not below.any():
                break
            steps = found[below] / np.maximum(found[below] - trial[below], _TINY)
            found = found + min(1.0, float(steps.min())) * (trial - found)
            free &= ~(below & (found <= _TINY))
            free &= found > _TINY
            found[~free] = 0.0
        found = trial
    result: Array = found / scale
    return result
