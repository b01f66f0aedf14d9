r"""The noisy quadratic in closed form: last iterate, averages and moving averages.

Gradient descent on :math:`\frac12 \lambda w^2` with gradients of noise :math:`\xi_t`, of mean zero
and variance :math:`g^2`, is in every eigen-direction on its own

.. math:: w_{t+1} = \varphi w_t - \alpha \xi_t, \qquad \varphi = 1 - \alpha \lambda,

so that whatever is linear in the iterates has a mean and a variance that can be written down.

Reference: Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, section 4.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_finite, check_range
from ritz._core.random import resolve_generator
from ritz._core.storage import storable


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class IterateMoments:
    """Mean and variance over all noise in every eigen-direction, both ``(d,)`` in float64."""

    mean: Tensor
    variance: Tensor


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where simulated runs end, all ``(num_paths, d)`` in float64.

    Attributes:
        iterate: The last iterate.
        average: The average of every ``interval``-th iterate, the start left out.
        average_with_start: The same with the start.
        ema: The moving average, begun at the start.
        seed: Of the generator.
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

    Exact to roundoff for every :math:`\varphi`, also where it is close to 1 or -1. Directions that
    are flat or unstable are followed as far as float64 reaches.

    Args:
        eigenvalues: :math:`\lambda`, ``(d,)``, of either sign.
        rate: :math:`\alpha`; of every direction where it is a tensor, as with preconditioning.
        num_steps: :math:`n`.
        start: :math:`w_0`.
        noise: :math:`g^2`, the variance of the gradient noise (that of a sample over the batch
            size).
    """
    system = _System(eigenvalues, rate, start, noise, num_steps)
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

    For :math:`k = 1` the variance tends to :math:`g^2 / (\lambda^2 n)`, whatever the rate. With
    the start, :math:`n` becomes :math:`n + 1` and the mean gains :math:`w_0 / (n + 1)`. The closed
    form of the sum cancels where :math:`n \alpha \lambda` is small; it is built by doubling
    instead, of terms that do not, in about :math:`\log_2 n` operations.

    Args:
        eigenvalues: :math:`\lambda`, ``(d,)``, of either sign.
        rate: :math:`\alpha`, one for all or one for each.
        num_steps: Steps that are taken; every ``interval``-th is averaged.
        start: :math:`w_0`.
        noise: :math:`g^2`.
        interval: :math:`k`.
        include_start: Whether :math:`w_0` is averaged too, as Gadam does from where it begins.
    """
    system = _System(eigenvalues, rate, start, noise, num_steps, interval)
    count = num_steps // interval
    sums = system.sums(1.0, count)
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

    with :math:`\phi` and :math:`s^2` as in :func:`average`. Built by doubling from
    :math:`D_m = \sum_i \phi^i \rho^{m-1-i}`, so that :math:`\phi = \rho` is a point like any other.

    Args:
        eigenvalues: :math:`\lambda`, ``(d,)``, of either sign.
        rate: :math:`\alpha`, one for all or one for each.
        num_steps: Steps that are taken; every ``interval``-th enters.
        decay: :math:`\rho`, from 0 (the iterate itself) to 1.
        start: :math:`w_0`.
        noise: :math:`g^2`.
        interval: :math:`k`.
    """
    check_range("decay", decay, low=0.0, high=1.0)
    system = _System(eigenvalues, rate, start, noise, num_steps, interval)
    count = num_steps // interval
    sums = system.sums(decay, count)
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

    The second factor is what correlated iterates cost: for independent ones it is 1.

    Args:
        eigenvalues: :math:`\lambda`, ``(d,)``, all between 0 and :math:`2 / \alpha`.
        rate: :math:`\alpha`, one for all or one for each.
        noise: :math:`g^2`.
        decay: :math:`\rho`, below 1; 0 is the iterate itself.
        interval: :math:`k`, every how many steps the moving average is updated.
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
    """Return the ends of runs with Gaussian noise, step by step: the check of all else here.

    Args:
        eigenvalues: Of the quadratic, ``(d,)``.
        rate: One for all or one for each.
        num_steps: Steps of every run.
        num_paths: Independent runs.
        decay: Of the moving average.
        start: Of every run.
        noise: Variance of the gradient noise.
        interval: Every how many steps an iterate enters the averages.
        generator: Source of the noise.
    """
    check_count("num_paths", num_paths)
    check_range("decay", decay, low=0.0, high=1.0)
    system = _System(eigenvalues, rate, start, noise, num_steps, interval)
    generator = resolve_generator(generator)
    w = system.start.expand(num_paths, -1).clone()
    total, moving, scale = torch.zeros_like(w), w.clone(), system.step_variance.sqrt()
    for step in range(1, num_steps + 1):
        drawn = torch.randn(w.shape, generator=generator, dtype=w.dtype, device=generator.device)
        w = w - system.x * w + scale * drawn.to(w.device)
        if step % interval == 0:
            total += w
            moving.lerp_(w, 1 - decay)
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
    """The recursion in every direction, with powers of phi that keep their relative accuracy."""

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
        check_count("interval", interval)
        check_count("num_steps", num_steps, low=interval)
        values = eigenvalues.detach().double().reshape(-1)
        check_finite("eigenvalues", values)
        alpha = _like("rate", rate, values, low=0.0)
        self.start = _like("start", start, values)
        self.step_variance = alpha.square() * _like("noise", noise, values, low=0.0)
        self.interval = interval
        self.x = alpha * values
        # log |1 - x|: 1 - x itself would lose the digits of a small x, and 2 - x those near -1.
        self._log = torch.log1p(torch.where(self.x < 1, -self.x, self.x - 2))

    def power(self, exponent: int) -> Tensor:
        """``phi ** exponent`` for an exponent of at least one."""
        size = torch.exp(exponent * self._log)
        return torch.where(self.x > 1, -size, size) if exponent % 2 else size

    def gap(self, exponent: int) -> Tensor:
        """``1 - phi ** exponent``."""
        power = self.power(exponent)
        return torch.where(power > 0, -torch.expm1(exponent * self._log), 1 - power)

    def squares(self, count: int) -> Tensor:
        """The sum of ``phi ** 2m`` over ``m`` from 0 to ``count - 1``."""
        ratio = torch.expm1(2 * count * self._log) / torch.expm1(2 * self._log)
        return torch.where(self._log == 0, float(count), ratio)

    def sums(self, rho: float, count: int) -> _Sums:
        """The sums of ``count`` terms for ``phi ** interval``, by its binary digits."""
        one = torch.ones_like(self.x)
        unit = _Sums(1, one, rho**2 * one, rho * one, one)
        found = unit
        for digit in f"{count:b}"[1:]:
            found = self._joined(found, found, rho)
            if digit == "1":
                found = self._joined(found, unit, rho)
        return found

    def _joined(self, a: _Sums, b: _Sums, rho: float) -> _Sums:
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
        """Mean and variance from those of a unit start and of unit noise in a step."""
        mean, variance = mean * self.start, variance * self.step_variance
        if not bool(torch.isfinite(mean + variance).all()):
            worst = float(torch.exp(self._log.max()))
            raise ValueError(f"num_steps must be small enough for unstable directions to stay "
                             f"finite, got |1 - rate * eigenvalue| up to {worst:.6g}")  # fmt: skip
        return IterateMoments(mean=mean, variance=variance)


def _like(name: str, value: float | Tensor, like: Tensor, low: float | None = None) -> Tensor:
    found = torch.as_tensor(value, dtype=torch.float64, device=like.device).detach()
    check_finite(name, found)
    if found.ndim > 1 or found.numel() not in (1, like.numel()):
        raise ValueError(f"{name} must be a number or ({like.numel()},), got {tuple(found.shape)}")
    if low is not None:
        check_range(name, float(found.min()), low=low)
    return found.expand_as(like)
