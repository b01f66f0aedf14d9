"""``LanczosNewton``: damped Newton steps in the span of Ritz vectors, gradient steps beside it."""

from collections.abc import Callable
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ritz._core.checks import check_choice, check_count
from ritz._core.params import check_setting, parameters
from ritz._core.results import AsymmetryError
from ritz.curvature import CurvatureOperator, Risk
from ritz.operators import DeflatedOperator, LinearOperator
from ritz.optim._curvature import (
    NewtonMatrix,
    TracedMatrix,
    check_matrix,
    descend,
    evaluate,
    is_refresh_due,
    optimizer_gradients,
    require_curvature,
    require_measurement,
    settings_of_group,
)
from ritz.spectra import lanczos

Start = Literal["basis", "gradient", "random"]
# One matrix has one basis, and one damping makes its inverse.
SHARED = ("delta", "eta", "num_steps", "interval", "matrix", "start", "seed")


@final
class LanczosNewton(Optimizer):
    r"""Damped Newton steps along Ritz vectors, and damped gradient steps orthogonal to them.

    .. math::
        w \leftarrow (1 - \alpha\gamma)\, w - \alpha \Big[ \sum_{i=1}^k \Big( \frac{1}
        {\eta |\lambda_i| + \delta} - \frac1\delta \Big) u_i u_i^\top g + \frac g\delta \Big]

    with the Ritz pairs :math:`(\lambda_i, u_i)` of :math:`k` Lanczos steps on the Hessian, the
    Gauss-Newton or a Fisher matrix. For converged pairs this is
    :math:`-\alpha (|H| + \delta)^{-1} g` if the eigenvalues that were not found are small beside
    :math:`\delta`. :math:`\eta > 1` slows the sharp directions down (LOPT[:math:`\eta`]). With
    momentum :math:`\rho` the bracket is added to a buffer, :math:`b \leftarrow \rho b + [\cdot]`.

    The pairs are measured every ``interval`` steps by :meth:`update_curvature`, which
    :func:`ritz.training.fit` calls; see :class:`CurvatureOptimizer` for your own loop. The last
    pairs stay where roundoff exceeds the curvature, as near a loss of zero in float32.

    ============  ===============================================================================
    ``start``     start vector of a refresh
    ============  ===============================================================================
    ``basis``     the last Ritz vectors, weighted by :math:`|\lambda_i|`, and random at first: the
                  sharp directions change slowly, and the run finds them again in fewer steps
    ``gradient``  the gradient on the curvature batch, which costs one gradient: the step for this
                  gradient is accurate long before the pairs have converged, as in conjugate
                  gradients; steps for other gradients gain nothing
    ``random``    a Gaussian vector
    ============  ===============================================================================

    Cost of a refresh: :math:`k` products, and about two gradients to prepare them. A step reads
    the basis five times. Memory: :math:`k` vectors, and as many again during a refresh. The basis
    is in ``state``, so that a resumed run takes the same steps.

    Args:
        params: Parameters or groups of them. ``lr``, ``momentum`` and ``weight_decay`` may differ
            between groups.
        lr: Learning rate :math:`\alpha`.
        delta: Damping :math:`\delta`, above 0; see :class:`Damping` for rules that set it.
        eta: Factor :math:`\eta` of the curvature along the Ritz vectors.
        num_steps: Number :math:`k` of Lanczos steps, at most that of the parameters.
        interval: Number of steps between refreshes.
        matrix: ``hessian`` (absolute values of its eigenvalues), ``ggn`` or ``fisher`` (labels
            drawn from the model).
        momentum: Momentum :math:`\rho`.
        weight_decay: Decoupled decay :math:`\gamma`.
        start: Start vector of a refresh; see the table.
        seed: Seed of start vectors and drawn labels.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, section 4 and
    C.1; Granziol, *Spectral Machine Learning*, section 4.3.1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        *,
        delta: float = 10.0,
        eta: float = 1.0,
        num_steps: int = 20,
        interval: int = 1,
        matrix: NewtonMatrix = "hessian",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        start: Start = "basis",
        seed: int = 0,
    ) -> None:
        self._traced = TracedMatrix()
        settings: dict[str, Any] = {"lr": lr, "delta": delta, "eta": eta, "num_steps": num_steps}
        settings |= {"interval": interval, "matrix": matrix, "momentum": momentum}
        settings |= {"weight_decay": weight_decay, "start": start, "seed": seed}
        super().__init__(params, settings | {"num_refreshes": 0, "ritz_values": []})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = settings_of_group(self, param_group, SHARED)
        settings = self.defaults | group
        for name in ("lr", "eta", "momentum", "weight_decay"):
            check_setting(name, settings[name])
        # Flat directions have no other curvature.
        check_setting("delta", settings["delta"], zero=False)
        check_count("num_steps", settings["num_steps"])
        check_count("interval", settings["interval"])
        check_count("seed", settings["seed"], low=0)
        check_matrix(settings["matrix"])
        check_choice("start", settings["start"], get_args(Start))
        super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._traced = TracedMatrix()
        for entry in self.state.values():
            if "basis" in entry:
                # Tensors of a file may lie anywhere in memory, and sums over vectors are rounded
                # by their alignment. A copy has the alignment of the original.
                entry["basis"] = entry["basis"].clone()

    def curvature_due(self, step: int) -> bool:
        """Return whether the pairs are to be refreshed before a step; see the protocol."""
        return is_refresh_due(self, step)

    @torch.no_grad()
    def update_curvature(self, risk: Risk) -> None:
        """Measure the Ritz pairs at the current weights, from the last ones.

        Args:
            risk: Loss on the curvature batch.
        """
        op, params, generator = self._traced.refresh(self, risk)
        count = min(self.param_groups[0]["num_steps"], op.shape[0])
        try:
            values, vectors = ritz_pairs(op, count, self._start(op, params), generator)
        except AsymmetryError as error:
            require_measurement(self, all("basis" in self.state[p] for p in params.values()), error)
            return
        place = 0
        # Stored by parameter, so that state_dict() and a move to another device treat it as
        # torch treats the momentum.
        for p in params.values():
            # Rows of the basis in the shape of the parameter: (k, *shape).
            rows = vectors[place : place + p.numel()].T
            self.state[p]["basis"] = rows.reshape(len(values), *p.shape).contiguous()
            place += p.numel()
        for group in self.param_groups:
            group["ritz_values"] = values.tolist()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of ``closure`` if there is one."""
        loss = evaluate(closure)
        grads = optimizer_gradients(self)
        require_curvature(self, all("basis" in self.state[p] for p in grads))
        if grads:
            self._move(self._directions(grads))
        return loss

    def _directions(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        r"""Return :math:`U (\eta |\Lambda| + \delta)^{-1} U^\top g + (g - U U^\top g)/\delta`.

        This is the bracket. Its coefficients :math:`-\eta|\lambda| / (\delta (\eta|\lambda| +
        \delta))` do not cancel, but their sum with :math:`1/\delta` would for tiny :math:`\delta`.
        """
        group = self.param_groups[0]
        params = [p for p in parameters(self) if "basis" in self.state.get(p, {})]
        rows = {p: self.state[p]["basis"].flatten(1) for p in params}
        # A parameter without a gradient does not move. It has zeros here, since the basis is
        # orthonormal over all parameters together.
        rest = {p: grads.get(p, torch.zeros_like(p)).detach().flatten().clone() for p in params}
        inside: Any = 0.0
        # Twice is enough: what roundoff leaves of g in the span would be divided by delta.
        for _ in range(2):
            part: Any = sum(rows[p] @ rest[p] for p in params)
            inside = inside + part
            for p in params:
                rest[p] -= part @ rows[p]
        # 1 / (eta |lambda| + delta) inside the span and 1 / delta beside it: the bracket without
        # the difference of large numbers in its printed form.
        delta = float(group["delta"])
        sizes = torch.tensor(group["ritz_values"], dtype=torch.float64).abs() * group["eta"] + delta
        inside = inside / sizes.to(inside)
        return {p: (rest[p] / delta + inside @ rows[p]).view_as(p) for p in grads}

    def _move(self, directions: dict[Tensor, Tensor]) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p in directions:
                    descend(p, directions[p], self.state[p], group, float(group["lr"]))

    def _start(self, op: CurvatureOperator, params: dict[str, Tensor]) -> Tensor | None:
        """Return the start vector of a refresh, or ``None`` for a random one."""
        kind, values = self.param_groups[0]["start"], self.param_groups[0]["ritz_values"]
        start = None
        if kind == "gradient":
            start = op.risk.gradient()
        elif kind == "basis" and all("basis" in self.state[p] for p in params.values()):
            weights = torch.tensor(values, dtype=op.dtype, device=op.device).abs()
            # sum_i |lambda_i| u_i: the sharpest directions, which matter most, come first.
            start = torch.cat(
                [weights @ self.state[p]["basis"].flatten(1) for p in params.values()]
            )
        return None if start is None or not bool(start.any()) else start


def ritz_pairs(
    op: CurvatureOperator,
    count: int,
    start: Tensor | None,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return up to ``count`` Ritz values and vectors ``(n, k)`` from ``count`` products.

    A Krylov space holds one vector of each eigenspace. If it is exhausted before, another run goes
    on beside it, unless nothing but roundoff is left there.
    """
    values = torch.empty(0, dtype=torch.float64)
    vectors = torch.empty(op.shape[0], 0, dtype=op.dtype, device=op.device)
    inner: LinearOperator = op
    while True:
        left = count - len(values)
        run = lanczos(inner, num_steps=left, start=start, vectors=True, generator=generator)
        values = torch.cat([values, run.values])
        vectors = torch.cat([vectors, run.vectors], 1)  # type: ignore[list-item]
        if run.status.outcome != "breakdown" or len(values) == count:
            return values, vectors
        # The span is invariant: other vectors of repeated eigenvalues lie beside it.
        inner = DeflatedOperator(op, vectors)
        start = torch.randn(op.shape[0], generator=generator, dtype=torch.float64).to(vectors)
        # Twice is enough: once leaves roundoff times the part that was removed.
        for _ in range(2):
            start = start - vectors @ (vectors.T @ start)
        # Products with the whole matrix leave its roundoff in what remains of it.
        noise = torch.finfo(op.dtype).eps ** 0.5 * float(values.abs().max())
        if not float((inner @ start).norm()) > noise * float(start.norm()):
            return values, vectors
