"""Numbers in the code of a network that follow a width, in every way in which they can come into torch.

A cut network computes them anew, a gated one has those of the unpruned network: such a width is unprunable, or both
differ.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nets import sizes
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.tracing.replay import find_guilty

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TABLE = torch.arange(40.0)
TABLES = [torch.tensor(2.0), torch.tensor(3.0, dtype=torch.bfloat16)]


class Scaled(nn.Module):
    def __init__(self, way: Callable[[Tensor], Any], reads: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 12, 1), nn.Conv2d(12, 4, 1)
        self.few, self.many = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(2.5))
        self.way, self.reads = way, reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads:  # then it is recorded with data, and replayed without
            x = x * (1.0 if x.sum().item() > -1e9 else 2.0)
        h = self.a(x)
        return self.head(self.b(h + self.way(h)))


def written(table: Tensor, index: Any, what: Any = 2.0) -> Tensor:
    table[index] = what
    return table


WITH_WIDTH: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda h: math.sqrt(h.shape[1]),
    "tensor": lambda h: torch.tensor(float(h.shape[1])),
    "tensor of tensors": lambda h: torch.tensor([torch.tensor(float(h.shape[1])), 1.0])[0],
    "as_tensor": lambda h: torch.as_tensor([float(h.shape[1])]),
    "new_tensor": lambda h: h.new_tensor([1.0 * h.shape[1]]),
    "new": lambda h: h.new([1.0 * h.shape[1]]),
    "Tensor": lambda h: torch.Tensor([h.shape[1]])[0],
    "from_numpy": lambda h: torch.from_numpy(np.array([h.shape[1]], np.float32)),
    "full": lambda h: torch.full((1,), float(h.shape[1])),
    "fill": lambda h: torch.zeros(1).fill_(h.shape[1]),
    "an entry": lambda h: TABLE.to(h.device)[h.shape[1]],
    "entries": lambda h: TABLE.to(h.device)[[h.shape[1], 3]].sum(),
    "an entry that is written": lambda h: written(torch.zeros(40), h.shape[1], 5)[8],
    "a number that is written": lambda h: written(torch.zeros(2), 0, float(h.shape[1]))[0],
    "a range": lambda h: torch.tensor(range(h.shape[1])).sum() / 100,
    "an array of Python": lambda h: torch.as_tensor(array("f", [h.shape[1]])),
    "one_hot": lambda h: F.one_hot(torch.tensor([0]), h.shape[1]).float().mean(),
    "roll of a map": lambda h: h.roll(h.shape[1] // 4, dims=2),
    "select of a map": lambda h: h.select(2, h.shape[1] // 4)[:, :, None],
    "padding of a map": lambda h: F.pad(h, (h.shape[1] // 8, 2 - h.shape[1] // 8, 0, 0))[..., 1:-1],
    "divisor of a pooling": lambda h: F.avg_pool2d(h, 3, 1, 1, divisor_override=h.shape[1]),
    "a switch": lambda h: h.var((2, 3), unbiased=h.shape[1] > 10, keepdim=True),
    "a kind of gelu": lambda h: F.gelu(h, approximate="tanh" if h.shape[1] > 10 else "none"),
    "a dim": lambda h: h.cumsum(2 if h.shape[1] > 10 else 3),
    "an op that does not run without data": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -8, 8),
    # branches
    "the order of two": lambda h: h.relu() - h.sigmoid() if h.shape[1] > 10 else h.sigmoid() - h.relu(),
    "where": lambda h: torch.where(h > 0, h, -h) if h.shape[1] > 10 else torch.where(h > 0, -h, h),
    "one of two tables": lambda h: TABLES[h.shape[1] > 10].to(h.device),
    "from dlpack": lambda h: torch.from_dlpack(np.array([float(h.shape[1])], np.float32)).to(h.device),
    "other ops": lambda h: h.relu() if h.shape[1] > 10 else h.sigmoid(),
}
WITHOUT_WIDTH: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda h: 3.0,
    "tensor": lambda h: torch.tensor([2.0, 3.0]).sum(),
    "not a number": lambda h: torch.tensor(float("nan")).nan_to_num(2.0),
    "new_tensor": lambda h: h.new_tensor([float(h.shape[-1])]),
    "Tensor": lambda h: torch.Tensor([2.0, 3.0]).sum(),
    "from_numpy": lambda h: torch.from_numpy(np.array([2.0, 3.0], np.float32)).sum(),
    "an entry": lambda h: TABLE.to(h.device)[h.shape[-1]],
    "entries": lambda h: TABLE.to(h.device)[[1, 3]].sum(),
    "a number that is written": lambda h: written(torch.zeros(2), 0)[0],
    "a number for a part": lambda h: written(h.clone(), (slice(None), slice(None), 0)),
    "a number for what a mask says": lambda h: written(h.clone(), h < 0),
    "a number for samples": lambda h: written(h.clone(), h.new_zeros(2) < 1),
    "a tensor for a part": lambda h: written(h.clone(), (slice(None), slice(None), 0), h[:, :, 1]),
    "an array, by an old name": lambda h: torch.Tensor(np.full((1, 1, 1, 1), 0.4, np.float32)).to(h.device),
    "sizes": lambda h: h.new(h.shape[0], h.shape[1], 1, 1).zero_(),
    "not a number, in an op": lambda h: h.masked_fill(h > 3, float("nan")).nan_to_num(0.0),
}


def gated_and_cut_agree(model: nn.Module, spaces: list[str]) -> Any:
    graph = dmcp.trace(model.eval(), X)
    assert list(sizes(graph)) == spaces
    widths = graph.widths([space.size // 2 for space in graph.spaces])
    net, small = dmcp.Supernet(model, graph).eval(), dmcp.cut(model, graph, widths)
    with torch.no_grad():
        torch.testing.assert_close(net(X, net.hard(widths)), small(X))
    return graph


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("way", WITH_WIDTH)
def test_a_width_in_the_arithmetic_is_unprunable(way: str, reads: bool) -> None:
    gated_and_cut_agree(Scaled(WITH_WIDTH[way], reads), ["b"])  # the rest is pruned all the same


def checked(h: Tensor) -> Tensor:
    assert h.shape[1] == 12
    return 2 * h


def shifted(h: Tensor) -> Tensor:
    """A quarter of the channels moves by one row, as in a temporal shift module."""
    moved, quarter = torch.zeros_like(h), h.shape[1] // 4
    moved[:, :quarter, 1:] = h[:, :quarter, :-1]
    moved[:, quarter:] = h[:, quarter:]
    return moved


def rolled(h: Tensor) -> Tensor:
    quarter = h.shape[1] // 4
    return torch.cat([h[:, :quarter].roll(1, 2), h[:, quarter:]], dim=1)


WAYS = {"an assertion": checked, "a quarter written": shifted, "a quarter concatenated": rolled}


@pytest.mark.parametrize("way", WAYS)
def test_a_difficulty_costs_the_layer_that_it_is_about(way: str) -> None:
    """Though it is in the code of the model itself, which all layers are in."""

    class Difficult(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.c(self.way(self.b(self.a(x)))))

    model = Difficult(WAYS[way])
    model.c = nn.Conv2d(12, 12, 1)
    graph = gated_and_cut_agree(model, ["a", "c"])
    reason = next(item.reason for item in graph.unprunable if item.name == "b")
    assert "subclass" not in reason  # there is none


def test_a_difficulty_of_two_layers_costs_both() -> None:
    class Both(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            h, wide = self.b(self.a(x)), self.c(x)
            if h.shape[1] < 12 and wide.shape[1] < 20:
                raise ValueError("both are narrow")
            return self.head(2 * h) + self.tail(wide)

    model = Both(torch.relu)
    model.c, model.tail = nn.Conv2d(3, 20, 3), nn.Conv2d(20, 4, 1)
    gated_and_cut_agree(model, ["a"])


@pytest.mark.parametrize("guilty", [[3], [0, 7], [2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_guilty_items_are_found_alone_and_together(guilty: list[int]) -> None:
    assert find_guilty(range(8), lambda items: not set(guilty).isdisjoint(items)) == guilty
    assert find_guilty(range(8), lambda items: set(guilty) <= set(items)) == guilty


def test_a_model_that_needs_data_is_refused() -> None:
    def picky(h: Tensor) -> Tensor:
        if h.device.type == "meta":
            raise RuntimeError("no meta device here")
        return h

    with pytest.raises(dmcp.TraceError, match="no meta device here"):
        dmcp.trace(Scaled(picky).eval(), X)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("way", WITHOUT_WIDTH)
def test_other_numbers_cost_no_space(way: str, reads: bool) -> None:
    gated_and_cut_agree(Scaled(WITHOUT_WIDTH[way], reads), ["a", "b"])


def test_a_branch_by_a_width_that_picks_a_parameter_is_seen() -> None:
    class Picks(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.head(self.b(h * (self.few if h.shape[1] <= 10 else self.many)))

    gated_and_cut_agree(Picks(torch.relu), ["b"])


def test_a_number_that_follows_a_later_width_keeps_that_one() -> None:
    class Ahead(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(self.a(x) / (3 + self.b.out_channels)))

    graph = gated_and_cut_agree(Ahead(torch.relu), ["a"])
    assert {item.name: item.reason for item in graph.unprunable}["b"] == "a number in the code depends on its size"


def test_numbers_of_a_generator_of_its_own_follow_no_width() -> None:
    dice = np.random.default_rng(0)
    ways: list[Callable[[Tensor], Any]] = [
        lambda h: torch.zeros(4000)[int(dice.integers(4000))],
        lambda h: 0 * torch.from_numpy(dice.random(1).astype(np.float32)).to(h.device),
        lambda h: torch.tensor(dice.random()) * 0,
        lambda h: h.relu() * (0 * dice.random()),
    ]
    for way in ways:
        assert list(sizes(dmcp.trace(Scaled(way).eval(), X))) == ["a", "b"]
    also_wide = Scaled(lambda h: torch.tensor(dice.random()) * h.shape[1]).eval()
    assert list(sizes(dmcp.trace(also_wide, X, verify=False))) == ["b"]
    with pytest.raises(dmcp.TraceError):  # other numbers in every run: nothing to compare
        dmcp.trace(also_wide, X)
