"""Random matrices with a known spectrum: Wigner, Wishart, spiked, network-like."""

from collections.abc import Callable

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_finite
from ritz._core.random import resolve_generator
from ritz.operators import DenseOperator, FunctionOperator, LinearOperator


def with_spectrum(
    eigenvalues: Tensor, *, dense: bool = True, generator: torch.Generator | None = None
) -> LinearOperator:
    r"""Return :math:`Q \operatorname{diag}(\lambda) Q^\top` with a random orthogonal :math:`Q`.

    Args:
        eigenvalues: Eigenvalues :math:`\lambda`, ``(n,)``, in any order. The operator gets their
            dtype and device.
        dense: If true, ``Q`` is uniform (Haar) and the matrix is formed. If false, ``Q`` is a
            product of three reflections and the matrix is not formed: a product costs 12 vector
            operations and the memory is 4 vectors, for millions of rows.
        generator: Source of ``Q``. Defaults to a new generator with seed 1.
    """
    if eigenvalues.ndim != 1:
        raise ValueError(f"eigenvalues must be a vector, got {tuple(eigenvalues.shape)}")
    check_finite("eigenvalues", eigenvalues)
    generator = _source(generator)
    n, dtype, device = len(eigenvalues), eigenvalues.dtype, eigenvalues.device
    if not dense:
        product = _reflected(eigenvalues, _gaussian(3, n, generator, dtype).to(device))
        return FunctionOperator(product, n=n, dtype=dtype, device=device, name="chosen spectrum")
    q, r = torch.linalg.qr(_gaussian(n, n, generator, torch.float64).to(device))
    # Q is uniform only if the diagonal of R is positive (Mezzadri 2007).
    q *= r.diagonal().sign()
    matrix = (q * eigenvalues.double()) @ q.T
    # Symmetrised, because roundoff makes Q diag(lambda) Q' slightly asymmetric.
    return DenseOperator(((matrix + matrix.T) / 2).to(dtype))


def wigner(
    n: int, *, dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None
) -> DenseOperator:
    r"""Return a Wigner matrix of entries with variance :math:`1/n`: a semicircle on ``[-2, 2]``."""
    return spiked_wigner(n, spikes=(), dtype=dtype, generator=generator)


def spiked_wigner(
    n: int,
    *,
    spikes: tuple[float, ...],
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> DenseOperator:
    r"""Return a Wigner matrix plus :math:`\sum_i s_i u_i u_i^\top` with orthonormal :math:`u_i`.

    A spike :math:`|s| > 1` leaves the semicircle, at :math:`s + 1/s` for large ``n``.
    """
    n = check_count("n", n, low=max(1, len(spikes)))
    generator = _source(generator)
    # (G + G') / sqrt(2 n) has off-diagonal entries of variance 1/n.
    noise = _gaussian(n, n, generator, dtype)
    matrix = noise.add_(noise.T.clone()).div_((2 * n) ** 0.5)
    # W + sum_i s_i u_i u_i', with orthonormal u_i from a QR decomposition
    directions = torch.linalg.qr(_gaussian(n, len(spikes), generator, dtype)).Q
    return DenseOperator(matrix + directions * torch.tensor(spikes, dtype=dtype) @ directions.T)


def wishart(
    n: int,
    num_samples: int,
    *,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> DenseOperator:
    r"""Return :math:`X X^\top / T`, ``X (n, T)`` Gaussian: Marchenko-Pastur of ratio ``n/T``."""
    return spiked_wishart(n, num_samples, spikes=(), dtype=dtype, generator=generator)


def spiked_wishart(
    n: int,
    num_samples: int,
    *,
    spikes: tuple[float, ...],
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> DenseOperator:
    r"""Return the sample covariance of Gaussians whose covariance is ``diag(spikes, 1, ..., 1)``.

    A spike :math:`s = 1 + \theta` with :math:`\theta > \sqrt q`, :math:`q = n/T`, leaves the bulk,
    at :math:`(1 + \theta)(1 + q/\theta)` for large ``n``.
    """
    n = check_count("n", n, low=max(1, len(spikes)))
    num_samples = check_count("num_samples", num_samples)
    if any(spike <= 0 for spike in spikes):
        raise ValueError(f"spikes must be positive variances, got {spikes}")
    # Rows scaled by sqrt(s) have variance s.
    samples = _gaussian(n, num_samples, _source(generator), dtype)
    samples[: len(spikes)] *= torch.tensor(spikes, dtype=dtype).sqrt()[:, None]
    return DenseOperator(samples @ samples.T / num_samples)


def network_like(
    n: int = 1000,
    *,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> tuple[LinearOperator, Tensor]:
    """Return a matrix with a spectrum like that of the Hessian of a network, and its eigenvalues.

    Of 1000 eigenvalues 470 are uniform on ``[0, 15]``, 20 on ``[0, 60]``, 10 on ``[-10, 0]``, and
    500 are zero. They are returned in ascending order.

    Reference: Section 4.5.2 of *Spectral Machine Learning*.
    """
    n = check_count("n", n, low=100)
    generator = _source(generator)
    drawn = []
    for share, low, high in ((470, 0.0, 15.0), (20, 0.0, 60.0), (10, -10.0, 0.0)):
        # Drawn in float32 whatever the dtype, so that all dtypes have the same eigenvalues.
        uniform = torch.empty(share * n // 1000, dtype=torch.float32, device=generator.device)
        drawn.append(low + (high - low) * uniform.uniform_(generator=generator))
    values = torch.zeros(n, dtype=dtype)
    values[: sum(map(len, drawn))] = torch.cat(drawn).to(dtype)
    values = values.sort().values
    return with_spectrum(values, generator=generator), values


def _source(generator: torch.Generator | None) -> torch.Generator:
    # Seed 1, so that default matrices are independent of default probes, whose seed is 0.
    return resolve_generator(generator or torch.Generator().manual_seed(1))


def _gaussian(rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=dtype, device=generator.device)


def _reflected(eigenvalues: Tensor, normals: Tensor) -> Callable[[Tensor], Tensor]:
    # Q = H_3 H_2 H_1 with H_i = I - 2 u_i u_i', so A = Q' diag(lambda) Q needs no matrix.
    normals = normals / normals.norm(dim=1, keepdim=True)

    def reflect(block: Tensor, order: tuple[int, ...]) -> Tensor:
        for i in order:
            # (I - 2 u u') x, with u'x in float64: in float32 the result would not be orthogonal.
            inner = (normals[i].double() @ block.double()).to(block.dtype)
            block = torch.addmm(block, normals[i, :, None], inner[None], alpha=-2)
        return block

    return lambda block: reflect(eigenvalues[:, None] * reflect(block, (0, 1, 2)), (2, 1, 0))
