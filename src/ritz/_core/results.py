"""Estimates with error bars, and the status of a computation."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ritz._core.storage import storable

Outcome = Literal["completed", "converged", "breakdown", "max_steps"]


class NotConvergedError(RuntimeError):
    """A tolerance was not reached. The message says how large the error is and what to change."""


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a computation ended.

    Attributes:
        outcome: ``completed`` (all steps were done; no tolerance was set), ``converged`` (the
            tolerance was reached), ``breakdown`` (an exact invariant subspace was found, so more
            steps would add nothing) or ``max_steps`` (the tolerance was not reached).
        message: One sentence that says what happened.
        advice: What to change. Empty if nothing is wrong.
    """

    outcome: Outcome
    message: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether the tolerance, if any, was reached."""
        # A breakdown is exact: the Krylov space is invariant and contains the answer.
        return self.outcome != "max_steps"

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
        stderr: Standard error of the mean, shape ``s``. Zero if nothing was sampled.
        truncation: Bound or estimate of the error that more samples do not reduce, shape ``s``.
            ``None`` if there is no such error.
        samples: The samples that were averaged, ``(num_samples, *s)``. ``None`` if nothing was
            sampled, or if storing the samples would take too much memory.
        num_products: Number of matrix-vector products that were used.
        method: The method, and the reason if it was chosen automatically.
        status: Whether the tolerance was reached.
        seed: Seed of the generator. ``None`` if no random numbers were drawn.
    """

    mean: Tensor
    stderr: Tensor
    truncation: Tensor | None = None
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
        num_products: int = 0,
        truncation: Tensor | None = None,
        status: Status | None = None,
        seed: int | None = None,
    ) -> "Estimate":
        """Return an estimate without sampling error. A float becomes a float64 tensor."""
        mean = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        return cls(
            mean=mean,
            stderr=torch.zeros_like(mean),
            truncation=truncation,
            num_products=num_products,
            method=method,
            status=status or Status(outcome="completed", message="no sampling"),
            seed=seed,
        )

    @classmethod
    def of(
        cls,
        samples: Tensor,
        *,
        method: str,
        num_products: int,
        truncation: Tensor | None = None,
        status: Status | None = None,
        seed: int | None = None,
    ) -> "Estimate":
        """Return the mean of samples ``(num_samples, *s)`` with its standard error."""
        return cls(
            mean=samples.mean(0),
            stderr=stderr(samples),
            truncation=truncation,
            samples=samples,
            num_products=num_products,
            method=method,
            status=status or Status(outcome="completed", message=f"{len(samples)} probes"),
            seed=seed,
        )

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate, its errors and its samples times a number."""
        # Errors are lengths: they scale with |factor|.
        return replace(
            self,
            mean=self.mean * factor,
            stderr=self.stderr * abs(factor),
            truncation=None if self.truncation is None else self.truncation * abs(factor),
            samples=None if self.samples is None else self.samples * factor,
        )

    def __float__(self) -> float:
        return float(self.mean.detach())

    def __str__(self) -> str:
        # Arrays are too long to print: the largest error bounds all of them.
        if self.mean.ndim:
            shape, error = tuple(self.mean.shape), float(self.stderr.max())
            value = f"Estimate of shape {shape}, largest stderr {error:.2g}"
        else:
            value = plain_estimate(self)
        if self.truncation is not None:
            value += f", truncation {float(self.truncation.max()):.2g}"
        return f"{value}  [{self.method}, {self.num_products} products; {self.status}]"


def stderr(samples: Tensor) -> Tensor:
    """Return the standard error of the mean over the first axis; NaN for a single sample."""
    if len(samples) < 2:  # std would warn
        return torch.full_like(samples[0], torch.nan)
    # stderr = std / sqrt(N), with the unbiased standard deviation.
    deviation: Tensor = samples.std(0)
    return deviation / math.sqrt(len(samples))


def plain_estimate(estimate: Estimate) -> str:
    """Return ``mean ± stderr`` of a number as text."""
    return format_uncertain(float(estimate.mean), float(estimate.stderr))


def format_uncertain(mean: float, stderr: float) -> str:
    """Return ``mean ± stderr`` with two digits of the error and the mean to the same place."""
    if not (math.isfinite(mean) and math.isfinite(stderr)) or stderr == 0:
        return f"{mean:.8g}" if stderr == 0 else f"{mean:.4g} ± {stderr:.2g}"
    # Two digits of the error: 0.0123 has floor(log10) = -2 and needs three decimal places.
    places = 1 - math.floor(math.log10(abs(stderr)))
    # Outside this range plain digits would be mostly zeros, so use the exponent.
    if -6 <= places <= 12 and abs(mean) < 1e9:
        digits = max(places, 0)
        return f"{mean:.{digits}f} ± {stderr:.{digits}f}"
    return f"{mean:.6g} ± {stderr:.2g}"
