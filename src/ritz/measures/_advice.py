"""``advise``: batch size, learning rate and damping, from the curvature and its noise."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, Optimizer

from ritz._core.checks import check_choice, check_count, check_positive
from ritz._core.progress import Progress, duration
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import MATRICES, CurvatureMatrix, check_risk
from ritz.measures._advice_numbers import AdviceNumbers, trainable_rates, unknown
from ritz.measures._advice_result import Advice, advice_sentence, advice_warnings
from ritz.measures._batch_prediction import batch_prediction
from ritz.measures._bulk_edge import bulk_edge, ritz_value
from ritz.measures._critical_sharpness import critical_sharpness
from ritz.measures._gradients import noise_of
from ritz.measures._groups import check_batch_sizes, check_groups
from ritz.measures._learning_rates import (
    OPTIMIZERS,
    MakeOptimizer,
    OptimizerName,
    check_maker,
    stable_rate,
)
from ritz.measures._preconditioned import divisors, preconditioned_curvature
from ritz.spectra import lanczos


@dataclass(frozen=True, slots=True)
class Tuning:
    """Defaults of :func:`advise`, and its cost."""

    # Default batch sizes. Those that exceed the number of samples are left out.
    batch_sizes: tuple[int, ...] = (8, 32, 128, 512)
    # Number of Lanczos steps. On digits, 35 products gave the 20 leading eigenpairs to a residual
    # of 1 %.
    num_steps: int = 40
    # Minimum number of Lanczos steps if the number of products is limited. On digits (MLP and
    # convolutions, 100 epochs) 10 steps gave the three largest eigenvalues to 1e-4, and 6 steps
    # gave the second to 24 %.
    least_steps: int = 10
    # Cost of a product in gradients, from floating-point operations (benchmarks/advice.py): 1.2 for
    # linear layers alone, 1.9 with convolutions and 2.0 with attention.
    linear_cost: float = 1.2
    other_cost: float = 2.0
    # Cost of everything else in gradients. A loss counts as a third of a gradient.
    further: float = 7.0
    # Default momentum of optimisers that have one.
    momentum: float = 0.9


TUNING = Tuning()


def advice_cost(
    risk: Risk,
    *,
    batch_sizes: Sequence[int] | None = None,
    state: Optimizer | None = None,
    max_products: int | None = None,
    timed: bool = False,
) -> str:
    """Return the cost of :func:`advise` as a sentence, to print before it starts.

    Args:
        risk: The loss at a point.
        batch_sizes: Batch sizes. They are checked, but hardly change the cost.
        state: Adam optimiser whose divisors precondition the matrix.
        max_products: As in :func:`advise`.
        timed: Measure the time of one gradient, and add an estimate of the total time.
    """
    _choose_sizes(risk, batch_sizes)
    size = risk.space.size
    products = _num_steps(risk, state, max_products) + _further_products(risk, state)
    gradients, time_needed = _cost(risk, products), ""
    if timed:
        start = time.perf_counter()
        float(risk.gradient()[0])  # reading a number waits until a GPU has finished
        time_needed = f", about {duration(gradients * (time.perf_counter() - start))}"
    return (
        f"About {gradients:.0f} gradients of {risk.num_samples:,} samples{time_needed}: "
        f"{products} products with the {size:,} x {size:,} matrix, at {_product_cost(risk):g} "
        f"gradients each, and {TUNING.further:g} gradients. Trials are not included."
    )


def _further_products(risk: Risk, state: Optimizer | None) -> int:
    """Return the number of products other than those of the Lanczos run."""
    return min(20, risk.space.size) + 8 + 13 + (0 if state is None else 20)


def _num_steps(risk: Risk, state: Optimizer | None, max_products: int | None) -> int:
    """Return the number of Lanczos steps, reduced if ``max_products`` requires it."""
    steps = min(TUNING.num_steps, risk.space.size)
    if max_products is None:
        return steps
    further, least = _further_products(risk, state), min(TUNING.least_steps, steps)
    max_products = check_count("max_products", max_products, low=further + least)
    return min(steps, max_products - further)


def _product_cost(risk: Risk) -> float:
    """Return the cost of a product in gradients."""
    layers = [
        m for m in risk.model.modules() if next(m.parameters(recurse=False), None) is not None
    ]
    linear = all(isinstance(layer, nn.Linear | _BatchNorm) for layer in layers)
    return TUNING.linear_cost if linear else TUNING.other_cost


def _cost(risk: Risk, products: float) -> float:
    """Return the total cost in gradients."""
    return _product_cost(risk) * products + TUNING.further


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

    The advice is based on the edge of local stability:

    ============  ==================================================================================
    ``sgd``       :math:`2 / \lambda'_1(B)`
    ``momentum``  :math:`2 (1 + \rho) / (\lambda_1 + \kappa (\lambda'_1(B) - \lambda_1))` with
                  :math:`\kappa = (1 + \rho) / (1 - \rho)`, as momentum accumulates noise
    ``nesterov``  with Nesterov momentum; see :func:`stable_rate`
    ``adam``      with ``state``: the edge of ``momentum`` over :math:`1 - \beta_1`, for the matrix
                  :math:`D^{-1/2} H D^{-1/2}` with the divisors; without: the :math:`\sqrt B` rule
    ``kfac``      the edge of ``momentum`` for the matrix divided by :math:`\lambda_1`
    ============  ==================================================================================

    :math:`\lambda'_1(B)` is the largest eigenvalue of the matrix of a batch, predicted by
    :func:`batch_prediction`. :math:`\lambda_1` is the largest eigenvalue of the matrix of all data.

    The edge is *local*. From trained weights, three networks on MNIST trained at up to 0.5 to 4.2
    times the edge. In its first 32 steps, a LeNet trained at up to 0.05 to 1.4 times the edge. If
    the smallest eigenvalue is negative and its magnitude is more than a tenth of the largest
    eigenvalue, no learning rate is advised. ``verify`` finds by trial what trains, and the advice
    says if this disagrees with the edge.

    The least damping for Adam and K-FAC is :math:`\alpha` over the edge of momentum for the matrix
    without a preconditioner. The reason is that with a damping :math:`\delta` far above their
    divisors, both are heavy-ball momentum with the learning rate :math:`\alpha / \delta`. On three
    networks on MNIST and for batches of 4 to 64, Adam with :math:`\alpha = 1` needed 0.4 to 1.8
    times this damping, and less if its divisor was not small. K-FAC with :math:`\alpha = 0.1`
    needed 0.3 to 1.2 times. For ``sgd``, ``momentum`` and ``nesterov``, the damping is the least
    that keeps a second-order step stable under the noise of batches,

    .. math:: \tfrac{\alpha}{2} \lambda_1 \min(1, V(\varphi_1) / (b \lambda_1^2)).

    Cost: about 105 gradients of the data for an MLP and 170 with convolutions or attention; see
    :func:`advice_cost`. ``verify`` needs short trainings in addition. Memory: 40 vectors.

    Args:
        risk: The loss at a point. Batch norm must not be in ``train`` mode, and the data must be in
            memory.
        batch_sizes: Batch sizes ``B``, from 1 to ``N``. Defaults to 8, 32, 128 and 512, without
            those above ``N``.
        optimizer: One of the table.
        momentum: Momentum, or :math:`\beta_1`. Defaults to 0 for ``sgd`` and 0.9 otherwise.
        matrix: ``hessian`` or ``ggn``. The latter has no negative eigenvalues.
        known: Batch size and learning rate that you trained with, to compare with the edge. For
            Adam without ``state``, the square-root rule starts from them.
        state: Adam optimiser that trained the model. Its divisors precondition the matrix.
        verify: Whether to find the largest learning rate at which a short training does not
            diverge. Pass ``True``, or a function of parameters and a learning rate that returns the
            optimiser. Only a copy of the model is trained.
        max_products: Maximum number of products with the matrix, not counting trials. If it is too
            small, there are fewer Lanczos steps, and the result has a warning.
        generator: Source of all random numbers. Defaults to a new generator with seed 0.
        progress: ``True`` shows progress bars; a :class:`Progress` object receives the progress.

    Reference: *Spectral Machine Learning*, sections 5.7 and 5.8, with corrections; McCandlish et
    al. (2018) for the noise scales.
    """
    sizes, momentum = _check_arguments(risk, batch_sizes, optimizer, momentum, matrix, known, state)
    make = None if verify is False else _trial_optimizer(verify, optimizer, momentum)
    generator = resolve_generator(generator)
    shared: Any = {"generator": generator, "progress": progress}
    op, num_steps = curvature_operator(risk, matrix), _num_steps(risk, state, max_products)
    run = lanczos(op, num_steps=num_steps, vectors=True, **shared)
    prediction = batch_prediction(risk, batch_sizes=sizes, matrix=matrix, pairs=run, **shared)
    noise, sharpness = noise_of(op, **shared), _sharpness(risk)
    scaled = None
    if state is not None:
        scaled = preconditioned_curvature(
            risk, divisors(risk, state), matrix=matrix, generator=generator
        )
    update: Any = {"optimizer": optimizer, "momentum": momentum, "known": known}
    numbers = AdviceNumbers(prediction, run.values[run.values > 0], **update)
    edge, rate = numbers.edges(scaled)
    trainable = None
    if make is not None:
        trainable = trainable_rates(risk, make, sizes, edge, rate, generator, progress)
    products = run.num_products + prediction.cost + noise.num_products
    products += 0 if scaled is None else scaled[0].num_products + 1
    fields: Any = numbers.fields()
    advice = Advice(
        batch_sizes=sizes,
        prediction=prediction,
        bulk=bulk_edge(run, variance=prediction.variance, batch_size=prediction.num_samples),
        smallest=ritz_value(run, 0, "smallest Ritz value"),
        noise=noise,
        sharpness=sharpness,
        edge=edge,
        rate=rate,
        trainable=trainable,
        cost=_cost(risk, products),
        loss=risk.loss(),
        seed=generator.initial_seed(),
        **(fields | update),
    )
    doubts = tuple(advice_warnings(risk, advice))
    if num_steps < (wanted := _num_steps(risk, state, None)):
        doubts += (
            f"max_products={max_products} allowed only {num_steps} of {wanted} Lanczos steps, so "
            "the bulk and the small eigenvalues are less certain",
        )
    sentences = tuple(advice_sentence(advice, index) for index in range(len(sizes)))
    return replace(advice, sentences=sentences, warnings=doubts)


# ------------------------------------------------------------------------------------------
# Arguments.


def _check_arguments(
    risk: Risk,
    batch_sizes: Sequence[int] | None,
    optimizer: OptimizerName,
    momentum: float | None,
    matrix: CurvatureMatrix,
    known: tuple[int, float] | None,
    state: Optimizer | None,
) -> tuple[tuple[int, ...], float]:
    """Return batch sizes and momentum; raise if an argument is wrong."""
    check_risk(risk)
    check_groups(risk, "advise()")
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_choice("matrix", matrix, MATRICES)
    sizes = _choose_sizes(risk, batch_sizes)
    if momentum is None:
        momentum = 0.0 if optimizer == "sgd" else TUNING.momentum
    stable_rate(1.0, optimizer=optimizer, momentum=momentum)
    if optimizer == "adam" and momentum == 1:  # its running mean would never change
        raise ValueError(f"momentum must be below 1 for adam, got {momentum}")
    if known is not None:
        if not isinstance(known, tuple | list) or len(known) != 2:
            raise ValueError(
                f"known must be a pair of a batch size and a learning rate, got {known!r}"
            )
        check_count("known[0]", known[0])
        check_positive("known[1]", known[1])
    if state is not None:
        if optimizer != "adam":
            raise ValueError(f"state is only for optimizer='adam', got optimizer={optimizer!r}")
        divisors(risk, state)
    return sizes, float(momentum)


def _choose_sizes(risk: Risk, batch_sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return distinct batch sizes in ascending order. The defaults do not exceed the data."""
    check_risk(risk)
    count = sum(risk.batch_rows)
    if batch_sizes is None:
        batch_sizes = [size for size in TUNING.batch_sizes if size <= count] or [count]
    return tuple(sorted(set(check_batch_sizes(batch_sizes, count))))


def _trial_optimizer(
    verify: bool | MakeOptimizer, optimizer: OptimizerName, momentum: float
) -> MakeOptimizer:
    """Return the function that makes the optimiser of the trials."""
    if verify is not True:
        check_maker("verify", verify)
        return verify  # type: ignore[return-value]
    if optimizer == "kfac":
        raise ValueError(
            "verify must be False or a function that makes the optimiser for kfac, got True"
        )
    if optimizer == "adam":
        return lambda params, rate: Adam(params, lr=rate, betas=(momentum, 0.999))
    nesterov = optimizer == "nesterov"
    return lambda params, rate: SGD(params, lr=rate, momentum=momentum, nesterov=nesterov)


def _sharpness(risk: Risk) -> Estimate:
    try:
        return critical_sharpness(risk)
    except ValueError as error:  # a gradient of zero has no direction
        return unknown((), str(error))
