"""Products with matrices that are means over batches: the fastest way that works."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_flatten, tree_leaves

from ritz._core.batches import is_rows, take_rows
from ritz._core.checks import check_choice, check_count
from ritz._core.modes import batch_norms, searched_convolutions
from ritz.curvature._linearize import Linearization, nbytes
from ritz.curvature._risk import (
    Context,
    Params,
    Risk,
    differentiable,
    without_warnings_of_torch,
)
from ritz.operators import LinearOperator

# ------------------------------------------------------------------------------------------
# How the product of one batch with vectors is computed: the fastest way that works.

Column = Callable[[Risk, Params, Context, Params], Params]
EngineName = Literal["auto", "linearized", "eager"]
ENGINES = ("auto", "linearized", "eager")
MAX_TRACES = 8  # shapes of batches that are worth a trace each


@final
class Engine:
    """Products of single batches, by a trace of them or by differentiating anew.

    The way is chosen at the first product: the first of ``columns`` that works for this model; its
    trace, where it can be traced and gives the same product. ``plan`` says what was chosen and
    why.

    Args:
        risk: What to differentiate.
        columns: The product of one batch with one vector in several ways, the preferred first.
        name: ``auto``, ``linearized`` or ``eager``.
        compiled: Whether to compile traces.
    """

    def __init__(
        self,
        risk: Risk,
        columns: Sequence[tuple[str, Column]],
        *,
        name: EngineName = "auto",
        compiled: bool = False,
    ) -> None:
        check_choice("engine", name, ENGINES)
        if compiled and name == "eager":
            raise ValueError("compile=True needs engine='linearized', got 'eager'")
        self.risk, self._ways, self._name, self._compiled = risk, columns, name, compiled
        self._strict = compiled or name == "linearized"
        self._column: Column | None = None
        self._traces: dict[Any, Linearization | None] = {}
        self.plan = "not yet used"

    def linearization(self, context: Context) -> tuple[Linearization, list[Tensor]] | None:
        """The trace for batches of this shape and its primal part; ``None`` if products are eager.

        The check of the first trace has computed the primal part of its batch: this is returned.
        """
        column, primal = self._chosen(context)
        key = _shape(context)
        if self._name == "eager" or (key not in self._traces and len(self._traces) == MAX_TRACES):
            return None
        if key not in self._traces:
            self._traces[key] = self._further(column, context)
        trace = self._traces[key]
        if trace is None:
            return None
        return trace, trace.primal((self.risk.params, context)) if primal is None else primal

    def eager(self, context: Context, tangent: Sequence[Tensor]) -> list[Tensor]:
        """The product, ``(k, *shape)`` each, with ``k`` vectors of tensors ``(k, *shape)``."""
        column, _ = self._chosen(context)
        with self.risk.settings():
            if len(tangent[0]) == 1:
                single = [leaf[0] for leaf in tangent]
                found = self._multiplied(column, single, context, self.risk.params)
                return [leaf.unsqueeze(0) for leaf in found]

            def one(*columns: Tensor) -> tuple[Tensor, ...]:
                return tuple(self._multiplied(column, columns, context, self.risk.params))

            return list(vmap(one)(*tangent))

    def forget(self) -> None:
        """Drop the traces, for batches will be of other shapes."""
        self._traces.clear()

    def _multiplied(
        self, column: Column, tangent: Sequence[Tensor], context: Context, params: Params
    ) -> list[Tensor]:
        names = list(self.risk.space.shapes)
        found = column(self.risk, params, context, dict(zip(names, tangent, strict=True)))
        return [found[name].detach() for name in names]

    def _linearized(self, column: Column, context: Context) -> Linearization:
        def product(tangent: list[Tensor], point: tuple[Params, Context]) -> list[Tensor]:
            return self._multiplied(column, tangent, point[1], point[0])

        like = list(self.risk.params.values())
        point = (self.risk.params, context)
        with self.risk.settings():
            return Linearization(product, like, point, compiled=self._compiled)

    def _further(self, column: Column, context: Context) -> Linearization | None:
        """A trace for another shape, which may lead through other parts of the model."""
        try:
            return self._linearized(column, context)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # as for the first
            if self._strict:
                raise
            self.plan += f" (not linearized for all batches: {first_line(error)})"
            return None

    def _chosen(self, context: Context) -> tuple[Column, list[Tensor] | None]:
        """The way of this engine, and the primal part of this batch if the choice computed it."""
        if self._column is not None:
            return self._column, None
        with without_warnings_of_torch():
            self._column, primal = self._choose(context)
        return self._column, primal

    def _choose(self, context: Context) -> tuple[Column, list[Tensor] | None]:
        # Of the size of the weights, so that what must be equal can be told from zero.
        tangent = [leaf + leaf.abs().mean() for leaf in self.risk.params.values()]
        problems: list[str] = []
        for name, column in self._ways:
            try:
                with self.risk.settings():
                    expected = self._multiplied(column, tangent, context, self.risk.params)
                primal, no_trace = self._traced(column, context, tangent, expected)
                problem = ""
                if primal is None:
                    problem = self._asymmetry(column, context, tangent, expected)
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError) as error:
                problem = first_line(error)
            if not problem:
                self._decide(name, problems, no_trace)
                return column, primal
            problems.append(f"no {name}: {problem}")
        with suppress(NotImplementedError, RuntimeError):  # a gradient may be as impossible
            self.risk.diagnose()
        raise RuntimeError("the loss cannot be differentiated as it must: " + "; ".join(problems))

    def _decide(self, name: str, problems: list[str], no_trace: str) -> None:
        """Set the plan; ``no_trace`` says why there is no trace, if one was wanted."""
        if no_trace and self._strict:
            raise RuntimeError(f"engine='linearized' needs a traceable model: {no_trace}")
        if self._name != "eager":
            self._name = "eager" if no_trace else "linearized"
        problems = problems + ([f"not linearized: {no_trace}"] if no_trace else [])
        kind = "linearized and compiled" if self._compiled else self._name
        self.plan = f"{name}, {kind}" + "".join(f" ({problem})" for problem in problems)

    def _asymmetry(
        self, column: Column, context: Context, tangent: list[Tensor], product: list[Tensor]
    ) -> str:
        """Whether derivatives are wrong, as some of torch are: then u'Av and v'Au differ."""
        other = _noise_like(tangent)
        with self.risk.settings():
            theirs = self._multiplied(column, other, context, self.risk.params)
        return _symmetry_problem(tangent, product, other, theirs)

    def _traced(
        self, column: Column, context: Context, tangent: list[Tensor], expected: list[Tensor]
    ) -> tuple[list[Tensor] | None, str]:
        """The primal part of the batch, by a trace that passed all checks; or why there is none.

        The trace must give the eager product ``expected``. Symmetry is checked between that
        product and one of the trace, which shares its primal part: no third pass over the model.
        """
        if self._name == "eager":
            return None, ""
        try:
            trace = self._linearized(column, context)
            with self.risk.arithmetic():
                primal = trace.primal((self.risk.params, context))
                product = trace.tangent(primal, [leaf.unsqueeze(0) for leaf in tangent])
                problem = _gap_problem([leaf[0] for leaf in product], expected)
                del product
                if not problem:
                    other = _noise_like(tangent)
                    theirs = trace.tangent(primal, [leaf.unsqueeze(0) for leaf in other])
                    theirs = [leaf[0] for leaf in theirs]
                    problem = _symmetry_problem(tangent, expected, other, theirs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a trace can fail in as many ways as there are models
            return None, first_line(error)
        if problem:
            return None, problem
        self._traces[_shape(context)] = trace
        return primal, ""


def _gap_problem(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    gap = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    size = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    return f"its product differs by {gap / size:.1g}" if gap > _tolerance(found[0]) * size else ""


def _symmetry_problem(
    left: Sequence[Tensor],
    left_product: Sequence[Tensor],
    right: Sequence[Tensor],
    right_product: Sequence[Tensor],
) -> str:
    gap = abs(_inner(right, left_product) - _inner(left, right_product))
    size = (_inner(right, right) * _inner(left_product, left_product)) ** 0.5
    size += (_inner(left, left) * _inner(right_product, right_product)) ** 0.5
    # Not of NaN, which has an error of its own.
    return f"it is not symmetric, by {gap / size:.1g}" if gap > _tolerance(left[0]) * size else ""


def _noise_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gaussian tensors of these shapes, the same in every call."""
    rng = torch.Generator().manual_seed(0)
    return [
        torch.randn(leaf.shape, generator=rng, dtype=torch.float64).to(leaf) for leaf in tensors
    ]


def _tolerance(like: Tensor) -> float:
    """What roundoff may do; on a GPU single precision may be that of TF32 or half."""
    if like.is_cuda and like.dtype == torch.float32:
        return 0.05
    return float(10 * torch.finfo(like.dtype).eps ** 0.5)


def _inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(left, right, strict=True))


def _shape(context: Context) -> Any:
    leaves, spec = tree_flatten(context)
    described = [
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    ]
    return spec, tuple(described)


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


# ------------------------------------------------------------------------------------------
# Products with matrices that are means over batches, in the memory that there is.

TILE = 2**14  # rows of a block that are turned at once

# The product of a batch with vectors, as tensors ``(k, *shape)``.
Linear = Callable[[Sequence[Tensor]], list[Tensor]]


@final
class Products:
    r"""Sums over batches of weighted products with blocks: what multiplies a curvature operator.

    ``linearized`` traces a product once for every shape of batch and cuts the trace in two: what
    depends on the vector is all that a further product computes, the rest is kept while it fits
    ``memory`` (and computed anew in every product where it does not). ``eager`` differentiates
    anew in every product. ``auto`` is ``linearized`` where the model can be traced and gives the
    same product, else ``eager``. Either way forward over reverse where every operation has a
    forward rule, else reverse over reverse. Where a GPU runs out of memory, blocks are cut into
    fewer columns, and batches into fewer samples. ``plan`` says what was chosen.

    Args:
        risk: What to differentiate.
        columns: Products of one batch with one vector, the preferred first.
        engine: See above.
        compiled: Whether to compile the traces, and to search for the fastest convolutions on a GPU
            (seconds to minutes, at the first product).
        memory: Bytes for what is kept. Default: 2 GiB, or half of what a GPU has free.
        block_size: Columns multiplied at once: 8 by default, and one by one on the CPU for a model
            with convolutions, where a block of them is dearer than its columns.
        shift: Multiple of the identity to add to the sum, such as that of an L2 term.
        extra: What the products need of a batch beside it, by its number.
    """

    def __init__(
        self,
        risk: Risk,
        columns: Sequence[tuple[str, Column]],
        *,
        engine: EngineName = "auto",
        compiled: bool = False,
        memory: int | None = None,
        block_size: int | None = None,
        shift: float = 0.0,
        extra: Callable[[int], Any] = lambda index: None,
    ) -> None:
        if block_size is not None:
            check_count("block_size", block_size)
        if memory is not None:
            check_count("memory", memory, low=0)
        self.risk, self.shift, self.extra = risk, shift, extra
        self.block_size = _width(risk) if block_size is None else block_size
        self._engine = Engine(risk, columns, name=engine, compiled=compiled)
        self._room, self._compiled = memory, compiled
        self._kept: dict[tuple[int, int], Linear] = {}
        self._chunk: int | None = None  # samples of a batch at once
        self._narrowed = ""  # why columns are multiplied one by one

    @property
    def plan(self) -> str:
        """How products are computed, and why; known after the first."""
        cut = "" if self._chunk is None else f", {self._chunk} samples at a time to fit memory"
        return self._engine.plan + self._narrowed + cut

    def matmat(self, block: Tensor) -> Tensor:
        """The sum over the batches of all processes, shifted: ``(n, k)``."""
        total: Tensor | None = None
        for weight, product in self.each(block):
            # What a batch gives is new: the first is the sum so far.
            total = product.T.mul_(weight) if total is None else total.add_(product.T, alpha=weight)
        if total is None:
            total = torch.zeros_like(block.T, memory_format=torch.contiguous_format)
        self.risk.reduced(total)
        if self.shift:
            total.add_(block.T, alpha=self.shift)
        if not bool(torch.isfinite(total.sum())):
            self.risk.diagnose()
        return total.T

    def each(self, block: Tensor) -> Iterator[tuple[float, Tensor]]:
        """Weight and product ``(n, k)`` of each of this process's batches in turn, unshifted."""
        vectors = differentiable(_turned(block))
        for index, context, weight in self.risk.contexts():
            if (extra := self.extra(index)) is not None:
                context = replace(context, extra=extra)
            size = self.risk.batch_sizes[index]
            while True:
                try:
                    product = self._batch(vectors, index, context, size)
                    break
                except torch.OutOfMemoryError as error:
                    self._cut(len(vectors), context, size, error)
                except (NotImplementedError, RuntimeError) as error:
                    if min(len(vectors), self.block_size) == 1:
                        raise
                    # vmap has not a rule for everything; what it is not to blame for comes again.
                    self.block_size = 1
                    self._narrowed = f" (one column at a time: {first_line(error)})"
            yield weight, product.T

    def _batch(self, vectors: Tensor, index: int, context: Context, size: int) -> Tensor:
        if self._chunk is None or size <= self._chunk:
            return self._part(vectors, (index, 0), context)
        total = torch.zeros_like(vectors)
        for start in range(0, size, self._chunk):
            stop = min(start + self._chunk, size)
            part = _samples(context, slice(start, stop), size)
            product = self._part(vectors, (index, start), part)
            total.add_(product, alpha=(stop - start) / size)
        return total

    def _part(self, vectors: Tensor, key: tuple[int, int], context: Context) -> Tensor:
        with self.risk.arithmetic(), searched_convolutions(self._compiled):
            multiplied = self._linear(key, context) or partial(self._engine.eager, context)
            sizes = [shape.numel() for shape in self.risk.space.shapes.values()]
            product = torch.empty_like(vectors)
            for columns in _chunks(len(vectors), self.block_size):
                found = multiplied(_tensors(self.risk, vectors[columns]))
                for piece, leaf in zip(product[columns].split(sizes, 1), found, strict=True):
                    piece.copy_(leaf.reshape(piece.shape))
        return product

    def _linear(self, key: tuple[int, int], context: Context) -> Linear | None:
        """The tangent part on a batch with all it needs: kept, or made and then kept if it fits."""
        if key in self._kept:
            return self._kept[key]
        linearization = self._engine.linearization(context)
        if linearization is None:
            return None
        trace, primal = linearization
        linear = partial(trace.tangent, primal)
        if self._room is None:
            self._room = _room(self.risk.theta.device)
        owned = [leaf for leaf in tree_leaves(context) if isinstance(leaf, Tensor)]
        size = nbytes(primal, beside=[self.risk.theta, *owned])
        if size <= self._room:
            self._room -= size
            self._kept[key] = linear
        return linear

    def _cut(self, width: int, context: Context, size: int, error: Exception) -> None:
        """Make blocks narrower, then batches shorter; raise where neither is possible."""
        self._kept.clear()
        self._room = 0
        if min(width, self.block_size) > 1:
            self.block_size = min(width, self.block_size) // 2
        else:
            at_once = size if self._chunk is None else min(size, self._chunk)
            if at_once == 1 or not self._divisible(context, size):
                raise error
            self._chunk = -(-at_once // 2)
            self._engine.forget()
        torch.cuda.empty_cache()

    def _divisible(self, context: Context, size: int) -> bool:
        """Whether the loss of a batch is the mean of those of its parts, as some are not."""
        if not self.risk.separable:
            return False
        with torch.no_grad(), self.risk.settings():
            outputs, target = self.risk.evaluate(self.risk.params, context)
        if self.risk.loss_fn is None or not is_rows(outputs, size):
            return False
        slope = grad(self.risk.adapter.loss)
        parts = []
        for which in (slice(0, size // 2), slice(size // 2, size)):
            own = outputs[which]
            parts.append(slope(own, take_rows(target, which, size)) * (len(own) / size))
        # By the outputs: weights or ignored terms that the losses do not show show here.
        gap = (torch.cat(parts) - (whole := slope(outputs, target))).norm()
        rtol: float = torch.finfo(self.risk.theta.dtype).eps ** 0.5
        return float(gap) <= rtol * float(whole.norm())


class CurvatureOperator(LinearOperator):
    """A matrix of a risk that is a mean over batches; ``products`` knows how it is multiplied."""

    matrix: ClassVar[str]

    def __init__(self, products: Products) -> None:
        risk = products.risk
        mode = {"batch_norm": risk.batch_norm} if batch_norms(risk.model) else {}
        super().__init__(
            risk.space.size,
            dtype=risk.theta.dtype,
            device=risk.theta.device,
            block_size=products.block_size,
            origin={"matrix": self.matrix, **mode},
        )
        self.risk, self.products = risk, products

    def _matmat(self, block: Tensor) -> Tensor:
        return self.products.matmat(block)

    def _detail(self) -> str:
        return repr(self.risk)


def _width(risk: Risk) -> int:
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in risk.model.modules())
    return 1 if convolves and risk.theta.device.type == "cpu" else 8


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] // 2)
    return 2 * 2**30


def _samples(context: Context, which: slice, size: int) -> Context:
    varying = take_rows((context.batch, context.masks, context.extra), which, size)
    return Context(context.constants, *varying)


def _turned(block: Tensor) -> Tensor:
    """The columns of a block as contiguous rows ``(k, n)``; on the CPU by tiles, for the cache."""
    if block.is_cuda or block.T.is_contiguous():
        return block.T.contiguous()
    rows = torch.empty(block.shape[1], len(block), dtype=block.dtype)
    for tile, part in zip(rows.split(TILE, 1), block.split(TILE), strict=True):
        tile.copy_(part.T)
    return rows


def _tensors(risk: Risk, vectors: Tensor) -> list[Tensor]:
    """Vectors ``(k, n)`` as tensors ``(k, *shape)``, in the order of the parameters."""
    shapes = list(risk.space.shapes.values())
    pieces = vectors.split([shape.numel() for shape in shapes], 1)
    return [
        piece.reshape(len(vectors), *shape) for piece, shape in zip(pieces, shapes, strict=True)
    ]


def _chunks(count: int, width: int) -> list[slice]:
    """Full blocks, then single columns: two traces serve every count."""
    full = count // width * width
    blocks = [slice(start, start + width) for start in range(0, full, width)]
    return blocks + [slice(i, i + 1) for i in range(full, count)]
