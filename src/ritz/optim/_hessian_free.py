"""`HessianFree`: damped Newton steps, each from a system solved by conjugate gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ritz._core.blocks import inner_products
from ritz._core.checks import check_choice, check_count, check_range, check_type, is_below
from ritz._core.params import check_setting
from ritz._core.results import AsymmetryError
from ritz.curvature import CurvatureOperator, Risk
from ritz.operators import ShiftedOperator
from ritz.optim._curvature_optimizer import (
    MatrixOptimizer,
    TracedMatrix,
    evaluate,
    optimizer_gradients,
    optimizer_risk,
    require_curvature,
)
from ritz.optim._damping import TUNING as DAMPING
from ritz.optim._damping import levenberg_marquardt, reduction_ratio
from ritz.spectra import NotPositiveDefiniteError, lanczos, solve


@dataclass(frozen=True, slots=True)
class Tuning:
    """When iterations stop, and how often a step is shortened."""

    # The iterations stop in iteration i if the last k = max(10, i / 10) of them gained less than
    # k times this share of the total reduction: Martens (2010), section 4.4.
    gain: float = 5e-4
    least: int = 10
    share: float = 0.1
    # Maximum number of lengths that are tried for a step, down to 1e-7 of the first. In training on
    # digits with batches of 64 (examples/second_order.py), accepted steps had needed up to 32.
    max_trials: int = 40


TUNING = Tuning()


@final
class HessianFree(MatrixOptimizer):
    r"""Damped Newton steps by conjugate gradients: Hessian-free optimisation.

    .. math::
        (G + \delta I)\, x = -g, \qquad w \leftarrow (1 - \alpha\gamma)\, w + \alpha x, \qquad
        \rho = \frac{L(w) - L(w + \alpha x)}{-(\alpha g^\top x + \alpha^2 x^\top G x / 2)}

    :math:`G` is the Gauss-Newton matrix of the curvature batch. The iterations start from
    :math:`\beta` times the last :math:`x`. They stop when further iterations gain little (Martens'
    rule), or when the relative residual is the square root of machine precision.

    **Damping.** For :math:`\rho \ge \frac14` the step is taken, and for :math:`\rho > \frac34` the
    damping :math:`\delta` becomes :math:`\frac23 \delta` (Levenberg and Marquardt). Otherwise
    :math:`x` is multiplied by :math:`\frac23` and :math:`\delta` by :math:`\frac32`, until
    :math:`\rho \ge \frac14`. Apart from weight decay and roundoff, a step therefore never increases
    the loss of the curvature batch. If no length is accepted, or if roundoff makes the system
    indefinite, no step is taken and :math:`\delta` becomes :math:`\frac32 \delta`. If the reduction
    is below the roundoff of the loss, the step is taken and :math:`\delta` stays the same. The
    quadratic model in :math:`\rho` has no damping. With ``adapt=False`` every step is taken in
    full, and an indefinite system is an error.

    **Hessian.** Products with the absolute value :math:`|H|` would need its eigenvectors. Therefore
    ``matrix="hessian"`` takes ``max_steps`` Lanczos steps from :math:`g`, and the step is
    :math:`-\|g\|\, V (|T| + \delta)^{-1} e_1` in the Krylov space. The last :math:`x` is not used.

    :meth:`update_curvature` must be called before every step, at the weights of the step, as
    :func:`ritz.training.fit` does. Cost of a step: one product per iteration, three more with
    ``ggn``. If the damping is adapted, two losses, and one more for each time that the step is
    shortened. Memory: seven vectors, and ``max_steps`` more with ``hessian``. The current
    :math:`\delta` and :math:`\rho` are ``group["delta"]`` and ``group["ratio"]`` (``None`` if it is
    not known). The number of iterations of the last step is ``group["num_iterations"]``.

    Args:
        params: Parameters or groups of them. ``weight_decay`` may differ between groups, and
            ``lr`` with ``adapt=False``.
        lr: Factor :math:`\alpha` of the step.
        delta: Initial damping :math:`\delta`, above 0.
        max_steps: Maximum number of iterations.
        decay: Factor :math:`\beta` of the last solution.
        adapt: Adapt the damping.
        matrix: ``ggn`` or ``hessian``.
        weight_decay: Decoupled decay :math:`\gamma`.

    Reference: Martens (2010), Deep learning via Hessian-free optimization.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        *,
        delta: float = 1.0,
        max_steps: int = 50,
        decay: float = 0.95,
        adapt: bool = True,
        matrix: Literal["ggn", "hessian"] = "ggn",
        weight_decay: float = 0.0,
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "delta": delta, "max_steps": max_steps}
        settings |= {"decay": decay, "adapt": adapt, "matrix": matrix}
        super().__init__(params, settings | {"weight_decay": weight_decay})

    measured: ClassVar[dict[str, Any]] = {"ratio": None, "num_iterations": 0}

    @property
    def _shared(self) -> tuple[str, ...]:
        # Adapting the damping compares losses after a step with a single learning rate.
        adapts = (self.param_groups or [self.defaults])[0]["adapt"]
        return "delta", "max_steps", "decay", "adapt", "matrix", *(("lr",) if adapts else ())

    def _forget(self) -> None:
        self._traced = TracedMatrix()
        self._op: CurvatureOperator | None = None
        self._params: dict[str, Tensor] = {}

    def _check(self, settings: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            check_setting(name, settings[name])
        # delta must be above 0, because without damping the system may be singular.
        check_setting("delta", settings["delta"], zero=False)
        check_count("max_steps", settings["max_steps"])
        check_range("decay", settings["decay"], low=0.0, high=1.0)
        check_type("adapt", settings["adapt"], bool, "True or False")
        check_choice("matrix", settings["matrix"], get_args(Literal["ggn", "hessian"]))

    @property
    def adapts_damping(self) -> bool:
        """Whether the optimiser adapts the damping itself."""
        return bool(self.param_groups[0]["adapt"])

    @torch.no_grad()
    def update_curvature(self, risk: Risk) -> None:
        r"""Set the matrix for the next step.

        Args:
            risk: A :class:`~ritz.Risk` on the curvature batch. It also measures :math:`\rho`.
        """
        risk, self._params = optimizer_risk(self, risk)
        self._op = self._traced.operator(risk, self.param_groups[0]["matrix"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of ``closure`` if there is one."""
        loss = evaluate(closure)
        grads = optimizer_gradients(self)
        if not grads:
            return loss
        op: Any = self._op
        require_curvature(self, op is not None and set(grads) <= set(self._params.values()))
        # One flat vector in the order of the risk, whatever the order of the groups.
        params = list(self._params.values())
        # A parameter without a gradient has a zero gradient in the quadratic model.
        gradient = torch.cat([grads.get(p, torch.zeros_like(p)).reshape(-1) for p in params])
        group = self.param_groups[0]
        check_setting("delta", group["delta"], zero=False)  # a schedule may have changed it
        delta = float(group["delta"])
        self._op = None  # the matrix is valid at these weights only
        try:
            solution, curved = self._solve(op, gradient, delta)
        except (AsymmetryError, NotPositiveDefiniteError) as error:
            if not group["adapt"]:
                raise ValueError(
                    f"delta must exceed the roundoff of the matrix, got {delta:.3g} with "
                    "adapt=False: increase delta, or use float64"
                ) from error
            self._reject(delta)
            return loss
        scale = 1.0
        # A gradient with NaN leads to weights with NaN, which show that the run has diverged.
        if group["adapt"] and bool(gradient.isfinite().all()):
            scale = self._search(op.risk, gradient, solution, curved)
        if scale:
            self._move(grads, params, solution * scale)
        return loss

    def _search(self, risk: Risk, gradient: Tensor, solution: Tensor, curved: Tensor) -> float:
        """Adapt the damping. Return the factor by which the step is shortened, or 0 for no step."""
        rates = {float(group["lr"]) for group in self.param_groups}
        if len(rates) > 1:
            raise ValueError(f"lr must be the same in all groups with adapt=True, got {rates}")
        rate, loss, slope = rates.pop(), risk.loss(), gradient @ solution
        initial = delta = float(self.param_groups[0]["delta"])
        # Without curvature, x = -g / delta, so 2/3 x is the solution for the damping 3/2 delta.
        for trial in range(TUNING.max_trials):
            scale = DAMPING.factor**-trial
            length = rate * scale
            # The quadratic model predicts the reduction -(alpha g'x + alpha^2 x'Gx / 2).
            predicted = -float(length * (slope + 0.5 * length * curved))
            ratio = reduction_ratio(loss, risk.at(risk.theta + length * solution), predicted)
            delta = levenberg_marquardt(delta, ratio)
            if ratio is None and trial:
                break  # a shorter step has no effect that could be measured
            if ratio is None or ratio >= DAMPING.poor:
                self._note(ratio=ratio, delta=delta)
                return scale
        self._reject(initial)
        return 0.0

    def _solve(
        self, op: CurvatureOperator, gradient: Tensor, delta: float
    ) -> tuple[Tensor, Tensor]:
        r"""Return the step :math:`x` and the quadratic form :math:`x^\top G x` without damping."""
        group = self.param_groups[0]
        self._note(num_iterations=0)
        total = gradient.sum()
        if not bool(gradient.any()) or not bool(total.isfinite()):
            # Zero, or NaN. As with the optimisers of torch, a gradient with NaN leads to weights
            # with NaN, which show a training loop that the run has diverged.
            return gradient * total, total
        if group["matrix"] == "hessian":
            return self._absolute(op, gradient, delta)
        last = [self.state[p].get("direction") for p in self._params.values()]
        start = None
        if group["decay"] and all(part is not None for part in last):
            parts = [part.reshape(-1) for part in last if part is not None]
            start = group["decay"] * torch.cat(parts)
        # G is positive semi-definite, and the damping shifts all its eigenvalues by delta, so that
        # the system is positive definite.
        damped = ShiftedOperator(op, delta)
        limits: Any = {"max_steps": group["max_steps"], "stop": MartensStop()}
        run = solve(damped, -gradient, initial=start, **limits)
        self._note(num_iterations=len(run.history) - 1)
        # x'Gx without damping, for the quadratic model.
        return run.x, run.x @ (op @ run.x)

    def _absolute(
        self, op: CurvatureOperator, gradient: Tensor, delta: float
    ) -> tuple[Tensor, Tensor]:
        """Return the step in the Krylov space of the gradient, and its quadratic form with |H|."""
        steps = min(self.param_groups[0]["max_steps"], op.shape[0])
        # Lanczos on the damped matrix: roundoff below delta is then no asymmetry.
        damped = ShiftedOperator(op, delta)
        run = lanczos(damped, num_steps=steps, start=gradient, vectors=True)
        self._note(num_iterations=run.num_products)
        vectors: Any = run.vectors
        sizes = (run.values - delta).abs().to(vectors)
        # g is in the span of the Ritz vectors, since Lanczos starts from g.
        parts = -inner_products(vectors, gradient).to(vectors) / (sizes + delta)
        return vectors @ parts, parts @ (sizes * parts)

    def _reject(self, delta: float) -> None:
        """Raise the damping. The next iterations start from zero."""
        self._note(ratio=None, delta=levenberg_marquardt(delta, -math.inf))
        for p in self._params.values():
            self.state[p].pop("direction", None)

    def _note(self, **values: Any) -> None:
        for group in self.param_groups:
            group.update(values)

    def _move(self, grads: dict[Tensor, Tensor], params: list[Tensor], solution: Tensor) -> None:
        pieces = dict(zip(params, solution.split([p.numel() for p in params]), strict=True))
        for p, piece in pieces.items():
            self.state[p]["direction"] = piece.view_as(p).clone()
        for group in self.param_groups:
            rate = float(group["lr"])
            # w <- (1 - alpha gamma) w + alpha x
            for p in group["params"]:
                if p in grads:
                    p.mul_(1 - rate * group["weight_decay"])
                    p.add_(pieces[p].view_as(p), alpha=rate)


@final
class MartensStop:
    r"""Stop conjugate gradients when the quadratic form :math:`\phi_i` decreases too little.

    .. math:: \phi_i < 0, \quad \frac{\phi_i - \phi_{i-k}}{\phi_i} < k \epsilon, \quad
        k = \max(10, i / 10), \quad \epsilon = 5 \cdot 10^{-4}
    """

    def __init__(self) -> None:
        self.forms: list[float] = []

    def __call__(self, forms: Tensor) -> bool:
        """Take the quadratic form of the single column, and return whether to stop."""
        self.forms.append(float(forms[0]))
        now, done = self.forms[-1], len(self.forms)
        back = max(TUNING.least, math.ceil(TUNING.share * done))
        if done <= back or not now < 0:
            return False
        return is_below((now - self.forms[-1 - back]) / now, back * TUNING.gain)
