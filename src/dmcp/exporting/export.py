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
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from dmcp.arguments import PositiveInt, checked
from dmcp.errors import DataError, DmcpError, FileError, TraceError
from dmcp.runtime.batches import generator, input_of, size_of
from dmcp.runtime.io import plain_file_size, quote, write_files
from dmcp.runtime.progress import phase
from dmcp.tracing.modules import call_model, map_leaves, narrow, tensors_in, unwrap, without_autocast

ONNX, PT2 = ".onnx", ".pt2"
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


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how it compares with what it was made from."""

    path: Path
    size_bytes: int
    runtime: str  # that ran the file, with its version
    difference: float  # largest one of an output, as a share of the largest number in it; of int8, root mean squares


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A file that can be run."""

    runtime: str
    run: Callable[[Any], list[Tensor]]  # inputs as a model gets them -> all tensors of the output, in order
    names: tuple[str, ...] = ()  # of the inputs, in ONNX


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
    preprocessing: plain data about what is done to an image before; it goes into the file.
    tolerance: largest difference, as a share of the largest output. Beyond it FileError, and what was there stays.
    """
    path = Path(path)
    check_target(path)
    with blaming("preprocessing must be plain data that JSON can hold"):
        note = None if preprocessing is None else json.dumps(preprocessing)
    net = narrow(unwrap(model), {}, {}).cpu().eval().requires_grad_(False)
    with blaming(f"{path}: not written"), tempfile.TemporaryDirectory(prefix="dmcp-") as folder:
        new = Path(folder) / path.name
        (write_onnx if path.suffix == ONNX else write_pt2)(net, example, new, note)
        file = open_file(new)
        difference = largest_gap(net, file.run, [random_like(example, size) for size in _BATCHES])
        if not difference <= tolerance:
            raise FileError(
                f"{path}: not written: in {file.runtime} it is not the same network: its outputs differ by "
                f"{difference:.1e} of the largest one (tolerance {tolerance:.0e})."
            )
        write_files(path.parent, {path.name: new.read_bytes()})
    return Exported(path, path.stat().st_size, file.runtime, difference)


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written before anything is done."""
    if path.is_dir() or path.suffix not in (ONNX, PT2):
        raise FileError(f"{path}: name a file whose suffix is {ONNX} or {PT2}.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise FileError(f"{path}: there is no folder {path.parent} to write to: make it, or name another file.")
    if path.suffix == ONNX and (missing := missing_packages()):
        raise DmcpError(f"{missing}, or name a {PT2} file, which needs torch only.")


def missing_packages() -> str:
    """Packages that ONNX needs and that are not installed, as the beginning of a sentence; empty if all are."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    return f'ONNX needs {", ".join(missing)}: pip install "torch-dmcp[export]"' if missing else ""


# timing


@without_autocast
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
    """Wait until a GPU has done what it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# from the network to a file


def random_like(example: Any, size: int) -> Any:
    """Random inputs of the example's shapes for a batch of this size.

    Their numbers are drawn from those of the example: a network made for [0, 1] may overflow on others. In place of an
    example of one number, which may be a placeholder, they are between 0 and 1.
    """
    random = generator(size)

    def one(leaf: Tensor) -> Tensor:
        shape = (size, *leaf.shape[1:])
        if leaf.is_floating_point() and bool((leaf == leaf.flatten()[:1]).all()):
            return torch.rand(shape, generator=random).to(leaf.dtype)
        return leaf.detach().cpu().flatten()[torch.randint(leaf.numel(), shape, generator=random)]

    return pytree.tree_map_only(Tensor, one, example)


def record(net: nn.Module, example: Any) -> tuple[ExportedProgram, Any]:
    """A network in eval mode as torch's graph, and the free dims of its inputs: dim 0 of each tensor."""
    batch, example = Dim("batch"), random_like(example, _RECORDED)
    args: Any = () if isinstance(example, dict) else example if isinstance(example, tuple) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    dims = map_leaves(lambda leaf: {0: batch} if isinstance(leaf, Tensor) else None, kwargs or args)
    with blaming("torch.export cannot take this network", TraceError), silence():
        program = torch.export.export(net, args, kwargs, dynamic_shapes=dims)
        program.module()  # what cannot be run again fails here, for all kinds of files
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program, dims


def write_pt2(net: nn.Module, example: Any, path: Path, note: str | None) -> None:
    """The network as a file of torch.export."""
    made = io.BytesIO()  # given a path, torch ends the whole process where the disk is full
    torch.export.save(record(net, example)[0], made, extra_files=None if note is None else {NOTE: note})
    path.write_bytes(made.getbuffer())


@torch.no_grad()
def write_onnx(net: nn.Module, example: Any, path: Path, note: str | None) -> None:
    """The network as an ONNX file, whose outputs are named as the network does."""
    program, dims = record(net, example)
    names = _output_names(call_model(net, random_like(example, _RECORDED)))
    with blaming(f"This network cannot be written as ONNX (export to {PT2})", TraceError), silence():
        made: Any = torch.onnx.export(program, dynamo=True, dynamic_shapes=dims, output_names=names, verbose=False)
    for part in (made.model.graph, *made.model.graph.all_nodes()):
        part.metadata_props.clear()  # torch's notes for its developers: a tenth of the file of a small network
    importlib.import_module("onnx_ir.passes.common").NameFixPass()(made.model)  # names are unique in the whole graph
    if note is not None:
        made.model.metadata_props[NOTE] = note
    made.save(path, external_data=False)


def _output_names(outputs: Any) -> list[str]:
    """output; output_0, output_1; or by the keys of a dict: heads.1.far"""
    found = []
    for path, leaf in pytree.tree_leaves_with_path(outputs):
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path] or ["output"]
        if isinstance(leaf, Tensor):
            found.append("output_" * keys[0].isdigit() + ".".join(keys))
    return found


# from a file to its outputs


def open_file(path: Path, threads: int = 0) -> OpenFile:
    """An .onnx file in onnxruntime on the CPU, 0 threads: its own choice; a .pt2 file in torch."""
    plain_file_size(path)  # refuses a pipe or device, whose reading may never end
    if path.suffix == ONNX:
        runtime = importlib.import_module("onnxruntime")
        settings = runtime.SessionOptions()
        settings.log_severity_level = 3  # errors only
        settings.intra_op_num_threads = threads
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # on cores that the next one needs
        session = runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        names = tuple(it.name for it in session.get_inputs())
        return OpenFile(
            f"onnxruntime {runtime.__version__}",
            lambda x: [*map(torch.from_numpy, session.run(None, by_name(names, x)))],
            names,
        )
    net = torch.export.load(path).module()
    return OpenFile(f"torch {torch.__version__}", lambda x: tensors_in(call_model(net, x)))


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
        cause: BaseException = error
        while type(cause).__module__.startswith("torch.onnx") and cause.__cause__:  # torch's says how to report it
            cause = cause.__cause__
        reason = quote(" ".join(str(cause).split())).rstrip(".:") or "no message"
        raise kind(f"{text}: {type(cause).__name__}: {reason}.") from error


# int8


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
    source, path = Path(source), Path(path)
    check_target(path)
    if {source.suffix, path.suffix} != {ONNX} or path.resolve() == source.resolve():
        raise FileError(f"{source}, {path}: only {ONNX} files can have 8 bits, and the two must differ.")
    with blaming(f"{source}: onnxruntime cannot open it"):
        before = open_file(source)
    batches = _first_inputs(loader, samples)
    with blaming(f"{path}: not written"), tempfile.TemporaryDirectory(prefix="dmcp-") as folder:
        new = Path(folder) / path.name
        _write_int8(source, [by_name(before.names, batch) for batch in batches], new)
        after = open_file(new)
        was, now = (torch.cat([y.double().flatten() for x in batches for y in it.run(x)]) for it in (before, after))
        difference = float((was - now).norm() / was.norm())
        if not difference < float("inf"):
            raise FileError(f"{path}: not written: its outputs are not finite.")
        write_files(path.parent, {path.name: new.read_bytes()})
    return Exported(path, path.stat().st_size, after.runtime, difference)


def _first_inputs(loader: Iterable[Any], samples: int) -> list[Any]:
    """The inputs of the first samples, on the CPU."""
    found: list[Any] = []
    for batch in loader:
        found.append(pytree.tree_map_only(Tensor, lambda it: it[:samples].detach().cpu(), input_of(batch)))  # noqa: B023
        samples -= size_of((found[-1],))
        if samples <= 0:
            break
    if not found or not all(tensor.isfinite().all() for tensor in tensors_in(found)):
        raise DataError("The ranges of activations need a loader with batches, all of finite numbers.")
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
