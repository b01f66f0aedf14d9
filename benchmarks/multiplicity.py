"""Extreme pairs with repeated eigenvalues, against SciPy's ``eigsh``: products, seconds, errors.

``certify`` is how ritz makes sure that no pair is missing. All residuals are 1e-6 of the norm.
``wrong`` counts the results, one for each of several start vectors, with an eigenvalue that is off
by more than that; the exact ones are known in closed form, or are those of a run to 1e-10.
"""

import argparse

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from matrices import laplacian, random_graph
from timing import interleaved, median, ratio, write

import ritz

RTOL = 1e-6


def plain_grid(*sides):
    """Return the Laplacian of a grid with Dirichlet ends, and its eigenvalues."""
    total, values = sp.csr_array((1, 1)), np.zeros(1)
    for side in sides:
        ones = np.ones(side - 1)
        line = sp.diags_array([np.full(side, 2.0), -ones, -ones], offsets=[0, 1, -1])
        total = sp.kron(total, sp.eye_array(side)) + sp.kron(sp.eye_array(total.shape[0]), line)
        cosines = 2 - 2 * np.cos(np.pi * np.arange(1, side + 1) / (side + 1))
        values = np.add.outer(values, cosines).ravel()
    return sp.csr_array(total), np.sort(values)


def cases(scale):
    yield "square grid", "smallest", 6, *plain_grid(100 * scale, 100 * scale)
    yield "cubic grid", "smallest", 10, *plain_grid(*[20 * scale] * 3)
    graph = laplacian(random_graph(20_000 * scale**2, 80_000 * scale**2))
    yield "random graph", "largest", 10, graph, None
    yield "random graph, twice", "largest", 10, sp.csr_array(sp.block_diag([graph] * 2)), None


class ByRitz:
    """Pairs by ritz, from another start vector in each call."""

    def __init__(self, matrix, end, wanted, certify):
        self.op, self.options = ritz.operators.SparseOperator(matrix), {end: wanted}
        self.certify, self.values, self.products = certify, [], []

    def __call__(self):
        pairs = ritz.eigenpairs(
            self.op,
            **self.options,
            rtol=RTOL,
            certify=self.certify,
            max_steps=20_000,  # a grid of 160,000 points needs 4,902 with a certificate
            generator=torch.Generator().manual_seed(len(self.values)),
        )
        pairs.raise_if_failed()
        self.values.append(pairs.values.numpy())
        self.products.append(pairs.num_products)


class ByScipy:
    """Pairs by ARPACK, to the same residuals or, with ``tol=0``, to roundoff."""

    def __init__(self, matrix, end, wanted, tol):
        self.matrix, self.wanted, self.which = matrix, wanted, {"largest": "LA"}.get(end, "SA")
        self.tol, self.values, self.products = tol, [], []

    def __call__(self):
        count = 0

        def product(x):
            nonlocal count
            count += 1
            return self.matrix @ x

        op = sla.LinearOperator(self.matrix.shape, matvec=product, dtype=np.float64)
        start = np.random.default_rng(len(self.values)).standard_normal(op.shape[0])
        values, _ = sla.eigsh(op, k=self.wanted, which=self.which, tol=self.tol, v0=start)
        self.values.append(np.sort(values))
        self.products.append(count)


def rows(name, end, wanted, matrix, exact, rounds):
    if exact is None:
        exact = ritz.eigenpairs(matrix, **{end: wanted}, rtol=1e-10).values.numpy()
    exact = exact[:wanted] if end == "smallest" else exact[-wanted:]
    norm = float(ritz.spectral_norm(matrix))
    jobs = {certify: ByRitz(matrix, end, wanted, certify) for certify in ("random", "none")}
    if "grid" in name:  # the factors of a random graph fill up
        jobs["inertia"] = ByRitz(matrix, end, wanted, "inertia")
    # ARPACK stops at tol |theta|: scale tol if the values are smaller than the norm.
    jobs["eigsh"] = ByScipy(matrix, end, wanted, RTOL * norm / np.abs(exact).max())
    jobs["eigsh, tol=0"] = ByScipy(matrix, end, wanted, 0.0)
    seconds = interleaved(jobs, rounds=rounds, warm_up=False)
    for key, job in jobs.items():
        wrong = [np.abs(values - exact).max() > RTOL * norm for values in job.values]
        yield {
            "matrix": name,
            "rows": matrix.shape[0],
            "pairs": f"{wanted} {end}",
            "who": key if "eigsh" in key else f"ritz, {key}",
            "wrong": f"{sum(wrong)} of {rounds}",
            "products": median(job.products),
            "seconds": median(seconds[key]),
            "over eigsh": ratio(seconds[key], seconds["eigsh"]),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for case in cases(options.scale):
        found += rows(*case, options.rounds)
        write("multiplicity", found)


if __name__ == "__main__":
    main()
