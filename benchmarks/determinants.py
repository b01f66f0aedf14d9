"""Log determinants compared with other libraries: kernel matrices, and many sparse rows.

The kernel matrices are those of ``ritz.studies.kernel_determinants``. Each library gets products
only, 1,500 of them; the other libraries use 30 steps x 50 probes. The sparse matrices are shifted
graph Laplacians, and the goal is an error of 1 %. ritz gets no lower bound of the eigenvalues; it
takes one from the entries, or finds one if it sees the products only. Times are processor times of
one thread. imate runs with its default of 20 steps, and with
the fewest steps that make it as accurate as ritz. The exact value for this comparison comes from a
factorisation, or from a run with error bars of 0.02 %.
"""

import argparse
import time
import warnings

import numpy as np
import scipy.sparse as sparse
import torch
from scipy.sparse.linalg import splu
from timing import interleaved, median, ratio, write

import ritz
from ritz.operators import FunctionOperator, SparseOperator
from ritz.studies import kernel_determinants as study

STEPS, PROBES = 30, 50
SHIFT = 1e-2  # added to the Laplacian: its smallest eigenvalue


def by_imate(matrix, steps=STEPS, probes=PROBES, seed=0, **options):
    import imate

    samples = {"min_num_samples": probes, "max_num_samples": probes, "lanczos_degree": steps}
    samples |= {"orthogonalize": -1, "seed": seed, "return_info": False}
    return imate.logdet(matrix, method="slq", **(samples | options))


def by_primate(matrix, seed=0):
    from primate.trace import hutch

    return hutch(matrix, fun="log", deg=STEPS, orth=STEPS, maxiter=PROBES, seed=seed)


def by_gpytorch(matrix, seed=0):
    import gpytorch
    from linear_operator import to_linear_operator

    torch.manual_seed(seed)
    with (
        gpytorch.settings.num_trace_samples(PROBES),
        gpytorch.settings.max_lanczos_quadrature_iterations(STEPS),
        gpytorch.settings.max_cholesky_size(1),
        gpytorch.settings.max_preconditioner_size(0),
    ):
        return float(to_linear_operator(torch.from_numpy(matrix)).logdet())


def kernels(args):
    """Return root-mean-square relative errors on one draw of each matrix."""
    peers = {"imate": by_imate, "primate": by_primate, "gpytorch": by_gpytorch}
    config = study.Config(size=args.size)
    for lengthscale in args.lengthscales:
        op, exact, condition = study._matrix(config, lengthscale, 0)
        hidden = FunctionOperator(op.matmat, n=args.size, dtype=op.dtype)
        row = {"matrix": f"kernel {lengthscale}", "condition": condition}
        errors = []
        for seed in range(args.seeds):
            found = ritz.logdet(
                hidden,
                method="krylov",
                floor=study.NOISE,
                generator=torch.Generator().manual_seed(seed),
            )
            errors.append((float(found) - exact) / exact)
        row["ritz"] = float(np.sqrt(np.mean(np.square(errors))))
        for name, peer in peers.items():
            row[name] = attempt(peer, op.matrix.numpy(), exact, args.seeds)
        yield row


def attempt(peer, matrix, exact, seeds):
    errors = []
    for seed in range(seeds):
        try:
            errors.append((float(peer(matrix, seed=seed)) - exact) / exact)
        except ImportError:
            return "absent"
        except Exception as error:
            return f"fails: {type(error).__name__}"
    return float(np.sqrt(np.mean(np.square(errors))))


def lattice(n, seed=0):
    """Return a grid with some long links, whose factor fills although its rows are short."""
    side = round(n**0.5)
    line = sparse.diags_array([-1.0, -1.0], offsets=[-1, 1], shape=(side, side))
    links = -sparse.kronsum(line, line)
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, side * side, (2, side * side // 100))
    extra = sparse.coo_array((np.ones(ends.shape[1]), tuple(ends)), shape=links.shape)
    weights = (links + extra + extra.T).tocsr()
    return (sparse.diags_array(weights.sum(1) + SHIFT) - weights).tocsr()


def long_rows(args, rows):
    """Return the seconds to get the log determinant of a large sparse matrix to 1 %."""
    matrix = lattice(rows)
    op = SparseOperator(matrix)
    hidden = FunctionOperator(op.matmat, n=op.shape[0], dtype=op.dtype)
    begin = time.process_time()
    exact = exact_logdet(matrix) if args.factor else float(ritz.logdet(op, rtol=5e-4, floor=SHIFT))
    factor = time.process_time() - begin
    jobs = {
        "ritz": lambda: ritz.logdet(op, rtol=0.01),
        "ritz, products only": lambda: ritz.logdet(hidden, rtol=0.01),
    }
    try:
        steps = fewest(matrix, exact, abs(float(jobs["ritz"]()) - exact))
        jobs["imate, 20 steps"] = lambda: by_imate(matrix, **asked(20))
        jobs[f"imate, {steps} steps"] = lambda: by_imate(matrix, **asked(steps))
    except ImportError:
        print("imate is absent", flush=True)
    found = {name: float(job()) for name, job in jobs.items()}
    print(jobs["ritz"](), flush=True)
    seconds = interleaved(jobs, rounds=args.rounds, clock=time.process_time)
    for name in jobs:
        yield {
            "what": name,
            "rows": op.shape[0],
            "s": median(seconds[name]),
            "over ritz": ratio(seconds[name], seconds["ritz"]),
            "error": found[name] / exact - 1,
        }
    if args.factor:
        slower = factor / median(seconds["ritz"])
        yield {"what": "SciPy's factor", "rows": op.shape[0], "s": factor, "over ritz": slower,
               "error": 0.0}  # fmt: skip


def asked(steps):
    """Return options of imate for 1 %, which count the sampling error only."""
    return {"steps": steps, "error_rtol": 0.01, "orthogonalize": 0, "min_num_samples": 5,
            "max_num_samples": 50}  # fmt: skip


def fewest(matrix, exact, error):
    """Return the fewest steps with which the error of imate is not larger."""
    for steps in range(3, 20):
        if abs(float(by_imate(matrix, **asked(steps))) - exact) <= error:
            return steps
    return 20


def exact_logdet(matrix):
    options = {"SymmetricMode": True}
    factor = splu(matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0, options=options)
    return float(np.log(factor.U.diagonal()).sum())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lengthscales", type=float, nargs="*", default=study.LENGTHSCALES)
    parser.add_argument("--rows", type=int, nargs="*", default=[40_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--factor", action="store_true", help="factor the sparse matrix as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.lengthscales:
        write("determinants_kernels", list(kernels(args)))
    write("determinants_sparse", [row for rows in args.rows for row in long_rows(args, rows)])


if __name__ == "__main__":
    main()
