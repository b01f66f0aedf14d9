r"""A product traced once and cut in two: what the vector changes, and what it does not.

A product :math:`v \mapsto H v` at a fixed point is linear. Its trace is a graph of operations on
tensors; those that do not depend on :math:`v` - the forward pass, the backward pass, the masks -
are the *primal* part, the others the *tangent* part. The primal part is computed once and kept, or
again where keeping it would cost too much memory; a product is then the tangent part alone, which
is near the least arithmetic a product can do.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.func import functionalize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from ritz.curvature.settings import without_warnings_of_fallbacks
from ritz.curvature.simplify import simplified

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
