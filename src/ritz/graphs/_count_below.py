"""Block Krylov count of the eigenvalues below a gap, in a block filtered by a polynomial.

Take a random block with more columns than there are eigenvalues below the gap, and multiply it by a
polynomial of the normalised Laplacian L that is small above the gap. Its span then contains the
eigenvectors below the gap. By Courant and Fischer, the i-th Ritz value is at least the i-th
eigenvalue, so the number of Ritz values below a threshold is a lower bound on the number of
eigenvalues. Further random probes, projected onto the orthogonal complement of the Ritz vectors,
estimate how many eigenvalues the block missed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ritz._core.blocks import inner_products
from ritz._core.progress import Progress
from ritz._core.random import draw_probes
from ritz.graphs._gaps import TOP, TUNING, Gap, widest_between
from ritz.graphs._graph import Graph
from ritz.operators import LinearOperator


@dataclass(frozen=True, slots=True)
class NullSpace:
    r"""The null space of L, spanned by unit vectors :math:`D^{1/2} 1_C`, one per component.

    Attributes:
        labels: Component of each vertex, ``(n,)``.
        entries: Entry of each vertex in the vector of its component, ``(n,)``.
        dimension: Number of components, including isolated vertices.
    """

    labels: Tensor
    entries: Tensor
    dimension: int

    @classmethod
    def of(cls, graph: Graph, dtype: torch.dtype) -> "NullSpace":
        count, labels = graph.components()
        labels, degrees = labels.long(), graph.degrees
        # An isolated vertex is its own unit vector.
        degrees = torch.where(degrees > 0, degrees, 1.0)
        volumes = torch.zeros(count, dtype=torch.float64).index_add_(0, labels, degrees)
        return cls(labels, (degrees / volumes[labels]).sqrt().to(dtype), count)

    def project_off(self, block: Tensor) -> Tensor:
        """Project a block ``(n, k)`` onto the orthogonal complement, in place."""
        # B - sum_C v_C (v_C' B); the vectors v_C have disjoint supports.
        entries = self.entries[:, None]
        products = block.new_zeros(self.dimension, block.shape[1])
        products.index_add_(0, self.labels, entries * block)
        return block.sub_(entries * products[self.labels])


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """Result of a count of the eigenvalues below a gap.

    Attributes:
        count: Number of eigenvalues below the gap, including the null space: a lower bound.
        mean: Mean of these eigenvalues.
        gap: The gap between Ritz values.
        missed: Estimated number of eigenvalues below the gap that the block has missed.
        full: Whether all columns were used, so that more columns may find more eigenvalues.
        num_products: Number of matrix-vector products.
        above: Ritz values above the gap, up to the end of the stretch.
    """

    count: int
    mean: float
    gap: Gap
    missed: float
    full: bool
    num_products: int
    above: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


def count_below(
    op: LinearOperator,
    null: NullSpace,
    gap: Gap,
    *,
    width: int,
    generator: torch.Generator,
    bar: Progress,
    pick: Callable[[Tensor, Gap], Gap] = widest_between,
) -> Below:
    r"""Count the eigenvalues left of a gap.

    Args:
        op: The normalised Laplacian, ``(n, n)``.
        null: Its null space.
        gap: A stretch. The filter amplifies eigenvectors below it and damps those above it.
        width: Number of columns of the block. Memory: as many vectors, and 128 more.
        generator: Source of randomness.
        bar: Receives the number of filtered columns.
        pick: Function that chooses the gap between Ritz values. Defaults to the widest one.
    """
    degree = filter_degree(gap, op.shape[0])
    block = torch.empty(op.shape[0], width, dtype=op.dtype, device=op.device)
    for start in range(0, width, op.block_size):
        stop = min(start + op.block_size, width)
        part = null.project_off(draw_probes(op, stop - start, kind="gaussian", generator=generator))
        # Project again after filtering, which amplifies roundoff in the null space most.
        block[:, start:stop] = null.project_off(polynomial(op, part, gap, degree))
        bar.update(stop)
    values, coefficients = _rayleigh_ritz(op, block)
    near = pick(values, gap)
    below = values < near.threshold
    coefficients = coefficients[:, below].to(block)
    fresh = null.project_off(
        draw_probes(op, TUNING.check_probes, kind="gaussian", generator=generator)
    )
    # z - Q Q' z with Q = block @ coefficients, twice as in Gram-Schmidt, to reach roundoff.
    for _ in range(2):
        fresh -= block @ (coefficients @ (coefficients.T @ (block.T @ fresh)))
    check_degree = filter_degree(near, op.shape[0])
    # Below the gap the filter is at least 1, so E ||p(L) z||^2 is at least the number missed.
    left = polynomial(op, fresh, near, check_degree).double().square().sum(0)
    count = null.dimension + int(below.sum())
    return Below(
        count=count,
        mean=float(values[below].sum()) / count,
        gap=near,
        missed=float(left.mean()),
        full=int((values < gap.high).sum()) >= width < op.shape[0] - null.dimension,
        num_products=width * (degree + 1) + TUNING.check_probes * check_degree,
        above=values[~below & (values < gap.high)],
    )


def all_below(
    values: Tensor, num_zeros: int, gap: Gap, pick: Callable[[Tensor, Gap], Gap]
) -> Below:
    """Return the result of :func:`count_below` from all eigenvalues ``(n,)``, ascending."""
    near = pick(values[num_zeros:], gap)
    below = values < near.threshold
    return Below(
        count=int(below.sum()),
        mean=float(values[below].mean()),
        gap=near,
        missed=0.0,
        full=False,
        num_products=0,
        above=values[~below & (values < gap.high)],
    )


def filter_degree(gap: Gap, n: int) -> int:
    """Return the degree of a filter that nearly removes the eigenvectors above a gap."""
    # cosh(k growth) = strength sqrt(n), because the part above has a norm of at most about sqrt(n).
    return math.ceil(math.acosh(TUNING.amplification * math.sqrt(n)) / _growth(gap))


def polynomial(op: LinearOperator, block: Tensor, gap: Gap, degree: int) -> Tensor:
    r"""Return :math:`T_k(\tilde L) x / |T_k(\tilde\lambda)|`, a Chebyshev polynomial.

    :math:`\tilde L` maps the spectrum above the gap to ``[-1, 1]``, where the polynomial is at most
    one over the denominator. At the lower end :math:`\lambda` of the gap its magnitude is one, and
    below it is larger.
    """

    def mapped(x: Tensor) -> Tensor:
        # (2 L - (2 + high)) / (2 - high), in place in the product.
        scale = 2 / (TOP - gap.high)
        return op.matmat(x).mul_(scale).sub_(x, alpha=scale * (TOP + gap.high) / 2)

    before, current = block, mapped(block)
    for _ in range(degree - 1):
        # T_{k+1}(x) = 2 x T_k(x) - T_{k-1}(x)
        before, current = current, mapped(current).mul_(2).sub_(before)
    return current / math.cosh(degree * _growth(gap))


def _growth(gap: Gap) -> float:
    """Return the growth rate g at the lower end of a gap, where |T_k| = cosh(k g)."""
    return math.acosh(1 + 2 * (gap.high - gap.low) / (TOP - gap.high))


def _rayleigh_ritz(op: LinearOperator, block: Tensor) -> tuple[Tensor, Tensor]:
    """Return Ritz values ``(r,)``, ascending, and coefficients ``(k, r)`` of their Ritz vectors."""
    k = block.shape[1]
    gram, projected = torch.zeros(2, k, k, dtype=torch.float64)
    for first in range(0, k, TUNING.columns):
        part = slice(first, min(k, first + TUNING.columns))
        product = op.matmat(block[:, part])
        # B' B and B' L B are symmetric: compute the entries on and below the diagonal.
        gram[first:, part] = inner_products(block[:, first:], block[:, part])
        projected[first:, part] = inner_products(block[:, first:], product)
    # Scale columns to length one. The lengths of filtered columns differ by orders of magnitude.
    scale = gram.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    sizes, directions = torch.linalg.eigh(gram * scale[:, None] * scale)  # reads the lower half
    # Directions below the roundoff of the block are noise.
    real = sizes > 10 * math.sqrt(k) * torch.finfo(block.dtype).eps * float(sizes[-1])
    basis = scale[:, None] * directions[:, real] * sizes[real].rsqrt()
    lower = projected.tril()
    values, rotation = torch.linalg.eigh(basis.T @ (lower + lower.tril(-1).T) @ basis)
    return values, basis @ rotation
