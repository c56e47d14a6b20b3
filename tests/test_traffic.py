"""Traffic: against arithmetic by hand, and the bytes of real tensors that the ops of cut networks take and give."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from nets import NETS, Toy, holds
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.markov import marginals, sample_groups
from dmcp.searching.budget import budget_loss, parse_budget, ratios
from zoo.contract import counted_traffic

conv = nn.Conv2d


# -- by hand


def test_traffic_by_hand() -> None:
    """Each op reads its inputs and writes its output; weights are read once for a sample, whatever the batch."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = F.relu_(m.norm(m.first(x)))
        x = F.dropout(x, training=m.training).flatten(2).transpose(1, 2)
        return m.head(x.mean(1)) + m.shift

    layers = {
        "first": conv(3, 6, 3),
        "norm": nn.BatchNorm2d(6),
        "head": nn.Linear(6, 4),
        "shift": nn.Parameter(torch.ones(4)),
    }
    for batch in (1, 5):
        graph = dmcp.trace(Toy(run, **layers), torch.zeros(batch, 3, 8, 8))
        for width in (6, 4, 1):
            numbers = 3 * 64 + (27 * width + width) + 36 * width  # conv: image, weights, map
            numbers += 36 * width + 4 * width + 36 * width  # norm: map, its four vectors, map
            numbers += 2 * 36 * width  # relu in place; dropout and views are free
            numbers += 36 * width + width  # mean
            numbers += width + (4 * width + 4) + 4  # linear
            numbers += 4 + 4 + 4  # sum
            assert graph.traffic({"first": width}) == 4 * numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_read_once_and_what_is_free(dtype: torch.dtype) -> None:
    """Numbers have the bytes of their dtype, as in memory."""
    pixels, size = 25, dtype.itemsize
    layers = (pixels + 4 + 4 * pixels) + (4 * pixels + 4 + pixels)  # the two convs without biases
    convs = {"a": conv(1, 4, 1, bias=False), "b": conv(4, 1, 1, bias=False)}

    def traffic(run: Callable[[Any, Tensor], Tensor]) -> int:
        return dmcp.trace(Toy(run, **convs).to(dtype), torch.zeros(2, 1, 5, 5, dtype=dtype)).traffic()

    twice = traffic(lambda m, x: m.b((y := m.a(x)) * y))
    assert twice == size * (layers + 8 * pixels)
    masked = traffic(lambda m, x: m.b((y := m.a(x)).masked_fill(y > 0, 0.0)))
    assert masked == size * (layers + 4 * pixels + 8 * pixels) + 2 * 4 * pixels  # a mask has a byte per number
    part = traffic(lambda m, x: m.b(F.relu(m.a(x)[:, :, :2]).repeat(1, 1, 5, 1)[:, :, ::2]))
    assert part == size * (layers + 4 * (10 + 10 + 10 + 50))  # two rows of five, then ten, of which five are shown
    in_place = traffic(lambda m, x: m.b(F.dropout(m.a(x).squeeze_(2), 0.5, m.training, inplace=True)))
    assert in_place == size * layers
    scaled = traffic(lambda m, x: F.conv2d(F.conv2d(x, 2 * m.a.weight), m.b.weight))
    assert scaled == size * (layers + 4 + 4)  # what is computed from weights is computed for each sample


def test_a_number_that_is_written_into_a_tensor_is_one_fill() -> None:
    """On real tensors it is; on the tensors that are traced, PyTorch makes a tensor of the number and copies it."""

    def shifted(m: Any, x: Tensor) -> Tensor:
        mask = x.new_zeros((5, 5))
        mask[1:3] = 2.0
        return m.b(m.a(x) + mask)

    model = Toy(shifted, a=conv(1, 4, 1, bias=False), b=conv(4, 1, 1, bias=False))
    graph = dmcp.trace(model, torch.zeros(2, 1, 5, 5))
    assert graph.traffic() == counted_traffic(model, torch.zeros(1, 1, 5, 5))


def test_a_batch_size_in_the_code_has_an_equal_share_for_each_sample() -> None:
    """Such a network cannot be run on one sample: activations are divided by the batch, weights are not."""
    layers = {"a": conv(1, 4, 1, bias=False), "b": conv(4, 1, 1, bias=False)}
    model = Toy(lambda m, x: m.b(F.relu(m.a(x).view(2, -1, 5, 5))), **layers)
    graph = dmcp.trace(model, torch.zeros(2, 1, 5, 5))
    assert graph.traffic() == 4 * (25 + 4 + 100 + 100 + 100 + 100 + 4 + 25)


# -- twenty models


def concat(m: Any, x: Tensor) -> Tensor:
    x = F.relu_(m.stem(x))
    x = torch.cat([x, F.relu(m.more(x))], dim=1)
    return m.head(F.max_pool2d(x, 2).flatten(1))


def shuffle(m: Any, x: Tensor) -> Tensor:
    large = m.head(F.pixel_shuffle(F.relu(m.stem(x)), 2))
    large += F.interpolate(x[:, :1], scale_factor=2)
    return large


def residual(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m.norm(m.stem(x)), inplace=True)
    x = x + m.second(F.silu(m.first(x)))
    return m.head(F.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1), training=m.training))


def attention(m: Any, x: Tensor) -> Tensor:
    x = m.patches(x).flatten(2).transpose(1, 2)
    query, key, value = m.query(x), m.key(x), m.value(x)
    weights = (query @ key.transpose(1, 2) / 3).softmax(-1)
    return m.head((x + m.out(weights @ value)).mean(1))


def fused_attention(m: Any, x: Tensor) -> Tensor:
    x = m.patches(x).flatten(2).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(m.query(x)[:, None], m.key(x)[:, None], m.value(x)[:, None])
    return m.head((x + m.out(mixed.transpose(1, 2).reshape(x.shape))).mean(1))


def excite(m: Any, x: Tensor) -> Tensor:
    x = F.hardswish(m.stem(x))
    x = x * torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3), keepdim=True))))).expand_as(x)
    return m.head(F.dropout2d(F.avg_pool2d(m.depthwise(x), 2), training=m.training).mean((2, 3)))


def channel_shuffle(m: Any, x: Tensor) -> Tensor:
    x = F.relu_(m.stem(x))
    x = x.view(len(x), 2, -1, 8, 8).transpose(1, 2).contiguous().view(len(x), -1, 8, 8)
    a, b = m.grouped(x).chunk(2, dim=1)
    return m.head(F.gelu(a) + b.clone())


def heads() -> dict[str, nn.Module]:
    return {name: nn.Linear(12, 12) for name in ("query", "key", "value", "out")} | {"head": nn.Linear(12, 3)}


HAND: dict[str, Callable[[], nn.Module]] = {
    "concat": lambda: Toy(concat, stem=conv(3, 6, 3), more=conv(6, 5, 3, padding=1), head=nn.Linear(11 * 9, 3)),
    "pixel shuffle": lambda: Toy(shuffle, stem=conv(3, 8, 1), head=conv(2, 1, 1)),
    "residual": lambda: Toy(
        residual,
        stem=conv(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        first=conv(6, 9, 1),
        second=conv(9, 6, 1),
        head=nn.Linear(6, 3),
    ),
    "attention": lambda: Toy(attention, patches=conv(3, 12, 2, 2), **heads()),
    "fused attention": lambda: Toy(fused_attention, patches=conv(3, 12, 2, 2), **heads()),
    "excite": lambda: Toy(
        excite,
        stem=conv(3, 10, 3),
        down=conv(10, 4, 1),
        up=conv(4, 10, 1),
        depthwise=conv(10, 10, 3, groups=10),
        head=nn.Linear(10, 3),
    ),
    "channel shuffle": lambda: Toy(
        channel_shuffle, stem=conv(3, 8, 1), grouped=conv(8, 12, 1, groups=2), head=conv(6, 2, 1)
    ),
}
LARGE: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(),
    "mobilenet_v3_small": lambda: torchvision.models.mobilenet_v3_small(),
    "shufflenet_v2_x0_5": lambda: torchvision.models.shufflenet_v2_x0_5(),
    "googlenet": lambda: torchvision.models.googlenet(init_weights=False),
    "regnet_y_400mf": lambda: torchvision.models.regnet_y_400mf(),
    "convnext_atto": lambda: timm.create_model("convnext_atto"),
    "ghostnet_050": lambda: timm.create_model("ghostnet_050"),
}
MODELS = HAND | {net.__name__: functools.partial(net, **net.FULL) for net in NETS} | LARGE


@pytest.mark.parametrize("name", MODELS)
def test_traffic_is_what_the_ops_of_the_cut_network_take_and_give(name: str) -> None:
    """Full, smallest and random widths: exact equality."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    pixels = 64 if name in LARGE else 8
    for net in NETS:
        if net.__name__ == name:
            pixels = net.SHAPE[-1]
    image = torch.randn(1, 3, pixels, pixels)
    graph = dmcp.trace(model, image.expand(2, -1, -1, -1), verify=False)

    sizes = [space.size for space in graph.spaces]
    dice = random.Random(0)
    rows = [sizes, [max(1, size // 8) for size in sizes]]
    rows += [[dice.randint(max(1, size // 2), size) for size in sizes] for _ in range(1 if name in LARGE else 4)]
    for row in rows:
        small = dmcp.cut(model, graph, graph.widths(row))
        assert graph.traffic(graph.widths(row)) == counted_traffic(small, image)
    table = torch.tensor(rows)
    assert graph.traffic(table).tolist() == [graph.traffic(graph.widths(row)) for row in rows]


# -- budgets


@functools.cache
def traced() -> tuple[nn.Module, Any]:
    """A network whose stream is squared, and its graph."""
    torch.manual_seed(0)
    model = HAND["residual"]()
    return model, dmcp.trace(model, torch.zeros(2, 3, 8, 8))


def test_budgets_of_traffic_hold() -> None:
    """After uniform, expected, direct and a short search, alone and with another limit."""
    model, graph = traced()
    task = dmcp.Task(loss=lambda output, batch: F.cross_entropy(output, batch[1]))
    batches = [(torch.randn(8, 3, 8, 8), torch.randint(3, (8,)))] * 20
    for spec in ("traffic:60%", "80%,traffic:60%"):
        budget = parse_budget(spec, graph)
        limit = budget.limits[-1]
        assert limit.kind == "traffic" and limit.target == int(0.6 * graph.traffic())
        config = dmcp.SearchConfig(budget=spec, epochs=4, distill=False)
        result = dmcp.search(dmcp.Supernet(model, graph), batches, config, task=task)
        for widths in (dmcp.uniform(graph, spec), dmcp.expected(result), *dmcp.direct(result, n=3)):
            assert holds(budget, graph, widths)
            if spec == "traffic:60%":
                assert graph.traffic(widths) > 0.85 * limit.target
            assert graph.traffic(widths) == counted_traffic(dmcp.cut(model, graph, widths), torch.zeros(1, 3, 8, 8))


def test_the_expected_traffic_is_the_mean_of_samples() -> None:
    """I5 and I6: also its gradient, which pulls alphas into the band from both sides."""
    model, graph = traced()
    net = dmcp.Supernet(model, graph, groups=4)
    alpha = torch.randn(net.alpha.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    budget = parse_budget("traffic:50%", graph)

    def ratio(alpha: Tensor) -> Tensor:
        return ratios(budget, graph, marginals(alpha) * (net.sizes > 0), net.sizes)

    sampled = sample_groups(alpha, net.sizes, 100_000, torch.Generator().manual_seed(4))
    shares = graph.traffic(sampled).double() / budget.limits[0].target
    error = shares.std() / len(shares) ** 0.5
    assert abs(shares.mean() - ratio(alpha)[0]) < 4 * error
    assert torch.autograd.gradcheck(ratio, alpha.clone().requires_grad_())
    for constant, sign in ((-3.0, -1), (3.0, 1)):  # below the band alphas must grow, above it they must fall
        start = torch.full_like(alpha, constant).requires_grad_()
        budget_loss(ratio(start), 0.95).backward()
        assert start.grad is not None
        real = net.sizes[:, 1:] > 0
        assert (start.grad[real].sign() == sign).all()
