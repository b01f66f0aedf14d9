"""Exact diagonals and traces of curvature matrices, by the structure of the network."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ritz._core.progress import Progress, tracking
from ritz.curvature._matrices import GGNOperator, HessianOperator
from ritz.curvature._persample.capture import Captured, captured, full_name
from ritz.curvature._persample.plan import Plan, structure_plan, whole_gradients
from ritz.curvature._persample.rules import squared_gradients, squared_norm
from ritz.curvature._risk import Context, Params, Risk, recognised
from ritz.operators import Exact, exact
from ritz.operators._shared import Quantity

# ------------------------------------------------------------------------------------------
# Diagonals and traces of curvature that the structure of a network gives exactly.
#
# .. math:: G = \frac{1}{N} \sum_i J_i^\top S_i S_i^\top J_i + \mu I, \qquad
#     \operatorname{diag} G = \frac{1}{N} \sum_{i c} (J_i^\top s_{ic})^2 + \mu
#
# with a root :math:`S_i` of the Hessian of the loss in the outputs, known in closed form for
# the usual losses: as many backward passes as a sample has outputs, down to the outputs of
# modules alone; sample gradients follow by a rule for each kind of module.

DERIVATIVES = 2**24  # entries of derivatives by module outputs that are held at once
Columns = Callable[[int, Captured], Tensor]  # number and pass of a batch to (c, *outputs.shape)
Parts = Iterator[tuple[dict[str, Tensor], Params]]  # derivatives by module; gradients by name


def ggn_diagonal(risk: Risk, *, progress: bool | Progress = False) -> Tensor:
    r"""Return the diagonal ``(P,)`` of the Gauss-Newton matrix, exactly.

    One forward pass, and for each output of a sample a backward pass and the squares of sample
    gradients. Memory of the activations, some 100 MB beside.

    Args:
        risk: The loss at a point: cross-entropy, binary cross-entropy or squared error, of samples
            that do not depend on each other.
        progress: Show a progress bar over batches, or a :class:`Progress` to report to.

    Reference: Dangel, Kunstner and Hennig (2020).
    """
    return planned_diagonal(risk, _possible(risk, "ggn_diagonal()"), progress)


def ggn_trace(risk: Risk, *, progress: bool | Progress = False) -> float:
    r"""Return the trace of the Gauss-Newton matrix, exactly; see :func:`ggn_diagonal`.

    Cheaper than the diagonal where the norm of a sample gradient is known without the gradient:
    :math:`|\delta a^\top|^2 = |\delta|^2 |a|^2`.

    Args:
        risk: As there.
        progress: Show a progress bar over batches, or a :class:`Progress` to report to.
    """
    return planned_trace(risk, _possible(risk, "ggn_trace()"), progress)


def passes(risk: Risk, found: Plan, columns: Columns) -> Iterator[tuple[float, Captured, Parts]]:
    """Weight of every batch, what was captured, and its derivatives; inside ``settings``.

    The third is an iterator over parts of the columns: derivatives by module, and sample
    gradients ``(c, batch, *shape)`` by name of parameters that have no module to themselves.
    """
    for index, context, weight in risk.contexts():
        size = risk.batch_sizes[index]
        seen = captured(risk, context, found.modules, size)
        # An argument that has as many rows as there are samples by chance alone must not be cut.
        calls = {name: call for name, call in seen.calls.items()
                 if call.by_sample() == found.by_sample[name]}  # fmt: skip
        seen = replace(seen, calls=calls)
        lost = [full_name(module, own) for module, names in found.modules.items()
                if module not in seen.calls for own in names]  # fmt: skip
        whole = tuple(name for name in risk.space.shapes if name in (*found.whole, *lost))
        yield weight, seen, _parts(risk, context, seen, columns(index, seen), whole)


def root_columns(risk: Risk) -> Columns:
    """The columns of the root of the output Hessian."""
    known = recognised(risk.loss_fn)
    if known is None:
        raise ValueError(f"loss_fn must be one whose Hessian is known, got {risk.loss_fn}")
    return lambda index, seen: known.root(seen.outputs.detach(), seen.target)


def _parts(
    risk: Risk, context: Context, seen: Captured, columns: Tensor, whole: tuple[str, ...]
) -> Parts:
    entries = sum(call.output.numel() for call in seen.calls.values())
    width = max(1, DERIVATIVES // max(1, entries))
    for part in columns.split(width):
        yield seen.pull(part), {}
    if whole:
        for gradients in whole_gradients(risk, context, whole, columns):
            yield {}, gradients


def planned_diagonal(risk: Risk, found: Plan, progress: bool | Progress = False) -> Tensor:
    """The diagonal of the Gauss-Newton matrix by a plan."""
    total = {name: torch.zeros_like(value) for name, value in risk.params.items()}
    layers = dict(risk.model.named_modules())
    with risk.settings(), tracking(progress, "diagonal", risk.num_batches) as bar:
        for done, (weight, seen, parts) in enumerate(passes(risk, found, root_columns(risk)), 1):
            for derivatives, gradients in parts:
                for name, deltas in derivatives.items():
                    squares = squared_gradients(layers[name], seen.calls[name], deltas)
                    for own, square in squares.items():
                        total[full_name(name, own)].add_(square, alpha=weight)
                for name, gradient in gradients.items():
                    total[name].add_(gradient.square().sum((0, 1)), alpha=weight)
            bar.update(done)
    return risk.reduced(risk.space.flatten(total)) + risk.l2


def planned_trace(risk: Risk, found: Plan, progress: bool | Progress = False) -> float:
    """Its trace by a plan."""
    total = torch.zeros((), dtype=torch.float64, device=risk.theta.device)
    layers = dict(risk.model.named_modules())
    with risk.settings(), tracking(progress, "trace", risk.num_batches) as bar:
        for done, (weight, seen, parts) in enumerate(passes(risk, found, root_columns(risk)), 1):
            for derivatives, gradients in parts:
                for name, deltas in derivatives.items():
                    total += weight * squared_norm(layers[name], seen.calls[name], deltas)
                for gradient in gradients.values():
                    total += weight * gradient.square().sum(dtype=torch.float64)
            bar.update(done)
    return float(risk.reduced(total)) + risk.l2 * risk.space.size


def _possible(risk: Risk, what: str) -> Plan:
    found = structure_plan(risk)
    if found.gap:
        raise ValueError(f"{what} is not possible here: {found.gap}")
    return found


@exact.register
def _(op: GGNOperator, quantity: Quantity) -> Exact:
    return _by_structure(op.risk, quantity)


def _by_structure(risk: Risk, quantity: Quantity) -> Exact:
    plan = structure_plan(risk)
    if plan.gap:
        return Exact(None, plan.gap)
    compute = planned_diagonal if quantity == "diagonal" else planned_trace
    return Exact(compute(risk, plan), plan.note())


# ------------------------------------------------------------------------------------------
# Hessians of piecewise-linear networks, whose diagonal is that of the Gauss-Newton matrix.
#
# Where a network of linear layers and piecewise-linear functions uses every parameter once,
# its outputs are linear in each single one while the others are held: the second derivatives
# :math:`\partial^2 f / \partial \theta_p^2` vanish, and :math:`H_{pp} = G_{pp}`.

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


@exact.register
def _(op: HessianOperator, quantity: Quantity) -> Exact:
    if gap := piecewise_gap(op.risk):
        return Exact(None, gap)
    value, note = _by_structure(op.risk, quantity)
    same = "; a piecewise-linear network has the diagonal of its Gauss-Newton matrix"
    return Exact(value, note if value is None else note + same)
