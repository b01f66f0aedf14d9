"""Traces of functions from the runs of several probes, their simple eigenvalues counted exactly."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ritz.spectra.spectrum import Spectrum

Function = Callable[[Spectrum], Tensor]
# Most that a Ritz vector may be off its eigenvector (a sine) for its eigenvalue to be split off.
CONVERGED = 1e-4
# Part of a probe, of entries of order one, along a Ritz vector: what roundoff may change in it.
ROUNDOFF = 1e-4


def traces(runs: Sequence[Spectrum], functions: Sequence[Function]) -> tuple[Tensor, int]:
    r"""Return samples ``(f, k)`` of :math:`\operatorname{tr} f(A)`, and how many were split off.

    .. math:: \operatorname{tr} f(A) = \sum_{k \in S} f(\theta_k) + (n - |S|)\, \mathbb{E}\,
        \frac{\sum_{k \notin S} \tau_k f(\theta_k)}{\sum_{k \notin S} \tau_k}

    with the simple eigenvalues :math:`S` that every probe has found: a probe without its part in
    their directions is, made a unit vector again, a uniform probe of what is left. Plain quadrature
    multiplies :math:`f(\theta_k)` by :math:`n \tau_k`, which is one in the mean and a
    :math:`\chi^2` of one degree of freedom: a standard deviation of :math:`\sqrt 2` about a number
    that is known. Where a few eigenvalues hold most of the trace of a function, that is nearly all
    of its error.

    The formula holds for a fixed :math:`S`. Whether an eigenvalue is in it depends on all probes
    having found it, which large weights favour: where it is just about to converge, two or three
    probes have been seen to be off by a part of a standard error in the mean.

    No product.

    Args:
        runs: One a probe, all values with their weights; the first with the cosines of all starts.
        functions: From a run to :math:`f` at its values, ``(m,)``.
    """
    chosen = simple_eigenvalues(runs)
    samples = [
        torch.stack([_sample(run, own, function(run)) for function in functions])
        for run, own in zip(runs, chosen, strict=True)
    ]
    return torch.stack(samples, 1), chosen.shape[1]


def simple_eigenvalues(runs: Sequence[Spectrum]) -> Tensor:
    r"""Return where each run has the simple eigenvalues that all have found, ``(k, s)`` indices.

    A run finds an eigenvalue once, whatever its multiplicity, as the part of its start vector in
    the eigenspace. If that is a line, every other start has the part
    :math:`|z_j^\top u| / \|z_j\| = \sqrt{\tau_j}` along the first run's :math:`u`; in a plane the
    two are at a random angle. So two probes tell what weights alone would need dozens for, but for
    one double eigenvalue in about a hundred that they take for simple; three hardly ever do.

    Args:
        runs: One a probe; the first with the cosines of all starts, or nothing is found.
    """
    first, others = runs[0], runs[1:]
    if first.cosines is None or not others:
        return torch.empty(len(runs), 0, dtype=torch.int64)
    angles = [_angles(run) for run in runs]
    found = []
    for index in (angles[0] <= CONVERGED).nonzero()[:, 0].tolist():
        places = [index] + [
            int((run.values - first.values[index]).abs().argmin()) for run in others
        ]
        if all(_same(runs, angles, places, other) for other in range(1, len(runs))):
            found.append(places)
    return torch.tensor(found, dtype=torch.int64).reshape(-1, len(runs)).T


def weights_of(run: Spectrum) -> Tensor:
    """Gauss weights ``(m,)``, which a run without restarts has."""
    if run.weights is None:
        raise RuntimeError("a Lanczos run without restarts has weights")
    return run.weights


def _sample(run: Spectrum, chosen: Tensor, at: Tensor) -> Tensor:
    rest = weights_of(run).clone()
    rest[chosen] = 0
    left, mass = run.dimension - len(chosen), rest.sum()
    # Not a product of BLAS, whose last bit depends on where in memory a run was read to.
    sampled = left * (rest * at).sum() / mass if left and mass > 0 else torch.zeros_like(mass)
    return at[chosen].sum() + sampled


def _angles(run: Spectrum) -> Tensor:
    r"""Bounds :math:`\|A u - \theta u\| / \text{gap}` of the sines from Ritz to eigenvectors."""
    distances = (run.values[:, None] - run.values).abs()
    distances.fill_diagonal_(math.inf)
    return run.residuals / distances.min(1).values


def _same(
    runs: Sequence[Spectrum], angles: Sequence[Tensor], places: Sequence[int], other: int
) -> bool:
    """Whether a run's value is the first run's, and its start has no other part in that space."""
    first, run, here, there = runs[0], runs[other], places[0], places[other]
    gap = abs(float(first.values[here] - run.values[there]))
    if gap > float(first.residuals[here] + run.residuals[there]):
        return False
    if first.cosines is None or float(angles[other][there]) > CONVERGED:
        return False
    along = abs(float(first.cosines[other, here]))
    part = math.sqrt(float(weights_of(run)[there]))
    # Other directions have parts of the same order, of which four deviations may come in.
    slack = ROUNDOFF + 4 * float(angles[0][here] + angles[other][there])
    return abs(along - part) * math.sqrt(run.dimension) <= slack
