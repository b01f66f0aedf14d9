"""Temperature scaling and reliability, ``calibrated_sharpness``, and bounds of excess risk."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ritz._core.batch_norm import batch_norms
from ritz._core.checks import check_count, check_positive, check_range, check_type, is_below
from ritz._core.progress import Progress
from ritz._core.results import HasStatus, Status
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix, check_risk, outputs_and_labels
from ritz.measures._folding import fold_batch_norm
from ritz.spectra import eigenpairs

Pairs = list[tuple[Tensor, Tensor]]
MakeRisk = Callable[[nn.Module], Risk]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    r"""Confidence and accuracy in bins of confidence.

    Attributes:
        error: Expected calibration error
            :math:`\sum_b \frac{n_b}{N} |\text{accuracy}_b - \text{confidence}_b|`.
        edges: Evenly spaced edges of the bins from 0 to 1, ``(num_bins + 1,)``. A bin includes its
            upper edge.
        counts: Number of samples per bin, ``(num_bins,)``.
        confidence: Mean of the largest probability per bin, ``(num_bins,)``; NaN in empty bins.
        accuracy: Fraction of correct predictions per bin, ``(num_bins,)``; NaN in empty bins.
    """

    error: float
    edges: Tensor
    counts: Tensor
    confidence: Tensor
    accuracy: Tensor

    def __str__(self) -> str:
        total = int(self.counts.sum())
        return f"Calibration error {self.error:.4g} of {total:,} samples in {len(self.counts)} bins"


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature(HasStatus):
    """Temperature that calibrates a network.

    Attributes:
        temperature: Number by which to divide the logits. Above 1, the network is overconfident.
        slope: Derivative of the cross-entropy with respect to the logarithm of the temperature.
        loss: Cross-entropy of the original logits.
        loss_scaled: Cross-entropy of the logits divided by the temperature.
        before: Confidence and accuracy of the original logits.
        after: Confidence and accuracy of the logits divided by the temperature.
        num_samples: Number of labels.
        status: Whether the slope is below ``atol``.
    """

    temperature: float
    slope: float
    loss: float
    loss_scaled: float
    before: Reliability
    after: Reliability
    num_samples: int
    status: Status

    def __float__(self) -> float:
        return self.temperature

    def __str__(self) -> str:
        return (
            f"Temperature {self.temperature:.6g} from {self.num_samples:,} samples  "
            f"[{self.status}]\n  cross-entropy {self.loss:.5g} -> {self.loss_scaled:.5g}, "
            f"calibration error {self.before.error:.4g} -> {self.after.error:.4g}"
        )


def temperature(
    risk: Risk, *, num_bins: int = 15, atol: float = 1e-10, max_steps: int = 100
) -> Temperature:
    r"""Return the :math:`T > 0` that minimises the cross-entropy of ``outputs / T``.

    .. math:: f(\beta) = \frac{1}{N} \sum_i \log \sum_c e^{\beta (z_{ic} - z_{i y_i})},
        \qquad T = 1 / \beta

    The cross-entropy :math:`f` is convex in :math:`\beta`. It is minimised by Newton's method,
    safeguarded by an interval in which :math:`f'` changes sign. Calibrate networks before you
    compare their largest eigenvalues. Cost: one forward pass. Memory: the outputs of all samples.

    Args:
        risk: Risk on *held-out* data with class labels, with any loss. On training data, networks
            are overconfident.
        num_bins: Number of bins of confidence for the calibration error.
        atol: Stop when :math:`|\beta f'(\beta)|`, the slope in :math:`\log T`, is at most this.
        max_steps: Maximum number of evaluations of :math:`f`.

    Raises:
        ValueError: There is no such temperature, because every sample is classified correctly, or
            because the outputs are no better than chance.

    Reference: Guo, Pleiss, Sun and Weinberger (2017), section 4.2; Wen et al., *Interplay between
    optimization and generalization of stochastic gradient descent with covariance noise*, section
    5.3.
    """
    check_risk(risk)
    num_bins = check_count("num_bins", num_bins)
    check_positive("atol", atol, zero=True)
    max_steps = check_count("max_steps", max_steps, low=2)
    # Compute the outputs once; f needs nothing else.
    pairs = _pairs(risk)
    loss = _CrossEntropy(risk, pairs)
    # Without a minimum, Newton's method would diverge.
    _check_minimum(loss)
    beta, slope, status = _minimum(loss, atol, max_steps)
    return Temperature(
        temperature=1 / beta,
        slope=-beta * slope,  # d/d log T = -beta d/d beta
        loss=loss(1.0)[0],
        loss_scaled=loss(beta)[0],
        before=_reliability(risk, pairs, 1.0, num_bins),
        after=_reliability(risk, pairs, beta, num_bins),
        num_samples=loss.count,
        status=status,
    )


def scaled(model: nn.Module, temperature: float | Temperature) -> nn.Module:
    """Return a module whose outputs are those of ``model`` divided by a temperature.

    The module shares the parameters of the model, with names that begin with ``model.``. The model
    is not changed.

    Args:
        model: A model that returns a tensor of logits.
        temperature: A positive number, or the result of :func:`temperature`.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    value = float(temperature) if isinstance(temperature, Temperature) else temperature
    check_positive("temperature", value)
    return ScaledModel(model, float(value))


@final
class ScaledModel(nn.Module):
    """A model with its outputs divided by a temperature; see :func:`scaled`."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature
        # A new module is in training mode; copy the mode of the model.
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the model's outputs divided by the temperature."""
        outputs = self.model(*args, **kwargs)
        if not isinstance(outputs, Tensor):
            raise TypeError(f"model must return a tensor, got {type(outputs).__name__}")
        return outputs / self.temperature

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:.6g}"


def _pairs(risk: Risk) -> Pairs:
    """Return outputs and labels of every batch of this process."""
    pairs = []
    with torch.no_grad(), risk.settings():
        for index, context, _ in risk.contexts():
            pair = outputs_and_labels(risk.loss_fn, *risk.evaluate(risk.params, context))
            if pair is None:
                raise TypeError(f"risk must have class labels, got other targets in batch {index}")
            pairs.append(pair)
    return pairs


class _CrossEntropy:
    """The function :math:`f` and its first two derivatives, over all processes."""

    def __init__(self, risk: Risk, pairs: Pairs) -> None:
        self._risk, self._pairs = risk, pairs
        # f'(0) is the mean of all gaps z_c - z_y. f'(infinity) is the mean over samples of the
        # largest gap, which is not negative.
        count, mean, largest = self._sum(
            lambda gaps: [gaps.new_ones(len(gaps)), gaps.mean(1), gaps.amax(1)]
        )
        self.count = int(count)
        self.slope_at_zero, self.slope_at_infinity = mean / count, largest / count

    def __call__(self, beta: float) -> tuple[float, float, float]:
        def terms(gaps: Tensor) -> list[Tensor]:
            # f' = E_p[gap] and f'' = Var_p[gap], with p the softmax of beta times the gaps.
            chances = (beta * gaps).softmax(1)
            means = (chances * gaps).sum(1)
            spreads = (chances * (gaps - means.unsqueeze(1)).square()).sum(1)
            return [(beta * gaps).logsumexp(1), means, spreads]

        value, slope, curvature = self._sum(terms)
        return value / self.count, slope / self.count, curvature / self.count

    def _sum(self, terms: Callable[[Tensor], list[Tensor]]) -> list[float]:
        total = torch.zeros(3, dtype=torch.float64, device=self._risk.theta.device)
        for outputs, labels in self._pairs:
            scores = outputs.double()
            # f depends only on the differences z_c - z_y from the correct class y.
            gaps = scores - scores.gather(1, labels.unsqueeze(1))
            total += torch.stack([term.sum() for term in terms(gaps)])
        sums: list[float] = self._risk.sum_over_processes(total).tolist()
        return sums


def _check_minimum(loss: _CrossEntropy) -> None:
    if not all(map(math.isfinite, (loss.slope_at_zero, loss.slope_at_infinity))):
        raise ValueError("risk must have finite outputs, got NaN or Inf")
    # If no gap is positive, the loss decreases for all beta.
    if loss.slope_at_infinity == 0:
        raise ValueError(
            "risk must have samples that are classified wrongly, otherwise the optimal temperature "
            f"is 0; got {loss.count} correct ones: use held-out data or more samples"
        )
    # A convex function whose slope at zero is not negative has no minimum for beta > 0.
    if loss.slope_at_zero >= 0:
        raise ValueError(
            "risk must have outputs better than chance, otherwise the optimal temperature is "
            f"infinite; got a slope of {loss.slope_at_zero:.3g} at zero"
        )


def _minimum(loss: _CrossEntropy, atol: float, max_steps: int) -> tuple[float, float, Status]:
    """Return the minimiser of the loss, the slope at it, and the status."""
    low, high, beta, slope = 0.0, math.inf, 1.0, math.nan
    for step in range(1, max_steps + 1):
        _, slope, curvature = loss(beta)
        if is_below(abs(beta * slope), atol):
            message = f"slope {abs(beta * slope):.1e} after {step} steps"
            return beta, slope, Status(outcome="converged", message=message)
        # f is convex: if the slope is negative, the minimum lies above beta.
        low, high = (beta, high) if slope < 0 else (low, beta)
        newton = beta - slope / curvature if curvature > 0 else math.inf
        # If Newton's step leaves the interval, bisect; without an upper end, multiply by 4.
        if not low < newton < min(high, 4 * beta):
            newton = 4 * beta if high == math.inf else (low + high) / 2
        last, beta = beta, newton
    message = f"slope {abs(last * slope):.1e}, above {atol:.1e}, after {max_steps} steps"
    status = Status(outcome="max_steps", message=message, advice="increase max_steps or atol")
    return last, slope, status


def _reliability(risk: Risk, pairs: Pairs, beta: float, num_bins: int) -> Reliability:
    sums = torch.zeros(3, num_bins, dtype=torch.float64, device=risk.theta.device)
    for outputs, labels in pairs:
        confidence, chosen = (beta * outputs.double()).softmax(1).max(1)
        # Bin b contains (b / n, (b + 1) / n].
        bins = (confidence * num_bins).ceil().long().sub_(1).clamp_(0, num_bins - 1)
        right = (chosen == labels).double()
        sums.index_add_(1, bins, torch.stack([torch.ones_like(right), confidence, right]))
    # sum_b n_b/N |accuracy_b - confidence_b| = sum_b |right_b - confidence_b| / N, with sums on the
    # right
    counts, confidence, right = risk.sum_over_processes(sums).cpu()
    return Reliability(
        error=float((right - confidence).abs().sum() / counts.sum()),
        edges=torch.linspace(0, 1, num_bins + 1, dtype=torch.float64),
        counts=counts,
        confidence=confidence / counts,
        accuracy=right / counts,
    )


# ------------------------------------------------------------------------------------------
# The largest eigenvalue of a calibrated network.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedSharpness(HasStatus):
    r"""The largest eigenvalue of a network with folded batch norm and calibrated outputs.

    Attributes:
        lambda_max: :math:`\lambda_1` of the calibrated network on the data.
        residual: :math:`\|H u - \lambda_1 u\|`. An eigenvalue lies within this distance.
        temperature: Temperature fitted to held-out data, with calibration errors.
        num_folded: Number of batch norms that were folded into the layers before them.
        unfolded: Names of batch norms that could not be folded. Rescaling the layers before them
            changes :math:`\lambda_1`.
        matrix: ``hessian`` or ``ggn``.
        num_samples: Number of samples of the data.
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
        lines = [
            f"Calibrated sharpness: lambda_max = {self.lambda_max:.6g} (residual "
            f"{self.residual:.2g}) of the {self.matrix}, {self.num_samples:,} samples",
            f"[{self.status}]",
            f"batch norms folded: {self.num_folded}{left}",
            *str(self.temperature).splitlines(),
        ]
        return "\n  ".join(lines)


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
    r"""Return a largest eigenvalue that is comparable between networks and between runs.

    First, batch norm is folded into the layers before it (see :func:`fold_batch_norm`). Then the
    outputs are divided by the temperature that minimises the cross-entropy of held-out data (see
    :func:`temperature`). Neither the scale of the layers nor the confidence of the network then has
    much effect on

    .. math:: \lambda_1\big(\nabla^2 L(w)\big), \quad L(w) = \frac1N \sum_i
        \ell(f_w(x_i) / T, y_i)

    Cost: one forward pass over the held-out data, and one eigenvalue by Lanczos.

    Args:
        model: A trained model; it is not changed.
        risk: Function from a model to its :class:`Risk` on the data to measure on, such as
            ``lambda m: Risk(m, cross_entropy, train)``.
        held_out: Function from a model to its :class:`Risk` on held-out data, to which the
            temperature is fitted.
        matrix: ``hessian`` or ``ggn``.
        rtol: Residual of the eigenvalue relative to the norm of the matrix.
        max_steps: Maximum number of products.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
    descent with covariance noise*, section 5.3.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    for name, make in (("risk", risk), ("held_out", held_out)):
        if not callable(make):
            kind = type(make).__name__
            raise TypeError(f"{name} must be a function from a model to its Risk, got {kind}")
    # Folding does not change the outputs, so the temperature may be fitted afterwards.
    folded = fold_batch_norm(model, strict=False)
    remaining = tuple(batch_norms(folded))
    held_out_risk = held_out(folded)
    check_type("held_out(model)", held_out_risk, Risk, "a ritz.Risk")
    calibration = temperature(held_out_risk)
    # The curvature of the loss of f / T does not depend on the confidence of the network.
    calibrated = risk(scaled(folded, calibration))
    check_type("risk(model)", calibrated, Risk, "a ritz.Risk")
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
        # Report a temperature that has not converged before the status of the eigenvalue.
        status=(calibration.status if calibration.status.outcome != "converged" else pairs.status),
    )


# ------------------------------------------------------------------------------------------
# The two terms of the excess risk that depend on training.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessRisk:
    r"""Generalisation and optimisation error of a network; see :func:`excess_risk`.

    Attributes:
        generalisation: :math:`T_1`, the loss on held-out data minus the loss on training data.
        optimisation: :math:`T_2`, the loss on training data minus ``minimum``.
        train: Loss on training data.
        held_out: Loss on held-out data.
        minimum: Smallest possible loss on training data, or a lower bound on it such as 0. With a
            lower bound, ``optimisation`` is an upper bound.
    """

    generalisation: float
    optimisation: float
    train: float
    held_out: float
    minimum: float

    def __str__(self) -> str:
        return (
            f"Excess risk at most {self.generalisation + self.optimisation:.6g}\n"
            f"  generalisation error {self.generalisation:.6g}: loss {self.held_out:.6g} on "
            f"held-out data, {self.train:.6g} on training data\n"
            f"  optimisation error {self.optimisation:.6g}: above a minimum of {self.minimum:.6g}"
        )


def excess_risk(train: Risk, held_out: Risk, *, minimum: float = 0.0) -> ExcessRisk:
    r"""Return the generalisation and the optimisation error of a network.

    .. math:: L_\text{true}(w) - L^* \le
        \underbrace{L_\text{true}(w) - L(w)}_{T_1} + \underbrace{L(w) - \min L}_{T_2}
        \quad\text{in expectation}

    The true loss is estimated by the loss on held-out data. Neither loss includes an L2 term. Cost:
    one forward pass over both data sets.

    Args:
        train: The risk on training data.
        held_out: The risk of the same weights on held-out data.
        minimum: Smallest possible loss on training data, or a lower bound on it.

    Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
    descent with covariance noise*, section 2.1, equation 1.
    """
    check_type("train", train, Risk, "a ritz.Risk")
    check_type("held_out", held_out, Risk, "a ritz.Risk")
    check_range("minimum", minimum)
    losses = [risk.without_l2().loss() for risk in (train, held_out)]
    if not is_below(minimum, losses[0]):
        raise ValueError(
            f"minimum must be at most {losses[0]:.6g}, the loss on train, got {minimum}"
        )
    # T_1 = L_held_out - L_train and T_2 = L_train - min L
    return ExcessRisk(
        generalisation=losses[1] - losses[0],
        optimisation=losses[0] - minimum,
        train=losses[0],
        held_out=losses[1],
        minimum=minimum,
    )
