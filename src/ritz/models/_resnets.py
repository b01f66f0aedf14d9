"""Residual networks: ResNet, PreResNet, WideResNet and ResNeXt."""

import math
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz._core.checks import check_choice, check_count, check_range
from ritz.models._catalogue import check_image, draw_weights, fill, normal, register

# ------------------------------------------------------------------------------------------
# Residual networks: those of six n + 2 layers for CIFAR, and 18 and 50 layers for ImageNet.


def convolution(channels: int, maps: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size but for its stride."""
    return nn.Conv2d(channels, maps, kernel, stride, padding=kernel // 2, bias=False)


@final
class Subsample(nn.Module):
    """The shortcut without parameters (option A): every other pixel, and maps of zeros."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra, self.stride = extra, stride

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, c + extra, h / stride, w / stride)``."""
        near = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(near, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


@final
class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3, each with batch norm, around a shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, *, projection: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(channels, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width, stride, projection)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, width, h / stride, w / stride)``."""
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


@final
class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 (with the stride) and 1 x 1 to four times the maps."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, *, projection: bool) -> None:
        super().__init__()
        maps = self.expansion * width
        self.conv1, self.bn1 = convolution(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, maps, 1), nn.BatchNorm2d(maps)
        self.downsample = _shortcut(channels, maps, stride, projection)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, 4 width, h / stride, w / stride)``."""
        inner = torch.relu(self.bn1(self.conv1(x)))
        inner = torch.relu(self.bn2(self.conv2(inner)))
        return torch.relu(self.bn3(self.conv3(inner)) + self.downsample(x))


Block = type[BasicBlock] | type[Bottleneck]


@final
class CifarResNet(nn.Module):
    """Three stages of basic blocks at full, half and quarter size, and a mean over positions."""

    def __init__(self, channels: int, num_classes: int, blocks: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(channels, width, 3), nn.BatchNorm2d(width)
        widths = (width, width, 2 * width, 4 * width)
        self.layer1, self.layer2, self.layer3 = (
            _stage(BasicBlock, before, after, blocks, stride, projection=False)
            for (before, after), stride in zip(pairwise(widths), (1, 2, 2), strict=True)
        )
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(n, c, h, w)`` to logits ``(n, num_classes)``."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@final
class ImageResNet(nn.Module):
    """A strided stem, four stages of blocks, and a mean over positions."""

    def __init__(
        self, channels: int, num_classes: int, block: Block, blocks: tuple[int, ...], width: int
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(channels, width, 7, stride=2), nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inside = [width * 2**stage for stage in range(4)]
        before = [width] + [block.expansion * inner for inner in inside[:-1]]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(block, channels, inner, count, stride, projection=True)
            for channels, inner, count, stride in zip(
                before, inside, blocks, (1, 2, 2, 2), strict=True
            )
        )
        self.fc = nn.Linear(block.expansion * inside[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(n, c, h, w)`` to logits ``(n, num_classes)``."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@register("resnet20", depth=20)
@register("resnet44", depth=44)
@register("resnet44x2", depth=44, width=32)
@register("resnet56", depth=56)
def cifar_resnet(
    *,
    depth: int,
    num_classes: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    width: int = 16,
) -> CifarResNet:
    """ResNet for CIFAR, shortcuts without parameters: 658,586 of them at 44 layers, 10 classes.

    ``resnet44x2`` has twice the filters (Wen et al., 2020, *Covariance noise*, 5.1). First weights
    are those of He et al. (2015) by fan-out.

    Args:
        depth: 6 n + 2.
        num_classes: Outputs.
        input_shape: ``(channels, height, width)``.
        width: Maps of the first stage.

    Reference: He et al. (2016), *Deep residual learning for image recognition*, 4.2.
    """
    channels, _, _ = check_image(num_classes, input_shape)
    check_count("width", width)
    return CifarResNet(channels, num_classes, (depth - 2) // 6, width)


@register("resnet18", depth=18)
@register("resnet50", depth=50)
def image_resnet(
    *,
    depth: int,
    num_classes: int = 1000,
    input_shape: tuple[int, ...] = (3, 224, 224),
    width: int = 64,
) -> ImageResNet:
    """ResNet for ImageNet: 11,689,512 parameters with 18 layers, 25,557,032 with 50.

    The stride of a bottleneck is on its 3 x 3 convolution, and names in the state are those of
    torchvision, whose weights load. First weights are those of He et al. (2015) by fan-out.

    Args:
        depth: 18 or 50.
        num_classes: Outputs.
        input_shape: ``(channels, height, width)``.
        width: Maps of the stem.

    Reference: He et al. (2016), *Deep residual learning for image recognition*, Table 1.
    """
    channels, _, _ = check_image(num_classes, input_shape)
    check_count("width", width)
    block: Block = BasicBlock if depth == 18 else Bottleneck
    blocks = (2, 2, 2, 2) if depth == 18 else (3, 4, 6, 3)
    return ImageResNet(channels, num_classes, block, blocks, width)


def _shortcut(channels: int, maps: int, stride: int, projection: bool) -> nn.Module:
    if channels == maps and stride == 1:
        return nn.Identity()
    if projection:
        return nn.Sequential(convolution(channels, maps, 1, stride), nn.BatchNorm2d(maps))
    return Subsample(maps - channels, stride)


def _stage(
    block: Block, channels: int, width: int, count: int, stride: int, *, projection: bool
) -> nn.Sequential:
    maps = block.expansion * width
    first = block(channels, width, stride, projection=projection)
    rest = (block(maps, width, 1, projection=projection) for _ in range(count - 1))
    return nn.Sequential(first, *rest)


# ------------------------------------------------------------------------------------------
# Residual networks whose blocks begin with norm and ReLU: PreResNet and WideResNet.


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


# ------------------------------------------------------------------------------------------
# ResNeXt for CIFAR: bottlenecks of grouped convolutions.


@final
class GroupedBottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 in groups, and 1 x 1, each with batch norm."""

    def __init__(self, channels: int, inner: int, maps: int, groups: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(channels, inner, 1), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = convolution(inner, maps, 1), nn.BatchNorm2d(maps)
        self.shortcut: nn.Module = nn.Identity()
        if channels != maps:
            projection = convolution(channels, maps, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(maps))

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, maps, h / stride, w / stride)``."""
        inner = torch.relu(self.bn1(self.conv1(x)))
        inner = torch.relu(self.bn2(self.conv2(inner)))
        return torch.relu(self.bn3(self.conv3(inner)) + self.shortcut(x))


@final
class ResNeXt(nn.Module):
    """Three stages of bottlenecks, and a mean over positions."""

    def __init__(
        self, channels: int, num_classes: int, blocks: int, groups: int, breadth: int, width: int
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(channels, width, 3), nn.BatchNorm2d(width)
        before, stages = width, []
        for stage in range(3):
            inner, maps = groups * breadth * 2**stage, 4 * width * 2**stage
            parts = [GroupedBottleneck(before, inner, maps, groups, 2 if stage else 1)]
            parts += [GroupedBottleneck(maps, inner, maps, groups, 1) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*parts))
            before = maps
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(n, c, h, w)`` to logits ``(n, num_classes)``."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def draw_resnext(model: nn.Module, generator: torch.Generator) -> None:
    r"""As elsewhere, but the linear layer :math:`\mathcal{N}(0, 2 / n_\text{in})`, biases zero."""
    draw_weights(model, generator)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            normal(module.weight, math.sqrt(2 / module.in_features), generator)
            fill(module.bias, 0.0)


@register("resnext29_8x64", draw=draw_resnext)
def resnext29(
    *,
    num_classes: int = 100,
    input_shape: tuple[int, ...] = (3, 32, 32),
    groups: int = 8,
    breadth: int = 64,
    width: int = 64,
) -> ResNeXt:
    """ResNeXt-29 (8 x 64d): 34.4 million parameters (34,518,948 for 100 classes).

    First weights are those of He et al. (2015) by fan-out, by fan-in in the linear layer.

    Args:
        num_classes: Outputs.
        input_shape: ``(channels, height, width)``.
        groups: Cardinality.
        breadth: Maps of a group in the first stage.
        width: Maps of the stem; a stage puts out four times as many, doubling.

    Reference: Xie et al. (2017), *Aggregated residual transformations for deep neural networks*,
    5.3.
    """
    channels, _, _ = check_image(num_classes, input_shape)
    for name, value in (("groups", groups), ("breadth", breadth), ("width", width)):
        check_count(name, value)
    return ResNeXt(channels, num_classes, 3, groups, breadth, width)
