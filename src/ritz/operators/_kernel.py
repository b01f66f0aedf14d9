"""`KernelOperator`: kernel matrices, multiplied tile by tile and never stored."""

import math
from collections.abc import Iterator
from typing import Any, Literal, final, get_args

import numpy as np
import torch
from torch import Tensor

from ritz._core.batches import as_tensor
from ritz._core.checks import check_choice, check_finite, check_positive, check_tensor, check_type
from ritz._core.density import as_points
from ritz.operators._base import LinearOperator

Kernel = Literal["squared_exponential", "matern12", "matern32", "matern52"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
TILE = 256  # points per side of a tile: 512 KB in float64, which fit into the cache of a CPU core
LARGE_TILE = 4096  # the same on other devices, where a tile must keep all cores busy


@final
class KernelOperator(LinearOperator):
    r"""The covariance of points: ``outputscale`` times a kernel, plus ``noise`` on the diagonal.

    .. math:: K_{ij} = s^2 k(r_{ij}) + \sigma^2 \delta_{ij}

    Here :math:`r_{ij} = \|(x_i - x_j)/\ell\|`, and :math:`k(r)` is :math:`e^{-r^2/2}`
    (``squared_exponential``), :math:`e^{-r}` (``matern12``),
    :math:`(1 + \sqrt3 r) e^{-\sqrt3 r}` (``matern32``) or
    :math:`(1 + \sqrt5 r + \tfrac53 r^2) e^{-\sqrt5 r}` (``matern52``).

    A product evaluates each pair of points once: by symmetry, half of the matrix is enough.
    Distances are computed from differences of coordinates, which are accurate for close points.
    Memory: the points, twice the size of input and output, and four tiles of 256 x 256
    (4096 x 4096 on a GPU).

    Length scale, output scale and noise may be tensors that require gradients. The points are
    constants. Products cannot be differentiated by autograd. Use :meth:`slopes`, which returns
    derivatives of quadratic forms; the gradients of log determinants and likelihoods are based on
    it. :meth:`cross` and :meth:`matrix` return stored matrices, which can be differentiated.

    Args:
        points: :math:`x`, ``(n, d)``, a tensor or NumPy array.
        kernel: ``squared_exponential`` (the default), ``matern12``, ``matern32`` or ``matern52``.
        lengthscale: :math:`\ell`, one number or ``(d,)``. Defaults to 1.
        outputscale: The variance :math:`s^2`. Defaults to 1.
        noise: The variance :math:`\sigma^2` of the noise. Defaults to 0.

    Attributes:
        parameters: The tensors among ``lengthscale``, ``outputscale`` and ``noise`` that require
            gradients.
    """

    def __init__(
        self,
        points: "Tensor | np.ndarray[Any, Any]",
        *,
        kernel: Kernel = "squared_exponential",
        lengthscale: float | Tensor = 1.0,
        outputscale: float | Tensor = 1.0,
        noise: float | Tensor = 0.0,
    ) -> None:
        points = as_tensor(points)
        check_type("points", points, Tensor, "a tensor or NumPy array")
        if points.ndim != 2:
            raise ValueError(f"points must be (n, d), got {tuple(points.shape)}")
        # At 32 columns, evaluating a tile costs no more than multiplying with it.
        super().__init__(points.shape[0], dtype=points.dtype, device=points.device, block_size=32)
        check_choice("kernel", kernel, KERNELS)
        check_finite("points", points)
        self.points, self.kernel = points.detach(), kernel
        self.outputscale = _number("outputscale", outputscale)
        self.noise = _number("noise", noise)
        scale = as_points(lengthscale, "lengthscale").to(points)
        if scale.shape not in ((), (points.shape[1],)) or not bool((scale > 0).all()):
            raise ValueError(
                f"lengthscale must be a positive number or one per dimension, got {lengthscale}"
            )
        self.lengthscale = scale.detach()
        self._arguments = {"lengthscale": lengthscale, "outputscale": outputscale, "noise": noise}
        self.parameters = {
            name: value
            for name, value in self._arguments.items()
            if isinstance(value, Tensor) and value.requires_grad
        }
        # Quotients far from zero would round by more than the distances of close points. The
        # difference to a point nearby is exact.
        self._center = self.points.median(0).values
        self._scaled = (self.points - self._center) / self.lengthscale
        self._detail = f"{kernel}, {points.shape[1]} dimensions, noise {self.noise:g}"

    def _matmat(self, block: Tensor) -> Tensor:
        # (K x)' = x' K, as K = K'. Rows times tiles are up to twice as fast as tiles times columns.
        rows = block.T.contiguous()
        out = torch.zeros_like(rows)
        for i, j, tile in self._tiles():
            profile = radial(self.kernel, tile)
            # Not addmm_ in place, which cuBLAS does not support for a part of a single row.
            out[:, i] += rows[:, j] @ profile.T
            if i is not j:
                out[:, j] += rows[:, i] @ profile
        return out.mul_(self.outputscale).add_(rows, alpha=self.noise).T.contiguous()

    def slopes(self, block: Tensor) -> dict[str, Tensor]:
        r"""Return :math:`\partial(v_l^\top K v_l)/\partial\theta` for each parameter.

        It takes as much memory as a product, and about the time of one product per length scale.

        Args:
            block: The columns :math:`v_l`, ``(n, k)``.

        Returns:
            ``(k, *s)`` for each of :attr:`parameters` of shape ``s``; float64 on the CPU.
        """
        check_tensor("block", block, dtype=self.dtype, device=self.device, rows=self.shape[0])
        rows = block.detach().reshape(self.shape[0], -1).T.contiguous()
        slopes = {
            name: torch.zeros(len(rows), value.numel(), dtype=torch.float64, device=self.device)
            for name, value in self.parameters.items()
        }
        if "noise" in slopes:  # dK / d sigma^2 = I
            slopes["noise"][:, 0] = _dots(rows, rows)
        if slopes.keys() - {"noise"}:
            for i, j, tile in self._tiles():
                for name, axis, slope in self._derivatives(i, j, tile):
                    # v_i' T v_j. A tile above the diagonal also counts for its mirror image.
                    form = _dots(rows[:, j] @ slope.T, rows[:, i])
                    slopes[name][:, axis] += form if i is j else 2 * form
        if "lengthscale" in slopes:
            slopes["lengthscale"] *= self.outputscale / self.lengthscale
        return {
            name: slopes[name].reshape(len(rows), *value.shape).cpu()
            for name, value in self.parameters.items()
        }

    def cross(self, points: Tensor) -> Tensor:
        r"""Return the matrix :math:`s^2 k(x_i, x_j')`, ``(n, m)``, differentiable by autograd.

        Args:
            points: :math:`x'`, ``(m, d)``.
        """
        if points.ndim != 2 or points.shape[1] != self.points.shape[1]:
            expected = f"(m, {self.points.shape[1]})"
            raise ValueError(f"points must be {expected}, got {tuple(points.shape)}")
        scale, outputscale = (
            torch.as_tensor(self._arguments[name], dtype=self.dtype, device=self.device)
            for name in ("lengthscale", "outputscale")
        )
        x, other = (part - self._center for part in (self.points, points.to(self.points)))
        distances = _distances(x / scale, other / scale)
        return outputscale * radial(self.kernel, distances)

    def matrix(self) -> Tensor:
        """Return the matrix itself, ``(n, n)``, differentiable by autograd."""
        noise = torch.as_tensor(self._arguments["noise"], dtype=self.dtype, device=self.device)
        return self.cross(self.points) + torch.diag(noise.expand(self.shape[0]))

    def double(self) -> "KernelOperator":
        """Return the same operator in float64, with the same parameters."""
        return KernelOperator(self.points.double(), kernel=self.kernel, **self._arguments)

    def _tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield rows, columns and distances of the tiles on and above the diagonal."""
        side = TILE if self.device.type == "cpu" else LARGE_TILE
        parts = [slice(start, start + side) for start in range(0, self.shape[0], side)]
        for number, i in enumerate(parts):
            for j in parts[number:]:
                yield i, j, _distances(self._scaled[i], self._scaled[j])

    def _derivatives(self, i: slice, j: slice, tile: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the derivatives of a tile with respect to output scale and length scales.

        Those of the length scales must still be multiplied by ``outputscale / lengthscale``.
        """
        if "outputscale" in self.parameters:
            yield "outputscale", 0, radial(self.kernel, tile)
        if "lengthscale" not in self.parameters:
            return
        falling = falloff(self.kernel, tile)
        if not self.lengthscale.ndim:  # l dk/dl = -r k'(r)
            yield "lengthscale", 0, falling * tile.square()
            return
        # With r^2 = sum_a ((x_a - y_a) / l_a)^2, l_a dk/dl_a = -k'(r)/r ((x_a - y_a) / l_a)^2.
        for axis in range(len(self.lengthscale)):
            x, y = self._scaled[i, axis], self._scaled[j, axis]
            yield "lengthscale", axis, (x[:, None] - y).square_().mul_(falling)


def radial(kernel: Kernel, r: Tensor) -> Tensor:
    """Return the profile :math:`k(r)`."""
    if kernel == "squared_exponential":
        return torch.exp(-0.5 * r.square())
    if kernel == "matern12":
        return torch.exp(-r)
    r = math.sqrt(3.0 if kernel == "matern32" else 5.0) * r
    polynomial = r + 1 if kernel == "matern32" else torch.addcmul(r + 1, r, r, value=1 / 3)
    return polynomial * torch.exp(-r)


def falloff(kernel: Kernel, r: Tensor) -> Tensor:
    r"""Return :math:`-k'(r)/r`. Times :math:`r^2` it is :math:`\partial k/\partial \log \ell`."""
    if kernel == "squared_exponential":
        return torch.exp(-0.5 * r.square())
    if kernel == "matern12":
        return torch.exp(-r) / r.clamp_min(torch.finfo(r.dtype).tiny)  # times r² = 0 there
    r = math.sqrt(3.0 if kernel == "matern32" else 5.0) * r
    return 3 * torch.exp(-r) if kernel == "matern32" else 5 / 3 * (r + 1) * torch.exp(-r)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    if x.device.type != "cpu" and not (x.requires_grad or y.requires_grad):
        return _distances_by_axes(x, y)
    # |x|^2 + |y|^2 - 2 x'y, the faster mode of cdist, would cancel for close points.
    distances: Tensor = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    return distances


def _distances_by_axes(x: Tensor, y: Tensor) -> Tensor:
    # cdist uses many threads per pair of points on a GPU, which is slow for short vectors.
    squares = torch.zeros(len(x), len(y), dtype=x.dtype, device=x.device)
    for of_x, of_y in zip(x.T, y.T, strict=True):
        difference = of_x[:, None] - of_y
        squares.addcmul_(difference, difference)
    return squares.sqrt_()


def _dots(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y).sum(1)


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor):
        if value.ndim:
            raise ValueError(f"{name} must be one number, got {tuple(value.shape)}")
        value = float(value.detach())
    check_positive(name, value, zero=True)
    return float(value)
