"""Kernel matrices, multiplied tile by tile and never formed."""

import math
from typing import Literal, final

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_finite, check_range
from ritz.operators.base import LinearOperator

Kernel = Literal["squared_exponential", "matern12", "matern32", "matern52"]
KERNELS = ("squared_exponential", "matern12", "matern32", "matern52")
TILE = 2048  # points a side of a tile: 32 MiB in float64, large enough to run at full speed


@final
class KernelOperator(LinearOperator):
    r"""The covariance :math:`K_{ij} = s^2 k(r_{ij}) + \sigma^2 \delta_{ij}` of points.

    With :math:`r_{ij} = \|(x_i - x_j)/\ell\|`, :math:`k(r)` is :math:`e^{-r^2/2}`
    (``squared_exponential``), :math:`e^{-r}` (``matern12``),
    :math:`(1 + \sqrt3 r) e^{-\sqrt3 r}` (``matern32``) or
    :math:`(1 + \sqrt5 r + \tfrac53 r^2) e^{-\sqrt5 r}` (``matern52``).

    A product evaluates each pair of points once (half the matrix, by symmetry) from coordinate
    differences, so close points lose no digits. Memory: the points, input and output, and three
    tiles of 2048 x 2048.

    Args:
        points: :math:`x`, ``(n, d)``.
        kernel: Which :math:`k`.
        lengthscale: :math:`\ell`, one number or ``(d,)``.
        outputscale: :math:`s^2`.
        noise: :math:`\sigma^2`.
    """

    def __init__(
        self,
        points: Tensor,
        *,
        kernel: Kernel = "squared_exponential",
        lengthscale: float | Tensor = 1.0,
        outputscale: float = 1.0,
        noise: float = 0.0,
    ) -> None:
        if points.ndim != 2:
            raise ValueError(f"points must be (n, d), got {tuple(points.shape)}")
        super().__init__(points.shape[0], dtype=points.dtype, device=points.device)
        check_choice("kernel", kernel, KERNELS)
        check_finite("points", points)
        check_range("outputscale", outputscale, low=0)
        check_range("noise", noise, low=0)
        scale = torch.as_tensor(lengthscale, dtype=points.dtype, device=points.device).detach()
        if scale.shape not in ((), (points.shape[1],)) or not bool((scale > 0).all()):
            raise ValueError(
                f"lengthscale must be positive, one or one a dimension, got {lengthscale}"
            )
        self.points, self.kernel, self.lengthscale = points.detach(), kernel, scale
        self.outputscale, self.noise = float(outputscale), float(noise)
        self._scaled = self.points / scale

    def _matmat(self, block: Tensor) -> Tensor:
        out = block * self.noise
        tiles = [slice(start, start + TILE) for start in range(0, len(block), TILE)]
        for i, rows in enumerate(tiles):
            for columns in tiles[i:]:
                tile = self._tile(self._scaled[rows], self._scaled[columns])
                out[rows].addmm_(tile, block[columns], alpha=self.outputscale)
                if columns is not rows:
                    out[columns].addmm_(tile.T, block[rows], alpha=self.outputscale)
        return out

    def _tile(self, x: Tensor, y: Tensor) -> Tensor:
        r = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
        if self.kernel == "squared_exponential":
            return r.square_().mul_(-0.5).exp_()
        if self.kernel == "matern12":
            return r.neg_().exp_()
        r.mul_(math.sqrt(3.0 if self.kernel == "matern32" else 5.0))
        polynomial = r + 1 if self.kernel == "matern32" else torch.addcmul(r + 1, r, r, value=1 / 3)
        return polynomial.mul_(r.neg_().exp_())

    def _detail(self) -> str:
        return f"{self.kernel}, {self.points.shape[1]} dimensions, noise {self.noise:g}"
