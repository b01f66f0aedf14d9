"""Largest stable steps found by trial: from losses along an update, and by short trainings."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.batches import take_rows
from ritz._core.checks import check_count, check_range, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status
from ritz.curvature import Risk
from ritz.curvature._shared import check_risk
from ritz.measures._landscape import check_direction

MakeOptimizer = Callable[[Any, float], Optimizer]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of the work of :func:`critical_sharpness` and :func:`trainable_rate`."""

    # First step, relative to the length of the weights. Most networks of the study `learning_rates`
    # needed one to six doublings or halvings of this step.
    first: float = 1e-2
    # Maximum of doublings or halvings: 2^40 is beyond the range of steps that float32 resolves.
    max_doublings: int = 40
    # Differences of losses below so many units of roundoff have no sign.
    roundoff: float = 4.0
    # Maximum of doublings of the learning rate: trials stood at 0.05 to 43 times the edge.
    max_rises: int = 12


TUNING = Tuning()


def critical_sharpness(
    risk: Risk,
    direction: Tensor | None = None,
    *,
    rtol: float = 0.05,
) -> Estimate:
    r"""Return the critical sharpness along an update, from losses alone.

    .. math:: \lambda_c = \frac{2}{\eta_c}, \quad
        \eta_c = \min \{\eta > 0 : L(\theta - \eta u) > L(\theta)\}

    A step along :math:`u` with a learning rate above :math:`\eta_c` raises the loss. On a quadratic
    with :math:`u = g` it is the curvature along the gradient, :math:`g^\top H g / \|g\|^2`. The
    step is doubled or halved until the loss changes sides, and then bisected. A hump of the loss
    that is narrower than a factor of two may be missed.

    Cost: about ten forward passes over the data. No gradients, if ``direction`` is given.

    Args:
        risk: The loss at a point.
        direction: The update :math:`u`, ``(P,)``, which is subtracted: the step of an optimiser
            divided by its learning rate. Defaults to the gradient.
        rtol: The half width of the interval of :math:`\lambda_c`, relative to it.

    Returns:
        An :class:`Estimate`. Its truncation is half the last interval. The status is ``max_steps``
        if the loss does not show its sign before that is within ``rtol``. If the loss does not fall
        along :math:`-u`, or falls forever, the mean is NaN or 0 and the status ``uncertain``.

    Reference: *A scalable measure of loss landscape curvature for analyzing the training dynamics
    of LLMs* (2025).
    """
    check_risk(risk)
    check_range("rtol", rtol, low=1e-6, high=0.5)
    update = risk.gradient() if direction is None else direction
    check_direction("direction", update, risk)
    start, passes = risk.loss(), 1
    unit = TUNING.roundoff * torch.finfo(risk.theta.dtype).eps * abs(start)

    def rises(rate: float) -> float:
        """Return the rise of the loss; zero if it is not larger than roundoff."""
        nonlocal passes
        passes += 1
        try:
            gap = risk.at(risk.theta - rate * update).loss() - start
        except ValueError:  # a loss that is not finite
            return math.inf
        return 0.0 if is_below(abs(gap), unit) else gap

    # On a quadratic L(w - eta u) - L(w) = -eta u'g + eta^2 u'Hu / 2 rises from 2 u'g / u'Hu on.
    length = float(update.double().norm())
    rate = TUNING.first * max(1.0, float(risk.theta.double().norm())) / length
    low, high = _bracket(rises, rate)
    if not (low and math.isfinite(high)):
        return _no_sharpness(low, high, passes)
    while not is_below(high - low, 2 * rtol * low):
        middle = 0.5 * (low + high)
        gap = rises(middle)
        if gap == 0:  # the loss is level to its roundoff
            break
        low, high = (low, middle) if gap > 0 else (middle, high)
    # 2 / eta lies between 2 / high and 2 / low: the middle of the two, and half their distance.
    value, half = 1 / low + 1 / high, 1 / low - 1 / high
    found = is_below(half, rtol * value)
    status = Status(
        outcome="converged" if found else "max_steps",
        message=f"the loss rises from a rate of {high:.3g} on"
        if found
        else f"the loss is level to its roundoff between rates of {low:.3g} and {high:.3g}",
        advice="" if found else "use precision='float64', or a larger rtol",
    )
    return Estimate.exact(value, truncation=half, method=f"{passes} forward passes", status=status)


def _bracket(rises: Callable[[float], float], rate: float) -> tuple[float, float]:
    """Return learning rates that lower and that raise the loss, 0 and infinity if none does.

    A loss that is level to its roundoff counts as neither, and the rate is doubled.
    """
    low, high = 0.0, math.inf
    for _ in range(TUNING.max_doublings):
        gap = rises(rate)
        if gap > 0:
            high, rate = rate, rate / 2
        else:
            low, rate = (rate if gap < 0 else low), rate * 2
        if low and math.isfinite(high):
            break
    return low, high


def _no_sharpness(low: float, high: float, passes: int) -> Estimate:
    falls = low > 0
    message = f"the loss falls up to a rate of {low:.2g}" if falls else "the loss does not fall"
    status = Status(
        outcome="uncertain",
        message=message,
        advice="there is no critical step"
        if falls
        else "direction must point uphill, beyond roundoff: use precision='float64' near a minimum",
    )
    return Estimate.exact(
        0.0 if falls else math.nan,
        truncation=math.inf,
        method=f"{passes} forward passes",
        status=status,
    )


# ------------------------------------------------------------------------------------------
# Short trials of training.


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

    A copy of the model is trained from the weights of the risk with batches drawn without
    replacement. A trial fails if the loss becomes NaN, or if its mean over the last half of the
    steps is above ``limit`` times the loss of all data at the start. From ``start``, the learning
    rate is doubled or halved until one training passes and another fails, and then bisected. Every
    trial repeats this with other batches, from the limit of the trial before. The model of the risk
    is not changed; its copy trains in training mode, with batch statistics and dropout if it has
    them.

    From trained weights this is 0.8 to 3.6 times the edge of local stability, in trials of three
    small networks on MNIST: the weights move to flatter places.

    Cost: 4 to 8 trainings of ``num_steps`` batches for the first trial, 2 to 5 for each other.

    Args:
        risk: The loss at a point; the data must be in memory.
        make: Takes parameters and a learning rate, returns an optimiser. If its first parameter is
            called ``model``, it gets the model instead of the parameters.
        batch_size: Batch size.
        start: First learning rate, such as the edge of local stability.
        num_steps: Steps of one training.
        num_trials: Number of repetitions with other batches.
        rtol: Half width of the interval of each trial, relative to it.
        limit: Multiple of the first loss above which a trial fails.
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
            if math.isfinite(half):  # other batches have a limit nearby
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
    # Every trial passed or failed, so the limit lies outside of what was tried.
    return estimate.with_status(None, "start from another learning rate")


def check_maker(name: str, make: object) -> None:
    """Raise unless the argument is a function of two arguments."""
    if not callable(make):
        raise TypeError(
            f"{name} must be a function of parameters and a learning rate, got {make!r}"
        )
    try:
        signature(make).bind(None, 0.1)
    except TypeError as error:
        raise TypeError(
            f"{name} must take parameters and a learning rate, but its arguments are "
            f"{signature(make)}"
        ) from error


def _bisect(
    stays: Callable[[float], bool], start: float, factor: float, rtol: float
) -> tuple[float, float]:
    """Return the largest learning rate that passes, with half the width of its interval.

    Bisection is geometric, because learning rates are compared by their ratios.
    """
    # 0 and infinity stand for learning rates that are not known yet.
    low, high, rate = 0.0, math.inf, start
    for _ in range(TUNING.max_rises):
        if stays(rate):
            low, rate = rate, rate * factor
        else:
            high, rate = rate, rate / factor
        if low and math.isfinite(high):
            break
        # Longer and longer steps, up to doubling: a limit that has moved far is found all the same.
        factor = min(2.0, factor**2)
    if not low or math.isinf(high):  # all passed, or all failed: the limit is not known
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
        self._risk, self._make, self._limit = risk, make, limit * abs(risk.loss())
        self._batch_size, self._num_steps = batch_size, num_steps
        self._batch, self._count = risk.join_batches()
        # The adapter holds the model, and knows how it is called and what its loss is.
        self._adapter = copy.deepcopy(risk.adapter).to(risk.theta.dtype).train()
        self._state = copy.deepcopy(self._adapter.model.state_dict())

    def stays(self, rate: float, seed: int) -> bool:
        """Return whether the loss stays below its limit with this learning rate."""
        model, risk = self._adapter.model, self._risk
        # With the buffers: running statistics of an earlier trial must not stay.
        model.load_state_dict(self._state)
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in risk.params.items():
                weights[name].copy_(value)
        chosen = [weights[name] for name in risk.params]
        takes_model = next(iter(signature(self._make).parameters), "") == "model"
        optimizer = self._make(model if takes_model else chosen, rate)
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"the function that makes the optimiser must return one, got {kind}")
        rng = torch.Generator().manual_seed(seed)
        losses: list[float] = []
        # Dropout draws from the global generator.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for rows in self._orders(rng):
                optimizer.zero_grad()
                batch = take_rows(self._batch, rows.to(risk.theta.device), self._count)
                loss = self._adapter.loss(*self._adapter(batch))
                # The adapter has the loss of a batch alone.
                if risk.l2:
                    loss = loss + 0.5 * risk.l2 * sum(p.square().sum() for p in chosen)
                losses.append(float(loss.detach()))
                if not math.isfinite(losses[-1]):
                    return False
                loss.backward()
                optimizer.step()
        # Only the later steps: the loss may rise at first and fall again.
        half = losses[len(losses) // 2 :]
        return is_below(sum(half) / len(half), self._limit)

    def _orders(self, rng: torch.Generator) -> Iterator[Tensor]:
        done = 0
        while True:
            for rows in torch.randperm(self._count, generator=rng).split(self._batch_size):
                if len(rows) < self._batch_size:  # only whole batches have the same noise
                    break
                yield rows
                done += 1
                if done == self._num_steps:
                    return
