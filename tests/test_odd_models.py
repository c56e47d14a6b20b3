"""Code that people write and no table of ops foresees: pruned exactly, kept unpruned, or refused; never wrong."""

from __future__ import annotations

import functools
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from nets import Toy, distance
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.errors import TraceError


class Odd(nn.Module):
    """Two convolutions and a norm; `middle` gets the module and what the norm gives, `end` the logits."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], end: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3), nn.BatchNorm2d(12)
        self.third, self.head = nn.Conv2d(12, 12, 1), nn.Linear(12, 10)
        self.middle, self.end, self.dice, self.last = middle, end, torch.Generator(), None

    def forward(self, x: Tensor) -> Any:
        y = self.middle(self, self.norm(self.second(F.relu(self.first(x)))))
        return self.end(self.head(F.relu(y).mean((2, 3))))


class Repeated(Odd):
    """One block under three names, its layers under a fourth, and a weight in two modules."""

    def __init__(self) -> None:
        super().__init__(lambda self, y: self.again(self.blocks[2](self.other(self.blocks[1](self.blocks[0](y))))))
        block = nn.Sequential(self.third, nn.BatchNorm2d(12), nn.ReLU())
        self.blocks, self.again = nn.ModuleList([block] * 3), nn.Sequential(block[0], nn.ReLU())
        self.other = nn.Conv2d(12, 12, 1)
        self.other.weight = self.third.weight


def plain(self: Any, y: Tensor) -> Tensor:
    return self.third(y)


def halved(self: Any, y: Tensor, now: bool) -> Tensor:
    return self.third(y[:, :6].repeat(1, 2, 1, 1) if now else y)


def around_an_error(self: Any, y: Tensor) -> Tensor:
    try:
        return self.third(y + y[:, :5])
    except RuntimeError:
        return self.third(2 * y)


def remembering(self: Any, y: Tensor) -> Tensor:
    before, self.last = self.last, y.detach()
    return self.third(y if before is None or before.shape != y.shape else y + before)


@functools.lru_cache
def ramp(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


def with_indices(self: Any, y: Tensor) -> Tensor:
    y, places = F.max_pool2d(y, 2, return_indices=True)
    return self.third(y) + places.sum(1, keepdim=True) / 100


def counted_from_the_end(self: Any, x: Tensor) -> Tensor:
    y = torch.cat([x.repeat(1, 4, 1, 1), self.behind(x)], dim=1)
    return self.head(F.relu(self.part(y[:, -8:-4]) + self.whole(y)).mean((2, 3)))


def in_half(self: Any, y: Tensor, enabled: bool = True) -> Tensor:
    with torch.autocast(y.device.type, torch.bfloat16, enabled=enabled):
        return self.third(y)


def in_half_by_value(self: Any, y: Tensor) -> Tensor:
    """A host read, so that it is recorded on the CPU, where autocast would change dtypes, and replayed without data."""
    return in_half(self, y if y.sum().item() > -1e9 else 2 * y)


class Kind(Tensor):
    """A subclass of Tensor as others write it; what torch computes from it is a Kind, too."""


NETS: dict[str, Callable[[], nn.Module]] = {
    "a subclass of Tensor at the end": lambda: Odd(plain, lambda y: y.as_subclass(Kind)),
    "a subclass of Tensor inside": lambda: Odd(lambda self, y: self.third(2 * y.as_subclass(Kind))),
    "channels counted from the end, others behind them": lambda: Toy(
        counted_from_the_end,
        behind=nn.Conv2d(3, 4, 1),
        part=nn.Conv2d(4, 6, 1),
        whole=nn.Conv2d(16, 6, 1),
        head=nn.Linear(6, 10),
    ),
    "a module under several names, a weight in two modules": Repeated,
    "an object": lambda: Odd(plain, lambda y: SimpleNamespace(logits=y)),
    "an object that holds itself, beside logits": lambda: Odd(plain, lambda y: (y, knot(y))),
    "values of a dict": lambda: Odd(plain, lambda y: {"logits": y}.values()),
    "slots": lambda: Odd(plain, Slots),
    "a queue, a key": lambda: Odd(plain, lambda y: (deque([y]), {2 * y: 1}, np.zeros(2))),
    "dataclasses": lambda: Odd(plain, lambda y: (Record(y, "text"), SlottedRecord(2 * y), Named(3 * y, None))),
    "the last channels": lambda: Odd(lambda self, y: self.third(y)[:, -8:-4].repeat(1, 3, 1, 1)),
    "indices of a pool": lambda: Odd(with_indices),
    "running statistics": lambda: Odd(lambda self, y: self.third(y) + self.norm.running_mean.sum()),
    "dice": lambda: Odd(lambda self, y: self.third(y) + torch.bernoulli(y, 1.0).sum(1, keepdim=True)),
    "dice of its own": lambda: Odd(lambda m, y: m.third(y * (1 + torch.rand(1, generator=m.dice).item() // 1))),
    "dice of a seed": lambda: Odd(lambda self, y: (torch.manual_seed(0), self.third(y * torch.rand_like(y)))[1]),
    "dice of a size": lambda: Odd(
        lambda self, y: self.third(y * torch.rand(1, generator=torch.Generator().manual_seed(y.shape[1])).to(y))
    ),
    "a root": lambda: Odd(lambda m, y: m.third(y) + (y * y).mean((2, 3), keepdim=True).sqrt().sum(1, keepdim=True)),
    "a log line": lambda: Odd(lambda self, y: self.third(y if f"{y.sum():.1f}" else 2 * y)),
    "a table kept elsewhere": lambda: Odd(lambda self, y: self.third(y * ramp(y.shape[-1]).to(y))),
    "a way around an error": lambda: Odd(around_an_error),
    "gradients on": lambda: Odd(lambda self, y: halved(self, y, torch.is_grad_enabled())),
    "gradients on in one mode": lambda: Odd(lambda self, y: halved(self, y, torch.is_grad_enabled() != self.training)),
    "a history": lambda: Odd(lambda self, y: halved(self, y, y.requires_grad and not y.is_leaf)),
    "autocast on the device of the input": lambda: Odd(in_half),
    "no autocast on the device of the input": lambda: Odd(functools.partial(in_half, enabled=False)),
    "autocast after a host read": lambda: Odd(in_half_by_value),
    "x log x": lambda: Odd(lambda self, y: self.third(y) + (y**2 * (y**2).log()).sum(1, keepdim=True)),
    "rsqrt": lambda: Odd(lambda m, y: m.third(y * (y * y).mean((2, 3), keepdim=True).rsqrt()) + y.sum(1, keepdim=True)),
    "a quotient": lambda: Odd(lambda self, y: y / y.abs().sum((2, 3), keepdim=True) + y.sum(1, keepdim=True)),
}


@dataclass
class Record:
    logits: Tensor
    text: str


@dataclass(frozen=True, slots=True)
class SlottedRecord:
    logits: Tensor


class Named(NamedTuple):
    logits: Tensor
    nothing: None


class Slots(dict[str, Any]):
    """A dict with a tensor beside its values."""

    __slots__ = ("logits",)

    def __init__(self, y: Tensor) -> None:
        self.logits = y


HIDING: dict[str, Callable[[Tensor], Any]] = {
    "a function": lambda y: lambda: y,
    "a partial": lambda y: functools.partial(torch.add, y),
    "a method": lambda y: y.sum,
    "a method of an object": lambda y: SimpleNamespace(method=Slots(y).copy),
    "a method of a class": lambda y: Odd(plain).forward,
    "a reference": lambda y: [weakref.ref(y)],
    "an array of objects": lambda y: {"logits": np.fromiter([y], object)},
    "a generator": lambda y: (item for item in [y]),
    "an iterator in a dataclass": lambda y: Record(y, iter([y])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", HIDING)
def test_what_may_hide_a_tensor_is_refused(name: str) -> None:
    model = Odd(plain, lambda y: (y, HIDING[name](2 * y)))
    with pytest.raises(TraceError, match="dataclass"):
        dmcp.trace(model, torch.randn(2, 3, 12, 12))


def knot(y: Tensor) -> SimpleNamespace:
    """An object with a tensor and itself inside."""
    found = SimpleNamespace(logits=2 * y)
    found.self = found
    return found


@pytest.mark.parametrize("name", NETS)
def test_exact_in_every_mode(name: str) -> None:
    torch.manual_seed(0)
    model, x = NETS[name]().double(), torch.randn(4, 3, 12, 12).double()
    graph = dmcp.trace(model, x)
    assert dmcp.verify(model, graph, x) < 1e-12 and "head" in [it.name for it in graph.unprunable]
    widths = graph.widths([max(1, space.size // 2) for space in graph.spaces])
    net = dmcp.Supernet(model, graph)
    for training in (False, True):
        for enabled in (False, True):
            small = dmcp.cut(net.model, graph, widths).train(training)
            with torch.set_grad_enabled(enabled):
                assert distance(net.train(training)(x, net.hard(widths)), small(x)) < 1e-12
        if not training:
            assert distance(net(x, net.hard(graph.full)), model.eval()(x)) < 1e-12


def test_verify_takes_other_inputs() -> None:
    x, blur = torch.randn(2, 3, 12, 12), torch.rand(12, 12, 3, 3)
    for odd in (lambda y: len(y) == 1, lambda y: y.shape[-1] > 8):
        model = Odd(lambda self, y, odd=odd: self.third(y.flip(1) if odd(y) else y))
        graph = dmcp.trace(model, x)
        assert dmcp.verify(model, graph, x.half()) < 1e-9
        with pytest.raises(dmcp.CutError):
            dmcp.verify(model, graph, torch.randn(1, 3, 16, 16))
    model = HIDDEN["gradients divided by a width"]()
    with pytest.raises(dmcp.CutError, match="gradients"):
        dmcp.verify(model, dmcp.trace(model, x, verify=False), x)
    model = Odd(lambda self, y: F.conv2d(self.third(y), blur))  # not in float64
    assert dmcp.verify(model, dmcp.trace(model, x), x) < 1e-5


def test_an_input_of_a_subclass_is_traced_as_its_values_are() -> None:
    model, x = Odd(plain), torch.randn(2, 3, 12, 12)
    graph = dmcp.trace(model, x.as_subclass(Kind))
    assert graph.summary() == dmcp.trace(model, x).summary()


class Sideways(torch.autograd.Function):
    """Gives its input, and mixes the channels of the gradient."""

    @staticmethod
    def forward(_: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(1, keepdim=True)


HIDDEN: dict[str, Callable[[], nn.Module]] = {  # from the recording
    "another way on the meta device": lambda: Odd(lambda self, y: self.third(y if y.is_meta else y.flip(1))),
    "another way under a recorder": lambda: Odd(
        lambda self, y: self.third(y if torch.utils._python_dispatch._get_current_dispatch_mode() else y.cumsum(1))
    ),
    "gradients mixed over channels": lambda: Odd(lambda self, y: self.third(Sideways.apply(y))),
    "gradients divided by a width": lambda: Odd(
        lambda self, y: (y.requires_grad and y.register_hook(lambda it: it / it.shape[1]), self.third(y))[1]
    ),
    "another way in train mode only": lambda: Odd(
        lambda self, y: self.third(y.flip(1) if self.training and not y.is_meta else y)
    ),
}


def test_a_train_pass_that_fails_half_way_leaves_the_statistics() -> None:
    """Inception on small images: its second head does not run, after BatchNorms before it have run in train mode."""

    def needs_labels(self: Any, y: Tensor) -> Tensor:
        if self.training and not y.is_meta:
            raise RuntimeError("no labels")
        return self.third(y)

    graph = dmcp.trace(Odd(needs_labels), torch.randn(2, 3, 12, 12))
    assert graph.verified and "second" in [space.name for space in graph.spaces]


def test_a_branch_that_training_starts_from_zero_hides_nothing() -> None:
    """ReZero: at first the branch gives neither outputs nor gradients, so its backward pass must be seen otherwise."""
    model = Odd(lambda self, y: self.third(y + self.scale * Sideways.apply(y)))
    model.scale = nn.Parameter(torch.zeros(()))
    graph = dmcp.trace(model, torch.randn(2, 3, 12, 12))
    assert "second" not in [space.name for space in graph.spaces]


CONSTANT: dict[str, Callable[[Tensor], Any]] = {  # the length of the outputs
    "unit vectors": lambda y: F.normalize(y),
    "y / y.norm()": lambda y: y / y.norm(dim=1, keepdim=True),
    "LayerNorm": lambda y: F.layer_norm(y, y.shape[1:], eps=0.0),
    "unit vectors beside dropout": lambda y: F.normalize(y + 0 * F.dropout(y)),
    "two unit vectors": lambda y: (F.normalize(y), {"negative": -F.normalize(y)}),
    "complex numbers of size one": lambda y: torch.polar(torch.ones_like(y), y).conj(),
    "unit vectors and integers": lambda y: (F.normalize(y), y.argmax(1)),
}


class Embedding(nn.Module):
    """Maps an image to a vector, as for faces; `middle` comes before the last layer."""

    def __init__(self, middle: Callable[[Tensor], Tensor], end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 1, 1), nn.Linear(32, 16)
        self.middle, self.end = middle, end

    def forward(self, x: Tensor) -> Any:
        y = self.second(self.first(x).relu()).relu()
        return self.end(self.head(self.middle(y.mean((2, 3)))))


@pytest.mark.parametrize("name", CONSTANT)
def test_outputs_of_constant_length_cost_no_layer(name: str) -> None:
    """The sum of their squares has no gradient but rounding noise, which must not be compared."""
    torch.manual_seed(0)
    x = torch.randn(2, 1, 12, 12)
    graph = dmcp.trace(Embedding(torch.clone, CONSTANT[name]), x)
    assert graph.verified and [space.name for space in graph.spaces] == ["first", "second"]
    mixed = Embedding(Sideways.apply, CONSTANT[name])
    assert [space.name for space in dmcp.trace(mixed, x).spaces] == ["first"]  # what does differ is still seen


@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_recording_does_not_see_is_left_unpruned(name: str) -> None:
    model, x = HIDDEN[name](), torch.zeros(2, 3, 12, 12)
    graph = dmcp.trace(model, x)
    assert graph.verified and [space.name for space in graph.spaces] != []
    assert "second" not in [space.name for space in graph.spaces]
    assert "computes something else" in next(it.reason for it in graph.unprunable if it.name == "second")
    unseen = dmcp.trace(model, x, verify=False)
    assert not unseen.verified and "second" in [space.name for space in unseen.spaces]


def test_zeros_hide_nothing_from_the_check() -> None:
    """A last layer of zeros and an image of zeros would make all networks equal."""
    model = HIDDEN["another way on the meta device"]()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.norm.weight)
    assert "second" not in [space.name for space in dmcp.trace(model, torch.zeros(2, 3, 12, 12)).spaces]


def test_random_layers_can_be_checked() -> None:
    model = Odd(lambda self, y: self.third(F.dropout(F.rrelu(y, training=self.training), 0.5, self.training)))
    noisy = Odd(lambda self, y: self.third(y + torch.randn_like(y)))
    x = torch.randn(2, 3, 12, 12)
    for net in (model, noisy):
        before = torch.get_rng_state()
        graph = dmcp.trace(net, x)
        assert graph.verified and "second" in [space.name for space in graph.spaces]
        assert torch.equal(torch.get_rng_state(), before)


def test_a_refused_model_is_as_it_was() -> None:
    model = Odd(plain).train()
    model.middle = lambda _, y: model.third(model.norm(y))
    before = model.norm.running_mean.clone()
    with pytest.raises(dmcp.TraceError):
        dmcp.trace(model, torch.randn(2, 3, 12, 12))
    assert torch.equal(model.norm.running_mean, before) and model.norm.num_batches_tracked == 0
    graph = dmcp.trace(Odd(plain), torch.randn(2, 3, 12, 12))  # of the same architecture
    with pytest.raises(dmcp.TraceError):
        dmcp.verify(model, graph, torch.randn(2, 3, 12, 12))
    assert torch.equal(model.norm.running_mean, before) and model.norm.num_batches_tracked == 0


def test_copies_that_would_not_stand_alone_are_refused() -> None:
    named, hooked, ran = Odd(plain), Odd(lambda self, y: self.third(y) + self.last), Odd(remembering)
    locked = Odd(plain)
    locked.last = threading.Lock()
    named.middle = lambda _, y: named.third(y)
    hooked.third.register_forward_hook(lambda module, args, y: setattr(hooked, "last", y))
    ran(torch.randn(2, 3, 12, 12))
    for model, word in (
        (named, "holds the model"),
        (hooked, "holds the model"),
        (ran, "earlier run"),
        (locked, "copied"),
    ):
        with pytest.raises(dmcp.TraceError, match=word):
            dmcp.trace(model, torch.randn(2, 3, 12, 12))
    assert hooked.last is None


def test_threads_leave_torch_as_it_was() -> None:
    model, x = Odd(plain), torch.randn(2, 3, 12, 12)
    world = lambda: (torch.backends.mha.get_fastpath_enabled(), random.getstate(), torch.get_rng_state().tolist())  # noqa: E731
    before = world()
    with ThreadPoolExecutor(8) as pool:
        assert len({graph.summary() for graph in pool.map(lambda _: dmcp.trace(model, x), range(16))}) == 1
    assert world() == before


# names and values that other people's networks have


class Listed(Toy):
    """Has a list in place of the method `modules`, as ESPNet does."""

    def __init__(self) -> None:
        super().__init__(
            lambda self, x: self.head(self.norm(self.first(x)).relu().mean((2, 3))),
            first=nn.Conv2d(3, 12, 3),
            norm=nn.BatchNorm2d(12),
            head=nn.Linear(12, 10),
        )
        self.modules = [self.first]  # type: ignore[assignment]


def test_an_attribute_may_hide_the_method_modules() -> None:
    model, x = Listed(), torch.randn(4, 3, 8, 8)
    graph = dmcp.trace(model, x)
    small = dmcp.cut(model, graph, graph.widths([5]))
    assert small.modules == [small.first] and small.first.out_channels == 5
    loader = [(x, torch.arange(4))]
    net = dmcp.Supernet(model, graph)
    dmcp.search(net, loader, dmcp.SearchConfig(budget="60%", epochs=1, warmup=0))
    dmcp.recalibrate(small, loader)
    dmcp.reinitialize(small)
    dmcp.train(small, loader, dmcp.TrainConfig(epochs=1))
    assert net.model.modules == [net.model.first]


def test_copies_share_python_modules_among_the_attributes() -> None:
    model, x = Odd(plain), torch.randn(2, 3, 12, 12)
    model.config, model.libraries = math, {"numbers": [np], "random": random}
    model.libraries["numbers"] = np
    graph = dmcp.trace(model, x)
    small = dmcp.cut(model, graph, graph.full)
    assert small.config is math and small.libraries == model.libraries
    assert dmcp.Supernet(model, graph).model.config is math


def test_a_model_that_cannot_be_copied_is_refused_by_the_name_of_the_attribute() -> None:
    model = nn.Sequential(Odd(plain))
    model[0].writer = SimpleNamespace(lock=threading.Lock())
    with pytest.raises(dmcp.TraceError, match=r"0\.writer"):
        dmcp.trace(model, torch.randn(2, 3, 12, 12))


def asserted(self: Any, y: Tensor) -> Tensor:
    if y.shape[1] != 12:
        raise AssertionError
    return self.third(y)


def test_an_assertion_without_a_message_is_quoted() -> None:
    graph = dmcp.trace(Odd(asserted), torch.randn(2, 3, 12, 12))
    reason = next(it.reason for it in graph.unprunable if it.name == "second")
    assert "AssertionError at `raise AssertionError`" in reason


class Distillation(nn.Module):
    """Information distillation: every layer gives away its first channels, and the next one reads the rest."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.distilled = channels // 4
        self.remaining = channels - self.distilled
        self.first = nn.Conv2d(channels, channels, 3, 1, 1)
        self.second = nn.Conv2d(self.remaining, channels, 3, 1, 1)
        self.third = nn.Conv2d(self.remaining, channels, 3, 1, 1)
        self.fourth = nn.Conv2d(self.remaining, self.distilled, 3, 1, 1)
        self.fuse = nn.Conv2d(4 * self.distilled, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        rest, given = x, []
        for layer in (self.first, self.second, self.third):
            part, rest = torch.split(F.relu(layer(rest)), (self.distilled, self.remaining), dim=1)
            given.append(part)
        return self.fuse(torch.cat([*given, self.fourth(rest)], dim=1)) + x


def test_splits_by_the_same_attributes_are_all_followed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), Distillation(), Distillation(), nn.Conv2d(32, 3, 3))
    x = torch.rand(2, 3, 12, 12)
    graph = dmcp.trace(model, x)
    assert [it.name for it in graph.unprunable] == ["3"] and graph.prunable_share == 1
    widths = graph.widths([max(1, 2 * space.size // 3) for space in graph.spaces])
    assert dmcp.verify(model, graph, x, widths) < 1e-9
    small = dmcp.cut(model, graph, widths)
    assert (small[1].distilled, small[1].remaining) == (5, 16)
    assert small[1].second.in_channels == 16 and small[1].second.out_channels == 21


# the state around a model


def test_autocast_of_the_caller_changes_nothing() -> None:
    model, x = Odd(plain), torch.randn(4, 3, 12, 12)
    loader = [(x, torch.arange(4))] * 2

    def results() -> list[Tensor]:
        torch.manual_seed(0)
        graph = dmcp.trace(model, x)
        assert dmcp.verify(model, graph, x) < 1e-9
        net = dmcp.Supernet(model, graph)
        dmcp.search(net, loader, dmcp.SearchConfig(budget="60%", epochs=2))
        small = dmcp.cut(net.model, graph, graph.widths({"second": 5}), by="l2")
        dmcp.recalibrate(small, loader)
        dmcp.train(small, loader, dmcp.TrainConfig(epochs=1))
        return [net.alpha.detach(), *small.state_dict().values()]

    plain_ones = results()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, results(), plain_ones))


@pytest.mark.parametrize("training", [True, False])
def test_tracing_rrelu_leaves_the_random_state(training: bool) -> None:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.RReLU(), nn.Conv2d(8, 4, 3)
    model = nn.Sequential(*layers).train(training)
    before = torch.get_rng_state()
    dmcp.trace(model, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)
