"""Models by name: what there is, how one is made, and its first weights."""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ritz._core.checks import check_choice, check_count, check_device
from ritz._core.random import resolve_generator
from ritz._core.registry import Registry

# ------------------------------------------------------------------------------------------
# First weights of layers, drawn from a generator alone.


def draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    r"""Fill every parameter and buffer of a model, layer by layer.

    Convolutions are :math:`\mathcal{N}(0, 2 / n_\text{out})` with
    :math:`n_\text{out} = k_h k_w c_\text{out}` and zero biases (He et al., 2015); linear layers
    uniform on :math:`\pm n_\text{in}^{-1/2}`, biases too; recurrent ones likewise with the hidden
    size; embeddings uniform on :math:`\pm 0.1`; norms the identity. Numbers are drawn in
    float32 on the device of the generator and then moved, so that neither device nor dtype
    changes the network.
    """
    for module in model.modules():
        draw_layer(module, generator)


def draw_by_fan_in(model: nn.Module, generator: torch.Generator) -> None:
    r"""As :func:`draw_weights`, but convolutions too uniform on :math:`\pm n_\text{in}^{-1/2}`."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            _fan_in(module.weight, module.bias, generator)
        else:
            draw_layer(module, generator)


@singledispatch
def draw_layer(module: nn.Module, generator: torch.Generator) -> None:
    """Fill what a layer owns itself; one of an unknown kind raises if it owns anything."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    own += [name for name, _ in module.named_buffers(recurse=False)]
    if own:
        raise TypeError(f"no first weights are known for {type(module).__name__}, which owns {own}")


@draw_layer.register
def _(module: nn.Conv2d, generator: torch.Generator) -> None:
    rows, _, height, width = module.weight.shape
    normal(module.weight, math.sqrt(2 / (rows * height * width)), generator)
    fill(module.bias, 0.0)


@draw_layer.register
def _(module: nn.Linear, generator: torch.Generator) -> None:
    _fan_in(module.weight, module.bias, generator)


@draw_layer.register
def _(module: nn.LSTM, generator: torch.Generator) -> None:
    for parameter in module.parameters(recurse=False):
        uniform(parameter, module.hidden_size**-0.5, generator)


@draw_layer.register
def _(module: nn.Embedding, generator: torch.Generator) -> None:
    uniform(module.weight, 0.1, generator)


@draw_layer.register
def _(module: _BatchNorm, generator: torch.Generator) -> None:
    module.reset_parameters()


@draw_layer.register
def _(module: nn.LayerNorm, generator: torch.Generator) -> None:
    module.reset_parameters()


@torch.no_grad()
def normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with normal numbers of mean zero."""
    noise = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
    tensor.copy_(noise.normal_(0.0, std, generator=generator))


@torch.no_grad()
def uniform(tensor: Tensor, bound: float, generator: torch.Generator) -> None:
    """Fill with numbers uniform between ``-bound`` and ``bound``."""
    noise = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
    tensor.copy_(noise.uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def fill(tensor: Tensor | None, value: float) -> None:
    """Fill with one number, where there is a tensor."""
    if tensor is not None:
        tensor.fill_(value)


def _fan_in(weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> None:
    bound = weight[0].numel() ** -0.5
    uniform(weight, bound, generator)
    if bias is not None:
        uniform(bias, bound, generator)


# ------------------------------------------------------------------------------------------
# What the builders check: shapes of samples, and names of activations.

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


# ------------------------------------------------------------------------------------------
# Models by name: what there is, and one of them made.

Build = TypeVar("Build", bound=Callable[..., nn.Module])
Draw = Callable[[nn.Module, torch.Generator], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How a model is built, what its name says already, and how its first weights are drawn."""

    build: Callable[..., nn.Module]
    fixed: Mapping[str, Any]
    draw: Draw

    def options(self) -> tuple[str, ...]:
        """Names of what a caller may choose."""
        return tuple(key for key in inspect.signature(self.build).parameters
                     if key not in self.fixed)  # fmt: skip


_MODELS: Registry[Entry] = Registry("model")


def register(name: str, *, draw: Draw = draw_weights, **fixed: Any) -> Callable[[Build], Build]:
    """Decorator that files a builder under ``name``, with the options that the name stands for."""

    def add(build: Build) -> Build:
        _MODELS.register(name)(Entry(build=build, fixed=fixed, draw=draw))
        return build

    return add


def available() -> tuple[str, ...]:
    """Return the names of all models."""
    return tuple(_MODELS)


def options(name: str) -> tuple[str, ...]:
    """Return the names of the options that a model takes."""
    return _entry(name).options()


def create(
    name: str,
    *,
    num_classes: int | None = None,
    input_shape: tuple[int, ...] | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Return a new model, in train mode, with first weights as published.

    Neither draws from nor seeds the global generator; the same generator gives the same network
    on every device and, up to rounding, in every dtype.

    Args:
        name: One of :func:`available`, in any case, with ``-``, ``_`` or neither between its parts.
        num_classes: Outputs; the size of the vocabulary for a language model. Each family has the
            default of the data it was published for.
        input_shape: Of one sample: ``(channels, height, width)``, or ``(length,)`` for a language
            model.
        generator: Source of the first weights.
        device: Where; the default device if not given. On ``meta`` there are shapes alone.
        dtype: Of the parameters; torch's default if not given.
        **options: Those of the family; :func:`options` lists them.

    Example:
        >>> from ritz import models
        >>> model = models.create("vgg16", num_classes=100, device="meta")
        >>> sum(p.numel() for p in model.parameters())
        15291300
    """
    entry = _entry(name)
    shape = {"num_classes": num_classes, "input_shape": input_shape}
    given = {key: value for key, value in shape.items() if value is not None} | options
    _check_options(name, entry, given)
    with torch.device("meta"):  # shapes first, so that nothing is drawn twice
        model = entry.build(**entry.fixed, **given).to(dtype=dtype)
    target = torch.get_default_device() if device is None else check_device(device)
    if target.type != "meta":
        model.to_empty(device=target)
        entry.draw(model, resolve_generator(generator))
    return model


def _entry(name: str) -> Entry:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    return _MODELS.find(name)


def _check_options(name: str, entry: Entry, given: Mapping[str, Any]) -> None:
    known = entry.options()
    for key in given:
        if key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise TypeError(f"{name} takes no option {key!r}; {hint}it takes {', '.join(known)}")
