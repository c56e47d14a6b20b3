"""Cut a network to its widths, give it fresh weights, write it to a folder, read it back.

A saved result is two files that need nothing of this package: the weights as safetensors, and widths.json with the
widths, the module attributes and the tensor shapes. Hashes in widths.json show a truncated, mixed up or edited file.
The README has the ten lines that rebuild the network without us.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmcp.batches import device_of
from dmcp.checkpoints import open_file, refuse_link
from dmcp.errors import CutError, FileError, WidthsError
from dmcp.graph import ChannelGraph, Kept
from dmcp.recording import call_model, map_leaves, tensors_in
from dmcp.slicing import narrow, unwrap
from dmcp.spaces import Widths, fingerprint
from dmcp.supernet import Supernet

FORMAT = "torch-dmcp 1"
WEIGHTS, WIDTHS = "model.safetensors", "widths.json"
MOST_JSON = 2**24  # bytes of a JSON file: many times those of the largest network
_MOST_WEIGHTS = 2**30  # bytes of weights beyond those of the model, for a head with more classes
_DEEPEST = 64  # levels of a JSON file
_LONGEST_QUOTE = 200  # characters
_SAME = 1e-6  # largest difference of two float64 outputs that rounding explains

Convs = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
RunningNorms = nn.modules.batchnorm._NormBase  # batch and instance norms, the ones with running statistics
Norms = RunningNorms | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm


def cut(model: nn.Module, graph: ChannelGraph, widths: Mapping[str, Kept]) -> nn.Module:
    """A copy of the model that has only the kept channels: a plain module of the model's own class.

    Widths keep the first k channels of a space; a mapping may give a list of kept indices instead of a number, and
    spaces that it does not name stay full. The cut network is replayed: it does what the graph says, or CutError.
    """
    model = unwrap(model)
    if fingerprint(model) != graph.fingerprint:
        raise WidthsError(f"This graph was traced on another architecture than this {type(model).__name__}: trace it.")
    if isinstance(widths, Widths) and widths.fingerprint != graph.fingerprint:
        raise WidthsError("These widths are for another architecture: make them with graph.widths(...).")
    small = narrow(model, graph.cuts(widths), graph.attributes(widths))
    graph.check(small, widths)
    return small


@torch.no_grad()
def verify(model: nn.Module, graph: ChannelGraph, example_input: Any, widths: Widths | None = None) -> float:
    """Run the cut network beside the gated one in float64, in eval mode; CutError if they differ.

    Shapes are checked by every cut; this checks values, for the price of two forward passes. Without widths each space
    is cut to about two thirds. Returns the largest difference, as a share of the largest output.
    """
    model = unwrap(model)
    home = torch.device("cpu") if device_of(model).type == "mps" else device_of(model)  # that has no float64
    double = narrow(model, {}, {}).to(home).double().eval()
    x = map_leaves(
        lambda leaf: leaf.to(home).double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf,
        example_input,
    )
    if widths is None:
        widths = graph.widths([max(1, 2 * space.size // 3) for space in graph.spaces])
    net = Supernet(double, graph)
    pairs = list(
        zip(tensors_in(net(x, net.hard(widths))), tensors_in(call_model(cut(double, graph, widths), x)), strict=True)
    )
    scale = max(float(gated.abs().max()) for gated, _ in pairs) or 1.0
    worst = max(float((gated - small).abs().max()) for gated, small in pairs) / scale
    if not math.isfinite(worst):
        raise CutError(
            "The output of the network on the example is NaN or infinite, so that the cut one cannot be compared with "
            "it: look at its weights, and for a division by 0 or an overflow in its forward."
        )
    if not worst < _SAME:
        raise CutError(
            f"The cut network differs from the gated one by {worst:.1e} of its output: something in this model's code "
            "escapes the trace. Please report it, and name the layers concerned in trace(..., frozen=[...])."
        )
    return worst


@torch.no_grad()
def reinitialise(
    module: nn.Module,
    fresh: nn.Module | None = None,
    init: Callable[[nn.Module], None] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Give the module, in place, the weights of a network of its shape that was never trained.

    Convs and linears are drawn by He's rule, norms become 1 and 0 with empty running statistics, biases 0. All other
    tensors (position embeddings, layer scales, ...) are copied from `fresh`, a newly built model cut to the same
    widths; without it they stay. `init` replaces the rules: it is called on every module, as nn.Module.apply does.
    """
    module = unwrap(module)
    if fresh is not None:
        _copy_values(unwrap(fresh), module)
    if init is not None:
        module.apply(init)
        return
    done: set[Tensor] = set()  # a tied parameter belongs to the first module that has it
    for part in module.modules():
        own = {name: tensor for name, tensor in part.named_parameters(recurse=False) if tensor not in done}
        weight, bias = own.get("weight"), own.get("bias")
        if isinstance(part, Convs | nn.Linear):
            if weight is not None:
                weight.copy_(_he(part, weight, generator))
        elif isinstance(part, Norms):
            if weight is not None:
                weight.fill_(1)
            if isinstance(part, RunningNorms):
                part.reset_running_stats()
        else:
            continue
        if bias is not None:
            bias.zero_()
        done.update(own.values())


def _he(part: Convs | nn.Linear, weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """Normal with variance 2 / fan: what one input channel reaches for a conv, what one output reads for a linear.

    Drawn in float32 where the generator lives (the CPU by default): the same numbers on every device and precision.
    """
    fan = weight.shape[1] if isinstance(part, nn.Linear) else weight.numel() // part.in_channels
    device = torch.device("cpu") if generator is None else generator.device
    draw = torch.randn(weight.shape, generator=generator, device=device, dtype=torch.float32)
    return draw.mul_((2 / fan) ** 0.5).to(weight)


def save(small: nn.Module, widths: Widths, folder: str | os.PathLike[str]) -> None:
    """Write the network into the folder as model.safetensors and widths.json; other files there are left alone.

    A result that is already there is replaced. Files of these names that something else wrote are not: FileError.
    Whenever this is killed, `load` finds the old result or the new one. Both files are complete on the disk before
    the first one gets its name, and each names its partner: see `_read`.
    """
    if not isinstance(widths, Widths):
        raise WidthsError("save needs the Widths of the network, to know its architecture: graph.widths(...).")
    small, folder = unwrap(small), Path(folder)
    _refuse_foreign(folder)
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in _tensors(small).items()
    }
    try:
        weights = safetensors.torch.save(tensors)
    except (KeyError, SafetensorError) as error:
        raise FileError(f"{folder}: safetensors cannot hold this network: {error}.") from error
    record = {
        "format": FORMAT,
        **widths.to_json(),
        "attributes": _attributes(small),
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
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
    folder, model = Path(folder), unwrap(model)
    own = _tensors(model)
    record, tensors = _read(folder, _MOST_WEIGHTS + sum(16 * tensor.numel() for tensor in own.values()))
    if Widths.from_json(record).fingerprint != fingerprint(model):
        raise WidthsError(
            f"{folder}: saved from another architecture than this {type(model).__name__}: "
            "build the unpruned model exactly as it was before pruning (same classes, same arguments)."
        )
    if any(tensor.is_meta for tensor in own.values()):
        raise WidthsError("The model is on the meta device, where tensors have no values: build it on a real one.")
    _fit(folder, record, model)
    _check_tensors(folder, record, own, tensors)
    small = narrow(
        model, {}, {path: _like(model.get_submodule(path), new) for path, new in record["attributes"].items()}
    )
    for name, tensor in _tensors(small).items():
        tensor.data = tensors[name].to(tensor.device)
    return small


# what is in the network


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also those outside the state dict; tied ones once, under their first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _copy_values(source: nn.Module, target: nn.Module) -> None:
    old, new = _tensors(target), _tensors(source)
    if {name: t.shape for name, t in old.items()} != {name: t.shape for name, t in new.items()}:
        raise WidthsError("The fresh model has other tensors than the one to reinitialise: cut it to the same widths.")
    for name, tensor in old.items():
        tensor.copy_(new[name])


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Every attribute that could follow a width, changed or not: `save` does not know the unpruned model."""
    found = {path: {key: v for key, v in vars(part).items() if _is_ints(v)} for path, part in module.named_modules()}
    return {path: attributes for path, attributes in found.items() if attributes}


def _is_ints(value: object) -> bool:
    """An int, or a tuple or list of ints; bools are not ints here."""
    items = list(value) if isinstance(value, tuple | list) else [value]
    return bool(items) and all(type(item) is int for item in items)


def _fit(folder: Path, record: dict[str, Any], model: nn.Module) -> None:
    """Refuse a model whose names differ from the record's: the fingerprint sees neither ties nor attributes."""
    odd = set(record["tensors"]) ^ set(_tensors(model))
    parts = dict(model.named_modules())
    for path, attributes in record["attributes"].items():
        known = vars(parts[path]) if path in parts else {}
        odd |= {
            f"{path}.{name}".lstrip(".")
            for name, value in attributes.items()
            if not (_is_ints(known.get(name)) and _is_ints(value))
            or isinstance(value, int) != isinstance(known[name], int)
        }
    if odd:
        names = ", ".join(map(quote, sorted(odd)[:3]))
        raise WidthsError(
            f"{folder}: saved from another version of this {type(model).__name__}: "
            f"{names} {'is' if len(odd) == 1 else 'are'} not in both; build the model as it was."
        )


def _check_tensors(
    folder: Path, record: dict[str, Any], own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse tensors that are not those of the record, or cannot take the place of the model's."""
    if {name: list(tensor.shape) for name, tensor in tensors.items()} != record["tensors"]:
        raise FileError(f"{folder / WEIGHTS}: its tensors are not those that {WIDTHS} lists: save the network again.")
    for name, tensor in tensors.items():
        old = own[name]
        if (tensor.ndim, tensor.is_floating_point(), tensor.is_complex()) != (
            old.ndim,
            old.is_floating_point(),
            old.is_complex(),
        ):
            raise WidthsError(
                f"{folder / WEIGHTS}: {name} is {tensor.ndim}-dimensional {tensor.dtype}, but the model's is "
                f"{old.ndim}-dimensional {old.dtype}: build the model as it was."
            )


def _like(part: nn.Module, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists only; the attribute gets the type that it had."""
    kinds = {name: type(getattr(part, name)) for name in attributes}
    return {name: getattr(kinds[name], "_make", kinds[name])(value) for name, value in attributes.items()}


# what is on the disk


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _staged(name: str) -> str:
    return f".{name}.new"


def _refuse_foreign(folder: Path) -> None:
    """Do not replace weights that lie there without our widths.json, nor another widths.json."""
    records = [folder / name for name in (WIDTHS, _staged(WIDTHS)) if os.path.exists(folder / name)]
    foreign = WEIGHTS if os.path.exists(folder / WEIGHTS) and not records else ""
    for path in records:
        try:
            record = parse_json(read_bytes(path, MOST_JSON), path)
        except FileError:
            continue  # a damaged one of ours, as far as anybody can tell
        if not isinstance(record, dict) or "fingerprint" not in record:
            foreign = path.name
    if foreign:
        raise FileError(f"{folder}: the {foreign} in it is not a result of ours, so it stays: give another folder.")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files under other names, and only then rename them, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = {folder / _staged(name): folder / name for name in files}
    try:
        for path, data in zip(staged, files.values(), strict=True):
            path.unlink(missing_ok=True)  # what a killed process left, or a link
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        for path in staged:
            path.unlink(missing_ok=True)
        raise
    for path, final in staged.items():
        path.replace(final)


def _read(folder: Path, most: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a saved result, if they belong together.

    A save that was killed between its two renames left new weights, and their widths.json under its staging name.
    """
    weights = read_bytes(folder / WEIGHTS, most)
    problems: list[FileError] = []
    for name in (WIDTHS, _staged(WIDTHS)):
        try:
            record = _record(folder / name)
            if record["sha256"] != hashlib.sha256(weights).hexdigest():
                raise FileError(f"{folder / WEIGHTS}: not the weights that were saved: truncated or changed since.")
            return record, parse_tensors(weights, folder / WEIGHTS)
        except FileError as error:
            problems.append(error)
    raise problems[0]


def _record(path: Path) -> dict[str, Any]:
    """widths.json as plain data, if it is ours and nobody has edited it."""
    record = parse_json(read_bytes(path, MOST_JSON), path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        mark = quote(record.get("format")) if isinstance(record, dict) else None
        raise FileError(f"{path}: not a result that this version can read: format is {mark!r}, not {FORMAT!r}.")
    if record.get("digest") != _digest(record):
        raise FileError(f"{path}: changed since it was saved: its digest does not match.")
    attributes, tensors = record.get("attributes"), record.get("tensors")
    if not isinstance(tensors, dict) or not isinstance(attributes, dict) or not isinstance(record.get("sha256"), str):
        raise FileError(f"{path}: not a result that this version can read: tensors, attributes or sha256 are missing.")
    if not all(isinstance(values, dict) for values in attributes.values()):
        raise FileError(f"{path}: not a result that this version can read: its attributes are not tables.")
    return record


# files that somebody else may have written


def read_bytes(path: Path, most: int) -> bytes:
    """All bytes of a plain file that has no more than `most`; no link out of its folder is followed."""
    try:
        refuse_link(path)
        with open(os.path.realpath(path), "rb", opener=open_file) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise FileError(f"{path}: cannot be read: not a plain file.")
            if facts.st_size > most:
                raise FileError(f"{path}: {facts.st_size:,} bytes are too many: {most:,} are read at most.")
            return file.read(facts.st_size)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error


def parse_json(data: bytes, name: object) -> Any:
    """Plain data, nested no deeper than what follows can handle."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name}: truncated or not JSON: {quote(error)}.") from None
    level = [parsed]
    for _ in range(_DEEPEST):
        level = [
            item
            for it in level
            if isinstance(it, dict | list)
            for item in (it.values() if isinstance(it, dict) else it)
        ]
    if level:
        raise FileError(f"{name}: nested too deeply to be a file of ours.")
    return parsed


def parse_tensors(data: bytes, name: object) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # safetensors and torch raise many kinds for a header that makes no sense
        raise FileError(f"{name}: not a safetensors file: {quote(error)}.") from error


def quote(text: object) -> str:
    """What somebody else wrote, for an error: short, and on one line."""
    return str(text)[:_LONGEST_QUOTE].encode("unicode_escape").decode()
