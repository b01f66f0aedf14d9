"""Functions whose second derivatives in torch are missing, wrong or inaccurate, as formulas.

Weight norm, embeddings, embedding bags, hardsigmoid and LSTMs; cross-entropy in a user-defined loss
or in a model. Also batch norm with the statistics of the batch as constants.
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

from ritz._core.cross_entropy import binary_terms, chunked_entropy, entropy_terms, is_large
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


# In float32 the derivatives of torch lose their digits near a minimum, where p_y - 1 cancels. These
# functions are replaced in models, and in losses that are not known as such.


def _log_softmax(input: Tensor, dim: int | None = None, *others: Any, **options: Any) -> Tensor:
    # In functional.log_softmax a stack level comes before the dtype.
    for dtype in (each for each in (*others, *options.values()) if isinstance(each, torch.dtype)):
        input = input.to(dtype)
    if dim is None or not input.ndim or not input.numel():
        return functional.log_softmax(input, dim)
    rows = input.unsqueeze(0).movedim(dim % input.ndim + 1, 1)
    # Only the logarithm of the largest probability cancels: log p = -(cross-entropy of its class).
    top = rows.detach().argmax(1)
    largest = -entropy_terms(rows, top, ignored=-1).unsqueeze(1)
    # Under autocast on a GPU this is in float32, whatever the dtype of the rows.
    plain = functional.log_softmax(rows, 1)
    plain = plain.scatter(1, top.unsqueeze(1), largest.to(plain.dtype))
    return plain.movedim(1, dim % input.ndim + 1).squeeze(0)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    labels = not target.is_floating_point() and input.ndim > 1
    alike = labels and input.shape[:1] + input.shape[2:] == target.shape
    if not alike or label_smoothing or size_average is not None or reduce is not None:
        # Its own errors and warnings. The other arguments are no longer in use.
        return functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    if weight is None and reduction == "mean" and is_large(input, target):
        return chunked_entropy(input, target, ignore_index, 0.0)
    kept = target != ignore_index
    # An ignored label has weight zero. Labels in uint8 would be a mask.
    factor = kept if weight is None else weight[torch.where(kept, target, 0).long()] * kept
    terms = entropy_terms(input, target, ignore_index) * factor
    return _reduced(terms, reduction, factor.sum())


def _binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    if input.shape != target.shape or size_average is not None or reduce is not None:
        return functional.binary_cross_entropy_with_logits(
            input, target, weight, size_average, reduce, reduction, pos_weight
        )
    terms = binary_terms(input, target, 1.0 if pos_weight is None else pos_weight)
    return _reduced(terms if weight is None else terms * weight, reduction, input.numel())


def _reduced(terms: Tensor, reduction: str, mass: Tensor | int) -> Tensor:
    if reduction == "none":
        return terms
    return terms.sum() / mass if reduction == "mean" else terms.sum()


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


# A model or loss that calls one of these is evaluated with all replacements.
_DETECTED: dict[Any, Callable[..., Tensor]] = {
    functional.embedding_bag: _embedding_bag,
    functional.hardsigmoid: _hardsigmoid,
    functional.cross_entropy: _cross_entropy,
    functional.binary_cross_entropy_with_logits: _binary_cross_entropy,
} | dict.fromkeys((functional.log_softmax, torch.log_softmax, Tensor.log_softmax), _log_softmax)
_REPLACEMENTS = _DETECTED | {
    torch._weight_norm: _weight_norm,
    functional.embedding: _embedding,
}


class FunctionDetector(TorchFunctionMode):
    """Record in ``used`` whether the block calls a function that is replaced if it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.used |= bool(func.__hash__) and func in _DETECTED
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
