"""Functions whose second derivatives in torch are missing or wrong, written as formulas.

Weight norm, embeddings, embedding bags, hardsigmoid and LSTMs. Also batch norm with the statistics
of the batch as constants.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from ritz._core.modes import without_fused_lstm


class ReplacedFunctions(TorchFunctionMode):
    """Replace functions of torch in the block.

    Args:
        replacements: Maps functions of torch to their replacements. Defaults to the formulas of
            this module.
    """

    def __init__(self, replacements: Mapping[Any, Callable[..., Tensor]] | None = None) -> None:
        super().__init__()
        self._replacements = _REPLACEMENTS if replacements is None else replacements

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replacement = self._replacements.get(func, func) if func.__hash__ else func
        return replacement(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    # In torch weight norm has no forward-mode derivative, and its double backward treats |v| as a
    # constant.
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
    # Leaves out the options ``sparse`` and ``scale_grad_by_freq``, which change the gradient.
    rows = functional.embedding(input, weight, None, max_norm, norm_type)
    if padding_idx is None:
        return rows
    # In torch the padding row has a zero gradient but a nonzero tangent. Here it is a constant.
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    # embedding_bag has no second derivative in torch. Here the rows are summed with index_add.
    entries = input.flatten()
    rows = functional.embedding(entries, weight, None, max_norm, norm_type)
    place = torch.arange(len(entries), device=input.device)
    if offsets is None:
        count, bags = len(input), place // input.shape[1]
    else:
        count = len(offsets) - include_last_offset
        bags = torch.searchsorted(offsets[:count].contiguous(), place, right=True) - 1
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.flatten().unsqueeze(1)
    # Padding entries go to an additional bag, which is dropped.
    if padding_idx is not None:
        bags = torch.where(entries == padding_idx % len(weight), count, bags)
    if mode == "max":
        return _largest_rows(rows, bags, count)
    sums = rows.new_zeros(count + 1, rows.shape[1]).index_add(0, bags, rows)[:count]
    if mode == "sum":
        return sums
    ones = rows.new_ones(len(bags))
    sizes = rows.new_zeros(count + 1).index_add(0, bags, ones)[:count]
    return sums / sizes.clamp_min(1).unsqueeze(1)


def _largest_rows(rows: Tensor, bags: Tensor, count: int) -> Tensor:
    """Return the largest entry of each column in each bag; zero for an empty bag."""
    number, width = rows.shape
    with torch.no_grad():
        values, index = rows.detach(), bags.unsqueeze(1).expand(number, width)
        low = values.new_full((count + 1, width), -math.inf)
        largest = low.scatter_reduce(0, index, values, "amax").gather(0, index)
        # As in torch, the first of several equal maxima. ``number`` marks an empty bag.
        place = torch.arange(number, device=rows.device).unsqueeze(1).expand(number, width)
        first = torch.full((count + 1, width), number, device=rows.device)
        first = first.scatter_reduce(
            0, index, torch.where(values == largest, place, number), "amin"
        )[:count]
    return torch.cat([rows, rows.new_zeros(1, width)]).gather(0, first)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    # hardsigmoid has no second derivative in torch; hardtanh has.
    value = functional.hardtanh(input + 3, 0.0, 6.0) / 6
    return input.copy_(value) if inplace else value


def _constant_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        axes = [axis for axis in range(input.ndim) if axis != 1]
        # In float32 at least, as under autocast.
        wide = torch.promote_types(input.dtype, torch.float32)
        running_var, running_mean = torch.var_mean(input.detach().to(wide), axes, correction=0)
    return functional.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)


def constant_statistics() -> TorchFunctionMode:
    """Return a context in which batch norm treats the statistics of a batch as constants.

    The outputs are those of train mode. The derivatives do not flow through mean and variance, so
    the gradient of a sample does not depend on other samples. Running statistics are not updated.
    """
    return ReplacedFunctions({functional.batch_norm: _constant_batch_norm})


_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    torch._weight_norm: _weight_norm,
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    functional.hardsigmoid: _hardsigmoid,
}


class FunctionDetector(TorchFunctionMode):
    """Record in ``used`` whether the block calls functions without a second derivative in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.used |= func in (functional.embedding_bag, functional.hardsigmoid)
        return func(*args, **(kwargs or {}))


def needs_replacement(module: nn.Module) -> bool:
    """Return whether a module calls functions whose derivatives in torch are wrong."""
    plain = not isinstance(module, nn.Embedding) or not (
        module.padding_idx is not None or module.sparse or module.scale_grad_by_freq
    )
    hooks = module._forward_pre_hooks.values()
    normed = isinstance(module, _WeightNorm) or any(isinstance(hook, WeightNorm) for hook in hooks)
    return normed or not plain


def written_out_recurrence(model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which an LSTM on the CPU is computed by ordinary operations of torch.

    The second derivative of the fused kernel (oneDNN) goes through time once more, which costs a
    quarter more arithmetic. First derivatives take half the time with the kernel, so gradients
    still use it.
    """
    lstm = any(isinstance(module, nn.LSTM) for module in model.modules())
    return without_fused_lstm() if lstm and device.type != "cuda" else nullcontext()
