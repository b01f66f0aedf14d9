"""The numbers of ``advise`` and their errors: edges, exponents, damping, short trainings."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.progress import Progress
from ritz._core.propagation import propagate
from ritz._core.results import Estimate, Status
from ritz.curvature import Risk
from ritz.measures._batch_prediction import BatchPrediction
from ritz.measures._damping import curvature_ratio, least_damping
from ritz.measures._groups import share_of_variance
from ritz.measures._learning_rates import (
    ADAPTIVE,
    MakeOptimizer,
    OptimizerName,
    additive_change,
    additive_exponent,
    multiplicative_change,
    multiplicative_exponent,
    noise_weight,
    stable_rate,
    trainable_rate,
)

# The recommended learning rate is the edge for a batch whose largest eigenvalue is this many
# standard deviations above the mean. 2.3 % of the batches exceed it if the eigenvalue is normal.
SIGMAS = 2.0


def unknown(shape: tuple[int, ...], reason: str) -> Estimate:
    """Return NaN as an estimate whose status gives the reason."""
    status = Status(outcome="uncertain", message=reason)
    nan = torch.full(shape, math.nan, dtype=torch.float64)
    return Estimate.exact(nan, method="not known", truncation=math.inf, status=status)


@final
class AdviceNumbers:
    """Learning rates, exponents and damping of one optimiser, from the predicted curvature.

    Args:
        prediction: The predicted curvature.
        outliers: Known positive eigenvalues of the matrix of all data, ``(k,)``.
        optimizer: Name of the optimiser.
        momentum: Momentum of the optimiser.
        known: Batch size and learning rate of an earlier training.
    """

    def __init__(
        self,
        prediction: BatchPrediction,
        outliers: Tensor,
        *,
        optimizer: OptimizerName,
        momentum: float,
        known: tuple[int, float] | None,
    ) -> None:
        self.prediction, self.outliers = prediction, outliers
        self.optimizer, self.known = optimizer, known
        self.num_samples, self.num_parameters = prediction.num_samples, prediction.num_parameters
        self.sizes = torch.tensor(prediction.batch_sizes, dtype=torch.float64)
        self.stable = partial(stable_rate, optimizer=optimizer, momentum=momentum)
        self.weight = noise_weight(optimizer, momentum)
        self.share = share_of_variance(self.sizes, self.num_samples)

    def shift_by_noise(self, top: Estimate, along: Estimate) -> Estimate:
        """Return the largest eigenvalues of batches, shifted by the noise along the eigenvector."""
        # lambda' = lambda + V(phi) / (b lambda), assuming that the mean of the bulk is nearly 0
        return propagate(
            lambda value, noise: value + noise * self.share / value,
            top,
            along,
            method="lambda + V(phi) / (b lambda), preconditioned",
        )

    def edges(self, preconditioned: tuple[Estimate, Estimate] | None) -> tuple[Estimate, Estimate]:
        """Return the edge of local stability and the recommended learning rate.

        Args:
            preconditioned: Largest eigenvalue of the preconditioned matrix, and the variance along
                its eigenvector. ``None`` if the divisors of the optimiser are not known.
        """
        if self.optimizer == "adam" and preconditioned is None:
            reason = "the divisors of Adam are not known: pass its optimiser as state="
            return unknown(tuple(self.sizes.shape), reason), self._root_rule()
        value, spread, full = self._effective_curvature(preconditioned)
        # If the spread is not known, recommend the edge itself.
        known = spread.mean.isfinite()
        names = ("mean", "stderr", "truncation")
        parts: Any = {name: torch.where(known, getattr(spread, name), 0.0) for name in names}
        spread = replace(spread, **parts)
        # c / (lambda'_1 + 2 sd) instead of the edge c / lambda'_1 of the mean
        rate = propagate(
            lambda value, deviation, full: (
                self._edge(value, full) * value / (value + SIGMAS * deviation)
            ),
            value,
            spread,
            full,
            method=f"edge at the mean + {SIGMAS:g} standard deviations between batches",
        )
        return propagate(self._edge, value, full, method="edge of local stability"), rate

    def _edge(self, value: Tensor, full: Tensor) -> Tensor:
        return self.stable(value, full=full)

    def _effective_curvature(
        self, preconditioned: tuple[Estimate, Estimate] | None
    ) -> tuple[Estimate, Estimate, Estimate]:
        """Return the curvature of batches that the optimiser steps on, its spread, and that of all.

        This is the preconditioned curvature for Adam and K-FAC.
        """
        best, top = self.prediction.best, self.prediction.lambda_max
        if preconditioned is not None:
            value = self.shift_by_noise(*preconditioned)
            # Assume that the preconditioned curvature has the same relative spread.
            scaled = partial(propagate, lambda s, v, new: s / v * new)
            spread = scaled(best.spread, best.value, value, method="same relative spread")
            return value, spread, preconditioned[0]
        if self.optimizer == "kfac":  # K-FAC preconditions with the curvature of all data
            value = propagate(torch.div, best.value, top, method="lambda'_1(B) / lambda_1")
            spread = propagate(torch.div, best.spread, top, method="spread / lambda_1")
            return value, spread, Estimate.exact(1.0, method="lambda_1 / lambda_1")
        return best.value, best.spread, top

    def _root_rule(self) -> Estimate:
        # alpha(B) = alpha(B_0) (B / B_0)^(1/2)
        size, rate = self.known or (int(self.sizes[0]), 1.0)
        how = f"square-root rule from {rate:g} at {size}" if self.known else "relative to the first"
        return Estimate.exact(rate * (self.sizes / size).sqrt(), method=how)

    def fields(self) -> dict[str, Estimate]:
        """Return the numbers that depend neither on divisors nor on trials, by name."""
        damping, papers = self.dampings()
        return self.exponents() | {
            "changes_at": self.changes(),
            "damping": damping,
            "damping_papers": papers,
            "ratio": self.ratio(damping),
        }

    def exponents(self) -> dict[str, Estimate]:
        """Return the exponent of the predicted edge, and those of the papers' two models."""
        p = self.prediction
        additive = propagate(
            partial(
                additive_exponent,
                batch_sizes=self.sizes,
                num_samples=self.num_samples,
                homogeneous=True,
            ),
            p.lambda_max,
            p.variance,
            method="homogeneous noise",
        )
        multiplicative = unknown(tuple(self.sizes.shape), "the mean of the bulk is not positive")
        # theta = lambda / s - 1 needs 0 < s < lambda.
        if is_below(0.0, p.bulk.mean) and is_below(p.bulk.mean, p.lambda_max.mean):
            multiplicative = propagate(
                partial(
                    multiplicative_exponent,
                    batch_sizes=self.sizes,
                    num_parameters=self.num_parameters,
                ),
                p.lambda_max,
                p.bulk,
                method="multiplicative model",
            )
        return {
            "exponent": self.exponent(),
            "exponent_additive": additive,
            "exponent_multiplicative": multiplicative,
        }

    def exponent(self) -> Estimate:
        """Return the exponent with which the edge grows from each batch size to the next.

        For the largest size, return the local exponent of the directional model. Elsewhere this
        model is not used: it is of second order and overestimates the noise of small batches.
        """
        p, n = self.prediction, self.num_samples
        # A difference over this step gives the local exponent to 1e-10. It must end at N samples.
        step = 1e-5
        high = min(step, math.log(n / float(self.sizes[-1])))
        near = self.sizes[-1] * torch.tensor([high - 2 * step, high], dtype=torch.float64).exp()

        def slope(values: Tensor, sizes: Tensor, top: Tensor) -> Tensor:
            known = torch.where(values > 0, values, math.nan)
            return self._edge(known, top).log().diff() / sizes.log().diff()

        def slopes(values: Tensor, top: Tensor, along: Tensor) -> Tensor:
            local = top + along * share_of_variance(near, n) / top
            return torch.cat([slope(values, self.sizes, top), slope(local, near, top)])

        parts = (p.best.value, p.lambda_max, p.along)
        return propagate(slopes, *parts, method="predicted edges of this and the next batch size")

    def changes(self) -> Estimate:
        """Return the batch sizes at which the scaling rule changes, in each of three models."""
        p = self.prediction
        at = partial(additive_change, num_samples=self.num_samples)

        # Additive noise: x(B) = V / (b lambda^2) = 1. Multiplicative noise: B = P / theta.
        def three(value: Tensor, along: Tensor, variance: Tensor, bulk: Tensor) -> Tensor:
            third = multiplicative_change(value, bulk, num_parameters=self.num_parameters)
            nan = torch.full_like(third, math.nan)
            third = torch.where((bulk > 0) & (bulk < value), third, nan)
            # Momentum gives the noise the weight w. It then halves the edge where w x = 1.
            return torch.stack([at(value, self.weight * along), at(value, variance), third])

        parts = (p.lambda_max, p.along, p.variance, p.bulk)
        return propagate(three, *parts, method="directional, additive, multiplicative")

    def dampings(self) -> tuple[Estimate, Estimate]:
        """Return the least damping per unit of learning rate, from ritz and from the papers."""
        p = self.prediction

        # delta / alpha = 1/2 lambda min(1, V / (b lambda^2)) = 1/2 min(lambda, V / (b lambda))
        def leading(value: Tensor, along: Tensor) -> Tensor:
            return 0.5 * torch.minimum(value.expand(len(self.share)), along * self.share / value)

        # The papers use v = P sigma^2 / b for every outlier, and the largest result.
        def papers(variance: Tensor) -> Tensor:
            # Error bars of the variance may extend below zero.
            noise = variance.clamp(min=0.0)
            parts = [least_damping(self.outliers, variance=noise * x) for x in self.share]
            return torch.stack(parts)

        if not len(self.outliers):
            missing = unknown(tuple(self.sizes.shape), "no eigenvalue is positive")
            return missing, missing
        if self.optimizer in ADAPTIVE:
            # With a divisor of about delta, both are heavy-ball momentum with the learning rate
            # alpha / delta.
            least = propagate(
                lambda value, full: self._edge(value, full).reciprocal(),
                p.best.value,
                p.lambda_max,
                method="1 / edge of heavy-ball momentum",
            )
        else:
            how = "noise along the leading eigenvector"
            least = propagate(leading, p.lambda_max, p.along, method=how)
        return least, propagate(papers, p.variance, method="homogeneous noise along all outliers")

    def ratio(self, damping: Estimate) -> Estimate:
        """Return the ratio of learning rates along flat and sharp directions."""
        if self.optimizer not in ADAPTIVE:
            return Estimate.exact(torch.ones_like(self.sizes), method="1 without a preconditioner")
        # R = (lambda_1 + delta) / delta, with flat directions of eigenvalue 0
        rate = self.known[1] if self.known else 1.0
        return propagate(
            lambda top, delta: curvature_ratio(top, rate * delta.clamp(min=0.0)),
            self.prediction.lambda_max,
            damping,
            method="(lambda_1 + delta) / delta",
        )


def trainable_rates(
    risk: Risk,
    make: MakeOptimizer,
    sizes: Sequence[int],
    edge: Estimate,
    rate: Estimate,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Estimate:
    """Return :func:`trainable_rate` for all batch sizes, as one estimate ``(S,)``."""
    # Start at the edge, which is within a small factor of the result.
    starts = torch.where(torch.isfinite(edge.mean), edge.mean, rate.mean).tolist()
    limits = [
        trainable_rate(
            risk, make, batch_size=size, start=start, generator=generator, progress=progress
        )
        for size, start in zip(sizes, starts, strict=True)
    ]
    first = limits[0]
    columns: Any = {
        name: torch.stack([getattr(limit, name) for limit in limits])
        for name in ("mean", "stderr", "truncation")
    }
    samples = torch.stack([limit.samples for limit in limits if limit.samples is not None], 1)
    worst = next((limit.status for limit in limits if not limit.status.ok), first.status)
    return replace(first, samples=samples, status=worst, **columns)
