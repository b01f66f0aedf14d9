"""The figures of an advice, each with its error: edges, exponents, damping and ratios."""

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
from ritz.measures._batches import BatchPrediction
from ritz.measures._stability import (
    ADAPTIVE,
    OptimizerName,
    additive_change,
    additive_exponent,
    curvature_ratio,
    least_damping,
    multiplicative_change,
    multiplicative_exponent,
    noise_weight,
    share_of_variance,
    stable_rate,
)
from ritz.measures._trials import MakeOptimizer, trainable_rate

# Standard deviations between batches that the recommended learning rate leaves room for: 2.3 % of
# batches are beyond, if their largest eigenvalue is normal.
SIGMAS = 2.0


def unknown(shape: tuple[int, ...], reason: str) -> Estimate:
    """Return an estimate that is not known, with the reason."""
    status = Status(outcome="uncertain", message=reason)
    nan = torch.full(shape, math.nan, dtype=torch.float64)
    return Estimate.exact(nan, method="not known", truncation=math.inf, status=status)


@final
class Figures:
    """What follows from the predicted curvature of batches, for one optimiser.

    Args:
        prediction: The predicted curvature.
        outliers: Positive eigenvalues of the matrix of all data that are known, ``(k,)``.
        optimizer: Name of the optimiser.
        momentum: Its momentum.
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

    def shifted(self, top: Estimate, along: Estimate) -> Estimate:
        """Return the largest eigenvalues of batches by noise along the leading eigenvector."""
        # lambda' = lambda + V(phi) / (b lambda), where the mean of the bulk is nearly 0
        return propagate(
            lambda value, noise: value + noise * self.share / value,
            top,
            along,
            method="lambda + V(phi) / (b lambda), preconditioned",
        )

    def edges(self, preconditioned: tuple[Estimate, Estimate] | None) -> tuple[Estimate, Estimate]:
        """Return the edge of local stability and the recommended learning rate.

        Args:
            preconditioned: Largest eigenvalue of the preconditioned matrix and the variance along
                it, for an adaptive method whose divisors are known.
        """
        if self.optimizer == "adam" and preconditioned is None:
            reason = "the divisors of Adam are not known: pass its optimiser as state="
            return unknown(tuple(self.sizes.shape), reason), self._root_rule()
        value, spread, full = self._seen(preconditioned)
        # Models without a spread recommend the edge itself.
        known = spread.mean.isfinite()
        zero = torch.zeros_like(spread.mean)
        spread = replace(
            spread,
            mean=torch.where(known, spread.mean, zero),
            stderr=torch.where(known, spread.stderr, zero),
            truncation=torch.where(known, spread.truncation, zero),
        )
        # c / (lambda'_1 + 2 sd) in place of c / lambda'_1, the edge at the mean batch
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

    def _seen(
        self, preconditioned: tuple[Estimate, Estimate] | None
    ) -> tuple[Estimate, Estimate, Estimate]:
        """Return the curvature that the optimiser sees in a batch, its spread, that of all data."""
        best, top = self.prediction.best, self.prediction.lambda_max
        if preconditioned is not None:
            value = self.shifted(*preconditioned)
            # The preconditioned curvature varies between batches by the same fraction.
            scaled = partial(propagate, lambda s, v, new: s / v * new)
            spread = scaled(best.spread, best.value, value, method="same relative spread")
            return value, spread, preconditioned[0]
        if self.optimizer == "kfac":  # divides by the curvature of all data
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
        """Return the figures that do not depend on divisors or trials, by their names."""
        exponent, additive, multiplicative = self.exponents()
        damping, papers = self.dampings()
        return {
            "exponent": exponent,
            "exponent_additive": additive,
            "exponent_multiplicative": multiplicative,
            "changes_at": self.changes(),
            "damping": damping,
            "damping_papers": papers,
            "ratio": self.ratio(damping),
        }

    def exponents(self) -> tuple[Estimate, Estimate, Estimate]:
        """Return the exponents of the scaling rule, predicted and by the papers' models."""
        p = self.prediction
        common: Any = {"batch_sizes": self.sizes, "num_samples": self.num_samples}
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
        return (
            self.exponent(),
            propagate(
                partial(additive_exponent, **common, homogeneous=True),
                p.lambda_max,
                p.variance,
                method="homogeneous noise",
            ),
            multiplicative,
        )

    def exponent(self) -> Estimate:
        """Return by which power of the batch size the edge grows to the next size.

        Beyond the largest size it is the local one, by noise along the leading eigenvector. That
        model is of second order, and for small batches it takes the noise for stronger than it is.
        """
        p, n = self.prediction, self.num_samples
        # Central differences give the local exponent to 1e-10. Beyond N there is no edge.
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
        """Return the batch sizes at which the scaling rule changes, of three models."""
        p = self.prediction
        at = partial(additive_change, num_samples=self.num_samples)

        # x(B) = V / (b lambda^2) = 1 under additive noise; B = P / theta under sampling
        def both(value: Tensor, along: Tensor, variance: Tensor, bulk: Tensor) -> Tensor:
            third = multiplicative_change(value, bulk, num_parameters=self.num_parameters)
            nan = torch.full_like(third, math.nan)
            third = torch.where((bulk > 0) & (bulk < value), third, nan)
            # Momentum makes noise count more: the edge has fallen by half where w x = 1.
            return torch.stack([at(value, self.weight * along), at(value, variance), third])

        parts = (p.lambda_max, p.along, p.variance, p.bulk)
        return propagate(both, *parts, method="directional, additive, multiplicative")

    def dampings(self) -> tuple[Estimate, Estimate]:
        """Return the least damping per unit of learning rate, and that of the papers."""
        p = self.prediction

        # delta / alpha = 1/2 lambda min(1, V / (b lambda^2)) = 1/2 min(lambda, V / (b lambda))
        def leading(value: Tensor, along: Tensor) -> Tensor:
            return 0.5 * torch.minimum(value.expand(len(self.share)), along * self.share / value)

        # The same with v = P sigma^2 / b for every outlier, of which the worst counts
        def papers(variance: Tensor) -> Tensor:
            # An error bar may reach below zero.
            noise = variance.clamp(min=0.0)
            parts = [least_damping(self.outliers, variance=noise * x) for x in self.share]
            return torch.stack(parts)

        if not len(self.outliers):
            missing = unknown(tuple(self.sizes.shape), "no eigenvalue is positive")
            return missing, missing
        if self.optimizer in ADAPTIVE:
            # With a divisor of about delta, they are heavy ball with the rate alpha / delta.
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


def trials(
    risk: Risk,
    make: MakeOptimizer,
    sizes: Sequence[int],
    edge: Estimate,
    rate: Estimate,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Estimate:
    """Return what short trainings stand, for all batch sizes."""
    # Bisection starts at the edge, from which trials are a factor of a few away.
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
