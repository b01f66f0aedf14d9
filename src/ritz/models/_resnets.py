"""Residual networks: ResNet, PreResNet, WideResNet and ResNeXt."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz._core.checks import check_choice
from ritz.models._catalogue import Shape, check_image, dropout_layer, register
from ritz.models._initial_weights import draw_weights, fill, normal

# ------------------------------------------------------------------------------------------
# Residual blocks, and networks made of them. The names of layers are those of published weights.


def convolution(
    channels: int, maps: int, kernel: int, stride: int = 1, *, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    """Return a padded convolution, which changes the size of an image by its stride only."""
    return nn.Conv2d(channels, maps, kernel, stride, padding=kernel // 2, groups=groups, bias=bias)


@final
class Residual(nn.Module):
    """Convolutions around a shortcut, :math:`s(x) + f(x)`.

    Batch norm and ReLU follow each convolution, and the last ReLU follows the sum (He et al.,
    2016a). With ``pre`` they precede each convolution (He et al., 2016b).

    Args:
        convolutions: The convolutions of :math:`f`; layers are named ``conv1``, ``bn1`` and so on.
        shortcut: :math:`s`.
        pre: Whether norm and ReLU come first.
        name: Name of the shortcut.
        dropout: Dropout after the first convolution; ``None`` adds no such layer.
    """

    def __init__(
        self,
        convolutions: Sequence[nn.Conv2d],
        shortcut: nn.Module,
        *,
        pre: bool = False,
        name: str = "downsample",
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.pre, self.name, path = pre, name, []
        for number, layer in enumerate(convolutions, 1):
            conv, norm = f"conv{number}", f"bn{number}"
            maps = layer.in_channels if pre else layer.out_channels
            modules: dict[str, nn.Module] = {conv: layer, norm: nn.BatchNorm2d(maps)}
            # The order of registration is that of the published code: weights are drawn in it.
            for key in (norm, conv) if pre else (conv, norm):
                self.add_module(key, modules[key])
            path += [norm, "relu", conv] if pre else [conv, norm, "relu"]
            if number == 1 and dropout is not None:
                self.add_module("dropout", dropout_layer(dropout))
                path.append("dropout")
        self.add_module(name, shortcut)
        self.path = path if pre else path[:-1]

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, maps, h / stride, w / stride)``."""
        inner = x
        for name in self.path:
            inner = torch.relu(inner) if name == "relu" else self.get_submodule(name)(inner)
        total: Tensor = inner + self.get_submodule(self.name)(x)
        return total if self.pre else torch.relu(total)


@final
class Subsample(nn.Module):
    """The shortcut without parameters (option A): every other pixel, and channels of zeros."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra, self.stride = extra, stride

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, c + extra, h / stride, w / stride)``."""
        # The missing channels are zeros, half of them before and half behind the others.
        near = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(near, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


def shortcut(
    channels: int, maps: int, stride: int, *, norm: bool = False, bias: bool = False
) -> nn.Module:
    """Return the identity if it fits, otherwise a convolution of 1 x 1, with or without norm."""
    if channels == maps and stride == 1:
        return nn.Identity()
    layer = convolution(channels, maps, 1, stride, bias=bias)
    return nn.Sequential(layer, nn.BatchNorm2d(maps)) if norm else nn.Sequential(layer)


def basic(
    channels: int, width: int, stride: int, *, pre: bool = False, project: bool = True
) -> Residual:
    """Return a block of two convolutions of 3 x 3."""
    layers = [convolution(channels, width, 3, stride), convolution(width, width, 3)]
    # Before an activation the shortcut is normalised like the other branch.
    around = shortcut(channels, width, stride, norm=not pre)
    if not project and not isinstance(around, nn.Identity):
        around = Subsample(width - channels, stride)
    return Residual(layers, around, pre=pre)


def bottleneck(
    channels: int,
    width: int,
    stride: int,
    *,
    maps: int | None = None,
    groups: int = 1,
    pre: bool = False,
    name: str = "downsample",
) -> Residual:
    """Return a block of convolutions of 1 x 1, 3 x 3 with the stride, and 1 x 1 to ``maps``."""
    maps = 4 * width if maps is None else maps
    layers = [
        convolution(channels, width, 1),
        convolution(width, width, 3, stride, groups=groups),
        convolution(width, maps, 1),
    ]
    return Residual(layers, shortcut(channels, maps, stride, norm=not pre), pre=pre, name=name)


def wide(channels: int, width: int, stride: int, *, dropout: float) -> Residual:
    """Return a block of two convolutions of 3 x 3 with biases, the second one strided."""
    layers = [
        convolution(channels, width, 3, bias=True),
        convolution(width, width, 3, stride, bias=True),
    ]
    around = shortcut(channels, width, stride, bias=True)
    return Residual(layers, around, pre=True, name="shortcut", dropout=dropout)


def stem(channels: int, width: int, kernel: int = 3, stride: int = 1) -> dict[str, nn.Module]:
    """Return the first convolution and its norm, by name."""
    return {"conv1": convolution(channels, width, kernel, stride), "bn1": nn.BatchNorm2d(width)}


@final
class ResNet(nn.Module):
    """First layers, stages of blocks, a last norm, and a head on the mean over positions.

    ReLU follows the norms. Each stage doubles the width, and each but the first halves the sides.

    Args:
        first: First layers by name.
        block: Makes a block of so many input channels, width and stride.
        counts: Number of blocks of each stage.
        sizes: Input channels and width of the first stage, and number of outputs.
        expansion: Maps that a block returns, relative to its width.
        norm: Name of a norm after the last stage, or ``None``.
        head: Name of the head.
    """

    def __init__(
        self,
        first: Mapping[str, nn.Module],
        block: Callable[[int, int, int], Residual],
        counts: Sequence[int],
        sizes: tuple[int, int, int],
        *,
        expansion: int = 1,
        norm: str | None = None,
        head: str = "fc",
    ) -> None:
        super().__init__()
        layers, (channels, width, num_classes) = dict(first), sizes
        for stage, count in enumerate(counts):
            blocks = []
            for index in range(count):
                # The first block of every later stage halves the sides.
                stride = 2 if stage and not index else 1
                blocks.append(block(channels, width * 2**stage, stride))
                channels = expansion * width * 2**stage
            layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
        if norm is not None:
            layers[norm] = nn.BatchNorm2d(channels)
        self.path, self.head = list(layers), head
        for key, layer in (*layers.items(), (head, nn.Linear(channels, num_classes))):
            self.add_module(key, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(n, c, h, w)`` to logits ``(n, num_classes)``."""
        for name in self.path:
            x = self.get_submodule(name)(x)
            x = torch.relu(x) if name.startswith("bn") else x
        logits: Tensor = self.get_submodule(self.head)(x.mean((2, 3)))
        return logits


# ------------------------------------------------------------------------------------------
# ResNets: those of 6 n + 2 layers for CIFAR, and of 18 and 50 layers for ImageNet.


@register("resnet20", depth=20)
@register("resnet44", depth=44)
@register("resnet44x2", depth=44, width=32)
@register("resnet56", depth=56)
def cifar_resnet(
    *, depth: int, num_classes: int = 10, input_shape: Shape = (3, 32, 32), width: int = 16
) -> ResNet:
    """ResNet for CIFAR, shortcuts without parameters: 658,586 parameters at 44 layers, 10 classes.

    ``resnet44x2`` has twice the filters (Wen et al., 2020, *Covariance noise*, 5.1). Initial
    weights are Kaiming normal by fan-out (He et al., 2015).

    Args:
        depth: Number of layers, 6 n + 2.
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``.
        width: Number of channels in the first stage.

    Reference: He et al. (2016), *Deep residual learning for image recognition*, 4.2.
    """
    channels, _, _ = check_image(input_shape)
    # Three stages of n blocks of two layers, the first convolution and the head: 6 n + 2 layers.
    block, counts = partial(basic, project=False), [(depth - 2) // 6] * 3
    return ResNet(stem(channels, width), block, counts, (width, width, num_classes))


@register("resnet18", depth=18)
@register("resnet50", depth=50)
def image_resnet(
    *, depth: int, num_classes: int = 1000, input_shape: Shape = (3, 224, 224), width: int = 64
) -> ResNet:
    """ResNet for ImageNet: 11,689,512 parameters with 18 layers, 25,557,032 with 50.

    The stride of a bottleneck is on its 3 x 3 convolution. Names of parameters are those of
    torchvision, so its weights load. Initial weights are Kaiming normal by fan-out (He et al.,
    2015).

    Args:
        depth: 18 or 50.
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``.
        width: Number of channels of the first convolution.

    Reference: He et al. (2016), *Deep residual learning for image recognition*, Table 1.
    """
    channels, _, _ = check_image(input_shape)
    # 18 = 2 (2 + 2 + 2 + 2) + 2 layers of basic blocks, 50 = 3 (3 + 4 + 6 + 3) + 2 of bottlenecks.
    expansion, counts = (1, (2, 2, 2, 2)) if depth == 18 else (4, (3, 4, 6, 3))
    block = basic if depth == 18 else bottleneck
    first = stem(channels, width, 7, 2) | {"maxpool": nn.MaxPool2d(3, stride=2, padding=1)}
    return ResNet(first, block, counts, (width, width, num_classes), expansion=expansion)


# ------------------------------------------------------------------------------------------
# Networks whose blocks begin with norm and ReLU: PreResNet and WideResNet.


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
    input_shape: Shape = (3, 32, 32),
    width: int = 16,
    block: str = "auto",
) -> ResNet:
    """Preactivated ResNet for CIFAR: 1,726,388 parameters with 164 layers and 100 classes.

    Initial weights are Kaiming normal by fan-out (He et al., 2015).

    Args:
        depth: Number of layers: 9 n + 2 with bottlenecks, 6 n + 2 with basic blocks.
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``.
        width: Number of channels of the first convolution.
        block: ``bottleneck``, ``basic``, or ``auto``, which is bottlenecks from 44 layers on, as in
            the code of Granziol et al. (2021). The network of 110 layers of He et al. has
            ``block="basic"``.

    Reference: He et al. (2016), *Identity mappings in deep residual networks*.
    """
    channels, _, _ = check_image(input_shape)
    check_choice("block", block, ("auto", "basic", "bottleneck"))
    if block == "auto":
        block = "bottleneck" if depth >= 44 else "basic"
    make, period, expansion = (basic, 6, 1) if block == "basic" else (bottleneck, 9, 4)
    if (depth - 2) % period:
        raise ValueError(f"block must fit {depth} layers, but {block} blocks need {period} n + 2")
    first, counts = {"conv1": convolution(channels, width, 3)}, [(depth - 2) // period] * 3
    block_of, sizes = partial(make, pre=True), (width, width, num_classes)
    return ResNet(first, block_of, counts, sizes, expansion=expansion, norm="bn")


@register("wideresnet16x4", depth=16, factor=4)
@register("wideresnet28x10", depth=28, factor=10)
def wideresnet(
    *,
    depth: int,
    factor: int,
    num_classes: int = 100,
    input_shape: Shape = (3, 32, 32),
    width: int = 16,
    dropout: float = 0.0,
) -> ResNet:
    """WideResNet: 36,546,980 parameters with 28 layers, ten times as wide, and 100 classes.

    This number includes biases of the convolutions, as in the code of Granziol et al. (2021);
    without them it is 36,536,884 as in the paper. The stride is on the second convolution of a
    block. Initial weights are Kaiming normal by fan-out (He et al., 2015), as in the code of
    the authors.

    Args:
        depth: Number of layers, 6 n + 4.
        factor: Width relative to a ResNet.
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``.
        width: Number of channels of the first convolution, and of the first stage before widening.
        dropout: Probability of dropout between the convolutions of a block.

    Reference: Zagoruyko and Komodakis (2016), *Wide residual networks*.
    """
    channels, _, _ = check_image(input_shape)
    first = {"conv1": convolution(channels, width, 3, bias=True)}
    block, counts = partial(wide, dropout=dropout), [(depth - 4) // 6] * 3
    sizes = (width, factor * width, num_classes)
    return ResNet(first, block, counts, sizes, norm="bn1", head="linear")


# ------------------------------------------------------------------------------------------
# ResNeXt for CIFAR: bottlenecks of grouped convolutions.


def draw_resnext(model: nn.Module, generator: torch.Generator) -> None:
    r"""As :func:`draw_weights`, but linear weights :math:`\mathcal{N}(0, 2 / n_\text{in})`."""
    draw_weights(model, generator)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            normal(module.weight, math.sqrt(2 / module.in_features), generator)
            fill(module.bias, 0.0)


@register("resnext29_8x64", draw=draw_resnext)
def resnext29(
    *,
    num_classes: int = 100,
    input_shape: Shape = (3, 32, 32),
    groups: int = 8,
    breadth: int = 64,
    width: int = 64,
) -> ResNet:
    """ResNeXt-29 (8 x 64d): 34,518,948 parameters for 100 classes, 34.4 million for 10.

    Initial weights are Kaiming normal (He et al., 2015), by fan-out, and by fan-in in the linear
    layer.

    Args:
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``.
        groups: Number of groups of the convolutions (cardinality).
        breadth: Number of channels per group in the first stage.
        width: Number of channels of the first convolution; stages have 4, 8 and 16 times as many.

    Reference: Xie et al. (2017), *Aggregated residual transformations for deep neural networks*,
    5.3.
    """
    channels, _, _ = check_image(input_shape)

    def block(channels: int, maps: int, stride: int) -> Residual:
        # Groups keep their number and double their breadth with each stage, as channels do.
        inner = groups * breadth * maps // (4 * width)
        return bottleneck(channels, inner, stride, maps=maps, groups=groups, name="shortcut")

    return ResNet(stem(channels, width), block, (3, 3, 3), (width, 4 * width, num_classes))
