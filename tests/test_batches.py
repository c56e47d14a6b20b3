"""Samplers that repeat samples, and the first batches of each epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError
from dmcp.runtime.batches import FewBatches, batches_from, check_parts, input_of, labels_of
from dmcp.runtime.distributed import SINGLE_PROCESS, World


def test_samplers_that_repeat_are_seen() -> None:
    def loader(samples: int, **options: Any) -> DataLoader[Any]:
        data = list(range(samples))
        return DataLoader(data, 5, sampler=DistributedSampler(data, 2, 0, **options))

    for fine in (loader(20), loader(21, drop_last=True), DataLoader(list(range(21)), 5), [torch.zeros(2)]):
        check_parts(fine, World(0, 2))
    check_parts(loader(21), SINGLE_PROCESS)
    with pytest.raises(DataError):
        check_parts(loader(21), World(0, 2))


def test_a_dict_with_other_keys_is_told_which() -> None:
    with pytest.raises(DataError, match=r"'image', 'target': .*pixel_values"):
        input_of({"image": torch.zeros(2), "target": torch.zeros(2)})


@pytest.mark.parametrize("batch", [torch.zeros(4, 3), (torch.zeros(3), torch.tensor(1)), {"input": 0, "label": 1}])
def test_what_is_no_batch_is_told_what_makes_batches(batch: Any) -> None:
    with pytest.raises(DataError, match="batch_size=64"):
        labels_of(batch)


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
