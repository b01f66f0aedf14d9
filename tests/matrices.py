"""Matrices and seeded generators that tests of several packages use."""

import scipy.sparse
import torch

from ritz.operators import FunctionOperator
from ritz.testing import with_spectrum

PRECISIONS = [torch.float32, torch.float64]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def hidden(matrix, calls=None):
    """The operator of a matrix that is known by its products alone.

    ``calls`` receives the number of columns of each product.
    """

    def product(block):
        if calls is not None:
            calls.append(block.shape[1])
        return matrix @ block

    return FunctionOperator(product, n=len(matrix), dtype=matrix.dtype)


def grid(*sides):
    """The Laplacian of a grid with Dirichlet ends: squares and cubes have repeated eigenvalues."""
    total = scipy.sparse.csr_array((1, 1))
    for side in sides:
        shape = (side, side)
        line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=shape)
        before, here = (scipy.sparse.eye_array(n) for n in (total.shape[0], side))
        total = scipy.sparse.kron(total, here) + scipy.sparse.kron(before, line)
    return scipy.sparse.csr_array(total)


def outliers(dtype, generator, n=1000):
    """A bulk on [0, 1] and five well separated eigenvalues: the operator and the eigenvalues."""
    values = torch.linspace(0, 1, n, dtype=torch.float64)
    values[-5:] = torch.tensor([5.0, 7.0, 10.0, 13.0, 20.0])
    return with_spectrum(values.to(dtype), generator=generator), values
