"""What the builders check: shapes of samples, and names of activations."""

from torch import nn

from ritz._core.checks import check_choice, check_count

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "sigmoid": nn.Sigmoid,
}  # fmt: skip


def check_image(
    num_classes: int, input_shape: tuple[int, ...], *, side: int = 1
) -> tuple[int, int, int]:
    """Return ``(channels, height, width)``; raise unless the sides are at least ``side``."""
    check_count("num_classes", num_classes)
    if len(input_shape) != 3 or not all(_is_count(size) for size in input_shape):
        raise ValueError(f"input_shape must be (channels, height, width), got {tuple(input_shape)}")
    channels, height, width = input_shape
    if min(height, width) < side:
        raise ValueError(
            f"input_shape must have sides of at least {side}, got {tuple(input_shape)}"
        )
    return channels, height, width


def activation_named(name: str) -> type[nn.Module]:
    """Return the class of an activation."""
    check_choice("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def _is_count(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0
