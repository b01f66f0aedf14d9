"""Graphs of tensor operations made smaller: no copies, nothing twice, no arithmetic with zeros.

Traces of derivatives are full of them: an input has no tangent, which is traced as a tensor of
zeros that is multiplied by the weights and added to what is wanted.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# Zero where their first argument is.
_LINEAR = {
    aten.t.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.select.int,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.neg.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.threshold_backward.default,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
# Zero where either of their first two arguments is.
_PRODUCTS = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}


def simplified(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph without copies of nothing, arithmetic with zeros, and things done twice."""
    seen: dict[Any, fx.Node] = {}
    zeros: set[fx.Node] = set()
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if _is_zero(node, zeros):
            zeros.add(node)
        same = _nothing_done(node, zeros)
        if same is None:
            key = _key(node)
            same = None if key is None else seen.setdefault(key, node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _nothing_done(node: fx.Node, zeros: set[fx.Node]) -> fx.Node | None:
    """The input that a node returns unchanged."""
    if node.target in (aten.alias.default, aten.detach.default, aten.lift_fresh.default):
        return _input(node, 0)
    source = _input(node, 0)
    if node.target in (aten._to_copy.default, aten.expand.default, aten.view.default):
        return source if source is not None and _like(source) == _like(node) else None
    if node.target is aten.copy.default:
        return _written(node)
    if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
        for here, other in ((0, 1), (1, 0)):
            zero, rest = _input(node, here), _input(node, other)
            if zero in zeros:
                return rest if rest is None or _like(rest) == _like(node) else _spread(node, rest)
    return None


def _spread(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """A smaller tensor as large as a node, in front of it."""
    small, large = source.meta["val"], node.meta["val"]
    if small.dtype != large.dtype or small.shape == large.shape:
        return None
    with node.graph.inserting_before(node):
        spread = node.graph.call_function(aten.expand.default, (source, list(large.shape)))
    spread.meta["val"] = small.expand(large.shape)
    return spread


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether a node is known to be zero, given those before it that are."""
    first, second = _input(node, 0), _input(node, 1)
    if node.target in _ZEROS:
        return True
    if node.target in _LINEAR or node.target is operator.getitem:
        return first in zeros
    if node.target in _PRODUCTS:
        return first in zeros or second in zeros
    if node.target is aten.convolution.default:
        return node.args[2] is None and (first in zeros or second in zeros)
    if node.target is aten.convolution_backward.default:
        # Wanted is the gradient of the input (from the weights) or of the weights (from the input).
        weights = _input(node, 2)
        wanted = {"[True, False, False]": weights, "[False, True, False]": second}
        other = wanted.get(str(node.args[-1]))
        return first in zeros or (other is not None and other in zeros)
    return False


def _written(node: fx.Node) -> fx.Node | None:
    """What a copy into another tensor, made functional, returns: the source, or one of its layout.

    vmap has a rule for a clone and none for such a copy.
    """
    source = _input(node, 1)
    if source is None or _like(source) == _like(node):
        return source
    before, after = source.meta["val"], node.meta["val"]
    if (before.shape, before.dtype) == (after.shape, after.dtype) and after.is_contiguous():
        node.target, node.args = aten.clone.default, (source,)
        node.kwargs = {"memory_format": torch.contiguous_format}
    return None


def _input(node: fx.Node, position: int) -> fx.Node | None:
    found = node.args[position] if len(node.args) > position else None
    return found if isinstance(found, fx.Node) else None


def _like(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node  # like nothing else
    return value.shape, value.dtype, value.stride(), value.device


def _key(node: fx.Node) -> Any:
    """What two nodes that compute the same have in common; ``None`` if a node may not be merged."""
    target = node.target
    if target is not operator.getitem:
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return None
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
    try:
        key = (target, _frozen(node.args), _frozen(node.kwargs))
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    # 1, 1.0 and True are equal as keys and not as arguments.
    return (type(value), value) if isinstance(value, bool | int | float) else value
