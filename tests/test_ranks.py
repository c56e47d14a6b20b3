"""Several processes compute what one would; where one is killed, the collectives of the others fail."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
import rank_programs
import torch
from torch import nn

from dmcp.errors import RankError
from dmcp.runtime.distributed import (
    SINGLE_PROCESS,
    World,
    current,
    fewest,
    gather_bytes,
    join,
    leave,
    mean_gradients,
    mean_values,
    part,
    same_everywhere,
    share_tensors,
    sum_values,
)

CHECKPOINT = "start the run again, it goes on from its last checkpoint."
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def started(program: str, world_size: int, folder: Path, *, waits: bool = False) -> Iterator[list[ForkServerProcess]]:
    """The processes of a program, all of them at work if it says so; none is left behind."""
    context = multiprocessing.get_context("forkserver")  # imports torch once, not once per process
    context.set_forkserver_preload(["dmcp.runtime.distributed", "pytest"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready = [folder / f"ready{rank}" if waits else "" for rank in range(world_size)]
    processes = [
        context.Process(
            target=rank_programs.start,
            args=(program, str(ready[rank]), rank, world_size, port, str(folder / f"errors{rank}")),
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + 40
        while waits and not all(Path(one).exists() for one in ready):
            assert time.monotonic() < deadline, texts(folder)
            time.sleep(0.05)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def texts(folder: Path) -> list[str]:
    """What the ranks have printed."""
    return [path.read_text() for path in sorted(folder.glob("errors*"))]


def codes(processes: list[ForkServerProcess], seconds: float) -> list[int | None]:
    """Exit codes after at most so many seconds; None still runs."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


@pytest.mark.parametrize(("program", "world"), [("agree", 3), ("borrow", 2)])
def test_several_processes_give_what_one_gives(program: str, world_size: int, tmp_path: Path) -> None:
    with started(program, world_size, tmp_path) as processes:
        assert codes(processes, 40) == [0] * world_size, texts(tmp_path)


def test_a_killed_rank_ends_the_collectives_of_the_others(tmp_path: Path) -> None:
    with started("reduce", 3, tmp_path, waits=True) as processes:
        processes[1].kill()
        ended = codes(processes, 30)
    assert ended == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        told = texts(tmp_path)[rank]
        assert f"RankError: Rank {rank} of 3 lost the others" in told and CHECKPOINT in told


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 100])
def test_parts_are_those_of_array_split(count: int, world_size: int) -> None:
    samples = np.arange(count)
    for rank, wanted in enumerate(np.array_split(samples, world_size)):
        assert samples[part(count, World(rank, world_size))].tolist() == wanted.tolist()


def test_alone_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert join() == current() == SINGLE_PROCESS and SINGLE_PROCESS.first
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert join() == current() == SINGLE_PROCESS
    assert not torch.distributed.is_initialized()
    model, values = nn.Linear(2, 2), torch.tensor([1, 2])
    model(torch.ones(1, 2)).sum().backward()
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    mean_gradients(list(model.parameters()), 3, SINGLE_PROCESS)
    share_tensors(list(model.parameters()), SINGLE_PROCESS)
    assert all(torch.equal(one.grad, kept) for one, kept in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(sum_values(values, SINGLE_PROCESS), values) and sum_values(values, SINGLE_PROCESS) is not values
    assert torch.equal(mean_values(values, 5, SINGLE_PROCESS), values)
    assert fewest(3, SINGLE_PROCESS) == 3 and same_everywhere("x", SINGLE_PROCESS)
    assert gather_bytes({"x": values}, SINGLE_PROCESS) == [{"x": values}]
    leave()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number: start several processes with torchrun"),
        ({"WORLD_SIZE": "2"}, "RANK is '', not a number: start several processes with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set: start several processes with torchrun"),
    ],
)
def test_half_a_launcher_is_refused(settings: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=text):
        join("cpu")


def test_one_process_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RankError, match="Rank 5 of 6 is one too many for 1 GPUs here: start one process per GPU"):
        join("cuda")
