"""Batches from the middle of an epoch, and the share of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from dmcp.batches import FewBatches, batches_from, check_parts, input_of, labels_of, size_of
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError
from dmcp.runtime.distributed import SINGLE_PROCESS, World


class Noisy:
    """A loader of the user's own, whose batches come from a random state that lives on."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(3, generator=self.draw) for _ in range(5))


@pytest.mark.parametrize("skip", [0, 2, 5])
def test_other_loaders_are_replayed(skip: int) -> None:
    loader, entered = Noisy(), Noisy()
    whole = [torch.stack(list(batches_from(loader, epoch))) for epoch in (7, 8)]
    rest = list(batches_from(entered, 7, skip))
    assert len(rest) == 5 - skip and all(map(torch.equal, rest, whole[0][skip:]))
    assert torch.equal(torch.stack(list(batches_from(entered, 8))), whole[1])  # the draws go on as they would have
    assert loader.epochs == entered.epochs == [7, 8]


def test_what_a_batch_lacks_is_said() -> None:
    x = torch.zeros(2)
    assert input_of({"input": x}) is input_of((x, 1)) is input_of(x) is labels_of({"label": x}) is x
    for read, batch in (*((labels_of, it) for it in ({}, (x,), x, (x, [1]))), (input_of, {"image": x})):
        with pytest.raises(DataError):
            read(batch)
    assert size_of({"input": [{"a": x}]}) == 2
    for batch in ((torch.tensor(1.0), 1), ("text", 1), ([], 1)):
        with pytest.raises(DataError):
            size_of(batch)


def test_samplers_that_repeat_are_seen() -> None:
    def loader(samples: int, **options: Any) -> DataLoader[Any]:
        data = list(range(samples))
        return DataLoader(data, 5, sampler=DistributedSampler(data, 2, 0, **options))

    for fine in (loader(20), loader(21, drop_last=True), DataLoader(list(range(21)), 5), [torch.zeros(2)], Noisy()):
        check_parts(fine, World(0, 2))
    check_parts(loader(21), SINGLE_PROCESS)
    with pytest.raises(DataError, match="repeats samples"):
        check_parts(loader(21), World(0, 2))


def test_few_batches_are_the_first_of_each_epoch_of_the_loader() -> None:
    data = TensorDataset(torch.arange(40.0)[:, None], torch.zeros(40, dtype=torch.int64))
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(0))
    few = FewBatches(loader, 3)
    assert len(few) == 3 and few.generator is loader.generator
    passes = [[batch[0].flatten().tolist() for batch in batches_from(few, epoch)] for epoch in range(2)]
    assert [len(it) for it in passes] == [3, 3] and passes[0] != passes[1]  # shuffled anew
    digits = make_loader(load("digits").train, 128, train=True)
    rest = [list(batches_from(it, 2, 1)) for it in (FewBatches(digits, 3), digits)]
    assert len(rest[0]) == 2 and all(torch.equal(a[0], b[0]) for a, b in zip(*rest, strict=False))
