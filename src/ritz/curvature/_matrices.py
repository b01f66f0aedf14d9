"""Hessian, Gauss-Newton and Fisher matrices of a risk, and the covariance of gradients."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.utils._pytree import tree_map

from ritz._core.batches import is_rows
from ritz._core.checks import check_choice, check_count, check_tensor
from ritz._core.random import resolve_generator
from ritz.curvature._products import Column, CurvatureOperator, EngineName, Products
from ritz.curvature._risk import (
    Context,
    KnownLoss,
    Params,
    Risk,
    output_hessian,
    recognised,
    sample_losses,
)
from ritz.operators import LowRankOperator
from ritz.operators._shared import SumOperator

# ------------------------------------------------------------------------------------------
# The Hessian of an empirical risk.


@final
class HessianOperator(CurvatureOperator):
    r"""The Hessian :math:`H = \nabla^2 L(\theta)`, never formed; made by :func:`hessian`."""

    matrix = "hessian"


def hessian(
    risk: Risk,
    *,
    engine: EngineName = "auto",
    compile: bool = False,
    memory: int | None = None,
    block_size: int | None = None,
) -> HessianOperator:
    r"""Return the Hessian :math:`H = \frac{1}{N} \sum_i \nabla^2 \ell_i(\theta) + \mu I`.

    A product streams the batches once. It costs from one gradient (a linearisation kept in
    memory) to three; memory of a gradient of one batch, times the columns of a block, and what is
    kept.

    Args:
        risk: The loss at a point.
        engine: ``linearized`` (traced once), ``eager``, or ``auto``, the first if it can be traced.
        compile: Whether to compile the products.
        memory: Bytes for linearisations that are kept from product to product.
        block_size: Columns multiplied at once.
    """
    columns = (
        ("forward over reverse", _hessian_forward),
        ("reverse over reverse", _hessian_reverse),
    )
    return HessianOperator(
        Products(
            risk,
            columns,
            engine=engine,
            compiled=compile,
            memory=memory,
            block_size=block_size,
            shift=risk.l2,
        )
    )


def _hessian_forward(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    gradient = grad(lambda point: risk.batch_loss(point, context))
    product: Params = jvp(gradient, (params,), (vector,))[1]
    return product


def _hessian_reverse(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    # The Hessian is its own transpose.
    gradient = grad(lambda point: risk.batch_loss(point, context))
    product: Params = vjp(gradient, params)[1](vector)[0]
    return product


# ------------------------------------------------------------------------------------------
# The generalised Gauss-Newton matrix of an empirical risk.

Evaluate = Callable[[Params], tuple[Any, Any]]  # outputs and target
# Takes outputs, target and a tangent of the outputs; returns a cotangent.
Middle = Callable[[Any, Any, Any], Any]


@final
class GGNOperator(CurvatureOperator):
    r"""The matrix :math:`G = \frac{1}{N} \sum_i J_i^\top \nabla^2_f \ell_i J_i`, never formed."""

    matrix = "ggn"


def ggn(
    risk: Risk,
    *,
    engine: EngineName = "auto",
    compile: bool = False,
    memory: int | None = None,
    block_size: int | None = None,
) -> GGNOperator:
    r"""Return the generalised Gauss-Newton matrix, positive semi-definite for a convex loss.

    .. math:: G = \frac{1}{N} \sum_i J_i^\top \, \nabla^2_f \ell_i(f_i) \, J_i + \mu I,
        \quad J_i = \partial f_i / \partial \theta

    The Hessian of the loss in the outputs is in closed form for cross-entropy, binary
    cross-entropy with logits and squared error, and differentiated for any other loss. One
    linearisation is pushed forward and pulled back: about 1.3 gradients where it is kept.

    Args:
        risk: The loss at a point; its ``loss_fn`` must be separate from the model.
        engine: ``linearized`` (traced once), ``eager``, or ``auto``, the first if it can be traced.
        compile: Whether to compile the products.
        memory: Bytes for linearisations that are kept from product to product.
        block_size: Columns multiplied at once.
    """
    require_outputs(risk, "ggn()")
    columns = (("forward and reverse", _ggn_forward), ("reverse twice", _ggn_reverse))
    return GGNOperator(
        Products(
            risk,
            columns,
            engine=engine,
            compiled=compile,
            memory=memory,
            block_size=block_size,
            shift=risk.l2,
        )
    )


def require_outputs(risk: Risk, what: str) -> None:
    """Raise unless outputs and loss are separate."""
    if risk.loss_fn is None:
        raise ValueError(f"{what} needs the outputs apart from the loss, got a risk with "
                         "loss_fn=None: pass loss_fn, and forward if need be")  # fmt: skip


class _Outputs:
    """The outputs as a function of the parameters; the target of the last call beside it."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate, self.target = evaluate, None

    def __call__(self, params: Params) -> Any:
        found, self.target = self._evaluate(params)
        return found


def pushed_and_pulled(evaluate: Evaluate, params: Params, vector: Params, middle: Middle) -> Params:
    r"""The product :math:`J^\top M J v` with the Jacobian of the outputs of ``evaluate``."""
    outputs = _Outputs(evaluate)
    found, tangent = jvp(outputs, (params,), (vector,))[:2]
    pull = vjp(outputs, params)[1]
    product: Params = pull(middle(found, outputs.target, tangent))[0]
    return product


def pulled_twice(evaluate: Evaluate, params: Params, vector: Params, middle: Middle) -> Params:
    r"""The same by reverse rules alone: :math:`J v` transposes :math:`u \mapsto J^\top u`."""
    outputs = _Outputs(evaluate)
    found, pull = vjp(outputs, params)[:2]
    zero = tree_map(lambda leaf: leaf * 0, found)
    push = vjp(lambda cotangent: pull(cotangent)[0], zero)[1]
    product: Params = pull(middle(found, outputs.target, push(vector)[0]))[0]
    return product


def _ggn_forward(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    return pushed_and_pulled(_evaluation(risk, context), params, vector, _middle(risk))


def _ggn_reverse(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    middle = _middle(risk, reverse=True)
    return pulled_twice(_evaluation(risk, context), params, vector, middle)


def _evaluation(risk: Risk, context: Context) -> Evaluate:
    return lambda point: risk.evaluate(point, context)


def _middle(risk: Risk, *, reverse: bool = False) -> Middle:
    return lambda outputs, target, tangent: output_hessian(
        risk.loss_fn, outputs, target, tangent, reverse=reverse
    )


# ------------------------------------------------------------------------------------------
# Fisher matrices and the covariance of gradients.

FisherKind = Literal["monte_carlo", "empirical"]


@final
class FisherOperator(CurvatureOperator):
    r"""A Fisher matrix :math:`\frac{1}{N} \sum_i g_i g_i^\top`; made by :func:`fisher`."""

    matrix = "fisher"


def fisher(
    risk: Risk,
    *,
    kind: FisherKind = "monte_carlo",
    num_draws: int = 1,
    generator: torch.Generator | None = None,
    engine: EngineName = "auto",
    compile: bool = False,
    memory: int | None = None,
    block_size: int | None = None,
) -> FisherOperator:
    r"""Return a Fisher matrix :math:`F = \frac{1}{N} \sum_i g_i g_i^\top`.

    ``empirical``: :math:`g_i` is the gradient of the loss of sample :math:`i`. ``monte_carlo``: of
    the negative log likelihood of labels drawn from the model, ``num_draws`` of them a sample,
    drawn once and then fixed; its expectation is the Gauss-Newton matrix. For outputs with
    positions, such as tokens, every position is a sample of its own there. The L2 term of the risk
    does not enter. A product costs what one with the Gauss-Newton matrix does.

    Args:
        risk: The loss at a point; its ``loss_fn`` must be separate from the model.
        kind: See above. ``monte_carlo`` needs a loss that is a likelihood: cross-entropy, binary
            cross-entropy with logits or squared error.
        num_draws: Labels drawn for each sample; memory for as many copies of the targets.
        generator: Source of the labels.
        engine: ``linearized`` (traced once), ``eager``, or ``auto``, the first if it can be traced.
        compile: Whether to compile the products.
        memory: Bytes for linearisations that are kept from product to product.
        block_size: Columns multiplied at once.
    """
    check_choice("kind", kind, ("monte_carlo", "empirical"))
    require_outputs(risk, "fisher()")
    if kind == "empirical":
        _check_samples(risk)
        forward, reverse, labels = _empirical(pushed_and_pulled), _empirical(pulled_twice), {}
    else:
        check_count("num_draws", num_draws)
        known = _likelihood(risk)
        labels = _drawn(risk, known, num_draws, resolve_generator(generator))
        forward, reverse = _sampled(pushed_and_pulled, known), _sampled(pulled_twice, known)
    return FisherOperator(
        Products(
            risk,
            (("forward and reverse", forward), ("reverse twice", reverse)),
            engine=engine,
            compiled=compile,
            memory=memory,
            block_size=block_size,
            extra=labels.get,
        )
    )


def gradient_covariance(
    risk: Risk,
    *,
    engine: EngineName = "auto",
    compile: bool = False,
    memory: int | None = None,
    block_size: int | None = None,
) -> SumOperator:
    r"""Return the centred covariance :math:`\frac{1}{N} \sum_i g_i g_i^\top - g g^\top`.

    :math:`g` is the mean of the sample gradients :math:`g_i`. One gradient at the outset; a product
    costs what one with the Gauss-Newton matrix does.

    Args:
        risk: The loss at a point; its ``loss_fn`` must be separate from the model.
        engine: ``linearized`` (traced once), ``eager``, or ``auto``, the first if it can be traced.
        compile: Whether to compile the products.
        memory: Bytes for linearisations that are kept from product to product.
        block_size: Columns multiplied at once.
    """
    second_moment = fisher(
        risk,
        kind="empirical",
        engine=engine,
        compile=compile,
        memory=memory,
        block_size=block_size,
    )
    mean = risk.gradient().sub_(risk.theta, alpha=risk.l2)[:, None]
    covariance = second_moment + LowRankOperator(mean, scales=-torch.ones_like(mean[0]))
    covariance.origin = second_moment.origin | {"matrix": "covariance"}
    return covariance


def _check_samples(risk: Risk) -> None:
    """Raise unless the loss of a batch is the mean of those of its samples; by the first batch."""
    for index, context, _ in risk.contexts():
        with torch.no_grad(), risk.settings():
            outputs, target = risk.evaluate(risk.params, context)
            if not is_rows(outputs, risk.batch_sizes[index]):
                tensor = isinstance(outputs, Tensor)
                raise ValueError(
                    f"outputs must be one tensor with a row for each of {risk.batch_sizes[index]} "
                    "samples, got "
                    f"{tuple(outputs.shape) if tensor else type(outputs).__name__} in batch {index}"
                )
            gap, scale = _mean_gap(risk, outputs, target)
        if gap > 10 * math.sqrt(torch.finfo(risk.theta.dtype).eps) * scale:
            raise ValueError(f"the loss of a batch must be the mean of those of its samples, got "
                             f"derivatives by the outputs that differ by {gap:.2g} of "
                             f"{scale:.2g} in batch {index}")  # fmt: skip
        return


def _mean_gap(risk: Risk, outputs: Tensor, target: Any) -> tuple[float, float]:
    """How far the derivative of the loss is from that of the mean over samples; its own size.

    Weights of classes may hardly change the loss itself.
    """
    whole = grad(lambda point: risk.adapter.loss(point, target))(outputs)
    mean = grad(lambda point: sample_losses(risk.loss_fn, point, target).mean())(outputs)
    return float((whole - mean).norm()), float(whole.norm())


def _likelihood(risk: Risk) -> KnownLoss:
    known = recognised(risk.loss_fn)
    if known is None or not known.sampled:
        raise ValueError(
            "loss_fn must be a likelihood to draw labels from: cross_entropy, "
            "binary_cross_entropy_with_logits or mse_loss, neither weighted nor smoothed, got "
            f"{risk.loss_fn}"
        )
    return known


def _drawn(
    risk: Risk, known: KnownLoss, num_draws: int, generator: torch.Generator
) -> dict[int, Any]:
    """Labels ``(batch, num_draws, ...)`` by batch, the same whichever process draws them."""
    labels = {}
    seeds = torch.randint(0, 2**62, (risk.num_batches,), generator=generator).tolist()
    with torch.no_grad(), risk.settings():
        for index, context, _ in risk.contexts():
            outputs, target = risk.evaluate(risk.params, context)
            own = torch.Generator().manual_seed(seeds[index])
            draws = [known.draw(outputs, target, own) for _ in range(num_draws)]
            labels[index] = torch.stack(draws, 1)
    return labels


def _sampled(product: Any, known: KnownLoss) -> Column:
    def column(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
        def middle(outputs: Tensor, target: Tensor, tangent: Tensor) -> Tensor:
            terms: Tensor = vmap(
                lambda draw: known.sampled_hessian(outputs, target, draw, tangent), in_dims=1
            )(context.extra)
            return terms.mean(0)

        return _multiplied(product, lambda point: risk.evaluate(point, context), params, vector,
                           middle)  # fmt: skip

    return column


def _empirical(product: Any) -> Column:
    def column(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
        def losses(point: Params) -> tuple[Tensor, None]:
            outputs, target = risk.evaluate(point, context)
            return sample_losses(risk.loss_fn, outputs, target), None

        return _multiplied(product, losses, params, vector,
                           lambda found, _, tangent: tangent / len(found))  # fmt: skip

    return column


def _multiplied(
    product: Any, evaluate: Evaluate, params: Params, vector: Params, middle: Middle
) -> Params:
    found: Params = product(evaluate, params, vector, middle)
    return found


# ------------------------------------------------------------------------------------------
# Curvature of parts of the data, and how it differs from that of the whole.

CurvatureMatrix = Literal["hessian", "ggn"]
MATRICES = ("hessian", "ggn")


def curvature_operator(risk: Risk, matrix: CurvatureMatrix, **options: Any) -> CurvatureOperator:
    """Return the Hessian or the Gauss-Newton matrix, by name; options are theirs."""
    check_choice("matrix", matrix, MATRICES)
    return hessian(risk, **options) if matrix == "hessian" else ggn(risk, **options)


def batch_products(
    risk: Risk, block: Tensor, *, matrix: CurvatureMatrix = "hessian"
) -> Iterator[tuple[float, Tensor]]:
    r"""Yield weight :math:`w_b` and product :math:`H_b V`, ``(P, k)``, of each batch in turn.

    Weights sum to one over all processes, and :math:`\sum_b w_b H_b` is the matrix of the risk
    without its L2 term. All of them cost one product with the whole; one product in memory.

    Args:
        risk: The loss at a point, with its batches.
        block: :math:`V`, ``(P, k)``.
        matrix: ``hessian`` or ``ggn``.
    """
    theta = risk.theta
    check_tensor("block", block, dtype=theta.dtype, device=theta.device, rows=len(theta))
    columns = block if block.ndim == 2 else block[:, None]
    # One pass: what one product leaves behind would never be used.
    yield from curvature_operator(risk, matrix, memory=0).products.each(columns)


def fluctuation(risk: Risk, part: Risk, *, matrix: CurvatureMatrix = "hessian") -> SumOperator:
    r"""Return :math:`H_\text{part} - H`: what a batch or some samples see beside what all do.

    Args:
        risk: The whole.
        part: A part of it, such as ``risk.batch(3)`` or ``risk.samples(indices)``.
        matrix: ``hessian`` or ``ggn``.
    """
    return curvature_operator(part, matrix) - curvature_operator(risk, matrix)
