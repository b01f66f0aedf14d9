"""Curvature that optimisers and damping rules need before a step: when, on which samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ritz._core.batch_norm import batch_norms, evaluating
from ritz._core.batches import num_rows, tensors
from ritz._core.distributed import unwrapped, world_size
from ritz._core.params import parameters
from ritz._core.training_config import TrainingConfig
from ritz.curvature import Risk
from ritz.curvature._shared import Adapter, Forward
from ritz.optim import CurvatureOptimizer, Damping
from ritz.training._data import Feed, num_samples, own_rows, sample
from ritz.training._optimizers import nested

# Number of samples on which the rules `shrinkage` and `noise` measure, as for a monitor.
MEASURED = 1024
# Steps between adaptations of the damping: T1 = 5 of Martens and Grosse (2015), section 6.5.
ADAPTED = 5
# Steps between measurements of its bound, if the data have no length.
UNKNOWN_LENGTH = 500
# Rules with a measurement on a sample of the data.
MEASURED_RULES = ("shrinkage", "noise", "adaptive")


class DivergedError(ValueError):
    """The loss of finite data is not finite, so there is no curvature to measure."""


@final
class StepCurvature:
    """Measures curvature before the steps of a run that need it.

    The loss is that of the step: batch norm in train mode, and the rows of all processes. Dropout
    is off. Draws depend on the seed and the number of the step only, so that runs can be resumed.

    Args:
        model: The model without wrappers.
        feed: Training data.
        config: Options.
        loss_fn: Mean loss of outputs and target.
        forward: Calls the model on a batch.
        optimizer: The optimiser of the run.
        length: Steps per epoch, or ``None`` if unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        config: TrainingConfig,
        optimizer: Optimizer,
        *,
        loss_fn: Callable[..., Any] | None = cross_entropy,
        forward: Forward | None = None,
        length: int | None = None,
    ) -> None:
        self._model, self._feed, self._config = unwrapped(model), feed, config
        self._loss_fn, self._forward = loss_fn, forward
        self._optimizer = optimizer
        chain = nested(optimizer)
        self._curved = [each for each in chain if isinstance(each, CurvatureOptimizer)]
        # An option that would have no effect is refused.
        if config.curvature_batch_size is not None and not self._curved:
            kind = type(optimizer).__name__
            raise ValueError(
                "curvature_batch_size must be given with an optimiser that needs curvature, such "
                f"as lanczos_newton or hessian_free, got {config.curvature_batch_size} for {kind}"
            )
        # Lookahead only wraps: the innermost optimiser has the damping.
        self.damping = Damping(
            chain[-1],
            config.damping,
            batch_size=config.batch_size or 1,  # before each measurement that of the steps
            num_samples=num_samples(feed.source),
            matrix="hessian" if loss_fn is None else "ggn",
            seed=config.seed,
        )
        # HessianFree adapts its damping itself.
        adaptive = config.damping == "adaptive"
        self._adapts_itself = adaptive and getattr(chain[-1], "adapts_damping", False)
        # The bound of the adaptive damping is measured as often as the other rules measure.
        self._interval = length or UNKNOWN_LENGTH if adaptive else config.damping_interval or length
        self._risks: dict[str, Risk] = {}

    @property
    def finite(self) -> bool:
        """Whether all weights are finite. Otherwise the run has diverged."""
        # A sum with NaN or Inf is not finite, and in float64 a sum of finite weights is.
        # So the device is read once for all of them.
        sums = [p.detach().double().sum() for p in parameters(self._optimizer)]
        return not sums or bool(torch.isfinite(torch.stack(sums)).all())

    def is_due(self, step: int) -> bool:
        """Return whether anything is measured before a step; ``step`` were taken so far."""
        curved = any(one.curvature_due(step) for one in self._curved)
        return curved or self._is_measured(step) or self._is_adapted(step)

    @contextmanager
    def around(self, batches: Sequence[Any], step: int, *, epoch: int) -> Iterator[None]:
        """Measure what is due, then take the step inside the block, and adapt the damping.

        Args:
            batches: The batches of the step.
            step: Number of steps taken so far.
            epoch: Number of the epoch, counted from one, which may have its own batch size.
        """
        rule, adapted = self._config.damping, self._is_adapted(step)
        measured = self._is_measured(step)
        # delta follows the schedule of the learning rate in every step.
        follows = rule in MEASURED_RULES and not measured and not self._adapts_itself
        if rule == "ratio" or follows:
            self.damping.step()
        if not self.is_due(step):
            yield
            return
        try:
            if measured:
                self.damping.batch_size = self._samples_per_step(batches, epoch)
                self.damping.step(self._sample())
            self._update(batches, step)
            risk = self._risk("step", self._rows(batches)) if adapted else None
        except ValueError as error:
            if self._has_diverged(batches):
                raise DivergedError("the loss is not finite") from error
            raise
        # The adaptive rule compares the losses before and after the step.
        with nullcontext() if risk is None else self.damping.measured(risk):
            yield

    def _samples_per_step(self, batches: Sequence[Any], epoch: int) -> int:
        # Not the size of this batch: the last one of an epoch may be smaller, and the damping is
        # kept for many steps.
        size = self._feed.batch_size_in(epoch) or max(num_rows(batch) for batch in batches)
        return size * self._config.accumulate

    def _update(self, batches: Sequence[Any], step: int) -> None:
        if due := [one for one in self._curved if one.curvature_due(step)]:
            risk = self._curvature_risk(batches, step)
            for one in due:
                one.update_curvature(risk)

    @torch.no_grad()
    def _has_diverged(self, batches: Sequence[Any]) -> bool:
        """Return whether the weights, and not the data, make a loss that is not finite."""
        adapter = Adapter(self._model, self._loss_fn, self._forward)
        # NaN in the data is an error of the data, and must be reported as one.
        good = all(bool(torch.isfinite(tensor).all()) for tensor in tensors(batches))
        if not self.finite:
            return True
        try:
            with evaluating(self._model, batch_statistics=True):
                losses = [adapter.loss(*adapter(batch)) for batch in batches]
        except (ValueError, RuntimeError):
            return False  # the batch cannot be evaluated at all
        return good and not all(bool(torch.isfinite(loss)) for loss in losses)

    def _is_adapted(self, step: int) -> bool:
        every = self._config.damping_interval or ADAPTED
        return self._config.damping == "adaptive" and step % every == 0

    def _is_measured(self, step: int) -> bool:
        if self._config.damping not in MEASURED_RULES or self._adapts_itself:
            return False
        if self._interval is None:
            raise ValueError("damping_interval is required: the data have no length")
        # The curvature of initial weights changes most in the first steps, so that it is measured
        # after 0, 1, 2, 4, 8 and so on steps of the first interval.
        early = step < self._interval and step & (step - 1) == 0
        return early or step % self._interval == 0 or not self.damping.is_measured

    def _curvature_risk(self, batches: Sequence[Any], step: int) -> Risk:
        size, config = self._config.curvature_batch_size, self._config
        if size is None:
            return self._risk("step", self._rows(batches))
        # Another draw for each refresh, by the number of the step. The factor is larger than the
        # number of steps of most runs, so neighbouring seeds do not draw the same batches.
        seed = (config.seed * 1_000_003 + step) % 2**62
        data, options = sample(
            self._feed.source, size, batch_size=config.batch_size or size, seed=seed
        )
        whole = isinstance(data, tuple)
        drawn = Feed(
            data,
            batch_size=options.pop("batch_size") if whole else None,
            device=self._feed.device,
            shuffled=False,
        ).epoch(0, 0)
        return self._risk("drawn", self._rows(list(drawn)), **options)

    def _rows(self, batches: Sequence[Any]) -> list[Any]:
        """Return the rows of this process; those of all processes make up the loss."""
        rows = [own_rows(batch) for batch in batches]
        if not all(real for _, _, real in rows):
            fewest = min(count for _, count, _ in rows)
            raise ValueError(
                "a batch whose curvature is measured must have at least one sample per process, "
                f"got {fewest} for {world_size()} processes"
            )
        return [batch for batch, _, _ in rows]

    def _risk(self, name: str, batches: list[Any], **options: Any) -> Risk:
        if name in self._risks:
            # Only the weights and the batch have changed: the model is not traced again.
            risk = self._risks[name].moved(batches)
        else:
            risk = Risk(
                self._model,
                self._loss_fn,
                batches,
                forward=self._forward,
                batch_norm="train" if batch_norms(self._model) else "eval",
                sharing="own" if world_size() > 1 else "none",
                **options,
            )
        self._risks[name] = risk
        return risk

    def _sample(self) -> Risk:
        if (risk := self._risks.get("sample")) is None:
            size = self._config.batch_size or 1
            data, options = sample(
                self._feed.source, MEASURED, batch_size=size, seed=self._config.seed
            )
            # Samples are compared one by one, so batch norm has its running statistics.
            risk = Risk(
                self._model, self._loss_fn, data, forward=self._forward, sharing="none", **options
            )
            self._risks["sample"] = risk
        return risk.moved()
