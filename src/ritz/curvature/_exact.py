r"""Exact diagonals and traces of Gauss-Newton and Fisher matrices, from the layers of a network.

.. math:: G = \frac{1}{N} \sum_i J_i^\top S_i S_i^\top J_i + \mu I, \qquad
    \operatorname{diag} G = \frac{1}{N} \sum_{i c} (J_i^\top s_{ic})^2 + \mu

:math:`S_i` is a square root of the Hessian of the loss in the outputs. For known losses it has a
closed form, with one column :math:`s_{ic}` per output of a sample. Each column costs one backward
pass down to the outputs of the modules. The sample gradients follow by a rule for each class of
module. An empirical Fisher matrix needs one column, the derivative of the loss of a sample. A Monte
Carlo Fisher matrix needs one column per drawn label.

Reference: Dangel, Kunstner and Hennig (2020).
"""

import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ritz.curvature._losses import as_likelihood
from ritz.curvature._matrices import FisherOperator, GGNOperator, HessianOperator
from ritz.curvature._risk import Risk
from ritz.curvature._sample_gradients import (
    TUNING,
    Columns,
    ForwardPass,
    loss_columns,
    root_columns,
    structure_squares,
)
from ritz.operators import Exact, exact
from ritz.operators._shared import Quantity


def _by_structure(risk: Risk, quantity: Quantity) -> Exact:
    # Called late: if the loss has no root, the plan says so before this is reached.
    columns: Columns = lambda index, full: root_columns(risk)(index, full)  # noqa: E731
    value, note = structure_squares(risk, quantity, columns, roots=True)
    if value is None:
        return Exact(None, note)
    return Exact(value + risk.l2 * (risk.space.size if quantity == "trace" else 1), note)


@exact.register
def _(op: GGNOperator, quantity: Quantity) -> Exact:
    return _by_structure(op.risk, quantity)


@exact.register
def _(op: FisherOperator, quantity: Quantity) -> Exact:
    risk = op.risk
    if op.kind == "empirical":
        return structure_squares(risk, quantity, loss_columns(risk))
    known, labels = as_likelihood(risk.loss_fn), op.products.extra

    def columns(index: int, full: ForwardPass) -> Tensor:
        outputs = full.outputs.detach()
        draws = [known.score(outputs, full.target, drawn) for drawn in labels(index).unbind(1)]
        terms = torch.cat([known.by_term(score) for score in draws])
        if len(terms) > TUNING.max_columns:
            raise ValueError(f"{len(terms)} backward passes per batch: probes cost less")
        return terms / math.sqrt(len(draws))

    value, note = structure_squares(risk, quantity, columns)
    return Exact(value, note.replace("1 backward pass", "one backward pass per drawn label"))


# ------------------------------------------------------------------------------------------
# Hessians of piecewise-linear networks.
#
# If a network consists of linear layers and piecewise-linear functions and uses every parameter
# once, its outputs are piecewise linear in each single parameter. Then d^2 f / d theta_p^2 = 0,
# and H_pp = G_pp.


@final
class Rows(nn.Identity):
    """The identity on inputs ``(n, features)``. It raises for other shapes."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        if input.ndim != 2:
            shape = tuple(input.shape)
            raise ValueError(f"folded batch norm needs inputs of shape (n, features), got {shape}")
        return input


LEAVES = {
    Rows, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
}  # fmt: skip


def piecewise_gap(risk: Risk) -> str:
    """Return why the outputs may not be piecewise linear in each parameter, or ``""``."""
    if risk.adapter.custom is not None:
        return "forward= is user-defined, so the function of the parameters is not known"
    for name, module in risk.model.named_modules():
        kind, label = type(module), f"layer {name!r}" if name else "the model"
        if kind is not nn.Sequential and kind not in LEAVES:
            return f"{label}, {kind.__name__}, is not known to be piecewise linear"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{label} has hooks"
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            return f"{label} has no running statistics and couples samples"
    values = [id(value) for _, value in risk.model.named_parameters(remove_duplicate=False)]
    return "parameters are tied" if len(set(values)) < len(values) else ""


@exact.register
def _(op: HessianOperator, quantity: Quantity) -> Exact:
    if gap := piecewise_gap(op.risk):
        return Exact(None, gap)
    value, note = _by_structure(op.risk, quantity)
    same = (
        "; for this piecewise-linear network, Hessian and Gauss-Newton matrix have equal diagonals"
    )
    return Exact(value, note if value is None else note + same)
