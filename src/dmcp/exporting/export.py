"""ONNX, .pt2 and int8 files of a network; each one is run and compared with the network before it is kept."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from dmcp.arguments import PositiveInt, checked
from dmcp.errors import DataError, DmcpError, FileError, TraceError
from dmcp.installation import install_command
from dmcp.runtime.batches import generator, input_of, size_of
from dmcp.runtime.io import plain_file_size, quote, write_files
from dmcp.tracing.modules import (
    as_arguments,
    call_model,
    map_leaves,
    narrow,
    tensors_in,
    unwrap,
    without_autocast,
)

ONNX = ".onnx"
PT2 = ".pt2"
NOTE = "input.json"  # the preprocessing: a key in the metadata of ONNX, an extra file in .pt2
TOLERANCE = 1e-4  # what rounding explains, as a share of the largest output
SAMPLES = 512  # that the ranges of int8 activations come from
_COMPARED = (1, 4)  # batch sizes that are compared
_RECORDED = 2  # batch size that is recorded: torch would take a batch of 1 for a constant
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # that ONNX needs


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how it compares with what it was made from."""

    path: Path
    size_bytes: int
    runtime: str  # that ran the file, with its version
    difference: float  # largest one of an output, as a share of the largest number in it; of int8, root mean squares


@checked
@without_autocast
def export(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    preprocessing: Mapping[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> Exported:
    """Write the network in eval mode to an .onnx or .pt2 file, and compare the two. The model is not changed.

    example: one input as the model gets it: a tensor, a tuple (positional) or a dict (keyword arguments). Dim 0 of each
        tensor is the batch, of any size; the other dims are fixed.
    preprocessing: plain data that says how an image is prepared; it is stored in the file.
    tolerance: largest difference, as a share of the largest output. If it is exceeded, FileError is raised and an
        existing file is kept.
    """
    path = Path(path)
    check_target(path)
    note = None
    if preprocessing is not None:
        with blaming("preprocessing must be plain data that JSON can hold"):
            note = json.dumps(preprocessing)
    net = narrow(unwrap(model), {}, {}).cpu().eval().requires_grad_(False)  # a copy

    with blaming(f"{path}: not written"), tempfile.TemporaryDirectory(prefix="dmcp-") as folder:
        # Written beside its target, and run there.
        draft = Path(folder) / path.name
        if path.suffix == ONNX:
            write_onnx(net, example, draft, note)
        else:
            write_pt2(net, example, draft, note)
        file = open_file(draft)

        # Only a file that computes the same takes the place of what is there.
        inputs = [random_like(example, size) for size in _COMPARED]
        difference = largest_gap(net, file.run, inputs)
        if not difference <= tolerance:  # also NaN
            raise FileError(
                f"{path}: not written: in {file.runtime} the outputs differ from those of the network by "
                f"{difference:.1e} of the largest one (tolerance {tolerance:.0e})."
            )
        write_files(path.parent, {path.name: draft.read_bytes()})
    return Exported(path, path.stat().st_size, file.runtime, difference)


@checked
def quantize(
    source: str | os.PathLike[str],
    loader: Iterable[Any],
    path: str | os.PathLike[str],
    *,
    samples: PositiveInt = SAMPLES,
) -> Exported:
    """Write an ONNX file with 8 bits per weight and activation, from one that `export` wrote; nothing is trained.

    loader: batches like those of training, but shuffled and not augmented: the ranges of activations are those of the
        first `samples`. Test the new file: some networks lose accuracy.
    """
    source = Path(source)
    path = Path(path)
    check_target(path)
    are_onnx = source.suffix == path.suffix == ONNX
    if not are_onnx or path.resolve() == source.resolve():
        raise FileError(
            f"{source}, {path}: only {ONNX} files can be quantized to 8 bits, and the two files must differ."
        )
    with blaming(f"{source}: onnxruntime cannot open it"):
        original = open_file(source)
    inputs = _first_inputs(loader, samples)

    with blaming(f"{path}: not written"), tempfile.TemporaryDirectory(prefix="dmcp-") as folder:
        draft = Path(folder) / path.name
        _write_int8(source, [by_name(original.names, batch) for batch in inputs], draft)
        quantized = open_file(draft)

        expected = _all_outputs(original, inputs)
        actual = _all_outputs(quantized, inputs)
        difference = float((expected - actual).norm() / expected.norm())
        if not difference < float("inf"):  # also NaN
            raise FileError(f"{path}: not written: its outputs are not finite.")
        write_files(path.parent, {path.name: draft.read_bytes()})
    return Exported(path, path.stat().st_size, quantized.runtime, difference)


# before anything is done


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written before anything is done."""
    if path.is_dir() or path.suffix not in (ONNX, PT2):
        raise FileError(f"{path}: the file name must end in {ONNX} or {PT2}.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise FileError(f"{path}: the folder {path.parent} does not exist or cannot be written to.")
    if path.suffix == ONNX:
        missing = missing_packages()
        if missing:
            raise DmcpError(f"{missing}, or name a {PT2} file, which needs torch only.")


def missing_packages() -> str:
    """Name the packages that ONNX needs and that are not installed, as the beginning of a sentence; empty if none."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"ONNX needs {', '.join(missing)}: {install_command('export')}"


# from the network to a file


def random_like(example: Any, size: int) -> Any:
    """Draw random inputs of the example's shapes for a batch of this size.

    Their numbers are drawn from those of the example: a network made for [0, 1] may overflow on others. If all numbers
    of the example are equal, which may be a placeholder, they are between 0 and 1.
    """
    random = generator(size)

    def draw(leaf: Tensor) -> Tensor:
        shape = (size, *leaf.shape[1:])
        is_placeholder = leaf.is_floating_point() and bool((leaf == leaf.flatten()[:1]).all())
        if is_placeholder:
            return torch.rand(shape, generator=random).to(leaf.dtype)
        numbers = leaf.detach().cpu().flatten()
        return numbers[torch.randint(leaf.numel(), shape, generator=random)]

    return pytree.tree_map_only(Tensor, draw, example)


def record(net: nn.Module, example: Any) -> tuple[ExportedProgram, Any]:
    """Record a network in eval mode as a graph of torch; with the free dims of its inputs, dim 0 of each tensor."""
    example = as_arguments(net, random_like(example, _RECORDED))
    args: Any = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, dict):
        kwargs = example
    elif isinstance(example, tuple):
        args = example
    else:
        args = (example,)

    batch = Dim("batch")
    dims = map_leaves(lambda leaf: {0: batch} if isinstance(leaf, Tensor) else None, kwargs or args)
    with blaming("torch.export cannot take this network", TraceError), silence():
        program = torch.export.export(net, args, kwargs, dynamic_shapes=dims)
        program.module()  # what cannot be run again fails here, for all kinds of files
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program, dims


def write_pt2(net: nn.Module, example: Any, path: Path, note: str | None) -> None:
    """Write the network as a file of torch.export."""
    program, _ = record(net, example)
    buffer = io.BytesIO()  # given a path, torch ends the whole process if the disk is full
    extra_files = None
    if note is not None:
        extra_files = {NOTE: note}
    torch.export.save(program, buffer, extra_files=extra_files)
    path.write_bytes(buffer.getbuffer())


@torch.no_grad()
def write_onnx(net: nn.Module, example: Any, path: Path, note: str | None) -> None:
    """Write the network as an ONNX file whose outputs have the names that the network gives them."""
    program, dims = record(net, example)
    outputs = call_model(net, random_like(example, _RECORDED))
    with blaming(f"This network cannot be written as ONNX (export to {PT2})", TraceError), silence():
        file: Any = torch.onnx.export(
            program, dynamo=True, dynamic_shapes=dims, output_names=_output_names(outputs), verbose=False
        )
    for part in (file.model.graph, *file.model.graph.all_nodes()):
        part.metadata_props.clear()  # torch's notes for its developers: a tenth of the file of a small network
    importlib.import_module("onnx_ir.passes.common").NameFixPass()(file.model)  # names are unique in the whole graph
    if note is not None:
        file.model.metadata_props[NOTE] = note
    file.save(path, external_data=False)


def _output_names(outputs: Any) -> list[str]:
    """Name the tensors of an output: output; output_0, output_1; or by the keys of a dict: heads.1.far"""
    names = []
    for path, leaf in pytree.tree_leaves_with_path(outputs):
        if not isinstance(leaf, Tensor):
            continue
        keys = [_key_text(key) for key in path]
        if not keys:
            names.append("output")
        elif keys[0].isdigit():
            names.append("output_" + ".".join(keys))
        else:
            names.append(".".join(keys))
    return names


def _key_text(key: Any) -> str:
    """The key of a dict, the index of a list or the name of a field, as text."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return ""


def _first_inputs(loader: Iterable[Any], samples: int) -> list[Any]:
    """Take the inputs of the first samples, on the CPU."""
    inputs: list[Any] = []
    left = samples
    for batch in loader:
        inputs.append(_first_samples(input_of(batch), left))
        left -= size_of((inputs[-1],))
        if left <= 0:
            break
    if not inputs or not all(tensor.isfinite().all() for tensor in tensors_in(inputs)):
        raise DataError(
            "To find the ranges of activations, the loader must have batches, and all their values must be finite."
        )
    return inputs


def _first_samples(inputs: Any, count: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[:count].detach().cpu(), inputs)


def _write_int8(source: Path, inputs: list[dict[str, Any]], path: Path) -> None:
    """Quantize a file. Norms are folded into convolutions first; each channel of a weight has a range of its own."""
    quantization = importlib.import_module("onnxruntime.quantization")
    prepare = importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        left = iter(inputs)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    folded = path.with_name(f"folded-{path.name}")
    with silence():
        prepare(str(source), str(folded), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(folded), str(path), Reader(), quant_format=quantization.QuantFormat.QDQ, per_channel=True
        )
    folded.unlink()


# from a file to its outputs


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A file that can be run."""

    runtime: str
    run: Callable[[Any], list[Tensor]]  # inputs as a model gets them -> all tensors of the output, in order
    names: tuple[str, ...] = ()  # of the inputs, in ONNX


def open_file(path: Path, threads: int = 0) -> OpenFile:
    """Open an .onnx file in onnxruntime on the CPU (0 threads: it chooses), or a .pt2 file in torch."""
    plain_file_size(path)  # refuses a pipe or device, whose reading may never end
    if path.suffix == ONNX:
        return _open_onnx(path, threads)
    net = torch.export.load(path).module()
    return OpenFile(f"torch {torch.__version__}", lambda inputs: tensors_in(call_model(net, inputs)))


def _open_onnx(path: Path, threads: int) -> OpenFile:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = threads
    # Idle threads must not spin on cores that the next network needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = tuple(entry.name for entry in session.get_inputs())

    def run(inputs: Any) -> list[Tensor]:
        return [torch.from_numpy(array) for array in session.run(None, by_name(names, inputs))]

    return OpenFile(f"onnxruntime {runtime.__version__}", run, names)


def by_name(names: Iterable[str], inputs: Any) -> dict[str, Any]:
    """Turn the inputs of a model into those of a session: NumPy arrays by name."""
    arrays = [tensor.detach().numpy() for tensor in tensors_in(inputs)]
    return dict(zip(names, arrays, strict=True))


# comparing


@torch.no_grad()
def largest_gap(net: nn.Module, run: Callable[[Any], list[Tensor]], inputs: Sequence[Any]) -> float:
    """Largest difference over all inputs, of each output as a share of its own largest number; inf: other shapes."""
    # A forward may write into its input, so that each gets a copy.
    expected = [tensors_in(call_model(net, copy.deepcopy(example))) for example in inputs]
    actual = [run(copy.deepcopy(example)) for example in inputs]
    if _shapes(expected) != _shapes(actual):
        return float("inf")

    gaps = []
    by_output = zip(zip(*expected, strict=True), zip(*actual, strict=True), strict=True)
    for expected_parts, actual_parts in by_output:
        expected_output = _joined(expected_parts)
        actual_output = _joined(actual_parts)
        largest = expected_output.abs().max() or 1.0
        gaps.append((expected_output - actual_output).abs().max() / largest)
    return float(torch.stack(gaps).max())  # NaN if one is


def _shapes(outputs: Iterable[Iterable[Tensor]]) -> list[list[torch.Size]]:
    return [[tensor.shape for tensor in tensors] for tensors in outputs]


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers of some tensors, (N,) float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _all_outputs(file: OpenFile, inputs: Iterable[Any]) -> Tensor:
    """All numbers that a file gives for some inputs, (N,) float64."""
    return _joined(tensor for example in inputs for tensor in file.run(example))


# other libraries


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Mute what exporters print: what a user must know is in the error."""
    sink = io.StringIO()
    level = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(level)


@contextlib.contextmanager
def blaming(text: str, kind: type[DmcpError] = FileError) -> Iterator[None]:
    """Turn errors of other libraries, each with classes of its own, into one of ours that begins with this text."""
    try:
        yield
    except (DmcpError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        cause: BaseException = error
        while type(cause).__module__.startswith("torch.onnx") and cause.__cause__:  # its text says how to report it
            cause = cause.__cause__
        reason = quote(" ".join(str(cause).split())).rstrip(".:") or "no message"
        raise kind(f"{text}: {type(cause).__name__}: {reason}.") from error
