"""Diversity of solutions, norms and scale invariance of weights, effective learning rates."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ritz._core.batch_norm import evaluating
from ritz._core.checks import check_real_floating, check_rtol, check_type, is_below
from ritz._core.params import check_optimizer
from ritz._core.storage import storable
from ritz.curvature._shared import layer_table
from ritz.optim._group_settings import learning_rate

# ------------------------------------------------------------------------------------------
# Diversity of solutions: how much the outputs of several networks differ.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Differences between the outputs of solutions: the mean over all pairs, and each pair.

    Attributes:
        kl: Symmetrised Kullback-Leibler divergence in nats.
        total_variation: Square of the total variation distance.
        distance: Squared Euclidean distance of the probabilities.
        kl_pairs: The divergence of every pair of solutions, ``(m, m)``, float64. The diagonal is
            zero.
        total_variation_pairs: The squared total variation of every pair, ``(m, m)``.
        distance_pairs: The squared distance of every pair, ``(m, m)``.
        num_samples: Number of samples.
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
    r"""Return how much the softmax outputs of trained networks (solutions) differ, over all pairs.

    .. math:: \tfrac12 \sum_c (p_c - q_c)(\log p_c - \log q_c), \qquad
        \Big(\tfrac12 \sum_c |p_c - q_c|\Big)^2, \qquad \sum_c (p_c - q_c)^2

    Each is averaged over samples and then over pairs. The first is the mean of the two
    Kullback-Leibler divergences, and the second is the squared total variation. The third is what
    the reference calls total variation. All are computed from logits in float64, to avoid
    underflow. The divergence is infinite only if one solution gives a class the logit
    :math:`-\infty`.

    Cost: ``m (m - 1) / 2`` passes over ``(n, c)`` arrays. Memory: the logits twice in float64.

    Args:
        logits: Outputs of the ``m`` solutions for the same samples: a tensor ``(m, n, c)`` or ``m``
            tensors ``(n, c)``. Additional dimensions, such as tokens, count as samples.

    Reference: Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, section 3
    and Fig. 4.
    """
    logs = [functional.log_softmax(one, -1) for one in _as_samples(list(logits))]
    probabilities = [one.exp() for one in logs]
    pairs = torch.zeros(3, len(logs), len(logs), dtype=torch.float64)
    for i, j in combinations(range(len(logs)), 2):
        step = probabilities[i] - probabilities[j]
        # Without this, a class of probability zero in both would give inf - inf = NaN.
        ratio = torch.where(logs[i] == logs[j], 0.0, logs[i] - logs[j])
        # (KL(p, q) + KL(q, p)) / 2 = sum (p - q)(log p - log q) / 2, and TV = sum |p - q| / 2
        terms = (0.5 * step * ratio, 0.5 * step.abs(), step.square())
        kl, variation, distance = (term.sum(-1) for term in terms)
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


def _as_samples(logits: list[Tensor]) -> list[Tensor]:
    if len(logits) < 2:
        raise ValueError(f"logits must be of at least two models, got {len(logits)}")
    first = logits[0]
    for one in logits:
        check_type("logits", one, Tensor, "tensors (n, c)")
        check_real_floating("logits", one.dtype)
        if one.ndim < 2 or one.shape != first.shape or one.numel() == 0:
            shapes = [tuple(other.shape) for other in logits]
            raise ValueError(f"logits must have one shape (n, c) for all models, got {shapes}")
        if bool(torch.isnan(one).any()):
            raise ValueError("logits must not contain NaN, got NaN")
    return [one.detach().double().flatten(0, -2) for one in logits]


# ------------------------------------------------------------------------------------------
# Norms of weights, and effective learning rates of normalised layers.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNorms:
    r"""Norms of the weights of a model.

    Attributes:
        l2: :math:`\|\theta\|_2` of all weights.
        linf: :math:`\|\theta\|_\infty` of all weights.
        layers: ``(l2, linf)`` of every parameter tensor by name.
        names: Names of the parameter tensors in order.
    """

    l2: float
    linf: float
    layers: dict[str, tuple[float, float]]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return layer_table(self, (self.l2, self.linf), ("L2", "Linf"))


@torch.no_grad()
def weight_norms(model: nn.Module | Mapping[str, Tensor]) -> WeightNorms:
    r"""Return :math:`\|\theta\|_2` and :math:`\|\theta\|_\infty`, in total and by tensor.

    They are computed in float64, so that half-precision weights neither overflow nor lose digits.

    Args:
        model: A module, or named tensors.
    """
    if not isinstance(model, Mapping):
        check_type("model", model, nn.Module, "a torch.nn.Module or named tensors")
    named = dict(model.named_parameters() if isinstance(model, nn.Module) else model)
    if not named:
        raise ValueError("model must have parameters, got none")
    layers = {}
    for name, value in named.items():
        sizes = value.detach().abs().double()
        # An empty tensor has no largest entry.
        layers[name] = (float(sizes.norm()), float(sizes.max()) if sizes.numel() else 0.0)
    # |theta|^2 is the sum of the squared norms of its parts.
    l2 = float(torch.tensor([l2 for l2, _ in layers.values()], dtype=torch.float64).norm())
    linf = max(linf for _, linf in layers.values())
    return WeightNorms(l2=l2, linf=linf, layers=layers, names=tuple(layers))


@torch.no_grad()
def scale_invariant_weights(model: nn.Module, *inputs: Any, rtol: float = 0.01) -> tuple[str, ...]:
    r"""Return the names of the weights :math:`w` for which :math:`f(c w) = f(w)`.

    These are the weights before a normalisation. They are found numerically, for any architecture.
    Each weight of two or more dimensions is doubled, and the outputs are compared, with batch norm
    in train mode and dropout off. The change of the outputs must be below ``rtol`` times the change
    that is caused by shuffling the entries of the weight. A weight that has no effect on the
    outputs is therefore not returned. The model is not changed.

    A weight is not invariant, and not returned, if the variance of the inputs of the normalisation
    is so small that its epsilon matters, or if a bias follows that the normalisation does not
    remove (before layer or group norm).

    Cost: two forward passes for every weight of two or more dimensions.

    Args:
        model: Any model, called as ``model(*inputs)``. It may return nested tensors.
        *inputs: A batch of several samples.
        rtol: Largest change of the outputs, relative to that of shuffling.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    check_rtol(rtol)
    names = []
    with evaluating(model, batch_statistics=True):
        before = _outputs(model, {}, inputs)
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            # The control: the same entries in another order.
            shuffled = weight.flatten().roll(1).view_as(weight)
            # Doubled and not halved, so that the epsilon of a normalisation matters less.
            scaled = _change(before, _outputs(model, {name: 2.0 * weight}, inputs))
            control = _change(before, _outputs(model, {name: shuffled}, inputs))
            if control > 0 and is_below(scaled, rtol * control):
                names.append(name)
    return tuple(names)


@torch.no_grad()
def effective_rates(
    model: nn.Module, optimizer: Optimizer, names: Iterable[str]
) -> dict[str, float]:
    r"""Return the effective learning rates :math:`\alpha / \|w\|^2` of scale-invariant weights.

    If the outputs do not depend on the norm of :math:`w`, the gradient is orthogonal to :math:`w`
    and inversely proportional to its norm. :math:`\alpha / \|w\|^2` is then the learning rate of
    the direction :math:`w / \|w\|`.

    Args:
        model: Model with the weights.
        optimizer: Optimiser of these weights.
        names: Names of weights, as :func:`scale_invariant_weights` returns them.

    Reference: Hoffer et al., *Norm matters*, 2018; Granziol et al., *Beyond SGD: iterate
    averaged adaptive gradient methods*, section 3.2.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    check_optimizer(optimizer)
    weights = dict(model.named_parameters())
    # By identity, because tensors compare element by element.
    rates = {
        id(weight): learning_rate(group)
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    effective = {}
    for name in names:
        if name not in weights:
            raise ValueError(f"names must be those of parameters of the model, got {name!r}")
        weight = weights[name]
        if id(weight) not in rates:
            raise ValueError(
                f"optimizer must update every weight in names, but it does not update {name!r}"
            )
        square = float(weight.abs().double().square().sum())
        # A step turns a scale-invariant weight by the angle alpha |g(w)| / |w|, where
        # |g(w)| = |g(w / |w|)| / |w|.
        effective[name] = rates[id(weight)] / square if square else math.inf
    return effective


def _outputs(model: nn.Module, weights: dict[str, Tensor], inputs: tuple[Any, ...]) -> list[Tensor]:
    outputs = functional_call(model, weights, inputs)
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [tensor.double() for tensor in tensors if tensor.is_floating_point()]


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return math.sqrt(sum(float((b - a).square().sum()) for b, a in pairs))
