"""Samplers that repeat samples, and the first batches of each epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import Toy, unit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dmcp
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError
from dmcp.runtime.batches import FewBatches, batches_from, check_parts, input_of, labels_of
from dmcp.runtime.distributed import SINGLE_PROCESS, World
from dmcp.tracing.modules import as_arguments


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


class Pair(nn.Module):
    """Compares two images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(unit(1, 8), unit(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Any:
        return self.head(scale * (self.body(a) - self.body(b)).mean((2, 3)))


def test_a_list_is_several_arguments_where_the_forward_needs_them() -> None:
    pair = [torch.zeros(2, 1, 4, 4)] * 2
    for model in (Pair(), nn.DataParallel(Pair()), nn.MultiheadAttention(2, 1)):
        assert as_arguments(model, pair) == tuple(pair)
    assert as_arguments(Toy(lambda m, x: x), pair) is pair
    assert as_arguments(Pair(), pair[0]) is pair[0]
    graph = dmcp.trace(Pair(), pair)
    assert graph.spaces and graph.to_json() == dmcp.trace(Pair(), tuple(pair)).to_json()


def test_pairs_of_a_data_loader_are_searched_trained_and_tested() -> None:
    samples = [((torch.randn(1, 8, 8), torch.randn(1, 8, 8)), index % 2) for index in range(12)]
    loader = DataLoader(samples, 6)
    search, train = dmcp.SearchConfig(budget="60%", epochs=2, groups=4), dmcp.TrainConfig(epochs=1, lr=0.01)
    own = dmcp.Task(loss=lambda output, batch: F.cross_entropy(output, batch[1]))
    for task, method in ((None, "dmcp"), (own, "sensitivity"), (None, "autoslim")):
        result = dmcp.prune(Pair(), loader, loader, search=search, train=train, task=task, method=method)
        assert result.rows[-1].samples == 12
    dmcp.recalibrate(result.model, loader)
    assert 0 <= dmcp.evaluate(result.model, loader) <= 1


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
