"""What trace makes of models with odd code in them: the spaces it finds, and that cutting stays exact."""

from __future__ import annotations

import copy
import json
import pydoc
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from nets import Chain, Residual, call, distance, keep, leaves, mystery, pick, randomise, sample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp.errors import TraceError
from dmcp.tracing.ops import pointwise

EVAL, BOTH = (False,), (False, True)


def unit(channels: int, out: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    """conv, norm, relu; its space is called `<name>.0`."""
    conv = nn.Conv2d(channels, out, kernel, padding=kernel // 2, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU())


class Toy(nn.Module):
    """Layers by name, and a forward that is written where it is tested."""

    def __init__(self, run: Callable[[Any, Any], Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def sizes(graph: Any) -> dict[str, int]:
    return {space.name: space.size for space in graph.spaces}


def check(
    model: nn.Module, x: Any, spaces: Mapping[str, int] | None, modes: tuple[bool, ...] = BOTH, **how: Any
) -> Any:
    """Trace; the spaces are these, and at random widths the cut model is the gated one and costs what is predicted."""
    randomise(model)
    graph = dmcp.trace(model, x, **how)
    if spaces is not None:
        assert sizes(graph) == spaces
    check_cut(model, graph, x, modes)
    return graph


def check_cut(model: nn.Module, graph: Any, x: Any, modes: tuple[bool, ...] = BOTH) -> None:
    generator = random.Random(0)
    for training in modes:
        net = dmcp.Supernet(model, graph).train(training)
        full = call(copy.deepcopy(net.model), x)
        assert distance(net(x, net.hard(graph.full)), full) < 1e-10
        for least in (1, 0):  # all 1, then random
            kept = {name: 1 if least else generator.randint(min(2, size), size) for name, size in sizes(graph).items()}
            widths = graph.widths(kept)
            small = dmcp.cut(net.model, graph, widths)
            expected = call(small, x)
            assert distance(net(x, net.hard(widths)), expected) < 1e-9
            assert graph.params(widths) == sum(parameter.numel() for parameter in small.parameters())
            if least:
                assert max(distance(a, b) for a, b in zip(leaves(full), leaves(expected), strict=True)) > 0.01
            else:  # at width 1 torch multiplies where it has nothing to sum, and does not count that
                assert graph.macs(widths) == counted(small, x)


def counted(model: nn.Module, x: Any) -> int:
    """Multiply-adds of one sample by torch's own counter; the batch of all inputs is their dim 0."""
    batch = len(leaves(x)[0])
    # With gradients and without fused attention, which torch does not count on every device and version.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call(copy.deepcopy(model).eval(), x)
    assert counter.get_total_flops() % (2 * batch) == 0
    return counter.get_total_flops() // (2 * batch)


def reasons(graph: Any) -> str:
    return " | ".join(whole.reason for whole in graph.unprunable)


X = sample((3, 16, 16), batch=3)

# -- shared and raw parameters


def test_a_module_called_on_two_tensors_ties_them() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head((m.shared(m.a(x)) + m.shared(m.b(x))).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(3, 16), shared=unit(16, 12), head=nn.Linear(12, 5))
    graph = check(model, X, {"a.0": 16, "shared.0": 12})
    assert {"a.0", "b.0"} <= set(graph.spaces[0].writers)


def test_a_tied_transposed_weight() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        hidden = F.relu(m.code(m.a(x).mean((2, 3))))
        return m.head(F.relu(F.linear(hidden, m.code.weight.t())))

    model = Toy(run, a=unit(3, 16), code=nn.Linear(16, 7), head=nn.Linear(16, 5))
    check(model, X, {"a.0": 16, "code": 7})


def test_tied_parameters_stay_tied_in_the_cut_model() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.head(F.relu(m.n(m.b(x) + m.c(x))).mean((2, 3)))

    b, c = nn.Conv2d(16, 12, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)
    c.weight = b.weight
    model = Toy(run, a=unit(3, 16), b=b, c=c, n=nn.BatchNorm2d(12), head=nn.Linear(12, 5))
    graph = check(model, X, {"a.0": 16, "b": 12})
    small: Any = dmcp.cut(model, graph, {"b": 3})
    assert small.c.weight is small.b.weight
    assert small.b.bias is not small.c.bias


class RawNorm(nn.Module):
    """A functional norm whose parameters and buffers lie outside any norm module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.gamma = nn.Parameter(torch.ones(16))
        self.beta = nn.Parameter(torch.zeros(16))
        self.layer_scale = nn.Parameter(torch.ones(16, 1, 1))
        self.register_buffer("mean", torch.full((16,), 0.1))
        self.register_buffer("var", torch.full((16,), 0.7))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.conv(x), self.mean, self.var, self.gamma, self.beta, self.training)
        return self.head((F.relu(x) * self.layer_scale).mean((2, 3)))


def test_functional_batch_norm_with_raw_parameters() -> None:
    graph = check(RawNorm(), X, {"conv": 16})
    small: Any = dmcp.cut(RawNorm(), graph, {"conv": 5})
    shapes = {name: tuple(value.shape) for name, value in small.state_dict().items()}
    assert shapes["gamma"] == shapes["beta"] == shapes["mean"] == shapes["var"] == (5,)
    assert shapes["layer_scale"] == (5, 1, 1)


class RawConv(nn.Module):
    """Convolutions by function calls on parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(16, 3, 3, 3))
        self.second = nn.Parameter(torch.ones(12, 16, 3, 3))
        self.last = nn.Parameter(torch.ones(5, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.first, padding=1))
        return F.linear(F.relu(F.conv2d(x, self.second)).mean((2, 3)), self.last)


def test_raw_conv_weights() -> None:
    graph = check(RawConv(), X, None)
    assert sorted(sizes(graph).values()) == [12, 16]


def test_unused_layers_are_kept_and_counted() -> None:
    model = Toy(lambda m, x: m.head(m.a(x).mean((2, 3))), a=unit(3, 16), head=nn.Linear(16, 5), spare=nn.Linear(16, 16))
    graph = check(model, X, {"a.0": 16})
    small: Any = dmcp.cut(model, graph, {"a.0": 2})
    assert torch.equal(small.spare.weight, model.spare.weight)


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": False}, {"momentum": None}], ids=str)
def test_unusual_batch_norms(options: dict[str, Any]) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(F.relu(m.n(m.a(x))).mean((2, 3)))

    check(Toy(run, a=nn.Conv2d(3, 16, 3), n=nn.BatchNorm2d(16, **options), head=nn.Linear(16, 5)), X, {"a": 16})


# -- in-place ops, literals, bindings


def test_in_place_ops() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x).relu_()
        y = m.b(x)
        y += x
        y.mul_(0.5).clamp_(min=-0.3)
        return m.head(F.silu(y, inplace=True).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(16, 16), head=nn.Linear(16, 5))
    check(model, X, {"a.0": 16})


def test_an_in_place_literal_slice_is_kept() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y[:, :8].mul_(-3.0)
        return m.head(m.b(y).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5))
    graph = check(model, X, None)
    assert sizes(graph)["b.0"] == 12
    small: Any = dmcp.cut(model, graph, dict.fromkeys(sizes(graph), 1))
    assert torch.equal(small.a[0].weight[:8], model.a[0].weight[:8])  # these eight are meant by number


class Literal(nn.Module):
    """A view whose size is written down: as a number, or as one that an attribute holds."""

    def __init__(self, view: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.c = 16
        self.divisor = 16  # the same number, with another meaning
        self.a = unit(3, 16)
        self.b = unit(16, 11)
        self.head = nn.Linear(16 * 16 * 16, 5)
        self.other = nn.Linear(11, 5)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head(self.view(self, x)) / self.divisor + self.other(self.b(x).mean((2, 3)))


def test_a_shape_literal_is_kept_whole() -> None:
    graph = check(Literal(lambda m, x: x.view(-1, 16 * 16 * 16)), X, {"b.0": 11})
    assert "a.0" in " ".join(whole.name for whole in graph.unprunable)
    assert graph.bindings == ()


@pytest.mark.parametrize(
    "view",
    [
        lambda m, x: x.view(-1, m.c * 16 * 16),
        lambda m, x: x.view(x.shape[0], m.c, 256).flatten(1),
        lambda m, x: torch.cat(x.split([m.c // 2, m.c - m.c // 2], 1), 1).flatten(1),
    ],
    ids=["product", "dim", "split"],
)
def test_a_literal_from_an_attribute_is_bound(view: Any, request: pytest.FixtureRequest) -> None:
    model = Literal(view)
    if request.node.callspec.id == "split":  # halves of a number need not follow a width: exact is enough
        check(model, X, None)
        return
    graph = check(model, X, {"a.0": 16, "b.0": 11})
    assert [(binding.module, binding.attribute, binding.value) for binding in graph.bindings] == [("", "c", 16)]
    small: Any = dmcp.cut(model, graph, {"a.0": 6})
    assert (small.c, small.divisor) == (6, 16)
    assert model.c == 16
    assert "c" in graph.summary()


def test_a_silent_literal_slice_is_kept() -> None:
    model = Toy(lambda m, x: m.head(m.b(m.cut(m.a(x))).mean((2, 3))), a=unit(3, 16), b=unit(8, 12))
    model.head, model.cut = nn.Linear(12, 5), lambda x: x[:, :8] + x[:, 8:]
    check(model, X, {"b.0": 12})


def test_halves_by_shape_are_pruned_alike() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        half = x.shape[1] // 2
        return m.head(m.b(x[:, :half] * torch.sigmoid(x[:, half:])).mean((2, 3)))

    check(Toy(run, a=unit(3, 16), b=unit(8, 12), head=nn.Linear(12, 5)), X, {"a.0": 8, "b.0": 12})


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("size", [4, 6, 8, 12, 24, 32])
def test_a_half_by_shape_beside_the_whole_is_found_at_any_size(size: int, joined: bool) -> None:
    def run(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        wide = torch.cat([m.a(x), m.b(x)], 1) if joined else m.a(x)
        half = wide[:, : wide.shape[1] // 2]
        return tuple(m.heads[n](it.mean((2, 3))) for n, it in enumerate((half, wide, m.c(x))))

    a = unit(3, size // 2 if joined else size)
    heads = nn.ModuleList([nn.Linear(size // 2, 5), nn.Linear(size, 5), nn.Linear(8, 5)])
    model = Toy(run, a=a, b=unit(3, size // 2), c=unit(3, 8), heads=heads)
    graph = check(model, X, None)
    for narrowed in range(len(graph.spaces)):
        widths = [1 if number == narrowed else space.size for number, space in enumerate(graph.spaces)]
        dmcp.verify(model, graph, X, graph.widths(widths))


def test_chunk_and_glu() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        one, other = m.a(x).chunk(2, 1)
        return m.head(F.glu(m.b(one + 2 * other), 1).mean((2, 3)))

    check(Toy(run, a=unit(3, 16), b=unit(8, 12), head=nn.Linear(6, 5)), X, {"a.0": 8, "b.0": 6})


# -- inputs and outputs


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Any]


class Pair(NamedTuple):
    logits: Tensor
    aux: Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: {"out": a, "aux": (b, [2 * b])},
        lambda a, b: Answer(a, {"aux": [b, None]}),
        Pair,
        lambda a, b: [a, (b,), None],
    ],
    ids=["dict", "dataclass", "namedtuple", "list"],
)
def test_nested_outputs_are_kept_whole(wrap: Any) -> None:
    def run(m: Any, x: Tensor) -> Any:
        x = m.a(x)
        return wrap(m.head(m.b(x).mean((2, 3))), m.aux(x))

    model = Toy(run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5), aux=nn.Conv2d(16, 9, 1))
    graph = check(model, X, {"a.0": 16, "b.0": 12})
    assert any("aux" in whole.name and "output" in whole.reason for whole in graph.unprunable)


def test_a_feature_map_that_is_returned_is_kept_whole() -> None:
    def run(m: Any, x: Tensor) -> Any:
        features = m.a(x)
        return {"features": features, "logits": m.head(m.b(features).mean((2, 3)))}

    graph = check(Toy(run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5)), X, {"b.0": 12})
    assert "output" in reasons(graph)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = unit(3, 16)
        self.b = unit(1, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.a(image) * self.b(mask)).mean((2, 3)))


def test_several_inputs() -> None:
    mask = sample((1, 16, 16), batch=3, seed=1)
    check(TwoInputs(), (X, mask), {"a.0": 16})
    check(TwoInputs(), {"mask": mask, "image": X}, {"a.0": 16})


# -- control flow


def test_control_flow_by_shape() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        if x.shape[-1] > 8:
            x = F.max_pool2d(x, 2)
        for _ in range(len(x.shape) - 2):
            x = m.b(x) + x
        return m.head(x.mean((2, 3)))

    check(Toy(run, a=unit(3, 16), b=unit(16, 16), head=nn.Linear(16, 5)), X, {"a.0": 16})


def test_control_flow_by_value_falls_back_to_a_real_run() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = m.a(x)
        return m.head(m.b(x).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5))
    check(model, X.abs(), {"a.0": 16, "b.0": 12})


def test_layers_that_run_in_train_mode_only() -> None:
    def run(m: Any, x: Tensor) -> Any:
        x = m.a(x)
        logits = m.head(m.b(x).mean((2, 3)))
        return (logits, m.last(F.relu(m.aux(x)).mean((2, 3)))) if m.training else logits

    model = Toy(
        run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5), aux=nn.Conv2d(16, 9, 1), last=nn.Linear(9, 5)
    )
    graph = check(model, X, {"a.0": 16, "b.0": 12, "aux": 9})
    small: Any = dmcp.cut(model, graph, {"a.0": 4, "aux": 2})
    assert small.aux.weight.shape == (2, 4, 1, 1)


def test_randomness_in_forward() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        if random.random() < 0.5 and m.training:
            return m.head(m.b(x).mean((2, 3)))
        noise = torch.rand(len(x), 1, 1, 1, dtype=x.dtype).floor() + 1  # always one, but nobody knows
        return m.head((m.b(x * noise) + torch.randn(len(x), 1, 1, 1, dtype=x.dtype) * 0).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5))
    states = random.getstate(), torch.get_rng_state()
    check(model, X, {"a.0": 16, "b.0": 12}, EVAL)
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    dmcp.cut(model, dmcp.trace(model, X), {"a.0": 4})
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_dropout() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.drop(m.drop2d(m.a(x)).flatten(1)))

    layers = {"drop": nn.Dropout(0.5), "drop2d": nn.Dropout2d(0.5), "head": nn.Linear(16 * 256, 5)}
    check(Toy(run, a=unit(3, 16), **layers), X, {"a.0": 16}, EVAL)


# -- modes, precisions, state


def test_train_mode_with_a_batch_of_one() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.n(m.a(x).mean((2, 3))))  # a norm over the batch alone: one sample cannot be normalised

    model = randomise(Toy(run, a=unit(3, 16), n=nn.BatchNorm1d(16), head=nn.Linear(16, 5))).train()
    graph = dmcp.trace(model, X[:1])
    assert sizes(graph) == {"a.0": 16}
    assert model.training
    check_cut(model, graph, X)


def test_bfloat16() -> None:
    model = randomise(Chain(**Chain.FULL)).bfloat16()
    x = sample(Chain.SHAPE)
    graph = dmcp.trace(model, x.bfloat16())
    assert sizes(graph) == {"conv1": 7, "conv2": 9, "conv3": 6}
    small = dmcp.cut(model, graph, {"conv1": 3})
    assert {value.dtype for value in small.parameters()} == {torch.bfloat16}
    assert small(x.bfloat16()).dtype == torch.bfloat16
    net = dmcp.Supernet(model, graph).eval()
    assert net(x.bfloat16(), net.soft()).isfinite().all()
    check_cut(model.double(), graph, x)


class Caching(nn.Module):
    """Keeps a table from its first eval pass, as attention biases often are."""

    def __init__(self) -> None:
        super().__init__()
        self.a = unit(3, 16)
        self.bias = nn.Parameter(torch.ones(5))
        self.register_buffer("grid", None)
        self.head = nn.Linear(16, 5)
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if not self.training:
            if self.grid is None:
                self.grid = torch.linspace(0, 1, x.shape[-1], device=x.device, dtype=x.dtype)
            if "bias" not in self.cache:
                self.cache["bias"] = self.bias[[0, 2, 1, 4, 3]]
            x = x * self.grid
        return self.head(x.mean((2, 3))) + self.cache.get("bias", self.bias)


def test_caches_filled_in_eval() -> None:
    model = randomise(Caching()).eval()
    graph = dmcp.trace(model, X)
    assert sizes(graph) == {"a.0": 16}
    net, small = dmcp.Supernet(model, graph), dmcp.cut(model, graph, {"a.0": 5})
    assert model.grid is None
    assert model.cache == {}
    assert small.grid is None
    assert small.cache == {}
    with torch.no_grad():
        assert distance(net(X, net.hard(graph.widths({"a.0": 5}))), small(X)) < 1e-10


def test_plain_tensor_attributes_keep_what_they_meet_whole() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.b(m.a(x) * m.table).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5))
    model.table = torch.rand(16, 1, 1, dtype=torch.float64)
    check(model, X, {"b.0": 12})
    assert model.table.device.type == "cpu"


def test_buffers_follow_their_channels() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        blur = F.conv2d(m.a(x), m.kernel, groups=m.kernel.shape[0])
        return m.head(m.b(blur).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5))
    model.register_buffer("kernel", torch.rand(16, 1, 3, 3))
    graph = check(model, X, {"a.0": 16, "b.0": 12})
    small: Any = dmcp.cut(model, graph, {"a.0": 5})
    assert small.kernel.shape == (5, 1, 3, 3)


# -- layers with rules of their own


def shuffle(m: Any, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


@pytest.mark.parametrize("mix", [shuffle, lambda m, x: F.channel_shuffle(x, 2)], ids=["by hand", "channel_shuffle"])
def test_shuffle(mix: Any) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.c(m.b(mix(m, m.a(x)))).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(16, 16, groups=16), c=unit(16, 12), head=nn.Linear(12, 5))
    check(model, X, {"a.0": 8, "c.0": 12})


def test_pixel_shuffle_takes_whole_blocks() -> None:
    model = Toy(
        lambda m, x: m.head(m.b(m.up(m.a(x))).mean((2, 3))), a=unit(3, 20), up=nn.PixelShuffle(2), b=unit(5, 12)
    )
    model.head = nn.Linear(12, 5)
    check(model, X, {"a.0": 5, "b.0": 12})


def test_pixel_unshuffle() -> None:
    model = Toy(lambda m, x: m.head(m.b(m.down(m.a(x))).mean((2, 3))), a=unit(3, 6), down=nn.PixelUnshuffle(2))
    model.b, model.head = unit(24, 12), nn.Linear(12, 5)
    check(model, X, {"a.0": 6, "b.0": 12})


def test_transposed_conv_and_prelu() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        z = m.act(m.n(m.up(F.max_pool2d(y, 2))))
        return m.out(torch.cat([z, y], 1))

    layers = {"up": nn.ConvTranspose2d(16, 10, 2, 2), "n": nn.BatchNorm2d(10), "act": nn.PReLU(10)}
    check(Toy(run, a=unit(3, 16), **layers, out=nn.Conv2d(26, 4, 1)), X, {"a.0": 16, "up": 10})


def test_grouped_transposed_conv() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(F.relu(m.up(m.a(x))))

    model = Toy(run, a=unit(3, 14), up=nn.ConvTranspose2d(14, 10, 2, 2, groups=2), out=nn.Conv2d(10, 4, 1))
    check(model, X, {"a.0": 7, "up": 5})


def test_u_net() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        y = F.interpolate(m.b(F.avg_pool2d(x, 2)), scale_factor=2, mode="bilinear")
        return m.out(m.c(torch.cat([y, F.pad(x, (1, 1, 1, 1))[:, :, 1:-1, 1:-1]], 1)))

    check(
        Toy(run, a=unit(3, 16), b=unit(16, 12), c=unit(28, 9), out=nn.Conv2d(9, 4, 1)),
        X,
        {"a.0": 16, "b.0": 12, "c.0": 9},
    )


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank: int) -> None:
    conv, norm = {1: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv3d, nn.BatchNorm3d)}[rank]

    def run(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.n(m.a(x)))
        return m.head(F.relu(m.b(x)).flatten(2).mean(2))

    model = Toy(run, a=conv(3, 16, 3), n=norm(16), b=conv(16, 12, 3), head=nn.Linear(12, 5))
    check(model, sample((3, *(7,) * rank)), {"a": 16, "b": 12})


def test_attention_over_the_channel_statistics_keeps_them_whole() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        seen = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return m.head(m.b(x * torch.sigmoid(m.look(seen))).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), look=nn.Conv2d(2, 1, 7, padding=3), b=unit(16, 12), head=nn.Linear(12, 5))
    graph = check(model, X, {"b.0": 12})
    assert "mean" in reasons(graph)


def test_group_norm_prunes_whole_groups() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(F.relu(m.n(m.a(x))).mean((2, 3)))

    model = Toy(run, a=nn.Conv2d(3, 20, 3), n=nn.GroupNorm(5, 20), head=nn.Linear(20, 5))
    graph = check(model, X, {"a": 5})
    small: Any = dmcp.cut(model, graph, {"a": 2})
    assert (small.n.num_groups, small.n.num_channels, small.a.out_channels) == (2, 8, 8)


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 16), nn.InstanceNorm2d(16, affine=True)], ids=["group", "instance"])
def test_norms_that_mix_and_that_do_not(norm: nn.Module) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.b(F.relu(m.n(m.a(x)))).mean((2, 3)))

    mixes = isinstance(norm, nn.GroupNorm)
    model = Toy(run, a=nn.Conv2d(3, 16, 3), n=norm, b=unit(16, 12), head=nn.Linear(12, 5))
    graph = check(model, X, {"b.0": 12} if mixes else {"a": 16, "b.0": 12})
    assert ("GroupNorm" in reasons(graph)) is mixes


class ConvNext(nn.Module):
    """A block with LayerNorm over the stream and a free hidden space."""

    def __init__(self, stream: int = 8, hidden: int = 20) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, stream, 4, 4)
        self.depth = nn.Conv2d(stream, stream, 3, padding=1, groups=stream)
        self.norm = nn.LayerNorm(stream)
        self.fc1 = nn.Linear(stream, hidden)
        self.fc2 = nn.Linear(hidden, stream)
        self.scale = nn.Parameter(torch.ones(stream))
        self.head = nn.Linear(stream, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.fc2(F.gelu(self.fc1(y))) * self.scale
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


def test_layer_norm_is_kept_whole_unless_exact_is_given_up() -> None:
    model: Any = ConvNext()
    graph = check(model, X, {"fc1": 20})
    assert "LayerNorm" in reasons(graph)
    loose = dmcp.trace(model, X, exact=False)
    assert sizes(loose) == {"stem": 8, "fc1": 20}
    small = dmcp.cut(model, loose, {"stem": 5, "fc1": 9})
    narrow = ConvNext(5, 9).double()
    pick(narrow.stem, model.stem, keep(5), keep(3))
    pick(narrow.depth, model.depth, keep(5), [0])
    pick(narrow.norm, model.norm, keep(5))
    pick(narrow.fc1, model.fc1, keep(9), keep(5))
    pick(narrow.fc2, model.fc2, keep(5), keep(9))
    pick(narrow.head, model.head, keep(5), keep(5))
    with torch.no_grad():
        narrow.scale.copy_(model.scale[:5])
    assert distance(small(X), narrow(X)) < 1e-10


def test_einsum() -> None:
    class Einsum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = unit(3, 16)
            self.mix = nn.Parameter(torch.ones(16, 12))
            self.head = nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(torch.einsum("bchw,cd->bdhw", self.a(x), self.mix)).mean((2, 3)))

    graph = check(Einsum(), X, None)
    assert sorted(sizes(graph).values()) == [12, 16]


class Attention(nn.Module):
    """A transformer block on a conv's tokens: the stream and the heads are tied by the attention's own Python."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.fc1 = nn.Linear(16, 21)
        self.fc2 = nn.Linear(21, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        tokens = tokens + self.fc2(F.gelu(self.fc1(self.norm(tokens))))
        return self.head(tokens.mean(1))


def test_multihead_attention() -> None:
    check(Attention(), X, {"fc1": 21})


def test_attention_by_hand_without_a_default_scale() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        tokens = m.a(x).flatten(2).transpose(1, 2)
        b, n, _ = tokens.shape
        q, k, v = (part.reshape(b, n, 2, -1).transpose(1, 2) for part in (m.q(tokens), m.k(tokens), m.v(tokens)))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).reshape(b, n, -1)
        return m.head(m.out(mixed).relu().mean(1))

    layers = {"q": nn.Linear(16, 12), "k": nn.Linear(16, 12), "v": nn.Linear(16, 14), "out": nn.Linear(14, 9)}
    model = Toy(run, a=unit(3, 16), **layers, head=nn.Linear(9, 5))
    graph = check(model, X, None)
    assert sizes(graph)["a.0"] == 16
    assert sizes(graph)["out"] == 9


class Doubled(nn.Module):
    """A weight that is computed from a parameter."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2 + 0.01


@pytest.mark.parametrize("how", ["weight_norm", "parametrize", "standardised"])
def test_computed_weights_stay_exact(how: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        if how == "standardised":
            weight = m.b[0].weight
            weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
            x = F.relu(F.conv2d(x, weight, m.b[0].bias))
        else:
            x = m.b(x)
        return m.head(m.c(x).mean((2, 3)))

    model = Toy(run, a=unit(3, 16), b=unit(16, 12), c=unit(12, 9), head=nn.Linear(9, 5))
    randomise(model)
    if how == "weight_norm":
        weight_norm(model.b[0])
    elif how == "parametrize":
        parametrize.register_parametrization(model.b[0], "weight", Doubled())
    graph = check(model, X, None)
    assert sizes(graph)["c.0"] == 9


NORMED = {
    "weight_norm": (weight_norm, "torch.nn.utils.parametrize.remove_parametrizations"),
    "old weight_norm": (nn.utils.weight_norm, "torch.nn.utils.remove_weight_norm"),
    "spectral_norm": (spectral_norm, "torch.nn.utils.parametrize.remove_parametrizations"),
    "old spectral_norm": (nn.utils.spectral_norm, "torch.nn.utils.remove_spectral_norm"),
    "orthogonal": (orthogonal, "torch.nn.utils.parametrize.remove_parametrizations"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", NORMED)
def test_a_layer_whose_weight_is_computed_is_named_with_the_way_out(how: str) -> None:
    wrap, undo = NORMED[how]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), wrap(nn.Conv2d(16, 12, 1)), unit(12, 9), nn.Conv2d(9, 2, 1))
    graph = dmcp.trace(model, X.float())
    whole = {item.name: item.reason for item in graph.unprunable}
    assert f"the weight of 2 is computed: undo that before pruning with {undo}(layer" in whole["2"]
    assert undo in whole["0"]  # its channels are read by that weight
    assert undo not in whole["4"]
    assert undo in graph.summary()
    assert sizes(graph)["3.0"] == 9


@pytest.mark.parametrize("wrap", [weight_norm, spectral_norm])
def test_nothing_but_computed_weights_says_what_to_do(wrap: Any) -> None:
    model = nn.Sequential(wrap(nn.Conv2d(3, 16, 3)), nn.Conv2d(16, 2, 1))
    with pytest.raises(TraceError, match=r"0: .*the weight of 0 is computed: .*remove_parametrizations"):
        dmcp.trace(model, X.float())
    parametrize.remove_parametrizations(model[0], "weight")
    assert sizes(dmcp.trace(model, X.float())) == {"0": 16}


def test_a_frozen_layer_with_a_computed_weight_is_strictly_fine() -> None:
    model = nn.Sequential(weight_norm(nn.Conv2d(3, 16, 3)), nn.Conv2d(16, 9, 1), nn.Conv2d(9, 2, 1))
    with pytest.raises(TraceError, match=r'ignore=\["0"\]'):
        dmcp.trace(model, X.float(), strict=True)
    assert sizes(dmcp.trace(model, X.float(), ignore=["0"], strict=True)) == {"1": 9}


# -- ops without a rule, frozen, reports


def mysterious() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.b(mystery(m.a(x))).mean((2, 3)))

    return Toy(run, a=unit(3, 16), b=unit(16, 12), head=nn.Linear(12, 5))


@pytest.mark.parametrize(
    "name", ["ssdlite320_mobilenet_v3_large", pytest.param("retinanet_resnet50_fpn", marks=pytest.mark.slow)]
)
def test_a_detector_with_its_boxes_says_what_to_trace_instead(name: str) -> None:
    """What chooses boxes by values is no network whose channels could be followed: the part before it is."""
    detection = pytest.importorskip("torchvision.models.detection")
    detector = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=3)
    with pytest.raises(TraceError, match="Trace the part of a detector that ends before its boxes"):
        dmcp.trace(detector, ([torch.rand(3, 64, 64), torch.rand(3, 64, 64)],))


def test_an_op_without_a_rule_keeps_its_input_whole() -> None:
    graph = check(mysterious(), X, {"b.0": 12})
    ((op, count),) = graph.unknown.items()
    assert "mystery" in op
    assert count >= 1
    assert "mystery" in reasons(graph)
    assert "mystery" in graph.summary()


def test_a_rule_of_the_users_own() -> None:
    rules = dmcp.RULES | {torch.ops.dmcp_tests.mystery.default: pointwise}
    graph = check(mysterious(), X, {"a.0": 16, "b.0": 12}, rules=rules, strict=True)
    assert graph.unknown == {}


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["conv2"], {"a", "b", "t"}),  # a layer: what it writes stays whole, what it reads does not
        (["bn2"], {"a", "b", "t"}),  # a norm
        (["stem"], {"a", "b", "t"}),  # the name of the space, too
        (("conv1", "project"), {"s", "b"}),
        ([], {"s", "a", "b", "t"}),
    ],
)
def test_frozen(ignore: Any, left: set[str]) -> None:
    model = randomise(Residual(**Residual.FULL))
    graph = dmcp.trace(model, sample(Residual.SHAPE), ignore=ignore)
    assert sizes(graph) == {Residual.SPACES[key]: Residual.FULL[key] for key in left}
    check_cut(model, graph, sample(Residual.SHAPE))


def test_frozen_takes_everything_inside_a_module() -> None:
    body = nn.Sequential(unit(16, 12), unit(12, 10))
    model = Toy(lambda m, x: m.head(m.body(m.a(x)).mean((2, 3))), a=unit(3, 16), body=body, head=nn.Linear(10, 5))
    assert sizes(dmcp.trace(model, X.float())) == {"a.0": 16, "body.0.0": 12, "body.1.0": 10}
    graph = dmcp.trace(model, X.float(), ignore=["body"])
    assert sizes(graph) == {"a.0": 16}
    assert "body" in " ".join(whole.name for whole in graph.unprunable)


def test_writers_and_readers() -> None:
    graph = dmcp.trace(randomise(Residual(**Residual.FULL)), sample(Residual.SHAPE))
    stream = next(space for space in graph.spaces if space.name == "stem")
    assert {"stem", "conv2"} <= set(stream.writers)
    assert {"conv1", "conv3", "project"} <= set(stream.readers)
    assert not {"stem", "conv2", "head"} & set(stream.readers)
    assert not {"conv1", "conv3", "project", "head"} & set(stream.writers)


def test_shares_by_hand() -> None:
    graph = dmcp.trace(randomise(Chain(**Chain.FULL)), sample(Chain.SHAPE))
    macs = {"conv1": 121 * 27 * 7, "conv2": 36 * 63 * 9, "conv3": 4 * 81 * 6, "head": 24 * 5}
    assert {layer.name: layer.macs for layer in graph.layers() if layer.macs} == macs
    total = sum(macs.values())
    assert graph.macs(graph.full) == total
    shares = [graph.space_share(space) for space in graph.spaces]
    assert shares == pytest.approx(
        [
            (macs[one] + macs[other]) / total
            for one, other in (("conv1", "conv2"), ("conv2", "conv3"), ("conv3", "head"))
        ]
    )
    assert graph.prunable_share == pytest.approx(1)
    kept = dmcp.trace(randomise(Chain(**Chain.FULL)), sample(Chain.SHAPE), ignore=["conv1", "conv2"])
    assert kept.prunable_share == pytest.approx((macs["conv3"] + macs["head"]) / total)


def test_reports_name_every_space_and_reason() -> None:
    model = ConvNext()
    graph = dmcp.trace(model, X.float(), ignore=["fc1"], exact=False)
    text, data = graph.summary(), graph.to_json()
    assert {"macs", "params", "spaces", "unprunable", "bindings", "unknown", "notes", "prunable_share"} <= data.keys()
    assert data["macs"] == graph.macs(graph.full)
    assert data["params"] == sum(parameter.numel() for parameter in model.parameters())
    plain = json.loads(json.dumps(data))
    assert [space["name"] for space in plain["spaces"]] == [space.name for space in graph.spaces]
    assert [space["size"] for space in plain["spaces"]] == [space.size for space in graph.spaces]
    assert graph.unprunable
    for space in graph.spaces:
        assert space.name in text
    for whole in graph.unprunable:
        assert whole.reason in text
        assert whole.reason in json.dumps(data, ensure_ascii=False)
    assert "fc1" in " ".join(whole.name for whole in graph.unprunable)


def test_help_is_short() -> None:
    for name in dmcp.__all__:
        if callable(value := getattr(dmcp, name)) and not isinstance(value, type):
            assert len(pydoc.render_doc(value)) < 4000, name


def test_the_same_model_gives_the_same_graph() -> None:
    model, x = randomise(Residual(**Residual.FULL)), sample(Residual.SHAPE)
    one, other = dmcp.trace(model, x), dmcp.trace(copy.deepcopy(model), x)
    assert one.spaces == other.spaces
    assert one.full == other.full
    assert one.to_json() == other.to_json()
    assert one.fingerprint == other.fingerprint
