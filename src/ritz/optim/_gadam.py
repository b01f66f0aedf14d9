"""Adaptive methods that average their iterates: Gadam and GadamX."""

from typing import Any, Unpack, final

from torch.optim.optimizer import ParamsT

from ritz.optim._adaptive import AdaptiveOptimizer, Flags
from ritz.optim._averaging import IterateAverage
from ritz.optim._update import Form, Number


class AveragedOptimizer(AdaptiveOptimizer):
    """Base of Gadam and GadamX: adaptive steps, and a tail average attached to them."""

    def __init__(
        self,
        params: ParamsT,
        settings: dict[str, Any],
        flags: Flags,
        *,
        start: int | None,
        interval: int,
    ) -> None:
        super().__init__(params, settings, flags)
        self._plan: dict[str, Any] = {"start": start, "interval": interval}
        self._average = IterateAverage(self, start=start, interval=interval)

    @property
    def average(self) -> IterateAverage:
        """The average of the iterates."""
        return self._average

    def __getstate__(self) -> dict[str, Any]:
        self.state_dict()  # has the average write its counts into the state
        return super().__getstate__() | {"_plan": self._plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_average" not in self.__dict__:
            # Copying and pickling lose hooks: attach anew, and go on from what the state holds.
            self._average = IterateAverage(self, **self._plan)
            self.load_state_dict(self.state_dict())


@final
class Gadam(AveragedOptimizer):
    r"""Adam that generalises: AdamW with a tail average of its iterates.

    .. math::
        w_t = (1 - \alpha\lambda)\, w_{t-1} - \alpha\, \hat m / (\sqrt{\hat v} + \epsilon), \qquad
        \bar w \leftarrow \frac{n \bar w + w_t}{n + 1} \text{ for } t \ge T

    The step is ``torch.optim.AdamW``'s, on its fused kernel. ``optimizer.average`` is the
    :class:`~ritz.optim.IterateAverage`; evaluate inside ``with optimizer.average.applied(model):``.
    Averaging at the end of every epoch of ``m`` steps, beginning with the weights after ``e``
    epochs, is ``start=e * m + 1, interval=m``. Memory: three vectors, one of them the average.

    Args:
        params: Parameters or groups of them.
        lr: Rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decays of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decay :math:`\lambda`.
        start: First step :math:`T` of the average, counted from one, 0 for the beginning; None
            waits for ``optimizer.average.restart()``.
        interval: Steps from one averaged iterate to the next.
        partial: Power :math:`p` of the second moment, from 0 to 1/2; below 1/2 :math:`\epsilon`
            moves inside it.
        form: Where :math:`\epsilon` stands; see :class:`~ritz.optim.Padam`.
        decoupled_weight_decay: False puts the decay into the gradient, as an L2 term.
        **flags: See :class:`~ritz.optim._adaptive.AdaptiveOptimizer`.

    Reference: Granziol et al. (2021), Iterate averaged adaptive gradient methods, Algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        start: int | None = None,
        interval: int = 1,
        partial: float = 0.5,
        form: Form | None = None,
        decoupled_weight_decay: bool = True,
        **flags: Unpack[Flags],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "partial": partial, "form": form}
        settings |= {"decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, settings, flags, start=start, interval=interval)


@final
class GadamX(AveragedOptimizer):
    r"""Partially adaptive Gadam: power 1/8 of the second moment.

    .. math::
        w_t = (1 - \alpha\lambda)\, w_{t-1} - \alpha\, \hat m / (\hat v + \epsilon)^p, \qquad
        \bar w \leftarrow \frac{n \bar w + w_t}{n + 1} \text{ for } t \ge T

    The rate is on the scale of SGD's. ``compile=True`` makes the step about as cheap as torch's
    fused AdamW; without it the step costs what torch's unfused one does.

    Args:
        params: Parameters or groups of them.
        lr: Rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decays of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decay :math:`\lambda`.
        start: First step :math:`T` of the average; see :class:`Gadam`.
        interval: Steps from one averaged iterate to the next.
        partial: Power :math:`p`; 0.2 in the published language models.
        form: Where :math:`\epsilon` stands; see :class:`~ritz.optim.Padam`.
        decoupled_weight_decay: False puts the decay into the gradient, as an L2 term.
        **flags: See :class:`~ritz.optim._adaptive.AdaptiveOptimizer`.

    Reference: Granziol et al. (2021), Iterate averaged adaptive gradient methods, Algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 5e-4,
        *,
        start: int | None = None,
        interval: int = 1,
        partial: float = 0.125,
        form: Form | None = None,
        decoupled_weight_decay: bool = True,
        **flags: Unpack[Flags],
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "partial": partial, "form": form}
        settings |= {"decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, settings, flags, start=start, interval=interval)
