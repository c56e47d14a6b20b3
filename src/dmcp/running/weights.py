"""Weights from a file into a network, if they are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmcp.data import guess
from dmcp.errors import FileError, WidthsError
from dmcp.tables import by

_ALIKE = 0.75  # of a file's name, from which on another one may be meant


def load_weights(model: nn.Module, path: Path, classes: int | None = None, names: Sequence[str] = ()) -> str:
    """Put the weights of a file into the model; never by pickle.

    classes: of the data. A last layer for another number of them then keeps the weights that it has, and a sentence
    says so; everything else must fit.
    names: that could stand in the place of the file's, for one that is not there.
    """
    tensors = _read_tensors(path, names)
    own = model.state_dict()
    wrong = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    odd = [name for name in {**own, **tensors} if (name in own) != (name in tensors)]
    odd = [name for name in odd if not name.endswith("num_batches_tracked")]  # old files have none
    others = _classes_of({name: tensors[name] for name in wrong}, own, classes)
    if wrong and not others:
        name = wrong[0]
        raise WidthsError(
            f"{path}: {name} is {by(tensors[name].shape)}, but the network has {by(own[name].shape)}: these are the "
            "weights of another network, or of one for another number of classes."
        )
    if odd:
        side = "is not in the file" if odd[0] in own else "is not in the network"
        raise WidthsError(f"{path}: these are the weights of another network: {odd[0]} {side}.")
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in wrong}, strict=False)
    if not others:
        return ""
    return (
        f"{wrong[0].rpartition('.')[0] or path} is for {others} classes, the data have {classes}: it starts fresh; "
        "in a search --warmup 0.5 trains it first."
    )


def _classes_of(wrong: Mapping[str, Tensor], own: Mapping[str, Tensor], classes: int | None) -> int:
    """For how many classes the one layer that does not fit is; 0 if that is not what is wrong.

    Then its tensors differ in dim 0 alone, which is the number of classes here.
    """
    layers = {name.rpartition(".")[0] for name in wrong}
    counts = {tensor.shape[0] if tensor.ndim else 0 for tensor in wrong.values()}
    here = {own[name].shape[0] if own[name].ndim else 0 for name in wrong}
    alike = all(tensor.shape[1:] == own[name].shape[1:] for name, tensor in wrong.items())
    return counts.pop() if len(layers) == len(counts) == 1 and here == {classes} and alike else 0


def _read_tensors(path: Path, names: Sequence[str] = ()) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        meant = guess(path, names, Path.is_file, _ALIKE) if not path.exists() else ""
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.{meant}") from error
    except Exception as error:  # torch raises many kinds for a file that holds more than weights
        raise FileError(
            f"{path}: not a file of plain weights: give one of torch.save(model.state_dict(), ...) or safetensors."
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FileError(f"{path}: holds no table of tensors.")
    for wrapper in ("module.", "_orig_mod.", "module."):  # of DDP, of torch.compile, of one in the other
        if all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): value for name, value in found.items()}
    return dict(found)
