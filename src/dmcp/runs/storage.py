"""Save a cut network to a folder and load it back."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dmcp import models
from dmcp.arguments import checked
from dmcp.cutting import named_tensors
from dmcp.errors import DmcpError, FileError, WidthsError
from dmcp.installation import install_command
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

    Even if the process is killed, `load` finds either the old result or the new one: both files are complete before
    either is renamed, and widths.json has the checksum of its weights.
    """
    folder = Path(folder)
    small = unwrap(small)
    tensors = {}
    for name, tensor in named_tensors(small).items():
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    _check_widths(widths, shapes)
    try:
        weights = safetensors.torch.save(tensors)
    except KeyError as error:
        text = f"A safetensors file cannot hold tensors of type {error}: store such weights as two real tensors."
        raise WidthsError(text) from error
    record = {
        "format": FORMAT,
        **widths.to_json(),
        "attributes": _int_attributes(small),
        "tensors": shapes,
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    text = json.dumps(record | {"digest": record_hash(record)}, indent=1)
    try:
        write_files(folder, {WEIGHTS: weights, WIDTHS: text.encode()})
    except OSError as error:
        raise FileError(f"{folder}: the result cannot be written: {error.strerror or error}.") from error


def _check_widths(widths: Widths, shapes: Mapping[str, list[int]]) -> None:
    """Refuse widths that are not those of the tensors with these shapes."""
    for dim in widths.dims:
        size = dim.size(widths)
        shape = shapes.get(dim.tensor, [])
        if dim.dim >= len(shape) or shape[dim.dim] != size:
            raise WidthsError(
                f"These are not the widths of this network: dim {dim.dim} of {dim.tensor} must be {size}."
            )


def _int_attributes(small: nn.Module) -> dict[str, dict[str, Any]]:
    """Attributes that may follow a width, by module: all ints, as it is not known here which of them did change."""
    attributes = {}
    for path, module in small.named_modules():
        ints = {name: value for name, value in vars(module).items() if _is_ints(value)}
        if ints:
            attributes[path] = ints
    return attributes


@checked
def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Load the network that `save` wrote: a narrowed copy of `model`, which must be the unpruned architecture.

    Values and dtypes are those that were saved; devices, mode and requires_grad are those of the model. A run folder
    needs no model if a library builds it by name. If "owner/name" is not a folder, it is fetched from the Hugging Face
    Hub.
    """
    locate = _locate(Path(folder))
    if model is None:
        model = _build_unpruned(locate(SETTINGS))
    else:
        model = unwrap(model)
    model_tensors = named_tensors(model)
    max_bytes = _MAX_EXTRA + sum(16 * tensor.numel() for tensor in model_tensors.values())
    record, tensors = _read(locate, max_bytes)
    if Widths.from_json(record).fingerprint != fingerprint(model):
        raise WidthsError(f"{folder}: saved from another architecture: build the unpruned model exactly as it was.")
    if any(tensor.is_meta for tensor in model_tensors.values()):
        raise WidthsError("The model is on the meta device, where tensors have no values: build it on a real one.")

    # The fingerprint sees neither ties nor attributes.
    modules = dict(model.named_modules())
    attributes: dict[str, dict[str, Any]] = {}
    try:
        for path, saved in record["attributes"].items():
            current = vars(modules[path])
            attributes[path] = {name: _like(current[name], value) for name, value in saved.items()}
        if _kinds(model_tensors) != _kinds(tensors):
            raise ValueError("other tensors")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WidthsError(f"{folder}: saved from another version of this model: {quote(repr(error))}.") from error

    small = narrow(model, {}, attributes)
    for name, tensor in named_tensors(small).items():
        tensor.data = tensors[name].to(tensor.device)
    return small


def _locate(folder: Path) -> Callable[[str], Path]:
    """A function that gives the path of a file by its name: in the folder, or in the cache of the Hub.

    Folders of that cache hold links, which are followed.
    """
    if folder.exists():
        return folder.joinpath
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", folder.as_posix()):
        raise FileError(f"{folder}: this folder does not exist.")
    try:
        from huggingface_hub import snapshot_download  # late: it is an extra

        snapshot = Path(snapshot_download(folder.as_posix(), allow_patterns=[WEIGHTS, WIDTHS, SETTINGS]))
    except ImportError:
        text = f"{folder}: this folder does not exist. To load from the Hub: {install_command('hub')}."
        raise FileError(text) from None
    except Exception as error:  # many kinds: no such name, no network, no right to read it
        raise FileError(f"{folder}: not a folder, and not found on the Hub: {quote(error)}.") from error
    return lambda name: (snapshot / name).resolve()


def _build_unpruned(path: Path) -> nn.Module:
    """Build the unpruned network of a run by its settings. Only code of libraries is run, with numbers as arguments."""
    try:
        settings = parse_json(read_bytes(path, MOST_JSON), path)
        name = settings["model"]
        arguments = settings["model_args"]
        are_numbers = all(isinstance(value, int | float | None) for _, value in map(models.argument, arguments))
        if not models.is_harmless(name, arguments) or not are_numbers:
            raise ValueError(f"built by {' '.join((name, *arguments))}")
        return models.rebuild(name, arguments, settings["classes"])
    except (AttributeError, DmcpError, KeyError, TypeError, ValueError) as error:
        text = f"{path.parent}: {quote(error).rstrip('.')}: pass the unpruned model to `load`, too."
        raise FileError(text) from error


def _is_ints(value: object) -> bool:
    """Whether it is an int, or a tuple or list of ints. Bools do not count, nor a torch.Size, which forward stored."""
    if isinstance(value, torch.Size):
        return False
    items = list(value) if isinstance(value, tuple | list) else [value]
    return bool(items) and all(type(item) is int for item in items)


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """What must be the same of a tensor before and after pruning, by name."""
    return {name: (tensor.ndim, tensor.is_floating_point(), tensor.is_complex()) for name, tensor in tensors.items()}


def _like(current: Any, value: Any) -> Any:
    """A saved attribute in the type that the model's has, since JSON has lists only; ValueError if it does not fit."""
    are_ints = _is_ints(current) and _is_ints(value)
    if not are_ints or isinstance(value, int) != isinstance(current, int):
        raise ValueError(f"{current!r} in the place of {value!r}")
    convert = getattr(type(current), "_make", type(current))  # a namedtuple is not made by its class
    return convert(value)


def _read(locate: Callable[[str], Path], max_bytes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the record and the tensors of a result, if they belong together and nobody has edited them.

    A save that was killed between its two renames left new weights, and their widths.json under its staging name.
    """
    weights = read_bytes(locate(WEIGHTS), max_bytes)
    problems: list[FileError] = []
    for path in (locate(WIDTHS), locate(staging_name(WIDTHS))):
        try:
            record = _read_record(path)
            if record.get("sha256") != hashlib.sha256(weights).hexdigest():
                raise FileError(f"{locate(WEIGHTS)}: not the weights that were saved: truncated or changed since.")
            return record, parse_tensors(weights, locate(WEIGHTS))
        except FileError as error:
            problems.append(error)
    raise problems[0]


def _read_record(path: Path) -> dict[str, Any]:
    """Read widths.json, with its format and checksum."""
    record = parse_json(read_bytes(path, MOST_JSON), path)
    is_record = isinstance(record, dict) and record.get("format") == FORMAT
    if not is_record or record.get("digest") != record_hash(record):
        raise FileError(f"{path}: not a result in the format {FORMAT!r}, or changed since it was saved.")
    return dict(record)
