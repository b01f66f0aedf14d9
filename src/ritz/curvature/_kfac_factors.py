r"""The factors of K-FAC: second moments of the inputs and of the output derivatives of a layer.

The gradient of a layer for a sample is :math:`\sum_t \delta_t a_t^\top`, summed over positions
:math:`t`. The Kronecker factors are the sums of :math:`a_t a_t^\top` and of
:math:`\delta_t \delta_t^\top`. If the layer has a bias, a 1 is appended to :math:`a`. The inputs of
a convolution are the patches of its image. If a layer is called several times for a sample, all
positions of all calls count.

Reference: Grosse and Martens (2016), section 3; Eschenhagen et al. (2023) for positions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz._core.modes import uses_tf32
from ritz.curvature import _module_gradients as rules
from ritz.curvature._module_gradients import CONVOLUTIONS, Call


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that decide how a factor is computed."""

    # From this number of rows, X X' is computed in `strips` strips on and above the diagonal. This
    # takes 0.63 of the operations (benchmarks/kfac_steps.py --part factors). With fewer columns
    # than `columns`, copying the other half costs more than computing it.
    symmetric: int = 512
    columns: int = 128
    strips: int = 4
    # From this number of channels, the patches of a convolution are not formed. With fewer channels
    # the products of shifted images are too small to be fast (same benchmark).
    channels: int = 12
    # On a GPU the products of shifted images are several hundred launches, 6 ms on an H200. Patches
    # are formed if X X' has fewer operations than this: at most 2 to 8 ms, in TF32 and in float32.
    launches: float = 4e11


TUNING = Tuning()


def gram(x: Tensor) -> Tensor:
    r"""Return :math:`X X^\top` for ``(..., n, m)``. Uses the symmetry of a large result."""
    n = x.shape[-2]
    if n < TUNING.symmetric or x.shape[-1] < TUNING.columns or x.ndim > 2 or _is_fast(x):
        return x @ x.mT
    product = x.new_empty(n, n)
    size = -(-n // TUNING.strips)
    for start in range(0, n, size):
        rows = slice(start, start + size)
        strip = x[rows] @ x[start:].T
        product[rows, start:] = strip
        # X X' is symmetric, so the part below the diagonal is a copy.
        product[start:, rows] = strip.T
    return product


def _is_fast(x: Tensor) -> bool:
    # In TF32, the copies of the strips take as long as the products.
    return x.is_cuda and x.dtype == torch.float32 and uses_tf32()[0]


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a linear layer or a convolution whose ``forward`` is torch's."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    return any(isinstance(module, kind) and _keeps_forward(module, kind) for kind in kinds)


def is_affine(module: nn.Module) -> bool:
    """Return whether a module is a norm, which scales and shifts each feature separately."""
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
    exact = any(isinstance(module, kind) and _keeps_forward(module, kind) for kind in kinds)
    return exact and not isinstance(module, nn.SyncBatchNorm)  # whose forward exchanges data


def _keeps_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module).forward is kind.forward


def num_positions(module: nn.Module, deltas: Tensor) -> int:
    """Return the number of positions per sample in derivatives ``(c, batch, ...)``."""
    rest = deltas.shape[3:] if isinstance(module, CONVOLUTIONS) else deltas.shape[2:-1]
    return math.prod(rest)


# ------------------------------------------------------------------------------------------
# The factor of the inputs.


def moment(rows: Tensor, *, diagonal: bool = False) -> Tensor:
    r"""Return :math:`X X^\top` for ``(..., n, m)``, or its diagonal alone."""
    return rows.square().sum(-1) if diagonal else gram(rows)


def input_moment(
    module: Any, x: Tensor, keys: tuple[str, ...], *, diagonal: bool = False
) -> Tensor:
    r"""Return the sum of :math:`a a^\top` over samples and positions, ``(i, i)``.

    With groups it is ``(groups, i, i)``. A bias appends the constant 1 to the inputs.

    Args:
        module: A linear layer or a convolution.
        x: Its input, ``(batch, ...)``.
        keys: Parameters of the layer that vary, among ``weight`` and ``bias``.
        diagonal: Return the diagonal alone, ``(i,)`` or ``(groups, i)``.
    """
    bias = "bias" in keys
    if "weight" not in keys:
        groups = getattr(module, "groups", 1)
        lead = () if groups == 1 else (groups,)
        return x.new_full((*lead, *(1,) * (2 - diagonal)), float(_num_rows(module, x)))
    if not isinstance(module, CONVOLUTIONS):
        return moment(input_columns(x, keys), diagonal=diagonal)
    if not diagonal and _correlates(module, x):
        product, sums = _correlations(module, x)
    else:
        product, sums = _from_patches(module, x, diagonal=diagonal)
    return _append_ones(product, sums, _num_rows(module, x), diagonal) if bias else product


def input_columns(x: Tensor, keys: tuple[str, ...]) -> Tensor:
    """Return the inputs of a linear layer as columns ``(i, m)``, with ones for the bias."""
    rows = x.reshape(-1, x.shape[-1]).T
    parts = [rows] * ("weight" in keys) + [rows.new_ones(1, rows.shape[-1])] * ("bias" in keys)
    return torch.cat(parts)


def _output_shape(module: Any, x: Tensor) -> tuple[int, ...]:
    pads = module._reversed_padding_repeated_twice
    # torch stores two numbers per axis, from the last axis to the first.
    both = [pads[2 * i] + pads[2 * i + 1] for i in reversed(range(len(module.kernel_size)))]
    return tuple(
        (size + pad - gap * (width - 1) - 1) // step + 1
        for size, pad, gap, width, step in zip(
            x.shape[2:], both, module.dilation, module.kernel_size, module.stride, strict=True
        )
    )


def _num_rows(module: Any, x: Tensor) -> int:
    if isinstance(module, CONVOLUTIONS):
        return len(x) * math.prod(_output_shape(module, x))
    return x.shape[:-1].numel()


def _from_patches(module: Any, x: Tensor, *, diagonal: bool = False) -> tuple[Tensor, Tensor]:
    r"""Return the sums of :math:`a a^\top` and of :math:`a` over all positions, from patches."""
    width, groups = module.weight[0].numel(), module.groups
    total: list[Tensor] = []
    per_sample = groups * width * math.prod(_output_shape(module, x))
    for part in x.split(max(1, rules.TUNING.derivatives // max(1, per_sample))):
        rows = rules.patch_rows(module, part)
        sums = [moment(rows, diagonal=diagonal), rows.sum(-1)]
        total = [a.add_(b) for a, b in zip(total, sums, strict=True)] if total else sums
    return total[0], total[1]


def _append_ones(product: Tensor, sums: Tensor, count: int, diagonal: bool) -> Tensor:
    """Return the second moment of inputs to which a 1 is appended, or its diagonal."""
    if diagonal:
        return torch.cat([product, torch.full_like(product[..., :1], count)], -1)
    n = product.shape[-1]
    result = product.new_empty(*product.shape[:-2], n + 1, n + 1)
    result[..., :n, :n] = product
    result[..., n, :n] = result[..., :n, n] = sums
    result[..., n, n].fill_(count)  # an assignment would copy the number from the host
    return result


# ------------------------------------------------------------------------------------------
# Convolutions with stride 1: the second moment of patches from products of shifted images.
#
# The block for offsets u and v of the kernel is A_uv = sum_t x[t + u] x[t + v]'. Offset u reads the
# window [u, u + T) of the padded image. Hence A_uv depends on the shift v - u alone, except for the
# first and last terms of the sum. A 3 x 3 kernel has 81 pairs of offsets but only 25 shifts, and 13
# up to transposition. For each shift, the image is cut into segments such that every window is a
# union of segments, and the sum over each segment is computed once. This takes 13 products of whole
# images and a few of single rows, instead of 81 products.


def _correlates(module: Any, x: Tensor) -> bool:
    """Return whether the moment of patches is computed from products of shifted images."""
    plain = module.padding_mode == "zeros" or not any(module._reversed_padding_repeated_twice)
    few = module.groups == 1 and len(module.kernel_size) <= 2 and max(module.stride) == 1
    if not (plain and few and module.in_channels >= TUNING.channels):
        return False
    width, area = module.weight[0].numel(), module.weight[0, 0].numel()
    return area > 1 and (not x.is_cuda or 2 * width**2 * _num_rows(module, x) > TUNING.launches)


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a convolution: size of the image, kernel offsets, number of outputs, padding."""

    size: int
    offsets: tuple[int, ...]
    outputs: int
    pad: int

    def pairs(self, shift: int) -> Iterator[tuple[int, int]]:
        """Yield the indices of all pairs of offsets ``u`` and ``v`` with ``v - u = shift``."""
        for number, offset in enumerate(self.offsets):
            if offset + shift in self.offsets:
                yield number, self.offsets.index(offset + shift)

    def window(self, number: int, shift: int) -> tuple[int, int]:
        """Return the range of pixels at ``u`` for which both pixels of a pair are in the image."""
        first = self.offsets[number] - self.pad
        low = max(0, -shift)
        high = max(low, min(self.size, self.size - shift))
        start, end = (min(max(at, low), high) for at in (first, first + self.outputs))
        return start, end

    def segments(self, shift: int) -> list[tuple[int, int]]:
        """Return the segments: every window of a pair is a union of some of them."""
        cuts = sorted({end for u, _ in self.pairs(shift) for end in self.window(u, shift)})
        return list(pairwise(cuts))

    def shifts(self) -> list[int]:
        return sorted({v - u for u in self.offsets for v in self.offsets})


def _correlations(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the sums of :math:`a a^\top`, ``(i, i)``, and :math:`a`, ``(i,)``, over patches."""
    if len(module.kernel_size) == 1:
        x = x.unsqueeze(2)
    # (H, W, batch, C): whole rows of the image are contiguous.
    image = x.permute(2, 3, 0, 1).contiguous()
    rows, columns = _axes(module, image)
    num_rows, num_columns, channels = len(rows.offsets), len(columns.offsets), image.shape[-1]
    # In the order of the weight: channels, then the offsets of the kernel.
    moment = image.new_zeros(channels, num_rows, num_columns, channels, num_rows, num_columns)
    for dy in rows.shifts():
        for dx in columns.shifts():
            # A_vu = A_uv', so half of the shifts are enough.
            if dy < 0 or (dy == 0 and dx < 0):
                continue
            parts = _segment_products(image, rows, columns, dy, dx)
            for uy, vy in rows.pairs(dy):
                for ux, vx in columns.pairs(dx):
                    block = _sum_inside(parts, rows.window(uy, dy), columns.window(ux, dx))
                    if block is not None:
                        moment[:, uy, ux, :, vy, vx] = block
                        moment[:, vy, vx, :, uy, ux] = block.T
    sums = _window_sums(image, rows, columns)
    size = moment.shape[:3].numel()
    return moment.view(size, size), sums


def _axes(module: Any, image: Tensor) -> list[_Axis]:
    missing = 2 - len(module.kernel_size)
    pads = module._reversed_padding_repeated_twice
    starts = [0] * missing + [pads[2 * i] for i in reversed(range(len(module.kernel_size)))]
    ends = [0] * missing + [pads[2 * i + 1] for i in reversed(range(len(module.kernel_size)))]
    widths = (1,) * missing + tuple(module.kernel_size)
    gaps = (1,) * missing + tuple(module.dilation)
    return [
        _Axis(
            size,
            tuple(gap * i for i in range(width)),
            size + start + end - gap * (width - 1),
            start,
        )
        for size, start, end, width, gap in zip(
            image.shape[:2], starts, ends, widths, gaps, strict=True
        )
    ]


_Products = dict[tuple[tuple[int, int], tuple[int, int]], Tensor]


def _segment_products(image: Tensor, rows: _Axis, columns: _Axis, dy: int, dx: int) -> _Products:
    """Return the sum of ``x[s] x[s + d]'`` over the pixels of each segment."""
    channels = image.shape[-1]
    products = {}
    for top, bottom in rows.segments(dy):
        for left, right in columns.segments(dx):
            one = image[top:bottom, left:right].reshape(-1, channels)
            if dy == dx == 0:
                products[(top, bottom), (left, right)] = gram(one.T)
            else:
                other = image[top + dy : bottom + dy, left + dx : right + dx]
                products[(top, bottom), (left, right)] = one.T @ other.reshape(-1, channels)
    return products


def _sum_inside(
    products: _Products, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor | None:
    """Return the sum over the segments inside a window, or ``None`` if there are none."""
    total: Tensor | None = None
    for ((top, bottom), (left, right)), product in products.items():
        if rows[0] <= top and bottom <= rows[1] and columns[0] <= left and right <= columns[1]:
            total = product if total is None else total + product
    return total


def _window_sums(image: Tensor, rows: _Axis, columns: _Axis) -> Tensor:
    total = image.sum(2)
    sums = [
        total[slice(*rows.window(uy, 0)), slice(*columns.window(ux, 0))].sum((0, 1))
        for uy in range(len(rows.offsets))
        for ux in range(len(columns.offsets))
    ]
    return torch.stack(sums, 1).flatten()


# ------------------------------------------------------------------------------------------
# The factor of the outputs.


def output_moment(module: Any, deltas: Tensor, *, diagonal: bool = False) -> Tensor:
    r"""Return the sum of :math:`\delta \delta^\top`, ``(o, o)`` or ``(groups, o, o)``.

    Args:
        module: A linear layer or a convolution.
        deltas: Derivatives in its outputs, ``(c, batch, ...)``.
        diagonal: Return the diagonal alone, ``(o,)`` or ``(groups, o)``.
    """
    if not isinstance(module, CONVOLUTIONS):
        return moment(deltas.reshape(-1, deltas.shape[-1]).T, diagonal=diagonal)
    delta = deltas.reshape(*deltas.shape[:2], module.groups, -1, num_positions(module, deltas))
    # (c, batch, groups, o, T) -> (groups, o, c * batch * T)
    rows = delta.permute(2, 3, 0, 1, 4).flatten(2)
    return moment(rows[0] if module.groups == 1 else rows, diagonal=diagonal)


# ------------------------------------------------------------------------------------------
# Inputs and derivatives of all calls of a layer.


def join_calls(module: Any, calls: Sequence[tuple[Call, Tensor]]) -> tuple[Tensor, Tensor]:
    r"""Return the inputs ``(batch, groups, i, T)`` and derivatives ``(c, batch, groups, o, T)``.

    The positions :math:`t` of all calls are joined. The gradient of a sample is
    :math:`\sum_t \delta_t a_t^\top`. If there is a bias, the constant 1 is appended to the inputs.

    Args:
        module: A linear layer or a convolution.
        calls: Its calls on the same samples, with derivatives ``(c, batch, ...)`` in its outputs.
            The ``chosen`` of a call are the parameters that vary.
    """
    inputs, outputs = [], []
    for call, deltas in calls:
        a, delta = rules.unroll(module, call, deltas)
        ones = a.new_ones(*a.shape[:2], 1, a.shape[3])
        rows = [a] * ("weight" in call.chosen) + [ones] * ("bias" in call.chosen)
        inputs.append(torch.cat(rows, 2) if len(rows) > 1 else rows[0])
        outputs.append(delta)
    if len(calls) == 1:
        return inputs[0], outputs[0]
    return torch.cat(inputs, -1), torch.cat(outputs, -1)


def reduced_moments(
    a: Tensor, delta: Tensor, *, diagonal: tuple[bool, bool] = (False, False)
) -> tuple[Tensor, Tensor]:
    r"""Return the factors of the ``reduce`` setting: inputs averaged and derivatives summed.

    Args:
        a: Inputs, see :func:`join_calls`.
        delta: Derivatives.
        diagonal: Whether to return the diagonals alone, of inputs and of outputs.
    """
    # (groups, i, batch) and (groups, o, c * batch)
    rows = a.mean(-1).permute(1, 2, 0), delta.sum(-1).permute(2, 3, 0, 1).flatten(2)
    one = a.shape[1] == 1
    inputs, outputs = (
        moment(part[0] if one else part, diagonal=only)
        for part, only in zip(rows, diagonal, strict=True)
    )
    return inputs, outputs


# ------------------------------------------------------------------------------------------
# Squares of sample gradients in the eigenbases of the factors (EK-FAC).


def projected_squares(
    a: Tensor, delta: Tensor, inputs: Tensor | None, outputs: Tensor | None
) -> Tensor:
    r"""Return :math:`\sum_n (U_S^\top G_n U_A)^2` of sample gradients, ``(o, i)``.

    With groups it is ``(groups, o, i)``.

    Args:
        a: Inputs, see :func:`join_calls`.
        delta: Derivatives.
        inputs: The orthogonal matrix :math:`U_A` of the shape of :func:`input_moment`. ``None`` for
            the identity.
        outputs: The orthogonal matrix :math:`U_S`.
    """
    # U_S' (sum_t delta_t a_t') U_A = sum_t (U_S' delta_t) (U_A' a_t)'
    squares = rules.weight_squares(_rotate(a, inputs), _rotate(delta, outputs))
    return squares[0] if len(squares) == 1 else squares


def _rotate(columns: Tensor, basis: Tensor | None) -> Tensor:
    r"""Return :math:`U^\top x` of columns ``(..., groups, n, T)``."""
    if basis is None:
        return columns
    if basis.ndim > 2:
        return basis.mT @ columns
    # One product for all samples, instead of one per sample.
    rows = columns.mT
    return (rows.reshape(-1, len(basis)) @ basis).view(rows.shape).mT


# ------------------------------------------------------------------------------------------
# Embeddings: linear layers with one-hot inputs, so that the factor of the inputs is diagonal.


def is_table(module: nn.Module) -> bool:
    """Return whether a module is an embedding with ordinary gradients."""
    kind = isinstance(module, nn.Embedding) and _keeps_forward(module, nn.Embedding)
    return kind and not (module.scale_grad_by_freq or module.sparse)


def token_counts(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Return how often each row of the table is used, ``(rows,)``, with zero for the padding."""
    counts = torch.bincount(ids.flatten(), minlength=module.num_embeddings)
    if module.padding_idx is not None:
        counts[module.padding_idx] = 0
    return counts


def token_deltas(module: nn.Embedding, ids: Tensor, deltas: Tensor) -> Tensor:
    """Set derivatives to zero at padding positions, as the padding row has no gradient."""
    if module.padding_idx is None:
        return deltas
    return deltas * (ids != module.padding_idx).unsqueeze(-1).to(deltas.dtype)


# ------------------------------------------------------------------------------------------
# Norms: y = w z + b for each feature, with the normalised input z.


def affine_gradients(module: Any, x: Tensor, delta: Tensor, keys: tuple[str, ...]) -> Tensor:
    """Return the per-sample gradients in weight and bias, ``(batch, features, len(keys))``.

    Args:
        module: A norm; see :func:`is_affine`.
        x: Its input, ``(batch, ...)``.
        delta: Derivatives in its outputs, of the same shape.
        keys: Parameters that vary, among ``weight`` and ``bias``.
    """
    parts = [delta * _normalize(module, x) if key == "weight" else delta for key in keys]
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        size = math.prod(module.normalized_shape)
        sums = [part.reshape(len(x), -1, size).sum(1) for part in parts]
    else:  # channels are the second axis
        sums = [part.flatten(2).sum(2) if part.ndim > 2 else part for part in parts]
    return torch.stack(sums, 2)


def _normalize(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return functional.rms_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(x, module.num_groups, eps=module.eps)
    # Without running statistics torch uses those of the batch. No running statistics are updated.
    of_batch = module.training or module.running_mean is None
    mean, variance = (None, None) if of_batch else (module.running_mean, module.running_var)
    return functional.batch_norm(x, mean, variance, training=of_batch, eps=module.eps)
