"""``rank_degeneracy``, the fraction of eigenvalues near zero; ``rank_bound`` of a GGN matrix."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from ritz._core.batches import is_rows
from ritz._core.blocks import power_of_two
from ritz._core.checks import check_choice, check_type, is_below
from ritz._core.results import Estimate, Status, plain_estimate
from ritz._core.storage import storable
from ritz.curvature import Risk
from ritz.curvature._shared import MATRICES, CurvatureMatrix, KnownLoss, known_loss, require_outputs
from ritz.spectra import Spectrum
from ritz.spectra._shared import christoffel


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the interval around zero, and of the error of its mass."""

    # The whole mass of a Ritz value is uncertain if its residual exceeds the gap divided by this
    # number. For eigenvalues that approach zero geometrically, the ratio of residual to gap is 0.08
    # to 0.25 for 5 to 80 steps.
    crowding: float = 12.0
    # Number of candidates for an end of the interval, evenly spaced in the logarithm of the
    # distance from zero. With 12, the undecided mass is up to three times its minimum; 48 are no
    # better than 24.
    candidates: int = 24
    # Choose the candidate nearest to zero whose undecided mass is below this fraction of the mass.
    undecided: float = 0.01
    # If the truncation exceeds this fraction of the mass, the outcome is `uncertain`.
    uncertain: float = 0.5


TUNING = Tuning()


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Degeneracy:
    """The eigenvalues nearest to zero.

    Attributes:
        mass: Estimated fraction of eigenvalues in ``interval``. The truncation is the mass that the
            Gauss rules leave undecided, plus the mass that may belong to small eigenvalues other
            than zero. The status is ``uncertain`` if the truncation exceeds half of the mass.
        value: Mean of these eigenvalues, which should be close to 0. The truncation is the largest
            residual.
        interval: Interval in which eigenvalues are counted.
        matrix: ``hessian`` or ``ggn``.
    """

    mass: Estimate
    value: Estimate
    interval: tuple[float, float]
    matrix: str

    def __str__(self) -> str:
        mass = plain_estimate(self.mass)
        low, high = self.interval
        doubt = "" if self.mass.status.ok else f"\n  [{self.mass.status}]"
        return (
            f"A fraction {mass} (truncation {float(self.mass.truncation):.2g}) of the eigenvalues "
            f"is near zero: in [{low:.2g}, {high:.2g}], with mean {float(self.value.mean):.2g}"
        ) + doubt


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class RankBound:
    r"""Bound on the rank of the Gauss-Newton matrix without the L2 term.

    Attributes:
        bound: The rigorous bound.
        num_parameters: Number of parameters :math:`P`.
        num_terms: Number of terms of the loss: samples, times positions for softmax cross-entropy.
        num_outputs: Number of outputs over all samples.
        softmax: Whether each term reduces the rank by one, because a softmax loss does not change
            if all its logits are shifted.
        hidden_units: Number of output features and channels of all linear and convolutional layers
            except the last one; ``None`` if there is no such layer.
        num_inputs: Number of entries of the input of one sample.
        comparison: :math:`4 d_y (\sum_l N_l + d_x)`, which is *not* a bound for many samples.
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
        zero = f"{self.l2:g}, the L2 coefficient" if self.l2 else "zero"
        lines = [
            f"Rank of the Gauss-Newton matrix <= {self.bound:,} = min({self.num_parameters:,} "
            f"parameters, {self.num_outputs:,} outputs{less})",
            f"  so a fraction of at least {share:.4g} of the eigenvalues is {zero}"
            if share
            else "  so no eigenvalue has to be zero",
        ]
        if self.comparison is not None:
            lines.append(
                f"  for comparison only, not a bound: 4 d_y (sum N_l + d_x) = {self.comparison:,} "
                f"({self.hidden_units:,} hidden units, {self.num_inputs:,} inputs)"
            )
        return "\n".join(lines)


def rank_degeneracy(
    spectra: Spectrum | Sequence[Spectrum], *, matrix: CurvatureMatrix
) -> Degeneracy:
    r"""Estimate the fraction of eigenvalues near zero, with error bars.

    .. math:: \mu([a, b]) = \sum_{k \in S} \tau_k \text{ up to } \lambda(a) + \lambda(b)

    :math:`S` are the Ritz values :math:`\theta_k` that are zero within their residuals, and
    :math:`\tau_k` their weights. If there are none, :math:`S` is the Ritz value nearest to zero for
    the Gauss-Newton matrix, and the two nearest for the Hessian.

    A Gauss rule with a node at ``x`` gives a lower and an upper bound on the mass below ``x``. The
    bounds differ by the weight :math:`\lambda(x)` of that node. The ends ``a`` and ``b`` are placed
    where this weight is small, in the gaps on either side of :math:`S`. Eigenvalues inside of the
    interval are not resolved. The ``truncation`` is half the distance between the bounds, plus the
    mass that may belong to small eigenvalues other than zero. The second part vanishes if the
    residuals are far below the distance to the other Ritz values. If the outcome is ``uncertain``,
    increase the number of steps.

    Cost: no products. A single spectrum has no error bars.

    Args:
        spectra: Whole spectra, one per probe, as from :func:`ritz.spectra.lanczos_block`.
        matrix: Matrix of the spectra, ``hessian`` or ``ggn``.

    Reference: Section 3.2 of *Flatness is a False Friend*; Golub and Meurant (1994) for the bounds.
    """
    check_choice("matrix", matrix, MATRICES)
    runs = list(spectra) if isinstance(spectra, Iterable) else [spectra]
    if not runs:
        raise ValueError("spectra must have at least one spectrum, got none")
    for run in runs:
        check_type("spectra", run, Spectrum, "a result of lanczos() or lanczos_block()")
    inside = [_near_zero(run, 1 if matrix == "ggn" else 2) for run in runs]
    # The Gauss-Newton matrix has no negative eigenvalues, so no mass lies below the interval.
    closed = matrix == "ggn" and min(float(run.values[0]) for run in runs) >= -max(
        float(run.residuals[0]) for run in runs
    )
    low = _end(runs, inside, -1.0, closed=closed)
    high = _end(runs, inside, 1.0)
    below = closed and all(float(run.values[0]) > low for run in runs)
    columns = torch.tensor(
        [
            (*_bracket(run, low, high, closed=below), *_origin(run, chosen))
            for run, chosen in zip(runs, inside, strict=True)
        ],
        dtype=torch.float64,
    ).T
    least, most, value, doubt, residual = columns
    about: Any = {
        "method": "Ritz values at the origin",
        "num_products": sum(run.num_products for run in runs),
        "seed": runs[0].seed,
    }
    middle = (least + most) / 2
    truncation = (middle - (least - doubt).clamp_min(0.0)).mean()
    mass = Estimate.of(middle, truncation=truncation, **about)
    return Degeneracy(
        mass=_with_status(mass),
        value=Estimate.of(value, truncation=residual.mean(), **about),
        interval=(low, high),
        matrix=matrix,
    )


def rank_bound(risk: Risk) -> RankBound:
    r"""Return a bound on the rank of the Gauss-Newton matrix.

    .. math:: \operatorname{rank} G \le \min(P, N (d_y - 1))

    for softmax cross-entropy, and :math:`\min(P, N d_y)` for any other loss, because the matrix is
    a sum of that many terms of rank one. Ignored labels have no term. For comparison, the result
    also has the heuristic of the reference, :math:`4 d_y (\sum_l N_l + d_x)`. The heuristic does
    not hold for many samples: a tanh network 20-60-2 on 4000 samples has rank 1260, but the
    heuristic gives 640. Cost: one forward pass.

    Args:
        risk: The loss at a point, with a ``loss_fn`` separate from the model.

    Reference: Section 3.2 of *Flatness is a False Friend*, for the comparison.
    """
    require_outputs(risk, "rank_bound()")
    known = known_loss(risk.loss_fn)
    softmax = known is not None and known.kind == "cross_entropy"
    # Count terms and outputs in each batch, because labels may be ignored.
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
    # Each term has rank d_y. With softmax it has rank d_y - 1, because a shift of all logits does
    # not change the loss.
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


def _with_status(mass: Estimate) -> Estimate:
    share = float(mass.truncation) / float(mass.mean)
    if is_below(share, TUNING.uncertain):
        return mass
    status = Status(
        outcome="uncertain",
        message=f"{share:.0%} of the mass may belong to eigenvalues other than zero",
        advice="increase the number of Lanczos steps",
    )
    return replace(mass, status=status)


def _near_zero(run: Spectrum, count: int) -> Tensor:
    """Return the mask of the Ritz values that are zero within their residuals.

    If there are none, return the mask of the ``count`` Ritz values nearest to zero.
    """
    inside = run.values.abs() <= run.residuals
    if not bool(inside.any()):
        inside[run.values.abs().argsort()[:count]] = True
    return inside


def _origin(run: Spectrum, inside: Tensor) -> tuple[float, float, float]:
    """Return the mean of the values near zero, the uncertain mass, and the largest residual."""
    values, residuals = run.values, run.residuals
    mass, others = run.weights[inside], values[~inside]
    # The weights vanish if the start vector is orthogonal to all these Ritz vectors.
    total = float(mass.sum())
    value = float(mass @ values[inside]) / total if total > 0 else float(values[inside].mean())
    # The angle from a Ritz vector of S to an eigenvector is at most residual / gap, with the gap to
    # the values outside of S. Roundoff in the residual does not count.
    gaps = (values[inside][:, None] - others).abs().amin(1) if len(others) else torch.zeros(1)
    beyond = residuals[inside] - run.roundoff
    doubt = torch.where(beyond > 0, (TUNING.crowding * beyond / gaps).clamp(max=1.0), 0.0)
    return value, float(mass @ doubt), float(residuals[inside].max())


# ------------------------------------------------------------------------------------------
# Bounds on the mass in an interval.


def _end(
    runs: Sequence[Spectrum], inside: Sequence[Tensor], sign: float, *, closed: bool = False
) -> float:
    """Return the end of the interval above zero (``sign`` 1) or below zero (``sign`` -1).

    ``closed`` means that no eigenvalue lies below the smallest Ritz value minus its residual.
    """
    pairs = list(zip(runs, inside, strict=True))
    first = max(float((sign * run.values[chosen]).max()) for run, chosen in pairs)
    reach = max(float(run.residuals[chosen].max()) for run, chosen in pairs)
    # The smallest distance is the roundoff. The roundoff of a matrix of zeros is zero.
    near = max(run.roundoff for run in runs) or reach or math.ulp(1.0)
    # For each run, find the nearest Ritz value beyond; use the median over runs.
    beyond = [sign * run.values[sign * run.values > first + near] for run in runs]
    nearest = [float(values.min()) for values in beyond if len(values)]
    if closed and not nearest:
        return sign * (first + max(reach, near))
    # If there is none, assume that the spectrum may extend by its width.
    width = max(float(run.values[-1] - run.values[0]) for run in runs)
    far = statistics.median(nearest) - first if nearest else max(width, 2 * reach)
    exponents = torch.linspace(0.0, 1.0, TUNING.candidates, dtype=torch.float64)
    points = first + near * (max(far, near) / near) ** exponents
    undecided = torch.stack([_christoffel(run, sign * points) for run in runs]).mean(0)
    mass = statistics.fmean(float(run.weights[chosen].sum()) for run, chosen in pairs)
    least = max(float(undecided.min()), TUNING.undecided * mass)
    return sign * float(points[(undecided <= least).nonzero()[0, 0]])


def _is_complete(run: Spectrum) -> bool:
    """Return whether the Krylov space is invariant, so that the Gauss rule is exact."""
    return run.status.outcome == "breakdown" or len(run.values) == run.dimension


def _christoffel(run: Spectrum, points: Tensor) -> Tensor:
    """Return the weights of nodes at the points, ``(k,)``; zero if the Gauss rule is exact."""
    if _is_complete(run):
        return torch.zeros_like(points)
    return christoffel(run.diagonal, run.off_diagonal, points)


def _bracket(run: Spectrum, low: float, high: float, *, closed: bool) -> tuple[float, float]:
    """Return bounds on the mass in an interval; with ``closed``, no mass lies below it."""
    low_least, low_most = (0.0, 0.0) if closed else _below(run, low)
    high_least, high_most = _below(run, high)
    return max(0.0, high_least - low_most), high_most - low_least


def _below(run: Spectrum, point: float) -> tuple[float, float]:
    """Return bounds on the mass of a run below a point (Chebyshev, Markov and Stieltjes)."""
    values, weights = run.values, run.weights
    if _is_complete(run):
        mass = float(weights[values < point].sum())
        return mass, mass
    # Scale by a power of two, because squares of small or large entries under- or overflow.
    unit = power_of_two(values)
    beside, point, near = run.off_diagonal / unit, point / unit, run.roundoff / unit
    matrix = torch.diag(run.diagonal / unit) + torch.diag(beside, 1) + torch.diag(beside, -1)
    corner = point
    if len(matrix) > 1:
        # The point becomes a node if the last entry is x + beta^2 [(T - x)^{-1}]_last.
        inner, vectors = torch.linalg.eigh(matrix[:-1, :-1])
        gaps = inner - point
        gaps = torch.where(gaps.abs() > near, gaps, gaps.sign() * (near or math.ulp(1.0)))
        corner += float(beside[-1].square() * (vectors[-1].square() / gaps).sum())
    matrix[-1, -1] = corner
    nodes, vectors = torch.linalg.eigh(matrix)
    shares = vectors[0].square()
    at = int((nodes - point).abs().argmin())
    least = float(shares[:at].sum())
    return least, least + float(shares[at])


def _terms(known: KnownLoss | None, outputs: Any, target: Any, size: int) -> list[int]:
    """Return the number of terms of the loss of a batch, and the number of their outputs.

    The terms of a loss other than softmax cross-entropy are the samples.
    """
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
    # The units of the last layer are the outputs.
    return sum(units[:-1]) if units else None
