"""Loss, accuracy and norms (`summary`), gradients of samples, and distance from other weights."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from ritz._core.batch_norm import batch_norms
from ritz._core.checks import check_choice, check_count, check_type
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.curvature._losses import num_correct
from ritz.curvature._parameters import ROUNDOFF, as_double
from ritz.curvature._risk import Risk, check_risk
from ritz.curvature._sample_gradients import sample_gradient_parts


@dataclass(frozen=True, slots=True)
class Tuning:
    """The default of ``chunk_size``."""

    # Entries of whole sample gradients at once: 256 MB in float64.
    entries: int = 2**25


TUNING = Tuning()

By = Literal["sample", "batch"]
SQUARES = ("mean_square", "gradient_square", "total_variance")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    r"""A risk in a few numbers.

    Attributes:
        loss: The loss with its L2 term.
        accuracy: Fraction of class labels predicted correctly, without ignored labels; ``None`` if
            targets are not class labels.
        gradient_norm: :math:`\|\nabla L\|`.
        weight_norm: :math:`\|\theta\|_2`.
        weight_max: :math:`\|\theta\|_\infty`.
        num_samples: :math:`N`.
        num_parameters: :math:`P`.
        batch_norm: The mode of batch norm; ``None`` for a model without batch norm.
        weighted_by: What :math:`N` counts: ``samples``, or ``labels that are not ignored`` if the
            model returns a mean over tokens.
    """

    loss: float
    accuracy: float | None
    gradient_norm: float
    weight_norm: float
    weight_max: float
    num_samples: int
    num_parameters: int
    batch_norm: str | None
    weighted_by: str = "samples"

    def __str__(self) -> str:
        correct = "" if self.accuracy is None else f", accuracy {self.accuracy:.2%}"
        mode = "" if self.batch_norm is None else f", batch norm {self.batch_norm}"
        return (
            f"loss {self.loss:.6g}{correct}, |gradient| {self.gradient_norm:.4g}, "
            f"|theta| {self.weight_norm:.5g}, max |theta_i| {self.weight_max:.4g}  "
            f"[{self.num_parameters:,} parameters, {self.num_samples:,} {self.weighted_by}{mode}]"
        )


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    r"""The distance of weights :math:`\theta` from other weights :math:`\theta_0`.

    Attributes:
        l2: :math:`\|\theta - \theta_0\|_2`.
        linf: :math:`\|\theta - \theta_0\|_\infty`.
        cosine: Cosine of the angle between :math:`\theta` and :math:`\theta_0`; NaN if one is zero.
        initial_norm: :math:`\|\theta_0\|_2`.
        layers: ``(l2, linf, cosine, initial_norm)`` of each parameter tensor by name.
        names: The names in order.
    """

    l2: float
    linf: float
    cosine: float
    initial_norm: float
    layers: dict[str, tuple[float, float, float, float]]
    names: tuple[str, ...]

    def __str__(self) -> str:
        whole = (self.l2, self.linf, self.cosine, self.initial_norm)
        return layer_table(self, whole, ("L2", "Linf", "cosine", "from norm"))


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStatistics:
    r"""Mean and variance of the gradients :math:`g_i` of all samples or batches.

    Attributes:
        mean: :math:`g = \mathbb{E} g_i`, ``(P,)``, float64.
        variance: :math:`\mathbb{E} g_i^2 - g^2` of each parameter, ``(P,)``, float64.
        mean_square: :math:`\mathbb{E} \|g_i\|^2`.
        gradient_square: :math:`\|g\|^2`.
        total_variance: :math:`\mathbb{E} \|g_i\|^2 - \|g\|^2`.
        layers: ``(mean_square, gradient_square, total_variance)`` of each parameter tensor by name.
        names: The names in order.
        by: ``sample`` or ``batch``: what :math:`i` counts.
        num_gradients: Number of gradients.
        method: How they were computed.
    """

    mean: Tensor
    variance: Tensor
    mean_square: float
    gradient_square: float
    total_variance: float
    layers: dict[str, tuple[float, float, float]]
    names: tuple[str, ...]
    by: str
    num_gradients: int
    method: str

    def __str__(self) -> str:
        whole = (self.mean_square, self.gradient_square, self.total_variance)
        table = layer_table(self, whole, ("E|g_i|^2", "|E g_i|^2", "variance"))
        return f"{self.num_gradients:,} gradients, one per {self.by} ({self.method})\n{table}"


def layer_table(result: Any, whole: Sequence[float], titles: Sequence[str]) -> str:
    """Return a table with one row for all parameters and one per parameter tensor of a result."""
    rows = {"all": whole} | {name: result.layers[name] for name in result.names}
    width = max(map(len, rows))
    lines = ["".join([" " * width, *(f"{title:>12}" for title in titles)])]
    for name, values in rows.items():
        lines.append("".join([f"{name:{width}}", *(f"{value:12.4g}" for value in values)]))
    return "\n".join(lines)


def summary(risk: Risk) -> Summary:
    """Return the loss, the accuracy, and the norms of gradient and weights.

    It costs one gradient and one forward pass. Sums over batches are in float64. Memory: three
    vectors.

    Args:
        risk: A :class:`Risk`.
    """
    check_risk(risk)
    gradient = torch.zeros_like(risk.theta, dtype=torch.float64)
    sums = torch.zeros(3, dtype=torch.float64, device=risk.theta.device)  # loss, correct, labels
    with risk.settings():
        for _, context, weight in risk.contexts():
            batch_gradient, loss = risk.batch_gradient(context)
            gradient.add_(batch_gradient, alpha=weight)
            with torch.no_grad():
                outputs, target = risk.evaluate(risk.params, context)
            sums += sums.new_tensor(
                [weight * float(loss), *num_correct(risk.loss_fn, outputs, target)]
            )
    risk.sum_over_processes(gradient)
    loss, correct, labels = risk.sum_over_processes(sums).tolist()
    # The L2 term (mu / 2) |theta|^2 has the gradient mu theta.
    theta = risk.theta.double()
    gradient.add_(theta, alpha=risk.l2)
    return Summary(
        loss=loss + 0.5 * risk.l2 * float(theta.square().sum()),
        accuracy=correct / labels if labels else None,
        gradient_norm=float(gradient.norm()),
        weight_norm=float(theta.norm()),
        weight_max=float(theta.abs().max()),
        num_samples=risk.num_samples,
        weighted_by="labels that are not ignored" if risk.adapter.by_label else "samples",
        num_parameters=risk.space.size,
        batch_norm=risk.batch_norm if batch_norms(risk.model) else None,
    )


def distance(risk: Risk, initial: Tensor | Mapping[str, Tensor] | nn.Module) -> Distance:
    r"""Return the distance :math:`\|\theta - \theta_0\|` from other weights, total and per tensor.

    It is computed in float64 and needs no matrix-vector products.

    Args:
        risk: A :class:`Risk` at the current weights.
        initial: The other weights: a vector ``(P,)``, a ``state_dict`` or a module. From a
            ``state_dict`` or a module, the parameters of the risk are taken.
    """
    check_risk(risk)
    start, now = _flatten(risk, initial), risk.theta.double()
    starts = risk.space.unflatten(start)
    layers = {
        name: _compare(value.reshape(-1), starts[name].reshape(-1))
        for name, value in risk.space.unflatten(now).items()
    }
    l2, linf, cosine, norm = _compare(now, start)
    names = tuple(layers)
    return Distance(l2=l2, linf=linf, cosine=cosine, initial_norm=norm, layers=layers, names=names)


def _flatten(risk: Risk, initial: Tensor | Mapping[str, Tensor] | nn.Module) -> Tensor:
    if isinstance(initial, Tensor):
        if initial.shape != risk.theta.shape:
            raise ValueError(f"initial must be ({risk.space.size},), got {tuple(initial.shape)}")
        return initial.detach().to(risk.theta.device).double()
    named = initial.state_dict() if isinstance(initial, nn.Module) else initial
    check_type("initial", named, Mapping, "a vector, a state_dict or a module")
    if missing := [name for name in risk.space.shapes if name not in named]:
        raise ValueError(
            f"initial must contain all parameters of the risk, got one without {missing}"
        )
    chosen = {name: named[name].detach().to(risk.theta.device) for name in risk.space.shapes}
    return risk.space.flatten(chosen).double()


def _compare(now: Tensor, start: Tensor) -> tuple[float, float, float, float]:
    gap, norms = now - start, float(now.norm()) * float(start.norm())
    cosine = float(now @ start) / norms if norms else math.nan
    return float(gap.norm()), float(gap.abs().max()), cosine, float(start.norm())


# ------------------------------------------------------------------------------------------
# Gradients of all samples or batches.


def gradient_statistics(
    risk: Risk,
    *,
    by: By = "sample",
    chunk_size: int | None = None,
    progress: bool | Progress = False,
) -> GradientStatistics:
    r"""Return mean, mean square and variance of the gradients of all samples or batches.

    .. math:: g = \frac{1}{N} \sum_i g_i, \quad
        \operatorname{Var} = \frac{1}{N} \sum_i \|g_i\|^2 - \|g\|^2

    The statistics are returned in total, per parameter and per parameter tensor. Every :math:`g_i`
    includes the L2 term. With ``by="sample"``, the loss of each batch must be the mean over its
    samples, which is checked. With ``by="batch"``, batches are weighted by their number of samples.

    The cost is one gradient per sample or batch. Samples are vectorised if the model allows it.
    Sums are in float64. Memory: five vectors of float64 and a chunk of gradients.

    Args:
        risk: A :class:`Risk`.
        by: ``sample`` or ``batch``. With ``batch_norm="train"`` only ``batch`` is possible.
        chunk_size: Number of sample gradients in memory at once. Defaults to as many as have
            :math:`2^{25}` entries, and at least one.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Section 5 and Fig. 2 of *Interplay Between Optimization and Generalization of SGD
    with Covariance Noise*.
    """
    check_risk(risk)
    check_choice("by", by, ("sample", "batch"))
    if chunk_size is None:
        chunk_size = max(1, TUNING.entries // risk.space.size)
    chunk_size = check_count("chunk_size", chunk_size)
    if by == "sample":
        risk.require_separable("gradient_statistics(by='sample')")
        risk.require_sample_mean(alone=True)
    moments, problems = _Moments(risk), list[str]()
    with tracking(progress, "gradients", risk.num_batches) as bar, risk.settings():
        for done, (_, context, weight) in enumerate(risk.contexts(), 1):
            if by == "batch":
                moments.add(risk.batch_gradient(context)[0][None], weight)
            else:
                for parts in sample_gradient_parts(risk, context, chunk_size, problems):
                    chunk = torch.cat([part.flatten(1) for part in parts.values()], 1)
                    moments.add(chunk, weight * len(chunk) / context.size)
            bar.update(done)
    mean, variance, count = moments.totals()
    if not math.isfinite(float(mean.sum() + variance.sum())):
        risk.diagnose()
        raise ValueError("all gradients must be finite, got NaN or Inf for at least one sample")
    # The L2 term adds mu theta to every gradient, which changes the mean and not the variance.
    mean.add_(risk.theta, alpha=risk.l2)
    means, variances = risk.space.unflatten(mean), risk.space.unflatten(variance)
    method = "side by side" if by == "sample" else "one by one"
    if problems:
        method = f"one by one, as they cannot be vectorised: {problems[0]}"
    return GradientStatistics(
        mean=mean,
        variance=variance,
        **dict(zip(SQUARES, _squares(mean, variance), strict=True)),
        layers={name: _squares(means[name], variances[name]) for name in means},
        names=tuple(means),
        by=by,
        num_gradients=count,
        method=method,
    )


def _squares(mean: Tensor, variance: Tensor) -> tuple[float, float, float]:
    # E |g_i|^2 = |g|^2 + Var
    of_mean, spread = float(mean.square().sum()), float(variance.sum())
    return of_mean + spread, of_mean, spread


@final
class _Moments:
    """Weighted mean and sum of squared deviations (Chan, Golub and LeVeque, 1983).

    The difference E g^2 - (E g)^2 would suffer from cancellation. Deviations from the running mean
    do not.
    """

    def __init__(self, risk: Risk) -> None:
        self._risk = risk
        self._mean = torch.zeros_like(risk.theta, dtype=torch.float64)
        self._squares = torch.zeros_like(self._mean)
        self._weight, self._count = 0.0, 0

    def add(self, gradients: Tensor, weight: float) -> None:
        """Add gradients ``(c, P)`` of equal weights that sum to ``weight``."""
        share = weight / len(gradients)
        mean = gradients.mean(0, dtype=torch.float64)
        for gradient in gradients:
            self._squares.add_((gradient - mean).square_(), alpha=share)
        # S = S_a + S_b + (m_a - m_b)^2 w_a w_b / (w_a + w_b)
        step = mean.sub_(self._mean)
        total = self._weight + weight
        self._squares.add_(step.square(), alpha=self._weight * weight / total)
        self._mean.add_(step, alpha=weight / total)
        self._weight, self._count = total, self._count + len(gradients)

    def totals(self) -> tuple[Tensor, Tensor, int]:
        """Return the mean, the variance and the number of gradients, over all processes."""
        risk = self._risk
        counts = torch.tensor([self._weight, self._count], dtype=torch.float64)
        weight, count = risk.sum_over_processes(counts.to(self._mean.device)).tolist()
        # Over processes p: m = sum w_p m_p / w, and S = sum (S_p + w_p (m_p - m)^2).
        mean = risk.sum_over_processes(self._mean * (self._weight / weight))
        squares = self._squares.add_((self._mean - mean).square_(), alpha=self._weight)
        return mean, risk.sum_over_processes(squares).div_(weight), int(count)


# ------------------------------------------------------------------------------------------
# Roundoff in gradients.


def gradient_roundoff(risk: Risk) -> tuple[float, float]:
    """Return the root mean square error and norm of the gradients of single batches.

    The gradients of up to eight batches are compared with those in float64. The error is zero in
    float64, for models of more than 2^26 parameters, and if the model cannot be called in float64
    or memory is short.
    """
    if risk.theta.dtype == torch.float64 or len(risk.theta) > ROUNDOFF.parameters:
        return 0.0, 0.0
    # A model can raise any error if its data are float64. If one process failed and raised, the
    # others would wait for it forever.
    total = torch.zeros(3, dtype=torch.float64)
    with suppress(Exception):
        total = _compare_gradients(risk)
    gap, size, count = risk.sum_over_processes(total.to(risk.theta.device)).tolist()
    return (math.sqrt(gap / count), math.sqrt(size / count)) if count else (0.0, 0.0)


def _compare_gradients(risk: Risk) -> Tensor:
    """Return the sums of squares of errors and of gradients of a few batches, and their number."""
    precise = risk.in_float64()
    # The same batches for any number of processes.
    step, sums = -(-risk.num_batches // ROUNDOFF.compared), torch.zeros(3, dtype=torch.float64)
    for index, context, _ in risk.contexts():
        if index % step:
            continue
        with risk.settings():
            gradient = risk.batch_gradient(context)[0].double()
        with precise.settings():
            exact = precise.batch_gradient(as_double(context))[0]
        gap, size = (float(part.square().sum()) for part in (gradient - exact, exact))
        sums += torch.tensor([gap, size, 1.0], dtype=torch.float64)
    return sums
