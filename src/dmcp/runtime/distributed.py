"""Several processes, one training (torch.distributed under torchrun)."""

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
    """Which of the processes this one is: rank of all, size of the group, local rank and number of the GPU."""

    rank: int = 0
    size: int = 1
    local: int = 0

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
    """The place of this process in its process group, if there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return SINGLE_PROCESS
    rank = dist.get_rank()
    return World(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", rank)))


def leave() -> None:
    """Destroy the process group if `join` has made it."""
    global _joined
    if _joined and dist.is_initialized():
        dist.destroy_process_group()
    _joined = False


@torch.no_grad()
def mean_gradients(parameters: Iterable[Tensor], samples: int, world: World) -> None:
    """Turn gradients, which are means over the samples of this rank, into means over those of all ranks."""
    if world.size == 1:
        return
    for grads in _alike(parameter.grad for parameter in parameters if parameter.grad is not None):
        # half precision would lose the small summands
        dtype = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        flat = torch.cat([*(grad.reshape(-1).to(dtype) for grad in grads), grads[0].new_ones(1, dtype=dtype)])
        # the mean of no samples is not a number, and must not count
        flat = flat.mul_(samples) if samples else flat.zero_()
        _run(dist.all_reduce, flat, world)
        torch._foreach_copy_(grads, _unflatten_dense_tensors(flat[:-1].div_(flat[-1]), grads))  # type: ignore[no-untyped-call]


@torch.no_grad()
def mean_values(values: Tensor, samples: Tensor | int, world: World) -> Tensor:
    """The mean over all ranks, weighted by their samples (which broadcast to the values)."""
    if world.size == 1:
        return values.detach()
    wide = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    weights = torch.zeros_like(wide) + samples
    both = torch.stack([torch.where(weights > 0, wide * weights, 0), weights])
    _run(dist.all_reduce, both, world)
    return (both[0] / both[1]).to(values.dtype)


@torch.no_grad()
def sum_values(values: Tensor, world: World) -> Tensor:
    """The sum over all ranks, in the dtype of the values."""
    total = values.detach().clone(memory_format=torch.contiguous_format)
    if world.size > 1:
        _run(dist.all_reduce, total, world)
    return total


@torch.no_grad()
def share_tensors(tensors: Sequence[Tensor], world: World) -> None:
    """Overwrite the tensors with those of rank 0; one broadcast per dtype and device."""
    if world.size == 1:
        return
    for same in _alike(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        # bytes, since backends do not know every dtype
        _run(lambda tensor: dist.broadcast(tensor, src=0), flat.view(torch.uint8), world)
        torch._foreach_copy_(same, _unflatten_dense_tensors(flat, same))  # type: ignore[no-untyped-call]


def gather(value: Any, world: World) -> list[Any]:
    """The values of all ranks."""
    everyone = [value] * world.size
    if world.size > 1:
        with _losing_others(world):
            dist.all_gather_object(everyone, value)
    return everyone


@contextlib.contextmanager
def _losing_others(world: World) -> Iterator[None]:
    """RankError if another rank has ended."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        who = f"Rank {world.rank} of {world.size} lost the others"
        raise RankError(f"{who} ({_reason(error)}): resume the run, it goes on from its last checkpoint.") from error


def _run(operation: Callable[[Tensor], object], tensor: Tensor, world: World) -> None:
    """Run a collective on a tensor, in place."""
    carriers = [one.split(":")[0] for one in dist.get_backend_config().split(",")]
    there = tensor if tensor.device.type in carriers else tensor.to(carriers[0])
    with _losing_others(world):
        operation(there)
    if there is not tensor:
        tensor.copy_(there)


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _choose_backend(device: str, local: int) -> str:
    """NCCL on GPUs, one of which this rank then uses; gloo otherwise."""
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    if not (device.startswith("cuda") if device else torch.cuda.is_available() and not cpu):
        return "gloo"
    if local >= (gpus := torch.cuda.device_count()):
        raise RankError(f"There are {gpus} GPUs, but local rank {local}: start one process per GPU, or on the cpu.")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def _reason(error: Exception) -> str:
    """The first line of the backend's error."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
