"""The modes of model and library in which derivatives of every order exist."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from ritz._core.batchnorm import evaluating
from ritz.curvature.points import Precision


@contextmanager
def product_modes(
    model: nn.Module, *, batch_statistics: bool, precision: Precision | None, device: torch.device
) -> Iterator[None]:
    """Modes for the block, and then all back as it was."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(evaluating(model, batch_statistics=batch_statistics))
        # The only attention with second derivatives.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(arithmetic(precision))
        stack.enter_context(without_warnings_of_fallbacks())
        if device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # likewise
        if _needs_formulas(model):
            stack.enter_context(_Formulas())
        yield


@contextmanager
def without_warnings_of_fallbacks() -> Iterator[None]:
    """Let vmap do what it has no rule for column by column, silently: it is right, if slower."""
    warn: Any = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009
    warn(False)
    try:
        yield
    finally:
        warn(True)  # as it is by default


@contextmanager
def without_deprecations_of_torch() -> Iterator[None]:
    """Ignore, for the block, that torch itself uses what it deprecates.

    It does so once, as it loads forward derivatives and as it first compiles. Callers who turn
    warnings into errors get their product all the same.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        yield


@contextmanager
def arithmetic(precision: Precision | None) -> Iterator[None]:
    """Whether a GPU may round float32 products to TF32, for the block; ``None``: as it is.

    Never in the half precision of an autocast around the call, which is meant for training.
    """
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if precision is None:
            yield
            return
        matmul.allow_tf32 = convolution.allow_tf32 = precision == "tf32"
        try:
            yield
        finally:
            matmul.allow_tf32, convolution.allow_tf32 = before


@contextmanager
def searched_convolutions(wanted: bool) -> Iterator[None]:
    """Let cuDNN time its algorithms for every shape, and not guess, for the block.

    Its guess for the gradient of a weight with many columns is a Fourier transform at several times
    the cost. Not where determinism is asked for: two searches may end with different algorithms.
    """
    before = torch.backends.cudnn.benchmark
    fixed = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.benchmark = before or (wanted and not fixed)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class _Formulas(TorchFunctionMode):
    """Operations written out, where torch's own have derivatives that are not those of a function.

    Weight norm has no forward rule, and reverse over reverse takes the norm for a constant. The
    row of an embedding for padding has no gradient, but a tangent: here it is a constant. Gradients
    of embeddings may be sparse, or scaled by how often a row is used: here they are gradients.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        if func is functional.embedding:
            return _embedding(*args, **kwargs)
        return func(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    *gradients: bool,
    **more: bool,
) -> Tensor:
    found = functional.embedding(input, weight, None, max_norm, norm_type)
    if padding_idx is None:
        return found
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, found.detach(), found)


def _unlike_a_gradient(module: nn.Embedding) -> bool:
    return module.padding_idx is not None or module.sparse or module.scale_grad_by_freq


def _needs_formulas(model: nn.Module) -> bool:
    return any(
        isinstance(module, _WeightNorm)
        or (isinstance(module, nn.Embedding) and _unlike_a_gradient(module))
        or any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values())
        for module in model.modules()
    )
