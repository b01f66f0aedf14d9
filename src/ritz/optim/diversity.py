"""Diversity of solutions: how much the iterates that are averaged disagree."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional

from ritz._core.checks import check_real_floating
from ritz._core.storage import storable


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Mean disagreement of solutions over all pairs, and that of each pair.

    Attributes:
        kl: Symmetrised Kullback-Leibler divergence in nats.
        total_variation: Square of the total variation distance.
        distance: Squared Euclidean distance of the probabilities.
        kl_pairs: The divergence of every two solutions, ``(m, m)`` in float64, zero on the
            diagonal.
        total_variation_pairs: The squared total variation, likewise.
        distance_pairs: The squared distance, likewise.
        num_samples: Samples that each of these is the mean over.
    """

    kl: float
    total_variation: float
    distance: float
    kl_pairs: Tensor
    total_variation_pairs: Tensor
    distance_pairs: Tensor
    num_samples: int

    def __str__(self) -> str:
        count = len(self.kl_pairs)
        return (
            f"KL {self.kl:.4g}, TV^2 {self.total_variation:.4g}, |p - q|^2 {self.distance:.4g}  "
            f"[{count} solutions, {self.num_samples:,} samples]"
        )


def solution_diversity(logits: Tensor | Iterable[Tensor]) -> Diversity:
    r"""Return how much the softmax outputs of several solutions differ, mean over all pairs.

    .. math:: \tfrac12 \sum_c (p_c - q_c)(\log p_c - \log q_c), \qquad
        \Big(\tfrac12 \sum_c |p_c - q_c|\Big)^2, \qquad \sum_c (p_c - q_c)^2

    of every sample, averaged over samples and then over pairs. The first is the mean of the two
    Kullback-Leibler divergences, the second the squared total variation; the reference writes
    :math:`\|p - q\|^2` for a total variation, which is the third. Computed in float64 from logits,
    so that probabilities too small for a float still count: only a class that one solution
    excludes outright, by a logit of :math:`-\infty`, makes the divergence infinite.

    Cost: ``m (m - 1) / 2`` passes over ``(n, c)`` arrays; memory: the logits twice in float64.

    Args:
        logits: Outputs of the solutions for the same samples, ``(m, n, c)`` or ``m`` of ``(n, c)``
            (further dimensions, as of tokens, count as samples).

    Reference: Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, section 3
    and Fig. 4.
    """
    logs = [functional.log_softmax(one, -1) for one in _checked(list(logits))]
    probabilities = [one.exp() for one in logs]
    pairs = torch.zeros(3, len(logs), len(logs), dtype=torch.float64)
    for i, j in combinations(range(len(logs)), 2):
        step = probabilities[i] - probabilities[j]
        # A class that both exclude adds nothing; as a difference of infinities it would be NaN.
        ratio = torch.where(logs[i] == logs[j], 0.0, logs[i] - logs[j])
        found = (0.5 * step * ratio, 0.5 * step.abs(), step.square())
        kl, variation, distance = (value.sum(-1) for value in found)
        values = torch.stack([kl.mean(), variation.square().mean(), distance.mean()])
        pairs[:, i, j] = pairs[:, j, i] = values.cpu()
    kl, variation, distance = (pairs.sum((1, 2)) / (len(logs) * (len(logs) - 1))).tolist()
    return Diversity(
        kl=kl,
        total_variation=variation,
        distance=distance,
        kl_pairs=pairs[0],
        total_variation_pairs=pairs[1],
        distance_pairs=pairs[2],
        num_samples=len(logs[0]),
    )


def _checked(logits: list[Tensor]) -> list[Tensor]:
    if len(logits) < 2:
        raise ValueError(f"logits must be of two solutions or more, got {len(logits)}")
    first = logits[0]
    for one in logits:
        check_real_floating("logits", one.dtype)
        if one.ndim < 2 or one.shape != first.shape or one.numel() == 0:
            shapes = [tuple(other.shape) for other in logits]
            raise ValueError(f"logits must be of one shape (n, c) for all, got {shapes}")
        if bool(torch.isnan(one).any()):
            raise ValueError("logits must not hold NaN")
    return [one.detach().double().flatten(0, -2) for one in logits]
