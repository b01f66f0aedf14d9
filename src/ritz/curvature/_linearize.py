"""A linear product, traced once and split into a primal part and a tangent part."""

import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functionalize, vmap
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten, tree_unflatten

from ritz._core.batches import tensors
from ritz.curvature._modes import without_warnings_of_fallbacks
from ritz.curvature._recorder import Recording, guard, record

# ------------------------------------------------------------------------------------------
# Simplification of graphs: no copies, no operation twice, no arithmetic with zeros.
#
# Traces of derivatives are full of these. An input has no tangent, which is traced as a tensor
# of zeros that is multiplied by the weights and added to the result.

aten = torch.ops.aten

# f(0, ...) = 0: zero if their first argument is.
_LINEAR = {
    aten.t.default, aten.view.default, aten._unsafe_view.default, aten.expand.default,
    aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.slice.Tensor, aten.select.int, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.neg.default, aten.sum.default, aten.sum.dim_IntList,
    aten.threshold_backward.default, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
}  # fmt: skip
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
# 0 * x = x * 0 = 0: zero if one of their first two arguments is.
_PRODUCTS = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}


def simplify(graph: fx.Graph) -> None:
    """Remove copies, arithmetic with zeros and repeated operations from a graph."""
    seen: dict[Any, fx.Node] = {}
    zeros: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _is_zero(node, zeros):
            zeros.add(node)
        same = _identity(node, zeros)
        if same is None and (key := _key(node)) is not None:
            same = seen.setdefault(key, node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _identity(node: fx.Node, zeros: set[fx.Node]) -> fx.Node | None:
    """Return the input that a node returns unchanged, or ``None``."""
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
            if zero in zeros:  # 0 + x = x
                return rest if rest is None or _like(rest) == _like(node) else _expand(node, rest)
    return None


def _expand(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """Expand a smaller tensor to the shape of a node, before the node."""
    small, large = source.meta["val"], node.meta["val"]
    if small.dtype != large.dtype or small.shape == large.shape:
        return None
    with node.graph.inserting_before(node):
        expanded = node.graph.call_function(aten.expand.default, (source, list(large.shape)))
    expanded.meta["val"] = small.expanded(large.shape)
    return expanded


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Return whether a node is known to be zero, given the zeros before it."""
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
        # The mask says which gradient is computed: of the input, from the output and the weights
        # (argument 2), or of the weights, from the output and the input (argument 1).
        factors = {"[True, False, False]": _input(node, 2), "[False, True, False]": second}
        other = factors.get(str(node.args[-1]))
        return first in zeros or (other is not None and other in zeros)
    return False


def _written(node: fx.Node) -> fx.Node | None:
    """Return the source of a copy into another tensor, or turn the copy into a clone.

    vmap has a rule for a clone and none for a functionalised copy.
    """
    source = _input(node, 1)
    if source is None or _like(source) == _like(node):
        return source
    before, after = source.meta["val"], node.meta["val"]
    if (before.shape, before.dtype) == (after.shape, after.dtype) and after.contiguous:
        node.target, node.args = aten.clone.default, (source,)
        node.kwargs = {"memory_format": torch.contiguous_format}
    return None


def _input(node: fx.Node, position: int) -> fx.Node | None:
    argument = node.args[position] if len(node.args) > position else None
    return argument if isinstance(argument, fx.Node) else None


def _like(node: fx.Node) -> Any:
    return node.meta.get("val", node)  # a node without a layout is like nothing else


def _key(node: fx.Node) -> Any:
    """Return a key that two nodes share if they compute the same; ``None`` if not mergeable."""
    target = node.target
    if target is not operator.getitem:
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return None
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
    # By their text: 1, 1.0 and True are equal as keys but not as arguments.
    return target, repr(node.args), repr(node.kwargs)


# ------------------------------------------------------------------------------------------
# The two parts of a product.
#
# A product v -> H v at a fixed point is linear in v. Its trace is a graph of tensor operations.
# Those that do not depend on v, such as forward pass, backward pass and masks, are the *primal*
# part. It is computed once and cached, or computed again if it does not fit into memory. The
# others are the *tangent* part. A product then computes the tangent part alone, which is close
# to the least arithmetic that a product needs.
#
# A trace follows one path through the code of a model. Where the path depends on a value, as in
# `if mask.all()`, the value is a *guard*: the trace holds at all points with the same guards. It
# also holds for one `signature` of the point alone: what the code can read without a guard.

Graph = Callable[..., Sequence[Any]]
# Part of the primal part: a tensor, or a multiple of the number of samples if the trace tries any.
Primal = Tensor | int
# Values of batches that code reads directly, and that their text tells apart.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)


def signature(point: Any) -> Any:
    """Return a key of everything that code can read of a tree of tensors without a guard.

    Raises:
        RuntimeError: The tree has an object of which that is not known.
    """
    leaves, spec = tree_flatten(point)
    return spec, tuple(map(_signature, leaves))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        # Along an axis of one entry the stride has no meaning.
        pairs = zip(leaf.shape, leaf.stride(), strict=True)
        return leaf.shape, tuple(stride for size, stride in pairs if size > 1), leaf.dtype
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
        return type(leaf), leaf.shape, leaf.dtype, leaf.tobytes()
    if isinstance(leaf, _PLAIN):
        return type(leaf), repr(leaf)
    raise RuntimeError(f"the values in a {type(leaf).__name__} of a batch cannot be compared")


@final
class Linearization:
    """The two parts of a product that is linear in its first argument.

    Values that the code reads from tensors, such as ``mask.all()`` in a condition, are guards: the
    trace holds where they are the same, and :meth:`primal` raises :class:`GuardError` elsewhere.

    Args:
        product: Takes a vector and a point, a tree of tensors. Returns a tensor.
        vector: Example of a vector. The trace holds for all vectors of this shape.
        point: Example of a point. The trace holds for all points with its :func:`signature`.
        compiled: Compile both parts.
        rows: The number of samples of the example, if the trace is to be tried with other numbers.
            See :func:`_replace_rows`. Zero otherwise.
    """

    def __init__(
        self,
        product: Callable[[Tensor, Any], Tensor],
        vector: Tensor,
        point: Any,
        *,
        compiled: bool = False,
        rows: int = 0,
    ) -> None:
        leaves, spec = tree_flatten(point)

        def flat(vector: Tensor, *inputs: Tensor) -> Tensor:
            values = iter(inputs)
            point = [next(values) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return product(vector, tree_unflatten(point, spec))

        recording = record(functionalize(flat), [vector, *tensors(point)])
        _require_fixed_shapes(recording.graph)
        simplify(recording.graph)
        if rows:
            _replace_rows(recording.graph, rows)
        self._compiled, self._any_rows = compiled, bool(rows)
        self._primal, self._tangent = _split(recording)
        self._run_primal: Graph = _prepare(self._primal, compiled)
        self._run_tangent: Graph = _prepare(self._tangent, compiled)
        # For blocks: by their width, and the numbers of the primal part.
        self._run_wide: dict[tuple[int, ...], Graph] = {}

    def primal(self, point: Any, rows: int = 0) -> list[Primal]:
        """Return the primal part at a point; raise if its guards do not hold.

        Args:
            point: A tree of tensors.
            rows: Its number of samples, which is used if the trace holds for any.
        """
        with torch.no_grad():
            return list(self._run_primal(*tensors(point), *([rows] if self._any_rows else [])))

    def tangent(self, primal: Sequence[Primal], vectors: Tensor) -> Tensor:
        """Return the products with ``k`` vectors, both ``(k, *shape)``."""
        width = len(vectors)
        with torch.no_grad():
            if width == 1:
                product: Tensor = self._run_tangent(*primal, vectors[0])[0]
                return product.unsqueeze(0)
            parts = [part for part in primal if isinstance(part, Tensor)]
            key = (width, *(part for part in primal if isinstance(part, int)))
            if key not in self._run_wide:
                self._run_wide[key] = self._widened(primal, parts, vectors)
            # A product that does not depend on the vector comes as one row, expanded.
            block: Tensor = self._run_wide[key](*parts, vectors)[0]
            return block.contiguous()

    def _widened(self, primal: Sequence[Primal], parts: Sequence[Tensor], vectors: Tensor) -> Graph:
        """Trace the tangent part for blocks through vmap, so that vmap costs nothing later."""

        def multiply(*inputs: Tensor) -> Tensor:
            *tensors, block = inputs
            values = iter(tensors)
            every = [next(values) if isinstance(part, Tensor) else part for part in primal]
            mapped: Sequence[Tensor] = vmap(lambda vector: self._tangent(*every, vector))(block)
            return mapped[0]

        with without_warnings_of_fallbacks():
            wide = record(multiply, [*parts, vectors])
        simplify(wide.graph)
        return _prepare(fx.GraphModule(wide.root, wide.graph), self._compiled)


def _replace_rows(graph: fx.Graph, rows: int) -> None:
    """Make the number of samples an input: replace its multiples by multiples of that input.

    The number is a prime that divides no other size that is known, so a multiple of it is most
    likely a size of the batch. It may be another number, and a size may enter in another way, such
    as ``1 / n``. The caller must therefore compare products at every new number of samples.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        number = graph.placeholder("rows")
    multiples: dict[int, fx.Node] = {1: number}

    def replaced(value: Any) -> Any:
        whole = isinstance(value, float) and value.is_integer()
        if not (whole or isinstance(value, int)) or isinstance(value, bool):
            return value
        # The largest index stands for the end of an axis.
        if not value or value % rows or abs(value) >= 2**53:
            return value
        factor = int(value) // rows
        if factor not in multiples:
            with graph.inserting_after(number):
                multiples[factor] = graph.call_function(operator.mul, (number, factor))
        return multiples[factor]

    for node in list(graph.nodes):
        if node.op == "call_function" and node.target not in (
            operator.mul,
            operator.getitem,
            guard,
        ):
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), replaced)


def nbytes(leaves: Sequence[Primal], *, beside: Sequence[Tensor] = ()) -> int:
    """Return the bytes that tensors hold, without shared memory and the memory of ``beside``."""
    known = {tensor.untyped_storage().data_ptr() for tensor in beside}
    total = 0
    for tensor in (leaf for leaf in leaves if isinstance(leaf, Tensor)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _require_fixed_shapes(graph: fx.Graph) -> None:
    """Raise if shapes depend on values: the trace would fix those of its own point."""
    for node in graph.nodes:
        if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
            continue
        if node.target is torch.ops.aten.index.Tensor:
            indices = [index for index in node.args[1] if index is not None]
            if all(index.meta["val"].dtype not in (torch.bool, torch.uint8) for index in indices):
                continue
        raise RuntimeError(f"shapes depend on the values of tensors, by {node.target}")


def _prepare(module: fx.GraphModule, compiled: bool) -> Graph:
    graph: Graph = torch.compile(module, dynamic=False) if compiled else module
    return graph


def _split(recording: Recording) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the primal part, with the guards, and the tangent part."""
    root, nodes = recording.root, list(recording.graph.nodes)
    vector, *points = (node for node in nodes if node.op == "placeholder")
    (output,) = (node for node in nodes if node.op == "output")
    (product,) = output.args[0]
    # Nodes that depend on the vector. The product is always computed anew: it is not the caller's
    # to change if it is cached.
    moving = {vector, product, output}
    for node in nodes:
        if any(source in moving for source in node.all_input_nodes):
            moving.add(node)
    if any(node.target is guard for node in moving):
        raise RuntimeError("the path through the model depends on the vector")
    # The border: primal nodes that the tangent part reads.
    moving.remove(output)
    sources = [source for node in nodes if node in moving for source in node.all_input_nodes]
    border = list(dict.fromkeys(node for node in sources if node not in moving))
    fixed = [node for node in nodes if node not in moving]
    primal = _part(root, points, fixed, border)
    tangent = _part(root, [*border, vector], [n for n in nodes if n in moving], [product])
    return primal, tangent


def _part(
    root: nn.Module,
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if node not in copies and node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, lambda source: copies[source])
            if node.target is aten.view.default:
                # What is a view for one vector may be none for a block, which has other strides.
                copies[node].target = aten.reshape.default
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph)
