"""Gauss rules of many probes at once, and the traces of functions they give."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz._core.random import Probe, resolve_generator
from ritz._core.results import Estimate
from ritz.operators.base import LinearOperator
from ritz.operators.interop import as_operator
from ritz.spectra.columns import column_dots
from ritz.spectra.recurrence import (
    REORTHOGONALIZATIONS,
    Recurrence,
    Reorthogonalization,
    step,
)
from ritz.spectra.sampling import Sampling, stderr

Rule = tuple[Tensor, Tensor]


def trace_function(
    op: Any,
    function: Callable[[Tensor], Tensor],
    *,
    num_steps: int,
    num_probes: int = 32,
    rtol: float | None = None,
    max_probes: int = 1000,
    block_size: int = 8,
    reorthogonalize: Reorthogonalization = "none",
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return :math:`\operatorname{tr} f(A) = \mathbb{E}[z^\top f(A) z]` by Lanczos quadrature.

    .. math:: z^\top f(A) z \approx \|z\|^2 \sum_{k=1}^m \tau_k f(\theta_k)

    Cost: ``num_steps`` products a probe. Memory: 5 vectors a probe of the block, or
    ``num_steps + 5`` with re-orthogonalisation. Without it, the default here, lost orthogonality
    repeats values and shares their weight among the copies, which delays convergence but leaves
    the quadrature accurate (Greenbaum 1989); ``"full"`` converges in fewer steps where eigenvalues
    are far apart.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``; it may be indefinite.
        function: Elementwise :math:`f` on a float64 tensor of Ritz values.
        num_steps: Krylov dimension ``m``; exact for polynomials of degree ``2 m - 1``.
        num_probes: Probes; with ``rtol``, the least number.
        rtol: Go on until the standard error is below this share of the mean.
        max_probes: Most probes for that; the status says if they were not enough.
        block_size: Probes multiplied at once.
        reorthogonalize: ``none``, ``partial`` or ``full``.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes.
        progress: Whether to show a bar, or what to tell.

    The ``truncation`` of the result is how much the last step changed the mean: an estimate, not
    a bound, of what more steps would change.

    Reference: Golub and Meurant (1994); Ubaru, Chen and Saad (2017).
    """
    op = as_operator(op)
    check_count("num_steps", num_steps, high=op.shape[0])
    check_choice("reorthogonalize", reorthogonalize, REORTHOGONALIZATIONS)
    generator = resolve_generator(generator)
    plan = Sampling(num_probes, rtol, max_probes, block_size, probe)

    def measure(block: Tensor) -> Tensor:
        rules = ritz_rules(op, block, num_steps=num_steps, reorthogonalize=reorthogonalize)
        norms = column_dots(block, block)
        last, before = (norms * _apply(function, rule) for rule in rules)
        return torch.stack([last, before], dim=1)

    label = "trace of a function"
    samples, _ = plan.run(op, measure, generator=generator, progress=progress, label=label)
    values = samples[:, 0]
    return Estimate(
        mean=values.mean(),
        stderr=stderr(values),
        truncation=(values - samples[:, 1]).mean().abs(),
        samples=values,
        num_products=len(values) * num_steps,
        method=f"Lanczos quadrature, {num_steps} steps",
        status=plan.status(values),
        seed=generator.initial_seed(),
    )


def ritz_rules(
    op: LinearOperator, block: Tensor, *, num_steps: int, reorthogonalize: Reorthogonalization
) -> tuple[Rule, Rule]:
    r"""Return the ``m``-point Gauss rules of the columns of a block, and the ``m - 1``-point ones.

    The runs advance side by side: one product with a block a step. A rule is a pair of nodes and
    weights, each ``(m, k)`` in float64 on the CPU. Where a run ends early, because its space is
    invariant, its rule is exact and padded with nodes of weight zero.

    Args:
        op: Symmetric :math:`A`.
        block: Start vectors ``(n, k)``, none of them zero.
        num_steps: ``m``.
        reorthogonalize: How; see :func:`ritz.lanczos`.
    """
    starts = block.T.contiguous()
    runs = [Recurrence(start, capacity=num_steps, mode=reorthogonalize) for start in starts]
    for done in range(num_steps):
        active = [run for run in runs if not run.exhausted]
        if not active:
            break
        step(op, active, last=done == num_steps - 1)
    projected = torch.stack([_padded(run.projected(), num_steps) for run in runs])
    return _rule(projected), _rule(projected[:, : max(1, num_steps - 1), : max(1, num_steps - 1)])


def _apply(function: Callable[[Tensor], Tensor], rule: tuple[Tensor, Tensor]) -> Tensor:
    nodes, weights = rule
    values = function(nodes)
    if values.shape != nodes.shape:
        raise ValueError(
            f"function must keep the shape {tuple(nodes.shape)}, got {tuple(values.shape)}"
        )
    used = weights > 0
    if not bool(torch.isfinite(values[used]).all()):
        bad = nodes[used][~torch.isfinite(values[used])][0]
        raise ValueError(f"function must be finite on the spectrum, but is not at {float(bad):.6g}")
    return torch.where(used, weights * values, 0).sum(0)


def _padded(matrix: Tensor, size: int) -> Tensor:
    padded = torch.eye(size, dtype=matrix.dtype) * matrix[0, 0]
    padded[: len(matrix), : len(matrix)] = matrix
    return padded


def _rule(projected: Tensor) -> Rule:
    nodes, vectors = torch.linalg.eigh(projected)
    return nodes.T, vectors[:, 0].square().T
