"""Feed-forward networks: logistic regression, perceptrons, LeNet, AlexNet, AllCNN, VGG."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from ritz.models._catalogue import ACTIVATIONS, Shape, check_image, register
from ritz.models._initial_weights import draw_by_fan_in, fill, normal

# ------------------------------------------------------------------------------------------
# Logistic regression and perceptrons.


@register("logistic", hidden=(), activation="relu")
@register("mlp")
def mlp(
    *,
    num_classes: int = 10,
    input_shape: Shape = (1, 28, 28),
    hidden: int | Sequence[int] = (100,),
    activation: str = "relu",
) -> nn.Sequential:
    """Multilayer perceptron, by default with one hidden layer of 100 units.

    ``logistic`` has none: softmax regression, with 7,850 parameters on MNIST. The 9,960 parameters
    of Granziol (2020), *Flatness is a false friend*, section 5, are those of ``hidden=(10, 100)``.

    Args:
        num_classes: Number of outputs.
        input_shape: Any shape; samples are flattened.
        hidden: Widths of the hidden layers, or the width of one hidden layer.
        activation: ``relu``, ``tanh``, ``gelu``, ``silu`` or ``sigmoid``.
    """
    # `features` is the number of inputs of the next layer.
    make, features = ACTIVATIONS[activation], math.prod(input_shape)
    layers: list[nn.Module] = [nn.Flatten()]
    for width in (hidden,) if isinstance(hidden, int) else hidden:
        layers += [nn.Linear(features, width), make()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, num_classes))


# ------------------------------------------------------------------------------------------
# Shallow convolutional networks: LeNet, AlexNet for CIFAR and the all-convolutional network.


@register("lenet", draw=draw_by_fan_in)
def lenet(
    *,
    num_classes: int = 10,
    input_shape: Shape = (1, 28, 28),
    width: int = 6,
    hidden: tuple[int, int] = (120, 84),
    activation: str = "relu",
) -> nn.Sequential:
    """LeNet-5 with max pooling: 61,706 parameters on MNIST.

    Two convolutions of 5 x 5 and three linear layers. The first convolution is padded, because
    MNIST images of 28 x 28 lack the margin of the 32 x 32 images of the paper.

    Args:
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``, sides of at least 12.
        width: Number of channels of the first convolution; the second has 16/6 times as many.
        hidden: Widths of the two hidden linear layers.
        activation: ``relu``, or ``tanh`` as in the paper.

    Reference: LeCun et al. (1998), *Gradient-based learning applied to document recognition*.
    """
    channels, rows, columns = check_image(input_shape, side=12)
    # A single width, which the perceptron takes, would be ambiguous here.
    if not isinstance(hidden, tuple | list) or len(hidden) != 2:
        raise ValueError(f"hidden must be two widths, got {hidden!r}")
    make, second = ACTIVATIONS[activation], round(width * 16 / 6)
    # Pooling halves a side, and the second convolution, without padding, takes four pixels of it.
    features = second * ((rows // 2 - 4) // 2) * ((columns // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, padding=2), make(), nn.MaxPool2d(2),
        nn.Conv2d(width, second, 5), make(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, hidden[0]), make(),
        nn.Linear(hidden[0], hidden[1]), make(),
        nn.Linear(hidden[1], num_classes),
    )  # fmt: skip


@register("alexnet", draw=draw_by_fan_in)
def alexnet(
    *, num_classes: int = 10, input_shape: Shape = (3, 32, 32), width: int = 64
) -> nn.Sequential:
    """AlexNet cut to CIFAR: five convolutions and one linear layer, 2,472,266 parameters.

    The convolutions and strides of single-column AlexNet, padded so that an image of 32 x 32
    becomes one pixel, as in the code of Granziol et al. (2021), B.4.

    Args:
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``, sides of at least 29.
        width: Number of channels of the first convolution; the others have 3, 6, 4 and 4 times as
            many.

    Reference: Krizhevsky et al. (2012), *ImageNet classification with deep convolutional neural
    networks*.
    """
    channels, rows, columns = check_image(input_shape, side=29)
    last = 4 * width
    # The first stride leaves ceil(side / 4), and three poolings an eighth of that.
    features = last * math.prod((side + 3) // 4 // 8 for side in (rows, columns))
    layers = nn.Sequential(
        nn.Conv2d(channels, width, 11, stride=4, padding=5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 3 * width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(3 * width, 6 * width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(6 * width, last, 3, padding=1), nn.ReLU(),
        nn.Conv2d(last, last, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    )  # fmt: skip
    return _with_classifier(layers, nn.Linear(features, num_classes))


def _with_classifier(features: nn.Module, classifier: nn.Module) -> nn.Sequential:
    # The names of the published CIFAR code, whose weights load.
    layers = {"features": features, "flatten": nn.Flatten(), "classifier": classifier}
    return nn.Sequential(OrderedDict(layers))


def draw_allcnn(model: nn.Module, generator: torch.Generator) -> None:
    r"""Weights :math:`\mathcal{N}(0, 2 / (n_\text{in} + n_\text{out}))` (Glorot), biases 0.1."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            rows, columns, *sides = module.weight.shape
            # Var = 2 / (n_in + n_out): a compromise of forward and backward scale.
            normal(module.weight, math.sqrt(2 / ((rows + columns) * math.prod(sides))), generator)
            fill(module.bias, 0.1)


@register("allcnn", draw=draw_allcnn)
def allcnn(
    *,
    num_classes: int = 100,
    input_shape: Shape = (3, 32, 32),
    width: int = 96,
    dropout: float = 0.5,
    input_dropout: float = 0.2,
) -> nn.Sequential:
    """All-CNN-C, nine convolutions: 1,387,108 parameters on CIFAR-100.

    The network of nine layers of Granziol (2020), *Flatness is a false friend*, section 5. It has
    strides instead of pooling, and global average pooling after a final ReLU instead of a linear
    layer, as in the paper. Glorot weights and biases of 0.1 as in Deep Curvature and DeepOBS.

    Args:
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``, sides of at least 9.
        width: Number of channels of the first three convolutions; the others have twice as many.
        dropout: Probability of dropout after each strided convolution.
        input_dropout: Probability of dropout of the input.

    Reference: Springenberg et al. (2015), *Striving for simplicity: the all convolutional net*.
    """
    channels, _, _ = check_image(input_shape, side=9)
    wide = 2 * width
    layers: list[nn.Module] = [nn.Dropout(input_dropout)]
    plan = [
        (width, 3, 1, 1), (width, 3, 1, 1), (width, 3, 2, 1),
        (wide, 3, 1, 1), (wide, 3, 1, 1), (wide, 3, 2, 1),
        (wide, 3, 1, 0), (wide, 1, 1, 0), (num_classes, 1, 1, 0),
    ]  # fmt: skip
    for maps, kernel, stride, padding in plan:
        layers += [nn.Conv2d(channels, maps, kernel, stride, padding), nn.ReLU()]
        channels = maps
        if stride == 2:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


# ------------------------------------------------------------------------------------------
# VGG networks for CIFAR, with and without batch norm.

# Number of convolutions before each pooling. The number of channels doubles with each stage, up to
# eight times the first.
STAGES = {
    6: (1, 1, 1, 1, 1),
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}


def vgg(
    *,
    depth: int,
    batch_norm: bool,
    num_classes: int = 100,
    input_shape: Shape = (3, 32, 32),
    width: int = 64,
    hidden: int = 512,
    dropout: float = 0.5,
) -> nn.Sequential:
    """VGG for small images: 15,291,300 parameters for 16 layers and 100 classes.

    This number (*Spectral Machine Learning*, 4.6.1) is without batch norm. The convolutions have
    biases, and the head has two hidden layers of 512 and dropout. Batch norm follows every
    convolution and adds 8,448. Names of parameters are those of the published CIFAR code
    (``features.0.weight``, ``classifier.1.weight``).

    Args:
        depth: 11, 13, 16 or 19 as in the paper; 6 has one convolution before each pooling, named
            as in Deep Curvature.
        batch_norm: Add batch norm after the convolutions.
        num_classes: Number of outputs.
        input_shape: ``(channels, height, width)``, sides of at least 32.
        width: Number of channels of the first convolution.
        hidden: Width of the two hidden linear layers.
        dropout: Probability of dropout before each hidden linear layer.

    Reference: Simonyan and Zisserman (2015), *Very deep convolutional networks for large-scale
    image recognition*, Table 1.
    """
    channels, rows, columns = check_image(input_shape, side=32)
    features: list[nn.Module] = []
    for stage, count in enumerate(STAGES[depth]):
        for _ in range(count):
            maps = width * min(2**stage, 8)
            features.append(nn.Conv2d(channels, maps, 3, padding=1))
            features += [nn.BatchNorm2d(maps), nn.ReLU()] if batch_norm else [nn.ReLU()]
            channels = maps
        features.append(nn.MaxPool2d(2))
    # Five poolings leave 1/32 of each side.
    pixels = (rows // 32) * (columns // 32)
    classifier = nn.Sequential(
        nn.Dropout(dropout), nn.Linear(channels * pixels, hidden), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )  # fmt: skip
    return _with_classifier(nn.Sequential(*features), classifier)


for _depth in STAGES:
    register(f"vgg{_depth}", depth=_depth, batch_norm=False)(vgg)
    register(f"vgg{_depth}_bn", depth=_depth, batch_norm=True)(vgg)
