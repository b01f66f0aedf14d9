"""Residual networks: those of six n + 2 layers for CIFAR, and 18 and 50 layers for ImageNet."""

from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz._core.checks import check_count
from ritz.models.catalogue import register
from ritz.models.shapes import check_image


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
