"""Damping as a hyper-parameter of its own, and as shrinkage."""

from typing import Any, ClassVar, Unpack, final

from torch.optim.optimizer import ParamsT

from ritz._core.checks import check_range
from ritz.optim.base import AdaptiveOptimizer, Flags
from ritz.optim.rules import Number


@final
class AdamW(AdaptiveOptimizer):
    r"""AdamW whose damping is tuned and scheduled like the rate.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, \hat m / (\sqrt{\hat v} + \delta)

    The step is that of ``torch.optim.AdamW`` with ``eps`` equal to :math:`\delta`, on its fused
    kernel. ``group["delta"]`` may differ between groups and change between steps; small damping
    makes steps in flat directions larger than in sharp ones, large damping approaches SGD with
    rate :math:`\alpha/\delta`.

    Args:
        params: Parameters or groups of them.
        lr: Rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decays of the running means of the gradient and of its square.
        delta: Damping :math:`\delta`; see :func:`delta_to_shrinkage`.
        weight_decay: Decay :math:`\lambda`.
        decoupled_weight_decay: False puts the decay into the gradient, as an L2 term.
        **flags: See :class:`~ritz.optim.base.AdaptiveOptimizer`.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, section 3.2.
    """

    _eps_key: ClassVar[str] = "delta"

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        delta: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        **flags: Unpack[Flags],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "delta": delta}
        settings |= {"weight_decay": weight_decay, "partial": 0.5}
        settings |= {"decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, settings, flags)


def delta_to_shrinkage(delta: float) -> float:
    r"""Weight :math:`\beta` of the curvature in the shrunk matrix that damping amounts to.

    .. math::
        \frac{\alpha}{\lambda + \delta} = \frac{\alpha\beta}{\beta\lambda + (1 - \beta)}, \qquad
        \beta = \frac{1}{1 + \delta}

    A damped step of rate :math:`\alpha` is a step of rate :math:`\alpha\beta` on
    :math:`\beta H + (1 - \beta) I`.

    Args:
        delta: Damping, at least 0.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, section 3.2.

    >>> delta_to_shrinkage(3.0)
    0.25
    """
    check_range("delta", delta, low=0)
    return 1 / (1 + delta)


def shrinkage_to_delta(beta: float) -> float:
    r"""Damping :math:`\delta = (1 - \beta)/\beta`, the inverse of :func:`delta_to_shrinkage`.

    Args:
        beta: Weight of the curvature, above 0 and at most 1.

    >>> shrinkage_to_delta(0.25)
    3.0
    """
    check_range("beta", beta, low=0, high=1)
    if beta == 0:
        raise ValueError("beta must be above 0: no damping shrinks the curvature away, got 0")
    return (1 - beta) / beta
