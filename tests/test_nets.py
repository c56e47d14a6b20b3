"""Networks for small images, against costs worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp.models import build, sample_shape


def resnet_macs(blocks: int, width: int, channels: int, size: int) -> int:
    """By hand: 3x3 convolutions, 1x1 projections at the two strides, one linear layer."""
    macs = channels * width * 9 * size**2
    for stage, (inputs, outputs) in enumerate(((width, width), (width, 2 * width), (2 * width, 4 * width))):
        area = (size >> stage) ** 2
        macs += (inputs * outputs + (2 * blocks - 1) * outputs**2) * 9 * area
        macs += inputs * outputs * area if stage else 0
    return macs + 4 * width * 10


NETS = {
    "cifar:resnet20": resnet_macs(3, 16, 3, 32),
    "cifar:resnet32": resnet_macs(5, 16, 3, 32),
    "cifar:resnet56": resnet_macs(9, 16, 3, 32),
    "cifar:resnet110": resnet_macs(18, 16, 3, 32),
    "digits:resnet": resnet_macs(1, 16, 1, 8),
    "cifar:vgg16_bn": 313_201_664,  # 313 M in the literature
    "cifar:mobilenet_v2": 87_976_448,
}


@pytest.mark.parametrize("name", NETS)
def test_costs_and_outputs(name: str) -> None:
    model = build(name).eval()
    image = torch.zeros(1, *sample_shape(model))
    with FlopCounterMode(display=False) as counter:
        output = model(image)
    assert output.shape == (1, 10)  # one peer's MobileNetV2 for CIFAR gives 40 numbers for 10 classes
    assert counter.get_total_flops() == 2 * NETS[name]
    assert build(name, num_classes=7)(torch.zeros(2, *image.shape[1:])).shape == (2, 7)


def test_resnet20_is_the_usual_one() -> None:
    assert round(NETS["cifar:resnet20"] / 1e6, 1) == 40.8


@pytest.mark.parametrize(
    "name", ["digits:resnet", "cifar:resnet20", pytest.param("cifar:mobilenet_v2", marks=pytest.mark.slow)]
)
def test_it_can_be_traced_and_halved(name: str) -> None:
    model = build(name)
    image = torch.randn(2, *sample_shape(model))
    graph = dmcp.trace(model, image)
    widths = graph.widths({space.name: max(1, space.size // 2) for space in graph.spaces})
    small = dmcp.cut(model, graph, widths).eval()
    with FlopCounterMode(display=False) as counter:
        assert small(image).shape == (2, 10)
    assert counter.get_total_flops() == 2 * 2 * graph.macs(widths)
    assert graph.macs(widths) < 0.35 * NETS[name]
    assert graph.macs(graph.full) == NETS[name]
    assert sample_shape(small) == sample_shape(model)


def test_resnet20_has_one_space_per_stage_and_one_per_block() -> None:
    graph = dmcp.trace(build("cifar:resnet20"), torch.zeros(2, 3, 32, 32))
    assert [space.size for space in graph.spaces].count(16) == 1 + 3
    assert len(graph.spaces) == 3 + 9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cifar:resnet21", "There is no 'resnet21' in cifar; did you mean resnet"),
        ("digits:lenet", "no 'lenet' in digits; did you mean resnet? All of them: resnet."),
        ("cifar:", "All of them: resnet20, resnet32"),
    ],
)
def test_unknown_names(name: str, text: str) -> None:
    with pytest.raises(dmcp.DmcpError) as error:
        build(name)
    assert text in str(error.value)
