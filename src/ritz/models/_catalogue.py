"""Models by name: ``create`` and the registry; checks of options that the builders share."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ritz._core.checks import check_choice, check_count, check_device, check_range, check_type
from ritz._core.random import resolve_generator
from ritz._core.registry import Registry
from ritz.models._initial_weights import draw_weights

Shape = tuple[int, ...]

# ------------------------------------------------------------------------------------------
# Checks and layers that the builders share.

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "sigmoid": nn.Sigmoid,
}  # fmt: skip


COUNTS = ["num_classes", "input_shape", "width", "hidden", "depth", "heads", "groups", "breadth"]
RATES = ["dropout", "input_dropout", "hidden_dropout", "embedding_dropout", "weight_drop"]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise unless counts are positive integers, rates in [0, 1], and the activation known."""
    for name, value in options.items():
        for number in value if isinstance(value, tuple | list) else (value,):
            if name in COUNTS:
                check_count(name, number)
            elif name in RATES:
                check_range(name, number, low=0.0, high=1.0)
    check_choice("activation", options.get("activation", "relu"), ACTIVATIONS)


def check_image(input_shape: Shape, *, side: int = 1) -> tuple[int, int, int]:
    """Return ``(channels, height, width)``; raise unless the sides are large enough."""
    if len(input_shape) != 3 or min(input_shape[1:]) < side:
        raise ValueError(
            f"input_shape must be (channels, height, width) with sides of at least {side}, "
            f"got {tuple(input_shape)}"
        )
    channels, height, width = input_shape
    return channels, height, width


def dropout_layer(rate: float, kind: type[nn.Module] = nn.Dropout) -> nn.Module:
    """Return a dropout layer, or the identity for rate 0."""
    return kind(rate) if rate else nn.Identity()


# ------------------------------------------------------------------------------------------
# Models by name.

Build = TypeVar("Build", bound=Callable[..., nn.Module])
Draw = Callable[[nn.Module, torch.Generator], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A registered model: its builder, the options that its name fixes, and its initial weights."""

    build: Callable[..., nn.Module]
    fixed: Mapping[str, Any]
    draw: Draw


_MODELS: Registry[Entry] = Registry("model", listing="ritz list models")


def register(name: str, *, draw: Draw = draw_weights, **fixed: Any) -> Callable[[Build], Build]:
    """Decorator that registers a builder as ``name``, with fixed options."""

    def add(build: Build) -> Build:
        _MODELS.register(name)(Entry(build=build, fixed=fixed, draw=draw))
        return build

    return add


def available() -> tuple[str, ...]:
    """Return the names of all models."""
    return tuple(_MODELS)


def options(name: str) -> tuple[str, ...]:
    """Return the names of the options that a model takes."""
    entry = _MODELS.find(name)
    return tuple(key for key in inspect.signature(entry.build).parameters if key not in entry.fixed)


def create(
    name: str,
    *,
    num_classes: int | None = None,
    input_shape: tuple[int, ...] | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **more: Any,
) -> nn.Module:
    """Return a new model, in train mode, with initial weights as published.

    The global generator is neither used nor seeded. The same generator gives the same network on
    every device and, up to rounding, in every dtype.

    Args:
        name: One of :func:`available`. Case, ``-`` and ``_`` are ignored.
        num_classes: Number of outputs, or size of the vocabulary of a language model. The default
            is that of the data of the paper, such as 100 for ``vgg16`` on CIFAR-100.
        input_shape: Shape of one sample: ``(channels, height, width)``, or ``(length,)`` for a
            language model. The default is that of the data of the paper.
        generator: Source of the initial weights. Defaults to a new generator with seed 0, so that
            repeated calls return the same weights.
        device: Device of the parameters. Defaults to torch's default device. On ``meta`` no
            weights are drawn.
        dtype: Data type of the parameters. Defaults to torch's default.
        **more: Options of the model; :func:`options` lists them.

    Example:
        >>> from ritz import models
        >>> model = models.create("vgg16", num_classes=100, device="meta")
        >>> sum(p.numel() for p in model.parameters())
        15291300
    """
    check_type("name", name, str, "a string")
    entry = _MODELS.find(name)
    shape = {"num_classes": num_classes, "input_shape": input_shape}
    # None stands for the default of the builder.
    chosen = {key: value for key, value in shape.items() if value is not None} | more
    known = options(name)
    if unknown := [key for key in chosen if key not in known]:
        raise TypeError(f"{name} has no option {unknown[0]!r}; it has {', '.join(known)}")
    check_options(chosen)
    with torch.device("meta"):  # no weights are drawn by the constructors of torch
        model = entry.build(**entry.fixed, **chosen).to(dtype=dtype)
    target = torch.get_default_device() if device is None else check_device(device)
    if target.type != "meta":
        model.to_empty(device=target)
        entry.draw(model, resolve_generator(generator))
    return model
