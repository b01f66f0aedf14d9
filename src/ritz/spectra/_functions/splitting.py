"""Traces of functions split in two: a block Krylov space treated exactly, and the rest sampled."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ritz._core.progress import Progress, tracking
from ritz._core.random import probes
from ritz.operators import LinearOperator
from ritz.spectra._cg import NotPositiveDefiniteError
from ritz.spectra._functions.expansions import Expansion, by_quadrature
from ritz.spectra._functions.forms import Budget, Sampler
from ritz.spectra._functions.gauss import SHIFT, Function

# ------------------------------------------------------------------------------------------
# A determinant split in two: a block Krylov space, and what it leaves.
#
# With an orthonormal basis :math:`Q` of the space and :math:`T = Q^\top A Q`, :math:`\det A =
# \det T \det S`, where :math:`S` is the Schur complement on the orthogonal complement. For a
# block Krylov space :math:`A Q = Q T + V B E^\top` couples to the last block alone, so
#
# .. math:: S = P A P - V B (T^{-1})_{\text{last}} B^\top V^\top, \quad P = I - Q Q^\top.

WIDTH = 25  # vectors a block
BASIS = 2**32  # bytes of a basis


@dataclass(frozen=True, slots=True)
class Space:
    r"""A block Krylov space: :math:`A Q = Q T + V B E^\top`.

    Attributes:
        basis: :math:`Q`, ``(n, k)``.
        projected: :math:`T`, ``(k, k)``, float64 on the CPU.
        block: :math:`V`, the next block; the last one where the space is everything.
        coupling: :math:`B`, float64 on the CPU.
        width: Vectors of the last block of the basis.
    """

    basis: Tensor
    projected: Tensor
    block: Tensor
    coupling: Tensor
    width: int

    def probes(self, count: int, generator: torch.Generator, *, first: int | None = None) -> Tensor:
        """Random vectors ``(n, count)`` of norm one, isotropic beyond the ``first`` directions."""
        basis = self.basis if first is None else self.basis[:, :first]
        drawn = probes(
            (len(basis), count),
            kind="gaussian",
            generator=generator,
            dtype=basis.dtype,
            device=basis.device,
        )
        for _ in range(2):
            drawn -= basis @ (basis.T @ drawn)
        unit: Tensor = drawn / drawn.norm(dim=0)
        return unit


def krylov_dimension(n: int, num_products: int, itemsize: int) -> int:
    """The dimension of a space that takes six tenths of the products: whole blocks, or ``n``."""
    if num_products >= n and n * n * itemsize <= BASIS:
        return n
    wanted = min(int(0.6 * num_products), BASIS // (n * itemsize), n - 1)
    return max(1, wanted // WIDTH) * min(WIDTH, max(1, wanted))


def block_krylov(
    op: LinearOperator, *, dimension: int, generator: torch.Generator, bar: Progress
) -> Space:
    """Return the block Krylov space of a random block.

    Args:
        op: ``(n, n)``.
        dimension: A multiple of the width of a block, or ``n``: as many products, and vectors of
            memory.
        generator: Source of the first block.
        bar: Told of products.
    """
    n, width = op.shape[0], min(WIDTH, op.shape[0])
    basis = torch.empty(n, dimension, dtype=op.dtype, device=op.device)
    projected = torch.zeros(dimension, dimension, dtype=torch.float64)
    block = _start(op, min(width, dimension), generator)
    filled, coupling = 0, torch.zeros(0, 0, dtype=torch.float64)
    while True:
        size = block.shape[1]
        basis[:, filled : filled + size] = block
        space = basis[:, : filled + size]
        product = op.matmat(block)
        overlap = space.T @ product
        product = product - space @ overlap
        again = space.T @ product
        product -= space @ again
        projected[: filled + size, filled : filled + size] = (overlap + again).double().cpu()
        filled += size
        bar.update(filled)
        left = min(width, (n if filled == dimension else dimension) - filled)
        if left > 0:
            block, coupling = _orthonormal(product, space, left)
        if filled == dimension:
            upper = projected.triu()
            return Space(basis, upper + upper.triu(1).T, block, coupling, size)


@final
class Deflation:
    """The Schur complement on what a block Krylov space leaves of a positive definite operator.

    Args:
        op: Positive definite, ``(n, n)``.
        space: Of it.

    Attributes:
        logdet: Of :math:`T`.
        magnitude: The largest diagonal entry of :math:`T`: the norm of the operator, or nearly.
        roundoff: What roundoff in the products may change in ``logdet``.
        dimension: Of the complement.
        complement: The operator :math:`S`, on vectors ``(n,)`` that are orthogonal to the space;
            ``None`` where there are none.
        trace: Of :math:`T` and of the correction: that of :math:`S` is that of :math:`A` less it.
    """

    def __init__(self, op: LinearOperator, space: Space) -> None:
        self.dimension = op.shape[0] - space.basis.shape[1]
        factor = _cholesky(space.projected)
        self.logdet = float(2 * factor.diagonal().log().sum())
        self.complement: SchurOperator | None = None
        self.trace = float(space.projected.trace())
        self.magnitude = float(space.projected.diagonal().max())
        inverse = torch.cholesky_inverse(factor)
        unit = SHIFT * torch.finfo(op.dtype).eps * self.magnitude
        self.roundoff = unit * float(inverse.diagonal().sum())
        if self.dimension:
            last = space.width
            correction = space.coupling @ inverse[-last:, -last:] @ space.coupling.T
            self.trace += float(correction.trace())
            filling = float(space.projected.diagonal()[-last:].mean())
            self.complement = SchurOperator(
                op, space.basis, space.block, correction.to(space.basis), filling
            )


@final
class SchurOperator(LinearOperator):
    """The Schur complement of a deflated operator, and a multiple of the identity on the space.

    That multiple, ``filling``, is within the spectrum, so that what roundoff lets in of the space
    that was taken out does no harm.
    """

    def __init__(
        self, op: LinearOperator, basis: Tensor, block: Tensor, correction: Tensor, filling: float
    ) -> None:
        super().__init__(op.shape[0], dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self.basis, self.block, self.correction = op, basis, block, correction
        self.filling = filling

    def _matmat(self, block: Tensor) -> Tensor:
        outside = self.basis.T @ block
        inside = block - self.basis @ outside
        product = self.op.matmat(inside)
        product = product - self.block @ (self.correction @ (self.block.T @ inside))
        return product - self.basis @ (self.basis.T @ product - self.filling * outside)

    def _detail(self) -> str:
        return f"{type(self.op).__name__} without {self.basis.shape[1]} directions"


def _start(op: LinearOperator, width: int, generator: torch.Generator) -> Tensor:
    drawn = probes(
        (op.shape[0], width),
        kind="gaussian",
        generator=generator,
        dtype=op.dtype,
        device=op.device,
    )
    block: Tensor = torch.linalg.qr(drawn).Q
    return block


def _orthonormal(product: Tensor, space: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The next block, and how the product is made of it; directions of no size are made up."""
    block, first = torch.linalg.qr(product)
    # What was small has lost its orthogonality to the space.
    for _ in range(2):
        block = block - space @ (space.T @ block)
        block, second = torch.linalg.qr(block)
        first = second @ first
    return block[:, :width].contiguous(), first[:width].double().cpu()


def _cholesky(matrix: Tensor) -> Tensor:
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        smallest = float(torch.linalg.eigvalsh(matrix)[0])
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got a Ritz value of {smallest:.6g}"
        )
    return factor


# ------------------------------------------------------------------------------------------
# Traces of functions with a block Krylov space taken first, or with all the eigenvalues.

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
