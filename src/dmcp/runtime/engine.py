"""How a step is computed: precision, memory format, compiling, CUDA graphs, kernels, determinism."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp.errors import TrainingError
from dmcp.runtime.cuda_graphs import Repeated
from dmcp.runtime.distributed import current
from dmcp.settings import Engine, Precision
from dmcp.tracing.modules import modules_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MOST_CHANNELS = 64  # of convolutions that our kernels take
_KERNEL_SIZES = ((1, 1), (3, 3))
_KERNELS_NEED = "they need bfloat16, a GPU that computes in it, channels_last, and no compiling"
_WORTH_KERNELS = 1_000  # steps from which loading our kernels pays, and compiling them on a new machine
_WORTH_COMPILING = {True: 2_000, False: 20_000}  # steps from which compiling a network pays, by whether it is large


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """While entered, forward passes on the device compute in this precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=Precision(precision) is Precision.BFLOAT16)


def resolve(
    engine: Engine,
    device: torch.device,
    *,
    steps: int = 0,
    large: bool = False,
    capturable: bool = True,
    few_channels: bool = False,
) -> ResolvedEngine:
    """Make every choice that the engine leaves open, for a run of so many steps of a small or large network.

    capturable: steps become CUDA graphs by default, since loss and optimizer are ours and there is one process.
    few_channels: the network suits our kernels (`suits_kernels`).
    """
    on_gpu = device.type == "cuda"
    has_bfloat16 = _computes_in_bfloat16(device)

    precision = engine.precision
    if precision is None:
        precision = Precision.BFLOAT16 if has_bfloat16 else Precision.FLOAT32
    channels_last = on_gpu
    if engine.channels_last is not None:
        channels_last = engine.channels_last
    graphs = on_gpu and (capturable if engine.graphs is None else engine.graphs)

    # Our kernels: by default in long runs of networks with few channels. They are tried out only where they are meant.
    in_bfloat16 = has_bfloat16 and precision is Precision.BFLOAT16
    kernels_fit = in_bfloat16 and channels_last and not engine.compile
    if engine.kernels is None:
        worthwhile = kernels_fit and graphs and few_channels and steps >= _WORTH_KERNELS
        kernels = worthwhile and not kernels_refused(device)
    else:
        kernels = engine.kernels and on_gpu
        if kernels:
            _require_kernels(device, kernels_fit)

    compiled = engine.compile
    if compiled is None:
        compiled = on_gpu and not kernels and steps >= _WORTH_COMPILING[large]

    choices = {
        "precision": precision,
        "channels_last": channels_last,
        "graphs": graphs,
        "kernels": kernels,
        "compile": compiled,
        "sync_batchnorm": engine.sync_batchnorm and on_gpu and current().size > 1,
    }
    return ResolvedEngine(**vars(engine) | choices, device=device)


def _require_kernels(device: torch.device, fit: bool) -> None:
    """Raise TrainingError where our kernels were asked for and cannot run."""
    obstacle = _KERNELS_NEED
    if fit:
        obstacle = kernels_refused(device)
    if obstacle:
        raise TrainingError(f"dmcp's kernels cannot run on {device} ({obstacle}): do not turn kernels on.")


@dataclass(frozen=True, kw_only=True)
class ResolvedEngine(Engine):
    """An engine for one device, with nothing left to choose."""

    device: torch.device
    precision: Precision
    compile: bool

    def autocast(self) -> torch.autocast:
        """While entered, forward passes compute in the chosen precision."""
        return autocast(self.device, self.precision)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled once for each shape of its inputs if that was chosen."""
        if not self.compile:
            return function
        return torch.compile(function, dynamic=False)

    def repeated(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The training step, replayed as a CUDA graph if that was chosen."""
        if self.graphs:
            return Repeated(step)
        return step

    def laid_out(self, x: Any) -> Any:
        """The input of a network, in the chosen memory format."""
        if not self.channels_last:
            return x
        return tree_map_only(Tensor, in_channels_last, x)

    @contextlib.contextmanager
    def running(self, *models: nn.Module) -> Iterator[None]:
        """While entered, torch's global switches and the memory format of the models' weights are the chosen ones."""
        with contextlib.ExitStack() as undo:
            if self.deterministic:
                _deterministic(undo)
            if self.device.type == "cuda":
                _cuda_switches(undo, self.tf32, benchmark=not self.deterministic)
            if self.kernels:
                from dmcp.runtime.kernels import OwnKernels  # late: there may be no Triton

                undo.enter_context(OwnKernels())
            for model in models:
                if self.sync_batchnorm:
                    _sync_batchnorm(model, undo)
                if self.channels_last:
                    _use_channels_last(model, undo)
            yield


def _computes_in_bfloat16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _sync_batchnorm(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Let the BatchNorms of a model use the statistics of all ranks."""
    for module in modules_of(model):
        kind = type(module)
        if kind in _BATCH_NORMS:
            module.__class__ = nn.SyncBatchNorm  # the same parameters, buffers and attributes, but for one
            vars(module)["process_group"] = None
            undo.callback(setattr, module, "__class__", kind)
            undo.callback(vars(module).pop, "process_group")


def suits_kernels(model: nn.Module) -> bool:
    """Whether a model gets our kernels by default: most of its convolutions have few channels.

    Other models are compiled instead.
    """
    convs = [module for module in modules_of(model) if isinstance(module, nn.Conv2d)]
    suited = 0
    for conv in convs:
        channels = max(conv.weight.shape[:2])
        suited += conv.groups == 1 and channels <= _MOST_CHANNELS and conv.kernel_size in _KERNEL_SIZES
    return 2 * suited > len(convs)


@functools.cache
def kernels_refused(device: torch.device) -> str:
    """Why our kernels cannot run on a GPU; an empty text if they can. They are tried out once."""
    try:
        from dmcp.runtime.kernels import try_out

        try_out(device)
    except Exception as error:  # no Triton, no C compiler, a GPU that it does not know
        lines = str(error).splitlines()
        if not lines:
            return type(error).__name__
        return lines[0]
    return ""


def best_device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


# what is switched and put back


def in_channels_last(tensor: Tensor) -> Tensor:
    """A tensor of four dims in the channels-last memory format; others as they are."""
    if tensor.ndim != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def _use_channels_last(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Store the parameters of four dims in the channels-last memory format, in place."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            undo.callback(_restride, parameter, parameter.stride())
            parameter.data = in_channels_last(parameter.data)


@torch.no_grad()
def _restride(tensor: Tensor, stride: tuple[int, ...]) -> None:
    """Store a tensor with these strides, in place."""
    if tensor.stride() != stride:
        restrided = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor.data = restrided.copy_(tensor)


def _deterministic(undo: contextlib.ExitStack) -> None:
    undo.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:  # without it cuBLAS refuses
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        undo.callback(os.environ.pop, "CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(True, warn_only=True)


def _cuda_switches(undo: contextlib.ExitStack, tf32: bool, benchmark: bool) -> None:
    cudnn = torch.backends.cudnn
    undo.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
    with contextlib.suppress(RuntimeError):  # the user has set torch's newer switches, which then stay as they are
        matmul_precision = torch.get_float32_matmul_precision()
        allow_tf32 = cudnn.allow_tf32
        undo.callback(torch.set_float32_matmul_precision, matmul_precision)
        undo.callback(setattr, cudnn, "allow_tf32", allow_tf32)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn.allow_tf32 = tf32
    cudnn.benchmark = benchmark  # shapes stay the same from step to step
