"""``CurvatureMonitor``: curvature measured while a model trains, without changing the training."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final, get_args

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ritz._core.batch_norm import BATCH_NORM_MODES, BatchNormMode
from ritz._core.checks import check_choice, check_count, check_range, check_rtol, plain_fields
from ritz._core.distributed import unwrapped
from ritz._core.params import parameters
from ritz._core.training_config import Unit
from ritz.curvature import CurvatureOperator, Risk, curvature_operator
from ritz.curvature._shared import MATRICES, CurvatureMatrix
from ritz.optim import StepReader
from ritz.training._checkpoint import FilePath
from ritz.training._log import Log, Record
from ritz.training._quantities import QUANTITIES, USUAL, total_cost
from ritz.training._snapshot import Memory, Snapshot
from ritz.training._writers import Writer, check_writer, write_scalars


@final
@dataclass(kw_only=True, eq=False)
class CurvatureMonitor:
    r"""Measures curvature on a fixed sub-sample, every few steps or epochs of a training loop.

    ``ritz list quantities`` and ``docs/monitors.md`` describe all quantities with their costs, and
    :func:`register_quantity` adds one. Quantities of the last step, and the distance from the
    initial weights, need :meth:`attach`. ``fit`` calls it; in your own loop call it once.

    The model, its gradients, buffers and mode, and the global generators are not changed: the
    weights equal those of a run without monitor bit for bit. All measurements use the same seed,
    so differences over time do not come from the random probes. In your own training loop::

        monitor = CurvatureMonitor((inputs, targets), every=100, log="curvature.jsonl")
        for step, batch in enumerate(batches, start=1):
            ...
            monitor(step, model, optimizer)

    Args:
        source: A fixed subset of the data, in any form that :class:`ritz.Risk` accepts; or a
            function that takes the model and returns its risk. With ``max_samples``, all training
            data, also in a loader that shuffles.
        loss_fn: Mean loss of outputs and target; unused if ``source`` is a function.
        quantities: Quantities to measure; see :func:`quantity_names`. Defaults to ``lambda_max``,
            ``weight_norms``, ``gradient_norm``, ``gradient_variance`` and ``noise_scale``, without
            those that the model or its loss does not have.
        every: Steps or epochs between measurements.
        unit: ``step`` or ``epoch``: when :func:`ritz.training.fit` calls the monitor.
        matrix: ``hessian`` or ``ggn``.
        batch_norm: ``eval``, ``train`` or ``recomputed``; unused if ``source`` is a function.
        batch_size: Batch size of a sub-sample of tensors.
        max_samples: Draw a subset of at most this many samples from ``source``, once; unused if
            ``source`` is a function.
        train_batch_size: Batch size of training, on which ``signal_to_noise`` and the tests of the
            batch size depend. Defaults to the size of the sub-sample.
        count: Takes a batch of the sub-sample and returns its weight, as for :class:`ritz.Risk`;
            for text the number of tokens.
        rtol: Residual of an eigenvalue relative to the norm, for a search from a random vector.
        max_products: Maximum number of products of a search that starts at the previous
            eigenvector.
        num_steps: Lanczos steps of a spectrum; a search for eigenvalues from a random vector uses
            at most ten times as many.
        num_runs: Number of start vectors of spectra.
        num_probes: Number of probes of ``trace``, ``frobenius_norm``, ``variance`` and ``fisher``.
        num_vectors: Number of leading eigenvectors of ``overlap``.
        num_bins: Number of bins of histograms, a power of two.
        epsilon: Added to variances and curvatures that are divided by. Defaults to 0.
        seed: Seed of the probes.
        log: File of JSON lines to append to. Not needed in ``fit``, which logs what is returned.
        writer: A TensorBoard ``SummaryWriter``; tags begin with ``curvature/``. Not needed in
            ``fit``, which has a ``writer`` for the training log as well.
    """

    source: Any = field(kw_only=False, repr=False)
    loss_fn: Callable[..., Any] | None = cross_entropy
    quantities: Sequence[str] | None = None
    every: int = 1
    unit: Unit = "epoch"
    matrix: CurvatureMatrix = "hessian"
    batch_norm: BatchNormMode = "eval"
    batch_size: int | None = None
    max_samples: int | None = None
    train_batch_size: int | None = None
    count: Callable[[Any], int] | None = None
    rtol: float = 0.01
    max_products: int = 6
    num_steps: int = 20
    num_runs: int = 1
    num_probes: int = 8
    num_vectors: int = 5
    num_bins: int = 64
    epsilon: float = 0.0
    seed: int = 0
    log: FilePath | None = None
    writer: Writer | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("every", "max_products", "num_steps", "num_runs", "num_vectors"):
            check_count(name, getattr(self, name))
        check_choice("unit", self.unit, get_args(Unit))
        check_choice("matrix", self.matrix, MATRICES)
        check_choice("batch_norm", self.batch_norm, BATCH_NORM_MODES)
        check_rtol(self.rtol)
        check_range("epsilon", self.epsilon, low=0.0)
        check_count("num_probes", self.num_probes, low=2)
        check_writer(self.writer)
        if self.max_samples is not None:
            check_count("max_samples", self.max_samples)
        check_count("num_bins", self.num_bins, low=4)
        # Bins are merged in pairs when their range doubles.
        if self.num_bins & (self.num_bins - 1):
            raise ValueError(f"num_bins must be a power of two, got {self.num_bins}")
        self.names = self._chosen()
        self._memory, self._op = Memory(), None
        # The log is appended to, because the monitor does not know where a run began.
        self._log = None if self.log is None else Log(self.log, size=None)

    names: tuple[str, ...] = field(init=False)
    _op: CurvatureOperator | None = field(init=False, repr=False)

    def _chosen(self) -> tuple[str, ...]:
        """Return the names of the quantities, checked."""
        if self.quantities is None:
            return tuple(name for name in USUAL if self._is_possible(name))
        if isinstance(self.quantities, str) or not self.quantities:
            known = ", ".join(QUANTITIES)
            raise ValueError(f"quantities must be a list of {known}; got {self.quantities!r}")
        for name in self.quantities:
            if not self._is_possible(name):
                raise ValueError(
                    f"{name} needs gradients of single samples, which do not exist with "
                    "batch_norm='train': use eval or recomputed"
                )
        return tuple(dict.fromkeys(self.quantities))

    def _is_possible(self, name: str) -> bool:
        separable = QUANTITIES[name].separable  # an unknown name raises and suggests similar ones
        # The batch-norm mode of a user-defined risk is not known before the risk exists.
        return callable(self.source) or self.batch_norm != "train" or not separable

    def __repr__(self) -> str:
        every = f"every {self.every} {self.unit}s" if self.every > 1 else f"every {self.unit}"
        return f"CurvatureMonitor({', '.join(self.names)}; {self.matrix}, {every})"

    @property
    def cost(self) -> float:
        """Cost of a measurement in gradients of the sub-sample, at most, after the first one."""
        return total_cost(self)

    @property
    def parts(self) -> frozenset[str]:
        """Names of the measurements that the quantities share."""
        return frozenset(part for name in self.names for part in QUANTITIES[name].parts)

    def attach(self, optimizer: Optimizer) -> None:
        """Attach to a training run: store its initial weights, and note weights before each step.

        What the monitor stored about an earlier run is deleted, so it can watch several in turn.
        """
        if self._memory.reader is not None:
            # Otherwise its hook would note the weights before each step of an earlier optimiser.
            self._memory.reader.close()
        self._memory = Memory()
        if "distance" in self.names:
            self._memory.note_initial(parameters(optimizer))
        if "step" in self.parts:
            self._memory.reader = StepReader(optimizer)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return what a resumed run needs to measure the same numbers."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a :meth:`state_dict`, after :meth:`attach`."""
        self._memory.load_state_dict(state)

    def __call__(
        self, count: int, model: nn.Module, optimizer: Optimizer | None = None
    ) -> Record | None:
        r"""Return the record of a measurement if one is due, otherwise ``None``.

        Args:
            count: Completed steps or epochs.
            model: The model, possibly wrapped.
            optimizer: Has the learning rate and state that the edge of stability depends on.
        """
        if count % self.every:
            return None
        numbers = self.measure(model, optimizer)
        record: Record = {"kind": "curvature", self.unit: count, **numbers}
        if self._log is not None:
            self._log.write(record)
        if self.writer is not None:
            write_scalars(self.writer, record, count)
        return record

    def measure(self, model: nn.Module, optimizer: Optimizer | None = None) -> Record:
        """Return the chosen quantities of a model: numbers and lists of numbers by name."""
        snapshot = self._snapshot(unwrapped(model), optimizer)
        record: Record = {"matrix": self.matrix}
        for name in self.names:
            record |= self._attempt(name, QUANTITIES[name].measure, snapshot) or {}
        if not callable(self.source):
            # The next measurement reuses the traced products. This copy has an empty cache, so it
            # takes no memory between measurements.
            self._op = snapshot.op.at(snapshot.risk)
        return record

    def check(self, model: nn.Module) -> None:
        """Raise if a model or its loss lacks a chosen quantity; ``fit`` calls this first.

        Costs a few gradients of the sub-sample, and nothing for quantities that all models have.
        """
        chosen = [name for name in self.names if QUANTITIES[name].check is not None]
        snapshot = self._snapshot(unwrapped(model), None) if chosen else None
        for name in chosen:
            check = QUANTITIES[name].check
            if check is not None and snapshot is not None:
                self._attempt(name, check, snapshot)

    def _attempt(self, name: str, function: Callable[[Snapshot], Any], snapshot: Snapshot) -> Any:
        """Call a function of a quantity; name the quantity in errors."""
        try:
            return function(snapshot)
        except ValueError as error:
            # Quantities that the user chose must exist. Default quantities that a model does not
            # have are left out.
            if self.quantities is not None or not QUANTITIES[name].separable:
                raise ValueError(f"{name} cannot be measured: {error}") from error
            self.names = tuple(n for n in self.names if not QUANTITIES[n].separable)
            warnings.warn(f"gradients of single samples are not watched: {error}", stacklevel=3)
            return None

    def _snapshot(self, model: nn.Module, optimizer: Optimizer | None) -> Snapshot:
        if callable(self.source):
            risk: Risk = self.source(model)
            op = curvature_operator(risk, self.matrix)
            return Snapshot(self, self._memory, risk, op, optimizer)
        if self._op is not None and self._op.risk.model is model:
            risk = self._op.risk.moved()
            # The same model at another point: nothing is traced again.
            return Snapshot(self, self._memory, risk, self._op.at(risk), optimizer)
        # Only the first process measures, so processes must not share the data.
        names = ("batch_norm", "batch_size", "max_samples", "count")
        options: Any = {name: getattr(self, name) for name in names}
        risk = Risk(model, self.loss_fn, self.source, sharing="none", **options)
        return Snapshot(self, self._memory, risk, curvature_operator(risk, self.matrix), optimizer)
