"""An operator from a user's own product."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ritz._core.params import ParamSpace
from ritz.operators._base import LinearOperator


@final
class FunctionOperator(LinearOperator):
    """The matrix whose product with a block is what a function returns.

    Its symmetry is the caller's promise: :func:`ritz.operators.check_symmetric` tests it for two
    products, and every Lanczos run watches it for none.

    Args:
        function: Takes a block ``(n, k)`` and returns the product ``(n, k)``; with
            ``columnwise``, takes and returns a vector ``(n,)``.
        n: Order of the matrix.
        dtype: Of the blocks.
        device: Of the blocks.
        columnwise: Whether the function knows single vectors only.
        name: What ``repr`` calls it.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        *,
        n: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        columnwise: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(n, dtype=dtype, device=device)
        self.function, self.columnwise = function, columnwise
        self.name = _name(function) if name is None else name

    @classmethod
    def on_params(
        cls, function: Callable[[dict[str, Tensor]], dict[str, Tensor]], space: ParamSpace
    ) -> "FunctionOperator":
        """Return the operator of a product on named tensors, such as parameters of a model."""
        return cls(
            lambda vector: space.flatten(function(space.unflatten(vector))),
            n=space.size,
            dtype=space.dtype,
            device=space.device,
            columnwise=True,
            name=_name(function),
        )

    def _matmat(self, block: Tensor) -> Tensor:
        if not self.columnwise:
            product = self.function(block)
        else:
            product = torch.stack([self.function(column) for column in block.T], dim=1)
        if not isinstance(product, Tensor) or product.shape != block.shape:
            got = tuple(product.shape) if isinstance(product, Tensor) else type(product).__name__
            raise ValueError(f"{self.name} must return {tuple(block.shape)}, got {got}")
        product = product.detach()  # a Hessian's product by autograd may still carry its graph
        # Callers write into products; a function may return its own argument.
        return product.clone() if _share_memory(product, block) else product

    def _detail(self) -> str:
        return self.name


def _share_memory(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
