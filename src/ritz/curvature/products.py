"""Products with matrices that are means over batches, in the memory that there is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.utils._pytree import tree_leaves

from ritz._core.checks import check_count
from ritz.curvature.batches import is_rows, rows
from ritz.curvature.engines import Column, Engine, EngineName, first_line
from ritz.curvature.inference import differentiable
from ritz.curvature.linearize import nbytes
from ritz.curvature.points import Context
from ritz.curvature.risk import Risk
from ritz.curvature.settings import searched_convolutions
from ritz.operators.base import LinearOperator

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
        trace = self._engine.linearization(context)
        if trace is None:
            return None
        found = trace.primal((self.risk.params, context))
        linear = partial(trace.tangent, found)
        if self._room is None:
            self._room = _room(self.risk.theta.device)
        owned = [leaf for leaf in tree_leaves(context) if isinstance(leaf, Tensor)]
        size = nbytes(found, beside=[self.risk.theta, *owned])
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
            parts.append(slope(own, rows(target, which, size)) * (len(own) / size))
        # By the outputs: weights or ignored terms that the losses do not show show here.
        gap = (torch.cat(parts) - (whole := slope(outputs, target))).norm()
        rtol: float = torch.finfo(self.risk.theta.dtype).eps ** 0.5
        return float(gap) <= rtol * float(whole.norm())


class CurvatureOperator(LinearOperator):
    """A matrix of a risk that is a mean over batches; ``products`` knows how it is multiplied."""

    def __init__(self, products: Products) -> None:
        risk = products.risk
        super().__init__(
            risk.space.size,
            dtype=risk.theta.dtype,
            device=risk.theta.device,
            block_size=products.block_size,
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
    varying = rows((context.batch, context.masks, context.extra), which, size)
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
