"""Save a cut network to a folder and load it back."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmcp.cutting import named_tensors
from dmcp.errors import FileError, WidthsError
from dmcp.modules import narrow, path_of, unwrap
from dmcp.runtime.io import MOST_JSON, parse_json, parse_tensors, quote, read_bytes, staging_name, write_files
from dmcp.widths import Widths, fingerprint

FORMAT = "torch-dmcp 1"
WEIGHTS, WIDTHS = "model.safetensors", "widths.json"
_MAX_EXTRA = 2**30  # bytes of weights beyond those of the model, for a head with more classes


def save(small: nn.Module, widths: Widths, folder: str | os.PathLike[str]) -> None:
    """Write the network into the folder as model.safetensors and widths.json; other files there are left alone.

    An earlier result is replaced, and so is the same network by `save_pretrained` of transformers; other files of these
    names are not. Whenever this is killed, `load` finds the old result or the new one: both files are complete before
    either is renamed, and each names the other.
    """
    if not isinstance(widths, Widths):
        raise WidthsError("save needs the Widths of the network, to know its architecture: graph.widths(...).")
    folder, small = path_of("save", folder, "folder"), unwrap(small)
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in named_tensors(small).items()
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for dim in widths.dims:
        if shapes.get(dim.tensor, [])[dim.dim : dim.dim + 1] != [dim.size(widths)]:
            wanted = f"dim {dim.dim} of {dim.tensor} must be {dim.size(widths)}"
            raise WidthsError(f"These widths are not those of this network: {wanted}.")
    _refuse_foreign(folder, tensors)
    try:
        weights = safetensors.torch.save(tensors)
    except (KeyError, SafetensorError) as error:
        raise FileError(f"{folder}: safetensors cannot hold this network: {error}.") from error
    # every attribute that could follow a width, changed or not: the unpruned model is not known here
    ints = {path: {key: v for key, v in vars(part).items() if _is_ints(v)} for path, part in small.named_modules()}
    record = {
        "format": FORMAT,
        **widths.to_json(),
        "attributes": {path: attributes for path, attributes in ints.items() if attributes},
        "tensors": shapes,
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    text = json.dumps(record | {"digest": _digest(record)}, indent=1)
    try:
        write_files(folder, {WEIGHTS: weights, WIDTHS: text.encode()})
    except OSError as error:
        raise FileError(f"{folder}: the result cannot be written: {error.strerror or error}.") from error


def load(folder: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """The network that `save` wrote, as a copy of the model: the unpruned architecture, freshly built, not changed.

    Values and dtypes are the saved ones; devices, mode and requires_grad are the model's.
    """
    folder, model = path_of("load", folder, "folder"), unwrap(model)
    own = named_tensors(model)
    record, tensors = _read(folder, _MAX_EXTRA + sum(16 * tensor.numel() for tensor in own.values()))
    if Widths.from_json(record).fingerprint != fingerprint(model):
        raise WidthsError(
            f"{folder}: saved from another architecture than this {type(model).__name__}: "
            "build the unpruned model exactly as it was before pruning (same classes, same arguments)."
        )
    if any(tensor.is_meta for tensor in own.values()):
        raise WidthsError("The model is on the meta device, where tensors have no values: build it on a real one.")
    # the fingerprint sees neither ties nor attributes
    odd = [name for name in own.keys() | tensors.keys() if _kind(own.get(name)) != _kind(tensors.get(name))]
    parts, attributes = dict(model.named_modules()), dict[str, dict[str, Any]]()
    for path, saved in record["attributes"].items():
        known = vars(parts[path]) if path in parts else {}
        attributes[path] = {name: _like(known.get(name), value) for name, value in saved.items()}
        odd += [f"{path}.{name}".lstrip(".") for name, value in attributes[path].items() if value is None]
    if odd:
        names = ", ".join(map(quote, sorted(odd)[:3]))
        raise WidthsError(f"{folder}: saved from another version of this model: {names} differ; build it as it was.")
    small = narrow(model, {}, attributes)
    for name, tensor in named_tensors(small).items():
        tensor.data = tensors[name].to(tensor.device)
    return small


def _is_ints(value: object) -> bool:
    """An int, or a tuple or list of ints; bools are not ints here, and a torch.Size is what forward met."""
    if isinstance(value, torch.Size):
        return False
    items = list(value) if isinstance(value, tuple | list) else [value]
    return bool(items) and all(type(item) is int for item in items)


def _kind(tensor: Tensor | None) -> object:
    return tensor is not None and (tensor.ndim, tensor.is_floating_point(), tensor.is_complex())


def _like(known: Any, value: Any) -> Any:
    """A saved attribute in the type of the model's own, as JSON has lists only; None if it does not fit."""
    if not (_is_ints(known) and _is_ints(value)) or isinstance(value, int) != isinstance(known, int):
        return None
    return getattr(type(known), "_make", type(known))(value)


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_foreign(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Do not replace other weights that lie there without our widths.json, nor another widths.json."""
    records = [folder / name for name in (WIDTHS, staging_name(WIDTHS)) if os.path.exists(folder / name)]
    foreign = "" if records or not os.path.exists(folder / WEIGHTS) or _holds(folder / WEIGHTS, tensors) else WEIGHTS
    for path in records:
        try:
            record = parse_json(read_bytes(path, MOST_JSON), path)
        except FileError:
            continue  # a damaged one of ours, as far as anybody can tell
        if not isinstance(record, dict) or "fingerprint" not in record:
            foreign = path.name
    if foreign:
        raise FileError(f"{folder}: {foreign} there was not written by dmcp.save, so it stays: give another folder.")


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """True if all that the file has are these values; transformers may give them other names."""
    try:
        found = parse_tensors(read_bytes(path, _MAX_EXTRA + sum(tensor.nbytes for tensor in tensors.values())), path)
    except FileError:
        return False
    return {_value(tensor) for tensor in found.values()} <= {_value(tensor) for tensor in tensors.values()}


def _value(tensor: Tensor) -> object:
    return tensor.dtype, tensor.shape, hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


def _read(folder: Path, most: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a saved result, if they belong together and nobody has edited them.

    A save that was killed between its two renames left new weights, and their widths.json under its staging name.
    """
    weights, problems = read_bytes(folder / WEIGHTS, most), list[FileError]()
    for path in (folder / WIDTHS, folder / staging_name(WIDTHS)):
        try:
            record = parse_json(read_bytes(path, MOST_JSON), path)
            if not isinstance(record, dict) or record.get("format") != FORMAT:
                raise FileError(f"{path}: not a result that this version can read: its format is not {FORMAT!r}.")
            attributes = record.get("attributes")
            tables = [attributes, *attributes.values()] if isinstance(attributes, dict) else [attributes]
            if record.get("digest") != _digest(record) or not all(isinstance(it, dict) for it in tables):
                raise FileError(f"{path}: changed since it was saved: its digest does not match.")
            if record.get("sha256") != hashlib.sha256(weights).hexdigest():
                raise FileError(f"{folder / WEIGHTS}: not the weights that were saved: truncated or changed since.")
            tensors = parse_tensors(weights, folder / WEIGHTS)
            if {name: list(tensor.shape) for name, tensor in tensors.items()} != record.get("tensors"):
                raise FileError(f"{folder / WEIGHTS}: its tensors are not those that {WIDTHS} lists.")
            return record, tensors
        except FileError as error:
            problems.append(error)
    raise problems[0]
