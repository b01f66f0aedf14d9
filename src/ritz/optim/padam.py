"""Partially adaptive methods, with coupled or decoupled decay."""

from typing import Any, Unpack, final

from torch.optim.optimizer import ParamsT

from ritz.optim.base import AdaptiveOptimizer, Flags
from ritz.optim.rules import Form, Number


@final
class Padam(AdaptiveOptimizer):
    r"""Partially adaptive steps with an L2 term in the gradient.

    .. math::
        g \leftarrow \nabla L(w) + \lambda w, \qquad
        w \leftarrow w - \alpha\, \hat m / (\hat v + \epsilon)^p

    Power 0 is SGD with momentum, 1/2 is Adam. At 1/2 the denominator is :math:`\sqrt{\hat v} +
    \epsilon`, as in ``torch.optim.Adam``, and torch's fused kernel takes the step, unless
    ``form="inside"``. Inside the root :math:`\epsilon` acts like :math:`\sqrt\epsilon` outside it.

    Args:
        params: Parameters or groups of them.
        lr: Rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decays of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Coefficient :math:`\lambda`.
        partial: Power :math:`p`, from 0 to 1/2. Powers of a half are taken by square roots.
        form: Where :math:`\epsilon` stands: ``"inside"`` the power, ``"outside"`` the root
            (:math:`p = 1/2`), or ``"published"``, the authors' code: :math:`(\sqrt{v_{\max}} +
            \epsilon)^{2p}` with AMSGrad, whose correction :math:`\sqrt{1 - \beta_2^t}` for every
            :math:`p` is a hidden warm-up. None is ``"outside"`` at 1/2 and ``"inside"`` below.
        **flags: See :class:`~ritz.optim.base.AdaptiveOptimizer`.

    Reference: Chen and Gu (2018), Closing the generalization gap of adaptive gradient methods.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        partial: float = 0.125,
        form: Form | None = None,
        **flags: Unpack[Flags],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "decoupled_weight_decay": False}
        settings |= {"partial": partial, "form": form}
        super().__init__(params, settings, flags)


@final
class PadamW(AdaptiveOptimizer):
    r"""Partially adaptive steps with decoupled decay.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, \hat m / (\hat v + \epsilon)^p

    At power 1/2 this is ``torch.optim.AdamW``, on its fused kernel, unless ``form="inside"``.

    Args:
        params: Parameters or groups of them.
        lr: Rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decays of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decoupled decay :math:`\lambda`.
        partial: Power :math:`p`, from 0 to 1/2.
        form: Where :math:`\epsilon` stands; see :class:`Padam`.
        **flags: See :class:`~ritz.optim.base.AdaptiveOptimizer`.

    Reference: Granziol et al. (2021), Iterate averaged adaptive gradient methods, Algorithm 1
    without the average.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 5e-4,
        *,
        partial: float = 0.125,
        form: Form | None = None,
        **flags: Unpack[Flags],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "partial": partial, "form": form}
        super().__init__(params, settings, flags)
