"""ONNX, .pt2 and int8 files of a network."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import itertools
import json
import logging
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from dmcp.batches import check_yields, generator, input_of, size_of
from dmcp.errors import DataError, DmcpError, FileError, TraceError
from dmcp.modules import call_model, map_leaves, narrow, path_of, tensors_in, unwrap
from dmcp.preflight import check_finite

NOTE = "input.json"  # the preprocessing: its key in the metadata of ONNX, its name among the extra files of .pt2
PASSES = 50  # that are timed
TOLERANCE = 1e-4  # what rounding explains, as a share of the largest output
_BATCHES = (1, 4)  # that are compared; the batch that is recorded has another size
_RECORDED = 2  # torch takes a batch of 1 for a constant
_SCRIPT = (".pt", ".pth", ".ts", ".torchscript")  # what people call files of TorchScript
_LONGEST = 300  # letters of what torch says
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Format(StrEnum):
    """What is written, by the ending of its name."""

    ONNX = ".onnx"
    EXPORTED = ".pt2"  # of torch.export


_PACKAGES = {Format.ONNX: ("onnx", "onnxscript", "onnxruntime"), Format.EXPORTED: ()}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written, and what came out when it was run."""

    path: Path
    size_bytes: int
    params: int  # of the network
    runtime: str  # what has run the file, with its version
    difference: float  # largest one between an output of the file and of the network, as a share of the largest output
    batches: tuple[int, ...]  # sizes of the batches that were compared


@dataclass(frozen=True, eq=False)
class Runtime:
    """A file that was opened to be run."""

    name: str
    run: Callable[[Any], list[Tensor]]  # inputs as a model gets them -> all tensors of the output, in order
    note: str | None  # what the file says under NOTE
    inputs: list[str] = field(default_factory=list)  # their names, of ONNX
    kinds: list[str] = field(default_factory=list)  # and their numbers, as it writes them: "tensor(float)"


def export(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    preprocessing: Mapping[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> Exported:
    """Write the network in eval mode to a file, .onnx or .pt2, and run that beside it. The model is not changed.

    example: one input as the model gets it: a tensor, a tuple (positional) or a dict (keyword arguments). Dim 0 of each
        tensor is the batch, of any size; the other dims stay what they are. Its integers should be valid ones.
    preprocessing: plain data about what is done to an image before; it goes into the file.
    tolerance: largest difference, as a share of the largest output. Beyond it FileError, and what was there stays.
    """
    path = path_of("export", path)
    kind = check_target(path, tolerance)
    try:
        note = None if preprocessing is None else json.dumps(preprocessing)
    except (TypeError, ValueError) as error:
        raise FileError(f"preprocessing must be plain data, which JSON can hold: {error}.") from None
    if not tensors_in(example) or not all(tensor.ndim for tensor in tensors_in(example)):
        raise TraceError("The example must hold tensors, and dim 0 of each must be the batch.")
    net = narrow(unwrap(model), {}, {}).cpu().eval().requires_grad_(False)
    drawn = [_draw(example, size) for size in _BATCHES]
    check_finite(net, drawn[-1])
    program, dims = record(net, example)
    with staged(path) as new:
        _WRITE[kind](program, dims, new, note)
        runtime, difference = _try(kind, new, net, drawn)
        if not difference <= tolerance:
            raise FileError(
                f"{path}: not written: in {runtime.name} it is not the same network, its outputs differ by "
                f"{difference:.1e} of the largest one, more than the tolerance of {tolerance:.0e}."
            )
        if runtime.note != note:
            raise FileError(f"{path}: not written: {runtime.name} does not find the preprocessing in it.")
        size_bytes = new.stat().st_size
    return Exported(
        path=path,
        size_bytes=size_bytes,
        params=sum(parameter.numel() for parameter in net.parameters()),
        runtime=runtime.name,
        difference=difference,
        batches=_BATCHES,
    )


def check_target(path: Path, tolerance: float = TOLERANCE) -> Format:
    """What the file will be; refuse one that cannot be written, before anything is done."""
    if not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise DmcpError(f"The tolerance must be a number above 0 and below 1, not {tolerance!r}.")
    if path.is_dir():
        raise FileError(f"{path} is a folder: name the file in it, like {path / 'model.onnx'}.")
    if path.suffix not in list(Format):
        script = " (TorchScript, which torch has given up, is not written)" if path.suffix in _SCRIPT else ""
        raise FileError(f"{path}: its ending must say what it is to be: {' or '.join(Format)}{script}.")
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no folder {path.parent}: make it, or name another file.")
    kind = Format(path.suffix)
    if missing := missing_packages(kind):
        raise DmcpError(f"{missing}, or name a file with {Format.EXPORTED}, which needs torch only.")
    return kind


def missing_packages(kind: Format = Format.ONNX) -> str:
    """Which packages such files need that are not installed, and how they are; empty if all are."""
    missing = [name for name in _PACKAGES[kind] if importlib.util.find_spec(name) is None]
    verb = "is" if len(missing) == 1 else "are"
    return f'{", ".join(missing)} {verb} not installed: pip install "torch-dmcp[export]"' if missing else ""


@torch.no_grad()
def milliseconds(paths: Sequence[Path], example: Any) -> list[float]:
    """Time of one sample in each file's runtime, on this machine's CPU: the fastest of some passes.

    They are taken in turn, so that other load hits all files alike.
    """
    sample = _draw(example, 1)
    runtimes = [_OPEN[check_target(path)](path) for path in paths]
    times: list[list[float]] = [[] for _ in runtimes]
    for _ in range(1 + PASSES):
        for runtime, own in zip(runtimes, times, strict=True):
            start = time.perf_counter()
            runtime.run(sample)
            own.append(1000 * (time.perf_counter() - start))
    return [min(own[1:]) for own in times]  # the first pass also prepares


# from the network to a file


def _draw(example: Any, size: int) -> Any:
    """Random inputs of the example's shapes for a batch of this size; whole numbers are drawn from those in it."""
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
    """A network in eval mode as torch's graph, and which dims of its inputs are free: dim 0 of each tensor."""
    batch, example = Dim("batch"), _draw(example, _RECORDED)
    args: Any = () if isinstance(example, dict) else example if isinstance(example, tuple) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    dims = map_leaves(lambda leaf: {0: batch} if isinstance(leaf, Tensor) else None, kwargs or args)
    try:
        with silence():
            program = torch.export.export(net, args, kwargs, dynamic_shapes=dims)
    except Exception as error:  # whatever a forward, or torch in it, may raise
        raise TraceError(f"torch.export cannot take this network: {reason(error)} See docs/export.md.") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program, dims


def _refuse_plain(program: ExportedProgram) -> None:
    """Refuse outputs that are numbers or words of Python; torch does, but without naming them."""
    for output in program.graph_signature.output_specs:
        value = getattr(output.arg, "value", None)  # of what is no tensor
        if value is not None:
            raise TraceError(
                f"This network gives {value!r} besides tensors, and ONNX has no place for it: leave it out of what "
                f"forward returns, or export to {Format.EXPORTED}."
            )


def write_onnx(program: ExportedProgram, dims: Any, path: Path, note: str | None = None) -> None:
    """A graph of `record` as a file of ONNX, which must be alone in its folder."""
    _refuse_plain(program)
    try:
        with silence():
            made: Any = torch.onnx.export(program, dynamo=True, dynamic_shapes=dims, external_data=False, verbose=False)
    except Exception as error:
        raise TraceError(
            f"This network cannot be written as ONNX: {reason(error)} {Format.EXPORTED} may do: see docs/export.md."
        ) from error
    for part in (made.model.graph, *made.model.graph.all_nodes()):
        part.metadata_props.clear()  # torch's notes for its developers: a tenth of the file of a small network
    _name_ends(made.model.graph, program)
    if note is not None:
        made.model.metadata_props[NOTE] = note
    made.save(path, external_data=False)
    if [it.name for it in path.parent.iterdir()] != [path.name]:
        raise FileError(f"{path.name}: too large for one file of ONNX: give one with {Format.EXPORTED}.")


def _name_ends(graph: Any, program: ExportedProgram) -> None:
    """Name what goes into a graph of ONNX and what comes out as the network does; torch names outputs after ops."""
    given = [it.arg for it in program.graph_signature.input_specs if it.kind is InputKind.USER_INPUT]
    made = [it.arg for it in program.graph_signature.output_specs if it.kind is OutputKind.USER_OUTPUT]
    places = _output_names(program.call_spec.out_spec)
    outputs = [name for name, arg in zip(places, made, strict=True) if isinstance(arg, TensorArgument)]
    inputs = [arg.name for arg in given if isinstance(arg, TensorArgument)]  # numbers are constants in the file
    ends = [*graph.outputs, *graph.inputs]
    if (len(graph.outputs), len(graph.inputs), len({*ends})) != (len(outputs), len(inputs), len(outputs + inputs)):
        return  # more or fewer than the network has: torch's own names are better than wrong ones
    names = _unique([*outputs, *inputs])
    inner = [value for node in graph.all_nodes() for value in node.outputs] + [*graph.initializers.values()]
    for number, value in enumerate([*ends, *inner]):  # first out of the way: names are unique in the whole graph
        if value in ends or value.name in names:
            value.name = f"_{number}_{value.name}"
    for value, name in zip(ends, names, strict=True):
        value.name = name


def _output_names(spec: Any) -> list[str]:
    """A name for each place in what a network returns: keys joined with dots, output_0 in a tuple, output alone."""
    found, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    names = []
    for path, _ in found:
        first, *parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path] or [
            ""
        ]
        numbered = bool(path) and isinstance(path[0], pytree.SequenceKey)
        names.append(".".join([f"output_{first}" if numbered else first or "output", *parts]))
    return names


def _unique(names: Sequence[str]) -> list[str]:
    """The same names; one that is taken gets a number."""
    found: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in itertools.count(2))
        found.append(next(it for it in itertools.chain([name], others) if it not in found))
    return found


def _write_exported(program: ExportedProgram, dims: Any, path: Path, note: str | None) -> None:
    made = io.BytesIO()  # given a path, torch ends the whole process where the disk is full
    torch.export.save(program, made, extra_files=None if note is None else {NOTE: note})
    path.write_bytes(made.getbuffer())


_WRITE = {Format.ONNX: write_onnx, Format.EXPORTED: _write_exported}


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A name in a folder of its own; what is written there takes the place of `path` if nothing goes wrong."""
    try:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
            new = Path(folder) / path.name
            yield new
            with new.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(new, path)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}.") from error


# from a file to its outputs


def _try(kind: Format, path: Path, net: nn.Module, drawn: Sequence[Any]) -> tuple[Runtime, float]:
    """Open the file and run it: how far its outputs are from the network's."""
    try:
        runtime = _OPEN[kind](path)
        return runtime, largest_gap(net, runtime.run, drawn)
    except Exception as error:  # each runtime has errors of its own
        raise FileError(f"{path.name}: not written: it was made, but cannot be run: {reason(error)}") from error


def open_onnx(path: Path) -> Runtime:
    """A file of ONNX in onnxruntime, on the CPU."""
    session = open_session(path)
    names, kinds = ([getattr(it, fact) for it in session.get_inputs()] for fact in ("name", "type"))
    note = session.get_modelmeta().custom_metadata_map.get(NOTE)

    def run(example: Any) -> list[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, named(names, example))]

    return Runtime(f"onnxruntime {onnxruntime_version()}", run, note, names, kinds)


def onnxruntime_version() -> str:
    """Of the one that is installed."""
    return str(importlib.import_module("onnxruntime").__version__)


def open_session(path: Path, options: Mapping[str, str] | None = None, threads: int = 0) -> Any:
    """A file of ONNX as a session of onnxruntime on the CPU, with options as it names them; 0 threads: as it likes."""
    runtime = importlib.import_module("onnxruntime")
    settings = runtime.SessionOptions()
    settings.log_severity_level = 3  # errors only
    settings.intra_op_num_threads = threads
    for name, value in (options or {}).items():
        settings.add_session_config_entry(name, value)
    return runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def named(names: Sequence[str], example: Any) -> dict[str, Any]:
    """Inputs as a model gets them, as a session gets them: by name, in numpy."""
    return dict(zip(names, (tensor.detach().numpy() for tensor in tensors_in(example)), strict=True))


def _open_exported(path: Path) -> Runtime:
    found = {NOTE: ""}
    net = torch.export.load(path, extra_files=found).module()
    return Runtime(
        f"torch {torch.__version__}", lambda example: tensors_in(call_model(net, example)), found[NOTE] or None
    )


_OPEN = {Format.ONNX: open_onnx, Format.EXPORTED: _open_exported}


@torch.no_grad()
def largest_gap(net: nn.Module, run: Callable[[Any], list[Tensor]], drawn: Sequence[Any]) -> float:
    """Largest difference over all batches, of each output as a share of its own largest number; inf: other shapes."""
    wanted = [tensors_in(call_model(net, copy.deepcopy(example))) for example in drawn]  # a forward may write into it
    found = [run(copy.deepcopy(example)) for example in drawn]
    if [[it.shape for it in outputs] for outputs in wanted] != [[it.shape for it in outputs] for outputs in found]:
        return float("inf")
    shares = []
    for expected, got in zip(zip(*wanted, strict=True), zip(*found, strict=True), strict=True):  # one output each
        one, other = (torch.cat([it.double().flatten() for it in outputs]) for outputs in (expected, got))
        shares.append((one - other).abs().max() / (one.abs().max() or 1.0))
    return float(torch.stack(shares).max())  # NaN if one is


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep torch from talking about its own code: what a person must know is in the error."""
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(before)


def reason(error: Exception) -> str:
    """The beginning of what torch says, as a sentence; the rest is for its developers."""
    words = " ".join(_COLOURS.sub("", str(error)).split())
    told = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} …"
    return f"{type(error).__name__}: {told.rstrip('.:') or 'no more is known'}."


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


def quantize(
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
