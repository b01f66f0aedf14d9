"""Kinds of gradient noise, from losses with random signs or from drawn labels."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_range
from ritz._core.modes import recording
from ritz.curvature._losses import KnownLoss, sample_losses

NoiseKind = Literal[
    "diagonal", "full", "centred", "true", "kfac", "trace", "trace_unscaled", "isotropic",
    "multiplicative", "sgld",
]  # fmt: skip
NOISE_KINDS = get_args(NoiseKind)
# Sampled by a backward pass: of losses with random signs, or at drawn labels.
BY_GRADIENT = ("full", "centred", "true")
# Sampled from second moments of per-sample gradients.
BY_MOMENTS = ("diagonal", "kfac", "trace", "trace_unscaled")
# Noise of a step that does not depend on the batch size. The other kinds are noise of one sample.
OF_STEP = ("isotropic", "multiplicative", "sgld")


def scale_of_step(kind: str, sigma: float, lr: float, temperature: float) -> float:
    """Return the standard deviation of a kind in ``OF_STEP``."""
    if kind != "sgld":
        return sigma
    check_range("temperature", temperature, low=0.0)
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be above 0 for kind='sgld', got {lr}")
    # alpha^2 (2 T / alpha) = 2 alpha T
    return math.sqrt(2 * temperature / lr)


def random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return independent random signs, int8, on the device of the generator."""
    where: Any = {"generator": generator, "device": generator.device}
    return torch.randint(0, 2, shape, dtype=torch.int8, **where) * 2 - 1


def sign_columns(loss_fn: Any, outputs: Tensor, target: Any, signs: Tensor) -> Tensor:
    r"""Return the derivatives of :math:`n^{-1/2} \sum_i s_i \ell_i` in the outputs.

    Args:
        loss_fn: The mean loss of a batch.
        outputs: Outputs of a batch of :math:`n`.
        target: Its target.
        signs: ``(k, n)``.
    """
    with recording():
        point = outputs.detach().requires_grad_()
        losses = sample_losses(loss_fn, point, target)
    # l_i depends on row i alone, so one backward pass serves all sets of signs.
    derivative = torch.autograd.grad(losses.sum(), point)[0] / math.sqrt(len(outputs))
    return derivative * signs.to(derivative).view(*signs.shape, *(1,) * (outputs.ndim - 1))


def label_columns(
    known: KnownLoss, outputs: Tensor, target: Any, count: int, generator: torch.Generator
) -> Tensor:
    """Return the scores at ``count`` sets of labels that are drawn from the model."""
    point = outputs.detach()
    draws = [known.draw(point, target, generator) for _ in range(count)]
    return torch.stack([known.score(point, target, drawn) for drawn in draws])
