"""``CurvatureMonitor``: curvature measured while a model trains, without changing the training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, final, get_args

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.modes import BatchNormMode, unwrapped
from ritz._core.training_config import Unit
from ritz.curvature import CurvatureOperator, Risk, curvature_operator, fisher
from ritz.curvature._shared import MATRICES, CurvatureMatrix
from ritz.measures import curvature_variance
from ritz.optim import StepReader
from ritz.spectra import diagonal, eigenpairs, frobenius_norm, lanczos, trace
from ritz.training._folder import FilePath, Log, Record

Quantity = Literal["lambda_max", "trace", "variance", "spectrum", "step", "fisher"]
QUANTITIES = get_args(Quantity)


class Writer(Protocol):
    """Receives numbers over time, such as ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Receive one number."""


@final
@dataclass(kw_only=True, eq=False)
class CurvatureMonitor:
    r"""Measures curvature on a fixed sub-sample, every few steps or epochs of a training loop.

    * ``lambda_max``: the largest eigenvalue :math:`\lambda_1` with its residual, the threshold
      :math:`2 / \alpha` at which gradient descent with learning rate :math:`\alpha` becomes
      unstable, and ``sharpness_ratio`` :math:`= \alpha \lambda_1 / 2`.
    * ``trace``: :math:`\operatorname{tr} H` with its standard error.
    * ``variance``: :math:`\mathbb{E} \|(H_i - H) v\|^2` over samples :math:`i` and random unit
      vectors :math:`v`, with its standard error; see :func:`ritz.measures.curvature_variance`.
    * ``spectrum``: Ritz values and weights of a short Lanczos run.
    * ``step``: the last step along the Ritz vectors of such a run: gradient, update, weight decay
      and effective rates, and the estimated-curvature ratio of the optimiser; see
      :class:`ritz.optim.StepReader`. ``fit`` calls :meth:`attach`; in your own loop call it once.
    * ``fisher``: Frobenius norms of the empirical Fisher matrix, with its standard error, and of
      its diagonal, which is exact where the structure of the network gives it.

    The model, its gradients, buffers and mode, and the global generators are not changed: the
    weights equal those of a run without monitor bit for bit. All measurements use the same seed,
    so differences over time are not due to the probes. In your own training loop::

        monitor = CurvatureMonitor((inputs, targets), every=100, log="curvature.jsonl")
        for step, batch in enumerate(batches, start=1):
            ...
            monitor(step, model, optimizer)

    Cost of a measurement in matrix-vector products with the sub-sample: about 20 to 60 for
    ``lambda_max``, ``2 num_probes`` for ``trace``, ``num_probes`` for ``variance`` and ``fisher``
    and ``num_steps`` for ``spectrum``. One product costs two to three gradients.

    Args:
        source: A fixed subset of the data, in any form that :class:`ritz.Risk` accepts; or a
            function that takes the model and returns its risk.
        loss_fn: Mean loss of outputs and target; unused if ``source`` is a function.
        quantities: Quantities to measure.
        every: Steps or epochs between measurements.
        unit: ``step`` or ``epoch``: when :func:`ritz.training.fit` calls the monitor.
        matrix: ``hessian`` or ``ggn``.
        batch_norm: ``eval``, ``train`` or ``recomputed``; unused if ``source`` is a function.
        batch_size: Batch size of a sub-sample of tensors.
        count: Takes a batch of the sub-sample and returns its weight, as for :class:`ritz.Risk`;
            for text the number of tokens.
        rtol: Residual of ``lambda_max`` relative to the norm. The error of the eigenvalue is of the
            order of its square.
        num_steps: Lanczos steps of ``spectrum``; ``lambda_max`` uses at most ``10 * num_steps``.
        num_probes: Probes of ``trace``, ``variance`` and ``fisher``.
        seed: Seed of the probes.
        log: File of JSON lines to append to. Not needed in ``fit``, which logs what is returned.
        writer: A TensorBoard ``SummaryWriter``; tags begin with ``curvature/``.
    """

    source: Any = field(kw_only=False)
    loss_fn: Callable[..., Any] | None = cross_entropy
    quantities: Sequence[Quantity] = ("lambda_max", "trace")
    every: int = 1
    unit: Unit = "epoch"
    matrix: CurvatureMatrix = "hessian"
    batch_norm: BatchNormMode = "eval"
    batch_size: int | None = None
    count: Callable[[Any], int] | None = None
    rtol: float = 0.01
    num_steps: int = 20
    num_probes: int = 8
    seed: int = 0
    log: FilePath | None = None
    writer: Writer | None = None

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_choice("unit", self.unit, get_args(Unit))
        check_choice("matrix", self.matrix, MATRICES)
        check_range("rtol", self.rtol, low=0.0)
        check_count("num_steps", self.num_steps)
        check_count("num_probes", self.num_probes, low=2)
        if isinstance(self.quantities, str) or not self.quantities:
            names = ", ".join(QUANTITIES)
            raise ValueError(f"quantities must be a list of {names}; got {self.quantities!r}")
        for name in self.quantities:
            check_choice("quantities", name, QUANTITIES)
        self._reader: StepReader | None = None
        # Appends: the monitor does not know where a run began.
        self._log = None if self.log is None else Log(self.log, size=None)

    def attach(self, optimizer: Optimizer) -> None:
        """Note the weights before each step of an optimiser, for the quantity ``step``."""
        if "step" in self.quantities:
            if self._reader is not None:
                self._reader.close()
            self._reader = StepReader(optimizer)

    def __call__(
        self, count: int, model: nn.Module, optimizer: Optimizer | None = None
    ) -> Record | None:
        r"""Measure if it is time; return the numbers, or ``None``.

        Args:
            count: Completed steps or epochs.
            model: The model, possibly wrapped.
            optimizer: Has the learning rate :math:`\alpha` that the threshold depends on.
        """
        if count % self.every:
            return None
        numbers = self.measure(model, optimizer)
        record: Record = {"kind": "curvature", self.unit: count, **numbers}
        if self._log is not None:
            self._log.write(record)
        if self.writer is not None:
            for name, value in numbers.items():
                if isinstance(value, float):
                    self.writer.add_scalar(f"curvature/{name}", value, count)
        return record

    def measure(self, model: nn.Module, optimizer: Optimizer | None = None) -> Record:
        """Return the chosen quantities of a model."""
        risk = self._risk(unwrapped(model))
        op = curvature_operator(risk, self.matrix)
        record: Record = {"matrix": self.matrix}
        if "lambda_max" in self.quantities:
            record |= self._lambda_max(op, optimizer)
        if "trace" in self.quantities:
            estimate = trace(op, num_probes=self.num_probes, generator=self._generator())
            record |= {"trace": float(estimate.mean), "trace_stderr": float(estimate.stderr)}
        if "variance" in self.quantities:
            estimate = curvature_variance(
                risk, matrix=self.matrix, num_probes=self.num_probes, generator=self._generator()
            )
            record |= {"variance": float(estimate.mean), "variance_stderr": float(estimate.stderr)}
        if "spectrum" in self.quantities:
            # A Krylov space is never larger than the matrix.
            steps = min(self.num_steps, op.shape[0])
            run = lanczos(op, num_steps=steps, generator=self._generator())
            record |= {"ritz_values": run.values.tolist(), "ritz_weights": run.weights.tolist()}
        if "step" in self.quantities:
            record |= self._step(risk, op)
        return record | (self._fisher(risk) if "fisher" in self.quantities else {})

    def _fisher(self, risk: Risk) -> Record:
        op = fisher(risk, kind="empirical")
        whole = frobenius_norm(op, num_probes=self.num_probes, generator=self._generator())
        part = diagonal(op, num_probes=self.num_probes, generator=self._generator())
        return {
            "fisher_norm": float(whole.mean),
            "fisher_norm_stderr": float(whole.stderr),
            "fisher_diagonal_norm": float(part.mean.double().norm()),
        }

    def _step(self, risk: Risk, op: CurvatureOperator) -> Record:
        steps = min(self.num_steps, op.shape[0])
        run = lanczos(op, num_steps=steps, vectors=True, generator=self._generator())
        vectors: Any = run.vectors
        reading = None if self._reader is None else self._reader.read(risk, run.values, vectors)
        if reading is None:
            return {}
        names = ("values", "gradient", "update", "decay", "rates")
        record: Record = {f"step_{name}": getattr(reading, name).tolist() for name in names}
        return record | {
            "step_flat_rate": reading.flat_rate,
            "curvature_ratio": reading.curvature_ratio,
        }

    def _risk(self, model: nn.Module) -> Risk:
        if callable(self.source):
            risk: Risk = self.source(model)
            return risk
        # Only the first process measures, so processes must not share the data.
        options: Any = {name: getattr(self, name) for name in ("batch_norm", "batch_size", "count")}
        return Risk(model, self.loss_fn, self.source, sharing="none", **options)

    def _lambda_max(self, op: CurvatureOperator, optimizer: Optimizer | None) -> Record:
        limits: Any = {"rtol": self.rtol, "max_steps": 10 * self.num_steps}
        # Without vectors, which would take memory and are not logged.
        run = eigenpairs(op, largest=1, vectors=False, generator=self._generator(), **limits)
        value = float(run.values[-1])
        record = {"lambda_max": value, "lambda_max_residual": float(run.residuals[-1])}
        group = {"lr": 0.0} if optimizer is None else optimizer.param_groups[0]
        rate = float(group["lr"]) * (group.get("rate") or 1.0)  # that of SpectralSGD
        # A step multiplies the error along an eigenvector by 1 - rate * lambda, which is stable
        # for lambda < 2 / rate.
        if rate:
            record |= {"threshold": 2 / rate, "sharpness_ratio": rate * value / 2}
        return record

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)
