r"""A determinant split in two: a block Krylov space, and what it leaves.

With an orthonormal basis :math:`Q` of the space and :math:`T = Q^\top A Q`,
:math:`\det A = \det T \det S`, where :math:`S` is the Schur complement on the orthogonal
complement. For a block Krylov space :math:`A Q = Q T + V B E^\top` couples to the last block
alone, so

.. math:: S = P A P - V B (T^{-1})_{\text{last}} B^\top V^\top, \quad P = I - Q Q^\top.
"""

from typing import final

import torch
from torch import Tensor

from ritz._core.progress import Progress
from ritz._core.random import probes
from ritz.operators.base import LinearOperator
from ritz.spectra.conjugate import NotPositiveDefiniteError


@final
class Deflation:
    """A block Krylov space of an operator, and the Schur complement on what is left.

    Args:
        op: Positive definite, ``(n, n)``.
        width: Vectors a block.
        dimension: Of the space, a multiple of the width or ``n``: as many products, and vectors of
            memory.
        generator: Source of the first block.
        bar: Told of products.

    Attributes:
        logdet: Of :math:`T`.
        dimension: Of the complement.
        complement: The operator :math:`S`, on vectors ``(n,)`` that are orthogonal to the space;
            ``None`` where there are none.
        traces: Traces of :math:`T` and of the correction: that of :math:`S` is that of :math:`A`
            less both.
    """

    def __init__(
        self,
        op: LinearOperator,
        *,
        width: int,
        dimension: int,
        generator: torch.Generator,
        bar: Progress,
    ) -> None:
        n = op.shape[0]
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
            rows = slice(filled, filled + size)
            projected[: filled + size, rows] = (overlap + again).double().cpu()
            filled += size
            bar.update(filled)
            left = min(width, (n if filled == dimension else dimension) - filled)
            if left <= 0:
                break
            block, coupling = _orthonormal(product, space, left)
            if filled == dimension:
                break
        upper = projected.triu()
        self.basis = basis
        self.dimension = n - dimension
        factor = _cholesky(upper + upper.triu(1).T)
        self.logdet = float(2 * factor.diagonal().log().sum())
        self.complement: SchurOperator | None = None
        self.traces = float(upper.diagonal().sum()), 0.0
        if self.dimension:
            inverse = torch.cholesky_inverse(factor)[-size:, -size:]
            correction = coupling @ inverse @ coupling.T
            self.traces = self.traces[0], float(correction.trace())
            filling = float(upper.diagonal()[-size:].mean())
            self.complement = SchurOperator(op, basis, block, correction.to(basis), filling)

    def probes(self, count: int, generator: torch.Generator) -> Tensor:
        """Random vectors ``(n, count)`` of the complement, isotropic there, of norm one."""
        drawn = probes(
            (len(self.basis), count),
            kind="gaussian",
            generator=generator,
            dtype=self.basis.dtype,
            device=self.basis.device,
        )
        for _ in range(2):
            drawn -= self.basis @ (self.basis.T @ drawn)
        unit: Tensor = drawn / drawn.norm(dim=0)
        return unit


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
