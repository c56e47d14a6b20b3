"""Gates folded into parameters against nets with gate layers written out, and the group sizes of the chain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from nets import Chain, Depthwise, PreActivation, Residual, SqueezeExcite, distance, randomise, sample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dmcp
from dmcp.markov import group_sizes

Gates = dict[str, Tensor]  # by the width names of the hand-written nets


def _map(gate: Tensor) -> Tensor:
    """A gate per channel, for feature maps. (C,) -> (C, 1, 1)"""
    return gate[:, None, None]


# -- the nets of nets.py with a gate layer after each norm, and before readers that no norm comes before


def gated_chain(net: Chain, x: Tensor, g: Gates) -> Tensor:
    x = F.relu(net.bn1(net.conv1(x)) * _map(g["a"]))
    x = F.relu(net.bn2(net.conv2(x)) * _map(g["b"]))
    x = F.relu(net.bn3(net.conv3(x)) * _map(g["c"]))
    return net.head(x.flatten(1))


def gated_residual(net: Residual, x: Tensor, g: Gates) -> Tensor:
    x = F.relu(net.bn0(net.stem(x)) * _map(g["s"]))
    y = F.relu(net.bn1(net.conv1(x)) * _map(g["a"]))
    x = F.relu(net.bn2(net.conv2(y)) * _map(g["s"]) + x)
    y = F.relu(net.bn3(net.conv3(x)) * _map(g["b"]))
    x = F.relu(net.bn4(net.conv4(y)) * _map(g["t"]) + net.bn5(net.project(x)) * _map(g["t"]))
    return net.head(x.mean((2, 3)))


def gated_depthwise(net: Depthwise, x: Tensor, g: Gates) -> Tensor:
    x = F.relu6(net.bn0(net.stem(x)) * _map(g["s"]))
    y = F.relu6(net.bn1(net.expand1(x)) * _map(g["e"]))
    y = F.relu6(net.bn2(net.depth1(y)) * _map(g["e"]))
    x = x + net.bn3(net.project1(y)) * _map(g["s"])
    y = F.relu6(net.bn4(net.expand2(x)) * _map(g["f"]))
    y = F.relu6(net.bn5(net.depth2(y)) * _map(g["f"]))
    x = net.bn6(net.project2(y)) * _map(g["t"])
    return net.head(x.mean((2, 3)))


def gated_squeeze_excite(net: SqueezeExcite, x: Tensor, g: Gates) -> Tensor:
    x = F.relu(net.bn0(net.stem(x)) * _map(g["s"]))
    y = F.silu(net.bn1(net.conv(x)) * _map(g["c"]))
    squeezed = F.relu(net.squeeze(F.adaptive_avg_pool2d(y, 1))) * _map(g["r"])  # no norm: before its reader
    y = y * torch.sigmoid(net.excite(squeezed))
    x = F.relu(x + net.bn2(net.project(y)) * _map(g["s"]))
    return net.head(x.mean((2, 3)))


def gated_pre_activation(net: PreActivation, x: Tensor, g: Gates) -> Tensor:
    x = net.stem(x)
    y = net.conv1(F.relu(net.bn1(x) * _map(g["s"])))
    x = x + net.conv2(F.relu(net.bn2(y) * _map(g["a"])))
    y = net.conv3(F.relu(net.bn3(x) * _map(g["s"])))
    raw = net.shortcut(x * _map(g["s"]))  # reads the stream with no norm between
    x = net.conv4(F.relu(net.bn4(y) * _map(g["b"]))) + raw
    return net.head(F.relu(net.bn5(x) * _map(g["t"])).mean((2, 3)))


class Plain(nn.Module):
    """VGG without norms; the gate of a space lies before its reader."""

    FULL = {"a": 7, "b": 9, "c": 6}  # noqa: RUF012
    SPACES = {"a": "conv1", "b": "conv2", "c": "hidden"}  # noqa: RUF012
    SHAPE = (3, 8, 8)

    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, a, 3, padding=1)
        self.conv2 = nn.Conv2d(a, b, 3, padding=1)
        self.hidden = nn.Linear(b * 4, c)
        self.head = nn.Linear(c, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


def gated_plain(net: Plain, x: Tensor, g: Gates) -> Tensor:
    x = F.max_pool2d(F.relu(net.conv1(x)), 2) * _map(g["a"])
    x = F.max_pool2d(F.relu(net.conv2(x)), 2) * _map(g["b"])
    return net.head(F.relu(net.hidden(x.flatten(1))) * g["c"])


class NoAffine(nn.Module):
    """Norms without scale and shift of their own; the gate lies before the reader."""

    FULL = {"a": 7, "b": 6}  # noqa: RUF012
    SPACES = {"a": "conv1", "b": "conv2"}  # noqa: RUF012
    SHAPE = (3, 8, 8)

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, a, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(a, affine=False)
        self.conv2 = nn.Conv2d(a, b, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(b, affine=False)
        self.head = nn.Linear(b, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.bn1(self.conv1(x)))
        return self.head(F.silu(self.bn2(self.conv2(x))).mean((2, 3)))


def gated_no_affine(net: NoAffine, x: Tensor, g: Gates) -> Tensor:
    x = F.silu(net.bn1(net.conv1(x))) * _map(g["a"])
    x = F.silu(net.bn2(net.conv2(x))) * _map(g["b"])
    return net.head(x.mean((2, 3)))


EXPLICIT: dict[Any, Callable[[Any, Tensor, Gates], Tensor]] = {
    Chain: gated_chain,
    Residual: gated_residual,
    Depthwise: gated_depthwise,
    SqueezeExcite: gated_squeeze_excite,
    PreActivation: gated_pre_activation,
    Plain: gated_plain,
    NoAffine: gated_no_affine,
}


def made(net: Any) -> tuple[nn.Module, Any, Tensor, Any]:
    """A model with random numbers, its graph, a batch, and its supernet."""
    model, x = randomise(net(**net.FULL)), sample(net.SHAPE)
    graph = dmcp.trace(model, x)
    return model, graph, x, dmcp.Supernet(model, graph, groups=4)


def by_width(net: Any, graph: Any, gates: Tensor) -> Gates:
    """The flat gates of a supernet, divided by hand."""
    names = {space: width for width, space in net.SPACES.items()}
    assert {space.name for space in graph.spaces} == names.keys()
    pieces = gates.split([space.size for space in graph.spaces])
    return {names[space.name]: piece for space, piece in zip(graph.spaces, pieces, strict=True)}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("net", EXPLICIT, ids=lambda net: net.__name__)
def test_soft_gates_are_gate_layers(net: Any, training: bool) -> None:
    model, graph, x, supernet = made(net)
    model.train(training)
    supernet.train(training)
    total = sum(space.size for space in graph.spaces)
    # Some are negative, which no chance is, so that a gate before a relu is not one after it.
    gates = torch.randn(total, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expected = EXPLICIT[net](copy.deepcopy(model), x, by_width(net, graph, gates))
    output = supernet(x, gates)
    assert distance(output, expected) < 1e-10
    assert distance(output, copy.deepcopy(model)(x)) > 0.1  # the gates do something
    weight = torch.randn_like(expected)
    (slope,) = torch.autograd.grad((output * weight).sum(), gates)
    (expected_slope,) = torch.autograd.grad((expected * weight).sum(), gates)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-8, atol=1e-10 * expected_slope.abs().max().item())
    assert expected_slope.count_nonzero() > total // 2


@pytest.mark.parametrize("net", EXPLICIT, ids=lambda net: net.__name__)
def test_gradient_reaches_the_alphas_as_through_gate_layers(net: Any) -> None:
    model, graph, x, supernet = made(net)
    supernet.train()
    model.train()
    with torch.no_grad():
        for alpha in supernet.alphas():
            alpha.copy_(torch.randn_like(alpha))
    loss = supernet(x, supernet.soft()).square().sum()
    slopes = torch.autograd.grad(loss, supernet.alphas())
    expected = EXPLICIT[net](model, x, by_width(net, graph, supernet.soft())).square().sum()
    for slope, reference in zip(slopes, torch.autograd.grad(expected, supernet.alphas()), strict=True):
        torch.testing.assert_close(slope, reference, rtol=1e-5, atol=1e-7)
        assert reference.count_nonzero() > 0


# -- activations that turn zero into something else


class Lifted(nn.Module):
    """Activations with f(0) != 0: hard gates at the writers would leak."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 7, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(7)
        self.depth = nn.Conv2d(7, 7, 3, padding=1, groups=7)
        self.bn2 = nn.BatchNorm2d(7)
        self.conv2 = nn.Conv2d(7, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.bn1(self.conv1(x)))
        x = self.activation(self.bn2(self.depth(x)))
        return self.head(self.activation(self.conv2(x)).mean((2, 3)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("activation", [torch.sigmoid, F.hardsigmoid, torch.cos, lambda x: F.softplus(x) + 0.3])
def test_hard_gates_are_exact_where_f_of_zero_is_not_zero(activation: Any, training: bool) -> None:
    model, x = randomise(Lifted(activation)), sample((3, 8, 8))
    graph = dmcp.trace(model, x)
    assert {space.name: space.size for space in graph.spaces} == {"conv1": 7, "conv2": 6}
    supernet = dmcp.Supernet(model, graph).train(training)
    widths = graph.widths({"conv1": 3, "conv2": 2})
    narrow = _narrow_lifted(model, activation).train(training)
    assert distance(supernet(x, supernet.hard(widths)), narrow(x)) < 1e-10
    assert distance(dmcp.cut(supernet.model, graph, widths)(x), narrow(x)) < 1e-10


def _narrow_lifted(model: Any, activation: Any) -> nn.Module:
    """The first 3 and 2 channels, by hand."""
    small: Any = Lifted(activation).double()
    tensors = {
        "conv1.weight": model.conv1.weight[:3],
        "conv1.bias": model.conv1.bias[:3],
        "depth.weight": model.depth.weight[:3],
        "depth.bias": model.depth.bias[:3],
        "conv2.weight": model.conv2.weight[:2, :3],
        "conv2.bias": model.conv2.bias[:2],
        "head.weight": model.head.weight[:, :2],
        "head.bias": model.head.bias,
    }
    for norm in ("bn1", "bn2"):
        for name in ("weight", "bias", "running_mean", "running_var"):
            tensors[f"{norm}.{name}"] = (
                model.get_parameter(f"{norm}.{name}")[:3]
                if name in ("weight", "bias")
                else (model.get_buffer(f"{norm}.{name}")[:3])
            )
    for path, value in tensors.items():
        layer, name = path.split(".")
        value = value.detach().clone()
        target = getattr(small, layer)
        setattr(target, name, nn.Parameter(value) if name in dict(target.named_parameters()) else value)
    small.depth.groups = 3
    return small


# -- what the backward pass computes


class Backwards(TorchDispatchMode):
    """Counts the backward passes of convolutions, and how many of them compute a weight gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = 0
        self.weight_gradients = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            _input, weight, _bias = args[-1]  # output_mask
            self.convs += 1
            self.weight_gradients += bool(weight)
        return func(*args, **(kwargs or {}))


def _counted(supernet: Any, x: Tensor, gates: Tensor) -> Backwards:
    loss = supernet(x, gates).square().sum()
    with Backwards() as backwards:
        loss.backward()
    return backwards


@pytest.mark.parametrize("net", [Chain, Residual, Depthwise], ids=lambda net: net.__name__)
def test_no_conv_weight_gradient_for_gates_alone(net: Any) -> None:
    _check_no_weight_gradients(*made(net))


def test_no_conv_weight_gradient_for_gates_alone_in_resnet18() -> None:
    model, x = randomise(torchvision.models.resnet18(weights=None)), sample((3, 64, 64), batch=2)
    graph = dmcp.trace(model, x)
    _check_no_weight_gradients(model, graph, x, dmcp.Supernet(model, graph))


def _check_no_weight_gradients(model: nn.Module, graph: Any, x: Tensor, supernet: Any) -> None:
    supernet.train()
    convs = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    # With weights to train the counter sees a weight gradient for every conv, with soft gates and with hard ones.
    assert _counted(supernet, x, supernet.soft()).weight_gradients == convs
    assert _counted(supernet, x, supernet.hard(supernet.min_widths)).weight_gradients == convs
    for weight in supernet.weights():
        weight.requires_grad_(False)
        weight.grad = None
    for alpha in supernet.alphas():
        alpha.grad = None
    backwards = _counted(supernet, x, supernet.soft())
    assert backwards.weight_gradients == 0
    assert backwards.convs > 0
    assert all(weight.grad is None for weight in supernet.weights())
    assert any(alpha.grad.count_nonzero() for alpha in supernet.alphas())


# -- gates and the chain


def test_soft_gates_are_products_of_chances() -> None:
    _, graph, _, supernet = made(Chain)
    (alpha,) = supernet.alphas()
    with torch.no_grad():
        alpha.copy_(torch.randn_like(alpha))
    expected: list[float] = []
    for row, space in enumerate(graph.spaces):
        chance = 1.0
        for step, size in enumerate(group_sizes(space.size, 4, 1)):
            if step:
                chance *= torch.sigmoid(alpha[row, step - 1]).item()
            expected += [chance] * size
    soft = supernet.soft()
    assert soft.is_floating_point()
    assert soft.requires_grad
    torch.testing.assert_close(soft.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7)


def test_soft_gates_at_both_ends() -> None:
    _, graph, _, supernet = made(Residual)
    with torch.no_grad():
        for alpha in supernet.alphas():
            alpha.fill_(1e4)
        assert supernet.soft().tolist() == [1.0] * sum(space.size for space in graph.spaces)
        for alpha in supernet.alphas():
            alpha.fill_(-1e4)
        assert supernet.soft().tolist() == supernet.hard(supernet.min_widths).double().tolist()


def test_hard_gates_keep_the_first_channels() -> None:
    _, graph, _, supernet = made(Residual)
    full = supernet.hard(graph.full)
    assert full.dtype == torch.bool
    assert full.shape == (sum(space.size for space in graph.spaces),)
    assert full.all()
    widths = graph.widths({"stem": 3, "conv1": 1, "conv3": 9, "conv4": 10})
    expected: list[bool] = []
    for space in graph.spaces:
        expected += [channel < widths[space.name] for channel in range(space.size)]
    assert supernet.hard(widths).tolist() == expected


@pytest.mark.parametrize(("groups", "align"), [(10, 1), (3, 1), (1, 1), (4, 2), (4, 3)])
def test_floor_is_the_first_group(groups: int, align: int) -> None:
    model, graph, _, _ = made(Residual)
    supernet = dmcp.Supernet(model, graph, groups=groups, align=align)
    assert dict(supernet.min_widths) == {space.name: group_sizes(space.size, groups, align)[0] for space in graph.spaces}
    first = supernet.hard(supernet.min_widths).split([space.size for space in graph.spaces])
    assert [piece.sum().item() for piece in first] == list(supernet.min_widths.values())
    assert all(piece[0] for piece in first)


@pytest.mark.parametrize(
    ("size", "groups", "align", "sizes"),
    [
        (10, 3, 1, (3, 3, 4)),
        (16, 10, 1, (1, 1, 1, 1, 2, 2, 2, 2, 2, 2)),
        (5, 10, 1, (1, 1, 1, 1, 1)),
        (1, 10, 1, (1,)),
        (7, 1, 1, (7,)),
        (64, 10, 8, (8,) * 8),
        (32, 2, 8, (16, 16)),
        (40, 2, 8, (16, 24)),
        (4, 10, 8, (4,)),
    ],
)
def test_group_sizes_by_hand(size: int, groups: int, align: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(size, groups, align) == sizes


@pytest.mark.parametrize("align", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("groups", [1, 2, 3, 7, 10])
def test_group_sizes_are_even(groups: int, align: int) -> None:
    for size in range(1, 200):
        sizes = group_sizes(size, groups, align)
        assert sum(sizes) == size
        assert min(sizes) >= 1
        assert min(groups, max(1, size // align)) <= len(sizes) <= min(groups, -(-size // align))
        assert all(n % align == 0 for n in sizes[:-1])
        # The last group holds the remainder; counted in units, rounded one way or the other, it is like the rest.
        units = [n // align for n in sizes[:-1]]
        assert any(
            [*units, last] == sorted([*units, last]) and last - [*units, last][0] <= 1
            for last in (sizes[-1] // align, -(-sizes[-1] // align))
        ), (size, sizes)
