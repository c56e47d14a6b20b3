"""The same on a GPU; run by hand where there is one, since CI has none."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torchvision.models import mobilenet_v3_small, resnet18

import dmcp
from dmcp import nets

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


def searched(engine: dmcp.Engine) -> tuple[dmcp.Supernet, dmcp.SearchResult]:
    torch.manual_seed(0)
    model = nets.build("cifar:resnet20", num_classes=10).cuda()
    net = dmcp.Supernet(model, dmcp.trace(model, torch.zeros(2, 3, 32, 32, device="cuda")))
    config = dmcp.SearchConfig(budget="50%", epochs=2, reference_batch=128, log_every=1)
    return net, dmcp.search(net, Pictures(), config, engine=engine)


def losses(result: dmcp.SearchResult) -> torch.Tensor:
    return torch.tensor([[*(r.weight_losses or ()), r.task_loss or 0.0, *(r.ratios or (0.0,))] for r in result.log])


@pytest.fixture(scope="module")
def eager() -> torch.Tensor:
    found = losses(searched(EAGER)[1])
    assert found[-1, 0] < 0.7 * found[0, 0]  # they move
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_twenty_steps_on_every_engine(name: str, eager: torch.Tensor) -> None:
    engine, tolerance = ENGINES[name]
    net, result = searched(engine)
    off = ((losses(result) - eager).abs() / eager.abs().clamp(min=1e-3)).max().item()
    print(f"\n{name}: largest relative difference of 20 steps {off:.1e}")
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
