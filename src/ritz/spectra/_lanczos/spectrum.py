"""The result of a Lanczos run."""

from dataclasses import dataclass, field

from torch import Tensor

from ritz._core.results import Status
from ritz._core.storage import storable


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    r"""Ritz values with their Gauss weights and residuals: a picture of the whole spectrum.

    The weighted values are a discrete density that matches the moments
    :math:`z^\top A^j z`, :math:`j \le 2m - 1`, of the unit start vector :math:`z`.
    They are *not* the ``m`` largest eigenvalues; the residuals say which are eigenvalues at all.

    Attributes:
        values: Ritz values :math:`\theta_k`, ascending, ``(m,)``, float64.
        weights: Gauss weights :math:`\tau_k`, ``(m,)``, summing to 1.
        residuals: :math:`\|A u_k - \theta_k u_k\|` with the part that roundoff adds, ``(m,)``:
            an eigenvalue lies within this distance of each value.
        roundoff: The part of every residual that is roundoff: values this close to zero may be
            zero.
        cosines: Of the angles between Ritz vectors and the vectors asked for, ``(c, m)``; ``None``
            unless asked for.
        vectors: Ritz vectors :math:`u_k` as columns, ``(n, m)``, ascending like the values;
            ``None`` unless asked for. With a spread basis: this process's rows.
        diagonal: The diagonal of the tridiagonal matrix, ``(m,)``.
        off_diagonal: Beside it, ``(m - 1,)``.
        dimension: The order ``n`` of the operator.
        num_products: Products spent.
        operator: What the operator said it was.
        matrix: Which matrix of a network or graph it is, such as ``hessian``; ``None`` if unknown.
        batch_norm: The batch-norm mode of the network; ``None`` without batch norm.
        settings: How the run was made.
        seed: Seed of the start vector, ``None`` if the start vector was given.
        status: How the run ended.
    """

    values: Tensor
    weights: Tensor
    residuals: Tensor
    roundoff: float = field(repr=False)
    vectors: Tensor | None = field(repr=False)
    diagonal: Tensor = field(repr=False)
    off_diagonal: Tensor = field(repr=False)
    dimension: int
    num_products: int
    operator: str
    matrix: str | None = None
    batch_norm: str | None = None
    settings: dict[str, str | int | float | bool | None]
    seed: int | None
    status: Status
    cosines: Tensor | None = field(default=None, repr=False)

    def raise_if_failed(self) -> None:
        """Raise :class:`ritz.NotConvergedError` unless the run ended as asked, which it does."""
        self.status.raise_if_failed()

    def __str__(self) -> str:
        return describe(self)


def describe(spectrum: Spectrum, *, num_rows: int = 5) -> str:
    """Return what a person wants to know first: extremes, trace, norms, mass at zero, status.

    Trace, Frobenius norm and masses are estimates of one probe; the Frobenius norm is raised to
    :func:`least_frobenius_norm`, which is proven, where the estimate is below it. The negative mass
    leaves out what is undecided: values that are zero within their residuals.
    """
    values, residuals = spectrum.values, spectrum.residuals
    lines = [
        f"Spectrum of {spectrum.operator}",
        f"  {len(values)} Ritz values from {spectrum.num_products} products; {spectrum.status}",
        f"  {'value':>14}  {'residual':>9}  {'weight':>9}",
    ]
    shown = _ends(len(values), num_rows)
    for position, i in enumerate(shown):
        if position and i != shown[position - 1] - 1:
            lines.append(f"  {'...':>14}")
        weight = float(spectrum.weights[i])
        lines.append(f"  {float(values[i]):14.8g}  {float(residuals[i]):9.1g}  {weight:9.2g}")
    return "\n".join(lines + _totals(spectrum))


def least_frobenius_norm(spectrum: Spectrum) -> float:
    r"""Return what the Frobenius norm cannot be below, but for roundoff.

    .. math:: \|A\|_F \ge \|V^\top A V\|_F = \Bigl(\sum_k \theta_k^2\Bigr)^{1/2}

    for an orthonormal basis, whether or not the Ritz values have converged. Without
    re-orthogonalisation values repeat, and the largest alone counts.

    Args:
        spectrum: What a run found.
    """
    if spectrum.settings.get("reorthogonalize") == "none":
        return float(spectrum.values.abs().max())
    return float(spectrum.values.norm())


def negative_values(spectrum: Spectrum) -> tuple[Tensor, Tensor]:
    """Return which values are below zero for certain, and which may be, each ``(m,)``.

    A value within its residual of zero may stand for eigenvalues on either side of it; one within
    roundoff of zero, with a residual no larger, is zero.

    Args:
        spectrum: What a run found.
    """
    known = spectrum.residuals.clamp(min=spectrum.roundoff)
    undecided = (spectrum.values.abs() <= known) & (spectrum.residuals > spectrum.roundoff)
    certain = spectrum.values < -known
    return certain, certain | undecided


def _ends(count: int, num_rows: int) -> list[int]:
    """Indices of the largest values, then the smallest, descending."""
    top = list(range(count - 1, max(count - 1 - num_rows, -1), -1))
    return top + list(range(min(num_rows, count - len(top)) - 1, -1, -1))


def _totals(spectrum: Spectrum) -> list[str]:
    """What one probe says of the whole matrix."""
    weights, values, n = spectrum.weights, spectrum.values, spectrum.dimension
    trace, square = float(weights @ values), float(weights @ values.square())
    norm = max((n * square) ** 0.5, least_frobenius_norm(spectrum))
    nearest = int(values.abs().argmin())
    low, high = (float(weights[some].sum()) for some in negative_values(spectrum))
    undecided = f", undecided {high - low:.3g}" if high > low else ""
    return [
        f"  trace ~ {n * trace:.5g}, Frobenius norm ~ {norm:.5g}, "
        f"spectral norm >= {float(values.abs().max()):.6g}",
        f"  mass nearest zero {float(weights[nearest]):.3g} at {float(values[nearest]):.2g}, "
        f"negative mass {low:.3g}{undecided} (one probe: no error bars)",
    ]
