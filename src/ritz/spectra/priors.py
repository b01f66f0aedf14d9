"""Base measures on an interval, against which entropy is measured, and quadratures for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_finite
from ritz.spectra.dual import Grid, in_interval

PriorName = Literal["flat", "semicircle", "marchenko_pastur", "log_uniform"]
Prior = PriorName | Callable[[Tensor], Tensor]
PRIORS = ("flat", "semicircle", "marchenko_pastur", "log_uniform")
RECIPROCAL = ("marchenko_pastur", "log_uniform")  # with a factor 1/x


@dataclass(frozen=True, slots=True)
class Rule:
    r"""A quadrature on an interval, and a base measure at its nodes.

    Attributes:
        grid: Nodes, weights and polynomials on ``[-1, 1]``.
        points: The nodes in the interval, ``(G,)``.
        log_prior: :math:`\log q_0` at them, ``(G,)``.
    """

    grid: Grid
    points: Tensor
    log_prior: Tensor

    @property
    def log_mass(self) -> Tensor:
        r"""Logarithm of the integral of :math:`q_0` over ``[-1, 1]``."""
        return (self.log_prior + self.grid.weights.log()).logsumexp(0)


def quadrature(prior: Prior, interval: tuple[float, float], size: int, degree: int) -> Rule:
    """Return a rule of that size that suits a base measure.

    Where it has a factor :math:`1/x`, nodes are spread over the logarithm, so that it does not
    matter how many orders of magnitude the interval spans.

    Args:
        prior: As for :func:`log_prior`.
        interval: ``(a, b)``.
        size: Nodes.
        degree: Of the polynomials to tabulate.
    """
    low, high = interval
    if isinstance(prior, str) and prior in RECIPROCAL and low > 0:
        grid = Grid.logarithmic(size, degree, high / low)
        # From the logarithm again: the smallest of them have no digits left in [-1, 1].
        points = low * (0.5 * math.log(high / low) * (Grid.make(size, 0).nodes + 1)).exp()
    else:
        grid = Grid.make(size, degree)
        points = in_interval(grid.nodes, interval)
    found = log_prior(prior, points, interval)
    check_finite("logarithm of the prior", found)
    return Rule(grid, points, found)


def log_prior(prior: Prior, x: Tensor, interval: tuple[float, float]) -> Tensor:
    """The logarithm of a base measure at points inside an interval, up to a constant.

    Args:
        prior: ``flat``; ``semicircle`` on the interval; ``marchenko_pastur`` with the interval's
            ends as its edges; ``log_uniform``, :math:`1/x`; or a density of one's own, positive
            inside the interval.
        x: Points, any shape.
        interval: ``(a, b)``; ``a`` must be positive for the last two named ones.
    """
    low, high = interval
    if callable(prior):
        values = prior(x)
        kept = isinstance(values, Tensor) and values.shape == x.shape
        if not (kept and bool((values > 0).all())):
            raise ValueError("prior must be positive inside the interval, and keep the shape of x")
        return values.double().log()
    check_choice("prior", prior, PRIORS)
    if prior in RECIPROCAL and low <= 0:
        raise ValueError(f"prior {prior!r} needs an interval of positive numbers, got {interval}")
    edges = 0.5 * ((x - low) * (high - x)).log()
    if prior == "semicircle":
        return edges
    if prior == "marchenko_pastur":
        return edges - x.log()
    return -x.log() if prior == "log_uniform" else torch.zeros_like(x)
