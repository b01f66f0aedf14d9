"""`IterateAverage` of any optimiser; `AutoAverage`, which starts by patience; and `swa`."""

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Unpack, final, get_args

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from ritz._core.batch_norm import StatisticsOptions, with_statistics
from ritz._core.checks import check_choice, check_count, check_range, check_type
from ritz._core.distributed import reshard, unwrapped
from ritz._core.params import check_optimizer
from ritz._core.training_config import PatienceRule
from ritz.optim._state_tensors import NEVER, StateTensors, local, owners

# ------------------------------------------------------------------------------------------
# Tail, exponential and Polyak averages.

Pairs = list[tuple[Tensor, Tensor]]
AverageKind = Literal["tail", "ema", "polyak"]


@final
class IterateAverage:
    r"""The average of the iterates of an optimiser, stored in its state.

    Let :math:`w_t` be the weights after step :math:`t`, and :math:`T` the step ``start``:

    .. math::
        \text{tail:}\quad & \bar w \leftarrow \frac{n \bar w + w_t}{n + 1},\; n \leftarrow n + 1,
            \quad \bar w = w_{T-1},\; n = 1 \text{ before}, \\
        \text{ema:}\quad & \bar w \leftarrow \rho \bar w + (1 - \rho) w_t,
            \quad \bar w = w_{T-1} \text{ before}, \\
        \text{polyak:}\quad & \bar w = \frac1n \sum_{i=1}^n w_{ik},

    The average is updated after the steps :math:`t = T - 1 + k, T - 1 + 2k, \dots`, where :math:`k`
    is the ``interval``. With ``start`` 0 or 1, the tail average is that of :math:`w_0, w_k, w_{2k},
    \dots`. The Polyak average leaves out the initial weights. To average once per epoch of ``m``
    steps, beginning with the weights after ``e`` epochs, use ``start=e * m + 1, interval=m``. For
    example, ``m = 100`` and ``e = 5`` average the weights after steps 500, 600, 700 and so on. SWA
    is the tail average with SGD.

    ``optimizer.step()`` updates the average, also with closures, compiled steps and gradient
    scalers. Steps that ``GradScaler`` skips are not counted. Steps that are replayed from a CUDA
    graph run no hooks and are not averaged.

    **Saving.** The average is part of ``optimizer.state_dict()`` and is loaded with it bit for bit,
    also by ``torch.distributed.checkpoint``. For a parameter ``p`` it is
    ``optimizer.state[p]["average"]`` (float32 for half-precision weights; a DTensor if ``p`` is
    one). There are also the scalar tensors ``"average_count"`` (number of iterates in the average,
    0 until it begins), ``"average_step"`` (steps taken) and ``"average_start"``. After loading, an
    average that has begun continues with the start in the checkpoint. If the checkpoint has no
    average, steps are counted from 0 again.

    **Cost.** One pass over weights and average in the steps that are averaged, and nothing in
    others. Memory: a copy of the parameters, and a second one inside :meth:`applied`. With a fused
    optimiser and a gradient scaler, a step that is averaged waits for the device, because it must
    know whether the step was skipped.

    Reference: Granziol et al., Iterate averaging in the quest for best test error, Alg. 1; Polyak
    and Juditsky (1992); Izmailov et al. (2018).

    Args:
        optimizer: Any optimiser; its parameters are averaged.
        kind: ``tail``, ``ema`` or ``polyak``.
        start: First step :math:`T` of the average, counted from one; 0 also means the first.
            ``None`` waits for :meth:`restart`.
        interval: Number of steps :math:`k` between two averaged weights.
        decay: The decay :math:`\rho` of ``ema``.
        dtype: Dtype of the average, float32 or float64. Defaults to float32, or float64 for float64
            weights.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        kind: AverageKind = "tail",
        start: int | None = 0,
        interval: int = 1,
        decay: float = 0.999,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_optimizer(optimizer)
        check_choice("kind", kind, get_args(AverageKind))
        if start is not None:
            start = check_count("start", start, low=0)
        interval = check_count("interval", interval)
        check_range("decay", decay, low=0.0, high=1.0)
        if kind == "polyak" and start not in (0, 1):
            raise ValueError(f"start must be 0 for kind='polyak', got {start}")
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        self.optimizer, self.kind, self.interval, self.decay = optimizer, kind, interval, decay
        # Steps count from one, so 0 and 1 both mean the first step.
        self.planned = None if start is None else max(start, 1)
        self._applied = False
        self._skipped: Tensor | None = None
        self._tensors = StateTensors(
            optimizer,
            key="average",
            numbers={"count": 0, "step": 0, "start": self.planned or NEVER},
            dtype=dtype,
        )
        # Not compiled, because a compiled step would be traced again whenever a count changes.
        optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))
        optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))
        # Must run before the hook of StateTensors, which writes the counts.
        optimizer.register_state_dict_pre_hook(lambda _: self._resolve(), prepend=True)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    @property
    def count(self) -> int:
        """Number of iterates in the average; 0 until it begins."""
        return self._numbers["count"]

    @property
    def step(self) -> int:
        """Number of steps that the optimiser has taken, without skipped ones."""
        self._resolve()
        return self._numbers["step"]

    @property
    def start(self) -> int | None:
        """First step of the average, counted from one. ``None`` if it is not known yet."""
        start = self._numbers["start"]
        return None if start == NEVER else start

    def restart(self) -> None:
        """Begin a new average with the current weights. An earlier average is discarded."""
        self._check_not_applied("restart")
        self._resolve()
        self._tensors.allocate(self.optimizer)
        self._numbers["start"] = self._numbers["step"] + 1
        self._begin()

    @contextmanager
    def applied(
        self,
        model: nn.Module,
        **statistics: Unpack[StatisticsOptions],
    ) -> Iterator[nn.Module]:
        r"""Context manager that puts the averaged weights into a model for the ``with`` block.

        Args:
            model: Model with parameters of the optimiser, possibly wrapped (DDP, FSDP2, compiled).
                Its other parameters are not changed.
            data: Batches on which the statistics of batch norm are recomputed for the averaged
                weights. A model with batch norm needs this for correct outputs. The statistics are
                restored after the block. By default the statistics are not changed.
            fraction: Fraction of the batches to use, beginning with the first.
            forward: Called with the model and a batch. Defaults to a call of the model without the
                last item of a tuple or list, or without ``"labels"`` of a dictionary.
            count: Returns the number of samples of a batch. Defaults to the length of its first
                tensor.
            sharing: ``own``: all processes of ``group`` make this call, each with different
                batches. ``none``: this process computes the statistics alone.
            group: Process group. Defaults to all processes.
        """
        self._check_not_applied("applied")
        # Copies, because the averages are written into the weights.
        pairs = self._find_pairs(model)
        before = [p.detach().clone() for p, _ in pairs]
        self._applied = True
        try:
            _write(pairs)
            with with_statistics(model, **statistics):
                yield model
        finally:
            # FSDP2 may have gathered the parameters in the block.
            reshard(model)
            _write([(p, weights) for (p, _), weights in zip(pairs, before, strict=True)])
            self._applied = False

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the averaged weights by name. They are not copied: later steps change them.

        Args:
            model: As in :meth:`applied`.
        """
        averages = {id(p): average for p, average in self._find_pairs(model)}
        named = unwrapped(model).named_parameters()
        return {name: averages[id(p)] for name, p in named if id(p) in averages}

    def copy_to(self, model: nn.Module, **statistics: Unpack[StatisticsOptions]) -> None:
        """Copy the averaged weights into a model.

        Args:
            model: As in :meth:`applied`.
            **statistics: The keywords of :meth:`applied`.
        """
        self._check_not_applied("copy_to")
        _write(self._find_pairs(model))
        with with_statistics(model, keep=True, **statistics):
            pass

    def to_averaged_model(
        self, model: nn.Module, **statistics: Unpack[StatisticsOptions]
    ) -> nn.Module:
        """Return a copy of a model with the averaged weights, without wrappers or gradients.

        Its state dict has the keys of the model without wrappers. A sharded model cannot be copied.
        Save its state inside :meth:`applied` instead.

        Args:
            model: As in :meth:`applied`.
            **statistics: The keywords of :meth:`applied`.
        """
        if any(hasattr(p, "to_local") for p in model.parameters()):
            raise TypeError("model must not be sharded: save its state inside applied(model)")
        with self.applied(model, **statistics):
            return copy.deepcopy(unwrapped(model))

    def __repr__(self) -> str:
        decay = f", decay={self.decay}" if self.kind == "ema" else ""
        return (
            f"IterateAverage({type(self.optimizer).__name__}, kind={self.kind!r}, "
            f"start={self.start}, interval={self.interval}{decay}: {self.count} iterates after "
            f"{self.step} steps)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "IterateAverage":
        optimizer = copy.deepcopy(self.optimizer, memo)
        copied = attached_to(optimizer)  # the copy of a Gadam has an average already
        if copied is not None:
            return copied
        copied = IterateAverage(
            optimizer,
            kind=self.kind,
            start=self.planned,
            interval=self.interval,
            decay=self.decay,
            dtype=self._tensors.dtype,
        )
        self._resolve()
        # The copy of the optimiser has no hooks. Continue with the average in its state.
        copied._tensors.adopt(optimizer, self._numbers)
        return copied

    @property
    def _numbers(self) -> dict[str, int]:
        return self._tensors.numbers

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._check_not_applied("step")
        self._tensors.before_step(optimizer)
        if self._is_to_begin():
            self._resolve()
            if self._is_to_begin():
                self._numbers["start"] = self._numbers["step"] + 1
                self._begin()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._tensors.after_step(optimizer)
        if self._tensors.initialising:
            return
        self._numbers["step"] += 1
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            # Counted on the device, because reading it here would make every step wait.
            skipped = (found_inf > 0).sum()
            self._skipped = skipped if self._skipped is None else self._skipped + skipped
        if self._is_due():
            self._resolve()
            if self._is_due() and (found_inf is None or not bool(found_inf > 0)):
                self._update()

    def _is_to_begin(self) -> bool:
        start = self._numbers["start"]
        # The Polyak average has no initial value: it begins in _update() after the first step.
        waits = self.count == 0 and start != NEVER and self.kind != "polyak"
        return waits and self._numbers["step"] + 1 >= start and not self._tensors.initialising

    def _is_due(self) -> bool:
        # Due at t = T - 1 + k, T - 1 + 2k, ...
        since = self._numbers["step"] + 1 - self._numbers["start"]
        begun = self.count > 0 or self.kind == "polyak"
        return begun and since > 0 and since % self.interval == 0

    def _begin(self) -> None:
        self._tensors.copy_weights()
        # The Polyak average leaves the initial weights out.
        self._numbers["count"] = 0 if self.kind == "polyak" else 1
        self._tensors.write_numbers(self.optimizer)

    def _update(self) -> None:
        # ema: a <- a + (1 - rho)(w - a); tail and Polyak: a <- a + (w - a) / (n + 1)
        share = 1 - self.decay if self.kind == "ema" else 1 / (self.count + 1)
        tensors = self._tensors.tensors
        move(list(tensors.values()), list(tensors), share)
        self._numbers["count"] += 1
        self._tensors.write_numbers(self.optimizer, "count")

    def _resolve(self) -> None:
        """Subtract the steps that were skipped since the last call from the step count."""
        if self._skipped is not None:
            self._numbers["step"] -= int(self._skipped)
            self._skipped = None

    def _after_load(self, optimizer: Optimizer) -> None:
        self._skipped = None
        if self.count == 0:
            self._numbers["start"] = self.planned or NEVER

    def _check_not_applied(self, call: str) -> None:
        if self._applied:
            raise RuntimeError(f"{call} must not be called inside 'with average.applied(model)'")

    def _find_pairs(self, model: nn.Module) -> Pairs:
        """Return the parameters of a model that have an average, with their averages."""
        check_type("model", model, nn.Module, "a torch.nn.Module")
        if not self.count:
            when = "waits for restart()" if self.start is None else f"starts at step {self.start}"
            message = f"the average has not begun: it {when}, and the optimiser has taken "
            raise RuntimeError(f"{message}{self.step} steps")
        reshard(model)
        tensors = self._tensors.tensors
        pairs: Pairs = [(p, tensors[p]) for p in model.parameters() if p in tensors]
        if not pairs:
            raise ValueError("model must have parameters of this optimiser, got none of them")
        return pairs


@torch.no_grad()
def move(averages: list[Tensor], weights: list[Tensor], share: float) -> None:
    r"""Move averages towards the weights in place, :math:`a \leftarrow a + s (w - a)`.

    An average that equals the weights stays exactly the same.
    """
    pairs = [(local(a), local(w)) for a, w in zip(averages, weights, strict=True)]
    same = [(a, w) for a, w in pairs if a.dtype == w.dtype]
    if same:  # one kernel launch on a GPU
        torch._foreach_lerp_([a for a, _ in same], [w for _, w in same], share)
    for a, w in pairs:
        if a.dtype != w.dtype:
            a.lerp_(w.to(a.dtype), share)


def _write(pairs: Pairs) -> None:
    with torch.no_grad():
        for p, value in pairs:
            p.copy_(value)


def attached_to(optimizer: Optimizer) -> IterateAverage | None:
    """Return the average of an optimiser or of its inner ones, or ``None``."""
    return next((one for one in owners(optimizer) if isinstance(one, IterateAverage)), None)


def swa(
    params: ParamsT,
    *,
    lr: float = 0.1,
    momentum: float = 0.9,
    start: int | None = None,
    interval: int = 1,
    **settings: Any,
) -> SGD:
    """Return SGD with the tail average of its iterates as ``.average``.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        momentum: Momentum.
        start: First step of the average, as in :class:`IterateAverage`.
        interval: Steps between weights that enter the average.
        **settings: Other keywords of ``torch.optim.SGD``.

    Reference: Izmailov et al. (2018), *Averaging weights leads to wider optima*.
    """
    optimizer: Any = SGD(params, lr=lr, momentum=momentum, **settings)
    optimizer.average = IterateAverage(optimizer, start=start, interval=interval)
    averaged: SGD = optimizer
    return averaged


# ------------------------------------------------------------------------------------------
# When to begin averaging, and when to stop training (GadamAuto).


@final
class AutoAverage:
    """Start averaging, and later stop training, when a metric no longer improves.

    Phase 1: :meth:`update` expects the metric of the current weights. After ``patience``
    evaluations in a row without a new best value, averaging begins with the current weights.
    Phase 2: :meth:`update` expects the metric of the averaged weights, and the best value is reset.
    After ``patience`` evaluations without improvement, :attr:`finished` is true.

    With ``rule="non_monotone"`` (NT-ASGD), averaging begins when the metric is worse than the best
    value that was recorded more than ``patience`` evaluations ago. There is no second phase.

    The learning rate stays constant::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        auto = AutoAverage(optimizer)
        while not auto.finished:
            train_one_epoch()
            with auto.applied(model, data=loader):
                auto.update(validation_loss(model))

    With several processes the metric must be the same in all of them.

    References: Granziol et al., Iterate averaging in the quest for best test error, A.2; Merity,
    Keskar and Socher (2018), Regularizing and optimizing LSTM language models, Algorithm 1.

    Args:
        average: An average created with ``start=None``, or an optimiser. If an optimiser has no
            average, a tail average over all steps is created.
        patience: Number of evaluations without improvement that end each of the two phases.
        mode: ``min`` if smaller metrics are better, ``max`` if larger ones are.
        min_delta: An improvement must exceed this value. With ``non_monotone``, a deterioration
            must exceed it.
        rule: ``stagnation`` or ``non_monotone``.
    """

    def __init__(
        self,
        average: IterateAverage | Optimizer,
        *,
        patience: int = 10,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
        rule: PatienceRule = "stagnation",
    ) -> None:
        patience = check_count("patience", patience)
        check_choice("mode", mode, ("min", "max"))
        check_choice("rule", rule, get_args(PatienceRule))
        check_range("min_delta", min_delta, low=0.0)
        if isinstance(average, Optimizer):
            average = attached_to(average) or IterateAverage(average, start=None)
        check_type("average", average, IterateAverage, "an IterateAverage or an optimiser")
        if average.planned is not None:
            raise ValueError(f"average must have start=None, got start={average.planned}")
        self.average = average
        self.patience, self.mode, self.min_delta, self.rule = patience, mode, min_delta, rule
        self.averaging, self.finished = False, False
        self.best: float | None = None  # best metric of the present phase
        self.best_before: float | None = None  # best metric of phase 1, set in phase 2
        self.waited = 0  # evaluations since the best one
        self.recent: list[float] = []  # at most the last `patience` metrics, the oldest first
        self.best_old: float | None = None  # best of the metrics before those

    def __repr__(self) -> str:
        part = "finished" if self.finished else "averaging" if self.averaging else "waiting"
        return (
            f"AutoAverage(patience={self.patience}, mode={self.mode!r}: {part}, best {self.best}, "
            f"{self.waited} evaluations without improvement)"
        )

    def applied(
        self, model: nn.Module, **statistics: Unpack[StatisticsOptions]
    ) -> AbstractContextManager[nn.Module]:
        """Put the averaged weights into a model for the ``with`` block, if averaging has begun.

        Args:
            model: As in :meth:`IterateAverage.applied`.
            **statistics: ``data`` and the other keywords of :meth:`IterateAverage.applied`.
        """
        if self.averaging:
            return self.average.applied(model, **statistics)
        return nullcontext(model)

    def update(self, metric: float | Tensor) -> bool:
        """Record the metric of an evaluation, and return whether to stop training."""
        value = float(metric)
        if math.isnan(value):
            raise ValueError("metric must be a number, got nan")
        if self.finished:
            return True
        # The first value of a phase is always the best so far.
        if self._gain(value, self.best) > self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.averaging:
            self.finished = self.rule == "stagnation" and self.waited >= self.patience
        elif self._is_due(value):
            self.average.restart()
            # From now on the metric is that of the average, whose best value is not known yet.
            self.averaging, self.waited = True, 0
            self.best_before, self.best = self.best, None
        return self.finished

    def _gain(self, value: float, best: float | None) -> float:
        if best is None:
            return math.inf
        return best - value if self.mode == "min" else value - best

    def _is_due(self, value: float) -> bool:
        """Return whether averaging begins after this value, and store the value."""
        if self.rule == "stagnation":
            return self.waited >= self.patience
        # t > n and v_t > min(v_1, ..., v_{t-n-1}): strictly worse.
        due = self._gain(value, self.best_old) < -self.min_delta
        self.recent.append(value)
        if len(self.recent) > self.patience:
            oldest = self.recent.pop(0)
            if self._gain(oldest, self.best_old) > 0:
                self.best_old = oldest
        return due

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers. The state of the optimiser has the average itself."""
        names = (
            "averaging", "finished", "best", "best_before", "waited", "mode", "best_old",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"recent": list(self.recent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        missing = sorted(set(self.state_dict()) - set(state_dict))
        if missing:
            raise ValueError(f"state_dict must be one of AutoAverage, got one without {missing}")
        if state_dict["mode"] != self.mode:
            raise ValueError(f"state_dict must have mode={self.mode!r}, got {state_dict['mode']!r}")
        for name in self.state_dict():
            setattr(self, name, state_dict[name])
        self.recent = list(self.recent)
