r"""SGD on a noisy quadratic in closed form: last iterate, averages and moving averages.

Gradient descent on :math:`\frac12 \lambda w^2`, with gradient noise :math:`\xi_t` of mean zero and
variance :math:`g^2`, decouples into the eigen-directions:

.. math:: w_{t+1} = \varphi w_t - \alpha \xi_t, \qquad \varphi = 1 - \alpha \lambda.

So the mean and the variance of anything linear in the iterates have closed forms.

Reference: Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, section 4.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_finite, check_range
from ritz._core.density import as_points
from ritz._core.random import resolve_generator
from ritz._core.storage import storable


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class IterateMoments:
    """Mean and variance over the noise in each eigen-direction, both ``(d,)`` in float64."""

    mean: Tensor
    variance: Tensor


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The ends of simulated runs, all ``(num_paths, d)`` in float64.

    Attributes:
        iterate: The last iterate.
        average: The average of every ``interval``-th iterate, without the start.
        average_with_start: The same with the start.
        ema: The exponential moving average, initialised with the start.
        seed: Seed of the generator.
    """

    iterate: Tensor
    average: Tensor
    average_with_start: Tensor
    ema: Tensor
    seed: int


def iterate(
    eigenvalues: Tensor,
    *,
    rate: float | Tensor,
    num_steps: int,
    start: float | Tensor = 1.0,
    noise: float | Tensor = 1.0,
) -> IterateMoments:
    r"""Return mean and variance of the last iterate :math:`w_n`.

    .. math:: \mathbb{E} w_n = \varphi^n w_0, \qquad
        \operatorname{Var} w_n = \alpha^2 g^2 \frac{1 - \varphi^{2n}}{1 - \varphi^2}

    The result is exact to roundoff for any :math:`\varphi`, also close to 1 or -1, and for flat or
    unstable directions within the range of float64.

    Args:
        eigenvalues: Eigenvalues :math:`\lambda`, ``(d,)``, of either sign.
        rate: Learning rate :math:`\alpha`; a tensor ``(d,)`` gives each direction its own, as with
            preconditioning.
        num_steps: Number of steps :math:`n`.
        start: Start :math:`w_0`.
        noise: Variance :math:`g^2` of the gradient noise: that of one sample over the batch size.
    """
    system = _System(eigenvalues, rate, start, noise, num_steps)
    # w_n = phi^n w_0 - alpha sum_m phi^m xi_{n-1-m}
    return system.moments(system.power(num_steps), system.squares(num_steps))


def average(
    eigenvalues: Tensor,
    *,
    rate: float | Tensor,
    num_steps: int,
    start: float | Tensor = 1.0,
    noise: float | Tensor = 1.0,
    interval: int = 1,
    include_start: bool = False,
) -> IterateMoments:
    r"""Return mean and variance of the average of :math:`w_k, w_{2k}, \dots, w_{nk}`.

    .. math:: \mathbb{E} \bar w = \frac{w_0}{n} \sum_{m=1}^n \phi^m, \qquad
        \operatorname{Var} \bar w = \frac{s^2}{n^2} \sum_{m=1}^n
        \Big(\frac{1 - \phi^m}{1 - \phi}\Big)^2, \qquad \phi = \varphi^k, \quad
        s^2 = \alpha^2 g^2 \frac{1 - \varphi^{2k}}{1 - \varphi^2}

    For :math:`k = 1` the variance tends to :math:`g^2 / (\lambda^2 n)` for any learning rate. With
    the start, :math:`n` becomes :math:`n + 1` and the mean gains :math:`w_0 / (n + 1)`. The closed
    form of the sum cancels if :math:`n \alpha \lambda` is small. Therefore the sum is built by
    doubling, in about :math:`\log_2 n` operations without cancellation.

    Args:
        eigenvalues: Eigenvalues :math:`\lambda`, ``(d,)``, of either sign.
        rate: Learning rate :math:`\alpha`, one number or ``(d,)``.
        num_steps: Number of steps; every ``interval``-th iterate is averaged.
        start: Start :math:`w_0`.
        noise: Variance :math:`g^2` of the gradient noise.
        interval: Steps :math:`k` between averaged iterates.
        include_start: Average :math:`w_0` as well, as Gadam does.
    """
    system = _System(eigenvalues, rate, start, noise, num_steps, interval)
    count = num_steps // interval
    sums = system.sums(1.0, count)
    # sum_{m=1}^n phi^m = phi D_n with rho = 1
    total = sums.weight * system.power(interval)
    if include_start:
        total, count = total + 1, count + 1
    return system.moments(total / count, sums.squares * system.squares(interval) / count**2)


def ema(
    eigenvalues: Tensor,
    *,
    rate: float | Tensor,
    num_steps: int,
    decay: float,
    start: float | Tensor = 1.0,
    noise: float | Tensor = 1.0,
    interval: int = 1,
) -> IterateMoments:
    r"""Return mean and variance of :math:`e \leftarrow \rho e + (1 - \rho) w`, :math:`e_0 = w_0`.

    .. math:: \mathbb{E} e_n = w_0 \big[\rho^n + (1 - \rho) \phi D_n\big], \qquad
        \operatorname{Var} e_n = s^2 (1 - \rho)^2 \sum_{m=1}^n D_m^2, \qquad
        D_m = \frac{\phi^m - \rho^m}{\phi - \rho}

    with :math:`\phi` and :math:`s^2` as in :func:`average`. The sums are built by doubling from
    :math:`D_m = \sum_i \phi^i \rho^{m-1-i}`, which has no singularity at :math:`\phi = \rho`.

    Args:
        eigenvalues: Eigenvalues :math:`\lambda`, ``(d,)``, of either sign.
        rate: Learning rate :math:`\alpha`, one number or ``(d,)``.
        num_steps: Number of steps; every ``interval``-th iterate enters.
        decay: Decay :math:`\rho`, from 0 (the iterate itself) to 1.
        start: Start :math:`w_0`.
        noise: Variance :math:`g^2` of the gradient noise.
        interval: Steps :math:`k` between updates of the moving average.
    """
    check_range("decay", decay, low=0.0, high=1.0)
    system = _System(eigenvalues, rate, start, noise, num_steps, interval)
    count = num_steps // interval
    sums = system.sums(decay, count)
    # e_n = rho^n w_0 + (1 - rho) sum_m rho^{n-m} w_m
    mean = decay**count + (1 - decay) * system.power(interval) * sums.weight
    return system.moments(mean, (1 - decay) ** 2 * sums.squares * system.squares(interval))


def stationary(
    eigenvalues: Tensor,
    *,
    rate: float | Tensor,
    noise: float | Tensor = 1.0,
    decay: float = 0.0,
    interval: int = 1,
) -> IterateMoments:
    r"""Return mean (zero) and variance of the iterate or its moving average after many steps.

    .. math:: \operatorname{Var} w_\infty = \frac{\alpha g^2}{\lambda (2 - \alpha \lambda)}, \qquad
        \frac{\operatorname{Var} e_\infty}{\operatorname{Var} w_\infty} =
        \frac{1 - \rho}{1 + \rho} \, \frac{1 + \phi \rho}{1 - \phi \rho}

    The second factor is due to the correlation of iterates. It is 1 for independent ones.

    Args:
        eigenvalues: Eigenvalues :math:`\lambda`, ``(d,)``, all between 0 and :math:`2 / \alpha`.
        rate: Learning rate :math:`\alpha`, one number or ``(d,)``.
        noise: Variance :math:`g^2` of the gradient noise.
        decay: Decay :math:`\rho`, below 1; 0 is the iterate itself.
        interval: Steps :math:`k` between updates of the moving average.
    """
    check_range("decay", decay, low=0.0, high=math.nextafter(1.0, 0.0))
    system = _System(eigenvalues, rate, 0.0, noise, interval, interval)
    if bool(((system.x <= 0) | (system.x >= 2)).any()):
        low, high = system.x.min(), system.x.max()
        raise ValueError(f"eigenvalues must lie between 0 and 2 / rate for a stationary state to "
                         f"exist, got rate * eigenvalue from {low:.6g} to {high:.6g}")  # fmt: skip
    phi = system.power(interval)
    # (1 - rho)/(1 - phi rho), so that nothing cancels where phi and rho are both close to 1.
    slower = (1 - decay) / ((1 - decay) + decay * system.gap(interval))
    factor = slower * (1 + phi * decay) / (1 + decay)
    return system.moments(torch.zeros_like(phi), factor / (system.x * (2 - system.x)))


def simulate(
    eigenvalues: Tensor,
    *,
    rate: float | Tensor,
    num_steps: int,
    num_paths: int,
    decay: float,
    start: float | Tensor = 1.0,
    noise: float | Tensor = 1.0,
    interval: int = 1,
    generator: torch.Generator | None = None,
) -> Paths:
    """Simulate runs with Gaussian noise and return their ends, to check the closed forms.

    Args:
        eigenvalues: Eigenvalues of the quadratic, ``(d,)``.
        rate: Learning rate, one number or ``(d,)``.
        num_steps: Number of steps.
        num_paths: Number of independent runs.
        decay: Decay of the moving average.
        start: Start of all runs.
        noise: Variance of the gradient noise.
        interval: Steps between iterates that enter the averages.
        generator: Source of the noise. Defaults to a new generator with seed 0.
    """
    num_paths = check_count("num_paths", num_paths)
    check_range("decay", decay, low=0.0, high=1.0)
    system = _System(eigenvalues, rate, start, noise, num_steps, interval)
    generator = resolve_generator(generator)
    w = system.start.expand(num_paths, -1).clone()
    total, moving, scale = torch.zeros_like(w), w.clone(), system.step_variance.sqrt()
    for step in range(1, num_steps + 1):
        drawn = torch.randn(w.shape, generator=generator, dtype=w.dtype, device=generator.device)
        # w <- (1 - alpha lambda) w - alpha xi
        w = w - system.x * w + scale * drawn.to(w.device)
        if step % interval == 0:
            total += w
            moving.lerp_(w, 1 - decay)
    # Steps after the last multiple of the interval enter the iterate only.
    count = num_steps // interval
    return Paths(
        iterate=w,
        average=total / count,
        average_with_start=(total + system.start) / (count + 1),
        ema=moving,
        seed=generator.initial_seed(),
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    r"""Over :math:`m = 1, \dots, n`, with :math:`D_m = \sum_i \phi^i \rho^{m-1-i}`."""

    length: int
    weight: Tensor  # D_n
    decays: Tensor  # sum of rho^2m
    crosses: Tensor  # sum of rho^m D_m
    squares: Tensor  # sum of D_m^2


@final
class _System:
    """The recursion in each direction, with powers of phi to full relative accuracy."""

    def __init__(
        self,
        eigenvalues: Tensor,
        rate: float | Tensor,
        start: float | Tensor,
        noise: float | Tensor,
        num_steps: int,
        interval: int = 1,
    ) -> None:
        if not isinstance(eigenvalues, Tensor):
            raise TypeError(f"eigenvalues must be a tensor, got {type(eigenvalues).__name__}")
        interval = check_count("interval", interval)
        num_steps = check_count("num_steps", num_steps, low=interval)
        values = eigenvalues.detach().double().reshape(-1)
        check_finite("eigenvalues", values)
        if not len(values):
            raise ValueError("eigenvalues must have at least one entry, got none")
        alpha = per_direction("rate", rate, values, low=0.0)
        self.start = per_direction("start", start, values)
        self.step_variance = alpha.square() * per_direction("noise", noise, values, low=0.0)
        self.interval = interval
        self.x = alpha * values
        # log |1 - x| by log1p: 1 - x would lose the digits of x near 0, and those of 2 - x near 2.
        self._log = torch.log1p(torch.where(self.x < 1, -self.x, self.x - 2))

    def power(self, exponent: int) -> Tensor:
        """Return ``phi ** exponent`` for an exponent of at least one."""
        size = torch.exp(exponent * self._log)
        return torch.where(self.x > 1, -size, size) if exponent % 2 else size

    def gap(self, exponent: int) -> Tensor:
        """Return ``1 - phi ** exponent``."""
        # By expm1 for positive powers: 1 - phi^n would cancel where phi^n is close to 1.
        power = self.power(exponent)
        return torch.where(power > 0, -torch.expm1(exponent * self._log), 1 - power)

    def squares(self, count: int) -> Tensor:
        """Return the sum of ``phi ** 2m`` over ``m`` from 0 to ``count - 1``."""
        # (1 - phi^2n) / (1 - phi^2), and n where |phi| = 1
        ratio = torch.expm1(2 * count * self._log) / torch.expm1(2 * self._log)
        return torch.where(self._log == 0, float(count), ratio)

    def sums(self, rho: float, count: int) -> _Sums:
        """Return the sums of ``count`` terms for ``phi ** interval``."""
        # By the binary digits of count: double for each digit, and add one term for each 1.
        one = torch.ones_like(self.x)
        unit = total = _Sums(1, one, rho**2 * one, rho * one, one)
        for digit in f"{count:b}"[1:]:
            total = self._join(total, total, rho)
            if digit == "1":
                total = self._join(total, unit, rho)
        return total

    def _join(self, a: _Sums, b: _Sums, rho: float) -> _Sums:
        # D_{a+m} = rho^m D_a + phi^a D_m, squared and summed over the m of b.
        phi, decay = self.power(self.interval * a.length), rho**a.length
        return _Sums(
            length=a.length + b.length,
            weight=rho**b.length * a.weight + phi * b.weight,
            decays=a.decays + decay**2 * b.decays,
            crosses=a.crosses + decay * (a.weight * b.decays + phi * b.crosses),
            squares=a.squares
            + a.weight.square() * b.decays
            + 2 * a.weight * phi * b.crosses
            + phi.square() * b.squares,
        )

    def moments(self, mean: Tensor, variance: Tensor) -> IterateMoments:
        """Return mean and variance from those of a unit start and of unit noise per step."""
        mean, variance = mean * self.start, variance * self.step_variance
        if not bool(torch.isfinite(mean + variance).all()):
            worst = float(torch.exp(self._log.max()))
            raise ValueError(f"num_steps must be small enough for unstable directions to stay "
                             f"finite, got |1 - rate * eigenvalue| up to {worst:.6g}")  # fmt: skip
        return IterateMoments(mean=mean, variance=variance)


def per_direction(
    name: str, value: float | Tensor, like: Tensor, low: float | None = None
) -> Tensor:
    """Return a number or one number per direction as a float64 tensor ``(d,)``, checked."""
    tensor = as_points(value, name).detach().to(like.device)
    check_finite(name, tensor)
    if tensor.ndim > 1 or tensor.numel() not in (1, like.numel()):
        raise ValueError(f"{name} must be a number or ({like.numel()},), got {tuple(tensor.shape)}")
    if low is not None:
        check_range(name, float(tensor.min()), low=low)
    return tensor.expand_as(like)
