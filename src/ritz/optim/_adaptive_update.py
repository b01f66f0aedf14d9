"""The formula of an adaptive step, applied in place to lists of tensors: eager or compiled."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, _default_to_fused_or_foreach

from ritz.optim._state_tensors import local

Form: TypeAlias = Literal["inside", "outside", "published"]
Number: TypeAlias = float | Tensor
Numbers: TypeAlias = "list[Scalars]"


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of chunks, and number of compiled graphs."""

    # Elements of a chunk on the CPU, per thread. Smaller chunks stay in the cache, but below this
    # size the overhead of the calls is larger than the gain.
    grain: int = 2**17
    # Largest number of graphs of an optimiser and group. It is the recompile limit of torch.
    max_graphs: int = 8


TUNING = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    r"""All settings of an adaptive update except its learning rate.

    Let :math:`\hat m = m / (1 - \beta_1^t)` and :math:`\hat v = v / (1 - \beta_2^t)` be the
    corrected moments. A step subtracts the learning rate times

    .. math::
        \text{inside: } \frac{\hat m}{(\hat v + \epsilon)^p}, \quad
        \text{outside (p = 1/2): } \frac{\hat m}{\sqrt{\hat v} + \epsilon}, \quad
        \text{published: } \frac{\sqrt{1 - \beta_2^t}\; \hat m}{(\sqrt{v} + \epsilon)^{2p}}.

    With ``amsgrad`` the second moment is the largest one so far: of :math:`\hat v` for ``inside``,
    and of the raw :math:`v` for the other two.
    """

    partial: float
    form: Form
    # The following are arguments of torch.optim.adam.adam too.
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled_weight_decay: bool
    capturable: bool
    differentiable: bool

    @property
    def decays(self) -> bool:
        """Whether weight decay multiplies the weights, instead of being added to the gradient."""
        return self.decoupled_weight_decay and self.weight_decay != 0

    @property
    def tensor_numbers(self) -> bool:
        """Whether learning rates and step counts must stay tensors."""
        return self.capturable or self.differentiable or torch.compiler.is_compiling()


class Buffers(NamedTuple):
    """Parameters, their gradients and their state, one list each, in the same order."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: Any = ()  # empty without AMSGrad
    steps: Any = ()  # not needed by move

    def local(self) -> "Buffers":
        """Return real views of complex tensors, and of sharded ones the part on this process."""
        if not any(p.is_complex() or hasattr(p, "to_local") for p in self.params):
            return self
        # The gradient of a replicated parameter may still be a partial sum over processes.
        pairs: Any = zip(self.params, self.grads, strict=True)
        grads = [
            g.redistribute(placements=p.placements) if hasattr(g, "placements") else g
            for p, g in pairs
        ]
        lists = self._replace(grads=grads)
        return Buffers(*([local(tensor) for tensor in tensors] for tensors in lists))


class Scalars(NamedTuple):
    """The numbers in the step of one parameter; see :func:`scalars`."""

    decay: Number
    rate: Number
    correction: Number
    shift: Number


def scalars(step: Number, lr: Number, rule: Rule) -> Scalars:
    """Return the numbers of a step, which is counted from one.

    They are combined such that :func:`move` needs few passes over the tensors.
    """
    if isinstance(step, Tensor):
        step = step.double()  # in float32 a correction of 1e-3 would lose four digits
    correction1: Number = 1 - rule.beta1**step
    correction2: Number = 1 - rule.beta2**step
    # m_hat = m / c1: the correction is part of the rate.
    rate = -lr / correction1
    if rule.form == "published":
        rate = rate * correction2**0.5
    elif not rule.amsgrad:
        # (v / c2 + eps)^p = (v + eps c2)^p / c2^p saves a pass over the second moment.
        rate = rate * correction2**rule.partial
    shift = rule.eps if rule.amsgrad else rule.eps * correction2
    return Scalars(1 - lr * rule.weight_decay, rate, correction2, shift)


def all_scalars(steps: list[Tensor], lr: Number, rule: Rule) -> list[Tensor]:
    """Return the numbers of the steps of many parameters as vectors, without reading the device."""
    counts = torch.stack(steps).double()
    return [
        part.expand_as(counts) if isinstance(part, Tensor) else torch.full_like(counts, part)
        for part in scalars(counts, lr, rule)
    ]


def move(b: Buffers, numbers: Numbers, rule: Rule) -> None:
    r"""Update parameters and moments in place. All adaptive optimisers use this formula.

    .. math:: w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, \hat m / (\hat v + \epsilon)^p

    Each operation is a single kernel launch for the whole list on CUDA, and a loop in C++ on the
    CPU.
    """
    rates: Any = [number.rate for number in numbers]
    grads: Any = torch._foreach_neg(b.grads) if rule.maximize else b.grads
    if rule.decays:
        # w <- (1 - lr lambda) w, with the factor in the dtype of w, so that it is one launch.
        decay: Any = numbers[0].decay
        decay = decay.to(b.params[0].dtype) if isinstance(decay, Tensor) else decay
        torch._foreach_mul_(b.params, decay)
    elif rule.weight_decay:
        # g <- g + lambda w
        grads = torch._foreach_add(grads, _clones(b.params, rule), alpha=rule.weight_decay)
    # m <- beta1 m + (1 - beta1) g and v <- beta2 v + (1 - beta2) g^2
    torch._foreach_lerp_(b.exp_avgs, grads, 1 - rule.beta1)
    torch._foreach_mul_(b.exp_avg_sqs, rule.beta2)
    torch._foreach_addcmul_(b.exp_avg_sqs, grads, grads, 1 - rule.beta2)
    moments: Any = _clones(b.exp_avg_sqs, rule)
    if rule.amsgrad:
        # v_max <- max(v_max, v_hat)
        if rule.form == "inside":
            corrections: Any = [number.correction for number in numbers]
            moments = torch._foreach_div(moments, corrections)
        torch._foreach_maximum_(b.max_exp_avg_sqs, moments)
        moments = _clones(b.max_exp_avg_sqs, rule)
    # w <- w - lr m_hat (v_hat + eps)^-p, where rates are negative
    if rule.partial == 0:
        # (v_hat + eps)^0 = 1. Computing it would take as long as the rest of the step.
        one_rate = not isinstance(rates[0], Tensor) and len(set(rates)) == 1
        steps: Any = b.exp_avgs
        if not one_rate:
            steps = torch._foreach_mul(_clones(b.exp_avgs, rule), rates)
        torch._foreach_add_(b.params, steps, alpha=rates[0] if one_rate else 1)
        return
    scales = _scales(moments, numbers, rule)
    if isinstance(rates[0], Tensor):
        torch._foreach_mul_(scales, rates)
        torch._foreach_addcmul_(b.params, _clones(b.exp_avgs, rule), scales)
    else:
        torch._foreach_addcmul_(b.params, b.exp_avgs, scales, rates)


def _clones(tensors: Any, rule: Rule) -> Any:
    # With ``differentiable``, autograd needs these values, but later operations overwrite them.
    return [tensor.clone() for tensor in tensors] if rule.differentiable else tensors


def _scales(moments: Any, numbers: Numbers, rule: Rule) -> Any:
    """Return the inverse powers of the second moments."""
    # An epsilon of 1e-8 underflows to zero in float16, which would lead to 0/0.
    moments = [v.float() if v.dtype == torch.float16 else v for v in moments]
    power = rule.partial
    bases: Any
    if rule.form == "published":
        bases, power = _clones(torch._foreach_sqrt(moments), rule), 2 * power
        torch._foreach_add_(bases, rule.eps)
    else:
        shifts: Any = rule.eps if rule.amsgrad else [number.shift for number in numbers]
        bases = torch._foreach_add(moments, shifts)
    if rule.differentiable:
        return torch._foreach_pow(bases, -power)
    # For powers 1/2, 1/4, 1/8 and 1/16: up to four roots are several times cheaper than pow.
    roots = -math.log2(power)
    if roots not in range(5):
        torch._foreach_pow_(bases, -power)
        return bases
    # k inverse roots give the power (-1/2)^k. On the CPU an inverse root takes 0.22 ns per element
    # and a root 0.35 ns.
    for _ in range(int(roots)):
        torch._foreach_rsqrt_(bases)
    if roots % 2 == 0:
        torch._foreach_reciprocal_(bases)
    return bases


def update(buffers: Buffers, rule: Rule, lr: Number, foreach: bool | None = None) -> None:
    r"""Take one step of ``rule`` on every parameter, in place.

    Temporary memory: that of the largest parameter, or of all parameters with ``foreach``.

    Args:
        buffers: Parameters, gradients and state. The gradients are not modified.
        rule: The settings, with form ``inside`` or ``published``.
        lr: Learning rate, a number or a tensor of one element.
        foreach: Apply each operation to all parameters at once. Defaults to the faster choice for
            their device.
    """
    if isinstance(lr, Tensor) and not rule.tensor_numbers:
        if foreach:
            raise RuntimeError(
                "lr as a Tensor is not supported for capturable=False and foreach=True"
            )
        lr = lr.item()  # eager operations take a number faster
    if foreach is None:
        foreach = _default_to_fused_or_foreach(buffers.params, rule.differentiable)[1]
    buffers = buffers.local()
    # A tensor on the CPU, because a number would be converted to a tensor for every step count.
    once = buffers.steps[0].is_cpu and not torch.compiler.is_compiling()
    torch._foreach_add_(buffers.steps, torch.tensor(1.0) if once else 1)
    groups = [buffers]
    if foreach:  # one list for each device and dtype
        lists: Any = list(buffers)
        by_kind: Any = Optimizer._group_tensors_by_device_and_dtype(lists)
        groups = [Buffers(*kind) for kind, _ in by_kind.values()]
    for group in groups:
        numbers = _numbers(group.steps, lr, rule)
        on_cpu = group.params[0].is_cpu and not rule.tensor_numbers
        whole = torch.compiler.is_compiling() or (foreach and not on_cpu)
        for chunk in [(group, numbers)] if whole else _chunks(group, numbers, rule):
            move(*chunk, rule)


def _numbers(steps: list[Tensor], lr: Number, rule: Rule) -> Numbers:
    """Return the numbers of every parameter. Equal step counts are computed once."""
    if rule.tensor_numbers:
        columns = [part.unbind() for part in all_scalars(steps, lr, rule)]
        return [Scalars(*row) for row in zip(*columns, strict=True)]
    counts = [step.item() for step in steps]
    known = {count: scalars(count, lr, rule) for count in set(counts)}
    return [known[count] for count in counts]


def _chunks(b: Buffers, numbers: Numbers, rule: Rule) -> Iterator[tuple[Buffers, Numbers]]:
    """Yield parts of the buffers with their numbers. On the CPU, each part fits into the cache.

    There, large parameters are split and small ones are combined. On other devices each parameter
    is a part.
    """
    on_cpu = b.params[0].is_cpu and not rule.tensor_numbers
    size = TUNING.grain * torch.get_num_threads() if on_cpu else 1
    lists = [tensors for tensors in b[:5] if tensors]
    chunk: list[tuple[Any, Scalars]] = []
    room = size
    for index, (*row, number) in enumerate(zip(*lists, numbers, strict=True), start=1):
        pieces = _pieces(row, size) if on_cpu else [row]
        for piece in pieces:
            chunk.append((piece, number))
            room -= piece[0].numel()
            if room <= 0 or (index == len(numbers) and piece is pieces[-1]):
                rows, their_numbers = zip(*chunk, strict=True)
                yield Buffers(*map(list, zip(*rows, strict=True))), list(their_numbers)
                chunk, room = [], size


def _pieces(row: Any, size: int) -> list[Any]:
    if row[0].numel() <= size:
        return [row]
    if not all(type(t) in (Tensor, Parameter) and t.is_contiguous() for t in row):
        return [row]
    return list(zip(*(t.detach().view(-1).split(size) for t in row), strict=True))


@final
class CompiledStep:
    """The update as one compiled graph. A new learning rate does not cause another compilation.

    After ``TUNING.max_graphs`` different settings or sets of parameters (such as scheduled betas),
    other settings are updated without a graph.
    """

    def __init__(self) -> None:
        # A separate code object, so that graphs of other optimisers do not count for its limit.
        code = FunctionType(_graph.__code__.replace(), _graph.__globals__)
        self._graph = torch.compile(code, dynamic=False, fullgraph=True)
        self._kinds: set[tuple[Any, ...]] = set()
        self._warned = False

    def __call__(self, buffers: Buffers, rule: Rule, lr: Number) -> None:
        # The settings are constants of the graph, except the decay, which is in the table.
        fixed = replace(rule, weight_decay=1.0) if rule.decays else rule
        if not self._has_graph((fixed, *map(id, buffers.params))):
            update(buffers, rule, lr)
            return
        *lists, steps = buffers.local()
        # The compiler treats float64 tensors without dimensions as constants.
        flat = ([t.view(1) if t.ndim == 0 else t for t in tensors] for tensors in lists)
        self._graph(list(flat), _table(lists[0], steps, rule, lr), fixed)
        torch._foreach_add_(steps, 1)

    def _has_graph(self, kind: tuple[Any, ...]) -> bool:
        if len(self._kinds) < TUNING.max_graphs:
            self._kinds.add(kind)
        if kind in self._kinds:
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                "compile=True: settings, or the parameters with gradients, changed too often (more "
                f"than {TUNING.max_graphs} variants); further variants are not compiled",
                stacklevel=2,
            )
        return False


def _table(params: list[Tensor], steps: list[Tensor], rule: Rule, lr: Number) -> Tensor:
    """Return the numbers of the next step as a tensor with one row per parameter."""
    wide = any(param.dtype == torch.float64 for param in params)
    dtype = torch.float64 if wide else torch.float32
    if rule.capturable:
        coming: Any = torch._foreach_add(steps, 1)
        return torch.stack(all_scalars(coming, lr, rule), 1).to(dtype)
    rows = [scalars(step.item() + 1, float(lr), rule) for step in steps]
    return torch.tensor(rows, dtype=dtype, device=params[0].device)


def _graph(lists: list[list[Tensor]], table: Tensor, rule: Rule) -> None:
    move(Buffers(*lists), [Scalars(*row.unbind()) for row in table.unbind()], rule)
