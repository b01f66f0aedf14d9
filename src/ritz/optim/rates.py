"""Norms of weights, and the rate that normalised layers really learn at."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ritz._core.batchnorm import evaluating
from ritz._core.checks import check_range
from ritz._core.storage import storable

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
