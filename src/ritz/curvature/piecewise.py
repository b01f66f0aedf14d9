r"""Hessians of piecewise-linear networks, whose diagonal is that of the Gauss-Newton matrix.

Where a network of linear layers and piecewise-linear functions uses every parameter once, its
outputs are linear in each single one while the others are held: the second derivatives
:math:`\partial^2 f / \partial \theta_p^2` vanish, and :math:`H_{pp} = G_{pp}`.
"""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ritz.curvature.hessians import HessianOperator
from ritz.curvature.plans import structure_plan
from ritz.curvature.risk import Risk
from ritz.curvature.structured import planned_diagonal, planned_trace
from ritz.operators.structure import exact_diagonal, exact_trace, structure_gap, structure_note

LEAVES = {
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
}  # fmt: skip


def piecewise_gap(risk: Risk) -> str:
    """Return why the outputs may not be piecewise linear in single parameters, or nothing."""
    if risk.adapter.custom is not None:
        return "what forward= does with the outputs is not known"
    for name, module in risk.model.named_modules():
        kind = type(module)
        if kind is not nn.Sequential and kind not in LEAVES:
            return f"{name or 'the model'} is a {kind.__name__}, not known to be piecewise linear"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has hooks"
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            return f"{name or 'the model'} has no running statistics and couples samples"
    every = [id(value) for _, value in risk.model.named_parameters(remove_duplicate=False)]
    return "parameters are tied" if len(set(every)) < len(every) else ""


@exact_diagonal.register
def _(op: HessianOperator) -> Tensor | None:
    if piecewise_gap(op.risk):
        return None
    found = structure_plan(op.risk)
    return None if found.gap else planned_diagonal(op.risk, found)


@exact_trace.register
def _(op: HessianOperator) -> float | None:
    if piecewise_gap(op.risk):
        return None
    found = structure_plan(op.risk)
    return None if found.gap else planned_trace(op.risk, found)


@structure_note.register
def _(op: HessianOperator) -> str:
    same = "a piecewise-linear network has the diagonal of its Gauss-Newton matrix"
    return f"{structure_plan(op.risk).note()}; {same}"


@structure_gap.register
def _(op: HessianOperator) -> str:
    return piecewise_gap(op.risk) or structure_plan(op.risk).gap
