"""Weights of a file, which may be for other classes."""

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
from dmcp.units import by

_WRAPPERS = ("module.", "_orig_mod.", "module.")  # prefixes of DDP, of torch.compile, and of one in the other


def load_weights(model: nn.Module, path: Path, notes: list[str], classes: int | None = None) -> bool:
    """Put the weights of a file into the model; never by pickle.

    With `classes`, a last layer for another number of them stays as it is: then True, and a note; all else must fit.
    """
    tensors = _read_tensors(path, notes)
    expected = model.state_dict()
    other_shape = [name for name in expected if name in tensors and tensors[name].shape != expected[name].shape]
    one_sided = []
    for name in {**expected, **tensors}:
        missing = (name in expected) != (name in tensors)
        if missing and not name.endswith("num_batches_tracked"):  # files of old versions have none
            one_sided.append(name)
    layers = {name.rpartition(".")[0] for name in other_shape}
    is_head = all(expected[name].shape == (classes, *tensors[name].shape[1:]) for name in other_shape)
    if one_sided or not is_head or len(layers) > 1:
        name = (other_shape or one_sided)[0]
        stored = by(tensors[name].shape) if name in tensors else "missing"
        needed = by(expected[name].shape) if name in expected else "missing"
        raise WidthsError(f"{path}: weights of another network: {name} is {stored} in the file, {needed} in the model.")
    fitting = {name: tensor for name, tensor in tensors.items() if name not in other_shape}
    model.load_state_dict(fitting, strict=False)
    for layer in layers:
        stored_classes = len(tensors[other_shape[0]])
        notes.append(f"{layer} is for {stored_classes} classes, the data have {classes}: it is initialized again.")
    return bool(other_shape)


def _read_tensors(path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The table of weights in a file."""
    try:
        check_inflated(path, *zip_sizes(path))
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings(action="ignore"):  # of a TorchScript file, which is refused
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileError:
        raise
    except (PermissionError, SafetensorError) as error:
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except Exception as error:  # torch raises many kinds for a file that is cut off, or holds more than weights
        damage = "" if zipfile.is_zipfile(path) else "broken, cut off or "
        raise FileError(
            f"{path}: {damage}not plain weights, as torch.save(model.state_dict(), ...) writes them."
        ) from error
    tensors = _find_table(content, path, notes)
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    return tensors


def _find_table(content: Any, path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The weights in what a file holds: itself, or the table under a known key, or the only table in it."""
    entries = content if isinstance(content, Mapping) else {}
    tables = [key for key, value in entries.items() if _is_table(value)]
    keys = ["state_dict", "model_state_dict", "model"]
    if len(tables) == 1:
        keys += tables
    for key in keys:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            if len(tables) > 1:
                notes.append(f"{path} holds {', '.join(map(str, tables))}: {key} is used.")
    if not _is_table(content):
        contents = ", ".join(map(str, list(entries)[:9])) or type(content).__name__
        raise FileError(f"{path}: has no table of weights, or several without a known name. It has {contents}.")
    return dict(content)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(tensor, Tensor) for tensor in value.values())
