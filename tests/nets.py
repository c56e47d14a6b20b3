"""Ten small nets whose narrow versions are written by hand: the independent oracle of the invariants.

Each class takes the width of every space as an argument. `narrow` builds the class at smaller widths and copies the
kept channels by indices written down for this one net; nothing here knows the package's layouts. FULL are the
unpruned widths, SPACES the name that each width has in the graph: the first layer that writes the space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kept = Sequence[int]  # indices of the channels that stay


def keep(k: int, after: int = 0) -> list[int]:
    """The first k channels, counted from an offset."""
    return list(range(after, after + k))


@torch.no_grad()
def pick(small: nn.Module, full: nn.Module, rows: Kept, cols: Kept | None = None) -> None:
    """Copy these outputs (rows) and inputs (cols) of one conv, linear or norm."""
    for name, value in [*full.named_parameters(), *full.named_buffers()]:
        if value.ndim:  # not num_batches_tracked
            value = value[list(rows)]
        if name == "weight" and cols is not None:
            value = value[:, list(cols)]
        target = getattr(small, name)
        assert target.shape == value.shape, (name, target.shape, value.shape)
        target.copy_(value)


class Chain(nn.Module):
    """Three conv-bn-relu, flattened into a linear."""

    FULL: ClassVar[dict[str, int]] = {"a": 7, "b": 9, "c": 6}
    SPACES: ClassVar[dict[str, str]] = {"a": "conv1", "b": "conv2", "c": "conv3"}
    SHAPE = (3, 11, 11)

    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, a, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(b)
        self.conv3 = nn.Conv2d(b, c, 3, stride=2, bias=False)
        self.bn3 = nn.BatchNorm2d(c)
        self.head = nn.Linear(c * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        return self.head(x.flatten(1))

    @staticmethod
    def narrow(full: Chain, a: Kept, b: Kept, c: Kept) -> Chain:
        small = Chain(len(a), len(b), len(c)).to(full.head.weight.dtype)
        pick(small.conv1, full.conv1, a)
        pick(small.bn1, full.bn1, a)
        pick(small.conv2, full.conv2, b, a)
        pick(small.bn2, full.bn2, b)
        pick(small.conv3, full.conv3, c, b)
        pick(small.bn3, full.bn3, c)
        pick(small.head, full.head, keep(5), [4 * channel + place for channel in c for place in range(4)])
        return small


class Residual(nn.Module):
    """A stem and a basic block that share their stream, then a block with a projection shortcut."""

    FULL: ClassVar[dict[str, int]] = {"s": 8, "a": 6, "b": 9, "t": 11}
    SPACES: ClassVar[dict[str, str]] = {"s": "stem", "a": "conv1", "b": "conv3", "t": "conv4"}
    SHAPE = (3, 9, 9)

    def __init__(self, s: int, a: int, b: int, t: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, s, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(s)
        self.conv1 = nn.Conv2d(s, a, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, s, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(s)
        self.conv3 = nn.Conv2d(s, b, 3, stride=2, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(b)
        self.conv4 = nn.Conv2d(b, t, 3, padding=1, bias=False)
        self.bn4 = nn.BatchNorm2d(t)
        self.project = nn.Conv2d(s, t, 1, stride=2, bias=False)
        self.bn5 = nn.BatchNorm2d(t)
        self.head = nn.Linear(t, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)
        y = self.bn4(self.conv4(F.relu(self.bn3(self.conv3(x)))))
        x = F.relu(y + self.bn5(self.project(x)))
        return self.head(x.mean((2, 3)))

    @staticmethod
    def narrow(full: Residual, s: Kept, a: Kept, b: Kept, t: Kept) -> Residual:
        small = Residual(len(s), len(a), len(b), len(t)).to(full.head.weight.dtype)
        pick(small.stem, full.stem, s, keep(3))
        pick(small.bn0, full.bn0, s)
        pick(small.conv1, full.conv1, a, s)
        pick(small.bn1, full.bn1, a)
        pick(small.conv2, full.conv2, s, a)
        pick(small.bn2, full.bn2, s)
        pick(small.conv3, full.conv3, b, s)
        pick(small.bn3, full.bn3, b)
        pick(small.conv4, full.conv4, t, b)
        pick(small.bn4, full.bn4, t)
        pick(small.project, full.project, t, s)
        pick(small.bn5, full.bn5, t)
        pick(small.head, full.head, keep(5), t)
        return small


class Depthwise(nn.Module):
    """Two inverted residual blocks, the second without its shortcut."""

    FULL: ClassVar[dict[str, int]] = {"s": 6, "e": 14, "f": 10, "t": 8}
    SPACES: ClassVar[dict[str, str]] = {"s": "stem", "e": "expand1", "f": "expand2", "t": "project2"}
    SHAPE = (3, 9, 9)

    def __init__(self, s: int, e: int, f: int, t: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, s, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(s)
        self.expand1 = nn.Conv2d(s, e, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(e)
        self.depth1 = nn.Conv2d(e, e, 3, padding=1, groups=e, bias=False)
        self.bn2 = nn.BatchNorm2d(e)
        self.project1 = nn.Conv2d(e, s, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(s)
        self.expand2 = nn.Conv2d(s, f, 1, bias=False)
        self.bn4 = nn.BatchNorm2d(f)
        self.depth2 = nn.Conv2d(f, f, 3, stride=2, padding=1, groups=f, bias=False)
        self.bn5 = nn.BatchNorm2d(f)
        self.project2 = nn.Conv2d(f, t, 1, bias=False)
        self.bn6 = nn.BatchNorm2d(t)
        self.head = nn.Linear(t, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn0(self.stem(x)))
        y = F.relu6(self.bn1(self.expand1(x)))
        y = F.relu6(self.bn2(self.depth1(y)))
        x = x + self.bn3(self.project1(y))
        y = F.relu6(self.bn4(self.expand2(x)))
        y = F.relu6(self.bn5(self.depth2(y)))
        x = self.bn6(self.project2(y))
        return self.head(x.mean((2, 3)))

    @staticmethod
    def narrow(full: Depthwise, s: Kept, e: Kept, f: Kept, t: Kept) -> Depthwise:
        small = Depthwise(len(s), len(e), len(f), len(t)).to(full.head.weight.dtype)
        pick(small.stem, full.stem, s, keep(3))
        pick(small.bn0, full.bn0, s)
        pick(small.expand1, full.expand1, e, s)
        pick(small.bn1, full.bn1, e)
        pick(small.depth1, full.depth1, e, [0])
        pick(small.bn2, full.bn2, e)
        pick(small.project1, full.project1, s, e)
        pick(small.bn3, full.bn3, s)
        pick(small.expand2, full.expand2, f, s)
        pick(small.bn4, full.bn4, f)
        pick(small.depth2, full.depth2, f, [0])
        pick(small.bn5, full.bn5, f)
        pick(small.project2, full.project2, t, f)
        pick(small.bn6, full.bn6, t)
        pick(small.head, full.head, keep(5), t)
        return small


class Concat(nn.Module):
    """Two dense layers, a transition, then three branches side by side."""

    FULL: ClassVar[dict[str, int]] = {"s": 6, "g": 5, "h": 4, "t": 9, "p": 3, "q": 7, "r": 5}
    SPACES: ClassVar[dict[str, str]] = {
        "s": "stem",
        "g": "dense1",
        "h": "dense2",
        "t": "transition",
        "p": "branch1",
        "q": "branch2",
        "r": "branch3",
    }
    SHAPE = (3, 9, 9)

    def __init__(self, s: int, g: int, h: int, t: int, p: int, q: int, r: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, s, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(s)
        self.dense1 = nn.Conv2d(s, g, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(s + g)
        self.dense2 = nn.Conv2d(s + g, h, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(s + g + h)
        self.transition = nn.Conv2d(s + g + h, t, 1, bias=False)
        self.branch1 = nn.Conv2d(t, p, 1)
        self.branch2 = nn.Conv2d(t, q, 3, padding=1)
        self.branch3 = nn.Conv2d(t, r, 1)
        self.bn4 = nn.BatchNorm2d(p + q + r)
        self.head = nn.Linear(p + q + r, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.dense1(F.relu(self.bn1(x)))], 1)
        x = torch.cat([x, self.dense2(F.relu(self.bn2(x)))], 1)
        x = F.avg_pool2d(self.transition(F.relu(self.bn3(x))), 2)
        x = torch.cat([self.branch1(x), self.branch2(x), self.branch3(F.max_pool2d(x, 3, 1, 1))], 1)
        return self.head(F.relu(self.bn4(x)).mean((2, 3)))

    @staticmethod
    def narrow(full: Concat, s: Kept, g: Kept, h: Kept, t: Kept, p: Kept, q: Kept, r: Kept) -> Concat:
        small = Concat(len(s), len(g), len(h), len(t), len(p), len(q), len(r)).to(full.head.weight.dtype)
        two = [*s, *(6 + i for i in g)]
        three = [*two, *(11 + i for i in h)]
        mixed = [*p, *(3 + i for i in q), *(10 + i for i in r)]
        pick(small.stem, full.stem, s, keep(3))
        pick(small.bn1, full.bn1, s)
        pick(small.dense1, full.dense1, g, s)
        pick(small.bn2, full.bn2, two)
        pick(small.dense2, full.dense2, h, two)
        pick(small.bn3, full.bn3, three)
        pick(small.transition, full.transition, t, three)
        pick(small.branch1, full.branch1, p, t)
        pick(small.branch2, full.branch2, q, t)
        pick(small.branch3, full.branch3, r, t)
        pick(small.bn4, full.bn4, mixed)
        pick(small.head, full.head, keep(5), mixed)
        return small


class Grouped(nn.Module):
    """A conv with few wide groups, narrowed inside every group; then ResNeXt's many thin ones, which go whole.

    a and b are channels per group of the first, g is the number of groups of the second.
    """

    FULL: ClassVar[dict[str, int]] = {"a": 7, "b": 5, "g": 6, "t": 9}
    SPACES: ClassVar[dict[str, str]] = {"a": "stem", "b": "wide", "g": "reduce", "t": "expand"}
    SHAPE = (3, 9, 9)

    def __init__(self, a: int, b: int, g: int, t: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * a, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(2 * a)
        self.wide = nn.Conv2d(2 * a, 2 * b, 3, padding=1, groups=2)
        self.bn1 = nn.BatchNorm2d(2 * b)
        self.reduce = nn.Conv2d(2 * b, 2 * g, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * g)
        self.thin = nn.Conv2d(2 * g, 3 * g, 3, stride=2, padding=1, groups=g, bias=False)
        self.bn3 = nn.BatchNorm2d(3 * g)
        self.expand = nn.Conv2d(3 * g, t, 1, bias=False)
        self.bn4 = nn.BatchNorm2d(t)
        self.head = nn.Linear(t, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(self.bn1(self.wide(x)))
        x = F.relu(self.bn2(self.reduce(x)))
        x = F.relu(self.bn3(self.thin(x)))
        x = F.relu(self.bn4(self.expand(x)))
        return self.head(x.mean((2, 3)))

    @staticmethod
    def narrow(full: Grouped, a: Kept, b: Kept, g: Kept, t: Kept) -> Grouped:
        small = Grouped(len(a), len(b), len(g), len(t)).to(full.head.weight.dtype)
        into = [*a, *(7 + i for i in a)]  # both groups keep the same channels
        out = [*b, *(5 + i for i in b)]
        pairs = [2 * group + i for group in g for i in range(2)]
        threes = [3 * group + i for group in g for i in range(3)]
        pick(small.stem, full.stem, into, keep(3))
        pick(small.bn0, full.bn0, into)
        pick(small.wide, full.wide, out, a)
        pick(small.bn1, full.bn1, out)
        pick(small.reduce, full.reduce, pairs, out)
        pick(small.bn2, full.bn2, pairs)
        pick(small.thin, full.thin, threes, keep(2))
        pick(small.bn3, full.bn3, threes)
        pick(small.expand, full.expand, t, threes)
        pick(small.bn4, full.bn4, t)
        pick(small.head, full.head, keep(5), t)
        return small


class SqueezeExcite(nn.Module):
    """A residual block whose inner channels are rescaled by a squeeze and excitation."""

    FULL: ClassVar[dict[str, int]] = {"s": 7, "c": 12, "r": 5}
    SPACES: ClassVar[dict[str, str]] = {"s": "stem", "c": "conv", "r": "squeeze"}
    SHAPE = (3, 9, 9)

    def __init__(self, s: int, c: int, r: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, s, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(s)
        self.conv = nn.Conv2d(s, c, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c)
        self.squeeze = nn.Conv2d(c, r, 1)
        self.excite = nn.Conv2d(r, c, 1)
        self.project = nn.Conv2d(c, s, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(s)
        self.head = nn.Linear(s, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        y = F.silu(self.bn1(self.conv(x)))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        x = F.relu(x + self.bn2(self.project(y)))
        return self.head(x.mean((2, 3)))

    @staticmethod
    def narrow(full: SqueezeExcite, s: Kept, c: Kept, r: Kept) -> SqueezeExcite:
        small = SqueezeExcite(len(s), len(c), len(r)).to(full.head.weight.dtype)
        pick(small.stem, full.stem, s, keep(3))
        pick(small.bn0, full.bn0, s)
        pick(small.conv, full.conv, c, s)
        pick(small.bn1, full.bn1, c)
        pick(small.squeeze, full.squeeze, r, c)
        pick(small.excite, full.excite, c, r)
        pick(small.project, full.project, s, c)
        pick(small.bn2, full.bn2, s)
        pick(small.head, full.head, keep(5), s)
        return small


class PreActivation(nn.Module):
    """ResNetV2: norm and relu before each conv; the raw stream goes on, and through the second shortcut."""

    FULL: ClassVar[dict[str, int]] = {"s": 8, "a": 6, "b": 9, "t": 11}
    SPACES: ClassVar[dict[str, str]] = {"s": "stem", "a": "conv1", "b": "conv3", "t": "conv4"}
    SHAPE = (3, 9, 9)

    def __init__(self, s: int, a: int, b: int, t: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, s, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(s)
        self.conv1 = nn.Conv2d(s, a, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, s, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(s)
        self.conv3 = nn.Conv2d(s, b, 3, stride=2, padding=1, bias=False)
        self.bn4 = nn.BatchNorm2d(b)
        self.conv4 = nn.Conv2d(b, t, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(s, t, 1, stride=2, bias=False)
        self.bn5 = nn.BatchNorm2d(t)
        self.head = nn.Linear(t, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.conv1(F.relu(self.bn1(x)))
        x = x + self.conv2(F.relu(self.bn2(y)))
        y = self.conv3(F.relu(self.bn3(x)))
        x = self.conv4(F.relu(self.bn4(y))) + self.shortcut(x)
        return self.head(F.relu(self.bn5(x)).mean((2, 3)))

    @staticmethod
    def narrow(full: PreActivation, s: Kept, a: Kept, b: Kept, t: Kept) -> PreActivation:
        small = PreActivation(len(s), len(a), len(b), len(t)).to(full.head.weight.dtype)
        pick(small.stem, full.stem, s, keep(3))
        pick(small.bn1, full.bn1, s)
        pick(small.conv1, full.conv1, a, s)
        pick(small.bn2, full.bn2, a)
        pick(small.conv2, full.conv2, s, a)
        pick(small.bn3, full.bn3, s)
        pick(small.conv3, full.conv3, b, s)
        pick(small.bn4, full.bn4, b)
        pick(small.conv4, full.conv4, t, b)
        pick(small.shortcut, full.shortcut, t, s)
        pick(small.bn5, full.bn5, t)
        pick(small.head, full.head, keep(5), t)
        return small


class OptionA(nn.Module):
    """CIFAR's parameter-free shortcut: every second pixel, and two zero channels on either side, which stay whole."""

    FULL: ClassVar[dict[str, int]] = {"s": 8, "a": 7, "b": 9, "c": 5}
    SPACES: ClassVar[dict[str, str]] = {"s": "stem", "a": "conv1", "b": "conv3", "c": "conv5"}
    SHAPE = (3, 9, 9)

    def __init__(self, s: int, a: int, b: int, c: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, s, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(s)
        self.conv1 = nn.Conv2d(s, a, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, s, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(s)
        self.conv3 = nn.Conv2d(s, b, 3, stride=2, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(b)
        self.conv4 = nn.Conv2d(b, s + 4, 3, padding=1, bias=False)
        self.bn4 = nn.BatchNorm2d(s + 4)
        self.conv5 = nn.Conv2d(s + 4, c, 3, padding=1, bias=False)
        self.bn5 = nn.BatchNorm2d(c)
        self.conv6 = nn.Conv2d(c, s + 4, 3, padding=1, bias=False)
        self.bn6 = nn.BatchNorm2d(s + 4)
        self.head = nn.Linear(s + 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        x = F.relu(shortcut + self.bn4(self.conv4(F.relu(self.bn3(self.conv3(x))))))
        x = F.relu(x + self.bn6(self.conv6(F.relu(self.bn5(self.conv5(x))))))
        return self.head(x.mean((2, 3)))

    @staticmethod
    def narrow(full: OptionA, s: Kept, a: Kept, b: Kept, c: Kept) -> OptionA:
        small = OptionA(len(s), len(a), len(b), len(c)).to(full.head.weight.dtype)
        padded = [0, 1, *(2 + i for i in s), 10, 11]
        pick(small.stem, full.stem, s, keep(3))
        pick(small.bn0, full.bn0, s)
        pick(small.conv1, full.conv1, a, s)
        pick(small.bn1, full.bn1, a)
        pick(small.conv2, full.conv2, s, a)
        pick(small.bn2, full.bn2, s)
        pick(small.conv3, full.conv3, b, s)
        pick(small.bn3, full.bn3, b)
        pick(small.conv4, full.conv4, padded, b)
        pick(small.bn4, full.bn4, padded)
        pick(small.conv5, full.conv5, c, padded)
        pick(small.bn5, full.bn5, c)
        pick(small.conv6, full.conv6, padded, c)
        pick(small.bn6, full.bn6, padded)
        pick(small.head, full.head, keep(5), padded)
        return small


class SharedWeight(nn.Module):
    """One conv called twice, and two convs with one Parameter, whose inputs are thereby one space."""

    FULL: ClassVar[dict[str, int]] = {"c": 8, "d": 6}
    SPACES: ClassVar[dict[str, str]] = {"c": "stem", "d": "left"}
    SHAPE = (3, 9, 9)

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(c)
        self.mix = nn.Conv2d(c, c, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(c)
        self.left = nn.Conv2d(c, d, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(d)
        self.other = nn.Conv2d(c, c, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(c)
        self.right = nn.Conv2d(c, d, 3, padding=1)
        self.bn4 = nn.BatchNorm2d(d)
        self.head = nn.Linear(2 * d, 5)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(self.bn1(self.mix(x)))
        x = F.relu(self.bn1(self.mix(x)))
        left = F.relu(self.bn2(self.left(x)))
        right = F.relu(self.bn4(self.right(F.relu(self.bn3(self.other(x))))))
        return self.head(torch.cat([left, right], 1).mean((2, 3)))

    @staticmethod
    def narrow(full: SharedWeight, c: Kept, d: Kept) -> SharedWeight:
        small = SharedWeight(len(c), len(d)).to(full.head.weight.dtype)
        pick(small.stem, full.stem, c, keep(3))
        pick(small.bn0, full.bn0, c)
        pick(small.mix, full.mix, c, c)
        pick(small.bn1, full.bn1, c)
        pick(small.left, full.left, d, c)
        pick(small.bn2, full.bn2, d)
        pick(small.other, full.other, c, c)
        pick(small.bn3, full.bn3, c)
        pick(small.right, full.right, d, c)
        pick(small.bn4, full.bn4, d)
        pick(small.head, full.head, keep(5), [*d, *(6 + i for i in d)])
        return small


class Lifted(nn.Module):
    """Activations with f(0) != 0: hard gates at the layers that write a space would leak."""

    FULL: ClassVar[dict[str, int]] = {"a": 7, "b": 6}
    SPACES: ClassVar[dict[str, str]] = {"a": "conv1", "b": "conv2"}
    SHAPE = (3, 8, 8)

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, a, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(a)
        self.depth = nn.Conv2d(a, a, 3, padding=1, groups=a)
        self.bn2 = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, b, 3, padding=1)
        self.head = nn.Linear(b, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cos(self.bn1(self.conv1(x)))
        x = F.hardsigmoid(self.bn2(self.depth(x)))
        return self.head((F.softplus(self.conv2(x)) + 0.3).mean((2, 3)))

    @staticmethod
    def narrow(full: Lifted, a: Kept, b: Kept) -> Lifted:
        small = Lifted(len(a), len(b)).to(full.head.weight.dtype)
        pick(small.conv1, full.conv1, a, keep(3))
        pick(small.bn1, full.bn1, a)
        pick(small.depth, full.depth, a)
        pick(small.bn2, full.bn2, a)
        pick(small.conv2, full.conv2, b, a)
        pick(small.head, full.head, keep(5), b)
        return small


NETS: tuple[Any, ...] = (
    Chain,
    Residual,
    Depthwise,
    Concat,
    Grouped,
    SqueezeExcite,
    PreActivation,
    OptionA,
    SharedWeight,
    Lifted,
)

# -- an op that no rule knows


@torch.library.custom_op("dmcp_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    """Element-wise, but nobody has said so."""
    return 2 * x


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# -- filling, calling and comparing any model


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random parameters and running statistics: no scale is 1, no shift 0, nothing degenerate. In place, float64."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        fan_in = math.prod(parameter.shape[1:])
        parameter.copy_(values * (1.5 / fan_in) ** 0.5 if parameter.ndim > 1 else values / 3)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
            if module.weight is not None:
                module.weight.copy_(0.6 + torch.rand(module.weight.shape, generator=generator, dtype=torch.float64))
            if getattr(module, "running_mean", None) is not None:
                shape = module.running_mean.shape
                module.running_mean.copy_(torch.randn(shape, generator=generator, dtype=torch.float64) / 3)
                module.running_var.copy_(0.5 + torch.rand(shape, generator=generator, dtype=torch.float64))
    return model


def sample(shape: Sequence[int], batch: int = 4, seed: int = 0) -> Tensor:
    """A batch of noise. -> (batch, *shape) float64"""
    return torch.randn((batch, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(model: nn.Module, x: Any) -> Any:
    """Call a model with one tensor, positional arguments (tuple) or keyword arguments (dict)."""
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, dict) else model(x)


def leaves(output: Any) -> list[Tensor]:
    """All tensors of a nested output."""
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output):
        output = {item.name: getattr(output, item.name) for item in fields(output)}
    values = output.values() if isinstance(output, Mapping) else output
    return [] if values is None else [leaf for value in values for leaf in leaves(value)]


def distance(one: Any, other: Any) -> float:
    """Largest difference of two outputs, in units of the difference between the other's samples."""
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    assert pairs, "an output without tensors"
    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
    assert all(bool(b.isfinite().all()) for _, b in pairs), "an output that is not finite"
    return torch.stack([(a - b).abs().max() / _spread(b) for a, b in pairs]).max().item()


def _spread(output: Tensor) -> Tensor:
    """How much two samples differ; where a net so narrow that its relus are dead answers all alike, its size."""
    between = (output[0] - output[1]).abs().max()
    return between if between > 1e-6 else output.abs().max().clamp(min=1e-6)
