"""A point in weight space, and the modes of model and library in which derivatives exist."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ritz._core.batches import Batch
from ritz._core.checks import check_choice, check_real_floating
from ritz._core.modes import Precision, arithmetic, evaluating
from ritz._core.params import ParamSpace

# ------------------------------------------------------------------------------------------
# Tensors that have derivatives, even if the caller is in inference mode.


@contextmanager
def recorded() -> Iterator[None]:
    """Record operations for a backward pass, whatever the mode outside the block."""
    with outside_inference(), torch.enable_grad():
        yield


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode for the block: tensors made in that mode never have a gradient."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def differentiable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it was made in inference mode."""
    with outside_inference():
        return tensor.clone() if tensor.is_inference() else tensor


# ------------------------------------------------------------------------------------------
# A point in weight space: which parameters vary, their values, and all that stays constant.

Params = dict[str, Tensor]
Selection = str | Sequence[str] | Callable[[str], bool]
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


# ------------------------------------------------------------------------------------------
# The modes of model and library in which derivatives of every order exist.


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
def without_warnings_of_torch() -> Iterator[None]:
    """Ignore what torch warns of when it traces and compiles, for the block.

    It uses what it deprecates as it loads forward derivatives, and its compiler says how it splits
    reductions. Callers who turn warnings into errors get their product all the same.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        warnings.filterwarnings("ignore", r"\s*Online softmax", UserWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
        yield


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
