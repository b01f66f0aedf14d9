r"""`Damping`: rules that set the damping of an optimiser, and the damping of the best shrinkage.

A step along an eigenvector of eigenvalue :math:`\lambda` has the size
:math:`\alpha / (\lambda + \delta)`. Any optimiser whose groups have a ``delta`` can be damped by a
rule of this module.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.params import check_momentum, check_optimizer, parameters, set_setting
from ritz._core.training_config import DampingRule
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import MATRICES, CurvatureMatrix
from ritz.measures import curvature_variance, shrinkage, stable_rate
from ritz.measures._shared import check_groups, preconditioned_curvature
from ritz.optim._curvature_optimizer import TracedMatrix, finite_loss, optimizer_risk
from ritz.optim._group_settings import group_update, learning_rate
from ritz.optim._momentum import decay_parts, momentum_buffers, without_momentum
from ritz.spectra import lanczos, trace

RULES = get_args(DampingRule)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the rules."""

    # Smallest damping that a rule sets: Adam's epsilon. A measured damping is zero if the batch is
    # all of the data, and without damping a step would be infinite along flat directions.
    least: float = 1e-8
    # Martens (2010), section 4.1. The ratio is the actual over the predicted reduction of the loss.
    # delta is multiplied by 3/2 if the ratio is below 1/4, and by 2/3 if it is above 3/4.
    poor: float = 0.25
    good: float = 0.75
    factor: float = 1.5
    # Reductions below this multiple of eps times the loss are ignored. For an MLP and 24 to 1,024
    # samples, roundoff of differences of losses is at most 2.4 eps times the loss.
    resolution: float = 10.0
    # Probes of shrinkage and variance. With 16 probes the damping has an error of about 20 %, and
    # hyper-parameters are searched in factors of two or more.
    num_probes: int = 16
    # Lanczos steps for the outliers, as many as the published optimisers use.
    num_steps: int = 20
    # Largest factor by which delta / alpha falls from one measurement to the next. A network whose
    # loss is nearly zero has almost no curvature, but finds some again within a few steps.
    fall: float = 2.0


TUNING = Tuning()

# What a rule has measured, in the groups of the optimiser: the damping per unit of learning rate,
# the damping that does not depend on the learning rate, and the rule and matrix they belong to.
PER_RATE, OF_MATRIX = "damping_per_rate", "damping_of_matrix"
MEASURED_BY = "damping_measured_by"


def reduction_ratio(loss: float, after: Risk, predicted: float) -> float | None:
    """Return the actual over the predicted reduction of a loss. ``None`` if roundoff exceeds it."""
    if abs(predicted) <= TUNING.resolution * torch.finfo(after.space.dtype).eps * abs(loss):
        return None
    # NaN, if a product has overflowed, counts as an increase of the loss.
    return (loss - finite_loss(after)) / predicted if predicted > 0 else -math.inf


def levenberg_marquardt(delta: float, ratio: float | None) -> float:
    """Return the next damping, given the actual over the predicted reduction of the loss."""
    if ratio is None:
        return delta
    # NaN, from a loss that has overflowed, counts as a poor step.
    if not ratio >= TUNING.poor:
        return delta * TUNING.factor
    return max(delta / TUNING.factor, TUNING.least) if ratio > TUNING.good else delta


@final
class Damping:
    r"""Set the damping ``delta`` of an optimiser by a rule, as a scheduler sets the learning rate.

    =============  =======================================================  ====================
    rule           damping                                                  call
    =============  =======================================================  ====================
    ``constant``   :math:`\delta_0`, the setting of the optimiser           nothing
    ``ratio``      :math:`\delta_0\, \alpha / \alpha_0`: a constant         ``step()`` after the
                   :math:`\delta / \alpha`                                  scheduler
    ``shrinkage``  :math:`m (1 - \beta) / \beta` with the best linear       ``step(risk)``
                   shrinkage :math:`\beta` of a batch matrix, but at
                   least :math:`\delta_e`
    ``noise``      :math:`\frac{\alpha}{2} \max_i \lambda_i                 ``step(risk)``
                   \min(1, P \sigma^2 / (b \lambda_i^2))`, but at least
                   :math:`\delta_e`
    ``adaptive``   multiplied by 3/2 or 2/3, depending on how well the      ``measured(risk)``
                   quadratic model predicts a step (Levenberg-Marquardt),   and ``step(risk)``
                   but at least :math:`\delta_e`
    =============  =======================================================  ====================

    :math:`\delta_e` is the damping of the **edge of stability**, which :func:`ritz.advise` advises.
    A damped step is at most :math:`\alpha / \delta` times as long as the gradient. It is stable if
    :math:`\alpha / \delta` is a stable learning rate of the same method without divisors,
    :func:`ritz.measures.stable_rate`. For momentum :math:`\rho`

    .. math:: \delta_e = \alpha \frac{\lambda_1 + \kappa (\lambda'_1 - \lambda_1)}{2 (1 + \rho)},
        \quad \kappa = \frac{1 + \rho}{1 - \rho},
        \quad \lambda'_1 = \lambda_1 + \frac{V(\phi_1)}{b \lambda_1},

    where :math:`V(\phi_1)` is the variance of the matrices of single samples along the leading
    eigenvector, and :math:`1/b = 1/B - 1/N`. For damped Adam this is multiplied by
    :math:`1 - \beta_1`, as for :func:`ritz.measures.stable_rate`, and is more than enough: its
    :math:`\sqrt v` damps as well.

    ``shrinkage``: Let :math:`m = \operatorname{tr} H/P`. The matrix
    :math:`\beta H_B + (1 - \beta) m I` is the closest one to :math:`H`, and for this damping
    :math:`\alpha / (\lambda + \delta) = \alpha \beta / (\beta \lambda + (1 - \beta) m)`. The
    damping has the units of the matrix. ``noise``: :math:`P \sigma^2` is the variance of the
    matrices of single samples. Both describe the error of the matrix and not the length of the
    steps. For networks with more parameters than samples both are usually far below
    :math:`\delta_e`, and training with them alone diverged on digits: K-FAC needs a median of 15
    times the least damping under noise along the leading eigenvector (study ``damping_kfac``).

    The three measured rules need a sample of the data, for example once per epoch and more often in
    the first one, and cost about 70 products (``adaptive`` 25). From one measurement to the next,
    :math:`\delta_e / \alpha` falls by a factor of 2 at most. Between measurements, ``step()``
    without a risk follows the learning rate. No rule sets a damping below 1e-8.

    ``adaptive`` needs the batch of the step as well, which may be that of every fifth one. It
    compares the losses before and after the step without momentum, and costs a gradient, a product
    and two losses::

        damping.step(sample)  # once per epoch
        with damping.measured(risk):
            optimizer.step()

    A step with the curvature of its own batch reduces the loss of this batch as predicted, whatever
    the damping is. Without ``step(sample)`` nothing bounds the damping from below, and it falls
    until training diverges.

    Adam uses the root of the second moment instead of the curvature. A damping that is measured in
    units of curvature is therefore a heuristic for Adam, and ``adaptive``, which changes the weight
    of a quadratic model that Adam does not use, is refused. The current values are in the groups of
    the optimiser, so they are saved with its state.

    Args:
        optimizer: An optimiser whose groups have ``delta``.
        rule: One of the table.
        batch_size: Batch size :math:`B` of the steps, for ``shrinkage``, ``noise`` and
            ``step(risk)`` of ``adaptive``.
        num_samples: Number of training samples :math:`N`. Defaults to infinity.
        matrix: ``ggn`` (its trace is positive) or ``hessian``.
        seed: Seed of the probes.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, sections 3.2 and
    5.1; Martens (2010), Deep learning via Hessian-free optimization.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: DampingRule,
        *,
        batch_size: int | None = None,
        num_samples: int | None = None,
        matrix: CurvatureMatrix = "ggn",
        seed: int = 0,
    ) -> None:
        check_optimizer(optimizer)
        check_choice("rule", rule, RULES)
        check_choice("matrix", matrix, MATRICES)
        self.optimizer, self.rule, self.matrix = optimizer, rule, matrix
        self.seed = check_count("seed", seed, low=0)
        if rule in ("shrinkage", "noise") and batch_size is None:
            raise ValueError(f"rule={rule!r} needs batch_size, got None")
        if batch_size is not None:
            batch_size = check_count("batch_size", batch_size)
        if num_samples is not None:
            num_samples = check_count("num_samples", num_samples)
        self.batch_size, self.num_samples = batch_size, num_samples
        if rule != "constant" and any("delta" not in group for group in optimizer.param_groups):
            raise ValueError(
                f"damping rule {rule!r} needs an optimiser with a damping delta, such as KFAC, "
                f"LanczosNewton or DampedAdamW, got {type(optimizer).__name__}"
            )
        if rule == "adaptive" and any("betas" in group for group in optimizer.param_groups):
            raise ValueError(
                "damping rule 'adaptive' needs an optimiser that adds delta to the curvature, such "
                f"as KFAC or LanczosNewton, got {type(optimizer).__name__}, which adds it to the "
                "root of the second moment: use 'noise', 'ratio' or 'constant'"
            )
        if rule == "ratio":
            self._initial()
        self._traced = TracedMatrix()

    def __repr__(self) -> str:
        values = ", ".join(f"{value:.3g}" for value in self.values())
        return f"Damping({type(self.optimizer).__name__}, rule={self.rule!r}: delta {values})"

    def values(self) -> list[float]:
        """Return the current damping of all groups. Empty if the optimiser has none."""
        groups = self.optimizer.param_groups
        return [float(group["delta"]) for group in groups if "delta" in group]

    @property
    def is_measured(self) -> bool:
        """Whether the edge of stability has been measured, so that ``step()`` needs no risk."""
        return all(map(self._has_measured, self.optimizer.param_groups))

    def step(self, risk: Risk | None = None) -> None:
        """Set the damping by the rule, for ``adaptive`` only its bound.

        If the batch size changes during training, set the attribute ``batch_size`` first.

        Args:
            risk: For ``shrinkage``, ``noise`` and ``adaptive``, a :class:`~ritz.Risk` on a sample
                of the data, with batch norm not in train mode. Without it, the damping of the last
                measurement is converted to the current learning rate.
        """
        if self.rule == "ratio":
            for group, delta, rate in self._initial():
                self._set(group, delta * float(group["lr"]) / rate)
        elif self.rule != "constant":
            if risk is not None:
                self._measure(risk)
            elif not self.is_measured:
                raise ValueError(f"step() needs a risk for rule={self.rule!r}, got None")
            for group in self.optimizer.param_groups:
                current = float(group["delta"] if self.rule == "adaptive" else group[OF_MATRIX])
                self._set(group, max(current, self._stable(group)))

    @property
    def _measurement(self) -> str:
        return f"{self.rule} of {self.matrix}"

    def _has_measured(self, group: dict[str, Any]) -> bool:
        # The groups may have the values of another rule, also after load_state_dict().
        return bool(group.get(MEASURED_BY) == self._measurement)

    def _per_rate(self, group: dict[str, Any]) -> float:
        return float(group[PER_RATE]) if self._has_measured(group) else 0.0

    def _stable(self, group: dict[str, Any]) -> float:
        # The edge of stability moves with the learning rate, and so does the damping.
        return learning_rate(group) * self._per_rate(group)

    def _measure(self, risk: Risk) -> None:
        r"""Store :math:`\delta / \alpha` of the edge of stability, and the damping by shrinkage."""
        if self.batch_size is None:
            raise ValueError(f"step(risk) needs batch_size for rule={self.rule!r}, got None")
        batch_size = check_count("batch_size", self.batch_size)
        restricted, _ = optimizer_risk(self.optimizer, risk)
        check_groups(restricted, "Damping.step(risk)")
        # 1/b = 1/B - 1/N, which is zero for a batch of all samples.
        inverse = max(0.0, 1 / batch_size - 1 / (self.num_samples or math.inf))
        known: Any = {"matrix": self.matrix, "seed": self.seed}
        curvature = edge_curvature(restricted, inverse, **known)
        noise = shrunk = 0.0
        if self.rule == "noise":
            noise = noise_damping(restricted, inverse, **known)
        elif self.rule == "shrinkage":
            shrunk = shrinkage_damping(restricted, inverse, **known)
        for group in self.optimizer.param_groups:
            stable = max(noise, edge_damping(*curvature, group))
            # After a fall of the curvature the weights may return to where it was.
            group[PER_RATE] = max(stable, self._per_rate(group) / TUNING.fall)
            group[OF_MATRIX], group[MEASURED_BY] = shrunk, self._measurement

    @contextmanager
    def measured(self, risk: Risk) -> Iterator[None]:
        """Take a step inside the block. Afterwards the damping is adapted, with ``adaptive``.

        The reduction of the loss is compared with that of the quadratic model. Other rules do
        nothing.

        Args:
            risk: A :class:`~ritz.Risk` on the batch of the step.
        """
        if self.rule != "adaptive" or getattr(self.optimizer, "adapts_damping", False):
            yield  # HessianFree adapts its damping itself
            return
        start, params = optimizer_risk(self.optimizer, risk)
        gradient = start.gradient()
        buffers = momentum_buffers(self.optimizer)
        yield
        if not all(bool(p.isfinite().all()) for p in parameters(self.optimizer)):
            return  # the run has diverged, which the next loss will show
        # Momentum moves along earlier gradients, which may increase the loss of this batch whatever
        # the damping is.
        update = _own_step(self.optimizer, start, params, gradient, buffers)
        op = self._traced.operator(start, self.matrix)
        # The quadratic model predicts the reduction -(g'u + u'Gu / 2) for the step u.
        predicted = -float(gradient.double() @ update.double() + 0.5 * (update @ (op @ update)))
        ratio = reduction_ratio(start.loss(), start.at(start.theta + update), predicted)
        for group in self.optimizer.param_groups:
            delta = levenberg_marquardt(float(group["delta"]), ratio)
            self._set(group, max(delta, self._stable(group)))

    def _initial(self) -> list[tuple[dict[str, Any], float, float]]:
        r"""Return all groups with :math:`\delta_0` and :math:`\alpha_0`, and store these."""
        initial = []
        for group in self.optimizer.param_groups:
            delta = group.setdefault("initial_delta", float(group["delta"]))
            # Stored by a scheduler. Otherwise the current value is the initial one.
            rate = float(group.setdefault("initial_lr", float(group["lr"])))
            if not rate > 0:
                raise ValueError(f"damping rule 'ratio' needs an initial lr above 0, got {rate}")
            initial.append((group, delta, rate))
        return initial

    def _set(self, group: dict[str, Any], value: float) -> None:
        set_setting(group, "delta", max(value, TUNING.least))


@torch.no_grad()
def _own_step(
    optimizer: Optimizer,
    start: Risk,
    params: dict[str, Tensor],
    gradient: Tensor,
    buffers: dict[Tensor, Tensor],
) -> Tensor:
    """Return the last step without momentum, or with it where it is not known.

    Decoupled weight decay does not follow the gradient, and is left out.
    """
    vectors = {"before": start.theta, "after": start.space.flatten(params), "gradient": gradient}
    before, after, slope = (
        {p: parts[name] for name, p in params.items()}
        for parts in map(start.space.unflatten, vectors.values())
    )
    decay, coupled = decay_parts(optimizer, before)
    update = {p: after[p] - before[p] - decay[p] for p in before}
    full = {p: slope[p] + coupled[p] for p in before}
    own = without_momentum(optimizer, start, update=update, gradient=full, buffers=buffers)
    steps = update if own is None else own
    return start.space.flatten({name: steps[p] for name, p in params.items()})


def shrinkage_damping(
    risk: Risk, inverse: float, *, matrix: CurvatureMatrix = "ggn", seed: int = 0
) -> float:
    r"""Return the damping :math:`m (1 - \beta)/\beta = m\, e^2 / d^2` of a batch matrix.

    .. math:: d^2 = \|H - m I\|_F^2, \quad e^2 = P (P \sigma^2) / b, \quad m = \operatorname{tr} H/P

    Args:
        risk: A sample of the data.
        inverse: :math:`1/b = 1/B - 1/N`.
        matrix: ``ggn`` or ``hessian``.
        seed: Seed of the probes.
    """
    probes: Any = {"num_probes": TUNING.num_probes, "generator": _generator(seed)}
    size = risk.space.size
    op = curvature_operator(risk, matrix)
    mean = float(trace(op, method="hutchinson", **probes).mean) / size
    if math.isnan(mean) or (mean < 0 and matrix == "hessian"):
        hint = "use matrix='ggn'" if mean < 0 else "the training has probably diverged"
        raise ValueError("damping by shrinkage needs a mean eigenvalue that is not negative, got "
                         f"{mean:.3g} of the {matrix}: {hint}")  # fmt: skip
    if mean <= 0:  # outputs are saturated: there is nothing to shrink, apart from roundoff
        return 0.0
    parts = shrinkage(risk, batch_sizes=[1], matrix=matrix, **probes)
    noise = size * float(parts.variance.mean) * inverse
    # A distance below its standard error is replaced by the standard error.
    signal = max(float(parts.signal.mean), float(parts.signal.stderr))
    # beta = d^2 / (d^2 + e^2), so (1 - beta) / beta = e^2 / d^2.
    return mean * noise / signal


def noise_damping(
    risk: Risk, inverse: float, *, matrix: CurvatureMatrix = "ggn", seed: int = 0
) -> float:
    r"""Return :math:`\frac12 \max_i \lambda_i \min(1, P \sigma^2 / (b \lambda_i^2))`.

    Multiplied by the learning rate, it is the least damping with which the noise of a batch matrix
    is stable. It never exceeds :math:`\frac12 \sqrt{P \sigma^2 / b}`. The eigenvalues are Ritz
    values of a short Lanczos run.

    Args:
        risk: A sample of the data.
        inverse: :math:`1/b = 1/B - 1/N`.
        matrix: ``ggn`` or ``hessian``.
        seed: Seed of the probes.

    Reference: Granziol, *Spectral Machine Learning*, equation 5.36, corrected.
    """
    variance = curvature_variance(
        risk, matrix=matrix, num_probes=TUNING.num_probes, generator=_generator(seed)
    )
    op = curvature_operator(risk, matrix)
    steps = min(TUNING.num_steps, op.shape[0])
    values = lanczos(op, num_steps=steps, generator=_generator(seed)).values
    noise = float(variance.mean) * inverse
    positive = [value for value in values.tolist() if value > 0]
    # lambda min(1, P sigma^2 / (b lambda^2)) = min(lambda, P sigma^2 / (b lambda))
    return 0.5 * max((min(value, noise / value) for value in positive), default=0.0)


def edge_curvature(
    risk: Risk, inverse: float, *, matrix: CurvatureMatrix = "ggn", seed: int = 0
) -> tuple[float, float]:
    r"""Return :math:`\lambda'_1 = \lambda_1 + V(\phi_1) / (b \lambda_1)` and :math:`\lambda_1`.

    Args:
        risk: A sample of the data.
        inverse: :math:`1/b = 1/B - 1/N`.
        matrix: ``ggn`` or ``hessian``.
        seed: Seed of the start vector and of the groups of samples.
    """
    # With D = 1, the preconditioned matrix is the matrix itself.
    top, along = preconditioned_curvature(
        risk, torch.ones_like(risk.theta), matrix=matrix, generator=_generator(seed)
    )
    largest, variance = float(top.mean), max(0.0, float(along.mean))
    return (largest + variance * inverse / largest if largest > 0 else largest), largest


def edge_damping(curvature: float, full: float, group: dict[str, Any]) -> float:
    r"""Return the damping per unit of learning rate at the edge of stability.

    A damped step is never longer than :math:`\alpha / \delta` times the gradient, whatever the
    divisors are. It is stable if :math:`\alpha / \delta` is a stable learning rate of the same
    method without divisors.

    Args:
        curvature: Largest eigenvalue :math:`\lambda'_1` of a batch.
        full: Largest eigenvalue :math:`\lambda_1` of the matrix of all data.
        group: Settings of the parameters, such as momentum.
    """
    kind, momentum, dampening = group_update(group)
    check_momentum(momentum)  # a schedule may have changed it
    # Where the curvature is not positive, every rate is stable: 1 / inf = 0.
    return 1 / float(
        stable_rate(curvature, optimizer=kind, momentum=momentum, dampening=dampening, full=full)
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def delta_to_shrinkage(delta: float) -> float:
    r"""Convert a damping to the equivalent shrinkage coefficient :math:`\beta = 1 / (1 + \delta)`.

    .. math::
        \frac{\alpha}{\lambda + \delta} = \frac{\alpha\beta}{\beta\lambda + (1 - \beta)}

    for each eigenvalue :math:`\lambda` of the curvature :math:`H`. A damped step with :math:`H` and
    learning rate :math:`\alpha` equals an undamped step with :math:`\beta H + (1 - \beta) I` and
    learning rate :math:`\alpha\beta`.

    Args:
        delta: Damping, at least 0.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, section 3.2.

    >>> delta_to_shrinkage(3.0)
    0.25
    """
    check_range("delta", delta, low=0)
    # alpha / (lambda + delta) = alpha beta / (beta lambda + 1 - beta) for every lambda
    return 1 / (1 + delta)


def shrinkage_to_delta(beta: float) -> float:
    r"""Convert a shrinkage coefficient to the equivalent damping :math:`\delta = (1-\beta)/\beta`.

    The inverse of :func:`delta_to_shrinkage`.

    Args:
        beta: Weight of the curvature, above 0 and at most 1.

    >>> shrinkage_to_delta(0.25)
    3.0
    """
    check_range("beta", beta, low=0, high=1)
    if beta == 0:
        raise ValueError("beta must be above 0, got 0, whose damping is infinite")
    # beta = 1 / (1 + delta)
    return (1 - beta) / beta
