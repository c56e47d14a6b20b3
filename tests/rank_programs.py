"""What each process of tests/test_ranks.py runs; `torchrun tests/rank_programs.py` runs the first one by hand."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmcp.errors import RankError
from dmcp.runtime import distributed as ranks_file
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


def agree() -> None:
    """Every function gives what one process would have computed."""
    assert current() == SINGLE_PROCESS
    world = join("cpu")
    assert (
        world == current() == join("cpu") == World(*(int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    )
    for count in (10 * world.size + 1, world.size - 1):  # uneven, and none at all for the last rank
        check_gradients(count, world)
    check_values(world)
    check_shared(world)
    check_gathered(world)
    check_errors(world)
    leave()
    assert current() == SINGLE_PROCESS
    leave()


class Mixed(nn.Module):
    """Three dtypes, a strided gradient, and a parameter without any."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 4, dtype=torch.float64)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, rows: Tensor, images: Tensor) -> Tensor:
        """One loss per sample."""
        seen = self.conv(images).mean(dim=(2, 3)) * self.scale
        return self.wide(rows).square().sum(1) + seen.square().sum(1) + (seen.detach().bfloat16() * self.short).sum(1)


def check_gradients(count: int, world: World) -> None:
    torch.manual_seed(count)
    model, rows, images = Mixed(), torch.randn(count, 5, dtype=torch.float64), torch.randn(count, 2, 6, 6)
    model(rows, images).mean().backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    mine = part(count, world)
    model(rows[mine], images[mine]).mean().backward()
    samples = len(rows[mine])
    for one in model.parameters():
        if one.grad is not None and not samples:
            one.grad.fill_(torch.nan)
    with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        mean_gradients(list(model.parameters()), samples, world)
    assert reduce.call_count == 3  # one per dtype
    for name, one in model.named_parameters():
        if name == "unused":
            assert one.grad is None and wanted[name] is None
            continue
        exact = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[one.dtype]
        assert one.grad is not None and one.grad.dtype == one.dtype
        torch.testing.assert_close(one.grad, wanted[name], rtol=exact, atol=exact)
    bits = torch.cat([one.grad.double().reshape(-1) for one in model.parameters() if one.grad is not None])
    assert same_everywhere(str(bits.tolist()), world)


def check_values(world: World) -> None:
    everyone = np.random.default_rng(0).normal(size=(world.size, 4, 3))
    samples = np.arange(world.size * 4).reshape(world.size, 4, 1)  # rank 0 has a row without samples
    everyone[0, 0] = np.nan
    mine = torch.from_numpy(everyone[world.rank])
    kept = mine.clone()
    wanted = np.nansum(everyone * samples, axis=0) / samples.sum(axis=0)
    np.testing.assert_allclose(mean_values(mine, torch.from_numpy(samples[world.rank]), world), wanted, rtol=1e-12)
    assert torch.equal(mine[1:], kept[1:])
    one = torch.tensor(float(world.rank))
    weighted = np.average(range(world.size), weights=range(1, world.size + 1))
    torch.testing.assert_close(mean_values(one, world.rank + 1, world), torch.tensor(weighted, dtype=torch.float32))

    large = torch.tensor([2**53 + world.rank, world.rank])  # a float64 on the way would lose the last bit
    total = sum_values(large, world)
    steps = sum(range(world.size))
    assert total.dtype == torch.int64 and total.tolist() == [2**53 * world.size + steps, steps]
    assert large.tolist() == [2**53 + world.rank, world.rank]
    tiny = sum_values(torch.tensor(1 + 1e-12 * world.rank, dtype=torch.float64).expand(2, 2).T, world)
    assert tiny.shape == (2, 2) and abs(float(tiny[0, 0]) - world.size - 1e-12 * steps) < 1e-15
    assert fewest(7 - world.rank, world) == 8 - world.size


def check_shared(world: World) -> None:
    def fill(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [
            nn.Parameter(torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last)),
            torch.randn(5).half(),
            torch.randint(99, (2, 3)),
            torch.rand(7) > 0.5,
            torch.randn(()),
            torch.randn(0),
            torch.randn(4, 6).T,
        ]

    tensors = fill(world.rank)
    places = [one.data_ptr() for one in tensors]
    share_tensors(tensors, world)
    assert places == [one.data_ptr() for one in tensors]
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(tensors, fill(0), strict=True))
    assert tensors[0].is_contiguous(memory_format=torch.channels_last)


def check_gathered(world: World) -> None:
    def hold(rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        tensors = {
            "flag": torch.tensor(rank % 2 == 0),
            "state": generator.get_state(),
            "weights": torch.randn(3, 5, generator=generator, dtype=torch.float64).T,
            "none": torch.empty(0, 3),
            "short": torch.randn(3, generator=generator).bfloat16(),
        }
        return dict(sorted(tensors.items(), reverse=rank == 1))  # the order of names does not count

    gathered = gather_bytes(hold(world.rank), world)
    assert (gathered is not None) == world.first
    for rank, tensors in enumerate(gathered or []):
        assert set(tensors) == set(hold(rank))
        for name, one in hold(rank).items():
            assert tensors[name].dtype == one.dtype and torch.equal(tensors[name], one)
    assert gather_bytes({}, world) == ([{}] * world.size if world.first else None)
    assert same_everywhere("batch 32", world)
    assert not same_everywhere(f"batch {32 + (world.rank == world.size - 1)}", world)


def check_errors(world: World) -> None:
    with pytest.raises(RankError, match=rf"Rank {world.rank} of {world.size} holds other tensors"):
        gather_bytes({"state": torch.zeros(3 + (world.rank == 1))}, world)
    broken = patch.object(dist, "broadcast", side_effect=dist.DistBackendError("NCCL is unhappy\nC++ trace"))
    with broken, pytest.raises(RankError, match=r"lost the others .*\(NCCL is unhappy\): one .* last checkpoint\.$"):
        share_tensors([torch.zeros(1)], world)
    with (
        patch.object(dist, "all_reduce", side_effect=torch.OutOfMemoryError("full")),
        pytest.raises(torch.OutOfMemoryError),  # not the fault of another rank
    ):
        fewest(1, world)


def borrow() -> None:
    """A process group of the user's own is used, and not destroyed."""
    dist.init_process_group("gloo")
    world = join()
    assert world == current() and world.size == dist.get_world_size() > 1
    assert fewest(world.rank, world) == 0
    leave()
    assert dist.is_initialized()
    dist.destroy_process_group()


def reduce(ready: str) -> None:
    """Sum for ever."""
    world = join("cpu")
    Path(ready).touch()
    while True:
        sum_values(torch.ones(1000), world)


def start(program: str, ready: str, rank: int, world_size: int, port: int, errors: str) -> None:
    """Be one of the processes that a launcher starts; what it prints goes to a file."""
    sink = os.open(errors, os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    globals()[program](*([ready] if ready else []))


if __name__ == "__main__":
    agree()
    print("agreed on", ranks_file.__name__, os.environ["RANK"])
