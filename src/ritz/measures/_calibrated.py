"""``calibrated_sharpness``, a largest eigenvalue that is comparable between networks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ritz._core.batch_norm import batch_norms
from ritz._core.checks import is_below
from ritz._core.progress import Progress
from ritz._core.results import HasStatus, Status
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix
from ritz.measures._calibration import Temperature, scaled, temperature
from ritz.measures._folding import fold_batch_norm
from ritz.spectra import eigenpairs

MakeRisk = Callable[[nn.Module], Risk]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedSharpness(HasStatus):
    r"""The largest eigenvalue of a folded and calibrated network.

    Attributes:
        lambda_max: :math:`\lambda_1` of the calibrated network on the data.
        residual: :math:`\|H u - \lambda_1 u\|`; an eigenvalue lies within it.
        temperature: The temperature, from held-out data, with calibration errors.
        num_folded: Batch norms folded into the layers before them.
        unfolded: Names of batch norms that could not be folded. Rescaling the layers before them
            changes :math:`\lambda_1`.
        matrix: ``hessian`` or ``ggn``.
        num_samples: Samples of the data.
        status: Whether both the temperature and the eigenvalue have converged.
    """

    lambda_max: float
    residual: float
    temperature: Temperature
    num_folded: int
    unfolded: tuple[str, ...]
    matrix: str
    num_samples: int
    status: Status

    def __float__(self) -> float:
        return self.lambda_max

    def __str__(self) -> str:
        left = f", not folded: {', '.join(self.unfolded)}" if self.unfolded else ""
        return (
            f"lambda_max {self.lambda_max:.6g} (residual {self.residual:.2g}) of the {self.matrix} "
            f"on {self.num_samples:,} samples, {self.num_folded} batch norms folded{left}\n"
            f"{self.temperature}\n[{self.status}]"
        )


def calibrated_sharpness(
    model: nn.Module,
    risk: MakeRisk,
    held_out: MakeRisk,
    *,
    matrix: CurvatureMatrix = "hessian",
    rtol: float = 1e-3,
    max_steps: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> CalibratedSharpness:
    r"""Return the largest eigenvalue of a network that is comparable between runs.

    Batch norm is folded into the layers before it, also through identities and dropout, which are
    inactive. Then the outputs are divided by the temperature that minimises the cross-entropy of
    held-out data. Scaling the layers of a network, or its confidence, then hardly changes

    .. math:: \lambda_1\big(\nabla^2 L(w)\big), \quad L(w) = \frac1N \sum_i
        \ell(f_w(x_i) / T, y_i)

    Cost: one forward pass of the held-out data, and an eigenvalue by Lanczos.

    Args:
        model: A trained model; it is not changed.
        risk: Takes a model and returns its :class:`Risk` on the data to measure on, such as
            ``lambda m: Risk(m, cross_entropy, train)``.
        held_out: The same for held-out data, from which the temperature is taken.
        matrix: ``hessian`` or ``ggn``.
        rtol: Residual of the eigenvalue relative to the norm of the matrix.
        max_steps: Maximum number of products.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
    descent with covariance noise*, section 5.3.
    """
    # Folding does not change the outputs, so the temperature may be fitted afterwards.
    folded = fold_batch_norm(model, strict=False)
    remaining = tuple(batch_norms(folded))
    # On held-out data, because a network is overconfident on its training data.
    calibration = temperature(held_out(folded))
    # The curvature of the loss of f / T does not depend on the confidence of the network.
    calibrated = risk(scaled(folded, calibration))
    op = curvature_operator(calibrated, matrix)
    limits: Any = {"rtol": rtol, "max_steps": max_steps, "generator": generator}
    pairs = eigenpairs(op, largest=1, vectors=False, progress=progress, **limits)
    return CalibratedSharpness(
        lambda_max=float(pairs.values[-1]),
        residual=float(pairs.residuals[-1]),
        temperature=calibration,
        num_folded=len(batch_norms(model)) - len(remaining),
        unfolded=remaining,
        matrix=matrix,
        num_samples=calibrated.num_samples,
        # If the temperature has failed its status, otherwise that of the eigenvalue.
        status=(calibration.status if calibration.status.outcome != "converged" else pairs.status),
    )


# ------------------------------------------------------------------------------------------
# The two terms of the excess risk that depend on training.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessRisk:
    r"""Terms of the excess risk of a network, section 2.1.

    Attributes:
        generalisation: :math:`T_1`, loss on held-out data minus loss on training data.
        optimisation: :math:`T_2`, loss on training data minus ``minimum``.
        train: Loss on training data.
        held_out: Loss on held-out data.
        minimum: Smallest possible loss on training data, or a lower bound of it. With a lower
        bound,
            such as 0, ``optimisation`` is an upper bound.
    """

    generalisation: float
    optimisation: float
    train: float
    held_out: float
    minimum: float

    def __str__(self) -> str:
        return (
            f"excess risk at most {self.generalisation + self.optimisation:.6g}: generalisation "
            f"{self.generalisation:.6g} (held out {self.held_out:.6g}, train {self.train:.6g}), "
            f"optimisation {self.optimisation:.6g} (above {self.minimum:.6g})"
        )


def excess_risk(train: Risk, held_out: Risk, *, minimum: float = 0.0) -> ExcessRisk:
    r"""Return the generalisation and the optimisation error of a network.

    .. math:: L_\text{true}(w) - L^* \le
        \underbrace{L_\text{true}(w) - L(w)}_{T_1} + \underbrace{L(w) - \min L}_{T_2}
        \quad\text{in expectation}

    The true loss is estimated by that of held-out data. Neither loss includes an L2 term. Cost: one
    forward pass over both data sets.

    Args:
        train: The risk on training data.
        held_out: The risk of the same weights on held-out data.
        minimum: Smallest possible loss on training data, or a lower bound of it.

    Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
    descent with covariance noise*, section 2.1, equation 1.
    """
    losses = [risk.without_l2().loss() for risk in (train, held_out)]
    if not is_below(minimum, losses[0]):
        raise ValueError(f"minimum must be at most the loss of train, {losses[0]:.6g}, got "
                         f"{minimum}")  # fmt: skip
    # T_1 = L_held_out - L_train and T_2 = L_train - min L
    return ExcessRisk(
        generalisation=losses[1] - losses[0],
        optimisation=losses[0] - minimum,
        train=losses[0],
        held_out=losses[1],
        minimum=minimum,
    )
