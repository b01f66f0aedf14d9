"""Errors of a function of several estimates, to first order."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from ritz._core.results import Estimate, Status


def propagate(
    function: Callable[..., Tensor],
    *parts: Estimate,
    method: str,
    truncation: float | Tensor = 0.0,
    status: Status | None = None,
) -> Estimate:
    r"""Return a function of independent estimates, with its errors to first order.

    .. math:: \text{stderr}^2 = \sum_i \Big(\frac{\partial f}{\partial x_i} \text{stderr}_i\Big)^2,
        \quad \text{truncation} = \sum_i \Big|\frac{\partial f}{\partial x_i}\Big|
        \text{truncation}_i

    The degrees of freedom are those of Welch and Satterthwaite, the smallest of all entries. An
    entry of the function may depend on any entries of an array, whose errors count as independent.

    Args:
        function: Takes the means in float64 and returns a tensor of any shape ``s``.
        *parts: The estimates.
        method: What the function is.
        truncation: Further error that is not sampled, of shape ``s``.
        status: Status of the result.
    """
    means = tuple(part.mean.detach().double() for part in parts)
    value = function(*means).detach()
    slopes = jacobian(function, means)
    # Shapes s + shape of the part: reduced to s and one axis for the entries of the part.
    flat = [slope.reshape(*value.shape, -1) for slope in slopes]
    variances = [_times(slope, part.stderr).square() for slope, part in zip(flat, parts)]
    fixed = [_times(slope, part.truncation).abs().sum(-1) for slope, part in zip(flat, parts)]
    total = torch.stack([variance.sum(-1) for variance in variances]).sum(0)
    return Estimate(
        mean=value,
        stderr=total.sqrt(),
        truncation=torch.stack(fixed).sum(0) + torch.as_tensor(truncation),
        degrees=_degrees(total, variances, [part.degrees for part in parts]),
        num_products=0,
        method=method,
        status=status or Status(outcome="completed", message="from other estimates"),
        seed=next((part.seed for part in parts if part.seed is not None), None),
    )


def _times(slope: Tensor, error: Tensor) -> Tensor:
    # An infinite error that a result does not depend on must not make it NaN.
    product = slope * error.reshape(-1).double()
    return torch.where(slope == 0, torch.zeros_like(product), product)


def _degrees(total: Tensor, variances: list[Tensor], degrees: list[int]) -> int:
    # nu = (sum v_i)^2 / sum (v_i^2 / nu_i); an error without degrees of freedom is known exactly.
    shares = [
        variance.square().sum(-1) / known
        for variance, known in zip(variances, degrees, strict=True)
        if known
    ]
    if not shares:
        return 0
    least = (total.square() / torch.stack(shares).sum(0)).nan_to_num(nan=math.inf)
    smallest = float(least.min()) if least.numel() else math.inf
    # Nothing was sampled if every variance is zero.
    return max(1, math.floor(smallest + 1e-9)) if math.isfinite(smallest) else 0
