"""What a risk says of itself: loss, accuracy, gradients over samples, weights and their way."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from ritz._core.batches import is_rows
from ritz._core.checks import check_choice, check_count
from ritz._core.modes import batch_norms
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.curvature._risk import Context, Params, Risk, num_correct

By = Literal["sample", "batch"]
CHUNK = 2**25  # entries of the gradients that are held at once


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    r"""A risk in a few numbers.

    Attributes:
        loss: With the L2 term, if there is one.
        accuracy: Share of the class labels that the largest output meets (ignored labels left
            out); ``None`` where targets are not class labels.
        gradient_norm: :math:`\|\nabla L\|`.
        weight_norm: :math:`\|\theta\|_2`.
        weight_max: :math:`\|\theta\|_\infty`.
        num_samples: :math:`N`.
        num_parameters: :math:`P`.
        batch_norm: The mode of batch norm; ``None`` for a model without.
    """

    loss: float
    accuracy: float | None
    gradient_norm: float
    weight_norm: float
    weight_max: float
    num_samples: int
    num_parameters: int
    batch_norm: str | None

    def __str__(self) -> str:
        correct = "" if self.accuracy is None else f", accuracy {self.accuracy:.2%}"
        mode = "" if self.batch_norm is None else f", batch norm {self.batch_norm}"
        return (
            f"loss {self.loss:.6g}{correct}, |gradient| {self.gradient_norm:.4g}, "
            f"|theta| {self.weight_norm:.5g}, max |theta_i| {self.weight_max:.4g}  "
            f"[{self.num_parameters:,} parameters, {self.num_samples:,} samples{mode}]"
        )


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    r"""How far weights have gone from where they began.

    Attributes:
        l2: :math:`\|\theta - \theta_0\|_2`.
        linf: :math:`\|\theta - \theta_0\|_\infty`.
        cosine: Of the angle between the two; NaN where one of them is zero.
        initial_norm: :math:`\|\theta_0\|_2`.
        layers: ``(l2, linf, cosine, initial_norm)`` of every parameter tensor by its name.
        names: The names in their order.
    """

    l2: float
    linf: float
    cosine: float
    initial_norm: float
    layers: dict[str, tuple[float, float, float, float]]
    names: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.names, "all"))
        lines = [f"{'':{width}}  {'L2':>10}  {'Linf':>10}  {'cosine':>7}  {'from norm':>10}"]
        whole = (self.l2, self.linf, self.cosine, self.initial_norm)
        for name in ("all", *self.names):
            l2, linf, cosine, norm = self.layers.get(name, whole)
            lines.append(f"{name:{width}}  {l2:10.4g}  {linf:10.4g}  {cosine:7.4f}  {norm:10.4g}")
        return "\n".join(lines)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStatistics:
    r"""Mean and spread of the gradients :math:`g_i` of samples or batches; exact, over all of them.

    Attributes:
        mean: :math:`g = \mathbb{E} g_i`, ``(P,)``, float64.
        variance: :math:`\mathbb{E} g_i^2 - g^2` of every parameter, ``(P,)``, float64.
        mean_square: :math:`\mathbb{E} \|g_i\|^2`.
        gradient_square: :math:`\|g\|^2`.
        total_variance: :math:`\mathbb{E} \|g_i\|^2 - \|g\|^2`.
        layers: ``(mean_square, gradient_square, total_variance)`` of every parameter tensor by
            its name.
        names: The names in their order.
        by: Whether :math:`i` is a sample or a batch.
        num_gradients: How many there are.
        method: How they were found.
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
        width = max(len(name) for name in (*self.names, "all"))
        lines = [
            f"{self.num_gradients:,} gradients, one a {self.by} ({self.method})",
            f"{'':{width}}  {'E|g_i|^2':>10}  {'|E g_i|^2':>10}  {'variance':>10}",
        ]
        whole = (self.mean_square, self.gradient_square, self.total_variance)
        for name in ("all", *self.names):
            square, of_mean, spread = self.layers.get(name, whole)
            lines.append(f"{name:{width}}  {square:10.4g}  {of_mean:10.4g}  {spread:10.4g}")
        return "\n".join(lines)


def summary(risk: Risk) -> Summary:
    """Return loss, accuracy, norms of gradient and weights.

    One gradient and one forward pass; sums over batches in float64. Memory: three vectors.

    Args:
        risk: The loss at a point.
    """
    device = risk.theta.device
    gradient = torch.zeros_like(risk.theta, dtype=torch.float64)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct labels, labels
    with risk.settings():
        for _, context, weight in risk.contexts():
            found, loss = risk.batch_gradient(context)
            gradient.add_(found, alpha=weight)
            with torch.no_grad():
                outputs, target = risk.evaluate(risk.params, context)
            correct, labels = num_correct(risk.loss_fn, outputs, target)
            sums += sums.new_tensor([weight * float(loss), correct, labels])
    risk.reduced(gradient)
    loss, correct, labels = risk.reduced(sums).tolist()
    theta = risk.theta.double()
    gradient.add_(theta, alpha=risk.l2)
    return Summary(
        loss=loss + 0.5 * risk.l2 * float(theta.square().sum()),
        accuracy=correct / labels if labels else None,
        gradient_norm=float(gradient.norm()),
        weight_norm=float(theta.norm()),
        weight_max=float(theta.abs().max()),
        num_samples=risk.num_samples,
        num_parameters=risk.space.size,
        batch_norm=risk.batch_norm if batch_norms(risk.model) else None,
    )


def distance(risk: Risk, initial: Tensor | Mapping[str, Tensor] | nn.Module) -> Distance:
    r"""Return the distance :math:`\|\theta - \theta_0\|` from other weights, whole and by tensor.

    No product; computed in float64.

    Args:
        risk: Where the weights are now.
        initial: Where they began: a vector ``(P,)``, a ``state_dict`` or a module; of the latter
            two, the parameters of the risk are taken.
    """
    begun, now = _flat(risk, initial), risk.theta.double()
    layers = {
        name: _apart(value.reshape(-1), risk.space.unflatten(begun)[name].reshape(-1))
        for name, value in risk.space.unflatten(now).items()
    }
    l2, linf, cosine, norm = _apart(now, begun)
    names = tuple(layers)
    return Distance(l2=l2, linf=linf, cosine=cosine, initial_norm=norm, layers=layers, names=names)


def gradient_statistics(
    risk: Risk,
    *,
    by: By = "sample",
    chunk_size: int | None = None,
    progress: bool | Progress = False,
) -> GradientStatistics:
    r"""Return mean, mean square and variance of the gradients of all samples, or of all batches.

    .. math:: g = \frac{1}{N} \sum_i g_i, \quad
        \operatorname{Var} = \frac{1}{N} \sum_i \|g_i\|^2 - \|g\|^2

    Whole, by parameter and by parameter tensor. The L2 term belongs to every :math:`g_i`. For
    samples, the loss of a batch must be the mean of those of its samples, which is checked; batches
    count by their numbers of samples. Cost: a gradient of the whole and one of every sample, side
    by side where the model can be vectorised. Memory: five vectors of float64 and a chunk of
    gradients, at most about :math:`2^{25}` entries (or one gradient) by default. Sums and
    differences in float64.

    Args:
        risk: The loss at a point.
        by: ``sample``, or ``batch`` (also for batch statistics, where there is no other).
        chunk_size: Samples whose gradients are held at once.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Section 5 and Fig. 2 of *Interplay Between Optimization and Generalization of SGD
    with Covariance Noise*.
    """
    check_choice("by", by, ("sample", "batch"))
    if chunk_size is None:
        chunk_size = max(1, CHUNK // risk.space.size)
    check_count("chunk_size", chunk_size)
    if by == "sample":
        risk.require_separable("gradient_statistics(by='sample')")
    moments, gradients = _Moments(risk), _Gradients(risk, chunk_size)
    whole = torch.zeros_like(risk.theta, dtype=torch.float64)
    with tracking(progress, "gradients", risk.num_batches) as bar, risk.settings():
        for done, (index, context, weight) in enumerate(risk.contexts()):
            size, gradient = risk.batch_sizes[index], risk.batch_gradient(context)[0]
            whole.add_(gradient, alpha=weight)
            chunks = [gradient[None]] if by == "batch" else gradients.of_samples(context, size)
            for chunk in chunks:
                moments.add(chunk, size if by == "batch" else len(chunk))
            bar.update(done + 1)
    mean, variance, count = moments.reduced()
    _check_mean(risk, risk.reduced(whole), mean, variance)
    return _gathered(risk, mean.add_(risk.theta, alpha=risk.l2), variance, by, count, gradients)


def _check_mean(risk: Risk, whole: Tensor, mean: Tensor, variance: Tensor) -> None:
    gap = float((whole - mean).norm())
    scale = float((mean.square() + variance).sum().sqrt())
    if not math.isfinite(gap + scale):
        risk.diagnose()
        raise ValueError("the gradient of every sample must be finite, got NaN or Inf for one")
    if gap > 10 * math.sqrt(torch.finfo(risk.theta.dtype).eps) * scale:
        raise ValueError("the loss of a batch must be the mean of those of its samples, got "
                         f"gradients that differ by {gap:.2g} of {scale:.2g}")  # fmt: skip


@final
class _Moments:
    """Weighted mean and sum of squared deviations: merged, so that nothing cancels."""

    def __init__(self, risk: Risk) -> None:
        self._risk = risk
        self._mean = torch.zeros_like(risk.theta, dtype=torch.float64)
        self._squares = torch.zeros_like(self._mean)
        self._weight, self._count = 0.0, 0

    def add(self, gradients: Tensor, weight: float) -> None:
        """Gradients ``(c, P)`` of equal weights that sum to ``weight``."""
        share = weight / len(gradients)
        mean = gradients.mean(0, dtype=torch.float64)
        for gradient in gradients:
            self._squares.add_((gradient - mean).square_(), alpha=share)
        step = mean.sub_(self._mean)
        total = self._weight + weight
        self._squares.add_(step.square(), alpha=self._weight * weight / total)
        self._mean.add_(step, alpha=weight / total)
        self._weight, self._count = total, self._count + len(gradients)

    def reduced(self) -> tuple[Tensor, Tensor, int]:
        """Mean, variance and number over all processes."""
        risk = self._risk
        counts = torch.tensor([self._weight, self._count], dtype=torch.float64)
        weight, count = risk.reduced(counts.to(self._mean.device)).tolist()
        mean = risk.reduced(self._mean * (self._weight / weight))
        squares = self._squares.add_((self._mean - mean).square_(), alpha=self._weight)
        return mean, risk.reduced(squares).div_(weight), int(count)


@final
class _Gradients:
    """Gradients of single samples: vectorised where that works, else one by one."""

    def __init__(self, risk: Risk, chunk_size: int) -> None:
        self._risk, self._chunk_size = risk, chunk_size
        self.problem: str | None = None

    def of_samples(self, context: Context, size: int) -> Iterator[Tensor]:
        """Chunks ``(c, P)`` of the gradients of a batch of ``size`` samples."""
        leaves, spec = tree_flatten((context.batch, context.masks))
        own = [i for i, leaf in enumerate(leaves) if is_rows(leaf, size)]
        if not own:
            raise ValueError(f"data must hold tensors of as many rows as samples to tell these "
                             f"apart, got none of {size} rows in a batch")  # fmt: skip

        def gradient(*sample: Tensor) -> Params:
            single: list[Any] = list(leaves)
            for place, value in zip(own, sample, strict=True):
                single[place] = value.unsqueeze(0)
            batch, masks = tree_unflatten(single, spec)
            point = replace(context, batch=batch, masks=masks)
            found: Params = grad(lambda params: self._risk.batch_loss(params, point))(
                self._risk.params
            )
            return found

        for start in range(0, size, self._chunk_size):
            rows = [leaves[place][start : start + self._chunk_size] for place in own]
            yield self._chunk(gradient, rows)

    def _chunk(self, gradient: Any, rows: list[Tensor]) -> Tensor:
        if self.problem is None:
            try:
                return self._rows(vmap(gradient)(*rows), len(rows[0]))
            except (RuntimeError, NotImplementedError, ValueError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.problem = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        singles = zip(*rows, strict=True)
        return torch.cat([self._rows(gradient(*sample), None) for sample in singles])

    def _rows(self, found: Params, count: int | None) -> Tensor:
        lead = 1 if count is None else count
        names = self._risk.space.shapes
        return torch.cat([found[name].detach().reshape(lead, -1) for name in names], 1)


def _gathered(
    risk: Risk, mean: Tensor, variance: Tensor, by: By, count: int, gradients: _Gradients
) -> GradientStatistics:
    means, variances = risk.space.unflatten(mean), risk.space.unflatten(variance)
    layers = {}
    for name in means:
        of_mean, spread = float(means[name].square().sum()), float(variances[name].sum())
        layers[name] = (of_mean + spread, of_mean, spread)
    of_mean, spread = float(mean.square().sum()), float(variance.sum())
    method = "side by side" if by == "sample" else "one by one"
    if gradients.problem is not None:
        method = f"one by one, as they cannot be vectorised: {gradients.problem}"
    return GradientStatistics(
        mean=mean,
        variance=variance,
        mean_square=of_mean + spread,
        gradient_square=of_mean,
        total_variance=spread,
        layers=layers,
        names=tuple(layers),
        by=by,
        num_gradients=count,
        method=method,
    )


def _flat(risk: Risk, initial: Tensor | Mapping[str, Tensor] | nn.Module) -> Tensor:
    if isinstance(initial, Tensor):
        if initial.shape != risk.theta.shape:
            raise ValueError(f"initial must be ({risk.space.size},), got {tuple(initial.shape)}")
        return initial.detach().to(risk.theta.device).double()
    named = initial.state_dict() if isinstance(initial, nn.Module) else initial
    if not isinstance(named, Mapping):
        raise TypeError("initial must be a vector, a state_dict or a module, got "
                        f"{type(initial).__name__}")  # fmt: skip
    if missing := [name for name in risk.space.shapes if name not in named]:
        raise ValueError(f"initial must hold every parameter of the risk, got none named {missing}")
    chosen = {name: named[name].detach().to(risk.theta.device) for name in risk.space.shapes}
    return risk.space.flatten(chosen).double()


def _apart(now: Tensor, begun: Tensor) -> tuple[float, float, float, float]:
    gap, norms = now - begun, float(now.norm()) * float(begun.norm())
    cosine = float(now @ begun) / norms if norms else math.nan
    return float(gap.norm()), float(gap.abs().max()), cosine, float(begun.norm())
