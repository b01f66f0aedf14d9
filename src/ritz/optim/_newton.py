"""`LanczosNewton`: damped Newton steps along Ritz vectors, gradient steps orthogonal to them."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ritz._core.blocks import orthonormalize, row_products
from ritz._core.checks import check_choice, check_count
from ritz._core.params import check_momentum, check_setting, parameters
from ritz._core.results import AsymmetryError
from ritz.curvature import CurvatureOperator, Risk
from ritz.operators import DeflatedOperator, LinearOperator
from ritz.optim._curvature_optimizer import (
    LostGradientError,
    MatrixOptimizer,
    NewtonMatrix,
    TracedMatrix,
    check_gradient_digits,
    check_matrix,
    descend,
    evaluate,
    optimizer_gradients,
    require_curvature,
    require_measurement,
)
from ritz.spectra import lanczos

Start = Literal["basis", "gradient", "random"]


@final
class LanczosNewton(MatrixOptimizer):
    r"""Damped Newton steps along Ritz vectors, and damped gradient steps orthogonal to them.

    .. math::
        w \leftarrow (1 - \alpha\gamma)\, w - \alpha \Big[ \sum_{i=1}^k \Big( \frac{1}
        {\eta |\lambda_i| + \delta} - \frac1\delta \Big) u_i u_i^\top g + \frac g\delta \Big]

    :math:`(\lambda_i, u_i)` are the Ritz pairs of :math:`k` Lanczos steps with the Hessian, the
    Gauss-Newton or a Fisher matrix. If the pairs have converged and the other eigenvalues are small
    compared with :math:`\delta`, the step is :math:`-\alpha (|H| + \delta)^{-1} g`.
    :math:`\eta > 1` makes steps along sharp directions smaller (LOPT[:math:`\eta`]). With momentum
    :math:`\rho` the bracket is added to a buffer, :math:`b \leftarrow \rho b + [\cdot]`.

    The pairs are measured every ``interval`` steps by :meth:`update_curvature`, which
    :func:`ritz.training.fit` calls. See :class:`CurvatureOptimizer` for your own training loop. The
    last pairs are kept if roundoff exceeds the curvature, as near a loss of zero in float32.

    ============  ===============================================================================
    ``start``     start vector of a refresh
    ============  ===============================================================================
    ``basis``     the last Ritz vectors, weighted by :math:`|\lambda_i|`; random at first. The sharp
                  directions change slowly, so that Lanczos finds them again in fewer steps.
    ``gradient``  the gradient on the curvature batch, which costs one gradient. The step for this
                  gradient is accurate long before the pairs have converged, as in conjugate
                  gradients. Steps for other gradients do not become more accurate.
    ``random``    a Gaussian vector
    ============  ===============================================================================

    Cost of a refresh: :math:`k` products, and about two gradients to prepare them. A step reads
    the basis five times. Memory: :math:`k` vectors, and twice as many during a refresh. The basis
    is in ``state``, so that a resumed run takes the same steps. The entries of ``state`` are views
    of one tensor ``(k, n)``.

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
        settings: dict[str, Any] = {"lr": lr, "delta": delta, "eta": eta, "num_steps": num_steps}
        settings |= {"interval": interval, "matrix": matrix, "momentum": momentum}
        super().__init__(
            params, settings | {"weight_decay": weight_decay, "start": start, "seed": seed}
        )

    def __repr__(self) -> str:
        values = self.param_groups[0]["ritz_values"]
        return super().__repr__().replace(str(values), f"{len(values)} values")

    measured: ClassVar[dict[str, Any]] = {"num_refreshes": 0, "ritz_values": []}

    @property
    def _shared(self) -> tuple[str, ...]:
        return "delta", "eta", "num_steps", "interval", "matrix", "start", "seed"

    def _forget(self) -> None:
        self._traced = TracedMatrix()
        self._rows: Tensor | None = None  # the basis of all parameters, (k, n)

    def _check(self, settings: dict[str, Any]) -> None:
        for name in ("lr", "eta", "weight_decay"):
            check_setting(name, settings[name])
        check_momentum(settings["momentum"])
        # delta must be above 0, because flat directions have no other curvature.
        check_setting("delta", settings["delta"], zero=False)
        for name in ("num_steps", "interval"):
            check_count(name, settings[name])
        check_count("seed", settings["seed"], low=0)
        check_matrix(settings["matrix"])
        check_choice("start", settings["start"], get_args(Start))

    @torch.no_grad()
    def update_curvature(self, risk: Risk) -> None:
        """Measure the Ritz pairs at the current weights.

        Args:
            risk: A :class:`~ritz.Risk` on the curvature batch.
        """
        op, params, generator = self._traced.refresh(self, risk)
        count = min(self.param_groups[0]["num_steps"], op.shape[0])
        known = all("basis" in self.state[p] for p in params.values())
        try:
            # The first pairs are measured in any case. No step is longer than g / delta.
            if known:
                check_gradient_digits(op.risk)
            values, vectors = ritz_pairs(op, count, self._start(op, params), generator)
        except (AsymmetryError, LostGradientError) as error:
            require_measurement(self, known, error)
            return
        sizes = [p.numel() for p in params.values()]
        pieces = dict(zip(params.values(), vectors.T.split(sizes, 1), strict=True))
        # In the order of the groups, in which a resumed run finds the parameters.
        order = [p for p in parameters(self) if p in pieces]
        same = all(p is q for p, q in zip(order, pieces, strict=True))
        rows = vectors.T if same else torch.cat([pieces[p] for p in order], 1)
        self._store(order, rows.contiguous())
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

        This equals the bracket of the class docstring. There, the two terms with :math:`1/\delta`
        would cancel for small :math:`\delta`.
        """
        group = self.param_groups[0]
        check_setting("delta", group["delta"], zero=False)  # a schedule may have changed it
        params = [p for p in parameters(self) if "basis" in self.state.get(p, {})]
        U = self._rows
        bases = [self.state[p]["basis"] for p in params]
        # After loading a state, and if the user has moved it, the state has tensors of its own.
        if U is None or any(_place(basis) != _place(U) for basis in bases):
            U = torch.cat([_flat_rows(basis) for basis in bases], 1)
            self._store(params, U)
        # A parameter without a gradient has zeros here, since the basis is orthonormal over all
        # parameters together. It does not move.
        rest = torch.cat([
            (grads[p] if p in grads else torch.zeros_like(p)).detach().flatten() for p in params
        ])  # fmt: skip
        inside: Any = 0.0
        # Twice, because what roundoff leaves of g in the span would be divided by delta.
        for _ in range(2):
            part = row_products(U, rest)
            inside = inside + part
            rest.addmv_(U.T, part.to(rest), alpha=-1)
        # 1 / (eta |lambda| + delta) inside the span, and 1 / delta orthogonal to it.
        delta = float(group["delta"])
        sizes = torch.tensor(group["ritz_values"], dtype=torch.float64).abs() * group["eta"] + delta
        rest.div_(delta).addmv_(U.T, (inside / sizes.to(inside)).to(rest))
        parts = zip(params, rest.split([p.numel() for p in params]), strict=True)
        return {p: part.view_as(p) for p, part in parts if p in grads}

    def _store(self, params: list[Tensor], rows: Tensor) -> None:
        """Store the basis ``(k, n)``: the state of each parameter has a view of its columns."""
        self._rows = rows
        # By parameter, so that state_dict() and load_state_dict() treat the basis like momentum.
        for p, part in zip(params, rows.split([p.numel() for p in params], 1), strict=True):
            self.state[p]["basis"] = part.view(len(rows), *p.shape)

    def _move(self, directions: dict[Tensor, Tensor]) -> None:
        for group in self.param_groups:
            descend(self, directions, group, float(group["lr"]))

    def _start(self, op: CurvatureOperator, params: dict[str, Tensor]) -> Tensor | None:
        """Return the start vector of a refresh, or ``None`` for a random one."""
        kind, values = self.param_groups[0]["start"], self.param_groups[0]["ritz_values"]
        start = None
        if kind == "gradient":
            start = op.risk.gradient()
        elif kind == "basis" and all("basis" in self.state[p] for p in params.values()):
            weights = torch.tensor(values, dtype=op.dtype, device=op.device).abs()
            # sum_i |lambda_i| u_i: the sharpest directions have the largest weights.
            start = torch.cat(
                [weights @ _flat_rows(self.state[p]["basis"]) for p in params.values()]
            )
        return None if start is None or not bool(start.any()) else start


def _place(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _flat_rows(basis: Tensor) -> Tensor:
    """Return a basis ``(k, *shape)`` as ``(k, n)``, also of a parameter that is a single number."""
    return basis.flatten(1) if basis.ndim > 1 else basis.unsqueeze(1)


def ritz_pairs(
    op: CurvatureOperator,
    count: int,
    start: Tensor | None,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return up to ``count`` Ritz values and vectors ``(n, k)`` from ``count`` products.

    A Krylov space contains one vector of each eigenspace. If it is exhausted after fewer products,
    another Lanczos run continues in its orthogonal complement, unless only roundoff is left there.
    """
    values = torch.empty(0, dtype=torch.float64)
    vectors = torch.empty(op.shape[0], 0, dtype=op.dtype, device=op.device)
    inner: LinearOperator = op
    while True:
        left = count - len(values)
        run = lanczos(inner, num_steps=left, start=start, vectors=True, generator=generator)
        found: Any = run.vectors
        # Roundoff of the whole matrix turns vectors of tiny eigenvalues towards earlier ones.
        vectors = orthonormalize(torch.cat([vectors, found], 1))[0] if len(values) else found
        values = torch.cat([values, run.values])
        if run.status.outcome != "breakdown" or len(values) == count:
            return values, vectors
        # The span is invariant. Other vectors of repeated eigenvalues are orthogonal to it.
        inner = DeflatedOperator(op, vectors)
        start = torch.randn(op.shape[0], generator=generator, dtype=torch.float64).to(vectors)
        # Twice, because once leaves roundoff times the part that was removed.
        for _ in range(2):
            start = start - vectors @ (vectors.T @ start)
        # Products with the deflated matrix contain the roundoff of the whole matrix.
        noise = torch.finfo(op.dtype).eps ** 0.5 * float(values.abs().max())
        if not float((inner @ start).norm()) > noise * float(start.norm()):
            return values, vectors
