"""How a step is computed: precision, memory format, compiling, CUDA graphs, kernels, determinism."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
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

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # parameter groups -> optimizer

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NARROW, _KERNELS = 64, ((1, 1), (3, 3))  # channels and sizes of convolutions that our kernels take
_NEEDED = "they need bfloat16, a GPU that computes in it, channels_last, and no compiling"
_WORTH_KERNELS = 1_000  # steps from which it pays to load our kernels, and to compile them on a new machine
_WORTH_COMPILING = {True: 2_000, False: 20_000}  # steps from which compiling a large or a small network pays


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """While entered, forward passes on the device compute in this precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=Precision(precision) is Precision.BFLOAT16)


def resolve(
    engine: Engine,
    device: torch.device,
    *,
    steps: int = 0,
    large: bool = False,
    plain: bool = True,
    suited: bool = False,
) -> ResolvedEngine:
    """Make every choice that the engine leaves open, for a run of so many steps of a small or large network.

    plain: no loss or optimizer of the user's own, and one process. suited: see `suits_kernels`.
    """
    gpu, precision = device.type == "cuda", _precision(engine, device)
    last = gpu if engine.channels_last is None else engine.channels_last
    graphs = gpu and (plain if engine.graphs is None else engine.graphs)
    fit = _computes_in_half(device) and last and precision is Precision.BFLOAT16 and not engine.compile
    meant = fit and graphs and suited and steps >= _WORTH_KERNELS
    kernels = gpu and (meant if engine.kernels is None else engine.kernels)
    if kernels and (refused := kernels_refused(device) if fit else _NEEDED):
        if engine.kernels:
            raise TrainingError(f"Own kernels cannot run on {device} ({refused}): leave kernels out.")
        kernels = False
    compiled = gpu and not kernels and steps >= _WORTH_COMPILING[large] if engine.compile is None else engine.compile
    chosen = {"precision": precision, "channels_last": last, "graphs": graphs, "kernels": kernels, "compile": compiled}
    chosen["sync_batchnorm"] = engine.sync_batchnorm and gpu and current().size > 1
    return ResolvedEngine(**vars(engine) | chosen, device=device)


def _precision(engine: Engine, device: torch.device) -> Precision:
    return engine.precision or (Precision.BFLOAT16 if _computes_in_half(device) else Precision.FLOAT32)


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
        """The function, compiled if that was chosen; once for each shape that it is given."""
        return torch.compile(function, dynamic=False) if self.compile else function

    def repeated(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A training step, replayed as a CUDA graph if that was chosen."""
        return Repeated(step) if self.graphs else step

    def laid_out(self, x: Any) -> Any:
        """The input of a network in the chosen memory layout."""
        return tree_map_only(Tensor, _channels_last, x) if self.channels_last else x

    @contextlib.contextmanager
    def running(self, *models: nn.Module) -> Iterator[None]:
        """While entered, torch's global switches and the layout of the models' weights are the chosen ones."""
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


def _computes_in_half(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _sync_batchnorm(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Let the BatchNorms of a model use the statistics of all ranks."""
    for module in modules_of(model):
        if (kind := type(module)) in _BATCH_NORMS:
            module.__class__ = nn.SyncBatchNorm  # the same parameters, buffers and attributes, but for one
            vars(module)["process_group"] = None
            undo.callback(setattr, module, "__class__", kind)
            undo.callback(vars(module).pop, "process_group")


def suits_kernels(model: nn.Module) -> bool:
    """Whether a model gets our kernels by default: most convolutions have few channels. Others are compiled instead."""
    convs = [it for it in modules_of(model) if isinstance(it, nn.Conv2d)]
    few = [it for it in convs if it.groups == 1 and max(it.weight.shape[:2]) <= _NARROW and it.kernel_size in _KERNELS]
    return 2 * len(few) > len(convs)


@functools.cache
def kernels_refused(device: torch.device) -> str:
    """Why our kernels cannot run on a GPU; "" if they can. Tried once."""
    try:
        from dmcp.runtime.kernels import try_out

        try_out(device)
    except Exception as error:  # no Triton, no C compiler, a GPU that it does not know
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def best_device() -> torch.device:
    """A GPU if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


# optimizers


def sgd(groups: Any, lr: float, momentum: float, nesterov: bool, device: torch.device) -> torch.optim.SGD:
    """SGD; on a GPU one kernel with its learning rate there and momentum from zero, so that a graph can hold it."""
    gpu = device.type == "cuda"
    rate: Any = torch.tensor(lr, device=device) if gpu else lr
    optimizer = torch.optim.SGD(groups, rate, momentum, nesterov=nesterov, fused=gpu or None)
    if momentum:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def make_optimizer(make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What the function makes of the groups; TrainingError if that is no optimizer of their parameters."""
    made: Any = make(groups) if callable(make) else None
    theirs = made.param_groups if isinstance(made, torch.optim.Optimizer) else []
    wanted, found = ({id(it) for group in each for it in group["params"]} for each in (groups, theirs))
    if wanted != found:
        raise TrainingError("optimizer must make a torch.optim.Optimizer of all groups, as torch.optim.AdamW does.")
    return made  # type: ignore[no-any-return]


def rate_shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates of a new optimizer's groups, relative to that of the schedule.

    The optimizer's default stands for the schedule's. If no group has it, the highest rate does, so that no group is
    faster than the settings say.
    """
    rates, usual = [float(group["lr"]) for group in optimizer.param_groups], optimizer.defaults.get("lr")
    base = float(usual) if usual and usual in rates else max(rates)
    return [rate / base if base else 1.0 for rate in rates]


def set_lr(optimizer: torch.optim.Optimizer, lr: float, shares: Sequence[float] = ()) -> None:
    """The learning rate of the next step: of all parameters, or of each group its share of it."""
    groups = optimizer.param_groups
    for group, share in zip(groups, shares or [1.0] * len(groups), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * share)
        else:
            group["lr"] = lr * share


# what is switched and put back


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


@torch.no_grad()
def _use_channels_last(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Store the parameters of four dims in this layout, in place."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            undo.callback(_restride, parameter, parameter.stride())
            parameter.data = _channels_last(parameter.data)


@torch.no_grad()
def _restride(tensor: Tensor, stride: tuple[int, ...]) -> None:
    if tensor.stride() != stride:
        there = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor.data = there.copy_(tensor)


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
        matmul, conv = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        undo.callback(torch.set_float32_matmul_precision, matmul)
        undo.callback(setattr, cudnn, "allow_tf32", conv)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn.allow_tf32 = tf32
    cudnn.benchmark = benchmark  # shapes stay the same from step to step
