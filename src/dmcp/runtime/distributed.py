"""One training in several processes (torch.distributed under torchrun)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from dmcp.errors import RankError


@dataclass(frozen=True)
class World:
    """Which of the processes this one is."""

    rank: int = 0
    size: int = 1  # of the process group
    local: int = 0  # rank on this machine, and number of the GPU

    @property
    def first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


SINGLE_PROCESS = World()
_joined = False  # whether the process group is ours to destroy


def join(device: str = "") -> World:
    """Join the process group of the launcher; one that exists already is used as it is."""
    global _joined
    if os.environ.get("WORLD_SIZE", "1") != "1" and not dist.is_initialized():
        try:
            backend = _choose_backend(device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
            dist.init_process_group(backend)
        except (KeyError, RuntimeError, ValueError) as error:
            raise RankError(f"The ranks did not meet ({_reason(error)}): start them with torchrun.") from error
        _joined = True
    return current()


def current() -> World:
    """The rank of this process in its process group, if there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return SINGLE_PROCESS
    rank = dist.get_rank()
    return World(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", rank)))


def leave() -> None:
    """Destroy the process group if `join` has created it."""
    global _joined
    if _joined and dist.is_initialized():
        dist.destroy_process_group()
    _joined = False


@torch.no_grad()
def mean_gradients(parameters: Iterable[Tensor], samples: int, world: World) -> None:
    """Turn gradients, which are means over the samples of this rank, into means over those of all ranks."""
    if world.size == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for group in _grouped(gradients):
        dtype = _dtype_of_sums(group[0])
        count = group[0].new_ones(1, dtype=dtype)  # becomes the number of samples of all ranks
        sums = torch.cat([*(gradient.reshape(-1).to(dtype) for gradient in group), count])
        if samples:
            sums.mul_(samples)
        else:
            sums.zero_()  # the mean of no samples is not a number, and must not count
        _run(dist.all_reduce, sums, world)
        means = sums[:-1].div_(sums[-1])
        torch._foreach_copy_(group, _unflatten_dense_tensors(means, group))  # type: ignore[no-untyped-call]


@torch.no_grad()
def mean_values(values: Tensor, samples: Tensor | int, world: World) -> Tensor:
    """The mean over all ranks, weighted by their samples (which broadcast to the values)."""
    if world.size == 1:
        return values.detach()
    wide = values.to(_dtype_of_sums(values))
    weights = torch.zeros_like(wide) + samples
    weighted = torch.where(weights > 0, wide * weights, 0)
    sums = torch.stack([weighted, weights])
    _run(dist.all_reduce, sums, world)
    return (sums[0] / sums[1]).to(values.dtype)


@torch.no_grad()
def sum_values(values: Tensor, world: World) -> Tensor:
    """The sum over all ranks, in the dtype of the values."""
    total = values.detach().clone(memory_format=torch.contiguous_format)
    if world.size > 1:
        _run(dist.all_reduce, total, world)
    return total


@torch.no_grad()
def share_tensors(tensors: Sequence[Tensor], world: World) -> None:
    """Overwrite the tensors with those of rank 0, in one broadcast for each dtype and device."""
    if world.size == 1:
        return
    for group in _grouped(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        data = flat.view(torch.uint8)  # bytes, since backends do not know every dtype
        _run(lambda tensor: dist.broadcast(tensor, src=0), data, world)
        torch._foreach_copy_(group, _unflatten_dense_tensors(flat, group))  # type: ignore[no-untyped-call]


def gather(value: Any, world: World) -> list[Any]:
    """The values of all ranks."""
    everyone = [value] * world.size
    if world.size > 1:
        with _reporting_lost_ranks(world):
            dist.all_gather_object(everyone, value)
    return everyone


@contextlib.contextmanager
def _reporting_lost_ranks(world: World) -> Iterator[None]:
    """Raise RankError if another rank has ended."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"Rank {world.rank} of {world.size} lost the others ({_reason(error)}): resume the run from its last "
            "checkpoint."
        ) from error


def _run(operation: Callable[[Tensor], object], tensor: Tensor, world: World) -> None:
    """Run a collective on a tensor, in place."""
    devices = [backend.split(":")[0] for backend in dist.get_backend_config().split(",")]
    if tensor.device.type in devices:
        with _reporting_lost_ranks(world):
            operation(tensor)
        return
    moved = tensor.to(devices[0])  # no backend for the device of the tensor
    with _reporting_lost_ranks(world):
        operation(moved)
    tensor.copy_(moved)


def _dtype_of_sums(tensor: Tensor) -> torch.dtype:
    """The dtype to sum a tensor in over ranks: half precision would lose the small summands."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors that are not empty, grouped by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _choose_backend(device: str, local: int) -> str:
    """NCCL on GPUs, one of which this rank then uses; gloo otherwise."""
    if device:
        on_gpus = device.startswith("cuda")
    else:
        forced_to_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
        on_gpus = torch.cuda.is_available() and not forced_to_cpu
    if not on_gpus:
        return "gloo"
    count = torch.cuda.device_count()
    if local >= count:
        raise RankError(
            f"Local rank {local} has no GPU, as there are only {count}: start one process per GPU, or use the CPU."
        )
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def _reason(error: Exception) -> str:
    """The first line of the backend's error."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
