"""Read the weights of a file, which may be for other classes."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmcp.errors import FileError, WidthsError
from dmcp.runtime.io import check_inflated, zip_sizes
from dmcp.units import show_shape

_LISTED = 5  # keys of a file that a message lists


def load_weights(model: nn.Module, path: Path, notes: list[str], classes: int | None = None) -> bool:
    """Load the weights of a file into the model; nothing is unpickled but tensors and plain containers.

    With `classes`, the weights of a last layer for another number of classes are left out: the model keeps its own, a
    note says so, and the function returns True. All other weights must fit.
    """
    expected = model.state_dict()
    stored = _unwrapped(_read_tensors(path, notes), expected)

    # Weights that only one of the two has, or that have another shape.
    one_sided = []
    other_shape = []
    for name in {**expected, **stored}:
        if name in expected and name in stored:
            if stored[name].shape != expected[name].shape:
                other_shape.append(name)
        elif not name.endswith("num_batches_tracked"):  # files of old versions have none
            one_sided.append(name)

    # A single layer may differ, and only in the number of classes.
    layers = {name.rpartition(".")[0] for name in other_shape}
    only_classes_differ = all(expected[name].shape == (classes, *stored[name].shape[1:]) for name in other_shape)
    if one_sided or len(layers) > 1 or not only_classes_differ:
        name = (other_shape or one_sided)[0]
        in_file = _describe_shape(stored, name)
        in_model = _describe_shape(expected, name)
        message = (
            f"{path}: the weights belong to another network: {name} is {in_file} in the file, {in_model} in the model."
        )
        if name not in stored:
            message += f" The file has {', '.join(list(stored)[:_LISTED])}."
        raise WidthsError(message)

    for name, tensor in stored.items():
        if tensor.isnan().any():  # infinities may be a mask
            raise FileError(f"{path}: {name} has values that are NaN: the training of this file diverged.")

    fitting = {name: tensor for name, tensor in stored.items() if name not in other_shape}
    model.load_state_dict(fitting, strict=False)
    for layer in layers:
        stored_classes = len(stored[other_shape[0]])
        notes.append(
            f"{layer} is for {stored_classes} classes, but the data have {classes}: it gets new random weights."
        )
    return bool(other_shape)


def _describe_shape(tensors: Mapping[str, Tensor], name: str) -> str:
    if name not in tensors:
        return "missing"
    return show_shape(tensors[name].shape)


def _read_tensors(path: Path, notes: list[str]) -> dict[str, Tensor]:
    """Return the table of weights in a file."""
    try:
        check_inflated(path, *zip_sizes(path))
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings(action="ignore"):  # torch warns of TorchScript files, which are refused
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileError:
        raise
    except (PermissionError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be read: {reason}.") from error
    except Exception as error:  # torch raises many kinds for a file that is cut off, or holds more than weights
        problem = "not a plain state dict, as torch.save(model.state_dict(), ...) writes it"
        if not zipfile.is_zipfile(path):
            problem = f"broken, cut off or {problem}"
        raise FileError(f"{path}: {problem}.") from error
    return _find_table(content, path, notes)


def _unwrapped(stored: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a table that has names of the network, without the prefix that a wrapper put before them.

    Wrappers are DDP, torch.compile, AveragedModel or a Lightning module; one may be inside another. A table in which no
    part, or more than one, has names of the network is returned as it is.
    """
    tables = [stored]
    while tables:
        with_names = [table for table in tables if not expected.keys().isdisjoint(table)]
        if len(with_names) == 1:
            return with_names[0]
        if with_names:
            break
        tables = [part for table in tables for part in _parts(table)]
    return stored


def _parts(table: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split a table by what stands before the first dot of its names, and leave that out."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in table.items():
        prefix, dot, rest = name.partition(".")
        if dot:
            parts.setdefault(prefix, {})[rest] = tensor
    return list(parts.values())


def _find_table(content: Any, path: Path, notes: list[str]) -> dict[str, Tensor]:
    """Return the table of weights in the content of a file: all of it, a table under a usual key, or its only table."""
    entries: Mapping[Any, Any] = {}
    if isinstance(content, Mapping):
        entries = content
    tables = [key for key, value in entries.items() if _is_table(value)]
    keys = ["state_dict", "model_state_dict", "model"]
    if len(tables) == 1:
        keys += tables

    # One key may be inside another: {"model": {"state_dict": ...}} is searched from the outside.
    table = content
    for key in keys:
        if isinstance(table, Mapping) and isinstance(table.get(key), Mapping):
            table = table[key]
            if len(tables) > 1:
                notes.append(f"{path} holds {', '.join(map(str, tables))}: {key} is used.")
    if not _is_table(table):
        listed = ", ".join(map(str, list(entries)[:_LISTED])) or type(table).__name__
        raise FileError(f"{path}: has no state dict, or several under unknown keys. It has {listed}.")
    return dict(table)


def _is_table(value: Any) -> bool:
    """Whether a value maps names to tensors."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(tensor, Tensor) for tensor in value.values())
