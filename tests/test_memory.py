"""Memory of activations: against arithmetic by hand, against what PyTorch really holds, and as a budget."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import NETS, mystery, randomise, sample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dmcp
from dmcp.budget import holds, parse, ratios, show_cost
from dmcp.errors import BudgetError
from dmcp.markov import CHAIN
from dmcp.tracing import cost
from dmcp.tracing.cost import show_bytes

FLOAT = 4


class Flat(nn.Module):
    """Layers by name, and a forward that holds nothing which it does not read any more."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def head(width: int) -> dict[str, nn.Module]:
    return {"head": nn.Conv2d(width, 3, 1)}


def chain(it: Any, x: Tensor) -> Tensor:
    x = F.relu_(it.a(x))
    x = F.relu_(it.b(x))
    x = F.avg_pool2d(x, 2)
    return it.head(x)  # type: ignore[no-any-return]


def residual(it: Any, x: Tensor) -> Tensor:
    x = F.relu_(it.a(x))
    y = F.relu_(it.b(x))
    x += it.c(y)
    del y
    return it.head(F.relu_(x))  # type: ignore[no-any-return]


def dense(it: Any, x: Tensor) -> Tensor:
    x = F.relu_(it.a(x))
    x = torch.cat([x, F.relu_(it.b(x))], 1)
    return it.head(x)  # type: ignore[no-any-return]


def nets() -> dict[str, Flat]:
    return {
        "chain": Flat(chain, a=nn.Conv2d(2, 7, 3), b=nn.Conv2d(7, 11, 3), **head(11)),
        "residual": Flat(
            residual, a=nn.Conv2d(2, 6, 3), b=nn.Conv2d(6, 9, 3, padding=1), c=nn.Conv2d(9, 6, 1), **head(6)
        ),
        "dense": Flat(dense, a=nn.Conv2d(2, 5, 3), b=nn.Conv2d(5, 4, 3, padding=1), **head(9)),
        "depthwise": Flat(chain, a=nn.Conv2d(2, 8, 1), b=nn.Conv2d(8, 8, 3, groups=8), **head(8)),
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
        """The most, with the input until it is last read: PyTorch holds it longer, as the caller does."""
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


def test_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten())
    model.append(nn.Linear(2 * 36, 5))
    graph = dmcp.trace(model, torch.randn(5, 1, 8, 8))
    assert graph.memory() == FLOAT * (4 * 64 + 2 * 36)  # the second convolution: norm and activation overwrite
    assert graph.memory_at() == "3"
    narrow = graph.widths({"0": 1, "3": 1})
    assert graph.memory(narrow) == FLOAT * (64 + 64)  # the first one, which reads the input
    assert graph.memory_at(narrow) == "0"
    assert graph.to_json()["memory"] == graph.memory() and graph.to_json()["memory_at"] == "3"
    assert "1.312 kB of activations" in graph.summary()


def test_what_is_read_later_stays() -> None:
    layers = {"a": nn.Conv2d(1, 4, 1), "b": nn.Conv2d(4, 1, 1)}
    once = Flat(lambda it, x: it.b(F.relu(it.a(x))), **layers)
    again = Flat(lambda it, x: (lambda y: it.b(F.relu(y) + F.hardtanh(y)))(it.a(x)), **layers)
    x = torch.randn(1, 1, 8, 8)
    map_ = FLOAT * 4 * 64
    assert dmcp.trace(once, x).memory() == map_ + FLOAT * 64
    assert dmcp.trace(again, x).memory() == 2 * map_  # hardtanh writes over what relu has read
    fresh = Flat(lambda it, x: it.b(it.a(F.relu(x))), a=nn.Conv2d(1, 2, 1), b=nn.Conv2d(2, 1, 1))
    narrow = dmcp.trace(fresh, x).widths([1])
    assert dmcp.trace(fresh, x).memory(narrow) == 2 * FLOAT * 64  # an input is not overwritten
    view = Flat(lambda it, x: it.b(F.relu(it.a(x)[:, :, :4])), **layers)
    assert dmcp.trace(view, x).memory() == 1.5 * map_  # half of it is read, but all of it is held meanwhile


@pytest.mark.parametrize("kind", ["flat", "turned"])
def test_another_look_at_all_of_it_is_overwritten(kind: str) -> None:
    """As PyTorch does in place, and runtimes by themselves."""
    x, last = torch.randn(1, 2, 9, 9), nn.Linear(5 * 49, 3) if kind == "flat" else nn.Conv2d(5, 3, 1)

    def net(activation: Callable[[Tensor], Tensor]) -> nn.Module:
        def run(it: Any, x: Tensor) -> Tensor:
            if kind == "flat":
                return it.b(activation(it.a(x).flatten(1)))  # type: ignore[no-any-return]
            return it.b(activation(it.a(x).transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]

        return Flat(run, a=nn.Conv2d(2, 5, 3), b=last)

    inside, outside = net(F.relu_), net(F.relu)
    with torch.no_grad(), Held(inside, x) as held:
        inside(x)
    found = [dmcp.trace(model, x).memory() for model in (inside, outside)]
    assert found == [held.peak] * 2 == [FLOAT * (2 * 81 + 5 * 49)] * 2


def test_a_part_that_was_made_as_large_again_is_not() -> None:
    """Half of it is shown twice: to write there would write each number twice."""

    def run(it: Any, x: Tensor) -> Tensor:
        x = it.a(x)
        return it.b(F.relu(x[:, :, None, :4].expand(-1, -1, 2, -1, -1).flatten(2, 3)))  # type: ignore[no-any-return]

    model, x = Flat(run, a=nn.Conv2d(1, 4, 1), b=nn.Conv2d(4, 1, 1)), torch.randn(1, 1, 8, 8)
    assert dmcp.trace(model, x).memory() == 2 * FLOAT * 4 * 64


def test_an_own_rule_says_whether_it_works_number_by_number() -> None:
    def passing(call: Any) -> Any:
        return [call.x.dims]

    model = Flat(lambda it, x: it.b(mystery(it.a(x))), a=nn.Conv2d(1, 4, 1), b=nn.Conv2d(4, 1, 1))
    x, op, map_ = torch.randn(1, 1, 8, 8), torch.ops.dmcp_tests.mystery.default, FLOAT * 4 * 64
    known = dmcp.RULES[torch.ops.aten.hardswish.default]
    for rule, bytes_ in ((known, map_ + FLOAT * 64), (passing, 2 * map_)):
        graph = dmcp.trace(model, x, rules=dmcp.RULES | {op: rule})
        assert graph.memory() == bytes_


def test_weights_and_batches_do_not_count() -> None:
    def standardised(it: Any, x: Tensor) -> Tensor:
        weight = 2 * it.a.weight
        return it.b(F.conv2d(x, weight))  # type: ignore[no-any-return]

    layers = {"a": nn.Conv2d(1, 40, 1, bias=False), "b": nn.Conv2d(40, 1, 1)}
    plain = Flat(lambda it, x: it.b(it.a(x)), **layers)
    sizes = {
        dmcp.trace(net, torch.randn(n, 1, 2, 2)).memory()
        for net in (plain, Flat(standardised, **layers))
        for n in (1, 4)
    }
    assert sizes == {FLOAT * 41 * 4}
    half = dmcp.trace(plain.to(torch.bfloat16), torch.randn(1, 1, 2, 2, dtype=torch.bfloat16))
    assert half.memory() == 2 * 41 * 4


@pytest.mark.parametrize("toy", NETS, ids=lambda toy: toy.__name__)
def test_cut_networks_trace_to_the_same_number(toy: Any) -> None:
    model, x = randomise(toy(**toy.FULL)), sample(toy.SHAPE)
    graph = dmcp.trace(model, x)
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        row = [int(torch.randint(1, space.size + 1, (), generator=random)) for space in graph.spaces]
        small = dmcp.cut(model, graph, graph.widths(row))
        assert dmcp.trace(small, x).memory() == graph.memory(graph.widths(row))


def drawn(graph: dmcp.ChannelGraph, count: int = 50) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.stack([torch.randint(1, space.size + 1, (count,), generator=random) for space in graph.spaces], dim=1)


def test_many_widths_at_once_and_the_moments_that_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nets()["residual"], torch.randn(1, 2, 9, 9)
    graph, table = dmcp.trace(model, x), None
    table = drawn(graph)
    counted = graph.memory(table)
    assert counted.dtype == torch.int64
    assert counted.tolist() == [graph.memory(graph.widths(row)) for row in table]
    with monkeypatch.context() as patched:
        patched.setattr(cost, "_worst", list)
        every = dmcp.trace(model, x)
    assert len(every.moments) > len(graph.moments) > 1
    assert every.memory(table).equal(counted)


def test_gradient_is_the_finite_difference() -> None:
    graph, step = dmcp.trace(nets()["dense"], torch.randn(1, 2, 9, 9)), 1e-3
    point = torch.tensor([3.3, 2.2], dtype=torch.float64)
    table = point[None].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(graph.memory(table).sum(), table)
    nudge = step * torch.eye(2, dtype=torch.float64)
    slope = (graph.memory(point + nudge) - graph.memory(point - nudge)) / (2 * step)
    torch.testing.assert_close(gradient[0], slope)
    assert (gradient > 0).all()


def test_expectation_is_the_most_of_the_moments() -> None:
    model = nets()["chain"]
    graph = dmcp.trace(model, torch.randn(1, 2, 9, 9))
    sizes = dmcp.Supernet(model, graph, groups=4).sizes
    alphas = torch.linspace(-1, 2, sizes.shape[0] * (sizes.shape[1] - 1)).reshape(sizes.shape[0], -1).double()
    chances = CHAIN.marginals(alphas)
    got = graph.expected_memory(chances, sizes)
    widths = CHAIN.sample(alphas, sizes, 20_000, torch.Generator().manual_seed(0))
    means = [
        sum(factor * widths[:, list(key)].double().prod(dim=1).mean() for key, factor in moment.terms.items())
        for moment in graph.moments
    ]
    assert got.item() == pytest.approx(float(max(means)), rel=0.01)
    assert got.item() <= graph.memory(widths).double().mean().item() * 1.01
    certain = CHAIN.marginals(torch.full_like(alphas, 40.0))
    assert graph.expected_memory(certain, sizes).item() == pytest.approx(graph.memory())


# budgets


@pytest.fixture(scope="module")
def graph() -> dmcp.ChannelGraph:
    return dmcp.trace(nets()["residual"], torch.randn(1, 2, 9, 9))


def test_texts_are_read(graph: dmcp.ChannelGraph) -> None:
    full = graph.memory()
    for text, target in {
        "memory:2kB": 2000,
        "memory:2 KB": 2000,
        "memory:2KiB": 2048,
        "memory:1.5k": 1500,
        "memory:1500": 1500,
        "memory:900B": 900,
        "memory:0.001MB": 1000,
        "memory:50%": full // 2,
        "memory:0.5": full // 2,
    }.items():
        (limit,) = parse(text, graph).limits
        assert (limit.kind, limit.target) == ("memory", target), text
    assert [limit.kind for limit in parse("50%,memory:2kB,params:60%", graph).limits] == ["macs", "memory", "params"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory:8ms", "memory"),
        ("params:2kB", "params:0.5k"),
        ("2kB", "memory:2kB"),
        ("2MiB", "memory:2MiB"),
        ("memory:0.2B", "one byte"),
        ("memory:1kB,memory:2kB", "twice"),
        ("memory:2kHz", "cannot be read"),
    ],
)
def test_other_texts_are_refused(graph: dmcp.ChannelGraph, text: str, said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        parse(text, graph)


def test_unreachable_ones_say_what_can_be_reached() -> None:
    model, x = nets()["residual"], torch.randn(4, 2, 9, 9)
    net = dmcp.Supernet(model, dmcp.trace(model, x))
    for text in ("memory:100B", "memory:1GB"):
        with pytest.raises(BudgetError, match=r"choose from [\d.,]+ (bytes|kB) .* to [\d.]+ kB"):
            dmcp.search(
                net,
                [(x, torch.zeros(4, 3, 7, 7))],
                dmcp.SearchConfig(budget=text, epochs=2),
                task=dmcp.Task(loss=_loss),
            )


def _loss(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def test_widths_are_found_inside(graph: dmcp.ChannelGraph) -> None:
    for text in ("memory:60%", "memory:60%,70%"):
        found = dmcp.uniform(graph, text)
        assert holds(parse(text, graph), graph, found)
        wider = [
            graph.widths(dict(found) | {name: kept + 1}) for name, kept in found.items() if kept < graph.full[name]
        ]
        assert any(not holds(parse(text, graph), graph, it) for it in wider)


def test_a_search_ends_inside() -> None:
    torch.manual_seed(0)
    model, x = nets()["dense"], torch.randn(8, 2, 9, 9)
    data = [(x, torch.randn(8, 3, 7, 7))] * 20
    config = dmcp.SearchConfig(budget="memory:50%", epochs=6, distill=False)
    found = dmcp.search(dmcp.Supernet(model, dmcp.trace(model, x)), data, config, task=dmcp.Task(loss=_loss))
    widths = dmcp.expected(found)
    assert holds(found.budget, found.graph, widths)
    chances = found.process.marginals(found.alphas.double())
    (share,) = ratios(found.budget, found.graph, chances, found.sizes, found.process).tolist()
    assert 0.8 < share < 1.1  # the loss has pulled it there
    assert found.graph.memory(widths) > 0.8 * found.budget.limits[0].target


def test_words() -> None:
    assert [show_bytes(it) for it in (900, 65_536, 2_000_000, 3 * 10**9)] == ["900 bytes", "65.54 kB", "2 MB", "3 GB"]
    assert show_cost("memory", 65_536) == "65.54 kB"
