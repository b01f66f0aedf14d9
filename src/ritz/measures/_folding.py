"""``fold_batch_norm`` into the convolutions and linear layers before it."""

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrize import is_parametrized

from ritz._core.batch_norm import batch_norms, evaluating
from ritz._core.checks import check_type
from ritz.curvature._shared import Rows

Layer = _ConvNd | nn.Linear


def fold_batch_norm(model: nn.Module, *, strict: bool = True) -> nn.Module:
    r"""Return a copy of a model in which batch norm is folded into the layers before it.

    .. math:: \gamma \frac{W x + b - m}{\sqrt{v + \epsilon}} + \beta = (S W) x + S (b - m) + \beta,
        \qquad S = \operatorname{diag}\frac{\gamma}{\sqrt{v + \epsilon}}

    Up to roundoff, the copy has the same outputs as the model in eval mode. Each batch norm is
    replaced by an identity. Fold batch norm before you compare eigenvalues of networks: scaling the
    layer before a batch norm does not change the function of the model, but it changes its
    curvature.

    Batch norm can be folded into a convolution, transposed convolution or linear layer if nothing
    else uses the output of that layer. Identities and dropout may stand in between. Calls are
    traced by ``torch.fx``. If a module cannot be traced, each of its children is traced alone, and
    neighbours in an ``nn.Sequential`` are taken as pairs. A linear layer must act on
    ``(n, features)``: the copy raises if it is called on ``(n, length, features)``.

    Args:
        model: Any model; it is not changed.
        strict: Raise if a batch norm cannot be folded. Otherwise leave that batch norm unchanged.

    Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
    descent with covariance noise*, section 5.3.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    folded = copy.deepcopy(model)
    with evaluating(folded, batch_statistics=False):
        before = dict(_pairs(folded, ""))
    modules = dict(folded.named_modules())
    # Check all batch norms before folding any.
    pairs: list[tuple[Layer, _BatchNorm]] = []
    reasons: dict[str, str] = {}
    for name, norm in batch_norms(folded).items():
        layer = modules.get(before[name]) if name in before else None
        if not isinstance(layer, Layer):
            reasons[name] = "its input is not the output of a convolution or linear layer used once"
        elif reason := _obstacle(folded, layer, norm):
            reasons[name] = reason
        else:
            pairs.append((layer, norm))
    if reasons and strict:
        listed = "; ".join(f"{name or 'itself'}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"batch norm cannot be folded ({listed}); pass strict=False to skip it")
    for layer, norm in pairs:
        _fold(layer, norm)
        # Batch norm normalises axis 1, and a linear layer acts on the last axis.
        _replace(folded, norm, Rows() if isinstance(layer, nn.Linear) else nn.Identity())
    return folded


def _pairs(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each batch norm with the name of the layer before it."""
    if not batch_norms(module):
        return
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # a user-defined forward may fail in any way on the proxies of fx
        if type(module).forward is nn.Sequential.forward:
            children = [(n, child) for n, child in module.named_children() if not _passes(child)]
            for (before, _), (name, layer) in pairwise(children):
                if isinstance(layer, _BatchNorm):
                    yield prefix + name, prefix + before
        for name, child in module.named_children():
            yield from _pairs(child, f"{prefix}{name}.")
        return
    sources: dict[str, list[str | None]] = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(module.get_submodule(node.target), _BatchNorm):
            source: Any = node.args[0] if node.args else None
            # A layer may be scaled only if nothing else uses its output.
            while called := isinstance(source, fx.Node) and len(source.users) == 1:
                if source.op != "call_module" or not _passes(
                    module.get_submodule(str(source.target))
                ):
                    break
                source = source.args[0]
            target = source.target if called and source.op == "call_module" else None
            sources.setdefault(node.target, []).append(target)
    # How often each module is called, or one of its tensors is read.
    uses = Counter(
        node.target if node.op == "call_module" else node.target.rpartition(".")[0]
        for node in graph.nodes
        if node.op in ("call_module", "get_attr")
    )
    for name, layers in sources.items():
        first = layers[0]
        # Every call of the batch norm must follow a call of the same layer, and this layer must not
        # be called elsewhere.
        if first and set(layers) == {first} and len(layers) == uses[first] == uses[name]:
            yield prefix + name, prefix + first


def _passes(module: nn.Module) -> bool:
    """Return whether a module returns its input in eval mode."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and (type(module) is nn.Identity or isinstance(module, _DropoutNd))


def _obstacle(model: nn.Module, layer: Layer, norm: _BatchNorm) -> str:
    """Return why a batch norm cannot be folded into a layer; empty if it can."""
    kind = type(layer).__name__
    if norm.running_mean is None:
        return "it has no running statistics"
    if is_parametrized(layer) or "weight" not in layer._parameters:
        return f"the {kind} before it has parametrised weights"
    if layer._forward_hooks or norm._forward_hooks or norm._forward_pre_hooks:
        return f"it or the {kind} before it has hooks"
    features = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    if features != norm.num_features:
        return f"the {kind} before it has {features} outputs, not {norm.num_features}"
    # A tensor that is shared with other layers would be scaled for them as well.
    weights = {id(tensor) for tensor in layer.parameters()}
    every = model.named_parameters(remove_duplicate=False)
    if sum(id(tensor) in weights for _, tensor in every) > len(weights):
        return f"the {kind} before it, or its weights, are used in several places"
    return ""


@torch.no_grad()
def _fold(layer: Layer, norm: _BatchNorm) -> None:
    mean, variance = (norm.get_buffer(name).double() for name in ("running_mean", "running_var"))
    # S = diag(gamma / sqrt(v + eps)): W <- S W and b <- S (b - m) + beta, in float64
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    weight = layer.weight
    bias = -mean if layer.bias is None else layer.bias.double() - mean
    bias = bias * scale if norm.bias is None else bias * scale + norm.bias.double()
    weight.copy_(_scale_outputs(layer, weight.double(), scale))
    # A layer without a bias gets one, because batch norm shifts its outputs.
    layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)


def _scale_outputs(layer: Layer, weight: Tensor, scale: Tensor) -> Tensor:
    """Return weights with each output multiplied by its scale."""
    if not isinstance(layer, _ConvTransposeNd):
        return weight * scale.view(-1, *(1,) * (weight.ndim - 1))
    # The shape is (inputs, outputs per group, ...), and inputs are sorted by group.
    groups = weight.view(layer.groups, -1, *weight.shape[1:])
    factors = scale.view(layer.groups, 1, -1, *(1,) * (weight.ndim - 2))
    return (groups * factors).view_as(weight)


def _replace(model: nn.Module, norm: nn.Module, other: nn.Module) -> None:
    # A module may be registered in several places.
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is norm:
                setattr(parent, name, other)
