"""A product traced once and cut in two: what depends on the vector, and what does not."""

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.func import functionalize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from ritz.curvature._risk import without_warnings_of_fallbacks

# ------------------------------------------------------------------------------------------
# Graphs of tensor operations made smaller: no copies, nothing twice, no arithmetic with
# zeros.
#
# Traces of derivatives are full of them: an input has no tangent, which is traced as a tensor
# of zeros that is multiplied by the weights and added to what is wanted.

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


# ------------------------------------------------------------------------------------------
# A product traced once and cut in two: what the vector changes, and what it does not.
#
# A product :math:`v \mapsto H v` at a fixed point is linear. Its trace is a graph of
# operations on tensors; those that do not depend on :math:`v` - the forward pass, the
# backward pass, the masks - are the *primal* part, the others the *tangent* part. The primal
# part is computed once and kept, or again where keeping it would cost too much memory; a
# product is then the tangent part alone, which is near the least arithmetic a product can do.

Graph = Callable[..., Any]


@final
class Linearization:
    """The two parts of a product that is linear in its first argument.

    Args:
        product: Takes a tangent and a point, trees of tensors; returns a sequence of tensors.
        tangent: Tensors like those it will be called with.
        point: Likewise; graphs hold for every point of the same shapes.
        compiled: Whether to compile both parts.
    """

    def __init__(
        self,
        product: Callable[[Any, Any], Sequence[Tensor]],
        tangent: Sequence[Tensor],
        point: Any,
        *,
        compiled: bool = False,
    ) -> None:
        leaves, self._spec = tree_flatten(point)
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        fixed = list(leaves)

        def flat(*args: Tensor) -> list[Tensor]:
            given = list(fixed)
            for position, leaf in zip(positions, args[len(tangent) :], strict=True):
                given[position] = leaf
            return list(product(list(args[: len(tangent)]), tree_unflatten(given, self._spec)))

        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, from jvp
            traced = make_fx(functionalize(flat))(*tangent, *inputs)
        _require_fixed_shapes(traced)
        self._compiled = compiled
        self._num_tangents = len(tangent)
        self._primal, self._tangent = _cut(simplified(traced), len(tangent))
        self._run_primal: Graph = _ready(self._primal, compiled)
        self._run_tangent: dict[int, Graph] = {1: _ready(self._tangent, compiled)}

    def primal(self, point: Any) -> list[Tensor]:
        """What the tangent part needs of a point."""
        leaves = [leaf for leaf in tree_flatten(point)[0] if isinstance(leaf, Tensor)]
        with torch.no_grad():
            return list(self._run_primal(*leaves))

    def tangent(self, kept: Sequence[Tensor], tangent: Sequence[Tensor]) -> list[Tensor]:
        """The product, ``(k, *shape)`` each, with ``k`` vectors of tensors ``(k, *shape)``.

        What it returns is to be read only: it may be what it was given.
        """
        width = len(tangent[0])
        with torch.no_grad():
            if width == 1:
                single = [leaf[0] for leaf in tangent]
                return [leaf.unsqueeze(0) for leaf in self._run_tangent[1](*kept, *single)]
            if width not in self._run_tangent:
                self._run_tangent[width] = self._widened(kept, tangent)
            return list(self._run_tangent[width](*kept, *tangent))

    def _widened(self, kept: Sequence[Tensor], tangent: Sequence[Tensor]) -> Graph:
        """The tangent part for blocks, traced through vmap so that vmap itself costs nothing."""
        axes = (None,) * len(kept) + (0,) * self._num_tangents
        with without_warnings_of_fallbacks():
            traced = make_fx(vmap(self._tangent, in_dims=axes))(*kept, *tangent)
        return _ready(simplified(traced), self._compiled)


def nbytes(tensors: Sequence[Tensor], *, beside: Sequence[Tensor] = ()) -> int:
    """Bytes of memory that tensors hold, shared memory counted once, ``beside`` not at all."""
    known = {tensor.untyped_storage().data_ptr() for tensor in beside}
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _require_fixed_shapes(module: fx.GraphModule) -> None:
    """Raise where shapes depend on values: the trace holds those of the point it was made at."""
    for node in module.graph.nodes:
        if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
            continue
        if node.target is torch.ops.aten.index.Tensor:
            indices = [index for index in node.args[1] if index is not None]
            if all(index.meta["val"].dtype not in (torch.bool, torch.uint8) for index in indices):
                continue
        raise RuntimeError(f"shapes depend on the values of tensors, by {node.target}")


def _ready(module: fx.GraphModule, compiled: bool) -> Graph:
    return torch.compile(module, dynamic=False) if compiled else module


def _cut(module: fx.GraphModule, num_tangents: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    tangents, points = inputs[:num_tangents], inputs[num_tangents:]
    moving = set(tangents)
    for node in nodes:
        if any(source in moving for source in node.all_input_nodes):
            moving.add(node)
    (result,) = (node for node in nodes if node.op == "output")
    wanted = list(result.args[0])
    needed = {
        source: None
        for node in nodes
        if node in moving and node is not result
        for source in node.all_input_nodes
        if source not in moving
    } | {node: None for node in wanted if node not in moving}
    kept = list(needed)
    primal = _part(module, points, [n for n in nodes if n not in moving], kept)
    tangent = _part(module, kept + tangents, [n for n in nodes if n in moving], wanted)
    return primal, tangent


def _part(
    module: fx.GraphModule,
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if node not in copies and node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
