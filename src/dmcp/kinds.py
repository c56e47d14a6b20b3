"""Arguments of another kind than a function takes, refused in one sentence before anything is done with them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from dmcp.errors import DmcpError, FileError, TraceError, TrainingError

_WAYS = {
    "Latency": ", which dmcp.measure_latency(model, example) gives",
    "ChannelGraph": ", which dmcp.trace(model, example) gives",
    "SearchResult": ", which dmcp.search(net, loader, config) gives",
}


def check_kind(name: str, value: object, kind: type, error: type[DmcpError]) -> None:
    """Refuse what is no such object of ours; `name` is the argument's."""
    if not isinstance(value, kind):
        way = _WAYS.get(kind.__name__, "")
        raise error(f"{name} must be a dmcp.{kind.__name__}{way}, not a {type(value).__name__}.")


def check_kinds(given: Mapping[str, tuple[object, type]]) -> None:
    """Refuse settings that are none, which would be found out as late as they are read; None is left out."""
    for name, (value, kind) in given.items():
        if value is not None:
            check_kind(name, value, kind, TrainingError)


def check_module(model: object) -> None:
    """Refuse what is no network."""
    if isinstance(model, type):
        name = model.__name__
        raise TraceError(f"A torch.nn.Module is needed, not the class {name}: build one, {name}(...).")
    if not isinstance(model, nn.Module):
        raise TraceError(f"A torch.nn.Module is needed, not {type(model).__name__}.")


def check_function(name: str, value: object, like: str = "see docs/api.md") -> None:
    """Refuse what cannot be called; None is for arguments that may be left out."""
    if value is not None and not callable(value):
        raise TrainingError(f"{name} must be a function, not a {type(value).__name__}: {like}.")


def check_functions(given: Mapping[str, object]) -> None:
    """Refuse what cannot be called, of several arguments."""
    for name, value in given.items():
        check_function(name, value)


def check_generator(value: object, error: type[DmcpError]) -> None:
    """Refuse a seed in the place of a generator, and the like; None is for arguments that may be left out."""
    if value is not None and not isinstance(value, torch.Generator):
        raise error(f"generator must be a torch.Generator, not {value!r}: torch.Generator().manual_seed(0).")


def path_of(who: str, path: object, what: str = "file") -> Path:
    """The path of a file or a folder; what is none is refused."""
    if not isinstance(path, str | os.PathLike):
        raise FileError(f"{who} needs the path of a {what}, not {path!r}.")
    return Path(path)
