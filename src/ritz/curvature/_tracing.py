"""Tracing of products: a recorded graph, split into a cached primal part and a tangent part."""

import operator
from collections.abc import Callable, Sequence
from enum import Enum
from operator import getitem
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functionalize, vmap
from torch.fx.node import has_side_effect, map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ritz._core.batches import tensors
from ritz.curvature._cuda_graph import Replayed, Reserve, Values
from ritz.curvature._modes import without_warnings_of_fallbacks

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------
# Recording the operations that a function calls.


class Layout(NamedTuple):
    """Shape, dtype, strides and device of a tensor. Tensors of equal layout are interchangeable."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device

    def expand_to(self, shape: torch.Size) -> "Layout":
        """Return the layout after ``expand``."""
        kept = torch.empty_strided(self.shape, self.stride, device="meta").expand(shape)
        return self._replace(shape=kept.shape, stride=kept.stride())

    @property
    def contiguous(self) -> bool:
        """Whether the entries lie in memory in the order of their indices."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


class Recording(NamedTuple):
    """A graph, and the module that holds its constants."""

    root: nn.Module
    graph: fx.Graph


class GuardError(RuntimeError):
    """A function takes another path through its code for these inputs than was recorded."""


@has_side_effect  # so that it is not removed from a graph, where nothing uses its result
@torch.compiler.disable  # type: ignore[untyped-decorator]
def guard(condition: Tensor) -> None:
    """Raise :class:`GuardError` unless the condition holds: a value read is the recorded one."""
    if not bool(condition):
        raise GuardError("the model takes another path at this point than in the trace")


def record(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Recording:
    """Record the operations that a function calls as a graph.

    The function is called once, on these inputs. The graph returns a tuple with the result. If the
    function reads a number from a tensor, as in ``if mask.all()``, the graph calls :func:`guard`
    there. The guard raises if this number differs from the recorded one. ``meta["val"]`` of a node
    is the :class:`Layout` of its tensor.

    ``torch.fx.experimental.proxy_tensor.make_fx`` does the same, but it creates a fake tensor and a
    stack trace for every operation, which takes 3.4 s instead of 0.4 s (Hessian of a GPT of 6
    layers, 6,500 operations).

    Args:
        function: Takes tensors, returns a tensor.
        inputs: Example of its arguments.
    """
    recorder = _Recorder()
    # Nodes are stored as attributes of tensors, so the inputs are aliases of the caller's tensors.
    aliases = [recorder.input(tensor) for tensor in inputs]
    with recorder:
        result = function(*aliases)
    return recorder.finish(result)


@final
class _Recorder(TorchDispatchMode):
    """Record every operation that is called, after all transforms of autograd and functorch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph, self._root = fx.Graph(), nn.Module()
        self._constants: dict[int, tuple[Tensor, fx.Node]] = {}

    def input(self, tensor: Tensor) -> Tensor:
        alias = tensor.detach()
        self._mark(alias, self._graph.placeholder(f"input_{len(self._graph.nodes)}"))
        return alias

    def finish(self, result: Tensor) -> Recording:
        self._graph.output((self._node(result),))
        return Recording(self._root, self._graph)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # composite operations are decomposed first
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            self._read(func, args, result)
            return result
        if torch.Tag.nondeterministic_seeded in func.tags:
            _require_constant(func, args, kwargs)
        inputs = self._argument(args), self._argument(kwargs)
        self._mark(result, self._graph.call_function(func, *inputs))
        return result

    def _read(self, func: Any, args: tuple[Any, ...], value: Any) -> None:
        """Record a guard, because the function reads a value and may branch on it."""
        nodes = [self._known(leaf) for leaf in args if isinstance(leaf, Tensor)]
        if not any(nodes):
            return  # a value of constants never changes
        if func is not aten._local_scalar_dense.default:
            raise RuntimeError(f"the path through the model depends on values, by {func}")
        if value == value:
            same = self._graph.call_function(aten.eq.Scalar, (nodes[0], value))
        else:  # NaN is not equal to itself
            same = self._graph.call_function(aten.isnan.default, (nodes[0],))
        self._graph.call_function(guard, (same,))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, list | tuple):
            return (list if isinstance(value, list) else tuple)(map(self._argument, value))
        if isinstance(value, dict):
            return {name: self._argument(each) for name, each in value.items()}
        return value

    def _mark(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, Tensor):
            # As an attribute, the node lives as long as the tensor, which autograd may keep alive.
            result._ritz_node = node  # type: ignore[attr-defined]
            node.meta["val"] = _layout(result)
        elif isinstance(result, list | tuple):
            for index, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._mark(part, self._graph.call_function(getitem, (node, index)))

    def _known(self, tensor: Tensor) -> fx.Node | None:
        node: fx.Node | None = getattr(tensor, "_ritz_node", None)
        return node if node is not None and node.graph is self._graph else None

    def _node(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor. A tensor that was created outside becomes a constant."""
        if (node := self._known(tensor)) is not None:
            return node
        if id(tensor) not in self._constants:
            name = f"constant_{len(self._constants)}"
            setattr(self._root, name, tensor)
            node = self._graph.get_attr(name)
            node.meta["val"] = _layout(tensor)
            self._constants[id(tensor)] = tensor, node
        return self._constants[id(tensor)][1]


def _require_constant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an operation draws random numbers. In evaluation mode, dropout does not.

    The model may seed the generator in Python, which a graph could not repeat.
    """
    known = {each.name: each.default_value for each in func._schema.arguments}
    if (known | dict(zip(known, args, strict=False)) | kwargs).get("training", True):
        raise RuntimeError(f"the model draws random numbers, by {func}")


def _layout(tensor: Tensor) -> Layout:
    return Layout(tensor.shape, tensor.dtype, tensor.stride(), tensor.device)


# ------------------------------------------------------------------------------------------
# Simplification of graphs: removes copies, repeated operations and arithmetic with zeros.
#
# Traces of derivatives contain many of these. For example, the tangent of the inputs is zero. It is
# traced as a tensor of zeros, which is multiplied by the weights and added to the result.

# f(0, ...) = 0: zero if the first argument is zero.
_LINEAR = {
    aten.t.default, aten.view.default, aten._unsafe_view.default, aten.expand.default,
    aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.slice.Tensor, aten.select.int, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.neg.default, aten.sum.default, aten.sum.dim_IntList,
    aten.threshold_backward.default, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
}  # fmt: skip
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
# 0 * x = x * 0 = 0: zero if one of the first two arguments is zero.
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
        return _copy_source(node)
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
    expanded.meta["val"] = small.expand_to(large.shape)
    return expanded


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Return whether a node is known to be zero, given the earlier nodes that are."""
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
        # The mask selects the gradient that is computed. That of the input is linear in the weights
        # (argument 2), and that of the weights is linear in the input (argument 1).
        factors = {"[True, False, False]": _input(node, 2), "[False, True, False]": second}
        other = factors.get(str(node.args[-1]))
        return first in zeros or (other is not None and other in zeros)
    return False


def _copy_source(node: fx.Node) -> fx.Node | None:
    """Return the source of a copy if it has the layout of the result; else make it a clone.

    vmap has a batching rule for a clone, and none for a functionalised copy.
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
    return node.meta.get("val", node)  # a node without a layout equals itself only


def _key(node: fx.Node) -> Any:
    """Return a key that is equal for nodes that compute the same. ``None`` if not mergeable."""
    target = node.target
    if target is not operator.getitem:
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return None
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
    # repr, because 1, 1.0 and True are equal as keys but not as arguments.
    return target, repr(node.args), repr(node.kwargs)


# ------------------------------------------------------------------------------------------
# The two parts of a product.
#
# A product v -> H v at a fixed point is linear in v. Its trace is a graph of tensor operations.
# The operations that do not depend on v are the *primal* part: the forward pass, the backward pass
# and masks. The primal part is computed once and cached, or computed again if it does not fit into
# memory. The other operations are the *tangent* part. A product computes the tangent part alone,
# which is close to the least arithmetic that a product needs.
#
# A trace follows one path through the code of a model. If the path depends on a value, as in
# `if mask.all()`, the trace has a *guard* and holds at all points with the same value. A trace also
# requires the same `signature` of the point: everything that code can read without a guard, such
# as shapes, dtypes and numbers in Python.

Graph = Callable[..., Sequence[Any]]
# An element of the primal part: a tensor, or a multiple of the number of samples (see `rows`).
Primal = Tensor | int
# Types of values in batches that can be compared by their repr.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)


def signature(point: Any) -> Any:
    """Return a key of everything that code can read from a tree of tensors without a guard.

    Raises:
        RuntimeError: The tree contains an object of an unknown type.
    """
    leaves, spec = tree_flatten(point)
    return spec, tuple(map(_signature, leaves))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        # The stride of an axis of length one has no meaning.
        pairs = zip(leaf.shape, leaf.stride(), strict=True)
        return leaf.shape, tuple(stride for size, stride in pairs if size > 1), leaf.dtype
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
        return type(leaf), leaf.shape, leaf.dtype, leaf.tobytes()
    if isinstance(leaf, _PLAIN):
        return type(leaf), repr(leaf)
    raise RuntimeError(f"a batch contains a {type(leaf).__name__}, whose values are not compared")


@final
class Linearization:
    """The two parts of a product that is linear in its first argument.

    Values that the code reads from tensors, such as ``mask.all()`` in a condition, are guards. If
    they differ at another point, :meth:`primal` raises :class:`GuardError`.

    Args:
        product: Takes a vector and a point, a tree of tensors. Returns a tensor.
        vector: Example of a vector. The trace holds for all vectors of this shape.
        point: Example of a point. The trace holds for all points with its :func:`signature`.
        compiled: Compile both parts.
        rows: The number of samples of the example, if the trace will be tried with other numbers of
            samples; see :func:`_replace_rows`. Zero otherwise.
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
        self._run_tangent = _tangent_part(_prepare(self._tangent, compiled), compiled)
        # Tangent parts for blocks, by the width of the block and the numbers of the primal part.
        self._run_wide: dict[tuple[int, ...], Tangent] = {}

    def primal(self, point: Any, rows: int = 0) -> Values:
        """Return the primal part at a point, or raise if the guards do not hold.

        Args:
            point: A tree of tensors.
            rows: Its number of samples, for a trace that was created with ``rows``.
        """
        with torch.no_grad():
            return Values(self._run_primal(*tensors(point), *([rows] if self._any_rows else [])))

    def tangent(self, primal: Values, vectors: Tensor, *, replay: Reserve | None = None) -> Tensor:
        """Return the products with ``k`` vectors, both ``(k, *shape)``.

        Args:
            primal: The primal part at a point.
            vectors: The vectors.
            replay: Returns whether a CUDA graph may have copies of so many bytes, such as one of
                the primal part. ``None`` allows no graph.
        """
        width = len(vectors)
        with torch.no_grad():
            if width == 1:
                product = self._run_tangent(primal, vectors[0], replay=replay)[0]
                return product.unsqueeze(0)
            key = (width, *(part for part in primal if isinstance(part, int)))
            if key not in self._run_wide:
                self._run_wide[key] = self._vmap(primal, vectors)
            # A product that does not depend on the vector comes as one row, expanded.
            return self._run_wide[key](primal, vectors, replay=replay)[0].contiguous()

    def _vmap(self, primal: Values, vectors: Tensor) -> "Tangent":
        """Trace ``vmap`` of the tangent part, so that later products do not pay for vmap."""
        parts = [part for part in primal if isinstance(part, Tensor)]

        def multiply(*inputs: Tensor) -> Tensor:
            *tensors, block = inputs
            values = iter(tensors)
            every = [next(values) if isinstance(part, Tensor) else part for part in primal]
            mapped: Sequence[Tensor] = vmap(lambda vector: self._tangent(*every, vector))(block)
            return mapped[0]

        with without_warnings_of_fallbacks():
            wide = record(multiply, [*parts, vectors])
        simplify(wide.graph)
        graph = _prepare(fx.GraphModule(wide.root, wide.graph), self._compiled)

        def run(*inputs: Any) -> Sequence[Tensor]:
            return graph(*(each for each in inputs if isinstance(each, Tensor)))

        return _tangent_part(run, self._compiled)


class Tangent(Protocol):
    """The tangent part of a product, as a function of its primal part and a vector or a block."""

    def __call__(
        self, values: Values, /, *inputs: Tensor, replay: Reserve | None
    ) -> Sequence[Tensor]: ...


def _tangent_part(graph: Graph, compiled: bool) -> Tangent:
    def run(values: Values, /, *inputs: Tensor, replay: Reserve | None) -> Sequence[Tensor]:
        return graph(*values, *inputs)

    # Compiled graphs allocate memory in a way of their own, and have fewer kernels.
    return run if compiled else Replayed(graph)


def _replace_rows(graph: fx.Graph, rows: int) -> None:
    """Make the number of samples an input of a graph, and replace its multiples accordingly.

    ``rows`` is a prime that divides no other known size. A multiple of it in the graph is therefore
    most likely a multiple of the number of samples. This may be wrong, and the number of samples
    may occur in another form, such as ``1 / n``. The caller must therefore check a product at every
    new number of samples.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        number = graph.placeholder("rows")
    multiples: dict[int, fx.Node] = {1: number}

    def replaced(value: Any) -> Any:
        whole = isinstance(value, float) and value.is_integer()
        if not (whole or isinstance(value, int)) or isinstance(value, bool):
            return value
        # Not the largest index, which torch uses for the end of an axis.
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
    """Return the bytes of the storages of tensors, each once, without those of ``beside``."""
    known = {tensor.untyped_storage().data_ptr() for tensor in beside}
    total = 0
    for tensor in (leaf for leaf in leaves if isinstance(leaf, Tensor)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _require_fixed_shapes(graph: fx.Graph) -> None:
    """Raise if shapes depend on values, because the trace would fix the shapes of its example."""
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
    # Nodes that depend on the vector. The product always counts as one of them: it must be a new
    # tensor in every call, because the caller may modify it.
    moving = {vector, product, output}
    for node in nodes:
        if any(source in moving for source in node.all_input_nodes):
            moving.add(node)
    if any(node.target is guard for node in moving):
        raise RuntimeError("the path through the model depends on the vector")
    # The border: the primal nodes that the tangent part reads.
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
                # A block has other strides, for which view() may fail.
                copies[node].target = aten.reshape.default
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph)
