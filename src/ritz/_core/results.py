"""``Estimate``, a number with error bars, and ``Status``, how a computation ended."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy.special import stdtrit
from torch import Tensor

from ritz._core.blocks import euclidean_norm, power_of_two
from ritz._core.checks import check_range, is_below
from ritz._core.storage import storable

Outcome = Literal["completed", "converged", "breakdown", "max_steps", "uncertain"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the intervals of :meth:`Estimate.interval` for few samples.

    Set on normal samples, on chi-squared samples with 1, 2, 6 and 20 degrees of freedom, on sums of
    these, and on logarithms. With 4 to 64 samples the 95 % intervals contain the exact value in
    0.945 to 0.998 of the cases, and the 99.9 % intervals in at least 0.994. Student's intervals do
    so in 0.82 to 0.95.
    """

    # The skewness of N samples is too small by about this number over N, relative to the sample
    # skewness. That of the chi-squared law with one degree of freedom is 2.8, but samples of size
    # 16 have 1.9 on average.
    missing_skewness: float = 4.0
    # Largest quantile at which Hall's correction is evaluated. It grows with the fourth power of
    # the quantile, so that a 99.9 % interval of 8 samples would be ten times too wide.
    largest_quantile: float = 3.0
    # Quadratic forms of random signs may take two values only. If few samples show two values,
    # there may be a third: for a block of four ones 0, 4 and 16, which has probability 1/8, and is
    # missing in 0.875^23 < 0.05 of the cases. So the interval allows for a value at three times the
    # distance of the two, with weight 1/N. With 6 to 20 samples of blocks of four to eight ones,
    # 0.870 to 0.99 of the intervals contain the exact value without this, and 0.945 to 1 with it.
    few: int = 24
    unseen: float = 3.0
    # Samples that differ by less than this fraction of their range are equal but for roundoff.
    equal: float = 1e-6


TUNING = Tuning()


class NotConvergedError(RuntimeError):
    """The tolerance was not reached. The message states the error and what to change."""


class AsymmetryError(ValueError):
    """Products are not those of a symmetric matrix, because of a mistake or of roundoff."""


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a computation ended.

    =============  ==========================================================================
    outcome        meaning
    =============  ==========================================================================
    ``completed``  All steps were done. No tolerance was set.
    ``converged``  The tolerance was reached.
    ``breakdown``  The Krylov space became invariant, so the result is exact to roundoff.
    ``max_steps``  The tolerance was not reached within the allowed steps or products.
    ``uncertain``  The error is not known and may be of any size.
    =============  ==========================================================================

    Attributes:
        outcome: One of the table.
        message: One sentence that says what happened.
        advice: What to change. Empty if nothing is wrong.
    """

    outcome: Outcome
    message: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is known and, if a tolerance was set, below it."""
        return self.outcome not in ("max_steps", "uncertain")

    def raise_if_failed(self) -> None:
        """Raise :class:`NotConvergedError` unless :attr:`ok`."""
        if not self.ok:
            raise NotConvergedError(str(self))

    def __str__(self) -> str:
        return f"{self.outcome}: {self.message}" + (f" ({self.advice})" if self.advice else "")


class HasStatus:
    """Base class of results with a status."""

    __slots__ = ()
    status: Status

    def raise_if_failed(self) -> None:
        """Raise :class:`NotConvergedError` unless the tolerance was reached."""
        self.status.raise_if_failed()


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(HasStatus):
    """Estimate of a number or of an array, with error bars.

    Attributes:
        mean: The estimate, of any shape ``s``. A float64 tensor on the CPU, except for a tensor
            as large as the operator, which has its dtype and device.
        stderr: One standard error of the mean, shape ``s``. Zero if nothing was sampled.
        truncation: Bound or estimate of the error that more samples do not reduce, shape ``s``:
            truncated series, residuals and roundoff together. Infinite if it is unknown.
        degrees: Degrees of freedom of ``stderr``, usually the number of samples minus one. Zero if
            nothing was sampled.
        samples: The samples that were averaged, ``(num_samples, *s)``. ``None`` if nothing was
            sampled, or if storing the samples would take too much memory.
        num_products: Number of matrix-vector products that were used.
        method: The method, and why it was chosen if the choice was automatic.
        status: Whether the tolerance was reached.
        seed: Seed of the generator. ``None`` if no random numbers were drawn.
    """

    mean: Tensor
    stderr: Tensor
    truncation: Tensor
    degrees: int = 0
    samples: Tensor | None = None
    num_products: int
    method: str
    status: Status
    seed: int | None = None

    @classmethod
    def exact(
        cls,
        value: float | Tensor,
        *,
        method: str,
        truncation: float | Tensor = 0.0,
        num_products: int = 0,
        status: Status | None = None,
        seed: int | None = None,
    ) -> "Estimate":
        """Return an estimate without sampling error. A float becomes a float64 tensor."""
        mean = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        error = torch.as_tensor(truncation, dtype=mean.dtype).expand(mean.shape)
        return cls(
            mean=mean,
            stderr=torch.zeros_like(mean),
            truncation=error,
            num_products=num_products,
            method=method,
            status=status or _completed(error, "no sampling"),
            seed=seed,
        )

    @classmethod
    def of(
        cls,
        samples: Tensor,
        *,
        method: str,
        num_products: int,
        truncation: float | Tensor = 0.0,
        status: Status | None = None,
        seed: int | None = None,
    ) -> "Estimate":
        """Return the mean of samples ``(num_samples, *s)`` with its standard error."""
        mean = samples.mean(0)
        error = torch.as_tensor(truncation, dtype=mean.dtype).expand(mean.shape)
        return cls(
            mean=mean,
            stderr=stderr(samples),
            truncation=error,
            degrees=len(samples) - 1,
            samples=samples,
            num_products=num_products,
            method=method,
            status=status or _completed(error, f"{len(samples)} probes"),
            seed=seed,
        )

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate times a number, with its errors and samples."""
        # Errors are never negative, so they scale with |factor|.
        return replace(
            self,
            mean=self.mean * factor,
            stderr=self.stderr * abs(factor),
            truncation=self.truncation * abs(factor),
            samples=None if self.samples is None else self.samples * factor,
        )

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        r"""Return the ends of an interval that contains the exact value with probability ``level``.

        .. math:: \text{mean} \pm (t_\nu\, \text{stderr} + \text{truncation})

        with the quantile :math:`t_\nu` of Student's distribution for ``degrees`` degrees of
        freedom, multiplied by a factor above 1 if the samples are skewed. The truncation is added
        in full, because it does not average out.

        Args:
            level: Probability, between 0 and 1.
        """
        half = self.error(level)
        return self.mean - half, self.mean + half

    def error(self, level: float = 0.95) -> Tensor:
        """Return half the width of :meth:`interval`, shape ``s``."""
        check_range("level", level, low=0.0, high=1.0)
        if not bool(self.stderr.any()):  # nothing was sampled, or nothing varies
            return self.stderr + self.truncation
        # Without degrees of freedom, use the quantile of the normal distribution.
        quantile = float(stdtrit(self.degrees or math.inf, 0.5 + level / 2))
        factor = quantile * self._skewed(quantile) + self._unseen()
        # At level 1 the factor is infinite, but an entry that does not vary is still exact.
        return torch.where(self.stderr == 0, 0.0, factor * self.stderr) + self.truncation

    def _skewed(self, quantile: float) -> Tensor:
        """Return the factor by which skewness of the samples widens an interval, shape ``s``."""
        if self.samples is None:
            return torch.ones_like(self.stderr)
        off = self.samples - self.samples.mean(0)
        off = off / off.abs().amax(0)  # of order one, so that the powers stay in range
        count = len(off)
        less = max(1, count - 2)
        skewness = (off.pow(3).mean(0) / off.square().mean(0) ** 1.5).nan_to_num(nan=0.0)
        skewness = skewness.abs() * (math.sqrt(count * (count - 1)) / less)
        # Few samples rarely include the tail of their distribution. Then the mean, its standard
        # error and the skewness are all too small. So raise the skewness by one standard error,
        # that of normal samples.
        doubt = math.sqrt(6 * count * (count - 1) / (less * (count + 1) * (count + 3)))
        likely = skewness * (1 + TUNING.missing_skewness / count) + doubt
        # Hall (1992), Section 3.5: Student's interval of N samples with skewness g is too short by
        # the fraction g^2 (z^4 + 2 z^2 - 3) / (18 N), if this is small.
        z = min(quantile, TUNING.largest_quantile)
        # At low levels, where it is too long for many samples, few samples could make it negative.
        short = likely.square() * (max(0.0, z**4 + 2 * z**2 - 3) / (18 * count))
        return torch.where(short < 1, 1 + short, 2 * short.sqrt().sqrt())

    def _unseen(self) -> Tensor:
        """Return the error by a third value, over the standard error, of samples of two values."""
        none = torch.zeros_like(self.stderr)
        if self.samples is None or not 2 < len(self.samples) < TUNING.few:
            return none
        low, high = self.samples.amin(0), self.samples.amax(0)
        spread = stderr(self.samples)
        near = TUNING.equal * (high - low)
        alike = (self.samples - low <= near) | (high - self.samples <= near)
        weight = TUNING.unseen / len(self.samples)
        return torch.where(alike.all(0) & (spread > 0), weight * (high - low) / spread, none)

    def with_status(self, rtol: float | None, advice: str = "") -> "Estimate":
        """Return the estimate with its status: whether its errors are within a tolerance.

        Args:
            rtol: Largest half width of the 95 % interval, relative to the mean. For arrays, both
                are Euclidean norms.
            advice: What to change if the truncation is too large.
        """
        size, error = euclidean_norm(self.mean), euclidean_norm(self.error())
        if not math.isfinite(error):
            status = Status(
                outcome="uncertain",
                message=f"the error is unknown; stderr {float(self.stderr.max()):.2g}",
                advice=advice,
            )
        elif rtol is None:
            return self
        elif is_below(error, rtol * size):
            status = Status(outcome="converged", message=f"relative error below {rtol:.2g}")
        else:
            status = Status(
                outcome="max_steps",
                message=f"relative error {error / size if size else math.inf:.2g}, above rtol "
                f"{rtol:.2g}",
                advice=self._advice(rtol * size, advice),
            )
        return replace(self, status=status)

    def _advice(self, goal: float, advice: str) -> str:
        fixed, error = euclidean_norm(self.truncation), euclidean_norm(self.error())
        if advice and (fixed > 0.5 * error or fixed >= goal):
            return advice
        if fixed >= goal:
            return "the truncation alone is above rtol, and more probes do not reduce it"
        # The sampling error falls as the square root of the number of probes.
        factor = ((error - fixed) / (goal - fixed)) ** 2
        return f"use about {factor:.2g} times as many probes"

    def __float__(self) -> float:
        return float(self.mean.detach())

    def __str__(self) -> str:
        # Arrays are too long to print.
        if self.mean.ndim:
            shape, error = tuple(self.mean.shape), float(self.stderr.max())
            value = f"Estimate of shape {shape}, largest stderr {error:.2g}"
        else:
            value = plain_estimate(self)
        fixed, sampled = float(self.truncation.max()), float(self.stderr.max())
        # A truncation such as roundoff, far below the standard error, is not printed.
        if not is_below(fixed, 1e-3 * sampled) and fixed > 0:
            value += f", truncation {fixed:.2g}"
        return f"{value}  [{self.method}, {self.num_products} products; {self.status}]"


def _completed(truncation: Tensor, message: str) -> Status:
    """Return the status of an estimate without a tolerance, given its truncation."""
    if bool(truncation.isfinite().all()):
        return Status(outcome="completed", message=message)
    return Status(outcome="uncertain", message=f"the error is unknown; {message}")


def stderr(samples: Tensor) -> Tensor:
    """Return the standard error of the mean over the first axis; NaN for a single sample."""
    if len(samples) < 2:  # std would warn
        return torch.full_like(samples[0], torch.nan)
    # The square of a deviation of 1e-170 underflows. Scaling by a power of two is exact.
    unit = power_of_two(samples)
    # stderr = std / sqrt(N), with the unbiased standard deviation.
    deviation: Tensor = (samples / unit).std(0)
    return deviation * (unit / math.sqrt(len(samples)))


def skewed_stderr(estimate: Estimate) -> Tensor:
    """Return the standard error, larger if the samples are skewed.

    Without samples, Student's interval of this error is as wide as that of the samples at 95 %.
    Results that are derived from an estimate and do not keep its samples use this error.
    """
    if not bool(estimate.stderr.any()):
        return estimate.stderr
    quantile = float(stdtrit(estimate.degrees or math.inf, 0.975))
    return (estimate.error(0.95) - estimate.truncation) / quantile


def plain_estimate(estimate: Estimate) -> str:
    """Return ``mean ± stderr`` of a number as text."""
    # float() of an estimate detaches it: a mean with a gradient would warn.
    return format_uncertain(float(estimate), float(estimate.stderr))


def format_uncertain(mean: float, stderr: float) -> str:
    """Return ``mean ± stderr`` with two digits of the error, and the mean to the same decimal."""
    if not (math.isfinite(mean) and math.isfinite(stderr)) or stderr == 0:
        # One sample has no standard error: it is NaN.
        error = "?" if math.isnan(stderr) else f"{stderr:.2g}"
        return f"{mean:.8g}" if stderr == 0 else f"{mean:.4g} ± {error}"
    # Two digits of the error: 0.0123 has floor(log10) = -2 and needs three decimal places.
    places = 1 - math.floor(math.log10(abs(stderr)))
    # Outside this range most digits would be zeros, so use an exponent.
    if -6 <= places <= 12 and abs(mean) < 1e9:
        digits = max(places, 0)
        return f"{mean:.{digits}f} ± {stderr:.{digits}f}"
    return f"{mean:.6g} ± {stderr:.2g}"
