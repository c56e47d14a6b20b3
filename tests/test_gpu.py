"""The same on a GPU; run by hand where there is one, since CI has none."""

from __future__ import annotations

import copy
import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_twenty_steps import EAGER, losses, resnet20, searched
from torchvision.models import mobilenet_v3_small, resnet18

import dmcp
from dmcp.engine import Repeated
from dmcp.errors import StoppedError
from dmcp.keeping import Keeper

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_widths(graph: dmcp.ChannelGraph, seed: int = 0) -> dmcp.Widths:
    g = torch.Generator().manual_seed(seed)
    return graph.widths({s.name: int(torch.randint(1, s.size + 1, (1,), generator=g)) for s in graph.spaces})


@pytest.mark.parametrize("build", [resnet18, mobilenet_v3_small])
@pytest.mark.parametrize("training", [False, True])
def test_gated_is_cut_in_float64(build: type[torch.nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = build(num_classes=10).double().cuda().train(training)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    x = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.float64)
    cuda, cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    graph = dmcp.trace(model, x)
    assert torch.equal(cuda, torch.cuda.get_rng_state()) and torch.equal(cpu, torch.get_rng_state())
    net = dmcp.Supernet(model, graph)
    widths = random_widths(graph)
    small = dmcp.cut(net.model, graph, widths)
    assert all(tensor.is_cuda for tensor in [*small.parameters(), *small.buffers()])
    with torch.no_grad():
        reference = net(x, net.hard(widths))
        assert float((small(x) - reference).abs().max() / reference.abs().max()) < 1e-10


def test_bf16_model_with_soft_gates() -> None:
    model = resnet18(num_classes=10).cuda().to(torch.bfloat16)
    x = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    graph = dmcp.trace(model, x)
    net = dmcp.Supernet(model, graph)
    net(x, net.soft()).float().square().mean().backward()
    assert net.alpha.grad is not None and bool(net.alpha.grad.isfinite().all()) and bool(net.alpha.grad.any())
    small = dmcp.cut(model, graph, net.floor)
    assert small(x).dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# kernels


@pytest.mark.parametrize("c_out", [16, 21])
@pytest.mark.parametrize(
    ("c", "size", "kernel", "stride"), [(16, 32, 3, 1), (11, 15, 3, 2), (64, 8, 1, 2), (3, 32, 3, 1)]
)
def test_own_kernels_compute_what_torchs_do(c: int, size: int, kernel: int, stride: int, c_out: int) -> None:
    from dmcp.kernels import batch_norm, conv2d

    torch.manual_seed(0)
    x = torch.randn(8, size, size, c, device="cuda").bfloat16().permute(0, 3, 1, 2).requires_grad_()
    weight = torch.randn(c_out, c, kernel, kernel, device="cuda").bfloat16().float().requires_grad_()
    scale = torch.rand(c_out, device="cuda", requires_grad=True)
    wide = [it.detach().double().requires_grad_() for it in (x, weight, scale)]
    out = batch_norm(conv2d(x, weight, None, stride, kernel // 2), None, None, scale, None, 0.1, 1e-5)
    exact = torch.nn.functional.conv2d(wide[0], wide[1], None, stride, kernel // 2)
    exact = torch.nn.functional.batch_norm(exact, None, None, wide[2], None, True)
    slope = torch.randn_like(exact).bfloat16()
    found = torch.autograd.grad(out, (x, weight, scale), slope)
    wanted = torch.autograd.grad(exact, wide, slope.double())
    for one, other in zip((out, *found), (exact, *wanted), strict=True):
        assert (one.double() - other).abs().max() <= 2e-2 * other.abs().max()


def test_narrow_networks_get_own_kernels() -> None:
    assert dmcp.Engine().settled(torch.device("cuda"), steps=10_000, narrow=True).kernels


# graphs


def test_graphs_compute_the_same_bits() -> None:
    plain, replayed = (
        searched(dataclasses.replace(EAGER, deterministic=True, graphs=graphs), resnet20) for graphs in (False, True)
    )
    assert torch.equal(losses(plain[1]), losses(replayed[1]))
    assert all(torch.equal(a, b) for a, b in zip(plain[0].parameters(), replayed[0].parameters(), strict=True))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_stopped_search_goes_on_with_the_same_bits(graphs: bool, tmp_path: Path) -> None:
    engine = dmcp.Engine(deterministic=True, graphs=graphs, compile=False)
    whole = searched(engine, resnet20)
    for step in (7, 13):  # in the warm-up, and after it
        calls = iter(range(10**6))
        keeper = Keeper(tmp_path / str(step), every_steps=3, asked_to_stop=lambda: next(calls) >= step)  # noqa: B023
        with pytest.raises(StoppedError):
            searched(engine, resnet20, keeper)
        again = searched(engine, resnet20, Keeper(tmp_path / str(step), every_steps=3))
        assert all(torch.equal(a, b) for a, b in zip(whole[0].parameters(), again[0].parameters(), strict=True))


def test_a_step_that_asks_the_gpu_for_a_number_runs_without_a_graph() -> None:
    total = torch.zeros((), device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum())
        return total * float(x.max())  # waits for the GPU, which a capture forbids

    repeated = Repeated(step)
    results = [repeated(torch.ones(3, device="cuda")).item() for _ in range(6)]
    assert repeated.refused and results == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]


# kills


def command(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "dmcp", "prune", *words, "--quiet"])


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    job = ["--model", "digits:resnet", "--data", "digits", "--batch", "64", "--save-steps", "10", "--deterministic"]
    job += ["--search-epochs", "8", "--epochs", "6", "--controls", "--device", "cuda"]
    whole = tmp_path / "whole"
    assert command(*job, "--out", str(whole)).wait(timeout=300) == 0
    total = len((whole / "log.jsonl").read_text().splitlines())
    for share in (0.15, 0.4, 0.6, 0.9):  # warm-up, iterative half, and the trainings after it
        run = tmp_path / str(share)
        child = command(*job, "--out", str(run))
        log, end = run / "log.jsonl", time.monotonic() + 300
        while not log.exists() or log.read_bytes().count(b"\n") < share * total:
            assert child.poll() is None and time.monotonic() < end, share
            time.sleep(0.005)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        assert command("--resume", str(run)).wait(timeout=300) == 0
        for name in ("log.jsonl", "model.safetensors", "widths.json", "search.safetensors", "search.json"):
            assert (run / name).read_bytes() == (whole / name).read_bytes(), (share, name)
