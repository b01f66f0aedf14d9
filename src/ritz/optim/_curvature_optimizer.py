"""`CurvatureOptimizer`, the protocol of optimisers that need curvature, and their shared code."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, Protocol, final, get_args, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ritz._core.checks import check_choice
from ritz._core.params import parameters
from ritz.curvature import CurvatureOperator, Risk, fisher, ggn, hessian
from ritz.curvature._shared import check_risk, known_loss

NewtonMatrix = Literal["hessian", "ggn", "fisher"]
_MATRICES = {"hessian": hessian, "ggn": ggn, "fisher": fisher}


@runtime_checkable
class CurvatureOptimizer(Protocol):
    """Protocol of optimisers that need the curvature of the loss, at intervals or every step.

    :func:`ritz.training.fit` calls both methods with the batch of the step, or with a larger
    curvature batch. In your own training loop, add two lines::

        for step, (inputs, labels) in enumerate(batches):
            if optimizer.curvature_due(step):
                optimizer.update_curvature(ritz.Risk(model, cross_entropy, [(inputs, labels)]))
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    As long as the model and the ``loss_fn`` object stay the same, matrix-vector products are traced
    once for each shape of batch. This holds for a new ``Risk`` as well as for
    ``risk.moved(batch)``. If the model has batch norm, pass ``batch_norm="train"`` to ``Risk``, so
    that curvature and gradient belong to the same loss.

    To write such an optimiser, subclass ``torch.optim.Optimizer`` and define the two methods. Keep
    everything that a step reads in ``state`` or ``param_groups``, so that a run can be resumed.
    """

    def curvature_due(self, step: int) -> bool:
        """Return whether the curvature must be updated before a step.

        Args:
            step: Number of steps taken so far.
        """

    def update_curvature(self, risk: Risk) -> None:
        """Measure the curvature that the next steps need.

        Args:
            risk: A :class:`~ritz.Risk` on a batch. If the weights of the model have changed since
                it was created, the current weights are used.
        """


@final
class TracedMatrix:
    """The curvature matrix that an optimiser measures repeatedly. The model is traced once.

    The trace is not part of the state of the optimiser. After loading a state, the model is traced
    again.
    """

    def __init__(self) -> None:
        self._op: CurvatureOperator | None = None

    def refresh(
        self, optimizer: Optimizer, risk: Risk
    ) -> tuple[CurvatureOperator, dict[str, Tensor], torch.Generator]:
        """Return the matrix for the next refresh, its parameters by name, and a random generator.

        The groups of the optimiser must have ``matrix``, ``seed`` and ``num_refreshes``. The last
        one is increased by one.
        """
        risk, params = optimizer_risk(optimizer, risk)
        first = optimizer.param_groups[0]
        number = first["num_refreshes"] + 1
        # The number is part of the state, so that a resumed run draws the same random numbers.
        generator = torch.Generator().manual_seed(first["seed"] * 1_000_003 + number)
        op = self.operator(risk, first["matrix"], generator=generator)
        for group in optimizer.param_groups:
            group["num_refreshes"] = number
        return op, params, generator

    def operator(
        self, risk: Risk, matrix: NewtonMatrix, *, generator: torch.Generator | None = None
    ) -> CurvatureOperator:
        """Return the matrix of a risk. Reuse the traces of the last call if they are valid."""
        # If model, loss and shapes are the same, only the primal part is computed again.
        op = self._op
        if op is not None and op.matrix == matrix and not risk.mismatch(op.risk):
            self._op = op.at(risk, generator=generator)
        else:
            options: Any = {"generator": generator} if matrix == "fisher" else {}
            self._op = _MATRICES[matrix](risk, **options)
        return self._op


class MatrixOptimizer(Optimizer, ABC):
    """Base class of optimisers that measure a curvature matrix, one for all groups.

    Attributes:
        measured: Measured values in the groups, with their initial values. They are not among the
            defaults, because the cyclic schedulers of torch replace the momentum of an optimiser
            that has it as a default.
    """

    measured: ClassVar[dict[str, Any]]

    def __init__(self, params: ParamsT, settings: dict[str, Any]) -> None:
        self._forget()
        super().__init__(params, settings)

    @property
    @abstractmethod
    def _shared(self) -> tuple[str, ...]:
        """Settings that must be the same in all groups."""

    @abstractmethod
    def _forget(self) -> None:
        """Forget everything that is not part of the state."""

    @abstractmethod
    def _check(self, settings: dict[str, Any]) -> None:
        """Raise unless the settings of a group are valid."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # Rules and schedules may have changed the first group since the optimiser was created.
        first = self.param_groups[0] if self.param_groups else self.defaults | self.measured
        shared, measured = ({k: first[k] for k in names} for names in (self._shared, self.measured))
        group = shared | param_group | measured
        self._check(self.defaults | group)
        for name in shared if self.param_groups else ():
            if group[name] != first[name]:
                raise ValueError(
                    f"{name} must be the same in all groups, got {group[name]} beside {first[name]}"
                )
        super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        # The rounding of sums depends on the alignment in memory, which tensors from a file may
        # lack. A copy is aligned like the original.
        for entry in self.state.values():
            entry.update({k: v.clone() for k, v in entry.items() if isinstance(v, Tensor)})

    def curvature_due(self, step: int) -> bool:
        """Return whether the curvature must be measured before a step."""
        return step % int(self.param_groups[0].get("interval", 1)) == 0


class LostGradientError(ArithmeticError):
    """The gradients of a loss near zero are roundoff."""


def check_gradient_digits(risk: Risk) -> None:
    """Raise if the cross-entropy is so small that its gradients, as torch computes them, are lost.

    The gradient of a certain label is ``p - 1``, of the size of the loss, with an error of machine
    precision. The curvature keeps its digits and is of the size of the loss as well, so Newton
    steps would be roundoff divided by a tiny number.
    """
    known = known_loss(risk.loss_fn)
    if known is None or known.kind == "squared_error":
        return
    loss, unit = risk.loss(), torch.finfo(risk.theta.dtype).eps
    if loss < 16 * unit:
        raise LostGradientError(f"the loss is {loss:.2g}, and its roundoff is {unit:.2g}")


def check_matrix(matrix: str) -> None:
    """Raise unless ``matrix`` is ``hessian``, ``ggn`` or ``fisher``."""
    check_choice("matrix", matrix, get_args(NewtonMatrix))


def optimizer_risk(optimizer: Optimizer, risk: Risk) -> tuple[Risk, dict[str, Tensor]]:
    """Return the risk as a function of the parameters of an optimiser, and these by name.

    The risk is at the current weights. Frozen parameters, and those of other optimisers, are
    constants.
    """
    check_risk(risk)
    mine = {id(p) for p in parameters(optimizer)}
    named = dict(risk.model.named_parameters())
    # A tied parameter has a single name here, as in the risk.
    names = [name for name in risk.space.shapes if id(named[name]) in mine]
    chosen: dict[str, Tensor] = {name: named[name] for name in names}
    kind = type(optimizer).__name__
    if not chosen:
        raise ValueError(f"risk must have the model that this {kind} trains, got {risk}")
    # The curvature between parameters of different models is not known. Without it, the step would
    # not be a Newton step.
    known = {id(p) for p in named.values()}
    if any(id(p) not in known for p in parameters(optimizer)):
        raise ValueError(f"risk must have the model of all parameters of {kind}, got another model")
    if dtypes := {p.dtype for p in chosen.values()} - {risk.space.dtype}:
        raise ValueError(
            f"{kind} needs a risk in the dtype of its parameters, float32 or float64, got "
            f"{risk.space.dtype} for parameters in {dtypes.pop()}"
        )
    # The other parameters are constants, so the matrix is a diagonal block.
    if len(chosen) < len(risk.space.shapes):
        risk = risk.on(list(chosen))
    with torch.no_grad():
        now = risk.space.flatten(chosen)
    # NaN differs from itself. moved() then raises and names the parameter that is not finite.
    return (risk if torch.equal(now, risk.theta) else risk.moved()), chosen


def optimizer_gradients(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the gradients of all parameters that have one. Raise if one is sparse."""
    grads = {p: p.grad for p in parameters(optimizer) if p.grad is not None}
    if any(grad.is_sparse for grad in grads.values()):
        raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
    return grads


def require_curvature(optimizer: Optimizer, known: bool) -> None:
    """Raise if a step is taken without :meth:`CurvatureOptimizer.update_curvature` before it."""
    if not known:
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"{kind} needs the curvature of every parameter with a gradient before this step: call "
            "optimizer.update_curvature(ritz.Risk(model, loss_fn, [batch])), as ritz.training.fit "
            "does"
        )


def require_measurement(optimizer: Optimizer, known: bool, error: Exception) -> None:
    """Raise if a measurement failed because of roundoff and there is no earlier one to keep."""
    if not known:
        wide = all(p.dtype == torch.float64 for p in parameters(optimizer))
        raise ValueError(
            f"{type(optimizer).__name__} cannot measure the curvature, because it is smaller than "
            "its roundoff, as at a loss near zero" + ("" if wide else ": use float64")
        ) from error


def descend(
    optimizer: Optimizer, directions: dict[Tensor, Tensor], group: dict[str, Any], rate: float
) -> None:
    r"""Update parameters in place: :math:`w \leftarrow (1 - \alpha\gamma) w - \alpha b`.

    With momentum, the buffer :math:`b \leftarrow \rho b + d` is stored in the state.

    Args:
        optimizer: The optimiser.
        directions: Directions :math:`d` by parameter. Others are not changed.
        group: A group of parameters with ``momentum`` and ``weight_decay``, and perhaps
            ``nesterov``.
        rate: Learning rate :math:`\alpha`.
    """
    params = [p for p in group["params"] if p in directions]
    if not params:
        return
    momentum, updates = group["momentum"], [directions[p] for p in params]
    states = [optimizer.state[p] for p in params]
    # Lists of tensors, so that all parameters together need only a few kernels.
    if momentum or any("momentum_buffer" in state for state in states):
        for p, state in zip(params, states, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, updates)
        # Nesterov's momentum in the form of torch: d + rho b.
        nesterov = group.get("nesterov")
        updates = (
            list(torch._foreach_add(updates, buffers, alpha=momentum)) if nesterov else buffers
        )
    if group["weight_decay"]:
        torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
    torch._foreach_add_(params, updates, alpha=-rate)


def evaluate(closure: Any) -> Any:
    """Return the loss of a closure, or ``None`` without one."""
    # The closure runs a backward pass, but the step that calls it runs under no_grad.
    with torch.enable_grad():
        return None if closure is None else closure()


def finite_loss(risk: Risk) -> float:
    """Return the loss, or infinity if it is not finite."""
    try:
        return risk.loss()
    except ValueError:
        return math.inf
