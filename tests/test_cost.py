"""Costs as polynomials: against arithmetic by hand, all outcomes of the chain, and what PyTorch really holds."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Toy, mystery
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dmcp
from dmcp.markov import group_sizes, marginals, mean_of
from dmcp.tracing.cost import Polynomial, Step, evaluate, product, total
from dmcp.tracing.layout import Atom

A, B = ((Atom(0),),), ((Atom(1), 3), (2,))  # dims of width a and 3b + 2

# -- polynomials


@pytest.mark.parametrize(("largest", "dtype"), [(1, torch.int64), (9, torch.int32), (3000, torch.int64)])
def test_many_widths_are_counted_exactly(largest: int, dtype: torch.dtype) -> None:
    """Against Python's ints; the largest are beyond what a float64 holds, and rows or columns may lie together."""
    terms = {(0, 0, 0, 1): 1237, (0, 0, 1, 1): -77, (1, 2): 91, (2, 2): 1, (1,): 0, (): -5}
    table = torch.randint(0, largest + 1, (300, 3)).to(dtype)
    expected = [1237 * a**3 * b - 77 * a**2 * b**2 + 91 * b * c + c**2 - 5 for a, b, c in table.tolist()]
    assert (max(expected) > 2**53) == (largest == 3000)
    for widths in (table, table.T.contiguous().T, table.repeat_interleave(2, dim=0)[::2]):
        found = Polynomial(terms, 3)(widths)
        assert found.tolist() == expected and found.dtype == torch.int64


def test_products_of_dims_are_differentiable_in_chunks() -> None:
    terms, table = product(5, [A, B, A]), torch.randint(1, 50, (70_000, 2))  # in several chunks
    polynomial, (a, b) = Polynomial(terms, 2), table.T
    with torch.inference_mode():  # what is cached here must serve a training step
        polynomial(table.double())
    moving = table.double().requires_grad_()
    found = polynomial(moving)
    found.sum().backward()
    assert found.equal((5 * a * (3 * b + 2) * a).double()) and evaluate(terms, table[0].tolist()) == found[0]
    assert moving.grad.equal(torch.stack([10 * a * (3 * b + 2), 15 * a * a], dim=1).double())
    assert polynomial(table[:0]).shape == (0,) and total([terms, {(): 4}]) == terms | {(): 4}


# -- staircases: widths as blocks of channels count them

BLOCKS = (Step(4, padded=True), Step(3, padded=False))
STAIRS = {(0, 1): 7, (2, 1): 5, (2, 2): 3, (2, 4): 11, (0, 4): 2, (5,): 13, (4, 3): 17, (): 1}  # two spaces, 0 and 1


def stairs(a: int, b: int) -> int:
    """The same by hand: 2 and 3 are a and b in fours, 4 and 5 are a and b unless they are multiples of 3."""
    in_fours = math.ceil(a / 4) * 4
    odd_a, odd_b = a * (a % 3 > 0), b * (b % 3 > 0)
    value = 7 * a * b + 5 * in_fours * b + 3 * in_fours**2 + 11 * in_fours * odd_a + 2 * a * odd_a
    return value + 13 * odd_b + 17 * odd_a * math.ceil(b / 4) * 4 + 1


def test_staircases_are_counted_exactly_and_slope_where_they_jump() -> None:
    polynomial = Polynomial(STAIRS, 2, steps=BLOCKS)
    table = torch.cartesian_prod(torch.arange(1, 14), torch.arange(1, 10))
    counted = [stairs(a, b) for a, b in table.tolist()]
    assert polynomial(table).tolist() == counted == polynomial(table.double()).tolist()
    assert [polynomial.evaluate(row) for row in table.tolist()] == counted
    moving = torch.tensor([[6.0, 2.0]], dtype=torch.float64, requires_grad=True)  # 8 and 4 in fours; odd: 0 and 2
    polynomial(moving).backward()
    assert moving.grad.tolist() == [[7 * 2 + 5 * 2 + 3 * 2 * 8, 7 * 6 + 5 * 8 + 13]]


def test_the_expected_staircase_is_the_mean_over_all_widths() -> None:
    """A padded width and the width of the same space are not independent."""
    sizes = torch.tensor([[2, 2, 3, 4], [1, 3, 5, 0]])
    alpha = torch.tensor([[0.3, -0.4, 1.1], [-0.2, 0.7, 0.0]], dtype=torch.float64, requires_grad=True)
    chances = marginals(alpha)
    found = Polynomial(STAIRS, 2, steps=BLOCKS).expected(lambda function: mean_of(chances, sizes, function))
    ends = torch.cat([chances, torch.zeros(2, 1)], dim=1)
    by_groups = ends[:, :-1] - ends[:, 1:]  # chance of exactly so many groups
    widths = sizes.cumsum(1)
    mean = 0.0
    for first, second in itertools.product(range(4), repeat=2):
        chance = (by_groups[0, first] * by_groups[1, second]).item()
        mean += chance * stairs(widths[0, first].item(), widths[1, second].item())
    assert found.item() == pytest.approx(mean) and torch.autograd.grad(found, alpha)[0].abs().min() >= 0


# -- a net whose residual stream is the input and the output of one conv: its width comes squared

STREAM, INNER, PIXELS = 6, 5, 49


def squared_net() -> nn.Module:
    def run(m: Any, x: Tensor) -> Any:
        x = m.stem(x)
        return m.head(F.relu(m.inner(F.relu(x + m.dense(x)))).mean((2, 3)))

    stem, dense = nn.Conv2d(3, STREAM, 3, padding=1, bias=False), nn.Conv2d(STREAM, STREAM, 3, padding=1)
    return Toy(run, stem=stem, dense=dense, inner=nn.Conv2d(STREAM, INNER, 1), head=nn.Linear(INNER, 4))


def squared_macs(stream: int, inner: int) -> int:
    return PIXELS * (27 * stream + 9 * stream * stream + stream * inner) + 4 * inner


def squared_params(stream: int, inner: int) -> int:
    return 27 * stream + 9 * stream * stream + stream + stream * inner + inner + 4 * inner + 4


@pytest.fixture(scope="module")
def squared() -> Any:
    graph = dmcp.trace(squared_net(), torch.zeros(2, 3, 7, 7))
    assert {space.name: space.size for space in graph.spaces} == {"stem": STREAM, "inner": INNER}
    return graph


@pytest.mark.parametrize("groups", [1, 4, 10])
def test_the_expected_cost_is_the_average_over_all_widths(squared: Any, groups: int) -> None:
    net = dmcp.Supernet(squared_net(), squared, groups=groups)
    generator = torch.Generator().manual_seed(groups)
    alpha = torch.randn(net.alpha.shape, generator=generator, dtype=torch.float64)
    chances: list[dict[int, float]] = []  # of each space: width -> chance, by hand
    for row, size in enumerate((STREAM, INNER)):
        sizes = group_sizes(size, groups)
        keep = [1.0, *(1 / (1 + math.exp(-a)) for a in alpha[row].tolist()[: len(sizes) - 1]), 0.0]
        chances.append({sum(sizes[:k]): math.prod(keep[:k]) * (1 - keep[k]) for k in range(1, len(sizes) + 1)})
        assert sum(chances[-1].values()) == pytest.approx(1)
    pairs = list(itertools.product(chances[0].items(), chances[1].items()))
    survive = marginals(alpha) * (net.sizes > 0)
    for kind, by_hand in (("macs", squared_macs), ("params", squared_params)):
        average = sum(p * q * by_hand(stream, inner) for (stream, p), (inner, q) in pairs)
        assert squared.expected_cost(kind, survive, net.sizes).item() == pytest.approx(average, rel=1e-12)
    if groups > 1:  # the square of the mean is not the mean of the square
        means = [sum(width * p for width, p in chance.items()) for chance in chances]
        assert squared_params(*means) < 0.999 * average
    by = lambda alpha: squared.expected_cost("macs", marginals(alpha) * (net.sizes > 0), net.sizes)  # noqa: E731
    assert torch.autograd.gradcheck(by, alpha.requires_grad_())
    for end, widths in ((1e4, squared.full), (-1e4, net.min_widths)):
        assert by(torch.full_like(alpha, end)).item() == squared.macs(widths)


# -- memory


def chain(it: Any, x: Tensor) -> Tensor:
    x = F.relu_(it.a(x))
    x = F.relu_(it.b(x))
    x = F.avg_pool2d(x, 2)
    return it.head(x)


def residual(it: Any, x: Tensor) -> Tensor:
    x = F.relu_(it.a(x))
    y = F.relu_(it.b(x))
    x += it.c(y)
    del y
    return it.head(F.relu_(x))


def dense(it: Any, x: Tensor) -> Tensor:
    x = F.relu_(it.a(x))
    x = torch.cat([x, F.relu_(it.b(x))], 1)
    return it.head(x)


def nets() -> dict[str, Toy]:
    conv = nn.Conv2d
    return {
        "chain": Toy(chain, a=conv(2, 7, 3), b=conv(7, 11, 3), head=conv(11, 3, 1)),
        "residual": Toy(residual, a=conv(2, 6, 3), b=conv(6, 9, 3, padding=1), c=conv(9, 6, 1), head=conv(6, 3, 1)),
        "dense": Toy(dense, a=conv(2, 5, 3), b=conv(5, 4, 3, padding=1), head=conv(9, 3, 1)),
        "depthwise": Toy(chain, a=conv(2, 8, 1), b=conv(8, 8, 3, groups=8), head=conv(8, 3, 1)),
    }


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of all tensors that are alive after each op, without those that were there before."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters(), *model.buffers())}
        self.input, self.seen = x.untyped_storage(), list[tuple[int, bool]]()
        self.alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive += [weakref.ref(leaf) for leaf in (out if isinstance(out, (tuple, list)) else [out])]
        storages = [it.untyped_storage() for ref in self.alive if (it := ref()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        reads = any(isinstance(it, Tensor) and it.data_ptr() == self.input.data_ptr() for it in args)
        self.seen.append((sum(size for place, size in sizes.items() if place not in self.before), reads))
        return out

    @property
    def peak(self) -> int:
        """The peak, with the input until it is last read: PyTorch holds it longer, as the caller does."""
        last = max(number for number, (_, reads) in enumerate(self.seen) if reads)
        return max(size + self.input.nbytes() * (number <= last) for number, (size, _) in enumerate(self.seen))


@pytest.mark.parametrize("name", nets())
def test_pytorch_holds_as_much(name: str) -> None:
    model, x = nets()[name].eval(), torch.randn(1, 2, 9, 9)
    graph = dmcp.trace(model, x)
    sizes = [range(1, space.size + 1) for space in graph.spaces]
    found = set()
    for row in list(itertools.product(*sizes))[::3]:
        widths = graph.widths(row)
        small = dmcp.cut(model, graph, widths)
        with torch.no_grad(), Held(small, x) as held:
            small(x)
        assert graph.memory(widths) == held.peak
        found.add(graph.memory_at(widths))
    assert len(found) > 1 or name == "dense"  # where most is held depends on the widths


MAP, PLANE = 4 * 64, 64  # numbers in the map between `a` and `b`, and in their input and output
HELD: dict[str, tuple[Callable[[Any, Tensor], Tensor], float]] = {
    "relu overwrites": (lambda it, x: it.b(F.relu(it.a(x))), MAP + PLANE),
    "not what is read later": (lambda it, x: it.b(F.relu(y := it.a(x)) + F.hardtanh(y)), 2 * MAP),
    "half is read, but all is held": (lambda it, x: it.b(F.relu(it.a(x)[:, :, :4])), 1.5 * MAP),
    "a flat view is overwritten": (lambda it, x: it.b(F.relu(it.a(x).flatten(1)).view(len(x), -1, 8, 8)), MAP + PLANE),
    "so is a turned one": (lambda it, x: it.b(F.relu(it.a(x).transpose(1, 2)).transpose(1, 2)), MAP + PLANE),
    "not one that shows a part twice": (
        lambda it, x: it.b(F.relu(it.a(x)[:, :, None, :4].expand(-1, -1, 2, -1, -1).flatten(2, 3))),
        2 * MAP,
    ),
    "computed weights do not count": (lambda it, x: it.b(F.conv2d(x, 2 * it.a.weight)), MAP + PLANE),
    "an op without a rule": (lambda it, x: it.b(mystery(it.a(x))) + it.d(it.c(x)), 2 * MAP + PLANE),
}


def test_memory_by_hand() -> None:
    convs = {"a": nn.Conv2d(1, 4, 1), "b": nn.Conv2d(4, 1, 1), "c": nn.Conv2d(1, 2, 1), "d": nn.Conv2d(2, 1, 1)}
    for run, numbers in HELD.values():
        for batch, dtype in ((1, torch.float32), (4, torch.bfloat16)):
            graph = dmcp.trace(Toy(run, **convs).to(dtype), torch.randn(batch, 1, 8, 8, dtype=dtype))
            assert graph.memory() == dtype.itemsize * numbers


def test_a_search_ends_inside_a_budget_of_memory() -> None:
    torch.manual_seed(0)
    model, x = nets()["dense"], torch.randn(8, 2, 9, 9)
    task = dmcp.Task(loss=lambda output, batch: (output - batch[1]).square().mean())
    config = dmcp.SearchConfig(budget="memory:50%", epochs=6, distill=False)
    graph = dmcp.trace(model, x)
    found = dmcp.search(dmcp.Supernet(model, graph), [(x, torch.randn(8, 3, 7, 7))] * 20, config, task=task)
    assert 0.8 < graph.memory(dmcp.expected(found)) / found.budget.limits[0].target <= 1
