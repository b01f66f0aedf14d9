"""The one interface everything else needs: a symmetric matrix that multiplies blocks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from ritz._core.checks import check_real_floating, check_tensor
from ritz._core.random import probes, resolve_generator

if TYPE_CHECKING:
    from ritz.operators._algebra import ScaledOperator, SumOperator

DENSE_LIMIT = 2**31  # bytes: what dense() writes without being told that it may


class LinearOperator(ABC):
    """A real symmetric matrix ``(n, n)``, known by its products with blocks ``(n, k)``.

    A subclass calls ``super().__init__`` and implements ``_matmat``; it may assume a block of
    the right shape, dtype and device with at least one column, must not change it, and must
    return a new tensor.

    Attributes:
        shape: ``(n, n)``.
        dtype: Of the operator, and so of every block it takes and returns.
        device: Likewise.
        block_size: Number of columns at which a product is cheapest per column.
        origin: What results say of the matrix: ``matrix``, such as ``hessian`` or ``laplacian``,
            and ``batch_norm``, the mode of a network that has it; empty where nothing is known.
    """

    def __init__(
        self,
        n: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        block_size: int = 8,
        origin: Mapping[str, str] | None = None,
    ) -> None:
        if n < 1:
            raise ValueError(f"an operator must have at least one row, got {n}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"an operator must be made of torch tensors, got {dtype!r}: see ritz.as_operator"
            )
        check_real_floating("an operator", dtype)
        self.shape = (n, n)
        self.dtype = dtype
        self.device = torch.device(device)
        self.block_size = block_size
        self.origin = dict(origin or {})

    @abstractmethod
    def _matmat(self, block: Tensor) -> Tensor:
        """The product ``(n, k)`` of this matrix with a block ``(n, k)``."""

    def matmat(self, block: Tensor) -> Tensor:
        """Return the product with a block ``(n, k)`` or a vector ``(n,)``; the input is kept."""
        check_tensor("block", block, dtype=self.dtype, device=self.device, rows=self.shape[0])
        columns = block if block.ndim == 2 else block[:, None]
        product = self._matmat(columns) if columns.shape[1] else torch.empty_like(columns)
        if product.shape != columns.shape or product.dtype != self.dtype:
            raise TypeError(
                f"the product of {self!r} must be {tuple(columns.shape)} of {self.dtype}, "
                f"got {tuple(product.shape)} of {product.dtype}"
            )
        return product if block.ndim == 2 else product[:, 0]

    def __matmul__(self, block: Tensor) -> Tensor:
        return self.matmat(block)

    def dense(self, *, max_bytes: int = DENSE_LIMIT) -> Tensor:
        """Return the matrix itself, ``(n, n)``; costs ``n`` products and ``n`` vectors of memory.

        Args:
            max_bytes: Refuse to write a larger matrix than this.
        """
        n = self.shape[0]
        size = n * n * self.dtype.itemsize
        if size > max_bytes:
            raise ValueError(
                f"dense() would write {size / 2**30:.1f} GiB; pass max_bytes={size} to allow it"
            )
        matrix = torch.empty(n, n, dtype=self.dtype, device=self.device)
        for start in range(0, n, 256):
            columns = torch.zeros(n, min(256, n - start), dtype=self.dtype, device=self.device)
            columns[start:].fill_diagonal_(1)
            matrix[:, start : start + columns.shape[1]] = self.matmat(columns)
        return matrix

    def to_scipy(self) -> "ScipyOperator[Any]":
        """Return a ``scipy.sparse.linalg.LinearOperator`` on NumPy arrays, moved as needed."""

        def product(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            # A copy: SciPy's own arrays may be read-only, or change under way.
            block = torch.tensor(array, dtype=self.dtype, device=self.device)
            return self.matmat(block).cpu().numpy()

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        return ScipyOperator(
            shape=self.shape,
            matvec=lambda x: product(x.reshape(-1)),
            rmatvec=lambda x: product(x.reshape(-1)),
            matmat=product,
            rmatmat=product,
            dtype=dtype,
        )

    def __add__(self, other: "LinearOperator") -> "SumOperator":
        from ritz.operators._algebra import SumOperator

        return SumOperator(self, other) if isinstance(other, LinearOperator) else NotImplemented

    def __sub__(self, other: "LinearOperator") -> "SumOperator":
        return self + (-other) if isinstance(other, LinearOperator) else NotImplemented

    def __mul__(self, factor: float) -> "ScaledOperator":
        from ritz.operators._algebra import ScaledOperator

        return ScaledOperator(self, factor) if isinstance(factor, int | float) else NotImplemented

    __rmul__ = __mul__

    def __neg__(self) -> "ScaledOperator":
        return -1.0 * self

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        detail = self._detail()
        return (
            f"{type(self).__name__}({self.shape[0]:,} x {self.shape[1]:,}, {dtype}, {self.device}"
            + (f", {detail}" if detail else "")
            + ")"
        )

    def _detail(self) -> str:
        """What a subclass has to add to its ``repr``, such as the number of stored entries."""
        return ""


def check_symmetric(
    op: LinearOperator, *, rtol: float | None = None, generator: torch.Generator | None = None
) -> None:
    r"""Raise unless :math:`u^\top A v = v^\top A u` for two random vectors; two products.

    A matrix whose antisymmetric part is of relative size ``rtol`` (root of machine precision by
    default) is found with near certainty, at the price of one block product.
    """
    n = op.shape[0]
    block = probes(
        (n, 2),
        kind="gaussian",
        generator=resolve_generator(generator),
        dtype=op.dtype,
        device=op.device,
    )
    product = op.matmat(block).double()
    peak = float(product.abs().max())
    product /= peak or 1.0  # the square of a norm may be out of range where the norm is not
    cross = block.double().T @ product
    scale = float(product.norm() * block.double().norm()) / 2
    rtol = torch.finfo(op.dtype).eps ** 0.5 if rtol is None else rtol
    # The two numbers are each about scale / sqrt(n) for a random matrix: hence the root.
    gap = abs(float(cross[0, 1] - cross[1, 0]))
    allowed = rtol * scale / n**0.5 + n * torch.finfo(op.dtype).tiny / (peak or 1.0)  # underflow
    if not gap <= allowed:
        raise ValueError(
            f"{op!r} must be symmetric: u'Av and v'Au differ by {peak * gap:.2g} "
            f"where roundoff would leave {peak * allowed:.1g}"
        )
