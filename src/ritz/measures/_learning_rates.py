"""``stable_rate``: edge of stability and scaling rules; ``trainable_rate`` by short trainings."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ritz._core.batches import take_rows
from ritz._core.checks import check_choice, check_count, check_range, is_below, short
from ritz._core.density import as_points, broadcast
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status
from ritz.curvature import Risk
from ritz.curvature._shared import check_risk
from ritz.measures._groups import share_of_variance

OptimizerName = Literal["sgd", "momentum", "nesterov", "adam", "kfac"]
OPTIMIZERS = get_args(OptimizerName)
# Optimisers that divide by an estimate of the curvature, and so need damping.
ADAPTIVE = ("adam", "kfac")
MakeOptimizer = Callable[[Any, float], Optimizer]


def stable_rate(
    curvature: float | Tensor,
    *,
    optimizer: OptimizerName = "sgd",
    momentum: float = 0.0,
    dampening: float = 0.0,
    full: float | Tensor | None = None,
) -> Tensor:
    r"""Return the edge of stability: the largest stable learning rate on a quadratic.

    The update is :math:`z \leftarrow \rho z + (1 - \tau) g`, on the quadratic
    :math:`\lambda w^2 / 2`:

    ============  =============================================
    ``sgd``       :math:`2 / \lambda`
    ``momentum``  :math:`2 (1 + \rho) / ((1 - \tau) \lambda)`
    ``nesterov``  :math:`2 (1 + \rho) / ((1 + 2 \rho) \lambda)`
    ``adam``      as ``momentum`` with :math:`\tau = \rho = \beta_1`
    ``kfac``      as ``momentum``
    ============  =============================================

    If ``full`` is passed, each step has the curvature of another batch. This curvature has the mean
    :math:`\lambda` and the variance :math:`v`, and :math:`\lambda' = \lambda + v / \lambda`. For
    ``sgd`` the mean square of the weights stays finite below :math:`2 / \lambda'`. Momentum
    accumulates the noise of many batches, so its edge is lower:

    .. math:: \alpha < \frac{2 (1 + \rho)}{(1 - \tau) (\lambda + \kappa (\lambda' - \lambda))},
        \quad \kappa = \frac{1 + \rho}{1 - \rho}

    For ``nesterov``, :math:`u = \alpha \lambda` is the positive root of
    :math:`\rho (1 + 2 \rho) (1 + n) u^2 + (1 - \rho - 4 \rho^2 + n (1 + \rho)) u = 2 (1 - \rho^2)`
    with :math:`n = \lambda' / \lambda - 1`.

    For ``adam`` and ``kfac``, :math:`\lambda` is the largest eigenvalue of the preconditioned
    matrix :math:`D^{-1/2} H D^{-1/2}`. The edge is local. Networks often train at a few times the
    edge, because the weights move to flatter regions.

    Args:
        curvature: Curvature :math:`\lambda` of any shape, or :math:`\lambda'` if ``full`` is
            passed. Where the curvature is not positive, no learning rate is unstable, and the
            result is infinite.
        optimizer: One of the table.
        momentum: Momentum :math:`\rho`, from 0 to 1; for ``adam`` it is :math:`\beta_1`.
        dampening: Dampening :math:`\tau` of heavy-ball momentum, as in ``torch.optim.SGD``.
        full: Curvature :math:`\lambda` of all data, if ``curvature`` is that of batches.

    Reference: *Spectral Machine Learning*, section 5.7; Polyak (1964).

    >>> stable_rate(4.0), stable_rate(4.0, optimizer="momentum", momentum=0.5)
    (tensor(0.5000, dtype=torch.float64), tensor(0.7500, dtype=torch.float64))
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_range("momentum", momentum, low=0.0, high=1.0)
    check_range("dampening", dampening, low=0.0, high=1.0)
    if dampening and optimizer not in ("momentum", "kfac"):
        raise ValueError(f"dampening must be 0 for {optimizer}, got {dampening}")
    if optimizer == "sgd" and momentum:
        raise ValueError(f"momentum must be 0 for sgd, got {momentum}: use optimizer='momentum'")
    curvature = as_points(curvature, "curvature")
    if full is not None:
        curvature, full = broadcast(curvature=curvature, full=as_points(full, "full"))
    positive = curvature > 0
    safe = torch.where(positive, curvature, torch.ones_like(curvature))
    mean = safe if full is None else full
    # If the mean curvature is not positive, assume that all batches have the curvature of this one.
    noise = torch.where(mean <= 0, 0.0, (safe / mean - 1).clamp(min=0.0))
    rate = _unit_rate(noise, optimizer, momentum, dampening) * (1 + noise) / safe
    # An unknown curvature (NaN) gives an unknown edge, not an infinite one.
    return torch.where(positive | curvature.isnan(), rate + 0 * curvature, torch.inf)


def _unit_rate(
    noise: Tensor, optimizer: OptimizerName, momentum: float, dampening: float
) -> Tensor:
    """Return the edge for a mean curvature of 1 and the variance ``noise`` between batches.

    A batch has the curvature 1 + xi. The steps are then an autoregression of order two, driven by
    alpha xi y, where y is the point at which the gradient is taken. At the edge, the stationary
    variance of y equals the variance of the term that drives it.
    """
    rho = momentum
    if optimizer == "nesterov" and rho:
        # a u^2 + b u = c, in a form that does not cancel
        a = rho * (1 + 2 * rho) * (1 + noise)
        b, c = 1 - rho - 4 * rho**2 + noise * (1 + rho), 2 * (1 - rho**2)
        root = (b.square() + 4 * a * c).sqrt()
        return torch.where(b > 0, 2 * c / (root + b.abs()), (root + b.abs()) / (2 * a))
    if optimizer == "adam":  # its running mean gives each gradient the weight 1 - beta_1
        dampening = rho
    # 2 (1 + rho) / (1 + kappa n). For rho = 1, any noise makes the edge 0.
    rate = 2 * (1 - rho**2) / ((1 - rho) + (1 + rho) * noise)
    rate = torch.where(noise == 0, 2 * (1 + rho), rate)
    return rate / (1 - dampening) if dampening < 1 else torch.full_like(rate, torch.inf)


def noise_weight(optimizer: OptimizerName, momentum: float) -> float:
    r"""Return by how much more the noise of batches lowers the edge than for plain SGD.

    For a mean curvature of 1, a variance of ``1 / weight`` between batches halves the edge. This is
    exact for heavy-ball momentum. For Nesterov momentum it is where the limits of weak and of
    strong noise cross.
    """
    if momentum == 1:
        return math.inf
    weight = (1 + momentum) / (1 - momentum)
    return weight / (1 + 2 * momentum) if optimizer == "nesterov" else weight


# ------------------------------------------------------------------------------------------
# How the edge scales with the batch size: alpha ~ B^e. These functions take and return float64
# tensors, so that errors can be propagated through them.


def additive_exponent(
    curvature: Tensor,
    variance: Tensor,
    *,
    batch_sizes: Tensor,
    num_samples: int,
    homogeneous: bool = False,
) -> Tensor:
    r"""Return the local exponent :math:`e(B)` of the edge under additive noise, ``(S,)``.

    .. math:: e = \frac{x}{1 + x} \frac{N}{N - B}, \quad x = \frac{v}{b \lambda^2}

    Noise :math:`v = V(\phi)` along the eigenvector of the outlier shifts the outlier at every batch
    size. The edge is then linear in the batch size for small batches and constant for large ones.
    Homogeneous noise :math:`v = P \sigma^2` is different: for :math:`x > 1` its semicircle covers
    the outlier, and the edge scales with the square root of :math:`b`.

    Args:
        curvature: The outlier :math:`\lambda`.
        variance: The variance :math:`v` of the matrices of single samples.
        batch_sizes: Batch sizes ``(S,)``.
        num_samples: :math:`N`.
        homogeneous: Whether the noise has the same variance in all directions.
    """
    ratio, sizes = variance / curvature.square(), batch_sizes.double()
    x = ratio * share_of_variance(sizes, num_samples)
    # y = x N/(N - B), where N/(N - B) = d log b / d log B. Written so that B = N gives its limit.
    y = ratio / sizes * (num_samples / max(1, num_samples - 1))
    exponent = y / (1 + x)
    if not homogeneous:
        return exponent
    return torch.where(x > 1, 0.5 * y / x.clamp(min=1.0), exponent)


def additive_change(curvature: Tensor, variance: Tensor, *, num_samples: int) -> Tensor:
    r"""Return the batch size :math:`B` at which :math:`x = 1`: noise equals curvature."""
    b = variance / curvature.square()
    # 1/b = (1/B - 1/N) N/(N - 1) solved for B
    return num_samples * b / (num_samples - 1 + b)


def multiplicative_exponent(
    spike: Tensor, bulk: Tensor, *, batch_sizes: Tensor, num_parameters: int
) -> Tensor:
    r"""Return the local exponent of the edge in the multiplicative model, ``(S,)``.

    .. math:: e = \frac{q/\theta}{1 + q/\theta} \text{ if } \theta > \sqrt q, \quad
        e = \frac{\sqrt q}{1 + \sqrt q} \text{ otherwise}, \quad
        q = \frac{P}{B}, \; \theta = \frac{\lambda}{s} - 1

    Args:
        spike: The outlier :math:`\lambda`.
        bulk: The eigenvalue :math:`s` of the bulk.
        batch_sizes: Batch sizes ``(S,)``.
        num_parameters: :math:`P`.
    """
    q, theta = num_parameters / batch_sizes.double(), spike / bulk - 1
    ratio = torch.where(theta > q.sqrt(), q / theta, q.sqrt())
    return ratio / (1 + ratio)


def multiplicative_change(spike: Tensor, bulk: Tensor, *, num_parameters: int) -> Tensor:
    r"""Return :math:`P / \theta`, the batch size up to which the edge grows linearly."""
    return num_parameters / (spike / bulk - 1)


# ------------------------------------------------------------------------------------------
# Largest learning rates found by short trainings.


# Maximum number of doublings or halvings. Trials found limits of 0.05 to 43 times the edge.
MAX_DOUBLINGS = 12


def trainable_rate(
    risk: Risk,
    make: MakeOptimizer,
    *,
    batch_size: int,
    start: float,
    num_steps: int = 60,
    num_trials: int = 5,
    rtol: float = 0.1,
    limit: float = 2.0,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return the largest learning rate at which a short training does not diverge, by bisection.

    Each training starts from the weights of the risk and draws batches without replacement. It
    fails if the loss becomes NaN, or if the mean loss of the last half of the steps is above
    ``limit`` times the initial loss: that of all data, or, if batch norm or dropout change the loss
    in training mode, that of the same batches in this mode. A trial starts with one learning rate
    and doubles or halves it until one training passes and another fails; then it bisects. Further
    trials repeat this with other batches, starting from the previous limit. The model of the risk
    is not changed: a copy is trained, in training mode, with batch statistics and dropout if the
    model has them.

    For three small networks on MNIST, this limit was 0.5 to 4.2 times the edge of local stability
    at trained weights, because the weights move to flatter regions.

    Cost: 4 to 8 trainings of ``num_steps`` batches for the first trial, 2 to 5 for each further
    trial.

    Args:
        risk: The loss at a point. The data must be in memory.
        make: Function of parameters and a learning rate that returns an optimiser. If its first
            parameter is called ``model``, it gets the model instead of the parameters.
        batch_size: Batch size.
        start: First learning rate, such as the edge of local stability.
        num_steps: Number of steps of one training.
        num_trials: Number of trials, each with other batches.
        rtol: Relative half width of the interval in which each trial encloses its limit.
        limit: A training fails if its loss exceeds this multiple of the initial loss.
        generator: Source of the batches. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    check_risk(risk)
    check_maker("make", make)
    batch_size = check_count("batch_size", batch_size, high=sum(risk.batch_rows))
    num_steps = check_count("num_steps", num_steps, low=2)
    num_trials = check_count("num_trials", num_trials, low=2)
    check_range("start", start, low=torch.finfo(torch.float32).tiny, high=1e30)
    check_range("rtol", rtol, low=1e-3, high=0.5)
    generator = resolve_generator(generator)
    check_range("limit", limit, low=1.0)
    training = _Training(risk, make, batch_size, num_steps, limit)
    limits, halves, factor = [], [], 2.0
    with tracking(progress, f"trials of batches of {batch_size}", num_trials) as bar:
        for trial in range(num_trials):
            seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
            largest, half = _bisect(partial(training.stays, seed=seed), start, factor, rtol)
            limits.append(largest)
            halves.append(half)
            if math.isfinite(half):  # other batches have a similar limit
                start, factor = largest, 1 + 2 * rtol
            bar.update(trial + 1)
    estimate = Estimate.of(
        torch.tensor(limits, dtype=torch.float64),
        method=f"{num_steps} steps, bisection",
        num_products=0,
        truncation=max(halves),
        status=Status(outcome="completed", message=f"{num_trials} trials"),
        seed=generator.initial_seed(),
    )
    # The error is infinite if all learning rates of a trial passed, or all failed.
    return estimate.with_status(None, "start from another learning rate")


def check_maker(name: str, make: object) -> None:
    """Raise unless the argument can be called with parameters and a learning rate."""
    if not callable(make):
        raise TypeError(
            f"{name} must be a function of parameters and a learning rate, got {short(make)}"
        )
    try:
        signature(make).bind(None, 0.1)
    except TypeError as error:
        raise TypeError(
            f"{name} must take two arguments, parameters and a learning rate, got a function of "
            f"{signature(make)}"
        ) from error


def _bisect(
    stays: Callable[[float], bool], start: float, factor: float, rtol: float
) -> tuple[float, float]:
    """Return the largest learning rate that passes, and half the width of its interval.

    Bisection is geometric, because learning rates are compared by their ratios.
    """
    # 0: no learning rate has passed yet. Infinity: none has failed yet.
    low, high, rate = 0.0, math.inf, start
    for _ in range(MAX_DOUBLINGS):
        if stays(rate):
            low, rate = rate, rate * factor
        else:
            high, rate = rate, rate / factor
        if low and math.isfinite(high):
            break
        # Increase the factor up to 2, so that a limit far from the start is found as well.
        factor = min(2.0, factor**2)
    if not low or math.isinf(high):  # all learning rates passed, or all failed
        return low or high, math.inf
    # (high - low) / 2 <= rtol low
    while not is_below(high / low, 1 + 2 * rtol):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stays(middle) else (low, middle)
    return math.sqrt(low * high), 0.5 * (high - low)


@final
class _Training:
    """Short trainings of a copy of the model of a risk."""

    def __init__(
        self, risk: Risk, make: MakeOptimizer, batch_size: int, num_steps: int, limit: float
    ) -> None:
        self._risk, self._make, self._limit = risk, make, limit
        self._batch_size, self._num_steps = batch_size, num_steps
        self._batch, self._count = risk.join_batches()
        # The adapter holds the model and its loss, and passes batches to both.
        self._adapter = copy.deepcopy(risk.adapter).to(risk.theta.dtype).train()
        self._state = copy.deepcopy(self._adapter.model.state_dict())
        self._mode_matters = self._compare_modes()
        self._initial: dict[int, float] = {}  # by the seed of the batches

    def stays(self, rate: float, seed: int) -> bool:
        """Return whether the loss stays below its limit with this learning rate."""
        if seed not in self._initial:
            first = self._late_loss(None, seed) if self._mode_matters else self._risk.loss()
            self._initial[seed] = abs(first)
        return is_below(self._late_loss(rate, seed), self._limit * self._initial[seed])

    def _compare_modes(self) -> bool:
        """Return whether training mode changes the loss, as batch norm and dropout do."""
        rows = torch.arange(self._batch_size, device=self._risk.theta.device)
        batch = take_rows(self._batch, rows, self._count)
        with torch.no_grad(), torch.random.fork_rng():
            training, evaluation = (
                float(self._adapter.train(mode).loss(*self._adapter(batch)))
                for mode in (True, False)
            )
        self._adapter.train()
        return training != evaluation

    def _late_loss(self, rate: float | None, seed: int) -> float:
        """Return the mean loss of the last half of the steps; without a rate, of no steps."""
        model, risk = self._adapter.model, self._risk
        # This also resets the buffers, such as running statistics of an earlier training.
        model.load_state_dict(self._state)
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in risk.params.items():
                weights[name].copy_(value)
        chosen = [weights[name] for name in risk.params]
        optimizer = None if rate is None else self._optimizer(chosen, rate)
        rng = torch.Generator().manual_seed(seed)
        losses: list[float] = []
        # Dropout draws from the global generator.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for rows in self._orders(rng):
                batch = take_rows(self._batch, rows.to(risk.theta.device), self._count)
                loss = self._adapter.loss(*self._adapter(batch))
                # The loss of the adapter does not include the L2 term.
                if risk.l2:
                    loss = loss + 0.5 * risk.l2 * sum(p.square().sum() for p in chosen)
                losses.append(float(loss.detach()))
                if not math.isfinite(losses[-1]):
                    return math.nan
                if optimizer is not None:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        # Only the last half counts: the loss may rise at first and fall again.
        half = losses[len(losses) // 2 :]
        return sum(half) / len(half)

    def _optimizer(self, chosen: list[nn.Parameter], rate: float) -> Optimizer:
        takes_model = next(iter(signature(self._make).parameters), "") == "model"
        optimizer = self._make(self._adapter.model if takes_model else chosen, rate)
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"make must return a torch optimiser, got {kind}")
        return optimizer

    def _orders(self, rng: torch.Generator) -> Iterator[Tensor]:
        done = 0
        while True:
            for rows in torch.randperm(self._count, generator=rng).split(self._batch_size):
                if len(rows) < self._batch_size:  # a smaller batch would have more noise
                    break
                yield rows
                done += 1
                if done == self._num_steps:
                    return
