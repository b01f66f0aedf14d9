"""Spectral densities from products: Lanczos quadrature or Chebyshev moments."""

from typing import Any, Literal

import torch

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, probes, resolve_generator
from ritz.operators.base import LinearOperator
from ritz.operators.interop import as_operator
from ritz.spectra.discrete import DiscreteDensity, SmoothedDensity
from ritz.spectra.gaussrules import ritz_rules
from ritz.spectra.jackson import PolynomialDensity
from ritz.spectra.polynomials import moments
from ritz.spectra.recurrence import REORTHOGONALIZATIONS, ROUNDOFF, Reorthogonalization

DensityMethod = Literal["lanczos", "kpm"]


def density(
    op: Any,
    *,
    num_probes: int = 8,
    num_steps: int | None = None,
    width: float | None = None,
    method: DensityMethod = "lanczos",
    reorthogonalize: Reorthogonalization = "full",
    block_size: int | None = None,
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> DiscreteDensity | SmoothedDensity | PolynomialDensity:
    r"""Return the spectral density :math:`p(\lambda) = \frac1n \sum_i \delta(\lambda - \lambda_i)`.

    ``lanczos``: the Gauss rules of ``num_probes`` Lanczos runs, discrete without a ``width`` and
    Gaussian-smoothed with one. ``kpm``: ``2 num_steps`` Chebyshev moments with Jackson's kernel.
    Both cost ``num_steps`` products a probe. Memory: ``num_steps + 5`` vectors a probe of the block
    for ``lanczos`` with re-orthogonalisation, 5 without it and for ``kpm``.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_probes: Probes ``d``; their spread is the band of ``pdf_band`` and ``cdf_band``.
        num_steps: Steps ``m`` a probe, at most ``n``; by default 80, or ``n`` if that is less.
        width: Standard deviation of the Gaussian; ``None`` for a discrete density.
        method: ``lanczos`` or ``kpm``.
        reorthogonalize: ``full``, ``partial`` or ``none``; see :func:`ritz.lanczos`.
        block_size: Probes multiplied at once; what suits the operator by default.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes.
        progress: Whether to show a bar, or what to tell.

    Reference: Section 4.4 of *Spectral Machine Learning*; Lin, Saad and Yang (2016).

    Example:
        >>> import torch, ritz
        >>> found = ritz.density(torch.eye(50), num_probes=2, num_steps=3)
        >>> found.mass(0.9, 1.1)
        1.0
    """
    op = as_operator(op)
    check_choice("method", method, ("lanczos", "kpm"))
    check_count("num_probes", num_probes, low=2 if method == "kpm" else 1)
    if block_size is not None:
        check_count("block_size", block_size)
    generator = resolve_generator(generator)
    num_steps = min(80, op.shape[0]) if num_steps is None else num_steps
    if method == "kpm":
        if width is not None:
            raise ValueError(
                "width belongs to method='lanczos'; that of 'kpm' follows from num_steps"
            )
        check_count("num_steps", num_steps)
        found = moments(
            op,
            num_moments=2 * num_steps,
            num_probes=num_probes,
            block_size=block_size,
            probe=probe,
            generator=generator,
            progress=progress,
        )
        return PolynomialDensity(moments=found, dimension=op.shape[0])
    check_count("num_steps", num_steps, high=op.shape[0])
    check_choice("reorthogonalize", reorthogonalize, REORTHOGONALIZATIONS)
    discrete = _discrete(
        op,
        num_probes,
        num_steps,
        block_size or op.block_size,
        reorthogonalize,
        probe,
        generator,
        progress,
    )
    return discrete if width is None else discrete.smoothed(width)


def _discrete(
    op: LinearOperator,
    num_probes: int,
    num_steps: int,
    block_size: int,
    reorthogonalize: Reorthogonalization,
    probe: Probe,
    generator: torch.Generator,
    progress: bool | Progress,
) -> DiscreteDensity:
    nodes, weights, spent = [], [], 0
    with tracking(progress, "density", num_probes) as bar:
        for start in range(0, num_probes, block_size):
            shape = (op.shape[0], min(block_size, num_probes - start))
            block = probes(shape, kind=probe, generator=generator, dtype=op.dtype, device=op.device)
            rules = ritz_rules(op, block, num_steps=num_steps, reorthogonalize=reorthogonalize)
            nodes.append(rules.last[0].T)
            weights.append(rules.last[1].T)
            spent += rules.num_products
            bar.update(start + shape[1])
    found = torch.cat(nodes)
    return DiscreteDensity(
        nodes=found,
        roundoff=ROUNDOFF * torch.finfo(op.dtype).eps * float(found.abs().max()),
        weights=torch.cat(weights),
        dimension=op.shape[0],
        num_products=spent,
        seed=generator.initial_seed(),
    )
