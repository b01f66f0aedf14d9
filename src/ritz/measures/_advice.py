"""``advise``: batch size, learning rate and damping, from the curvature and its noise."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, Optimizer

from ritz._core.batch_norm import batch_norms
from ritz._core.checks import check_choice, check_count, check_positive, is_below
from ritz._core.progress import Progress, duration
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, format_uncertain
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import MATRICES, CurvatureMatrix, check_risk
from ritz.measures._advice_figures import Figures, trials, unknown
from ritz.measures._batch_prediction import (
    BatchPrediction,
    batch_prediction,
    bracketed,
    homogeneity,
)
from ritz.measures._gradient_noise import GradientNoise, noise_of
from ritz.measures._groups import check_batch_sizes, check_groups
from ritz.measures._outliers import BulkEdge, bulk_edge
from ritz.measures._preconditioned import divisors, preconditioned_curvature
from ritz.measures._stability import ADAPTIVE, OPTIMIZERS, OptimizerName, stable_rate
from ritz.measures._trials import MakeOptimizer, check_maker, critical_sharpness
from ritz.spectra import Spectrum, lanczos


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of the work of :func:`advise`, and when it warns."""

    # Batch sizes by default, those that the data allow.
    batch_sizes: tuple[int, ...] = (8, 32, 128, 512)
    # Lanczos steps. On digits, 35 products gave the 20 leading eigenpairs to a residual of 1 %.
    num_steps: int = 40
    # Fewest Lanczos steps within a number of products. On digits (MLP and convolutions, 100 epochs)
    # 10 steps gave the three largest eigenvalues to 1e-4, and 6 steps the second to 24 %.
    least_steps: int = 10
    # Floating-point operations of a product in those of a gradient, by benchmarks/advice.py: of
    # linear layers alone 1.2, with convolutions 1.9 and with attention 2.0.
    linear_cost: float = 1.2
    other_cost: float = 2.0
    # Gradients, and losses at a third of a gradient, besides the products.
    further: float = 7.0
    # Momentum by default, where the optimiser has one.
    momentum: float = 0.9
    # Share of noise in lambda'_1 below which curvature, and above which noise sets the limit.
    shares: tuple[float, float] = (1 / 3, 2 / 3)
    # From trained weights three networks on MNIST trained to 0.8 to 3.6 times the edge.
    usual: tuple[float, float] = (1.0, 5.0)
    # Share of the loss that one step along the gradient would gain if the loss were quadratic.
    gain: float = 0.1
    # Factor between the curvature along the gradient and the critical sharpness: 1 on a quadratic.
    agreement: float = 2.0
    # V(phi_1) over P sigma^2, which is 1 for homogeneous noise.
    homogeneous: float = 3.0
    # Magnitude of the smallest eigenvalue over the largest, beyond which no learning rate is
    # advised. A LeNet on MNIST trained to 0.05 to 1.4 times the edge in its first 32 steps, where
    # this was 1.1 to 0.1, and to 0.93 times or more later; an MLP to 1.3 times or more at 0.36.
    negative: float = 0.1


TUNING = Tuning()
NAMES = {
    "sgd": "SGD",
    "momentum": "SGD with momentum",
    "nesterov": "SGD with Nesterov momentum",
    "adam": "Adam",
    "kfac": "K-FAC",
}


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    r"""Predicted curvature, learning rates and damping for each batch size, made by :func:`advise`.

    Arrays have one entry per batch size, ``(S,)``. Learning rates are those of the optimiser as
    torch writes it. Every figure is an :class:`Estimate`; one that is not known is NaN, and its
    status says why.

    Attributes:
        batch_sizes: Batch sizes :math:`B`; batches are drawn without replacement.
        optimizer: ``sgd``, ``momentum``, ``nesterov``, ``adam`` or ``kfac``.
        momentum: Its momentum; :math:`\beta_1` of Adam.
        prediction: Predicted curvature of batches: :math:`\lambda'_1(B)`, spread and overlap.
        bulk: Edge of the bulk of the spectrum, and the outliers.
        smallest: Smallest eigenvalue.
        noise: Noise scales of the gradient; ``noise.curved`` is the critical batch size.
        sharpness: Critical sharpness along the gradient, from losses alone.
        edge: Edge of local stability: for SGD :math:`2 / \lambda'_1(B)`; see :func:`stable_rate`.
        rate: Recommended learning rate: the edge for a batch whose :math:`\lambda'_1` is two
            standard deviations above the mean. For Adam without ``state``, the square-root rule.
            The table leaves it out where the sentences advise none.
        damping: Least damping per unit of learning rate: for Adam and K-FAC one over the edge of
            heavy-ball momentum, otherwise by the noise along the leading eigenvector.
        damping_papers: The same by the formula of the papers: homogeneous noise along all outliers.
        ratio: Ratio :math:`R` of learning rates along flat and sharp directions at this damping.
        exponent: Exponent :math:`e` with which the predicted edge grows, as :math:`B^e`, from this
            batch size to the next; beyond the last the local one of
            :math:`\lambda_1 + V(\varphi_1) / (b \lambda_1)`.
        exponent_additive: Local exponent of the additive model with homogeneous noise.
        exponent_multiplicative: Local exponent of the multiplicative model.
        changes_at: Batch sizes at which the rule changes: of the three models, ``(3,)``.
        trainable: Largest learning rate at which short trainings do not diverge; ``None`` without
            ``verify``.
        known: Batch size and learning rate of an earlier training, or ``None``.
        sentences: Advice in words, one text per batch size.
        warnings: Reasons to doubt the assumptions of the predictions.
        cost: Cost in gradients of the data, counted from products, gradients and losses.
        loss: The loss.
        seed: Seed of all random numbers.
    """

    batch_sizes: tuple[int, ...]
    optimizer: str
    momentum: float
    prediction: BatchPrediction
    bulk: BulkEdge
    smallest: Estimate
    noise: GradientNoise
    sharpness: Estimate
    edge: Estimate
    rate: Estimate
    damping: Estimate
    damping_papers: Estimate
    ratio: Estimate
    exponent: Estimate
    exponent_additive: Estimate
    exponent_multiplicative: Estimate
    changes_at: Estimate
    trainable: Estimate | None
    known: tuple[int, float] | None
    sentences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    cost: float
    loss: float
    seed: int

    def __str__(self) -> str:
        title, *details = _head(self)
        return "\n".join([title, "", *_rate_table(self), "", *_sentence_lines(self), "",
                          "Details", *details, "", *_curvature_table(self), "",
                          *_notes(self)])  # fmt: skip


def advice_cost(
    risk: Risk,
    *,
    batch_sizes: Sequence[int] | None = None,
    state: Optimizer | None = None,
    max_products: int | None = None,
    timed: bool = False,
) -> str:
    """Return what :func:`advise` will cost, as a sentence to print before it starts.

    Args:
        risk: The loss at a point.
        batch_sizes: Batch sizes, which are checked. Their number hardly changes the cost.
        state: Adam optimiser whose divisors precondition the matrix.
        max_products: As in :func:`advise`.
        timed: Compute one gradient, and say how many seconds all of them will take.
    """
    _sizes(risk, batch_sizes)
    size = risk.space.size
    products = _num_steps(risk, state, max_products) + _further_products(risk, state)
    gradients, took = _gradients(risk, products), ""
    if timed:
        begun = time.perf_counter()
        float(risk.gradient()[0])  # a GPU has finished when a number is read
        took = f", about {duration(gradients * (time.perf_counter() - begun))}"
    return (
        f"About {gradients:.0f} gradients of {risk.num_samples:,} samples{took}: "
        f"{products} products with the {size:,} x {size:,} matrix, of {_unit(risk):g} gradients "
        f"each, and {TUNING.further:g} more. Trials are not counted."
    )


def _further_products(risk: Risk, state: Optimizer | None) -> int:
    """Return the number of products besides those of the Lanczos run."""
    return min(20, risk.space.size) + 8 + 13 + (0 if state is None else 20)


def _num_steps(risk: Risk, state: Optimizer | None, max_products: int | None) -> int:
    """Return the number of Lanczos steps, fewer if a number of products does not suffice."""
    steps = min(TUNING.num_steps, risk.space.size)
    if max_products is None:
        return steps
    further, least = _further_products(risk, state), min(TUNING.least_steps, steps)
    max_products = check_count("max_products", max_products, low=further + least)
    return min(steps, max_products - further)


def _unit(risk: Risk) -> float:
    """Return the cost of a product in gradients."""
    layers = risk.model.modules()
    own = [layer for layer in layers if next(layer.parameters(recurse=False), None) is not None]
    linear = all(isinstance(layer, nn.Linear | _BatchNorm) for layer in own)
    return TUNING.linear_cost if linear else TUNING.other_cost


def _gradients(risk: Risk, products: float) -> float:
    return _unit(risk) * products + TUNING.further


def advise(
    risk: Risk,
    *,
    batch_sizes: Sequence[int] | None = None,
    optimizer: OptimizerName = "sgd",
    momentum: float | None = None,
    matrix: CurvatureMatrix = "hessian",
    known: tuple[int, float] | None = None,
    state: Optimizer | None = None,
    verify: bool | MakeOptimizer = False,
    max_products: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Advice:
    r"""Predict the largest stable learning rate and the least damping for each batch size.

    ============  ==================================================================================
    ``sgd``       edge of local stability :math:`2 / \lambda'_1(B)`
    ``momentum``  :math:`2 (1 + \rho) / (\lambda_1 + \kappa (\lambda'_1(B) - \lambda_1))` with
                  :math:`\kappa = (1 + \rho) / (1 - \rho)`, as momentum sums the noise of batches
    ``nesterov``  the same with Nesterov momentum: see :func:`stable_rate`
    ``adam``      with ``state``: that of ``momentum`` over :math:`1 - \beta_1`, of the matrix
                  :math:`D^{-1/2} H D^{-1/2}` of the divisors; without: :math:`\sqrt B` rule
    ``kfac``      that of ``momentum``, of the matrix divided by :math:`\lambda_1`
    ============  ==================================================================================

    :math:`\lambda'_1(B)` is the largest eigenvalue of the matrix of a batch, predicted by
    :func:`batch_prediction`, and :math:`\lambda_1` that of all data. The edge is *local*: from
    trained weights three networks on MNIST trained to 0.8 to 3.6 times the edge, and a LeNet in
    its first 32 steps to 0.05 to 1.4 times. No learning rate is advised where negative curvature is
    more than a tenth of the largest. ``verify`` finds out what trains, and the advice says where
    it and the edge disagree.

    With a damping :math:`\delta` that is large beside their divisors, Adam and K-FAC are heavy-ball
    momentum with the learning rate :math:`\alpha / \delta`, so that the least damping is
    :math:`\alpha` over the edge of momentum for the matrix without a preconditioner. On three
    networks on MNIST, Adam with :math:`\alpha = 1` needed 0.5 to 1.5 times that for batches of 4
    to 64, and less where its divisor was not small, as did K-FAC with :math:`\alpha = 0.1`. For
    ``sgd`` and its momenta the damping is that below which the noise of a batch would make a
    second-order step unstable,

    .. math:: \tfrac{\alpha}{2} \lambda_1 \min(1, V(\varphi_1) / (b \lambda_1^2)).

    Cost: about 105 gradients of the data for an MLP and 170 with convolutions or attention, see
    :func:`advice_cost`; ``verify`` trains in addition. Memory: 40 vectors.

    Args:
        risk: The loss at a point. Batch norm must not be in ``train`` mode, and the data must be in
            memory.
        batch_sizes: Sizes ``B``, from 1 to ``N``. Defaults to those of 8, 32, 128 and 512 that the
            data allow.
        optimizer: One of the table.
        momentum: Momentum, or :math:`\beta_1`. Defaults to 0 for ``sgd`` and 0.9 otherwise.
        matrix: ``hessian`` or ``ggn``, which has no negative eigenvalues to warn of.
        known: Batch size and learning rate that you trained with. They are compared with the edge;
            for Adam they are the start of the square-root rule.
        state: Adam optimiser that trained the model, whose divisors precondition the matrix.
        verify: Find the largest learning rate that a short training stands: ``True``, or a function
            of parameters and learning rate that makes the optimiser. Nothing but a copy is trained.
        max_products: At most this many products with the matrix; trials are not counted. If that is
            too few, there are fewer Lanczos steps, which a warning of the result says.
        generator: Source of all random numbers. Defaults to a new generator with seed 0.
        progress: Show progress bars, or a :class:`Progress` to report to.

    Reference: *Spectral Machine Learning*, sections 5.7 and 5.8, with corrections; McCandlish et
    al. (2018) for the noise scales.
    """
    sizes, momentum = _checked(risk, batch_sizes, optimizer, momentum, matrix, known, state)
    make = None if verify is False else _maker(verify, optimizer, momentum)
    generator = resolve_generator(generator)
    shared: Any = {"generator": generator, "progress": progress}
    op, num_steps = curvature_operator(risk, matrix), _num_steps(risk, state, max_products)
    run = lanczos(op, num_steps=num_steps, vectors=True, **shared)
    prediction = batch_prediction(risk, batch_sizes=sizes, matrix=matrix, pairs=run, **shared)
    noise, sharpness = noise_of(op, **shared), _sharpness(risk)
    scaled = None if state is None else _preconditioned(risk, state, matrix, generator)
    update: Any = {"optimizer": optimizer, "momentum": momentum, "known": known}
    figures = Figures(prediction, run.values[run.values > 0], **update)
    edge, rate = figures.edges(scaled)
    trainable = None
    if make is not None:
        trainable = trials(risk, make, sizes, edge, rate, generator, progress)
    products = run.num_products + prediction.cost + noise.num_products
    products += 0 if scaled is None else scaled[0].num_products + 1
    fields: Any = figures.fields()
    advice = Advice(
        batch_sizes=sizes,
        prediction=prediction,
        bulk=bulk_edge(run, variance=prediction.variance, batch_size=risk.num_samples),
        smallest=_smallest(run),
        noise=noise,
        sharpness=sharpness,
        edge=edge,
        rate=rate,
        trainable=trainable,
        cost=_gradients(risk, products),
        loss=risk.loss(),
        seed=generator.initial_seed(),
        **(fields | update),
    )
    doubts = tuple(_warnings(risk, advice))
    if num_steps < (wanted := _num_steps(risk, state, None)):
        steps = f"{num_steps} of {wanted} Lanczos steps"
        doubts += (f"max_products={max_products} allowed {steps}: the bulk and small "
                   "eigenvalues are less certain",)  # fmt: skip
    sentences = tuple(_sentence(advice, index) for index in range(len(sizes)))
    return replace(advice, sentences=sentences, warnings=doubts)


# ------------------------------------------------------------------------------------------
# Arguments.


def _checked(
    risk: Risk,
    batch_sizes: Sequence[int] | None,
    optimizer: OptimizerName,
    momentum: float | None,
    matrix: CurvatureMatrix,
    known: tuple[int, float] | None,
    state: Optimizer | None,
) -> tuple[tuple[int, ...], float]:
    """Return batch sizes and momentum, checked."""
    check_risk(risk)
    check_groups(risk, "advise()")
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_choice("matrix", matrix, MATRICES)
    sizes = _sizes(risk, batch_sizes)
    if momentum is None:
        momentum = 0.0 if optimizer == "sgd" else TUNING.momentum
    stable_rate(1.0, optimizer=optimizer, momentum=momentum)
    if optimizer == "adam" and momentum == 1:  # its running mean would never change
        raise ValueError(f"momentum must be below 1 for adam, got {momentum}")
    if known is not None:
        if not isinstance(known, tuple | list) or len(known) != 2:
            raise ValueError(f"known must be a batch size and a learning rate, got {known!r}")
        check_count("known[0]", known[0])
        check_positive("known[1]", known[1])
    if state is not None:
        if optimizer != "adam":
            raise ValueError(f"state must be given with optimizer='adam', got {optimizer!r}")
        divisors(risk, state)
    return sizes, float(momentum)


def _sizes(risk: Risk, batch_sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the batch sizes in order, checked; by default those that the data allow."""
    check_risk(risk)
    count = sum(risk.batch_rows)
    if batch_sizes is None:
        batch_sizes = [size for size in TUNING.batch_sizes if size <= count] or [count]
    return tuple(sorted(set(check_batch_sizes(batch_sizes, count))))


def _maker(
    verify: bool | MakeOptimizer, optimizer: OptimizerName, momentum: float
) -> MakeOptimizer:
    """Return what makes the optimiser of the trials; checked before anything is computed."""
    if verify is not True:
        check_maker("verify", verify)
        return verify  # type: ignore[return-value]
    if optimizer == "kfac":
        raise ValueError(
            "verify must be left out or a function that makes the optimiser for kfac, got True"
        )
    if optimizer == "adam":
        return lambda params, rate: Adam(params, lr=rate, betas=(momentum, 0.999))
    nesterov = optimizer == "nesterov"
    return lambda params, rate: SGD(params, lr=rate, momentum=momentum, nesterov=nesterov)


def _preconditioned(
    risk: Risk, state: Optimizer, matrix: CurvatureMatrix, generator: torch.Generator
) -> tuple[Estimate, Estimate]:
    divisor = divisors(risk, state)
    return preconditioned_curvature(risk, divisor, matrix=matrix, generator=generator)


def _sharpness(risk: Risk) -> Estimate:
    try:
        return critical_sharpness(risk)
    except ValueError as error:  # a gradient of zero has no direction
        return unknown((), str(error))


def _smallest(run: Spectrum) -> Estimate:
    residual = float(run.residuals[0])
    return Estimate.exact(run.values[0], method="smallest Ritz value", truncation=residual)


# ------------------------------------------------------------------------------------------
# Words.


def _regime(advice: Advice, index: int) -> str:
    """Return what sets the limit, by the share of the edge that the noise of batches takes."""
    top = float(advice.prediction.lambda_max)
    value = float(advice.prediction.best.value.mean[index])
    if not (top > 0 and value > 0):
        return "not known"
    # For SGD, with lambda' = lambda (1 + x), it is x / (1 + x), the exponent of the scaling rule.
    # With momentum noise counts more: by how much it lowers the edge of all data.
    update: Any = {"optimizer": advice.optimizer, "momentum": advice.momentum}
    left = stable_rate(value, full=top, **update) / stable_rate(top, **update)
    share, (low, high) = 1 - float(left), TUNING.shares
    return "noise" if share > high else "curvature" if share < low else "both"


def _warnings(risk: Risk, advice: Advice) -> Iterator[str]:
    """Yield where the quadratic model with noise does not hold."""
    top, least = float(advice.prediction.lambda_max), float(advice.smallest)
    if not top > 0:
        yield (
            f"not near a minimum: the largest eigenvalue is {top:.3g}, not positive, so that no "
            "learning rate is unstable to second order"
        )
        return
    if _is_indefinite(advice):
        yield (
            f"not near a minimum: the smallest eigenvalue is {least:.3g}, {-least / top:.0%} of "
            "the largest in magnitude. Training leaves these weights along negative curvature, and "
            "may diverge below the edge: train for some epochs first, or let trials (verify) decide"
        )
    yield from _gradient_warnings(advice)
    if batch_norms(risk.model):
        yield (
            f"batch norm: the curvature is that of {risk.batch_norm} mode, but training normalises "
            "by each batch, which changes it: let trials (verify) decide"
        )


def _is_indefinite(advice: Advice) -> bool:
    """Return whether negative curvature is a large part of the largest."""
    return -float(advice.smallest) > TUNING.negative * float(advice.prediction.lambda_max)


def _gradient_warnings(advice: Advice) -> Iterator[str]:
    """Yield what the loss along the gradient says against a quadratic near its minimum."""
    along, square = float(advice.noise.along), float(advice.noise.gradient_square)
    if not along > 0:
        yield f"not near a minimum: the curvature along the gradient is {along:.3g}"
        return
    # One step with the rate 1/along gains |g|^2 / (2 along) on a quadratic.
    gain = square / (2 * along)
    if gain > TUNING.gain * abs(advice.loss):
        yield (
            f"not near a minimum: one step along the gradient would gain {gain:.2g} of the loss "
            f"{advice.loss:.2g}, so that the curvature will change soon"
        )
    measured = float(advice.sharpness)
    if measured > 0 and max(measured / along, along / measured) > TUNING.agreement:
        yield (
            f"not quadratic: along the gradient the curvature is {along:.3g}, but losses give "
            f"{measured:.3g}"
        )


def _sentence(advice: Advice, index: int) -> str:
    """Return the advice for a batch size: one sentence, and others that qualify it."""
    size, advised = advice.batch_sizes[index], _limit(advice, index)
    edge = float(advice.edge.mean[index])
    if math.isfinite(edge) and advice.trainable is None and _is_indefinite(advice):
        advised = f"the edge is {edge:.2g}, but no learning rate is advised at these weights"
    elif math.isfinite(edge):
        advised = f"{_recommended(advice, index)}: {advised}"
    sentences = [advised[0].upper() + advised[1:]]
    critical = float(advice.noise.curved)
    if size > 2 * critical:
        sentences.append(
            f"The batch is {size / critical:.2g} times the critical size: a smaller one learns "
            "more per sample"
        )
    return " ".join(f"{text}." for text in [*sentences, *_comparisons(advice, index)])


def _recommended(advice: Advice, index: int) -> str:
    rate = float(advice.rate.mean[index])
    if advice.trainable is None or is_below(rate, float(advice.trainable.mean[index])):
        return f"use a learning rate of at most {rate:.2g}"
    # What was tried counts more than what was predicted.
    limit = float(advice.trainable.mean[index])
    return f"use a learning rate of at most {limit:.2g}, the limit of the trials"


def _limit(advice: Advice, index: int) -> str:
    exponent = float(advice.exponent.mean[index])
    gain = f"a batch twice as large raises the edge {2**exponent:.2g} times"
    return {
        "noise": f"the noise of batches sets the limit, and {gain}",
        "both": f"noise and curvature set the limit together, and {gain}",
        "curvature": "the curvature sets the limit, and a larger batch gains little",
        "not known": "without positive curvature there is no limit",
    }[_regime(advice, index)]


def _comparisons(advice: Advice, index: int) -> Iterator[str]:
    """Yield what trials and an earlier training say about the prediction."""
    size, edge = advice.batch_sizes[index], float(advice.edge.mean[index])
    if not math.isfinite(edge):
        return
    if advice.known is not None and advice.known[0] == size:
        share = advice.known[1] / edge
        beyond = ", where these weights are not stable" if share > 1 else ""
        yield f"Your learning rate of {advice.known[1]:g} is {share:.2g} times the edge{beyond}"
    if advice.trainable is None:
        return
    times = float(advice.trainable.mean[index]) / edge
    low, high = TUNING.usual
    if not math.isfinite(float(advice.trainable.truncation[index])):
        yield "The trials found no limit"
        return
    stable = f"up to {times:.2g} times the edge"
    if times < low:
        yield f"The trials were stable only {stable}, which leaves out the noise of gradients"
    elif times > high:
        yield f"The trials were stable {stable}, further than usual"
    else:
        yield f"The trials were stable {stable}"


def _head(advice: Advice) -> list[str]:
    p, outliers = advice.prediction, len(advice.bulk.outliers)
    name = NAMES[advice.optimizer]
    with_momentum = f" ({advice.momentum:g})" if advice.momentum else ""
    return [
        f"Advice for {name}{with_momentum}: {p.matrix} of {p.num_parameters:,} parameters, "
        f"{p.num_samples:,} samples, loss {advice.loss:.4g}",
        f"  lambda_1 = {_text(p.lambda_max)}, {outliers} outliers beyond a bulk of "
        f"[{advice.bulk.lower:.2g}, {advice.bulk.upper:.2g}]",
        f"  noise of the {p.matrix}: P sigma^2 = {_text(p.variance)} in all directions, "
        f"V(phi_1) = {_text(p.along)} along the leading one",
        f"  noise of the gradient: noise scale {_text(advice.noise.simple)}, critical batch size "
        f"{_text(advice.noise.curved)}",
        f"  along the gradient: curvature {_text(advice.noise.along)}, critical sharpness "
        f"{_text(advice.sharpness)}",
    ]


def _text(estimate: Estimate, index: int | None = None) -> str:
    """Return a figure with its 95 % interval, whether sampled or bounded."""
    mean, error = estimate.mean, estimate.error()
    if index is not None:
        mean, error = mean[index], error[index]
    if not math.isfinite(float(mean)):
        return "not known"
    if not math.isfinite(float(error)):
        return f"{float(mean):.2g} ± ?"
    # Roundoff is not worth an error bar.
    tiny = is_below(float(error), 1e-4 * abs(float(mean)))
    return f"{float(mean):.4g}" if tiny else format_uncertain(float(mean), float(error))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in (titles, *rows)
    ]


def _curvature_table(advice: Advice) -> list[str]:
    p = advice.prediction
    rows = [
        [
            f"{size:,}",
            _text(p.best.spread, i),
            _text(p.best.overlap, i),
            p.best.source[i],
            _text(advice.exponent, i),
            *([_text(advice.ratio, i)] if advice.optimizer in ADAPTIVE else []),
            *(_model(p, name, i) for name in ("directional", "additive", "multiplicative")),
        ]
        for i, size in enumerate(p.batch_sizes)
    ]
    titles = ["batch", "spread", "overlap", "by", "exponent"]
    titles += ["R"] if advice.optimizer in ADAPTIVE else []
    return _table([*titles, "directional", "additive", "multipl."], rows)


def _model(prediction: BatchPrediction, name: str, place: int) -> str:
    """Return the value of a model: in brackets and without an interval if it is out of range."""
    value = getattr(prediction, name).value
    if prediction.trusted[name][place]:
        return _text(value, place)
    mean = float(value.mean[place])
    return bracketed(prediction, name, place, f"{mean:.3g}" if math.isfinite(mean) else "-")


def _rate_table(advice: Advice) -> list[str]:
    unit = "rate" if advice.optimizer != "adam" or advice.known else "rate, relative"
    unit = "rate" if bool(torch.isfinite(advice.edge.mean).all()) else unit
    columns: dict[str, Any] = {
        "lambda_1": advice.prediction.best.value,
        "edge": advice.edge,
    }
    if advice.trainable is not None or not _is_indefinite(advice):
        columns[unit] = advice.rate
    if advice.trainable is not None:
        columns["trains to"] = advice.trainable
    if advice.optimizer in ADAPTIVE:
        columns |= {
            "least damping/rate": advice.damping,
            "papers": advice.damping_papers,
        }
    rows = [
        [
            f"{size:,}",
            *(_text(column, i) for column in columns.values()),
            _regime(advice, i),
        ]
        for i, size in enumerate(advice.batch_sizes)
    ]
    return _table(("batch", *columns, "limit"), rows)


def _sentence_lines(advice: Advice) -> list[str]:
    """Return the advice for each batch size, then the warnings."""
    width = max(len(f"{size:,}") for size in advice.batch_sizes)
    lines = []
    for size, sentence in zip(advice.batch_sizes, advice.sentences, strict=True):
        lines += _wrapped(f"{size:>{width},}: ", sentence)
    for warning in advice.warnings:
        lines += _wrapped("Warning: ", f"{warning}.")
    return lines


def _notes(advice: Advice) -> list[str]:
    scaling = (
        "The edge is local and comes from the curvature alone. Near a minimum small networks "
        "trained to 0.8 to 3.6 times the edge. Figures are ± 95 %."
    )
    changes = [_text(advice.changes_at, i) for i in range(3)]
    if math.isfinite(float(advice.changes_at.mean[0])):
        scaling = (
            f"The noise along the leading eigenvector halves the edge at a batch of {changes[0]}. "
            "Below that size the edge grows with the batch, above it hardly. The papers' models "
            f"put this change at {changes[1]} (additive) and {changes[2]} (multiplicative). "
            f"{scaling}"
        )
    lines = _wrapped("", scaling)
    brackets = (
        "The last three columns are lambda_1 by other models, in brackets where a model does not "
        "hold. Trust lambda_1 of the first table."
    )
    if not all(itertools.chain(*advice.prediction.trusted.values())):
        lines += _wrapped("", brackets)
    ratio = homogeneity(advice.prediction)
    if not is_below(ratio, TUNING.homogeneous):
        note = f"V(phi_1) is {ratio:.2g} times P sigma^2; the additive model takes both for equal."
        lines += _wrapped("", note)
    return [*lines, f"  Cost: {advice.cost:.0f} gradients of the data."]


def _wrapped(title: str, text: str) -> list[str]:
    indent = "  " + " " * len(title)
    return wrap(text, 98, initial_indent=f"  {title}", subsequent_indent=indent)
