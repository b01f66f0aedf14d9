"""The Hessian of an empirical risk."""

from typing import final

from torch.func import grad, jvp, vjp

from ritz.curvature.engines import EngineName
from ritz.curvature.points import Context, Params
from ritz.curvature.products import CurvatureOperator, Products
from ritz.curvature.risk import Risk


@final
class HessianOperator(CurvatureOperator):
    r"""The Hessian :math:`H = \nabla^2 L(\theta)`, never formed; made by :func:`hessian`."""


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
        engine: ``auto``, ``linearized`` or ``eager``: see :class:`ritz.curvature.Products`.
        compile: Whether to compile the products.
        memory: Bytes for linearisations that are kept from product to product.
        block_size: Columns multiplied at once.
    """
    columns = (("forward over reverse", _forward), ("reverse over reverse", _reverse))
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


def _forward(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    gradient = grad(lambda point: risk.batch_loss(point, context))
    product: Params = jvp(gradient, (params,), (vector,))[1]
    return product


def _reverse(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    # The Hessian is its own transpose.
    gradient = grad(lambda point: risk.batch_loss(point, context))
    product: Params = vjp(gradient, params)[1](vector)[0]
    return product
