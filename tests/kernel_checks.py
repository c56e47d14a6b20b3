"""The kernels against torch in float64: in the interpreter, run by test_kernels.py, and on a GPU, by test_gpu.py."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.networks import Block
from dmcp.runtime import engine, kernels
from dmcp.runtime.kernels import OwnKernels, batch_norm, conv2d, convolution, norm

if convolution.INTERPRET:
    from triton.runtime import interpreter

    _convert = interpreter._convert_float

    def _rounded(data: Any, given: Any, wanted: Any, mode: Any) -> Any:
        """To the nearest bfloat16, as GPUs do it; the interpreter truncates."""
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return _convert(data, given, wanted, mode)
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = _rounded
    # checks of integer overflow take half of the time, and report nothing without `debug`
    _builder = interpreter.interpreter_builder
    _builder.options = replace(_builder.options, sanitize_overflow=False)

# n, channels, h, w, outputs, filter size, stride; or n, channels, h, w of a BatchNorm
SHAPES: list[tuple[int, ...]] = [
    (1, 16, 4, 4, 16, 3, 1), (2, 10, 5, 7, 3, 3, 1), (1, 21, 4, 5, 13, 3, 1), (1, 1, 1, 1, 1, 3, 1),
    (1, 16, 5, 4, 32, 3, 2), (2, 10, 5, 7, 21, 3, 2), (2, 13, 7, 5, 10, 1, 2), (2, 13, 4, 5, 6, 1, 1),
    (3, 16, 5, 4), (4, 1, 3, 3), (2, 21, 1, 1), (2, 96, 2, 3), (2, 131, 3, 1),
]  # fmt: skip
SLOW = [
    (1, 64, 4, 4, 64, 3, 1), (1, 32, 5, 5, 32, 3, 1), (1, 33, 6, 7, 51, 3, 2), (2, 3, 8, 8, 16, 3, 1),
    (2, 16, 8, 8, 32, 1, 2), (2, 1, 3, 3, 2, 1, 1),
    (2, 10, 3, 7), (3, 150, 2, 2), (9, 1100, 1, 1), (9, 2047, 1, 1), (9, 2048, 1, 1),
]  # fmt: skip
SPLIT = [(3, 16, 5, 4), (1, 131, 3, 1)]  # into many small blocks
SLOW_SPLIT = [(3, 10, 9, 7, 16, 3, 1)]


def slow(shapes: list[tuple[int, ...]]) -> list[Any]:
    return [pytest.param(shape, marks=pytest.mark.slow) for shape in shapes]


def close(found: Tensor | None, wanted: Tensor | None, bound: float = 1e-2) -> None:
    assert found is not None and wanted is not None and found.shape == wanted.shape
    assert (found.double() - wanted.double()).abs().max() <= bound * wanted.double().abs().max() + 1e-12


def numbers(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def images(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return numbers(*shape, seed=seed, device=device).bfloat16().contiguous(memory_format=torch.channels_last)


def check(shape: tuple[int, ...], device: str = "cpu") -> None:
    """A convolution or a BatchNorm and its gradients are torch's."""
    if len(shape) == 4:
        return check_norm(shape, device)
    n, c, h, w, c_out, k, stride = shape
    weight = numbers(c_out, c, k, k, seed=1, device=device)
    if c % 2 == 0:  # strides as the supernet's slices have them
        weight = numbers(c, k, k, 2 * c_out, seed=1, device=device).permute(3, 0, 1, 2)[::2]
    given = [images(n, c, h, w, device=device), weight, numbers(c_out, seed=3, device=device)]
    exact = lambda x, weight, bias: F.conv2d(x, weight, bias, stride, k // 2)  # noqa: E731
    compare(lambda *it: conv2d(*it, stride), exact, given, 1e-5)
    return None


def check_norm(shape: tuple[int, ...], device: str) -> None:
    c = shape[1]
    x = (images(*shape, device=device).float() + 30).bfloat16().contiguous(memory_format=torch.channels_last)
    given = [x, numbers(c, seed=1, device=device), numbers(c, seed=3, device=device)]
    running = [numbers(c, seed=4, device=device), numbers(c, seed=5, device=device).abs()]
    exact = [it.double() for it in running]
    compare(
        lambda x, *scale: batch_norm(x, *running, *scale, 0.3, 1e-5),
        lambda x, *scale: F.batch_norm(x, *exact, *scale, True, 0.3, 1e-5),
        given, 1e-4,
    )  # fmt: skip
    for one, other in zip(running, exact, strict=True):
        close(one, other, 1e-5)


def compare(own: Any, exact: Any, given: list[Tensor], bound: float) -> None:
    """bound: of the gradient of the weight, which is float32."""
    given = [it.requires_grad_() for it in given]
    wide = [it.detach().bfloat16().double() if it.ndim == 4 else it.detach().double() for it in given]
    wide = [it.requires_grad_() for it in wide]
    out, wanted = own(*given), exact(*wide)
    assert out.dtype is torch.bfloat16 and out.permute(0, 2, 3, 1).is_contiguous()
    dy = images(*out.shape, seed=2, device=str(out.device))
    found = torch.autograd.grad(out, given, dy, retain_graph=True)
    assert [it.dtype for it in found] == [it.dtype for it in given]
    bounds = (1e-2, 1e-2, 1e-2 if out.is_cuda else bound, 1e-2)
    truth = (wanted, *torch.autograd.grad(wanted, wide, dy.double()))
    for one, other, far in zip((out, *found), truth, bounds, strict=True):
        close(one, other, far)
    if out.is_cuda:  # sums have a fixed order
        again = torch.autograd.grad(out, given, dy)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("shape", [*SHAPES, *slow(SLOW)], ids=str)
def test_layers_and_their_gradients_are_torchs(shape: tuple[int, ...]) -> None:
    check(shape)


@pytest.mark.parametrize("shape", [*SPLIT, *slow(SLOW_SPLIT)], ids=str)
def test_many_small_blocks_add_up(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        convolution: {"PIXELS": 16, "UNROLLED": 0, "WEIGHT_PIXELS": 16},
        norm: {"TILE": 64, "GRADIENT_TILE": 64, "MOST_PROGRAMS": 7},
    }
    for module, constants in few.items():
        for name, value in constants.items():
            assert hasattr(module, name)
            monkeypatch.setattr(module, name, value)
    assert min(convolution.weight_plan(10, 3, 16, 189)[3:5]) > 1  # groups and slabs
    check(shape)


def test_batch_norm_without_scale_and_buffers() -> None:
    x = images(2, 5, 3, 3)
    close(batch_norm(x, None, None, None, None, 0.1, 1e-5), F.batch_norm(x.float(), None, None, training=True))


# plans: pure arithmetic


def test_divisions_by_multiplication_are_exact() -> None:
    n = np.arange(2**15, dtype=np.int64)
    for d in (*range(1, 300), 512, 1001, 2047, 2048):
        factor, shift = convolution.small_divider(d)
        assert ((n * factor) >> shift == n // d).all() and n[-1] * factor < 2**31
    near = np.random.default_rng(0).integers(0, 2**31, 100)
    for d in (*range(1, 100), 1024, 50176, 2**20 + 1, 2**31 - 1):
        factor, shift = convolution.divider(d)
        n = np.unique(np.clip([*near, *(near // d * d), *(near // d * d - 1), 0, 2**31 - 1], 0, 2**31 - 1)).tolist()
        assert all(((2 * it * (factor % 2**32)) >> 32) >> shift == it // d for it in n)


# the mode


def _narrow() -> nn.Module:
    alone = nn.Sequential(nn.Conv2d(6, 6, 3, 1, 1, groups=6, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6), nn.ReLU(), alone, Block(6, 9, 2))


def _run(net: nn.Module, x: Tensor, *modes: Any) -> tuple[Tensor, dict[str, Any]]:
    """Output; gradients and buffers."""
    net = copy.deepcopy(net).to(x.dtype)
    with contextlib.ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        out = torch.func.functional_call(net, {}, (x,))
    out.to(x.dtype).square().sum().backward()
    return out, {name: it.grad for name, it in net.named_parameters()} | dict(net.named_buffers())


def test_a_network_in_the_mode_computes_what_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x, calls = _narrow(), torch.randn(4, 3, 4, 4), list[str]()
    monkeypatch.setattr(kernels, "conv2d", lambda *it: calls.append("conv") or conv2d(*it))
    monkeypatch.setattr(kernels, "batch_norm", lambda *it: calls.append("norm") or batch_norm(*it))
    bfloat16 = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    ours, found = _run(net, x, bfloat16(), OwnKernels())
    assert (calls.count("conv"), calls.count("norm")) == (4, 5)
    _, torchs = _run(net, x, bfloat16())
    exact, sure = _run(net, x.double())
    close(ours, exact, 5e-2)
    for name, truth in sure.items():  # as near to the truth as torch is
        scale = truth.abs().max() + 1e-3
        error, usual = ((it[name].double() - truth).abs().max() / scale for it in (found, torchs))
        assert error <= 2 * usual + 2e-2, name


def test_the_engine_knows_what_the_kernels_take() -> None:
    """It must not import them to say which networks are suited: there may be no Triton."""
    assert engine._MOST_CHANNELS == convolution.MOST_CHANNELS
    for size in engine._KERNEL_SIZES:
        weight, x = numbers(2, 3, *size), images(1, 3, 4, 4)
        assert kernels._conv_arguments(x.float(), weight, padding=size[0] // 2) is None  # no autocast
        with torch.autocast("cpu", torch.bfloat16):
            assert kernels._conv_arguments(x, weight, padding=size[0] // 2) is not None
    for n, c, c_out, c_in, taken in ((512, 64, 64, 64, True), (512, 64, 64, 1, False), (2**14, 4, 64, 4, False)):
        x = torch.zeros(1, dtype=torch.bfloat16).expand(n, c, 32, 32)  # takes no memory; offsets are 32-bit
        with torch.autocast("cpu", torch.bfloat16):
            given = kernels._conv_arguments(x, torch.zeros(c_out, c_in, 3, 3), padding=1, groups=c // c_in)
        assert (given is not None) is taken


def test_vmap_and_subclasses_go_to_torch() -> None:
    class Mine(Tensor):
        pass

    x, conv = torch.randn(2, 3, 4, 4), partial(F.conv2d, weight=numbers(4, 3, 3, 3), padding=1)
    with OwnKernels(), torch.autocast("cpu", torch.bfloat16):
        close(torch.func.vmap(lambda it: conv(it[None])[0])(x), conv(x))
        assert type(conv(x.as_subclass(Mine))) is Mine


def test_the_mode_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("conv2d", "batch_norm"):
        monkeypatch.setattr(kernels, name, None)
    x, norm, strided = torch.randn(2, 4, 6, 6), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, 1, 1)
    strided.bias = nn.Parameter(numbers(8)[::2])  # kernels read it without strides
    odd = [strided, nn.Conv2d(4, 4, 3, 1, 1, groups=2), nn.Conv2d(4, 4, 5, 1, 2), nn.Conv2d(4, 4, 3),
           nn.Conv2d(4, 65, 1), nn.Conv2d(4, 4, 3, 1, 2, dilation=2), nn.Conv2d(4, 4, 3, padding="same"),
           nn.Conv2d(4, 4, 3, (1, 2), 1), nn.Conv2d(4, 8, 3, 1, 1, groups=4)]  # fmt: skip
    with OwnKernels():
        nn.Conv2d(4, 4, 3, 1, 1)(x)  # float32 without autocast
        norm(x), norm.eval()(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            for conv in odd:
                conv(x)
            nn.BatchNorm1d(4)(torch.randn(8, 4).bfloat16())
            norm.train()(x)


@pytest.mark.slow
def test_they_are_tried_out_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with torch.no_grad():
        kernels.try_out(cpu)
    zeros, wrong = lambda dy, w, shape, *_: torch.zeros(shape), lambda x, *rest: batch_norm(x, *rest) * 1.2
    broken = ((convolution, "input_gradient", zeros), (kernels, "batch_norm", wrong))
    for module, name, other in broken:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            with pytest.raises(RuntimeError, match="do not compute here what torch's do"):
                kernels.try_out(cpu)
