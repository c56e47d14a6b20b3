"""Save a cut network to a folder and load it back."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dmcp import models
from dmcp.arguments import checked
from dmcp.cutting import named_tensors
from dmcp.errors import DmcpError, FileError, WidthsError
from dmcp.runs.files import SETTINGS, WEIGHTS, WIDTHS
from dmcp.runtime.io import (
    MOST_JSON,
    parse_json,
    parse_tensors,
    quote,
    read_bytes,
    record_hash,
    staging_name,
    write_files,
)
from dmcp.tracing.modules import narrow, unwrap
from dmcp.tracing.widths import Widths, fingerprint

FORMAT = "torch-dmcp 1"
_MAX_EXTRA = 2**30  # bytes of weights beyond those of the model, for a head with more classes


@checked
def save(small: nn.Module, widths: Widths, folder: str | os.PathLike[str]) -> None:
    """Write the network into the folder as model.safetensors and widths.json; other files there are left alone.

    Whenever this is killed, `load` finds the old result or the new one: both files are complete before either is
    renamed, and widths.json has the checksum of its weights.
    """
    folder, small = Path(folder), unwrap(small)
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in named_tensors(small).items()
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for dim in widths.dims:
        if shapes.get(dim.tensor, [])[dim.dim : dim.dim + 1] != [dim.size(widths)]:
            wanted = f"dim {dim.dim} of {dim.tensor} must be {dim.size(widths)}"
            raise WidthsError(f"These widths are not those of this network: {wanted}.")
    try:
        weights = safetensors.torch.save(tensors)
    except KeyError as error:
        raise WidthsError(f"A safetensors file holds no {error}: keep such weights as two real tensors.") from error
    # every attribute that could follow a width, changed or not: the unpruned model is not known here
    ints = {path: {key: v for key, v in vars(part).items() if _is_ints(v)} for path, part in small.named_modules()}
    record = {
        "format": FORMAT,
        **widths.to_json(),
        "attributes": {path: attributes for path, attributes in ints.items() if attributes},
        "tensors": shapes,
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    text = json.dumps(record | {"digest": record_hash(record)}, indent=1)
    try:
        write_files(folder, {WEIGHTS: weights, WIDTHS: text.encode()})
    except OSError as error:
        raise FileError(f"{folder}: the result cannot be written: {error.strerror or error}.") from error


@checked
def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The network that `save` wrote, as a copy of the model: the unpruned architecture, freshly built, not changed.

    Values and dtypes are the saved ones; devices, mode and requires_grad are the model's. A run folder needs no model
    if a library builds it by name. "owner/name" that is no folder here is fetched from the Hugging Face Hub.
    """
    place = _place(Path(folder))
    model = _built(place(SETTINGS)) if model is None else unwrap(model)
    own = named_tensors(model)
    record, tensors = _read(place, _MAX_EXTRA + sum(16 * tensor.numel() for tensor in own.values()))
    if Widths.from_json(record).fingerprint != fingerprint(model):
        raise WidthsError(f"{folder}: saved from another architecture: build the unpruned model exactly as it was.")
    if any(tensor.is_meta for tensor in own.values()):
        raise WidthsError("The model is on the meta device, where tensors have no values: build it on a real one.")
    try:  # the fingerprint sees neither ties nor attributes
        parts, attributes = dict(model.named_modules()), dict[str, dict[str, Any]]()
        for path, saved in record["attributes"].items():
            attributes[path] = {name: _like(vars(parts[path])[name], value) for name, value in saved.items()}
        if {name: _kind(it) for name, it in own.items()} != {name: _kind(it) for name, it in tensors.items()}:
            raise ValueError("other tensors")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WidthsError(f"{folder}: saved from another version of this model: {quote(repr(error))}.") from error
    small = narrow(model, {}, attributes)
    for name, tensor in named_tensors(small).items():
        tensor.data = tensors[name].to(tensor.device)
    return small


def _place(folder: Path) -> Callable[[str], Path]:
    """Where a file of the folder is: there, else in the cache of the Hub, whose folders have links to its files."""
    if folder.exists():
        return folder.joinpath
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", folder.as_posix()):
        raise FileError(f"{folder}: there is no such folder.")
    try:
        from huggingface_hub import snapshot_download  # late: it is an extra

        found = Path(snapshot_download(folder.as_posix(), allow_patterns=[WEIGHTS, WIDTHS, SETTINGS]))
    except ImportError:
        raise FileError(f'{folder}: no such folder; for the Hub: pip install "torch-dmcp[hub]".') from None
    except Exception as error:  # many kinds: no such name, no network, no right to read it
        raise FileError(f"{folder}: no such folder, nor does the Hub give it: {quote(error)}.") from error
    return lambda name: (found / name).resolve()


def _built(path: Path) -> nn.Module:
    """The unpruned network of a run; no code but that of libraries is run, and they get numbers only."""
    try:
        stored = parse_json(read_bytes(path, MOST_JSON), path)
        name, typed, classes = stored["model"], stored["model_args"], stored["classes"]
        numbers = all(isinstance(value, int | float | None) for _, value in map(models.argument, typed))
        if not models.is_harmless(name, typed) or not numbers:
            raise ValueError(f"built by {' '.join((name, *typed))}")
        return models.rebuild(name, typed, classes)
    except (AttributeError, DmcpError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path.parent}: {quote(error).rstrip('.')}: give load the unpruned model, too.") from error


def _is_ints(value: object) -> bool:
    """An int, or a tuple or list of ints; bools are not ints here, and a torch.Size is what forward met."""
    if isinstance(value, torch.Size):
        return False
    items = list(value) if isinstance(value, tuple | list) else [value]
    return bool(items) and all(type(item) is int for item in items)


def _kind(tensor: Tensor) -> object:
    return tensor.ndim, tensor.is_floating_point(), tensor.is_complex()


def _like(known: Any, value: Any) -> Any:
    """A saved attribute in the type of the model's own, as JSON has lists only; ValueError if it does not fit."""
    if not (_is_ints(known) and _is_ints(value)) or isinstance(value, int) != isinstance(known, int):
        raise ValueError(f"{known!r} in the place of {value!r}")
    return getattr(type(known), "_make", type(known))(value)


def _read(place: Callable[[str], Path], most: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a saved result, if they belong together and nobody has edited them.

    A save that was killed between its two renames left new weights, and their widths.json under its staging name.
    """
    weights, problems = read_bytes(place(WEIGHTS), most), list[FileError]()
    for path in (place(WIDTHS), place(staging_name(WIDTHS))):
        try:
            record = parse_json(read_bytes(path, MOST_JSON), path)
            if (
                not isinstance(record, dict)
                or record.get("format") != FORMAT
                or record.get("digest") != record_hash(record)
            ):
                raise FileError(f"{path}: no result in the format {FORMAT!r}, or changed since it was saved.")
            if record.get("sha256") != hashlib.sha256(weights).hexdigest():
                raise FileError(f"{place(WEIGHTS)}: not the weights that were saved: truncated or changed since.")
            return record, parse_tensors(weights, place(WEIGHTS))
        except FileError as error:
            problems.append(error)
    raise problems[0]
