"""One row per op: a conv writes channels, the op passes them on, a conv reads them.

The table says how many of the writer's channels can go (0: the op makes them unprunable); every row goes through the
contract of nets.check.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Toy, check, counted_macs, randomise, sample
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.tracing.coupling import Call, Dims

aten = torch.ops.aten
X = sample((3, 8, 8), batch=3)
READERS = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


class Between(nn.Module):
    """One or two convs, what is tested, a conv that reads what comes out: channels at dim 1."""

    def __init__(self, op: Any, writers: int = 1, summed: bool = False) -> None:
        super().__init__()
        self.write = nn.Conv2d(3, 8, 3, padding=1)
        if writers > 1:
            self.other = nn.Conv2d(3, 8, 1)
        self.op = copy.deepcopy(op)
        self.summed = summed
        shape = self.between(*torch.rand(writers, 2, 8, 8, 8)).shape
        self.read = READERS[len(shape)](shape[1], 5, *(1,) * (len(shape) > 2))

    def between(self, *written: Tensor) -> Tensor:
        out = self.op(*written)
        return out.sum(1, keepdim=True) if self.summed else out

    def forward(self, x: Tensor) -> Tensor:
        written = [self.write(x), self.other(x)] if hasattr(self, "other") else [self.write(x)]
        return self.read(self.between(*written))


def add_in_a_view(x: Tensor) -> Tensor:
    y = x * 1
    y[:, :, :2].add_(1)
    return y


def write_to_a_copy(x: Tensor) -> Tensor:
    lifted = torch.sigmoid(x)
    lifted.clone().mul_(x)
    return lifted * 1


def fill_by_slices(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    half = x.shape[1] // 2
    y[:, :half] = x[:, half:]
    return y


# name: (op, channels that can go)
ROWS: dict[str, tuple[Any, int]] = {
    # element by element
    "relu": (F.relu, 8),
    "in place": (lambda x: (x * 1).relu_().mul_(x.sigmoid()), 8),
    "masked_fill": (lambda x: x.masked_fill(x == 0, 0.3), 8),
    "where": (lambda x: torch.where(x > 0, x, 1.0), 8),
    "zeros_like": (lambda x: x + torch.zeros_like(x), 8),
    "new_ones": (lambda x: x + x.new_ones(x.shape[1], 1, 1), 8),
    "arange": (lambda x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None, None], 0),
    "times a float of the width": (lambda x: x * x.shape[1] ** -0.5, 0),
    "divided by the width": (lambda x: x.sum(1, keepdim=True) / x.shape[1], 0),
    "prelu": (nn.PReLU(8), 8),
    "dropout": (nn.Dropout(0.0), 8),
    "add in a view": (add_in_a_view, 8),
    "write to a copy": (write_to_a_copy, 8),
    # layers without a weight, norms
    "depthwise": (lambda x: F.conv2d(x, x.new_ones(x.shape[1], 1, 3, 3), groups=x.shape[1]), 8),
    "matmul along pixels": (lambda x: x @ x.transpose(2, 3), 8),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*(x.flatten(2).transpose(1, 2),) * 3, scale=0.5).transpose(1, 2),
        8,
    ),
    "batch_norm": (nn.BatchNorm2d(8), 8),
    "instance_norm": (nn.InstanceNorm2d(8, affine=True), 8),
    "group_norm": (nn.GroupNorm(4, 8), 4),
    "layer_norm over pixels": (nn.LayerNorm((8, 8)), 8),
    "layer_norm over channels": (lambda x: F.layer_norm(x.movedim(1, -1), (x.shape[1],)).movedim(-1, 1), 0),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), 0),
    # pools, resizes, borders
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), 8),
    "max_pool with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], 8),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), 8),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1)), 8),
    "pad by reflection": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 8),
    "pad channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), 8),
    "pad channels with ones": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2), value=1.0), 0),
    "crop channels": (lambda x: F.pad(x, (0, 0, 0, 0, -1, 0)), 0),
    # shapes
    "flatten": (lambda x: x.flatten(1), 8),
    "unflatten": (lambda x: x.flatten(2).unflatten(2, (4, 16)), 8),
    "into the batch and back": (lambda x: x.view(-1, 1, 8, 8).relu().view(x.shape), 8),
    "permute": (lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), 8),
    "squeeze of anything": (lambda x: x.mean((2, 3), keepdim=True).squeeze(), 0),  # one channel would vanish, too
    "expand": (lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4), 8),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), 8),
    "repeat both ways": (lambda x: x.repeat(1, 2, 1, 1) + x.repeat_interleave(2, 1), 0),
    "heads": (lambda x: x.reshape(x.shape[0], 4, -1, 8, 8).sum(2), 2),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), 2),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), 8),
    "space to depth": (
        lambda x: x.view(x.shape[0], x.shape[1], 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4).reshape(x.shape[0], -1, 4, 4),
        8,
    ),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), 4),
    "channel_shuffle added": (lambda x: x + F.channel_shuffle(x, 2), 0),
    "patches": (lambda x: F.unfold(x, 3), 8),
    "windows": (lambda x: x.unfold(2, 3, 2).flatten(3), 8),
    "as_strided": (lambda x: x.contiguous().as_strided(x.shape, (64 * x.shape[1], 8, 64, 1)), 0),
    "folded patches": (lambda x: F.fold(F.unfold(x, 2, stride=2), 8, 2, stride=2), 8),
    "grid_sample": (lambda x: F.grid_sample(x, x.new_zeros(len(x), 4, 4, 2), align_corners=False), 8),
    "fft of pixels": (lambda x: torch.view_as_real(torch.fft.fft2(x)).flatten(3), 8),
    "real and imaginary part": (lambda x: torch.cat([(y := torch.fft.fft2(x)).real, y.imag], 1), 8),
    "complex": (lambda x: torch.view_as_complex(x.unflatten(3, (4, 2))).abs(), 8),
    # cut and joined
    "stack": (lambda x: torch.stack([x, x.relu()], 2).flatten(1, 2), 8),
    "chunk": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), 4),
    "uneven chunk": (lambda x: torch.cat(x.chunk(3, 1)[::-1], 1), 0),
    "glu": (lambda x: F.glu(x, 1), 4),
    "unbind": (lambda x: torch.stack(x.unbind(1)[::-1], 1), 0),
    "unbind pixels": (lambda x: torch.stack(x.unbind(2)[::-1], 2), 8),
    "slice": (lambda x: x[:, 2:6], 0),
    "slice of pixels": (lambda x: x[:, :, ::2, 1:], 8),
    "fill by slices": (fill_by_slices, 4),
    "narrow": (lambda x: x.narrow(1, 4, 4), 0),
    "narrow to halves": (lambda x: x.narrow(1, 0, x.shape[1] // 2) * x.narrow(1, x.shape[1] // 2, x.shape[1] // 2), 4),
    "narrow pixels": (lambda x: x.narrow(2, 1, 5), 8),
    "join nothing": (lambda x: x + torch.cat([x.new_empty(0), x.new_empty(0)]).sum(), 8),  # detectors, without a box
    "select": (lambda x: x[:, 0, None] * x, 0),
    "index": (lambda x: x[:, [3, 1, 0]], 0),
    "index of pixels": (lambda x: x[:, :, [3, 1], [2, 2]], 8),
    "roll": (lambda x: x.roll((1, 2), (2, 3)), 8),
    "roll of channels": (lambda x: x.roll(1, 1), 0),
    # entries that see each other
    "mean": (lambda x: x.mean((2, 3)), 8),
    "mean of channels": (lambda x: x.mean(1, keepdim=True) * x, 0),
    "mean of everything": (lambda x: x - x.mean(), 0),
    "sum of channels": (lambda x: x.relu().sum(1, keepdim=True), 8),
    "sum of lifted channels": (lambda x: x.sigmoid().sum(1, keepdim=True), 0),
    "var": (lambda x: torch.var_mean(x, (2, 3))[0], 8),
    "normalize": (lambda x: F.normalize(x, dim=1), 0),
    "softmax": (lambda x: x.flatten(2).softmax(2), 8),
    "softmax of channels": (lambda x: x.softmax(1), 0),
    "sort": (lambda x: x.sort(2)[0], 8),
}


@pytest.mark.parametrize("row", ROWS)
def test_channels_pass(row: str) -> None:
    op, free = ROWS[row]
    graph = check(Between(op), X, free)
    assert graph is None or graph.unknown == {}


@pytest.mark.parametrize("row", ROWS)
def test_channels_that_are_off_are_zero_or_not_summed(row: str) -> None:
    """No weight reads a plain sum, so whether zeros survive the op decides: if they may not, channels are kept."""
    check(Between(ROWS[row][0], summed=True), X)


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


# name: (op on what two convs wrote, channels of each that can go); one number: they go together
MEETINGS: dict[str, tuple[Any, Any]] = {
    "add": (torch.add, 8),
    "where": (lambda x, y: torch.where(x > 0, x, y), 8),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=0.5), 8),
    "copy_": (lambda x, y: (x * 1).copy_(y) + x, 8),
    "broadcast": (lambda x, y: x * y.mean((2, 3), keepdim=True), 8),
    "cat": (lambda x, y: torch.cat([x, y], 1), (8, 8)),
    "cat of chunks": (lambda x, y: torch.cat([x.chunk(2, 1)[0], y.chunk(2, 1)[1]], 1), (4, 4)),
    "cat, then shuffle": (lambda x, y: F.channel_shuffle(torch.cat([x, y], 1), 2), 8),
    "cat, then finer groups": (lambda x, y: F.channel_shuffle(torch.cat([x, y], 1), 4), 4),
    "cat, then add": (lambda x, y: torch.cat([x, y], 1) + torch.cat([y, x], 1), 8),
    "stack": (lambda x, y: torch.stack([x, y], 2), 8),
    "product of all pairs": (lambda x, y: (x[:, :, None] * y[:, None]).flatten(1, 2), (8, 8)),
    "dot": (lambda x, y: (x * y).sum(1, keepdim=True), 8),
    "mean of products": (lambda x, y: (x * y).mean(1, keepdim=True), 0),
    "einsum": (lambda x, y: torch.einsum("nchw,nchw->nhw", x, y)[:, None], 8),
    "einsum that scales": (lambda x, y: torch.einsum("nchw,nc->nchw", x, y.mean((2, 3))), 8),
    "cosine similarity": (lambda x, y: F.cosine_similarity(x, y, 1)[:, None], 8),
    "cosine similarity along pixels": (lambda x, y: F.cosine_similarity(x, y, -1), 8),
    "cosine similarity with sigmoids": (lambda x, y: F.cosine_similarity(x, y.sigmoid(), 1)[:, None], 0),
    "similarity of pixels": (lambda x, y: tokens(x) @ y.flatten(2), 8),
    "attention by hand": (lambda x, y: ((tokens(x) @ x.flatten(2)).softmax(-1) @ tokens(y)).transpose(1, 2), (8, 8)),
    "attention": (lambda x, y: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(y)).transpose(1, 2), (0, 8)),
    "a conv whose weight is computed": (
        lambda x, y: F.conv2d(x, y.mean((0, 2, 3))[:, None, None, None], groups=x.shape[1]),
        8,
    ),
}


@pytest.mark.parametrize("row", MEETINGS)
def test_channels_meet(row: str) -> None:
    op, free = MEETINGS[row]
    together = {"write": free} if isinstance(free, int) else dict(zip(("write", "other"), free, strict=True))
    check(Between(op, writers=2), X, {name: size for name, size in together.items() if size})


# -- what torch's own counter says


LAYERS: dict[str, nn.Module] = {
    "dilated": nn.Conv2d(16, 12, 3, stride=2, padding=2, dilation=2),
    "inside groups": nn.Conv2d(16, 12, 3, groups=2),
    "whole groups": nn.Conv2d(16, 24, 3, groups=8),
    "depthwise": nn.Conv2d(16, 16, 3, groups=16),
    "transposed": nn.ConvTranspose2d(16, 12, 3, stride=2, padding=1, output_padding=1),
    "transposed in groups": nn.ConvTranspose2d(16, 12, 3, stride=2, groups=2),
}
OPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda m, x: (x @ x.transpose(2, 3)).mean((2, 3)),
    "matmul with a parameter": lambda m, x: (tokens(x) @ m.square).mean(1),
    "parameter first": lambda m, x: (m.square @ x.flatten(2)).mean(2),
    "addmm": lambda m, x: torch.addmm(m.bias, x.mean((2, 3)), m.square),
    "bmm": lambda m, x: torch.bmm(x.flatten(2), tokens(x) @ m.square).mean(1),
    "linear over pixels": lambda m, x: m.fc(x.movedim(1, -1)).mean((1, 2)),
    "einsum": lambda m, x: torch.einsum("nchw,cd->nd", x, m.square),
    "einsum over pixels": lambda m, x: torch.einsum("nchw,ndhw->ncd", x, x).mean(1),
    "attention": lambda m, x: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x), scale=0.5).mean(1),
    "no rule": lambda m, x: torch.tensordot(x.mean((2, 3)), m.square, 1),
    "once for the batch": lambda m, x: x.mean((2, 3)) @ (m.square @ m.square),
    "a sum over the batch": lambda m, x: x.mean((2, 3)) @ (x.mean((2, 3)).T @ x.mean((2, 3))),
    "samples in the channels": lambda m, x: (
        F.conv2d(x.flatten(0, 1)[None], m.blur.repeat(len(x), 1, 1, 1), groups=16 * len(x)).view(len(x), 16, -1).mean(2)
    ),
}


@pytest.mark.parametrize("row", [*LAYERS, *OPS])
def test_layers_and_ops_are_counted_as_torch_does(row: str) -> None:
    layer: Any = copy.deepcopy(LAYERS.get(row, nn.Linear(16, 16)))
    op = OPS.get(row, lambda m, x: F.relu(m.fc(x)).mean((2, 3)))
    sizes = {"square": (16, 16), "bias": (16,), "blur": (16, 1, 3, 3)}
    model = Toy(
        lambda m, x: m.head(op(m, F.relu(m.a(x))[:, :, :6, :6])) + m.d(m.c(x)).mean((2, 3)),
        a=nn.Conv2d(3, 16, 3, padding=1),
        fc=layer,
        head=nn.Linear(getattr(layer, "out_channels", 16), 5),
        c=nn.Conv2d(3, 4, 1),  # something to prune where the op makes the rest unprunable
        d=nn.Conv2d(4, 5, 1),
        **{name: nn.Parameter(torch.rand(size)) for name, size in sizes.items()},
    )
    x = sample((3, 9, 9), batch=2)
    check(model, x)
    assert dmcp.trace(model, x).macs() == dmcp.trace(model, x[:1]).macs() == counted_macs(model, x)


# -- zeros that could get lost


def net_of_zeros(together: Callable[[Any, Tensor], Tensor]) -> Toy:
    """Three convs and a norm, put together by a function."""
    layers = {"a": nn.Conv2d(3, 16, 3, padding=1), "square": nn.Conv2d(16, 16, 3, padding=1, bias=False), "dim": 16}
    shift = nn.Parameter(torch.randn(1, 1, 1, 1))
    return Toy(together, **layers, norm=nn.BatchNorm2d(16), b=nn.Conv2d(16, 4, 1), c=nn.Conv2d(16, 4, 1), shift=shift)


def a_view_taken_before_a_write(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    view = y.flatten(2)
    y.add_(1)
    return view.sum(1)


# name: (forward, channels of `a` that can go; None: any number, if it is exact)
ZEROS: dict[str, tuple[Any, int | None]] = {
    "divided by an attribute": (lambda net, x: net.b(net.a(x).relu().view(len(x), net.dim, 8, 8) / net.dim), 0),
    "chosen by a mask": (lambda net, x: torch.where(x[:, :1] > 0, net.a(x), net.shift).sum(1), 0),
    "read after a square conv": (
        lambda net, x: net.b(net.square(y := net.norm(net.a(x)).relu())) + net.c(net.square(y) + y),
        16,
    ),
    "summed without a weight": (lambda net, x: net.norm(net.a(x)).relu().sum(1), 16),
    "summed without a norm": (lambda net, x: net.a(x).relu().sum(1), 16),
    "a view taken before a write": (a_view_taken_before_a_write, None),
}


@pytest.mark.parametrize("row", ZEROS)
def test_zeros_are_exact_with_hard_and_with_soft_gates(row: str) -> None:
    together, free = ZEROS[row]
    model = net_of_zeros(together)
    graph = check(model, X, free)
    if free:
        net, widths = dmcp.Supernet(model.eval(), graph), graph.widths({"a": 5})
        small = dmcp.cut(model, graph, widths)
        with torch.no_grad():
            assert torch.allclose(net(X, net.hard(widths).double()), small(X), atol=1e-12)


# -- the table


def test_an_op_without_a_rule_and_rules_of_the_users_own() -> None:
    renormed = lambda x, y: torch.cat([x.renorm(2, 1, 1.0), y], 1)  # noqa: E731  # each channel alone: nobody says so
    model, before = Between(renormed, writers=2), dict(dmcp.RULES)
    graph = check(model, X, {"other": 8})
    assert graph.unknown == {"aten.renorm.default": 1} and "renorm" in graph.summary()
    assert ["renorm" in item.reason for item in graph.unprunable if item.name == "write"] == [True]
    rules = dmcp.RULES | {aten.renorm.default: lambda call: [call.x.dims]}
    assert check(model, X, {"write": 8, "other": 8}, rules=rules, strict=True).unknown == {}

    def careful(call: Call) -> list[Dims]:
        call.fix(call.x.dims[1], "I said so")
        return [call.x.dims]

    model = Between(lambda x, y: torch.cat([x.relu(), y.relu_()], 1), writers=2)
    graph = check(model, X, {"write": 8}, rules=dmcp.RULES | {aten.relu_.default: careful})
    assert ("other", "I said so (relu_)") in [(item.name, item.reason) for item in graph.unprunable]
    assert before == dmcp.RULES


def test_a_rule_with_wrong_sizes_is_refused() -> None:
    wrong: list[Any] = [lambda call: [call.x.dims[:-1]], lambda call: []]
    for rule in wrong:
        with pytest.raises(dmcp.TraceError, match=r"rule of aten\.relu\.default"):
            dmcp.trace(randomise(Between(F.relu)), X, rules=dmcp.RULES | {aten.relu.default: rule})
