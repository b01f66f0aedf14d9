"""Base measures on an interval, against which entropy is measured."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice

PriorName = Literal["flat", "semicircle", "marchenko_pastur", "log_uniform"]
Prior = PriorName | Callable[[Tensor], Tensor]
PRIORS = ("flat", "semicircle", "marchenko_pastur", "log_uniform")


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
    if prior in ("marchenko_pastur", "log_uniform") and low <= 0:
        raise ValueError(f"prior {prior!r} needs an interval of positive numbers, got {interval}")
    edges = 0.5 * ((x - low) * (high - x)).log()
    if prior == "semicircle":
        return edges
    if prior == "marchenko_pastur":
        return edges - x.log()
    return -x.log() if prior == "log_uniform" else torch.zeros_like(x)
