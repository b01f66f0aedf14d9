"""How the product of one batch with vectors is computed: the fastest way that works."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten

from ritz._core.checks import check_choice
from ritz.curvature.linearize import Linearization
from ritz.curvature.points import Context, Params
from ritz.curvature.risk import Risk
from ritz.curvature.settings import without_deprecations_of_torch

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

    def linearization(self, context: Context) -> Linearization | None:
        """The trace for batches of this shape; ``None`` where products are eager."""
        column = self._chosen(context)
        key = _shape(context)
        if self._name == "eager" or (key not in self._traces and len(self._traces) == MAX_TRACES):
            return None
        if key not in self._traces:
            self._traces[key] = self._further(column, context)
        return self._traces[key]

    def eager(self, context: Context, tangent: Sequence[Tensor]) -> list[Tensor]:
        """The product, ``(k, *shape)`` each, with ``k`` vectors of tensors ``(k, *shape)``."""
        column = self._chosen(context)
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

    def _chosen(self, context: Context) -> Column:
        """The way of this engine: found at the first call, and checked against what it must be."""
        if self._column is None:
            with without_deprecations_of_torch():
                self._column = self._choose(context)
        return self._column

    def _choose(self, context: Context) -> Column:
        # Of the size of the weights, so that what must be equal can be told from zero.
        tangent = [leaf + leaf.abs().mean() for leaf in self.risk.params.values()]
        name, column, expected, problems = self._first_that_works(context, tangent)
        if self._name != "eager":
            problem = self._trace_problem(column, context, tangent, expected)
            if problem and self._strict:
                raise RuntimeError(f"engine='linearized' needs a traceable model: {problem}")
            self._name = "eager" if problem else "linearized"
            problems += [f"not linearized: {problem}"] if problem else []
        kind = "linearized and compiled" if self._compiled else self._name
        self.plan = f"{name}, {kind}" + "".join(f" ({problem})" for problem in problems)
        return column

    def _first_that_works(
        self, context: Context, tangent: list[Tensor]
    ) -> tuple[str, Column, list[Tensor], list[str]]:
        problems: list[str] = []
        for name, column in self._ways:
            try:
                with self.risk.settings():
                    found = self._multiplied(column, tangent, context, self.risk.params)
                    problem = self._asymmetry(column, context, tangent, found)
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError) as error:
                problem = first_line(error)
            if not problem:
                return name, column, found, problems
            problems.append(f"no {name}: {problem}")
        with suppress(NotImplementedError, RuntimeError):  # a gradient may be as impossible
            self.risk.diagnose()
        raise RuntimeError("the loss cannot be differentiated as it must: " + "; ".join(problems))

    def _asymmetry(
        self, column: Column, context: Context, tangent: list[Tensor], product: list[Tensor]
    ) -> str:
        """Whether derivatives are wrong, as some of torch are: then u'Av and v'Au differ."""
        rng = torch.Generator().manual_seed(0)
        other = [
            torch.randn(leaf.shape, generator=rng, dtype=torch.float64).to(leaf) for leaf in tangent
        ]
        theirs = self._multiplied(column, other, context, self.risk.params)
        gap = abs(_inner(other, product) - _inner(tangent, theirs))
        size = (_inner(other, other) * _inner(product, product)) ** 0.5
        size += (_inner(tangent, tangent) * _inner(theirs, theirs)) ** 0.5
        # Not of NaN, which has an error of its own.
        return (
            f"it is not symmetric, by {gap / size:.1g}" if gap > _tolerance(other[0]) * size else ""
        )

    def _trace_problem(
        self, column: Column, context: Context, tangent: list[Tensor], expected: list[Tensor]
    ) -> str:
        try:
            trace = self._linearized(column, context)
            with self.risk.arithmetic():
                kept = trace.primal((self.risk.params, context))
                found = trace.tangent(kept, [leaf.unsqueeze(0) for leaf in tangent])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a trace can fail in as many ways as there are models
            return first_line(error)
        pairs = [(a[0].double(), b.double()) for a, b in zip(found, expected, strict=True)]
        gap = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
        size = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
        if gap > _tolerance(tangent[0]) * size:
            return f"its product differs by {gap / size:.1g}"
        self._traces[_shape(context)] = trace
        return ""


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
