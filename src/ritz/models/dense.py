"""Linear layers alone: logistic regression and perceptrons."""

import math
from collections.abc import Sequence

from torch import nn

from ritz._core.checks import check_count
from ritz.models.catalogue import register
from ritz.models.shapes import activation_named


@register("logistic")
def logistic(*, num_classes: int = 10, input_shape: tuple[int, ...] = (1, 28, 28)) -> nn.Sequential:
    """Softmax regression: one linear layer, 7,850 parameters on MNIST.

    Reference: Granziol (2020), *Flatness is a false friend*, section 5.
    """
    return mlp(num_classes=num_classes, input_shape=input_shape, hidden=())


@register("mlp")
def mlp(
    *,
    num_classes: int = 10,
    input_shape: tuple[int, ...] = (1, 28, 28),
    hidden: int | Sequence[int] = (100,),
    activation: str = "relu",
) -> nn.Sequential:
    """A perceptron, by default with one hidden layer of 100 units.

    The 9,960 parameters of Granziol (2020), *Flatness is a false friend*, section 5, are those of
    ``hidden=(10, 100)`` on MNIST.

    Args:
        num_classes: Outputs.
        input_shape: Any; samples are flattened.
        hidden: Widths of the hidden layers, or that of the only one.
        activation: ``relu``, ``tanh``, ``gelu``, ``silu`` or ``sigmoid``.
    """
    check_count("num_classes", num_classes)
    for size in input_shape:
        check_count("input_shape", size)
    # Text is a sequence of characters, none of which is a width.
    widths = (hidden,) if isinstance(hidden, int | float | str) else hidden
    for width in widths:
        check_count("hidden", width)
    make, features = activation_named(activation), math.prod(input_shape)
    layers: list[nn.Module] = [nn.Flatten()]
    for width in widths:
        layers += [nn.Linear(features, width), make()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, num_classes))
