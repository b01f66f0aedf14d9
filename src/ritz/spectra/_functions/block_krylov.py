r"""Traces of functions: a block Krylov space, treated exactly, and a sampled remainder.

With an orthonormal basis :math:`Q` of the space and :math:`T = Q^\top A Q`,
:math:`\det A = \det T \det S`, where :math:`S` is the Schur complement on the orthogonal
complement. A block Krylov space has :math:`A Q = Q T + V B E^\top`: only its last block couples to
the complement. So

.. math:: S = P A P - V B (T^{-1})_{\text{last}} B^\top V^\top, \quad P = I - Q Q^\top.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ritz._core.blocks import column_norms, euclidean_norm, inner_products, orthonormalize
from ritz._core.checks import is_below
from ritz._core.progress import Progress, tracking
from ritz._core.random import draw_probes, probes
from ritz._core.results import Estimate
from ritz._core.sampling import ROUNDOFF, check_samples
from ritz.operators import LinearOperator
from ritz.spectra._functions.quadrature import (
    ALTERNATING,
    Budget,
    Function,
    Projections,
    Sampler,
    brackets,
)
from ritz.spectra._functions.quadrature import TUNING as QUADRATURE
from ritz.spectra._positive_definite import cholesky_factor


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the block Krylov space."""

    # Vectors per block. On kernel matrices of 1,500 rows the errors with 5, 10 and 25 are within a
    # factor of two of each other; wide blocks make products cheap.
    width: int = 25
    # Smallest number of blocks. The error of a block Gauss rule is known from four blocks on.
    blocks: int = 5
    # Fraction of the products for the space. 36 blocks of 25 and 60 probes x 10 steps were the best
    # split of 1,500 products on nine kernel matrices (benchmarks/determinants.py).
    share: float = 0.6
    # Maximum size of the basis in bytes: 4 GiB, as the documentation of logdet says.
    basis: int = 2**32
    # Fraction of the directions whose part of tr f(A) counts as exact. The other directions make
    # this part accurate. For tr sqrt(A) of a power law the rms error is 6 % with 1/3 and 2 % with
    # 2/3. It is smaller with 0.9, but too few directions remain for functions that converge slowly.
    exact: float = 2 / 3


TUNING = Tuning()


@dataclass(frozen=True, slots=True)
class Space:
    r"""A block Krylov space: :math:`A Q = Q T + V B E^\top`.

    Attributes:
        basis: :math:`Q`, ``(n, k)``.
        projected: :math:`T`, ``(k, k)``, float64 on the CPU.
        block: :math:`V`, the next block; the last block if the space is the whole space.
        coupling: :math:`B`, float64 on the CPU.
        width: Vectors in the last block of the basis.
    """

    basis: Tensor
    projected: Tensor
    block: Tensor
    coupling: Tensor
    width: int

    @property
    def roundoff(self) -> float:
        """Roundoff of the projected matrix, which grows with the blocks as a random walk."""
        # The norm: in a random basis the diagonal may be several times smaller.
        size = float(torch.linalg.eigvalsh(self.projected).abs().max())
        blocks = len(self.projected) / self.width
        return torch.finfo(self.basis.dtype).eps * size * math.sqrt(blocks)

    def draw(self, count: int, generator: torch.Generator, *, first: int | None = None) -> Tensor:
        """Return random unit vectors ``(n, count)`` orthogonal to the ``first`` directions."""
        basis = self.basis if first is None else self.basis[:, :first]
        shape, dtype = (len(basis), count), basis.dtype
        drawn = probes(
            shape, kind="gaussian", generator=generator, dtype=dtype, device=basis.device
        )
        for _ in range(2):  # twice is enough (Kahan, in Parlett 1980)
            drawn -= basis @ inner_products(basis, drawn).to(dtype)
        unit: Tensor = drawn / column_norms(drawn).to(dtype)
        return unit


def krylov_size(n: int, num_products: int, itemsize: int) -> tuple[int, int]:
    """Return dimension and block width: a multiple of the width, or ``n`` if products suffice."""
    if num_products >= n and n * n * itemsize <= TUNING.basis:
        return n, min(n, TUNING.width)
    wanted = min(int(TUNING.share * num_products), TUNING.basis // (n * itemsize), n - 1)
    width = max(1, min(TUNING.width, wanted // TUNING.blocks))
    return max(1, wanted // width) * width, width


def block_krylov(
    op: LinearOperator, *, dimension: int, width: int, generator: torch.Generator, bar: Progress
) -> Space:
    """Return the block Krylov space of a random block.

    Args:
        op: ``(n, n)``.
        dimension: A multiple of ``width``, or ``n``. It is also the number of products,
            and of vectors in memory.
        width: Vectors per block.
        generator: Source of the first block.
        bar: Progress bar, which counts products.
    """
    n = op.shape[0]
    basis = torch.empty(n, dimension, dtype=op.dtype, device=op.device)
    projected = torch.zeros(dimension, dimension, dtype=torch.float64)
    drawn = draw_probes(op, min(width, dimension), kind="gaussian", generator=generator)
    block, _ = orthonormalize(drawn)
    filled, norm, coupling = 0, 0.0, torch.zeros(0, 0, dtype=torch.float64)
    while True:
        size = block.shape[1]
        basis[:, filled : filled + size] = block
        space = basis[:, : filled + size]
        # A V_j - Q (Q'A V_j), orthogonalised twice; Q'A V_j is a block column of T.
        product = op.matmat(block)
        check_samples(product.T, filled)
        overlap = inner_products(space, product)
        product = product - space @ overlap.to(op.dtype)
        again = inner_products(space, product)
        product -= space @ again.to(op.dtype)
        projected[: filled + size, filled : filled + size] = (overlap + again).cpu()
        norm = max(norm, euclidean_norm(projected[: filled + size, filled : filled + size]))
        # T is symmetric: the part of A V_j along the previous block is the transposed coupling.
        if filled:
            gap = projected[:filled, filled : filled + size].clone()
            gap[-coupling.shape[1] :] -= coupling.T
            _check_symmetric(euclidean_norm(gap), norm, op)
        filled += size
        bar.update(filled)
        left = min(width, (n if filled == dimension else dimension) - filled)
        if left > 0:
            block, coupling = _orthonormal(product, space, left)
        if filled == dimension:
            upper = projected.triu()
            return Space(basis, upper + upper.triu(1).T, block, coupling, size)


def _check_symmetric(gap: float, size: float, op: LinearOperator) -> None:
    if not is_below(gap, torch.finfo(op.dtype).eps ** 0.5 * size):
        raise ValueError(
            f"op must be symmetric and the same in every call: products differ by "
            f"{gap:.2g} (norm {size:.2g}) from those of any symmetric matrix"
        )


def _orthonormal(product: Tensor, space: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the next block V and the coupling B of ``product = V B``."""
    block, coupling = orthonormalize(product)
    # Columns of small norm have lost their orthogonality to the space, so orthogonalise again.
    # Columns of norm zero become arbitrary directions outside of the space.
    for _ in range(2):
        block = block - space @ inner_products(space, block).to(block)
        block, factor = orthonormalize(block)
        coupling = factor @ coupling
    return block[:, :width].contiguous(), coupling[:width].double().cpu()


@final
class Deflation:
    r"""The determinant of a positive definite operator, split by a block Krylov space.

    Args:
        op: Positive definite, ``(n, n)``.
        space: Block Krylov space of ``op``.

    Attributes:
        logdet: Log determinant of :math:`T`.
        magnitude: Largest diagonal entry of :math:`T`, close to the norm of the operator.
        roundoff: Error of ``logdet`` by roundoff in the products.
        dimension: Dimension of the complement.
        complement: The operator :math:`S`, on vectors ``(n,)`` orthogonal to the space; ``None`` if
            there are none.
        trace: :math:`\operatorname{tr} A - \operatorname{tr} S`.
    """

    def __init__(self, op: LinearOperator, space: Space) -> None:
        self.dimension = op.shape[0] - space.basis.shape[1]
        factor = cholesky_factor(space.projected, kind="a Ritz value")
        self.logdet = float(2 * factor.diagonal().log().sum())
        self.complement: SchurOperator | None = None
        self.trace = float(space.projected.trace())
        self.magnitude = float(space.projected.diagonal().max())
        # d log det T = tr(T^{-1} dT) with |dT| of the order of eps |A|.
        inverse = torch.cholesky_inverse(factor)
        unit = QUADRATURE.shift * space.roundoff
        # Where |dT| |T^{-1}| reaches 1, the matrix may be singular.
        singular = not is_below(float((unit * inverse).norm()), 1.0)
        summed = (
            ROUNDOFF * torch.finfo(torch.float64).eps * float(factor.diagonal().log().abs().sum())
        )
        moved = QUADRATURE.margin * unit * float(inverse.diagonal().sum())
        self.roundoff = math.inf if singular else moved + summed
        if self.dimension:
            # B (T^{-1})_last B', the part of S that couples through the last block.
            last = space.width
            correction = space.coupling @ inverse[-last:, -last:] @ space.coupling.T
            self.trace += float(correction.trace())
            filling = float(space.projected.diagonal()[-last:].mean())
            self.complement = SchurOperator(op, space, correction.to(space.basis), filling)


@final
class SchurOperator(LinearOperator):
    """The Schur complement of a deflated operator, and ``filling`` times the identity on the space.

    Roundoff adds small components in the space to all vectors. They do no harm, because the filling
    lies within the spectrum.
    """

    def __init__(
        self, op: LinearOperator, space: Space, correction: Tensor, filling: float
    ) -> None:
        super().__init__(op.shape[0], dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self.basis, self.block = op, space.basis, space.block
        self.correction, self.filling = correction, filling
        self._detail = f"{type(op).__name__} without {space.basis.shape[1]} directions"

    def _matmat(self, block: Tensor) -> Tensor:
        # P (A - V C V') P x + filling Q Q'x
        outside = inner_products(self.basis, block).to(block)
        inside = block - self.basis @ outside
        product = self.op.matmat(inside)
        product = product - self.block @ (
            self.correction @ inner_products(self.block, inside).to(block)
        )
        return product - self.basis @ (
            inner_products(self.basis, product).to(block) - self.filling * outside
        )


def by_krylov(op: LinearOperator, budget: Budget, function: Function) -> Estimate:
    r"""Return tr f(A): the part in a block Krylov space, and quadrature for the complement.

    .. math:: \operatorname{tr} f(A) = \operatorname{tr} Q_1^\top f(A) Q_1
        + \operatorname{tr} P f(A) P, \quad P = I - Q_1 Q_1^\top

    with the first blocks :math:`Q_1` of the space. :math:`Q_1^\top f(A) Q_1` is approximated by the
    leading block of :math:`f(T)`, which converges to it as blocks are added.
    """
    n = op.shape[0]
    size, width = krylov_size(n, budget.num_products, op.dtype.itemsize)
    with tracking(budget.progress, "trace of a function", min(n, budget.num_products)) as bar:
        space = block_krylov(op, dimension=size, width=width, generator=budget.generator, bar=bar)
        first = (
            n if size == n else max(1, min(int(TUNING.exact * size), size - space.width or size))
        )
        coupling = space.coupling if size < n else torch.zeros(1, 1, dtype=torch.float64)
        # The leading block of f(T) is a block Gauss rule; its error is that of the other rules.
        inside = brackets(
            Projections(space.projected[None], coupling[None], space.roundoff),
            function,
            floor=budget.floor,
            bounds=function in ALTERNATING,
            first=first,
        )
        value, error = float(inside.mixed), float(inside.truncation)
        if size == n:
            method = "block Krylov: the whole space"
            return Estimate.exact(value, method=method, num_products=n, truncation=error)
        sampler = Sampler(
            op=op,
            draw=lambda count: space.draw(count, budget.generator, first=first),
            function=function,
            budget=budget,
            dimension=n - first,
            bar=bar,
            label=f"block Krylov: {first} directions of {size}, ",
            spent=size,
            inside=value,
            error=error,
        )
        return sampler.estimate(budget.num_products - size, None)
