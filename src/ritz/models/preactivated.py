"""Residual networks whose blocks begin with norm and ReLU: PreResNet and WideResNet."""

from typing import final

import torch
from torch import Tensor, nn

from ritz._core.checks import check_choice, check_count, check_range
from ritz.models.catalogue import register
from ritz.models.resnets import convolution
from ritz.models.shapes import check_image


@final
class PreBlock(nn.Module):
    """Two convolutions of 3 x 3, each after batch norm and ReLU, around a shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), convolution(channels, width, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), convolution(width, width, 3)
        self.downsample = _projection(channels, width, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, width, h / stride, w / stride)``."""
        inner = self.conv1(torch.relu(self.bn1(x)))
        inner = self.conv2(torch.relu(self.bn2(inner)))
        mapped: Tensor = inner + self.downsample(x)
        return mapped


@final
class PreBottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, each after batch norm and ReLU."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        maps = self.expansion * width
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), convolution(channels, width, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), convolution(width, width, 3, stride)
        self.bn3, self.conv3 = nn.BatchNorm2d(width), convolution(width, maps, 1)
        self.downsample = _projection(channels, maps, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, 4 width, h / stride, w / stride)``."""
        inner = self.conv1(torch.relu(self.bn1(x)))
        inner = self.conv2(torch.relu(self.bn2(inner)))
        inner = self.conv3(torch.relu(self.bn3(inner)))
        mapped: Tensor = inner + self.downsample(x)
        return mapped


@final
class WideBlock(nn.Module):
    """Two convolutions of 3 x 3 with biases, the second strided, and dropout between them."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, width, 3, padding=1)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, stride, padding=1)
        self.shortcut = _projection(channels, width, stride, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, width, h / stride, w / stride)``."""
        inner = self.dropout(self.conv1(torch.relu(self.bn1(x))))
        inner = self.conv2(torch.relu(self.bn2(inner)))
        mapped: Tensor = inner + self.shortcut(x)
        return mapped


@final
class PreResNet(nn.Module):
    """Three stages of preactivated blocks, a last norm and ReLU, and a mean over positions."""

    def __init__(
        self,
        channels: int,
        num_classes: int,
        block: type[PreBlock] | type[PreBottleneck],
        blocks: int,
        width: int,
    ) -> None:
        super().__init__()
        self.conv1 = convolution(channels, width, 3)
        before, stages = width, []
        for stage in range(3):
            inner = width * 2**stage
            parts = [block(before, inner, 2 if stage else 1)]
            before = block.expansion * inner
            parts += [block(before, inner, 1) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*parts))
        self.layer1, self.layer2, self.layer3 = stages
        self.bn, self.fc = nn.BatchNorm2d(before), nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(n, c, h, w)`` to logits ``(n, num_classes)``."""
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        logits: Tensor = self.fc(torch.relu(self.bn(x)).mean((2, 3)))
        return logits


@final
class WideResNet(nn.Module):
    """As :class:`PreResNet`, of wide blocks behind a narrow stem, all with biases."""

    def __init__(
        self, channels: int, num_classes: int, blocks: int, width: int, factor: int, dropout: float
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        before, stages = width, []
        for stage in range(3):
            wide = width * factor * 2**stage
            parts = [WideBlock(before, wide, 2 if stage else 1, dropout)]
            parts += [WideBlock(wide, wide, 1, dropout) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*parts))
            before = wide
        self.layer1, self.layer2, self.layer3 = stages
        self.bn1, self.linear = nn.BatchNorm2d(before), nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(n, c, h, w)`` to logits ``(n, num_classes)``."""
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        logits: Tensor = self.linear(torch.relu(self.bn1(x)).mean((2, 3)))
        return logits


@register("preresnet8", depth=8)
@register("preresnet20", depth=20)
@register("preresnet56", depth=56)
@register("preresnet83", depth=83)
@register("preresnet110", depth=110)
@register("preresnet164", depth=164)
def preresnet(
    *,
    depth: int,
    num_classes: int = 100,
    input_shape: tuple[int, ...] = (3, 32, 32),
    width: int = 16,
    block: str = "auto",
) -> PreResNet:
    """Preactivated ResNet for CIFAR: 1,726,388 parameters with 164 layers and 100 classes.

    First weights are those of He et al. (2015) by fan-out.

    Args:
        depth: 9 n + 2 layers of bottlenecks, 6 n + 2 of basic blocks.
        num_classes: Outputs.
        input_shape: ``(channels, height, width)``.
        width: Maps of the stem.
        block: ``bottleneck``, ``basic``, or ``auto``: bottlenecks from 44 layers on, as in the
            code behind Granziol et al. (2021). In the paper of He et al. the network of 110
            layers has basic blocks.

    Reference: He et al. (2016), *Identity mappings in deep residual networks*.
    """
    channels, _, _ = check_image(num_classes, input_shape)
    check_count("width", width)
    check_choice("block", block, ("auto", "basic", "bottleneck"))
    if block == "auto":
        block = "bottleneck" if depth >= 44 else "basic"
    kind, period = (PreBlock, 6) if block == "basic" else (PreBottleneck, 9)
    if (depth - 2) % period:
        raise ValueError(f"block must fit {depth} layers, but {block} blocks need {period} n + 2")
    return PreResNet(channels, num_classes, kind, (depth - 2) // period, width)


@register("wideresnet16x4", depth=16, factor=4)
@register("wideresnet28x10", depth=28, factor=10)
def wideresnet(
    *,
    depth: int,
    factor: int,
    num_classes: int = 100,
    input_shape: tuple[int, ...] = (3, 32, 32),
    width: int = 16,
    dropout: float = 0.0,
) -> WideResNet:
    """WideResNet: 36,546,980 parameters with 28 layers, ten times as wide, and 100 classes.

    That figure has biases on the convolutions, as in the code behind Granziol et al. (2021); the
    36,536,884 without them are those of the paper. The stride is on the second convolution of a
    block. First weights are those of He et al. (2015) by fan-out, as the authors' code has them.

    Args:
        depth: 6 n + 4.
        factor: How many times as wide as a ResNet.
        num_classes: Outputs.
        input_shape: ``(channels, height, width)``.
        width: Maps of the stem, and of the first stage before widening.
        dropout: Between the convolutions of a block.

    Reference: Zagoruyko and Komodakis (2016), *Wide residual networks*.
    """
    channels, _, _ = check_image(num_classes, input_shape)
    check_count("width", width)
    check_range("dropout", dropout, low=0.0, high=1.0)
    return WideResNet(channels, num_classes, (depth - 4) // 6, width, factor, dropout)


def _projection(channels: int, maps: int, stride: int, *, bias: bool) -> nn.Module:
    if channels == maps and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, maps, 1, stride, bias=bias))
