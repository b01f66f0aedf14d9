"""One adaptive update of lists of tensors, in place: one by one, all at once, or compiled."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adam import adam
from torch.optim.optimizer import Optimizer, _default_to_fused_or_foreach

from ritz.optim._companions import local

# ------------------------------------------------------------------------------------------
# What an adaptive update does, and the tensors and numbers it does it with.

Form: TypeAlias = Literal["inside", "outside", "published"]
Number: TypeAlias = float | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    r"""One adaptive update, apart from its rate.

    With :math:`\hat m` and :math:`\hat v` the corrected moments, the step is the rate times

    .. math::
        \text{inside: } \frac{\hat m}{(\hat v + \epsilon)^p}, \quad
        \text{outside (p = 1/2): } \frac{\hat m}{\sqrt{\hat v} + \epsilon}, \quad
        \text{published: } \frac{\sqrt{1 - \beta_2^t}\; \hat m}{(\sqrt{v} + \epsilon)^{2p}}.

    With ``amsgrad`` the second moment is the largest so far: of :math:`\hat v` inside the power, of
    the raw :math:`v` in the other two.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    partial: float
    form: Form
    amsgrad: bool
    maximize: bool
    decoupled: bool
    capturable: bool
    differentiable: bool

    @property
    def decays(self) -> bool:
        """Whether the weights shrink by a factor."""
        return self.decoupled and self.weight_decay != 0

    @property
    def penalizes(self) -> bool:
        """Whether the gradient has an L2 term."""
        return not self.decoupled and self.weight_decay != 0

    @property
    def corrects(self) -> bool:
        """Whether AMSGrad compares second moments after their correction."""
        return self.amsgrad and self.form == "inside"

    @property
    def tensor_numbers(self) -> bool:
        """Whether rates and steps must stay tensors."""
        return self.capturable or self.differentiable or torch.compiler.is_compiling()


@dataclass(slots=True)
class Buffers:
    """Parameters, their gradients and their state, one list each, in the same order."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: list[Tensor]

    def lists(self) -> list[list[Tensor]]:
        """The six lists in order."""
        return [getattr(self, field.name) for field in fields(self)]

    def rows(self) -> Iterator[tuple[Tensor, ...]]:
        """Per parameter: itself, gradient, moments and, with AMSGrad, the largest moment."""
        lists = self.lists()[: 5 if self.max_exp_avg_sqs else 4]
        return zip(*lists, strict=True)

    def real(self) -> "Buffers":
        """The same tensors, complex ones seen as real."""
        if not any(param.is_complex() for param in self.params):
            return self
        lists = [[_as_real(t) for t in tensors] for tensors in self.lists()]
        return Buffers(*lists)

    def own(self) -> "Buffers":
        """The same tensors, of sharded ones the part that is here: the update is elementwise."""
        if not any(hasattr(param, "to_local") for param in self.params):
            return self
        lists = [[local(t) for t in tensors] for tensors in self.lists()]
        return Buffers(*lists)


class Scalars(NamedTuple):
    """Factors on weights and on direction, correction of the second moment, what is added to it."""

    decay: Number
    rate: Number
    correction: Number
    shift: Number


def scalars(step: Number, lr: Number, rule: Rule) -> Scalars:
    """The numbers of a step, counted from one."""
    if isinstance(step, Tensor):
        step = step.double()  # in float32 a correction of 1e-3 would have lost four digits
    correction1: Number = 1 - rule.beta1**step
    correction2: Number = 1 - rule.beta2**step
    rate = -lr / correction1
    if rule.form == "published":
        rate = rate * correction2**0.5
    elif not rule.amsgrad:
        # (v / c + eps)^p = (v + eps c)^p / c^p saves a pass over the second moment.
        rate = rate * correction2**rule.partial
    shift = rule.eps if rule.amsgrad else rule.eps * correction2
    return Scalars(1 - lr * rule.weight_decay, rate, correction2, shift)


def all_scalars(steps: list[Tensor], lr: Number, rule: Rule) -> Scalars:
    """The numbers of many steps as vectors, in few operations and without a wait for a device."""
    counts = torch.stack(steps).double()
    return Scalars(*(
        part.expand_as(counts) if isinstance(part, Tensor) else torch.full_like(counts, part)
        for part in scalars(counts, lr, rule)
    ))  # fmt: skip


def plain(number: Number, rule: Rule) -> Number:
    """A number, unless the rule needs tensors: eager operations take it faster."""
    if isinstance(number, Tensor) and not rule.tensor_numbers:
        return number.item()
    return number


def num_roots(power: float) -> int | None:
    """How many square roots in a row make this power, if at most four do.

    They are several times cheaper than ``pow``.
    """
    return {0.5**k: k for k in range(5)}.get(power)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# ------------------------------------------------------------------------------------------
# The adaptive update, one parameter after the other.

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


# ------------------------------------------------------------------------------------------
# The adaptive update, all parameters through each operation together.


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


# ------------------------------------------------------------------------------------------
# One adaptive step on lists of tensors, in place, by whichever means serve best.

MAX_GRAPHS = 8  # of one optimiser and group: torch compiles no function more often


def update(
    buffers: Buffers,
    rule: Rule,
    *,
    lr: Number,
    foreach: bool | None = None,
    fused: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    r"""One step of ``rule`` on every parameter, in place.

    Where epsilon stands outside the root the update is torch's Adam or AdamW, on its kernels.
    Memory beyond the state: as much as the largest parameter, with ``foreach`` as all of them.

    Args:
        buffers: Parameters, gradients and state; the gradients are not written to.
        rule: The update.
        lr: The rate, a number or a tensor of one element.
        foreach: Take all parameters through each operation together; None decides by device.
        fused: Use torch's fused kernel (``form="outside"`` only).
        grad_scale: Scale of the gradients, divided out by the fused kernel.
        found_inf: One where a gradient overflowed; the fused kernel then leaves all as it is.
    """
    if rule.form == "outside":
        _torch_adam(buffers, rule, lr, foreach, fused, grad_scale, found_inf)
        return
    if foreach is None:
        foreach = _default_to_fused_or_foreach(buffers.params, rule.differentiable)[1]
        lr = plain(lr, rule)
    if foreach:
        move_foreach(buffers, rule, lr)
    else:
        move_each(buffers, rule, plain(lr, rule))


@final
class CompiledStep:
    """The same update as one compiled graph; a new rate or step does not compile it again.

    What comes with more than ``MAX_GRAPHS`` sets of other settings or of parameters, as betas that
    are scheduled do, is updated without a graph from then on.
    """

    def __init__(self) -> None:
        # A code object of its own: graphs of other optimisers do not count against its limit.
        own = FunctionType(_graph.__code__.replace(), _graph.__globals__)
        self._graph = torch.compile(own, dynamic=False, fullgraph=True)
        self._kinds: set[tuple[Any, ...]] = set()
        self._warned = False

    def __call__(self, buffers: Buffers, rule: Rule, lr: Number) -> None:
        # Numbers of the rule are constants of the graph, so what the table holds is left out.
        fixed = replace(rule, weight_decay=1.0) if rule.decays else rule
        if not self._has_graph((fixed, *map(id, buffers.params))):
            update(buffers, rule, lr=lr)
            return
        real = buffers.own().real()
        # The compiler takes double precision numbers without dimensions for constants.
        lists = ([t.view(1) if t.ndim == 0 else t for t in one] for one in real.lists()[:5])
        self._graph(*lists, _table(real, rule, lr), fixed)
        torch._foreach_add_(buffers.steps, 1)

    def _has_graph(self, kind: tuple[Any, ...]) -> bool:
        if len(self._kinds) < MAX_GRAPHS:
            self._kinds.add(kind)
        if kind in self._kinds:
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"compile=True: more than {MAX_GRAPHS} sets of settings, or of parameters with "
                "gradients; steps with further ones are not compiled",
                stacklevel=2,
            )
        return False


def _table(buffers: Buffers, rule: Rule, lr: Number) -> Tensor:
    """The numbers of the step that comes, a row for each parameter."""
    wide = any(param.dtype == torch.float64 for param in buffers.params)
    dtype = torch.float64 if wide else torch.float32
    if rule.capturable:
        coming: Any = torch._foreach_add(buffers.steps, 1)
        columns: Any = all_scalars(coming, lr, rule)
        return torch.stack(columns, 1).to(dtype)
    rows = [scalars(count.item() + 1, float(lr), rule) for count in buffers.steps]
    return torch.tensor(rows, dtype=dtype, device=buffers.params[0].device)


def _graph(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    table: Tensor,
    rule: Rule,
) -> None:
    buffers = Buffers(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, [])
    numbers = [Scalars(*row.unbind()) for row in table.unbind()]
    if params[0].is_cuda:
        move_all(buffers, numbers, rule)  # the compiler launches these together
        return
    for row, scalar in zip(buffers.rows(), numbers, strict=True):
        move(row, scalar, rule)


def _torch_adam(
    buffers: Buffers,
    rule: Rule,
    lr: Number,
    foreach: bool | None,
    fused: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    adam(
        buffers.params,
        buffers.grads,
        buffers.exp_avgs,
        buffers.exp_avg_sqs,
        buffers.max_exp_avg_sqs,
        buffers.steps,
        foreach=False if fused else foreach,
        fused=fused or None,  # None: torch decides between the other two
        capturable=rule.capturable,
        differentiable=rule.differentiable,
        grad_scale=grad_scale,
        found_inf=found_inf,
        has_complex=any(param.is_complex() for param in buffers.params),
        decoupled_weight_decay=rule.decoupled,
        amsgrad=rule.amsgrad,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=rule.maximize,
    )
