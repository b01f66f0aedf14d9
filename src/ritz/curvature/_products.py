"""`Products`: matrix-vector products as sums over batches: tracing, caching, memory limits."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypedDict, final

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.conv import _ConvNd

from ritz._core import cross_entropy
from ritz._core.attempts import attempt, first_line
from ritz._core.batches import tensors
from ritz._core.blocks import euclidean_norm
from ritz._core.checks import check_choice, check_count, is_below
from ritz._core.modes import arithmetic, differentiable, searched_convolutions
from ritz.curvature._cuda_graph import Values
from ritz.curvature._modes import without_garbage_collection, without_warnings_of_torch
from ritz.curvature._parameters import ROUNDOFF, Context, Params, as_double
from ritz.curvature._replaced_functions import written_out_recurrence
from ritz.curvature._risk import Risk
from ritz.curvature._tracing import GuardError, Linearization, nbytes, signature


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that decide whether a product is traced, cached or computed in parts."""

    # Bytes of cached primal parts on the CPU. On a GPU, half of the free memory is used.
    cache: int = 2 * 2**30
    # A trace takes as long as 20 to 40 gradients. Most data have batches of two shapes; padded text
    # has one shape per length.
    max_traces: int = 8
    # Traces for batches of one shape. A model that reads a number which differs in every batch
    # would otherwise be traced for each batch.
    max_paths: int = 4
    # Number of products with a batch from which a trace is worth its cost. Eager: 2.7 gradients per
    # product. Traced: 30 gradients once, then 1.75 per product (GPT of 6 layers, ViT, BERT;
    # benchmarks/models.py). The trace of a second shape pays off after 10 products: 0.37 s once
    # against 0.04 s per product (8 and 3 texts).
    repaid: int = 16
    # Largest difference, in eps, between an eager product and that of a trace made for another
    # number of samples. Correct products differ by up to 4 eps. A trace that contains a constant
    # 1 / n of the first batch, with n up to 10,000, differs by more than 200.
    alike: float = 200.0
    # Batch sizes that occur in a smaller fraction of the batches, such as that of a shorter last
    # batch, are not traced. The eager product with a small batch takes about as long as the traced
    # product with a large one (GPT of 6 layers), so the total grows by a few per cent.
    rare: float = 0.03
    # Columns multiplied at once. On an H200, a column takes 1.1 ms in a block of 8 and 9.0 ms alone
    # (MLP). On the CPU it takes 18 ms in both cases (benchmarks/results/products*.json).
    block_size: int = 8
    # Relative error allowed in float32 on a GPU, where products may be in TF32 (10 bits).
    gpu_rtol: float = 0.05


TUNING = Tuning()
MANY_SHAPES = f"there are more than {TUNING.max_traces} shapes"

# The product of the matrix of one batch with one vector: (risk, params, context, vector).
Column = Callable[[Risk, Params, Context, Params], Params]
# The product of the matrix of one batch with ``k`` vectors, ``(k, n)`` to a new ``(k, n)``.
Linear = Callable[[Tensor], Tensor]
PLAIN = "plain autograd"  # name of the way that differentiates without torch.func
EngineName = Literal["auto", "linearized", "eager"]
ENGINES = ("auto", "linearized", "eager")


class ProductOptions(TypedDict, total=False):
    """Options of :class:`Products` that :func:`hessian` and similar functions pass on."""

    engine: EngineName
    compile: bool
    memory: int | None
    block_size: int | None
    num_products: int | None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise unless all options are those of :class:`ProductOptions`."""
    known = ProductOptions.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(f"options must be among {', '.join(known)}, got {', '.join(unknown)}")


@final
@dataclass(slots=True)
class Choice:
    """How the products of one matrix are computed, and the traces of the matrix.

    A choice is shared by all operators of the same matrix at a risk, and at risks that differ from
    it in weights or data alone. Each shape of batches is therefore traced once.

    Attributes:
        engine: ``auto`` until the first product has shown whether the model can be traced.
        way: Name of the first way that works.
        column: This way of computing the product of a batch with one vector, which is traced.
        untraced: The fastest way of a batch without a trace, by whether a block has several
            columns. Known when it is first needed.
        plan: The choice in words.
        traces: Lists of traces by :func:`signature` of the batch. A list has one trace per path
            through the model, and is empty if the model cannot be traced at this signature.
        any_rows: The signature of one sample, and a trace that may hold for any number of samples.
    """

    engine: EngineName
    way: str = ""
    column: Column | None = None
    untraced: dict[bool, Column] = field(default_factory=dict)
    plan: str = "not yet used"
    traces: dict[Any, list[Linearization]] = field(default_factory=dict)
    any_rows: tuple[Any, Linearization] | None = None


@dataclass(eq=False, slots=True)
class Room:
    """Bytes that are left for cached parts."""

    left: int

    def take(self, size: int) -> bool:
        """Take some bytes, if so many are left; return whether they were."""
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits


@final
class Products:
    r"""Products :math:`V \mapsto \sum_b w_b A_b V + \mu V` with the matrices of batches.

    ``linearized`` traces a product and splits the trace into a primal part, which does not depend
    on the vector, and a tangent part. The primal part is cached while it fits into ``memory``, and
    later products compute the tangent part alone. There is one trace per shape of batches. Batches
    that differ in their number of samples share a trace if it gives the correct products.

    ``eager`` differentiates the model again in every product. ``auto`` is ``linearized`` if the
    model can be traced and the trace gives the same product. Otherwise it is ``eager``, with one
    warning.

    If a GPU runs out of memory, blocks are cut into fewer columns, then batches into fewer samples.

    Args:
        risk: The loss at a point.
        kind: Name of the matrix. Products of one kind at a risk share their traces.
        ways: Names and functions that compute the product of one batch with one vector: with
            forward mode, with reverse mode alone, and without torch.func. The first one that works
            is traced. Without a trace on the CPU, the last one that gives the same product is used,
            and for blocks the second one, because the last one cannot be mapped over columns.
        forward_layers: Without a trace, use forward mode for models with layers in which it is
            faster: convolutions, and for single vectors recurrent layers.
        engine: ``linearized``, ``eager`` or ``auto``.
        compile: Compile the traces, and search for the fastest convolutions on a GPU (seconds to
            minutes, at the first product).
        memory: Bytes for cached primal parts. Defaults to 2 GiB, or half the free memory of a GPU.
        block_size: Columns multiplied at once. Defaults to 8; to 1 for convolutions on the CPU,
            where a block costs more than its columns, and for large outputs, such as those of a
            vocabulary.
        num_products: How many products will be computed, if that is known. With ``auto``, a model
            is traced only if this is faster for so many products.
        shift: The multiple :math:`\mu` of the identity.
        extra: Returns additional data of a batch, such as drawn labels, by the index of the batch.
    """

    def __init__(
        self,
        risk: Risk,
        kind: str,
        ways: Sequence[tuple[str, Column]],
        *,
        engine: EngineName = "auto",
        compile: bool = False,
        memory: int | None = None,
        block_size: int | None = None,
        num_products: int | None = None,
        shift: float = 0.0,
        forward_layers: bool = True,
        extra: Callable[[int], Any] = lambda index: None,
    ) -> None:
        check_choice("engine", engine, ENGINES)
        if compile and engine == "eager":
            raise ValueError("compile=True needs engine='linearized', got 'eager'")
        if block_size is not None:
            block_size = check_count("block_size", block_size)
        if memory is not None:
            memory = check_count("memory", memory, low=0)
        if num_products is not None:
            num_products = check_count("num_products", num_products, low=0)
        self.risk, self.shift, self.extra = risk, shift, extra
        if block_size is None:
            convolves = any(isinstance(module, _ConvNd) for module in risk.model.modules())
            # With large outputs, one column keeps the device busy and needs several copies of them.
            alone = (
                convolves and not risk.theta.is_cuda
            ) or risk.num_outputs > cross_entropy.TUNING.alone
            block_size = 1 if alone else TUNING.block_size
        self.block_size = block_size
        self._ways, self._compile = ways, compile
        self._memory = memory
        self._room: Room | None = None  # known when the first part is cached
        self._num_products = num_products
        self._must_trace = compile or engine == "linearized"
        modules = list(risk.model.modules()) if forward_layers else []
        # By whether a block has several columns.
        self._forward = {
            False: any(isinstance(each, _ConvNd | nn.RNNBase) for each in modules),
            True: any(isinstance(each, _ConvNd) for each in modules),
        }
        key = (kind, engine, compile)
        # A trace that another operator made is used, however few products are wanted.
        traced = key in risk.shared and risk.shared[key].traces
        if not traced and engine == "auto" and not compile and num_products is not None:
            # How many products of single batches one trace would compute.
            uses = num_products * max(map(risk.batch_rows.count, risk.batch_rows), default=0)
            key = key if uses >= TUNING.repaid else (kind, engine := "eager", compile)
        self._choice: Choice = risk.shared.setdefault(key, Choice(engine))
        self._cached: dict[tuple[int, int], Linear] = {}  # by batch and first sample
        self._notes, self._num_traces = "", 0  # not shared with other operators
        self._chunk: int | None = None  # samples that are processed at once, if not a whole batch

    def __repr__(self) -> str:
        return f"Products({self.plan})"

    @property
    def plan(self) -> str:
        """How products are computed and why. Known after the first product."""
        cut = "" if self._chunk is None else f", {self._chunk} samples at a time to fit memory"
        return self._choice.plan + self._notes + cut

    def at(self, risk: Risk, *, extra: Callable[[int], Any] | None = None) -> "Products":
        """Return the products of another risk of the same model and loss, with the same traces.

        For batches of known shapes, only the primal parts are computed again.
        """
        if reason := risk.mismatch(self.risk):
            raise ValueError(f"risk must be of the same model, loss and modes, but {reason}")
        other = copy.copy(self)
        other.risk, other.extra = risk, extra or self.extra
        # Primal parts belong to a point and a batch; the choice with its traces is shared.
        other._cached, other._room = {}, None
        return other

    def matmat(self, block: Tensor) -> Tensor:
        """Return the product ``(n, k)``: the sum over batches and processes, and the shift."""
        total: Tensor | None = None
        for weight, product in self.each(block):
            # The product of a batch is a new tensor, so the sum can be stored in the first one.
            if total is None:
                total = product.T if weight == 1 else product.T.mul_(weight)
            else:
                total.add_(product.T, alpha=weight)
        if total is None:
            total = torch.zeros_like(block.T, memory_format=torch.contiguous_format)
        self.risk.sum_over_processes(total)
        if self.shift:
            total.add_(block.T, alpha=self.shift)
        if not bool(torch.isfinite(total.sum())):
            self.risk.diagnose()
        return total.T

    def each(self, block: Tensor) -> Iterator[tuple[float, Tensor]]:
        """Yield weight and product ``(n, k)`` of each batch of this process, without the shift."""
        vectors = differentiable(block.T.contiguous())
        for index, context, weight in self.risk.contexts():
            if (extra := self.extra(index)) is not None:
                context = replace(context, extra=extra)
            while True:
                try:
                    product = self._batch(vectors, index, context)
                    break
                except torch.OutOfMemoryError as error:
                    self._cut(len(vectors), context.size, error)
                except (NotImplementedError, RuntimeError) as error:
                    if min(len(vectors), self.block_size) == 1:
                        raise
                    # vmap may lack a rule for an operation. Any other error is raised again.
                    self.block_size = 1
                    self._notes += f" (one column at a time: {first_line(error)})"
            yield weight, product.T

    def roundoff(self) -> float:
        """Return the relative error of a product by roundoff, measured on up to eight batches.

        The product is compared with one in float64. The error is zero in float64, for models of
        more than 2^26 parameters, and if the model cannot be called in float64 or memory is short.
        """
        theta = self.risk.theta
        if theta.dtype == torch.float64 or len(theta) > ROUNDOFF.parameters:
            return 0.0
        # A model can raise any error if its data are float64. If one process failed and raised, the
        # others would wait for it forever.
        total = torch.zeros(2, dtype=torch.float64)
        with suppress(Exception):
            total = self._compare()
        gap, size = self.risk.sum_over_processes(total.to(theta.device)).tolist()
        return math.sqrt(gap / size) if size else 0.0

    def _compare(self) -> Tensor:
        """Return the squared norms of the error of a product, and of the product itself."""
        risk, precise = self.risk, copy.copy(self)
        precise.risk, precise._cached, precise._room = risk.in_float64(), {}, Room(0)
        rng = torch.Generator().manual_seed(0)
        vector = torch.randn(risk.theta.shape, generator=rng, dtype=torch.float64).to(risk.theta)
        wide = vector.double()
        error, total = torch.zeros_like(wide), torch.zeros_like(wide)
        # The same batches for any number of processes
        step = -(-risk.num_batches // ROUNDOFF.compared)
        for index, context, weight in risk.contexts():
            if index % step:
                continue
            if (extra := self.extra(index)) is not None:
                context = replace(context, extra=extra)
            product = self._batch(vector[None], index, context)[0]
            # Chosen in the first product. No trace is shared, because none holds for float64.
            choice = self._choice
            precise._choice = Choice("eager", column=choice.column, untraced=choice.untraced)
            exact = precise._batch(wide[None], index, as_double(context))[0]
            error.add_(product - exact, alpha=weight)
            total.add_(exact + self.shift * wide, alpha=weight)
        return torch.stack([error.square().sum(), total.square().sum()])

    def _batch(self, vectors: Tensor, index: int, context: Context) -> Tensor:
        size = context.size
        if self._chunk is None or size <= self._chunk:
            return self._part(vectors, (index, 0), context)
        total = torch.zeros_like(vectors)
        # The loss of a batch is a mean, so A_b = sum_p (n_p / n_b) A_p over its parts p.
        for start in range(0, size, self._chunk):
            stop = min(start + self._chunk, size)
            product = self._part(vectors, (index, start), context.rows(slice(start, stop)))
            total.add_(product, alpha=(stop - start) / size)
        return total

    def _part(self, vectors: Tensor, key: tuple[int, int], context: Context) -> Tensor:
        with arithmetic(self.risk.precision), searched_convolutions(self._compile):
            multiply = self._linear(key, context)
            if len(vectors) in (1, self.block_size):
                return multiply(vectors)
            product = torch.empty_like(vectors)
            # Full blocks, then single columns, so that two widths serve any number of columns.
            full, rest = divmod(len(vectors), self.block_size)
            widths = [self.block_size] * full + [1] * rest
            for part, columns in zip(product.split(widths), vectors.split(widths), strict=True):
                part.copy_(multiply(columns))
        return product

    def _linear(self, key: tuple[int, int], context: Context) -> Linear:
        """Return the product with the matrix of a batch: cached, traced or eager."""
        if key in self._cached:
            return self._cached[key]
        primal, choice = None, self._choice
        if choice.column is None:
            with without_warnings_of_torch():
                choice.column, primal = self._choose(context)
        if choice.way == PLAIN:
            self.block_size = 1  # vmap does not support torch.autograd.grad
        traced = self._trace(choice.column, context) if primal is None else (
            self._choice.traces[signature(context)][-1], primal)  # fmt: skip
        if traced is None:
            return partial(self._untraced, choice.column, context)
        trace, primal = traced
        linear, theta = partial(trace.tangent, primal), self.risk.theta
        if self._room is None:
            free = torch.cuda.mem_get_info(theta.device)[0] // 2 if theta.is_cuda else TUNING.cache
            self._room = Room(int(free) if self._memory is None else self._memory)
        if self._room.take(nbytes(primal, beside=[theta, *tensors(context)])):
            # A CUDA graph has copies of the primal part and of a block of vectors.
            self._cached[key] = linear = partial(linear, replay=self._room.take)
        return linear

    def _untraced(self, column: Column, context: Context, vectors: Tensor) -> Tensor:
        """Return eager products ``(k, n)`` by the fastest way for one or for several columns."""
        choice, wide = self._choice, len(vectors) > 1
        if wide not in choice.untraced:
            choice.untraced[wide] = self._fastest(context, (choice.way, column), wide=wide)[1]
        return self._eager(choice.untraced[wide], context, vectors)

    def _eager(self, column: Column, context: Context, vectors: Tensor) -> Tensor:
        """Differentiate the model again. Return the products with ``k`` vectors, ``(k, n)``."""
        multiply = partial(self._multiply, column, point=(self.risk.params, context))
        with self._derivatives_exist():
            if len(vectors) == 1:
                return multiply(vectors[0]).unsqueeze(0)
            return vmap(multiply)(vectors).contiguous()

    @contextmanager
    def _derivatives_exist(self) -> Iterator[None]:
        """Set the modes in which the model can be differentiated twice."""
        recurrence = written_out_recurrence(self.risk.model, self.risk.theta.device)
        with self.risk.settings(), recurrence:
            yield

    def _multiply(self, column: Column, vector: Tensor, point: tuple[Params, Context]) -> Tensor:
        space = self.risk.space
        return space.flatten(column(self.risk, *point, space.unflatten(vector))).detach()

    # The choice of a way, in the first product and on the first batch.

    def _choose(self, context: Context) -> tuple[Column, Values | None]:
        """Choose way and engine. Return the way, and the primal part if the model was traced."""
        theta, rng = self.risk.theta, torch.Generator().manual_seed(0)
        u = _as_large(theta)
        v = torch.randn(theta.shape, generator=rng, dtype=torch.float64).to(theta)
        problems: list[str] = []
        for name, column in self._ways:
            multiply = partial(self._eager, column, context, u[None])
            product, problem = attempt(multiply, NotImplementedError, RuntimeError)
            primal, no_trace = None, ""
            if not problem and self._choice.engine != "eager":
                if name == PLAIN:  # a trace needs torch.func
                    no_trace = problems[0].partition(": ")[2]
                else:
                    check = partial(self._checked_trace, column, context, u, product[0], v)
                    primal, no_trace = attempt(check, Exception)  # a trace can raise any error
            fastest = name, column
            if not problem and primal is None:
                fastest = self._fastest(context, fastest)
                Av = self._eager(fastest[1], context, v[None])[0]
                problem = _asymmetry(u, product[0], v, Av)
            if problem:
                problems.append(f"no {name}: {problem}")
                continue
            if no_trace and self._must_trace:
                raise RuntimeError(f"engine='linearized' needs a traceable model: {no_trace}")
            if self._choice.engine != "eager":
                self._choice.engine = "eager" if no_trace else "linearized"
                self._warn_if_slow(no_trace)
            self._choice.way = name
            if primal is None:
                self._choice.untraced[False] = fastest[1]
            # Without torch.func there is no trace, for the reasons that are given already.
            more = no_trace and name != PLAIN
            notes = problems + ([f"not linearized: {no_trace}"] if more else [])
            kind = "linearized and compiled" if self._compile else self._choice.engine
            self._choice.plan = f"{fastest[0]}, {kind}" + "".join(f" ({note})" for note in notes)
            return column, primal
        with suppress(NotImplementedError, RuntimeError):  # the gradient may fail too
            self.risk.diagnose()
        advice = ""
        if any("not symmetric" in problem for problem in problems) and theta.dtype == torch.float32:
            # Near a minimum, a user-defined loss may be nothing but roundoff.
            advice = (
                ". In float32 the terms of a loss cancel near a minimum: pass precision='float64', "
                "or write the loss with torch.nn.functional.cross_entropy or log_softmax"
            )
        raise RuntimeError(
            f"the loss cannot be differentiated twice: {'; '.join(problems)}{advice}"
        )

    def _warn_if_slow(self, no_trace: str, batches: str = "") -> None:
        """Warn once for a risk and all risks derived from it if the model cannot be traced."""
        if not no_trace or self.risk.warned:
            return
        self.risk.warned.append(no_trace)
        # Measured on the CPU: GPT-2, BERT, ViT, MLP and convolutions; see hessian().
        cause = (
            "The usual cause is code in forward() that leaves torch or depends on values: .item(), "
            ".numpy(), packed sequences, masks as indices."
        )
        if no_trace == MANY_SHAPES:
            cause = "Pad the batches to a few lengths, such as multiples of 32."
        warnings.warn(
            f"{type(self.risk.model).__name__} cannot be traced{batches}, so each product "
            "evaluates and differentiates it again. This costs 2 to 4 gradients, instead of 1 to 2 "
            f"for a traced model. {cause} Pass engine='eager' to silence this warning. "
            f"The reason: {no_trace}",
            stacklevel=2,
        )

    def _fastest(
        self, context: Context, first: tuple[str, Column], *, wide: bool = False
    ) -> tuple[str, Column]:
        """Return the fastest way without a trace that gives the product of the first way.

        A rule and not a stopwatch, so that products do not change in the last digit from run to
        run. :func:`ritz.curvature._matrices.hessian` has the measurements.

        Args:
            context: The first batch without a trace.
            first: A way that works, with its name.
            wide: Whether blocks have several columns.
        """
        faster = self._faster(wide)
        if not faster or faster[0][0] == first[0]:
            return first
        # Two columns, because torch has some derivatives that it cannot map over columns.
        u = _as_large(self.risk.theta)
        block = torch.stack([u, -u]) if wide else u[None]
        expected = self._eager(first[1], context, u[None])[0]
        for name, column in faster:
            multiply = partial(self._eager, column, context, block)
            products, problem = attempt(multiply, NotImplementedError, RuntimeError)
            if problem:
                continue
            gap, size = float((products[0] - expected).norm()), float(expected.norm())
            if name == first[0] or is_below(gap, _rtol(u) * size):
                return name, column
        return first

    def _faster(self, wide: bool) -> Sequence[tuple[str, Column]]:
        """Return the ways to try without a trace, the fastest first."""
        _, reverse, plain = self._ways
        if self.risk.theta.is_cuda or self._forward[wide]:
            return ()
        return (reverse,) if wide else (plain, reverse)

    def _checked_trace(
        self, column: Column, context: Context, u: Tensor, Au: Tensor, v: Tensor
    ) -> Values:
        """Trace the way. Return the primal part of the batch, or raise if a product is wrong.

        The trace must reproduce the eager product ``Au``. Symmetry is checked with this product and
        a product ``Av`` of the trace, so that no second eager product is needed.
        """
        key, primal = signature(context), None
        if part := self._prime_part(context):
            traced = partial(self._linearize, column, part, rows=part.size)
            trace, problem = attempt(traced, Exception)
            primal = None if problem else self._primal_if_equal(trace, context, u, Au)
        if primal is not None:
            self._choice.any_rows = _of_one_sample(context), trace
        with arithmetic(self.risk.precision):
            if primal is None:
                trace = self._linearize(column, context)
                primal = trace.primal((self.risk.params, context))
            product, Av = (trace.tangent(primal, vector[None])[0] for vector in (u, v))
        gap, size = float((product - Au).norm()), float(Au.norm())
        # An eager product with NaN is reported later, together with the batch that causes it.
        if not is_below(gap, _rtol(u) * size) and math.isfinite(size):
            raise ArithmeticError(f"the traced product differs by {gap / size:.1g}")
        if problem := _asymmetry(u, Au, v, Av):
            raise ArithmeticError(problem)
        self._choice.traces[key] = [trace]
        return primal

    def _trace(self, column: Column, context: Context) -> tuple[Linearization, Values] | None:
        """Return a trace that holds for a batch, and its primal part. ``None`` if there is none."""
        if self._choice.engine == "eager":
            return None
        point, traces = (self.risk.params, context), self._choice.traces
        # Other values may take a path through the model that cannot be traced.
        kinds = () if self._must_trace else (Exception,)
        key, problem = attempt(partial(signature, context), *kinds)
        known = traces.get(key)
        for trace in known or ():
            with suppress(GuardError):
                return trace, trace.primal(point, context.size)
        if known is None and not problem and (served := self._trace_of_any_rows(column, context)):
            traces[key] = [served[0]]
            return served
        if known == [] or (known is None and self._is_rare(context)):
            return None
        if not problem and len(known or ()) >= TUNING.max_paths:
            problem = f"one shape takes more than {TUNING.max_paths} paths through the model"
        elif not problem and self._num_traces >= TUNING.max_traces:
            problem = MANY_SHAPES
        if not problem:
            trace, problem = attempt(partial(self._linearize, column, context), *kinds)
        if problem:
            note = f" (not linearized for all batches: {problem})"
            self._choice.plan += note if note not in self._choice.plan else ""
            self._warn_if_slow(problem, f" on some batches, such as one of {context.size} samples")
            if key is not None:
                traces.setdefault(key, [])
            return None
        traces.setdefault(key, []).append(trace)
        return trace, trace.primal(point)

    def _is_rare(self, context: Context) -> bool:
        """Return whether so few batches have this size that a trace would not save time."""
        rows = self.risk.batch_rows
        count = rows.count(context.size)
        uses = math.inf if self._num_products is None else self._num_products * count
        return not self._must_trace and (count < TUNING.rare * len(rows) or uses < TUNING.repaid)

    def _prime_part(self, context: Context) -> Context | None:
        """Return a prime number of samples whose trace may hold for any number, or ``None``.

        See :func:`ritz.curvature._tracing._replace_rows`.
        """
        # In train mode the unbiased variance has the count n - 1, which is not a multiple of n.
        same = len(set(self.risk.batch_rows)) == 1
        if self._compile or same or not self.risk.separable:
            return None
        leaves = [*self.risk.params.values(), *tensors(context.rows(slice(0, 1)))]
        sizes = {size for leaf in leaves for size in leaf.shape}
        for rows in range(context.size, 4, -1):
            prime = all(rows % factor for factor in range(2, math.isqrt(rows) + 1))
            if prime and all(size % rows for size in sizes if size):
                return context.rows(slice(0, rows))
        return None

    def _trace_of_any_rows(
        self, column: Column, context: Context
    ) -> tuple[Linearization, Values] | None:
        """Return the trace ``any_rows`` and its primal part if it gives the product of a batch."""
        kind, trace = self._choice.any_rows or (None, None)
        if trace is None or kind != _of_one_sample(context):
            return None
        u = _as_large(self.risk.theta)
        primal = self._primal_if_equal(trace, context, u, self._eager(column, context, u[None])[0])
        return None if primal is None else (trace, primal)

    def _primal_if_equal(
        self, trace: Linearization, context: Context, u: Tensor, Au: Tensor
    ) -> Values | None:
        """Return the primal part for a number of samples, or ``None`` if its product is wrong.

        The tolerance is stricter than in :meth:`_checked_trace`, because a size that the trace
        treats as a constant may change the product by little.
        """

        def compute() -> Values:
            with arithmetic(self.risk.precision):
                primal = trace.primal((self.risk.params, context), context.size)
                gap = float((trace.tangent(primal, u[None])[0] - Au).norm())
            if not is_below(gap, TUNING.alike * torch.finfo(u.dtype).eps * float(Au.norm())):
                raise ArithmeticError
            return primal

        # A wrong size can raise any error.
        primal: Values | None = attempt(compute, Exception)[0]
        return primal

    def _linearize(self, column: Column, context: Context, rows: int = 0) -> Linearization:
        point, multiply = (self.risk.params, context), partial(self._multiply, column)
        self._num_traces += 1
        quiet = without_warnings_of_torch()
        with self._derivatives_exist(), quiet, without_garbage_collection():
            return Linearization(
                multiply, self.risk.theta, point, compiled=self._compile, rows=rows
            )

    def _cut(self, width: int, size: int, error: Exception) -> None:
        """Halve the block, then the batch. Raise ``error`` if neither is possible."""
        self._cached.clear()
        self._room = Room(0)
        if min(width, self.block_size) > 1:
            self.block_size = min(width, self.block_size) // 2
        else:
            at_once = size if self._chunk is None else min(size, self._chunk)
            if at_once == 1 or self.risk.sample_gap(alone=True):
                raise error
            self._chunk = -(-at_once // 2)
            self._choice.traces.clear()
        torch.cuda.empty_cache()


def _of_one_sample(context: Context) -> Any:
    """Return the signature of one sample, which batches of different lengths have in common."""
    return signature(context.rows(slice(0, 1)))


def _as_large(theta: Tensor) -> Tensor:
    """Return a vector of the size of the weights, so that errors exceed the roundoff."""
    return theta + theta.abs().mean()


def _asymmetry(u: Tensor, Au: Tensor, v: Tensor, Av: Tensor) -> str:
    # u'Av = v'Au for a symmetric matrix. Some second derivatives of torch are wrong and violate it.
    gap = abs(float(v @ Au - u @ Av))
    # Norms that do not underflow: the curvature of certain samples may be 1e-30.
    size = euclidean_norm(v) * euclidean_norm(Au) + euclidean_norm(u) * euclidean_norm(Av)
    # Products with NaN are reported elsewhere, together with the batch that causes it.
    alike = is_below(gap, _rtol(u) * size) or not math.isfinite(size)
    return "" if alike else f"the product is not symmetric, by {gap / size:.1g}"


def _rtol(like: Tensor) -> float:
    if like.is_cuda and like.dtype == torch.float32:
        return TUNING.gpu_rtol
    # 1.5e-7 in float64. The wrong derivatives of torch in the tests are off by 1e-4 and more.
    return float(10 * torch.finfo(like.dtype).eps ** 0.5)
