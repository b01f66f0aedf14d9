"""Models by name: the registry, how a model is created, and its initial weights."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ritz._core.checks import check_choice, check_count, check_device, check_range, check_type
from ritz._core.random import resolve_generator
from ritz._core.registry import Registry

Shape = tuple[int, ...]

# ------------------------------------------------------------------------------------------
# Initial weights of layers, drawn from a generator.


def draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    r"""Fill every parameter and buffer of a model, layer by layer.

    Convolutions are :math:`\mathcal{N}(0, 2 / n_\text{out})` with
    :math:`n_\text{out} = k_h k_w c_\text{out}` and zero biases (He et al., 2015). Linear layers and
    their biases are uniform on :math:`\pm n_\text{in}^{-1/2}`, and so are recurrent layers, with
    :math:`n_\text{in}` the hidden size. Embeddings are uniform on :math:`\pm 0.1`. Normalisation
    layers start as the identity. Numbers are drawn in float32 on the device of the generator and
    then moved, so that the network depends on neither device nor dtype.
    """
    for module in model.modules():
        draw_layer(module, generator)


def draw_by_fan_in(model: nn.Module, generator: torch.Generator) -> None:
    r"""As :func:`draw_weights`, with convolutions uniform on :math:`\pm n_\text{in}^{-1/2}` too."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            _fan_in(module, generator)
        else:
            draw_layer(module, generator)


@singledispatch
def draw_layer(module: nn.Module, generator: torch.Generator) -> None:
    """Fill the tensors of a layer, not of its children; an unknown layer with tensors raises."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    if names := [name for name, _ in tensors]:
        raise TypeError(f"no initial weights are defined for {type(module).__name__}, with {names}")


@draw_layer.register
def _(module: nn.Conv2d, generator: torch.Generator) -> None:
    # This variance keeps that of the gradients through a layer with ReLU (He et al., 2015).
    rows, _, height, width = module.weight.shape
    normal(module.weight, math.sqrt(2 / (rows * height * width)), generator)
    fill(module.bias, 0.0)


@draw_layer.register(nn.Linear)
def _fan_in(module: nn.Linear | nn.Conv2d, generator: torch.Generator) -> None:
    # n_in is the number of weights of one output.
    bound = module.weight[0].numel() ** -0.5
    uniform(module.weight, bound, generator)
    uniform(module.bias, bound, generator)


@draw_layer.register
def _(module: nn.LSTM, generator: torch.Generator) -> None:
    # torch's own choice: biases are drawn too.
    for parameter in module.parameters(recurse=False):
        uniform(parameter, module.hidden_size**-0.5, generator)


@draw_layer.register
def _(module: nn.Embedding, generator: torch.Generator) -> None:
    uniform(module.weight, 0.1, generator)


@draw_layer.register(_BatchNorm)
@draw_layer.register(nn.LayerNorm)
def _(module: _BatchNorm | nn.LayerNorm, generator: torch.Generator) -> None:
    # Scale 1 and shift 0, without random numbers.
    module.reset_parameters()


@torch.no_grad()
def normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with normal random numbers of mean zero."""
    # Drawn on the device of the generator and then moved: the same weights on every device.
    noise = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
    tensor.copy_(noise.normal_(0.0, std, generator=generator))


@torch.no_grad()
def uniform(tensor: Tensor | None, bound: float, generator: torch.Generator) -> None:
    """Fill with numbers uniform between ``-bound`` and ``bound``; ``None`` is ignored."""
    if tensor is not None:
        noise = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
        tensor.copy_(noise.uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def fill(tensor: Tensor | None, value: float) -> None:
    """Fill with one number; ``None`` is ignored."""
    if tensor is not None:
        tensor.fill_(value)


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
    """A builder, the options that the name fixes, and the initial weights."""

    build: Callable[..., nn.Module]
    fixed: Mapping[str, Any]
    draw: Draw


_MODELS: Registry[Entry] = Registry("model")


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
