"""What each process of test_distributed.py runs; a process alone runs the same, to compare with."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import dmcp
from dmcp.cli import main
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.models import build
from dmcp.runtime import distributed as ranks
from dmcp.runtime.batches import share_of
from dmcp.runtime.distributed import SINGLE_PROCESS, World, current
from dmcp.searching.importance import first_samples, scores_of
from dmcp.searching.search import SearchWarning
from dmcp.training.distillation import is_of_classes
from dmcp.training.loop import Task, with_distillation
from dmcp.training.reconstruction import refitted

STEPS = 5  # in an epoch


@functools.cache
def digits() -> TensorDataset:
    """Not an even number of them; not made when this is imported, which a server does that forks."""
    return TensorDataset(*next(iter(make_loader(load("digits").test.subset(torch.arange(101)), 101, train=False))))


class Plain(nn.Module):
    """Convs with biases and a residual stream; no layer looks at more than one sample, and none has a kink."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, padding=1)
        self.down = nn.Conv2d(12, 20, 3, stride=2, padding=1)
        self.inner = nn.Conv2d(20, 16, 3, padding=1)
        self.outer = nn.Conv2d(16, 20, 3, padding=1)
        self.head = nn.Linear(20, 10)
        for layer in self.children():
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.down(F.silu(self.stem(x))))
        x = F.silu(x + self.outer(F.silu(self.inner(x))))
        return self.head(x.mean((2, 3)))


def dropped(num_classes: int = 10) -> nn.Module:
    """A network with BatchNorm and dropout: each rank draws numbers of its own."""
    model = build("digits:resnet", num_classes=num_classes)
    model.fc = nn.Sequential(nn.Dropout(0.2), model.fc)
    return model


def train_plain(world: World, batch: int) -> dict[str, Any]:
    """Searches and a training without BatchNorm: 5 steps for the weights, 5 for weights and alphas."""
    return {
        "usual search": search(plain(world), loader(world, batch), reference_batch=4 * batch),
        "held-out search": search(
            plain(world),
            loader(world, batch, steps=2 * STEPS),
            arch_loader=loader(world, batch, seed=1),
            accumulate=2,
            reference_batch=2 * batch,
            init="zero",
            alpha_lr=5.0,
        ),
        "own loss": search(
            plain(world),
            loader(world, batch, steps=2 * STEPS),
            task=Task(loss=large_loss),
            accumulate=2,
            reference_batch=4 * batch,
        ),
        "training": train(plain(world), loader(world, batch), lr=0.2, reference_batch=batch),
    }


def train_normed(world: World, batch: int) -> dict[str, Any]:
    """The same with BatchNorm; then the trained network is tested and calibrated."""
    torch.manual_seed(world.rank)
    searched = search(build("digits:resnet"), loader(world, batch), reference_batch=batch)
    model = build("digits:resnet")
    trained = train(model, loader(world, batch), lr=0.2, reference_batch=batch)
    accuracy = dmcp.evaluate(model, test_loader(world))
    dmcp.recalibrate(model, loader(world, batch))
    return {"search": searched, "training": trained, "accuracy": accuracy, "calibrated": buffers(model)}


class Macro:
    """The mean over the classes of how many are found, which is no mean over the samples."""

    all_ranks = True

    def __init__(self, gather: bool = True) -> None:
        self.gather = gather

    def reset(self) -> None:
        self.table = torch.zeros(2, 10)

    def update(self, output: Tensor, batch: Any) -> None:
        found = output.argmax(dim=1) == batch[1]
        self.table += torch.stack([torch.bincount(batch[1][which], minlength=10) for which in (found, found | True)])

    def compute(self) -> Tensor:
        if self.gather and dist.is_initialized():
            dist.all_reduce(self.table)
        return (self.table[0] / self.table[1]).nanmean()


def measure_whole(world: World) -> dict[str, Any]:
    """A network tested by a metric of the whole data set, and what is said of one that does not gather."""
    torch.manual_seed(0)
    model, data = Plain(), digits()
    own = DataLoader(Subset(data, range(world.rank, len(data), world.size)), 8)
    with pytest.raises(dmcp.DmcpError) as error:
        dmcp.evaluate(model, own, Macro(gather=False))
    return {"own": dmcp.evaluate(model, own, Macro()), "parts": str(error.value)}


def score_channels(world: World) -> dict[str, Tensor]:
    """The importance of channels where only the first rank has samples."""
    torch.manual_seed(0)
    model = Plain()
    graph = dmcp.trace(model, torch.zeros(2, 1, 8, 8))
    images = digits().tensors[0][: 8 if world.first else 0]
    return dict(scores_of(model, graph, first_samples([(images,)], torch.device("cpu"))))


def refit_weights(world: World) -> dict[str, Tensor]:
    """The weights of a network that is refitted after a cut, where only the first rank has samples."""
    torch.manual_seed(0)
    model = Plain()
    graph = dmcp.trace(model, torch.zeros(2, 1, 8, 8))
    kept = {space.name: list(range(0, space.size, 2)) for space in graph.spaces}
    images = digits().tensors[0][: 64 if world.first else 0]
    refit = refitted(model, graph, kept, first_samples([(images,)], torch.device("cpu")))
    return dict(refit.named_parameters())


def read_loss(world: World) -> bool:
    """Whether a loss distils class scores that shows it by the batch of the first rank only; the last one has none."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        if batch[1].any():
            return F.cross_entropy(output, batch[1])
        return F.mse_loss(output, torch.zeros_like(output))

    images, labels = (tensor[:8] for tensor in digits().tensors)
    batches = [(images, labels * (world.rank == 0))]
    if 0 < world.rank == world.size - 1:
        batches = [(images[:0], labels[:0])]
    task = with_distillation(Task(loss=loss), Plain(), batches)
    return task.distillation is not None and is_of_classes(task.distillation)


def plain(world: World) -> Plain:
    """Fresh weights, others on each rank: those of the first must be used."""
    torch.manual_seed(world.rank)
    return Plain()


def loader(world: World, batch: int, steps: int = STEPS, seed: int = 0) -> Any:
    """So many batches of the first digits, shuffled and shifted; a rank gets its part of each."""
    images = load("digits").train.subset(torch.arange(steps * batch))
    return make_loader(images, batch, train=True, seed=seed, world=world)


def test_loader(world: World) -> Any:
    """382 digits in batches of 127: of the last one, only the first rank has a part."""
    return make_loader(load("digits").test, 127, train=False, world=world)


def large_loss(output: Tensor, batch: Any) -> Tensor:
    """A loss in a unit of the user's own."""
    return 3 * F.cross_entropy(output, batch[1])


def search(
    model: nn.Module, batches: Any, arch_loader: Any = None, task: Task = Task(), **settings: Any
) -> dict[str, Any]:
    """What a search of two epochs saw, and where it ended."""
    net = dmcp.Supernet(model, dmcp.trace(model, torch.zeros(2, 1, 8, 8)))
    config = dmcp.SearchConfig(budget="50%", epochs=2, **settings)
    found = dmcp.search(net, batches, config, arch_loader=arch_loader, task=task)
    losses = [
        torch.tensor([*record.weight_losses, record.task_loss or 0.0, record.budget_loss or 0.0])
        for record in found.log
        if record.weight_losses is not None
    ]
    return result(net.model, torch.stack(losses)) | {"alphas": found.alphas}


def train(model: nn.Module, batches: Any, **settings: Any) -> dict[str, Any]:
    """What a training of two epochs saw, and where it ended."""
    records = dmcp.train(model, batches, dmcp.TrainConfig(epochs=2, **settings))
    return result(model, torch.tensor([record.loss for record in records], dtype=torch.float64))


def result(model: nn.Module, losses: Tensor) -> dict[str, Any]:
    """Losses, weights and buffers."""
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return {"losses": losses, "weights": weights, "buffers": buffers(model)}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of every BatchNorm."""
    return {name: tensor.clone() for name, tensor in model.named_buffers()}


# every collective gives what one process would have computed


class Mixed(nn.Module):
    """Three dtypes, a strided gradient, and a parameter without any."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 4, dtype=torch.float64)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, rows: Tensor, images: Tensor) -> Tensor:
        """One loss per sample."""
        seen = self.conv(images).mean(dim=(2, 3))
        return self.wide(rows).square().sum(1) + seen.square().sum(1) + (seen.detach().bfloat16() * self.short).sum(1)


def check_group(port: int) -> None:
    """A process group of our own is destroyed, one of the user's is not; it is what the rest runs in."""
    assert current() == SINGLE_PROCESS
    world = ranks.join("cpu")
    places = (int(os.environ[it]) for it in ("RANK", "WORLD_SIZE", "RANK"))
    assert world == current() == ranks.join("cpu") == World(*places)
    for _ in range(2):
        ranks.leave()
        assert current() == SINGLE_PROCESS
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    assert world == ranks.join() == current()
    ranks.leave()
    assert dist.is_initialized()


def check_gradients(count: int, world: World) -> None:
    torch.manual_seed(count)
    model, rows, images = Mixed(), torch.randn(count, 5, dtype=torch.float64), torch.randn(count, 2, 6, 6)
    model(rows, images).mean().backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    mine = share_of(0, count, count, world)
    model(rows[mine], images[mine]).mean().backward()  # without samples: NaN
    with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        ranks.mean_gradients(list(model.parameters()), len(rows[mine]), world)
    assert reduce.call_count == 3  # one per dtype
    for name, one in model.named_parameters():
        exact = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[one.dtype]
        assert (one.grad is None) == (name == "unused")
        if one.grad is not None:
            assert one.grad.dtype == one.dtype
            torch.testing.assert_close(one.grad, wanted[name], rtol=exact, atol=exact)
    first, *others = ranks.gather([one.grad for one in model.parameters() if one.grad is not None], world)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def check_values(world: World) -> None:
    everyone = np.random.default_rng(0).normal(size=(world.size, 4, 3))
    samples = np.arange(world.size * 4).reshape(world.size, 4, 1)  # rank 0 has a row without samples
    everyone[0, 0] = np.nan
    mine = torch.from_numpy(everyone[world.rank])
    wanted = np.nansum(everyone * samples, axis=0) / samples.sum(axis=0)
    own = torch.from_numpy(samples[world.rank])
    np.testing.assert_allclose(ranks.mean_values(mine, own, world), wanted, rtol=1e-12)
    one, weighted = torch.tensor(float(world.rank)), np.average(range(world.size), weights=range(1, world.size + 1))
    torch.testing.assert_close(ranks.mean_values(one, world.rank + 1, world), torch.tensor(weighted).float())
    large, total = torch.tensor([2**53 + world.rank]), sum(range(world.size))  # a float64 would lose the last bit
    assert ranks.sum_values(large, world).item() == 2**53 * world.size + total and large.item() == 2**53 + world.rank
    assert ranks.gather(world.rank, world) == [*range(world.size)]

    def fill(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        images = nn.Parameter(torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last))
        return [images, torch.randn(5).half(), torch.randint(99, (2, 3)), torch.rand(7) > 0.5, torch.randn(4, 6).T]

    tensors = fill(world.rank)
    places = [(it.data_ptr(), it.stride()) for it in tensors]
    ranks.share_tensors(tensors, world)
    assert places == [(it.data_ptr(), it.stride()) for it in tensors]
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(tensors, fill(0), strict=True))


# the processes


def everything(batch: int, folder: Path, port: int) -> None:
    """All that ranks do together; then they sum for ever."""
    check_group(port)
    world = current()
    for count in (10 * world.size + 1, world.size - 1):  # uneven, and none at all for the last rank
        check_gradients(count, world)
    check_values(world)
    found = train_plain(world, batch) | {"normed": train_normed(world, 64), "measured": measure_whole(world)}
    found |= {"scores": score_channels(world), "refit": refit_weights(world), "of classes": read_loss(world)}
    torch.save(found, folder / f"rank{world.rank}.new")
    (folder / f"rank{world.rank}.new").rename(folder / f"rank{world.rank}.pt")
    while True:
        ranks.sum_values(torch.ones(1000), world)


def command(*arguments: str) -> None:
    """The command `dmcp`."""
    sys.argv = ["dmcp", *arguments]
    main.main()


def start(rank: int, world_size: int, port: int, text: Path, program: str, *arguments: Any) -> None:
    """Be one of the processes that a launcher starts; what it prints goes to a file."""
    sink = os.open(text, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", SearchWarning)  # these searches take a few steps
    globals()[program](*arguments)
