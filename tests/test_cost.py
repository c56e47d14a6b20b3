"""Costs as polynomials: against arithmetic by hand, against torch's own counter, against all outcomes of the chain."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nets import randomise, sample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp.markov import group_sizes, marginals, moment
from dmcp.tracing import cost
from dmcp.tracing.cost import Polynomial, evaluate, product, total
from dmcp.tracing.layout import Atom, fixed

A, B = ((Atom(0),),), ((Atom(1), 3), (2,))  # dims of width a and 3b + 2


class Toy(nn.Module):
    """Layers by name, and a forward that is written where it is tested."""

    def __init__(self, run: Callable[[Any, Any], Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


# -- polynomials


def test_products_of_dims_by_hand() -> None:
    terms = product(5, [A, B, fixed(7), A])  # 5 * a * (3b + 2) * 7 * a
    assert terms == {(0, 0, 1): 105, (0, 0): 70}
    assert total([terms, {(0, 0): 1, (): 4}]) == {(0, 0, 1): 105, (0, 0): 71, (): 4}
    assert evaluate(terms, [3, 4]) == 5 * 3 * 14 * 7 * 3
    assert product(5, []) == {(): 5}


def test_many_widths_in_one_expression() -> None:
    polynomial = Polynomial(total([product(5, [A, B, A]), product(2, [B]), {(): 9}]), 2)
    table = torch.randint(1, 50, (33, 2))
    expected = [5 * a * (3 * b + 2) * a + 2 * (3 * b + 2) + 9 for a, b in table.tolist()]
    found = polynomial(table)
    assert found.tolist() == expected
    assert found.dtype == torch.int64
    assert polynomial(table[:0]).shape == (0,)
    assert polynomial(table.double()).tolist() == expected


def test_ints_are_exact_where_floats_are_not() -> None:
    terms = product(2**30 + 1, [A, A])
    widths = [2**14 + 1]
    exact = (2**30 + 1) * (2**14 + 1) ** 2
    assert exact > 2**53
    assert evaluate(terms, widths) == exact
    assert Polynomial(terms, 1)(torch.tensor([widths])).item() == exact
    assert int(float(exact)) != exact


def test_a_sum_is_exact_where_its_terms_are_small() -> None:
    polynomial = Polynomial({(0,): 2**52 + 1, (1,): 2**52, (): 2}, 2)  # 2**53 + 3 is no float64
    assert polynomial(torch.ones(3, 2, dtype=torch.int64)).tolist() == [2**53 + 3] * 3
    assert polynomial(torch.tensor([[1, -1]])).tolist() == [3]


@pytest.mark.parametrize("most", [1, 9, 100, 3000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_many_widths_are_counted_exactly(most: int, dtype: torch.dtype) -> None:
    """Against Python's ints; the largest are beyond what a float64 holds, and rows or columns may lie together."""
    terms = {(0, 0, 0, 1): 1237, (0, 0, 1, 1): -77, (1, 2): 91, (2, 2): 1, (1,): 0, (): -5}
    table = torch.randint(0, most + 1, (300, 3)).to(dtype)
    expected = [1237 * a**3 * b - 77 * a**2 * b**2 + 91 * b * c + c**2 - 5 for a, b, c in table.tolist()]
    assert (max(expected) > 2**53) == (most == 3000)
    for widths in (table, table.T.contiguous().T, table.repeat_interleave(2, dim=0)[::2]):
        assert Polynomial(terms, 3)(widths).tolist() == expected


def test_tensors_are_right_for_every_dtype_and_mode() -> None:
    polynomial = Polynomial(product(5, [A, B, A]), 2)
    table = torch.tensor([[3, 4]])
    with torch.inference_mode():  # what is kept from here must serve a training step
        assert polynomial(table.float()).item() == 5 * 3 * 14 * 3
    for widths in (table.float(), table.double(), table):
        assert polynomial(widths).tolist() == [5 * 3 * 14 * 3]
        assert polynomial(widths).dtype == widths.dtype
    slope = gradient(polynomial, table)[0].tolist()
    moving = table.float().requires_grad_()
    polynomial(moving).sum().backward()
    assert moving.grad.tolist() == slope == [[10 * 3 * 14, 15 * 9]]


def test_a_constant_cost() -> None:
    assert Polynomial({(): 7}, 2)(torch.ones(3, 2)).tolist() == [7, 7, 7]
    assert Polynomial({}, 2)(torch.ones(3, 2)).tolist() == [0, 0, 0]
    assert Polynomial({(): 7}, 2).expected(lambda power: torch.ones(2)).item() == 7
    assert Polynomial({}, 2).expected(lambda power: torch.ones(2)).item() == 0


def test_gradients_by_hand() -> None:
    table = torch.tensor([[3.0, 4.0], [5.0, 2.0]], dtype=torch.float64, requires_grad=True)
    Polynomial(product(5, [A, B, A]), 2)(table).sum().backward()
    assert table.grad.tolist() == [[10 * a * (3 * b + 2), 15 * a * a] for a, b in table.tolist()]


def test_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    polynomial = Polynomial(total([product(5, [A, B, A]), product(2, [B])]), 2)
    table = torch.randint(1, 50, (101, 2))
    whole, (slope,) = polynomial(table), gradient(polynomial, table)
    for chunk in (1, 4, 7, 64):
        monkeypatch.setattr(cost, "_CHUNK", chunk)
        assert torch.equal(polynomial(table), whole)
        torch.testing.assert_close(gradient(polynomial, table)[0], slope)


def gradient(polynomial: Polynomial, table: Tensor) -> tuple[Tensor, ...]:
    widths = table.double().requires_grad_()
    return torch.autograd.grad(polynomial(widths).sum(), widths)


# -- a net whose residual stream is the input and the output of one conv: its width comes squared

STREAM, INNER, PIXELS = 6, 5, 49


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STREAM, 3, padding=1, bias=False)
        self.dense = nn.Conv2d(STREAM, STREAM, 3, padding=1)
        self.inner = nn.Conv2d(STREAM, INNER, 1)
        self.head = nn.Linear(INNER, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.dense(x))
        return self.head(F.relu(self.inner(x)).mean((2, 3)))


def squared_macs(stream: int, inner: int) -> int:
    return PIXELS * (27 * stream + 9 * stream * stream + stream * inner) + 4 * inner


def squared_params(stream: int, inner: int) -> int:
    return 27 * stream + 9 * stream * stream + stream + stream * inner + inner + 4 * inner + 4


@pytest.fixture(scope="module")
def squared() -> Any:
    graph = dmcp.trace(Squared(), torch.zeros(2, 3, 7, 7))
    assert {space.name: space.size for space in graph.spaces} == {"stem": STREAM, "inner": INNER}
    return graph


def every_width() -> Iterator[tuple[int, int]]:
    return itertools.product(range(1, STREAM + 1), range(1, INNER + 1))


def test_every_width_of_a_squared_space_by_hand(squared: Any) -> None:
    table = torch.tensor(list(every_width()))
    macs, params = [squared_macs(*w) for w in every_width()], [squared_params(*w) for w in every_width()]
    assert squared.macs(table).tolist() == macs
    assert squared.params(table).tolist() == params
    assert [squared.macs({"stem": s, "inner": i}) for s, i in every_width()] == macs
    assert [squared.params({"stem": s, "inner": i}) for s, i in every_width()] == params


def test_layers_by_hand(squared: Any) -> None:
    found = {layer.name: (layer.kind, layer.macs, layer.params) for layer in squared.layers({"stem": 4, "inner": 3})}
    assert found == {
        "stem": ("conv", PIXELS * 27 * 4, 27 * 4),
        "dense": ("conv", PIXELS * 9 * 16, 9 * 16 + 4),
        "inner": ("conv", PIXELS * 12, 12 + 3),
        "head": ("linear", 12, 16),
    }
    assert list(found) == ["stem", "dense", "inner", "head"]


@pytest.mark.parametrize("groups", [1, 2, 4, 10])
def test_the_expected_cost_is_the_average_over_all_structures(squared: Any, groups: int) -> None:
    net = dmcp.Supernet(Squared(), squared, groups=groups)
    generator = torch.Generator().manual_seed(groups)
    alpha = torch.randn(net.alpha.shape, generator=generator, dtype=torch.float64)
    chances: list[dict[int, float]] = []  # of each space: width -> chance, by hand
    for row, size in enumerate((STREAM, INNER)):
        sizes = group_sizes(size, groups)
        keep = [1.0, *(1 / (1 + math.exp(-a)) for a in alpha[row].tolist()[: len(sizes) - 1]), 0.0]
        chances.append(
            {sum(sizes[:k]): math.prod(keep[:k]) * (1 - keep[k]) for k in range(1, len(sizes) + 1)},
        )
        assert sum(chances[-1].values()) == pytest.approx(1)
    for by_hand, found in ((squared_macs, squared.expected_macs), (squared_params, squared.expected_params)):
        average = sum(
            p * q * by_hand(stream, inner)
            for (stream, p), (inner, q) in itertools.product(chances[0].items(), chances[1].items())
        )
        survive = marginals(alpha) * (net.sizes > 0)
        assert found(survive, net.sizes).item() == pytest.approx(average, rel=1e-12)
    if groups > 1:  # the square of the mean is not the mean of the square
        means = [sum(width * p for width, p in chance.items()) for chance in chances]
        assert squared_params(*means) < 0.999 * average


def test_a_copied_graph_costs_the_same(squared: Any) -> None:
    table = torch.tensor(list(every_width()))
    assert squared.macs(table).tolist() == [squared_macs(*w) for w in every_width()]  # its tensors are made
    twin = copy.deepcopy(squared)
    assert twin.macs(table).tolist() == [squared_macs(*w) for w in every_width()]
    net = dmcp.Supernet(Squared(), squared, groups=3)
    for kind in ("expected_macs", "expected_params"):
        before = getattr(squared, kind)(net.marginals(), net.sizes)
        assert torch.equal(getattr(copy.deepcopy(squared), kind)(net.marginals(), net.sizes), before)


def test_the_expected_cost_has_the_right_gradient(squared: Any) -> None:
    net = dmcp.Supernet(Squared(), squared, groups=3)

    def costs(alpha: Tensor) -> Tensor:
        survive = marginals(alpha) * (net.sizes > 0)
        return torch.stack([squared.expected_macs(survive, net.sizes), squared.expected_params(survive, net.sizes)])

    alpha = torch.tensor([[0.3, -0.8], [1.1, 0.2]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(costs, alpha)
    (slope,) = torch.autograd.grad(costs(alpha)[0], alpha)
    assert (slope > 0).all()


def test_at_the_ends_of_the_chain_the_expected_cost_is_exact(squared: Any) -> None:
    net = dmcp.Supernet(Squared(), squared, groups=3).double()
    for alpha, widths in ((1e4, squared.full), (-1e4, net.min_widths)):
        survive = marginals(torch.full_like(net.alpha, alpha)) * (net.sizes > 0)
        assert squared.expected_macs(survive, net.sizes).item() == squared.macs(widths)
        assert squared.expected_params(survive, net.sizes).item() == squared.params(widths)


def test_a_space_to_the_third_power() -> None:
    polynomial = Polynomial({(0, 0, 0): 1, (0, 0): 16, (0,): 50, (): 7}, spaces=1)
    survive, sizes = torch.tensor([[1.0, 0.5]], dtype=torch.float64), torch.tensor([[2, 3]])  # width 2 or 5
    values = [width**3 + 16 * width**2 + 50 * width + 7 for width in (2, 5)]
    assert polynomial(torch.tensor([[2], [5]])).tolist() == values
    expected = polynomial.expected(lambda power: moment(survive, sizes, power))
    assert expected.item() == pytest.approx(sum(values) / 2)


# -- against torch's own counter


def counted(model: nn.Module, x: Tensor) -> int:
    """Multiply-adds of one sample; with gradients, since attention's fused path cannot be counted."""
    with FlopCounterMode(display=False) as counter:
        copy.deepcopy(model).eval()(x[:1])
    return counter.get_total_flops() // 2


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


LAYERS: dict[str, dict[str, Any]] = {
    "dilated": {"b": nn.Conv2d(16, 12, 3, stride=2, padding=2, dilation=2)},
    "uneven kernel": {"b": nn.Conv2d(16, 12, (3, 1), stride=(1, 2), padding=(0, 1))},
    "same padding": {"b": nn.Conv2d(16, 12, 3, padding="same")},
    "inside groups": {"b": nn.Conv2d(16, 12, 3, groups=2)},
    "whole groups": {"b": nn.Conv2d(16, 24, 3, groups=8)},
    "depthwise": {"b": nn.Conv2d(16, 16, 3, groups=16)},
    "depthwise times two": {"b": nn.Conv2d(16, 32, 3, groups=16)},
    "transposed": {"b": nn.ConvTranspose2d(16, 12, 3, stride=2, padding=1, output_padding=1)},
    "transposed in groups": {"b": nn.ConvTranspose2d(16, 12, 3, stride=2, groups=2)},
    "transposed depthwise": {"b": nn.ConvTranspose2d(16, 16, 2, stride=2, groups=16)},
}
OPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda m, x: (x @ x.transpose(2, 3)).mean((2, 3)),
    "matmul with a parameter": lambda m, x: (tokens(x) @ m.square).mean(1),
    "parameter first": lambda m, x: (m.square @ x.flatten(2)).mean(2),
    "addmm": lambda m, x: torch.addmm(m.bias, x.mean((2, 3)), m.square),
    "bmm": lambda m, x: torch.bmm(x.flatten(2), tokens(x) @ m.square).mean(1),
    "linear over pixels": lambda m, x: m.fc(x.movedim(1, -1)).mean((1, 2)),
    "einsum": lambda m, x: torch.einsum("nchw,cd->nd", x, m.square),
    "einsum that keeps pixels": lambda m, x: torch.einsum("nchw,cd->ndhw", x, m.square).mean((2, 3)),
    "einsum over pixels": lambda m, x: torch.einsum("nchw,ndhw->ncd", x, x).mean(1),
    "einsum that scales": lambda m, x: torch.einsum("nchw,c->nchw", x, m.bias).mean((2, 3)),
    "attention": lambda m, x: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x), scale=0.5).mean(1),
    "attention with another value": lambda m, x: F.scaled_dot_product_attention(
        tokens(x), tokens(x), tokens(x) @ m.square
    ).mean(1),
    "no rule": lambda m, x: torch.tensordot(x.mean((2, 3)), m.square, 1),
    "once for the batch": lambda m, x: x.mean((2, 3)) @ (m.square @ m.square),
    "a sum over the batch": lambda m, x: x.mean((2, 3)) @ (x.mean((2, 3)).T @ x.mean((2, 3))),
    "samples in the channels": lambda m, x: (
        F.conv2d(x.flatten(0, 1)[None], m.blur.repeat(len(x), 1, 1, 1), groups=16 * len(x)).view(len(x), 16, -1).mean(2)
    ),
}


def check_counts(model: nn.Module) -> None:
    x = sample((3, 9, 9), batch=2)
    randomise(model)
    for example in (x, x[:1]):  # one sample costs the same, however many there were
        graph = dmcp.trace(model, example)
        generator = random.Random(0)
        assert graph.macs() == counted(model, x)
        for _ in range(2):
            widths = graph.widths({s.name: generator.randint(min(2, s.size), s.size) for s in graph.spaces})
            small = dmcp.cut(model, graph, widths)
            assert graph.macs(widths) == counted(small, x), dict(widths)
            assert graph.params(widths) == sum(parameter.numel() for parameter in small.parameters())
            layers = graph.layers(widths)
            assert sum(layer.macs for layer in layers) == graph.macs(widths)
            assert sum(layer.params for layer in layers) == graph.params(widths)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_counted_as_torch_does(name: str) -> None:
    (layer,) = LAYERS[name].values()
    model = Toy(
        lambda m, x: m.head(F.relu(m.b(F.relu(m.a(x)))).mean((2, 3))),
        a=nn.Conv2d(3, 16, 3, padding=1),
        b=copy.deepcopy(layer),
        head=nn.Linear(layer.out_channels, 5),
    )
    check_counts(model)


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks_are_counted_as_torch_does(rank: int) -> None:
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[rank]
    model = Toy(lambda m, x: m.b(F.relu(m.a(x))), a=conv(3, 8, 3, stride=2), b=conv(8, 4, 2))
    x = torch.zeros(1, 3, *(9, 8, 7)[:rank])
    assert dmcp.trace(model, x).macs() == counted(model, x)


@pytest.mark.parametrize("name", OPS)
def test_ops_are_counted_as_torch_does(name: str) -> None:
    model = Toy(
        lambda m, x: m.head(OPS[name](m, F.relu(m.a(x))[:, :, :6, :6])) + m.d(m.c(x)).mean((2, 3)),
        a=nn.Conv2d(3, 16, 3, padding=1),
        fc=nn.Linear(16, 16),
        head=nn.Linear(16, 5),
        c=nn.Conv2d(3, 4, 1),  # something to prune where the op keeps the rest whole
        d=nn.Conv2d(4, 5, 1),
    )
    model.square, model.bias = nn.Parameter(torch.rand(16, 16)), nn.Parameter(torch.rand(16))
    model.blur = nn.Parameter(torch.rand(16, 1, 3, 3))
    check_counts(model)
