"""Context managers for precision, inference mode and dropout, and masks for fixed dropout."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

# ------------------------------------------------------------------------------------------
# Precision and algorithms of torch.

Precision = Literal["float32", "tf32", "float64"]


@contextmanager
def arithmetic(precision: Precision | None) -> Iterator[None]:
    """Set whether products on a GPU use TF32: for ``tf32`` only. ``None`` changes nothing.

    A surrounding autocast is disabled, because half precision is meant for training.
    """
    with ExitStack() as stack:
        if precision is not None:
            stack.enter_context(_tf32(precision == "tf32"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def uses_tf32() -> tuple[bool, bool]:
    """Return whether matrix products and convolutions on a GPU use TF32."""
    # allow_tf32 cannot be read if the user has set fp32_precision.
    backends: Any = torch.backends
    places = backends.cuda.matmul, backends.cudnn.conv
    products, convolutions = (place.fp32_precision == "tf32" for place in places)
    return products, convolutions


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    backends: Any = torch.backends
    old = (backends.cuda.matmul, backends.cudnn)
    new = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before, flags = [place.fp32_precision for place in new], uses_tf32()
    try:
        # The older attribute sets the newer one as well, and some parts of torch read the older.
        for place in old:
            place.allow_tf32 = allowed
        yield
    finally:
        for place, flag in zip(old, flags, strict=True):
            place.allow_tf32 = flag
        for place, value in zip(new, before, strict=True):
            place.fp32_precision = value


def searched_convolutions(wanted: bool) -> AbstractContextManager[None]:
    """Let cuDNN choose convolution algorithms by timing them, unless torch is deterministic."""
    # Without a search, cuDNN uses a Fourier transform for the gradient of a weight with many
    # columns, which costs several times as much. Two searches may find different algorithms, so a
    # deterministic run must not search.
    cudnn = torch.backends.cudnn
    fixed = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return attributes_set([(cudnn, "benchmark", cudnn.benchmark or (wanted and not fixed))])


def without_fused_lstm() -> AbstractContextManager[None]:
    """Return a context without the fused LSTM of oneDNN, which has no forward-mode derivative."""
    return attributes_set([(torch.backends.mkldnn, "enabled", False)])


@contextmanager
def attributes_set(changes: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    # Restored in reverse order, so that the same attribute may occur twice.
    with ExitStack() as stack:
        for target, name, value in changes:
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, value)
        yield


# ------------------------------------------------------------------------------------------
# Tensors that can be differentiated, even if the caller is in inference mode.


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode, because tensors created in this mode cannot have a gradient."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def recording() -> Iterator[None]:
    """Record operations for a backward pass, even within ``no_grad`` or inference mode."""
    with outside_inference(), torch.enable_grad():
        yield


def differentiable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it was created in inference mode."""
    with outside_inference():
        return tensor.clone() if tensor.is_inference() else tensor


def masked_dropout(model: nn.Module, masks: list[Tensor] | None) -> AbstractContextManager[None]:
    """Multiply the outputs of dropout layers by ``masks``, in the order of the calls."""
    if masks is None:
        return nullcontext()
    remaining = iter(masks)
    return hooked(model, _DropoutNd, lambda layer, args, output: output * next(remaining))


def dropout_shapes(
    model: nn.Module, call: Callable[[], object]
) -> list[tuple[tuple[int, ...], float]]:
    """Return the shape and the dropout probability of each mask that ``call`` needs."""
    shapes: list[tuple[tuple[int, ...], float]] = []

    def hook(layer: _DropoutNd, args: tuple[Tensor, ...], output: Tensor) -> None:
        if "Alpha" in type(layer).__name__:
            raise ValueError(f"dropout='fixed' does not support {type(layer).__name__}")
        # Dropout1d, 2d and 3d drop whole channels: one entry per sample and channel.
        whole = len(output.shape) if type(layer).__name__ == "Dropout" else 2
        shape = tuple(output.shape[:whole]) + (1,) * (output.ndim - whole)
        shapes.append((shape, layer.p))

    with hooked(model, _DropoutNd, hook):
        call()
    return shapes


def draw_masks(
    shapes: list[tuple[tuple[int, ...], float]], generator: torch.Generator, *, like: Tensor
) -> list[Tensor]:
    """Draw a mask for each call of a dropout layer, from its shape and its probability."""
    masks = []
    for shape, p in shapes:
        # An explicit dtype, so that the default dtype of torch does not change the mask.
        passed = torch.rand(shape, generator=generator, dtype=torch.float32) >= p
        # Dropout scales by 1 / (1 - p), so that the mean stays the same.
        scale = max(1 - p, torch.finfo(torch.float32).tiny)
        masks.append(differentiable(passed.to(like) / scale))
    return masks


@contextmanager
def hooked(
    model: nn.Module, kind: type, hook: Callable[..., object], *, before: bool = False
) -> Iterator[None]:
    register = "register_forward_pre_hook" if before else "register_forward_hook"
    layers = [layer for layer in model.modules() if isinstance(layer, kind)]
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(getattr(layer, register)(hook).remove)
        yield
