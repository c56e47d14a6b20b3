"""Arguments of public functions: each is compared with its annotation, and a wrong one is refused in one sentence."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from dmcp.errors import ArgumentError
from dmcp.runtime.batches import Loader
from dmcp.settings import MAX_SEED

Public = TypeVar("Public", bound=Callable[..., Any])
_NO_LOADERS = (Tensor, np.ndarray, nn.Module, Mapping, str, bytes)  # can be iterated, but give no batches
_LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True)
class Range:
    """The numbers that are allowed, for use in Annotated[int, Range(1)]."""

    low: float
    high: float = math.inf

    def __str__(self) -> str:
        return f"of at least {self.low:g}" if self.high == math.inf else f"from {self.low:g} to {self.high:g}"


PositiveInt = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1)]
Seed = Annotated[int, Range(0, MAX_SEED)]


def checked(public: Public) -> Public:
    """The same function or class, which raises an ArgumentError for an argument that does not fit its annotation.

    Annotations are resolved at the first call, so that importing stays quick. The signature stays visible to `inspect`,
    editors and type checkers. A call costs some microseconds: do not decorate what runs in every step.
    """
    if isinstance(public, type):
        public.__init__ = checked(public.__init__)  # type: ignore[misc]
        return public
    signature = inspect.signature(public)

    @functools.cache
    def annotations() -> dict[str, Any]:
        return typing.get_type_hints(public, include_extras=True)

    @functools.wraps(public)
    def checking(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return public(*args, **kwargs)  # Python says which argument is missing or unknown
        for name, value in arguments.items():
            annotation = annotations().get(name, Any)
            if not _fits(value, annotation):
                function = public.__qualname__.removesuffix(".__init__")
                needed = _expected(annotation)
                raise ArgumentError(f"{function}({name}=...) must be {needed}, not {_described(value)}.")
        return public(*args, **kwargs)

    return cast(Public, checking)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of the annotated type; of elements only strings are looked at."""
    kind = typing.get_origin(annotation) or annotation
    parts = typing.get_args(annotation)
    if kind is Any:
        return True
    if kind is Annotated:
        return _fits(value, parts[0]) and parts[1].low <= value <= parts[1].high
    if kind in (typing.Union, types.UnionType):
        choices = _choices(parts)
        if choices and isinstance(value, str):
            return value in choices
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is int:
        return _is_int(value)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if _is_loader(annotation):
        return isinstance(value, Iterable) and not isinstance(value, _NO_LOADERS)
    if kind is collections.abc.Sequence and isinstance(value, str | bytes | np.ndarray):
        return parts == (int,) and isinstance(value, np.ndarray)
    if kind is collections.abc.Callable and isinstance(value, type):  # a class is a function that makes its instances
        return isinstance(parts[-1], type) and issubclass(value, parts[-1])
    if kind is Path:
        kind = str | os.PathLike
    if not isinstance(value, kind):
        return False
    if parts == (str,) and isinstance(value, Iterable) and not isinstance(value, Iterator):
        return all(isinstance(item, str) for item in value)
    return True


def _is_int(value: Any) -> bool:
    """Whether Python, NumPy or torch takes a value for an int; True and False are none."""
    try:
        operator.index(value)
    except (TypeError, RuntimeError):
        return False
    return not isinstance(value, bool)


def _is_loader(annotation: Any) -> bool:
    return annotation is Loader or annotation == Iterable[Any]


def _choices(parts: Sequence[Any]) -> list[str]:
    """The strings of `Enum | str`."""
    return [str(item) for part in parts if isinstance(part, type) and issubclass(part, StrEnum) for item in part]


# text

_NAMES: dict[Any, str] = {
    type(None): "None",
    bool: "True or False",
    int: "an int",
    float: "a number",
    str: "a string",
    nn.Module: "a torch.nn.Module",
    os.PathLike: "a path",
    Path: "a path",
    collections.abc.Callable: "a function",
    collections.abc.Mapping: "a mapping",
    collections.abc.Sequence: "a list",
}


def _expected(annotation: Any) -> str:
    """What an argument must be, in words."""
    kind = typing.get_origin(annotation) or annotation
    parts = typing.get_args(annotation)
    if kind is Annotated:
        return f"{_expected(parts[0])} {parts[1]}"
    if kind is Literal:
        return _listed([repr(part) for part in parts])
    if kind in (typing.Union, types.UnionType):
        choices = _choices(parts)
        others = [part for part in parts if not choices or not (isinstance(part, type) and issubclass(part, str))]
        return _listed([*map(repr, choices), *map(_expected, others)])
    if _is_loader(annotation):
        return "a loader of batches, such as a torch DataLoader"
    if parts == (str,) and kind is not os.PathLike:
        return "a list of strings"
    return _NAMES.get(kind) or _with_article(kind.__name__)


def _described(value: Any) -> str:
    """What was given, in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = value is None or isinstance(value, bool | int | float | str)
    if plain or (isinstance(value, list | tuple) and all(isinstance(item, int | float | str) for item in value)):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    described = _with_article(type(value).__name__)
    return f"{described}, which gives single samples" if isinstance(value, Dataset) else described


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def _listed(texts: Sequence[str]) -> str:
    """a, b or c"""
    texts = list(dict.fromkeys(texts))
    return f"{', '.join(texts[:-1])} or {texts[-1]}" if len(texts) > 1 else texts[0]
