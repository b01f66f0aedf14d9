"""Entropy and log determinant by the number of moments: Spectral Machine Learning, Figure 2.1.

Two methods get the same moments of the same matrices on ``[0, bound]``: maximum entropy (MEMe, the
method of :func:`ritz.maxent`) and the older iteration of Bandyopadhyay et al. (BMxnt).

With MEMe, the entropy falls with every moment, apart from small rises where exact moments had to be
relaxed. The log determinant improves until only the error of the probes is left. For bcsstk16,
which has many eigenvalues near zero, it first gets worse and then improves slowly. BMxnt mostly
fails to match its moments from the third on. Its entropy then goes up and down, and its log
determinant does not improve.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.io
import scipy.sparse
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from ritz import plots
from ritz._core.checks import check_finite
from ritz._core.progress import Progress
from ritz.graphs._shared import chebyshev_means
from ritz.operators import LinearOperator, as_operator, read_matrix
from ritz.plots._shared import style
from ritz.spectra import bounds, logdet, maxent, moments
from ritz.studies import _protocol as study
from ritz.studies._evidence import Evidence

# Fields of the result that are filled cell by cell.
KINDS = ("entropies", "errors", "solved", "relaxations")
SERIES = ("MEMe", "BMxnt", "MEMe, exact moments", "BMxnt, exact moments")
TINY = 1e-300  # a moment that underflows still has a logarithm
NODES = 512  # of the quadrature of BMxnt, which is exact for powers below 512


@study.record
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
        study.check_minimums(self, counts=1, num_probes=2, dense_order=0, max_sweeps=1, seed=0)


@study.record
class Result(study.StudyResult[Config]):
    """Entropies and log determinants by the number of moments.

    Attributes:
        names: Names of the matrices.
        orders: Their orders.
        exact: Their log determinants, by factorisation.
        entropies: By series, ``(matrices, counts)``; NaN where eigenvalues were not computed.
        errors: Relative errors of the log determinants, same shape.
        solved: Whether the moments were matched to the tolerance, same shape.
        relaxations: Variance added to the moments because no density had them, same shape.
    """

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
            study.row("moments", c.counts, ">9", width=38),
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
            study.row(
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
    paths = [study.data_file(name, config.data, fields="matrices= and graphs=") for name in names]
    shape = (len(KINDS), len(SERIES), len(names), len(config.counts))
    cells = torch.full(shape, math.nan, dtype=torch.float64)
    orders, exact = [], []
    for place, path in enumerate(study.track(paths, "matrices", progress)):
        graph = place >= len(config.matrices)
        op = _identity_and_laplacian(path) if graph else read_matrix(path)
        orders.append(op.shape[0])
        exact.append(float(logdet(op, method="cholesky")))
        for series, column, (entropy, mean_log, solved, relaxation) in _densities(op, config):
            # log det A = n E[log lambda]
            error = abs(op.shape[0] * mean_log / exact[-1] - 1)
            numbers = (entropy, error, float(solved), relaxation)
            cells[:, series, place, column] = torch.tensor(numbers, dtype=torch.float64)
    tables = {kind: dict(zip(SERIES, cells[k], strict=True)) for k, kind in enumerate(KINDS)}
    stems = [Path(name).name.partition(".")[0] for name in names]
    return Result(
        config=config,
        names=tuple(f"I + L, {x}" if k >= len(config.matrices) else x for k, x in enumerate(stems)),
        orders=tuple(orders),
        exact=tuple(exact),
        **tables,
    )


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield whether the entropy falls with the moments, by series and matrix."""
    for series in SERIES[:2]:
        entropies, errors = result.entropies[series], result.errors[series][:, -1]
        # Rises below 1e-3 come from moments that had to be relaxed.
        rises, count = int((entropies.diff(dim=1).amax(1) >= 1e-3).sum()), len(result.names)
        # Published for one matrix: MEMe never rises, and BMxnt usually does.
        holds = rises == 0 if series == "MEMe" else 2 * rises > count
        yield Evidence(
            paper="SPECTRA",
            where="Figure 2.1",
            what=f"{series}: matrices whose entropy rises somewhere with the moments",
            published="0 of 1" if series == "MEMe" else "1 of 1, from 12 moments on",
            measured=f"{rises} of {count}",
            verdict="agrees" if holds else "differs",
        )
        yield Evidence(
            paper="SPECTRA",
            where="Figure 2.1",
            what=f"{series}: relative error of log det with the most moments",
            published="a curve for another matrix",
            measured=f"{float(errors.min()):.1e} to {float(errors.max()):.1e}",
            verdict="extends",
        )


def figure(result: Result) -> style.Figure:
    """Draw the entropy above and the error below, one column per matrix, three in a row."""
    columns = min(3, len(result.names))
    rows = math.ceil(len(result.names) / columns)
    drawing, axes = plots.panels(2 * rows, columns, width=3.6, height=2.3)
    # Colour tells the method, line style the kind of moments.
    colours, lines = (style.STYLE.blue, style.STYLE.vermilion) * 2, ("-", "-", ":", ":")
    for place, name in enumerate(result.names):
        above = axes[place // columns * 2 * columns + place % columns]
        below = axes[place // columns * 2 * columns + place % columns + columns]
        for series, colour, line in zip(SERIES, colours, lines, strict=True):
            look: dict[str, Any] = {
                "color": colour,
                "linestyle": line,
                "marker": ".",
                "label": series,
            }
            above.plot(result.config.counts, result.entropies[series][place], **look)
            below.plot(result.config.counts, result.errors[series][place], **look)
        style.finish(above, "", "entropy", f"{name}\nn = {result.orders[place]:,}")
        style.log_scale(below)
        style.finish(below, "number of moments", "error of log det")
    for axis in axes[len(result.names) + (rows - 1) * columns :]:
        # A last row that is not full has empty panels below and above.
        axis.set_visible(bool(axis.lines))
    style.share_legend(drawing)
    return drawing


# ------------------------------------------------------------------------------------------
# Moments and the two methods.


class Density(NamedTuple):
    r"""What the study records of a density on ``[0, bound]``.

    Attributes:
        entropy: :math:`-\int q \log q`, minus that of the flat density, which is the logarithm of
            the bound.
        mean_log: Mean of the logarithm of an eigenvalue.
        solved: Whether the moments were matched.
        relaxation: Variance added to the moments because no density had them.
    """

    entropy: float
    mean_log: float
    solved: bool
    relaxation: float = 0.0


def bmxnt(
    moments: Tensor, *, bound: float = 1.0, rtol: float = 1e-5, max_sweeps: int = 1000
) -> Density:
    r"""Return the density that Bandyopadhyay's iteration finds for power moments.

    .. math:: q(t) \propto \exp\Big(-\sum_{i=1}^m \gamma_i t^i\Big), \quad
        \gamma_i \leftarrow \gamma_i + \log \frac{\langle t^i \rangle_q}{\mu_i}

    for :math:`i = 1, \dots, m` in turn, where :math:`t` is the eigenvalue divided by the bound. It
    is a baseline that does not converge for more than a few moments. With more moments the entropy
    should fall, as that of :func:`ritz.maxent` does; here it rises.

    Args:
        moments: Power moments of :math:`t`, degree ``0, ..., m``, all positive, ``(m + 1,)``.
        bound: Upper end of the support, which begins at 0.
        rtol: Largest relative error of a moment at which the iteration stops.
        max_sweeps: Maximum number of sweeps over the moments.

    Reference: Bandyopadhyay, Bhattacharya, Biswas and Drabold (2005), as used in section 2.6.1 of
    *Spectral Machine Learning*.
    """
    check_finite("moments", moments)
    targets = moments.double().numpy()[1:]
    if moments.ndim != 1 or not (targets.size and (targets > 0).all()):
        raise ValueError("moments must be positive power moments on [0, 1], (m + 1,), m >= 1")
    # Fejér's rule on [0, 1], the one of ritz.maxent, so that both methods have the same error where
    # log(t) is singular: nodes t = (1 - cos a) / 2, and weights
    # (1 - 2 sum_j cos(2 j a) / (4 j^2 - 1)) / G, j = 1, ..., G / 2 (the last would count half, but
    # is cos(G a) = 0).
    angles = (np.arange(NODES) + 0.5) * (np.pi / NODES)
    j = np.arange(1, NODES // 2)
    t = 0.5 * (1 - np.cos(angles))
    weights = (1 - 2 * np.cos(2 * angles[:, None] * j) @ (1 / (4 * j**2 - 1))) / NODES
    powers = t ** np.arange(1, len(targets) + 1)[:, None]
    # log(weight * q) up to a constant, which every step changes by -step * t^i.
    exponent = np.log(weights)
    for sweep in range(max_sweeps + 1):
        shares = _softmax(exponent)
        solved = bool((np.abs(powers @ shares / targets - 1) <= rtol).all())
        if solved or sweep == max_sweeps:
            break
        for power, target in zip(powers, targets, strict=True):
            ratio = float(power @ _softmax(exponent)) / target
            exponent -= math.log(max(ratio, TINY)) * power
    # q = share / weight on [0, 1], so -int q log q = -sum share log q.
    entropy = -float(shares @ np.log(np.maximum(shares, TINY) / weights))
    return Density(entropy, float(shares @ np.log(bound * t)), solved)


def _softmax(exponent: Any) -> Any:
    shares = np.exp(exponent - exponent.max())
    return shares / shares.sum()


def _densities(op: LinearOperator, config: Config) -> Iterator[tuple[int, int, Density]]:
    """Yield the places of series and number of moments, and the density of both."""
    degree = config.counts[-1]
    # Power moments need [0, 1]: the matrices are positive definite, so 0 is a lower end.
    interval = (0.0, bounds(op, generator=study.seeded(config.seed)).high)
    sampled = moments(
        op,
        num_moments=degree,
        interval=interval,
        num_probes=config.num_probes,
        generator=study.seeded(config.seed),
    )
    means: list[tuple[Tensor, Tensor | None]] = [(sampled.mean, sampled.stderr)]
    if op.shape[0] <= config.dense_order:
        values = torch.linalg.eigvalsh(op.matmat(torch.eye(op.shape[0], dtype=op.dtype)).double())
        means.append((chebyshev_means(values, degree, interval), None))
    for place, (mean, stderr) in enumerate(means):
        powers = _powers(degree) @ mean
        for column, count in enumerate(config.counts):
            few = slice(count + 1)
            errors = None if stderr is None else stderr[few]
            density = maxent(mean[few], interval=interval, stderr=errors)
            # Relative to the flat density on the interval, whose entropy is log(high - low).
            entropy = density.entropy - math.log(interval[1])
            mean_log, solved = density.expectation(torch.log), density.status.ok
            yield 2 * place, column, Density(entropy, mean_log, solved, density.relaxation)
            scaled = bmxnt(powers[few], bound=interval[1], max_sweeps=config.max_sweeps)
            yield 2 * place + 1, column, scaled


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
