"""ResNeXt for CIFAR: bottlenecks of grouped convolutions."""

import math
from typing import final

import torch
from torch import Tensor, nn

from ritz._core.checks import check_count
from ritz.models.catalogue import register
from ritz.models.initialising import draw_weights, fill, normal
from ritz.models.resnets import convolution
from ritz.models.shapes import check_image


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
