"""Products with matrices that are means over batches, by the fastest way that works."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten

from ritz._core.checks import check_choice, check_count
from ritz.curvature.linearize import Linearization, nbytes
from ritz.curvature.points import Context, Params
from ritz.curvature.risk import Risk
from ritz.operators.base import LinearOperator

Column = Callable[[Risk, Params, Context, Params], Params]
Engine = Literal["auto", "linearized", "eager"]
ENGINES = ("auto", "linearized", "eager")
MAX_TRACES = 8  # shapes of batches that are worth a trace each


@final
class Products:
    r"""Sums over batches of weighted products with blocks: the engine of the curvature operators.

    ``linearized`` traces a product once for every shape of batch and cuts the trace in two: what
    depends on the vector is all that a further product computes, the rest is kept while it fits
    ``memory`` (and computed anew in every product where it does not). ``eager`` differentiates
    anew in every product. ``auto`` is ``linearized`` where the model can be traced and gives the
    same product, else ``eager``. Either way forward over reverse where every operation has a
    forward rule, else reverse over reverse; ``plan`` says what was chosen.

    Args:
        risk: What to differentiate.
        columns: Products of one batch with one vector, the preferred first.
        engine: See above.
        compiled: Whether to compile the traces (seconds to minutes, at the first product).
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
        engine: Engine = "auto",
        compiled: bool = False,
        memory: int | None = None,
        block_size: int | None = None,
        shift: float = 0.0,
        extra: Callable[[int], Any] = lambda index: None,
    ) -> None:
        check_choice("engine", engine, ENGINES)
        if compiled and engine == "eager":
            raise ValueError("compile=True needs engine='linearized', got 'eager'")
        if block_size is not None:
            check_count("block_size", block_size)
        self.risk, self.shift, self.extra = risk, shift, extra
        self.block_size = _width(risk) if block_size is None else block_size
        self._columns, self._engine, self._compiled = columns, engine, compiled
        self._room = memory
        self._kept: dict[int, list[Tensor]] = {}
        self._traces: dict[Any, Linearization] = {}
        self._chosen: tuple[str, Column] | None = None
        self.plan = "not yet used"

    def matmat(self, block: Tensor) -> Tensor:
        """The sum over the batches of all processes: ``(n, k)``."""
        total = torch.zeros(block.shape[1], len(block), dtype=block.dtype, device=block.device)
        for weight, product in self.each(block):
            total.add_(product.T, alpha=weight)
        self.risk.reduced(total)
        if self.shift:
            total.add_(block.T, alpha=self.shift)
        if not bool(torch.isfinite(total.sum())):
            self.risk.diagnose()
        return total.T

    def each(self, block: Tensor) -> Iterator[tuple[float, Tensor]]:
        """Weight and product ``(n, k)`` of each of this process's batches in turn, unshifted."""
        vectors = block.T.contiguous()
        for index, context, weight in self.risk.contexts():
            if (extra := self.extra(index)) is not None:
                context = replace(context, extra=extra)
            with self.risk.settings():
                product = self._batch(vectors, index, context)
            yield weight, product.T

    def _batch(self, vectors: Tensor, index: int, context: Context) -> Tensor:
        if self._chosen is None:
            self._choose(context, vectors[:1])
        trace = self._trace(context) if self._engine == "linearized" else None
        kept = None if trace is None else self._primal(trace, index, context)
        products = []
        for rows in _chunks(len(vectors), self.block_size):
            tangent = _tensors(self.risk, vectors[rows])
            if trace is None or kept is None:
                product = self._eager(context, tangent)
            else:
                product = trace.tangent(kept, tangent)
            products.append(torch.cat([leaf.reshape(len(leaf), -1) for leaf in product], 1))
        return products[0] if len(products) == 1 else torch.cat(products)

    def _eager(self, context: Context, tangent: Sequence[Tensor]) -> list[Tensor]:
        one = self._one
        if len(tangent[0]) == 1:
            return [leaf.unsqueeze(0) for leaf in one([t[0] for t in tangent], context)]
        return list(vmap(lambda *columns: tuple(one(list(columns), context)))(*tangent))

    def _one(self, tangent: Sequence[Tensor], context: Context) -> list[Tensor]:
        """The product of one batch with one vector, in the way that was chosen."""
        if self._chosen is None:
            raise RuntimeError("no way to form products has been chosen yet")
        return self._by(self._chosen[1], tangent, context, self.risk.params)

    def _by(
        self, column: Column, tangent: Sequence[Tensor], context: Context, params: Params
    ) -> list[Tensor]:
        names = list(self.risk.space.shapes)
        found = column(self.risk, params, context, dict(zip(names, tangent, strict=True)))
        return [found[name] for name in names]

    def _trace(self, context: Context) -> Linearization:
        key = _shape(context)
        if key not in self._traces:
            if len(self._traces) == MAX_TRACES:
                self._traces.clear()
            self._traces[key] = self._linearized(self._chosen_column(), context)
        return self._traces[key]

    def _chosen_column(self) -> Column:
        if self._chosen is None:
            raise RuntimeError("no way to form products has been chosen yet")
        return self._chosen[1]

    def _linearized(self, column: Column, context: Context) -> Linearization:
        def product(tangent: list[Tensor], point: tuple[Params, Context]) -> list[Tensor]:
            return self._by(column, tangent, point[1], point[0])

        like = list(self.risk.params.values())
        return Linearization(product, like, (self.risk.params, context), compiled=self._compiled)

    def _primal(self, trace: Linearization, index: int, context: Context) -> list[Tensor]:
        if index in self._kept:
            return self._kept[index]
        found = trace.primal((self.risk.params, context))
        if self._room is None:
            self._room = _room(self.risk.theta.device)
        owned = [leaf for leaf in tree_flatten((self.risk.theta, context))[0]
                 if isinstance(leaf, Tensor)]  # fmt: skip
        size = nbytes(found, beside=owned)
        if size <= self._room:
            self._room -= size
            self._kept[index] = found
        return found

    def _choose(self, context: Context, vector: Tensor) -> None:
        """Find the first way that works, and check it against what it must equal."""
        tangent = [leaf[0] for leaf in _tensors(self.risk, vector)]
        problems = []
        for name, column in self._columns:
            try:
                expected = self._by(column, tangent, context, self.risk.params)
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                problems.append(f"{name}: {_first_line(error)}")
                continue
            self._chosen = (name, column)
            break
        else:
            self.risk.diagnose()
            raise RuntimeError("the loss cannot be differentiated twice: " + "; ".join(problems))
        if self._engine != "eager":
            problem = self._trace_problem(column, context, tangent, expected)
            if problem and self._engine == "linearized":
                raise RuntimeError(
                    f"engine='linearized' needs a model that can be traced: {problem}"
                )
            self._engine = "eager" if problem else "linearized"
            problems += [f"not linearized: {problem}"] if problem else []
        kind = "compiled" if self._compiled else self._engine
        self.plan = f"{name}, {kind}" + "".join(f" ({problem})" for problem in problems)

    def _trace_problem(
        self, column: Column, context: Context, tangent: list[Tensor], expected: list[Tensor]
    ) -> str:
        try:
            trace = self._linearized(column, context)
            kept = trace.primal((self.risk.params, context))
            found = trace.tangent(kept, [leaf.unsqueeze(0) for leaf in tangent])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a trace can fail in as many ways as there are models
            return _first_line(error)
        gap = sum(
            float((a[0] - b).double().square().sum()) for a, b in zip(found, expected, strict=True)
        )
        size = sum(float(b.double().square().sum()) for b in expected)
        if gap**0.5 > 10 * torch.finfo(tangent[0].dtype).eps ** 0.5 * size**0.5:
            return f"its product differs by {(gap / size) ** 0.5:.1g}"
        self._traces[_shape(context)] = trace
        return ""


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


def _shape(context: Context) -> Any:
    leaves, spec = tree_flatten(context)
    described = [
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    ]
    return spec, tuple(described)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
