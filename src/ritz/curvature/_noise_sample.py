r"""`noise_sample`: samples of gradient noise with the covariance of the gradient of one sample.

Let :math:`g_i` be the gradient of the loss of sample :math:`i`, and :math:`s_i = \pm 1` random
signs. The vector

.. math:: \frac{1}{\sqrt N} \sum_i s_i g_i = \sqrt N\, \nabla \frac1N \sum_i s_i \ell_i

has the covariance :math:`F = \frac1N \sum_i g_i g_i^\top` and costs one backward pass. Other kinds
of noise have an approximation of :math:`F` as covariance, such as its diagonal.

Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
descent with covariance noise*, sections 2.2, D, E.2 and F.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ritz._core.attempts import attempt
from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.modes import recording
from ritz._core.random import probes, resolve_generator
from ritz.curvature._batches import batch_seeds
from ritz.curvature._kfac import block_root, kfac, times_root
from ritz.curvature._losses import as_likelihood
from ritz.curvature._module_gradients import TUNING
from ritz.curvature._noise_kinds import (
    BY_GRADIENT,
    BY_MOMENTS,
    NOISE_KINDS,
    NoiseKind,
    label_columns,
    random_signs,
    scale_of_step,
    sign_columns,
)
from ritz.curvature._parameters import as_leaves
from ritz.curvature._risk import Risk, require_outputs
from ritz.curvature._sample_gradients import loss_columns, structure_squares


def noise_sample(
    risk: Risk,
    kind: NoiseKind = "diagonal",
    *,
    num_samples: int | None = None,
    sigma: float = 1.0,
    lr: float = 1.0,
    temperature: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return samples of gradient noise of mean zero, ``(P,)`` or ``(P, num_samples)``.

    Let :math:`g_i` be the gradient of the loss of sample :math:`i` without the L2 term, :math:`g`
    the mean of these gradients, and :math:`F = \frac1N \sum_i g_i g_i^\top` the empirical Fisher
    matrix. The covariance of the noise is

    ==================  ==========================================================================
    ``diagonal``        :math:`\operatorname{diag} F`, exactly, from the structure of the network
    ``full``            :math:`F`: the gradient of losses with random signs
    ``centred``         :math:`F - g g^\top`, that of mini-batches drawn from these samples
    ``true``            the Gauss-Newton matrix: the gradient at labels drawn from the model
    ``kfac``            :math:`G \otimes A` by layer, as :func:`kfac` has it with ``empirical``:
                        matrix normal, :math:`G^{1/2} \Xi A^{1/2}`
    ``trace``           :math:`\frac{\operatorname{tr} F}{P} I`, of the same total variance as F
    ``trace_unscaled``  :math:`\operatorname{tr} F \cdot I`, as published: P times ``trace``
    ``isotropic``       :math:`\sigma^2 I`
    ``multiplicative``  :math:`\sigma^2 \operatorname{diag}(g)^2`: the mean gradient times
                        :math:`\sigma \xi`
    ``sgld``            :math:`\frac{2 T}{\alpha} I`: a step :math:`-\alpha (g + \text{noise})` is
                        one of Langevin dynamics at temperature :math:`T`
    ==================  ==========================================================================

    The gradient of a batch of :math:`M_S` samples is noisier than that of a batch of :math:`M_L`
    samples. To obtain this difference, multiply the samples by :math:`\sqrt{1/M_S - 1/M_L}`.
    :class:`ritz.optim.CovarianceNoise` does this in training. For the noise of one batch, pass
    ``risk.batch(number)``.

    **Batch norm in train mode.** The loss of a sample depends on the other samples of its batch.
    ``full``, ``centred`` and ``true`` differentiate :math:`\ell_i` with this dependence.
    ``diagonal``, ``kfac`` and ``trace`` treat the statistics of the batch as constants.

    **Cost.** ``full``, ``centred`` and ``true`` take one forward pass, and one backward pass per
    sample of noise. The other kinds take one pass over the data in total. Memory: ``num_samples``
    vectors.

    Args:
        risk: A :class:`Risk` whose ``loss_fn`` is separate from the model.
        kind: One of the table.
        num_samples: Number of independent samples. Defaults to one, returned as a vector.
        sigma: :math:`\sigma` of ``isotropic`` and ``multiplicative``.
        lr: Learning rate :math:`\alpha` of ``sgld``.
        temperature: :math:`T` of ``sgld``. Defaults to :math:`1/N`, which samples from the
            posterior if the loss is the mean negative log likelihood.
        generator: Source of randomness. Defaults to a new generator with seed 0.

    Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
    descent with covariance noise*, sections 2.2, D, E.2, F; Hoffer et al. (2017) and Welling and
    Teh (2011) for the last two.
    """
    check_choice("kind", kind, NOISE_KINDS)
    count = 1 if num_samples is None else num_samples
    check_count("num_samples", count)
    check_range("sigma", sigma, low=0.0)
    require_outputs(risk, "noise_sample()")
    rng = resolve_generator(generator)
    if kind in BY_GRADIENT:
        if kind != "true":
            risk.require_sample_mean(alone=False)
        block = _gradients(risk, kind, count, rng)
    elif kind in BY_MOMENTS:
        risk.require_sample_mean(alone=False)
        block = _from_moments(risk, kind, count, rng)
    else:
        heat = 1 / risk.num_samples if temperature is None else temperature
        gradient = _mean_gradient(risk)[:, None] if kind == "multiplicative" else None
        block = _gaussian(risk, count, rng) * scale_of_step(kind, sigma, lr, heat)
        block = block if gradient is None else block * gradient
    return block[:, 0] if num_samples is None else block


def _gaussian(risk: Risk, count: int, rng: torch.Generator) -> Tensor:
    like: Any = {"dtype": risk.theta.dtype, "device": risk.theta.device}
    return probes((risk.space.size, count), kind="gaussian", generator=rng, **like)


def _mean_gradient(risk: Risk) -> Tensor:
    return risk.gradient().sub_(risk.theta, alpha=risk.l2)


# ------------------------------------------------------------------------------------------
# Losses with random signs, and drawn labels: one backward pass per sample of noise.


def _gradients(risk: Risk, kind: str, count: int, rng: torch.Generator) -> Tensor:
    seeds, theta = batch_seeds(risk.num_batches, rng), risk.theta
    known = as_likelihood(risk.loss_fn) if kind == "true" else None
    total, sums = theta.new_zeros(count, len(theta)), theta.new_zeros(count)
    with risk.settings():
        for index, context, weight in risk.contexts():
            batch_rng = torch.Generator().manual_seed(seeds[index])
            with recording():
                leaves = as_leaves(risk.params)
                outputs, target = risk.evaluate(leaves, context)
            if known is None:
                signs = random_signs((count, len(outputs)), batch_rng).to(theta)
                columns = sign_columns(risk.loss_fn, outputs, target, signs)
                sums += signs.sum(1) * math.sqrt(weight / len(outputs))
            else:
                columns = label_columns(known, outputs, target, count, batch_rng)
            gradients = _pull_back(risk, outputs, list(leaves.values()), columns)
            # sqrt(w_b) n_b^(-1/2) sum_i s_i g_i, of covariance w_b times the mean of g_i g_i'
            total += gradients * math.sqrt(weight)
    risk.sum_over_processes(total)
    if kind == "centred":
        # Cov[n - t g] = F - 2 g g' + g g', with t = N^(-1/2) sum_i s_i and E[n t] = g
        total -= risk.sum_over_processes(sums)[:, None] * _mean_gradient(risk)
    return total.T


def _pull_back(risk: Risk, outputs: Tensor, leaves: list[Tensor], columns: Tensor) -> Tensor:
    """Return the gradients ``(k, P)`` for ``k`` cotangents of the outputs."""

    def pull(part: Tensor, batched: bool) -> Tensor:
        gradients = torch.autograd.grad(
            outputs, leaves, part, retain_graph=True, is_grads_batched=batched,
            materialize_grads=True,
        )  # fmt: skip
        lead = part.shape[:1] if batched else (1,)
        return torch.cat([gradient.reshape(*lead, -1) for gradient in gradients], 1)

    parts: list[Tensor] = []
    size, problem = max(1, TUNING.gradients // (4 * risk.space.size)), ""
    for part in columns.split(size):
        if len(part) > 1 and not problem:
            rows, problem = attempt(partial(pull, part, True), RuntimeError)
            if not problem:
                parts.append(rows)
                continue
        parts += [pull(column, False) for column in part]
    return torch.cat(parts)


# ------------------------------------------------------------------------------------------
# Second moments of per-sample gradients: their square root times Gaussian noise.


def _from_moments(risk: Risk, kind: str, count: int, rng: torch.Generator) -> Tensor:
    constant = risk.with_constant_statistics()
    if kind == "kfac":
        # The L2 term of the risk is not part of the noise.
        blocks = kfac(constant.without_l2(), kind="empirical").ops
        xis = _gaussian(risk, count, rng).split([op.shape[0] for op in blocks])
        return torch.cat([
            times_root(block_root(op), xi, bias=getattr(op, "bias", False))
            for op, xi in zip(blocks, xis, strict=True)
        ])  # fmt: skip
    quantity: Any = "diagonal" if kind == "diagonal" else "trace"
    moments, note = structure_squares(constant, quantity, loss_columns(constant))
    if moments is None:
        raise ValueError(
            f"kind={kind!r} needs per-sample gradients, but {note}: use kind='full', which does not"
        )
    xi = _gaussian(risk, count, rng)
    if isinstance(moments, Tensor):  # the diagonal
        return xi * moments.sqrt()[:, None]
    return xi * math.sqrt(float(moments) / (risk.space.size if kind == "trace" else 1))
