r"""Bounds for Krylov methods, moments, probes, graphs and SGD, known without a measurement.

They concern the convergence of Krylov methods, errors of moments, numbers of probes, perturbations
of graphs, and losses of averaged and preconditioned SGD. If a formula differs from the printed one,
the docstring says so.
"""

import math
from typing import NamedTuple

import torch
from scipy.optimize import brentq
from scipy.special import chdtri
from torch import Tensor

from ritz._core.checks import (
    check_count,
    check_finite,
    check_positive,
    check_range,
    check_rtol,
    check_type,
    is_below,
    short,
)
from ritz._core.density import as_points, broadcast
from ritz.rmt._laws import Law
from ritz.rmt._transforms import Measure, as_measure
from ritz.rmt.diffusion import check_covariance, check_start, positive_definite
from ritz.rmt.quadratic import IterateMoments, per_direction


class Krylov(NamedTuple):
    """Factors by which the error of the largest eigenvalue falls, float64 tensors of one shape."""

    lanczos: Tensor
    power: Tensor


class Spread(NamedTuple):
    """Mean and standard deviation of a random number."""

    mean: float
    stddev: float


# ------------------------------------------------------------------------------------------
# Krylov methods.


def lanczos_error(
    largest: float, second: float, smallest: float, *, num_steps: int, overlap: float
) -> float:
    r"""Return a bound on :math:`\lambda_1 - \theta_1` after ``m`` Lanczos steps.

    .. math:: \lambda_1 - \theta_1 \le (\lambda_1 - \lambda_n)
        \frac{\tan^2 \vartheta}{T_{m-1}(1 + 2 \rho)^2}, \qquad
        \rho = \frac{\lambda_1 - \lambda_2}{\lambda_2 - \lambda_n}

    For the smallest eigenvalue, pass :math:`-\lambda_n`, :math:`-\lambda_{n-1}` and
    :math:`-\lambda_1`.

    Args:
        largest: :math:`\lambda_1`.
        second: :math:`\lambda_2`.
        smallest: :math:`\lambda_n`.
        num_steps: Dimension ``m`` of the Krylov space.
        overlap: :math:`\cos \vartheta`, the inner product of the start vector and the eigenvector;
            about :math:`n^{-1/2}` for a random start.

    Reference: *Spectral Machine Learning*, Theorem 4; Kaniel (1966), Paige (1971), Saad (1980).
    """
    _check_order(largest, second, smallest)
    num_steps = check_count("num_steps", num_steps)
    factors = krylov_factors((largest - smallest) / (second - smallest), num_steps=num_steps)
    return (largest - smallest) * _tangent(overlap) * float(factors.lanczos)


def power_error(
    largest: float, second: float, smallest: float, *, num_steps: int, overlap: float
) -> float:
    r"""Return a bound on :math:`\lambda_1 - \theta_1` after :math:`m - 1` power iterations.

    .. math:: \lambda_1 - \theta_1 \le (\lambda_1 - \lambda_n) \tan^2 \vartheta\,
        \Big(\frac{\max(\lambda_2, |\lambda_n|)}{\lambda_1}\Big)^{2 (m - 1)}

    The vector lies in the Krylov space of dimension ``m``, so the cost is that of
    :func:`lanczos_error`. The thesis prints the exponent :math:`2m - 1`, which does not reproduce
    its Table 4.5; this one does.

    Args:
        largest: :math:`\lambda_1`, the largest in absolute value.
        second: :math:`\lambda_2`.
        smallest: :math:`\lambda_n`, of either sign.
        num_steps: Number ``m`` of vectors, including the start.
        overlap: As in :func:`lanczos_error`.

    Reference: *Spectral Machine Learning*, Theorem 5; Golub and Van Loan (2013), section 8.2.
    """
    _check_order(largest, second, smallest)
    num_steps = check_count("num_steps", num_steps)
    rest = max(abs(second), abs(smallest))
    if not largest > rest:
        raise ValueError(
            f"largest must exceed all other eigenvalues in absolute value, got {largest} and {rest}"
        )
    shrinking = (rest / largest) ** (2 * (num_steps - 1))
    return (largest - smallest) * _tangent(overlap) * shrinking


def krylov_factors(gap: float | Tensor, *, num_steps: int | Tensor) -> Krylov:
    r"""Return the error factors of Lanczos and of power iteration, for :math:`\lambda_n = 0`.

    .. math:: L = T_{m-1}(2 \lambda_1/\lambda_2 - 1)^{-2}, \qquad
        R = (\lambda_2/\lambda_1)^{2 (m-1)}

    Args:
        gap: :math:`\lambda_1/\lambda_2`, above 1; broadcasts with ``num_steps``.
        num_steps: Dimension ``m`` of the Krylov space.

    Reference: *Spectral Machine Learning*, Table 4.5, whose entries are the pairs.

    Example:
        >>> lanczos, power = krylov_factors(1.1, num_steps=10)
        >>> print(f"{lanczos:.1e} {power:.1e}")
        5.5e-05 1.8e-01
    """
    gaps, steps = broadcast(gap=as_points(gap, "gap"), num_steps=as_points(num_steps, "num_steps"))
    for name, values in (("gap", gaps), ("num_steps", steps)):
        if not bool((values >= 1).all()):
            raise ValueError(f"{name} must be at least 1, got {float(values.min()):g}")
    # T_k(1 + 2 r) = cosh(2 k arsinh sqrt r) with r = gap - 1, without cancellation for small gaps
    angle = 2 * (steps - 1) * torch.asinh((gaps - 1).sqrt())
    return Krylov(torch.cosh(angle) ** -2, gaps ** (-2 * (steps - 1)))


# ------------------------------------------------------------------------------------------
# Moments and probes.


def smoothing_bias(measure: Measure, degree: int, *, kernel: Law) -> float:
    r"""Return the change of a moment by smoothing with a symmetric kernel.

    .. math:: \sum_{j \ge 1} \binom m{2j} \mathbb{E}_k[x^{2j}]\, \mu_{m - 2j}

    Args:
        measure: The spectrum before smoothing: eigenvalues, a ``Spectrum`` or a density.
        degree: Degree ``m`` of the moment.
        kernel: The kernel as a law, for example ``Normal(variance=width**2)``, of mean zero.

    Reference: *Spectral Machine Learning*, Theorem 2, with the binomial of :math:`m` for odd
    degrees too.
    """
    degree = check_count("degree", degree, low=0)
    check_type("kernel", kernel, Law, "a law such as Normal(variance=0.01)")
    if abs(kernel.moment(1)) > 1e-12 * math.sqrt(kernel.moment(2)):
        raise ValueError(f"kernel must have mean zero, got {kernel.moment(1):.6g}")
    known = as_measure(measure)
    return math.fsum(
        math.comb(degree, 2 * j) * kernel.moment(2 * j) * known.moment(degree - 2 * j)
        for j in range(1, degree // 2 + 1)
    )


def moment_correction(degree: int, size: int, *, bound: float, stddev: float) -> float:
    r"""Return the relative size of finite-size corrections to moments of a semicircle.

    .. math:: \frac{K^2 m^6}{2 \sigma^2 P}

    for a symmetric matrix of order ``P`` with independent entries of absolute value at most ``K``.
    The thesis prints :math:`P^2`, which is too small: the correction to the fourth moment of random
    signs is the fraction :math:`1/(2P)`.

    Args:
        degree: Degree ``m``.
        size: Order ``P``.
        bound: Largest absolute value :math:`K` of an entry.
        stddev: Standard deviation :math:`\sigma` of an entry.

    Reference: *Spectral Machine Learning*, equation 2.42; Füredi and Komlós (1981).
    """
    degree = check_count("degree", degree)
    size = check_count("size", size)
    check_positive("bound", bound)
    check_positive("stddev", stddev)
    check_range("stddev", stddev, high=bound)
    return bound**2 * degree**6 / (2 * stddev**2 * size)


def probe_variance(size: int, *, condition: float) -> float:
    r"""Return a bound on the relative variance of one Gaussian probe of the trace.

    .. math:: \frac{\operatorname{Var} z^\top A z}{(\operatorname{tr} A)^2} =
        \frac{2 \sum \lambda_i^2}{(\sum \lambda_i)^2} \le
        2 \min\Big(\frac1{1 + (P - 1)/\kappa^2}, \frac{(1 + \kappa)^2}{4 \kappa P}\Big)

    The first bound is that of the thesis. The second one is Kantorovich's, and is attained. The
    variance of Rademacher probes is not larger.

    Args:
        size: Order ``P`` of a positive definite matrix.
        condition: Its condition number :math:`\kappa`.

    Reference: *Spectral Machine Learning*, Lemma 1 and equation 2.34.
    """
    size = check_count("size", size)
    check_range("condition", condition, low=1.0)
    spread = 1 / (1 + (size - 1) / condition**2)
    return 2 * min(spread, (1 + condition) ** 2 / (4 * condition * size))


def probes_needed(size: int, *, condition: float, rtol: float) -> int:
    r"""Return a number of probes for a relative standard error of the trace of at most ``rtol``.

    .. math:: d = \lceil \operatorname{Var} / \mathrm{rtol}^2 \rceil

    Args:
        size: Order of a positive definite matrix.
        condition: Condition number of the matrix :math:`A`, or of :math:`f(A)` for the trace of a
            function.
        rtol: Standard error relative to the trace.
    """
    # Below 1e-150 the number of probes would not be finite.
    check_rtol(rtol, low=1e-150)
    return max(1, math.ceil(probe_variance(size, condition=condition) / rtol**2))


def entropy_concentration(num_samples: int, *, degrees: int, level: float = 0.95) -> float:
    r"""Return the gap between the entropy of observed frequencies and its maximum.

    .. math:: \Delta S = \frac{\chi^2_d(F)}{2 N}

    With probability ``F`` frequencies of ``N`` samples that meet the constraints have an entropy
    within :math:`\Delta S` of the largest possible.

    Args:
        num_samples: Number of samples ``N``.
        degrees: Degrees of freedom ``d``: number of cells less one less the number of constraints.
        level: Probability ``F``.

    Reference: Jaynes (1983); *Spectral Machine Learning*, section 2.3.
    """
    num_samples = check_count("num_samples", num_samples)
    degrees = check_count("degrees", degrees)
    check_range("level", level, low=0.0, high=math.nextafter(1.0, 0.0))
    return float(chdtri(degrees, 1 - level)) / (2 * num_samples)


# ------------------------------------------------------------------------------------------
# Graphs.


def edge_perturbation(first: Tensor, second: Tensor) -> float:
    r"""Return a bound on the spectral norm of the change of a normalised Laplacian by one edge.

    .. math:: \|\Delta L\| \le \frac1{\sqrt{(d_1 + 1)(d_2 + 1)}} + \max_{i = 1, 2}
        \Big(\frac1{\sqrt{d_i}} - \frac1{\sqrt{d_i + 1}}\Big) \sqrt{\sum_{g \sim i} \frac1{d_g}}

    It holds for an edge between two vertices without common neighbours, such as the first edge
    between two components. Equation 3.13 of the thesis is too large by a factor of about twenty.

    Args:
        first: Degrees :math:`d_g` of the neighbours of the first vertex, before the edge.
        second: Degrees of the neighbours of the second vertex.

    Reference: *Spectral Machine Learning*, Theorem 3, corrected.
    """
    losses = []
    for name, degrees in (("first", first), ("second", second)):
        if not (isinstance(degrees, Tensor) and degrees.numel() and bool((degrees >= 1).all())):
            raise ValueError(
                f"{name} must be a tensor of degrees of at least 1, got {short(degrees)}"
            )
        d = degrees.numel()
        # Elements of the row shrink from 1/sqrt(d d_g) to 1/sqrt((d + 1) d_g).
        shrinking = 1 / math.sqrt(d) - 1 / math.sqrt(d + 1)
        losses.append(shrinking * math.sqrt(float((1 / degrees.double()).sum())))
    return 1 / math.sqrt((first.numel() + 1) * (second.numel() + 1)) + max(losses)


# ------------------------------------------------------------------------------------------
# Averaged and preconditioned SGD on a quadratic.


def squared_norm(moments: IterateMoments) -> Spread:
    r"""Return mean and standard deviation of :math:`|w|^2` for Gaussian noise in ``P`` directions.

    .. math:: \mathbb{E} |w|^2 = \sum_i (m_i^2 + v_i), \qquad
        \operatorname{Var} |w|^2 = \sum_i (2 v_i^2 + 4 m_i^2 v_i)

    The ratio of the deviation to the mean falls as :math:`P^{-1/2}`: iterates lie in a thin shell,
    and averages in a smaller one.

    Args:
        moments: Result of :func:`quadratic.iterate`, :func:`quadratic.average` and so on.

    Reference: *Spectral Machine Learning*, Theorem 18, with exact moments.
    """
    check_type("moments", moments, IterateMoments, "a result of rmt.quadratic")
    mean, v = moments.mean.square(), moments.variance
    return Spread(float((mean + v).sum()), math.sqrt(float((2 * v * v + 4 * mean * v).sum())))


def expected_loss(moments: IterateMoments, eigenvalues: Tensor) -> float:
    r"""Return :math:`\mathbb{E} L(w) = \frac12 \sum_i \lambda_i (m_i^2 + v_i)`.

    Args:
        moments: As in :func:`squared_norm`.
        eigenvalues: Eigenvalues :math:`\lambda_i` of the quadratic, ``(d,)``.
    """
    check_type("moments", moments, IterateMoments, "a result of rmt.quadratic")
    check_type("eigenvalues", eigenvalues, Tensor, "a tensor")
    if eigenvalues.shape != moments.mean.shape:
        raise ValueError(
            f"eigenvalues must be ({len(moments.mean)},), got {tuple(eigenvalues.shape)}"
        )
    values = eigenvalues.double()
    return 0.5 * float(values @ (moments.mean.square() + moments.variance))


def iterate_loss(eigenvalues: Tensor, *, noise: Tensor | float, rate: float) -> float:
    r"""Return the loss of the last iterate after many steps.

    .. math:: \frac\alpha4 \operatorname{tr}\Big(1 - \frac\alpha2 H\Big)^{-1} \Sigma

    Args:
        eigenvalues: Eigenvalues of the Hessian, ``(d,)``, between 0 and :math:`2/\alpha`.
        noise: Variances of the gradient noise in these directions, ``(d,)`` or one number.
        rate: Learning rate :math:`\alpha`.

    Reference: *Spectral Machine Learning*, equation 7.26; Martens (2014).
    """
    values = _eigenvalues(eigenvalues)
    check_positive("rate", rate)
    if not rate * float(values.max()) < 2:
        raise ValueError(f"rate must lie between 0 and 2/{float(values.max()):.6g}, got {rate}")
    sigma = per_direction("noise", noise, values, low=0.0)
    return rate / 4 * float((sigma / (1 - rate / 2 * values)).sum())


def average_loss(eigenvalues: Tensor, *, noise: Tensor | float, num_steps: int) -> float:
    r"""Return the loss of the average of many iterates.

    .. math:: \frac{\operatorname{tr} H^{-1} \Sigma}{2 n + 2}

    This is the leading term for :math:`n \alpha \lambda \gg 1`. It does not depend on the rate.

    Args:
        eigenvalues: Eigenvalues of the Hessian, ``(d,)``, positive.
        noise: As in :func:`iterate_loss`.
        num_steps: Number ``n`` of averaged iterates.

    Reference: *Spectral Machine Learning*, equation 7.26; *Iterate averaged adaptive gradient
    methods*, Table 1.
    """
    num_steps = check_count("num_steps", num_steps)
    values = _eigenvalues(eigenvalues)
    sigma = per_direction("noise", noise, values, low=0.0)
    return float((sigma / values).sum()) / (2 * num_steps + 2)


def break_even_rate(eigenvalues: Tensor, *, num_steps: int, noise: Tensor | float = 1.0) -> float:
    r"""Return the learning rate below which the last iterate has a lower loss than the average.

    At this rate :func:`iterate_loss` equals :func:`average_loss`. In one direction it is
    :math:`2/((n + 2) \lambda)`, so it falls as :math:`1/n`. Equation 7.28 of the thesis,
    :math:`\frac2{2 + n} \operatorname{tr} H^{-1}/P`, is exact only for equal eigenvalues.

    Args:
        eigenvalues: Eigenvalues of the Hessian, ``(d,)``, positive.
        num_steps: Number ``n`` of averaged iterates.
        noise: As in :func:`iterate_loss`.

    Reference: *Spectral Machine Learning*, Theorem 19.
    """
    goal = average_loss(eigenvalues, noise=noise, num_steps=num_steps)
    if not goal > 0:
        raise ValueError("noise must be positive in some direction, got zero in all")
    edge = 2 / float(_eigenvalues(eigenvalues).max())

    def gap(rate: float) -> float:
        return iterate_loss(eigenvalues, noise=noise, rate=rate) - goal

    low, high = edge * 1e-15, edge * (1 - 1e-12)
    if not gap(low) < 0 < gap(high):
        raise ValueError(
            f"eigenvalues must have a break-even rate between {low:.3g} and {high:.3g}, got one "
            "outside: the flattest direction dominates the average"
        )
    return float(brentq(gap, low, high, xtol=1e-300, rtol=1e-14))


def dependent_average_variance(covariances: Tensor, *, eigenvalue: float, num_steps: int) -> float:
    r"""Return the variance of the average of iterates if noise of different steps is correlated.

    .. math:: \frac1{n^2 \lambda^2} \sum_{|k| < n} (n - |k|)\, \gamma_k

    This is the leading term for :math:`n \alpha \lambda \gg 1`. Equation 6 of the paper omits the
    covariances of different steps, and is too small if these are positive.

    Args:
        covariances: :math:`\gamma_0, \gamma_1, \dots`, covariances of the noise ``k`` steps apart;
            those beyond the end are zero.
        eigenvalue: Curvature :math:`\lambda` of the direction.
        num_steps: Number ``n`` of averaged iterates.

    Reference: *Iterate averaged adaptive gradient methods*, section 4.
    """
    num_steps = check_count("num_steps", num_steps)
    check_type("covariances", covariances, Tensor, "a tensor")
    check_finite("covariances", covariances)
    check_positive("eigenvalue", eigenvalue)
    if covariances.ndim != 1 or not len(covariances):
        raise ValueError(f"covariances must be (k,), got {tuple(covariances.shape)}")
    gamma = covariances.double()[:num_steps]
    lags = torch.arange(len(gamma), dtype=torch.float64)
    # Both signs of the lag, except for lag 0
    pairs = torch.where(lags > 0, 2.0, 1.0) * (num_steps - lags) * gamma
    return float(pairs.sum()) / (num_steps * eigenvalue) ** 2


def preconditioned_iterate_loss(preconditioner: Tensor, *, noise: Tensor, rate: float) -> float:
    r"""Return a bound on the loss of the last iterate of preconditioned SGD after many steps.

    .. math:: \frac\alpha2 \operatorname{tr} B^{-1} \Sigma \qquad
        \text{if } \alpha H \le B

    The papers print :math:`\alpha/4`, which the exact loss of :func:`iterate_loss` exceeds.

    Args:
        preconditioner: :math:`B`, positive definite, ``(d, d)``.
        noise: Covariance :math:`\Sigma` of the gradient, ``(d, d)``.
        rate: Learning rate.

    Reference: *Spectral Machine Learning*, section 7.6; Martens (2014).
    """
    check_positive("rate", rate)
    B = positive_definite("preconditioner", preconditioner)
    S = check_covariance("noise", noise, B)
    return rate / 2 * float(torch.linalg.solve(B, S).trace())


def preconditioned_average_loss(
    hessian: Tensor,
    *,
    preconditioner: Tensor,
    noise: Tensor,
    start: Tensor,
    rate: float,
    num_steps: int,
) -> float:
    r"""Return a bound on the loss of the average of :math:`w_0, \dots, w_n`, preconditioned by B.

    .. math:: \min\Big(\frac{\operatorname{tr} H^{-1} \Sigma}{n + 1},
        \frac\alpha2 \operatorname{tr} B^{-1} \Sigma\Big) + \min\Big(
        \frac{|H^{-1/2} B w_0|^2}{(n + 1)^2 \alpha^2}, \frac{|B^{1/2} w_0|^2}{(n + 1) \alpha},
        3 L(w_0)\Big) \qquad \text{if } \alpha H \le B

    SGD has :math:`B = 1`. For :math:`B = H^{1/2}`, as for Adam, the first term of the second
    minimum is :math:`|w_0|^2 / ((n + 1) \alpha)^2`.

    Args:
        hessian: :math:`H`, positive definite, ``(d, d)``; the minimum is at the origin.
        preconditioner: :math:`B`, positive definite, ``(d, d)``.
        noise: Covariance :math:`\Sigma` of the gradient, ``(d, d)``.
        start: :math:`w_0`, ``(d,)``.
        rate: Learning rate.
        num_steps: Number of steps ``n``.

    Reference: *Spectral Machine Learning*, equations 7.38 to 7.40; Martens (2014).
    """
    num_steps = check_count("num_steps", num_steps)
    check_positive("rate", rate)
    H = positive_definite("hessian", hessian)
    B = positive_definite("preconditioner", preconditioner)
    if B.shape != H.shape:
        raise ValueError(f"preconditioner must be {tuple(H.shape)}, got {tuple(B.shape)}")
    S, w = check_covariance("noise", noise, H), check_start(start, H)
    # alpha H <= B is alpha times the largest eigenvalue of B^-1 H <= 1.
    factor = torch.linalg.cholesky(B)
    half = torch.linalg.solve_triangular(factor, H, upper=False)
    scaled = torch.linalg.solve_triangular(factor, half.T, upper=False)
    limit = 1 / float(torch.linalg.eigvalsh(scaled)[-1])
    if not is_below(rate, limit * (1 + 1e-9)):
        raise ValueError(f"rate must be at most {limit:.6g}, where rate * H <= B, got {rate}")
    count = num_steps + 1
    noisy = min(float(torch.linalg.solve(H, S).trace()) / count,
                preconditioned_iterate_loss(B, noise=S, rate=rate))  # fmt: skip
    moved = B @ w
    far = (
        float(moved @ torch.linalg.solve(H, moved)) / (count * rate) ** 2,
        float(w @ moved) / (count * rate),
        1.5 * float(w @ H @ w),
    )
    return noisy + min(far)


def regret(*, distance: float, noise: float, rate: float, num_steps: int) -> float:
    r"""Return a bound on the loss of the average iterate of SGD on a convex risk.

    .. math:: \mathbb{E} L(\bar w) - L^* \le \frac{D^2}{2 \alpha T} + \alpha \sigma^2
        \qquad \text{if } \alpha \beta \le 1

    Args:
        distance: Distance :math:`D` of the start from the minimum.
        noise: Standard deviation :math:`\sigma` of the gradient, as a vector.
        rate: Learning rate :math:`\alpha`, at most one over the largest curvature :math:`\beta`.
        num_steps: Number of steps ``T``.

    Reference: *Spectral Machine Learning*, equation 7.14.
    """
    num_steps = check_count("num_steps", num_steps)
    check_positive("rate", rate)
    check_positive("distance", distance, zero=True)
    check_positive("noise", noise, zero=True)
    return distance**2 / (2 * rate * num_steps) + rate * noise**2


def optimal_rate(*, smoothness: float, distance: float, noise: float, num_steps: int) -> float:
    r"""Return the learning rate :math:`\alpha = (\beta + \sigma \sqrt T / D)^{-1}` of small regret.

    With it, the bound of :func:`regret` is at most :math:`\beta D^2 / 2T + \frac32 \sigma D /
    \sqrt T`. Other rates improve it by a constant factor at most.

    Args:
        smoothness: Largest curvature :math:`\beta`.
        distance: As in :func:`regret`.
        noise: As in :func:`regret`.
        num_steps: Number of steps ``T``.

    Reference: *Spectral Machine Learning*, section 7.2.1; *Iterate averaged adaptive gradient
    methods*, appendix E.
    """
    num_steps = check_count("num_steps", num_steps)
    check_positive("smoothness", smoothness)
    check_positive("distance", distance)
    check_positive("noise", noise, zero=True)
    return 1 / (smoothness + noise * math.sqrt(num_steps) / distance)


def _check_order(largest: float, second: float, smallest: float) -> None:
    for name, value in (("largest", largest), ("second", second), ("smallest", smallest)):
        check_range(name, value)
    if not largest >= second > smallest:
        raise ValueError(
            f"largest, second and smallest must descend, got {largest}, {second} and {smallest}"
        )


def _tangent(overlap: float) -> float:
    """Return the squared tangent of an angle from its cosine."""
    # The square of a smaller cosine would be zero.
    check_range("overlap", overlap, low=1e-150, high=1.0)
    return 1 / overlap**2 - 1


def _eigenvalues(values: Tensor) -> Tensor:
    positive = isinstance(values, Tensor) and values.ndim == 1 and len(values) > 0
    if not (positive and bool(((values > 0) & (values < math.inf)).all())):
        raise ValueError(
            f"eigenvalues must be a tensor (d,) of positive numbers, got {short(values)}"
        )
    return values.detach().double()
