"""Entropy and log determinant by the number of moments: Spectral Machine Learning, Figure 2.1.

Maximum entropy (MEMe) and the iteration of Bandyopadhyay (BMxnt) receive the same moments of the
same matrices on ``[0, bound]``. The entropy of MEMe falls with every moment, except for small steps
up where exact moments had to be relaxed further. Its log determinant improves until only the error
of the probes is left; where eigenvalues crowd at zero (bcsstk16), it is worse at first and then
improves slowly. BMxnt does not reach its moments, mostly from the third on: its entropy goes up and
down, and its log determinant stays as far off as with two or three moments.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.io
import scipy.sparse
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from ritz._core.checks import check_count, check_finite, check_interval
from ritz._core.progress import Progress, tracking
from ritz._core.results import Status
from ritz.operators import LinearOperator, as_operator, read_matrix
from ritz.spectra import bounds, logdet, maxent, moments
from ritz.studies._protocol import check_minimums, data_file, record, row, seeded, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fields of the result that are filled cell by cell.
KINDS = ("entropies", "errors", "solved", "relaxations")
SERIES = ("MEMe", "BMxnt", "MEMe, exact moments", "BMxnt, exact moments")
TINY = 1e-300  # a moment that underflows still has a logarithm


@record
class Config:
    """Matrices, numbers of moments, and where the files are.

    Attributes:
        matrices: Matrix Market files of positive definite matrices, below the folder.
        graphs: Files of adjacency matrices; the study uses the identity plus the Laplacian of each.
        counts: Numbers of moments, ascending.
        num_probes: Probes of the sampled moments.
        dense_order: Largest order for which moments are computed from all eigenvalues as well.
        max_sweeps: Maximum of sweeps of BMxnt.
        data: The folder; defaults to the environment variable ``RITZ_DATA``.
        seed: Seed of the probes.
    """

    matrices: tuple[str, ...] = (
        "matrices/1138_bus.mtx",
        "matrices/bcsstk09.mtx",
        "matrices/bcsstk16.mtx.gz",
        "matrices/bcsstk28.mtx.gz",
    )
    graphs: tuple[str, ...] = ("graphs/road-minnesota.mtx", "graphs/road-luxembourg-osm.mtx.gz")
    counts: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60)
    num_probes: int = 50
    dense_order: int = 3000
    max_sweeps: int = 1000
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.counts and list(self.counts) == sorted(set(self.counts))):
            raise ValueError(f"counts must be numbers of moments, ascending, got {self.counts}")
        check_minimums(self, counts=1, num_probes=2, dense_order=0, max_sweeps=1, seed=0)


@record
class Result:
    """Entropies and log determinants by the number of moments.

    Attributes:
        config: The configuration.
        versions: Versions of the libraries.
        names: Names of the matrices.
        orders: Their orders.
        exact: Their log determinants, by factorisation.
        entropies: By series, ``(matrices, counts)``; NaN where eigenvalues were not computed.
        errors: Relative errors of the log determinants, same shape.
        solved: Whether the moments were matched to the tolerance, same shape.
        relaxations: Variance added to the moments because no density had them, same shape.
    """

    config: Config
    versions: dict[str, str]
    names: tuple[str, ...]
    orders: tuple[int, ...]
    exact: tuple[float, ...]
    entropies: dict[str, Tensor]
    errors: dict[str, Tensor]
    solved: dict[str, Tensor]
    relaxations: dict[str, Tensor]

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"Entropy of the density on [0, bound] (0 is flat) and relative error of its log det, "
            f"moments from {c.num_probes} probes; * not solved, ~ moments relaxed",
            row("moments", c.counts, ">9", width=38),
        ]
        for place, (name, order) in enumerate(zip(self.names, self.orders, strict=True)):
            lines.append(f"{name}, order {order}, log det {self.exact[place]:.8g}")
            for series in SERIES:
                lines += self._rows(series, place)
        return "\n".join(lines)

    def _rows(self, series: str, place: int) -> list[str]:
        entropies, errors = self.entropies[series][place], self.errors[series][place]
        if bool(entropies.isnan().all()):
            return []
        flags = zip(self.solved[series][place], self.relaxations[series][place] > 0, strict=True)
        # Not solved outranks relaxed.
        marks = ["~" * bool(relaxed) if solved else "*" for solved, relaxed in flags]
        tables = {"entropy": (entropies, ".3f"), "error": (errors, ".1e")}
        return [
            row(
                f"  {series}: {title}",
                [f"{x:{spec}}{mark}" for x, mark in zip(numbers.tolist(), marks, strict=True)],
                ">9",
                width=38,
            )
            for title, (numbers, spec) in tables.items()
        ]


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the densities of both methods for the same moments of every matrix."""
    names = (*config.matrices, *config.graphs)
    paths = [data_file(name, config.data, fields="matrices= and graphs=") for name in names]
    empty = torch.full((len(names), len(config.counts)), math.nan, dtype=torch.float64)
    numbers = {kind: {series: empty.clone() for series in SERIES} for kind in KINDS}
    orders, exact = [], []
    with tracking(progress, "matrices", len(names)) as bar:
        for place, path in enumerate(paths):
            graph = place >= len(config.matrices)
            op = _identity_and_laplacian(path) if graph else read_matrix(path)
            orders.append(op.shape[0])
            exact.append(float(logdet(op, method="cholesky")))
            for series, count, density in _densities(op, config):
                cell = (place, config.counts.index(count))
                low, high = density.interval
                # Relative to the flat density on the interval, whose entropy is log(high - low).
                numbers["entropies"][series][cell] = density.entropy - math.log(high - low)
                # log det A = n E[log lambda]
                value = op.shape[0] * density.expectation(torch.log)
                numbers["errors"][series][cell] = abs(value / exact[-1] - 1)
                numbers["solved"][series][cell] = float(density.status.ok)
                numbers["relaxations"][series][cell] = density.relaxation
            bar.update(place + 1)
    return Result(
        config=config,
        versions=versions(),
        names=tuple(_title(config, name) for name in names),
        orders=tuple(orders),
        exact=tuple(exact),
        **numbers,
    )


def figure(result: Result) -> "Figure":
    """Draw the entropy above and the error below, one column per matrix."""
    from ritz import plots
    from ritz.plots._shared import share_legend

    columns = len(result.names)
    drawing, axes = plots.panels(2, columns, width=2.7, height=2.5)
    # Colour tells the method, line style the kind of moments.
    colours, lines = ("#0072B2", "#D55E00") * 2, ("-", "-", ":", ":")
    for series, colour, line in zip(SERIES, colours, lines, strict=True):
        style: dict[str, Any] = {"color": colour, "linestyle": line, "marker": ".", "label": series}
        for place, name in enumerate(result.names):
            above, below = axes[place], axes[columns + place]
            above.plot(result.config.counts, result.entropies[series][place].numpy(), **style)
            below.plot(result.config.counts, result.errors[series][place].numpy(), **style)
            below.set(yscale="log", xlabel="moments")
            above.set_title(f"{name}\nn = {result.orders[place]:,}", loc="left", fontsize="small")
    axes[0].set_ylabel("entropy")
    axes[columns].set_ylabel("relative error of log det")
    share_legend(drawing)
    return drawing


# ------------------------------------------------------------------------------------------
# Moments and the two methods.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledDensity:
    r"""Density of BMxnt as shares of its mass at quadrature nodes.

    Attributes:
        interval: The support.
        points: Nodes on the interval, ``(G,)``.
        shares: Mass of the density at each node, ``(G,)``, summing to 1.
        entropy: :math:`-\int q \log q`.
        status: Whether the moments were reached, and after how many sweeps.
        relaxation: Always 0: BMxnt does not relax its moments.
    """

    interval: tuple[float, float]
    points: Tensor
    shares: Tensor
    entropy: float
    status: Status
    relaxation: float = 0.0

    def expectation(self, function: Callable[[Tensor], Tensor]) -> float:
        """Mean of an elementwise function of an eigenvalue."""
        return float((self.shares * function(self.points)).sum())


def bmxnt(
    moments: Tensor,
    *,
    interval: tuple[float, float] = (0.0, 1.0),
    rtol: float = 1e-5,
    max_sweeps: int = 1000,
    grid_size: int = 512,
) -> ScaledDensity:
    r"""Return the density that Bandyopadhyay's iteration finds for power moments.

    .. math:: q(t) \propto \exp\Big(-\sum_{i=1}^m \gamma_i t^i\Big), \quad
        \gamma_i \leftarrow \gamma_i + \log \frac{\langle t^i \rangle_q}{\mu_i}

    for :math:`i = 1, \dots, m` in turn, where :math:`t` is the variable mapped to ``[0, 1]``. It is
    a baseline that does not converge for more than a few moments: its entropy rises with their
    number, which that of :func:`ritz.maxent` never does.

    Args:
        moments: Power moments of the variable mapped to ``[0, 1]``, degree ``0, ..., m``, all
            positive, ``(m + 1,)``.
        interval: ``(a, b)``, the support.
        rtol: Largest relative error of a moment at which the iteration stops.
        max_sweeps: Maximum of sweeps over the moments.
        grid_size: Nodes of the quadrature.

    Reference: Bandyopadhyay, Bhattacharya, Biswas and Drabold (2005), as used in section 2.6.1 of
    *Spectral Machine Learning*.
    """
    targets = torch.as_tensor(moments, dtype=torch.float64).numpy()
    if targets.ndim != 1 or len(targets) < 2 or not (targets > 0).all():
        raise ValueError("moments must be positive power moments on [0, 1], (m + 1,), m >= 1")
    # NaN fails the comparison above, and infinity does not.
    check_finite("moments", moments)
    check_interval("interval", interval)
    check_count("grid_size", grid_size, low=2 * len(targets))
    # Gauss-Legendre nodes on [0, 1]: exact for all powers that occur.
    nodes, weights = np.polynomial.legendre.leggauss(grid_size)
    t, weights = 0.5 * (nodes + 1), 0.5 * weights
    powers = t ** np.arange(1, len(targets))[:, None]
    # log(weight * q) up to a constant, which every step changes by -step * t^i.
    exponent, error = np.log(weights), math.inf
    for sweep in range(max_sweeps + 1):
        shares = _softmax(exponent)
        error = float(np.abs(powers @ shares / targets[1:] - 1).max())
        if error <= rtol or sweep == max_sweeps:
            break
        for power, target in zip(powers, targets[1:], strict=True):
            ratio = float(power @ _softmax(exponent)) / target
            exponent -= math.log(max(ratio, TINY)) * power
    width = interval[1] - interval[0]
    points = torch.from_numpy(interval[0] + width * t)
    # q = share / (weight * width) at a node, so -int q log q = -sum share log q.
    entropy = -float(shares @ np.log(np.maximum(shares, TINY) / weights)) + math.log(width)
    outcome: Any = "converged" if error <= rtol else "max_steps"
    message = f"largest relative error of a moment {error:.1g} after {sweep} sweeps"
    advice = "" if error <= rtol else "use maxent, which solves the problem"
    return ScaledDensity(
        interval=interval,
        points=points,
        shares=torch.from_numpy(shares),
        entropy=entropy,
        status=Status(outcome=outcome, message=message, advice=advice),
    )


def _softmax(exponent: Any) -> Any:
    shares = np.exp(exponent - exponent.max())
    return shares / shares.sum()


def _densities(op: LinearOperator, config: Config) -> Iterator[tuple[str, int, Any]]:
    """Yield series, number of moments and density, for both methods and all numbers."""
    degree = config.counts[-1]
    # Power moments need [0, 1]: the matrices are positive definite, so 0 is a lower end.
    interval = (0.0, bounds(op, generator=seeded(config.seed)).high)
    sampled = moments(
        op,
        num_moments=degree,
        interval=interval,
        num_probes=config.num_probes,
        generator=seeded(config.seed),
    )
    means: list[tuple[Tensor, Tensor | None]] = [(sampled.mean, sampled.stderr)]
    if op.shape[0] <= config.dense_order:
        values = torch.linalg.eigvalsh(op.matmat(torch.eye(op.shape[0], dtype=op.dtype)).double())
        # T_k(x) = cos(k arccos x), x the eigenvalue mapped to [-1, 1].
        angles = torch.arccos((2 * values / interval[1] - 1).clamp(-1.0, 1.0))
        degrees = torch.arange(degree + 1, dtype=torch.float64)
        means.append((torch.cos(degrees[:, None] * angles).mean(1), None))
    for place, (mean, stderr) in enumerate(means):
        powers = _powers(degree) @ mean
        for count in config.counts:
            few = slice(count + 1)
            errors = None if stderr is None else stderr[few]
            yield SERIES[2 * place], count, maxent(mean[few], interval=interval, stderr=errors)
            scaled = bmxnt(powers[few], interval=interval, max_sweeps=config.max_sweeps)
            yield SERIES[2 * place + 1], count, scaled


def _powers(degree: int) -> Tensor:
    """Return the matrix from Chebyshev moments to power moments on ``[0, 1]``.

    Its entries are positive and each row sums to one, so the change of basis is stable.
    """
    rows = np.zeros((degree + 1, degree + 1))
    power = Chebyshev([1.0])
    half = Polynomial([0.5, 0.5]).convert(kind=Chebyshev)  # t = (1 + x) / 2
    for k in range(degree + 1):
        rows[k, : len(power.coef)] = power.coef
        power = power * half
    return torch.from_numpy(rows)


def _identity_and_laplacian(path: Path) -> LinearOperator:
    matrix: Any = scipy.io.mmread(path)
    adjacency = scipy.sparse.csr_array(((abs(matrix) + abs(matrix.T)) > 0).astype(np.float64))
    adjacency.setdiag(0)
    degrees = np.asarray(adjacency.sum(1)).ravel()
    # I + L = I + D - A
    return as_operator((scipy.sparse.diags_array(1 + degrees) - adjacency).tocsr())


def _title(config: Config, name: str) -> str:
    stem = Path(name).name.partition(".")[0]
    return f"I + L, {stem}" if name in config.graphs else stem
