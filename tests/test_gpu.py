"""The same on a GPU; run by hand where there is one, since CI has none."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v3_small, resnet18

import dmcp
from dmcp import nets
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


# the same search on every engine

EAGER = dmcp.Engine(precision="float32", compile=False, graphs=False, tf32=False, channels_last=False)
ENGINES = {
    "graphs": (dataclasses.replace(EAGER, graphs=True), 1e-4),
    "compiled": (dataclasses.replace(EAGER, compile=True, channels_last=True), 1e-4),
    "compiled, graphs": (dataclasses.replace(EAGER, compile=True, graphs=True, channels_last=True), 1e-4),
    "bfloat16": (dmcp.Engine(compile=True, graphs=True), 3e-2),
}


class Smooth(nn.Module):
    """Without kinks: where ReLUs flip, float32 itself is chaotic over twenty steps, whatever the engine."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        shapes = [(3, width), (width, width), (width, width), (width, 2 * width)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in shapes)
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norms[0](self.convs[0](x)))
        inner = nn.functional.silu(self.norms[1](self.convs[1](x)))
        x = x + self.norms[2](self.convs[2](inner))
        x = nn.functional.silu(self.norms[3](self.convs[3](x)))
        return self.fc(x.mean((2, 3)))


class Pictures:
    """Images whose class can be seen, so that losses fall; the same in every pass."""

    def __init__(self, batch: int = 128, count: int = 10) -> None:
        draw = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 3, 32, 32, generator=draw)
        labels = torch.randint(10, (count, batch), generator=draw)
        images = patterns[labels] + torch.randn(count, batch, 3, 32, 32, generator=draw)
        self.batches = [(x.cuda(), y.cuda()) for x, y in zip(images, labels, strict=True)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.batches)


def searched(
    engine: dmcp.Engine, build: Callable[[], nn.Module] = Smooth, keeper: Keeper | None = None
) -> tuple[dmcp.Supernet, dmcp.SearchResult]:
    torch.manual_seed(0)
    model = build().cuda()
    net = dmcp.Supernet(model, dmcp.trace(model, torch.zeros(2, 3, 32, 32, device="cuda")))
    config = dmcp.SearchConfig(budget="50%", epochs=2, reference_batch=128, log_every=1)
    return net, dmcp.search(net, Pictures(), config, engine=engine, keeper=keeper)


def resnet20() -> nn.Module:
    return nets.build("cifar:resnet20", num_classes=10)


def losses(result: dmcp.SearchResult) -> torch.Tensor:
    return torch.tensor([[*(r.weight_losses or ()), r.task_loss or 0.0, *(r.ratios or (0.0,))] for r in result.log])


@pytest.fixture(scope="module")
def eager() -> torch.Tensor:
    found = losses(searched(EAGER)[1])
    assert found[-1, 0] < 0.9 * found[0, 0]  # they move
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_twenty_steps_on_every_engine(name: str, eager: torch.Tensor) -> None:
    engine, tolerance = ENGINES[name]
    net, result = searched(engine)
    off = ((losses(result) - eager).abs() / eager.amax(dim=1, keepdim=True)).max().item()
    print(f"\n{name}: first loss {eager[0, 0]:.3f}, last {eager[-1, 0]:.3f}, largest difference {off:.1e}")
    assert off < tolerance
    settled = engine.settled(torch.device("cuda"), steps=10**6)
    x = Pictures(count=1).batches[0][0]
    widths = random_widths(net.graph)
    with torch.no_grad(), settled.running(net.model), settled.autocast():
        net.train()
        gated = settled.compiled(lambda x, gates: net(x, gates))(settled.laid_out(x), net.hard(widths)).float()
        cut = dmcp.cut(net.model, net.graph, widths).train()(settled.laid_out(x)).float()
    gap = ((gated - cut).abs().max() / cut.abs().max()).item()
    print(f"{name}: gated against cut {gap:.1e}")
    assert gap < tolerance


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
