"""`LinearOperator`, the base class of operators; `check_symmetric`; sums and multiples."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from ritz._core.checks import (
    as_plain,
    check_count,
    check_number,
    check_real_floating,
    check_rtol,
    check_tensor,
    check_type,
    is_below,
)
from ritz._core.random import draw_probes, resolve_generator


class LinearOperator(ABC):
    """A real symmetric matrix ``(n, n)``, represented by its products with blocks ``(n, k)``.

    A block is a tensor whose ``k`` columns are vectors that are multiplied at once.

    A subclass calls ``super().__init__`` and implements ``_matmat``. This method receives a block
    of the correct shape, dtype and device with at least one column. It must not change the block,
    and must return a new tensor. The subclass may set ``_detail``, a text for ``repr``.

    Attributes:
        shape: ``(n, n)``.
        dtype: Data type of the operator and of its blocks.
        device: Device of the operator and of its blocks.
        block_size: Number of columns at which a product is cheapest per column.
        origin: Metadata that is copied into results: ``matrix``, such as ``hessian`` or
            ``laplacian``, and ``batch_norm``, the mode of batch norm of the network.

    Example:
        >>> class Identity(LinearOperator):
        ...     def _matmat(self, block):
        ...         return block.clone()
        >>> Identity(3, dtype=torch.float32, device="cpu") @ torch.ones(3)
        tensor([1., 1., 1.])
    """

    _detail = ""

    def __init__(
        self, n: int, *, dtype: torch.dtype, device: torch.device | str, block_size: int = 8
    ) -> None:
        n = check_count("n", n, low=0)
        if not n:
            raise ValueError("an operator must have at least one row, got 0")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"an operator must be made of torch tensors, got {dtype!r}: use ritz.as_operator()"
            )
        check_real_floating("an operator", dtype)
        self.shape, self.dtype, self.device = (n, n), dtype, torch.device(device)
        self.block_size = block_size
        self.origin: dict[str, str] = {}

    @abstractmethod
    def _matmat(self, block: Tensor) -> Tensor:
        """Return the product ``(n, k)`` of this matrix with a block ``(n, k)``."""

    def matmat(self, block: Tensor) -> Tensor:
        """Return the product with a block ``(n, k)`` or a vector ``(n,)``."""
        check_tensor("block", block, dtype=self.dtype, device=self.device, rows=self.shape[0])
        columns = block if block.ndim == 2 else block[:, None]
        before = _writes(columns)
        product = self._matmat(columns) if columns.shape[1] else torch.empty_like(columns)
        if _writes(columns) != before:
            raise ValueError(f"the product of {self!r} must not change the block in place")
        if product.shape != columns.shape or product.dtype != self.dtype:
            raise TypeError(
                f"the product of {self!r} must be {tuple(columns.shape)} of {self.dtype}, "
                f"got {tuple(product.shape)} of {product.dtype}"
            )
        return product if block.ndim == 2 else product[:, 0]

    def __matmul__(self, block: Tensor) -> Tensor:
        return self.matmat(block)

    @property
    def roundoff(self) -> float:
        """Relative error of a product by roundoff: the machine precision, unless more is known."""
        return torch.finfo(self.dtype).eps

    def dense(self, *, max_bytes: int = 2**31) -> Tensor:
        """Return the matrix as a tensor ``(n, n)``, from ``n`` products.

        Args:
            max_bytes: Raise if the matrix would be larger than this.
        """
        n = self.shape[0]
        size = n * n * self.dtype.itemsize
        if size > max_bytes:
            raise ValueError(
                f"dense() would allocate {size / 2**30:.1f} GiB; pass max_bytes={size} to allow it"
            )
        # A = A I, in blocks of 256 columns of the identity.
        matrix = torch.empty(n, n, dtype=self.dtype, device=self.device)
        for start in range(0, n, 256):
            columns = torch.zeros(n, min(256, n - start), dtype=self.dtype, device=self.device)
            columns[start:].fill_diagonal_(1)
            matrix[:, start : start + columns.shape[1]] = self.matmat(columns)
        return matrix

    def to_scipy(self) -> "ScipyOperator[Any]":
        """Return a ``scipy.sparse.linalg.LinearOperator``, which takes and returns NumPy arrays."""

        def matmat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            # A copy, since arrays of SciPy may be read-only, or change during the product.
            block = torch.tensor(array, dtype=self.dtype, device=self.device)
            return self.matmat(block).cpu().numpy()

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        # A' = A, so products with the transpose are the same.
        products = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), matmat)
        return ScipyOperator(shape=self.shape, dtype=dtype, **products)

    def __add__(self, other: "LinearOperator") -> "SumOperator":
        _refuse_number(other)
        return SumOperator(self, other) if isinstance(other, LinearOperator) else NotImplemented

    def __sub__(self, other: "LinearOperator") -> "SumOperator":
        _refuse_number(other)
        return self + (-other) if isinstance(other, LinearOperator) else NotImplemented

    def __mul__(self, factor: float) -> "ScaledOperator":
        factor = as_plain(factor)
        return ScaledOperator(self, factor) if isinstance(factor, int | float) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "ScaledOperator":
        divisor = as_plain(divisor)
        return self * (1 / divisor) if isinstance(divisor, int | float) else NotImplemented

    def __neg__(self) -> "ScaledOperator":
        return -1.0 * self

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [f"{self.shape[0]:,} x {self.shape[1]:,}", dtype, str(self.device), self._detail]
        return f"{type(self).__name__}({', '.join(filter(None, parts))})"


def _refuse_number(other: Any) -> None:
    if isinstance(as_plain(other), int | float):
        raise TypeError(
            "a number cannot be added to an operator, as it may mean A + c I or A + c in every "
            "entry: the first is ritz.operators.ShiftedOperator(op, c)"
        )


def check_symmetric(
    op: LinearOperator, *, rtol: float | None = None, generator: torch.Generator | None = None
) -> None:
    r"""Raise unless :math:`u^\top A v = v^\top A u` for two random vectors.

    This detects an antisymmetric part of relative size ``rtol`` with high probability. ``rtol``
    defaults to the square root of machine precision. Cost: one product with a block of two vectors.
    """
    check_linear("op", op)
    rtol = torch.finfo(op.dtype).eps ** 0.5 if rtol is None else rtol
    check_rtol(rtol)
    n = op.shape[0]
    block = draw_probes(op, 2, kind="gaussian", generator=resolve_generator(generator))
    product = op.matmat(block).double()
    peak = float(product.abs().max()) or 1.0
    product /= peak  # the square of a norm may overflow where the norm does not
    cross = block.double().T @ product
    scale = float(product.norm() * block.double().norm()) / 2
    # For random vectors, u'Av and v'Au are of order |u| |Av| / sqrt(n).
    gap = abs(float(cross[0, 1] - cross[1, 0]))
    allowed = rtol * scale / n**0.5 + n * torch.finfo(op.dtype).tiny / peak  # underflow
    if not is_below(gap, allowed):
        raise ValueError(
            f"{op!r} must be symmetric, but u'Av and v'Au differ by {peak * gap:.2g} (tolerance "
            f"{peak * allowed:.1g})"
        )


# ------------------------------------------------------------------------------------------
# Operators made of operators.


@final
class SumOperator(LinearOperator):
    r"""The sum :math:`\sum_i A_i` of operators of one shape, dtype and device."""

    def __init__(self, *terms: LinearOperator) -> None:
        first = check_alike("terms", terms, shape=True)
        width = min(term.block_size for term in terms)
        super().__init__(first.shape[0], dtype=first.dtype, device=first.device, block_size=width)
        self.terms = terms
        self._detail = " + ".join(type(term).__name__ for term in terms)

    @property
    def roundoff(self) -> float:
        """The largest of the terms."""
        return max(term.roundoff for term in self.terms)

    def _matmat(self, block: Tensor) -> Tensor:
        # Not in place: a user-defined operator may return a tensor that it still uses.
        total = self.terms[0].matmat(block)
        for term in self.terms[1:]:
            total = total + term.matmat(block)
        return total


class WrappingOperator(LinearOperator):
    """Base class of operators made of one other operator, ``op``."""

    def __init__(self, op: LinearOperator, detail: str, *, n: int | None = None) -> None:
        check_linear("op", op)
        n = op.shape[0] if n is None else n
        super().__init__(n, dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self._detail = op, detail

    @property
    def roundoff(self) -> float:
        """That of the operator."""
        return self.op.roundoff


@final
class ScaledOperator(WrappingOperator):
    r"""The multiple :math:`c A`."""

    def __init__(self, op: LinearOperator, factor: float) -> None:
        check_number("factor", factor)
        super().__init__(op, f"{factor:g} * {type(op).__name__}")
        self.factor = float(factor)

    def _matmat(self, block: Tensor) -> Tensor:
        return self.op.matmat(block) * self.factor


def check_alike(name: str, ops: Sequence[LinearOperator], *, shape: bool = False) -> LinearOperator:
    """Return the first operator. Raise unless there is one and all agree in dtype and device."""
    if not ops:
        raise ValueError(f"{name} must contain at least one operator, got none")
    for op in ops:
        check_linear(name, op)
    first = ops[0]
    for op in ops[1:]:
        alike = (op.dtype, op.device) == (first.dtype, first.device)
        if not alike or (shape and op.shape != first.shape):
            kinds = "shape, dtype and device" if shape else "dtype and device"
            raise ValueError(f"{name} must agree in {kinds}, got {first!r} and {op!r}")
    return first


def check_linear(name: str, op: Any) -> None:
    """Raise unless ``op`` is an operator."""
    check_type(name, op, LinearOperator, "an operator, such as that of ritz.as_operator(matrix)")


def _writes(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor. 0 if torch does not count them."""
    return 0 if tensor.is_inference() else tensor._version
