"""What each process of tests/test_distributed.py runs; a process alone runs the same, to compare with."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Subset, TensorDataset

import dmcp
from dmcp.cli import main
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.models import build
from dmcp.retraining import TeacherWarning
from dmcp.runtime.distributed import World, join, leave

STEPS = 5  # in an epoch
PIXELS = (1, 8, 8)
_DIGITS = make_loader(load("digits").test.subset(torch.arange(101)), 101, train=False)
DIGITS = TensorDataset(*next(iter(_DIGITS)))  # not an even number


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
    """Three searches and a training without BatchNorm: 5 steps for the weights, 5 for weights and alphas."""
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
    return {"search": searched, "training": trained, "accuracy": accuracy, "calibrated": running(model)}


def learn_from_a_teacher(world: World, batch: int) -> dict[str, Any]:
    """A network with a given teacher, of which each rank has another one: that of rank 0 counts."""
    search = dmcp.SearchConfig(budget="50%", epochs=2, groups=4, reference_batch=batch, lr=0.05, min_lr=0.05)
    config = dmcp.TrainConfig(epochs=1, lr=0.2, warmup_lr=0.2, reference_batch=batch, kd_weight=1.0)
    given = loader(world, batch)
    torch.manual_seed(0)
    model = Plain()
    torch.manual_seed(7 + world.rank)
    teacher = Plain()
    kept = teacher.stem.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TeacherWarning)  # it has learnt nothing
        found = dmcp.prune(model, given, test_loader(world), search=search, train=config, teacher=teacher)
    assert torch.equal(kept, teacher.stem.weight)  # a user's network is never written
    return {"weights": dict(found.model.state_dict()), "accuracies": [row.accuracy for row in found.rows]}


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


def measure_whole(world: World, batch: int) -> dict[str, Any]:
    """A network tested by a metric of the whole data set, and what is said where that cannot be."""
    from accelerate.data_loader import BatchSamplerShard  # which is slow, and for the others in vain

    torch.manual_seed(0)
    model = Plain()
    told = []
    for given, metric in (
        (test_loader(world), Macro(gather=False)),
        (DataLoader(DIGITS, batch, sampler=DistributedSampler(DIGITS)), Macro()),
        (DataLoader(DIGITS, batch_sampler=BatchSamplerShard(one_by_one(batch), 2, world.rank)), Macro()),
    ):
        try:
            told.append(str(dmcp.evaluate(model, given, metric)))
        except dmcp.DmcpError as error:
            told.append(str(error))
    try:
        padded = DataLoader(DIGITS, batch, sampler=DistributedSampler(DIGITS))
        dmcp.prune(model, loader(world, 32), padded, task=dmcp.Task(metric=Macro()))
    except dmcp.DmcpError as error:
        told.append(str(error))
    own = DataLoader(Subset(DIGITS, range(world.rank, len(DIGITS), world.size)), batch)
    found = {"dmcp": dmcp.evaluate(model, test_loader(world), Macro()), "own": dmcp.evaluate(model, own, Macro())}
    return found | {"told": told, "mean": dmcp.evaluate(model, test_loader(world))}


def one_by_one(batch: int) -> BatchSampler:
    return BatchSampler(range(len(DIGITS)), batch, drop_last=False)


class Listing(torch.optim.SGD):
    """Keeps what no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        self.state[self.param_groups[0]["params"][0]]["seen"] = [1]


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


def search(model: nn.Module, batches: Any, arch_loader: Any = None, **settings: Any) -> dict[str, Any]:
    """What a search of two epochs saw, and where it ended."""
    net = dmcp.Supernet(model, dmcp.trace(model, torch.zeros(2, *PIXELS)))
    config = dmcp.SearchConfig(budget="50%", epochs=2, **settings)
    found = dmcp.search(net, batches, config, arch_loader=arch_loader)
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
    """Losses, weights and buffers, and a hash of the weights."""
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return {"losses": losses, "weights": weights, "buffers": running(model), "hash": digest(weights.values())}


def running(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of every BatchNorm."""
    return {name: tensor.clone() for name, tensor in model.named_buffers()}


def digest(tensors: Iterable[Tensor]) -> str:
    """One hash of the bits of all."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


# the processes


def learn(program: str, batch: int, folder: Path) -> None:
    """Run one of the above among the other ranks, and keep what it gave."""
    world = join("cpu")
    found = globals()[program](world, batch)
    leave()
    torch.save(found, folder / f"rank{world.rank}.pt")


def keep_a_list(folder: Path) -> None:
    """Try to save a training that cannot be saved."""
    world = join("cpu")
    config = dmcp.TrainConfig(epochs=1, lr=0.2, warmup_lr=0.2)
    dmcp.train(
        plain(world),
        loader(world, 4),
        config,
        task=dmcp.Task(optimizer=Listing),
        runtime=dmcp.Runtime(checkpointer=dmcp.Checkpointer(folder)),
    )


def command(*arguments: str) -> None:
    """The command `dmcp`."""
    sys.argv = ["dmcp", *arguments]
    main.main()


def start(rank: int, world_size: int, port: int, text: Path, program: str, *arguments: Any) -> None:
    """Be one of the processes that a launcher starts; what it prints goes to a file."""
    sink = os.open(text, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    warnings.simplefilter("error")
    globals()[program](*arguments)
