"""tr f(A) of a sparse matrix by Lanczos quadrature, against imate and scikit-primate.

The matrix is the Laplacian of a random graph with 200,000 nodes and a million edges, plus the
identity. All libraries use 32 probes x 30 steps, float64, two threads and no re-orthogonalisation,
so their accuracy should be equal. ``stderr`` is the standard error of the samples of each library,
and ``off`` the distance from a reference by ritz with other probes, in combined standard errors.
Building the operator of ritz is not timed; imate and primate take the matrix directly.
"""

import argparse

import imate
import numpy as np
import scipy.sparse as sp
import torch
from matrices import laplacian, random_graph
from primate.operators import MatrixFunction
from timing import interleaved, median, ratio, write

import ritz

NUM_STEPS = 30
FUNCTIONS = {
    "log": (torch.log, np.log),
    "inverse": (torch.reciprocal, np.reciprocal),
    "exp(-x)": (lambda x: torch.exp(-x), lambda x: np.exp(-x)),
}


def by_ritz(op, name, num_probes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return ritz.trace_function(
        op,
        FUNCTIONS[name][0],
        num_steps=NUM_STEPS,
        num_probes=num_probes,
        generator=generator,
    ).samples.numpy()


def by_imate(matrix, name, num_probes):
    call = {"log": imate.logdet, "inverse": imate.traceinv}[name]
    _, info = call(
        matrix,
        method="slq",
        min_num_samples=num_probes,
        max_num_samples=num_probes,
        error_rtol=1e-12,
        lanczos_degree=NUM_STEPS,
        orthogonalize=0,
        return_info=True,
        seed=1,
    )
    return np.ravel(info["convergence"]["samples"])


def by_primate(matrix, name, num_probes):
    function = MatrixFunction(matrix, fun=FUNCTIONS[name][1], deg=NUM_STEPS, orth=0)
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (num_probes, matrix.shape[0]))
    return np.array([float(function.quad(probe)[0]) for probe in signs])


def rows(name, matrix, op, reference, num_probes, rounds):
    answers = {}

    def keep(who, job, *arguments):
        answers[who] = job(*arguments, name, num_probes)

    jobs = {
        "ritz": lambda: keep("ritz", by_ritz, op),
        "primate": lambda: keep("primate", by_primate, matrix),
    }
    if name != "exp(-x)":  # imate has only powers and the logarithm
        jobs["imate"] = lambda: keep("imate", by_imate, matrix)
    seconds = interleaved(jobs, rounds=rounds)
    truth, spread = reference.mean(), reference.std(ddof=1) / len(reference) ** 0.5
    for who in jobs:
        samples = answers[who]
        stderr = samples.std(ddof=1) / len(samples) ** 0.5
        yield {
            "f": name,
            "who": who,
            "seconds": median(seconds[who]),
            "mean": float(samples.mean()),
            "stderr": float(stderr),
            "off": float(abs(samples.mean() - truth) / np.hypot(stderr, spread)),
            "over ritz": ratio(seconds[who], seconds["ritz"]),
            "target": "" if who == "ritz" else "> 1",
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--num-probes", type=int, default=32)
    parser.add_argument("--num-reference", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(2)
    graph = laplacian(random_graph(options.n, 5 * options.n))
    matrix = (graph + sp.eye_array(options.n)).tocsr()
    op = ritz.operators.SparseOperator(matrix)
    found = []
    for name in FUNCTIONS:
        reference = by_ritz(op, name, options.num_reference, seed=99)
        found += rows(name, matrix, op, reference, options.num_probes, options.rounds)
        write("functions", found)


if __name__ == "__main__":
    main()
