"""Curvature watched while a model trains, without a change to the training."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.modes import BatchNormMode, unwrapped
from ritz._core.results import Estimate
from ritz._core.training_config import Unit
from ritz.curvature import CurvatureOperator, Risk, curvature_operator
from ritz.curvature._shared import MATRICES, CurvatureMatrix
from ritz.measures import curvature_variance
from ritz.spectra import eigenpairs, lanczos, trace
from ritz.training._folder import Log, Record

Quantity = Literal["lambda_max", "trace", "variance", "spectrum"]
QUANTITIES = get_args(Quantity)


class Writer(Protocol):
    """What takes numbers over time: ``torch.utils.tensorboard.SummaryWriter`` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Take one number."""


@final
class CurvatureMonitor:
    r"""Measures curvature on a fixed sub-sample, every so many steps or epochs of any loop.

    * ``lambda_max``: the largest eigenvalue :math:`\lambda_1` with its residual, beside the
      threshold :math:`2 / \alpha` at which plain gradient descent turns unstable, and
      ``sharpness_ratio`` :math:`= \alpha \lambda_1 / 2`.
    * ``trace``: :math:`\operatorname{tr} H` with its standard error.
    * ``variance``: :math:`P \sigma^2`, how much the matrices of samples differ, with its standard
      error.
    * ``spectrum``: Ritz values and weights of a short Lanczos run.

    The model, its gradients and buffers, its mode and the global generators are left as they are:
    weights are bit for bit those of a run without. Every measurement has the same seed, so what
    changes over time is not the luck of the probes. In your own training loop::

        monitor = CurvatureMonitor((inputs, targets), every=100, log="curvature.jsonl")
        for step, batch in enumerate(batches, start=1):
            ...
            monitor(step, model, optimizer)

    Cost of a measurement: about 20 to 60 products with the sub-sample for ``lambda_max``,
    ``2 num_probes`` for ``trace``, ``num_probes`` for ``variance`` and ``num_steps`` for
    ``spectrum``; one product is two to three gradients.

    Args:
        source: The sub-sample: whatever :class:`ritz.Risk` takes as data; or a function that makes
            a risk of a model.
        loss_fn: Mean loss of outputs and target; not for a function.
        quantities: Which to measure.
        every: Counts from one measurement to the next.
        unit: What is counted; :func:`ritz.training.fit` calls it so.
        matrix: ``hessian`` or ``ggn``.
        batch_norm: ``eval``, ``train`` or ``recomputed``; not for a function.
        batch_size: Of the sub-sample where it is tensors.
        count: Takes a batch of the sub-sample and returns how much it counts, as for
            :class:`ritz.Risk`; for a text its tokens.
        rtol: Residual of ``lambda_max`` relative to the norm; its own error is of the order of the
            square.
        num_steps: Lanczos steps of ``spectrum``, and the most for ``lambda_max`` times ten.
        num_probes: Probes of ``trace`` and ``variance``.
        seed: Of the probes.
        log: File of JSON lines to append to; not needed in ``fit``, which logs what is returned.
        writer: Told every number, under ``curvature/``.
    """

    def __init__(
        self,
        source: Any,
        *,
        loss_fn: Callable[..., Any] | None = cross_entropy,
        quantities: Sequence[Quantity] = ("lambda_max", "trace"),
        every: int = 1,
        unit: Unit = "epoch",
        matrix: CurvatureMatrix = "hessian",
        batch_norm: BatchNormMode = "eval",
        batch_size: int | None = None,
        count: Callable[[Any], int] | None = None,
        rtol: float = 0.01,
        num_steps: int = 20,
        num_probes: int = 8,
        seed: int = 0,
        log: str | os.PathLike[str] | None = None,
        writer: Writer | None = None,
    ) -> None:
        check_count("every", every)
        check_choice("unit", unit, get_args(Unit))
        check_choice("matrix", matrix, MATRICES)
        check_range("rtol", rtol, low=0.0)
        check_count("num_steps", num_steps)
        check_count("num_probes", num_probes, low=2)
        if isinstance(quantities, str) or not quantities:
            raise ValueError(f"quantities must be some of {', '.join(QUANTITIES)}; got "
                             f"{quantities!r}")  # fmt: skip
        for name in quantities:
            check_choice("quantities", name, QUANTITIES)
        self.quantities, self.every, self.unit, self.matrix = tuple(quantities), every, unit, matrix
        self._risk = (
            source if callable(source) else _risk_of(source, loss_fn, batch_norm, batch_size, count)
        )
        self._rtol, self._num_steps, self._num_probes, self._seed = (
            rtol,
            num_steps,
            num_probes,
            seed,
        )
        self._log, self._writer = None if log is None else _appending(log), writer

    def __call__(
        self, count: int, model: nn.Module, optimizer: Optimizer | None = None
    ) -> Record | None:
        r"""Measure where it is due; return what was found, or ``None``.

        Args:
            count: Steps or epochs done.
            model: As it is now, itself or wrapped.
            optimizer: Has the rate :math:`\alpha`; without one there is no threshold.
        """
        if count % self.every:
            return None
        found = self.measure(model, optimizer)
        record: Record = {"kind": "curvature", self.unit: count, **found}
        if self._log is not None:
            self._log.write(record)
        if self._writer is not None:
            for name, value in found.items():
                if isinstance(value, float):
                    self._writer.add_scalar(f"curvature/{name}", value, count)
        return record

    def measure(self, model: nn.Module, optimizer: Optimizer | None = None) -> Record:
        """The chosen quantities of a model as it is now."""
        risk: Risk = self._risk(unwrapped(model))
        op = curvature_operator(risk, self.matrix)
        found: Record = {"matrix": self.matrix}
        if "lambda_max" in self.quantities:
            found |= self._lambda_max(op, optimizer)
        if "trace" in self.quantities:
            found |= _with_error("trace", trace(
                op, num_probes=self._num_probes, generator=self._generator()))  # fmt: skip
        if "variance" in self.quantities:
            found |= _with_error("variance", curvature_variance(
                risk, matrix=self.matrix, num_probes=self._num_probes, generator=self._generator()
            ))  # fmt: skip
        if "spectrum" in self.quantities:
            found |= self._spectrum(op)
        return found

    def _lambda_max(self, op: CurvatureOperator, optimizer: Optimizer | None) -> Record:
        run = eigenpairs(
            op,
            largest=1,
            rtol=self._rtol,
            max_steps=10 * self._num_steps,
            vectors=False,
            generator=self._generator(),
        )
        value = float(run.values[-1])
        found = {"lambda_max": value, "lambda_max_residual": float(run.residuals[-1])}
        rate = _rate(optimizer)
        if rate is None or rate == 0:
            return found
        return found | {"threshold": 2 / rate, "sharpness_ratio": rate * value / 2}

    def _spectrum(self, op: CurvatureOperator) -> Record:
        steps = min(self._num_steps, op.shape[0])
        run = lanczos(op, num_steps=steps, generator=self._generator())
        return {"ritz_values": run.values.tolist(), "ritz_weights": run.weights.tolist()}

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed)


def _risk_of(
    data: Any,
    loss_fn: Callable[..., Any] | None,
    batch_norm: BatchNormMode,
    batch_size: int | None,
    count: Callable[[Any], int] | None,
) -> Callable[[nn.Module], Risk]:
    """A function that makes the risk of a model on a sub-sample, in this process alone."""

    def make(model: nn.Module) -> Risk:
        return Risk(model, loss_fn, data, batch_norm=batch_norm, batch_size=batch_size,
                    count=count, sharing="none")  # fmt: skip

    return make


def _appending(path: str | os.PathLike[str]) -> Log:
    return Log(path, size=os.path.getsize(path) if os.path.exists(path) else 0)


def _with_error(name: str, estimate: Estimate) -> Record:
    return {name: float(estimate.mean), f"{name}_stderr": float(estimate.stderr)}


def _rate(optimizer: Optimizer | None) -> float | None:
    if optimizer is None:
        return None
    rate: float | Tensor = optimizer.param_groups[0]["lr"]
    return float(rate)
