"""Hessian, Gauss-Newton and Fisher matrices, gradient covariance and block-diagonal matrices."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Unpack, final

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from ritz._core.batch_norm import batch_norms
from ritz._core.checks import check_choice, check_count, check_tensor
from ritz._core.modes import recording
from ritz.curvature._batches import batch_seeds
from ritz.curvature._losses import (
    KnownLoss,
    as_likelihood,
    known_loss,
    output_hessian,
    sample_losses,
)
from ritz.curvature._module_gradients import full_name, owners
from ritz.curvature._parameters import (
    Context,
    Params,
    Selection,
    as_leaves,
    derivatives,
    select_names,
)
from ritz.curvature._products import (
    PLAIN,
    Column,
    EngineName,
    ProductOptions,
    Products,
    check_options,
)
from ritz.curvature._risk import Risk, check_risk, require_outputs
from ritz.operators import BlockDiagonalOperator, LinearOperator, LowRankOperator
from ritz.operators._shared import SumOperator

# Draws additional data of an operator, such as labels, for all batches of a risk.
Draw = Callable[[Risk, torch.Generator | None], Callable[[int], Any]]


class CurvatureOperator(LinearOperator):
    """A matrix of a risk that is a weighted mean over its batches.

    Attributes:
        risk: The :class:`Risk`.
        products: Computes the matrix-vector products. ``products.plan`` says how, and why.
    """

    matrix: ClassVar[str]

    def __init__(self, products: Products, draw: Draw | None = None) -> None:
        risk, self._draw = products.risk, draw
        n, dtype, device = risk.space.size, risk.theta.dtype, risk.theta.device
        super().__init__(n, dtype=dtype, device=device, block_size=products.block_size)
        self.risk, self.products, self._detail = risk, products, repr(risk)
        self.origin["matrix"] = self.matrix
        if batch_norms(risk.model):
            self.origin["batch_norm"] = risk.batch_norm

    def at(self, risk: Risk, *, generator: torch.Generator | None = None) -> "CurvatureOperator":
        """Return the matrix of another risk: at new weights, on other batches, or both.

        The model is not traced again. Only the primal parts are computed again, which costs about
        one gradient per batch. The model must not depend on anything else that has changed: only on
        its parameters, its buffers and the batch.

        Args:
            risk: A risk of the same model, loss and modes, such as :meth:`Risk.moved` returns.
            generator: Source of the labels of a Monte Carlo Fisher matrix.
        """
        check_risk(risk)
        extra = None if self._draw is None else self._draw(risk, generator)
        return type(self)(self.products.at(risk, extra=extra), self._draw)

    @cached_property
    def roundoff(self) -> float:
        """Relative error of a product: the machine precision, or measured beside float64.

        It is measured for user-defined losses only, at the cost of a product in both precisions.
        The derivatives of known losses are computed without cancellation.
        """
        if known_loss(self.risk.loss_fn) is not None:
            return super().roundoff
        # Of 108 networks that were fitted to a loss of 1e-7, with nine forms of cross-entropy, the
        # error of the trace was at most 2.3 times that of the product.
        return max(super().roundoff, 4 * self.products.roundoff())

    def _matmat(self, block: Tensor) -> Tensor:
        return self.products.matmat(block)


# ------------------------------------------------------------------------------------------
# The Hessian.


@final
class HessianOperator(CurvatureOperator):
    r"""The Hessian :math:`H = \nabla^2 L(\theta)`, computed as products. See :func:`hessian`."""

    matrix = "hessian"


def hessian(risk: Risk, **options: Unpack[ProductOptions]) -> HessianOperator:
    r"""Return the Hessian :math:`H = \frac{1}{N} \sum_i \nabla^2 \ell_i(\theta) + \mu I`.

    A product is one pass over the data. It costs about one gradient if the linearisation is cached,
    and up to three otherwise. Memory: ``block_size`` times that of a backward pass, and the cached
    linearisations.

    Args:
        risk: A :class:`Risk`.
        engine: ``auto`` (the default) is ``linearized`` if the model can be traced, else ``eager``.
            ``linearized`` is faster and caches activations; ``eager`` caches nothing.
        compile: Compile the products. Defaults to ``False``.
        memory: Bytes for cached linearisations. Defaults to 2 GiB, or half the free GPU memory. If
            a copy of one fits as well, products of small batches on a GPU are replayed from a CUDA
            graph.
        block_size: Columns multiplied at once. Defaults to 8; to 1 for convolutions on the CPU.
        num_products: How many products you will ask for, if few. With ``engine="auto"`` the model
            is not traced if they do not repay it. Defaults to many.
    """
    check_risk(risk)
    check_options(options)
    ways = (
        ("forward over reverse", partial(_hessian_product, False)),
        ("reverse over reverse", partial(_hessian_product, True)),
        (PLAIN, _plain_hessian_product),
    )
    # Gradients per product without a trace, one thread, 11 models (MLPs, ResNet-20, ConvNeXt,
    # GPT-2, Llama, Mixtral, ViT, LSTM, GRU): forward over reverse 3.5 to 8.9, reverse over reverse
    # 2.4 to 8.1, plain autograd 2.2 to 7.0, which is the fastest in each. Of Gauss-Newton products,
    # plain autograd takes .77 to .86 of forward mode with MLPs, GPT-2 and Llama, and 1.0 to 1.6
    # with convolutions and recurrent layers: hence ``forward_layers``. In a block of eight, reverse
    # over reverse takes .4 to .6 of plain autograd, which cannot be mapped over columns. In such a
    # block of Gauss-Newton products it takes .73 to .94 of forward mode with an MLP, GPT-2, a ViT
    # and an LSTM, and 1.3 with convolutions.
    return HessianOperator(
        Products(risk, "hessian", ways, shift=risk.l2, forward_layers=False, **options)
    )


def _hessian_product(
    reverse: bool, risk: Risk, params: Params, context: Context, vector: Params
) -> Params:
    gradient = grad(lambda point: risk.batch_loss(point, context))
    # Forward: H v = d/dt grad L(theta + t v). Reverse: H' v, which equals H v by symmetry.
    forward = partial(jvp, gradient, (params,), (vector,))
    product: Params = vjp(gradient, params)[1](vector)[0] if reverse else forward()[1]
    return product


def _plain_hessian_product(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    with recording():
        leaves = as_leaves(params)
        gradient = derivatives(risk.batch_loss(leaves, context), leaves, again=True)
        # H v = d/dtheta (grad L)' v
        return derivatives(list(gradient.values()), leaves, list(vector.values()))


# ------------------------------------------------------------------------------------------
# Matrices J' M J, with the Jacobian J of the outputs or losses: Gauss-Newton and Fisher.

# The function whose Jacobian is J: from (risk, params, context) to (values, target).
Evaluate = Callable[[Risk, Params, Context], tuple[Any, Any]]
# The product M t, of (context, values, target, t, reverse). ``reverse``: use reverse mode alone.
Middle = Callable[[Context, Any, Any, Any, bool], Any]


def _jacobian_ways(evaluate: Evaluate, middle: Middle) -> tuple[tuple[str, Column], ...]:
    """Return three ways to compute products with J' M J, the fastest first."""

    def multiply(
        reverse: bool, risk: Risk, params: Params, context: Context, vector: Params
    ) -> Params:
        # Collected on the side, because functions passed to torch.func may return tensors only.
        targets: list[Any] = []

        def call(point: Params) -> Any:
            values, target = evaluate(risk, point, context)
            targets.append(target)
            return values

        if reverse:
            # v -> J v is the transpose of the linear map u -> J' u, at any point, such as u = 0.
            values, pull = vjp(call, params)[:2]
            zero = tree_map(lambda leaf: leaf * 0, values)
            tangent = vjp(lambda cotangent: pull(cotangent)[0], zero)[1](vector)[0]
        else:
            values, tangent = jvp(call, (params,), (vector,))[:2]
            pull = vjp(call, params)[1]
        # J' (M t) with t = J v
        product: Params = pull(middle(context, values, targets[-1], tangent, reverse))[0]
        return product

    def plain(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
        with recording():
            leaves = as_leaves(params)
            values, target = evaluate(risk, leaves, context)
            # The map u -> J' u at u = 0, and its transpose v -> J v.
            zero = tree_map(lambda leaf: torch.zeros_like(leaf, requires_grad=True), values)
            pulled = derivatives(values, leaves, zero, again=True)
            units = {str(k): leaf for k, leaf in enumerate(tree_leaves(zero))}
            along = derivatives(list(pulled.values()), units, list(vector.values()))
            tangent = tree_unflatten(list(along.values()), tree_structure(values))
            fixed = tree_map(torch.Tensor.detach, values)
            return derivatives(values, leaves, middle(context, fixed, target, tangent, True))

    return (
        ("forward and reverse", partial(multiply, False)),
        ("reverse twice", partial(multiply, True)),
        (PLAIN, plain),
    )


@final
class GGNOperator(CurvatureOperator):
    r"""The matrix :math:`G = \frac{1}{N} \sum_i J_i^\top \nabla^2_f \ell_i J_i`, as products."""

    matrix = "ggn"


def ggn(risk: Risk, **options: Unpack[ProductOptions]) -> GGNOperator:
    r"""Return the generalised Gauss-Newton matrix, positive semi-definite for a convex loss.

    .. math:: G = \frac{1}{N} \sum_i J_i^\top \, \nabla^2_f \ell_i(f_i) \, J_i + \mu I,
        \quad J_i = \partial f_i / \partial \theta

    The Hessian of the loss in the outputs is known in closed form for cross-entropy, binary
    cross-entropy with logits and squared error. Any other loss is differentiated twice. A product
    costs about 1.3 gradients if the linearisation is cached.

    Args:
        risk: A :class:`Risk` whose ``loss_fn`` is separate from the model.
        **options: ``engine``, ``compile``, ``memory``, ``block_size`` and ``num_products``, as in
            :func:`hessian`.
    """
    require_outputs(risk, "ggn()")
    check_options(options)
    if risk.linear_loss:
        warnings.warn(
            "the loss is linear in the outputs, so the Gauss-Newton matrix is zero: if the model "
            "returns log-probabilities, use nn.NLLLoss, or logits with nn.CrossEntropyLoss",
            stacklevel=2,
        )
    ways = _jacobian_ways(Risk.evaluate, lambda context, *call: output_hessian(risk.loss_fn, *call))
    return GGNOperator(Products(risk, "ggn", ways, shift=risk.l2, **options))


# ------------------------------------------------------------------------------------------
# Fisher matrices and the covariance of gradients.

FisherKind = Literal["monte_carlo", "empirical"]


@final
class FisherOperator(CurvatureOperator):
    r"""A Fisher matrix :math:`\frac{1}{N} \sum_i g_i g_i^\top`. See :func:`fisher`."""

    matrix = "fisher"

    @property
    def kind(self) -> FisherKind:
        """``empirical``, or ``monte_carlo`` if its labels are drawn."""
        return "empirical" if self._draw is None else "monte_carlo"


def fisher(
    risk: Risk,
    *,
    kind: FisherKind = "monte_carlo",
    num_draws: int = 1,
    generator: torch.Generator | None = None,
    **options: Unpack[ProductOptions],
) -> FisherOperator:
    r"""Return a Fisher matrix :math:`F = \frac{1}{N} \sum_i g_i g_i^\top`.

    ``empirical``: :math:`g_i` is the gradient of the loss of sample :math:`i`. ``monte_carlo``:
    :math:`g_i` is the gradient of the negative log likelihood of a label drawn from the model. The
    labels are drawn once, ``num_draws`` per sample. The expectation of the matrix is the
    Gauss-Newton matrix. For outputs with positions, such as tokens, each position counts as a
    sample with ``monte_carlo``. With ``empirical`` a sample is a whole sequence. The L2 term of the
    risk is not included.

    A product costs as much as one with the Gauss-Newton matrix. For most networks the exact
    diagonal and trace are available: they cost one backward pass per batch with ``empirical``, and
    one per drawn label with ``monte_carlo``.

    Args:
        risk: A :class:`Risk` whose ``loss_fn`` is separate from the model.
        kind: ``monte_carlo`` or ``empirical``. ``monte_carlo`` needs a loss that is a likelihood:
            cross-entropy, binary cross-entropy with logits or squared error.
        num_draws: Labels drawn per sample. Memory: ``num_draws`` copies of the targets.
        generator: Source of the labels. Defaults to a new generator with seed 0.
        **options: ``engine``, ``compile``, ``memory``, ``block_size`` and ``num_products``, as in
            :func:`hessian`.
    """
    check_choice("kind", kind, ("monte_carlo", "empirical"))
    require_outputs(risk, "fisher()")
    check_options(options)
    if kind == "empirical":
        risk.require_sample_mean(alone=False)
        # J is the Jacobian of the N sample losses of a batch, and M = I / N.
        ways = _jacobian_ways(
            lambda risk, *point: (sample_losses(risk.loss_fn, *risk.evaluate(*point)), None),
            lambda context, losses, target, tangent, reverse: tangent / len(losses),
        )
        return FisherOperator(Products(risk, kind, ways, **options))
    num_draws = check_count("num_draws", num_draws)
    known = as_likelihood(risk.loss_fn)

    def middle(context: Context, outputs: Any, target: Any, tangent: Any, reverse: bool) -> Any:
        # M t = mean of s (s' t) over the draws, with the gradient s of the loss at a drawn label.
        product = partial(known.sampled_hessian, outputs, target, tangent=tangent)
        return vmap(product, in_dims=1)(context.extra).mean(0)

    ways = _jacobian_ways(Risk.evaluate, middle)
    draw = partial(_drawn_labels, known, num_draws)
    products = Products(risk, kind, ways, extra=draw(risk, generator), **options)
    return FisherOperator(products, draw)


def _drawn_labels(
    known: KnownLoss, num_draws: int, risk: Risk, generator: torch.Generator | None
) -> Callable[[int], Any]:
    """Draw labels from the model, ``(batch, num_draws, ...)``, as a function of the batch index."""
    labels = {}
    seeds = batch_seeds(risk.num_batches, generator)
    with torch.no_grad(), risk.settings():
        for index, context, _ in risk.contexts():
            outputs, target = risk.evaluate(risk.params, context)
            rng = torch.Generator().manual_seed(seeds[index])
            draws = [known.draw(outputs, target, rng) for _ in range(num_draws)]
            labels[index] = torch.stack(draws, 1)
    return labels.get


def gradient_covariance(risk: Risk, **options: Unpack[ProductOptions]) -> SumOperator:
    r"""Return the covariance of gradients :math:`\frac{1}{N} \sum_i g_i g_i^\top - g g^\top`.

    :math:`g_i` is the gradient of the loss of sample :math:`i`, and :math:`g` is their mean. The
    mean is computed when the operator is created. A product costs as much as one with the
    Gauss-Newton matrix.

    Args:
        risk: A :class:`Risk` whose ``loss_fn`` is separate from the model.
        **options: ``engine``, ``compile``, ``memory``, ``block_size`` and ``num_products``, as in
            :func:`hessian`.
    """
    second_moment = fisher(risk, kind="empirical", **options)
    # The L2 term adds the same vector to every gradient, so it does not change the covariance.
    mean = risk.gradient().sub_(risk.theta, alpha=risk.l2)[:, None]
    covariance = second_moment + LowRankOperator(mean, scales=-torch.ones_like(mean[0]))
    covariance.origin = second_moment.origin | {"matrix": "covariance"}
    return covariance


# ------------------------------------------------------------------------------------------
# Matrices by name, and of parts of the data.

CurvatureMatrix = Literal["hessian", "ggn"]
MATRICES = ("hessian", "ggn")


def curvature_operator(
    risk: Risk, matrix: CurvatureMatrix, **options: Unpack[ProductOptions]
) -> CurvatureOperator:
    """Return the Hessian or Gauss-Newton matrix by name, with the options of :func:`hessian`."""
    check_choice("matrix", matrix, MATRICES)
    return hessian(risk, **options) if matrix == "hessian" else ggn(risk, **options)


def block_diagonal(
    risk: Risk,
    *,
    matrix: CurvatureMatrix = "hessian",
    by: Sequence[Selection] | None = None,
    engine: EngineName = "auto",
    memory: int = 2 * 2**30,
) -> BlockDiagonalOperator:
    r"""Return the block-diagonal part :math:`\operatorname{diag}(A_{11}, \dots, A_{mm})` by layer.

    Each block is the matrix of the risk as a function of the parameters of the block. A product
    costs one product with each block.

    Args:
        risk: A :class:`Risk`.
        matrix: ``hessian`` or ``ggn``.
        by: One selection of parameters per block: a regular expression that matches the beginning
            of names, a list of names, or a function of a name. Every parameter must belong to
            exactly one block, and the blocks must be in the order of ``risk.theta``. Defaults to
            one block per module with parameters.
        engine: ``auto`` (the default) is ``linearized`` if the model can be traced, else ``eager``.
        memory: Bytes for the cached linearisations of all blocks together. Defaults to 2 GiB.
    """
    check_risk(risk)
    check_choice("matrix", matrix, MATRICES)
    memory = check_count("memory", memory, low=0)
    names = list(risk.space.shapes)
    groups = [[full_name(module, key) for key in keys] for module, keys in owners(names).items()]
    if by is not None:
        groups = _groups(names, by)
    return BlockDiagonalOperator(
        [
            curvature_operator(risk.on(group), matrix, engine=engine, memory=memory // len(groups))
            for group in groups
        ]
    )


def _groups(names: list[str], by: Sequence[Selection]) -> list[list[str]]:
    if isinstance(by, str) or not isinstance(by, Sequence) or not by:
        raise TypeError(f"by must be a list with one selection per block, got {by!r}")
    groups = [select_names(names, choice) for choice in by]
    taken = [name for group in groups for name in group]
    if taken != names:
        raise ValueError(f"by must select every parameter once, in the order {names}, got {taken}")
    return groups


def batch_products(
    risk: Risk, block: Tensor, *, matrix: CurvatureMatrix = "hessian"
) -> Iterator[tuple[float, Tensor]]:
    r"""Yield weight :math:`w_b` and product :math:`H_b V`, ``(P, k)``, of each batch in turn.

    The weights sum to one over all processes, and :math:`\sum_b w_b H_b` is the matrix of the risk
    without its L2 term. The total cost is one product. Memory: the product of one batch.

    Args:
        risk: A :class:`Risk`.
        block: :math:`V`, ``(P, k)``.
        matrix: ``hessian`` or ``ggn``.
    """
    theta = risk.theta
    check_tensor("block", block, dtype=theta.dtype, device=theta.device, rows=len(theta))
    columns = block if block.ndim == 2 else block[:, None]
    # Each batch is multiplied once, so nothing is cached.
    yield from curvature_operator(risk, matrix, memory=0).products.each(columns)


def fluctuation(risk: Risk, part: Risk, *, matrix: CurvatureMatrix = "hessian") -> SumOperator:
    r"""Return :math:`H_\text{part} - H`, the matrix of a part of the data minus that of all data.

    Args:
        risk: The loss of all data.
        part: A part of it, such as ``risk.batch(3)`` or ``risk.samples(indices)``.
        matrix: ``hessian`` or ``ggn``.
    """
    return curvature_operator(part, matrix) - curvature_operator(risk, matrix)
