"""``critical_sharpness``: curvature along an update, from the largest step that lowers the loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz._core.checks import check_range, is_below
from ritz._core.results import Estimate, Status
from ritz.curvature import Risk
from ritz.curvature._shared import check_risk
from ritz.measures._landscape import check_direction


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the search for the critical step."""

    # Length of the first step, relative to the norm of the weights. Most networks of the study
    # `learning_rates` needed one to six doublings or halvings of this step.
    first: float = 1e-2
    # Maximum number of doublings or halvings. A factor of 2^40 exceeds the range of steps that
    # float32 resolves.
    max_doublings: int = 40
    # Differences of losses below this multiple of their roundoff count as zero.
    roundoff: float = 4.0


TUNING = Tuning()


def critical_sharpness(
    risk: Risk,
    direction: Tensor | None = None,
    *,
    rtol: float = 0.05,
) -> Estimate:
    r"""Return the critical sharpness along an update, from losses alone.

    .. math:: \lambda_c = \frac{2}{\eta_c}, \quad
        \eta_c = \min \{\eta > 0 : L(\theta - \eta u) > L(\theta)\}

    The loss falls for learning rates below :math:`\eta_c` and rises above it. On a quadratic with
    :math:`u = g`, the critical sharpness is the curvature along the gradient,
    :math:`g^\top H g / \|g\|^2`. The learning rate is doubled or halved until one lowers the loss
    and another raises it, and then bisected. A range in which the loss rises may be missed if it is
    narrower than a factor of two.

    Cost: about ten forward passes over the data, and one gradient if ``direction`` is not given.

    Args:
        risk: The loss at a point.
        direction: The update :math:`u`, ``(P,)``, which is subtracted from the weights: the step of
            an optimiser divided by its learning rate. Defaults to the gradient.
        rtol: Relative half width of the interval that encloses :math:`\lambda_c`.

    Returns:
        An :class:`Estimate` whose truncation is half the width of the last interval. The status is
        ``max_steps`` if roundoff of the loss does not allow an interval within ``rtol``, and
        ``uncertain`` if the loss does not fall along :math:`-u` (the mean is NaN), or falls at
        every learning rate tried (the mean is 0).

    Reference: *A scalable measure of loss landscape curvature for analyzing the training dynamics
    of LLMs* (2025).
    """
    check_risk(risk)
    check_range("rtol", rtol, low=1e-6, high=0.5)
    update = risk.gradient() if direction is None else direction
    check_direction("direction", update, risk)
    start, passes = risk.loss(), 1
    unit = TUNING.roundoff * torch.finfo(risk.theta.dtype).eps * abs(start)

    def change(rate: float) -> float:
        """Return the change of the loss; zero if it is not larger than roundoff."""
        nonlocal passes
        passes += 1
        try:
            gap = risk.at(risk.theta - rate * update).loss() - start
        except ValueError:  # the loss is not finite
            return math.inf
        return 0.0 if is_below(abs(gap), unit) else gap

    # On a quadratic, L(w - eta u) - L(w) = -eta u'g + eta^2 u'Hu / 2 is positive for
    # eta > 2 u'g / u'Hu.
    length = float(update.double().norm())
    rate = TUNING.first * max(1.0, float(risk.theta.double().norm())) / length
    low, high = _bracket(change, rate)
    if not (low and math.isfinite(high)):
        return _no_sharpness(low, high, passes)
    while not is_below(high - low, 2 * rtol * low):
        middle = 0.5 * (low + high)
        gap = change(middle)
        if gap == 0:  # the loss does not change beyond roundoff
            break
        low, high = (low, middle) if gap > 0 else (middle, high)
    # 2 / eta lies between 2 / high and 2 / low. Return their mean and half their distance.
    value, half = 1 / low + 1 / high, 1 / low - 1 / high
    converged = is_below(half, rtol * value)
    level = f"the loss does not change beyond roundoff from {low:.3g} to {high:.3g}"
    status = Status(
        outcome="converged" if converged else "max_steps",
        message=f"the loss rises at a learning rate of {high:.3g}" if converged else level,
        advice="" if converged else "use precision='float64', or a larger rtol",
    )
    return Estimate.exact(value, truncation=half, method=f"{passes} forward passes", status=status)


def _bracket(change: Callable[[float], float], rate: float) -> tuple[float, float]:
    """Return a learning rate that lowers the loss (or 0) and one that raises it (or infinity).

    If the loss does not change beyond roundoff, the learning rate is doubled.
    """
    low, high = 0.0, math.inf
    for _ in range(TUNING.max_doublings):
        gap = change(rate)
        if gap > 0:
            high, rate = rate, rate / 2
        else:
            low, rate = (rate if gap < 0 else low), rate * 2
        if low and math.isfinite(high):
            break
    return low, high


def _no_sharpness(low: float, high: float, passes: int) -> Estimate:
    falls = low > 0
    message = (
        f"the loss falls up to a learning rate of {low:.2g}" if falls else "the loss does not fall"
    )
    status = Status(
        outcome="uncertain",
        message=message,
        advice="there is no critical learning rate"
        if falls
        else "direction must be an ascent direction; near a minimum use precision='float64'",
    )
    return Estimate.exact(
        0.0 if falls else math.nan,
        truncation=math.inf,
        method=f"{passes} forward passes",
        status=status,
    )
