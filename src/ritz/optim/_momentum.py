"""`without_momentum`: the step of an optimiser that the gradient of this step alone would make."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer, RMSprop

from ritz.curvature import Risk
from ritz.measures._shared import divisors
from ritz.optim._adaptive import ADAPTIVE
from ritz.optim._group_settings import has_decoupled_decay, learning_rate, momentum_of
from ritz.optim._kfac import KFAC, curvature_of
from ritz.optim._newton import LanczosNewton
from ritz.optim._spectral import SpectralSGD

# Optimisers that add directions to a heavy-ball buffer. SGD includes that with noise.
HEAVY_BALL = (SGD, SpectralSGD, LanczosNewton, KFAC, RMSprop)


def momentum_buffers(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return copies of the momentum buffers; zeros if there is none yet, nothing if not needed."""
    buffers = {}
    for group in optimizer.param_groups if isinstance(optimizer, HEAVY_BALL) else ():
        for p in (p for p in group["params"] if p.requires_grad and momentum_of(group)):
            buffer = optimizer.state.get(p, {}).get("momentum_buffer")
            buffers[p] = torch.zeros_like(p) if buffer is None else buffer.detach().clone()
    return buffers


@torch.no_grad()
def decay_parts(
    optimizer: Optimizer, weights: Mapping[Tensor, Tensor]
) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    r"""Return decoupled weight decay, and the L2 terms of the gradient, by parameter.

    The first is the part :math:`-\alpha\gamma w` of a step, the second :math:`\gamma w`. One of
    both is zero.

    Args:
        optimizer: The optimiser.
        weights: Weights :math:`w` before the step.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    decay, coupled = {}, {}
    for p, w in weights.items():
        factor = float(groups[p].get("weight_decay", 0.0))
        decoupled = has_decoupled_decay(optimizer, groups[p])
        decay[p] = w * (-learning_rate(groups[p]) * factor if decoupled else 0.0)
        coupled[p] = w * (0.0 if decoupled else factor)
    return decay, coupled


@torch.no_grad()
def without_momentum(
    optimizer: Optimizer,
    risk: Risk,
    *,
    update: Mapping[Tensor, Tensor],
    gradient: Mapping[Tensor, Tensor],
    buffers: Mapping[Tensor, Tensor],
) -> dict[Tensor, Tensor] | None:
    r"""Return the last step without momentum, :math:`-\alpha D^{-1} g`, by parameter.

    The learning rate is the ratio of the update and the averaged direction that is in the state, so
    that a schedule may have changed the setting since. Nesterov's momentum is removed like that of
    Polyak. ``None`` if the optimiser has momentum and its averages are not known to ritz, such as
    NAdam, Muon, Lookahead, and Adam behind :class:`KFACPreconditioner`.

    Args:
        optimizer: The optimiser after the step.
        risk: A :class:`~ritz.Risk` as a function of its parameters.
        update: The last step without decoupled weight decay.
        gradient: The gradient of the step, including an L2 term.
        buffers: Momentum buffers before the step, of parameters that had one.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    if not any(momentum_of(groups[p]) for p in update):
        return dict(update)
    if isinstance(optimizer, HEAVY_BALL):
        return {
            p: _heavy_ball(optimizer, p, groups[p], moved, buffers.get(p))
            for p, moved in update.items()
        }
    if type(optimizer) not in ADAPTIVE or curvature_of(optimizer) is not None:
        return None
    weights = dict(risk.model.named_parameters())
    sizes = risk.space.unflatten(divisors(risk, optimizer))
    parts: dict[Tensor, Tensor] = {weights[name]: part for name, part in sizes.items()}
    return {
        p: _adaptive(optimizer.state[p], groups[p], moved, gradient[p], parts[p])
        for p, moved in update.items()
    }


def _heavy_ball(
    optimizer: Optimizer, p: Tensor, group: Mapping[str, Any], moved: Tensor, before: Tensor | None
) -> Tensor:
    momentum = momentum_of(group)
    buffer: Tensor | None = optimizer.state[p].get("momentum_buffer")
    if not momentum or buffer is None:
        return moved
    # b = rho b_0 + d, so the direction is d = b - rho b_0.
    direction = buffer if before is None else buffer - momentum * before
    step = direction + momentum * buffer if group.get("nesterov") else buffer
    return direction * _ratio(moved, step)


def _adaptive(
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    moved: Tensor,
    gradient: Tensor,
    size: Tensor,
) -> Tensor:
    # The step is -alpha m / (c D) with c = 1 - beta_1^t, or 1 in the published form.
    correction = 1.0
    if group.get("form") != "published":
        correction = 1 - momentum_of(group) ** float(state["step"])
    sign = -1.0 if group.get("maximize") else 1.0
    return sign * gradient / size * (correction * _ratio(moved, state["exp_avg"] / size))


def _ratio(moved: Tensor, step: Tensor) -> float:
    """Return the factor of ``step`` that is closest to ``moved``: minus the learning rate."""
    square = float(step.double().square().sum())
    return float((moved.double() * step.double()).sum()) / square if square else 0.0
