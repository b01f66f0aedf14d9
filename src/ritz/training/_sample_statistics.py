"""Sums and histograms of the gradients of single samples, in one pass for all quantities."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ritz.curvature import Risk
from ritz.curvature._shared import losses_alone, sample_gradient_parts


@dataclass(frozen=True, slots=True)
class Tuning:
    """Limits on the memory of a pass."""

    # Entries of the sample gradients in memory at once: 16 MiB of float32. For 1,024 samples
    # and a perceptron of 79,510 parameters on one core, 2^20 took the same time, and 2^24 took 1.7
    # times as long (benchmarks/monitors.py).
    entries: int = 2**22
    # The same on a GPU: 1 GiB, 17 samples of VGG-16. With one at a time it would wait for the host.
    # Not measured.
    entries_cuda: int = 2**28


TUNING = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    r"""Counts of the entries of sample gradients between :math:`-r` and :math:`r`.

    Attributes:
        counts: Counts ``(b,)`` of bins of equal width; or ``(b, b)``, with bins of the weights that
            the entries belong to as columns.
        reach: :math:`r`, the smallest power of two above all sizes.
        weight_reach: The same for weights; 0 for a histogram of gradients alone.
    """

    counts: Tensor
    reach: float
    weight_reach: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGradients:
    r"""Sums over the gradients :math:`g_i` of ``N`` samples, which have the mean ``g``.

    Attributes:
        gradient: :math:`g`, ``(P,)``, float64.
        variance: :math:`\mathbb{E} (g_i - g)^2` of each parameter, ``(P,)``, float64.
        squares: :math:`\|g_i\|^2`, ``(N,)``, float64.
        products: :math:`g_i^\top g`, ``(N,)``, float64.
        weights: Weights of the samples, which sum to one, ``(N,)``.
        histograms: Histograms by their number of dimensions, 1 or 2; those that were asked for.
    """

    gradient: Tensor
    variance: Tensor
    squares: Tensor
    products: Tensor
    weights: Tensor
    histograms: dict[int, Histogram]

    @property
    def count(self) -> int:
        """Number of samples ``N``."""
        return len(self.weights)

    @property
    def total_variance(self) -> float:
        r""":math:`\operatorname{tr} \Sigma = \mathbb{E} \|g_i - g\|^2`."""
        return float(self.variance.sum())


def sample_gradients(
    risk: Risk, gradient: Tensor, *, num_bins: int = 64, histograms: Sequence[int] = ()
) -> SampleGradients:
    r"""Return sums over the gradients of all samples, none of which is stored.

    The mean is known beforehand, so deviations from it are summed without cancellation. Costs two
    to three gradients, and half of one more for each histogram. Memory: three vectors of float64
    and a chunk of gradients.

    Args:
        risk: The loss at a point, whose samples can be separated.
        gradient: Its gradient, ``(P,)``.
        num_bins: Bins of the histograms, a power of two.
        histograms: Histograms to count, by their number of dimensions: 1 of gradients, 2 of
            gradients and weights.
    """
    sums = torch.zeros_like(gradient, dtype=torch.float64)
    squares, products, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    theta = risk.theta
    counters = {size: _Counter(num_bins, theta if size == 2 else None) for size in histograms}
    # Number of samples whose gradients fit into `entries`.
    entries = TUNING.entries_cuda if gradient.is_cuda else TUNING.entries
    chunk, problems = max(1, entries // len(gradient)), list[str]()
    with torch.no_grad(), risk.settings():
        for _, context, weight in risk.contexts():
            for parts in sample_gradient_parts(risk, context, chunk, problems):
                ones = theta.new_ones(len(next(iter(parts.values()))))
                square = product = torch.zeros_like(ones, dtype=torch.float64)
                for place, rows in _places(parts):
                    if risk.l2:  # the L2 term adds mu theta to every gradient
                        rows = rows + risk.l2 * theta[place]
                    square = square + torch.linalg.vector_norm(rows, dim=1).double().square()
                    product = product + (rows @ gradient[place]).double()
                    for counter in counters.values():
                        counter.add(rows, place)
                    # sum_i w_i (g_i - g)^2, in the memory of the gradients. As a product with
                    # ones: a sum over rows took 20 times as long on a CPU.
                    gaps = ones @ rows.sub_(gradient[place]).square_()
                    sums[place].add_(gaps, alpha=weight / context.size)
                squares.append(square)
                products.append(product)
                # A batch has its weight in the mean, and each of its samples an equal part of it.
                weights.append(torch.full_like(square, weight / context.size))
    return SampleGradients(
        gradient=gradient.double(),
        variance=sums,
        squares=torch.cat(squares),
        products=torch.cat(products),
        weights=torch.cat(weights),
        histograms={size: counter.histogram() for size, counter in counters.items()},
    )


def _places(parts: Mapping[str, Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Yield the gradients of each parameter as rows, with their place in the flat vector."""
    start = 0
    for gradient in parts.values():
        rows = gradient.flatten(1)
        yield slice(start, start + rows.shape[1]), rows
        start += rows.shape[1]


@final
class _Counter:
    """Counts entries in bins whose range grows with them by factors of two.

    Bins of powers of two make this exact: two bins are one of the wider range, and the bin of a
    number is the floor of its product with a power of two.
    """

    def __init__(self, num_bins: int, theta: Tensor | None) -> None:
        self._bins, self._reach, self._weight_reach = num_bins, 0.0, 0.0
        self._columns: Tensor | None = None
        if theta is not None:
            self._weight_reach = _reach(theta)
            self._columns = self._places(theta, self._weight_reach)
        width = 1 if theta is None else num_bins
        self._counts: Any = torch.zeros(num_bins, width, dtype=torch.int64)

    def add(self, rows: Tensor, place: slice) -> None:
        """Count the entries of rows ``(c, p)`` at a place in the flat vector."""
        reach = _reach(rows)
        self._reach = self._reach or reach
        while self._reach < reach:
            self._widen()
        places = self._places(rows, self._reach)
        if self._columns is not None:
            places = places.mul_(self._bins).add_(self._columns[place])
        shape = self._counts.shape
        self._counts += places.flatten().bincount(minlength=shape.numel()).view(shape).cpu()

    def histogram(self) -> Histogram:
        """Return the counts so far."""
        counts = self._counts if self._columns is not None else self._counts[:, 0]
        return Histogram(counts=counts, reach=self._reach, weight_reach=self._weight_reach)

    def _widen(self) -> None:
        self._reach *= 2
        # In twice the range, two neighbouring bins are one, and all lie in the middle half.
        quarter = self._bins // 4
        inner = self._counts.view(2 * quarter, 2, -1).sum(1)
        self._counts = torch.zeros_like(self._counts)
        self._counts[quarter : 3 * quarter] = inner

    def _places(self, values: Tensor, reach: float) -> Tensor:
        half = self._bins // 2
        # Scaled before it is shifted: 1 + x would round a small negative x to the other side of 0.
        return (values * (half / reach)).floor_().to(torch.int64).add_(half)


def _reach(values: Tensor) -> float:
    """Return the smallest power of two above all sizes."""
    largest = float(values.abs().max())
    if not math.isfinite(largest):
        raise ValueError("all gradients must be finite, got NaN or Inf for at least one sample")
    # x = m 2^e with m < 1. Below the normal numbers of float32 everything counts as zero.
    return math.ldexp(1.0, max(math.frexp(largest)[1], -100))


# ------------------------------------------------------------------------------------------
# Losses of all samples along the last step.


def sample_lines(risk: Risk, direction: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return losses and slopes of all samples along a direction, ``(N,)`` each, in float64.

    Costs about a gradient. ``None`` if the loss is not a function of outputs with a row per sample.

    Args:
        risk: The loss at a point.
        direction: The direction, ``(P,)``.
    """
    if risk.loss_fn is None:
        return None
    tangents, losses, slopes = risk.space.unflatten(direction), list[Tensor](), list[Tensor]()
    with risk.settings():
        for _, context, _ in risk.contexts():

            def by_sample(params: Any, context: Any = context) -> Tensor:
                return losses_alone(risk.loss_fn, *risk.evaluate(params, context))

            try:
                # l_i(w + t d) and its derivative by t, for all samples in one forward pass.
                pair: Any = torch.func.jvp(by_sample, (risk.params,), (tangents,))
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                return None  # no forward derivative, or a loss that vmap cannot evaluate
            for part, values in zip((losses, slopes), pair, strict=True):
                part.append(values.detach().double().flatten())
    return torch.cat(losses), torch.cat(slopes)


def local_step(
    losses: tuple[Tensor, Tensor], slopes: tuple[Tensor, Tensor], variances: Sequence[float]
) -> float:
    r"""Return where a step lands on the parabola through both of its ends.

    .. math:: \alpha = t / t^* - 1

    for the step :math:`t` and the minimum :math:`t^*` of a parabola fitted to losses and slopes at
    both ends, weighted by their inverse variances: -1 is no step, 0 the minimum, 1 a step to the
    other side. For a concave parabola it is -1, the limit of a minimum that is far away.

    Args:
        losses: Mean losses before and after the step.
        slopes: Mean slopes along the whole step.
        variances: Variances of the two losses and the two slopes.

    Reference: Schneider, Dangel and Hennig (2021), *Cockpit*, appendix C.
    """
    # w_0 + w_1 t + w_2 t^2, in units of the step. Only the difference of the losses does not depend
    # on w_0: w_1 + w_2, beside the slopes w_1 and w_1 + 2 w_2.
    drop, first, second = float(losses[1] - losses[0]), float(slopes[0]), float(slopes[1])
    known = [max(variance, 1e-10) for variance in variances]
    p, c, d = 1 / (known[0] + known[1]), 1 / known[2], 1 / known[3]
    # The normal equations of w_1 and w_2.
    a, b, e = p + c + d, p + 2 * d, p + 4 * d
    right, below = p * drop + c * first + d * second, p * drop + 2 * d * second
    slope, bend = e * right - b * below, a * below - b * right  # times the determinant
    # t* = -w_1 / (2 w_2) in units of the step, so 1 / t* - 1 = -2 w_2 / w_1 - 1.
    return -1.0 if bend <= 0 or slope == 0 else -2 * bend / slope - 1
