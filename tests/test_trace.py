"""What trace makes of models with odd code in them: one row each through the contract of nets.check."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Residual, Toy, check, check_graph, distance, keep, mystery, pick, randomise, sample, sizes, unit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import dmcp
from dmcp.errors import TraceError

X = sample((3, 16, 16), batch=3)
EVAL = (False,)


class ConvNext(nn.Module):
    """A block with LayerNorm over the stream and a free hidden space."""

    def __init__(self, stream: int = 8, hidden: int = 20) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, stream, 4, 4)
        self.depth = nn.Conv2d(stream, stream, 3, padding=1, groups=stream)
        self.norm = nn.LayerNorm(stream)
        self.fc1, self.fc2 = nn.Linear(stream, hidden), nn.Linear(hidden, stream)
        self.scale = nn.Parameter(torch.ones(stream))
        self.head = nn.Linear(stream, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.fc2(F.gelu(self.fc1(y))) * self.scale
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


def literal(view: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A view whose size is written down: as a number, or as one that an attribute holds."""
    run = lambda m, x: m.head(view(m, y := m.a(x))) / m.divisor + m.other(m.b(y).mean((2, 3)))  # noqa: E731
    layers = {"a": unit(3, 16), "b": unit(16, 11), "head": nn.Linear(16 * 16 * 16, 5), "other": nn.Linear(11, 5)}
    return Toy(run, **layers, c=16, divisor=16)  # the same number, with another meaning


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Any]


def head(m: Any, x: Tensor) -> Tensor:
    return m.head(x.mean((2, 3)))


def tied_transposed(m: Any, x: Tensor) -> Tensor:
    hidden = F.relu(m.code(m.a(x).mean((2, 3))))
    return m.head(F.relu(F.linear(hidden, m.code.weight.t())))


def train_mode_only(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    logits = head(m, m.b(x))
    return (logits, m.last(F.relu(m.aux(x)).mean((2, 3)))) if m.training else logits


def standardized(m: Any, x: Tensor) -> Tensor:
    weight = m.b.weight
    weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
    return head(m, m.c(F.relu(F.conv2d(m.a(x), weight, m.b.bias))))


def with_buffer() -> nn.Module:
    model = Toy(lambda m, x: head(m, m.b(F.conv2d(m.a(x), m.table, groups=m.table.shape[0]))), **ab())
    model.register_buffer("table", torch.rand(16, 1, 3, 3))
    return model


def random_ways(m: Any, x: Tensor) -> Tensor:
    x = m.drop2d(m.a(x))
    noise = torch.rand(len(x), 1, 1, 1, dtype=x.dtype).floor() + 1  # always one, but nobody knows
    if random.random() < 0.5 and m.training:
        return head(m, m.b(x))
    return head(m, m.b(m.drop(x * noise)) + torch.randn(len(x), 1, 1, 1, dtype=x.dtype) * 0)


def in_place_slice(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :8].mul_(-3.0)
    return head(m, m.b(y))


def computed(how: Any) -> nn.Module:
    convs = nn.Conv2d(3, 16, 3), how(nn.Conv2d(16, 12, 1)), nn.Conv2d(9, 2, 1)
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], unit(12, 9), convs[2])


def normed(norm: nn.Module, width: int = 16) -> nn.Module:
    a, b = nn.Conv2d(3, width, 3), unit(width, 12)
    return Toy(lambda m, x: head(m, m.b(F.relu(m.n(m.a(x))))), a=a, n=norm, b=b, head=nn.Linear(12, 5))


def ab(a: int = 16, b: int = 12, reads: int | None = None, **more: Any) -> dict[str, nn.Module]:
    return {"a": unit(3, a), "b": unit(reads or a, b), "head": nn.Linear(more.pop("last", b), 5), **more}


def other_rank(conv: Any, norm: Any) -> nn.Module:
    run = lambda m, x: m.head(F.relu(m.b(F.relu(m.n(m.a(x))))).flatten(2).mean(2))  # noqa: E731
    return Toy(run, a=conv(3, 16, 3), n=norm(16), b=conv(16, 12, 3), head=nn.Linear(12, 5))


AB = {"a.0": 16, "b.0": 12}
MASK = sample((1, 16, 16), batch=3, seed=1)
# name: (model, its spaces)
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a module called on two tensors": (
        lambda: Toy(
            lambda m, x: head(m, m.shared(m.a(x)) + m.shared(m.b(x))), **ab(16, 16, 3, shared=unit(16, 12), last=12)
        ),
        {"a.0": 16, "shared.0": 12},
    ),
    "a tied transposed weight": (
        lambda: Toy(tied_transposed, a=unit(3, 16), code=nn.Linear(16, 7), head=nn.Linear(16, 5)),
        {"a.0": 16, "code": 7},
    ),
    "unused layers": (lambda: Toy(lambda m, x: head(m, m.b(m.a(x))), **ab(), spare=nn.Linear(16, 16)), AB),
    "norm of the batch": (lambda: normed(nn.BatchNorm2d(16, track_running_stats=False)), {"a": 16, "b.0": 12}),
    "norm without scale": (lambda: normed(nn.BatchNorm2d(16, affine=False)), {"a": 16, "b.0": 12}),
    "group norm": (lambda: normed(nn.GroupNorm(5, 20), 20), {"a": 5, "b.0": 12}),
    "group norm of one group": (lambda: normed(nn.GroupNorm(1, 16)), {"b.0": 12}),
    "layer norm": (ConvNext, {"fc1": 20}),
    "a literal view": (lambda: literal(lambda m, x: x.view(-1, 16 * 16 * 16)), {"b.0": 11}),
    "halves of an attribute": (
        lambda: literal(lambda m, x: torch.cat(x.split([m.c // 2, m.c - m.c // 2], 1), 1).flatten(1)),
        None,
    ),
    "equal pieces by a number": (
        lambda: Toy(
            lambda m, x: head(m, torch.cat(((two := m.a(x).split((m.c, m.c), 1))[0], two[1] + m.b(two[1])), 1)),
            **ab(20, reads=3, last=20) | {"b": nn.Conv2d(10, 10, 1)},
            c=10,
        ),
        {"a.0": 10},
    ),
    "a returned map": (lambda: Toy(lambda m, x: [y := m.a(x), head(m, m.b(y))], **ab()), {"b.0": 12}),
    "nested outputs": (
        lambda: Toy(lambda m, x: Answer(head(m, m.b(y := m.a(x))), {"aux": [m.aux(y), None]}), **ab(), aux=unit(16, 9)),
        AB,
    ),
    "layers that run in train mode only": (
        lambda: Toy(train_mode_only, **ab(), aux=nn.Conv2d(16, 9, 1), last=nn.Linear(9, 5)),
        {**AB, "aux": 9},
    ),
    "a plain tensor": (
        lambda: Toy(lambda m, x: head(m, m.b(m.a(x) * m.t)), **ab(), t=X[0, 0, :, :1, None]),
        {"b.0": 12},
    ),
    "a buffer": (with_buffer, AB),
    "standardized weights": (
        lambda: Toy(standardized, **ab(last=9) | {"b": nn.Conv2d(16, 12, 3), "c": unit(12, 9)}),
        None,
    ),
    "an op without a rule": (lambda: Toy(lambda m, x: head(m, m.b(mystery(m.a(x)))), **ab()), {"b.0": 12}),
    "random numbers": (lambda: Toy(random_ways, **ab(), drop=nn.Dropout(0.5), drop2d=nn.Dropout2d(0.5)), AB),
    "a slice by numbers": (lambda: Toy(in_place_slice, **ab()), None),
    "a computed weight": (lambda: computed(weight_norm), {"3.0": 9}),
    "through NumPy": (
        lambda: Toy(lambda m, x: head(m, m.b(torch.from_numpy(m.a(x).detach().numpy() * 2))), **ab()),
        {"b.0": 12},
    ),
}


@pytest.mark.parametrize("row", MODELS)
def test_spaces_and_contract(row: str) -> None:
    make, spaces = MODELS[row]
    graph = check(make(), X, spaces, EVAL if row == "random numbers" else (False, True))
    for text in (graph.summary(), json.dumps(graph.to_json(), ensure_ascii=False)):
        assert all(item.reason in text for item in graph.unprunable) and all(it.name in text for it in graph.spaces)


def make_plain(layer: nn.Module) -> None:
    parametrize.remove_parametrizations(layer, "weight")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("norm", "remove"),
    [
        (weight_norm, make_plain),
        (spectral_norm, make_plain),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    ],
)
def test_weights_that_a_norm_computes_are_named_with_what_to_do(norm: Any, remove: Any) -> None:
    model, x = computed(norm), X.float()
    (note,) = dmcp.trace(model, x).notes
    assert note.startswith("The weights of 2 are computed")
    with pytest.raises(dmcp.TraceError, match="The weights of 2 are computed"):
        dmcp.trace(model[2:3], x[:, :1].expand(-1, 16, -1, -1))
    remove(model[2])
    graph = dmcp.trace(model, x)
    assert not graph.notes and [space.name for space in graph.spaces] == ["0", "2", "3.0"]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 16), unit(1, 16), nn.Linear(16, 5)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        return head(self, self.a(image) * self.b(mask))


@pytest.mark.parametrize(
    ("make", "x", "spaces"),
    [
        (lambda: other_rank(nn.Conv1d, nn.BatchNorm1d), sample((3, 7)), {"a": 16, "b": 12}),
        (lambda: other_rank(nn.Conv3d, nn.BatchNorm3d), sample((3, 7, 7, 7)), {"a": 16, "b": 12}),
        (Two, (X, MASK), {"a.0": 16}),
        (Two, {"mask": MASK, "image": X}, {"a.0": 16}),
    ],
)
def test_other_ranks_and_several_inputs(make: Any, x: Any, spaces: Any) -> None:
    check(make(), x, spaces)


@pytest.mark.parametrize(
    "view", [lambda m, x: x.view(-1, m.c * 16 * 16), lambda m, x: x.view(x.shape[0], m.c, 256).flatten(1)]
)
def test_a_literal_from_an_attribute_is_bound(view: Any) -> None:
    model = literal(view)
    graph = check(model, X, {"a.0": 16, "b.0": 11})
    assert [(binding.module, binding.attribute, binding.value) for binding in graph.bindings] == [("", "c", 16)]
    small: Any = dmcp.cut(model, graph, {"a.0": 6})
    assert (small.c, small.divisor, model.c) == (6, 16, 16)


@pytest.mark.parametrize(("size", "joined"), [(4, True), (12, False), (24, True)])
def test_a_half_by_shape_beside_the_whole_is_found_at_any_size(size: int, joined: bool) -> None:
    def run(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        wide = torch.cat([m.a(x), m.b(x)], 1) if joined else m.a(x)
        half = wide[:, : wide.shape[1] // 2]
        return tuple(m.heads[n](it.mean((2, 3))) for n, it in enumerate((half, wide, m.c(x))))

    a = unit(3, size // 2 if joined else size)
    heads = nn.ModuleList([nn.Linear(size // 2, 5), nn.Linear(size, 5), nn.Linear(8, 5)])
    model = Toy(run, a=a, b=unit(3, size // 2), c=unit(3, 8), heads=heads)
    graph = check(model, X)
    for narrowed in range(len(graph.spaces)):
        widths = [1 if number == narrowed else space.size for number, space in enumerate(graph.spaces)]
        dmcp.verify(model, graph, X, graph.widths(widths))


def test_train_mode_with_a_batch_of_one() -> None:
    model = Toy(lambda m, x: m.head(m.n(m.a(x).mean((2, 3)))), a=unit(3, 16), n=nn.BatchNorm1d(16))
    model.head = nn.Linear(16, 5)
    graph = dmcp.trace(randomise(model).train(), X[:1])  # a norm over the batch alone: one sample has no variance
    assert sizes(graph) == {"a.0": 16} and model.training
    check_graph(model, graph, X)


class Anchored(nn.Module):
    """Keeps a table in a class attribute, and the shape that it is for, as detectors do."""

    anchors, shape = torch.empty(0), None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 16), unit(16, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        if self.shape != x.shape[1:]:
            self.anchors, self.shape = torch.linspace(0, 1, x.shape[-1], device=x.device, dtype=x.dtype), x.shape[1:]
        return head(self, x * self.anchors)


def test_class_attributes_that_forward_sets(tmp_path: Path) -> None:
    model: Any = randomise(Anchored()).eval()
    graph, before, widths = dmcp.trace(model, X), model(X), {"a.0": 5, "b.0": 3}
    small: Any = dmcp.cut(model, graph, widths)
    net = dmcp.Supernet(model, graph)
    with torch.no_grad():
        assert distance(net(X, net.hard(graph.widths(widths))), small(X)) < 1e-10
    dmcp.save(small, graph.widths(widths), tmp_path)
    assert torch.equal(dmcp.load(tmp_path, Anchored().double()).eval()(X), small(X))
    assert torch.equal(model(X), before)


def test_layer_norm_is_pruned_with_exact_false() -> None:
    model: Any = randomise(ConvNext())
    loose = dmcp.trace(model, X, exact=False)
    assert sizes(loose) == {"stem": 8, "fc1": 20}
    small, narrow = dmcp.cut(model, loose, {"stem": 5, "fc1": 9}), ConvNext(5, 9).double()
    rows = {"stem": (5, 3), "depth": (5, 1), "norm": (5, None), "fc1": (9, 5), "fc2": (5, 9), "head": (5, 5)}
    for name, (out, into) in rows.items():
        pick(getattr(narrow, name), getattr(model, name), keep(out), None if into is None else keep(into))
    with torch.no_grad():
        narrow.scale.copy_(model.scale[:5])
    assert distance(small(X), narrow(X)) < 1e-10


# -- rules, ignore, reports


def test_ignore() -> None:
    model, x = randomise(Residual(**Residual.FULL)), sample(Residual.SHAPE)
    for ignore, left in {"conv2": "abt", "bn2": "abt", "stem": "abt", "conv1 project": "sb"}.items():
        # a layer: what it writes is kept, what it reads is not; a norm; the name of a space, too
        found = sizes(dmcp.trace(model, x, ignore=ignore.split()))
        assert found == {Residual.SPACES[key]: Residual.FULL[key] for key in left}, ignore
    body = nn.Sequential(unit(16, 12), unit(12, 10))
    model = Toy(lambda m, x: head(m, m.body(m.a(x))), a=unit(3, 16), body=body, head=nn.Linear(10, 5))
    graph = dmcp.trace(model, X.float(), ignore=["body"])  # everything inside a module
    assert sizes(graph) == {"a.0": 16} and {"body.0.0", "body.1.0"} <= {item.name for item in graph.unprunable}


# -- values that forward reads


def reading(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Two convs before the head, and another way around the second."""
    layers = {"a": nn.Conv2d(3, 16, 3), "b": nn.Conv2d(16, 12, 1), "c": nn.Conv2d(16, 12, 1)}
    model = Toy(lambda m, x: m.head(run(m, x)), **layers, head=nn.Conv2d(12, 4, 1))
    model.register_buffer("limit", torch.ones(1))
    return model


IMAGE = torch.rand(2, 3, 8, 8)
READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "if": lambda m, x: m.b(m.a(x)) if x.mean() > 0 else m.c(m.a(x)),
    "if later": lambda m, x: m.b(y) if (y := m.a(x)).mean() > 9 else m.c(y),
    "item": lambda m, x: m.b(m.a(x) * x.amax().item()),
    "int": lambda m, x: m.b(m.a(x[..., : 4 + int(x.sum() > 0)])),
    "equal": lambda m, x: m.b(m.a(x)) if torch.equal(x, x + 1) else m.c(m.a(x)),
    "numpy": lambda m, x: m.b(m.a(x) * float(x.detach().numpy().mean())),
}
NO_READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda m, x: m.b(m.a(x)),
    "a buffer": lambda m, x: m.b(m.a(x)) if m.limit > 0 else m.c(m.a(x)),
    "a buffer of the input's type": lambda m, x: m.b(m.a(x) * m.limit.type_as(x).item()),
    "dice": lambda m, x: m.b(m.a(x)) if torch.rand(1) < 2 else m.c(m.a(x)),
    "a shape": lambda m, x: m.b(m.a(x)) if x.shape[-1] > 2 and x.numel() else m.c(m.a(x)),
    "read before it is written": lambda m, x: m.b(m.a(x) * m.limit.item() + m.limit.mul_(x.mean())),
}


def test_host_reads_of_the_input_are_noted() -> None:
    for run in READS.values():
        graph = dmcp.trace(reading(run), IMAGE)
        (note,) = graph.notes
        assert "(the model)" in note and note in graph.summary() and note in graph.to_json()["notes"]
        with pytest.raises(TraceError, match="strict"):
            dmcp.trace(reading(run), IMAGE, strict=True)
    for run in NO_READS.values():
        graph = dmcp.trace(reading(run), IMAGE, strict=True)
        assert graph.notes == () and {"a", "b"} <= set(sizes(graph))


def test_the_summary_groups_what_is_unprunable_by_reason() -> None:
    """Many layers with one reason are one line, with counts and the first few names."""
    model = nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1) for _ in range(31)])
    graph = dmcp.trace(model, torch.zeros(2, 4, 8, 8), ignore=[str(number) for number in range(29)])
    text = graph.summary()
    assert len(text.splitlines()) < 20 and len(graph.unprunable) >= 29
    (line,) = [line for line in text.splitlines() if "and 26 more" in line]
    assert "29 layers" in line and "116 channels" in line and "0, 1, 2" in line
