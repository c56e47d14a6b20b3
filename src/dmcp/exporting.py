"""ONNX, .pt2 and int8 files of a network, each run and compared with it before it is kept."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import io
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from dmcp.batches import generator, input_of, size_of
from dmcp.errors import DataError, DmcpError, FileError, TraceError
from dmcp.modules import call_model, map_leaves, narrow, path_of, tensors_in, unwrap
from dmcp.preflight import check_finite
from dmcp.progress import phase
from dmcp.runtime.io import quote, write_files

NOTE = "input.json"  # the preprocessing: a key in the metadata of ONNX, an extra file in .pt2
TOLERANCE = 1e-4  # what rounding explains, as a share of the largest output
SAMPLES = 512  # that the ranges of int8 activations come from
_BATCHES = (1, 4)  # that are compared
_RECORDED = 2  # torch takes a batch of 1 for a constant
_MAX_ROUNDS, _MIN_ROUNDS, _MAX_SECONDS = 30, 5, 30.0  # of turns of all networks that are timed
_PASSES = 3  # of a turn that are timed
_FAST = 10  # one pass in ten is a fast one
_FINE = 1e-6  # seconds that a clock must tell apart
_CPU = torch.device("cpu")
_FLOATS = {"tensor(float)": torch.float32, "tensor(double)": torch.float64, "tensor(float16)": torch.float16}


class Format(StrEnum):
    """Formats by the suffix of the file."""

    ONNX = ".onnx"
    EXPORTED = ".pt2"  # of torch.export


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written, and how it compares with the network."""

    path: Path
    size_bytes: int
    params: int  # of the network
    runtime: str  # that ran the file, with its version
    difference: float  # largest difference of an output, as a share of the largest number in it
    batches: tuple[int, ...]  # sizes of the batches that were compared


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """An int8 file that was written, and how it compares with the float32 file."""

    path: Path
    size_bytes: int
    samples: int  # that the ranges come from
    runtime: str  # that ran the file, with its version
    difference: float  # root mean square of the outputs' difference, as a share of that of the outputs


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A file that can be run."""

    runtime: str
    run: Callable[[Any], list[Tensor]]  # inputs as a model gets them -> all tensors of the output, in order
    note: str | None  # what the file says under NOTE
    inputs: Mapping[str, str]  # of ONNX: name -> type, like "tensor(float)"


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
    preprocessing: plain data about what is done to an image before; it goes into the file.
    tolerance: largest difference, as a share of the largest output. Beyond it FileError, and what was there stays.
    """
    path = path_of("export", path)
    kind = check_target(path, tolerance)
    with blaming("preprocessing must be plain data that JSON can hold"):
        note = None if preprocessing is None else json.dumps(preprocessing)
    if not tensors_in(example) or not all(tensor.ndim for tensor in tensors_in(example)):
        raise TraceError("The example must hold tensors, and dim 0 of each must be the batch.")
    net = narrow(unwrap(model), {}, {}).cpu().eval().requires_grad_(False)
    inputs = [random_like(example, size) for size in _BATCHES]
    check_finite(net, inputs[-1])
    program, dims = record(net, example)
    with blaming(f"{path}: not written"), tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        new = Path(folder) / path.name
        if kind is Format.ONNX:
            write_onnx(program, dims, new, note)
        else:
            made = io.BytesIO()  # given a path, torch ends the whole process where the disk is full
            torch.export.save(program, made, extra_files=None if note is None else {NOTE: note})
            new.write_bytes(made.getbuffer())
        file = open_file(new)
        difference = largest_gap(net, file.run, inputs)
        if not difference <= tolerance or file.note != note:
            raise FileError(
                f"{path}: not written: in {file.runtime} it is not the same network: its outputs differ by "
                f"{difference:.1e} of the largest one (tolerance {tolerance:.0e}), or its preprocessing is lost."
            )
        write_files(path.parent, {path.name: new.read_bytes()})
    size, params = path.stat().st_size, sum(parameter.numel() for parameter in net.parameters())
    return Exported(
        path=path, size_bytes=size, params=params, runtime=file.runtime, difference=difference, batches=_BATCHES
    )


def check_target(path: Path, tolerance: float = TOLERANCE) -> Format:
    """The format of a file; one that cannot be written is refused before anything is done."""
    if not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise DmcpError(f"The tolerance must be a number above 0 and below 1, not {tolerance!r}.")
    if path.is_dir() or path.suffix not in list(Format):
        raise FileError(f"{path}: name a file whose suffix is {' or '.join(Format)}.")
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no folder {path.parent}: make it, or name another file.")
    if path.suffix == Format.ONNX and (missing := missing_packages()):
        raise DmcpError(f"{missing}, or name a {Format.EXPORTED} file, which needs torch only.")
    return Format(path.suffix)


def missing_packages() -> str:
    """Packages that ONNX needs and that are not installed, as the beginning of a sentence; empty if all are."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    return f'ONNX needs {", ".join(missing)}: pip install "torch-dmcp[export]"' if missing else ""


# timing


@torch.no_grad()
def milliseconds(paths: Sequence[Path], example: Any) -> list[float]:
    """Time of one sample in each file on one thread of the CPU: idle threads of one would disturb the others."""
    example = random_like(example, 1)
    return turn_times([functools.partial(open_file(path, 1).run, example) for path in paths])


def turn_times(
    calls: Sequence[Callable[[], object]], device: torch.device = _CPU, threads: int = 1, rounds: int = _MAX_ROUNDS
) -> list[float]:
    """Milliseconds that each call usually takes: its fast passes, times one factor for all, usual over fast.

    They take turns, so that a machine that is slow for a while is slow for all, and fast passes are hardly disturbed.
    Where one thread does all of the work, its own clock counts, which stands still while others have the processor.
    The first pass of a turn only warms caches, the first turn also loads kernels.
    """
    fine = time.get_clock_info("thread_time").resolution <= _FINE
    now = time.thread_time if device.type == "cpu" and threads == 1 and fine else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    with phase("timing", rounds + 1) as update, contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        for number in range(rounds + 1):
            if number > _MIN_ROUNDS and time.perf_counter() - start > _MAX_SECONDS:
                break
            for call, own in zip(calls, times, strict=True):
                for turn in range(_PASSES + 1):
                    wait(device)
                    before = now()
                    call()
                    wait(device)
                    if number and turn:
                        own.append(1000 * (now() - before))
            update(number + 1)
        update(rounds + 1)
    fast = [sorted(own)[len(own) // _FAST] for own in times]
    slower = median(median(own) / quick for own, quick in zip(times, fast, strict=True))
    return [slower * quick for quick in fast]


def wait(device: torch.device) -> None:
    """Until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize()


# from the network to a file


def random_like(example: Any, size: int) -> Any:
    """Random inputs of the example's shapes for a batch of this size; integers are taken from those in it."""
    random = generator(size)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = (size, *leaf.shape[1:])
        if leaf.is_floating_point():
            return torch.randn(shape, generator=random).to(leaf.dtype)
        return leaf.cpu().flatten()[torch.randint(leaf.numel(), shape, generator=random)]

    return map_leaves(one, example)


def record(net: nn.Module, example: Any) -> tuple[ExportedProgram, Any]:
    """A network in eval mode as torch's graph, and the free dims of its inputs: dim 0 of each tensor."""
    batch, example = Dim("batch"), random_like(example, _RECORDED)
    args: Any = () if isinstance(example, dict) else example if isinstance(example, tuple) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    dims = map_leaves(lambda leaf: {0: batch} if isinstance(leaf, Tensor) else None, kwargs or args)
    with blaming("torch.export cannot take this network", TraceError), silence():
        program = torch.export.export(net, args, kwargs, dynamic_shapes=dims)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program, dims


def write_onnx(program: ExportedProgram, dims: Any, path: Path, note: str | None = None) -> None:
    """A graph of `record` as an ONNX file, which must be alone in its folder."""
    other = f"export to {Format.EXPORTED}"
    for output in program.graph_signature.output_specs:
        if (value := getattr(output.arg, "value", None)) is not None:
            raise TraceError(f"This network returns {value!r} besides tensors, which ONNX cannot hold: {other}.")
    with blaming(f"This network cannot be written as ONNX ({other})", TraceError), silence():
        made: Any = torch.onnx.export(program, dynamo=True, dynamic_shapes=dims, external_data=False, verbose=False)
    for part in (made.model.graph, *made.model.graph.all_nodes()):
        part.metadata_props.clear()  # torch's notes for its developers: a tenth of the file of a small network
    _name_outputs(made.model, program)
    if note is not None:
        made.model.metadata_props[NOTE] = note
    made.save(path, external_data=False)
    if [it.name for it in path.parent.iterdir()] != [path.name]:
        raise FileError(f"{path.name}: too large for one ONNX file: {other}.")


def _name_outputs(model: Any, program: ExportedProgram) -> None:
    """Name the outputs of an ONNX model as the network does; torch names them after ops."""
    spec = program.call_spec.out_spec
    made = [it.arg for it in program.graph_signature.output_specs if it.kind is OutputKind.USER_OUTPUT]
    places, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    paths = [path for (path, _), arg in zip(places, made, strict=True) if isinstance(arg, TensorArgument)]
    outputs = model.graph.outputs if len(model.graph.outputs) == len(paths) else []  # else torch's own names are better
    for value, path in zip(outputs, paths, strict=False):
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path] or ["output"]
        value.name = "output_" * isinstance(next(iter(path), None), pytree.SequenceKey) + ".".join(keys)
    importlib.import_module("onnx_ir.passes.common").NameFixPass()(model)  # names are unique in the whole graph


# from a file to its outputs


def open_file(path: Path, threads: int = 0) -> OpenFile:
    """An .onnx file in onnxruntime on the CPU, 0 threads: its own choice; a .pt2 file in torch."""
    if path.suffix == Format.ONNX:
        runtime = importlib.import_module("onnxruntime")
        settings = runtime.SessionOptions()
        settings.log_severity_level = 3  # errors only
        settings.intra_op_num_threads = threads
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # on cores that the next one needs
        session = runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        inputs = {it.name: it.type for it in session.get_inputs()}
        return OpenFile(
            f"onnxruntime {onnxruntime_version()}",
            lambda x: [*map(torch.from_numpy, session.run(None, by_name(inputs, x)))],
            session.get_modelmeta().custom_metadata_map.get(NOTE),
            inputs,
        )
    extra = {NOTE: ""}
    net = torch.export.load(path, extra_files=extra).module()
    return OpenFile(f"torch {torch.__version__}", lambda x: tensors_in(call_model(net, x)), extra[NOTE] or None, {})


def onnxruntime_version() -> str:
    """Of the one that is installed."""
    return str(importlib.import_module("onnxruntime").__version__)


def by_name(names: Iterable[str], example: Any) -> dict[str, Any]:
    """Inputs of a model as those of a session: NumPy arrays by name."""
    return dict(zip(names, (tensor.detach().numpy() for tensor in tensors_in(example)), strict=True))


@torch.no_grad()
def largest_gap(net: nn.Module, run: Callable[[Any], list[Tensor]], inputs: Sequence[Any]) -> float:
    """Largest difference over all inputs, of each output as a share of its own largest number; inf: other shapes."""
    wanted = [tensors_in(call_model(net, copy.deepcopy(example))) for example in inputs]  # a forward may write into it
    found = [run(copy.deepcopy(example)) for example in inputs]
    if [[it.shape for it in outputs] for outputs in wanted] != [[it.shape for it in outputs] for outputs in found]:
        return float("inf")
    gaps = []
    for sides in zip(zip(*wanted, strict=True), zip(*found, strict=True), strict=True):  # one output each
        one, other = (torch.cat([it.double().flatten() for it in outputs]) for outputs in sides)
        gaps.append((one - other).abs().max() / (one.abs().max() or 1.0))
    return float(torch.stack(gaps).max())  # NaN if one is


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Mute what exporters print: what a user must know is in the error."""
    nowhere, before = io.StringIO(), logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def blaming(text: str, kind: type[DmcpError] = FileError) -> Iterator[None]:
    """Errors of other libraries, each with classes of its own, become one of ours that begins with this text."""
    try:
        yield
    except (DmcpError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise kind(f"{text}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The beginning of another library's message, as a sentence."""
    return f"{type(error).__name__}: {quote(' '.join(str(error).split())).rstrip('.:') or 'no message'}."


# int8


def quantize(
    source: str | os.PathLike[str], loader: Iterable[Any], path: str | os.PathLike[str], *, samples: int = SAMPLES
) -> Quantized:
    """Write an ONNX file with 8 bits per weight and activation, from one that `export` wrote; nothing is trained.

    loader: batches like those of training, but shuffled and not augmented: the ranges of activations are those of the
        first `samples`. Test the new file: some networks lose accuracy.
    """
    source, path = (path_of("quantize", it) for it in (source, path))
    check_target(path)
    if {source.suffix, path.suffix} != {Format.ONNX}:
        raise FileError(f"{source}, {path}: only {Format.ONNX} files can have 8 bits.")
    if path.exists() and source.exists() and path.samefile(source):
        raise FileError(f"{path}: the int8 file is made from this one: name another file.")
    if type(samples) is not int or samples < 1:
        raise DmcpError(f"samples must be an int of at least 1, not {samples!r}.")
    with blaming(f"{source}: onnxruntime cannot open it"):
        before = open_file(source)
    batches = _first_inputs(loader, samples, before.inputs)
    with blaming(f"{path}: not written"), tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        new = Path(folder) / path.name
        _write_int8(source, [by_name(before.inputs, batch) for batch in batches], new)
        after = open_file(new)
        was, now = (
            torch.cat([out.double().flatten() for it in batches for out in file.run(it)]) for file in (before, after)
        )
        difference = float((was - now).norm() / was.norm())
        if not difference < float("inf"):
            raise FileError(f"{path}: not written: its outputs are not finite.")
        write_files(path.parent, {path.name: new.read_bytes()})
    size, seen = path.stat().st_size, sum(size_of((batch,)) for batch in batches)
    return Quantized(path=path, size_bytes=size, samples=seen, runtime=after.runtime, difference=difference)


def _first_inputs(loader: Iterable[Any], samples: int, kinds: Mapping[str, str]) -> list[Any]:
    """The inputs of the first samples, on the CPU; refuses what onnxruntime would take for others, or crash on."""
    found: list[Any] = []
    for batch in loader:
        inputs, room = input_of(batch), samples
        found.append(map_leaves(lambda leaf: leaf[:room].detach().cpu() if isinstance(leaf, Tensor) else leaf, inputs))  # noqa: B023
        for tensor, kind in zip(tensors_in(found[-1]), kinds.values(), strict=False):
            if tensor.dtype != (wanted := _FLOATS.get(kind, tensor.dtype)) or not tensor.isfinite().all():
                raise DataError(f"A batch holds {tensor.dtype}; the file takes finite numbers of {wanted}.")
        samples -= size_of((inputs,))
        if samples <= 0:
            break
    if not found:
        raise DataError("The loader gives no batch to find the ranges of activations with.")
    return found


def _write_int8(source: Path, inputs: list[dict[str, Any]], path: Path) -> None:
    """Norms are folded into convolutions first; each channel of a weight has a range of its own."""
    quantization = importlib.import_module("onnxruntime.quantization")
    prepare = importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        left = iter(inputs)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    folded, kind = path.with_name(f"folded-{path.name}"), quantization.QuantFormat.QDQ
    with silence():
        prepare(str(source), str(folded), skip_symbolic_shape=True)
        quantization.quantize_static(str(folded), str(path), Reader(), quant_format=kind, per_channel=True)
    folded.unlink()
