"""The kernels against torch, in Triton's interpreter: run by test_kernels.py. On a GPU test_gpu.py does the same."""

from __future__ import annotations

import contextlib
import copy
import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F
from triton.runtime import interpreter

from dmcp.runtime import engine, kernels
from dmcp.runtime.kernels import OwnKernels, convolution, depthwise, norm
from dmcp.runtime.kernels.convolution import conv2d
from dmcp.runtime.kernels.depthwise import depthwise_conv2d
from dmcp.runtime.kernels.norm import batch_norm

_convert = interpreter._convert_float


def _rounded(data: Any, given: Any, wanted: Any, mode: Any) -> Any:
    """As GPUs do it: to the nearest bfloat16, where the interpreter cuts digits off."""
    if (given, wanted) != (tl.float32, tl.bfloat16):
        return _convert(data, given, wanted, mode)
    return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)


interpreter._convert_float = _rounded
# it looks whether whole numbers overflow, which takes half of the time, and without `debug` it tells nobody
_builder = interpreter.interpreter_builder
_builder.options = replace(_builder.options, sanitize_overflow=False)
Shape = tuple[int, int, int, int, int, int, int]  # n, c, h, w, outputs, kernel, stride
SHAPES: list[Shape] = [
    (1, 16, 6, 6, 16, 3, 1), (2, 3, 8, 8, 16, 3, 1),
    (2, 10, 7, 9, 3, 3, 1), (2, 3, 6, 5, 10, 3, 1), (1, 21, 5, 6, 13, 3, 1), (1, 1, 1, 1, 1, 3, 1),
    (1, 16, 6, 6, 32, 3, 2), (2, 10, 7, 9, 21, 3, 2), (2, 16, 8, 8, 32, 1, 2),
    (2, 13, 7, 5, 10, 1, 2), (2, 13, 4, 5, 6, 1, 1), (2, 1, 3, 3, 2, 1, 1),
]  # fmt: skip


def _close(found: Tensor | None, wanted: Tensor | None, bound: float = 1e-2) -> None:
    assert found is not None and wanted is not None and found.shape == wanted.shape
    assert (found.double() - wanted.double()).abs().max() <= bound * wanted.double().abs().max() + 1e-12


def _images(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16().contiguous(memory_format=torch.channels_last)


LONG: list[Shape] = [(1, 64, 4, 4, 64, 3, 1), (1, 32, 5, 5, 32, 3, 1), (1, 33, 6, 7, 51, 3, 2)]


@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(it, marks=pytest.mark.slow) for it in LONG)], ids=str)
def test_a_convolution_and_its_gradients_are_torchs(shape: Shape) -> None:
    n, c, h, w, c_out, k, stride = shape
    last = c % 2 == 0  # weights of both layouts
    weight = torch.randn(c_out, c, k, k, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    weight = weight.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    given = [_images(n, c, h, w).requires_grad_(), weight.requires_grad_(), torch.randn(c_out).requires_grad_()]
    out = conv2d(*given, stride, k // 2)
    assert out.dtype is torch.bfloat16 and out.permute(0, 2, 3, 1).is_contiguous()
    dy = _images(*out.shape, seed=2)
    found = torch.autograd.grad(out, given, dy)
    assert found[1].dtype is torch.float32 and found[1].stride() == weight.stride()
    wide = [it.detach().double().requires_grad_() for it in given]
    wanted = F.conv2d(*wide, stride, k // 2)
    _close(out, wanted)
    for one, other in zip(found, torch.autograd.grad(wanted, wide, dy.double()), strict=True):
        _close(one, other)
    _close(found[1], torch.autograd.grad(F.conv2d(*wide, stride, k // 2), wide, dy.double())[1], 1e-5)


def test_only_what_is_needed_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    out = conv2d(_images(1, 3, 4, 4), weight, None, 1, 1)
    monkeypatch.setattr(convolution, "_input_gradient", None)
    out.sum().backward()
    assert weight.grad is not None
    x = _images(1, 3, 4, 4).requires_grad_()
    monkeypatch.undo()
    out = conv2d(x, weight.detach(), None, 1, 1)
    monkeypatch.setattr(convolution, "_weight_gradient", None)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.slow
def test_many_slabs_and_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "WEIGHT", convolution.Blocks(pixels=16, depth=16))
    monkeypatch.setattr(convolution, "FORWARD", convolution.Blocks(pixels=16, depth=32, unrolled=0))
    assert convolution.weight_plan(16, 3, 16, 1000)[2:4] == (3, 63)
    x, w = _images(3, 16, 9, 7), torch.randn(16, 16, 3, 3, requires_grad=True)
    out = conv2d(x, w, None, 1, 1)
    dy = _images(*out.shape, seed=3)
    wanted = F.conv2d(x.float(), w, None, 1, 1)
    _close(out, wanted)
    _close(torch.autograd.grad(out, w, dy)[0], torch.autograd.grad(wanted, w, dy.float())[0], 1e-5)


Alone = tuple[int, int, int, int, int, int]  # n, channels, h, w, kernel, stride
SINGLE_PROCESS: list[Alone] = [
    (1, 8, 6, 6, 3, 1), (2, 11, 5, 4, 3, 1), (1, 5, 1, 1, 3, 1), (1, 8, 6, 6, 3, 2), (2, 11, 5, 7, 3, 2),
    (1, 6, 2, 3, 5, 1), (1, 11, 7, 5, 5, 2),
]  # fmt: skip
LONG_ALONE: list[Alone] = [
    (1, 37, 5, 4, 3, 1), (1, 6, 1, 1, 3, 2), (1, 37, 5, 4, 5, 1), (1, 8, 8, 8, 5, 2), (1, 6, 1, 1, 5, 2),
]  # fmt: skip


def _alone(shape: Alone, bias: bool = True) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What goes into a depthwise convolution; its output and gradients by our kernels, and by torch in float64."""
    n, c, h, w, k, stride = shape
    weight = torch.randn(c, 1, k, k, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    given = [_images(n, c, h, w), weight, *([torch.randn(c)] if bias else [])]
    given = [it.requires_grad_() for it in given]
    out = depthwise_conv2d(*given, *([] if bias else [None]), stride)
    assert out.dtype is torch.bfloat16 and out.permute(0, 2, 3, 1).is_contiguous()
    dy = _images(*out.shape, seed=2)
    wide = [it.detach().double().requires_grad_() for it in given]
    exact = F.conv2d(*wide, *([] if bias else [None]), stride, k // 2, 1, c)
    found, wanted = torch.autograd.grad(out, given, dy), torch.autograd.grad(exact, wide, dy.double())
    return given, [out, *found], [exact, *wanted]


@pytest.mark.parametrize(
    "shape", [*SINGLE_PROCESS, *(pytest.param(it, marks=pytest.mark.slow) for it in LONG_ALONE)], ids=str
)
def test_a_depthwise_convolution_and_its_gradients_are_torchs(shape: Alone) -> None:
    given, found, wanted = _alone(shape, bias=shape[1] % 2 == 1)
    for one, other in zip(found, wanted, strict=True):
        _close(one, other)
    assert found[2].dtype is torch.float32 and found[2].stride() == given[1].stride()
    _close(found[2], wanted[2], 1e-5)


STRIPPED = [(3, 1), *(pytest.param(*it, marks=pytest.mark.slow) for it in ((3, 2), (5, 1), (5, 2)))]


@pytest.mark.parametrize(("k", "stride"), STRIPPED)
def test_strips_slabs_and_blocks_of_channels_add_up(k: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORWARD", "STRIDED"):
        monkeypatch.setattr(depthwise, name, depthwise.Walks(ahead={3: 3, 5: 3}, rows=4, numbers=64, programs=1))
    monkeypatch.setattr(depthwise, "WEIGHT", depthwise.Walks(ahead={3: 2, 5: 2}, rows=4, numbers=64, programs=6))
    monkeypatch.setattr(depthwise, "LEAST_ROWS", 2)
    monkeypatch.setattr(depthwise, "CHANNELS", 8)
    assert depthwise.strips(2, 18, 7, 5, depthwise.WEIGHT) == (20, 2, 4, 3)  # lanes of a slab end within a strip
    _, found, wanted = _alone((2, 18, 7 * stride, 5 * stride - 1, k, stride))
    for one, other in zip(found, wanted, strict=True):
        _close(one, other)
    _close(found[2], wanted[2], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2])
def test_weights_may_lie_anywhere(stride: int) -> None:
    """The supernet gives products and slices; their numbers are rounded as autocast does it."""
    leaf = torch.randn(3, 5, 20, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for weight in (
        leaf[:, ::2, ::2, 1:2].permute(2, 3, 1, 0),
        leaf[0, 0, :10, 0].reshape(10, 1, 1, 1).expand(-1, -1, 3, 3),
    ):
        x = _images(2, 10, 5, 6).requires_grad_()
        out, exact = (
            depthwise_conv2d(x, weight * 1, None, stride),
            F.conv2d(x.double(), (weight * 1).bfloat16().double(), None, stride, 1, 1, 10),
        )
        _close(depthwise_conv2d(x, weight, None, stride), out, 0.0)
        _close(out, exact)
        dy = _images(*out.shape, seed=3)
        slopes = [torch.autograd.grad(it, (leaf, x), dy.to(it.dtype), retain_graph=True) for it in (out, exact)]
        for one, other in zip(*slopes, strict=True):
            _close(one, other)
        _close(torch.autograd.grad(depthwise_conv2d(x, weight, None, stride), leaf, dy)[0], slopes[0][0], 1e-6)


def test_a_depthwise_convolution_computes_only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(4, 1, 3, 3, requires_grad=True), _images(1, 4, 4, 4)
    out = depthwise_conv2d(x, weight, None, 1)
    monkeypatch.setattr(depthwise, "_input_gradient", None)
    out.sum().backward()
    assert weight.grad is not None
    monkeypatch.undo()
    out = depthwise_conv2d(x.requires_grad_(), weight.detach(), None, 1)
    monkeypatch.setattr(depthwise, "_weight_gradient", None)
    out.sum().backward()
    assert x.grad is not None


def test_strips_cover_every_row_and_are_many_enough() -> None:
    for n, c, rows, columns in ((512, 96, 32, 32), (512, 960, 4, 4), (2, 16, 112, 112), (1, 8, 1, 1), (64, 37, 15, 7)):
        lanes, count, high, blocks = depthwise.strips(n, c, rows, columns, depthwise.FORWARD)
        assert lanes == n * count * columns and (count - 1) * high < rows <= count * high
        assert blocks * depthwise.CHANNELS >= c and high <= depthwise.FORWARD.rows
        programs = -(-lanes // (depthwise.FORWARD.numbers // depthwise.CHANNELS)) * blocks
        assert programs >= depthwise.FORWARD.programs or high <= max(4, -(-rows // 2)) or count == 1 == rows


def test_the_engine_knows_what_the_kernels_take() -> None:
    """It must not import them to say which networks are narrow: there may be no Triton."""
    assert engine._NARROW == convolution.MOST_CHANNELS
    for size in engine._KERNELS:
        weight = torch.randn(2, 3, *size)
        assert kernels._conv_arguments(_images(1, 3, 4, 4).float(), weight, padding=size[0] // 2) is None  # no autocast
        with torch.autocast("cpu", torch.bfloat16):
            assert kernels._conv_arguments(_images(1, 3, 4, 4), weight, padding=size[0] // 2) is not None
    assert tuple((it, it) for it in depthwise.SIZES) == engine._DEPTHWISE


@torch.autocast("cpu", torch.bfloat16)
def test_images_are_too_large_by_their_own_numbers_and_those_of_the_output() -> None:
    """Depthwise layers of a MobileNet fit at a batch of 512: their weights have one input, their images many."""

    def taken(n: int, c: int, weight: Tensor, groups: int) -> bool:
        x = torch.zeros(1, dtype=torch.bfloat16).expand(n, c, 32, 32)  # takes no memory
        return kernels._conv_arguments(x, weight, padding=1, groups=groups) is not None

    for c in (96, 960):
        assert taken(512, c, torch.zeros(c, 1, 3, 3), c)
    assert not taken(2**20 // 64, 64, torch.zeros(64, 1, 3, 3), 64)
    assert taken(2**14, 4, torch.zeros(8, 4, 3, 3), 1)
    assert not taken(2**14, 4, torch.zeros(64, 4, 3, 3), 1)  # the output has 2**30 numbers


def test_the_plan_of_weight_gradients_covers_every_pixel_and_number() -> None:
    for c in range(1, 65):
        for k, m in ((3, 524288), (1, 1), (3, 8191)):
            depth, parts, groups, slabs, span = convolution.weight_plan(c, k, 64, m)
            assert parts <= 4 and depth * parts * groups >= c * k * k
            assert (slabs - 1) * span < m <= slabs * span and span % convolution.weight_pixels(c) == 0
            assert depth * parts * groups <= 31 * c  # taps are bits of a number
            assert slabs * groups <= 1.1 * convolution.WEIGHT_PROGRAMS


def test_divisions_by_multiplication_are_exact() -> None:
    n = np.arange(2**15, dtype=np.int64)
    for d in range(1, 2049):
        factor, shift = convolution.small_divider(d)
        assert ((n * factor) >> shift == n // d).all() and n[-1] * factor < 2**31
    near = np.random.default_rng(0).integers(0, 2**31, 1000)
    for d in (*range(1, 300), 1024, 50176, 2**20 + 1, 2**31 - 1):
        factor, shift = convolution.divider(d)
        n = np.unique(np.clip([*near, *(near // d * d), *(near // d * d - 1), 0, 2**31 - 1], 0, 2**31 - 1)).tolist()
        assert all(((2 * it * (factor % 2**32)) >> 32) >> shift == it // d for it in n)


def test_places_in_patches_are_those_of_divisions_by_the_width() -> None:
    for c in range(1, 65):
        v = convolution.vector(c)
        factor, shift = convolution.small_divider(c // v)
        for taps in (1, 9):
            depth, steps, _ = convolution.forward_plan(c, round(taps**0.5))
            end = depth * max(steps, -(-taps * c // depth))
            k = np.arange(end)
            tap = ((k // v) * factor) >> shift
            assert (tap == k // c).all() and tap[-1] < 31 and end >= taps * c  # taps are bits of a number
            assert ((tap * 11) >> 5 == tap // 3)[tap < 9].all()
            assert end <= -(-taps * c // 64) * 64 + 64  # rows of the matrix of weights


class _Recorder:
    """In the place of a kernel: notes what it would be compiled for."""

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.launch)

    def launch(self, *args: Any, num_warps: int = 4, num_stages: int = 3, maxnreg: int = 0, **more: Any) -> None:
        bound = inspect.signature(self.kernel.fn).bind(*args, **more)
        fixed = (
            bound.arguments[name] for name, it in bound.signature.parameters.items() if it.annotation is not it.empty
        )
        self.seen.add((self.kernel.fn.__name__, *fixed, num_warps, num_stages))


@pytest.mark.slow
def test_few_programs_serve_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pruner makes new widths in every run: none of them may cost a compilation of its own."""
    seen: set[Any] = set()
    for module in (convolution, norm, depthwise):
        for name in dir(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, _Recorder(getattr(module, name), seen))
    for c in range(1, 65):
        rows, ones = torch.empty((512, 32, 32, c), dtype=torch.bfloat16, device="meta"), torch.empty(c, device="meta")
        out = batch_norm(rows.permute(0, 3, 1, 2).requires_grad_(), ones, ones, ones, ones, 0.1, 1e-5)
        out.backward(torch.empty_like(out))
        for other in (16, 12, 10, 11, 32, 20, 22, 21, 64, 44, 42, 41):  # every vector with every block
            for k, stride in ((3, 1), (3, 2), (1, 1), (1, 2)):
                weight = torch.empty(other, c, k, k, device="meta", requires_grad=True)
                out = conv2d(rows.permute(0, 3, 1, 2).requires_grad_(), weight, None, stride, k // 2)
                out.backward(torch.empty_like(out))
    assert 100 < len(seen) <= 200
    narrow = len(seen)
    for c in (*range(65, 100), 144, 192, 576, 960, 1001, 1280, 2048):
        _alone_and_normed(c)
    assert narrow < len(seen) <= narrow + 150


def _alone_and_normed(c: int) -> None:
    rows, ones = torch.empty((512, 32, 32, c), dtype=torch.bfloat16, device="meta"), torch.empty(c, device="meta")
    x = rows.permute(0, 3, 1, 2).requires_grad_()
    out = batch_norm(x, ones, ones, ones, ones, 0.1, 1e-5)
    out.backward(torch.empty_like(out))
    for k, stride in ((3, 1), (3, 2), (5, 1), (5, 2)):
        out = depthwise_conv2d(x, torch.empty(c, 1, k, k, device="meta", requires_grad=True), None, stride)
        out.backward(torch.empty_like(out))


@pytest.fixture(params=[False, True])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:  # many programs, several tiles in each
        for name in ("STATISTICS", "SUMS"):
            monkeypatch.setattr(norm, name, norm.Tiles(numbers=64, programs=7))
        for name in ("NORMALISE", "GRADIENT"):
            monkeypatch.setattr(norm, name, norm.Tiles(numbers=64))


@pytest.mark.parametrize(
    "shape",
    [(3, 16, 5, 4), (2, 10, 3, 7), (4, 1, 3, 3), (2, 21, 1, 1), (2, 96, 2, 3), (2, 131, 3, 1), (3, 150, 2, 2)],
    ids=str,
)
@pytest.mark.usefixtures("tiles")
def test_batch_norm_and_its_gradients_are_torchs(shape: tuple[int, ...]) -> None:
    c = shape[1]
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(*shape, generator=draw) + 30).bfloat16().contiguous(memory_format=torch.channels_last)
    given = [x.requires_grad_(), torch.randn(c, generator=draw).requires_grad_(), torch.randn(c).requires_grad_()]
    wide = [it.detach().double().requires_grad_() for it in given]
    mean, var = torch.randn(c, generator=draw), torch.rand(c, generator=draw)
    other_mean, other_var = mean.double(), var.double()
    out = batch_norm(given[0], mean, var, given[1], given[2], 0.3, 1e-5)
    wanted = F.batch_norm(wide[0], other_mean, other_var, wide[1], wide[2], True, 0.3, 1e-5)
    assert out.dtype is torch.bfloat16 and out.permute(0, 2, 3, 1).is_contiguous()
    _close(out, wanted)
    _close(mean, other_mean, 1e-6)
    _close(var, other_var, 1e-5)
    dy = _images(*shape, seed=4)
    bounds = (1e-2, 1e-4, 1e-4)
    pairs = zip(torch.autograd.grad(out, given, dy), torch.autograd.grad(wanted, wide, dy.double()), strict=True)
    for (one, other), bound in zip(pairs, bounds, strict=True):
        _close(one, other, bound)


@pytest.mark.slow
@pytest.mark.parametrize("c", [1100, 2047, 2048])
def test_batch_norm_of_many_channels_is_torchs(c: int) -> None:
    x, dy = _images(9, c, 1, 1).requires_grad_(), _images(9, c, 1, 1, seed=1)
    wide = x.detach().double().requires_grad_()
    out, wanted = batch_norm(x, None, None, None, None, 0.1, 1e-5), F.batch_norm(wide, None, None, training=True)
    _close(out, wanted)
    _close(torch.autograd.grad(out, x, dy)[0], torch.autograd.grad(wanted, wide, dy.double())[0])


def test_batch_norm_without_scale_buffers_or_gradient_of_x() -> None:
    x = _images(2, 5, 3, 3)
    _close(batch_norm(x, None, None, None, None, 0.1, 1e-5), F.batch_norm(x.float(), None, None, training=True))
    weight = torch.ones(5, requires_grad=True)
    slope = torch.autograd.grad(batch_norm(x, None, None, weight * 2, None, 0.1, 1e-5), weight, _images(2, 5, 3, 3))
    wanted = torch.autograd.grad(F.batch_norm(x.float(), None, None, weight * 2, training=True), weight, x.float())
    _close(slope[0], wanted[0], 1e-4)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 10, 3, 1, 1, bias=False), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 10, 3, 1, 1), nn.BatchNorm2d(10)
        self.conv3, self.bn3 = nn.Conv2d(10, 21, 3, 2, 1, bias=False), nn.BatchNorm2d(21)
        self.short, self.bn4 = nn.Conv2d(10, 21, 1, 2, bias=False), nn.BatchNorm2d(21)
        self.fc = nn.Linear(21, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)) + x)
        x = F.relu(self.bn3(self.conv3(x)) + self.bn4(self.short(x)))
        out: Tensor = self.fc(x.mean(dim=(2, 3)))
        return out


class _Mobile(nn.Module):
    """An inverted residual, as in MobileNetV2, and a strided one; more channels than convolutions of ours take."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 11, 3, 1, 1, bias=False), nn.BatchNorm2d(11)
        self.blocks = nn.ModuleList(self.inverted(k, stride) for k, stride in ((3, 1), (5, 2)))
        self.fc = nn.Linear(11, 4)

    @staticmethod
    def inverted(k: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(11, 70, 1, bias=False), nn.BatchNorm2d(70), nn.ReLU6(inplace=True),
            nn.Conv2d(70, 70, k, stride, k // 2, groups=70, bias=False), nn.BatchNorm2d(70), nn.ReLU6(inplace=True),
            nn.Conv2d(70, 11, 1, bias=False), nn.BatchNorm2d(11),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn(self.stem(x)))
        for block in self.blocks:
            out = block(x)
            x = out + x if out.shape == x.shape else out
        found: Tensor = self.fc(x.mean(dim=(2, 3)))
        return found


def _run(net: nn.Module, x: Tensor, mode: OwnKernels | None) -> tuple[Tensor, dict[str, Any]]:
    net = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        if mode is None:
            out = net(x)
        else:
            with mode:
                out = torch.func.functional_call(net, {}, (x,))
    out.float().square().sum().backward()
    return out, {**{name: it.grad for name, it in net.named_parameters()}, **dict(net.named_buffers())}


@pytest.mark.parametrize(
    ("build", "size", "wanted_calls"),
    [(_Net, 8, (4, 0, 4)), pytest.param(_Mobile, 4, (1, 2, 7), marks=pytest.mark.slow)],
)
def test_a_network_in_the_mode_computes_what_it_does_without(
    build: Any, size: int, wanted_calls: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x = build(), torch.randn(4, 3, size, size)
    calls: list[str] = []
    names = ("conv2d", "depthwise_conv2d", "batch_norm")
    for name in names:
        own = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _own=own, _name=name: calls.append(_name) or _own(*a))
    ours, found = _run(net, x, OwnKernels())
    assert tuple(calls.count(name) for name in names) == wanted_calls
    _, wanted = _run(net, x, None)
    exact, sure = _run_exactly(net, x)
    _close(ours, exact, 5e-2)
    for name, truth in sure.items():  # as near to the truth as torch is
        scale = truth.abs().max() + 1e-3
        error, usual = ((it[name].double() - truth).abs().max() / scale for it in (found, wanted))
        assert error <= 2 * usual + 2e-2, name


def _run_exactly(net: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    net = copy.deepcopy(net).double()
    out = net(x.double())
    out.square().sum().backward()
    return out, {**{name: it.grad for name, it in net.named_parameters()}, **dict(net.named_buffers())}


def test_what_they_return_may_be_changed_in_place() -> None:
    torch.manual_seed(0)
    conv, norm, x = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6), torch.randn(2, 3, 4, 4)
    slopes = []
    for mode in (OwnKernels(), contextlib.nullcontext()):
        with torch.autocast("cpu", torch.bfloat16), mode:
            out = F.relu(norm(conv(x).relu_()), inplace=True)
            other = norm(conv(x))
            other += out
            out = other
        slopes.append(torch.autograd.grad(out.float().square().sum(), [*conv.parameters(), *norm.parameters()]))
    for one, other in zip(*slopes, strict=True):
        _close(one, other, 5e-2)


def test_what_is_wrong_is_left_to_torch() -> None:
    x = _images(2, 3, 4, 4)
    wrong = [
        lambda: F.batch_norm(x, torch.zeros(2), torch.ones(2), training=True),
        lambda: F.batch_norm(x, None, None, torch.ones(4), training=True),
        lambda: F.conv2d(x, torch.randn(8, 3, 3, 3), torch.randn(5), padding=1),
        lambda: F.conv2d(x, torch.randn(3, 1, 3, 3), torch.randn(5), padding=1, groups=3),
        lambda: F.conv2d(x, torch.randn(3, 1, 3, 3), padding=1),
    ]
    with OwnKernels(), torch.autocast("cpu", torch.bfloat16):
        for call in wrong:
            with pytest.raises((RuntimeError, ValueError)):
                call()
    with OwnKernels(), pytest.raises(RuntimeError):  # bfloat16 by float32, without autocast
        F.conv2d(x, torch.randn(8, 3, 3, 3), padding=1)


def test_vmap_and_subclasses_go_to_torch() -> None:
    class Mine(Tensor):
        pass

    weight, x = torch.randn(4, 3, 3, 3), torch.randn(2, 3, 4, 4)
    with OwnKernels(), torch.autocast("cpu", torch.bfloat16):
        many = torch.func.vmap(lambda it: F.conv2d(it[None], weight, padding=1)[0])(x)
        _close(many, F.conv2d(x, weight, padding=1))
        assert type(F.conv2d(x.as_subclass(Mine), weight, padding=1)) is Mine
        alone = weight[:3, :1]
        many = torch.func.vmap(lambda it: F.conv2d(it[None], alone, padding=1, groups=3)[0])(x)
        _close(many, F.conv2d(x, alone, padding=1, groups=3))


@pytest.mark.slow
def test_they_are_tried_out_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for alone, module, place in ((False, convolution, 3), (True, depthwise, 2)):
        if alone:
            with torch.no_grad():  # as in a method that only looks
                kernels.try_out(torch.device("cpu"), alone)
        monkeypatch.setattr(module, "_input_gradient", lambda *given, _place=place: torch.zeros(given[_place]))
        with pytest.raises(RuntimeError, match="do not compute here what torch's do"):
            kernels.try_out(torch.device("cpu"), alone)
        if alone:  # one kind does not keep the other from being used
            kernels.try_out(torch.device("cpu"))
        monkeypatch.undo()


@pytest.mark.slow
def test_norms_of_many_channels_are_tried_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, *rest: Any) -> Tensor:
        return batch_norm(x, *rest) * (1.0 if x.shape[1] <= 64 else 1.2)

    monkeypatch.setattr(kernels, "batch_norm", wrong)
    with pytest.raises(RuntimeError, match="do not compute here what torch's do"):
        kernels.try_out(torch.device("cpu"))


def test_the_mode_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("conv2d", "depthwise_conv2d", "batch_norm"):
        monkeypatch.setattr(kernels, name, None)
    x, norm = torch.randn(2, 4, 6, 6), nn.BatchNorm2d(4)
    odd = [nn.Conv2d(4, 4, 3, 1, 1, groups=2), nn.Conv2d(4, 4, 5, 1, 2), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 65, 1),
           nn.Conv2d(4, 4, 3, 1, 2, dilation=2), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, (1, 2), 1),
           nn.Conv2d(4, 4, 3, 1, 1, padding_mode="circular"), nn.Conv2d(4, 4, 3, 3, 1),
           nn.Conv2d(4, 8, 3, 1, 1, groups=4), nn.Conv2d(4, 4, 7, 1, 3, groups=4), nn.Conv2d(4, 4, 1, groups=4),
           nn.Conv2d(4, 4, 3, 1, 0, groups=4), nn.Conv2d(4, 4, 3, 1, 2, dilation=2, groups=4),
           nn.Conv2d(4, 4, (3, 5), 1, (1, 2), groups=4)]  # fmt: skip
    with OwnKernels():
        nn.Conv2d(4, 4, 3, 1, 1)(x)  # float32 without autocast
        norm(x), norm.eval()(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            for conv in odd:
                conv(x)
            nn.BatchNorm1d(4)(torch.randn(8, 4).bfloat16())
            norm.train()(x)
