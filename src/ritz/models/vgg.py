"""VGG networks for CIFAR, with and without batch norm."""

from collections import OrderedDict

from torch import nn

from ritz._core.checks import check_count, check_range
from ritz.models.catalogue import register
from ritz.models.shapes import check_image

# Convolutions between poolings; the maps double until they are eight times the first.
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
    input_shape: tuple[int, ...] = (3, 32, 32),
    width: int = 64,
    hidden: int = 512,
    dropout: float = 0.5,
) -> nn.Sequential:
    """VGG for small images: 15,291,300 parameters for 16 layers and 100 classes.

    That figure (Granziol, thesis, 4.6.1) is the one without batch norm, with biases on the
    convolutions and a head of two hidden layers of 512 and dropout. Batch norm follows every
    convolution and adds 8,448. Names in the state are those of the published CIFAR code
    (``features.0.weight``, ``classifier.1.weight``).

    Args:
        depth: 11, 13, 16 or 19 as in the paper; 6 is one convolution between poolings, named as
            in Deep Curvature.
        batch_norm: Whether batch norm follows the convolutions.
        num_classes: Outputs.
        input_shape: ``(channels, height, width)``, sides of at least 32.
        width: Maps of the first convolution.
        hidden: Width of the two hidden linear layers.
        dropout: Before each hidden linear layer.

    Reference: Simonyan and Zisserman (2015), *Very deep convolutional networks for large-scale
    image recognition*, Table 1.
    """
    channels, rows, columns = check_image(num_classes, input_shape, side=32)
    check_count("width", width)
    check_count("hidden", hidden)
    check_range("dropout", dropout, low=0.0, high=1.0)
    features: list[nn.Module] = []
    for stage, count in enumerate(STAGES[depth]):
        for _ in range(count):
            maps = width * min(2**stage, 8)
            features.append(nn.Conv2d(channels, maps, 3, padding=1))
            features += [nn.BatchNorm2d(maps), nn.ReLU()] if batch_norm else [nn.ReLU()]
            channels = maps
        features.append(nn.MaxPool2d(2))
    pixels = (rows // 32) * (columns // 32)
    classifier = nn.Sequential(
        nn.Dropout(dropout), nn.Linear(channels * pixels, hidden), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )  # fmt: skip
    layers = {
        "features": nn.Sequential(*features),
        "flatten": nn.Flatten(),
        "classifier": classifier,
    }
    return nn.Sequential(OrderedDict(layers))


for _depth in STAGES:
    register(f"vgg{_depth}", depth=_depth, batch_norm=False)(vgg)
    register(f"vgg{_depth}_bn", depth=_depth, batch_norm=True)(vgg)
