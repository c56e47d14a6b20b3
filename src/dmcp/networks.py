"""A plain residual network for small images."""

from __future__ import annotations

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
        shortcut = x
        if self.downsample is not None:
            shortcut = self.downsample(x)
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
        self.layer1 = _stage(blocks, width, width, stride=1)
        self.layer2 = _stage(blocks, width, 2 * width, stride=2)
        self.layer3 = _stage(blocks, 2 * width, 4 * width, stride=2)
        self.fc = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def _stage(blocks: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Blocks in a row, the first of which changes the channels and the resolution."""
    first = Block(inputs, outputs, stride)
    return nn.Sequential(first, *(Block(outputs, outputs, 1) for _ in range(blocks - 1)))
