"""`SpectralSGD`: learning rate and momentum from the extreme eigenvalues of the curvature."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch.optim.optimizer import ParamsT

from ritz._core.checks import check_count, check_type
from ritz._core.params import check_setting
from ritz._core.results import AsymmetryError
from ritz._core.storage import storable
from ritz.curvature import Risk
from ritz.optim._curvature_optimizer import (
    LostGradientError,
    MatrixOptimizer,
    NewtonMatrix,
    TracedMatrix,
    check_gradient_digits,
    check_matrix,
    descend,
    evaluate,
    optimizer_gradients,
    require_curvature,
    require_measurement,
)
from ritz.spectra import Spectrum, lanczos

# A Ritz value with more than this share of the mass belongs to the bulk of eigenvalues at zero:
# Spectral Machine Learning, section 4.3.2.
DROPPED_MASS = 0.5


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class SpectralRates:
    r"""The optimal learning rate and momentum for a quadratic loss with given eigenvalues.

    Attributes:
        rate: Learning rate :math:`\alpha`.
        momentum: Momentum :math:`\rho`.
        lambda_max: Largest Ritz value :math:`\lambda_1`.
        lambda_min: Smallest Ritz value :math:`\lambda_P` that was not dropped.
        dropped_mass: Mass of the Ritz value that was dropped as part of the bulk at zero, or 0.
        num_negative: Number of Ritz values that were dropped because they are not positive.
    """

    rate: float
    momentum: float
    lambda_max: float
    lambda_min: float
    dropped_mass: float
    num_negative: int

    def __str__(self) -> str:
        dropped = [f"bulk of mass {self.dropped_mass:.2g}"] if self.dropped_mass else []
        dropped += [f"{self.num_negative} not positive"] if self.num_negative else []
        return (
            f"learning rate {self.rate:.4g}, momentum {self.momentum:.4g} for eigenvalues from "
            f"{self.lambda_min:.4g} to {self.lambda_max:.4g}"
        ) + (f" (dropped: {', '.join(dropped)})" if dropped else "")


def spectral_rates(spectrum: Spectrum, *, nesterov: bool = False) -> SpectralRates:
    r"""Return the learning rate and momentum that are optimal for the eigenvalues of a Lanczos run.

    .. math::
        \text{Polyak: } \alpha = \Big(\frac{2}{\sqrt{\lambda_1} + \sqrt{\lambda_P}}\Big)^2, \;
        \rho = \Big(\frac{\sqrt{\lambda_1} - \sqrt{\lambda_P}}
        {\sqrt{\lambda_1} + \sqrt{\lambda_P}}\Big)^2; \qquad
        \text{Nesterov: } \alpha = \frac{1}{\lambda_1}, \;
        \rho = \frac{\sqrt{\lambda_1} - \sqrt{\lambda_P}}{\sqrt{\lambda_1} + \sqrt{\lambda_P}}

    On a quadratic loss the error falls by :math:`\sqrt\rho` per step for Polyak and by :math:`1 -
    \sqrt{\lambda_P / \lambda_1}` for Nesterov.

    The smallest Ritz values of a network are so close to zero that :math:`\rho` would be 1.
    Therefore a Ritz value that carries more than half of the spectral mass is dropped, and so are
    all values that are not positive. The result says what was dropped. The largest value is never
    dropped, because steps that ignore it would diverge.

    Args:
        spectrum: Result of :func:`ritz.lanczos`.
        nesterov: Whether to return the values for Nesterov's momentum.

    Reference: Granziol, *Spectral Machine Learning*, equation 4.3 (whose Polyak rate lacks the
    square, and whose Nesterov rate is :math:`1/\lambda_1`).
    """
    check_type("spectrum", spectrum, Spectrum, "the result of ritz.lanczos()")
    # The weights of a Lanczos run sum to one, so at most one of them is above one half.
    heavy = spectrum.weights > DROPPED_MASS
    heavy[-1] = False  # values ascend
    values = spectrum.values[~heavy]
    positive = values[values > spectrum.roundoff]
    if not len(positive):
        raise ValueError(
            "spectrum must have a positive Ritz value outside of the bulk at zero, got "
            f"{spectrum.values.tolist()}"
        )
    # With r = sqrt(lambda_P / lambda_1) the contrast is (1 - r) / (1 + r).
    high, low = float(positive.max()), float(positive.min())
    sum_of_roots = math.sqrt(high) + math.sqrt(low)
    contrast = (math.sqrt(high) - math.sqrt(low)) / sum_of_roots
    return SpectralRates(
        # Polyak: (2 / (sqrt(l_1) + sqrt(l_P)))^2, the square that equation 4.3 lacks.
        rate=1 / high if nesterov else (2 / sum_of_roots) ** 2,
        momentum=contrast if nesterov else contrast**2,
        lambda_max=high,
        lambda_min=low,
        dropped_mass=float(spectrum.weights[heavy].sum()),
        num_negative=len(values) - len(positive),
    )


@final
class SpectralSGD(MatrixOptimizer):
    r"""SGD whose learning rate and momentum are computed from the spectrum of the curvature.

    .. math:: b \leftarrow \rho b + g, \qquad w \leftarrow (1 - s\alpha\gamma)\, w - s\alpha b
        \quad (\text{Nesterov: } - s\alpha (g + \rho b))

    :math:`\alpha` and :math:`\rho` are those of :func:`spectral_rates`, from a short Lanczos run
    every ``interval`` steps. :math:`s` is ``lr``, which a schedule may change. The current values
    are ``group["rate"]``, ``group["momentum"]`` and ``rates``. They are kept if a new spectrum has
    no positive values, or if roundoff exceeds the curvature, as near a loss of zero in float32.

    Args:
        params: Parameters or groups of them.
        lr: Factor :math:`s` of the measured learning rate.
        interval: Number of steps between two measurements.
        num_steps: Number of Lanczos steps.
        nesterov: Use Nesterov's momentum (SSGDMN) instead of Polyak's (SSGDM).
        matrix: ``hessian``, ``ggn`` or ``fisher``.
        weight_decay: Decoupled decay :math:`\gamma`.
        seed: Seed of the start vectors.

    Attributes:
        rates: The :class:`SpectralRates` of the last measurement. ``None`` before the first one and
            after loading a state.

    Reference: Granziol, *Spectral Machine Learning*, section 4.3.2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        *,
        interval: int = 100,
        num_steps: int = 20,
        nesterov: bool = False,
        matrix: NewtonMatrix = "hessian",
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "interval": interval, "num_steps": num_steps}
        settings |= {"nesterov": nesterov, "matrix": matrix, "weight_decay": weight_decay}
        super().__init__(params, settings | {"seed": seed})

    measured: ClassVar[dict[str, Any]] = {"rate": None, "momentum": 0.0, "num_refreshes": 0}

    @property
    def _shared(self) -> tuple[str, ...]:
        return "interval", "num_steps", "nesterov", "matrix", "seed"

    def _forget(self) -> None:
        self._traced = TracedMatrix()
        self.rates: SpectralRates | None = None

    def _check(self, settings: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            check_setting(name, settings[name])
        for name in ("interval", "num_steps"):
            check_count(name, settings[name])
        check_count("seed", settings["seed"], low=0)
        check_matrix(settings["matrix"])
        check_type("nesterov", settings["nesterov"], bool, "True or False")

    @torch.no_grad()
    def update_curvature(self, risk: Risk) -> None:
        """Set learning rate and momentum from the spectrum at the current weights.

        Args:
            risk: A :class:`~ritz.Risk` on the curvature batch.
        """
        op, _, generator = self._traced.refresh(self, risk)
        first = self.param_groups[0]
        steps = min(first["num_steps"], op.shape[0])
        try:
            check_gradient_digits(op.risk)
            spectrum = lanczos(op, num_steps=steps, generator=generator)
        except (AsymmetryError, LostGradientError) as error:
            require_measurement(self, first["rate"] is not None, error)
            return
        # Far from a minimum a spectrum may have no positive values. The last measured values are
        # then kept, if there are any.
        try:
            self.rates = rates = spectral_rates(spectrum, nesterov=first["nesterov"])
        except ValueError:
            if first["rate"] is None:
                raise
            return
        for group in self.param_groups:
            group["rate"], group["momentum"] = rates.rate, rates.momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of ``closure`` if there is one."""
        loss = evaluate(closure)
        grads = optimizer_gradients(self)
        require_curvature(self, not grads or self.param_groups[0]["rate"] is not None)
        for group in self.param_groups if grads else ():
            # lr, which a schedule may change, is a factor of the measured learning rate.
            descend(self, grads, group, float(group["lr"]) * group["rate"])
        return loss
