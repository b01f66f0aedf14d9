"""`edge`: the edge of stability of an optimiser, the curvature above which its steps diverge."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ritz.curvature import CurvatureOperator, Risk
from ritz.measures import stable_rate
from ritz.measures._shared import divisors, scaled_operator
from ritz.optim._adaptive import ADAPTIVE
from ritz.optim._group_settings import group_update, has_decoupled_decay, learning_rate
from ritz.optim._spectral import SpectralSGD

PLAIN = (SGD, SpectralSGD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    r"""The edge of stability of an optimiser on a quadratic loss with the Hessian :math:`H`.

    Its steps diverge if the largest eigenvalue of :math:`S (H + \Gamma) S` exceeds ``limit``.

    Attributes:
        limit: :math:`(1 + \rho) / (1 - \tau)` for momentum; see :func:`edge`.
        square: The diagonal of :math:`S^2`, ``(P,)``, or one number if all entries are equal.
        shift: The diagonal of :math:`\Gamma`, in the same form: weight decay as an L2 term.
    """

    limit: float
    square: Tensor | float
    shift: Tensor | float

    @property
    def threshold(self) -> float | None:
        r"""Threshold of the largest eigenvalue of :math:`H`; ``None`` if settings differ."""
        if isinstance(self.square, Tensor) or isinstance(self.shift, Tensor):
            return None
        return self.limit / self.square - self.shift

    def operator(self, op: CurvatureOperator) -> Any:
        r"""Return :math:`S (H + \Gamma) S`."""
        theta = op.risk.theta
        square, shift = (
            each.to(theta) if isinstance(each, Tensor) else torch.full_like(theta, each)
            for each in (self.square, self.shift)
        )
        return scaled_operator(op, square.sqrt(), shift=shift)


def edge(optimizer: Optimizer, risk: Risk) -> Edge | None:
    r"""Return the edge of stability of an optimiser, or ``None`` if none is known in closed form.

    Along an eigenvector, steps with momentum :math:`\rho` are a linear recurrence of second order.
    It becomes unstable when its characteristic polynomial has the root :math:`-1`. With decoupled
    weight decay :math:`\gamma`, divisors :math:`D` and an L2 term :math:`\Gamma`, it is stable for

    .. math:: S^2 = \frac{\alpha}{c\, D\, (2 - \alpha \gamma)}, \quad
        \lambda_1\big(S (H + \Gamma) S\big) < f

    The limit :math:`f` is :math:`(1 + \rho) / (1 - \tau)` for heavy-ball momentum with dampening
    :math:`\tau`, :math:`(1 + \rho) / (1 + 2 \rho)` for Nesterov's momentum, and
    :math:`(1 + \beta_1) / (1 - \beta_1)` for Adam. :math:`c = 1 - \beta_1^t` is the bias correction
    of Adam, and 1 otherwise. For SGD the condition is :math:`\lambda_1 < 2 f / \alpha`. All
    settings except momentum may differ between parameters.

    For Adam, parameters whose gradients are pure roundoff are left out. For a network with batch
    norm, pass a risk in ``train`` mode, in which biases before a normalisation have no gradient.
    The edge is not known for Lookahead, whose interpolation stabilises diverging steps, and for
    optimisers that divide by a matrix, by another estimate or by the norm of the gradient.

    Args:
        optimizer: The optimiser, with its current settings and state.
        risk: A :class:`~ritz.Risk` of the model that it trains.

    Reference: *Spectral Machine Learning*, section 5.7; Cohen et al. (2022), *Adaptive gradient
    methods at the edge of stability*, for Adam.
    """
    adaptive = type(optimizer) in ADAPTIVE
    if not (adaptive or isinstance(optimizer, PLAIN)) or not _is_common(optimizer):
        return None
    kind, momentum, dampening = group_update(optimizer.param_groups[0])
    # stable_rate of a unit curvature is 2 f.
    limit = 0.5 * float(stable_rate(1.0, optimizer=kind, momentum=momentum, dampening=dampening))
    columns = _columns(optimizer, risk)
    if columns is None:
        return None
    squares, shift = columns
    if not bool(squares.any()):
        return None  # steps of length zero
    if adaptive:
        if not all(optimizer.state.get(p) for p in _chosen(optimizer, risk)):
            return None  # before the first step there is nothing to divide by
        moved = _beyond_roundoff(optimizer, risk)
        squares = torch.where(moved, squares / divisors(risk, optimizer), 0.0)
    return Edge(limit=limit, square=_uniform(squares), shift=_uniform(shift))


def update_settings(optimizer: Optimizer, name: str = "") -> tuple[str, float, float]:
    """Return the kind of update (as in :func:`ritz.advise`), the momentum and the learning rate.

    Args:
        optimizer: The optimiser.
        name: Its registered name.
    """
    group = optimizer.param_groups[0]
    rate = learning_rate(group)
    if "kfac" in name:
        return "kfac", float(group.get("momentum", 0.0)), rate
    kind, momentum, _ = group_update(group)
    return kind, momentum, rate


def _is_common(optimizer: Optimizer) -> bool:
    """Return whether momentum is the same for all parameters, and the loss is minimized."""
    names = ("momentum", "nesterov", "dampening")
    groups = optimizer.param_groups
    kinds = {(*(group.get(n) for n in names), (group.get("betas") or (0,))[0]) for group in groups}
    return len(kinds) == 1 and not any(group.get("maximize") for group in groups)


def _chosen(optimizer: Optimizer, risk: Risk) -> list[Tensor]:
    weights = dict(risk.model.named_parameters())
    return [weights[name] for name in risk.space.shapes]


def _columns(optimizer: Optimizer, risk: Risk) -> tuple[Tensor, Tensor] | None:
    """Return ``alpha / (c (2 - alpha gamma))`` and the L2 term of each parameter, ``(P,)``."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    squares, shifts = list[Tensor](), list[Tensor]()
    for p in _chosen(optimizer, risk):
        if p not in groups:
            return None  # a parameter that another optimiser trains
        group = groups[p]
        rate = learning_rate(group)
        decay = float(group.get("weight_decay", 0.0))
        coupled = not has_decoupled_decay(optimizer, group)
        betas, step = group.get("betas"), optimizer.state.get(p, {}).get("step")
        # The running mean of t gradients is divided by 1 - beta_1^t.
        rise = 1.0 if betas is None or step is None else 1 - float(betas[0]) ** float(step)
        # For a decay above 2 / alpha the weights diverge without any curvature.
        room = 2.0 if coupled else max(2.0 - rate * decay, 1e-12)
        square = rate / ((rise or 1.0) * room)
        squares.append(torch.full((p.numel(),), square, dtype=torch.float64))
        shifts.append(torch.full((p.numel(),), decay if coupled else 0.0, dtype=torch.float64))
    return torch.cat(squares).to(risk.theta.device), torch.cat(shifts).to(risk.theta.device)


def _beyond_roundoff(optimizer: Optimizer, risk: Risk) -> Tensor:
    """Return which parameters have gradients that are more than roundoff, ``(P,)``.

    The gradient of a bias before batch norm is pure roundoff, and Adam divides it by its own size.
    With the same divisors, the roundoff of matrix-vector products would be the largest eigenvalue.
    """
    states = [optimizer.state[p] for p in _chosen(optimizer, risk)]
    squares = torch.cat([state["exp_avg_sq"].reshape(-1) for state in states])
    # Roundoff of sums of about a hundred terms, relative to the largest gradients.
    limit = 100 * torch.finfo(squares.dtype).eps
    return (squares > limit**2 * squares.max()).to(risk.theta.device)


def _uniform(values: Tensor) -> Tensor | float:
    """Return a single number if all entries are equal, otherwise the entries."""
    first = float(values[0])
    return first if bool((values == first).all()) else values
