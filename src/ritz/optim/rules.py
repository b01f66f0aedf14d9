"""What an adaptive update does, and the tensors and numbers it does it with."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ritz.optim.companions import local

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
