"""Modes of model and torch in which second derivatives exist: batch norm, attention, precision."""

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from ritz._core.batch_norm import evaluating
from ritz._core.modes import Precision, arithmetic, attributes_set
from ritz.curvature._replaced_functions import (
    ReplacedFunctions,
    constant_statistics,
    needs_replacement,
)


@contextmanager
def product_modes(
    model: nn.Module,
    *,
    batch_statistics: bool,
    precision: Precision | None,
    device: torch.device,
    constant: bool = False,
    replace: bool = False,
) -> Iterator[None]:
    """Set the modes of model and torch in which the model is differentiated in the block.

    Args:
        model: The model.
        batch_statistics: Batch norm uses the statistics of each batch.
        precision: Precision of the arithmetic.
        device: Device of the parameters.
        constant: Derivatives treat the statistics of a batch as constants.
        replace: Replace functions of torch by those of ``_replaced_functions.py``. This takes a
            third of the time of a small gradient, so it is done only if the model needs it.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(evaluating(model, batch_statistics=batch_statistics))
        # The fused attention kernels have no second derivatives.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(arithmetic(precision))
        stack.enter_context(without_warnings_of_fallbacks())
        stack.enter_context(_functions_traced())
        if device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in model.modules()):
            # The recurrent kernels of cuDNN have no second derivatives either.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            # Compiled submodules cannot be traced or differentiated twice.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            config = sys.modules["torch._dynamo"].config
            stack.enter_context(attributes_set([(config, "error_on_nested_fx_trace", False)]))
        if replace or any(map(needs_replacement, model.modules())):
            stack.enter_context(ReplacedFunctions())
        if constant:
            stack.enter_context(constant_statistics())
        yield


@contextmanager
def without_warnings_of_fallbacks() -> Iterator[None]:
    """Silence the warning of vmap that an operation has no batching rule and runs in a loop."""
    warn: Any = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009
    warn(False)
    try:
        yield
    finally:
        warn(True)  # the default


@contextmanager
def _functions_traced() -> Iterator[None]:
    """Let ``torch.func.functionalize`` accept user-defined ``torch.autograd.Function`` classes.

    Torch has no such rule. Functionalization is the outermost transform of a trace, so all
    derivatives have been taken when it is reached. The rule can call the forward pass alone.
    """
    rules, level = custom_function_call.functorch_table, TransformType.Functionalize
    before = rules[level]
    rules[level] = lambda interpreter, function, *inputs: function.forward(*inputs)
    try:
        yield
    finally:
        rules[level] = before


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the search for reference cycles, if it is on.

    A trace creates many objects at once, and all of them live on. Searching them again and again
    takes a quarter of the time (LSTM of two layers and 100 steps: 4.3 s instead of 5.2 to 6.0 s).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def without_warnings_of_torch() -> Iterator[None]:
    """Ignore warnings that torch raises about its own code while it traces and compiles."""
    with warnings.catch_warnings():
        # torch.func.jvp loads code that torch itself deprecates.
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        # The compiler reports how it splits reductions.
        warnings.filterwarnings("ignore", r"\s*Online softmax", UserWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
        yield
