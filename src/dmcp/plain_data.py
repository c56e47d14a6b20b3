"""Dataclasses from plain data, as JSON has it: every value must be what its field says."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from typing import Any, TypeVar

_MOST_INT = 2**63
_T = TypeVar("_T")


def from_plain(kind: type[_T], data: Any) -> _T:
    """A dataclass that was written as JSON; TypeError or ValueError for what is not as its fields say."""
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} is not a table")
    hints, values = _hints(typing.cast(Any, kind)), {}
    for name, value in data.items():
        try:
            values[name] = _as(value, hints[name])
        except (KeyError, TypeError) as error:
            raise TypeError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _as(value: Any, hint: Any) -> Any:
    """A JSON value as the annotation of a field wants it; ints are those that torch can hold."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _as_one_of(value, inner)
    if origin is tuple and isinstance(value, list):
        return tuple(_as(item, inner[0]) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _as(item, inner[1]) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return from_plain(hint, value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if type(value) is int:
        fits = hint is Any or (hint in (int, float) and abs(value) < _MOST_INT)
    else:
        fits = hint is Any or type(value) is hint
    if not fits:
        raise TypeError(f"{value!r} is not of its kind")
    return value


def _as_one_of(value: Any, hints: Iterable[Any]) -> Any:
    errors = []
    for hint in hints:
        try:
            return _as(value, hint)
        except (TypeError, ValueError) as error:
            errors.append(error)
    raise errors[0]
