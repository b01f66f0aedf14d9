"""One adaptive step on lists of tensors, in place, by whichever means serve best."""

import warnings
from dataclasses import replace
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import _default_to_fused_or_foreach

from ritz.optim.elementwise import move, move_each
from ritz.optim.foreach import move_all, move_foreach
from ritz.optim.rules import Buffers, Number, Rule, Scalars, all_scalars, plain, scalars

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
