"""Diagnostics of training: diversity of solutions, norms of weights, effective learning rates."""

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

from ritz._core.checks import check_range, check_real_floating
from ritz._core.modes import evaluating
from ritz._core.storage import storable

# ------------------------------------------------------------------------------------------
# Diversity of solutions: how much the iterates that are averaged disagree.


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


# ------------------------------------------------------------------------------------------
# Norms of weights, and the rate that normalised layers really learn at.

FACTOR = 2.0  # upwards: the epsilon of a normalisation matters less, not more


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNorms:
    r"""Norms of the weights of a model.

    Attributes:
        l2: :math:`\|\theta\|_2` of all.
        linf: :math:`\|\theta\|_\infty` of all.
        layers: ``(l2, linf)`` of every parameter tensor by its name.
        names: The names in their order.
    """

    l2: float
    linf: float
    layers: dict[str, tuple[float, float]]
    names: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.names, "all"))
        lines = [f"{'':{width}}  {'L2':>10}  {'Linf':>10}"]
        for name in ("all", *self.names):
            l2, linf = self.layers.get(name, (self.l2, self.linf))
            lines.append(f"{name:{width}}  {l2:10.4g}  {linf:10.4g}")
        return "\n".join(lines)


@torch.no_grad()
def weight_norms(model: nn.Module | Mapping[str, Tensor]) -> WeightNorms:
    r"""Return :math:`\|\theta\|_2` and :math:`\|\theta\|_\infty`, whole and by parameter tensor.

    Computed in float64, so that half-precision weights neither overflow nor lose digits.

    Args:
        model: A module, or named tensors.
    """
    named = dict(model.named_parameters() if isinstance(model, nn.Module) else model)
    if not named:
        raise ValueError("model must have parameters, got none")
    layers = {}
    for name, value in named.items():
        sizes = value.detach().abs().double()
        layers[name] = (float(sizes.norm()), float(sizes.max()) if sizes.numel() else 0.0)
    l2 = float(torch.tensor([l2 for l2, _ in layers.values()], dtype=torch.float64).norm())
    linf = max(linf for _, linf in layers.values())
    return WeightNorms(l2=l2, linf=linf, layers=layers, names=tuple(layers))


@torch.no_grad()
def scale_invariant_weights(model: nn.Module, *inputs: Any, rtol: float = 0.01) -> tuple[str, ...]:
    r"""Return the names of the weights :math:`w` for which :math:`f(c w) = f(w)`.

    These are the weights that a normalisation follows, whatever the architecture: nothing is read
    off the graph. Each weight of two or more dimensions is doubled, and the outputs are compared,
    with batch norm on the statistics of the batch, dropout off, and the model unchanged. What
    counts as no change is a change of less than ``rtol`` of the one that shuffling the same
    entries makes, so that weights without any effect are not taken for normalised ones. The
    epsilon of a normalisation spoils the invariance where activations before it have a variance
    not far above it, and so does a bias that it does not remove (before layer or group norm): such
    a weight is rightly left out.

    Cost: two forward passes for every such weight. Call it once, and keep the names.

    Args:
        model: Any; called as ``model(*inputs)``, with tensors anywhere in what it returns.
        *inputs: A batch of several samples.
        rtol: Largest change, relative to that of shuffling.
    """
    check_range("rtol", rtol, low=0.0, high=1.0)
    found = []
    with evaluating(model, batch_statistics=True):
        before = _outputs(model, {}, inputs)
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            shuffled = weight.flatten().roll(1).view_as(weight)
            scaled = _change(before, _outputs(model, {name: FACTOR * weight}, inputs))
            control = _change(before, _outputs(model, {name: shuffled}, inputs))
            if control > 0 and scaled <= rtol * control:
                found.append(name)
    return tuple(found)


@torch.no_grad()
def effective_rates(
    model: nn.Module, optimizer: Optimizer, names: Iterable[str]
) -> dict[str, float]:
    r"""Return the effective rates :math:`\alpha / \|w\|^2` of normalised layers by name.

    Where outputs do not depend on the length of :math:`w`, gradients are orthogonal to it and
    inversely proportional to its length, so this is the rate at which its direction moves.

    Args:
        model: Where the weights are.
        optimizer: Whose groups have them, with their rates.
        names: Names of weights, as :func:`scale_invariant_weights` finds them.

    Reference: Hoffer et al., *Norm matters*, 2018; Granziol et al., *Beyond SGD: iterate
    averaged adaptive gradient methods*, section 3.2.
    """
    weights = dict(model.named_parameters())
    rates = {
        id(weight): float(group["lr"])
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    found = {}
    for name in names:
        if name not in weights:
            raise ValueError(f"names must be those of parameters of the model, got {name!r}")
        weight = weights[name]
        if id(weight) not in rates:
            raise ValueError(f"optimizer must hold every weight that is named, but not {name!r}")
        square = float(weight.abs().double().square().sum())
        found[name] = rates[id(weight)] / square if square else math.inf
    return found


def _outputs(model: nn.Module, weights: dict[str, Tensor], inputs: tuple[Any, ...]) -> list[Tensor]:
    outputs = functional_call(model, weights, inputs)
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [tensor.double() for tensor in tensors if tensor.is_floating_point()]


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return math.sqrt(sum(float((b - a).square().sum()) for b, a in pairs))
