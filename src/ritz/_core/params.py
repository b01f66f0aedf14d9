"""`ParamSpace`: named tensors as one flat vector and back; parameters of an optimiser."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.checks import check_positive, check_type


class ParamSpace:
    """Layout of named tensors in one flat vector, in the order of the dictionary.

    Args:
        like: Tensors that define names, shapes, dtype and device.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        if not like:
            raise ValueError("like must contain at least one tensor, got {}")
        # One vector has one dtype and one device.
        kinds = {(tensor.dtype, tensor.device) for tensor in like.values()}
        if len(kinds) > 1:
            raise ValueError(f"like must have one dtype and device, got {sorted(map(str, kinds))}")
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        self.dtype, self.device = next(iter(kinds))
        self.size = sum(shape.numel() for shape in self.shapes.values())

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the flat vector ``(size,)`` of named tensors."""
        for name, shape in self.shapes.items():
            if name not in tensors or tensors[name].shape != shape:
                got = tuple(tensors[name].shape) if name in tensors else "nothing"
                raise ValueError(f"{name} must have shape {tuple(shape)}, got {got}")
        if extra := sorted(set(tensors) - set(self.shapes)):
            raise ValueError(f"tensors must have the names of the space, got also {extra}")
        # The order of the space, not that of the argument.
        return torch.cat([tensors[name].reshape(-1) for name in self.shapes])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the named tensors of a flat vector ``(size,)``, as views of it."""
        if vector.shape != (self.size,):
            raise ValueError(f"vector must be ({self.size},), got {tuple(vector.shape)}")
        # split and view copy nothing: writing to a piece changes the vector.
        pieces = vector.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: piece.view(shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over all parameters of an optimiser, group by group."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def check_setting(name: str, value: Any, *, zero: bool = True) -> None:
    """Raise unless a setting of an optimiser is finite and positive, or zero if that is allowed.

    Like the learning rates of torch it may be a number or a tensor of one element.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:  # the message of torch
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        value = value.item()
    check_positive(name, value, zero=zero)


def check_momentum(value: Any) -> None:
    """Raise unless a momentum is at least 0 and below 1: at 1 it would add up all gradients."""
    check_setting("momentum", value)
    if value >= 1:
        raise ValueError(f"momentum must be less than 1, got {float(value)}")


def set_setting(group: dict[str, Any], name: str, value: float) -> None:
    """Set a setting of a parameter group. A tensor is set in place, for captured steps."""
    if isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def check_optimizer(optimizer: Any) -> None:
    """Raise unless ``optimizer`` is an optimiser of torch."""
    check_type("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
