"""The same on a GPU; run by hand where there is one, since CI has none."""

from __future__ import annotations

import copy

import pytest
import torch
from torchvision.models import mobilenet_v3_small, resnet18

import dmcp

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
