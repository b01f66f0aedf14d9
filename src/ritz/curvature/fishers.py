"""Fisher matrices and the covariance of gradients."""

import math
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.func import grad, vmap

from ritz._core.checks import check_choice, check_count
from ritz._core.random import resolve_generator
from ritz.curvature.batches import is_rows
from ritz.curvature.engines import Column, EngineName
from ritz.curvature.ggns import (
    Evaluate,
    Middle,
    pulled_twice,
    pushed_and_pulled,
    require_outputs,
)
from ritz.curvature.losses import KnownLoss, recognised, sample_losses
from ritz.curvature.points import Context, Params
from ritz.curvature.products import CurvatureOperator, Products
from ritz.curvature.risk import Risk
from ritz.operators.algebra import SumOperator
from ritz.operators.diagonal import LowRankOperator

FisherKind = Literal["monte_carlo", "empirical"]


@final
class FisherOperator(CurvatureOperator):
    r"""A Fisher matrix :math:`\frac{1}{N} \sum_i g_i g_i^\top`; made by :func:`fisher`."""


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
        engine: ``auto``, ``linearized`` or ``eager``: see :class:`ritz.curvature.Products`.
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
        engine: ``auto``, ``linearized`` or ``eager``: see :class:`ritz.curvature.Products`.
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
    return second_moment + LowRankOperator(mean, scales=-torch.ones_like(mean[0]))


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
