"""Results that say how good they are: ``Status`` and ``Estimate``."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ritz._core.storage import storable

Outcome = Literal["completed", "converged", "breakdown", "max_steps"]


class NotConvergedError(RuntimeError):
    """A tolerance was asked for and not reached; the message says how far off and what to do."""


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a computation ended, and what to do about it.

    Attributes:
        outcome: ``completed`` (all steps done, no tolerance asked for), ``converged`` (the
            tolerance was met), ``breakdown`` (an exact invariant subspace: nothing more to
            find), ``max_steps`` (the budget ran out before the tolerance was met).
        message: What happened, in one sentence.
        advice: What to change, empty where nothing need be.
    """

    outcome: Outcome
    message: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether what was asked for was reached."""
        return self.outcome != "max_steps"

    def raise_if_failed(self) -> None:
        """Raise :class:`NotConvergedError` unless :attr:`ok`."""
        if not self.ok:
            raise NotConvergedError(str(self))

    def __str__(self) -> str:
        return f"{self.outcome}: {self.message}" + (f" ({self.advice})" if self.advice else "")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number, or an array of numbers, with its error bars.

    Attributes:
        mean: The estimate, any shape ``s``; float64 on the CPU unless it is as large as the
            operator.
        stderr: Standard error of the mean, shape ``s``; zero where nothing was sampled.
        truncation: Bound or estimate of the error that more samples would not remove, shape
            ``s``; ``None`` where there is none to speak of.
        samples: What was averaged, ``(num_samples, *s)``; ``None`` where nothing was sampled or
            keeping the samples would cost more memory than computing them.
        num_products: Products with single vectors that were spent.
        method: How it was obtained, and why where that was chosen automatically.
        status: Whether the accuracy asked for was reached.
        seed: Seed of the generator, ``None`` where nothing was drawn.
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
        """Return an estimate that was not sampled; a float becomes a float64 tensor."""
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
        """Return the estimate times a number, with its errors and samples."""
        return replace(
            self,
            mean=self.mean * factor,
            stderr=self.stderr * abs(factor),
            truncation=None if self.truncation is None else self.truncation * abs(factor),
            samples=None if self.samples is None else self.samples * factor,
        )

    def __float__(self) -> float:
        return float(self.mean.detach())

    def raise_if_failed(self) -> None:
        """Raise :class:`NotConvergedError` unless the accuracy asked for was reached."""
        self.status.raise_if_failed()

    def __str__(self) -> str:
        if self.mean.ndim:
            shape, error = tuple(self.mean.shape), float(self.stderr.max())
            value = f"Estimate of shape {shape}, largest stderr {error:.2g}"
        else:
            value = format_uncertain(float(self), float(self.stderr))
        if self.truncation is not None:
            value += f", truncation {float(self.truncation.max()):.2g}"
        return f"{value}  [{self.method}, {self.num_products} products; {self.status}]"


def stderr(samples: Tensor) -> Tensor:
    """Standard error of the mean over the first axis, NaN for a single sample."""
    if len(samples) < 2:
        return torch.full_like(samples[0], torch.nan)
    deviation: Tensor = samples.std(0)
    return deviation / math.sqrt(len(samples))


def plain_estimate(estimate: Estimate) -> str:
    """``mean ± stderr`` of a number, and nothing else."""
    return format_uncertain(float(estimate.mean), float(estimate.stderr))


def format_uncertain(mean: float, stderr: float) -> str:
    """``mean ± stderr`` with two digits of the error and the mean to the same place."""
    if not (math.isfinite(mean) and math.isfinite(stderr)) or stderr == 0:
        return f"{mean:.8g}" if stderr == 0 else f"{mean:.4g} ± {stderr:.2g}"
    places = 1 - math.floor(math.log10(abs(stderr)))
    if -6 <= places <= 12 and abs(mean) < 1e9:
        digits = max(places, 0)
        return f"{mean:.{digits}f} ± {stderr:.{digits}f}"
    return f"{mean:.6g} ± {stderr:.2g}"
