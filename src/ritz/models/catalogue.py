"""Models by name: what there is, and one of them made."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ritz._core.random import resolve_generator
from ritz._core.registry import Registry
from ritz.models.initialising import draw_weights

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
    target = torch.get_default_device() if device is None else torch.device(device)
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
