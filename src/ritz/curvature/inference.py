"""Tensors that have derivatives, also where a user's code runs in inference mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def recorded() -> Iterator[None]:
    """Record operations for a backward pass, whatever the mode outside the block."""
    with outside_inference(), torch.enable_grad():
        yield


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode for the block: what is made in it cannot be differentiated, ever."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def differentiable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if it was made in inference mode."""
    with outside_inference():
        return tensor.clone() if tensor.is_inference() else tensor
