"""The protocol of optimisers that need curvature, and what those of this package share."""

import math
from collections.abc import Iterable
from typing import Any, Literal, Protocol, final, get_args, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.checks import check_choice
from ritz._core.params import parameters
from ritz.curvature import CurvatureOperator, Risk, fisher, ggn, hessian
from ritz.curvature._shared import check_risk

NewtonMatrix = Literal["hessian", "ggn", "fisher"]
_MATRICES = {"hessian": hessian, "ggn": ggn, "fisher": fisher}


@runtime_checkable
class CurvatureOptimizer(Protocol):
    """Protocol of optimisers that need the curvature of the loss, at intervals or every step.

    :func:`ritz.training.fit` calls both methods with the batch of the step, or with a larger
    curvature batch. In your own loop it is one more line::

        for step, (inputs, labels) in enumerate(batches):
            if optimizer.curvature_due(step):
                optimizer.update_curvature(ritz.Risk(model, cross_entropy, [(inputs, labels)]))
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    With the same model and the same ``loss_fn`` object, matrix-vector products are traced once
    for each shape of batch, whether each refresh has a new risk or ``risk.moved(batch)``. With
    batch norm pass ``batch_norm="train"``, so that the curvature is that of the loss whose gradient
    the step follows.

    To write such an optimiser, subclass ``torch.optim.Optimizer`` and define the two methods.
    What a step reads must be in ``state`` or ``param_groups``, so that a run can be resumed.
    """

    def curvature_due(self, step: int) -> bool:
        """Return whether the curvature is to be updated before a step.

        Args:
            step: Number of steps taken so far.
        """

    def update_curvature(self, risk: Risk) -> None:
        """Measure the curvature that the next steps need.

        Args:
            risk: Loss on a batch. If the weights have changed since it was made, it is moved to the
                present ones.
        """


@final
class TracedMatrix:
    """The matrix of a model that an optimiser measures again and again, traced once.

    The trace is not part of the state of the optimiser: after loading, the model is traced again.
    """

    def __init__(self) -> None:
        self._op: CurvatureOperator | None = None

    def refresh(
        self, optimizer: Optimizer, risk: Risk
    ) -> tuple[CurvatureOperator, dict[str, Tensor], torch.Generator]:
        """Return the matrix of the next refresh, its parameters by name, and its random numbers.

        The groups of the optimiser have ``matrix``, ``seed`` and ``num_refreshes``, which counts.
        """
        risk, params = optimizer_risk(optimizer, risk)
        first = optimizer.param_groups[0]
        number = first["num_refreshes"] + 1
        # The number is saved with the state: a resumed run draws what it would have drawn.
        generator = torch.Generator().manual_seed(first["seed"] * 1_000_003 + number)
        op = self.operator(risk, first["matrix"], generator=generator)
        for group in optimizer.param_groups:
            group["num_refreshes"] = number
        return op, params, generator

    def operator(
        self, risk: Risk, matrix: NewtonMatrix, *, generator: torch.Generator | None = None
    ) -> CurvatureOperator:
        """Return the matrix of a risk, with the traces of the last call if they hold for it."""
        # Only the primal part is computed again if neither model, loss nor shapes have changed.
        op = self._op
        if op is not None and op.matrix == matrix and not risk.mismatch(op.risk):
            self._op = op.at(risk, generator=generator)
        else:
            options: Any = {"generator": generator} if matrix == "fisher" else {}
            self._op = _MATRICES[matrix](risk, **options)
        return self._op


def check_matrix(matrix: str) -> None:
    """Raise unless this is a matrix that an optimiser can use."""
    check_choice("matrix", matrix, get_args(NewtonMatrix))


def is_refresh_due(optimizer: Optimizer, step: int) -> bool:
    """Return whether a step is a multiple of the ``interval`` of an optimiser."""
    return step % int(optimizer.param_groups[0]["interval"]) == 0


def settings_of_group(
    optimizer: Optimizer, group: dict[str, Any], shared: Iterable[str]
) -> dict[str, Any]:
    """Return a group to add with the settings that all groups share; raise if it has others.

    The group takes their present values, which rules and schedules may have changed since the
    optimiser was made.
    """
    present = optimizer.param_groups[0] if optimizer.param_groups else optimizer.defaults
    # What the group says itself takes precedence, and is refused below if it differs.
    complete = {name: present[name] for name in shared} | group
    for name in shared if optimizer.param_groups else ():
        if complete[name] != present[name]:
            raise ValueError(
                f"{name} must be the same in all groups, got {complete[name]} beside "
                f"{present[name]}"
            )
    return complete


def optimizer_risk(optimizer: Optimizer, risk: Risk) -> tuple[Risk, dict[str, Tensor]]:
    """Return the risk at the current weights in the parameters of an optimiser, and these by name.

    Frozen parameters, and those of other optimisers, are constants.
    """
    check_risk(risk)
    mine = {id(p) for p in parameters(optimizer)}
    named = dict(risk.model.named_parameters())
    # A tied parameter has one name here, as in the risk.
    names = [name for name in risk.space.shapes if id(named[name]) in mine]
    chosen: dict[str, Tensor] = {name: named[name] for name in names}
    kind = type(optimizer).__name__
    if not chosen:
        raise ValueError(f"risk must be that of a model with parameters of this {kind}, got {risk}")
    # The curvature between a parameter of the model and one of another is not known, and taking it
    # for zero would not be a Newton step.
    known = {id(p) for p in named.values()}
    if any(id(p) not in known for p in parameters(optimizer)):
        raise ValueError(f"all parameters of {kind} must be those of the model of risk, got others")
    if dtypes := {p.dtype for p in chosen.values()} - {risk.space.dtype}:
        raise ValueError(
            f"{kind} needs a risk in the dtype of its parameters, float32 or float64, got "
            f"{risk.space.dtype} for parameters in {dtypes.pop()}"
        )
    # The others are constants: this is the block of the chosen rows and columns.
    if len(chosen) < len(risk.space.shapes):
        risk = risk.on(list(chosen))
    with torch.no_grad():
        now = risk.space.flatten(chosen)
    # NaN differs from itself, and moving then says which parameter is not finite.
    return (risk if torch.equal(now, risk.theta) else risk.moved()), chosen


def optimizer_gradients(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the gradients of all parameters that have one; raise if they are sparse."""
    grads = {p: p.grad for p in parameters(optimizer) if p.grad is not None}
    if any(grad.is_sparse for grad in grads.values()):
        raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
    return grads


def require_curvature(optimizer: Optimizer, known: bool) -> None:
    """Raise before a step for which :meth:`CurvatureOptimizer.update_curvature` is missing."""
    if not known:
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"{kind} needs the curvature of every parameter with a gradient before this step: call "
            "optimizer.update_curvature(ritz.Risk(model, loss_fn, [batch])), as ritz.training.fit "
            "does"
        )


def require_measurement(optimizer: Optimizer, known: bool, error: Exception) -> None:
    """Raise after a measurement that failed by roundoff, unless there is an earlier one to keep."""
    if not known:
        raise ValueError(
            f"{type(optimizer).__name__} cannot measure a curvature below its own roundoff, as of "
            "a loss near zero: use float64"
        ) from error


def descend(
    p: Tensor, direction: Tensor, state: dict[str, Any], group: dict[str, Any], rate: float
) -> None:
    r"""Move a parameter: :math:`w \leftarrow (1 - \alpha\gamma) w - \alpha b`, in place.

    The group has ``momentum``, ``weight_decay`` and may have ``nesterov``. The buffer
    :math:`b \leftarrow \rho b + d` is in ``state`` as soon as there is momentum.
    """
    momentum, update = group["momentum"], direction
    if momentum or "momentum_buffer" in state:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].mul_(momentum).add_(direction)
        # Nesterov's gradient is that of the point ahead, in the form of torch: d + rho b.
        update = direction + momentum * buffer if group.get("nesterov") else buffer
    p.mul_(1 - rate * group["weight_decay"]).sub_(update, alpha=rate)


def evaluate(closure: Any) -> Any:
    """Return the loss of a closure, or ``None`` without one."""
    # The closure runs a backward pass; the step around it has no gradient.
    with torch.enable_grad():
        return None if closure is None else closure()


def finite_loss(risk: Risk) -> float:
    """Return the loss, or infinity if a step has led where it is not finite."""
    try:
        return risk.loss()
    except ValueError:
        return math.inf
