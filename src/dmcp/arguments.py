"""Checks the arguments of public functions against their annotations, and refuses wrong ones in one sentence."""

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
_NO_LOADERS = (Tensor, np.ndarray, nn.Module, Mapping, str, bytes)  # can be iterated, but not over batches
_LONGEST = 60  # characters of a value that a message shows


@dataclass(frozen=True)
class Range:
    """The allowed numbers, for use in Annotated[int, Range(1)]."""

    low: float
    high: float = math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"of at least {self.low:g}"
        return f"from {self.low:g} to {self.high:g}"


PositiveInt = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1)]
Seed = Annotated[int, Range(0, MAX_SEED)]


def checked(public: Public) -> Public:
    """Decorates a function or class: an argument that does not fit its annotation raises an ArgumentError.

    Annotations are resolved at the first call, so that imports stay fast. The signature stays visible to `inspect`,
    editors and type checkers. A call takes some microseconds more: do not decorate what runs in every step.
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
            return public(*args, **kwargs)  # raises: Python says which argument is missing or unknown
        for name, value in arguments.items():
            annotation = annotations().get(name, Any)
            if not _fits(value, annotation):
                function = public.__qualname__.removesuffix(".__init__")
                needed = _expected(annotation)
                raise ArgumentError(f"{function}({name}=...) must be {needed}, not {_described(value)}.")
        return public(*args, **kwargs)

    return cast(Public, checking)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value has the annotated type. Elements are checked only where they must be strings."""
    kind = typing.get_origin(annotation) or annotation
    parts = typing.get_args(annotation)
    if kind is Any:
        return True
    if kind is Annotated:
        return _fits(value, parts[0]) and parts[1].low <= value <= parts[1].high
    if kind in (typing.Union, types.UnionType):
        names = _enum_names(parts)
        if names and isinstance(value, str):
            return value in names
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is int:
        return _is_int(value)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if _is_loader(annotation):
        return isinstance(value, Iterable) and not isinstance(value, _NO_LOADERS)
    if kind is collections.abc.Sequence and isinstance(value, str | bytes):
        return False
    if kind is collections.abc.Sequence and isinstance(value, np.ndarray):
        return parts == (int,)
    if kind is collections.abc.Callable and isinstance(value, type):
        returned = parts[-1]  # a class is a function that returns its instances
        return isinstance(returned, type) and issubclass(value, returned)
    if kind is Path:
        kind = str | os.PathLike
    if not isinstance(value, kind):
        return False
    if parts == (str,) and isinstance(value, Iterable) and not isinstance(value, Iterator):
        return all(isinstance(item, str) for item in value)
    return True


def _is_int(value: Any) -> bool:
    """Whether a value is an int for Python, NumPy or torch; True and False are not."""
    try:
        operator.index(value)
    except (TypeError, RuntimeError):
        return False
    return not isinstance(value, bool)


def _is_loader(annotation: Any) -> bool:
    return annotation is Loader or annotation == Iterable[Any]


def _enum_names(parts: Sequence[Any]) -> list[str]:
    """The allowed strings of `Enum | str`."""
    names: list[str] = []
    for part in parts:
        if isinstance(part, type) and issubclass(part, StrEnum):
            names += [str(member) for member in part]
    return names


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
    """The annotation in words: what an argument must be."""
    kind = typing.get_origin(annotation) or annotation
    parts = typing.get_args(annotation)
    if kind is Annotated:
        return f"{_expected(parts[0])} {parts[1]}"
    if kind is Literal:
        return _listed([repr(part) for part in parts])
    if kind in (typing.Union, types.UnionType):
        names = _enum_names(parts)
        if names:  # they stand for the strings
            parts = tuple(part for part in parts if not (isinstance(part, type) and issubclass(part, str)))
        return _listed([*map(repr, names), *map(_expected, parts)])
    if _is_loader(annotation):
        return "a loader of batches, such as a torch DataLoader"
    if parts == (str,) and kind is not os.PathLike:
        return "a list of strings"
    return _NAMES.get(kind) or _with_article(kind.__name__)


def _described(value: Any) -> str:
    """A value in words: itself if it is short and plain, or else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if _is_plain(value):
        text = repr(value)
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}..."
        return text
    kind = _with_article(type(value).__name__)
    if isinstance(value, Dataset):
        return f"{kind}, which gives single samples"
    return kind


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or None, or a list of numbers and strings."""
    if isinstance(value, list | tuple):
        return all(isinstance(item, int | float | str) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _with_article(noun: str) -> str:
    article = "a"
    if noun[0] in "AEIOUaeiou":
        article = "an"
    return f"{article} {noun}"


def _listed(texts: Sequence[str]) -> str:
    """The texts as in "a, b or c", each once."""
    *first, last = dict.fromkeys(texts)
    if not first:
        return last
    return f"{', '.join(first)} or {last}"
