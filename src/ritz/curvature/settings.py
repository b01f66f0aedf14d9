"""The modes of model and library in which derivatives of every order exist."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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
        if device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # likewise
        yield


@contextmanager
def arithmetic(precision: Precision | None) -> Iterator[None]:
    """Whether a GPU may round float32 products to TF32, for the block; ``None``: as it is."""
    if precision is None:
        yield
        return
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before
