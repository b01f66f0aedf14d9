"""Mass of a spectrum at the origin, and a bound on the rank of the Gauss-Newton matrix."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from ritz._core.batches import is_rows
from ritz._core.checks import check_choice
from ritz._core.results import Estimate, plain_estimate
from ritz._core.storage import storable
from ritz.curvature import Risk
from ritz.curvature._shared import MATRICES, CurvatureMatrix, KnownLoss, known_loss, require_outputs
from ritz.spectra import Spectrum

# The mass at the origin is in doubt if its residual exceeds the gap over this. Eigenvalues that
# crowd towards zero, evenly in their logarithm, have ratios of 0.08 to 0.25 for 5 to 80 steps.
CROWDING = 12.0


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Degeneracy:
    """The eigenvalues nearest to zero.

    Attributes:
        mass: Estimated fraction of eigenvalues that are nearly zero. Its truncation is the part
            that may belong to eigenvalues near zero but apart from it.
        value: Mean of these eigenvalues, which should be close to 0. Its truncation is the largest
            residual.
        interval: The fraction stands for eigenvalues between these two.
        matrix: ``hessian`` or ``ggn``.
    """

    mass: Estimate
    value: Estimate
    interval: tuple[float, float]
    matrix: str

    def __str__(self) -> str:
        mass = plain_estimate(self.mass)
        low, high = self.interval
        return (
            f"a fraction {mass} (truncation {float(self.mass.truncation):.2g}) of the eigenvalues "
            f"is near zero, at {float(self.value.mean):.2g}, in [{low:.2g}, {high:.2g}]"
        )


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class RankBound:
    r"""Bound on the rank of the Gauss-Newton matrix without L2 term.

    Attributes:
        bound: The rigorous bound.
        num_parameters: Number of parameters :math:`P`.
        num_terms: Number of terms of the loss: samples, times positions for softmax cross-entropy.
        num_outputs: Number of outputs over all samples.
        softmax: Whether each term reduces the rank by one, since the loss does not depend on shifts
            of its logits.
        hidden_units: Output features and channels of all linear and convolutional layers but the
            last; ``None`` if there is no such layer.
        num_inputs: Number of entries of one sample's input.
        comparison: :math:`4 d_y (\sum_l N_l + d_x)`, *not* a bound on the matrix of many samples.
        l2: Coefficient of the L2 term, which is added to every eigenvalue.
    """

    bound: int
    num_parameters: int
    num_terms: int
    num_outputs: int
    softmax: bool
    hidden_units: int | None
    num_inputs: int | None
    comparison: int | None
    l2: float

    def __str__(self) -> str:
        share = 1 - self.bound / self.num_parameters
        less = f" - {self.num_terms:,} terms" if self.softmax else ""
        lines = [
            f"rank of the Gauss-Newton matrix <= {self.bound:,} = min({self.num_parameters:,} "
            f"parameters, {self.num_outputs:,} outputs{less}): a fraction of at least {share:.4g} "
            "of the eigenvalues is " + (f"{self.l2:g}, the L2 coefficient" if self.l2 else "zero")
        ]
        if self.comparison is not None:
            lines.append(
                f"for comparison only, no bound: 4 d_y (sum N_l + d_x) = {self.comparison:,} "
                f"({self.hidden_units:,} hidden units, {self.num_inputs:,} inputs)"
            )
        return "\n".join(lines)


def rank_degeneracy(
    spectra: Spectrum | Sequence[Spectrum], *, matrix: CurvatureMatrix
) -> Degeneracy:
    r"""Return the mass at the origin and its position, with error bars.

    .. math:: \sum_{k \in S} \tau_k, \quad S = \{k : |\theta_k| \le r_k\}

    with Ritz values :math:`\theta_k`, weights :math:`\tau_k` and residuals :math:`r_k`: all that
    are zero within their residual. If there is none, :math:`S` is the nearest to zero for the
    Gauss-Newton matrix, and the two nearest for the Hessian, whose mass at the origin splits
    between them. ``truncation`` is the mass that may belong to eigenvalues apart from zero: none if
    the residuals are far below the distance to the other Ritz values, and all of it if eigenvalues
    crowd towards zero. Raise the number of steps to reduce it. Cost: no products. A single spectrum
    has no error bars.

    Args:
        spectra: Whole spectra, one per probe, as from :func:`ritz.spectra.lanczos_block`.
        matrix: Matrix of the spectra, ``hessian`` or ``ggn``.

    Reference: Section 3.2 of *Flatness is a False Friend*.
    """
    check_choice("matrix", matrix, MATRICES)
    runs = list(spectra) if isinstance(spectra, Iterable) else [spectra]
    if not runs:
        raise ValueError("spectra must not be empty")
    for run in runs:
        if not isinstance(run, Spectrum):
            raise TypeError(f"spectra must be results of lanczos or lanczos_block, got {type(run)}")
    origins = [_origin(run, 1 if matrix == "ggn" else 2) for run in runs]
    columns = torch.tensor(origins, dtype=torch.float64).T
    mass, value = (
        Estimate.of(
            columns[index],
            truncation=columns[index + 2].mean(),
            method="Ritz values at the origin",
            num_products=sum(run.num_products for run in runs),
            seed=runs[0].seed,
        )
        for index in (0, 1)
    )
    interval = (float(columns[4].min()), float(columns[5].max()))
    return Degeneracy(mass=mass, value=value, interval=interval, matrix=matrix)


def rank_bound(risk: Risk) -> RankBound:
    r"""Return a bound on the rank of the Gauss-Newton matrix.

    .. math:: \operatorname{rank} G \le \min(P, N (d_y - 1))

    for softmax cross-entropy, and :math:`\min(P, N d_y)` for any other loss: the matrix is a sum of
    that many terms of rank one. Ignored labels have no term. The result also has
    :math:`4 d_y (\sum_l N_l + d_x)`, the heuristic bound of the reference, for comparison. It does
    not hold for many samples: a tanh network 20-60-2 on 4000 samples has rank 1260, above 640.
    Cost: one forward pass.

    Args:
        risk: The loss at a point, with a ``loss_fn`` separate from the model.

    Reference: Section 3.2 of *Flatness is a False Friend*, for the comparison.
    """
    require_outputs(risk, "rank_bound()")
    known = known_loss(risk.loss_fn)
    softmax = known is not None and known.kind == "cross_entropy"
    # Terms and outputs are counted by batch: labels may be ignored.
    counts = torch.zeros(2, dtype=torch.int64, device=risk.theta.device)
    inputs = None
    with torch.no_grad(), risk.settings():
        for _, context, _ in risk.contexts():
            outputs, target = risk.evaluate(risk.params, context)
            size = context.size
            counts += counts.new_tensor(_terms(known, outputs, target, size))
            samples = [leaf for leaf in tree_leaves(context.batch) if is_rows(leaf, size)]
            inputs = int(samples[0][0].numel()) if samples else None
    num_terms, num_outputs = risk.sum_over_processes(counts).tolist()
    hidden = _hidden_units(risk.model)
    comparison = None
    if hidden is not None and inputs is not None:
        # 4 d_y (sum_l N_l + d_x), with d_y the outputs of one term
        comparison = 4 * (num_outputs // num_terms) * (hidden + inputs)
    # Each term has a curvature of rank d_y in its outputs; softmax is blind to a shift of them all.
    return RankBound(
        bound=min(risk.space.size, num_outputs - num_terms if softmax else num_outputs),
        num_parameters=risk.space.size,
        num_terms=num_terms,
        num_outputs=num_outputs,
        softmax=softmax,
        hidden_units=hidden,
        num_inputs=inputs,
        comparison=comparison,
        l2=risk.l2,
    )


def _origin(run: Spectrum, count: int) -> tuple[float, ...]:
    """Return mass, value, their truncations, and the ends of the interval of one run."""
    values, weights, residuals = run.values, run.weights, run.residuals
    inside = values.abs() <= residuals
    if not bool(inside.any()):
        inside[values.abs().argsort()[:count]] = True
    mass, others = weights[inside], values[~inside]
    # The weights vanish if the start vector has no part in any.
    total = float(mass.sum())
    value = float(mass @ values[inside]) / total if total > 0 else float(values[inside].mean())
    # A Ritz vector of S is the eigenvector up to an angle of r / gap, with the gap to the values
    # outside of S. Roundoff is not a distance.
    gaps = (values[inside][:, None] - others).abs().amin(1) if len(others) else torch.zeros(1)
    beyond = residuals[inside] - run.roundoff
    doubt = torch.where(beyond > 0, (CROWDING * beyond / gaps).clamp(max=1.0), 0.0)
    low = float((values - residuals)[inside].min())
    high = float((values + residuals)[inside].max())
    return total, value, float(mass @ doubt), float(residuals[inside].max()), low, high


def _terms(known: KnownLoss | None, outputs: Any, target: Any, size: int) -> list[int]:
    """Return the terms of the loss of a batch and their outputs; without softmax, its samples."""
    if known is None or known.kind != "cross_entropy":
        return [size, sum(leaf.numel() for leaf in tree_leaves(outputs))]
    classes = outputs.shape[1]
    if target.is_floating_point():
        return [outputs.numel() // classes, outputs.numel()]
    # Ignored labels have no gradient, and so no curvature.
    labels = int((target != known.ignore_index).sum())
    return [labels, labels * classes]


def _hidden_units(model: nn.Module) -> int | None:
    layers = [each for each in model.modules() if isinstance(each, nn.Linear | _ConvNd)]
    units = [
        each.out_features if isinstance(each, nn.Linear) else each.out_channels for each in layers
    ]
    # The last layer gives the outputs.
    return sum(units[:-1]) if units else None
