"""The adaptive update, one parameter after the other."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ritz.optim.rules import Buffers, Number, Rule, Scalars, num_roots, plain, scalars

# Elements a thread works on at a time. Smaller pieces stay nearer the processor, but below this
# the calls cost more than they save.
GRAIN = 2**17


def move_each(buffers: Buffers, rule: Rule, lr: Number) -> None:
    """Take one step, parameter by parameter and, on the CPU, piece by piece."""
    for row, step in zip(buffers.real().rows(), buffers.steps, strict=True):
        step += 1
        numbers = scalars(plain(step, rule), lr, rule)
        for piece in _pieces(row, rule):
            move(piece, numbers, rule)


def move(row: tuple[Tensor, ...], numbers: Scalars, rule: Rule) -> None:
    """Update one parameter and its moments, given the numbers of the step."""
    param, grad, exp_avg, exp_avg_sq, *largest = row
    if rule.maximize:
        grad = -grad
    if rule.decays:
        param.mul_(numbers.decay)
    if rule.penalizes:
        grad = grad.add(param, alpha=rule.weight_decay)
    exp_avg.lerp_(grad, 1 - rule.beta1)
    exp_avg_sq.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)
    direction = exp_avg
    if rule.differentiable:  # the next step writes to both, and the graph needs them as they are
        direction, exp_avg_sq = exp_avg.clone(), exp_avg_sq.clone()
    moment = _moment(exp_avg_sq, largest, numbers.correction, rule)
    if rule.partial == 0:
        _add(param, direction, numbers.rate)
        return
    scale = _scale(moment, numbers.shift, rule)
    if isinstance(numbers.rate, Tensor):
        param.add_(direction * (scale * numbers.rate))
    else:
        param.addcmul_(direction, scale, value=numbers.rate)


def _add(param: Tensor, direction: Tensor, rate: Number) -> None:
    if isinstance(rate, Tensor):
        param.add_(direction * rate)
    else:
        param.add_(direction, alpha=rate)


def _moment(
    exp_avg_sq: Tensor, largest: Sequence[Tensor], correction: Number, rule: Rule
) -> Tensor:
    moment = exp_avg_sq / correction if rule.corrects else exp_avg_sq
    for maximum in largest:
        before = maximum.clone() if rule.differentiable else maximum
        moment = maximum.copy_(torch.maximum(before, moment))
    return moment


def _scale(moment: Tensor, shift: Number, rule: Rule) -> Tensor:
    if moment.dtype == torch.float16:
        moment = moment.float()  # an epsilon of 1e-8 is nought in float16, and 0/0 follows
    if rule.form == "published":
        return _inverse_power(moment.sqrt() + rule.eps, 2 * rule.partial, rule)
    return _inverse_power(moment + shift, rule.partial, rule)


def _inverse_power(base: Tensor, power: float, rule: Rule) -> Tensor:
    roots = num_roots(power)
    if rule.differentiable or roots is None:
        return base.pow(-power) if rule.differentiable else base.pow_(-power)
    if roots == 0:
        return base.reciprocal_()
    base.rsqrt_()
    for _ in range(roots - 1):
        base.sqrt_()
    return base


def _pieces(row: tuple[Tensor, ...], rule: Rule) -> Iterable[tuple[Tensor, ...]]:
    """A row cut so that its operations find their operands in the cache."""
    if rule.tensor_numbers or not row[0].is_cpu:
        return [row]
    size = GRAIN * torch.get_num_threads()  # asking breaks a graph that is being traced
    if row[0].numel() <= size or not all(map(_is_flat, row)):
        return [row]
    return zip(*(t.detach().view(-1).split(size) for t in row), strict=True)


def _is_flat(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter) and tensor.is_contiguous()
