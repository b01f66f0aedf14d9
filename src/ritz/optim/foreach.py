"""The adaptive update, all parameters through each operation together."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ritz.optim.elementwise import move_each
from ritz.optim.rules import Buffers, Number, Rule, Scalars, all_scalars, num_roots, scalars


def move_foreach(buffers: Buffers, rule: Rule, lr: Number) -> None:
    """Take one step, device by device and dtype by dtype."""
    if isinstance(lr, Tensor) and not rule.tensor_numbers:
        raise RuntimeError("lr as a Tensor is not supported for capturable=False and foreach=True")
    lists: Any = buffers.lists()
    for kind, _ in Optimizer._group_tensors_by_device_and_dtype(lists).values():
        group = Buffers(*(list(tensors) for tensors in kind))  # type: ignore[arg-type]
        if group.params[0].dtype == torch.float16:
            move_each(group, rule, lr)  # the denominator is float32 there
        else:
            _count(group.steps)
            move_all(group.real(), _numbers(group.steps, lr, rule), rule)


def move_all(b: Buffers, numbers: list[Scalars], rule: Rule) -> None:
    """Update parameters of one device and dtype, given the numbers of their steps."""
    grads: Any = torch._foreach_neg(b.grads) if rule.maximize else b.grads
    if rule.decays:
        _shrink(b.params, numbers[0].decay)
    if rule.penalizes:
        grads = torch._foreach_add(grads, b.params, alpha=rule.weight_decay)
    torch._foreach_lerp_(b.exp_avgs, grads, 1 - rule.beta1)
    torch._foreach_mul_(b.exp_avg_sqs, rule.beta2)
    torch._foreach_addcmul_(b.exp_avg_sqs, grads, grads, 1 - rule.beta2)
    moments = _moments(b, numbers, rule)
    rates: Any = [number.rate for number in numbers]
    if rule.partial == 0:
        steps: Any = torch._foreach_mul(b.exp_avgs, rates)
        torch._foreach_add_(b.params, steps)
        return
    scales = _scales(moments, numbers, rule)
    if isinstance(rates[0], Tensor):
        torch._foreach_mul_(scales, rates)
        torch._foreach_addcmul_(b.params, b.exp_avgs, scales)
    else:
        torch._foreach_addcmul_(b.params, b.exp_avgs, scales, rates)


def _shrink(params: list[Tensor], decay: Number) -> None:
    # The same for all: a number or a tensor of their own type takes one launch.
    if isinstance(decay, Tensor):
        torch._foreach_mul_(params, decay.to(params[0].dtype))
    else:
        torch._foreach_mul_(params, decay)


def _moments(b: Buffers, numbers: list[Scalars], rule: Rule) -> list[Tensor]:
    if not rule.amsgrad:
        return b.exp_avg_sqs
    moments: Any = b.exp_avg_sqs
    if rule.corrects:
        corrections: Any = [number.correction for number in numbers]
        moments = torch._foreach_div(moments, corrections)
    torch._foreach_maximum_(b.max_exp_avg_sqs, moments)
    return b.max_exp_avg_sqs


def _scales(moments: list[Tensor], numbers: list[Scalars], rule: Rule) -> list[Tensor]:
    power = rule.partial
    bases: Any
    if rule.form == "published":
        bases, power = torch._foreach_sqrt(moments), 2 * power
        torch._foreach_add_(bases, rule.eps)
    elif rule.amsgrad:
        bases = torch._foreach_add(moments, rule.eps)
    else:
        shifts: Any = [number.shift for number in numbers]
        bases = torch._foreach_add(moments, shifts)
    _invert(bases, power)
    return list(bases)


def _invert(bases: list[Tensor], power: float) -> None:
    roots = num_roots(power)
    if roots is None:
        torch._foreach_pow_(bases, -power)
    elif roots == 0:
        torch._foreach_reciprocal_(bases)
    else:
        torch._foreach_rsqrt_(bases)
        for _ in range(roots - 1):
            torch._foreach_sqrt_(bases)


def _numbers(steps: list[Tensor], lr: Number, rule: Rule) -> list[Scalars]:
    """The numbers of every parameter; those of the same step are computed once."""
    if rule.tensor_numbers:
        columns = [part.unbind() for part in all_scalars(steps, lr, rule)]  # type: ignore[union-attr]
        return [Scalars(*row) for row in zip(*columns, strict=True)]
    counts = [step.item() for step in steps]
    known = {count: scalars(count, lr, rule) for count in set(counts)}
    return [known[count] for count in counts]


def _count(steps: list[Tensor]) -> None:
    if steps[0].is_cpu and not torch.compiler.is_compiling():
        # One tensor for all: a number would be wrapped anew for every step.
        torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)
