r"""Cross-entropy of many classes, such as tokens, and its derivatives, computed chunk by chunk.

The outputs of a language model are its largest tensor: 4,096 tokens and 150,000 classes take 2.4 GB
in float32. The derivatives of torch store several tensors of this size. Let
:math:`p = \operatorname{softmax}(f)`, :math:`q` the target distribution (smoothed or not), and
:math:`w` the weight of the label in the mean. Then

.. math:: g = \nabla_f \ell = w (p - q), \quad
    \nabla^2_f \ell \, t = w (p \circ t - p\, (p^\top t)) = (g + w q) \circ (t - s), \quad
    s = p^\top t = g^\top t / w + q^\top t,

A product with the Hessian therefore needs :math:`g`, which is computed anyway, and no softmax. A
trace treats the operations below as single operations. In addition to its result, each of them
needs the memory of a few chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Part = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of outputs and of chunks, in entries."""

    # Larger outputs are computed in chunks, by the operations below: 512 samples of 2,000 classes.
    # `accurate_entropy` takes twice as long from there on, and the plain loss of torch as long.
    large: int = 2**20
    # With larger outputs one column of a product is computed at a time: 64 MB of floats, or 1,024
    # tokens of a vocabulary of 16,000. On the CPU chunks halve the time of a product of 128 tokens
    # and 150,000 classes.
    alone: int = 2**24
    # Entries of a chunk: 16 MB of floats. There are up to three temporary tensors of this size.
    chunk: int = 2**22
    # From this log odds x on, log(1 + e^x) = x in float64. The square of e^40 is a float32.
    threshold: float = 40.0


TUNING = Tuning()

# ------------------------------------------------------------------------------------------
# Chunks of outputs (n, classes, *places): some samples, or some places of one sample.


def is_large(outputs: Tensor, target: Any) -> bool:
    """Return whether the outputs are so large that their loss is computed in chunks."""
    labels = isinstance(target, Tensor) and not target.is_floating_point()
    return labels and outputs.ndim > 1 and outputs.numel() > TUNING.large


def output_parts(outputs: Tensor) -> Iterator[Part]:
    """Yield indices of chunks of outputs. A chunk has all classes of its samples or places."""
    count, each = len(outputs), outputs[0].numel()
    if each <= TUNING.chunk or outputs.ndim == 2:
        step = max(1, TUNING.chunk // each)
        yield from ((slice(start, start + step),) for start in range(0, count, step))
        return
    places = outputs.shape[2]
    step = max(1, TUNING.chunk // (each // places))
    for sample in range(count):
        for start in range(0, places, step):
            yield slice(sample, sample + 1), slice(None), slice(start, start + step)


def places_of(target: Tensor, part: Part) -> Tensor:
    """Return the labels, or other values without an axis of classes, that belong to a chunk."""
    return target[part[0]] if len(part) == 1 else target[part[0], part[2]]


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least, in which torch computes losses under autocast."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _weights(target: Tensor, scale: Tensor, ignored: int) -> Tensor:
    """Return the weight of each label in the mean, with an axis for the classes."""
    kept = (target != ignored).to(scale.dtype)
    return (kept * (scale / kept.sum())).unsqueeze(1)


def _classes(target: Tensor, ignored: int) -> Tensor:
    # An ignored label has weight zero, so it can be replaced by any class.
    # torch takes labels in uint8, but not as indices.
    return torch.where(target == ignored, 0, target).long().unsqueeze(1)


# ------------------------------------------------------------------------------------------
# Cross-entropy that keeps its digits, near a minimum and for large outputs.


def softmax_product(p: Tensor, tangent: Tensor) -> Tensor:
    r"""Return :math:`(\operatorname{diag}(p) - p p^\top) t` for probabilities along axis 1."""
    # Adding a constant to t changes nothing. If t is 0 at the likeliest class, nothing cancels even
    # if the probability of this class is nearly 1.
    mixed = p * (tangent - tangent.gather(1, p.argmax(1, keepdim=True)))
    return mixed - p * mixed.sum(1, keepdim=True)


class _Terms(torch.autograd.Function):
    """The terms ``(n, *places)`` and their gradients ``p - e_y``, of the shape of the outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(outputs: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        p = outputs.softmax(1)
        # log p_y = f_y - f_m + log p_m, with the likeliest class m
        likeliest = outputs.amax(1, keepdim=True) - p.amax(1, keepdim=True).log()
        log_p_y = outputs.gather(1, label) - likeliest
        # p_y - 1 = -sum_{k != y} p_k, which does not cancel
        # Not in place: under vmap, the labels may have an axis that the outputs lack.
        others = p.scatter(1, label, 0.0)
        slope = others.sum(1, keepdim=True).neg_()
        # log p_y = log(1 + (p_y - 1)) keeps its digits if the label is likely.
        terms = torch.where(slope > -0.5, slope.log1p(), log_p_y).neg_()
        return terms.squeeze(1), others.scatter_(1, label, slope)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, along: Tensor | None, cotangent: Tensor | None) -> Any:
        outputs, gradients = ctx.saved_tensors
        # The gradients are an output too, so the first summand can be differentiated again.
        first = None if along is None else gradients * along.unsqueeze(1)
        if cotangent is None:
            return first, None
        second = softmax_product(outputs.softmax(1), cotangent)
        return second if first is None else first + second, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Any) -> Any:
        outputs, gradients = ctx.saved_tensors
        return (gradients * tangent).sum(1), softmax_product(outputs.softmax(1), tangent)


def entropy_terms(outputs: Tensor, target: Tensor, ignored: int) -> Tensor:
    r"""Return the cross-entropy of each label, zero for those that are ignored.

    .. math:: -\log p_y = \log\Big(1 + \sum_{k \ne y} e^{f_k - f_y}\Big)

    In the derivatives of torch, :math:`p_y - 1` cancels: at a loss of 1e-4 a float32 gradient has
    four digits. Here all terms have one sign.
    """
    call: Any = _Terms.apply
    terms: Tensor = call(_wide(outputs), _classes(target, ignored))[0]
    return torch.where(target == ignored, 0.0, terms)


def accurate_entropy(outputs: Tensor, target: Tensor, ignored: int) -> Tensor:
    """Return the mean of :func:`entropy_terms` over the labels that are not ignored."""
    return entropy_terms(outputs, target, ignored).sum() / (target != ignored).sum()


def binary_terms(outputs: Tensor, target: Tensor, positive: Tensor | float = 1.0) -> Tensor:
    """Return the binary cross-entropy of each output. ``positive`` weights the label 1."""
    # -y log sigmoid(f) - (1 - y) log sigmoid(-f). In that of torch, sigmoid(f) - y cancels.
    wide = _wide(outputs)
    negative, plain = (
        functional.softplus(sign * wide, threshold=TUNING.threshold) for sign in (-1, 1)
    )
    return positive * target * negative + (1 - target) * plain


# ------------------------------------------------------------------------------------------
# The functions, as operations of torch.


@torch.library.custom_op("ritz::entropy", mutates_args=())
def _value(outputs: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=outputs.device)
    options: Any = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": "sum"}
    for part in output_parts(outputs):
        row, labels = outputs[part], places_of(target, part)
        if smoothing:
            total += functional.cross_entropy(_wide(row), labels, **options)
        else:
            total += entropy_terms(row, labels, ignored).sum(dtype=torch.float64)
    return (total / (target != ignored).sum()).to(_wide(outputs[:0]))


@torch.library.custom_op("ritz::entropy_gradient", mutates_args=())
def _gradient(
    outputs: Tensor, target: Tensor, scale: Tensor, ignored: int, smoothing: float
) -> Tensor:
    # g = w (p - q), q = (1 - e) e_y + e / C
    result = torch.empty_like(outputs)
    weights = _weights(target, scale, ignored)
    for part in output_parts(outputs):
        row, label = _wide(outputs[part]).softmax(1), _classes(places_of(target, part), ignored)
        # p_y - 1 = -sum_{k != y} p_k, which does not cancel
        others = row.scatter_(1, label, 0.0).sum(1, keepdim=True)
        row.scatter_(1, label, smoothing - others)
        row.sub_(smoothing / outputs.shape[1]).mul_(weights[part])
        result[part] = row
    return result


@torch.library.custom_op("ritz::entropy_curvature", mutates_args=())
def _curvature(
    gradient: Tensor, target: Tensor, scale: Tensor, tangent: Tensor, ignored: int, smoothing: float
) -> Tensor:
    result = torch.empty_like(gradient)
    weights = _weights(target, scale, ignored)
    for part in output_parts(gradient):
        g, t, w = _wide(gradient[part]), _wide(tangent[part]), weights[part]
        label = _classes(places_of(target, part), ignored)
        # H 1 = 0, so t may be shifted. If t is 0 at the label, nothing cancels even if the
        # probability of the label is nearly 1.
        t = t - t.gather(1, label)
        # s = g't / w + q't
        s = (g * t).sum(1, keepdim=True) / torch.where(w == 0, 1, w)
        if smoothing:
            s += smoothing * t.mean(1, keepdim=True)
        # H t = g (t - s) + w q (t - s)
        moved = t.sub_(s)
        row = torch.mul(g, moved)
        row.scatter_add_(1, label, (1 - smoothing) * w * moved.gather(1, label))
        if smoothing:
            row += moved.mul_(w * (smoothing / gradient.shape[1]))
        result[part] = row
    return result


@torch.library.custom_op("ritz::entropy_slope", mutates_args=())
def _slope(
    outputs: Tensor, target: Tensor, tangent: Tensor, ignored: int, smoothing: float
) -> Tensor:
    # The directional derivative g't, without storing g.
    total = torch.zeros((), dtype=torch.float64, device=outputs.device)
    one = _wide(outputs[:0]).new_ones(())
    weights = _weights(target, one, ignored)
    for part in output_parts(outputs):
        label, t = _classes(places_of(target, part), ignored), _wide(tangent[part])
        # g't = w (p't - q't), and t may be shifted to 0 at the label
        t = t - t.gather(1, label)
        along = (_wide(outputs[part]).softmax(1) * t).sum(1, keepdim=True)
        along -= smoothing * t.mean(1, keepdim=True)
        total += (along * weights[part]).sum()
    return total.to(one)


def _over_columns(op: Any) -> Any:
    """Return a vmap rule that computes one column at a time, to save memory."""

    def rule(info: Any, axes: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        columns = [
            [value if axis is None else value.select(axis, k)
             for value, axis in zip(inputs, axes, strict=True)]
            for k in range(info.batch_size)
        ]  # fmt: skip
        return torch.stack([op(*column) for column in columns]), 0

    return rule


for _op in (_value, _gradient, _curvature, _slope):
    _op.register_vmap(_over_columns(_op))
for _op in (_value, _slope):
    _op.register_fake(lambda outputs, *others: _wide(outputs[:0]).new_empty(()))
for _op in (_gradient, _curvature):
    _op.register_fake(lambda outputs, *others: torch.empty_like(outputs))

# ------------------------------------------------------------------------------------------
# Their derivatives.


class _Gradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        outputs: Tensor, target: Tensor, scale: Tensor, ignored: int, smoothing: float
    ) -> Tensor:
        gradient: Tensor = _gradient(outputs, target, scale, ignored, smoothing)
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, target, scale, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, target, scale)
        ctx.save_for_forward(output, target, scale)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        gradient, target, scale = ctx.saved_tensors
        # The Hessian is symmetric, and g is proportional to the scale.
        moved = _curvature(gradient, target, scale, cotangent, *ctx.options)
        scaled = (cotangent * gradient).sum() / scale if ctx.needs_input_grad[2] else None
        return moved, None, scaled, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *others: Any) -> Any:
        gradient, target, scale = ctx.saved_tensors
        scaled = None if others[1] is None else gradient * (others[1] / scale)
        if tangent is None:
            return scaled
        moved = _curvature(gradient, target, scale, tangent, *ctx.options)
        return moved if scaled is None else moved + scaled


class _Entropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(outputs: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
        value: Tensor = _value(outputs, target, ignored, smoothing)
        return value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        outputs, target, *ctx.options = inputs
        ctx.save_for_backward(outputs, target)
        ctx.save_for_forward(outputs, target)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        outputs, target = ctx.saved_tensors
        call: Any = _Gradient.apply
        return call(outputs, target, cotangent, *ctx.options), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Any) -> Any:
        outputs, target = ctx.saved_tensors
        return _slope(outputs, target, tangent, *ctx.options)


def chunked_entropy(outputs: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    """Return the mean cross-entropy of labels, twice differentiable in the outputs.

    Value, gradient and Hessian product each need the memory of a few chunks, in addition to inputs
    and result. The product also needs the gradient.
    """
    call: Any = _Entropy.apply
    value: Tensor = call(outputs, target, ignored, smoothing)
    return value


def chunked_hessian(
    outputs: Tensor, target: Tensor, tangent: Tensor, ignored: int, smoothing: float
) -> Tensor:
    """Return the Hessian of the mean cross-entropy in the outputs, times a tangent."""
    one = _wide(outputs[:0]).new_ones(())
    gradient = _gradient(outputs, target, one, ignored, smoothing)
    product: Tensor = _curvature(gradient, target, one, tangent, ignored, smoothing)
    return product
