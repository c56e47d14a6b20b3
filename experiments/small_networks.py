"""Networks for rooms (experiments/room.py) that no library has at this size: a U-Net, and a VGG for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class VGG16(nn.Module):
    """VGG-16 with BatchNorm as it is used for CIFAR: 13 convolutions, five poolings and one linear layer."""

    def __init__(self, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for scale, count in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
            for _ in range(count):
                outputs = scale * width
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


class UNet(nn.Module):
    """Predicts the noise of an image: two convolutions on each of three levels, on the way down and up."""

    def __init__(self, width: int = 32, channels: int = 3) -> None:
        super().__init__()
        self.down1 = block(channels, width)
        self.down2 = block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2 = block(6 * width, 2 * width)
        self.up1 = block(3 * width, width)
        self.last = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        third = self.bottom(F.max_pool2d(second, 2))
        wide = self.up2(torch.cat([second, F.interpolate(third, scale_factor=2.0)], dim=1))
        wide = self.up1(torch.cat([first, F.interpolate(wide, scale_factor=2.0)], dim=1))
        return x - self.last(wide)


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions of 3 x 3, each with a norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )
