"""Traces of functions of a matrix."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz._core.random import Probe, resolve_generator
from ritz._core.results import Estimate, stderr
from ritz._core.sampling import Sampling, column_dots
from ritz.operators import LinearOperator, OperatorLike, as_operator
from ritz.spectra._functions.expansions import Expansion, by_chebyshev, by_maxent, estimated
from ritz.spectra._functions.forms import Budget
from ritz.spectra._functions.gauss import (
    Function,
    checked,
    gauss_rule,
    remainder,
    ritz_rules,
    shorter,
)
from ritz.spectra._functions.splitting import by_eigenvalues, by_krylov
from ritz.spectra._lanczos import REORTHOGONALIZATIONS, Reorthogonalization

TraceFunctionMethod = Literal["lanczos", "krylov", "chebyshev", "maxent", "eigenvalues"]
TRACE_FUNCTION_METHODS = ("lanczos", "krylov", "chebyshev", "maxent", "eigenvalues")
_METHODS: dict[str, Callable[[LinearOperator, Budget, Function], Expansion]] = {
    "krylov": by_krylov,
    "chebyshev": by_chebyshev,
    "maxent": by_maxent,
    "eigenvalues": by_eigenvalues,
}


def trace_function(
    op: OperatorLike,
    function: Callable[[Tensor], Tensor],
    *,
    num_steps: int,
    num_probes: int = 32,
    method: TraceFunctionMethod = "lanczos",
    floor: float | None = None,
    rtol: float | None = None,
    max_probes: int = 1000,
    block_size: int | None = None,
    reorthogonalize: Reorthogonalization = "none",
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return :math:`\operatorname{tr} f(A) = \mathbb{E}[z^\top f(A) z]`.

    ``lanczos`` is quadrature,

    .. math:: z^\top f(A) z \approx \|z\|^2 \sum_{k=1}^m \tau_k f(\theta_k)

    at ``num_steps`` products a probe. Memory: 6 vectors a probe of the block, or
    ``num_steps + 5`` with re-orthogonalisation. Without it, the default here, lost orthogonality
    repeats values and shares their weight among the copies, which delays convergence but leaves
    the quadrature accurate (Greenbaum 1989); ``"full"`` converges in fewer steps where eigenvalues
    are far apart. The ``truncation`` of the result is an estimate, not a bound, of what more steps
    would change in the mean, from what the last ones did; zero where the Krylov spaces are
    invariant, and NaN, unknown, for a single step.

    The others spend as many products in all, ``num_steps * num_probes``. ``krylov`` gives six
    tenths of them, and as many vectors of memory, to a block Krylov space, whose share of the trace
    it takes from the projected matrix, and the rest to quadrature with probes orthogonal to it,
    split between probes and steps by their errors: for spectra in which few eigenvalues count most.
    ``chebyshev`` interpolates the function between ``floor`` and the norm; ``maxent`` takes its
    mean under the density of maximum entropy with up to 60 moments. ``eigenvalues`` diagonalises
    the matrix, formed by ``n`` products: exact. With a ``floor`` Gauss-Radau rules bracket the
    quadrature of ``krylov``, as they do in :func:`ritz.logdet`.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``; it may be indefinite.
        function: Elementwise :math:`f` on a float64 tensor of Ritz values, such as
            ``torch.reciprocal``, ``torch.exp``, ``torch.special.entr`` (:math:`-x \log x`) or
            ``lambda x: x**p``.
        num_steps: Krylov dimension ``m``; exact for polynomials of degree ``2 m - 1``.
        num_probes: Probes; with ``rtol``, the least number.
        method: See above.
        floor: A number below the spectrum, for ``krylov``, ``chebyshev`` and ``maxent``.
        rtol: Go on until the standard error is below this share of the mean (``lanczos``,
            ``krylov``); the status says whether it is.
        max_probes: Most probes for that.
        block_size: Probes multiplied at once; what suits the operator by default.
        reorthogonalize: ``none``, ``partial`` or ``full``.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Golub and Meurant (1994); Ubaru, Chen and Saad (2017); Chen and Hallman (2023) for
    ``krylov``.
    """
    op = as_operator(op)
    check_choice("method", method, TRACE_FUNCTION_METHODS)
    check_count("num_steps", num_steps, high=op.shape[0])
    check_choice("reorthogonalize", reorthogonalize, REORTHOGONALIZATIONS)
    generator = resolve_generator(generator)
    plan = Sampling(num_probes, rtol, max_probes, block_size, probe)
    if method != "lanczos":
        budget = Budget(num_steps * num_probes, num_probes, floor, rtol, generator, progress)
        return estimated(_METHODS[method](op, budget, checked(function)), budget)

    spent, exact = 0, True

    def measure(block: Tensor) -> Tensor:
        nonlocal spent, exact
        rules = ritz_rules(op, block, num_steps=num_steps, reorthogonalize=reorthogonalize)
        spent, exact = spent + rules.num_products, exact and bool(rules.exact.all())
        norms = column_dots(block, block).cpu()
        last = norms * _apply(function, rules.last)
        before = (gauss_rule(rules.projected[:, :less, :less]) for less in shorter(num_steps))
        fewer = (norms * _apply(function, rule) for rule in before)
        return torch.stack([last, *(torch.where(rules.exact, last, form) for form in fewer)], dim=1)

    label = "trace of a function"
    samples, _ = plan.run(op, measure, generator=generator, progress=progress, label=label)
    values, change = samples[:, 0], remainder(*samples.mean(0)).abs()
    return Estimate(
        mean=values.mean(),
        stderr=stderr(values),
        truncation=change if exact or num_steps > 1 else torch.full_like(change, torch.nan),
        samples=values,
        num_products=spent,
        method=f"Lanczos quadrature, {num_steps} steps",
        status=plan.status(values),
        seed=generator.initial_seed(),
    )


def _apply(function: Callable[[Tensor], Tensor], rule: tuple[Tensor, Tensor]) -> Tensor:
    nodes, weights = rule
    used = weights > 0
    # A node of weight zero only fills the block: it may lie where there is no function.
    values = checked(function)(torch.where(used, nodes, nodes[used][0]))
    return (weights * values).sum(0)
