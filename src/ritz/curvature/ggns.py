"""The generalised Gauss-Newton matrix of an empirical risk."""

from collections.abc import Callable
from typing import Any, final

from torch.func import jvp, vjp
from torch.utils._pytree import tree_map

from ritz.curvature.engines import EngineName
from ritz.curvature.losses import output_hessian
from ritz.curvature.points import Context, Params
from ritz.curvature.products import CurvatureOperator, Products
from ritz.curvature.risk import Risk

Evaluate = Callable[[Params], tuple[Any, Any]]  # outputs and target
# Takes outputs, target and a tangent of the outputs; returns a cotangent.
Middle = Callable[[Any, Any, Any], Any]


@final
class GGNOperator(CurvatureOperator):
    r"""The matrix :math:`G = \frac{1}{N} \sum_i J_i^\top \nabla^2_f \ell_i J_i`, never formed."""


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
        engine: ``auto``, ``linearized`` or ``eager``: see :class:`ritz.curvature.Products`.
        compile: Whether to compile the products.
        memory: Bytes for linearisations that are kept from product to product.
        block_size: Columns multiplied at once.
    """
    require_outputs(risk, "ggn()")
    columns = (("forward and reverse", _forward), ("reverse twice", _reverse))
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


def _forward(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    return pushed_and_pulled(_evaluation(risk, context), params, vector, _middle(risk))


def _reverse(risk: Risk, params: Params, context: Context, vector: Params) -> Params:
    middle = _middle(risk, reverse=True)
    return pulled_twice(_evaluation(risk, context), params, vector, middle)


def _evaluation(risk: Risk, context: Context) -> Evaluate:
    return lambda point: risk.evaluate(point, context)


def _middle(risk: Risk, *, reverse: bool = False) -> Middle:
    return lambda outputs, target, tangent: output_hessian(
        risk.loss_fn, outputs, target, tangent, reverse=reverse
    )
