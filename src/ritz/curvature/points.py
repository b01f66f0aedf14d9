"""A point in weight space: which parameters vary, their values, and all that stays constant."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ritz._core.checks import check_choice, check_real_floating
from ritz._core.params import ParamSpace
from ritz.curvature.batches import Batch
from ritz.curvature.inference import outside_inference

Params = dict[str, Tensor]
Selection = str | Sequence[str] | Callable[[str], bool]
Precision = Literal["float32", "tf32", "float64"]
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Context:
    """All that a loss depends on beside the chosen parameters, as one tree of tensors.

    Attributes:
        constants: Frozen and left-out parameters, and buffers, by name.
        batch: The samples.
        masks: Of the dropout layers, in the order of their calls; ``None`` where they are off.
        extra: What an operator needs beside them, such as labels it has drawn.
    """

    constants: Params
    batch: Batch
    masks: list[Tensor] | None
    extra: Any = None


_pytree.register_dataclass(Context, field_names=["constants", "batch", "masks", "extra"])


def copied(
    model: nn.Module, selection: Selection | None, precision: Precision | None
) -> tuple[ParamSpace, Tensor, Params, torch.dtype | None]:
    """Return the chosen parameters, their values ``(P,)``, all others and the buffers, as copies;
    and the dtype that inputs must be given, if it is not their own.
    """  # noqa: D205
    every = dict(model.named_parameters())
    free = [name for name, tensor in every.items() if tensor.requires_grad and tensor.numel()]
    if not free:
        raise ValueError("model must have parameters that require a gradient, got none")
    chosen = free if selection is None else selected(free, selection)
    devices = {every[name].device.type for name in chosen}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError("model must have all its parameters, with their values, on one device, "
                         f"got {sorted(devices)}")  # fmt: skip
    dtype, cast = _arithmetic({every[name].dtype for name in chosen}, precision)

    def copy(tensor: Tensor) -> Tensor:
        wanted = dtype if cast is not None and tensor.is_floating_point() else tensor.dtype
        with outside_inference():
            return tensor.detach().to(wanted, copy=True)

    state = every | dict(model.named_buffers())
    constants = {name: copy(state[name]) for name in state if name not in chosen}
    values = {name: copy(every[name]) for name in chosen}
    space = ParamSpace(values)
    with outside_inference():
        return space, space.flatten(values), constants, cast


def selected(names: list[str], selection: Selection) -> list[str]:
    """The names that a selection chooses, in their own order."""
    if isinstance(selection, str):
        try:
            pattern = re.compile(selection)
        except re.error as error:
            raise ValueError(
                f"params must be a regular expression, got {selection!r}: {error}"
            ) from error
        chosen = [name for name in names if pattern.match(name)]
    elif callable(selection):
        chosen = [name for name in names if selection(name)]
    else:
        wanted = set(selection)
        if unknown := sorted(wanted - set(names)):
            raise ValueError(f"params must be names of parameters that require a gradient, got "
                             f"{unknown}; there are {names}")  # fmt: skip
        chosen = [name for name in names if name in wanted]
    if not chosen:
        raise ValueError(f"params must choose at least one parameter, got {selection!r}; there are "
                         f"{names}")  # fmt: skip
    return chosen


def _arithmetic(
    own: set[torch.dtype], precision: Precision | None
) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype to compute in, and the same again if the model is of another."""
    for dtype in own:
        check_real_floating("parameters", dtype)
    if precision is not None:
        check_choice("precision", precision, tuple(_DTYPES))
        dtype = _DTYPES[precision]
        return dtype, dtype if own != {dtype} else None
    wide = own - {torch.float16, torch.bfloat16}
    if wide != own and wide <= {torch.float32}:
        return torch.float32, torch.float32
    if len(own) > 1:
        raise ValueError(f"parameters must be of one dtype, got {sorted(map(str, own))}: pass "
                         "precision= to say which")  # fmt: skip
    return next(iter(own)), None
