"""Several processes, one training (torch.distributed under torchrun)."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dmcp.errors import RankError

EXIT_RANK_LOST = 75
"""How a process ends that has lost another rank; sysexits.h calls it a temporary failure: starting again helps."""

GO_ON = "start the run again, it goes on from its last checkpoint."
MEETING_SECONDS = 600  # how long ranks wait for each other before they watch each other
DONE, FAILED = "done", "failed"  # the last words of a rank; before, it says how often it has spoken


@dataclass(frozen=True)
class Ranks:
    """Which of the processes this one is."""

    rank: int = 0  # its number among all
    world: int = 1  # how many there are
    local: int = 0  # its number on this machine, and that of its GPU

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"Rank {self.rank} of {self.world}"


ALONE = Ranks()
_joined = False  # whether the process group is ours to destroy


def join(device: str = "") -> Ranks:
    """Meet the other processes of the launcher; a process group that exists already is used as it is."""
    global _joined
    if dist.is_available() and dist.is_initialized():
        return current()
    world = _read("WORLD_SIZE", 1)
    if world <= 1:
        return ALONE
    ranks = Ranks(_read("RANK"), world, _read("LOCAL_RANK", _read("RANK")))
    if not dist.is_available():
        raise RankError(f"{ranks} cannot meet the others: this torch is built without torch.distributed.")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise RankError(f"{missing[0]} is not set: start several processes with torchrun or accelerate launch.")
    backend = _choose_backend(device, ranks)
    try:
        dist.init_process_group(backend, rank=ranks.rank, world_size=world)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"{ranks} could not meet the others ({_say(error)}): start all of them.") from error
    _joined = True
    return ranks


def current() -> Ranks:
    """The ranks of this process, as its process group has them; never starts one."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    rank = dist.get_rank()
    return Ranks(rank, dist.get_world_size(), _read("LOCAL_RANK", rank))


def leave() -> None:
    """Destroy the process group that `join` made; another one is not ours."""
    global _joined
    if _joined and dist.is_initialized():
        dist.destroy_process_group()
    _joined = False


def part(count: int, ranks: Ranks) -> slice:
    """The share of this rank in `count` samples: one after the other, sizes differ by one at most."""
    size, more = divmod(count, ranks.world)
    start = ranks.rank * size + min(ranks.rank, more)
    return slice(start, start + size + (ranks.rank < more))


@torch.no_grad()
def mean_gradients(parameters: Iterable[Tensor], samples: int, ranks: Ranks) -> None:
    """Make each gradient the mean over all samples of all ranks, given the mean over the `samples` of this one.

    The same parameters have a gradient on every rank. One all-reduce per dtype and device, and no wait for the device.
    """
    if ranks.world == 1:
        return
    for grads in _alike(parameter.grad for parameter in parameters if parameter.grad is not None):
        # half precision would lose the small summands
        dtype = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        flat = torch.cat([*(grad.reshape(-1).to(dtype) for grad in grads), grads[0].new_ones(1, dtype=dtype)])
        # the mean of no samples is not a number, and must not count
        flat = flat.mul_(samples) if samples else flat.zero_()
        _run(dist.all_reduce, flat, ranks)
        _write_back(grads, flat[:-1].div_(flat[-1]))


@torch.no_grad()
def mean_values(values: Tensor, samples: Tensor | int, ranks: Ranks) -> Tensor:
    """The mean over all ranks of their means, each weighted by its samples (which broadcast to the values)."""
    if ranks.world == 1:
        return values.detach()
    wide = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    weights = torch.zeros_like(wide) + samples
    both = torch.stack([torch.where(weights > 0, wide * weights, 0), weights])
    _run(dist.all_reduce, both, ranks)
    return (both[0] / both[1]).to(values.dtype)


@torch.no_grad()
def sum_values(values: Tensor, ranks: Ranks) -> Tensor:
    """The sum over all ranks, in the dtype of the values."""
    total = values.detach().clone(memory_format=torch.contiguous_format)
    if ranks.world > 1:
        _run(dist.all_reduce, total, ranks)
    return total


def fewest(number: int, ranks: Ranks) -> int:
    """The smallest of the ranks' numbers, such as the batches of loaders of different length."""
    if ranks.world == 1:
        return number
    least = torch.tensor([number])
    _run(lambda tensor: dist.all_reduce(tensor, op=dist.ReduceOp.MIN), least, ranks)
    return int(least)


@torch.no_grad()
def share_tensors(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Overwrite the tensors with those of rank 0; one broadcast per dtype and device."""
    if ranks.world == 1:
        return
    for same in _alike(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        # bytes, since backends do not know every dtype
        _run(lambda tensor: dist.broadcast(tensor, src=0), flat.view(torch.uint8), ranks)
        _write_back(same, flat)


def gather_bytes(tensors: Mapping[str, Tensor], ranks: Ranks) -> list[dict[str, Tensor]] | None:
    """The CPU tensors of every rank, for rank 0; None for the others. Names, shapes and dtypes are the same on each."""
    if ranks.world == 1:
        return [dict(tensors)]
    ordered = {name: tensors[name].detach() for name in sorted(tensors)}
    if not same_everywhere(repr([(name, one.dtype, one.shape) for name, one in ordered.items()]), ranks):
        raise RankError(f"{ranks} holds other tensors than the others: gather the same names, shapes and dtypes.")
    parts = [one.reshape(-1).view(torch.uint8) for one in ordered.values()]
    rows = _gather(torch.cat([torch.empty(0, dtype=torch.uint8), *parts]), ranks)
    if not ranks.first:
        return None
    gathered = []
    for row in rows:
        pairs = zip(ordered.items(), torch.split(row, [len(one) for one in parts]), strict=True)
        # a part of a buffer may lie where its dtype must not; its copy does not
        gathered.append({name: one.clone().view(like.dtype).view(like.shape) for (name, like), one in pairs})
    return gathered


def same_everywhere(text: str, ranks: Ranks) -> bool:
    """Whether all ranks hold the same text, such as their settings."""
    if ranks.world == 1:
        return True
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    rows = _gather(digest, ranks)
    return bool((rows == rows[0]).all())


class Watch:
    """Ends this process with EXIT_RANK_LOST when another rank has died, since a collective may wait for it for ever.

    Enter it right after `join`, on every rank; a rank that leaves by an exception ends the others after a few seconds.
    """

    # One thread speaks with the store, through a client of its own; it may hang there when the machine of the store
    # does, so that another one counts the seconds. Both count their own rounds and ask no clock: a process that was
    # stopped for a while must not take its own sleep for the silence of the others.

    def __init__(self, ranks: Ranks, *, period: float = 2.0, patience: float = 25.0, outage: float = 10.0) -> None:
        self.ranks = ranks
        self.period = period  # seconds between two signs of life
        self.patience = patience  # seconds without one from another rank
        self.outage = outage  # seconds without an answer of the store
        self._leaving, self._left = threading.Event(), threading.Event()
        self._last = DONE
        self._unanswered = 0.0  # seconds since the store has answered
        self._heard = [""] * ranks.world
        self._silent = [0.0] * ranks.world

    def __enter__(self) -> Watch:
        if self.ranks.world > 1:
            self._meet()
            for work in (self._speak, self._guard):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.ranks.world > 1:
            self._last = FAILED if kind else DONE
            self._leaving.set()
            # after a failure one of them is probably dead, and would be waited for in vain
            self._left.wait(3 * self.period if kind else self.patience)

    def _meet(self) -> None:
        try:
            self._store = dist.distributed_c10d._get_default_store().clone()
            turn = self._store.add(f"dmcp/watch/{self.ranks.rank}", 1)  # a later watch must not hear an earlier one
            self._keys = [f"dmcp/watch/{turn}/{rank}" for rank in range(self.ranks.world)]
            self._store.set(self._keys[self.ranks.rank], "0")
            self._store.wait(self._keys, timedelta(seconds=MEETING_SECONDS))
        except RuntimeError as error:
            raise RankError(f"{self.ranks} waited in vain for the others ({_say(error)}): {GO_ON}") from error

    def _speak(self) -> None:
        spoken = 0
        with suppress(RuntimeError):  # a broken store stays broken, and the guard counts for how long
            while not self._leaving.wait(self.period):
                spoken += 1
                self._judge(self._exchange(str(spoken)))
            self._linger()
        self._left.set()

    def _exchange(self, word: str) -> list[str]:
        self._store.set(self._keys[self.ranks.rank], word)
        heard = [bytes(word).decode() for word in self._store.multi_get(self._keys)]
        self._unanswered = 0.0
        return heard

    def _judge(self, heard: list[str]) -> None:
        # rank 0, where the store most often lives, ends last, so that the others learn the reason
        more = 3 * self.period if self.ranks.first else 0.0
        for rank, word in enumerate(heard):
            same = word == self._heard[rank] and word != DONE
            self._silent[rank] = self._silent[rank] + self.period if same else 0.0
            # a common cause, such as a loss that is not a number, may end this rank with its own error in a moment
            if self._silent[rank] >= more + (2 * self.period if word == FAILED else self.patience):
                self._end(f"rank {rank} has " + ("failed" if word == FAILED else "given no sign of life"))
        self._heard = heard

    def _linger(self) -> None:
        """Say the last word; rank 0, where the store most often lives, stays until all others have heard it."""
        heard = before = self._exchange(self._last)
        while self.ranks.first and not all(map(_has_read, before, heard)):
            self._left.wait(0.05)
            heard = self._exchange(self._last)

    def _guard(self) -> None:
        pause = min(1.0, self.outage / 4)
        while not self._leaving.wait(pause):
            self._unanswered += pause
            if self._unanswered >= self.outage:
                if self._heard[0] == DONE:
                    return  # it took the store along, as it may
                failed = [f"rank {rank} has failed" for rank, word in enumerate(self._heard) if word == FAILED]
                self._end(*(failed[:1] or ["the store of rank 0 does not answer"]))

    def _end(self, reason: str) -> None:
        if not self._leaving.is_set():
            # not sys.stderr: the main thread may hold its lock
            os.write(2, f"{self.ranks} ends, because {reason}: {GO_ON}\n".encode())
            os._exit(EXIT_RANK_LOST)


def _has_read(before: str, now: str) -> bool:
    """Whether a rank has ended, or read what was written before it said the first word: it reads after each."""
    return now in (DONE, FAILED) or int(now) >= int(before) + 2


def _run(operation: Callable[[Tensor], object], tensor: Tensor, ranks: Ranks) -> None:
    """Run a collective on a tensor, in place: the one place where ranks wait for each other."""
    carriers = [one.split(":")[0] for one in dist.get_backend_config().split(",")]
    there = tensor if tensor.device.type in carriers else tensor.to(carriers[0])
    try:
        operation(there)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"{ranks} lost the others while it waited for them ({_say(error)}): one of them has ended; {GO_ON}"
        ) from error
    if there is not tensor:
        tensor.copy_(there)


def _gather(row: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks. (N) -> (world, N)"""
    rows = row.new_zeros(ranks.world, len(row))
    rows[ranks.rank] = row
    if len(row):
        _run(lambda rows: dist.all_gather(list(rows.unbind()), rows[ranks.rank].clone()), rows, ranks)
    return rows


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors that fit into one buffer, together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _write_back(tensors: list[Tensor], flat: Tensor) -> None:
    """Overwrite the tensors with what follows each other in the buffer."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [one.view(tensor.shape) for one, tensor in zip(parts, tensors, strict=True)])


def _choose_backend(device: str, ranks: Ranks) -> str:
    """NCCL between GPUs, whose one this rank then uses; gloo for all the rest."""
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    if not (device.startswith("cuda") if device else torch.cuda.is_available() and not cpu):
        return "gloo"
    if ranks.local >= (gpus := torch.cuda.device_count()):
        raise RankError(
            f"{ranks} is one too many for {gpus} GPUs here: start one process per GPU, or use the device cpu."
        )
    torch.cuda.set_device(ranks.local)
    return "cpu:gloo,cuda:nccl"


def _read(name: str, default: int | None = None) -> int:
    """A number that the launcher has set."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise RankError(
            f"{name} is {text!r}, not a number: start several processes with torchrun or accelerate launch."
        )
    return int(text)


def _say(error: Exception) -> str:
    """The backend's first sentence, without the place in its source."""
    first = str(error).strip().split("\n")[0].split(". ")[0]
    return re.sub(r"^\[\S*\] *", "", first)[:200].rstrip(" .") or type(error).__name__
