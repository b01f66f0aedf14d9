r"""Diagonals and traces of curvature that the structure of a network gives exactly.

.. math:: G = \frac{1}{N} \sum_i J_i^\top S_i S_i^\top J_i + \mu I, \qquad
    \operatorname{diag} G = \frac{1}{N} \sum_{i c} (J_i^\top s_{ic})^2 + \mu

with a root :math:`S_i` of the Hessian of the loss in the outputs, known in closed form for the
usual losses: as many backward passes as a sample has outputs, down to the outputs of modules alone;
sample gradients follow by a rule for each kind of module.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ritz._core.progress import Progress, tracking
from ritz.curvature.capture import Captured, captured, full_name
from ritz.curvature.ggns import GGNOperator
from ritz.curvature.losses import recognised
from ritz.curvature.plans import Plan, structure_plan, whole_gradients
from ritz.curvature.points import Context, Params
from ritz.curvature.risk import Risk
from ritz.curvature.rules import squared_gradients, squared_norm
from ritz.operators.structure import exact_diagonal, exact_trace, structure_gap, structure_note

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
        progress: Whether to show a bar of batches, or what to tell.

    Reference: Dangel, Kunstner and Hennig (2020).
    """
    return planned_diagonal(risk, _possible(risk, "ggn_diagonal()"), progress)


def ggn_trace(risk: Risk, *, progress: bool | Progress = False) -> float:
    r"""Return the trace of the Gauss-Newton matrix, exactly; see :func:`ggn_diagonal`.

    Cheaper than the diagonal where the norm of a sample gradient is known without the gradient:
    :math:`|\delta a^\top|^2 = |\delta|^2 |a|^2`.

    Args:
        risk: As there.
        progress: Whether to show a bar of batches, or what to tell.
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


@exact_diagonal.register
def _(op: GGNOperator) -> Tensor | None:
    found = structure_plan(op.risk)
    return None if found.gap else planned_diagonal(op.risk, found)


@exact_trace.register
def _(op: GGNOperator) -> float | None:
    found = structure_plan(op.risk)
    return None if found.gap else planned_trace(op.risk, found)


@structure_note.register
def _(op: GGNOperator) -> str:
    return structure_plan(op.risk).note()


@structure_gap.register
def _(op: GGNOperator) -> str:
    return structure_plan(op.risk).gap
