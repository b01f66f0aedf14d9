"""``temperature``: rescale logits so that their softmax is calibrated; reliability in bins."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ritz._core.checks import check_count, check_positive, check_range, is_below
from ritz._core.results import HasStatus, Status
from ritz._core.storage import storable
from ritz.curvature import Risk
from ritz.curvature._shared import outputs_and_labels

Pairs = list[tuple[Tensor, Tensor]]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    r"""Confidence and accuracy by bins of confidence.

    Attributes:
        error: Expected calibration error
            :math:`\sum_b \frac{n_b}{N} |\text{accuracy}_b - \text{confidence}_b|`.
        edges: Evenly spaced edges of the bins from 0 to 1, ``(num_bins + 1,)``. A bin includes its
            upper edge.
        counts: Number of samples per bin, ``(num_bins,)``.
        confidence: Mean of the largest probability per bin, ``(num_bins,)``; NaN if it is empty.
        accuracy: Fraction of correct predictions per bin, ``(num_bins,)``; NaN if it is empty.
    """

    error: float
    edges: Tensor
    counts: Tensor
    confidence: Tensor
    accuracy: Tensor


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature(HasStatus):
    """Temperature that calibrates a network.

    Attributes:
        temperature: Divide the logits by it. Above 1 the network was overconfident.
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
            f"temperature {self.temperature:.6g} from {self.num_samples} samples: cross-entropy "
            f"{self.loss:.5g} -> {self.loss_scaled:.5g}, calibration error "
            f"{self.before.error:.4g} -> {self.after.error:.4g}  [{self.status}]"
        )


def temperature(
    risk: Risk, *, num_bins: int = 15, atol: float = 1e-10, max_steps: int = 100
) -> Temperature:
    r"""Return the :math:`T > 0` that minimises the cross-entropy of ``outputs / T``.

    .. math:: f(\beta) = \frac{1}{N} \sum_i \log \sum_c e^{\beta (z_{ic} - z_{i y_i})},
        \qquad T = 1 / \beta

    is convex in :math:`\beta`. It is minimised by Newton's method inside an interval in which
    :math:`f'` changes sign. Calibrate networks before you compare their largest eigenvalues. Cost:
    one forward pass. Memory: the outputs of all samples.

    Args:
        risk: Risk of *held-out* data with class labels, with any loss. On its training data a
            network is always overconfident.
        num_bins: Number of bins of confidence for the calibration error.
        atol: Stop when :math:`|\beta f'(\beta)|`, the slope in :math:`\log T`, is at most this.
        max_steps: Maximum number of evaluations of :math:`f`.

    Raises:
        ValueError: No such temperature exists, because every sample is classified correctly, or
            because the outputs are no better than chance.

    Reference: Guo, Pleiss, Sun and Weinberger (2017), section 4.2; Wen et al., *Interplay between
    optimization and generalization of stochastic gradient descent with covariance noise*, section
    5.3.
    """
    num_bins = check_count("num_bins", num_bins)
    check_range("atol", atol, low=0.0)
    max_steps = check_count("max_steps", max_steps, low=2)
    # The outputs are computed once, and f is evaluated from them for several beta.
    pairs = _pairs(risk)
    loss = _CrossEntropy(risk, pairs)
    # Without a minimum Newton's method would diverge.
    _check_minimum(loss)
    beta, slope, status = _minimum(loss, atol, max_steps)
    # z / T = beta z
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

    It shares the parameters of the model, which is not changed; their names begin with ``model.``.

    Args:
        model: A model that returns a tensor of logits.
        temperature: Positive temperature.
    """
    value = float(temperature)
    check_positive("temperature", value)
    return ScaledModel(model, value)


@final
class ScaledModel(nn.Module):
    """A model with its outputs divided by a temperature; see :func:`scaled`."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature
        # A new module is in training mode; use the mode of the model.
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
                raise TypeError(f"risk must have class labels, got others in batch {index}")
            pairs.append(pair)
    return pairs


class _CrossEntropy:
    """The function :math:`f` with two derivatives, over all processes."""

    def __init__(self, risk: Risk, pairs: Pairs) -> None:
        self._risk, self._pairs = risk, pairs
        # f'(0) is the mean of the gaps z_c - z_y, and f'(infinity) the mean of the largest gaps,
        # which is not negative.
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
            # f depends on the differences z_c - z_y from the right class only.
            gaps = scores - scores.gather(1, labels.unsqueeze(1))
            total += torch.stack([term.sum() for term in terms(gaps)])
        sums: list[float] = self._risk.sum_over_processes(total).tolist()
        return sums


def _check_minimum(loss: _CrossEntropy) -> None:
    if not all(map(math.isfinite, (loss.slope_at_zero, loss.slope_at_infinity))):
        raise ValueError("outputs must be finite, got NaN or Inf")
    # If no gap is positive, the loss decreases for all beta.
    if loss.slope_at_infinity == 0:
        raise ValueError(
            f"the optimal temperature is 0: all {loss.count} samples are classified correctly; use "
            "held-out data or more samples"
        )
    # A convex function whose slope at zero is not negative has no minimum for beta > 0.
    if loss.slope_at_zero >= 0:
        raise ValueError(
            "the optimal temperature is infinite: the outputs are no better than chance"
        )


def _minimum(loss: _CrossEntropy, atol: float, max_steps: int) -> tuple[float, float, Status]:
    """Return the minimiser, the slope there and the status."""
    low, high, beta, slope = 0.0, math.inf, 1.0, math.nan
    for step in range(1, max_steps + 1):
        _, slope, curvature = loss(beta)
        if is_below(abs(beta * slope), atol):
            message = f"slope {abs(beta * slope):.1e} after {step} steps"
            return beta, slope, Status(outcome="converged", message=message)
        # f is convex: the minimum lies above beta where the slope is negative.
        low, high = (beta, high) if slope < 0 else (low, beta)
        following = beta - slope / curvature if curvature > 0 else math.inf
        # Newton's step must stay inside the interval; otherwise bisect, or go up by a factor of 4.
        if not low < following < min(high, 4 * beta):
            following = 4 * beta if high == math.inf else (low + high) / 2
        last, beta = beta, following
    message = f"slope {abs(last * slope):.1e}, above {atol:.1e}, after {max_steps} steps"
    status = Status(outcome="max_steps", message=message, advice="increase max_steps or atol")
    return last, slope, status


def _reliability(risk: Risk, pairs: Pairs, beta: float, num_bins: int) -> Reliability:
    sums = torch.zeros(3, num_bins, dtype=torch.float64, device=risk.theta.device)
    for outputs, labels in pairs:
        confidence, chosen = (beta * outputs.double()).softmax(1).max(1)
        # Bin b holds (b / n, (b + 1) / n].
        bins = (confidence * num_bins).ceil().long().sub_(1).clamp_(0, num_bins - 1)
        right = (chosen == labels).double()
        sums.index_add_(1, bins, torch.stack([torch.ones_like(right), confidence, right]))
    # sum_b n_b/N |acc_b - conf_b| = sum_b |right_b - confidence_b| / N
    counts, confidence, right = risk.sum_over_processes(sums).cpu()
    return Reliability(
        error=float((right - confidence).abs().sum() / counts.sum()),
        edges=torch.linspace(0, 1, num_bins + 1, dtype=torch.float64),
        counts=counts,
        confidence=confidence / counts,
        accuracy=right / counts,
    )
