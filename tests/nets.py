"""Eight small nets that also exist at any narrower widths: the independent oracle of the invariants.

LAYERS says which channels each layer reads and writes ("s>a"; of a norm only one), and the kernel (k1, else 3), stride,
padding, groups and bias of a convolution, of which it reads the channels of one group. "s+g" are two spaces side by
side, "c*4" are four entries per channel, "2*a" are two copies. FULL are the unpruned widths, SPACES the name that each
width has in the graph: the first layer that writes the space. `narrow` copies the kept channels; it knows nothing of
the package.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp.searching.subnets import Chains, sample_gates
from dmcp.settings import Sampling
from dmcp.tracing.modules import call_model, rebatch, tensors_in

Kept = Sequence[int]  # indices of the channels that stay


def holds(budget: dmcp.Budget, graph: dmcp.ChannelGraph, widths: Mapping[str, int]) -> bool:
    """Whether widths are inside every limit."""
    return all(graph.cost(limit.kind, widths) <= limit.target for limit in budget.limits)


def keep(k: int, after: int = 0) -> list[int]:
    """The first k channels, counted from an offset."""
    return list(range(after, after + k))


def positions(text: str, full: Mapping[str, int], kept: Mapping[str, Kept]) -> list[int]:
    """Where the kept channels lie in a dim."""
    found: list[int] = []
    offset = 0
    for term in text.split("+"):
        places, size = [0], 1
        for factor in term.split("*"):
            own = kept.get(factor) if factor in full else range(int(factor))
            count = full.get(factor) or int(factor)
            places, size = [place * count + index for place in places for index in own], size * count
        found += [offset + place for place in places]
        offset += size
    return found


@torch.no_grad()
def pick(small: nn.Module, full: nn.Module, rows: Kept, cols: Kept | None = None) -> None:
    """Copy these outputs (rows) and inputs (cols) of one conv, linear or norm."""
    for name, value in [*full.named_parameters(), *full.named_buffers()]:
        if value.ndim:  # not num_batches_tracked
            value = value[list(rows)]
        if name == "weight" and cols is not None:
            value = value[:, list(cols)]
        target = getattr(small, name)
        assert target.shape == value.shape, (name, target.shape, value.shape)
        target.copy_(value)


class HandNet(nn.Module):
    FULL: ClassVar[dict[str, int]]
    SPACES: ClassVar[dict[str, str]]
    LAYERS: ClassVar[str]
    SHAPE: ClassVar[tuple[int, ...]] = (3, 9, 9)
    gates: Mapping[str, Tensor] | None = None  # of each width; a gate layer lies after each norm

    def gate(self, name: str, x: Tensor) -> Tensor:
        """What a gate layer gives; by itself the network has none."""
        return x if self.gates is None else x * self.gates[name].reshape(-1, *(1,) * (x.ndim - 2))

    def __init__(self, *widths: int, **named: int) -> None:
        super().__init__()
        sizes = dict(zip(self.FULL, widths, strict=False)) | named

        def width(text: str) -> int:
            return len(positions(text, sizes, {name: range(size) for name, size in sizes.items()}))

        for name, reads, writes, flags in self.layers():
            if not reads:
                layer: nn.Module = nn.BatchNorm2d(width(writes))
            elif name == "head":
                layer = nn.Linear(width(reads), width(writes))
            else:
                kernel, stride, padding, groups = (flags.get(it, own) for it, own in zip("kspg", "3101", strict=False))
                options = {"stride": int(stride), "padding": int(padding), "groups": width(groups)}
                inputs = width(groups) * width(reads)
                layer = nn.Conv2d(inputs, width(writes), int(kernel), bias="b" in flags, **options)
            self.add_module(name, layer)

    @classmethod
    def layers(cls) -> Iterator[tuple[str, str, str, dict[str, str]]]:
        for text in cls.LAYERS.split(";"):
            name, channels, *flags = text.split()
            reads, _, writes = channels.rpartition(">")
            yield name, reads, writes, {flag[0]: flag[1:] for flag in flags}

    @classmethod
    def narrow(cls, full: Any, **kept: Kept) -> Any:
        small: Any = cls(**{name: len(own) for name, own in kept.items()}).to(full.head.weight.dtype)
        for name, reads, writes, _ in cls.layers():
            columns = positions(reads, cls.FULL, kept) if reads else None
            pick(getattr(small, name), getattr(full, name), positions(writes, cls.FULL, kept), columns)
        return small


class Chain(HandNet):
    """Three conv-bn-relu, flattened into a linear."""

    FULL: ClassVar = {"a": 7, "b": 9, "c": 6}
    SPACES: ClassVar = {"a": "conv1", "b": "conv2", "c": "conv3"}
    SHAPE = (3, 11, 11)
    LAYERS = """
        conv1 3>a p1 bias; bn1 a; conv2 a>b s2 p1; bn2 b; conv3 b>c s2; bn3 c; head c*4>5
    """

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.gate("a", self.bn1(self.conv1(x))))
        x = F.relu(self.gate("b", self.bn2(self.conv2(x))))
        x = F.relu(self.gate("c", self.bn3(self.conv3(x))))
        return self.head(x.flatten(1))


class Residual(HandNet):
    """A stem and a basic block that share their stream, then a block with a projection shortcut."""

    FULL: ClassVar = {"s": 8, "a": 6, "b": 9, "t": 11}
    SPACES: ClassVar = {"s": "stem", "a": "conv1", "b": "conv3", "t": "conv4"}
    LAYERS = """
        stem 3>s p1; bn0 s; conv1 s>a p1; bn1 a; conv2 a>s p1; bn2 s; conv3 s>b s2 p1; bn3 b; conv4 b>t p1; bn4 t;
        project s>t k1 s2; bn5 t; head t>5
    """

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.gate("s", self.bn0(self.stem(x))))
        y = F.relu(self.gate("a", self.bn1(self.conv1(x))))
        x = F.relu(self.gate("s", self.bn2(self.conv2(y))) + x)
        y = F.relu(self.gate("b", self.bn3(self.conv3(x))))
        x = F.relu(self.gate("t", self.bn4(self.conv4(y))) + self.gate("t", self.bn5(self.project(x))))
        return self.head(x.mean((2, 3)))


class Depthwise(HandNet):
    """Two inverted residual blocks, the second without its shortcut."""

    FULL: ClassVar = {"s": 6, "e": 14, "f": 10, "t": 8}
    SPACES: ClassVar = {"s": "stem", "e": "expand1", "f": "expand2", "t": "project2"}
    LAYERS = """
        stem 3>s p1; bn0 s; expand1 s>e k1; bn1 e; depth1 1>e p1 ge; bn2 e; project1 e>s k1; bn3 s; expand2 s>f k1;
        bn4 f; depth2 1>f s2 p1 gf; bn5 f; project2 f>t k1; bn6 t; head t>5
    """

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.gate("s", self.bn0(self.stem(x))))
        y = F.relu6(self.gate("e", self.bn1(self.expand1(x))))
        y = F.relu6(self.gate("e", self.bn2(self.depth1(y))))
        x = x + self.gate("s", self.bn3(self.project1(y)))
        y = F.relu6(self.gate("f", self.bn4(self.expand2(x))))
        y = F.relu6(self.gate("f", self.bn5(self.depth2(y))))
        x = self.gate("t", self.bn6(self.project2(y)))
        return self.head(x.mean((2, 3)))


class Concat(HandNet):
    """Two dense layers, a transition, then three branches side by side."""

    FULL: ClassVar = {"s": 6, "g": 5, "h": 4, "t": 9, "p": 3, "q": 7, "r": 5}
    NAMES: ClassVar = ("stem", "dense1", "dense2", "transition", "branch1", "branch2", "branch3")
    SPACES: ClassVar = dict(zip("sghtpqr", NAMES, strict=True))
    LAYERS = """
        stem 3>s p1; bn1 s; dense1 s>g p1; bn2 s+g; dense2 s+g>h p1; bn3 s+g+h; transition s+g+h>t k1;
        branch1 t>p k1 bias; branch2 t>q p1 bias; branch3 t>r k1 bias; bn4 p+q+r; head p+q+r>5
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.dense1(F.relu(self.bn1(x)))], 1)
        x = torch.cat([x, self.dense2(F.relu(self.bn2(x)))], 1)
        x = F.avg_pool2d(self.transition(F.relu(self.bn3(x))), 2)
        x = torch.cat([self.branch1(x), self.branch2(x), self.branch3(F.max_pool2d(x, 3, 1, 1))], 1)
        return self.head(F.relu(self.bn4(x)).mean((2, 3)))


class Grouped(HandNet):
    """A conv with few wide groups, narrowed inside every group; then ResNeXt's many thin ones, pruned as one each.

    a and b are channels per group of the first, g is the number of groups of the second.
    """

    FULL: ClassVar = {"a": 7, "b": 5, "g": 6, "t": 9}
    SPACES: ClassVar = {"a": "stem", "b": "wide", "g": "reduce", "t": "expand"}
    LAYERS = """
        stem 3>2*a p1; bn0 2*a; wide a>2*b p1 g2 bias; bn1 2*b; reduce 2*b>g*2 k1; bn2 g*2; thin 2>g*3 s2 p1 gg;
        bn3 g*3; expand g*3>t k1; bn4 t; head t>5
    """

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(self.bn1(self.wide(x)))
        x = F.relu(self.bn2(self.reduce(x)))
        x = F.relu(self.bn3(self.thin(x)))
        x = F.relu(self.bn4(self.expand(x)))
        return self.head(x.mean((2, 3)))


class SqueezeExcite(HandNet):
    """A residual block whose inner channels are rescaled by a squeeze and excitation."""

    FULL: ClassVar = {"s": 7, "c": 12, "r": 5}
    SPACES: ClassVar = {"s": "stem", "c": "conv", "r": "squeeze"}
    LAYERS = """
        stem 3>s p1; bn0 s; conv s>c p1; bn1 c; squeeze c>r k1 bias; excite r>c k1 bias; project c>s k1; bn2 s;
        head s>5
    """

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.gate("s", self.bn0(self.stem(x))))
        y = F.silu(self.gate("c", self.bn1(self.conv(x))))
        squeezed = self.gate("r", F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1))))  # no norm: before its reader
        y = y * torch.sigmoid(self.excite(squeezed))
        x = F.relu(x + self.gate("s", self.bn2(self.project(y))))
        return self.head(x.mean((2, 3)))


class PreActivation(HandNet):
    """ResNetV2: norm and relu before each conv; the raw stream goes on, and through the second shortcut."""

    FULL: ClassVar = {"s": 8, "a": 6, "b": 9, "t": 11}
    SPACES: ClassVar = {"s": "stem", "a": "conv1", "b": "conv3", "t": "conv4"}
    LAYERS = """
        stem 3>s p1 bias; bn1 s; conv1 s>a p1; bn2 a; conv2 a>s p1; bn3 s; conv3 s>b s2 p1; bn4 b; conv4 b>t p1;
        shortcut s>t k1 s2; bn5 t; head t>5
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.conv1(F.relu(self.gate("s", self.bn1(x))))
        x = x + self.conv2(F.relu(self.gate("a", self.bn2(y))))
        y = self.conv3(F.relu(self.gate("s", self.bn3(x))))
        x = self.conv4(F.relu(self.gate("b", self.bn4(y)))) + self.shortcut(self.gate("s", x))  # no norm between
        return self.head(F.relu(self.gate("t", self.bn5(x))).mean((2, 3)))


class SharedWeight(HandNet):
    """One conv called twice, and two convs with one Parameter, whose inputs are thereby one space."""

    FULL: ClassVar = {"c": 8, "d": 6}
    SPACES: ClassVar = {"c": "stem", "d": "left"}
    LAYERS = """
        stem 3>c p1; bn0 c; mix c>c p1 bias; bn1 c; left c>d p1 bias; bn2 d; other c>c k1; bn3 c; right c>d p1 bias;
        bn4 d; head 2*d>5
    """

    def __init__(self, *widths: int, **named: int) -> None:
        super().__init__(*widths, **named)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(self.bn1(self.mix(x)))
        x = F.relu(self.bn1(self.mix(x)))
        left = F.relu(self.bn2(self.left(x)))
        right = F.relu(self.bn4(self.right(F.relu(self.bn3(self.other(x))))))
        return self.head(torch.cat([left, right], 1).mean((2, 3)))


class NoNorms(HandNet):
    """VGG without norms; the gate of a space lies before its reader."""

    FULL: ClassVar = {"a": 7, "b": 9}
    SPACES: ClassVar = {"a": "conv1", "b": "conv2"}
    SHAPE = (3, 8, 8)
    LAYERS = "conv1 3>a p1 bias; conv2 a>b p1 bias; head b*4>5"

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate("a", F.max_pool2d(F.relu(self.conv1(x)), 2))
        return self.head(self.gate("b", F.max_pool2d(F.relu(self.conv2(x)), 2)).flatten(1))


NETS: Any = (Chain, Residual, Depthwise, Concat, Grouped, SqueezeExcite, PreActivation, SharedWeight)


class Toy(nn.Module):
    """Layers by name, and a forward that is written where it is tested."""

    def __init__(self, run: Callable[[Any, Any], Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def unit(channels: int, out: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    """conv, norm, relu; its space is called `<name>.0`."""
    layer = nn.Conv2d(channels, out, kernel, padding=kernel // 2, **options)
    return nn.Sequential(layer, nn.BatchNorm2d(out), nn.ReLU())


def means(classes: int = 5) -> nn.Module:
    """A linear layer on the mean of each input channel: an architecture with nothing to prune."""
    return Toy(lambda m, x: m.head(x.mean((2, 3))), head=nn.Linear(Residual.SHAPE[0], classes))


class Odd(nn.Module):
    """Tensors that are neither in a conv nor in a norm, and a width hidden in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 6, 1)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))
        self.register_buffer("shift", torch.rand(6, 1, 1), persistent=False)
        self.head = nn.Linear(6 * 16, 5)
        self.channels = 6

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(F.relu(self.norm(self.stem(x)))) * self.scale + self.shift
        x = F.adaptive_avg_pool2d(x, 4).view(len(x), self.channels, 16)
        return self.head(x.flatten(1))


class Echo(nn.Module):
    """Gives its input back, so that a test writes the outputs itself; only for evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training and not torch.is_grad_enabled()
        return x


# -- an op that no rule knows


@torch.library.custom_op("dmcp_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    """Element-wise, but nobody has said so."""
    return 2 * x


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# -- filling, calling and comparing any model


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random parameters and running statistics: no scale is 1, no shift 0, nothing degenerate. In place, float64."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        fan_in = math.prod(parameter.shape[1:])
        parameter.copy_(values * (1.5 / fan_in) ** 0.5 if parameter.ndim > 1 else values / 3)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
            if module.weight is not None:
                module.weight.copy_(0.6 + torch.rand(module.weight.shape, generator=generator, dtype=torch.float64))
            if getattr(module, "running_mean", None) is not None:
                shape = module.running_mean.shape
                module.running_mean.copy_(torch.randn(shape, generator=generator, dtype=torch.float64) / 3)
                module.running_var.copy_(0.5 + torch.rand(shape, generator=generator, dtype=torch.float64))
    return model


def sample(shape: Sequence[int], batch: int = 4, seed: int = 0) -> Tensor:
    """A batch of noise. -> (batch, *shape) float64"""
    return torch.randn((batch, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@functools.cache
def traced(toy: Any) -> tuple[nn.Module, Any]:
    """A model that no test changes, and its graph."""
    model = randomise(toy(**toy.FULL))
    return model, dmcp.trace(model, sample(toy.SHAPE))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(one: Any, other: Any) -> float:
    """Largest difference of two outputs, in units of the difference between the other's samples."""
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=True))
    assert pairs, "an output without tensors"
    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
    assert all(bool(b.isfinite().all()) for _, b in pairs), "an output that is not finite"
    return torch.stack([(a - b).abs().max() / _spread(b) for a, b in pairs]).max().item()


def _spread(output: Tensor) -> Tensor:
    """How much two samples differ; where a net so narrow that its relus are dead answers all alike, its size."""
    between = (output[0] - output[1]).abs().max()
    return between if between > 1e-6 else output.abs().max().clamp(min=1e-6)


# -- supernets


def supernet(toy: Any = Chain, groups: int = 4) -> Any:
    """A supernet in float64 with random alphas, in train mode."""
    net = dmcp.Supernet(*traced(toy), groups).double().train()
    with torch.no_grad():
        net.alpha.copy_(torch.randn(net.alpha.shape, generator=torch.Generator().manual_seed(0)))
    return net


def by_width(toy: Any, graph: Any, gates: Tensor) -> dict[str, Tensor]:
    """The flat gates of a supernet, divided by hand."""
    names = {space: width for width, space in toy.SPACES.items()}
    pieces = gates.split([space.size for space in graph.spaces])
    return {names[space.name]: piece for space, piece in zip(graph.spaces, pieces, strict=True)}


def sandwich(
    net: Any, chains: Chains, sampling: Sampling, count: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Gates of the largest and the smallest sub-network, then of random ones."""
    largest = net.hard(chains.sizes.sum(dim=1))
    smallest = net.hard(chains.sizes[:, 0])
    return [largest, smallest, *sample_gates(net, chains, sampling, count, generator)]


class Backwards(TorchDispatchMode):
    """Counts the backward passes of convolutions, and how many of them compute a weight gradient."""

    convs = weight_gradients = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            _input, weight, _bias = args[-1]  # output_mask
            self.convs += 1
            self.weight_gradients += bool(weight)
        return func(*args, **(kwargs or {}))


# -- the contract of tracing


def sizes(graph: Any) -> dict[str, int]:
    return {space.name: space.size for space in graph.spaces}


def counted_macs(model: nn.Module, x: Any) -> int:
    """Multiply-adds of one sample by torch's own counter."""
    # With gradients and without fused attention, which torch does not count on every device and version.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call_model(copy.deepcopy(model).eval(), rebatch(x, 1))
    return counter.get_total_flops() // 2


def check_graph(model: nn.Module, graph: Any, x: Any, modes: Sequence[bool] = (False, True)) -> None:
    """At full width, at width 1 and at random widths the cut model is the gated one, and costs what is predicted."""
    generator = random.Random(0)
    for training in modes:
        net = dmcp.Supernet(model, graph).train(training)
        full = call_model(copy.deepcopy(net.model), x)
        assert distance(net(x, net.hard(graph.full)), full) < 1e-10
        for narrowest in (True, False):
            chosen = {name: 1 if narrowest else generator.randint(min(2, n), n) for name, n in sizes(graph).items()}
            widths = graph.widths(chosen)
            small = dmcp.cut(net.model, graph, widths)
            expected = call_model(small, x)
            assert distance(net(x, net.hard(widths)), expected) < 1e-9, chosen
            assert graph.params(widths) == sum(parameter.numel() for parameter in small.parameters())
            if narrowest:  # a wider net is another net
                assert max(distance(a, b) for a, b in zip(tensors_in(full), tensors_in(expected), strict=True)) > 0.01
            elif not training:  # at width 1 torch multiplies where it has nothing to sum, and does not count that
                assert graph.macs(widths) == counted_macs(small, x) == sum(it.macs for it in graph.layers(widths))


def check(model: nn.Module, x: Any, spaces: Any = None, modes: Sequence[bool] = (False, True), **how: Any) -> Any:
    """Trace; the spaces are these, by name or (a number) in sum, and the graph keeps its promises. -> graph or None"""
    randomise(model)
    try:
        graph = dmcp.trace(model, x, **how)
    except dmcp.TraceError as error:
        if spaces or "Nothing in this model can be pruned" not in str(error):
            raise
        return None
    found = sizes(graph)
    assert spaces is None or spaces == (sum(found.values()) if isinstance(spaces, int) else found), found
    check_graph(model, graph, x, modes)
    return graph
