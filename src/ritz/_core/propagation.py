"""`propagate`: error propagation through a function of several estimates."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ritz._core.results import Estimate, Status, skewed_stderr


def propagate(
    function: Callable[..., Tensor],
    *parts: Estimate,
    method: str,
    status: Status | None = None,
) -> Estimate:
    r"""Return a function of independent estimates, with its errors.

    .. math:: \text{stderr}^2 = \sum_i \max_{\pm} |f(x \pm \text{stderr}_i e_i) - f(x)|^2, \quad
        \text{truncation} = \sum_i \max_{\pm} |f(x \pm \text{truncation}_i e_i) - f(x)|

    Differences over the size of the errors are used instead of derivatives. The result is therefore
    also valid at a kink, and if the function is not linear within the error bars. The degrees of
    freedom are those of Welch and Satterthwaite, for the entry where they are smallest. The result
    has no samples, so the standard error of a part is larger if its samples are skewed, as its
    interval is.

    Args:
        function: Takes the means in float64 and returns a tensor of any shape ``s``.
        *parts: The estimates. The errors of the entries of an array are assumed to be independent.
        method: Description of the function, for the result.
        status: Status of the result.
    """
    means = [part.mean.detach().double() for part in parts]
    value = function(*means).detach()

    def largest_change(index: int, error: Tensor) -> Tensor:
        """Return the largest change by each entry of one part, ``(entries, *s)``."""
        rows, size = [], error.double().reshape(-1)
        for entry in range(len(size)):
            step = torch.zeros_like(size)
            step[entry] = size[entry]
            moved = [
                function(*means[:index], means[index] + shift, *means[index + 1 :]) - value
                for shift in (step.view_as(means[index]), -step.view_as(means[index]))
            ]
            # NaN means that the function is not defined there, so its change has no bound.
            change = torch.stack(moved).abs()
            change = torch.where(change.isnan(), math.inf, change)
            rows.append(torch.where(size[entry] == 0, 0.0, change.amax(0)))
        return torch.stack(rows)

    sampled = [largest_change(i, skewed_stderr(part)) for i, part in enumerate(parts)]
    squares = [change.square().sum(0) for change in sampled]
    fixed = torch.stack(
        [largest_change(i, part.truncation).sum(0) for i, part in enumerate(parts)]
    ).sum(0)
    return Estimate(
        mean=value,
        stderr=torch.stack(squares).sum(0).sqrt(),
        truncation=torch.where(value.isnan(), math.inf, fixed),
        degrees=_degrees(squares, [part.degrees for part in parts]),
        num_products=0,
        method=method,
        status=status or Status(outcome="completed", message="from other estimates"),
        seed=next((part.seed for part in parts if part.seed is not None), None),
    )


def _degrees(variances: list[Tensor], degrees: list[int]) -> int:
    # nu = (sum v_i)^2 / sum (v_i^2 / nu_i)
    total = torch.stack(variances).sum(0).square()
    terms = [v.square() / known for v, known in zip(variances, degrees, strict=True) if known]
    if not terms:
        return 0
    least = (total / torch.stack(terms).sum(0)).reshape(-1)
    # Entries without sampling error give 0 / 0. They have no degrees of freedom.
    finite = least[least.isfinite()]
    return max(1, math.floor(float(finite.min()) + 1e-9)) if len(finite) else 0
