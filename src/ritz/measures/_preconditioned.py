"""Curvature preconditioned by the divisors of an adaptive optimiser such as Adam."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.random import resolve_generator
from ritz._core.results import Estimate
from ritz.curvature import CurvatureOperator, Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix
from ritz.measures._bulk_edge import check_pairs, ritz_value
from ritz.measures._groups import choose_group_size, contrasts, random_groups
from ritz.operators import FunctionOperator
from ritz.spectra import eigenpairs

# Relative residual of the eigenvector. The relative error of the eigenvalue is about its square.
RTOL = 0.01


def divisors(risk: Risk, state: Optimizer) -> Tensor:
    r"""Return the divisors :math:`D` of an adaptive optimiser, ``(P,)``.

    A step subtracts the learning rate times :math:`\hat m / D`. For Adam,
    :math:`D = \sqrt{\hat v} + \varepsilon`. With a power :math:`p` and epsilon inside,
    :math:`D = (\hat v + \varepsilon)^p`. For the form ``published``,
    :math:`D = (\sqrt v + \varepsilon)^{2p} / \sqrt{1 - \beta_2^t}`. With AMSGrad, :math:`v` is the
    largest second moment so far.

    Args:
        risk: Risk whose parameters the optimiser trains.
        state: Optimiser with running means of squared gradients, after at least one step.
    """
    if not isinstance(state, Optimizer):
        raise TypeError(f"state must be a torch optimiser, got {type(state).__name__}")
    settings = {p: group for group in state.param_groups for p in group["params"]}
    weights, parts = dict(risk.model.named_parameters()), {}
    for name in risk.space.shapes:
        memory = state.state.get(weights[name], {})
        if "exp_avg_sq" not in memory or "betas" not in settings[weights[name]]:
            raise ValueError(
                "state must be an Adam optimiser that has taken a step with the parameters of the "
                f"risk, got {type(state).__name__} without a second moment of {name!r}"
            )
        parts[name] = _divisor(memory, settings[weights[name]])
    return risk.space.flatten({name: part.to(risk.theta) for name, part in parts.items()})


def _divisor(memory: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    power = float(group.get("partial", 0.5))
    # Unless `form` is given, the optimisers of ritz choose the position of epsilon by the power.
    form = group.get("form") or ("outside" if power == 0.5 else "inside")
    largest = group.get("amsgrad")
    largest = form == "published" if largest is None else bool(largest)
    moment = memory["max_exp_avg_sq" if largest else "exp_avg_sq"].detach()
    epsilon = group.get("delta", group.get("eps", 0.0))
    # v_hat = v / (1 - beta_2^t)
    correction = 1 - group["betas"][1] ** float(memory["step"])
    if form == "published":
        scaled: Tensor = (moment.sqrt() + epsilon) ** (2 * power) / correction**0.5
        return scaled
    if form == "outside":
        root: Tensor = (moment / correction).sqrt() + epsilon
        return root
    # With epsilon inside the power, AMSGrad stores the largest v_hat, which is already corrected.
    inside: Tensor = ((moment if largest else moment / correction) + epsilon) ** power
    return inside


def scaled_operator(
    op: CurvatureOperator, scale: Tensor, *, shift: Tensor | None = None
) -> FunctionOperator:
    r"""Return the operator :math:`S (H + \Gamma) S` with diagonal matrices.

    Args:
        op: The matrix :math:`H`.
        scale: The diagonal of :math:`S`, ``(P,)``.
        shift: The diagonal of :math:`\Gamma`, ``(P,)``. Defaults to zero.
    """
    column = scale[:, None]

    def product(block: Tensor) -> Tensor:
        inner = column * block
        image = op.matmat(inner)
        return column * (image if shift is None else image + shift[:, None] * inner)

    return FunctionOperator(product, n=len(scale), dtype=op.dtype, device=op.device)


def preconditioned_curvature(
    risk: Risk,
    divisor: Tensor,
    *,
    matrix: CurvatureMatrix = "hessian",
    generator: torch.Generator | None = None,
) -> tuple[Estimate, Estimate]:
    r"""Return the largest eigenvalue of :math:`D^{-1/2} H D^{-1/2}` and the variance along it.

    The variance is :math:`V(\phi)` of the preconditioned matrices of single samples, along the
    leading eigenvector :math:`\phi`. A batch then has the largest eigenvalue
    :math:`\lambda_1 + V(\phi) / (b \lambda_1)`.

    Cost: about 20 products with the whole matrix, and one in groups of samples.

    Args:
        risk: The loss at a point, with independent samples.
        divisor: :math:`D > 0`, ``(P,)``.
        matrix: ``hessian`` or ``ggn``.
        generator: Source of groups and start vector. Defaults to a new generator with seed 0.
    """
    generator = resolve_generator(generator)
    if not bool((divisor > 0).all()):
        raise ValueError(f"divisor must be positive, got an entry of {float(divisor.min()):g}")
    # D^-1/2 H D^-1/2 is symmetric and has the eigenvalues of D^-1 H, which govern Adam's steps.
    root = divisor.rsqrt()[:, None]
    scaled = scaled_operator(curvature_operator(risk, matrix), root[:, 0])
    pairs = eigenpairs(scaled, largest=1, rtol=RTOL, generator=generator)
    top = ritz_value(pairs, -1, "largest Ritz value of the preconditioned matrix")
    groups = random_groups(risk, choose_group_size(None, sum(risk.batch_rows)), generator)
    # V = (N - 1)/N g/(M - 1) sum_j |y_j - mean|^2 with y_j = D^{-1/2} H_j D^{-1/2} phi. The M - 1
    # contrasts have the same sum, so their mean divides by M - 1.
    vectors = check_pairs(pairs, risk.space.size)
    gaps, roundoff = contrasts(groups, root * vectors[:, -1:], matrix, root=root)
    samples, off = groups.scale * gaps[:, 0], groups.scale * roundoff[0]
    along = Estimate.of(samples, truncation=off, method=str(groups), num_products=1)
    return top, replace(along, stderr=along.stderr * groups.unseen)
