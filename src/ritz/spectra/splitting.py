"""Traces of functions with a block Krylov space taken first, or with all the eigenvalues."""

import math

import torch

from ritz._core.progress import tracking
from ritz.operators.base import LinearOperator
from ritz.spectra.budget import Budget
from ritz.spectra.deflation import Space, block_krylov, krylov_dimension
from ritz.spectra.expansions import Expansion, by_quadrature
from ritz.spectra.forms import Sampler
from ritz.spectra.radau import Function

KEPT = 2 / 3  # of the space: what the others are there to make exact


def by_krylov(op: LinearOperator, budget: Budget, function: Function) -> Expansion:
    r"""Take the share of a block Krylov space, and quadrature for what is orthogonal to it.

    .. math:: \operatorname{tr} f(A) = \operatorname{tr} Q_1^\top f(A) Q_1
        + \operatorname{tr} P f(A) P, \quad P = I - Q_1 Q_1^\top

    with the first blocks :math:`Q_1` of the space, for which the leading block of :math:`f(T)`
    stands in: it converges as the space goes on beyond them.
    """
    n, generator = op.shape[0], budget.generator
    size = krylov_dimension(n, budget.num_products, op.dtype.itemsize)
    with tracking(budget.progress, "trace of a function", min(n, budget.num_products)) as bar:
        space = block_krylov(op, dimension=size, generator=generator, bar=bar)
        shorter = size - space.width
        first = n if size == n else max(1, min(int(KEPT * size), shorter or size))
        inside = _share(space, size, first, function)
        if size == n:
            whole = torch.tensor([inside], dtype=torch.float64)
            return Expansion(whole, torch.zeros_like(whole[0]), n, "block Krylov: the whole space")
        sampler = Sampler(
            op,
            lambda count: space.probes(count, generator, first=first),
            function,
            budget.floor,
            n - first,
            lambda: None,
            lambda mean: (budget.rtol or 0.0) * abs(inside / (n - first) + mean),
            bar,
            spent=size,
        )
        found = by_quadrature(sampler, num_products=budget.num_products - size, num_probes=None)
    # A single block has nothing to compare with: how far from exact its share is nobody knows.
    change = abs(inside - _share(space, shorter, first, function)) if shorter else math.nan
    how = f"block Krylov: {first} directions of {size}, {found.how}"
    truncation = found.truncation + change
    return Expansion(inside + found.samples, truncation, size + found.num_products, how)


def by_eigenvalues(op: LinearOperator, budget: Budget, function: Function) -> Expansion:
    """Sum over the eigenvalues of the matrix, formed."""
    n = op.shape[0]
    values = torch.linalg.eigvalsh(op.dense().double()).cpu()
    whole = function(values).sum().reshape(1)
    return Expansion(whole, torch.zeros_like(whole[0]), n, f"all {n:,} eigenvalues")


def _share(space: Space, size: int, first: int, function: Function) -> float:
    values, vectors = torch.linalg.eigh(space.projected[:size, :size])
    return float((vectors[:first].square() @ function(values)).sum())
