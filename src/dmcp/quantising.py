"""An ONNX file whose weights and activations have 8 bits, made of one with 32: onnxruntime looks at real inputs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmcp.batches import check_yields, input_of, size_of
from dmcp.errors import DataError, DmcpError, FileError
from dmcp.exporting import Format, check_target, open_onnx, reason, silence, staged
from dmcp.kinds import path_of
from dmcp.tracing.recording import map_leaves, tensors_in

SAMPLES = 512  # that the ranges of activations are found with
_FLOATS = {"tensor(float)": torch.float32, "tensor(double)": torch.float64, "tensor(float16)": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """A file that was written, and what came out when it was run."""

    path: Path
    size_bytes: int
    samples: int  # that the ranges were found with
    runtime: str  # what has run the file, with its version
    difference: float  # from the outputs of the file it was made of: root mean square, as a share of theirs


def quantise(
    source: str | os.PathLike[str],
    loader: Iterable[Any],
    path: str | os.PathLike[str],
    *,
    samples: int = SAMPLES,
) -> Quantised:
    """Write an ONNX file with 8 bits for each weight and activation, from one that `export` wrote; nothing is trained.

    loader: batches like those the network was trained with, but not augmented, and in no order of classes: the range of
        each activation is what it has on the first so many samples. Test the new file: some networks lose accuracy.
    """
    source, path = (path_of("quantise", it) for it in (source, path))
    check_yields(loader)
    check_target(path)
    for file, what in ((source, "one that export has written"), (path, "like model.int8.onnx")):
        if file.suffix != Format.ONNX:
            raise FileError(f"{file}: only {Format.ONNX} files can have 8 bits: name {what}.")
    if not source.is_file():
        raise FileError(f"{source}: there is no such file: export writes it.")
    if path.exists() and path.samefile(source):
        raise FileError(f"{path}: what has 8 bits is made of this file: name another one to write.")
    if type(samples) is not int or samples < 1:
        raise DmcpError(f"The ranges are found with at least one sample, not {samples!r}.")
    try:
        before = open_onnx(source)
    except Exception as error:  # onnxruntime has errors of its own
        raise FileError(f"{source}: onnxruntime cannot open it: {reason(error)}") from error
    batches = list(_first(loader, samples))
    if not batches:
        raise DataError("The loader gives no batch to find the ranges of activations with.")
    _check_batches(batches, before.kinds)
    with staged(path) as new:
        try:
            _write(source, batches, before.inputs, new)
            after = open_onnx(new)
            difference = _difference(before.run, after.run, batches)
        except Exception as error:
            raise FileError(f"{path}: not written: it cannot have 8 bits: {reason(error)}") from error
        if not difference < float("inf"):
            raise FileError(f"{path}: not written: its outputs are not finite, or of other shapes.")
        size_bytes = new.stat().st_size
    seen = sum(size_of((batch,)) for batch in batches)
    return Quantised(path=path, size_bytes=size_bytes, samples=seen, runtime=after.name, difference=difference)


def _first(loader: Iterable[Any], samples: int) -> Iterator[Any]:
    """The inputs of the first so many samples, on the CPU; the last batch may be cut."""
    left = samples
    for batch in loader:
        given = input_of(batch)
        room = left
        yield map_leaves(lambda leaf: leaf[:room].detach().cpu() if isinstance(leaf, Tensor) else leaf, given)  # noqa: B023
        left -= size_of((given,))
        if left <= 0:
            return


def _check_batches(batches: list[Any], kinds: list[str]) -> None:
    """Refuse numbers that onnxruntime does not take, or that have no range."""
    for batch in batches:
        for tensor, kind in zip(tensors_in(batch), kinds, strict=False):  # a wrong number of inputs is told later
            wanted = _FLOATS.get(kind, tensor.dtype)
            if tensor.dtype != wanted:
                held, taken = (str(it).removeprefix("torch.") for it in (tensor.dtype, wanted))
                raise DataError(
                    f"The input of a batch holds {held}, the file takes {taken}: convert it with x.to({wanted}), "
                    "scaled as for the network."
                )
            if not tensor.isfinite().all():
                raise DataError("The input of a batch holds NaN or infinite numbers: look at the data.")


class _Reader:
    """Batches as onnxruntime asks for them."""

    def __init__(self, batches: list[Any], names: list[str]) -> None:
        self.left = iter(batches)
        self.names = names

    def get_next(self) -> dict[str, Any] | None:
        """The next one; None at the end."""
        batch = next(self.left, None)
        if batch is None:
            return None
        return dict(zip(self.names, (tensor.numpy() for tensor in tensors_in(batch)), strict=True))


def _write(source: Path, batches: list[Any], names: list[str], path: Path) -> None:
    """Norms are folded into convolutions first; each channel of a weight gets a range of its own."""
    quantization = importlib.import_module("onnxruntime.quantization")
    prepare = importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process
    folded = path.with_name(f"folded-{path.name}")
    with silence():
        prepare(str(source), str(folded), skip_symbolic_shape=True)
        kind = quantization.QuantFormat.QDQ
        quantization.quantize_static(
            str(folded), str(path), _Reader(batches, names), quant_format=kind, per_channel=True
        )
    folded.unlink()


def _difference(before: Any, after: Any, batches: list[Any]) -> float:
    """Root mean square of what changed, as a share of what the outputs were; inf where they cannot be compared."""
    changed, was = 0.0, 0.0
    for batch in batches:
        wanted, found = before(batch), after(batch)
        if [it.shape for it in wanted] != [it.shape for it in found]:
            return float("inf")
        for one, other in zip(wanted, found, strict=True):
            changed += float((one.double() - other.double()).square().sum())
            was += float(one.double().square().sum())
    share = (changed / was) ** 0.5 if was else float("inf")
    return share if torch.isfinite(torch.tensor(share)) else float("inf")
