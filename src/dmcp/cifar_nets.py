"""Plain networks for small images: 32x32 in colour (CIFAR), 8x8 in grey (digits)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet(nn.Module):
    """Residual network of three stages for small images (He et al., 2016, section 4.2)."""

    def __init__(
        self,
        blocks: int,  # per stage
        num_classes: int = 10,
        width: int = 16,  # channels of the first stage; each next one has twice as many
        sample_shape: tuple[int, int, int] = (3, 32, 32),
    ) -> None:
        super().__init__()
        self.sample_shape = sample_shape
        self.conv1 = nn.Conv2d(sample_shape[0], width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(width, width, 1, blocks)
        self.layer2 = self._stage(width, 2 * width, 2, blocks)
        self.layer3 = self._stage(2 * width, 4 * width, 2, blocks)
        self.fc = nn.Linear(4 * width, num_classes)
        _initialise(self)

    @staticmethod
    def _stage(inputs: int, outputs: int, stride: int, blocks: int) -> nn.Sequential:
        first = Block(inputs, outputs, stride)
        return nn.Sequential(first, *(Block(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class Vgg16(nn.Module):
    """VGG-16 with BatchNorm and one linear layer, as is usual on CIFAR."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.sample_shape = (3, 32, 32)
        layers: list[nn.Module] = []
        inputs = 3
        for stage in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
            for outputs in stage:
                layers += [nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.features(x), 1))
        return logits


def mobilenet_v2(num_classes: int = 10, **kwargs: Any) -> nn.Module:
    """torchvision's MobileNetV2 with two strides less, so that 32x32 images end at 4x4."""
    import torchvision  # takes seconds, so only who needs it waits for it: the command line starts in half of the time

    # expansion, channels, repeats, stride: the second stage has stride 1, and so has the stem
    stages = [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    settings = {"inverted_residual_setting": [list(stage) for stage in stages], "dropout": 0.0} | kwargs
    model: nn.Module = torchvision.models.MobileNetV2(num_classes=num_classes, **settings)
    stem = model.get_submodule("features.0.0")
    assert isinstance(stem, nn.Conv2d)
    stem.stride = (1, 1)
    model.sample_shape = (3, 32, 32)  # type: ignore[assignment]
    return model


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


NETS: Mapping[str, Mapping[str, Callable[..., nn.Module]]] = {
    "cifar": {
        "resnet20": partial(ResNet, 3),
        "resnet32": partial(ResNet, 5),
        "resnet56": partial(ResNet, 9),
        "resnet110": partial(ResNet, 18),
        "mobilenet_v2": mobilenet_v2,
        "vgg16_bn": Vgg16,
    },
    "digits": {"resnet": partial(ResNet, blocks=1, sample_shape=(1, 8, 8))},
}
