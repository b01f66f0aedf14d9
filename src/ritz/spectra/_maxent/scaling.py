"""Maximum entropy by iterative scaling in power moments: the older way, kept to compare with."""

import math

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from ritz._core.checks import check_count, check_finite, check_interval, check_range
from ritz._core.results import Status
from ritz.spectra._maxent.dual import Grid, chebyshev
from ritz.spectra._maxent.entropic import EntropicDensity

TINY = 1e-300  # a moment that underflows has a logarithm still


def bmxnt(
    moments: Tensor,
    *,
    interval: tuple[float, float] = (0.0, 1.0),
    rtol: float = 1e-5,
    max_sweeps: int = 1000,
    grid_size: int = 512,
) -> EntropicDensity:
    r"""Return the density that Bandyopadhyay's iteration finds for power moments.

    .. math:: q(t) \propto \exp\Big(-\sum_{i=1}^m \gamma_i t^i\Big), \quad
        \gamma_i \leftarrow \gamma_i + \log \frac{\langle t^i \rangle_q}{\mu_i}

    for :math:`i = 1, \dots, m` in turn, over and over, :math:`t` the variable mapped to
    ``[0, 1]``. It is a baseline: it does not solve the problem for more than a few moments, whence
    an entropy that rises with their number, which :func:`ritz.maxent` never shows. ``status`` says
    whether it got there.

    Args:
        moments: Power moments of the variable mapped to ``[0, 1]``, degree ``0, ..., m``, all
            positive, ``(m + 1,)``.
        interval: ``(a, b)``, the support.
        rtol: Largest relative error of a moment to stop at.
        max_sweeps: Most sweeps over the moments.
        grid_size: Nodes of the quadrature.

    Reference: Bandyopadhyay, Bhattacharya, Biswas and Drabold (2005), as used in section 2.6.1 of
    *Spectral Machine Learning*.
    """
    moments = torch.as_tensor(moments, dtype=torch.float64)
    if moments.ndim != 1 or len(moments) < 2 or not bool((moments > 0).all()):
        raise ValueError("moments must be positive power moments on [0, 1], (m + 1,), m >= 1")
    check_finite("moments", moments)
    if abs(float(moments[0]) - 1) > 1e-6:
        raise ValueError(
            f"moments must begin with that of degree 0, which is 1, got {float(moments[0]):.6g}"
        )
    check_interval("interval", interval)
    check_range("rtol", rtol, low=0.0)
    check_count("max_sweeps", max_sweeps)
    check_count("grid_size", grid_size, low=2 * len(moments))
    grid = Grid.make(grid_size, 0)
    t = 0.5 * (grid.nodes + 1)
    powers = t[:, None] ** torch.arange(1, len(moments), dtype=torch.float64)
    gammas, sweeps, error = _iterate(powers, grid.weights.log(), moments[1:], rtol, max_sweeps)
    return _density(gammas, moments, interval, grid, powers, sweeps, error, rtol)


def _iterate(
    powers: Tensor, log_weights: Tensor, targets: Tensor, rtol: float, max_sweeps: int
) -> tuple[Tensor, int, float]:
    columns = np.ascontiguousarray(powers.numpy().T)  # thousands of small operations: in NumPy
    wanted, exponent = targets.numpy(), log_weights.numpy().copy()
    gammas, error = np.zeros(len(wanted)), math.inf
    for sweep in range(1, max_sweeps + 1):
        shares = np.exp(exponent - exponent.max())
        error = float(np.abs(columns @ shares / (shares.sum() * wanted) - 1).max())
        if error <= rtol:
            return torch.from_numpy(gammas), sweep - 1, error
        for i, column in enumerate(columns):
            shares = np.exp(exponent - exponent.max())
            ratio = float(column @ shares) / float(shares.sum() * wanted[i])
            step = math.log(max(ratio, TINY))
            gammas[i] += step
            exponent -= step * column
    return torch.from_numpy(gammas), max_sweeps, error


def _density(
    gammas: Tensor,
    moments: Tensor,
    interval: tuple[float, float],
    grid: Grid,
    powers: Tensor,
    sweeps: int,
    error: float,
    rtol: float,
) -> EntropicDensity:
    m = len(gammas)
    shift = Polynomial([0.5, 0.5])  # t as a polynomial of x in [-1, 1]
    exponent = Polynomial([0.0, *gammas.tolist()])(shift)
    series = np.zeros(m + 1)
    converted = exponent.convert(kind=Chebyshev).coef
    series[: len(converted)] = converted
    alphas = torch.from_numpy(series[1:].copy())
    weighted = -chebyshev(grid.nodes, m)[:, 1:] @ alphas + grid.weights.log()
    shares = weighted.softmax(0)
    change = [
        Chebyshev.basis(k)(Polynomial([-1.0, 2.0])).convert(kind=Polynomial).coef
        for k in range(1, m + 1)
    ]
    targets = torch.tensor([float(np.dot(row, moments[: len(row)].numpy())) for row in change],
                           dtype=torch.float64)  # fmt: skip
    reached = error <= rtol
    status = Status(
        outcome="converged" if reached else "max_steps",
        message=f"largest relative error of a moment {error:.1g} after {sweeps} sweeps",
        advice="" if reached else "use maxent, which solves the problem",
    )
    return EntropicDensity(
        alphas=alphas,
        log_partition=float(weighted.logsumexp(0)),
        interval=(float(interval[0]), float(interval[1])),
        prior="flat",
        targets=targets,
        fitted=shares @ chebyshev(grid.nodes, m)[:, 1:],
        ridge=torch.zeros(m, dtype=torch.float64),
        grid_size=len(grid.nodes),
        num_steps=sweeps,
        status=status,
    )
